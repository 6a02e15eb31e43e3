//! Links: what applications use.
//!
//! | file | concept |
//! |---|---|
//! | `core.rs` | all tables of a link, and the steps that move a buffer from hand to hand |
//! | `open.rs` | creating, attaching, adopting what a crash left |
//! | `holder.rs` | who keeps the descriptors and hands them to newcomers |
//! | `loan.rs` | [`Loan`]: a message being written; sending |
//! | `message.rs` | [`Message`]: a message received |
//! | `wait.rs` | polling, spinning, sleeping; the file descriptor |
//! | `recover.rs` | taking back what dead participants held |

pub(crate) mod core;
mod holder;
mod loan;
mod message;
mod open;
mod recover;
mod wait;

use std::cell::{Cell, OnceCell};
use std::sync::Arc;

use crate::config::PoolId;
use crate::error::{Error, Result};
use crate::participant::{MAX_SEATS, Participant, Role, SeatIndex, Side};
use crate::pool::hints::Recent;
use crate::ring::{CONSUMER_ROLE, PRODUCER_ROLE, Ring, Wild, spsc};
use crate::segment::store::{Segment, Store};
use crate::sys::eventfd::Doorbell;
use crate::sys::process::ProcessIdentity;
use core::{Core, TABLES};
pub use core::Recovered;
pub use loan::{Loan, SendError};
pub use message::Message;
pub use open::LinkOptions;

/// What all handles of this process on one link share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) core: Core,
    pub(crate) store: Store,
    pub(crate) me: ProcessIdentity,
    /// The link's own segment, then the pools: kept to be handed to newcomers.
    pub(crate) segments: Vec<Segment>,
    /// One per ring, in the order of `Core::rings`.
    pub(crate) doorbells: Option<[Doorbell; 2]>,
    pub(crate) spin_us: u32,
}

/// One participant's handle on a link.
///
/// A handle belongs to one thread at a time: it is [`Send`] and not [`Sync`], because it keeps the buffers it released
/// last, and its place in a ring with one producer, without locks. Each further thread takes its own with
/// [`try_clone`](Self::try_clone).
///
/// Dropping the handle detaches it: what it loaned and did not send comes back, what it sent stays sent.
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
/// loan.msg_mut(5)?.copy_from_slice(b"hello");
/// loan.set_msg_id(7).send()?;
///
/// let message = phy.receive()?.expect("it was just sent");
/// assert_eq!((message.msg_id(), message.msg()), (7, &b"hello"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Link {
    me: Participant,
    side: Side,
    recents: [Recent; TABLES],
    producer: OnceCell<spsc::Producer>,
    consumer: OnceCell<spsc::Consumer>,
    /// The file descriptor was handed out, so every notification must reach it.
    armed: Cell<bool>,
    shared: Arc<Shared>,
    /// Keeps the descriptors available to newcomers; after `shared`, so that the last handle stops it first.
    holder: Arc<holder::Holder>,
}

