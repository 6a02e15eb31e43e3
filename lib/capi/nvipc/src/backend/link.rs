//! The backend for links in shmesh's own layout.
//!
//! A handle on a link belongs to one thread at a time, and loans and messages borrow from it. So one handle is behind a
//! lock, together with the loans and messages that the application holds, which it names by address of their MSG part. A
//! thread that sleeps uses a handle of its own, without the lock, and a poll that finds no message takes no lock.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::io::{PipeReader, PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shmesh::device::PageLocked;
use shmesh::{Error, ErrorKind, Link, Loan, Message, Probe, SendError};
use shmesh_sys::cancel::Uncancelled;
use shmesh_sys::time;

use super::device::{self, DevicePoolMemory, DevicePools, Maker};
use super::{
    Backend, Buffers, CopiedMessage, Direction, Failure, Fields, PollSleep, PoolId, ReceivedMessage, Result,
    failed,
};

/// Interval between recoveries while a pool is empty. Each asks the kernel about every participant.
const SEARCH: Duration = Duration::from_millis(10);

/// How long the signal of a consumed post may be delayed. A later signal counts as one without a post: the peer may have
/// died in between, or have posted before the descriptor existed.
const LATE: Duration = Duration::from_millis(100);

/// Signals still to come for posts that were consumed already. A peer counts its post first and signals then. If the post
/// is consumed in between, its signal must not count as another post.
#[derive(Debug, Default)]
struct LateSignals {
    count: u32,
    since: Option<Instant>,
    /// A peer also signals without posting. Then a signal may refer to a queued message.
    are_mixed: bool,
}

impl LateSignals {
    /// Called when a post was consumed whose signal had not arrived.
    fn expect(&mut self) {
        self.count += 1;
        self.since = Some(Instant::now());
    }

    /// Whether a signal without a post is such a late one. `waits`: a message is queued.
    fn is_late(&mut self, waits: bool) -> bool {
        if self.since.is_none_or(|since| since.elapsed() >= LATE) {
            self.count = 0;
        }
        let is_late = self.count > 0;
        self.count -= u32::from(is_late);
        self.are_mixed |= !is_late;
        is_late && !(waits && self.are_mixed)
    }
}

/// An endpoint on a link of shmesh.
#[derive(Debug)]
pub struct LinkBackend {
    pools: [Option<(u32, u32)>; PoolId::COUNT],
    ring_len: u32,
    name: String,
    /// Outside the lock, because copies take long.
    devices: DevicePools,
    /// Host pools that are page-locked for the GPU.
    locked: Vec<PageLocked>,
    endpoint: Mutex<Option<Endpoint>>,
    /// Whether there is no message in the ring, and the number of messages in [`Endpoint::looped`].
    probe: Probe,
    looped: AtomicUsize,
    /// Handles for threads that sleep, one per thread. Unused handles are kept here.
    sleepers: Mutex<Vec<Link>>,
    /// Number of threads that sleep; `all_up` is notified when it drops to 0.
    asleep: Mutex<usize>,
    all_up: Condvar,
    closed: AtomicBool,
    /// Readable once the endpoint is closed, when `close` writes to the other end. Until no thread sleeps any more.
    over: Mutex<Option<(PipeReader, PipeWriter)>>,
}

/// A thread that sleeps on a handle of its own.
#[derive(Debug)]
struct Asleep {
    backend: Arc<LinkBackend>,
    link: Option<Link>,
}

impl Asleep {
    fn of(backend: Arc<LinkBackend>) -> Self {
        *backend.asleep.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self { backend, link: None }
    }
}

impl Drop for Asleep {
    fn drop(&mut self) {
        if let Some(link) = self.link.take() {
            link.end_sleep();
            // `close` drops these handles when no thread sleeps any more.
            self.backend.sleepers.lock().unwrap_or_else(PoisonError::into_inner).push(link);
        }
        *self.backend.asleep.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.backend.all_up.notify_all();
    }
}

/// The part that the lock guards.
#[derive(Debug)]
struct Endpoint {
    /// Declared before `link`, because they borrow from it: what is in MSG buffers, by index.
    held: Box<[Option<HeldItem>]>,
    /// Inline messages, by address. Only programs that do not use this interface send them. An entry stays when its message is
    /// gone, as the address will be used again.
    held_inline: BTreeMap<usize, Option<HeldItem>>,
    /// Messages sent to this endpoint itself: indices of [`HeldItem::Looped`], oldest first.
    looped: VecDeque<u32>,
    armed: bool,
    /// Posts from before the descriptor existed that no call has consumed.
    early: u32,
    late: LateSignals,
    /// The [uptime](time::coarse_uptime) of the last recovery.
    searched: Option<Duration>,
    link: PinnedLink,
}

