//! Host memory in place of device memory, shared by keys over the sidecar's broker.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use shmesh::client::Mechanism;
use shmesh::device::{DeviceMemory, HostMemory};

use crate::error::system;
use crate::memory::{Mapping, Memory};
use crate::session::BrokerSession;

/// Memory that arrays and a session share.
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
    /// An array over it keeps `region`, so the session sees that the memory is in use.
    fn memory(region: &Arc<Self>) -> Memory {
        let start = region.0.as_ptr();
        let len = usize::try_from(region.0.size()).unwrap_or(0);
        Memory::over(Mapping::new(start, len, true, None, Box::new(Arc::clone(region))))
    }
}

/// A session with the broker of device keys of a link.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct DeviceSession {
    asked: BrokerSession<Region>,
}

#[pymethods]
impl DeviceSession {
    #[staticmethod]
    fn connect(py: Python<'_>, directory: PathBuf, link: &str) -> PyResult<Self> {
        Ok(Self { asked: BrokerSession::connect(py, directory, link, "DeviceSession")? })
    }

    fn bare_tgid(&self, py: Python<'_>) -> PyResult<i32> {
        self.asked.bare_tgid(py)
    }

    #[pyo3(signature = (nbytes, *, flags=0))]
    fn export_key(&self, py: Python<'_>, nbytes: u64, flags: u64) -> PyResult<(Vec<u8>, Memory)> {
        let host = HostMemory::new(nbytes)
            .map_err(|source| system(&format!("allocate device memory of {nbytes} bytes"), &source))?;
        let host = Arc::new(host);
        let ours = Arc::new(Region(Arc::clone(&host)));
        let key = self.asked.export_key(py, Region(host), flags)?;
        Ok((key, Region::memory(&ours)))
    }

    fn set_import_pid(&self, py: Python<'_>, key: &[u8], bare_tgids: Vec<i32>) -> PyResult<()> {
        self.asked.set_import_pid(py, key, bare_tgids)
    }

    fn import_by_key(&self, py: Python<'_>, key: &[u8]) -> PyResult<Memory> {
        Ok(Region::memory(&self.asked.import_by_key(py, key)?))
    }

    #[pyo3(signature = (key, *, force=false))]
    fn close(&self, py: Python<'_>, key: &[u8], force: bool) -> PyResult<()> {
        self.asked.close(py, key, force)
    }

    /// Returns the name of the oldest pending event, if there is one.
    fn event(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.asked.event(py)
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.asked.fileno(py)
    }

    fn end(&self, py: Python<'_>) {
        self.asked.end(py);
    }
}
