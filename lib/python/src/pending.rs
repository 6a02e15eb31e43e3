//! [`PendingReply`]: the client's handle of a request.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use shmesh::OwnedPendingReply;

use crate::error::{error, forked, of_link};
use crate::handle::Handle;
use crate::message::Message;
use crate::waiting::{SLICE, WaitCount, duration_of, is_ending};

pub(crate) fn lock<T>(place: &Mutex<T>) -> MutexGuard<'_, T> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits in slices, between which Python may handle signals, until `wait` returns true. `wait` returns `None` if the
/// request was dropped. Returns false if the time is over first.
pub(crate) fn wait_in_slices(
    py: Python<'_>,
    timeout: Option<f64>,
    wait: impl Fn(Duration) -> Option<shmesh::Result<bool>> + Sync,
) -> PyResult<bool> {
    let deadline = match timeout {
        Some(seconds) => Instant::now().checked_add(duration_of(seconds)?),
        None => None,
    };
    let waiting = WaitCount::new();
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // Errors are made after `detach`: waiting for the interpreter while `wait` has a lock could deadlock.
        let there = py.detach(|| wait(left.map_or(SLICE, |left| left.min(SLICE))));
        if there.ok_or_else(dropped)?.map_err(of_link)? {
            return Ok(true);
        }
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(false);
        }
        if is_ending() {
            py.detach(|| {
                drop(waiting);
                // The interpreter is exiting: park until the process ends.
                loop {
                    std::thread::park();
                }
            });
        }
        py.check_signals()?;
    }
}

fn dropped() -> PyErr {
    error("Closed", "the request was dropped; send a new one")
}

/// A request that was sent; it receives the replies. Dropping it cancels the request.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct PendingReply {
    /// The sent request; `None` after `drop`.
    pending: Mutex<Option<OwnedPendingReply>>,
    handle: Arc<Handle>,
}

impl PendingReply {
    pub(crate) fn new(handle: &Arc<Handle>, pending: OwnedPendingReply) -> Self {
        Self { pending: Mutex::new(Some(pending)), handle: Arc::clone(handle) }
    }

    /// With the interpreter released, because another thread may wait with the lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut OwnedPendingReply) -> shmesh::Result<T> + Send,
    ) -> PyResult<T> {
        if !self.handle.is_here() {
            return Err(forked("pending reply"));
        }
        let done = py.detach(|| lock(&self.pending).as_mut().map(act));
        done.ok_or_else(dropped)?.map_err(of_link)
    }
}

#[pymethods]
impl PendingReply {
    /// Takes the next reply, or None. Never waits.
    fn try_take(&self, py: Python<'_>) -> PyResult<Option<Message>> {
        let reply = self.with(py, OwnedPendingReply::try_take)?;
        Ok(reply.map(|reply| Message::keep(&self.handle, reply)))
    }

    /// Waits for the next reply. Returns None if it timed out.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Message>> {
        let reply = Mutex::new(self.with(py, OwnedPendingReply::try_take)?);
        if lock(&reply).is_none() {
            wait_in_slices(py, timeout, |slice| {
                let taken = lock(&self.pending).as_mut()?.wait(Some(slice));
                Some(taken.map(|taken| {
                    *lock(&reply) = taken;
                    lock(&reply).is_some()
                }))
            })?;
        }
        let reply = reply.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(reply.map(|reply| Message::keep(&self.handle, reply)))
    }

    /// Whether `try_take` has a reply or an exception.
    #[getter]
    fn is_ready(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |pending| Ok(pending.is_ready()))
    }

    /// Whether the last reply was taken, or the request failed or was dropped.
    #[getter]
    fn is_over(&self, py: Python<'_>) -> bool {
        !self.handle.is_here()
            || py.detach(|| lock(&self.pending).as_ref().is_none_or(OwnedPendingReply::is_over))
    }

    /// Cancels the request: queued replies are freed, and later ones are refused.
    fn drop(&self, py: Python<'_>) {
        if self.handle.is_here() {
            py.detach(|| drop(lock(&self.pending).take()));
        }
    }
}