/// A loan or message that the application holds or has sent to itself.
#[derive(Debug)]
enum HeldItem {
    Loan(Loan<'static>),
    Message(Message<'static>),
    Looped(Loan<'static>, Fields),
}

// SAFETY: loans and messages point to a handle that is `Send` but not `Sync`. The handle is in the same endpoint, and an
// endpoint is only accessed under its lock, so one thread at a time uses all of them.
unsafe impl Send for Endpoint {}

/// A handle at a stable address, from which loans and messages of the same endpoint borrow.
#[derive(Debug)]
struct PinnedLink(NonNull<Link>);

impl PinnedLink {
    fn new(link: Link) -> Self {
        Self(NonNull::from(Box::leak(Box::new(link))))
    }

    /// The handle, for values in the same endpoint, which are dropped before it.
    fn get(&self) -> &'static Link {
        // SAFETY: the box is freed only in `drop`. Values that borrow from it never leave the endpoint, where it is the
        // last field.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for PinnedLink {
    fn drop(&mut self) {
        // SAFETY: leaked in `new`, and dropped only once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl LinkBackend {
    /// Wraps `link` and opens its device pools. Page-locks the host pools for GPU `gpu`, or for the GPU of the device pools,
    /// or not at all if both are below 0.
    ///
    /// # Errors
    /// The memory of a device pool is missing and cannot be created.
    pub(crate) fn new(link: Link, maker: Maker, gpu: c_int) -> Result<Self> {
        let devices = DevicePoolMemory::all(&link, maker)?;
        let locked = device::locked(
            &link,
            devices.iter().flatten().map(DevicePoolMemory::ordinal).fold(gpu, c_int::max),
        );
        let over = std::io::pipe().map_err(|error| {
            Failure::Refused(format!("link {}: cannot create a pipe: {error}", link.name()))
        })?;
        let mut pools = [None; PoolId::COUNT];
        for id in PoolId::ALL {
            pools[id.index()] = link.pool(id);
        }
        let msg_buffers = pools[PoolId::CpuMsg.index()].map_or(0, |(_, len)| len as usize);
        Ok(Self {
            pools,
            ring_len: link.ring_len(),
            name: link.name().to_owned(),
            devices,
            locked,
            probe: link.probe(),
            looped: AtomicUsize::new(0),
            endpoint: Mutex::new(Some(Endpoint {
                held: (0..msg_buffers).map(|_| None).collect(),
                held_inline: BTreeMap::new(),
                looped: VecDeque::new(),
                armed: false,
                early: 0,
                late: LateSignals::default(),
                searched: None,
                link: PinnedLink::new(link),
            })),
            sleepers: Mutex::new(Vec::new()),
            asleep: Mutex::new(0),
            all_up: Condvar::new(),
            closed: AtomicBool::new(false),
            over: Mutex::new(Some(over)),
        })
    }

    fn over(&self) -> MutexGuard<'_, Option<(PipeReader, PipeWriter)>> {
        self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Endpoint>> {
        // Values are moved in and out as a whole, so a panic leaves the endpoint consistent.
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, act: impl FnOnce(&mut Endpoint) -> Result<T>) -> Result<T> {
        match self.lock().as_mut() {
            Some(endpoint) => act(endpoint),
            None => Err(self.was_closed()),
        }
    }

    /// Where the loan or message at `msg` is kept, if the application holds it and it has this DATA part.
    #[inline(always)]
    fn place_of_ours<'a>(
        &self,
        endpoint: &'a mut Endpoint,
        msg: NonNull<u8>,
        data: Option<NonNull<u8>>,
        pool: Option<PoolId>,
    ) -> Result<&'a mut Option<HeldItem>> {
        let Some(place) = endpoint.place(msg) else { return Err(self.foreign(msg)) };
        let agrees = match place {
            None | Some(HeldItem::Looped(..)) => return Err(self.foreign(msg)),
            Some(held) => held.agrees(&self.devices, data, pool),
        };
        if agrees { Ok(place) } else { Err(self.foreign_data(msg)) }
    }

    #[cold]
    fn was_closed(&self) -> Failure {
        Failure::Refused(format!("link {}: this instance was destroyed; create another", self.name))
    }

    #[cold]
    fn foreign(&self, msg: NonNull<u8>) -> Failure {
        Failure::Refused(format!(
            "link {}: this endpoint does not hold msg_buf {msg:p}: it was sent, released twice, or never allocated \
             or received here; pass the message as it was allocated or received",
            self.name
        ))
    }

    #[cold]
    fn foreign_data(&self, msg: NonNull<u8>) -> Failure {
        Failure::Refused(format!(
            "link {}: data_buf or data_pool does not belong to msg_buf {msg:p}; pass the message as it was allocated or received",
            self.name
        ))
    }
}

/// The address of bytes that may be an empty slice.
fn first(bytes: &[u8]) -> NonNull<u8> {
    NonNull::from(bytes).cast()
}

impl HeldItem {
    fn data_pool(&self) -> Option<PoolId> {
        match self {
            Self::Loan(loan) | Self::Looped(loan, _) => loan.data_pool(),
            Self::Message(message) => message.data_pool(),
        }
    }

    fn data(&mut self, devices: &DevicePools) -> Option<NonNull<u8>> {
        match self {
            Self::Loan(loan) | Self::Looped(loan, _) => data_of(loan, devices),
            Self::Message(message) => received_data(message, devices).ok().flatten(),
        }
    }

    /// Whether the caller's DATA address and pool match. Both may be omitted.
    fn agrees(&mut self, devices: &DevicePools, data: Option<NonNull<u8>>, pool: Option<PoolId>) -> bool {
        (data.is_none() || data == self.data(devices)) && (pool.is_none() || pool == self.data_pool())
    }
}

/// The memory of the device pool that a DATA part is in.
fn device_of(devices: &DevicePools, pool: PoolId) -> Option<&DevicePoolMemory> {
    devices[pool.index()].as_ref()
}

/// Sets the length of a loan's DATA part to 0, and returns its address.
fn data_of(loan: &mut Loan<'_>, devices: &DevicePools) -> Option<NonNull<u8>> {
    match device_of(devices, loan.data_pool()?) {
        None => Some(NonNull::from(loan.resize_data(0).ok()?).cast()),
        Some(device) => device.resize_data(loan, 0).ok()?,
    }
}

fn received_data(
    message: &Message<'_>,
    devices: &DevicePools,
) -> std::result::Result<Option<NonNull<u8>>, Error> {
    let Some(pool) = message.data_pool() else { return Ok(None) };
    match device_of(devices, pool) {
        None => Ok(Some(first(message.data()))),
        Some(device) => device.data(message),
    }
}

/// Describes a message with its DATA part.
#[inline(always)]
fn received(message: &Message<'_>, data: Option<NonNull<u8>>) -> ReceivedMessage {
    // A part is not longer than its buffer, which is shorter than 2 GiB.
    let len = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
    ReceivedMessage {
        fields: Fields {
            msg_id: message.msg_id(),
            cell_id: message.cell_id(),
            msg_len: len(message.msg().len()),
            data_len: len(message.data_len()),
            data_pool: message.data_pool(),
        },
        buffers: Buffers { msg: first(message.msg()), data },
    }
}

impl Endpoint {
    /// Consumes the signal of a consumed post, now or when it arrives.
    fn take_signal_of_post(&mut self) -> Result<()> {
        if self.armed && self.signal()?.is_none() {
            self.late.expect();
        }
        Ok(())
    }

    /// Consumes one post of the other side, without its signal.
    fn take_post(&self) -> Result<bool> {
        self.link().wait_tti(Some(Duration::ZERO)).map_err(|error| failed(&error))
    }

    /// Consumes a post from before the descriptor existed. While there are more, the descriptor stays readable.
    fn take_early(&mut self) -> Result<bool> {
        if self.early == 0 {
            return Ok(false);
        }
        self.early -= 1;
        // If the signal of another post arrived first, it takes the place of this one.
        self.signal()?;
        if self.early > 0 {
            self.signal_self()?;
        }
        Ok(true)
    }

    /// Makes this endpoint's descriptor readable.
    fn signal_self(&self) -> Result<()> {
        let own = self.link().fd().map_err(|error| failed(&error))?;
        shmesh_sys::bell::ring_own(own).map_err(|error| {
            Failure::Refused(format!("link {}: cannot signal the descriptor: {error}", self.link().name()))
        })
    }

    /// Consumes one signal of a notification, if there is one. Signals for attaching or detaching participants are skipped,
    /// because each signal counts here.
    fn signal(&self) -> Result<Option<u64>> {
        loop {
            match self.link().take_signal().map_err(|error| failed(&error))? {
                Some(0) => {}
                signal => return Ok(signal),
            }
        }
    }

    fn link(&self) -> &'static Link {
        self.link.get()
    }

    #[inline(always)]
    fn loan(&mut self, data: Option<PoolId>) -> Result<Loan<'static>> {
        match self.link().try_loan(data) {
            Ok(Ok(loan)) => Ok(loan),
            Ok(Err(empty)) => self.loan_of_the_dead(data, empty),
            Err(error) => Err(failed(&error)),
        }
    }

