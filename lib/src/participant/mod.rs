//! The participant table: the processes that are attached to a link.
//!
//! A participant is one attached handle of one process. It sits in a seat, and everything that it holds in shared
//! memory names the seat. One word says which participant sits there, so attaching and leaving are one compare-and-swap
//! each; a process that dies in between has either attached, with its identity, or not.
//!
//! A seat is given away only after everything that its last holder held was recovered (`crate::link::recover`).

mod admission;
mod events;
mod role;
pub(crate) mod times;

pub(crate) use admission::Admission;
pub use events::PeerEvent;
pub(crate) use events::{PeerObserver, SeatStage};
pub(crate) use role::Role;

use shmesh_sys::process::{Liveness, ProcessIdentity};

use crate::segment::Lines;
use crate::sync::{AtomicU64, Ordering};

/// Maximum number of participants of a link: one bit each in the word of sleepers.
pub const MAX_SEATS: usize = if cfg!(loom) { 4 } else { 64 };

/// A seat in the participant table: `0..64`.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SeatIndex(u8);

impl SeatIndex {
    /// Checks a number that may come from shared memory; `None` if there is no such seat.
    #[must_use]
    #[inline]
    pub fn from_wild(wild: u64) -> Option<Self> {
        // The cast keeps 6 bits.
        #[expect(clippy::cast_possible_truncation, reason = "checked to be below 64")]
        (wild < MAX_SEATS as u64).then_some(Self(wild as u8))
    }

    /// The number of the seat.
    #[must_use]
    #[inline]
    pub fn value(self) -> u8 {
        self.0
    }

    pub(crate) fn as_usize(self) -> usize {
        usize::from(self.0)
    }

    /// The bit of this seat in a mask of all seats.
    pub(crate) fn bit(self) -> u64 {
        1 << self.0
    }

    /// All seats, in their order.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..64).take(MAX_SEATS).map(Self)
    }
}

impl std::fmt::Display for SeatIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Which end of the link a participant is on.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Side {
    /// Creates the link; sends on ring `m2s`, receives on `s2m`. NVIPC's PHY.
    Primary,
    /// Attaches to the link; sends on ring `s2m`, receives on `m2s`. NVIPC's MAC.
    Secondary,
}

impl Side {
    /// The side that receives what this one sends.
    pub(crate) fn opposite(self) -> Self {
        match self {
            Self::Primary => Self::Secondary,
            Self::Secondary => Self::Primary,
        }
    }
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Primary => "primary",
            Self::Secondary => "secondary",
        })
    }
}

const LIVE: u64 = 1;
const EVICTED: u64 = 1 << 1;
const SECONDARY: u64 = 1 << 2;
const PID_SHIFT: u32 = 3;
const PID_BITS: u32 = 22;
const NAMESPACE_SHIFT: u32 = PID_SHIFT + PID_BITS;
const NAMESPACE_BITS: u32 = 11;
const START_SHIFT: u32 = NAMESPACE_SHIFT + NAMESPACE_BITS;
const START_BITS: u32 = 12;
const EPOCH_SHIFT: u32 = START_SHIFT + START_BITS;

const fn low(value: u64, bits: u32) -> u64 {
    value & ((1 << bits) - 1)
}

/// The word of a seat: the participant that sits there.
///
/// The next participant in the seat has another word, because one field counts them. So a word identifies a participant.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SeatWord(u64);

impl SeatWord {
    fn taken(self, who: &ProcessIdentity, side: Side) -> Self {
        let epoch = low(self.epoch().wrapping_add(1), 16);
        Self(
            epoch << EPOCH_SHIFT
                | low(who.start_time, START_BITS) << START_SHIFT
                | low(who.pid_namespace, NAMESPACE_BITS) << NAMESPACE_SHIFT
                | low(u64::from(who.pid), PID_BITS) << PID_SHIFT
                | if side == Side::Secondary { SECONDARY } else { 0 }
                | LIVE,
        )
    }

    fn vacated(self) -> Self {
        Self(self.epoch() << EPOCH_SHIFT)
    }

    /// Combines a value with the epoch, so that it cannot be mistaken for a value of a predecessor in the seat.
    pub(crate) fn detail(self, value: u64) -> u64 {
        self.epoch() << EPOCH_SHIFT | low(value, EPOCH_SHIFT)
    }

    /// The value of a detail, or 0 if it belongs to another participant.
    pub(crate) fn of_detail(self, detail: u64) -> u64 {
        if self.is_own(detail) { low(detail, EPOCH_SHIFT) } else { 0 }
    }

