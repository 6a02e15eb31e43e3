//! Requests in tokio tasks: pending replies, and requests to answer.

use std::ops::Deref;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use tokio::task::coop;

use super::async_bell::AsyncWaiter;
use super::send_backoff::SendBackoff;
use super::{OwnedLoan, OwnedMessage, OwnedPendingReply, OwnedRequest};
use crate::error::{ErrorKind, Result};

/// A request that was made in a tokio task. Its replies can be awaited in any task of the same runtime.
///
/// As a [`Stream`] it yields the replies, and ends after the last one or an error. Dropping it gives the request up.
/// Dropping the future of [`recv`](Self::recv) does not, and loses no reply.
///
/// ```
/// use shmesh::{AsyncLink, LinkOptions, Side};
///
/// # let dir = tempfile::tempdir()?;
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// # let options = LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// config.request_window = 8;
/// # let mut server = AsyncLink::new(options.create(&config)?)?;
/// # let mut client = AsyncLink::new(options.attach("fronthaul", Side::Secondary)?)?;
/// let mut first = client.request_inline(1, 0, b"first").await?;
/// let mut second = client.request_inline(1, 0, b"second").await?;
/// let (one, two, served) = tokio::join!(first.recv(), second.recv(), async {
///     for _ in 0..2 {
///         let mut request = server.receive_request().await?;
///         let answer = request.msg().to_ascii_uppercase();
///         request.reply_inline(2, 0, &answer).await?;
///     }
///     Ok::<_, shmesh::Error>(())
/// });
/// served?;
/// assert_eq!((one?.msg(), two?.msg()), (&b"FIRST"[..], &b"SECOND"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a pending reply that is dropped gives its request up"]
pub struct AsyncPendingReply {
    pending: OwnedPendingReply,
    waiter: AsyncWaiter,
    /// The stream has ended with an error.
    has_failed: bool,
}

impl AsyncPendingReply {
    pub(super) fn new(pending: OwnedPendingReply, link: &AsyncWaiter) -> Self {
        Self { pending, waiter: link.another(), has_failed: false }
    }

    /// Waits for the next reply.
    ///
    /// # Errors
    /// As [`PendingReply::try_take`](crate::PendingReply::try_take).
    pub async fn recv(&mut self) -> Result<OwnedMessage> {
        std::future::poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// Whether the last reply was taken, or the request has failed. Nothing more arrives then.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.pending.is_over()
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<OwnedMessage>> {
        let progress = ready!(coop::poll_proceed(cx));
        loop {
            if let Some(reply) = self.pending.try_take().transpose() {
                progress.made_progress();
                return Poll::Ready(reply);
            }
            ready!(self.waiter.poll_signals(cx))?;
        }
    }
}

impl Stream for AsyncPendingReply {
    type Item = Result<OwnedMessage>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.has_failed || self.is_over() {
            return Poll::Ready(None);
        }
        let item = ready!(self.poll_recv(cx));
        self.has_failed = matches!(&item, Err(error) if !matches!(error.kind(), ErrorKind::Corrupt { .. }));
        Poll::Ready(Some(item))
    }
}

/// A request that was received in a tokio task. It is an [`OwnedRequest`] whose replies wait for room without a thread.
///
/// Dropping the future of a reply means that the reply was not sent.
#[derive(Debug)]
pub struct AsyncRequest {
    request: OwnedRequest,
    waiter: AsyncWaiter,
}

impl AsyncRequest {
    pub(super) fn new(request: OwnedRequest, link: &AsyncWaiter) -> Self {
        Self { request, waiter: link.another() }
    }

    /// Sends the last, or only, reply. Returns `false` if the client does not wait any more.
    ///
    /// # Errors
    /// As [`OwnedRequest::reply`], except for `RepliesFull`. The loan is dropped then.
    pub async fn reply(&mut self, loan: OwnedLoan) -> Result<bool> {
        self.send(loan, OwnedRequest::reply).await
    }

