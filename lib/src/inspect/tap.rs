//! Taps, which copy the messages of a link without taking part in it, for `shmesh capture`.
//!
//! A tap is not a participant. It maps the segments read-only, takes no seat and holds no buffer, and participants do
//! nothing for it: the path of a message is the same with and without a tap. So it cannot make participants wait, and
//! counts the messages that it missed.
//!
//! Slots are never cleared: a message that was sent at a position stays there for a whole lap, even after it was
//! received. A buffer keeps its bytes until it is loaned again, which its owner word shows. So each message is copied
//! and then the words are read again: if they are unchanged, the copy is valid; otherwise the message is lost.
//!
//! All values are checked. After an impossible position the tap restarts at the queued messages, and counts the
//! restart.

use std::time::SystemTime;

use super::View;
use crate::config::PoolId;
use crate::link::core::{INLINE, unpack};
use crate::participant::{SeatIndex, Side};
use crate::pool::owner::{DataOwner, Holder, MsgOwner};
use crate::ring::entry::RingEntry;
use crate::ring::inline::InlineWords;
use crate::ring::{Ring, Sight};
use crate::sync::{Ordering, fence};

/// Default maximum length of a copied part.
const LIMIT_BYTES: usize = 65_536;

/// Selects messages. An empty list selects all.
///
/// ```
/// use shmesh::inspect::Filter;
/// let filter = Filter { msg_ids: vec![0x80, 0x82], ..Filter::default() };
/// assert!(filter.accepts(0x80, 7) && !filter.accepts(0x81, 7));
/// assert!(Filter::default().accepts(-1, -1));
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Filter {
    /// Message ids to record.
    pub msg_ids: Vec<i32>,
    /// Cell ids to record.
    pub cell_ids: Vec<i32>,
    /// The sending side; `None` for both.
    pub from: Option<Side>,
}

impl Filter {
    /// Whether a message with these ids is selected.
    #[must_use]
    pub fn accepts(&self, msg_id: i32, cell_id: i32) -> bool {
        let is_one = |ids: &[i32], id| ids.is_empty() || ids.contains(&id);
        is_one(&self.msg_ids, msg_id) && is_one(&self.cell_ids, cell_id)
    }
}

/// A message copied by a tap.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// use shmesh::inspect::{Filter, Tap, View};
/// let mut tap = Tap::new(View::open(dir.path(), &"fronthaul".parse()?)?, Filter::default());
/// link.send_inline(7, 3, b"hello")?;
/// tap.poll(|seen| {
///     assert_eq!((seen.msg_id, seen.cell_id, seen.msg_len), (7, 3, 5));
///     assert_eq!((seen.msg, seen.from), (&b"hello"[..], shmesh::Side::Primary));
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TappedMessage<'a> {
    /// Time at which the tap copied it, a little after it was sent.
    pub at: SystemTime,
    /// The side that sent it.
    pub from: Side,
    /// Its position in the stream of that side.
    pub position: u64,
    /// Whether it is an inline message.
    pub inline: bool,
    /// The seat that sent it, if it can still be determined.
    pub sender: Option<SeatIndex>,
    /// The id of the message.
    pub msg_id: i32,
    /// The id of the radio cell, or another number that the sender chose.
    pub cell_id: i32,
    /// Bytes of the MSG part.
    pub msg_len: u32,
    /// Bytes of the DATA part.
    pub data_len: u32,
    /// The pool of the DATA part.
    pub data_pool: Option<PoolId>,
    /// The MSG part, up to the tap's limit.
    pub msg: &'a [u8],
    /// The DATA part, up to the tap's limit; shorter if its buffer was already reused.
    pub data: &'a [u8],
}

/// Counts of the messages that a tap missed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LostCounts {
    /// Messages whose slot was overwritten before the tap read it.
    pub overwritten: u64,
    /// Messages whose buffer was reused before the tap read it, or that were never completely sent.
    pub reused: u64,
    /// Messages that were copied without their DATA part, because its buffer was reused.
    pub data: u64,
    /// Messages with contradictory words, which a receiver will refuse.
    pub damaged: u64,
    /// Number of restarts at the queued messages, because the ring's words were impossible.
    pub restarts: u64,
}

