//! The entry of a ring's slot, in one word.
//!
//! ```text
//! | lap 32 | epoch, low 12      | cell 19 | 0 |    a MSG buffer
//! | lap 32 | length 7 | epoch 6 | cell 18 | 1 |    an inline message in a cell (many producers)
//! | lap 32 | length 7 | 0       | 0       | 1 |    an inline message in this very slot (one producer)
//! ```
//!
//! The lap counts how often the ring's positions have wrapped, starting at 1, so the zeros of fresh memory mean "not yet".
//! It wraps after 2^32 laps, which matters only to an exchange that was stalled for exactly that long.

use super::inline::{FIRST_LINE_BYTES, INLINE_MAX_BYTES};

/// Bits of the index of a MSG buffer in an entry.
pub(crate) const CELL_BITS: u32 = 19;
/// Bits of the index of an inline cell in an entry.
pub(crate) const INLINE_CELL_BITS: u32 = 18;
const INLINE: u64 = 1;
const CELL_SHIFT: u32 = 1;
const POOLED_EPOCH_SHIFT: u32 = CELL_SHIFT + CELL_BITS;
const INLINE_EPOCH_SHIFT: u32 = CELL_SHIFT + INLINE_CELL_BITS;
const LENGTH_SHIFT: u32 = INLINE_EPOCH_SHIFT + 6;
const LENGTH_BITS: u32 = LAP_SHIFT - LENGTH_SHIFT;
const LAP_SHIFT: u32 = 32;
/// Bits of an epoch in an entry. In models only one, so that epochs wrap with the second loan.
const POOLED_BITS: u32 = if cfg!(loom) { 1 } else { 12 };
const INLINE_BITS: u32 = if cfg!(loom) { 1 } else { 6 };

const fn low(value: u64, bits: u32) -> u64 {
    value & ((1 << bits) - 1)
}

/// The low half of a slot's word: the message without the lap.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct RingEntry(u64);

impl RingEntry {
    /// The MSG buffer `cell` in its epoch.
    #[inline]
    pub(crate) fn pooled(cell: u32, epoch: u64) -> Self {
        Self(low(epoch, POOLED_BITS) << POOLED_EPOCH_SHIFT | u64::from(cell) << CELL_SHIFT)
    }

    /// An inline message of `len` bytes in `cell`.
    pub(crate) fn inline_cell(cell: u32, epoch: u64, len: usize) -> Self {
        debug_assert!(len <= INLINE_MAX_BYTES && cell < 1 << INLINE_CELL_BITS);
        Self(
            (len as u64) << LENGTH_SHIFT
                | low(epoch, INLINE_BITS) << INLINE_EPOCH_SHIFT
                | u64::from(cell) << CELL_SHIFT
                | INLINE,
        )
    }

    /// An inline message of `len` bytes in the slot itself.
    #[inline]
    pub(crate) fn inline_here(len: usize) -> Self {
        debug_assert!(len <= INLINE_MAX_BYTES);
        Self((len as u64) << LENGTH_SHIFT | INLINE)
    }

    /// In a slot of a broadcast ring, with the previous lap: the next message is being written. No message has this length.
    pub(crate) const WRITING: Self = Self(low(u64::MAX, LENGTH_BITS) << LENGTH_SHIFT | INLINE);

    #[inline]
    pub(crate) fn is_inline(self) -> bool {
        self.0 & INLINE != 0
    }

    /// The cell index, unchecked.
    #[inline]
    pub(crate) fn wild_cell(self) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "19 bits")]
        let cell =
            low(self.0 >> CELL_SHIFT, if self.is_inline() { INLINE_CELL_BITS } else { CELL_BITS }) as u32;
        cell
    }

    /// Number of bytes of an inline message; `None` if no correct sender writes that value.
    #[inline]
    pub(crate) fn inline_len(self) -> Option<u32> {
        #[expect(clippy::cast_possible_truncation, reason = "7 bits")]
        let len = low(self.0 >> LENGTH_SHIFT, LENGTH_BITS) as u32;
        (len as usize <= INLINE_MAX_BYTES).then_some(len)
    }

    /// Whether an inline message is longer than its first line.
    #[inline]
    pub(crate) fn has_second_line(self) -> bool {
        self.inline_len().is_some_and(|len| len as usize > FIRST_LINE_BYTES)
    }

    /// Whether the entry has this epoch of its cell, as far as its bits go.
    #[inline]
    pub(crate) fn names(self, epoch: u64) -> bool {
        let (shift, bits) = if self.is_inline() {
            (INLINE_EPOCH_SHIFT, INLINE_BITS)
        } else {
            (POOLED_EPOCH_SHIFT, POOLED_BITS)
        };
        low(self.0 >> shift, bits) == low(epoch, bits)
    }

    #[inline]
    pub(crate) fn in_lap(self, lap: u32) -> u64 {
        u64::from(lap) << LAP_SHIFT | self.0
    }

    #[inline]
    pub(crate) fn split(word: u64) -> (u32, Self) {
        let lap = (word >> LAP_SHIFT) as u32;
        (lap, Self(low(word, LAP_SHIFT)))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn entry_round_trips_through_its_word() {
        for lap in [0, 1, u32::MAX] {
            let entry = RingEntry::pooled((1 << CELL_BITS) - 1, 0xabcd_efff);
            let (l, e) = RingEntry::split(entry.in_lap(lap));
            assert_eq!((l, e), (lap, entry));
            assert_eq!((e.is_inline(), e.wild_cell()), (false, (1 << CELL_BITS) - 1));
            assert!(e.names(0xabcd_efff) && e.names(0xfff) && !e.names(0xabcd_effe));

            let last = (1 << INLINE_CELL_BITS) - 1;
            let entry = RingEntry::inline_cell(last, 63, INLINE_MAX_BYTES);
            let (l, e) = RingEntry::split(entry.in_lap(lap));
            assert_eq!((l, e.is_inline(), e.wild_cell(), e.inline_len()), (lap, true, last, Some(112)));
            assert!(e.names(63) && e.names(127) && !e.names(62));
            assert_eq!(RingEntry::inline_here(0).inline_len(), Some(0));
        }
    }

    #[test]
    fn lengths_that_no_sender_writes_are_refused() {
        assert_eq!(RingEntry::WRITING.inline_len(), None);
        for len in 113..128 {
            assert_eq!(RingEntry(len << LENGTH_SHIFT | INLINE).inline_len(), None);
        }
    }
}
