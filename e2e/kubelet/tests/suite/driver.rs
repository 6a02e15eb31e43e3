//! A driver of dynamic resource allocation that does what the test says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use shmesh_fake_kubelet::Node;
use shmesh_kubelet_api::dra::dra_plugin_server::{DraPlugin, DraPluginServer};
use shmesh_kubelet_api::dra::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use shmesh_kubelet_api::dra_v1beta1 as beta;
use shmesh_kubelet_api::drahealth::dra_resource_health_server::{DraResourceHealth, DraResourceHealthServer};
use shmesh_kubelet_api::drahealth::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use shmesh_kubelet_api::pluginregistration::registration_server::{Registration, RegistrationServer};
use shmesh_kubelet_api::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use shmesh_kubelet_api::{DRA_HEALTH_V1ALPHA1, DRA_PLUGIN_TYPE, DRA_V1};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use crate::D;
use crate::plugin::Outcome;

/// The behaviour of a driver, which the test changes as it goes.
#[derive(Clone, Debug)]
pub(crate) struct DriverScript {
    pub services: Vec<String>,
    pub on_prepare: Outcome,
    pub on_unprepare: Outcome,
    /// Errors by the name of the claim.
    pub errors: BTreeMap<String, String>,
    /// Answered beside the claims that were asked for.
    pub unknown: Option<String>,
    /// Reports success of unpreparing and does nothing.
    pub lies: bool,
    /// Answers NodeUnprepareResources when this ends.
    pub holds: bool,
}

#[derive(Debug)]
struct Inner {
    /// The name of the instance, which is part of the names of its sockets.
    name: String,
    script: Mutex<DriverScript>,
    prepared: Arc<Mutex<BTreeSet<String>>>,
    calls: Mutex<Vec<(&'static str, Vec<String>)>>,
    statuses: Mutex<Vec<RegistrationStatus>>,
    health: watch::Sender<Vec<DeviceHealth>>,
    cut: watch::Sender<()>,
}

/// One instance of a driver.
#[derive(Clone, Debug)]
pub(crate) struct FakeDriver(Arc<Inner>);

/// The sockets of an instance; dropped, they are cut, and their files stay.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub registration: PathBuf,
    pub endpoint: PathBuf,
    tasks: Vec<JoinSet<()>>,
}

impl Sockets {
    /// Ends the instance as a rolling update does: the registration socket is removed.
    pub(crate) fn stop(self) {
        let _ = std::fs::remove_file(&self.registration);
        let _ = std::fs::remove_file(&self.endpoint);
    }

    /// Cuts the connections, and refuses others; the registration stays.
    pub(crate) fn cut(&mut self) {
        self.tasks.pop();
    }
}

impl FakeDriver {
    /// An instance whose sockets have `name` in their names.
    pub(crate) fn new(name: &str) -> Self {
        Self::with_state(name, Arc::default())
    }

    /// An instance that knows what another has prepared.
    pub(crate) fn with_state(name: &str, prepared: Arc<Mutex<BTreeSet<String>>>) -> Self {
        let script = DriverScript {
            services: vec![DRA_V1.to_owned(), DRA_HEALTH_V1ALPHA1.to_owned()],
            on_prepare: Outcome::Good,
            on_unprepare: Outcome::Good,
            errors: BTreeMap::new(),
            unknown: None,
            lies: false,
            holds: false,
        };
        Self(Arc::new(Inner {
            name: name.to_owned(),
            script: Mutex::new(script),
            prepared,
            calls: Mutex::default(),
            statuses: Mutex::default(),
            health: watch::Sender::default(),
            cut: watch::Sender::default(),
        }))
    }

    pub(crate) fn script(&self, change: impl FnOnce(&mut DriverScript)) {
        change(&mut self.0.script.lock().unwrap());
    }

    /// The uids of the claims that are prepared.
    pub(crate) fn prepared(&self) -> BTreeSet<String> {
        self.0.prepared.lock().unwrap().clone()
    }

