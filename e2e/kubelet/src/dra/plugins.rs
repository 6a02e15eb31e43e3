//! The plugins of drivers: registration, connections, and the removal of slices of drivers that are gone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shmesh_kubelet_api::dra::dra_plugin_client::DraPluginClient;
use shmesh_kubelet_api::dra::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use shmesh_kubelet_api::drahealth::dra_resource_health_client::DraResourceHealthClient;
use shmesh_kubelet_api::drahealth::{NodeWatchResourcesRequest, NodeWatchResourcesResponse};
use shmesh_kubelet_api::{DRA_V1, DRA_V1BETA1, dra_v1beta1};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::apiserver::ApiServer;
use crate::clock::Clock;
use crate::config::Config;
use crate::journal::{Event, Journal};
use crate::process::Process;
use crate::wire::{Authority, Channel, GoError, MESSAGE_BYTES_MAX, attempt};

/// How long a driver may take for a call.
const CALL_LIMIT: Duration = Duration::from_secs(45);
/// How long a driver may be away before its slices are deleted.
const WIPING_DELAY: Duration = Duration::from_secs(30);
/// The services of the kubelet, the newest first.
const SERVICES: [&str; 2] = [DRA_V1, DRA_V1BETA1];
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(120);

/// The connection to a plugin, which is made again whenever it ends.
#[derive(Clone, Debug)]
enum Link {
    Connecting,
    Up(Channel),
    Failed(String),
}

/// One registered instance of a driver.
#[derive(Debug)]
pub(crate) struct DraPlugin {
    pub(crate) driver: String,
    pub(crate) endpoint: PathBuf,
    service: &'static str,
    link: watch::Sender<Link>,
    /// Cancelled when the plugin is deregistered.
    pub(crate) closed: CancellationToken,
}

impl DraPlugin {
    fn is_connected(&self) -> bool {
        matches!(*self.link.borrow(), Link::Up(_))
    }

    /// Waits while the connection is being made, as a call of grpc-go does, and fails at once if it could not be made.
    async fn channel(&self) -> Result<Channel, GoError> {
        let mut link = self.link.subscribe();
        let settled = link.wait_for(|link| !matches!(link, Link::Connecting));
        let settled = self.closed.run_until_cancelled(settled).await;
        match settled.ok_or_else(GoError::closing)?.as_deref() {
            Ok(Link::Up(channel)) => Ok(channel.clone()),
            Ok(Link::Failed(error)) => {
                let desc = format!("connection error: desc = \"transport: Error while dialing: {error}\"");
                Err(GoError::unavailable(desc))
            }
            _ => Err(GoError::closing()),
        }
    }

    /// Makes the call within the limit of the kubelet.
    async fn call<T, R>(
        &self,
        clock: &Clock,
        message: T,
        call: impl AsyncFnOnce(Channel, Request<T>) -> Result<Response<R>, Status>,
    ) -> Result<R, GoError> {
        let call = async {
            let channel = self.channel().await?;
            let mut request = Request::new(message);
            request.set_timeout(CALL_LIMIT);
            let answer = call(channel, request).await;
            Ok(answer.map_err(|status| GoError::of(&status))?.into_inner())
        };
        clock.timeout(CALL_LIMIT, call).await.unwrap_or_else(|| Err(GoError::deadline()))
    }

    pub(crate) async fn prepare(
        &self,
        claims: Vec<Claim>,
        clock: &Clock,
    ) -> Result<NodePrepareResourcesResponse, GoError> {
        if self.service == DRA_V1 {
            let request = NodePrepareResourcesRequest { claims };
            return self
                .call(clock, request, async |channel, request| {
                    api(channel).node_prepare_resources(request).await
                })
                .await;
        }
        let claims = claims.into_iter().map(beta).collect();
        let request = dra_v1beta1::NodePrepareResourcesRequest { claims };
        let answer = self
            .call(clock, request, async |channel, request| {
                beta_api(channel).node_prepare_resources(request).await
            })
            .await?;
        let device = |device: dra_v1beta1::Device| Device {
            request_names: device.request_names,
            pool_name: device.pool_name,
            device_name: device.device_name,
            cdi_device_ids: device.cdi_device_ids,
            share_id: None,
        };
        let claims = answer.claims.into_iter().map(|(uid, claim)| {
            let devices = claim.devices.into_iter().map(device).collect();
            (uid, NodePrepareResourceResponse { devices, error: claim.error })
        });
        Ok(NodePrepareResourcesResponse { claims: claims.collect() })
    }

