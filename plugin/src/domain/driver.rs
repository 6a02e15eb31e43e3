//! The driver's half of Prepare and Unprepare: reads the claim, and lets the store do the rest.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Result, bail};
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use kubelet_dra::{ClaimRef, DeviceHealth, Driver, HealthState, PreparedDevice};
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use super::claim_metrics::ClaimMetrics;
use super::claim_plan::{AllocatedDevice, ClaimGrant, plan_claim};
use super::claim_status::device_status;
use super::claim_store::ClaimStore;
use super::device_names::{ClaimDevice, claim_devices};
use crate::cdi::CLAIM;
use crate::config::Config;
use crate::kubelet::AllocationTimes;
use crate::resource::Resource;
use crate::resource::allocate::UsageByResource;

/// The claims of the node, which the driver and the garbage collector share.
#[derive(Clone, Debug)]
pub(crate) struct SharedClaims {
    store: Arc<Mutex<ClaimStore>>,
    metrics: ClaimMetrics,
}

impl SharedClaims {
    pub(crate) fn new(store: ClaimStore, metrics: ClaimMetrics) -> Self {
        let claims = Self { store: Arc::new(Mutex::new(store)), metrics };
        claims.metrics.hold(&claims.lock());
        claims
    }

    fn lock(&self) -> MutexGuard<'_, ClaimStore> {
        // The store changes its memory only after the disk, in one assignment.
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes what released claims left. Blocks.
    pub(crate) fn collect(&self) {
        let mut store = self.lock();
        let left = store.retry();
        if left.files > 0 {
            info!(files = left.files, bytes = left.bytes, "removed files of released claims");
        }
        self.metrics.hold(&store);
    }

    /// Returns the pools that claims hold.
    ///
    /// # Errors
    /// A claim was recovered without a checkpoint, so its pools are unknown.
    pub(crate) fn held_pools(&self, domain: &str) -> Result<UsageByResource> {
        let mut held = UsageByResource::new();
        for (uid, entry) in self.lock().claims().filter(|(_, entry)| !entry.is_released) {
            let Some(grant) = &entry.grant else { bail!("the pools of claim {uid} are not known") };
            for pool in &grant.pools {
                let (containers, units) = held.entry(format!("{domain}/{}", pool.name)).or_default();
                *containers += 1;
                *units += 1;
            }
        }
        Ok(held)
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
    /// Where updates of status are written. An update that finds the queue full is dropped.
    pub(crate) statuses: mpsc::Sender<StatusUpdate>,
}

/// The intended status of a claim.
#[derive(Debug)]
pub(crate) struct StatusUpdate {
    pub(crate) claim: ClaimRef,
    pub(crate) devices: Vec<AllocatedDeviceStatus>,
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
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        for pool in &plan.grant.pools {
            // Before the store has it: a sweep that has begun stops.
            self.allocation_times.note(&format!("{}/{}", self.domain, pool.name));
        }
        let (claims, grant, name) = (self.claims.clone(), plan.grant.clone(), uid.clone());
        let stored = tokio::task::spawn_blocking(move || {
            let mut store = claims.lock();
            let stored = store.prepare(&name, &grant);
            claims.metrics.hold(&store);
            stored
        });
        match stored.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err((error.reason(), error.to_string())),
            Err(error) => return Err(("panic", format!("the driver failed: {error}"))),
        }
        let directory = directory.join(&uid).display().to_string();
        if let Some(devices) = device_status(claim, &self.domain, &plan, &directory) {
            let ClaimGrant { namespace, name, .. } = plan.grant;
            let claim = ClaimRef { namespace, name, uid: uid.clone() };
            let _ = self.statuses.try_send(StatusUpdate { claim, devices });
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
        let (claims, uid) = (self.claims.clone(), claim.uid.clone());
        let released = tokio::task::spawn_blocking(move || {
            let mut store = claims.lock();
            let released = store.unprepare(&uid);
            claims.metrics.hold(&store);
            released
        });
        let outcome = released.await.map_err(|error| ("panic", format!("the driver failed: {error}")));
        let outcome =
            outcome.and_then(|released| released.map_err(|error| (error.reason(), error.to_string())));
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
}

/// Returns the health of the node's devices.
pub(crate) fn device_health(node: &str, resources: &[Arc<Resource>]) -> Vec<DeviceHealth> {
    let of = |(device, kind): (String, ClaimDevice)| {
        let is_healthy = match kind {
            ClaimDevice::Domain => true,
            ClaimDevice::Pool(_, is_healthy) | ClaimDevice::Accelerator(_, _, is_healthy) => is_healthy,
        };
        let (state, message) = if is_healthy {
            (HealthState::Healthy, String::new())
        } else {
            (HealthState::Unhealthy, "an Event of the node has the reason".to_owned())
        };
        DeviceHealth { pool: node.to_owned(), device, state, message }
    };
    let devices: BTreeMap<_, _> = claim_devices(resources);
    devices.into_iter().map(of).collect()
}
