//! One line for each refusal, on standard error: NVIPC's functions return -1 and nothing else.

use std::fmt::Arguments;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// So many lines at once, and after that one in so long.
struct Budget {
    at_once: u32,
    every: Duration,
    left: u32,
    since: Option<Instant>,
    unsaid: u64,
}

/// What an application does wrong, perhaps in a loop.
static REFUSALS: Mutex<Budget> = Mutex::new(Budget::new(50, Duration::from_millis(200)));
/// What is ordinary, as a pool that is empty for a while: an application that polls it would write millions.
static ORDINARY: Mutex<Budget> = Mutex::new(Budget::new(1, Duration::from_secs(10)));

impl Budget {
    const fn new(at_once: u32, every: Duration) -> Self {
        Self { at_once, every, left: at_once, since: None, unsaid: 0 }
    }

    /// Whether to say it, and how many lines were not said before.
    fn may(&mut self, now: Instant) -> Option<u64> {
        let since = *self.since.get_or_insert(now);
        let earned = now.saturating_duration_since(since).as_millis() / self.every.as_millis();
        if earned > 0 {
            self.left =
                self.left.saturating_add(u32::try_from(earned).unwrap_or(self.at_once)).min(self.at_once);
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

/// Writes a line, unless there were too many.
#[cold]
#[inline(never)]
pub(crate) fn line(text: Arguments<'_>) {
    write(&REFUSALS, text);
}

/// As [`line()`], of what is ordinary.
#[cold]
#[inline(never)]
pub(crate) fn ordinary(text: Arguments<'_>) {
    write(&ORDINARY, text);
}

fn write(budget: &Mutex<Budget>, text: Arguments<'_>) {
    let said = budget.lock().unwrap_or_else(PoisonError::into_inner).may(Instant::now());
    let Some(unsaid) = said else { return };
    let more =
        if unsaid > 0 { format!(" ({unsaid} such lines before it were left out)") } else { String::new() };
    // Whole lines, also from several threads. A program without standard error has no use for them.
    let _ = std::io::stderr().lock().write_all(format!("shmesh_nvipc: {text}{more}\n").as_bytes());
}

macro_rules! say {
    ($($text:tt)*) => { $crate::log::line(format_args!($($text)*)) };
}
pub(crate) use say;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_of_failures_is_few_lines_and_the_rest_counted() {
        let mut budget = Budget::new(50, Duration::from_millis(200));
        let start = Instant::now();
        let said: Vec<u64> =
            (0..10_000_u64).filter_map(|ms| budget.may(start + Duration::from_millis(ms))).collect();
        assert!(said.len() < 110, "{} lines in ten seconds", said.len());
        let unsaid: u64 = said.iter().sum();
        assert_eq!(said.len() as u64 + unsaid + budget.unsaid, 10_000);
    }
}
