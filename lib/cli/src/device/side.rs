//! A process that loads the driver, executes requests and reports how long each took.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use shmesh::device::{AscendDevice, CudaDevice, CudaLegacyMemory, CudaMemory, CudaStream, DeviceMemory};

use super::wire::{Order, OrderResult, Transfer, receive, send};

/// Word of a timeline in the first page of shared memory, for the outward direction; the other follows.
const THERE: u64 = 0;
const BACK: u64 = 8;
/// Bytes that are verified at once.
const PIECE: u64 = 32 << 20;
/// Number of rounds that are not measured.
const WARM_UP: u32 = 3;
/// Attributes that describe what can be shared: virtual memory, descriptors, pools, RDMA, dma-buf, IPC events, fabric
/// handles.
const ATTRIBUTES: [i32; 8] = [102, 103, 115, 116, 119, 124, 125, 128];
/// Maximum number of times in one packet.
const TIMES_MAX: usize = 500;

/// The options of a process with the driver, which receives orders on its standard input.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct SideArgs {
    /// User id to change to before anything else
    #[arg(long, value_name = "UID")]
    user: Option<u32>,
}

/// Serves requests until its input is closed.
pub(crate) fn run(args: &SideArgs) -> anyhow::Result<()> {
    if let Some(user) = args.user {
        shmesh_sys::user::become_user(user)?;
    }
    crate::child::die_with_parent()?;
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let mut side = DeviceChild::default();
    while let Some((order, fd)) = receive::<Order>(&socket)? {
        let is_probe = matches!(order, Order::Probe);
        let (answer, fd) = match side.obey(order, fd) {
            Ok(answer) => answer,
            Err(error) if is_probe && error.kind() == io::ErrorKind::NotFound => {
                (OrderResult::Absent(error.to_string()), None)
            }
            Err(error) => (OrderResult::Refused(error.to_string()), None),
        };
        send(&socket, &answer, fd.as_ref())?;
    }
    Ok(())
}

/// Imported or exported memory of either mechanism.
#[derive(Debug)]
enum CudaRegion {
    Vmm(CudaMemory),
    Legacy(CudaLegacyMemory),
}

impl CudaRegion {
    fn size(&self) -> u64 {
        match self {
            Self::Vmm(memory) => memory.size(),
            Self::Legacy(memory) => memory.size(),
        }
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Vmm(memory) => memory.read_at(offset, bytes),
            Self::Legacy(memory) => memory.read_at(offset, bytes),
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Vmm(memory) => memory.write_at(offset, bytes),
            Self::Legacy(memory) => memory.write_at(offset, bytes),
        }
    }
}

#[derive(Debug, Default)]
struct DeviceChild {
    memory: Option<CudaRegion>,
    /// The first device, and a stream that keeps its context: creating one takes a driver longer than everything that
    /// is measured here, and every process that shares memory has one.
    first: Option<(CudaDevice, CudaStream)>,
}

fn first() -> io::Result<CudaDevice> {
    CudaDevice::all()?.into_iter().next().ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "the driver is installed, but it has no device")
    })
}

