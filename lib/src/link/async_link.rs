//! Links in tokio tasks: receiving, sending, events, streams and sinks.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use futures_sink::Sink;
use tokio::task::coop;

use super::async_bell::AsyncWaiter;
use super::async_request::{AsyncPendingReply, AsyncRequest};
use super::send_backoff::SendBackoff;
use super::{Link, Message, OwnedLoan, OwnedMessage};
use crate::config::PoolId;
use crate::error::{Error, ErrorKind, Result};
use crate::participant::PeerEvent;

/// A participant's handle on a link in a tokio task: it awaits what a [`Link`] does by blocking.
///
/// It registers one descriptor with the runtime, and uses no thread. While messages keep arriving, it makes no system call.
/// Each method that waits may be dropped at any `.await` (in a `select!`, by a timeout) without losing a received message.
/// A message that was being sent is dropped with the future, and is not sent.
///
/// Methods take `&mut self`, so that their futures are `Send`. For a task that receives and one that sends, use two
/// handles: [`Link::try_clone`].
///
/// As a [`Stream`] it yields what [`recv`](Self::recv) does. It does not end when peers leave, as others may come; after an error other
/// than [`Corrupt`](ErrorKind::Corrupt), which the next message does not share, it ends. As a [`Sink`] it takes [`OwnedLoan`]s.
///
/// Any number of requests can be pending, each for a task of its own: see [`request`](Self::request).
///
/// ```
/// use shmesh::config::LinkConfig;
/// use shmesh::{AsyncLink, LinkOptions, Side};
///
/// # let dir = tempfile::tempdir()?;
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let options = LinkOptions::new().dir(dir.path()); // /dev/shm unless named
/// let mut phy = AsyncLink::new(options.create(&LinkConfig::new("fronthaul".parse()?))?)?;
/// let mut mac = AsyncLink::new(options.attach("fronthaul", Side::Secondary)?)?;
///
/// let (message, sent) = tokio::join!(phy.recv(), mac.send_inline(7, 0, b"slot indication"));
/// sent?;
/// let message = message?; // `Send`, and may be held across `.await`
/// assert_eq!((message.msg_id(), message.msg()), (7, &b"slot indication"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct AsyncLink {
    link: Link,
    waiter: AsyncWaiter,
    /// A message has arrived since this handle last spun for one.
    is_warm: bool,
    /// The stream has ended.
    is_over: bool,
    /// The loan that `Sink::start_send` took and `poll_flush` has not sent yet.
    unsent: Option<OwnedLoan>,
    backoff: SendBackoff,
}

impl AsyncLink {
    /// Registers the handle with the runtime of the calling task.
    ///
    /// # Errors
    /// [`NoNotification`](crate::ErrorKind::NoNotification), and the errors of [`Link::fd`].
    ///
    /// # Panics
    /// Outside of a tokio runtime, and in one without I/O. Sending on a full link panics in a runtime without timers.
    pub fn new(link: Link) -> Result<Self> {
        link.fd()?;
        let waiter = AsyncWaiter::new(&link.bell)?;
        Ok(Self {
            link,
            waiter,
            is_warm: true,
            is_over: false,
            unsent: None,
            backoff: SendBackoff::default(),
        })
    }

    /// The handle, for all operations that do not wait.
    #[must_use]
    pub fn link(&self) -> &Link {
        &self.link
    }

    #[cfg(feature = "typed")]
    pub(super) fn waiter(&self) -> &AsyncWaiter {
        &self.waiter
    }

    /// Waits for the next message.
    ///
    /// Spins for the link's `spin_us` when no more messages arrive, then yields the thread to other tasks.
    ///
    /// # Errors
    /// As [`Link::receive`].
    pub async fn recv(&mut self) -> Result<OwnedMessage> {
        std::future::poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// Waits until another participant attaches, detaches or dies. See [`Link::next_event`].
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted), and as [`Link::take_signal`].
    pub async fn next_event(&mut self) -> Result<PeerEvent> {
        std::future::poll_fn(|cx| {
            loop {
                if let Some(event) = self.link().next_event() {
                    return Poll::Ready(Ok(event));
                }
                self.link().lease.check_seated()?;
                ready!(self.poll_signals(cx))?;
            }
        })
        .await
    }

