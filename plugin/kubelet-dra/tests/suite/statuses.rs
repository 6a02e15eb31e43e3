//! The status of claims, in a double of the API server. Time is virtual: an hour takes no time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use kube::Client;
use kube::client::Body;
use kubelet_dra::{ClaimRef, DeviceStatuses};
use serde_json::json;
use shmesh_fake_kubelet::{ApiError, ApiServer, Clock, Verb};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use crate::support::{DRIVER, claim, until};

/// The driver's name in the counts of requests.
const AGENT: &str = "driver";
const STATUS: &str = "resourceclaims/status";

struct Reports {
    server: ApiServer,
    statuses: DeviceStatuses,
}

impl Reports {
    /// Reports are written from now on.
    fn start() -> Self {
        Self::start_with(|client| client)
    }

    /// With another way to the server.
    fn start_with(way: impl FnOnce(Client) -> Client) -> Self {
        let (server, statuses) = (ApiServer::new(Clock::runtime()), DeviceStatuses::default());
        let (client, task) = (way(server.client(AGENT)), statuses.clone());
        tokio::spawn(async move { task.run(&client, DRIVER).await });
        Self { server, statuses }
    }

    fn create(&self, name: &str) -> ClaimRef {
        let mut wanted = claim(name, Some(DRIVER));
        wanted.metadata.uid = None;
        let created: ResourceClaim = self.server.create(&wanted).expect("it is valid");
        let uid = created.metadata.uid.expect("it has one");
        ClaimRef { namespace: "default".into(), name: name.into(), uid }
    }

    fn report(&self, claim: &ClaimRef, data: u32) {
        let device = json!({"driver": DRIVER, "pool": "n1", "device": "d0", "data": {"number": data}});
        let device: AllocatedDeviceStatus = serde_json::from_value(device).expect("a device");
        self.statuses.put(claim.clone(), vec![device]);
    }

    fn fail(&self, code: u16, reason: &'static str, times: u32) {
        let error = ApiError { code, reason, message: "not now".into() };
        self.server.fail(Verb::Patch, STATUS, times, error);
    }

    /// The number in the status of a claim.
    fn written(&self, claim: &ClaimRef) -> Option<u64> {
        let found: ResourceClaim = self.server.get("default", &claim.name)?;
        let devices = serde_json::to_value(found.status?.devices?).ok()?;
        devices[0]["data"]["number"].as_u64()
    }

    fn writes(&self) -> u64 {
        self.server.count(|request| request.agent == AGENT && request.verb == Verb::Patch)
    }

