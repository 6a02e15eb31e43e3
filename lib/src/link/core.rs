//! The shared part of a link: all tables, and the steps that transfer ownership of a buffer.
//!
//! `Core` does not know files, sockets or payload bytes, so the same code runs on mapped memory, on the heap, under Miri
//! and under loom.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::config::PoolId;
use crate::participant::times::{TIMES_LINES, Time, Times};
use crate::participant::{MAX_SEATS, Participant, Role, SEAT_LINES, SeatIndex, SeatStage, Seats, Side};
use crate::pool::owner::{DataOwner, Holder, MsgOwner};
use crate::pool::{OwnerTable, Pool};
use crate::ring::broadcast::PublishedMessage;
use crate::ring::entry::RingEntry;
use crate::ring::inline::InlineLines;
use crate::ring::reply::{ReplySlots, RequestId};
use crate::ring::reply_share::ReplyShare;
use crate::ring::stamps::Stamps;
use crate::ring::{CONTROL_LINES, Kind, Look, Owners, PRODUCER_ROLE, Ring, WildWord};
use crate::segment::layout::{LinkLayout, LinkShape, PoolLayout};
#[cfg(feature = "typed")]
use crate::segment::payload_type::{DeclaredType, PayloadTypes};
use crate::segment::payload_type::{DeclaredTypes, PayloadTypeLine};
use crate::segment::{Lines, Memory, prefetch_exclusive, prefetch_exclusive_at};
#[cfg(feature = "typed")]
use crate::sync::fence;
use crate::sync::{AtomicU64, Line, Ordering};

/// All tables of a link.
#[derive(Clone, Debug)]
pub(crate) struct Core {
    pub(crate) shape: LinkShape,
    pub(crate) seats: Seats,
    primary: Lines,
    payload_types: [Lines; 2],
    rings: [Ring; 2],
    /// Pools whose buffers are in host memory. Buffers in device memory have no bytes that this process could access.
    pools: [Option<Pool>; PoolId::COUNT],
    on_device: [Option<OwnerTable>; PoolId::COUNT],
    inline: Option<OwnerTable>,
    /// The second lines of the inline cells.
    inline_seconds: Option<Lines>,
    requests: Option<Requests>,
    /// The times of sampled messages.
    pub(crate) times: Option<Times>,
}

/// The ring of requests, and the reply slots.
#[derive(Clone, Debug)]
pub(crate) struct Requests {
    /// From the secondary side to the primary side.
    pub(crate) ring: Ring,
    pub(crate) replies: ReplySlots,
    /// The share of each table that clients can leave unread, in the order of [`TABLES`].
    pub(super) shares: [Option<ReplyShare>; TABLES],
}

/// The index of a table in a handle's array of caches: the pools by id, then the inline cells.
pub(crate) const TABLES: usize = PoolId::COUNT + 1;
pub(crate) const INLINE: usize = PoolId::COUNT;

/// The fields of a message, as the receiver copied them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Descriptor {
    pub(crate) msg_id: i32,
    pub(crate) cell_id: i32,
    pub(crate) msg_len: u32,
    pub(crate) data_len: u32,
}

/// The DATA buffer of a message, as its cell names it: `| pool + 1 | index |`, or 0 for none.
///
/// One whole word, like everything that is stored with a message: reading it in parts of one and seven bytes would stall on
/// store forwarding.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct DataRef(u64);

impl DataRef {
    pub(crate) const NONE: Self = Self(0);

    #[inline(always)]
    pub(crate) fn new(pool: PoolId, index: u32) -> Self {
        Self((pool as u64 + 1) << 32 | u64::from(index))
    }

    /// Pool and index. Neither is checked against the link.
    #[inline(always)]
    pub(crate) fn parts(self) -> Option<(PoolId, u32)> {
        let id = PoolId::from_index(u32::try_from((self.0 >> 32).wrapping_sub(1)).ok()?)?;
        #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
        let index = self.0 as u32;
        Some((id, index))
    }

    /// The word as stored.
    pub(crate) fn word(self) -> u64 {
        self.0
    }

    /// Restores a value from its [`word`](Self::word).
    pub(crate) fn from_word(word: u64) -> Self {
        Self(word)
    }

    #[inline(always)]
    pub(crate) fn is_none(self) -> bool {
        self == Self::NONE
    }
}

/// The descriptor of a MSG buffer, in words 1 to 4 of its cell, written in place.
///
/// If a loan carried its descriptor, it would be copied on each move. Only the holder of the MSG buffer writes here, so
/// plain loads and stores of words suffice.
#[derive(Debug)]
pub(crate) struct Cell<'a>(pub(crate) &'a Line);

const IDS: usize = 1;
const LENGTHS: usize = 2;
const DATA: usize = 3;
/// The id of the device memory with the DATA part. Only read for a DATA part in device memory, so it need not be cleared.
const MEMORY: usize = 4;
/// The id of a request. Only read in messages from the ring of requests.
const REQUEST: usize = 5;
/// The id of an inline request, masked: the first word of its bytes.
const INLINE_REQUEST: usize = 2;
/// In a message that is not a request, this word has bytes of the application. Small numbers, which are common there, must
/// not look like ids: recovery of a dead server would mark the requests with these ids as failed.
const INLINE_REQUEST_MASK: u64 = 0x9e37_79b9_7f4a_7c15;

/// The first word of the bytes of an inline request.
pub(crate) fn inline_request_word(id: RequestId) -> u64 {
    id.word() ^ INLINE_REQUEST_MASK
}

