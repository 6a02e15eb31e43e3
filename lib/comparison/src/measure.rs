//! Timing: the clock and the drivers that every transport runs under.
//!
//! A transport is a [`Tx`] and an [`Rx`]. The drivers are generic over them and inlined, so all rows of one kind
//! pay for the same loop, the same payload and the same timer.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// The last message of a stream. Payload words below it count the messages.
pub(crate) const STOP: u64 = u64::MAX;

/// Share of a run that is thrown away at its start.
const WARM_UP: f64 = 0.1;
/// Round trips between two looks at the clock where single trips are not timed.
const TRIPS: u64 = 32;

/// The sending half of a transport.
pub(crate) trait Tx {
    /// Writes a whole payload made of `word` and delivers it, waiting for room.
    fn send(&mut self, word: u64);
}

/// The receiving half of a transport.
pub(crate) trait Rx {
    /// Waits for a payload, reads all of it and returns its word.
    fn recv(&mut self) -> u64;
}

/// Time in ticks: the fenced time-stamp counter where it is constant, `clock_gettime` elsewhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    tsc: bool,
    ns_per_tick: f64,
}

impl Clock {
    /// Chooses the timer and calibrates it, in 50 ms.
    pub(crate) fn new() -> Self {
        let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let tsc =
            cfg!(target_arch = "x86_64") && flags.contains("constant_tsc") && flags.contains("nonstop_tsc");
        let mut clock = Self { tsc, ns_per_tick: 1.0 };
        if tsc {
            let (ticks, ns) = (clock.now(), monotonic_ns());
            std::thread::sleep(Duration::from_millis(50));
            let (ticks, ns) = (clock.now() - ticks, monotonic_ns() - ns);
            clock.ns_per_tick = ns as f64 / ticks as f64;
        }
        clock
    }

    /// The present. The fence keeps the stamp behind everything before it in program order.
    #[inline(always)]
    pub(crate) fn now(&self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.tsc {
            // SAFETY: both instructions exist on every x86_64 processor and touch no memory.
            return unsafe {
                core::arch::x86_64::_mm_lfence();
                core::arch::x86_64::_rdtsc()
            };
        }
        monotonic_ns()
    }

    pub(crate) fn ticks(&self, seconds: f64) -> u64 {
        (seconds * 1e9 / self.ns_per_tick) as u64
    }

    pub(crate) fn ns(&self, ticks: u64) -> f64 {
        ticks as f64 * self.ns_per_tick
    }

    /// The name of the timer and what one timed interval of nothing reads, in ns.
    pub(crate) fn describe(&self) -> String {
        let mut empty = histogram();
        for _ in 0..100_000 {
            let start = self.now();
            empty.saturating_record(self.now() - start);
        }
        let name = if self.tsc { "lfence+rdtsc" } else { "clock_gettime" };
        format!(
            "{name}, an empty interval reads {:.1} ns (not subtracted)",
            self.ns(empty.value_at_quantile(0.5))
        )
    }
}

fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid place for the answer; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The result of one run of one test: nanoseconds per round trip, message, copy or operation.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Dist {
    /// Over batches, so that neither the timer's cost nor its steps (10 ns on some processors) show.
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    /// All the time over all the count, the same runs as `p50`.
    pub(crate) mean: f64,
    /// The median of what `p99` and `p999` are of: single round trips with the timer in them; otherwise `p50`.
    pub(crate) p50_timed: f64,
}

/// How to run a test: everything a worker needs to know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ctx {
    pub(crate) clock: Clock,
    pub(crate) seconds: f64,
    /// The cores of the first and the second worker.
    pub(crate) cores: (usize, usize),
}

fn histogram() -> Histogram<u64> {
    // Ticks up to about a minute; 0.1 % wide.
    Histogram::new_with_bounds(1, 1 << 38, 3).expect("the bounds are valid")
}

impl Ctx {
    fn dist(&self, ticks: &Histogram<u64>, items: u64, mean: f64) -> Dist {
        let at = |q| self.clock.ns(ticks.value_at_quantile(q)) / items as f64;
        Dist { p50: at(0.5), p99: at(0.99), p999: at(0.999), mean, p50_timed: at(0.5) }
    }

