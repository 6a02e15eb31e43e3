//! A small device plugin, a kubelet that restarts under it, and a pod. Time is virtual: it runs at once.
//!
//! `cargo run -p shmesh-fake-kubelet --example kubelet`

use std::error::Error;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use shmesh_fake_kubelet::{Config, Container, Node, Pod};
use shmesh_kubelet_api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use shmesh_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use shmesh_kubelet_api::deviceplugin::*;
use shmesh_kubelet_api::{API_VERSION, HEALTHY};
use tokio::net::UnixListener;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

const RESOURCE: &str = "example.com/seat";
const SOON: Duration = Duration::from_secs(3);

/// Three seats, always free.
struct Seats;

#[tonic::async_trait]
impl DevicePlugin for Seats {
    type ListAndWatchStream =
        Pin<Box<dyn tokio_stream::Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let seat = |n| Device { id: format!("seat{n}"), health: HEALTHY.to_owned(), topology: None };
        let (send, stream) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            let _ = send.send(Ok(ListAndWatchResponse { devices: (0..3).map(seat).collect() })).await;
            send.closed().await; // The list never changes; the stream ends when the kubelet does.
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("no preferences"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let answer = |asked: ContainerAllocateRequest| ContainerAllocateResponse {
            envs: [("SEATS".to_owned(), asked.devices_ids.join(","))].into(),
            ..Default::default()
        };
        let requests = request.into_inner().container_requests;
        Ok(Response::new(AllocateResponse {
            container_responses: requests.into_iter().map(answer).collect(),
        }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// Serves, registers, and does both again whenever its socket is gone: that is how a kubelet's restart shows.
async fn run_plugin(dir: PathBuf) -> Result<(), Box<dyn Error + Send + Sync>> {
    let socket = dir.join("seats.sock");
    loop {
        let listener = UnixListenerStream::new(UnixListener::bind(&socket)?);
        let server = Server::builder().add_service(DevicePluginServer::new(Seats));
        let server = tokio::spawn(server.serve_with_incoming(listener));
        register(&dir.join("kubelet.sock")).await?;
        while socket.exists() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        server.abort();
    }
}

async fn register(kubelet: &Path) -> Result<(), Box<dyn Error + Send + Sync>> {
    let channel = Endpoint::from_shared(format!("unix:{}", kubelet.display()))?.connect().await?;
    let request = RegisterRequest {
        version: API_VERSION.to_owned(),
        endpoint: "seats.sock".to_owned(),
        resource_name: RESOURCE.to_owned(),
        options: None,
    };
    RegistrationClient::new(channel).register(request).await?;
    Ok(())
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let node = Node::new(Config::new(dir.path()));
    node.start_kubelet().await?;
    let plugin = tokio::spawn(run_plugin(node.paths().device_plugins()));
    node.wait_for(SOON, |node| node.allocatable(RESOURCE) == 3).await?;
    println!("registered:    {:?}", node.resources()[RESOURCE]);

    let pod = |name: &str, seats| Pod::new(name).container(Container::new("main").limit(RESOURCE, seats));
    let status = node.add_pod(pod("a", 2)).await;
    println!("pod a:         {:?}, SEATS={:?}", status.phase, status.containers["main"].options.env("SEATS"));
    let status = node.add_pod(pod("b", 2)).await;
    println!("pod b:         {:?}, {}", status.phase, status.message);

    node.restart_kubelet().await?;
    println!(
        "restarted:     {:?}, pod a {:?}",
        node.resources()[RESOURCE],
        node.pod("a").map(|pod| pod.phase)
    );
    let before = node.clock().now();
    node.wait_for(SOON, |node| node.allocatable(RESOURCE) == 3).await?;
    println!("back after:    {:?}", node.clock().now() - before);

    node.delete_pod("a");
    println!("pod c:         {:?}", node.add_pod(pod("c", 3)).await.phase);
    for record in node.events() {
        println!("{:>8.3?}  {:?}", record.at, record.event);
    }
    plugin.abort();
    node.kill_kubelet().await;
    Ok(())
}