    /// Whether a detail belongs to the participant with this word.
    pub(crate) fn is_own(self, detail: u64) -> bool {
        detail >> EPOCH_SHIFT == self.epoch()
    }

    /// Whether both words identify the same participant, evicted or not.
    pub(crate) fn is_same(self, other: Self) -> bool {
        self.0 & !EVICTED == other.0 & !EVICTED
    }

    #[inline]
    pub(crate) fn is(self, word: u64) -> bool {
        self.0 == word
    }

    /// The word as a number, to be sent to another process.
    #[must_use]
    pub fn value(self) -> u64 {
        self.0
    }

    /// A word that came from another process: it is valid only where the same word is in the table.
    #[must_use]
    pub fn from_wild(word: u64) -> Self {
        Self(word)
    }

    /// Whether the seat is taken, by a living or dead participant.
    #[must_use]
    pub(crate) fn is_live(self) -> bool {
        self.0 & LIVE != 0
    }

    /// Whether the participant was declared dead while it may still run.
    #[must_use]
    pub fn is_evicted(self) -> bool {
        self.0 & EVICTED != 0
    }

    /// The side of the participant.
    #[must_use]
    pub fn side(self) -> Side {
        if self.0 & SECONDARY == 0 { Side::Primary } else { Side::Secondary }
    }

    /// Process id, as numbered in its own pid namespace.
    #[must_use]
    pub fn pid(self) -> u32 {
        u32::try_from(low(self.0 >> PID_SHIFT, PID_BITS)).unwrap_or(0)
    }

    /// How many participants sat here before, modulo 65536.
    #[must_use]
    pub(crate) fn epoch(self) -> u64 {
        self.0 >> EPOCH_SHIFT
    }
}

/// One occupied seat, as read at one instant.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// let me = link.participants().next().expect("this handle is attached");
/// assert_eq!((me.seat, me.word.pid()), (link.seat(), std::process::id()));
/// assert!(me.start_time > 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Participant {
    /// The seat of the participant.
    pub seat: SeatIndex,
    /// The identity word of the participant.
    pub word: SeatWord,
    /// Start time of the process in clock ticks after boot; 0 while it is attaching.
    pub start_time: u64,
    /// Inode of its pid namespace; 0 while it is attaching.
    pub pid_namespace: u64,
}

impl Participant {
    /// Whether the participant is a handle of this very process. A process id alone proves nothing, because each
    /// container has a process 1.
    #[must_use]
    pub(crate) fn is_of(&self, process: &ProcessIdentity) -> bool {
        (self.word.pid(), self.start_time, self.pid_namespace)
            == (process.pid, process.start_time, process.pid_namespace)
    }

    /// Whether the participant is alive, as far as this process can tell: the process ids of another pid namespace
    /// prove nothing here.
    ///
    /// Asks the kernel each time. `me` is the asking process.
    #[must_use]
    pub fn liveness(&self, me: &ProcessIdentity) -> Liveness {
        let namespace_differs = if self.pid_namespace == 0 {
            low(self.word.0 >> NAMESPACE_SHIFT, NAMESPACE_BITS) != low(me.pid_namespace, NAMESPACE_BITS)
        } else {
            self.pid_namespace != me.pid_namespace
        };
        if namespace_differs || me.pid_namespace == 0 {
            return Liveness::Unknown;
        }
        let start_time = match me.start_time_of(self.word.pid()) {
            Ok(Some(start_time)) => start_time,
            Ok(None) => return Liveness::Dead,
            Err(_) => return Liveness::Unknown,
        };
        let same = if self.start_time == 0 {
            low(start_time, START_BITS) == low(self.word.0 >> START_SHIFT, START_BITS)
        } else {
            start_time == self.start_time
        };
        if same { Liveness::Alive } else { Liveness::Dead }
    }
}

/// The participant table of a link: one line per seat.
#[derive(Clone, Debug)]
pub(crate) struct Seats {
    lines: Lines,
}

/// Lines that the table takes: one per seat, and one for the number of seats ever used.
pub(crate) const SEAT_LINES: usize = MAX_SEATS + 1;

const START_TIME: usize = 1;
const PID_NAMESPACE: usize = 2;
/// Number of the lock file in which the seat's byte is locked.
const LOCK: usize = 3;
/// Offset in the line of a seat: how often its participants have woken a receiver by a system call, since the link was
/// created.
const RUNG: usize = 4;
/// Offset in the line behind the seats: number of participants recovered since the link was created.
const RECOVERED: usize = 1;