    async fn empty(&self) {
        until(|| self.statuses.unwritten() == 0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn burst_is_written_whole_whatever_the_api_server_answers() {
    let reports = Reports::start();
    let claims: Vec<_> = (0..300).map(|number| reports.create(&format!("c{number}"))).collect();
    for (code, reason, times) in
        [(429, "TooManyRequests", 3), (500, "InternalError", 40), (409, "Conflict", 5)]
    {
        reports.fail(code, reason, times);
    }
    // Before anything is written, each twice: the later one counts.
    for number in [1, 2] {
        claims.iter().for_each(|claim| reports.report(claim, number));
    }
    assert_eq!(reports.statuses.unwritten(), 300);
    reports.empty().await;
    assert!(claims.iter().all(|claim| reports.written(claim) == Some(2)));
    assert_eq!(reports.writes(), 300 + 48, "nothing is written twice");
    // And then nothing more.
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(reports.writes(), 300 + 48);
}

#[tokio::test(start_paused = true)]
async fn retries_are_few_and_new_reports_do_not_wait_for_them() {
    let reports = Reports::start();
    let claims: Vec<_> = (0..20).map(|number| reports.create(&format!("c{number}"))).collect();
    reports.fail(500, "InternalError", u32::MAX);
    claims.iter().for_each(|claim| reports.report(claim, 1));
    sleep(Duration::from_secs(600)).await;
    let before = reports.writes();
    // One retry for all of them in half a minute, on average.
    sleep(Duration::from_secs(6_000)).await;
    let retries = reports.writes() - before;
    assert!((100..400).contains(&retries), "{retries} in 100 minutes");
    assert_eq!(reports.statuses.unwritten(), 20);
    let (new, began) = (reports.create("new"), Instant::now());
    let before = reports.writes();
    reports.report(&new, 1);
    until(|| reports.writes() > before).await;
    assert!(began.elapsed() < Duration::from_secs(1), "virtual time: it did not wait for a retry");
}

#[tokio::test(start_paused = true)]
async fn report_of_a_claim_that_is_gone_is_dropped() {
    let reports = Reports::start();
    let (gone, replaced, kept) = (reports.create("gone"), reports.create("replaced"), reports.create("kept"));
    for name in ["gone", "replaced"] {
        reports.server.delete::<ResourceClaim>("default", name).expect("it exists");
    }
    let newer = reports.create("replaced");
    [&gone, &replaced, &kept].into_iter().for_each(|claim| reports.report(claim, 1));
    reports.empty().await;
    assert_eq!((reports.written(&newer), reports.written(&kept)), (None, Some(1)));
    assert_eq!(reports.writes(), 3, "neither is tried again");
    // A conflict with another writer is no reason to drop it.
    reports.fail(409, "Conflict", 1);
    reports.report(&kept, 2);
    reports.empty().await;
    assert_eq!((reports.written(&kept), reports.writes()), (Some(2), 5));
}

#[tokio::test(start_paused = true)]
async fn report_of_a_reverted_claim_is_not_retried() {
    let reports = Reports::start();
    let claim = reports.create("a");
    reports.fail(429, "TooManyRequests", u32::MAX);
    reports.report(&claim, 1);
    until(|| reports.writes() > 0).await;
    reports.statuses.forget(&claim.uid);
    sleep(Duration::from_secs(10)).await;
    let before = reports.writes();
    sleep(Duration::from_secs(3600)).await;
    assert_eq!((reports.writes(), reports.statuses.unwritten()), (before, 0));
}

#[tokio::test(start_paused = true)]
async fn devices_of_other_drivers_stay() {
    let reports = Reports::start();
    let claim = reports.create("a");
    let other = json!({"driver": "other.example.com", "pool": "p", "device": "d", "data": {"number": 7}});
    let other: AllocatedDeviceStatus = serde_json::from_value(other).expect("a device");
    let written = reports.server.update("default", "a", |claim: &mut ResourceClaim| {
        let status = claim.status.as_mut().expect("it is allocated");
        let allocation = status.allocation.as_mut().expect("it is allocated");
        let results = allocation.devices.as_mut().and_then(|devices| devices.results.as_mut());
        let results = results.expect("a device");
        let mut result = results[0].clone();
        (result.driver, result.pool, result.device) =
            (other.driver.clone(), other.pool.clone(), other.device.clone());
        results.push(result);
        status.devices = Some(vec![other.clone()]);
    });
    written.expect("it is valid");
    reports.report(&claim, 1);
    reports.empty().await;
    let found: ResourceClaim = reports.server.get("default", "a").expect("it exists");
    let devices = found.status.and_then(|status| status.devices).expect("two devices");
    let drivers: Vec<_> = devices.iter().map(|device| device.driver.as_str()).collect();
    assert_eq!((drivers.len(), drivers.contains(&"other.example.com")), (2, true), "{drivers:?}");
}

/// An API server that does not answer requests for claims named `hangs` before it gets a permit.
#[derive(Clone)]
struct HangingServer {
    permits: Arc<Semaphore>,
    /// How many requests hang now, and how many hung at a time at most.
    requests: Arc<Mutex<(usize, usize)>>,
}

impl HangingServer {
    fn new() -> Self {
        Self { permits: Arc::new(Semaphore::new(0)), requests: Arc::default() }
    }

    fn requests(&self) -> (usize, usize) {
        *self.requests.lock().expect("no test panicked")
    }

    async fn hang(&self) {
        let _one = OneRequest::new(self);
        self.permits.acquire().await.expect("it stays open").forget();
    }

    fn way(&self, client: Client) -> Client {
        let hanging = self.clone();
        let send = move |request: http::Request<Body>| {
            let (client, hanging) = (client.clone(), hanging.clone());
            async move {
                if request.uri().path().contains("hangs") {
                    hanging.hang().await;
                }
                client.send(request).await
            }
        };
        Client::new(tower::service_fn(send), "default")
    }
}

/// A request that hangs until it is answered or given up.
struct OneRequest<'a>(&'a HangingServer);

impl<'a> OneRequest<'a> {
    fn new(hanging: &'a HangingServer) -> Self {
        let mut requests = hanging.requests.lock().expect("no test panicked");
        requests.0 += 1;
        requests.1 = requests.1.max(requests.0);
        Self(hanging)
    }
}

impl Drop for OneRequest<'_> {
    fn drop(&mut self) {
        self.0.requests.lock().expect("no test panicked").0 -= 1;
    }
}

#[tokio::test(start_paused = true)]
async fn claim_whose_write_hangs_holds_up_no_other() {
    let hanging = HangingServer::new();
    let reports = Reports::start_with(|client| hanging.way(client));
    let hangs = reports.create("hangs");
    // It is retried for ever, and each attempt takes ten seconds.
    let mut slowest = Duration::ZERO;
    for number in 0..200 {
        if number % 20 == 0 {
            reports.report(&hangs, number);
        }
        let claim = reports.create(&format!("c{number}"));
        let began = Instant::now();
        reports.report(&claim, 1);
        until(|| reports.written(&claim).is_some()).await;
        slowest = slowest.max(began.elapsed());
        sleep(Duration::from_secs(1)).await;
    }
    assert!(slowest < Duration::from_secs(1), "virtual time: {slowest:?}");
    assert_eq!(reports.statuses.unwritten(), 1);
}

#[tokio::test(start_paused = true)]
async fn writes_that_hang_are_few_and_one_of_each_claim() {
    let hanging = HangingServer::new();
    let reports = Reports::start_with(|client| hanging.way(client));
    let claim = reports.create("hangs");
    reports.report(&claim, 1);
    until(|| hanging.requests().0 == 1).await;
    reports.report(&claim, 2);
    reports.report(&claim, 3);
    let other = reports.create("other");
    reports.report(&other, 1);
    until(|| reports.written(&other).is_some()).await;
    assert_eq!(hanging.requests(), (1, 1), "the newer ones wait for the older one");
    hanging.permits.add_permits(2);
    reports.empty().await;
    assert_eq!((reports.written(&claim), reports.writes()), (Some(3), 3), "only the newest one");
    let claims: Vec<_> = (0..50).map(|number| reports.create(&format!("hangs-{number}"))).collect();
    claims.iter().for_each(|claim| reports.report(claim, 1));
    until(|| hanging.requests().0 == 8).await;
    sleep(Duration::from_secs(200)).await;
    // Eight new ones, and a retry.
    assert!((8..=9).contains(&hanging.requests().1), "{:?}", hanging.requests());
    hanging.permits.add_permits(1000);
    reports.empty().await;
    assert!(claims.iter().all(|claim| reports.written(claim) == Some(1)));
}
