//! Opening files of the IPC directory with group bits, mark and lease: the opener's and the creator's part of
//! `shmesh_sys::lease`, without an allocation.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicUsize, Ordering};

use shmesh_sys::lease::{self, BYTES, EXECUTE, MARK, PATIENCE, PAUSE, is_marked, marked};

use crate::path::{Text, split};
use crate::settings::PosixSettings;
use crate::sys::{self, CallResult, Fd};

/// The owner may write: otherwise no collector can open the file.
const OWNER_WRITES: u32 = 0o200;

/// Whether a file with these bits may have the mark: it is no program, and a collector can open it.
pub(crate) fn can_be_marked(mode: u32) -> bool {
    mode & EXECUTE == 0 && mode & OWNER_WRITES != 0
}

/// The rounds of a call whose file comes and goes, or is in the hands of a collector: bounded by time, because a collector may be
/// off its processor.
pub(crate) struct Rounds {
    end: Option<(i64, i64)>,
}

impl Rounds {
    pub(crate) const fn new() -> Self {
        Self { end: None }
    }

    /// Pauses before another round. `false`: timed out.
    pub(crate) fn go_on(&mut self) -> bool {
        let now = sys::clock(libc::CLOCK_MONOTONIC);
        match self.end {
            None => {
                let seconds = i64::try_from(PATIENCE.as_secs()).unwrap_or(0);
                self.end = Some((now.0.saturating_add(seconds), now.1));
                sys::yield_now();
                true
            }
            Some(end) if now >= end => false,
            Some(_) => {
                sys::pause(PAUSE);
                true
            }
        }
    }
}

/// The properties of a file that is created because it does not exist.
pub(crate) struct Creation<'c> {
    /// The permission bits that the program asks for.
    pub(crate) mode: u32,
    /// Whether it is marked: memory, and not a file for a later reader.
    pub(crate) is_marked: bool,
    /// Fills the file before it has its name.
    pub(crate) fill: &'c dyn Fn(&Fd) -> CallResult<()>,
}

/// Opens or creates a file as `open(2)` does. `None`: the name is a link that leads nowhere, which the C library follows; never with
/// `O_NOFOLLOW`.
pub(crate) fn open(
    settings: &PosixSettings,
    path: &CStr,
    flags: c_int,
    creation: &Creation,
) -> Option<CallResult<Fd>> {
    let (creates, is_exclusive) = (flags & libc::O_CREAT != 0, flags & libc::O_EXCL != 0);
    let reads = flags & libc::O_ACCMODE == libc::O_RDONLY;
    let mut rounds = Rounds::new();
    loop {
        let mut found = Err(libc::ENOENT);
        if !(creates && is_exclusive) {
            found = open_existing(path, flags & !(libc::O_CREAT | libc::O_EXCL));
        }
        match found {
            // The kernel opens no directory for a call that might make a file, nor one for writing.
            Ok(Some(fd)) if creates && reads && is_directory(&fd) => return Some(Err(libc::EISDIR)),
            Ok(Some(fd)) => return Some(Ok(fd)),
            Err(libc::ENOENT) if creates => match create(settings, path, flags, creation) {
                // A link that leads nowhere: the C library makes the file that it leads to.
                Err(libc::EEXIST) if !is_exclusive && flags & libc::O_NOFOLLOW == 0 && is_link(path) => {
                    return None;
                }
                Err(libc::EEXIST) if !is_exclusive => {}
                // A collector took the file before it had its lease and its name.
                Err(libc::ENOENT) if sys::stat(dir_of(path).c_str().ok()?).is_ok() => {}
                done => return Some(done),
            },
            // A collector has a kernel lease on it.
            Err(libc::EAGAIN) if flags & libc::O_NONBLOCK != 0 => {}
            Err(error) => return Some(Err(error)),
            Ok(None) => {}
        }
        if !rounds.go_on() {
            return Some(Err(libc::EAGAIN));
        }
    }
}

fn is_directory(fd: &Fd) -> bool {
    sys::fstat(fd.raw()).is_ok_and(|found| found.st_mode & libc::S_IFMT == libc::S_IFDIR)
}

fn is_link(path: &CStr) -> bool {
    sys::lstat(path).is_ok_and(|found| found.st_mode & libc::S_IFMT == libc::S_IFLNK)
}

fn dir_of(path: &CStr) -> Text {
    Text::of(&[split(path.to_bytes()).map_or(&b"/"[..], |(dir, _)| dir)])
}

/// Opens an existing file, with a lease if it is marked. `None`: a collector was faster, or is about to be.
pub(crate) fn open_existing(path: &CStr, flags: c_int) -> CallResult<Option<Fd>> {
    let fd = sys::open(path, flags, 0)?;
    let Ok(found) = sys::fstat(fd.raw()) else { return Ok(Some(fd)) };
    if !is_marked(found.st_mode) {
        return Ok(Some(fd));
    }
    let is_there = || {
        // Cheaper than its path. With one name before and after the lease was taken, and no change, which a collector that
        // moves it aside would be, it has the same name.
        let state = |now: &libc::stat| (now.st_nlink, now.st_ctime, now.st_ctime_nsec);
        if found.st_nlink == 1 && sys::fstat(fd.raw()).is_ok_and(|now| state(&now) == state(&found)) {
            return true;
        }
        let there = if flags & libc::O_NOFOLLOW == 0 { sys::stat(path) } else { sys::lstat(path) };
        there.is_ok_and(|there| (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino))
    };
    let is_usable = take(fd.raw()) && is_there();
    Ok(is_usable.then_some(fd))
}

