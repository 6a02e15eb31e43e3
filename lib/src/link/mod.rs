//! Links: the interface of applications.
//!
//! | file | concept |
//! |---|---|
//! | `async_link.rs` | [`AsyncLink`]: a link in tokio tasks (feature `tokio`) |
//! | `async_bell.rs`, `async_request.rs` | the bell that the tasks of a handle share; [`AsyncPendingReply`] and
//! [`AsyncRequest`] |
//! | `async_typed.rs`, `async_typed_request.rs` | [`AsyncTypedLink`] and [`AsyncTypedRequests`]: typed messages and requests in
//! tokio tasks (features `tokio` and `typed`) |
//! | `attachment.rs` | the part of a link that all handles of a process share, detaching |
//! | `bell.rs` | named sockets that wake receivers in poll and epoll |
//! | `broadcast.rs` | readers of a broadcast ring: counting, waiting for, and evicting them |
//! | `core.rs` | all tables of a link, and the steps that transfer ownership of a buffer |
//! | `endpoint.rs` | the tables and private state of one participant |
//! | `empty.rs` | emptying a link that an earlier run left behind |
//! | `device.rs` | device memory of pools, and sharing it between processes |
//! | `events.rs` | events: other participants attach, detach and die |
//! | `monitor.rs` | the thread that watches all links of the process |
//! | `open.rs` | creating, attaching, adopting the remains of a crash |
//! | `host/` | handing out memory without names: [`LinkHost`] for sidecars, and participants as hosts |
//! | `lease.rs` | the lease of a seat: by the handle, owned messages and owned loans |
//! | `loan.rs` | [`Loan`]: a message being written; sending |
//! | `message.rs` | [`Message`]: a received message |
//! | `owned.rs` | [`OwnedMessage`] and [`OwnedLoan`], which do not borrow from the link |
//! | `probe.rs` | [`Probe`]: looking for messages without the handle |
//! | `reap.rs` | looking for dead participants |
//! | `owned_request.rs` | [`OwnedPendingReply`] and [`OwnedRequest`], which do not borrow from the link |
//! | `shared_bytes.rs` | [`SharedBytes`]: payload that another process may change |
//! | `inline_buffers.rs` | buffers for the bytes of received inline messages |
//! | `typed.rs`, `typed_request.rs` | [`TypedLink`]: a link whose messages are values of one type; [`TypedRequests`] (feature
//! `typed`) |
//! | `wait.rs` | polling, spinning, sleeping; the file descriptor |
//! | `request.rs`, `request_steps.rs` | requests and replies: the interface, and the steps on shared memory |
//! | `replies.rs` | the positions of client and server in the replies to a request |
//! | `recover.rs` | recovery of dead participants |

#[cfg(feature = "tokio")]
mod async_bell;
#[cfg(feature = "tokio")]
mod async_link;
#[cfg(feature = "tokio")]
mod async_request;
#[cfg(all(feature = "tokio", feature = "typed"))]
mod async_typed;
#[cfg(all(feature = "tokio", feature = "typed"))]
mod async_typed_request;
mod attachment;
pub(crate) mod bell;
mod broadcast;
pub(crate) mod core;
pub(crate) mod device;
mod empty;
pub(crate) mod endpoint;
mod events;
pub(crate) mod host;
mod inline_buffers;
mod lease;
mod loan;
mod message;
mod monitor;
mod open;
mod owned;
mod owned_request;
mod probe;
mod reap;
mod recover;
pub(crate) mod removal;
mod replies;
mod request;
pub(crate) mod request_steps;
#[cfg(feature = "tokio")]
mod send_backoff;
mod shared_bytes;
#[cfg(feature = "typed")]
mod typed;
#[cfg(feature = "typed")]
mod typed_request;
mod wait;
mod waiter;

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use shmesh_proto::broker::{Request as BrokerRequest, Seated, request::Op};
use shmesh_proto::packet;
use shmesh_sys::cancel::Uncancelled;
use shmesh_sys::process::{Liveness, ProcessIdentity};
use shmesh_sys::{sigbus, socket};

