//! Looking for dead participants, and recovering them.

use std::time::{Duration, Instant};

use super::{RecoveryStats, Shared};
use crate::participant::{Participant, SeatStage, Side};

/// How often to look for dead participants after a connection closed: a process closes its connections before it is gone,
/// and a large one needs time for that. The delay starts at one millisecond and doubles each time.
const REAP_ROUNDS: u32 = 12;
/// Minimum time between two rounds.
const ROUND_PAUSE: Duration = Duration::from_millis(10);

/// Repeated looks for dead participants after a connection closed. The delay doubles each time. Rounds follow the clock:
/// other events that wake the monitor must not use them up.
#[derive(Default)]
pub(super) struct Reap {
    /// The number and time of the next round.
    next: Option<(u32, Instant)>,
    /// The time of the last round.
    last: Option<Instant>,
}

impl Reap {
    pub(super) fn begin(&mut self) {
        // However often events occur, or a hostile process causes them.
        let now = Instant::now();
        self.next = Some((0, self.last.map_or(now, |last| now.max(last + ROUND_PAUSE))));
    }

    /// Schedules one round now.
    pub(super) fn once(&mut self) {
        self.once_in(Duration::ZERO);
    }

    /// Schedules one round after a delay.
    pub(super) fn once_in(&mut self, pause: Duration) {
        self.next = Some((REAP_ROUNDS - 1, Instant::now() + pause));
    }

    pub(super) fn pause(&self) -> Option<Duration> {
        self.next.map(|(_, at)| at.saturating_duration_since(Instant::now()))
    }

    /// Whether a round is due. If so, schedules the next one.
    pub(super) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let Some((round, _)) = self.next.filter(|&(_, at)| at <= now) else { return false };
        let after = Duration::from_millis(1 << round);
        self.last = Some(now);
        self.next = (round + 1 < REAP_ROUNDS).then(|| (round + 1, now + after));
        true
    }
}

/// Recovers participants that have ended, as far as this process can see.
pub(super) fn reap(shared: &Shared) {
    let dead: Vec<_> = shared.dead().collect();
    take_back(shared, &dead);
    // A participant may have attached or detached, and died before it woke the others.
    shared.wake_for_events();
}

/// Recovers dead participants from a seat of its own, because only a handle may use its seat's lists.
pub(super) fn take_back(shared: &Shared, dead: &[Participant]) -> RecoveryStats {
    let mut done = RecoveryStats::default();
    if dead.is_empty() {
        return done;
    }
    let me = shared.sit(Side::Primary);
    for other in dead {
        // If all seats are taken, each is recovered from its own.
        let seat = me.map_or(other.seat, |me| me.seat);
        if me.is_none() {
            // Recovered from its own seat, it would seem to have detached. In the other case, recovery records the death as
            // its last step.
            shared.core.seats.record_end(other, SeatStage::Died);
        }
        done.add(shared.core.reclaim(other, seat, false));
    }
    if let Some(me) = me {
        shared.unlock(&me);
        shared.core.seats.vacate(&me);
    }
    shared.core.seats.count_recovered(done.participants);
    shared.wake_after_a_death();
    for other in dead {
        shared.remove_bell(other);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_follow_the_clock() {
        let mut reap = Reap::default();
        assert!(!reap.is_due() && reap.pause().is_none());
        reap.begin();
        assert!(reap.is_due(), "the first round is at once");
        let first = Instant::now();
        reap.begin();
        while !reap.is_due() {}
        assert!(first.elapsed() >= ROUND_PAUSE / 2, "however often it begins");
        // However often something else wakes the monitor.
        while !reap.is_due() {}
        let (round, _) = reap.next.expect("ten more");
        assert_eq!(round, 2);
        assert!(reap.pause().is_some_and(|pause| pause <= Duration::from_millis(2)));
        reap.next = Some((REAP_ROUNDS - 1, Instant::now()));
        assert!(reap.is_due() && reap.next.is_none(), "that was the last");
    }
}