    pub(crate) fn calls(&self, name: &str) -> Vec<Vec<String>> {
        let calls = self.0.calls.lock().unwrap();
        calls.iter().filter(|(call, _)| *call == name).map(|(_, uids)| uids.clone()).collect()
    }

    pub(crate) fn statuses(&self) -> Vec<RegistrationStatus> {
        self.0.statuses.lock().unwrap().clone()
    }

    /// Reports the health of devices of the pool of the node.
    pub(crate) fn report(&self, devices: &[(&str, HealthStatus)]) {
        let report = |(name, health): &(&str, HealthStatus)| DeviceHealth {
            device: Some(DeviceIdentifier { pool_name: "node".to_owned(), device_name: (*name).to_owned() }),
            health: (*health).into(),
            ..Default::default()
        };
        self.0.health.send_replace(devices.iter().map(report).collect());
    }

    /// Ends the streams of health, and not the connections.
    pub(crate) fn cut_streams(&self) {
        self.0.cut.send_replace(());
    }

    /// Serves, and lets the kubelet find the registration.
    pub(crate) fn start(&self, node: &Node) -> Sockets {
        let dir = node.paths().plugins().join(D);
        std::fs::create_dir_all(&dir).unwrap();
        let endpoint = dir.join(format!("dra-{}.sock", self.0.name));
        self.register(node, endpoint, true)
    }

    /// Lets the kubelet find a registration with the endpoint of another instance.
    pub(crate) fn start_at(&self, node: &Node, endpoint: PathBuf) -> Sockets {
        self.register(node, endpoint, false)
    }

    fn register(&self, node: &Node, endpoint: PathBuf, own: bool) -> Sockets {
        let registration = node.paths().plugins_registry().join(format!("{D}@{}-reg.sock", self.0.name));
        let dra = Routes::new(DraPluginServer::new(self.clone()))
            .add_service(beta::dra_plugin_server::DraPluginServer::new(self.clone()))
            .add_service(DraResourceHealthServer::new(self.clone()));
        let this = Instance { driver: self.clone(), endpoint: endpoint.display().to_string() };
        let mut tasks = vec![serve(&registration, Routes::new(RegistrationServer::new(this)))];
        if own {
            tasks.push(serve(&endpoint, dra));
        }
        Sockets { registration, endpoint, tasks }
    }

    fn called(&self, name: &'static str, uids: impl Iterator<Item = String>) {
        self.0.calls.lock().unwrap().push((name, uids.collect()));
    }

    async fn outcome<T: Default>(
        &self,
        of: fn(&DriverScript) -> &Outcome,
        good: impl FnOnce() -> T,
    ) -> Result<T, Status> {
        let outcome = of(&self.0.script.lock().unwrap()).clone();
        match outcome {
            Outcome::Good => Ok(good()),
            Outcome::Empty => Ok(T::default()),
            Outcome::Fail(status) => Err(status),
            Outcome::Hang => std::future::pending().await,
        }
    }

    fn devices(claim: &Claim) -> Vec<Device> {
        let cdi_device_ids = vec![format!("{D}/claim={}", claim.uid)];
        vec![Device {
            request_names: vec!["r".to_owned()],
            pool_name: "node".to_owned(),
            device_name: "d0".to_owned(),
            cdi_device_ids,
            share_id: None,
        }]
    }
}

fn serve(path: &std::path::Path, routes: Routes) -> JoinSet<()> {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((socket, _)) = listener.accept().await {
            let service = TowerToHyperService::new(routes.clone());
            let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), service);
            connections.spawn(async move {
                let _ = connection.await;
            });
        }
    });
    tasks
}

