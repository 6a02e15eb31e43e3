//! The array queue, for any number of producers and consumers.
//!
//! A message is in the queue from the exchange on its slot (`PUBLISH`) until the exchange on its owner word. `tail` and
//! `head` only follow: a participant that finds a published slot, or a message that was received, moves the index on behalf
//! of the one that did it. So a participant that dies between its two exchanges blocks no other, and no step waits for
//! another.
//!
//! A consumer that reads an owner word must know that it belongs to this turn of the slot, and not to a later loan of the
//! same buffer. So it reads `head` again afterwards. A later loan happens after the release of this one, which happens
//! after its consumer moved `head` past this slot. So a consumer that sees the later owner word also sees the later `head`.
//!
//! A producer works with a private copy of `head`, and reads the consumers' line only if the ring looks full by that copy.
//! `head` only grows, so a stale copy reports a full ring too early, and never too late.

use std::cell::Cell;

use super::entry::RingEntry;
use super::{AHEAD, HEAD, Look, Owners, RingFull, TAIL, WildWord, Words, WordsView};
use crate::segment::prefetch_exclusive;
use crate::sync::{AtomicU64, Line, Ordering, WORDS_PER_LINE, spin};

/// Every failed round means that another participant made progress, or that a hostile peer writes arbitrary values. After
/// this many, and one for each slot (which may have been received by a dead consumer), it is a hostile peer.
const ROUNDS_MAX: u64 = if cfg!(loom) { 1_000 } else { 1 << 14 };

#[derive(Clone, Debug)]
pub(crate) struct Mpmc {
    pub(super) words: Words,
}

/// A producer's private state.
#[derive(Debug, Default)]
pub(crate) struct Producer {
    /// `head` as last read. May be stale, and have any value if a hostile peer wrote `head`.
    head: Cell<u64>,
    /// The first position after the last message at which the ring seems full, or that is sampled. Not more than the capacity
    /// after it, whatever `head` is.
    limit: Cell<u64>,
}

/// The reason why a message could not be sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PushError {
    Full,
    Wild(WildWord),
}

/// A message that a consumer received, if there was one: its entry, its cell and its owner word.
type PopResult<O> = Result<Option<(RingEntry, <O as Owners>::Cell, u64)>, WildWord>;

impl From<RingFull> for PushError {
    fn from(_: RingFull) -> Self {
        Self::Full
    }
}

impl Mpmc {
    pub(super) fn new(words: Words) -> Self {
        Self { words }
    }

    #[inline]
    pub(super) fn slot(&self, position: u64) -> &AtomicU64 {
        slot(self.words.view(), position)
    }

    /// Sends one message by its entry.
    #[inline(always)]
    pub(crate) fn push(&self, me: &Producer, entry: RingEntry) -> Result<(), PushError> {
        self.push_as::<true>(me, entry)
    }

    /// As [`push`](Self::push), at any position. A function of its own: a call in the loop of all others would make them
    /// slower.
    #[cold]
    #[inline(never)]
    fn push_anywhere(&self, me: &Producer, entry: RingEntry) -> Result<(), PushError> {
        self.push_as::<false>(me, entry)
    }

