//! Reply slots, in which the replies to a request wait for the client that made it.
//!
//! Each seat has a few slots, one line each. A request of the client in that seat has one of them until it is over. The
//! server that took the request writes replies there, and the client takes them. No other participant writes to a slot,
//! except to recover one of the two.
//!
//! ```text
//! word 0     | number 40 | process id of the server 22 | status 2 |
//! words 1-7  | number, low 30 | last 1 | full 1 | entry 32 |
//! ```
//!
//! The **number** grows with each request in a slot, whichever participant makes it, so it also distinguishes the
//! successive participants of a seat. A reply is published by one exchange of an empty word, after the server has read the
//! status. A client that drops its request changes the status first and then every word, so the exchange of a late server
//! fails.
//!
//! Pairs of orderings, with the same name at both ends:
//! - `REPLY`: the server's Release on a reply word, the client's Acquire of it: payload and descriptor are visible.
//! - `ROOM`: the client's Release on a reply word, the server's Acquire of it: the client has taken the previous reply.
//! - `OVER`: Release on the status by the side that ends a request, Acquire by the other side.

use super::entry::RingEntry;
use super::inline::INLINE_MAX_BYTES;
use super::{Look, Owners, WildWord};
use crate::config::MAX_REQUEST_WINDOW;
use crate::participant::SeatIndex;
use crate::segment::Lines;
use crate::sync::{AtomicU64, Line, Ordering, WORDS_PER_LINE};

/// Maximum size of a request by [`Link::request_inline`](crate::Link::request_inline). Its id takes eight bytes more. Up to
/// 40 bytes need one cache line.
pub const REQUEST_INLINE_MAX_BYTES: usize = INLINE_MAX_BYTES - size_of::<u64>();

/// Maximum number of replies to one request that can wait for its client. The next one fails with
/// [`RepliesFull`](crate::ErrorKind::RepliesFull).
///
/// So does a reply to a client that has left its share of a pool, or of the inline cells, in replies to all of its requests:
/// clients that take no replies leave room for other clients' replies.
pub const REPLIES_MAX: u32 = 7;

#[cfg(not(loom))]
const _: () = assert!(REPLIES_MAX as u64 == REPLIES);

/// Maximum number of replies to one request that can wait in its slot.
pub(crate) const REPLIES: u64 = if cfg!(loom) { 2 } else { WORDS_PER_LINE as u64 - 1 };

const STATUS_BITS: u32 = 2;
const IDLE: u64 = 0;
const PENDING: u64 = 1;
const SERVER_DIED: u64 = 2;
const UNANSWERED: u64 = 3;
const PID_BITS: u32 = 22;
const NUMBER_SHIFT: u32 = STATUS_BITS + PID_BITS;
const NUMBER_BITS: u32 = 64 - NUMBER_SHIFT;

const FULL: u64 = 1 << 32;
const LAST: u64 = 1 << 33;
const TAG_SHIFT: u32 = 34;
const TAG_BITS: u32 = 64 - TAG_SHIFT;

const fn low(value: u64, bits: u32) -> u64 {
    value & ((1 << bits) - 1)
}

/// Rounds of an exchange that only a recovery or a hostile peer can make fail.
const ROUNDS_MAX: u32 = 8;

/// The identity of a request: the seat of its client, the slot there, and the number of the request in that slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct RequestId {
    pub(crate) seat: SeatIndex,
    pub(crate) slot: u8,
    pub(crate) number: u64,
}

impl RequestId {
    /// The word by which it is sent: `| number 40 | slot 8 | seat 8 | 0 |`.
    pub(crate) fn word(self) -> u64 {
        self.number << NUMBER_SHIFT | u64::from(self.slot) << 16 | u64::from(self.seat.value()) << 8
    }

    /// Reads a word of shared memory. It is not checked whether the link has such a slot.
    pub(crate) fn from_wild(word: u64) -> Option<Self> {
        if low(word, 8) != 0 {
            return None;
        }
        let seat = SeatIndex::from_wild(word >> 8 & 0xff)?;
        #[expect(clippy::cast_possible_truncation, reason = "8 bits")]
        let slot = (word >> 16) as u8;
        Some(Self { seat, slot, number: word >> NUMBER_SHIFT })
    }
}

