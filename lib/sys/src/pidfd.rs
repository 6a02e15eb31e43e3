//! Pidfds of processes by descriptor, socket or process id, with calls that the other process cannot block.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{AddressFamily, SockType, getsockopt, sockopt};
pub use shmesh_proto::identity::Unknown;

use crate::{poll, procfs};

/// The method of getting the peer of a socket from the kernel.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum PeerPidfd {
    /// `SO_PEERPIDFD`, or `SO_PEERCRED` if the kernel does not have it.
    #[default]
    Newest,
    /// `SO_PEERCRED` only, as before Linux 6.5, for tests.
    Old,
}

/// A process, identified by its pidfd.
///
/// ```
/// use shmesh_sys::pidfd::Pidfd;
/// let me = Pidfd::of_number(std::process::id().cast_signed()).expect("it lives");
/// assert!(!me.has_ended()?);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Pidfd {
    fd: OwnedFd,
    /// The user from `SO_PEERCRED`, if the pidfd was opened by process id.
    pub(crate) must_be_user: Option<u32>,
    by_number: bool,
}

impl Pidfd {
    /// Wraps `fd`, if it is the pidfd of a process.
    ///
    /// # Errors
    /// The descriptor is not a pidfd of a process; it is returned with the reason.
    pub fn given(fd: OwnedFd) -> Result<Self, (OwnedFd, Unknown)> {
        match check(fd.as_fd()) {
            Ok(()) => Ok(Self { fd, must_be_user: None, by_number: false }),
            Err(unknown) => Err((fd, unknown)),
        }
    }

    /// Opens a pidfd of the process that connected to this accepted socket.
    ///
    /// # Errors
    /// [`Unknown::BadDescriptor`]: not an accepted unix socket; [`Unknown::Gone`]; [`Unknown::OutOfSight`]: before
    /// Linux 6.5, in another pid namespace; [`Unknown::Unavailable`].
    ///
    /// ```
    /// use std::os::fd::AsFd;
    /// use shmesh_sys::pidfd::{PeerPidfd, Pidfd};
    /// let (one, _other) = std::os::unix::net::UnixStream::pair()?;
    /// assert!(Pidfd::of_peer(one.as_fd(), PeerPidfd::Newest).is_ok());
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn of_peer(socket: BorrowedFd<'_>, how: PeerPidfd) -> Result<Self, Unknown> {
        let user = connector(socket)?;
        if how == PeerPidfd::Newest {
            match getsockopt(&socket, sockopt::PeerPidfd) {
                Ok(fd) => return Ok(Self { fd, must_be_user: None, by_number: false }),
                // Linux before 6.5.
                Err(Errno::ENOPROTOOPT) => {}
                // The process was reaped; the error depends on the kernel version.
                Err(Errno::ESRCH | Errno::EINVAL) => return Err(Unknown::Gone),
                Err(Errno::ENODATA) => return Err(Unknown::BadDescriptor),
                Err(_) => return Err(Unknown::Unavailable),
            }
        }
        if user.pid == 0 {
            return Err(Unknown::OutOfSight);
        }
        Ok(Self { must_be_user: Some(user.uid), ..Self::of_number(user.pid)? })
    }

    /// Opens a pidfd of the process that has this id now. The id of a thread is refused.
    ///
    /// # Errors
    /// [`Unknown::Gone`]: no process has the id; [`Unknown::Unavailable`].
    pub fn of_number(pid: i32) -> Result<Self, Unknown> {
        let fd = open(pid).map_err(|error| match error {
            // The second and third error mean that the id belongs to a thread.
            Errno::ESRCH | Errno::EINVAL | Errno::ENOENT => Unknown::Gone,
            _ => Unknown::Unavailable,
        })?;
        Ok(Self { fd, must_be_user: None, by_number: true })
    }

    /// Whether it was opened by process id: then it refers to the process that has the id now, which may differ from
    /// the one that connected.
    #[must_use]
    pub fn is_by_number(&self) -> bool {
        self.by_number
    }

    /// The process that the pidfd refers to, from `/proc/self/fdinfo`.
    pub(crate) fn says(&self) -> io::Result<procfs::PidfdSays> {
        Ok(procfs::pidfd_says(&procfs::fdinfo(self.fd.as_fd())?))
    }

