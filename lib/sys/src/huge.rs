//! Huge pages for files in memory, whatever the node's settings are.
// UNSAFETY: maps a file into a part of a reservation of its own, and advises the kernel about that part.
#![expect(unsafe_code, reason = "a mapping at a chosen address, which memmap2 does not have")]

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};

use crate::errno::Errno;

/// From `linux/mman.h`; the libc crate defines it for glibc only.
const MADV_COLLAPSE: i32 = 25;

/// Size of a huge page where base pages have 4096 bytes. With larger base pages [`collapse`] is refused.
const HUGE_PAGE_BYTES: usize = 2 << 20;
const PAGE_BYTES: libc::off_t = 4096;

/// Puts each whole 2 MiB of the first `len` bytes of a new file (a memfd, or on tmpfs) into a huge page.
///
/// `MADV_COLLAPSE` works even if the node's `shmem_enabled` is `never`. Call it before the file has small pages:
/// otherwise the kernel copies each of them, which takes 30 times as long.
///
/// # Errors
/// `EINVAL` before Linux 6.1, and if base pages do not have 4096 bytes; `EAGAIN` or `ENOMEM` if no huge page is
/// available; no room. The file stays usable, with small pages where it has no huge ones.
pub fn collapse(file: &File, len: u64) -> io::Result<()> {
    let len = usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    let Some(whole) = NonZeroUsize::new(len - len % HUGE_PAGE_BYTES) else { return Ok(()) };
    // A range without any page is not collapsed. It is reserved and not touched, because a touch on a full tmpfs is a
    // bus error.
    for offset in (0..whole.get()).step_by(HUGE_PAGE_BYTES) {
        let offset = libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        while let Err(error) = fallocate(file, FallocateFlags::empty(), offset, PAGE_BYTES) {
            if error != Errno::EINTR {
                return Err(error.into());
            }
        }
    }
    // Dropped at the end, together with the mapping of the file in it.
    let mut room = memmap2::MmapOptions::new().len(whole.get() + HUGE_PAGE_BYTES).map_anon()?;
    let aligned = room.as_mut_ptr().map_addr(|address| address.next_multiple_of(HUGE_PAGE_BYTES));
    let address = NonZeroUsize::new(aligned.addr());
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
    // SAFETY: from the next multiple of a huge page, `whole` bytes are inside `room`, which no other code uses.
    let mapped: NonNull<libc::c_void> = unsafe { mmap(address, whole, protection, flags, file, 0) }?;
    // SAFETY: the range was just mapped and is unmapped after this. The advice changes the location of bytes, not their
    // values.
    let done = unsafe { libc::madvise(mapped.as_ptr(), whole.get(), MADV_COLLAPSE) };
    Errno::result(done)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn collapse_zeroes_whole_huge_pages_or_changes_nothing() {
        let (whole, len) = (3 * HUGE_PAGE_BYTES as u64, 3 * HUGE_PAGE_BYTES as u64 + 4096);
        let file = crate::file::memfd("huge", false).unwrap();
        file.set_len(len).unwrap();
        match collapse(&file, len) {
            Ok(()) => assert!(file.metadata().unwrap().blocks() * 512 >= whole),
            Err(error) => eprintln!("no huge pages here: {error}"),
        }
        crate::file::reserve(&file, len).unwrap();
        assert_eq!(file.metadata().unwrap().blocks() * 512, len);
        let map = crate::file::map(&file, len, false).unwrap();
        // SAFETY: the file is this test's own, mapped whole.
        let bytes = unsafe { std::slice::from_raw_parts(map.as_ptr(), map.len()) };
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn files_smaller_than_a_huge_page_are_unchanged() {
        let file = crate::file::memfd("small", false).unwrap();
        file.set_len(4096).unwrap();
        collapse(&file, 4096).unwrap();
        assert_eq!(file.metadata().unwrap().blocks(), 0);
    }
}
