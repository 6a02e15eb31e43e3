//! [`Message`]: a received message.
//!
//! Arrays over a buffer keep it alive. So the buffers of a message are released when the message and the last of its arrays are
//! gone.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{error, forked};
use crate::handle::Handle;
use crate::view;

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

    pub(crate) fn at(bytes: NonNull<[u8]>) -> Self {
        Self { start: bytes.cast(), len: bytes.len() }
    }

    #[expect(unsafe_code, reason = "the bytes are those of a buffer that the hold keeps")]
    pub(crate) fn array<'py>(
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

/// A message that arrays keep alive.
#[derive(Debug)]
pub(crate) struct MessageHold {
    /// `None` only while it is dropped.
    message: Option<shmesh::OwnedMessage>,
    handle: Arc<Handle>,
}

impl MessageHold {
    pub(crate) fn msg(&self) -> &[u8] {
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
        if hold.handle.is_here() { Ok(hold) } else { Err(forked("message")) }
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
