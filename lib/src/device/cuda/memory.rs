//! Memory shared by descriptors, by the driver's virtual memory management.

#![allow(unsafe_code, reason = "calls of a C library")]

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use shmesh_proto::broker::Mechanism;

use super::device::{CudaDevice, DeviceUuid};
use super::driver::{Driver, check};
use super::sys;
use super::timeline::CudaTimeline;
use super::view::{CudaMapping, invalid, len_of, settle};
use crate::device::DeviceMemory;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const POSIX_FD: u32 = 1;
/// `CUDA_ERROR_UNKNOWN`, which NVIDIA's driver returns when it is to import any other file.
const UNKNOWN: c_int = 999;

/// Memory of a GPU that processes share by a descriptor.
///
/// The descriptor is the permission: a process that has it can map the memory, for reading and writing, and this cannot
/// be revoked. The memory lives until its last mapping and its last descriptor are closed, in any process. Work of the
/// device that uses the memory must have completed when it is dropped; dropping waits for
/// [`copy_from`](Self::copy_from) and [`fill`](Self::fill).
///
/// ```
/// use shmesh::device::{CudaDevice, CudaMemory, DeviceMemory};
/// # fn share(session: &mut shmesh::device::Session<CudaMemory>) -> Result<(), Box<dyn std::error::Error>> {
/// let device = CudaDevice::all()?.remove(0);
/// let memory = CudaMemory::new(&device, 1 << 20)?;
/// assert_eq!(memory.size(), 2 << 20, "rounded up to the granularity");
/// memory.write_at(0, b"weights")?;
/// let key = session.export_key(memory, shmesh::device::ExportFlags::DEFAULT)?;
/// # let _ = key; Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CudaMemory {
    view: CudaMapping,
    /// The exporter's descriptor; an importer closes its own as soon as it has a handle.
    fd: Option<OwnedFd>,
    /// Whether this process has mapped the addresses, and so unmaps them.
    is_mapped_here: bool,
}

/// An allocation handle of the driver, released on drop.
struct AllocationHandle(u64);

impl Drop for AllocationHandle {
    fn drop(&mut self) {
        if let Ok(release) = Driver::get().and_then(Driver::cuMemRelease) {
            // SAFETY: the driver gave it, and it is released once.
            unsafe { release(self.0) };
        }
    }
}

/// Reserved addresses, freed on drop unless they were taken over.
struct Addresses {
    start: u64,
    len: usize,
    is_mapped: bool,
}

impl Drop for Addresses {
    fn drop(&mut self) {
        let Ok(driver) = Driver::get() else { return };
        if self.is_mapped
            && let Ok(unmap) = driver.cuMemUnmap()
        {
            // SAFETY: it is exactly what was mapped here.
            unsafe { unmap(self.start, self.len) };
        }
        if let Ok(free) = driver.cuMemAddressFree() {
            // SAFETY: it is exactly what was reserved here, and nothing is mapped there any more.
            unsafe { free(self.start, self.len) };
        }
    }
}

impl CudaMemory {
    /// Allocates `size` bytes on `device`, rounded up to the device's granularity; [`size`](DeviceMemory::size) returns
    /// the rounded size. The content is undefined.
    ///
    /// # Errors
    /// The size is 0, or more than is free; the device cannot share memory by descriptors, or the driver is too old.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert!(CudaMemory::new(&device, 0).is_err());
    /// }
    /// ```
    pub fn new(device: &CudaDevice, size: u64) -> io::Result<Self> {
        if size == 0 {
            return Err(invalid("device memory of 0 bytes"));
        }
        let driver = Driver::get()?;
        let granularity = device.granularity()?;
        let whole = size.checked_next_multiple_of(granularity);
        let whole = whole.ok_or_else(|| invalid(format!("{size} bytes exceed the memory of any device")))?;
        let _entered = device.enter()?;
        let properties = device.properties();
        let mut handle = 0;
        let create = driver.cuMemCreate()?;
        // SAFETY: the call writes the handle to a local variable, and the properties live until it is there.
        check("cuMemCreate", unsafe { create(&raw mut handle, len_of(whole)?, &raw const properties, 0) })?;
        let handle = AllocationHandle(handle);
        let fd = export(&handle)?;
        // The mapping and the descriptor keep the memory; the handle is no longer needed.
        let view = map(device.clone(), &handle, whole)?;
        Ok(Self { view, fd: Some(fd), is_mapped_here: true })
    }

