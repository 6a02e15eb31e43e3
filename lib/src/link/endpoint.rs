//! The endpoint: the tables of a link, as one participant uses them from its seat.
//!
//! Everything that the hot path touches is one step away from here. Like [`Core`], an endpoint does not know files or
//! payload bytes.

use std::cell::OnceCell;
use std::sync::Arc;

use super::core::{Cell, Core, DataRef, HeldSamples, INLINE, SeatOwners, TABLES};
use crate::config::PoolId;
use crate::notify;
use crate::participant::times::{Time, now};
use crate::participant::{Participant, Role, Side};
use crate::pool::owner::{DataOwner, MsgOwner};
use crate::pool::{Pool, PoolCache};
use crate::ring::broadcast::{self, Broadcast, OwnedReads, PublishedMessage};
use crate::ring::entry::RingEntry;
use crate::ring::reply::Window;
use crate::ring::{CONSUMER_ROLE, PRODUCER_ROLE, Ring, RingFull, mpmc, spsc};
use crate::segment::Lines;
use crate::sync::{Ordering, fence, overwrite};

/// Messages whose lines are prefetched before the first of them is freed.
const FREED_TOGETHER: usize = 32;

/// A participant and its private state.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) core: Core,
    pub(crate) me: Participant,
    seat_line: Lines,
    pub(crate) outgoing: Ring,
    pub(crate) incoming: Ring,
    msg: PoolCache,
    msg_pool: Pool,
    caches: [Option<PoolCache>; TABLES],
    producer: OnceCell<spsc::Producer>,
    consumer: OnceCell<spsc::Consumer>,
    /// The state of the writer of a broadcast ring.
    writer: OnceCell<broadcast::Writer>,
    /// The state of a reader of a broadcast ring.
    reader: Option<broadcast::Reader>,
    /// The state of one of many producers.
    pub(crate) shared_producer: mpmc::Producer,
    /// The same, of requests.
    pub(super) request_producer: mpmc::Producer,
    /// The slots of this client's requests.
    pub(super) window: Arc<Window>,
    held_samples: HeldSamples,
}

impl Endpoint {
    pub(crate) fn new(core: &Core, me: Participant) -> Self {
        let side = me.word.side();
        for ring in core.rings() {
            // Bits that a dead participant may have left in this seat.
            notify::reset(ring, me.seat);
        }
        core.seats.event_sleepers().wake_up(me.seat);
        // Release, as in `give_up_type`, on behalf of a dead participant that had this seat.
        core.typed_seats().fetch_and(!me.seat.bit(), Ordering::Release);
        let bytes = |place: usize| PoolId::ALL.get(place).and_then(|&id| Some(core.pool(id)?.bytes));
        let reader = match core.incoming(side) {
            Ring::Broadcast(ring) => Some(ring.subscribe(&me)),
            _ => None,
        };
        let cache =
            |place: usize| core.table(place).map(|table| PoolCache::new(table, bytes(place), me.seat));
        Self {
            seat_line: core.seats.line(me.seat),
            outgoing: core.outgoing(side).clone(),
            incoming: core.incoming(side).clone(),
            msg: PoolCache::new(&core.msg().table, Some(core.msg().bytes), me.seat),
            msg_pool: core.msg().clone(),
            caches: std::array::from_fn(
                |place| if place == PoolId::CpuMsg as usize { None } else { cache(place) },
            ),
            producer: OnceCell::new(),
            consumer: OnceCell::new(),
            writer: OnceCell::new(),
            reader,
            shared_producer: mpmc::Producer::default(),
            request_producer: mpmc::Producer::default(),
            window: Arc::default(),
            held_samples: HeldSamples::default(),
            core: core.clone(),
            me,
        }
    }

    /// The MSG pool's cache.
    #[inline]
    pub(crate) fn msg_pool(&self) -> &Pool {
        &self.msg_pool
    }

    /// Whether this participant still has its seat and was not evicted.
    #[inline(always)]
    pub(crate) fn is_current(&self) -> bool {
        self.me.word.is(self.seat_line[0].word(0).load(Ordering::Relaxed))
    }

    /// Loans a free MSG buffer.
    #[inline(always)]
    pub(crate) fn loan_msg(&self) -> Option<(u32, MsgOwner)> {
        let next = |free| MsgOwner(free).loaned(self.me.seat).0;
        let (index, word) = self.msg.claim(|| self.core.seats.used(), next)?;
        Some((index, MsgOwner(word)))
    }

    /// Loans a free inline cell.
    #[inline]
    pub(crate) fn loan_inline(&self) -> Option<(u32, MsgOwner)> {
        let next = |free| MsgOwner(free).loaned(self.me.seat).0;
        let (index, word) = self.caches[INLINE].as_ref()?.claim(|| self.core.seats.used(), next)?;
        Some((index, MsgOwner(word)))
    }