    pub(crate) async fn unprepare(
        &self,
        claims: Vec<Claim>,
        clock: &Clock,
    ) -> Result<NodeUnprepareResourcesResponse, GoError> {
        if self.service == DRA_V1 {
            let request = NodeUnprepareResourcesRequest { claims };
            return self
                .call(clock, request, async |channel, request| {
                    api(channel).node_unprepare_resources(request).await
                })
                .await;
        }
        let claims = claims.into_iter().map(beta).collect();
        let request = dra_v1beta1::NodeUnprepareResourcesRequest { claims };
        let answer = self
            .call(clock, request, async |channel, request| {
                beta_api(channel).node_unprepare_resources(request).await
            })
            .await?;
        let result = |(uid, claim): (String, dra_v1beta1::NodeUnprepareResourceResponse)| {
            (uid, NodeUnprepareResourceResponse { error: claim.error })
        };
        Ok(NodeUnprepareResourcesResponse { claims: answer.claims.into_iter().map(result).collect() })
    }

    /// Opens the stream of health reports, which has no limit.
    pub(crate) async fn watch_health(&self) -> Result<Streaming<NodeWatchResourcesResponse>, GoError> {
        let mut api = DraResourceHealthClient::new(self.channel().await?);
        let answer = api.node_watch_resources(NodeWatchResourcesRequest {}).await;
        Ok(answer.map_err(|status| GoError::of(&status))?.into_inner())
    }
}

fn api(channel: Channel) -> DraPluginClient<Channel> {
    DraPluginClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX)
}

fn beta_api(channel: Channel) -> dra_v1beta1::dra_plugin_client::DraPluginClient<Channel> {
    dra_v1beta1::dra_plugin_client::DraPluginClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX)
}

fn beta(claim: Claim) -> dra_v1beta1::Claim {
    dra_v1beta1::Claim { namespace: claim.namespace, uid: claim.uid, name: claim.name }
}

#[derive(Debug, Default)]
struct Store {
    /// Plugins by driver, in the order in which they registered.
    plugins: BTreeMap<String, Vec<Arc<DraPlugin>>>,
    /// Removals of slices that are due, by driver.
    wipes: BTreeMap<String, CancellationToken>,
}

/// The plugins of one run of the kubelet.
#[derive(Debug)]
pub(crate) struct Plugins {
    config: Config,
    journal: Arc<Journal>,
    server: Option<ApiServer>,
    process: Process,
    store: Mutex<Store>,
}

