//! [`Memory`]: a mapped piece of shared memory, without shape or type.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::MmapOptions;
use pyo3::prelude::*;
use shmesh_sys::file::{Seals, memfd, reserve};
use shmesh_sys::{cgroup, errno, sysv};

use crate::error::{error, system};
use crate::share::{self, PublishedName};
use crate::view;
use crate::waiting::duration_of;

/// The object that keeps the bytes mapped, and unmaps them when it is dropped.
pub(crate) type MappingOwner = Box<dyn Debug + Send + Sync>;

/// Bytes that stay mapped as long as this lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) writable: bool,
    pub(crate) file: Option<Arc<File>>,
    published: Mutex<Option<PublishedName>>,
    _kept: MappingOwner,
}

#[expect(unsafe_code, reason = "a pointer into memory that any thread may reach")]
// SAFETY: the bytes are mapped for the whole process, and only numpy reads or writes them.
unsafe impl Send for Mapping {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(
        start: *mut u8,
        len: usize,
        writable: bool,
        file: Option<Arc<File>>,
        kept: MappingOwner,
    ) -> Self {
        // A mapping is never at address 0.
        Self {
            start: NonNull::new(start).unwrap_or(NonNull::dangling()),
            len,
            writable,
            file,
            published: Mutex::new(None),
            _kept: kept,
        }
    }

    fn published(&self) -> MutexGuard<'_, Option<PublishedName>> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of_file(file: File, len: usize, writable: bool, populate: bool) -> io::Result<Self> {
        let mut options = MmapOptions::new();
        options.len(len);
        if populate {
            options.populate();
        }
        let map = if writable {
            options.map_raw(file.as_raw_fd())
        } else {
            options.map_raw_read_only(file.as_raw_fd())
        }?;
        Ok(Self::new(map.as_mut_ptr(), len, writable, Some(Arc::new(file)), Box::new(map)))
    }

    /// Maps a memfd from another process.
    pub(crate) fn import(fd: OwnedFd, writable: bool) -> io::Result<Self> {
        let file = File::from(fd);
        let len = usize::try_from(file.metadata()?.len()).unwrap_or(0);
        // A memfd that can be truncated would cause SIGBUS later.
        if !shmesh_sys::file::is_size_sealed(&file) || len == 0 {
            return Err(io::Error::other("the received descriptor is not a sealed memfd"));
        }
        Self::of_file(file, len, writable, false)
    }
}

/// Creates memory. With `readers_write`, other processes may map it writable. Otherwise it can only be written through this
/// mapping.
fn create(len: usize, readers_write: bool) -> PyResult<Mapping> {
    // A length of 0 cannot be mapped.
    let len = len.max(1);
    if let Some(room) = cgroup::room_bytes().filter(|room| *room < len as u64) {
        return Err(error(
            "NoSpace",
            format_args!(
                "{len} bytes of shared memory: the memory limit of this container, or the machine, leaves {room}; make the \
                 array smaller, or raise resources.limits.memory"
            ),
        ));
    }
    let failed = |source: io::Error| match errno::is_no_space(&source) {
        true => error(
            "NoSpace",
            format_args!(
                "{len} bytes of shared memory: not enough memory ({source}); make the array smaller, or give this machine or container more memory"
            ),
        ),
        false => system("create shared memory", &source),
    };
    let make = || -> io::Result<Mapping> {
        let file = memfd(shmesh::inspect::ARRAY_MEMFD, false)?;
        file.set_len(len as u64)?;
        reserve(&file, len as u64)?;
        let mapping = Mapping::of_file(file, len, true, true)?;
        let size = Seals::SIZE.and(Seals::FINAL);
        let seals = if readers_write { size } else { size.and(Seals::FUTURE_WRITE) };
        if let Some(file) = &mapping.file {
            seals.add_to(file)?;
        }
        Ok(mapping)
    };
    make().map_err(failed)
}

/// A piece of shared memory. Arrays over it keep it mapped. It has no fixed address, no key, and only the name that it is
/// given.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct Memory(Mutex<Option<Arc<Mapping>>>);

impl Memory {
    pub(crate) fn over(mapping: Mapping) -> Self {
        Self(Mutex::new(Some(Arc::new(mapping))))
    }

