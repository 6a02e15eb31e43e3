//! Device memory of a link's pools: its layout, and how processes share it.
//!
//! The segment of such a pool has header, hints and cells like any other, and no buffers. Those are in one piece of device
//! memory with one descriptor. Only participants have devices, so the first participant that needs the memory allocates it
//! and offers it to the link's host. The host keeps the descriptor, and gives it to newcomers and to attached participants;
//! they keep it too, and offer it to the next host. So the memory lives as long as any process on the link, even after its
//! allocator has ended.
//!
//! If all processes that have it end while others stay, the memory is lost, and the pool gets other memory. The two must
//! not be confused, so each has an id, which messages carry.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shmesh_proto::broker::{self, Mechanism, PoolMemory, Reply, Request, reply, request};
use shmesh_proto::packet;
use shmesh_sys::{file, socket};

use super::host::{ASKED, HostAnswer, NO_HOST, SILENT, TOLD, answer_of, ask as ask_host, memories, refused};
use super::{Link, Shared};
use crate::config::PoolId;
use crate::error::{Error, ErrorKind, Result};
use crate::participant::Side;

/// Buffers begin at multiples of this, as a GPU's own allocations do.
const ALIGNMENT: u64 = 256;
/// Maximum by which a device may round memory up.
const GRANULARITY_MAX: u64 = 1 << 30;
/// How long a link may be without a host.
const UNSERVED: Duration = Duration::from_secs(10);
/// Interval of attempts to find a host.
const RETRY: Duration = Duration::from_millis(2);

/// The layout of the device memory of a pool.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct DeviceLayout {
    buf_size: u32,
    stride: u64,
    len: u32,
}

impl DeviceLayout {
    pub(crate) fn of((buf_size, len): (u32, u32)) -> Self {
        Self { buf_size, stride: u64::from(buf_size).next_multiple_of(ALIGNMENT), len }
    }

    /// The offset of a buffer; `None` beyond the last buffer.
    pub(crate) fn buffer(self, index: u32) -> Option<u64> {
        (index < self.len).then(|| self.stride * u64::from(index))
    }

    /// Whether `len` bytes at an offset lie in one buffer.
    pub(crate) fn is_in_one(self, offset: u64, len: u64) -> bool {
        let Some(inside) = offset.checked_rem(self.stride) else { return false };
        offset / self.stride < u64::from(self.len)
            && inside.checked_add(len).is_some_and(|end| end <= u64::from(self.buf_size))
    }

    /// The offset of the word that counts a side's work. Both words are after the buffers, on different lines.
    pub(crate) fn timeline(self, side: Side) -> u64 {
        let behind = self.stride * u64::from(self.len);
        behind + if side == Side::Primary { 0 } else { ALIGNMENT / 2 }
    }

    pub(crate) fn bytes(self) -> u64 {
        self.timeline(Side::Primary) + ALIGNMENT
    }
}

/// Device memory that is shared between processes.
#[derive(Debug)]
pub(crate) struct Lent {
    /// The id, which is never 0.
    pub(crate) id: u64,
    pub(crate) size: u64,
    pub(crate) mechanism: Mechanism,
    pub(crate) handle: Vec<u8>,
    pub(crate) fd: Arc<OwnedFd>,
}

impl Lent {
    /// Checks memory that a process offers, or that the host announces.
    fn of(layout: DeviceLayout, told: &PoolMemory, fds: Vec<OwnedFd>) -> std::result::Result<Self, String> {
        let (least, size) = (layout.bytes(), told.size);
        if size < least || size - least >= GRANULARITY_MAX {
            return Err(format!(
                "must have {least} bytes, not {size}; offer {least} bytes, rounded up to the granularity of the device"
            ));
        }
        let Ok([fd]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err("must come with exactly one descriptor, that of the memory".into());
        };
        let handle_bytes = match told.mechanism() {
            Mechanism::Host => 0,
            Mechanism::CudaVmm => 16,
            _ => return Err("must use the mechanism host or cuda-vmm".into()),
        };
        if told.handle.len() != handle_bytes {
            return Err(format!("must have a handle of {handle_bytes} bytes, not {}", told.handle.len()));
        }
        let fd = if told.mechanism() == Mechanism::Host {
            let memory = File::from(fd);
            // A memfd that can be truncated would cause SIGBUS later.
            let is_whole =
                memory.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() >= size);
            if !is_whole || !file::is_size_sealed(&memory) {
                return Err(
                    "must be a memfd of the offered size; seal it against shrinking and growing".into()
                );
            }
            OwnedFd::from(memory)
        } else {
            fd
        };
        Ok(Self {
            id: told.id,
            size,
            mechanism: told.mechanism(),
            handle: told.handle.clone(),
            fd: Arc::new(fd),
        })
    }

    pub(crate) fn message(&self, pool: PoolId) -> PoolMemory {
        PoolMemory {
            pool: pool as u32,
            id: self.id,
            size: self.size,
            mechanism: self.mechanism.into(),
            handle: self.handle.clone(),
        }
    }
}

