//! `SOCK_SEQPACKET` sockets in the IPC directory, and passing descriptors over them. All ancillary data is handled
//! here.
//!
//! ```
//! use shmesh_sys::socket;
//! # let dir = tempfile::tempdir()?;
//! let listener = socket::listen_on(&dir.path().join("link.broker"), 0o600)?;
//! let client = socket::connect_to(&dir.path().join("link.broker"))?;
//! let server = socket::accept(&listener)?;
//! socket::send(&client, b"take this", &[std::os::fd::AsFd::as_fd(&listener)])?;
//! let (bytes, fds) = socket::receive(&server)?;
//! assert_eq!((&bytes[..], fds.len()), (&b"take this"[..], 1));
//! # Ok::<(), std::io::Error>(())
//! ```

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, accept4, bind,
    connect, listen, recv, sendmsg, setsockopt, shutdown, socket, socketpair, sockopt,
};
use nix::sys::time::TimeVal;
use shmesh_proto::limits::{MAX_FDS, MAX_PACKET_BYTES};

/// Time limit for connecting, and by default for sending and receiving.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// Maximum number of descriptors that the kernel allows in one packet (`SCM_MAX_FD`). Each receive has room for all of
/// them. Otherwise the kernel would close the excess in our thread, which can take any time.
pub const MAX_RECEIVED_FDS: usize = 253;
/// Size of the buffer for those descriptors and the sender.
const CONTROL_WORDS: usize = (MAX_RECEIVED_FDS * size_of::<RawFd>()).div_ceil(8) + 16;
/// Backlog of a listener.
const BACKLOG: i32 = 64;
/// Backlog of a listener of NVIPC, the same as its own.
const STREAM_BACKLOG: i32 = 20;
/// Available since Linux 6.5; libc does not define it yet.
const SCM_PIDFD: i32 = 4;
/// Time limit for repeating a call that signals interrupt.
const INTERRUPTED_LIMIT: Duration = Duration::from_secs(1);

fn unix_socket(kind: SockType, flags: SockFlag) -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC | flags, None)?)
}

/// Listens on `path`, which must not exist, with file mode `mode`.
///
/// # Errors
/// The path exists or is longer than 107 bytes, or the directory cannot be written.
pub fn listen_on(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    listening(unix_socket(SockType::SeqPacket, SockFlag::empty())?, path, mode, BACKLOG)
}

/// As [`listen_on`], for a non-blocking listener with this backlog.
///
/// # Errors
/// As [`listen_on`].
pub fn listen_nonblocking(path: &Path, mode: u32, backlog: i32) -> io::Result<OwnedFd> {
    listening(unix_socket(SockType::SeqPacket, SockFlag::SOCK_NONBLOCK)?, path, mode, backlog)
}

/// As [`listen_on`], for a stream socket.
///
/// # Errors
/// As [`listen_on`].
pub fn listen_stream(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    listening(unix_socket(SockType::Stream, SockFlag::empty())?, path, mode, STREAM_BACKLOG)
}

/// Listens on an abstract address of this network namespace, which has no file and vanishes with its socket.
///
/// # Errors
/// The address is taken, or longer than 107 bytes.
pub fn listen_abstract(address: &str) -> io::Result<OwnedFd> {
    let fd = unix_socket(SockType::SeqPacket, SockFlag::empty())?;
    bind(fd.as_raw_fd(), &UnixAddr::new_abstract(address.as_bytes())?)?;
    listen(&fd, Backlog::new(BACKLOG)?)?;
    Ok(fd)
}

/// Creates two connected packet sockets.
///
/// # Errors
/// No descriptors are left.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}

/// As [`listen_on`], and each packet of each connection has its sender, even packets that are sent immediately: a
/// connection inherits the option from its listener. [`ask_for_senders`] on an accepted connection is too late for
/// them.
///
/// # Errors
/// As [`listen_on`].
pub fn listen_for_senders(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    let fd = unix_socket(SockType::SeqPacket, SockFlag::empty())?;
    ask_for_senders(&fd, true)?;
    listening(fd, path, mode, BACKLOG)
}

