//! The ring for one writer and many readers: each reader gets every message, in order.
//!
//! The slots have the form of `spsc`'s: the word, the ids and 48 bytes in a line, and a second line. Readers remove nothing.
//! Each reader has a line of its own, the **cursor line**, in which it publishes its position. From time to time the writer
//! reads all of them and moves the **low mark**: positions before it may be overwritten, and their buffers are free.
//!
//! | | `wait`, `evict` | `skip` |
//! |---|---|---|
//! | the low mark is at | the slowest reader | the newest message, less the length of the ring less one |
//! | a buffer is kept from reuse by | the cursor, which stays at the oldest message that its reader holds | a **hold**, a
//! word of the cursor line |
//! | a reader that the low mark has passed | is evicted, or breaks the protocol | continues with the newest message |
//!
//! Nothing here has to be recovered after a death. The bit of a reader in `SUBSCRIBERS` counts only while the participant
//! that set it, which its cursor line names, has its seat and was not evicted. A writer's private state is reconstructed by
//! its successor from the slots and owner words ([`Broadcast::resume_writer`]).
//!
//! Pairs, besides `PUBLISH`:
//! - `PASSED`: a reader's Release of its cursor or hold, the writer's Acquire of it: the reader is done with the bytes.
//! - `JOIN`: a reader sets its bit, SeqCst fence, reads the low mark; the writer moves the low mark, SeqCst fence, reads the
//!   bits. One sees the other, so a newcomer's first message is kept, or it begins at the low mark.
//! - `HOLD`: a reader stores a hold, SeqCst fence, reads the low mark; the writer moves the low mark, SeqCst fence, reads the
//!   holds. One sees the other, so a buffer is kept, or its reader finds that it was overtaken.
//! - `OPEN`: the writer's Release of `tail` and of the low mark, a reader's Acquire of them: a reader that begins there sees
//!   the slots.
//! - `OVERWRITE`: the writer marks a slot, Release fence, writes its bytes; a reader copies them, Acquire fence, checks for
//!   the mark.

mod owned_reads;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::entry::RingEntry;
use super::inline::InlineLines;
use super::{BROADCAST_LOW_MARK, RingFull, SLEEPERS, SUBSCRIBERS, TAIL, WildWord, Words};
use crate::config::{BroadcastConfig, SlowReaders};
use crate::participant::{Participant, SeatIndex, SeatWord, Seats};
use crate::segment::{Lines, prefetch_shared};
use crate::sync::{AtomicU64, Ordering, fence};
pub(crate) use owned_reads::OwnedReads;

const CURSOR: usize = 0;
/// Next to the count: the participant of the line, so that the next one in the seat is not a reader before it subscribes.
const LOST: usize = 1;
const HOLDS: usize = 2;
/// Maximum number of messages in buffers that a reader of a ring with `skip` can hold.
pub(crate) const HOLDS_MAX: usize = 6;
/// Maximum number of messages after which the writer reads the cursors.
const STRIDE_MAX: u64 = 64;
/// How often a reader tries to read the newest message while the writer overtakes it each time.
const ROUNDS_MAX: usize = 1_000;

#[derive(Clone, Debug)]
pub(crate) struct Broadcast {
    pub(super) words: Words,
    /// One line per seat.
    cursors: Lines,
    rules: BroadcastConfig,
}

/// A sent message in a buffer, with what its writer needs to free it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct PublishedMessage {
    pub(crate) cell: u32,
    /// The owner word of the MSG buffer.
    pub(crate) owner: u64,
    /// The DATA buffer, as in the cell.
    pub(crate) data: u64,
}

/// The writer's private state.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    /// The position of the next message; always exact.
    tail: Cell<u64>,
    /// Positions before it may be overwritten, and their buffers are free or held.
    low_mark: Cell<u64>,
    /// Number of messages that may be sent before [`look`](Broadcast::look) is due.
    credit: Cell<u64>,
    /// Number of further messages that may be sent before the cursors must be read.
    room: Cell<u64>,
    /// Messages in buffers from the low mark on, oldest first.
    kept: RefCell<VecDeque<(u64, PublishedMessage)>>,
    /// Messages that the low mark has passed, while they are freed: scratch memory, to avoid an allocation.
    passed: RefCell<Vec<PublishedMessage>>,
    /// Messages in buffers before the low mark that readers hold.
    held: RefCell<Vec<PublishedMessage>>,
    /// The cells that readers hold: scratch memory, to avoid an allocation.
    holds: RefCell<Vec<u64>>,
    /// The position at which readers block the writer, and since when.
    held_up: Cell<Option<(u64, Instant)>>,
}