/// The request for a pool's memory.
fn question(pool: PoolId) -> PoolMemory {
    PoolMemory { pool: pool as u32, ..PoolMemory::default() }
}

/// The device memory that this process has, by pool.
#[derive(Debug, Default)]
pub(crate) struct Memories(Mutex<[Option<Arc<Lent>>; PoolId::COUNT]>);

impl Memories {
    fn lock(&self) -> MutexGuard<'_, [Option<Arc<Lent>>; PoolId::COUNT]> {
        // References are replaced as a whole, so a poisoned lock guards a valid value.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result of a packet about a pool's memory.
#[derive(Debug)]
pub(crate) struct PoolMemoryUpdate {
    pub(crate) pool: PoolId,
    /// The memory that the link has now.
    pub(crate) memory: Option<Arc<Lent>>,
    /// Whether the packet brought it.
    pub(crate) is_news: bool,
}

impl PoolMemoryUpdate {
    pub(crate) fn message(&self) -> PoolMemory {
        self.memory.as_ref().map_or_else(|| question(self.pool), |memory| memory.message(self.pool))
    }

    pub(crate) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.memory.iter().map(|memory| memory.fd.as_fd()).collect()
    }
}

impl Shared {
    /// Distinguishes this link from an earlier or later one with the same name.
    pub(super) fn epoch(&self) -> u64 {
        self.segments.first().map_or(0, |segment| segment.header.epoch)
    }

    /// Answers a request for a pool's memory, and accepts an offer if there is none. Returns `Err` if the packet breaks a
    /// rule.
    pub(crate) fn lend(
        &self,
        told: &PoolMemory,
        fds: Vec<OwnedFd>,
    ) -> std::result::Result<PoolMemoryUpdate, String> {
        let shape = &self.core.shape;
        let known =
            PoolId::from_index(told.pool).and_then(|id| shape.device_pools().find(|&pool| pool == id));
        let link = &self.store.link;
        let Some(pool) = known else {
            let number = told.pool;
            return Err(format!(
                "link {link}: the link has no pool {number} in device memory; configure the pool"
            ));
        };
        let refused = |text| format!("link {link}: the device memory of pool {pool} {text}");
        if told.id == 0 && !fds.is_empty() {
            return Err(refused(
                "must be requested without a descriptor; send one only with an offer".into(),
            ));
        }
        let offered = if told.id == 0 {
            None
        } else {
            let layout = DeviceLayout::of(shape.pools[pool as usize]);
            Some(Lent::of(layout, told, fds).map_err(refused)?)
        };
        let mut memories = self.memories.lock();
        let place = &mut memories[pool as usize];
        let is_news = place.is_none() && offered.is_some();
        if is_news {
            *place = offered.map(Arc::new);
        }
        Ok(PoolMemoryUpdate { pool, memory: place.clone(), is_news })
    }

    /// Offers the host the memory that this process has, and asks for the rest.
    pub(super) fn announce_memory(&self, broker: &OwnedFd) {
        for pool in self.core.shape.device_pools() {
            let memory = self.memories.lock()[pool as usize].clone();
            let told = memory.as_ref().map_or_else(|| question(pool), |memory| memory.message(pool));
            let fds: Vec<_> = memory.iter().map(|memory| memory.fd.as_fd()).collect();
            let request = Request::new(TOLD, request::Op::PoolMemory(told));
            // Fails if the host has ended; then the next host gets the offer.
            let _ = socket::send_now(broker, &packet::encode(&request), &fds);
        }
    }

    /// Asks the host for all memory that it has. This is done at once and not on demand, because by then all other
    /// processes with the memory may have ended.
    pub(super) fn fetch_memory(&self, host: &OwnedFd) {
        for pool in self.core.shape.device_pools() {
            // Without an answer the link still works, and the host announces memory when there is some.
            if let Ok(Ok((told, fds))) = ask(host, &question(pool), &[])
                && told.id != 0
            {
                let _ = self.lend(&told, fds);
            }
        }
    }

    /// Handles an announcement of memory by the host.
    pub(super) fn memory_announced(&self, bytes: &[u8], fds: Vec<OwnedFd>) {
        if let Ok(Reply { result: Some(reply::Result::PoolMemory(told)), .. }) = packet::decode(bytes)
            && told.id != 0
            && let Some(fds) = memories(fds)
        {
            // An announcement that breaks a rule is ignored.
            let _ = self.lend(&told, fds);
        }
    }