impl Seats {
    pub(crate) fn new(lines: Lines) -> Self {
        debug_assert_eq!(lines.len(), SEAT_LINES);
        Self { lines }
    }

    #[inline]
    fn word(&self, seat: SeatIndex) -> &AtomicU64 {
        self.lines[seat.as_usize()].word(0)
    }

    /// Takes a free seat. `None` if all seats are taken.
    pub(crate) fn attach(&self, who: &ProcessIdentity, side: Side) -> Option<Participant> {
        for seat in SeatIndex::all() {
            let vacant = SeatWord(self.word(seat).load(Ordering::Relaxed));
            if vacant.is_live() {
                continue;
            }
            let taken = vacant.taken(who, side);
            // Acquire pairs with the Release of `vacate`: everything the last holder held was recovered before.
            if self
                .word(seat)
                .compare_exchange(vacant.0, taken.0, Ordering::Acquire, Ordering::Relaxed)
                .is_err()
            {
                continue;
            }
            let line = &self.lines[seat.as_usize()];
            line.word(PID_NAMESPACE).store(taken.detail(who.pid_namespace), Ordering::Relaxed);
            line.word(START_TIME).store(taken.detail(who.start_time), Ordering::Relaxed);
            self.lines[MAX_SEATS].word(0).fetch_max(seat.as_usize() as u64 + 1, Ordering::Relaxed);
            return Some(Participant {
                seat,
                word: taken,
                start_time: who.start_time,
                pid_namespace: who.pid_namespace,
            });
        }
        None
    }

    /// Seats `0..n` have been used since the link was created. Never more than [`MAX_SEATS`].
    #[inline]
    pub(crate) fn used(&self) -> usize {
        usize::try_from(self.lines[MAX_SEATS].word(0).load(Ordering::Relaxed))
            .unwrap_or(MAX_SEATS)
            .min(MAX_SEATS)
    }

    /// Whether one of the seats whose bits are set is taken.
    #[cold]
    pub(crate) fn is_any_taken(&self, bits: u64) -> bool {
        SeatIndex::all()
            .filter(|seat| bits & seat.bit() != 0)
            .any(|seat| SeatWord(self.word(seat).load(Ordering::Relaxed)).is_live())
    }

    /// The line of a seat, for its holder to look at.
    pub(crate) fn line(&self, seat: SeatIndex) -> Lines {
        self.lines.slice(seat.as_usize(), 1)
    }

    /// Whether the seat still belongs to `participant`, evicted or not. Recovery asks this between reading an owner word
    /// and freeing the buffer: if it does, no other participant can have had the seat when the word was read.
    pub(crate) fn is_seated(&self, participant: &Participant) -> bool {
        // Relaxed: a thread that has read, with Acquire, what a newcomer in this seat wrote cannot read an older word
        // here.
        self.word(participant.seat).load(Ordering::Relaxed) & !EVICTED == participant.word.0 & !EVICTED
    }

    /// Whether `participant` still has its seat and was not evicted.
    #[inline]
    pub(crate) fn is_current(&self, participant: &Participant) -> bool {
        participant.word.is(self.word(participant.seat).load(Ordering::Relaxed))
    }

