//! Links: what applications use.
//!
//! | file | concept |
//! |---|---|
//! | `async_link.rs` | [`AsyncLink`]: a link in tasks of tokio (feature `tokio`) |
//! | `async_bell.rs`, `async_request.rs` | the bell that the tasks of a handle share; [`AsyncPendingReply`] and [`AsyncRequest`] |
//! | `attachment.rs` | what all handles of this process share, and leaving the link |
//! | `bell.rs` | named sockets that wake receivers in poll and epoll |
//! | `broadcast.rs` | readers of a broadcast ring: how many there are, what they lost, and evicting them |
//! | `core.rs` | all tables of a link, and the steps that move a buffer from hand to hand |
//! | `endpoint.rs` | the same, seen from one participant's seat |
//! | `empty.rs` | emptying a link that an earlier run left |
//! | `device.rs` | the device memory of pools, from hand to hand |
//! | `events.rs` | other participants attach, detach and die |
//! | `monitor.rs` | one thread that watches all links of the process |
//! | `open.rs` | creating, attaching, adopting what a crash left |
//! | `host/` | handing out what has no name: [`LinkHost`] for sidecars, and what a process does that creates a link without one |
//! | `lease.rs` | what keeps a seat: the handle, owned messages and owned loans |
//! | `loan.rs` | [`Loan`]: a message being written; sending |
//! | `message.rs` | [`Message`]: a message received |
//! | `owned.rs` | [`OwnedMessage`] and [`OwnedLoan`]: the same, without a borrow of the link |
//! | `reap.rs` | looking for the dead |
//! | `owned_request.rs` | [`OwnedPendingReply`] and [`OwnedRequest`]: requests without a borrow of the link |
//! | `shared_bytes.rs` | [`SharedBytes`]: payload that another process may change |
//! | `inline_buffers.rs` | where the bytes of received inline messages stay |
//! | `typed.rs` | [`TypedLink`]: messages that are values of one type (feature `typed`) |
//! | `wait.rs` | polling, spinning, sleeping; the file descriptor |
//! | `request.rs`, `request_steps.rs` | requests and their replies: what applications use, and the steps on shared memory |
//! | `recover.rs` | taking back what dead participants held |

#[cfg(feature = "tokio")]
mod async_bell;
#[cfg(feature = "tokio")]
mod async_link;
#[cfg(feature = "tokio")]
mod async_request;
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
mod reap;
mod recover;
mod request;
pub(crate) mod request_steps;
mod shared_bytes;
#[cfg(feature = "typed")]
mod typed;
mod wait;

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
use crate::participant::{MAX_SEATS, Participant, PeerObserver, SeatIndex, Seats, Side, Stage};
use crate::ring::broadcast::{Broadcast, Writer};
use crate::ring::{Ring, Wild, spsc};
use crate::segment::Memory;
use crate::segment::layout::PoolLayout;
use crate::segment::lock::Lock;
use crate::segment::store::{Segment, Store};
#[cfg(feature = "tokio")]
pub use async_link::AsyncLink;
#[cfg(feature = "tokio")]
pub use async_request::{AsyncPendingReply, AsyncRequest};
use attachment::Attachment;
use bell::Cause;
use core::Core;
pub use core::Recovered;
use endpoint::Endpoint;
pub use events::WaitOutcome;
pub use host::{LinkHost, LinkHostOffer};
pub use loan::{Loan, SendError};
pub use message::Message;
pub use open::{DEFAULT_DIR, DIR_VARIABLE, LinkOptions};
pub use owned::{OwnedLoan, OwnedMessage};
pub use owned_request::{OwnedPendingReply, OwnedRequest, ReplyError};
pub use request::{PendingReply, REPLIES_MAX, REQUEST_INLINE_MAX_BYTES, Request};
pub use shared_bytes::SharedBytes;
#[cfg(feature = "typed")]
pub use typed::{Payload, TypedLink, TypedLoan, TypedMessage, TypedSendError};

/// How long participants may take to offer device memory to a new host.
const GATHERING: Duration = Duration::from_millis(1500);

