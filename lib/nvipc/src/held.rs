//! Which buffers this endpoint holds, in private memory that no other process can write.
//!
//! NVIPC records no owner of a buffer anywhere. So each endpoint keeps track of what it allocated or received and has not
//! sent or released. An address that is not recorded here is refused. A buffer that the free list or a message offers
//! although it is held is not handed out again. When the peer is dead, every buffer that is neither recorded here nor
//! queued was the peer's.
//!
//! NVIPC hands out the buffer that has been free for the longest time, so that every message uses cold memory, and both
//! sides write the words of one list. Here some released buffers are *parked*: they stay with this endpoint, outside the
//! list, and the last one released is the first to be allocated.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Maximum number of parked buffers per pool. The divisor below limits the share of the pool, because the other side needs
/// the rest.
const PARKED_MAX: u32 = 32;
const PARKED_SHARE: u32 = 16;

/// The state of one buffer, as this endpoint sees it.
mod state {
    /// In a free list, queued, or held by the peer.
    pub(super) const NOT_OURS: u8 = 0;
    /// Held by the application.
    pub(super) const HELD: u8 = 1;
    /// Released, and kept for the next allocation here.
    pub(super) const PARKED: u8 = 2;
}
use state::{HELD, NOT_OURS, PARKED};

use shmesh::config::PoolId;

use crate::memory::{AtomicU8, AtomicU32, AtomicU64};

/// A DATA buffer: its pool and its index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct DataBuffer {
    pub(crate) pool: PoolId,
    pub(crate) index: u32,
}

/// Which buffers of one pool this endpoint has.
#[derive(Debug)]
pub(crate) struct HeldBuffers {
    states: Box<[AtomicU8]>,
    /// The parked buffers, the last released one last. Its length is the limit.
    parked: Box<[AtomicU32]>,
    /// Their number. Read without `parking` by a thread that would find nothing.
    parked_count: AtomicU32,
    /// Set while a thread changes what is parked. A mutex would release it by a locked instruction, to wake waiting threads,
    /// but no thread waits for it.
    parking: AtomicBool,
}

/// Changes what is parked, alone.
#[derive(Debug)]
struct ParkingGuard<'a>(&'a HeldBuffers);

impl Drop for ParkingGuard<'_> {
    fn drop(&mut self) {
        // Release pairs with the Acquire of `try_parking`: the next thread sees these changes, which are Relaxed.
        self.0.parking.store(false, Release);
    }
}

impl ParkingGuard<'_> {
    /// Returns `false` if enough are parked or the buffer is not held.
    fn push(&self, index: u32) -> bool {
        let held = self.0;
        let count = held.parked_count.load(Relaxed);
        let Some(place) = held.parked.get(count as usize).filter(|_| held.exchange(index, HELD, PARKED))
        else {
            return false;
        };
        place.store(index, Relaxed);
        held.parked_count.store(count + 1, Relaxed);
        true
    }

    fn pop(&self) -> Option<u32> {
        let held = self.0;
        let count = held.parked_count.load(Relaxed).checked_sub(1)?;
        let index = held.parked.get(count as usize)?.load(Relaxed);
        held.parked_count.store(count, Relaxed);
        // No other thread changes this state: `park` and `give` expect that it is held, and `take` that it is not ours.
        held.states.get(index as usize)?.store(HELD, Release);
        Some(index)
    }
}

impl HeldBuffers {
    pub(crate) fn new(len: usize) -> Self {
        let parked_max = u32::try_from(len).unwrap_or(u32::MAX) / PARKED_SHARE;
        Self {
            states: (0..len).map(|_| AtomicU8::new(NOT_OURS)).collect(),
            parked: (0..parked_max.min(PARKED_MAX)).map(|_| AtomicU32::new(0)).collect(),
            parked_count: AtomicU32::new(0),
            parking: AtomicBool::new(false),
        }
    }

    fn exchange(&self, index: u32, from: u8, to: u8) -> bool {
        let state = self.states.get(index as usize);
        state.is_some_and(|state| state.compare_exchange(from, to, AcqRel, Relaxed).is_ok())
    }

    /// Parks a buffer that the application has released. Returns `false` if enough are parked or another thread parks at this
    /// moment; the buffer is still held then.
    pub(crate) fn park(&self, index: u32) -> bool {
        self.try_parking().is_some_and(|parking| parking.push(index))
    }

    /// Takes the buffer that was parked last. It is held from then on.
    pub(crate) fn unpark(&self) -> Option<u32> {
        if self.has_parked() { self.try_parking()?.pop() } else { None }
    }

    /// Takes all parked buffers, unless another thread parks at this moment. They are held from then on.
    pub(crate) fn unpark_all(&self) -> Vec<u32> {
        self.try_parking().map_or_else(Vec::new, |parking| std::iter::from_fn(|| parking.pop()).collect())
    }

    /// Whether a buffer is parked. Another thread may take it at any time.
    pub(crate) fn has_parked(&self) -> bool {
        self.parked_count.load(Relaxed) > 0
    }

    /// Never blocks: a thread that finds it taken uses the shared free list instead.
    fn try_parking(&self) -> Option<ParkingGuard<'_>> {
        (!self.parking.swap(true, Acquire)).then(|| ParkingGuard(self))
    }

    /// Marks a buffer as held. Returns `false` if this endpoint has it already, or if there is no such buffer.
    pub(crate) fn take(&self, index: u32) -> bool {
        self.exchange(index, NOT_OURS, HELD)
    }

    /// Ends the hold of a buffer. Returns `false` if it was not held.
    pub(crate) fn give(&self, index: u32) -> bool {
        self.exchange(index, HELD, NOT_OURS)
    }

    pub(crate) fn has(&self, index: u32) -> bool {
        self.states.get(index as usize).is_some_and(|state| state.load(Acquire) == HELD)
    }

    /// All buffers of this endpoint: held or parked.
    pub(crate) fn all(&self) -> impl Iterator<Item = u32> + '_ {
        let ours = (0..).zip(&self.states).filter(|(_, state)| state.load(Acquire) != NOT_OURS);
        ours.map(|(index, _)| index)
    }
}

