//! A driver and its slices against the fake kubelet and a double of the API server, through random restarts, rolling updates, reboots and
//! outages. Time is virtual.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourceClaim};
use kubelet_dra::{ClaimRef, Driver, DriverSettings, PreparedDevice, SlicePublisher, serve};
use serde_json::json;
use shmesh_fake_kubelet::{ApiServer, ClaimReport, Clock, Config, DriverSubject, Node, claim_soak};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::support::DRIVER;

/// Keeps the uids of prepared claims, as files of a driver would outlive it.
#[derive(Clone, Debug, Default)]
struct Memory(Arc<Mutex<BTreeSet<String>>>);

impl Memory {
    fn uids(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().expect("no test panicked while it had it")
    }
}

impl Driver for Memory {
    async fn prepare(&self, claim: Arc<ResourceClaim>) -> Result<Vec<PreparedDevice>, String> {
        let results = claim
            .status
            .as_ref()
            .and_then(|status| status.allocation.as_ref()?.devices.as_ref()?.results.clone());
        self.uids().insert(claim.metadata.uid.clone().unwrap_or_default());
        let device = |result: k8s_openapi::api::resource::v1::DeviceRequestAllocationResult| PreparedDevice {
            requests: vec![result.request],
            pool: result.pool,
            device: result.device,
            share_id: result.share_id,
            cdi_devices: vec![format!("{DRIVER}/claim=x")],
        };
        Ok(results.unwrap_or_default().into_iter().map(device).collect())
    }

    async fn unprepare(&self, claim: ClaimRef) -> Result<(), String> {
        self.uids().remove(&claim.uid);
        Ok(())
    }
}

/// One instance of the driver: its sockets and its publisher.
struct Instance {
    stop: CancellationToken,
    tasks: JoinSet<()>,
    _devices: watch::Sender<Vec<Device>>,
}

impl Instance {
    async fn end(mut self) {
        self.stop.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            ended.expect("it does not panic");
        }
    }
}

struct DriverLifecycle {
    node: Node,
    server: ApiServer,
    memory: Memory,
    runs: u32,
    instance: Option<Instance>,
}

impl DriverLifecycle {
    fn start(&mut self) -> Instance {
        self.runs += 1;
        let paths = self.node.paths();
        std::fs::create_dir_all(paths.plugins()).expect("it can be created");
        let settings = DriverSettings {
            driver: DRIVER.to_owned(),
            node: "node".to_owned(),
            instance: format!("i{}", self.runs),
            plugins_dir: paths.plugins(),
            registry_dir: paths.plugins_registry(),
        };
        let client = self.server.client("driver");
        let stop = CancellationToken::new();
        let device = |n| Device { name: format!("d{n}"), ..Device::default() };
        let (devices, list) = watch::channel((0..8).map(device).collect());
        let (_, health) = watch::channel(Vec::new());
        let mut tasks = JoinSet::new();
        let publisher = SlicePublisher::new(client.clone(), &settings).run(list, stop.clone());
        tasks.spawn(publisher);
        let served = serve(settings, client, Arc::new(self.memory.clone()), health, stop.clone());
        tasks.spawn(async move { served.await.expect("it can be served") });
        Instance { stop, tasks, _devices: devices }
    }
}

impl DriverSubject for DriverLifecycle {
    async fn restart(&mut self) {
        if let Some(instance) = self.instance.take() {
            instance.end().await;
        }
        self.instance = Some(self.start());
    }

    async fn roll(&mut self) {
        let new = self.start();
        tokio::time::sleep(Duration::from_secs(3)).await;
        if let Some(old) = self.instance.replace(new) {
            old.end().await;
        }
    }

    fn prepared(&self) -> BTreeSet<String> {
        self.memory.uids().clone()
    }

    fn claim(&self, name: &str) -> ResourceClaim {
        let request = json!({"name": "r", "exactly": {"deviceClassName": "class"}});
        let claim = json!({"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": {"requests": [request]}}});
        serde_json::from_value(claim).expect("it is a claim")
    }
}

async fn soak(steps: usize, seed: u64) -> ClaimReport {
    let root = tempfile::tempdir().expect("a temporary directory");
    let server = ApiServer::new(Clock::runtime());
    let class: DeviceClass =
        serde_json::from_value(json!({"metadata": {"name": "class"}, "spec": {}})).expect("it is a class");
    server.create(&class).expect("it is valid");
    let node = Node::new(Config { api: Some(server.clone()), seed, ..Config::new(root.path()) });
    node.start_kubelet().await.expect("it starts");
    let mut driver = DriverLifecycle {
        node: node.clone(),
        server: server.clone(),
        memory: Memory::default(),
        runs: 0,
        instance: None,
    };
    driver.restart().await;
    let report = claim_soak(&node, &server, &mut driver, steps, seed).await;
    report.unwrap_or_else(|failure| panic!("{failure}"))
}

#[tokio::test(start_paused = true)]
async fn claims_are_prepared_exactly_while_pods_use_them() {
    let report = soak(40, 1).await;
    assert!(report.started > 2 && report.steps.len() > 7, "{report:?}");
}

#[tokio::test(start_paused = true)]
#[ignore = "long: two soaks of 500 steps"]
async fn claims_are_prepared_exactly_while_pods_use_them_with_any_seed() {
    for seed in 2..4 {
        soak(500, seed).await;
    }
}
