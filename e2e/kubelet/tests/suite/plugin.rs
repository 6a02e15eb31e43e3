//! A device plugin that does what the test says.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use shmesh_fake_kubelet::Node;
use shmesh_kubelet_api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use shmesh_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use shmesh_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationResponse,
    Device, DevicePluginOptions, Empty, ListAndWatchResponse, NumaNode, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
    TopologyInfo,
};
use shmesh_kubelet_api::pluginregistration::registration_server::{
    Registration as PluginRegistration, RegistrationServer as PluginRegistrationServer,
};
use shmesh_kubelet_api::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use shmesh_kubelet_api::{API_VERSION, HEALTHY};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};
use tower_service::Service;

use crate::R;

/// How a call goes.
#[derive(Clone, Debug, Default)]
pub(crate) enum Outcome {
    #[default]
    Good,
    Fail(Status),
    /// An answer with nothing in it.
    Empty,
    /// Never answers a request.
    Hang,
}

/// The behaviour of a plugin, which the test changes as it goes.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub options: DevicePluginOptions,
    pub on_options: Outcome,
    pub on_list: Outcome,
    pub on_preferred: Outcome,
    pub on_allocate: Outcome,
    /// The devices that it prefers among the available ones.
    pub preferred: Vec<String>,
    pub answer: ContainerAllocateResponse,
    pub info: PluginInfo,
    pub on_info: Outcome,
}

/// A call that was made: its name and the device ids of the request.
pub(crate) type Call = (&'static str, Vec<String>);

#[derive(Debug)]
struct Inner {
    script: Mutex<Script>,
    list: watch::Sender<Vec<Device>>,
    cut: watch::Sender<u32>,
    calls: Mutex<Vec<Call>>,
    headers: Mutex<Vec<BTreeMap<String, String>>>,
    statuses: Mutex<Vec<RegistrationStatus>>,
}

#[derive(Clone, Debug)]
pub(crate) struct Fake(Arc<Inner>);

/// A socket that a plugin serves; dropped, it is cut with all its connections, and its file stays.
#[derive(Debug)]
pub(crate) struct ServerTask(#[expect(dead_code, reason = "held, so that it is served")] JoinSet<()>);

pub(crate) fn device(id: &str, health: &str, nodes: &[i64]) -> Device {
    let topology = TopologyInfo { nodes: nodes.iter().map(|id| NumaNode { id: *id }).collect() };
    Device { id: id.to_owned(), health: health.to_owned(), topology: (!nodes.is_empty()).then_some(topology) }
}

pub(crate) fn devices(count: usize) -> Vec<Device> {
    (0..count).map(|n| device(&format!("d{n}"), HEALTHY, &[])).collect()
}

pub(crate) async fn channel(path: &Path) -> Channel {
    connect(path).await.unwrap()
}

async fn connect(path: &Path) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("unix:{}", path.display())).unwrap().connect().await
}

impl Fake {
    /// With so many healthy devices, `d0` and so on.
    pub(crate) fn new(count: usize) -> Self {
        let info = PluginInfo {
            r#type: "DevicePlugin".to_owned(),
            name: R.to_owned(),
            endpoint: String::new(),
            supported_versions: vec![API_VERSION.to_owned()],
        };
        let script = Script {
            options: DevicePluginOptions::default(),
            on_options: Outcome::Good,
            on_list: Outcome::Good,
            on_preferred: Outcome::Good,
            on_allocate: Outcome::Good,
            preferred: Vec::new(),
            answer: ContainerAllocateResponse::default(),
            info,
            on_info: Outcome::Good,
        };
        Self(Arc::new(Inner {
            script: Mutex::new(script),
            list: watch::Sender::new(devices(count)),
            cut: watch::Sender::new(0),
            calls: Mutex::default(),
            headers: Mutex::default(),
            statuses: Mutex::default(),
        }))
    }

