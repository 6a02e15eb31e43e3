//! Descriptors in the event loop.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

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

/// A pidfd of a process by its number.
#[expect(unsafe_code, reason = "nix has no call for it")]
pub(crate) fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: two numbers go in and a number comes out.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
