//! Typed requests: each request is a value of one type, and each reply a value of another.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::time::Duration;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::owned::OwnedLoan;
use super::owned_request::{OwnedPendingReply, OwnedRequest};
use super::request::{PendingReply, Request};
use super::typed::{
    OwnedTypedMessage, Payload, TypedLoan, TypedMessage, TypedSendError, check_value, name_of,
    pool_for_value, readable_value,
};
use super::{Link, OwnedMessage};
use crate::config::PoolId;
use crate::error::{ErrorKind, Result};
use crate::ring::{INLINE_MAX_BYTES, REQUEST_INLINE_MAX_BYTES};
use crate::segment::payload_type::{PayloadType, PayloadTypes};

/// A handle on a link whose requests are values of `Req` and whose replies are values of `Rep`.
///
/// Both can be slices (`[T]`), of any length. As with [`Link::typed`], the first participant declares the types in the link:
/// the type of all messages of the secondary side, and the type of all messages of the primary side. A participant with another type of
/// either gets an error with all the names. Types are replaced when no participant uses them any more and no message, request
/// or reply waits.
///
/// A value is inline if it fits. Otherwise it is in the smallest buffer in host memory that it fits.
///
/// For everything else, it dereferences to the [`Link`].
///
/// ```
/// use shmesh::{LinkOptions, Side};
/// use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};
///
/// #[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
/// #[repr(C)]
/// struct Query {
///     cell: u32,
///     limit: u32,
/// }
///
/// # let dir = tempfile::tempdir()?;
/// # let options = LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("samples".parse()?);
/// config.request_window = 8;
/// # let server = options.create(&config)?;
/// # let client = options.attach("samples", Side::Secondary)?;
/// let server = server.typed_requests::<Query, [f32]>()?;
/// let client = client.typed_requests::<Query, [f32]>()?;
///
/// let pending = client.request(&Query { cell: 3, limit: 1_000 })?;
///
/// let mut request = server.receive_request()?.expect("it was just made");
/// let limit = request.value().limit as usize;
/// request.stream(&[1.0; 10])?; // copied
/// let mut loan = request.loan_slice(limit)?; // written where it is read
/// loan.value_mut()?.fill(2.0);
/// request.reply_loan(loan)?;
///
/// let sums = pending.map(|reply| Ok(reply?.value().iter().sum::<f32>())); // an iterator that waits
/// assert_eq!(sums.collect::<shmesh::Result<Vec<_>>>()?, [10.0, 2_000.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TypedRequests<Req: ?Sized, Rep: ?Sized> {
    link: Link,
    types: PayloadTypes,
    of: PhantomData<fn(&Req, &Rep)>,
}

impl Link {
    /// Restricts requests to values of `Req` and replies to values of `Rep`, or for `[T]` to slices of any length.
    ///
    /// Each type has the name of the Rust type without its modules, as with [`typed`](Self::typed).
    ///
    /// # Errors
    /// As [`typed`](Self::typed); [`NoRequests`](ErrorKind::NoRequests).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// let mut config = shmesh::config::LinkConfig::new("numbers".parse()?);
    /// config.request_window = 8;
    /// let server = options.create(&config)?;
    /// let client = options.attach("numbers", shmesh::Side::Secondary)?;
    /// let server = server.typed_requests::<u32, u64>()?;
    /// let refused = client.typed_requests::<u32, [u64]>().unwrap_err();
    /// assert!(refused.to_string().contains("it carries u64 (8 bytes, aligned to 8) from the primary side"), "{refused}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn typed_requests<Req: Payload + ?Sized, Rep: Payload + ?Sized>(
        self,
    ) -> Result<TypedRequests<Req, Rep>> {
        self.typed_requests_as(&name_of::<Req>(), &name_of::<Rep>())
    }

    /// As [`typed_requests`](Self::typed_requests), with names for the types: each 1 to 48 printable ASCII characters, for
    /// example with a version in it.
    ///
    /// # Errors
    /// As [`typed_requests`](Self::typed_requests); [`TypeName`](ErrorKind::TypeName).
    pub fn typed_requests_as<Req: Payload + ?Sized, Rep: Payload + ?Sized>(
        self,
        request: &str,
        reply: &str,
    ) -> Result<TypedRequests<Req, Rep>> {
        let types = self.declare_requests::<Req, Rep>(request, reply)?;
        Ok(TypedRequests { link: self, types, of: PhantomData })
    }

    pub(super) fn declare_requests<Req: Payload + ?Sized, Rep: Payload + ?Sized>(
        &self,
        request: &str,
        reply: &str,
    ) -> Result<PayloadTypes> {
        if self.core().requests().is_none() {
            return Err(ErrorKind::NoRequests { link: self.link() }.into());
        }
        let types = PayloadTypes {
            of_primary: self.payload_type::<Rep>(reply, INLINE_MAX_BYTES)?,
            of_secondary: self.payload_type::<Req>(request, REQUEST_INLINE_MAX_BYTES)?,
        };
        self.declare(&types)?;
        Ok(types)
    }

    pub(super) fn request_value<T: Payload + ?Sized>(
        &self,
        payload: &PayloadType,
        value: &T,
    ) -> Result<PendingReply<'_>> {
        let bytes = value.as_bytes();
        if bytes.len() <= REQUEST_INLINE_MAX_BYTES {
            return self.request_inline(0, 0, bytes);
        }
        Ok(self.request(self.loan_value(payload, value)?)?)
    }
}

