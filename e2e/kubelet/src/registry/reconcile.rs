//! Plugins that are found by their socket: the kubelet asks for their name, registers and notifies them, and disconnects them
//! when the socket is removed.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shmesh_kubelet_api::pluginregistration::registration_client::RegistrationClient;
use shmesh_kubelet_api::pluginregistration::{InfoRequest, PluginInfo, RegistrationStatus};
use shmesh_kubelet_api::{API_VERSION, DEVICE_PLUGIN_TYPE, DRA_PLUGIN_TYPE};
use tokio_util::sync::CancellationToken;
use tonic::Request;

use super::Registry;
use super::watcher::{Sockets, Watcher};
use crate::dra::Dra;
use crate::journal::Event;
use crate::names::is_extended_resource_name;
use crate::wire::{Authority, Channel, GoError, dial};

const PERIOD: Duration = Duration::from_secs(1);
const DIAL_LIMIT: Duration = Duration::from_secs(10);
const INFO_LIMIT: Duration = Duration::from_secs(1);
const NOTIFY_LIMIT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(122);

/// The part of the kubelet that handles plugins of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handler {
    DevicePlugin,
    Driver,
}

impl Handler {
    fn of_type(name: &str) -> Option<Self> {
        match name {
            DEVICE_PLUGIN_TYPE => Some(Self::DevicePlugin),
            DRA_PLUGIN_TYPE => Some(Self::Driver),
            _ => None,
        }
    }

    fn validate(self, info: &PluginInfo, endpoint: &Path) -> Result<(), String> {
        match self {
            Self::DevicePlugin => validate(info),
            Self::Driver => Dra::validate(&info.name, endpoint, &info.supported_versions),
        }
    }

    async fn register(
        self,
        registry: &Arc<Registry>,
        info: &PluginInfo,
        endpoint: &Path,
    ) -> Result<(), String> {
        match self {
            Self::DevicePlugin => registry.connect(&info.name, endpoint, &CancellationToken::new()).await,
            Self::Driver => registry.dra.register(&info.name, endpoint, &info.supported_versions),
        }
    }

    fn deregister(self, registry: &Registry, name: &str, endpoint: &Path) {
        match self {
            Self::DevicePlugin => registry.deregister(name, endpoint),
            Self::Driver => registry.dra.deregister(name, endpoint),
        }
    }
}

/// A plugin that has been registered from its socket.
#[derive(Clone, Debug)]
struct FoundSocket {
    made: u64,
    handler: Handler,
    name: String,
    endpoint: PathBuf,
}

/// The operation in progress for a socket, or its last error.
#[derive(Clone, Debug)]
enum Operation {
    Running,
    Failed { pause: Duration, at: Duration },
}

#[derive(Debug, Default)]
struct Progress {
    found: BTreeMap<PathBuf, FoundSocket>,
    operations: BTreeMap<PathBuf, Operation>,
}

/// The loop that registers a plugin for each socket, and disconnects those without a socket.
#[derive(Debug)]
struct Reconciler {
    registry: Arc<Registry>,
    sockets: Sockets,
    progress: Mutex<Progress>,
}

impl Registry {
    /// Watches the directory of sockets and registers those that it finds.
    pub(crate) fn watch_sockets(self: &Arc<Self>) -> io::Result<()> {
        let sockets = Sockets::default();
        let watcher = Watcher::new(&self.config.paths().plugins_registry(), sockets.clone())?;
        self.process.spawn(watcher.run());
        let reconciler =
            Arc::new(Reconciler { registry: Arc::clone(self), sockets, progress: Mutex::default() });
        let clock = self.config.clock.clone();
        self.process.spawn(async move {
            loop {
                reconciler.reconcile();
                clock.sleep(PERIOD).await;
            }
        });
        Ok(())
    }
}

