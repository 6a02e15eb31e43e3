//! A read-only look at a link in NVIPC's layout. The processes on the link are not affected.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use shmesh::config::{PoolConfig, PoolId};
use shmesh_sys::file::{self, FileAtPath};
use shmesh_sys::socket;

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

/// A link in NVIPC's layout, mapped read-only, for several snapshots.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let pools = shmesh::config::LinkConfig::new("nvipc".parse()?).pools;
/// use shmesh_nvipc_wire::{MappedLink, Options};
/// let phy = Options::new().dir(dir.path()).create("nvipc", pools)?;
/// let link = MappedLink::open(dir.path(), "nvipc")?.expect("it is there");
/// assert!(link.is_current() && link.snapshot()?.is_served);
/// drop(phy);
/// std::fs::remove_file(dir.path().join("nvipc_shm")).ok();
/// assert!(!link.is_current());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MappedLink {
    dir: PathBuf,
    names: SegmentNames,
    shape: PoolShapes,
    debug: Arc<Memory>,
    shm: Arc<Memory>,
    pools: [Option<Arc<Memory>>; PoolId::COUNT],
    files: Vec<FileAtPath>,
}

impl MappedLink {
    /// Maps the link with this prefix. Returns `None` if there is none in NVIPC's layout.
    ///
    /// # Errors
    /// [`Version`](Error::Version), [`Damaged`](Error::Damaged), [`Prefix`](Error::Prefix), [`System`](Error::System).
    pub fn open(dir: &Path, prefix: &str) -> Result<Option<Self>> {
        let names = SegmentNames::new(prefix)?;
        if !dir.join(names.of("debug")).is_file() {
            return Ok(None);
        }
        let mut files = Vec::new();
        let mut map = |name: &str| map(dir, name, &mut files);
        let debug = map(&names.of("debug"))?;
        let shape = shape_in(&debug, &names)?;
        let shm = map(&names.of("shm"))?;
        let mut pools = [const { None }; PoolId::COUNT];
        for pool in PoolId::ALL.into_iter().filter(|pool| shape.pools[pool.index()].is_enabled()) {
            pools[pool.index()] = Some(map(&names.pool(pool))?);
        }
        Ok(Some(Self { dir: dir.to_path_buf(), names, shape, debug, shm, pools, files }))
    }

    /// Whether [`open`](Self::open) would map the same files: a primary creates them again, or writes another configuration into them.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.files.iter().all(FileAtPath::is_unchanged)
            && shape_in(&self.debug, &self.names).is_ok_and(|shape| shape == self.shape)
    }

    /// The state of the link now.
    ///
    /// # Errors
    /// [`Damaged`](Error::Damaged).
    pub fn snapshot(&self) -> Result<LinkSnapshot> {
        let (names, shm, len) = (&self.names, &self.shm, self.shape.msg_len());
        let infos =
            shm.words::<AtomicU32>(infos_at(len), INFO_WORDS * len).ok_or_else(|| short(&names.of("shm")))?;
        let waiting = |at| -> Result<Vec<QueuedMessage>> {
            let queue = queue(shm, at, len).ok_or_else(|| short(&names.of("shm")))?;
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
        let mut bytes = (self.debug.len() + shm.len()) as u64;
        for pool in PoolId::ALL {
            let Some(memory) = &self.pools[pool.index()] else { continue };
            bytes += memory.len() as u64;
            let list = queue(memory, 0, self.shape.pools[pool.index()].pool_len as usize)
                .ok_or_else(|| short(&names.pool(pool)))?;
            free[pool.index()] = Some(list.len());
        }
        let is_served = socket::is_bound(&self.dir.join(names.server())).unwrap_or(false);
        Ok(LinkSnapshot { pools: self.shape.pools, free, m2s, s2m, is_served, bytes })
    }
}

impl LinkSnapshot {
    /// Reads the link with this prefix. Returns `None` if there is none in NVIPC's layout.
    ///
    /// # Errors
    /// [`Version`](Error::Version), [`Damaged`](Error::Damaged), [`Prefix`](Error::Prefix), [`System`](Error::System).
    pub fn open(dir: &Path, prefix: &str) -> Result<Option<Self>> {
        MappedLink::open(dir, prefix)?.map(|link| link.snapshot()).transpose()
    }
}

fn shape_in(debug: &Arc<Memory>, names: &SegmentNames) -> Result<PoolShapes> {
    let file = names.of("debug");
    let words = debug.words::<AtomicU32>(CONFIG_AT, CONFIG_BYTES / 4).ok_or_else(|| short(&file))?;
    PoolShapes::from_words(&std::array::from_fn(|i| words[i].load(Relaxed)), &file)
}

fn short(what: &str) -> Error {
    Error::Damaged { what: what.to_owned(), why: "its parts do not fit" }
}

fn queue(memory: &Arc<Memory>, at: usize, len: usize) -> Option<IndexQueue> {
    memory.words(at, QUEUE_WORDS + len).map(IndexQueue::new)
}

/// Maps a file, and appends it to `files`.
fn map(dir: &Path, name: &str, files: &mut Vec<FileAtPath>) -> Result<Arc<Memory>> {
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
    files.push(FileAtPath::opened(&file, &path).map_err(failed)?);
    Ok(Memory::mapped(memmap2::MmapOptions::new().map_raw_read_only(&file).map_err(failed)?))
}
