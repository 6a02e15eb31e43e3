//! What this endpoint holds: the truth about our own buffers, in memory that nobody else writes.
//!
//! NVIPC keeps no owner of a buffer anywhere. So each endpoint knows for itself what it allocated or received and has not
//! sent or released: an address that is not in here is refused, a buffer that the peer's books give us a second time is not
//! handed out again, and when the peer is dead, all that is neither in here nor in a queue was its.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use shmesh::config::PoolId;

use crate::memory::{AtomicU32, AtomicU64};

/// A DATA buffer: its pool and its index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct DataBuffer {
    pub(crate) pool: PoolId,
    pub(crate) index: u32,
}

/// The buffers of one pool that are ours.
#[derive(Debug)]
pub(crate) struct Held(Box<[AtomicBool]>);

impl Held {
    pub(crate) fn new(len: usize) -> Self {
        Self((0..len).map(|_| AtomicBool::new(false)).collect())
    }

    /// Makes a buffer ours. `false`: it was, or there is no such buffer.
    pub(crate) fn take(&self, index: u32) -> bool {
        self.0.get(index as usize).is_some_and(|held| !held.swap(true, AcqRel))
    }

    /// Gives it up. `false`: it was not ours.
    pub(crate) fn give(&self, index: u32) -> bool {
        self.0.get(index as usize).is_some_and(|held| held.swap(false, AcqRel))
    }

    pub(crate) fn has(&self, index: u32) -> bool {
        self.0.get(index as usize).is_some_and(|held| held.load(Acquire))
    }

    /// Those that are ours now.
    pub(crate) fn all(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.0).filter(|(_, held)| held.load(Acquire)).map(|(index, _)| index)
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
