//! A log that a failing kubelet cannot flood: what happens again and again is said a few times, and then once a while.

use std::time::Duration;

use tokio::time::Instant;

/// Said at once.
const AT_ONCE: u32 = 5;
/// After that, one in so long.
const EVERY: Duration = Duration::from_secs(60);

/// Says when to say something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seldom {
    left: u32,
    /// Since when `left` counts.
    since: Option<Instant>,
    unsaid: u64,
}

impl Default for Seldom {
    fn default() -> Self {
        Self { left: AT_ONCE, since: None, unsaid: 0 }
    }
}

impl Seldom {
    /// Whether to say it now, and how many were not said before.
    pub(crate) fn may(&mut self, now: Instant) -> Option<u64> {
        let since = *self.since.get_or_insert(now);
        let earned = now.saturating_duration_since(since).as_secs() / EVERY.as_secs();
        if earned > 0 {
            self.left = self.left.saturating_add(earned.try_into().unwrap_or(AT_ONCE)).min(AT_ONCE);
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
    fn hours_of_failure_are_few_lines() {
        let (start, mut seldom) = (Instant::now(), Seldom::default());
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
