//! Waiting for a word in shared memory to change, between threads of any processes that map it.
#![expect(clippy::disallowed_types, reason = "the kernel waits for a word of the machine, not of loom")]

use std::io;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// The reason why [`wait`] returned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Wait {
    /// [`wake`] woke this thread, or the wake-up was spurious: check the word again.
    Woken,
    /// The word differed from `expected` when the kernel read it.
    Changed,
    /// The timeout has passed.
    TimedOut,
    /// A signal handler ran.
    Interrupted,
}

/// Sleeps while the low half of `word` is `expected`, until a [`wake`] with one of the bits of `mask`, a signal or the end of
/// `timeout`; `None` means no limit.
///
/// The kernel compares and goes to sleep in one step, so a `wake` after a store to the word is never lost. The futex is
/// shared (not `FUTEX_PRIVATE_FLAG`), because the other side may be another process with its own mapping of the memory.
///
/// # Errors
/// The kernel or a seccomp filter refuses, `mask` is 0, or the page of the word was truncated away (`EFAULT`).
#[expect(unsafe_code, reason = "neither nix nor libc has a function for it")]
pub fn wait(word: &AtomicU64, expected: u32, timeout: Option<Duration>, mask: u32) -> io::Result<Wait> {
    // The call with a mask takes the time at which the wait ends. One that the kernel cannot express means no limit.
    let end = timeout.and_then(|timeout| {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).ok()?;
        let end = Duration::from(now).checked_add(timeout)?;
        let (seconds, nanos) = (end.as_secs().try_into().ok()?, end.subsec_nanos().into());
        Some(libc::timespec { tv_sec: seconds, tv_nsec: nanos })
    });
    let end = end.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let no_word = std::ptr::null::<u32>();
    // SAFETY: the word and the time live until the call returns; the kernel only reads both.
    let result = unsafe {
        libc::syscall(libc::SYS_futex, low_half(word), libc::FUTEX_WAIT_BITSET, expected, end, no_word, mask)
    };
    if result == 0 {
        return Ok(Wait::Woken);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN) => Ok(Wait::Changed),
        Some(libc::ETIMEDOUT) => Ok(Wait::TimedOut),
        Some(libc::EINTR) => Ok(Wait::Interrupted),
        _ => Err(error),
    }
}

/// The half of the word that the kernel compares.
fn low_half(word: &AtomicU64) -> *const u32 {
    let half = word.as_ptr().cast::<u32>().cast_const();
    if cfg!(target_endian = "little") { half } else { half.wrapping_add(1) }
}

/// The mask of all bits.
pub const ALL: u32 = u32::MAX;