/// What all handles of this process on one link share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) core: Core,
    pub(crate) store: Store,
    pub(crate) me: ProcessIdentity,
    /// The link's own segment, then the pools.
    pub(crate) segments: Vec<Segment>,
    /// Receivers may sleep, and senders wake them.
    pub(crate) notify: bool,
    bells: bell::Bells,
    /// User and group of the link's own segment.
    owner: Option<(u32, u32)>,
    pub(crate) spin_us: u32,
    /// The lock file: the host's lock, presence, and the seats of this process.
    pub(crate) lock: Lock,
    /// The connection to the link's host, while another process is that.
    pub(crate) broker: Mutex<Option<Arc<OwnedFd>>>,
    /// The device memory of its pools, as far as this process knows: kept to be offered to the next host.
    pub(crate) memories: device::Memories,
    /// A new host: until then participants may offer device memory that the last one had.
    gathering: OnceLock<Instant>,
}

impl Shared {
    /// What is wrong with a segment whose file was truncated under it; known of guarded mappings alone.
    pub(crate) fn damage(&self) -> Option<Error> {
        let segment = self.segments.iter().find(|segment| segment.memory.is_damaged())?;
        Some(self.store.truncated(segment.header.pool))
    }

    /// Whether there is anything that has no name, so that somebody has to hand it out.
    fn has_descriptors(&self) -> bool {
        self.store.backing == Backing::Memfd || self.core.shape.device_pools().next().is_some()
    }

    /// Waits a while with saying that there is no device memory.
    fn begin_to_gather(&self) {
        let _ = self.gathering.set(Instant::now() + GATHERING);
    }

    /// Whether participants may still offer device memory that the last host had.
    fn is_gathering(&self) -> bool {
        self.gathering.get().is_some_and(|until| Instant::now() < *until)
    }

    fn broker(&self) -> MutexGuard<'_, Option<Arc<OwnedFd>>> {
        // A reference is replaced whole.
        self.broker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the host which seat is this process's: it may see a death where this process's peers cannot.
    fn announce(&self, me: &Participant) {
        let Some(broker) = self.broker().clone() else { return };
        let seated = Seated { seat: me.seat.value().into(), word: me.word.value() };
        // Refused if it has gone; then the next host is told.
        let _ = socket::send_now(&broker, &packet::encode(&BrokerRequest::new(0, Op::Seated(seated))), &[]);
    }

    /// Takes a seat, and its lock.
    fn sit(&self, side: Side) -> Option<Participant> {
        let me = self.core.seats.attach(&self.me, side)?;
        // Without its lock a seat is as good; only a death is not seen from other pid namespaces.
        if self.lock.try_take_seat(me.seat.value()).unwrap_or(false) {
            self.core.seats.mark_locked(&me, self.lock.number());
        }
        Some(me)
    }

    /// Gives the lock of a seat up, before the seat: the next one in it may be of this process, and take the same lock.
    fn unlock(&self, me: &Participant) {
        if self.core.seats.is_seated(me) {
            self.core.seats.mark_locked(me, 0);
            self.lock.leave_seat(me.seat.value());
        }
    }

    /// Whether a participant lives. Numbers of other pid namespaces say nothing, but the kernel frees the lock of a seat when
    /// its process ends, and says so everywhere.
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

    /// Whether a participant's process has begun to end, and closed its files, and is not gone yet.
    fn is_any_dying(&self) -> bool {
        self.core.seats.all().any(|other| {
            !other.is_of(&self.me) && liveness_by_lock(&self.core.seats, &other, &self.lock) == Liveness::Dead
        })
    }

    /// Everybody who has ended, as far as this process can see.
    fn dead(&self) -> impl Iterator<Item = Participant> + '_ {
        self.core.seats.all().filter(|other| self.liveness(other) == Liveness::Dead)
    }

    /// Wakes all participants that wait, after a death: the dead one may have sent and not woken them.
    fn wake_after_a_death(&self) {
        if !self.wake_for_events() {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        for ring in self.core.rings() {
            let waiting = crate::notify::waiting(ring);
            if !waiting.nobody() {
                // Without descriptors, who has a bell looks again when the next message comes.
                let _ = self.wake(ring, waiting, Cause::Event);
            }
        }
    }

    /// Wakes participants that wait, if there are events for which they were not woken. `false`: there are none.
    fn wake_for_events(&self) -> bool {
        let seats = &self.core.seats;
        seats.wake_for_events(|| {
            self.wake_all();
            let sleepers = seats.event_sleepers();
            if seats.is_any_taken(sleepers.asleep()) {
                sleepers.wake();
                sleepers.wake_all();
            }
        })
    }
}

