//! A snapshot of a link: attached participants, queued messages, owners of buffers.

use std::collections::BTreeSet;

use shmesh_sys::process::{Liveness, ProcessIdentity};

use super::View;
use super::seat_locks::SeatLocks;
use crate::config::PoolId;
use crate::link::core::{INLINE, Requests, unpack};
use crate::participant::times::{LinkTimes, Time};
use crate::participant::{Participant, SeatIndex, Seats, Side};
use crate::pool::OwnerTable;
use crate::pool::owner::{DataOwner, Holder, MsgOwner};
use crate::ring::entry::RingEntry;
use crate::ring::reply::ReplySlot;
use crate::ring::{Ring, SLEEPERS, WildWord};
use crate::segment::layout::PoolLayout;
use crate::sync::{LINE_BYTES, Ordering, WORDS_PER_LINE};

/// An occupied seat, and the state of its participant.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// let me = view.seats()[0];
/// assert_eq!(me.participant.seat, link.seat());
/// assert_eq!(me.liveness, shmesh::Liveness::Alive);
/// assert!(!me.asleep);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SeatView {
    /// The participant in the seat.
    pub participant: Participant,
    /// Whether its process is alive; for a process in another pid namespace, the lock of its seat shows it.
    pub liveness: Liveness,
    /// The reason why the liveness is unknown, if it is.
    pub unknown_because: Option<&'static str>,
    /// Whether it sleeps, or has a bell that must be rung.
    pub asleep: bool,
    /// Its position, if it is a reader of a broadcast ring.
    pub reader: Option<ReaderView>,
}

/// The position of a reader of a broadcast ring.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("weights".parse()?);
/// # config.ring_mode = shmesh::config::RingMode::Broadcast;
/// let writer = options.create(&config)?;
/// let reader = options.attach("weights", shmesh::Side::Secondary)?;
/// writer.send_inline(1, 0, b"")?;
/// let view = shmesh::inspect::View::open(dir.path(), &"weights".parse()?)?;
/// let seat = view.seats().into_iter().find(|seat| seat.participant.seat == reader.seat()).expect("attached");
/// let place = seat.reader.expect("it reads");
/// assert_eq!((place.behind, place.lost), (1, 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReaderView {
    /// Messages that it has not received, or received and still holds; with `slow: skip`, only those that it has not
    /// received.
    pub behind: u64,
    /// Messages that it lost because the writer overtook it.
    pub lost: u64,
}

/// The state of a buffer that is not free.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// use shmesh::inspect::BufferState;
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// let loan = link.loan()?;
/// assert_eq!(view.snapshot().tables[0].held[0].hand, BufferState::Loaned(link.seat()));
/// loan.send()?;
/// assert_eq!(view.snapshot().tables[0].held[0].hand, BufferState::Queued(link.seat()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BufferState {
    /// The buffer is free.
    Free,
    /// A living participant has loaned it to write a message.
    Loaned(SeatIndex),
    /// It was sent by this participant and not received yet; in a broadcast ring, not freed yet.
    Queued(SeatIndex),
    /// A living participant has received it.
    Borrowed(SeatIndex),
    /// Its owner has ended, and recovery frees it. `None` for a DATA buffer whose MSG buffer was released.
    Orphaned(Option<SeatIndex>),
    /// Its owner word has a value that this library never writes.
    Damaged,
}

/// A message that is queued in a ring.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// link.loan()?.with_msg_id(7).send()?;
/// let [queued] = view.snapshot().rings[0].queued[..] else { panic!("one message was sent") };
/// assert_eq!((queued.position, queued.msg_id, queued.sender), (0, 7, Some(link.seat())));
/// assert_eq!(queued.wrong, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct QueuedMessage {
    /// Its position in the stream: the number of messages sent on this ring before it, since the link was created.
    pub position: u64,
    /// Whether it is an inline message.
    pub inline: bool,
    /// Index of the MSG buffer, or of the inline cell on a link with many producers.
    pub buffer: Option<u32>,
    /// The sender; unknown for inline messages of `spsc` rings.
    pub sender: Option<SeatIndex>,
    /// The id of the message.
    pub msg_id: i32,
    /// The id of the radio cell, or another number that the sender chose.
    pub cell_id: i32,
    /// Length of the MSG part in bytes.
    pub msg_len: u32,
    /// Pool and index of the DATA buffer, and the length of the DATA part.
    pub data: Option<(PoolId, u32, u32)>,
    /// The damage for which a receiver will refuse it, if any.
    pub wrong: Option<&'static str>,
}

