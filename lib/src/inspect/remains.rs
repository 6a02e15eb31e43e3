//! The files of a link, and removing them.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shmesh_sys::file;
use shmesh_sys::process::ProcessIdentity;

use super::View;
use super::seat_locks::SeatLocks;
use super::segments::{LinkFileKind, LinkPath, MAX_ENTRIES, is_ours, link_file};
use super::snapshot::{SeatView, seats};
use crate::config::{LinkName, PoolId};
use crate::error::{Error, ErrorKind, Result};
use crate::link::host::{lock_file, socket_prefix};
use crate::link::removal::retire;
use crate::participant::{SEAT_LINES, Seats};
use crate::segment::layout::LinkLayout;
use crate::segment::lock::{Lock, inode_of};
use crate::segment::store::{Store, bell_prefix, file_name};

/// The files of a link, and reasons not to remove them.
///
/// While this value exists, no process can create, serve or keep the link, except those that already do. When it is dropped, a
/// link that no process uses and that has no queued message is removed, as when its last process detaches: that process may have left
/// the removal to this one.
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
    /// Files and their sizes that [`remove`](Self::remove) removes, the link's own segment first.
    pub files: Vec<(PathBuf, u64)>,
    /// Files with a name of the link that do not belong to it. They are not removed.
    pub foreign: Vec<PathBuf>,
    /// Attached participants, dead or alive, as far as the link can be read.
    pub seats: Vec<SeatView>,
    /// Whether a process uses or keeps the link, whatever the seats say.
    pub is_held: bool,
    /// Number of queued messages; `None` if the link cannot be read.
    pub queued: Option<usize>,
    /// The damage of the link, if any.
    pub damage: Option<Error>,
    link: Arc<str>,
    /// Device and inode of each of `files`.
    inodes: Vec<(u64, u64)>,
    store: Store,
    lock: Option<Lock>,
}

/// Maximum number of files of a link that are found at once.
const MAX_FILES: usize = 4096;

impl Remains {
    /// Finds the files of the link `name` in `dir`.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if there are none; [`Permission`](ErrorKind::Permission), and other errors of
    /// the kernel.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::inspect::Remains;
    /// link.send_inline(1, 0, b"not received yet")?;
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

    /// The files of a link that no process uses, as its locks show. `None` if any process has a lock of the link.
    ///
    /// Maps nothing and reads only the beginning of each file, so it is safe where others can truncate the files.
    /// Queued messages are not counted: [`queued`](Self::queued) is `None`, and [`seats`](Self::seats) is empty.
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
        // A forked child of an earlier participant can have the lock of a seat without the lock of its process.
        let is_used =
            lock.is_used().map_err(|error| remains.refused("read the locks of its lock file", error))?;
        Ok((!is_used).then_some(remains))
    }

    fn refused(&self, doing: &str, error: io::Error) -> Error {
        Error::system(&self.link, doing, error)
    }

    /// The files, and the lock for removing them.
    fn without_contents(dir: &Path, name: &LinkName) -> Result<Self> {
        let place = LinkPath::new(dir, name);
        let (shm, lock_path) = (place.store.path(None), place.beside("lock"));
        let mut found = FileList::default();
        let had_lock = found.sort(&place, lock_path.clone(), is_lock)?;
        if !had_lock && files_of(dir, name).is_empty() {
            return Err(ErrorKind::NotFound { link: place.link(), dir: dir.to_path_buf() }.into());
        }
        // Do not lock a lock file that belongs to another program; `foreign` makes the caller stop.
        let lock = if found.foreign.is_empty() { try_close(&place.store)? } else { None };
        let is_held = lock.is_none() && found.foreign.is_empty();
        // Listed now that no process can attach. The link's own segment is removed first: without it there is no link.
        let mut files = FileList { foreign: found.foreign, ..FileList::default() };
        let mut others = files_of(dir, name);
        others.sort_by_key(|(path, _)| *path != shm);
        for (path, kind) in others {
            match kind {
                FileKind::Segment => files.sort(&place, path, is_ours)?,
                FileKind::Socket => files.sort(&place, path, is_socket)?,
            };
        }
        files.files.append(&mut found.files);
        files.inodes.append(&mut found.inodes);
        Ok(Self {
            files: files.files,
            inodes: files.inodes,
            foreign: files.foreign,
            seats: Vec::new(),
            is_held,
            queued: None,
            damage: None,
            link: place.link(),
            store: place.store,
            lock,
        })
    }

    /// Removes the files, and returns their total size in bytes. A process that has them mapped keeps its memory.
    ///
    /// Does not check whether the link is in use: check [`is_held`](Self::is_held), [`seats`](Self::seats) and
    /// [`queued`](Self::queued) first.
    ///
    /// # Errors
    /// The kernel refuses; files that were removed before stay removed.
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
        for ((path, size), inode) in self.files.iter().zip(&self.inodes) {
            // If this process was stopped for long, a creator did not wait for it, and the name may belong to another
            // link.
            if self.lock.as_ref().is_some_and(|lock| !lock.is_named()) {
                break;
            }
            match file::remove_exactly(path, |path| inode_of(path) == Some(*inode)) {
                Ok(true) => bytes += size,
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(self.refused(&format!("remove {}", path.display()), error)),
            }
        }
        self.leave();
        Ok(bytes)
    }

    fn leave(&mut self) {
        if let Some(lock) = self.lock.take() {
            retire(&self.store, &lock, None);
        }
    }
}