fn listening(fd: OwnedFd, path: &Path, mode: u32, backlog: i32) -> io::Result<OwnedFd> {
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode))?;
    listen(&fd, Backlog::new(backlog)?)?;
    Ok(fd)
}

/// Accepts the next connection. Waits for it, unless the listener is non-blocking.
///
/// # Errors
/// The error of `accept4(2)`.
pub fn accept(listener: &impl AsFd) -> io::Result<OwnedFd> {
    let fd = uninterrupted(|| Ok(accept4(listener.as_fd().as_raw_fd(), SockFlag::SOCK_CLOEXEC)?))?;
    Ok(own(fd))
}

/// Accepts the next connection, which is non-blocking.
///
/// # Errors
/// `WouldBlock` for a non-blocking listener without a connection; `Interrupted`; other errors of `accept4(2)`.
pub fn accept_nonblocking(listener: &impl AsFd) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    Ok(own(accept4(listener.as_fd().as_raw_fd(), flags)?))
}

/// Connects to a socket at `path`.
///
/// # Errors
/// The error of `connect(2)`: the file does not exist, has no listener, or is another type of socket.
pub fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let fd = unix_socket(SockType::SeqPacket, SockFlag::empty())?;
    // A stopped process accepts no connection, and a full backlog would block this thread forever.
    limit_wait(&fd, CONNECT_LIMIT)?;
    let address = UnixAddr::new(path)?;
    uninterrupted(|| Ok(connect(fd.as_raw_fd(), &address)?))?;
    Ok(fd)
}

/// As [`connect_to`], over a stream socket. `limit` is the time limit of connecting and of each send and receive.
///
/// # Errors
/// As [`connect_to`].
pub fn connect_stream(path: &Path, limit: Duration) -> io::Result<OwnedFd> {
    let fd = unix_socket(SockType::Stream, SockFlag::empty())?;
    limit_wait(&fd, limit)?;
    connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd)
}

/// As [`connect_to`], to an abstract address, with a time limit.
///
/// # Errors
/// As [`connect_to`].
pub fn connect_abstract(address: &str, limit: Duration) -> io::Result<OwnedFd> {
    let fd = unix_socket(SockType::SeqPacket, SockFlag::empty())?;
    limit_wait(&fd, limit)?;
    connect(fd.as_raw_fd(), &UnixAddr::new_abstract(address.as_bytes())?)?;
    Ok(fd)
}

/// Whether a process has a stream or packet socket at `path`, without connecting to it: a socket of another type cannot
/// connect, but the error shows whether there is one.
///
/// # Errors
/// Other errors of `connect(2)`: no permission, or the file is not a socket.
pub fn is_bound(path: &Path) -> io::Result<bool> {
    let probe = unix_socket(SockType::Datagram, SockFlag::empty())?;
    match connect(probe.as_raw_fd(), &UnixAddr::new(path)?) {
        Err(Errno::ENOENT | Errno::ECONNREFUSED) => Ok(false),
        Ok(()) | Err(Errno::EPROTOTYPE) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether a process listens on the packet socket at `path`.
///
/// # Errors
/// The path does not exist, or this user has no permission.
pub fn answers(path: &Path) -> io::Result<bool> {
    match connect_now(path) {
        Ok(_) => Ok(true),
        Err(error) => match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ECONNREFUSED) => Ok(false),
            // The backlog is full; another socket type, but live. Either way the path is in use.
            Some(Errno::EAGAIN | Errno::EPROTOTYPE) => Ok(true),
            _ => Err(error),
        },
    }
}

/// The process that made a connection, as reported by the kernel.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh_sys::socket::{self, Peer};
/// let listener = socket::listen_on(&path, 0o600)?;
/// let client = socket::connect_to(&path)?;
/// let Peer { pid, .. } = socket::peer(&socket::accept(&listener)?)?;
/// assert_eq!(pid, std::process::id());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Peer {
    /// Process id in this pid namespace; 0 if it has none there.
    pub pid: u32,
    /// User id in this user namespace.
    pub uid: u32,
    /// The effective group id.
    pub gid: u32,
}

