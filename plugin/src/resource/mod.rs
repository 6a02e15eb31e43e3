//! What is advertised: resources, their units, and what a container that asks for some of them gets. Pure.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | a resource and its units; from the configuration and the node to all resources |
//! | `name.rs` | names that the kubelet takes |
//! | `allocate.rs` | from unit ids to mounts, CDI devices and environment |
//! | `preferred.rs` | which of the free units to hand out |

pub(crate) mod allocate;
pub(crate) mod name;
pub(crate) mod preferred;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use crate::config::{Config, UserNamespaces};
use crate::devices::{Accelerator, AcceleratorKind, Numa};

/// The resource of private shared memory, after the `/`.
pub(crate) const SHM: &str = "shm";
/// The resource of the identity service, after the `/`.
pub(crate) const AGENT: &str = "agent";
/// Names that pools cannot have: ours, and those of CDI kinds.
pub(crate) const RESERVED: [&str; 5] = [SHM, "gpu-ipc", "npu-ipc", "pool", AGENT];
/// What the kubelet reads of one `ListAndWatch` message.
pub(crate) const MAX_LIST_BYTES: u64 = 4 << 20;

/// One unit that the kubelet counts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Unit {
    /// Its name.
    pub(crate) id: String,
    /// Where it is, if that makes a difference.
    pub(crate) numa: Option<u32>,
    /// Which device it is a slot of; 0 where there are none.
    pub(crate) device: usize,
    /// Whether the kubelet may hand it out.
    pub(crate) is_healthy: bool,
}

/// A pool as containers get it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Pool {
    pub(crate) name: String,
    /// On the node.
    pub(crate) directory: PathBuf,
    /// In containers.
    pub(crate) mount_path: PathBuf,
    pub(crate) gid: u32,
    pub(crate) user_namespaces: UserNamespaces,
}

/// What a unit is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum ResourceKind {
    /// So many bytes of a private `/dev/shm`.
    Shm { unit: u64 },
    /// One attachment.
    Pool(Pool),
    /// The identity service, and nothing else.
    Agent,
    /// A slot of one of these.
    Slots(AcceleratorKind, Vec<Accelerator>),
}

/// A resource.
#[derive(Clone, Debug)]
pub(crate) struct Resource {
    /// `domain/name`.
    pub(crate) name: String,
    /// What its units are.
    pub(crate) kind: ResourceKind,
    units: Vec<Unit>,
    /// Places of units, in the order of their ids: a map of ids would be larger than all units.
    by_id: Vec<u32>,
}

impl Resource {
    /// A resource of these units. Should two have one id, the first counts.
    pub(crate) fn new(name: String, kind: ResourceKind, units: Vec<Unit>) -> Self {
        let mut by_id: Vec<u32> = (0..).take(units.len()).collect();
        by_id.sort_by_key(|&at| units[at as usize].id.as_str());
        by_id.dedup_by_key(|at| units[*at as usize].id.as_str());
        Self { name, kind, units, by_id }
    }

    /// Where the unit of this id is.
    fn place(&self, id: &str) -> Option<usize> {
        let found = self.by_id.binary_search_by(|&at| self.units[at as usize].id.as_str().cmp(id));
        found.ok().map(|at| self.by_id[at] as usize)
    }

    /// All units.
    pub(crate) fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The unit of this id.
    #[cfg(test)]
    pub(crate) fn unit(&self, id: &str) -> Option<&Unit> {
        self.place(id).map(|at| &self.units[at])
    }

    /// Part of the name after the `/`.
    #[cfg(test)]
    pub(crate) fn short_name(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or(&self.name)
    }

    /// The same, with what is known of the health of each device. Whether anything changed.
    pub(crate) fn set_health(&mut self, is_healthy: impl Fn(usize) -> bool) -> bool {
        let mut changed = false;
        for unit in &mut self.units {
            let now = is_healthy(unit.device);
            changed |= unit.is_healthy != now;
            unit.is_healthy = now;
        }
        changed
    }

    /// Bytes of what so many units are.
    pub(crate) fn bytes(&self, units: usize) -> u64 {
        match self.kind {
            ResourceKind::Shm { unit } => unit.saturating_mul(units as u64),
            ResourceKind::Pool(_) | ResourceKind::Agent | ResourceKind::Slots(..) => 0,
        }
    }
}

/// An upper bound of the bytes that a list of so many units of memory or attachments takes: the id, its health at its longest,
/// a NUMA node, and the tags and lengths around them.
pub(crate) fn list_bytes(units: u64) -> u64 {
    let digits = units.checked_ilog10().unwrap_or(0) + 1;
    units.saturating_mul(u64::from(digits) + "n00u".len() as u64 + "Unhealthy".len() as u64 + 14)
}

/// The same of the slots of a device.
pub(crate) fn slots_bytes(id: &str, slots: u32) -> u64 {
    // The separator, and one more byte for each length of a long name.
    let digits = slots.checked_ilog10().unwrap_or(0) as usize + 1;
    u64::from(slots).saturating_mul((id.len() + "::".len() + digits + "Unhealthy".len() + 18) as u64)
}

/// What the node has.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeResources {
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// Its NUMA nodes; fewer than two make no difference.
    pub(crate) numa: Vec<Numa>,
    /// GPUs and NPUs.
    pub(crate) accelerators: Vec<Accelerator>,
}

/// Everything to advertise. Only what there is: without a GPU there is no resource of GPUs.
pub(crate) fn plan(config: &Config, node: &NodeResources) -> Vec<Resource> {
    let named = |name: &str| format!("{}/{name}", config.domain);
    let mut resources = Vec::new();
    let unit = config.shm.unit.0;
    let count = config.shm.budget.of(node.memory).checked_div(unit).unwrap_or(0);
    if count > 0 {
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
    if config.identity.attachments > 0 {
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

/// Units of memory, spread over the NUMA nodes as the memory is.
fn shm_units(count: u64, numa: &[Numa]) -> Vec<Unit> {
    let plain = |id, numa| Unit { id, numa, device: 0, is_healthy: true };
    let total: u64 = numa.iter().map(|node| node.bytes).sum();
    if numa.len() < 2 || total == 0 {
        return (0..count).map(|at| plain(format!("u{at}"), None)).collect();
    }
    let mut units = Vec::new();
    let (mut seen, mut given) = (0_u128, 0);
    for node in numa {
        // By running sums, so that nothing is lost by rounding.
        seen += u128::from(node.bytes);
        let until = u64::try_from(u128::from(count) * seen / u128::from(total)).unwrap_or(count);
        units.extend((0..until - given).map(|at| plain(format!("n{}u{at}", node.id), Some(node.id))));
        given = until;
    }
    units
}