use crate::config::{Backing, MAX_READERS, PoolId};
use crate::error::{Error, ErrorKind, Result};
use crate::participant::{MAX_SEATS, Participant, PeerObserver, SeatIndex, SeatStage, Seats, Side};
use crate::ring::broadcast::{Broadcast, Writer};
use crate::ring::{Ring, WildWord, spsc};
use crate::segment::Memory;
use crate::segment::layout::PoolLayout;
use crate::segment::lock::Lock;
use crate::segment::store::{Segment, Store};
#[cfg(feature = "tokio")]
pub use async_link::AsyncLink;
#[cfg(feature = "tokio")]
pub use async_request::{AsyncPendingReply, AsyncRequest};
#[cfg(all(feature = "tokio", feature = "typed"))]
pub use async_typed::AsyncTypedLink;
#[cfg(all(feature = "tokio", feature = "typed"))]
pub use async_typed_request::{AsyncTypedPendingReply, AsyncTypedRequest, AsyncTypedRequests};
use attachment::Attachment;
use bell::Cause;
use core::Core;
pub use core::RecoveryStats;
use endpoint::Endpoint;
pub use events::WaitOutcome;
pub use host::{LinkHost, LinkHostOffer};
pub use loan::{Loan, SendError};
pub use message::Message;
pub use open::{DEFAULT_DIR, DIR_VARIABLE, LinkOptions};
pub use owned::{OwnedLoan, OwnedMessage};
pub use owned_request::{OwnedPendingReply, OwnedRequest, ReplyError};
pub use probe::Probe;
pub use request::{PendingReply, Request};
pub use shared_bytes::SharedBytes;
#[cfg(feature = "typed")]
pub use typed::{OwnedTypedMessage, Payload, TypedLink, TypedLoan, TypedMessage, TypedSendError};
#[cfg(feature = "typed")]
pub use typed_request::{
    OwnedTypedPendingReply, OwnedTypedRequest, TypedPendingReply, TypedRequest, TypedRequests,
};
pub use waiter::Waiter;

/// How long participants may take to offer device memory to a new host.
const GATHERING: Duration = Duration::from_millis(1500);

/// The part of a link that all handles of this process share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) core: Core,
    pub(crate) store: Store,
    pub(crate) me: ProcessIdentity,
    /// The link's own segment, then the pools.
    pub(crate) segments: Vec<Segment>,
    /// Whether receivers may sleep, so that senders have to wake them.
    pub(crate) notify: bool,
    bells: bell::Bells,
    /// User and group of the link's own segment.
    owner: Option<(u32, u32)>,
    pub(crate) spin_us: u32,
    /// The lock file: the host role, the attachment lock, and the locks of this process's seats.
    pub(crate) lock: Arc<Lock>,
    /// The connection to the link's host, if that is another process.
    pub(crate) broker: Mutex<Option<Arc<OwnedFd>>>,
    /// The device memory of its pools that this process has, to be offered to the next host.
    pub(crate) memories: device::Memories,
    /// On a new host: the time until which participants may offer device memory that the last host had.
    gathering: OnceLock<Instant>,
}

impl Shared {
    /// The damage to a segment that was truncated under this process; only known for guarded mappings.
    pub(crate) fn damage(&self) -> Option<Error> {
        let segment = self.segments.iter().find(|segment| segment.memory.is_damaged())?;
        Some(self.store.truncated(segment.header.pool))
    }

    /// Whether the link has memory without names, which a host must hand out.
    fn has_descriptors(&self) -> bool {
        self.store.backing == Backing::Memfd || self.core.shape.device_pools().next().is_some()
    }

    /// Starts the time in which participants may offer device memory.
    fn begin_to_gather(&self) {
        let _ = self.gathering.set(Instant::now() + GATHERING);
    }