    /// Recovers what dead participants held, because there may be no other process to do it.
    #[cold]
    fn loan_of_the_dead(&mut self, data: Option<PoolId>, empty: PoolId) -> Result<Loan<'static>> {
        let link = self.link();
        let exhausted = |empty| Failure::Exhausted(empty, link.pool(empty).map_or(0, |(_, len)| len));
        let now = time::coarse_uptime();
        if self.searched.zip(now).is_some_and(|(before, now)| now.saturating_sub(before) < SEARCH) {
            return Err(exhausted(empty));
        }
        let _uncancelled = Uncancelled::new();
        self.searched = now;
        if !link.recover().is_ok_and(|done| done.participants > 0) {
            return Err(exhausted(empty));
        }
        link.try_loan(data).map_err(|error| failed(&error))?.map_err(exhausted)
    }

    /// Where the loan or message at `msg` is kept; `None` if none was ever kept there.
    #[inline(always)]
    fn place(&mut self, msg: NonNull<u8>) -> Option<&mut Option<HeldItem>> {
        match self.link().msg_index_of(msg.as_ptr()) {
            Some(index) => self.held.get_mut(index as usize),
            None => self.held_inline.get_mut(&msg.as_ptr().addr()),
        }
    }

    #[inline(always)]
    fn keep(&mut self, msg: NonNull<u8>, held: HeldItem) {
        match self.place(msg) {
            Some(place) => *place = Some(held),
            None => drop(self.held_inline.insert(msg.as_ptr().addr(), Some(held))),
        }
    }

    fn give_up(&mut self, msg: NonNull<u8>) -> Option<HeldItem> {
        self.place(msg)?.take()
    }

    /// Copies a message into a loan, because NVIPC's applications may send what they received.
    fn copied(
        &mut self,
        message: &Message<'static>,
        fields: Fields,
        devices: &DevicePools,
    ) -> Result<Loan<'static>> {
        let limit = if message.is_inline() { shmesh::INLINE_MAX_BYTES } else { usize::MAX };
        let mut loan = self.loan(message.data_pool())?;
        let (msg_len, data_len) = (fields.msg_len as usize, data_len(fields));
        if msg_len > limit {
            let text = format!("link {}: an inline message has at most {limit} bytes", self.link().name());
            return Err(Failure::Refused(text));
        }
        let to = loan.resize_msg(msg_len).map_err(|error| failed(&error))?;
        // SAFETY: `resize_msg` checked the length against a MSG buffer, and the line above against an inline message. The
        // message and the loan hold different buffers.
        unsafe { std::ptr::copy_nonoverlapping(first(message.msg()).as_ptr(), to.as_mut_ptr(), to.len()) };
        let device = message.data_pool().and_then(|pool| device_of(devices, pool));
        if let Some(device) = device {
            let place = |place: std::result::Result<Option<NonNull<u8>>, Error>| {
                Ok::<_, Failure>(
                    place.map_err(|error| failed(&error))?.map_or(0, |data| data.addr().get() as u64),
                )
            };
            let (from, to) = (place(device.data(message))?, place(device.resize_data(&mut loan, data_len))?);
            let mut bytes = vec![0; data_len];
            let copied = device.copy_to_host(from, &mut bytes).zip(device.copy_to_device(to, &bytes));
            let (read, written) =
                copied.ok_or_else(|| failed_copy(self.link().name(), "they are not in one buffer"))?;
            read.and(written).map_err(|error| failed_copy(self.link().name(), &error.to_string()))?;
        } else if message.data_pool().is_some() {
            let to = loan.resize_data(data_len).map_err(|error| failed(&error))?;
            // SAFETY: as above, for buffers of the same pool.
            unsafe {
                std::ptr::copy_nonoverlapping(first(message.data()).as_ptr(), to.as_mut_ptr(), to.len());
            }
        }
        Ok(loan)
    }
}

