//! Host memory in place of device memory: a sealed memfd. It works everywhere without a device, and tests use it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use shmesh_proto::broker::Mechanism;
use shmesh_sys::{cgroup, file};

use super::DeviceMemory;

/// Host memory in a memfd whose size is sealed.
///
/// ```
/// use shmesh::device::HostMemory;
/// let memory = HostMemory::new(4096)?;
/// memory.write_at(100, b"hello")?;
/// let mut bytes = [0; 5];
/// memory.read_at(100, &mut bytes)?;
/// assert_eq!(&bytes, b"hello");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct HostMemory {
    file: File,
    map: memmap2::MmapRaw,
}

impl HostMemory {
    /// Allocates `size` bytes, all zero.
    ///
    /// # Errors
    /// The size is 0, or more than is free.
    pub fn new(size: u64) -> io::Result<Self> {
        if size == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "device memory of 0 bytes"));
        }
        // A larger memfd would not be refused: the kernel would kill a process to free memory.
        if let Some(room) = cgroup::room_bytes().filter(|room| *room < size) {
            let text = format!(
                "device memory of {size} bytes exceeds the memory limit, of which {room} bytes remain; allocate less"
            );
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
        }
        let memory = file::memfd("shmesh-region", false)?;
        memory.set_len(size)?;
        file::reserve(&memory, size)?;
        file::seal_size(&memory)?;
        let map = file::map(&memory, size, false)?;
        Ok(Self { file: memory, map })
    }

    /// The address of its mapping. Other processes may write there at any time.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Copies bytes out of the memory.
    ///
    /// # Errors
    /// They are past the end.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }

    /// Copies bytes into the memory.
    ///
    /// # Errors
    /// They are past the end.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }
}

impl DeviceMemory for HostMemory {
    const MECHANISM: Mechanism = Mechanism::Host;

    fn size(&self) -> u64 {
        self.map.len() as u64
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }

    fn handle(&self) -> Vec<u8> {
        Vec::new()
    }

    fn import(size: u64, fd: Option<OwnedFd>, _handle: &[u8]) -> io::Result<Self> {
        let file =
            File::from(fd.ok_or_else(|| io::Error::other("the key was delivered without a descriptor"))?);
        // A memfd that can still be truncated would cause a bus error later.
        if !file::is_size_sealed(&file) || file.metadata()?.len() < size {
            return Err(io::Error::other("the descriptor is not a sealed memfd of this size"));
        }
        let map = file::map(&file, size, false)?;
        Ok(Self { file, map })
    }
}
