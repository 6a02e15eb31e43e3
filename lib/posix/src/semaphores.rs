//! Named semaphores: as the C library's, whose files they are, with group bits, mark and lease. The mapping keeps the lease.

use std::ffi::{CStr, c_int};

use crate::attachments::{ATTACHMENTS, ShmAttachment, Use};
use crate::open::{Creation, open};
use crate::settings::PosixSettings;
use crate::sys::{self, CallResult, Fd};

/// The bytes of a semaphore in the C library's layout, `sem_t`.
pub(crate) const SEMAPHORE_BYTES: usize = size_of::<libc::sem_t>();

/// Opens or creates a semaphore; gives its address. `initial` is what a new one consists of.
pub(crate) fn open_semaphore(
    settings: &PosixSettings,
    path: &CStr,
    flags: c_int,
    mode: u32,
    is_marked: bool,
    initial: &[u8; SEMAPHORE_BYTES],
) -> Option<CallResult<usize>> {
    let fill = |fd: &Fd| sys::write_at(fd.raw(), initial, 0);
    let creation = Creation { mode, is_marked, fill: &fill };
    let flags = flags & (libc::O_CREAT | libc::O_EXCL) | libc::O_RDWR | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    Some(open(settings, path, flags, &creation)?.and_then(|fd| address_of(&fd)))
}

/// The address of an open semaphore in this process, which is the same each time it is opened.
fn address_of(fd: &Fd) -> CallResult<usize> {
    let found = sys::fstat(fd.raw())?;
    if found.st_size < i64::try_from(SEMAPHORE_BYTES).unwrap_or(0) {
        return Err(libc::EINVAL);
    }
    let is_it = |known: &ShmAttachment| {
        known.purpose == Use::Semaphore && (known.device, known.inode) == (found.st_dev, found.st_ino)
    };
    ATTACHMENTS.with(|table| {
        if let Some(known) = table.find(is_it) {
            known.count = known.count.saturating_add(1);
            return Ok(known.start);
        }
        let room = table.vacant().ok_or(libc::EMFILE)?;
        let start = sys::map(0, SEMAPHORE_BYTES, libc::PROT_READ | libc::PROT_WRITE, 0, fd.raw(), 0)?;
        *room = ShmAttachment {
            purpose: Use::Semaphore,
            device: found.st_dev,
            inode: found.st_ino,
            start,
            len: SEMAPHORE_BYTES,
            process: sys::pid(),
            count: 1,
        };
        Ok(start)
    })
}

/// Closes a semaphore. `false`: it is not one of this library's.
pub(crate) fn close_semaphore(start: usize) -> bool {
    ATTACHMENTS.with(|table| {
        let Some(known) = table.find(|known| known.purpose == Use::Semaphore && known.start == start) else {
            return false;
        };
        known.count = known.count.saturating_sub(1);
        if known.count == 0 {
            sys::unmap(known.start, known.len);
            *known = ShmAttachment::NONE;
        }
        true
    })
}
