//! Pages that a process has and does not need again: of its own code, and of segments that it has left.
// UNSAFETY: advises the kernel about mappings of the program's file, and replaces pages of mappings.
#![expect(unsafe_code, reason = "madvise, and a mapping at a chosen address")]

use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MRemapFlags, MapFlags, ProtFlags, mmap_anonymous, mprotect, mremap, munlock, munmap};

use crate::errno::Errno;

/// Unmaps the code and constants of this program that are mapped now, and returns their bytes. What is used later is mapped
/// again from the page cache, 16 pages at a time. Most of what a daemon uses at its start it never uses again, and these
/// pages count as resident in each of its processes.
///
/// # Errors
/// `/proc` is not mounted, or the kernel refuses.
pub fn unmap_code() -> io::Result<u64> {
    let program = fs::read_link("/proc/self/exe")?;
    let maps = fs::read_to_string("/proc/self/smaps")?;
    let mut unmapped = 0;
    for mapping in unwritten(&maps, &program.to_string_lossy()) {
        let address = std::ptr::with_exposed_provenance_mut(mapping.start);
        // SAFETY: the range is a private mapping of the program's file that cannot be written, and the process has written none
        // of its pages. The kernel maps the same pages of the page cache again when they are read.
        let done = unsafe { libc::madvise(address, mapping.end - mapping.start, libc::MADV_DONTNEED) };
        Errno::result(done)?;
        unmapped += mapping.resident;
    }
    Ok(unmapped)
}

/// Replaces the pages of a mapping by private zeros. Its addresses stay valid, and the file's memory is not kept by it. It takes
/// no memory, also in a process that has locked all its future mappings, until the zeros are written.
///
/// # Errors
/// There is no memory for another mapping, or the process has too many. The mapping is as it was then, unless the kernel itself
/// has no memory left for its own part of the last step.
pub fn discard(map: &memmap2::MmapRaw) -> io::Result<()> {
    let Some(address) = NonNull::new(map.as_mut_ptr().cast()) else { return Ok(()) };
    let Some(len) = NonZeroUsize::new(map.len()) else { return Ok(()) };
    // Made elsewhere first: where nothing is missing any more when it replaces the mapping. Locked pages are filled at once,
    // but not while they cannot be accessed.
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: at addresses that nothing uses.
    let zeros = unsafe { mmap_anonymous(None, len, ProtFlags::PROT_NONE, flags) }?;
    // SAFETY: the mapping made above. It is at its new place or still unused; then it is removed. That place is the range of a
    // mapping that lives as long as `map`. It can only be accessed by raw pointers, and by atomics over them, for which this is
    // as if another process had written zeros.
    unsafe {
        let flags = MRemapFlags::MREMAP_MAYMOVE | MRemapFlags::MREMAP_FIXED;
        let moved = munlock(zeros, len.get())
            .and_then(|()| mprotect(zeros, len.get(), ProtFlags::PROT_READ | ProtFlags::PROT_WRITE))
            .and_then(|()| mremap(zeros, len.get(), len.get(), flags, Some(address)));
        if moved.is_err() {
            let _ = munmap(zeros, len.get());
        }
        moved?;
    }
    Ok(())
}

/// A mapping of the program's file.
#[derive(Debug, PartialEq)]
struct CodeMapping {
    start: usize,
    end: usize,
    resident: u64,
}

/// Returns the mappings of a file that cannot be written, and have no pages but the file's.
fn unwritten(smaps: &str, path: &str) -> Vec<CodeMapping> {
    let mut found: Vec<CodeMapping> = Vec::new();
    let mut is_ours = false;
    for line in smaps.lines() {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        match words[..] {
            [range, flags, _, _, _, ..] if range.contains('-') => {
                let bounds = range.split_once('-').and_then(|(start, end)| {
                    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
                });
                is_ours = matches!(flags, "r-xp" | "r--p") && line.ends_with(&format!(" {path}"));
                match bounds {
                    Some((start, end)) if is_ours => found.push(CodeMapping { start, end, resident: 0 }),
                    _ => is_ours = false,
                }
            }
            [field, kilobytes, "kB"] if is_ours => {
                let bytes = kilobytes.parse::<u64>().unwrap_or(u64::MAX).saturating_mul(1024);
                match (field, found.last_mut()) {
                    ("Rss:", Some(mapping)) => mapping.resident = bytes,
                    // Pages that were written, as by relocation. Private_Dirty also counts pages of a file that is not on the disk yet.
                    ("Anonymous:" | "Swap:", _) if bytes > 0 => {
                        found.pop();
                        is_ours = false;
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use shmesh_testing::own_process;

    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000010000 r--p 00000000 08:01 42                         /usr/bin/shmesh-sidecar
Size:                 64 kB
Rss:                  40 kB
Private_Dirty:        40 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd mr mw me sd
7f0000010000-7f0000020000 r-xp 00010000 08:01 42                         /usr/bin/shmesh-sidecar
Rss:                  64 kB
Anonymous:             0 kB
Swap:                  0 kB
7f0000020000-7f0000024000 r--p 00020000 08:01 42                         /usr/bin/shmesh-sidecar
Rss:                  16 kB
Anonymous:            16 kB
Swap:                  0 kB
7f0000024000-7f0000028000 rw-p 00024000 08:01 42                         /usr/bin/shmesh-sidecar
Rss:                  16 kB
Anonymous:             0 kB
7f0000030000-7f0000040000 r-xp 00000000 08:01 43                         /usr/lib/libc.so.6
Rss:                  64 kB
7f0000040000-7f0000050000 r--p 00000000 00:00 0
Rss:                  64 kB
";

    #[test]
    fn only_unwritten_mappings_of_the_program_are_unmapped() {
        let found = unwritten(SMAPS, "/usr/bin/shmesh-sidecar");
        let mapping = |start, end, resident| CodeMapping { start, end, resident };
        assert_eq!(
            found,
            [
                mapping(0x7f00_0000_0000, 0x7f00_0001_0000, 40 << 10),
                mapping(0x7f00_0001_0000, 0x7f00_0002_0000, 64 << 10),
            ]
        );
        assert_eq!(unwritten(SMAPS, "/shmesh-sidecar"), []);
        assert_eq!(unwritten("", "/x"), []);
    }

    #[test]
    fn locked_process_gives_back_what_it_discards() {
        own_process(|| {
            if nix::sys::mman::mlockall(nix::sys::mman::MlockAllFlags::MCL_FUTURE).is_err() {
                eprintln!("skipped: this user may not lock memory");
                return;
            }
            // Most of the memory of this process.
            const BYTES: u64 = 64 << 20;
            let file = crate::file::memfd("left", false).unwrap();
            file.set_len(BYTES).unwrap();
            let map = crate::file::map(&file, BYTES, false).unwrap();
            let resident_pages = || {
                let statm = fs::read_to_string("/proc/self/statm").unwrap();
                statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
            };
            let before = resident_pages();
            discard(&map).unwrap();
            assert!(resident_pages() < before / 2, "{before} before, {} after", resident_pages());
            // SAFETY: the addresses are still mapped, and nothing else uses them.
            unsafe { map.as_mut_ptr().write(1) };
        });
    }

    #[test]
    fn program_runs_on_after_its_code_was_unmapped() {
        for _ in 0..3 {
            assert!(unmap_code().unwrap() > 0);
            let text = format!("{:?}", std::env::vars().collect::<Vec<_>>());
            assert!(!text.is_empty());
        }
    }
}