/// The process that made the connection.
///
/// # Errors
/// `fd` is not a unix socket.
pub fn peer(fd: &impl AsFd) -> io::Result<Peer> {
    let peer = nix::sys::socket::getsockopt(&fd.as_fd(), sockopt::PeerCredentials)?;
    Ok(Peer { pid: u32::try_from(peer.pid()).unwrap_or(0), uid: peer.uid(), gid: peer.gid() })
}

/// The supplementary groups of the process that made the connection, at that time.
///
/// # Errors
/// `fd` is not a unix socket; more than 1024 groups (`ERANGE`).
#[expect(unsafe_code, reason = "nix has no SO_PEERGROUPS")]
pub fn peer_groups(fd: &impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; 1024];
    let mut len = libc::socklen_t::try_from(size_of_val(&groups[..])).unwrap_or_default();
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes to a buffer of that size, and `len`; both live until the call
    // returns.
    let result = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, groups.as_mut_ptr().cast(), &raw mut len)
    };
    Errno::result(result)?;
    groups.truncate(usize::try_from(len).unwrap_or(0) / size_of::<u32>());
    Ok(groups)
}

/// A pidfd of the process that made the connection, readable when it has ended. Since Linux 6.5.
///
/// # Errors
/// An older kernel (`ENOPROTOOPT`), a process that has been reaped (`ESRCH` or `EINVAL`), or not a unix socket.
pub fn peer_pidfd(fd: &impl AsFd) -> io::Result<OwnedFd> {
    Ok(nix::sys::socket::getsockopt(&fd.as_fd(), sockopt::PeerPidfd)?)
}

/// As [`connect_to`], without waiting; the connection is non-blocking.
///
/// # Errors
/// As [`connect_to`]; `WouldBlock` if the backlog is full.
pub fn connect_now(path: &Path) -> io::Result<OwnedFd> {
    let fd = unix_socket(SockType::SeqPacket, SockFlag::SOCK_NONBLOCK)?;
    connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd)
}

/// Sets the time limit of receiving and sending.
///
/// # Errors
/// `fd` is not a socket.
pub fn limit_wait(fd: &impl AsFd, limit: Duration) -> io::Result<()> {
    let fd = &fd.as_fd();
    let limit = TimeVal::new(limit.as_secs().cast_signed(), i64::from(limit.subsec_micros()));
    setsockopt(fd, sockopt::ReceiveTimeout, &limit)?;
    setsockopt(fd, sockopt::SendTimeout, &limit)?;
    Ok(())
}

/// Sends one packet with descriptors.
///
/// # Errors
/// The other end is closed (`EPIPE`), or its queue is full and `fd` is non-blocking (`EAGAIN`).
pub fn send(fd: &impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    uninterrupted(|| send_once(fd, bytes, fds, MsgFlags::empty()))
}

/// As [`send`], without waiting.
///
/// # Errors
/// As [`send`]; `WouldBlock`; `Interrupted`.
pub fn send_now(fd: &impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_once(fd, bytes, fds, MsgFlags::MSG_DONTWAIT)
}

fn send_once(fd: &impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: MsgFlags) -> io::Result<()> {
    let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[_] = if raw.is_empty() { &[] } else { &rights };
    let flags = flags | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<UnixAddr>(fd.as_fd().as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None)?;
    Ok(())
}

/// Repeats a call that a signal handler of the application interrupted before it did anything. A wait with a limit
/// starts over each time, so there is a limit for all of them together.
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

/// Receives one packet; an empty one means that the other end is closed. Descriptors are owned before anything can
/// fail.
///
/// # Errors
/// `InvalidData`: more bytes or descriptors than the protocol allows; `EMFILE`: this process had no numbers left for
/// its descriptors, and the received ones are closed; `WouldBlock`.
pub fn receive(fd: &impl AsFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    receive_from(fd).map(|packet| (packet.bytes, packet.fds))
}

/// A received packet with its sender.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh_sys::socket;
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
    /// The bytes of the packet; empty if the other end is closed.
    pub bytes: Vec<u8>,
    /// The descriptors of the packet.
    pub fds: Vec<OwnedFd>,
    /// The process id of the sender in this pid namespace; 0 if it has none there, or was not requested.
    pub sender_pid: u32,
    /// A pidfd of the sender, since Linux 6.5; `None` also if no descriptor was free for it.
    pub sender_pidfd: Option<OwnedFd>,
    /// Whether the packet had more bytes than the protocol allows; the rest is lost.
    pub bytes_cut: bool,
    /// Whether the packet had more descriptors than this process had numbers for; the rest is closed.
    pub fds_cut: bool,
}

