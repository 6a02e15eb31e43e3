//! The device pools of a link: GPU memory, or host memory in its place.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use shmesh::client::Mechanism;
use shmesh::device::{CudaDevice, CudaMemory, DevicePool, HostMemory, PageLocked};
use shmesh::{Link, Loan, Message, Side};
use shmesh_sys::causes::with_causes;

use super::{Failure, PoolId, Result, failed};
use crate::log::say;

/// Interval at which a secondary checks whether the primary has created the memory.
const LOOK: Duration = Duration::from_millis(2);

/// The memory of one device pool.
#[derive(Debug)]
pub(super) enum DevicePoolMemory {
    Cuda(DevicePool<CudaMemory>),
    Host(DevicePool<HostMemory>),
}

/// The memory of all device pools, indexed by [`PoolId::index`].
pub(super) type DevicePools = [Option<DevicePoolMemory>; PoolId::COUNT];

/// Which side creates the memory if there is none yet.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Maker {
    /// This process, on the GPU with this number, or in host memory if it is below 0.
    Us(i32),
    /// The other side. This side waits for it, until this time at most.
    Other(Option<Instant>),
}

fn address(bytes: u64) -> Option<NonNull<u8>> {
    let address = usize::try_from(bytes).ok()?;
    NonNull::new(std::ptr::with_exposed_provenance_mut(address))
}

/// Opens the GPU with this number.
fn device(ordinal: i32) -> std::io::Result<CudaDevice> {
    let all = CudaDevice::all()?;
    let count = all.len();
    let found = usize::try_from(ordinal).ok().and_then(|ordinal| all.into_iter().nth(ordinal));
    found.ok_or_else(|| {
        std::io::Error::other(format!(
            "cuda_device_id is {ordinal}, but this process sees {count} GPUs; give 0 to {}, or -1 for host memory",
            count.saturating_sub(1)
        ))
    })
}

/// Returns `gpu` if this process sees that GPU, otherwise -1 after a log line. NVIPC's shipped configuration names a GPU,
/// and still has to start on a machine without one.
pub(crate) fn present(name: &str, gpu: i32) -> i32 {
    if gpu < 0 {
        return gpu;
    }
    match device(gpu) {
        Ok(_) => gpu,
        Err(error) => {
            say!("link {name}: no GPU is used, and cuda_data and gpu_data are in host memory: {error}");
            -1
        }
    }
}

/// Page-locks the host pools for the GPU with this number. If it fails, everything works, but copies are slower.
pub(super) fn locked(link: &Link, gpu: i32) -> Vec<PageLocked> {
    if gpu < 0 {
        return Vec::new();
    }
    let gpu = match device(gpu) {
        Ok(gpu) => gpu,
        Err(error) => {
            say!(
                "link {}: its pools are not page-locked, so copies to a GPU are slower: {error}",
                link.name()
            );
            return Vec::new();
        }
    };
    let of_host = PoolId::ALL.into_iter().filter(|&pool| !pool.is_device() && link.pool(pool).is_some());
    let lock = |pool| match PageLocked::of(&gpu, link, pool) {
        Ok(locked) => Some(locked),
        Err(error) => {
            say!("{}", with_causes(&error));
            None
        }
    };
    of_host.filter_map(lock).collect()
}

/// Watches the primary that is to allocate device memory.
struct PrimaryWatch<'a> {
    link: &'a Link,
    was_here: bool,
}

impl PrimaryWatch<'_> {
    /// Returns an error if waiting for the memory of `pool` is pointless.
    fn check(&mut self, pool: PoolId, maker: Maker) -> Result<()> {
        let name = self.link.name();
        if let Maker::Other(Some(deadline)) = maker
            && Instant::now() >= deadline
        {
            return Err(Failure::Refused(format!(
                "link {name}: its primary has not allocated the device memory of pool {pool}; start the primary first"
            )));
        }
        let is_here = self.link.participants().any(|other| other.word.side() == Side::Primary);
        if self.was_here && !is_here {
            return Err(Failure::PrimaryLeft(format!(
                "link {name}: its primary ended before it allocated the device memory of pool {pool}: look for the reason in its log, and \
                 start it again"
            )));
        }
        self.was_here = is_here;
        Ok(())
    }
}

