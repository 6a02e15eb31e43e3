//! Files and memfds that hold segments: create, open, check.
//!
//! A named segment gets its name only when it is complete, so no process opens an incomplete one, and a creator that dies
//! before that leaves nothing behind.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shmesh_sys::sigbus::Mapping;
use shmesh_sys::{errno, file, huge, mount};

use super::header::{Header, LAYOUT_VERSION, Unusable};
use super::lines::Memory;
use crate::config::{Backing, HugePages, LinkConfig, PoolId};
use crate::error::{Error, ErrorKind, Result};
use crate::participant::Participant;

/// Name of a segment's file, as in NVIPC: `<link>_shm` and `<link>_<pool>`.
pub(crate) fn file_name(link: &str, pool: Option<PoolId>) -> String {
    format!("{link}_{}", pool.map_or("shm", PoolId::name))
}

/// The common prefix of the names of all bells of a link.
pub(crate) fn bell_prefix(link: &str) -> String {
    format!("{link}.bell-")
}

/// An open, checked segment.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) memory: Arc<Memory>,
    pub(crate) header: Header,
    /// Whether this process created it.
    pub(crate) is_new: bool,
    /// Its file, until it is mapped, and as long as it may have to be passed to other processes.
    pub(crate) file: Option<File>,
}

/// Settings for creating and mapping segments in this process.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub(crate) link: Arc<str>,
    pub(crate) dir: PathBuf,
    pub(crate) backing: Backing,
    pub(crate) huge_pages: HugePages,
    pub(crate) prefault: bool,
    pub(crate) lock_memory: bool,
    pub(crate) file_mode: u32,
    /// Whether the process survives the truncation of a named segment.
    pub(crate) guard_truncation: bool,
}

impl Store {
    pub(crate) fn new(config: &LinkConfig, dir: &Path) -> Self {
        Self {
            link: config.name.as_str().into(),
            dir: dir.to_path_buf(),
            backing: config.backing,
            huge_pages: config.huge_pages,
            prefault: config.prefault,
            lock_memory: config.lock_memory,
            file_mode: config.file_mode,
            guard_truncation: false,
        }
    }

    pub(crate) fn path(&self, pool: Option<PoolId>) -> PathBuf {
        self.dir.join(file_name(&self.link, pool))
    }

    /// The path of a pool if another file has its usual name, or a process that is creating the link: the epoch
    /// distinguishes it from all others.
    pub(crate) fn spare_path(&self, pool: PoolId, epoch: u64) -> PathBuf {
        self.dir.join(format!("{}-{epoch:016x}", file_name(&self.link, Some(pool))))
    }

    /// Path of the bell of a participant. The name is unique to the participant, so another user's stale bell does not block a
    /// new one.
    pub(crate) fn bell_path(&self, epoch: u64, of: &Participant) -> PathBuf {
        self.dir.join(format!("{}{epoch:016x}-{}-{}", bell_prefix(&self.link), of.seat, of.word.epoch()))
    }

    /// Creates a segment with its header, without a name yet.
    pub(crate) fn create(&self, header: Header) -> Result<Segment> {
        let name = file_name(&self.link, header.pool);
        let bytes = self.rounded(header.bytes());
        let made = match self.backing {
            Backing::Named => file::unnamed(&self.dir, self.file_mode),
            Backing::Memfd => file::memfd(&name, self.huge_pages == HugePages::Hugetlb),
        };
        let made = made.map_err(|source| self.refused(&name, source))?;
        if self.backing == Backing::Memfd {
            // The file is not opened by name, but later hosts of the link read from it which users may connect.
            file::set_mode(&made, self.file_mode).map_err(|source| self.refused(&name, source))?;
        }
        made.set_len(bytes).map_err(|source| self.refused(&name, source))?;
        if self.huge_pages == HugePages::Transparent {
            // A hint: on failure the segment stays on small pages, and lack of memory is reported below. This comes
            // before the file has pages, because later each of them would be copied.
            let _ = huge::collapse(&made, bytes);
        }
        file::reserve(&made, bytes).map_err(|source| match source.raw_os_error() {
            Some(errno::ENOSPC | errno::ENOMEM | errno::EFBIG) => Error::from(ErrorKind::NoSpace {
                link: Arc::clone(&self.link),
                what: name.clone(),
                needed: bytes,
                free: mount::free_bytes(&self.dir).unwrap_or(0),
                dir: self.dir.clone(),
            }),
            _ => self.refused(&name, source),
        })?;
        if self.backing == Backing::Memfd {
            file::seal_size(&made).map_err(|source| self.refused(&name, source))?;
        }
        let memory = self.map(&made, &name, bytes)?;
        if let Some(lines) = memory.window(0, super::layout::HEADER_LINES) {
            header.write(&lines);
        }
        Ok(Segment { memory, header, is_new: true, file: Some(made) })
    }