/// Which DATA buffer belongs to each MSG buffer that this endpoint holds.
#[derive(Debug)]
pub(crate) struct DataOfMsg {
    data_of: Box<[AtomicU64]>,
    /// The reverse mapping, per pool: a DATA buffer may be released alone and arrive again with another MSG buffer.
    msg_of: [Box<[AtomicU32]>; PoolId::COUNT],
}

impl DataOfMsg {
    /// `lens` are the numbers of buffers of the pools.
    pub(crate) fn new(lens: [usize; PoolId::COUNT]) -> Self {
        let data_of = (0..lens[PoolId::CpuMsg.index()]).map(|_| AtomicU64::new(0)).collect();
        let msg_of = lens.map(|len| (0..len).map(|_| AtomicU32::new(u32::MAX)).collect());
        Self { data_of, msg_of }
    }

    fn msg_of(&self, data: DataBuffer) -> Option<&AtomicU32> {
        self.msg_of[data.pool.index()].get(data.index as usize)
    }

    /// Relaxed is enough: the caller holds both buffers, and they reached it through a queue.
    pub(crate) fn set(&self, msg: u32, data: Option<DataBuffer>) {
        let word = data.map_or(0, |data| (data.pool as u64) << 32 | u64::from(data.index));
        if let Some(data_of) = self.data_of.get(msg as usize) {
            data_of.store(word, Relaxed);
        }
        if let Some(msg_of) = data.and_then(|data| self.msg_of(data)) {
            msg_of.store(msg, Relaxed);
        }
    }

    pub(crate) fn get(&self, msg: u32) -> Option<DataBuffer> {
        let word = self.data_of.get(msg as usize)?.load(Relaxed);
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let (pool, index) = ((word >> 32) as u32, word as u32);
        let pool = PoolId::from_index(pool).filter(|pool| *pool != PoolId::CpuMsg)?;
        let data = DataBuffer { pool, index };
        let is_its = self.msg_of(data)?.load(Relaxed) == msg;
        is_its.then_some(data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_is_held_once() {
        let held = HeldBuffers::new(2);
        assert!(held.take(1) && !held.take(1) && !held.take(2));
        assert_eq!(held.all().collect::<Vec<_>>(), [1]);
        assert!(held.give(1) && !held.give(1) && !held.give(7));
        assert!(!held.has(1));
    }

    #[test]
    fn last_parked_buffer_is_reused_first() {
        let held = HeldBuffers::new(64);
        assert!((10..15).all(|index| held.take(index)));
        assert_eq!([10, 11, 12, 13].map(|index| held.park(index)), [true; 4]);
        assert!(!held.park(14), "a sixteenth of the pool");
        assert!(!held.park(10) && !held.park(20) && !held.has(10), "what is parked is not the application's");
        assert!(!held.take(10) && !held.give(10), "a message that names it is refused");
        assert_eq!((held.unpark(), held.has(13)), (Some(13), true));
        assert_eq!(held.all().collect::<Vec<_>>(), [10, 11, 12, 13, 14]);
        assert_eq!(held.unpark_all(), [12, 11, 10]);
        assert_eq!((held.unpark(), held.has(10)), (None, true));
        let small = HeldBuffers::new(8);
        assert!(small.take(0) && !small.park(0) && small.unpark().is_none(), "the other side needs them all");
    }

    #[test]
    fn parked_buffers_have_one_holder_among_threads() {
        const EACH: u32 = 32;
        let (held, start) = (HeldBuffers::new(512), std::sync::Barrier::new(2));
        let park_and_unpark = |first: u32| {
            start.wait();
            let mut ours: Vec<u32> = (first..first + EACH).collect();
            assert!(ours.iter().all(|index| held.take(*index)));
            for _ in 0..2_000 {
                ours.retain(|index| !held.park(*index));
                ours.extend(std::iter::from_fn(|| held.unpark()).take(EACH as usize));
                assert!(ours.iter().all(|index| held.has(*index)), "another thread has one");
            }
            ours
        };
        let mut all = std::thread::scope(|scope| {
            let other = scope.spawn(|| park_and_unpark(EACH));
            let ours = park_and_unpark(0);
            [ours, other.join().unwrap()].concat()
        });
        all.extend(held.unpark_all());
        all.sort_unstable();
        assert_eq!(all, Vec::from_iter(0..2 * EACH), "none is lost");
    }

    #[test]
    fn msg_buffers_remember_their_data() {
        let attached = DataOfMsg::new([2, 0, 9, 0, 0]);
        assert_eq!(attached.get(0), None);
        let data = DataBuffer { pool: PoolId::CpuLarge, index: 8 };
        attached.set(0, Some(data));
        assert_eq!(attached.get(0), Some(data));
        // The DATA buffer was released without its MSG buffer, and arrives with another one.
        attached.set(1, Some(data));
        assert_eq!((attached.get(0), attached.get(1)), (None, Some(data)));
        attached.set(1, None);
        assert_eq!((attached.get(0), attached.get(1), attached.get(2)), (None, None, None));
    }
}
