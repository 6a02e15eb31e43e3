//! The parts of a link in shared memory, and the lookup of buffers by address.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use shmesh::Side;
use shmesh::config::{PoolConfig, PoolId};
use shmesh_sys::file::Locked;

use super::Buffers;
use crate::exchange::ExchangePeer;
use crate::held::{DataBuffer, DataOfMsg, HeldBuffers};
use crate::layout::{
    INFO_DATA_INDEX, INFO_DATA_POOL, INFO_REFERENCES, INFO_WORDS, PoolShapes, SegmentNames, TIME_BYTES,
};
use crate::memory::{AtomicU32, AtomicU64, Memory, WordArray};
use crate::queue::IndexQueue;
use crate::{Error, Result};

/// How long a closing primary waits for another process that creates a link in the same directory.
const FILES_LIMIT: Duration = Duration::from_secs(5);

/// A pool: its buffers, its free list, and which buffers this endpoint holds.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) id: PoolId,
    pub(super) config: PoolConfig,
    pub(super) free: IndexQueue,
    pub(super) held: HeldBuffers,
    /// Address of the first buffer; `None` for buffers in device memory.
    pub(super) base: Option<NonNull<u8>>,
    /// The mapping that `base` points into.
    pub(super) memory: Arc<Memory>,
}

// SAFETY: `base` points into a mapping that `memory` keeps alive. A mapping has no thread affinity, and this type only
// computes addresses from `base`.
#[expect(unsafe_code, reason = "a pool names buffers by address")]
unsafe impl Send for Pool {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "a pool names buffers by address")]
unsafe impl Sync for Pool {}

impl Pool {
    /// Returns the index of the buffer that contains an address.
    pub(super) fn index(&self, address: *const u8) -> Option<u32> {
        let offset = address.addr().checked_sub(self.base?.addr().get())?;
        let index = u32::try_from(offset / self.config.buf_size_bytes as usize).ok()?;
        (index < self.config.pool_len).then_some(index)
    }

    /// Returns the number of bytes from an address to the end of its buffer.
    pub(super) fn room_at(&self, address: *const u8) -> Option<usize> {
        let offset = address.addr().checked_sub(self.base?.addr().get())?;
        let size = self.config.buf_size_bytes as usize;
        self.index(address).map(|_| size - offset % size)
    }

    /// As [`index`](Self::index), but only for buffers that this endpoint holds.
    pub(super) fn held_index(&self, address: *const u8) -> Result<u32> {
        self.index(address).filter(|index| self.held.has(*index)).ok_or_else(|| self.not_held(address))
    }

    pub(super) fn not_held(&self, address: *const u8) -> Error {
        Error::NotHeld { address: address.addr(), pool: self.id }
    }

    fn address(&self, index: u32) -> *mut u8 {
        let offset = index as usize * self.config.buf_size_bytes as usize;
        self.base.map_or(std::ptr::null_mut(), |base| base.as_ptr().wrapping_add(offset))
    }

    pub(super) fn checked_len(&self, part: &'static str, len: i32) -> Result<u32> {
        let max = self.config.buf_size_bytes;
        u32::try_from(len).ok().filter(|len| *len <= max).ok_or(Error::Length {
            part,
            len: len.into(),
            pool: self.id,
            max,
        })
    }
}

/// Totals of what was recovered from secondaries that ended.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RecoveryStats {
    /// Number of secondaries that ended.
    pub peers: u64,
    /// MSG buffers that they held.
    pub msg_buffers: u64,
    /// DATA buffers that they held.
    pub data_buffers: u64,
}

/// The state of an endpoint that its calls share with its service thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) side: Side,
    pub(super) names: SegmentNames,
    pub(super) shape: PoolShapes,
    /// The rings: secondary to primary, and primary to secondary.
    pub(super) rings: [IndexQueue; 2],
    pub(super) infos: WordArray<AtomicU32>,
    pub(super) pools: [Option<Pool>; PoolId::COUNT],
    pub(super) attached: DataOfMsg,
    /// The word of `_debug` that is set during a dump, and the timestamps of messages.
    pub(super) dumping: WordArray<AtomicU64>,
    pub(super) times: WordArray<AtomicU64>,
    /// The eventfd that the peer writes to and that we wait on.
    pub(super) eventfd: OwnedFd,
    /// Readable when waiting is pointless: the endpoint is closed, or the primary has ended.
    pub(super) over: OwnedFd,
    /// Readable when the endpoint is closed.
    pub(super) closing: OwnedFd,
    /// Number of calls that released a buffer, modulo 2^32. The service thread takes an unchanged number as a sign of
    /// idleness.
    pub(super) released: AtomicU32,
    pub(super) peer: RwLock<Option<Arc<ExchangePeer>>>,
    /// Calls hold this shared, recovery and closing hold it exclusively. It guards the segments, not a value.
    pub(super) calls: RwLock<()>,
    pub(super) closed: AtomicBool,
    /// The primary has ended: what this endpoint holds must not be returned to the pools of a new primary.
    pub(super) primary_ended: AtomicBool,
    /// Files to remove on close.
    pub(super) files: Vec<PathBuf>,
    /// Counts of everything recovered so far. Only `recover` writes them.
    pub(super) recovered: Mutex<RecoveryStats>,
}

