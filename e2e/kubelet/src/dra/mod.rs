//! Dynamic resource allocation: the kubelet prepares the claims of pods through drivers, and unprepares them after the last pod.
//!
//! | file | contents |
//! |---|---|
//! | `claims.rs` | what is known about claims, and its checkpoint |
//! | `plugins.rs` | the plugins of drivers, their connections, and the removal of slices |
//! | `health.rs` | what drivers report about devices |

mod claims;
mod health;
mod plugins;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use shmesh_kubelet_api::dra::Claim;

use crate::api::Api;
use crate::config::{Config, Race};
use crate::journal::{Event, Journal};
use crate::pod::{Container, Pod};
use crate::process::Process;
use crate::random::Chance;

use claims::{ClaimInfo, Claims};
pub(crate) use health::Health;
use plugins::{DraPlugin, Plugins};

const RECONCILE_PERIOD: Duration = Duration::from_secs(60);
const HEALTH_PERIOD: Duration = Duration::from_secs(5);

/// A claim that the kubelet prepared or tries to prepare.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PreparedClaim {
    /// The namespace of the claim.
    pub namespace: String,
    /// The name of the claim.
    pub name: String,
    /// The uid of the claim.
    pub uid: String,
    /// The uids of the pods for which the kubelet keeps it.
    pub pods: BTreeSet<String>,
    /// Whether all drivers have prepared it since the kubelet started.
    pub prepared: bool,
    /// The CDI names of all its devices.
    pub cdi_devices: Vec<String>,
}

/// The claims and drivers of one run of the kubelet.
#[derive(Debug)]
pub(crate) struct Dra {
    config: Config,
    journal: Arc<Journal>,
    api: Arc<Api>,
    process: Process,
    plugins: Arc<Plugins>,
    claims: Mutex<Claims>,
    /// Claims whose drivers are unpreparing them, in a kubelet that knows this.
    unpreparing: Mutex<BTreeSet<(String, String)>>,
    chance: Mutex<Chance>,
}

/// A claim of a pod that passed the checks.
#[derive(Debug)]
struct UsableClaim {
    info: ClaimInfo,
    plugins: BTreeMap<String, Arc<DraPlugin>>,
}

impl Dra {
    pub(crate) fn new(
        config: Config,
        journal: Arc<Journal>,
        api: Arc<Api>,
        process: Process,
    ) -> io::Result<Arc<Self>> {
        let claims = Claims::load(&config.paths().dra_checkpoint())?;
        Ok(Arc::new(Self {
            plugins: Plugins::new(config.clone(), Arc::clone(&journal), process.clone()),
            chance: Mutex::new(Chance::new(config.seed)),
            claims: Mutex::new(claims),
            unpreparing: Mutex::default(),
            config,
            journal,
            api,
            process,
        }))
    }

    /// Registers the node, deletes its slices, and starts the loop that unprepares the claims of pods that are gone.
    pub(crate) fn start(self: &Arc<Self>) {
        let (plugins, config) = (Arc::clone(&self.plugins), self.config.clone());
        self.process.spawn(async move {
            let Some(server) = &config.api else { return };
            while server.kubelet_register(&config.node_name).is_err() {
                config.clock.sleep(Duration::from_secs(1)).await;
            }
            plugins.wipe(None).await;
        });
        let this = Arc::clone(self);
        self.process.spawn(async move {
            loop {
                this.reconcile().await;
                this.config.clock.sleep(RECONCILE_PERIOD).await;
            }
        });
    }

