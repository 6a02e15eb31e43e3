//! The plugins of resources, and how the kubelet finds them.
//!
//! | file | concept |
//! |---|---|
//! | `plugin.rs` | one plugin, as the kubelet calls it |
//! | `legacy.rs` | plugins that register at `kubelet.sock` |
//! | `watcher.rs` | sockets that come and go in `plugins_registry` |
//! | `reconcile.rs` | plugins that are found by their socket |

mod legacy;
mod plugin;
mod reconcile;
mod watcher;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::config::{Config, Race};
use crate::devices::Manager;
use crate::dra::Dra;
use crate::journal::{Event, Journal};
use crate::process::Process;

pub(crate) use plugin::Plugin;

type Clients = BTreeMap<String, Vec<Arc<Plugin>>>;

/// The plugins of one run of the kubelet.
#[derive(Debug)]
pub(crate) struct Registry {
    config: Config,
    journal: Arc<Journal>,
    manager: Arc<Manager>,
    dra: Arc<Dra>,
    process: Process,
    clients: Mutex<Clients>,
}

impl Registry {
    pub(crate) fn new(
        config: Config,
        journal: Arc<Journal>,
        (manager, dra): (Arc<Manager>, Arc<Dra>),
        process: Process,
    ) -> Arc<Self> {
        Arc::new(Self { config, journal, manager, dra, process, clients: Mutex::default() })
    }

    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects to the plugin at `socket`, and from then on follows its lists.
    async fn connect(
        self: &Arc<Self>,
        resource: &str,
        socket: &Path,
        cancelled: &CancellationToken,
    ) -> Result<(), String> {
        let plugin = Arc::new(Plugin::new(resource, socket));
        self.add(&plugin);
        let connected = async {
            plugin.connect(&self.config.clock, &self.process).await?;
            self.manager.connected(&plugin).await
        };
        let connected = cancelled.run_until_cancelled(connected).await;
        let connected =
            connected.unwrap_or_else(|| Err("failed to dial device plugin: context canceled".to_owned()));
        let resource = resource.to_owned();
        if let Err(error) = connected {
            self.remove(&plugin);
            self.journal.add(Event::RegisterRefused { resource, error: error.clone() });
            return Err(error);
        }
        self.journal.add(Event::Registered { resource, socket: socket.display().to_string() });
        let registry = Arc::clone(self);
        self.process.spawn(async move { registry.follow(plugin).await });
        Ok(())
    }

    async fn follow(&self, plugin: Arc<Plugin>) {
        let error = match plugin.list_and_watch().await {
            Err(error) => error.to_string(),
            Ok(mut lists) => loop {
                match lists.next().await {
                    Ok(list) => self.manager.listed(&plugin.resource, list.devices),
                    Err(error) => break error,
                }
            },
        };
        self.journal.add(Event::StreamEnded { resource: plugin.resource.clone(), error });
        // In the race by name, this is the plugin that registered last.
        if let Some(current) = self.current(&plugin.resource, &plugin.socket) {
            self.disconnect(&current);
        }
    }

    /// Disconnects a plugin whose socket was removed.
    fn deregister(&self, resource: &str, socket: &Path) {
        if let Some(current) = self.current(resource, socket) {
            self.disconnect(&current);
        }
    }

    fn disconnect(&self, plugin: &Arc<Plugin>) {
        self.remove(plugin);
        plugin.close();
        self.manager.disconnected(plugin);
    }

    fn add(&self, plugin: &Arc<Plugin>) {
        let mut clients = self.clients();
        let same = clients.entry(plugin.resource.clone()).or_default();
        if self.config.race == Race::ByName {
            same.clear();
        }
        same.push(Arc::clone(plugin));
    }

    /// Removes a plugin whose registration failed; in the race by name, also the plugin that registered before it.
    fn remove(&self, plugin: &Plugin) {
        let mut clients = self.clients();
        if let Some(same) = clients.get_mut(&plugin.resource) {
            same.retain(|other| self.config.race == Race::Fixed && other.socket != plugin.socket);
        }
    }

    fn current(&self, resource: &str, socket: &Path) -> Option<Arc<Plugin>> {
        let clients = self.clients();
        let mut same = clients.get(resource)?.iter();
        same.find(|other| self.config.race == Race::ByName || other.socket == socket).cloned()
    }
}
