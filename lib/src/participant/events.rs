//! Peer events: participants attach, detach, die or are evicted, or messages were lost between nodes.
//!
//! Each seat has a history, one word that says how its latest participants ended. A reader compares all histories with those
//! that it has seen, so there is no queue in shared memory that a slow reader could fill.
//!
//! `EVENT`: a history is changed with Release and read with Acquire; the word of the participant that attached is written before. A
//! reader that goes to sleep between two looks is woken as by a message: DEKKER, in [`crate::notify`].

use std::collections::VecDeque;

use super::{
    EPOCH_SHIFT, MAX_SEATS, PID_NAMESPACE, Participant, START_TIME, SeatIndex, SeatWord, Seats, Side, low,
};
use crate::notify::Sleepers;
use crate::sync::{AtomicU64, Ordering};

/// A change of another participant of the link.
///
/// Each handle is a participant of its own, also a clone.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// use shmesh::{PeerEvent, Side};
/// let mac = options.attach("fronthaul", Side::Secondary)?;
/// let Some(PeerEvent::Attached(peer)) = phy.next_event() else { panic!("it has attached") };
/// assert_eq!((peer.seat, peer.word.pid(), peer.word.side()), (mac.seat(), std::process::id(), Side::Secondary));
/// drop(mac);
/// assert_eq!(phy.next_event(), Some(PeerEvent::Detached(peer)));
/// assert_eq!(phy.next_event(), None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum PeerEvent {
    /// It attached, or was attached already when this handle attached.
    Attached(Participant),
    /// It dropped its handle.
    Detached(Participant),
    /// Its process ended without detaching, and its buffers were recovered.
    Died(Participant),
    /// It was evicted by [`Link::evict`](crate::Link::evict) while its process was alive. No further event follows for
    /// it.
    Evicted(Participant),
    /// This many participants attached and ended between two looks, or ended in a way that is no longer known.
    /// [`Link::participants`](crate::Link::participants) lists those that are attached now.
    Missed(u32),
    /// This many messages and posts for this side were lost between two nodes since the last look; [`Link::lost`](crate::Link::lost) counts them,
    /// too. The event is there before the first message after them.
    Lost(u64),
}

/// The state of one participant in a history.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum SeatStage {
    Attached = 1,
    Detached = 2,
    Died = 3,
    Evicted = 4,
}

impl SeatStage {
    /// The event that reports this end of `peer`.
    fn end_of(self, peer: Participant) -> Option<PeerEvent> {
        match self {
            Self::Attached => None,
            Self::Detached => Some(PeerEvent::Detached(peer)),
            Self::Died => Some(PeerEvent::Died(peer)),
            Self::Evicted => Some(PeerEvent::Evicted(peer)),
        }
    }
}

/// Offset in the line behind the seats: participants that sleep until there is an event, one bit per seat.
const EVENT_SLEEPERS: usize = 2;
/// Offset in the line behind the seats: the futex on which they sleep.
const EVENT_WAKES: usize = 3;
/// Offsets in the line behind the seats: messages of the primary and of the secondary side that were lost between nodes.
const LOST: [usize; 2] = [4, 5];
/// Offset in the line of a seat: its history.
const HISTORY: usize = 5;
/// Offset in the line of a seat: the seat word of the latest participant in the history.
const ATTACHED: usize = 6;
const STAGE_BITS: u32 = 3;
const STAGE_MASK: u64 = (1 << STAGE_BITS) - 1;
/// Participants that a history covers.
const DEPTH: u16 = 10;
const STAGES_BITS: u32 = 10 * STAGE_BITS;
const COUNT_SHIFT: u32 = STAGES_BITS;
/// Set once participants that sleep or have a bell were woken since the last change.
const WOKEN: u64 = 1 << 47;

/// The word of a seat's history.
///
/// A participant that is not admitted, or that recovery seats for a moment, is not in the history. So the count of the
/// participants that are differs from the epoch.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct History(u64);

#[expect(clippy::cast_possible_truncation, reason = "fields of 16 bits")]
impl History {
    fn epoch(self) -> u16 {
        (self.0 >> EPOCH_SHIFT) as u16
    }

    fn count(self) -> u16 {
        (self.0 >> COUNT_SHIFT) as u16
    }

    /// The stage of the participant that attached `age` participants before the latest.
    fn stage(self, age: u16) -> Option<SeatStage> {
        if age >= DEPTH {
            return None;
        }
        match self.0 >> (u32::from(age) * STAGE_BITS) & STAGE_MASK {
            1 => Some(SeatStage::Attached),
            2 => Some(SeatStage::Detached),
            3 => Some(SeatStage::Died),
            4 => Some(SeatStage::Evicted),
            _ => None,
        }
    }

