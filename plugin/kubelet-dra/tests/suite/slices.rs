//! Slices and the status of claims, in an API server over HTTP.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, Device, DeviceCapacity, DeviceTaint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kubelet_dra::{ClaimRef, Claims, PublisherState, SlicePublisher, write_device_status};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::api_server::{ApiServer, path_of};
use crate::support::{DRIVER, WATCHDOG, settings, until};

fn devices(count: usize) -> Vec<Device> {
    let capacity = DeviceCapacity { value: Quantity("1024Mi".into()), request_policy: None };
    let device = |index| Device {
        name: format!("d{index}"),
        capacity: Some(BTreeMap::from([("bytes".into(), capacity.clone())])),
        ..Device::default()
    };
    (0..count).map(device).collect()
}

struct RunningPublisher {
    devices: watch::Sender<Vec<Device>>,
    state: watch::Receiver<PublisherState>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl RunningPublisher {
    fn start(server: &ApiServer, root: &Path, list: Vec<Device>) -> Self {
        let publisher = SlicePublisher::new(server.client(), &settings(root, "i1"));
        let (state, stop) = (publisher.state(), CancellationToken::new());
        let (devices, list) = watch::channel(list);
        let task = tokio::spawn(publisher.run(list, stop.clone()));
        Self { devices, state, stop, task }
    }

    async fn until(&mut self, condition: impl FnMut(&PublisherState) -> bool) -> PublisherState {
        let reached = tokio::time::timeout(WATCHDOG, self.state.wait_for(condition)).await;
        reached.expect("the state is reached").expect("it runs").clone()
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.expect("it does not panic");
    }
}

fn generation(slice: &Value) -> i64 {
    slice["spec"]["pool"]["generation"].as_i64().expect("a number")
}

#[tokio::test]
async fn slices_are_published_once_and_an_idle_node_writes_nothing() {
    let (server, root) = (ApiServer::start().await, tempfile::tempdir().expect("a temporary directory"));
    // Slices of other nodes and drivers are none of its business.
    let other = json!({"metadata": {"name": "x", "uid": "x"}, "spec": {"nodeName": "n2", "driver": DRIVER, "pool": {"name": "n2", "generation": 1, "resourceSliceCount": 1}}});
    server.put("/apis/resource.k8s.io/v1/resourceslices/x", other.clone());
    let mut publishing = RunningPublisher::start(&server, root.path(), devices(200));
    let state = publishing.until(|state| state.published).await;
    assert_eq!((state.writes, state.error), (2, None));
    let slices = server.slices();
    assert_eq!(slices.len(), 3);
    assert_eq!(slices[0]["spec"]["devices"].as_array().map(Vec::len), Some(128));
    assert_eq!(slices[1]["spec"]["devices"].as_array().map(Vec::len), Some(72));
    assert_eq!(slices[0]["spec"]["pool"], json!({"name": "n1", "generation": 1, "resourceSliceCount": 2}));
    assert_eq!(slices[0]["spec"]["nodeName"], "n1");
    let owner =
        json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-uid-1", "controller": true});
    assert_eq!(slices[0]["metadata"]["ownerReferences"], json!([owner]));

    // One device changes: one write, and the generation stays. The server's form of a quantity is no difference.
    let mut changed = devices(200);
    let taint = DeviceTaint { effect: "NoExecute".into(), key: "k".into(), time_added: None, value: None };
    changed[199].allow_multiple_allocations = Some(true);
    publishing.devices.send_replace(changed.clone());
    publishing.until(|state| state.published && state.writes == 3).await;
    assert!(server.slices()[..2].iter().all(|slice| generation(slice) == 1));
    // Taints pass, and fewer tainted devices fit into a slice.
    changed[0].taints = Some(vec![taint]);
    publishing.devices.send_replace(changed.clone());
    publishing.until(|state| state.published && state.writes == 7).await;
    let slices = server.slices();
    assert_eq!(slices[0]["spec"]["devices"][0]["taints"], json!([{"effect": "NoExecute", "key": "k"}]));
    assert!(slices[..4].iter().all(|slice| generation(slice) == 2));
    publishing.end().await;
    assert_eq!(server.slices().len(), 5, "slices stay when the driver stops");

    // The next instance finds everything as it should be.
    let mut publishing = RunningPublisher::start(&server, root.path(), changed);
    let state = publishing.until(|state| state.published).await;
    assert_eq!(state.writes, 0);
    publishing.end().await;
    assert_eq!((server.count("PATCH"), server.count("DELETE"), server.count("POST")), (7, 0, 0));
}

#[tokio::test]
async fn slices_that_are_wiped_come_back() {
    let (server, root) = (ApiServer::start().await, tempfile::tempdir().expect("a temporary directory"));
    let mut publishing = RunningPublisher::start(&server, root.path(), devices(300));
    publishing.until(|state| state.published).await;
    server.wipe();
    until(|| server.slices().len() == 3).await;
    assert!(server.slices().iter().all(|slice| generation(slice) == 2));
    // One of them: it comes back, and all get the next generation.
    server.remove(&path_of(&server.slices()[1]));
    until(|| server.slices().len() == 3 && server.slices().iter().all(|slice| generation(slice) == 3)).await;
    // Also when the watch has lost its place.
    let lists = server.count("LIST");
    server.compact();
    server.wipe();
    until(|| server.slices().len() == 3).await;
    assert!(server.count("LIST") > lists);
    publishing.end().await;
}

#[tokio::test]
async fn slices_that_are_edited_are_repaired() {
    let (server, root) = (ApiServer::start().await, tempfile::tempdir().expect("a temporary directory"));
    let mut publishing = RunningPublisher::start(&server, root.path(), devices(1));
    publishing.until(|state| state.published).await;
    let slice = || server.slices()[0].clone();
    let devices = slice()["spec"]["devices"].clone();
    server.edit(slice(), |slice| {
        slice["spec"]["devices"] = json!([]);
        slice["spec"]["pool"]["resourceSliceCount"] = json!(7);
    });
    until(|| slice()["spec"]["devices"] == devices && slice()["spec"]["pool"]["resourceSliceCount"] == 1)
        .await;
    publishing.end().await;
}

#[tokio::test]
async fn fields_of_other_writers_do_not_stay() {
    let (server, root) = (ApiServer::start().await, tempfile::tempdir().expect("a temporary directory"));
    let mut publishing = RunningPublisher::start(&server, root.path(), devices(1));
    publishing.until(|state| state.published).await;
    publishing.end().await;
    let slice = server.slices().remove(0);
    server.edit(slice, |slice| slice["spec"]["sharedCounters"] = json!([{"name": "c", "counters": {}}]));
    let stray = json!({"metadata": {"name": "stray", "uid": "s"}, "spec": {"nodeName": "n1", "driver": DRIVER, "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1}}});
    server.put("/apis/resource.k8s.io/v1/resourceslices/stray", stray);
    let mut publishing = RunningPublisher::start(&server, root.path(), devices(1));
    publishing.until(|state| state.published).await;
    let slices = server.slices();
    assert_eq!((slices.len(), &slices[0]["spec"]["sharedCounters"]), (1, &Value::Null));
    publishing.end().await;
}

#[tokio::test]
async fn what_the_server_drops_is_written_once() {
    let (server, root) = (ApiServer::start().await, tempfile::tempdir().expect("a temporary directory"));
    server.drop_field("allowMultipleAllocations");
    let mut list = devices(1);
    list[0].allow_multiple_allocations = Some(true);
    let mut publishing = RunningPublisher::start(&server, root.path(), list.clone());
    publishing.until(|state| state.published).await;
    // Two comparisons: after an edit that changes nothing that matters, and after a change of the devices.
    let slice = server.slices().remove(0);
    server.edit(slice, |slice| slice["metadata"]["labels"] = json!({"a": "b"}));
    list.extend(devices(1).into_iter().map(|device| Device { name: "e".into(), ..device }));
    publishing.devices.send_replace(list);
    let state = publishing.until(|state| state.published && state.writes > 1).await;
    assert_eq!(state.writes, 2);
    publishing.end().await;
    assert_eq!(server.count("PATCH"), 2);
}

#[tokio::test]
async fn failures_of_the_server_are_retried_with_a_delay() {
    let (server, root) = (ApiServer::start().await, tempfile::tempdir().expect("a temporary directory"));
    server.fail_next(&[500]);
    let mut publishing = RunningPublisher::start(&server, root.path(), devices(1));
    let state = publishing.until(|state| state.error.is_some()).await;
    assert_eq!(state.error.as_deref(), Some("list resourceslices: the server is not well (500)"));
    let state = publishing.until(|state| state.published).await;
    assert_eq!(state.error, None);
    let counts = ["LIST", "GET", "PATCH"].map(|verb| server.count(verb));
    assert_eq!(counts, [2, 1, 1], "one failure is one more request");
    publishing.end().await;
}

#[tokio::test]
async fn a_node_that_is_made_again_owns_the_slices() {
    let (server, root) = (ApiServer::start().await, tempfile::tempdir().expect("a temporary directory"));
    let mut publishing = RunningPublisher::start(&server, root.path(), devices(1));
    publishing.until(|state| state.published).await;
    server.remove("/api/v1/nodes/n1");
    server.wipe();
    let state = publishing.until(|state| state.error.is_some()).await;
    assert_eq!(state.error.as_deref(), Some("get node n1: \"/api/v1/nodes/n1\" not found (404)"));
    assert_eq!(state.writes, 1, "nothing is written for a node that does not exist");
    server.put_node("node-uid-2");
    publishing.until(|state| state.published).await;
    assert_eq!(server.slices()[0]["metadata"]["ownerReferences"][0]["uid"], "node-uid-2");
    publishing.end().await;
}

#[tokio::test]
async fn of_two_instances_the_older_one_publishes() {
    let (server, root) = (ApiServer::start().await, tempfile::tempdir().expect("a temporary directory"));
    let mut old = RunningPublisher::start(&server, root.path(), devices(1));
    old.until(|state| state.published).await;
    let mut new = RunningPublisher::start(&server, root.path(), devices(2));
    // The newer one has tried, and the older one still has its slices repaired.
    server.wipe();
    until(|| server.slices().len() == 1).await;
    assert_eq!(server.slices()[0]["spec"]["devices"].as_array().map(Vec::len), Some(1));
    assert_eq!(*new.state.borrow(), PublisherState::default());
    old.end().await;
    new.until(|state| state.published).await;
    assert_eq!(server.slices()[0]["spec"]["devices"].as_array().map(Vec::len), Some(2));
    new.end().await;
}

#[tokio::test]
async fn claims_are_read_and_their_devices_described() {
    let server = ApiServer::start().await;
    let path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/a";
    let claim = json!({"kind": "ResourceClaim", "apiVersion": "resource.k8s.io/v1", "metadata": {"namespace": "default", "name": "a", "uid": "u1"}, "spec": {}});
    server.put(path, claim);
    let client = server.client();
    let found = client.get("default", "a").await.expect("it answers").expect("it exists");
    assert_eq!(found.metadata.uid.as_deref(), Some("u1"));
    assert_eq!(client.get("default", "b").await.expect("it answers"), None);
    server.fail_next(&[403]);
    let refused = client.get("default", "a").await.expect_err("it is refused");
    assert_eq!(refused, "claim default/a cannot be read from the API server: the server is not well (403)");

    let reference = |uid: &str| ClaimRef { namespace: "default".into(), name: "a".into(), uid: uid.into() };
    let status = AllocatedDeviceStatus {
        driver: DRIVER.into(),
        pool: "n1".into(),
        device: "d0".into(),
        ..AllocatedDeviceStatus::default()
    };
    write_device_status(&client, DRIVER, &reference("u1"), std::slice::from_ref(&status))
        .await
        .expect("it is written");
    let devices = json!([{"driver": DRIVER, "pool": "n1", "device": "d0"}]);
    assert_eq!(server.get(path).expect("it exists")["status"]["devices"], devices);
    let replaced =
        write_device_status(&client, DRIVER, &reference("u2"), &[]).await.expect_err("it is another claim");
    assert!(
        replaced.starts_with("status of claim default/a cannot be written: Operation cannot"),
        "{replaced}"
    );
    let other = AllocatedDeviceStatus { driver: "other.example.com".into(), ..status };
    let refused =
        write_device_status(&client, DRIVER, &reference("u1"), &[other]).await.expect_err("it is refused");
    assert_eq!(
        refused,
        "device n1/d0 is of driver other.example.com, and only gpu.example.com may be described"
    );
}