impl Cell<'_> {
    #[inline(always)]
    pub(crate) fn clear(&self) {
        for word in [IDS, LENGTHS, DATA] {
            self.0.word(word).store(0, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn set_half(&self, word: usize, shift: u32, half: u32) {
        let word = self.0.word(word);
        let other = word.load(Ordering::Relaxed) & !(u64::from(u32::MAX) << shift);
        word.store(other | u64::from(half) << shift, Ordering::Relaxed);
    }

    /// Sets the ids, as [`pack`] returns them, and the lengths of MSG and DATA.
    #[inline(always)]
    pub(crate) fn describe(&self, ids: u64, (msg_len, data_len): (u32, u32)) {
        self.0.word(IDS).store(ids, Ordering::Relaxed);
        self.0.word(LENGTHS).store(u64::from(msg_len) << 32 | u64::from(data_len), Ordering::Relaxed);
    }

    #[inline(always)]
    pub(crate) fn set_msg_id(&self, id: i32) {
        self.set_half(IDS, 32, id.cast_unsigned());
    }

    #[inline(always)]
    pub(crate) fn set_cell_id(&self, id: i32) {
        self.set_half(IDS, 0, id.cast_unsigned());
    }

    #[inline(always)]
    pub(crate) fn set_msg_len(&self, len: u32) {
        self.set_half(LENGTHS, 32, len);
    }

    #[inline(always)]
    pub(crate) fn set_data_len(&self, len: u32) {
        self.set_half(LENGTHS, 0, len);
    }

    #[inline(always)]
    pub(crate) fn set_data(&self, data: DataRef) {
        self.0.word(DATA).store(data.0, Ordering::Relaxed);
    }

    pub(crate) fn set_memory(&self, id: u64) {
        self.0.word(MEMORY).store(id, Ordering::Relaxed);
    }

    pub(crate) fn set_request(&self, id: RequestId) {
        self.0.word(REQUEST).store(id.word(), Ordering::Relaxed);
    }

    pub(crate) fn memory(&self) -> u64 {
        self.0.word(MEMORY).load(Ordering::Relaxed)
    }
}

pub(crate) fn pack(high: i32, low: i32) -> u64 {
    u64::from(high.cast_unsigned()) << 32 | u64::from(low.cast_unsigned())
}

#[expect(clippy::cast_possible_truncation, reason = "the two halves of a word")]
pub(crate) fn unpack(word: u64) -> (i32, i32) {
    (((word >> 32) as u32).cast_signed(), (word as u32).cast_signed())
}

impl Core {
    /// Places all tables over the memory of the segments. Returns `None` if a segment is too small, which the headers rule
    /// out.
    pub(crate) fn place(
        shape: &LinkShape,
        shm: &Arc<Memory>,
        pools: &[Option<Arc<Memory>>; PoolId::COUNT],
    ) -> Option<Self> {
        let l = LinkLayout::of(shape);
        let cursors = shm.window(l.cursors, l.cursor_lines)?;
        let none = shm.window(0, 0)?;
        let ring = |i: usize| {
            let stamps = Stamps::new(shm.window(l.stamps[i], l.stamp_lines)?, shape.latency_sample);
            let control = shm.window(l.controls[i], CONTROL_LINES)?;
            let slots = shm.window(l.slots[i], l.slot_lines[i])?;
            let (capacity, kind) = (shape.ring_capacity as usize, shape.kinds()[i]);
            Some(Ring::new(control, slots, &cursors, capacity, kind, stamps))
        };
        let (mut placed, mut on_device) = ([const { None }; PoolId::COUNT], [const { None }; PoolId::COUNT]);
        for ((pool, memory), (size, len)) in PoolId::ALL.into_iter().zip(pools).zip(shape.pools) {
            if len == 0 {
                continue;
            }
            let (l, memory) = (PoolLayout::of(pool, size, len), memory.as_ref()?);
            if pool.is_device() {
                on_device[pool as usize] = Some(OwnerTable::place(memory, l.table, len as usize)?);
            } else {
                placed[pool as usize] = Some(Pool::place(memory, l.table, l.buffers, size, len as usize)?);
            }
        }
        let requests = match l.requests {
            None => None,
            Some([control, slots, replies]) => {
                let (capacity, window) = (shape.ring_capacity as usize, shape.request_window as usize);
                let (control, slots) =
                    (shm.window(control, CONTROL_LINES)?, shm.window(slots, l.slot_lines[1])?);
                Some(Requests {
                    ring: Ring::new(control, slots, &cursors, capacity, Kind::Mpmc, Stamps::new(none, 0)),
                    replies: ReplySlots::new(shm.window(replies, MAX_SEATS * window)?, window),
                    shares: std::array::from_fn(|place| {
                        let inline = u32::try_from(l.inline_cells).unwrap_or(u32::MAX);
                        let len = shape.pools.get(place).map_or(inline, |&(_, len)| len);
                        (len > 0).then(|| ReplyShare::of(len, shape.request_window))
                    }),
                })
            }
        };
        Some(Self {
            shape: *shape,
            seats: Seats::new(shm.window(l.seats, SEAT_LINES)?),
            primary: shm.window(l.primary_role, 1)?,
            payload_types: [shm.window(l.payload_types[0], 1)?, shm.window(l.payload_types[1], 1)?],
            rings: [ring(0)?, ring(1)?],
            pools: placed,
            on_device,
            inline: if shape.single { None } else { Some(OwnerTable::place(shm, l.inline, l.inline_cells)?) },
            inline_seconds: if shape.single {
                None
            } else {
                Some(shm.window(l.inline_seconds, l.inline_cells)?)
            },
            requests,
            times: match l.times {
                Some(times) => Some(Times::new(shm.window(times, TIMES_LINES)?)),
                None => None,
            },
        })
    }

    /// Turns fresh, zeroed memory into an empty link.
    pub(crate) fn format(&self) {
        for table in (0..TABLES).filter_map(|i| self.table(i)) {
            table.format();
        }
    }

    /// Creates a link on the heap.
    #[cfg(test)]
    pub(crate) fn heap(shape: &LinkShape) -> Self {
        let l = LinkLayout::of(shape);
        let pools = PoolId::ALL.map(|pool| {
            let (size, len) = shape.pools[pool as usize];
            let bytes = usize::try_from(PoolLayout::of(pool, size, len).bytes()).unwrap();
            (len > 0).then(|| Memory::heap(bytes / crate::sync::LINE_BYTES))
        });
        let core = Self::place(shape, &Memory::heap(l.total), &pools).unwrap();
        core.format();
        core
    }

    /// A pool in host memory.
    #[inline]
    pub(crate) fn pool(&self, pool: PoolId) -> Option<&Pool> {
        self.pools[pool as usize].as_ref()
    }

    /// The table of a pool, wherever its buffers are, and the buffer size.
    pub(crate) fn data_table(&self, pool: PoolId) -> Option<(&OwnerTable, u32)> {
        Some((self.table(pool as usize)?, self.shape.pools[pool as usize].0))
    }

    /// The table at an index of the array of [`TABLES`].
    pub(crate) fn table(&self, place: usize) -> Option<&OwnerTable> {
        match self.pools.get(place) {
            Some(Some(pool)) => Some(&pool.table),
            Some(None) => self.on_device[place].as_ref(),
            None => self.inline.as_ref(),
        }
    }

    /// The MSG pool, which every link has.
    #[inline]
    pub(crate) fn msg(&self) -> &Pool {
        match &self.pools[PoolId::CpuMsg as usize] {
            Some(pool) => pool,
            None => unreachable!("`Shape::is_sane` and `LinkConfig::validate` ask for a MSG pool"),
        }
    }

    pub(crate) fn inline(&self) -> Option<&OwnerTable> {
        self.inline.as_ref()
    }

    /// The lines of an inline cell, whose index must have been checked. `None` if the link has no inline cells.
    #[inline(always)]
    pub(crate) fn inline_lines(&self, cell: u32) -> Option<InlineLines<'_>> {
        let (table, seconds) = (self.inline.as_ref()?, self.inline_seconds.as_ref()?);
        Some(InlineLines::new(table.cell(cell), seconds, cell as usize))
    }

    /// Checks the cell that an entry names.
    #[inline(always)]
    pub(crate) fn cell_of(&self, entry: RingEntry) -> Result<EntryCell<'_>, WildWord> {
        let index = entry.wild_cell();
        let found = if entry.is_inline() {
            let Some(table) = &self.inline else {
                return Err(WildWord("an inline cell on a link that has none"));
            };
            table.cells().get(index as usize).map(|line| (line, NonNull::dangling()))
        } else {
            self.msg().at(index)
        };
        match found {
            Some((line, bytes)) => Ok(EntryCell { line, index, bytes }),
            None => Err(WildWord("an entry past the end of its pool")),
        }
    }

    /// The ring on which `side` sends.
    #[inline]
    pub(crate) fn outgoing(&self, side: Side) -> &Ring {
        &self.rings[usize::from(side == Side::Secondary)]
    }

    /// The ring on which `side` receives.
    #[inline]
    pub(crate) fn incoming(&self, side: Side) -> &Ring {
        &self.rings[usize::from(side == Side::Primary)]
    }

    pub(crate) fn rings(&self) -> &[Ring; 2] {
        &self.rings
    }

    /// Whether a participant has the writer's role of a broadcast ring.
    pub(crate) fn is_writer(&self, who: &Participant) -> bool {
        self.rings.iter().filter(|ring| ring.is_broadcast()).any(|ring| {
            Role(ring.words().control(PRODUCER_ROLE))
                .holder(&self.seats)
                .is_some_and(|holder| holder.seat == who.seat)
        })
    }

    pub(crate) fn requests(&self) -> Option<&Requests> {
        self.requests.as_ref()
    }

    /// All rings from which messages are received.
    fn all_rings(&self) -> impl Iterator<Item = &Ring> {
        self.rings.iter().chain(self.requests.as_ref().map(|requests| &requests.ring))
    }

    pub(crate) fn primary_role(&self) -> Role<'_> {
        Role(self.primary[0].word(0))
    }

    /// The role of the participant that empties the link.
    pub(crate) fn emptier_role(&self) -> Role<'_> {
        Role(self.primary[0].word(1))
    }

    /// The role of the participant that is being admitted to a side that takes one process only.
    pub(crate) fn admission_role(&self, side: Side) -> Role<'_> {
        Role(self.primary[0].word(if side == Side::Primary { 2 } else { 3 }))
    }

    /// Bits of the seats whose participants have typed handles. A bit counts while its seat is taken; its next participant
    /// clears it.
    pub(crate) fn typed_seats(&self) -> &AtomicU64 {
        self.primary[0].word(5)
    }

    /// The role of the participant that declares another type than the declared one.
    #[cfg(feature = "typed")]
    pub(crate) fn type_role(&self) -> Role<'_> {
        Role(self.primary[0].word(4))
    }

    /// Declares the payload types of both sides. Those of others are replaced if none of them is attached any more and no
    /// message waits.
    ///
    /// `TYPED`: a participant that uses the declared types sets its bit and then reads the fingerprints; one that replaces a
    /// type sets its fingerprint to 0 and then reads the bits. A sequentially consistent fence stands between the two steps
    /// of each, so at least one of them sees the other, and gives way. So the role only keeps two participants from
    /// replacing a type at once over and over: none waits for its holder to use the declared types, and an evicted holder
    /// that resumes does no harm. No participant uses types before both are declared.
    #[cfg(feature = "typed")]
    pub(crate) fn declare_types(&self, me: &Participant, types: &PayloadTypes) -> Result<(), TypeConflict> {
        // Without the names, an error could not say what is declared, so the declaration is completed below. A bit is only
        // set for the declared types: participants that declare the first ones must not see each other as users.
        let is_declared =
            |side| self.payload_type(side).declared() == Some(DeclaredType::Known(*types.of(side)));
        if is_declared(Side::Primary) && is_declared(Side::Secondary) && self.use_types(me, types) {
            return Ok(());
        }
        let role = self.type_role();
        if let Err(holder) = role.claim(me, &self.seats) {
            if holder.word.is_evicted() {
                role.release(&holder);
            }
            return Err(TypeConflict::Declaring(holder));
        }
        let declared = self.declare_types_alone(me, types);
        role.release(me);
        declared
    }

    #[cfg(feature = "typed")]
    fn declare_types_alone(&self, me: &Participant, types: &PayloadTypes) -> Result<(), TypeConflict> {
        let sides = [Side::Primary, Side::Secondary];
        let lines = sides.map(|side| (self.payload_type(side), types.of(side)));
        let seen = lines.map(|(line, payload)| (line, payload, line.declared_fingerprint()));
        let others = || seen.iter().filter(|(_, payload, declared)| *declared != payload.fingerprint());
        if others().next().is_some() {
            // If none is declared but used, the participant that was replacing it has died.
            let check = || {
                let has_type = others().any(|(.., declared)| *declared != 0);
                self.check_unused(me, has_type)
                    .inspect_err(|_| others().for_each(|(line, _, declared)| line.restore(*declared)))
            };
            check()?;
            others().for_each(|(line, _, declared)| line.withdraw(*declared));
            // TYPED
            fence(Ordering::SeqCst);
            check()?;
        }
        // An evicted holder of the role may interfere.
        if lines.iter().all(|(line, payload)| line.declare(payload)) && self.use_types(me, types) {
            Ok(())
        } else {
            Err(TypeConflict::Declaring(*me))
        }
    }

    /// Sets the bit of a participant that uses the declared types. Returns `false` if another type is declared, or none.
    #[cfg(feature = "typed")]
    fn use_types(&self, me: &Participant, types: &PayloadTypes) -> bool {
        self.typed_seats().fetch_or(me.seat.bit(), Ordering::Relaxed);
        // TYPED
        fence(Ordering::SeqCst);
        let is_declared =
            |side| self.payload_type(side).declared_fingerprint() == types.of(side).fingerprint();
        let are_declared = is_declared(Side::Primary) && is_declared(Side::Secondary);
        if !are_declared {
            self.typed_seats().fetch_and(!me.seat.bit(), Ordering::Relaxed);
        }
        are_declared
    }

    /// Checks that no other participant uses the declared types, and that no message waits if `has_type`.
    #[cfg(feature = "typed")]
    fn check_unused(&self, me: &Participant, has_type: bool) -> Result<(), TypeConflict> {
        // Acquire pairs with the Release of `Endpoint::give_up_type`: what a participant sent before is seen to wait.
        let typed = self.typed_seats().load(Ordering::Acquire) & !me.seat.bit();
        if let Some(other) = self.seats.all_of(typed).find(|other| !other.word.is_evicted()) {
            return Err(TypeConflict::Used(other));
        }
        let waits = |ring: &Ring| match ring {
            Ring::Broadcast(ring) => ring.is_any_waiting(&self.seats),
            Ring::Spsc(_) | Ring::Mpmc(_) => ring.queued().next().is_some(),
        };
        if has_type && (self.all_rings().any(waits) || self.waiting_replies().next().is_some()) {
            return Err(TypeConflict::Waiting);
        }
        Ok(())
    }

    /// The line that declares the type of what `side` sends.
    pub(crate) fn payload_type(&self, side: Side) -> PayloadTypeLine<'_> {
        PayloadTypeLine(&self.payload_types[usize::from(side == Side::Secondary)][0])
    }

    /// The payload types that were declared. `None` if none was.
    pub(crate) fn declared_types(&self) -> Option<DeclaredTypes> {
        let [of_primary, of_secondary] =
            [Side::Primary, Side::Secondary].map(|side| self.payload_type(side).declared());
        of_primary.or(of_secondary).map(|_| DeclaredTypes { of_primary, of_secondary })
    }

    /// Forgets the payload types. Only while no other participant is attached.
    pub(crate) fn clear_types(&self) {
        [Side::Primary, Side::Secondary].into_iter().for_each(|side| self.payload_type(side).clear());
    }

    /// Messages in buffers that were sent on a broadcast ring and not freed.
    pub(crate) fn published(&self) -> impl Iterator<Item = PublishedMessage> + '_ {
        let table = &self.msg().table;
        (0..u32::try_from(table.len()).unwrap_or(u32::MAX)).filter_map(|cell| self.kept(cell))
    }

    /// The buffers to free when the message in `cell` has been read, whose index must have been checked. `None` if it was
    /// not sent on a broadcast ring.
    fn kept(&self, cell: u32) -> Option<PublishedMessage> {
        let owner = MsgOwner(self.msg().table.owner(cell).load(Ordering::Acquire));
        let Holder::Published(_) = owner.holder() else { return None };
        let data = self.read_descriptor(cell, owner).map_or(DataRef::NONE, |(_, data)| data);
        Some(PublishedMessage { cell, owner: owner.0, data: data.0 })
    }

    /// As [`kept`](Self::kept), for an entry of a broadcast ring.
    pub(crate) fn kept_of(&self, entry: RingEntry) -> Option<PublishedMessage> {
        let kept = self.kept(self.msg().table.tame(entry.wild_cell())?)?;
        entry.names(MsgOwner(kept.owner).epoch()).then_some(kept)
    }

    /// The cell of a message that a reader of a broadcast ring holds, and its owner word.
    #[inline(always)]
    pub(crate) fn look_published(&self, entry: RingEntry) -> Result<(u32, MsgOwner), WildWord> {
        let table = &self.msg().table;
        let cell = table.tame(entry.wild_cell()).ok_or(WildWord("an entry past the end of its pool"))?;
        let owner = MsgOwner(table.owner(cell).load(Ordering::Relaxed));
        match owner.holder() {
            Holder::Published(_) if entry.names(owner.epoch()) => Ok((cell, owner)),
            _ => Err(WildWord("an entry whose buffer is not in the ring")),
        }
    }

    /// Copies and checks the descriptor of a received MSG.
    #[inline(always)]
    pub(crate) fn read_descriptor(
        &self,
        cell: u32,
        owner: MsgOwner,
    ) -> Result<(Descriptor, DataRef), WildWord> {
        self.descriptor_in(self.msg().table.cell(cell), cell, owner)
    }

    /// As [`read_descriptor`](Self::read_descriptor), for the line of the cell.
    #[inline(always)]
    pub(crate) fn descriptor_in(
        &self,
        line: &Line,
        cell: u32,
        owner: MsgOwner,
    ) -> Result<(Descriptor, DataRef), WildWord> {
        let (msg_id, cell_id) = unpack(line.word(IDS).load(Ordering::Relaxed));
        let (msg_len, data_len) = unpack(line.word(LENGTHS).load(Ordering::Relaxed));
        let (msg_len, data_len) = (msg_len.cast_unsigned(), data_len.cast_unsigned());
        if msg_len > self.msg().buf_size() {
            return Err(WildWord("a message longer than its buffer"));
        }
        let data = DataRef(line.word(DATA).load(Ordering::Relaxed));
        if data.is_none() {
            return Ok((Descriptor { msg_id, cell_id, msg_len, data_len: 0 }, data));
        }
        self.check_data(cell, owner, data, data_len)?;
        Ok((Descriptor { msg_id, cell_id, msg_len, data_len }, data))
    }

    /// The descriptor of a MSG buffer for an observer: unchecked, and possibly being written.
    pub(crate) fn peek_descriptor(&self, cell: u32) -> (Descriptor, DataRef) {
        let line = self.msg().table.cell(cell);
        let (msg_id, cell_id) = unpack(line.word(IDS).load(Ordering::Relaxed));
        let (msg_len, data_len) = unpack(line.word(LENGTHS).load(Ordering::Relaxed));
        let data = DataRef(line.word(DATA).load(Ordering::Relaxed));
        let (msg_len, data_len) = (msg_len.cast_unsigned(), data_len.cast_unsigned());
        (Descriptor { msg_id, cell_id, msg_len, data_len }, data)
    }

    #[inline(never)]
    fn check_data(&self, cell: u32, owner: MsgOwner, data: DataRef, data_len: u32) -> Result<(), WildWord> {
        let (id, index) = data
            .parts()
            .filter(|&(id, _)| id != PoolId::CpuMsg)
            .ok_or(WildWord("a DATA part in a pool that cannot hold one"))?;
        let (table, buf_size) = match self.pool(id) {
            Some(pool) => (&pool.table, pool.buf_size()),
            None => {
                self.data_table(id).ok_or(WildWord("a DATA part in a pool that this link does not have"))?
            }
        };
        let index = table.tame(index).ok_or(WildWord("a DATA buffer past the end of its pool"))?;
        let data = DataOwner(table.owner(index).load(Ordering::Relaxed));
        if !data.belongs_to(cell, owner) {
            return Err(WildWord("a DATA buffer that belongs to another message"));
        }
        if data_len > buf_size {
            return Err(WildWord("a DATA part longer than its buffer"));
        }
        Ok(())
    }

    /// Frees a MSG buffer and its DATA from any thread, as [`Endpoint::release`](super::endpoint::Endpoint::release) does
    /// in the handle's thread. Returns `false` if it was recovered, because its holder was declared dead.
    pub(crate) fn release_anywhere(&self, cell: u32, owner: MsgOwner, data: DataRef) -> bool {
        if let Some((pool, index)) = data.parts()
            && let Some((table, _)) = self.data_table(pool)
        {
            let held = DataOwner(table.owner(index).load(Ordering::Relaxed));
            if held.belongs_to(cell, owner) {
                table.release(index, held.0, held.freed().0);
            }
        }
        self.msg().table.release(cell, owner.0, owner.freed().0)
    }

    /// Gives up the seat of a participant of this process with all that it holds, including leaked loans: those must not
    /// outlive their participant.
    pub(crate) fn leave(&self, me: &Participant) {
        if self.seats.is_seated(me) {
            self.reclaim(me, me.seat, false);
        }
    }

    /// How the participant in `seat` receives what is not counted in its times.
    #[inline(always)]
    pub(crate) fn receiving(&self, seat: SeatIndex) -> SeatOwners<'_> {
        SeatOwners { core: self, seat, held: None }
    }
}