/// The length of the DATA part, or 0 without one: then the caller's length field may hold anything.
fn data_len(fields: Fields) -> usize {
    if fields.data_pool.is_some() { fields.data_len as usize } else { 0 }
}

#[cold]
fn failed_copy(link: &str, why: &str) -> Failure {
    Failure::Refused(format!("link {link}: cannot copy the bytes: {why}"))
}

/// Sets the fields of a loan from the caller's message.
#[inline(always)]
fn filled(
    mut loan: Loan<'static>,
    fields: Fields,
    devices: &DevicePools,
) -> std::result::Result<Loan<'static>, SendError<'static>> {
    let Fields { msg_id, cell_id, .. } = fields;
    let (msg_len, data_len) = (fields.msg_len as usize, data_len(fields));
    let Some(device) = loan.data_pool().and_then(|pool| device_of(devices, pool)) else {
        return match loan.describe(msg_id, cell_id, msg_len, data_len) {
            Ok(()) => Ok(loan),
            Err(error) => Err(SendError { loan, error }),
        };
    };
    let resized = loan.resize_msg(msg_len).map(|_| ()).and_then(|()| device.resize_data(&mut loan, data_len));
    match resized {
        Ok(_) => Ok(loan.with_msg_id(msg_id).with_cell_id(cell_id)),
        Err(error) => Err(SendError { loan, error }),
    }
}