    /// Whether participants may still offer device memory that the last host had.
    fn is_gathering(&self) -> bool {
        self.gathering.get().is_some_and(|until| Instant::now() < *until)
    }

    fn broker(&self) -> MutexGuard<'_, Option<Arc<OwnedFd>>> {
        // The reference is replaced as a whole, so a poisoned lock guards a valid value.
        self.broker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the host which seat this process has: a sidecar may see deaths that this process's peers cannot.
    fn announce(&self, me: &Participant) {
        let Some(broker) = self.broker().clone() else { return };
        let seated = Seated { seat: me.seat.value().into(), word: me.word.value() };
        // Fails if the host has ended; then the next host is notified.
        let _ = socket::send_now(&broker, &packet::encode(&BrokerRequest::new(0, Op::Seated(seated))), &[]);
    }

    /// Takes a seat, and its lock.
    fn sit(&self, side: Side) -> Option<Participant> {
        let me = self.core.seats.attach(&self.me, side)?;
        // The lock is optional: without it, peers in other pid namespaces cannot detect our death.
        if self.lock.try_take_seat(me.seat.value()).unwrap_or(false) {
            self.core.seats.mark_locked(&me, self.lock.number());
        }
        Some(me)
    }

    /// Releases the lock of a seat, before the seat: its next participant may be of this process, and take the same lock.
    fn unlock(&self, me: &Participant) {
        if self.core.seats.is_seated(me) {
            self.core.seats.mark_locked(me, 0);
            self.lock.leave_seat(me.seat.value());
        }
    }

    /// Whether a participant is alive. Process ids of other pid namespaces say nothing, but the kernel releases the lock of
    /// a seat when its process ends, which is visible in every namespace.
    fn liveness(&self, other: &Participant) -> Liveness {
        if other.is_of(&self.me) && self.me.is_me() {
            return Liveness::Alive;
        }
        let known = other.liveness(&self.me);
        if known != Liveness::Unknown || other.is_of(&self.me) {
            return known;
        }
        liveness_by_lock(&self.core.seats, other, &self.lock)
    }

    /// Whether a participant's process is ending: it has closed its files, but is not gone yet.
    fn is_any_dying(&self) -> bool {
        self.core.seats.all().any(|other| {
            !other.is_of(&self.me) && liveness_by_lock(&self.core.seats, &other, &self.lock) == Liveness::Dead
        })
    }

    /// Participants that have ended, as far as this process can see.
    fn dead(&self) -> impl Iterator<Item = Participant> + '_ {
        self.core.seats.all().filter(|other| self.liveness(other) == Liveness::Dead)
    }

    /// Wakes all participants that wait, after a death: the dead one may have sent without waking them.
    fn wake_after_a_death(&self) {
        if !self.wake_for_events() {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        for ring in self.core.rings() {
            let waiting = crate::notify::waiting(ring);
            if !waiting.is_empty() {
                // If this process has no descriptors left, receivers with a bell will check with their next message.
                let _ = self.wake(ring, waiting, Cause::Event);
            }
        }
    }

    /// Wakes participants that wait, if there are events for which none was woken. Returns `false` if there are no such
    /// events.
    fn wake_for_events(&self) -> bool {
        self.core.seats.wake_for_events(|| self.wake_to_look_for_events())
    }

    /// Wakes participants that wait, whether they wait for messages or for events.
    fn wake_to_look_for_events(&self) {
        let seats = &self.core.seats;
        self.wake_all();
        let sleepers = seats.event_sleepers();
        if seats.is_any_taken(sleepers.asleep()) {
            sleepers.wake();
            sleepers.wake_seats(crate::notify::ALL_SEATS);
        }
    }
}

