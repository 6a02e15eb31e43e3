//! The common part of the sessions of `device.rs` and `cuda.rs` with the broker of device keys of a link.

use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use shmesh::client::SessionEvent;
use shmesh::device::{BareTgid, DeviceKey, DeviceMemory, ExportFlags, Session};

use crate::error::{error, forked, of_link};
use crate::fork::ForkGuard;

/// The implementation of Python's sessions.
pub(crate) struct BrokerSession<M: DeviceMemory + Send + Sync> {
    session: Mutex<Option<Session<M>>>,
    made: ForkGuard,
    /// The name of the Python class, for errors.
    name: &'static str,
}

impl<M: DeviceMemory + Send + Sync> BrokerSession<M> {
    pub(crate) fn connect(
        py: Python<'_>,
        directory: PathBuf,
        link: &str,
        name: &'static str,
    ) -> PyResult<Self> {
        let session = py.detach(|| Session::connect(directory, link)).map_err(of_link)?;
        Ok(Self { session: Mutex::new(Some(session)), made: ForkGuard::here(), name })
    }

    /// Sends a request to the broker, with the interpreter released. A thread with the lock never waits for the
    /// interpreter.
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut Session<M>) -> shmesh::Result<T> + Send,
    ) -> PyResult<T> {
        if !self.made.is_here() {
            return Err(forked(self.name));
        }
        let answer = py.detach(|| self.lock().as_mut().map(act));
        answer.ok_or_else(|| error("Closed", "this session has ended; create another"))?.map_err(of_link)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Session<M>>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn bare_tgid(&self, py: Python<'_>) -> PyResult<i32> {
        self.ask(py, |session| session.bare_tgid().map(|tgid| tgid.0))
    }

    /// Exports memory and returns the bytes of its key.
    pub(crate) fn export_key(&self, py: Python<'_>, memory: M, flags: u64) -> PyResult<Vec<u8>> {
        let key = self.ask(py, |session| session.export_key(memory, ExportFlags(flags)))?;
        Ok(key.as_bytes().to_vec())
    }

    pub(crate) fn set_import_pid(&self, py: Python<'_>, key: &[u8], bare_tgids: Vec<i32>) -> PyResult<()> {
        let key = key_of(key)?;
        let admitted: Vec<_> = bare_tgids.into_iter().map(BareTgid).collect();
        self.ask(py, |session| session.set_import_pid(&key, &admitted))
    }

    pub(crate) fn import_by_key(&self, py: Python<'_>, key: &[u8]) -> PyResult<Arc<M>> {
        let key = key_of(key)?;
        self.ask(py, |session| session.import_by_key(&key))
    }

    pub(crate) fn close(&self, py: Python<'_>, key: &[u8], force: bool) -> PyResult<()> {
        let key = key_of(key)?;
        self.ask(py, |session| if force { session.force_close(&key) } else { session.close(&key) })
    }

    /// Returns the name of the oldest pending event, if there is one.
    pub(crate) fn event(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.ask(py, Session::event)?.map(|happened| name_of(&happened)))
    }

    pub(crate) fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.ask(py, |session| Ok(session.as_fd().as_raw_fd()))
    }

    pub(crate) fn end(&self, py: Python<'_>) {
        if self.made.is_here() {
            py.detach(|| drop(self.lock().take()));
        }
    }
}

impl<M: DeviceMemory + Send + Sync> Drop for BrokerSession<M> {
    fn drop(&mut self) {
        let session = self.session.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.made.is_here() {
            // Closing notifies the broker, which can take long.
            Python::try_attach(|py| py.detach(|| drop(session)));
        } else {
            // The connection and the device belong to the parent.
            std::mem::forget(session);
        }
    }
}

fn key_of(bytes: &[u8]) -> PyResult<DeviceKey> {
    DeviceKey::from_wild(bytes).ok_or_else(|| {
        error("Invalid", "a device key must have 65 bytes: the 64 characters from `export_key`, and a NUL")
    })
}

/// The name of an event, without its key: keys must not be logged.
fn name_of(happened: &SessionEvent) -> String {
    let text = format!("{happened:?}");
    text.split(['(', ' ', '{']).next().unwrap_or_default().to_owned()
}
