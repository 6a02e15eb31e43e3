//! The functions that take the place of the C library's.
//!
//! Each decides whether the call concerns the IPC directory, and calls the C library's own otherwise. `errno` is as the program had
//! it after a success.
//!
//! `open`, `openat`, `fcntl` and `sem_open` are variadic in C, and stable Rust cannot define such functions. They are defined with
//! the greatest number of arguments instead. In the calling conventions of x86-64 (System V) and AArch64 on Linux, variadic
//! arguments of integer and pointer types travel as named ones do, so an argument that was passed is where it is expected, and
//! one that was not is any value, which is only used where the flags say that it was passed. `lib.rs` refuses other machines.

// UNSAFETY: functions that C programs call, and that call C functions.
#![expect(unsafe_code, reason = "the interface to C programs")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;

use crate::grow::{grow, is_refused};
use crate::locks::{length_of_lockf, shortened};
use crate::open::{Creation, changed_mode, take_if_here};
use crate::path::Text;
use crate::real::{self, Function};
use crate::semaphores::{self, SEMAPHORE_BYTES};
use crate::settings::{self, PosixSettings, settings};
use crate::sys::{self, CallResult, Fd};
use crate::sysv;

/// The greatest length of the name of shared memory, less one, as in the C library.
const MAX_NAME_BYTES: usize = 253;
/// The C library's `SEM_VALUE_MAX`.
const MAX_SEMAPHORE: c_uint = c_int::MAX.unsigned_abs();

#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = {
    extern "C" fn load() {
        let before = sys::errno();
        real::load();
        settings::load();
        sys::set_errno(before);
    }
    load
};

#[used]
#[unsafe(link_section = ".fini_array")]
static UNLOADED: extern "C" fn() = {
    extern "C" fn unload() {
        if let Some(settings) = settings() {
            sysv::leave(settings);
        }
    }
    unload
};

/// A function of the C library as a pointer of its type; `None` where there is none.
macro_rules! real {
    ($address:expr, $type:ty) => {{
        let address: *mut c_void = $address;
        // SAFETY: it is the function of this name in the C library, whose type is given, or null, which is `None`.
        unsafe { std::mem::transmute::<*mut c_void, Option<$type>>(address) }
    }};
}

/// The C library's function, or `ENOSYS` where it has none.
macro_rules! pass {
    ($before:expr, $function:expr, $type:ty, ($($argument:expr),*), $failed:expr) => {{
        let real = real!($function.address(), $type);
        sys::set_errno($before);
        match real {
            // SAFETY: the program's arguments.
            Some(real) => unsafe { real($($argument),*) },
            None => {
                sys::set_errno(libc::ENOSYS);
                $failed
            }
        }
    }};
}

/// Sets `errno` to the error, or back to what it was.
fn finish<T>(before: c_int, result: CallResult<T>, failed: T) -> T {
    match result {
        Ok(value) => {
            sys::set_errno(before);
            value
        }
        Err(error) => {
            sys::set_errno(error);
            failed
        }
    }
}

/// A C string of the program; `None` for a null pointer.
///
/// # Safety
/// The pointer is null or leads to a C string that lives as long as the result is used.
unsafe fn text<'t>(pointer: *const c_char) -> Option<&'t CStr> {
    // SAFETY: as promised.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })
}

fn nothing(_: &Fd) -> CallResult<()> {
    Ok(())
}

/// Opens a path if it is below the IPC directory; `None`: the C library does it.
///
/// # Safety
/// As [`text`].
unsafe fn open_here(path: *const c_char, flags: c_int, mode: c_uint) -> Option<c_int> {
    let settings = settings()?;
    if flags & (libc::O_PATH | libc::O_DIRECTORY) != 0 {
        return None;
    }
    // SAFETY: the caller's promise.
    let path = unsafe { text(path) }?;
    let name = settings.below(path.to_bytes())?;
    let before = sys::errno();
    // What is written once, as by `cp`, is a file for later; memory is mapped for reading and writing.
    // A file with execute bits is a program, and not memory: a marked file would not have them.
    let is_memory = flags & libc::O_ACCMODE == libc::O_RDWR && mode & 0o111 == 0;
    let is_marked = is_memory && !settings.is_kept(name);
    let creation = Creation { mode, is_marked, fill: &nothing };
    match crate::open::open(settings, path, flags, &creation) {
        Some(opened) => Some(finish(before, opened.map(Fd::into_raw), -1)),
        None => {
            sys::set_errno(before);
            None
        }
    }
}

