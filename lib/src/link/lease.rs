//! The lease of a seat, which the handle of a participant shares with everything that outlives a borrow of it. All its
//! steps can be taken in any thread.

use std::sync::{Arc, Mutex, PoisonError};

use super::Shared;
use super::attachment::Attachment;
use super::core::{Core, DataRef, INLINE};
use super::endpoint::Endpoint;
use super::request_steps::RequestSteps;
use crate::error::{Error, ErrorKind, Result};
use crate::notify::Sleepers;
use crate::participant::Participant;
use crate::participant::times::{Time, now};
use crate::pool::owner::MsgOwner;
use crate::ring::broadcast::{OwnedReads, ReadToken};
use crate::ring::reply::Window;
use crate::ring::{Ring, WildWord};
use shmesh_sys::sigbus;

/// A participant's right to its seat. The last owner that drops it detaches the participant.
///
/// Every owner word with this seat is of a buffer that the handle or an owned message holds. So the seat must not be reused
/// before all of them are gone.
#[derive(Debug)]
pub(super) struct SeatLease {
    pub(super) shared: Arc<Shared>,
    pub(super) me: Participant,
    window: Arc<Window>,
    /// The owned messages from a broadcast ring.
    reads: Option<Arc<OwnedReads>>,
    /// Number of threads that sleep until a message or reply is sent to this seat.
    pub(super) asleep: Arc<Mutex<u32>>,
    /// While it has a seat, the process stays present on the link and its monitor runs.
    _attachment: Arc<Attachment>,
}

impl SeatLease {
    pub(super) fn new(shared: &Arc<Shared>, endpoint: &Endpoint, attachment: &Arc<Attachment>) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::clone(shared),
            me: endpoint.me,
            window: Arc::clone(&endpoint.window),
            reads: endpoint.owned_reads(),
            asleep: Arc::default(),
            _attachment: Arc::clone(attachment),
        })
    }

    #[inline]
    pub(super) fn core(&self) -> &Core {
        &self.shared.core
    }

    pub(super) fn link(&self) -> Arc<str> {
        Arc::clone(&self.shared.store.link)
    }

    /// Frees the buffers of a message or loan, from any thread.
    pub(super) fn release(&self, cell: u32, owner: MsgOwner, data: DataRef) {
        // A forked child has copies of what its parent holds.
        if !self.shared.me.is_me() {
            return;
        }
        let core = self.core();
        if let (Some(token), Some(reads)) = (owner.token(), &self.reads) {
            if let Ring::Broadcast(ring) = core.incoming(self.me.word.side()) {
                ring.release_owned(reads, &self.me, &core.seats, ReadToken(token));
            }
        } else {
            // Fails only if the participant was evicted.
            let _ = core.release_anywhere(cell, owner, data);
        }
    }

    /// Counts how long a sampled message was held, which was received at this time.
    #[cold]
    pub(super) fn count_hold(&self, since: u64) {
        if let Some(times) =
            self.core().times.as_ref().filter(|_| self.shared.me.is_me() && self.is_current())
        {
            times.count(self.me.seat, Time::Hold, now().saturating_sub(since));
        }
    }

    /// Whether this participant still has its seat and was not evicted.
    #[inline]
    pub(super) fn is_current(&self) -> bool {
        self.core().seats.is_current(&self.me)
    }

    /// Checks the seat, as [`Link::check_seated`](super::Link::check_seated).
    #[inline]
    pub(super) fn check_seated(&self) -> Result<()> {
        if self.is_current() && !sigbus::any_damage() { Ok(()) } else { self.check_whole() }
    }

    /// A link of this process was damaged, or this participant has lost its seat.
    #[cold]
    pub(super) fn check_whole(&self) -> Result<()> {
        match self.shared.damage() {
            Some(damage) => Err(damage),
            None if self.is_current() => Ok(()),
            None => Err(self.evicted()),
        }
    }

    #[cold]
    pub(super) fn evicted(&self) -> Error {
        // A truncated seat reads as a vacant one.
        let evicted = || ErrorKind::Evicted { link: self.link() }.into();
        self.shared.damage().unwrap_or_else(evicted)
    }

    #[cold]
    pub(super) fn corrupt(&self, WildWord(what): WildWord) -> Error {
        // If it was evicted during the call, other participants may have changed its buffers.
        if let Err(error) = self.check_seated() {
            return error;
        }
        Error::from(ErrorKind::Corrupt { link: self.link(), what })
    }

    #[cold]
    pub(super) fn inline_exhausted(&self) -> Error {
        let len = self.core().inline().map_or(0, |table| table.len());
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        Error::from(ErrorKind::InlineExhausted { link: self.link(), len })
    }

    /// FENCE: after a message was sent on a ring with many producers.
    #[inline]
    pub(super) fn check_not_overtaken(&self) -> Result<()> {
        if self.is_current() { Ok(()) } else { Err(self.overtaken()) }
    }

    /// The message may have been sent, and after the error the caller will not notify.
    #[cold]
    pub(super) fn overtaken(&self) -> Error {
        self.shared.wake_after_a_death();
        self.evicted()
    }

    /// The ring on which this participant sends.
    pub(super) fn outgoing(&self) -> &Ring {
        self.core().outgoing(self.me.word.side())
    }

    /// The words on which threads sleep until something is sent to this seat.
    pub(super) fn sleepers(&self) -> Sleepers<'_> {
        Sleepers::of(self.core().incoming(self.me.word.side()))
    }

    /// Announces that one more thread is about to sleep. A seat may have several.
    pub(super) fn fall_asleep(&self) {
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        *asleep += 1;
        self.sleepers().fall_asleep(self.me.seat);
    }

    /// Announces that one of them is awake.
    pub(super) fn wake_up(&self) {
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        *asleep -= 1;
        if *asleep == 0 {
            self.sleepers().wake_up(self.me.seat);
        }
    }
}

impl RequestSteps for SeatLease {
    #[inline]
    fn core(&self) -> &Core {
        &self.shared.core
    }

    #[inline]
    fn me(&self) -> &Participant {
        &self.me
    }

    #[inline]
    fn window(&self) -> &Window {
        &self.window
    }

    fn free(&self, cell: u32, owner: MsgOwner, data: DataRef) {
        self.release(cell, owner, data);
    }

    fn free_inline(&self, cell: u32, owner: MsgOwner) {
        if let Some(table) = self.shared.core.inline()
            && self.shared.me.is_me()
        {
            table.release(cell, owner.0, owner.freed().0);
        }
    }

    fn claim_inline(&self) -> Option<(u32, MsgOwner)> {
        let next = |free| MsgOwner(free).loaned(self.me.seat).0;
        let (index, word) = self.shared.core.table(INLINE)?.claim(next)?;
        Some((index, MsgOwner(word)))
    }
}

impl Drop for SeatLease {
    fn drop(&mut self) {
        // A forked child must not give up its parent's seat.
        if self.shared.me.is_me() {
            self.shared.unlock(&self.me);
            self.shared.core.leave(&self.me);
            self.shared.wake_for_events();
        }
    }
}
