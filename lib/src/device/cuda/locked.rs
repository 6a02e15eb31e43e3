//! Page-locked pools in host memory, which a GPU accesses directly.

#![allow(unsafe_code, reason = "calls of a C library")]

use std::ffi::c_void;
use std::io;
use std::sync::Arc;

use super::device::CudaDevice;
use super::driver::{Driver, check};
use crate::config::PoolId;
use crate::error::{Error, ErrorKind, Result};
use crate::link::Link;
use crate::segment::Memory;

/// `CU_MEMHOSTREGISTER_PORTABLE`: valid for all contexts of the process.
pub(super) const FOR_ALL: u32 = 1;

/// A pool of a link, in shared memory, that the driver has page-locked: copies between it and a GPU use DMA, without
/// the CPU, and `cuMemcpyAsync` is really asynchronous. It is unlocked when this is dropped, which must not happen
/// before the copies are complete.
///
/// Each process locks its own mapping. The other side's messages in the pool are locked with it.
///
/// ```
/// use shmesh::Link;
/// use shmesh::config::PoolId;
/// use shmesh::device::{CudaDevice, PageLocked};
/// # fn copies(link: &Link) -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = CudaDevice::all()?.remove(0);
/// let locked = PageLocked::of(&gpu, link, PoolId::CpuData)?;
/// if let Some(message) = link.receive()? {
///     let from = message.data().as_ptr();
///     // ... give copies from there to a stream, and drop the message when they are done.
/// }
/// drop(locked);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PageLocked {
    device: CudaDevice,
    start: *mut c_void,
    bytes: usize,
    /// Keeps the locked memory mapped.
    _memory: Arc<Memory>,
}

// SAFETY: the address is given to the driver alone, which any thread may call.
unsafe impl Send for PageLocked {}
// SAFETY: as above; nothing is done by reference.
unsafe impl Sync for PageLocked {}

impl PageLocked {
    /// Locks all buffers of a pool.
    ///
    /// # Errors
    /// [`NoPool`](ErrorKind::NoPool); [`OnDevice`](ErrorKind::OnDevice) if the pool is in device memory;
    /// [`System`](ErrorKind::System) if the driver refuses, as for a pool that this process has locked already.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::config::PoolId;
    /// use shmesh::device::{CudaDevice, PageLocked};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     let locked = PageLocked::of(&device, &link, PoolId::CpuData)?;
    ///     assert!(locked.bytes() >= 256 * 65_536, "and what lies between the buffers");
    ///     assert!(PageLocked::of(&device, &link, PoolId::CpuLarge).is_err(), "it is not configured");
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of(device: &CudaDevice, link: &Link, pool: PoolId) -> Result<Self> {
        let name: Arc<str> = link.name().into();
        let Some((start, bytes, memory)) = link.host_buffers(pool) else {
            let is_there = link.pool(pool).is_some();
            let kind = if is_there {
                ErrorKind::OnDevice { link: name, pool }
            } else {
                ErrorKind::NoPool { link: name, pool }
            };
            return Err(kind.into());
        };
        let start = start.as_ptr().cast();
        let lock = || -> io::Result<()> {
            let _entered = device.enter()?;
            let register = Driver::get()?.cuMemHostRegister_v2()?;
            // SAFETY: this many bytes are mapped there, and stay mapped, because `memory` is kept.
            check("cuMemHostRegister_v2", unsafe { register(start, bytes, FOR_ALL) })
        };
        lock().map_err(|error| Error::system(&name, format!("lock pool {pool} for a GPU"), error))?;
        Ok(Self { device: device.clone(), start, bytes, _memory: memory })
    }

    /// Number of locked bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PageLocked {
    fn drop(&mut self) {
        if let (Ok(_entered), Ok(unregister)) =
            (self.device.enter(), Driver::get().and_then(Driver::cuMemHostUnregister))
        {
            // SAFETY: it was locked here, and is unlocked once, before the mapping can go.
            unsafe { unregister(self.start) };
        }
    }
}
