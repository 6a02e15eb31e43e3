//! Device memory that exists: a file without a name on the shared directory, or a memfd. It has one page more than the
//! memory, which identifies the device, so that a process that receives a descriptor knows what it is.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use crate::{Outcome, code, device};

const PAGE: u64 = 4096;
const MAGIC: [u8; 8] = *b"fakecuda";
/// The size that memory is rounded to, and sub-allocated from.
pub(crate) const GRANULARITY: u64 = 2 << 20;

/// Device memory, which lives as long as its file is open.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) file: File,
    pub(crate) size: u64,
    pub(crate) uuid: [u8; 16],
    pub(crate) exportable: bool,
}

pub(crate) fn shared_dir() -> Option<PathBuf> {
    std::env::var_os("FAKE_CUDA_DIR").map(PathBuf::from)
}

fn nameless() -> std::io::Result<File> {
    match shared_dir() {
        Some(dir) => std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
            .open(dir),
        None => {
            // SAFETY: the name ends with a zero.
            let fd = unsafe { libc::memfd_create(c"fake-cuda".as_ptr(), libc::MFD_CLOEXEC) };
            if fd < 0 {
                return Err(std::io::Error::last_os_error());
            }
            // SAFETY: it is new and has no other owner.
            Ok(unsafe { File::from_raw_fd(fd) })
        }
    }
}

impl Physical {
    pub(crate) fn new(size: u64, uuid: [u8; 16], exportable: bool) -> Outcome<Self> {
        if size == 0 || !size.is_multiple_of(GRANULARITY) {
            return Err(code::INVALID_VALUE);
        }
        Self::taken(size + PAGE, uuid).and_then(|taken| taken.named(size, exportable))
    }

    /// So many bytes of the device, for whatever.
    pub(crate) fn taken(size: u64, uuid: [u8; 16]) -> Outcome<Self> {
        // Nothing else limits a memfd: the kernel would kill a process to free memory.
        let room = if shared_dir().is_some() { device::room().0 as u64 } else { device::TOTAL };
        if size > room {
            return Err(code::OUT_OF_MEMORY);
        }
        let file = nameless().map_err(|_| code::OUT_OF_MEMORY)?;
        let whole = libc::off_t::try_from(size).map_err(|_| code::OUT_OF_MEMORY)?;
        // SAFETY: the descriptor is open; a full directory is an error here.
        if unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, whole) } != 0 {
            return Err(code::OUT_OF_MEMORY);
        }
        Ok(Self { file, size, uuid, exportable: false })
    }

    /// With the page behind its `size` bytes that says whose it is.
    fn named(self, size: u64, exportable: bool) -> Outcome<Self> {
        let mut tail = Vec::from(MAGIC);
        tail.extend(self.uuid);
        tail.push(u8::from(exportable));
        self.file.write_all_at(&tail, size).map_err(|_| code::OUT_OF_MEMORY)?;
        Ok(Self { size, exportable, ..self })
    }

    /// The device memory behind a descriptor or a named file, if it is of a device that this process sees.
    pub(crate) fn of(file: File) -> Outcome<Self> {
        let whole = file.metadata().map_err(|_| code::INVALID_VALUE)?.len();
        let size = whole.checked_sub(PAGE).filter(|size| *size > 0).ok_or(code::INVALID_VALUE)?;
        let mut tail = [0; 25];
        file.read_exact_at(&mut tail, size).map_err(|_| code::INVALID_VALUE)?;
        if tail[..8] != MAGIC {
            return Err(code::INVALID_VALUE);
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&tail[8..24]);
        device::visible_ordinal(&uuid)?;
        Ok(Self { file, size, uuid, exportable: tail[24] == 1 })
    }

    pub(crate) fn ordinal(&self) -> Outcome<c_int> {
        device::visible_ordinal(&self.uuid)
    }

    /// Where the CPU's side of a copy can reach it.
    pub(crate) fn alias(&self) -> Outcome<Alias> {
        let len = usize::try_from(self.size).map_err(|_| code::OUT_OF_MEMORY)?;
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping of our own file, wherever there is room.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, self.file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(code::OUT_OF_MEMORY);
        }
        Ok(Alias { start: start.cast(), len })
    }
}

/// A mapping that the CPU can use.
#[derive(Debug)]
pub(crate) struct Alias {
    start: *mut u8,
    len: usize,
}

// SAFETY: it is an address in a mapping that belongs to the value; what is in it is shared with other processes anyway.
unsafe impl Send for Alias {}
// SAFETY: as above.
unsafe impl Sync for Alias {}

impl Alias {
    /// The address of `len` bytes at `offset`, if they lie in it.
    pub(crate) fn at(&self, offset: u64, len: usize) -> Outcome<*mut u8> {
        let offset = usize::try_from(offset).map_err(|_| code::INVALID_VALUE)?;
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(code::INVALID_VALUE);
        }
        Ok(self.start.wrapping_add(offset))
    }
}

impl Drop for Alias {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whole.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}
