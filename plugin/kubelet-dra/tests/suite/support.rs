//! A driver, its claims, and the kubelet's side of the sockets.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationResult, DeviceRequestAllocationResult, ResourceClaim,
    ResourceClaimStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kubelet_dra::{
    ClaimRef, Claims, DeviceHealth, Driver, DriverSettings, PreparedDevice, ServeError, serve,
};
use shmesh_kubelet_api::dra::dra_plugin_client::DraPluginClient;
use shmesh_kubelet_api::dra::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use shmesh_kubelet_api::pluginregistration::registration_client::RegistrationClient;
use shmesh_kubelet_api::pluginregistration::{InfoRequest, PluginInfo};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

pub(crate) const DRIVER: &str = "gpu.example.com";

/// Waits for a state. The limit only finds what hangs.
pub(crate) async fn until(mut condition: impl FnMut() -> bool) {
    let poll = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WATCHDOG, poll).await.expect("the state is reached");
}

/// Far longer than anything that a test waits for.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

/// A claim `default/NAME` with uid `NAME-uid`, and one device of `driver` if there is one.
pub(crate) fn claim(name: &str, driver: Option<&str>) -> ResourceClaim {
    let result = |driver: &str| DeviceRequestAllocationResult {
        driver: driver.into(),
        pool: "n1".into(),
        device: "d0".into(),
        request: "gpu".into(),
        ..DeviceRequestAllocationResult::default()
    };
    let allocation = driver.map(|driver| AllocationResult {
        devices: Some(DeviceAllocationResult { results: Some(vec![result(driver)]), config: None }),
        ..AllocationResult::default()
    });
    ResourceClaim {
        metadata: ObjectMeta {
            namespace: Some("default".into()),
            name: Some(name.into()),
            uid: Some(format!("{name}-uid")),
            ..ObjectMeta::default()
        },
        status: Some(ResourceClaimStatus { allocation, ..ResourceClaimStatus::default() }),
        ..ResourceClaim::default()
    }
}

/// Claims by name. Those named `offline` cannot be read.
#[derive(Clone, Default)]
pub(crate) struct ClaimTable(pub(crate) Arc<Mutex<BTreeMap<String, ResourceClaim>>>);

impl ClaimTable {
    pub(crate) fn of(claims: impl IntoIterator<Item = ResourceClaim>) -> Self {
        let table = Self::default();
        claims.into_iter().for_each(|claim| table.insert(claim));
        table
    }

    pub(crate) fn insert(&self, claim: ResourceClaim) {
        let name = claim.metadata.name.clone().expect("a name");
        self.0.lock().expect("no test panicked").insert(name, claim);
    }
}

impl Claims for ClaimTable {
    async fn get(&self, namespace: &str, name: &str) -> Result<Option<ResourceClaim>, String> {
        if name == "offline" {
            return Err(format!(
                "claim {namespace}/{name} cannot be read from the API server: connection refused"
            ));
        }
        Ok(self.0.lock().expect("no test panicked").get(name).cloned())
    }
}

/// Prepares the device `n1/d0`. What it does with a claim depends on the claim's name.
#[derive(Default)]
pub(crate) struct TestDriver {
    pub(crate) log: Mutex<Vec<String>>,
    /// How many calls run now, and how many ran at a time at most.
    pub(crate) running: Mutex<(usize, usize)>,
    /// Each call waits for one of these permits, if there are any.
    pub(crate) permits: Option<Arc<tokio::sync::Semaphore>>,
}

impl TestDriver {
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().expect("no test panicked").clone()
    }

    fn note(&self, line: String) {
        self.log.lock().expect("no test panicked").push(line);
    }

    async fn work(&self, what: &str, name: &str) {
        {
            let mut running = self.running.lock().expect("no test panicked");
            running.0 += 1;
            running.1 = running.1.max(running.0);
        }
        self.note(format!("{what} {name}"));
        if let Some(permits) = &self.permits {
            permits.acquire().await.expect("it stays open").forget();
        }
        tokio::task::yield_now().await;
        self.note(format!("{what} {name} done"));
        self.running.lock().expect("no test panicked").0 -= 1;
    }
}

