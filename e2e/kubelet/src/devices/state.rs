//! Devices, endpoints and allocations, and their changes by ListAndWatch and with time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use shmesh_kubelet_api::HEALTHY;
use shmesh_kubelet_api::deviceplugin::{Device, DevicePluginOptions};

use super::Names;
use super::checkpoint::{Data, Entry};
use super::held::{Allocations, NO_NUMA, Share};
use crate::config::Race;
use crate::random::Chance;
use crate::registry::Plugin;

/// How long a resource is kept after its plugin has gone.
const GRACE: Duration = Duration::from_secs(5 * 60);

/// A device: its resource, its name, and its NUMA nodes.
#[derive(Clone, Debug)]
pub(crate) struct DeviceLocation {
    pub(crate) resource: String,
    pub(crate) device: String,
    pub(crate) nodes: Vec<i64>,
}

/// The plugin of a resource.
#[derive(Clone, Debug)]
pub(super) struct Endpoint {
    /// `None` if the resource is only known from the checkpoint.
    pub(super) plugin: Option<Arc<Plugin>>,
    pub(super) options: DevicePluginOptions,
    pub(super) stopped: Option<Duration>,
}

impl Endpoint {
    /// The plugin, unless it is gone.
    pub(super) fn running(&self, resource: &str) -> Result<Arc<Plugin>, String> {
        match (&self.plugin, self.stopped) {
            (Some(plugin), None) => Ok(Arc::clone(plugin)),
            _ => Err(format!("endpoint {resource} has been stopped")),
        }
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) endpoints: BTreeMap<String, Endpoint>,
    /// The devices of the last list of ListAndWatch.
    pub(super) known: BTreeMap<String, BTreeMap<String, Device>>,
    pub(super) healthy: BTreeMap<String, Names>,
    pub(super) unhealthy: BTreeMap<String, Names>,
    /// Devices that cannot be allocated: in use by pods, or leaked.
    pub(super) allocated: BTreeMap<String, Names>,
    pub(super) held: Allocations,
    /// Devices of finished init containers of the pod that is being admitted; its later containers reuse them.
    pub(super) reusable: (String, BTreeMap<String, Names>),
    pub(super) chance: Chance,
}

