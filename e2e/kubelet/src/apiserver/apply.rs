//! Server-side apply: the manager of each field.
//!
//! A manager owns the leaves that it applied: scalars, lists and maps that are replaced as a whole, and the membership of items
//! in lists that are merged by key. A leaf that its last owner no longer applies is removed.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

/// One step to a field, or to an item of a list that is merged by key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Field(String),
    Item(&'static [&'static str], Vec<(String, String)>),
    Member(String),
}

pub(super) type Path = Vec<Step>;

/// The leaves that each manager owns. Managers of different operations or subresources are different managers.
pub(super) type Owners = BTreeMap<String, BTreeSet<Path>>;

/// How a value is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Merge {
    Whole,
    Fields,
    Keyed(&'static [&'static str]),
    Members,
}

/// Returns how the value at a path is merged, by the markers of the Kubernetes types.
fn merge_of(path: &[Step], value: &Value) -> Merge {
    let fields: Vec<&str> = path
        .iter()
        .map(|step| match step {
            Step::Field(name) => name.as_str(),
            Step::Item(..) | Step::Member(_) => "[]",
        })
        .collect();
    match (value, &fields[..]) {
        (Value::Array(_), ["metadata", "finalizers"]) => Merge::Members,
        (Value::Array(_), ["metadata", "ownerReferences"] | ["status", "reservedFor"]) => {
            Merge::Keyed(&["uid"])
        }
        (Value::Array(_), ["status", "devices"]) => Merge::Keyed(&["driver", "device", "pool", "shareID"]),
        (Value::Array(_), ["status", "conditions"] | ["status", "devices", "[]", "conditions"]) => {
            Merge::Keyed(&["type"])
        }
        (Value::Array(_), _) => Merge::Whole,
        (Value::Object(_), ["spec" | "allocation", "nodeSelector"] | ["status", "devices", "[]", "data"]) => {
            Merge::Whole
        }
        (Value::Object(_), ["status", "allocation", "nodeSelector"]) => Merge::Whole,
        (Value::Object(map), _) if !map.is_empty() => Merge::Fields,
        _ => Merge::Whole,
    }
}

fn keys_of(item: &Value, keys: &[&str]) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    keys.iter().filter_map(|key| Some(((*key).to_owned(), text(item.get(key)?)))).collect()
}

/// Returns the leaves of an object; the membership of an item in a list has the value null.
fn leaves(object: &Value) -> BTreeMap<Path, Value> {
    let mut found = BTreeMap::new();
    collect(&mut Vec::new(), object, &mut found);
    found
}

fn collect(path: &mut Path, value: &Value, found: &mut BTreeMap<Path, Value>) {
    match (merge_of(path, value), value) {
        (Merge::Fields, Value::Object(map)) => {
            for (name, value) in map {
                path.push(Step::Field(name.clone()));
                collect(path, value, found);
                path.pop();
            }
        }
        (Merge::Keyed(keys), Value::Array(items)) => {
            for item in items {
                path.push(Step::Item(keys, keys_of(item, keys)));
                found.insert(path.clone(), Value::Null);
                collect(path, item, found);
                path.pop();
            }
        }
        (Merge::Members, Value::Array(items)) => {
            for item in items {
                path.push(Step::Member(item.as_str().unwrap_or_default().to_owned()));
                found.insert(path.clone(), item.clone());
                path.pop();
            }
        }
        _ => drop(found.insert(path.clone(), value.clone())),
    }
}

