//! Requests and replies: a client sends a request, and one of the servers replies to that client only.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::time::Duration;

use super::Link;
use super::core::pack;
use super::loan::{Loan, SendError};
use super::message::{Message, ReceivedParts};
use super::owned_request::{OwnedPendingReply, OwnedRequest};
use super::replies::{ReplyCursor, ReplyWriter};
use super::request_steps::{InlineError, RequestSteps};
use crate::error::{Error, ErrorKind, Result};
use crate::participant::{SeatIndex, Side};
use crate::pool::owner::MsgOwner;
use crate::ring::REQUEST_INLINE_MAX_BYTES;

/// A request that this client has made, and that receives its replies.
///
/// Dropping it gives the request up: replies that wait are freed, and later ones are refused.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// config.request_window = 8;
/// # let phy = options.create(&config)?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// let mut pending = mac.request_inline(1, 0, b"how many?")?;
/// assert!(pending.try_take()?.is_none(), "not yet");
///
/// let mut request = phy.receive_request()?.expect("it was just made");
/// assert_eq!(request.msg(), b"how many?");
/// assert!(request.reply_inline(2, 0, b"three")?, "the client waits for it");
///
/// let reply = pending.wait(None)?.expect("without a timeout there is one");
/// assert_eq!(reply.msg(), b"three");
/// assert!(pending.is_over());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a pending reply that is dropped gives its request up"]
pub struct PendingReply<'a> {
    link: &'a Link,
    cursor: ReplyCursor,
}

/// A received request. It is a [`Message`] that can be answered.
///
/// If it is dropped before its last reply, the client gets [`Unanswered`](crate::ErrorKind::Unanswered).
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// config.request_window = 8;
/// # let phy = options.create(&config)?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// let mut pending = mac.request(mac.loan()?.with_msg_id(7))?;
/// let mut request = phy.receive_request()?.expect("it was just made");
/// assert_eq!((request.msg_id(), request.client()), (7, mac.seat()));
/// // A stream: several replies, the last of which is marked.
/// request.stream_inline(1, 0, b"first")?;
/// let mut last = phy.loan()?;
/// last.resize_msg(4)?.copy_from_slice(b"last");
/// request.reply(last)?;
/// drop(request);
///
/// assert_eq!(pending.wait(None)?.expect("it was sent").msg(), b"first");
/// assert_eq!(pending.wait(None)?.expect("it was sent").msg(), b"last");
/// assert!(pending.is_over());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Request<'a> {
    /// Dropped after the client was notified, by the `drop` of `Request`.
    message: Message<'a>,
    /// The cell of an inline request.
    cell: Option<(u32, MsgOwner)>,
    writer: ReplyWriter,
}

impl Link {
    /// Maximum number of pending requests of this handle; `None` if the link has no requests.
    #[must_use]
    pub fn request_window(&self) -> Option<u32> {
        Some(self.core().shape.request_window).filter(|&window| window > 0)
    }

