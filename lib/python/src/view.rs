//! numpy arrays over memory of ours, and what keeps that memory while any of them lives.
//!
//! The array's base is a [`Pin`], and the base of each view of it, of each view of those, and of what `DLPack` or the buffer
//! protocol make of them, leads there. So a pin is dropped exactly when the last of them is gone.

use std::any::Any;
use std::ffi::c_int;
use std::ptr::NonNull;

use numpy::npyffi::{self, NPY_ARRAY_CARRAY_RO, NPY_ARRAY_WRITEABLE, PY_ARRAY_API, npy_intp};
use numpy::{Element, PyArrayDescr, PyArrayDescrMethods};
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
/// As for [`array`].
#[expect(unsafe_code, reason = "numpy gets memory that it does not own")]
pub(crate) unsafe fn bytes(
    py: Python<'_>,
    start: NonNull<u8>,
    len: usize,
    writable: bool,
    kept: impl Any + Send + Sync,
) -> PyResult<Bound<'_, PyAny>> {
    let dims = [npy_intp::try_from(len).map_err(|_| PyOverflowError::new_err("too many bytes"))?];
    // SAFETY: the caller answers for the memory, and the elements are single bytes.
    unsafe { array(py, start, u8::get_dtype(py), &dims, writable, kept) }
}

/// An array of any type, in C order.
///
/// # Safety
/// As many bytes as `dtype` and `dims` take must be mapped at `start`, and be writable if `writable`, as long as `kept` lives. `dtype`
/// must not hold Python objects.
#[expect(unsafe_code, reason = "numpy gets memory that it does not own")]
pub(crate) unsafe fn array<'py>(
    py: Python<'py>,
    start: NonNull<u8>,
    dtype: Bound<'py, PyArrayDescr>,
    dims: &[npy_intp],
    writable: bool,
    kept: impl Any + Send + Sync,
) -> PyResult<Bound<'py, PyAny>> {
    let pin = Py::new(py, Pin { _kept: Box::new(kept), _made: Made::here() })?;
    let flags = NPY_ARRAY_CARRAY_RO | if writable { NPY_ARRAY_WRITEABLE } else { 0 };
    let rank = c_int::try_from(dims.len()).map_err(|_| PyOverflowError::new_err("too many dimensions"))?;
    // SAFETY: numpy takes over the reference to the type of the elements, copies the dimensions, and does not use the
    // memory before its base is set. That takes over the reference to the pin, also when it fails.
    unsafe {
        let made = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            npyffi::get_type_object(py, npyffi::NpyTypes::PyArray_Type),
            dtype.into_dtype_ptr(),
            rank,
            dims.as_ptr().cast_mut(),
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