impl Plugins {
    pub(crate) fn new(config: Config, journal: Arc<Journal>, process: Process) -> Arc<Self> {
        Arc::new(Self { server: config.api.clone(), config, journal, process, store: Mutex::default() })
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a plugin and connects to it, or returns why it is refused.
    pub(crate) fn add(
        self: &Arc<Self>,
        driver: &str,
        endpoint: &Path,
        services: &[String],
    ) -> Result<Arc<DraPlugin>, String> {
        let service = validate(driver, endpoint, services)?;
        let plugin = {
            let mut store = self.store();
            let same = store.plugins.entry(driver.to_owned()).or_default();
            if same.iter().any(|other| other.endpoint == endpoint) {
                let endpoint = endpoint.display();
                return Err(format!("endpoint {endpoint} already registered for DRA driver plugin {driver}"));
            }
            let plugin = Arc::new(DraPlugin {
                driver: driver.to_owned(),
                endpoint: endpoint.to_owned(),
                service,
                link: watch::Sender::new(Link::Connecting),
                closed: CancellationToken::new(),
            });
            same.push(Arc::clone(&plugin));
            plugin
        };
        self.journal.add(Event::DriverRegistered {
            driver: driver.to_owned(),
            socket: endpoint.display().to_string(),
            service: service.to_owned(),
        });
        let (this, connected) = (Arc::clone(self), Arc::clone(&plugin));
        self.process.spawn(async move {
            connected.closed.clone().run_until_cancelled(this.stay_connected(&connected)).await;
            connected.link.send_replace(Link::Connecting);
            this.sync(&connected.driver);
        });
        self.sync(driver);
        Ok(plugin)
    }

    /// Removes a plugin, whose calls end.
    pub(crate) fn remove(self: &Arc<Self>, driver: &str, endpoint: &Path) {
        let removed = {
            let mut store = self.store();
            let Some(same) = store.plugins.get_mut(driver) else { return };
            let Some(at) = same.iter().position(|plugin| plugin.endpoint == endpoint) else { return };
            let removed = same.remove(at);
            store.plugins.retain(|_, same| !same.is_empty());
            removed
        };
        removed.closed.cancel();
        if let Link::Up(channel) = &*removed.link.borrow() {
            channel.close();
        }
        let socket = endpoint.display().to_string();
        self.journal.add(Event::DriverDeregistered { driver: driver.to_owned(), socket });
        self.sync(driver);
    }

    async fn stay_connected(self: &Arc<Self>, plugin: &DraPlugin) {
        let clock = &self.config.clock;
        let socket = plugin.endpoint.display().to_string();
        let changed = |connected: bool| {
            let driver = plugin.driver.clone();
            self.journal.add(Event::DriverConnection { driver, socket: socket.clone(), connected });
            self.sync(&plugin.driver);
        };
        let mut pause = FIRST_PAUSE;
        loop {
            let authority = Authority::localhost();
            let connection = attempt(&plugin.endpoint, &authority, &self.process);
            let connection = clock.timeout(CONNECT_LIMIT, connection).await;
            match connection.unwrap_or_else(|| Err(format!("dial unix {socket}: i/o timeout"))) {
                Ok(channel) => {
                    pause = FIRST_PAUSE;
                    plugin.link.send_replace(Link::Up(channel.clone()));
                    changed(true);
                    channel.ended().await;
                    plugin.link.send_replace(Link::Connecting);
                    changed(false);
                }
                Err(error) => {
                    plugin.link.send_replace(Link::Failed(error));
                    clock.sleep(pause).await;
                    pause = pause.mul_f64(1.6).min(LONGEST_PAUSE);
                }
            }
        }
    }

    /// Returns the plugin to call: the connected one that registered last, or else the one that registered last.
    pub(crate) fn get(&self, driver: &str) -> Result<Arc<DraPlugin>, String> {
        let store = self.store();
        let same = store.plugins.get(driver).map(Vec::as_slice).unwrap_or_default();
        let connected = same.iter().rev().find(|plugin| plugin.is_connected());
        let plugin = connected.or(same.last());
        plugin.cloned().ok_or_else(|| format!("DRA driver {driver} is not registered"))
    }

    /// Schedules the removal of the driver's slices if no plugin is connected, or cancels it. One that is due keeps its time.
    fn sync(self: &Arc<Self>, driver: &str) {
        if self.server.is_none() {
            return;
        }
        let mut store = self.store();
        let same = store.plugins.get(driver).map(Vec::as_slice).unwrap_or_default();
        if same.iter().any(|plugin| plugin.is_connected()) {
            if let Some(wipe) = store.wipes.remove(driver) {
                wipe.cancel();
            }
            return;
        }
        if store.wipes.contains_key(driver) {
            return;
        }
        let cancelled = CancellationToken::new();
        store.wipes.insert(driver.to_owned(), cancelled.clone());
        drop(store);
        let (this, driver) = (Arc::clone(self), driver.to_owned());
        // The time starts now, not when the task runs.
        let delay = self.config.clock.sleep(WIPING_DELAY);
        self.process.spawn(async move {
            if cancelled.run_until_cancelled(delay).await.is_some() {
                this.wipe(Some(&driver)).await;
                let mut store = this.store();
                if !cancelled.is_cancelled() {
                    store.wipes.remove(&driver);
                }
            }
        });
    }

    /// Deletes the slices of the node, or of one driver on it, and tries until it succeeds.
    pub(crate) async fn wipe(&self, driver: Option<&str>) {
        let Some(server) = &self.server else { return };
        let mut pause = Duration::from_secs(1);
        loop {
            match server.kubelet_wipe(&self.config.node_name, driver) {
                Ok(deleted) => {
                    let driver = driver.unwrap_or_default().to_owned();
                    self.journal.add(Event::SlicesWiped { driver, deleted });
                    return;
                }
                Err(error) if error.code == 404 && driver.is_some() => return,
                Err(_) => {
                    self.config.clock.sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(300));
                }
            }
        }
    }
}

/// Returns the first service in the plugin's list that the kubelet has too.
pub(crate) fn validate(driver: &str, endpoint: &Path, services: &[String]) -> Result<&'static str, String> {
    let why = if services.is_empty() {
        "empty list of supported gRPC services (aka supported versions)".to_owned()
    } else {
        let known = |service: &String| SERVICES.into_iter().find(|known| known == service);
        if let Some(service) = services.iter().find_map(known) {
            return Ok(service);
        }
        let quoted =
            |list: Vec<String>| list.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(" ");
        let ours = quoted(SERVICES.map(str::to_owned).to_vec());
        let theirs = quoted(services.to_vec());
        format!(
            "none of services supported by the plugin ([{theirs}]) are supported by the kubelet ([{ours}])"
        )
    };
    let endpoint = endpoint.display();
    Err(format!(
        "invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {endpoint}: {why}"
    ))
}
