//! Memory shared by CUDA's legacy handles of 64 bytes. Opt-in, because every process that has seen a handle can use it.

#![allow(unsafe_code, reason = "calls of a C library")]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use shmesh_proto::broker::Mechanism;

use super::device::{CudaDevice, DeviceUuid};
use super::driver::{Driver, IpcHandle, check};
use super::view::{CudaMapping, LEGACY_CAPABLE, attribute, invalid, len_of, range_of};
use crate::device::DeviceMemory;

/// Size of the blocks from which the driver serves small allocations; a handle opens a whole block.
const BLOCK: u64 = 2 << 20;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag, and mandatory.
pub(super) const LAZY: u32 = 1;
/// Bytes of a handle: the vendor's handle, the device's UUID, and the exporter's process id in its own namespace.
const HANDLE_BYTES: usize = 64 + 16 + 4;

/// Memory of `cuMemAlloc` that processes share by a handle.
///
/// For programs that cannot allocate with [`CudaMemory`](super::CudaMemory). The operator has to permit it
/// (`--allow-cuda-legacy`), because a handle cannot be revoked once it was disclosed. Refused are pointers inside an
/// allocation; allocations that are not a multiple of 2 MiB, because their neighbours would be shared with them; and
/// importers with the same process id as the exporter, each in its own pid namespace, because the driver takes them for
/// one process.
///
/// ```
/// use shmesh::device::{CudaDevice, CudaLegacyMemory, DeviceMemory};
/// for device in CudaDevice::all().unwrap_or_default() {
///     assert_eq!(CudaLegacyMemory::new(&device, 1)?.size(), 2 << 20);
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct CudaLegacyMemory {
    view: CudaMapping,
    handle: Vec<u8>,
    whose: AllocatedBy,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum AllocatedBy {
    Ours,
    Callers,
    Imported,
}

impl CudaLegacyMemory {
    /// Allocates `size` bytes on `device`, rounded up to 2 MiB.
    ///
    /// # Errors
    /// The size is 0, or more than is free.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaLegacyMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert!(CudaLegacyMemory::new(&device, 0).is_err());
    /// }
    /// ```
    pub fn new(device: &CudaDevice, size: u64) -> io::Result<Self> {
        let whole = size.checked_next_multiple_of(BLOCK).filter(|_| size > 0);
        let whole = whole.ok_or_else(|| invalid(format!("device memory of {size} bytes")))?;
        let entered = device.enter()?;
        let mut address = 0;
        let allocate = Driver::get()?.cuMemAlloc_v2()?;
        // SAFETY: the call writes the address to a local variable.
        check("cuMemAlloc_v2", unsafe { allocate(&raw mut address, len_of(whole)?) })?;
        drop(entered);
        let view = CudaMapping { device: device.clone(), address, size: whole };
        // If the rest fails, dropping this frees the memory.
        let mut memory = Self { view, handle: Vec::new(), whose: AllocatedBy::Ours };
        memory.handle = handle_of(&memory.view)?;
        Ok(memory)
    }

    /// Wraps a whole allocation of other code. That code frees it, after importers have closed it: the driver does not
    /// document what happens otherwise.
    ///
    /// # Errors
    /// The address is not device memory or is inside an allocation, the size is not the allocation's, its neighbours
    /// would be shared with it, or it was not allocated by `cuMemAlloc`.
    pub fn of(address: u64, size: u64) -> io::Result<Self> {
        let view = CudaMapping::of(address, size)?;
        if size != view.size || !size.is_multiple_of(BLOCK) || !address.is_multiple_of(BLOCK) {
            let text = format!(
                "{size} bytes of an allocation of {} at {address:#x}: a handle opens whole blocks of 2 MiB, so its \
                 neighbours would be shared with it; allocate a multiple of {BLOCK} bytes and share all of it",
                view.size
            );
            return Err(invalid(text));
        }
        if attribute(address, LEGACY_CAPABLE)? == 0 {
            let text = format!("{address:#x} was not allocated by cuMemAlloc: use cuda-vmm for it");
            return Err(invalid(text));
        }
        let handle = handle_of(&view)?;
        Ok(Self { view, handle, whose: AllocatedBy::Callers })
    }

    /// The device of the memory.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaLegacyMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert_eq!(*CudaLegacyMemory::new(&device, 1)?.device(), device);
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
    /// use shmesh::device::{CudaDevice, CudaLegacyMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert_ne!(CudaLegacyMemory::new(&device, 1)?.address(), 0);
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
    /// use shmesh::device::{CudaDevice, CudaLegacyMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     assert!(CudaLegacyMemory::new(&device, 1)?.read_at(2 << 20, &mut [0]).is_err());
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
    /// use shmesh::device::{CudaDevice, CudaLegacyMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     CudaLegacyMemory::new(&device, 1)?.write_at(0, b"weights")?;
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.view.write_at(offset, bytes)
    }
}

