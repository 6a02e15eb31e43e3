//! Compares the slices that are there with those that should be.
//!
//! `generation` and `resourceSliceCount` follow the rules of k8s.io/dynamic-resource-allocation: a
//! scheduler uses a pool only when it sees as many slices of the highest generation as each of them says. So the
//! generation stays when one write is enough, and otherwise each slice gets the next one.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::equality::canonical;

/// Maximum number of devices of a slice in the API.
const MAX_DEVICES: usize = 128;
/// The same if one of them has taints or consumes counters.
const MAX_TAINTED_DEVICES: usize = 64;
/// Maximum length of a name of an object.
const MAX_NAME: usize = 253;

/// The properties that all slices of a pool share.
#[derive(Clone, Debug)]
pub(super) struct PoolIdentity {
    pub(super) driver: String,
    pub(super) node: String,
    pub(super) owner: OwnerReference,
}

/// The devices of a slice as the API server stored them: it drops fields of features that are off.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Adoption {
    pub(super) wanted: Vec<Device>,
    pub(super) stored: Vec<Device>,
}

/// By name of the slice.
pub(super) type Slices = BTreeMap<String, ResourceSlice>;
/// By name of the slice.
pub(super) type Adoptions = BTreeMap<String, Adoption>;

/// Writes that make the slices as they should be, in their order: first deletions, then changes, then new slices.
#[derive(Debug, Default)]
pub(super) struct SliceWrites {
    pub(super) delete: Vec<ResourceSlice>,
    pub(super) apply: Vec<ResourceSlice>,
}

impl SliceWrites {
    pub(super) fn is_empty(&self) -> bool {
        self.delete.is_empty() && self.apply.is_empty()
    }
}

/// Compares `existing`, all slices of the driver on the node, with the devices that the slices should have.
///
/// `last_generation` is the highest generation that was ever seen.
pub(super) fn plan(
    identity: &PoolIdentity,
    devices: &[Device],
    existing: &Slices,
    adoptions: &Adoptions,
    last_generation: i64,
) -> SliceWrites {
    let chunks = split(devices);
    let names: Vec<String> = (0..chunks.len()).map(|index| identity.slice_name(index)).collect();
    let of_pool = |slice: &&ResourceSlice| slice.spec.pool.name == identity.node;
    let found = existing.values().filter(of_pool).map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
    let mut generation = found.max(last_generation);
    let wanted = |index: usize, generation: i64| {
        let pool = ResourcePool {
            name: identity.node.clone(),
            generation,
            resource_slice_count: i64::try_from(chunks.len()).unwrap_or(i64::MAX),
        };
        identity.slice(
            names[index].clone(),
            pool,
            keep_taint_times(chunks[index], existing.get(&names[index])),
        )
    };
    let is_right = |index: usize| {
        let slice = wanted(index, found);
        existing.get(&names[index]).is_some_and(|other| is_same(&slice, other, adoptions.get(&names[index])))
    };
    let mut changed: Vec<usize> = (0..chunks.len()).filter(|index| !is_right(*index)).collect();
    let is_new = |index: &usize| !existing.contains_key(&names[*index]);
    if changed.len() > 1 || changed.iter().any(is_new) {
        generation += 1;
        changed = (0..chunks.len()).collect();
        changed.sort_by_key(is_new);
    } else {
        // One write, which leaves the generation of all other slices as it is.
        generation = found;
    }
    SliceWrites {
        delete: existing
            .iter()
            .filter(|(name, _)| !names.contains(name))
            .map(|(_, slice)| slice.clone())
            .collect(),
        apply: changed.into_iter().map(|index| wanted(index, generation)).collect(),
    }
}

impl PoolIdentity {
    /// The name of a slice begins with its index, because the scheduler tries slices in the order of their names.
    /// It is the same for each instance of the driver, so that two of them do not make two slices.
    fn slice_name(&self, index: usize) -> String {
        let Self { driver, node, .. } = self;
        // Names of drivers and nodes contain the separator, and the name may be cut.
        let hash = fnv1a(format!("{driver}\0{node}").as_bytes());
        let head: String = format!("{index:05x}-{driver}-{node}").chars().take(MAX_NAME - 9).collect();
        format!("{}-{hash:08x}", head.trim_end_matches(['.', '-']))
    }

    fn slice(&self, name: String, pool: ResourcePool, devices: Vec<Device>) -> ResourceSlice {
        ResourceSlice {
            metadata: ObjectMeta {
                name: Some(name),
                owner_references: Some(vec![self.owner.clone()]),
                ..ObjectMeta::default()
            },
            spec: ResourceSliceSpec {
                driver: self.driver.clone(),
                node_name: Some(self.node.clone()),
                pool,
                devices: Some(devices),
                ..ResourceSliceSpec::default()
            },
        }
    }
}

fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// Parts of the list that fit into one slice each; one empty part if there are no devices, which shows that the driver is up.
fn split(devices: &[Device]) -> Vec<&[Device]> {
    let is_costly = |device: &Device| {
        let any = |count: Option<usize>| count.is_some_and(|count| count > 0);
        any(device.taints.as_ref().map(Vec::len)) || any(device.consumes_counters.as_ref().map(Vec::len))
    };
    let most = if devices.iter().any(is_costly) { MAX_TAINTED_DEVICES } else { MAX_DEVICES };
    if devices.is_empty() { vec![devices] } else { devices.chunks(most).collect() }
}

/// The devices with the time of each taint that the slice has already: to write it again is not to add it.
fn keep_taint_times(devices: &[Device], existing: Option<&ResourceSlice>) -> Vec<Device> {
    let mut devices = devices.to_vec();
    let known = existing.and_then(|slice| slice.spec.devices.as_ref()).map_or(&[][..], Vec::as_slice);
    for device in devices.iter_mut().filter(|device| device.taints.is_some()) {
        let Some(other) = known.iter().find(|other| other.name == device.name) else { continue };
        for taint in device.taints.iter_mut().flatten().filter(|taint| taint.time_added.is_none()) {
            let same = other.taints.iter().flatten().find(|other| {
                other.key == taint.key && other.effect == taint.effect && other.value == taint.value
            });
            taint.time_added = same.and_then(|same| same.time_added.clone());
        }
    }
    devices
}

pub(super) fn canonical_devices(slice: &ResourceSlice) -> Vec<Device> {
    slice.spec.devices.iter().flatten().map(canonical).collect()
}

/// Whether the slices differ in nothing that matters; with devices as the API server stores them, if that is known.
fn is_same(wanted: &ResourceSlice, found: &ResourceSlice, adoption: Option<&Adoption>) -> bool {
    let (devices, stored) = (canonical_devices(wanted), canonical_devices(found));
    let is_adopted = || adoption.is_some_and(|known| known.wanted == devices && known.stored == stored);
    is_same_beside_devices(wanted, found) && (devices == stored || is_adopted())
}

/// Whether the slices differ in nothing that matters, except devices.
pub(super) fn is_same_beside_devices(wanted: &ResourceSlice, found: &ResourceSlice) -> bool {
    let rest = |slice: &ResourceSlice| {
        let spec = &slice.spec;
        let counters = spec.shared_counters.clone().filter(|list| !list.is_empty());
        let flag = |value: Option<bool>| value.unwrap_or(false);
        (
            (
                spec.driver.clone(),
                spec.node_name.clone(),
                spec.pool.clone(),
                spec.node_selector.clone(),
                counters,
            ),
            (flag(spec.all_nodes), flag(spec.per_device_node_selection)),
            slice.metadata.owner_references.clone(),
        )
    };
    rest(wanted) == rest(found)
}
