//! The shared part of a link: every table, and the steps that move a buffer from hand to hand.
//!
//! `Core` knows nothing of files, sockets or bytes of payload, so the same code runs on mapped memory, on the heap, under
//! Miri and under loom.

use std::sync::Arc;

use crate::config::PoolId;
use crate::participant::{MAX_SEATS, Participant, Role, SEAT_LINES, SeatIndex, Seats, Side, Stage};
use crate::pool::owner::{DataOwner, Holder, MsgOwner};
use crate::pool::{Pool, Table};
use crate::ring::broadcast::Kept;
use crate::ring::entry::Entry;
use crate::ring::inline::InlineLines;
use crate::ring::reply::{ReplySlots, RequestId};
use crate::ring::{CONTROL_LINES, Kind, Look, Owners, PRODUCER_ROLE, Ring, Wild};
use crate::segment::layout::{LinkLayout, PoolLayout, Shape};
use crate::segment::payload_type::PayloadTypeLine;
use crate::segment::{Lines, Memory, prefetch_exclusive, prefetch_exclusive_at};
use crate::sync::{Line, Ordering};

/// All tables of a link.
#[derive(Clone, Debug)]
pub(crate) struct Core {
    pub(crate) shape: Shape,
    pub(crate) seats: Seats,
    primary: Lines,
    payload_type: Lines,
    rings: [Ring; 2],
    /// Those whose buffers are here. What is in device memory has no bytes that anybody could reach from here.
    pools: [Option<Pool>; PoolId::COUNT],
    on_device: [Option<Table>; PoolId::COUNT],
    inline: Option<Table>,
    /// The second lines of the inline cells.
    inline_seconds: Option<Lines>,
    requests: Option<Requests>,
}

/// How requests travel, and their replies.
#[derive(Clone, Debug)]
pub(crate) struct Requests {
    /// From the secondary side to the primary.
    pub(crate) ring: Ring,
    pub(crate) replies: ReplySlots,
}

/// A table by its place in a handle's array of caches: the pools by id, then the inline cells.
pub(crate) const TABLES: usize = PoolId::COUNT + 1;
pub(crate) const INLINE: usize = PoolId::COUNT;

/// What a message says about itself, as the receiver copied it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Descriptor {
    pub(crate) msg_id: i32,
    pub(crate) cell_id: i32,
    pub(crate) msg_len: u32,
    pub(crate) data_len: u32,
}

/// The DATA buffer of a message, as a cell says it: `| pool + 1 | index |`, or 0 for none.
///
/// A whole word, like all that moves with a message: a copy that takes a byte here and seven there has to wait for the
/// stores before it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct DataRef(u64);

impl DataRef {
    pub(crate) const NONE: Self = Self(0);

    #[inline(always)]
    pub(crate) fn new(pool: PoolId, index: u32) -> Self {
        Self((pool as u64 + 1) << 32 | u64::from(index))
    }

    /// Pool and index, neither of which is checked against the link.
    #[inline(always)]
    pub(crate) fn parts(self) -> Option<(PoolId, u32)> {
        let id = PoolId::from_index(u32::try_from((self.0 >> 32).wrapping_sub(1)).ok()?)?;
        #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
        let index = self.0 as u32;
        Some((id, index))
    }

    /// The word as it is.
    pub(crate) fn word(self) -> u64 {
        self.0
    }

    /// A word that [`word`](Self::word) gave.
    pub(crate) fn from_word(word: u64) -> Self {
        Self(word)
    }

    #[inline(always)]
    pub(crate) fn is_none(self) -> bool {
        self == Self::NONE
    }
}

/// The descriptor of a MSG, in its cell: words 1 to 4, written where the receiver reads them.
///
/// A loan that carried its descriptor with it would be copied each time it is moved. Only the holder of the MSG writes here,
/// so plain loads and stores of a word will do.
#[derive(Debug)]
pub(crate) struct Cell<'a>(pub(crate) &'a Line);

