//! Threads that are cancelled.
//!
//! A call is not cancelled ([`shmesh_sys::cancel`]), and who waits comes out of it now and then to be cancelled there.

use std::ffi::c_int;

/// How long who waits does not come out.
pub(crate) const SLICE: std::time::Duration = std::time::Duration::from_millis(50);

unsafe extern "C-unwind" {
    fn pthread_testcancel();
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
