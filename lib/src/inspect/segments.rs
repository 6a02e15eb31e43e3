//! Finding the files of a link, and mapping them read-only.

use std::collections::BTreeSet;
use std::fs::{DirEntry, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shmesh_sys::errno;
use shmesh_sys::file::{self, FileAtPath};
use shmesh_sys::process::ProcessIdentity;

use super::seat_locks::SeatLocks;
use crate::config::{Backing, LinkConfig, LinkName, PoolConfig, PoolId, Receivers, RingMode};
use crate::error::{Error, ErrorKind, Result};
use crate::link::Shared;
use crate::link::core::Core;
use crate::link::host::{HostAnswer, ask, lock_path, socket_path, socket_prefix};
use crate::segment::Memory;
use crate::segment::header::{Header, Unusable};
use crate::segment::layout::{LinkLayout, PoolLayout};
use crate::segment::lock::{Host, Lock};
use crate::segment::store::{Store, file_name};

/// Names of the links that have files in `dir`, sorted, including damaged links and files that only look like a link.
///
/// A link is recognized by `<link>_shm`, whatever its content, by the socket of its host, and by pools whose link is
/// missing.
///
/// # Errors
/// The directory cannot be read.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// use shmesh::config::LinkConfig;
/// let uplink = options.create(&LinkConfig::new("uplink".parse()?))?;
/// let downlink = options.create(&LinkConfig::new("downlink".parse()?))?;
/// let names = shmesh::inspect::names(dir.path())?;
/// assert_eq!(names.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["downlink", "uplink"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn names(dir: &Path) -> io::Result<Vec<LinkName>> {
    let mut names = BTreeSet::new();
    let mut pools = Vec::new();
    for entry in std::fs::read_dir(dir)?.take(MAX_ENTRIES) {
        let entry = entry?;
        let Some((name, kind)) = link_file(&entry) else { continue };
        match kind {
            LinkFileKind::Pool(pool) if !pool.is_device() => pools.push((name, entry.path())),
            LinkFileKind::Pool(_) => {}
            LinkFileKind::Socket if !entry.file_type().is_ok_and(|kind| kind.is_socket()) => {}
            LinkFileKind::Ring | LinkFileKind::Socket => {
                names.insert(name);
            }
        }
    }
    // Only pools whose link is missing have to be opened.
    for (name, path) in pools {
        if !names.contains(&name) && read_header(&path).is_some_and(|header| header.is_ok()) {
            names.insert(name);
        }
    }
    Ok(names.into_iter().collect())
}

/// Maximum number of entries of a directory that are read: another process may create any number of files.
pub(super) const MAX_ENTRIES: usize = 1 << 20;

/// The part of a link that a file has, according to its name.
pub(super) enum LinkFileKind {
    Ring,
    Pool(PoolId),
    Socket,
}

/// The link that a file belongs to, according to its name alone.
pub(super) fn link_file(entry: &DirEntry) -> Option<(LinkName, LinkFileKind)> {
    let file = entry.file_name().into_string().ok()?;
    let of_pool = |pool: PoolId| Some((file.strip_suffix(pool.name())?.strip_suffix('_')?, pool));
    let (link, kind) = if let Some(link) = file.strip_suffix("_shm") {
        (link, LinkFileKind::Ring)
    } else if let Some((link, _)) = file.rsplit_once(".broker-") {
        (link, LinkFileKind::Socket)
    } else {
        let (link, pool) = PoolId::ALL.into_iter().find_map(of_pool)?;
        (link, LinkFileKind::Pool(pool))
    };
    Some((link.parse().ok()?, kind))
}

/// The checked header of a file; `None` if it cannot be read.
fn read_header(path: &Path) -> Option<std::result::Result<Header, Unusable>> {
    Header::of_file(&file::open(path, false).ok()?).ok()
}

/// Whether the file begins like a segment, of any version and however damaged.
pub(super) fn is_ours(path: &Path) -> io::Result<bool> {
    let file = match file::open(path, false) {
        Ok(file) => file,
        Err(error) if matches!(error.raw_os_error(), Some(errno::ELOOP | errno::ENXIO)) => return Ok(false),
        Err(error) => return Err(error),
    };
    Ok(!matches!(Header::of_file(&file)?, Err(Unusable::NotOurs)))
}

/// The files of a directory whose names begin with `prefix`.
pub(super) fn with_prefix(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().filter_map(std::result::Result::ok);
    entries
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix)))
        .map(|entry| entry.path())
        .collect()
}

/// A segment, mapped read-only.
pub(super) struct MappedSegment {
    pub(super) memory: Arc<Memory>,
    pub(super) header: Header,
    /// The name by which it was opened; `None` for a memfd.
    file: Option<FileAtPath>,
}

