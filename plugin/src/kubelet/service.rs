//! The gRPC services that the kubelet calls. No handler blocks.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use shmesh_daemon::log_limit::LogLimit;
use shmesh_kubelet_api::deviceplugin as api;
use shmesh_kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use shmesh_kubelet_api::pluginregistration as watcher;
use shmesh_kubelet_api::{API_VERSION, DEVICE_PLUGIN_TYPE, HEALTHY, UNHEALTHY};
use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::{Request, Response, Status};

use super::client;
use super::state_machine::Event;
use crate::metrics::Metrics;
use crate::resource::Resource;
use crate::resource::allocate::{AllocateError, AllocateSettings, MAX_CONTAINERS, answer};
use crate::resource::preferred::choose;

/// The current resource and the one before the last configuration change: the kubelet can still allocate a
/// unit whose removal it has not seen, and a refusal would fail the pod permanently.
#[derive(Clone, Debug)]
pub(crate) struct ResourceOffer {
    pub(crate) now: Arc<Resource>,
    pub(crate) before: Option<Arc<Resource>>,
}

/// Time of the last allocation per resource.
#[derive(Debug, Default)]
pub(crate) struct AllocationTimes(Mutex<HashMap<String, Instant>>);

impl AllocationTimes {
    fn map(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        // An interrupted insertion leaves the map consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the time of an allocation.
    pub(crate) fn note(&self, resource: &str) {
        if let Some(when) = self.map().get_mut(resource) {
            *when = Instant::now();
        } else {
            self.map().insert(resource.to_owned(), Instant::now());
        }
    }

    /// Returns the time of the last allocation by this process.
    pub(crate) fn last(&self, resource: &str) -> Option<Instant> {
        self.map().get(resource).copied()
    }
}

/// The gRPC services at one socket.
#[derive(Clone, Debug)]
pub(super) struct DevicePluginService {
    pub(super) offer: watch::Receiver<ResourceOffer>,
    pub(super) form: Arc<AllocateSettings>,
    pub(super) allocation_times: Arc<AllocationTimes>,
    pub(super) metrics: Metrics,
    /// Rate limit for refusals.
    pub(super) log: Arc<Mutex<LogLimit>>,
    /// Channel for stream events, tagged with the server's number.
    pub(super) events: mpsc::UnboundedSender<(u64, Event)>,
    pub(super) server: u64,
    pub(super) stop: CancellationToken,
    /// Cancelled when another instance of the plugin serves the resource.
    pub(super) retired: CancellationToken,
}

impl DevicePluginService {
    fn log_allowed(&self) -> Option<u64> {
        // The limit is consistent after a panic.
        self.log.lock().unwrap_or_else(PoisonError::into_inner).allow(tokio::time::Instant::now().into_std())
    }

    fn refuse(&self, resource: &str, refusal: &AllocateError) -> Status {
        self.metrics.refuse_allocation(resource, refusal.reason());
        if let Some(suppressed) = self.log_allowed() {
            tracing::warn!(resource, %refusal, suppressed, "request refused");
        }
        match refusal {
            AllocateError::Unknown { .. } => Status::not_found(refusal.to_string()),
            _ => Status::invalid_argument(refusal.to_string()),
        }
    }
}

/// Converts a resource to a device list for the kubelet.
fn list(resource: &Resource) -> api::ListAndWatchResponse {
    let topology = |numa: u32| api::TopologyInfo { nodes: vec![api::NumaNode { id: numa.into() }] };
    let devices = resource.units().iter().map(|unit| api::Device {
        id: unit.id.clone(),
        health: if unit.is_healthy { HEALTHY } else { UNHEALTHY }.into(),
        topology: unit.numa.map(topology),
    });
    api::ListAndWatchResponse { devices: devices.collect() }
}

/// Streams device lists until the kubelet or the plugin ends; reports the end on drop.
#[derive(Debug)]
pub(super) struct DeviceListStream {
    offers: WatchStream<ResourceOffer>,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
    events: mpsc::UnboundedSender<(u64, Event)>,
    server: u64,
    metrics: Metrics,
    resource: String,
}

impl Stream for DeviceListStream {
    type Item = Result<api::ListAndWatchResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.stop.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        Pin::new(&mut self.offers).poll_next(context).map(|offer| offer.map(|offer| Ok(list(&offer.now))))
    }
}

