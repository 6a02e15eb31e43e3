//! Threads that wait, and how they end with the interpreter.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::error::error;
use crate::handle::Handle;

/// How long a wait continues before it checks for signals for Python.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// The thread in which the interpreter exits.
static ENDING: OnceLock<ThreadId> = OnceLock::new();
/// Number of threads that wait.
static WAITING: AtomicUsize = AtomicUsize::new(0);
/// The handles with which threads wait. Only locked by threads with the interpreter.
static WAITING_WITH: Mutex<Vec<Arc<Handle>>> = Mutex::new(Vec::new());
/// How long a wait continues before it checks for signals that another thread got, or that arrived just before it.
pub(crate) const LOOK_FOR_SIGNALS: Duration = Duration::from_secs(1);
/// How long the end of the interpreter waits for such threads to detach from their links.
const LEAVING: Duration = Duration::from_secs(1);

/// Makes threads that wait detach from their links: the interpreter stops them for ever, and they would stay attached.
pub(crate) fn at_exit(py: Python<'_>) {
    let _ = ENDING.set(std::thread::current().id());
    for handle in waiting_with().iter() {
        handle.stop_waiting();
    }
    let start = Instant::now();
    while WAITING.load(Ordering::Relaxed) > 0 && start.elapsed() < LEAVING {
        py.detach(|| std::thread::sleep(Duration::from_millis(1)));
    }
}

/// Forgets the threads that wait: they belong to the parent.
pub(crate) fn after_fork_in_child() {
    WAITING.store(0, Ordering::Relaxed);
    // They belong to the parent, too: dropped here, they would detach from the parent's links.
    if let Ok(mut all) = WAITING_WITH.try_lock() {
        std::mem::forget(std::mem::take(&mut *all));
    }
}

fn waiting_with() -> MutexGuard<'static, Vec<Arc<Handle>>> {
    WAITING_WITH.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A handle with which a thread waits.
pub(crate) struct WaitingWith(pub(crate) Arc<Handle>);

impl WaitingWith {
    pub(crate) fn new(handle: Arc<Handle>) -> Self {
        waiting_with().push(Arc::clone(&handle));
        Self(handle)
    }

    /// Number of references to a handle that belong to threads that wait.
    pub(crate) fn references(handle: &Arc<Handle>) -> usize {
        2 * waiting_with().iter().filter(|waiting| Arc::ptr_eq(waiting, handle)).count()
    }
}

impl Drop for WaitingWith {
    fn drop(&mut self) {
        let mut all = waiting_with();
        let at = all.iter().position(|handle| Arc::ptr_eq(handle, &self.0));
        let removed = at.map(|at| all.swap_remove(at));
        drop(all);
        drop(removed);
    }
}

/// Counts a thread that waits, as long as it lives.
pub(crate) struct WaitCount;

impl WaitCount {
    pub(crate) fn new() -> Self {
        WAITING.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for WaitCount {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether the interpreter ends, in another thread.
pub(crate) fn is_ending() -> bool {
    ENDING.get().is_some_and(|thread| *thread != std::thread::current().id())
}

/// A timeout of Python.
pub(crate) fn duration_of(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        error(
            "Invalid",
            format_args!("timeout is {seconds} seconds; pass 0 or more, or None to wait for ever"),
        )
    })
}
