//! The objects, their versions, and the log of their changes.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::apply::{self, Owners};
use super::errors::ApiError;
use super::kinds::{Kind, field};
use super::select::Selection;
use super::validate::validate;
use crate::random::Chance;

/// Changes that a watch can still be resumed from.
const LOG_LEN_MAX: usize = 20_000;

pub(super) type Name = (String, String);

#[derive(Clone, Debug)]
struct Entry {
    value: Value,
    owners: Owners,
}

/// One change of one object.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) kind: &'static Kind,
    pub(super) before: Option<Value>,
    /// `None` if it was deleted.
    pub(super) after: Option<Value>,
}

/// The identity and options of a writer, and the object that it expects.
#[derive(Clone, Debug, Default)]
pub(super) struct Writer {
    pub(super) manager: String,
    pub(super) subresource: Option<String>,
    pub(super) force: bool,
    pub(super) dry_run: bool,
}

/// The kinds of patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patch {
    Apply,
    Merge,
    Json,
}

#[derive(Debug)]
pub(super) struct Store {
    objects: BTreeMap<(&'static Kind, Name), Entry>,
    version: u64,
    log: VecDeque<Change>,
    /// The version of the last change that is no longer in the log.
    compacted: u64,
    chance: Chance,
    now: Timestamp,
}

impl Store {
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            objects: BTreeMap::new(),
            version: 1,
            log: VecDeque::new(),
            compacted: 0,
            chance: Chance::new(0),
            now,
        }
    }

    pub(super) fn set_now(&mut self, now: Timestamp) {
        self.now = now;
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Forgets the log, so that watches from earlier versions fail.
    pub(super) fn compact(&mut self) {
        self.compacted = self.version;
        self.log.clear();
    }

    /// Returns the changes after `version`.
    pub(super) fn since(&self, version: u64) -> Result<impl Iterator<Item = &Change>, ApiError> {
        if version < self.compacted {
            return Err(ApiError::expired(version, self.compacted));
        }
        let start = self.log.partition_point(|change| change.version <= version);
        Ok(self.log.range(start..))
    }

    pub(super) fn get(&self, kind: &'static Kind, namespace: &str, name: &str) -> Result<Value, ApiError> {
        self.stored(kind, namespace, name).map(|stored| stored.value.clone())
    }

    fn stored(&self, kind: &'static Kind, namespace: &str, name: &str) -> Result<&Entry, ApiError> {
        let key = (kind, (namespace.to_owned(), name.to_owned()));
        self.objects.get(&key).ok_or_else(|| ApiError::not_found(kind, name))
    }

    /// Returns the selected objects after a name, in the order of their names.
    pub(super) fn list(
        &self,
        kind: &'static Kind,
        selection: &Selection,
        after: Option<Name>,
    ) -> impl Iterator<Item = (&Name, &Value)> {
        let start = match after {
            Some(name) => Bound::Excluded((kind, name)),
            None => Bound::Included((kind, Name::default())),
        };
        self.objects
            .range((start, Bound::Unbounded))
            .take_while(move |((of, _), _)| *of == kind)
            .map(|((_, name), stored)| (name, &stored.value))
            .filter(|(_, value)| selection.matches(value))
    }

    pub(super) fn uid(&mut self) -> String {
        let (a, b) = (self.chance.number(), self.chance.number());
        let text = format!("{a:016x}{b:016x}");
        format!("{}-{}-4{}-a{}-{}", &text[..8], &text[8..12], &text[13..16], &text[17..20], &text[20..])
    }

    pub(super) fn create(
        &mut self,
        kind: &'static Kind,
        namespace: &str,
        mut value: Value,
        writer: &Writer,
    ) -> Result<Value, ApiError> {
        let uid = self.uid();
        let metadata = metadata(&mut value)?;
        if let Some(prefix) = metadata.get("generateName").and_then(Value::as_str) {
            let generated = format!("{prefix}{}", &uid[..5]);
            metadata.entry("name").or_insert(Value::String(generated));
        }
        let Some(name) = metadata.get("name").and_then(Value::as_str).map(str::to_owned) else {
            let what = "metadata.name: Required value: name or generateName is required";
            return Err(ApiError::invalid(kind, "", what));
        };
        if kind.namespaced {
            let given = metadata.entry("namespace").or_insert(json!(namespace));
            if given != namespace {
                let message =
                    "the namespace of the provided object does not match the namespace sent on the request";
                return Err(ApiError::bad_request(message));
            }
        }
        if metadata.get("resourceVersion").and_then(Value::as_str).is_some_and(|version| !version.is_empty())
        {
            let message = "resourceVersion should not be set on objects to be created";
            return Err(ApiError::bad_request(message));
        }
        if self.stored(kind, namespace, &name).is_ok() {
            return Err(ApiError::already_exists(kind, &name));
        }
        metadata.insert("uid".to_owned(), Value::String(uid));
        metadata.insert("creationTimestamp".to_owned(), json!(self.now));
        metadata.insert("generation".to_owned(), json!(1));
        if kind.status && kind.kind != "Pod" {
            value.as_object_mut().map(|object| object.remove("status"));
        }
        let mut owners = Owners::default();
        apply::update(&Value::Null, &value, &mut owners, &manager_key(writer, "Update"));
        self.commit(kind, namespace, &name, None, Entry { value, owners }, writer)
    }

    /// Replaces an object, or its status.
    pub(super) fn update(
        &mut self,
        kind: &'static Kind,
        namespace: &str,
        name: &str,
        value: Value,
        writer: &Writer,
    ) -> Result<Value, ApiError> {
        let before = self.stored(kind, namespace, name)?.clone();
        let value = self.merged(kind, name, &before.value, value, writer)?;
        let mut owners = before.owners.clone();
        apply::update(&before.value, &value, &mut owners, &manager_key(writer, "Update"));
        self.commit(kind, namespace, name, Some(before), Entry { value, owners }, writer)
    }

    /// Takes from `value` what the request may change, and the rest from the object as it is.
    fn merged(
        &self,
        kind: &'static Kind,
        name: &str,
        before: &Value,
        mut value: Value,
        writer: &Writer,
    ) -> Result<Value, ApiError> {
        let metadata = metadata(&mut value)?;
        let same = |key: &str| match metadata.get(key).and_then(Value::as_str) {
            None | Some("") => true,
            Some(given) => before["metadata"][key] == given,
        };
        if !same("name") || !same("namespace") {
            let message = "the name of the object does not match the name on the URL";
            return Err(ApiError::bad_request(message));
        }
        if !same("uid") {
            let given = metadata.get("uid").and_then(Value::as_str).unwrap_or_default();
            let uid = before["metadata"]["uid"].as_str().unwrap_or_default();
            let why = format!("Precondition failed: UID in precondition: {given}, UID in object meta: {uid}");
            return Err(ApiError::conflict(kind, name, &why));
        }
        if !same("resourceVersion") {
            return Err(ApiError::modified(kind, name));
        }
        let mut merged = before.clone();
        if writer.subresource.is_some() {
            merged["status"] = value["status"].take();
            return Ok(merged);
        }
        for key in ["labels", "annotations", "finalizers", "ownerReferences"] {
            let given = value["metadata"][key].take();
            merged["metadata"][key] = given;
        }
        let object = merged.as_object_mut().expect("stored objects are maps");
        let fixed = |key: &str| key == "metadata" || (key == "status" && kind.status);
        object.retain(|key, _| fixed(key));
        let given = value.as_object().cloned().unwrap_or_default();
        object.extend(given.into_iter().filter(|(key, _)| !fixed(key)));
        Ok(merged)
    }

    pub(super) fn patch(
        &mut self,
        kind: &'static Kind,
        namespace: &str,
        name: &str,
        patch: (Patch, &Value),
        writer: &Writer,
    ) -> Result<Value, ApiError> {
        let (patch, body) = patch;
        if patch == Patch::Apply {
            return self.apply(kind, namespace, name, body, writer);
        }
        let mut value = self.get(kind, namespace, name)?;
        // Without a version in the patch it applies to whatever there is.
        metadata(&mut value)?.remove("resourceVersion");
        match patch {
            Patch::Merge => json_patch::merge(&mut value, body),
            Patch::Json => {
                let patch: json_patch::Patch = serde_json::from_value(body.clone())
                    .map_err(|error| ApiError::bad_request(format!("error decoding patch: {error}")))?;
                json_patch::patch(&mut value, &patch)
                    .map_err(|error| ApiError::invalid(kind, name, &error.to_string()))?;
            }
            Patch::Apply => unreachable!("handled above"),
        }
        self.update(kind, namespace, name, value, writer)
    }

    fn apply(
        &mut self,
        kind: &'static Kind,
        namespace: &str,
        name: &str,
        config: &Value,
        writer: &Writer,
    ) -> Result<Value, ApiError> {
        if writer.manager.is_empty() {
            let message = "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch";
            return Err(ApiError::new(422, "Invalid", message));
        }
        let (api_version, kind_name) = (kind.api_version(), kind.kind);
        if config["apiVersion"] != api_version || config["kind"] != kind_name {
            let message =
                format!("the applied object must have apiVersion {api_version} and kind {kind_name}");
            return Err(ApiError::bad_request(message));
        }
        let mut config = config.clone();
        let given = metadata(&mut config)?.get("name").and_then(Value::as_str).unwrap_or(name).to_owned();
        if given != name {
            let message =
                format!("the name of the object ({given}) does not match the name on the URL ({name})");
            return Err(ApiError::bad_request(message));
        }
        let key = manager_key(writer, "Apply");
        let Ok(before) = self.stored(kind, namespace, name).cloned() else {
            if writer.subresource.is_some() || config["metadata"]["uid"].is_string() {
                return Err(ApiError::not_found(kind, name));
            }
            metadata(&mut config)?.insert("name".to_owned(), json!(name));
            let mut owners = Owners::default();
            let _ = apply::apply(&mut json!({}), &mut owners, &key, &config, true);
            let created = self.create(kind, namespace, config, writer)?;
            if let Some(stored) = self.objects.get_mut(&(kind, (namespace.to_owned(), name.to_owned()))) {
                stored.owners = owners;
            }
            return Ok(created);
        };
        let (mut value, mut owners) = (before.value.clone(), before.owners.clone());
        // The identity and the version are checked as in an update; the rest is merged.
        self.merged(kind, name, &before.value, config.clone(), writer)?;
        let object = config.as_object_mut().expect("its metadata were read");
        if writer.subresource.is_some() {
            object.retain(|key, _| key == "status");
        } else if kind.status {
            object.remove("status");
        }
        apply::apply(&mut value, &mut owners, &key, &config, writer.force).map_err(|conflicts| {
            let list = conflicts.iter().map(|with| format!("conflict with {with}")).collect::<Vec<_>>();
            let s = if list.len() == 1 { "" } else { "s" };
            let message = format!("Apply failed with {} conflict{s}: {}", list.len(), list.join(", "));
            ApiError::new(409, "Conflict", message)
        })?;
        self.commit(kind, namespace, name, Some(before), Entry { value, owners }, writer)
    }

    /// Deletes an object, or marks it if it has finalizers. Returns its last state.
    pub(super) fn delete(
        &mut self,
        kind: &'static Kind,
        namespace: &str,
        name: &str,
        preconditions: &Value,
    ) -> Result<Value, ApiError> {
        let before = self.stored(kind, namespace, name)?.clone();
        for (key, what) in [("uid", "UID"), ("resourceVersion", "ResourceVersion")] {
            if let Some(given) = preconditions.get(key).and_then(Value::as_str) {
                let is = before.value["metadata"][key].as_str().unwrap_or_default();
                if given != is {
                    let why = format!(
                        "Precondition failed: {what} in precondition: {given}, {what} in object meta: {is}"
                    );
                    return Err(ApiError::conflict(kind, name, &why));
                }
            }
        }
        let finalizers =
            field(&before.value, "metadata.finalizers").as_array().is_some_and(|list| !list.is_empty());
        if finalizers {
            let mut marked = before.clone();
            if marked.value["metadata"].get("deletionTimestamp").is_none() {
                marked.value["metadata"]["deletionTimestamp"] = json!(self.now);
                marked.value["metadata"]["deletionGracePeriodSeconds"] = json!(0);
            }
            return self.commit(kind, namespace, name, Some(before), marked, &Writer::default());
        }
        Ok(self.erase(kind, namespace, name, before.value))
    }

    fn erase(&mut self, kind: &'static Kind, namespace: &str, name: &str, before: Value) -> Value {
        self.objects.remove(&(kind, (namespace.to_owned(), name.to_owned())));
        self.version += 1;
        let mut last = before;
        last["metadata"]["resourceVersion"] = Value::String(self.version.to_string());
        let change = Change { version: self.version, kind, before: Some(last.clone()), after: None };
        self.log(change);
        last
    }

    /// Deletes the selected objects, and returns them.
    pub(super) fn delete_collection(&mut self, kind: &'static Kind, selection: &Selection) -> Vec<Value> {
        let names: Vec<Name> = self.list(kind, selection, None).map(|(name, _)| name.clone()).collect();
        let deleted = names.iter().map(|(namespace, name)| self.delete(kind, namespace, name, &Value::Null));
        deleted.filter_map(Result::ok).collect()
    }

    /// Stores a new state, unless it is the old one.
    fn commit(
        &mut self,
        kind: &'static Kind,
        namespace: &str,
        name: &str,
        before: Option<Entry>,
        mut after: Entry,
        writer: &Writer,
    ) -> Result<Value, ApiError> {
        prune(&mut after.value);
        after.value["apiVersion"] = json!(kind.api_version());
        after.value["kind"] = json!(kind.kind);
        let old = before.as_ref().map(|before| &before.value);
        validate(kind, name, old, &after.value)?;
        let key = (kind, (namespace.to_owned(), name.to_owned()));
        if old == Some(&after.value) {
            self.objects.insert(key, after.clone());
            return Ok(after.value);
        }
        if let Some(old) = old.filter(|old| old["spec"] != after.value["spec"]) {
            let generation = old["metadata"]["generation"].as_u64().unwrap_or_default() + 1;
            after.value["metadata"]["generation"] = json!(generation);
        }
        if writer.dry_run {
            return Ok(after.value);
        }
        let metadata = &after.value["metadata"];
        if metadata["deletionTimestamp"].is_string() && metadata["finalizers"].is_null() {
            return Ok(self.erase(kind, namespace, name, after.value));
        }
        self.version += 1;
        after.value["metadata"]["resourceVersion"] = Value::String(self.version.to_string());
        let value = after.value.clone();
        let before = before.map(|before| before.value);
        self.log(Change { version: self.version, kind, before, after: Some(value.clone()) });
        self.objects.insert(key, after);
        Ok(value)
    }

    fn log(&mut self, change: Change) {
        self.log.push_back(change);
        if self.log.len() > LOG_LEN_MAX {
            self.compacted = self.log.pop_front().map_or(self.compacted, |change| change.version);
        }
    }
}

