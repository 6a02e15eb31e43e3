//! The position of each table in a segment. `docs/memory-layout.md` has the same as byte tables.
//!
//! Everything follows from the [`LinkShape`], which is in the header, so two processes that agree on the header agree on all.
//! Positions count lines of 64 bytes.

use crate::config::{BroadcastConfig, HugePages, LinkConfig, PoolId, RingMode, SlowReaders};
use crate::participant::times::TIMES_LINES;
use crate::participant::{MAX_SEATS, SEAT_LINES};
use crate::pool::{stride_bytes, table_lines};
use crate::ring::stamps::stamp_lines;
use crate::ring::{CONTROL_LINES, Kind};
use crate::sync::LINE_BYTES;

/// Number of lines of the header, in every segment.
pub(crate) const HEADER_LINES: usize = 2;
/// Lines of a page: buffers start on a page, and segments are whole pages. Models need no pages, and each word costs
/// them time.
const PAGE_LINES: usize = if cfg!(loom) { 1 } else { 4096 / LINE_BYTES };
/// Whether there are cells for more replies than one to each request. Models have few.
const SPARE_CELLS: usize = if cfg!(loom) { 0 } else { 1 };
/// Maximum number of inline cells, as many as an entry of a ring can name.
const INLINE_CELLS_MAX: usize = 1 << crate::ring::entry::INLINE_CELL_BITS;

/// Everything that decides the layout of a link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct LinkShape {
    /// Slots per ring, a power of two.
    pub(crate) ring_capacity: u32,
    /// Whether each ring has one producer and one consumer only.
    pub(crate) single: bool,
    /// Settings of a broadcast ring: one writer on the primary side, and each participant of the other side receives
    /// every message.
    pub(crate) broadcast: Option<BroadcastConfig>,
    /// `(buf_size, pool_len)` per pool; both 0 if the link does not have it.
    pub(crate) pools: [(u32, u32); PoolId::COUNT],
    /// Maximum number of pending requests of a participant of the secondary side; 0 if the link has no requests.
    pub(crate) request_window: u32,
    /// One message of this many is timed, a power of two; 0: none.
    pub(crate) latency_sample: u32,
}

impl LinkShape {
    pub(crate) fn of(config: &LinkConfig) -> Self {
        Self {
            ring_capacity: config.ring_len.next_power_of_two(),
            single: config.ring_mode == RingMode::Spsc,
            broadcast: (config.ring_mode == RingMode::Broadcast).then_some(config.broadcast),
            pools: std::array::from_fn(|i| {
                let pool = &config.pools[i];
                if pool.is_enabled() { (pool.buf_size_bytes, pool.pool_len) } else { (0, 0) }
            }),
            request_window: config.request_window,
            latency_sample: config.latency_sample,
        }
    }

    /// The kinds of the rings `m2s` and `s2m`.
    pub(crate) fn kinds(&self) -> [Kind; 2] {
        match self.broadcast {
            Some(rules) => [Kind::Broadcast(rules), Kind::Mpmc],
            None if self.single => [Kind::Spsc; 2],
            None => [Kind::Mpmc; 2],
        }
    }

    pub(crate) fn ring_mode(&self) -> RingMode {
        match self.broadcast {
            Some(_) => RingMode::Broadcast,
            None if self.single => RingMode::Spsc,
            None => RingMode::Mpmc,
        }
    }

    /// The pools that the link has and whose buffers are in device memory.
    pub(crate) fn device_pools(&self) -> impl Iterator<Item = PoolId> + use<> {
        let pools = self.pools;
        PoolId::ALL.into_iter().filter(move |&pool| pool.is_device() && pools[pool as usize].1 > 0)
    }

    /// Whether this library can have written a header with this shape.
    pub(crate) fn is_sane(&self) -> bool {
        self.ring_capacity.is_power_of_two()
            && self.ring_capacity <= crate::config::MAX_RING_LEN
            && (self.request_window == 0 || !self.single && self.broadcast.is_none())
            && self.request_window <= crate::config::MAX_REQUEST_WINDOW
            && (self.latency_sample == 0 || self.latency_sample.is_power_of_two())
            && self.latency_sample <= crate::config::MAX_LATENCY_SAMPLE
            && self.pools[PoolId::CpuMsg as usize].0 != 0
            && self.broadcast.is_none_or(|rules| {
                !self.single
                    && rules.history < self.ring_capacity
                    && (rules.slow != SlowReaders::Skip || self.ring_capacity > 1)
            })
            && self.pools.iter().all(|&(size, len)| {
                (size == 0) == (len == 0)
                    && len <= crate::config::MAX_POOL_LEN
                    && u64::from(size) <= crate::config::MAX_BUF_SIZE_BYTES
            })
    }
}

