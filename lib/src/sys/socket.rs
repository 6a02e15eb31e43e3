//! `SOCK_SEQPACKET` sockets in the IPC directory, and descriptors over them. All ancillary-data arithmetic is here.
//!
//! ```
//! use shmesh::sys::socket;
//! # let dir = tempfile::tempdir()?;
//! let listener = socket::listen_on(&dir.path().join("link.broker"), 0o600)?;
//! let client = socket::connect_to(&dir.path().join("link.broker"))?;
//! let server = socket::accept(&listener)?;
//! socket::send(&client, b"take this", &[std::os::fd::AsFd::as_fd(&listener)])?;
//! let (bytes, fds) = socket::receive(&server)?;
//! assert_eq!((&bytes[..], fds.len()), (&b"take this"[..], 1));
//! # Ok::<(), std::io::Error>(())
//! ```

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    UnixCredentials, accept4, bind, connect, listen, recvmsg, sendmsg, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use shmesh_proto::limits::{MAX_FDS, MAX_PACKET_BYTES};

/// How long connecting, and until somebody says otherwise sending and receiving, may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// Descriptors that the kernel lets anybody send with one packet.
const SCM_MAX_FD: usize = 253;
/// Linux 6.5; libc does not have it yet.
const SCM_PIDFD: i32 = 4;
/// How long a call is repeated that signals interrupt.
const INTERRUPTED_LIMIT: Duration = Duration::from_secs(1);

fn unix_socket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?)
}

/// Listens on `path`, which must not exist, with the file mode `mode`.
///
/// # Errors
/// Something is there already; the path is longer than 107 bytes; the directory cannot be written.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// let path = dir.path().join("link.broker");
/// let listener = shmesh::sys::socket::listen_on(&path, 0o600)?;
/// assert!(shmesh::sys::socket::listen_on(&path, 0o600).is_err(), "the place is taken");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn listen_on(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    let fd = unix_socket()?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    listen(&fd, Backlog::new(64)?)?;
    Ok(fd)
}

/// The next connection. Waits for it, unless the listener does not block.
///
/// # Errors
/// What `accept4(2)` says.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh::sys::socket;
/// let listener = socket::listen_on(&path, 0o600)?;
/// let client = socket::connect_to(&path)?;
/// let server = socket::accept(&listener)?;
/// assert_eq!(socket::peer(&server)?.pid, std::process::id());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn accept(listener: &impl AsFd) -> io::Result<OwnedFd> {
    let fd = uninterrupted(|| Ok(accept4(listener.as_fd().as_raw_fd(), SockFlag::SOCK_CLOEXEC)?))?;
    Ok(own(fd))
}

/// Connects to `path`.
///
/// # Errors
/// What `connect(2)` says: nobody is there, nobody listens, another kind of socket.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// let nobody = shmesh::sys::socket::connect_to(&dir.path().join("link.broker")).unwrap_err();
/// assert_eq!(nobody.kind(), std::io::ErrorKind::NotFound);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let fd = unix_socket()?;
    // Who is stopped accepts nobody, and a full queue would keep us for ever.
    limit_wait(&fd, CONNECT_LIMIT)?;
    let address = UnixAddr::new(path)?;
    uninterrupted(|| Ok(connect(fd.as_raw_fd(), &address)?))?;
    Ok(fd)
}

/// Who made a connection, as the kernel says.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh::sys::socket::{self, Peer};
/// let listener = socket::listen_on(&path, 0o600)?;
/// let client = socket::connect_to(&path)?;
/// let Peer { pid, .. } = socket::peer(&socket::accept(&listener)?)?;
/// assert_eq!(pid, std::process::id());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Peer {
    /// Process id, as this process's pid namespace numbers it; 0 when it does not.
    pub pid: u32,
    /// User, as this process's user namespace numbers it.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Who made the connection.
///
/// # Errors
/// `fd` is no unix socket.
///
/// ```
/// let file = std::fs::File::open("/dev/null")?;
/// assert!(shmesh::sys::socket::peer(&file).is_err());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn peer(fd: &impl AsFd) -> io::Result<Peer> {
    let peer = nix::sys::socket::getsockopt(&fd.as_fd(), sockopt::PeerCredentials)?;
    Ok(Peer { pid: u32::try_from(peer.pid()).unwrap_or(0), uid: peer.uid(), gid: peer.gid() })
}

