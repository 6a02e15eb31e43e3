//! Turns unit ids into the Allocate response for a container.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use shmesh_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse, Mount};
use thiserror::Error;

use super::{Pool, Resource, ResourceKind};
use crate::config::{Bytes, Config, UserNamespaces};

/// Mount path of the identity service's directory in containers.
pub(crate) const AGENT_DIR: &str = "/run/shmesh/agent";
/// File name of the identity service's socket.
pub(crate) const AGENT_SOCKET: &str = "agent.sock";
/// Name of the CDI device for the identity service's directory.
pub(crate) const AGENT_DEVICE: &str = "identity";

/// Node-wide settings of Allocate responses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct AllocateSettings {
    /// Domain of the CDI kinds: the part before the `/`.
    pub(crate) domain: String,
    /// Whether the runtime supports CDI.
    pub(crate) has_cdi: bool,
    /// Directory of the identity service on the node.
    pub(crate) agent: PathBuf,
}

impl AllocateSettings {
    /// Takes the settings from the configuration.
    pub(crate) fn of(config: &Config) -> Self {
        Self {
            domain: config.domain.clone(),
            has_cdi: config.cdi.enabled,
            agent: config.identity.directory.clone(),
        }
    }
}

/// Why an Allocate request was rejected.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub(crate) enum AllocateError {
    /// The request lists no device ids.
    #[error("no device ids: request at least one device of {0}")]
    Empty(String),
    /// The resource has no device with this id.
    #[error("{resource} has no device {id:?}")]
    Unknown { resource: String, id: String },
    /// The request lists a device id twice.
    #[error("device {id:?} of {resource} is requested twice")]
    Twice { resource: String, id: String },
    /// The requested number of devices is impossible.
    #[error("cannot choose {asked} devices of {resource}: {must} are required and {available} available")]
    Size { resource: String, asked: i64, must: usize, available: usize },
    /// The request has no container requests, or too many.
    #[error("{0} containers in one request; the limit is 1 to {MAX_CONTAINERS}")]
    Containers(usize),
}

/// Maximum container requests per call; the kubelet sends one.
pub(crate) const MAX_CONTAINERS: usize = 16;

impl AllocateError {
    /// Returns the reason as one word for metrics.
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

/// Returns the indexes of the units; fails for unknown and duplicate ids.
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

/// Shortens an id for messages and logs.
fn shortened(id: &str) -> String {
    id.chars().take(64).collect()
}

/// Returns the allocation for these units. It is deterministic, and units that are currently unhealthy are
/// accepted: a refusal would fail the pod permanently.
pub(crate) fn answer(
    resource: &Resource,
    ids: &[String],
    settings: &AllocateSettings,
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
            answer.cdi_devices.push(cdi(&settings.domain, super::SHM, &Bytes(bytes).to_string()));
        }
        ResourceKind::Pool(pool) => {
            answer.envs.insert("SHMESH_POOL".into(), pool.name.clone());
            answer.envs.insert("SHMESH_DIR".into(), text(&pool.mount_path));
            give_pool(&mut answer, pool, settings);
            give_agent(&mut answer, settings);
        }
        ResourceKind::Agent => give_agent(&mut answer, settings),
        ResourceKind::Slots(kind, devices) => {
            let which: BTreeSet<_> = places.iter().map(|&at| resource.units[at].device).collect();
            let uuids: Vec<_> = which.into_iter().map(|device| devices[device].id.as_str()).collect();
            answer.envs.insert(kind.variable().into(), uuids.join(","));
            give_agent(&mut answer, settings);
        }
    }
    Ok(answer)
}

fn give_pool(answer: &mut ContainerAllocateResponse, pool: &Pool, settings: &AllocateSettings) {
    if settings.has_cdi {
        answer.cdi_devices.push(cdi(&settings.domain, "pool", &pool.name));
    }
    // A CDI mount works only with or only without a user namespace; the kubelet adapts this mount to each
    // pod.
    if !settings.has_cdi || pool.user_namespaces == UserNamespaces::Mixed {
        answer.mounts.push(Mount {
            container_path: text(&pool.mount_path),
            host_path: text(&pool.directory),
            read_only: false,
        });
    }
}

fn give_agent(answer: &mut ContainerAllocateResponse, settings: &AllocateSettings) {
    answer.envs.insert("SHMESH_IDENTITY".into(), format!("{AGENT_DIR}/{AGENT_SOCKET}"));
    if settings.has_cdi {
        answer.cdi_devices.push(cdi(&settings.domain, "agent", AGENT_DEVICE));
    } else {
        answer.mounts.push(Mount {
            container_path: AGENT_DIR.into(),
            host_path: text(&settings.agent),
            read_only: true,
        });
    }
}

fn cdi(domain: &str, class: &str, device: &str) -> CdiDevice {
    CdiDevice { name: format!("{domain}/{class}={device}") }
}

fn text(path: &Path) -> String {
    // The path was parsed from UTF-8 text.
    path.to_string_lossy().into_owned()
}

/// Number of containers and units that hold each resource, as the kubelet lists them.
pub(crate) type UsageByResource = HashMap<String, (usize, usize)>;
