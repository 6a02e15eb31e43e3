//! Positions in the replies to a request: the client's, which takes them, and the server's, which sends them.

use std::fmt;
use std::time::{Duration, Instant};

use super::core::INLINE;
use super::lease::SeatLease;
use super::request_steps::RequestSteps;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::owner::MsgOwner;
use crate::ring::entry::RingEntry;
use crate::ring::reply::{ReplyOutcome, RequestId, Status, TakenReply};
use crate::ring::{INLINE_MAX_BYTES, REPLIES_MAX, WildWord};

/// How often a server that waits until a client has less than its share checks for it. A client that takes the last reply to
/// a request does not wake servers, so that most replies cost none a wake-up.
const SHARE_CHECK: Duration = Duration::from_millis(10);

/// A client's position in the replies to a request.
pub(super) struct ReplyCursor {
    pub(super) id: RequestId,
    /// Number of replies taken so far.
    pub(super) taken: u64,
    pub(super) is_over: bool,
    /// As an iterator it has ended, with an error.
    pub(super) has_failed: bool,
}

impl ReplyCursor {
    /// Begins with the first reply.
    #[inline]
    pub(super) fn new(id: RequestId) -> Self {
        Self { id, taken: 0, is_over: false, has_failed: false }
    }

    /// Whether an iterator of replies has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.is_over || self.has_failed
    }

    /// Notes what an iterator of replies yields.
    pub(super) fn yielded<T>(&mut self, item: Result<Option<T>>) -> Option<Result<T>> {
        self.has_failed = matches!(&item, Err(error) if !matches!(error.kind(), ErrorKind::Corrupt { .. }));
        item.transpose()
    }

    /// Takes the next reply, if there is one.
    #[inline]
    pub(super) fn take(
        &mut self,
        steps: &impl RequestSteps,
        lease: &SeatLease,
    ) -> Result<Option<TakenReply>> {
        if self.is_over {
            return Err(Error::from(ErrorKind::RequestOver { link: lease.link() }));
        }
        lease.check_seated()?;
        if let Some(reply) = self.take_waiting(steps, lease)? {
            return Ok(Some(reply));
        }
        let status = steps.request_status(self.id);
        if status == Status::Pending {
            return Ok(None);
        }
        // Replies that were sent before the server ended come first.
        if let Some(reply) = self.take_waiting(steps, lease)? {
            return Ok(Some(reply));
        }
        self.give_up(steps, lease);
        Err(match status {
            Status::ServerDied(pid) => Error::from(ErrorKind::ServerGone { link: lease.link(), pid }),
            Status::Unanswered(pid) => Error::from(ErrorKind::Unanswered { link: lease.link(), pid }),
            Status::Pending | Status::Over => {
                lease.corrupt(WildWord("a reply slot that another participant has changed"))
            }
        })
    }

    #[inline]
    fn take_waiting(&mut self, steps: &impl RequestSteps, lease: &SeatLease) -> Result<Option<TakenReply>> {
        let taken = match steps.take_reply(self.id, self.taken) {
            Ok(Some(taken)) => taken,
            Ok(None) => return Ok(None),
            Err(wild) => {
                self.give_up(steps, lease);
                return Err(lease.corrupt(wild));
            }
        };
        self.taken = self.taken.wrapping_add(1);
        if taken.is_last {
            steps.finish_request(self.id);
            self.is_over = true;
        }
        // A server may wait for room for further ones. One that waits for the client's share of a table checks by itself.
        if !taken.is_last {
            lease.notify_other_side();
        }
        Ok(Some(taken))
    }

    /// Whether [`take`](Self::take) has a reply or an error.
    #[inline]
    pub(super) fn is_ready(&self, steps: &impl RequestSteps) -> bool {
        self.is_over
            || steps.has_reply(self.id, self.taken)
            || steps.request_status(self.id) != Status::Pending
    }

    /// Waits until it is ready, for at most `timeout`.
    #[inline]
    pub(super) fn wait(&self, lease: &SeatLease, timeout: Option<Duration>) -> Result<()> {
        if !self.is_ready(lease) {
            lease.wait_for(timeout, lease.shared.notify, || self.is_ready(lease))?;
        }
        Ok(())
    }

    #[cold]
    fn give_up(&mut self, steps: &impl RequestSteps, lease: &SeatLease) {
        self.is_over = true;
        steps.close_request(self.id);
        // The server may wait for room.
        lease.notify_other_side();
    }

    /// Gives the request up, unless it is over or its client is the parent of this process.
    #[inline]
    pub(super) fn end(&mut self, steps: &impl RequestSteps, lease: &SeatLease) {
        if !self.is_over && lease.shared.me.is_me() {
            self.give_up(steps, lease);
        }
    }

    pub(super) fn debug(&self, name: &str, link: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("link", &link)
            .field("number", &self.id.number)
            .field("taken", &self.taken)
            .field("is_over", &self.is_over)
            .finish()
    }
}

/// A server's position in the replies to a request.
pub(super) struct ReplyWriter {
    pub(super) id: RequestId,
    /// Number of replies sent so far.
    pub(super) sent: u64,
    pub(super) is_over: bool,
    /// The tables of the last reply, if it was refused because the client had its share.
    pub(super) refused: Option<[usize; 2]>,
}

impl ReplyWriter {
    /// Begins with the first reply.
    #[inline]
    pub(super) fn new(id: RequestId) -> Self {
        Self { id, sent: 0, is_over: false, refused: None }
    }

