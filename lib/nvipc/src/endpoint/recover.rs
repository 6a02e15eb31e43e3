//! What a dead secondary left is put right.
//!
//! NVIPC does this by wiping all, when the next secondary connects. Here the primary knows what itself holds and what waits
//! in the rings; the rest was the dead one's. It goes back to its pools, messages that were sent stay where they are, and
//! queues that it died in the middle of are written anew. Nobody else is there meanwhile: the dead one does not come back,
//! the next one waits for our half of the exchange, and our own calls wait for the lock.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

use shmesh::config::PoolId;

use super::link::Shared;
use crate::layout::{INFO_DATA_INDEX, INFO_DATA_POOL, INFO_REFERENCES};

/// What was taken back from secondaries that ended.
///
/// ```
/// let nothing = shmesh_nvipc_wire::Recovered::default();
/// assert_eq!((nothing.peers, nothing.msg_buffers, nothing.data_buffers), (0, 0, 0));
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Recovered {
    /// How many secondaries ended.
    pub peers: u64,
    /// MSG buffers that they held.
    pub msg_buffers: u64,
    /// DATA buffers that they held.
    pub data_buffers: u64,
}

impl Shared {
    /// Puts right what the secondary left; it must have ended.
    pub(super) fn recover(&self) {
        let _alone = self.alone();
        // In use: ours, or on the way.
        let mut used: [Vec<bool>; PoolId::COUNT] = std::array::from_fn(|i| {
            let pool = self.pools[i].as_ref();
            let mut used = vec![false; pool.map_or(0, |pool| pool.config.pool_len as usize)];
            pool.into_iter().flat_map(|pool| pool.held.all()).for_each(|index| used[index as usize] = true);
            used
        });
        let mut take = |pool: PoolId, index: u32| {
            used[pool.index()].get_mut(index as usize).is_some_and(|used| !std::mem::replace(used, true))
        };
        for ring in &self.rings {
            let waiting: Vec<_> =
                ring.values().into_iter().filter(|index| take(PoolId::CpuMsg, *index)).collect();
            for index in &waiting {
                let info = self.info(*index);
                info[INFO_REFERENCES].store(1, Relaxed);
                let pool = PoolId::from_index(info[INFO_DATA_POOL].load(Relaxed));
                let data = info[INFO_DATA_INDEX].load(Relaxed);
                if let Some(pool) = pool.filter(|pool| *pool != PoolId::CpuMsg)
                    && !take(pool, data)
                {
                    // Of another message, or none: the receiver shall not have it twice.
                    info[INFO_DATA_POOL].store(0, Relaxed);
                }
            }
            ring.refill(waiting);
        }
        let mut recovered = self.recovered();
        recovered.peers += 1;
        for (pool, used) in self.pools.iter().flatten().zip(self.pools.iter().zip(&used).filter_map(some)) {
            let before = pool.free.values().len() as u64;
            let free: Vec<_> = (0..pool.config.pool_len).filter(|index| !used[*index as usize]).collect();
            let back = (free.len() as u64).saturating_sub(before);
            *if pool.id == PoolId::CpuMsg {
                &mut recovered.msg_buffers
            } else {
                &mut recovered.data_buffers
            } += back;
            pool.free.refill(free);
        }
        // Once and last: a reader sees all of a recovery or nothing.
        *self.recovered.lock().unwrap_or_else(PoisonError::into_inner) = recovered;
    }
}

fn some<'a, T>((pool, used): (&Option<T>, &'a Vec<bool>)) -> Option<&'a Vec<bool>> {
    pool.as_ref().map(|_| used)
}
