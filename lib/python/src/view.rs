//! numpy arrays over memory of ours, and what keeps that memory while any of them lives.
//!
//! The array's base is a [`Pin`], and the base of each view of it, of each view of those, and of what `DLPack` or the buffer
//! protocol make of them, leads there. So a pin is dropped exactly when the last of them is gone.

use std::any::Any;
use std::ptr::NonNull;

use numpy::npyffi::{self, NPY_ARRAY_CARRAY_RO, NPY_ARRAY_WRITEABLE, PY_ARRAY_API, npy_intp};
use numpy::{Element, PyArrayDescrMethods};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::fork::Made;

/// Keeps something while arrays over it live.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct Pin {
    _kept: Box<dyn Any + Send + Sync>,
    _made: Made,
}

/// A one-dimensional array of bytes.
///
/// # Safety
/// `len` bytes at `start` must be mapped, and writable if `writable`, as long as `kept` is.
#[expect(unsafe_code, reason = "numpy is told of memory that it does not own")]
pub(crate) unsafe fn bytes(
    py: Python<'_>,
    start: NonNull<u8>,
    len: usize,
    writable: bool,
    kept: impl Any + Send + Sync,
) -> PyResult<Bound<'_, PyAny>> {
    let pin = Py::new(py, Pin { _kept: Box::new(kept), _made: Made::here() })?;
    let mut dims = [npy_intp::try_from(len).map_err(|_| PyOverflowError::new_err("too many bytes"))?];
    let flags = NPY_ARRAY_CARRAY_RO | if writable { NPY_ARRAY_WRITEABLE } else { 0 };
    // SAFETY: numpy takes over the reference to the type of the elements, copies the dimension, and makes no use of the
    // memory before its base is set. That takes over the reference to the pin, also when it fails.
    unsafe {
        let made = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            npyffi::get_type_object(py, npyffi::NpyTypes::PyArray_Type),
            u8::get_dtype(py).into_dtype_ptr(),
            1,
            dims.as_mut_ptr(),
            std::ptr::null_mut(),
            start.as_ptr().cast(),
            flags,
            std::ptr::null_mut(),
        );
        let array = Bound::from_owned_ptr_or_err(py, made)?;
        if PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_ptr().cast(), pin.into_ptr()) < 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(array)
    }
}
