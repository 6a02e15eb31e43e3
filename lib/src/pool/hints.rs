//! Where free buffers probably are: one bitmap per seat and one reserve.
//!
//! A set bit says "this buffer was free when I looked". It proves nothing: a bit may be set twice, stay set too long or
//! be stolen, and the owner word decides. That makes the bitmaps cheap: a seat writes its own without a locked
//! instruction, and a process that dies meanwhile leaves nothing broken.
//!
//! `HINT`: a seat's Release of its bitmap, a thief's Acquire of it. A thread that sees a hint sees the owner word that
//! it refers to, or a later one. Otherwise it could find the buffer taken and drop the hint, and the buffer would be
//! lost until recovery.
//!
//! Buffers that were never used are in the reserve, which is searched last, so a link works with as few buffers as it
//! has in flight, and with the most recently used ones. Releasing sets a bit in the releaser's own bitmap; a sender
//! whose bitmap is empty moves up to [`STEAL_MAX`] of them from another seat at once. Buffers that are released outside
//! the thread of their handle go to the reserve, by a locked instruction.
//!
//! `MOVED`: a seat counts each move twice, before it clears the bits of another bitmap and after it has set its own; an odd
//! count says that hints are on their way. So a search that finds nothing knows whether it may have missed one: it looked at the
//! one bitmap before and at the other one after, or the mover was stopped on the way. Then it looks again, and at last at the
//! owner words. Without this a pool of free buffers could count as exhausted.
//!
//! `RELEASED`: a seat counts each hint that it sets for a released buffer, after it has set it. A search that finds nothing
//! remembers the counts from before it began: until one changes, the next search would find nothing either, and need not
//! read the bitmaps. Of a process that is stopped between hint and count, one buffer may stay unseen until the next release or
//! recovery, as between owner word and hint.

use std::cell::Cell;

use crate::participant::{MAX_SEATS, SeatIndex};
use crate::segment::Lines;
use crate::sync::{AtomicU64, Ordering, WORDS_PER_LINE, overwrite};

/// Buffers whose hints move together from one seat to another.
pub(crate) const STEAL_MAX: u32 = 32;
/// Buffers a handle remembers in the order of their release; see [`Recent`].
pub(crate) const RECENT_MAX: usize = 64;
/// How often a search that finds nothing is repeated because others move hints. In models once, as they explore each access.
const LOOKS_MAX: u32 = if cfg!(loom) { 1 } else { 4 };
/// The reserve has its bitmap after the seats' bitmaps.
const RESERVE: usize = MAX_SEATS;

/// Lines that one bitmap of `len` buffers takes, with the counts of moves and of releases in the words after its bits: whole
/// lines, so that two seats never write one line.
pub(crate) const fn lines_per_bitmap(len: usize) -> usize {
    (len.div_ceil(64) + 2).div_ceil(WORDS_PER_LINE)
}

/// Lines that the bitmaps of a pool of `len` buffers take.
pub(crate) const fn lines(len: usize) -> usize {
    (MAX_SEATS + 1) * lines_per_bitmap(len)
}

/// The buffers that one handle released last, newest on top: these are still in its cache.
///
/// Private to a handle. An entry counts only while its bit is set in the seat's bitmap; a thief that steals a hint clears it.
#[derive(Debug)]
pub(crate) struct Recent {
    /// The newest `RECENT_MAX` entries; [`EMPTY`](Self::EMPTY) where one was popped.
    stack: [Cell<u32>; RECENT_MAX],
    /// Number of pushes less pops.
    top: Cell<usize>,
}

impl Recent {
    /// Marks an empty entry. No pool has this many buffers.
    const EMPTY: u32 = u32::MAX;

    pub(crate) fn new() -> Self {
        Self { stack: [const { Cell::new(Self::EMPTY) }; RECENT_MAX], top: Cell::new(0) }
    }

    #[inline]
    pub(crate) fn push(&self, index: u32) {
        let top = self.top.get();
        self.stack[top % RECENT_MAX].set(index);
        self.top.set(top.wrapping_add(1));
    }

    #[inline]
    pub(crate) fn pop(&self) -> Option<u32> {
        let top = self.top.get().wrapping_sub(1);
        let index = self.stack[top % RECENT_MAX].replace(Self::EMPTY);
        if index == Self::EMPTY {
            return None;
        }
        self.top.set(top);
        Some(index)
    }
}

