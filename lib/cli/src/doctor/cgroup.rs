//! Remaining memory in the memory cgroup, v1 and v2. It matters more than the size of the directory: `fallocate` beyond
//! the cgroup's limit causes an OOM kill, not an error, so the limit must be known before a link is created.

use std::path::{Path, PathBuf};

use serde_json::json;
use shmesh_sys::cgroup::{Level, Version};

use super::source::{Source, UnknownFact};
use super::{Finding, FindingStatus};
use crate::human;
use shmesh_sys::mountinfo::{self, Mount};
use shmesh_sys::procfs::field_bytes;

/// Below this, even a default link may not fit.
const LITTLE: u64 = 64 << 20;

/// The directories of one controller for this process, as far as they are visible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CgroupPath {
    /// Version of the hierarchy, 1 or 2.
    pub(super) version: u8,
    /// The path in `/proc/self/cgroup`.
    pub(super) path: String,
    /// The process's own directory first, then its ancestors up to the mount point.
    pub(super) dirs: Vec<PathBuf>,
}

/// The line of `/proc/self/cgroup` for `controller`: version and path.
fn membership<'a>(text: &'a str, controller: &str) -> Option<(u8, &'a str)> {
    let lines = || {
        text.lines().filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            Some((parts.next()?, parts.next()?, parts.next()?))
        })
    };
    let first = lines().find(|(_, names, _)| names.split(',').any(|name| name == controller));
    if let Some((_, _, path)) = first {
        return Some((1, path));
    }
    lines().find(|(id, names, _)| *id == "0" && names.is_empty()).map(|(_, _, path)| (2, path))
}

/// The directory of cgroup `path` below a mount; the mount point itself if the path is outside of the visible tree.
fn directory(mount: &Mount, path: &str) -> PathBuf {
    let below = Path::new(path).strip_prefix(&mount.root).unwrap_or(Path::new(""));
    match below.components().any(|part| part == std::path::Component::ParentDir) {
        true => mount.point.clone(),
        false => mount.point.join(below),
    }
}

/// Finds the cgroup of this process for one controller.
pub(super) fn locate(source: &Source, controller: &str) -> Result<CgroupPath, UnknownFact> {
    let text = source.text("/proc/self/cgroup")?;
    let (version, path) = membership(&text, controller)
        .ok_or_else(|| UnknownFact(format!("/proc/self/cgroup has no {controller} hierarchy")))?;
    let mounts = mountinfo::parse(&source.text("/proc/self/mountinfo")?);
    let mount = mounts
        .iter()
        .find(|mount| match version {
            1 => mount.kind == "cgroup" && mount.super_options.split(',').any(|one| one == controller),
            _ => mount.kind == "cgroup2",
        })
        .ok_or_else(|| {
            UnknownFact(format!("the {controller} hierarchy (cgroup v{version}) is not mounted here"))
        })?;
    let mut own = directory(mount, path);
    if !source.exists(&own) {
        own.clone_from(&mount.point);
    }
    let dirs = own.ancestors().take_while(|dir| dir.starts_with(&mount.point)).map(Path::to_owned).collect();
    Ok(CgroupPath { version, path: path.to_owned(), dirs })
}

/// The memory cgroup of this process, as far as it can be seen.
#[derive(Clone, Debug)]
pub(super) struct CgroupMemory {
    /// The directories of the cgroup.
    place: CgroupPath,
    /// The levels of the hierarchy, the process's own first.
    levels: Vec<Level>,
}

impl CgroupMemory {
    /// The smallest remaining memory of all levels; `None` without any limit.
    pub(super) fn room(&self) -> Option<u64> {
        self.levels.iter().filter_map(Level::room).min()
    }

    /// The smallest limit of all levels.
    fn limit(&self) -> Option<u64> {
        self.levels.iter().filter_map(|level| level.limit).min()
    }
}

/// Reads the memory cgroup and its visible ancestors.
pub(super) fn memory(source: &Source) -> Result<CgroupMemory, UnknownFact> {
    let place = locate(source, "memory")?;
    let version = if place.version == 1 { Version::V1 } else { Version::V2 };
    let levels = place.dirs.iter().filter_map(|dir| Level::read(&source.place(dir), version)).collect();
    Ok(CgroupMemory { place, levels })
}

/// The finding about the memory cgroup.
pub(super) fn finding(memory: &Result<CgroupMemory, UnknownFact>) -> Finding {
    const ID: &str = "memory.cgroup";
    let memory = match memory {
        Ok(memory) => memory,
        Err(why) => {
            let means = "The memory limit is not known: a link larger than it ends in an OOM kill, not in an \
                         error, so keep links well below the container's limit.";
            return Finding::unknown(ID, why, means);
        }
    };
    let own = memory.levels.first();
    let value = json!({
        "version": memory.place.version,
        "path": memory.place.path,
        "limit_bytes": memory.limit(),
        "used_bytes": own.map(|level| level.used),
        "reclaimable_bytes": own.map(|level| level.reclaimable),
        "room_bytes": memory.room(),
    });
    let version = memory.place.version;
    let (Some(limit), Some(room)) = (memory.limit(), memory.room()) else {
        let means = "No memory limit is visible here: links may take what the node has and are charged to \
                     the process that touches them first; in a pod, set a memory limit that covers them.";
        return Finding::new(ID, FindingStatus::Note, value, format!("v{version}, no limit"), means);
    };
    let shown = format!("v{version}, limit {}, room {}", human::bytes(limit), human::bytes(room));
    let (status, means) = if room < LITTLE {
        let means = format!(
            "Only {} can still be charged: making a larger link here is an OOM kill (SIGKILL), not an error; \
             raise the container's memory limit or let the sidecar make the link.",
            human::bytes(room)
        );
        (FindingStatus::Warn, means)
    } else {
        let means = format!(
            "Links made by this container may take {} more; fallocate beyond that is an OOM kill, not an \
             error, and a pod limit above the container's may be smaller still.",
            human::bytes(room)
        );
        (FindingStatus::Ok, means)
    };
    Finding::new(ID, status, value, shown, means)
}

/// Memory of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeMemory {
    /// Total memory in bytes.
    total: u64,
    /// Bytes available without swapping.
    pub(super) available: u64,
}

/// Reads `/proc/meminfo`, which describes the node even inside a container.
pub(super) fn node_memory(source: &Source) -> Result<NodeMemory, UnknownFact> {
    let text = source.text("/proc/meminfo")?;
    match (field_bytes(&text, "MemTotal"), field_bytes(&text, "MemAvailable")) {
        (Some(total), Some(available)) => Ok(NodeMemory { total, available }),
        _ => Err(UnknownFact("/proc/meminfo has no MemTotal or MemAvailable".into())),
    }
}

/// The finding about the node's memory.
pub(super) fn node_finding(node: &Result<NodeMemory, UnknownFact>) -> Finding {
    const ID: &str = "memory.node";
    match node {
        Err(why) => Finding::unknown(ID, why, "The node's memory bounds all links together."),
        Ok(node) => Finding::new(
            ID,
            if node.available < LITTLE { FindingStatus::Warn } else { FindingStatus::Ok },
            json!({ "total_bytes": node.total, "available_bytes": node.available }),
            format!("{}, {} available", human::bytes(node.total), human::bytes(node.available)),
            "All links of all pods on this node share what is available; shared pages are freed only by \
             removing them.",
        ),
    }
}

#[cfg(test)]
#[path = "cgroup_tests.rs"]
mod tests;