/// How a view found the memory of its link.
#[derive(Debug)]
enum MemoryOrigin {
    /// By the names of the files.
    Files(Vec<FileAtPath>),
    /// From this host, by the socket with its number.
    Host(Host, u64, FileAtPath),
    /// This process keeps the link.
    Own,
}

/// The files of one link.
pub(super) struct LinkPath {
    pub(super) store: Store,
}

impl LinkPath {
    pub(super) fn new(dir: &Path, name: &LinkName) -> Self {
        Self { store: Store::new(&LinkConfig::new(name.clone()), dir) }
    }

    pub(super) fn link(&self) -> Arc<str> {
        Arc::clone(&self.store.link)
    }

    pub(super) fn beside(&self, extension: &str) -> PathBuf {
        self.store.dir.join(format!("{}.{extension}", self.store.link))
    }

    /// Opens and maps a named segment. `None` if the file does not exist.
    pub(super) fn open(&self, pool: Option<PoolId>) -> Result<Option<MappedSegment>> {
        self.open_at(&self.store.path(pool), pool)
    }

    fn open_at(&self, path: &Path, pool: Option<PoolId>) -> Result<Option<MappedSegment>> {
        let what = path.display().to_string();
        match file::open(path, false) {
            Ok(file) => {
                let at = FileAtPath::opened(&file, path).map_err(|error| self.store.refused(&what, error))?;
                Ok(Some(MappedSegment { file: Some(at), ..self.check(&file, what, pool)? }))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if matches!(error.raw_os_error(), Some(errno::ELOOP | errno::ENXIO)) => {
                Err(ErrorKind::NotOurs { link: self.link(), what }.into())
            }
            Err(error) => Err(self.store.refused(&what, error)),
        }
    }

    fn check(&self, file: &File, what: String, pool: Option<PoolId>) -> Result<MappedSegment> {
        let header = self.store.header(file, &what, pool)?;
        let map = memmap2::MmapOptions::new()
            .map_raw_read_only(file)
            .map_err(|error| self.store.refused(&what, error))?;
        Ok(MappedSegment { memory: Memory::mapped(map), header, file: None })
    }

    /// The link's own segment and its pools: by name, or from the process that hosts them.
    fn segments(&self) -> Result<(MemoryOrigin, SeatLocks, Vec<MappedSegment>)> {
        let Some(shm) = self.open(None)? else { return self.held() };
        let (shape, epoch) = (shm.header.shape, shm.header.epoch);
        let mut segments = vec![shm];
        for pool in PoolId::ALL.into_iter().filter(|&pool| shape.pools[pool.index()].1 > 0) {
            let damaged = |why| {
                let what = self.store.path(Some(pool)).display().to_string();
                Error::from(ErrorKind::Damaged { link: self.link(), what, why })
            };
            let open = |path: &Path| self.open_at(path, Some(pool));
            let found = self.store.find_pool(pool, epoch, open, |segment| &segment.header)?;
            let segment = found.ok_or_else(|| damaged("it is missing"))?;
            if segment.header.epoch != epoch || segment.header.shape != shape {
                return Err(damaged("it belongs to another link of the same name"));
            }
            segments.push(segment);
        }
        let files = segments.iter_mut().filter_map(|segment| segment.file.take()).collect();
        Ok((MemoryOrigin::Files(files), SeatLocks::new(lock_path(&self.store)), segments))
    }

    /// The memfds of the link, from its host.
    fn held(&self) -> Result<(MemoryOrigin, SeatLocks, Vec<MappedSegment>)> {
        if with_prefix(&self.store.dir, &socket_prefix(&self.store.link)).is_empty() {
            let orphan =
                PoolId::ALL.map(|pool| self.store.path(Some(pool))).into_iter().find(|path| path.exists());
            return Err(match orphan {
                Some(path) => ErrorKind::Damaged {
                    link: self.link(),
                    what: path.display().to_string(),
                    why: "the link of this pool no longer exists",
                },
                None => ErrorKind::NotFound { link: self.link(), dir: self.store.dir.clone() },
            }
            .into());
        };
        let path = lock_path(&self.store);
        let gone = || {
            let what = "does not exist: it has ended, and no other process kept the memory of the link";
            Error::from(ErrorKind::Host { link: self.link(), path: path.clone(), what })
        };
        let refused = |error| self.store.refused(&path.display().to_string(), error);
        let lock = Lock::open(&path).map_err(refused)?.ok_or_else(gone)?;
        // Before its answer: if another host follows it, the view is not current.
        let (host, number) = lock.host().map_err(refused)?.ok_or_else(gone)?;
        let socket = FileAtPath::bound(&socket_path(&self.store, number)).map_err(|_| gone())?;
        let HostAnswer::Offer(offer, ..) = ask(&self.store, &lock)? else { return Err(gone()) };
        let mut segments = Vec::new();
        for file in &offer.segments {
            let pool = Header::of_file(file).ok().and_then(|header| header.ok()?.pool);
            segments.push(self.check(file, "a memfd of the host".to_owned(), pool)?);
        }
        // It has names, but not for its own segment: it was removed while in use.
        if segments.first().is_none_or(|first| first.header.pool.is_some()) {
            let what = self.store.path(None).display().to_string();
            return Err(ErrorKind::Damaged {
                link: self.link(),
                what,
                why: "its files were removed while processes use it",
            }
            .into());
        }
        Ok((MemoryOrigin::Host(host, number, socket), SeatLocks::opened_already(path, lock), segments))
    }
}

/// One pool of a link.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// let pool = view.pools()[0];
/// assert_eq!((pool.pool, pool.pool_len), (shmesh::config::PoolId::CpuMsg, 1024));
/// assert!(pool.bytes >= 1024 * 8192, "the buffers, and what is kept of each");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PoolView {
    /// Which pool it is.
    pub pool: PoolId,
    /// Size of a buffer in bytes.
    pub buf_size_bytes: u32,
    /// The number of buffers.
    pub pool_len: u32,
    /// Size of its segment in bytes.
    pub bytes: u64,
}

