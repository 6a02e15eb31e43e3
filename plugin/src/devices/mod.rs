//! What the node has: memory, NUMA nodes, GPUs and NPUs. Read from directory trees, so that tests can make them.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | accelerators, from the node or from a file |
//! | `memory.rs` | memory and NUMA nodes |
//! | `gpu.rs` | GPUs by `/proc/driver/nvidia` |
//! | `npu.rs` | NPUs by `/dev/davinci*` |
//! | `pci.rs` | PCI devices in sysfs |
//! | `fake.rs` | a list of devices in place of what the node has |

pub(crate) mod fake;
mod gpu;
mod memory;
mod npu;
mod pci;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

pub(crate) use memory::{Numa, memory, numa};

/// Which kind of accelerator.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum AcceleratorKind {
    Gpu,
    Npu,
}

impl AcceleratorKind {
    /// Its resource, after the `/`.
    pub(crate) fn resource(self) -> &'static str {
        match self {
            Self::Gpu => "gpu-ipc",
            Self::Npu => "npu-ipc",
        }
    }

    /// The variable that tells a container which devices it shares.
    pub(crate) fn variable(self) -> &'static str {
        match self {
            Self::Gpu => "SHMESH_GPU_UUIDS",
            Self::Npu => "SHMESH_NPU_UUIDS",
        }
    }
}

/// A GPU or NPU.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Accelerator {
    pub(crate) kind: AcceleratorKind,
    /// What it is called by everybody: its UUID, or where it is on the bus.
    pub(crate) id: String,
    /// Its device file on the node, without which it does not work.
    pub(crate) file: Option<PathBuf>,
    /// Where it is, if known.
    pub(crate) numa: Option<u32>,
}

/// Where the node is seen.
#[derive(Clone, Debug)]
pub(crate) struct Roots {
    /// Its root directory: for `/dev`.
    pub(crate) host: PathBuf,
    /// Where `/proc` and `/sys` are; the same in every container.
    pub(crate) kernel: PathBuf,
}

impl Roots {
    /// For a node whose root is seen at `host`.
    pub(crate) fn new(host: &Path) -> Self {
        Self { host: host.to_owned(), kernel: "/".into() }
    }
}

/// All accelerators, in a lasting order.
pub(crate) fn accelerators(roots: &Roots) -> Vec<Accelerator> {
    let mut found = gpu::find(roots);
    found.extend(npu::find(roots));
    found
}

/// Every device that was ever there. One that is gone stays known, since containers may have it.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceInventory {
    all: Vec<Accelerator>,
    gone: Vec<(AcceleratorKind, String)>,
}

impl DeviceInventory {
    /// In a lasting order.
    pub(crate) fn all(&self) -> &[Accelerator] {
        &self.all
    }

    /// Whether the last look did not find it, whatever its file says: a GPU that has fallen off the bus has one.
    pub(crate) fn is_gone(&self, one: &Accelerator) -> bool {
        self.gone.iter().any(|(kind, id)| (*kind, id) == (one.kind, &one.id))
    }

    /// What is there now.
    pub(crate) fn found(&mut self, mut found: Vec<Accelerator>) {
        for one in &mut found {
            // What an NPU is called depends on the others; its file does not. Of two names both would be handed out.
            let same = |known: &&Accelerator| {
                one.kind == AcceleratorKind::Npu
                    && known.kind == AcceleratorKind::Npu
                    && one.file.is_some()
                    && known.file == one.file
            };
            if let Some(known) = self.all.iter().find(same) {
                *one = known.clone();
            }
        }
        let is_found =
            |known: &Accelerator| found.iter().any(|one| (one.kind, &one.id) == (known.kind, &known.id));
        let gone: Vec<_> = self.all.iter().filter(|known| !is_found(known)).cloned().collect();
        self.gone = gone.iter().map(|one| (one.kind, one.id.clone())).collect();
        found.extend(gone);
        found.sort_by(|a, b| (a.kind as u8, &a.id).cmp(&(b.kind as u8, &b.id)));
        self.all = found;
    }
}

/// The names in a directory, in order; none if there is no such directory.
fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}
