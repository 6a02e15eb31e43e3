//! The array queue: any number of producers and consumers.
//!
//! A message is in the queue from the exchange on its slot (`PUBLISH`) until the exchange on its owner word. `tail` and
//! `head` only follow: whoever finds a slot that is published, or a message that is taken, moves the index on behalf of the
//! one that did it. So a participant that dies between its two exchanges holds nobody up, and no step waits for anybody.
//!
//! A consumer that reads an owner word must know that it belongs to this turn of the slot and not to a later loan of the
//! same buffer. It reads `head` again afterwards: a later loan happens after the release of this one, that after its
//! consumer moved `head` past this slot, so whoever sees the later owner word sees the later `head`.
//!
//! A producer works with a private copy of `head` and reads the consumers' line only when the ring looks full by that copy:
//! `head` only grows, so a stale copy reports a full ring too early and never too late.

use std::cell::Cell;

use super::entry::Entry;
use super::{AHEAD, Full, HEAD, Look, Owners, TAIL, Wild, Words};
use crate::segment::prefetch_exclusive;
use crate::sync::{AtomicU64, Line, Ordering, spin};

/// Every failed round means that somebody else made progress, or that a hostile peer writes what it likes. After so many,
/// and one for each slot (which may hold what a dead consumer had taken), it is the latter.
const ROUNDS_MAX: u64 = if cfg!(loom) { 1_000 } else { 1 << 14 };

#[derive(Clone, Debug)]
pub(crate) struct Mpmc {
    pub(super) words: Words,
}

/// A producer's private state.
#[derive(Debug, Default)]
pub(crate) struct Producer {
    /// `head` as last read. May be stale; any number, if a hostile peer wrote `head`.
    head: Cell<u64>,
}

/// Why a message could not be sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PushError {
    Full,
    Wild(Wild),
}

impl From<Full> for PushError {
    fn from(_: Full) -> Self {
        Self::Full
    }
}

impl Mpmc {
    pub(super) fn new(words: Words) -> Self {
        Self { words }
    }

    /// Neighbours in time lie on different lines, so that a producer and a consumer seldom meet on one.
    #[inline]
    pub(super) fn slot(&self, position: u64) -> &AtomicU64 {
        let (line, word) = self.place(position);
        line.word(word)
    }

    #[inline]
    fn place(&self, position: u64) -> (&Line, usize) {
        let (index, lines) = (self.words.slot_index(position), self.words.slots.len());
        // The capacity is a power of two: with fewer than 8 slots there is one line, and it is all of them.
        (&self.words.slots[index & (lines - 1)], index >> lines.trailing_zeros())
    }

    /// Sends one message.
    #[inline(always)]
    pub(crate) fn push(&self, me: &Producer, entry: Entry) -> Result<(), PushError> {
        let tail = self.words.control(TAIL);
        for _ in 0..self.words.capacity() + ROUNDS_MAX {
            let position = tail.load(Ordering::Acquire);
            let slot = self.slot(position);
            let seen = slot.load(Ordering::Acquire);
            let lap = Entry::split(seen).0;
            let here = self.words.lap(position);
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
            if self.looks_full(me, position) {
                return Err(PushError::Full);
            }
            // PUBLISH
            if slot.compare_exchange(seen, entry.in_lap(here), Ordering::Release, Ordering::Relaxed).is_ok() {
                // FENCE, also when somebody else has moved `tail` for us.
                let _ = tail.compare_exchange(
                    position,
                    position.wrapping_add(1),
                    Ordering::AcqRel,
                    Ordering::Acquire,
                );
                prefetch_exclusive(self.place(position.wrapping_add(AHEAD)).0);
                return Ok(());
            }
        }
        Err(PushError::Wild(Wild("a ring whose slots never settle")))
    }

    /// Whether the slot of `position` still holds a message of the lap before.
    #[inline(always)]
    fn looks_full(&self, me: &Producer, position: u64) -> bool {
        // Unsigned: a copy beyond `position` is refreshed too, so a wild value does not outlast the damage.
        if position.wrapping_sub(me.head.get()) < self.words.capacity() {
            return false;
        }
        // CONSUME
        me.head.set(self.words.control(HEAD).load(Ordering::Acquire));
        // Signed: consumers may have passed an old position, and then the exchange on its slot fails.
        position.wrapping_sub(me.head.get()).cast_signed() >= self.words.capacity().cast_signed()
    }

    /// Takes one message: its entry and its owner word.
    #[inline(always)]
    pub(crate) fn pop(&self, owners: &impl Owners) -> Result<Option<(Entry, u64)>, Wild> {
        let start = self.words.control(HEAD).load(Ordering::Acquire);
        let mut position = start;
        let taken = self.take(&mut position, owners);
        if position != start {
            self.pass(position);
        }
        taken
    }

    /// Takes the message at `position`, unless it was taken or is damaged, and moves `head` behind it. Later messages stay. The caller
    /// has done this for every message before.
    pub(crate) fn pop_at(&self, position: u64, owners: &impl Owners) -> Option<(Entry, u64)> {
        // PUBLISH
        let (lap, entry) = Entry::split(self.slot(position).load(Ordering::Acquire));
        let look = if lap == self.words.lap(position) { owners.look(entry) } else { Ok(Look::Gone) };
        // After the owner word was read, as in `take`.
        let passed = self.words.control(HEAD).load(Ordering::Acquire);
        let taken = match look {
            Ok(Look::Here(word)) if passed.wrapping_sub(position).cast_signed() <= 0 => {
                owners.take(entry, word).then_some((entry, word))
            }
            _ => None,
        };
        self.pass(position.wrapping_add(1));
        taken
    }

