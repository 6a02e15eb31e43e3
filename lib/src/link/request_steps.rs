//! The steps of requests and replies on shared memory, from one participant's seat. [`super::request`] is the interface.
//!
//! A request is a message on a ring of its own, with its id in the cell of its MSG buffer, or before the bytes in its
//! inline cell. The server holds that buffer or cell until the request is over. So the owner words show which server has
//! which request, and recovery of a dead server finds the clients that wait for it; see
//! [`Core::reclaim`](super::core::Core::reclaim).

use super::core::{Core, DataRef, INLINE, Requests, inline_request_word};
use super::endpoint::Endpoint;
use crate::config::PoolId;
use crate::participant::{Participant, SeatIndex};
use crate::pool::owner::{Holder, MsgOwner};
use crate::ring::entry::RingEntry;
use crate::ring::mpmc::{Mpmc, PushError};
use crate::ring::reply::{ReplyOutcome, ReplySlot, RequestId, Status, TakenReply, Window};
use crate::ring::{INLINE_MAX_BYTES, Ring, WildWord};
use crate::sync::{Ordering, fence};

/// A request that was taken off the ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TakenRequest {
    pub(crate) id: RequestId,
    pub(crate) entry: RingEntry,
    /// The owner word of the buffer or cell, which the server holds until the request is over.
    pub(crate) owner: MsgOwner,
}

/// The reason why an inline request could not be sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum InlineError {
    NoCell,
    Push(PushError),
}

impl Requests {
    #[inline]
    fn mpmc(&self) -> &Mpmc {
        match &self.ring {
            Ring::Mpmc(ring) => ring,
            Ring::Spsc(_) | Ring::Broadcast(_) => unreachable!("`Core::place` makes a ring for many"),
        }
    }
}

/// The share of the buffers that clients can leave unread: see [`ReplyShare`](crate::ring::reply_share::ReplyShare).
impl Core {
    #[inline]
    fn has_share_of(&self, requests: &Requests, id: RequestId, position: u64, place: usize) -> bool {
        requests.shares[place].is_none_or(|share| {
            let is_here = |entry: RingEntry| self.is_reply_in(entry, place);
            share.allows(&requests.replies, &self.seats, id, position, is_here)
        })
    }

    /// Whether a reply, which its client may take and free meanwhile, has a buffer or cell in this table.
    fn is_reply_in(&self, entry: RingEntry, place: usize) -> bool {
        if entry.is_inline() || place == INLINE || place == PoolId::CpuMsg as usize {
            return entry.is_inline() == (place == INLINE);
        }
        let cell = self.msg().table.tame(entry.wild_cell());
        let data = cell.and_then(|cell| self.peek_descriptor(cell).1.parts());
        data.is_some_and(|(pool, _)| pool as usize == place)
    }

    /// The tables with the buffers of a reply, which its sender holds. The same twice if there is one.
    #[inline]
    pub(super) fn reply_places(&self, entry: RingEntry) -> [usize; 2] {
        if entry.is_inline() {
            return [INLINE; 2];
        }
        let (_, data) = self.peek_descriptor(entry.wild_cell());
        let msg = PoolId::CpuMsg as usize;
        [msg, data.parts().map_or(msg, |(pool, _)| pool as usize)]
    }

    /// Whether the client can leave one more reply in each of these tables.
    #[inline]
    pub(super) fn has_reply_share(&self, id: RequestId, position: u64, places: [usize; 2]) -> bool {
        self.requests().is_none_or(|requests| {
            self.has_share_of(requests, id, position, places[0])
                && (places[0] == places[1] || self.has_share_of(requests, id, position, places[1]))
        })
    }

    /// Replies that a client has not taken.
    pub(super) fn replies_left_by(&self, client: SeatIndex) -> u32 {
        self.requests().map_or(0, |requests| requests.replies.left_by(client, |_| true).replies)
    }
}

/// The steps of a client.
impl Endpoint {
    /// Opens a request: from now on it can get replies. Returns `None` if all slots are used.
    #[inline]
    pub(crate) fn open_request(&self) -> Option<RequestId> {
        let replies = &self.core.requests()?.replies;
        let id = RequestId { seat: self.me.seat, slot: self.window.idle_slot(), number: 0 };
        let number = replies.slot(id)?.open();
        self.window.set(id.slot);
        Some(RequestId { number, ..id })
    }

