//! Garbage collection of a pool: removes files of dead pods, whose memory is charged to no cgroup.
//!
//! A file does not record its owner, and every pod with the pool can use it. A pool is therefore emptied only
//! after it was unused for a grace period: no container has it according to the kubelet's list, and none was
//! allocated recently, which the list may lack.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::tree::Remover;

/// Measures how long a pool has been unused.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IdleTimer<T> {
    since: Option<T>,
}

impl<T> Default for IdleTimer<T> {
    fn default() -> Self {
        Self { since: None }
    }
}

impl<T: Copy + Ord + std::ops::Sub<T, Output = Duration>> IdleTimer<T> {
    /// Updates the timer with the kubelet's list. Returns whether the pool can be emptied.
    pub(crate) fn poll(&mut self, now: T, is_held: bool, last_allocated: Option<T>, grace: Duration) -> bool {
        if is_held {
            self.since = None;
            return false;
        }
        let since = *self.since.get_or_insert(now);
        let since = last_allocated.map_or(since, |last| last.max(since));
        now >= since && now - since >= grace
    }

    /// Resets the timer because the kubelet's list is unavailable.
    pub(crate) fn unknown(&mut self) {
        self.since = None;
    }
}

/// The files that a sweep removed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct SweepReport {
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    pub(crate) failures: u64,
}

/// Removes everything older than `before`, while `goes_on` returns true.
pub(crate) fn sweep(directory: &Path, before: SystemTime, goes_on: impl Fn() -> bool) -> SweepReport {
    let since = |moment: SystemTime| moment.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since(before).as_secs();
    let Ok(mut remover) = Remover::new(directory, since(SystemTime::now()).as_nanos(), goes_on) else {
        return SweepReport::default();
    };
    // The change time of the entry itself: links are removed, not followed.
    let swept = remover.run(|found| !u64::try_from(found.changed).is_ok_and(|changed| changed >= seconds));
    let failures = remover.failures + u64::from(swept.is_err());
    SweepReport { files: remover.gone.files, bytes: remover.gone.bytes, failures }
}

/// Removes a directory with everything in it; links are not followed. A failure means that something is left.
pub(crate) fn erase(directory: &Path) -> SweepReport {
    let stamp = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let mut report = SweepReport::default();
    if let Ok(mut remover) = Remover::new(directory, stamp, || true) {
        let swept = remover.run(|_| true);
        let failures = remover.failures + u64::from(swept.is_err());
        report = SweepReport { files: remover.gone.files, bytes: remover.gone.bytes, failures };
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => report.failures += 1,
        // Everything below it is gone too, even if another process removed part of it.
        _ => report.failures = 0,
    }
    report
}
