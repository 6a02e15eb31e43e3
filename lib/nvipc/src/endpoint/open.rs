//! Creates a link as its primary, attaches to one as its secondary.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use shmesh::Side;
use shmesh::config::{PoolConfig, PoolId};
use shmesh_sys::{errno, eventfd, file, socket};

use super::link::{Pool, Shared, lock_dir};
use super::{Endpoint, peer};
use crate::exchange;
use crate::held::{DataOfMsg, HeldBuffers};
use crate::layout::{
    COMMAND_RING_BYTES, COMMANDS, CONFIG_AT, CONFIG_BYTES, DUMPING_AT, FORWARD_QUEUE_AT, INFO_WORDS,
    PoolShapes, QUEUE_WORDS, SEMAPHORE, SegmentNames, TIME_BYTES, TIME_OF_SEND, TIMES_AT, debug_bytes,
    forward_bytes, infos_at, pool_bytes, queue_bytes, shm_bytes,
};
use crate::memory::{AtomicU32, Memory};
use crate::queue::IndexQueue;
use crate::{Error, Result};

/// How long to wait for another process that creates a link in the same directory.
const DIR_LIMIT: Duration = Duration::from_secs(30);

/// Options for creating and attaching to links.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use std::time::{Duration, Instant};
/// let options = shmesh_nvipc_wire::Options::new().dir(dir.path()).patience(Duration::ZERO);
/// let error = options.attach("nvipc").unwrap_err();
/// assert!(matches!(error, shmesh_nvipc_wire::Error::NoPrimary { .. }), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    dir: PathBuf,
    mode: u32,
    patience: Option<Duration>,
    report: Option<exchange::WaitReport>,
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

impl Options {
    /// The defaults: `/dev/shm`, where NVIPC always is; files for this user only; no limit on waiting for the primary.
    #[must_use]
    pub fn new() -> Self {
        Self { dir: PathBuf::from("/dev/shm"), mode: 0o600, patience: None, report: None }
    }

