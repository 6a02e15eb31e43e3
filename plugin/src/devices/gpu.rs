//! GPUs listed by the NVIDIA driver in `/proc/driver/nvidia/gpus/<bus address>/information`.

use std::fs;
use std::path::Path;

use super::{Accelerator, AcceleratorKind, NodeRoots, names, pci};

pub(super) fn find(roots: &NodeRoots) -> Vec<Accelerator> {
    let dir = roots.kernel.join("proc/driver/nvidia/gpus");
    names(&dir)
        .into_iter()
        .filter_map(|address| {
            let text = fs::read_to_string(dir.join(&address).join("information")).ok()?;
            describe(&roots.kernel, &address, &text)
        })
        .collect()
}

fn describe(kernel: &Path, address: &str, text: &str) -> Option<Accelerator> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
        line.map(str::trim).filter(|value| !value.is_empty())
    };
    // The driver prints `?` for a device that has fallen off the bus.
    let uuid = field("GPU UUID").filter(|uuid| !uuid.contains('?'))?;
    let minor: u32 = field("Device Minor")?.parse().ok()?;
    let address = address.to_ascii_lowercase();
    Some(Accelerator {
        kind: AcceleratorKind::Gpu,
        id: uuid.to_owned(),
        file: Some(format!("/dev/nvidia{minor}").into()),
        numa: pci::numa(kernel, &address),
        pci: Some(pci::place(kernel, &address)),
    })
}