fn handle_of(view: &CudaMapping) -> io::Result<Vec<u8>> {
    let _entered = view.device.enter()?;
    let mut vendor = [0; 64];
    let get = Driver::get()?.cuIpcGetMemHandle()?;
    // SAFETY: the call writes the 64 bytes to a local variable.
    check("cuIpcGetMemHandle", unsafe { get(&raw mut vendor, view.address) })?;
    let mut handle = vendor.to_vec();
    handle.extend(view.device.uuid().0);
    handle.extend(std::process::id().to_le_bytes());
    Ok(handle)
}

impl DeviceMemory for CudaLegacyMemory {
    const MECHANISM: Mechanism = Mechanism::CudaLegacy;

    fn size(&self) -> u64 {
        self.view.size
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn handle(&self) -> Vec<u8> {
        self.handle.clone()
    }

    fn import(size: u64, _fd: Option<OwnedFd>, handle: &[u8]) -> io::Result<Self> {
        let whole: &[u8; HANDLE_BYTES] =
            handle.try_into().map_err(|_| invalid("the handle was not made by this library"))?;
        let (vendor, rest) = whole.split_first_chunk::<64>().ok_or_else(|| invalid("no handle"))?;
        let (uuid, number) = rest.split_first_chunk::<16>().ok_or_else(|| invalid("no UUID"))?;
        let me = std::process::id();
        if number == me.to_le_bytes() {
            let text = format!(
                "exporter and importer are both process {me}, each in its own pid namespace, and the driver would take \
                 them for one (error 201): start one of them with another number, or use cuda-vmm"
            );
            return Err(invalid(text));
        }
        let device = CudaDevice::by_uuid(&DeviceUuid(*uuid))?;
        let entered = device.enter()?;
        let mut address = 0;
        let open = Driver::get()?.cuIpcOpenMemHandle_v2()?;
        // SAFETY: the call writes the address to a local variable; the handle goes by value, and the driver checks it.
        check("cuIpcOpenMemHandle_v2", unsafe { open(&raw mut address, IpcHandle(*vendor), LAZY) })?;
        drop(entered);
        let memory = Self {
            view: CudaMapping { device, address, size },
            handle: Vec::new(),
            whose: AllocatedBy::Imported,
        };
        // The size that the exporter states may differ from the size that the driver has opened.
        let (base, whole) = range_of(&memory.view.device, address)?;
        if base != address || whole < size {
            return Err(invalid(format!("the exporter states {size} bytes, but the handle opens {whole}")));
        }
        Ok(memory)
    }
}

impl Drop for CudaLegacyMemory {
    fn drop(&mut self) {
        let (Ok(_entered), Ok(driver)) = (self.view.device.enter(), Driver::get()) else { return };
        let end = match self.whose {
            AllocatedBy::Ours => driver.cuMemFree_v2(),
            AllocatedBy::Imported => driver.cuIpcCloseMemHandle(),
            AllocatedBy::Callers => return,
        };
        if let Ok(end) = end {
            // SAFETY: it was allocated, or opened, here, and it is ended once.
            unsafe { end(self.view.address) };
        }
    }
}
