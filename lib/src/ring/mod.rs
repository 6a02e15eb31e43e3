//! Rings: bounded FIFO queues of messages, one per direction of a link.
//!
//! | ring | for | a message costs |
//! |---|---|---|
//! | [`spsc`] | one producer, one consumer | one store by each; a small message lies in the slot itself |
//! | [`mpmc`] | any number of each: NVIPC's array queue | one exchange on the slot, one on the owner word, one on each end |
//! | [`broadcast`] | one writer, readers that each get every message | one store by the writer and one by each reader |
//!
//! A participant may die at any instruction. Slots are written by producers only and never cleared: the lap in a slot's
//! word shows whether it is new, and the consumers' `head` shows how far they are. A slot becomes visible by a single store
//! or exchange, and the next participant completes what a dead one left undone (moving `tail` or `head`).
//!
//! The values are indices of buffers, `0..N`, and no value is in a ring twice: only the holder of a buffer can push it, and
//! pushing ends its hold.
//!
//! Pairs of orderings, with the same name at both ends:
//! - `PUBLISH`: a producer's Release on the slot word, a consumer's Acquire of it: payload and descriptor are visible.
//! - `CONSUME`: a consumer's Release of `head`, a producer's Acquire of it: the slot may be overwritten.
//! - `FENCE`: a producer's exchange on `tail`, a recovery's exchange on it: of a message and an eviction, at least one side
//!   sees the other.

pub(crate) mod broadcast;
pub(crate) mod entry;
pub(crate) mod inline;
pub(crate) mod mpmc;
pub(crate) mod reply;
pub(crate) mod reply_share;
pub(crate) mod spsc;
pub(crate) mod stamps;

use crate::config::BroadcastConfig;
use crate::segment::{Lines, prefetch_exclusive};
use crate::sync::{AtomicU64, Line, Ordering, WORDS_PER_LINE};
use entry::RingEntry;
pub use inline::INLINE_MAX_BYTES;
use inline::{FIRST_LINE_BYTES, InlineLines};
pub use reply::{REPLIES_MAX, REQUEST_INLINE_MAX_BYTES};
use stamps::Stamps;

/// Lines before the slots: each word that one side writes is on a line (and its neighbour) of its own.
pub(crate) const CONTROL_LINES: usize = 14;
const TAIL: usize = 0;
const HEAD: usize = 2;
pub(crate) const PRODUCER_ROLE: usize = 4;
pub(crate) const CONSUMER_ROLE: usize = 6;
pub(crate) const SLEEPERS: usize = 8;
/// The word next to [`SLEEPERS`], on its line.
pub(crate) const BELLS: usize = 1;
/// The word next to [`SLEEPERS`], on its line.
pub(crate) const WAKES: usize = 2;
/// The word next to [`SLEEPERS`], on its line: the readers of a broadcast ring, as bits of seats.
const SUBSCRIBERS: usize = 3;
/// The position of a broadcast ring before which nothing may be received any more.
const BROADCAST_LOW_MARK: usize = 9;
pub(crate) const POSTS: usize = 10;
pub(crate) const POSTS_TAKEN: usize = 12;

/// How far ahead of its use a line is prefetched, in messages: about the time that its transfer takes.
const AHEAD: u64 = 4;

/// The error of a full ring.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct RingFull;

/// A value in shared memory that no correct participant writes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct WildWord(pub(crate) &'static str);

/// The state of a message according to its owner word.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Look {
    /// The message can be received. This is its owner word.
    Here(u64),
    /// Another consumer has received it, or its sender was declared dead before it was sent.
    Gone,
}

