//! Typed requests in tokio tasks.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::async_request::{AsyncPendingReply, AsyncRequest};
use super::typed::{check_value, name_of, readable_value};
use super::typed_request::owned_value;
use super::{AsyncLink, OwnedTypedMessage, Payload, PendingReply};
use crate::error::Result;
use crate::segment::payload_type::{PayloadType, PayloadTypes};

/// A [`TypedRequests`](crate::TypedRequests) in tokio tasks: an [`AsyncLink`] whose requests are values of `Req` and whose
/// replies are values of `Rep`.
///
/// ```
/// use shmesh::{AsyncLink, LinkOptions, Side};
///
/// # let dir = tempfile::tempdir()?;
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// # let options = LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("batches".parse()?);
/// config.request_window = 8;
/// # let server = AsyncLink::new(options.create(&config)?)?;
/// # let client = AsyncLink::new(options.attach("batches", Side::Secondary)?)?;
/// let mut server = server.typed_requests::<u64, [f32]>()?;
/// let mut client = client.typed_requests::<u64, [f32]>()?;
///
/// tokio::spawn(async move {
///     let mut request = server.receive_request().await?;
///     let len = *request.value() as usize;
///     request.reply(&vec![0.5; len]).await
/// });
/// let mut pending = client.request(&10_000).await?;
/// assert_eq!(pending.recv().await?.value().iter().sum::<f32>(), 5_000.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct AsyncTypedRequests<Req: ?Sized, Rep: ?Sized> {
    link: AsyncLink,
    types: PayloadTypes,
    of: PhantomData<fn(&Req, &Rep)>,
}

impl AsyncLink {
    /// Restricts requests to values of `Req` and replies to values of `Rep`, as
    /// [`Link::typed_requests`](crate::Link::typed_requests).
    ///
    /// # Errors
    /// As [`Link::typed_requests`](crate::Link::typed_requests).
    pub fn typed_requests<Req: Payload + ?Sized, Rep: Payload + ?Sized>(
        self,
    ) -> Result<AsyncTypedRequests<Req, Rep>> {
        self.typed_requests_as(&name_of::<Req>(), &name_of::<Rep>())
    }

    /// As [`typed_requests`](Self::typed_requests), with names for the types, as
    /// [`Link::typed_requests_as`](crate::Link::typed_requests_as).
    ///
    /// # Errors
    /// As [`Link::typed_requests_as`](crate::Link::typed_requests_as).
    pub fn typed_requests_as<Req: Payload + ?Sized, Rep: Payload + ?Sized>(
        self,
        request: &str,
        reply: &str,
    ) -> Result<AsyncTypedRequests<Req, Rep>> {
        let types = self.link().declare_requests::<Req, Rep>(request, reply)?;
        Ok(AsyncTypedRequests { link: self, types, of: PhantomData })
    }
}

impl<Req: Payload + ?Sized, Rep: Payload + ?Sized> AsyncTypedRequests<Req, Rep> {
    /// Sends a copy of the value as a request, and wakes a server. Waits while there is no slot or buffer, or the window is
    /// full. Then await the reply, in this task or in another.
    ///
    /// # Errors
    /// As [`TypedRequests::request`](crate::TypedRequests::request), except for a lack of room.
    pub async fn request(&mut self, value: &Req) -> Result<AsyncTypedPendingReply<Rep>> {
        let payload = &self.types.of_secondary;
        let request = |link: &super::Link| link.request_value(payload, value).map(PendingReply::into_owned);
        let pending = self.link.when_there_is_room(request).await?;
        let pending = AsyncPendingReply::new(pending, self.link.waiter());
        Ok(AsyncTypedPendingReply { pending, payload: self.types.of_primary, of: PhantomData })
    }

    /// Waits for the next request. Answer it in this task or in another.
    ///
    /// # Errors
    /// As [`TypedRequests::receive_request`](crate::TypedRequests::receive_request).
    pub async fn receive_request(&mut self) -> Result<AsyncTypedRequest<Req, Rep>> {
        let request = self.link.receive_request().await?;
        check_value!(Req, request.lease(), &self.types.of_secondary, request)?;
        Ok(AsyncTypedRequest { message: request, reply: self.types.of_primary, of: PhantomData })
    }

