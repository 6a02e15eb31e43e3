//! Descriptors in the event loop, and those of processes.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use tokio::io::unix::AsyncFd;

/// Gives a descriptor to the event loop.
///
/// # Errors
/// The kernel cannot watch it: a plain file, or no memory left.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// use shmesh_daemon::descriptor::watched;
/// let (end, other) = std::os::unix::net::UnixStream::pair()?;
/// let end = watched(end.into())?;
/// drop(other);
/// end.readable().await?.retain_ready(); // closed
/// # Ok(())
/// # }
/// ```
#[expect(unsafe_code, reason = "tokio wants to be promised that the number stays this descriptor's")]
pub fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same open descriptor as long as it lives, and `AsyncFd` owns it from here on.
    unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)
}

/// `pidfd_open`, Linux 5.3.
///
/// # Errors
/// There is no such process; of a thread that does not lead its process this fails, too.
///
/// ```
/// use shmesh_daemon::descriptor::pidfd_open;
/// let me = i32::try_from(std::process::id())?;
/// assert!(pidfd_open(me).is_ok() && pidfd_open(-1).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[expect(unsafe_code, reason = "nix has no call for it")]
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: two numbers go in and a number comes out.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
