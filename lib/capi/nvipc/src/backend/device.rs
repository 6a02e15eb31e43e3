//! The device pools of a link: memory of a GPU, or of the host in its place.

use std::ptr::NonNull;
use std::time::Duration;

use shmesh::client::Mechanism;
use shmesh::device::{CudaDevice, CudaMemory, DevicePool, HostMemory, PageLocked};
use shmesh::{Error, Link, Loan, Message, Side};

use super::{Failure, PoolId, Result};
use crate::log::say;

/// Between two looks whether the primary has made the memory.
const LOOK: Duration = Duration::from_millis(2);

/// One pool.
#[derive(Debug)]
pub(super) enum DeviceMemory {
    Cuda(DevicePool<CudaMemory>),
    Host(DevicePool<HostMemory>),
}

/// Both, by [`PoolId::index`].
pub(super) type DevicePools = [Option<DeviceMemory>; PoolId::COUNT];

/// Of whom the memory is, if there is none yet.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Maker {
    /// This process, on the GPU of this number; below 0, of the host.
    Us(i32),
    /// The other side, for which this one waits so long; without an end if it is not said.
    Other(Option<Duration>),
}

fn address(bytes: u64) -> Option<NonNull<u8>> {
    let address = usize::try_from(bytes).ok()?;
    NonNull::new(std::ptr::with_exposed_provenance_mut(address))
}

/// The GPU of this number.
fn device(ordinal: i32) -> std::io::Result<CudaDevice> {
    let all = CudaDevice::all()?;
    let count = all.len();
    let found = usize::try_from(ordinal).ok().and_then(|ordinal| all.into_iter().nth(ordinal));
    found.ok_or_else(|| {
        std::io::Error::other(format!(
            "cuda_device_id is {ordinal}, this process sees {count}; give 0 to {}, or -1 for memory of the host",
            count.saturating_sub(1)
        ))
    })
}

/// The GPU of this number, if this process sees it, or -1 and a line: NVIPC's shipped configuration names one, and starts on a
/// machine without.
pub(crate) fn present(name: &str, gpu: i32) -> i32 {
    if gpu < 0 {
        return gpu;
    }
    match device(gpu) {
        Ok(_) => gpu,
        Err(error) => {
            say!(
                "link {name}: no GPU is used, and cuda_data and gpu_data are in memory of the host: {error}"
            );
            -1
        }
    }
}

/// Locks the pools of the host for the GPU of this number. Without it everything works, and copies take a detour.
pub(super) fn locked(link: &Link, gpu: i32) -> Vec<PageLocked> {
    if gpu < 0 {
        return Vec::new();
    }
    let gpu = match device(gpu) {
        Ok(gpu) => gpu,
        Err(error) => {
            say!("link {}: its pools are not locked for a GPU: {error}", link.name());
            return Vec::new();
        }
    };
    let of_host = PoolId::ALL.into_iter().filter(|&pool| !pool.is_device() && link.pool(pool).is_some());
    let lock = |pool| match PageLocked::of(&gpu, link, pool) {
        Ok(locked) => Some(locked),
        Err(error) => {
            say!("{}", crate::config::chain(&error));
            None
        }
    };
    of_host.filter_map(lock).collect()
}

impl DeviceMemory {
    /// That of a pool of the link: what there is, or what `maker` makes.
    fn open(link: &Link, pool: PoolId, maker: Maker, wait: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
        let failed = |error: &Error| super::link::failed(error);
        let of_host = || link.device_pool(pool, HostMemory::new).map(Self::Host);
        let on =
            |ordinal| link.device_pool(pool, |size| CudaMemory::new(&device(ordinal)?, size)).map(Self::Cuda);
        loop {
            let opened = match (link.device_mechanism(pool).map_err(|error| failed(&error))?, maker) {
                (Some(Mechanism::Host), _) => of_host(),
                (Some(_), _) => on(0),
                (None, Maker::Us(ordinal)) if ordinal < 0 => of_host(),
                (None, Maker::Us(ordinal)) => on(ordinal),
                (None, Maker::Other(_)) => {
                    wait()?;
                    continue;
                }
            };
            return opened.map_err(|error| failed(&error));
        }
    }

    /// All that the link has.
    pub(super) fn all(link: &Link, maker: Maker) -> Result<DevicePools> {
        let start = std::time::Instant::now();
        let mut pools = [const { None }; PoolId::COUNT];
        let mut primary_was_here = false;
        for pool in PoolId::ALL.into_iter().filter(|&pool| pool.is_device() && link.pool(pool).is_some()) {
            let mut wait = || match maker {
                Maker::Other(Some(limit)) if start.elapsed() >= limit => Err(Failure::Refused(format!(
                    "link {}: its primary has not made the memory of pool {pool}; start it first",
                    link.name()
                ))),
                _ => {
                    let is_here = link.participants().any(|other| other.word.side() == Side::Primary);
                    if primary_was_here && !is_here {
                        return Err(Failure::PrimaryLeft(format!(
                            "link {}: its primary left before it made the memory of pool {pool}: look at what it wrote, and \
                             start it again",
                            link.name()
                        )));
                    }
                    primary_was_here = is_here;
                    std::thread::sleep(LOOK);
                    Ok(())
                }
            };
            pools[pool.index()] = Some(Self::open(link, pool, maker, &mut wait)?);
        }
        Ok(pools)
    }

    /// The number of its GPU in this process; -1 for the host.
    pub(super) fn ordinal(&self) -> i32 {
        match self {
            Self::Cuda(pool) => pool.memory().device().ordinal(),
            Self::Host(_) => -1,
        }
    }

    /// Where the DATA part of a loan is, which has `len` bytes from now on.
    pub(super) fn resize_data(&self, loan: &mut Loan<'_>, len: usize) -> shmesh::Result<Option<NonNull<u8>>> {
        Ok(address(match self {
            Self::Cuda(pool) => pool.resize_data(loan, len)?.address(),
            Self::Host(pool) => pool.resize_data(loan, len)?.address(),
        }))
    }

    /// Where the DATA part of a message is.
    pub(super) fn data(&self, message: &Message<'_>) -> shmesh::Result<Option<NonNull<u8>>> {
        Ok(address(match self {
            Self::Cuda(pool) => pool.data(message)?.address(),
            Self::Host(pool) => pool.data(message)?.address(),
        }))
    }

    /// Whether so many bytes at an address lie in one buffer.
    pub(super) fn has(&self, address: u64, len: usize) -> bool {
        match self {
            Self::Cuda(pool) => pool.at(address, len).is_some(),
            Self::Host(pool) => pool.at(address, len).is_some(),
        }
    }

    /// `None`: they do not lie in one buffer.
    pub(super) fn copy_to_host(&self, from: u64, to: &mut [u8]) -> Option<std::io::Result<()>> {
        Some(match self {
            Self::Cuda(pool) => pool.at(from, to.len())?.copy_to_host(0, to),
            Self::Host(pool) => pool.at(from, to.len())?.copy_to_host(0, to),
        })
    }

    /// `None`: they do not lie in one buffer.
    pub(super) fn copy_to_device(&self, to: u64, from: &[u8]) -> Option<std::io::Result<()>> {
        Some(match self {
            Self::Cuda(pool) => pool.at(to, from.len())?.copy_to_device(0, from),
            Self::Host(pool) => pool.at(to, from.len())?.copy_to_device(0, from),
        })
    }
}
