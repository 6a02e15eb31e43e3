//! Mappings that survive the truncation of their file.
//!
//! An access past the end of a mapped file raises SIGBUS, which kills the process. For a guarded mapping, the signal
//! handler maps zeroed private memory over the truncated part, and marks the mapping as damaged. The access then
//! continues and reads zeros. SIGBUS for any other address is passed to the previously installed handler.
//!
//! A handler that is installed after the first guarded mapping must call the handler that it replaces, or the guard is lost.
// UNSAFETY: a signal handler that replaces pages of mappings whose owners have registered them, and a list of leaked chunks that
// it reads without a lock. The handler calls only what a signal handler may call.
#![expect(unsafe_code, reason = "nix has no handlers with an address, and a handler takes no locks")]

use std::io;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};

use memmap2::MmapRaw;

/// A mapping of a file, guarded against truncation or not.
///
/// ```
/// use shmesh_sys::sigbus::Mapping;
/// let file = tempfile::tempfile()?;
/// file.set_len(4096)?;
/// let map = Mapping::guarded(shmesh_sys::file::map(&file, 4096, false)?)?;
/// file.set_len(0)?;
/// // SAFETY: the mapping lives.
/// assert_eq!(unsafe { map.as_ptr().read_volatile() }, 0);
/// assert!(map.is_damaged());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Mapping {
    range: Option<&'static Range>,
    map: MmapRaw,
}

impl Mapping {
    /// Guards a mapping for as long as it lives.
    ///
    /// # Errors
    /// The signal handler cannot be installed.
    pub fn guarded(map: MmapRaw) -> io::Result<Self> {
        install()?;
        let start = map.as_ptr().addr();
        Ok(Self { range: Some(RANGES.take(start, start + map.len())), map })
    }

    /// Whether a part of a guarded mapping was replaced by zeros.
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        self.range.is_some_and(|range| range.is_damaged.load(Ordering::Acquire))
    }
}

impl From<MmapRaw> for Mapping {
    /// Wraps a mapping without a guard.
    fn from(map: MmapRaw) -> Self {
        Self { range: None, map }
    }
}

impl Deref for Mapping {
    type Target = MmapRaw;

    fn deref(&self) -> &MmapRaw {
        &self.map
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the memory is unmapped, because then the address may belong to another mapping.
        if let Some(range) = self.range {
            range.release();
        }
    }
}

/// Whether any guarded mapping of this process was ever damaged; one load, for hot paths.
#[inline]
#[must_use]
pub fn any_damage() -> bool {
    ANY_DAMAGE.load(Ordering::Relaxed)
}

static ANY_DAMAGE: AtomicBool = AtomicBool::new(false);
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

const RANGES_PER_CHUNK: usize = 64;

/// The addresses of a guarded mapping. The handler reads them without a lock: the version is odd while they change.
#[derive(Debug)]
struct Range {
    is_taken: AtomicBool,
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    is_damaged: AtomicBool,
}

impl Range {
    const fn new() -> Self {
        Self {
            is_taken: AtomicBool::new(false),
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            is_damaged: AtomicBool::new(false),
        }
    }

    /// Sets the range. Only for the thread that has taken this entry.
    fn set(&self, start: usize, end: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    fn release(&self) {
        self.set(0, 0);
        self.is_damaged.store(false, Ordering::Relaxed);
        self.is_taken.store(false, Ordering::Release);
    }

    /// The end of the range, if `address` is in it. A range that is being changed does not contain it, because code
    /// that accesses a mapping keeps it alive.
    fn end_of(&self, address: usize) -> Option<usize> {
        let version = self.version.load(Ordering::Acquire);
        let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_stable = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (is_stable && (start..end).contains(&address)).then_some(end)
    }
}

/// Ranges, in a list that only grows: the handler can read it whatever it has interrupted.
#[derive(Debug)]
struct RangeChunk {
    ranges: [Range; RANGES_PER_CHUNK],
    next: AtomicPtr<RangeChunk>,
}

static RANGES: RangeChunk = RangeChunk::new();

impl RangeChunk {
    fn next(&self) -> Option<&'static Self> {
        // SAFETY: null, or a chunk that `grow` has leaked.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    fn grow(&self) -> &'static Self {
        let new = Box::into_raw(Box::new(Self::new()));
        match self.next.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
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

/// Installs the handler, once per process.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let failed = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
        // SAFETY: queries a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        PAGE_BYTES.store(usize::try_from(page).unwrap_or(4096), Ordering::Relaxed);
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: queries the current action; `before` lives until then.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr()) } != 0 {
            return Err(failed());
        }
        // Before the handler can run. SAFETY: filled above, and zeros are a valid value too.
        let _ = PREVIOUS.set(unsafe { before.assume_init() });
        // SAFETY: zeros are an action without flags and with an empty mask.
        let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: `handle` has the signature of SA_SIGINFO, and calls only what a handler may call.
        match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(failed()),
        }
    });
    installed.map_err(io::Error::from_raw_os_error)
}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the location of this thread's own errno, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes the information of this signal.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    if code != libc::BUS_ADRERR || !replace(address) {
        chain(signal, code, info, context);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Replaces a guarded mapping by zeros from this page on, because everything behind it in the file is gone as well.
fn replace(address: usize) -> bool {
    let mut chunk = Some(&RANGES);
    while let Some(here) = chunk {
        for range in &here.ranges {
            let Some(end) = range.end_of(address) else { continue };
            let page = address & !(PAGE_BYTES.load(Ordering::Relaxed) - 1);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: the addresses are inside a mapping that its owner has registered, and keeps while the interrupted
            // thread accesses it. Other threads see its atomics become zero, as if a peer had written that.
            let mapped =
                unsafe { libc::mmap(ptr::without_provenance_mut(page), end - page, access, flags, -1, 0) };
            if mapped == libc::MAP_FAILED {
                return false;
            }
            range.is_damaged.store(true, Ordering::Release);
            ANY_DAMAGE.store(true, Ordering::Release);
            return true;
        }
        chunk = here.next();
    }
    false
}

