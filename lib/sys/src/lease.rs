//! Leases of shared-memory files: whether any process uses a file of an IPC directory, whatever its user and pid namespace.
//!
//! A **marked** file has the sticky bit and no execute bits: [`MARK`]. The kernel gives that bit no meaning on a regular file, and
//! sets it at creation, so a file has its mark as soon as it has a name. Each opening of a marked file takes a **lease**: an OFD lock
//! on a byte far beyond any content. The lock belongs to the open file description, so it lasts as long as any descriptor *or
//! mapping* that was made from it: `fork` and `SCM_RIGHTS` share it, `close` after `mmap` keeps it, and the kernel releases it with
//! the last process that has it, however that process ends.
//!
//! | process | does |
//! |---|---|
//! | creator | makes the file without a name, marks it, locks a byte of [`BYTES`], then names it |
//! | opener | opens it, locks a byte, and opens again if the file has lost its name or all of `BYTES` is locked |
//! | collector | locks all of `BYTES` exclusively, checks that the name is still this file's, removes the name, unlocks |
//!
//! So a collector never removes the name of a file between the `open` and the lock of another process: either the collector's lock
//! fails, or the opener sees that the name is gone and opens again. `docs/unmodified-programs.md` has the protocol in full.

use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};

use crate::errno::Errno;
use crate::file;

/// The sticky bit, which marks a regular file without execute bits as one whose users take leases.
pub const MARK: u32 = libc::S_ISVTX;
/// The bytes that leases lock: the first one is shared by all who may read, an opening that may only write has one of the others.
pub const BYTES: Range<u64> = 1 << 62..(1 << 62) + (1 << 31);
/// The bytes of [`BYTES`] that no lease locks. Kinds of files use them for other locks, such as attachments of System V segments.
pub const ATTACHMENTS: Range<u64> = BYTES.end - (1 << 24)..BYTES.end;

/// Bits that a marked file does not have, so that `chmod -R 1777` on a directory marks nothing.
pub const EXECUTE: u32 = 0o111;
/// How long an opener waits for a collector, which has a file for a few system calls, but may be off its processor between them.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// The pause of an opener between two attempts while a collector has the file.
pub const PAUSE: Duration = Duration::from_millis(1);
/// The operation of `fcntl` that chooses the signal of a file lease; the crate `libc` lacks it. The same on all Linux machines.
const F_SETSIG: i32 = 10;
/// Bytes that an opening for writing alone tries to lock before it fails.
const MAX_BYTES_TRIED: u64 = 64;

/// The permission bits of a marked file, for those that a program asks for.
#[must_use]
pub const fn marked(mode: u32) -> u32 {
    (mode & 0o666) | MARK
}

/// Whether `st_mode` belongs to a marked file.
#[must_use]
pub const fn is_marked(st_mode: u32) -> bool {
    st_mode & libc::S_IFMT == libc::S_IFREG && st_mode & (MARK | EXECUTE) == MARK
}

/// Takes a lease for an open file. It lasts until the last descriptor and mapping of this opening are gone. `false`: a collector
/// has the file, and is about to remove its name.
///
/// # Errors
/// The error of `fcntl(F_OFD_SETLK)`.
pub fn take(fd: &impl AsFd) -> io::Result<bool> {
    match lock(fd, BYTES.start, libc::F_RDLCK) {
        Err(Errno::EBADF) => take_to_write(fd),
        taken => Ok(taken?),
    }
}