/// The places of a template that `mkstemp` fills, and the digits that it fills them with.
const PLACES: &[u8] = b"XXXXXX";
const DIGITS: &[u8] = b"0123456789abcdefghijklmnopqrstuv";
/// Names that are tried until one is free.
const MAX_TEMPLATES: u32 = 10_000;

/// Makes a file whose name has digits in place of the template's, if it is below the IPC directory; `None`: the C library does it.
///
/// # Safety
/// As `mkostemps(3)`: the template is null or a C string that this may change.
unsafe fn make_here(template: *mut c_char, suffix: c_int, flags: c_int) -> Option<c_int> {
    // SAFETY: the caller's promise.
    let path = unsafe { text(template) }?.to_bytes();
    settings()?.below(path)?;
    let at = path.len().checked_sub(usize::try_from(suffix).ok()?)?.checked_sub(PLACES.len())?;
    if !path.get(at..)?.starts_with(PLACES) {
        return None;
    }
    // SAFETY: the places are inside the C string, in front of its final zero.
    let fill = |digits: [u8; 6]| unsafe { template.add(at).cast::<[u8; 6]>().write(digits) };
    let flags = flags & !libc::O_ACCMODE | libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    let before = sys::errno();
    for _ in 0..MAX_TEMPLATES {
        let mut random = sys::random();
        fill(std::array::from_fn(|_| {
            random = random.rotate_right(5);
            DIGITS.get(usize::try_from(random % 32).unwrap_or(0)).copied().unwrap_or(b'0')
        }));
        // SAFETY: the template, which is a C string as before.
        match unsafe { open_here(template, flags, 0o600) } {
            Some(-1) if sys::errno() == libc::EEXIST => sys::set_errno(before),
            Some(done) => return Some(done),
            None => break,
        }
    }
    fill(*b"XXXXXX");
    None
}

/// # Safety
/// As `mkostemps(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn mkostemps(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
    type Mkostemps = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    let before = sys::errno();
    // SAFETY: the program's arguments.
    match unsafe { make_here(template, suffix, flags) } {
        Some(made) => made,
        None => pass!(before, real::MKOSTEMPS, Mkostemps, (template, suffix, flags), -1),
    }
}

/// # Safety
/// As `openat(2)`.
unsafe fn open_elsewhere(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, ...) -> c_int;
    match real!(real::OPENAT.known_address(), OpenAt) {
        // SAFETY: the program's arguments.
        Some(real) => unsafe { real(dir, path, flags, mode) },
        // Before this library is initialized: what the C library does, without asking for it.
        None => {
            // SAFETY: the kernel checks all arguments.
            let fd = unsafe { libc::syscall(libc::SYS_openat, dir, path, flags, mode) };
            c_int::try_from(fd).unwrap_or(-1)
        }
    }
}

/// # Safety
/// As `open(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the program's arguments, here and below.
    unsafe { openat(libc::AT_FDCWD, path, flags, mode) }
}

/// # Safety
/// As `openat(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn openat(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the program's arguments.
    unsafe { open_here(path, flags, mode).unwrap_or_else(|| open_with_lease(dir, path, flags, mode)) }
}

/// Opens a path that does not show whether it leads to the IPC directory: such a file has a lease too.
///
/// # Safety
/// As `openat(2)`.
unsafe fn open_with_lease(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the program's arguments.
    let fd = unsafe { open_elsewhere(dir, path, flags, mode) };
    let Some(settings) = settings() else { return fd };
    if fd < 0 || flags & (libc::O_PATH | libc::O_DIRECTORY) != 0 {
        return fd;
    }
    let before = sys::errno();
    let is_usable = take_if_here(settings, fd);
    sys::set_errno(before);
    if is_usable {
        return fd;
    }
    // A collector has removed it meanwhile: the name is free, or another file's.
    sys::close(fd);
    sys::set_errno(before);
    // SAFETY: as above.
    unsafe { open_elsewhere(dir, path, flags, mode) }
}

/// Other names of functions above: for large files, and for a fortified C library.
macro_rules! also_named {
    ($($name:ident($($argument:ident: $type:ty),*) = $other:ident($($passed:expr),*) -> $result:ty;)*) => {
        $(
            /// # Safety
            /// As the function that it calls.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> $result {
                // SAFETY: the program's arguments.
                unsafe { $other($($passed),*) }
            }
        )*
    };
}

