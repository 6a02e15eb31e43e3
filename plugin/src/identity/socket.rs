//! The listening socket of the identity service, which replaces the socket of an earlier service and is removed on drop.
//!
//! An earlier service that still runs keeps its connections, and new ones come to this one: in a rolling update the name of the
//! socket is never without a listener.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use shmesh_sys::file::{self, Locked};
use shmesh_sys::socket::{accept_nonblocking, answers, listen_nonblocking};
use thiserror::Error;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::limits::BACKLOG;

/// How long another service may hold the lock until it listens. A longer holder is ignored.
const STARTING: Duration = Duration::from_secs(2);
/// Interval between attempts to lock.
const LOCK_RETRY: Duration = Duration::from_millis(20);

/// Why the socket cannot be created.
#[derive(Debug, Error)]
pub(crate) enum ListenError {
    /// The path is a file or directory, which must not be removed.
    #[error("{0} exists and is not a socket")]
    NoSocket(PathBuf),
    /// A system call failed.
    #[error("cannot {0} {1}")]
    System(&'static str, PathBuf, #[source] io::Error),
}

/// A listening socket that removes its path when dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    /// Device and inode, to avoid removing another service's socket.
    file: (u64, u64),
}

impl Listener {
    /// Listens on `path`, in place of an earlier service.
    pub(crate) fn bind(path: &Path, mode: u32) -> Result<Self, ListenError> {
        Self::bind_ignoring_lock_after(STARTING, path, mode)
    }

    fn bind_ignoring_lock_after(limit: Duration, path: &Path, mode: u32) -> Result<Self, ListenError> {
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |error: io::Error| ListenError::System(what, path, error)
        };
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(failed("create the directory", dir))?;
        }
        // Two services that start together would use one temporary name.
        let _lock = locked(path, limit)?;
        if is_socket(path)? && answers(path).map_err(failed("connect to", path))? {
            tracing::info!(path = %path.display(), "taking over from a service that answers; it keeps its connections");
        }
        // Created under a temporary name, so that clients never see a socket without the right mode or
        // listener.
        let mut name = path.as_os_str().to_owned();
        name.push(".new");
        let new = PathBuf::from(name);
        if is_socket(&new)? {
            fs::remove_file(&new).map_err(failed("remove", &new))?;
        }
        let listening = || {
            let fd = listen_nonblocking(&new, mode, BACKLOG)?;
            let file = fs::symlink_metadata(&new)?;
            fs::rename(&new, path)?;
            Ok((fd, (file.dev(), file.ino())))
        };
        let (fd, file) = listening().map_err(failed("listen on", path))?;
        Ok(Self { fd, path: path.to_owned(), file })
    }

    /// Accepts the next connection without blocking.
    pub(crate) fn accept(&self) -> io::Result<OwnedFd> {
        accept_nonblocking(&self.fd)
    }

    /// Registers the listener with the tokio runtime.
    #[expect(unsafe_code, reason = "tokio cannot see that a descriptor stays what it is")]
    pub(crate) fn watched(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: it is the descriptor of the field `fd`, which is closed with self and never replaced.
        unsafe { Ok(AsyncFd::register_with_interest(self, Interest::READABLE)?) }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let still_ours =
            fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.file);
        if still_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

/// Takes the lock file beside the socket. Returns `None` if it is held beyond the time limit:
/// root in a pod that mounts this directory could hold the lock for ever.
fn locked(path: &Path, limit: Duration) -> Result<Option<Locked>, ListenError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock = PathBuf::from(name);
    let failed = |error| ListenError::System("lock", lock.clone(), error);
    let file = file::open_lock_file(&lock, 0o600).map_err(failed)?;
    match Locked::lock_until(file, Instant::now() + limit, LOCK_RETRY) {
        Ok(held) => Ok(Some(held)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            tracing::warn!(lock = %lock.display(), "another process holds the lock, as earlier versions do; ignoring the lock");
            Ok(None)
        }
        Err(error) => Err(failed(error)),
    }
}

fn is_socket(path: &Path) -> Result<bool, ListenError> {
    match fs::symlink_metadata(path) {
        Ok(file) if file.file_type().is_socket() => Ok(true),
        Ok(_) => Err(ListenError::NoSocket(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(ListenError::System("inspect", path.to_owned(), error)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn earlier_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent/agent.sock");
        let first = Listener::bind(&path, 0o666).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o666);
        let next = Listener::bind(&path, 0o666).unwrap();
        drop(first);
        assert!(answers(&path).unwrap(), "the first one leaves the name to the next");
        let first = next;
        // Simulates a crash: the path remains.
        let inode = fs::metadata(&path).unwrap().ino();
        crash(first);
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
        let second = Listener::bind(&path, 0o600).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(second);
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::NoSocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn socket_of_another_service_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let old = Listener::bind(&path, 0o666).unwrap();
        fs::remove_file(&path).unwrap();
        let _new = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(old);
        assert!(path.exists());
    }

    #[test]
    fn last_of_several_concurrent_starts_has_the_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        for _ in 0..20 {
            // Simulates a crash: the path remains without a listener.
            crash(Listener::bind(&path, 0o666).unwrap());
            let barrier = std::sync::Barrier::new(8);
            let serving: Vec<_> = std::thread::scope(|scope| {
                let start = || {
                    barrier.wait();
                    Listener::bind(&path, 0o666).unwrap()
                };
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let file = fs::symlink_metadata(&path).unwrap();
            let named = serving.iter().filter(|one| one.file == (file.dev(), file.ino())).count();
            assert_eq!(named, 1, "at the name is the socket of one of them");
            assert!(answers(&path).unwrap());
        }
    }

    #[test]
    fn lock_that_is_held_for_long_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        drop(Listener::bind(&path, 0o666).unwrap());
        // As root in a pod could through a read-only mount.
        let held = File::open(dir.path().join("agent.sock.lock")).unwrap();
        held.lock_shared().unwrap();
        let limit = Duration::from_millis(100);
        let _listener = Listener::bind_ignoring_lock_after(limit, &path, 0o666).unwrap();
        assert!(answers(&path).unwrap());
        drop(held);
    }

    /// Drops a listener without removing its path.
    fn crash(mut listener: Listener) {
        listener.file = (0, 0);
    }
}