/// The status of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Status {
    /// The request is open, and can get replies.
    Pending,
    /// The server with this process id took it and died.
    ServerDied(u32),
    /// The server with this process id took it and dropped it.
    Unanswered(u32),
    /// It was dropped, or its client is gone.
    Over,
}

/// The result of sending a reply.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ReplyOutcome {
    Sent,
    /// The maximum number of replies waits already.
    Full,
    /// The client does not wait any more.
    Unwanted,
    /// The client has left its share of the shared buffers in replies that it has not taken.
    OverShare,
}

/// A reply that this participant owns now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct TakenReply {
    pub(crate) entry: RingEntry,
    /// Its owner word before it was taken.
    pub(crate) word: u64,
    pub(crate) is_last: bool,
    /// It belongs to an earlier request in the slot: its server was evicted and resumed.
    pub(crate) is_stale: bool,
}

/// A client's private record of its slots: a bit for each request that is not over. The client's handle sets it; the thread
/// that ends the request clears it.
#[derive(Debug)]
pub(crate) struct Window(AtomicU64);

const _: () = assert!(MAX_REQUEST_WINDOW == u64::BITS);

impl Default for Window {
    fn default() -> Self {
        Self(AtomicU64::new(0))
    }
}

impl Window {
    /// The first slot without a request, which may be beyond the last one of the link.
    #[inline]
    pub(crate) fn idle_slot(&self) -> u8 {
        // Acquire pairs with the Release of `clear`: the slot is idle.
        #[expect(clippy::cast_possible_truncation, reason = "64 at most")]
        let slot = self.0.load(Ordering::Acquire).trailing_ones() as u8;
        slot
    }

    #[inline]
    pub(crate) fn set(&self, slot: u8) {
        self.0.fetch_or(1 << slot, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn clear(&self, slot: u8) {
        // Release, as in `idle_slot`.
        self.0.fetch_and(!(1 << slot), Ordering::Release);
    }
}

/// The slots of all seats.
#[derive(Clone, Debug)]
pub(crate) struct ReplySlots {
    lines: Lines,
    window: usize,
}

/// One slot, in shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplySlot<'a>(&'a Line);

/// Replies that a client has not taken, in one table.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct RepliesLeft {
    /// The number of these replies.
    pub(crate) replies: u32,
    /// The number of requests to which they are.
    pub(crate) requests: u32,
}

impl ReplySlots {
    /// `lines` must have `window` lines for each seat.
    pub(crate) fn new(lines: Lines, window: usize) -> Self {
        debug_assert_eq!(lines.len(), window * crate::participant::MAX_SEATS);
        Self { lines, window }
    }

    /// The slot of a request; `None` if this link has no such slot.
    #[inline]
    pub(crate) fn slot(&self, id: RequestId) -> Option<ReplySlot<'_>> {
        (usize::from(id.slot) < self.window).then(|| self.at(id.seat, usize::from(id.slot)))
    }

    #[inline]
    fn at(&self, seat: SeatIndex, slot: usize) -> ReplySlot<'_> {
        ReplySlot(&self.lines[seat.as_usize() * self.window + slot])
    }

    /// Replies that a seat has not taken, of those that count.
    ///
    /// Other participants send and take replies meanwhile, so this is one look.
    pub(crate) fn left_by(&self, seat: SeatIndex, counts: impl Fn(RingEntry) -> bool) -> RepliesLeft {
        let left = self.of(seat).map(|slot| slot.left(&counts));
        left.fold(RepliesLeft::default(), |all, replies| RepliesLeft {
            replies: all.replies + replies,
            requests: all.requests + u32::from(replies > 0),
        })
    }

    /// The slots of a seat.
    pub(crate) fn of(&self, seat: SeatIndex) -> impl Iterator<Item = ReplySlot<'_>> {
        (0..self.window).map(move |slot| self.at(seat, slot))
    }
}

