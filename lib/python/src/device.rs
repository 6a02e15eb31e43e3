//! Host memory in the place of a device's, by keys, over the sidecar's broker.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use shmesh::client::Mechanism;
use shmesh::device::{BareTgid, DeviceKey, DeviceMemory, ExportFlags, HostMemory, Session};

use crate::error::{error, forked, of_link, system};
use crate::fork::Made;
use crate::memory::{Kept, Mapping, Memory};

/// Memory that arrays and a session hold together.
#[derive(Debug)]
pub(crate) struct Region(Arc<HostMemory>);

impl DeviceMemory for Region {
    const MECHANISM: Mechanism = HostMemory::MECHANISM;

    fn size(&self) -> u64 {
        self.0.size()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.fd()
    }

    fn handle(&self) -> Vec<u8> {
        self.0.handle()
    }

    fn import(size: u64, fd: Option<OwnedFd>, handle: &[u8]) -> std::io::Result<Self> {
        HostMemory::import(size, fd, handle).map(|memory| Self(Arc::new(memory)))
    }
}

impl Region {
    /// An array over it keeps `region`, so the session sees that it is still held.
    fn memory(region: &Arc<Self>) -> Memory {
        let start = region.0.as_ptr();
        let len = usize::try_from(region.0.size()).unwrap_or(0);
        Memory::over(Mapping::new(start, len, true, None, Kept::Region(Arc::clone(region))))
    }
}

/// A session with the broker of device keys of a link.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct DeviceSession {
    session: Mutex<Option<Session<Region>>>,
    made: Made,
}

impl DeviceSession {
    /// Asks the broker. Without the interpreter, which others may need meanwhile; whoever holds the lock never waits for it.
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut Session<Region>) -> shmesh::Result<T> + Send,
    ) -> PyResult<T> {
        if !self.made.is_here() {
            return Err(forked("DeviceSession"));
        }
        let answer = py.detach(|| self.lock().as_mut().map(act));
        answer.ok_or_else(|| error("Closed", "this session has ended; make another"))?.map_err(of_link)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Session<Region>>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) fn key_of(bytes: &[u8]) -> PyResult<DeviceKey> {
    DeviceKey::from_wild(bytes).ok_or_else(|| {
        error("Invalid", "a device key has 65 bytes: 64 characters, as `export_key` gave them, and a NUL")
    })
}

pub(crate) fn admit(bare_tgids: Vec<i32>) -> Vec<BareTgid> {
    bare_tgids.into_iter().map(BareTgid).collect()
}

#[pymethods]
impl DeviceSession {
    #[staticmethod]
    fn connect(py: Python<'_>, directory: PathBuf, link: &str) -> PyResult<Self> {
        let session = py.detach(|| Session::connect(directory, link)).map_err(of_link)?;
        Ok(Self { session: Mutex::new(Some(session)), made: Made::here() })
    }

    fn bare_tgid(&self, py: Python<'_>) -> PyResult<i32> {
        self.ask(py, |session| session.bare_tgid().map(|tgid| tgid.0))
    }

    #[pyo3(signature = (nbytes, *, flags=0))]
    fn export_key(&self, py: Python<'_>, nbytes: u64, flags: u64) -> PyResult<(Vec<u8>, Memory)> {
        let host = HostMemory::new(nbytes)
            .map_err(|source| system(&format!("make device memory of {nbytes} bytes"), &source))?;
        let host = Arc::new(host);
        let ours = Arc::new(Region(Arc::clone(&host)));
        let key = self.ask(py, |session| session.export_key(Region(host), ExportFlags(flags)))?;
        Ok((key.as_bytes().to_vec(), Region::memory(&ours)))
    }

    fn set_import_pid(&self, py: Python<'_>, key: &[u8], bare_tgids: Vec<i32>) -> PyResult<()> {
        let key = key_of(key)?;
        self.ask(py, |session| session.set_import_pid(&key, &admit(bare_tgids)))
    }

    fn import_by_key(&self, py: Python<'_>, key: &[u8]) -> PyResult<Memory> {
        let key = key_of(key)?;
        Ok(Region::memory(&self.ask(py, |session| session.import_by_key(&key))?))
    }

    #[pyo3(signature = (key, *, force=false))]
    fn close(&self, py: Python<'_>, key: &[u8], force: bool) -> PyResult<()> {
        let key = key_of(key)?;
        self.ask(py, |session| if force { session.force_close(&key) } else { session.close(&key) })
    }

    /// The name of the oldest event that was not taken yet.
    fn event(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.ask(py, Session::event)?.map(|happened| name_of(&happened)))
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.ask(py, |session| Ok(session.as_fd().as_raw_fd()))
    }

    fn end(&self, py: Python<'_>) {
        if self.made.is_here() {
            py.detach(|| drop(self.lock().take()));
        }
    }
}

/// The variant's name, without the key in it: keys are not for logs.
pub(crate) fn name_of(happened: &shmesh::client::Happened) -> String {
    let text = format!("{happened:?}");
    text.split(['(', ' ', '{']).next().unwrap_or_default().to_owned()
}

impl Drop for DeviceSession {
    fn drop(&mut self) {
        let session = self.session.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.made.is_here() {
            // It tells the broker, which may take its time.
            Python::try_attach(|py| py.detach(|| drop(session)));
        } else {
            // Its connection is the parent's.
            std::mem::forget(session);
        }
    }
}