    /// Waits for a free MSG buffer for a message of `msg_len` bytes. Write it, then [`send`](Self::send) it.
    ///
    /// # Errors
    /// As [`Link::loan`] and [`Loan::resize_msg`](crate::Loan::resize_msg), except that it waits while the pool is exhausted.
    pub async fn loan(&mut self, msg_len: usize) -> Result<OwnedLoan> {
        self.when_there_is_room(|link| {
            let mut loan = link.loan()?;
            loan.resize_msg(msg_len)?;
            Ok(loan.into_owned())
        })
        .await
    }

    /// As [`loan`](Self::loan), with a DATA part of `data_len` bytes of `pool`.
    ///
    /// # Errors
    /// As [`Link::loan_with`] and [`Loan::resize_data`](crate::Loan::resize_data), except that it waits while a pool is exhausted.
    pub async fn loan_with(&mut self, pool: PoolId, msg_len: usize, data_len: usize) -> Result<OwnedLoan> {
        self.when_there_is_room(|link| {
            let mut loan = link.loan_with(pool)?;
            loan.resize_msg(msg_len)?;
            loan.resize_data(data_len)?;
            Ok(loan.into_owned())
        })
        .await
    }

    /// Sends a loan of this handle and wakes the other side. Waits while the ring is full.
    ///
    /// # Errors
    /// As [`Loan::send`](crate::Loan::send), except for `Full`, and as [`Link::adopt`] and [`Link::notify`].
    pub async fn send(&mut self, loan: OwnedLoan) -> Result<()> {
        let mut loan = Some(loan);
        std::future::poll_fn(|cx| self.poll_send(&mut loan, cx)).await?;
        self.link().notify()
    }

    /// Sends up to [`INLINE_MAX_BYTES`](crate::INLINE_MAX_BYTES) inside the ring's slot, and wakes the other side. Waits while the
    /// ring is full.
    ///
    /// # Errors
    /// As [`Link::send_inline`], except for `Full` and `InlineExhausted`, and as [`Link::notify`].
    pub async fn send_inline(&mut self, msg_id: i32, cell_id: i32, msg: &[u8]) -> Result<()> {
        self.when_there_is_room(|link| link.send_inline(msg_id, cell_id, msg)).await?;
        self.link().notify()
    }

