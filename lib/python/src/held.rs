//! Buffers of a link that Python uses: [`Loan`] and [`Message`].
//!
//! Arrays over a buffer keep it alive. So a loan cannot be sent while one of its arrays is alive, because numpy could still
//! write what others read. The buffers of a message are released when the message and the last of its arrays are gone.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{error, forked, of_link};
use crate::fork::ForkGuard;
use crate::request::PendingReply;
use crate::view;

/// A participant of a link, which one thread uses at a time.
#[derive(Debug)]
pub(crate) struct Handle {
    link: Mutex<shmesh::Link>,
    /// Number of released messages after which to post, for senders that wait for buffers; 0 for never.
    post_after: AtomicUsize,
    /// Number of messages released since the last post. Changed under the lock.
    unposted: AtomicUsize,
    /// Each message that is released is notified of, for a writer that waits for room.
    notify_releases: AtomicBool,
    /// Waits without the lock, so that other threads can release messages meanwhile.
    waiter: shmesh::Waiter,
    /// Threads that wait stop.
    closed: AtomicBool,
    /// Batches can no longer be sent: consumers may have seen the end of the queue.
    finished: AtomicBool,
    made: ForkGuard,
}

impl Handle {
    pub(crate) fn new(link: shmesh::Link) -> Self {
        Self {
            notify_releases: AtomicBool::new(false),
            waiter: link.waiter(),
            closed: AtomicBool::new(false),
            link: Mutex::new(link),
            post_after: AtomicUsize::new(0),
            unposted: AtomicUsize::new(0),
            finished: AtomicBool::new(false),
            made: ForkGuard::here(),
        }
    }

    pub(crate) fn post_releases(&self, after: usize) {
        self.post_after.store(after, Ordering::Relaxed);
    }

    pub(crate) fn notify_releases(&self) {
        self.notify_releases.store(true, Ordering::Relaxed);
    }

    /// Waits until `ready`, or until something else may end it: the end of the time, a signal, [`stop_waiting`](Self::stop_waiting).
    pub(crate) fn wait_until(
        &self,
        timeout: Duration,
        ready: impl Fn(&shmesh::Link) -> bool,
    ) -> shmesh::Result<bool> {
        self.waiter.wait_until(Some(timeout), || self.closed.load(Ordering::SeqCst) || ready(&self.lock()))
    }

    /// Has threads that wait return.
    pub(crate) fn stop_waiting(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.waiter.wake();
    }

    pub(crate) fn finish(&self) {
        self.finished.store(true, Ordering::Relaxed);
    }

    /// Counts a released message. Waking a sender for each buffer would cost more than it gains.
    fn released(&self) {
        let (notifies, after) =
            (self.notify_releases.load(Ordering::Relaxed), self.post_after.load(Ordering::Relaxed));
        // In a forked child the lock is a copy, which a thread of the parent may have held.
        if !notifies && after == 0 || !self.is_here() {
            return;
        }
        let link = self.lock();
        if notifies {
            // A writer that is not woken looks again within a second.
            let _ = link.notify();
        }
        if after > 0 && self.unposted.fetch_add(1, Ordering::Relaxed) + 1 >= after {
            self.post_now(&link);
        }
    }

    /// Posts once for each message released since the last time. Each post may wake another sender.
    pub(crate) fn post_now(&self, link: &shmesh::Link) {
        for _ in 0..self.unposted.swap(0, Ordering::Relaxed) {
            // On a link without notification, no sender waits for posts.
            let _ = link.post();
        }
    }

    pub(crate) fn is_here(&self) -> bool {
        self.made.is_here()
    }

    /// Do not wait for the interpreter while holding this lock: a thread with the interpreter may wait for the lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, shmesh::Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Address and length of some bytes of a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
}

impl Part {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { start: NonNull::from(bytes).cast(), len: bytes.len() }
    }

    fn at(bytes: NonNull<[u8]>) -> Self {
        Self { start: bytes.cast(), len: bytes.len() }
    }

    #[expect(unsafe_code, reason = "the bytes are those of a buffer that the hold keeps")]
    fn array<'py>(
        self,
        py: Python<'py>,
        hold: Arc<impl Send + Sync + 'static>,
        writable: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: the part comes from the loan or message, which the hold keeps until the array is gone. A loan is not sent
        // before that.
        unsafe { view::bytes(py, self.start, self.len, writable, hold) }
    }
}

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