    /// Sends and waits for the echo. Half of the run times every trip, for the tails; half times batches, for the median.
    pub(crate) fn ping(&self, tx: &mut impl Tx, rx: &mut impl Rx) -> Dist {
        let clock = self.clock;
        let mut count = 0;
        let mut trip = || {
            tx.send(count);
            assert!(rx.recv() == count, "a message was lost, doubled or reordered");
            count += 1;
        };
        let begin = clock.now();
        let (warm, half) =
            (clock.ticks(self.seconds * WARM_UP), clock.ticks(self.seconds * (1.0 - WARM_UP) / 2.0));
        while clock.now() < begin + warm {
            trip();
        }
        let mut trips = histogram();
        loop {
            let start = clock.now();
            trip();
            let stop = clock.now();
            trips.saturating_record(stop - start);
            if stop > begin + warm + half {
                break;
            }
        }
        let mut batches = histogram();
        let (begin, mut untimed) = (clock.now(), 0u64);
        let mut last = begin;
        while last < begin + half {
            for _ in 0..TRIPS {
                trip();
            }
            untimed += TRIPS;
            let now = clock.now();
            batches.saturating_record(now - last);
            last = now;
        }
        tx.send(STOP);
        let p50 = self.dist(&batches, TRIPS, 0.0).p50;
        Dist { p50, ..self.dist(&trips, 1, clock.ns(last - begin) / untimed as f64) }
    }

    /// The other side of [`Self::ping`]: answers until told to stop.
    pub(crate) fn echo(&self, tx: &mut impl Tx, rx: &mut impl Rx) {
        loop {
            match rx.recv() {
                STOP => return,
                word => tx.send(word),
            }
        }
    }

    /// Sends as fast as the transport takes it, looking at the clock once per `batch`.
    pub(crate) fn produce(&self, tx: &mut impl Tx, batch: u64) {
        let end = self.clock.now() + self.clock.ticks(self.seconds);
        let mut count = 0;
        while self.clock.now() < end {
            for _ in 0..batch {
                tx.send(count);
                count += 1;
            }
        }
        tx.send(STOP);
    }

    /// The other side of [`Self::produce`]: the percentiles are over batches, the mean over all messages after warm-up.
    pub(crate) fn consume(&self, rx: &mut impl Rx, batch: u64) -> Dist {
        let clock = self.clock;
        let mut batches = histogram();
        let mut expected = 0;
        let (mut measured, mut since) = (0u64, None);
        let mut last = clock.now();
        let warm = last + clock.ticks(self.seconds * WARM_UP);
        loop {
            for _ in 0..batch {
                let word = rx.recv();
                if word == STOP {
                    assert!(
                        measured > 0,
                        "too few messages came through: is a core busy, or --seconds too short?"
                    );
                    let start = since.expect("set before the first measured batch");
                    let mean = clock.ns(last - start) / measured as f64;
                    return self.dist(&batches, batch, mean);
                }
                assert!(word == expected, "a message was lost, doubled or reordered: {word} for {expected}");
                expected += 1;
            }
            let now = clock.now();
            if since.is_some() {
                batches.saturating_record(now - last);
                measured += batch;
            } else if now > warm {
                since = Some(now);
            }
            last = now;
        }
    }

    /// Times `op` in batches on this thread alone; `batch` must be large against the timer.
    pub(crate) fn repeat(&self, batch: u64, mut op: impl FnMut(u64)) -> Dist {
        let clock = self.clock;
        let mut batches = histogram();
        let mut count = 0;
        let begin = clock.now();
        let (warm, end) = (begin + clock.ticks(self.seconds * WARM_UP), begin + clock.ticks(self.seconds));
        let (mut total, mut measured) = (0, 0u64);
        loop {
            let start = clock.now();
            for _ in 0..batch {
                op(count);
                count += 1;
            }
            let stop = clock.now();
            if stop > warm {
                batches.saturating_record(stop - start);
                total += stop - start;
                measured += batch;
            }
            if stop > end {
                return self.dist(&batches, batch, clock.ns(total) / measured as f64);
            }
        }
    }

    /// Sends to itself on one thread: what the instructions cost when no cache line moves.
    pub(crate) fn alone(&self, tx: &mut impl Tx, rx: &mut impl Rx) -> Dist {
        self.repeat(1024, |count| {
            tx.send(count);
            assert!(rx.recv() == count, "a message was lost, doubled or reordered");
        })
    }
}