    /// Sends a reply that will be followed by others. Waits while the client is behind. Returns `false` if it does not wait
    /// any more.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub async fn stream(&mut self, loan: OwnedLoan) -> Result<bool> {
        self.send(loan, OwnedRequest::stream).await
    }

    /// As [`reply`](Self::reply), of at most [`INLINE_MAX_BYTES`](crate::INLINE_MAX_BYTES) and without a loan.
    ///
    /// # Errors
    /// As [`OwnedRequest::reply_inline`], except for `RepliesFull` and `InlineExhausted`.
    pub async fn reply_inline(&mut self, msg_id: i32, cell_id: i32, msg: &[u8]) -> Result<bool> {
        self.when_there_is_room(|request| request.reply_inline(msg_id, cell_id, msg)).await
    }

    /// As [`stream`](Self::stream), of at most [`INLINE_MAX_BYTES`](crate::INLINE_MAX_BYTES) and without a loan.
    ///
    /// # Errors
    /// As [`reply_inline`](Self::reply_inline).
    pub async fn stream_inline(&mut self, msg_id: i32, cell_id: i32, msg: &[u8]) -> Result<bool> {
        self.when_there_is_room(|request| request.stream_inline(msg_id, cell_id, msg)).await
    }

    async fn send(
        &mut self,
        loan: OwnedLoan,
        send: impl Fn(&mut OwnedRequest, OwnedLoan) -> std::result::Result<bool, super::ReplyError>,
    ) -> Result<bool> {
        let mut unsent = Some(loan);
        self.when_there_is_room(|request| match unsent.take() {
            None => unreachable!("a loan that could not be sent comes back"),
            Some(loan) => send(request, loan).map_err(|failed| {
                unsent = Some(failed.loan);
                failed.error
            }),
        })
        .await
    }

    /// Retries until the client has taken a reply, and there is a buffer.
    pub(super) async fn when_there_is_room(
        &mut self,
        mut attempt: impl FnMut(&mut OwnedRequest) -> Result<bool>,
    ) -> Result<bool> {
        let (mut room, mut share, mut is_full) = (SendBackoff::default(), SendBackoff::default(), false);
        std::future::poll_fn(|cx| {
            let progress = ready!(coop::poll_proceed(cx));
            loop {
                // An attempt may copy a value.
                while is_full && !self.request.has_room() {
                    match self.waiter.poll_signals(cx)? {
                        Poll::Ready(()) => {}
                        // A client that takes the last reply to another request does not signal.
                        Poll::Pending if self.request.awaits_share() => ready!(share.poll_pause(cx)),
                        Poll::Pending => return Poll::Pending,
                    }
                }
                match attempt(&mut self.request) {
                    Err(error) if matches!(error.kind(), ErrorKind::RepliesFull { .. }) => is_full = true,
                    Err(error) if error.lacks_room() => ready!(room.poll_pause(cx)),
                    done => {
                        progress.made_progress();
                        return Poll::Ready(done);
                    }
                }
            }
        })
        .await
    }
}

impl Deref for AsyncRequest {
    type Target = OwnedRequest;

    fn deref(&self) -> &Self::Target {
        &self.request
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::AsyncLink;
    use crate::config::LinkConfig;
    use crate::{LinkOptions, REPLIES_MAX, Side};

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn reply_is_attempted_again_only_when_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let mut config = LinkConfig::new("numbers".parse().unwrap());
        config.request_window = 2;
        let server = options.create(&config).unwrap();
        let client = options.attach("numbers", Side::Secondary).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut server = AsyncLink::new(server).unwrap();
            let mut pending = client.request_inline(1, 0, b"").unwrap();
            let mut request = server.receive_request().await.unwrap();
            for _ in 0..REPLIES_MAX {
                assert!(request.stream_inline(1, 0, b"part").await.unwrap());
            }
            let mut attempts = 0;
            let reply = request.when_there_is_room(|request| {
                attempts += 1;
                request.reply_inline(1, 0, b"last")
            });
            let signals = async {
                for _ in 0..20 {
                    client.notify().unwrap();
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                assert!(pending.try_take().unwrap().is_some());
            };
            let (sent, ()) = tokio::join!(reply, signals);
            assert!(sent.unwrap());
            assert_eq!(attempts, 2);
        });
    }
}
