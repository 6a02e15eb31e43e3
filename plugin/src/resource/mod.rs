//! Advertised resources, their units, and the allocation of units to containers. Pure functions.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | resources and units; plans all resources of a node |
//! | `name.rs` | resource names that the kubelet accepts |
//! | `allocate.rs` | turns unit ids into mounts, CDI devices and environment |
//! | `preferred.rs` | chooses which free units to allocate |

pub(crate) mod allocate;
pub(crate) mod name;
pub(crate) mod preferred;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::{Config, FrontEnd, UserNamespaces};
use crate::devices::{Accelerator, AcceleratorKind, Numa};

/// Name of the shared-memory resource after the `/`.
pub(crate) const SHM: &str = "shm";
/// Name of the identity-service resource after the `/`.
pub(crate) const AGENT: &str = "agent";
/// Names that pools cannot have: our resources and CDI kinds.
pub(crate) const RESERVED: [&str; 5] = [SHM, "gpu-ipc", "npu-ipc", "pool", AGENT];
/// Maximum size of a `ListAndWatch` message in the kubelet.
pub(crate) const MAX_LIST_BYTES: u64 = 4 << 20;

/// One unit that the kubelet counts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Unit {
    /// Device id for the kubelet.
    pub(crate) id: String,
    /// NUMA node, if relevant for scheduling.
    pub(crate) numa: Option<u32>,
    /// Index of the device whose slot this is; 0 for other resources.
    pub(crate) device: usize,
    /// Whether the kubelet may allocate the unit.
    pub(crate) is_healthy: bool,
}

/// A pool as containers see it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Pool {
    pub(crate) name: String,
    /// Directory on the node.
    pub(crate) directory: PathBuf,
    /// Mount path in containers.
    pub(crate) mount_path: PathBuf,
    pub(crate) gid: u32,
    pub(crate) user_namespaces: UserNamespaces,
}

/// The meaning of a resource's units.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum ResourceKind {
    /// A number of bytes of a private `/dev/shm`.
    Shm { unit: u64 },
    /// One attachment to a pool.
    Pool(Pool),
    /// The identity service and nothing else.
    Agent,
    /// A slot of one of these devices.
    Slots(AcceleratorKind, Vec<Accelerator>),
}

/// A resource that the plugin advertises.
#[derive(Clone, Debug)]
pub(crate) struct Resource {
    /// Full name in the form `domain/name`.
    pub(crate) name: String,
    /// The meaning of the units.
    pub(crate) kind: ResourceKind,
    units: Vec<Unit>,
    /// Indexes of units sorted by id, which is smaller than a map.
    by_id: Vec<u32>,
}

impl Resource {
    /// Creates a resource. Of units with equal ids the first one counts.
    pub(crate) fn new(name: String, kind: ResourceKind, units: Vec<Unit>) -> Self {
        let mut by_id: Vec<u32> = (0..).take(units.len()).collect();
        by_id.sort_by_key(|&at| units[at as usize].id.as_str());
        by_id.dedup_by_key(|at| units[*at as usize].id.as_str());
        Self { name, kind, units, by_id }
    }

    /// Returns the index of the unit with this id.
    fn place(&self, id: &str) -> Option<usize> {
        let found = self.by_id.binary_search_by(|&at| self.units[at as usize].id.as_str().cmp(id));
        found.ok().map(|at| self.by_id[at] as usize)
    }

    pub(crate) fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Returns the unit with this id.
    #[cfg(test)]
    pub(crate) fn unit(&self, id: &str) -> Option<&Unit> {
        self.place(id).map(|at| &self.units[at])
    }

    /// Returns the name after the `/`.
    #[cfg(test)]
    pub(crate) fn short_name(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or(&self.name)
    }

    /// Sets the health of each unit by its device. Returns whether any unit changed.
    pub(crate) fn set_health(&mut self, is_healthy: impl Fn(usize) -> bool) -> bool {
        let mut changed = false;
        for unit in &mut self.units {
            let now = is_healthy(unit.device);
            changed |= unit.is_healthy != now;
            unit.is_healthy = now;
        }
        changed
    }

    /// Returns the bytes of this many units.
    pub(crate) fn bytes(&self, units: usize) -> u64 {
        match self.kind {
            ResourceKind::Shm { unit } => unit.saturating_mul(units as u64),
            ResourceKind::Pool(_) | ResourceKind::Agent | ResourceKind::Slots(..) => 0,
        }
    }
}

