//! Bells: named datagram sockets that only wake up their owner. Each queued byte is one signal.
//!
//! Neither end can make the other wait. A FIFO could: writing to one takes a lock that another writer can hold for any
//! time, by writing from a page of its own file system that is never served.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, bind, connect, getsockname, recv, send, socket,
};

fn datagram_socket() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    Ok(socket(AddressFamily::Unix, SockType::Datagram, flags, None)?)
}

/// The owner's end of a bell: readable while it has signals.
///
/// ```
/// use shmesh_sys::bell::{Bell, Ringer};
/// use shmesh_sys::poll;
/// # let dir = tempfile::tempdir()?;
/// let path = dir.path().join("bell");
/// let bell = Bell::create(&path, 0o600, None)?;
/// Ringer::open(&path)?.ring()?;
/// assert!(poll::is_readable(&bell)?);
/// assert!(bell.take()? && !bell.take()?);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// Creates the bell at `path`, for the users that `mode` lets write. It belongs to `group` if the caller is in that
    /// group. The file stays when the bell is dropped.
    ///
    /// # Errors
    /// The path exists (`AddrInUse`) or is longer than 107 bytes, or the directory cannot be written.
    pub fn create(path: &Path, mode: u32, group: Option<u32>) -> io::Result<Self> {
        let fd = datagram_socket()?;
        bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        // Refused if the group is not mapped in this user namespace: then `mode` alone decides who may ring.
        let _ = std::os::unix::fs::lchown(path, None, group);
        let allowed = std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode));
        if let Err(error) = allowed {
            let _ = std::fs::remove_file(path);
            return Err(error);
        }
        Ok(Self(fd))
    }

    /// Takes one signal. Returns `false` if there is none.
    ///
    /// # Errors
    /// Never fails in normal use.
    pub fn take(&self) -> io::Result<bool> {
        self.take_byte().map(|byte| byte.is_some())
    }

    /// Takes one signal, and returns the byte that was sent with it, which any process may have chosen.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_byte(&self) -> io::Result<Option<u8>> {
        let mut byte = [1];
        match recv(self.0.as_raw_fd(), &mut byte, MsgFlags::MSG_DONTWAIT) {
            Ok(_) => Ok(Some(byte[0])),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The end of a bell that rings it.
#[derive(Debug)]
pub struct Ringer(OwnedFd);

impl Ringer {
    /// Connects to the bell at `path`. For `NotFound`, `ConnectionRefused` and a few other errors, [`is_absent`]
    /// returns true.
    ///
    /// # Errors
    /// There is no bell, this user may not ring it, or no descriptors are left.
    pub fn open(path: &Path) -> io::Result<Self> {
        let fd = datagram_socket()?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(Self(fd))
    }

    /// Makes the bell readable. Never blocks: if the bell's queue is full, this signal is dropped, because others are
    /// pending. `net.unix.max_dgram_qlen` (10 by default) is the length of the queue.
    ///
    /// # Errors
    /// Never fails in normal use; a bell whose owner has ended is not an error.
    pub fn ring(&self) -> io::Result<()> {
        self.ring_with(1)
    }

    /// As [`ring`](Self::ring), with a byte for the owner.
    ///
    /// # Errors
    /// As [`ring`](Self::ring).
    pub fn ring_with(&self, byte: u8) -> io::Result<()> {
        loop {
            match send(self.0.as_raw_fd(), &[byte], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) {
                Err(Errno::EINTR) => {}
                Ok(_)
                | Err(
                    Errno::EAGAIN | Errno::ECONNREFUSED | Errno::ECONNRESET | Errno::ENOTCONN | Errno::EPIPE,
                ) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// Rings the caller's own bell, for events from before the bell existed.
///
/// # Errors
/// As [`Ringer::open`], for example if its name was removed.
///
/// ```
/// use shmesh_sys::bell::{self, Bell};
/// use std::os::fd::AsFd;
/// # let dir = tempfile::tempdir()?;
/// let bell = Bell::create(&dir.path().join("bell"), 0o600, None)?;
/// bell::ring_own(bell.as_fd())?;
/// assert!(bell.take()? && !bell.take()?);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn ring_own(bell: BorrowedFd<'_>) -> io::Result<()> {
    let address: UnixAddr = getsockname(bell.as_raw_fd())?;
    let path = address.path().ok_or(io::ErrorKind::NotFound)?;
    Ringer::open(path)?.ring()
}

/// Whether [`Ringer::open`] failed because there is no bell: its owner has ended, or another file is there.
#[must_use]
pub fn is_absent(error: &io::Error) -> bool {
    matches!(
        Errno::from_raw(error.raw_os_error().unwrap_or(0)),
        Errno::ENOENT | Errno::ECONNREFUSED | Errno::EPROTOTYPE | Errno::ELOOP | Errno::ENOTDIR
    )
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use shmesh_testing::own_process;

    use super::*;
    use crate::poll;

    #[test]
    fn each_ring_is_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        let bell = Bell::create(&path, 0o660, None).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o660, "whatever the umask");
        let ringer = Ringer::open(&path).unwrap();
        assert!(!bell.take().unwrap());
        ringer.ring().unwrap();
        ringer.ring().unwrap();
        assert!(bell.take().unwrap() && poll::is_readable(&bell).unwrap());
        assert!(bell.take().unwrap() && !bell.take().unwrap());
    }

    #[test]
    fn full_bell_does_not_block_and_stays_readable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        let bell = Bell::create(&path, 0o600, None).unwrap();
        let (ringer, other) = (Ringer::open(&path).unwrap(), Ringer::open(&path).unwrap());
        for _ in 0..10_000 {
            other.ring().unwrap();
        }
        ringer.ring().unwrap();
        assert!(bell.take().unwrap());
    }

    #[test]
    fn missing_bells_differ_from_forbidden_ones() {
        // In a process of its own: a child that another test starts has copies of all descriptors for a moment.
        own_process(|| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("bell");
            assert!(is_absent(&Ringer::open(&path).unwrap_err()));
            drop(Bell::create(&path, 0o600, None).unwrap());
            assert!(is_absent(&Ringer::open(&path).unwrap_err()), "its owner has ended");
            assert!(Bell::create(&path, 0o600, None).is_err(), "the name is taken");
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, "").unwrap();
            assert!(is_absent(&Ringer::open(&path).unwrap_err()), "it is not a socket");
            assert!(!is_absent(&io::Error::from_raw_os_error(libc::EACCES)));
            assert!(!is_absent(&io::Error::from_raw_os_error(libc::EMFILE)));
        });
    }

    #[test]
    fn ringing_a_bell_of_a_dead_owner_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        let bell = Bell::create(&path, 0o600, None).unwrap();
        let ringer = Ringer::open(&path).unwrap();
        drop(bell);
        ringer.ring().unwrap();
        ringer.ring().unwrap();
    }
}