/// A reader's private state.
#[derive(Debug)]
pub(crate) struct Reader {
    word: SeatWord,
    line: Lines,
    /// The position of the next message.
    next: Cell<u64>,
    /// The oldest message that the handle holds, or `next`. This is the value of its cursor, unless an owned message is
    /// older.
    oldest: Cell<u64>,
    /// For the positions after `oldest` and before `next`: whether their messages were released.
    ended: RefCell<VecDeque<bool>>,
    /// The holds in use, as bits.
    holds: Cell<u8>,
    pub(crate) owned: Arc<OwnedReads>,
    /// Whether owned messages may keep the cursor.
    has_owned: Cell<bool>,
    lost: Cell<u64>,
    /// Whether the last inline message had a second line: the next one probably has one, too.
    long: Cell<bool>,
}

/// Keeps a received message from reuse until it is released: its position, or the number of a hold.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ReadToken(pub(crate) u64);

/// The reason why a reader got no message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum TakeError {
    Wild(WildWord),
    /// It holds as many messages as it can.
    Holding,
}

impl From<WildWord> for TakeError {
    fn from(wild: WildWord) -> Self {
        Self::Wild(wild)
    }
}

/// The state of the slot at a reader's position.
enum SlotState {
    Here(RingEntry, u64),
    NotYet,
    Overtaken,
    Wild,
}

/// The later of two positions that are less than 2^63 apart.
fn later(a: u64, b: u64) -> u64 {
    if b.wrapping_sub(a).cast_signed() > 0 { b } else { a }
}

impl Broadcast {
    pub(super) fn new(words: Words, cursors: Lines, rules: BroadcastConfig) -> Self {
        Self { words, cursors, rules }
    }

    #[inline]
    fn skips(&self) -> bool {
        self.rules.slow == SlowReaders::Skip
    }

    /// How long a reader may block the writer.
    pub(crate) fn evicts_after(&self) -> Option<Duration> {
        let limit = Duration::from_millis(self.rules.evict_after_ms.into());
        (self.rules.slow == SlowReaders::Evict).then_some(limit)
    }

    fn subscribers(&self) -> &AtomicU64 {
        self.words.beside(SLEEPERS, SUBSCRIBERS)
    }

    fn low_mark(&self) -> &AtomicU64 {
        self.words.control(BROADCAST_LOW_MARK)
    }

    fn tail(&self) -> &AtomicU64 {
        self.words.control(TAIL)
    }

    /// Participants that are subscribed, and still have their seats.
    pub(crate) fn readers<'a>(
        &'a self,
        seats: &'a Seats,
    ) -> impl Iterator<Item = (SeatIndex, SeatWord)> + 'a {
        // JOIN: Acquire, so that a newcomer's cursor line and seat are visible with its bit.
        let subscribed = seats.readers(self.subscribers().load(Ordering::Acquire));
        subscribed.filter(|(seat, word)| {
            word.is_own(self.cursors[seat.as_usize()].word(LOST).load(Ordering::Relaxed))
        })
    }

    /// The position of the oldest message that newcomers get, and of the next message to be sent; for observers.
    pub(super) fn extent(&self) -> (u64, u64) {
        let tail = self.tail().load(Ordering::Acquire);
        let behind = tail.wrapping_sub(self.low_mark().load(Ordering::Acquire));
        (tail.wrapping_sub(behind.min(self.words.capacity()).min(tail)), tail)
    }

    /// Number of messages that a reader has not received, and that it has lost; for observers. `None` if it is not a
    /// reader.
    pub(crate) fn place_of(&self, who: &Participant, seats: &Seats) -> Option<(u64, u64)> {
        let (seat, _) = self.readers(seats).find(|(seat, _)| *seat == who.seat)?;
        let (oldest, tail) = self.extent();
        let line = &self.cursors[seat.as_usize()];
        let cursor = line.word(CURSOR).load(Ordering::Relaxed);
        let lost = who.word.of_detail(line.word(LOST).load(Ordering::Relaxed));
        Some((tail.wrapping_sub(self.clamp(cursor, oldest, tail)), lost))
    }

    /// Whether a message waits for a reader, or for newcomers.
    #[cfg(feature = "typed")]
    pub(crate) fn is_any_waiting(&self, seats: &Seats) -> bool {
        let (oldest, tail) = self.extent();
        tail != if self.rules.history > 0 { oldest } else { self.slowest(seats, oldest, tail) }
    }

    /// Number of messages that all readers have received; for observers.
    pub(crate) fn received(&self, seats: &Seats) -> u64 {
        let (oldest, tail) = self.extent();
        self.slowest(seats, oldest, tail)
    }
}