/// One direction of a link.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// mac.send_inline(1, 0, b"first")?;
/// mac.send_inline(1, 0, b"second")?;
/// drop(phy.receive()?);
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// let [_, s2m] = view.snapshot().rings;
/// assert_eq!((s2m.sent, s2m.received, s2m.queued.len()), (2, 1, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RingView {
    /// The side that sends on it.
    pub from: Side,
    /// Number of messages sent so far; it never decreases.
    pub sent: u64,
    /// Number of messages received so far; in a broadcast ring, by all readers.
    pub received: u64,
    /// Queued messages, oldest first.
    pub queued: Vec<QueuedMessage>,
}

impl RingView {
    /// The name of the ring, as in NVIPC: `m2s` or `s2m`.
    ///
    /// The primary sends on `m2s`, the secondary on `s2m`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.from {
            Side::Primary => "m2s",
            Side::Secondary => "s2m",
        }
    }
}

/// The requests of a link.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// config.request_window = 8;
/// # let phy = options.create(&config)?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// let pending = [mac.request_inline(1, 0, b"")?, mac.request_inline(2, 0, b"")?];
/// phy.receive_request()?.expect("two were made").reply_inline(3, 0, b"")?;
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// let requests = view.snapshot().requests.expect("it has requests");
/// assert_eq!((requests.made, requests.queued, requests.pending, requests.replies), (2, 1, 2, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RequestsView {
    /// Maximum number of pending requests of a participant of the secondary side.
    pub window: u32,
    /// Number of requests made so far; it never decreases.
    pub made: u64,
    /// Number of requests that no server has taken yet.
    pub queued: usize,
    /// Number of requests whose clients wait for replies, taken or not.
    pub pending: usize,
    /// Number of replies that wait for their clients.
    pub replies: usize,
}

/// A buffer that is not free.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// let loan = link.loan()?;
/// let held = view.snapshot().tables[0].held[0];
/// assert_eq!(held.index, loan.index());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HeldBuffer {
    /// Its index in the pool.
    pub index: u32,
    /// Its state and owner.
    pub hand: BufferState,
}

/// The buffers of a pool, or the inline cells.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// let snapshot = view.snapshot();
/// let pools: Vec<_> = snapshot.tables.iter().map(|table| table.pool.map(|pool| pool.name())).collect();
/// assert_eq!(pools, [Some("cpu_msg"), Some("cpu_data"), None], "the last are the inline cells");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TableView {
    /// The pool; `None` for the cells of inline messages.
    pub pool: Option<PoolId>,
    /// The number of buffers.
    pub len: usize,
    /// Buffers that are not free.
    pub held: Vec<HeldBuffer>,
}

impl TableView {
    /// The number of buffers whose state `of` accepts.
    #[must_use]
    pub fn count(&self, of: impl Fn(BufferState) -> bool) -> usize {
        self.held.iter().filter(|held| of(held.hand)).count()
    }

    /// The number of free buffers.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
    /// let loan = link.loan()?;
    /// assert_eq!(view.snapshot().tables[0].free(), 1023);
    /// drop(loan);
    /// assert_eq!(view.snapshot().tables[0].free(), 1024);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn free(&self) -> usize {
        self.len - self.held.len()
    }
}

