//! A server that ends with its process and closes all connections then.

use std::convert::Infallible;
use std::future::Future;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::{fs, io};

use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::UnixListener;
use tonic::body::Body;
use tower_service::Service;

use crate::process::Process;

/// Binds `path` and serves `service` there until `process` is killed. The socket's file stays, as after a killed process
/// does.
pub(crate) fn serve<S, F>(path: &Path, mode: u32, service: S, process: &Process) -> io::Result<()>
where
    S: Service<http::Request<Incoming>, Response = http::Response<Body>, Error = Infallible, Future = F>
        + Clone
        + Send
        + 'static,
    F: Future<Output = Result<http::Response<Body>, Infallible>> + Send + 'static,
{
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    let connections = process.clone();
    process.spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let service = TowerToHyperService::new(service.clone());
            let connection = hyper::server::conn::http2::Builder::new(connections.clone())
                .serve_connection(TokioIo::new(socket), service);
            connections.spawn(async move {
                let _ = connection.await;
            });
        }
    });
    Ok(())
}
