//! A few words of memory that parents and their forked children share.

#![allow(clippy::disallowed_types, reason = "a test looks at the words as the machine has them")]
// UNSAFETY: words in a shared mapping.
#![expect(unsafe_code, reason = "atomics in a mapping")]

use std::sync::atomic::AtomicU64;

/// Words that are zero at first.
#[derive(Debug)]
pub(crate) struct Words(memmap2::MmapRaw, usize);

impl Words {
    pub(crate) fn new(count: usize) -> Self {
        let fd =
            nix::sys::memfd::memfd_create(c"words", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).expect("memfd");
        let file = std::fs::File::from(fd);
        file.set_len(count as u64 * 8).expect("room");
        Self(memmap2::MmapOptions::new().map_raw(&file).expect("map"), count)
    }

    /// In a file, for processes that were not forked from each other.
    pub(crate) fn in_file(path: &std::path::Path, count: usize) -> Self {
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path).expect("open");
        if file.metadata().expect("metadata").len() == 0 {
            file.set_len(count as u64 * 8).expect("room");
        }
        Self(memmap2::MmapOptions::new().map_raw(&file).expect("map"), count)
    }

    pub(crate) fn len(&self) -> usize {
        self.1
    }
}

impl std::ops::Index<usize> for Words {
    type Output = AtomicU64;

    fn index(&self, i: usize) -> &AtomicU64 {
        assert!(i < self.1);
        // SAFETY: in the mapping and aligned; all who use it use atomics.
        unsafe { AtomicU64::from_ptr(self.0.as_mut_ptr().cast::<u64>().add(i)) }
    }
}
