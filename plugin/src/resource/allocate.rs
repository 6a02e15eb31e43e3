//! From unit ids to what a container gets.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use shmesh_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse, Mount};
use thiserror::Error;

use super::{Pool, Resource, ResourceKind};
use crate::config::{Bytes, Config, UserNamespaces};

/// Where containers see the directory of the identity service, whatever it is on the node.
pub(crate) const AGENT_DIR: &str = "/run/shmesh/agent";
/// The identity service's socket in its directory.
pub(crate) const AGENT_SOCKET: &str = "agent.sock";
/// The CDI device of the identity service's directory, after its kind.
pub(crate) const AGENT_DEVICE: &str = "identity";

/// How answers look on this node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct AllocateSettings {
    /// Before the `/` of CDI kinds.
    pub(crate) domain: String,
    /// Whether the runtime understands CDI.
    pub(crate) has_cdi: bool,
    /// The identity service's directory on the node.
    pub(crate) agent: PathBuf,
}

impl AllocateSettings {
    /// As the configuration has it.
    pub(crate) fn of(config: &Config) -> Self {
        Self {
            domain: config.domain.clone(),
            has_cdi: config.cdi.enabled,
            agent: config.identity.directory.clone(),
        }
    }
}

/// A request that is none.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub(crate) enum AllocateError {
    /// Nothing is asked for.
    #[error("no device ids: ask for at least one of {0}")]
    Empty(String),
    /// No such unit.
    #[error("{resource} has no device {id:?}")]
    Unknown { resource: String, id: String },
    /// One unit, twice.
    #[error("device {id:?} of {resource} is asked for twice")]
    Twice { resource: String, id: String },
    /// A number that does not fit the list.
    #[error("{asked} devices of {resource} cannot be chosen: {must} must be, of {available} that may be")]
    Size { resource: String, asked: i64, must: usize, available: usize },
    /// No container, or many.
    #[error("{0} containers in one request; ask for 1 to {MAX_CONTAINERS}")]
    Containers(usize),
}

/// The kubelet asks for one at a time.
pub(crate) const MAX_CONTAINERS: usize = 16;

impl AllocateError {
    /// In one word, for metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Empty(_) => "empty",
            Self::Unknown { .. } => "unknown_device",
            Self::Twice { .. } => "duplicate_device",
            Self::Size { .. } => "size",
            Self::Containers(_) => "containers",
        }
    }
}

/// Where units are in the resource's list, each known and none twice.
pub(super) fn known(resource: &Resource, ids: &[String]) -> Result<Vec<usize>, AllocateError> {
    let mut seen = vec![false; resource.units.len()];
    let mut places = Vec::with_capacity(ids.len().min(seen.len()));
    for id in ids {
        let named = || (resource.name.clone(), shortened(id));
        let Some(at) = resource.place(id) else {
            let (resource, id) = named();
            return Err(AllocateError::Unknown { resource, id });
        };
        if std::mem::replace(&mut seen[at], true) {
            let (resource, id) = named();
            return Err(AllocateError::Twice { resource, id });
        }
        places.push(at);
    }
    Ok(places)
}

/// An id as it may be said back and logged.
fn shortened(id: &str) -> String {
    id.chars().take(64).collect()
}

/// What a container gets for these units. The same for the same units, however often it is asked; a unit that is unhealthy
/// just now is no reason to fail a pod for ever.
pub(crate) fn answer(
    resource: &Resource,
    ids: &[String],
    form: &AllocateSettings,
) -> Result<ContainerAllocateResponse, AllocateError> {
    if ids.is_empty() {
        return Err(AllocateError::Empty(resource.name.clone()));
    }
    let places = known(resource, ids)?;
    let mut answer = ContainerAllocateResponse::default();
    match &resource.kind {
        ResourceKind::Shm { .. } => {
            let bytes = resource.bytes(places.len());
            answer.envs.insert("SHMESH_SHM_BYTES".into(), bytes.to_string());
            answer.cdi_devices.push(cdi(&form.domain, super::SHM, &Bytes(bytes).to_string()));
        }
        ResourceKind::Pool(pool) => {
            answer.envs.insert("SHMESH_POOL".into(), pool.name.clone());
            answer.envs.insert("SHMESH_DIR".into(), text(&pool.mount_path));
            give_pool(&mut answer, pool, form);
            give_agent(&mut answer, form);
        }
        ResourceKind::Agent => give_agent(&mut answer, form),
        ResourceKind::Slots(kind, devices) => {
            let which: BTreeSet<_> = places.iter().map(|&at| resource.units[at].device).collect();
            let uuids: Vec<_> = which.into_iter().map(|device| devices[device].id.as_str()).collect();
            answer.envs.insert(kind.variable().into(), uuids.join(","));
            give_agent(&mut answer, form);
        }
    }
    Ok(answer)
}

fn give_pool(answer: &mut ContainerAllocateResponse, pool: &Pool, form: &AllocateSettings) {
    if form.has_cdi {
        answer.cdi_devices.push(cdi(&form.domain, "pool", &pool.name));
    }
    // One CDI mount cannot serve pods with and without a user namespace; of this one the kubelet makes what is right.
    if !form.has_cdi || pool.user_namespaces == UserNamespaces::Mixed {
        answer.mounts.push(Mount {
            container_path: text(&pool.mount_path),
            host_path: text(&pool.directory),
            read_only: false,
        });
    }
}

fn give_agent(answer: &mut ContainerAllocateResponse, form: &AllocateSettings) {
    answer.envs.insert("SHMESH_IDENTITY".into(), format!("{AGENT_DIR}/{AGENT_SOCKET}"));
    if form.has_cdi {
        answer.cdi_devices.push(cdi(&form.domain, "agent", AGENT_DEVICE));
    } else {
        answer.mounts.push(Mount {
            container_path: AGENT_DIR.into(),
            host_path: text(&form.agent),
            read_only: true,
        });
    }
}

fn cdi(domain: &str, class: &str, device: &str) -> CdiDevice {
    CdiDevice { name: format!("{domain}/{class}={device}") }
}

fn text(path: &Path) -> String {
    // It came from text.
    path.to_string_lossy().into_owned()
}

/// How many containers hold units of each resource, and how many units, as the kubelet lists them.
pub(crate) type UsageByResource = HashMap<String, (usize, usize)>;
