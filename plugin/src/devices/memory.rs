//! Memory and NUMA nodes of the machine.

use std::fs;
use std::path::Path;

use shmesh_sys::procfs::field_bytes;

use super::names;

/// A NUMA node with memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Numa {
    pub(crate) id: u32,
    pub(crate) bytes: u64,
}

/// Returns the memory of the node in bytes, or `None` if the kernel does not report it.
pub(crate) fn memory(kernel: &Path) -> Option<u64> {
    field_bytes(&fs::read_to_string(kernel.join("proc/meminfo")).ok()?, "MemTotal")
}

/// Returns the NUMA nodes that have memory, in order.
pub(crate) fn numa(kernel: &Path) -> Vec<Numa> {
    let dir = kernel.join("sys/devices/system/node");
    let node = |name: String| {
        let id = name.strip_prefix("node")?.parse().ok()?;
        let bytes = field_bytes(&fs::read_to_string(dir.join(&name).join("meminfo")).ok()?, "MemTotal")?;
        (bytes > 0).then_some(Numa { id, bytes })
    };
    let mut nodes: Vec<_> = names(&dir).into_iter().filter_map(node).collect();
    nodes.sort_unstable_by_key(|node| node.id);
    nodes
}
