//! Where the words of a link lie, for tests that look behind the library's back.
//!
//! Counted here once more from `docs/memory-layout.md`, and checked against a living link by [`Layout::check`].

use std::ops::Range;

/// Bytes of a line and of a word.
pub(crate) const LINE: usize = 64;
pub(crate) const WORD: usize = 8;

const HEADER_LINES: usize = 2;
const SEATS: usize = 64;
const CONTROL_LINES: usize = 14;
const PAGE: usize = 4096;

/// One message of so many is sampled.
pub(crate) const LATENCY_SAMPLE: u32 = 2;
/// Lines of the two histograms of a seat.
const TIMES_LINES: usize = 2 * (128 / 8 + 1);

/// The word of the next message to take, in lines from a ring's control lines.
pub(crate) const HEAD: usize = 2;

/// The line of the words that say who sleeps, and the word on it of the readers of a broadcast ring.
pub(crate) const SLEEPERS: usize = 8;
pub(crate) const SUBSCRIBERS: usize = 3;

/// Lines of the bitmaps of a table of `len` cells.
fn hint_lines(len: usize) -> usize {
    (SEATS + 1) * (len.div_ceil(64) + 2).div_ceil(8)
}

/// Byte offsets in the link's own segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) ring_len: usize,
    pub(crate) single: bool,
    /// Requests that each client can have pending; 0: the link has none.
    pub(crate) window: usize,
}

impl Layout {
    pub(crate) fn primary_role(self) -> usize {
        HEADER_LINES * LINE
    }

    pub(crate) fn seat(self, seat: usize) -> usize {
        (HEADER_LINES + 2 + seat) * LINE
    }

    /// A control word of ring 0 (`m2s`) or 1 (`s2m`).
    pub(crate) fn control(self, ring: usize, line: usize) -> usize {
        self.seat(SEATS + 2) + (ring * CONTROL_LINES + line) * LINE
    }

    pub(crate) fn slots(self, ring: usize) -> Range<usize> {
        let lines = if self.single { 2 * self.ring_len } else { self.ring_len.div_ceil(8) };
        let start = self.control(2, 0) + ring * lines * LINE;
        start..start + lines * LINE
    }

    /// The table of inline cells; empty with one producer.
    pub(crate) fn inline(self) -> Table {
        let start = self.slots(1).end;
        let requests = self.ring_len + SEATS * self.window;
        // Twice as many for further replies.
        let for_requests = if self.window == 0 { 0 } else { 3 * requests };
        Table { start, len: if self.single { 0 } else { 2 * self.ring_len + for_requests } }
    }

    /// Everything that participants write, except the counts of times.
    pub(crate) fn mutable(self) -> Range<usize> {
        self.primary_role()..self.stamps().end
    }

    /// The stamps of sampled messages of both rings.
    pub(crate) fn stamps(self) -> Range<usize> {
        // Behind the cells are their second lines, and then what requests need.
        let start = if self.window == 0 { self.tables_end() } else { self.replies().end };
        let words = (self.ring_len / LATENCY_SAMPLE as usize).max(1);
        start..start + 2 * words.div_ceil(LINE / WORD) * LINE
    }

    /// The counts of times of all seats.
    pub(crate) fn times(self) -> Range<usize> {
        let start = self.stamps().end;
        start..start + SEATS * TIMES_LINES * LINE
    }

    fn tables_end(self) -> usize {
        let table = self.inline();
        table.cells().end + table.len * LINE
    }

    /// The reply slots of all seats, one line each.
    pub(crate) fn replies(self) -> Range<usize> {
        let request_ring = (CONTROL_LINES + self.ring_len.div_ceil(8)) * LINE;
        let start = self.tables_end() + request_ring;
        start..start + SEATS * self.window * LINE
    }

    /// Panics unless `segment` is laid out like this: the seat of this process is where it should be.
    pub(crate) fn check(self, segment: &[u64], seat: usize) {
        let word = segment[self.seat(seat) / WORD];
        let pid = word >> 3 & ((1 << 22) - 1);
        assert!(word & 1 == 1 && pid == u64::from(std::process::id()), "the layout has changed: {word:#x}");
    }
}

/// A table: bitmaps, then cells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    start: usize,
    pub(crate) len: usize,
}

impl Table {
    /// The table of a pool, in the pool's segment.
    pub(crate) fn of_pool(len: usize) -> Self {
        Self { start: HEADER_LINES * LINE, len }
    }

    pub(crate) fn hints(self) -> Range<usize> {
        self.start..self.start + if self.len == 0 { 0 } else { hint_lines(self.len) * LINE }
    }

    pub(crate) fn cells(self) -> Range<usize> {
        let start = self.hints().end;
        start..start + self.len * LINE
    }

    /// The owner word of a cell; the descriptor follows it.
    pub(crate) fn owner(self, cell: usize) -> usize {
        assert!(cell < self.len);
        self.cells().start + cell * LINE
    }

    /// A buffer of the pool whose table this is.
    pub(crate) fn buffer(self, cell: usize, buf_size: usize) -> usize {
        let stride = buf_size.next_multiple_of(LINE);
        assert!(!stride.is_multiple_of(PAGE), "the stride of such buffers is another");
        self.cells().end.next_multiple_of(PAGE) + cell * stride
    }
}

/// The state and the seat in an owner word of a MSG buffer.
pub(crate) fn msg_owner(word: u64) -> (u64, u64) {
    (word & 3, word >> 2 & 0xff)
}

pub(crate) const BORROWED: u64 = 2;
