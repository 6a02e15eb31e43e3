//! Pools: arrays of equal buffers, each with an owner word.
//!
//! | file | concept |
//! |---|---|
//! | [`owner`] | the owner word of each buffer, which alone decides who may use it |
//! | [`hints`] | where free buffers probably are |
//! | `mod.rs` | [`OwnerTable`] combines the two; [`Pool`] adds the bytes; [`PoolCache`] is a handle's view of a table |

pub(crate) mod hints;
pub(crate) mod owner;

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::participant::SeatIndex;
use crate::segment::{Lines, Memory, prefetch_exclusive, prefetch_exclusive_at};
use crate::sync::{AtomicU64, LINE_BYTES, Line, Ordering};
use hints::{Bitmap, HintSearch, Hints, Recent};

/// The owner words of a pool, one cell (line) each, and the hints that find the free ones.
///
/// Word 0 of a cell is the owner word. The rest of a MSG cell is the message's descriptor, written by its owner.
#[derive(Clone, Debug)]
pub(crate) struct OwnerTable {
    hints: Hints,
    cells: Lines,
}

/// How often one claim searches the bitmaps. Each time but the last yields up to 32 hints that were all stale, so only
/// a hostile peer makes it go this far; without a limit it could keep a claim busy for the square of the pool's length.
const REFILLS_MAX: u32 = 256;

/// Lines that a table of `len` cells takes.
pub(crate) const fn table_lines(len: usize) -> usize {
    hints::lines(len) + len
}

impl OwnerTable {
    /// Places a table at line `start` of `memory`. `None` if it does not fit.
    pub(crate) fn place(memory: &Arc<Memory>, start: usize, len: usize) -> Option<Self> {
        let hint_lines = hints::lines(len);
        let hints = Hints::new(memory.window(start, hint_lines)?, len);
        Some(Self { hints, cells: memory.window(start.checked_add(hint_lines)?, len)? })
    }

    /// Marks every buffer free. In fresh memory all owner words are free already; the reserve still has to be set.
    pub(crate) fn format(&self) {
        self.hints.fill_reserve();
    }

    pub(crate) fn len(&self) -> usize {
        self.cells.len()
    }

    /// The cells of all buffers, by index.
    #[inline(always)]
    pub(crate) fn cells(&self) -> &[Line] {
        &self.cells
    }

    /// The cell of `index`, which must come from this table or have been checked against its length.
    #[inline(always)]
    pub(crate) fn cell(&self, index: u32) -> &Line {
        &self.cells[index as usize]
    }

    #[inline]
    pub(crate) fn owner(&self, index: u32) -> &AtomicU64 {
        self.cell(index).word(0)
    }

    /// Checks an index read from shared memory.
    #[inline]
    pub(crate) fn tame(&self, wild: u32) -> Option<u32> {
        ((wild as usize) < self.cells.len()).then_some(wild)
    }

    /// As [`PoolCache::release`], on behalf of a dead holder. [`readmit_unknown`](Self::readmit_unknown) has to follow.
    pub(crate) fn reclaim(&self, me: SeatIndex, index: u32, held: u64, freed: u64) -> bool {
        // Release: the next claimer of the buffer sees what this thread saw of the dead owner.
        let won =
            self.owner(index).compare_exchange(held, freed, Ordering::Release, Ordering::Relaxed).is_ok();
        if won {
            self.hints.of(me).set(index);
        }
        won
    }

    /// As [`PoolCache::release`], without a handle's bitmap: for a buffer that is released outside the thread of its
    /// handle.
    pub(crate) fn release(&self, index: u32, held: u64, freed: u64) -> bool {
        // Release, as in `PoolCache::release`.
        let won =
            self.owner(index).compare_exchange(held, freed, Ordering::Release, Ordering::Relaxed).is_ok();
        if won {
            self.hints.set_in_reserve(index);
        }
        won
    }