    #[inline]
    pub(super) fn check(&self, lease: &SeatLease) -> Result<()> {
        lease.check_seated()?;
        if self.is_over { Err(Error::from(ErrorKind::RequestOver { link: lease.link() })) } else { Ok(()) }
    }

    /// Sends the content of a MSG buffer of `sender`'s participant. An error comes with `true` if the message may have been
    /// sent.
    #[inline]
    pub(super) fn send(
        &mut self,
        lease: &SeatLease,
        sender: &SeatLease,
        (cell, owner): (u32, MsgOwner),
        is_last: bool,
    ) -> std::result::Result<bool, (Error, bool)> {
        self.check(lease).map_err(|error| (error, false))?;
        let entry = RingEntry::pooled(cell, owner.epoch());
        let pushed = lease.push_reply(self.id, self.sent, is_last, entry);
        if pushed == ReplyOutcome::Sent {
            // As in a send.
            sender.check_not_overtaken().map_err(|error| (error, true))?;
        }
        self.sent(lease, pushed, is_last, Some(entry)).map_err(|error| (error, false))
    }

    #[inline]
    pub(super) fn send_inline(
        &mut self,
        steps: &impl RequestSteps,
        lease: &SeatLease,
        ids: u64,
        msg: &[u8],
        is_last: bool,
    ) -> Result<bool> {
        if msg.len() > INLINE_MAX_BYTES {
            return Err(Error::from(ErrorKind::InlineTooLong { link: lease.link(), len: msg.len() }));
        }
        self.check(lease)?;
        let pushed = steps.push_inline_reply(self.id, self.sent, is_last, ids, msg);
        let pushed = pushed.ok_or_else(|| lease.inline_exhausted())?;
        if pushed == ReplyOutcome::Sent {
            lease.check_not_overtaken()?;
        }
        self.sent(lease, pushed, is_last, None)
    }

    /// Notes what became of a reply: in the buffers of `entry`, or inline.
    #[inline]
    fn sent(
        &mut self,
        lease: &SeatLease,
        pushed: ReplyOutcome,
        is_last: bool,
        entry: Option<RingEntry>,
    ) -> Result<bool> {
        match pushed {
            ReplyOutcome::Sent => {
                self.sent = self.sent.wrapping_add(1);
                (self.is_over, self.refused) = (is_last, None);
                lease.notify_seat(self.id.seat);
                Ok(true)
            }
            ReplyOutcome::Unwanted => Ok(false),
            ReplyOutcome::Full => {
                self.refused = None;
                Err(self.replies_full(lease, REPLIES_MAX, "to this request"))
            }
            ReplyOutcome::OverShare => {
                let core = lease.core();
                self.refused = Some(entry.map_or([INLINE; 2], |entry| core.reply_places(entry)));
                let left = core.replies_left_by(self.id.seat);
                Err(self.replies_full(lease, left, "in all, its share of a pool or of the inline cells"))
            }
        }
    }

    #[cold]
    fn replies_full(&self, lease: &SeatLease, limit: u32, what: &'static str) -> Error {
        let client = lease.core().seats.at(self.id.seat);
        let (seat, pid) = (self.id.seat.value(), client.map_or(0, |client| client.word.pid()));
        Error::from(ErrorKind::RepliesFull { link: lease.link(), seat, pid, limit, what })
    }

    #[inline]
    pub(super) fn is_wanted(&self, steps: &impl RequestSteps) -> bool {
        steps.request_status(self.id) == Status::Pending
    }

    /// Whether there is room for one more reply, or none can be sent.
    pub(super) fn has_room(&self, lease: &SeatLease) -> bool {
        let has_share = |places| lease.core().has_reply_share(self.id, self.sent, places);
        self.is_over
            || !self.is_wanted(lease)
            || !lease.has_reply(self.id, self.sent) && self.refused.is_none_or(has_share)
    }

    pub(super) fn wait_room(&self, lease: &SeatLease, timeout: Option<Duration>) -> Result<bool> {
        let wait = |timeout| lease.wait_for(timeout, lease.shared.notify, || self.has_room(lease));
        if self.refused.is_none() {
            return wait(timeout);
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if wait(Some(left.map_or(SHARE_CHECK, |left| left.min(SHARE_CHECK))))? {
                return Ok(true);
            }
            if left.is_some_and(|left| left <= SHARE_CHECK) {
                return Ok(false);
            }
        }
    }

    /// Notifies the client that there is no last reply, unless there was one. Does nothing in a forked child, as the
    /// request belongs to the parent.
    #[inline]
    pub(super) fn give_up(&mut self, steps: &impl RequestSteps, lease: &SeatLease) {
        if !self.is_over && lease.shared.me.is_me() {
            steps.drop_request(self.id);
            lease.notify_seat(self.id.seat);
        }
        self.is_over = true;
    }

    /// Gives up the request and frees the cell of an inline request, before the message is dropped.
    #[inline]
    pub(super) fn end(
        &mut self,
        steps: &impl RequestSteps,
        lease: &SeatLease,
        cell: Option<(u32, MsgOwner)>,
    ) {
        self.give_up(steps, lease);
        if let Some((cell, owner)) = cell {
            steps.free_inline(cell, owner);
        }
    }

    pub(super) fn debug(
        &self,
        name: &str,
        message: &dyn fmt::Debug,
        f: &mut fmt::Formatter<'_>,
    ) -> fmt::Result {
        f.debug_struct(name)
            .field("message", message)
            .field("client", &self.id.seat)
            .field("number", &self.id.number)
            .field("sent", &self.sent)
            .finish()
    }
}
