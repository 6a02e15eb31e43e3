//! Looking for the dead, and taking back what they held.

use std::time::{Duration, Instant};

use super::{Recovered, Shared};
use crate::participant::{Participant, Side, Stage};

/// How often to look for the dead after a connection closed: a process closes its connections before it is gone, and a
/// large one takes long to go. Each time twice as long after the last, from one millisecond.
const REAP_ROUNDS: u32 = 12;
/// Between two rounds at least.
const ROUND_PAUSE: Duration = Duration::from_millis(10);

/// Looking for the dead again and again after a connection closed, each time twice as long after the last. By the clock:
/// whatever else wakes the monitor meanwhile must not use the rounds up.
#[derive(Default)]
pub(super) struct Reap {
    /// The next round and its time.
    next: Option<(u32, Instant)>,
    /// The last round's time.
    last: Option<Instant>,
}

impl Reap {
    pub(super) fn begin(&mut self) {
        // However often something happens, or somebody makes it happen.
        let now = Instant::now();
        self.next = Some((0, self.last.map_or(now, |last| now.max(last + ROUND_PAUSE))));
    }

    /// One round now.
    pub(super) fn once(&mut self) {
        self.once_in(Duration::ZERO);
    }

    /// One round after a while.
    pub(super) fn once_in(&mut self, pause: Duration) {
        self.next = Some((REAP_ROUNDS - 1, Instant::now() + pause));
    }

    pub(super) fn pause(&self) -> Option<Duration> {
        self.next.map(|(_, at)| at.saturating_duration_since(Instant::now()))
    }

    /// Whether it is time; then the next round is set.
    pub(super) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let Some((round, _)) = self.next.filter(|&(_, at)| at <= now) else { return false };
        let after = Duration::from_millis(1 << round);
        self.last = Some(now);
        self.next = (round + 1 < REAP_ROUNDS).then(|| (round + 1, now + after));
        true
    }
}

/// Takes back what participants held that have ended, as far as this process can see them.
pub(super) fn reap(shared: &Shared) {
    let dead: Vec<_> = shared.dead().collect();
    take_back(shared, &dead);
    // A participant may have attached or detached, and died before it woke the others.
    shared.wake_for_events();
}

/// Takes back what dead participants held, from a seat of its own: a seat's lists are its handle's alone.
pub(super) fn take_back(shared: &Shared, dead: &[Participant]) -> Recovered {
    let mut done = Recovered::default();
    if dead.is_empty() {
        return done;
    }
    let me = shared.sit(Side::Primary);
    for other in dead {
        // With every seat taken it is done from their own.
        let seat = me.map_or(other.seat, |me| me.seat);
        if me.is_none() {
            // Recovered from its own seat, it would seem to have detached. Else the event comes when all is taken back.
            shared.core.seats.record_end(other, Stage::Died);
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
    fn rounds_go_by_the_clock() {
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
