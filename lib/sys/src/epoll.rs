//! Epoll instances: one descriptor that is readable while any descriptor of a set is.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::epoll::{EpollCreateFlags, EpollEvent, EpollFlags};

/// A set of descriptors that can itself be given to poll, epoll or an event loop.
///
/// ```
/// use std::io::Write;
/// use shmesh_sys::{epoll::Epoll, poll};
/// let (reader, mut writer) = std::io::pipe()?;
/// let set = Epoll::new()?;
/// set.add(&reader)?;
/// assert!(!poll::is_readable(&set)?);
/// writer.write_all(b"x")?;
/// assert!(poll::is_readable(&set)?);
/// set.remove(&reader);
/// assert!(!poll::is_readable(&set)?);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Epoll(nix::sys::epoll::Epoll);

impl Epoll {
    /// Creates an empty set.
    ///
    /// # Errors
    /// The process or the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(nix::sys::epoll::Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?))
    }

    /// Watches `fd` for input and hang-up.
    ///
    /// # Errors
    /// The descriptor is in the set already, or cannot be watched.
    pub fn add(&self, fd: &impl AsFd) -> io::Result<()> {
        Ok(self.0.add(fd.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, 0))?)
    }

    /// Stops watching `fd`. Does nothing if it is not in the set.
    pub fn remove(&self, fd: &impl AsFd) {
        let _ = self.0.delete(fd.as_fd());
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}