/// Why a type cannot be declared.
#[cfg(feature = "typed")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum TypeConflict {
    /// This participant uses another type.
    Used(Participant),
    /// This participant declares a type just now.
    Declaring(Participant),
    /// Messages of the other type wait.
    Waiting,
}

/// Receives from a ring for one seat.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeatOwners<'a> {
    pub(super) core: &'a Core,
    pub(super) seat: SeatIndex,
    /// Where the handle that receives keeps the sampled messages that it holds; `None` counts no times.
    pub(super) held: Option<&'a HeldSamples>,
}

/// Maximum number of sampled messages in buffers whose times a handle measures at once. Of further ones, only the latency is
/// counted.
const HELD_SAMPLES_MAX: usize = 16;

/// A sampled message in a buffer: its cell, its owner word, and when it was received, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct HeldSample {
    cell: u32,
    owner: MsgOwner,
    since: u64,
}

/// The sampled messages that a handle holds.
#[derive(Debug, Default)]
pub(crate) struct HeldSamples {
    /// Bit `cell % 64` of each.
    bits: std::cell::Cell<u64>,
    samples: [std::cell::Cell<Option<HeldSample>>; HELD_SAMPLES_MAX],
}

impl HeldSamples {
    /// Whether there are any.
    #[inline(always)]
    pub(crate) fn any(&self) -> bool {
        self.bits.get() != 0
    }

