//! Pools of a link whose buffers are in device memory: an index crosses the link, and the payload stays on the device.

use std::io;
use std::sync::Arc;

use shmesh_proto::broker::Mechanism;
use shmesh_sys::file;

#[cfg(feature = "cuda")]
use super::{CudaMemory, CudaTimeline};
use super::{DeviceMemory, HostMemory};
use crate::config::PoolId;
use crate::error::{Error, ErrorKind, Result};
use crate::link::device::{DeviceLayout, Lent};
use crate::link::{Link, Loan, Message, OwnedMessage};
use crate::participant::Side;

/// Device memory that the buffers of a pool can be in.
///
/// ```
/// use shmesh::device::{HostMemory, PoolMemory};
/// let memory = HostMemory::new(4096)?;
/// memory.copy_to_device(100, b"hello")?;
/// let mut bytes = [0; 5];
/// memory.copy_to_host(100, &mut bytes)?;
/// assert_eq!(&bytes, b"hello");
/// # Ok::<(), std::io::Error>(())
/// ```
pub trait PoolMemory: DeviceMemory {
    /// Its address, for work of the device in this process.
    fn address(&self) -> u64;

    /// Copies bytes to the host, and waits for the copy.
    ///
    /// # Errors
    /// They are past the end, or the driver refuses.
    fn copy_to_host(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Copies bytes from the host, and waits for the copy.
    ///
    /// # Errors
    /// They are past the end, or the driver refuses.
    fn copy_to_device(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

impl PoolMemory for HostMemory {
    fn address(&self) -> u64 {
        self.as_ptr().expose_provenance() as u64
    }

    fn copy_to_host(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, bytes)
    }

    fn copy_to_device(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_at(offset, bytes)
    }
}

#[cfg(feature = "cuda")]
impl PoolMemory for CudaMemory {
    fn address(&self) -> u64 {
        self.address()
    }

    fn copy_to_host(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, bytes)
    }

    fn copy_to_device(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_at(offset, bytes)
    }
}

/// A pool of a link, `cuda_data` or `gpu_data`, whose buffers are in device memory.
///
/// Loans and messages belong to the link, and end as any others; this type gives access to their DATA part. It can
/// be shared between threads, and used with all handles of this process on the link.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::Side;
/// use shmesh::config::{PoolConfig, PoolId};
/// use shmesh::device::HostMemory;
/// config.pools[PoolId::CudaData.index()] = PoolConfig { buf_size_bytes: 4096, pool_len: 16 };
/// let phy = options.create(&config)?;
/// let pool = phy.device_pool(PoolId::CudaData, HostMemory::new)?; // or on a GPU: |size| CudaMemory::new(&gpu, size)
/// let mut loan = phy.loan_with(PoolId::CudaData)?;
/// let mut data = pool.resize_data(&mut loan, 5)?;
/// data.copy_to_device(0, b"hello")?; // or have a kernel write at `data.address()`
/// loan.send()?;
///
/// // In another process, in whatever container:
/// let mac = options.attach("fronthaul", Side::Secondary)?;
/// let pool = mac.device_pool(PoolId::CudaData, HostMemory::new)?; // the same memory
/// let message = mac.receive()?.expect("it was just sent");
/// let mut bytes = [0; 5];
/// pool.data(&message)?.copy_to_host(0, &mut bytes)?;
/// assert_eq!(&bytes, b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DevicePool<M: PoolMemory> {
    link: Arc<str>,
    /// The epoch of the link: a loan or message of another link may have the same numbers.
    epoch: u64,
    pool: PoolId,
    layout: DeviceLayout,
    /// The id of the memory in messages.
    id: u64,
    memory: M,
}

