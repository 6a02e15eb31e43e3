//! Files that hold segments: named ones on tmpfs, and memfds.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, AtFlags, FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{SigSet, SigmaskHow};

/// A file without a name in `dir`, for [`publish`]: it disappears with us unless it is finished.
pub(crate) fn unnamed(dir: &Path, mode: u32) -> io::Result<File> {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .mode(mode)
        .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
        .open(dir)?;
    set_mode(&file, mode)?;
    Ok(file)
}

/// Gives an unnamed file its name, unless that name is taken (`EEXIST`): `O_EXCL`, but with the content already complete.
pub(crate) fn publish(file: &File, path: &Path) -> io::Result<()> {
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    nix::unistd::linkat(AT_FDCWD, from.as_c_str(), AT_FDCWD, path, AtFlags::AT_SYMLINK_FOLLOW)?;
    Ok(())
}

/// Opens an existing segment file. A symbolic link is refused: it could lead anywhere.
pub(crate) fn open(path: &Path, write: bool) -> io::Result<File> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
}

/// Reserves `len` bytes: a full tmpfs is an error here and not a bus error later.
///
/// # Errors
/// What `fallocate(2)` says; `EFBIG` for more than a file can have.
///
/// ```
/// let file = tempfile::tempfile()?;
/// shmesh::sys::reserve(&file, 4096)?;
/// assert_eq!(file.metadata()?.len(), 4096);
/// assert!(shmesh::sys::reserve(&file, u64::MAX).is_err());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn reserve(file: &File, len: u64) -> io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // The kernel undoes all of a request that a signal interrupts, so in a process with a fast timer a large one would never
    // end. Signals of this thread wait meanwhile.
    let ours = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
    let reserved = loop {
        match fallocate(file, FallocateFlags::empty(), 0, len) {
            Err(nix::errno::Errno::EINTR) => {}
            done => break done,
        }
    };
    if let Ok(ours) = ours {
        let _ = ours.thread_set_mask();
    }
    Ok(reserved?)
}

/// A memfd that can be sealed.
pub(crate) fn memfd(name: &str, hugetlb: bool) -> io::Result<File> {
    let mut flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    if hugetlb {
        flags |= MFdFlags::MFD_HUGETLB;
    }
    Ok(File::from(memfd_create(CString::new(name)?.as_c_str(), flags)?))
}

/// Fixes the size of a memfd for good, so that nobody can make its readers fault.
pub(crate) fn seal_size(file: &File) -> io::Result<()> {
    fcntl(
        file,
        FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL),
    )?;
    Ok(())
}

/// Whether the size of a memfd can no longer change.
pub(crate) fn is_size_sealed(fd: &File) -> bool {
    let wanted = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    fcntl(fd, FcntlArg::F_GET_SEALS).is_ok_and(|seals| SealFlag::from_bits_truncate(seals).contains(wanted))
}

/// Bytes that are free on the file system of `path`.
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    let stat = nix::sys::statvfs::statvfs(path).ok()?;
    Some(stat.blocks_available() * stat.fragment_size())
}

/// Maps a whole file, shared and writable.
pub(crate) fn map(file: impl AsFd, len: u64, populate: bool) -> io::Result<memmap2::MmapRaw> {
    let len = usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    let mut options = memmap2::MmapOptions::new();
    options.len(len);
    if populate {
        options.populate();
    }
    options.map_raw(file.as_fd().as_raw_fd())
}

/// 64 random bits from the kernel.
pub(crate) fn random() -> io::Result<u64> {
    use std::io::Read;
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Gives a file its mode, whatever the umask of this process is.
pub(crate) fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode))
}

/// The permission bits of an open file.
pub(crate) fn mode_of(file: &File) -> io::Result<u32> {
    Ok(file.metadata()?.mode() & 0o777)
}

/// Byte of the lock file that whoever creates, serves or removes the link has for itself.
const DUTY: libc::off_t = 0;
/// Byte of the lock file that all processes of the link share.
const PRESENCE: libc::off_t = 1;
/// Byte of the lock file that whoever sits in seat 0 has for itself; the other seats' bytes follow.
const SEATS: libc::off_t = 2;

/// The lock file of a link, with locks in it that the kernel gives up when their last descriptor is closed, however that
/// happens and in whatever pid namespace: the duty, which one has, the presence, which all share, and one for each seat.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
    path: PathBuf,
    number: u64,
}

impl Lock {
    fn of(file: File, path: &Path) -> io::Result<Self> {
        let metadata = file.metadata()?;
        // Inodes of two file systems may be the same: those of a tmpfs are counted from its beginning.
        let number = metadata.ino() ^ metadata.dev().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Ok(Self { file, path: path.to_path_buf(), number })
    }