fn manager_key(writer: &Writer, operation: &str) -> String {
    let Writer { manager, subresource, .. } = writer;
    match (operation, subresource) {
        ("Apply", None) => manager.clone(),
        (operation, None) => format!("{manager} using {operation}"),
        (operation, Some(subresource)) => format!("{manager} using {operation} on {subresource}"),
    }
}

fn metadata(value: &mut Value) -> Result<&mut Map<String, Value>, ApiError> {
    let object = value.as_object_mut().ok_or_else(|| ApiError::bad_request("the body must be an object"))?;
    let metadata = object.entry("metadata").or_insert_with(|| json!({}));
    metadata.as_object_mut().ok_or_else(|| ApiError::bad_request("metadata must be an object"))
}

/// Removes what the server does not keep: nulls, and empty lists and maps of metadata.
fn prune(value: &mut Value) {
    let empty = |value: &Value| {
        value.is_null()
            || value.as_object().is_some_and(Map::is_empty)
            || value.as_array().is_some_and(Vec::is_empty)
    };
    if let Some(object) = value.as_object_mut() {
        object.retain(|_, value| !value.is_null());
    }
    for part in ["metadata", "status"] {
        if let Some(part) = value.get_mut(part).and_then(Value::as_object_mut) {
            part.retain(|_, value| !empty(value));
            part.remove("managedFields");
        }
    }
    if value.get("status").is_some_and(empty) {
        value.as_object_mut().map(|object| object.remove("status"));
    }
}
