//! Access by descriptor to directories that others can write: symbolic links are not followed, and only directories are
//! opened.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::dir::Dir;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::errno::Errno;

const FLAGS: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

/// Metadata of a name in a directory; symbolic links are not followed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Entry {
    /// The device number of its file system.
    pub device: u64,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// Bytes that it takes on the file system.
    pub bytes: u64,
    /// Number of its names (hard links).
    pub names: u64,
    /// Time of the last change of its content, in seconds since 1970.
    pub modified: i64,
    /// Time of the last change of its content, mode, owner or names, in seconds since 1970.
    pub changed: i64,
}

impl From<FileStat> for Entry {
    #[allow(clippy::unnecessary_cast, clippy::cast_lossless, reason = "on other machines it has 32 bits")]
    fn from(found: FileStat) -> Self {
        Self {
            device: found.st_dev as u64,
            is_dir: SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT == SFlag::S_IFDIR,
            bytes: u64::try_from(found.st_blocks).unwrap_or(0) * 512,
            names: found.st_nlink as u64,
            modified: found.st_mtime as i64,
            changed: found.st_ctime as i64,
        }
    }
}

/// Opens a directory. A symbolic link is refused.
///
/// # Errors
/// The error of `openat(2)`; `ELOOP` or `ENOTDIR` for a symbolic link.
pub fn open(path: &Path) -> Result<OwnedFd, Errno> {
    openat(AT_FDCWD, path, FLAGS | OFlag::O_NOFOLLOW, Mode::empty())
}

/// As [`open`], for a name in an open directory.
///
/// # Errors
/// As [`open`].
pub fn open_at(directory: &impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
    openat(directory, name, FLAGS | OFlag::O_NOFOLLOW, Mode::empty())
}

/// Opens a directory as a file of the standard library, to change its mode and owner.
///
/// # Errors
/// As [`open`].
pub fn open_as_file(path: &Path) -> io::Result<std::fs::File> {
    Ok(open(path)?.into())
}

/// Metadata of an open file or directory.
///
/// # Errors
/// Never fails in normal use.
pub fn look(fd: &impl AsFd) -> Result<Entry, Errno> {
    fstat(fd).map(Entry::from)
}

/// Metadata of a name in an open directory.
///
/// # Errors
/// The name does not exist (`ENOENT`), or the directory cannot be searched.
pub fn look_at(directory: &impl AsFd, name: &CStr) -> Result<Entry, Errno> {
    fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW).map(Entry::from)
}

/// Calls `each` with the names in an open directory until it returns `false`. A directory that cannot be read has no
/// names.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// std::fs::write(dir.path().join("a"), "")?;
/// let mut names = Vec::new();
/// shmesh_sys::dir::names(&shmesh_sys::dir::open(dir.path())?, |name| {
///     names.push(name.to_owned());
///     true
/// });
/// assert_eq!(names, [c"a".to_owned()]);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn names(directory: &impl AsFd, mut each: impl FnMut(&CStr) -> bool) {
    let Ok(mut listing) = openat(directory, c".", FLAGS, Mode::empty()).and_then(Dir::from_fd) else {
        return;
    };
    for entry in listing.iter() {
        let Ok(entry) = entry else { return };
        let name = entry.file_name();
        if name != c"." && name != c".." && !each(name) {
            return;
        }
    }
}

/// Removes a name that is not a directory.
///
/// # Errors
/// The error of `unlinkat(2)`.
pub fn remove_file_at(directory: &impl AsFd, name: &CStr) -> Result<(), Errno> {
    unlinkat(directory, name, UnlinkatFlags::NoRemoveDir)
}

/// Removes an empty directory.
///
/// # Errors
/// `ENOTEMPTY` or `EEXIST` if it is not empty; other errors of `unlinkat(2)`.
pub fn remove_dir_at(directory: &impl AsFd, name: &CStr) -> Result<(), Errno> {
    unlinkat(directory, name, UnlinkatFlags::RemoveDir)
}

/// Moves a name from one open directory to another.
///
/// # Errors
/// The error of `renameat(2)`.
pub fn rename_at(from: &impl AsFd, name: &CStr, to: &impl AsFd, new: &CStr) -> Result<(), Errno> {
    renameat(from, name, to, new)
}