    /// Rounds a size up to whole huge pages, if the segment has them.
    fn rounded(&self, bytes: u64) -> u64 {
        if self.huge_pages == HugePages::Hugetlb {
            bytes.next_multiple_of(super::layout::HUGE_PAGE_BYTES)
        } else {
            bytes
        }
    }

    /// Opens a named segment. `None` if the file does not exist.
    pub(crate) fn open(&self, pool: Option<PoolId>) -> Result<Option<Segment>> {
        self.open_at(&self.path(pool), pool)
    }

    /// Opens the pool of a link with this epoch, under whichever of its names.
    pub(crate) fn open_pool(&self, pool: PoolId, epoch: u64) -> Result<Option<Segment>> {
        self.find_pool(pool, epoch, |path| self.open_at(path, Some(pool)), |segment| &segment.header)
    }

    /// Finds the pool of a link with this epoch by `open`: under its usual name, or under its spare name if another
    /// file has the usual one.
    pub(crate) fn find_pool<S>(
        &self,
        pool: PoolId,
        epoch: u64,
        open: impl Fn(&Path) -> Result<Option<S>>,
        header: impl Fn(&S) -> &Header,
    ) -> Result<Option<S>> {
        let usual = open(&self.path(Some(pool)));
        if let Ok(Some(segment)) = &usual
            && header(segment).epoch == epoch
        {
            return usual;
        }
        match open(&self.spare_path(pool, epoch))? {
            Some(spare) => Ok(Some(spare)),
            None => usual,
        }
    }

    /// The link's segments, if it exists: from the given descriptors, or by name.
    pub(crate) fn existing(&self, given: Vec<File>) -> Result<Option<Vec<Segment>>> {
        let mut given = given.into_iter();
        let mut next = |pool: Option<PoolId>, epoch: Option<u64>| match given.next() {
            // A memfd that can be truncated would cause SIGBUS later.
            Some(file) if !file::is_size_sealed(&file) => Err(ErrorKind::Damaged {
                link: Arc::clone(&self.link),
                what: "a memfd of the host".into(),
                why: "its size is not sealed",
            }
            .into()),
            Some(file) => self.check(file, "a memfd of the host", pool).map(Some),
            None => match (pool, epoch) {
                (Some(pool), Some(epoch)) => self.open_pool(pool, epoch),
                _ => self.open(pool),
            },
        };
        let Some(shm) = next(None, None)? else { return Ok(None) };
        let damaged = |pool, why| {
            Error::from(ErrorKind::Damaged {
                link: Arc::clone(&self.link),
                what: self.path(pool).display().to_string(),
                why,
            })
        };
        let (shape, epoch) = (shm.header.shape, shm.header.epoch);
        let mut segments = vec![shm];
        for pool in PoolId::ALL.into_iter().filter(|&pool| shape.pools[pool as usize].1 > 0) {
            let segment =
                next(Some(pool), Some(epoch))?.ok_or_else(|| damaged(Some(pool), "it is missing"))?;
            if segment.header.epoch != epoch || segment.header.shape != shape {
                return Err(damaged(Some(pool), "it belongs to another link of the same name"));
            }
            segments.push(segment);
        }
        Ok(Some(segments))
    }

    /// Removes a file, if it is a segment of the link with this epoch.
    pub(crate) fn remove(&self, path: &Path, pool: Option<PoolId>, epoch: u64) -> io::Result<bool> {
        file::remove_exactly(path, |path| {
            let header = file::open(path, false).ok().and_then(|file| self.header(&file, "", pool).ok());
            header.is_some_and(|header| header.epoch == epoch)
        })
    }

