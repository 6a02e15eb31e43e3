//! Pending replies and requests that do not borrow from their link.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::core::pack;
use super::inline_buffers::InlineBuffers;
use super::lease::SeatLease;
use super::message::ReceivedParts;
use super::owned::{OwnedLoan, OwnedMessage};
use super::replies::{ReplyCursor, ReplyWriter};
use super::request_steps::RequestSteps;
use crate::error::{Error, ErrorKind, Result};
use crate::participant::SeatIndex;
use crate::pool::owner::MsgOwner;
use crate::ring::WildWord;
use crate::ring::reply::TakenReply;

/// A pending reply that does not borrow from its link. It can be kept next to the [`Link`](crate::Link) in a struct, and be
/// waited for in any thread while the handle makes further requests.
///
/// Dropping it, in any thread, gives the request up. Like an [`OwnedMessage`] it keeps the link's memory mapped and the
/// seat of the handle taken, and works after the handle was dropped.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// config.request_window = 8;
/// # let phy = options.create(&config)?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// let mut first = mac.request_inline(1, 0, b"first")?.into_owned();
/// let mut second = mac.request_inline(1, 0, b"second")?.into_owned();
/// let waiter = std::thread::spawn(move || first.wait(None));
/// while let Some(mut request) = phy.receive_request()? {
///     let answer = request.msg().to_ascii_uppercase();
///     request.reply_inline(2, 0, &answer)?;
/// }
/// assert_eq!(second.wait(None)?.expect("without a timeout there is one").msg(), b"SECOND");
/// let reply = waiter.join().expect("it does not panic")?;
/// assert_eq!(reply.expect("without a timeout there is one").msg(), b"FIRST");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a pending reply that is dropped gives its request up"]
pub struct OwnedPendingReply {
    cursor: ReplyCursor,
    lease: Arc<SeatLease>,
}

impl OwnedPendingReply {
    pub(super) fn new(cursor: ReplyCursor, lease: &Arc<SeatLease>) -> Self {
        Self { cursor, lease: Arc::clone(lease) }
    }

    /// Takes the next reply, or returns `None` if there is none yet. Never waits.
    ///
    /// # Errors
    /// As [`PendingReply::try_take`](crate::PendingReply::try_take).
    pub fn try_take(&mut self) -> Result<Option<OwnedMessage>> {
        let lease = &self.lease;
        let Some(taken) = self.cursor.take(&**lease, lease)? else { return Ok(None) };
        received(lease, &taken).map(Some).map_err(|wild| lease.corrupt(wild))
    }

    /// Waits for the next reply, as [`PendingReply::wait`](crate::PendingReply::wait) does.
    ///
    /// # Errors
    /// As [`PendingReply::wait`](crate::PendingReply::wait).
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<OwnedMessage>> {
        self.cursor.wait(&self.lease, timeout)?;
        self.try_take()
    }

    /// Whether [`try_take`](Self::try_take) has a reply or an error.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.cursor.is_ready(&*self.lease)
    }

    /// Whether the last reply was taken, or the request has failed. Nothing more arrives then.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.cursor.is_over
    }
}

/// Creates a message from a reply that was taken.
fn received(lease: &Arc<SeatLease>, taken: &TakenReply) -> std::result::Result<OwnedMessage, WildWord> {
    let (cell, owner) = (taken.entry.wild_cell(), MsgOwner(taken.word).borrowed(lease.me.seat));
    let core = lease.core();
    let received = if !taken.entry.is_inline() {
        core.cell_of(taken.entry).and_then(|cell| ReceivedParts::pooled(core, cell, owner))
    } else if let Some(lines) = core.inline_lines(cell) {
        let copied = ReceivedParts::inline(0, taken.entry, lines, &InlineBuffers::default());
        lease.free_inline(cell, owner);
        copied
    } else {
        Err(WildWord("an inline cell on a link that has none"))
    };
    if received.is_err() && !taken.entry.is_inline() {
        lease.free_taken(taken.entry, owner);
    }
    received.map(|received| OwnedMessage::new(received, lease))
}

/// Waits for each reply. Ends after the last one, or an error other than [`Corrupt`](ErrorKind::Corrupt).
impl Iterator for OwnedPendingReply {
    type Item = Result<OwnedMessage>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.cursor.has_ended() {
            return None;
        }
        let item = self.wait(None);
        self.cursor.yielded(item)
    }
}

impl Drop for OwnedPendingReply {
    fn drop(&mut self) {
        self.cursor.end(&*self.lease, &self.lease);
    }
}

impl fmt::Debug for OwnedPendingReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cursor.debug("OwnedPendingReply", &self.lease.shared.store.link, f)
    }
}

/// A received request that does not borrow from its link, so that a worker thread can answer it. It is an [`OwnedMessage`].
///
/// If it is dropped before its last reply, in any thread, the client gets [`Unanswered`](ErrorKind::Unanswered).
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// config.request_window = 8;
/// # let phy = options.create(&config)?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// let mut pending = mac.request_inline(1, 0, b"a long computation")?;
/// let mut request = phy.receive_request()?.expect("it was just made").into_owned();
/// let worker = std::thread::spawn(move || {
///     let answer = request.msg().len().to_string();
///     request.reply_inline(2, 0, answer.as_bytes())
/// });
/// assert_eq!(pending.wait(None)?.expect("without a timeout there is one").msg(), b"18");
/// assert!(worker.join().expect("it does not panic")?, "the client waited for it");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct OwnedRequest {
    /// Dropped after the client was notified, by the `drop` of `OwnedRequest`.
    message: OwnedMessage,
    /// The cell of an inline request.
    cell: Option<(u32, MsgOwner)>,
    writer: ReplyWriter,
}

