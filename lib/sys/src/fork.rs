//! Counting forks, and files that a child must not keep.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering};

static FORKS: AtomicUsize = AtomicUsize::new(0);

/// Number of forks of this process and its ancestors since [`watch`]: a child never has the same number as its parent.
#[must_use]
pub fn generation() -> usize {
    FORKS.load(Ordering::Relaxed)
}

/// Counts forks from now on.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler does only what is allowed in a forked child of a process with threads: it reads and
        // writes atomics, and calls open, dup3 and close.
        #[expect(unsafe_code, reason = "nix has no pthread_atfork")]
        unsafe {
            libc::pthread_atfork(None, None, Some(in_child));
        }
    });
}

/// Registers functions around each fork of this process: `before` is called before it, and `after` after it, in the
/// parent and in the child, all in the thread that forks.
pub fn around(before: extern "C" fn(), after: extern "C" fn()) {
    // SAFETY: the functions belong to a library whose handlers the loader removes before it unloads the library.
    #[expect(unsafe_code, reason = "nix has no pthread_atfork")]
    unsafe {
        libc::pthread_atfork(Some(before), Some(after), Some(after));
    }
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    replace_all();
}

/// A file whose copy in a forked child is `/dev/null`: locks that belong to the open file end with this process, even
/// if a child lives on. (A child that was created by a system call instead of `fork(3)` keeps its copy.)
///
/// ```
/// let dir = tempfile::tempdir()?;
/// let file = std::fs::File::create(dir.path().join("link.lock"))?;
/// let file = shmesh_sys::fork::NotInherited::new(file);
/// assert_eq!(file.metadata()?.len(), 0);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct NotInherited {
    place: &'static AtomicI32,
    file: File,
}

impl NotInherited {
    /// Registers the handler for all later forks.
    #[must_use]
    pub fn new(file: File) -> Self {
        watch();
        Self { place: PLACES.take(file.as_raw_fd()), file }
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        // Before the file is closed, because another one may then get its number.
        self.place.store(NONE, Ordering::Release);
    }
}

impl std::ops::Deref for NotInherited {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl AsFd for NotInherited {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

const NONE: i32 = -1;
const PLACES_PER_CHUNK: usize = 64;

/// Numbers of descriptors, in a list that only grows: a child can read it whatever its parent's threads were doing.
#[derive(Debug)]
struct DescriptorChunk {
    places: [AtomicI32; PLACES_PER_CHUNK],
    next: AtomicPtr<DescriptorChunk>,
}

static PLACES: DescriptorChunk = DescriptorChunk::new();

impl DescriptorChunk {
    const fn new() -> Self {
        Self {
            places: [const { AtomicI32::new(NONE) }; PLACES_PER_CHUNK],
            next: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    #[expect(unsafe_code, reason = "a list that is read in a forked child, where no lock can be taken")]
    fn next(&self) -> Option<&'static Self> {
        // SAFETY: null, or a chunk that `take` has leaked.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    fn take(&'static self, fd: i32) -> &'static AtomicI32 {
        let mut chunk = self;
        loop {
            let free = chunk
                .places
                .iter()
                .find(|place| place.compare_exchange(NONE, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok());
            if let Some(place) = free {
                return place;
            }
            chunk = match chunk.next() {
                Some(next) => next,
                None => chunk.grow(),
            };
        }
    }

    #[expect(unsafe_code, reason = "as above")]
    fn grow(&self) -> &'static Self {
        let new = Box::into_raw(Box::new(Self::new()));
        match self.next.compare_exchange(std::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: it was just leaked.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: `new` was not published; `other` was leaked by another thread.
                unsafe {
                    drop(Box::from_raw(new));
                    &*other
                }
            }
        }
    }
}

/// Replaces each file by `/dev/null`: the numbers stay taken, so that the copies of their owners close the right files.
#[expect(unsafe_code, reason = "only calls that are safe after a fork")]
fn replace_all() {
    let mut null = NONE;
    let mut chunk = Some(&PLACES);
    while let Some(here) = chunk {
        for place in &here.places {
            let fd = place.load(Ordering::Acquire);
            if fd == NONE {
                continue;
            }
            // SAFETY: the path ends with a zero; the numbers belong to open files of this process.
            unsafe {
                if null == NONE {
                    null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
                }
                if null == NONE {
                    // No file is better than the parent's.
                    libc::close(fd);
                } else {
                    libc::dup3(null, fd, libc::O_CLOEXEC);
                }
            }
        }
        chunk = here.next();
    }
    if null != NONE {
        // SAFETY: it was opened above.
        unsafe { libc::close(null) };
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::io::{self, Read, Write};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::file::{ByteLock, is_byte_locked, try_lock_byte};

    #[test]
    fn locks_end_with_the_parent_though_a_child_lives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let open =
            || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        // More than one chunk.
        let files: Vec<_> = (0..100).map(|_| NotInherited::new(open())).collect();
        for (byte, file) in (0..).zip(&files) {
            assert!(try_lock_byte(file, byte, ByteLock::Exclusive).unwrap());
        }
        let (mut go_on, mut end) = io::pipe().unwrap();
        // SAFETY: the child only reads, and leaves.
        #[expect(unsafe_code, reason = "the test is about fork")]
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop(end);
            let _ = go_on.read(&mut [0]);
            // SAFETY: nothing of the parent is to run here.
            #[expect(unsafe_code, reason = "as above")]
            unsafe {
                libc::_exit(0)
            };
        }
        assert!(child > 0);
        let other = open();
        assert!((0..100).all(|byte| is_byte_locked(&other, byte).unwrap()), "the parent's are as they were");
        drop(files);
        // The child may only just begin to run.
        let start = Instant::now();
        while (0..100).any(|byte| is_byte_locked(&other, byte).unwrap()) {
            assert!(start.elapsed() < Duration::from_secs(60), "the child has none of them");
        }
        end.write_all(b"x").unwrap();
        nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(child), None).unwrap();
    }
}
