//! NPUs with a device file `/dev/davinci<number>`. The driver does not report their PCI addresses; if there
//! are as many files as devices on the bus, both are assumed to have the same order.

use super::{Accelerator, AcceleratorKind, NodeRoots, names, pci};

/// PCI vendor id of Huawei.
const VENDOR: &str = "0x19e5";
/// PCI class of processing accelerators.
const CLASS: &str = "0x1200";

pub(super) fn find(roots: &NodeRoots) -> Vec<Accelerator> {
    let mut numbers: Vec<u32> = names(&roots.host.join("dev"))
        .iter()
        .filter_map(|name| name.strip_prefix("davinci")?.parse().ok())
        .collect();
    numbers.sort_unstable();
    let on_bus = pci::addresses(&roots.kernel, VENDOR, CLASS);
    let address = |at: usize| (on_bus.len() == numbers.len()).then(|| on_bus[at].as_str());
    let npu = |(at, number): (usize, &u32)| Accelerator {
        kind: AcceleratorKind::Npu,
        id: address(at).map_or_else(|| format!("davinci{number}"), |address| format!("npu-{address}")),
        file: Some(format!("/dev/davinci{number}").into()),
        numa: address(at).and_then(|address| pci::numa(&roots.kernel, address)),
        pci: address(at).map(|address| pci::place(&roots.kernel, address)),
    };
    numbers.iter().enumerate().map(npu).collect()
}