    /// Sends a request in a MSG buffer.
    #[inline]
    pub(crate) fn push_request(&self, id: RequestId, cell: u32, owner: MsgOwner) -> Result<(), PushError> {
        let Some(requests) = self.core.requests() else { return Err(PushError::Full) };
        // Pairs with the Acquire of `Core::request_id`: a recovery that reads the id sees that the cell was loaned.
        fence(Ordering::Release);
        self.cell(cell).set_request(id);
        requests.mpmc().push(&self.request_producer, RingEntry::pooled(cell, owner.epoch()))
    }

    /// Sends a request of at most [`REQUEST_INLINE_MAX_BYTES`](crate::REQUEST_INLINE_MAX_BYTES).
    #[inline]
    pub(crate) fn push_inline_request(&self, id: RequestId, ids: u64, msg: &[u8]) -> Result<(), InlineError> {
        let Some(requests) = self.core.requests() else { return Err(InlineError::NoCell) };
        let (cell, owner) = self.loan_inline().ok_or(InlineError::NoCell)?;
        let (mut bytes, len) = ([0; INLINE_MAX_BYTES], size_of::<u64>() + msg.len());
        bytes[..size_of::<u64>()].copy_from_slice(&inline_request_word(id).to_ne_bytes());
        bytes[size_of::<u64>()..len].copy_from_slice(msg);
        // As in `push_request`.
        fence(Ordering::Release);
        if let Some(lines) = self.core.inline_lines(cell) {
            lines.write(ids, &bytes[..len]);
        }
        let entry = RingEntry::inline_cell(cell, owner.epoch(), len);
        requests.mpmc().push(&self.request_producer, entry).map_err(|error| {
            self.release_inline(cell, owner);
            InlineError::Push(error)
        })
    }
}

/// The steps of a server.
impl Endpoint {
    /// Takes the oldest request off the ring.
    #[inline]
    pub(crate) fn take_request(&self) -> Result<Option<TakenRequest>, WildWord> {
        let Some(requests) = self.core.requests() else { return Ok(None) };
        let Some((entry, _, word)) = requests.mpmc().pop(&self.receiving())? else { return Ok(None) };
        let place = if entry.is_inline() { INLINE } else { PoolId::CpuMsg as usize };
        let (sent, cell) = (MsgOwner(word), entry.wild_cell());
        let owner = sent.borrowed(self.me.seat);
        // The owner word names the sender, so no client can have replies sent to another.
        let id = self
            .core
            .request_id(place, cell)
            .filter(|id| sent.holder() == Holder::Loaned(id.seat) && requests.replies.slot(*id).is_some());
        match id {
            Some(id) => Ok(Some(TakenRequest { id, entry, owner })),
            None => {
                self.free_taken(entry, owner);
                Err(WildWord("a request that does not name its client"))
            }
        }
    }
}

/// The steps that a handle shares with requests and replies that are independent of it. Those take them in any thread.
pub(crate) trait RequestSteps {
    fn core(&self) -> &Core;
    fn me(&self) -> &Participant;
    fn window(&self) -> &Window;
    /// Frees a MSG buffer and its DATA.
    fn free(&self, cell: u32, owner: MsgOwner, data: DataRef);
    /// Frees an inline cell after use.
    fn free_inline(&self, cell: u32, owner: MsgOwner);
    /// Loans a free inline cell.
    fn claim_inline(&self) -> Option<(u32, MsgOwner)>;

