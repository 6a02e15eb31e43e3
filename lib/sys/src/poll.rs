//! Waiting for descriptors with `poll(2)`.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// One descriptor to wait for, and after the wait whether it is ready. A hang-up or an error counts as ready.
#[repr(transparent)]
pub struct Watch<'fd> {
    raw: libc::pollfd,
    fd: PhantomData<BorrowedFd<'fd>>,
}

impl<'fd> Watch<'fd> {
    /// Waits until the descriptor can be read.
    pub fn readable(fd: &'fd (impl AsFd + ?Sized)) -> Self {
        Self::new(fd.as_fd(), libc::POLLIN)
    }

    /// Waits until the descriptor can be written without blocking.
    pub fn writable(fd: &'fd (impl AsFd + ?Sized)) -> Self {
        Self::new(fd.as_fd(), libc::POLLOUT)
    }

    /// Waits until the other end hangs up.
    pub fn hung_up(fd: &'fd (impl AsFd + ?Sized)) -> Self {
        Self::new(fd.as_fd(), 0)
    }

    fn new(fd: BorrowedFd<'fd>, events: libc::c_short) -> Self {
        Self { raw: libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }, fd: PhantomData }
    }

    /// Whether the last wait found the descriptor ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.raw.revents != 0
    }
}

impl fmt::Debug for Watch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("fd", &self.raw.fd).field("is_ready", &self.is_ready()).finish()
    }
}

/// Waits until at least one descriptor is ready, or until `deadline`. Returns the number of ready descriptors, 0 after
/// the deadline. Signals do not end the wait.
///
/// # Errors
/// More descriptors than the limit of this process (`EINVAL`), or no memory is left.
pub fn wait(watches: &mut [Watch<'_>], deadline: Option<Instant>) -> io::Result<usize> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match wait_once(watches, left) {
            Ok(0) if deadline.is_some_and(|deadline| Instant::now() < deadline) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// As [`wait`], for at most `limit`; a signal ends the wait.
///
/// # Errors
/// As [`wait`]; `Interrupted`.
#[expect(unsafe_code, reason = "poll(2) takes an array; nix would need one of its own type")]
pub fn wait_once(watches: &mut [Watch<'_>], limit: Option<Duration>) -> io::Result<usize> {
    // Rounded up: polling with 0 until the deadline would spin for the last millisecond.
    let millis = limit.map_or(-1, |limit| {
        i32::try_from(limit.as_nanos().div_ceil(Duration::from_millis(1).as_nanos())).unwrap_or(i32::MAX)
    });
    let len = libc::nfds_t::try_from(watches.len()).map_err(io::Error::other)?;
    // SAFETY: `Watch` is transparent over `pollfd`, and there are `len` of them, which live until the call returns.
    let ready = unsafe { libc::poll(watches.as_mut_ptr().cast(), len, millis) };
    usize::try_from(ready).map_err(|_| io::Error::last_os_error())
}

/// Whether a descriptor can be read now.
///
/// # Errors
/// As [`wait`].
pub fn is_readable(fd: &impl AsFd) -> io::Result<bool> {
    Ok(wait(&mut [Watch::readable(fd)], Some(Instant::now()))? > 0)
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn deadline_passes_and_hang_up_is_ready() {
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let deadline = Instant::now() + Duration::from_millis(3);
        assert_eq!(wait(&mut [Watch::readable(&one), Watch::hung_up(&one)], Some(deadline)).unwrap(), 0);
        assert!(Instant::now() >= deadline);
        drop(other);
        let mut watches = [Watch::hung_up(&one)];
        assert_eq!(wait(&mut watches, None).unwrap(), 1);
        assert!(watches[0].is_ready());
    }
}
