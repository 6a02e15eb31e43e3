//! Files that hold segments, named ones on tmpfs and memfds: created, reserved, sealed, mapped and locked.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{AT_FDCWD, AtFlags, FallocateFlags, FcntlArg, FdFlag, OFlag, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{SFlag, fstat, major};

use crate::errno::Errno;
use crate::signal::Blocked;

/// Maximum length of a name in a directory.
const MAX_NAME_BYTES: usize = 255;

/// Creates a file without a name in `dir`, for [`publish`]: it disappears with this process unless it is published.
///
/// # Errors
/// The file system does not support `O_TMPFILE`, or the directory cannot be written.
pub fn unnamed(dir: &Path, mode: u32) -> io::Result<File> {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .mode(mode)
        .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
        .open(dir)?;
    set_mode(&file, mode)?;
    Ok(file)
}

/// Gives an unnamed file its name, unless that name is taken (`EEXIST`): like `O_EXCL`, but with complete content.
///
/// # Errors
/// The name is taken (`AlreadyExists`), or is on another file system.
pub fn publish(file: &File, path: &Path) -> io::Result<()> {
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    nix::unistd::linkat(AT_FDCWD, from.as_c_str(), AT_FDCWD, path, AtFlags::AT_SYMLINK_FOLLOW)?;
    Ok(())
}

/// Creates a file that must not exist yet, and reserves `bytes` for it. On failure, no file remains.
///
/// # Errors
/// The name is taken (`AlreadyExists`); there is no room; other errors of `open(2)`.
pub fn create(path: &Path, mode: u32, bytes: u64) -> io::Result<File> {
    let file = create_empty(path, mode)?;
    let fill = || {
        set_mode(&file, mode)?;
        file.set_len(bytes)?;
        reserve(&file, bytes)
    };
    if let Err(error) = fill() {
        let _ = std::fs::remove_file(path);
        return Err(error);
    }
    Ok(file)
}

/// Creates an empty file that must not exist yet.
///
/// # Errors
/// The name is taken (`AlreadyExists`); other errors of `open(2)`.
pub fn create_empty(path: &Path, mode: u32) -> io::Result<File> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(mode)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
        .open(path)
}

/// Opens a lock file, and creates it if it does not exist. A symbolic link is refused, because it could lead anywhere.
///
/// # Errors
/// The error of `open(2)`.
pub fn open_lock_file(path: &Path, mode: u32) -> io::Result<File> {
    std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(mode)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)
}

/// Opens an existing file, without waiting. A symbolic link is refused, because it could lead anywhere.
///
/// # Errors
/// The error of `open(2)`; `ELOOP` for a symbolic link, `ENXIO` for a socket.
pub fn open(path: &Path, write: bool) -> io::Result<File> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
}

/// The file at a path, to notice that the path leads to another file, or the file has another size.
///
/// Inodes of removed files are used again, on some file systems at once. So [`opened`](Self::opened) and [`at`](Self::at) are right only
/// while the file is open or mapped; [`bound`](Self::bound) compares times, too.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use shmesh_sys::file::{FileAtPath, open};
/// let path = dir.path().join("radio_shm");
/// std::fs::write(&path, "first")?;
/// let file = open(&path, false)?;
/// let first = FileAtPath::opened(&file, &path)?;
/// assert!(first.is_unchanged());
/// std::fs::remove_file(&path)?;
/// std::fs::write(&path, "other")?;
/// assert!(!first.is_unchanged());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct FileAtPath {
    path: PathBuf,
    inode: (u64, u64),
    len: u64,
    changed: Option<(i64, i64)>,
}

impl FileAtPath {
    /// A file that was opened by the path, and stays open or mapped.
    ///
    /// # Errors
    /// The error of `fstat(2)`.
    pub fn opened(file: &File, path: &Path) -> io::Result<Self> {
        Ok(Self::of(path, &file.metadata()?))
    }

