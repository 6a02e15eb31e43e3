//! A device list from a file instead of the real devices, for tests and demonstrations.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Accelerator, AcceleratorKind, PciPlace};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Inventory {
    #[serde(default)]
    gpus: Vec<FakeDevice>,
    #[serde(default)]
    npus: Vec<FakeDevice>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct FakeDevice {
    uuid: String,
    #[serde(default)]
    numa_node: Option<u32>,
    /// The device is healthy while this file exists.
    #[serde(default)]
    file: Option<PathBuf>,
    #[serde(default)]
    pci_address: Option<String>,
    #[serde(default)]
    pcie_root: Option<String>,
}

/// Reads the device list from `file`.
pub(crate) fn read(file: &Path) -> Result<Vec<Accelerator>, String> {
    let named = file.display();
    let text = fs::read_to_string(file).map_err(|error| format!("{named} cannot be read: {error}"))?;
    let inventory: Inventory = serde_saphyr::from_str(&text).map_err(|error| {
        let shown = shmesh::config::show_yaml_error(&named.to_string(), &text, &error);
        format!("{named} is not a valid inventory: {shown}")
    })?;
    let of = |kind| {
        move |FakeDevice { uuid: id, numa_node: numa, file, pci_address, pcie_root: root }| {
            let pci = pci_address.map(|address| PciPlace { address, root });
            Accelerator { kind, id, file, numa, pci }
        }
    };
    let gpus = inventory.gpus.into_iter().map(of(AcceleratorKind::Gpu));
    let all: Vec<_> = gpus.chain(inventory.npus.into_iter().map(of(AcceleratorKind::Npu))).collect();
    for (at, one) in all.iter().enumerate() {
        if one.id.is_empty() || all[..at].iter().any(|other| (other.kind, &other.id) == (one.kind, &one.id)) {
            return Err(format!("{named} has an empty or duplicate uuid {:?}", one.id));
        }
    }
    Ok(all)
}
