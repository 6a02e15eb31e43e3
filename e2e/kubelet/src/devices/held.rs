//! The devices of each container, and the answers of Allocate for them.

use std::collections::{BTreeMap, BTreeSet};

use shmesh_kubelet_api::deviceplugin::ContainerAllocateResponse;

use super::Names;

/// The NUMA node of a device that is on none.
pub(crate) const NO_NUMA: i64 = -1;

/// The devices of one resource that one container has.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Share {
    /// By NUMA node; a device on two nodes is listed for both.
    pub(crate) devices: BTreeMap<i64, Vec<String>>,
    /// The answer of `Allocate`.
    pub(crate) answer: ContainerAllocateResponse,
}

impl Share {
    pub(crate) fn names(&self) -> Names {
        self.devices.values().flatten().cloned().collect()
    }
}

/// Shares by pod, container, and resource.
#[derive(Debug, Default)]
pub(crate) struct Allocations(BTreeMap<String, BTreeMap<String, BTreeMap<String, Share>>>);

impl Allocations {
    pub(crate) fn insert(&mut self, uid: &str, container: &str, resource: &str, share: Share) {
        let containers = self.0.entry(uid.to_owned()).or_default();
        containers.entry(container.to_owned()).or_default().insert(resource.to_owned(), share);
    }

    pub(crate) fn has(&self, uid: &str) -> bool {
        self.0.contains_key(uid)
    }

    /// Keeps only these pods. Returns whether others were removed.
    pub(crate) fn retain(&mut self, uids: &BTreeSet<String>) -> bool {
        let before = self.0.len();
        self.0.retain(|uid, _| uids.contains(uid));
        self.0.len() != before
    }

    pub(crate) fn of(&self, uid: &str, container: &str) -> Option<&BTreeMap<String, Share>> {
        self.0.get(uid)?.get(container)
    }

    pub(crate) fn names(&self, uid: &str, container: &str, resource: &str) -> Option<Names> {
        Some(self.of(uid, container)?.get(resource)?.names())
    }

    /// Every share with its pod, container and resource.
    pub(crate) fn shares(&self) -> impl Iterator<Item = (&String, &String, &String, &Share)> {
        self.0.iter().flat_map(|(uid, containers)| {
            containers.iter().flat_map(move |(container, resources)| {
                resources.iter().map(move |(resource, share)| (uid, container, resource, share))
            })
        })
    }

    /// All devices that some pod has, by resource.
    pub(crate) fn all(&self) -> BTreeMap<String, Names> {
        let mut all: BTreeMap<String, Names> = BTreeMap::new();
        for (_, _, resource, share) in self.shares() {
            all.entry(resource.clone()).or_default().extend(share.names());
        }
        all
    }

    /// The pod that has a device of this name, of whatever resource: the kubelet does not ask which.
    pub(crate) fn pod_with(&self, device: &str) -> Option<&String> {
        let has = |share: &Share| share.devices.values().flatten().any(|name| name == device);
        self.shares().find(|(_, _, _, share)| has(share)).map(|(uid, ..)| uid)
    }
}
