//! NPUs: `/dev/davinci<number>`. The driver says in no file where they are; if the bus has as many as there are files, they
//! are taken to be in the same order.

use super::{Accelerator, AcceleratorKind, Roots, names, pci};

/// Huawei's number among the vendors of PCI.
const VENDOR: &str = "0x19e5";
/// The class of processing accelerators.
const CLASS: &str = "0x1200";

pub(super) fn find(roots: &Roots) -> Vec<Accelerator> {
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
    };
    numbers.iter().enumerate().map(npu).collect()
}
