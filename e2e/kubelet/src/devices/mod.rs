//! The device manager: the devices and their allocation.
//!
//! | file | concept |
//! |---|---|
//! | `state.rs` | devices, endpoints and allocations, and their changes by ListAndWatch and with time |
//! | `held.rs` | the devices of each container, and the answers of Allocate for them |
//! | `choose.rs` | choosing the devices of a container |
//! | `allocate.rs` | calls of Allocate |
//! | `options.rs` | the answers of all resources, merged for the runtime |
//! | `checkpoint.rs` | the file that outlives the kubelet |

mod allocate;
mod checkpoint;
mod choose;
mod held;
mod options;
mod state;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use state::State;

use crate::api::Api;
use crate::config::Config;
use crate::journal::{Event, Journal};
use crate::registry::Plugin;

pub(crate) use checkpoint::checksum_matches;
pub(crate) use state::DeviceLocation;

/// The names of devices.
pub(crate) type Names = BTreeSet<String>;

/// The device manager of one run of the kubelet.
#[derive(Debug)]
pub(crate) struct Manager {
    config: Config,
    journal: Arc<Journal>,
    api: Arc<Api>,
    state: Mutex<State>,
}

impl Manager {
    /// Reads the checkpoint, as far as it can be read.
    pub(crate) fn new(config: Config, journal: Arc<Journal>, api: Arc<Api>) -> Self {
        let mut state = State::new(config.seed);
        match checkpoint::read(&config.paths().checkpoint()) {
            Ok(Some(data)) => state.restore(data, config.clock.now()),
            Ok(None) => {}
            Err(error) => journal.add(Event::CheckpointIgnored { error }),
        }
        Self { config, journal, api, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is the same node as before, as far as the kubelet can tell.
    pub(crate) fn has_checkpoint(&self) -> bool {
        self.config.paths().checkpoint().exists()
    }

    fn write_checkpoint(&self) -> Result<(), String> {
        let data = self.state().checkpoint();
        let path = self.config.paths().checkpoint();
        checkpoint::write(&path, data).map_err(|error| {
            format!("failed to write checkpoint file \"kubelet_internal_checkpoint\": {error}")
        })
    }

    /// Makes a plugin that has answered the endpoint of its resource.
    pub(crate) async fn connected(&self, plugin: &Arc<Plugin>) -> Result<(), String> {
        let options = plugin.options().await;
        let options = options.map_err(|error| format!("failed to get device plugin options: {error}"))?;
        self.state().connect(Arc::clone(plugin), options);
        self.journal.changed();
        Ok(())
    }

    /// Gives up the endpoint of the resource, even if it is a newer plugin; if the race is fixed, only this plugin.
    pub(crate) fn disconnected(&self, plugin: &Plugin) {
        self.state().disconnect(plugin, self.config.race, self.config.clock.now());
        self.journal.add(Event::Disconnected { resource: plugin.resource.clone() });
    }

    /// Handles a list that ListAndWatch sent.
    pub(crate) fn listed(&self, resource: &str, devices: Vec<shmesh_kubelet_api::deviceplugin::Device>) {
        let total = devices.len();
        let (healthy, pods) = self.state().replace(resource, devices);
        // The kubelet logs an error here and continues.
        let _ = self.write_checkpoint();
        self.journal.add(Event::Listed { resource: resource.to_owned(), total, healthy });
        if !pods.is_empty() {
            self.journal.add(Event::HealthChanged { pods: pods.into_iter().collect() });
        }
    }

    /// Capacity and allocatable by resource. Those without a plugin for five minutes are removed, and named last.
    pub(crate) fn capacity(&self) -> (Vec<(String, u64, u64)>, Vec<String>) {
        let (present, removed) = self.state().capacity(self.config.clock.now());
        if !removed.is_empty() {
            let _ = self.write_checkpoint();
        }
        for resource in &removed {
            self.journal.add(Event::ResourceRemoved { resource: resource.clone() });
        }
        (present, removed)
    }

    /// Frees the devices of pods that are no longer active.
    pub(crate) fn free_what_the_dead_had(&self) {
        let active = self.api.active_uids();
        if self.api.all_known() {
            self.state().free_all_but(&active);
        }
    }

    /// Allocated devices of a resource, those that leaked too.
    pub(crate) fn allocated(&self, resource: &str) -> Names {
        self.state().allocated(resource)
    }

    /// How many devices are allocated, by resource, if the pod has any.
    pub(crate) fn allocated_counts(&self, uid: &str) -> Option<Vec<(String, u64)>> {
        self.state().allocated_counts(uid)
    }

    /// The devices of a container, with resource and location.
    pub(crate) fn held_by(&self, uid: &str, container: &str) -> Vec<DeviceLocation> {
        self.state().held_by(uid, container)
    }

    /// The `allocatedResourcesStatus` of a container: the health of its devices.
    pub(crate) fn health_of(&self, uid: &str, container: &str) -> Vec<(String, String, String)> {
        self.state().health_of(uid, container)
    }

    /// Every device that a pod has, with its pod and container.
    pub(crate) fn holders(&self, resource: &str) -> Vec<(String, String, String)> {
        self.state().holders(resource)
    }
}
