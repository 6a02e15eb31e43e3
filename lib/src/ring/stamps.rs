//! The times at which sampled messages were sent.
//!
//! One position of `n` is sampled, and has a word in a table beside the ring. A sender that is about to send there writes the
//! time before it publishes the slot, and the receiver reads it, so `PUBLISH` makes it visible. The table is shorter than the
//! positions, so the word also has the last bits of the position's turn: how often the table was passed before.
//!
//! Two senders may write the word of one position, both at the time at which they try to send there. A sender that was stopped may
//! write the word much later. Its turn differs then, and the receiver drops the sample.

use super::Words;
use crate::participant::times::now;
use crate::segment::Lines;
use crate::sync::{AtomicU64, Ordering, WORDS_PER_LINE};

/// Bits of the time in a word. It counts nanoseconds modulo 2^48, which are 78 hours.
const TIME_BITS: u32 = 48;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;

/// The table of a ring; without lines if nothing is sampled.
#[derive(Clone, Debug)]
pub(crate) struct Stamps {
    lines: Lines,
    /// The interval between sampled positions, less 1. All bits if nothing is sampled: then it is position 0 alone, which has
    /// no word.
    pub(super) mask: u64,
    /// log2 of the interval.
    shift: u32,
}

/// The number of words of a ring's table: one for each sampled slot.
const fn words(capacity: usize, interval: u32) -> usize {
    match capacity.checked_div(interval as usize) {
        None => 0,
        Some(0) => 1,
        Some(words) => words,
    }
}

/// The number of lines of a ring's table, if one position of `interval`, a power of two, is sampled; 0: none.
pub(crate) const fn stamp_lines(capacity: usize, interval: u32) -> usize {
    words(capacity, interval).div_ceil(WORDS_PER_LINE)
}

impl Stamps {
    /// `lines` must be [`stamp_lines`].
    pub(crate) fn new(lines: Lines, interval: u32) -> Self {
        let mask = u64::from(interval).wrapping_sub(1);
        Self { lines, mask, shift: interval.checked_ilog2().unwrap_or(0) }
    }

    /// Number of positions from `position` to the first sampled one after it, if something is sampled.
    pub(super) fn until_next(&self, position: u64) -> u64 {
        (self.mask - (position & self.mask)).saturating_add(1)
    }

    /// The word of a sampled position, and the turn of the position there.
    fn word(&self, position: u64, capacity: u64) -> Option<(&AtomicU64, u64)> {
        let words = (capacity >> self.shift).max(1);
        let number = position >> self.shift;
        let index = usize::try_from(number & (words - 1)).ok()?;
        let word = self.lines.get(index / WORDS_PER_LINE)?.word(index % WORDS_PER_LINE);
        Some((word, number >> words.ilog2() << TIME_BITS))
    }
}

impl Words {
    /// Writes the time for a message that is about to be sent at a sampled position.
    #[cold]
    #[inline(never)]
    pub(super) fn stamp(&self, position: u64) {
        if let Some((word, turn)) = self.stamps.word(position, self.mask + 1) {
            word.store(turn | now() & TIME_MASK, Ordering::Relaxed);
        }
    }

    /// How long the message at a sampled position was on its way, in nanoseconds, and the time now.
    #[cold]
    #[inline(never)]
    pub(super) fn age(&self, position: u64) -> Option<(u64, u64)> {
        let (word, turn) = self.stamps.word(position, self.mask + 1)?;
        let (stamp, now) = (word.load(Ordering::Relaxed), now());
        let age = now.wrapping_sub(stamp) & TIME_MASK;
        // A sender whose clock is ahead, in a time namespace of its own, gives no times.
        (stamp & !TIME_MASK == turn && age < 1 << (TIME_BITS - 1)).then_some((age, now))
    }
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use super::*;
    use crate::ring::{CONTROL_LINES, Kind, Ring};

    #[test]
    fn stamp_counts_for_its_own_turn_only() {
        for (capacity, interval) in [(8, 1), (8, 4), (8, 8), (8, 64), (1024, 64)] {
            let stamps = Stamps::new(Lines::heap(stamp_lines(capacity, interval)), interval);
            let lines = Lines::heap;
            let slots = lines(Kind::Spsc.slot_lines(capacity));
            let ring = Ring::new(lines(CONTROL_LINES), slots, &lines(0), capacity, Kind::Spsc, stamps);
            let words = ring.words();
            let step = (capacity as u64).max(interval.into());
            let positions = [0, step, 7 * step, step << 15, u64::MAX - u64::from(interval) + 1];
            for position in positions {
                assert_eq!(position & words.stamps.mask, 0);
                words.stamp(position);
                assert!(words.age(position).is_some_and(|(age, _)| age < 1_000_000_000));
                // The same word, a turn later and earlier.
                assert!(words.age(position.wrapping_add(step)).is_none(), "{position} of {capacity}");
                assert!(words.age(position.wrapping_sub(step)).is_none(), "{position} of {capacity}");
            }
        }
    }

    #[test]
    fn without_samples_nothing_has_a_word() {
        let stamps = Stamps::new(Lines::heap(stamp_lines(8, 0)), 0);
        assert_eq!((stamps.lines.len(), stamps.mask), (0, u64::MAX));
        assert!(stamps.word(0, 8).is_none());
    }
}
