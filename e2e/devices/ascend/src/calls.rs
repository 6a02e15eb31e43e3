//! The calls of the library.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::memory::{self, PAGE};
use crate::wire::{self, KEY_BYTES, Op, PIDS_PER_CALL, Packet};
use crate::{code, npud};

type Outcome<T = ()> = Result<T, c_int>;

/// Bytes that one allocation may have: nothing else limits a memfd, and the kernel would kill a process to free memory.
const DEVICE_BYTES: usize = 1 << 30;

static STARTED: AtomicBool = AtomicBool::new(false);
/// The connection to the daemon, and the process that made it: a forked child is another process.
static DAEMON: Mutex<Option<(u32, OwnedFd)>> = Mutex::new(None);

thread_local! {
    /// The context of this thread, 0 without one.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Contexts that were made apart from those that devices have anyway.
static MADE: Mutex<BTreeMap<usize, i32>> = Mutex::new(BTreeMap::new());
/// Contexts are addresses: the default contexts of devices begin at the first one, created contexts at the second.
const DEFAULT_CONTEXTS: usize = 0xacc1_0000;
const MADE_CONTEXTS: usize = 0xacc2_0000;

fn made<T>(act: impl FnOnce(&mut BTreeMap<usize, i32>) -> T) -> T {
    act(&mut MADE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The device of a context that has not ended.
fn device_of(context: usize) -> Outcome<i32> {
    if let Some(device) = made(|all| all.get(&context).copied()) {
        return Ok(device);
    }
    let number = context.checked_sub(DEFAULT_CONTEXTS).and_then(|number| i32::try_from(number).ok());
    number.filter(|number| (0..devices()).contains(number)).ok_or(code::CONTEXT_NULL)
}

fn devices() -> i32 {
    if std::env::var_os("FAKE_NPU_SOCK").is_none() {
        return 0;
    }
    std::env::var("FAKE_NPU_DEVICES").ok().and_then(|all| all.parse().ok()).unwrap_or(1)
}

fn is_set(variable: &str, value: &str) -> bool {
    std::env::var(variable).is_ok_and(|set| set == value)
}

/// Sends a request to the daemon.
fn ask(question: &Packet, fd: Option<&OwnedFd>) -> Outcome<(Packet, Option<OwnedFd>)> {
    let mut daemon = DAEMON.lock().unwrap_or_else(PoisonError::into_inner);
    let me = std::process::id();
    if daemon.as_ref().is_none_or(|(whose, _)| *whose != me) {
        let path = std::env::var_os("FAKE_NPU_SOCK").ok_or(code::INVALID_DEVICE)?;
        *daemon = Some((me, npud::connect(Path::new(&path)).map_err(|_| code::INVALID_DEVICE)?));
    }
    let Some((_, socket)) = daemon.as_ref() else { return Err(code::INVALID_DEVICE) };
    wire::send(socket.as_raw_fd(), question, fd.map(AsFd::as_fd)).map_err(|_| code::DRIVER)?;
    let (answer, fd) = wire::receive(socket.as_raw_fd()).ok().flatten().ok_or(code::DRIVER)?;
    if answer.what == code::SUCCESS { Ok((answer, fd)) } else { Err(answer.what) }
}

fn done(outcome: Outcome) -> c_int {
    outcome.err().unwrap_or(code::SUCCESS)
}

/// Writes what a call gives back.
fn put<T>(out: *mut T, outcome: impl FnOnce() -> Outcome<T>) -> c_int {
    if out.is_null() {
        return code::INVALID_PARAM;
    }
    match outcome() {
        Ok(value) => {
            // SAFETY: callers of the C interface give room for one of it, and it is not null.
            unsafe { out.write(value) };
            code::SUCCESS
        }
        Err(code) => code,
    }
}

/// The device of this thread.
fn bound() -> Outcome<i32> {
    device_of(CURRENT.get())
}

fn shares_by_keys() -> Outcome {
    let cannot = is_set("FAKE_ACL_PRODUCT", "310B") || is_set("FAKE_ACL_PRODUCT", "vnpu");
    if cannot { Err(code::NOT_SUPPORTED) } else { Ok(()) }
}

/// The bytes of a key, to its last: its content is opaque.
fn key_of(key: *const c_char) -> Outcome<[u8; KEY_BYTES]> {
    if key.is_null() {
        return Err(code::INVALID_PARAM);
    }
    // SAFETY: keys are read up to the first zero, or to their last byte.
    let len = unsafe { libc::strnlen(key, KEY_BYTES) };
    if len != KEY_BYTES - 1 {
        return Err(code::PARAM);
    }
    let mut bytes = [0; KEY_BYTES];
    // SAFETY: so many bytes are there.
    unsafe { std::ptr::copy_nonoverlapping(key.cast(), bytes.as_mut_ptr(), len) };
    Ok(bytes)
}

#[unsafe(no_mangle)]
extern "C" fn aclInit(_config: *const c_char) -> c_int {
    if STARTED.swap(true, Ordering::AcqRel) { code::REPEAT_INITIALIZE } else { code::SUCCESS }
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetDeviceCount(count: *mut u32) -> c_int {
    put(count, || u32::try_from(devices()).map_err(|_| code::PARAM))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSetDevice(device: i32) -> c_int {
    let Some(number) = usize::try_from(device).ok().filter(|_| device < devices()) else {
        return code::INVALID_DEVICE;
    };
    CURRENT.set(DEFAULT_CONTEXTS + number);
    code::SUCCESS
}

/// The new one is this thread's.
#[unsafe(no_mangle)]
extern "C" fn aclrtCreateContext(out: *mut usize, device: i32) -> c_int {
    put(out, || {
        if !(0..devices()).contains(&device) {
            return Err(code::INVALID_DEVICE);
        }
        let context = made(|all| {
            let next = all.keys().max().map_or(MADE_CONTEXTS, |last| last + 16);
            all.insert(next, device);
            next
        });
        CURRENT.set(context);
        Ok(context)
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDestroyContext(context: usize) -> c_int {
    if context == 0 {
        return code::INVALID_PARAM;
    }
    done(made(|all| all.remove(&context)).map(drop).ok_or(code::CONTEXT_NULL))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetCurrentContext(out: *mut usize) -> c_int {
    put(out, || bound().map(|_| CURRENT.get()))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSetCurrentContext(context: usize) -> c_int {
    if context == 0 {
        return code::INVALID_PARAM;
    }
    done(device_of(context).map(|_| CURRENT.set(context)))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtResetDevice(_device: i32) -> c_int {
    CURRENT.set(0);
    code::SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetDevice(device: *mut i32) -> c_int {
    put(device, bound)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMalloc(out: *mut *mut c_void, size: usize, _policy: c_int) -> c_int {
    put(out, || {
        let device = bound()?;
        let page = usize::try_from(PAGE).map_err(|_| code::PARAM)?;
        if size == 0 {
            return Err(code::PARAM);
        }
        let len = size
            .checked_next_multiple_of(page)
            .filter(|len| *len <= DEVICE_BYTES)
            .ok_or(code::OUT_OF_MEMORY)?;
        let fd = memory::new_memory(len)?;
        memory::with(|space| space.add(fd, 0, len, device, false)).map(|address| address as *mut c_void)
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtFree(address: *mut c_void) -> c_int {
    let free = || {
        bound()?;
        let address = address as u64;
        let is_ours = memory::with(|space| space.spans.get(&address).is_some_and(|span| !span.is_imported));
        if !is_ours {
            return Err(code::DRIVER);
        }
        // Importers lose it, whatever the exporter has promised.
        let mut question = Packet::new(Op::Free as i32);
        question.address = address;
        ask(&question, None)?;
        memory::with(|space| {
            space.exports.retain(|_, exported| *exported != address);
            space.remove(address).map(drop)
        })
    };
    done(free())
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMemcpy(
    to: *mut c_void,
    room: usize,
    from: *const c_void,
    len: usize,
    kind: c_int,
) -> c_int {
    let copy = || {
        let device = bound()?;
        if to.is_null() || from.is_null() {
            return Err(code::INVALID_PARAM);
        }
        if len == 0 || len > room {
            return Err(code::PARAM);
        }
        let on_device = |address: u64| {
            memory::with(|space| {
                let (_, span) = space.span(address).ok_or(code::BAD_ADDRESS)?;
                // Another device's memory is copied by that device, and not to or from the host.
                if span.device != device {
                    return Err(code::DRIVER);
                }
                space.bytes(address, len).ok_or(code::BAD_ADDRESS)
            })
        };
        let (to, from) = match kind {
            1 => (on_device(to as u64)?, from.cast::<u8>()),
            2 => (to.cast(), on_device(from as u64)?.cast_const()),
            3 => (on_device(to as u64)?, on_device(from as u64)?.cast_const()),
            _ => return Err(code::PARAM),
        };
        // SAFETY: the caller's side has `len` bytes, and the device's lies in a mapping of that many. An exporter that has
        // closed makes this a bus error, which is the point.
        unsafe { std::ptr::copy(from, to, len) };
        Ok(())
    };
    done(copy())
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDeviceGetBareTgid(tgid: *mut i32) -> c_int {
    put(tgid, || {
        bound()?;
        // The runtime drops the error of the device manager on the floor.
        if let Some(said) = std::env::var("FAKE_ACL_TGID").ok().and_then(|said| said.parse().ok()) {
            return Ok(said);
        }
        Ok(ask(&Packet::new(Op::Tgid as i32), None).map_or(-1, |(answer, _)| answer.pids[0]))
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtIpcMemGetExportKey(
    address: *mut c_void,
    size: usize,
    key: *mut c_char,
    len: usize,
    flags: u64,
) -> c_int {
    if address.is_null() {
        return code::INVALID_PARAM;
    }
    put(key.cast::<[u8; KEY_BYTES]>(), || {
        let device = bound()?;
        shares_by_keys()?;
        if len < KEY_BYTES || size == 0 || flags > 1 {
            return Err(code::PARAM);
        }
        let address = address as u64;
        let (base, fd) = memory::with(|space| {
            let (base, span) = space.span(address).ok_or(code::DRIVER)?;
            let fits = (address - base).checked_add(size as u64).is_some_and(|end| end <= span.len as u64);
            if !fits || span.is_imported || !address.is_multiple_of(PAGE) || span.device != device {
                return Err(code::DRIVER);
            }
            Ok((base, span.memory.try_clone().map_err(|_| code::OUT_OF_MEMORY)?))
        })?;
        let mut question = Packet::new(Op::Export as i32);
        (question.device, question.flags, question.size) =
            (device, flags, (size as u64).next_multiple_of(PAGE));
        (question.address, question.offset) = (base, address - base);
        let (answer, _) = ask(&question, Some(&fd))?;
        memory::with(|space| space.exports.insert(answer.key, base));
        Ok(answer.key)
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtIpcMemSetImportPid(key: *const c_char, pids: *mut i32, count: usize) -> c_int {
    let set = || {
        let key = key_of(key)?;
        bound()?;
        if pids.is_null() {
            return Err(code::INVALID_PARAM);
        }
        if count == 0 || count > PIDS_PER_CALL {
            return Err(code::PARAM);
        }
        let mut question = Packet::new(Op::Admit as i32);
        question.key = key;
        question.count = u32::try_from(count).map_err(|_| code::PARAM)?;
        for (at, pid) in question.pids.iter_mut().take(count).enumerate() {
            // SAFETY: the caller gives so many numbers.
            *pid = unsafe { pids.add(at).read_unaligned() };
        }
        ask(&question, None).map(drop)
    };
    done(set())
}

#[unsafe(no_mangle)]
extern "C" fn aclrtIpcMemImportByKey(out: *mut *mut c_void, key: *const c_char, flags: u64) -> c_int {
    put(out, || {
        let key = key_of(key)?;
        let device = bound()?;
        shares_by_keys()?;
        if flags > 1 {
            return Err(code::PARAM);
        }
        // The library counts; the driver opens a key once for a process.
        let known = memory::with(|space| {
            space.imports.get_mut(&key).map(|(address, times)| {
                *times += 1;
                *address
            })
        });
        if let Some(address) = known {
            return Ok(address as *mut c_void);
        }
        let mut question = Packet::new(Op::Import as i32);
        (question.key, question.device) = (key, device);
        let (answer, fd) = ask(&question, None)?;
        let is_reachable = answer.device == device || (flags == 1 && !is_set("FAKE_ACL_EXBUS", "0"));
        let len = usize::try_from(answer.size).map_err(|_| code::DRIVER)?;
        let mapped = if is_reachable {
            let fd = fd.ok_or(code::DRIVER)?;
            memory::with(|space| {
                let address = space.add(fd, answer.offset, len, answer.device, true)?;
                space.imports.insert(key, (address, 1));
                Ok(address as *mut c_void)
            })
        } else {
            Err(code::DRIVER)
        };
        if mapped.is_err() {
            question.what = Op::Close as i32;
            let _ = ask(&question, None);
        }
        mapped
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtIpcMemClose(key: *const c_char) -> c_int {
    let close = || {
        let key = key_of(key)?;
        bound()?;
        let mut question = Packet::new(Op::Close as i32);
        question.key = key;
        let last = memory::with(|space| {
            let Some((address, times)) = space.imports.get_mut(&key) else { return Ok(true) };
            *times -= 1;
            if *times > 0 {
                return Ok(false);
            }
            let address = *address;
            space.imports.remove(&key);
            space.remove(address).map(|_| true)
        })?;
        if !last {
            return Ok(());
        }
        // Not imported: then it is to be destroyed, by its creator alone.
        let exported = memory::with(|space| space.exports.remove(&key));
        if let Some(address) = exported {
            memory::with(|space| space.part_from_importers(address))?;
        }
        ask(&question, None).map(drop)
    };
    done(close())
}