impl Link {
    /// Opens the device memory of a pool. If the link has none yet, calls `make` with its size in bytes, and the link
    /// keeps it from then on: other and restarted processes get it, and queued messages keep their payload. If two
    /// processes allocate it at the same time, one allocation is used and the other is dropped.
    ///
    /// Call it once per link: it asks the host of the link, and maps the memory.
    ///
    /// # Errors
    /// [`NoPool`](crate::ErrorKind::NoPool); [`NotOnDevice`](crate::ErrorKind::NotOnDevice) for a pool in shared
    /// memory; [`Refused`](crate::ErrorKind::Refused) if the new memory breaks a rule, such as its size;
    /// [`System`](crate::ErrorKind::System) if it cannot be allocated or mapped, or has another mechanism than the
    /// link's; [`Evicted`](crate::ErrorKind::Evicted); [`Host`](crate::ErrorKind::Host).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// use shmesh::ErrorKind;
    /// use shmesh::config::{PoolConfig, PoolId};
    /// use shmesh::device::HostMemory;
    /// config.pools[PoolId::GpuData.index()] = PoolConfig { buf_size_bytes: 4096, pool_len: 16 };
    /// let link = options.create(&config)?;
    /// let pool = link.device_pool(PoolId::GpuData, HostMemory::new)?;
    /// let again = link.device_pool(PoolId::GpuData, |_| -> std::io::Result<HostMemory> { unreachable!("there is one") })?;
    /// let refused = link.device_pool(PoolId::CpuData, HostMemory::new).unwrap_err();
    /// assert!(matches!(refused.kind(), ErrorKind::NotOnDevice { .. }));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn device_pool<M: PoolMemory>(
        &self,
        pool: PoolId,
        make: impl FnOnce(u64) -> io::Result<M>,
    ) -> Result<DevicePool<M>> {
        let shape = self.on_device(pool)?;
        let link: Arc<str> = self.name().into();
        let failed =
            |doing, error| Error::system(&link, format!("{doing} the device memory of pool {pool}"), error);
        let layout = DeviceLayout::of(shape);
        let known = |id, memory| DevicePool {
            link: Arc::clone(&link),
            epoch: self.epoch(),
            pool,
            layout,
            id,
            memory,
        };
        let lent = match self.ask_for_memory(pool, None)? {
            Some(lent) => lent,
            None => {
                let memory = make(layout.bytes()).map_err(|error| failed("make", error))?;
                let offer = offer(&memory, layout).map_err(|error| failed("share", error))?;
                let lent = self.ask_for_memory(pool, Some(&offer))?;
                let unavailable = || {
                    failed("share", io::Error::other("the host of the link did not keep the offered memory"))
                };
                let lent = lent.ok_or_else(unavailable)?;
                if lent.id == offer.id {
                    return Ok(known(offer.id, memory));
                }
                // Another process was faster.
                drop(memory);
                lent
            }
        };
        if lent.mechanism != M::MECHANISM {
            let text = format!("its mechanism is {:?}, but {:?} was requested", lent.mechanism, M::MECHANISM);
            return Err(failed("map", io::Error::other(text)));
        }
        let memory = lent
            .fd
            .try_clone()
            .and_then(|fd| M::import(lent.size, Some(fd), &lent.handle))
            .map_err(|error| failed("map", error))?;
        Ok(known(lent.id, memory))
    }
}

impl Link {
    /// The mechanism and size of a pool's device memory; `None` if no process has allocated it yet.
    ///
    /// # Errors
    /// As [`device_pool`](Self::device_pool).
    pub fn device_mechanism(&self, pool: PoolId) -> Result<Option<Mechanism>> {
        self.on_device(pool)?;
        Ok(self.ask_for_memory(pool, None)?.map(|lent| lent.mechanism))
    }

    /// The size in bytes and the number of buffers of a pool in device memory.
    fn on_device(&self, pool: PoolId) -> Result<(u32, u32)> {
        let link: Arc<str> = self.name().into();
        let Some(shape) = self.pool(pool) else { return Err(ErrorKind::NoPool { link, pool }.into()) };
        if pool.is_device() { Ok(shape) } else { Err(ErrorKind::NotOnDevice { link, pool }.into()) }
    }
}

/// The offer of newly allocated memory, with its words set to 0.
fn offer<M: PoolMemory>(memory: &M, layout: DeviceLayout) -> io::Result<Lent> {
    for side in [Side::Primary, Side::Secondary] {
        memory.copy_to_device(layout.timeline(side), &[0; 8])?;
    }
    let fd = memory.fd().ok_or_else(|| io::Error::other("memory of this mechanism has no descriptor"))?;
    Ok(Lent {
        id: u64::from_ne_bytes(file::random()?).max(1),
        size: memory.size(),
        mechanism: M::MECHANISM,
        handle: memory.handle(),
        fd: Arc::new(fd.try_clone_to_owned()?),
    })
}

