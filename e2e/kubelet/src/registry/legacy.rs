//! Plugins that register at `kubelet.sock`.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use shmesh_kubelet_api::API_VERSION;
use shmesh_kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
use shmesh_kubelet_api::deviceplugin::{Empty, RegisterRequest};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::Registry;
use crate::journal::Event;
use crate::names::is_extended_resource_name;
use crate::wire::serve;

impl Registry {
    /// Creates the directory, removes the sockets of plugins that were registered with a former kubelet, and serves.
    pub(crate) fn serve_legacy(self: &Arc<Self>) -> io::Result<()> {
        let paths = self.config.paths();
        let dir = paths.device_plugins();
        DirBuilder::new().recursive(true).mode(0o750).create(&dir)?;
        remove_sockets(&dir)?;
        let service = RegistrationServer::new(Legacy(Arc::clone(self)));
        serve(&paths.kubelet_socket(), 0o755, service, &self.process)?;
        fs::File::create(dir.join("DEPRECATION"))?;
        Ok(())
    }
}

fn remove_sockets(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if fs::metadata(&path).is_ok_and(|meta| meta.file_type().is_socket()) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

#[derive(Debug)]
struct Legacy(Arc<Registry>);

#[tonic::async_trait]
impl Registration for Legacy {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let RegisterRequest { version, endpoint, resource_name, options: _ } = request.into_inner();
        let refuse = |error: String| {
            let resource = resource_name.clone();
            self.0.journal.add(Event::RegisterRefused { resource, error: error.clone() });
            Err(Status::unknown(error))
        };
        if version != API_VERSION {
            return refuse(format!(
                "requested API version {version:?} is not supported by kubelet. Supported version is [{API_VERSION:?}]"
            ));
        }
        if !is_extended_resource_name(&resource_name) {
            return refuse(format!("the ResourceName {resource_name:?} is invalid"));
        }
        let socket = joined(self.0.config.paths().device_plugins(), &endpoint);
        // If the plugin hangs up, this future is dropped; the kubelet's code still gets to clean up.
        let cancelled = CancellationToken::new();
        let _guard = cancelled.clone().drop_guard();
        let (done, answer) = oneshot::channel();
        let registry = Arc::clone(&self.0);
        self.0.process.spawn(async move {
            let _ = done.send(registry.connect(&resource_name, &socket, &cancelled).await);
        });
        match answer.await {
            Ok(Ok(())) => Ok(Response::new(Empty {})),
            Ok(Err(error)) => Err(Status::unknown(error)),
            Err(_) => Err(Status::unavailable("transport is closing")),
        }
    }
}

/// Joins paths as Go's `filepath.Join` does: without `..`, which would make the address of a socket too long.
fn joined(directory: PathBuf, endpoint: &str) -> PathBuf {
    Path::new(endpoint).components().fold(directory, |mut path, component| {
        match component {
            Component::Normal(name) => path.push(name),
            Component::ParentDir => drop(path.pop()),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
        path
    })
}