impl Backend for LinkBackend {
    fn pool(&self, pool: PoolId) -> Option<(u32, u32)> {
        self.pools[pool.index()]
    }

    fn ring_len(&self) -> u32 {
        self.ring_len
    }

    fn allocate(&self, data: Option<PoolId>) -> Result<Buffers> {
        self.with(|endpoint| {
            let mut loan = endpoint.loan(data)?;
            let msg = loan.msg_start();
            // On its own: a value stays in registers if no path takes its address.
            if loan.data_pool().is_none() {
                let place = &mut endpoint.held[loan.index() as usize];
                *place = Some(HeldItem::Loan(loan));
                return Ok(Buffers { msg, data: None });
            }
            let mut loan = loan;
            let data = data_of(&mut loan, &self.devices);
            endpoint.keep(msg, HeldItem::Loan(loan));
            Ok(Buffers { msg, data })
        })
    }

    fn send(&self, fields: Fields, msg: NonNull<u8>, data: Option<NonNull<u8>>) -> Result<()> {
        self.with(|endpoint| {
            let place = self.place_of_ours(endpoint, msg, data, fields.data_pool)?;
            let (loan, message) = match place.take() {
                Some(HeldItem::Loan(loan)) => {
                    let loan = match filled(loan, fields, &self.devices) {
                        Ok(loan) => loan,
                        Err(SendError { loan, error }) => {
                            *place = Some(HeldItem::Loan(loan));
                            return Err(failed(&error));
                        }
                    };
                    return loan.send().map_err(|SendError { loan, error }| {
                        // If the participant was evicted, the message is gone and the loan is empty.
                        if !matches!(error.kind(), ErrorKind::Evicted { .. }) {
                            *place = Some(HeldItem::Loan(loan));
                        }
                        failed(&error)
                    });
                }
                Some(HeldItem::Message(message)) => match endpoint.copied(&message, fields, &self.devices) {
                    Ok(loan) => (loan.with_msg_id(fields.msg_id).with_cell_id(fields.cell_id), message),
                    Err(failure) => {
                        endpoint.keep(msg, HeldItem::Message(message));
                        return Err(failure);
                    }
                },
                None | Some(HeldItem::Looped(..)) => unreachable!("refused above"),
            };
            loan.send().map_err(|SendError { error, .. }| {
                // The copy is discarded and the message kept.
                endpoint.keep(msg, HeldItem::Message(message));
                failed(&error)
            })
        })
    }

    fn send_loopback(&self, fields: Fields, msg: NonNull<u8>, data: Option<NonNull<u8>>) -> Result<()> {
        self.with(|endpoint| match endpoint.give_up(msg) {
            Some(HeldItem::Loan(loan)) => {
                let (refused, loan) = match filled(loan, fields, &self.devices) {
                    Ok(loan) => {
                        let mut held = HeldItem::Loan(loan);
                        let agrees = held.agrees(&self.devices, data, fields.data_pool);
                        ((!agrees).then(|| self.foreign_data(msg)), held)
                    }
                    Err(SendError { loan, error }) => (Some(failed(&error)), HeldItem::Loan(loan)),
                };
                match (refused, loan) {
                    (None, HeldItem::Loan(loan)) => {
                        endpoint.looped.push_back(loan.index());
                        self.looped.store(endpoint.looped.len(), Ordering::Relaxed);
                        endpoint.keep(msg, HeldItem::Looped(loan, fields));
                        Ok(())
                    }
                    (refused, held) => {
                        endpoint.keep(msg, held);
                        refused.map_or(Ok(()), Err)
                    }
                }
            }
            Some(other) => {
                endpoint.keep(msg, other);
                Err(self.foreign(msg))
            }
            None => Err(self.foreign(msg)),
        })
    }

