//! Threads that poll give up the processor from time to time.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// The thread yields the processor after this many calls that found nothing. On a core of its own that costs nothing.
/// With more threads than cores, a polling thread would otherwise keep the thread with the message from running.
const YIELD_EVERY: usize = 256;

/// Approximate number of calls that found nothing since the last yield: threads may overwrite each other's count.
#[derive(Debug, Default)]
pub(crate) struct IdleCalls(AtomicUsize);

impl IdleCalls {
    /// Counts a call that found no message, no value or no free buffer.
    #[inline]
    pub(crate) fn found_nothing(&self) {
        // Not exact: a locked instruction would cost more than the poll.
        let idle = self.0.load(Relaxed) + 1;
        if idle < YIELD_EVERY {
            return self.0.store(idle, Relaxed);
        }
        self.0.store(0, Relaxed);
        std::thread::yield_now();
    }
}