impl Reconciler {
    fn progress(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Disconnects plugins whose sockets were removed or created again, and registers new sockets. A socket that was created
    /// again is registered in the next round.
    fn reconcile(self: &Arc<Self>) {
        let sockets = self.sockets.all();
        let found = self.progress().found.clone();
        for (socket, plugin) in &found {
            if sockets.get(socket) != Some(&plugin.made) {
                let this = Arc::clone(self);
                let (path, plugin) = (socket.clone(), plugin.clone());
                self.start(socket, async move {
                    this.progress().found.remove(&path);
                    plugin.handler.deregister(&this.registry, &plugin.name, &plugin.endpoint);
                    Ok(())
                });
            }
        }
        for (socket, made) in sockets {
            if found.get(&socket).is_none_or(|plugin| plugin.made != made) {
                let this = Arc::clone(self);
                let path = socket.clone();
                self.start(&socket, async move { this.register(&path, made).await });
            }
        }
    }

    /// Starts an operation, unless one for this socket is in progress or failed recently.
    fn start(
        self: &Arc<Self>,
        socket: &Path,
        operation: impl Future<Output = Result<(), String>> + Send + 'static,
    ) {
        let clock = &self.registry.config.clock;
        let pause = match self.progress().operations.get(socket) {
            None => Duration::ZERO,
            Some(Operation::Running) => return,
            Some(Operation::Failed { pause, at }) if clock.now().saturating_sub(*at) <= *pause => return,
            Some(Operation::Failed { pause, .. }) => *pause,
        };
        self.progress().operations.insert(socket.to_owned(), Operation::Running);
        let (this, socket) = (Arc::clone(self), socket.to_owned());
        self.registry.process.spawn(async move {
            match operation.await {
                Ok(()) => drop(this.progress().operations.remove(&socket)),
                Err(error) => {
                    let pause = if pause.is_zero() { FIRST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
                    let at = this.registry.config.clock.now();
                    this.progress().operations.insert(socket.clone(), Operation::Failed { pause, at });
                    let socket = socket.display().to_string();
                    this.registry.journal.add(Event::RegistrationFailed { socket, error });
                }
            }
        });
    }

    async fn register(&self, socket: &Path, made: u64) -> Result<(), String> {
        let name = socket.display();
        let Registry { config, process, .. } = &*self.registry;
        let channel = dial(socket, &Authority::of_path(socket), DIAL_LIMIT, &config.clock, process).await;
        let channel = channel.map_err(|error| {
            format!("RegisterPlugin error -- dial failed at socket {name}, err: failed to dial socket {name}, err: {error}")
        })?;
        let result = self.register_over(&channel, socket, made).await;
        channel.close();
        result
    }

    async fn register_over(&self, channel: &Channel, socket: &Path, made: u64) -> Result<(), String> {
        let name = socket.display();
        let info = self.info(channel).await.map_err(|error| {
            format!("RegisterPlugin error -- failed to get plugin info using RPC GetInfo at socket {name}, err: {error}")
        })?;
        let Some(handler) = Handler::of_type(&info.r#type) else {
            let error = format!(
                "RegisterPlugin error -- no handler registered for plugin type: {} at socket {name}",
                info.r#type
            );
            return self.notify(channel, socket, Err(error)).await;
        };
        let endpoint =
            if info.endpoint.is_empty() { socket.to_owned() } else { PathBuf::from(&info.endpoint) };
        if let Err(error) = handler.validate(&info, &endpoint) {
            let error = format!("RegisterPlugin error -- plugin validation failed with err: {error}");
            return self.notify(channel, socket, Err(error)).await;
        }
        let found = FoundSocket { made, handler, name: info.name.clone(), endpoint: endpoint.clone() };
        self.progress().found.insert(socket.to_owned(), found);
        if let Err(error) = handler.register(&self.registry, &info, &endpoint).await {
            self.progress().found.remove(socket);
            let error = format!("RegisterPlugin error -- plugin registration failed with err: {error}");
            return self.notify(channel, socket, Err(error)).await;
        }
        let told = self.notify(channel, socket, Ok(())).await;
        told.map_err(|error| {
            self.progress().found.remove(socket);
            handler.deregister(&self.registry, &info.name, &endpoint);
            format!(
                "RegisterPlugin error -- failed to send registration status at socket {name}, err: {error}"
            )
        })
    }

    async fn info(&self, channel: &Channel) -> Result<PluginInfo, GoError> {
        let mut request = Request::new(InfoRequest {});
        request.set_timeout(INFO_LIMIT);
        let mut client = RegistrationClient::new(channel.clone());
        match self.registry.config.clock.timeout(INFO_LIMIT, client.get_info(request)).await {
            Some(answer) => Ok(answer.map_err(|status| GoError::of(&status))?.into_inner()),
            None => Err(GoError::deadline()),
        }
    }

    /// Notifies the plugin of the result of its registration, and returns that, or that the notification failed.
    async fn notify(
        &self,
        channel: &Channel,
        socket: &Path,
        outcome: Result<(), String>,
    ) -> Result<(), String> {
        let error = outcome.clone().err().unwrap_or_default();
        let status = RegistrationStatus { plugin_registered: outcome.is_ok(), error: error.clone() };
        self.registry.journal.add(Event::Notified {
            socket: socket.display().to_string(),
            registered: outcome.is_ok(),
            error: error.clone(),
        });
        let mut request = Request::new(status);
        request.set_timeout(NOTIFY_LIMIT);
        let mut client = RegistrationClient::new(channel.clone());
        let told = client.notify_registration_status(request);
        match self.registry.config.clock.timeout(NOTIFY_LIMIT, told).await {
            Some(Ok(_)) => outcome,
            Some(Err(status)) => Err(format!("{error}: {}", GoError::of(&status))),
            None => Err(format!("{error}: {}", GoError::deadline())),
        }
    }
}

fn validate(info: &PluginInfo) -> Result<(), String> {
    if !info.supported_versions.iter().any(|version| version == API_VERSION) {
        let versions = info.supported_versions.join(" ");
        return Err(format!(
            "manager version, {API_VERSION}, is not among plugin supported versions [{versions}]"
        ));
    }
    if !is_extended_resource_name(&info.name) {
        return Err(format!(
            "invalid name of device plugin socket: the ResourceName {:?} is invalid",
            info.name
        ));
    }
    Ok(())
}