    /// The file that is at the path now, and is open or mapped already.
    ///
    /// # Errors
    /// The error of `lstat(2)`.
    pub fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::of(path, &std::fs::symlink_metadata(path)?))
    }

    /// The socket that is bound to the path.
    ///
    /// # Errors
    /// The error of `lstat(2)`.
    pub fn bound(path: &Path) -> io::Result<Self> {
        let found = std::fs::symlink_metadata(path)?;
        Ok(Self { changed: Some((found.ctime(), found.ctime_nsec())), ..Self::of(path, &found) })
    }

    fn of(path: &Path, found: &std::fs::Metadata) -> Self {
        Self { path: path.to_path_buf(), inode: (found.dev(), found.ino()), len: found.len(), changed: None }
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the path still leads to the file, with the same size.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        std::fs::symlink_metadata(&self.path).is_ok_and(|now| {
            (now.dev(), now.ino(), now.len()) == (self.inode.0, self.inode.1, self.len)
                && self.changed.is_none_or(|changed| changed == (now.ctime(), now.ctime_nsec()))
        })
    }
}

/// Reserves `len` bytes, so that a full tmpfs is an error here and not a bus error later.
///
/// # Errors
/// The error of `fallocate(2)`; `EFBIG` for more than a file can have.
///
/// ```
/// let file = tempfile::tempfile()?;
/// shmesh_sys::file::reserve(&file, 4096)?;
/// assert_eq!(file.metadata()?.len(), 4096);
/// assert!(shmesh_sys::file::reserve(&file, u64::MAX).is_err());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn reserve(file: &File, len: u64) -> io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // A signal interrupts the call, and the kernel undoes all of it, so a large reservation would never complete in a
    // process with a fast timer. Signals of this thread stay pending meanwhile.
    let _blocked = Blocked::all();
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, len) {
            Err(Errno::EINTR) => {}
            done => return Ok(done?),
        }
    }
}

/// Creates a memfd that can be sealed.
///
/// # Errors
/// A seccomp filter refuses, or no huge pages are available.
pub fn memfd(name: &str, hugetlb: bool) -> io::Result<File> {
    let mut flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    if hugetlb {
        flags |= MFdFlags::MFD_HUGETLB;
    }
    Ok(File::from(memfd_create(CString::new(name)?.as_c_str(), flags)?))
}

/// A set of seals: operations on a memfd that are forbidden for ever, for all processes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Seals(SealFlag);

impl Seals {
    /// No shrinking and no growing: the size is fixed, so no peer can make readers fault.
    pub const SIZE: Self = Self(SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW));
    /// No new writable mappings and no writes; existing mappings stay writable. Since Linux 5.1.
    pub const FUTURE_WRITE: Self = Self(SealFlag::F_SEAL_FUTURE_WRITE);
    /// No further seals can be added.
    pub const FINAL: Self = Self(SealFlag::F_SEAL_SEAL);

    /// The union of both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0.union(other.0))
    }

    /// Adds these seals to a memfd.
    ///
    /// # Errors
    /// The file is not a memfd that can be sealed, or has [`FINAL`](Self::FINAL).
    pub fn add_to(self, file: &impl AsFd) -> Result<(), Errno> {
        fcntl(file, FcntlArg::F_ADD_SEALS(self.0)).map(drop)
    }

    /// The seals of a file.
    ///
    /// # Errors
    /// The file cannot have seals.
    pub fn of(file: &impl AsFd) -> io::Result<Self> {
        Ok(Self(SealFlag::from_bits_truncate(fcntl(file, FcntlArg::F_GET_SEALS)?)))
    }

    /// Whether all of `others` are in this set.
    #[must_use]
    pub const fn contains(self, others: Self) -> bool {
        self.0.contains(others.0)
    }
}

/// Fixes the size of a memfd for ever, so that no peer can make its readers fault.
///
/// # Errors
/// As [`Seals::add_to`].
pub fn seal_size(file: &File) -> io::Result<()> {
    Ok(Seals::SIZE.and(Seals::FINAL).add_to(file)?)
}

/// Whether the size of a memfd can no longer change.
#[must_use]
pub fn is_size_sealed(fd: &impl AsFd) -> bool {
    Seals::of(fd).is_ok_and(|seals| seals.contains(Seals::SIZE))
}

/// The kind of an open descriptor, as far as it matters for memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DescriptorKind {
    /// A file or a memfd.
    Regular {
        /// Its size in bytes.
        size: u64,
    },
    /// A character device with this major number.
    CharDevice {
        /// Major number of the device.
        major: u64,
    },
    /// Any other type of file.
    Other,
}

