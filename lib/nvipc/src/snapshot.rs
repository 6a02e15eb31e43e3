//! A read-only look at a link in NVIPC's layout. The processes on the link are not affected.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use shmesh::config::{PoolConfig, PoolId};
use shmesh_sys::{file, socket};

use crate::layout::{
    CONFIG_AT, CONFIG_BYTES, INFO_CELL_ID, INFO_DATA_LEN, INFO_MSG_ID, INFO_MSG_LEN, INFO_WORDS, PoolShapes,
    QUEUE_WORDS, SegmentNames, infos_at, queue_bytes,
};
use crate::memory::{AtomicU32, Memory};
use crate::queue::IndexQueue;
use crate::{Error, Result};

/// A message in a ring, as its descriptor says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct QueuedMessage {
    /// The message id, as the application defines it.
    pub msg_id: i32,
    /// The radio cell that the message is about.
    pub cell_id: i32,
    /// Bytes of its MSG part.
    pub msg_len: i32,
    /// Bytes of its DATA part, if it has one.
    pub data_len: i32,
}

/// The state of a link at one moment. If the link is in use, the parts may be from slightly different moments.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let pools = shmesh::config::LinkConfig::new("nvipc".parse()?).pools;
/// use shmesh_nvipc_wire::{Options, LinkSnapshot};
/// assert!(LinkSnapshot::open(dir.path(), "nvipc")?.is_none());
/// let phy = Options::new().dir(dir.path()).create("nvipc", pools)?;
/// let seen = LinkSnapshot::open(dir.path(), "nvipc")?.expect("it is there");
/// assert!(seen.is_served && seen.m2s.is_empty() && seen.s2m.is_empty());
/// assert_eq!((seen.pools, seen.free[0]), (pools, Some(pools[0].pool_len as usize)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct LinkSnapshot {
    /// The pools, as the primary configured them.
    pub pools: [PoolConfig; PoolId::COUNT],
    /// Length of the free list of each pool; `None` if there is no pool. Buffers that an endpoint has parked are not
    /// counted.
    pub free: [Option<usize>; PoolId::COUNT],
    /// Messages from the primary to the secondary, oldest first.
    pub m2s: Vec<QueuedMessage>,
    /// Messages from the secondary to the primary, oldest first.
    pub s2m: Vec<QueuedMessage>,
    /// Whether a primary listens for secondaries, and so is alive.
    pub is_served: bool,
    /// Size of its files in bytes.
    pub bytes: u64,
}

impl LinkSnapshot {
    /// Reads the link with this prefix. Returns `None` if there is none in NVIPC's layout.
    ///
    /// # Errors
    /// [`Version`](Error::Version), [`Damaged`](Error::Damaged), [`Truncated`](Error::Truncated), [`Prefix`](Error::Prefix),
    /// [`System`](Error::System).
    pub fn open(dir: &Path, prefix: &str) -> Result<Option<Self>> {
        let names = SegmentNames::new(prefix)?;
        if !dir.join(names.of("debug")).is_file() {
            return Ok(None);
        }
        let debug = map(dir, &names.of("debug"))?;
        let words =
            debug.words::<AtomicU32>(CONFIG_AT, CONFIG_BYTES / 4).ok_or_else(|| short(&names.of("debug")))?;
        let words = std::array::from_fn(|i| words[i].load(Relaxed));
        let shape = PoolShapes::from_words(&words, &names.of("debug"))?;
        let len = shape.msg_len();
        let shm = map(dir, &names.of("shm"))?;
        let mut bytes = (debug.len() + shm.len()) as u64;
        let infos =
            shm.words::<AtomicU32>(infos_at(len), INFO_WORDS * len).ok_or_else(|| short(&names.of("shm")))?;
        let waiting = |at| -> Result<Vec<QueuedMessage>> {
            let queue = queue(&shm, at, len).ok_or_else(|| short(&names.of("shm")))?;
            let word = |index: u32, word: usize| {
                infos[index as usize * INFO_WORDS + word].load(Relaxed).cast_signed()
            };
            let all = queue.values().into_iter().map(|index| QueuedMessage {
                msg_id: word(index, INFO_MSG_ID),
                cell_id: word(index, INFO_CELL_ID),
                msg_len: word(index, INFO_MSG_LEN),
                data_len: word(index, INFO_DATA_LEN),
            });
            Ok(all.collect())
        };
        let (s2m, m2s) = (waiting(0)?, waiting(queue_bytes(len))?);
        let mut free = [None; PoolId::COUNT];
        for pool in PoolId::ALL.into_iter().filter(|pool| shape.pools[pool.index()].is_enabled()) {
            let file = names.pool(pool);
            let memory = map(dir, &file)?;
            bytes += memory.len() as u64;
            let list =
                queue(&memory, 0, shape.pools[pool.index()].pool_len as usize).ok_or_else(|| short(&file))?;
            free[pool.index()] = Some(list.len());
        }
        let is_served = socket::is_bound(&dir.join(names.server())).unwrap_or(false);
        Ok(Some(Self { pools: shape.pools, free, m2s, s2m, is_served, bytes }))
    }
}

fn short(what: &str) -> Error {
    Error::Damaged { what: what.to_owned(), why: "its parts do not fit" }
}

fn queue(memory: &Arc<Memory>, at: usize, len: usize) -> Option<IndexQueue> {
    memory.words(at, QUEUE_WORDS + len).map(IndexQueue::new)
}

fn map(dir: &Path, name: &str) -> Result<Arc<Memory>> {
    let path = dir.join(name);
    let failed = |error: std::io::Error| Error::system(format!("read {}", path.display()), error);
    let file = file::open(&path, false).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() || metadata.len() == 0 {
        return Err(Error::Damaged {
            what: path.display().to_string(),
            why: "it is empty, or not a regular file",
        });
    }
    Ok(Memory::mapped(memmap2::MmapOptions::new().map_raw_read_only(&file).map_err(failed)?))
}