    /// Sets another directory, for tests and for pods whose peer has that directory as its `/dev/shm`.
    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = dir.into();
        self
    }

    /// Sets the mode of a primary's files, whatever the umask. The default is 0o600; a peer of another user needs 0o660 or
    /// 0o666.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let pools = shmesh::config::LinkConfig::new("nvipc".parse()?).pools;
    /// use std::os::unix::fs::PermissionsExt;
    /// let phy = shmesh_nvipc_wire::Options::new().dir(dir.path()).file_mode(0o660).create("nvipc", pools)?;
    /// let mode = std::fs::metadata(dir.path().join("nvipc_shm"))?.permissions().mode();
    /// assert_eq!(mode & 0o777, 0o660);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn file_mode(mut self, mode: u32) -> Self {
        self.mode = mode & 0o666;
        self
    }

    /// Sets how long a secondary waits for its primary. The default is no limit, as in NVIPC.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Sets a function that is called once in each period `every` while a secondary waits for its primary. It gets the error that
    /// would end the wait.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// use std::time::Duration;
    /// let options = shmesh_nvipc_wire::Options::new().dir(dir.path()).patience(Duration::from_millis(50));
    /// let options = options.report_wait(Duration::from_secs(10), |why| eprintln!("waiting: {why}"));
    /// assert!(options.attach("nvipc").is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn report_wait(mut self, every: Duration, report: fn(&Error)) -> Self {
        self.report = Some((every, report));
        self
    }

    /// Creates a link and becomes its primary.
    ///
    /// Files of a primary that has ended are replaced by new ones. Processes that still map the old files keep them.
    ///
    /// # Errors
    /// [`InUse`](Error::InUse), [`NotTheirs`](Error::NotTheirs), [`NoSpace`](Error::NoSpace), [`Prefix`](Error::Prefix),
    /// [`Pool`](Error::Pool), [`NoMsgPool`](Error::NoMsgPool), [`System`](Error::System). Nothing is left behind.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// use shmesh::config::{LinkConfig, PoolId};
    /// let options = shmesh_nvipc_wire::Options::new().dir(dir.path());
    /// let phy = options.create("nvipc", LinkConfig::new("nvipc".parse()?).pools)?;
    /// let second = options.create("nvipc", LinkConfig::new("nvipc".parse()?).pools).unwrap_err();
    /// assert!(matches!(second, shmesh_nvipc_wire::Error::InUse { .. }));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn create(&self, prefix: &str, pools: [PoolConfig; PoolId::COUNT]) -> Result<Endpoint> {
        self.create_asking(prefix, pools, None)
    }

    /// As [`create`](Self::create), with a callback that may refuse later secondaries.
    ///
    /// Each time a secondary other than the first connects, `agrees` is called in a thread of the endpoint; `false` refuses
    /// it. It has
    /// the place of NVIPC's reset callback, but nothing is reset.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_with(
        &self,
        prefix: &str,
        pools: [PoolConfig; PoolId::COUNT],
        agrees: impl Fn() -> bool + Send + 'static,
    ) -> Result<Endpoint> {
        self.create_asking(prefix, pools, Some(Box::new(agrees)))
    }

    fn create_asking(
        &self,
        prefix: &str,
        pools: [PoolConfig; PoolId::COUNT],
        agrees: Option<peer::ReconnectCheck>,
    ) -> Result<Endpoint> {
        let names = SegmentNames::new(prefix)?;
        let shape = PoolShapes::checked(pools)?;
        let system = |doing: &str, error| Error::system(format!("{doing} {}", self.dir.display()), error);
        let _alone = lock_dir(&self.dir, DIR_LIMIT).map_err(|error| system("lock the directory", error))?;
        self.clear(&names)?;
        let mut made = UnfinishedFiles { files: Vec::new(), options: self };
        let debug = made.segment(&names.of("debug"), debug_bytes(shape.msg_len()) as u64)?;
        let config = debug.words::<AtomicU32>(CONFIG_AT, CONFIG_BYTES / 4).ok_or_else(damaged)?;
        config.iter().zip(shape.to_words(prefix)).for_each(|(word, value)| store(word, value));
        let semaphore = made.segment(&names.semaphore(), size_of_val(&SEMAPHORE) as u64)?;
        let words = semaphore.words::<AtomicU32>(0, SEMAPHORE.len()).ok_or_else(damaged)?;
        words.iter().zip(SEMAPHORE).for_each(|(word, value)| store(word, value));
        let commands = made.segment(&names.of("cmd_ring"), COMMAND_RING_BYTES as u64)?;
        queue(&commands, 0, COMMANDS)?.refill([]);
        queue(&commands, queue_bytes(COMMANDS), COMMANDS)?.refill(0..64);
        let shm = made.segment(&names.of("shm"), shm_bytes(shape.msg_len()) as u64)?;
        let mut memories = [const { None }; PoolId::COUNT];
        for pool in PoolId::ALL {
            let config = shape.pools[pool.index()];
            if config.is_enabled() {
                memories[pool.index()] = Some(made.segment(&names.pool(pool), pool_bytes(config))?);
            }
        }
        let forward = made.segment(&names.of("fw"), forward_bytes(shape.msg_len()) as u64)?;
        queue(&forward, FORWARD_QUEUE_AT, shape.msg_len())?.refill([]);

        let mut shared = self.place(Side::Primary, names, shape, &debug, &shm, memories)?;
        shared.rings.iter().for_each(|ring| ring.refill([]));
        shared.pools.iter().flatten().for_each(|pool| pool.free.refill(0..pool.config.pool_len));
        let path = self.dir.join(shared.names.server());
        let listener = socket::listen_stream(&path, self.mode)
            .map_err(|error| Error::system(format!("listen at {}", path.display()), error))?;
        made.files.push(path);
        // NVIPC's secondaries leave their sockets behind.
        made.files.push(self.dir.join(shared.names.of("un_sock_client")));
        shared.files = std::mem::take(&mut made.files);
        start(shared, Some(listener), agrees)
    }

    /// Removes the files of a primary that has ended.
    fn clear(&self, names: &SegmentNames) -> Result<()> {
        let server = self.dir.join(names.server());
        let served = socket::is_bound(&server);
        if served.map_err(|error| Error::system(format!("look at {}", server.display()), error))? {
            return Err(Error::InUse { path: server });
        }
        let shm = self.dir.join(names.of("shm"));
        if shm.symlink_metadata().is_ok() {
            // A link in shmesh's own layout has a file of this name too, and must not be removed here.
            let stale = self.open(&names.of("debug")).and_then(|debug| read_shape(&debug, "debug"));
            if stale.is_err() {
                return Err(Error::NotTheirs { path: shm });
            }
        }
        for name in names.all() {
            let path = self.dir.join(name);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::system(format!("remove stale {}", path.display()), error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Attaches to a link as its secondary. Waits for the primary.
    ///
    /// # Errors
    /// [`NoPrimary`](Error::NoPrimary) after the time of [`patience`](Self::patience), [`Version`](Error::Version),
    /// [`Damaged`](Error::Damaged),
    /// [`Truncated`](Error::Truncated), [`Prefix`](Error::Prefix), [`System`](Error::System).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let pools = shmesh::config::LinkConfig::new("nvipc".parse()?).pools;
    /// let options = shmesh_nvipc_wire::Options::new().dir(dir.path());
    /// let phy = options.create("nvipc", pools)?;
    /// let mac = options.attach("nvipc")?;
    /// assert_eq!(mac.pool(shmesh::config::PoolId::CpuMsg), pools[0], "as the primary configured it");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn attach(&self, prefix: &str) -> Result<Endpoint> {
        let names = SegmentNames::new(prefix)?;
        let eventfd = eventfd::blocking().map_err(|error| Error::system("make an eventfd", error))?;
        // This comes first, as in NVIPC: an NVIPC primary may reset its queues before it answers.
        let peer = exchange::meet(&self.dir.join(names.server()), &eventfd, self.patience, self.report)?;
        let debug = self.open(&names.of("debug"))?;
        let shape = read_shape(&debug, &names.of("debug"))?;
        longer(&debug, &names.of("debug"), debug_bytes(shape.msg_len()) as u64)?;
        let shm = self.open(&names.of("shm"))?;
        longer(&shm, &names.of("shm"), shm_bytes(shape.msg_len()) as u64)?;
        let mut memories = [const { None }; PoolId::COUNT];
        for pool in PoolId::ALL {
            let config = shape.pools[pool.index()];
            if config.is_enabled() {
                let memory = self.open(&names.pool(pool))?;
                // For a pool in device memory, the file has only its queue and the handle to find the buffers.
                let least = if pool.is_device() {
                    queue_bytes(config.pool_len as usize) as u64
                } else {
                    pool_bytes(config)
                };
                longer(&memory, &names.pool(pool), least)?;
                memories[pool.index()] = Some(memory);
            }
        }
        let mut shared = self.place(Side::Secondary, names, shape, &debug, &shm, memories)?;
        shared.eventfd = eventfd;
        shared.peer = RwLock::new(Some(Arc::new(peer)));
        start(shared, None, None)
    }

    fn open(&self, name: &str) -> Result<Arc<Memory>> {
        let path = self.dir.join(name);
        let what = || path.display().to_string();
        let refused = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => Error::Damaged { what: what(), why: "the file does not exist" },
            _ => Error::system(format!("open {}", what()), error),
        };
        let file = file::open(&path, true).map_err(refused)?;
        let metadata = file.metadata().map_err(refused)?;
        if !metadata.is_file() || metadata.len() == 0 {
            return Err(Error::Damaged { what: what(), why: "it is empty, or not a regular file" });
        }
        map(&file, &path)
    }

    /// Locates the parts of a link in its segments.
    fn place(
        &self,
        side: Side,
        names: SegmentNames,
        shape: PoolShapes,
        debug: &Arc<Memory>,
        shm: &Arc<Memory>,
        mut memories: [Option<Arc<Memory>>; PoolId::COUNT],
    ) -> Result<Shared> {
        let len = shape.msg_len();
        let mut pools = [const { None }; PoolId::COUNT];
        for id in PoolId::ALL {
            let Some(memory) = memories[id.index()].take() else { continue };
            let config = shape.pools[id.index()];
            let buffers = queue_bytes(config.pool_len as usize);
            let bytes = usize::try_from(config.payload_bytes()).map_err(|_| damaged())?;
            pools[id.index()] = Some(Pool {
                id,
                config,
                free: queue(&memory, 0, config.pool_len as usize)?,
                held: HeldBuffers::new(config.pool_len as usize),
                base: memory.payload(buffers, bytes),
                memory,
            });
        }
        let eventfd = || eventfd::blocking().map_err(|error| Error::system("make an eventfd", error));
        Ok(Shared {
            side,
            rings: [queue(shm, 0, len)?, queue(shm, queue_bytes(len), len)?],
            infos: shm.words(infos_at(len), INFO_WORDS * len).ok_or_else(damaged)?,
            pools,
            attached: DataOfMsg::new(shape.pools.map(|pool| pool.pool_len as usize)),
            dumping: debug.words(DUMPING_AT, 1).ok_or_else(damaged)?,
            // From the first message's time of sending to the end of the last message's timestamps.
            times: debug
                .words(TIMES_AT + TIME_OF_SEND, (TIME_BYTES * len - TIME_OF_SEND) / 8)
                .ok_or_else(damaged)?,
            eventfd: eventfd()?,
            over: eventfd()?,
            closing: eventfd()?,
            released: AtomicU32::new(0),
            peer: RwLock::new(None),
            calls: RwLock::new(()),
            closed: AtomicBool::new(false),
            primary_ended: AtomicBool::new(false),
            files: Vec::new(),
            recovered: Default::default(),
            names,
            shape,
        })
    }
}