/// A passive reader of a link's messages.
///
/// Starting and stopping it does not affect the link. It needs as much memory as its two longest parts.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// use shmesh::inspect::{Filter, Tap, View};
/// let mut tap = Tap::new(View::open(dir.path(), &"fronthaul".parse()?)?, Filter::default());
/// mac.send_inline(7, 0, b"request")?;
/// drop(phy.receive()?);
/// let mut ids = Vec::new();
/// assert_eq!(tap.poll(|seen| ids.push(seen.msg_id)), 1, "received, and still to be seen");
/// assert_eq!((ids, tap.lost().overwritten), (vec![7], 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Tap {
    view: View,
    filter: Filter,
    limit: usize,
    /// The next position in the ring of each side.
    next: [u64; 2],
    lost: LostCounts,
    msg: Vec<u8>,
    data: Vec<u8>,
}

/// A message that was found, before its bytes are copied.
struct FoundMessage {
    sender: Option<SeatIndex>,
    inline: bool,
    ids: (i32, i32),
    msg_len: u32,
    data: Option<(PoolId, u32, u32)>,
}

/// The reason why a message is not shown.
enum SkipReason {
    /// The filter does not select it.
    Unwanted,
    Overwritten,
    Reused,
    Damaged,
}

impl Tap {
    /// Starts a tap at the queued messages.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::inspect::{Filter, Tap, View};
    /// link.send_inline(7, 0, b"slot 7")?;
    /// drop(link); // or it crashed
    /// let mut tap = Tap::new(View::open(dir.path(), &"fronthaul".parse()?)?, Filter::default());
    /// assert_eq!(tap.poll(|_| {}), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn new(view: View, filter: Filter) -> Self {
        let next = [Side::Primary, Side::Secondary].map(|side| view.core.outgoing(side).head());
        Self {
            view,
            filter,
            limit: LIMIT_BYTES,
            next,
            lost: LostCounts::default(),
            msg: Vec::new(),
            data: Vec::new(),
        }
    }

    /// Also copies messages that were received already, if they are still in memory.
    #[must_use]
    pub fn with_history(mut self) -> Self {
        let capacity = u64::from(self.view.ring_len());
        // Messages that were overwritten before this tap started do not count as lost.
        self.next = self.next.map(|next| next.saturating_sub(capacity));
        for side in [Side::Primary, Side::Secondary] {
            let ring = self.view.core.outgoing(side);
            let next = &mut self.next[at(side)];
            if let Sight::Overwritten(by) = ring.sight(*next)
                && by <= capacity
            {
                *next = next.saturating_add(by);
            }
        }
        self
    }

    /// Limits the bytes that are copied of each part.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::inspect::{Filter, Tap, View};
    /// let view = View::open(dir.path(), &"fronthaul".parse()?)?;
    /// let mut tap = Tap::new(view, Filter::default()).limit_bytes(2);
    /// link.send_inline(7, 0, b"hello")?;
    /// tap.poll(|seen| assert_eq!((seen.msg, seen.msg_len), (&b"he"[..], 5)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn limit_bytes(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }

    /// Counts of the messages that were missed so far.
    #[must_use]
    pub fn lost(&self) -> LostCounts {
        self.lost
    }

    /// Passes messages that were sent since the last call to `show`: first the primary's, each side's in order.
    /// Returns their number.
    ///
    /// Reads at most two laps of each ring, so it returns even if the link is busy. A tap that is called too rarely
    /// loses many messages: a buffer that was released is the next one to be loaned.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::inspect::{Filter, Tap, View};
    /// let only_80 = Filter { msg_ids: vec![0x80], ..Filter::default() };
    /// let mut tap = Tap::new(View::open(dir.path(), &"fronthaul".parse()?)?, only_80);
    /// link.send_inline(0x80, 0, b"slot")?;
    /// link.send_inline(0x81, 0, b"other")?;
    /// assert_eq!(tap.poll(|seen| assert_eq!(seen.msg, b"slot")), 1);
    /// assert_eq!(tap.poll(|_| {}), 0, "each is shown once");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn poll(&mut self, mut show: impl FnMut(&TappedMessage<'_>)) -> usize {
        let mut shown = 0;
        for from in [Side::Primary, Side::Secondary] {
            if self.filter.from.is_none_or(|wanted| wanted == from) {
                shown += self.look_at(from, &mut show);
            }
        }
        shown
    }

    fn look_at(&mut self, from: Side, show: &mut impl FnMut(&TappedMessage<'_>)) -> usize {
        let ring = self.view.core.outgoing(from).clone();
        let capacity = u64::from(self.view.ring_len());
        let mut shown = 0;
        // One lap of overwritten messages, and one of others.
        for _ in 0..2 * capacity {
            let position = self.next[at(from)];
            match ring.sight(position) {
                Sight::NotYet => {
                    self.check_place(from, &ring, capacity);
                    break;
                }
                Sight::Overwritten(by) => {
                    self.lost.overwritten = self.lost.overwritten.saturating_add(by);
                    self.next[at(from)] = position.wrapping_add(by);
                    self.check_place(from, &ring, capacity);
                }
                Sight::Here(entry) => {
                    self.next[at(from)] = position.wrapping_add(1);
                    match self.copy(&ring, position, entry) {
                        Ok(found) => {
                            shown += 1;
                            show(&self.seen(from, position, &found));
                        }
                        Err(SkipReason::Unwanted) => {}
                        Err(SkipReason::Overwritten) => self.lost.overwritten += 1,
                        Err(SkipReason::Reused) => self.lost.reused += 1,
                        Err(SkipReason::Damaged) => self.lost.damaged += 1,
                    }
                }
            }
        }
        shown
    }

    /// Restarts after an impossible position: at most one lap can be queued, and no message is received before it is
    /// sent.
    fn check_place(&mut self, from: Side, ring: &Ring, capacity: u64) {
        let head = ring.head();
        let ahead = self.next[at(from)].wrapping_sub(head).cast_signed();
        // Consumers may have continued since; but then the slot is not empty any more.
        let passed = ahead < 0 && ring.sight(self.next[at(from)]) == Sight::NotYet;
        if passed || ahead > capacity.cast_signed() {
            self.next[at(from)] = head;
            self.lost.restarts += 1;
        }
    }

    fn seen(&self, from: Side, position: u64, found: &FoundMessage) -> TappedMessage<'_> {
        TappedMessage {
            at: SystemTime::now(),
            from,
            position,
            inline: found.inline,
            sender: found.sender,
            msg_id: found.ids.0,
            cell_id: found.ids.1,
            msg_len: found.msg_len,
            data_len: found.data.map_or(0, |(_, _, len)| len),
            data_pool: found.data.map(|(pool, _, _)| pool),
            msg: &self.msg,
            data: &self.data,
        }
    }

    /// Copies a message into `msg` and `data`.
    fn copy(&mut self, ring: &Ring, position: u64, entry: RingEntry) -> Result<FoundMessage, SkipReason> {
        self.msg.clear();
        self.data.clear();
        let place = if entry.is_inline() { INLINE } else { PoolId::CpuMsg.index() };
        if entry.is_inline() && ring.lines(position).is_some() {
            return self.copy_slot(ring, position, entry);
        }
        let table = self.view.core.table(place).ok_or(SkipReason::Damaged)?.clone();
        let cell = table.tame(entry.wild_cell()).ok_or(SkipReason::Damaged)?;
        let owner = MsgOwner(table.owner(cell).load(Ordering::Acquire));
        if !entry.names(owner.epoch()) {
            return Err(SkipReason::Reused);
        }
        let sender = match owner.holder() {
            Holder::Loaned(seat) | Holder::Published(seat) => Some(seat),
            Holder::Borrowed(_) | Holder::Free => None,
            Holder::Impossible => return Err(SkipReason::Damaged),
        };
        let found = if entry.is_inline() {
            self.copy_cell(cell, entry, sender)
        } else {
            self.copy_pooled(cell, owner, sender)
        };
        // The next participant that loans the buffer changes this word before it writes anything else.
        fence(Ordering::Acquire);
        let now = MsgOwner(table.owner(cell).load(Ordering::Relaxed));
        if now.epoch() != owner.epoch() {
            return Err(SkipReason::Reused);
        }
        found
    }

    fn copy_pooled(
        &mut self,
        cell: u32,
        owner: MsgOwner,
        sender: Option<SeatIndex>,
    ) -> Result<FoundMessage, SkipReason> {
        let core = &self.view.core;
        let (descriptor, data) = core.peek_descriptor(cell);
        if descriptor.msg_len > core.msg().buf_size() {
            return Err(SkipReason::Damaged);
        }
        let mut found = FoundMessage {
            sender,
            inline: false,
            ids: (descriptor.msg_id, descriptor.cell_id),
            msg_len: descriptor.msg_len,
            data: None,
        };
        if !self.filter.accepts(found.ids.0, found.ids.1) {
            return Err(SkipReason::Unwanted);
        }
        self.view.copy_bytes(
            PoolId::CpuMsg,
            cell,
            self.limit.min(descriptor.msg_len as usize),
            &mut self.msg,
        );
        if data.is_none() {
            return Ok(found);
        }
        let (pool, index) =
            data.parts().filter(|(pool, _)| *pool != PoolId::CpuMsg).ok_or(SkipReason::Damaged)?;
        let (table, buf_size) = core.data_table(pool).ok_or(SkipReason::Damaged)?;
        let index = table.tame(index).ok_or(SkipReason::Damaged)?;
        if descriptor.data_len > buf_size {
            return Err(SkipReason::Damaged);
        }
        found.data = Some((pool, index, descriptor.data_len));
        // A DATA buffer is freed before its MSG, and its word no longer names the MSG then.
        let is_its = || {
            let word = table.owner(index).load(Ordering::Acquire);
            DataOwner(word).belongs_to(cell, owner)
        };
        if is_its() {
            let len = self.limit.min(descriptor.data_len as usize);
            self.view.copy_bytes(pool, index, len, &mut self.data);
            fence(Ordering::Acquire);
        }
        if !is_its() {
            self.data.clear();
            self.lost.data += 1;
        }
        Ok(found)
    }

    fn copy_cell(
        &mut self,
        cell: u32,
        entry: RingEntry,
        sender: Option<SeatIndex>,
    ) -> Result<FoundMessage, SkipReason> {
        let msg_len = entry.inline_len().ok_or(SkipReason::Damaged)?;
        let copied = self.view.core.inline_lines(cell).ok_or(SkipReason::Damaged)?.copied();
        self.take_inline(copied, msg_len, sender)
    }

    /// Copies a small message in the slot itself, on a ring with one producer.
    fn copy_slot(
        &mut self,
        ring: &Ring,
        position: u64,
        entry: RingEntry,
    ) -> Result<FoundMessage, SkipReason> {
        let msg_len = entry.inline_len().ok_or(SkipReason::Damaged)?;
        let copied = ring.lines(position).ok_or(SkipReason::Damaged)?.copied();
        // The producer returns to this slot only when the consumer has passed it and all slots after it are full.
        fence(Ordering::Acquire);
        let last = position.wrapping_add(u64::from(self.view.ring_len())).wrapping_sub(1);
        // The writer of a broadcast ring marks a slot before it writes there.
        let is_safe = ring.is_broadcast() || ring.head() <= position || ring.sight(last) == Sight::NotYet;
        if !is_safe || ring.sight(position) != Sight::Here(entry) {
            return Err(SkipReason::Overwritten);
        }
        self.take_inline(copied, msg_len, None)
    }

    fn take_inline(
        &mut self,
        (ids, words): (u64, InlineWords),
        msg_len: u32,
        sender: Option<SeatIndex>,
    ) -> Result<FoundMessage, SkipReason> {
        let ids = unpack(ids);
        if !self.filter.accepts(ids.0, ids.1) {
            return Err(SkipReason::Unwanted);
        }
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
        self.msg.extend(bytes.take(self.limit.min(msg_len as usize)));
        Ok(FoundMessage { sender, inline: true, ids, msg_len, data: None })
    }
}

/// The index of a side's ring.
fn at(from: Side) -> usize {
    usize::from(from == Side::Secondary)
}