impl<M: PoolMemory> DevicePool<M> {
    /// The first `len` bytes of the DATA part of a loan, and sets its length. The last successful call counts.
    ///
    /// A message has a DATA part of 0 bytes if this was never called for its loan.
    ///
    /// # Errors
    /// [`TooLong`](crate::ErrorKind::TooLong) if the buffer is smaller; [`NoDataPart`](crate::ErrorKind::NoDataPart);
    /// [`NotOnDevice`](crate::ErrorKind::NotOnDevice) if it belongs to another pool or link;
    /// [`Evicted`](crate::ErrorKind::Evicted).
    pub fn resize_data<'b>(&'b self, loan: &'b mut Loan<'_>, len: usize) -> Result<DeviceBuffer<'b, M>> {
        if loan.data_pool().is_some_and(|pool| pool != self.pool) || loan.link().epoch() != self.epoch {
            return Err(self.not_here());
        }
        let (_, index) = loan.set_device_data(len, self.id)?;
        self.buffer(index, len)
    }

    /// The DATA part of a message.
    ///
    /// # Errors
    /// [`NoDataPart`](crate::ErrorKind::NoDataPart); [`NotOnDevice`](crate::ErrorKind::NotOnDevice) if it belongs to
    /// another pool or link; [`OtherMemory`](crate::ErrorKind::OtherMemory) if the payload is in device memory that the
    /// pool had before.
    pub fn data<'b>(&'b self, message: &'b Message<'_>) -> Result<DeviceBuffer<'b, M>> {
        self.data_of(message.device_data(), message.link().epoch(), message.data_len())
    }

    /// The DATA part of an owned message. In ring mode `broadcast` an owned message has none in device memory.
    ///
    /// # Errors
    /// As [`data`](Self::data).
    pub fn owned_data<'b>(&'b self, message: &'b OwnedMessage) -> Result<DeviceBuffer<'b, M>> {
        self.data_of(message.device_data(), message.epoch(), message.data_len())
    }

    fn data_of(
        &self,
        device_data: Option<(PoolId, u32, u64)>,
        epoch: u64,
        len: usize,
    ) -> Result<DeviceBuffer<'_, M>> {
        let link = Arc::clone(&self.link);
        let Some((pool, index, id)) = device_data else {
            return Err(ErrorKind::NoDataPart { link }.into());
        };
        if pool != self.pool || epoch != self.epoch {
            return Err(self.not_here());
        }
        // A message without bytes does not name its memory.
        if id != self.id && len > 0 {
            return Err(ErrorKind::OtherMemory { link, pool }.into());
        }
        self.buffer(index, len)
    }

    /// Bytes at an address that [`data`](Self::data) or [`resize_data`](Self::resize_data) returned, or inside them,
    /// for programs that pass addresses on. `None` if they are not inside one buffer. The owner is not checked.
    #[must_use]
    pub fn at(&self, address: u64, len: usize) -> Option<DeviceBuffer<'_, M>> {
        let offset = address.checked_sub(self.memory.address())?;
        let is_in_one = self.layout.is_in_one(offset, len as u64);
        is_in_one.then_some(DeviceBuffer { memory: &self.memory, offset, len })
    }

    fn buffer(&self, index: u32, len: usize) -> Result<DeviceBuffer<'_, M>> {
        let offset = self.layout.buffer(index).ok_or_else(|| self.not_here())?;
        Ok(DeviceBuffer { memory: &self.memory, offset, len })
    }

    #[cold]
    fn not_here(&self) -> Error {
        ErrorKind::NotOnDevice { link: Arc::clone(&self.link), pool: self.pool }.into()
    }

    /// All of the memory: the buffers, each at a multiple of 256 bytes, and two words after them.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The offset of the word that counts the GPU work of a side: 8 bytes, initially 0.
    #[must_use]
    pub fn timeline_offset(&self, side: Side) -> u64 {
        self.layout.timeline(side)
    }
}