/// A read-only view of a link.
///
/// It keeps the segments mapped, so it shows the current state even after the files are removed.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// link.send_inline(7, 0, b"slot 7")?;
/// assert_eq!(view.snapshot().rings[0].queued[0].msg_id, 7);
/// assert_eq!(view.seats().len(), 1, "looking takes no seat");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct View {
    pub(super) core: Core,
    shm: Arc<Memory>,
    pub(super) memories: [Option<Arc<Memory>>; PoolId::COUNT],
    pub(super) me: ProcessIdentity,
    pub(super) locks: SeatLocks,
    store: Store,
    header: Header,
    backing: Backing,
    origin: MemoryOrigin,
}

impl View {
    /// Opens the link `name` in `dir`.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound); errors of a segment: [`NotOurs`](ErrorKind::NotOurs),
    /// [`Version`](ErrorKind::Version), [`Truncated`](ErrorKind::Truncated), [`Damaged`](ErrorKind::Damaged),
    /// [`Permission`](ErrorKind::Permission); [`Host`](ErrorKind::Host) for a link of memfds.
    pub fn open(dir: &Path, name: &LinkName) -> Result<Self> {
        let place = LinkPath::new(dir, name);
        let (origin, locks, segments) = place.segments()?;
        let is_named = matches!(origin, MemoryOrigin::Files(_));
        let backing = if is_named { Backing::Named } else { Backing::Memfd };
        let me = ProcessIdentity::me().map_err(|error| {
            Error::system(&place.store.link, "read /proc/self (is /proc mounted?)", error)
        })?;
        let header = segments[0].header;
        let mut memories = [const { None }; PoolId::COUNT];
        for segment in &segments[1..] {
            if let Some(pool) = segment.header.pool {
                memories[pool.index()] = Some(Arc::clone(&segment.memory));
            }
        }
        let core = Core::place(&header.shape, &segments[0].memory, &memories).ok_or_else(|| {
            let what = file_name(&place.store.link, None);
            Error::from(ErrorKind::Damaged { link: place.link(), what, why: "its tables do not fit" })
        })?;
        let shm = Arc::clone(&segments[0].memory);
        Ok(Self { core, shm, memories, me, locks, store: place.store, header, backing, origin })
    }

    /// A view of a link that this process keeps.
    pub(crate) fn of(shared: &Shared) -> Self {
        let mut memories = [const { None }; PoolId::COUNT];
        for segment in &shared.segments[1..] {
            if let Some(pool) = segment.header.pool {
                memories[pool.index()] = Some(Arc::clone(&segment.memory));
            }
        }
        let shm = &shared.segments[0];
        Self {
            core: shared.core.clone(),
            shm: Arc::clone(&shm.memory),
            memories,
            me: shared.me,
            locks: SeatLocks::new(lock_path(&shared.store)),
            store: shared.store.clone(),
            header: shm.header,
            backing: shared.store.backing,
            origin: MemoryOrigin::Own,
        }
    }