    /// Whether the process has ended, reaped or not.
    ///
    /// # Errors
    /// No memory is left.
    ///
    /// ```
    /// use shmesh_sys::pidfd::Pidfd;
    /// let mut child = std::process::Command::new("true").spawn()?;
    /// let pidfd = Pidfd::of_number(child.id().cast_signed()).expect("it is not reaped yet");
    /// child.wait()?;
    /// assert!(pidfd.has_ended()?);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn has_ended(&self) -> io::Result<bool> {
        poll::is_readable(self)
    }

    /// The inode of the pidfd, which identifies the process since Linux 6.9; 0 before, because all pidfds share one.
    #[must_use]
    pub fn inode(&self) -> u64 {
        const PIDFS_MAGIC: u64 = 0x5049_4446;
        let is_pidfs = nix::sys::statfs::fstatfs(&self.fd)
            .is_ok_and(|fs| u64::try_from(fs.filesystem_type().0) == Ok(PIDFS_MAGIC));
        let inode = if is_pidfs { nix::sys::stat::fstat(&self.fd).ok() } else { None };
        inode.map_or(0, |stat| stat.st_ino)
    }
}

impl From<Pidfd> for OwnedFd {
    fn from(pidfd: Pidfd) -> Self {
        pidfd.fd
    }
}

impl AsFd for Pidfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Calls `pidfd_open` of Linux 5.3.
#[expect(unsafe_code, reason = "nix has no call for it")]
fn open(pid: i32) -> nix::Result<OwnedFd> {
    // SAFETY: the call takes and returns numbers.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    let fd = i32::try_from(fd).map_err(|_| Errno::EOVERFLOW)?;
    // SAFETY: the kernel has just created this descriptor, and it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Refuses descriptors that are not the pidfd of a whole process.
fn check(fd: BorrowedFd<'_>) -> Result<(), Unknown> {
    // The name of the open file: no path of a file system begins like this, and reading it does not ask a file system.
    let name = nix::fcntl::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()).as_str())
        .map_err(|_| Unknown::Unavailable)?;
    let name = name.to_string_lossy();
    if !(name == "anon_inode:[pidfd]" || name.starts_with("pidfd:[")) {
        return Err(Unknown::BadDescriptor);
    }
    // PIDFD_THREAD, Linux 6.9: the pidfd refers to one thread, and ends with it.
    let flags = fcntl(fd, FcntlArg::F_GETFL).map_err(|_| Unknown::Unavailable)?;
    if flags & OFlag::O_EXCL.bits() != 0 {
        return Err(Unknown::BadDescriptor);
    }
    Ok(())
}

/// The process that connected, from the kernel. Refuses descriptors that are not accepted unix sockets.
fn connector(socket: BorrowedFd<'_>) -> Result<SocketOwner, Unknown> {
    let bad = |_: Errno| Unknown::BadDescriptor;
    let domain: i32 = option(socket, libc::SO_DOMAIN).map_err(bad)?;
    if domain != AddressFamily::Unix as i32 {
        return Err(Unknown::BadDescriptor);
    }
    let kind = getsockopt(&socket, sockopt::SockType).map_err(bad)?;
    // A listening socket names the process that listens.
    let listens = getsockopt(&socket, sockopt::AcceptConn).map_err(bad)?;
    if listens || !matches!(kind, SockType::Stream | SockType::SeqPacket) {
        return Err(Unknown::BadDescriptor);
    }
    let peer = getsockopt(&socket, sockopt::PeerCredentials).map_err(bad)?;
    // The kernel returns this for a socket that was never connected.
    if peer.uid() == u32::MAX {
        return Err(Unknown::BadDescriptor);
    }
    Ok(SocketOwner { pid: peer.pid(), uid: peer.uid() })
}

struct SocketOwner {
    pid: i32,
    uid: u32,
}

#[expect(unsafe_code, reason = "nix has no SO_DOMAIN")]
fn option(socket: BorrowedFd<'_>, name: i32) -> nix::Result<i32> {
    let mut value = 0_i32;
    let mut len = libc::socklen_t::try_from(size_of::<i32>()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: `value` is a number of `len` bytes, which the kernel fills; both live until the call returns.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len)
    };
    Errno::result(result).map(|_| value)
}