/// Wakes at most `count` threads, of any process, that [`wait`] for the word with one of the bits of `mask`. Returns their number.
///
/// # Errors
/// The kernel or a seccomp filter refuses, `mask` is 0, or the page of the word was truncated away (`EFAULT`).
#[expect(unsafe_code, reason = "neither nix nor libc has a function for it")]
pub fn wake(word: &AtomicU64, count: u32, mask: u32) -> io::Result<u32> {
    let count = i32::try_from(count).unwrap_or(i32::MAX);
    let (no_time, no_word) = (std::ptr::null::<libc::timespec>(), std::ptr::null::<u32>());
    // SAFETY: the word lives until the call returns; the kernel uses its address only.
    let result = unsafe {
        libc::syscall(libc::SYS_futex, low_half(word), libc::FUTEX_WAKE_BITSET, count, no_time, no_word, mask)
    };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    #![expect(
        clippy::disallowed_types,
        reason = "the kernel waits for a word of the machine's, not of loom's"
    )]

    use std::sync::atomic::Ordering::SeqCst;
    use std::time::Instant;

    use super::*;

    /// A minute, which only a stalled machine reaches.
    const LONG: Option<Duration> = Some(Duration::from_secs(60));

    #[test]
    fn changed_word_does_not_sleep() {
        let word = AtomicU64::new(7);
        assert_eq!(wait(&word, 8, None, ALL).unwrap(), Wait::Changed);
        assert_eq!(wake(&word, u32::MAX, ALL).unwrap(), 0, "no thread waits");
    }

    #[test]
    fn timeout_passes() {
        let (word, start) = (AtomicU64::new(0), Instant::now());
        let limit = Duration::from_millis(5);
        assert_eq!(wait(&word, 0, Some(limit), ALL).unwrap(), Wait::TimedOut);
        assert!(start.elapsed() >= limit);
    }

    #[test]
    fn wake_reports_how_many_it_woke() {
        let word = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let threads = [(); 3].map(|()| scope.spawn(|| wait(&word, 0, LONG, ALL).unwrap()));
            let mut woken = 0;
            // Each round wakes one that sleeps by then.
            while woken < 3 {
                woken += wake(&word, 1, ALL).unwrap();
                std::thread::yield_now();
            }
            assert!(threads.into_iter().all(|thread| thread.join().unwrap() == Wait::Woken));
        });
    }

    #[test]
    fn only_sleepers_with_a_bit_of_the_mask_are_woken() {
        let word = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let [one, two] = [1, 2].map(|mask| {
                scope.spawn({
                    let word = &word;
                    move || wait(word, 0, LONG, mask).unwrap()
                })
            });
            while wake(&word, u32::MAX, 2).unwrap() == 0 {
                std::thread::yield_now();
            }
            assert_eq!(two.join().unwrap(), Wait::Woken);
            while wake(&word, u32::MAX, 1 | 4).unwrap() == 0 {
                std::thread::yield_now();
            }
            assert_eq!(one.join().unwrap(), Wait::Woken);
        });
    }

    #[test]
    fn unreadable_word_is_an_error() {
        // A mapping whose file is empty has no page: the kernel cannot read the word.
        let file = crate::file::memfd("futex", false).unwrap();
        file.set_len(4096).unwrap();
        let map = crate::file::map(&file, 4096, false).unwrap();
        file.set_len(0).unwrap();
        let error = wait(word_of(&map), 0, LONG, ALL).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }

    #[expect(unsafe_code, reason = "a word in a mapping")]
    fn word_of(map: &memmap2::MmapRaw) -> &AtomicU64 {
        // SAFETY: the mapping is aligned, longer than a word, and outlives the reference.
        unsafe { AtomicU64::from_ptr(map.as_mut_ptr().cast()) }
    }

    /// This very test again, as the other process: it finds the memory as its standard input.
    const OTHER: &str = "SHMESH_TEST_FUTEX";

    #[test]
    fn processes_wake_each_other_through_their_own_mappings() {
        use std::process::{Command, Stdio};
        if std::env::var_os(OTHER).is_some() {
            let map = crate::file::map(io::stdin(), 4096, false).unwrap();
            let word = word_of(&map);
            word.store(1, SeqCst);
            wake(word, 1, ALL).unwrap();
            while word.load(SeqCst) == 1 {
                assert_ne!(wait(word, 1, LONG, ALL).unwrap(), Wait::TimedOut);
            }
            return;
        }
        let file = crate::file::memfd("futex", false).unwrap();
        file.set_len(4096).unwrap();
        let map = crate::file::map(&file, 4096, false).unwrap();
        let word = word_of(&map);
        let mut other = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "futex::tests::processes_wake_each_other_through_their_own_mappings"])
            .env(OTHER, "1")
            .stdin(Stdio::from(file))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while word.load(SeqCst) == 0 {
            assert_ne!(wait(word, 0, LONG, ALL).unwrap(), Wait::TimedOut);
        }
        // Only once it sleeps: a wake that finds a sleeper proves that both mean the same futex.
        let start = Instant::now();
        while wake(word, 1, ALL).unwrap() == 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "the other never slept");
            std::thread::yield_now();
        }
        word.store(2, SeqCst);
        wake(word, 1, ALL).unwrap();
        assert!(other.wait().unwrap().success());
    }
}
