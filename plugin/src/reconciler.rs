//! What is advertised follows what is configured and what the node has: one task that owns all of it.

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
use crate::config::{Config, Limits, Override, Pool, stamp};
use crate::devices::{self, Accelerator, DeviceInventory, Roots, fake};
use crate::events::EventType;
use crate::health::HealthChecker;
use crate::kubelet::{self, Registrar, ResourceOffer};
use crate::pools;
use crate::resource::allocate::AllocateSettings;
use crate::resource::{MAX_LIST_BYTES, NodeResources, Resource, ResourceKind, plan, slots_bytes};

/// Between two polls at the file of the configuration.
const CONFIG_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Longer than any driver takes that answers at all.
const DEVICE_SCAN_TIMEOUT: Duration = Duration::from_secs(2);

/// Where the configuration comes from.
#[derive(Clone, Debug)]
pub(crate) struct ConfigSource {
    pub(crate) file: Option<PathBuf>,
    pub(crate) settings: Vec<Override>,
    pub(crate) limits: Limits,
}

impl ConfigSource {
    /// Reads it.
    pub(crate) fn load(&self) -> Result<Config, crate::config::Problems> {
        Config::load(self.file.as_deref(), &self.settings, &self.limits)
    }
}

/// One resource that is advertised.
#[derive(Debug)]
struct Advertisement {
    offer: watch::Sender<ResourceOffer>,
    served: watch::Receiver<bool>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// Owns what is advertised.
#[derive(Debug)]
pub(crate) struct Reconciler {
    source: ConfigSource,
    config: Config,
    node: kubelet::NodeContext,
    roots: Roots,
    known: DeviceInventory,
    /// A look at the devices that has not ended: a driver may hang, and who reads then waits for ever.
    scan: Option<JoinHandle<Result<Vec<Accelerator>, String>>>,
    files: Option<SpecFiles>,
    /// Why devices could not be read: said once.
    scan_error: String,
    wanted: CdiDevices,
    advertised: BTreeMap<String, Advertisement>,
    /// Which devices of which resource do not work, and why.
    unhealthy: BTreeMap<String, BTreeMap<usize, String>>,
    /// Who sweeps is told what there is.
    resources: watch::Sender<(Config, Vec<Arc<Resource>>)>,
}

impl Reconciler {
    pub(crate) fn new(source: ConfigSource, config: Config, node: kubelet::NodeContext) -> Self {
        let files = config.cdi.enabled.then(|| SpecFiles {
            directory: config.seen(&config.cdi.directory),
            domain: config.domain.clone(),
        });
        Self {
            roots: Roots::new(&config.host_root),
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

    /// What is configured and advertised, now and later.
    pub(crate) fn resources(&self) -> watch::Receiver<(Config, Vec<Arc<Resource>>)> {
        self.resources.subscribe()
    }

    /// What the node has and the configuration wants.
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
                    warn!(problem, "the devices stay what they were");
                    self.scan_error = problem;
                }
                _ => {}
            }
        }
        let Limits { memory, numa, .. } = &self.source.limits;
        let accelerators = self.known.all().to_vec();
        plan(&self.config, &NodeResources { memory: *memory, numa: numa.clone(), accelerators })
    }

    /// Makes directories and CDI files, and then advertises: the kubelet may allocate at once.
    pub(crate) async fn start(&mut self) -> Result<()> {
        let planned = self.plan().await;
        for resource in &planned {
            if let ResourceKind::Slots(kind, devices) = &resource.kind {
                let slots = resource.units().len() / devices.len().max(1);
                let slots = u32::try_from(slots).unwrap_or(u32::MAX);
                let bytes: u64 = devices.iter().map(|one| slots_bytes(&one.id, slots)).sum();
                ensure!(
                    bytes <= MAX_LIST_BYTES,
                    "a list of {slots} slots of each {kind:?} takes {bytes} bytes, and the kubelet reads {MAX_LIST_BYTES}; \
                     lower slotsPerDevice"
                );
            }
            if let ResourceKind::Pool(pool) = &resource.kind {
                pools::prepare(&self.config.seen(&pool.directory), pool.gid, self.config.cdi.enabled)?;
            }
        }
        self.wanted = CdiDevices::by(&planned, &self.config.identity.directory);
        self.write(self.wanted.clone()).await?;
        self.advertise(planned).await;
        Ok(())
    }

    /// Writes CDI files. Not on this thread: a disk may be slow, and an Allocate does not wait for it.
    async fn write(&self, wanted: CdiDevices) -> Result<()> {
        let Some(files) = self.files.clone() else { return Ok(()) };
        tokio::task::spawn_blocking(move || files.write(&wanted)).await?
    }

    /// Looks at health, starts what is new, changes what is changed, ends what is gone.
    async fn advertise(&mut self, planned: Vec<Resource>) {
        let wanted = CdiDevices::by(&planned, &self.config.identity.directory);
        let is_missing = self.files.as_ref().is_some_and(|files| files.is_any_missing(&wanted));
        let repaired = match (is_missing, wanted == self.wanted) {
            (false, true) => Ok(()),
            _ => self.write(wanted.clone()).await,
        };
        if is_missing && repaired.is_ok() {
            warn!("CDI specifications were gone, written again");
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
        let mut commands = checker.commands().await;
        for mut resource in planned {
            let command = commands.remove(&resource.name).unwrap_or(Ok(()));
            let unhealthy = checker.look(&resource, &repaired, command).await;
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
                info!(resource = name, "advertised no more");
                self.node.metrics.withdrawn(&advertised.offer.borrow().now);
                advertised.stop.cancel();
                let _ = advertised.task.await;
            }
        }
        // What is the same as before is held once.
        let mut offered = Vec::with_capacity(resources.len());
        for resource in resources {
            self.node.metrics.offered(&resource);
            offered.push(self.offer(resource));
        }
        self.resources.send_replace((self.config.clone(), offered));
    }

    /// One Event for all that became of a resource at once.
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
                format!("{resource}: all of it works again"),
            );
        }
    }

    /// Offers it, or what is the same and is offered already.
    fn offer(&mut self, resource: Arc<Resource>) -> Arc<Resource> {
        if let Some(advertised) = self.advertised.get(&resource.name) {
            // Each list that the kubelet gets rewrites its checkpoint: none without a change.
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

    /// When the kubelet has all lists of now.
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

    /// Follows files, devices and health until `stop`; then takes every socket away.
    pub(crate) async fn run(mut self, mut reload: mpsc::Receiver<()>, stop: CancellationToken) {
        let mut polls = interval(CONFIG_POLL_INTERVAL);
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let stamped = |source: &ConfigSource| source.file.as_deref().and_then(stamp);
        let mut last = stamped(&self.source);
        let mut health = Instant::now();
        loop {
            let every = Duration::from_secs(self.config.health.interval_seconds.into());
            let reloads = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(()) = reload.recv() => true,
                _ = polls.tick(), if self.source.file.is_some() => {
                    let now = stamped(&self.source);
                    // Gone for a moment while it is replaced: not a change yet.
                    if now.is_none() || std::mem::replace(&mut last, now) == now {
                        continue;
                    }
                    true
                }
                () = sleep_until(health + every) => false,
            };
            // A health command may take its time; the end does not wait for it.
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = async {
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
        let loaded = tokio::task::spawn_blocking(move || source.load()).await.context("reading was cut off");
        let loaded = loaded.and_then(|loaded| loaded.map_err(Into::into));
        let outcome = loaded.context("the configuration stays what it was").and_then(|config| {
            let fixed = |config: &Config| {
                let Config { host_root, kubelet, cdi, identity, .. } = config.clone();
                (host_root, kubelet, cdi, identity, AllocateSettings::of(config))
            };
            ensure!(
                fixed(&config) == fixed(&self.config),
                "the configuration stays what it was: domain, hostRoot, kubelet, cdi and identity change with a restart only"
            );
            for pool in &config.pools {
                let given = |pool: &Pool, config: &Config| {
                    (pool.directory(config), pool.mount_path.clone(), pool.gid(), pool.user_namespaces)
                };
                let before = self.config.pools.iter().find(|before| before.name == pool.name);
                // A container that starts again gets what is described now, with the answer of then.
                ensure!(
                    before.is_none_or(|before| given(before, &self.config) == given(pool, &config)),
                    "the configuration stays what it was: directory, mountPath, gid and userNamespaces of pool {} change \
                     with a restart only, or give it another name",
                    pool.name
                );
            }
            Ok(config)
        });
        self.node.metrics.reloaded(outcome.is_ok());
        match outcome {
            Err(error) => {
                let error = format!("{error:#}");
                error!(error, "not reloaded");
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
                    "the configuration was read again",
                );
            }
        }
    }
}
