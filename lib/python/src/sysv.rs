//! System V segments of others: attached, never created, never removed.

use std::io;

use pyo3::PyResult;

use crate::error::{error, system};

/// An attached segment; detached when this is dropped.
#[derive(Debug)]
pub(crate) struct Attached {
    start: *mut u8,
    len: usize,
}

#[expect(unsafe_code, reason = "an address that is valid in the whole process")]
// SAFETY: the segment is attached to the process, not to a thread.
unsafe impl Send for Attached {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: nothing here reads or writes the bytes.
unsafe impl Sync for Attached {}

#[expect(unsafe_code, reason = "System V calls, which no crate of ours wraps")]
impl Attached {
    /// Attaches the segment with this id, or with this key.
    pub(crate) fn new(shmid: Option<i32>, key: Option<i32>, writable: bool) -> PyResult<Self> {
        let shmid = match (shmid, key) {
            (Some(shmid), None) => shmid,
            (None, Some(libc::IPC_PRIVATE)) => {
                return Err(error("Invalid", "key 0 is IPC_PRIVATE, which names no segment; pass the shmid"));
            }
            // SAFETY: a plain call. No size and no flags: it finds what is there, and makes nothing.
            (None, Some(key)) => match unsafe { libc::shmget(key, 0, 0) } {
                -1 => return Err(refused(&format!("key {key:#x}"))),
                found => found,
            },
            _ => return Err(error("Invalid", "pass either shmid or key")),
        };
        let what = format!("shmid {shmid}");
        // No address: a fixed one could lie over memory that is in use, which is how data vanish with SHM_REMAP.
        // SAFETY: the kernel chooses a free range.
        let start =
            unsafe { libc::shmat(shmid, std::ptr::null(), if writable { 0 } else { libc::SHM_RDONLY }) };
        if start.addr() == usize::MAX {
            return Err(refused(&what));
        }
        let mut attached = Self { start: start.cast(), len: 0 };
        // SAFETY: all zeroes are a value of this plain structure.
        let mut stat: libc::shmid_ds = unsafe { std::mem::zeroed() };
        // Asked when it is attached: until then it could be another segment's.
        // SAFETY: the kernel fills the structure, which lives until the call returns.
        if unsafe { libc::shmctl(shmid, libc::IPC_STAT, &raw mut stat) } == -1 {
            return Err(refused(&what));
        }
        attached.len = stat.shm_segsz;
        Ok(attached)
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

#[expect(unsafe_code, reason = "as above")]
impl Drop for Attached {
    fn drop(&mut self) {
        // SAFETY: it is attached there, and no array over it lives: they keep this.
        unsafe { libc::shmdt(self.start.cast()) };
    }
}

#[cold]
fn refused(what: &str) -> pyo3::PyErr {
    let source = io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::EINVAL | libc::ENOENT | libc::EIDRM) => error(
            "NotFound",
            format_args!(
                "there is no System V segment with {what} in this IPC namespace; look with `ipcs -m`"
            ),
        ),
        _ => system(&format!("attach the System V segment with {what}"), &source),
    }
}
