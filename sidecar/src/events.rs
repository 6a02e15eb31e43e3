//! Descriptors in the event loop.

use std::io;
use std::os::fd::OwnedFd;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use tokio::io::unix::AsyncFd;

/// Gives a descriptor to the event loop, which never blocks on it.
#[expect(unsafe_code, reason = "tokio wants to be promised that the number stays this descriptor's")]
pub(crate) fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same open descriptor as long as it lives, and `AsyncFd` owns it from here on.
    unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)
}

/// Makes reads and writes of it return at once.
pub(crate) fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}