    /// Sends a loan as a request, and wakes a server that waits. Only on the secondary side.
    ///
    /// Exactly one of the servers on the primary side receives it. Requests are received in the order in which they are
    /// made. A request waits for a server until it is dropped, even while no server is attached.
    ///
    /// # Errors
    /// With the loan. [`NoRequests`](crate::ErrorKind::NoRequests); [`RequestSide`](crate::ErrorKind::RequestSide);
    /// [`WindowFull`](crate::ErrorKind::WindowFull) with as many requests pending as the link allows;
    /// [`Full`](crate::ErrorKind::Full) when the servers are behind; [`ForeignLoan`](crate::ErrorKind::ForeignLoan);
    /// [`Evicted`](crate::ErrorKind::Evicted); [`Corrupt`](crate::ErrorKind::Corrupt).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// config.request_window = 1;
    /// # let phy = options.create(&config)?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use shmesh::ErrorKind;
    /// let pending = mac.request(mac.loan()?)?;
    /// let refused = mac.request(mac.loan()?).unwrap_err();
    /// assert!(matches!(refused.error.kind(), ErrorKind::WindowFull { window: 1, .. }));
    /// drop((pending, refused));
    /// assert!(mac.request(mac.loan()?).is_ok(), "the first was given up");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn request<'a>(&'a self, mut loan: Loan<'a>) -> std::result::Result<PendingReply<'a>, SendError<'a>> {
        match self.push_request(&mut loan) {
            Ok(pending) => {
                // The buffers belong to the server now.
                std::mem::forget(loan);
                self.lease.notify_other_side();
                Ok(pending)
            }
            Err(error) => Err(SendError { loan, error }),
        }
    }

    #[inline]
    fn push_request<'a>(&'a self, loan: &mut Loan<'a>) -> Result<PendingReply<'a>> {
        if !std::ptr::eq(loan.link(), self) {
            return Err(Error::from(ErrorKind::ForeignLoan { link: self.link() }));
        }
        let pending = self.open_request()?;
        let (cell, owner) = loan.msg();
        // Dropped on an error, `pending` gives the request up.
        self.endpoint.push_request(pending.cursor.id, cell, owner).map_err(|error| self.push_error(error))?;
        // FENCE, as in a send.
        self.check_not_overtaken().inspect_err(|_| loan.give_up())?;
        Ok(pending)
    }

    /// As [`request`](Self::request), for at most [`REQUEST_INLINE_MAX_BYTES`] and without a buffer of a pool.
    ///
    /// # Errors
    /// As [`request`](Self::request); [`InlineRequestTooLong`](crate::ErrorKind::InlineRequestTooLong);
    /// [`InlineExhausted`](crate::ErrorKind::InlineExhausted).
    #[inline]
    pub fn request_inline(&self, msg_id: i32, cell_id: i32, msg: &[u8]) -> Result<PendingReply<'_>> {
        if msg.len() > REQUEST_INLINE_MAX_BYTES {
            return Err(Error::from(ErrorKind::InlineRequestTooLong { link: self.link(), len: msg.len() }));
        }
        let pending = self.open_request()?;
        let pushed = self.endpoint.push_inline_request(pending.cursor.id, pack(msg_id, cell_id), msg);
        pushed.map_err(|error| match error {
            InlineError::NoCell => self.lease.inline_exhausted(),
            InlineError::Push(error) => self.push_error(error),
        })?;
        self.check_not_overtaken()?;
        self.lease.notify_other_side();
        Ok(pending)
    }

    #[inline]
    fn open_request(&self) -> Result<PendingReply<'_>> {
        self.check_seated()?;
        self.check_requests(Side::Secondary)?;
        match self.endpoint.open_request() {
            Some(id) => Ok(PendingReply { link: self, cursor: ReplyCursor::new(id) }),
            None => {
                let window = self.core().shape.request_window;
                Err(Error::from(ErrorKind::WindowFull { link: self.link(), window }))
            }
        }
    }

    #[inline]
    fn check_requests(&self, side: Side) -> Result<()> {
        if self.core().requests().is_some() && self.side() == side { Ok(()) } else { Err(self.no_requests()) }
    }

    #[cold]
    fn no_requests(&self) -> Error {
        Error::from(match self.core().requests() {
            None => ErrorKind::NoRequests { link: self.link() },
            Some(_) => ErrorKind::RequestSide { link: self.link(), side: self.side() },
        })
    }

    /// Receives the oldest request, or returns `None` if there is none. Never waits. Only on the primary side, where any
    /// number of servers share the requests.
    ///
    /// # Errors
    /// [`NoRequests`](crate::ErrorKind::NoRequests); [`RequestSide`](crate::ErrorKind::RequestSide);
    /// [`Corrupt`](crate::ErrorKind::Corrupt) when a peer wrote what it must not, after which the next request can be taken;
    /// [`Evicted`](crate::ErrorKind::Evicted).
    #[inline]
    pub fn receive_request(&self) -> Result<Option<Request<'_>>> {
        self.check_seated()?;
        self.check_requests(Side::Primary)?;
        let taken = match self.endpoint.take_request() {
            Ok(Some(taken)) => taken,
            Ok(None) => return Ok(None),
            Err(wild) => return Err(self.corrupt(wild)),
        };
        let (cell, inline) = (taken.entry.wild_cell(), taken.entry.is_inline());
        // A MSG buffer may have an index that no inline cell has.
        let lines = if inline { self.core().inline_lines(cell) } else { None };
        let received = match lines {
            Some(lines) => ReceivedParts::inline(1, taken.entry, lines, &self.inline_buffers),
            None => {
                let cell = self.core().cell_of(taken.entry);
                cell.and_then(|cell| ReceivedParts::pooled(self.core(), cell, taken.owner))
            }
        };
        match received {
            Ok(received) => Ok(Some(Request {
                message: self.message(received),
                cell: inline.then_some((cell, taken.owner)),
                writer: ReplyWriter::new(taken.id),
            })),
            Err(wild) => {
                self.endpoint.release_request(&taken);
                self.lease.notify_seat(taken.id.seat);
                Err(self.corrupt(wild))
            }
        }
    }

    /// Whether a request can be received, as far as one look shows.
    #[must_use]
    pub fn has_request(&self) -> bool {
        self.side() == Side::Primary
            && self.core().requests().is_some_and(|requests| requests.ring.has_message())
    }

    /// Waits until a request can be received, for at most `timeout` (`None`: no limit). Returns `false` if it timed out.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); [`NoRequests`](crate::ErrorKind::NoRequests);
    /// [`RequestSide`](crate::ErrorKind::RequestSide).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.request_window = 8;
    /// # let phy = options.create(&config)?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// let server = std::thread::spawn(move || {
    ///     phy.wait_request(None)?;
    ///     let mut request = phy.receive_request()?.expect("no other server takes it");
    ///     request.reply_inline(1, 0, b"pong")
    /// });
    /// let mut pending = mac.request_inline(1, 0, b"ping")?;
    /// assert_eq!(pending.wait(None)?.expect("it is answered").msg(), b"pong");
    /// assert!(server.join().expect("it does not panic")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait_request(&self, timeout: Option<Duration>) -> Result<bool> {
        self.check_requests(Side::Primary)?;
        self.wait_for(timeout, self.shared.notify, |_| self.has_request())
    }
}

