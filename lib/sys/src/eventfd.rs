//! Eventfds in semaphore mode: they wake threads of this process, and NVIPC's peers.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::poll::{self, Watch};

/// An eventfd with `EFD_SEMAPHORE`: each read takes one signal. Non-blocking and close-on-exec.
#[derive(Debug)]
pub struct Doorbell(OwnedFd);

impl Doorbell {
    /// Creates an eventfd without a signal.
    ///
    /// # Errors
    /// The process or the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_SEMAPHORE | EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Ok(Self(EventFd::from_value_and_flags(0, flags)?.into()))
    }

    /// Wraps an eventfd that another process sent.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Adds one to the counter.
    ///
    /// # Errors
    /// Never fails in normal use. A counter at its maximum is not an error, because many signals are pending.
    pub fn signal(&self) -> io::Result<()> {
        match nix::unistd::write(&self.0, &1_u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::EAGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Takes one signal. Returns `false` if there is none.
    ///
    /// # Errors
    /// The descriptor is not an eventfd.
    pub fn take(&self) -> io::Result<bool> {
        let mut value = [0; 8];
        match nix::unistd::read(&self.0, &mut value) {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sleeps until there is a signal. Returns `false` at `deadline`. Takes no signal.
    ///
    /// # Errors
    /// The kernel refuses to poll.
    pub fn wait(&self, deadline: Option<Instant>) -> io::Result<bool> {
        Ok(poll::wait(&mut [Watch::readable(self)], deadline)? > 0)
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Creates a blocking eventfd in semaphore mode, for a peer that waits in `read`.
///
/// # Errors
/// The process or the system has no descriptors left.
pub fn blocking() -> io::Result<OwnedFd> {
    Ok(EventFd::from_value_and_flags(0, EfdFlags::EFD_SEMAPHORE | EfdFlags::EFD_CLOEXEC)?.into())
}

/// Whether a descriptor from another process is an eventfd. Writing to anything else could block, or kill this process
/// by a signal.
///
/// # Errors
/// `/proc` is not mounted.
pub fn is_eventfd(fd: &impl AsFd) -> io::Result<bool> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))?;
    Ok(name.as_os_str() == "anon_inode:[eventfd]")
}

/// Whether a blocking eventfd can be incremented without waiting.
///
/// # Errors
/// The kernel refuses to poll.
pub fn has_room(fd: &impl AsFd) -> io::Result<bool> {
    Ok(poll::wait(&mut [Watch::writable(fd)], Some(Instant::now()))? > 0)
}

/// Adds one to a blocking eventfd. Waits while its counter is full.
///
/// # Errors
/// The descriptor is not an eventfd.
pub fn post(fd: &impl AsFd) -> io::Result<()> {
    // There is `preadv2` for reading without blocking, but no kernel has the same for writing to an eventfd.
    loop {
        match nix::unistd::write(fd, &1_u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::EAGAIN) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Takes one signal from a blocking eventfd without waiting. Returns `false` if there is none. Threads may compete for
/// the last one.
///
/// # Errors
/// The descriptor is not an eventfd.
pub fn take(fd: &impl AsFd) -> io::Result<bool> {
    let mut value = [0_u8; 8];
    let part = libc::iovec { iov_base: value.as_mut_ptr().cast(), iov_len: value.len() };
    // SAFETY: one part of 8 bytes that lives until the call returns; an offset of -1 means the current position.
    #[expect(unsafe_code, reason = "nix has no preadv2")]
    let read = unsafe { libc::preadv2(fd.as_fd().as_raw_fd(), &raw const part, 1, -1, libc::RWF_NOWAIT) };
    match Errno::result(read) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn counts_like_a_semaphore() {
        let bell = Doorbell::new().unwrap();
        assert!(!bell.take().unwrap());
        bell.signal().unwrap();
        bell.signal().unwrap();
        assert!(bell.wait(None).unwrap());
        assert!(bell.take().unwrap() && bell.take().unwrap() && !bell.take().unwrap());
        assert!(!bell.wait(Some(Instant::now() + Duration::from_millis(3))).unwrap());
    }
}