also_named! {
    open64(path: *const c_char, flags: c_int, mode: c_uint) = open(path, flags, mode) -> c_int;
    openat64(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) = openat(dir, path, flags, mode) -> c_int;
    __open_2(path: *const c_char, flags: c_int) = open(path, flags, 0) -> c_int;
    __open64_2(path: *const c_char, flags: c_int) = open(path, flags, 0) -> c_int;
    __openat_2(dir: c_int, path: *const c_char, flags: c_int) = openat(dir, path, flags, 0) -> c_int;
    __openat64_2(dir: c_int, path: *const c_char, flags: c_int) = openat(dir, path, flags, 0) -> c_int;
    creat(path: *const c_char, mode: c_uint) = open(path, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode) -> c_int;
    creat64(path: *const c_char, mode: c_uint) = creat(path, mode) -> c_int;
    mkstemp(template: *mut c_char) = mkostemps(template, 0, 0) -> c_int;
    mkstemp64(template: *mut c_char) = mkostemps(template, 0, 0) -> c_int;
    mkostemp(template: *mut c_char, flags: c_int) = mkostemps(template, 0, flags) -> c_int;
    mkostemp64(template: *mut c_char, flags: c_int) = mkostemps(template, 0, flags) -> c_int;
    mkstemps(template: *mut c_char, suffix: c_int) = mkostemps(template, suffix, 0) -> c_int;
    mkstemps64(template: *mut c_char, suffix: c_int) = mkostemps(template, suffix, 0) -> c_int;
    mkostemps64(template: *mut c_char, suffix: c_int, flags: c_int) = mkostemps(template, suffix, flags) -> c_int;
    ftruncate64(fd: c_int, len: i64) = ftruncate(fd, len) -> c_int;
    fallocate64(fd: c_int, mode: c_int, from: i64, len: i64) = fallocate(fd, mode, from, len) -> c_int;
    posix_fallocate64(fd: c_int, from: i64, len: i64) = posix_fallocate(fd, from, len) -> c_int;
    fcntl64(fd: c_int, command: c_int, argument: *mut c_void) = fcntl(fd, command, argument) -> c_int;
    lockf64(fd: c_int, command: c_int, len: i64) = lockf(fd, command, len) -> c_int;
    fopen64(path: *const c_char, mode: *const c_char) = fopen(path, mode) -> *mut c_void;
}

/// # Safety
/// As `ftruncate(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn ftruncate(fd: c_int, len: i64) -> c_int {
    let before = sys::errno();
    match settings().and_then(|settings| grow(settings, fd, len)) {
        Some(result) => finish(before, result.map(|()| 0), -1),
        None => pass!(before, real::FTRUNCATE, unsafe extern "C" fn(c_int, i64) -> c_int, (fd, len), -1),
    }
}

/// # Safety
/// As `fallocate(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fallocate(fd: c_int, mode: c_int, from: i64, len: i64) -> c_int {
    type Fallocate = unsafe extern "C" fn(c_int, c_int, i64, i64) -> c_int;
    let before = sys::errno();
    if settings().is_some_and(|settings| is_refused(settings, fd, mode, from, len)) {
        return finish(before, Err(libc::ENOSPC), -1);
    }
    pass!(before, real::FALLOCATE, Fallocate, (fd, mode, from, len), -1)
}

/// Returns the error number, and leaves `errno` alone.
///
/// # Safety
/// As `posix_fallocate(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_fallocate(fd: c_int, from: i64, len: i64) -> c_int {
    type PosixFallocate = unsafe extern "C" fn(c_int, i64, i64) -> c_int;
    let before = sys::errno();
    if settings().is_some_and(|settings| is_refused(settings, fd, 0, from, len)) {
        return finish(before, Ok(libc::ENOSPC), 0);
    }
    pass!(before, real::POSIX_FALLOCATE, PosixFallocate, (fd, from, len), libc::ENOSYS)
}

