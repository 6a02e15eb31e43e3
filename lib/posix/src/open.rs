//! Opening files of the IPC directory with group bits, mark and lease: the opener's and the creator's part of
//! `shmesh_sys::lease`, without an allocation.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicUsize, Ordering};

use shmesh_sys::lease::{ATTACHMENTS, BYTES, MARK, is_marked, marked};

use crate::path::{Text, split};
use crate::settings::Settings;
use crate::sys::{self, Answer, Fd};

/// Rounds of opening a name that comes and goes; then the C library has the last word.
const MAX_ROUNDS: u32 = 64;

/// How a file is made if it does not exist.
pub(crate) struct Creation<'c> {
    /// The permission bits that the program asks for.
    pub(crate) mode: u32,
    /// Whether it is marked: memory, and not a file for a later reader.
    pub(crate) is_marked: bool,
    /// Fills the file before it has its name.
    pub(crate) fill: &'c dyn Fn(&Fd) -> Answer<()>,
}

/// Opens or creates a file as `open(2)` does. `None`: after many rounds it is still not clear whether it exists.
pub(crate) fn open(
    settings: &Settings,
    path: &CStr,
    flags: c_int,
    creation: &Creation,
) -> Option<Answer<Fd>> {
    let (creates, is_exclusive) = (flags & libc::O_CREAT != 0, flags & libc::O_EXCL != 0);
    for round in 0..MAX_ROUNDS {
        if !(creates && is_exclusive) {
            match open_existing(path, flags & !(libc::O_CREAT | libc::O_EXCL)) {
                Ok(Some(fd)) => return Some(Ok(fd)),
                Err(libc::ENOENT) if creates => {}
                // A collector has a kernel lease on it.
                Err(libc::EAGAIN) if flags & libc::O_NONBLOCK != 0 => {
                    sys::pause_a_millisecond();
                    continue;
                }
                Err(error) => return Some(Err(error)),
                Ok(None) => {
                    if round > 0 {
                        sys::pause_a_millisecond();
                    }
                    continue;
                }
            }
        }
        match create(settings, path, flags, creation) {
            // A link that leads nowhere: the C library makes the file that it leads to.
            Err(libc::EEXIST) if !is_exclusive && is_link(path) => return None,
            Err(libc::EEXIST) if !is_exclusive => {}
            // A collector took the file before it had its lease and its name.
            Err(libc::ENOENT) if sys::stat(dir_of(path).c_str().ok()?).is_ok() => {}
            done => return Some(done),
        }
    }
    None
}

fn is_link(path: &CStr) -> bool {
    sys::lstat(path).is_ok_and(|found| found.st_mode & libc::S_IFMT == libc::S_IFLNK)
}

fn dir_of(path: &CStr) -> Text {
    Text::of(&[split(path.to_bytes()).map_or(&b"/"[..], |(dir, _)| dir)])
}

/// Opens an existing file, with a lease if it is marked. `None`: a collector was faster, or is about to be.
pub(crate) fn open_existing(path: &CStr, flags: c_int) -> Answer<Option<Fd>> {
    let fd = sys::open(path, flags, 0)?;
    Ok(take(fd.raw()).then_some(fd))
}

/// Takes a lease for an open file if it is marked. `false`: the file is as good as removed.
fn take(fd: c_int) -> bool {
    let Ok(found) = sys::fstat(fd) else { return true };
    if !is_marked(found.st_mode) {
        return true;
    }
    match sys::lock(fd, BYTES.start, 1, libc::F_RDLCK) {
        Ok(false) => return false,
        Ok(true) => {}
        // Open for writing only.
        Err(libc::EBADF) => {
            let start = u64::from(sys::pid().unsigned_abs()) << 8 | u64::from(fd.unsigned_abs() & 0xFF);
            let others = ATTACHMENTS.start.saturating_sub(BYTES.start).saturating_sub(1);
            let free = |step: u64| {
                let at = start.wrapping_add(step).checked_rem(others).unwrap_or(0);
                sys::lock(fd, BYTES.start.saturating_add(1).saturating_add(at), 1, libc::F_WRLCK) == Ok(true)
            };
            if !(0..64).any(free) {
                return false;
            }
        }
        // No locks here: as without this library.
        Err(_) => return true,
    }
    sys::fstat(fd).is_ok_and(|found| found.st_nlink > 0)
}

/// Makes a file under a name of its own, gives it mode, content and lease, and then the name that the program asks for. So no
/// other process sees it before it is complete, and a process that is killed on the way leaves a stale file.
fn create(settings: &Settings, path: &CStr, flags: c_int, creation: &Creation) -> Answer<Fd> {
    let (dir, _) = split(path.to_bytes()).ok_or(libc::ENOENT)?;
    // Marked meanwhile in any case, so that it is stale if this process is killed.
    let mode = if creation.is_marked { marked(creation.mode) } else { creation.mode & 0o777 | MARK };
    let (fd, made) = create_aside(dir, flags, mode)?;
    let named = complete(settings, &fd, creation).and_then(|()| sys::rename_new(made.c_str()?, path));
    if let Err(error) = named {
        if error != libc::ENOENT {
            let _ = sys::unlink(made.c_str()?);
        }
        return Err(error);
    }
    Ok(fd)
}

fn create_aside(dir: &[u8], flags: c_int, mode: u32) -> Answer<(Fd, Text)> {
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

fn complete(settings: &Settings, fd: &Fd, creation: &Creation) -> Answer<()> {
    let made = sys::fstat(fd.raw())?;
    let mark = if creation.is_marked { MARK } else { 0 };
    let mode = with_group(settings, &made, made.st_mode & 0o777) | mark;
    if creation.is_marked && sys::lock(fd.raw(), BYTES.start, 1, libc::F_RDLCK) == Ok(false) {
        // A collector is at it; its name goes away.
        return Err(libc::ENOENT);
    }
    (creation.fill)(fd)?;
    if made.st_mode & 0o7777 != mode { sys::fchmod(fd.raw(), mode) } else { Ok(()) }
}

/// The permission bits with the owner's for the group too, if that is the group of the IPC directory.
pub(crate) fn with_group(settings: &Settings, file: &libc::stat, mode: u32) -> u32 {
    if file.st_gid == settings.group { mode | (mode & 0o600) >> 3 } else { mode }
}

/// The bits that a program gives a file of the IPC directory: with those of the group, and still marked if it was.
pub(crate) fn changed_mode(settings: &Settings, file: &libc::stat, mode: u32) -> Option<u32> {
    let is_here = file.st_dev == settings.device && file.st_mode & libc::S_IFMT == libc::S_IFREG;
    is_here.then(|| {
        let mode = with_group(settings, file, mode);
        if is_marked(file.st_mode) { marked(mode) } else { mode }
    })
}
