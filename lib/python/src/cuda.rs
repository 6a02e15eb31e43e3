//! GPU memory by keys, as arrays that torch and cupy use in place.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::prelude::*;
use shmesh::client::Mechanism;
use shmesh::device::{CudaDevice, CudaMemory, DeviceMemory, DeviceUuid};

use crate::dlpack::Tensor;
use crate::error::{error, forked, system};
use crate::fork::ForkGuard;
use crate::session::BrokerSession;

/// Memory that arrays and a session share.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) memory: Arc<CudaMemory>,
    made: ForkGuard,
}

impl Region {
    fn of(memory: Arc<CudaMemory>) -> Self {
        Self { memory, made: ForkGuard::here() }
    }
}

impl Drop for Region {
    /// A forked child must not call the driver, and the memory is the parent's.
    fn drop(&mut self) {
        if !self.made.is_here() {
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

impl DeviceMemory for Region {
    const MECHANISM: Mechanism = CudaMemory::MECHANISM;

    fn size(&self) -> u64 {
        self.memory.size()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.memory.fd()
    }

    fn handle(&self) -> Vec<u8> {
        self.memory.handle()
    }

    fn import(size: u64, fd: Option<OwnedFd>, handle: &[u8]) -> std::io::Result<Self> {
        CudaMemory::import(size, fd, handle).map(|memory| Self::of(Arc::new(memory)))
    }
}

/// Memory of a GPU. Arrays over it keep it alive.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct GpuMemory {
    /// Counted by the session: memory that is still in use cannot be closed.
    region: Arc<Region>,
}

impl GpuMemory {
    /// Returns the memory. Fails in a forked child, which cannot use its parent's device.
    fn memory(&self) -> PyResult<&Arc<CudaMemory>> {
        if self.region.made.is_here() { Ok(&self.region.memory) } else { Err(forked("GpuMemory")) }
    }
}

#[pymethods]
impl GpuMemory {
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.memory()?.size())
    }

    #[getter]
    fn address(&self) -> PyResult<u64> {
        Ok(self.memory()?.address())
    }

    /// The number of the device in this process.
    #[getter]
    fn device(&self) -> PyResult<i32> {
        Ok(self.memory()?.device().ordinal())
    }

    #[getter]
    fn uuid(&self) -> PyResult<String> {
        Ok(self.memory()?.device().uuid().to_string())
    }

    /// Copies bytes from `offset` to host memory.
    fn read_into(&self, py: Python<'_>, offset: u64, mut bytes: PyReadwriteArray1<'_, u8>) -> PyResult<()> {
        let (memory, bytes) = (self.memory()?, bytes.as_slice_mut()?);
        py.detach(|| memory.read_at(offset, bytes)).map_err(|source| system("copy to the host", &source))
    }

    /// Copies bytes of host memory to `offset`.
    fn write_from(&self, py: Python<'_>, offset: u64, bytes: PyReadonlyArray1<'_, u8>) -> PyResult<()> {
        let (memory, bytes) = (self.memory()?, bytes.as_slice()?);
        py.detach(|| memory.write_at(offset, bytes)).map_err(|source| system("copy to the device", &source))
    }

    /// Creates a `DLPack` capsule. `code` and `bits` describe its data type.
    fn capsule<'py>(
        &self,
        py: Python<'py>,
        shape: Vec<i64>,
        code: u8,
        bits: u8,
        versioned: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let memory = self.memory()?;
        let items = shape.iter().try_fold(1_u64, |all, len| all.checked_mul(u64::try_from(*len).ok()?));
        let nbytes = items.and_then(|items| items.checked_mul(u64::from(bits) / 8));
        if nbytes.is_none_or(|nbytes| nbytes > memory.size()) {
            let text =
                format!("{shape:?} items of {bits} bits do not fit into {} bytes of memory", memory.size());
            return Err(error("Mismatch", text));
        }
        let location = (memory.address(), memory.device().ordinal());
        Tensor::capsule(py, Arc::clone(&self.region) as _, location, shape, code, bits, versioned)
    }
}

/// A session with the broker of device keys of a link, for GPU memory.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct GpuSession {
    asked: BrokerSession<Region>,
}

#[pymethods]
impl GpuSession {
    #[staticmethod]
    fn connect(py: Python<'_>, directory: PathBuf, link: &str) -> PyResult<Self> {
        Ok(Self { asked: BrokerSession::connect(py, directory, link, "GpuSession")? })
    }

    fn bare_tgid(&self, py: Python<'_>) -> PyResult<i32> {
        self.asked.bare_tgid(py)
    }

    /// `uuid` selects the device; by default it is the first one.
    #[pyo3(signature = (nbytes, *, uuid=None, flags=0))]
    fn export_key(
        &self,
        py: Python<'_>,
        nbytes: u64,
        uuid: Option<&str>,
        flags: u64,
    ) -> PyResult<(Vec<u8>, GpuMemory)> {
        let make = || {
            let none = || std::io::Error::other("the driver is installed, but it has no device");
            let device = match uuid {
                Some(uuid) => CudaDevice::by_uuid(&uuid.parse::<DeviceUuid>()?)?,
                None => CudaDevice::all()?.into_iter().next().ok_or_else(none)?,
            };
            CudaMemory::new(&device, nbytes)
        };
        let made = py.detach(make);
        let made =
            made.map_err(|source| system(&format!("allocate GPU memory of {nbytes} bytes"), &source))?;
        let memory = Arc::new(made);
        let ours = Arc::new(Region::of(Arc::clone(&memory)));
        let key = self.asked.export_key(py, Region::of(memory), flags)?;
        Ok((key, GpuMemory { region: ours }))
    }

    fn set_import_pid(&self, py: Python<'_>, key: &[u8], bare_tgids: Vec<i32>) -> PyResult<()> {
        self.asked.set_import_pid(py, key, bare_tgids)
    }

    fn import_by_key(&self, py: Python<'_>, key: &[u8]) -> PyResult<GpuMemory> {
        Ok(GpuMemory { region: self.asked.import_by_key(py, key)? })
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