    /// Takes up to `max` messages, giving each to `each`, and moves `head` once. Returns how many.
    #[inline(always)]
    pub(crate) fn pop_batch(
        &self,
        owners: &impl Owners,
        max: usize,
        mut each: impl FnMut(Entry, u64),
    ) -> Result<usize, Wild> {
        let start = self.words.control(HEAD).load(Ordering::Acquire);
        let mut position = start;
        let mut taken = 0;
        let mut wild = None;
        // Producers that keep up must not keep us here.
        let max = max.min(usize::try_from(self.words.capacity()).unwrap_or(usize::MAX));
        while taken < max && wild.is_none() {
            let before = position;
            match self.take(&mut position, owners) {
                Ok(Some((entry, word))) => {
                    if entry.is_inline() {
                        // `each` frees its cell at once, and no consumer may find a later loan of it behind this entry.
                        self.pass(position);
                    }
                    each(entry, word);
                    taken += 1;
                }
                Ok(None) => break,
                Err(found) => {
                    wild = Some(found);
                    // What was taken comes first; the next call reports, and passes, what is wrong.
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

    /// Makes the first message at or after `position` ours, and moves `position` behind it. The caller moves `head`.
    #[inline(always)]
    fn take(&self, position: &mut u64, owners: &impl Owners) -> Result<Option<(Entry, u64)>, Wild> {
        let head = self.words.control(HEAD);
        for _ in 0..self.words.capacity() + ROUNDS_MAX {
            let at = *position;
            // PUBLISH
            let (lap, entry) = Entry::split(self.slot(at).load(Ordering::Acquire));
            let here = self.words.lap(at);
            if lap.wrapping_add(1) == here {
                return Ok(None);
            }
            owners.ahead(entry);
            let look = if lap == here { owners.look(entry) } else { Ok(Look::Gone) };
            // After the owner word was read: if nobody has passed this slot yet, the word is of this turn.
            let passed = head.load(Ordering::Acquire);
            if passed.wrapping_sub(at).cast_signed() > 0 {
                *position = passed;
                continue;
            }
            if lap != here {
                spin();
                continue;
            }
            let after = at.wrapping_add(1);
            match look {
                Ok(Look::Here(word)) => {
                    let later = at.wrapping_add(AHEAD);
                    let (lap, next) = Entry::split(self.slot(later).load(Ordering::Relaxed));
                    if lap == self.words.lap(later) {
                        owners.ahead(next);
                    }
                    if owners.take(entry, word) {
                        *position = after;
                        return Ok(Some((entry, word)));
                    }
                    // Somebody took it, or declared its sender dead: look again, and pass it.
                }
                Ok(Look::Gone) => *position = after,
                Err(wild) => {
                    *position = after;
                    return Err(wild);
                }
            }
        }
        Err(Wild("a ring whose slots never settle"))
    }

    /// Parts what an evicted producer has sent from what it has not: what this thread looks at from now on is in the ring, or
    /// its sender, which looks at its seat after it has moved `tail`, sees that it was evicted.
    pub(crate) fn fence_producers(&self) {
        // FENCE
        self.words.control(TAIL).fetch_add(0, Ordering::AcqRel);
    }

    /// Moves `head` past messages whose consumers died before they could. Before their buffers can be loaned again: an
    /// entry names an epoch by its last bits, and those come round.
    pub(crate) fn settle(&self, owners: &impl Owners) {
        let mut position = self.words.control(HEAD).load(Ordering::Acquire);
        for _ in 0..self.words.capacity() {
            let (lap, entry) = Entry::split(self.slot(position).load(Ordering::Acquire));
            if lap != self.words.lap(position) || owners.look(entry) != Ok(Look::Gone) {
                break;
            }
            position = position.wrapping_add(1);
        }
        self.pass(position);
    }

    /// Moves `head` to `position`: everything before it was taken, by us or by somebody else.
    #[inline]
    fn pass(&self, position: u64) {
        let head = self.words.control(HEAD);
        let mut current = head.load(Ordering::Relaxed);
        for _ in 0..self.words.capacity() + ROUNDS_MAX {
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

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::ring::{CONTROL_LINES, Kind, Ring};
    use crate::segment::Lines;

    #[test]
    fn wild_head_is_forgotten_once_it_is_repaired() {
        let lines = Lines::heap;
        let ring = Ring::new(lines(CONTROL_LINES), lines(1), &lines(0), 2, Kind::Mpmc);
        let Ring::Mpmc(ring) = ring else { unreachable!() };
        let (me, head) = (Producer::default(), ring.words.control(HEAD));
        let send = |cell| ring.push(&me, Entry::pooled(cell, 1));
        assert_eq!((send(0), send(1), send(2)), (Ok(()), Ok(()), Err(PushError::Full)));
        head.store(1 << 40, Ordering::Relaxed);
        assert_eq!(send(2), Ok(()), "the ring says that all was received");
        head.store(1, Ordering::Relaxed);
        assert_eq!(send(3), Err(PushError::Full), "and now that it was not");
        head.store(2, Ordering::Relaxed);
        assert_eq!(send(3), Ok(()));
    }
}