impl<Req: Payload + ?Sized, Rep: Payload + ?Sized> TypedRequests<Req, Rep> {
    /// Sends a copy of the value as a request, and wakes a server that waits. Only on the secondary side.
    ///
    /// # Errors
    /// The errors of [`Link::request`], [`Link::request_inline`] and [`Link::loan`];
    /// [`TypeTooLarge`](ErrorKind::TypeTooLarge) for a slice.
    pub fn request(&self, value: &Req) -> Result<TypedPendingReply<'_, Rep>> {
        Ok(self.pending(self.link.request_value(&self.types.of_secondary, value)?))
    }

    /// Sends a value that was written in place as a request, as [`request`](Self::request).
    ///
    /// # Errors
    /// As [`Link::request`], with the loan.
    pub fn request_loan<'a>(
        &'a self,
        loan: TypedLoan<'a, Req>,
    ) -> std::result::Result<TypedPendingReply<'a, Rep>, TypedSendError<'a, Req>> {
        let TypedLoan { loan, len, of } = loan;
        match self.link.request(loan) {
            Ok(pending) => Ok(self.pending(pending)),
            Err(failed) => {
                Err(TypedSendError { loan: TypedLoan { loan: failed.loan, len, of }, error: failed.error })
            }
        }
    }

    /// Receives the oldest request, or returns `None` if there is none. Never waits. Only on the primary side.
    ///
    /// # Errors
    /// As [`Link::receive_request`]. [`NotOfType`](ErrorKind::NotOfType) if the request does not have the length of a value:
    /// it was made without a typed handle. [`OnDevice`](ErrorKind::OnDevice) if its DATA part is in device memory. Such a
    /// request is dropped, its client gets [`Unanswered`](ErrorKind::Unanswered), and the next request can be received.
    pub fn receive_request(&self) -> Result<Option<TypedRequest<'_, Req, Rep>>> {
        let Some(message) = self.link.receive_request()? else { return Ok(None) };
        check_value!(Req, &self.link.lease, &self.types.of_secondary, message)?;
        Ok(Some(TypedRequest { message, reply: &self.types.of_primary, of: PhantomData }))
    }

    fn pending<'a>(&'a self, pending: PendingReply<'a>) -> TypedPendingReply<'a, Rep> {
        TypedPendingReply { pending, link: &self.link, payload: &self.types.of_primary, of: PhantomData }
    }

    /// The handle without the types, which this participant no longer uses.
    #[must_use]
    pub fn into_link(self) -> Link {
        self.link.endpoint.give_up_type();
        self.link
    }
}

impl<Req: Payload, Rep: ?Sized> TypedRequests<Req, Rep> {
    /// Loans a buffer for a request, to be written in place. Never waits.
    ///
    /// Until it is written, the value has the content of the buffer's last use.
    ///
    /// # Errors
    /// As [`Link::loan`].
    pub fn loan(&self) -> Result<TypedLoan<'_, Req>> {
        self.link.loan_bytes(&self.types.of_secondary, size_of::<Req>())
    }
}

impl<T: FromBytes + IntoBytes + Immutable + KnownLayout, Rep: ?Sized> TypedRequests<[T], Rep> {
    /// Loans a buffer for a request of `len` values, to be written in place. Never waits.
    ///
    /// Until they are written, the values have the content of the buffer's last use.
    ///
    /// # Errors
    /// As [`Link::loan`]; [`TypeTooLarge`](ErrorKind::TypeTooLarge).
    pub fn loan_slice(&self, len: usize) -> Result<TypedLoan<'_, [T]>> {
        self.link.loan_bytes(&self.types.of_secondary, len.saturating_mul(size_of::<T>()))
    }
}

