//! The gRPC services that the kubelet calls. They only translate.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use shmesh_kubelet_api::pluginregistration::registration_server::Registration;
use shmesh_kubelet_api::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use shmesh_kubelet_api::{DRA_HEALTH_V1ALPHA1, DRA_PLUGIN_TYPE, DRA_V1, DRA_V1BETA1};
use shmesh_kubelet_api::{dra, dra_v1beta1, drahealth};
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::info;

use crate::claims::Claims;
use crate::driver::{ClaimRef, DeviceHealth, Driver, HealthState, PreparedDevice};
use crate::node::Node;

/// Interval at which the health of devices is repeated. The kubelet takes it for unknown after 30 seconds.
const HEALTH_INTERVAL: Duration = Duration::from_secs(10);

/// All services of one instance.
#[derive(Debug)]
pub(crate) struct Services<D, C> {
    pub(crate) node: Arc<Node<D, C>>,
    pub(crate) driver_name: String,
    pub(crate) endpoint: PathBuf,
    pub(crate) health: watch::Receiver<Vec<DeviceHealth>>,
    pub(crate) stop: CancellationToken,
}

impl<D, C> Clone for Services<D, C> {
    fn clone(&self) -> Self {
        Self {
            node: self.node.clone(),
            driver_name: self.driver_name.clone(),
            endpoint: self.endpoint.clone(),
            health: self.health.clone(),
            stop: self.stop.clone(),
        }
    }
}

#[tonic::async_trait]
impl<D: Driver, C: Claims> Registration for Services<D, C> {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: DRA_PLUGIN_TYPE.into(),
            name: self.driver_name.clone(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: [DRA_V1, DRA_V1BETA1, DRA_HEALTH_V1ALPHA1].map(String::from).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        status: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = status.into_inner();
        let result = if plugin_registered {
            info!("the kubelet has registered driver {}", self.driver_name);
            Ok(())
        } else {
            Err(error)
        };
        self.node.driver().registered(result);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// The service `DRAPlugin` of one version.
macro_rules! dra_plugin {
    ($api:ident, $device:expr) => {
        impl From<$api::Claim> for ClaimRef {
            fn from($api::Claim { namespace, uid, name }: $api::Claim) -> Self {
                Self { namespace, name, uid }
            }
        }

        #[tonic::async_trait]
        impl<D: Driver, C: Claims> $api::dra_plugin_server::DraPlugin for Services<D, C> {
            async fn node_prepare_resources(
                &self,
                request: Request<$api::NodePrepareResourcesRequest>,
            ) -> Result<Response<$api::NodePrepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(ClaimRef::from).collect();
                let results = self.node.prepare(claims).await.into_iter().map(|(uid, result)| {
                    let (devices, error) = split(result);
                    let devices = devices.into_iter().map($device).collect();
                    (uid, $api::NodePrepareResourceResponse { devices, error })
                });
                Ok(Response::new($api::NodePrepareResourcesResponse { claims: results.collect() }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$api::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$api::NodeUnprepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(ClaimRef::from).collect();
                let results = self.node.unprepare(claims).await.into_iter().map(|(uid, result)| {
                    let ((), error) = split(result);
                    (uid, $api::NodeUnprepareResourceResponse { error })
                });
                Ok(Response::new($api::NodeUnprepareResourcesResponse { claims: results.collect() }))
            }
        }
    };
}

dra_plugin!(dra, |device: PreparedDevice| dra::Device {
    request_names: requests(device.requests),
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: device.cdi_devices,
    share_id: device.share_id,
});
dra_plugin!(dra_v1beta1, |device: PreparedDevice| dra_v1beta1::Device {
    request_names: requests(device.requests),
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: device.cdi_devices,
});

/// The value and the text of the error, of which an empty one means success.
fn split<T: Default>(result: Result<T, String>) -> (T, String) {
    match result {
        Ok(value) => (value, String::new()),
        Err(error) if error.is_empty() => (T::default(), "the driver failed without a reason".into()),
        Err(error) => (T::default(), error),
    }
}

/// The names of the requests, without subrequests: the kubelet knows only the requests of the pod.
fn requests(names: Vec<String>) -> Vec<String> {
    names.into_iter().map(|name| name.split('/').next().unwrap_or_default().to_owned()).collect()
}

#[tonic::async_trait]
impl<D: Driver, C: Claims> drahealth::dra_resource_health_server::DraResourceHealth for Services<D, C> {
    type NodeWatchResourcesStream =
        Pin<Box<dyn Stream<Item = Result<drahealth::NodeWatchResourcesResponse, Status>> + Send>>;

    async fn node_watch_resources(
        &self,
        _: Request<drahealth::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let (to, stream) = mpsc::channel(1);
        let (mut health, stop) = (self.health.clone(), self.stop.clone());
        tokio::spawn(async move {
            loop {
                let list = health_list(&health.borrow_and_update());
                if to.send(Ok(list)).await.is_err() {
                    return;
                }
                let changed = async {
                    if health.changed().await.is_err() {
                        // There are no news any more; the last ones stay true.
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    () = changed => {}
                    () = sleep(HEALTH_INTERVAL) => {}
                    () = to.closed() => return,
                    () = stop.cancelled() => return,
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

fn health_list(devices: &[DeviceHealth]) -> drahealth::NodeWatchResourcesResponse {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let devices = devices.iter().map(|device| drahealth::DeviceHealth {
        device: Some(drahealth::DeviceIdentifier {
            pool_name: device.pool.clone(),
            device_name: device.device.clone(),
        }),
        health: match device.state {
            HealthState::Unknown => drahealth::HealthStatus::Unknown,
            HealthState::Healthy => drahealth::HealthStatus::Healthy,
            HealthState::Unhealthy => drahealth::HealthStatus::Unhealthy,
        }
        .into(),
        last_updated_time: now.try_into().unwrap_or(i64::MAX),
        // The kubelet's default.
        health_check_timeout_seconds: 0,
        message: device.message.chars().take(MAX_HEALTH_MESSAGE).collect(),
    });
    drahealth::NodeWatchResourcesResponse { devices: devices.collect() }
}

/// Maximum length of a health message in the interface.
const MAX_HEALTH_MESSAGE: usize = 1024;