/// The tables of a link.
fn core_of(store: &Store, segments: &[Segment]) -> Result<Core> {
    let mut pools = [const { None }; PoolId::COUNT];
    for segment in &segments[1..] {
        if let Some(pool) = segment.header.pool {
            pools[pool as usize] = Some(Arc::clone(&segment.memory));
        }
    }
    Core::place(&segments[0].header.shape, &segments[0].memory, &pools).ok_or_else(|| {
        Error::from(ErrorKind::Damaged {
            link: Arc::clone(&store.link),
            what: store.path(None).display().to_string(),
            why: "its tables do not fit",
        })
    })
}

/// The liveness of a participant according to the lock of its seat.
pub(crate) fn liveness_by_lock(seats: &Seats, other: &Participant, lock: &Lock) -> Liveness {
    seats.liveness_by_lock(other, lock.number(), || lock.is_seat_taken(other.seat.value()))
}

/// One participant's handle on a link.
///
/// A handle belongs to one thread at a time: it is [`Send`] but not [`Sync`], because it keeps recently released buffers,
/// and its position in a ring with one producer, without locks. For another thread, create another handle with
/// [`try_clone`](Self::try_clone).
///
/// Dropping the handle detaches it: unsent loans are released, and sent messages stay sent. Only its seat stays taken while
/// an [`OwnedMessage`] or [`OwnedLoan`] of it lives.
///
/// A forked child must not use its parent's handles, as both would share one seat. It must attach its own.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use shmesh::config::LinkConfig;
/// use shmesh::{Link, LinkOptions, Side};
///
/// let config = LinkConfig::new("fronthaul".parse()?);
/// let options = LinkOptions::new().dir(dir.path());
/// let phy = options.create(&config)?;
/// let mac = options.attach("fronthaul", Side::Secondary)?;
///
/// let mut loan = mac.loan()?;
/// loan.resize_msg(5)?.copy_from_slice(b"hello");
/// loan.with_msg_id(7).send()?;
///
/// let message = phy.receive()?.expect("it was just sent");
/// assert_eq!((message.msg_id(), message.msg()), (7, &b"hello"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Link {
    endpoint: Endpoint,
    inline_buffers: inline_buffers::InlineBuffers,
    bell: Arc<bell::HandleBell>,
    peers: RefCell<PeerObserver>,
    shared: Arc<Shared>,
    /// Ends with the last handle.
    attachment: Arc<Attachment>,
    /// Ends with the handle and the last of its owned messages and loans.
    lease: Arc<lease::SeatLease>,
}