impl Shared {
    /// Starts a call that changes shared memory.
    #[inline]
    pub(super) fn enter(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let entered = self.calls.read().unwrap_or_else(PoisonError::into_inner);
        self.check_open_to_send().map(|()| entered)
    }

    /// Starts a call that still works after the primary has ended.
    #[inline]
    pub(super) fn enter_to_receive(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let entered = self.calls.read().unwrap_or_else(PoisonError::into_inner);
        self.check_open().map(|()| entered)
    }

    /// Returns an error if the endpoint is closed, or the link has ended by a dump.
    #[inline]
    pub(super) fn check_open(&self) -> Result<()> {
        if self.closed.load(Acquire) {
            return Err(Error::Closed);
        }
        if self.dumping[0].load(Relaxed) != 0 {
            return Err(Error::Dumped);
        }
        Ok(())
    }

    /// As [`check_open`](Self::check_open), and if the primary has ended.
    #[inline]
    pub(super) fn check_open_to_send(&self) -> Result<()> {
        self.check_open()?;
        if self.is_over() { Err(Error::PrimaryEnded) } else { Ok(()) }
    }

    pub(super) fn alone(&self) -> RwLockWriteGuard<'_, ()> {
        self.calls.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The peer. Returned without the lock, because writing to a peer may block.
    pub(super) fn peer(&self) -> Option<Arc<ExchangePeer>> {
        self.peer.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns an error if waiting is pointless.
    pub(super) fn living(&self) -> Result<()> {
        if self.closed.load(Acquire) {
            return Err(Error::Closed);
        }
        if self.is_over() { Err(Error::PrimaryEnded) } else { Ok(()) }
    }

    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.primary_ended.load(Acquire)
    }

    /// The ring that this side sends on.
    #[inline]
    pub(super) fn tx(&self) -> &IndexQueue {
        match self.side {
            Side::Secondary => &self.rings[0],
            Side::Primary => &self.rings[1],
        }
    }

    /// The ring that this side receives from.
    #[inline]
    pub(super) fn rx(&self) -> &IndexQueue {
        match self.side {
            Side::Secondary => &self.rings[1],
            Side::Primary => &self.rings[0],
        }
    }

    /// The direction of this side's messages, as descriptors encode it.
    pub(super) fn direction(&self) -> u32 {
        match self.side {
            Side::Secondary => 0,
            Side::Primary => 1,
        }
    }

    #[inline]
    pub(super) fn msg_pool(&self) -> &Pool {
        // Checked when the link was opened: a link without this pool is refused.
        #[expect(clippy::expect_used, reason = "an invariant of the type")]
        self.pools[PoolId::CpuMsg.index()].as_ref().expect("a link has cpu_msg")
    }

    /// Returns a pool that can hold the DATA part.
    pub(super) fn data_pool(&self, id: PoolId) -> Result<&Pool> {
        let no = |why| Error::NoPool { pool: id, why };
        if id == PoolId::CpuMsg {
            return Err(no("it holds MSG parts; use another pool for the DATA part"));
        }
        let pool = self.pools[id.index()].as_ref();
        let pool = pool.ok_or(no(
            "it is not configured; set its buf_size and pool_len in the primary's configuration",
        ))?;
        if pool.base.is_none() {
            return Err(no(
                "its buffers are in GPU memory, which is not supported in NVIPC's layout; use another pool",
            ));
        }
        Ok(pool)
    }

    /// The descriptor of a MSG buffer. The index must have been checked.
    #[inline]
    pub(super) fn info(&self, index: u32) -> &[AtomicU32] {
        &self.infos[index as usize * INFO_WORDS..][..INFO_WORDS]
    }

    pub(super) fn write_data(&self, info: &[AtomicU32], data: Option<DataBuffer>) {
        let (pool, index) = data.map_or((0, u32::MAX), |data| (data.pool as u32, data.index));
        info[INFO_DATA_POOL].store(pool, Relaxed);
        info[INFO_DATA_INDEX].store(index, Relaxed);
    }