impl Drop for Remains {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Names of links in `dir` that no process has locked, so that they could be removed; at most `limit`, in no order.
/// Takes no lock itself, so no process has to wait for it; a process may attach at any time, which [`Remains::unused`]
/// prevents.
///
/// # Errors
/// The directory cannot be read.
pub fn unused_names(dir: &Path, limit: usize) -> io::Result<HashSet<LinkName>> {
    let mut unused = HashSet::new();
    for entry in std::fs::read_dir(dir)?.take(MAX_ENTRIES).filter_map(io::Result::ok) {
        if unused.len() >= limit {
            break;
        }
        let Some((name, LinkFileKind::Ring | LinkFileKind::Pool(_))) = link_file(&entry) else { continue };
        if !unused.contains(&name)
            && is_ours(&entry.path()).unwrap_or(false)
            && is_unused(dir, &name).unwrap_or(false)
        {
            unused.insert(name);
        }
    }
    Ok(unused)
}

fn is_unused(dir: &Path, name: &LinkName) -> io::Result<bool> {
    match Lock::open_for_reading(&LinkPath::new(dir, name).beside("lock")) {
        Ok(lock) => Ok(!lock.is_used()?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

/// Takes the lock for removing the link, and keeps other processes from attaching. `None` if a process uses the link.
fn try_close(store: &Store) -> Result<Option<Lock>> {
    let Some(lock) = lock_file(store, true)? else { return Ok(None) };
    let close =
        || Ok(lock.try_take_host_role()? && lock.is_named() && lock.try_close()? && !lock.others_host()?);
    if close().map_err(|error| store.refused("its lock file", error))? {
        return Ok(Some(lock));
    }
    // A process that detached meanwhile left the removal to this one.
    retire(store, &lock, None);
    Ok(None)
}

/// The kind of a file of a link, by its name.
#[derive(Clone, Copy)]
pub(super) enum FileKind {
    Segment,
    Socket,
}

/// The files of a link, by their names, without its lock file. At most [`MAX_FILES`], of the first [`MAX_ENTRIES`] of
/// the directory, because another process may create any number.
fn files_of(dir: &Path, name: &LinkName) -> Vec<(PathBuf, FileKind)> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().take(MAX_ENTRIES).filter_map(io::Result::ok);
    let found = entries
        .filter_map(|entry| Some((entry.path(), kind_of(entry.file_name().to_str()?, name.as_str())?)));
    found.take(MAX_FILES).collect()
}

pub(super) fn kind_of(file: &str, link: &str) -> Option<FileKind> {
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    // Compared as a whole, because the name of another link may begin like the name of a file of this one.
    let is_segment = std::iter::once(None).chain(PoolId::ALL.map(Some)).any(|pool| {
        file.strip_prefix(&file_name(link, pool)).is_some_and(|rest| match rest.strip_prefix('-') {
            // Created while another process that created the link was stopped.
            Some(epoch) => pool.is_some() && epoch.len() == 16 && is_hex(epoch),
            None => rest.is_empty(),
        })
    });
    // Sockets of killed hosts, and bells of killed participants.
    let is_socket = || {
        file.strip_prefix(&socket_prefix(link)).is_some_and(is_hex)
            || file
                .strip_prefix(&bell_prefix(link))
                .is_some_and(|rest| rest.split('-').count() == 3 && rest.split('-').all(is_hex))
    };
    if is_segment { Some(FileKind::Segment) } else { is_socket().then_some(FileKind::Socket) }
}

fn is_socket(path: &Path) -> io::Result<bool> {
    Ok(std::fs::symlink_metadata(path)?.file_type().is_socket())
}

fn is_lock(path: &Path) -> io::Result<bool> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok(metadata.is_file() && metadata.len() == 0)
}

/// Files of a link, and foreign files with such names.
#[derive(Default)]
struct FileList {
    files: Vec<(PathBuf, u64)>,
    inodes: Vec<(u64, u64)>,
    foreign: Vec<PathBuf>,
}

impl FileList {
    /// Adds a path to our files or to the foreign ones. Returns `false` if the file does not exist.
    fn sort(
        &mut self,
        place: &LinkPath,
        path: PathBuf,
        is_ours: impl Fn(&Path) -> io::Result<bool>,
    ) -> Result<bool> {
        let looked = std::fs::symlink_metadata(&path).and_then(|found| Ok((found, is_ours(&path)?)));
        match looked {
            Ok((found, true)) => {
                self.files.push((path, found.len()));
                self.inodes.push((found.dev(), found.ino()));
            }
            Ok((_, false)) => self.foreign.push(path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(place.store.refused(&path.display().to_string(), error)),
        }
        Ok(true)
    }
}

/// The seats of a link whose own segment is intact although its pools are not.
fn seats_alone(place: &LinkPath) -> Option<Vec<SeatView>> {
    let shm = place.open(None).ok()??;
    let lines = shm.memory.window(LinkLayout::of(&shm.header.shape).seats, SEAT_LINES)?;
    let locks = SeatLocks::new(place.beside("lock"));
    Some(seats(&Seats::new(lines), &[], &ProcessIdentity::me().ok()?, &locks))
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use super::*;
    use crate::config::LinkConfig;
    use crate::{LinkOptions, Side};

    fn leave(dir: &Path, name: &str) -> LinkName {
        let link = LinkOptions::new().dir(dir).create(&LinkConfig::new(name.parse().unwrap())).unwrap();
        // A message is queued, so the files stay.
        link.send_inline(1, 0, b"").unwrap();
        name.parse().unwrap()
    }

    #[test]
    fn no_process_attaches_while_a_link_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let name = leave(dir.path(), "link");
        let remains = Remains::unused(dir.path(), &name).unwrap().expect("no process has it");
        let options = LinkOptions::new().dir(dir.path());
        assert!(options.attach("link", Side::Secondary).is_err());
        assert!(Remains::unused(dir.path(), &name).unwrap().is_none(), "one process removes it");
        drop(remains);
        let link = options.attach("link", Side::Secondary).unwrap();
        assert!(Remains::unused(dir.path(), &name).unwrap().is_none());
        assert!(Remains::of(dir.path(), &name).unwrap().is_held);
        drop(link);
    }

    /// The process that removes it was stopped, and a creator went ahead.
    #[test]
    fn stopped_removal_does_not_remove_the_next_link() {
        let dir = tempfile::tempdir().unwrap();
        let name = leave(dir.path(), "link");
        let remains = Remains::unused(dir.path(), &name).unwrap().unwrap();
        let link = LinkOptions::new().dir(dir.path()).create(&LinkConfig::new(name.clone())).unwrap();
        let bytes = remains.remove().unwrap();
        assert!(dir.path().join("link_shm").exists() && dir.path().join("link.lock").exists(), "{bytes}");
        let other = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
        other.send_inline(7, 0, b"").unwrap();
        assert_eq!(link.receive().unwrap().map(|message| message.msg_id()), Some(7));
    }

    #[test]
    fn link_whose_name_begins_like_a_file_of_another_is_not_part_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let name = leave(dir.path(), "train");
        leave(dir.path(), "train_cpu_msg-0");
        let remains = Remains::unused(dir.path(), &name).unwrap().unwrap();
        assert!(remains.foreign.is_empty());
        remains.remove().unwrap();
        let left: Vec<_> = super::super::names(dir.path()).unwrap();
        assert_eq!(left.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["train_cpu_msg-0"]);
        assert!(dir.path().join("train_cpu_msg-0_cpu_msg").exists());
    }

    #[test]
    fn many_files_of_one_name_are_removed_in_several_rounds() {
        let dir = tempfile::tempdir().unwrap();
        let name = leave(dir.path(), "link");
        let pool = dir.path().join("link_cpu_msg");
        for n in 0..MAX_FILES + 10 {
            std::fs::hard_link(&pool, dir.path().join(format!("link_cpu_msg-{n:016x}"))).unwrap();
        }
        let remains = Remains::unused(dir.path(), &name).unwrap().unwrap();
        assert!(remains.files.len() <= MAX_FILES + 1);
        remains.remove().unwrap();
        assert!(files_of(dir.path(), &name).len() < 20);
    }
}
