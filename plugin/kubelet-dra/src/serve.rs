//! Serves a driver to the kubelet, and keeps its sockets in place.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shmesh_kubelet_api::dra::dra_plugin_server::DraPluginServer;
use shmesh_kubelet_api::dra_v1beta1::dra_plugin_server::DraPluginServer as DraPluginServerV1Beta1;
use shmesh_kubelet_api::drahealth::dra_resource_health_server::DraResourceHealthServer;
use shmesh_kubelet_api::pluginregistration::registration_server::RegistrationServer;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;
use tracing::{info, warn};

use crate::claims::Claims;
use crate::driver::{DeviceHealth, Driver};
use crate::grpc::Services;
use crate::instance_lock::InstanceLock;
use crate::node::Node;
use crate::settings::{DriverSettings, ServeError};
use crate::socket::{SocketFile, remove_orphans};

/// Interval at which the socket files are looked at.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time limit for pending calls when the driver stops.
const DRAIN: Duration = Duration::from_secs(5);
/// Maximum concurrent calls per connection; the kubelet makes one at a time and has one health stream.
const MAX_STREAMS: u32 = 64;
/// File in the driver's directory that the instances of the driver lock.
const LOCK_FILE: &str = "serialize.lock";

/// Serves `driver` to the kubelet until `stop`: registers it, and answers `DRAPlugin` in the versions `v1` and
/// `v1beta1` and `DRAResourceHealth`.
///
/// The names of the sockets carry [`DriverSettings::instance`], so two instances of a rolling update can live
/// side by side; their calls to [`Driver`] never overlap. Sockets that dead instances left are removed; sockets
/// that are deleted are made again, and the kubelet registers the driver again.
///
/// `health` is the health of all devices of the driver. It may stay empty.
///
/// # Errors
///
/// The settings are impossible, or the sockets cannot be opened at the start. Later failures are retried.
pub async fn serve<D: Driver>(
    settings: DriverSettings,
    claims: impl Claims,
    driver: Arc<D>,
    health: watch::Receiver<Vec<DeviceHealth>>,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    settings.check()?;
    let directory = settings.driver_dir();
    DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(&directory)
        .map_err(|source| ServeError::Directory { path: directory.clone(), source })?;
    let lock = InstanceLock::new(directory.join(LOCK_FILE));
    let services = Services {
        node: Arc::new(Node::new(settings.driver.clone(), driver, claims, lock)),
        driver_name: settings.driver.clone(),
        endpoint: settings.endpoint(),
        health,
        stop: stop.clone(),
    };
    let mut servers = Some(Servers::start(&settings, &services).await?);
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            () = sleep(POLL_INTERVAL) => {}
        }
        if servers.as_ref().is_some_and(Servers::are_reachable) {
            continue;
        }
        if let Some(unreachable) = servers.take() {
            warn!("the sockets of driver {} were removed; creating them again", settings.driver);
            unreachable.end().await;
        }
        let _ = fs::create_dir_all(&directory);
        match Servers::start(&settings, &services).await {
            Ok(again) => servers = Some(again),
            Err(error) => warn!("{error}: {}; retrying", source_of(&error)),
        }
    }
    if let Some(servers) = servers {
        servers.end().await;
    }
    info!("driver {} has stopped", settings.driver);
    Ok(())
}

fn source_of(error: &ServeError) -> String {
    std::error::Error::source(error).map_or_else(String::new, ToString::to_string)
}

/// The two servers of an instance.
#[derive(Debug)]
struct Servers {
    registration: GrpcServer,
    endpoint: GrpcServer,
}

impl Servers {
    /// The endpoint first: the kubelet calls it as soon as it sees the registration.
    async fn start<D: Driver, C: Claims>(
        settings: &DriverSettings,
        services: &Services<D, C>,
    ) -> Result<Self, ServeError> {
        let listen =
            |path: PathBuf| SocketFile::listen(&path).map_err(|source| ServeError::Listen { path, source });
        // The registrations first: an endpoint that does not answer is worse than one that is not announced.
        remove_sockets(settings.registry_dir.clone(), |name| settings.is_registration(name)).await?;
        remove_sockets(settings.driver_dir(), |name| settings.is_endpoint(name)).await?;
        let (endpoint, calls) = listen(settings.endpoint())?;
        let (registration, announcements) = listen(settings.registration())?;
        let router = || tonic::transport::Server::builder().max_concurrent_streams(MAX_STREAMS);
        let endpoint = GrpcServer::serve(
            endpoint,
            calls,
            router()
                .add_service(DraPluginServer::new(services.clone()))
                .add_service(DraPluginServerV1Beta1::new(services.clone()))
                .add_service(DraResourceHealthServer::new(services.clone())),
        );
        let registration = GrpcServer::serve(
            registration,
            announcements,
            router().add_service(RegistrationServer::new(services.clone())),
        );
        Ok(Self { registration, endpoint })
    }

    fn are_reachable(&self) -> bool {
        self.registration.is_reachable() && self.endpoint.is_reachable()
    }

    /// Takes back the registration, and then lets pending calls end.
    async fn end(self) {
        self.registration.end().await;
        self.endpoint.end().await;
    }
}

async fn remove_sockets(directory: PathBuf, matches: impl Fn(&str) -> bool) -> Result<(), ServeError> {
    match remove_orphans(&directory, matches).await {
        Ok(names) => {
            for name in names {
                info!("removed socket {name} of an instance that has ended, in {}", directory.display());
            }
            Ok(())
        }
        Err(source) => Err(ServeError::Directory { path: directory, source }),
    }
}

/// A gRPC server on a socket.
#[derive(Debug)]
struct GrpcServer {
    socket: SocketFile,
    stop: CancellationToken,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl GrpcServer {
    fn serve(socket: SocketFile, listener: UnixListener, router: Router) -> Self {
        let stop = CancellationToken::new();
        let ended = stop.clone().cancelled_owned();
        let task =
            tokio::spawn(router.serve_with_incoming_shutdown(UnixListenerStream::new(listener), ended));
        Self { socket, stop, task }
    }

    fn is_reachable(&self) -> bool {
        self.socket.exists() && !self.task.is_finished()
    }

    async fn end(mut self) {
        drop(self.socket);
        self.stop.cancel();
        if timeout(DRAIN, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}
