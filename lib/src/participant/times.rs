//! How long messages were on their way, and how long they were held: counts in buckets, one set for each seat.
//!
//! Only sampled messages are counted, so the steps are cold. The participant in a seat adds to the seat's counts; its
//! successor goes on. Observers add the counts of all seats.

use std::time::Duration;

use super::{MAX_SEATS, SeatIndex};
use crate::segment::Lines;
use crate::sync::{AtomicU64, Ordering, WORDS_PER_LINE};

/// Number of buckets of a histogram. In models few: each word costs time there.
const BUCKETS: usize = if cfg!(loom) { 7 } else { 128 };
/// The lines of one histogram: its buckets, and one with the sum.
const HISTOGRAM_LINES: usize = BUCKETS / WORDS_PER_LINE + 1;
/// The lines of all seats, two histograms each.
pub(crate) const TIMES_LINES: usize = MAX_SEATS * 2 * HISTOGRAM_LINES;
/// The upper bound of bucket `i` is `2^((i - UNIT) / 4)` seconds.
const UNIT: u8 = 104;
/// No participant counts so much. Limits what a hostile peer writes, so that sums do not overflow.
const COUNT_MAX: u64 = 1 << 40;
/// The same of the sum of a seat's times.
const SUM_NANOS_MAX: u64 = 1 << 56;
/// Times are clamped to this number of nanoseconds, above the last bound.
const NANOS_MAX: u64 = (1 << 36) - 1;

/// The current time in nanoseconds, of the clock that all processes of a node share.
pub(crate) fn now() -> u64 {
    if cfg!(any(loom, miri)) { 0 } else { shmesh_sys::time::monotonic_nanos() }
}

/// The counts of all seats of a link, in shared memory.
#[derive(Clone, Debug)]
pub(crate) struct Times(Lines);

/// The two times that are counted of a sampled message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Time {
    /// From sending to receiving.
    Latency,
    /// From receiving to releasing.
    Hold,
}

impl Times {
    /// `lines` must be [`TIMES_LINES`].
    pub(crate) fn new(lines: Lines) -> Self {
        debug_assert_eq!(lines.len(), TIMES_LINES);
        Self(lines)
    }

    fn word(&self, seat: SeatIndex, time: Time, word: usize) -> &AtomicU64 {
        let first = (seat.as_usize() * 2 + time as usize) * HISTOGRAM_LINES;
        self.0[first + word / WORDS_PER_LINE].word(word % WORDS_PER_LINE)
    }

    /// Counts a time of the participant in a seat.
    pub(crate) fn count(&self, seat: SeatIndex, time: Time, nanos: u64) {
        // An evicted participant may count beside its successor.
        self.word(seat, time, bucket(nanos)).fetch_add(1, Ordering::Relaxed);
        self.word(seat, time, BUCKETS).fetch_add(nanos, Ordering::Relaxed);
    }

    /// The counts of seats `0..used` together: the others have none.
    pub(crate) fn sum(&self, time: Time, used: usize) -> TimeHistogram {
        let mut all = TimeHistogram::default();
        for seat in (0..used as u64).filter_map(SeatIndex::from_wild) {
            for (i, count) in all.counts.iter_mut().enumerate() {
                *count += self.word(seat, time, i).load(Ordering::Relaxed).min(COUNT_MAX);
            }
            all.nanos += self.word(seat, time, BUCKETS).load(Ordering::Relaxed).min(SUM_NANOS_MAX);
        }
        all
    }
}

/// The bucket of a time.
fn bucket(nanos: u64) -> usize {
    // 2^30 / 10^9 with 27 binary places: the time in units of 2^-57 seconds.
    const UNITS: u64 = 144_115_188;
    // 2^63 times the fourth roots of 2, 4 and 8.
    const QUARTERS: [u64; 3] = [0x9837_f051_8db8_a970, 0xb504_f333_f9de_6485, 0xd744_fcca_d69d_6af5];
    let time = (nanos.clamp(1, NANOS_MAX) * UNITS) - 1;
    let exponent = time.ilog2() as usize;
    let mantissa = time << time.leading_zeros();
    let quarters = QUARTERS.iter().filter(|&&quarter| mantissa >= quarter).count();
    (4 * exponent + quarters + 1 + usize::from(UNIT)).saturating_sub(4 * 57).min(BUCKETS - 1)
}

/// Times of sampled messages, in buckets whose bounds grow by the fourth root of 2, from 15 nanoseconds to 54 seconds.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// config.latency_sample = 1; // time every message
/// # let phy = options.create(&config)?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// mac.send_inline(7, 0, b"slot 7")?;
/// phy.receive()?;
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// let times = view.times().expect("the link has samples");
/// assert_eq!((times.sample, times.latency.count(), times.hold.count()), (1, 1, 0));
/// assert!(times.latency.quantile(0.5).is_some_and(|half| half.as_secs() < 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TimeHistogram {
    counts: [u64; BUCKETS],
    nanos: u64,
}

impl Default for TimeHistogram {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], nanos: 0 }
    }
}