    /// Asks the host for a pool's memory, or offers some. Returns what the link has then.
    pub(crate) fn ask_for_memory(&self, pool: PoolId, offer: Option<&Lent>) -> Result<Option<Arc<Lent>>> {
        let start = Instant::now();
        // A new host may not have been offered the existing memory yet.
        let known = self.memories.lock()[pool as usize].clone();
        let offer = offer.or(known.as_deref());
        let told = offer.map_or_else(|| question(pool), |offer| offer.message(pool));
        let fds: Vec<_> = offer.iter().map(|offer| offer.fd.as_fd()).collect();
        let failed = |error| {
            Error::system(&self.store.link, format!("ask for the device memory of pool {pool}"), error)
        };
        loop {
            let asked = match ask_host(&self.store, &self.lock) {
                Ok(HostAnswer::Offer(_, connection, _)) => ask(&connection, &told, &fds),
                Ok(HostAnswer::NoHost | HostAnswer::NeedsMemory) => match self.memories.lock()[pool as usize]
                    .clone()
                {
                    // It is offered to the next host.
                    Some(known) => return Ok(Some(known)),
                    None if start.elapsed() >= UNSERVED => return Err(refused(&self.store, NO_HOST).into()),
                    None => Err(io::ErrorKind::ConnectionReset.into()),
                },
                Err(error) if matches!(error.kind(), ErrorKind::Host { what: SILENT, .. }) => {
                    Err(io::ErrorKind::WouldBlock.into())
                }
                Err(error) => return Err(error),
            };
            match asked {
                Ok(Ok((told, fds))) => {
                    if told.id == 0 {
                        return Ok(None);
                    }
                    // Kept here as well, in case the process that has it ends.
                    let strange =
                        |text| failed(io::Error::other(format!("the host's answer is invalid: {text}")));
                    if told.pool != pool as u32 {
                        return Err(strange("it is about another pool".to_owned()));
                    }
                    let layout = DeviceLayout::of(self.core.shape.pools[pool as usize]);
                    let memory = Arc::new(Lent::of(layout, &told, fds).map_err(strange)?);
                    self.memories.lock()[pool as usize] = Some(Arc::clone(&memory));
                    return Ok(Some(memory));
                }
                Ok(Err(text)) => {
                    return Err(ErrorKind::Refused { link: Arc::clone(&self.store.link), text }.into());
                }
                Err(error) if start.elapsed() >= UNSERVED => return Err(failed(error)),
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }
}

impl Link {
    pub(crate) fn epoch(&self) -> u64 {
        self.shared.epoch()
    }

    /// Asks the host, as [`Shared::ask_for_memory`] does.
    pub(crate) fn ask_for_memory(&self, pool: PoolId, offer: Option<&Lent>) -> Result<Option<Arc<Lent>>> {
        self.check_seated()?;
        self.shared.ask_for_memory(pool, offer)
    }
}

/// Sends a request to the host and waits for its answer. An inner `Err` is a refusal with its reason.
fn ask(
    connection: &OwnedFd,
    told: &PoolMemory,
    fds: &[BorrowedFd<'_>],
) -> io::Result<std::result::Result<(PoolMemory, Vec<OwnedFd>), String>> {
    let request = Request::new(ASKED, request::Op::PoolMemory(told.clone()));
    socket::send(connection, &packet::encode(&request), fds)?;
    let (bytes, fds) = answer_of(connection)?;
    if bytes.is_empty() {
        return Err(io::ErrorKind::ConnectionReset.into());
    }
    match packet::decode(&bytes) {
        Ok(Reply { result: Some(reply::Result::PoolMemory(told)), .. }) => {
            let fds = memories(fds).ok_or_else(|| {
                io::Error::other("the host sent a descriptor that is neither a memfd nor device memory")
            })?;
            Ok(Ok((told, fds)))
        }
        Ok(Reply { result: Some(reply::Result::Refused(refused)), .. })
            if refused.code() == broker::Code::Draining =>
        {
            Err(io::ErrorKind::ConnectionReset.into())
        }
        Ok(Reply { result: Some(reply::Result::Refused(refused)), .. }) => Ok(Err(refused.text)),
        _ => Err(io::Error::other(
            "the host's answer does not belong to the request; run one version on both sides",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_followed_by_the_timeline_words() {
        for (size, stride) in [(1, 256), (256, 256), (257, 512), (576_000, 576_000)] {
            let layout = DeviceLayout::of((size, 3));
            assert_eq!(
                [0, 1, 2, 3].map(|index| layout.buffer(index)),
                [Some(0), Some(stride), Some(2 * stride), None]
            );
            let inside = [(0, 0), (0, u64::from(size)), (2 * stride, 1), (u64::from(size) - 1, 1)];
            assert!(inside.iter().all(|&(offset, len)| layout.is_in_one(offset, len)));
            let outside = [
                (0, u64::from(size) + 1),
                (u64::from(size) - 1, 2),
                (3 * stride, 0),
                (1, u64::MAX),
                (u64::MAX, 1),
            ];
            assert!(!outside.iter().any(|&(offset, len)| layout.is_in_one(offset, len)), "{size}");
            let words = [Side::Primary, Side::Secondary].map(|side| layout.timeline(side));
            assert!(words[0] >= 3 * stride && words[1] > words[0] && words[1] + 8 <= layout.bytes());
            assert!(words.iter().all(|word| word.is_multiple_of(8)) && layout.bytes().is_multiple_of(256));
        }
    }
}