impl State {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            endpoints: BTreeMap::new(),
            known: BTreeMap::new(),
            healthy: BTreeMap::new(),
            unhealthy: BTreeMap::new(),
            allocated: BTreeMap::new(),
            held: Allocations::default(),
            reusable: Default::default(),
            chance: Chance::new(seed),
        }
    }

    /// Restores allocations and resources. A resource has no devices until a plugin registers.
    pub(super) fn restore(&mut self, data: Data, now: Duration) {
        for entry in data.pod_device_entries.unwrap_or_default() {
            if let Some(answer) = entry.answer() {
                let share = Share { devices: entry.device_ids, answer };
                self.held.insert(&entry.pod_uid, &entry.container_name, &entry.resource_name, share);
            }
        }
        self.allocated = self.held.all();
        for resource in data.registered_devices.into_keys() {
            self.healthy.insert(resource.clone(), Names::new());
            self.unhealthy.insert(resource.clone(), Names::new());
            let options = DevicePluginOptions::default();
            self.endpoints.insert(resource, Endpoint { plugin: None, options, stopped: Some(now) });
        }
    }

    pub(super) fn checkpoint(&mut self) -> Data {
        let entries: Vec<Entry> = self
            .held
            .shares()
            .map(|(uid, container, resource, share)| Entry::new(uid, container, resource, share))
            .collect();
        let registered = self.healthy.iter();
        let chance = &mut self.chance;
        Data {
            pod_device_entries: (!entries.is_empty()).then_some(entries),
            registered_devices: registered
                .map(|(resource, names)| (resource.clone(), chance.shuffled(names.iter().cloned())))
                .collect(),
        }
    }

    pub(super) fn connect(&mut self, plugin: Arc<Plugin>, options: DevicePluginOptions) {
        let resource = plugin.resource.clone();
        self.endpoints.insert(resource, Endpoint { plugin: Some(plugin), options, stopped: None });
    }

    pub(super) fn disconnect(&mut self, plugin: &Plugin, race: Race, now: Duration) {
        let Some(endpoint) = self.endpoints.get_mut(&plugin.resource) else { return };
        let same = endpoint.plugin.as_ref().is_some_and(|current| current.socket == plugin.socket);
        if race == Race::ByName || same {
            endpoint.stopped = Some(now);
            let healthy = self.healthy.get_mut(&plugin.resource).map(std::mem::take).unwrap_or_default();
            self.unhealthy.entry(plugin.resource.clone()).or_default().extend(healthy);
        }
    }

    /// Replaces the list of devices. Returns how many are healthy, and the pods whose status changes.
    pub(super) fn replace(&mut self, resource: &str, devices: Vec<Device>) -> (usize, BTreeSet<String>) {
        let old = self.known.remove(resource).unwrap_or_default();
        let (mut healthy, mut unhealthy, mut known) = (Names::new(), Names::new(), BTreeMap::new());
        let (mut count, mut pods) = (0, BTreeSet::new());
        for device in devices {
            if old.get(&device.id).is_none_or(|old| old.health != device.health) {
                pods.extend(self.held.pod_with(&device.id).cloned());
            }
            if device.health == HEALTHY {
                healthy.insert(device.id.clone());
                count += 1;
            } else {
                unhealthy.insert(device.id.clone());
            }
            known.insert(device.id.clone(), device);
        }
        self.healthy.insert(resource.to_owned(), healthy);
        self.unhealthy.insert(resource.to_owned(), unhealthy);
        self.known.insert(resource.to_owned(), known);
        (count, pods)
    }

    pub(super) fn capacity(&mut self, now: Duration) -> (Vec<(String, u64, u64)>, Vec<String>) {
        let names: BTreeSet<String> = self.healthy.keys().chain(self.unhealthy.keys()).cloned().collect();
        let (mut present, mut removed) = (Vec::new(), Vec::new());
        for name in names {
            let stopped = self.endpoints.get(&name).map(|endpoint| endpoint.stopped);
            let expired = |at: Duration| now.saturating_sub(at) > GRACE;
            if stopped.is_none_or(|stopped| stopped.is_some_and(expired)) {
                self.endpoints.remove(&name);
                self.healthy.remove(&name);
                self.unhealthy.remove(&name);
                removed.push(name);
                continue;
            }
            let count = |of: &BTreeMap<String, Names>| of.get(&name).map_or(0, BTreeSet::len);
            let (healthy, all) = (count(&self.healthy), count(&self.healthy) + count(&self.unhealthy));
            present.push((name, all as u64, healthy as u64));
        }
        (present, removed)
    }

    pub(super) fn free_all_but(&mut self, active: &BTreeSet<String>) {
        if self.held.retain(active) {
            self.allocated = self.held.all();
        }
    }

    pub(super) fn allocated(&self, resource: &str) -> Names {
        self.allocated.get(resource).cloned().unwrap_or_default()
    }

    pub(super) fn allocated_counts(&self, uid: &str) -> Option<Vec<(String, u64)>> {
        let count = |(name, devices): (&String, &Names)| (name.clone(), devices.len() as u64);
        self.held.has(uid).then(|| self.allocated.iter().map(count).collect())
    }

    pub(super) fn held_by(&self, uid: &str, container: &str) -> Vec<DeviceLocation> {
        let mut located = Vec::new();
        for (resource, share) in self.held.of(uid, container).into_iter().flatten() {
            let mut nodes: BTreeMap<&String, Vec<i64>> = BTreeMap::new();
            for (node, devices) in &share.devices {
                for device in devices {
                    nodes.entry(device).or_default().extend((*node != NO_NUMA).then_some(*node));
                }
            }
            located.extend(nodes.into_iter().map(|(device, nodes)| DeviceLocation {
                resource: resource.clone(),
                device: device.clone(),
                nodes,
            }));
        }
        located
    }

    pub(super) fn health_of(&self, uid: &str, container: &str) -> Vec<(String, String, String)> {
        let mut health = Vec::new();
        for (resource, share) in self.held.of(uid, container).into_iter().flatten() {
            for name in share.names() {
                // As in the real kubelet, a device that is no longer in the list counts as healthy here.
                let device = self.known.get(resource).and_then(|devices| devices.get(&name));
                let healthy = device.is_none_or(|device| device.health == HEALTHY);
                let word = if healthy { HEALTHY } else { shmesh_kubelet_api::UNHEALTHY };
                health.push((resource.clone(), name, word.to_owned()));
            }
        }
        health
    }

    pub(super) fn holders(&self, resource: &str) -> Vec<(String, String, String)> {
        let mut holders = Vec::new();
        for (uid, container, _, share) in self.held.shares().filter(|(_, _, of, _)| *of == resource) {
            holders.extend(share.names().into_iter().map(|name| (name, uid.clone(), container.clone())));
        }
        holders
    }
}

pub(super) fn numa_nodes(device: &Device) -> impl Iterator<Item = i64> + '_ {
    device.topology.iter().flat_map(|topology| topology.nodes.iter().map(|node| node.id))
}
