//! System calls. They go to the kernel directly: the C library's functions of the same names could resolve to this library's.
//!
//! Each gives the error number as its error, and may change `errno`, which `exports.rs` sets at the end.

// UNSAFETY: system calls, and the C library's functions for mapping memory and finding symbols.
#![expect(unsafe_code, reason = "the C library's types and functions, without an allocation on the way")]

use std::ffi::{CStr, c_int, c_long, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::time::Duration;

use crate::path::Text;

/// An error number of the kernel, or a result.
pub(crate) type CallResult<T> = Result<T, c_int>;

/// A descriptor that is closed when it is dropped.
pub(crate) struct Fd(c_int);

impl Fd {
    pub(crate) fn raw(&self) -> c_int {
        self.0
    }

    /// Left open, for the program.
    pub(crate) fn into_raw(self) -> c_int {
        let raw = self.0;
        std::mem::forget(self);
        raw
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours, and nothing uses it any more.
        unsafe { libc::syscall(libc::SYS_close, self.0) };
    }
}

// The part of GCC's library that `build.rs` links calls this function of glibc 2.35, which older ones lack, to unwind. Nothing unwinds
// here: a panic aborts. So it finds nothing, and for this library alone.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".globl _dl_find_object",
    ".hidden _dl_find_object",
    "_dl_find_object: mov $-1, %eax",
    "ret",
    options(att_syntax)
);
#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".globl _dl_find_object",
    ".hidden _dl_find_object",
    "_dl_find_object: mov w0, #-1",
    "ret"
);

fn answer(result: c_long) -> CallResult<c_long> {
    if result == -1 { Err(errno()) } else { Ok(result) }
}

pub(crate) fn errno() -> c_int {
    // SAFETY: the address of this thread's errno is valid.
    unsafe { *libc::__errno_location() }
}

pub(crate) fn set_errno(number: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = number };
}

/// As `openat(AT_FDCWD, ...)`; the result is the caller's.
pub(crate) fn open(path: &CStr, flags: c_int, mode: u32) -> CallResult<Fd> {
    // SAFETY: the path is a C string.
    let fd = answer(unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, mode) })?;
    c_int::try_from(fd).map(Fd).map_err(|_| libc::EMFILE)
}

fn stat_by(call: impl FnOnce(*mut libc::stat) -> c_long) -> CallResult<libc::stat> {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    answer(call(stat.as_mut_ptr()))?;
    // SAFETY: all zeroes are a value of this plain structure, and the kernel has filled it: on 64-bit machines it is the kernel's own.
    Ok(unsafe { stat.assume_init() })
}

pub(crate) fn fstat(fd: c_int) -> CallResult<libc::stat> {
    // SAFETY: the kernel fills the structure that the pointer leads to.
    stat_by(|stat| unsafe { libc::syscall(libc::SYS_fstat, fd, stat) })
}

/// As `stat(2)`: the metadata of a path, following symbolic links.
pub(crate) fn stat(path: &CStr) -> CallResult<libc::stat> {
    stat_at(path, 0)
}

/// As `lstat(2)`: the metadata of a path, without following symbolic links.
pub(crate) fn lstat(path: &CStr) -> CallResult<libc::stat> {
    stat_at(path, libc::AT_SYMLINK_NOFOLLOW)
}

fn stat_at(path: &CStr, flags: c_int) -> CallResult<libc::stat> {
    stat_below(libc::AT_FDCWD, path, flags)
}

pub(crate) fn fchmod(fd: c_int, mode: u32) -> CallResult<()> {
    // SAFETY: numbers go in.
    answer(unsafe { libc::syscall(libc::SYS_fchmod, fd, mode) }).map(drop)
}

pub(crate) fn fchown(fd: c_int, user: u32, group: u32) -> CallResult<()> {
    // SAFETY: numbers go in.
    answer(unsafe { libc::syscall(libc::SYS_fchown, fd, user, group) }).map(drop)
}

pub(crate) fn unlink(path: &CStr) -> CallResult<()> {
    // SAFETY: the path is a C string.
    answer(unsafe { libc::syscall(libc::SYS_unlinkat, libc::AT_FDCWD, path.as_ptr(), 0) }).map(drop)
}

/// Gives a file another name, unless that is taken (`EEXIST`).
pub(crate) fn rename_new(from: &CStr, to: &CStr) -> CallResult<()> {
    let at = libc::AT_FDCWD;
    // SAFETY: both paths are C strings.
    answer(unsafe {
        libc::syscall(libc::SYS_renameat2, at, from.as_ptr(), at, to.as_ptr(), libc::RENAME_NOREPLACE)
    })
    .map(drop)
}

/// Gives a file a second name, unless that is taken (`EEXIST`).
pub(crate) fn link(from: &CStr, to: &CStr) -> CallResult<()> {
    let at = libc::AT_FDCWD;
    // SAFETY: both paths are C strings.
    answer(unsafe { libc::syscall(libc::SYS_linkat, at, from.as_ptr(), at, to.as_ptr(), 0) }).map(drop)
}

