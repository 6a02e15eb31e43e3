//! Memory and NUMA nodes of the machine.

use std::fs;
use std::path::Path;

use super::names;

/// A NUMA node with memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Numa {
    pub(crate) id: u32,
    pub(crate) bytes: u64,
}

/// Returns the memory of the node in bytes, or `None` if the kernel does not report it.
pub(crate) fn memory(kernel: &Path) -> Option<u64> {
    total(&fs::read_to_string(kernel.join("proc/meminfo")).ok()?)
}

/// Returns the NUMA nodes that have memory, in order.
pub(crate) fn numa(kernel: &Path) -> Vec<Numa> {
    let dir = kernel.join("sys/devices/system/node");
    let node = |name: String| {
        let id = name.strip_prefix("node")?.parse().ok()?;
        let bytes = total(&fs::read_to_string(dir.join(&name).join("meminfo")).ok()?)?;
        (bytes > 0).then_some(Numa { id, bytes })
    };
    let mut nodes: Vec<_> = names(&dir).into_iter().filter_map(node).collect();
    nodes.sort_unstable_by_key(|node| node.id);
    nodes
}

/// Parses the line `MemTotal:   16384 kB`, with or without the prefix `Node 0`.
fn total(meminfo: &str) -> Option<u64> {
    let (_, rest) = meminfo.split_once("MemTotal:")?;
    let kib: u64 = rest.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}