/// Access to the owner words of a ring's entries. [`Copy`]: cold functions are given a copy, so that the one of the hot paths
/// need not be in memory.
pub(crate) trait Owners: Copy {
    /// The buffer or inline cell of an entry.
    type Cell: Copy;
    /// Checks the cell that an entry names.
    fn cell(&self, entry: RingEntry) -> Result<Self::Cell, WildWord>;
    /// Reads the owner word of an entry.
    fn look_at(&self, entry: RingEntry, cell: Self::Cell) -> Result<Look, WildWord>;
    /// Becomes the owner of the message by one exchange. Returns `false` if another participant was faster.
    fn take_at(&self, cell: Self::Cell, word: u64) -> bool;
    /// As `take_at`, if no other participant can want the message: a store suffices.
    fn take_alone(&self, cell: Self::Cell, word: u64);
    /// Prefetches a message that will probably be received soon.
    fn prefetch(&self, entry: RingEntry, cell: Self::Cell);
    /// Counts how long a sampled message was on its way, which was received at `now`; both in nanoseconds. `held` is its cell
    /// and its owner word before that, if it is in a buffer.
    fn arrived(&self, age: u64, now: u64, held: Option<(Self::Cell, u64)>);

    /// As [`look_at`](Self::look_at), of an entry that was not checked.
    fn look(&self, entry: RingEntry) -> Result<Look, WildWord> {
        self.look_at(entry, self.cell(entry)?)
    }

    /// As [`take_at`](Self::take_at), of an entry that was not checked.
    fn take(&self, entry: RingEntry, word: u64) -> bool {
        self.cell(entry).is_ok_and(|cell| self.take_at(cell, word))
    }
}

/// The words of a ring in shared memory.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    control: Lines,
    slots: Lines,
    /// log2 of the capacity.
    shift: u32,
    /// The capacity less 1.
    mask: u64,
    stamps: Stamps,
}

impl Words {
    /// The addresses and lengths in local variables: after each atomic access, fields would be loaded, and indices checked,
    /// again.
    #[inline(always)]
    fn view(&self) -> WordsView<'_> {
        match self.control.first_chunk() {
            Some(control) => WordsView { control, slots: &self.slots, shift: self.shift, mask: self.mask },
            None => unreachable!("`Ring::new` is given all control lines"),
        }
    }

    #[inline(always)]
    pub(crate) fn control(&self, line: usize) -> &AtomicU64 {
        self.view().control(line)
    }

    /// A second word of a control line, written by the same participants.
    #[inline]
    pub(crate) fn beside(&self, line: usize, word: usize) -> &AtomicU64 {
        self.view().control[line].word(word)
    }

    #[inline(always)]
    fn capacity(&self) -> u64 {
        self.view().capacity()
    }

    #[inline(always)]
    fn lap(&self, position: u64) -> u32 {
        self.view().lap(position)
    }

    #[inline(always)]
    fn line(&self, position: u64) -> &Line {
        self.view().line(position)
    }

    #[inline(always)]
    pub(crate) fn lines(&self, position: u64) -> InlineLines<'_> {
        self.view().lines(position)
    }

    #[inline(always)]
    fn write_inline(&self, position: u64, ids: u64, msg: &[u8]) {
        self.view().write_inline(position, ids, msg);
    }

    #[inline(always)]
    fn publish(&self, position: u64, entry: RingEntry) {
        self.view().publish(position, entry);
    }

    /// Whether the time of the message at `position` is counted. Not in [`WordsView`]: one instruction that reads memory costs
    /// less than a register. Hot paths call nothing where it is: what lives across a call would be saved for each message.
    #[inline(always)]
    fn is_sampled(&self, position: u64) -> bool {
        position & self.stamps.mask == 0
    }

    /// Counts the age of a message that was received at a sampled position.
    #[cold]
    #[inline(never)]
    fn arrived<O: Owners>(&self, position: u64, owners: &O, held: Option<(O::Cell, u64)>) {
        if let Some((age, now)) = self.age(position) {
            owners.arrived(age, now, held);
        }
    }
}

/// The words of a ring, for the duration of a call.
#[derive(Clone, Copy, Debug)]
struct WordsView<'a> {
    control: &'a [Line; CONTROL_LINES],
    slots: &'a [Line],
    shift: u32,
    mask: u64,
}