    #[inline(always)]
    fn push_as<const PLAIN: bool>(&self, me: &Producer, entry: RingEntry) -> Result<(), PushError> {
        let words = self.words.view();
        let tail = words.control(TAIL);
        for _ in 0..words.capacity() + ROUNDS_MAX {
            let position = tail.load(Ordering::Acquire);
            let slot = slot(words, position);
            let seen = slot.load(Ordering::Acquire);
            let lap = RingEntry::split(seen).0;
            let here = words.lap(position);
            if lap == here {
                // Another producer published here and has not moved `tail` yet, or died before it could.
                let _ = tail.compare_exchange(
                    position,
                    position.wrapping_add(1),
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                continue;
            }
            if lap.wrapping_add(1) != here {
                // `tail` was old when we read the slot. Only a hostile peer can make this last.
                spin();
                continue;
            }
            if PLAIN {
                if position.wrapping_sub(me.limit.get()).cast_signed() >= 0 {
                    return self.push_anywhere(me, entry);
                }
            } else {
                self.pass_limit(me, position)?;
            }
            // PUBLISH
            if slot.compare_exchange(seen, entry.in_lap(here), Ordering::Release, Ordering::Relaxed).is_ok() {
                // FENCE, also if another participant has moved `tail` for us.
                let _ = tail.compare_exchange(
                    position,
                    position.wrapping_add(1),
                    Ordering::AcqRel,
                    Ordering::Acquire,
                );
                prefetch_exclusive(place(words, position.wrapping_add(AHEAD)).0);
                return Ok(());
            }
        }
        Err(PushError::Wild(WildWord("a ring whose slots never settle")))
    }

    /// Checks that there is room for a message at `position`, writes its time if it is sampled, and sets the next limit.
    fn pass_limit(&self, me: &Producer, position: u64) -> Result<(), RingFull> {
        let capacity = self.words.capacity();
        // Unsigned: a copy beyond `position` is refreshed too, so a wild value does not outlast the damage.
        if position.wrapping_sub(me.head.get()) >= capacity {
            // CONSUME
            me.head.set(self.words.control(HEAD).load(Ordering::Acquire));
            // Signed: consumers may have passed an old position, and then the exchange on its slot fails.
            if position.wrapping_sub(me.head.get()).cast_signed() >= capacity.cast_signed() {
                return Err(RingFull);
            }
        }
        if self.words.is_sampled(position) {
            self.words.stamp(position);
        }
        let room = capacity.saturating_sub(position.wrapping_sub(me.head.get()));
        me.limit.set(position.wrapping_add(room.min(self.words.stamps.until_next(position)).max(1)));
        Ok(())
    }

    /// Receives one message: its entry, its cell and its owner word.
    #[inline(always)]
    pub(crate) fn pop<O: Owners>(&self, owners: &O) -> Result<Option<(RingEntry, O::Cell, u64)>, WildWord> {
        let start = self.words.control(HEAD).load(Ordering::Acquire);
        let mut position = start;
        let taken = self.take(&mut position, owners);
        if position != start {
            self.pass(position);
        }
        taken
    }

    /// Whether there was no message at some time during this call. `false` says nothing: the messages at `head` may have been
    /// received already.
    #[inline]
    pub(crate) fn is_empty_now(&self) -> bool {
        let words = self.words.view();
        // Relaxed, as nothing is read that depends on them. A message that was sent before this call is here or at a later
        // position, and not before `tail` had passed this slot, which happens after it is published: so it is seen.
        let position = words.control(HEAD).load(Ordering::Relaxed);
        let (lap, _) = RingEntry::split(slot(words, position).load(Ordering::Relaxed));
        lap.wrapping_add(1) == words.lap(position)
    }

    /// Receives the message at `position`, unless it was received or is damaged, and moves `head` past it. Later messages
    /// stay. The caller has done this for every message before.
    pub(crate) fn pop_at<O: Owners>(&self, position: u64, owners: &O) -> Option<(RingEntry, O::Cell, u64)> {
        // PUBLISH
        let (lap, entry) = RingEntry::split(self.slot(position).load(Ordering::Acquire));
        let cell = owners.cell(entry).ok().filter(|_| lap == self.words.lap(position));
        let look = cell.map(|cell| (cell, owners.look_at(entry, cell)));
        // After the owner word was read, as in `take`.
        let passed = self.words.control(HEAD).load(Ordering::Acquire);
        let taken = match look {
            Some((cell, Ok(Look::Here(word)))) if passed.wrapping_sub(position).cast_signed() <= 0 => {
                owners.take_at(cell, word).then_some((entry, cell, word))
            }
            _ => None,
        };
        self.pass(position.wrapping_add(1));
        taken
    }

    /// Receives up to `max` messages, passes each to `each`, and moves `head` once. Returns their number.
    #[inline(always)]
    pub(crate) fn pop_batch<O: Owners>(
        &self,
        owners: &O,
        max: usize,
        mut each: impl FnMut(RingEntry, O::Cell, u64),
    ) -> Result<usize, WildWord> {
        let start = self.words.control(HEAD).load(Ordering::Acquire);
        let mut position = start;
        let mut taken = 0;
        let mut wild = None;
        // Fast producers must not keep the caller here.
        let max = max.min(usize::try_from(self.words.capacity()).unwrap_or(usize::MAX));
        while taken < max && wild.is_none() {
            let before = position;
            match self.take(&mut position, owners) {
                Ok(Some((entry, cell, word))) => {
                    if entry.is_inline() {
                        // `each` frees its cell at once, and no consumer may find a later loan of it behind this entry.
                        self.pass(position);
                    }
                    each(entry, cell, word);
                    taken += 1;
                }
                Ok(None) => break,
                Err(found) => {
                    wild = Some(found);
                    // Received messages come first. The next call reports the error and passes the entry.
                    position = if taken > 0 { before } else { position };
                }
            }
        }
        if position != start {
            self.pass(position);
        }
        match wild {
            Some(wild) if taken == 0 => Err(wild),
            _ => Ok(taken),
        }
    }

    /// Becomes the owner of the first message at or after `position`, and moves `position` past it. The caller moves
    /// `head`.
    #[inline(always)]
    fn take<O: Owners>(&self, position: &mut u64, owners: &O) -> PopResult<O> {
        self.take_as::<true, O>(position, owners)
    }

    /// As [`take`](Self::take), if there is a message at a sampled position. Also returns the new position. A function of its
    /// own: a call in the loop of all others would make them slower.
    #[cold]
    #[inline(never)]
    fn take_anywhere<O: Owners>(&self, mut position: u64, owners: O) -> (u64, PopResult<O>) {
        let taken = self.take_as::<false, O>(&mut position, &owners);
        (position, taken)
    }

    #[inline(always)]
    fn take_as<const PLAIN: bool, O: Owners>(&self, position: &mut u64, owners: &O) -> PopResult<O> {
        let words = self.words.view();
        let head = words.control(HEAD);
        for _ in 0..words.capacity() + ROUNDS_MAX {
            let at = *position;
            // PUBLISH
            let (lap, entry) = RingEntry::split(slot(words, at).load(Ordering::Acquire));
            let here = words.lap(at);
            if lap.wrapping_add(1) == here {
                return Ok(None);
            }
            // If no consumer has passed this slot after the owner word was read, the word is of this turn.
            let is_passed = |position: &mut u64| {
                let passed = head.load(Ordering::Acquire);
                let is_passed = passed.wrapping_sub(at).cast_signed() > 0;
                if is_passed {
                    *position = passed;
                }
                is_passed
            };
            if lap != here {
                if !is_passed(position) {
                    spin();
                }
                continue;
            }
            if PLAIN && self.words.is_sampled(at) {
                let (after, taken) = self.take_anywhere(at, *owners);
                *position = after;
                // In parts, so that what the others take need not be in memory for the sake of this call.
                return match taken {
                    Ok(Some((entry, cell, word))) => Ok(Some((entry, cell, word))),
                    Ok(None) => Ok(None),
                    Err(wild) => Err(wild),
                };
            }
            let look = match owners.cell(entry) {
                Ok(cell) => {
                    owners.prefetch(entry, cell);
                    match owners.look_at(entry, cell) {
                        Ok(look) => Ok((cell, look)),
                        Err(wild) => Err(wild),
                    }
                }
                Err(wild) => Err(wild),
            };
            if is_passed(position) {
                continue;
            }
            let after = at.wrapping_add(1);
            match look {
                Ok((cell, Look::Here(word))) => {
                    let later = at.wrapping_add(AHEAD);
                    let (lap, next) = RingEntry::split(slot(words, later).load(Ordering::Relaxed));
                    if lap == words.lap(later)
                        && let Ok(next_cell) = owners.cell(next)
                    {
                        owners.prefetch(next, next_cell);
                    }
                    if owners.take_at(cell, word) {
                        if !PLAIN && self.words.is_sampled(at) {
                            let held = (!entry.is_inline()).then_some((cell, word));
                            self.words.arrived(at, owners, held);
                        }
                        *position = after;
                        return Ok(Some((entry, cell, word)));
                    }
                    // Another participant received it, or declared its sender dead: look again, and pass it.
                }
                Ok((_, Look::Gone)) => *position = after,
                Err(wild) => {
                    *position = after;
                    return Err(wild);
                }
            }
        }
        Err(WildWord("a ring whose slots never settle"))
    }

    /// Separates what an evicted producer has sent from what it has not. A message is in the ring when this thread looks at
    /// it from now on; or its sender, which checks its seat after it has moved `tail`, sees that it was evicted.
    pub(crate) fn fence_producers(&self) {
        // FENCE
        self.words.control(TAIL).fetch_add(0, Ordering::AcqRel);
    }

    /// Moves `head` past messages whose consumers died before they could. This comes before their buffers can be loaned
    /// again: an entry names an epoch by its last bits, and those wrap.
    pub(crate) fn settle(&self, owners: &impl Owners) {
        let mut position = self.words.control(HEAD).load(Ordering::Acquire);
        for _ in 0..self.words.capacity() {
            let (lap, entry) = RingEntry::split(self.slot(position).load(Ordering::Acquire));
            if lap != self.words.lap(position) || owners.look(entry) != Ok(Look::Gone) {
                break;
            }
            position = position.wrapping_add(1);
        }
        self.pass(position);
    }

    /// Moves `head` to `position`: every message before it was received, by us or by another consumer.
    #[inline]
    fn pass(&self, position: u64) {
        let words = self.words.view();
        let head = words.control(HEAD);
        let mut current = head.load(Ordering::Relaxed);
        for _ in 0..words.capacity() + ROUNDS_MAX {
            if position.wrapping_sub(current).cast_signed() <= 0 {
                return;
            }
            // CONSUME
            match head.compare_exchange(current, position, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => current = now,
            }
        }
    }
}

/// The line of the slot at `position`, and its word there. Consecutive positions are on different lines, so that a producer
/// and a consumer rarely access the same one.
#[inline(always)]
fn place(words: WordsView<'_>, position: u64) -> (&Line, usize) {
    let (index, lines) = (words.slot_index(position), words.slots.len());
    // The capacity is a power of two. With fewer than 8 slots there is one line.
    (&words.slots[index & (lines - 1)], (index >> lines.trailing_zeros()) % WORDS_PER_LINE)
}

#[inline(always)]
fn slot(words: WordsView<'_>, position: u64) -> &AtomicU64 {
    let (line, word) = place(words, position);
    line.word(word)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::ring::stamps::Stamps;
    use crate::ring::{CONTROL_LINES, Kind, Ring};
    use crate::segment::Lines;

    #[test]
    fn repaired_head_leaves_no_trace_of_a_wild_value() {
        let lines = Lines::heap;
        let ring =
            Ring::new(lines(CONTROL_LINES), lines(1), &lines(0), 2, Kind::Mpmc, Stamps::new(lines(0), 0));
        let Ring::Mpmc(ring) = ring else { unreachable!() };
        let (me, head) = (Producer::default(), ring.words.control(HEAD));
        let send = |cell| ring.push(&me, RingEntry::pooled(cell, 1));
        assert_eq!((send(0), send(1), send(2)), (Ok(()), Ok(()), Err(PushError::Full)));
        head.store(1 << 40, Ordering::Relaxed);
        assert_eq!(send(2), Ok(()), "the ring says that all was received");
        head.store(1, Ordering::Relaxed);
        assert_eq!(send(3), Err(PushError::Full), "and now that it was not");
        head.store(2, Ordering::Relaxed);
        assert_eq!(send(3), Ok(()));
    }
}