impl Drop for DeviceListStream {
    fn drop(&mut self) {
        self.metrics.stream_ended(&self.resource);
        // The receiver is gone when the process exits.
        let _ = self.events.send((self.server, Event::StreamEnded));
    }
}

#[tonic::async_trait]
impl DevicePlugin for DevicePluginService {
    type ListAndWatchStream = DeviceListStream;

    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        if self.retired.is_cancelled() {
            return Err(Status::unavailable("another instance of the plugin has taken over"));
        }
        Ok(Response::new(client::options()))
    }

    async fn list_and_watch(&self, _: Request<api::Empty>) -> Result<Response<DeviceListStream>, Status> {
        let resource = self.offer.borrow().now.name.clone();
        self.metrics.stream_began(&resource);
        let _ = self.events.send((self.server, Event::StreamBegan));
        Ok(Response::new(DeviceListStream {
            offers: WatchStream::new(self.offer.clone()),
            stop: Box::pin(self.stop.clone().cancelled_owned()),
            events: self.events.clone(),
            server: self.server,
            metrics: self.metrics.clone(),
            resource,
        }))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        let resource = Arc::clone(&self.offer.borrow().now);
        let requests = request.into_inner().container_requests;
        if requests.is_empty() || requests.len() > MAX_CONTAINERS {
            return Err(self.refuse(&resource.name, &AllocateError::Containers(requests.len())));
        }
        let chosen = requests.iter().map(|one| {
            choose(
                &resource,
                &one.available_device_ids,
                &one.must_include_device_ids,
                one.allocation_size.into(),
            )
            .map(|device_ids| api::ContainerPreferredAllocationResponse { device_ids })
            .map_err(|refusal| self.refuse(&resource.name, &refusal))
        });
        Ok(Response::new(api::PreferredAllocationResponse {
            container_responses: chosen.collect::<Result<_, _>>()?,
        }))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let began = Instant::now();
        let offer = self.offer.borrow().clone();
        let resource = &offer.now;
        let requests = request.into_inner().container_requests;
        if requests.is_empty() || requests.len() > MAX_CONTAINERS {
            return Err(self.refuse(&resource.name, &AllocateError::Containers(requests.len())));
        }
        let answers = requests.iter().map(|one| {
            let ids = &one.devices_ids;
            match (answer(resource, ids, &self.form), &offer.before) {
                (Err(AllocateError::Unknown { .. }), Some(before)) => answer(before, ids, &self.form),
                (given, _) => given,
            }
            .map_err(|refusal| self.refuse(&resource.name, &refusal))
        });
        let container_responses = answers.collect::<Result<_, _>>()?;
        self.allocation_times.note(&resource.name);
        self.metrics.allocated(&resource.name, began.elapsed());
        Ok(Response::new(api::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        // Not announced in the options, and nothing to do.
        Ok(Response::new(api::PreStartContainerResponse {}))
    }
}

#[tonic::async_trait]
impl watcher::registration_server::Registration for DevicePluginService {
    async fn get_info(
        &self,
        _: Request<watcher::InfoRequest>,
    ) -> Result<Response<watcher::PluginInfo>, Status> {
        Ok(Response::new(watcher::PluginInfo {
            r#type: DEVICE_PLUGIN_TYPE.into(),
            name: self.offer.borrow().now.name.clone(),
            // Empty means the socket of this request, whatever path the kubelet uses.
            endpoint: String::new(),
            supported_versions: vec![API_VERSION.into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        status: Request<watcher::RegistrationStatus>,
    ) -> Result<Response<watcher::RegistrationStatusResponse>, Status> {
        let status = status.into_inner();
        let resource = self.offer.borrow().now.name.clone();
        self.metrics.registered(&resource, status.plugin_registered);
        let answer = Ok(Response::new(watcher::RegistrationStatusResponse {}));
        let Some(suppressed) = self.log_allowed() else { return answer };
        if status.plugin_registered {
            tracing::info!(resource, suppressed, "registered");
        } else {
            // The kubelet retries by itself.
            tracing::warn!(
                resource,
                error = status.error,
                suppressed,
                "the kubelet rejected the registration"
            );
        }
        answer
    }
}