impl Link {
    /// The name of the link.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.store.link
    }

    /// The side of this handle.
    #[must_use]
    pub fn side(&self) -> Side {
        self.endpoint.side()
    }

    /// The seat of this participant, as in `shmesh ls` and `shmesh dump`.
    #[must_use]
    pub fn seat(&self) -> SeatIndex {
        self.endpoint.me.seat
    }

    /// Whether this process created the link. Otherwise it adopted one: of an earlier run, a sidecar, or another process.
    ///
    /// Handles from [`try_clone`](Self::try_clone) return the same as the first.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// let config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// let phy = options.create(&config)?;
    /// let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// assert!(phy.was_created() && !mac.was_created());
    /// drop(phy);
    /// let phy = options.create(&config)?; // what waits is still there
    /// assert!(!phy.was_created());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn was_created(&self) -> bool {
        self.shared.segments.first().is_some_and(|segment| segment.is_new)
    }

    /// Size in bytes and number of the buffers of `pool`; `None` if the link does not have the pool.
    #[must_use]
    pub fn pool(&self, pool: PoolId) -> Option<(u32, u32)> {
        Some(self.shared.core.shape.pools[pool as usize]).filter(|&(_, len)| len > 0)
    }

    /// The capacity of each ring in messages.
    ///
    /// This is the configured number, rounded up to a power of two.
    #[must_use]
    pub fn ring_len(&self) -> u32 {
        self.shared.core.shape.ring_capacity
    }

    /// Counts the messages that were sent to this side and not received yet. For diagnosis, as it walks through the ring.
    ///
    /// While other participants send and receive, the result is a snapshot.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// mac.send_inline(1, 0, b"first")?;
    /// mac.send_inline(1, 0, b"second")?;
    /// assert_eq!(phy.queued(), 2);
    /// drop(phy.receive()?);
    /// assert_eq!(phy.queued(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn queued(&self) -> usize {
        match self.incoming() {
            Ring::Broadcast(ring) => {
                usize::try_from(ring.waiting(self.endpoint.reader())).unwrap_or(usize::MAX)
            }
            ring => ring.queued().count(),
        }
    }

    /// Attaches another participant of this process, on the same side, for another thread.
    ///
    /// With ring mode `spsc`, one handle sends and one receives. The first handle that uses a role gets it.
    ///
    /// # Errors
    /// [`Crowded`](crate::ErrorKind::Crowded) if all seats are taken.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let receiver = link.try_clone()?;
    /// std::thread::spawn(move || receiver.receive().map(|message| message.is_none())).join().unwrap()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_clone(&self) -> Result<Self> {
        let clone = Self::seated(Arc::clone(&self.shared), Arc::clone(&self.attachment), self.side())?;
        clone.announce_attached();
        Ok(clone)
    }

    fn seated(shared: Arc<Shared>, attachment: Arc<Attachment>, side: Side) -> Result<Self> {
        let is_broadcast = shared.core.shape.broadcast.is_some() && side == Side::Secondary;
        let limit = if is_broadcast { MAX_READERS } else { MAX_SEATS };
        let sit = || {
            let me = shared.sit(side)?;
            let of_side = shared.core.seats.all().filter(|other| other.word.side() == side);
            if is_broadcast && of_side.count() > limit {
                shared.unlock(&me);
                shared.core.seats.vacate(&me);
                return None;
            }
            Some(me)
        };
        let crowded = || {
            // All seats are taken. Some participants may have died, and are recovered from their own seats.
            for dead in shared.dead() {
                shared.core.seats.record_end(&dead, SeatStage::Died);
                let done = shared.core.reclaim(&dead, dead.seat, false);
                shared.core.seats.count_recovered(done.participants);
            }
            shared.wake_for_events();
            sit()
        };
        let me = sit()
            .or_else(crowded)
            .ok_or_else(|| Error::from(ErrorKind::Crowded { link: Arc::clone(&shared.store.link), limit }))?;
        shared.announce(&me);
        let endpoint = Endpoint::new(&shared.core, me);
        let lease = lease::SeatLease::new(&shared, &endpoint, &attachment);
        Ok(Self {
            peers: RefCell::new(PeerObserver::new(&shared.core.seats, me.seat, me.word.side())),
            endpoint,
            inline_buffers: inline_buffers::InlineBuffers::default(),
            bell: bell::HandleBell::new(&lease),
            lease,
            shared,
            attachment,
        })
    }

    /// The memory with all buffers of a host pool: its start, its length with the padding between buffers, and the segment
    /// that keeps it mapped.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a driver locks them for DMA"))]
    pub(crate) fn host_buffers(&self, pool: PoolId) -> Option<(NonNull<u8>, usize, Arc<Memory>)> {
        let start = self.core().pool(pool)?.buffer(0);
        let segment = self.shared.segments.iter().find(|segment| segment.header.pool == Some(pool))?;
        let (size, len) = self.pool(pool)?;
        let bytes = usize::try_from(PoolLayout::of(pool, size, len).buffer_bytes()).ok()?;
        Some((start, bytes, Arc::clone(&segment.memory)))
    }

    #[inline]
    fn core(&self) -> &Core {
        &self.endpoint.core
    }

    #[inline]
    fn outgoing(&self) -> &Ring {
        &self.endpoint.outgoing
    }

    #[inline]
    fn incoming(&self) -> &Ring {
        &self.endpoint.incoming
    }

    /// A participant that was declared dead must not loan or receive: others have its buffers.
    #[inline]
    fn check_seated(&self) -> Result<()> {
        if self.endpoint.is_current() && !sigbus::any_damage() { Ok(()) } else { self.lease.check_whole() }
    }

    /// The producer's role in a ring with one producer. Its last holder may have died.
    #[inline(always)]
    fn producer(&self, ring: &spsc::Spsc) -> Result<&spsc::Producer> {
        match self.endpoint.held_producer() {
            Some(producer) => Ok(producer),
            None => self.become_producer(ring),
        }
    }

    #[cold]
    #[inline(never)]
    fn become_producer(&self, ring: &spsc::Spsc) -> Result<&spsc::Producer> {
        if let Ok(producer) = self.endpoint.producer(ring) {
            return Ok(producer);
        }
        let _uncancelled = Uncancelled::new();
        self.recover()?;
        self.endpoint.producer(ring).map_err(|holder| self.role_taken("producer", &holder))
    }

    #[inline(always)]
    fn consumer(&self, ring: &spsc::Spsc) -> Result<&spsc::Consumer> {
        match self.endpoint.held_consumer() {
            Some(consumer) => Ok(consumer),
            None => self.become_consumer(ring),
        }
    }

    #[cold]
    #[inline(never)]
    fn become_consumer(&self, ring: &spsc::Spsc) -> Result<&spsc::Consumer> {
        if let Ok(consumer) = self.endpoint.consumer(ring) {
            return Ok(consumer);
        }
        let _uncancelled = Uncancelled::new();
        self.recover()?;
        self.endpoint.consumer(ring).map_err(|holder| self.role_taken("consumer", &holder))
    }

    /// The writer's role in a broadcast ring.
    #[inline]
    fn writer(&self, ring: &Broadcast) -> Result<&Writer> {
        self.endpoint.writer(ring).or_else(|_| {
            let _uncancelled = Uncancelled::new();
            self.recover()?;
            self.endpoint.writer(ring).map_err(|holder| self.role_taken("producer", &holder))
        })
    }

    #[cold]
    fn role_taken(&self, role: &'static str, holder: &Participant) -> Error {
        Error::from(ErrorKind::RoleTaken {
            link: self.link(),
            role,
            seat: holder.seat.value(),
            pid: holder.word.pid(),
        })
    }

    fn link(&self) -> Arc<str> {
        self.lease.link()
    }

    #[cold]
    fn corrupt(&self, wild: WildWord) -> Error {
        self.lease.corrupt(wild)
    }

    #[cold]
    fn exhausted(&self, pool: PoolId) -> Error {
        match self.pool(pool) {
            Some((_, len)) => Error::from(ErrorKind::Exhausted { link: self.link(), pool, len }),
            None => Error::from(ErrorKind::NoPool { link: self.link(), pool }),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // A forked child has a copy of the handle, and must not detach its parent.
        if self.shared.me.is_me() {
            // Before the seat, which the lease gives up.
            self.endpoint.retire();
        }
    }
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use super::*;
    use crate::config::LinkConfig;

    /// The participant as seen from another pid namespace, where only the lock of its seat can be checked.
    fn from_elsewhere(seen: &Participant) -> Participant {
        Participant { pid_namespace: seen.pid_namespace + 1, ..*seen }
    }

    #[test]
    fn only_a_released_lock_in_the_links_file_means_death() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let phy = options.create(&LinkConfig::new("link".parse().unwrap())).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        let other = from_elsewhere(&mac.endpoint.me);
        let shared = &phy.shared;
        assert_eq!(shared.liveness(&other), Liveness::Alive, "its lock is taken");

        // Ends without detaching: the kernel releases the lock, and the mark stays.
        mac.shared.lock.leave_seat(other.seat.value());
        assert_eq!(shared.liveness(&other), Liveness::Dead);
        mac.core().seats.mark_locked(&mac.endpoint.me, shared.lock.number() + 1);
        assert_eq!(shared.liveness(&other), Liveness::Unknown, "locked in a file that is not ours");
        mac.core().seats.mark_locked(&mac.endpoint.me, 0);
        assert_eq!(shared.liveness(&other), Liveness::Unknown, "never locked, or just leaving");

        // A process never conflicts with its own locks, so they say nothing about itself.
        let mine = from_elsewhere(&phy.endpoint.me);
        assert_eq!(mac.shared.liveness(&mine), Liveness::Alive);
        assert_eq!(shared.liveness(&phy.endpoint.me), Liveness::Alive);
    }

    /// As if a participant had been killed between the change and the wake-up.
    #[test]
    fn monitor_wakes_for_missed_events() {
        use shmesh_sys::poll::{self, Watch};
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let phy = options.create(&LinkConfig::new("link".parse().unwrap())).unwrap();
        let fd = phy.fd().unwrap();
        let me = phy.shared.sit(Side::Secondary).unwrap();
        phy.core().seats.record_attached(&me);
        assert!(!poll::is_readable(&fd).unwrap());
        // The kernel closes its lock file when it ends.
        drop(Lock::open(&host::lock_path(&phy.shared.store)).unwrap());
        let mut watches = [Watch::readable(&fd)];
        while !poll::is_readable(&fd).unwrap() {
            poll::wait_once(&mut watches, None).unwrap();
        }
        assert!(phy.has_event());
    }

    /// A container that only has the socket, mounted into a directory of its own, creates its own lock file there. Inode
    /// numbers of each tmpfs start anew, so both files have the same number.
    #[test]
    fn lock_file_on_another_file_system_is_ignored() {
        use nix::mount::{MsFlags, mount};
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: this takes root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let dirs = ["theirs", "ours"].map(|name| dir.path().join(name));
        // In a thread of its own, with mounts that no other thread sees.
        let test = std::thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            for dir in &dirs {
                std::fs::create_dir(dir).unwrap();
                mount(none, dir, Some("tmpfs"), MsFlags::empty(), none).unwrap();
            }
            let mut config = LinkConfig::new("link".parse().unwrap());
            config.backing = Backing::Memfd;
            let phy = LinkOptions::new().dir(&dirs[0]).create(&config).unwrap();
            // The same socket, according to another lock file.
            let (host, socket) = phy.shared.lock.host().unwrap().unwrap();
            let [path, other] = [0, 1].map(|i| host::socket_path(&Store::new(&config, &dirs[i]), socket));
            let lock = Lock::open_or_make(&dirs[1].join("link.lock"), 0o600).unwrap().unwrap();
            assert!(lock.try_publish(host, socket).unwrap());
            std::os::unix::fs::symlink(path, other).unwrap();
            let mac = LinkOptions::new().dir(&dirs[1]).attach("link", Side::Secondary).unwrap();
            let number = |dir: &std::path::PathBuf| {
                std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(dir.join("link.lock")).unwrap())
            };
            assert_eq!(number(&dirs[0]), number(&dirs[1]), "of different files");
            let other = from_elsewhere(&phy.endpoint.me);
            assert_eq!(mac.shared.liveness(&other), Liveness::Unknown, "the lock file says nothing");
        });
        test.join().unwrap();
    }

    #[test]
    fn handles_of_one_process_take_turns_in_one_seat() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let phy = options.create(&LinkConfig::new("link".parse().unwrap())).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        let first = phy.try_clone().unwrap();
        let (seat, before) = (first.seat(), first.endpoint.me);
        drop(first);
        assert_eq!(mac.shared.liveness(&from_elsewhere(&before)), Liveness::Unknown, "it has left");
        assert!(!mac.shared.lock.is_seat_taken(seat.value()).unwrap());
        let second = phy.try_clone().unwrap();
        assert_eq!(second.seat(), seat);
        assert_eq!(mac.shared.liveness(&from_elsewhere(&second.endpoint.me)), Liveness::Alive, "it is here");
        assert!(mac.shared.lock.is_seat_taken(seat.value()).unwrap());
    }
}