    /// The handle, for all operations that do not wait.
    #[must_use]
    pub fn link(&self) -> &super::Link {
        self.link.link()
    }

    /// The handle without the types, which this participant no longer uses.
    #[must_use]
    pub fn into_link(self) -> AsyncLink {
        self.link.link().endpoint.give_up_type();
        self.link
    }
}

impl<Req: ?Sized, Rep: ?Sized> fmt::Debug for AsyncTypedRequests<Req, Rep> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncTypedRequests")
            .field("request", &self.types.of_secondary.to_string())
            .field("reply", &self.types.of_primary.to_string())
            .field("link", &self.link)
            .finish()
    }
}

/// A request that was made in a tokio task, and that receives replies of one type, as an [`AsyncPendingReply`].
///
/// As a [`Stream`] it yields the replies, and ends after the last one or an error. Dropping it gives the request up.
#[must_use = "a pending reply that is dropped gives its request up"]
pub struct AsyncTypedPendingReply<T: ?Sized> {
    pending: AsyncPendingReply,
    payload: PayloadType,
    of: PhantomData<fn(&T)>,
}

impl<T: Payload + ?Sized> AsyncTypedPendingReply<T> {
    /// Waits for the next reply. Dropping the future loses none.
    ///
    /// # Errors
    /// As [`TypedPendingReply::try_take`](crate::TypedPendingReply::try_take).
    pub async fn recv(&mut self) -> Result<OwnedTypedMessage<T>> {
        owned_value(&self.payload, self.pending.recv().await?)
    }

    /// Whether the last reply was taken, or the request has failed. Nothing more arrives then.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.pending.is_over()
    }
}

impl<T: Payload + ?Sized> Stream for AsyncTypedPendingReply<T> {
    type Item = Result<OwnedTypedMessage<T>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let item = Pin::new(&mut self.pending).poll_next(cx);
        item.map(|item| item.map(|message| owned_value(&self.payload, message?)))
    }
}

impl<T: ?Sized> fmt::Debug for AsyncTypedPendingReply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AsyncTypedPendingReply").field(&self.pending).finish()
    }
}

/// A request of one type that was received in a tokio task, to be answered with values of another.
///
/// Dropping the future of a reply means that the reply was not sent. If the request is dropped before its last reply, the
/// client gets [`Unanswered`](crate::ErrorKind::Unanswered).
pub struct AsyncTypedRequest<T: ?Sized, Rep: ?Sized> {
    message: AsyncRequest,
    reply: PayloadType,
    of: PhantomData<fn(&T, &Rep)>,
}

impl<T: ?Sized, Rep: Payload + ?Sized> AsyncTypedRequest<T, Rep> {
    /// The request without its types: its ids, its client, and its bytes, which another process may change.
    #[must_use]
    pub fn request(&self) -> &AsyncRequest {
        &self.message
    }

    /// Sends a copy of the value as the last, or only, reply. Waits while there is no buffer. Returns `false` if the client
    /// does not wait any more.
    ///
    /// # Errors
    /// As [`TypedRequest::reply`](crate::TypedRequest::reply), except for a lack of room.
    pub async fn reply(&mut self, value: &Rep) -> Result<bool> {
        let payload = &self.reply;
        self.message.when_there_is_room(|request| request.send_value(payload, value, true)).await
    }

    /// Sends a copy of the value as a reply that will be followed by others. Waits while the client is behind, and while
    /// there is no buffer. Returns `false` if the client does not wait any more.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub async fn stream(&mut self, value: &Rep) -> Result<bool> {
        let payload = &self.reply;
        self.message.when_there_is_room(|request| request.send_value(payload, value, false)).await
    }
}

readable_value!(AsyncTypedRequest<T, Rep>);