/// An opening that may not read cannot share a lock, so it has a byte of its own.
fn take_to_write(fd: &impl AsFd) -> io::Result<bool> {
    for at in exclusive_bytes(std::process::id(), fd.as_fd().as_raw_fd()) {
        if lock(fd, at, libc::F_WRLCK)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The bytes that an opening for writing alone tries to lock, in this order: any will do, as long as two openings rarely begin with
/// the same one.
pub fn exclusive_bytes(process: u32, fd: RawFd) -> impl Iterator<Item = u64> {
    let others = const { ATTACHMENTS.start - BYTES.start - 1 };
    let start = u64::from(process) << 8 | u64::from(fd.unsigned_abs() & 0xFF);
    (start..start + MAX_BYTES_TRIED).map(move |at| BYTES.start + 1 + at % others)
}

fn lock(fd: &impl AsFd, at: u64, kind: i32) -> Result<bool, Errno> {
    match fcntl(fd, FcntlArg::F_OFD_SETLK(&file::lock_of(&(at..at + 1), kind))) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Whether an opening of the file other than this one has a lease.
///
/// # Errors
/// The error of `fcntl(F_OFD_GETLK)`.
pub fn is_leased(file: &impl AsFd) -> io::Result<bool> {
    Ok(file::locked_from(file, &BYTES)?.is_some())
}

/// Makes a marked file of `bytes` reserved bytes with a lease, which must not exist yet. It has its name last: no process sees
/// it without its mode, size, mark or lease.
///
/// # Errors
/// The name is taken (`AlreadyExists`); no room; what `open(2)` says.
pub fn create(path: &Path, mode: u32, bytes: u64) -> io::Result<File> {
    let dir = path.parent().filter(|dir| *dir != OsStr::new("")).unwrap_or(Path::new("."));
    let created = file::unnamed(dir, marked(mode))?;
    if bytes > 0 {
        file::reserve(&created, bytes)?;
    }
    if !take(&created)? {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    file::publish(&created, path)?;
    Ok(created)
}

/// Opens a file, with a lease if it is marked. Symbolic links are refused.
///
/// # Errors
/// The error of `open(2)`; `WouldBlock` if a process keeps the bytes of leases locked for [`PATIENCE`], which no collector does.
pub fn open(path: &Path, write: bool) -> io::Result<File> {
    let start = Instant::now();
    loop {
        if let Some(opened) = open_once(path, write)? {
            return Ok(opened);
        }
        if start.elapsed() >= PATIENCE {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        std::thread::sleep(PAUSE);
    }
}

/// `None`: a collector has the file, or its name was given to another file meanwhile.
fn open_once(path: &Path, write: bool) -> io::Result<Option<File>> {
    let opened = match file::open(path, write) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        opened => opened?,
    };
    let is_usable = !is_marked(opened.metadata()?.mode()) || take_at(path, &opened)?;
    Ok(is_usable.then_some(opened))
}

/// As [`take`], and the name is still this file's. Whether the file has any name would not do: another may be left to it.
fn take_at(path: &Path, opened: &File) -> io::Result<bool> {
    Ok(take(opened)? && same_file(&std::fs::symlink_metadata(path)?, &opened.metadata()?))
}

/// The result of [`remove_unused`] for a name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Removal {
    /// The name is gone, and so many bytes of memory are free.
    Removed {
        /// Bytes that the file had allocated.
        bytes: u64,
    },
    /// The file is not marked, and stays.
    Unmarked,
    /// A process has a lease, so the file stays.
    Leased,
    /// A process without a lease has the file open or mapped, so it stays. Only the owner of a file and root can detect this.
    Open,
    /// The name went away or became another file's.
    Gone,
}

/// Removes the name of a marked file that no process has a lease of. Symbolic links are not followed.
///
/// # Errors
/// This user may not open the file for writing, or may not remove its name.
pub fn remove_unused(path: &Path) -> io::Result<Removal> {
    match remove_named(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Removal::Gone),
        // Another collector has the file.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Removal::Leased),
        removal => removal,
    }
}

fn remove_named(path: &Path) -> io::Result<Removal> {
    // Before it is opened: opening another program's file may have effects.
    if !is_marked(std::fs::symlink_metadata(path)?.mode()) {
        return Ok(Removal::Unmarked);
    }
    let flags = libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    let found = opened.metadata()?;
    if !is_marked(found.mode()) {
        return Ok(Removal::Unmarked);
    }
    if !file::try_lock_range(&opened, &BYTES)? {
        return Ok(Removal::Leased);
    }
    if is_open_elsewhere(&opened) {
        return Ok(Removal::Open);
    }
    // Processes that open it from here on cannot take a lease, so they open the name again when it is gone.
    let is_it = |path: &Path| std::fs::symlink_metadata(path).is_ok_and(|there| same_file(&there, &found));
    let removed = file::remove_exactly(path, is_it)?;
    Ok(if removed { Removal::Removed { bytes: found.blocks() * 512 } } else { Removal::Gone })
}

fn same_file(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Whether another opening of this file exists, with or without a lease, in whatever namespaces: the kernel gives a write lease
/// (`F_SETLEASE`, which is something else than a lease here) only for the one opening of a file. `false` where this user may not ask.
#[expect(unsafe_code, reason = "nix has no F_SETLEASE")]
fn is_open_elsewhere(file: &File) -> bool {
    let fd = file.as_raw_fd();
    // A process that opens the file while we have the lease would send us a SIGIO, which ends a program that does not expect it;
    // a SIGURG does nothing.
    // SAFETY: the descriptor is open and numbers go in.
    unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) };
    // SAFETY: as above.
    if unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) } == -1 {
        return Errno::last() == Errno::EAGAIN;
    }
    // SAFETY: as above.
    unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
    false
}