/// Files of a link that is not complete yet. Dropping this removes them, unless the link was completed.
struct UnfinishedFiles<'a> {
    files: Vec<PathBuf>,
    options: &'a Options,
}

impl UnfinishedFiles<'_> {
    fn segment(&mut self, name: &str, bytes: u64) -> Result<Arc<Memory>> {
        let path = self.options.dir.join(name);
        let file =
            file::create(&path, self.options.mode, bytes).map_err(|error| {
                match errno::is_no_space(&error) {
                    true => {
                        Error::NoSpace { what: name.to_owned(), needed: bytes, dir: self.options.dir.clone() }
                    }
                    false => Error::system(format!("make {}", path.display()), error),
                }
            })?;
        self.files.push(path.clone());
        map(&file, &path)
    }
}

impl Drop for UnfinishedFiles<'_> {
    fn drop(&mut self) {
        for path in self.files.iter().rev() {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn start(
    shared: Shared,
    listener: Option<std::os::fd::OwnedFd>,
    agrees: Option<peer::ReconnectCheck>,
) -> Result<Endpoint> {
    let shared = Arc::new(shared);
    let endpoint = Endpoint { shared: Arc::clone(&shared), service: Mutex::new(None) };
    let service = std::thread::Builder::new()
        .name("shmesh-nvipc".to_owned())
        .spawn(move || peer::serve(&shared, listener.as_ref(), agrees.as_ref()))
        .map_err(|error| Error::system("start a thread", error))?;
    *endpoint.service.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(service);
    Ok(endpoint)
}

fn map(file: &File, path: &Path) -> Result<Arc<Memory>> {
    let map = memmap2::MmapOptions::new().map_raw(file);
    let map = map.map_err(|error| Error::system(format!("map {}", path.display()), error))?;
    Ok(Memory::mapped(map))
}

fn store(word: &AtomicU32, value: u32) {
    word.store(value, std::sync::atomic::Ordering::Release);
}

fn read_shape(debug: &Arc<Memory>, what: &str) -> Result<PoolShapes> {
    let words = debug.words::<AtomicU32>(CONFIG_AT, CONFIG_BYTES / 4);
    let words = words.ok_or_else(|| Error::Truncated {
        what: what.to_owned(),
        found: debug.len() as u64,
        expected: TIMES_AT as u64,
    })?;
    let copy = std::array::from_fn(|i| words[i].load(std::sync::atomic::Ordering::Acquire));
    PoolShapes::from_words(&copy, what)
}

fn longer(memory: &Memory, what: &str, expected: u64) -> Result<()> {
    let found = memory.len() as u64;
    if found < expected { Err(Error::Truncated { what: what.to_owned(), found, expected }) } else { Ok(()) }
}

fn queue(memory: &Arc<Memory>, at: usize, len: usize) -> Result<IndexQueue> {
    memory.words(at, QUEUE_WORDS + len).map(IndexQueue::new).ok_or_else(damaged)
}

fn damaged() -> Error {
    Error::Damaged { what: "a segment".to_owned(), why: "its parts do not fit" }
}
