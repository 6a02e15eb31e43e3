//! Files of an IPC directory that belong to no link: shared memory, semaphores and System V segments of other programs.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use shmesh_sys::{file, lease};

use super::far_nodes;
use super::remains::kind_of;
use super::segments::{MAX_ENTRIES, names};
use crate::config::LinkName;

/// The name of the memfds that are arrays of the Python package, as `/proc` shows it.
pub const ARRAY_MEMFD: &str = "shmesh-array";

/// The kind of memory that a file holds, by its name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// POSIX shared memory, or any other file.
    Memory,
    /// A named semaphore (`sem.NAME`).
    Semaphore,
    /// A System V segment of `libshmesh_posix.so` (`sysv.KEY`).
    SystemV,
}

impl MemoryKind {
    fn of(name: &str) -> Self {
        if name.starts_with("sem.") {
            Self::Semaphore
        } else if name.starts_with("sysv.") {
            Self::SystemV
        } else {
            Self::Memory
        }
    }

    /// The word for it in lists: `memory`, `semaphore` or `sysv`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Semaphore => "semaphore",
            Self::SystemV => "sysv",
        }
    }
}

/// Whether any process uses a file, as far as this process can know.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum FileUse {
    /// A process has a lease, in whatever pid namespace.
    Leased,
    /// The file is marked, and no process has a lease: it can be removed.
    Stale,
    /// The file is not marked, so its users have no leases; or it cannot be opened.
    Unknown,
}

impl FileUse {
    /// The word for it in lists: `leased`, `stale` or `unknown`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Leased => "leased",
            Self::Stale => "stale",
            Self::Unknown => "unknown",
        }
    }
}

/// A file of an IPC directory that is no link's.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct MemoryFile {
    /// Its name in the directory.
    pub name: OsString,
    /// The kind of memory, by the file's name.
    pub kind: MemoryKind,
    /// Its length in bytes.
    pub len: u64,
    /// Bytes of memory that it has.
    pub bytes: u64,
    /// The user id of its owner, as this user namespace numbers it.
    pub user: u32,
    /// The id of its group.
    pub group: u32,
    /// Its permission bits, with the mark.
    pub mode: u32,
    /// The time since its contents or size last changed by a call. Writing to mapped memory may not count.
    pub age: Duration,
    /// Whether its users take leases, so that it can be removed when they are gone.
    pub is_marked: bool,
    /// Whether it is in use.
    pub in_use: FileUse,
    /// Device and inode, as `/proc` has them.
    pub id: (u64, u64),
}

/// The files in `dir` that belong to no link, sorted by name. Subdirectories are not searched, and symbolic links not followed.
///
/// # Errors
/// The directory cannot be read.
///
/// ```
/// # let dir = tempfile::tempdir_in("/dev/shm")?;
/// use shmesh::inspect::{FileUse, memory_files};
/// std::fs::write(dir.path().join("psm_1a2b"), "an array of Python's")?;
/// let files = memory_files(dir.path())?;
/// assert_eq!((files[0].len, files[0].in_use), (20, FileUse::Unknown));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn memory_files(dir: &Path) -> io::Result<Vec<MemoryFile>> {
    let links = names(dir)?;
    let now = SystemTime::now();
    let mut files: Vec<_> = entries(dir)?
        .filter(|(path, _)| !is_of_a_link(path, &links))
        .filter_map(|(path, found)| look(&path, &found, now))
        .collect();
    files.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(files)
}

/// A file that could be removed: its name, and the inode that has it.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub struct StaleFile {
    /// Its name in the directory.
    pub name: OsString,
    /// The number of its inode: a later file of this name has another.
    pub inode: u64,
}

/// The files in `dir` that are marked, have no lease, and that this user may remove as far as their permission bits say; at most `limit`,
/// in no order. A process may take a lease at any time, which [`remove_stale`] notices.
///
/// # Errors
/// The directory cannot be read.
pub fn stale_files(dir: &Path, limit: usize) -> io::Result<HashSet<StaleFile>> {
    let is_stale = |(path, found): &(PathBuf, std::fs::Metadata)| {
        // To remove it, it is opened for reading and writing.
        lease::is_marked(found.mode())
            && file::open(path, true).and_then(|file| lease::is_leased(&file)).is_ok_and(|leased| !leased)
    };
    let stale = entries(dir)?.filter(is_stale).take(limit);
    let identify = |(path, found): (PathBuf, std::fs::Metadata)| {
        Some(StaleFile { name: path.file_name()?.to_owned(), inode: found.ino() })
    };
    Ok(stale.filter_map(identify).collect())
}

/// The result of removing a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum FileRemoval {
    /// It is gone, and so many bytes of memory are free.
    Removed(u64),
    /// A process uses it.
    InUse,
    /// It is not marked, or another process has removed it.
    Left,
}