/// A pidfd of the process that made the connection: readable when it has ended. Since Linux 6.5.
///
/// # Errors
/// An older kernel (`ENOPROTOOPT`), a process that has been reaped (`ESRCH` or `EINVAL`), or no unix socket.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh::sys::socket;
/// let listener = socket::listen_on(&path, 0o600)?;
/// let client = socket::connect_to(&path)?;
/// let pidfd = socket::peer_pidfd(&socket::accept(&listener)?);
/// assert!(pidfd.is_ok() || pidfd.is_err_and(|error| error.raw_os_error() == Some(92)), "Linux 6.5, or older");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn peer_pidfd(fd: &impl AsFd) -> io::Result<OwnedFd> {
    Ok(nix::sys::socket::getsockopt(&fd.as_fd(), sockopt::PeerPidfd)?)
}

/// As [`connect_to`], and the connection does not block: neither does this.
///
/// # Errors
/// As there; `WouldBlock` when too many wait at the other end.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh::sys::socket;
/// let listener = socket::listen_on(&path, 0o600)?;
/// let client = socket::connect_now(&path)?;
/// assert_eq!(socket::receive(&client).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn connect_now(path: &Path) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd)
}

/// Makes receiving and sending give up after `limit`.
pub(crate) fn limit_wait(fd: &OwnedFd, limit: Duration) -> io::Result<()> {
    let limit = TimeVal::new(limit.as_secs().cast_signed(), i64::from(limit.subsec_micros()));
    setsockopt(fd, sockopt::ReceiveTimeout, &limit)?;
    setsockopt(fd, sockopt::SendTimeout, &limit)?;
    Ok(())
}

/// Sends one packet with descriptors.
///
/// # Errors
/// The other end is closed (`EPIPE`), or its queue is full and `fd` does not block (`EAGAIN`).
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh::sys::socket;
/// let listener = socket::listen_on(&path, 0o600)?;
/// let client = socket::connect_to(&path)?;
/// drop(socket::accept(&listener)?);
/// assert_eq!(socket::send(&client, b"hello", &[]).unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn send(fd: &impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[_] = if raw.is_empty() { &[] } else { &rights };
    let packet = [IoSlice::new(bytes)];
    uninterrupted(|| {
        Ok(sendmsg::<UnixAddr>(fd.as_fd().as_raw_fd(), &packet, control, MsgFlags::MSG_NOSIGNAL, None)?)
    })?;
    Ok(())
}

/// Repeats what a signal handler of the application interrupted: such a call has done nothing. A wait with a limit begins
/// anew each time, so there is a limit to all of them together.
fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let start = Instant::now();
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                if start.elapsed() > INTERRUPTED_LIMIT {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
            }
            done => return done,
        }
    }
}

/// Receives one packet; an empty one means that the other end is closed. Descriptors are owned before anything can fail.
///
/// # Errors
/// `InvalidData`: more bytes or descriptors than any packet of the protocol has; `WouldBlock`.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh::sys::socket;
/// let listener = socket::listen_on(&path, 0o600)?;
/// drop(socket::connect_to(&path)?);
/// let (bytes, fds) = socket::receive(&socket::accept(&listener)?)?;
/// assert!(bytes.is_empty() && fds.is_empty(), "closed");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn receive(fd: &impl AsFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    receive_from(fd).map(|packet| (packet.bytes, packet.fds))
}

/// One packet, and who sent it.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh::sys::socket;
/// let listener = socket::listen_on(&path, 0o600)?;
/// socket::ask_for_senders(&listener, true)?; // what comes through it says who sent it
/// let client = socket::connect_to(&path)?;
/// socket::send(&client, b"hello", &[])?;
/// let packet = socket::receive_from(&socket::accept(&listener)?)?;
/// assert_eq!((&packet.bytes[..], packet.sender_pid), (&b"hello"[..], std::process::id()));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Packet {
    /// What was sent; nothing when the other end is closed.
    pub bytes: Vec<u8>,
    /// The descriptors that came along.
    pub fds: Vec<OwnedFd>,
    /// Who sent it, as this process's pid namespace numbers it; 0 when it does not, or was not asked to say.
    pub sender_pid: u32,
    /// A pidfd of who sent it, since Linux 6.5; `None` also where no descriptor was left for it.
    pub sender_pidfd: Option<OwnedFd>,
}