impl<Req: ?Sized, Rep: ?Sized> Deref for TypedRequests<Req, Rep> {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl<Req: ?Sized, Rep: ?Sized> fmt::Debug for TypedRequests<Req, Rep> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TypedRequests")
            .field("request", &self.types.of_secondary.to_string())
            .field("reply", &self.types.of_primary.to_string())
            .field("link", &self.link)
            .finish()
    }
}

/// A request that this client has made, and that receives replies of one type, as a [`PendingReply`].
///
/// As an iterator it waits for each reply. It ends after the last one, or an error after which there are no more; it goes on
/// after a reply that is not a value ([`NotOfType`](ErrorKind::NotOfType), [`OnDevice`](ErrorKind::OnDevice)) or is
/// [`Corrupt`](ErrorKind::Corrupt). Dropping it gives the request up.
#[must_use = "a pending reply that is dropped gives its request up"]
pub struct TypedPendingReply<'a, T: ?Sized> {
    pending: PendingReply<'a>,
    link: &'a Link,
    payload: &'a PayloadType,
    of: PhantomData<fn(&T)>,
}

impl<'a, T: Payload + ?Sized> TypedPendingReply<'a, T> {
    /// Takes the next reply, or returns `None` if there is none yet. Never waits.
    ///
    /// # Errors
    /// As [`PendingReply::try_take`]. [`NotOfType`](ErrorKind::NotOfType) and [`OnDevice`](ErrorKind::OnDevice) for a reply
    /// of a server without a typed handle; it is dropped, and the next one can be taken.
    pub fn try_take(&mut self) -> Result<Option<TypedMessage<'a, T>>> {
        let taken = self.pending.try_take()?;
        taken.map(|message| self.typed(message)).transpose()
    }

    /// Waits for the next reply, as [`PendingReply::wait`].
    ///
    /// # Errors
    /// As [`try_take`](Self::try_take) and [`PendingReply::wait`].
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<TypedMessage<'a, T>>> {
        let taken = self.pending.wait(timeout)?;
        taken.map(|message| self.typed(message)).transpose()
    }

    fn typed(&self, message: super::Message<'a>) -> Result<TypedMessage<'a, T>> {
        check_value!(T, &self.link.lease, self.payload, message)?;
        Ok(TypedMessage { message, of: PhantomData })
    }

    /// Makes the pending reply independent of the link's handle, as [`PendingReply::into_owned`].
    pub fn into_owned(self) -> OwnedTypedPendingReply<T> {
        OwnedTypedPendingReply { pending: self.pending.into_owned(), payload: *self.payload, of: PhantomData }
    }
}

impl<'a, T: ?Sized> Deref for TypedPendingReply<'a, T> {
    type Target = PendingReply<'a>;

    fn deref(&self) -> &PendingReply<'a> {
        &self.pending
    }
}

impl<'a, T: Payload + ?Sized> Iterator for TypedPendingReply<'a, T> {
    type Item = Result<TypedMessage<'a, T>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.pending.next().map(|message| self.typed(message?))
    }
}

impl<T: ?Sized> fmt::Debug for TypedPendingReply<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TypedPendingReply").field(&self.pending).finish()
    }
}

/// A pending reply of one type that does not borrow from its link, as an [`OwnedPendingReply`].
///
/// As an iterator it waits for each reply, and ends as a [`TypedPendingReply`]. Dropping it, in any thread, gives the request
/// up.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("numbers".parse()?);
/// # config.request_window = 8;
/// # let server = options.create(&config)?.typed_requests::<u64, u64>()?;
/// # let client = options.attach("numbers", shmesh::Side::Secondary)?.typed_requests::<u64, u64>()?;
/// let mut pending = client.request(&7)?.into_owned();
/// let waiter = std::thread::spawn(move || pending.wait(None));
///
/// let mut request = server.receive_request()?.expect("it was just made").into_owned();
/// let worker = std::thread::spawn(move || {
///     let n = request.copied();
///     request.reply(&(n * n))
/// });
/// assert!(worker.join().expect("it does not panic")?, "the client waits for it");
/// let reply = waiter.join().expect("it does not panic")?.expect("without a timeout there is one");
/// assert_eq!(reply.value(), &49);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a pending reply that is dropped gives its request up"]
pub struct OwnedTypedPendingReply<T: ?Sized> {
    pending: OwnedPendingReply,
    payload: PayloadType,
    of: PhantomData<fn(&T)>,
}

/// Checks that an owned message, or a reply, is a value.
pub(super) fn owned_value<T: Payload + ?Sized>(
    payload: &PayloadType,
    message: OwnedMessage,
) -> Result<OwnedTypedMessage<T>> {
    check_value!(T, message.lease(), payload, message)?;
    Ok(OwnedTypedMessage { message, of: PhantomData })
}