#[tonic::async_trait]
impl DraPlugin for FakeDriver {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.called("prepare", claims.iter().map(|claim| claim.uid.clone()));
        let good = || {
            let DriverScript { errors, unknown, .. } = self.0.script.lock().unwrap().clone();
            let answer = |claim: &Claim| match errors.get(&claim.name) {
                Some(error) => NodePrepareResourceResponse { error: error.clone(), ..Default::default() },
                None => {
                    self.0.prepared.lock().unwrap().insert(claim.uid.clone());
                    NodePrepareResourceResponse { devices: Self::devices(claim), error: String::new() }
                }
            };
            let claims = claims.iter().map(|claim| (claim.uid.clone(), answer(claim)));
            let unknown = unknown.map(|uid| (uid, NodePrepareResourceResponse::default()));
            NodePrepareResourcesResponse { claims: claims.chain(unknown).collect() }
        };
        self.outcome(|script| &script.on_prepare, good).await.map(Response::new)
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.called("unprepare", claims.iter().map(|claim| claim.uid.clone()));
        while self.0.script.lock().unwrap().holds {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let good = || {
            let DriverScript { errors, lies, .. } = self.0.script.lock().unwrap().clone();
            let answer = |claim: &Claim| {
                let error = errors.get(&claim.name).cloned().unwrap_or_default();
                if error.is_empty() && !lies {
                    self.0.prepared.lock().unwrap().remove(&claim.uid);
                }
                (claim.uid.clone(), NodeUnprepareResourceResponse { error })
            };
            NodeUnprepareResourcesResponse { claims: claims.iter().map(answer).collect() }
        };
        self.outcome(|script| &script.on_unprepare, good).await.map(Response::new)
    }
}

#[tonic::async_trait]
impl beta::dra_plugin_server::DraPlugin for FakeDriver {
    async fn node_prepare_resources(
        &self,
        request: Request<beta::NodePrepareResourcesRequest>,
    ) -> Result<Response<beta::NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.called("beta prepare", claims.iter().map(|claim| claim.uid.clone()));
        let answer = |claim: beta::Claim| {
            self.0.prepared.lock().unwrap().insert(claim.uid.clone());
            let device = beta::Device {
                request_names: Vec::new(),
                pool_name: "node".to_owned(),
                device_name: "d0".to_owned(),
                cdi_device_ids: vec![format!("{D}/beta={}", claim.uid)],
            };
            (claim.uid, beta::NodePrepareResourceResponse { devices: vec![device], error: String::new() })
        };
        let claims = claims.into_iter().map(answer).collect();
        Ok(Response::new(beta::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<beta::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<beta::NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.called("beta unprepare", claims.iter().map(|claim| claim.uid.clone()));
        let answer = |claim: beta::Claim| {
            self.0.prepared.lock().unwrap().remove(&claim.uid);
            (claim.uid, beta::NodeUnprepareResourceResponse::default())
        };
        let claims = claims.into_iter().map(answer).collect();
        Ok(Response::new(beta::NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl DraResourceHealth for FakeDriver {
    type NodeWatchResourcesStream =
        Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        self.called("health", std::iter::empty());
        let (mut health, mut cut) = (self.0.health.subscribe(), self.0.cut.subscribe());
        let (send, stream) = mpsc::channel(1);
        health.mark_changed();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = cut.changed() => return,
                    () = send.closed() => return,
                    Ok(()) = health.changed() => {
                        let devices = health.borrow_and_update().clone();
                        let _ = send.send(Ok(NodeWatchResourcesResponse { devices })).await;
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

/// The registration of an instance, which names its endpoint.
#[derive(Clone, Debug)]
struct Instance {
    driver: FakeDriver,
    endpoint: String,
}

#[tonic::async_trait]
impl Registration for Instance {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let supported_versions = self.driver.0.script.lock().unwrap().services.clone();
        let (r#type, name) = (DRA_PLUGIN_TYPE.to_owned(), D.to_owned());
        Ok(Response::new(PluginInfo { r#type, name, endpoint: self.endpoint.clone(), supported_versions }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.driver.0.statuses.lock().unwrap().push(request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