/// Removes a file of `dir` if it is marked and no process uses it: no process has a lease, and, where the kernel tells this user, none
/// has it open without a lease.
///
/// # Errors
/// This user may not open the file for writing, or may not remove it.
///
/// ```
/// # let dir = tempfile::tempdir_in("/dev/shm")?;
/// use shmesh::inspect::{FileRemoval, remove_stale};
/// std::fs::write(dir.path().join("unmarked"), "")?;
/// assert_eq!(remove_stale(dir.path(), "unmarked".as_ref())?, FileRemoval::Left);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn remove_stale(dir: &Path, name: &std::ffi::OsStr) -> io::Result<FileRemoval> {
    Ok(match lease::remove_unused(&dir.join(name))? {
        lease::Removal::Removed { bytes } => FileRemoval::Removed(bytes),
        lease::Removal::Leased | lease::Removal::Open => FileRemoval::InUse,
        lease::Removal::Unmarked | lease::Removal::Gone => FileRemoval::Left,
    })
}

/// The regular files of a directory.
fn entries(dir: &Path) -> io::Result<impl Iterator<Item = (PathBuf, std::fs::Metadata)>> {
    let entries = std::fs::read_dir(dir)?.take(MAX_ENTRIES).filter_map(io::Result::ok);
    Ok(entries.filter_map(|entry| {
        let found = entry.metadata().ok()?;
        found.is_file().then(|| (entry.path(), found))
    }))
}

fn is_of_a_link(path: &Path, links: &[LinkName]) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    if name.starts_with(far_nodes::PREFIX) {
        return true;
    }
    links.iter().any(|link| {
        let link = link.as_str();
        let is_beside = || name.strip_prefix(link).is_some_and(|rest| rest == ".lock");
        let is_nvipcs =
            || name.strip_prefix("sem.").and_then(|rest| rest.strip_prefix(link)) == Some("_dbg_sem");
        kind_of(name, link).is_some() || is_beside() || is_nvipcs()
    })
}

fn look(path: &Path, found: &std::fs::Metadata, now: SystemTime) -> Option<MemoryFile> {
    let name = path.file_name()?;
    Some(MemoryFile {
        kind: MemoryKind::of(&name.to_string_lossy()),
        name: name.to_owned(),
        len: found.len(),
        bytes: found.blocks() * 512,
        user: found.uid(),
        group: found.gid(),
        mode: found.mode() & 0o7777,
        age: found.modified().ok().and_then(|then| now.duration_since(then).ok()).unwrap_or_default(),
        is_marked: lease::is_marked(found.mode()),
        in_use: in_use(path, found),
        id: (found.dev(), found.ino()),
    })
}

fn in_use(path: &Path, found: &std::fs::Metadata) -> FileUse {
    if !lease::is_marked(found.mode()) {
        return FileUse::Unknown;
    }
    match file::open(path, false).and_then(|file| lease::is_leased(&file)) {
        Ok(true) => FileUse::Leased,
        Ok(false) => FileUse::Stale,
        Err(_) => FileUse::Unknown,
    }
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use super::*;

    #[test]
    fn files_of_links_are_not_listed_and_others_are() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let config = crate::config::LinkConfig::new("link".parse().unwrap());
        let link = crate::LinkOptions::new().dir(dir.path()).create(&config).unwrap();
        std::fs::write(dir.path().join("psm_1"), vec![1; 5000]).unwrap();
        std::fs::write(dir.path().join("linked"), "").unwrap();
        let leased = lease::create(&dir.path().join("sem.a"), 0o600, 32).unwrap();
        drop(lease::create(&dir.path().join("sysv.0000002a"), 0o600, 1).unwrap());
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let expected = [
            ("linked", "memory", 0, FileUse::Unknown),
            ("psm_1", "memory", 5000, FileUse::Unknown),
            ("sem.a", "semaphore", 32, FileUse::Leased),
            ("sysv.0000002a", "sysv", 1, FileUse::Stale),
        ];
        // A process that another test starts has copies of this one's descriptors for a moment.
        let is_so = || {
            let found = memory_files(dir.path()).unwrap();
            let found: Vec<_> =
                found.iter().map(|f| (f.name.to_str().unwrap(), f.kind.name(), f.len, f.in_use)).collect();
            assert!(found.len() == expected.len(), "{found:?}");
            found == expected
        };
        assert!((0..60_000).any(|_| is_so() || {
            std::thread::sleep(Duration::from_millis(1));
            false
        }));
        let stale = stale_files(dir.path(), 10).unwrap();
        assert_eq!(
            stale.iter().map(|file| file.name.to_str().unwrap()).collect::<Vec<_>>(),
            ["sysv.0000002a"]
        );
        assert_eq!(remove_stale(dir.path(), "sem.a".as_ref()).unwrap(), FileRemoval::InUse);
        assert_eq!(remove_stale(dir.path(), "sysv.0000002a".as_ref()).unwrap(), FileRemoval::Removed(4096));
        assert_eq!(remove_stale(dir.path(), "sysv.0000002a".as_ref()).unwrap(), FileRemoval::Left);
        drop((link, leased));
    }

    /// They would be tried again and again, and in great numbers hide others.
    #[test]
    fn files_that_this_user_cannot_open_are_not_stale() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("read-only");
        drop(lease::create(&path, 0o600, 1).unwrap());
        let is_stale = || stale_files(dir.path(), 10).unwrap().len() == 1;
        assert!((0..60_000).any(|_| is_stale() || {
            std::thread::sleep(Duration::from_millis(1));
            false
        }));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o1400)).unwrap();
        // Root may open it all the same.
        assert_eq!(is_stale(), std::fs::OpenOptions::new().write(true).open(&path).is_ok());
    }
}
