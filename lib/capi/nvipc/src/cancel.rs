//! Waits that `pthread_cancel` ends.
//!
//! A call is not cancelled ([`shmesh_sys::cancel`]): nothing may unwind through frames of Rust that have something to drop. So a
//! thread sleeps in `poll`, a cancellation point, called from a frame that has nothing to drop. What ends its sleep lies in
//! a place of the thread meanwhile, and is dropped when the thread has woken up, or when it ends because it was cancelled.

use std::cell::RefCell;
use std::ffi::{c_int, c_ulong};

use shmesh_sys::cancel::{POLLIN, PollFd};

use crate::backend::Sleep;

/// How long a wait on the tap goes on between two looks whether the thread was cancelled: its messages have no descriptor.
pub(crate) const SLICE: std::time::Duration = std::time::Duration::from_millis(50);

unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn poll(fds: *mut PollFd, count: c_ulong, timeout_ms: c_int) -> c_int;
}

/// What a thread that waits does next.
#[derive(Clone, Copy)]
pub(crate) enum Step {
    /// It returns this.
    Done(c_int),
    /// It polls, and comes again.
    Sleep([PollFd; 2]),
}

thread_local! {
    /// Ends the sleep that this thread is in.
    static ASLEEP: RefCell<Option<Sleep>> = const { RefCell::new(None) };
}

/// Ends the sleep of this thread, if it is in one: it has woken up, or was cancelled and its cleanup handlers run.
pub(crate) fn awake() {
    // Outside of the cell: what is dropped may come here again.
    let sleep = ASLEEP.try_with(RefCell::take);
    drop(sleep);
}

/// Keeps what ends a sleep until [`awake`] or the end of the thread.
pub(crate) fn asleep(sleep: Sleep) -> Step {
    let mut fds = sleep.fds.map(|fd| PollFd { fd, events: POLLIN, revents: 0 });
    let mut sleep = Some(sleep);
    if ASLEEP.try_with(|place| place.replace(sleep.take())).is_err() {
        // The thread is ending and has no such place any more, and is not cancelled any more: it sleeps here.
        poll_once(&mut fds);
        drop(sleep);
        return Step::Sleep(fds.map(|fd| PollFd { fd: -1, ..fd }));
    }
    Step::Sleep(fds)
}

fn poll_once(fds: &mut [PollFd; 2]) {
    // SAFETY: two entries of the caller's. An error, as of a signal, means another round.
    unsafe { poll(fds.as_mut_ptr(), 2, -1) };
}

/// Takes `step` after `step` until one says what to return, and sleeps between them; there the thread may be cancelled. For
/// functions of C's, that have nothing to drop.
#[inline(always)]
pub(crate) fn sleeping(step: impl Fn() -> Step) -> c_int {
    loop {
        match step() {
            Step::Done(done) => return done,
            Step::Sleep(mut fds) => {
                // Nothing to poll: it has slept.
                let timeout_ms = if fds[0].fd < 0 { 0 } else { -1 };
                // SAFETY: two entries of this frame. It unwinds, or returns; this frame and those of the callers have nothing
                // to drop.
                unsafe { poll(fds.as_mut_ptr(), 2, timeout_ms) };
            }
        }
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