    /// Opens the lock file. `None`: there is none.
    pub(crate) fn open(path: &Path) -> io::Result<Option<Self>> {
        match open(path, true) {
            Ok(file) => Self::of(file, path).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the lock file, and makes it where there is none.
    pub(crate) fn open_or_make(path: &Path, mode: u32) -> io::Result<Option<Self>> {
        if let Some(lock) = Self::open(path)? {
            return Ok(Some(lock));
        }
        let file = unnamed(path.parent().unwrap_or(Path::new(".")), mode)?;
        match publish(&file, path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Self::open(path),
            made => made.and_then(|()| Self::of(file, path)).map(Some),
        }
    }

    /// Whether the file still has its name: a lock on one that was removed says nothing.
    pub(crate) fn is_named(&self) -> bool {
        let inode = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        match (self.file.metadata(), std::fs::symlink_metadata(&self.path)) {
            (Ok(ours), Ok(named)) => inode(ours) == inode(named),
            _ => false,
        }
    }

    /// Takes the duty. `false`: somebody has it.
    pub(crate) fn try_take_duty(&self) -> io::Result<bool> {
        self.set(DUTY, libc::F_WRLCK)
    }

    /// Gives the duty up.
    pub(crate) fn leave_duty(&self) {
        let _ = self.set(DUTY, libc::F_UNLCK);
    }

    /// Says that this process has, or is just asking for, the descriptors of the link. `false`: the link is being removed.
    pub(crate) fn try_join(&self) -> io::Result<bool> {
        self.set(PRESENCE, libc::F_RDLCK)
    }

    /// Takes that back.
    pub(crate) fn leave(&self) {
        let _ = self.set(PRESENCE, libc::F_UNLCK);
    }

    /// Whether somebody else has joined.
    pub(crate) fn others_joined(&self) -> io::Result<bool> {
        self.is_taken(PRESENCE)
    }

    fn is_taken(&self, which: libc::off_t) -> io::Result<bool> {
        let mut lock = byte(which, libc::F_WRLCK);
        fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock))?;
        Ok(i32::from(lock.l_type) != libc::F_UNLCK)
    }

    /// Gives up everything but the seats, as closing the file would.
    pub(crate) fn release(&self) {
        self.leave();
        self.leave_duty();
    }

    /// Which lock file this is: locks in another one say nothing here, even if it has the same name.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Takes the lock of a seat. `false`: somebody has it, a child perhaps that was forked from who sat there before.
    pub(crate) fn try_take_seat(&self, seat: u8) -> io::Result<bool> {
        self.set(SEATS + libc::off_t::from(seat), libc::F_WRLCK)
    }

    /// Gives it up.
    pub(crate) fn leave_seat(&self, seat: u8) {
        let _ = self.set(SEATS + libc::off_t::from(seat), libc::F_UNLCK);
    }

    /// Whether another process, or another opening of the file in this one, has the lock of a seat.
    pub(crate) fn is_seat_taken(&self, seat: u8) -> io::Result<bool> {
        self.is_taken(SEATS + libc::off_t::from(seat))
    }

    /// Lets nobody join any more. `false`: somebody has.
    pub(crate) fn try_close(&self) -> io::Result<bool> {
        self.set(PRESENCE, libc::F_WRLCK)
    }

    fn set(&self, which: libc::off_t, kind: i32) -> io::Result<bool> {
        match fcntl(&self.file, FcntlArg::F_OFD_SETLK(&byte(which, kind))) {
            Ok(_) => Ok(true),
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn byte(which: libc::off_t, kind: i32) -> libc::flock {
    let short = |value: i32| libc::c_short::try_from(value).unwrap_or(0);
    libc::flock {
        l_type: short(kind),
        l_whence: short(libc::SEEK_SET),
        l_start: which,
        l_len: 1,
        // The kernel wants 0 for locks that belong to the open file and not to the process.
        l_pid: 0,
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn one_has_the_duty_and_all_share_the_presence() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = dir.path().join("link.lock");
        assert!(Lock::open(&path).unwrap().is_none());
        let a = Lock::open_or_make(&path, 0o640).unwrap().unwrap();
        let b = Lock::open_or_make(&path, 0o600).unwrap().unwrap();
        assert_eq!(mode_of(&b.file).unwrap(), 0o640, "the first one's");

        assert!(a.try_take_duty().unwrap() && a.try_take_duty().unwrap() && !b.try_take_duty().unwrap());
        a.leave_duty();
        assert!(b.try_take_duty().unwrap());

        assert!(a.try_join().unwrap() && !a.others_joined().unwrap() && b.others_joined().unwrap());
        assert!(b.try_join().unwrap() && a.others_joined().unwrap() && !a.try_close().unwrap());
        b.leave();
        assert!(a.try_close().unwrap() && !b.try_join().unwrap() && b.others_joined().unwrap());
        assert!(a.try_take_seat(7).unwrap() && b.is_seat_taken(7).unwrap() && !b.try_take_seat(7).unwrap());
        assert!(!b.is_seat_taken(6).unwrap() && b.try_take_seat(6).unwrap());
        a.leave_seat(7);
        assert!(!b.is_seat_taken(7).unwrap() && a.try_take_seat(7).unwrap());
        drop(a);
        assert!(!b.is_seat_taken(7).unwrap(), "closing the file gives its locks up");
        assert!(b.try_join().unwrap(), "closing the file gives its locks up");

        assert!(b.is_named());
        std::fs::remove_file(&path).unwrap();
        assert!(!b.is_named());
        let c = Lock::open_or_make(&path, 0o600).unwrap().unwrap();
        assert!(!b.is_named() && c.is_named() && c.try_take_duty().unwrap());
    }
}
