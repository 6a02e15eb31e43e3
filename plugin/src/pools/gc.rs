//! Taking away what dead pods left in a pool: nobody is charged for its memory any more.
//!
//! A file does not say whose it is, and any pod that has the pool may use it. So a pool is emptied when nobody has had it for
//! a while: no container by the kubelet's list, and none just let in, who is not on the list yet.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::tree::Remover;

/// How long a pool has been nobody's.
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
    /// One look at the kubelet's list. Whether the pool may be emptied.
    pub(crate) fn poll(&mut self, now: T, is_held: bool, last_allocated: Option<T>, grace: Duration) -> bool {
        if is_held {
            self.since = None;
            return false;
        }
        let since = *self.since.get_or_insert(now);
        let since = last_allocated.map_or(since, |last| last.max(since));
        now >= since && now - since >= grace
    }

    /// The kubelet did not say.
    pub(crate) fn unknown(&mut self) {
        self.since = None;
    }
}

/// What was taken away.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct SweepReport {
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    pub(crate) failures: u64,
}

/// Empties a pool of what is older than `before`, as long as `goes_on`.
pub(crate) fn sweep(directory: &Path, before: SystemTime, goes_on: impl Fn() -> bool) -> SweepReport {
    let since = |moment: SystemTime| moment.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since(before).as_secs();
    let Ok(mut remover) = Remover::new(directory, since(SystemTime::now()).as_nanos(), goes_on) else {
        return SweepReport::default();
    };
    // Of the entry itself: a link is taken away, not followed.
    let swept = remover.run(|found| !u64::try_from(found.changed).is_ok_and(|changed| changed >= seconds));
    let failures = remover.failures + u64::from(swept.is_err());
    SweepReport { files: remover.gone.files, bytes: remover.gone.bytes, failures }
}
