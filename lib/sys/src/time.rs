//! Clocks and sizes that the kernel fixes.

use std::io;
use std::time::Duration;

/// The C structure of a time.
pub use libc::timespec;

/// The time since boot, in the clock ticks of process start times: no process that is running now has a later start
/// time.
///
/// # Errors
/// The kernel does not have this clock.
pub fn boot_ticks() -> io::Result<u64> {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME)?;
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.unwrap_or(100).max(1);
    let ticks = time.tv_sec() * ticks + time.tv_nsec() * ticks / 1_000_000_000;
    u64::try_from(ticks).map_err(io::Error::other)
}

/// The time since boot, some milliseconds late at most; `None` if the kernel does not have this clock. For limits that a hot path
/// checks: it costs a fifth of [`Instant::now`](std::time::Instant::now).
#[inline]
#[must_use]
#[expect(unsafe_code, reason = "nix's function takes three times as long")]
pub fn coarse_uptime() -> Option<Duration> {
    let mut time = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one time, to a place that lives until the call returns.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    if result != 0 {
        return None;
    }
    Some(Duration::new(time.tv_sec.try_into().ok()?, time.tv_nsec.try_into().ok()?))
}

/// The time since boot in nanoseconds, of the clock that all processes of a machine share, but for those in a time namespace of
/// their own. 0 if the kernel does not have this clock.
#[must_use]
pub fn monotonic_nanos() -> u64 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    time.map_or(0, |time| (time.tv_sec() * 1_000_000_000 + time.tv_nsec()).cast_unsigned())
}

/// Size of a page of memory in bytes.
///
/// # Errors
/// The kernel does not report it.
pub fn page_bytes() -> io::Result<u64> {
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)?;
    page.and_then(|page| u64::try_from(page).ok()).ok_or_else(|| io::ErrorKind::Unsupported.into())
}