    /// Whether one of them may be in this cell.
    fn may_be_in(&self, cell: u32) -> bool {
        self.bits.get() >> (cell % 64) & 1 != 0
    }

    /// The message in a cell was received at this time.
    #[cold]
    pub(crate) fn begin(&self, cell: u32, owner: MsgOwner, since: u64) {
        // A sample of the same cell is of a message that is gone.
        let same = self.samples.iter().find(|place| place.get().is_some_and(|sample| sample.cell == cell));
        if let Some(place) = same.or_else(|| self.samples.iter().find(|place| place.get().is_none())) {
            place.set(Some(HeldSample { cell, owner, since }));
            self.bits.set(self.bits.get() | 1 << (cell % 64));
        }
    }

    /// The message in this cell is not the handle's any more. Returns when it was received, if it is one of these.
    #[cold]
    #[inline(never)]
    pub(crate) fn end(&self, cell: u32, owner: MsgOwner) -> Option<u64> {
        if !self.may_be_in(cell) {
            return None;
        }
        let is_it = |sample: &HeldSample| sample.cell == cell && sample.owner == owner;
        let place = self.samples.iter().find(|sample| sample.get().as_ref().is_some_and(is_it))?;
        let ended = place.take()?;
        let left = self.samples.iter().filter_map(std::cell::Cell::get);
        self.bits.set(left.fold(0, |bits, sample| bits | 1 << (sample.cell % 64)));
        Some(ended.since)
    }
}

