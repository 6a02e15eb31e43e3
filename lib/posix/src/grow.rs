//! Sizes of files: reserved when they are set, so that a full file system is `ENOSPC` and not a bus error later.

use std::ffi::c_int;

use crate::path::Text;
use crate::settings::Settings;
use crate::sys::{self, Answer};

/// Growth for which the memory limit of the container is read: smaller ones must be cheap.
const LARGE: u64 = 1 << 20;

/// Sets the size of a file of the IPC directory, if that makes it larger. `None`: the C library's function does it.
pub(crate) fn grow(settings: &Settings, fd: c_int, len: i64) -> Option<Answer<()>> {
    let found = sys::fstat(fd).ok()?;
    let is_here = found.st_dev == settings.device && found.st_mode & libc::S_IFMT == libc::S_IFREG;
    if !is_here || len <= found.st_size {
        return None;
    }
    match reserve(settings, fd, found.st_size, len) {
        Err(error @ (libc::ENOSPC | libc::EFBIG)) => Some(Err(error)),
        // The descriptor is read-only, or the file system cannot reserve: as without this library.
        Err(_) => None,
        Ok(()) => Some(Ok(())),
    }
}

/// Reserves the bytes of a file from its size to a larger one.
pub(crate) fn reserve(settings: &Settings, fd: c_int, from: i64, to: i64) -> Answer<()> {
    let growth = to.saturating_sub(from);
    let bytes = growth.cast_unsigned();
    if is_over_limit(settings, bytes)
        || bytes >= LARGE && shmesh_sys::cgroup::room_bytes().is_some_and(|room| room < bytes)
    {
        return Err(libc::ENOSPC);
    }
    sys::reserve(fd, from, growth)?;
    // Again, because others may have grown meanwhile: then all of them may be refused, but the limit holds.
    if is_over_limit(settings, 0) {
        sys::truncate(fd, from);
        return Err(libc::ENOSPC);
    }
    Ok(())
}

/// Whether the files of the IPC directory and so many more bytes are above the limit.
fn is_over_limit(settings: &Settings, more: u64) -> bool {
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
            sum = sum.saturating_add(found.st_blocks.cast_unsigned().saturating_mul(512));
        }
        sum <= limit
    });
    sum > limit
}
