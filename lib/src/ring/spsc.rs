//! The ring for one producer and one consumer.
//!
//! A slot is a whole line: its word, the two ids and 48 bytes. So a small message needs one line and no pool, and up to 112
//! bytes need a second line. The producer stores the word last (`PUBLISH`); the consumer moves `head` on a line of its own
//! (`CONSUME`). Neither reads the other's index on the hot path: the consumer reads the slot, and the producer keeps an old
//! `head` until the ring seems full. It compares its position with one private limit for all that is due from time to time:
//! another look at `head`, or a sampled message.
//!
//! `tail` is not in shared memory: after a crash it is at the first slot that is not new. A consumer that died between
//! taking a message and moving `head` has not returned the message to its application, so the next consumer gets it again.

use std::cell::Cell;

use super::entry::RingEntry;
use super::inline::InlineLines;
use super::{AHEAD, HEAD, Look, Owners, RingFull, WildWord, Words, WordsView};
use crate::segment::prefetch_shared;
use crate::sync::Ordering;

#[derive(Clone, Debug)]
pub(crate) struct Spsc {
    pub(super) words: Words,
}

/// The producer's private state.
#[derive(Debug, Default)]
pub(crate) struct Producer {
    /// The position of the next message; always exact.
    tail: Cell<u64>,
    /// The first position at which the ring seems full: the consumer's position when it was last read, a lap later.
    full: Cell<u64>,
    /// The position for which the next call of [`pass_send_limit`](Spsc::pass_send_limit) is due: `full`, or a sampled one before.
    limit: Cell<u64>,
}

/// The consumer's private state.
#[derive(Debug, Default)]
pub(crate) struct Consumer {
    /// The position of the next message; always exact.
    head: Cell<u64>,
    /// The position of the next sampled message.
    next_sample: Cell<u64>,
    /// Whether the last inline message had a second line: the next one probably has one, too.
    long: Cell<bool>,
}

/// A message of which the consumer has become the owner.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TakenMessage<'a, C> {
    /// In the lines of the slot.
    Inline(RingEntry, InlineLines<'a>),
    /// In a buffer, with its owner word as it was before.
    Pooled(C, u64),
}

impl Spsc {
    pub(super) fn new(words: Words) -> Self {
        Self { words }
    }

    /// Takes the producer's role where the last producer stopped.
    pub(crate) fn resume_producer(&self) -> Producer {
        let head = self.words.control(HEAD).load(Ordering::Acquire);
        let published = (0..self.words.capacity())
            .take_while(|i| {
                let position = head.wrapping_add(*i);
                RingEntry::split(self.words.line(position).word(0).load(Ordering::Acquire)).0
                    == self.words.lap(position)
            })
            .count() as u64;
        let tail = || Cell::new(head.wrapping_add(published));
        Producer { tail: tail(), full: tail(), limit: tail() }
    }

    /// Takes the consumer's role where the last consumer stopped.
    pub(crate) fn resume_consumer(&self) -> Consumer {
        let head = self.words.control(HEAD).load(Ordering::Acquire);
        let until_sample = if self.words.is_sampled(head) { 0 } else { self.words.stamps.until_next(head) };
        Consumer {
            head: Cell::new(head),
            next_sample: Cell::new(head.wrapping_add(until_sample)),
            long: Cell::new(false),
        }
    }

    /// Sends a message in a MSG buffer.
    #[inline(always)]
    pub(crate) fn push(&self, me: &Producer, entry: RingEntry) -> Result<(), RingFull> {
        self.push_with(me, entry, |_, _| {})
    }

    /// Sends a message of at most [`INLINE_MAX_BYTES`](super::INLINE_MAX_BYTES) in the slot.
    #[inline(always)]
    pub(crate) fn push_inline(&self, me: &Producer, ids: u64, msg: &[u8]) -> Result<(), RingFull> {
        self.push_with(me, RingEntry::inline_here(msg.len()), |words, position| {
            words.write_inline(position, ids, msg);
        })
    }

    /// Sends `entry` after `fill` has written what belongs to it at its position.
    #[inline(always)]
    fn push_with(
        &self,
        me: &Producer,
        entry: RingEntry,
        fill: impl FnOnce(WordsView<'_>, u64),
    ) -> Result<(), RingFull> {
        let tail = me.tail.get();
        if tail == me.limit.get() {
            self.pass_send_limit(me)?;
        }
        let words = self.words.view();
        fill(words, tail);
        words.publish(tail, entry);
        me.tail.set(tail.wrapping_add(1));
        Ok(())
    }

    /// Checks that there is room for a message at the limit, writes its time if it is sampled, and sets the next limit.
    #[cold]
    #[inline(never)]
    fn pass_send_limit(&self, me: &Producer) -> Result<(), RingFull> {
        let tail = me.tail.get();
        if tail == me.full.get() {
            // CONSUME: the consumer has read what we are about to overwrite.
            let head = self.words.control(HEAD).load(Ordering::Acquire);
            let room = self.words.capacity().saturating_sub(tail.wrapping_sub(head));
            if room == 0 {
                return Err(RingFull);
            }
            me.full.set(tail.wrapping_add(room));
        }
        if self.words.is_sampled(tail) {
            self.words.stamp(tail);
        }
        let room = me.full.get().wrapping_sub(tail);
        me.limit.set(tail.wrapping_add(room.min(self.words.stamps.until_next(tail))));
        Ok(())
    }

    /// Becomes the owner of the oldest message, and returns where it is.
    /// The caller copies what it needs from the lines and then calls [`pass`](Self::pass), after which the producer may
    /// overwrite them.
    #[inline(always)]
    pub(crate) fn take<O: Owners>(
        &self,
        me: &Consumer,
        owners: &O,
    ) -> Result<Option<TakenMessage<'_, O::Cell>>, WildWord> {
        let taken = self.take_at(me, me.head.get(), owners);
        if taken.is_err() {
            // A damaged message is passed, too, so that it is reported once.
            self.pass(me);
        }
        taken
    }

