//! What may happen as often as a stranger likes is not written into the log as often.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two lines.
const PAUSE: Duration = Duration::from_secs(1);

/// Says whether it is time for another line of one kind.
///
/// ```
/// use shmesh_daemon::seldom::Seldom;
/// let refused = Seldom::default();
/// assert_eq!(refused.next(), Some(0), "the first one is always said");
/// assert_eq!(refused.next(), None, "not twice in a second; the next line says that one was left out");
/// ```
#[derive(Debug, Default)]
pub struct Seldom(Mutex<(Option<Instant>, u64)>);

impl Seldom {
    /// Whether to say it now, and how many were left out since the last time.
    ///
    /// ```
    /// # let unknown = shmesh_daemon::seldom::Seldom::default();
    /// if let Some(left_out) = unknown.next() {
    ///     eprintln!("nobody knows who connected ({left_out} more since the last time)");
    /// }
    /// ```
    pub fn next(&self) -> Option<u64> {
        self.at(Instant::now())
    }

    fn at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, left_out) = &mut *state;
        if last.is_some_and(|last| now.saturating_duration_since(last) < PAUSE) {
            *left_out += 1;
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_and_the_rest_counted() {
        let (seldom, start) = (Seldom::default(), Instant::now());
        let said: Vec<_> = (0..2_500_u64).map(|i| seldom.at(start + Duration::from_millis(i))).collect();
        let lines: Vec<_> = said.into_iter().flatten().collect();
        assert_eq!(lines, [0, 999, 999]);
    }
}
