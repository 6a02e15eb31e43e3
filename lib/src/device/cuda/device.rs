//! A GPU, or a MIG partition, identified by its UUID, because ordinals differ from container to container.

#![allow(unsafe_code, reason = "calls of a C library")]

use std::ffi::{CStr, c_int};
use std::fmt;
use std::io;
use std::sync::Arc;

use super::context::{Context, CurrentContext};
use super::driver::{Driver, check};
use super::sys;

/// The UUID of a device, the same in every process. It is displayed as `GPU-...`, like `nvidia-smi -L` does. The UUID of a MIG
/// partition is displayed in the same way, although `nvidia-smi` shows it as `MIG-...`.
///
/// ```
/// use shmesh::device::DeviceUuid;
/// let uuid = DeviceUuid([0xab; 16]);
/// assert_eq!(uuid.to_string(), "GPU-abababab-abab-abab-abab-abababababab");
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct DeviceUuid(pub [u8; 16]);

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        let mut rest = &self.0[..];
        for len in [4, 2, 2, 2, 6] {
            let (part, after) = rest.split_at(len);
            f.write_str("-")?;
            part.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
            rest = after;
        }
        Ok(())
    }
}

impl std::str::FromStr for DeviceUuid {
    type Err = io::Error;

    /// Parses the format of the vendor's tools: `GPU-` or `MIG-` and 32 hexadecimal digits in groups.
    fn from_str(text: &str) -> io::Result<Self> {
        let wrong = || {
            let text = format!("{text:?} is not a UUID of a device: write it as `nvidia-smi -L` does");
            io::Error::new(io::ErrorKind::InvalidInput, text)
        };
        let digits = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-")).ok_or_else(wrong)?;
        let digits: Vec<u8> = digits.bytes().filter(|byte| *byte != b'-').collect();
        let mut uuid = [0; 16];
        if digits.len() != 2 * uuid.len() || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(wrong());
        }
        for (byte, pair) in uuid.iter_mut().zip(digits.chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
        }
        Ok(Self(uuid))
    }
}

/// A GPU, or a MIG partition, that this process sees. Looking it up costs nothing. Its first use, by this value, its
/// clones or objects created with them, creates the device's primary context, which is released with the last of these
/// unless other code in the process uses it.
///
/// ```
/// use shmesh::device::CudaDevice;
/// match CudaDevice::all() {
///     Ok(devices) => devices.iter().for_each(|device| println!("{} {}", device.ordinal(), device.uuid())),
///     Err(error) => println!("nothing here: {error}"), // no driver, or no device
/// }
/// ```
#[derive(Clone, Debug)]
pub struct CudaDevice {
    ordinal: c_int,
    uuid: DeviceUuid,
    context: Arc<Context>,
}

impl Eq for CudaDevice {}

impl PartialEq for CudaDevice {
    fn eq(&self, other: &Self) -> bool {
        (self.ordinal, self.uuid) == (other.ordinal, other.uuid)
    }
}

impl CudaDevice {
    /// All devices that this process sees.
    ///
    /// # Errors
    /// There is no driver, or no device.
    pub fn all() -> io::Result<Vec<Self>> {
        let driver = Driver::get()?;
        let mut count = 0;
        // SAFETY: the pointer is to a local variable of the type that the call writes.
        check("cuDeviceGetCount", unsafe { driver.cuDeviceGetCount()?(&raw mut count) })?;
        (0..count).map(|ordinal| Self::at(driver, ordinal)).collect()
    }

    /// The device with this UUID.
    ///
    /// # Errors
    /// As [`all`](Self::all), or this process does not see the device.
    pub fn by_uuid(uuid: &DeviceUuid) -> io::Result<Self> {
        let all = Self::all()?;
        let seen: Vec<_> = all.iter().map(|device| device.uuid.to_string()).collect();
        all.into_iter().find(|device| device.uuid == *uuid).ok_or_else(|| {
            let text = format!(
                "this process does not see {uuid}, only {}: give its container the same device (not another MIG \
                 partition of it), and check CUDA_VISIBLE_DEVICES",
                seen.join(", ")
            );
            io::Error::new(io::ErrorKind::NotFound, text)
        })
    }

    fn at(driver: &Driver, ordinal: c_int) -> io::Result<Self> {
        let mut uuid = [0; 16];
        // SAFETY: the pointer is to a local array of 16 bytes, which the call writes.
        check("cuDeviceGetUuid_v2", unsafe { driver.cuDeviceGetUuid_v2()?(&raw mut uuid, ordinal) })?;
        Ok(Self { ordinal, uuid: DeviceUuid(uuid), context: Arc::new(Context::of(ordinal)) })
    }

    /// The device of a device pointer.
    pub(super) fn of_ordinal(ordinal: c_int) -> io::Result<Self> {
        Self::at(Driver::get()?, ordinal)
    }

