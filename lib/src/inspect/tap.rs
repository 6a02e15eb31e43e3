//! Messages as they pass: what `shmesh capture` records.
//!
//! A tap is not a participant. It maps the segments for reading only, takes no seat, holds no buffer, and no participant
//! does anything for it: the path of a message is the same with a tap and without. That is why it cannot make participants
//! wait, and counts the messages that it missed.
//!
//! It can follow, because slots are never cleared: what was sent at a position stays there for a whole lap, also after it was
//! received. A buffer keeps its bytes until it is loaned again, and its owner word says when that happens. So each message is
//! copied and then the words are read again: if they are the same, the copy is of that message; if not, it is lost.
//!
//! Nothing is believed. A position that cannot be ends in a new start at what waits, which is counted.

use std::time::SystemTime;

use super::View;
use crate::config::PoolId;
use crate::link::core::{INLINE, unpack};
use crate::participant::{SeatIndex, Side};
use crate::pool::owner::{DataOwner, Holder, MsgOwner};
use crate::ring::entry::Entry;
use crate::ring::inline::InlineWords;
use crate::ring::{Ring, Sight};
use crate::sync::{Ordering, fence};

/// Longest part that is copied unless it is said otherwise.
const LIMIT_BYTES: usize = 65_536;

/// Which messages to look at. Empty lists: all.
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
    /// The side that sends; `None`: both.
    pub from: Option<Side>,
}

impl Filter {
    /// Whether a message with these ids is one of them.
    #[must_use]
    pub fn accepts(&self, msg_id: i32, cell_id: i32) -> bool {
        let is_one = |ids: &[i32], id| ids.is_empty() || ids.contains(&id);
        is_one(&self.msg_ids, msg_id) && is_one(&self.cell_ids, cell_id)
    }
}

/// One message, as it was seen.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// use shmesh::inspect::{Filter, Tap, View};
/// let mut tap = Tap::new(View::open(dir.path(), &"fronthaul".parse()?)?, Filter::default());
/// link.send_inline(7, 3, b"hello")?;
/// tap.look(|seen| {
///     assert_eq!((seen.msg_id, seen.cell_id, seen.msg_len), (7, 3, 5));
///     assert_eq!((seen.msg, seen.from), (&b"hello"[..], shmesh::Side::Primary));
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TappedMessage<'a> {
    /// When the tap looked: a little after it was sent.
    pub at: SystemTime,
    /// The side that sent it.
    pub from: Side,
    /// Its place in the stream of that side.
    pub position: u64,
    /// Whether it travelled inside the ring.
    pub inline: bool,
    /// The seat that sent it, if it can still be determined.
    pub sender: Option<SeatIndex>,
    /// The id of the message.
    pub msg_id: i32,
    /// The cell that it is about.
    pub cell_id: i32,
    /// Bytes of the MSG part.
    pub msg_len: u32,
    /// Bytes of the DATA part.
    pub data_len: u32,
    /// The pool of the DATA part.
    pub data_pool: Option<PoolId>,
    /// The MSG part, as far as the tap's limit goes.
    pub msg: &'a [u8],
    /// The same of the DATA part. Shorter than the limit when its buffer had a new user already.
    pub data: &'a [u8],
}

/// What a tap did not see.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LostCounts {
    /// Messages whose slot had a later one when the tap came.
    pub overwritten: u64,
    /// Messages whose buffer had a new user when the tap came, or that were never sent to the end.
    pub reused: u64,
    /// Messages that were seen without their DATA part, because that had a new user.
    pub data: u64,
    /// Messages that contradict themselves: a receiver will refuse them.
    pub damaged: u64,
    /// How often the ring's words could not be, and the tap began anew at what waits.
    pub restarts: u64,
}

/// An onlooker of a link.
///
/// Starting and stopping it is nothing to the link, and it needs as much memory as its two longest parts.
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
/// assert_eq!(tap.look(|seen| ids.push(seen.msg_id)), 1, "received, and still to be seen");
/// assert_eq!((ids, tap.lost().overwritten), (vec![7], 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Tap {
    view: View,
    filter: Filter,
    limit: usize,
    /// Where to look next, in the ring of each side.
    next: [u64; 2],
    lost: LostCounts,
    msg: Vec<u8>,
    data: Vec<u8>,
}