    /// Attaches a DATA buffer to a loaned MSG buffer. The MSG buffer is claimed first and freed last, so at whatever
    /// instruction a participant dies, a DATA buffer either belongs to a living MSG buffer or names one that was freed.
    #[inline]
    pub(crate) fn loan_data(&self, pool: PoolId, cell: u32, msg: MsgOwner) -> Option<u32> {
        let next = |free| DataOwner(free).attached(cell, msg).0;
        let (index, _) = self.caches[pool as usize].as_ref()?.claim(|| self.core.seats.used(), next)?;
        Some(index)
    }

    /// The descriptor of a MSG buffer that this participant has loaned.
    #[inline(always)]
    pub(crate) fn cell(&self, cell: u32) -> Cell<'_> {
        Cell(self.msg.table.cell(cell))
    }

    /// Frees a MSG buffer and its DATA. Returns `false` if it was recovered, because its holder was declared dead.
    #[inline(always)]
    pub(crate) fn release(&self, cell: u32, owner: MsgOwner, data: DataRef) -> bool {
        if !data.is_none() {
            self.release_data(cell, owner, data);
        }
        self.msg.release(cell, owner.0, owner.freed().0)
    }

    #[inline(never)]
    fn release_data(&self, cell: u32, owner: MsgOwner, data: DataRef) {
        if let Some((pool, index)) = data.parts()
            && let Some(cache) = &self.caches[pool as usize]
        {
            // If the DATA buffer is no longer ours, then neither is the MSG buffer.
            let held = DataOwner(cache.table.owner(index).load(Ordering::Relaxed));
            if held.belongs_to(cell, owner) {
                cache.release(index, held.0, held.freed().0);
            }
        }
    }

    /// Frees an inline cell.
    #[inline]
    pub(crate) fn release_inline(&self, cell: u32, owner: MsgOwner) {
        if let Some(cache) = &self.caches[INLINE] {
            cache.release(cell, owner.0, owner.freed().0);
        }
    }

    /// How this participant receives from its ring.
    #[inline(always)]
    pub(crate) fn receiving(&self) -> SeatOwners<'_> {
        SeatOwners { core: &self.core, seat: self.me.seat, held: Some(&self.held_samples) }
    }

    /// Whether this handle holds sampled messages.
    #[inline(always)]
    pub(crate) fn holds_samples(&self) -> bool {
        self.held_samples.any()
    }

    /// Counts how long a message was held that was just released, if it is a sampled one.
    pub(crate) fn count_hold(&self, cell: u32, owner: MsgOwner) {
        if let Some(since) = self.held_samples.end(cell, owner)
            && let Some(times) = &self.core.times
        {
            times.count(self.me.seat, Time::Hold, now().saturating_sub(since));
        }
    }

    /// When a message was received that is about to become independent of this handle, if it is a sampled one in a buffer; otherwise 0.
    #[inline]
    pub(crate) fn sampled_since(&self, cell: u32, owner: MsgOwner) -> u64 {
        if self.holds_samples() { self.held_samples.end(cell, owner).unwrap_or(0) } else { 0 }
    }

    /// This participant's state as the single producer of a ring. Takes the role at the first use. Returns `Err` if another
    /// participant has it.
    #[inline(always)]
    pub(crate) fn producer(&self, ring: &spsc::Spsc) -> Result<&spsc::Producer, Participant> {
        match self.producer.get() {
            Some(producer) => Ok(producer),
            None => {
                self.claim(&self.outgoing, PRODUCER_ROLE)?;
                Ok(self.producer.get_or_init(|| ring.resume_producer()))
            }
        }
    }

    /// The state of [`producer`](Self::producer), if this participant has the role.
    #[inline(always)]
    pub(crate) fn held_producer(&self) -> Option<&spsc::Producer> {
        self.producer.get()
    }

    /// As `producer`, for the single consumer.
    #[inline(always)]
    pub(crate) fn consumer(&self, ring: &spsc::Spsc) -> Result<&spsc::Consumer, Participant> {
        match self.consumer.get() {
            Some(consumer) => Ok(consumer),
            None => {
                self.claim(&self.incoming, CONSUMER_ROLE)?;
                self.core.undo_receptions(&self.incoming, self.me.seat);
                Ok(self.consumer.get_or_init(|| ring.resume_consumer()))
            }
        }
    }

    /// The state of [`consumer`](Self::consumer), if this participant has the role.
    #[inline(always)]
    pub(crate) fn held_consumer(&self) -> Option<&spsc::Consumer> {
        self.consumer.get()
    }

    /// As `producer`, for the writer of a broadcast ring.
    #[inline(always)]
    pub(crate) fn writer(&self, ring: &Broadcast) -> Result<&broadcast::Writer, Participant> {
        match self.writer.get() {
            Some(writer) => Ok(writer),
            None => {
                self.claim(&self.outgoing, PRODUCER_ROLE)?;
                // Of an eviction and a claim, one sees the other. An evicting process does not touch a writer's buffers.
                fence(Ordering::SeqCst);
                if !self.is_current() {
                    return Err(self.me);
                }
                let resume = || {
                    let kept = |entry| self.core.kept_of(entry);
                    ring.resume_writer(&self.core.seats, kept, self.core.published(), |kept| self.free(kept))
                };
                Ok(self.writer.get_or_init(resume))
            }
        }
    }

    /// The owned messages of a reader.
    pub(super) fn owned_reads(&self) -> Option<Arc<OwnedReads>> {
        self.reader.as_ref().map(|reader| Arc::clone(&reader.owned))
    }

    /// This participant's state as a reader. Only for participants whose incoming ring is a broadcast ring.
    #[inline(always)]
    pub(crate) fn reader(&self) -> &broadcast::Reader {
        match &self.reader {
            Some(reader) => reader,
            None => unreachable!("`new` subscribes to a broadcast ring"),
        }
    }

    /// Frees messages that were sent on a broadcast ring.
    fn free(&self, passed: &[PublishedMessage]) {
        for some in passed.chunks(FREED_TOGETHER) {
            for kept in some {
                self.msg.prefetch(kept.cell);
            }
            for kept in some {
                self.release(kept.cell, MsgOwner(kept.owner), DataRef::from_word(kept.data));
            }
        }
    }

    /// Sends a loaned message on a broadcast ring.
    #[inline(always)]
    pub(crate) fn broadcast(
        &self,
        ring: &Broadcast,
        writer: &broadcast::Writer,
        (cell, owner, data): (u32, MsgOwner, DataRef),
    ) -> Result<(), RingFull> {
        let seats = &self.core.seats;
        ring.make_room(writer, seats, |kept| self.free(kept))?;
        let published = owner.published(self.me.seat);
        // Before the message is in the ring: messages there have no holder, so that no recovery frees them. Release, as for
        // a loan.
        overwrite(self.msg.table.owner(cell), published.0, Ordering::Release);
        let kept = PublishedMessage { cell, owner: published.0, data: data.word() };
        ring.push(writer, RingEntry::pooled(cell, owner.epoch()), kept, seats, |kept| self.free(kept));
        Ok(())
    }

    /// Sends a small message on a broadcast ring.
    #[inline(always)]
    pub(crate) fn broadcast_inline(
        &self,
        ring: &Broadcast,
        writer: &broadcast::Writer,
        ids: u64,
        msg: &[u8],
    ) -> Result<(), RingFull> {
        let seats = &self.core.seats;
        ring.make_room(writer, seats, |kept| self.free(kept))?;
        ring.push_inline(writer, ids, msg, seats, |kept| self.free(kept));
        Ok(())
    }

    /// Frees everything that was sent on a broadcast ring. Newcomers begin after it.
    pub(crate) fn forget(&self, ring: &Broadcast, writer: &broadcast::Writer) {
        ring.forget(writer, &self.core.seats, |kept| self.free(kept));
    }

    /// Frees messages of a broadcast ring because a pool has no free buffer. Returns `false` if there are none to free.
    #[cold]
    pub(crate) fn make_free(&self, ring: &Broadcast, writer: &broadcast::Writer) -> bool {
        ring.make_free(writer, &self.core.seats, |kept| self.free(kept))
    }

    #[cold]
    fn claim(&self, ring: &Ring, line: usize) -> Result<(), Participant> {
        Role(ring.words().control(line)).claim(&self.me, &self.core.seats)
    }

    /// Gives up its roles, and unsubscribes as a reader.
    pub(crate) fn retire(&self) {
        let is_seated = self.core.seats.is_seated(&self.me);
        if let Ring::Broadcast(ring) = &self.incoming
            && is_seated
        {
            ring.leave(self.reader(), &self.me);
        }
        if let (Ring::Broadcast(ring), Some(writer)) = (&self.outgoing, self.writer.get())
            && is_seated
        {
            ring.settle(writer, &self.core.seats, |kept| self.free(kept));
        }
        self.give_up_type();
        for ring in self.core.rings() {
            Role(ring.words().control(PRODUCER_ROLE)).release(&self.me);
            Role(ring.words().control(CONSUMER_ROLE)).release(&self.me);
        }
        self.core.primary_role().release(&self.me);
    }

    /// Declares that this participant uses no type any more.
    pub(crate) fn give_up_type(&self) {
        if self.core.seats.is_seated(&self.me) {
            // Release pairs with the Acquire of `Core::check_unused`: a participant that sees that this one uses no type any
            // more also sees what it has sent.
            self.core.typed_seats().fetch_and(!self.me.seat.bit(), Ordering::Release);
        }
    }

    pub(crate) fn side(&self) -> Side {
        self.me.word.side()
    }
}