/// The kind of an open descriptor.
///
/// # Errors
/// Its file system cannot tell.
pub fn kind(fd: &impl AsFd) -> io::Result<DescriptorKind> {
    let stat = fstat(fd)?;
    Ok(match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFREG => DescriptorKind::Regular { size: u64::try_from(stat.st_size).unwrap_or(0) },
        SFlag::S_IFCHR => DescriptorKind::CharDevice { major: major(stat.st_rdev) },
        _ => DescriptorKind::Other,
    })
}

/// The inode of an open descriptor.
///
/// # Errors
/// Its file system cannot tell.
pub fn inode(fd: &impl AsFd) -> io::Result<u64> {
    Ok(fstat(fd)?.st_ino)
}

/// Whether a descriptor can be memory: a file that can have seals, or a device. Unlike [`kind`], this does not ask the
/// file system, which may belong to an untrusted process and never answer; other descriptors should be closed.
#[must_use]
pub fn may_be_memory(fd: &OwnedFd) -> bool {
    Seals::of(fd).is_ok() || is_device(fd.as_fd())
}

#[expect(unsafe_code, reason = "nix has no statx, and fstat asks the file system")]
fn is_device(fd: BorrowedFd<'_>) -> bool {
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the path is empty and ends with a zero; `stat` has the size that the kernel fills, and lives until then.
    let done =
        unsafe { libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_TYPE, stat.as_mut_ptr()) };
    // SAFETY: all zeroes are a valid value, and the kernel fills numbers only.
    let mode = u32::from(unsafe { stat.assume_init() }.stx_mode);
    done == 0 && mode & libc::S_IFMT == libc::S_IFCHR
}

/// Makes reads and writes of a descriptor non-blocking, for all processes that share the open file.
///
/// # Errors
/// Never fails in normal use.
pub fn set_nonblocking(fd: &impl AsFd) -> io::Result<()> {
    fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Closes a descriptor in programs that this process executes.
///
/// # Errors
/// Never fails in normal use.
pub fn set_close_on_exec(fd: &impl AsFd) -> io::Result<()> {
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    Ok(())
}

/// Writes all of `bytes` at an offset, without changing the position of the descriptor.
///
/// # Errors
/// The error of `pwrite(2)`.
pub fn write_at(fd: &impl AsFd, bytes: &[u8], offset: i64) -> io::Result<()> {
    let written = nix::sys::uio::pwrite(fd, bytes, offset)?;
    if written == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Maps a whole file, shared and writable.
///
/// # Errors
/// There is no room for the mapping; `EFBIG` for more than the address space.
pub fn map(file: impl AsFd, len: u64, populate: bool) -> io::Result<memmap2::MmapRaw> {
    let len = usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    let mut options = memmap2::MmapOptions::new();
    options.len(len);
    if populate {
        options.populate();
    }
    options.map_raw(file.as_fd().as_raw_fd())
}

/// Returns `N` random bytes from the kernel.
///
/// # Errors
/// `/dev/urandom` does not exist, or no descriptor is left.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    use std::io::Read;
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Sets the mode of a file, whatever the umask of this process.
///
/// # Errors
/// The file belongs to another user.
pub fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode))
}

/// The permission bits of an open file.
///
/// # Errors
/// Its file system cannot tell.
pub fn mode_of(file: &File) -> io::Result<u32> {
    Ok(file.metadata()?.mode() & 0o777)
}

/// A file that is locked as a whole (`flock`), by this process and children that share it. It is unlocked when this is
/// dropped.
#[derive(Debug)]
pub struct Locked(File);

impl Locked {
    /// Locks a file that no other opening has locked. Otherwise returns the file with `WouldBlock`.
    ///
    /// # Errors
    /// Another opening of the file has the lock (`WouldBlock`); `Interrupted`; other errors of `flock(2)`.
    pub fn try_lock(file: File) -> Result<Self, (File, io::Error)> {
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(error) => Err((file, error.into())),
        }
    }

    /// Locks a file that no other opening has locked, or waits until it is unlocked, and tries again after each `interval`. At least one
    /// attempt is made.
    ///
    /// # Errors
    /// Another opening of the file has the lock at the time `until` (`WouldBlock`); other errors of `flock(2)`.
    pub fn lock_until(mut file: File, until: Instant, interval: Duration) -> io::Result<Self> {
        loop {
            file = match Self::try_lock(file) {
                Ok(locked) => return Ok(locked),
                Err((file, error)) if error.kind() == io::ErrorKind::Interrupted => file,
                Err((file, error)) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                    std::thread::sleep(interval);
                    file
                }
                Err((_, error)) => return Err(error),
            };
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// The mode of a lock on a byte.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ByteLock {
    /// Only one opening of the file has the lock.
    Exclusive,
    /// Any number of openings have the lock.
    Shared,
}