/// Does what would have happened without this handler.
fn chain(signal: i32, code: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.get().map_or((libc::SIG_DFL, 0), |action| (action.sa_sigaction, action.sa_flags));
    match previous {
        // A fault is repeated, and a sent signal is sent again, with the default action.
        (libc::SIG_DFL, _) => {
            // SAFETY: changes an action to the default, and sends a signal to this thread.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if code <= 0 {
                    libc::raise(signal);
                }
            }
        }
        // The kernel does not let a process ignore a fault.
        (libc::SIG_IGN, _) if code > 0 => {
            // SAFETY: as above.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        (libc::SIG_IGN, _) => {}
        (handler, flags) if flags & libc::SA_SIGINFO != 0 => {
            type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: installed with SA_SIGINFO, so it has this signature; it is called as the kernel would call it.
            let handler = unsafe { std::mem::transmute::<usize, Handler>(handler) };
            handler(signal, info, context);
        }
        (handler, _) => {
            // SAFETY: installed without SA_SIGINFO, so it takes the number.
            let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(i32)>(handler) };
            handler(signal);
        }
    }
}

impl RangeChunk {
    const fn new() -> Self {
        Self { ranges: [const { Range::new() }; RANGES_PER_CHUNK], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn take(&'static self, start: usize, end: usize) -> &'static Range {
        let mut chunk = self;
        loop {
            let is_free = |range: &&Range| {
                range.is_taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            };
            if let Some(range) = chunk.ranges.iter().find(is_free) {
                range.set(start, end);
                return range;
            }
            chunk = chunk.next().unwrap_or_else(|| chunk.grow());
        }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::fs::File;

    use nix::sys::signal::Signal;
    use nix::sys::wait::{WaitStatus, waitpid};

    use super::*;

    fn file(pages: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(pages * 4096).unwrap();
        file
    }

    fn map(file: &File) -> MmapRaw {
        crate::file::map(file, file.metadata().unwrap().len(), false).unwrap()
    }

    fn byte(map: &MmapRaw, at: usize) -> u8 {
        assert!(at < map.len());
        // SAFETY: inside the mapping.
        unsafe { map.as_ptr().add(at).read_volatile() }
    }

    fn set(map: &MmapRaw, at: usize, byte: u8) {
        assert!(at < map.len());
        // SAFETY: inside the mapping.
        unsafe { map.as_mut_ptr().add(at).write_volatile(byte) }
    }

    /// Threads of the library block the signals of the application.
    #[test]
    fn threads_with_blocked_signals_are_guarded() {
        let file = file(1);
        let map = Mapping::guarded(map(&file)).unwrap();
        file.set_len(0).unwrap();
        let _blocked = crate::signal::Blocked::all();
        assert_eq!(byte(&map, 0), 0);
        assert!(map.is_damaged());
    }

    #[test]
    fn truncated_mapping_reads_zeros_and_is_damaged() {
        // More than one chunk of ranges.
        let files: Vec<_> = (0..100).map(|_| file(4)).collect();
        let maps: Vec<_> = files.iter().map(|file| Mapping::guarded(map(file)).unwrap()).collect();
        for (file, map) in files.iter().zip(&maps).skip(90) {
            set(map, 0, 7);
            set(map, 3 * 4096, 7);
            file.set_len(2 * 4096).unwrap();
            assert_eq!((byte(map, 0), map.is_damaged()), (7, false), "what the file still has");
            assert_eq!((byte(map, 3 * 4096), map.is_damaged()), (0, true));
            set(map, 3 * 4096, 8);
            set(map, 2 * 4096, 9);
            assert_eq!(
                (byte(map, 3 * 4096), byte(map, 2 * 4096)),
                (0, 9),
                "all behind the faulting page is new"
            );
            assert_eq!(byte(map, 0), 7);
        }
        assert!(any_damage() && maps.iter().take(90).all(|map| !map.is_damaged()), "only those");
        drop(maps);
        let file = file(1);
        assert!(!Mapping::guarded(map(&file)).unwrap().is_damaged(), "a range that is used again is whole");
    }

    fn ends_by(body: impl FnOnce()) -> WaitStatus {
        // SAFETY: the child runs the body, which takes no lock of another thread, and leaves.
        let child = unsafe { libc::fork() };
        if child == 0 {
            body();
            // SAFETY: nothing of the parent is to run here.
            unsafe { libc::_exit(0) };
        }
        assert!(child > 0);
        waitpid(nix::unistd::Pid::from_raw(child), None).unwrap()
    }

    #[test]
    fn other_bus_errors_reach_the_previous_handler() {
        let (guarded_file, other_file) = (file(1), file(1));
        let guarded = Mapping::guarded(map(&guarded_file)).unwrap();
        let other = map(&other_file);
        other_file.set_len(0).unwrap();
        let killed = |status| matches!(status, WaitStatus::Signaled(_, Signal::SIGBUS, _));
        assert!(killed(ends_by(|| assert_eq!(byte(&other, 0), 0))), "a mapping without a guard");
        guarded_file.set_len(0).unwrap();
        assert!(matches!(ends_by(|| assert_eq!(byte(&guarded, 0), 0)), WaitStatus::Exited(_, 0)));
        assert!(!guarded.is_damaged(), "the child's is not ours");
    }
}