impl OwnedRequest {
    pub(super) fn new(message: OwnedMessage, cell: Option<(u32, MsgOwner)>, writer: ReplyWriter) -> Self {
        Self { message, cell, writer }
    }

    /// The seat of the client that made it.
    #[must_use]
    pub fn client(&self) -> SeatIndex {
        self.writer.id.seat
    }

    /// Whether the client still waits; see [`Request::is_wanted`](crate::Request::is_wanted).
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.writer.is_wanted(&**self.message.lease())
    }

    /// Sends the last, or only, reply and wakes the client. The loan may be of any handle of this process on the link.
    /// Returns `false` if the client does not wait any more.
    ///
    /// # Errors
    /// As [`Request::reply`](crate::Request::reply), with the loan.
    pub fn reply(&mut self, loan: OwnedLoan) -> std::result::Result<bool, ReplyError> {
        self.send(loan, true)
    }

    /// Sends a reply that will be followed by others, and wakes the client; see
    /// [`Request::stream`](crate::Request::stream).
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn stream(&mut self, loan: OwnedLoan) -> std::result::Result<bool, ReplyError> {
        self.send(loan, false)
    }

    /// As [`reply`](Self::reply), of at most [`INLINE_MAX_BYTES`](crate::INLINE_MAX_BYTES) and without a loan.
    ///
    /// # Errors
    /// As [`Request::reply_inline`](crate::Request::reply_inline).
    pub fn reply_inline(&mut self, msg_id: i32, cell_id: i32, msg: &[u8]) -> Result<bool> {
        self.send_inline(pack(msg_id, cell_id), msg, true)
    }

    /// As [`stream`](Self::stream), of at most [`INLINE_MAX_BYTES`](crate::INLINE_MAX_BYTES) and without a loan.
    ///
    /// # Errors
    /// As [`Request::stream_inline`](crate::Request::stream_inline).
    pub fn stream_inline(&mut self, msg_id: i32, cell_id: i32, msg: &[u8]) -> Result<bool> {
        self.send_inline(pack(msg_id, cell_id), msg, false)
    }

    /// Ends the request without a last reply, unless there was one, and keeps the message. The client gets
    /// [`Unanswered`](ErrorKind::Unanswered) at once.
    pub fn give_up(&mut self) {
        let lease = self.message.lease();
        self.writer.give_up(&**lease, lease);
    }

    /// Waits until there is room for one more reply; see [`Request::wait_room`](crate::Request::wait_room).
    ///
    /// # Errors
    /// As [`Link::wait`](crate::Link::wait).
    pub fn wait_room(&self, timeout: Option<Duration>) -> Result<bool> {
        self.writer.wait_room(self.message.lease(), timeout)
    }

    /// Whether there is room for one more reply, as [`wait_room`](Self::wait_room).
    #[cfg(feature = "tokio")]
    pub(super) fn has_room(&self) -> bool {
        self.writer.has_room(self.message.lease())
    }

    /// Whether the last reply was refused because the client had its share.
    #[cfg(feature = "tokio")]
    pub(super) fn awaits_share(&self) -> bool {
        self.writer.refused.is_some()
    }

    fn send(&mut self, mut loan: OwnedLoan, is_last: bool) -> std::result::Result<bool, ReplyError> {
        let lease = self.message.lease();
        if !Arc::ptr_eq(&lease.shared, &loan.lease().shared) {
            let error = Error::from(ErrorKind::ForeignLoan { link: lease.link() });
            return Err(ReplyError { loan, error });
        }
        match self.writer.send(lease, loan.lease(), loan.msg(), is_last) {
            Ok(sent) => {
                if sent {
                    // The buffers belong to the client now.
                    loan.give_up();
                }
                Ok(sent)
            }
            Err((error, may_be_sent)) => {
                if may_be_sent {
                    loan.give_up();
                }
                Err(ReplyError { loan, error })
            }
        }
    }

    fn send_inline(&mut self, ids: u64, msg: &[u8], is_last: bool) -> Result<bool> {
        let lease = self.message.lease();
        self.writer.send_inline(&**lease, lease, ids, msg, is_last)
    }
}

impl Deref for OwnedRequest {
    type Target = OwnedMessage;

    fn deref(&self) -> &Self::Target {
        &self.message
    }
}

impl Drop for OwnedRequest {
    fn drop(&mut self) {
        let lease = self.message.lease();
        self.writer.end(&**lease, lease, self.cell);
    }
}

impl fmt::Debug for OwnedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.writer.debug("OwnedRequest", &self.message, f)
    }
}

/// The error of a reply that was not sent, together with the loan, which can be sent again.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct ReplyError {
    /// The loan with the reply.
    pub loan: OwnedLoan,
    /// The reason why it was not sent.
    #[source]
    pub error: Error,
}

impl From<ReplyError> for Error {
    fn from(failed: ReplyError) -> Self {
        failed.error
    }
}
