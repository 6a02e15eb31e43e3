//! Eventfds in semaphore mode, which wake threads of this process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
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
        assert!(bell.take().unwrap() && bell.take().unwrap() && !bell.take().unwrap());
    }
}
