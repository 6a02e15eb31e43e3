//! System V segments of other processes: attached, never created, never removed.

use std::io;

/// The key that no segment has.
pub const IPC_PRIVATE: i32 = libc::IPC_PRIVATE;

/// An attached segment; detached when this is dropped.
#[derive(Debug)]
pub struct SysvSegment {
    start: *mut u8,
    len: usize,
}

#[expect(unsafe_code, reason = "an address that is valid in the whole process")]
// SAFETY: the segment is attached to the process, not to a thread.
unsafe impl Send for SysvSegment {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: this type does not access the bytes.
unsafe impl Sync for SysvSegment {}

/// Returns the id of the segment with this key.
///
/// # Errors
/// No segment has this key (`ENOENT`).
#[expect(unsafe_code, reason = "nix has no System V calls")]
pub fn find(key: i32) -> io::Result<i32> {
    // SAFETY: the call takes and returns numbers. Without size and flags it only finds existing segments.
    match unsafe { libc::shmget(key, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        found => Ok(found),
    }
}

#[expect(unsafe_code, reason = "as above")]
impl SysvSegment {
    /// Attaches the segment with this id at an address that the kernel chooses.
    ///
    /// # Errors
    /// The segment does not exist (`EINVAL`, `EIDRM`), or this user may not use it.
    pub fn attach(shmid: i32, writable: bool) -> io::Result<Self> {
        // No address: a fixed one could overlap memory that is in use, which SHM_REMAP would overwrite.
        // SAFETY: the kernel chooses a free range.
        let start =
            unsafe { libc::shmat(shmid, std::ptr::null(), if writable { 0 } else { libc::SHM_RDONLY }) };
        if start.addr() == usize::MAX {
            return Err(io::Error::last_os_error());
        }
        let mut attached = Self { start: start.cast(), len: 0 };
        // SAFETY: all zeroes are a value of this plain structure.
        let mut stat: libc::shmid_ds = unsafe { std::mem::zeroed() };
        // Queried after attaching: before, the id could belong to another segment.
        // SAFETY: the kernel fills the structure, which lives until the call returns.
        if unsafe { libc::shmctl(shmid, libc::IPC_STAT, &raw mut stat) } == -1 {
            return Err(io::Error::last_os_error());
        }
        attached.len = stat.shm_segsz;
        Ok(attached)
    }

    /// The address of the attached segment.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Size of the segment in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no segment is empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

#[expect(unsafe_code, reason = "as above")]
impl Drop for SysvSegment {
    fn drop(&mut self) {
        // SAFETY: it is attached there, and readers of the bytes borrow this value.
        unsafe { libc::shmdt(self.start.cast()) };
    }
}