/// The steps of the writer.
impl Broadcast {
    /// Takes the writer's role where the last writer stopped. `kept` returns what to free for an entry in a buffer. `all`
    /// are the messages in buffers that any writer has sent; those that are no longer in the ring are freed.
    pub(crate) fn resume_writer(
        &self,
        seats: &Seats,
        kept: impl Fn(RingEntry) -> Option<PublishedMessage>,
        all: impl Iterator<Item = PublishedMessage>,
        free: impl FnMut(&[PublishedMessage]),
    ) -> Writer {
        let capacity = self.words.capacity();
        let mut tail = self.tail().load(Ordering::Acquire);
        // The last writer may have died between the slot and `tail`.
        for _ in 0..capacity {
            if !matches!(self.find(tail), SlotState::Here(..)) {
                break;
            }
            tail = tail.wrapping_add(1);
        }
        self.tail().store(tail, Ordering::Release);
        let most = if self.skips() { capacity - 1 } else { capacity };
        let oldest = tail.wrapping_sub(most.min(tail));
        let history = self.clamp(self.low_mark().load(Ordering::Acquire), oldest, tail);
        let me = Writer::default();
        me.tail.set(tail);
        me.low_mark.set(oldest);
        // Newcomers that the last writer knew may be before its low mark.
        let low_mark =
            if self.skips() { history } else { self.slowest(seats, oldest, tail).min_by(oldest, history) };
        self.low_mark().store(low_mark, Ordering::Release);
        // JOIN, HOLD
        fence(Ordering::SeqCst);
        let low_mark =
            if self.skips() { low_mark } else { self.slowest(seats, oldest, tail).min_by(oldest, low_mark) };
        me.low_mark.set(low_mark);
        let mut in_ring = me.kept.borrow_mut();
        in_ring.reserve(usize::try_from(capacity).unwrap_or(0).min(1 << 16));
        let mut cells = std::collections::BTreeSet::new();
        // The newest first: a reader that died, or breaks the protocol, can keep the low mark before a buffer that was freed
        // and sent again since.
        for i in 1..=tail.wrapping_sub(low_mark) {
            let position = tail.wrapping_sub(i);
            if let SlotState::Here(entry, _) = self.find(position)
                && !entry.is_inline()
                && let Some(kept) = kept(entry)
                && cells.insert(kept.cell)
            {
                in_ring.push_front((position, kept));
            }
        }
        me.held.borrow_mut().extend(all.filter(|kept| !cells.contains(&kept.cell)));
        drop(in_ring);
        self.sweep(&me, seats, free);
        me
    }

    /// Clamps a position that another participant wrote to the range from `oldest` to `newest`.
    fn clamp(&self, wild: u64, oldest: u64, newest: u64) -> u64 {
        let behind = newest.wrapping_sub(wild);
        if behind <= newest.wrapping_sub(oldest) {
            wild
        } else if behind.cast_signed() < 0 {
            newest
        } else {
            oldest
        }
    }

    /// The position of the slowest reader. A reader with an impossible position blocks no more than a new one, or not at
    /// all.
    fn slowest(&self, seats: &Seats, oldest: u64, tail: u64) -> u64 {
        let cursors = self.readers(seats).map(|(seat, _)| {
            // PASSED
            let cursor = self.cursors[seat.as_usize()].word(CURSOR).load(Ordering::Acquire);
            self.clamp(cursor, oldest, tail)
        });
        cursors.fold(tail, |slowest, cursor| slowest.min_by(oldest, cursor))
    }

    /// The readers that keep the low mark from moving: none if it is at the beginning of the history.
    pub(crate) fn holding_up(&self, me: &Writer, seats: &Seats) -> Vec<(SeatIndex, SeatWord)> {
        let (low_mark, tail) = (me.low_mark.get(), me.tail.get());
        if self.skips() || tail.wrapping_sub(low_mark) <= self.rules.history.into() {
            return Vec::new();
        }
        let is_slowest = |(seat, _): &(SeatIndex, SeatWord)| {
            let cursor = self.cursors[seat.as_usize()].word(CURSOR).load(Ordering::Relaxed);
            self.clamp(cursor, low_mark, tail) == low_mark
        };
        self.readers(seats).filter(is_slowest).collect()
    }

    /// Whether readers have blocked the writer for longer than `limit`: since it first found no room for its current
    /// message, whichever readers they were.
    pub(crate) fn is_patience_over(&self, me: &Writer, limit: Duration) -> bool {
        let (tail, now) = (me.tail.get(), Instant::now());
        let since = me.held_up.get().filter(|(at, _)| *at == tail).map_or(now, |(_, since)| since);
        me.held_up.set(Some((tail, since)));
        now.duration_since(since) >= limit
    }

    /// Makes room for a message, if there is none.
    #[inline(always)]
    pub(crate) fn make_room(
        &self,
        me: &Writer,
        seats: &Seats,
        free: impl FnMut(&[PublishedMessage]),
    ) -> Result<(), RingFull> {
        match me.credit.get().checked_sub(1) {
            Some(credit) => {
                me.credit.set(credit);
                Ok(())
            }
            None => self.look(me, seats, free),
        }
    }