    fn state(&self) -> MutexGuard<'_, Option<Arc<Mapping>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mapping(&self) -> PyResult<Arc<Mapping>> {
        // Not in one expression: the lock must not be held while waiting for the interpreter.
        let mapping = self.state().clone();
        mapping.ok_or_else(|| error("Closed", "this memory was closed; open it again"))
    }

    fn file(&self) -> PyResult<Arc<File>> {
        self.mapping()?.file.clone().ok_or_else(|| {
            error(
                "Invalid",
                "System V and device memory cannot be passed to other processes; copy it with `shmesh.from_numpy`",
            )
        })
    }
}

#[pymethods]
impl Memory {
    #[staticmethod]
    #[pyo3(signature = (nbytes, *, readers_write=false))]
    fn create(py: Python<'_>, nbytes: usize, readers_write: bool) -> PyResult<Self> {
        Ok(Self::over(py.detach(|| create(nbytes, readers_write))?))
    }

    /// Opens memory that another process shares under this name in the IPC directory. Returns it with its description.
    #[staticmethod]
    #[pyo3(signature = (directory, name, *, writable=false, patience=60.0))]
    fn open(
        py: Python<'_>,
        directory: PathBuf,
        name: &str,
        writable: bool,
        patience: f64,
    ) -> PyResult<(Self, Vec<u8>)> {
        let (fd, meta) = share::open(py, &directory, name, duration_of(patience)?)?;
        Ok((Self::over(import(fd, writable)?), meta))
    }

    /// Opens memory by its handle.
    #[staticmethod]
    #[pyo3(signature = (address, token, *, writable=false))]
    fn fetch(
        py: Python<'_>,
        address: &str,
        token: [u8; share::TOKEN_BYTES],
        writable: bool,
    ) -> PyResult<Self> {
        let fd = share::fetch(py, address, token)?;
        Ok(Self::over(import(fd, writable)?))
    }

    /// Attaches an existing System V segment at a free address.
    #[staticmethod]
    #[pyo3(signature = (*, shmid=None, key=None, writable=false))]
    fn attach_sysv(shmid: Option<i32>, key: Option<i32>, writable: bool) -> PyResult<Self> {
        let attached = attach_sysv(shmid, key, writable)?;
        let (start, len) = (attached.start(), attached.len());
        Ok(Self::over(Mapping::new(start, len, writable, None, Box::new(attached))))
    }

    /// Returns the address and token by which one other process can fetch this memory. It is kept until then, even if this
    /// process drops it.
    fn handle(&self) -> PyResult<(String, Vec<u8>)> {
        share::handle(&self.file()?)
    }

    /// Gives the memory a name in the IPC directory.
    #[pyo3(signature = (directory, name, meta, *, mode=0o600))]
    fn publish(
        &self,
        py: Python<'_>,
        directory: PathBuf,
        name: &str,
        meta: Vec<u8>,
        mode: u32,
    ) -> PyResult<()> {
        let (file, mapping) = (self.file()?, self.mapping()?);
        if mapping.published().is_some() {
            return Err(error("AlreadyExists", "this memory has a name; unlink it first"));
        }
        let published = share::publish(py, &file, &directory, name, meta, mode)?;
        let _ = mapping.published().insert(published);
        Ok(())
    }

    /// Answers for a name if the process that published it has ended. Returns whether this process answers from now on.
    #[pyo3(signature = (directory, name, meta, *, mode=0o600))]
    fn adopt(
        &self,
        py: Python<'_>,
        directory: PathBuf,
        name: &str,
        meta: Vec<u8>,
        mode: u32,
    ) -> PyResult<bool> {
        let (file, mapping) = (self.file()?, self.mapping()?);
        let is_ours = mapping.published().as_ref().is_some_and(PublishedName::is_here);
        if is_ours || py.detach(|| share::is_answered(&directory, name))? {
            return Ok(false);
        }
        let published = share::publish(py, &file, &directory, name, meta, mode)?;
        let before = mapping.published().replace(published);
        drop(before);
        Ok(true)
    }

    /// Removes the name. Processes that have the memory keep it.
    fn unlink(&self) -> PyResult<()> {
        let published = self.mapping()?.published().take();
        drop(published);
        Ok(())
    }