/// Removes the name of a file, if it is the file that `is_it` recognizes. Returns `false` if the name belongs to
/// another file, which keeps it.
///
/// Another process may give the name to another file between a check and the removal. So the file is moved aside first,
/// checked there, and moved back if it is the wrong one. No file but the right one is ever removed: one that cannot be moved back,
/// because its name was given to yet another file, keeps the name `….removed-…` that it has aside.
///
/// # Errors
/// The name does not exist, or this user may not remove it; a file that is the wrong one stays aside.
pub fn remove_exactly(path: &Path, is_it: impl Fn(&Path) -> bool) -> io::Result<bool> {
    std::fs::symlink_metadata(path)?;
    // Before the check, so that little time is between it and the removal.
    let suffix = format!(".removed-{:016x}", u64::from_ne_bytes(random()?));
    let name = path.file_name().unwrap_or_default().as_bytes();
    // A name of the greatest length is cut, so that the other one is not too long.
    let name = name.get(..MAX_NAME_BYTES - suffix.len()).unwrap_or(name);
    let aside = path.with_file_name(OsStr::from_bytes(&[name, suffix.as_bytes()].concat()));
    if !is_it(path) {
        return Ok(false);
    }
    std::fs::rename(path, &aside)?;
    if is_it(&aside) {
        std::fs::remove_file(&aside)?;
        return Ok(true);
    }
    // Not by a hard link, which another user's file may be refused.
    rename_new(&aside, path).map_err(|error| {
        let (path, aside) = (path.display(), aside.display());
        io::Error::new(
            error.kind(),
            format!(
                "{path} was given to another file while it was removed; that file is {aside} now: {error}"
            ),
        )
    })?;
    Ok(false)
}

/// Gives a file another name, unless that is taken (`AlreadyExists`).
#[expect(unsafe_code, reason = "nix has renameat2 for some C libraries only")]
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let (from, to) = (CString::new(from.as_os_str().as_bytes())?, CString::new(to.as_os_str().as_bytes())?);
    let at = libc::AT_FDCWD;
    // SAFETY: both are C strings that live until the call returns.
    let renamed = unsafe {
        libc::syscall(libc::SYS_renameat2, at, from.as_ptr(), at, to.as_ptr(), libc::RENAME_NOREPLACE)
    };
    if renamed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Locks one byte of a file, or changes the lock that this opening has on it. Returns `false` if another opening has a
/// conflicting lock.
///
/// # Errors
/// The error of `fcntl(F_OFD_SETLK)`.
pub fn try_lock_byte(file: &impl AsFd, at: u32, lock: ByteLock) -> io::Result<bool> {
    let kind = match lock {
        ByteLock::Exclusive => libc::F_WRLCK,
        ByteLock::Shared => libc::F_RDLCK,
    };
    try_lock(file, &of_byte(at), kind)
}

/// As [`try_lock_byte`], exclusively, for all bytes of a range below `i64::MAX`. Other openings can read its start with
/// [`locked_from`].
///
/// # Errors
/// As [`try_lock_byte`].
pub fn try_lock_range(file: &impl AsFd, range: &Range<u64>) -> io::Result<bool> {
    try_lock(file, range, libc::F_WRLCK)
}