/// A message that arrays keep alive.
#[derive(Debug)]
pub(crate) struct MessageHold {
    /// `None` only while it is dropped.
    message: Option<shmesh::OwnedMessage>,
    handle: Arc<Handle>,
}

impl MessageHold {
    fn msg(&self) -> &[u8] {
        self.message.as_ref().map_or(&[], |message| message.msg())
    }

    pub(crate) fn data(&self) -> Part {
        Part::of(self.message.as_ref().map_or(&[], |message| message.data()))
    }
}

impl Drop for MessageHold {
    fn drop(&mut self) {
        drop(self.message.take());
        self.handle.released();
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
        self.place().as_ref().is_some_and(|hold| hold.handle.finished.load(Ordering::Relaxed))
    }

    pub(crate) fn hold(&self) -> PyResult<Arc<LoanHold>> {
        let hold = self.place().clone();
        let hold = hold.ok_or_else(Self::was_closed)?;
        if hold.handle.made.is_here() { Ok(hold) } else { Err(forked("loan")) }
    }

    /// As [`hold`](Self::hold), without a reference, which another thread that sends the loan would take for an array.
    fn is_open(&self) -> PyResult<()> {
        let is_here = self.place().as_ref().map(|hold| hold.handle.made.is_here());
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
                    "{views} array(s) over this loan live, and could write what the receiver reads; `del` them and their \
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
        if !kind.is_none() {
            self.drop();
        } else if !self.closed() {
            self.do_send(0, 0, true)?;
        }
        Ok(())
    }
}

/// A received message: read-only, and it keeps its buffers until it and its arrays are gone.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct Message {
    hold: Mutex<Option<Arc<MessageHold>>>,
    #[pyo3(get)]
    msg_id: i32,
    #[pyo3(get)]
    cell_id: i32,
    #[pyo3(get)]
    inline: bool,
}

impl Message {
    pub(crate) fn keep(handle: &Arc<Handle>, message: shmesh::OwnedMessage) -> Self {
        let (msg_id, cell_id, inline) = (message.msg_id(), message.cell_id(), message.is_inline());
        let hold = MessageHold { message: Some(message), handle: Arc::clone(handle) };
        Self { hold: Mutex::new(Some(Arc::new(hold))), msg_id, cell_id, inline }
    }

    pub(crate) fn take(handle: &Arc<Handle>) -> shmesh::Result<Option<Self>> {
        let message = handle.lock().receive()?.map(shmesh::Message::into_owned);
        Ok(message.map(|message| Self::keep(handle, message)))
    }

    /// Receives up to `max` messages. Those before an error are kept.
    pub(crate) fn take_batch(handle: &Arc<Handle>, max: usize) -> shmesh::Result<Vec<Self>> {
        let link = handle.lock();
        let mut messages = Vec::new();
        let failed = link.receive_batch(&mut messages, max).err();
        let messages: Vec<_> =
            messages.into_iter().map(|message| Self::keep(handle, message.into_owned())).collect();
        drop(link);
        match failed {
            Some(error) if messages.is_empty() => Err(error),
            _ => Ok(messages),
        }
    }

    fn place(&self) -> MutexGuard<'_, Option<Arc<MessageHold>>> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads its MSG part, which a hostile sender can still change: read each byte only once.
    pub(crate) fn with_msg<T>(&self, read: impl FnOnce(&[u8]) -> T) -> PyResult<T> {
        Ok(read(self.hold()?.msg()))
    }

    pub(crate) fn hold(&self) -> PyResult<Arc<MessageHold>> {
        let hold = self.place().clone();
        let hold = hold.ok_or_else(|| error("Closed", "this message was released; receive the next one"))?;
        if hold.handle.made.is_here() { Ok(hold) } else { Err(forked("message")) }
    }
}

#[pymethods]
impl Message {
    /// The MSG part, as a read-only array.
    #[getter]
    fn msg<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let hold = self.hold()?;
        Part::of(hold.msg()).array(py, hold, false)
    }

    /// The DATA part, as a read-only array; empty without one.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let hold = self.hold()?;
        hold.data().array(py, hold, false)
    }

    /// A copy of the MSG part, as bytes.
    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.with_msg(|bytes| PyBytes::new(py, bytes))
    }

    /// Releases the message. Its buffers are free when the last array over them is gone.
    pub(crate) fn release(&self) {
        let hold = self.place().take();
        drop(hold);
    }

    #[getter]
    fn released(&self) -> bool {
        self.place().is_none()
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __exit__(&self, _kind: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _traceback: &Bound<'_, PyAny>) {
        self.release();
    }
}
