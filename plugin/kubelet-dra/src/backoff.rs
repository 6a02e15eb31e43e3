//! Exponential backoff with a maximum, which resets after a quiet period.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::Instant;

/// Delays of successive attempts.
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    last: Duration,
    next: Duration,
    used: Option<Instant>,
    is_scheduled: bool,
}

impl Backoff {
    /// Returns delays from `first` to `last`.
    pub fn new(first: Duration, last: Duration) -> Self {
        Self { first, last, next: first, used: None, is_scheduled: false }
    }

    /// The next delay. It is the first one again if none was needed for twice the maximum.
    pub fn delay(&mut self) -> Duration {
        let now = Instant::now();
        if self.used.is_none_or(|used| now - used > 2 * self.last) {
            self.next = self.first;
        }
        let delay = self.next;
        self.used = Some(now + delay);
        self.next = (delay * 2).min(self.last);
        delay
    }

    /// The delay, unless an attempt is scheduled already.
    pub(crate) fn schedule(&mut self) -> Option<Duration> {
        (!std::mem::replace(&mut self.is_scheduled, true)).then(|| self.delay())
    }

    /// Marks the scheduled attempt as started: later calls of [`schedule`](Self::schedule) schedule another one.
    pub(crate) fn begin(&mut self) {
        self.is_scheduled = false;
    }

    /// Resets to the first delay.
    pub fn reset(&mut self) {
        self.used = None;
    }
}

/// A random part of the time, so that the nodes of a cluster do not all ask at one moment.
pub fn up_to(longest: Duration) -> Duration {
    // `RandomState` has random keys, so the hash of nothing is a random number.
    let random = RandomState::new().hash_one(());
    longest.mul_f64(f64::from(u32::try_from(random >> 32).unwrap_or_default()) / 2f64.powi(32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn delays_double_until_it_is_quiet() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(3));
        let mut delays = || (0..4).map(|_| backoff.delay().as_secs()).collect::<Vec<_>>();
        assert_eq!(delays(), [1, 2, 3, 3]);
        tokio::time::advance(Duration::from_secs(8)).await;
        assert_eq!(delays(), [3, 3, 3, 3]);
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(delays(), [1, 2, 3, 3]);
        backoff.reset();
        assert_eq!(backoff.schedule().map(|delay| delay.as_secs()), Some(1));
        assert_eq!(backoff.schedule(), None);
        backoff.begin();
        assert_eq!(backoff.schedule().map(|delay| delay.as_secs()), Some(2));
    }

    #[test]
    fn random_delays_are_spread_over_the_whole_time() {
        let mut quarters = [0; 4];
        for _ in 0..4_000 {
            quarters[usize::try_from(up_to(Duration::from_secs(4)).as_secs()).expect("it is small")] += 1;
        }
        // A thousand each, and a deviation of 27.
        assert!(quarters.iter().all(|count| (700..1_300).contains(count)), "{quarters:?}");
    }
}
