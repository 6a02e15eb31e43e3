//! Memory of an NPU, shared by a vendor's key with the processes on its list.

#![allow(unsafe_code, reason = "calls of a C library")]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use shmesh_proto::broker::Mechanism;

use super::device::AscendDevice;
use super::driver::Driver;
use super::explain::check;
use crate::device::{BareTgid, DeviceMemory, ExportFlags};

/// Bytes of a vendor's key. It is opaque: text on some products, binary with zeros in it on others.
const KEY_BYTES: usize = 65;
/// `ACL_MEM_MALLOC_HUGE_FIRST`.
const HUGE_FIRST: c_int = 0;
/// Size of its pages in bytes.
const PAGE: u64 = 2 << 20;
/// `ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS`: the exporter may be on another device.
const PEER_ACCESS: u64 = 1;
/// `ACL_MEMCPY_HOST_TO_DEVICE`, `_DEVICE_TO_HOST`.
const TO_DEVICE: c_int = 1;
const TO_HOST: c_int = 2;

/// Memory of an NPU that processes share by a vendor's key and the driver's list of processes.
///
/// The driver enforces the list, and closing the key unmaps the memory of importers: their next access is a fault of
/// the device. So it is especially important here that importers close first, as the session requires.
///
/// If importer and exporter are on different devices, the runtime copies only asynchronously between addresses of one
/// device, and never to or from the host: copy on the exporter's side. An import is on the device that is current in
/// its thread, or on the first: make the exporter's device current before. Its size is the size that the exporter
/// states, because the runtime has no call to query it: compare it with the expected size.
///
/// ```
/// use shmesh::device::{AscendDevice, AscendMemory, DeviceMemory};
/// for device in AscendDevice::all().unwrap_or_default() {
///     assert_eq!(AscendMemory::new(&device, 1)?.size(), 2 << 20, "whole pages");
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct AscendMemory {
    device: AscendDevice,
    address: *mut c_void,
    size: u64,
    /// The vendor's key after the export. It is sent only to the broker.
    key: Option<Vec<u8>>,
    whose: AllocatedBy,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum AllocatedBy {
    Ours,
    Callers,
    Imported,
}

// SAFETY: the address is the device's, and never read here; each call gives its thread the device first.
unsafe impl Send for AscendMemory {}
// SAFETY: as above; the runtime is for threads.
unsafe impl Sync for AscendMemory {}

impl fmt::Debug for AscendMemory {
    /// Without the key, because keys of some products contain addresses and none should be logged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AscendMemory")
            .field("device", &self.device)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text.into())
}

fn len_of(size: u64) -> io::Result<usize> {
    usize::try_from(size).map_err(|_| invalid(format!("{size} bytes exceed the address space")))
}

impl AscendMemory {
    /// Allocates `size` bytes on `device`, rounded up to 2 MiB; [`size`](DeviceMemory::size) returns the rounded size.
    ///
    /// # Errors
    /// The size is 0, or more than is free.
    ///
    /// ```
    /// use shmesh::device::{AscendDevice, AscendMemory};
    /// for device in AscendDevice::all().unwrap_or_default() {
    ///     assert!(AscendMemory::new(&device, 0).is_err());
    /// }
    /// ```
    pub fn new(device: &AscendDevice, size: u64) -> io::Result<Self> {
        let whole = size.checked_next_multiple_of(PAGE).filter(|_| size > 0);
        let whole = whole.ok_or_else(|| invalid(format!("device memory of {size} bytes")))?;
        let _entered = device.enter()?;
        let mut address = std::ptr::null_mut();
        let allocate = Driver::get()?.aclrtMalloc()?;
        // SAFETY: the call writes the address to a local variable.
        check("aclrtMalloc", unsafe { allocate(&raw mut address, len_of(whole)?, HUGE_FIRST) })?;
        Ok(Self { device: device.clone(), address, size: whole, key: None, whose: AllocatedBy::Ours })
    }