/// The state of a link at one moment.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// let loan = mac.loan_with(shmesh::config::PoolId::CpuData)?;
/// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
/// let snapshot = view.snapshot();
/// assert_eq!(snapshot.seats.len(), 2);
/// assert!(snapshot.rings.iter().all(|ring| ring.queued.is_empty()));
/// assert_eq!(snapshot.tables.iter().map(|table| table.held.len()).sum::<usize>(), 2, "a MSG and its DATA");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Snapshot {
    /// Attached participants, dead or alive.
    pub seats: Vec<SeatView>,
    /// The rings `m2s` and `s2m`, in this order.
    pub rings: [RingView; 2],
    /// Requests and replies; `None` if the link has none.
    pub requests: Option<RequestsView>,
    /// The pools, then the inline cells, of a link that has them.
    pub tables: Vec<TableView>,
    /// Number of times that a receiver was woken by a system call since the link was created.
    pub wake_ups: u64,
    /// Number of participants that were recovered after their death since the link was created.
    pub recovered: u64,
}

impl Snapshot {
    /// The participant in `seat`.
    ///
    /// `None` if the seat was vacant.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
    /// let snapshot = view.snapshot();
    /// let there = snapshot.seat(mac.seat()).expect("it is attached");
    /// assert_eq!(there.participant.word.side(), shmesh::Side::Secondary);
    /// drop(mac);
    /// assert!(view.snapshot().seat(there.participant.seat).is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn seat(&self, seat: SeatIndex) -> Option<&SeatView> {
        self.seats.iter().find(|other| other.participant.seat == seat)
    }
}

/// All participants in `seats`; `rings` show which of them are asleep.
pub(super) fn seats(seats: &Seats, rings: &[Ring], me: &ProcessIdentity, locks: &SeatLocks) -> Vec<SeatView> {
    let asleep =
        rings.iter().fold(0, |all, ring| all | ring.words().control(SLEEPERS).load(Ordering::Relaxed));
    let view = |participant: Participant| {
        let (liveness, unknown_because) = locks.liveness(seats, &participant, me);
        let asleep = asleep & participant.seat.bit() != 0;
        let reader = rings.iter().find_map(|ring| match ring {
            Ring::Broadcast(ring) => ring.place_of(&participant, seats),
            Ring::Spsc(_) | Ring::Mpmc(_) => None,
        });
        let reader = reader.map(|(behind, lost)| ReaderView { behind, lost });
        SeatView { participant, liveness, unknown_because, asleep, reader }
    };
    seats.all().map(view).collect()
}

/// Buffers that are queued in a ring, by table and epoch.
type InRings = BTreeSet<(bool, u32, u64)>;

impl View {
    /// Attached participants, dead or alive.
    ///
    /// In the order of their seats.
    #[must_use]
    pub fn seats(&self) -> Vec<SeatView> {
        seats(&self.core.seats, self.core.rings(), &self.me, &self.locks)
    }

    /// The times of sampled messages; `None` if the link has no samples ([`LinkConfig::latency_sample`]).
    ///
    /// [`LinkConfig::latency_sample`]: crate::config::LinkConfig::latency_sample
    #[must_use]
    pub fn times(&self) -> Option<LinkTimes> {
        let times = self.core.times.as_ref()?;
        let [latency, hold] = [Time::Latency, Time::Hold].map(|time| times.sum(time, self.core.seats.used()));
        Some(LinkTimes { sample: self.core.shape.latency_sample, latency, hold })
    }

    /// Takes a snapshot of the link.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
    /// let before = view.snapshot();
    /// link.send_inline(7, 0, b"slot 7")?;
    /// assert_eq!(before.rings[0].queued.len(), 0, "a copy, which stays as it was");
    /// assert_eq!(view.snapshot().rings[0].queued.len(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        // Seats are read last: a buffer of a participant that detaches meanwhile is read twice before it counts as
        // orphaned.
        let tables: Vec<_> =
            [PoolId::CpuMsg.index(), INLINE].into_iter().filter_map(|i| self.core.table(i)).collect();
        let owners: Vec<Vec<u64>> = tables.iter().map(|table| words(table)).collect();
        let rings = [Side::Primary, Side::Secondary].map(|from| self.ring(from));
        let requests = self.core.requests();
        let in_rings = self.in_rings(&rings, requests);
        let requests = requests.map(|requests| self.requests(requests));
        let seats = self.seats();