    /// Whether `who` is the latest participant, and attached.
    pub(super) fn is_attached(self, who: &Participant) -> bool {
        self.epoch() == who.short_epoch() && self.stage(0) == Some(SeatStage::Attached)
    }

    fn attached(self, epoch: u16) -> Self {
        let count = u64::from(self.count().wrapping_add(1));
        let past = low(self.0 << STAGE_BITS, STAGES_BITS);
        Self(u64::from(epoch) << EPOCH_SHIFT | count << COUNT_SHIFT | past | SeatStage::Attached as u64)
    }

    fn ended(self, stage: SeatStage) -> Self {
        Self(self.0 & !WOKEN & !STAGE_MASK | stage as u64)
    }

    /// The history without the mark that waiting participants were woken.
    pub(super) fn unmarked(self) -> Self {
        Self(self.0 & !WOKEN)
    }

    /// The history as it was before the latest participant.
    fn before(self) -> Self {
        Self(u64::from(self.count().wrapping_sub(1)) << COUNT_SHIFT)
    }
}

impl Participant {
    #[expect(clippy::cast_possible_truncation, reason = "an epoch has 16 bits")]
    fn short_epoch(&self) -> u16 {
        self.word.epoch() as u16
    }
}

impl Seats {
    /// Records that `me` has attached. Only for the participant itself, once.
    pub(crate) fn record_attached(&self, me: &Participant) {
        self.lines[me.seat.as_usize()].word(ATTACHED).store(me.word.0, Ordering::Relaxed);
        self.record(me.seat, |history| Some(history.attached(me.short_epoch())));
    }

    /// Records how `who` ended, before its seat is vacated. The first record counts; nothing happens if `who` was not
    /// recorded as attached.
    pub(crate) fn record_end(&self, who: &Participant, stage: SeatStage) {
        self.record(who.seat, |history| history.is_attached(who).then(|| history.ended(stage)));
    }

    fn record(&self, seat: SeatIndex, next: impl Fn(History) -> Option<History>) {
        let word = self.lines[seat.as_usize()].word(HISTORY);
        let mut current = word.load(Ordering::Relaxed);
        // One round for each participant that may be recovering the last one.
        for _ in 0..MAX_SEATS {
            let Some(next) = next(History(current)) else { return };
            // EVENT
            match word.compare_exchange(current, next.0, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => current = now,
            }
        }
    }

    pub(super) fn history(&self, seat: SeatIndex) -> History {
        // EVENT
        History(self.lines[seat.as_usize()].word(HISTORY).load(Ordering::Acquire))
    }

    /// The participant of this epoch, if it is the latest in the history of the seat.
    fn latest(&self, seat: SeatIndex, epoch: u16) -> Option<Participant> {
        let line = &self.lines[seat.as_usize()];
        let word = SeatWord(line.word(ATTACHED).load(Ordering::Relaxed));
        let peer = Participant {
            seat,
            word,
            start_time: word.of_detail(line.word(START_TIME).load(Ordering::Relaxed)),
            pid_namespace: word.of_detail(line.word(PID_NAMESPACE).load(Ordering::Relaxed)),
        };
        (word.is_live() && peer.short_epoch() == epoch).then_some(peer)
    }

