//! The devices that the node's ResourceSlices list.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, DeviceTaint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use shmesh_sys::mount::file_system;

use super::device_names::{ClaimDevice, claim_devices};
use crate::config::{Bytes, Config};
use crate::devices::Accelerator;
use crate::resource::Resource;

/// Bytes of a claim that does not say how many.
pub(crate) const DEFAULT_BYTES: u64 = 64 << 20;
/// Claims are multiples of this many bytes: a huge page.
pub(crate) const STEP_BYTES: u64 = 2 << 20;
/// Capacity of bytes that claims request.
pub(crate) const BYTES: &str = "bytes";
/// Capacity that counts the users of a device.
const ATTACHMENTS: &str = "attachments";
/// Capacity that counts the users of an accelerator.
const SLOTS: &str = "slots";

/// Returns the devices to publish: those with capacity. `memory`: that of the node. `has_problem`: whether the directory of all claims
/// has one.
pub(crate) fn devices(
    config: &Config,
    resources: &[Arc<Resource>],
    memory: u64,
    is_draining: bool,
    has_problem: bool,
) -> Vec<Device> {
    let named = claim_devices(resources).into_iter().filter_map(|(name, device)| {
        let mut attributes = BTreeMap::new();
        let mut capacity = BTreeMap::new();
        let is_healthy;
        let kind = match &device {
            ClaimDevice::Domain => {
                is_healthy = !has_problem;
                capacity.insert(BYTES, capacity_of(budget(config, memory), DEFAULT_BYTES, STEP_BYTES)?);
                capacity.insert(ATTACHMENTS, counted(config.dra.attachments)?);
                "domain"
            }
            ClaimDevice::Pool(pool, healthy) => {
                is_healthy = *healthy;
                attributes.insert("pool".to_owned(), text(&pool.name));
                let asked = config.pools.iter().find(|one| one.name == pool.name);
                capacity.insert(ATTACHMENTS, counted(asked.map_or(1, |asked| asked.attachments))?);
                if let Some(numa) = asked.and_then(|asked| asked.numa_node) {
                    attributes.insert("numa".to_owned(), number(numa));
                }
                "pool"
            }
            ClaimDevice::Accelerator(accelerator, slots, healthy) => {
                is_healthy = *healthy;
                describe(accelerator, &mut attributes);
                capacity.insert(SLOTS, counted(*slots)?);
                accelerator.kind.word()
            }
        };
        attributes.insert("kind".to_owned(), text(kind));
        let taint = |key: &str| DeviceTaint {
            key: format!("{}/{key}", config.domain),
            effect: "NoSchedule".into(),
            ..DeviceTaint::default()
        };
        let taints: Vec<_> = [(is_draining, "draining"), (!is_healthy, "unhealthy")]
            .into_iter()
            .filter(|(applies, _)| *applies)
            .map(|(_, key)| taint(key))
            .collect();
        Some(Device {
            name,
            allow_multiple_allocations: Some(true),
            attributes: Some(attributes),
            capacity: Some(capacity.into_iter().map(|(name, one)| (name.to_owned(), one)).collect()),
            taints: (!taints.is_empty()).then_some(taints),
            ..Device::default()
        })
    });
    named.collect()
}

/// Bytes that claims can reserve: as configured, and no more than the file system of their directories has.
pub(super) fn budget(config: &Config, memory: u64) -> u64 {
    let seen = config.seen(&config.dra.directory);
    let existing = seen.ancestors().find(|path| path.exists());
    let found = existing.and_then(|path| file_system(path).ok());
    // A tmpfs without a limit says 0.
    let most = found.map_or(0, |found| found.total_bytes);
    let most = if most == 0 { u64::MAX } else { most };
    config.dra.budget.of(memory).min(most)
}

/// Attributes of an accelerator: ours, and the standard ones by which a claim gets the slot and the device together.
fn describe(accelerator: &Accelerator, attributes: &mut BTreeMap<String, DeviceAttribute>) {
    attributes.insert("uuid".into(), text(&accelerator.id));
    if let Some(numa) = accelerator.numa {
        attributes.insert("numa".into(), number(numa));
    }
    if let Some(pci) = &accelerator.pci {
        attributes.insert("resource.kubernetes.io/pciBusID".into(), text(&pci.address));
        if let Some(root) = &pci.root {
            attributes.insert("resource.kubernetes.io/pcieRoot".into(), text(root));
        }
    }
}

/// A capacity of `value`, rounded down to steps, of which a claim gets `default`, or what it requests in steps. `None` if it
/// is less than a step.
fn capacity_of(value: u64, default: u64, step: u64) -> Option<DeviceCapacity> {
    let value = value / step * step;
    let quantity = |value: u64| Quantity(Bytes(value).to_string());
    // The API server refuses a range with less than two steps.
    let is_range = value >= 2 * step;
    let range = || CapacityRequestPolicyRange { min: quantity(step), step: Some(quantity(step)), max: None };
    (value > 0).then(|| DeviceCapacity {
        value: quantity(value),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(quantity(default.min(value))),
            valid_range: is_range.then(range),
            valid_values: (!is_range).then(|| vec![quantity(step)]),
        }),
    })
}

fn counted(value: u32) -> Option<DeviceCapacity> {
    capacity_of(value.into(), 1, 1)
}

fn text(value: &str) -> DeviceAttribute {
    // Longer values are refused by the API server.
    let value = value.chars().take(64).collect();
    DeviceAttribute { string: Some(value), ..DeviceAttribute::default() }
}

fn number(value: u32) -> DeviceAttribute {
    DeviceAttribute { int: Some(value.into()), ..DeviceAttribute::default() }
}