/// What is known of a message before its bytes are copied.
struct FoundMessage {
    sender: Option<SeatIndex>,
    inline: bool,
    ids: (i32, i32),
    msg_len: u32,
    data: Option<(PoolId, u32, u32)>,
}

/// Why there is nothing to show.
enum SkipReason {
    /// The filter excludes it.
    Unwanted,
    Overwritten,
    Reused,
    Damaged,
}

impl Tap {
    /// Looks on from now: at what waits, and at all that is sent.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::inspect::{Filter, Tap, View};
    /// link.send_inline(7, 0, b"nobody listens")?;
    /// drop(link); // or it crashed
    /// let mut tap = Tap::new(View::open(dir.path(), &"fronthaul".parse()?)?, Filter::default());
    /// assert_eq!(tap.look(|_| {}), 1);
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

    /// Looks also at what was received already, as far as it can still be seen.
    #[must_use]
    pub fn with_history(mut self) -> Self {
        let capacity = u64::from(self.view.ring_len());
        // What is overwritten there was before this tap, and is not lost to it.
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

    /// Copies no more than this of each part.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::inspect::{Filter, Tap, View};
    /// let view = View::open(dir.path(), &"fronthaul".parse()?)?;
    /// let mut tap = Tap::new(view, Filter::default()).limit_bytes(2);
    /// link.send_inline(7, 0, b"hello")?;
    /// tap.look(|seen| assert_eq!((seen.msg, seen.msg_len), (&b"he"[..], 5)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn limit_bytes(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }

    /// What was not seen so far.
    #[must_use]
    pub fn lost(&self) -> LostCounts {
        self.lost
    }

    /// Shows what was sent since the last look, first what the primary sent; each side's in order. Returns how many it showed.
    ///
    /// It looks at no more than two laps of each ring, so it returns however busy the link is. An infrequent tap loses much: a
    /// buffer that was received and released is the next one to be loaned.
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
    /// assert_eq!(tap.look(|seen| assert_eq!(seen.msg, b"slot")), 1);
    /// assert_eq!(tap.look(|_| {}), 0, "each is shown once");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn look(&mut self, mut show: impl FnMut(&TappedMessage<'_>)) -> usize {
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
        // A lap of what was overwritten, and one of what was not.
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

    /// Nothing is sent further than a lap from what was received, and nothing is received that was not sent.
    fn check_place(&mut self, from: Side, ring: &Ring, capacity: u64) {
        let head = ring.head();
        let ahead = self.next[at(from)].wrapping_sub(head).cast_signed();
        // Consumers may have gone on since; but then the slot is not empty any more.
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
    fn copy(&mut self, ring: &Ring, position: u64, entry: Entry) -> Result<FoundMessage, SkipReason> {
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
        // The next one to loan the buffer changes this word before it writes anything else.
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
        // A DATA buffer is freed before its MSG, and forgets whose it was.
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
        entry: Entry,
        sender: Option<SeatIndex>,
    ) -> Result<FoundMessage, SkipReason> {
        let msg_len = entry.inline_len().ok_or(SkipReason::Damaged)?;
        let copied = self.view.core.inline_lines(cell).ok_or(SkipReason::Damaged)?.copied();
        self.take_inline(copied, msg_len, sender)
    }

    /// A small message in the slot itself, on a ring with one producer.
    fn copy_slot(&mut self, ring: &Ring, position: u64, entry: Entry) -> Result<FoundMessage, SkipReason> {
        let msg_len = entry.inline_len().ok_or(SkipReason::Damaged)?;
        let copied = ring.lines(position).ok_or(SkipReason::Damaged)?.copied();
        // Its producer comes back to this slot when the consumer has passed it, and all others after it are full.
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

/// Of the two rings, that of a side.
fn at(from: Side) -> usize {
    usize::from(from == Side::Secondary)
}