impl Link {
    /// The name of the link.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.store.link
    }

    /// Which side this handle is on.
    #[must_use]
    pub fn side(&self) -> Side {
        self.side
    }

    /// Where this participant sits: what `shmesh ls` and `shmesh dump` call it.
    #[must_use]
    pub fn seat(&self) -> SeatIndex {
        self.me.seat
    }

    /// Size of a buffer of `pool` in bytes, and how many there are; `None` when the link does not have the pool.
    #[must_use]
    pub fn pool(&self, pool: PoolId) -> Option<(u32, u32)> {
        Some(self.shared.core.shape.pools[pool as usize]).filter(|&(_, len)| len > 0)
    }

    /// Messages that each direction can hold.
    #[must_use]
    pub fn ring_len(&self) -> u32 {
        self.shared.core.shape.ring_capacity
    }

    /// Messages that were sent to this side and not received yet, counted one by one: for diagnosis.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.incoming().queued().count()
    }

    /// Attaches another participant of this process, on the same side, for another thread.
    ///
    /// With ring mode `spsc`, one handle sends and one receives; the role belongs to the first that uses it.
    ///
    /// # Errors
    /// [`Error::Crowded`] when all seats are taken.
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
        Self::seated(Arc::clone(&self.shared), Arc::clone(&self.holder), self.side)
    }

    fn seated(shared: Arc<Shared>, holder: Arc<holder::Holder>, side: Side) -> Result<Self> {
        let me = shared.core.seats.attach(&shared.me, side).ok_or_else(|| Error::Crowded {
            link: Arc::clone(&shared.store.link),
            limit: MAX_SEATS,
        })?;
        Ok(Self {
            me,
            side,
            recents: std::array::from_fn(|_| Recent::new()),
            producer: OnceCell::new(),
            consumer: OnceCell::new(),
            armed: Cell::new(false),
            shared,
            holder,
        })
    }

    #[inline]
    fn core(&self) -> &Core {
        &self.shared.core
    }

    #[inline]
    fn outgoing(&self) -> &Ring {
        self.core().outgoing(self.side)
    }

    #[inline]
    fn incoming(&self) -> &Ring {
        self.core().incoming(self.side)
    }

    /// Nothing may be loaned or received by a participant that was declared dead: others have what it held.
    #[inline]
    fn check_seated(&self) -> Result<()> {
        if self.core().seats.is_current(&self.me) { Ok(()) } else { Err(self.evicted()) }
    }

    /// This participant's state as producer of a ring with one; takes the role at the first use.
    #[inline]
    fn producer<'a>(&'a self, ring: &'a spsc::Spsc) -> Result<&'a spsc::Producer> {
        match self.producer.get() {
            Some(producer) => Ok(producer),
            None => {
                self.claim_role(PRODUCER_ROLE, "producer")?;
                Ok(self.producer.get_or_init(|| ring.resume_producer()))
            }
        }
    }

    /// As `producer`, for the consumer.
    #[inline]
    fn consumer<'a>(&'a self, ring: &'a spsc::Spsc) -> Result<&'a spsc::Consumer> {
        match self.consumer.get() {
            Some(consumer) => Ok(consumer),
            None => {
                self.claim_role(CONSUMER_ROLE, "consumer")?;
                Ok(self.consumer.get_or_init(|| ring.resume_consumer()))
            }
        }
    }

    #[cold]
    fn claim_role(&self, line: usize, name: &'static str) -> Result<()> {
        self.check_seated()?;
        let ring = if line == PRODUCER_ROLE { self.outgoing() } else { self.incoming() };
        let role = Role(ring.words().control(line));
        if role.claim(&self.me, &self.core().seats).is_ok() {
            return Ok(());
        }
        // Its holder may have died.
        self.recover()?;
        role.claim(&self.me, &self.core().seats).map_err(|holder| Error::RoleTaken {
            link: self.link(),
            role: name,
            seat: holder.seat.value(),
            pid: holder.word.pid(),
        })
    }

    fn link(&self) -> Arc<str> {
        Arc::clone(&self.shared.store.link)
    }

    #[cold]
    fn evicted(&self) -> Error {
        Error::Evicted { link: self.link() }
    }

    #[cold]
    fn corrupt(&self, Wild(what): Wild) -> Error {
        Error::Corrupt { link: self.link(), what }
    }

    #[cold]
    fn exhausted(&self, pool: PoolId) -> Error {
        match self.pool(pool) {
            Some((_, len)) => Error::Exhausted { link: self.link(), pool, len },
            None => Error::NoPool { link: self.link(), pool },
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let core = self.core();
        for ring in core.rings() {
            Role(ring.words().control(PRODUCER_ROLE)).release(&self.me);
            Role(ring.words().control(CONSUMER_ROLE)).release(&self.me);
        }
        core.primary_role().release(&self.me);
        // Also what was forgotten: a loan that was leaked must not outlive its participant.
        if core.seats.is_current(&self.me) {
            core.reclaim(&self.me, self.me.seat, false);
        }
    }
}