/// Whether a file is in a tmpfs.
pub(crate) fn is_in_tmpfs(fd: &Fd) -> bool {
    let mut found = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the kernel fills the structure that the pointer leads to.
    let asked = answer(unsafe { libc::syscall(libc::SYS_fstatfs, fd.raw(), found.as_mut_ptr()) });
    // SAFETY: all zeroes are a value of this plain structure.
    asked.is_ok() && unsafe { found.assume_init() }.f_type == libc::TMPFS_MAGIC
}

/// The path of an open file, as the kernel has it.
pub(crate) fn path_of(fd: c_int) -> CallResult<Text> {
    let mut link: Text<64> = Text::of(&[b"/proc/self/fd/"]);
    link.push_number(fd.unsigned_abs());
    let mut bytes = [0_u8; 4096];
    let (at, path) = (libc::AT_FDCWD, link.c_str()?.as_ptr());
    // SAFETY: the path is a C string, and the kernel fills at most as many bytes as there are.
    let read =
        answer(unsafe { libc::syscall(libc::SYS_readlinkat, at, path, bytes.as_mut_ptr(), bytes.len()) })?;
    Ok(Text::of(&[bytes.get(..usize::try_from(read).unwrap_or(0)).unwrap_or(&[])]))
}

/// The status of a name below an open directory.
pub(crate) fn stat_below(dir: c_int, path: &CStr, flags: c_int) -> CallResult<libc::stat> {
    // SAFETY: the path is a C string, and the kernel fills the structure that the pointer leads to.
    stat_by(|stat| unsafe { libc::syscall(libc::SYS_newfstatat, dir, path.as_ptr(), stat, flags) })
}

pub(crate) fn close(fd: c_int) {
    drop(Fd(fd));
}

/// Reserves a range of a file, and makes the file long enough for it.
pub(crate) fn reserve(fd: c_int, from: i64, bytes: i64) -> CallResult<()> {
    // The kernel undoes a reservation that a signal interrupts, so in a program with a fast timer a large one would never end.
    let signals = block_signals();
    let result = loop {
        // SAFETY: numbers go in.
        match answer(unsafe { libc::syscall(libc::SYS_fallocate, fd, 0, from, bytes) }) {
            Err(libc::EINTR) => {}
            done => break done.map(drop),
        }
    };
    restore_signals(signals);
    result
}

/// The kernel's set of signals: 64 bits.
fn set_signals(mask: u64) -> u64 {
    let mut before = 0_u64;
    let (mask, old) = (&raw const mask, &raw mut before);
    // SAFETY: both pointers lead to eight bytes, as the last argument says.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, mask, old, 8_usize) };
    before
}

fn block_signals() -> u64 {
    set_signals(u64::MAX)
}

fn restore_signals(mask: u64) {
    set_signals(mask);
}

fn lock_of(from: u64, bytes: u64, kind: c_int) -> libc::flock {
    libc::flock {
        l_type: libc::c_short::try_from(kind).unwrap_or(0),
        l_whence: 0,
        l_start: from.cast_signed(),
        l_len: bytes.cast_signed(),
        l_pid: 0,
    }
}

/// Sets the lock of this opening on a range; `false` if another opening's is in the way.
pub(crate) fn lock(fd: c_int, from: u64, bytes: u64, kind: c_int) -> CallResult<bool> {
    let lock = lock_of(from, bytes, kind);
    // SAFETY: the structure lives until the call returns.
    match answer(unsafe { libc::syscall(libc::SYS_fcntl, fd, libc::F_OFD_SETLK, &raw const lock) }) {
        Ok(_) => Ok(true),
        Err(libc::EAGAIN | libc::EACCES) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether another opening has a lock on a part of a range.
pub(crate) fn is_locked(fd: c_int, from: u64, bytes: u64) -> bool {
    let mut lock = lock_of(from, bytes, libc::F_WRLCK);
    // SAFETY: the structure lives until the call returns.
    let asked = answer(unsafe { libc::syscall(libc::SYS_fcntl, fd, libc::F_OFD_GETLK, &raw mut lock) });
    asked.is_ok() && c_int::from(lock.l_type) != libc::F_UNLCK
}

pub(crate) fn read_at(fd: c_int, bytes: &mut [u8], offset: i64) -> CallResult<usize> {
    // SAFETY: the slice is writable for its length.
    let read =
        answer(unsafe { libc::syscall(libc::SYS_pread64, fd, bytes.as_mut_ptr(), bytes.len(), offset) })?;
    Ok(usize::try_from(read).unwrap_or(0))
}

pub(crate) fn write_at(fd: c_int, bytes: &[u8], offset: i64) -> CallResult<()> {
    // SAFETY: the slice is readable for its length.
    let written =
        answer(unsafe { libc::syscall(libc::SYS_pwrite64, fd, bytes.as_ptr(), bytes.len(), offset) })?;
    if usize::try_from(written) == Ok(bytes.len()) { Ok(()) } else { Err(libc::ENOSPC) }
}

pub(crate) fn write_error(line: &[u8]) {
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_write, 2, line.as_ptr(), line.len()) };
}