    /// Wraps memory that other code has allocated with the runtime on `device`, from the beginning of one of its pages.
    /// That code frees it, after importers have closed it. The driver checks the address at export.
    ///
    /// # Errors
    /// The size or the address is 0.
    ///
    /// ```
    /// use shmesh::device::{AscendDevice, AscendMemory};
    /// for device in AscendDevice::all().unwrap_or_default() {
    ///     assert!(AscendMemory::of(&device, 0, 4096).is_err());
    /// }
    /// ```
    pub fn of(device: &AscendDevice, address: u64, size: u64) -> io::Result<Self> {
        if address == 0 || size == 0 {
            return Err(invalid(format!("device memory of {size} bytes at {address:#x}")));
        }
        let address = std::ptr::without_provenance_mut(len_of(address)?);
        Ok(Self { device: device.clone(), address, size, key: None, whose: AllocatedBy::Callers })
    }

    /// The device whose addresses it has.
    ///
    /// ```
    /// use shmesh::device::{AscendDevice, AscendMemory};
    /// for device in AscendDevice::all().unwrap_or_default() {
    ///     assert_eq!(*AscendMemory::new(&device, 1)?.device(), device);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[must_use]
    pub fn device(&self) -> &AscendDevice {
        &self.device
    }

    /// Its device address, for operators and libraries of this process. The CPU cannot read there.
    ///
    /// ```
    /// use shmesh::device::{AscendDevice, AscendMemory};
    /// for device in AscendDevice::all().unwrap_or_default() {
    ///     assert_ne!(AscendMemory::new(&device, 1)?.address(), 0);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address.addr() as u64
    }

    fn at(&self, offset: u64, len: usize) -> io::Result<*mut c_void> {
        if offset.checked_add(len as u64).is_none_or(|end| end > self.size) {
            return Err(invalid(format!(
                "{len} bytes at offset {offset} are past the end of {} bytes",
                self.size
            )));
        }
        Ok(self.address.wrapping_byte_add(len_of(offset)?))
    }

    /// Copies bytes to the host, and waits for the copy.
    ///
    /// # Errors
    /// They are past the end, or the driver refuses.
    ///
    /// ```
    /// use shmesh::device::{AscendDevice, AscendMemory};
    /// for device in AscendDevice::all().unwrap_or_default() {
    ///     let memory = AscendMemory::new(&device, 4096)?;
    ///     memory.write_at(100, b"hello")?;
    ///     let mut bytes = [0; 5];
    ///     memory.read_at(100, &mut bytes)?;
    ///     assert_eq!(&bytes, b"hello");
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let from = self.at(offset, bytes.len())?;
        let _entered = self.device.enter()?;
        let copy = Driver::get()?.aclrtMemcpy()?;
        // SAFETY: the bytes are ours alone, and as many as are copied; the driver checks the other side.
        check("aclrtMemcpy", unsafe {
            copy(bytes.as_mut_ptr().cast(), bytes.len(), from, bytes.len(), TO_HOST)
        })
    }

    /// Copies bytes from the host, and waits for the copy.
    ///
    /// # Errors
    /// They are past the end, or the driver refuses.
    ///
    /// ```
    /// use shmesh::device::{AscendDevice, AscendMemory};
    /// for device in AscendDevice::all().unwrap_or_default() {
    ///     assert!(AscendMemory::new(&device, 4096)?.write_at(u64::MAX, b"x").is_err());
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let to = self.at(offset, bytes.len())?;
        let _entered = self.device.enter()?;
        let copy = Driver::get()?.aclrtMemcpy()?;
        // SAFETY: the bytes are as many as are copied; the driver checks the other side.
        check("aclrtMemcpy", unsafe { copy(to, bytes.len(), bytes.as_ptr().cast(), bytes.len(), TO_DEVICE) })
    }
}

impl DeviceMemory for AscendMemory {
    const MECHANISM: Mechanism = Mechanism::Ascend;

