//! `pthread_cancel` unwinds a thread out of the system call that it is in, and nothing may unwind through a library in Rust:
//! that ends the process. So the C interfaces keep a thread from being cancelled while it is in a call.
#![expect(unsafe_code, reason = "libc has no pthread_setcancelstate")]

use std::ffi::c_int;
use std::marker::PhantomData;

/// What `poll(2)` takes, for interfaces that sleep in it where a thread may be cancelled, and its event "readable".
pub use libc::{POLLIN, pollfd as PollFd};

const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While it lives, this thread is not cancelled.
///
/// ```
/// let uncancelled = shmesh_sys::cancel::Uncancelled::new();
/// println!("a system call in which nobody ends this thread");
/// drop(uncancelled);
/// ```
#[derive(Debug)]
pub struct Uncancelled {
    before: c_int,
    /// It stays in its thread.
    of_this_thread: PhantomData<*const ()>,
}

impl Uncancelled {
    /// Disables cancellation until dropped.
    #[expect(clippy::new_without_default, reason = "a guard is made on purpose")]
    #[must_use]
    pub fn new() -> Self {
        let mut before = 0;
        // SAFETY: of this thread alone; the place is this function's own.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
        Self { before, of_this_thread: PhantomData }
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: what `new` found.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}