    pub(crate) fn script(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.0.script.lock().unwrap());
    }

    pub(crate) fn list(&self, devices: Vec<Device>) {
        self.0.list.send_replace(devices);
    }

    /// Ends the streams, and not the connections.
    pub(crate) fn cut_streams(&self) {
        self.0.cut.send_modify(|count| *count += 1);
    }

    pub(crate) fn calls(&self, name: &str) -> Vec<Vec<String>> {
        let calls = self.0.calls.lock().unwrap();
        calls.iter().filter(|(call, _)| *call == name).map(|(_, ids)| ids.clone()).collect()
    }

    /// Of every request: `:authority`, `:path`, and headers.
    pub(crate) fn headers(&self) -> Vec<BTreeMap<String, String>> {
        self.0.headers.lock().unwrap().clone()
    }

    pub(crate) fn statuses(&self) -> Vec<RegistrationStatus> {
        self.0.statuses.lock().unwrap().clone()
    }

    /// Serves at a path, both interfaces.
    pub(crate) fn serve(&self, path: PathBuf) -> ServerTask {
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let mut tasks = JoinSet::new();
        let fake = self.clone();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let service = TowerToHyperService::new(Both::new(&fake));
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(socket), service);
                connections.spawn(async move {
                    let _ = connection.await;
                });
            }
        });
        ServerTask(tasks)
    }

    /// Serves in the directory of the legacy way.
    pub(crate) fn serve_at(&self, node: &Node, name: &str) -> ServerTask {
        self.serve(node.paths().device_plugins().join(name))
    }

    /// Serves and registers itself.
    pub(crate) async fn up(&self, node: &Node, name: &str) -> ServerTask {
        let served = self.serve_at(node, name);
        register(node, name).await.unwrap();
        served
    }

    fn called(&self, name: &'static str, ids: Vec<String>) {
        self.0.calls.lock().unwrap().push((name, ids));
    }

    async fn go<T>(&self, outcome: fn(&Script) -> Outcome, good: T, empty: T) -> Result<Response<T>, Status> {
        let outcome = outcome(&self.0.script.lock().unwrap());
        match outcome {
            Outcome::Good => Ok(Response::new(good)),
            Outcome::Empty => Ok(Response::new(empty)),
            Outcome::Fail(status) => Err(status),
            Outcome::Hang => std::future::pending().await,
        }
    }
}

pub(crate) fn request(endpoint: &str) -> RegisterRequest {
    RegisterRequest {
        version: API_VERSION.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: R.to_owned(),
        options: None,
    }
}

pub(crate) async fn register(node: &Node, endpoint: &str) -> Result<(), Status> {
    register_as(node, request(endpoint)).await
}

pub(crate) async fn register_as(node: &Node, request: RegisterRequest) -> Result<(), Status> {
    let channel = connect(&node.paths().kubelet_socket()).await;
    let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
    RegistrationClient::new(channel).register(request).await.map(drop)
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Answer = Result<http::Response<tonic::body::Body>, Infallible>;

/// Both interfaces of a plugin, and a note of each request.
#[derive(Clone)]
struct Both {
    fake: Fake,
    plugin: DevicePluginServer<Fake>,
    registration: PluginRegistrationServer<Fake>,
}

impl Both {
    fn new(fake: &Fake) -> Self {
        Self {
            fake: fake.clone(),
            plugin: DevicePluginServer::new(fake.clone()),
            registration: PluginRegistrationServer::new(fake.clone()),
        }
    }
}

impl Service<http::Request<hyper::body::Incoming>> for Both {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Answer>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<hyper::body::Incoming>) -> Self::Future {
        let mut note: BTreeMap<String, String> = request
            .headers()
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
            .collect();
        let authority = request.uri().authority().map(ToString::to_string).unwrap_or_default();
        note.insert(":authority".to_owned(), authority);
        note.insert(":path".to_owned(), request.uri().path().to_owned());
        self.fake.0.headers.lock().unwrap().push(note);
        if request.uri().path().starts_with("/pluginregistration.") {
            Box::pin(self.registration.call(request))
        } else {
            Box::pin(self.plugin.call(request))
        }
    }
}

#[tonic::async_trait]
impl DevicePlugin for Fake {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        self.called("options", Vec::new());
        let options = self.0.script.lock().unwrap().options;
        self.go(|script| script.on_options.clone(), options, DevicePluginOptions::default()).await
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        self.called("list", Vec::new());
        self.go(|script| script.on_list.clone(), (), ()).await?;
        let (mut list, mut cut) = (self.0.list.subscribe(), self.0.cut.subscribe());
        let (send, stream) = mpsc::channel(1);
        list.mark_changed();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = cut.changed() => return,
                    () = send.closed() => return,
                    Ok(()) = list.changed() => {
                        let devices = list.borrow_and_update().clone();
                        let _ = send.send(Ok(ListAndWatchResponse { devices })).await;
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let requests = request.into_inner().container_requests;
        assert_eq!(requests.len(), 1);
        self.called("preferred", requests[0].available_device_ids.clone());
        let device_ids = self.0.script.lock().unwrap().preferred.clone();
        let container_responses = vec![ContainerPreferredAllocationResponse { device_ids }];
        let good = PreferredAllocationResponse { container_responses };
        self.go(|script| script.on_preferred.clone(), good, PreferredAllocationResponse::default()).await
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let requests = request.into_inner().container_requests;
        assert_eq!(requests.len(), 1);
        self.called("allocate", requests[0].devices_ids.clone());
        let answer = self.0.script.lock().unwrap().answer.clone();
        let good = AllocateResponse { container_responses: vec![answer] };
        self.go(|script| script.on_allocate.clone(), good, AllocateResponse::default()).await
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("no option asks for it"))
    }
}

#[tonic::async_trait]
impl PluginRegistration for Fake {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        self.called("info", Vec::new());
        let info = self.0.script.lock().unwrap().info.clone();
        self.go(|script| script.on_info.clone(), info, PluginInfo::default()).await
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.0.statuses.lock().unwrap().push(request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
