//! Waits that `pthread_cancel` can end.
//!
//! Calls are not cancelled in general ([`shmesh_sys::cancel`]), because nothing may unwind through Rust frames that have
//! something to drop. So a thread sleeps in `poll`, a cancellation point, called from a frame that has nothing to drop. The
//! guard that ends the sleep is stored in a thread-local variable meanwhile. It is dropped when the thread wakes up, or
//! when the thread ends because it was cancelled.

use std::cell::RefCell;
use std::ffi::c_int;

use shmesh_sys::cancel::{POLLIN, PollFd, end_if_cancelled, poll_cancellable};

use crate::backend::PollSleep;

/// Interval at which a wait on the tap checks for cancellation. The tap's messages have no descriptor to poll.
pub(crate) const SLICE: std::time::Duration = std::time::Duration::from_millis(50);

/// The next step of a thread that waits.
#[derive(Clone, Copy)]
pub(crate) enum WaitStep {
    /// The call returns this.
    Done(c_int),
    /// The thread polls, and then takes the next step.
    Sleep([PollFd; 2]),
}

thread_local! {
    /// The guard of this thread's current sleep.
    static ASLEEP: RefCell<Option<PollSleep>> = const { RefCell::new(None) };
}

/// Ends the sleep of this thread, if there is one: it woke up, or was cancelled and its cleanup handlers run.
pub(crate) fn awake() {
    // Dropped outside the cell, because `drop` may call this function again.
    let sleep = ASLEEP.try_with(RefCell::take);
    drop(sleep);
}

/// Stores the guard of a sleep until [`awake`] or the end of the thread.
pub(crate) fn asleep(sleep: PollSleep) -> WaitStep {
    let mut fds = sleep.fds.map(|fd| PollFd { fd, events: POLLIN, revents: 0 });
    let mut sleep = Some(sleep);
    if ASLEEP.try_with(|place| place.replace(sleep.take())).is_err() {
        // The thread is ending, its thread-local variables are gone, and it cannot be cancelled any more. So it sleeps
        // here.
        poll_once(&mut fds);
        drop(sleep);
        return WaitStep::Sleep(fds.map(|fd| PollFd { fd: -1, ..fd }));
    }
    WaitStep::Sleep(fds)
}

fn poll_once(fds: &mut [PollFd; 2]) {
    // SAFETY: the thread is ending, and cannot be cancelled any more.
    unsafe { poll_cancellable(fds, -1) };
}

/// Takes steps until one returns a result, and sleeps between them, where the thread can be cancelled. Only for C functions
/// that have nothing to drop.
#[inline(always)]
pub(crate) fn sleeping(step: impl Fn() -> WaitStep) -> c_int {
    loop {
        match step() {
            WaitStep::Done(done) => return done,
            WaitStep::Sleep(mut fds) => {
                // Nothing to poll: the thread slept already.
                let timeout_ms = if fds[0].fd < 0 { 0 } else { -1 };
                // SAFETY: neither this function nor any of its callers holds a value with a destructor.
                unsafe { poll_cancellable(&mut fds, timeout_ms) };
            }
        }
    }
}

/// Calls `slice` until it returns a result. Between the calls the thread can be cancelled. Only for C functions that have
/// nothing to drop.
#[inline(always)]
pub(crate) fn again(slice: impl Fn() -> Option<c_int>) -> c_int {
    loop {
        if let Some(done) = slice() {
            return done;
        }
        // SAFETY: neither this function nor any of its callers holds a value with a destructor.
        unsafe { end_if_cancelled() };
    }
}
