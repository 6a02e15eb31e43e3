//! UDP datagrams between nodes, on the sockets of the standard library.

use std::io::{self, IoSlice};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

use nix::sys::socket::{MsgFlags, recv, sendmsg, setsockopt, sockopt};

/// Requests a receive buffer of `bytes` from the kernel, which grants up to `net.core.rmem_max`, and all of it to a
/// process with `CAP_NET_ADMIN`.
pub fn set_receive_buffer(socket: &UdpSocket, bytes: usize) {
    let _ = setsockopt(socket, sockopt::RcvBuf, &bytes);
    let _ = setsockopt(socket, sockopt::RcvBufForce, &bytes);
}

/// Receives one datagram from the connected peer without waiting.
///
/// # Errors
/// `WouldBlock`: there is none; `ConnectionRefused`: an earlier datagram had no receiver; `Interrupted`.
pub fn receive_now(socket: &UdpSocket, datagram: &mut [u8]) -> io::Result<usize> {
    Ok(recv(socket.as_raw_fd(), datagram, MsgFlags::MSG_DONTWAIT)?)
}

/// Sends the parts as one datagram to the connected peer.
///
/// # Errors
/// `ConnectionRefused`: an earlier datagram had no receiver; `Interrupted`; other errors of `sendmsg(2)`.
pub fn send_parts(socket: &UdpSocket, parts: &[IoSlice<'_>]) -> io::Result<()> {
    sendmsg::<()>(socket.as_raw_fd(), parts, &[], MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}