impl<'a> WordsView<'a> {
    #[inline(always)]
    fn control(self, line: usize) -> &'a AtomicU64 {
        self.control[line].word(0)
    }

    #[inline(always)]
    fn capacity(self) -> u64 {
        self.mask + 1
    }

    /// The lap of `position`: how often the positions have wrapped, starting at 1.
    #[inline(always)]
    fn lap(self, position: u64) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "laps count modulo 2^32")]
        let lap = (position >> self.shift) as u32;
        lap.wrapping_add(1)
    }

    #[inline(always)]
    fn slot_index(self, position: u64) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "masked to the capacity")]
        let index = (position & self.mask) as usize;
        index
    }

    /// The slot at `position`, if a slot is a whole line.
    #[inline(always)]
    fn line(self, position: u64) -> &'a Line {
        &self.slots[self.slot_index(position)]
    }

    /// The lines of an inline message in the slot at `position`.
    #[inline(always)]
    fn lines(self, position: u64) -> InlineLines<'a> {
        let index = self.slot_index(position);
        InlineLines::new(&self.slots[index], self.slots, self.slots.len() / 2 + index)
    }

    /// Writes an inline message into the slot at `position`.
    #[inline(always)]
    fn write_inline(self, position: u64, ids: u64, msg: &[u8]) {
        self.lines(position).write(ids, msg);
        if msg.len() > FIRST_LINE_BYTES {
            prefetch_exclusive(self.lines(position.wrapping_add(AHEAD)).second());
        }
    }

    /// Sends `entry` in the slot at `position`, where no other participant may send.
    #[inline(always)]
    fn publish(self, position: u64, entry: RingEntry) {
        // PUBLISH
        self.line(position).word(0).store(entry.in_lap(self.lap(position)), Ordering::Release);
        prefetch_exclusive(self.line(position.wrapping_add(AHEAD)));
    }
}

/// The state of a position, as an observer sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sight {
    /// No message was sent there yet.
    NotYet,
    /// This message was sent there, received or not.
    Here(RingEntry),
    /// Overwritten: slots before this many later positions are overwritten, too.
    Overwritten(u64),
}

/// The kinds of rings.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Spsc,
    Mpmc,
    Broadcast(BroadcastConfig),
}

impl Kind {
    /// Number of lines of the slots. With one producer a slot has a second line, for long inline messages; the second lines
    /// are after all first ones.
    pub(crate) const fn slot_lines(self, capacity: usize) -> usize {
        match self {
            Self::Spsc | Self::Broadcast(_) => 2 * capacity,
            Self::Mpmc => capacity.div_ceil(WORDS_PER_LINE),
        }
    }
}

/// A ring of any kind.
// With a tag of its own: one inside a field would have to be decoded in each call.
#[repr(u8)]
#[derive(Clone, Debug)]
pub(crate) enum Ring {
    Spsc(spsc::Spsc),
    Mpmc(mpmc::Mpmc),
    Broadcast(broadcast::Broadcast),
}

impl Ring {
    /// Creates a ring over its memory. `slots` must have [`Kind::slot_lines`] lines, `cursors` one per seat for a broadcast
    /// ring, and `capacity` must be a power of two.
    pub(crate) fn new(
        control: Lines,
        slots: Lines,
        cursors: &Lines,
        capacity: usize,
        kind: Kind,
        stamps: Stamps,
    ) -> Self {
        debug_assert!(capacity.is_power_of_two() && slots.len() == kind.slot_lines(capacity));
        let (shift, mask) = (capacity.trailing_zeros(), capacity as u64 - 1);
        let words = Words { control, slots, shift, mask, stamps };
        match kind {
            Kind::Spsc => Self::Spsc(spsc::Spsc::new(words)),
            Kind::Mpmc => Self::Mpmc(mpmc::Mpmc::new(words)),
            Kind::Broadcast(rules) => {
                Self::Broadcast(broadcast::Broadcast::new(words, cursors.clone(), rules))
            }
        }
    }

