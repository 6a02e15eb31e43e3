//! The calls of `libcuda.so`, and the meaning of their results.
//!
//! `cudarc` has the types and constants. Its own table of calls panics if the library or one of its symbols is missing,
//! does not take a path, and represents results as a Rust enumeration, which a newer driver may exceed; so this module
//! has a table of its own.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::io;
use std::sync::OnceLock;

use super::sys;
use crate::device::library::{Library, functions};

/// The variable with the path of a library to use instead of the system's, such as one that is not on the search path.
const VARIABLE: &str = "SHMESH_CUDA_LIBRARY";

functions! {
    /// The calls of the driver API that sharing memory between processes needs.
    pub(super) struct Driver {
        cuInit(c_uint) since "CUDA 2.0";
        cuDriverGetVersion(*mut c_int) since "CUDA 2.2";
        cuDeviceGetCount(*mut c_int) since "CUDA 2.0";
        cuDeviceGetName(*mut c_char, c_int, c_int) since "CUDA 2.0";
        cuDeviceGetUuid_v2(*mut [u8; 16], c_int) since "CUDA 11.4 (driver 470)";
        cuDeviceGetAttribute(*mut c_int, c_int, c_int) since "CUDA 2.0";
        cuDevicePrimaryCtxRetain(*mut usize, c_int) since "CUDA 7.0";
        cuDevicePrimaryCtxRelease_v2(c_int) since "CUDA 11.0 (driver 450)";
        cuCtxGetCurrent(*mut usize) since "CUDA 4.0";
        cuCtxSetCurrent(usize) since "CUDA 4.0";
        cuCtxSynchronize() since "CUDA 2.0";
        cuMemGetInfo_v2(*mut usize, *mut usize) since "CUDA 3.2";
        cuMemGetAllocationGranularity(*mut usize, *const sys::CUmemAllocationProp, c_int) since "CUDA 10.2 (driver 440)";
        cuMemCreate(*mut u64, usize, *const sys::CUmemAllocationProp, c_ulonglong) since "CUDA 10.2 (driver 440)";
        cuMemRelease(u64) since "CUDA 10.2 (driver 440)";
        cuMemExportToShareableHandle(*mut c_int, u64, c_uint, c_ulonglong) since "CUDA 10.2 (driver 440)";
        cuMemImportFromShareableHandle(*mut u64, *mut c_void, c_uint) since "CUDA 10.2 (driver 440)";
        cuMemAddressReserve(*mut u64, usize, usize, u64, c_ulonglong) since "CUDA 10.2 (driver 440)";
        cuMemAddressFree(u64, usize) since "CUDA 10.2 (driver 440)";
        cuMemMap(u64, usize, usize, u64, c_ulonglong) since "CUDA 10.2 (driver 440)";
        cuMemUnmap(u64, usize) since "CUDA 10.2 (driver 440)";
        cuMemSetAccess(u64, usize, *const sys::CUmemAccessDesc, usize) since "CUDA 10.2 (driver 440)";
        cuMemRetainAllocationHandle(*mut u64, *mut c_void) since "CUDA 11.0 (driver 450)";
        cuMemAlloc_v2(*mut u64, usize) since "CUDA 3.2";
        cuMemHostRegister_v2(*mut c_void, usize, c_uint) since "CUDA 6.5";
        cuMemHostUnregister(*mut c_void) since "CUDA 4.0";
        cuMemFree_v2(u64) since "CUDA 3.2";
        cuMemGetAddressRange_v2(*mut u64, *mut usize, u64) since "CUDA 3.2";
        cuPointerGetAttribute(*mut c_void, c_int, u64) since "CUDA 4.0";
        cuMemcpyHtoD_v2(u64, *const c_void, usize) since "CUDA 3.2";
        cuMemcpyDtoH_v2(*mut c_void, u64, usize) since "CUDA 3.2";
        cuMemcpyDtoD_v2(u64, u64, usize) since "CUDA 3.2";
        cuMemsetD32_v2(u64, c_uint, usize) since "CUDA 3.2";
        cuIpcGetMemHandle(*mut [u8; 64], u64) since "CUDA 4.1";
        cuIpcOpenMemHandle_v2(*mut u64, IpcHandle, c_uint) since "CUDA 11.0 (driver 450)";
        cuIpcCloseMemHandle(u64) since "CUDA 4.1";
        cuStreamCreate(*mut usize, c_uint) since "CUDA 2.0";
        cuStreamDestroy_v2(usize) since "CUDA 4.0";
        cuStreamSynchronize(usize) since "CUDA 2.0";
        cuStreamWriteValue64_v2(usize, u64, u64, c_uint) since "CUDA 11.7 (driver 515)";
        cuStreamWaitValue64_v2(usize, u64, u64, c_uint) since "CUDA 11.7 (driver 515)";
    }
}

/// A handle of 64 bytes that is passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct IpcHandle(pub(super) [u8; 64]);

static DRIVER: OnceLock<Driver> = OnceLock::new();

impl Driver {
    /// The started driver. Loaded once; loading is retried if it failed.
    pub(super) fn get() -> io::Result<&'static Self> {
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        // Toolkits contain a stub with the first name that links and then fails, so the driver's own name comes first.
        let candidates = ["libcuda.so.1", "libcuda.so"].map(str::to_owned);
        let driver = Self::of(Library::open("CUDA driver", VARIABLE, &candidates)?);
        let start = driver.cuInit()?;
        #[expect(unsafe_code, reason = "a C call")]
        // SAFETY: the call takes a number, which must be 0.
        check("cuInit", unsafe { start(0) })?;
        Ok(DRIVER.get_or_init(|| driver))
    }
}

