//! [`Loan`]: a message that is being written.
//!
//! Arrays over a buffer keep it alive. So a loan cannot be sent while one of its arrays is alive, because numpy could still
//! write what others read.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use crate::error::{error, forked, of_link};
use crate::handle::Handle;
use crate::message::Part;
use crate::pending::PendingReply;

/// A loan that arrays keep alive.
#[derive(Debug)]
pub(crate) struct LoanHold {
    /// `None` only after an error that drops the loan. Taken only while there is no other reference to the hold.
    loan: Mutex<Option<shmesh::OwnedLoan>>,
    handle: Arc<Handle>,
}

impl LoanHold {
    fn place(&self) -> MutexGuard<'_, Option<shmesh::OwnedLoan>> {
        self.loan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn msg(&self) -> PyResult<Part> {
        self.place().as_ref().map(|loan| Part::at(loan.msg_ptr())).ok_or_else(Loan::was_closed)
    }

    pub(crate) fn data(&self) -> PyResult<Part> {
        self.place().as_ref().map(|loan| Part::at(loan.data_ptr())).ok_or_else(Loan::was_closed)
    }
}

/// A message being written. The contents of `msg` and `data` are sent without a copy.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct Loan(Mutex<Option<Arc<LoanHold>>>);

impl Loan {
    pub(crate) fn take(
        handle: &Arc<Handle>,
        msg: usize,
        data: Option<(shmesh::config::PoolId, usize)>,
    ) -> shmesh::Result<Self> {
        Self::take_with(handle, msg, |_| (), data)
    }

    /// A loan with a MSG part of `msg` bytes, written by `write`.
    pub(crate) fn take_with(
        handle: &Arc<Handle>,
        msg: usize,
        write: impl FnOnce(&mut [u8]),
        data: Option<(shmesh::config::PoolId, usize)>,
    ) -> shmesh::Result<Self> {
        let link = handle.lock();
        let mut loan = match data {
            Some((pool, _)) => link.loan_with(pool)?,
            None => link.loan()?,
        };
        write(loan.resize_msg(msg)?);
        if let Some((_, len)) = data {
            loan.resize_data(len)?;
        }
        let loan = Mutex::new(Some(loan.into_owned()));
        drop(link);
        Ok(Self(Mutex::new(Some(Arc::new(LoanHold { loan, handle: Arc::clone(handle) })))))
    }

