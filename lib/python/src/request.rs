//! [`Request`]: a request as its server uses it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use shmesh::OwnedRequest;

use crate::error::{forked, of_link};
use crate::handle::Handle;
use crate::loan::Loan;
use crate::message::Part;
use crate::pending::{lock, wait_in_slices};
use crate::view;

/// The value that arrays over a request keep alive.
struct RequestHold {
    request: Mutex<OwnedRequest>,
    handle: Arc<Handle>,
}

/// A received request. If it is dropped before its last reply, it is unanswered.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct Request {
    hold: Arc<RequestHold>,
    #[pyo3(get)]
    msg_id: i32,
    #[pyo3(get)]
    cell_id: i32,
    #[pyo3(get)]
    inline: bool,
    /// The seat of the client.
    #[pyo3(get)]
    client: u8,
}

impl Request {
    pub(crate) fn new(handle: &Arc<Handle>, request: OwnedRequest) -> Self {
        let (msg_id, cell_id, inline) = (request.msg_id(), request.cell_id(), request.is_inline());
        let client = request.client().value();
        let hold = Arc::new(RequestHold { request: Mutex::new(request), handle: Arc::clone(handle) });
        Self { hold, msg_id, cell_id, inline, client }
    }

    fn give_up(&self) {
        // In a forked child the lock is a copy, which a thread of the parent may have held.
        if self.hold.handle.is_here() {
            lock(&self.hold.request).give_up();
        }
    }

    fn hold(&self) -> PyResult<&Arc<RequestHold>> {
        if self.hold.handle.is_here() { Ok(&self.hold) } else { Err(forked("request")) }
    }

    #[expect(unsafe_code, reason = "the bytes are those of a message that the hold keeps")]
    fn array<'py>(
        &self,
        py: Python<'py>,
        part: impl FnOnce(&OwnedRequest) -> &[u8],
    ) -> PyResult<Bound<'py, PyAny>> {
        let hold = Arc::clone(self.hold()?);
        let Part { start, len } = Part::of(part(&lock(&hold.request)));
        // SAFETY: the part belongs to the request's message, which the hold keeps until the array is gone.
        unsafe { view::bytes(py, start, len, false, hold) }
    }
}

#[pymethods]
impl Request {
    /// The MSG part, as a read-only array.
    #[getter]
    fn msg<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, |request| request.msg())
    }

    /// The DATA part, as a read-only array; empty without one.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, |request| request.data())
    }

    /// Whether the client still waits.
    #[getter]
    fn is_wanted(&self) -> PyResult<bool> {
        Ok(lock(&self.hold()?.request).is_wanted())
    }

    /// Replies with up to 112 bytes, without a buffer. Returns False if the client does not wait any more.
    #[pyo3(signature = (msg, *, msg_id=0, cell_id=0, more=false))]
    fn reply_inline(&self, msg: &[u8], msg_id: i32, cell_id: i32, more: bool) -> PyResult<bool> {
        let hold = self.hold()?;
        let sent = match more {
            true => lock(&hold.request).stream_inline(msg_id, cell_id, msg),
            false => lock(&hold.request).reply_inline(msg_id, cell_id, msg),
        };
        sent.map_err(of_link)
    }

    /// Replies with a loan of the same link. Returns False if the client does not wait any more.
    #[pyo3(signature = (loan, *, msg_id=0, cell_id=0, more=false))]
    fn reply_loan(&self, loan: &Loan, msg_id: i32, cell_id: i32, more: bool) -> PyResult<bool> {
        let hold = self.hold()?;
        let (_, sent) = loan.give(msg_id, cell_id, |_, loan| {
            let (mut request, loan) = (lock(&hold.request), loan.into_owned());
            let sent = if more { request.stream(loan) } else { request.reply(loan) };
            sent.map_err(|failed| (Some(failed.loan), failed.error))
        })?;
        Ok(sent)
    }

    /// Sleeps until there is room for one more reply, or the client does not wait any more. Returns False if it timed out.
    #[pyo3(signature = (timeout=None))]
    fn wait_room(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let hold = self.hold()?;
        wait_in_slices(py, timeout, |slice| Some(lock(&hold.request).wait_room(Some(slice))))
    }

    /// Whether there is room for one more reply, or the client does not wait any more.
    #[getter]
    fn has_room(&self) -> PyResult<bool> {
        let has_room = lock(&self.hold()?.request).wait_room(Some(Duration::ZERO));
        has_room.map_err(of_link)
    }

    /// Ends the request; without a last reply it is unanswered. Its buffers are released when its arrays are gone.
    fn drop(&self) {
        self.give_up();
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // Arrays may keep the message, but the client must not wait for them.
        self.give_up();
    }
}