    /// The ordinal of the device, which is valid in this process only.
    ///
    /// ```
    /// use shmesh::device::CudaDevice;
    /// for (number, device) in CudaDevice::all().unwrap_or_default().iter().enumerate() {
    ///     assert_eq!(device.ordinal() as usize, number);
    /// }
    /// ```
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The UUID of the device. A MIG partition has one of its own.
    ///
    /// ```
    /// use shmesh::device::CudaDevice;
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert_eq!(CudaDevice::by_uuid(&device.uuid())?, device);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[must_use]
    pub fn uuid(&self) -> DeviceUuid {
        self.uuid
    }

    /// The name of the product.
    ///
    /// # Errors
    /// The driver refuses the query.
    ///
    /// ```
    /// use shmesh::device::CudaDevice;
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     println!("{}", device.name()?);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn name(&self) -> io::Result<String> {
        let mut name = [0_u8; 256];
        let call = Driver::get()?.cuDeviceGetName()?;
        // SAFETY: there is room for 256 bytes.
        check("cuDeviceGetName", unsafe { call(name.as_mut_ptr().cast(), 256, self.ordinal) })?;
        let name = CStr::from_bytes_until_nul(&name).map_err(io::Error::other)?;
        Ok(name.to_string_lossy().into_owned())
    }

    /// The version of the driver's interface, as in `12080` for 12.8.
    ///
    /// # Errors
    /// There is no driver.
    pub fn driver_version() -> io::Result<i32> {
        let mut version = 0;
        let call = Driver::get()?.cuDriverGetVersion()?;
        // SAFETY: the pointer is to a local variable of the type that the call writes.
        check("cuDriverGetVersion", unsafe { call(&raw mut version) })?;
        Ok(version)
    }

    /// Functions that the driver lacks because it is too old.
    ///
    /// # Errors
    /// There is no driver.
    pub fn missing_functions() -> io::Result<Vec<&'static str>> {
        Ok(Driver::get()?.missing())
    }

    /// The value of a `CUdevice_attribute`, by its number.
    ///
    /// # Errors
    /// The driver does not know the attribute.
    ///
    /// ```
    /// use shmesh::device::CudaDevice;
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     println!("shares memory by descriptors: {}", device.attribute(103)?);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn attribute(&self, number: i32) -> io::Result<i32> {
        let mut value = 0;
        let call = Driver::get()?.cuDeviceGetAttribute()?;
        // SAFETY: there is room for the answer; attributes go as plain numbers.
        check("cuDeviceGetAttribute", unsafe { call(&raw mut value, number, self.ordinal) })?;
        Ok(value)
    }

    /// Granularity of the device's memory: sizes and addresses are multiples of it.
    ///
    /// # Errors
    /// The driver cannot share memory by descriptors.
    ///
    /// ```
    /// use shmesh::device::CudaDevice;
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert!(device.granularity()?.is_power_of_two());
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn granularity(&self) -> io::Result<u64> {
        let mut granularity = 0;
        let properties = self.properties();
        let call = Driver::get()?.cuMemGetAllocationGranularity()?;
        // SAFETY: there is room for the answer, and the properties live until it is there. 0 asks for the smallest.
        check("cuMemGetAllocationGranularity", unsafe {
            call(&raw mut granularity, &raw const properties, 0)
        })?;
        if granularity == 0 {
            return Err(io::Error::other("cuMemGetAllocationGranularity: a granularity of 0 bytes"));
        }
        Ok(granularity as u64)
    }

    /// Free bytes and total bytes.
    ///
    /// # Errors
    /// The driver refuses the query.
    ///
    /// ```
    /// use shmesh::device::CudaDevice;
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     let (free, all) = device.memory_info()?;
    ///     assert!(free <= all);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn memory_info(&self) -> io::Result<(u64, u64)> {
        let (mut free, mut all) = (0, 0);
        let _entered = self.enter()?;
        let call = Driver::get()?.cuMemGetInfo_v2()?;
        // SAFETY: the pointers are to local variables of the type that the call writes.
        check("cuMemGetInfo_v2", unsafe { call(&raw mut free, &raw mut all) })?;
        Ok((free as u64, all as u64))
    }

    /// Waits until the device has completed all work of this process.
    ///
    /// # Errors
    /// Some of that work failed.
    ///
    /// ```
    /// use shmesh::device::CudaDevice;
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     device.synchronize()?;
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn synchronize(&self) -> io::Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the call has no arguments.
        check("cuCtxSynchronize", unsafe { Driver::get()?.cuCtxSynchronize()?() })
    }

    /// Properties of memory of this device, pinned, that can be exported as a descriptor.
    pub(super) fn properties(&self) -> sys::CUmemAllocationProp {
        sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    pub(super) fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.ordinal }
    }

    /// Makes the device's context current in this thread; dropping the returned guard restores the previous one.
    pub(super) fn enter(&self) -> io::Result<CurrentContext> {
        self.context.enter()
    }
}