    /// Relaxed, as in the probe: a call after a send to this endpoint itself sees the count.
    fn is_known_empty(&self) -> bool {
        self.looped.load(Ordering::Relaxed) == 0
            && self.probe.is_empty()
            && !self.closed.load(Ordering::Acquire)
    }

    fn receive(&self) -> Result<Option<ReceivedMessage>> {
        self.with(|endpoint| {
            let looped = endpoint.looped.pop_front();
            if looped.is_some() {
                self.looped.store(endpoint.looped.len(), Ordering::Relaxed);
            }
            if let Some(index) = looped
                && let Some(HeldItem::Looped(mut loan, mut fields)) = endpoint.held[index as usize].take()
            {
                let msg = NonNull::from(loan.resize_msg(0).map_err(|error| failed(&error))?).cast();
                let buffers = Buffers { msg, data: data_of(&mut loan, &self.devices) };
                fields.data_len = u32::try_from(data_len(fields)).unwrap_or(0);
                fields.data_pool = loan.data_pool();
                endpoint.keep(msg, HeldItem::Loan(loan));
                return Ok(Some(ReceivedMessage { fields, buffers }));
            }
            let message = match endpoint.link().receive() {
                Ok(Some(message)) => message,
                Ok(None) => return Ok(None),
                Err(error) => return Err(failed(&error)),
            };
            // On its own, as in `allocate`.
            if message.data_pool().is_none() {
                let received = received(&message, None);
                endpoint.keep(received.buffers.msg, HeldItem::Message(message));
                return Ok(Some(received));
            }
            let message = message;
            let data = received_data(&message, &self.devices).map_err(|error| failed(&error))?;
            let received = received(&message, data);
            endpoint.keep(received.buffers.msg, HeldItem::Message(message));
            Ok(Some(received))
        })
    }

    fn release(&self, msg: NonNull<u8>, data: Option<NonNull<u8>>, pool: Option<PoolId>) -> Result<()> {
        self.with(|endpoint| {
            *self.place_of_ours(endpoint, msg, data, pool)? = None;
            Ok(())
        })
    }

    fn can_copy(&self) -> bool {
        true
    }

    fn copied(
        &self,
        fields: Fields,
        msg: NonNull<u8>,
        data: Option<NonNull<u8>>,
    ) -> Result<Option<CopiedMessage>> {
        self.with(|endpoint| {
            let Some(held) = endpoint.place(msg).and_then(Option::as_mut) else {
                return Err(self.foreign(msg));
            };
            if !held.agrees(&self.devices, data, fields.data_pool) {
                return Err(self.foreign_data(msg));
            }
            let is_inline = matches!(held, HeldItem::Message(message) if message.is_inline());
            let room = |pool| self.pool(pool).map_or(0, |(bytes, _)| bytes as usize);
            let msg_room = if is_inline { shmesh::INLINE_MAX_BYTES } else { room(PoolId::CpuMsg) };
            if fields.msg_len as usize > msg_room || data_len(fields) > fields.data_pool.map_or(0, room) {
                return Err(Failure::Refused(format!(
                    "link {}: a part is longer than its buffer",
                    self.name
                )));
            }
            // SAFETY: this endpoint holds the buffers, the lock is held, and the lengths were compared.
            Ok(unsafe { CopiedMessage::of(fields, Buffers { msg, data: held.data(&self.devices) }) })
        })
    }

    fn post(&self) -> Result<()> {
        self.with(|endpoint| endpoint.link().post().map_err(|error| failed(&error)))
    }

