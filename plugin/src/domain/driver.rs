//! The driver's half of Prepare and Unprepare: reads the claim, and lets the store do the rest.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kubelet_dra::{ClaimRef, DeviceHealth, DeviceStatuses, Driver, HealthState, PreparedDevice};
use shmesh_daemon::log_limit::LogLimit;
use shmesh_sys::file::Locked;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::claim_metrics::ClaimMetrics;
use super::claim_plan::{AllocatedDevice, ClaimGrant, plan_claim};
use super::claim_status::device_status;
use super::claim_store::{ClaimStore, LOCK_PATIENCE, StoreError, deleted, is_deleted};
use super::device_names::{ClaimDevice, claim_devices};
use super::directory_owner::DirectoryOwner;
use crate::cdi::CLAIM;
use crate::config::Config;
use crate::kubelet::AllocationTimes;
use crate::pools::{self, SweepReport};
use crate::resource::Resource;
use crate::resource::allocate::UsageByResource;

/// Wait before the second attempt to erase what a claim left. Each further wait is twice as long.
const FIRST_WAIT: Duration = Duration::from_secs(10);
/// Longest wait between two attempts.
const MAX_WAIT: Duration = Duration::from_secs(900);

/// The claims of the node, which the driver and the garbage collector share.
#[derive(Clone, Debug)]
pub(crate) struct SharedClaims {
    /// Locked for milliseconds, and never by an asynchronous task.
    store: Arc<Mutex<ClaimStore>>,
    /// One claim is erased at a time, so that threads remain for others.
    pub(super) eraser: Arc<Semaphore>,
    pub(super) attempts: Arc<Mutex<BTreeMap<String, PrepareAttempt>>>,
    metrics: ClaimMetrics,
    /// Held as long as any call works on the claims, also one that was given up.
    owner: Option<Arc<DirectoryOwner>>,
}

/// When to try again to erase a claim whose files could not be removed.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrepareAttempt {
    next: Instant,
    wait: Duration,
}

/// Exclusive access to the claims, within this process and between the two of a rolling update.
#[derive(Debug)]
pub(super) struct StoreGuard<'a> {
    store: MutexGuard<'a, ClaimStore>,
    _file: Locked,
}

impl Deref for StoreGuard<'_> {
    type Target = ClaimStore;

    fn deref(&self) -> &ClaimStore {
        &self.store
    }
}

impl DerefMut for StoreGuard<'_> {
    fn deref_mut(&mut self) -> &mut ClaimStore {
        &mut self.store
    }
}

impl SharedClaims {
    pub(crate) fn new(store: ClaimStore, metrics: ClaimMetrics, owner: Option<DirectoryOwner>) -> Self {
        metrics.hold(&store);
        Self {
            store: Arc::new(Mutex::new(store)),
            eraser: Arc::new(Semaphore::new(1)),
            attempts: Arc::default(),
            metrics,
            owner: owner.map(Arc::new),
        }
    }

