//! The plugin's socket and its gRPC server.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use shmesh_kubelet_api::deviceplugin::device_plugin_server::DevicePluginServer;
use shmesh_kubelet_api::pluginregistration::registration_server::RegistrationServer;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;

use super::service::DevicePluginService;
use super::state_machine::{FileId, Mode};

/// Twice the size of a full device list, because a request can name each unit twice.
const MAX_REQUEST: usize = 8 << 20;
/// Maximum concurrent requests per connection; the kubelet sends one at a time.
const MAX_STREAMS: u32 = 64;
/// Time limit for pending requests at shutdown.
const DRAIN: Duration = Duration::from_secs(1);

/// Identifies the socket file at a path.
pub(super) fn file_id(path: &Path) -> Option<FileId> {
    let found = fs::symlink_metadata(path).ok().filter(|found| found.file_type().is_socket())?;
    Some(FileId { dev: found.dev(), ino: found.ino(), changed: (found.ctime(), found.ctime_nsec()) })
}

/// The part of a socket's name that distinguishes the starts of the plugin.
pub(super) fn instance_part(start: u64) -> String {
    format!(".{start:x}.")
}

/// A gRPC server on a socket. Dropping it removes the socket and ends its streams.
#[derive(Debug)]
pub(super) struct Server {
    path: PathBuf,
    file: (u64, u64),
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Server {
    /// Serves at `path`, replacing any existing socket.
    pub(super) fn start(path: &Path, mode: Mode, service: DevicePluginService) -> io::Result<Self> {
        if file_id(path).is_some() {
            fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        let ours = || {
            fs::set_permissions(path, Permissions::from_mode(0o600))?;
            fs::symlink_metadata(path)
        };
        let found = ours().inspect_err(|_| {
            // A retry uses another name, so nothing else would remove this socket.
            let _ = fs::remove_file(path);
        })?;
        let stop = service.stop.clone();
        let plugin = DevicePluginServer::new(service.clone()).max_decoding_message_size(MAX_REQUEST);
        let discovered = (mode == Mode::Discovered).then(|| RegistrationServer::new(service));
        let router = tonic::transport::Server::builder()
            .max_concurrent_streams(MAX_STREAMS)
            .add_service(plugin)
            .add_optional_service(discovered);
        let incoming = UnixListenerStream::new(listener);
        let serving = router.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
        let task = tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::warn!(%error, "the gRPC server failed");
            }
        });
        Ok(Self { path: path.to_owned(), file: (found.dev(), found.ino()), stop, task })
    }

    /// Whether the socket exists and is served.
    pub(super) fn is_there(&self) -> bool {
        let same = file_id(&self.path).is_some_and(|file| (file.dev, file.ino) == self.file);
        same && !self.task.is_finished()
    }

    /// Removes the socket and shuts down in order.
    pub(super) async fn end(mut self) {
        self.remove_socket();
        self.stop.cancel();
        // A connection that is still open by then is idle.
        let _ = tokio::time::timeout(DRAIN, &mut self.task).await;
    }

    fn remove_socket(&self) {
        if file_id(&self.path).is_some_and(|file| (file.dev, file.ino) == self.file)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.remove_socket();
        self.stop.cancel();
    }
}

/// Removes sockets of earlier instances, which have none of the names of this `start`. No other instance may serve.
pub(crate) fn remove_stale(dir: &Path, domain: &str, start: u64) -> io::Result<()> {
    let (prefix, ours) = (format!("{domain}_"), instance_part(start));
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let is_ours = entry.file_name().to_str().is_some_and(|name| {
            name.starts_with(&prefix) && name.ends_with(".sock") && !name.contains(&ours)
        });
        if is_ours && entry.file_type()?.is_socket() {
            match fs::remove_file(entry.path()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {
                    tracing::info!(socket = %entry.path().display(), "removed the stale socket of an earlier plugin")
                }
            }
        }
    }
    Ok(())
}