impl<'a> PendingReply<'a> {
    /// Takes the next reply, or returns `None` if there is none yet. Never waits.
    ///
    /// # Errors
    /// [`ServerGone`](crate::ErrorKind::ServerGone) when the process that took the request ended before its last reply, and
    /// [`Unanswered`](crate::ErrorKind::Unanswered) when it dropped the request; replies that it sent before come first.
    /// [`Corrupt`](crate::ErrorKind::Corrupt) when a peer wrote what it must not.
    /// [`RequestOver`](crate::ErrorKind::RequestOver) after the last reply or one of these errors.
    /// [`Evicted`](crate::ErrorKind::Evicted).
    #[inline]
    pub fn try_take(&mut self) -> Result<Option<Message<'a>>> {
        let link = self.link;
        let Some(taken) = self.cursor.take(&link.endpoint, &link.lease)? else { return Ok(None) };
        let message = if taken.entry.is_inline() {
            link.inline_cell(taken.entry, taken.word)
        } else {
            link.core().cell_of(taken.entry).and_then(|cell| link.pooled(cell, taken.word))
        };
        message.map(Some).map_err(|wild| link.corrupt(wild))
    }

    /// Waits for the next reply, for at most `timeout`. Returns `Ok(None)` if it timed out; the request is still pending.
    ///
    /// With the timeout `None` it waits until there is a reply or the request fails, and never returns `Ok(None)`. That can
    /// take for ever: a request that no server has taken waits for one, even while none is attached.
    ///
    /// # Errors
    /// As [`try_take`](Self::try_take), and as [`Link::wait`].
    #[inline]
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<Message<'a>>> {
        self.cursor.wait(&self.link.lease, timeout)?;
        self.try_take()
    }

    /// Whether [`try_take`](Self::try_take) has a reply or an error.
    ///
    /// A notification makes the descriptor of [`Link::fd`] readable. Check each pending reply then.
    #[must_use]
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.cursor.is_ready(&self.link.endpoint)
    }

    /// Whether the last reply was taken, or the request has failed. Nothing more arrives then.
    #[must_use]
    #[inline]
    pub fn is_over(&self) -> bool {
        self.cursor.is_over
    }

    /// Makes the pending reply independent of the link's handle.
    pub fn into_owned(self) -> OwnedPendingReply {
        let borrowed = ManuallyDrop::new(self);
        let ReplyCursor { id, taken, is_over, has_failed } = borrowed.cursor;
        OwnedPendingReply::new(ReplyCursor { id, taken, is_over, has_failed }, &borrowed.link.lease)
    }
}