impl Driver for TestDriver {
    async fn prepare(&self, claim: Arc<ResourceClaim>) -> Result<Vec<PreparedDevice>, String> {
        let name = claim.metadata.name.clone().unwrap_or_default();
        self.work("prepare", &name).await;
        match name.as_str() {
            "refused" => Err("there is no memory left".into()),
            "silent" => Err(String::new()),
            "panics" => panic!("a bug of the driver"),
            _ => Ok(vec![PreparedDevice {
                requests: vec!["gpu/large".into()],
                pool: "n1".into(),
                device: if name == "foreign" { "d9" } else { "d0" }.into(),
                share_id: Some("s1".into()),
                cdi_devices: vec!["example.com/gpu=d0".into()],
            }]),
        }
    }

    async fn unprepare(&self, claim: ClaimRef) -> Result<(), String> {
        self.work("unprepare", &claim.name).await;
        if claim.name == "refused" { Err("it is busy".into()) } else { Ok(()) }
    }

    fn registered(&self, result: Result<(), String>) {
        self.note(format!("registered {result:?}"));
    }
}

/// An instance of a driver that is served in a directory.
pub(crate) struct Instance {
    pub(crate) settings: DriverSettings,
    pub(crate) driver: Arc<TestDriver>,
    pub(crate) health: watch::Sender<Vec<DeviceHealth>>,
    pub(crate) stop: CancellationToken,
    pub(crate) task: JoinHandle<Result<(), ServeError>>,
}

pub(crate) fn settings(root: &Path, instance: &str) -> DriverSettings {
    DriverSettings {
        driver: DRIVER.into(),
        node: "n1".into(),
        instance: instance.into(),
        plugins_dir: root.to_owned(),
        registry_dir: root.to_owned(),
    }
}

impl Instance {
    pub(crate) async fn start(root: &Path, instance: &str, claims: ClaimTable, driver: TestDriver) -> Self {
        let settings = settings(root, instance);
        let (health, news) = watch::channel(Vec::new());
        let (driver, stop) = (Arc::new(driver), CancellationToken::new());
        let task = tokio::spawn(serve(settings.clone(), claims, driver.clone(), news, stop.clone()));
        let registration = settings.registration();
        until(|| registration.exists() || task.is_finished()).await;
        Self { settings, driver, health, stop, task }
    }

    /// As the kubelet does when it finds the registration's socket.
    pub(crate) async fn info(&self) -> PluginInfo {
        let mut client = RegistrationClient::new(connect(&self.settings.registration()).await);
        client.get_info(InfoRequest {}).await.expect("it answers").into_inner()
    }

    /// Connects to the endpoint that the registration names.
    pub(crate) async fn endpoint(&self) -> Channel {
        connect(Path::new(&self.info().await.endpoint)).await
    }

    pub(crate) async fn end(self) {
        self.stop.cancel();
        self.task.await.expect("it does not panic").expect("it ends well");
    }
}

pub(crate) async fn connect(path: &Path) -> Channel {
    let path = path.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .expect("the socket answers")
}

/// Calls `NodePrepareResources`. Returns the uid, the number of devices and the error of each claim.
pub(crate) async fn prepare(channel: &Channel, claims: Vec<Claim>) -> Vec<(String, usize, String)> {
    let request = NodePrepareResourcesRequest { claims };
    let answer =
        DraPluginClient::new(channel.clone()).node_prepare_resources(request).await.expect("it answers");
    let claims = answer.into_inner().claims.into_iter();
    claims.map(|(uid, result)| (uid, result.devices.len(), result.error)).collect()
}

/// Calls `NodeUnprepareResources`. Returns the uid and the error of each claim.
pub(crate) async fn unprepare(channel: &Channel, claims: Vec<Claim>) -> Vec<(String, String)> {
    let request = NodeUnprepareResourcesRequest { claims };
    let answer =
        DraPluginClient::new(channel.clone()).node_unprepare_resources(request).await.expect("it answers");
    answer.into_inner().claims.into_iter().map(|(uid, result)| (uid, result.error)).collect()
}
