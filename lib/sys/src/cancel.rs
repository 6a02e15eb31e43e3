//! Protection against `pthread_cancel`, which unwinds a thread out of a system call: unwinding through Rust code would
//! abort the process. So the C interfaces disable cancellation of a thread while it is in a call.
#![expect(unsafe_code, reason = "libc has neither pthread_setcancelstate nor functions that may unwind")]

use std::ffi::{c_int, c_ulong};
use std::marker::PhantomData;

/// The structure of `poll(2)` and its event "readable", for interfaces that sleep in it where a thread may be
/// cancelled.
pub use libc::{POLLIN, pollfd as PollFd};

const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
    #[link_name = "poll"]
    fn cancellable_poll(fds: *mut PollFd, count: c_ulong, timeout_ms: c_int) -> c_int;
}

/// Calls `poll(2)`, where the thread may be cancelled. After an error, for example `EINTR`, the caller retries.
///
/// # Safety
/// A cancelled thread unwinds from here, so neither the caller nor any of its callers may hold a value with a destructor.
#[inline(always)]
pub unsafe fn poll_cancellable(fds: &mut [PollFd], timeout_ms: c_int) {
    // SAFETY: the pointer and count are of one slice. Neither this function nor, as it promises, its caller holds a value with a
    // destructor.
    unsafe { cancellable_poll(fds.as_mut_ptr(), fds.len() as c_ulong, timeout_ms) };
}

/// Ends the thread here if it was cancelled.
///
/// # Safety
/// As for [`poll_cancellable`].
#[inline(always)]
pub unsafe fn end_if_cancelled() {
    // SAFETY: it unwinds or does nothing. Neither this function nor, as it promises, its caller holds a value with a destructor.
    unsafe { pthread_testcancel() };
}

/// A guard that disables cancellation of this thread.
///
/// ```
/// let uncancelled = shmesh_sys::cancel::Uncancelled::new();
/// println!("a system call that cannot be cancelled");
/// drop(uncancelled);
/// ```
#[derive(Debug)]
pub struct Uncancelled {
    before: c_int,
    /// Keeps the guard in its thread.
    of_this_thread: PhantomData<*const ()>,
}

impl Uncancelled {
    /// Disables cancellation until the guard is dropped.
    #[expect(clippy::new_without_default, reason = "a guard is made on purpose")]
    #[must_use]
    pub fn new() -> Self {
        let mut before = 0;
        // SAFETY: affects this thread only; the pointer is to a local variable.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
        Self { before, of_this_thread: PhantomData }
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: restores the state that `new` has read.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}