/// The cell of an entry, checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryCell<'a> {
    pub(crate) line: &'a Line,
    pub(crate) index: u32,
    /// The first byte of the buffer; dangling for an inline cell.
    pub(crate) bytes: NonNull<u8>,
}

impl<'a> Owners for SeatOwners<'a> {
    type Cell = EntryCell<'a>;

    #[inline(always)]
    fn cell(&self, entry: RingEntry) -> Result<EntryCell<'a>, WildWord> {
        self.core.cell_of(entry)
    }

    #[inline(always)]
    fn look_at(&self, entry: RingEntry, EntryCell { line, .. }: EntryCell<'a>) -> Result<Look, WildWord> {
        // Acquire: a thread that sees a later loan of this buffer also sees the `head` that had passed this entry before.
        let owner = MsgOwner(line.word(0).load(Ordering::Acquire));
        if entry.names(owner.epoch()) && owner.is_loaned() {
            return Ok(Look::Here(owner.0));
        }
        self.look_closer(entry, owner)
    }

    #[inline(always)]
    fn take_at(&self, EntryCell { line, .. }: EntryCell<'a>, word: u64) -> bool {
        let borrowed = MsgOwner(word).borrowed(self.seat);
        // No Acquire: `PUBLISH` has made the message visible, and this exchange only decides which consumer gets it.
        // Release pairs with the Acquire of recovery: if recovery sees that this seat has the message, it also sees that we
        // have the seat.
        line.word(0).compare_exchange(word, borrowed.0, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    #[inline(always)]
    fn take_alone(&self, EntryCell { line, .. }: EntryCell<'a>, word: u64) {
        let borrowed = MsgOwner(word).borrowed(self.seat);
        // Release, as in `take_at`. Recovery may see that this seat has the message before it sees that the message has
        // left the ring; it must see that we have the seat.
        line.word(0).store(borrowed.0, Ordering::Release);
    }

    #[inline(always)]
    fn prefetch(&self, entry: RingEntry, EntryCell { line, index, bytes }: EntryCell<'a>) {
        prefetch_exclusive(line);
        // For writing too: the handle that releases this buffer loans it again first.
        if !entry.is_inline() {
            prefetch_exclusive_at(bytes.as_ptr());
        } else if entry.has_second_line()
            && let Some(lines) = self.core.inline_lines(index)
        {
            prefetch_exclusive(lines.second());
        }
    }

    #[cold]
    fn arrived(&self, age: u64, now: u64, held: Option<(EntryCell<'a>, u64)>) {
        let held = held.map(|(cell, word)| (cell.index, MsgOwner(word).borrowed(self.seat)));
        self.count_age(age, now, held);
    }
}

impl SeatOwners<'_> {
    /// Counts how long a sampled message was on its way, which was received at `now`. `held` is its cell and its owner word, if it
    /// is in a buffer.
    #[cold]
    pub(crate) fn count_age(self, age: u64, now: u64, held: Option<(u32, MsgOwner)>) {
        let (Some(times), Some(samples)) = (&self.core.times, self.held) else { return };
        times.count(self.seat, Time::Latency, age);
        if let Some((cell, owner)) = held {
            samples.begin(cell, owner, now);
        }
    }

    /// The state of a message that is not loaned in the entry's epoch.
    #[cold]
    #[inline(never)]
    fn look_closer(self, entry: RingEntry, owner: MsgOwner) -> Result<Look, WildWord> {
        if !entry.names(owner.epoch()) {
            return Ok(Look::Gone);
        }
        Ok(match owner.holder() {
            Holder::Loaned(_) => Look::Here(owner.0),
            // Its last consumer died before it moved `head`, so the message was not received.
            Holder::Borrowed(seat) if self.core.shape.single && seat != self.seat => Look::Here(owner.0),
            Holder::Borrowed(_) | Holder::Free => Look::Gone,
            Holder::Published(_) => return Err(WildWord("a message of the other ring")),
            Holder::Impossible => return Err(WildWord("an owner word that no participant writes")),
        })
    }
}

/// Counts of what a recovery did.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RecoveryStats {
    /// Participants that were found dead, or evicted.
    pub participants: u32,
    /// MSG buffers and inline cells that they held.
    pub messages: u32,
    /// DATA buffers that belonged to those.
    pub data_buffers: u32,
    /// Free buffers without a hint, which got one.
    pub readmitted: u32,
    /// Messages that they had sent and that stay queued.
    pub kept: u32,
}