/// Takes a lease for a file that the C library has opened, if it is a marked one of the IPC directory: a path may lead there in ways
/// that are not seen in it. `false`: a collector has removed the file meanwhile.
pub(crate) fn take_if_here(settings: &PosixSettings, fd: c_int) -> bool {
    let mut rounds = Rounds::new();
    loop {
        let Ok(found) = sys::fstat(fd) else { return true };
        if found.st_dev != settings.device || !is_marked(found.st_mode) || found.st_nlink == 0 {
            return true;
        }
        if take(fd) {
            return sys::fstat(fd).is_ok_and(|now| now.st_nlink > 0);
        }
        if !rounds.go_on() {
            return true;
        }
    }
}

/// Takes a lease for an open marked file. `false`: a collector has the file.
fn take(fd: c_int) -> bool {
    match sys::lock(fd, BYTES.start, 1, libc::F_RDLCK) {
        // Open for writing only.
        Err(libc::EBADF) => {
            let mut bytes = lease::exclusive_bytes(sys::pid().unsigned_abs(), fd);
            bytes.any(|at| sys::lock(fd, at, 1, libc::F_WRLCK) == Ok(true))
        }
        // No locks here: as without this library.
        Err(_) => true,
        Ok(is_taken) => is_taken,
    }
}

/// Makes a file under a name of its own, gives it mode, content and lease, and then the name that the program asks for. So no
/// other process sees it before it is complete, and a process that is killed on the way leaves a stale file.
fn create(settings: &PosixSettings, path: &CStr, flags: c_int, creation: &Creation) -> CallResult<Fd> {
    let (dir, _) = split(path.to_bytes()).ok_or(libc::ENOENT)?;
    // Marked meanwhile in any case, so that it is stale if this process is killed.
    let mode = if creation.is_marked { marked(creation.mode) } else { creation.mode & 0o777 | MARK };
    let (fd, made) = create_aside(dir, flags, mode | OWNER_WRITES)?;
    let named = complete(settings, &fd, creation).and_then(|()| give_name(made.c_str()?, path));
    if let Err(error) = named {
        if error != libc::ENOENT {
            let _ = sys::unlink(made.c_str()?);
        }
        return Err(error);
    }
    Ok(fd)
}

/// Gives a complete file the name that the program asks for, unless that is taken (`EEXIST`).
fn give_name(made: &CStr, path: &CStr) -> CallResult<()> {
    match sys::rename_new(made, path) {
        // Not on this file system, or not in this sandbox.
        Err(libc::EINVAL | libc::ENOSYS | libc::EPERM) => {
            sys::link(made, path)?;
            sys::unlink(made)
        }
        done => done,
    }
}

fn create_aside(dir: &[u8], flags: c_int, mode: u32) -> CallResult<(Fd, Text)> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let flags = flags & !(libc::O_TRUNC | libc::O_NOFOLLOW) | libc::O_CREAT | libc::O_EXCL;
    loop {
        // Processes of two pid namespaces may have the same number, and O_EXCL finds the rest.
        let (seconds, nanoseconds) = sys::clock(libc::CLOCK_MONOTONIC);
        let number = u64::from(sys::pid().unsigned_abs()) << 40
            ^ seconds.cast_unsigned() << 30
            ^ nanoseconds.cast_unsigned()
            ^ (COUNT.fetch_add(1, Ordering::Relaxed) as u64) << 50;
        let mut name = Text::of(&[dir, b"/.shmesh-new-"]);
        name.push_hex(number, 16);
        match sys::open(name.c_str()?, flags, mode) {
            Err(libc::EEXIST) => {}
            done => return Ok((done?, name)),
        }
    }
}

fn complete(settings: &PosixSettings, fd: &Fd, creation: &Creation) -> CallResult<()> {
    let made = sys::fstat(fd.raw())?;
    // The requested bits that the umask has left.
    let asked = made.st_mode & creation.mode & 0o777;
    let is_marked = creation.is_marked && asked & OWNER_WRITES != 0;
    let mode = with_group(settings, &made, asked);
    let mode = if is_marked { marked(mode) } else { mode };
    if is_marked && sys::lock(fd.raw(), BYTES.start, 1, libc::F_RDLCK) == Ok(false) {
        // A collector has the file and removes its name.
        return Err(libc::ENOENT);
    }
    (creation.fill)(fd)?;
    if made.st_mode & 0o7777 != mode { sys::fchmod(fd.raw(), mode) } else { Ok(()) }
}

/// The permission bits with the owner's for the group too, if that is the group of the IPC directory.
pub(crate) fn with_group(settings: &PosixSettings, file: &libc::stat, mode: u32) -> u32 {
    if file.st_gid == settings.group { mode | (mode & 0o600) >> 3 } else { mode }
}

/// The permission bits for a `chmod` of a program: in the IPC directory with the owner's bits for the group, and still marked if the file was and can be.
/// A file whose path is not known is one of the directory if it is marked.
pub(crate) fn changed_mode(
    settings: &PosixSettings,
    file: &libc::stat,
    mode: u32,
    is_below: bool,
) -> Option<u32> {
    let was_marked = is_marked(file.st_mode);
    let is_here = file.st_dev == settings.device && file.st_mode & libc::S_IFMT == libc::S_IFREG;
    (is_here && (was_marked || is_below)).then(|| {
        let mode = with_group(settings, file, mode);
        if was_marked && can_be_marked(mode) { marked(mode) } else { mode }
    })
}