impl TimeHistogram {
    /// The bound of bucket `i` is `2^((i + FIRST_POWER) / 4)` seconds.
    pub const FIRST_POWER: i32 = -(UNIT as i32);

    /// Number of times that were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of all times.
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.nanos)
    }

    /// The upper bound of each bucket in seconds, with the number of times in the bucket: above the bound before, and not above
    /// its own. The last one counts all longer times, too.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        self.counts.iter().enumerate().map(|(i, &count)| (bound(i), count))
    }

    /// The times that were counted after an earlier state of the same histogram. Counts that went back are 0.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let counts = std::array::from_fn(|i| self.counts[i].saturating_sub(earlier.counts[i]));
        Self { counts, nanos: self.nanos.saturating_sub(earlier.nanos) }
    }

    /// The quantile `share`, 0 to 1, as exactly as the buckets allow: within 19 percent. `None` if nothing was counted.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let all: f64 = self.counts.iter().map(|&count| as_f64(count)).sum();
        let mut wanted = share.clamp(0.0, 1.0) * all;
        let mut last = None;
        for (i, count) in self.counts.iter().map(|&count| as_f64(count)).enumerate() {
            if count > 0.0 {
                last = Some((i, (wanted / count).min(1.0)));
                if wanted <= count {
                    break;
                }
            }
            wanted -= count;
        }
        // Between the bounds of the bucket, as if its times were spread evenly over the logarithms.
        let (i, part) = last?;
        Some(Duration::from_secs_f64(bound(i) * 2.0_f64.powf((part - 1.0) / 4.0)))
    }
}

fn bound(bucket: usize) -> f64 {
    let quarters = f64::from(u8::try_from(bucket).unwrap_or(u8::MAX)) - f64::from(UNIT);
    2.0_f64.powf(quarters / 4.0)
}

#[expect(clippy::cast_precision_loss, reason = "a count that is compared with a share of all")]
fn as_f64(count: u64) -> f64 {
    count as f64
}

/// The times of the sampled messages of a link, since it was created. Of requests and replies, none are sampled.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct LinkTimes {
    /// One message of this many is sampled.
    pub sample: u32,
    /// From sending to receiving.
    pub latency: TimeHistogram,
    /// From receiving a message in a buffer to releasing it.
    pub hold: TimeHistogram,
}

// Not under Miri, which takes minutes for the words of all seats.
#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use super::*;

    #[test]
    fn bucket_of_a_time_is_the_first_whose_bound_it_does_not_exceed() {
        let mut nanos = 1.0_f64;
        while nanos < 100e9 {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 2^37")]
            let time = nanos as u64;
            let seconds = as_f64(time) * 1e-9;
            let found = bucket(time);
            // The bounds are no whole nanoseconds, so a time may be at one within the last digits.
            assert!(found == BUCKETS - 1 || seconds <= bound(found) * 1.000_001, "{time} is in {found}");
            assert!(found == 0 || seconds >= bound(found - 1) * 0.999_999, "{time} is in {found}");
            nanos *= 1.01;
        }
        assert_eq!((bucket(0), bucket(14), bucket(u64::MAX)), (0, 0, BUCKETS - 1));
    }

    #[test]
    fn sums_of_what_a_hostile_peer_writes_do_not_overflow() {
        let times = Times::new(Lines::heap(TIMES_LINES));
        for line in times.0.iter() {
            (0..WORDS_PER_LINE).for_each(|word| line.word(word).store(u64::MAX, Ordering::Relaxed));
        }
        let sum = times.sum(Time::Hold, MAX_SEATS);
        assert!(sum.count() <= 1 << 53 && sum.sum() > Duration::ZERO);
        assert!(sum.buckets().all(|(_, count)| i64::try_from(count).is_ok()));
        assert!([0.0, 0.5, 1.0, f64::NAN, f64::MAX].iter().all(|share| sum.quantile(*share).is_some()));
    }

    #[test]
    fn quantiles_lie_in_the_bucket_that_has_them() {
        let times = Times::new(Lines::heap(TIMES_LINES));
        let seats = [0, 63].map(|seat| SeatIndex::from_wild(seat).unwrap());
        for _ in 0..99 {
            times.count(seats[0], Time::Latency, 1_000);
        }
        times.count(seats[1], Time::Latency, 1_000_000);
        let sum = times.sum(Time::Latency, MAX_SEATS);
        assert_eq!((sum.count(), sum.sum()), (100, Duration::from_nanos(1_099_000)));
        assert_eq!(times.sum(Time::Hold, MAX_SEATS), TimeHistogram::default());
        let micros = |share| sum.quantile(share).unwrap().as_secs_f64() * 1e6;
        assert!((0.8..1.2).contains(&micros(0.5)) && (0.8..1.2).contains(&micros(0.98)), "{}", micros(0.5));
        assert!((800.0..1_200.0).contains(&micros(1.0)), "{}", micros(1.0));
        let since = sum.since(&sum);
        assert_eq!((since.count(), since.quantile(0.5)), (0, None));
        assert_eq!(sum.buckets().map(|(_, count)| count).sum::<u64>(), 100);
    }
}
