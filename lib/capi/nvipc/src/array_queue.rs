//! NVIPC's array queue, for programs that use it over memory of their own.

use std::ffi::{CStr, CString, c_char, c_int};

use shmesh_nvipc_wire::ArrayQueue;

use crate::guard::guarded;
use crate::idle::IdleCalls;
use crate::log::say;

/// The function table of a queue, followed by the queue itself.
#[repr(C)]
#[derive(Debug)]
pub struct array_queue_t {
    get_length: Number,
    enqueue: unsafe extern "C" fn(*mut array_queue_t, i32) -> c_int,
    dequeue: Number,
    close: Number,
    get_name: unsafe extern "C" fn(*mut array_queue_t) -> *mut c_char,
    get_max_length: Number,
    get_count: Number,
    get_next: unsafe extern "C" fn(*mut array_queue_t, i32) -> i32,
    name: CString,
    queue: ArrayQueue,
    idle: IdleCalls,
}

type Number = unsafe extern "C" fn(*mut array_queue_t) -> i32;

/// # Safety
/// `queue` is NULL, or an open queue that `array_queue_open` returned.
unsafe fn of<'a>(queue: *mut array_queue_t) -> Option<&'a array_queue_t> {
    // SAFETY: guaranteed by the caller.
    unsafe { queue.as_ref() }
}

fn signed(number: Option<usize>) -> i32 {
    number.and_then(|number| i32::try_from(number).ok()).unwrap_or(-1)
}

unsafe extern "C" fn get_length(queue: *mut array_queue_t) -> i32 {
    // SAFETY: NULL or an open queue, as the header requires.
    signed(unsafe { of(queue) }.map(|at| at.queue.capacity()))
}

unsafe extern "C" fn enqueue(queue: *mut array_queue_t, value: i32) -> c_int {
    // SAFETY: NULL or an open queue, as the header requires.
    let put = unsafe { of(queue) }
        .zip(u32::try_from(value).ok())
        .is_some_and(|(at, value)| at.queue.enqueue(value));
    if put { 0 } else { -1 }
}

unsafe extern "C" fn dequeue(queue: *mut array_queue_t) -> i32 {
    // SAFETY: NULL or an open queue, as the header requires.
    let Some(at) = (unsafe { of(queue) }) else { return -1 };
    let value = at.queue.dequeue();
    if value.is_none() {
        at.idle.found_nothing();
    }
    signed(value.map(|value| value as usize))
}

unsafe extern "C" fn close(queue: *mut array_queue_t) -> c_int {
    if queue.is_null() {
        return -1;
    }
    // SAFETY: created by `Box::into_raw`, and closed only once.
    drop(unsafe { Box::from_raw(queue) });
    0
}

unsafe extern "C" fn get_name(queue: *mut array_queue_t) -> *mut c_char {
    // SAFETY: NULL or an open queue, as the header requires.
    unsafe { of(queue) }.map_or(std::ptr::null_mut(), |at| at.name.as_ptr().cast_mut())
}

unsafe extern "C" fn get_count(queue: *mut array_queue_t) -> i32 {
    // SAFETY: NULL or an open queue, as the header requires.
    signed(unsafe { of(queue) }.map(|at| at.queue.len()))
}

unsafe extern "C" fn get_next(queue: *mut array_queue_t, base: i32) -> i32 {
    // SAFETY: NULL or an open queue, as the header requires.
    let next = unsafe { of(queue) }.and_then(|at| at.queue.after(u32::try_from(base).ok()));
    signed(next.map(|value| value as usize))
}

/// Opens a queue over memory of the caller. The primary empties it. Returns NULL on failure.
///
/// # Safety
/// `name` is NULL or a NUL-terminated string. `header` points to 32 bytes plus 8 per slot, valid until the queue is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn array_queue_open(
    primary: c_int,
    name: *const c_char,
    header: *mut std::ffi::c_void,
    length: i32,
) -> *mut array_queue_t {
    guarded("array_queue_open", std::ptr::null_mut(), || {
        let name = if name.is_null() {
            CString::default()
        } else {
            // SAFETY: a NUL-terminated string, as the caller guarantees.
            unsafe { CStr::from_ptr(name) }.to_owned()
        };
        // SAFETY: the memory is valid until the queue is closed, as the caller guarantees.
        let queue =
            u32::try_from(length).ok().and_then(|len| unsafe { ArrayQueue::over(header.cast(), len) });
        let Some(queue) = queue else {
            say!(
                "array_queue_open: {name:?}: {length} slots at {header:p}; give 1 to 2^24 slots and memory that begins at a \
                 multiple of 8"
            );
            return std::ptr::null_mut();
        };
        if primary != 0 {
            queue.clear();
        }
        Box::into_raw(Box::new(array_queue_t {
            get_length,
            enqueue,
            dequeue,
            close,
            get_name,
            get_max_length: get_length,
            get_count,
            get_next,
            name,
            queue,
            idle: IdleCalls::new(),
        }))
    })
}

/// Empties a queue. No other thread or process may use the queue meanwhile.
///
/// # Safety
/// `queue` is NULL or an open queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn array_queue_reset(queue: *mut array_queue_t) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { of(queue) }.map_or(-1, |at| {
        at.queue.clear();
        0
    })
}
