//! Timing of round trips, streams and operations, as in `lib/comparison/src/measure.rs`, with the standard library's
//! clock.
//!
//! That clock costs some 25 ns per reading, the clock of `lib/comparison` 10 to 20. It affects p99 and p99.9 of round trips,
//! which are timed singly, and not p50, which is over batches.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// The last message of a stream. Payload words below it count the messages.
pub(super) const STOP: u64 = u64::MAX;
/// Fraction of a run that is discarded at its start.
const WARM_UP: f64 = 0.1;
/// Minimum number of batches of a stream. The consumer needs two.
const MIN_BATCHES: u64 = 8;
/// Round trips between two readings of the clock where single trips are not timed.
const TRIPS: u64 = 32;

/// The sending half of a transport.
pub(super) trait Tx {
    /// Writes a whole payload made of `word` and sends it, waiting for room.
    fn send(&mut self, word: u64) -> Result<()>;
}

/// The receiving half of a transport.
pub(super) trait Rx {
    /// Waits for a payload, reads all of it and returns its word.
    fn recv(&mut self) -> Result<u64>;
}

/// The result of one run, in nanoseconds per round trip, message or operation.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Dist {
    /// Median over batches, in nanoseconds.
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) p999: f64,
    /// Total time divided by the total count.
    pub(super) mean: f64,
    /// The median of the samples of `p99` and `p999`.
    pub(super) p50_timed: f64,
}

fn histogram() -> Result<Histogram<u64>> {
    // Nanoseconds up to about a minute; 0.1 % wide.
    Ok(Histogram::new_with_bounds(1, 60_000_000_000, 3)?)
}

fn record(histogram: &mut Histogram<u64>, time: Duration) {
    histogram.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}

fn dist(times: &Histogram<u64>, items: u64, mean: f64) -> Dist {
    let at = |quantile| times.value_at_quantile(quantile) as f64 / items as f64;
    Dist { p50: at(0.5), p99: at(0.99), p999: at(0.999), mean, p50_timed: at(0.5) }
}

fn nanos(time: Duration, count: u64) -> f64 {
    time.as_nanos() as f64 / count as f64
}

/// Sends and waits for the echo. Half of the run times every trip, for the tails; half times batches, for the median.
#[inline(always)]
pub(super) fn ping(seconds: f64, tx: &mut impl Tx, rx: &mut impl Rx) -> Result<Dist> {
    let mut count = 0;
    let mut trip = || {
        tx.send(count)?;
        ensure!(rx.recv()? == count, "a message was lost, doubled or reordered");
        count += 1;
        Ok(())
    };
    let begin = Instant::now();
    let warm = begin + Duration::from_secs_f64(seconds * WARM_UP);
    let half = Duration::from_secs_f64(seconds * (1.0 - WARM_UP) / 2.0);
    while Instant::now() < warm {
        trip()?;
    }
    let mut trips = histogram()?;
    loop {
        let start = Instant::now();
        trip()?;
        let stop = Instant::now();
        record(&mut trips, stop - start);
        if stop > warm + half {
            break;
        }
    }
    let mut batches = histogram()?;
    let (begin, mut untimed) = (Instant::now(), 0);
    let mut last = begin;
    while last < begin + half {
        for _ in 0..TRIPS {
            trip()?;
        }
        untimed += TRIPS;
        let now = Instant::now();
        record(&mut batches, now - last);
        last = now;
    }
    tx.send(STOP)?;
    let p50 = dist(&batches, TRIPS, 0.0).p50;
    Ok(Dist { p50, ..dist(&trips, 1, nanos(last - begin, untimed)) })
}

/// The other side of [`ping`]: echoes until it receives [`STOP`].
#[inline(always)]
pub(super) fn echo(tx: &mut impl Tx, rx: &mut impl Rx) -> Result<()> {
    loop {
        match rx.recv()? {
            STOP => return Ok(()),
            word => tx.send(word)?,
        }
    }
}

/// Sends as fast as possible, reading the clock once per `batch`.
#[inline(always)]
pub(super) fn produce(seconds: f64, tx: &mut impl Tx, batch: u64) -> Result<()> {
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut count = 0;
    // At least as many as the consumer needs, however long this process was not scheduled.
    while Instant::now() < end || count < MIN_BATCHES * batch {
        for _ in 0..batch {
            tx.send(count)?;
            count += 1;
        }
    }
    tx.send(STOP)
}

/// The other side of [`produce`]: the percentiles are over batches, the mean over all messages after warm-up. If there
/// are none, because this process was not scheduled for so long, the batches of the warm-up count.
#[inline(always)]
pub(super) fn consume(seconds: f64, rx: &mut impl Rx, batch: u64) -> Result<Dist> {
    let mut batches = histogram()?;
    let (mut expected, mut measured, mut since) = (0, 0, None);
    let mut last = Instant::now();
    let mut warm = Some(last + Duration::from_secs_f64(seconds * WARM_UP));
    loop {
        for _ in 0..batch {
            let word = rx.recv()?;
            if word == STOP {
                let since = since
                    .filter(|_| measured > 0)
                    .context("too few messages were received for a measurement; give more --seconds")?;
                return Ok(dist(&batches, batch, nanos(last - since, measured)));
            }
            ensure!(word == expected, "a message was lost, doubled or reordered: {word} for {expected}");
            expected += 1;
        }
        let now = Instant::now();
        if since.is_some() {
            if warm.take_if(|warm| last > *warm).is_some() {
                batches.reset();
                (measured, since) = (0, Some(last));
            }
            record(&mut batches, now - last);
            measured += batch;
        } else {
            since = Some(now);
        }
        last = now;
    }
}

/// Times `op` in batches on this thread alone. `op` gets the number of earlier calls, and returns the part of its time
/// that counts, or `None` for all of it.
#[inline(always)]
pub(super) fn repeat(
    seconds: f64,
    batch: u64,
    mut op: impl FnMut(u64) -> Result<Option<Duration>>,
) -> Result<Dist> {
    let mut batches = histogram()?;
    let (mut total, mut measured, mut count) = (Duration::ZERO, 0, 0);
    let begin = Instant::now();
    let warm = begin + Duration::from_secs_f64(seconds * WARM_UP);
    let end = begin + Duration::from_secs_f64(seconds);
    loop {
        let start = Instant::now();
        let mut own = None;
        for _ in 0..batch {
            if let Some(time) = op(count)? {
                own = Some(own.unwrap_or(Duration::ZERO) + time);
            }
            count += 1;
        }
        let stop = Instant::now();
        if stop > warm {
            let time = own.unwrap_or(stop - start);
            record(&mut batches, time);
            total += time;
            measured += batch;
        }
        if stop > end {
            return Ok(dist(&batches, batch, nanos(total, measured)));
        }
    }
}
