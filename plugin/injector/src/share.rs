//! Shares a pool between pods of programs that know nothing of shmesh: its directory and environment, and no sidecar.

use std::collections::BTreeSet;

use serde_json::Value;
use shmesh::config::Position;

use crate::config::{Config, Pool};
use crate::edit::{Edit, ShapeError};
use crate::plan::{chosen, pool_names, read};
use crate::pod::{self, Container, SHM_DIR};
use crate::preload::Preload;
use crate::refusal::Refusal;
use crate::rules::{other_mount, user_namespace};

/// A pool, and the containers of a pod that get it.
#[derive(Debug)]
pub(crate) struct Share<'a> {
    pod: &'a Value,
    config: &'a Config,
    /// Key of the annotation that names the pool.
    pub(crate) annotation: String,
    pool: &'a Pool,
    participants: BTreeSet<String>,
    preload: Option<Preload>,
}

impl<'a> Share<'a> {
    /// Reads the annotations. Returns `None` if the pod shares no pool.
    pub(crate) fn of(pod: &'a Value, config: &'a Config) -> Result<Option<Self>, Refusal> {
        let annotation = config.annotation("share");
        let Some(text) = read(pod, &annotation)? else { return Ok(None) };
        let pool = pool(text.trim(), config)
            .map_err(|(what, remedy)| Refusal::new(&annotation, Position::default(), "pool", what, remedy))?;
        // Programs in init containers prepare shared memory too, and had the node's by `hostIPC`.
        let participants = chosen(pod, config, |_| true)?;
        let preload = Preload::of(pod, config)?;
        let share = Self { pod, config, annotation, pool, participants, preload };
        share.check_annotations()?;
        Ok(Some(share))
    }

    /// Returns the first refusal, or all warnings.
    pub(crate) fn check(&self) -> Result<Vec<String>, Refusal> {
        if pod::text(self.pod, "/spec/os/name") == Some("windows") {
            let what = "pools need Linux, and spec.os.name is windows";
            return Err(self.refuse("os", what, "remove the annotation"));
        }
        if pod::is_true(self.pod, "/spec/hostIPC") {
            let what =
                format!("spec.hostIPC puts the node's shared memory at {SHM_DIR}, in place of the pool's");
            return Err(self.refuse("hostIPC", what, "remove hostIPC, which this annotation replaces"));
        }
        if let Some((what, remedy)) = user_namespace(self.pod, self.pool) {
            return Err(self.refuse("userNamespace", what, remedy));
        }
        for container in self.containers() {
            if let Some(what) = other_mount(&container, self.config, self.pool) {
                let remedy = format!(
                    "remove it, or leave the container out by {}",
                    self.config.annotation("containers")
                );
                return Err(self.refuse("mount", format!("{what}, where the pool's memory is"), remedy));
            }
        }
        if let Some(preload) = &self.preload {
            preload.check_names(self.pod)?;
            self.containers().try_for_each(|container| preload.check(&container))?;
        }
        let Pool { name, mount_path, .. } = self.pool;
        let is_elsewhere = mount_path.trim_end_matches('/') != SHM_DIR;
        Ok(is_elsewhere
            .then(|| {
                format!(
                    "pool {name} is mounted at {mount_path}: programs that look for shared memory at {SHM_DIR} do not \
                     find it there"
                )
            })
            .into_iter()
            .collect())
    }

    /// Refuses annotations of links, which bring a directory too.
    fn check_annotations(&self) -> Result<(), Refusal> {
        let links = self.config.annotation("links");
        if read(self.pod, &links)?.is_some() {
            let what =
                format!("{links} is there too, and the containers on a link have the directory of its scope");
            let remedy = format!(
                "remove one of the two; give a container that is on no link the pool by the resource {}",
                self.resource()
            );
            return Err(self.refuse("scope", what, remedy));
        }
        let size = self.config.annotation("size");
        if read(self.pod, &size)?.is_some() {
            let what = format!("{size} is the size of a pod's own directory, and this one is the pool's");
            return Err(self.refuse("size", what, format!("remove {size}")));
        }
        Ok(())
    }

    fn containers(&self) -> impl Iterator<Item = Container<'a>> {
        pod::containers(self.pod).filter(|container| self.participants.contains(container.name()))
    }

    /// Adds the pool to the containers. Where the pod runs is left to it: a pool is on every node.
    pub(crate) fn add_to(&self, edit: &mut Edit) -> Result<(), ShapeError> {
        for container in self.containers() {
            edit.pool_resource(&container, &self.resource())?;
            edit.directory_variable(&container, &self.pool.mount_path)?;
            if let Some(preload) = &self.preload {
                preload.add_to(&container, edit)?;
            }
        }
        // Last, because the init container shifts the indexes of the others.
        self.preload.as_ref().map_or(Ok(()), |preload| preload.bring(self.pod, self.config, edit))
    }

    fn resource(&self) -> String {
        format!("{}/{}", self.config.domain, self.pool.name)
    }

    fn refuse(&self, reason: &'static str, what: impl Into<String>, remedy: impl Into<String>) -> Refusal {
        Refusal::new(&self.annotation, Position::default(), reason, what, remedy)
    }
}

/// Finds the pool that the annotation names; the error is the problem and the remedy.
fn pool<'a>(text: &str, config: &'a Config) -> Result<&'a Pool, (String, String)> {
    let known = pool_names(config, "remove the annotation");
    if text.is_empty() {
        return Err(("the annotation is empty; it must name a pool".to_owned(), known));
    }
    if text.starts_with("claim/") {
        return Err((format!("{text:?}: claims need DRA mode, which does not exist yet"), known));
    }
    if let Some(name) = text.strip_prefix("pool/") {
        return Err((
            format!("{text:?} is not the name of a pool"),
            format!("write the name alone: {name:?}"),
        ));
    }
    config.pool(text).ok_or_else(|| (format!("there is no pool {text:?}"), known))
}
