//! numpy arrays over shared memory, and the object that keeps that memory alive while an array uses it.
//!
//! The base of an array is a [`Pin`]. The bases of all its views, and of objects that `DLPack` or the buffer protocol
//! create from them, lead to the pin. So a pin is dropped exactly when the last of them is gone.

use std::any::Any;
use std::ffi::c_int;
use std::ptr::NonNull;

use numpy::npyffi::{self, NPY_ARRAY_CARRAY_RO, NPY_ARRAY_WRITEABLE, PY_ARRAY_API, npy_intp};
use numpy::{Element, PyArrayDescr, PyArrayDescrMethods};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::fork::ForkGuard;

/// Keeps a value alive while arrays over it are.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct Pin {
    _kept: Box<dyn Any + Send + Sync>,
    _made: ForkGuard,
}

/// Creates a one-dimensional array of bytes.
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
    // SAFETY: guaranteed by the caller; the elements are single bytes.
    unsafe { array(py, start, u8::get_dtype(py), &dims, writable, kept) }
}

/// Creates an array of any type, in C order.
///
/// # Safety
/// The bytes of `dims` elements of `dtype` must stay mapped at `start`, and be writable if `writable`, as long as `kept`
/// lives. `dtype` must not hold Python objects.
#[expect(unsafe_code, reason = "numpy gets memory that it does not own")]
pub(crate) unsafe fn array<'py>(
    py: Python<'py>,
    start: NonNull<u8>,
    dtype: Bound<'py, PyArrayDescr>,
    dims: &[npy_intp],
    writable: bool,
    kept: impl Any + Send + Sync,
) -> PyResult<Bound<'py, PyAny>> {
    let pin = Py::new(py, Pin { _kept: Box::new(kept), _made: ForkGuard::here() })?;
    let flags = NPY_ARRAY_CARRAY_RO | if writable { NPY_ARRAY_WRITEABLE } else { 0 };
    let rank = c_int::try_from(dims.len()).map_err(|_| PyOverflowError::new_err("too many dimensions"))?;
    // SAFETY: numpy takes ownership of the reference to the data type, copies the dimensions, and does not use the memory
    // before its base is set. Setting the base takes ownership of the reference to the pin, even if it fails.
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