impl<T: Payload + ?Sized> OwnedTypedPendingReply<T> {
    /// Takes the next reply, or returns `None` if there is none yet. Never waits.
    ///
    /// # Errors
    /// As [`TypedPendingReply::try_take`].
    pub fn try_take(&mut self) -> Result<Option<OwnedTypedMessage<T>>> {
        let taken = self.pending.try_take()?;
        taken.map(|message| owned_value(&self.payload, message)).transpose()
    }

    /// Waits for the next reply, as [`PendingReply::wait`].
    ///
    /// # Errors
    /// As [`TypedPendingReply::wait`].
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<OwnedTypedMessage<T>>> {
        let taken = self.pending.wait(timeout)?;
        taken.map(|message| owned_value(&self.payload, message)).transpose()
    }
}

impl<T: ?Sized> Deref for OwnedTypedPendingReply<T> {
    type Target = OwnedPendingReply;

    fn deref(&self) -> &OwnedPendingReply {
        &self.pending
    }
}

impl<T: Payload + ?Sized> Iterator for OwnedTypedPendingReply<T> {
    type Item = Result<OwnedTypedMessage<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.pending.next().map(|message| owned_value(&self.payload, message?))
    }
}

impl<T: ?Sized> fmt::Debug for OwnedTypedPendingReply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedTypedPendingReply").field(&self.pending).finish()
    }
}

/// A received request of one type, to be answered with values of another, as a [`Request`].
///
/// If it is dropped before its last reply, the client gets [`Unanswered`](ErrorKind::Unanswered).
pub struct TypedRequest<'a, T: ?Sized, Rep: ?Sized> {
    message: Request<'a>,
    reply: &'a PayloadType,
    of: PhantomData<fn(&T, &Rep)>,
}

impl<'a, T: ?Sized, Rep: Payload + ?Sized> TypedRequest<'a, T, Rep> {
    /// The request without its types: its ids, its client, and its bytes, which another process may change.
    #[must_use]
    pub fn request(&self) -> &Request<'a> {
        &self.message
    }

    /// Sends a copy of the value as the last, or only, reply and wakes the client. Returns `false` if the client does not
    /// wait any more.
    ///
    /// # Errors
    /// The errors of [`Request::reply`], [`Request::reply_inline`] and [`Link::loan`];
    /// [`TypeTooLarge`](ErrorKind::TypeTooLarge) for a slice.
    pub fn reply(&mut self, value: &Rep) -> Result<bool> {
        self.send(value, true)
    }

    /// Sends a copy of the value as a reply that will be followed by others, and wakes the client; see
    /// [`Request::stream`]. Returns `false` if the client does not wait any more.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn stream(&mut self, value: &Rep) -> Result<bool> {
        self.send(value, false)
    }

    fn send(&mut self, value: &Rep, is_last: bool) -> Result<bool> {
        let bytes = value.as_bytes();
        let is_inline = bytes.len() <= INLINE_MAX_BYTES;
        match (is_inline, is_last) {
            (true, true) => return self.message.reply_inline(0, 0, bytes),
            (true, false) => return self.message.stream_inline(0, 0, bytes),
            (false, _) => {}
        }
        let loan = self.message.link().loan_value(self.reply, value)?;
        let sent = if is_last { self.message.reply(loan) } else { self.message.stream(loan) };
        Ok(sent?)
    }

    /// As [`reply`](Self::reply), with a value that was written in place.
    ///
    /// # Errors
    /// As [`Request::reply`], with the loan.
    pub fn reply_loan(
        &mut self,
        loan: TypedLoan<'a, Rep>,
    ) -> std::result::Result<bool, TypedSendError<'a, Rep>> {
        self.send_loan(loan, true)
    }

    /// As [`stream`](Self::stream), with a value that was written in place.
    ///
    /// # Errors
    /// As [`Request::stream`], with the loan.
    pub fn stream_loan(
        &mut self,
        loan: TypedLoan<'a, Rep>,
    ) -> std::result::Result<bool, TypedSendError<'a, Rep>> {
        self.send_loan(loan, false)
    }

    fn send_loan(
        &mut self,
        loan: TypedLoan<'a, Rep>,
        is_last: bool,
    ) -> std::result::Result<bool, TypedSendError<'a, Rep>> {
        let TypedLoan { loan, len, of } = loan;
        let sent = if is_last { self.message.reply(loan) } else { self.message.stream(loan) };
        sent.map_err(|failed| TypedSendError {
            loan: TypedLoan { loan: failed.loan, len, of },
            error: failed.error,
        })
    }

    /// Waits until there is room for one more reply; see [`Request::wait_room`].
    ///
    /// # Errors
    /// As [`Link::wait`].
    pub fn wait_room(&self, timeout: Option<Duration>) -> Result<bool> {
        self.message.wait_room(timeout)
    }

    /// Makes the request independent of the link's handle, so that another thread can answer it. Copies nothing.
    #[must_use]
    pub fn into_owned(self) -> OwnedTypedRequest<T, Rep> {
        OwnedTypedRequest { message: self.message.into_owned(), reply: *self.reply, of: PhantomData }
    }
}

