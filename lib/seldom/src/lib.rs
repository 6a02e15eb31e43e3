//! What may happen as often as others like is not written into the log as often: a few lines at once, and then one in a while.

use std::time::{Duration, Instant};

/// Says whether it is time for another line of one kind.
///
/// ```
/// use std::time::{Duration, Instant};
/// use shmesh_seldom::Seldom;
/// let (mut refused, now) = (Seldom::new(1, Duration::from_secs(1)), Instant::now());
/// assert_eq!(refused.may(now), Some(0), "the first one is always said");
/// assert_eq!(refused.may(now), None, "not twice in a second");
/// assert_eq!(refused.may(now + Duration::from_secs(1)), Some(1), "the next line says that one was left out");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Seldom {
    at_once: u32,
    every: Duration,
    left: u32,
    /// Since when `left` counts.
    since: Option<Instant>,
    unsaid: u64,
}

impl Seldom {
    /// So many lines at once, and after that one in so long, which is a millisecond or more.
    ///
    /// ```
    /// use shmesh_seldom::Seldom;
    /// let failures = Seldom::new(5, std::time::Duration::from_secs(60));
    /// ```
    #[must_use]
    pub const fn new(at_once: u32, every: Duration) -> Self {
        Self { at_once, every, left: at_once, since: None, unsaid: 0 }
    }

    /// Whether to say it now, and how many were not said before.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # let mut unknown = shmesh_seldom::Seldom::new(1, Duration::from_secs(1));
    /// if let Some(unsaid) = unknown.may(Instant::now()) {
    ///     eprintln!("nobody knows who connected ({unsaid} more since the last time)");
    /// }
    /// ```
    pub fn may(&mut self, now: Instant) -> Option<u64> {
        let since = *self.since.get_or_insert(now);
        let earned = now.saturating_duration_since(since).as_millis() / self.every.as_millis().max(1);
        if earned > 0 {
            self.left = self.left.saturating_add(earned.try_into().unwrap_or(self.at_once)).min(self.at_once);
            self.since = Some(now);
        }
        if self.left == 0 {
            self.unsaid += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_and_the_rest_counted() {
        let (mut seldom, start) = (Seldom::new(1, Duration::from_secs(1)), Instant::now());
        let said: Vec<_> = (0..2_500_u64).map(|i| seldom.may(start + Duration::from_millis(i))).collect();
        let lines: Vec<_> = said.into_iter().flatten().collect();
        assert_eq!(lines, [0, 999, 999]);
    }

    #[test]
    fn five_lines_a_second_and_fifty_at_once() {
        let (mut seldom, start) = (Seldom::new(50, Duration::from_millis(200)), Instant::now());
        let said: Vec<_> =
            (0..10_000_u64).filter_map(|ms| seldom.may(start + Duration::from_millis(ms))).collect();
        assert_eq!(said.len(), 50 + 9999 / 200);
        assert_eq!(said.len() as u64 + said.iter().sum::<u64>() + seldom.unsaid, 10_000);
    }

    #[test]
    fn hours_of_failure_are_few_lines() {
        let (start, mut seldom) = (Instant::now(), Seldom::new(5, Duration::from_secs(60)));
        let said: Vec<_> = (0..24 * 3600_u64)
            .filter_map(|second| Some((second, seldom.may(start + Duration::from_secs(second))?)))
            .collect();
        assert_eq!(said[..6], [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (60, 55)]);
        assert_eq!(said.len(), 5 + 24 * 60 - 1);
        // After a quiet time as at first, and no more than that.
        let after = start + Duration::from_secs(48 * 3600);
        let again = (0..10).filter(|_| seldom.may(after).is_some()).count();
        assert_eq!(again, 5);
    }
}
