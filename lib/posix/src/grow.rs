//! Sizes of files: reserved when they are set, so that a full file system is `ENOSPC` and not a bus error later.

use std::ffi::c_int;

use shmesh_sys::lease::is_marked;

use crate::path::Text;
use crate::settings::PosixSettings;
use crate::sys::{self, CallResult};

/// Growth for which the memory limit of the container is read: smaller ones must be cheap.
const LARGE: u64 = 1 << 20;

/// Sets the size of a file of the IPC directory, if that makes it larger. `None`: the C library's function does it.
pub(crate) fn grow(settings: &PosixSettings, fd: c_int, len: i64) -> Option<CallResult<()>> {
    let found = sys::fstat(fd).ok()?;
    let is_regular = found.st_mode & libc::S_IFMT == libc::S_IFREG;
    // A sparse file elsewhere is what its program wants; so is one on a disk, which is no memory.
    if !is_regular || len <= found.st_size || !settings.is_tmpfs || !is_here(settings, fd, &found) {
        return None;
    }
    match reserve(settings, fd, &found, len) {
        Err(error @ (libc::ENOSPC | libc::EFBIG)) => Some(Err(error)),
        // The descriptor is read-only, or the file system cannot reserve: as without this library.
        Err(_) => None,
        Ok(()) => Some(Ok(())),
    }
}

/// Whether an open file is one of the IPC directory, and not only of its file system.
fn is_here(settings: &PosixSettings, fd: c_int, found: &libc::stat) -> bool {
    let is_below = || sys::path_of(fd).is_ok_and(|path| settings.has_below(path.as_bytes()));
    found.st_dev == settings.device && (is_marked(found.st_mode) || is_below())
}

/// Reserves the bytes of a file from its size, as `found`, to a larger one.
pub(crate) fn reserve(settings: &PosixSettings, fd: c_int, found: &libc::stat, to: i64) -> CallResult<()> {
    let growth = to.saturating_sub(found.st_size);
    // Pages behind the end, which `fallocate(2)` can reserve, are there already.
    let missing = whole_pages(to).saturating_sub(bytes_of(found));
    if lacks_room(settings, whole_pages(growth).min(missing)) {
        return Err(libc::ENOSPC);
    }
    // Not looked at again and undone: another process may have the new bytes mapped already.
    sys::reserve(fd, found.st_size, growth)
        .map_err(|error| if error == libc::ENOMEM { libc::ENOSPC } else { error })
}

/// Whether there is no room for a range that `fallocate(2)` reserves in a file of the IPC directory. `false` for calls that the kernel
/// refuses itself, and for those that give memory back.
///
/// Pages of the range that the file has already need no room. Which ones these are is not known; those that the whole file lacks are an
/// upper bound, which is exact for a file without holes. Pages behind the end count as those that are nearest to it.
pub(crate) fn is_refused(settings: &PosixSettings, fd: c_int, mode: c_int, from: i64, len: i64) -> bool {
    if mode & !libc::FALLOC_FL_KEEP_SIZE != 0 || from < 0 || len <= 0 || !settings.is_tmpfs {
        return false;
    }
    let (Some(to), Ok(found)) = (from.checked_add(len), sys::fstat(fd)) else { return false };
    if found.st_mode & libc::S_IFMT != libc::S_IFREG || !is_here(settings, fd, &found) {
        return false;
    }
    let page = sys::page_bytes();
    let before = (from.cast_unsigned() / page).saturating_mul(page);
    let range = whole_pages(to).saturating_sub(before);
    let missing = whole_pages(to.max(found.st_size)).saturating_sub(bytes_of(&found));
    lacks_room(settings, range.min(missing))
}

fn whole_pages(bytes: i64) -> u64 {
    let page = sys::page_bytes();
    bytes.cast_unsigned().div_ceil(page).saturating_mul(page)
}

/// Bytes of memory that a file has.
fn bytes_of(found: &libc::stat) -> u64 {
    found.st_blocks.cast_unsigned().saturating_mul(512)
}

/// Whether so many more bytes are too much for the limit, or for the container.
fn lacks_room(settings: &PosixSettings, bytes: u64) -> bool {
    bytes > 0
        && (is_over_limit(settings, bytes)
            || bytes >= LARGE && shmesh_sys::cgroup::room_bytes().is_some_and(|room| room < bytes))
}

/// Whether the files of the IPC directory and so many more bytes are above the limit.
fn is_over_limit(settings: &PosixSettings, more: u64) -> bool {
    let Some(limit) = settings.limit else { return false };
    if more > limit {
        return true;
    }
    let dir: Text = Text::of(&[settings.dir()]);
    let mut sum = more;
    let Ok(dir_path) = dir.c_str() else { return false };
    let _ = sys::entries(dir_path, |_, name| {
        let path: Text = Text::of(&[settings.dir(), b"/", name.to_bytes()]);
        if let Some(found) = path.c_str().ok().and_then(|path| sys::lstat(path).ok())
            && found.st_mode & libc::S_IFMT == libc::S_IFREG
        {
            sum = sum.saturating_add(bytes_of(&found));
        }
        sum <= limit
    });
    sum > limit
}