impl<'a, T: ?Sized, Rep: Payload> TypedRequest<'a, T, Rep> {
    /// Loans a buffer for a reply, to be written in place. Never waits.
    ///
    /// Until it is written, the value has the content of the buffer's last use.
    ///
    /// # Errors
    /// As [`Link::loan`].
    pub fn loan(&self) -> Result<TypedLoan<'a, Rep>> {
        self.message.link().loan_bytes(self.reply, size_of::<Rep>())
    }
}

impl<'a, T: ?Sized, R: FromBytes + IntoBytes + Immutable + KnownLayout> TypedRequest<'a, T, [R]> {
    /// Loans a buffer for a reply of `len` values, to be written in place. Never waits.
    ///
    /// Until they are written, the values have the content of the buffer's last use.
    ///
    /// # Errors
    /// As [`Link::loan`]; [`TypeTooLarge`](ErrorKind::TypeTooLarge).
    pub fn loan_slice(&self, len: usize) -> Result<TypedLoan<'a, [R]>> {
        self.message.link().loan_bytes(self.reply, len.saturating_mul(size_of::<R>()))
    }
}

/// A received request of one type that does not borrow from its link, as an [`OwnedRequest`].
///
/// If it is dropped before its last reply, in any thread, the client gets [`Unanswered`](ErrorKind::Unanswered).
pub struct OwnedTypedRequest<T: ?Sized, Rep: ?Sized> {
    pub(super) message: OwnedRequest,
    reply: PayloadType,
    of: PhantomData<fn(&T, &Rep)>,
}

impl<T: ?Sized, Rep: Payload + ?Sized> OwnedTypedRequest<T, Rep> {
    /// The request without its types: its ids, and its bytes, which another process may change.
    #[must_use]
    pub fn request(&self) -> &OwnedRequest {
        &self.message
    }

    /// Sends a copy of the value as the last, or only, reply and wakes the client. Returns `false` if the client does not
    /// wait any more.
    ///
    /// # Errors
    /// As [`TypedRequest::reply`].
    pub fn reply(&mut self, value: &Rep) -> Result<bool> {
        self.message.send_value(&self.reply, value, true)
    }

    /// Sends a copy of the value as a reply that will be followed by others; see [`TypedRequest::stream`].
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn stream(&mut self, value: &Rep) -> Result<bool> {
        self.message.send_value(&self.reply, value, false)
    }

    /// Waits until there is room for one more reply; see [`Request::wait_room`].
    ///
    /// # Errors
    /// As [`Link::wait`].
    pub fn wait_room(&self, timeout: Option<Duration>) -> Result<bool> {
        self.message.wait_room(timeout)
    }
}

impl OwnedRequest {
    /// Sends a copy of the value as a reply.
    pub(super) fn send_value<T: Payload + ?Sized>(
        &mut self,
        payload: &PayloadType,
        value: &T,
        is_last: bool,
    ) -> Result<bool> {
        let bytes = value.as_bytes();
        let is_inline = bytes.len() <= INLINE_MAX_BYTES;
        match (is_inline, is_last) {
            (true, true) => return self.reply_inline(0, 0, bytes),
            (true, false) => return self.stream_inline(0, 0, bytes),
            (false, _) => {}
        }
        let lease = self.lease();
        let pool = pool_for_value(lease, payload, bytes.len())?;
        // A buffer has fewer bytes than 2^32.
        let mut loan = OwnedLoan::claim(lease, pool, u32::try_from(bytes.len()).unwrap_or(0))?;
        let part = if pool == PoolId::CpuMsg { loan.msg_mut() } else { loan.data_mut() };
        part.copy_from_slice(bytes);
        let sent = if is_last { self.reply(loan) } else { self.stream(loan) };
        Ok(sent?)
    }
}

readable_value!(TypedRequest<'a, T, Rep>);
readable_value!(OwnedTypedRequest<T, Rep>);