    /// Whether [`open`](Self::open) would return a view of the same memory, and its files have their sizes.
    pub(super) fn is_current(&self) -> bool {
        let has_memory = match &self.origin {
            MemoryOrigin::Files(files) => files.iter().all(FileAtPath::is_unchanged),
            MemoryOrigin::Host(host, number, socket) => {
                self.locks.host() == Some((*host, *number)) && socket.is_unchanged()
            }
            MemoryOrigin::Own => true,
        };
        has_memory && self.locks.are_current()
    }

    /// The damage of the link, if a segment was truncated after it was mapped. Known only to the
    /// [`LinkHost`](crate::LinkHost) of a guarded link
    /// ([`LinkOptions::guard_truncation`](crate::LinkOptions::guard_truncation)).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// let host = options.guard_truncation(true).keep(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let view = host.view();
    /// assert!(view.damage().is_none());
    /// std::fs::File::options().write(true).open(dir.path().join("fronthaul_shm"))?.set_len(0)?;
    /// view.snapshot(); // reads zeros
    /// assert!(view.damage().is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn damage(&self) -> Option<Error> {
        let pools = PoolId::ALL.into_iter().map(Some);
        let memories = std::iter::once((None, Some(&self.shm)))
            .chain(pools.zip(self.memories.iter().map(Option::as_ref)));
        let (pool, _) =
            memories.into_iter().find(|(_, memory)| memory.is_some_and(|memory| memory.is_damaged()))?;
        Some(self.store.truncated(pool))
    }

    /// The name of the link.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.store.link
    }

    /// The epoch of the link: a random number that differs after the link was removed and created again.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::config::LinkConfig;
    /// use shmesh::inspect::View;
    /// let link = options.create(&LinkConfig::new("fronthaul".parse()?))?;
    /// let view = View::open(dir.path(), &"fronthaul".parse()?)?;
    /// drop(link);
    /// let _next = options.create(&LinkConfig::new("fronthaul".parse()?))?;
    /// assert_ne!(View::open(dir.path(), &"fronthaul".parse()?)?.epoch(), view.epoch());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.header.epoch
    }

    /// The kind of memory of its segments.
    #[must_use]
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Slots in each ring.
    #[must_use]
    pub fn ring_len(&self) -> u32 {
        self.header.shape.ring_capacity
    }

    /// The mode of its rings.
    #[must_use]
    pub fn ring_mode(&self) -> RingMode {
        self.header.shape.ring_mode()
    }

    /// A configuration with which another link has the same shape: rings, pools, requests, notification. What concerns the memory
    /// alone (kind, huge pages, file mode) is as in [`LinkConfig::new`].
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// config.ring_len = 64;
    /// let link = options.create(&config)?;
    /// let view = shmesh::inspect::View::open(dir.path(), &config.name)?;
    /// assert_eq!(view.config(), config);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn config(&self) -> LinkConfig {
        let (shape, conduct) = (&self.header.shape, &self.header.conduct);
        let name = self.store.link.parse().expect("a link is opened by its name");
        let mut config = LinkConfig::new(name);
        config.ring_len = shape.ring_capacity;
        config.ring_mode = shape.ring_mode();
        config.broadcast = shape.broadcast.unwrap_or_default();
        config.receivers = if conduct.one_receiver { Receivers::One } else { Receivers::Many };
        config.pools = shape.pools.map(|(buf_size_bytes, pool_len)| PoolConfig { buf_size_bytes, pool_len });
        config.request_window = shape.request_window;
        config.latency_sample = shape.latency_sample;
        config.notify = conduct.notify;
        config.spin_us = conduct.spin_us;
        config
    }

    /// Microseconds that a waiting receiver polls before it sleeps; `None` if the link has no notification.
    #[must_use]
    pub fn spin_us(&self) -> Option<u32> {
        self.header.conduct.notify.then_some(self.header.conduct.spin_us)
    }

    /// The type of its typed messages ([`Link::typed`](crate::Link::typed)), with size and alignment, as printable ASCII: of those from
    /// each side, if they differ. `None` when no participant has declared one.
    #[must_use]
    pub fn payload_type(&self) -> Option<String> {
        self.core.declared_types().map(|declared| declared.to_string())
    }

    /// The pools of the link, in the order of their ids.
    #[must_use]
    pub fn pools(&self) -> Vec<PoolView> {
        PoolId::ALL
            .into_iter()
            .filter_map(|pool| {
                let (buf_size_bytes, pool_len) = self.header.shape.pools[pool.index()];
                let bytes = PoolLayout::of(pool, buf_size_bytes, pool_len).bytes();
                (pool_len > 0).then_some(PoolView { pool, buf_size_bytes, pool_len, bytes })
            })
            .collect()
    }

    /// Total size of all its segments in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        LinkLayout::of(&self.header.shape).bytes() + self.pools().iter().map(|pool| pool.bytes).sum::<u64>()
    }
}