/// Sets a leaf, and creates the maps, lists and items above it.
fn set(object: &mut Value, path: &[Step], leaf: Value) {
    let Some((step, rest)) = path.split_first() else {
        if !(leaf.is_null() && object.is_object()) {
            *object = leaf;
        }
        return;
    };
    match step {
        Step::Field(name) => {
            if !object.is_object() {
                *object = Value::Object(Map::new());
            }
            set(&mut object[name], rest, leaf);
        }
        Step::Item(names, keys) => {
            let items = list(object);
            let at = items.iter().position(|item| keys_of(item, names) == *keys);
            let at = at.unwrap_or_else(|| {
                let key = |(key, value): &(String, String)| (key.clone(), Value::String(value.clone()));
                items.push(Value::Object(keys.iter().map(key).collect()));
                items.len() - 1
            });
            set(&mut items[at], rest, leaf);
        }
        Step::Member(_) => {
            let items = list(object);
            if !items.contains(&leaf) {
                items.push(leaf);
            }
        }
    }
}

fn list(object: &mut Value) -> &mut Vec<Value> {
    if !object.is_array() {
        *object = Value::Array(Vec::new());
    }
    object.as_array_mut().expect("it was made a list")
}

/// Removes a leaf, and the maps and lists above it that are empty then.
fn remove(object: &mut Value, path: &[Step]) {
    let Some((step, rest)) = path.split_first() else { return };
    match step {
        Step::Field(name) => {
            let Some(map) = object.as_object_mut() else { return };
            if let Some(value) = map.get_mut(name).filter(|_| !rest.is_empty()) {
                remove(value, rest);
                if !is_empty(value) {
                    return;
                }
            }
            map.remove(name);
        }
        Step::Item(names, keys) => {
            let Some(items) = object.as_array_mut() else { return };
            if rest.is_empty() {
                items.retain(|item| keys_of(item, names) != *keys);
            } else if let Some(item) = items.iter_mut().find(|item| keys_of(item, names) == *keys) {
                remove(item, rest);
            }
        }
        Step::Member(member) => {
            if let Some(items) = object.as_array_mut() {
                items.retain(|item| item != member);
            }
        }
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// Fields that belong to the server or to the identity of the object have no owner.
fn is_owned(path: &Path) -> bool {
    const SERVER: [&str; 8] = [
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "managedFields",
    ];
    match &path[..] {
        [] => false,
        [Step::Field(top)] => top != "apiVersion" && top != "kind",
        [Step::Field(top), Step::Field(name)] if top == "metadata" => !SERVER.contains(&name.as_str()),
        _ => true,
    }
}

fn owned_leaves(object: &Value) -> BTreeMap<Path, Value> {
    let mut found = leaves(object);
    found.retain(|path, _| is_owned(path));
    found
}

/// Applies `config` in the name of `manager` to `live`. Fails with the names of the other managers whose fields would change, unless
/// `force` takes these fields from them.
pub(super) fn apply(
    live: &mut Value,
    owners: &mut Owners,
    manager: &str,
    config: &Value,
    force: bool,
) -> Result<(), Vec<String>> {
    let wanted = owned_leaves(config);
    let present = owned_leaves(live);
    let differs = |path: &Path| present.get(path).is_some_and(|value| Some(value) != wanted.get(path));
    let conflicts: Vec<(String, Path)> = owners
        .iter()
        .filter(|(other, _)| *other != manager)
        .flat_map(|(other, paths)| paths.iter().map(move |path| (other.clone(), path.clone())))
        .filter(|(_, path)| wanted.contains_key(path) && differs(path))
        .collect();
    if !force && !conflicts.is_empty() {
        return Err(conflicts
            .into_iter()
            .map(|(other, path)| format!("{other:?}: {}", written(&path)))
            .collect());
    }
    for (other, path) in conflicts {
        owners.entry(other).or_default().remove(&path);
    }
    let before = owners.insert(manager.to_owned(), wanted.keys().cloned().collect()).unwrap_or_default();
    for path in before.into_iter().filter(|path| !wanted.contains_key(path)) {
        if !owners.values().any(|paths| paths.contains(&path)) {
            remove(live, &path);
        }
    }
    for (path, leaf) in wanted {
        set(live, &path, leaf);
    }
    owners.retain(|_, paths| !paths.is_empty());
    Ok(())
}

/// Gives the leaves that an update has changed to `manager`.
pub(super) fn update(before: &Value, after: &Value, owners: &mut Owners, manager: &str) {
    let (before, after) = (owned_leaves(before), owned_leaves(after));
    let changed: BTreeSet<Path> = after
        .iter()
        .filter(|(path, leaf)| before.get(*path) != Some(leaf))
        .map(|(path, _)| path.clone())
        .collect();
    let gone = |path: &Path| before.contains_key(path) && !after.contains_key(path);
    for (other, paths) in &mut *owners {
        paths.retain(|path| !gone(path) && (other == manager || !changed.contains(path)));
    }
    if !changed.is_empty() {
        owners.entry(manager.to_owned()).or_default().extend(changed);
    }
    owners.retain(|_, paths| !paths.is_empty());
}

fn written(path: &Path) -> String {
    path.iter()
        .map(|step| match step {
            Step::Field(name) => format!(".{name}"),
            Step::Item(_, keys) => {
                let keys: Vec<String> = keys.iter().map(|(key, value)| format!("{key}={value:?}")).collect();
                format!("[{}]", keys.join(","))
            }
            Step::Member(name) => format!("[{name:?}]"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_without_an_owner_are_removed() {
        let mut owners = Owners::default();
        let mut live = json!({"metadata": {"name": "a"}});
        let first =
            json!({"metadata": {"name": "a", "labels": {"x": "1", "y": "2"}}, "spec": {"devices": [1, 2]}});
        apply(&mut live, &mut owners, "one", &first, false).unwrap();
        assert_eq!(live, first);
        let second = json!({"metadata": {"name": "a", "labels": {"y": "2"}}});
        apply(&mut live, &mut owners, "one", &second, false).unwrap();
        assert_eq!(live, second, "lists are removed as a whole");
        apply(&mut live, &mut owners, "two", &second, false).unwrap();
        apply(&mut live, &mut owners, "one", &json!({}), false).unwrap();
        assert_eq!(live, second, "another manager owns it too");
    }

    #[test]
    fn another_value_is_a_conflict_unless_forced() {
        let mut owners = Owners::default();
        let mut live = json!({});
        apply(&mut live, &mut owners, "one", &json!({"spec": {"a": 1, "b": 1}}), false).unwrap();
        let edited = json!({"spec": {"a": 2, "b": 1}});
        update(&live, &edited, &mut owners, "editor");
        live = edited;
        let config = json!({"spec": {"a": 3, "b": 1}});
        let refused = apply(&mut live, &mut owners, "one", &config, false).unwrap_err();
        assert_eq!(refused, ["\"editor\": .spec.a"]);
        apply(&mut live, &mut owners, "one", &config, true).unwrap();
        assert_eq!((&live, owners.len()), (&config, 1), "the editor owns nothing any more");
    }

    #[test]
    fn items_of_two_managers_live_side_by_side() {
        let mut owners = Owners::default();
        let mut live = json!({});
        let of = |driver: &str, share: Option<&str>, data: u32| {
            let mut item = json!({"driver": driver, "device": "d", "pool": "p", "data": {"n": data}});
            if let Some(share) = share {
                item["shareID"] = json!(share);
            }
            json!({"status": {"devices": [item]}})
        };
        apply(&mut live, &mut owners, "one", &of("a", None, 1), false).unwrap();
        apply(&mut live, &mut owners, "two", &of("a", Some("s"), 2), false).unwrap();
        apply(&mut live, &mut owners, "two", &of("a", Some("s"), 3), false).unwrap();
        let data = |live: &Value| {
            live["status"]["devices"]
                .as_array()
                .unwrap()
                .iter()
                .map(|item| item["data"]["n"].clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(data(&live), [json!(1), json!(3)]);
        apply(&mut live, &mut owners, "one", &json!({}), false).unwrap();
        assert_eq!(data(&live), [json!(3)]);
    }
}