    fn claims(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unpreparing(&self) -> MutexGuard<'_, BTreeSet<(String, String)>> {
        self.unpreparing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shuffled<T>(&self, items: impl IntoIterator<Item = T>) -> Vec<T> {
        self.chance.lock().unwrap_or_else(PoisonError::into_inner).shuffled(items)
    }

    /// Returns a random number below `limit`.
    pub(crate) fn below(&self, limit: usize) -> usize {
        self.chance.lock().unwrap_or_else(PoisonError::into_inner).below(limit)
    }

    pub(crate) fn validate(driver: &str, endpoint: &Path, services: &[String]) -> Result<(), String> {
        plugins::validate(driver, endpoint, services).map(drop)
    }

    pub(crate) fn register(
        self: &Arc<Self>,
        driver: &str,
        endpoint: &Path,
        services: &[String],
    ) -> Result<(), String> {
        let plugin = self.plugins.add(driver, endpoint, services)?;
        let this = Arc::clone(self);
        self.process.spawn(async move {
            plugin.closed.clone().run_until_cancelled(this.follow_health(&plugin)).await;
        });
        Ok(())
    }

    pub(crate) fn deregister(&self, driver: &str, endpoint: &Path) {
        self.plugins.remove(driver, endpoint);
    }

    /// Reads health reports, and opens the stream again five seconds after it ended.
    async fn follow_health(&self, plugin: &DraPlugin) {
        let driver = &plugin.driver;
        loop {
            if let Ok(mut stream) = plugin.watch_health().await {
                while let Ok(Some(reports)) = stream.message().await {
                    let now = self.config.clock.now();
                    let changed = self.api.health().update(driver, reports.devices, now);
                    let uses = |info: &&ClaimInfo| {
                        info.devices().any(|(of, device)| {
                            of == driver
                                && changed.contains(&(device.pool_name.clone(), device.device_name.clone()))
                        })
                    };
                    let pods: BTreeSet<String> =
                        self.claims().all().filter(uses).flat_map(ClaimInfo::pods).cloned().collect();
                    if !pods.is_empty() {
                        self.journal.add(Event::HealthChanged { pods: pods.into_iter().collect() });
                    }
                    self.journal.changed();
                }
                self.api.health().clear(driver);
                self.journal.changed();
            }
            self.config.clock.sleep(HEALTH_PERIOD).await;
        }
    }

    /// Prepares the claims of a pod before its sandbox is created.
    pub(crate) async fn prepare(&self, pod: &Pod) -> Result<(), String> {
        self.prepare_claims(pod).await.map_err(|error| format!("prepare dynamic resources: {error}"))
    }

    async fn prepare_claims(&self, pod: &Pod) -> Result<(), String> {
        // Nothing is remembered of a pod that fails these checks.
        let mut checked = Vec::new();
        for claim in &pod.claims {
            checked.push(self.check(pod, &claim.object)?);
        }
        let mut batches: BTreeMap<(String, std::path::PathBuf), (Arc<DraPlugin>, Vec<Claim>)> =
            BTreeMap::new();
        let mut waiting = Vec::new();
        {
            let mut claims = self.claims();
            for UsableClaim { info, plugins } in checked {
                let (namespace, name, uid) =
                    (info.namespace.clone(), info.claim_name.clone(), info.claim_uid.clone());
                if self.unpreparing().contains(&(namespace.clone(), name.clone())) {
                    return Err(format!("ResourceClaim {name} is being unprepared"));
                }
                let known = claims.get_or_add(info);
                if known.claim_uid != uid {
                    let old = &known.claim_uid;
                    return Err(format!(
                        "old ResourceClaim with same name {name} and different UID {old} still exists (previous pod force-deleted?!)"
                    ));
                }
                known.add_pod(&pod.uid);
                let (prepared, message) = (known.prepared, known.message());
                claims.store().map_err(|error| format!("checkpoint ResourceClaim cache: {error}"))?;
                if prepared {
                    continue;
                }
                waiting.push((namespace, name));
                for (driver, plugin) in plugins {
                    let key = (driver, plugin.endpoint.clone());
                    batches.entry(key).or_insert_with(|| (plugin, Vec::new())).1.push(message.clone());
                }
            }
        }
        for (plugin, batch) in self.shuffled(batches.into_values()) {
            self.prepare_batch(&plugin, batch).await?;
        }
        let mut claims = self.claims();
        for (namespace, name) in waiting {
            claims.get_mut(&namespace, &name).ok_or_else(|| missing(&name, &namespace))?.prepared = true;
        }
        claims.store().map_err(|error| format!("checkpoint ResourceClaim state: {error}"))
    }

    /// Checks that a pod may use a claim and that its drivers are registered.
    fn check(&self, pod: &Pod, name: &str) -> Result<UsableClaim, String> {
        let server = self.config.api.as_ref();
        let server = server.ok_or("fetch ResourceClaim: the kubelet has no API server: set Config::api")?;
        let claim: ResourceClaim = server
            .kubelet_get(&pod.namespace, name)
            .map_err(|error| format!("fetch ResourceClaim {name}: {error}"))?;
        let metadata = &claim.metadata;
        let uid = metadata.uid.clone().unwrap_or_default();
        let status = claim.status.unwrap_or_default();
        if !status.reserved_for.iter().flatten().any(|consumer| consumer.uid == pod.uid) {
            let Pod { name: pod, uid: pod_uid, .. } = pod;
            return Err(format!("pod {pod} ({pod_uid}) is not allowed to use ResourceClaim {name} ({uid})"));
        }
        let allocation = status.allocation.ok_or_else(|| format!("ResourceClaim {name}: not allocated"))?;
        let results = allocation.devices.and_then(|devices| devices.results).unwrap_or_default();
        let drivers: BTreeSet<String> = results.into_iter().map(|result| result.driver).collect();
        let plugins = drivers.iter().map(|driver| Ok((driver.clone(), self.plugins.get(driver)?)));
        let plugins = plugins.collect::<Result<_, String>>()?;
        Ok(UsableClaim { info: ClaimInfo::new(&uid, name, &pod.namespace, drivers), plugins })
    }

    async fn prepare_batch(&self, plugin: &DraPlugin, batch: Vec<Claim>) -> Result<(), String> {
        let driver = &plugin.driver;
        self.journal.add(Event::PrepareCalled { driver: driver.clone(), claims: uids(&batch) });
        let answer = plugin.prepare(batch.clone(), &self.config.clock).await;
        let answer = answer.map_err(|error| format!("NodePrepareResources: {error}"))?;
        let unfinished =
            i64::try_from(batch.len()).unwrap_or(0) - i64::try_from(answer.claims.len()).unwrap_or(0);
        for (uid, result) in self.shuffled(answer.claims) {
            let Some(claim) = batch.iter().find(|claim| claim.uid == uid) else {
                return Err(format!("NodePrepareResources returned result for unknown claim UID {uid}"));
            };
            let Claim { namespace, name, .. } = claim;
            if !result.error.is_empty() {
                return Err(format!(
                    "NodePrepareResources failed for ResourceClaim {name}: {}",
                    result.error
                ));
            }
            let mut claims = self.claims();
            let info = claims.get_mut(namespace, name).ok_or_else(|| missing(name, namespace))?;
            result.devices.into_iter().for_each(|device| info.add_device(driver, device));
        }
        if unfinished != 0 {
            return Err(format!("NodePrepareResources skipped {unfinished} ResourceClaims"));
        }
        Ok(())
    }

    /// Unprepares the claims of a pod that has ended, except those that other pods use.
    pub(crate) async fn unprepare(&self, pod: &Pod) -> Result<(), String> {
        let names = pod.claims.iter().map(|claim| claim.object.clone()).collect();
        let unprepared = self.unprepare_claims(&pod.uid, &pod.namespace, names).await;
        unprepared.map_err(|error| format!("unprepare dynamic resources: {error}"))
    }

    async fn unprepare_claims(&self, pod: &str, namespace: &str, names: Vec<String>) -> Result<(), String> {
        let mut batches: BTreeMap<String, Vec<Claim>> = BTreeMap::new();
        let mut last = Vec::new();
        for name in names {
            let mut claims = self.claims();
            let Some(info) = claims.get_mut(namespace, &name) else { continue };
            let is_user = info.pods().any(|uid| uid == pod);
            if !is_user && self.config.race == Race::Fixed {
                continue;
            }
            // Up to 1.36, a pod that never got the claim takes it from the only pod that has it.
            if info.pods().count() > 1 {
                info.remove_pod(pod);
                continue;
            }
            for driver in info.drivers() {
                batches.entry(driver.clone()).or_default().push(info.message());
            }
            last.push(name);
        }
        if self.config.race == Race::Fixed {
            self.unpreparing().extend(last.iter().map(|name| (namespace.to_owned(), name.clone())));
        }
        let result = self.unprepare_batches(batches).await;
        self.unpreparing().retain(|(of, name)| of != namespace || !last.contains(name));
        result?;
        let mut claims = self.claims();
        last.iter().for_each(|name| claims.remove(namespace, name));
        claims.store().map_err(|error| format!("checkpoint ResourceClaim state: {error}"))
    }

    async fn unprepare_batches(&self, batches: BTreeMap<String, Vec<Claim>>) -> Result<(), String> {
        for (driver, batch) in self.shuffled(batches) {
            let plugin = self.plugins.get(&driver)?;
            self.journal.add(Event::UnprepareCalled { driver, claims: uids(&batch) });
            let answer = plugin.unprepare(batch.clone(), &self.config.clock).await;
            let answer = answer.map_err(|error| format!("NodeUnprepareResources: {error}"))?;
            let unfinished =
                i64::try_from(batch.len()).unwrap_or(0) - i64::try_from(answer.claims.len()).unwrap_or(0);
            for (uid, result) in self.shuffled(answer.claims) {
                let Some(claim) = batch.iter().find(|claim| claim.uid == uid) else {
                    return Err(format!(
                        "NodeUnprepareResources returned result for unknown claim UID {uid}"
                    ));
                };
                if !result.error.is_empty() {
                    let name = &claim.name;
                    return Err(format!(
                        "NodeUnprepareResources failed for ResourceClaim {name}: {}",
                        result.error
                    ));
                }
            }
            if unfinished != 0 {
                return Err(format!("NodeUnprepareResources skipped {unfinished} ResourceClaims"));
            }
        }
        Ok(())
    }

    /// Unprepares the claims of pods that do not exist any more. Errors are retried in the next round.
    async fn reconcile(&self) {
        if !self.api.all_known() {
            return;
        }
        let active = self.api.with_resources();
        let mut inactive: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
        for info in self.claims().all() {
            for pod in info.pods().filter(|pod| !active.contains(*pod)) {
                inactive
                    .entry((pod.clone(), info.namespace.clone()))
                    .or_default()
                    .push(info.claim_name.clone());
            }
        }
        for ((pod, namespace), names) in self.shuffled(inactive) {
            if let Err(error) = self.unprepare_claims(&pod, &namespace, names).await {
                self.journal.add(Event::UnprepareFailed { pod, error });
            }
            self.journal.changed();
        }
    }

    /// Returns the CDI devices that a container gets from the claims of its pod.
    pub(crate) fn cdi_devices(&self, pod: &Pod, container: &Container) -> Result<Vec<String>, String> {
        let claims = self.claims();
        let mut devices = Vec::new();
        for claim in &pod.claims {
            let requests: Vec<_> = container.claims.iter().filter(|(name, _)| *name == claim.name).collect();
            if requests.is_empty() {
                continue;
            }
            let name = &claim.object;
            let info = claims.get(&pod.namespace, name).ok_or_else(|| missing(name, &pod.namespace))?;
            for (_, request) in requests {
                devices.extend(info.cdi_devices(request.as_deref()).cloned());
            }
        }
        Ok(devices)
    }

    /// Returns the health of the devices of a container: resource, id and health.
    pub(crate) fn health_of(&self, pod: &Pod, container: &Container) -> Vec<(String, String, String)> {
        let (claims, health, now) = (self.claims(), self.api.health(), self.config.clock.now());
        let mut found = Vec::new();
        for (name, request) in &container.claims {
            let claim = pod.claims.iter().find(|claim| claim.name == *name);
            let info = claim.and_then(|claim| claims.get(&pod.namespace, &claim.object));
            let resource = match request {
                None => format!("claim:{name}"),
                Some(request) => format!("claim:{name}/{request}"),
            };
            for (driver, device) in info.into_iter().flat_map(ClaimInfo::devices) {
                if let (Some(request), Some(names)) = (request, &device.request_names)
                    && !names.contains(request)
                {
                    continue;
                }
                let (pool, name) = (&device.pool_name, &device.device_name);
                let id = device.cdi_device_ids.as_ref().and_then(|ids| ids.first().cloned());
                let id = id.unwrap_or_else(|| format!("{driver}/{pool}/{name}"));
                found.push((resource.clone(), id, health.of(driver, pool, name, now).to_owned()));
            }
        }
        found
    }

    pub(crate) fn all(&self) -> Vec<PreparedClaim> {
        let claim = |info: &ClaimInfo| PreparedClaim {
            namespace: info.namespace.clone(),
            name: info.claim_name.clone(),
            uid: info.claim_uid.clone(),
            pods: info.pods().cloned().collect(),
            prepared: info.prepared,
            cdi_devices: info.cdi_devices(None).cloned().collect(),
        };
        self.claims().all().map(claim).collect()
    }
}

fn uids(claims: &[Claim]) -> Vec<String> {
    claims.iter().map(|claim| claim.uid.clone()).collect()
}

fn missing(name: &str, namespace: &str) -> String {
    format!("internal error: unable to get claim info for ResourceClaim {name} in namespace {namespace}")
}
