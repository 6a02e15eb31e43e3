//! Slices and reading claims, in a double of the API server. Time is virtual: an hour takes no time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    CounterSet, Device, DeviceCapacity, DeviceTaint, ResourceClaim, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{DeleteParams, ListParams, ObjectMeta};
use kube::client::Body;
use kube::{Api, Client};
use kubelet_dra::{Claims, PublisherState, SlicePublisher};
use serde_json::Value;
use shmesh_fake_kubelet::{ApiError, ApiServer, Clock, Verb};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::support::{DRIVER, WATCHDOG, claim, settings};

/// The publisher's name in the counts of requests.
const AGENT: &str = "driver";

fn devices(count: usize) -> Vec<Device> {
    // The server writes it as `1Gi`, or keeps it: both are the same.
    let capacity = DeviceCapacity { value: Quantity("1024Mi".into()), request_policy: None };
    let device = |index| Device {
        name: format!("d{index}"),
        capacity: Some(BTreeMap::from([("bytes".into(), capacity.clone())])),
        ..Device::default()
    };
    (0..count).map(device).collect()
}

/// An API server with the node `n1`, and a directory for the sockets of drivers.
struct Cluster {
    server: ApiServer,
    root: TempDir,
}

impl Cluster {
    fn new() -> Self {
        let server = ApiServer::new(Clock::runtime());
        let cluster = Self { server, root: tempfile::tempdir().expect("a temporary directory") };
        cluster.create_node();
        cluster
    }

    /// Returns the uid of the new node.
    fn create_node(&self) -> String {
        let metadata = ObjectMeta { name: Some("n1".into()), ..ObjectMeta::default() };
        let node = self.server.create(&Node { metadata, ..Node::default() }).expect("it is valid");
        node.metadata.uid.expect("it has one")
    }

    fn slices(&self) -> Vec<ResourceSlice> {
        self.server.list()
    }

    fn generations(&self) -> Vec<i64> {
        self.slices().iter().map(|slice| slice.spec.pool.generation).collect()
    }

    /// Deletes all slices as the kubelet does at its start.
    async fn wipe(&self) {
        let api: Api<ResourceSlice> = Api::all(self.server.client("kubelet"));
        let ours = ListParams::default().fields(&format!("spec.nodeName=n1,spec.driver={DRIVER}"));
        drop(api.delete_collection(&DeleteParams::default(), &ours).await.expect("it answers"));
    }

    fn edit(&self, change: impl FnOnce(&mut ResourceSlice)) {
        let name = self.slices()[0].metadata.name.clone().expect("a name");
        self.server.update("", &name, change).expect("the edit is valid");
    }

    fn fail(&self, verb: Verb, resource: &str) {
        let message = "the server is not well".to_owned();
        self.server.fail(verb, resource, 1, ApiError { code: 500, reason: "InternalError", message });
    }

    fn count(&self, matches: impl Fn(Verb) -> bool) -> u64 {
        self.server.count(|request| request.agent == AGENT && matches(request.verb))
    }

    fn publish(&self, list: Vec<Device>) -> RunningPublisher {
        RunningPublisher::start(self.server.client(AGENT), self.root.path(), list)
    }
}

