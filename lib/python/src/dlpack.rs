//! `DLPack`: the C structures by which frameworks exchange arrays.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::error::error;

/// The device type `kDLCUDA`.
const DL_CUDA: c_int = 2;

/// The common part of both forms of `DLPack`, in its C layout.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: c_int,
    device_id: c_int,
    ndim: c_int,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct UnversionedTensor {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct VersionedTensor {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

/// A tensor of either form, with the data that it points to.
pub(crate) struct Tensor {
    /// The object that keeps the memory mapped.
    _owner: Arc<dyn Send + Sync>,
    shape: Vec<i64>,
    strides: Vec<i64>,
    unversioned: UnversionedTensor,
    versioned: VersionedTensor,
}

const NAME: &CStr = c"dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";

#[expect(unsafe_code, reason = "DLPack is an interface of C")]
impl Tensor {
    pub(crate) fn capsule(
        py: Python<'_>,
        owner: Arc<dyn Send + Sync>,
        (address, device_id): (u64, c_int),
        shape: Vec<i64>,
        code: u8,
        bits: u8,
        versioned: bool,
    ) -> PyResult<Bound<'_, PyAny>> {
        let mut strides = vec![1; shape.len()];
        for at in (1..shape.len()).rev() {
            strides[at - 1] = strides[at] * shape[at].max(1);
        }
        let tensor = |shape: *mut i64, strides: *mut i64, ndim| DlTensor {
            data: address as *mut c_void,
            device_type: DL_CUDA,
            device_id,
            ndim,
            code,
            bits,
            lanes: 1,
            shape,
            strides,
            byte_offset: 0,
        };
        let null = std::ptr::null_mut;
        let ndim = c_int::try_from(shape.len()).map_err(|_| error("Invalid", "too many dimensions"))?;
        let mut all = Box::new(Self {
            shape,
            strides,
            unversioned: UnversionedTensor {
                tensor: tensor(null(), null(), ndim),
                context: std::ptr::null_mut(),
                deleter: None,
            },
            versioned: VersionedTensor {
                major: 1,
                minor: 0,
                context: std::ptr::null_mut(),
                deleter: None,
                flags: 0,
                tensor: tensor(null(), null(), ndim),
            },
            _owner: owner,
        });
        let (shape, strides) = (all.shape.as_mut_ptr(), all.strides.as_mut_ptr());
        for tensor in [&mut all.unversioned.tensor, &mut all.versioned.tensor] {
            (tensor.shape, tensor.strides) = (shape, strides);
        }
        all.unversioned.deleter = Some(delete_unversioned);
        all.versioned.deleter = Some(delete_versioned);
        let all = Box::into_raw(all);
        // SAFETY: the tensor is alive and has no other user until a capsule has it, whose consumer or destructor frees it
        // by a deleter.
        let made = unsafe {
            (*all).unversioned.context = all.cast();
            (*all).versioned.context = all.cast();
            if versioned {
                let place = (&raw mut (*all).versioned).cast();
                ffi::PyCapsule_New(place, NAME_VERSIONED.as_ptr(), Some(end_versioned))
            } else {
                let place = (&raw mut (*all).unversioned).cast();
                ffi::PyCapsule_New(place, NAME.as_ptr(), Some(end_unversioned))
            }
        };
        if NonNull::new(made).is_none() {
            // SAFETY: no capsule has the tensor.
            drop(unsafe { Box::from_raw(all) });
            return Err(PyErr::fetch(py));
        }
        // SAFETY: it is a new reference.
        Ok(unsafe { Bound::from_owned_ptr(py, made) })
    }
}

/// Deletes an unversioned tensor. Consumers may call it from any thread.
#[expect(unsafe_code, reason = "DLPack is an interface of C")]
unsafe extern "C" fn delete_unversioned(tensor: *mut UnversionedTensor) {
    // SAFETY: the context is the box that holds the tensor, and a deleter is called once.
    drop(unsafe { Box::from_raw((*tensor).context.cast::<Tensor>()) });
}

/// Deletes a versioned tensor. Consumers may call it from any thread.
#[expect(unsafe_code, reason = "DLPack is an interface of C")]
unsafe extern "C" fn delete_versioned(tensor: *mut VersionedTensor) {
    // SAFETY: the context is the box that holds the tensor, and a deleter is called once.
    drop(unsafe { Box::from_raw((*tensor).context.cast::<Tensor>()) });
}

/// Destroys a capsule. If no consumer has renamed it, its tensor is deleted.
#[expect(unsafe_code, reason = "DLPack is an interface of C")]
unsafe extern "C" fn end_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this with a capsule that it is about to free, and by its name it is ours.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete_unversioned(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// Destroys a versioned capsule, in the same way.
#[expect(unsafe_code, reason = "DLPack is an interface of C")]
unsafe extern "C" fn end_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this with a capsule that it is about to free, and by its name it is ours.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME_VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, NAME_VERSIONED.as_ptr()).cast());
        }
    }
}