    /// Returns the slot of the message that was taken to the producer.
    #[inline(always)]
    pub(crate) fn pass(&self, me: &Consumer) {
        self.consume(me, me.head.get().wrapping_add(1));
    }

    /// Receives up to `max` messages, passes each to `each`, and moves `head` once. Returns their number.
    #[inline(always)]
    pub(crate) fn pop_batch<O: Owners>(
        &self,
        me: &Consumer,
        owners: &O,
        max: usize,
        mut each: impl FnMut(TakenMessage<'_, O::Cell>),
    ) -> Result<usize, WildWord> {
        let start = me.head.get();
        // A fast producer must not keep the caller here.
        let max = max.min(usize::try_from(self.words.capacity()).unwrap_or(usize::MAX));
        for taken in 0..max {
            let head = start.wrapping_add(taken as u64);
            match self.take_at(me, head, owners) {
                Ok(Some(taken)) => each(taken),
                // Received messages come first. The next call reports the error.
                Ok(None) | Err(_) if taken > 0 => {
                    self.consume(me, head);
                    return Ok(taken);
                }
                Ok(None) => return Ok(0),
                Err(wild) => {
                    self.consume(me, head.wrapping_add(1));
                    return Err(wild);
                }
            }
        }
        self.consume(me, start.wrapping_add(max as u64));
        Ok(max)
    }

    /// Becomes the owner of the message at `head`. `head` must move before the next one is taken, or at the end of a batch.
    #[inline(always)]
    fn take_at<O: Owners>(
        &self,
        me: &Consumer,
        head: u64,
        owners: &O,
    ) -> Result<Option<TakenMessage<'_, O::Cell>>, WildWord> {
        let (words, lines, entry) = loop {
            let words = self.words.view();
            let lines = words.lines(head);
            if me.long.get() {
                // Fetches both lines at once, where one load after the other would wait for each.
                prefetch_shared(lines.second());
            }
            // PUBLISH
            let (lap, entry) = RingEntry::split(words.line(head).word(0).load(Ordering::Acquire));
            if lap != words.lap(head) {
                if lap.wrapping_add(1) != words.lap(head) {
                    self.pass_sample(me, head);
                    return Err(WildWord("a slot of a lap that was never reached"));
                }
                return Ok(None);
            }
            if head != me.next_sample.get() {
                break (words, lines, entry);
            }
            // And looks again: what lived across the call would be saved for each message.
            self.count(me, head, entry, *owners);
        };
        if entry.is_inline() {
            me.long.set(entry.has_second_line());
            return Ok(Some(TakenMessage::Inline(entry, lines)));
        }
        let cell = owners.cell(entry)?;
        owners.prefetch(entry, cell);
        let later = head.wrapping_add(AHEAD);
        let (lap, next) = RingEntry::split(words.line(later).word(0).load(Ordering::Relaxed));
        if lap == words.lap(later)
            && let Ok(cell) = owners.cell(next)
        {
            owners.prefetch(next, cell);
        }
        match owners.look_at(entry, cell)? {
            Look::Here(word) => {
                // Before `head` moves: recovery must find every message either in the ring or with an owner.
                owners.take_alone(cell, word);
                Ok(Some(TakenMessage::Pooled(cell, word)))
            }
            Look::Gone => Err(WildWord("an entry whose buffer has no owner on this ring")),
        }
    }

    /// Sets the position of the next sampled message, if this is it.
    #[cold]
    fn pass_sample(&self, me: &Consumer, position: u64) {
        if position == me.next_sample.get() {
            me.next_sample.set(position.wrapping_add(self.words.stamps.until_next(position)));
        }
    }

    /// Counts a sampled message that is about to be taken. There is no other consumer, so this one gets it.
    #[cold]
    #[inline(never)]
    fn count<O: Owners>(&self, me: &Consumer, head: u64, entry: RingEntry, owners: O) {
        self.pass_sample(me, head);
        let held = match owners.cell(entry).map(|cell| (cell, owners.look_at(entry, cell))) {
            _ if entry.is_inline() => None,
            Ok((cell, Ok(Look::Here(word)))) => Some((cell, word)),
            _ => return,
        };
        self.words.arrived(head, &owners, held);
    }

    #[inline(always)]
    fn consume(&self, me: &Consumer, head: u64) {
        me.head.set(head);
        // CONSUME
        self.words.control(HEAD).store(head, Ordering::Release);
    }
}