    fn open_at(&self, path: &Path, pool: Option<PoolId>) -> Result<Option<Segment>> {
        match file::open(path, true) {
            Ok(file) => self.check(file, &path.display().to_string(), pool).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            // Not a regular file: shmesh did not create it.
            Err(error)
                if matches!(error.raw_os_error(), Some(errno::ELOOP | errno::EISDIR | errno::ENXIO)) =>
            {
                Err(Error::from(ErrorKind::NotOurs {
                    link: Arc::clone(&self.link),
                    what: path.display().to_string(),
                }))
            }
            Err(error) => Err(self.refused(&path.display().to_string(), error)),
        }
    }

    /// Checks and maps a segment that another process passed to this one.
    pub(crate) fn check(&self, file: File, what: &str, pool: Option<PoolId>) -> Result<Segment> {
        let header = self.header(&file, what, pool)?;
        let bytes = file.metadata().map_err(|source| self.refused(what, source))?.len();
        // Costs nothing where pages exist; a sparse file on a full tmpfs would cause a bus error later.
        file::reserve(&file, bytes).map_err(|source| self.refused(what, source))?;
        let memory = self.map(&file, what, bytes)?;
        Ok(Segment { memory, header, is_new: false, file: Some(file) })
    }

    /// The header of the segment that a file should hold.
    pub(crate) fn header(&self, file: &File, what: &str, pool: Option<PoolId>) -> Result<Header> {
        let (link, what) = (Arc::clone(&self.link), what.to_owned());
        let found = file.metadata().map_err(|source| self.refused(&what, source))?.len();
        let header = Header::of_file(file).map_err(|source| self.refused(&what, source))?;
        let header = header.map_err(|unusable| match unusable {
            Unusable::NotOurs => ErrorKind::NotOurs { link: Arc::clone(&link), what: what.clone() },
            Unusable::Version(found) => ErrorKind::Version {
                link: Arc::clone(&link),
                what: what.clone(),
                found,
                ours: LAYOUT_VERSION,
            },
            Unusable::Damaged => {
                let why = "its header contradicts itself";
                ErrorKind::Damaged { link: Arc::clone(&link), what: what.clone(), why }
            }
            Unusable::Size { expected } => {
                ErrorKind::Truncated { link: Arc::clone(&link), what: what.clone(), found, expected }
            }
        })?;
        if header.pool != pool {
            return Err(ErrorKind::Damaged { link, what, why: "it holds another segment" }.into());
        }
        Ok(header)
    }

    fn map(&self, file: &File, what: &str, bytes: u64) -> Result<Arc<Memory>> {
        let map =
            file::map(file.as_fd(), bytes, self.prefault).map_err(|source| self.refused(what, source))?;
        if self.huge_pages == HugePages::Transparent {
            // A hint: on a node whose shmem_enabled is `never` it changes nothing, and only the creator's collapse has
            // an effect.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        if self.lock_memory {
            map.lock().map_err(|source| {
                Error::system(
                    &self.link,
                    format!("lock {what} in memory (see RLIMIT_MEMLOCK, `shmesh doctor`)"),
                    source,
                )
            })?;
        }
        // The size of a memfd is sealed.
        if !self.guard_truncation || file::is_size_sealed(file) {
            return Ok(Memory::mapped(map));
        }
        let guarded = Mapping::guarded(map);
        guarded.map(Memory::mapped).map_err(|source| {
            Error::system(&self.link, "install the handler of SIGBUS that guards against truncation", source)
        })
    }

    /// The error for a segment whose file was truncated after it was mapped.
    pub(crate) fn truncated(&self, pool: Option<PoolId>) -> Error {
        let what = self.path(pool).display().to_string();
        let why = "its file was truncated while it was in use";
        ErrorKind::Damaged { link: Arc::clone(&self.link), what, why }.into()
    }

    pub(crate) fn refused(&self, what: &str, source: io::Error) -> Error {
        let link = Arc::clone(&self.link);
        match source.raw_os_error() {
            Some(errno::EACCES | errno::EPERM) => {
                Error::from(ErrorKind::Permission { link, what: what.to_owned(), source })
            }
            Some(errno::ENOENT | errno::ENOTDIR) if !self.dir.is_dir() => {
                Error::from(ErrorKind::NoDirectory { link, dir: self.dir.clone() })
            }
            Some(errno::ENOENT) => Error::from(ErrorKind::NotFound { link, dir: self.dir.clone() }),
            _ => Error::system(&link, format!("use {what}"), source),
        }
    }
}
