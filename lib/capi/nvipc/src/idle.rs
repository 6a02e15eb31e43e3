//! Threads that poll give up the processor from time to time.
//!
//! With more threads than cores, a polling thread keeps the thread with the message from running until its time slice ends. A
//! thread that yields lets it run, but also all others: beside busy loops that takes many milliseconds, in which the message
//! may come and wait. So a thread yields often as long as that is short, and else about once in a time slice.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Numbers of calls that find nothing per yield: at first, and at most, when each yield takes long. On a core of its own
/// the first costs nothing. The second are some milliseconds.
const YIELD_EVERY: usize = 256;
const YIELD_EVERY_MAX: usize = 1 << 16;

/// A yield of this length has let a busy loop run: longer than a polling thread takes to find that it has to yield.
const LONG_YIELD: Duration = Duration::from_micros(500);

/// Counts calls that found nothing. Approximate: threads may overwrite each other's values.
#[derive(Debug)]
pub(crate) struct IdleCalls {
    since_yield: AtomicUsize,
    yield_every: AtomicUsize,
}

impl IdleCalls {
    pub(crate) fn new() -> Self {
        Self { since_yield: AtomicUsize::new(0), yield_every: AtomicUsize::new(YIELD_EVERY) }
    }

    /// Counts a call that found no message, no value or no free buffer.
    #[inline]
    pub(crate) fn found_nothing(&self) {
        // Not exact: a locked instruction would cost more than the poll.
        let idle = self.since_yield.load(Relaxed) + 1;
        self.since_yield.store(idle, Relaxed);
        if idle >= self.yield_every.load(Relaxed) {
            self.give_way();
        }
    }

    #[cold]
    fn give_way(&self) {
        self.since_yield.store(0, Relaxed);
        let start = Instant::now();
        std::thread::yield_now();
        let every = self.yield_every.load(Relaxed);
        let every = if start.elapsed() >= LONG_YIELD { every * 8 } else { every / 2 };
        self.yield_every.store(every.clamp(YIELD_EVERY, YIELD_EVERY_MAX), Relaxed);
    }
}