/// Where reading and writing of a descriptor goes on.
pub(crate) fn position(fd: c_int) -> CallResult<i64> {
    // SAFETY: numbers go in.
    answer(unsafe { libc::syscall(libc::SYS_lseek, fd, 0_i64, libc::SEEK_CUR) })
}

pub(crate) fn pid() -> c_int {
    // SAFETY: no arguments.
    c_int::try_from(unsafe { libc::syscall(libc::SYS_getpid) }).unwrap_or(0)
}

pub(crate) fn user() -> u32 {
    // SAFETY: no arguments.
    u32::try_from(unsafe { libc::syscall(libc::SYS_geteuid) }).unwrap_or(0)
}

pub(crate) fn group() -> u32 {
    // SAFETY: no arguments.
    u32::try_from(unsafe { libc::syscall(libc::SYS_getegid) }).unwrap_or(0)
}

pub(crate) fn yield_now() {
    // SAFETY: no arguments.
    unsafe { libc::syscall(libc::SYS_sched_yield) };
}

/// Sleeps for less than a second.
pub(crate) fn pause(time: Duration) {
    let pause = libc::timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    // SAFETY: the structure lives until the call returns.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const pause, ptr::null_mut::<libc::timespec>()) };
}

/// A clock of the kernel: seconds, and nanoseconds of the second.
pub(crate) fn clock(which: libc::clockid_t) -> (i64, i64) {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the structure.
    unsafe { libc::syscall(libc::SYS_clock_gettime, which, &raw mut time) };
    (time.tv_sec, time.tv_nsec)
}

/// A number that others cannot guess, where the kernel gives one; the time otherwise.
pub(crate) fn random() -> u64 {
    let mut number = 0_u64;
    let place = &raw mut number;
    // SAFETY: the pointer leads to eight bytes, as the second argument says.
    let read = unsafe { libc::syscall(libc::SYS_getrandom, place, 8_usize, libc::GRND_NONBLOCK) };
    if read == 8 { number } else { clock(libc::CLOCK_MONOTONIC).1.cast_unsigned() }
}

pub(crate) fn page_bytes() -> u64 {
    // SAFETY: a number goes in.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Maps a file, shared.
pub(crate) fn map(
    at: usize,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> CallResult<usize> {
    let hint = ptr::without_provenance_mut(at);
    // SAFETY: without MAP_FIXED the kernel chooses a free range; with it, the program has asked for this one.
    let start = unsafe { libc::mmap(hint, len, protection, libc::MAP_SHARED | flags, fd, offset) };
    if start == libc::MAP_FAILED { Err(errno()) } else { Ok(start.expose_provenance()) }
}

pub(crate) fn unmap(start: usize, len: usize) {
    // SAFETY: the range is a mapping of ours; the program says by its call that it does not use it any more.
    unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), len) };
}

/// The value of an environment variable. It is read while the library is loaded, before the program could change it.
pub(crate) fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the name is a C string.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: what the environment has is a C string.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

/// The address of a symbol in the libraries that come after this one.
pub(crate) fn next_symbol(name: &CStr) -> *mut c_void {
    // SAFETY: the name is a C string.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// Calls `each` with the inode and name of every entry of a directory, until it gives `false`.
pub(crate) fn entries(dir: &CStr, mut each: impl FnMut(u64, &CStr) -> bool) -> CallResult<()> {
    let fd = open(dir, libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC, 0)?;
    let mut bytes = [0_u8; 8192];
    loop {
        // SAFETY: the kernel fills at most as many bytes as there are.
        let read = unsafe { libc::syscall(libc::SYS_getdents64, fd.raw(), bytes.as_mut_ptr(), bytes.len()) };
        let read = usize::try_from(answer(read)?).unwrap_or(0);
        let mut rest = bytes.get(..read).unwrap_or(&[]);
        if rest.is_empty() {
            return Ok(());
        }
        // Inode, offset, length of the record, type, name: 8, 8, 2, 1 bytes and the rest.
        while let (Some(inode), Some(len)) = (number::<8>(rest, 0), number::<2>(rest, 16)) {
            let len = usize::try_from(len).unwrap_or(0);
            let name = rest.get(19..len).and_then(|name| CStr::from_bytes_until_nul(name).ok());
            if name.is_some_and(|name| !each(inode, name)) {
                return Ok(());
            }
            match rest.get(len..) {
                Some(next) if len > 0 => rest = next,
                _ => break,
            }
        }
    }
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut wide = [0; 8];
    wide.get_mut(..N)?.copy_from_slice(bytes.get(at..at.checked_add(N)?)?);
    Some(u64::from_le_bytes(wide))
}