/// Returns an upper bound for the size of a device list of memory or attachment units: id, longest health,
/// NUMA node, protobuf tags and lengths.
pub(crate) fn list_bytes(units: u64) -> u64 {
    let digits = units.checked_ilog10().unwrap_or(0) + 1;
    units.saturating_mul(u64::from(digits) + "n00u".len() as u64 + "Unhealthy".len() as u64 + 14)
}

/// Returns an upper bound for the list size of one device's slots.
pub(crate) fn slots_bytes(id: &str, slots: u32) -> u64 {
    // Separator, and one more byte per length prefix of a long id.
    let digits = slots.checked_ilog10().unwrap_or(0) as usize + 1;
    u64::from(slots).saturating_mul((id.len() + "::".len() + digits + "Unhealthy".len() + 18) as u64)
}

/// The resources of the node.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeResources {
    /// Total memory in bytes.
    pub(crate) memory: u64,
    /// NUMA nodes; fewer than two are ignored.
    pub(crate) numa: Vec<Numa>,
    /// GPUs and NPUs of the node.
    pub(crate) accelerators: Vec<Accelerator>,
}

/// Plans all resources to advertise. A resource without units is omitted. The DRA driver has no units of memory and of the
/// identity service, which claims get in bytes and always.
pub(crate) fn plan(config: &Config, node: &NodeResources) -> Vec<Resource> {
    let named = |name: &str| format!("{}/{name}", config.domain);
    let mut resources = Vec::new();
    let unit = config.shm.unit.0;
    let is_plugin = config.mode == FrontEnd::DevicePlugin;
    let count = config.shm.budget.of(node.memory).checked_div(unit).unwrap_or(0);
    if count > 0 && is_plugin {
        let numa: &[Numa] = if config.shm.numa { &node.numa } else { &[] };
        resources.push(Resource::new(named(SHM), ResourceKind::Shm { unit }, shm_units(count, numa)));
    }
    for pool in &config.pools {
        let kind = ResourceKind::Pool(Pool {
            name: pool.name.clone(),
            directory: pool.directory(config),
            mount_path: pool.mount_path.clone(),
            gid: pool.gid(),
            user_namespaces: pool.user_namespaces,
        });
        resources.push(Resource::new(named(&pool.name), kind, attachments(pool.attachments, pool.numa_node)));
    }
    if config.identity.attachments > 0 && is_plugin {
        let units = attachments(config.identity.attachments, None);
        resources.push(Resource::new(named(AGENT), ResourceKind::Agent, units));
    }
    for (kind, slots) in [(AcceleratorKind::Gpu, &config.gpu_ipc), (AcceleratorKind::Npu, &config.npu_ipc)] {
        let devices: Vec<_> = node.accelerators.iter().filter(|one| one.kind == kind).cloned().collect();
        let units: Vec<_> = devices
            .iter()
            .enumerate()
            .flat_map(|(device, one)| (0..slots.slots_per_device).map(move |slot| (device, one, slot)))
            .map(|(device, one, slot)| Unit {
                id: format!("{}::{slot}", one.id),
                numa: one.numa,
                device,
                is_healthy: true,
            })
            .collect();
        if !units.is_empty() {
            resources.push(Resource::new(named(kind.resource()), ResourceKind::Slots(kind, devices), units));
        }
    }
    resources
}

fn attachments(count: u32, numa: Option<u32>) -> Vec<Unit> {
    (0..count).map(|at| Unit { id: format!("a{at}"), numa, device: 0, is_healthy: true }).collect()
}

/// Creates memory units, distributed over the NUMA nodes in proportion to their memory.
fn shm_units(count: u64, numa: &[Numa]) -> Vec<Unit> {
    let plain = |id, numa| Unit { id, numa, device: 0, is_healthy: true };
    let total: u64 = numa.iter().map(|node| node.bytes).sum();
    if numa.len() < 2 || total == 0 {
        return (0..count).map(|at| plain(format!("u{at}"), None)).collect();
    }
    let mut units = Vec::new();
    let (mut seen, mut given) = (0_u128, 0);
    for node in numa {
        // Running sums avoid rounding losses.
        seen += u128::from(node.bytes);
        let until = u64::try_from(u128::from(count) * seen / u128::from(total)).unwrap_or(count);
        units.extend((0..until - given).map(|at| plain(format!("n{}u{at}", node.id), Some(node.id))));
        given = until;
    }
    units
}