/// Result of a search for hints.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum HintSearch {
    /// This many hints were moved into the own bitmap.
    Hints(u32),
    /// All buffers are in use or being released.
    None,
    /// Others moved hints all the time: the owner words decide.
    Unclear,
}

/// The bitmap of one seat, for its holder.
#[derive(Debug)]
pub(crate) struct Bitmap {
    lines: Lines,
    /// The place of the count of releases.
    releases: usize,
}

impl Bitmap {
    /// Marks `index`, which the holder has released, as free.
    #[inline]
    pub(crate) fn set_released(&self, index: u32) {
        self.set(index);
        let releases = self.word(self.releases);
        // RELEASED. No locked instruction, as in `set`.
        overwrite(releases, releases.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// Marks `index` as free.
    #[inline]
    pub(crate) fn set(&self, index: u32) {
        let (word, bit) = self.at(index);
        // No locked instruction: only this seat sets bits here, and a bit that a thief cleared meanwhile returns as a
        // stale hint, which costs the claimer one retry.
        // HINT. MOVED: the load passes on what a mover counted before it cleared bits here.
        overwrite(word, word.load(Ordering::Acquire) | bit, Ordering::Release);
    }

    /// Removes the hint for `index`. Returns `false` if there was none.
    #[inline]
    pub(crate) fn take(&self, index: u32) -> bool {
        let (word, bit) = self.at(index);
        // MOVED, as in `set`.
        let bits = word.load(Ordering::Acquire);
        if bits & bit == 0 {
            return false;
        }
        // HINT: the remaining bits were set before.
        overwrite(word, bits & !bit, Ordering::Release);
        true
    }

    #[inline]
    fn at(&self, index: u32) -> (&AtomicU64, u64) {
        (self.word(index as usize / 64), 1 << (index % 64))
    }

    #[inline]
    fn word(&self, i: usize) -> &AtomicU64 {
        self.lines[i / WORDS_PER_LINE].word(i % WORDS_PER_LINE)
    }
}

/// The bitmaps of one pool.
#[derive(Clone, Debug)]
pub(crate) struct Hints {
    lines: Lines,
    len: usize,
    per_bitmap: usize,
}

impl Hints {
    /// Creates bitmaps in `lines`, which must be [`lines`]`(len)` lines.
    pub(crate) fn new(lines: Lines, len: usize) -> Self {
        Self { lines, len, per_bitmap: lines_per_bitmap(len) }
    }

    fn words(&self) -> usize {
        self.len.div_ceil(64)
    }

    #[inline]
    fn word(&self, bitmap: usize, i: usize) -> &AtomicU64 {
        self.lines[bitmap * self.per_bitmap + i / WORDS_PER_LINE].word(i % WORDS_PER_LINE)
    }

    /// Fills the reserve with all buffers: the state of a fresh pool.
    pub(crate) fn fill_reserve(&self) {
        for i in 0..self.words() {
            let rest = self.len - i * 64;
            let bits = if rest >= 64 { u64::MAX } else { (1 << rest) - 1 };
            self.word(RESERVE, i).store(bits, Ordering::Relaxed);
        }
    }

    /// Marks `index` as free, from any thread of any process: the reserve is the one bitmap without a holder.
    pub(crate) fn set_in_reserve(&self, index: u32) {
        let i = index as usize / 64;
        // HINT: an exchange, because others set and clear bits of this word at the same time.
        self.word(RESERVE, i).fetch_or(1 << (index % 64), Ordering::Release);
        self.count_release();
    }

    /// Counts hints that were set in any bitmap for released buffers.
    pub(crate) fn count_release(&self) {
        // RELEASED
        self.release_count(RESERVE).fetch_add(1, Ordering::Release);
    }

    /// Takes a hint from any bitmap, in any thread of any process. `None` if no free buffer is known. If a process is
    /// killed before it uses the hint, recovery finds the buffer.
    pub(crate) fn steal(&self) -> Option<u32> {
        for bitmap in (0..=RESERVE).rev() {
            for i in 0..self.words() {
                let word = self.word(bitmap, i);
                // MOVED: a search that misses the bits of a mover sees its count.
                let mut found = word.load(Ordering::Acquire) & self.valid_bits(i);
                while found != 0 {
                    let bit = found & found.wrapping_neg();
                    // HINT
                    if word.fetch_and(!bit, Ordering::Acquire) & bit != 0 {
                        return u32::try_from(i * 64).ok().map(|first| first + bit.trailing_zeros());
                    }
                    found &= !bit;
                }
            }
        }
        None
    }

    /// The bitmap of `seat`, for its holder.
    pub(crate) fn of(&self, seat: SeatIndex) -> Bitmap {
        let lines = self.lines.slice(seat.as_usize() * self.per_bitmap, self.per_bitmap);
        Bitmap { lines, releases: self.words() + 1 }
    }

    /// The word that counts the hints which were set in a bitmap for released buffers.
    #[inline]
    fn release_count(&self, bitmap: usize) -> &AtomicU64 {
        self.word(bitmap, self.words() + 1)
    }

    /// The releases of the seats below `seats_used` and of other threads. It never decreases.
    #[inline]
    pub(crate) fn releases(&self, seats_used: usize) -> u64 {
        // RELEASED
        let of = |bitmap| self.release_count(bitmap).load(Ordering::Acquire);
        (0..seats_used.min(MAX_SEATS)).fold(of(RESERVE), |sum, seat| sum.wrapping_add(of(seat)))
    }

    /// The word in which `seat` counts its moves.
    fn move_count(&self, seat: usize) -> &AtomicU64 {
        self.word(seat, self.words())
    }

    /// The moves of all seats. `None` if hints are on their way.
    pub(crate) fn moves(&self) -> Option<u64> {
        (0..MAX_SEATS).try_fold(0, |sum, seat| add_moves(sum, self.move_count(seat)))
    }

    /// Ends a move of `dead`, after its hints were readmitted, if it `is_seated`: later the count is its successor's.
    pub(crate) fn end_move(&self, dead: SeatIndex, is_seated: impl FnOnce() -> bool) {
        let word = self.move_count(dead.as_usize());
        // Before the look at the seat: only a recoverer that has ended the move vacates it.
        let count = word.load(Ordering::Acquire);
        if !count.is_multiple_of(2) && is_seated() {
            // MOVED. It fails if another recoverer has ended it.
            let _ = word.compare_exchange(count, count.wrapping_add(1), Ordering::Release, Ordering::Relaxed);
        }
    }

    /// Moves hints into the own bitmap and into `recent`: from the own bitmap first, then from the other seats below
    /// `seats_used`, then from the reserve. `ahead` is called for each, to prefetch its owner word.
    pub(crate) fn refill(
        &self,
        seat: SeatIndex,
        seats_used: impl Fn() -> usize,
        recent: &Recent,
        ahead: impl Fn(u32),
    ) -> HintSearch {
        let own = seat.as_usize();
        let seats = || seats_used().min(MAX_SEATS);
        let moved = |from| self.move_first_hints(own, from, recent, &ahead).map(HintSearch::Hints);
        if let Some(found) = moved(own) {
            return found;
        }
        for _ in 0..LOOKS_MAX {
            let mut before = Some(0_u64);
            for other in (0..seats()).filter(|&other| other != own) {
                // In the same line as the hints, so it costs little.
                before = before.and_then(|sum| add_moves(sum, self.move_count(other)));
                if let Some(found) = moved(other) {
                    return found;
                }
            }
            if let Some(found) = moved(RESERVE) {
                return found;
            }
            let mut others = (0..seats()).filter(|&other| other != own);
            let after = others.try_fold(0, |sum, other| add_moves(sum, self.move_count(other)));
            if after.is_some() && after == before {
                return HintSearch::None;
            }
        }
        HintSearch::Unclear
    }

    /// The bits of the `i`-th word that stand for a buffer: a hostile process may set bits past the end.
    fn valid_bits(&self, i: usize) -> u64 {
        match self.len - i * 64 {
            0..=63 => (1 << (self.len - i * 64)) - 1,
            _ => u64::MAX,
        }
    }

    /// Moves the hints of the first word that has some. `None` if there are none.
    fn move_first_hints(
        &self,
        own: usize,
        from: usize,
        recent: &Recent,
        ahead: &impl Fn(u32),
    ) -> Option<u32> {
        let move_some = |i| self.move_hints(own, from, i, recent, ahead);
        // Where all buffers are in use, no line has a bit, and the time of a search is the time of this.
        let whole = self.words() / WORDS_PER_LINE;
        let lines = &self.lines[from * self.per_bitmap..][..whole];
        for (first, line) in (0..).step_by(WORDS_PER_LINE).zip(lines) {
            // HINT and MOVED, as in `move_hints`.
            let any = (0..WORDS_PER_LINE).fold(0, |any, i| any | line.word(i).load(Ordering::Acquire));
            if any != 0
                && let Some(moved) = (first..first + WORDS_PER_LINE).find_map(move_some)
            {
                return Some(moved);
            }
        }
        (whole * WORDS_PER_LINE..self.words()).find_map(move_some)
    }

    /// Moves up to `STEAL_MAX` hints of one word. `None` if there is none.
    fn move_hints(
        &self,
        own: usize,
        from: usize,
        i: usize,
        recent: &Recent,
        ahead: &impl Fn(u32),
    ) -> Option<u32> {
        // HINT
        let found = self.word(from, i).load(Ordering::Acquire) & self.valid_bits(i);
        if found == 0 {
            return None;
        }
        let mut taken = 0_u64;
        let mut rest = found;
        while rest != 0 {
            let bit = rest & rest.wrapping_neg();
            taken |= bit;
            rest &= !bit;
            if taken.count_ones() == STEAL_MAX {
                break;
            }
        }
        if from != own {
            let moves = self.move_count(own);
            let on_the_way = moves.load(Ordering::Relaxed) | 1;
            overwrite(moves, on_the_way, Ordering::Relaxed);
            // HINT once more, for bits that were set since the look. MOVED: a search that misses the bits sees the count. Only
            // bits that were still there: one that another has moved may have returned since, and be nowhere else.
            taken &= self.word(from, i).fetch_and(!taken, Ordering::AcqRel);
            let mine = self.word(own, i);
            // HINT; the load as in `Bitmap::set`.
            overwrite(mine, mine.load(Ordering::Acquire) | taken, Ordering::Release);
            // MOVED: a search that sees the end of the move sees the bits.
            overwrite(moves, on_the_way.wrapping_add(1), Ordering::Release);
            if taken == 0 {
                return None;
            }
        }
        // Highest first, so that the lowest index is handed out first: low indices stay hot.
        let mut rest = taken;
        while rest != 0 {
            let bit = 63 - rest.leading_zeros();
            rest &= !(1 << bit);
            let index = u32::try_from(i * 64).unwrap_or(u32::MAX) + bit;
            ahead(index);
            recent.push(index);
        }
        Some(taken.count_ones())
    }

    /// Bits of the `i`-th word that are in no bitmap. For recovery: a free buffer without a hint is lost until one is
    /// set.
    pub(crate) fn unknown(&self, i: usize) -> u64 {
        let known =
            (0..=RESERVE).fold(0, |known, bitmap| known | self.word(bitmap, i).load(Ordering::Relaxed));
        !known & self.valid_bits(i)
    }

    /// Number of 64-bit words in a bitmap.
    pub(crate) fn word_count(&self) -> usize {
        self.words()
    }
}

/// Adds the moves that one seat has counted. `None` if its last one is not over.
fn add_moves(sum: u64, count: &AtomicU64) -> Option<u64> {
    // MOVED
    let count = count.load(Ordering::Acquire);
    count.is_multiple_of(2).then(|| sum.wrapping_add(count))
}

#[cfg(all(test, not(loom)))]
impl Hints {
    /// As in `move_hints`, between the two bitmaps.
    pub(crate) fn stop_while_all_move(&self, seat: SeatIndex) {
        let moves = self.move_count(seat.as_usize());
        overwrite(moves, moves.load(Ordering::Relaxed) | 1, Ordering::Relaxed);
        for bitmap in 0..=RESERVE {
            for i in 0..self.words() {
                self.word(bitmap, i).fetch_and(0, Ordering::AcqRel);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_keeps_the_newest_and_ends_with_none() {
        let recent = Recent::new();
        assert_eq!(recent.pop(), None);
        let more: u32 = u32::try_from(RECENT_MAX).unwrap() + 6;
        (0..more).for_each(|index| recent.push(index));
        let popped: Vec<u32> = std::iter::from_fn(|| recent.pop()).collect();
        assert_eq!(popped, (6..more).rev().collect::<Vec<u32>>());
        recent.push(9);
        assert_eq!((recent.pop(), recent.pop()), (Some(9), None));
    }
}
