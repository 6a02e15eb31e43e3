//! PCI devices in sysfs.

use std::fs;
use std::path::Path;

use super::names;

const DEVICES: &str = "sys/bus/pci/devices";

/// Where a device is on the PCI bus.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct PciPlace {
    /// Address, such as `0000:c1:00.0`.
    pub(crate) address: String,
    /// Root complex, such as `pci0000:c0`, if sysfs shows it.
    pub(crate) root: Option<String>,
}

/// Returns the place of a device, whose link in sysfs leads through its root complex.
pub(super) fn place(kernel: &Path, address: &str) -> PciPlace {
    let target = fs::read_link(kernel.join(DEVICES).join(address));
    let root = target.ok().and_then(|target| {
        let parts = target.components().filter_map(|part| part.as_os_str().to_str());
        // A domain and a bus, as in `pci0000:c0`.
        let is_root = |part: &&str| part.strip_prefix("pci").is_some_and(|rest| rest.split(':').count() == 2);
        parts.filter(is_root).map(str::to_owned).next()
    });
    PciPlace { address: address.to_owned(), root }
}

/// Returns the NUMA node of a device, or `None` for -1, as in most virtual machines.
pub(super) fn numa(kernel: &Path, address: &str) -> Option<u32> {
    fs::read_to_string(kernel.join(DEVICES).join(address).join("numa_node")).ok()?.trim().parse().ok()
}

/// Returns the sorted addresses of a vendor's devices with this class prefix.
pub(super) fn addresses(kernel: &Path, vendor: &str, class: &str) -> Vec<String> {
    let dir = kernel.join(DEVICES);
    let says = |address: &str, file: &str, prefix: &str| {
        fs::read_to_string(dir.join(address).join(file)).is_ok_and(|text| text.starts_with(prefix))
    };
    let mut found = names(&dir);
    found.retain(|address| says(address, "vendor", vendor) && says(address, "class", class));
    found
}