impl<'a> ReplySlot<'a> {
    #[inline]
    fn status_word(self) -> &'a AtomicU64 {
        self.0.word(0)
    }

    #[inline]
    fn reply(self, position: u64) -> &'a AtomicU64 {
        let i = (position % REPLIES) as usize;
        self.0.word(1 + i)
    }

    fn replies(self) -> impl Iterator<Item = &'a AtomicU64> {
        (0..REPLIES).map(move |i| self.reply(i))
    }

    /// Opens a request, and returns its number. Only for the client, in a slot that it does not use.
    pub(crate) fn open(self) -> u64 {
        let status = self.status_word();
        let number = low((status.load(Ordering::Relaxed) >> NUMBER_SHIFT).wrapping_add(1), NUMBER_BITS);
        // A store suffices: only its client changes the status of an idle slot. Release pairs with the Acquire of `end`: a
        // late recovery of the seat's last participant that reads this number sees that we have the seat.
        status.store(number << NUMBER_SHIFT | PENDING, Ordering::Release);
        number
    }

    /// The status of request `number`.
    #[inline]
    pub(crate) fn status(self, number: u64) -> Status {
        // OVER
        let word = self.status_word().load(Ordering::Acquire);
        let pid = u32::try_from(low(word >> STATUS_BITS, PID_BITS)).unwrap_or(0);
        match low(word, STATUS_BITS) {
            _ if word >> NUMBER_SHIFT != number => Status::Over,
            PENDING => Status::Pending,
            SERVER_DIED => Status::ServerDied(pid),
            UNANSWERED => Status::Unanswered(pid),
            _ => Status::Over,
        }
    }

    /// Whether there is something at `position`: for the client a reply, for the server a reply that was not taken.
    #[inline]
    pub(crate) fn has_reply(self, position: u64) -> bool {
        self.reply(position).load(Ordering::Relaxed) & FULL != 0
    }

    /// Replies that were not taken, of those that count.
    fn left(self, counts: impl Fn(RingEntry) -> bool) -> u32 {
        self.replies()
            .map(|word| word.load(Ordering::Relaxed))
            .map(|seen| seen & FULL != 0 && counts(RingEntry::split(low(seen, 32)).1))
            .map(u32::from)
            .sum()
    }

    /// Sends a reply. `position` counts the replies to this request.
    #[inline]
    pub(crate) fn push(self, number: u64, position: u64, is_last: bool, entry: RingEntry) -> ReplyOutcome {
        let word = self.reply(position);
        let tag = low(number, TAG_BITS) << TAG_SHIFT;
        let new = tag | if is_last { LAST } else { 0 } | FULL | entry.in_lap(0);
        for _ in 0..ROUNDS_MAX {
            // ROOM
            let seen = word.load(Ordering::Acquire);
            // After the word: a client that ends the request changes the status first and then the word. So either we see
            // the new status, or our exchange fails, or the client finds our reply.
            if self.status(number) != Status::Pending {
                return ReplyOutcome::Unwanted;
            }
            if seen & FULL != 0 {
                return ReplyOutcome::Full;
            }
            // REPLY
            if word.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return ReplyOutcome::Sent;
            }
        }
        ReplyOutcome::Full
    }

    /// Makes this participant the owner of the reply at `position`, if there is one.
    #[inline]
    pub(crate) fn take(
        self,
        number: u64,
        position: u64,
        owners: &impl Owners,
    ) -> Result<Option<TakenReply>, WildWord> {
        let word = self.reply(position);
        // REPLY
        let seen = word.load(Ordering::Acquire);
        if seen & FULL == 0 {
            return Ok(None);
        }
        self.take_seen(word, seen, low(number, TAG_BITS), owners)
    }

    /// Takes the reply of a reply word, unless the word has changed, and leaves the word empty, marked with `tag`.
    #[inline]
    fn take_seen(
        self,
        word: &AtomicU64,
        seen: u64,
        tag: u64,
        owners: &impl Owners,
    ) -> Result<Option<TakenReply>, WildWord> {
        let (_, entry) = RingEntry::split(low(seen, 32));
        let look = owners.look(entry);
        // After the owner word was read: if the reply was not taken yet, the owner word is of this reply and not of a later
        // loan.
        if word.load(Ordering::Acquire) != seen {
            return Ok(None);
        }
        let taken = match look {
            Ok(Look::Here(owner)) if owners.take(entry, owner) => {
                let is_stale = seen >> TAG_SHIFT != tag;
                Some(TakenReply { entry, word: owner, is_last: seen & LAST != 0, is_stale })
            }
            _ => None,
        };
        // ROOM. After the owner word, and before the buffer is freed: an entry names its epoch by its last bits, and those
        // wrap.
        let _ = word.compare_exchange(seen, tag << TAG_SHIFT, Ordering::AcqRel, Ordering::Relaxed);
        match look {
            Err(wild) => Err(wild),
            Ok(_) => Ok(taken),
        }
    }

    /// Ends request `number` after its last reply was taken. Only for the client.
    #[inline]
    pub(crate) fn finish(self, number: u64) {
        // OVER: pairs with the Acquire of `status`, so that a server that reads this knows that the client is done with the
        // slot's replies. A store suffices: a server that marks the request as failed at this moment changes nothing for
        // the client, which has its last reply.
        self.status_word().store(number << NUMBER_SHIFT | IDLE, Ordering::Release);
    }

    /// Marks the request as ended by the server with this process id, without a last reply. Does nothing if the request is
    /// over.
    pub(crate) fn fail(self, number: u64, pid: u32, died: bool) {
        let number = number << NUMBER_SHIFT;
        let status = if died { SERVER_DIED } else { UNANSWERED };
        let failed = number | low(u64::from(pid), PID_BITS) << STATUS_BITS | status;
        // OVER
        let _ = self.status_word().compare_exchange(
            number | PENDING,
            failed,
            Ordering::Release,
            Ordering::Relaxed,
        );
    }

    /// The number of the current or last request in the slot.
    pub(crate) fn number(self) -> u64 {
        self.status_word().load(Ordering::Acquire) >> NUMBER_SHIFT
    }

    /// Ends request `number`: its waiting replies are passed to `free`, and later ones are refused. For its client, and for
    /// a participant that recovers it. Before each change, `is_seated` must confirm that the client still has its seat, so
    /// that no other participant can have written what was read.
    pub(crate) fn end(
        self,
        number: u64,
        owners: &impl Owners,
        is_seated: impl Fn() -> bool,
        mut free: impl FnMut(TakenReply),
    ) {
        // A server that dies at this moment, or drops the request, may change the status once.
        for _ in 0..ROUNDS_MAX {
            let now = self.status_word().load(Ordering::Acquire);
            if now >> NUMBER_SHIFT != number || !is_seated() {
                return;
            }
            if low(now, STATUS_BITS) == IDLE {
                break;
            }
            let idle = number << NUMBER_SHIFT;
            // OVER
            if self.status_word().compare_exchange(now, idle, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                break;
            }
        }
        // Words of a slot are never marked with a future number.
        let tag = low(number.wrapping_add(1), TAG_BITS);
        for word in self.replies() {
            // The server may publish once more between our check and our exchange. A hostile one could do so without end.
            for _ in 0..ROUNDS_MAX {
                let seen = word.load(Ordering::Acquire);
                if !is_seated() {
                    return;
                }
                if seen & FULL == 0 {
                    // ROOM
                    let marked = tag << TAG_SHIFT;
                    if word.compare_exchange(seen, marked, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                        break;
                    }
                } else if let Ok(Some(taken)) = self.take_seen(word, seen, tag, owners) {
                    free(taken);
                }
            }
        }
    }

    /// The entries of waiting replies to any request. For recovery.
    pub(crate) fn waiting(self) -> impl Iterator<Item = RingEntry> + 'a {
        // An exchange: of an eviction, which comes before this, and a reply that the evicted server publishes, one side
        // sees the other.
        self.replies().filter_map(|word| {
            let seen = word.fetch_add(0, Ordering::AcqRel);
            (seen & FULL != 0).then(|| RingEntry::split(low(seen, 32)).1)
        })
    }

    /// Whether a request is pending in this slot; for observers.
    pub(crate) fn is_pending(self) -> bool {
        low(self.status_word().load(Ordering::Relaxed), STATUS_BITS) == PENDING
    }

    /// The entries of waiting replies; for observers.
    pub(crate) fn seen(self) -> impl Iterator<Item = RingEntry> + 'a {
        let words = self.replies().map(|word| word.load(Ordering::Acquire));
        words.filter(|word| word & FULL != 0).map(|word| RingEntry::split(low(word, 32)).1)
    }
}