    #[inline]
    fn slot(&self, id: RequestId) -> Option<ReplySlot<'_>> {
        self.core().requests()?.replies.slot(id)
    }

    /// The status of a request.
    #[inline]
    fn request_status(&self, id: RequestId) -> Status {
        self.slot(id).map_or(Status::Over, |slot| slot.status(id.number))
    }

    /// Whether there is a reply at `position`.
    #[inline]
    fn has_reply(&self, id: RequestId, position: u64) -> bool {
        self.slot(id).is_some_and(|slot| slot.has_reply(position))
    }

    /// Makes this participant the owner of the reply at `position`, if there is one.
    #[inline]
    fn take_reply(&self, id: RequestId, position: u64) -> Result<Option<TakenReply>, WildWord> {
        let Some(slot) = self.slot(id) else { return Ok(None) };
        match slot.take(id.number, position, &self.core().receiving(self.me().seat)) {
            Ok(Some(taken)) if taken.is_stale => {
                self.free_reply(&taken);
                Ok(None)
            }
            taken => taken,
        }
    }

    /// Ends a request after its last reply was taken.
    #[inline]
    fn finish_request(&self, id: RequestId) {
        if let Some(slot) = self.slot(id) {
            slot.finish(id.number);
        }
        self.forget_request(id);
    }

    /// Ends a request: later replies are refused, and those that wait are freed.
    fn close_request(&self, id: RequestId) {
        if let Some(slot) = self.slot(id) {
            let is_seated = || self.core().seats.is_seated(self.me());
            let receiving = self.core().receiving(self.me().seat);
            slot.end(id.number, &receiving, is_seated, |taken| self.free_reply(&taken));
        }
        self.forget_request(id);
    }

    #[inline]
    fn forget_request(&self, id: RequestId) {
        self.window().clear(id.slot);
    }

    /// Frees a reply that was taken and is not wanted.
    fn free_reply(&self, taken: &TakenReply) {
        self.free_taken(taken.entry, MsgOwner(taken.word).borrowed(self.me().seat));
    }

    /// Frees a message that was taken and is not opened.
    fn free_taken(&self, entry: RingEntry, owner: MsgOwner) {
        let cell = entry.wild_cell();
        if entry.is_inline() {
            self.free_inline(cell, owner);
        } else {
            // If a peer named a DATA buffer wrongly, recovery frees it.
            let data = self.core().read_descriptor(cell, owner).map_or(DataRef::NONE, |(_, data)| data);
            self.free(cell, owner, data);
        }
    }

    /// Drops a request that was taken, and marks it for its client.
    fn release_request(&self, taken: &TakenRequest) {
        self.drop_request(taken.id);
        self.free_taken(taken.entry, taken.owner);
    }

    /// Marks the request as ended without a last reply. Before its buffer is freed, so that the client is notified even if
    /// the server dies in between.
    fn drop_request(&self, id: RequestId) {
        if let Some(slot) = self.slot(id) {
            slot.fail(id.number, self.me().word.pid(), false);
        }
    }

    /// Sends the reply at `position` of this request.
    #[inline]
    fn push_reply(&self, id: RequestId, position: u64, is_last: bool, entry: RingEntry) -> ReplyOutcome {
        let core = self.core();
        let Some(slot) = self.slot(id) else { return ReplyOutcome::Unwanted };
        // The count has no orderings, and models have few cells.
        if cfg!(loom) || core.has_reply_share(id, position, core.reply_places(entry)) {
            slot.push(id.number, position, is_last, entry)
        } else if slot.status(id.number) == Status::Pending {
            ReplyOutcome::OverShare
        } else {
            ReplyOutcome::Unwanted
        }
    }

    /// Sends a reply of at most [`INLINE_MAX_BYTES`]. Returns `None` if no inline cell is free.
    #[inline]
    fn push_inline_reply(
        &self,
        id: RequestId,
        position: u64,
        is_last: bool,
        ids: u64,
        msg: &[u8],
    ) -> Option<ReplyOutcome> {
        let (cell, owner) = self.claim_inline()?;
        if let Some(lines) = self.core().inline_lines(cell) {
            lines.write(ids, msg);
        }
        let pushed =
            self.push_reply(id, position, is_last, RingEntry::inline_cell(cell, owner.epoch(), msg.len()));
        if pushed != ReplyOutcome::Sent {
            self.free_inline(cell, owner);
        }
        Some(pushed)
    }
}

impl RequestSteps for Endpoint {
    #[inline]
    fn core(&self) -> &Core {
        &self.core
    }

    #[inline]
    fn me(&self) -> &Participant {
        &self.me
    }

    #[inline]
    fn window(&self) -> &Window {
        &self.window
    }

    #[inline]
    fn free(&self, cell: u32, owner: MsgOwner, data: DataRef) {
        // Fails only if this participant was evicted, and then others have the buffers.
        let _ = self.release(cell, owner, data);
    }

    #[inline]
    fn free_inline(&self, cell: u32, owner: MsgOwner) {
        self.release_inline(cell, owner);
    }

    #[inline]
    fn claim_inline(&self) -> Option<(u32, MsgOwner)> {
        self.loan_inline()
    }
}