    fn size(&self) -> u64 {
        self.size
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn handle(&self) -> Vec<u8> {
        self.key.clone().unwrap_or_default()
    }

    fn prepare(&mut self, flags: ExportFlags) -> io::Result<()> {
        if self.key.is_some() {
            return Err(invalid("the memory is exported or imported already, and has only one key"));
        }
        let _entered = self.device.enter()?;
        let mut key = vec![0; KEY_BYTES];
        let export = Driver::get()?.aclrtIpcMemGetExportKey()?;
        // SAFETY: there is room for as many bytes as the call says; the driver checks the address.
        check("aclrtIpcMemGetExportKey", unsafe {
            export(self.address, len_of(self.size)?, key.as_mut_ptr().cast(), KEY_BYTES, flags.0)
        })?;
        self.key = Some(key);
        Ok(())
    }

    fn driver_tgid() -> io::Result<Option<BareTgid>> {
        let device = AscendDevice::current()?;
        let _entered = device.enter()?;
        let mut tgid = 0;
        let ask = Driver::get()?.aclrtDeviceGetBareTgid()?;
        // SAFETY: there is room for the answer.
        check("aclrtDeviceGetBareTgid", unsafe { ask(&raw mut tgid) })?;
        // The call returns success even if it could not ask the device.
        if tgid <= 0 {
            let text = format!(
                "aclrtDeviceGetBareTgid: {tgid}, so the device manager did not answer: give the container \
                                /dev/davinci_manager"
            );
            return Err(io::Error::other(text));
        }
        Ok(Some(BareTgid(tgid)))
    }

    fn import(size: u64, _fd: Option<OwnedFd>, handle: &[u8]) -> io::Result<Self> {
        if handle.len() != KEY_BYTES {
            return Err(invalid(format!("a vendor's key of {} bytes, not {KEY_BYTES}", handle.len())));
        }
        // The driver may read one byte beyond the key, which is a zero here.
        let mut key = handle.to_vec();
        key.push(0);
        let device = AscendDevice::current()?;
        let _entered = device.enter()?;
        let mut address = std::ptr::null_mut();
        let import = Driver::get()?.aclrtIpcMemImportByKey()?;
        // SAFETY: the call writes the address to a local variable; the key has all its bytes and a zero after them.
        check("aclrtIpcMemImportByKey", unsafe {
            import(&raw mut address, key.as_ptr().cast(), PEER_ACCESS)
        })?;
        Ok(Self { device, address, size, key: Some(handle.to_vec()), whose: AllocatedBy::Imported })
    }

    fn admit(&self, importer: BareTgid) -> io::Result<()> {
        let mut key =
            self.key.clone().ok_or_else(|| invalid("the memory is not exported; call `export_key` first"))?;
        key.push(0);
        let _entered = self.device.enter()?;
        let mut tgid = importer.0;
        let set = Driver::get()?.aclrtIpcMemSetImportPid()?;
        // SAFETY: the key has all its bytes and a zero after them; there is one number.
        check("aclrtIpcMemSetImportPid", unsafe { set(key.as_ptr().cast(), &raw mut tgid, 1) })
    }
}

impl Drop for AscendMemory {
    fn drop(&mut self) {
        let (Ok(_entered), Ok(driver)) = (self.device.enter(), Driver::get()) else { return };
        if let (Some(mut key), Ok(close)) = (self.key.take(), driver.aclrtIpcMemClose()) {
            key.push(0);
            // SAFETY: the key has all its bytes and a zero after them. For an importer the call unmaps; for the
            // exporter it ends the key, before the memory is freed.
            unsafe { close(key.as_ptr().cast()) };
        }
        if self.whose == AllocatedBy::Ours
            && let Ok(free) = driver.aclrtFree()
        {
            // SAFETY: it was allocated here, and it is freed once.
            unsafe { free(self.address) };
        }
    }
}