    /// As [`PoolCache::claim`], without a handle's bitmap: for another thread than the handle's.
    pub(crate) fn claim(&self, next: impl Fn(u64) -> u64) -> Option<(u32, u64)> {
        if let Some(claimed) = self.claim_by_hints(&next) {
            return Some(claimed);
        }
        let before = self.hints.moves();
        if let Some(claimed) = self.claim_by_hints(&next) {
            return Some(claimed);
        }
        if before.is_some() && self.hints.moves() == before {
            return None;
        }
        // Others moved hints: the owner words decide.
        let mut cells = 0..u32::try_from(self.len()).unwrap_or(u32::MAX);
        cells.find_map(|index| Some((index, self.claim_at(index, &next)?)))
    }

    fn claim_by_hints(&self, next: impl Fn(u64) -> u64) -> Option<(u32, u64)> {
        // Each round consumes a hint.
        for _ in 0..4 * self.len() + 2 {
            let index = self.hints.steal()?;
            if let Some(claimed) = self.claim_at(index, &next) {
                return Some((index, claimed));
            }
        }
        None
    }

    /// Claims a buffer if it is free. `next` computes its new owner word.
    #[inline(always)]
    fn claim_at(&self, index: u32, next: impl Fn(u64) -> u64) -> Option<u64> {
        let owner = self.owner(index);
        let word = owner.load(Ordering::Relaxed);
        if !owner::is_free(word) {
            return None;
        }
        let claimed = next(word);
        // Acquire pairs with the Release of `release`: the last holder is done with the bytes before this thread writes
        // them. Release pairs with the Acquire of recovery: a thread that sees this loan sees that this participant has
        // the seat, and the MSG that a DATA buffer is attached to.
        owner.compare_exchange(word, claimed, Ordering::AcqRel, Ordering::Relaxed).is_ok().then_some(claimed)
    }

    /// Gives `seat` every free buffer that is in no bitmap, because a process died between freeing it and setting its hint,
    /// or while it moved the hint. Returns their number. From then on, searches find also what was reclaimed, and buffers whose
    /// hint a process had set and not counted when it died.
    pub(crate) fn readmit_unknown(&self, seat: SeatIndex) -> u32 {
        let mut readmitted = 0;
        for i in 0..self.hints.word_count() {
            let mut rest = self.hints.unknown(i);
            while rest != 0 {
                let index = u32::try_from(i * 64).unwrap_or(u32::MAX) + rest.trailing_zeros();
                rest &= rest - 1;
                if owner::is_free(self.owner(index).load(Ordering::Relaxed)) {
                    self.hints.of(seat).set(index);
                    readmitted += 1;
                }
            }
        }
        self.hints.count_release();
        readmitted
    }

    /// Ends a move of hints that `dead` began, as [`Hints::end_move`] does.
    pub(crate) fn end_move(&self, dead: SeatIndex, is_seated: impl FnOnce() -> bool) {
        self.hints.end_move(dead, is_seated);
    }
}

#[cfg(all(test, not(loom)))]
impl OwnerTable {
    /// Leaves the hints as a participant in `seat` does that is stopped after it has taken all of them.
    pub(crate) fn stop_while_all_hints_move(&self, seat: SeatIndex) {
        self.hints.stop_while_all_move(seat);
    }
}

/// A table as one handle uses it: with the handle's own bitmap and the buffers that it released last.
#[derive(Debug)]
pub(crate) struct PoolCache {
    pub(crate) table: OwnerTable,
    seat: SeatIndex,
    own: Bitmap,
    recent: Recent,
    /// The count of releases from before the last search, if that found nothing.
    exhausted_at: Cell<Option<u64>>,
    /// The memory of the buffers; inline cells have none.
    bytes: Option<BufferMemory>,
}

impl PoolCache {
    pub(crate) fn new(table: &OwnerTable, bytes: Option<BufferMemory>, seat: SeatIndex) -> Self {
        Self {
            table: table.clone(),
            seat,
            own: table.hints.of(seat),
            recent: Recent::new(),
            exhausted_at: Cell::new(None),
            bytes,
        }
    }