/// Has the kernel say with each packet which process sent it: the connection says only who made it, and may be another's
/// since. Connections that a listener accepts do as it does. `by_pidfd`: with a pidfd, where the kernel has that.
///
/// # Errors
/// `fd` is no unix socket.
///
/// ```
/// let file = std::fs::File::open("/dev/null")?;
/// assert!(shmesh::sys::socket::ask_for_senders(&file, true).is_err());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn ask_for_senders(fd: &impl AsFd, by_pidfd: bool) -> io::Result<()> {
    setsockopt(&fd.as_fd(), sockopt::PassCred, &true)?;
    match if by_pidfd { set_pass_pidfd(fd.as_fd()) } else { Ok(()) } {
        // Linux before 6.5.
        Err(nix::errno::Errno::ENOPROTOOPT) => Ok(()),
        done => Ok(done?),
    }
}

#[expect(unsafe_code, reason = "nix has no SO_PASSPIDFD")]
fn set_pass_pidfd(fd: BorrowedFd<'_>) -> nix::Result<()> {
    let on = 1_i32;
    let len = libc::socklen_t::try_from(size_of::<i32>()).unwrap_or_default();
    // SAFETY: the kernel reads `len` bytes at the address of a number that lives until the call returns.
    let result = unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PASSPIDFD, (&raw const on).cast(), len)
    };
    nix::errno::Errno::result(result).map(drop)
}

/// As [`receive`], and says who sent it, where [`ask_for_senders`] was said before.
///
/// # Errors
/// As there.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh::sys::socket;
/// let listener = socket::listen_on(&path, 0o600)?;
/// let client = socket::connect_to(&path)?;
/// socket::send(&client, b"hello", &[])?;
/// assert_eq!(socket::receive_from(&socket::accept(&listener)?)?.sender_pid, 0, "nobody has asked");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn receive_from(fd: &impl AsFd) -> io::Result<Packet> {
    uninterrupted(|| receive_once(fd))
}

fn receive_once(fd: &impl AsFd) -> io::Result<Packet> {
    let mut bytes = vec![0; MAX_PACKET_BYTES];
    // For as many as the kernel lets anybody send: where some are cut off, nix does not tell of those that came.
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; SCM_MAX_FD], UnixCredentials, std::os::fd::RawFd);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let message = recvmsg::<UnixAddr>(
        fd.as_fd().as_raw_fd(),
        &mut slices,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    // Owned before anything can fail.
    let (mut fds, mut sender_pid, mut sender_pidfd) = (Vec::new(), 0, None);
    for control in message.cmsgs()? {
        match control {
            ControlMessageOwned::ScmRights(raw) => fds.extend(raw.into_iter().map(own)),
            ControlMessageOwned::ScmCredentials(sender) => {
                sender_pid = u32::try_from(sender.pid()).unwrap_or(0);
            }
            ControlMessageOwned::Unknown(other) => {
                let is_pidfd = (other.cmsg_header.cmsg_level, other.cmsg_header.cmsg_type)
                    == (libc::SOL_SOCKET, SCM_PIDFD);
                let raw = other.data_bytes.first_chunk().copied().map(i32::from_ne_bytes);
                // Below 0 it is an error number: no descriptor was left.
                sender_pidfd = raw.filter(|raw| is_pidfd && *raw >= 0).map(own);
            }
            _ => {}
        }
    }
    if message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) || fds.len() > MAX_FDS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet longer than any of this protocol"));
    }
    let len = message.bytes;
    bytes.truncate(len);
    Ok(Packet { bytes, fds, sender_pid, sender_pidfd })
}

#[expect(unsafe_code, reason = "nix hands out raw descriptors here")]
fn own(fd: std::os::fd::RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