impl Core {
    /// Recovers all that `dead` holds and vacates its seat. Messages that it had sent stay queued. `me` is the seat that
    /// does it. Any number of participants may do this at once, and each may die during it: every step can be repeated.
    ///
    /// With `keep_seated`, the seat stays taken: the process may still run, and must not share the seat with another.
    pub(crate) fn reclaim(&self, dead: &Participant, me: SeatIndex, keep_seated: bool) -> RecoveryStats {
        // A participant that is wrongly declared dead gets an error from its next call, and from the current one (FENCE). A
        // participant that detaches recovers itself, from its own seat.
        if dead.seat != me && !self.seats.evict(dead) {
            return RecoveryStats::default();
        }
        let mut done = RecoveryStats::default();
        for ring in self.all_rings() {
            if let Ring::Mpmc(ring) = ring {
                ring.fence_producers();
                ring.settle(&self.receiving(me));
            }
        }
        self.fail_requests(dead);
        // Before anything is freed: an entry names an epoch by its last bits, and those wrap.
        self.close_requests(dead, me, &mut done);
        self.reclaim_messages(dead, me, PoolId::CpuMsg as usize, &mut done);
        // An evicted participant may still be copying a small message into or out of its cell, and no later exchange would
        // show it that the cell has a new holder. It has one cell at most, which is freed with the seat.
        if !keep_seated {
            self.reclaim_messages(dead, me, INLINE, &mut done);
        }
        for pool in PoolId::ALL.into_iter().filter(|&pool| pool != PoolId::CpuMsg) {
            self.reclaim_orphans(me, pool, &mut done);
        }
        for table in (0..TABLES).filter_map(|i| self.table(i)) {
            done.readmitted += table.readmit_unknown(me);
            // One that may still run could go on with its move.
            if !keep_seated {
                table.end_move(dead.seat, || self.seats.is_seated(dead));
            }
        }
        // Before the seat is vacated: if this process dies in between, the next recovery continues from here.
        self.seats.record_end(
            dead,
            match keep_seated {
                true => SeatStage::Evicted,
                false if dead.seat == me => SeatStage::Detached,
                false => SeatStage::Died,
            },
        );
        // The dead participant's bit in `SLEEPERS` stays, because its successor in the seat may have set it by now;
        // `notify` checks which seats are taken. Of several concurrent recoveries, only the recovery that vacates the seat counts the
        // participant.
        done.participants = u32::from(keep_seated || self.seats.vacate(dead));
        done
    }