    /// Wraps memory that other code has allocated, from its beginning: a mapping of the driver's virtual memory
    /// management that was created for descriptors, as frameworks with expandable segments do. `size` must equal the size of
    /// the whole allocation, because all of it is shared. The code that allocated it frees it, after importers have
    /// closed it.
    ///
    /// # Errors
    /// The address is not device memory or is inside an allocation, the size is not the allocation's, or it cannot be
    /// shared.
    pub fn of(address: u64, size: u64) -> io::Result<Self> {
        let view = CudaMapping::of(address, size)?;
        let granularity = view.device.granularity()?;
        if size.checked_next_multiple_of(granularity) != Some(view.size) {
            let text = format!(
                "{size} bytes of an allocation of {}: a descriptor shares all of it; export all, or allocate apart what \
                 is to be shared",
                view.size
            );
            return Err(invalid(text));
        }
        let mut handle = 0;
        let retain = Driver::get()?.cuMemRetainAllocationHandle()?;
        // SAFETY: the call writes the handle to a local variable; the driver checks the address.
        let retained = unsafe { retain(&raw mut handle, address as *mut c_void) };
        check("cuMemRetainAllocationHandle", retained).map_err(|error| {
            invalid(format!(
                "{address:#x} was not allocated for sharing by descriptors ({error}): allocate it with CudaMemory, or use \
                 cuda-legacy where the operator permits it"
            ))
        })?;
        let fd = export(&AllocationHandle(handle))?;
        Ok(Self { view, fd: Some(fd), is_mapped_here: false })
    }

    /// The device of the memory.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert_eq!(*CudaMemory::new(&device, 1)?.device(), device);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[must_use]
    pub fn device(&self) -> &CudaDevice {
        &self.view.device
    }

    /// Its device address, for kernels and libraries of this process. The CPU cannot read there.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert_ne!(CudaMemory::new(&device, 1)?.address(), 0);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[must_use]
    pub fn address(&self) -> u64 {
        self.view.address
    }

    /// Copies bytes to the host, and waits for the copy.
    ///
    /// # Errors
    /// They are past the end, or the driver refuses.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     let memory = CudaMemory::new(&device, 4096)?;
    ///     memory.write_at(100, b"hello")?;
    ///     let mut bytes = [0; 5];
    ///     memory.read_at(100, &mut bytes)?;
    ///     assert_eq!(&bytes, b"hello");
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.view.read_at(offset, bytes)
    }

    /// Copies bytes from the host, and waits for the copy.
    ///
    /// # Errors
    /// They are past the end, or the driver refuses.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert!(CudaMemory::new(&device, 4096)?.write_at(u64::MAX, b"x").is_err());
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.view.write_at(offset, bytes)
    }

    /// Copies `len` bytes from a device address, in the order of the default stream, without waiting: see
    /// [`synchronize`](CudaDevice::synchronize).
    ///
    /// # Errors
    /// They are past the end, or the driver refuses.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     let (from, to) = (CudaMemory::new(&device, 1)?, CudaMemory::new(&device, 1)?);
    ///     to.copy_from(0, from.address(), 4096)?;
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn copy_from(&self, offset: u64, address: u64, len: u64) -> io::Result<()> {
        self.view.copy_from(offset, address, len)
    }

    /// Fills memory with a 32-bit word, without waiting, as [`copy_from`](Self::copy_from).
    ///
    /// # Errors
    /// They are past the end, or the driver refuses.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     CudaMemory::new(&device, 4096)?.fill(0, 0xdead_beef, 1024)?;
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn fill(&self, offset: u64, word: u32, words: u64) -> io::Result<()> {
        self.view.fill(offset, word, words)
    }

    /// A word of the memory by which GPU work of two processes is ordered.
    ///
    /// # Errors
    /// The offset is not a multiple of 8, or past the end.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert!(CudaMemory::new(&device, 4096)?.timeline(4).is_err());
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn timeline(&self, offset: u64) -> io::Result<CudaTimeline<'_>> {
        CudaTimeline::of(&self.view, offset)
    }
}