/// # Safety
/// As `fcntl(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    type Fcntl = unsafe extern "C" fn(c_int, c_int, ...) -> c_int;
    let is_lock = matches!(
        command,
        libc::F_GETLK
            | libc::F_SETLK
            | libc::F_SETLKW
            | libc::F_OFD_GETLK
            | libc::F_OFD_SETLK
            | libc::F_OFD_SETLKW
    );
    let mut lock;
    let mut passed = argument;
    let mut is_shortened = false;
    if is_lock
        && !argument.is_null()
        && let Some(settings) = settings()
    {
        let before = sys::errno();
        // SAFETY: the program passes a `struct flock` with these commands.
        let asked = unsafe { argument.cast::<libc::flock>().read() };
        if let Some(shorter) = shortened(settings, fd, &asked) {
            lock = shorter;
            passed = (&raw mut lock).cast();
            is_shortened = true;
        }
        sys::set_errno(before);
    }
    let result = match real!(real::FCNTL.known_address(), Fcntl) {
        // SAFETY: the program's arguments, or a structure that lives until the call returns.
        Some(real) => unsafe { real(fd, command, passed) },
        None => {
            // SAFETY: as above, and the kernel checks all of them.
            let result = unsafe { libc::syscall(libc::SYS_fcntl, fd, command, passed) };
            c_int::try_from(result).unwrap_or(-1)
        }
    };
    if is_shortened && result != -1 && matches!(command, libc::F_GETLK | libc::F_OFD_GETLK) {
        // SAFETY: both are a `struct flock`. The answer is the lock in the way, or the question with F_UNLCK.
        unsafe {
            let answer = passed.cast::<libc::flock>().read();
            if c_int::from(answer.l_type) == libc::F_UNLCK {
                (*argument.cast::<libc::flock>()).l_type = answer.l_type;
            } else {
                argument.cast::<libc::flock>().write(answer);
            }
        }
    }
    result
}

/// # Safety
/// As `lockf(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn lockf(fd: c_int, command: c_int, len: i64) -> c_int {
    let before = sys::errno();
    let len = settings().map_or(len, |settings| length_of_lockf(settings, fd, len));
    pass!(before, real::LOCKF, unsafe extern "C" fn(c_int, c_int, i64) -> c_int, (fd, command, len), -1)
}

/// # Safety
/// As `fchmod(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fchmod(fd: c_int, mode: c_uint) -> c_int {
    let before = sys::errno();
    let changed = settings()
        .and_then(|settings| changed_mode(settings, &sys::fstat(fd).ok()?, mode, false))
        .unwrap_or(mode);
    pass!(before, real::FCHMOD, unsafe extern "C" fn(c_int, c_uint) -> c_int, (fd, changed), -1)
}

/// # Safety
/// As `chmod(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn chmod(path: *const c_char, mode: c_uint) -> c_int {
    let before = sys::errno();
    let changed = settings().and_then(|settings| {
        // SAFETY: the program's argument.
        let path = unsafe { text(path) }?;
        settings.below(path.to_bytes())?;
        changed_mode(settings, &sys::stat(path).ok()?, mode, true)
    });
    sys::set_errno(before);
    pass!(
        before,
        real::CHMOD,
        unsafe extern "C" fn(*const c_char, c_uint) -> c_int,
        (path, changed.unwrap_or(mode)),
        -1
    )
}

/// # Safety
/// As `fchmodat(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fchmodat(dir: c_int, path: *const c_char, mode: c_uint, flags: c_int) -> c_int {
    type FchmodAt = unsafe extern "C" fn(c_int, *const c_char, c_uint, c_int) -> c_int;
    let before = sys::errno();
    let changed = settings().and_then(|settings| {
        // SAFETY: the program's argument.
        let path = unsafe { text(path) }?;
        let is_below = settings.below(path.to_bytes()).is_some();
        changed_mode(settings, &sys::stat_below(dir, path, flags).ok()?, mode, is_below)
    });
    pass!(before, real::FCHMODAT, FchmodAt, (dir, path, changed.unwrap_or(mode), flags), -1)
}

/// The C library's list of System V segments is the kernel's file. Programs that cannot open it call `shmctl`, which knows the segments of
/// the IPC directory.
///
/// # Safety
/// As `fopen(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char) -> *mut c_void {
    type Fopen = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut c_void;
    let before = sys::errno();
    // SAFETY: the program's argument.
    if settings().is_some() && unsafe { text(path) } == Some(c"/proc/sysvipc/shm") {
        sys::set_errno(libc::ENOENT);
        return std::ptr::null_mut();
    }
    let file = pass!(before, real::FOPEN, Fopen, (path, mode), std::ptr::null_mut());
    if let Some(settings) = settings()
        && !file.is_null()
    {
        let before = sys::errno();
        // SAFETY: the C library has just opened this file.
        take_if_here(settings, unsafe { libc::fileno(file.cast()) });
        sys::set_errno(before);
    }
    file
}

