//! `SOCK_SEQPACKET` sockets in the IPC directory, and descriptors over them. All ancillary-data arithmetic is here.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    accept4, bind, connect, listen, recvmsg, sendmsg, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use shmesh_proto::limits::{MAX_FDS, MAX_PACKET_BYTES};

/// How long a call is repeated that signals interrupt.
const INTERRUPTED_LIMIT: Duration = Duration::from_secs(1);

fn unix_socket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?)
}

/// Listens on `path`, which must not exist.
pub(crate) fn listen_on(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    let fd = unix_socket()?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    listen(&fd, Backlog::new(64)?)?;
    Ok(fd)
}

/// The next connection; waits for it.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    let fd = uninterrupted(|| Ok(accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?))?;
    Ok(own(fd))
}

/// Connects to `path`.
pub(crate) fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let fd = unix_socket()?;
    let address = UnixAddr::new(path)?;
    uninterrupted(|| Ok(connect(fd.as_raw_fd(), &address)?))?;
    Ok(fd)
}

/// The user at the other end, as the kernel says.
pub(crate) fn peer_uid(fd: &OwnedFd) -> io::Result<u32> {
    Ok(nix::sys::socket::getsockopt(fd, sockopt::PeerCredentials)?.uid())
}

/// Makes receiving and sending give up after `limit`.
pub(crate) fn limit_wait(fd: &OwnedFd, limit: Duration) -> io::Result<()> {
    let limit = TimeVal::new(limit.as_secs().cast_signed(), i64::from(limit.subsec_micros()));
    setsockopt(fd, sockopt::ReceiveTimeout, &limit)?;
    setsockopt(fd, sockopt::SendTimeout, &limit)?;
    Ok(())
}

/// Sends one packet with descriptors.
pub(crate) fn send(fd: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[_] = if raw.is_empty() { &[] } else { &rights };
    let packet = [IoSlice::new(bytes)];
    uninterrupted(|| {
        Ok(sendmsg::<UnixAddr>(fd.as_raw_fd(), &packet, control, MsgFlags::MSG_NOSIGNAL, None)?)
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

/// Receives one packet; an empty one means that the other end is closed.
pub(crate) fn receive(fd: &OwnedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    uninterrupted(|| receive_once(fd))
}

fn receive_once(fd: &OwnedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MAX_PACKET_BYTES];
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; MAX_FDS]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let message =
        recvmsg::<UnixAddr>(fd.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    // Owned before anything can fail.
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            fds.extend(raw.into_iter().map(own));
        }
    }
    if message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet longer than any of this protocol"));
    }
    let len = message.bytes;
    bytes.truncate(len);
    Ok((bytes, fds))
}

#[expect(unsafe_code, reason = "nix hands out raw descriptors here")]
fn own(fd: std::os::fd::RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
