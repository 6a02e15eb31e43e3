//! CDI specifications: the changes that the container runtime makes to a container with one of our devices.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | devices and their container edits |
//! | `files.rs` | specification files |
//!
//! A container restarts with the allocation of its first start. A device that was ever allocated therefore
//! stays in the specification until the node reboots. The name of a memory device is its size, so that its
//! meaning does not depend on the configuration.

mod files;

#[cfg(test)]
mod tests;

pub(crate) use files::{CLAIM, CdiDevices, SpecFiles};

use std::path::Path;

use serde::Serialize;

use crate::config::{Bytes, UserNamespaces};
use crate::resource::Pool;
use crate::resource::allocate::{AGENT_DEVICE, AGENT_DIR, AGENT_SOCKET};

/// A CDI device with its container edits.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Device {
    name: String,
    container_edits: Edits,
}

/// The changes that the runtime makes to a container.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mounts: Vec<CdiMount>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    additional_gids: Vec<u32>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CdiMount {
    host_path: String,
    container_path: String,
    #[serde(rename = "type")]
    kind: &'static str,
    options: Vec<String>,
}

/// Mount options that forbid set-uid files, devices and programs.
const HARMLESS: [&str; 3] = ["nosuid", "nodev", "noexec"];

fn options(first: &[&str], last: &[&str]) -> Vec<String> {
    first.iter().chain(&HARMLESS).chain(last).map(|&option| option.to_owned()).collect()
}

/// A private `/dev/shm` of `bytes` bytes.
fn shm(bytes: u64) -> Device {
    let mount = CdiMount {
        host_path: "tmpfs".into(),
        container_path: "/dev/shm".into(),
        kind: "tmpfs",
        options: options(&[], &["mode=1777", &format!("size={bytes}")]),
    };
    Device {
        name: Bytes(bytes).to_string(),
        container_edits: Edits { mounts: vec![mount], ..Edits::default() },
    }
}

/// The directory of a pool, with the group of the pool.
fn pool(pool: &Pool) -> Device {
    // In mixed mode the kubelet creates the mount from the Allocate response, mapped for each pod as needed.
    let mounts = if pool.user_namespaces == UserNamespaces::Mixed {
        Vec::new()
    } else {
        vec![shared(&pool.directory, &pool.mount_path, pool.user_namespaces)]
    };
    let container_edits = Edits { mounts, additional_gids: vec![pool.gid], ..Edits::default() };
    Device { name: pool.name.clone(), container_edits }
}

/// The mount of a directory that containers of several pods share.
fn shared(directory: &Path, mount_path: &Path, user_namespaces: UserNamespaces) -> CdiMount {
    let mapped: &[&str] = match user_namespaces {
        UserNamespaces::Never => &["rprivate"],
        UserNamespaces::Always => &["rprivate", "idmap"],
        UserNamespaces::Mixed => &[],
    };
    CdiMount {
        host_path: directory.to_string_lossy().into_owned(),
        container_path: mount_path.to_string_lossy().into_owned(),
        kind: "none",
        options: options(&["rbind", "rw"], mapped),
    }
}

/// The edits of a container for a claim: environment, at most one directory with its group, and the identity service.
#[derive(Clone, Debug)]
pub(crate) struct ClaimEdits<'a> {
    /// Name of the CDI device.
    pub(crate) name: String,
    /// Environment in the form `NAME=value`.
    pub(crate) env: Vec<String>,
    pub(crate) directory: Option<ClaimDirectory<'a>>,
    /// Directory of the identity service on the node, if it exists.
    pub(crate) agent: Option<&'a Path>,
}

/// A directory that a claim gives to a container.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClaimDirectory<'a> {
    /// Directory on the node.
    pub(crate) directory: &'a Path,
    pub(crate) mount_path: &'a Path,
    pub(crate) gid: u32,
    pub(crate) user_namespaces: UserNamespaces,
}

impl From<ClaimEdits<'_>> for Device {
    fn from(claim: ClaimEdits<'_>) -> Self {
        let mut env = claim.env;
        if claim.agent.is_some() {
            env.push(format!("SHMESH_IDENTITY={AGENT_DIR}/{AGENT_SOCKET}"));
        }
        if let Some(given) = claim.directory {
            env.push(format!("SHMESH_DIR={}", given.mount_path.display()));
        }
        let mount =
            |given: ClaimDirectory<'_>| shared(given.directory, given.mount_path, given.user_namespaces);
        let mounts = claim.directory.map(mount).into_iter().chain(claim.agent.map(agent_mount)).collect();
        let additional_gids = claim.directory.iter().map(|given| given.gid).collect();
        Self { name: claim.name, container_edits: Edits { env, mounts, additional_gids } }
    }
}

/// Leaves `SHMESH_DIR` to the device of the claim's own directory, named `uid`, if the claim has one. Of two values a container gets that
/// of the last device, and `SHMESH_BYTES` is that of the claim's directory.
fn with_one_directory(uid: &str, devices: &[Device]) -> Vec<Device> {
    let mut devices = devices.to_vec();
    if devices.iter().any(|device| device.name == uid) {
        for device in devices.iter_mut().filter(|device| device.name != uid) {
            device.container_edits.env.retain(|one| !one.starts_with("SHMESH_DIR="));
        }
    }
    devices
}

/// The read-only directory of the identity service.
fn agent(directory: &Path) -> Device {
    let container_edits = Edits { mounts: vec![agent_mount(directory)], ..Edits::default() };
    Device { name: AGENT_DEVICE.into(), container_edits }
}

fn agent_mount(directory: &Path) -> CdiMount {
    CdiMount {
        host_path: directory.to_string_lossy().into_owned(),
        container_path: AGENT_DIR.into(),
        kind: "none",
        options: options(&["rbind", "ro"], &["rprivate"]),
    }
}
