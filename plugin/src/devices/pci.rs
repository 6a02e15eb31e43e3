//! PCI devices in sysfs.

use std::fs;
use std::path::Path;

use super::names;

const DEVICES: &str = "sys/bus/pci/devices";

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