/// The file of a name of shared memory, and whether it is marked. `None`: the C library says what is wrong with the name.
///
/// # Safety
/// As [`text`].
unsafe fn named<'p>(
    settings: &PosixSettings,
    name: *const c_char,
    kind: &[u8],
    path: &'p mut Text,
) -> Option<(CallResult<&'p CStr>, bool)> {
    // SAFETY: the caller's promise.
    let mut name = unsafe { text(name) }?.to_bytes();
    while let Some(rest) = name.strip_prefix(b"/") {
        name = rest;
    }
    let is_valid = !name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.contains(&b'/');
    is_valid.then(|| {
        for part in [settings.dir(), b"/", kind, settings.prefix_of(name), name] {
            path.push(part);
        }
        (path.c_str(), !settings.is_kept(name))
    })
}

/// # Safety
/// As `shm_open(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn shm_open(name: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    let before = sys::errno();
    let opened = settings().and_then(|settings| {
        let mut place = Text::new();
        // SAFETY: the program's argument.
        let (path, is_marked) = unsafe { named(settings, name, b"", &mut place) }?;
        let path = match path {
            Ok(path) => path,
            Err(error) => return Some(Err(error)),
        };
        // As the C library does.
        let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let is_marked = is_marked && flags & libc::O_ACCMODE != libc::O_WRONLY;
        crate::open::open(settings, path, flags, &Creation { mode, is_marked, fill: &nothing })
    });
    match opened {
        Some(Err(libc::EISDIR)) => finish(before, Err(libc::EINVAL), -1),
        Some(opened) => finish(before, opened.map(Fd::into_raw), -1),
        None => pass!(
            before,
            real::SHM_OPEN,
            unsafe extern "C" fn(*const c_char, c_int, c_uint) -> c_int,
            (name, flags, mode),
            -1
        ),
    }
}

/// # Safety
/// As `shm_unlink(3)` and `sem_unlink(3)`.
unsafe fn unlink_named(name: *const c_char, kind: &[u8], real: &Function) -> c_int {
    let before = sys::errno();
    let removed = settings().and_then(|settings| {
        let mut place = Text::new();
        // SAFETY: the program's argument.
        let (path, _) = unsafe { named(settings, name, kind, &mut place) }?;
        Some(path.and_then(sys::unlink))
    });
    match removed {
        // As the C library does.
        Some(Err(libc::EPERM)) => finish(before, Err(libc::EACCES), -1),
        Some(removed) => finish(before, removed.map(|()| 0), -1),
        None => pass!(before, real, unsafe extern "C" fn(*const c_char) -> c_int, (name), -1),
    }
}

/// # Safety
/// As `shm_unlink(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn shm_unlink(name: *const c_char) -> c_int {
    // SAFETY: the program's argument.
    unsafe { unlink_named(name, b"", &real::SHM_UNLINK) }
}

/// # Safety
/// As `sem_unlink(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn sem_unlink(name: *const c_char) -> c_int {
    // SAFETY: the program's argument.
    unsafe { unlink_named(name, b"sem.", &real::SEM_UNLINK) }
}

/// The initial bytes of a semaphore, written by the C library's `sem_init`.
fn initial_semaphore(value: c_uint) -> Option<[u8; SEMAPHORE_BYTES]> {
    type SemInit = unsafe extern "C" fn(*mut libc::sem_t, c_int, c_uint) -> c_int;
    let init = real!(real::SEM_INIT.address(), SemInit)?;
    let mut semaphore = MaybeUninit::<libc::sem_t>::zeroed();
    // SAFETY: the structure is as large as the C library's, and lives until the call returns.
    if unsafe { init(semaphore.as_mut_ptr(), 1, value) } != 0 {
        return None;
    }
    // SAFETY: all bytes were zero or have been written, and bytes have no other invariant.
    Some(unsafe { semaphore.as_ptr().cast::<[u8; SEMAPHORE_BYTES]>().read() })
}

/// # Safety
/// As `sem_open(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn sem_open(name: *const c_char, flags: c_int, mode: c_uint, value: c_uint) -> *mut c_void {
    type SemOpen = unsafe extern "C" fn(*const c_char, c_int, ...) -> *mut c_void;
    let before = sys::errno();
    let creates = flags & libc::O_CREAT != 0;
    let opened = settings().and_then(|settings| {
        let mut place = Text::new();
        // SAFETY: the program's argument.
        let (path, is_marked) = unsafe { named(settings, name, b"sem.", &mut place) }?;
        let value = if creates { value } else { 0 };
        if value > MAX_SEMAPHORE {
            return Some(Err(libc::EINVAL));
        }
        // Not by the C library's function, whose directory may be another one.
        let Some(initial) = initial_semaphore(value) else { return Some(Err(libc::ENOSYS)) };
        match path {
            Ok(path) => semaphores::open_semaphore(settings, path, flags, mode, is_marked, &initial),
            Err(error) => Some(Err(error)),
        }
    });
    match opened {
        Some(opened) => std::ptr::with_exposed_provenance_mut(finish(before, opened, 0)),
        None => pass!(before, real::SEM_OPEN, SemOpen, (name, flags, mode, value), std::ptr::null_mut()),
    }
}