    pub(crate) fn words(&self) -> &Words {
        match self {
            Self::Spsc(ring) => &ring.words,
            Self::Mpmc(ring) => &ring.words,
            Self::Broadcast(ring) => &ring.words,
        }
    }

    /// The lines of the slot at `position`, if the ring has its inline messages in the slots.
    pub(crate) fn lines(&self, position: u64) -> Option<InlineLines<'_>> {
        (!matches!(self, Self::Mpmc(_))).then(|| self.words().lines(position))
    }

    pub(crate) fn is_broadcast(&self) -> bool {
        matches!(self, Self::Broadcast(_))
    }

    /// The word of the slot at `position`.
    pub(crate) fn slot(&self, position: u64) -> &AtomicU64 {
        match self {
            Self::Mpmc(ring) => ring.slot(position),
            Self::Spsc(_) | Self::Broadcast(_) => self.words().line(position).word(0),
        }
    }

    /// The state of a position. Slots are never cleared, so an observer may be behind the consumers by a whole lap.
    pub(crate) fn sight(&self, position: u64) -> Sight {
        let words = self.words();
        let (lap, entry) = RingEntry::split(self.slot(position).load(Ordering::Acquire));
        match lap.wrapping_sub(words.lap(position)).cast_signed() {
            // The writer of a broadcast ring is about to send the next lap's message.
            0 if entry == RingEntry::WRITING => Sight::Overwritten(1),
            0 => Sight::Here(entry),
            later @ 1.. => {
                // Of the lap that is being written, this slot is the last one known.
                let laps = u64::from(later.unsigned_abs());
                Sight::Overwritten(laps.saturating_mul(words.capacity()) - (words.capacity() - 1))
            }
            _ => Sight::NotYet,
        }
    }

    /// Number of messages received from this ring so far. For a broadcast ring: the position of the oldest message that
    /// newcomers get.
    pub(crate) fn head(&self) -> u64 {
        if let Self::Broadcast(ring) = self {
            return ring.extent().0;
        }
        self.words().control(HEAD).load(Ordering::Acquire)
    }

    /// Number of messages sent on this ring so far. It never decreases. `TAIL` may lag behind the slots, and a single
    /// producer keeps it private, so this reads the slots.
    pub(crate) fn sent(&self) -> u64 {
        let words = self.words();
        let head = self.head();
        let is_sent = |position| {
            let (lap, _) = RingEntry::split(self.slot(position).load(Ordering::Acquire));
            // Of the previous lap: not sent yet, and nothing after it either.
            lap.wrapping_add(1) != words.lap(position)
        };
        let waiting = (0..words.capacity()).take_while(|i| is_sent(head.wrapping_add(*i))).count();
        head.wrapping_add(waiting as u64)
    }

    /// Whether a message can be received, as far as one look shows. In a broadcast ring this depends on the reader, so it
    /// is always false.
    pub(crate) fn has_message(&self) -> bool {
        if self.is_broadcast() {
            return false;
        }
        let head = self.head();
        // Relaxed: receiving checks again.
        let (lap, _) = RingEntry::split(self.slot(head).load(Ordering::Relaxed));
        lap == self.words().lap(head)
    }

    /// The entries that were sent and not received, oldest first.
    ///
    /// While others use the ring this is a snapshot: it has every entry that was in the ring throughout, including entries
    /// of dead senders.
    pub(crate) fn queued(&self) -> impl Iterator<Item = (u64, RingEntry)> + '_ {
        let words = self.words();
        let head = self.head();
        (0..words.capacity())
            .map(move |i| head.wrapping_add(i))
            .map(|position| (position, RingEntry::split(self.slot(position).load(Ordering::Acquire))))
            // A slot of the previous lap was not sent yet, nor was anything after it. A slot of a later lap was received
            // and sent again meanwhile: it is skipped.
            .take_while(move |&(position, (lap, _))| lap.wrapping_add(1) != words.lap(position))
            .filter(move |&(position, (lap, _))| lap == words.lap(position))
            .map(|(position, (_, entry))| (position, entry))
    }
}
