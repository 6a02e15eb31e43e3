//! Our questions to the kubelet: Register, and which pods have what.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use hyper_util::rt::TokioIo;
use shmesh_kubelet_api::API_VERSION;
use shmesh_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use shmesh_kubelet_api::deviceplugin::{DevicePluginOptions, RegisterRequest};
use shmesh_kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use shmesh_kubelet_api::podresources::{ListPodResourcesRequest, ListPodResourcesResponse};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use crate::resource::allocate::UsageByResource;

/// A kubelet that takes longer to list its pods is asked again later.
const LIST_LIMIT: Duration = Duration::from_secs(5);
/// What the kubelet's own clients allow a list of pods to be.
const MAX_LIST: usize = 16 << 20;

async fn connect(socket: &Path) -> Result<Channel> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path: PathBuf = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The name means nothing on a unix socket, but grpc-go wants one that is valid.
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
    channel.with_context(|| format!("nobody answers on {}", socket.display()))
}

/// Tells the kubelet of a resource served at `endpoint`, a file name in its directory.
pub(super) async fn register(socket: PathBuf, endpoint: String, resource_name: String) -> Result<()> {
    let request = RegisterRequest {
        version: API_VERSION.into(),
        endpoint,
        resource_name,
        // Ignored by the kubelet, which asks for them.
        options: Some(options()),
    };
    RegistrationClient::new(connect(&socket).await?).register(request).await.map_err(said)?;
    Ok(())
}

/// What the kubelet may ask for besides.
pub(super) fn options() -> DevicePluginOptions {
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

/// Only what the kubelet said; the rest of a status is noise.
fn said(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{:?}: {}", status.code(), status.message())
}

/// How many containers hold how many units of each resource.
pub(crate) async fn held(socket: &Path) -> Result<UsageByResource> {
    let list = async {
        let mut client =
            PodResourcesListerClient::new(connect(socket).await?).max_decoding_message_size(MAX_LIST);
        let answer = client.list(ListPodResourcesRequest {}).await.map_err(said)?;
        Ok(count(&answer.into_inner()))
    };
    tokio::time::timeout(LIST_LIMIT, list).await.context("the kubelet does not list its pods in time")?
}

fn count(list: &ListPodResourcesResponse) -> UsageByResource {
    let mut held = UsageByResource::new();
    for container in list.pod_resources.iter().flat_map(|pod| &pod.containers) {
        let mut last = "";
        for devices in &container.devices {
            let (containers, units) = held.entry(devices.resource_name.clone()).or_default();
            // One entry per NUMA node or even per unit, next to each other.
            *containers += usize::from(last != devices.resource_name);
            *units += devices.device_ids.len();
            last = &devices.resource_name;
        }
    }
    held
}
