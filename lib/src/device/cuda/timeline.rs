//! Ordering GPU work of two processes by a word in shared memory.

#![allow(unsafe_code, reason = "calls of a C library")]

use std::io;

use super::device::CudaDevice;
use super::driver::{Driver, check};
use super::view::{CudaMapping, invalid};

/// `CU_STREAM_WAIT_VALUE_GEQ`, and no flag for writing: earlier work of the stream is visible first.
pub(super) const AT_LEAST: u32 = 0;

/// `CU_STREAM_NON_BLOCKING`.
pub(super) const WAITS_FOR_NONE: u32 = 1;

/// A stream of GPU work: created by this library, or by a framework.
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
    /// Creates a stream that waits for no other stream.
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
        // SAFETY: the call writes the address to a local variable.
        check("cuStreamCreate", unsafe { create(&raw mut stream, WAITS_FOR_NONE) })?;
        Ok(Self { device: device.clone(), stream, is_ours: true })
    }

    /// Uses a stream of a framework, such as `torch.cuda.current_stream().cuda_stream`; 0 is the default stream.
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

    /// Waits until all work of the stream is complete.
    ///
    /// # Errors
    /// Some of the work failed.
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
            // SAFETY: it was created here, and is destroyed once. Its pending work is completed first.
            unsafe { destroy(self.stream) };
        }
    }
}

/// A 64-bit word in shared device memory that only grows: the producer's stream writes it after its work, and the
/// consumer's stream waits for it before its own. It needs no event handle and no shared `/dev/shm`, and no CPU waits.
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
            return Err(invalid(format!("a timeline at offset {offset}, which is not a multiple of 8")));
        }
        view.at(offset, 8)?;
        Ok(Self { view, offset })
    }

    /// Refuses a stream of another device. The memory is mapped only for its own device, and an access of another one
    /// would destroy that device's context.
    fn is_reached_by(&self, stream: &CudaStream) -> io::Result<()> {
        let (here, there) = (self.view.device.uuid(), stream.device.uuid());
        if here == there {
            return Ok(());
        }
        Err(invalid(format!(
            "the stream belongs to {there}, the memory to {here}: create a stream on that device"
        )))
    }

    /// Makes the stream write `value` after all its earlier work.
    ///
    /// # Errors
    /// The stream belongs to another device; the driver is too old, or refuses.
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

    /// Makes later work of the stream wait until the word is at least `value`. Returns immediately. If the value is
    /// never written, the stream waits forever. The death of the producer is reported by
    /// [`RegionLost`](crate::client::SessionEvent::RegionLost); then the consumer can [`write`](Self::write) the word
    /// itself, with a new [`CudaStream`]. Do not copy it: copies use the default stream, which waits for most other
    /// streams.
    ///
    /// # Errors
    /// The stream belongs to another device; the driver is too old, or refuses.
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

    /// The current value of the word, copied to the host after all earlier work of the default stream, and of the
    /// streams that it waits for.
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