/// What the lock of a participant's seat says of it.
pub(crate) fn liveness_by_lock(seats: &Seats, other: &Participant, lock: &Lock) -> Liveness {
    seats.liveness_by_lock(other, lock.number(), || lock.is_seat_taken(other.seat.value()))
}

/// One participant's handle on a link.
///
/// A handle belongs to one thread at a time: it is [`Send`] and not [`Sync`], because it keeps the buffers it released
/// last, and its place in a ring with one producer, without locks. Each further thread takes its own with
/// [`try_clone`](Self::try_clone).
///
/// Dropping the handle detaches it: what it loaned and did not send comes back, what it sent stays sent. Only its seat stays while
/// an [`OwnedMessage`] or [`OwnedLoan`] of it lives.
///
/// A child that was forked must not use its parent's handles, as they would share one seat: it attaches its own.
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
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// assert_eq!(mac.name(), "fronthaul");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.store.link
    }

    /// Which side this handle is on.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use shmesh::Side;
    /// assert_eq!((phy.side(), mac.side()), (Side::Primary, Side::Secondary));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn side(&self) -> Side {
        self.endpoint.side()
    }

    /// Where this participant sits: what `shmesh ls` and `shmesh dump` call it.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// assert_ne!(phy.seat(), mac.seat(), "each handle has a seat of its own");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn seat(&self) -> SeatIndex {
        self.endpoint.me.seat
    }

    /// Whether this process made the link, rather than found one: of an earlier run, of a sidecar, or of another process.
    ///
    /// Handles that [`try_clone`](Self::try_clone) makes say the same as the first.
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

    /// Size of a buffer of `pool` in bytes, and how many there are; `None` when the link does not have the pool.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::config::PoolId;
    /// assert_eq!(link.pool(PoolId::CpuMsg), Some((8192, 1024)));
    /// assert_eq!(link.pool(PoolId::CpuLarge), None, "off unless configured");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn pool(&self, pool: PoolId) -> Option<(u32, u32)> {
        Some(self.shared.core.shape.pools[pool as usize]).filter(|&(_, len)| len > 0)
    }

    /// Messages that each direction can hold.
    ///
    /// The configured number, rounded up to a power of two.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// config.ring_len = 1000;
    /// let link = options.create(&config)?;
    /// assert_eq!(link.ring_len(), 1024);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn ring_len(&self) -> u32 {
        self.shared.core.shape.ring_capacity
    }

    /// Messages that were sent to this side and not received yet, counted one by one: for diagnosis.
    ///
    /// While others send and receive, it is a moment's view.
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
    /// With ring mode `spsc`, one handle sends and one receives; the role belongs to the first that uses it.
    ///
    /// # Errors
    /// [`Crowded`](crate::ErrorKind::Crowded) when all seats are taken.
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
            // Some may have died, and there is no seat to take back from what they held: it is done from their own.
            for dead in shared.dead() {
                shared.core.seats.record_end(&dead, Stage::Died);
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
            peers: RefCell::new(PeerObserver::new(&shared.core.seats, me.seat)),
            endpoint,
            inline_buffers: inline_buffers::InlineBuffers::default(),
            bell: bell::HandleBell::new(&lease),
            lease,
            shared,
            attachment,
        })
    }

    /// All buffers of a pool that are here: where they begin, how many bytes they take with what lies between them, and what
    /// keeps them.
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

    /// Nothing may be loaned or received by a participant that was declared dead: others have what it held.
    #[inline]
    fn check_seated(&self) -> Result<()> {
        if self.endpoint.is_current() && !sigbus::any_damage() { Ok(()) } else { self.lease.check_whole() }
    }

    /// The place in a ring with one producer; its last holder may have died.
    #[inline(always)]
    fn producer(&self, ring: &spsc::Spsc) -> Result<&spsc::Producer> {
        self.endpoint.producer(ring).or_else(|_| self.producer_after_recovery(ring))
    }

    #[cold]
    fn producer_after_recovery(&self, ring: &spsc::Spsc) -> Result<&spsc::Producer> {
        let _uncancelled = Uncancelled::new();
        self.recover()?;
        self.endpoint.producer(ring).map_err(|holder| self.role_taken("producer", &holder))
    }

    #[inline(always)]
    fn consumer(&self, ring: &spsc::Spsc) -> Result<&spsc::Consumer> {
        self.endpoint.consumer(ring).or_else(|_| self.consumer_after_recovery(ring))
    }

    #[cold]
    fn consumer_after_recovery(&self, ring: &spsc::Spsc) -> Result<&spsc::Consumer> {
        let _uncancelled = Uncancelled::new();
        self.recover()?;
        self.endpoint.consumer(ring).map_err(|holder| self.role_taken("consumer", &holder))
    }

    /// The writer's place in a broadcast ring.
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
    fn corrupt(&self, wild: Wild) -> Error {
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
        // A forked child has a copy of the handle, and no right to give up the parent's seat.
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

    /// As it would look from another pid namespace: of the same participant, only the lock of its seat says anything.
    fn from_elsewhere(seen: &Participant) -> Participant {
        Participant { pid_namespace: seen.pid_namespace + 1, ..*seen }
    }

    #[test]
    fn only_a_lock_that_is_free_in_the_right_file_shows_a_death() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let phy = options.create(&LinkConfig::new("link".parse().unwrap())).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        let other = from_elsewhere(&mac.endpoint.me);
        let shared = &phy.shared;
        assert_eq!(shared.liveness(&other), Liveness::Alive, "its lock is taken");

        // Ends without leaving: the kernel gives the lock up, and nobody takes the mark away.
        mac.shared.lock.leave_seat(other.seat.value());
        assert_eq!(shared.liveness(&other), Liveness::Dead);
        mac.core().seats.mark_locked(&mac.endpoint.me, shared.lock.number() + 1);
        assert_eq!(shared.liveness(&other), Liveness::Unknown, "locked in a file that is not ours");
        mac.core().seats.mark_locked(&mac.endpoint.me, 0);
        assert_eq!(shared.liveness(&other), Liveness::Unknown, "never locked, or just leaving");

        // Our own locks never stand in our way, so they say nothing of ourselves.
        let mine = from_elsewhere(&phy.endpoint.me);
        assert_eq!(mac.shared.liveness(&mine), Liveness::Alive);
        assert_eq!(shared.liveness(&phy.endpoint.me), Liveness::Alive);
    }

    /// As if a participant had been killed between the change and the wake-up.
    #[test]
    fn monitor_wakes_for_events_that_nobody_was_woken_for() {
        use shmesh_sys::poll::{self, Watch};
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let phy = options.create(&LinkConfig::new("link".parse().unwrap())).unwrap();
        let fd = phy.fd().unwrap();
        let me = phy.shared.sit(Side::Secondary).unwrap();
        phy.core().seats.record_attached(&me);
        assert!(!poll::is_readable(&fd).unwrap());
        // Its lock file is closed when it ends.
        drop(Lock::open(&host::lock_path(&phy.shared.store)).unwrap());
        let mut watches = [Watch::readable(&fd)];
        while !poll::is_readable(&fd).unwrap() {
            poll::wait_once(&mut watches, None).unwrap();
        }
        assert!(phy.has_event());
    }

    /// A container that has only the socket, mounted into a directory of its own, makes a lock file of its own there. The
    /// files of a tmpfs are numbered from its beginning, so that both have the same number.
    #[test]
    fn a_lock_file_on_another_file_system_says_nothing() {
        use nix::mount::{MsFlags, mount};
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: this takes root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let dirs = ["theirs", "ours"].map(|name| dir.path().join(name));
        // In a thread of its own, whose mounts nobody else sees.
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
            // The same socket, as another lock file says.
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
            assert_eq!(mac.shared.liveness(&other), Liveness::Unknown, "it lives");
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
