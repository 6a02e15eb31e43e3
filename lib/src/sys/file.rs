//! Files that hold segments: named ones on tmpfs, and memfds.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::{AT_FDCWD, AtFlags, FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// A file without a name in `dir`, for [`publish`]: it disappears with us unless it is finished.
pub(crate) fn unnamed(dir: &Path, mode: u32) -> io::Result<File> {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .mode(mode)
        .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
        .open(dir)?;
    // The process's umask must not decide who can attach.
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode))?;
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
pub(crate) fn reserve(file: &File, len: u64) -> io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, len) {
            Err(nix::errno::Errno::EINTR) => {}
            done => return done.map_err(Into::into),
        }
    }
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

/// An exclusive lock that the kernel gives up when its last descriptor is closed, however that happens.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "held for its lock")] nix::fcntl::Flock<File>);

impl Lock {
    /// Takes the lock on `path`, which is created when missing. `None`: somebody has it.
    pub(crate) fn try_take(path: &Path, mode: u32) -> io::Result<Option<Self>> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(mode)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
            .open(path)?;
        let inode = file.metadata()?.ino();
        let lock = match nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => return Ok(None),
            Err((_, errno)) => return Err(errno.into()),
        };
        // The last holder may have removed the file between our opening and our locking it.
        match std::fs::symlink_metadata(path) {
            Ok(now) if now.ino() == inode => Ok(Some(Self(lock))),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}
