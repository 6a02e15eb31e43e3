//! Prepares and reverts claims: each claim by itself, a few at a time, one result for each.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use tokio::sync::{OwnedMutexGuard, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, warn};

use crate::claims::Claims;
use crate::driver::{ClaimRef, Driver, PreparedDevice};
use crate::instance_lock::InstanceLock;

/// Maximum number of claims that the driver prepares at a time, and of those that it reverts. These do not wait for those.
const MAX_CONCURRENT: usize = 8;
/// Time limit of a call. The kubelet gives up after 45 seconds, and then no claim of the call would have a result.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(40);

/// Time limit of reading a claim from the API server.
const READ_LIMIT: Duration = Duration::from_secs(10);

/// The result for each claim of a request, by its uid.
pub(crate) type Results<T> = BTreeMap<String, Result<T, String>>;

/// The operations behind the kubelet's calls, the same for all versions of the interface.
#[derive(Debug)]
pub(crate) struct Node<D, C> {
    driver_name: String,
    driver: Arc<D>,
    claims: C,
    instance_lock: InstanceLock,
    prepare_slots: Semaphore,
    unprepare_slots: Semaphore,
    claim_locks: ClaimLocks,
}

impl<D: Driver, C: Claims> Node<D, C> {
    pub(crate) fn new(driver_name: String, driver: Arc<D>, claims: C, instance_lock: InstanceLock) -> Self {
        Self {
            driver_name,
            driver,
            claims,
            instance_lock,
            prepare_slots: Semaphore::new(MAX_CONCURRENT),
            unprepare_slots: Semaphore::new(MAX_CONCURRENT),
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
            let _slot = node.unprepare_slots.acquire().await;
            let _instance = node.lock_instance().await?;
            node.driver.unprepare(wanted).await
        };
        for_each("unprepared", claims, |wanted| each(self.clone(), wanted)).await
    }

    async fn prepare_one(&self, wanted: ClaimRef) -> Result<Vec<PreparedDevice>, String> {
        let _claim = self.claim_locks.lock(&wanted.uid).await;
        // Before the slot and the lock: neither other claims nor another instance wait for the API server.
        let claim = checked(&wanted, &self.driver_name, self.read(&wanted).await?)?;
        let _slot = self.prepare_slots.acquire().await;
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

    async fn read(&self, wanted: &ClaimRef) -> Result<Option<ResourceClaim>, String> {
        timeout(READ_LIMIT, self.claims.get(&wanted.namespace, &wanted.name)).await.unwrap_or_else(|_| {
            Err(format!(
                "claim {wanted} cannot be read from the API server: no answer within {} seconds; the kubelet retries",
                READ_LIMIT.as_secs()
            ))
        })
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

    /// An API server that hangs, or answers with a claim of this driver if the name is `stuck`.
    struct HangingClaims;

    impl Claims for HangingClaims {
        async fn get(&self, namespace: &str, name: &str) -> Result<Option<ResourceClaim>, String> {
            if name != "stuck" {
                std::future::pending::<()>().await;
            }
            let result =
                serde_json::json!({"request": "r", "driver": "gpu.example.com", "pool": "p", "device": "d"});
            let claim = serde_json::json!({
                "metadata": {"namespace": namespace, "name": name, "uid": "stuck"},
                "spec": {},
                "status": {"allocation": {"devices": {"results": [result]}}},
            });
            serde_json::from_value(claim).map(Some).map_err(|error| error.to_string())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn claims_are_reverted_while_the_api_server_hangs() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let lock = InstanceLock::new(directory.path().join("lock"));
        let node = Arc::new(Node::new("gpu.example.com".into(), Arc::new(Slow), HangingClaims, lock));
        let claim = |name: &str, uid: &str| ClaimRef {
            namespace: "default".into(),
            name: name.into(),
            uid: uid.into(),
        };
        let began = Instant::now();
        // More than are worked on at a time.
        let unread = (0..20).map(|number| claim("unread", &format!("unread-{number}"))).collect();
        let preparing = tokio::spawn({
            let node = node.clone();
            async move { node.prepare(unread).await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(node.unprepare(vec![claim("good", "0")]).await["0"], Ok(()));
        // Nor does a claim that can be read wait for them.
        let read = node.prepare(vec![claim("stuck", "stuck")]).await;
        assert_eq!((read["stuck"].clone(), began.elapsed()), (Ok(Vec::new()), Duration::from_secs(1)));
        let results = preparing.await.expect("it does not panic");
        assert_eq!((results.len(), began.elapsed()), (20, READ_LIMIT));
        let text = "claim default/unread cannot be read from the API server: no answer within 10 seconds; the kubelet retries";
        assert!(results.values().all(|result| *result == Err(text.into())), "{results:?}");
    }

    /// A driver whose `prepare` does not end.
    struct Stuck;

    impl Driver for Stuck {
        async fn prepare(&self, _: Arc<ResourceClaim>) -> Result<Vec<PreparedDevice>, String> {
            std::future::pending().await
        }

        async fn unprepare(&self, _: ClaimRef) -> Result<(), String> {
            Ok(())
        }
    }

    struct AnyClaim;

    impl Claims for AnyClaim {
        async fn get(&self, namespace: &str, name: &str) -> Result<Option<ResourceClaim>, String> {
            let mut claim = HangingClaims.get(namespace, "stuck").await?.ok_or("it has one")?;
            claim.metadata.uid = Some(name.to_owned());
            Ok(Some(claim))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn claims_are_reverted_while_all_slots_of_prepare_are_taken() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let lock = InstanceLock::new(directory.path().join("lock"));
        let node = Arc::new(Node::new("gpu.example.com".into(), Arc::new(Stuck), AnyClaim, lock));
        let claim = |name: String| ClaimRef { namespace: "default".into(), uid: name.clone(), name };
        let claims = (0..=MAX_CONCURRENT).map(|number| claim(format!("c{number}"))).collect();
        let preparing = tokio::spawn({
            let node = node.clone();
            async move { node.prepare(claims).await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(node.prepare_slots.available_permits(), 0);
        let began = Instant::now();
        assert_eq!(node.unprepare(vec![claim("other".into())]).await["other"], Ok(()));
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(preparing.await.expect("it does not panic").values().all(Result::is_err));
    }

    #[tokio::test(start_paused = true)]
    async fn claim_that_takes_too_long_fails_alone_and_can_be_tried_again() {
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
