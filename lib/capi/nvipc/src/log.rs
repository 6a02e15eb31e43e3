//! One line for each refusal, on standard error: NVIPC's functions return -1 and nothing else.

use std::fmt::Arguments;
use std::io::Write;
use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shmesh_cancel::Uncancelled;
use shmesh_seldom::Seldom;

/// What an application does wrong, perhaps in a loop.
static REFUSALS: Mutex<Seldom> = Mutex::new(Seldom::new(50, Duration::from_millis(200)));
/// What is ordinary, as a pool that is empty for a while: an application that polls it would write millions.
static ORDINARY: Mutex<Seldom> = Mutex::new(Seldom::new(1, Duration::from_secs(10)));

/// Writes a line, unless there were too many.
#[cold]
#[inline(never)]
pub(crate) fn line(text: Arguments<'_>) {
    write(&REFUSALS, text);
}

/// As [`line()`], of what is ordinary.
#[cold]
#[inline(never)]
pub(crate) fn ordinary(text: Arguments<'_>) {
    write(&ORDINARY, text);
}

fn write(seldom: &Mutex<Seldom>, text: Arguments<'_>) {
    let _uncancelled = Uncancelled::new();
    let said = seldom.lock().unwrap_or_else(PoisonError::into_inner).may(Instant::now());
    let Some(unsaid) = said else { return };
    let more =
        if unsaid > 0 { format!(" ({unsaid} such lines before it were left out)") } else { String::new() };
    let line = format!("shmesh_nvipc: {text}{more}\n");
    // Whole lines, also from several threads. A program without standard error has no use for them.
    without_sigpipe(|| std::io::stderr().lock().write_all(line.as_bytes()));
}

/// Writes to what may be a pipe that nobody reads any more. That is no reason to end the program, as the signal would that
/// the kernel sends to the thread which writes.
fn without_sigpipe(write: impl FnOnce() -> std::io::Result<()>) {
    let mut sets = [(); 3].map(|()| MaybeUninit::<libc::sigset_t>::zeroed());
    let [signal, pending, before] = sets.each_mut().map(MaybeUninit::as_mut_ptr);
    // SAFETY: three sets of this function's own, and what is blocked here is as before at the end.
    unsafe {
        libc::sigemptyset(signal);
        libc::sigaddset(signal, libc::SIGPIPE);
        if libc::pthread_sigmask(libc::SIG_BLOCK, signal, before) != 0 {
            return;
        }
        libc::sigpending(pending);
        let is_others = libc::sigismember(pending, libc::SIGPIPE) == 1;
        if write().is_err() && !is_others {
            let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            libc::sigtimedwait(signal, std::ptr::null_mut(), &raw const at_once);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut());
    }
}

macro_rules! say {
    ($($text:tt)*) => { $crate::log::line(format_args!($($text)*)) };
}
pub(crate) use say;