    /// Takes a free buffer, preferably the one released last. `next` computes its new owner word from the free one.
    ///
    /// `None` if all are in use. A buffer that another thread is releasing at this moment may be missed.
    #[inline(always)]
    pub(crate) fn claim(
        &self,
        seats_used: impl Fn() -> usize,
        next: impl Fn(u64) -> u64,
    ) -> Option<(u32, u64)> {
        // Nearly always, the buffer that was released last is still free.
        match self.recent.pop() {
            Some(index) => match self.claim_hinted(index, &next) {
                Some(claimed) => Some((index, claimed)),
                None => self.search(seats_used, next),
            },
            None => self.search(seats_used, next),
        }
    }

    /// Claims a buffer whose hint is in the own bitmap, and removes the hint.
    #[inline(always)]
    fn claim_hinted(&self, index: u32, next: impl Fn(u64) -> u64) -> Option<u64> {
        if self.own.take(index) { self.table.claim_at(index, next) } else { None }
    }

    /// Claims a buffer if the one that was released last is in use.
    #[cold]
    #[inline(never)]
    fn search(&self, seats_used: impl Fn() -> usize, next: impl Fn(u64) -> u64) -> Option<(u32, u64)> {
        // Counted only after a search that found nothing: others write these words all the time. The first time, 0 stands for
        // what was not counted: if the count is 0 later, nothing was ever released.
        let before = self.exhausted_at.take();
        let releases = before.map_or(0, |_| self.table.hints.releases(seats_used()));
        if before == Some(releases) {
            self.exhausted_at.set(before);
            return None;
        }
        let mut refills = 0;
        // Each round consumes an entry of `recent`, all of which may be stale, or a hint of the own bitmap, so with
        // honest peers this ends long before the bound.
        for _ in 0..hints::RECENT_MAX + 4 * self.table.len() + 2 {
            let Some(index) = self.recent.pop() else {
                refills += 1;
                if refills > REFILLS_MAX {
                    return None;
                }
                if self.refill(&seats_used) == 0 {
                    self.exhausted_at.set(Some(releases));
                    return None;
                }
                continue;
            };
            if let Some(claimed) = self.claim_hinted(index, &next) {
                return Some((index, claimed));
            }
        }
        None
    }

    /// Finds free buffers for `recent` and the own bitmap. Returns their number.
    #[cold]
    #[inline(never)]
    fn refill(&self, seats_used: impl Fn() -> usize) -> u32 {
        match self.table.hints.refill(self.seat, seats_used, &self.recent, |index| self.prefetch(index)) {
            HintSearch::Hints(count) => count,
            HintSearch::None => 0,
            HintSearch::Unclear => self.walk(),
        }
    }

    /// Finds free buffers by their owner words, whatever the hints say. Returns their number.
    fn walk(&self) -> u32 {
        let mut found = 0;
        for (index, cell) in (0..).zip(self.table.cells()) {
            if owner::is_free(cell.word(0).load(Ordering::Relaxed)) {
                self.own.set(index);
                self.recent.push(index);
                found += 1;
            }
            if found == hints::STEAL_MAX {
                break;
            }
        }
        found
    }

    /// Prefetches the lines that a release or claim of a buffer writes, if many follow. The last holder has these lines
    /// in its cache. A locked instruction waits for its own line and for the lines of all earlier stores, so one after the
    /// other they would cost a round trip each; prefetched, they arrive together.
    #[inline]
    pub(crate) fn prefetch(&self, index: u32) {
        prefetch_exclusive(self.table.cell(index));
        if let Some(bytes) = &self.bytes {
            prefetch_exclusive_at(bytes.buffer(index).as_ptr());
        }
    }

