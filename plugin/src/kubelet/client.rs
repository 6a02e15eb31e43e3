//! Requests to the kubelet: Register, and the list of pods with their devices.

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

/// Timeout for listing pods.
const LIST_LIMIT: Duration = Duration::from_secs(5);
/// Maximum size of a pod list, as in the kubelet's own clients.
const MAX_LIST: usize = 16 << 20;

async fn connect(socket: &Path) -> Result<Channel> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path: PathBuf = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // A unix socket ignores the name, but grpc-go requires a valid `:authority`.
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
    channel.with_context(|| format!("the kubelet does not answer on {}", socket.display()))
}

/// Registers a resource served at `endpoint`, a file name in the kubelet's directory.
pub(super) async fn register(socket: PathBuf, endpoint: String, resource_name: String) -> Result<()> {
    let request = RegisterRequest {
        version: API_VERSION.into(),
        endpoint,
        resource_name,
        // The kubelet ignores this field and calls GetDevicePluginOptions.
        options: Some(options()),
    };
    RegistrationClient::new(connect(&socket).await?).register(request).await.map_err(status_error)?;
    Ok(())
}

/// Returns the optional calls that the plugin supports.
pub(super) fn options() -> DevicePluginOptions {
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

/// Keeps the code and message of a status, which are the useful parts.
fn status_error(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{:?}: {}", status.code(), status.message())
}

/// Returns how many containers and units hold each resource.
pub(crate) async fn held(socket: &Path) -> Result<UsageByResource> {
    let list = async {
        let mut client =
            PodResourcesListerClient::new(connect(socket).await?).max_decoding_message_size(MAX_LIST);
        let answer = client.list(ListPodResourcesRequest {}).await.map_err(status_error)?;
        Ok(count(&answer.into_inner()))
    };
    tokio::time::timeout(LIST_LIMIT, list).await.context("listing the pods of the kubelet timed out")?
}

fn count(list: &ListPodResourcesResponse) -> UsageByResource {
    let mut held = UsageByResource::new();
    for container in list.pod_resources.iter().flat_map(|pod| &pod.containers) {
        let mut last = "";
        for devices in &container.devices {
            let (containers, units) = held.entry(devices.resource_name.clone()).or_default();
            // The kubelet lists one entry per NUMA node or unit, adjacent to each other.
            *containers += usize::from(last != devices.resource_name);
            *units += devices.device_ids.len();
            last = &devices.resource_name;
        }
    }
    held
}