impl DevicePoolMemory {
    /// Opens the memory of a pool: the existing one, or what `maker` creates.
    fn open(link: &Link, pool: PoolId, maker: Maker, wait: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
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

    /// Opens the memory of all device pools that the link has.
    pub(super) fn all(link: &Link, maker: Maker) -> Result<DevicePools> {
        let mut pools = [const { None }; PoolId::COUNT];
        let mut primary = PrimaryWatch { link, was_here: false };
        for pool in PoolId::ALL.into_iter().filter(|&pool| pool.is_device() && link.pool(pool).is_some()) {
            let mut wait = || {
                primary.check(pool, maker)?;
                std::thread::sleep(LOOK);
                Ok(())
            };
            pools[pool.index()] = Some(Self::open(link, pool, maker, &mut wait)?);
        }
        Ok(pools)
    }

    /// The number of its GPU in this process, or -1 for host memory.
    pub(super) fn ordinal(&self) -> i32 {
        match self {
            Self::Cuda(pool) => pool.memory().device().ordinal(),
            Self::Host(_) => -1,
        }
    }

    /// Sets the length of a loan's DATA part, and returns its address.
    pub(super) fn resize_data(&self, loan: &mut Loan<'_>, len: usize) -> shmesh::Result<Option<NonNull<u8>>> {
        Ok(address(match self {
            Self::Cuda(pool) => pool.resize_data(loan, len)?.address(),
            Self::Host(pool) => pool.resize_data(loan, len)?.address(),
        }))
    }

    /// The address of a message's DATA part.
    pub(super) fn data(&self, message: &Message<'_>) -> shmesh::Result<Option<NonNull<u8>>> {
        Ok(address(match self {
            Self::Cuda(pool) => pool.data(message)?.address(),
            Self::Host(pool) => pool.data(message)?.address(),
        }))
    }

    /// Whether `len` bytes at an address lie in one buffer.
    pub(super) fn has(&self, address: u64, len: usize) -> bool {
        match self {
            Self::Cuda(pool) => pool.at(address, len).is_some(),
            Self::Host(pool) => pool.at(address, len).is_some(),
        }
    }

    /// Copies to host memory. Returns `None` if the bytes do not lie in one buffer.
    pub(super) fn copy_to_host(&self, from: u64, to: &mut [u8]) -> Option<std::io::Result<()>> {
        Some(match self {
            Self::Cuda(pool) => pool.at(from, to.len())?.copy_to_host(0, to),
            Self::Host(pool) => pool.at(from, to.len())?.copy_to_host(0, to),
        })
    }

    /// Copies to device memory. Returns `None` if the bytes do not lie in one buffer.
    pub(super) fn copy_to_device(&self, to: u64, from: &[u8]) -> Option<std::io::Result<()>> {
        Some(match self {
            Self::Cuda(pool) => pool.at(to, from.len())?.copy_to_device(0, from),
            Self::Host(pool) => pool.at(to, from.len())?.copy_to_device(0, from),
        })
    }
}

#[cfg(test)]
mod tests {
    use shmesh::LinkOptions;
    use shmesh::config::LinkConfig;

    use super::*;

    #[test]
    fn secondary_reports_primary_that_ended_before_it_allocated_memory() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let config = LinkConfig::new("link".parse().unwrap());
        let primary = options.create(&config).unwrap();
        let link = options.attach("link", Side::Secondary).unwrap();
        let mut watch = PrimaryWatch { link: &link, was_here: false };
        let mut check = || watch.check(PoolId::CudaData, Maker::Other(None));
        check().unwrap();
        drop(primary);
        let failure = check().unwrap_err();
        assert!(matches!(failure, Failure::PrimaryLeft(_)), "{failure}");
        let text = failure.to_string();
        assert!(text.starts_with("link link: its primary ended") && text.contains("cuda_data"), "{text}");
        // A primary that is not there yet is waited for, until the limit.
        let mut watch = PrimaryWatch { link: &link, was_here: false };
        watch.check(PoolId::CudaData, Maker::Other(None)).unwrap();
        let failure = watch.check(PoolId::CudaData, Maker::Other(Some(Instant::now()))).unwrap_err();
        assert!(failure.to_string().contains("start the primary first"), "{failure}");
    }
}
