//! Futexes on words in shared memory.
// UNSAFETY: nix and std have no call for a futex that processes share. The kernel is given the address of an atomic that
// the caller borrows for the whole call, and only compares it.
#![expect(unsafe_code, reason = "the futex system call")]

use std::io;
use std::time::Duration;

use crate::sync::{AtomicU64, futex_half};

/// Sleeps until [`wake_all`] is called on `word`, unless its low half no longer is `expected`. May also return early: look
/// at what was waited for.
///
/// # Errors
/// The kernel has no memory to queue the thread, or a seccomp filter refuses `futex`.
pub(crate) fn wait(word: &AtomicU64, expected: u32, timeout: Duration) -> io::Result<()> {
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: `word` and `timeout` outlive the call, and the kernel writes to neither. Without FUTEX_PRIVATE_FLAG the key is
    // the page of the file, so all processes that map it meet.
    let result = unsafe {
        libc::syscall(
            libc::SYS_futex,
            futex_half(word),
            libc::FUTEX_WAIT,
            expected,
            std::ptr::from_ref(&timeout),
        )
    };
    if result == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR | libc::ETIMEDOUT)) => Ok(()),
        error => Err(error),
    }
}

/// Wakes every thread, of any process, that sleeps on `word`. Never blocks.
pub(crate) fn wake_all(word: &AtomicU64) {
    // SAFETY: as above. The call fails for an address that is none only.
    unsafe { libc::syscall(libc::SYS_futex, futex_half(word), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;
    use crate::sync::Ordering;

    #[test]
    fn returns_at_once_when_the_word_has_changed() {
        let word = AtomicU64::new(7 | 1 << 32);
        wait(&word, 6, Duration::from_secs(600)).unwrap();
    }

    #[test]
    fn returns_after_the_timeout() {
        let word = AtomicU64::new(7);
        let start = Instant::now();
        wait(&word, 7, Duration::from_millis(20)).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(20));
    }

    #[test]
    fn wakes_every_sleeper() {
        let word = Arc::new(AtomicU64::new(0));
        let sleepers: Vec<_> = (0..4)
            .map(|_| {
                let word = Arc::clone(&word);
                std::thread::spawn(move || {
                    while word.load(Ordering::Acquire) == 0 {
                        wait(&word, 0, Duration::from_secs(600)).unwrap();
                    }
                })
            })
            .collect();
        word.store(1, Ordering::Release);
        wake_all(&word);
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
    }
}