    /// Returns an array of `nbytes` bytes from `offset`, which keeps the memory mapped.
    #[expect(unsafe_code, reason = "the bytes are those of the mapping that is kept")]
    fn view<'py>(&self, py: Python<'py>, offset: usize, nbytes: usize) -> PyResult<Bound<'py, PyAny>> {
        let mapping = self.mapping()?;
        if offset.checked_add(nbytes).is_none_or(|end| end > mapping.len) {
            return Err(error(
                "Mismatch",
                format_args!(
                    "bytes {offset} to {offset}+{nbytes} are outside the memory, which has {} bytes",
                    mapping.len
                ),
            ));
        }
        // SAFETY: `offset` and `nbytes` were just checked against the mapping, which the array keeps alive.
        unsafe { view::bytes(py, mapping.start.add(offset), nbytes, mapping.writable, Arc::clone(&mapping)) }
    }

    /// Unmaps the memory immediately.
    fn close(&self) -> PyResult<()> {
        let (closed, views) = {
            let mut state = self.state();
            let is_unviewed = state.as_mut().is_none_or(|mapping| Arc::get_mut(mapping).is_some());
            let views = state.as_ref().map_or(0, |mapping| (Arc::strong_count(mapping) - 1).max(1));
            if is_unviewed { (state.take(), 0) } else { (None, views) }
        };
        drop(closed);
        if views == 0 {
            return Ok(());
        }
        Err(error(
            "StillViewed",
            format_args!(
                "{views} array(s) over this memory are still alive; `del` them and their views, then close"
            ),
        ))
    }

    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        Ok(self.mapping()?.len)
    }

    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok(self.mapping()?.start.as_ptr().addr())
    }

    #[getter]
    fn writable(&self) -> PyResult<bool> {
        Ok(self.mapping()?.writable)
    }

    /// Whether other processes may map it writable.
    #[getter]
    fn readers_write(&self) -> PyResult<bool> {
        let mapping = self.mapping()?;
        let Some(file) = &mapping.file else { return Ok(mapping.writable) };
        let seals = Seals::of(file).map_err(|source| system("read the seals of the memory", &source))?;
        Ok(!seals.contains(Seals::FUTURE_WRITE))
    }

    #[getter]
    fn closed(&self) -> bool {
        self.state().is_none()
    }

    /// The path of its name; `None` without a name.
    #[getter]
    fn path(&self) -> PyResult<Option<PathBuf>> {
        Ok(self.mapping()?.published().as_ref().map(|published| published.path().to_owned()))
    }

    /// The device and inode of the memory, which are unique on this machine.
    #[getter]
    fn identity(&self) -> PyResult<(u64, u64)> {
        let known =
            self.file()?.metadata().map_err(|source| system("read the metadata of the memory", &source))?;
        Ok((known.dev(), known.ino()))
    }

    /// The descriptor of the memory, which remains its owner.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.file()?.as_raw_fd())
    }
}

fn import(fd: OwnedFd, writable: bool) -> PyResult<Mapping> {
    Mapping::import(fd, writable).map_err(|source| match source.raw_os_error() {
        Some(errno::EPERM) if writable => error(
            "ReadOnly",
            "only its owner may write this memory; open it read-only, or create it with `readers_write=True`",
        ),
        _ => system("map the memory", &source),
    })
}

/// Attaches the System V segment with this id or key.
fn attach_sysv(shmid: Option<i32>, key: Option<i32>, writable: bool) -> PyResult<sysv::SysvSegment> {
    let shmid = match (shmid, key) {
        (Some(shmid), None) => shmid,
        (None, Some(sysv::IPC_PRIVATE)) => {
            return Err(error("Invalid", "key 0 is IPC_PRIVATE, which no segment has; pass the shmid"));
        }
        (None, Some(key)) => {
            sysv::find(key).map_err(|source| no_segment(&format!("key {key:#x}"), &source))?
        }
        _ => return Err(error("Invalid", "pass either shmid or key")),
    };
    sysv::SysvSegment::attach(shmid, writable)
        .map_err(|source| no_segment(&format!("shmid {shmid}"), &source))
}

#[cold]
fn no_segment(what: &str, source: &io::Error) -> PyErr {
    match source.raw_os_error() {
        Some(errno::EINVAL | errno::ENOENT | errno::EIDRM) => error(
            "NotFound",
            format_args!(
                "there is no System V segment with {what} in this IPC namespace; look with `ipcs -m`"
            ),
        ),
        _ => system(&format!("attach the System V segment with {what}"), source),
    }
}