const IDS: usize = 1;
const LENGTHS: usize = 2;
const DATA: usize = 3;
/// Which device memory the DATA part is in. Only looked at by who reaches for that, so that it need not be cleared.
const MEMORY: usize = 4;
/// Of a request: its id. Only looked at in a message that came off the ring of requests.
const REQUEST: usize = 5;
/// Where an inline request has its id, masked: the first word of its bytes.
const INLINE_REQUEST: usize = 2;
/// There a message that is no request has bytes of its own. Small numbers, which are common, must not be ids: the server's death
/// would fail the requests that they name.
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
    /// Places all tables over the memory of the segments. `None`: a segment is too small, which the headers rule out.
    pub(crate) fn place(
        shape: &Shape,
        shm: &Arc<Memory>,
        pools: &[Option<Arc<Memory>>; PoolId::COUNT],
    ) -> Option<Self> {
        let l = LinkLayout::of(shape);
        let cursors = shm.window(l.cursors, l.cursor_lines)?;
        let ring = |i: usize| {
            let control = shm.window(l.controls[i], CONTROL_LINES)?;
            let slots = shm.window(l.slots[i], l.slot_lines[i])?;
            Some(Ring::new(control, slots, &cursors, shape.ring_capacity as usize, shape.kinds()[i]))
        };
        let (mut placed, mut on_device) = ([const { None }; PoolId::COUNT], [const { None }; PoolId::COUNT]);
        for ((pool, memory), (size, len)) in PoolId::ALL.into_iter().zip(pools).zip(shape.pools) {
            if len == 0 {
                continue;
            }
            let (l, memory) = (PoolLayout::of(pool, size, len), memory.as_ref()?);
            if pool.is_device() {
                on_device[pool as usize] = Some(Table::place(memory, l.table, len as usize)?);
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
                    ring: Ring::new(control, slots, &cursors, capacity, Kind::Mpmc),
                    replies: ReplySlots::new(shm.window(replies, MAX_SEATS * window)?, window),
                })
            }
        };
        Some(Self {
            shape: *shape,
            seats: Seats::new(shm.window(l.seats, SEAT_LINES)?),
            primary: shm.window(l.primary_role, 1)?,
            payload_type: shm.window(l.payload_type, 1)?,
            rings: [ring(0)?, ring(1)?],
            pools: placed,
            on_device,
            inline: if shape.single { None } else { Some(Table::place(shm, l.inline, l.inline_cells)?) },
            inline_seconds: if shape.single {
                None
            } else {
                Some(shm.window(l.inline_seconds, l.inline_cells)?)
            },
            requests,
        })
    }

    /// Turns fresh, zeroed memory into an empty link.
    pub(crate) fn format(&self) {
        for table in (0..TABLES).filter_map(|i| self.table(i)) {
            table.format();
        }
    }

    /// A link on the heap.
    #[cfg(test)]
    pub(crate) fn heap(shape: &Shape) -> Self {
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

    /// A pool whose buffers are here.
    #[inline]
    pub(crate) fn pool(&self, pool: PoolId) -> Option<&Pool> {
        self.pools[pool as usize].as_ref()
    }

    /// The table of a pool, wherever its buffers are, and the size of one.
    pub(crate) fn data_table(&self, pool: PoolId) -> Option<(&Table, u32)> {
        Some((self.table(pool as usize)?, self.shape.pools[pool as usize].0))
    }

    /// The table at a place in the array of [`TABLES`].
    pub(crate) fn table(&self, place: usize) -> Option<&Table> {
        match self.pools.get(place) {
            Some(Some(pool)) => Some(&pool.table),
            Some(None) => self.on_device[place].as_ref(),
            None => self.inline.as_ref(),
        }
    }

    /// The MSG pool; a link always has one.
    #[inline]
    pub(crate) fn msg(&self) -> &Pool {
        match &self.pools[PoolId::CpuMsg as usize] {
            Some(pool) => pool,
            None => unreachable!("`Shape::is_sane` and `LinkConfig::validate` ask for a MSG pool"),
        }
    }

    pub(crate) fn inline(&self) -> Option<&Table> {
        self.inline.as_ref()
    }

    /// The lines of an inline cell, whose index must be checked; `None` on a link that has none.
    #[inline(always)]
    pub(crate) fn inline_lines(&self, cell: u32) -> Option<InlineLines<'_>> {
        let (table, seconds) = (self.inline.as_ref()?, self.inline_seconds.as_ref()?);
        Some(InlineLines::new(table.cell(cell), seconds, cell as usize))
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

    /// All rings from which messages are taken.
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

    /// The role of the participant that is being admitted to a side which takes one process only.
    pub(crate) fn admission_role(&self, side: Side) -> Role<'_> {
        Role(self.primary[0].word(if side == Side::Primary { 2 } else { 3 }))
    }

    /// Where the type of the payload is declared.
    pub(crate) fn payload_type(&self) -> PayloadTypeLine<'_> {
        PayloadTypeLine(&self.payload_type[0])
    }

    /// The messages in buffers that were sent on a broadcast ring and not freed.
    pub(crate) fn published(&self) -> impl Iterator<Item = Kept> + '_ {
        let table = &self.msg().table;
        (0..u32::try_from(table.len()).unwrap_or(u32::MAX)).filter_map(|cell| self.kept(cell))
    }

    /// What to free when the message in `cell`, whose index must be checked, has been read; `None` if it was not sent on a
    /// broadcast ring.
    fn kept(&self, cell: u32) -> Option<Kept> {
        let owner = MsgOwner(self.msg().table.owner(cell).load(Ordering::Acquire));
        let Holder::Published(_) = owner.holder() else { return None };
        let data = self.read_descriptor(cell, owner).map_or(DataRef::NONE, |(_, data)| data);
        Some(Kept { cell, owner: owner.0, data: data.0 })
    }

    /// As [`kept`](Self::kept), of an entry of a broadcast ring.
    pub(crate) fn kept_of(&self, entry: Entry) -> Option<Kept> {
        let kept = self.kept(self.msg().table.tame(entry.wild_cell())?)?;
        entry.names(MsgOwner(kept.owner).epoch()).then_some(kept)
    }

    /// The cell of a message that a reader of a broadcast ring keeps from being freed, and its owner word.
    #[inline(always)]
    pub(crate) fn look_published(&self, entry: Entry) -> Result<(u32, MsgOwner), Wild> {
        let table = &self.msg().table;
        let cell = table.tame(entry.wild_cell()).ok_or(Wild("an entry past the end of its pool"))?;
        let owner = MsgOwner(table.owner(cell).load(Ordering::Relaxed));
        match owner.holder() {
            Holder::Published(_) if entry.names(owner.epoch()) => Ok((cell, owner)),
            _ => Err(Wild("an entry whose buffer is not in the ring")),
        }
    }

    /// Copies and checks the descriptor of a received MSG.
    #[inline(always)]
    pub(crate) fn read_descriptor(&self, cell: u32, owner: MsgOwner) -> Result<(Descriptor, DataRef), Wild> {
        let line = self.msg().table.cell(cell);
        let (msg_id, cell_id) = unpack(line.word(IDS).load(Ordering::Relaxed));
        let (msg_len, data_len) = unpack(line.word(LENGTHS).load(Ordering::Relaxed));
        let (msg_len, data_len) = (msg_len.cast_unsigned(), data_len.cast_unsigned());
        if msg_len > self.msg().buf_size() {
            return Err(Wild("a message longer than its buffer"));
        }
        let data = DataRef(line.word(DATA).load(Ordering::Relaxed));
        if data.is_none() {
            return Ok((Descriptor { msg_id, cell_id, msg_len, data_len: 0 }, data));
        }
        self.check_data(cell, owner, data, data_len)?;
        Ok((Descriptor { msg_id, cell_id, msg_len, data_len }, data))
    }

    /// The descriptor of a MSG as it lies there, for who looks on: unchecked, and perhaps being written.
    pub(crate) fn peek_descriptor(&self, cell: u32) -> (Descriptor, DataRef) {
        let line = self.msg().table.cell(cell);
        let (msg_id, cell_id) = unpack(line.word(IDS).load(Ordering::Relaxed));
        let (msg_len, data_len) = unpack(line.word(LENGTHS).load(Ordering::Relaxed));
        let data = DataRef(line.word(DATA).load(Ordering::Relaxed));
        let (msg_len, data_len) = (msg_len.cast_unsigned(), data_len.cast_unsigned());
        (Descriptor { msg_id, cell_id, msg_len, data_len }, data)
    }

    fn check_data(&self, cell: u32, owner: MsgOwner, data: DataRef, data_len: u32) -> Result<(), Wild> {
        let (id, index) = data
            .parts()
            .filter(|&(id, _)| id != PoolId::CpuMsg)
            .ok_or(Wild("a DATA part in a pool that cannot hold one"))?;
        let (table, buf_size) = match self.pool(id) {
            Some(pool) => (&pool.table, pool.buf_size()),
            None => self.data_table(id).ok_or(Wild("a DATA part in a pool that this link does not have"))?,
        };
        let index = table.tame(index).ok_or(Wild("a DATA buffer past the end of its pool"))?;
        let data = DataOwner(table.owner(index).load(Ordering::Relaxed));
        if !data.belongs_to(cell, owner) {
            return Err(Wild("a DATA buffer that belongs to another message"));
        }
        if data_len > buf_size {
            return Err(Wild("a DATA part longer than its buffer"));
        }
        Ok(())
    }

    /// Ends a MSG and its DATA in any thread, as [`Endpoint::release`](super::endpoint::Endpoint::release) does in the handle's.
    /// `false`: it was taken away, because its holder was declared dead.
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

    /// Gives up the seat of a participant of this process, with all that it holds: also what was forgotten, as a loan that was
    /// leaked must not outlive its participant.
    pub(crate) fn leave(&self, me: &Participant) {
        if self.seats.is_seated(me) {
            self.reclaim(me, me.seat, false);
        }
    }

    /// How the participant at `seat` takes messages off its ring.
    #[inline(always)]
    pub(crate) fn receiving(&self, seat: SeatIndex) -> Receiving<'_> {
        Receiving { core: self, seat }
    }
}

