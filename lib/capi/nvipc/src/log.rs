//! One log line per failure, on standard error: NVIPC's functions return only -1.

use std::fmt::Arguments;
use std::io::Write;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shmesh_log_limit::LogLimit;
use shmesh_sys::cancel::Uncancelled;
use shmesh_sys::signal::without_sigpipe;

/// For mistakes of the application, which it may repeat in a loop.
static REFUSALS: Mutex<LogLimit> = Mutex::new(LogLimit::new(50, Duration::from_millis(200)));
/// For ordinary failures, for example a pool that is empty for a while: an application that polls it would cause millions
/// of lines.
static ORDINARY: Mutex<LogLimit> = Mutex::new(LogLimit::new(1, Duration::from_secs(10)));

/// Writes a line, unless there were too many.
#[cold]
#[inline(never)]
pub(crate) fn line(text: Arguments<'_>) {
    write(&REFUSALS, 1, text);
}

/// As [`line()`], for ordinary failures.
#[cold]
#[inline(never)]
pub(crate) fn ordinary(text: Arguments<'_>) {
    // An application that polls an empty pool does little else, and reading the clock would take most of the time.
    // Not exact: a locked instruction would cost a third of a failing call.
    let since = SINCE_LOOK.load(Relaxed);
    SINCE_LOOK.store(since.wrapping_add(1), Relaxed);
    if since.is_multiple_of(LOOK_EVERY) {
        write(&ORDINARY, LOOK_EVERY, text);
    }
}

/// Number of ordinary lines since the start; every `LOOK_EVERY`th checks whether it is time to write one.
static SINCE_LOOK: AtomicUsize = AtomicUsize::new(0);
const LOOK_EVERY: usize = 256;

/// `each` is the number of lines that this one stands for.
fn write(limit: &Mutex<LogLimit>, each: usize, text: Arguments<'_>) {
    let _uncancelled = Uncancelled::new();
    let said = limit.lock().unwrap_or_else(PoisonError::into_inner).allow(Instant::now());
    let Some(suppressed) = said else { return };
    let more = if suppressed > 0 {
        format!(" ({} similar lines before it were suppressed)", suppressed * (each as u64))
    } else {
        String::new()
    };
    let line = format!("shmesh_nvipc: {text}{more}\n");
    // Whole lines, even from several threads. Errors are ignored, as a program may have no standard error. If standard
    // error is a pipe without a reader, SIGPIPE must not end the program.
    without_sigpipe(|| std::io::stderr().lock().write_all(line.as_bytes()));
}

macro_rules! say {
    ($($text:tt)*) => { $crate::log::line(format_args!($($text)*)) };
}
pub(crate) use say;