    /// The participants that sleep until there is an event.
    pub(crate) fn event_sleepers(&self) -> Sleepers<'_> {
        let line = &self.lines[MAX_SEATS];
        Sleepers::new(line.word(EVENT_SLEEPERS), line.word(EVENT_WAKES))
    }

    fn lost_of(&self, side: Side) -> &AtomicU64 {
        let place = match side {
            Side::Primary => LOST[0],
            Side::Secondary => LOST[1],
        };
        self.lines[MAX_SEATS].word(place)
    }

    /// Counts messages of this side that were lost before they reached the link.
    pub(crate) fn count_lost(&self, side: Side, messages: u64) {
        // Relaxed: a receiver that gets a message which is sent later synchronizes with its sender, and so sees this count.
        self.lost_of(side).fetch_add(messages, Ordering::Relaxed);
    }

    /// How many messages of this side were lost before they reached the link, since it was created.
    fn lost(&self, side: Side) -> u64 {
        self.lost_of(side).load(Ordering::Relaxed)
    }

    /// The seats whose histories have changed since waiting participants were last woken.
    fn unwoken(&self) -> impl Iterator<Item = (SeatIndex, History)> + '_ {
        let histories = SeatIndex::all().take(self.used()).map(|seat| (seat, self.history(seat)));
        histories.filter(|(_, history)| history.0 & WOKEN == 0 && history.stage(0).is_some())
    }

    /// Wakes participants that wait for events, by `wake`. Returns `false` without a wake-up if one already followed
    /// all changes. Called after each change of a history, and by the monitor of each process, because the first caller
    /// may have died before it.
    pub(crate) fn wake_for_events(&self, wake: impl FnOnce()) -> bool {
        let changed: Vec<_> = self.unwoken().collect();
        if changed.is_empty() {
            return false;
        }
        wake();
        for (seat, history) in changed {
            // Refused when it has changed again. Relaxed: no other process depends on this change.
            let _ = self.lines[seat.as_usize()].word(HISTORY).compare_exchange(
                history.0,
                history.0 | WOKEN,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
        true
    }
}

/// The state of all other participants as one handle has seen it.
#[derive(Debug)]
pub(crate) struct PeerObserver {
    me: SeatIndex,
    /// Known histories, by seat.
    known: Vec<KnownSeat>,
    pending: VecDeque<PeerEvent>,
    /// The side whose messages are for this handle, and how many of them were lost before it attached and before the last look.
    senders: Side,
    lost_before: u64,
    known_lost: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct KnownSeat {
    history: History,
    /// The participant that was reported as attached and not yet as gone, with the count of the history then.
    present: Option<(u16, Participant)>,
}

impl PeerObserver {
    /// Reports participants that are attached now as newly attached; earlier ones are not reported.
    pub(crate) fn new(seats: &Seats, me: SeatIndex, side: Side) -> Self {
        let known = |seat| {
            let history = seats.history(seat).unmarked();
            let is_attached = history.stage(0) == Some(SeatStage::Attached);
            KnownSeat { history: if is_attached { history.before() } else { history }, present: None }
        };
        let known = SeatIndex::all().take(seats.used()).map(known).collect();
        let senders = side.opposite();
        let lost_before = seats.lost(senders);
        Self { me, known, pending: VecDeque::new(), senders, lost_before, known_lost: lost_before }
    }

    /// Messages for this handle that were lost between nodes since it attached.
    pub(crate) fn lost(&self, seats: &Seats) -> u64 {
        seats.lost(self.senders).wrapping_sub(self.lost_before)
    }

    /// Whether there is an event.
    pub(crate) fn look(&mut self, seats: &Seats) -> bool {
        if self.pending.is_empty() {
            self.compare(seats);
        }
        !self.pending.is_empty()
    }

    /// The next event. Participants that have gone are reported before those that have come.
    pub(crate) fn next(&mut self, seats: &Seats) -> Option<PeerEvent> {
        if self.look(seats) { self.pending.pop_front() } else { None }
    }

    fn compare(&mut self, seats: &Seats) {
        if self.known.len() < seats.used() {
            self.known.resize(seats.used(), KnownSeat::default());
        }
        let (mut attached, mut missed) = (Vec::new(), 0);
        for (seat, known) in SeatIndex::all().zip(&mut self.known).filter(|(seat, _)| *seat != self.me) {
            let now = seats.history(seat).unmarked();
            if now == known.history {
                continue;
            }
            let before = std::mem::replace(&mut known.history, now);
            if let Some((count, peer)) = known.present {
                let age = now.count().wrapping_sub(count);
                let stage = now.stage(age);
                if age > 0 || stage != Some(SeatStage::Attached) {
                    known.present = None;
                    match stage.and_then(|stage| stage.end_of(peer)) {
                        Some(end) => self.pending.push_back(end),
                        None => missed += 1,
                    }
                }
            }
            let newer = now.count().wrapping_sub(before.count());
            let (true, Some(stage)) = (newer > 0, now.stage(0)) else { continue };
            missed += u32::from(newer) - 1;
            let Some(peer) = seats.latest(seat, now.epoch()) else {
                missed += 1;
                continue;
            };
            attached.push(PeerEvent::Attached(peer));
            match stage.end_of(peer) {
                Some(end) => attached.push(end),
                None => known.present = Some((now.count(), peer)),
            }
        }
        self.pending.extend(attached);
        self.pending.extend((missed > 0).then_some(PeerEvent::Missed(missed)));
        let lost = seats.lost(self.senders);
        let more = lost.wrapping_sub(std::mem::replace(&mut self.known_lost, lost));
        self.pending.extend((more > 0).then_some(PeerEvent::Lost(more)));
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use shmesh_sys::process::ProcessIdentity;

    use super::*;
    use crate::participant::SEAT_LINES;
    use crate::segment::Memory;

    fn table() -> Seats {
        Seats::new(Memory::heap(SEAT_LINES).window(0, SEAT_LINES).unwrap())
    }

    fn sit(seats: &Seats, pid: u32) -> Participant {
        seats.attach(&ProcessIdentity { pid, start_time: 7, pid_namespace: 9 }, Side::Secondary).unwrap()
    }

    fn join(seats: &Seats, pid: u32) -> Participant {
        let me = sit(seats, pid);
        seats.record_attached(&me);
        me
    }

    fn end(seats: &Seats, who: &Participant, stage: SeatStage) {
        seats.record_end(who, stage);
        assert!(seats.vacate(who));
    }

    fn drain(observer: &mut PeerObserver, seats: &Seats) -> Vec<PeerEvent> {
        std::iter::from_fn(|| observer.next(seats)).collect()
    }

    #[test]
    fn lost_messages_of_the_other_side_are_reported_once() {
        let seats = table();
        seats.count_lost(Side::Primary, u64::MAX - 1);
        let me = join(&seats, 1);
        let mut observer = PeerObserver::new(&seats, me.seat, Side::Secondary);
        seats.count_lost(Side::Secondary, 9);
        assert_eq!((drain(&mut observer, &seats), observer.lost(&seats)), (vec![], 0), "not for this side");
        seats.count_lost(Side::Primary, 3);
        assert_eq!(drain(&mut observer, &seats), [PeerEvent::Lost(3)], "the count has wrapped around");
        seats.count_lost(Side::Primary, 1);
        let other = join(&seats, 2);
        assert_eq!(drain(&mut observer, &seats), [PeerEvent::Attached(other), PeerEvent::Lost(1)]);
        assert_eq!((drain(&mut observer, &seats), observer.lost(&seats)), (vec![], 4));
    }

    #[test]
    fn earlier_participants_are_reported_and_silent_ones_are_not() {
        let seats = table();
        let gone = join(&seats, 1);
        end(&seats, &gone, SeatStage::Died);
        let old = join(&seats, 2);
        let me = join(&seats, 3);
        let mut observer = PeerObserver::new(&seats, me.seat, Side::Secondary);
        assert_eq!(drain(&mut observer, &seats), [PeerEvent::Attached(old)]);
        for _ in 0..100 {
            let recoverer = sit(&seats, 4);
            seats.record_end(&recoverer, SeatStage::Detached);
            assert!(seats.vacate(&recoverer));
        }
        assert_eq!(drain(&mut observer, &seats), []);
        let new = join(&seats, 5);
        assert_eq!(drain(&mut observer, &seats), [PeerEvent::Attached(new)]);
        end(&seats, &old, SeatStage::Detached);
        assert_eq!(drain(&mut observer, &seats), [PeerEvent::Detached(old)]);
    }

    #[test]
    fn short_life_is_reported_and_earlier_ones_are_counted() {
        let seats = table();
        let me = join(&seats, 1);
        let mut observer = PeerObserver::new(&seats, me.seat, Side::Secondary);
        let first = join(&seats, 2);
        end(&seats, &first, SeatStage::Died);
        assert_eq!(drain(&mut observer, &seats), [PeerEvent::Attached(first), PeerEvent::Died(first)]);
        let seen = join(&seats, 3);
        assert_eq!(drain(&mut observer, &seats), [PeerEvent::Attached(seen)]);
        end(&seats, &seen, SeatStage::Evicted);
        for pid in 4..7 {
            end(&seats, &join(&seats, pid), SeatStage::Detached);
        }
        let last = join(&seats, 7);
        let all = [PeerEvent::Evicted(seen), PeerEvent::Attached(last), PeerEvent::Missed(3)];
        assert_eq!(drain(&mut observer, &seats), all);
        end(&seats, &last, SeatStage::Died);
        for pid in 8..8 + u32::from(DEPTH) {
            end(&seats, &join(&seats, pid), SeatStage::Detached);
        }
        let events = drain(&mut observer, &seats);
        assert!(matches!(
            events[..],
            [PeerEvent::Attached(_), PeerEvent::Detached(_), PeerEvent::Missed(10)]
        ));
    }

    #[test]
    fn first_recorded_end_counts() {
        let seats = table();
        let me = join(&seats, 1);
        let mut observer = PeerObserver::new(&seats, me.seat, Side::Secondary);
        let peer = join(&seats, 2);
        seats.record_end(&peer, SeatStage::Evicted);
        end(&seats, &peer, SeatStage::Died);
        let next = join(&seats, 3);
        seats.record_end(&peer, SeatStage::Died);
        let events = [PeerEvent::Attached(next), PeerEvent::Missed(1)];
        assert_eq!(drain(&mut observer, &seats), events);
    }

    #[test]
    fn each_change_causes_one_wake_up() {
        let seats = table();
        let woken = || {
            let mut woken = false;
            assert_eq!(seats.wake_for_events(|| woken = true), woken);
            woken
        };
        assert!(!woken());
        let peer = join(&seats, 1);
        assert!(woken() && !woken());
        seats.record_end(&peer, SeatStage::Died);
        assert!(woken() && !woken());
        assert!(seats.vacate(&peer) && !woken());
        let silent = sit(&seats, 2);
        assert!(seats.vacate(&silent) && !woken());
    }

    /// Another participant of the link may write anything.
    #[test]
    fn hostile_histories_give_bounded_events() {
        let seats = table();
        let me = join(&seats, 1);
        let mut observer = PeerObserver::new(&seats, me.seat, Side::Secondary);
        seats.lines[MAX_SEATS].word(0).store(u64::MAX, Ordering::Relaxed);
        for wild in [u64::MAX, 0, 1 << 63, 0x5555_5555_5555_5555, u64::MAX >> 1] {
            for seat in SeatIndex::all() {
                seats.lines[seat.as_usize()].word(HISTORY).store(wild, Ordering::Relaxed);
                seats.lines[seat.as_usize()].word(ATTACHED).store(!wild | 1, Ordering::Relaxed);
            }
            assert!(drain(&mut observer, &seats).len() <= 3 * MAX_SEATS + 1);
        }
    }

    proptest! {
        /// Whatever happens between two looks: attached before gone, each once, and with what was missed nothing is unaccounted.
        #[test]
        #[cfg_attr(miri, ignore = "too many cases")]
        fn each_participant_is_reported_once(steps in prop::collection::vec((0_u8..6, any::<prop::sample::Index>()), 1..200)) {
            let seats = table();
            let me = join(&seats, 1);
            let mut observer = PeerObserver::new(&seats, me.seat, Side::Secondary);
            let mut present: Vec<Participant> = Vec::new();
            let (mut begun, mut pid, mut missed) = (0, 1, 0);
            let mut reported: HashMap<u32, Option<SeatStage>> = HashMap::new();
            let mut ended: HashMap<u32, SeatStage> = HashMap::new();
            for (step, which) in steps {
                pid += 1;
                match step {
                    0 | 1 if present.len() < 5 => {
                        present.push(join(&seats, pid));
                        begun += 1;
                    }
                    2 => prop_assert!(seats.vacate(&sit(&seats, pid))),
                    3 | 4 if !present.is_empty() => {
                        let who = present.swap_remove(which.index(present.len()));
                        let stage = [SeatStage::Detached, SeatStage::Died, SeatStage::Evicted][which.index(3)];
                        end(&seats, &who, stage);
                        ended.insert(who.word.pid(), stage);
                    }
                    _ => for event in drain(&mut observer, &seats) {
                        let (peer, stage) = match event {
                            PeerEvent::Attached(peer) => (peer, None),
                            PeerEvent::Detached(peer) => (peer, Some(SeatStage::Detached)),
                            PeerEvent::Died(peer) => (peer, Some(SeatStage::Died)),
                            PeerEvent::Evicted(peer) => (peer, Some(SeatStage::Evicted)),
                            PeerEvent::Missed(count) => { missed += count; continue }
                            PeerEvent::Lost(_) => unreachable!("none is counted"),
                        };
                        let before = reported.insert(peer.word.pid(), stage);
                        prop_assert_eq!(before, stage.map(|_| None));
                        prop_assert!(stage.is_none() || ended.get(&peer.word.pid()) == stage.as_ref());
                    },
                }
            }
            for event in drain(&mut observer, &seats) {
                if let PeerEvent::Missed(count) = event { missed += count }
                if let PeerEvent::Attached(peer) = event { reported.insert(peer.word.pid(), None); }
            }
            // A participant that ended in a way that is no longer known counts as missed, though it was reported as
            // attached.
            prop_assert!(u32::try_from(reported.len()).unwrap() + missed >= begun);
            for peer in present {
                prop_assert!(reported.contains_key(&peer.word.pid()));
            }
        }
    }
}