/// Exports the memory of a handle as a descriptor.
fn export(handle: &AllocationHandle) -> io::Result<OwnedFd> {
    let mut fd: c_int = -1;
    let call = Driver::get()?.cuMemExportToShareableHandle()?;
    // SAFETY: the call writes the descriptor to a local variable.
    let exported = unsafe { call(&raw mut fd, handle.0, POSIX_FD, 0) };
    check("cuMemExportToShareableHandle", exported).map_err(|error| {
        let text = format!("{error}; memory is shared only if it was created for descriptors");
        io::Error::new(error.kind(), text)
    })?;
    // SAFETY: the driver has just created it, and it has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // A child process that inherits it would keep the memory.
    shmesh_sys::file::set_close_on_exec(&fd)?;
    Ok(fd)
}

/// Maps the memory of a handle for reading and writing in this process.
fn map(device: CudaDevice, handle: &AllocationHandle, size: u64) -> io::Result<CudaMapping> {
    let driver = Driver::get()?;
    let (len, alignment) = (len_of(size)?, len_of(device.granularity()?)?);
    let mut start = 0;
    let reserve = driver.cuMemAddressReserve()?;
    // SAFETY: the call writes the address to a local variable.
    check("cuMemAddressReserve", unsafe { reserve(&raw mut start, len, alignment, 0, 0) })?;
    let mut addresses = Addresses { start, len, is_mapped: false };
    let map = driver.cuMemMap()?;
    // SAFETY: the addresses are reserved for it, and nothing is mapped there.
    let mapped = unsafe { map(start, len, 0, handle.0, 0) };
    check("cuMemMap", mapped).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("{error}; or there are fewer than {size} bytes behind the descriptor"),
        )
    })?;
    addresses.is_mapped = true;
    let access = sys::CUmemAccessDesc {
        location: device.location(),
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let set = driver.cuMemSetAccess()?;
    // SAFETY: it is exactly what was mapped, and the description lives until it is read.
    check("cuMemSetAccess", unsafe { set(start, len, &raw const access, 1) })?;
    std::mem::forget(addresses);
    Ok(CudaMapping { device, address: start, size })
}

impl DeviceMemory for CudaMemory {
    const MECHANISM: Mechanism = Mechanism::CudaVmm;

    fn size(&self) -> u64 {
        self.view.size
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// The UUID of its device, so that the importer finds the same one.
    fn handle(&self) -> Vec<u8> {
        self.view.device.uuid().0.to_vec()
    }

    fn import(size: u64, fd: Option<OwnedFd>, handle: &[u8]) -> io::Result<Self> {
        let uuid =
            handle.try_into().map_err(|_| invalid("the exporter did not send the UUID of its device"))?;
        let fd = fd.ok_or_else(|| invalid("the key was delivered without a descriptor"))?;
        let device = CudaDevice::by_uuid(&DeviceUuid(uuid))?;
        let granularity = device.granularity()?;
        if size == 0 || !size.is_multiple_of(granularity) {
            return Err(invalid(format!(
                "{size} bytes are not a multiple of the device's granularity, {granularity}"
            )));
        }
        let _entered = device.enter()?;
        let import = Driver::get()?.cuMemImportFromShareableHandle()?;
        let descriptor =
            std::ptr::without_provenance_mut::<c_void>(len_of(u64::from(fd.as_raw_fd().cast_unsigned()))?);
        let mut imported = 0;
        // SAFETY: the call writes the handle to a local variable; the descriptor goes in the place of a pointer, and is open.
        let result = unsafe { import(&raw mut imported, descriptor, POSIX_FD) };
        if result == UNKNOWN {
            return Err(invalid(
                "cuMemImportFromShareableHandle: CUDA_ERROR_UNKNOWN (999): the descriptor is not device memory",
            ));
        }
        check("cuMemImportFromShareableHandle", result)?;
        let imported = AllocationHandle(imported);
        // The handle keeps the memory; the descriptor would keep it longer than needed.
        drop(fd);
        let view = map(device, &imported, size)?;
        Ok(Self { view, fd: None, is_mapped_here: true })
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if self.is_mapped_here
            && let Ok(len) = usize::try_from(self.view.size)
        {
            let _entered = self.view.device.enter();
            // The driver unmaps immediately, and later accesses of the device would destroy the context. Copies and
            // fills of this library may still be in progress, and others may copy from here.
            let _ = settle();
            drop(Addresses { start: self.view.address, len, is_mapped: true });
        }
    }
}