/// # Safety
/// As `sem_close(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn sem_close(semaphore: *mut c_void) -> c_int {
    let before = sys::errno();
    if semaphores::close_semaphore(semaphore.addr()) {
        return finish(before, Ok(0), -1);
    }
    pass!(before, real::SEM_CLOSE, unsafe extern "C" fn(*mut c_void) -> c_int, (semaphore), -1)
}

/// # Safety
/// As `shmget(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn shmget(key: c_int, size: usize, flags: c_int) -> c_int {
    let before = sys::errno();
    match settings() {
        Some(settings) => finish(before, sysv::get(settings, key, size, flags), -1),
        None => {
            pass!(
                before,
                real::SHMGET,
                unsafe extern "C" fn(c_int, usize, c_int) -> c_int,
                (key, size, flags),
                -1
            )
        }
    }
}

/// # Safety
/// As `shmat(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn shmat(id: c_int, at: *const c_void, flags: c_int) -> *mut c_void {
    type Shmat = unsafe extern "C" fn(c_int, *const c_void, c_int) -> *mut c_void;
    let before = sys::errno();
    match settings() {
        Some(settings) => {
            let attached = sysv::attach(settings, id, at.addr(), flags);
            std::ptr::with_exposed_provenance_mut(finish(before, attached, usize::MAX))
        }
        None => pass!(before, real::SHMAT, Shmat, (id, at, flags), libc::MAP_FAILED),
    }
}

/// # Safety
/// As `shmdt(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn shmdt(at: *const c_void) -> c_int {
    let before = sys::errno();
    match settings() {
        Some(settings) => finish(before, sysv::detach(settings, at.addr()).map(|()| 0), -1),
        None => pass!(before, real::SHMDT, unsafe extern "C" fn(*const c_void) -> c_int, (at), -1),
    }
}

/// # Safety
/// As `shmctl(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn shmctl(id: c_int, command: c_int, buffer: *mut c_void) -> c_int {
    type Shmctl = unsafe extern "C" fn(c_int, c_int, *mut c_void) -> c_int;
    let before = sys::errno();
    let Some(settings) = settings() else {
        return pass!(before, real::SHMCTL, Shmctl, (id, command, buffer), -1);
    };
    let result = sysv::ShmctlCommand::of(command).and_then(|command| {
        if command.has_buffer() && buffer.is_null() {
            return Err(libc::EFAULT);
        }
        match command {
            sysv::ShmctlCommand::Remove => sysv::remove(settings, id).map(|()| 0),
            sysv::ShmctlCommand::Set => {
                // SAFETY: the program passes a `struct shmid_ds` with this command.
                let wanted = unsafe { buffer.cast::<libc::shmid_ds>().read() };
                sysv::set(settings, id, &wanted).map(|()| 0)
            }
            sysv::ShmctlCommand::Stat { by_index } => {
                let (id, state) = sysv::state(settings, id, by_index)?;
                // SAFETY: all zeroes are a value of this plain structure.
                let mut answer = unsafe { MaybeUninit::<libc::shmid_ds>::zeroed().assume_init() };
                state.fill(&mut answer);
                // SAFETY: the program passes a `struct shmid_ds` with this command.
                unsafe { buffer.cast::<libc::shmid_ds>().write(answer) };
                Ok(if by_index { id } else { 0 })
            }
            sysv::ShmctlCommand::Limits => {
                // SAFETY: the program passes a `struct shminfo` with this command.
                unsafe { buffer.cast::<sysv::SegmentLimits>().write(sysv::SegmentLimits::of(settings)) };
                Ok(sysv::sums(settings).highest_index())
            }
            sysv::ShmctlCommand::Sums => {
                let sums = sysv::sums(settings);
                // SAFETY: the program passes a `struct shm_info` with this command.
                unsafe { buffer.cast::<sysv::SegmentSums>().write(sums) };
                Ok(sums.highest_index())
            }
        }
    });
    finish(before, result, -1)
}
