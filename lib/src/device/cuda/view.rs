//! Device memory at an address: copies to and from the host, and checks of pointers.

#![allow(unsafe_code, reason = "calls of a C library")]

use std::ffi::c_int;
use std::io;

use super::device::CudaDevice;
use super::driver::{Driver, check};

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, `_DEVICE_ORDINAL`, `_IS_LEGACY_CUDA_IPC_CAPABLE`.
pub(super) const MEMORY_TYPE: c_int = 2;
pub(super) const DEVICE_ORDINAL: c_int = 9;
pub(super) const LEGACY_CAPABLE: c_int = 10;
/// `CU_MEMORYTYPE_DEVICE`.
pub(super) const ON_DEVICE: c_int = 2;

/// Device memory at an address of this process.
#[derive(Debug)]
pub(super) struct CudaMapping {
    pub(super) device: CudaDevice,
    pub(super) address: u64,
    pub(super) size: u64,
}

pub(super) fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text.into())
}

pub(super) fn len_of(size: u64) -> io::Result<usize> {
    usize::try_from(size).map_err(|_| invalid(format!("{size} bytes exceed the address space")))
}

pub(super) fn attribute(address: u64, number: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let call = Driver::get()?.cuPointerGetAttribute()?;
    // SAFETY: each of the requested attributes is one number of this size.
    check("cuPointerGetAttribute", unsafe { call((&raw mut value).cast(), number, address) })?;
    Ok(value)
}

impl CudaMapping {
    /// A view of a whole allocation of other code. The error says what is wrong with the pointer.
    pub(super) fn of(address: u64, size: u64) -> io::Result<Self> {
        if size == 0 {
            return Err(invalid("device memory of 0 bytes"));
        }
        let kind = attribute(address, MEMORY_TYPE).map_err(|error| {
            invalid(format!("{address:#x} is not device memory of this process: {error}"))
        })?;
        if kind != ON_DEVICE {
            return Err(invalid(format!("{address:#x} is host memory: allocate it on the device")));
        }
        let device = CudaDevice::of_ordinal(attribute(address, DEVICE_ORDINAL)?)?;
        let (base, whole) = range_of(&device, address)?;
        if base != address {
            let text = format!(
                "{address:#x} is {} bytes inside its allocation: export its beginning, {base:#x}, and tell the importer \
                 the offset",
                address - base
            );
            return Err(invalid(text));
        }
        if size > whole {
            let text = format!(
                "{size} bytes at {address:#x}, where only {whole} are allocated: export at most those"
            );
            return Err(invalid(text));
        }
        Ok(Self { device, address, size: whole })
    }

    /// The address of `len` bytes at `offset`.
    pub(super) fn at(&self, offset: u64, len: usize) -> io::Result<u64> {
        let end = offset.checked_add(len as u64);
        if end.is_none_or(|end| end > self.size) {
            let text = format!("{len} bytes at offset {offset} are past the end of {} bytes", self.size);
            return Err(invalid(text));
        }
        Ok(self.address + offset)
    }

    pub(super) fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let from = self.at(offset, bytes.len())?;
        let _entered = self.device.enter()?;
        let copy = Driver::get()?.cuMemcpyDtoH_v2()?;
        // SAFETY: the bytes are ours alone, and as many as are copied; the driver checks the other side.
        check("cuMemcpyDtoH_v2", unsafe { copy(bytes.as_mut_ptr().cast(), from, bytes.len()) })
    }

    pub(super) fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let to = self.at(offset, bytes.len())?;
        let _entered = self.device.enter()?;
        let copy = Driver::get()?.cuMemcpyHtoD_v2()?;
        // SAFETY: the bytes are as many as are copied; the driver checks the other side.
        check("cuMemcpyHtoD_v2", unsafe { copy(to, bytes.as_ptr().cast(), bytes.len()) })?;
        // The driver has read the bytes, but may not have written them yet: another process could not wait for that.
        settle()
    }

    pub(super) fn copy_from(&self, offset: u64, from: u64, len: u64) -> io::Result<()> {
        let len = len_of(len)?;
        let to = self.at(offset, len)?;
        let _entered = self.device.enter()?;
        let copy = Driver::get()?.cuMemcpyDtoD_v2()?;
        // SAFETY: both sides are the device's, and the driver checks them.
        check("cuMemcpyDtoD_v2", unsafe { copy(to, from, len) })
    }

    pub(super) fn fill(&self, offset: u64, word: u32, words: u64) -> io::Result<()> {
        let words = len_of(words)?;
        let len =
            words.checked_mul(4).ok_or_else(|| invalid("the number of words exceeds the address space"))?;
        let to = self.at(offset, len)?;
        let _entered = self.device.enter()?;
        let set = Driver::get()?.cuMemsetD32_v2()?;
        // SAFETY: the memory is the device's, and the driver checks it.
        check("cuMemsetD32_v2", unsafe { set(to, word, words) })
    }
}

/// Waits for work of this library in the default stream of the thread's context.
pub(super) fn settle() -> io::Result<()> {
    let wait = Driver::get()?.cuStreamSynchronize()?;
    // SAFETY: the default stream is always there.
    check("cuStreamSynchronize", unsafe { wait(0) })
}

/// Start and size of the device allocation of an address.
pub(super) fn range_of(device: &CudaDevice, address: u64) -> io::Result<(u64, u64)> {
    let _entered = device.enter()?;
    let (mut base, mut size) = (0, 0);
    let call = Driver::get()?.cuMemGetAddressRange_v2()?;
    // SAFETY: the call writes both results to local variables.
    check("cuMemGetAddressRange_v2", unsafe { call(&raw mut base, &raw mut size, address) })?;
    Ok((base, size as u64))
}
