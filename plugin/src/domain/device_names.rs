//! Devices of the node, as slices and allocations name them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::devices::{Accelerator, AcceleratorKind};
use crate::resource::{Pool, Resource, ResourceKind};

/// Name of the device of which every claim with a directory gets a share.
pub(crate) const DOMAIN: &str = "domain";
/// The prefix of the names of pools.
const POOL_PREFIX: &str = "pool-";
/// Longest DNS label, which a device's name is.
const MAX_NAME: usize = 63;
/// Characters of an accelerator's id in its name, where they are unique.
const SHORT_ID: usize = 8;

/// A device that claims can have.
#[derive(Clone, Debug)]
pub(crate) enum ClaimDevice {
    /// A directory of the claim's own.
    Domain,
    /// An attachment to a pool of the node, and whether the pool is healthy.
    Pool(Pool, bool),
    /// A slot of an accelerator, the number of its slots, and whether it is healthy.
    Accelerator(Accelerator, u32, bool),
}

/// Returns the devices of the node by name.
pub(crate) fn claim_devices(resources: &[Arc<Resource>]) -> BTreeMap<String, ClaimDevice> {
    let mut devices = BTreeMap::from([(DOMAIN.to_owned(), ClaimDevice::Domain)]);
    for resource in resources {
        let is_healthy = |device: usize| {
            resource.units().iter().filter(|unit| unit.device == device).all(|unit| unit.is_healthy)
        };
        match &resource.kind {
            ResourceKind::Pool(pool) => {
                let name = format!("{POOL_PREFIX}{}", pool.name);
                devices.insert(name, ClaimDevice::Pool(pool.clone(), is_healthy(0)));
            }
            ResourceKind::Slots(kind, accelerators) => {
                let slots = resource.units().len() / accelerators.len().max(1);
                let slots = u32::try_from(slots).unwrap_or(u32::MAX);
                for (at, name) in accelerator_names(*kind, accelerators).into_iter().enumerate() {
                    let device = ClaimDevice::Accelerator(accelerators[at].clone(), slots, is_healthy(at));
                    devices.insert(name, device);
                }
            }
            ResourceKind::Shm { .. } | ResourceKind::Agent => {}
        }
    }
    devices
}

/// Returns short names where they are unique, and long ones elsewhere.
fn accelerator_names(kind: AcceleratorKind, accelerators: &[Accelerator]) -> Vec<String> {
    let (prefix, marks) = match kind {
        AcceleratorKind::Gpu => ("gpu-", ["GPU-", "MIG-"]),
        AcceleratorKind::Npu => ("npu-", ["npu-", "NPU-"]),
    };
    let label = |id: &str, length: usize| {
        let bare = marks.iter().find_map(|mark| id.strip_prefix(mark)).unwrap_or(id);
        let label: String = bare
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
            .take(length)
            .collect();
        format!("{prefix}{}", label.trim_matches('-'))
    };
    let long = MAX_NAME - prefix.len();
    // The short form of a UUID; other ids are short already.
    let length = if kind == AcceleratorKind::Gpu { SHORT_ID } else { long };
    accelerators
        .iter()
        .map(|one| {
            let short = label(&one.id, length);
            let is_unique =
                accelerators.iter().filter(|other| label(&other.id, length) == short).count() == 1;
            if is_unique { short } else { label(&one.id, long) }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(kind: AcceleratorKind, ids: &[&str]) -> Vec<String> {
        let of = |id: &&str| Accelerator { kind, id: (*id).to_owned(), file: None, numa: None, pci: None };
        accelerator_names(kind, &ids.iter().map(of).collect::<Vec<_>>())
    }

    #[test]
    fn accelerators_have_short_and_unique_labels() {
        let gpus = ["GPU-3f9cA0b1-1111-2222", "GPU-55555555-1", "GPU-55555555-2"];
        assert_eq!(names(AcceleratorKind::Gpu, &gpus), ["gpu-3f9ca0b1", "gpu-55555555-1", "gpu-55555555-2"]);
        let npus = ["npu-0000:c1:00.0", "davinci3"];
        assert_eq!(names(AcceleratorKind::Npu, &npus), ["npu-0000-c1-00-0", "npu-davinci3"]);
        let long = format!("GPU-{}", "a".repeat(200));
        assert!(names(AcceleratorKind::Gpu, &[&long, &long]).iter().all(|name| name.len() <= MAX_NAME));
    }
}