    /// Makes room if there is none, writes the time of the next message if it is sampled, and sets the credit: up to the next
    /// sampled message.
    #[cold]
    #[inline(never)]
    fn look(
        &self,
        me: &Writer,
        seats: &Seats,
        free: impl FnMut(&[PublishedMessage]),
    ) -> Result<(), RingFull> {
        let room = match me.room.get() {
            0 => self.find_room(me, seats, free),
            room => room,
        };
        if room == 0 {
            return Err(RingFull);
        }
        let tail = me.tail.get();
        if self.words.is_sampled(tail) {
            self.words.stamp(tail);
        }
        let before_next = room.min(self.words.stamps.until_next(tail));
        me.room.set(room - before_next);
        me.credit.set(before_next - 1);
        Ok(())
    }

    /// Reads the cursors, and frees what all readers have passed. Returns the number of messages that may be sent before the
    /// next time.
    fn find_room(&self, me: &Writer, seats: &Seats, free: impl FnMut(&[PublishedMessage])) -> u64 {
        let capacity = self.words.capacity();
        let stride = (capacity / 4).clamp(1, STRIDE_MAX);
        if self.skips() {
            // There always is room: `retire` follows each message.
            return stride;
        }
        self.advance(me, seats, free);
        let room = capacity - me.tail.get().wrapping_sub(me.low_mark.get());
        room.min(stride)
    }

    /// Moves the low mark to the slowest reader. Returns `false` if it is there already.
    fn advance(&self, me: &Writer, seats: &Seats, free: impl FnMut(&[PublishedMessage])) -> bool {
        let (tail, old) = (me.tail.get(), me.low_mark.get());
        let history = tail.wrapping_sub(tail.wrapping_sub(old).min(self.rules.history.into()));
        let low_mark = self.slowest(seats, old, tail).min_by(old, history);
        if low_mark == old {
            return false;
        }
        self.low_mark().store(low_mark, Ordering::Release);
        // JOIN
        fence(Ordering::SeqCst);
        let low_mark = self.slowest(seats, old, tail).min_by(old, low_mark);
        me.low_mark.set(low_mark);
        self.pass_low_mark(me, free);
        low_mark != old
    }

    /// Frees messages before the low mark, all at once: their lines are in the readers' caches, and can come together.
    fn pass_low_mark(&self, me: &Writer, mut free: impl FnMut(&[PublishedMessage])) {
        let (tail, low_mark) = (me.tail.get(), me.low_mark.get());
        let open = tail.wrapping_sub(low_mark);
        let mut kept = me.kept.borrow_mut();
        let mut passed = me.passed.borrow_mut();
        while kept.front().is_some_and(|(position, _)| tail.wrapping_sub(*position) > open) {
            passed.extend(kept.pop_front().map(|(_, message)| message));
        }
        if self.skips() {
            me.held.borrow_mut().append(&mut passed);
        } else {
            free(&passed);
            passed.clear();
        }
    }

    /// Moves the low mark of a ring with `skip`, and frees messages before it that no reader holds.
    fn retire(&self, me: &Writer, low_mark: u64, seats: &Seats, free: impl FnMut(&[PublishedMessage])) {
        me.low_mark.set(low_mark);
        self.low_mark().store(low_mark, Ordering::Release);
        self.pass_low_mark(me, |_| {});
        if !me.held.borrow().is_empty() {
            self.sweep(me, seats, free);
        }
    }

    /// Frees messages before the low mark that no reader holds.
    fn sweep(&self, me: &Writer, seats: &Seats, mut free: impl FnMut(&[PublishedMessage])) {
        // HOLD
        fence(Ordering::SeqCst);
        let mut holds = me.holds.borrow_mut();
        holds.clear();
        if self.skips() {
            for (seat, _) in self.readers(seats) {
                let line = &self.cursors[seat.as_usize()];
                // PASSED
                let words = (HOLDS..HOLDS + HOLDS_MAX).map(|i| line.word(i).load(Ordering::Acquire));
                holds.extend(words.filter(|&hold| hold != 0));
            }
        }
        me.held.borrow_mut().retain(|kept| {
            let is_held = holds.contains(&hold_of(kept.cell));
            if !is_held {
                free(std::slice::from_ref(kept));
            }
            is_held
        });
    }

    /// Frees messages because the writer has found no free buffer. Returns `false` if there is none that may be freed. The
    /// history for newcomers stays.
    pub(crate) fn make_free(
        &self,
        me: &Writer,
        seats: &Seats,
        mut free: impl FnMut(&[PublishedMessage]),
    ) -> bool {
        if !self.skips() {
            return self.advance(me, seats, free);
        }
        let mut any = false;
        self.sweep(me, seats, |kept| {
            any = true;
            free(kept);
        });
        if any {
            return true;
        }
        let (tail, low_mark) = (me.tail.get(), me.low_mark.get());
        let spare = tail.wrapping_sub(low_mark).saturating_sub(self.rules.history.into());
        if spare == 0 {
            return false;
        }
        self.retire(me, low_mark.wrapping_add((spare / 8).max(1)), seats, free);
        true
    }