    /// Declares a participant dead that may still run. `false` if it is no longer seated.
    pub(crate) fn evict(&self, participant: &Participant) -> bool {
        let word = participant.word.0 & !EVICTED;
        // Relaxed: FENCE, which follows, makes it visible to senders.
        let swap = self.word(participant.seat).compare_exchange(
            word,
            word | EVICTED,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        swap.is_ok() || swap == Err(word | EVICTED)
    }

    /// Vacates the seat. Only for its holder, when it holds nothing, or for recovery, when everything it held was
    /// recovered.
    pub(crate) fn vacate(&self, participant: &Participant) -> bool {
        let line = &self.lines[participant.seat.as_usize()];
        let current = line.word(0).load(Ordering::Relaxed);
        if current & !EVICTED != participant.word.0 & !EVICTED {
            return false;
        }
        let vacated = SeatWord(current).vacated();
        // The details stay: each names its participant, and the next holder may be writing its own.
        // Release pairs with the Acquire of `attach`.
        line.word(0).compare_exchange(current, vacated.0, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Records that `me` has the lock of its seat, in the lock file with this number; or, with 0, that it has not. A
    /// process that finds the lock free after that knows that the participant's process has ended.
    pub(crate) fn mark_locked(&self, me: &Participant, lock: u64) {
        // Release pairs with the Acquire of `is_marked`: the lock is taken before the mark can be seen.
        self.lines[me.seat.as_usize()].word(LOCK).store(me.word.detail(lock), Ordering::Release);
    }

    /// The liveness of a participant by the lock of its seat in the lock file with this number: only the end of its
    /// process frees the lock while the seat is marked. `is_taken` asks the kernel for the lock.
    pub(crate) fn liveness_by_lock(
        &self,
        other: &Participant,
        lock: u64,
        is_taken: impl FnOnce() -> std::io::Result<bool>,
    ) -> Liveness {
        if !self.is_marked(other, lock) {
            return Liveness::Unknown;
        }
        let taken = is_taken();
        // Read again: a participant that detaches removes the mark before it releases the lock, and this thread sees
        // what the kernel has seen.
        match taken {
            Ok(taken) if self.is_marked(other, lock) => {
                if taken {
                    Liveness::Alive
                } else {
                    Liveness::Dead
                }
            }
            _ => Liveness::Unknown,
        }
    }

    fn is_marked(&self, other: &Participant, lock: u64) -> bool {
        // Acquire pairs with the Release of `mark_locked`: a thread that reads the mark finds the lock taken.
        let mark = self.lines[other.seat.as_usize()].word(LOCK).load(Ordering::Acquire);
        mark == other.word.detail(lock) && self.is_seated(other)
    }

    /// The participant at `seat`.
    pub(crate) fn at(&self, seat: SeatIndex) -> Option<Participant> {
        self.seen(seat, SeatWord(self.word(seat).load(Ordering::Acquire)))
    }

    /// The participant that a word read at `seat` names.
    fn seen(&self, seat: SeatIndex, word: SeatWord) -> Option<Participant> {
        let line = &self.lines[seat.as_usize()];
        word.is_live().then(|| Participant {
            seat,
            word,
            start_time: word.of_detail(line.word(START_TIME).load(Ordering::Relaxed)),
            pid_namespace: word.of_detail(line.word(PID_NAMESPACE).load(Ordering::Relaxed)),
        })
    }

    /// Counts that the caller, in `seat`, has woken a receiver. It costs little beside the system call, and has a line
    /// of its own.
    #[cold]
    pub(crate) fn rang(&self, seat: SeatIndex) {
        self.lines[seat.as_usize()].word(RUNG).fetch_add(1, Ordering::Relaxed);
    }

    /// How often receivers were woken by a system call since the link was created.
    pub(crate) fn rung(&self) -> u64 {
        let all = SeatIndex::all().map(|seat| self.lines[seat.as_usize()].word(RUNG).load(Ordering::Relaxed));
        all.fold(0, u64::wrapping_add)
    }

    /// Counts participants that were recovered.
    pub(crate) fn count_recovered(&self, participants: u32) {
        self.lines[MAX_SEATS].word(RECOVERED).fetch_add(participants.into(), Ordering::Relaxed);
    }

    /// How many participants were recovered, by any process, since the link was created.
    pub(crate) fn recovered(&self) -> u64 {
        self.lines[MAX_SEATS].word(RECOVERED).load(Ordering::Relaxed)
    }

    /// The participants in the seats whose bits are set.
    pub(crate) fn all_of(&self, bits: u64) -> impl Iterator<Item = Participant> + '_ {
        SeatIndex::all().filter(move |seat| bits & seat.bit() != 0).filter_map(|seat| self.at(seat))
    }

    /// The participants of the secondary side that were not evicted, in the seats whose bits are set.
    pub(crate) fn readers(&self, bits: u64) -> impl Iterator<Item = (SeatIndex, SeatWord)> + '_ {
        let mut rest = bits;
        std::iter::from_fn(move || {
            let seat = SeatIndex::from_wild(u64::from(rest.trailing_zeros()))?;
            rest &= rest - 1;
            Some(seat)
        })
        .filter_map(|seat| {
            // Relaxed: a thread that has seen the bit of a newcomer sees that it has taken the seat.
            let word = SeatWord(self.word(seat).load(Ordering::Relaxed));
            let is_reader = word.is_live() && !word.is_evicted() && word.side() == Side::Secondary;
            is_reader.then_some((seat, word))
        })
    }

    /// All participants that are attached.
    pub(crate) fn all(&self) -> impl Iterator<Item = Participant> + '_ {
        SeatIndex::all().filter_map(|seat| self.at(seat))
    }
}
