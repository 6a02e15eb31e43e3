//! Prepares and reverts claims: each claim by itself, a few at a time, one result for each.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use tokio::sync::{OwnedMutexGuard, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tracing::{debug, warn};

use crate::claims::Claims;
use crate::driver::{ClaimRef, Driver, PreparedDevice};
use crate::instance_lock::InstanceLock;

/// Maximum number of claims that the driver works on at a time.
const MAX_CONCURRENT: usize = 8;
/// Time limit of a call. The kubelet gives up after 45 seconds, and then no claim of the call would have a result.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(40);

/// The result for each claim of a request, by its uid.
pub(crate) type Results<T> = BTreeMap<String, Result<T, String>>;

/// The operations behind the kubelet's calls, the same for all versions of the interface.
#[derive(Debug)]
pub(crate) struct Node<D, C> {
    driver_name: String,
    driver: Arc<D>,
    claims: C,
    instance_lock: InstanceLock,
    slots: Semaphore,
    claim_locks: ClaimLocks,
}

impl<D: Driver, C: Claims> Node<D, C> {
    pub(crate) fn new(driver_name: String, driver: Arc<D>, claims: C, instance_lock: InstanceLock) -> Self {
        Self {
            driver_name,
            driver,
            claims,
            instance_lock,
            slots: Semaphore::new(MAX_CONCURRENT),
            claim_locks: ClaimLocks::default(),
        }
    }

    pub(crate) fn driver(&self) -> &D {
        &self.driver
    }

    pub(crate) async fn prepare(self: &Arc<Self>, claims: Vec<ClaimRef>) -> Results<Vec<PreparedDevice>> {
        let each = |node: Arc<Self>, wanted: ClaimRef| async move { node.prepare_one(wanted).await };
        for_each("prepared", claims, |wanted| each(self.clone(), wanted)).await
    }

    pub(crate) async fn unprepare(self: &Arc<Self>, claims: Vec<ClaimRef>) -> Results<()> {
        let each = |node: Arc<Self>, wanted: ClaimRef| async move {
            let _claim = node.claim_locks.lock(&wanted.uid).await;
            let _slot = node.slots.acquire().await;
            let _instance = node.lock_instance().await?;
            node.driver.unprepare(wanted).await
        };
        for_each("unprepared", claims, |wanted| each(self.clone(), wanted)).await
    }

    async fn prepare_one(&self, wanted: ClaimRef) -> Result<Vec<PreparedDevice>, String> {
        let _claim = self.claim_locks.lock(&wanted.uid).await;
        let _slot = self.slots.acquire().await;
        // Before the lock: another instance does not wait for the API server.
        let found = self.claims.get(&wanted.namespace, &wanted.name).await?;
        let claim = checked(&wanted, &self.driver_name, found)?;
        let _instance = self.lock_instance().await?;
        let devices = self.driver.prepare(Arc::new(claim.clone())).await?;
        for device in &devices {
            let allocated = |result: &&DeviceRequestAllocationResult| {
                result.pool == device.pool && result.device == device.device
            };
            if results_of(&claim, &self.driver_name).find(allocated).is_none() {
                let PreparedDevice { pool, device, .. } = device;
                return Err(format!(
                    "driver {} prepared device {pool}/{device}, which is not allocated to claim {wanted}: this is a bug of the driver",
                    self.driver_name
                ));
            }
        }
        Ok(devices)
    }

    async fn lock_instance(&self) -> Result<Arc<std::fs::File>, String> {
        self.instance_lock.acquire().await.map_err(|error| {
            format!("driver {} cannot lock its directory against other instances: {error}", self.driver_name)
        })
    }
}

/// The part of a claim's allocation that is the driver's.
fn results_of<'a>(
    claim: &'a ResourceClaim,
    driver: &'a str,
) -> impl Iterator<Item = &'a DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let results = devices.and_then(|devices| devices.results.as_ref());
    results.into_iter().flatten().filter(move |result| result.driver == driver)
}

/// The claim that the kubelet means, if it is the one that exists and this driver has a part in it.
///
/// A claim that is being deleted is as good as any other: it keeps its allocation while pods use it, and these
/// may need it again after a restart of the kubelet.
fn checked(wanted: &ClaimRef, driver: &str, found: Option<ResourceClaim>) -> Result<ResourceClaim, String> {
    let Some(claim) = found else {
        return Err(format!("claim {wanted} does not exist any more: it had uid {}", wanted.uid));
    };
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    if uid != wanted.uid {
        return Err(format!(
            "claim {wanted} was replaced: the pod's claim has uid {}, and the claim that exists now has uid {uid}; create the pod again to use it",
            wanted.uid
        ));
    }
    if claim.status.as_ref().and_then(|status| status.allocation.as_ref()).is_none() {
        return Err(format!("claim {wanted} is not allocated: the scheduler has not chosen devices for it"));
    }
    if results_of(&claim, driver).next().is_none() {
        return Err(format!("claim {wanted} is allocated, but has no device of driver {driver}"));
    }
    Ok(claim)
}