    /// Ends the epoch `held`. Returns `false` if it was over already, because its holder was declared dead.
    #[inline(always)]
    pub(crate) fn release(&self, index: u32, held: u64, freed: u64) -> bool {
        let owner = self.table.owner(index);
        // Release pairs with the Acquire of `claim`: this thread's reads and writes of the bytes come before the next
        // holder's.
        let won = owner.compare_exchange(held, freed, Ordering::Release, Ordering::Relaxed).is_ok();
        if won {
            // After the owner word: an earlier hint could be followed, found wrong and dropped for good.
            self.own.set_released(index);
            self.recent.push(index);
        }
        won
    }
}

/// Distance of buffers in bytes: whole lines, and one more if that is a multiple of the page, because buffers a power
/// of two apart would all start in the same set of the cache and evict each other.
#[must_use]
pub(crate) const fn stride_bytes(buf_size_bytes: u32) -> u64 {
    let whole = (buf_size_bytes as u64).next_multiple_of(LINE_BYTES as u64);
    if whole.is_multiple_of(4096) { whole + LINE_BYTES as u64 } else { whole }
}

/// One buffer pool: its owner table and its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub(crate) table: OwnerTable,
    pub(crate) bytes: BufferMemory,
}

/// The memory of the buffers of a pool. Valid as long as the pool's table, which keeps the memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferMemory {
    start: NonNull<u8>,
    stride: usize,
    len: usize,
    buf_size: u32,
}

#[expect(unsafe_code, reason = "a pointer into memory that the table's windows keep alive")]
mod threads {
    // SAFETY: all access to the bytes goes through a loan or message, which holds its buffer exclusively.
    unsafe impl Send for super::BufferMemory {}
    // SAFETY: as above.
    unsafe impl Sync for super::BufferMemory {}
}

impl BufferMemory {
    /// The first byte of buffer `index`.
    #[inline]
    #[expect(unsafe_code, reason = "pointer arithmetic inside the pool's bytes")]
    pub(crate) fn buffer(&self, index: u32) -> NonNull<u8> {
        let index = index as usize;
        assert!(index < self.len, "indices are checked where they are read");
        // SAFETY: `Pool::place` checked that `len` strides fit in the memory.
        unsafe { self.start.add(index * self.stride) }
    }

    /// The index of the buffer that begins at `address`.
    #[inline]
    pub(crate) fn index_of(&self, address: *const u8) -> Option<u32> {
        let offset = address.addr().checked_sub(self.start.addr().get())?;
        let index = offset / self.stride;
        if index < self.len && index * self.stride == offset { u32::try_from(index).ok() } else { None }
    }
}

impl Pool {
    /// The line of a cell whose index was read from shared memory, and the first byte of its buffer; `None` if there is
    /// no such cell.
    #[inline(always)]
    #[expect(unsafe_code, reason = "pointer arithmetic inside the pool's bytes")]
    pub(crate) fn at(&self, wild: u32) -> Option<(&Line, NonNull<u8>)> {
        let line = self.table.cells.get(wild as usize)?;
        // SAFETY: `Pool::place` checked that a stride for each cell fits in the memory.
        Some((line, unsafe { self.bytes.start.add(wild as usize * self.bytes.stride) }))
    }

    /// Places a pool in `memory`: its table at line `table_start`, its bytes at line `buffer_start`.
    pub(crate) fn place(
        memory: &Arc<Memory>,
        table_start: usize,
        buffer_start: usize,
        buf_size: u32,
        len: usize,
    ) -> Option<Self> {
        let table = OwnerTable::place(memory, table_start, len)?;
        let stride = usize::try_from(stride_bytes(buf_size)).ok()?;
        let start = memory.payload(buffer_start, stride.checked_mul(len)? / LINE_BYTES)?;
        Some(Self { table, bytes: BufferMemory { start, stride, len, buf_size } })
    }

    /// Size of a buffer in bytes, as configured.
    #[inline]
    pub(crate) fn buf_size(&self) -> u32 {
        self.bytes.buf_size
    }

    /// The first byte of buffer `index`.
    #[inline]
    pub(crate) fn buffer(&self, index: u32) -> NonNull<u8> {
        self.bytes.buffer(index)
    }
}