/// The layout of the link's own segment, `<link>_shm`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkLayout {
    pub(crate) primary_role: usize,
    /// The types of what the primary and the secondary side send.
    pub(crate) payload_types: [usize; 2],
    pub(crate) seats: usize,
    /// Control lines of ring `m2s`, then of `s2m`.
    pub(crate) controls: [usize; 2],
    pub(crate) slots: [usize; 2],
    pub(crate) slot_lines: [usize; 2],
    /// The table of inline cells; a link with one producer needs none.
    pub(crate) inline: usize,
    /// The second lines of these cells.
    pub(crate) inline_seconds: usize,
    pub(crate) inline_cells: usize,
    /// One line per seat, for the readers of a broadcast ring.
    pub(crate) cursors: usize,
    pub(crate) cursor_lines: usize,
    /// Control lines of the ring of requests, its slots, and the reply slots of all seats.
    pub(crate) requests: Option<[usize; 3]>,
    /// The times at which sampled messages of each ring were sent, and the counts of times.
    pub(crate) stamps: [usize; 2],
    pub(crate) stamp_lines: usize,
    pub(crate) times: Option<usize>,
    pub(crate) total: usize,
}

impl LinkLayout {
    pub(crate) fn of(shape: &LinkShape) -> Self {
        let capacity = shape.ring_capacity as usize;
        let primary_role = HEADER_LINES;
        let seats = primary_role + 2;
        let payload_types = [primary_role + 1, seats + SEAT_LINES];
        let first = payload_types[1] + 1;
        let second = first + CONTROL_LINES;
        let slot_lines = shape.kinds().map(|kind| kind.slot_lines(capacity));
        let slots = second + CONTROL_LINES;
        let inline = slots + slot_lines[0] + slot_lines[1];
        let window = shape.request_window as usize;
        // Requests have a ring of their own. Each one pending has a cell, and one for the first reply that waits; for further
        // replies there are as many again, and what is left over while rings are full. See `ring/reply_share.rs`.
        let for_requests = if window == 0 {
            0
        } else {
            (capacity + MAX_SEATS * window) + SPARE_CELLS * (2 * capacity + 2 * MAX_SEATS * window)
        };
        let inline_cells = if shape.single { 0 } else { (2 * capacity + for_requests).min(INLINE_CELLS_MAX) };
        let inline_lines = if shape.single { 0 } else { table_lines(inline_cells) };
        let cursors = inline + inline_lines + inline_cells;
        let cursor_lines = if shape.broadcast.is_some() { MAX_SEATS } else { 0 };
        let tables = cursors + cursor_lines;
        let request_slots = tables + CONTROL_LINES;
        let reply_slots = request_slots + slot_lines[1];
        let (requests, stamps) = if window == 0 {
            (None, tables)
        } else {
            (Some([tables, request_slots, reply_slots]), reply_slots + MAX_SEATS * window)
        };
        let stamp_lines = stamp_lines(capacity, shape.latency_sample);
        let times = stamps + 2 * stamp_lines;
        let is_timed = shape.latency_sample > 0;
        let end = times + if is_timed { TIMES_LINES } else { 0 };
        Self {
            primary_role,
            payload_types,
            seats,
            controls: [first, second],
            slots: [slots, slots + slot_lines[0]],
            slot_lines,
            inline,
            inline_seconds: inline + inline_lines,
            inline_cells,
            cursors,
            cursor_lines,
            requests,
            stamps: [stamps, stamps + stamp_lines],
            stamp_lines,
            times: is_timed.then_some(times),
            total: end.next_multiple_of(PAGE_LINES),
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.total * LINE_BYTES) as u64
    }
}

/// The layout of a pool's segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolLayout {
    pub(crate) table: usize,
    /// The first buffer, on a page; the end of the segment if the buffers are in device memory.
    pub(crate) buffers: usize,
    bytes: u64,
}

impl PoolLayout {
    pub(crate) fn of(pool: PoolId, buf_size: u32, len: u32) -> Self {
        let table = HEADER_LINES;
        let buffers = (table + table_lines(len as usize)).next_multiple_of(PAGE_LINES);
        let here = if pool.is_device() { 0 } else { stride_bytes(buf_size) };
        // 2^19 buffers of 2^31 bytes do not overflow.
        let bytes = (buffers * LINE_BYTES) as u64 + here * u64::from(len);
        Self { table, buffers, bytes: bytes.next_multiple_of((PAGE_LINES * LINE_BYTES) as u64) }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes from the first buffer to the end, in whole pages.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        self.bytes - (self.buffers * LINE_BYTES) as u64
    }
}

/// Size of a huge page; segments on huge pages are a multiple of it.
pub(crate) const HUGE_PAGE_BYTES: u64 = 2 << 20;