fn try_lock(file: &impl AsFd, range: &Range<u64>, kind: i32) -> io::Result<bool> {
    match fcntl(file, FcntlArg::F_OFD_SETLK(&lock_of(range, kind))) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Releases the lock of a byte.
pub fn unlock_byte(file: &impl AsFd, at: u32) {
    unlock_range(file, &of_byte(at));
}

/// Releases the locks of a range.
pub fn unlock_range(file: &impl AsFd, range: &Range<u64>) {
    let _ = fcntl(file, FcntlArg::F_OFD_SETLK(&lock_of(range, libc::F_UNLCK)));
}

/// Whether another opening of the file has a lock on a byte.
///
/// # Errors
/// The error of `fcntl(F_OFD_GETLK)`.
pub fn is_byte_locked(file: &impl AsFd, at: u32) -> io::Result<bool> {
    Ok(locked_from(file, &of_byte(at))?.is_some())
}

/// Whether another opening of the file has an exclusive lock on a byte.
///
/// # Errors
/// The error of `fcntl(F_OFD_GETLK)`.
pub fn is_byte_locked_exclusively(file: &impl AsFd, at: u32) -> io::Result<bool> {
    Ok(find_lock(file, &of_byte(at), libc::F_RDLCK)?.is_some())
}

/// The start of a lock that another opening of the file has on a part of a range.
///
/// # Errors
/// The error of `fcntl(F_OFD_GETLK)`.
///
/// ```
/// use shmesh_sys::file::{locked_from, try_lock_range};
/// let file = tempfile::NamedTempFile::new()?;
/// assert!(try_lock_range(&file, &(107..200))?);
/// assert_eq!(locked_from(&file.reopen()?, &(100..200))?, Some(107));
/// assert_eq!(locked_from(&file, &(100..200))?, None, "it is its own");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn locked_from(file: &impl AsFd, range: &Range<u64>) -> io::Result<Option<u64>> {
    find_lock(file, range, libc::F_WRLCK)
}

/// The start of a lock that conflicts with one of this kind.
fn find_lock(file: &impl AsFd, range: &Range<u64>, kind: i32) -> io::Result<Option<u64>> {
    let mut lock = lock_of(range, kind);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    let is_locked = i32::from(lock.l_type) != libc::F_UNLCK;
    Ok(is_locked.then(|| u64::try_from(lock.l_start).unwrap_or(0)))
}

fn of_byte(at: u32) -> Range<u64> {
    u64::from(at)..u64::from(at) + 1
}

pub(crate) fn lock_of(range: &Range<u64>, kind: i32) -> libc::flock {
    let short = |value: i32| libc::c_short::try_from(value).unwrap_or(0);
    libc::flock {
        l_type: short(kind),
        l_whence: short(libc::SEEK_SET),
        l_start: range.start.cast_signed(),
        l_len: (range.end - range.start).cast_signed(),
        // The kernel requires 0 for locks that belong to the open file and not to the process.
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Files as a race leaves them: another program gives the name to `others` between the check and the removal, one each time.
    fn remove_while_others_take_the_name(others: &[&str]) -> (io::Result<bool>, Vec<(String, String)>) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("name");
        std::fs::write(&path, "ours").unwrap();
        let checks = Cell::new(0);
        let removed = remove_exactly(&path, |_| {
            let check = checks.replace(checks.get() + 1);
            if let Some(other) = others.get(check) {
                let new = dir.path().join("new");
                std::fs::write(&new, other).unwrap();
                std::fs::rename(new, &path).unwrap();
            }
            check == 0
        });
        let files = std::fs::read_dir(dir.path()).unwrap().map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            (name.get(..name.len().min(13)).unwrap().to_owned(), std::fs::read_to_string(path).unwrap())
        });
        let mut files: Vec<_> = files.collect();
        files.sort();
        (removed, files)
    }

    #[test]
    fn lock_is_waited_for_until_it_is_released() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let held = Locked::try_lock(file.reopen().unwrap()).unwrap();
        let (interval, other) = (Duration::from_millis(1), file.reopen().unwrap());
        let far = Instant::now() + Duration::from_secs(600);
        let waiting = std::thread::spawn(move || Locked::lock_until(other, far, interval));
        let soon = Instant::now() + Duration::from_millis(20);
        let error = Locked::lock_until(file.reopen().unwrap(), soon, interval).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(Instant::now() >= soon && !waiting.is_finished());
        drop(held);
        waiting.join().unwrap().unwrap();
    }

    #[test]
    fn file_that_took_the_name_before_the_removal_has_it_again() {
        let (removed, files) = remove_while_others_take_the_name(&["another's"]);
        assert!(!removed.unwrap());
        assert_eq!(files, [("name".to_owned(), "another's".to_owned())]);
    }

    #[test]
    fn file_that_cannot_have_its_name_again_stays_aside() {
        let (removed, files) = remove_while_others_take_the_name(&["another's", "a third's"]);
        let error = removed.unwrap_err();
        assert!(
            error.kind() == io::ErrorKind::AlreadyExists && error.to_string().contains(" is "),
            "{error}"
        );
        let expected = [("name", "a third's"), ("name.removed-", "another's")];
        assert_eq!(files, expected.map(|(name, text)| (name.to_owned(), text.to_owned())));
    }
}