    /// For the new consumer of a ring with a single consumer. Its predecessor may have died before it moved `head`, and may
    /// have had the same seat that is `seat` now. Then its messages would look as if the new consumer had received them.
    pub(crate) fn undo_receptions(&self, ring: &Ring, seat: SeatIndex) {
        let table = &self.msg().table;
        for (_, entry) in ring.queued().filter(|(_, entry)| !entry.is_inline()) {
            let Some(cell) = table.tame(entry.wild_cell()) else { continue };
            let word = table.owner(cell);
            // Relaxed: `PUBLISH` makes the message visible, and this only marks it as sent again.
            let owner = MsgOwner(word.load(Ordering::Relaxed));
            if entry.names(owner.epoch()) && owner.holder() == Holder::Borrowed(seat) {
                let sent = owner.loaned_still(seat);
                let _ = word.compare_exchange(owner.0, sent.0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    fn reclaim_messages(&self, dead: &Participant, me: SeatIndex, place: usize, done: &mut RecoveryStats) {
        let Some(table) = self.table(place) else { return };
        let held: Vec<(u32, MsgOwner)> = (0..u32::try_from(table.len()).unwrap_or(u32::MAX))
            .map(|index| (index, MsgOwner(table.owner(index).load(Ordering::Acquire))))
            .filter(|(_, owner)| {
                matches!(owner.holder(), Holder::Loaned(seat) | Holder::Borrowed(seat) if seat == dead.seat)
            })
            .collect();
        // After the owner words: from here on, the dead participant sends nothing, or its `send` reports the eviction
        // (FENCE). So a message that is in neither ring now was not sent, or it was received, and then its owner word has
        // changed and our exchange fails. Messages of a broadcast ring have no holder.
        let queued: std::collections::BTreeSet<(u32, u64)> = self
            .all_rings()
            .filter(|ring| !ring.is_broadcast())
            .flat_map(Ring::queued)
            .map(|(_, entry)| entry)
            .chain(self.waiting_replies())
            .filter(|entry| entry.is_inline() == (place == INLINE))
            .filter_map(|entry| {
                let index = table.tame(entry.wild_cell())?;
                let owner = MsgOwner(table.owner(index).load(Ordering::Relaxed));
                entry.names(owner.epoch()).then_some((index, owner.epoch()))
            })
            .collect();
        for (index, owner) in held {
            let sent = queued.contains(&(index, owner.epoch()));
            let stays = match owner.holder() {
                Holder::Loaned(_) => sent,
                // Single consumer: it died before it moved `head`, and the next one gets the message. Many consumers: the
                // exchange on the owner word was the reception, and the message died with its receiver.
                _ => sent && self.shape.single,
            };
            if stays {
                done.kept += 1;
                continue;
            }
            // If the dead participant still has its seat, no other one can have written the owner word that we read.
            if !self.seats.is_seated(dead) {
                return;
            }
            if table.reclaim(me, index, owner.0, owner.freed().0) {
                done.messages += 1;
            }
        }
    }

    /// Entries of replies that clients have not received.
    fn waiting_replies(&self) -> impl Iterator<Item = RingEntry> {
        let used = self.seats.used() as u64;
        let seats = (0..used).filter_map(SeatIndex::from_wild);
        self.requests.iter().flat_map(move |requests| {
            seats.clone().flat_map(|seat| requests.replies.of(seat)).flat_map(|slot| slot.waiting())
        })
    }

    /// The id in a request's cell. The cell must be in the table at `place`.
    pub(crate) fn request_id(&self, place: usize, cell: u32) -> Option<RequestId> {
        let (word, mask) = if place == INLINE { (INLINE_REQUEST, INLINE_REQUEST_MASK) } else { (REQUEST, 0) };
        // Acquire pairs with the Release fence of `Endpoint::push_request`: a thread that reads an id also sees that the
        // cell was loaned.
        RequestId::from_wild(self.table(place)?.cell(cell).word(word).load(Ordering::Acquire) ^ mask)
    }

    /// Marks the requests that `dead` had taken as failed. A message that is not a request may have an old id in its cell.
    /// That request was answered, dropped or failed before its buffer was freed, so it is not affected.
    pub(crate) fn fail_requests(&self, dead: &Participant) {
        let Some(requests) = &self.requests else { return };
        for place in [PoolId::CpuMsg as usize, INLINE] {
            let Some(table) = self.table(place) else { continue };
            for cell in 0..u32::try_from(table.len()).unwrap_or(u32::MAX) {
                let owner = MsgOwner(table.owner(cell).load(Ordering::Acquire));
                if owner.holder() != Holder::Borrowed(dead.seat) {
                    continue;
                }
                let Some(id) = self.request_id(place, cell) else { continue };
                // Still the same loan, so the id belongs to it.
                if table.owner(cell).load(Ordering::Relaxed) == owner.0
                    && self.seats.is_seated(dead)
                    && let Some(slot) = requests.replies.slot(id)
                {
                    slot.fail(id.number, dead.word.pid(), true);
                }
            }
        }
    }

    /// Ends the requests of `dead`, and frees replies that it has not received.
    pub(crate) fn close_requests(&self, dead: &Participant, me: SeatIndex, done: &mut RecoveryStats) {
        let Some(requests) = &self.requests else { return };
        for slot in requests.replies.of(dead.seat) {
            slot.end(
                slot.number(),
                &self.receiving(me),
                || self.seats.is_seated(dead),
                |taken| {
                    let place = if taken.entry.is_inline() { INLINE } else { PoolId::CpuMsg as usize };
                    let borrowed = MsgOwner(taken.word).borrowed(me);
                    if let Some(table) = self.table(place)
                        && table.reclaim(me, taken.entry.wild_cell(), borrowed.0, borrowed.freed().0)
                    {
                        done.messages += 1;
                    }
                },
            );
        }
    }

    /// Frees DATA buffers whose MSG buffer was freed.
    fn reclaim_orphans(&self, me: SeatIndex, pool: PoolId, done: &mut RecoveryStats) {
        let Some(table) = self.table(pool as usize) else { return };
        for index in 0..u32::try_from(table.len()).unwrap_or(u32::MAX) {
            let data = DataOwner(table.owner(index).load(Ordering::Acquire));
            let Some((cell, _)) = data.attached_to() else { continue };
            // A MSG buffer is loaned before its DATA buffer and freed after it. Read in this order, a living pair never
            // looks orphaned.
            let owner = self
                .msg()
                .table
                .tame(cell)
                .map(|cell| MsgOwner(self.msg().table.owner(cell).load(Ordering::Relaxed)));
            let alive = owner.is_some_and(|owner| !owner.is_free() && data.belongs_to(cell, owner));
            if !alive && table.reclaim(me, index, data.0, data.freed().0) {
                done.data_buffers += 1;
            }
        }
    }
}
