//! Devices and their primary contexts. A context is only a number here, with the rules of the real driver: each thread needs a
//! current one, it exists while it is retained, and memory that was allocated in it is freed with it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::physical::{GRANULARITY, Physical, shared_dir};
use crate::{Outcome, code, done, ipc, linear, put, space, stream};

/// The driver version that it reports.
const VERSION: c_int = 12_080;
/// Bytes that a device has where no directory limits them.
pub(crate) const TOTAL: u64 = 1 << 30;
/// Contexts are opaque addresses: not null, and distinguishable from other pointers.
const CONTEXTS: usize = 0xc0de_0000;

/// The process that called `cuInit`. As with the real driver, a forked child can neither use the driver nor initialize it again.
static STARTED: AtomicUsize = AtomicUsize::new(0);
/// Per device: how often its primary context is retained, and the memory that the context takes.
static RETAINED: Mutex<BTreeMap<c_int, (usize, Option<Physical>)>> = Mutex::new(BTreeMap::new());

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// The machine's devices that this process sees, by their numbers on the machine.
fn visible() -> Vec<u8> {
    if std::env::var_os("FAKE_CUDA_MIG").is_some() {
        return vec![0];
    }
    let all = std::env::var("FAKE_CUDA_DEVICES").ok().and_then(|all| all.parse().ok()).unwrap_or(2_u8);
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        // As in the driver, the first invalid entry ends the list.
        Ok(list) => {
            let chosen = list.split(',').map_while(|one| one.trim().parse().ok());
            chosen.take_while(|one| *one < all).collect()
        }
        Err(_) => (0..all).collect(),
    }
}

/// The UUID of a device of the machine. A partition has a UUID of its own.
fn uuid_of(device: u8) -> [u8; 16] {
    let mut uuid = *b"\x5f\x68\x6d\x65\x73\x68\x40\x00\x80\x00fake\x00\x00";
    uuid[15] = device;
    if let Some(partition) = std::env::var("FAKE_CUDA_MIG").ok().and_then(|number| number.parse().ok()) {
        uuid[14] = partition;
        uuid[13] = b'm';
    }
    uuid
}

/// The ordinal by which this process knows a device.
pub(crate) fn visible_ordinal(uuid: &[u8; 16]) -> Outcome<c_int> {
    let found = visible().into_iter().position(|device| uuid_of(device) == *uuid);
    // Memory of a MIG partition cannot be shared; an absent device is a different error.
    let is_partitioned = uuid[13] == b'm' || std::env::var_os("FAKE_CUDA_MIG").is_some();
    let missing = if is_partitioned { code::NOT_PERMITTED } else { code::INVALID_DEVICE };
    found.and_then(|found| c_int::try_from(found).ok()).ok_or(missing)
}

pub(crate) fn uuid(ordinal: c_int) -> Outcome<[u8; 16]> {
    started()?;
    let devices = visible();
    let device = usize::try_from(ordinal).ok().and_then(|ordinal| devices.get(ordinal));
    device.copied().map(uuid_of).ok_or(code::INVALID_DEVICE)
}

pub(crate) fn started() -> Outcome {
    if STARTED.load(Ordering::Acquire) == std::process::id() as usize {
        Ok(())
    } else {
        Err(code::NOT_INITIALIZED)
    }
}

/// The device of the context of this thread.
pub(crate) fn current() -> Outcome<c_int> {
    started()?;
    let context = CURRENT.get().checked_sub(CONTEXTS + 1).ok_or(code::INVALID_CONTEXT)?;
    let device = c_int::try_from(context).map_err(|_| code::INVALID_CONTEXT)?;
    stream::sound()?;
    if is_active(device) { Ok(device) } else { Err(code::CONTEXT_IS_DESTROYED) }
}

fn retained<T>(act: impl FnOnce(&mut BTreeMap<c_int, (usize, Option<Physical>)>) -> T) -> T {
    act(&mut RETAINED.lock().unwrap_or_else(PoisonError::into_inner))
}

