//! Unix sockets that are removed with their server, and those that dead processes left.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

/// A listening socket. Dropping it removes the file, unless another file has taken its place.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    id: FileId,
}

/// Distinguishes files that had the same name. Inode numbers are reused, times of change are not.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct FileId {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl SocketFile {
    /// Listens at `path` for root only, and replaces an existing file.
    pub(crate) fn listen(path: &Path) -> io::Result<(Self, UnixListener)> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        let id = file_id(path).ok_or(io::ErrorKind::NotFound)?;
        Ok((Self { path: path.to_owned(), id }, listener))
    }

    /// Whether the file is still there.
    pub(crate) fn exists(&self) -> bool {
        file_id(&self.path) == Some(self.id)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.exists() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn file_id(path: &Path) -> Option<FileId> {
    let found = fs::symlink_metadata(path).ok().filter(|found| found.file_type().is_socket())?;
    Some(FileId { device: found.dev(), inode: found.ino(), changed: (found.ctime(), found.ctime_nsec()) })
}

/// Removes sockets in a directory whose names match and on which no process listens. Returns their names.
///
/// A process that is stopped has a socket too: when as many connections wait for it as it allows, one more is refused for now
/// (`EAGAIN`), where a connection of the standard library would wait.
pub(crate) async fn remove_orphans(
    directory: &Path,
    matches: impl Fn(&str) -> bool,
) -> io::Result<Vec<String>> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if !matches(&name) || !entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            continue;
        }
        let refused = UnixStream::connect(entry.path())
            .await
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
        if refused && fs::remove_file(entry.path()).is_ok() {
            removed.push(name);
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_sockets_of_dead_processes_are_removed() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| directory.path().join(name);
        let (_live, _listener) = SocketFile::listen(&path("d-live.sock")).expect("a socket");
        drop(std::os::unix::net::UnixListener::bind(path("d-dead.sock")).expect("a socket"));
        drop(std::os::unix::net::UnixListener::bind(path("e-dead.sock")).expect("a socket"));
        fs::write(path("d-file.sock"), "").expect("a file");
        let removed =
            remove_orphans(directory.path(), |name| name.starts_with("d-")).await.expect("it is readable");
        assert_eq!(removed, ["d-dead.sock"]);
        for kept in ["d-live.sock", "e-dead.sock", "d-file.sock"] {
            assert!(path(kept).exists(), "{kept}");
        }
    }

    #[tokio::test]
    async fn stopped_process_keeps_its_socket_and_nothing_waits_for_it() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("d-stopped.sock");
        let socket = tokio::net::UnixSocket::new_stream().expect("a socket");
        socket.bind(&path).expect("it is free");
        let _listener = socket.listen(1).expect("it listens");
        // Nothing accepts, so these stay.
        let mut waiting = Vec::new();
        let full = loop {
            match UnixStream::connect(&path).await {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        // On a thread of its own: a connection that waits would hold up the test for ever.
        let (done, result) = std::sync::mpsc::channel();
        let looked_in = directory.path().to_owned();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let removed = runtime.expect("a runtime").block_on(remove_orphans(&looked_in, |_| true));
            let _ = done.send(removed.expect("it is readable"));
        });
        let removed = result.recv_timeout(std::time::Duration::from_secs(20)).expect("it does not wait");
        assert_eq!((removed, path.exists()), (Vec::new(), true));
    }

    #[tokio::test]
    async fn dropped_socket_leaves_its_successor() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("a.sock");
        let (first, _) = SocketFile::listen(&path).expect("a socket");
        assert_eq!(fs::metadata(&path).expect("it exists").mode() & 0o777, 0o600);
        let (second, _) = SocketFile::listen(&path).expect("a socket");
        assert!(!first.exists() && second.exists());
        drop(first);
        assert!(second.exists());
        drop(second);
        assert!(!path.exists());
    }
}