impl LinkConfig {
    /// Total size in bytes of all segments of the link, all of which its creator allocates. Buffers in device memory
    /// are not included.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        let shape = LinkShape::of(self);
        let whole = |bytes: u64| match self.huge_pages {
            HugePages::Hugetlb => bytes.next_multiple_of(HUGE_PAGE_BYTES),
            HugePages::Off | HugePages::Transparent => bytes,
        };
        let pools = PoolId::ALL.into_iter().zip(shape.pools).filter(|(_, (_, len))| *len > 0);
        let pools: u64 =
            pools.map(|(pool, (size, len))| whole(PoolLayout::of(pool, size, len).bytes())).sum();
        whole(LinkLayout::of(&shape).bytes()) + pools
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn shape(ring_capacity: u32, single: bool) -> LinkShape {
        let pools = [(8192, 4096), (0, 0), (0, 0), (0, 0), (0, 0)];
        LinkShape { ring_capacity, single, broadcast: None, pools, request_window: 0, latency_sample: 0 }
    }

    fn broadcast(ring_capacity: u32) -> LinkShape {
        LinkShape { broadcast: Some(BroadcastConfig::default()), ..shape(ring_capacity, false) }
    }

    #[test]
    fn tables_follow_each_other_without_overlap() {
        for capacity in [1, 2, 8, 1024, 1 << 20] {
            for shape in [shape(capacity, false), shape(capacity, true), broadcast(capacity)] {
                let l = LinkLayout::of(&shape);
                assert!(
                    HEADER_LINES <= l.primary_role
                        && l.primary_role < l.payload_types[0]
                        && l.payload_types[0] < l.seats
                        && l.seats + SEAT_LINES <= l.payload_types[1]
                        && l.payload_types[1] < l.controls[0]
                );
                assert!(l.seats + SEAT_LINES <= l.controls[0]);
                assert!(l.controls[0] + CONTROL_LINES <= l.controls[1]);
                assert!(l.controls[1] + CONTROL_LINES <= l.slots[0]);
                assert!(l.slots[0] + l.slot_lines[0] <= l.slots[1]);
                assert!(l.slots[1] + l.slot_lines[1] <= l.inline);
                assert!(l.inline <= l.inline_seconds && l.inline_seconds + l.inline_cells <= l.cursors);
                assert!(l.cursors + l.cursor_lines <= l.total);
                assert!(l.bytes().is_multiple_of(4096) && l.times.is_none());
                let timed = LinkLayout::of(&LinkShape { latency_sample: 4, ..shape });
                let times = timed.times.unwrap();
                assert!(timed.stamps[0] >= l.cursors + l.cursor_lines);
                assert_eq!(
                    (timed.stamps[1], times),
                    (timed.stamps[0] + timed.stamp_lines, timed.stamps[1] + timed.stamp_lines)
                );
                assert!(times + TIMES_LINES <= timed.total && 8 * timed.stamp_lines * 4 >= capacity as usize);
            }
        }
    }

    #[test]
    fn buffers_start_on_a_page_and_spread_over_cache_sets() {
        let l = PoolLayout::of(PoolId::CpuMsg, 8192, 4096);
        assert_eq!(l.buffers * LINE_BYTES % 4096, 0);
        assert_eq!(stride_bytes(8192), 8192 + 64);
        assert_eq!(stride_bytes(1), 64);
        assert_eq!(stride_bytes(15_000), 15_040);
        assert!(l.bytes() >= (l.buffers * LINE_BYTES) as u64 + 4096 * 8256);
    }

    #[test]
    fn device_pool_segment_ends_before_the_buffers() {
        for pool in [PoolId::CudaData, PoolId::GpuData] {
            let (here, there) = (PoolLayout::of(PoolId::CpuData, 8192, 64), PoolLayout::of(pool, 8192, 64));
            assert_eq!(here.buffers, there.buffers);
            assert_eq!(there.bytes(), (there.buffers * LINE_BYTES) as u64);
        }
    }

    #[test]
    fn foreign_headers_are_refused() {
        assert!(shape(8, true).is_sane());
        assert!(!shape(3, true).is_sane() && !shape(1 << 21, true).is_sane() && !shape(0, true).is_sane());
        let mut odd = shape(8, false);
        odd.pools[1] = (0, 5);
        assert!(!odd.is_sane());
        assert!(broadcast(8).is_sane());
        let mut odd = broadcast(8);
        odd.broadcast = Some(BroadcastConfig { history: 8, ..BroadcastConfig::default() });
        assert!(!odd.is_sane());
        odd = LinkShape { single: true, ..broadcast(8) };
        assert!(!odd.is_sane());
    }
}