/// Runs `work` for each claim as a task of its own. Whatever happens, each uid has one result, at the time limit or before.
async fn for_each<T, F>(what: &str, claims: Vec<ClaimRef>, work: impl Fn(ClaimRef) -> F) -> Results<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T, String>> + Send + 'static,
{
    let deadline = Instant::now() + TIME_LIMIT;
    let mut names = BTreeMap::<String, ClaimRef>::new();
    let mut results = Results::new();
    for claim in claims {
        match names.entry(claim.uid.clone()) {
            Entry::Vacant(free) => {
                free.insert(claim);
            }
            Entry::Occupied(other) if *other.get() != claim => {
                let other = other.get();
                let problem = format!("claims {other} and {claim} have the same uid {}", claim.uid);
                results.insert(claim.uid, Err(problem));
            }
            Entry::Occupied(_) => {}
        }
    }
    if let Some(claim) = names.get("") {
        results.insert(String::new(), Err(format!("claim {claim} has no uid")));
    }
    let mut tasks = JoinSet::new();
    for claim in names.values().filter(|claim| !results.contains_key(&claim.uid)) {
        let uid = claim.uid.clone();
        let future = work(claim.clone());
        tasks.spawn(async move { (uid, future.await) });
    }
    // A task that panicked has no entry below, and none is left when all have ended.
    while let Ok(Some(ended)) = timeout_at(deadline, tasks.join_next()).await {
        match ended {
            Ok((uid, result)) => drop(results.insert(uid, result)),
            Err(error) => warn!("a claim could not be {what}: {error}"),
        }
    }
    let late = Instant::now() >= deadline;
    tasks.abort_all();
    for (uid, claim) in names {
        let result = results.entry(uid.clone()).or_insert_with(|| {
            Err(if late {
                format!("claim {claim} was not {what} within {} seconds", TIME_LIMIT.as_secs())
            } else {
                format!("claim {claim} was not {what}: the driver failed; its log says more")
            })
        });
        match result {
            Ok(_) => debug!("claim {claim} ({uid}) is {what}"),
            Err(problem) => warn!("claim {claim} ({uid}) is not {what}: {problem}"),
        }
    }
    results
}

/// One lock for each claim that is being worked on.
#[derive(Debug, Default)]
struct ClaimLocks(Mutex<BTreeMap<String, Weak<tokio::sync::Mutex<()>>>>);

impl ClaimLocks {
    async fn lock(&self, uid: &str) -> OwnedMutexGuard<()> {
        let lock = {
            // An interrupted change leaves the map usable.
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            locks.retain(|_, lock| lock.strong_count() > 0);
            let known = locks.get(uid).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let lock = Arc::default();
                locks.insert(uid.to_owned(), Arc::downgrade(&lock));
                lock
            })
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Slow;

    impl Driver for Slow {
        async fn prepare(&self, _: Arc<ResourceClaim>) -> Result<Vec<PreparedDevice>, String> {
            Ok(Vec::new())
        }

        async fn unprepare(&self, claim: ClaimRef) -> Result<(), String> {
            if claim.name == "stuck" {
                std::future::pending::<()>().await;
            }
            Ok(())
        }
    }

    struct NoClaims;

    impl Claims for NoClaims {
        async fn get(&self, _: &str, _: &str) -> Result<Option<ResourceClaim>, String> {
            Ok(None)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_takes_too_long_fails_alone_and_can_be_tried_again() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let lock = InstanceLock::new(directory.path().join("lock"));
        let node = Arc::new(Node::new("gpu.example.com".into(), Arc::new(Slow), NoClaims, lock));
        let claim = |name: &str, uid: &str| ClaimRef {
            namespace: "default".into(),
            name: name.into(),
            uid: uid.into(),
        };
        let began = Instant::now();
        // Nine claims that are stuck are more than are worked on at a time.
        let mut claims: Vec<_> = (0..9).map(|number| claim("stuck", &format!("stuck-{number}"))).collect();
        claims.insert(0, claim("good", "0"));
        let results = node.unprepare(claims).await;
        assert_eq!((results.len(), Instant::now() - began), (10, TIME_LIMIT));
        assert_eq!(results["0"], Ok(()));
        let late = "claim default/stuck was not unprepared within 40 seconds";
        assert!(results.values().filter(|result| **result == Err(late.into())).count() == 9, "{results:?}");
        // What was given up holds neither a slot nor the claim.
        let again = node.unprepare(vec![claim("good", "stuck-0")]).await;
        assert_eq!(again["stuck-0"], Ok(()));
        assert_eq!(Instant::now() - began, TIME_LIMIT);
    }
}
