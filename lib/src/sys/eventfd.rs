//! Eventfds in semaphore mode: the doorbells of a link.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// An eventfd with `EFD_SEMAPHORE`: each read takes one signal. Non-blocking and close-on-exec.
#[derive(Debug)]
pub(crate) struct Doorbell(OwnedFd);

impl Doorbell {
    /// A new one, not signalled.
    ///
    /// # Errors
    /// The process or the system has no descriptors left.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_SEMAPHORE | EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Ok(Self(EventFd::from_value_and_flags(0, flags)?.into()))
    }

    /// Takes over one that came from another process.
    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Adds one signal.
    ///
    /// # Errors
    /// None in normal use. A counter at its maximum is not an error: the other side has plenty to wake up for.
    pub(crate) fn signal(&self) -> io::Result<()> {
        match nix::unistd::write(&self.0, &1_u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::EAGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Takes one signal; `false` when there is none.
    ///
    /// # Errors
    /// The descriptor is not an eventfd.
    pub(crate) fn take(&self) -> io::Result<bool> {
        let mut value = [0; 8];
        match nix::unistd::read(&self.0, &mut value) {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sleeps until it is signalled, or until `deadline`. `false`: the time is over. Takes no signal.
    ///
    /// # Errors
    /// The kernel refuses to poll.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> io::Result<bool> {
        loop {
            let timeout = match deadline {
                None => PollTimeout::NONE,
                Some(deadline) => {
                    // Rounded up: polling with 0 until the deadline would spin through its last millisecond.
                    let left = deadline.saturating_duration_since(Instant::now());
                    let millis = left.as_nanos().div_ceil(Duration::from_millis(1).as_nanos());
                    PollTimeout::try_from(i32::try_from(millis).unwrap_or(i32::MAX))
                        .unwrap_or(PollTimeout::MAX)
                }
            };
            match poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(0) if deadline.is_some_and(|deadline| Instant::now() < deadline) => {}
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
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