        let mut views = vec![self.messages(&in_rings, &seats, false, tables[0], &owners[0])];
        for pool in PoolId::ALL.into_iter().skip(1) {
            if let Some(table) = self.core.table(pool.index()) {
                views.push(self.data(&in_rings, &seats, pool, table));
            }
        }
        if let (Some(table), Some(owners)) = (tables.get(1), owners.get(1)) {
            views.push(self.messages(&in_rings, &seats, true, table, owners));
        }
        Snapshot {
            seats,
            rings,
            requests,
            tables: views,
            wake_ups: self.core.seats.rung(),
            recovered: self.core.seats.recovered(),
        }
    }

    fn ring(&self, from: Side) -> RingView {
        let ring = self.core.outgoing(from);
        // In a broadcast ring messages are queued for readers that have not received them, and others stay for
        // newcomers.
        let received = match ring {
            Ring::Broadcast(ring) => ring.received(&self.core.seats),
            Ring::Spsc(_) | Ring::Mpmc(_) => ring.head(),
        };
        let queued = ring
            .queued()
            .filter(|&(position, _)| position.wrapping_sub(received).cast_signed() >= 0)
            .filter_map(|(position, entry)| self.queued(from, position, entry))
            .collect();
        RingView { from, sent: ring.sent(), received, queued }
    }

    fn reply_slots<'a>(&self, requests: &'a Requests) -> impl Iterator<Item = ReplySlot<'a>> {
        let seats = (0..self.core.seats.used() as u64).filter_map(SeatIndex::from_wild);
        seats.flat_map(|seat| requests.replies.of(seat))
    }

    fn requests(&self, requests: &Requests) -> RequestsView {
        RequestsView {
            window: self.core.shape.request_window,
            made: requests.ring.sent(),
            queued: requests.ring.queued().count(),
            pending: self.reply_slots(requests).filter(|slot| slot.is_pending()).count(),
            replies: self.reply_slots(requests).flat_map(ReplySlot::seen).count(),
        }
    }

    /// The message of an entry. `None` if it was received, or its sender was declared dead.
    fn queued(&self, from: Side, position: u64, entry: RingEntry) -> Option<QueuedMessage> {
        let mut seen = QueuedMessage {
            position,
            inline: entry.is_inline(),
            buffer: None,
            sender: None,
            msg_id: 0,
            cell_id: 0,
            msg_len: 0,
            data: None,
            wrong: None,
        };
        match self.describe(from, position, entry, &mut seen) {
            Ok(true) => {}
            Ok(false) => return None,
            Err(WildWord(what)) => seen.wrong = Some(what),
        }
        Some(seen)
    }

    fn describe(
        &self,
        from: Side,
        position: u64,
        entry: RingEntry,
        seen: &mut QueuedMessage,
    ) -> Result<bool, WildWord> {
        let (single, ring) = (self.core.shape.single, self.core.outgoing(from));
        if entry.is_inline() {
            seen.msg_len = entry.inline_len().ok_or(WildWord("an inline message longer than its slot"))?;
        }
        if entry.is_inline()
            && let Some(lines) = ring.lines(position)
        {
            (seen.msg_id, seen.cell_id) = unpack(lines.ids());
            return Ok(true);
        }
        let table = self.core.table(if entry.is_inline() { INLINE } else { PoolId::CpuMsg.index() });
        let table = table.ok_or(WildWord("an inline cell on a link that has none"))?;
        let cell = table.tame(entry.wild_cell()).ok_or(WildWord("an entry past the end of its pool"))?;
        seen.buffer = Some(cell);
        let owner = MsgOwner(table.owner(cell).load(Ordering::Acquire));
        if !entry.names(owner.epoch()) {
            return Ok(false);
        }
        match owner.holder() {
            Holder::Loaned(seat) | Holder::Published(seat) => seen.sender = Some(seat),
            // Its consumer has not moved `head`: if it died meanwhile, the next consumer gets the message.
            Holder::Borrowed(_) if single => {}
            Holder::Borrowed(_) | Holder::Free => return Ok(false),
            Holder::Impossible => return Err(WildWord("an impossible owner word")),
        }
        if entry.is_inline() {
            (seen.msg_id, seen.cell_id) = unpack(table.cell(cell).word(1).load(Ordering::Relaxed));
            return Ok(true);
        }
        let (descriptor, data) = self.core.read_descriptor(cell, owner)?;
        (seen.msg_id, seen.cell_id, seen.msg_len) =
            (descriptor.msg_id, descriptor.cell_id, descriptor.msg_len);
        seen.data = data.parts().map(|(pool, index)| (pool, index, descriptor.data_len));
        Ok(true)
    }

    fn in_rings(&self, rings: &[RingView; 2], requests: Option<&Requests>) -> InRings {
        let of_requests = requests.into_iter().flat_map(|requests| {
            let replies = self.reply_slots(requests).flat_map(ReplySlot::seen);
            requests.ring.queued().map(|(_, entry)| entry).chain(replies)
        });
        let of_requests = of_requests.filter_map(|entry| {
            let table = self.core.table(if entry.is_inline() { INLINE } else { PoolId::CpuMsg.index() })?;
            let index = table.tame(entry.wild_cell())?;
            let owner = MsgOwner(table.owner(index).load(Ordering::Relaxed));
            // A request that a server has taken is not queued.
            let waits = entry.names(owner.epoch()) && matches!(owner.holder(), Holder::Loaned(_));
            waits.then(|| (entry.is_inline(), index, owner.epoch()))
        });
        let all = rings.iter().flat_map(|ring| &ring.queued);
        let of_rings = all.filter_map(|queued| {
            let table = self.core.table(if queued.inline { INLINE } else { PoolId::CpuMsg.index() })?;
            let index = queued.buffer.filter(|_| queued.wrong.is_none())?;
            let owner = MsgOwner(table.owner(index).load(Ordering::Relaxed));
            Some((queued.inline, index, owner.epoch()))
        });
        of_rings.chain(of_requests).collect()
    }

    fn messages(
        &self,
        in_rings: &InRings,
        seats: &[SeatView],
        inline: bool,
        table: &OwnerTable,
        owners: &[u64],
    ) -> TableView {
        let mut held = Vec::new();
        for (index, &word) in (0_u32..).zip(owners) {
            let mut hand = hand(in_rings, seats, inline, index, MsgOwner(word));
            if matches!(hand, BufferState::Orphaned(_)) {
                // Its holder may have freed it and left meanwhile.
                let now = MsgOwner(table.owner(index).load(Ordering::Acquire));
                hand = self::hand(in_rings, seats, inline, index, now);
            }
            if hand != BufferState::Free {
                held.push(HeldBuffer { index, hand });
            }
        }
        TableView { pool: (!inline).then_some(PoolId::CpuMsg), len: table.len(), held }
    }

    fn data(&self, in_rings: &InRings, seats: &[SeatView], pool: PoolId, table: &OwnerTable) -> TableView {
        let mut held = Vec::new();
        for (index, word) in (0_u32..).zip(words(table)) {
            let mut hand = self.data_hand(in_rings, seats, DataOwner(word));
            if matches!(hand, BufferState::Orphaned(_)) {
                let now = DataOwner(table.owner(index).load(Ordering::Acquire));
                hand = self.data_hand(in_rings, seats, now);
            }
            if hand != BufferState::Free {
                held.push(HeldBuffer { index, hand });
            }
        }
        TableView { pool: Some(pool), len: table.len(), held }
    }

    /// A DATA buffer has the state of its MSG buffer.
    fn data_hand(&self, in_rings: &InRings, seats: &[SeatView], data: DataOwner) -> BufferState {
        if data.is_free() {
            return BufferState::Free;
        }
        let Some((cell, _)) = data.attached_to() else { return BufferState::Damaged };
        let messages = &self.core.msg().table;
        let Some(cell) = messages.tame(cell) else { return BufferState::Damaged };
        // After the DATA buffer's word: a MSG is loaned before its DATA and freed after it.
        let owner = MsgOwner(messages.owner(cell).load(Ordering::Acquire));
        if owner.is_free() || !data.belongs_to(cell, owner) {
            return BufferState::Orphaned(None);
        }
        hand(in_rings, seats, false, cell, owner)
    }

    /// The first `limit` bytes of the MSG part of a queued message, and of its DATA part.
    ///
    /// `from` is the side that sent it. The bytes are copied; if the message was received meanwhile, they may belong to
    /// another one. Empty if the message is [`wrong`](QueuedMessage::wrong).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::Side;
    /// let view = shmesh::inspect::View::open(dir.path(), &"fronthaul".parse()?)?;
    /// link.send_inline(7, 0, b"slot indication")?;
    /// let queued = view.snapshot().rings[0].queued[0];
    /// let (msg, data) = view.payload(Side::Primary, &queued, 4);
    /// assert_eq!((&msg[..], data.len()), (&b"slot"[..], 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn payload(&self, from: Side, queued: &QueuedMessage, limit: usize) -> (Vec<u8>, Vec<u8>) {
        if queued.wrong.is_some() {
            return (Vec::new(), Vec::new());
        }
        let limited = |len: u32| limit.min(len as usize);
        let msg = if queued.inline {
            let lines = match queued.buffer {
                None => self.core.outgoing(from).lines(queued.position),
                Some(cell) => self.core.inline_lines(cell),
            };
            let words = lines.map(|lines| lines.copied().1);
            let bytes = words.iter().flatten().flat_map(|word| word.to_ne_bytes());
            bytes.take(limited(queued.msg_len)).collect()
        } else {
            queued.buffer.map_or_else(Vec::new, |i| self.bytes_of(PoolId::CpuMsg, i, limited(queued.msg_len)))
        };
        let data = queued.data.map_or_else(Vec::new, |(pool, i, len)| self.bytes_of(pool, i, limited(len)));
        (msg, data)
    }

    fn bytes_of(&self, pool: PoolId, index: u32, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.copy_bytes(pool, index, len, &mut bytes);
        bytes
    }

    /// Appends the first `len` bytes of a buffer, or as many as it has; none if it is in device memory.
    pub(super) fn copy_bytes(&self, pool: PoolId, index: u32, len: usize, into: &mut Vec<u8>) {
        if pool.is_device() {
            return;
        }
        let (size, count) = self.core.shape.pools[pool.index()];
        let stride = usize::try_from(crate::pool::stride_bytes(size)).unwrap_or(usize::MAX) / LINE_BYTES;
        let start = stride
            .checked_mul(index as usize)
            .and_then(|at| at.checked_add(PoolLayout::of(pool, size, count).buffers));
        let window = start
            .and_then(|start| self.memories[pool.index()].as_ref()?.window(start, len.div_ceil(LINE_BYTES)));
        let end = into.len() + len;
        for line in window.iter().flat_map(|lines| lines.iter()) {
            for i in 0..WORDS_PER_LINE {
                into.extend_from_slice(&line.word(i).load(Ordering::Relaxed).to_ne_bytes());
            }
        }
        into.truncate(end);
    }
}

fn words(table: &OwnerTable) -> Vec<u64> {
    (0_u32..).take(table.len()).map(|index| table.owner(index).load(Ordering::Acquire)).collect()
}

fn hand(in_rings: &InRings, seats: &[SeatView], inline: bool, index: u32, owner: MsgOwner) -> BufferState {
    let sent = || in_rings.contains(&(inline, index, owner.epoch()));
    let lives = |seat: SeatIndex| {
        seats.iter().any(|other| other.participant.seat == seat && other.liveness != Liveness::Dead)
    };
    match owner.holder() {
        Holder::Free => BufferState::Free,
        Holder::Loaned(seat) | Holder::Borrowed(seat) if sent() => BufferState::Queued(seat),
        // Queued until the writer frees it: a reader may hold it.
        Holder::Published(seat) => BufferState::Queued(seat),
        Holder::Loaned(seat) if lives(seat) => BufferState::Loaned(seat),
        Holder::Borrowed(seat) if lives(seat) => BufferState::Borrowed(seat),
        Holder::Loaned(seat) | Holder::Borrowed(seat) => BufferState::Orphaned(Some(seat)),
        Holder::Impossible => BufferState::Damaged,
    }
}