/// Converts the result of a call to an error with the name of the call and the probable causes.
pub(super) fn check(call: &str, code: c_int) -> io::Result<()> {
    use io::ErrorKind as Kind;
    let (kind, name, hint) = match code {
        0 => return Ok(()),
        1 => (
            Kind::InvalidInput,
            "CUDA_ERROR_INVALID_VALUE",
            "an address, size or descriptor is not valid for this driver",
        ),
        2 => (
            Kind::OutOfMemory,
            "CUDA_ERROR_OUT_OF_MEMORY",
            "the device has not enough free memory: free some, or allocate less",
        ),
        3 => (
            Kind::Other,
            "CUDA_ERROR_NOT_INITIALIZED",
            "the driver was not initialized in this process; in a forked child it cannot be, so start a new process",
        ),
        4 => (Kind::Other, "CUDA_ERROR_DEINITIALIZED", "the process is exiting"),
        34 => (
            Kind::NotFound,
            "CUDA_ERROR_STUB_LIBRARY",
            "this is a toolkit's stub, not a driver: remove it from the search path",
        ),
        46 => (
            Kind::ResourceBusy,
            "CUDA_ERROR_DEVICE_UNAVAILABLE",
            "another process uses the device exclusively: set its compute mode to Default (`nvidia-smi -c 0`)",
        ),
        100 => (
            Kind::NotFound,
            "CUDA_ERROR_NO_DEVICE",
            "the driver is installed, but it has no device: give the container one",
        ),
        101 => (
            Kind::NotFound,
            "CUDA_ERROR_INVALID_DEVICE",
            "this process does not see that device: give the container the same one, by its UUID",
        ),
        201 => (
            Kind::Other,
            "CUDA_ERROR_INVALID_CONTEXT",
            "this thread has no context, or the handle is from a process with the same process id as this one",
        ),
        205 => (
            Kind::Other,
            "CUDA_ERROR_MAP_FAILED",
            "memory of another process cannot be mapped here: give both containers the same device",
        ),
        304 => (
            Kind::Other,
            "CUDA_ERROR_OPERATING_SYSTEM",
            "the kernel refused: check that this user may open /dev/nvidia*",
        ),
        400 => (
            Kind::InvalidInput,
            "CUDA_ERROR_INVALID_HANDLE",
            "the handle does not belong to this process, or was released",
        ),
        709 => (
            Kind::Other,
            "CUDA_ERROR_CONTEXT_IS_DESTROYED",
            "other code in this process has reset the device, or destroyed the context of this thread",
        ),
        700 => (
            Kind::Other,
            "CUDA_ERROR_ILLEGAL_ADDRESS",
            "the device accessed memory that is not mapped: this context is lost; restart the process",
        ),
        800 => (
            Kind::PermissionDenied,
            "CUDA_ERROR_NOT_PERMITTED",
            "memory cannot be shared between MIG partitions: give both processes the same one",
        ),
        801 => (
            Kind::Unsupported,
            "CUDA_ERROR_NOT_SUPPORTED",
            "this device or driver does not support the operation",
        ),
        802 => (
            Kind::Other,
            "CUDA_ERROR_SYSTEM_NOT_READY",
            "the fabric manager or another part of the driver has not started",
        ),
        803 => (
            Kind::Unsupported,
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            "libcuda and the kernel's driver are of different versions",
        ),
        999 => (
            Kind::Other,
            "CUDA_ERROR_UNKNOWN",
            "at the start usually a missing device file: check that the container has /dev/nvidia-uvm",
        ),
        _ => (Kind::Other, "a CUDA error", "look it up in cuda.h"),
    };
    Err(io::Error::new(kind, format!("{call}: {name} ({code}): {hint}")))
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::*;

    #[test]
    fn error_names_match_the_vendor() {
        // A Rust enumeration may only be created from numbers that it has.
        let known = [
            CUresult::CUDA_ERROR_INVALID_VALUE,
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_NOT_INITIALIZED,
            CUresult::CUDA_ERROR_DEINITIALIZED,
            CUresult::CUDA_ERROR_STUB_LIBRARY,
            CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE,
            CUresult::CUDA_ERROR_NO_DEVICE,
            CUresult::CUDA_ERROR_INVALID_DEVICE,
            CUresult::CUDA_ERROR_INVALID_CONTEXT,
            CUresult::CUDA_ERROR_MAP_FAILED,
            CUresult::CUDA_ERROR_OPERATING_SYSTEM,
            CUresult::CUDA_ERROR_INVALID_HANDLE,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUresult::CUDA_ERROR_NOT_PERMITTED,
            CUresult::CUDA_ERROR_NOT_SUPPORTED,
            CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
            CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
            CUresult::CUDA_ERROR_UNKNOWN,
        ];
        for code in known {
            let text = check("cuCall", code as c_int).unwrap_err().to_string();
            assert!(text.starts_with(&format!("cuCall: {code:?} ({}): ", code as c_int)), "{text}");
        }
        assert!(check("cuCall", 4711).unwrap_err().to_string().contains("a CUDA error (4711)"));
        assert!(check("cuCall", 0).is_ok());
    }
}
