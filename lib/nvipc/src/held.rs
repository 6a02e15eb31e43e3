//! What this endpoint holds: the truth about our own buffers, in memory that nobody else writes.
//!
//! NVIPC keeps no owner of a buffer anywhere. So each endpoint knows for itself what it allocated or received and has not
//! sent or released: an address that is not in here is refused, a buffer that the peer's books give us a second time is not
//! handed out again, and when the peer is dead, all that is neither in here nor in a queue was its.
//!
//! NVIPC hands out the buffer that has been free for longest, so that every message comes to cold memory and both sides write the
//! words of one list. Here some of what is released stays, the last first: it is *parked*, ours and in no list.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::{Mutex, PoisonError, TryLockError};

/// Most buffers that one endpoint parks of a pool, and the share of the pool that this may be: the other side must find the rest.
const PARKED_MAX: u32 = 32;
const PARKED_SHARE: u32 = 16;

/// A buffer of a pool, as this endpoint sees it.
mod state {
    /// In a list, on its way, or the peer's.
    pub(super) const NOT_OURS: u8 = 0;
    /// The application has it.
    pub(super) const HELD: u8 = 1;
    /// Released, and kept for the next who allocates.
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

/// The buffers of one pool that are ours.
#[derive(Debug)]
pub(crate) struct Held {
    states: Box<[AtomicU8]>,
    /// The one that was parked last is the last. No more than there is room for.
    parked: Mutex<Vec<u32>>,
    parked_max: usize,
}

impl Held {
    pub(crate) fn new(len: usize) -> Self {
        let parked_max = u32::try_from(len).unwrap_or(u32::MAX) / PARKED_SHARE;
        let parked_max = parked_max.min(PARKED_MAX) as usize;
        Self {
            states: (0..len).map(|_| AtomicU8::new(NOT_OURS)).collect(),
            parked: Mutex::new(Vec::with_capacity(parked_max)),
            parked_max,
        }
    }

    fn exchange(&self, index: u32, from: u8, to: u8) -> bool {
        let state = self.states.get(index as usize);
        state.is_some_and(|state| state.compare_exchange(from, to, AcqRel, Relaxed).is_ok())
    }

    /// Keeps a buffer that the application has given back. `false`: there are enough, or another thread is there; it is still
    /// held.
    pub(crate) fn park(&self, index: u32) -> bool {
        let Some(mut parked) = self.try_parked() else { return false };
        if parked.len() >= self.parked_max || !self.exchange(index, HELD, PARKED) {
            return false;
        }
        parked.push(index);
        true
    }

    /// Takes the buffer that was parked last: it is held.
    pub(crate) fn unpark(&self) -> Option<u32> {
        if self.parked_max == 0 {
            return None;
        }
        let index = self.try_parked()?.pop()?;
        self.exchange(index, PARKED, HELD).then_some(index)
    }

    /// Takes all that are parked: they are held.
    pub(crate) fn unpark_all(&self) -> Vec<u32> {
        let all = std::mem::take(&mut *self.parked.lock().unwrap_or_else(PoisonError::into_inner));
        all.into_iter().filter(|index| self.exchange(*index, PARKED, HELD)).collect()
    }

    /// Nobody waits for another thread here: who finds one there goes to the list of all.
    fn try_parked(&self) -> Option<std::sync::MutexGuard<'_, Vec<u32>>> {
        match self.parked.try_lock() {
            Ok(parked) => Some(parked),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Makes a buffer held. `false`: it is ours already, or there is no such buffer.
    pub(crate) fn take(&self, index: u32) -> bool {
        self.exchange(index, NOT_OURS, HELD)
    }

    /// Gives it up. `false`: it was not held.
    pub(crate) fn give(&self, index: u32) -> bool {
        self.exchange(index, HELD, NOT_OURS)
    }

    pub(crate) fn has(&self, index: u32) -> bool {
        self.states.get(index as usize).is_some_and(|state| state.load(Acquire) == HELD)
    }

    /// Those that are ours now: held, or parked.
    pub(crate) fn all(&self) -> impl Iterator<Item = u32> + '_ {
        let ours = (0..).zip(&self.states).filter(|(_, state)| state.load(Acquire) != NOT_OURS);
        ours.map(|(index, _)| index)
    }
}

/// Which DATA buffer goes with each MSG buffer that is ours.
#[derive(Debug)]
pub(crate) struct Attached {
    data_of: Box<[AtomicU64]>,
    /// The other way, for each pool: a DATA buffer may be released alone and come again with another MSG.
    msg_of: [Box<[AtomicU32]>; PoolId::COUNT],
}

impl Attached {
    /// `lens`: of the pools.
    pub(crate) fn new(lens: [usize; PoolId::COUNT]) -> Self {
        let data_of = (0..lens[PoolId::CpuMsg.index()]).map(|_| AtomicU64::new(0)).collect();
        let msg_of = lens.map(|len| (0..len).map(|_| AtomicU32::new(u32::MAX)).collect());
        Self { data_of, msg_of }
    }

    fn msg_of(&self, data: DataBuffer) -> Option<&AtomicU32> {
        self.msg_of[data.pool.index()].get(data.index as usize)
    }

    /// Relaxed: who may call this holds both buffers, and they came to him by a queue.
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
    fn a_buffer_is_held_once() {
        let held = Held::new(2);
        assert!(held.take(1) && !held.take(1) && !held.take(2));
        assert_eq!(held.all().collect::<Vec<_>>(), [1]);
        assert!(held.give(1) && !held.give(1) && !held.give(7));
        assert!(!held.has(1));
    }

    #[test]
    fn the_last_that_was_parked_comes_first() {
        let held = Held::new(64);
        assert!((10..15).all(|index| held.take(index)));
        assert_eq!([10, 11, 12, 13].map(|index| held.park(index)), [true; 4]);
        assert!(!held.park(14), "a sixteenth of the pool");
        assert!(!held.park(10) && !held.park(20) && !held.has(10), "what is parked is not the application's");
        assert!(!held.take(10) && !held.give(10), "a message that names it is refused");
        assert_eq!((held.unpark(), held.has(13)), (Some(13), true));
        assert_eq!(held.all().collect::<Vec<_>>(), [10, 11, 12, 13, 14]);
        assert_eq!(held.unpark_all(), [10, 11, 12]);
        assert_eq!((held.unpark(), held.has(10)), (None, true));
        let small = Held::new(8);
        assert!(small.take(0) && !small.park(0) && small.unpark().is_none(), "the other side needs them all");
    }

    #[test]
    fn msg_buffers_remember_their_data() {
        let attached = Attached::new([2, 0, 9, 0, 0]);
        assert_eq!(attached.get(0), None);
        let data = DataBuffer { pool: PoolId::CpuLarge, index: 8 };
        attached.set(0, Some(data));
        assert_eq!(attached.get(0), Some(data));
        // It has gone without its MSG, and come again with another.
        attached.set(1, Some(data));
        assert_eq!((attached.get(0), attached.get(1)), (None, Some(data)));
        attached.set(1, None);
        assert_eq!((attached.get(0), attached.get(1), attached.get(2)), (None, None, None));
    }
}