    /// Sends a message in a MSG buffer. There must be room.
    #[inline(always)]
    pub(crate) fn push(
        &self,
        me: &Writer,
        entry: RingEntry,
        kept: PublishedMessage,
        seats: &Seats,
        free: impl FnMut(&[PublishedMessage]),
    ) {
        me.kept.borrow_mut().push_back((me.tail.get(), kept));
        self.publish(me, entry, seats, free);
    }

    /// Sends a message of at most [`INLINE_MAX_BYTES`](super::INLINE_MAX_BYTES) in the slot. There must be room.
    #[inline(always)]
    pub(crate) fn push_inline(
        &self,
        me: &Writer,
        ids: u64,
        msg: &[u8],
        seats: &Seats,
        free: impl FnMut(&[PublishedMessage]),
    ) {
        let tail = me.tail.get();
        let before = self.words.lap(tail).wrapping_sub(1);
        self.words.line(tail).word(0).store(RingEntry::WRITING.in_lap(before), Ordering::Relaxed);
        // OVERWRITE
        fence(Ordering::Release);
        self.words.write_inline(tail, ids, msg);
        self.publish(me, RingEntry::inline_here(msg.len()), seats, free);
    }

    #[inline(always)]
    fn publish(&self, me: &Writer, entry: RingEntry, seats: &Seats, free: impl FnMut(&[PublishedMessage])) {
        let (tail, next) = (me.tail.get(), me.tail.get().wrapping_add(1));
        self.words.publish(tail, entry);
        me.tail.set(next);
        // OPEN
        self.tail().store(next, Ordering::Release);
        if self.skips() && next.wrapping_sub(me.low_mark.get()) >= self.words.capacity() {
            // One slot less than the capacity: the next message has its own slot, and of two slots one has the latest
            // message.
            let stride = (self.words.capacity() / 8).clamp(1, STRIDE_MAX);
            let least = (self.words.capacity() - stride).max(self.rules.history.into()).max(1);
            self.retire(me, next.wrapping_sub(least), seats, free);
        }
    }

    /// Frees all messages, even those that readers have not received, for a link that is emptied.
    pub(crate) fn forget(&self, me: &Writer, seats: &Seats, mut free: impl FnMut(&[PublishedMessage])) {
        me.low_mark.set(me.tail.get());
        self.low_mark().store(me.tail.get(), Ordering::Release);
        self.pass_low_mark(me, &mut free);
        self.sweep(me, seats, free);
    }

    /// Frees what all readers have passed, because the writer detaches.
    pub(crate) fn settle(&self, me: &Writer, seats: &Seats, free: impl FnMut(&[PublishedMessage])) {
        if self.skips() {
            self.sweep(me, seats, free);
        } else {
            self.advance(me, seats, free);
        }
    }
}

/// The word of a hold on a cell.
fn hold_of(cell: u32) -> u64 {
    u64::from(cell) + 1
}

/// The nearer of two positions, as seen from one before both.
trait NearestFrom {
    fn min_by(self, from: u64, other: Self) -> Self;
}

impl NearestFrom for u64 {
    fn min_by(self, from: u64, other: u64) -> u64 {
        if other.wrapping_sub(from) < self.wrapping_sub(from) { other } else { self }
    }
}

/// The steps of the readers.
impl Broadcast {
    /// Subscribes the new participant `who` as a reader.
    pub(crate) fn subscribe(&self, who: &Participant) -> Reader {
        let seat = who.seat;
        self.unsubscribe(seat);
        let line = self.cursors.slice(seat.as_usize(), 1);
        for word in HOLDS..HOLDS + HOLDS_MAX {
            line[0].word(word).store(0, Ordering::Relaxed);
        }
        line[0].word(LOST).store(who.word.detail(0), Ordering::Relaxed);
        let tail = self.tail().load(Ordering::Acquire);
        let first = tail.wrapping_sub(tail.min(self.rules.history.into()));
        let first = later(first, self.low_mark().load(Ordering::Acquire));
        line[0].word(CURSOR).store(first, Ordering::Relaxed);
        // JOIN: Release, so that a thread that sees the bit also sees the line and the seat.
        self.subscribers().fetch_or(seat.bit(), Ordering::Release);
        fence(Ordering::SeqCst);
        let first = later(first, self.low_mark().load(Ordering::Acquire));
        line[0].word(CURSOR).store(first, Ordering::Release);
        Reader {
            word: who.word,
            line,
            next: Cell::new(first),
            oldest: Cell::new(first),
            ended: RefCell::default(),
            holds: Cell::new(0),
            owned: Arc::new(OwnedReads::new(first)),
            has_owned: Cell::new(false),
            lost: Cell::new(0),
            long: Cell::new(false),
        }
    }

