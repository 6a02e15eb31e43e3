//! Makes advertised resources match configuration, devices and health, in one task that owns all of them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::cdi::{CdiDevices, SpecFiles};
use crate::config::{Config, ConfigLimits, FrontEnd, Override, check_reload, stamp};
use crate::devices::{self, Accelerator, DeviceInventory, NodeRoots, fake};
use crate::events::EventType;
use crate::health::HealthChecker;
use crate::kubelet::{self, Registrar, ResourceOffer};
use crate::pools;
use crate::resource::allocate::AGENT_SOCKET;
use crate::resource::{MAX_LIST_BYTES, NodeResources, Resource, ResourceKind, plan, slots_bytes};

/// Interval for polling the configuration file.
const CONFIG_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Interval for polling the socket of the identity service, which can start after the plugin.
const AGENT_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Longer than any responsive driver takes to list its devices.
const DEVICE_SCAN_TIMEOUT: Duration = Duration::from_secs(2);

/// The file, overrides and limits that a configuration is loaded from.
#[derive(Clone, Debug)]
pub(crate) struct ConfigSource {
    pub(crate) file: Option<PathBuf>,
    pub(crate) settings: Vec<Override>,
    pub(crate) limits: ConfigLimits,
}

impl ConfigSource {
    /// Loads and validates the configuration.
    pub(crate) fn load(&self) -> Result<Config, crate::config::Problems> {
        Config::load(self.file.as_deref(), &self.settings, &self.limits)
    }
}

/// One advertised resource and the registrar task that serves it.
#[derive(Debug)]
struct Advertisement {
    offer: watch::Sender<ResourceOffer>,
    served: watch::Receiver<bool>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// Owns all advertised resources and reconciles them.
#[derive(Debug)]
pub(crate) struct Reconciler {
    source: ConfigSource,
    config: Config,
    node: kubelet::NodeContext,
    roots: NodeRoots,
    known: DeviceInventory,
    /// A scan of the devices that has not returned: a hung driver blocks the reader for ever.
    scan: Option<JoinHandle<Result<Vec<Accelerator>, String>>>,
    files: Option<SpecFiles>,
    /// The last error of a scan, to log it only once.
    scan_error: String,
    wanted: CdiDevices,
    advertised: BTreeMap<String, Advertisement>,
    /// Unhealthy devices with the reason, by resource.
    unhealthy: BTreeMap<String, BTreeMap<usize, String>>,
    /// Publishes the configuration and resources to the pool GC.
    resources: watch::Sender<(Config, Vec<Arc<Resource>>)>,
}

impl Reconciler {
    pub(crate) fn new(source: ConfigSource, config: Config, node: kubelet::NodeContext) -> Self {
        let files = config.cdi.enabled.then(|| SpecFiles {
            directory: config.seen(&config.cdi.directory),
            domain: config.domain.clone(),
        });
        Self {
            roots: NodeRoots::new(&config.host_root),
            resources: watch::Sender::new((config.clone(), Vec::new())),
            source,
            config,
            node,
            known: DeviceInventory::default(),
            scan: None,
            files,
            scan_error: String::new(),
            wanted: CdiDevices::default(),
            advertised: BTreeMap::new(),
            unhealthy: BTreeMap::new(),
        }
    }

    /// Subscribes to the configuration and the advertised resources.
    pub(crate) fn resources(&self) -> watch::Receiver<(Config, Vec<Arc<Resource>>)> {
        self.resources.subscribe()
    }

    /// Computes the desired resources from the configuration and the devices of the node.
    async fn plan(&mut self) -> Vec<Resource> {
        let scan = self.scan.take().unwrap_or_else(|| {
            let (roots, fake) = (self.roots.clone(), self.config.fake_inventory.clone());
            let fake = fake.map(|file| self.config.seen(&file));
            tokio::task::spawn_blocking(move || match fake {
                None => Ok(devices::accelerators(&roots)),
                Some(file) => fake::read(&file),
            })
        });
        let scan = self.scan.insert(scan);
        if let Ok(ended) = timeout(DEVICE_SCAN_TIMEOUT, scan).await {
            self.scan = None;
            match ended {
                Ok(Ok(found)) => {
                    self.scan_error.clear();
                    self.known.found(found);
                }
                Ok(Err(problem)) if self.scan_error != problem => {
                    warn!(problem, "cannot read the devices; keeping the previous ones");
                    self.scan_error = problem;
                }
                _ => {}
            }
        }
        let ConfigLimits { memory, numa, .. } = &self.source.limits;
        let accelerators = self.known.all().to_vec();
        plan(&self.config, &NodeResources { memory: *memory, numa: numa.clone(), accelerators })
    }

