//! A rate limit for log lines that other processes can trigger.
//!
//! The crate has no dependencies, so that the C libraries can use it without the daemons' event loop.

use std::time::{Duration, Instant};

/// Rate-limits one kind of log line: a burst at first, then one line per interval.
#[derive(Clone, Copy, Debug)]
pub struct LogLimit {
    burst: u32,
    interval: Duration,
    left: u32,
    /// When `left` was last refilled.
    since: Option<Instant>,
    suppressed: u64,
}

impl LogLimit {
    /// Creates a limit of `burst` lines at once and one more per `interval`, which is at least a millisecond.
    #[must_use]
    pub const fn new(burst: u32, interval: Duration) -> Self {
        Self { burst, interval, left: burst, since: None, suppressed: 0 }
    }

    /// Returns the number of lines suppressed since the last one if a line may be written now, else `None`.
    pub fn allow(&mut self, now: Instant) -> Option<u64> {
        let since = *self.since.get_or_insert(now);
        let earned = now.saturating_duration_since(since).as_millis() / self.interval.as_millis().max(1);
        if earned > 0 {
            self.left = self.left.saturating_add(earned.try_into().unwrap_or(self.burst)).min(self.burst);
            self.since = Some(now);
        }
        if self.left == 0 {
            self.suppressed += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_second_counts_suppressed_lines() {
        let (mut limit, start) = (LogLimit::new(1, Duration::from_secs(1)), Instant::now());
        let lines: Vec<_> =
            (0..2_500_u64).filter_map(|i| limit.allow(start + Duration::from_millis(i))).collect();
        assert_eq!(lines, [0, 999, 999]);
    }

    #[test]
    fn burst_is_followed_by_the_steady_rate() {
        let (mut limit, start) = (LogLimit::new(50, Duration::from_millis(200)), Instant::now());
        let lines: Vec<_> =
            (0..10_000_u64).filter_map(|ms| limit.allow(start + Duration::from_millis(ms))).collect();
        assert_eq!(lines.len(), 50 + 9999 / 200);
        assert_eq!(lines.len() as u64 + lines.iter().sum::<u64>() + limit.suppressed, 10_000);
    }

    #[test]
    fn quiet_period_restores_the_burst() {
        let (start, mut limit) = (Instant::now(), LogLimit::new(5, Duration::from_secs(60)));
        let lines: Vec<_> = (0..24 * 3600_u64)
            .filter_map(|second| Some((second, limit.allow(start + Duration::from_secs(second))?)))
            .collect();
        assert_eq!(lines[..6], [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (60, 55)]);
        assert_eq!(lines.len(), 5 + 24 * 60 - 1);
        let after = start + Duration::from_secs(48 * 3600);
        assert_eq!((0..10).filter(|_| limit.allow(after).is_some()).count(), 5);
    }
}