    /// Unsubscribes a reader. Only for the participant in `seat`: a bit of its predecessor does not count.
    pub(crate) fn unsubscribe(&self, seat: SeatIndex) {
        // PASSED
        self.subscribers().fetch_and(!seat.bit(), Ordering::Release);
    }

    #[inline(always)]
    fn find(&self, position: u64) -> SlotState {
        // PUBLISH
        let word = self.words.line(position).word(0).load(Ordering::Acquire);
        let (lap, entry) = RingEntry::split(word);
        match lap.wrapping_sub(self.words.lap(position)).cast_signed() {
            0 if entry == RingEntry::WRITING => SlotState::Overtaken,
            0 => SlotState::Here(entry, word),
            -1 => SlotState::NotYet,
            1.. => SlotState::Overtaken,
            _ => SlotState::Wild,
        }
    }

    /// Whether this reader can receive a message.
    #[inline]
    pub(crate) fn has_message(&self, me: &Reader) -> bool {
        !matches!(self.find(me.next.get()), SlotState::NotYet)
    }

    /// Number of messages that this reader can receive.
    pub(crate) fn waiting(&self, me: &Reader) -> u64 {
        let waiting = self.tail().load(Ordering::Acquire).wrapping_sub(me.next.get());
        if waiting.cast_signed() < 0 { 0 } else { waiting.min(self.words.capacity()) }
    }