    /// Creates pools and CDI files, then advertises: the kubelet may allocate immediately.
    pub(crate) async fn start(&mut self) -> Result<()> {
        let planned = self.plan().await;
        for resource in &planned {
            if let ResourceKind::Slots(kind, devices) = &resource.kind {
                let slots = resource.units().len() / devices.len().max(1);
                let slots = u32::try_from(slots).unwrap_or(u32::MAX);
                let bytes: u64 = devices.iter().map(|one| slots_bytes(&one.id, slots)).sum();
                ensure!(
                    bytes <= MAX_LIST_BYTES,
                    "a list with {slots} slots per {kind:?} takes {bytes} bytes, and the kubelet accepts {MAX_LIST_BYTES}; \
                     lower slotsPerDevice"
                );
            }
            if let ResourceKind::Pool(pool) = &resource.kind {
                pools::prepare(
                    "pool",
                    &self.config.seen(&pool.directory),
                    pool.gid,
                    self.config.cdi.enabled,
                )?;
            }
        }
        self.wanted = CdiDevices::for_resources(&planned, &self.config.identity.directory);
        self.write(self.wanted.clone()).await?;
        self.advertise(planned).await;
        Ok(())
    }

    /// Writes CDI files on a blocking thread, so that a slow disk cannot delay `Allocate`.
    async fn write(&self, wanted: CdiDevices) -> Result<()> {
        let Some(files) = self.files.clone() else { return Ok(()) };
        tokio::task::spawn_blocking(move || files.write(&wanted)).await?
    }

    /// Checks health, then starts, updates and stops resources.
    async fn advertise(&mut self, planned: Vec<Resource>) {
        let wanted = CdiDevices::for_resources(&planned, &self.config.identity.directory);
        let is_missing = self.files.as_ref().is_some_and(|files| files.is_any_missing(&wanted));
        let repaired = match (is_missing, wanted == self.wanted) {
            (false, true) => Ok(()),
            _ => self.write(wanted.clone()).await,
        };
        if is_missing && repaired.is_ok() {
            warn!("CDI specifications were missing and have been restored");
        }
        let checker = HealthChecker {
            config: &self.config,
            files: self.files.as_ref(),
            known: &self.known,
            is_driver_hung: self.scan.is_some(),
            metrics: &self.node.metrics,
        };
        let mut resources = Vec::new();
        let mut still_unhealthy = BTreeMap::new();
        let mut commands = checker.run_commands().await;
        for mut resource in planned {
            let command = commands.remove(&resource.name).unwrap_or(Ok(()));
            let unhealthy = checker.check(&resource, &repaired, command).await;
            resource.set_health(|device| !unhealthy.contains_key(&device));
            let before = self.unhealthy.remove(&resource.name).unwrap_or_default();
            for (device, why) in unhealthy.iter().filter(|(device, _)| !before.contains_key(device)) {
                warn!(resource = resource.name, device, why, "unhealthy");
            }
            for device in before.keys().filter(|device| !unhealthy.contains_key(device)) {
                info!(resource = resource.name, device, "healthy again");
            }
            self.announce(&resource.name, &before, &unhealthy);
            still_unhealthy.insert(resource.name.clone(), unhealthy);
            resources.push(Arc::new(resource));
        }
        self.unhealthy = still_unhealthy;
        if repaired.is_ok() {
            self.wanted = wanted;
        }
        let gone: Vec<_> = self
            .advertised
            .keys()
            .filter(|&name| !resources.iter().any(|one| one.name == *name))
            .cloned()
            .collect();
        for name in gone {
            if let Some(advertised) = self.advertised.remove(&name) {
                info!(resource = name, "no longer advertised");
                self.node.metrics.withdrawn(&advertised.offer.borrow().now);
                advertised.stop.cancel();
                let _ = advertised.task.await;
            }
        }
        // Keeps one copy of a resource that has not changed.
        let mut offered = Vec::with_capacity(resources.len());
        for resource in resources {
            self.node.metrics.offered(&resource);
            // The DRA driver publishes slices instead.
            let is_plugin = self.config.mode == FrontEnd::DevicePlugin;
            offered.push(if is_plugin { self.offer(resource) } else { resource });
        }
        self.resources.send_replace((self.config.clone(), offered));
    }

    /// Writes one Event per resource and health change.
    fn announce(&self, resource: &str, before: &BTreeMap<usize, String>, now: &BTreeMap<usize, String>) {
        let became_unhealthy: Vec<_> =
            now.iter().filter(|(device, _)| !before.contains_key(device)).collect();
        if let Some((_, why)) = became_unhealthy.first() {
            let more = match became_unhealthy.len() {
                1 => String::new(),
                several => format!(" (and {} more devices)", several - 1),
            };
            self.node.events.say(EventType::Warning, "ResourceUnhealthy", format!("{resource}: {why}{more}"));
        }
        if !before.is_empty() && now.is_empty() {
            self.node.events.say(
                EventType::Normal,
                "ResourceHealthy",
                format!("{resource}: all devices are healthy"),
            );
        }
    }