    /// Makes a request of a loan of this handle, and wakes a server. Waits while the window or the ring is full. Then await the reply:
    /// in this task, or in another, while this handle does other things.
    ///
    /// # Errors
    /// As [`Link::request`], except for `WindowFull` and `Full`, and as [`Link::adopt`].
    ///
    /// ```
    /// use shmesh::config::LinkConfig;
    /// use shmesh::{AsyncLink, LinkOptions, Side};
    ///
    /// # let dir = tempfile::tempdir()?;
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
    /// let options = LinkOptions::new().dir(dir.path()); // /dev/shm unless named
    /// let mut config = LinkConfig::new("fronthaul".parse()?);
    /// config.request_window = 8;
    /// let mut server = AsyncLink::new(options.create(&config)?)?;
    /// let mut client = AsyncLink::new(options.attach("fronthaul", Side::Secondary)?)?;
    ///
    /// tokio::spawn(async move {
    ///     let mut request = server.receive_request().await?;
    ///     request.reply_inline(2, 0, b"three").await
    /// });
    /// let mut loan = client.loan(9).await?;
    /// loan.msg_mut().copy_from_slice(b"how many?");
    /// let mut pending = client.request(loan).await?;
    /// assert_eq!(pending.recv().await?.msg(), b"three");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn request(&mut self, loan: OwnedLoan) -> Result<AsyncPendingReply> {
        let mut unsent = Some(loan);
        let pending = self.when_there_is_room(|link| match unsent.take().map(|loan| link.adopt(loan)) {
            None => unreachable!("a loan that could not be sent comes back"),
            Some(loan) => link.request(loan?).map(super::PendingReply::into_owned).map_err(|failed| {
                unsent = Some(failed.loan.into_owned());
                failed.error
            }),
        });
        let pending = pending.await?;
        Ok(AsyncPendingReply::new(pending, &self.waiter))
    }

    /// As [`request`](Self::request), of at most [`REQUEST_INLINE_MAX_BYTES`](crate::REQUEST_INLINE_MAX_BYTES) and without a loan.
    ///
    /// # Errors
    /// As [`Link::request_inline`], except for `WindowFull`, `Full` and `InlineExhausted`.
    pub async fn request_inline(
        &mut self,
        msg_id: i32,
        cell_id: i32,
        msg: &[u8],
    ) -> Result<AsyncPendingReply> {
        let request = |link: &Link| {
            let pending = link.request_inline(msg_id, cell_id, msg)?;
            Ok(pending.into_owned())
        };
        let pending = self.when_there_is_room(request).await?;
        Ok(AsyncPendingReply::new(pending, &self.waiter))
    }

    /// Waits for the next request. Answer it in this task or in another.
    ///
    /// # Errors
    /// As [`Link::receive_request`].
    pub async fn receive_request(&mut self) -> Result<AsyncRequest> {
        std::future::poll_fn(|cx| self.poll_request(cx)).await
    }

    /// Retries until there is a slot and a buffer.
    pub(super) async fn when_there_is_room<T>(
        &mut self,
        mut attempt: impl FnMut(&Link) -> Result<T>,
    ) -> Result<T> {
        self.backoff = SendBackoff::default();
        std::future::poll_fn(|cx| {
            let progress = ready!(coop::poll_proceed(cx));
            loop {
                match attempt(self.link()) {
                    Err(error) if error.lacks_room() => ready!(self.backoff.poll_pause(cx)),
                    done => {
                        progress.made_progress();
                        return Poll::Ready(done);
                    }
                }
            }
        })
        .await
    }

    fn poll_send(&mut self, unsent: &mut Option<OwnedLoan>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let progress = ready!(coop::poll_proceed(cx));
        while let Some(loan) = unsent.take() {
            let sent = self.link().adopt(loan)?.send();
            match sent.map_err(|failed| (failed.error, failed.loan.into_owned())) {
                Ok(()) => self.backoff = SendBackoff::default(),
                Err((error, loan)) if error.lacks_room() => {
                    *unsent = Some(loan);
                    ready!(self.backoff.poll_pause(cx));
                }
                Err((error, _)) => return Poll::Ready(Err(error)),
            }
        }
        progress.made_progress();
        Poll::Ready(Ok(()))
    }

    /// Takes `&mut self`, so that the futures are `Send`: a handle is not `Sync`.
    fn poll_signals(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.waiter.poll_signals(cx)
    }

    fn poll_request(&mut self, cx: &mut Context<'_>) -> Poll<Result<AsyncRequest>> {
        let progress = ready!(coop::poll_proceed(cx));
        loop {
            if let Some(request) = self.link.receive_request().transpose() {
                // An error, too: a task that receives nothing else must not keep the others waiting.
                progress.made_progress();
                return Poll::Ready(
                    request.map(|request| AsyncRequest::new(request.into_owned(), &self.waiter)),
                );
            }
            ready!(self.poll_signals(cx))?;
        }
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<OwnedMessage>> {
        let progress = ready!(coop::poll_proceed(cx));
        loop {
            if let Some(message) = self.link.receive().transpose() {
                // An error, too, as above.
                progress.made_progress();
                self.is_warm = message.is_ok();
                return Poll::Ready(message.map(Message::into_owned));
            }
            if std::mem::take(&mut self.is_warm) && self.link().spin()? {
                continue;
            }
            ready!(self.poll_signals(cx))?;
        }
    }
}

impl Stream for AsyncLink {
    type Item = Result<OwnedMessage>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let item = ready!(self.poll_recv(cx));
        self.is_over = matches!(&item, Err(error) if !matches!(error.kind(), ErrorKind::Corrupt { .. }));
        Poll::Ready(Some(item))
    }
}

/// Each flush wakes the other side.
impl Sink<OwnedLoan> for AsyncLink {
    type Error = Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let mut unsent = self.unsent.take();
        let sent = self.poll_send(&mut unsent, cx);
        self.unsent = unsent;
        sent
    }

    fn start_send(mut self: Pin<&mut Self>, loan: OwnedLoan) -> Result<()> {
        self.unsent = Some(loan);
        Ok(())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        ready!(self.as_mut().poll_ready(cx))?;
        Poll::Ready(self.link().notify())
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.poll_flush(cx)
    }
}