    fn store(&self) -> MutexGuard<'_, ClaimStore> {
        // The store changes its memory only after the disk, in one assignment.
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock(&self) -> Result<StoreGuard<'_>, StoreError> {
        // The wait for this process counts: calls that come together give up together.
        let until = Instant::now() + LOCK_PATIENCE;
        let mut store = self.store();
        let file = store.enter(until)?;
        Ok(StoreGuard { store, _file: file })
    }

    /// Runs a call of the kubelet on a blocking thread.
    ///
    /// Nothing is done for a call that was given up before its turn: the kubelet may have made another one since.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut ClaimStore) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, (&'static str, String)> {
        let given_up = CancellationToken::new();
        let _at_drop = given_up.clone().drop_guard();
        let claims = self.clone();
        let done = tokio::task::spawn_blocking(move || {
            let mut store = match claims.lock() {
                Ok(store) => store,
                Err(error) => return Some(Err(error)),
            };
            if given_up.is_cancelled() {
                return None;
            }
            let done = work(&mut store);
            claims.metrics.hold(&store);
            Some(done)
        });
        match done.await {
            Ok(Some(Ok(done))) => Ok(done),
            Ok(Some(Err(error))) => Err((error.reason(), error.to_string())),
            Ok(None) => Err(("given_up", "the call was given up".to_owned())),
            Err(error) => Err(("panic", format!("the driver failed: {error}"))),
        }
    }

    /// Releases a claim and erases its directory.
    pub(super) async fn release(&self, uid: &str) -> Result<SweepReport, (&'static str, String)> {
        let name = uid.to_owned();
        let release = move |store: &mut ClaimStore| {
            let left = store.release(&name)?;
            if left.is_empty() {
                store.forget(&name)?;
            }
            Ok(left)
        };
        let left = self.call(release).await?;
        if left.is_empty() {
            return Ok(SweepReport::default());
        }
        let done = self.erase(uid.to_owned(), left).await;
        done.map_err(|error| ("panic", format!("the driver failed: {error:#}")))
    }

    /// Erases what a claim left, without the store's lock, and then forgets the claim.
    async fn erase(&self, uid: String, left: Vec<PathBuf>) -> Result<SweepReport> {
        let permit = Arc::clone(&self.eraser).acquire_owned().await?;
        let claims = self.clone();
        let erased = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let mut sum = SweepReport::default();
            for directory in left {
                // What cannot be renamed is not erased: the claim may be prepared again.
                let is_moved = directory.file_name().is_some_and(|name| name.as_bytes().starts_with(b"."));
                let erased = if is_moved {
                    pools::erase(&directory)
                } else {
                    SweepReport { failures: 1, ..SweepReport::default() }
                };
                sum.files += erased.files;
                sum.bytes += erased.bytes;
                sum.failures += erased.failures;
            }
            let forgotten = claims.lock().and_then(|mut store| {
                let forgotten = store.forget(&uid);
                claims.metrics.hold(&store);
                forgotten
            });
            if let Err(error) = forgotten {
                warn!(claim = uid, %error, "a released claim keeps its group");
                sum.failures += 1;
            }
            claims.note(uid, sum.failures == 0);
            sum
        });
        Ok(erased.await?)
    }

    /// Decides when a claim is erased again.
    fn note(&self, uid: String, is_done: bool) {
        let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        if is_done {
            attempts.remove(&uid);
        } else {
            let wait = attempts.get(&uid).map_or(FIRST_WAIT, |last| (last.wait * 2).min(MAX_WAIT));
            attempts.insert(uid, PrepareAttempt { next: Instant::now() + wait, wait });
        }
    }

    /// Returns what to erase of each released claim whose turn it is.
    fn due(&self) -> Result<Vec<(String, Vec<PathBuf>)>, StoreError> {
        let mut store = self.lock()?;
        let released = store.released();
        let now = Instant::now();
        let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        attempts.retain(|uid, _| released.contains(uid));
        let due: Vec<_> = released
            .into_iter()
            .filter(|uid| attempts.get(uid).is_none_or(|last| last.next <= now))
            .collect();
        drop(attempts);
        let rest = |uid: String| match store.paths_to_erase(&uid) {
            Ok(left) => Some((uid, left)),
            Err(error) => {
                warn!(claim = uid, %error, "cannot remove what a released claim left");
                self.note(uid, false);
                None
            }
        };
        Ok(due.into_iter().filter_map(rest).collect())
    }

    /// Removes what released claims left.
    pub(crate) async fn collect(&self) {
        let claims = self.clone();
        let Ok(due) = tokio::task::spawn_blocking(move || claims.due()).await else { return };
        let due = match due {
            Ok(due) => due,
            Err(error) => {
                warn!(%error, "cannot look for what released claims left");
                return;
            }
        };
        let (mut files, mut bytes) = (0, 0);
        for (uid, left) in due {
            let erased = self.erase(uid, left).await.unwrap_or_default();
            files += erased.files;
            bytes += erased.bytes;
        }
        if files > 0 {
            info!(files, bytes, "removed files of released claims");
        }
    }

    /// Returns the pools that claims hold.
    ///
    /// # Errors
    /// A claim was recovered without a checkpoint, and has no readable specification, so its pools are unknown.
    pub(crate) async fn held_pools(&self, domain: String) -> Result<UsageByResource> {
        let claims = self.clone();
        let read = move || {
            let mut held = UsageByResource::new();
            let store = claims.lock()?;
            for (uid, entry) in store.claims().filter(|(_, entry)| !entry.is_released) {
                let pools = store
                    .pools_of(uid, entry)
                    .with_context(|| format!("the pools of claim {uid} are not known"))?;
                for pool in pools {
                    let (containers, units) = held.entry(format!("{domain}/{pool}")).or_default();
                    *containers += 1;
                    *units += 1;
                }
            }
            Ok(held)
        };
        tokio::task::spawn_blocking(read).await.context("the driver failed")?
    }

    /// Describes a problem of the directory of all claims.
    pub(super) fn problem(&self, config: &Config) -> Option<String> {
        let directory = config.seen(&config.dra.directory);
        let is_gone = directory.try_exists().is_ok_and(|exists| !exists)
            || is_deleted(&directory)
            || self.owner.as_ref().is_some_and(|owner| owner.is_lost() || owner.is_moved());
        is_gone.then(|| deleted(&config.dra.directory))
    }
}

/// Prepares claims of this driver.
#[derive(Clone, Debug)]
pub(crate) struct DomainDriver {
    pub(crate) domain: String,
    /// Name of the node, which is the pool of its slices.
    pub(crate) node: String,
    pub(crate) claims: SharedClaims,
    pub(crate) resources: watch::Receiver<(Config, Vec<Arc<Resource>>)>,
    pub(crate) allocation_times: Arc<AllocationTimes>,
    /// Whether the kubelet has registered the driver.
    pub(crate) registered: watch::Sender<bool>,
    /// Limits the log of refused registrations.
    pub(crate) registration_log: Arc<Mutex<LogLimit>>,
    /// Writes what claims have to the API server.
    pub(crate) statuses: DeviceStatuses,
}