    fn take(&self) -> Result<bool> {
        self.with(|endpoint| {
            if endpoint.take_early()? {
                return Ok(true);
            }
            let link = endpoint.link();
            if link.wait_tti(Some(Duration::ZERO)).map_err(|error| failed(&error))? {
                // The descriptor must not stay readable for a post that was consumed.
                endpoint.take_signal_of_post()?;
                return Ok(true);
            }
            // A signal without a post: from a peer that uses the other library and does not post.
            while endpoint.armed {
                let is_ours = match link.take_signal().map_err(|error| failed(&error))? {
                    None => break,
                    // From a peer that died after it sent and before it signalled.
                    Some(0) => endpoint.late.are_mixed && link.has_message(),
                    // Of a post after the check above: not consumed yet, it must not be consumed once more. If this is the late
                    // signal of another post, the signal of this one is late instead.
                    Some(_) if link.wait_tti(Some(Duration::ZERO)).map_err(|error| failed(&error))? => true,
                    Some(_) => !endpoint.late.is_late(link.has_message()),
                };
                if is_ours {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    fn sleep(self: Arc<Self>) -> Result<Option<PollSleep>> {
        let mut asleep = Asleep::of(self);
        let backend = Arc::clone(&asleep.backend);
        if backend.closed.load(Ordering::Acquire) {
            return Err(backend.was_closed());
        }
        let spare = backend.sleepers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let sleeper = match spare {
            Some(sleeper) => sleeper,
            None => backend.with(|endpoint| endpoint.link().try_clone().map_err(|error| failed(&error)))?,
        };
        if backend.with(Endpoint::take_early)? {
            backend.sleepers.lock().unwrap_or_else(PoisonError::into_inner).push(sleeper);
            return Ok(None);
        }
        // A handle on which this failed is not reused.
        let bell = sleeper.begin_sleep().map_err(|error| failed(&error))?.map(|fd| fd.as_raw_fd());
        asleep.link = Some(sleeper);
        let Some(bell) = bell else {
            // The signal of that post, unless the sleep consumed it.
            let _ = backend.with(Endpoint::take_signal_of_post);
            return Ok(None);
        };
        // Open until this sleep ends, because `asleep` counts it.
        let over =
            backend.over().as_ref().map(|(over, _)| over.as_raw_fd()).ok_or_else(|| backend.was_closed())?;
        Ok(Some(PollSleep { fds: [bell, over], guard: Box::new(asleep) }))
    }

    fn fd(&self) -> Result<c_int> {
        self.with(|endpoint| {
            if !endpoint.armed {
                // A peer posts and then signals, so the signals of posts that are visible now may still arrive.
                while endpoint.take_post()? {
                    endpoint.late.expect();
                    endpoint.early = endpoint.early.saturating_add(1);
                }
                endpoint.link().fd().map_err(|error| failed(&error))?;
                endpoint.armed = true;
                while endpoint.take_post()? {
                    endpoint.take_signal_of_post()?;
                    endpoint.early = endpoint.early.saturating_add(1);
                }
                if endpoint.early > 0 {
                    endpoint.signal_self()?;
                }
            }
            Ok(endpoint.link().fd().map_err(|error| failed(&error))?.as_raw_fd())
        })
    }

    fn queued(&self) -> Result<usize> {
        self.with(|endpoint| Ok(endpoint.link().queued() + endpoint.looped.len()))
    }

    fn copy(&self, direction: Direction, host: NonNull<u8>, device: u64, len: usize) -> Result<()> {
        let mut pools = self.devices.iter().flatten();
        let Some(pool) = pools.find(|pool| pool.has(device, len)) else {
            return Err(Failure::Refused(format!(
                "link {}: {len} bytes at {device:#x} are not in one buffer of cuda_data or gpu_data; pass data_buf of a \
                 message from there, or what lies in it",
                self.name
            )));
        };
        let copied = match direction {
            Direction::ToHost => {
                // SAFETY: `len` bytes at `host` are valid and not used otherwise meanwhile, as the caller guarantees.
                let to = unsafe { std::slice::from_raw_parts_mut(host.as_ptr(), len) };
                pool.copy_to_host(device, to)
            }
            Direction::ToDevice => {
                // SAFETY: as above.
                let from = unsafe { std::slice::from_raw_parts(host.as_ptr(), len) };
                pool.copy_to_device(device, from)
            }
        };
        match copied {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(failed_copy(&self.name, &error.to_string())),
            None => Err(failed_copy(&self.name, "they are not in one buffer")),
        }
    }

    fn cuda_device_id(&self) -> c_int {
        self.devices.iter().flatten().map(DevicePoolMemory::ordinal).max().unwrap_or(-1)
    }

    fn is_locked(&self) -> bool {
        !self.locked.is_empty()
    }

    fn is_on_gpu(&self, address: u64) -> bool {
        let mut pools = self.devices.iter().flatten();
        pools.any(|pool| pool.ordinal() >= 0 && pool.has(address, 1))
    }

    fn sent_at(&self, _msg: NonNull<u8>) -> Result<i64> {
        Err(Failure::Refused(format!(
            "link {}: links of shmesh do not record the time of sending; write it into the MSG part",
            self.name
        )))
    }

    /// The link ends in `close`. Memory of a GPU and locked pages end with this value.
    fn may_linger(&self) -> bool {
        self.locked.is_empty() && self.devices.iter().all(Option::is_none)
    }

    fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel)
            && let Some((_, end)) = self.over().as_mut()
        {
            let _ = end.write(&[0]);
        }
        let endpoint = self.lock().take();
        // Detaching may have to remove the link, so the lock is released first.
        drop(endpoint);
        // The link ends with its last handle, and the caller may end the process next.
        let asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        let asleep =
            self.all_up.wait_while(asleep, |asleep| *asleep > 0).unwrap_or_else(PoisonError::into_inner);
        // With the lock held: a thread that begins to sleep finds this closed.
        *self.over() = None;
        drop(asleep);
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

#[cfg(test)]
mod tests {
    use shmesh::config::LinkConfig;
    use shmesh::{LinkOptions, Side};

    use super::*;

    fn endpoint() -> (tempfile::TempDir, LinkBackend, Link) {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let ours = options.create(&LinkConfig::new("link".parse().unwrap())).unwrap();
        let peer = options.attach("link", Side::Secondary).unwrap();
        (dir, LinkBackend::new(ours, Maker::Us(-1), -1).unwrap(), peer)
    }

    #[test]
    fn late_signal_of_a_consumed_post_does_not_count() {
        let (_dir, ours, peer) = endpoint();
        // The post, but not its signal: no participant has a bell yet.
        peer.post().unwrap();
        ours.fd().unwrap();
        assert!(ours.take().unwrap());
        // Then its signal.
        peer.notify().unwrap();
        assert!(!ours.take().unwrap(), "one post counted twice");
        // Later posts count as before, and so do signals without a post.
        peer.post().unwrap();
        assert!(ours.take().unwrap() && !ours.take().unwrap());
        peer.notify().unwrap();
        assert!(ours.take().unwrap() && !ours.take().unwrap());
    }

    #[test]
    fn posts_before_the_descriptor_make_it_readable() {
        let (_dir, ours, peer) = endpoint();
        (0..30).for_each(|_| peer.post().unwrap());
        let fd = ours.fd().unwrap();
        // SAFETY: open as long as the backend.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        let is_readable = || shmesh_sys::poll::is_readable(&fd).unwrap();
        for left in (0..30).rev() {
            assert!(is_readable() && ours.take().unwrap(), "{left} more");
        }
        assert!(!is_readable() && !ours.take().unwrap());
        // Then as always.
        peer.post().unwrap();
        assert!(is_readable() && ours.take().unwrap() && !is_readable() && !ours.take().unwrap());
        // Without a descriptor, a sleep consumes them too.
        let (_dir, ours, peer) = endpoint();
        (0..2).for_each(|_| peer.post().unwrap());
        ours.fd().unwrap();
        let ours = Arc::new(ours);
        assert!(
            Arc::clone(&ours).sleep().unwrap().is_none() && ours.take().unwrap() && !ours.take().unwrap()
        );
    }

    #[test]
    fn attaching_and_detaching_do_not_count_as_posts() {
        let (dir, ours, peer) = endpoint();
        ours.fd().unwrap();
        let other = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
        assert!(!ours.take().unwrap(), "one attached");
        drop(other);
        assert!(!ours.take().unwrap(), "one detached");
        let ours = Arc::new(ours);
        drop(Arc::clone(&ours).sleep().unwrap());
        assert!(!ours.take().unwrap(), "a thread of this endpoint slept");
        peer.post().unwrap();
        assert!(ours.take().unwrap() && !ours.take().unwrap());
    }

    #[test]
    fn late_signals_do_not_hide_others() {
        let (_dir, ours, peer) = endpoint();
        peer.post().unwrap();
        peer.post().unwrap();
        ours.fd().unwrap();
        assert!(ours.take().unwrap() && ours.take().unwrap());
        // Two are late; the third is from a peer that does not post.
        (0..3).for_each(|_| peer.notify().unwrap());
        assert!(ours.take().unwrap() && !ours.take().unwrap());
        // A signal that never arrives is not waited for.
        let mut late = LateSignals::default();
        late.expect();
        late.since = Instant::now().checked_sub(LATE);
        assert!(!late.is_late(false));
        // If a peer is known to signal without posting, a queued message does not wait for the next signal.
        late.expect();
        assert!(!late.is_late(true));
    }

    #[test]
    fn posts_count_once_while_a_peer_posts() {
        const POSTS: u32 = 20_000;
        let (_dir, ours, peer) = endpoint();
        ours.fd().unwrap();
        let poster = std::thread::spawn(move || {
            (0..POSTS).for_each(|_| peer.post().unwrap());
            peer
        });
        let mut taken = 0;
        while !poster.is_finished() {
            taken += u32::from(ours.take().unwrap());
        }
        let _peer = poster.join().unwrap();
        while ours.take().unwrap() {
            taken += 1;
        }
        assert_eq!(taken, POSTS);
    }
}