/// Takes messages off a ring for one seat.
#[derive(Debug)]
pub(crate) struct Receiving<'a> {
    core: &'a Core,
    seat: SeatIndex,
}

impl Receiving<'_> {
    #[inline(always)]
    fn table(&self, entry: Entry) -> Result<&Table, Wild> {
        if entry.is_inline() {
            return self.core.inline.as_ref().ok_or(Wild("an inline cell on a link that has none"));
        }
        Ok(&self.core.msg().table)
    }
}

impl Owners for Receiving<'_> {
    #[inline(always)]
    fn look(&self, entry: Entry) -> Result<Look, Wild> {
        let table = self.table(entry)?;
        let cell = table.tame(entry.wild_cell()).ok_or(Wild("an entry past the end of its pool"))?;
        // Acquire: whoever sees a later loan of this buffer sees the `head` that had passed this entry before.
        let owner = MsgOwner(table.owner(cell).load(Ordering::Acquire));
        if !entry.names(owner.epoch()) {
            return Ok(Look::Gone);
        }
        Ok(match owner.holder() {
            Holder::Loaned(_) => Look::Here(owner.0),
            // Its last consumer died before it moved `head`, so it never got the message.
            Holder::Borrowed(seat) if self.core.shape.single && seat != self.seat => Look::Here(owner.0),
            Holder::Borrowed(_) | Holder::Free => Look::Gone,
            Holder::Published(_) => return Err(Wild("a message of the other ring")),
            Holder::Impossible => return Err(Wild("an owner word that nobody writes")),
        })
    }

    #[inline(always)]
    fn take(&self, entry: Entry, word: u64) -> bool {
        let Ok(table) = self.table(entry) else { return false };
        let borrowed = MsgOwner(word).borrowed(self.seat);
        // No Acquire: `PUBLISH` has made the message visible, and this exchange only decides who gets it. Release pairs with
        // the Acquire of recovery: who sees that this seat has the message sees that we have the seat.
        let owner = table.owner(entry.wild_cell());
        owner.compare_exchange(word, borrowed.0, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    #[inline(always)]
    fn take_alone(&self, entry: Entry, word: u64) {
        let borrowed = MsgOwner(word).borrowed(self.seat);
        // Release, as in `take`: a recoverer that sees this seat has the message, and not yet the ring that it came from, must
        // see that we have the seat.
        self.core.msg().table.owner(entry.wild_cell()).store(borrowed.0, Ordering::Release);
    }

    #[inline(always)]
    fn ahead(&self, entry: Entry) {
        let Ok(table) = self.table(entry) else { return };
        if let Some(cell) = table.tame(entry.wild_cell()) {
            prefetch_exclusive(table.cell(cell));
            // Exclusive too: whoever releases this buffer is the first to loan it again.
            if !entry.is_inline() {
                prefetch_exclusive_at(self.core.msg().buffer(cell).as_ptr());
            } else if entry.has_second_line()
                && let Some(lines) = self.core.inline_lines(cell)
            {
                prefetch_exclusive(lines.second());
            }
        }
    }
}

/// What recovery gave back.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// let held = mac.loan_with(shmesh::config::PoolId::CpuData)?;
/// let done = phy.evict(mac.seat())?;
/// assert_eq!((done.participants, done.messages, done.data_buffers), (1, 1, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Recovered {
    /// Participants that were found dead, or were evicted.
    pub participants: u32,
    /// MSG buffers and inline cells that they held.
    pub messages: u32,
    /// DATA buffers that were attached to them.
    pub data_buffers: u32,
    /// Free buffers that no list named.
    pub readmitted: u32,
    /// Messages that they had sent and that stay queued.
    pub kept: u32,
}