/// Makes the kernel report the sender of each packet, because a connection may have been passed on since it was made.
/// Connections inherit the option from their listener. `by_pidfd` requests a pidfd too, if the kernel supports that.
///
/// # Errors
/// `fd` is not a unix socket.
pub fn ask_for_senders(fd: &impl AsFd, by_pidfd: bool) -> io::Result<()> {
    setsockopt(&fd.as_fd(), sockopt::PassCred, &true)?;
    match set_pass_pidfd(fd.as_fd(), by_pidfd) {
        // Linux before 6.5.
        Err(Errno::ENOPROTOOPT) => Ok(()),
        done => Ok(done?),
    }
}

#[expect(unsafe_code, reason = "nix has no SO_PASSPIDFD")]
fn set_pass_pidfd(fd: BorrowedFd<'_>, on: bool) -> nix::Result<()> {
    let on = i32::from(on);
    let len = libc::socklen_t::try_from(size_of::<i32>()).unwrap_or_default();
    // SAFETY: the kernel reads `len` bytes of a number that lives until the call returns.
    let result = unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PASSPIDFD, (&raw const on).cast(), len)
    };
    Errno::result(result).map(drop)
}

/// As [`receive`], with the sender, if [`ask_for_senders`] was called before.
///
/// # Errors
/// As [`receive`].
pub fn receive_from(fd: &impl AsFd) -> io::Result<Packet> {
    let (packet, is_whole) = receive_all(fd)?;
    is_whole.map(|()| packet)
}

/// As [`receive_from`], but returns the descriptors of invalid packets too: closing descriptors of an untrusted peer
/// can take any time, and must not be done in a thread that others wait for.
///
/// # Errors
/// `WouldBlock`, and other errors of `recvmsg(2)`; in the second result `InvalidData` and `EMFILE` as for [`receive`].
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("link.broker");
/// use shmesh_sys::socket;
/// use std::os::fd::AsFd;
/// let listener = socket::listen_on(&path, 0o600)?;
/// let client = socket::connect_to(&path)?;
/// socket::send(&client, b"hello", &[client.as_fd(); 100])?;
/// let (packet, is_whole) = socket::receive_all(&socket::accept(&listener)?)?;
/// assert_eq!((packet.fds.len(), is_whole.is_ok()), (100, false));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn receive_all(fd: &impl AsFd) -> io::Result<(Packet, io::Result<()>)> {
    let packet = uninterrupted(|| receive_once(fd, 0))?;
    let is_whole = if packet.bytes_cut || packet.fds.len() > MAX_FDS {
        Err(io::Error::new(io::ErrorKind::InvalidData, "a packet longer than any of this protocol"))
    } else if packet.fds_cut {
        // The buffer has room for the maximum number, so descriptors were lost because this process has no free
        // numbers.
        Err(io::Error::from_raw_os_error(libc::EMFILE))
    } else {
        Ok(())
    };
    Ok((packet, is_whole))
}

