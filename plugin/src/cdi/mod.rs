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

pub(crate) use files::{CdiDevices, SpecFiles};

use std::path::Path;

use serde::Serialize;

use crate::config::{Bytes, UserNamespaces};
use crate::resource::Pool;
use crate::resource::allocate::{AGENT_DEVICE, AGENT_DIR};

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
    mounts: Vec<Mount>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    additional_gids: Vec<u32>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
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
    let mount = Mount {
        host_path: "tmpfs".into(),
        container_path: "/dev/shm".into(),
        kind: "tmpfs",
        options: options(&[], &["mode=1777", &format!("size={bytes}")]),
    };
    Device {
        name: Bytes(bytes).to_string(),
        container_edits: Edits { mounts: vec![mount], additional_gids: Vec::new() },
    }
}

/// The directory of a pool, with the group of the pool.
fn pool(pool: &Pool) -> Device {
    let mapped: &[&str] = match pool.user_namespaces {
        UserNamespaces::Never => &["rprivate"],
        UserNamespaces::Always => &["rprivate", "idmap"],
        UserNamespaces::Mixed => &[],
    };
    let mount = Mount {
        host_path: pool.directory.to_string_lossy().into_owned(),
        container_path: pool.mount_path.to_string_lossy().into_owned(),
        kind: "none",
        options: options(&["rbind", "rw"], mapped),
    };
    // In mixed mode the kubelet creates the mount from the Allocate response, mapped for each pod as needed.
    let mounts = if pool.user_namespaces == UserNamespaces::Mixed { Vec::new() } else { vec![mount] };
    Device { name: pool.name.clone(), container_edits: Edits { mounts, additional_gids: vec![pool.gid] } }
}

/// The read-only directory of the identity service.
fn agent(directory: &Path) -> Device {
    let mount = Mount {
        host_path: directory.to_string_lossy().into_owned(),
        container_path: AGENT_DIR.into(),
        kind: "none",
        options: options(&["rbind", "ro"], &["rprivate"]),
    };
    Device {
        name: AGENT_DEVICE.into(),
        container_edits: Edits { mounts: vec![mount], additional_gids: Vec::new() },
    }
}