    /// Receives the next message: `inline` copies a message in a slot, `pooled` opens one in a buffer, which is kept until
    /// the token is [released](Self::release). The caller must also release it if it cannot use the message. `sampled` counts
    /// the age of a sampled message, which was received at a time, both in nanoseconds. The first two are best marked
    /// `#[inline(always)]`, because they are called in two places.
    #[inline(always)]
    pub(crate) fn take<T>(
        &self,
        me: &Reader,
        inline: impl Fn(RingEntry, InlineLines<'_>) -> Result<T, WildWord>,
        pooled: impl Fn(RingEntry, ReadToken) -> Result<T, WildWord>,
        sampled: impl Fn(&T, u64, u64),
    ) -> Result<Option<T>, TakeError> {
        for _ in 0..ROUNDS_MAX {
            let position = me.next.get();
            if self.words.is_sampled(position) {
                if !self.has_message(me) {
                    return Ok(None);
                }
                // In parts, so that what the others take need not be in memory for the sake of this call.
                return match self.take_anywhere(me, inline, pooled, sampled) {
                    Ok(Some(message)) => Ok(Some(message)),
                    Ok(None) => Ok(None),
                    Err(error) => Err(error),
                };
            }
            if let Some(taken) = self.take_at(me, position, &inline, &pooled) {
                return taken;
            }
        }
        Ok(None)
    }

    /// As [`take`](Self::take), at a position that may be a sampled one. A function of its own: a call in the loop of all
    /// others would make them slower.
    #[cold]
    #[inline(never)]
    fn take_anywhere<T>(
        &self,
        me: &Reader,
        inline: impl Fn(RingEntry, InlineLines<'_>) -> Result<T, WildWord>,
        pooled: impl Fn(RingEntry, ReadToken) -> Result<T, WildWord>,
        sampled: impl Fn(&T, u64, u64),
    ) -> Result<Option<T>, TakeError> {
        for _ in 0..ROUNDS_MAX {
            let position = me.next.get();
            let Some(taken) = self.take_at(me, position, &inline, &pooled) else { continue };
            if let Ok(Some(message)) = &taken
                && self.words.is_sampled(position)
                && let Some((age, now)) = self.words.age(position)
            {
                sampled(message, age, now);
            }
            return taken;
        }
        Ok(None)
    }

    /// Receives the message at the reader's position. Returns `None` if the reader was overtaken: then it has moved on.
    #[inline(always)]
    fn take_at<T>(
        &self,
        me: &Reader,
        position: u64,
        inline: impl Fn(RingEntry, InlineLines<'_>) -> Result<T, WildWord>,
        pooled: impl Fn(RingEntry, ReadToken) -> Result<T, WildWord>,
    ) -> Option<Result<Option<T>, TakeError>> {
        if me.long.get() {
            prefetch_shared(self.words.lines(position).second());
        }
        match self.find(position) {
            SlotState::Here(entry, word) if entry.is_inline() => {
                let copied = inline(entry, self.words.lines(position));
                // OVERWRITE
                fence(Ordering::Acquire);
                if self.words.line(position).word(0).load(Ordering::Relaxed) == word && self.is_open(position)
                {
                    me.long.set(entry.has_second_line());
                    self.pass(me, position);
                    return Some(copied.map(Some).map_err(TakeError::Wild));
                }
            }
            SlotState::Here(entry, _) => match self.hold(me, position, entry) {
                Ok(Some(token)) => return Some(pooled(entry, token).map(Some).map_err(TakeError::Wild)),
                Ok(None) => {}
                Err(error) => return Some(Err(error)),
            },
            SlotState::NotYet => return Some(Ok(None)),
            SlotState::Overtaken => {}
            SlotState::Wild => {
                // A damaged message is passed, so that it is reported once.
                self.resume_at(me, position.wrapping_add(1));
                return Some(Err(WildWord("a slot of a lap that was never reached").into()));
            }
        }
        self.catch_up(me, position);
        if self.skips() {
            return None;
        }
        Some(Err(WildWord("a message that was overwritten before all readers had it").into()))
    }

    /// Whether the message at a position may still be received.
    #[inline]
    fn is_open(&self, position: u64) -> bool {
        !self.skips() || position.wrapping_sub(self.low_mark().load(Ordering::Acquire)).cast_signed() >= 0
    }

    /// Keeps the buffer of the message at `position` from reuse. Returns `None` if it was overtaken.
    #[inline(always)]
    fn hold(&self, me: &Reader, position: u64, entry: RingEntry) -> Result<Option<ReadToken>, TakeError> {
        if !self.skips() {
            if me.oldest.get() != position {
                // More than the ring holds: the writer breaks the protocol.
                if position.wrapping_sub(me.oldest.get()) >= self.words.capacity() {
                    self.resume_at(me, position);
                    return Err(WildWord("more messages than the ring holds").into());
                }
                me.ended.borrow_mut().push_back(false);
            }
            me.next.set(position.wrapping_add(1));
            return Ok(Some(ReadToken(position)));
        }
        let hold = self.free_hold(me).ok_or(TakeError::Holding)?;
        let word = me.line[0].word(HOLDS + hold);
        // PASSED: Release, because a writer that sees this hold also sees that the one before it was released.
        word.store(hold_of(entry.wild_cell()), Ordering::Release);
        // HOLD
        fence(Ordering::SeqCst);
        if !self.is_open(position) {
            word.store(0, Ordering::Release);
            return Ok(None);
        }
        me.holds.set(me.holds.get() | 1 << hold);
        self.pass(me, position);
        Ok(Some(ReadToken(hold as u64)))
    }

    /// Releases a message in a buffer.
    #[inline(always)]
    pub(crate) fn release(&self, me: &Reader, ReadToken(token): ReadToken) {
        if self.skips() {
            me.holds.set(me.holds.get() & !(1 << token));
            // PASSED
            #[expect(clippy::cast_possible_truncation, reason = "the number of a hold")]
            me.line[0].word(HOLDS + token as usize).store(0, Ordering::Release);
            return;
        }
        let oldest = me.oldest.get();
        if token == oldest {
            self.end_oldest(me);
        } else if let Some(ended) = me
            .ended
            .borrow_mut()
            .get_mut(usize::try_from(token.wrapping_sub(oldest).wrapping_sub(1)).unwrap_or(usize::MAX))
        {
            *ended = true;
        }
    }

    /// Passes a message without a buffer.
    #[inline(always)]
    fn pass(&self, me: &Reader, position: u64) {
        me.next.set(position.wrapping_add(1));
        if self.skips() {
            // For observers.
            me.line[0].word(CURSOR).store(me.next.get(), Ordering::Relaxed);
        } else if me.oldest.get() == position {
            self.end_oldest(me);
        } else {
            me.ended.borrow_mut().push_back(true);
        }
    }

    /// The oldest message was released, with those after it, up to the first that was not.
    #[inline(always)]
    fn end_oldest(&self, me: &Reader) {
        let mut oldest = me.oldest.get().wrapping_add(1);
        if oldest != me.next.get() {
            let mut ended = me.ended.borrow_mut();
            while oldest != me.next.get() && ended.pop_front().unwrap_or(true) {
                oldest = oldest.wrapping_add(1);
            }
        }
        self.move_cursor(me, oldest);
    }

    #[inline(always)]
    fn move_cursor(&self, me: &Reader, oldest: u64) {
        me.oldest.set(oldest);
        if me.has_owned.get() {
            return self.move_shared_cursor(me, oldest);
        }
        // PASSED
        me.line[0].word(CURSOR).store(oldest, Ordering::Release);
    }

    /// Continues with the newest message, and counts the lost ones.
    #[cold]
    fn catch_up(&self, me: &Reader, position: u64) {
        let newest = self.tail().load(Ordering::Acquire).wrapping_sub(1);
        // At least one position further, even if a peer breaks the protocol.
        let next = later(position.wrapping_add(1), newest);
        let lost = me.lost.get().saturating_add(next.wrapping_sub(position));
        me.lost.set(lost);
        me.line[0].word(LOST).store(me.word.detail(lost), Ordering::Relaxed);
        self.resume_at(me, next);
    }

    /// Forgets what it holds by its cursor, and continues at another position.
    fn resume_at(&self, me: &Reader, next: u64) {
        me.next.set(next);
        me.ended.borrow_mut().clear();
        self.move_cursor(me, next);
    }
}

impl Reader {
    /// The position of the next message.
    pub(crate) fn position(&self) -> u64 {
        self.next.get()
    }

    /// Number of messages that the reader lost because it was overtaken.
    pub(crate) fn lost(&self) -> u64 {
        self.lost.get()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::config::PoolId;
    use crate::link::core::{Core, DataRef};
    use crate::link::endpoint::Endpoint;
    use crate::participant::Side;
    use crate::pool::owner::{Holder, MsgOwner};
    use crate::ring::Ring;
    use crate::segment::layout::LinkShape;

    fn link(ring_capacity: u32, msg: u32) -> Core {
        let mut pools = [(0, 0); PoolId::COUNT];
        pools[PoolId::CpuMsg as usize] = (64, msg);
        let rules = BroadcastConfig { slow: SlowReaders::Wait, ..BroadcastConfig::default() };
        Core::heap(&LinkShape {
            ring_capacity,
            single: false,
            broadcast: Some(rules),
            pools,
            request_window: 0,
            latency_sample: 0,
        })
    }

    fn sits_down(core: &Core, side: Side) -> Participant {
        let who = shmesh_sys::process::ProcessIdentity { pid: 1, start_time: 1, pid_namespace: 1 };
        core.seats.attach(&who, side).expect("a free seat")
    }

    fn attach(core: &Core, side: Side) -> Endpoint {
        Endpoint::new(core, sits_down(core, side))
    }

    fn ring(core: &Core) -> &Broadcast {
        let Ring::Broadcast(ring) = core.outgoing(Side::Primary) else { unreachable!() };
        ring
    }

    fn send(writer: &Endpoint, ring: &Broadcast) {
        let state = writer.writer(ring).expect("the role is open");
        let (cell, owner) = writer.loan_msg().unwrap_or_else(|| {
            assert!(writer.make_free(ring, state), "all readers are past the only buffer");
            writer.loan_msg().expect("it is free now")
        });
        writer.broadcast(ring, state, (cell, owner, DataRef::NONE)).expect("room");
    }

    fn take(reader: &Endpoint, ring: &Broadcast) -> Option<ReadToken> {
        ring.take(
            reader.reader(),
            |_, _| unreachable!("all are in buffers"),
            |_, token| Ok(token),
            |_, _, _| (),
        )
        .expect("well")
    }

    #[test]
    fn participant_in_a_dead_readers_seat_is_no_reader_before_it_subscribes() {
        let core = link(4, 8);
        let (writer, ring) = (attach(&core, Side::Primary), ring(&core));
        let dead = attach(&core, Side::Secondary).me;
        assert_eq!(ring.readers(&core.seats).count(), 1);
        core.reclaim(&dead, writer.me.seat, false);
        let newcomer = sits_down(&core, Side::Secondary);
        assert_eq!(newcomer.seat, dead.seat, "the bit of the dead one is still there");
        assert_eq!((ring.readers(&core.seats).count(), ring.place_of(&newcomer, &core.seats)), (0, None));
        // And the dead reader's position does not block the writer.
        (0..20).for_each(|_| send(&writer, ring));
        let newcomer = Endpoint::new(&core, newcomer);
        assert_eq!(ring.place_of(&newcomer.me, &core.seats), Some((0, 0)));
        send(&writer, ring);
        assert!(take(&newcomer, ring).is_some());
    }

    /// An entry has the low 12 bits of its buffer's epoch, and a ring can be longer than that.
    #[test]
    #[cfg_attr(miri, ignore = "more than 4,096 messages take minutes")]
    fn successor_frees_a_buffer_that_was_sent_again_when_all_are_past_the_last_time() {
        let core = link(8192, 1);
        let (writer, ring) = (attach(&core, Side::Primary), ring(&core));
        (0..4096).for_each(|_| send(&writer, ring));
        let (reader, liar) = (attach(&core, Side::Secondary), attach(&core, Side::Secondary));
        send(&writer, ring);
        let token = take(&reader, ring).expect("the last message, in the buffer that the first one had");
        let cursor = ring.cursors[liar.me.seat.as_usize()].word(CURSOR);
        cursor.store(0, Ordering::Relaxed);
        core.reclaim(&writer.me, reader.me.seat, false);
        let successor = attach(&core, Side::Primary);
        let state = successor.writer(ring).expect("the role is open");
        cursor.store(4097, Ordering::Relaxed);
        successor.make_free(ring, state);
        let held = MsgOwner(core.msg().table.owner(0).load(Ordering::Relaxed)).holder();
        assert!(matches!(held, Holder::Published(_)), "a reader has it: {held:?}");
        ring.release(reader.reader(), token);
        assert!(successor.make_free(ring, state) && successor.loan_msg().is_some());
    }
}