/// Receives one packet without waiting and without checks, with any number of descriptors.
///
/// # Errors
/// `WouldBlock`; other errors of `recvmsg(2)`.
pub fn receive_now(fd: &impl AsFd) -> io::Result<Packet> {
    loop {
        match receive_once(fd, libc::MSG_DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

fn receive_once(fd: &impl AsFd, flags: i32) -> io::Result<Packet> {
    let mut bytes = vec![0; MAX_PACKET_BYTES];
    let RawPacket { len, flags, fds, sender_pid, sender_pidfd } = receive_into(fd, &mut bytes, flags)?;
    bytes.truncate(len);
    let (bytes_cut, fds_cut) = (flags & libc::MSG_TRUNC != 0, flags & libc::MSG_CTRUNC != 0);
    Ok(Packet { bytes, fds, sender_pid, sender_pidfd, bytes_cut, fds_cut })
}

/// Receives the next bytes of a stream with their descriptors; 0 bytes mean that the other end is closed.
///
/// # Errors
/// `WouldBlock` after the time limit of the connection; other errors of `recvmsg(2)`.
pub fn receive_part(fd: &impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    receive_into(fd, bytes, 0).map(|received| (received.len, received.fds))
}

/// Receives one byte without waiting. `None` if there is none.
///
/// # Errors
/// `UnexpectedEof`: the other end is closed.
pub fn receive_byte(fd: &impl AsFd) -> io::Result<Option<u8>> {
    let mut byte = [0];
    match recv(fd.as_fd().as_raw_fd(), &mut byte, MsgFlags::MSG_DONTWAIT) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => Ok(Some(byte[0])),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether there is a packet, or the other end is closed. The packet and its descriptors stay in the queue.
///
/// # Errors
/// `WouldBlock` if neither; other errors of `recv(2)`.
pub fn has_packet(fd: &impl AsFd) -> io::Result<()> {
    recv(fd.as_fd().as_raw_fd(), &mut [0], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT)?;
    Ok(())
}

/// A closed connection with packets in its queue. Dropping it may take any time, because the queue may contain a
/// descriptor whose close blocks: drop it in a thread that may block. It is emptied before it is closed; otherwise the
/// other end would get a reset instead of the last packets.
#[derive(Debug)]
pub struct Unread(Option<OwnedFd>);

impl Unread {
    /// The connection, with the packets in its queue.
    pub(crate) fn into_connection(mut self) -> Option<OwnedFd> {
        self.0.take()
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let Some(connection) = &self.0 else { return };
        while is_unread(connection) && receive_all(connection).is_ok() {}
    }
}

/// Shuts down a connection for all processes that have it, before its last descriptor is closed.
pub fn shut(connection: &impl AsFd) {
    let _ = shutdown(connection.as_fd().as_raw_fd(), Shutdown::Both);
}

/// Shuts down a connection. It is closed if its queue is empty; otherwise it is returned, to be dropped in a thread
/// that may block.
#[must_use = "closing it may block"]
pub fn hang_up(connection: OwnedFd) -> Option<Unread> {
    // No further packets are received from now on.
    let _ = shutdown(connection.as_raw_fd(), Shutdown::Read);
    // From now on every packet has its sender, which distinguishes an empty packet from the end.
    let _ = setsockopt(&connection, sockopt::PassCred, &true);
    if !is_unread(&connection) {
        return None;
    }
    // The other end need not wait for the close.
    let _ = shutdown(connection.as_raw_fd(), Shutdown::Write);
    Some(Unread(Some(connection)))
}

/// Whether there is a packet. The call has no room for control messages, so none is taken, and the kernel reports that
/// something was left out: with an empty packet at least its sender, at the end nothing.
fn is_unread(connection: &OwnedFd) -> bool {
    peek(connection).is_ok_and(|(len, flags)| len > 0 || flags & libc::MSG_CTRUNC != 0)
}

#[expect(unsafe_code, reason = "nix reserves room for control messages only by their type")]
fn peek(fd: &OwnedFd) -> io::Result<(usize, i32)> {
    let mut byte = 0_u8;
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: all zeroes are a message header: no name, no buffers.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    // SAFETY: one part of one byte, which lives until the call returns.
    let len = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
    let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
    Ok((len, message.msg_flags))
}

/// The result of one receiving call.
#[derive(Default)]
struct RawPacket {
    len: usize,
    flags: i32,
    fds: Vec<OwnedFd>,
    sender_pid: u32,
    sender_pidfd: Option<OwnedFd>,
}

/// Receives one packet, including the descriptors of a truncated one. nix hides these, so that they would never be
/// closed.
#[expect(unsafe_code, reason = "nix does not tell of descriptors that came with a packet that was cut off")]
fn receive_into(fd: &impl AsFd, bytes: &mut [u8], flags: i32) -> io::Result<RawPacket> {
    let mut space = [0_u64; CONTROL_WORDS];
    let mut packet = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all zeroes are a message header: no name, no buffers.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut packet;
    message.msg_iovlen = 1;
    message.msg_control = space.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&space) as _;
    // SAFETY: both buffers live until the end of this function, and the lengths are theirs.
    let len =
        unsafe { libc::recvmsg(fd.as_fd().as_raw_fd(), &raw mut message, flags | libc::MSG_CMSG_CLOEXEC) };
    let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
    let mut received = RawPacket { len, flags: message.msg_flags, ..RawPacket::default() };
    // SAFETY: the kernel has filled `message`, and its control buffer is aligned for the headers in it.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: `next` is null, or a header that the kernel has written into the control buffer.
    while let Some(header) = unsafe { next.as_ref() } {
        // SAFETY: computes the offset of the data in a control message.
        let start = unsafe { libc::CMSG_LEN(0) } as usize;
        #[allow(clippy::unnecessary_cast, reason = "it has 32 bits in musl")]
        let len = (header.cmsg_len as usize).saturating_sub(start);
        // SAFETY: the data follow their header.
        let data = unsafe { libc::CMSG_DATA(next) };
        // SAFETY: this many whole numbers follow the header, all of which the kernel has written.
        let numbers =
            (0..len / size_of::<RawFd>()).map(|i| unsafe { data.cast::<RawFd>().add(i).read_unaligned() });
        match (header.cmsg_level, header.cmsg_type) {
            // Each number is read once, and owned from here on.
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => received.fds.extend(numbers.map(own)),
            // A number below 0 is an error number: no descriptor was left.
            (libc::SOL_SOCKET, SCM_PIDFD) => {
                received.sender_pidfd = numbers.take(1).find(|raw| *raw >= 0).map(own);
            }
            // The first field of `ucred` is the pid.
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                received.sender_pid = numbers.take(1).find_map(|pid| u32::try_from(pid).ok()).unwrap_or(0);
            }
            _ => {}
        }
        // SAFETY: as for the first one.
        next = unsafe { libc::CMSG_NXTHDR(&raw const message, next) };
    }
    Ok(received)
}

#[expect(unsafe_code, reason = "nix hands out raw descriptors here")]
fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us, and it has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    fn send_with(fd: &OwnedFd, bytes: &[u8], count: usize) {
        send(fd, bytes, &vec![fd.as_fd(); count]).unwrap();
    }

    #[test]
    fn maximum_number_of_descriptors_is_received() {
        let (ours, theirs) = pair().unwrap();
        for count in [1, 2, MAX_RECEIVED_FDS] {
            send_with(&theirs, b"x", count);
            let received = receive_now(&ours).unwrap();
            assert_eq!((received.fds.len(), received.fds_cut, received.bytes_cut), (count, false, false));
            for fd in &received.fds {
                let flags = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_GETFD).unwrap();
                assert_eq!(flags, libc::FD_CLOEXEC);
            }
        }
        assert_eq!(receive_now(&ours).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn truncated_packets_are_reported() {
        let (ours, theirs) = pair().unwrap();
        send_with(&theirs, &[7; MAX_PACKET_BYTES], 1);
        send_with(&theirs, &[7; MAX_PACKET_BYTES + 1], 1);
        assert!(!receive_now(&ours).unwrap().bytes_cut);
        let cut = receive_now(&ours).unwrap();
        assert!(cut.bytes_cut);
        assert_eq!((cut.bytes.len(), cut.fds.len()), (MAX_PACKET_BYTES, 1));
        // The descriptor that came along is a copy of the other end. A child that another test starts has copies for a moment, too.
        drop((theirs, cut));
        assert!(receive(&ours).unwrap().0.is_empty());
    }

    #[test]
    fn hang_up_leaves_descriptors_queued() {
        // Behind an empty packet that says nothing there is one with a descriptor.
        let (ours, theirs) = pair().unwrap();
        send(&theirs, b"", &[]).unwrap();
        let (reader, writer) = io::pipe().unwrap();
        send(&theirs, b"x", &[writer.as_fd()]).unwrap();
        drop(writer);
        let unread = hang_up(ours).expect("two packets wait");
        // The pipe hangs up when the last copy of its writer is closed.
        let hung_up =
            |deadline| crate::poll::wait(&mut [crate::poll::Watch::hung_up(&reader)], deadline).unwrap();
        assert_eq!(hung_up(Some(Instant::now())), 0, "it waits in the queue still");
        drop(unread);
        assert_eq!(hung_up(None), 1);
    }
}