    /// Checks which DATA buffer a received message names, and takes it over.
    pub(super) fn read_data(
        &self,
        info: &[AtomicU32],
    ) -> std::result::Result<Option<DataBuffer>, &'static str> {
        let pool = info[INFO_DATA_POOL].load(Relaxed).cast_signed();
        let Ok(pool) = u32::try_from(pool) else { return Ok(None) };
        if pool == 0 {
            return Ok(None);
        }
        let id = PoolId::from_index(pool).ok_or("it names a pool that does not exist")?;
        let pool = self.data_pool(id).map_err(|_| "it names a pool that is not configured or on a device")?;
        let index = info[INFO_DATA_INDEX].load(Relaxed);
        if index >= pool.config.pool_len {
            return Err("it names a DATA buffer beyond its pool");
        }
        if !pool.held.take(index) {
            return Err("it names a DATA buffer that is held here");
        }
        Ok(Some(DataBuffer { pool: id, index }))
    }

    pub(super) fn holds(&self, data: DataBuffer) -> bool {
        self.pools[data.pool.index()].as_ref().is_some_and(|pool| pool.held.has(data.index))
    }

    pub(super) fn buffers(&self, msg: u32, data: Option<DataBuffer>) -> Buffers {
        let pool = data.and_then(|data| self.pools[data.pool.index()].as_ref().zip(Some(data.index)));
        Buffers {
            msg: self.msg_pool().address(msg),
            data: pool.map_or(std::ptr::null_mut(), |(pool, index)| pool.address(index)),
            data_pool: data.map(|data| data.pool),
        }
    }

    /// Stores the time of sending where NVIPC's programs look for it.
    pub(super) fn stamp(&self, index: u32) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanos) = (now.as_secs(), u64::from(now.subsec_nanos()));
        let [to_seconds, to_nanos] = self.time_of_send(index);
        to_seconds.store(seconds, Relaxed);
        to_nanos.store(nanos, Relaxed);
    }

    /// The time of sending of a message, as seconds and nanoseconds.
    pub(super) fn time_of_send(&self, index: u32) -> &[AtomicU64; 2] {
        let at = index as usize * TIME_BYTES / 8;
        // A timestamp begins with two words, and there is one timestamp per MSG buffer.
        #[expect(clippy::expect_used, reason = "the window was made for this many")]
        self.times[at..].first_chunk().expect("a checked index")
    }

    /// Returns a MSG buffer to its pool.
    ///
    /// Returns `false` if NVIPC's tracing still has a reference to the message; then its DATA buffer stays with it as well.
    pub(super) fn release_msg(&self, index: u32) -> bool {
        let pool = self.msg_pool();
        // Lost updates are harmless: the number only tells whether anything happened.
        self.released.store(self.released.load(Relaxed).wrapping_add(1), Relaxed);
        if self.is_over() {
            pool.held.give(index);
            return true;
        }
        // More than one reference: NVIPC's tracing still reads the message and will return it. Less than one: the peer
        // wrote garbage.
        let references = &self.info(index)[INFO_REFERENCES];
        // Acquire: tracing that has returned its reference is done with the message. A reference is added only by the process
        // that sends the message, before it sends it, so the last one needs no exchange.
        if references.load(Acquire) == 1 {
            references.store(0, Relaxed);
        } else if references.fetch_sub(1, AcqRel).cast_signed() > 1 {
            pool.held.give(index);
            return false;
        }
        pool.put_back(index);
        true
    }

    pub(super) fn release_data(&self, data: DataBuffer) {
        let Some(pool) = self.pools[data.pool.index()].as_ref() else { return };
        if self.is_over() {
            pool.held.give(data.index);
        } else {
            pool.put_back(data.index);
        }
    }

    /// Returns every buffer that this endpoint holds. No other call may run meanwhile.
    pub(super) fn release_all(&self) {
        for pool in self.pools.iter().flatten() {
            pool.return_parked();
            let held: Vec<_> = pool.held.all().collect();
            held.into_iter().for_each(|index| pool.return_to_list(index));
        }
    }

    /// Gives the memory of all segments back, while no call runs and after `closed` is set.
    pub(super) fn discard(&self) {
        self.pools.iter().flatten().for_each(|pool| pool.memory.discard());
        self.infos.memory().discard();
        self.times.memory().discard();
    }

    /// Returns parked buffers: of all pools if nothing was released since `before`, otherwise of the pools whose free
    /// list is short. Returns the current number of releases.
    pub(super) fn return_parked(&self, before: u32) -> u32 {
        let Ok(_entered) = self.enter() else { return before };
        let released = self.released.load(Relaxed);
        for pool in self.pools.iter().flatten() {
            if released == before || pool.is_scarce() {
                pool.return_parked();
            }
        }
        released
    }

    pub(super) fn recovered(&self) -> RecoveryStats {
        *self.recovered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a new primary from replacing the files, for a limited time.
    pub(super) fn lock_files(&self) -> Option<Locked> {
        let dir = self.files.first()?.parent()?;
        lock_dir(dir, FILES_LIMIT).ok()
    }

    /// Removes the files of a primary. The file that marks the others as stale goes last, so an interrupted removal can be
    /// resumed.
    pub(super) fn remove_files(&self) {
        for path in self.files.iter().rev() {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Locks a directory, so that no other process with this library creates files in it meanwhile.
pub(super) fn lock_dir(dir: &Path, limit: Duration) -> io::Result<Locked> {
    Locked::lock_until(File::open(dir)?, Instant::now() + limit, Duration::from_millis(5))
}
