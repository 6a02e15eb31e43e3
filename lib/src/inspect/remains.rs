//! What is left of a link, and removing it.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shmesh_sys::process::ProcessIdentity;

use super::View;
use super::segments::{LinkPath, is_ours, with_prefix};
use super::snapshot::{SeatLocks, SeatView, seats};
use crate::config::{LinkName, PoolId};
use crate::error::{Error, ErrorKind, Result};
use crate::link::host::{socket_prefix, try_lock};
use crate::participant::{SEAT_LINES, Seats};
use crate::segment::layout::LinkLayout;
use crate::segment::lock::Lock;
use crate::segment::store::file_name;

/// The files of a link, and what speaks against removing them.
///
/// While it exists, no process can create, serve or keep the link, except those that already have it.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// let remains = shmesh::inspect::Remains::of(dir.path(), &"fronthaul".parse()?)?;
/// assert_eq!(remains.seats.len(), 1, "we sit on it ourselves");
/// assert!(remains.is_held);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Remains {
    /// The files that are ours, and their sizes: what [`remove`](Self::remove) removes. The link's own segment first.
    pub files: Vec<(PathBuf, u64)>,
    /// Files with a link's name that are something else. They are left alone.
    pub foreign: Vec<PathBuf>,
    /// Attached participants, dead or alive, as far as the link can be read.
    pub seats: Vec<SeatView>,
    /// A process is on the link or keeps it, whatever the seats say here.
    pub is_held: bool,
    /// Messages that wait; `None` when the link cannot be read.
    pub queued: Option<usize>,
    /// What is wrong with the link.
    pub damage: Option<Error>,
    link: Arc<str>,
    lock: Option<Lock>,
    /// The lock file was not there before.
    made_lock: Option<PathBuf>,
}

impl Remains {
    /// Looks at what is left of the link `name` in `dir`.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) when there is nothing; [`Permission`](ErrorKind::Permission) and what else the
    /// kernel can refuse.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::inspect::Remains;
    /// link.send_inline(1, 0, b"nobody has received it")?;
    /// drop(link);
    /// let remains = Remains::of(dir.path(), &"fronthaul".parse()?)?;
    /// assert_eq!((remains.is_held, remains.queued), (false, Some(1)));
    /// assert!(Remains::of(dir.path(), &"backhaul".parse()?).is_err(), "nothing is left of it");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of(dir: &Path, name: &LinkName) -> Result<Self> {
        let mut remains = Self::without_contents(dir, name)?;
        match View::open(dir, name) {
            Ok(view) => {
                let snapshot = view.snapshot();
                remains.queued = Some(snapshot.rings.iter().map(|ring| ring.queued.len()).sum());
                remains.seats = snapshot.seats;
            }
            Err(error) => {
                remains.seats = seats_alone(&LinkPath::new(dir, name)).unwrap_or_default();
                remains.damage = Some(error);
            }
        }
        Ok(remains)
    }

    /// The files of a link that no process has, by its locks alone: `None` if any process has a lock of the link.
    ///
    /// Maps nothing and reads only the beginning of each file, so it may run where others can truncate the files. Messages that
    /// wait are not counted: [`queued`](Self::queued) is `None`, and [`seats`](Self::seats) is empty.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let name = "fronthaul".parse()?;
    /// use shmesh::inspect::Remains;
    /// let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// assert!(Remains::unused(dir.path(), &name)?.is_none());
    /// link.send_inline(1, 0, b"it waits, so the link stays")?;
    /// drop(link);
    /// assert!(Remains::unused(dir.path(), &name)?.unwrap().remove()? > 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unused(dir: &Path, name: &LinkName) -> Result<Option<Self>> {
        let remains = Self::without_contents(dir, name)?;
        let Some(lock) = &remains.lock else { return Ok(None) };
        let path = LinkPath::new(dir, name).beside("lock");
        let is_used = lock.is_used().map_err(|error| {
            Error::system(&remains.link, format!("read the locks of {}", path.display()), error)
        })?;
        Ok((!is_used).then_some(remains))
    }

    /// The files, and the right to remove them.
    fn without_contents(dir: &Path, name: &LinkName) -> Result<Self> {
        let place = LinkPath::new(dir, name);
        let (mut files, mut foreign) = (Vec::new(), Vec::new());
        for pool in std::iter::once(None).chain(PoolId::ALL.map(Some)) {
            sort(&place, place.store.path(pool), is_ours, &mut files, &mut foreign)?;
        }
        for pool in PoolId::ALL {
            // Made while another process that created the link was stopped.
            for path in with_prefix(dir, &format!("{}-", file_name(name.as_str(), Some(pool)))) {
                sort(&place, path, is_ours, &mut files, &mut foreign)?;
            }
        }
        let is_socket = |path: &Path| Ok(std::fs::symlink_metadata(path)?.file_type().is_socket());
        // Where killed processes listened, and what killed participants were woken through.
        let prefixes = [socket_prefix(name.as_str()), crate::link::bell::prefix(name.as_str())];
        for path in prefixes.iter().flat_map(|prefix| with_prefix(dir, prefix)) {
            sort(&place, path, is_socket, &mut files, &mut foreign)?;
        }
        let lock_path = place.beside("lock");
        let is_lock = |path: &Path| {
            let metadata = std::fs::symlink_metadata(path)?;
            Ok(metadata.is_file() && metadata.len() == 0)
        };
        let had_lock = sort(&place, lock_path.clone(), is_lock, &mut files, &mut foreign)?;
        if files.is_empty() && foreign.is_empty() {
            return Err(ErrorKind::NotFound { link: place.link(), dir: dir.to_path_buf() }.into());
        }
        // Another's lock file is not ours to lock; whatever it means, `foreign` tells the caller to stop.
        let lock = if foreign.contains(&lock_path) { None } else { try_lock(&place.store)? };
        let is_held = lock.is_none() && !foreign.contains(&lock_path);
        Ok(Self {
            files,
            foreign,
            seats: Vec::new(),
            is_held,
            queued: None,
            damage: None,
            link: place.link(),
            made_lock: (lock.is_some() && !had_lock).then_some(lock_path),
            lock,
        })
    }

    /// Removes the files, and returns their sum in bytes. A process that has them mapped keeps its memory.
    ///
    /// Removes without further checks: first look at [`is_held`](Self::is_held), [`seats`](Self::seats) and [`queued`](Self::queued) before.
    ///
    /// # Errors
    /// The kernel refuses to; what was removed before stays removed.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::inspect::{Remains, names};
    /// link.send_inline(1, 0, b"it waits, so the link stays")?;
    /// drop(link);
    /// assert!(Remains::of(dir.path(), &"fronthaul".parse()?)?.remove()? > 0);
    /// assert!(names(dir.path())?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn remove(mut self) -> Result<u64> {
        let mut bytes = 0;
        for (path, size) in &self.files {
            match std::fs::remove_file(path) {
                Ok(()) => bytes += size,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => {
                    let doing = format!("remove {}", path.display());
                    return Err(Error::system(&self.link, doing, source));
                }
            }
        }
        self.forget_lock();
        Ok(bytes)
    }

    fn forget_lock(&mut self) {
        if let Some(path) = self.made_lock.take() {
            // Removed while locked: a process that opens it now finds, after locking, that it has no name any more.
            let _ = std::fs::remove_file(path);
        }
        self.lock = None;
    }
}

