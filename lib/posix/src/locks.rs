//! Locks of programs on files of the IPC directory. A lock "to the end of the file" reaches the bytes of leases, and would meet
//! the leases of other processes; so it ends before them.

use std::ffi::c_int;

use shmesh_sys::lease::{BYTES, is_marked};

use crate::settings::PosixSettings;
use crate::sys;

/// The range of a lock that leaves out the bytes of leases; `None` if it does not reach them, or the file has none.
pub(crate) fn shortened(settings: &PosixSettings, fd: c_int, lock: &libc::flock) -> Option<libc::flock> {
    let end = BYTES.start.cast_signed();
    // The common case costs no system call.
    let begins_early = lock.l_start < end;
    let reaches = lock.l_len == 0 || lock.l_start.saturating_add(lock.l_len) > end;
    if !begins_early || !reaches {
        return None;
    }
    let found = sys::fstat(fd).ok()?;
    if found.st_dev != settings.device || !is_marked(found.st_mode) {
        return None;
    }
    let origin = match c_int::from(lock.l_whence) {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => sys::position(fd).ok()?,
        libc::SEEK_END => found.st_size,
        _ => return None,
    };
    let len = end.saturating_sub(origin.saturating_add(lock.l_start));
    (len > 0).then_some(libc::flock { l_len: len, ..*lock })
}

/// The length of a `lockf` to the end of the file, from where the descriptor is.
pub(crate) fn length_of_lockf(settings: &PosixSettings, fd: c_int, len: i64) -> i64 {
    if len != 0 {
        return len;
    }
    let whole = libc::flock { l_type: 0, l_whence: 1, l_start: 0, l_len: 0, l_pid: 0 };
    shortened(settings, fd, &whole).map_or(0, |lock| lock.l_len)
}