/// Locks all bytes of leases, as a collector does, for as long as the result lives. `None`: a process has a lease.
///
/// # Errors
/// The error of `fcntl(F_OFD_SETLK)`.
pub fn try_claim(file: File) -> io::Result<Option<File>> {
    let claim = file::try_lock_range(&file, &BYTES)?;
    Ok(claim.then_some(file))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn dir() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    /// A process with this opening of a file as its input.
    fn holder(file: File) -> Child {
        Command::new("sleep").arg("1000").stdin(Stdio::from(file)).spawn().unwrap()
    }

    /// Polls: a process that another test is starting has copies of this one's descriptors until its `exec`.
    #[track_caller]
    fn until<T>(what: &str, mut so: impl FnMut() -> Option<T>) -> T {
        for _ in 0..60_000 {
            match so() {
                Some(found) => return found,
                None => std::thread::sleep(PAUSE),
            }
        }
        panic!("still not true: {what}")
    }

    /// The bytes that the removal of a stale file frees.
    #[track_caller]
    fn removed(path: &Path) -> u64 {
        until("the file is removed", || match remove_unused(path).unwrap() {
            Removal::Removed { bytes } => Some(bytes),
            Removal::Leased | Removal::Open => None,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn mark_is_the_sticky_bit_of_a_regular_file_without_execute_bits() {
        for (mode, expected) in
            [(0o101_660, true), (0o101_000, true), (0o100_660, false), (0o101_777, false), (0o041_666, false)]
        {
            assert_eq!(is_marked(mode), expected, "{mode:o}");
        }
        assert_eq!(marked(0o777), 0o1666);
    }

    #[test]
    fn created_file_has_mode_size_mark_and_lease() {
        let dir = dir();
        let path = dir.path().join("a");
        let file = create(&path, 0o660, 8192).unwrap();
        let found = std::fs::metadata(&path).unwrap();
        assert_eq!((found.mode() & 0o7777, found.len(), found.blocks() * 512), (0o1660, 8192, 8192));
        assert!(is_leased(&file::open(&path, false).unwrap()).unwrap());
        assert_eq!(create(&path, 0o660, 0).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        drop(file);
        until("no lease is left", || (!is_leased(&file::open(&path, false).unwrap()).unwrap()).then_some(()));
    }

    #[test]
    fn mapping_keeps_the_lease_after_the_descriptor_is_closed() {
        let dir = dir();
        let path = dir.path().join("a");
        let file = create(&path, 0o660, 4096).unwrap();
        let mapping = file::map(&file, 4096, false).unwrap();
        drop(file);
        assert_eq!(remove_unused(&path).unwrap(), Removal::Leased);
        drop(mapping);
        assert_eq!(removed(&path), 4096);
        assert!(!path.exists());
    }

    #[test]
    fn lease_ends_with_the_last_process_that_inherited_it() {
        let dir = dir();
        let path = dir.path().join("a");
        let mut child = holder(create(&path, 0o660, 4096).unwrap());
        assert_eq!(remove_unused(&path).unwrap(), Removal::Leased);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(removed(&path), 4096);
        assert_eq!(remove_unused(&path).unwrap(), Removal::Gone);
    }

    #[test]
    fn writers_that_may_not_read_have_leases_of_their_own() {
        let dir = dir();
        let path = dir.path().join("a");
        drop(create(&path, 0o660, 1).unwrap());
        let write = || OpenOptions::new().write(true).open(&path).unwrap();
        let (one, other) = (write(), write());
        assert!(take(&one).unwrap() && take(&other).unwrap());
        drop(one);
        assert_eq!(remove_unused(&path).unwrap(), Removal::Leased);
        drop(other);
        removed(&path);
    }

    #[test]
    fn unmarked_files_and_links_to_marked_ones_stay() {
        let dir = dir();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("plain"), "x").unwrap();
        std::fs::write(path("everything"), "x").unwrap();
        let all = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
        std::fs::set_permissions(path("everything"), all).unwrap();
        drop(create(&path("marked"), 0o600, 1).unwrap());
        std::os::unix::fs::symlink("marked", path("link")).unwrap();
        for name in ["plain", "everything", "link"] {
            assert_eq!(remove_unused(&path(name)).unwrap(), Removal::Unmarked, "{name}");
        }
        assert!(path("marked").exists());
    }

    #[test]
    fn file_that_is_open_without_a_lease_stays() {
        let dir = dir();
        let path = dir.path().join("a");
        drop(create(&path, 0o600, 4096).unwrap());
        let reader = File::open(&path).unwrap();
        let mapping = file::map(&reader, 4096, false);
        // A process that another test is starting has a copy of the lease until its `exec`.
        let removal = until("only the opening without a lease is left", || {
            Some(remove_unused(&path).unwrap()).filter(|removal| *removal != Removal::Leased)
        });
        assert_eq!(removal, Removal::Open);
        drop((reader, mapping));
        removed(&path);
    }

    #[test]
    fn opener_does_not_get_a_file_that_a_collector_is_about_to_remove() {
        let dir = dir();
        let path = dir.path().join("a");
        drop(create(&path, 0o660, 1).unwrap());
        let claim = until("no lease is left", || try_claim(file::open(&path, true).unwrap()).unwrap());
        std::thread::scope(|scope| {
            let opener = scope.spawn(|| open(&path, true));
            // A collector that is off its processor for a while.
            std::thread::sleep(PAUSE * 200);
            assert!(!opener.is_finished());
            std::fs::remove_file(&path).unwrap();
            drop(claim);
            assert_eq!(opener.join().unwrap().unwrap_err().kind(), io::ErrorKind::NotFound);
        });
    }

    #[test]
    fn opener_sees_that_the_name_is_another_files_though_its_own_has_a_second_name() {
        let dir = dir();
        let path = dir.path().join("a");
        drop(create(&path, 0o660, 1).unwrap());
        std::fs::hard_link(&path, dir.path().join("link")).unwrap();
        let opened = file::open(&path, true).unwrap();
        assert!(take_at(&path, &opened).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert_eq!(take_at(&path, &opened).unwrap_err().kind(), io::ErrorKind::NotFound);
        let _other = create(&path, 0o660, 1).unwrap();
        assert!(!take_at(&path, &opened).unwrap());
    }

    /// Each opener must find that the file it has a lease of is still the one at the name.
    #[test]
    fn collector_never_removes_a_file_in_use() {
        let dir = dir();
        let path = dir.path().join("a");
        let (done, removed) = (AtomicBool::new(false), Mutex::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // One that may not ask the kernel for other openings.
                while !done.load(Ordering::Relaxed) {
                    if let Ok(found) = file::open(&path, true)
                        && let Some(_claim) = try_claim(found).unwrap()
                        && std::fs::remove_file(&path).is_ok()
                    {
                        *removed.lock().unwrap() += 1;
                    }
                }
            });
            let users: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let mut used = 0;
                        // More rounds where the collector got no turn between them.
                        while used < 1000 || *removed.lock().unwrap() < 100 {
                            let file = match create(&path, 0o660, 1) {
                                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                                    match open(&path, true) {
                                        Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                                        opened => opened.unwrap(),
                                    }
                                }
                                created => created.unwrap(),
                            };
                            assert_eq!(file.metadata().unwrap().nlink(), 1);
                            let there = std::fs::symlink_metadata(&path).unwrap();
                            assert!(same_file(&there, &file.metadata().unwrap()));
                            used += 1;
                        }
                    })
                })
                .collect();
            let ended: Vec<_> = users.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            done.store(true, Ordering::Relaxed);
            assert!(ended.iter().all(Result::is_ok));
        });
    }

    #[test]
    fn names_of_the_greatest_length_are_removed() {
        let dir = dir();
        let path = dir.path().join("n".repeat(255));
        drop(create(&path, 0o600, 1).unwrap());
        removed(&path);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
