//! Hardware of the node: memory, NUMA nodes, GPUs and NPUs. Read from directory trees, so that tests can fake
//! them.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | accelerators, real or from a file |
//! | `memory.rs` | memory and NUMA nodes |
//! | `gpu.rs` | GPUs from `/proc/driver/nvidia` |
//! | `npu.rs` | NPUs from `/dev/davinci*` |
//! | `pci.rs` | PCI devices in sysfs |
//! | `fake.rs` | a device list instead of real devices |

pub(crate) mod fake;
mod gpu;
mod memory;
mod npu;
mod pci;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

pub(crate) use memory::{Numa, memory, numa};
pub(crate) use pci::PciPlace;

/// The kind of an accelerator.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum AcceleratorKind {
    Gpu,
    Npu,
}

impl AcceleratorKind {
    /// Returns the resource name after the `/`.
    pub(crate) fn resource(self) -> &'static str {
        match self {
            Self::Gpu => "gpu-ipc",
            Self::Npu => "npu-ipc",
        }
    }

    /// Returns the kind as one word.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Npu => "npu",
        }
    }

    /// Returns the environment variable with the devices of a container.
    pub(crate) fn variable(self) -> &'static str {
        match self {
            Self::Gpu => "SHMESH_GPU_UUIDS",
            Self::Npu => "SHMESH_NPU_UUIDS",
        }
    }
}

/// A GPU or an NPU of the node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Accelerator {
    pub(crate) kind: AcceleratorKind,
    /// UUID, or PCI address if the device has none.
    pub(crate) id: String,
    /// Device file on the node, without which the device is unhealthy.
    pub(crate) file: Option<PathBuf>,
    /// NUMA node, if known.
    pub(crate) numa: Option<u32>,
    /// Place on the PCI bus, if known.
    pub(crate) pci: Option<PciPlace>,
}

/// Directories through which the node is visible.
#[derive(Clone, Debug)]
pub(crate) struct NodeRoots {
    /// Root directory of the node, for `/dev`.
    pub(crate) host: PathBuf,
    /// Parent of `/proc` and `/sys`, which are the same in every container.
    pub(crate) kernel: PathBuf,
}

impl NodeRoots {
    /// Returns the directories for a node whose root is mounted at `host`.
    pub(crate) fn new(host: &Path) -> Self {
        Self { host: host.to_owned(), kernel: "/".into() }
    }
}

/// Returns all accelerators in a stable order.
pub(crate) fn accelerators(roots: &NodeRoots) -> Vec<Accelerator> {
    let mut found = gpu::find(roots);
    found.extend(npu::find(roots));
    found
}

/// All devices ever seen. A removed device stays listed, because containers may still hold it.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceInventory {
    all: Vec<Accelerator>,
    gone: Vec<(AcceleratorKind, String)>,
}

impl DeviceInventory {
    /// Returns all devices in a stable order.
    pub(crate) fn all(&self) -> &[Accelerator] {
        &self.all
    }

    /// Whether the last scan did not find the device. A GPU that fell off the bus still has its device file.
    pub(crate) fn is_gone(&self, one: &Accelerator) -> bool {
        self.gone.iter().any(|(kind, id)| (*kind, id) == (one.kind, &one.id))
    }

    /// Updates the inventory with the devices of a scan.
    pub(crate) fn found(&mut self, mut found: Vec<Accelerator>) {
        for one in &mut found {
            // The id of an NPU depends on the other NPUs, its device file does not. Two ids for one device
            // would allocate it twice.
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

/// Returns the entries of a directory in order, or none if it does not exist.
fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}