struct RunningPublisher {
    devices: watch::Sender<Vec<Device>>,
    state: watch::Receiver<PublisherState>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl RunningPublisher {
    fn start(client: Client, root: &Path, list: Vec<Device>) -> Self {
        let publisher = SlicePublisher::new(client, &settings(root, "i1"));
        let (state, stop) = (publisher.state(), CancellationToken::new());
        let (devices, list) = watch::channel(list);
        let task = tokio::spawn(publisher.run(list, stop.clone()));
        Self { devices, state, stop, task }
    }

    async fn until(&mut self, condition: impl FnMut(&PublisherState) -> bool) -> PublisherState {
        let reached = tokio::time::timeout(WATCHDOG, self.state.wait_for(condition)).await;
        reached.expect("the state is reached").expect("it runs").clone()
    }

    /// Waits until as many writes have been made, and all is as it should be.
    async fn written(&mut self, writes: u64) {
        let state = self.until(|state| state.published && state.writes >= writes).await;
        assert_eq!((state.writes, state.error), (writes, None));
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.expect("it does not panic");
    }
}

fn lengths(slices: &[ResourceSlice]) -> Vec<usize> {
    slices.iter().map(|slice| slice.spec.devices.as_ref().map_or(0, Vec::len)).collect()
}

#[tokio::test(start_paused = true)]
async fn slices_are_published_and_changed() {
    let cluster = Cluster::new();
    let began = Instant::now();
    let mut publisher = cluster.publish(devices(200));
    publisher.written(2).await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    let slices = cluster.slices();
    assert_eq!(lengths(&slices), [128, 72]);
    let spec = &slices[0].spec;
    assert_eq!((spec.pool.name.as_str(), spec.pool.generation, spec.pool.resource_slice_count), ("n1", 1, 2));
    assert_eq!((spec.node_name.as_deref(), spec.driver.as_str()), (Some("n1"), DRIVER));
    let node: Node = cluster.server.get("", "n1").expect("it exists");
    let owner = &slices[0].metadata.owner_references.as_ref().expect("one")[0];
    assert_eq!((owner.kind.as_str(), Some(&owner.uid)), ("Node", node.metadata.uid.as_ref()));

    // One device changes: one write, and the generation stays.
    let mut changed = devices(200);
    changed[199].allow_multiple_allocations = Some(true);
    publisher.devices.send_replace(changed.clone());
    publisher.written(3).await;
    assert_eq!(cluster.generations(), [1, 1]);
    // Taints pass, and fewer tainted devices fit into a slice.
    let taint = DeviceTaint { effect: "NoExecute".into(), key: "k".into(), ..DeviceTaint::default() };
    changed[0].taints = Some(vec![taint]);
    publisher.devices.send_replace(changed.clone());
    publisher.written(7).await;
    let slices = cluster.slices();
    assert_eq!((lengths(&slices), cluster.generations()), (vec![64, 64, 64, 8], vec![2; 4]));
    let first = &slices[0].spec.devices.as_ref().expect("devices")[0];
    assert_eq!(first.taints.as_ref().expect("taints")[0].key, "k");
    // No devices: an empty slice says that the driver is up.
    publisher.devices.send_replace(Vec::new());
    publisher.written(11).await;
    assert_eq!(lengths(&cluster.slices()), [0]);
    publisher.end().await;
    assert_eq!(cluster.slices().len(), 1, "slices stay when the driver stops");
}

#[tokio::test(start_paused = true)]
async fn idle_node_writes_nothing() {
    let cluster = Cluster::new();
    let mut publisher = cluster.publish(devices(200));
    publisher.written(2).await;
    cluster.server.clear_requests();
    sleep(Duration::from_secs(3_600)).await;
    assert_eq!(cluster.count(Verb::is_write), 0);
    let watches = cluster.count(|verb| verb == Verb::Watch);
    assert_eq!(cluster.count(|_| true), watches, "{:?}", cluster.server.requests());
    assert!((12..=17).contains(&watches), "{watches}");
    publisher.end().await;
    // The next instance finds everything as it should be.
    cluster.server.clear_requests();
    let mut publisher = cluster.publish(devices(200));
    publisher.written(0).await;
    publisher.end().await;
    assert_eq!(cluster.count(Verb::is_write), 0);
}

#[tokio::test(start_paused = true)]
async fn slices_that_are_deleted_come_back() {
    let cluster = Cluster::new();
    let mut publisher = cluster.publish(devices(300));
    publisher.written(3).await;
    for wipes in 1..=3 {
        // Quiet again: the delay begins anew.
        sleep(Duration::from_secs(120)).await;
        cluster.wipe().await;
        assert_eq!(cluster.slices().len(), 0);
        let began = Instant::now();
        publisher.written(3 + 3 * wipes).await;
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    }
    assert_eq!(cluster.generations(), [4, 4, 4]);
    // One of them: it comes back, and all get the next generation.
    let name = cluster.slices()[1].metadata.name.clone().expect("a name");
    cluster.server.delete::<ResourceSlice>("", &name).expect("it exists");
    publisher.written(15).await;
    assert_eq!(cluster.generations(), [5, 5, 5]);
    // Also when nothing of it was seen: the server was away, and has forgotten its changes.
    cluster.server.stop();
    for slice in cluster.slices() {
        cluster
            .server
            .delete::<ResourceSlice>("", slice.metadata.name.as_deref().expect("a name"))
            .expect("it exists");
    }
    cluster.server.compact();
    sleep(Duration::from_secs(100)).await;
    cluster.server.resume();
    publisher.written(18).await;
    assert_eq!(cluster.generations(), [6, 6, 6]);
    publisher.end().await;
}

#[tokio::test(start_paused = true)]
async fn repair_of_endless_deletions_backs_off() {
    let cluster = Cluster::new();
    let mut publisher = cluster.publish(devices(1));
    publisher.written(1).await;
    for _ in 0..600 {
        cluster.wipe().await;
        sleep(Duration::from_secs(1)).await;
    }
    let writes = publisher.state.borrow().writes;
    assert!((20..=40).contains(&writes), "{writes} writes in ten minutes");
    publisher.end().await;
}

#[tokio::test(start_paused = true)]
async fn slices_that_are_edited_are_repaired() {
    let cluster = Cluster::new();
    let mut publisher = cluster.publish(devices(1));
    publisher.written(1).await;
    let devices = cluster.slices()[0].spec.devices.clone();
    cluster.edit(|slice| {
        slice.spec.devices = None;
        slice.spec.pool.resource_slice_count = 7;
    });
    publisher.written(2).await;
    let slice = &cluster.slices()[0];
    assert_eq!((&slice.spec.devices, slice.spec.pool.resource_slice_count), (&devices, 1));
    // An edit that does not matter is left alone.
    cluster.edit(|slice| slice.metadata.labels = Some(BTreeMap::from([("a".into(), "b".into())])));
    sleep(Duration::from_secs(60)).await;
    publisher.written(2).await;
    publisher.end().await;
}

#[tokio::test(start_paused = true)]
async fn fields_and_slices_of_other_writers_do_not_stay() {
    let cluster = Cluster::new();
    let mut publisher = cluster.publish(devices(1));
    publisher.written(1).await;
    let counters = CounterSet { name: "c".into(), counters: BTreeMap::new() };
    cluster.edit(|slice| slice.spec.shared_counters = Some(vec![counters]));
    let mut stray = cluster.slices().remove(0);
    stray.metadata = ObjectMeta { name: Some("stray".into()), ..ObjectMeta::default() };
    cluster.server.create(&stray).expect("it is valid");
    // Those of another node are none of its business.
    stray.metadata.name = Some("theirs".into());
    stray.spec.node_name = Some("n2".into());
    cluster.server.create(&stray).expect("it is valid");
    sleep(Duration::from_secs(60)).await;
    assert!(publisher.until(|state| state.published).await.writes > 1);
    publisher.end().await;
    let slices = cluster.slices();
    assert_eq!(slices.len(), 2, "{slices:?}");
    assert_eq!(
        (slices[0].spec.shared_counters.as_ref(), slices[1].metadata.name.as_deref()),
        (None, Some("theirs"))
    );
}

/// A client of a server that does not know the field `allowMultipleAllocations`.
fn older(client: Client) -> Client {
    let send = move |request: http::Request<Body>| {
        let client = client.clone();
        async move {
            let (parts, body) = request.into_parts();
            let text = body.collect_bytes().await?;
            let body = match serde_json::from_slice::<Value>(&text) {
                Ok(mut object) => {
                    for device in object["spec"]["devices"].as_array_mut().into_iter().flatten() {
                        device.as_object_mut().expect("an object").remove("allowMultipleAllocations");
                    }
                    Body::from(object.to_string().into_bytes())
                }
                Err(_) => Body::from(text.to_vec()),
            };
            client.send(http::Request::from_parts(parts, body)).await
        }
    };
    Client::new(tower::service_fn(send), "default")
}

#[tokio::test(start_paused = true)]
async fn fields_dropped_by_server_are_written_once() {
    let cluster = Cluster::new();
    let mut list = devices(1);
    list[0].allow_multiple_allocations = Some(true);
    let client = older(cluster.server.client(AGENT));
    let mut publisher = RunningPublisher::start(client, cluster.root.path(), list.clone());
    publisher.written(1).await;
    assert_eq!(
        cluster.slices()[0].spec.devices.as_ref().expect("devices")[0].allow_multiple_allocations,
        None
    );
    // It is compared again after an edit, and is as good as it can be.
    cluster.edit(|slice| slice.metadata.labels = Some(BTreeMap::from([("a".into(), "b".into())])));
    sleep(Duration::from_secs(60)).await;
    publisher.written(1).await;
    // A change of the devices is written.
    list[0].name = "other".into();
    publisher.devices.send_replace(list);
    publisher.written(2).await;
    publisher.end().await;
}

#[tokio::test(start_paused = true)]
async fn failures_of_the_server_are_retried_with_a_delay() {
    let cluster = Cluster::new();
    for (verb, resource, text) in [
        (Verb::List, "resourceslices", "list resourceslices: the server is not well (500)"),
        (Verb::Get, "nodes", "get node n1: the server is not well (500)"),
        (Verb::Patch, "resourceslices", "apply resourceslice"),
        (Verb::Watch, "resourceslices", "watch resourceslices: the server is not well (500)"),
    ] {
        cluster.server.clear_requests();
        cluster.fail(verb, resource);
        let mut publisher = cluster.publish(devices(1));
        let error = publisher.until(|state| state.error.is_some()).await.error.expect("it is set");
        assert!(error.starts_with(text), "{error}");
        assert_eq!(publisher.until(|state| state.published).await.error, None);
        assert!(cluster.count(|_| true) <= 8, "{:?}", cluster.server.requests());
        publisher.end().await;
        cluster.wipe().await;
    }
    // An hour without a server.
    cluster.server.stop();
    let mut publisher = cluster.publish(devices(1));
    sleep(Duration::from_secs(3_600)).await;
    let state = publisher.state.borrow().clone();
    assert!(!state.published && state.error.is_some() && state.writes == 0, "{state:?}");
    cluster.server.resume();
    publisher.until(|state| state.published).await;
    publisher.end().await;
}

#[tokio::test(start_paused = true)]
async fn node_that_is_made_again_owns_the_slices() {
    let cluster = Cluster::new();
    let mut publisher = cluster.publish(devices(1));
    publisher.written(1).await;
    cluster.server.delete::<Node>("", "n1").expect("it exists");
    // As the garbage collector does.
    cluster.wipe().await;
    let state = publisher.until(|state| state.error.is_some()).await;
    assert_eq!(state.error.as_deref(), Some("get node n1: nodes \"n1\" not found (404)"));
    sleep(Duration::from_secs(600)).await;
    assert_eq!(publisher.state.borrow().writes, 1, "nothing is written for a node that does not exist");
    let uid = cluster.create_node();
    publisher.written(2).await;
    let owner = || cluster.slices()[0].metadata.owner_references.as_ref().expect("one")[0].uid.clone();
    assert_eq!(owner(), uid);
    // Also when nothing of it was seen.
    cluster.server.stop();
    let name = cluster.slices()[0].metadata.name.clone().expect("a name");
    cluster.server.delete::<Node>("", "n1").expect("it exists");
    cluster.server.delete::<ResourceSlice>("", &name).expect("it exists");
    let uid = cluster.create_node();
    cluster.server.compact();
    sleep(Duration::from_secs(100)).await;
    cluster.server.resume();
    publisher.written(3).await;
    assert_eq!(owner(), uid);
    publisher.end().await;
}

/// A client whose watches get the answer `code` while it is not 0. A watch that succeeds has no events, and ends at once.
fn without_watches(client: Client, code: Arc<AtomicU16>) -> Client {
    let send = move |request: http::Request<Body>| {
        let (client, code) = (client.clone(), code.clone());
        async move {
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch="));
            let mut answer = client.send(request).await?;
            let status = code.load(Ordering::Relaxed);
            if !is_watch || status == 0 {
                return Ok::<_, kube::Error>(answer);
            }
            *answer.status_mut() = http::StatusCode::from_u16(status).expect("it is a status");
            let text = format!(
                r#"{{"kind": "Status", "status": "Failure", "message": "not now", "code": {status}}}"#
            );
            Ok(answer.map(|_| if status == 200 { Body::empty() } else { Body::from(text.into_bytes()) }))
        }
    };
    Client::new(tower::service_fn(send), "default")
}

/// Random delays up to 30 seconds make one request in 15 seconds. In a minute there are some eight, and more in the beginning.
const PER_MINUTE: u64 = 30;

/// Without watches for so many minutes. The deviation of the number of requests is below three times the root of `minutes`.
async fn requests_without_watches(minutes: u64) {
    for (status, lists_again) in [(200, false), (429, false), (410, true)] {
        let cluster = Cluster::new();
        let code = Arc::new(AtomicU16::new(status));
        let client = without_watches(cluster.server.client(AGENT), code.clone());
        let mut publisher = RunningPublisher::start(client, cluster.root.path(), devices(1));
        publisher.until(|state| state.writes == 1).await;
        for (seconds, most) in [(60, PER_MINUTE), (60 * (minutes - 1), 2 * PER_MINUTE + 5 * minutes)] {
            sleep(Duration::from_secs(seconds)).await;
            let [watches, lists, gets] =
                [Verb::Watch, Verb::List, Verb::Get].map(|verb| cluster.count(|it| it == verb));
            assert!((4..most).contains(&watches), "{status}: {watches} watches");
            let expected = if lists_again { watches..=watches + 1 } else { 1..=1 };
            assert!(expected.contains(&lists), "{status}: {lists} lists, {watches} watches");
            assert_eq!(gets, 1, "the owner of the slices has not changed");
        }
        code.store(0, Ordering::Relaxed);
        sleep(Duration::from_secs(60)).await;
        publisher.written(1).await;
        cluster.wipe().await;
        publisher.written(2).await;
        publisher.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn failing_watch_backs_off() {
    requests_without_watches(6).await;
}

#[tokio::test(start_paused = true)]
#[ignore = "long: three hours of virtual time"]
async fn watch_that_fails_for_an_hour_backs_off() {
    requests_without_watches(60).await;
}

#[tokio::test(start_paused = true)]
async fn watch_that_breaks_goes_on_where_it_was() {
    let cluster = Cluster::new();
    let mut publisher = cluster.publish(devices(1));
    publisher.written(1).await;
    for (outage, writes) in [(0, 1), (20, 1), (20, 2)] {
        sleep(Duration::from_secs(10)).await;
        cluster.server.clear_requests();
        cluster.server.stop();
        sleep(Duration::from_secs(outage)).await;
        if writes == 2 {
            let name = cluster.slices()[0].metadata.name.clone().expect("a name");
            cluster.server.delete::<ResourceSlice>("", &name).expect("it exists");
        }
        cluster.server.resume();
        sleep(Duration::from_secs(40)).await;
        publisher.written(writes).await;
        assert_eq!(cluster.count(|verb| verb == Verb::List), 0, "{:?}", cluster.server.requests());
        assert_eq!(cluster.count(|verb| verb == Verb::Get), writes - 1, "only after the deletion");
        assert!(cluster.count(|verb| verb == Verb::Watch) < PER_MINUTE);
    }
    publisher.end().await;
}

#[tokio::test(start_paused = true)]
async fn of_two_instances_the_newer_one_publishes() {
    let cluster = Cluster::new();
    let mut old = cluster.publish(devices(1));
    old.written(1).await;
    // It is ready while the older one still runs: a rolling update waits for that.
    let mut new = cluster.publish(devices(2));
    new.written(1).await;
    old.until(|state| !state.published).await;
    // Repairs are its matter now, and what the older one wants is not.
    sleep(Duration::from_secs(60)).await;
    cluster.wipe().await;
    new.written(2).await;
    old.devices.send_replace(devices(5));
    sleep(Duration::from_secs(60)).await;
    assert_eq!((lengths(&cluster.slices()), old.state.borrow().writes), (vec![2], 1));
    // Nor do two that wait disturb the third.
    let mut third = cluster.publish(devices(3));
    third.written(1).await;
    sleep(Duration::from_secs(600)).await;
    assert_eq!(
        (old.state.borrow().writes, new.state.borrow().writes, third.state.borrow().writes),
        (1, 2, 1)
    );
    // A rollback: one of those that wait goes on.
    new.end().await;
    third.end().await;
    old.written(2).await;
    assert_eq!(lengths(&cluster.slices()), [5]);
    old.end().await;
}

#[tokio::test(start_paused = true)]
async fn claims_are_read() {
    let cluster = Cluster::new();
    let mut wanted = claim("a", Some(DRIVER));
    wanted.metadata.uid = None;
    let created: ResourceClaim = cluster.server.create(&wanted).expect("it is valid");
    let uid = created.metadata.uid.expect("it has one");
    let client = cluster.server.client(AGENT);
    let found = client.get("default", "a").await.expect("it answers").expect("it exists");
    assert_eq!(found.metadata.uid.as_ref(), Some(&uid));
    assert_eq!(client.get("default", "b").await.expect("it answers"), None);
    cluster.fail(Verb::Get, "resourceclaims");
    let refused = client.get("default", "a").await.expect_err("it is refused");
    assert_eq!(refused, "claim default/a cannot be read from the API server: the server is not well (500)");
}