impl DomainDriver {
    async fn prepare_claim(
        &self,
        claim: &ResourceClaim,
    ) -> Result<Vec<PreparedDevice>, (&'static str, String)> {
        let (devices, directory) = {
            let resources = self.resources.borrow();
            (claim_devices(&resources.1), resources.0.dra.directory.clone())
        };
        let plan = plan_claim(claim, &self.domain, &self.node, &devices)
            .map_err(|refusal| (refusal.reason(), refusal.to_string()))?;
        if plan.grant.domain.is_some() && self.claims.owner.as_ref().is_some_and(|owner| owner.is_moved()) {
            // The directory would be made where the runtime does not look for it.
            return Err(("directory", deleted(&directory)));
        }
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        for pool in &plan.grant.pools {
            // Before the store has it: a sweep that has begun stops.
            self.allocation_times.note(&format!("{}/{}", self.domain, pool.name));
        }
        let (grant, name) = (plan.grant.clone(), uid.clone());
        self.claims.call(move |store| store.prepare(&name, &grant)).await?;
        let directory = directory.join(&uid).display().to_string();
        if let Some(devices) = device_status(claim, &self.domain, &plan, &directory) {
            let ClaimGrant { namespace, name, .. } = plan.grant;
            self.statuses.put(ClaimRef { namespace, name, uid: uid.clone() }, devices);
        }
        let prepared = |device: AllocatedDevice| PreparedDevice {
            requests: vec![device.request],
            pool: device.pool,
            device: device.device,
            share_id: device.share_id,
            cdi_devices: vec![format!("{}/{CLAIM}={uid}{}", self.domain, device.cdi_suffix)],
        };
        Ok(plan.devices.into_iter().map(prepared).collect())
    }
}

impl Driver for DomainDriver {
    async fn prepare(&self, claim: Arc<ResourceClaim>) -> Result<Vec<PreparedDevice>, String> {
        let began = Instant::now();
        let outcome = self.prepare_claim(&claim).await;
        self.claims.metrics.prepared(began.elapsed(), outcome.as_ref().err().map(|(reason, _)| *reason));
        let (namespace, name) = (claim.metadata.namespace.as_deref(), claim.metadata.name.as_deref());
        match outcome {
            Ok(devices) => {
                info!(namespace, name, uid = claim.metadata.uid, devices = devices.len(), "claim prepared");
                Ok(devices)
            }
            // `kubelet_dra` logs it with the name of the claim.
            Err((_, text)) => Err(text),
        }
    }

    async fn unprepare(&self, claim: ClaimRef) -> Result<(), String> {
        self.statuses.forget(&claim.uid);
        let outcome = self.claims.release(&claim.uid).await;
        self.claims.metrics.released(outcome.as_ref().err().map(|(reason, _)| *reason));
        let report = outcome.map_err(|(_, text)| text)?;
        if report.failures > 0 {
            warn!(
                %claim, uid = claim.uid, failures = report.failures,
                "files of a released claim cannot be removed, so its group stays leased: directories of other users require CAP_DAC_OVERRIDE"
            );
        }
        info!(%claim, uid = claim.uid, files = report.files, bytes = report.bytes, "claim released");
        Ok(())
    }

    fn registered(&self, result: Result<(), String>) {
        self.claims.metrics.registered(result.is_ok());
        self.registered.send_replace(result.is_ok());
        let mut log = self.registration_log.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = result
            && let Some(suppressed) = log.allow(tokio::time::Instant::now().into_std())
        {
            warn!(error, suppressed, "not ready: the kubelet refuses the driver, so pods with claims wait");
        }
    }
}

/// Returns the health of the node's devices. `problem` is that of the directory of all claims.
pub(crate) fn device_health(
    node: &str,
    resources: &[Arc<Resource>],
    problem: Option<&str>,
) -> Vec<DeviceHealth> {
    let of = |(device, kind): (String, ClaimDevice)| {
        let problem = match kind {
            ClaimDevice::Domain => problem,
            ClaimDevice::Pool(_, is_healthy) | ClaimDevice::Accelerator(_, _, is_healthy) => {
                (!is_healthy).then_some("an Event of the node has the reason")
            }
        };
        let state = if problem.is_none() { HealthState::Healthy } else { HealthState::Unhealthy };
        let message = problem.unwrap_or_default().to_owned();
        DeviceHealth { pool: node.to_owned(), device, state, message }
    };
    let devices: BTreeMap<_, _> = claim_devices(resources);
    devices.into_iter().map(of).collect()
}