    /// Offers a resource, and returns the offered one, which is the previous one if it is equal.
    fn offer(&mut self, resource: Arc<Resource>) -> Arc<Resource> {
        if let Some(advertised) = self.advertised.get(&resource.name) {
            // The kubelet rewrites its checkpoint for every list, so send only changes.
            advertised.offer.send_if_modified(|offer| {
                let changed = offer.now.kind != resource.kind || offer.now.units() != resource.units();
                if changed {
                    let before = std::mem::replace(&mut offer.now, Arc::clone(&resource));
                    let ids = |resource: &Resource| {
                        resource.units().iter().map(|unit| unit.id.clone()).collect::<Vec<_>>()
                    };
                    if before.kind != resource.kind || ids(&before) != ids(&resource) {
                        offer.before = Some(before);
                    }
                }
                changed
            });
            let offered = Arc::clone(&advertised.offer.borrow().now);
            return offered;
        }
        info!(resource = resource.name, units = resource.units().len(), "advertised");
        let (offer, offers) = watch::channel(ResourceOffer { now: Arc::clone(&resource), before: None });
        let (served, is_served) = watch::channel(false);
        let stop = CancellationToken::new();
        let task = tokio::spawn(Registrar::new(self.node.clone(), offers, served).run(stop.clone()));
        self.advertised.insert(resource.name.clone(), Advertisement { offer, served: is_served, stop, task });
        resource
    }

    /// Completes when the kubelet has the lists of all current resources.
    pub(crate) fn all_served(&self) -> impl Future<Output = ()> + Send + 'static {
        let served: Vec<_> = self.advertised.values().map(|one| one.served.clone()).collect();
        async move {
            for mut one in served {
                if one.wait_for(|&served| served).await.is_err() {
                    return std::future::pending().await;
                }
            }
        }
    }

    /// Reconciles until `stop`, then removes all sockets.
    pub(crate) async fn run(mut self, mut reload: mpsc::Receiver<()>, stop: CancellationToken) {
        let mut polls = interval(CONFIG_POLL_INTERVAL);
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let stamped = |source: &ConfigSource| source.file.as_deref().and_then(stamp);
        let mut last = stamped(&self.source);
        let mut health = Instant::now();
        let agent = self.config.seen(&self.config.identity.directory).join(AGENT_SOCKET);
        let mut has_agent = agent.exists();
        let mut agent_polls = interval(AGENT_POLL_INTERVAL);
        agent_polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let every = Duration::from_secs(self.config.health.interval_seconds.into());
            let reloads = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(()) = reload.recv() => true,
                _ = polls.tick(), if self.source.file.is_some() => {
                    let now = stamped(&self.source);
                    // A file that is missing for a moment is being replaced.
                    if now.is_none() || std::mem::replace(&mut last, now) == now {
                        continue;
                    }
                    true
                }
                _ = agent_polls.tick() => {
                    let now = agent.exists();
                    if std::mem::replace(&mut has_agent, now) == now {
                        continue;
                    }
                    false
                }
                () = sleep_until(health + every) => false,
            };
            // A health command must not delay the shutdown.
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = async {
                    let _writing = self.node.ownership.write().await;
                    if reloads {
                        self.reload().await;
                    } else {
                        let planned = self.plan().await;
                        self.advertise(planned).await;
                    }
                } => health = Instant::now(),
            }
        }
        for advertised in self.advertised.values() {
            advertised.stop.cancel();
        }
        for (_, advertised) in std::mem::take(&mut self.advertised) {
            let _ = advertised.task.await;
        }
    }

    async fn reload(&mut self) {
        let source = self.source.clone();
        let loaded =
            tokio::task::spawn_blocking(move || source.load()).await.context("loading was interrupted");
        let loaded = loaded.and_then(|loaded| loaded.map_err(Into::into));
        let outcome = loaded.context("keeping the previous configuration").and_then(|config| {
            check_reload(&self.config, &config)?;
            Ok(config)
        });
        self.node.metrics.reloaded(outcome.is_ok());
        match outcome {
            Err(error) => {
                let error = format!("{error:#}");
                error!(error, "configuration not reloaded");
                self.node.events.say(EventType::Warning, "ConfigurationRefused", error);
            }
            Ok(config) => {
                self.config = config;
                let planned = self.plan().await;
                self.advertise(planned).await;
                info!("configuration reloaded");
                self.node.events.say(
                    EventType::Normal,
                    "ConfigurationReloaded",
                    "the configuration was reloaded",
                );
            }
        }
    }
}