#[cfg(feature = "cuda")]
impl DevicePool<CudaMemory> {
    /// The word by which the other side's GPU work waits for the GPU work of `side`, without the CPU.
    ///
    /// The word only grows, so a single stream of the side must write it. A side with several producers gives each a
    /// word of its own, in memory that it exports. A restarted sender continues from the [`value`](CudaTimeline::value)
    /// that it finds.
    ///
    /// # Errors
    /// Never fails for a pool of a link.
    ///
    /// ```
    /// use shmesh::config::PoolId;
    /// use shmesh::device::{CudaMemory, CudaStream, DevicePool};
    /// use shmesh::{Link, Result};
    /// # fn both(phy: &Link, mac: &Link, to: &DevicePool<CudaMemory>, from: &DevicePool<CudaMemory>, n: u64)
    /// #     -> std::result::Result<(), Box<dyn std::error::Error>> {
    /// // The producer: its stream writes n behind the kernels that fill the buffer, and the message carries n.
    /// let stream = CudaStream::new(to.memory().device())?;
    /// let mut loan = phy.loan_with(PoolId::CudaData)?;
    /// let address = to.resize_data(&mut loan, 65_536)?.address();
    /// // ... give kernels that write there to the stream, and then:
    /// to.timeline(phy.side())?.write(&stream, n)?;
    /// loan.resize_msg(8)?.copy_from_slice(&n.to_le_bytes());
    /// loan.send()?; // at once: the GPU may still be busy
    ///
    /// // The consumer, in another process: its stream waits for n before it reads.
    /// let stream = CudaStream::new(from.memory().device())?;
    /// if let Some(message) = mac.receive()? {
    ///     let n = u64::from_le_bytes(message.msg().try_into()?);
    ///     from.timeline(phy.side())?.wait(&stream, n)?;
    ///     let address = from.data(&message)?.address();
    ///     // ... give kernels that read there to the stream; when they are done, drop the message.
    ///     stream.synchronize()?;
    /// }
    /// # let _ = address; Ok(())
    /// # }
    /// ```
    pub fn timeline(&self, side: Side) -> io::Result<CudaTimeline<'_>> {
        self.memory.timeline(self.layout.timeline(side))
    }
}

/// The DATA part of a loan or message, in device memory.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// # use shmesh::config::{PoolConfig, PoolId};
/// # use shmesh::device::HostMemory;
/// # config.pools[PoolId::CudaData.index()] = PoolConfig { buf_size_bytes: 4096, pool_len: 16 };
/// # let link = options.create(&config)?;
/// let pool = link.device_pool(PoolId::CudaData, HostMemory::new)?;
/// let mut loan = link.loan_with(PoolId::CudaData)?;
/// let mut data = pool.resize_data(&mut loan, 8)?;
/// data.copy_to_device(4, b"text")?;
/// assert!(data.copy_to_device(5, b"text").is_err(), "it has 8 bytes");
/// let mut bytes = [0; 4];
/// data.copy_to_host(4, &mut bytes)?;
/// assert_eq!(&bytes, b"text");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DeviceBuffer<'a, M: PoolMemory> {
    memory: &'a M,
    offset: u64,
    len: usize,
}

impl<M: PoolMemory> DeviceBuffer<'_, M> {
    /// Its address in this process, for work of the device. It differs in the other process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address() + self.offset
    }

    /// The size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes to the host, and waits for the copy. It does not wait for GPU work that writes them.
    ///
    /// # Errors
    /// They are past the end, or the driver refuses.
    pub fn copy_to_host(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.copy_to_host(self.at(offset, bytes.len())?, bytes)
    }

    /// Copies bytes from the host, and waits for the copy.
    ///
    /// # Errors
    /// They are past the end, or the driver refuses.
    pub fn copy_to_device(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.memory.copy_to_device(self.at(offset, bytes.len())?, bytes)
    }

    /// The offset in the memory of `len` bytes at `offset` of the DATA part.
    fn at(&self, offset: usize, len: usize) -> io::Result<u64> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            let text = format!(
                "{len} bytes at offset {offset} are past the end of the DATA part of {} bytes",
                self.len
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(self.offset + offset as u64)
    }
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use super::*;
    use crate::LinkOptions;
    use crate::config::{LinkConfig, PoolConfig};

    #[test]
    fn payload_of_lost_memory_is_not_confused_with_new_memory() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let mut config = LinkConfig::new("link".parse().unwrap());
        config.pools[PoolId::GpuData.index()] = PoolConfig { buf_size_bytes: 64, pool_len: 2 };
        let phy = options.create(&config).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        let now = phy.device_pool(PoolId::GpuData, HostMemory::new).unwrap();
        // As in a process that missed the loss of the memory.
        let before = DevicePool {
            id: now.id.wrapping_add(1),
            ..mac.device_pool(PoolId::GpuData, HostMemory::new).unwrap()
        };
        let sent = |pool: &DevicePool<HostMemory>, len| {
            let mut loan = mac.loan_with(PoolId::GpuData).unwrap();
            pool.resize_data(&mut loan, len).unwrap();
            loan.send().unwrap();
            phy.receive().unwrap().unwrap()
        };
        let message = sent(&before, 1);
        let error = now.data(&message).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::OtherMemory { pool: PoolId::GpuData, .. }), "{error}");
        assert!(before.data(&message).is_ok());
        assert!(now.data(&sent(&before, 0)).is_ok(), "no bytes are lost of none");
        // Its place of the cell held the other id before.
        assert!(now.data(&sent(&now, 1)).is_ok());
    }
}
