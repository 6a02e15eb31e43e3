//! Recovery of buffers and queues after the death of the secondary.
//!
//! When the next secondary connects, NVIPC wipes everything. Here the primary knows what it holds itself and what is
//! queued in the rings; the rest belonged to the dead secondary. Those buffers return to their pools, messages that
//! were sent stay queued, and queues that the secondary was changing when it died are rebuilt.
//!
//! No other process uses the link during recovery: the secondary is dead, its successor waits until this side completes the
//! exchange, and this side's calls wait for the lock.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

use shmesh::config::PoolId;

use super::link::Shared;
use crate::layout::{INFO_DATA_INDEX, INFO_DATA_POOL, INFO_REFERENCES};

impl Shared {
    /// Recovers the buffers and queues of the secondary, which must have ended.
    pub(super) fn recover(&self) {
        let _alone = self.alone();
        // A truncated segment reads as zeros: nothing can be recovered.
        if self.check_open().is_err() {
            return;
        }
        // In use: held by this side, or queued.
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
                    // The DATA buffer belongs to another message, or to none. The receiver must not get it twice.
                    info[INFO_DATA_POOL].store(0, Relaxed);
                }
            }
            ring.refill(waiting);
        }
        let mut recovered = self.recovered();
        recovered.peers += 1;
        for (pool, used) in
            self.pools.iter().flatten().zip(self.pools.iter().zip(&used).filter_map(only_present))
        {
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
        // Published in one step, so that a reader sees a whole recovery or none of it.
        *self.recovered.lock().unwrap_or_else(PoisonError::into_inner) = recovered;
    }
}

fn only_present<'a, T>((pool, used): (&Option<T>, &'a Vec<bool>)) -> Option<&'a Vec<bool>> {
    pool.as_ref().map(|_| used)
}