fn nanos(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// The pattern's word at position `at`. Words near each other differ.
fn word(seed: u32, at: u64) -> u32 {
    let low = u32::try_from(at & 0xffff_ffff).unwrap_or_default();
    (low ^ seed).wrapping_mul(0x9e37_79b1).rotate_left(7)
}

fn pattern(seed: u32, offset: u64, bytes: &mut [u8]) {
    for (at, four) in bytes.chunks_exact_mut(4).enumerate() {
        four.copy_from_slice(&word(seed, offset / 4 + at as u64).to_le_bytes());
    }
}

impl DeviceChild {
    fn obey(&mut self, order: Order, fd: Option<OwnedFd>) -> io::Result<(OrderResult, Option<OwnedFd>)> {
        let answer = match order {
            Order::Probe => probe()?,
            Order::Make { how, size } => return self.make(how, size),
            Order::Import { how, size, handle } => {
                self.first()?;
                let since = Instant::now();
                self.memory = Some(match how {
                    Transfer::Vmm => CudaRegion::Vmm(CudaMemory::import(size, fd, &handle)?),
                    Transfer::Legacy => CudaRegion::Legacy(CudaLegacyMemory::import(size, fd, &handle)?),
                });
                OrderResult::Imported { nanos: nanos(since) }
            }
            Order::Fill { seed } => {
                self.pieces(|memory, offset, bytes| {
                    pattern(seed, offset, bytes);
                    memory.write_at(offset, bytes)
                })?;
                OrderResult::Done
            }
            Order::Zero => {
                self.has()?.write_at(0, &[0; 16])?;
                OrderResult::Done
            }
            Order::Verify { seed } => {
                let (mut wrong, mut right) = (0, Vec::new());
                self.pieces(|memory, offset, bytes| {
                    memory.read_at(offset, bytes)?;
                    right.resize(bytes.len(), 0);
                    pattern(seed, offset, &mut right);
                    let words = bytes.chunks_exact(4).zip(right.chunks_exact(4));
                    wrong += words.filter(|(found, wanted)| found != wanted).count() as u64;
                    Ok(())
                })?;
                OrderResult::Verified { wrong }
            }
            Order::Drop => {
                let since = Instant::now();
                self.memory = None;
                OrderResult::Dropped { nanos: nanos(since) }
            }
            Order::Bandwidth { rounds } => bandwidth(self.vmm()?, rounds)?,
            Order::Ping { rounds } => ping(self.vmm()?, rounds)?,
            Order::Pong { rounds } => {
                let memory = self.vmm()?;
                let stream = CudaStream::new(memory.device())?;
                for round in 1..=u64::from(rounds) {
                    memory.timeline(THERE)?.wait(&stream, round)?;
                    memory.timeline(BACK)?.write(&stream, round)?;
                }
                stream.synchronize()?;
                OrderResult::Done
            }
            Order::FreeMemory => OrderResult::Number(self.first()?.memory_info()?.0),
            Order::Descriptors => OrderResult::Number(shmesh_sys::procfs::open_descriptors()? as u64),
        };
        Ok((answer, None))
    }

    fn first(&mut self) -> io::Result<CudaDevice> {
        if let Some((device, _)) = &self.first {
            return Ok(device.clone());
        }
        let device = first()?;
        self.first = Some((device.clone(), CudaStream::new(&device)?));
        Ok(device)
    }

    fn make(&mut self, how: Transfer, size: u64) -> io::Result<(OrderResult, Option<OwnedFd>)> {
        let device = self.first()?;
        let since = Instant::now();
        let (made, fd, handle) = match how {
            Transfer::Vmm => {
                let memory = CudaMemory::new(&device, size)?;
                let fd = memory.fd().map(|fd| fd.try_clone_to_owned()).transpose()?;
                let handle = memory.handle();
                (CudaRegion::Vmm(memory), fd, handle)
            }
            Transfer::Legacy => {
                let memory = CudaLegacyMemory::new(&device, size)?;
                let handle = memory.handle();
                (CudaRegion::Legacy(memory), None, handle)
            }
        };
        let answer = OrderResult::Made { size: made.size(), handle, nanos: nanos(since) };
        self.memory = Some(made);
        Ok((answer, fd))
    }

    fn has(&self) -> io::Result<&CudaRegion> {
        self.memory.as_ref().ok_or_else(|| io::Error::other("no memory was allocated or imported"))
    }

    fn vmm(&self) -> io::Result<&CudaMemory> {
        match self.has()? {
            CudaRegion::Vmm(memory) => Ok(memory),
            CudaRegion::Legacy(_) => {
                Err(io::Error::other("this step needs memory that is shared by descriptors"))
            }
        }
    }

    /// Calls `act` with each piece of the memory.
    fn pieces(&self, mut act: impl FnMut(&CudaRegion, u64, &mut [u8]) -> io::Result<()>) -> io::Result<()> {
        let memory = self.has()?;
        let mut bytes = vec![0; usize::try_from(PIECE.min(memory.size())).map_err(io::Error::other)?];
        let mut offset = 0;
        while offset < memory.size() {
            let len = PIECE.min(memory.size() - offset);
            act(memory, offset, &mut bytes[..usize::try_from(len).map_err(io::Error::other)?])?;
            offset += len;
        }
        Ok(())
    }
}

fn probe() -> io::Result<OrderResult> {
    let device = first()?;
    let (free, all) = device.memory_info()?;
    let ascend = match AscendDevice::all() {
        Ok(devices) => format!("{} NPUs, which this command does not check", devices.len()),
        Err(error) => error.to_string(),
    };
    Ok(OrderResult::Probed {
        device: device.name()?,
        uuid: device.uuid().to_string(),
        driver: CudaDevice::driver_version()?,
        granularity: device.granularity()?,
        free,
        all,
        missing: CudaDevice::missing_functions()?.into_iter().map(str::to_owned).collect(),
        attributes: ATTRIBUTES.into_iter().map(|number| (number, device.attribute(number).ok())).collect(),
        ascend,
    })
}

/// Lets the device copy; the time counts until the copies are complete.
fn bandwidth(imported: &CudaMemory, rounds: u32) -> io::Result<OrderResult> {
    let (device, size) = (imported.device(), imported.size());
    let (own, other) = (CudaMemory::new(device, size)?, CudaMemory::new(device, size)?);
    let ways = [(&own, &other), (&own, imported), (imported, &own)];
    let mut rates = [0.0; 3];
    for (rate, (to, from)) in rates.iter_mut().zip(ways) {
        for _ in 0..WARM_UP {
            to.copy_from(0, from.address(), size)?;
        }
        device.synchronize()?;
        let since = Instant::now();
        for _ in 0..rounds {
            to.copy_from(0, from.address(), size)?;
        }
        device.synchronize()?;
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let size = size as f64;
        *rate = size * f64::from(rounds) / since.elapsed().as_secs_f64();
    }
    Ok(OrderResult::Bandwidth { rates, size })
}

fn ping(memory: &CudaMemory, rounds: u32) -> io::Result<OrderResult> {
    let stream = CudaStream::new(memory.device())?;
    let mut times = Vec::new();
    for round in 1..=u64::from(rounds) {
        let since = Instant::now();
        memory.timeline(THERE)?.write(&stream, round)?;
        memory.timeline(BACK)?.wait(&stream, round)?;
        stream.synchronize()?;
        times.push(nanos(since));
    }
    times.truncate(TIMES_MAX);
    Ok(OrderResult::Pinged { nanos: times })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_differs_between_positions() {
        let (mut first, mut second) = ([0; 64], [0; 64]);
        pattern(1, 0, &mut first);
        pattern(1, 64, &mut second);
        assert_ne!(first, second);
        pattern(2, 0, &mut second);
        assert_ne!(first, second);
        let mut later = [0; 32];
        pattern(1, 32, &mut later);
        assert_eq!(first[32..], later);
    }
}
