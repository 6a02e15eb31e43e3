//! File descriptors in the event loop.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::{AsyncFd, AsyncFdRegisterError};

/// Registers a file descriptor with the event loop.
///
/// # Errors
/// epoll does not support the file, or there is no memory.
pub fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    try_watched(fd).map_err(|(_, error)| error)
}

/// As [`watched`], but returns a descriptor that cannot be watched, because closing a client's descriptor may block.
///
/// # Errors
/// The kernel cannot watch the descriptor.
#[expect(unsafe_code, reason = "tokio requires that the number keeps naming the same descriptor")]
pub fn try_watched(fd: OwnedFd) -> Result<AsyncFd<OwnedFd>, (OwnedFd, io::Error)> {
    // SAFETY: an `OwnedFd` names the same open descriptor as long as it lives, and `AsyncFd` owns it from here on.
    unsafe { AsyncFd::register(fd) }.map_err(AsyncFdRegisterError::into_parts)
}