impl Core {
    /// Takes back all that `dead` holds and gives its seat free; what it had sent stays sent. `me` is the seat that does
    /// it. Any number of participants may do this at once, and each may die in it: every step can be repeated.
    ///
    /// With `keep_seated`, the seat stays taken: its process may still run, and must not share the seat with another.
    pub(crate) fn reclaim(&self, dead: &Participant, me: SeatIndex, keep_seated: bool) -> Recovered {
        // Who is wrongly taken for dead is told so by its next call, and by the one that it is in (FENCE). Who leaves does this
        // from its own seat.
        if dead.seat != me && !self.seats.evict(dead) {
            return Recovered::default();
        }
        let mut done = Recovered::default();
        for ring in self.all_rings() {
            if let Ring::Mpmc(ring) = ring {
                ring.fence_producers();
                ring.settle(&self.receiving(me));
            }
        }
        self.fail_requests(dead);
        // Before anything is freed: an entry names an epoch by its last bits, and those come round.
        self.close_requests(dead, me, &mut done);
        self.reclaim_messages(dead, me, PoolId::CpuMsg as usize, &mut done);
        // Who may still run may be copying a small message into or out of its cell, with no later exchange that could tell it
        // that the cell is another's. It has one at most; the cell comes back with the seat.
        if !keep_seated {
            self.reclaim_messages(dead, me, INLINE, &mut done);
        }
        for pool in PoolId::ALL.into_iter().filter(|&pool| pool != PoolId::CpuMsg) {
            self.reclaim_orphans(me, pool, &mut done);
        }
        for table in (0..TABLES).filter_map(|i| self.table(i)) {
            done.readmitted += table.readmit_unknown(me);
        }
        // Before the seat is vacated: if we die in between, the next one to recover it goes on from here.
        self.seats.record_end(
            dead,
            match keep_seated {
                true => Stage::Evicted,
                false if dead.seat == me => Stage::Detached,
                false => Stage::Died,
            },
        );
        // Its bit among those who sleep stays: the next one in the seat may have set it by now. `notify` asks who is seated.
        // Of all who recover it at once, one vacates the seat, and counts.
        done.participants = u32::from(keep_seated || self.seats.vacate(dead));
        done
    }