    fn place(&self) -> MutexGuard<'_, Option<Arc<LoanHold>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn was_closed() -> PyErr {
        error("Closed", "this loan was sent or dropped; take another")
    }

    /// Whether its participant can no longer send batches.
    pub(crate) fn is_late(&self) -> bool {
        self.place().as_ref().is_some_and(|hold| hold.handle.is_finished())
    }

    pub(crate) fn hold(&self) -> PyResult<Arc<LoanHold>> {
        let hold = self.place().clone();
        let hold = hold.ok_or_else(Self::was_closed)?;
        if hold.handle.is_here() { Ok(hold) } else { Err(forked("loan")) }
    }

    /// As [`hold`](Self::hold), without a reference, which another thread that sends the loan would take for an array.
    fn is_open(&self) -> PyResult<()> {
        let is_here = self.place().as_ref().map(|hold| hold.handle.is_here());
        match is_here {
            Some(true) => Ok(()),
            Some(false) => Err(forked("loan")),
            None => Err(Self::was_closed()),
        }
    }

    /// The hold, if no array over it is alive.
    fn unviewed(&self) -> Result<Option<Arc<LoanHold>>, usize> {
        let mut place = self.place();
        // Not by the count alone: what was written through dropped views must be visible.
        if place.as_mut().is_none_or(|hold| Arc::get_mut(hold).is_some()) {
            return Ok(place.take());
        }
        Err(place.as_ref().map_or(1, |hold| (Arc::strong_count(hold) - 1).max(1)))
    }

    /// Ends a `with` block: calls `send`, or drops the loan if there was an exception. Does nothing if it was sent already.
    pub(crate) fn leave(
        &self,
        exception: &Bound<'_, PyAny>,
        send: impl FnOnce() -> PyResult<()>,
    ) -> PyResult<()> {
        if exception.is_none() && !self.closed() {
            return send();
        }
        self.drop();
        Ok(())
    }

    pub(crate) fn do_send(&self, msg_id: i32, cell_id: i32, notify: bool) -> PyResult<()> {
        let (_, notified) = self.give(msg_id, cell_id, |link, loan| {
            loan.send().map_err(|failed| (Some(failed.loan.into_owned()), failed.error))?;
            Ok(if notify { link.notify() } else { Ok(()) })
        })?;
        match notified {
            // It was sent, even if no receiver could be woken: the link may have no notification.
            Err(error) if !matches!(error.kind(), shmesh::ErrorKind::NoNotification { .. }) => {
                Err(of_link(error))
            }
            _ => Ok(()),
        }
    }

    /// Passes the loan to `give`, unless arrays over it are alive. If `give` returns it with an error, it stays here. Also
    /// returns its participant.
    pub(crate) fn give<T>(
        &self,
        msg_id: i32,
        cell_id: i32,
        give: impl FnOnce(
            &shmesh::Link,
            shmesh::Loan<'_>,
        ) -> Result<T, (Option<shmesh::OwnedLoan>, shmesh::Error)>,
    ) -> PyResult<(Arc<Handle>, T)> {
        self.is_open()?;
        let hold = self.unviewed().map_err(|views| {
            error(
                "StillViewed",
                format_args!(
                    "{views} array(s) over this loan are still alive, and could write what the receiver reads; `del` them and their \
                     views (or write inside of a function), then send"
                ),
            )
        })?;
        let hold = hold.ok_or_else(Self::was_closed)?;
        let link = hold.handle.lock();
        let loan = hold.place().take();
        let given = loan.map(|loan| {
            let loan = link.adopt(loan).map_err(|error| (None, error));
            let given = loan.and_then(|loan| give(&link, loan.with_msg_id(msg_id).with_cell_id(cell_id)));
            given.map_err(|(loan, error)| {
                *hold.place() = loan;
                error
            })
        });
        drop(link);
        match given {
            Some(Ok(done)) => Ok((Arc::clone(&hold.handle), done)),
            Some(Err(error)) => {
                *self.place() = Some(hold);
                Err(of_link(error))
            }
            None => Err(Self::was_closed()),
        }
    }
}

#[pymethods]
impl Loan {
    /// The MSG part, as a writable array.
    #[getter]
    fn msg<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let hold = self.hold()?;
        hold.msg()?.array(py, hold, true)
    }

    /// The DATA part, as a writable array; empty without one.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let hold = self.hold()?;
        hold.data()?.array(py, hold, true)
    }

    #[pyo3(signature = (*, msg_id=0, cell_id=0, notify=true))]
    fn send(&self, msg_id: i32, cell_id: i32, notify: bool) -> PyResult<()> {
        self.do_send(msg_id, cell_id, notify)
    }

    /// Sends the loan as a request.
    #[pyo3(signature = (*, msg_id=0, cell_id=0))]
    fn request(&self, msg_id: i32, cell_id: i32) -> PyResult<PendingReply> {
        let (handle, pending) = self.give(msg_id, cell_id, |link, loan| {
            let made = link.request(loan).map(shmesh::PendingReply::into_owned);
            made.map_err(|failed| (Some(failed.loan.into_owned()), failed.error))
        })?;
        Ok(PendingReply::new(&handle, pending))
    }

    /// Releases the buffers without sending, when the last array over them is gone.
    pub(crate) fn drop(&self) {
        let hold = self.place().take();
        drop(hold);
    }

    #[getter]
    pub(crate) fn closed(&self) -> bool {
        self.place().is_none()
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// Sends the loan, unless there was an exception or it was sent already.
    fn __exit__(
        &self,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.leave(kind, || self.do_send(0, 0, true))
    }
}
