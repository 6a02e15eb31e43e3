//! Requests that the nodes of a cluster make to the API server, counted in its double, while pods with claims come and go through the
//! sockets of the drivers. Time is virtual.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, Device, ResourceClaim};
use kube::api::ObjectMeta;
use kubelet_dra::{ClaimRef, DeviceStatuses, Driver, DriverSettings, PreparedDevice, SlicePublisher, serve};
use serde_json::json;
use shmesh_fake_kubelet::{ApiServer, Clock, Verb};
use shmesh_kubelet_api::dra::Claim;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::support::{DRIVER, claim, connect, prepare, settings, unprepare, until};

const AGENT: &str = "driver";

/// Prepares the device `n1/d0`, and reports it in the status of the claim.
struct ReportingDriver(DeviceStatuses);

impl Driver for ReportingDriver {
    async fn prepare(&self, claim: Arc<ResourceClaim>) -> Result<Vec<PreparedDevice>, String> {
        let ObjectMeta { namespace, name, uid, .. } = claim.metadata.clone();
        let [namespace, name, uid] = [namespace, name, uid].map(Option::unwrap_or_default);
        let device = json!({"driver": DRIVER, "pool": "n1", "device": "d0"});
        let device: AllocatedDeviceStatus = serde_json::from_value(device).expect("a device");
        self.0.put(ClaimRef { namespace, name, uid }, vec![device]);
        Ok(vec![PreparedDevice {
            requests: vec!["gpu".into()],
            pool: "n1".into(),
            device: "d0".into(),
            share_id: None,
            cdi_devices: vec!["example.com/gpu=d0".into()],
        }])
    }

    async fn unprepare(&self, claim: ClaimRef) -> Result<(), String> {
        self.0.forget(&claim.uid);
        Ok(())
    }
}

/// The driver of one node.
struct NodeDriver {
    settings: DriverSettings,
    statuses: DeviceStatuses,
    devices: watch::Sender<Vec<Device>>,
}

struct Cluster {
    server: ApiServer,
    nodes: Vec<NodeDriver>,
    _root: TempDir,
    _tasks: JoinSet<()>,
}

impl Cluster {
    /// All slices are published.
    async fn new(nodes: usize) -> Self {
        let (server, root) = (ApiServer::new(Clock::runtime()), tempfile::tempdir().expect("a directory"));
        let (mut tasks, mut drivers, mut states) = (JoinSet::new(), Vec::new(), Vec::new());
        for number in 0..nodes {
            let name = format!("n{number}");
            let metadata = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
            server.create(&Node { metadata, ..Node::default() }).expect("it is valid");
            // The directory has the turn of a node's instances.
            let directory = root.path().join(&name);
            std::fs::create_dir(&directory).expect("it is new");
            let settings = DriverSettings { node: name, ..settings(&directory, "i1") };
            let (client, statuses) = (server.client(AGENT), DeviceStatuses::default());
            let publisher = SlicePublisher::new(client.clone(), &settings);
            let (devices, list) = watch::channel(vec![Device { name: "d0".into(), ..Device::default() }]);
            states.push(publisher.state());
            tasks.spawn(publisher.run(list, CancellationToken::new()));
            let (writer, way) = (statuses.clone(), client.clone());
            tasks.spawn(async move { writer.run(&way, DRIVER).await });
            let driver = Arc::new(ReportingDriver(statuses.clone()));
            let (_, health) = watch::channel(Vec::new());
            let served = serve(settings.clone(), client, driver, health, CancellationToken::new());
            tasks.spawn(async move { served.await.expect("it can be served") });
            drivers.push(NodeDriver { settings, statuses, devices });
        }
        for mut state in states {
            state.wait_for(|state| state.published).await.expect("it runs");
        }
        until(|| drivers.iter().all(|driver| driver.settings.endpoint().exists())).await;
        Self { server, nodes: drivers, _root: root, _tasks: tasks }
    }

    fn count(&self, matches: impl Fn(Verb) -> bool) -> u64 {
        self.server.count(|request| request.agent == AGENT && matches(request.verb))
    }

    /// A pod with a claim of its own comes to a node, and goes.
    async fn pod(&self, number: usize) {
        let node = &self.nodes[number % self.nodes.len()];
        let name = format!("c{number}");
        let mut wanted = claim(&name, Some(DRIVER));
        wanted.metadata.uid = None;
        let created: ResourceClaim = self.server.create(&wanted).expect("it is valid");
        let uid = created.metadata.uid.expect("it has one");
        let claims = vec![Claim { namespace: "default".into(), name: name.clone(), uid: uid.clone() }];
        let channel = connect(&node.settings.endpoint()).await;
        assert_eq!(prepare(&channel, claims.clone()).await, [(uid.clone(), 1, String::new())]);
        until(|| node.statuses.unwritten() == 0).await;
        assert_eq!(unprepare(&channel, claims).await, [(uid, String::new())]);
        self.server.delete::<ResourceClaim>("default", &name).expect("it exists");
    }
}

/// Counts requests: for some minutes without pods, and then for some seconds in which a hundred pods start each second.
async fn requests_of(nodes: usize, minutes: u64, seconds: usize) {
    let cluster = Cluster::new(nodes).await;
    let at_start = cluster.count(|_| true);
    cluster.server.clear_requests();
    sleep(Duration::from_secs(60 * minutes)).await;
    let (writes, idle) = (cluster.count(Verb::is_write), cluster.count(|_| true));
    assert_eq!(writes, 0, "{:?}", cluster.server.requests());
    assert_eq!(cluster.count(|verb| verb == Verb::Watch), idle, "nothing but watches");
    let nodes = u64::try_from(nodes).expect("it is small");
    // A watch ends after 220 to 275 s.
    assert!(
        (nodes * (minutes * 60 / 300)..=nodes * (minutes * 60 / 220 + 1)).contains(&idle),
        "{idle} requests"
    );
    cluster.server.clear_requests();
    for second in 0..seconds {
        for pod in 0..100 {
            cluster.pod(second * 100 + pod).await;
        }
        sleep(Duration::from_secs(1)).await;
    }
    let pods = 100 * u64::try_from(seconds).expect("it is small");
    let of = |verb| cluster.count(|other| other == verb);
    assert_eq!((of(Verb::Get), of(Verb::Patch)), (pods, pods), "{:?}", cluster.server.requests());
    let watches = of(Verb::Watch);
    assert_eq!(cluster.count(|_| true), 2 * pods + watches);
    cluster.server.clear_requests();
    cluster.nodes[0].devices.send_replace(Vec::new());
    until(|| of(Verb::Patch) > 0).await;
    eprintln!(
        "{nodes} nodes: {at_start} requests at the start, {idle} in {minutes} minutes without pods, {} in {seconds} s with 100 pods a second, {watches} of \
         them watches",
        2 * pods + watches
    );
}

#[tokio::test(start_paused = true)]
async fn nodes_without_pods_write_nothing_and_a_pod_is_two_requests() {
    requests_of(4, 30, 1).await;
}

#[tokio::test(start_paused = true)]
#[ignore = "long: 100 nodes, 2,000 pods"]
async fn hundred_nodes_write_nothing_without_pods_and_a_pod_is_two_requests() {
    requests_of(100, 5, 20).await;
}