fn is_active(device: c_int) -> bool {
    retained(|all| all.contains_key(&device))
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> c_int {
    if flags != 0 {
        return code::INVALID_VALUE;
    }
    if visible().is_empty() {
        return code::NO_DEVICE;
    }
    let me = std::process::id() as usize;
    match STARTED.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
        Err(other) if other != me => code::NOT_INITIALIZED,
        _ => code::SUCCESS,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    put(version, Ok(VERSION))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    put(count, started().and_then(|()| c_int::try_from(visible().len()).map_err(|_| code::INVALID_VALUE)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    put(device, uuid(ordinal).map(|_| ordinal))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_int {
    let (Ok(len), false) = (usize::try_from(len), name.is_null()) else { return code::INVALID_VALUE };
    if let Err(code) = uuid(device) {
        return code;
    }
    let text = b"fake CUDA device\0";
    if len < text.len() {
        return code::INVALID_VALUE;
    }
    // SAFETY: the caller gives room for `len` bytes.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
    code::SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(out: *mut [u8; 16], device: c_int) -> c_int {
    put(out, uuid(device))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(out: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    let value = match attribute {
        // Virtual memory, descriptors of it, integers of 64 bits on streams, pools.
        102 | 103 | 115 | 122 => 1,
        // Compute capability.
        75 => 9,
        _ => 0,
    };
    put(out, uuid(device).map(|_| value))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(out: *mut usize, device: c_int) -> c_int {
    put(out, uuid(device).map(|_| room().1))
}

/// Making a context takes a real driver longer than anything else here: so it is counted.
fn told() {
    use std::io::Write;
    if let Some(log) = std::env::var_os("FAKE_CUDA_CONTEXT_LOG")
        && let Ok(mut log) = std::fs::File::options().append(true).create(true).open(log)
    {
        let _ = log.write_all(b"made\n");
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(out: *mut usize, device: c_int) -> c_int {
    let retain = || {
        let uuid = uuid(device)?;
        let context = usize::try_from(device).map_err(|_| code::INVALID_DEVICE)? + CONTEXTS + 1;
        retained(|all| {
            if let Some((times, _)) = all.get_mut(&device) {
                *times += 1;
                return Ok(context);
            }
            let taken = std::env::var("FAKE_CUDA_CONTEXT_KIB").ok().and_then(|kib| kib.parse::<u64>().ok());
            let taken = taken.map(|kib| Physical::taken(kib << 10, uuid)).transpose()?;
            all.insert(device, (1, taken));
            told();
            Ok(context)
        })
    };
    if out.is_null() { code::INVALID_VALUE } else { put(out, retain()) }
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    let release = || {
        let uuid = uuid(device)?;
        let is_last = retained(|all| {
            let (times, _) = all.get_mut(&device).ok_or(code::INVALID_CONTEXT)?;
            *times -= 1;
            Outcome::Ok(*times == 0)
        })?;
        if is_last {
            retained(|all| all.remove(&device));
            space::with(|space| {
                linear::free_all(space, &uuid);
                ipc::close_all(space, &uuid);
            });
        }
        Ok(())
    };
    done(release())
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) -> c_int {
    match put(flags, uuid(device).map(|_| 0)) {
        code::SUCCESS => put(active, Ok(c_int::from(is_active(device)))),
        failed => failed,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(out: *mut usize) -> c_int {
    put(out, started().map(|()| CURRENT.get()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    let known = context == 0 || (1..=visible().len()).any(|device| CONTEXTS + device == context);
    if !known {
        return code::INVALID_CONTEXT;
    }
    done(started().map(|()| CURRENT.set(context)))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetDevice(out: *mut c_int) -> c_int {
    put(out, current())
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    done(current().and_then(stream::drain_all))
}

/// Free and all bytes.
pub(crate) fn room() -> (usize, usize) {
    let Some(dir) = shared_dir() else {
        let used = space::with(|space| {
            let mapped = space.spans.values().map(|span| span.size);
            mapped.sum::<u64>() + space.blocks.len() as u64 * GRANULARITY
        });
        let free = usize::try_from(TOTAL.saturating_sub(used)).unwrap_or(0);
        return (free, usize::try_from(TOTAL).unwrap_or(0));
    };
    let path = std::ffi::CString::new(dir.as_os_str().as_bytes()).unwrap_or_default();
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path ends with a zero, and there is room for the answer, which is zero before.
    let stat = unsafe {
        libc::statvfs(path.as_ptr(), stat.as_mut_ptr());
        stat.assume_init()
    };
    let bytes = |blocks: u64| usize::try_from(blocks * stat.f_frsize).unwrap_or(usize::MAX);
    (bytes(stat.f_bavail), bytes(stat.f_blocks))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    let outcome = current().map(|_| room());
    match put(free, outcome.map(|(free, _)| free)) {
        code::SUCCESS => put(total, outcome.map(|(_, total)| total)),
        failed => failed,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(error: c_int, out: *mut *const c_void) -> c_int {
    let text = match error {
        code::SUCCESS => c"no error",
        code::INVALID_VALUE => c"invalid argument",
        code::OUT_OF_MEMORY => c"out of memory",
        code::NOT_INITIALIZED => c"initialization error",
        code::NO_DEVICE => c"no CUDA-capable device is detected",
        code::INVALID_DEVICE => c"invalid device ordinal",
        code::INVALID_CONTEXT => c"invalid device context",
        code::INVALID_HANDLE => c"invalid resource handle",
        code::ILLEGAL_ADDRESS => c"an illegal memory access was encountered",
        code::CONTEXT_IS_DESTROYED => c"context is destroyed",
        code::ALREADY_REGISTERED => c"part or all of the requested memory range is already mapped",
        code::NOT_REGISTERED => c"pointer does not correspond to a registered memory region",
        code::NOT_PERMITTED => c"operation not permitted",
        code::NOT_SUPPORTED => c"operation not supported",
        code::UNKNOWN => c"unknown error",
        _ => return code::INVALID_VALUE,
    };
    put(out, Ok(text.as_ptr().cast()))
}