impl Drop for Remains {
    fn drop(&mut self) {
        self.forget_lock();
    }
}

/// Whether no process has a lock of the link `name` in `dir`, so that it could be removed. Takes no lock itself, so no process
/// has to wait for it; a process may attach at any time, which [`Remains::unused`] prevents.
///
/// # Errors
/// The lock file cannot be read.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// assert!(!shmesh::inspect::is_unused(dir.path(), &"fronthaul".parse()?)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn is_unused(dir: &Path, name: &LinkName) -> Result<bool> {
    let place = LinkPath::new(dir, name);
    let path = place.beside("lock");
    let is_used = match Lock::open_for_reading(&path) {
        Ok(lock) => lock.is_used(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    };
    is_used.map(|is_used| !is_used).map_err(|error| place.store.refused(&path.display().to_string(), error))
}

/// Puts a path among ours or the foreign ones. `false`: there is no such file.
fn sort(
    place: &LinkPath,
    path: PathBuf,
    is_ours: impl Fn(&Path) -> io::Result<bool>,
    ours: &mut Vec<(PathBuf, u64)>,
    foreign: &mut Vec<PathBuf>,
) -> Result<bool> {
    let looked = std::fs::symlink_metadata(&path).and_then(|metadata| Ok((metadata.len(), is_ours(&path)?)));
    match looked {
        Ok((len, true)) => ours.push((path, len)),
        Ok((_, false)) => foreign.push(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(place.store.refused(&path.display().to_string(), error)),
    }
    Ok(true)
}

/// The seats of a link whose own segment is intact, although its pools are not.
fn seats_alone(place: &LinkPath) -> Option<Vec<SeatView>> {
    let shm = place.open(None).ok()??;
    let lines = shm.memory.window(LinkLayout::of(&shm.header.shape).seats, SEAT_LINES)?;
    let locks = SeatLocks::new(place.beside("lock"));
    Some(seats(&Seats::new(lines), &[], &ProcessIdentity::me().ok()?, &locks))
}
