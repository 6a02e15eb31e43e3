//! Order between the GPU work of two processes: a word in the memory that they share.

#![allow(unsafe_code, reason = "calls of a C library")]

use std::io;

use super::device::CudaDevice;
use super::driver::{Driver, check};
use super::view::{CudaMapping, invalid};

/// `CU_STREAM_WAIT_VALUE_GEQ`, and no flag of writing: what was given to the stream before is visible first.
pub(super) const AT_LEAST: u32 = 0;

/// `CU_STREAM_NON_BLOCKING`.
pub(super) const WAITS_FOR_NONE: u32 = 1;

/// A stream of GPU work: one of this library's, or one that a framework has, by its address.
///
/// ```
/// use shmesh::device::{CudaDevice, CudaStream};
/// for device in CudaDevice::all().unwrap_or_default() {
///     let stream = CudaStream::new(&device)?;
///     stream.synchronize()?;
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct CudaStream {
    device: CudaDevice,
    stream: usize,
    is_ours: bool,
}

impl CudaStream {
    /// A new one, that waits for no other.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaStream};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     CudaStream::new(&device)?;
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn new(device: &CudaDevice) -> io::Result<Self> {
        let _entered = device.enter()?;
        let mut stream = 0;
        let create = Driver::get()?.cuStreamCreate()?;
        // SAFETY: there is room for the address.
        check("cuStreamCreate", unsafe { create(&raw mut stream, WAITS_FOR_NONE) })?;
        Ok(Self { device: device.clone(), stream, is_ours: true })
    }

    /// A framework's, such as `torch.cuda.current_stream().cuda_stream`; 0 is the default stream.
    ///
    /// # Safety
    /// It is a stream of this process's primary context of `device`, and is not destroyed while this value lives.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaStream};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     // SAFETY: the default stream is always there.
    ///     let default = unsafe { CudaStream::from_raw(&device, 0) };
    ///     default.synchronize()?;
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[must_use]
    pub unsafe fn from_raw(device: &CudaDevice, stream: usize) -> Self {
        Self { device: device.clone(), stream, is_ours: false }
    }

    /// Waits until everything that was given to it is done.
    ///
    /// # Errors
    /// Some of it has failed.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaStream};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     CudaStream::new(&device)?.synchronize()?;
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn synchronize(&self) -> io::Result<()> {
        let _entered = self.device.enter()?;
        let wait = Driver::get()?.cuStreamSynchronize()?;
        // SAFETY: the stream lives as long as this value does.
        check("cuStreamSynchronize", unsafe { wait(self.stream) })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.is_ours
            && let (Ok(_entered), Ok(destroy)) =
                (self.device.enter(), Driver::get().and_then(Driver::cuStreamDestroy_v2))
        {
            // SAFETY: it was made here, and it is destroyed once. What it still has to do it does first.
            unsafe { destroy(self.stream) };
        }
    }
}

/// A 64-bit word in shared device memory that only grows: the producer's stream writes it behind its work, the consumer's
/// stream waits for it before its own. No event handle, no shared `/dev/shm`, and no CPU waits.
///
/// ```
/// use shmesh::device::{CudaDevice, CudaMemory, CudaStream};
/// # fn both(exported: &CudaMemory, imported: &CudaMemory, n: u64) -> std::io::Result<()> {
/// // The producer, which has exported the memory, with 8 bytes for the word. Before that it has written 0 there:
/// // what is in new memory is not said.
/// let at = 4096 - 8;
/// # exported.write_at(at, &[0; 8])?;
/// let stream = CudaStream::new(exported.device())?;
/// // ... give kernels that fill the buffer to the stream, and then:
/// exported.timeline(at)?.write(&stream, n)?;
///
/// // The consumer, which has imported it, in another process:
/// let stream = CudaStream::new(imported.device())?;
/// imported.timeline(at)?.wait(&stream, n)?;
/// // ... give kernels that read the buffer to the stream.
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CudaTimeline<'a> {
    view: &'a CudaMapping,
    offset: u64,
}

impl<'a> CudaTimeline<'a> {
    pub(super) fn of(view: &'a CudaMapping, offset: u64) -> io::Result<Self> {
        if !offset.is_multiple_of(8) {
            return Err(invalid(format!("a timeline at offset {offset}, which is no multiple of 8")));
        }
        view.at(offset, 8)?;
        Ok(Self { view, offset })
    }

    /// The memory is mapped for its own device. Another one's stream would end that device's context by touching it.
    fn is_reached_by(&self, stream: &CudaStream) -> io::Result<()> {
        let (here, there) = (self.view.device.uuid(), stream.device.uuid());
        if here == there {
            return Ok(());
        }
        Err(invalid(format!(
            "a stream of {there} for a word in memory of {here}: make a stream on that device"
        )))
    }

    /// Has the stream write `value` when it has done all that it was given before.
    ///
    /// # Errors
    /// The stream is one of another device; the driver is too old, or refuses.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory, CudaStream};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     let (memory, stream) = (CudaMemory::new(&device, 8)?, CudaStream::new(&device)?);
    ///     memory.timeline(0)?.write(&stream, 7)?;
    ///     stream.synchronize()?;
    ///     assert_eq!(memory.timeline(0)?.value()?, 7);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn write(&self, stream: &CudaStream, value: u64) -> io::Result<()> {
        self.is_reached_by(stream)?;
        let _entered = stream.device.enter()?;
        let write = Driver::get()?.cuStreamWriteValue64_v2()?;
        // SAFETY: the word lies in mapped memory; the stream lives.
        check("cuStreamWriteValue64_v2", unsafe {
            write(stream.stream, self.view.address + self.offset, value, 0)
        })
    }

    /// Has the stream do nothing of what it is given from here on before the word is at least `value`. Returns at once. If
    /// it is never written, the stream waits forever: a producer that died is known from
    /// [`RegionLost`](crate::client::Happened::RegionLost), and then the consumer can [`write`](Self::write) the word itself,
    /// by a new [`CudaStream`]. Not by a copy: copies go through the default stream, which waits for most others.
    ///
    /// # Errors
    /// The stream is one of another device; the driver is too old, or refuses.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory, CudaStream};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     let (memory, stream) = (CudaMemory::new(&device, 8)?, CudaStream::new(&device)?);
    ///     memory.write_at(0, &7_u64.to_le_bytes())?;
    ///     memory.timeline(0)?.wait(&stream, 7)?;
    ///     stream.synchronize()?;
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn wait(&self, stream: &CudaStream, value: u64) -> io::Result<()> {
        self.is_reached_by(stream)?;
        let _entered = stream.device.enter()?;
        let wait = Driver::get()?.cuStreamWaitValue64_v2()?;
        // SAFETY: the word lies in mapped memory; the stream lives.
        check("cuStreamWaitValue64_v2", unsafe {
            wait(stream.stream, self.view.address + self.offset, value, AT_LEAST)
        })
    }

    /// What the word is now, by a copy to the host: behind all that the default stream has to do, and what that waits for.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// ```
    /// use shmesh::device::{CudaDevice, CudaMemory};
    /// for device in CudaDevice::all().unwrap_or_default() {
    ///     println!("{}", CudaMemory::new(&device, 8)?.timeline(0)?.value()?);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn value(&self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.view.read_at(self.offset, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}
