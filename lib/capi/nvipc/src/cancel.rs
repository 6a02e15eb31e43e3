//! Threads that are cancelled.
//!
//! `pthread_cancel` unwinds a thread out of the system call that it is in, and nothing may unwind through this library: that
//! ends the process. So a call is not cancelled, and who waits comes out of it now and then to be cancelled there.

use std::ffi::c_int;

/// How long who waits does not come out.
pub(crate) const SLICE: std::time::Duration = std::time::Duration::from_millis(50);

const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// While it lives, this thread is not cancelled.
#[derive(Debug)]
pub(crate) struct Uncancelled(c_int);

impl Uncancelled {
    pub(crate) fn new() -> Self {
        let mut before = 0;
        // SAFETY: of this thread alone; the place is this function's own.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
        Self(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: what `new` found.
        unsafe { pthread_setcancelstate(self.0, std::ptr::null_mut()) };
    }
}

/// Waits by `slice`, again and again while that says `None`; between them the thread may be cancelled. For functions of C's,
/// that have nothing to drop.
#[inline(always)]
pub(crate) fn again(slice: impl Fn() -> Option<c_int>) -> c_int {
    loop {
        if let Some(done) = slice() {
            return done;
        }
        // SAFETY: it unwinds, or does nothing; this frame and those of the callers have nothing to drop.
        unsafe { pthread_testcancel() };
    }
}
