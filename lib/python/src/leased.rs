//! Files of an IPC directory that say whether any process uses them: `shmesh_sys::lease`.

use std::io;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use shmesh_sys::errno;
use shmesh_sys::lease::{self, Removal};

/// The built-in error for the number, as the functions of `os` raise it.
fn os_error(error: &io::Error, path: &Path) -> PyErr {
    let number = error.raw_os_error().or(match error.kind() {
        io::ErrorKind::AlreadyExists => Some(errno::EEXIST),
        io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull => Some(errno::ENOSPC),
        io::ErrorKind::WouldBlock => Some(errno::EAGAIN),
        _ => None,
    });
    let Some(number) = number else { return PyOSError::new_err(error.to_string()) };
    let text = io::Error::from_raw_os_error(number).to_string();
    let text = text.split(" (os error").next().unwrap_or_default().to_owned();
    PyOSError::new_err((number, text, path.as_os_str().to_owned()))
}

/// Makes a marked file of so many reserved bytes with a lease, which must not exist yet, and returns its descriptor.
#[pyfunction]
pub(crate) fn create_leased(py: Python<'_>, path: PathBuf, mode: u32, nbytes: u64) -> PyResult<i32> {
    let created = py.detach(|| lease::create(&path, mode, nbytes));
    Ok(created.map_err(|error| os_error(&error, &path))?.into_raw_fd())
}

/// Opens a file for reading and writing, with a lease if it is marked, and returns its descriptor.
#[pyfunction]
pub(crate) fn open_leased(py: Python<'_>, path: PathBuf) -> PyResult<i32> {
    let opened = py.detach(|| lease::open(&path, true));
    Ok(opened.map_err(|error| os_error(&error, &path))?.into_raw_fd())
}

/// Removes the name of a marked file that no process uses. Returns whether the name is gone.
#[pyfunction]
pub(crate) fn remove_unused(py: Python<'_>, path: PathBuf) -> PyResult<bool> {
    let removal = py.detach(|| lease::remove_unused(&path)).map_err(|error| os_error(&error, &path))?;
    Ok(matches!(removal, Removal::Removed { .. } | Removal::Gone))
}