    /// For the new consumer of a ring with one: its predecessor may have died before it moved `head`, and may have had the
    /// very seat that is `seat` now. Then its messages would seem to have been received by this one.
    pub(crate) fn undo_receptions(&self, ring: &Ring, seat: SeatIndex) {
        let table = &self.msg().table;
        for (_, entry) in ring.queued().filter(|(_, entry)| !entry.is_inline()) {
            let Some(cell) = table.tame(entry.wild_cell()) else { continue };
            let word = table.owner(cell);
            // Relaxed: `PUBLISH` brings the message, and this only says again that it was sent.
            let owner = MsgOwner(word.load(Ordering::Relaxed));
            if entry.names(owner.epoch()) && owner.holder() == Holder::Borrowed(seat) {
                let sent = owner.loaned_still(seat);
                let _ = word.compare_exchange(owner.0, sent.0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    fn reclaim_messages(&self, dead: &Participant, me: SeatIndex, place: usize, done: &mut Recovered) {
        let Some(table) = self.table(place) else { return };
        let held: Vec<(u32, MsgOwner)> = (0..u32::try_from(table.len()).unwrap_or(u32::MAX))
            .map(|index| (index, MsgOwner(table.owner(index).load(Ordering::Acquire))))
            .filter(|(_, owner)| {
                matches!(owner.holder(), Holder::Loaned(seat) | Holder::Borrowed(seat) if seat == dead.seat)
            })
            .collect();
        // After the owner words: the dead one sends nothing any more, or is told that it was evicted (FENCE). So what is in
        // neither ring now was not sent, or was received, and then its owner word has changed and our exchange fails.
        // What was sent on a broadcast ring has no holder.
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
                // One consumer: it died before it moved `head`, and the next one gets the message. Many consumers: the
                // exchange on the owner word was the reception, and the message died with its receiver.
                _ => sent && self.shape.single,
            };
            if stays {
                done.kept += 1;
                continue;
            }
            // If the dead one still has its seat, nobody else can have written the owner word that we read.
            if !self.seats.is_seated(dead) {
                return;
            }
            if table.reclaim(me, index, owner.0, owner.freed().0) {
                done.messages += 1;
            }
        }
    }

    /// Entries of the replies that wait for clients.
    fn waiting_replies(&self) -> impl Iterator<Item = Entry> {
        let used = self.seats.used() as u64;
        let seats = (0..used).filter_map(SeatIndex::from_wild);
        self.requests.iter().flat_map(move |requests| {
            seats.clone().flat_map(|seat| requests.replies.of(seat)).flat_map(|slot| slot.waiting())
        })
    }

    /// The id in a request's cell; the cell must be in the table of `place`.
    pub(crate) fn request_id(&self, place: usize, cell: u32) -> Option<RequestId> {
        let (word, mask) = if place == INLINE { (INLINE_REQUEST, INLINE_REQUEST_MASK) } else { (REQUEST, 0) };
        // Acquire pairs with the Release fence of `Endpoint::push_request`: who reads an id sees that the cell was loaned.
        RequestId::from_wild(self.table(place)?.cell(cell).word(word).load(Ordering::Acquire) ^ mask)
    }

    /// Tells the clients of the requests that `dead` had taken. A message that is no request may have an old id in its cell:
    /// that request was answered, dropped or failed before its buffer was freed, so nothing happens to it.
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
                // Still the same loan, so the id is of it.
                if table.owner(cell).load(Ordering::Relaxed) == owner.0
                    && self.seats.is_seated(dead)
                    && let Some(slot) = requests.replies.slot(id)
                {
                    slot.fail(id.number, dead.word.pid(), true);
                }
            }
        }
    }

    /// Ends the requests of `dead` and frees the replies that wait for them.
    pub(crate) fn close_requests(&self, dead: &Participant, me: SeatIndex, done: &mut Recovered) {
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

    /// Frees the DATA buffers whose MSG is over.
    fn reclaim_orphans(&self, me: SeatIndex, pool: PoolId, done: &mut Recovered) {
        let Some(table) = self.table(pool as usize) else { return };
        for index in 0..u32::try_from(table.len()).unwrap_or(u32::MAX) {
            let data = DataOwner(table.owner(index).load(Ordering::Acquire));
            let Some((cell, _)) = data.attached_to() else { continue };
            // A MSG is loaned before its DATA and freed after it: read in this order, a living pair never looks orphaned.
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
