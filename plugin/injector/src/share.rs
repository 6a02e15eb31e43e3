//! Shares a pool or a claim between pods of programs that know nothing of shmesh: its directory and environment, and no sidecar.

use std::collections::BTreeSet;

use serde_json::Value;
use shmesh::config::Position;

use crate::config::{Config, Pool};
use crate::edit::{Edit, ShapeError};
use crate::plan::{chosen, pool_names, read};
use crate::pod::{self, Container, SHM_DIR};
use crate::pod_claims::{self, PodClaims};
use crate::preload::Preload;
use crate::refusal::Refusal;
use crate::rules::{CLAIM_ELSEWHERE, other_mount, user_namespace};

/// The directory that is shared.
#[derive(Debug)]
enum SharedDirectory<'a> {
    Pool(&'a Pool),
    Claim(String, PodClaims),
}

/// A pool or a claim, and the containers of a pod that get it.
#[derive(Debug)]
pub(crate) struct ShareAnnotation<'a> {
    pod: &'a Value,
    config: &'a Config,
    /// Key of the annotation that names the pool or claim.
    pub(crate) annotation: String,
    shared: SharedDirectory<'a>,
    participants: BTreeSet<String>,
    preload: Option<Preload>,
}

impl<'a> ShareAnnotation<'a> {
    /// Reads the annotations. Returns `None` if the pod shares nothing.
    pub(crate) fn of(pod: &'a Value, config: &'a Config) -> Result<Option<Self>, Refusal> {
        let annotation = config.annotation("share");
        let Some(text) = read(pod, &annotation)? else { return Ok(None) };
        let refuse = |reason| {
            let annotation = &annotation;
            move |(what, remedy): (String, String)| {
                Refusal::new(annotation, Position::default(), reason, what, remedy)
            }
        };
        let shared = match text.trim().strip_prefix("claim/") {
            Some(claim) => {
                let mut claims = PodClaims::new([claim.to_owned()]);
                claims.add(pod, claim).map_err(refuse("claim"))?;
                SharedDirectory::Claim(claim.to_owned(), claims)
            }
            None => SharedDirectory::Pool(pool(text.trim(), config).map_err(refuse("pool"))?),
        };
        // Programs in init containers prepare shared memory too, and had the node's by `hostIPC`.
        let participants = chosen(pod, config, |_| true)?;
        let preload = Preload::of(pod, config)?;
        let share = Self { pod, config, annotation, shared, participants, preload };
        share.check_annotations()?;
        Ok(Some(share))
    }

    /// Returns the first refusal, or all warnings.
    pub(crate) fn check(&self) -> Result<Vec<String>, Refusal> {
        if pod::text(self.pod, "/spec/os/name") == Some("windows") {
            let what = "shared directories need Linux, and spec.os.name is windows";
            return Err(self.refuse("os", what, "remove the annotation"));
        }
        if pod::is_true(self.pod, "/spec/hostIPC") {
            let what = format!(
                "spec.hostIPC puts the node's shared memory at {SHM_DIR}, in place of what is shared"
            );
            return Err(self.refuse("hostIPC", what, "remove hostIPC, which this annotation replaces"));
        }
        if let SharedDirectory::Pool(pool) = &self.shared
            && let Some((what, remedy)) = user_namespace(self.pod, pool)
        {
            return Err(self.refuse("userNamespace", what, remedy));
        }
        for container in self.containers() {
            let (directory, own, whose, more) = match &self.shared {
                SharedDirectory::Pool(pool) => {
                    (pool.mount_path.as_str(), Some(pool.name.as_str()), "pool", "")
                }
                SharedDirectory::Claim(..) => {
                    (pod_claims::directory(&container), None, "claim", CLAIM_ELSEWHERE)
                }
            };
            if let Some(what) = other_mount(&container, self.config, directory, own) {
                let key = self.config.annotation("containers");
                let remedy = format!("remove it, or leave the container out by {key}{more}");
                return Err(self.refuse("mount", format!("{what}, where the {whose}'s memory is"), remedy));
            }
        }
        if let Some(preload) = &self.preload {
            preload.check_names(self.pod)?;
            self.containers().try_for_each(|container| preload.check(&container))?;
        }
        let Pool { name, mount_path, .. } = match &self.shared {
            SharedDirectory::Pool(pool) => pool,
            SharedDirectory::Claim(claim, claims) => {
                let mut warnings = claims.warnings(self.pod);
                warnings
                    .extend(self.containers().filter_map(|container| claims.warning_of(claim, &container)));
                return Ok(warnings);
            }
        };
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
            let remedy = match &self.shared {
                SharedDirectory::Pool(pool) => format!(
                    "remove one of the two; give a container that is on no link the pool by the resource {}",
                    self.resource(pool)
                ),
                SharedDirectory::Claim(claim, _) => format!(
                    "remove one of the two; give a container that is on no link the claim {claim} by resources.claims"
                ),
            };
            return Err(self.refuse("scope", what, remedy));
        }
        let size = self.config.annotation("size");
        if read(self.pod, &size)?.is_some() {
            let what = format!("{size} is the size of a pod's own directory, and this one is shared");
            return Err(self.refuse("size", what, format!("remove {size}")));
        }
        Ok(())
    }

    /// Returns the claim, if what is shared is one.
    pub(crate) fn claim(&self) -> Option<&str> {
        match &self.shared {
            SharedDirectory::Pool(_) => None,
            SharedDirectory::Claim(claim, _) => Some(claim),
        }
    }

    fn containers(&self) -> impl Iterator<Item = Container<'a>> {
        pod::containers(self.pod).filter(|container| self.participants.contains(container.name()))
    }

    /// Adds the pool or claim to the containers. Where the pod runs is left to it: a pool is on every node, and the scheduler
    /// sends the pods of a claim to one.
    pub(crate) fn add_to(&self, edit: &mut Edit) -> Result<(), ShapeError> {
        if let SharedDirectory::Claim(_, claims) = &self.shared {
            claims.add_entries(edit)?;
        }
        for container in self.containers() {
            match &self.shared {
                SharedDirectory::Pool(pool) => {
                    edit.pool_resource(&container, &self.resource(pool))?;
                    edit.directory_variable(&container, &pool.mount_path)?;
                }
                SharedDirectory::Claim(claim, claims) => claims.give(claim, &container, edit)?,
            }
            if let Some(preload) = &self.preload {
                preload.add_to(&container, edit)?;
            }
        }
        // Last, because the init container shifts the indexes of the others.
        self.preload.as_ref().map_or(Ok(()), |preload| preload.bring(self.pod, self.config, edit))
    }

    fn resource(&self, pool: &Pool) -> String {
        format!("{}/{}", self.config.domain, pool.name)
    }

    fn refuse(&self, reason: &'static str, what: impl Into<String>, remedy: impl Into<String>) -> Refusal {
        Refusal::new(&self.annotation, Position::default(), reason, what, remedy)
    }
}

/// Finds the pool that the annotation names; the error is the problem and the remedy.
fn pool<'a>(text: &str, config: &'a Config) -> Result<&'a Pool, (String, String)> {
    let known = pool_names(config, "remove the annotation");
    if text.is_empty() {
        return Err((
            "the annotation is empty; it must name a pool, or a claim as claim/<name>".to_owned(),
            known,
        ));
    }
    if let Some(name) = text.strip_prefix("pool/") {
        return Err((
            format!("{text:?} is not the name of a pool"),
            format!("write the name alone: {name:?}"),
        ));
    }
    config.pool(text).ok_or_else(|| (format!("there is no pool {text:?}"), known))
}