/// Waits for each reply. Ends after the last one, or an error other than [`Corrupt`](crate::ErrorKind::Corrupt).
impl<'a> Iterator for PendingReply<'a> {
    type Item = Result<Message<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.cursor.has_ended() {
            return None;
        }
        let item = self.wait(None);
        self.cursor.yielded(item)
    }
}

impl Drop for PendingReply<'_> {
    #[inline]
    fn drop(&mut self) {
        self.cursor.end(&self.link.endpoint, &self.link.lease);
    }
}

impl fmt::Debug for PendingReply<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cursor.debug("PendingReply", self.link.name(), f)
    }
}

impl<'a> Request<'a> {
    /// The seat of the client that made it.
    #[must_use]
    pub fn client(&self) -> SeatIndex {
        self.writer.id.seat
    }

    /// Whether the client still waits. Once `false`, it stays so: the client dropped the request or ended, and work on it
    /// is in vain.
    #[must_use]
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.writer.is_wanted(&self.message.link().endpoint)
    }

    /// Makes the request independent of the link's handle, so that another thread can answer it. As for
    /// [`Message::into_owned`], nothing is copied.
    #[must_use]
    pub fn into_owned(self) -> OwnedRequest {
        let borrowed = ManuallyDrop::new(self);
        let ReplyWriter { id, sent, is_over, refused } = borrowed.writer;
        let message = borrowed.message.link().message(borrowed.message.received).into_owned();
        OwnedRequest::new(message, borrowed.cell, ReplyWriter { id, sent, is_over, refused })
    }

    /// Sends the last, or only, reply and wakes the client. Returns `false` if the client does not wait any more; the loan
    /// is released.
    ///
    /// # Errors
    /// With the loan, which can be sent again. [`RepliesFull`](crate::ErrorKind::RepliesFull) for a client that is behind with
    /// this stream, or with replies to its other requests; [`RequestOver`](crate::ErrorKind::RequestOver) after the last reply;
    /// [`ForeignLoan`](crate::ErrorKind::ForeignLoan); [`Evicted`](crate::ErrorKind::Evicted).
    #[inline]
    pub fn reply(&mut self, loan: Loan<'a>) -> std::result::Result<bool, SendError<'a>> {
        self.send(loan, true)
    }

    /// As [`reply`](Self::reply), for at most [`INLINE_MAX_BYTES`](crate::INLINE_MAX_BYTES) and without a buffer of a pool.
    ///
    /// # Errors
    /// As [`reply`](Self::reply); [`InlineTooLong`](crate::ErrorKind::InlineTooLong);
    /// [`InlineExhausted`](crate::ErrorKind::InlineExhausted).
    #[inline]
    pub fn reply_inline(&mut self, msg_id: i32, cell_id: i32, msg: &[u8]) -> Result<bool> {
        self.send_inline(pack(msg_id, cell_id), msg, true)
    }

    /// Sends a reply that will be followed by others, and wakes the client. Returns `false` if the client does not wait any
    /// more.
    ///
    /// At most [`REPLIES_MAX`](crate::REPLIES_MAX) replies wait for the client: [`wait_room`](Self::wait_room) waits until it has taken one.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.request_window = 8;
    /// # let phy = options.create(&config)?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// let mut pending = mac.request_inline(1, 0, b"all of it")?;
    /// let mut request = phy.receive_request()?.expect("it was made");
    /// for part in 0..3 {
    ///     request.stream(phy.loan()?.with_msg_id(part))?;
    /// }
    /// request.reply_inline(3, 0, b"")?;
    /// for part in 0..4 {
    ///     assert_eq!(pending.wait(None)?.expect("it was sent").msg_id(), part);
    /// }
    /// assert!(pending.is_over());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn stream(&mut self, loan: Loan<'a>) -> std::result::Result<bool, SendError<'a>> {
        self.send(loan, false)
    }

    /// As [`stream`](Self::stream), for at most [`INLINE_MAX_BYTES`](crate::INLINE_MAX_BYTES) and without a buffer of a pool.
    ///
    /// # Errors
    /// As [`reply_inline`](Self::reply_inline).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.request_window = 8;
    /// # let phy = options.create(&config)?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use shmesh::{ErrorKind, REPLIES_MAX};
    /// let pending = mac.request_inline(1, 0, b"all of it")?;
    /// let mut request = phy.receive_request()?.expect("it was made");
    /// for _ in 0..REPLIES_MAX {
    ///     request.stream_inline(1, 0, b"part")?;
    /// }
    /// let full = request.stream_inline(1, 0, b"part").unwrap_err();
    /// assert!(matches!(full.kind(), ErrorKind::RepliesFull { .. }), "the client takes none");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn stream_inline(&mut self, msg_id: i32, cell_id: i32, msg: &[u8]) -> Result<bool> {
        self.send_inline(pack(msg_id, cell_id), msg, false)
    }

    /// Waits until there is room for one more reply, or none can be sent because the request is over or the client does not
    /// wait any more; for at most `timeout` (`None`: no limit). Returns `false` if it timed out.
    ///
    /// Room means fewer than [`REPLIES_MAX`](crate::REPLIES_MAX) waiting replies. If the last reply was refused because the
    /// client had left its share of a pool, or of the inline cells, it also means that the client can leave a reply there. Any
    /// other reply can still be refused: wait again then. A client that never takes a reply would keep a server without a
    /// `timeout` here for ever, so a server that has other clients passes one, and drops the request or keeps it aside.
    ///
    /// # Errors
    /// As [`Link::wait`].
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.request_window = 8;
    /// # let phy = options.create(&config)?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use std::time::Duration;
    /// let mut pending = mac.request_inline(1, 0, b"all of it")?;
    /// let mut request = phy.receive_request()?.expect("it was made");
    /// while request.stream_inline(1, 0, b"part").is_ok() {}
    /// assert!(!request.wait_room(Some(Duration::from_millis(1)))?);
    /// drop(pending.try_take()?);
    /// assert!(request.wait_room(None)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait_room(&self, timeout: Option<Duration>) -> Result<bool> {
        self.writer.wait_room(&self.message.link().lease, timeout)
    }

    #[inline]
    fn send(&mut self, mut loan: Loan<'a>, is_last: bool) -> std::result::Result<bool, SendError<'a>> {
        let link = self.message.link();
        if !std::ptr::eq(link, loan.link()) {
            let error = Error::from(ErrorKind::ForeignLoan { link: link.link() });
            return Err(SendError { loan, error });
        }
        match self.writer.send(&link.lease, &link.lease, loan.msg(), is_last) {
            Ok(sent) => {
                if sent {
                    // The buffers belong to the client now.
                    std::mem::forget(loan);
                }
                Ok(sent)
            }
            Err((error, may_be_sent)) => {
                if may_be_sent {
                    loan.give_up();
                }
                Err(SendError { loan, error })
            }
        }
    }

    #[inline]
    fn send_inline(&mut self, ids: u64, msg: &[u8], is_last: bool) -> Result<bool> {
        let link = self.message.link();
        self.writer.send_inline(&link.endpoint, &link.lease, ids, msg, is_last)
    }
}

impl<'a> Deref for Request<'a> {
    type Target = Message<'a>;

    fn deref(&self) -> &Self::Target {
        &self.message
    }
}

impl Drop for Request<'_> {
    #[inline]
    fn drop(&mut self) {
        let link = self.message.link();
        self.writer.end(&link.endpoint, &link.lease, self.cell);
    }
}

impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.writer.debug("Request", &self.message, f)
    }
}
