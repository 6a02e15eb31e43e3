//! Typed messages: each message is a value of one type, or a slice of values.

use std::any::type_name;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::time::{Duration, Instant};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::core::{Core, TypeConflict};
use super::lease::SeatLease;
use super::open::RETRY;
use super::{Link, Loan, Message, OwnedMessage, SharedBytes};
use crate::config::PoolId;
use crate::error::{Error, ErrorKind, Result};
use crate::ring::INLINE_MAX_BYTES;
use crate::segment::payload_type::{NAME_MAX, PayloadType, PayloadTypes};
use crate::sync::LINE_BYTES;

/// How long an error waits for the name of the other type, which is written after its fingerprint, and for the recovery of
/// a participant that has died with it.
const NAMING: Duration = Duration::from_millis(100);
/// How long to wait for a participant that is declaring a type: it may be stopped for a moment.
const DECLARING: Duration = Duration::from_secs(2);

/// The payload of typed messages: a type without padding for which any bytes are a valid value, or a slice of such a type.
///
/// It is implemented for every type with the four traits of the crate `zerocopy`, for example with their derives. Depend on that crate
/// for them (`zerocopy = { version = "0.8", features = ["derive"] }`); numbers and arrays of numbers have them without.
pub trait Payload: FromBytes + IntoBytes + Immutable + KnownLayout + private::Shape {}

impl<T: FromBytes + IntoBytes + Immutable + KnownLayout> Payload for T {}
impl<T: FromBytes + IntoBytes + Immutable + KnownLayout> Payload for [T] {}

mod private {
    use std::any::type_name;

    /// A value or a slice of values.
    #[expect(unnameable_types, reason = "keeps `Payload` to the types that this library knows")]
    pub trait Shape {
        /// Size of a value, or of an element of a slice.
        const SIZE: usize;
        const ALIGN: usize;
        const IS_SLICE: bool;
        /// Path of the value's type, or of the element's.
        fn path() -> &'static str;
    }

    impl<T> Shape for T {
        const SIZE: usize = size_of::<T>();
        const ALIGN: usize = align_of::<T>();
        const IS_SLICE: bool = false;
        fn path() -> &'static str {
            type_name::<T>()
        }
    }

    impl<T> Shape for [T] {
        const SIZE: usize = size_of::<T>();
        const ALIGN: usize = align_of::<T>();
        const IS_SLICE: bool = true;
        fn path() -> &'static str {
            type_name::<T>()
        }
    }
}

/// A handle on a link whose messages are values of `T`, in both directions.
///
/// The first participant that calls [`Link::typed`] declares the type in the link, by name, size and alignment. A
/// participant with another type gets an error that names both, and a participant that uses the declared one. This finds
/// mistakes, not attacks. Nothing else is compared: if the fields of a type change and its size does not, give it another
/// name ([`Link::typed_as`]). Another type can be declared when no participant has a typed handle any more and no message
/// waits, or when the link is removed or emptied ([`LinkOptions::fresh`](crate::LinkOptions::fresh)). Handles without a
/// type are not restricted, and neither are programs in other languages.
///
/// [`send`](Self::send) sends a value inline if it fits. Otherwise a value is in the MSG part, or, if that is too small, in
/// the DATA part: in the smallest buffer in host memory that it fits.
///
/// For everything else, it dereferences to the [`Link`].
///
/// ```
/// use shmesh::config::LinkConfig;
/// use shmesh::{ErrorKind, LinkOptions, Side};
/// use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};
///
/// #[derive(Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
/// #[repr(C)]
/// struct Slot {
///     frame: u32,
///     slot: u16,
///     cell: u16,
/// }
///
/// # let dir = tempfile::tempdir()?;
/// let options = LinkOptions::new().dir(dir.path()); // /dev/shm unless named
/// let phy = options.create(&LinkConfig::new("fronthaul".parse()?))?.typed::<Slot>()?;
/// let mac = options.attach("fronthaul", Side::Secondary)?.typed::<Slot>()?;
///
/// phy.send(&Slot { frame: 7, slot: 3, cell: 0 })?;
/// let message = mac.receive()?.expect("it was just sent");
/// assert_eq!(message.value(), &Slot { frame: 7, slot: 3, cell: 0 });
///
/// let mut loan = phy.loan()?; // written where it is read
/// *loan.value_mut()? = Slot { frame: 8, slot: 0, cell: 0 };
/// loan.send()?;
///
/// let other = options.attach("fronthaul", Side::Secondary)?.typed::<u64>().unwrap_err();
/// assert!(matches!(other.kind(), ErrorKind::OtherType { .. }), "{other}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TypedLink<T: ?Sized> {
    link: Link,
    payload: PayloadType,
    of: PhantomData<fn(&T)>,
}

impl Link {
    /// Restricts the messages to values of `T`, or for `[T]` to slices of any length.
    ///
    /// The name of the type is the Rust type's without its modules: `phy::Slot` becomes `Slot`.
    ///
    /// # Errors
    /// [`OtherType`](ErrorKind::OtherType) if another participant has declared another type;
    /// [`TypeUndecided`](ErrorKind::TypeUndecided) if one has been declaring a type for two seconds;
    /// [`TypeTooLarge`](ErrorKind::TypeTooLarge); [`TypeAlignment`](ErrorKind::TypeAlignment);
    /// [`Evicted`](ErrorKind::Evicted). An error drops the handle; to keep it, use a clone
    /// ([`try_clone`](Self::try_clone)).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let trainer = options.create(&shmesh::config::LinkConfig::new("batches".parse()?))?;
    /// # let loader = options.attach("batches", shmesh::Side::Secondary)?;
    /// let (trainer, loader) = (trainer.typed::<[f32]>()?, loader.typed::<[f32]>()?);
    /// let mut loan = loader.loan_slice(10_000)?;
    /// loan.value_mut()?.fill(0.5);
    /// loan.send()?;
    /// let tensor = trainer.receive()?.expect("it was just sent");
    /// assert_eq!(tensor.value().iter().sum::<f32>(), 5_000.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn typed<T: Payload + ?Sized>(self) -> Result<TypedLink<T>> {
        self.typed_as(&name_of::<T>())
    }

    /// As [`typed`](Self::typed), with a name for the type: 1 to 48 printable ASCII characters, for example with a version in it.
    ///
    /// # Errors
    /// As [`typed`](Self::typed); [`TypeName`](ErrorKind::TypeName).
    pub fn typed_as<T: Payload + ?Sized>(self, name: &str) -> Result<TypedLink<T>> {
        let payload = self.declare_payload::<T>(name)?;
        Ok(TypedLink { link: self, payload, of: PhantomData })
    }

    pub(super) fn declare_payload<T: Payload + ?Sized>(&self, name: &str) -> Result<PayloadType> {
        let payload = self.payload_type::<T>(name, INLINE_MAX_BYTES)?;
        self.declare(&PayloadTypes::both(payload))?;
        Ok(payload)
    }

    /// The type `T` with this name, if the link can carry it, in a buffer or inline.
    pub(super) fn payload_type<T: Payload + ?Sized>(
        &self,
        name: &str,
        inline_max: usize,
    ) -> Result<PayloadType> {
        self.check_seated()?;
        let link = || self.link();
        if T::ALIGN > LINE_BYTES {
            let (name, align, limit) = (name.to_owned(), T::ALIGN, LINE_BYTES);
            return Err(ErrorKind::TypeAlignment { link: link(), name, align, limit }.into());
        }
        let limit = largest_value(self.core()).max(inline_max);
        if T::SIZE > limit {
            return Err(type_too_large(&self.lease, name, T::SIZE, limit));
        }
        PayloadType::new(name, T::SIZE, T::ALIGN, T::IS_SLICE)
            .ok_or_else(|| ErrorKind::TypeName { link: link(), name: name.to_owned() }.into())
    }

    pub(super) fn declare(&self, types: &PayloadTypes) -> Result<()> {
        let start = Instant::now();
        loop {
            let Err(conflict) = self.core().declare_types(&self.endpoint.me, types) else { return Ok(()) };
            let patience = if let TypeConflict::Declaring(_) = conflict { DECLARING } else { NAMING };
            if start.elapsed() < patience {
                // A participant that uses the type, or has not received a message, may have died just now.
                self.recover()?;
                std::thread::sleep(RETRY);
                continue;
            }
            let user = match conflict {
                TypeConflict::Declaring(other) => {
                    let (seat, pid) = (other.seat.value(), other.word.pid());
                    return Err(ErrorKind::TypeUndecided { link: self.link(), seat, pid }.into());
                }
                TypeConflict::Used(other) => Some((other.seat.value(), other.word.pid())),
                TypeConflict::Waiting => None,
            };
            let (declared, asked) = (self.declared_types(), types.to_string());
            return Err(ErrorKind::OtherType { link: self.link(), declared, asked, user }.into());
        }
    }

    /// The types that another participant has declared, perhaps just now.
    fn declared_types(&self) -> String {
        let start = Instant::now();
        loop {
            match self.core().declared_types() {
                Some(declared) if !declared.are_known() && start.elapsed() < NAMING => {
                    std::thread::sleep(RETRY);
                }
                Some(declared) => return declared.to_string(),
                None => return "another type".to_owned(),
            }
        }
    }
}

/// The pools that can hold a value, and the size of their buffers.
fn value_pools(core: &Core) -> impl Iterator<Item = (PoolId, usize)> {
    PoolId::ALL.into_iter().filter_map(|pool| Some((pool, core.pool(pool)?.buf_size() as usize)))
}

fn largest_value(core: &Core) -> usize {
    value_pools(core).map(|(_, size)| size).max().unwrap_or(0)
}

/// The pool with the smallest buffers for a value of `len` bytes: the MSG pool, if they fit.
pub(super) fn pool_for_value(lease: &SeatLease, payload: &PayloadType, len: usize) -> Result<PoolId> {
    let fitting = value_pools(lease.core()).filter(|&(_, size)| len <= size);
    let smallest = fitting.min_by_key(|&(pool, size)| (pool != PoolId::CpuMsg, size));
    smallest
        .map(|(pool, _)| pool)
        .ok_or_else(|| type_too_large(lease, &payload.name(), len, largest_value(lease.core())))
}

#[cold]
fn type_too_large(lease: &SeatLease, name: &str, size: usize, limit: usize) -> Error {
    ErrorKind::TypeTooLarge { link: lease.link(), name: name.to_owned(), size, limit }.into()
}

/// The name under which [`Link::typed`] declares a type.
pub(super) fn name_of<T: Payload + ?Sized>() -> String {
    let mut name = without_modules(T::path());
    name.truncate(NAME_MAX);
    name
}

/// A type's path without the modules, in ASCII: `a::Pair<b::C, [d::E; 2]>` becomes `Pair<C, [E; 2]>`. Compilers may print
/// module paths differently, and so does a crate that re-exports a type.
fn without_modules(path: &str) -> String {
    let mut short = String::with_capacity(path.len());
    let mut ident = 0;
    for char in path.chars() {
        match char {
            ':' => short.truncate(ident),
            _ => short.push(if char.is_ascii() { char } else { '?' }),
        }
        if !(char == ':' || char == '_' || char.is_alphanumeric()) {
            ident = short.len();
        }
    }
    short
}

/// The bytes of the value: the DATA part, if the message has one.
macro_rules! part {
    ($message:expr) => {
        if $message.data_pool().is_some() { $message.data_shared() } else { $message.msg_shared() }
    };
}
pub(super) use part;

/// Whether the bytes are a value, or values of a slice. Makes no reference to them: another process may change them.
fn fits<T: Payload + ?Sized>(bytes: SharedBytes<'_>) -> bool {
    let len = bytes.len();
    let has_length = if T::IS_SLICE { len.is_multiple_of(T::SIZE) } else { len == T::SIZE };
    has_length && bytes.as_ptr().addr().is_multiple_of(T::ALIGN)
}

/// The steps of typed handles.
impl Link {
    pub(super) fn send_value<T: Payload + ?Sized>(&self, payload: &PayloadType, value: &T) -> Result<()> {
        let bytes = value.as_bytes();
        if bytes.len() <= INLINE_MAX_BYTES {
            return self.send_inline(0, 0, bytes);
        }
        Ok(self.loan_value(payload, value)?.send()?)
    }

    /// Loans the smallest buffer for a value, and copies it there.
    pub(super) fn loan_value<T: Payload + ?Sized>(
        &self,
        payload: &PayloadType,
        value: &T,
    ) -> Result<Loan<'_>> {
        let bytes = value.as_bytes();
        let mut loan = self.loan_bytes::<T>(payload, bytes.len())?;
        loan.bytes_mut()?.copy_from_slice(bytes);
        Ok(loan.loan)
    }

    /// Loans the smallest buffer for `len` bytes.
    pub(super) fn loan_bytes<T: Payload + ?Sized>(
        &self,
        payload: &PayloadType,
        len: usize,
    ) -> Result<TypedLoan<'_, T>> {
        let loan = match pool_for_value(&self.lease, payload, len)? {
            PoolId::CpuMsg => self.loan()?,
            pool => self.loan_with(pool)?,
        };
        let mut loan = TypedLoan { loan, len, of: PhantomData };
        loan.bytes_mut()?;
        Ok(loan)
    }
}

/// Checks that a message is a value.
macro_rules! check_value {
    ($value:ty, $lease:expr, $payload:expr, $message:expr) => {
        $crate::link::typed::check_bytes::<$value>(
            $lease,
            $payload,
            $message.data_pool(),
            $crate::link::typed::part!($message),
        )
    };
}
pub(super) use check_value;

/// Checks that the bytes of a message, with a DATA part in `pool`, are a value.
pub(super) fn check_bytes<T: Payload + ?Sized>(
    lease: &SeatLease,
    payload: &PayloadType,
    pool: Option<PoolId>,
    bytes: SharedBytes<'_>,
) -> Result<()> {
    let kind = match pool {
        // Bytes in device memory have no address here, and would pass for an empty slice.
        Some(pool) if pool.is_device() => ErrorKind::OnDevice { link: lease.link(), pool },
        _ if fits::<T>(bytes) => return Ok(()),
        _ => ErrorKind::NotOfType { link: lease.link(), asked: payload.to_string(), len: bytes.len() },
    };
    Err(kind.into())
}

impl<T: Payload + ?Sized> TypedLink<T> {
    /// Sends a copy of the value: in the ring's slot if it has at most [`INLINE_MAX_BYTES`], else in a buffer. Does not
    /// wake a sleeping receiver: see [`Link::notify`].
    ///
    /// # Errors
    /// The errors of [`Link::loan`], [`Loan::send`] and [`Link::send_inline`]; [`TypeTooLarge`](ErrorKind::TypeTooLarge)
    /// for a slice.
    pub fn send(&self, value: &T) -> Result<()> {
        self.link.send_value(&self.payload, value)
    }

    /// Receives the oldest message, or returns `None` if there is none. Never waits.
    ///
    /// # Errors
    /// As [`Link::receive`]. [`NotOfType`](ErrorKind::NotOfType) if the message does not have the length of a value: it
    /// was sent without a typed handle. [`OnDevice`](ErrorKind::OnDevice) if its DATA part is in device memory. Such a
    /// message is dropped, and the next one can be received.
    pub fn receive(&self) -> Result<Option<TypedMessage<'_, T>>> {
        let Some(message) = self.link.receive()? else { return Ok(None) };
        check_value!(T, &self.link.lease, &self.payload, message)?;
        Ok(Some(TypedMessage { message, of: PhantomData }))
    }

    fn loan_bytes(&self, len: usize) -> Result<TypedLoan<'_, T>> {
        self.link.loan_bytes(&self.payload, len)
    }

    /// The handle without the type, which this participant no longer uses.
    #[must_use]
    pub fn into_link(self) -> Link {
        self.link.endpoint.give_up_type();
        self.link
    }
}

impl<T: Payload> TypedLink<T> {
    /// Loans a buffer for a value, to be written in place. Never waits.
    ///
    /// Until it is written, the value has the content of the buffer's last use.
    ///
    /// # Errors
    /// As [`Link::loan`].
    pub fn loan(&self) -> Result<TypedLoan<'_, T>> {
        self.loan_bytes(size_of::<T>())
    }
}

impl<T: FromBytes + IntoBytes + Immutable + KnownLayout> TypedLink<[T]> {
    /// Loans a buffer for `len` values, to be written in place. Never waits.
    ///
    /// Until they are written, the values have the content of the buffer's last use.
    ///
    /// # Errors
    /// As [`Link::loan`]; [`TypeTooLarge`](ErrorKind::TypeTooLarge).
    pub fn loan_slice(&self, len: usize) -> Result<TypedLoan<'_, [T]>> {
        self.loan_bytes(len.saturating_mul(size_of::<T>()))
    }
}

impl<T: ?Sized> Deref for TypedLink<T> {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl<T: ?Sized> fmt::Debug for TypedLink<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TypedLink")
            .field("payload", &self.payload.to_string())
            .field("link", &self.link)
            .finish()
    }
}

/// A value being written, as a [`Loan`].
#[must_use = "a loan that is dropped is not sent"]
pub struct TypedLoan<'a, T: ?Sized> {
    pub(super) loan: Loan<'a>,
    /// Number of bytes of the value.
    pub(super) len: usize,
    pub(super) of: PhantomData<fn(&T)>,
}

impl<'a, T: Payload + ?Sized> TypedLoan<'a, T> {
    /// The value, to be written in place.
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted).
    #[inline]
    pub fn value_mut(&mut self) -> Result<&mut T> {
        let (link, len) = (self.loan.link(), self.len);
        T::mut_from_bytes(self.bytes_mut()?).map_err(|_| {
            let asked = type_name::<T>().to_owned();
            ErrorKind::NotOfType { link: link.link(), asked, len }.into()
        })
    }

    /// Sets the message id, as the application defines it. The default is 0.
    pub fn with_msg_id(self, msg_id: i32) -> Self {
        Self { loan: self.loan.with_msg_id(msg_id), ..self }
    }

    /// Makes the value visible to the other side. Does not wake a sleeping receiver: see [`Link::notify`].
    ///
    /// # Errors
    /// As [`Loan::send`], with the loan.
    #[inline]
    pub fn send(self) -> std::result::Result<(), TypedSendError<'a, T>> {
        let Self { loan, len, of } = self;
        loan.send().map_err(|failed| TypedSendError {
            loan: Self { loan: failed.loan, len, of },
            error: failed.error,
        })
    }

    #[inline]
    fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        if self.loan.data_pool().is_some() {
            self.loan.resize_data(self.len)
        } else {
            self.loan.resize_msg(self.len)
        }
    }
}

impl<T: ?Sized> fmt::Debug for TypedLoan<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TypedLoan").field("loan", &self.loan).field("len", &self.len).finish()
    }
}

/// The error of a value that was not sent, together with the value, like a [`SendError`](crate::SendError).
#[derive(Debug)]
pub struct TypedSendError<'a, T: ?Sized> {
    /// The value, to be sent again or dropped.
    pub loan: TypedLoan<'a, T>,
    /// The reason why it was not sent.
    pub error: Error,
}

impl<T: ?Sized> fmt::Display for TypedSendError<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T: ?Sized> From<TypedSendError<'_, T>> for Error {
    fn from(failed: TypedSendError<'_, T>) -> Self {
        failed.error
    }
}

impl<'b, T: ?Sized> From<TypedSendError<'_, T>> for Box<dyn std::error::Error + 'b> {
    fn from(failed: TypedSendError<'_, T>) -> Self {
        failed.error.into()
    }
}

impl<'b, T: ?Sized> From<TypedSendError<'_, T>> for Box<dyn std::error::Error + Send + Sync + 'b> {
    fn from(failed: TypedSendError<'_, T>) -> Self {
        failed.error.into()
    }
}

/// A received value. It holds its buffers until it is dropped, as a [`Message`].
pub struct TypedMessage<'a, T: ?Sized> {
    pub(super) message: Message<'a>,
    pub(super) of: PhantomData<fn(&T)>,
}

impl<T: Payload + ?Sized> TypedMessage<'_, T> {
    /// Makes the value independent of the link's handle, as [`Message::into_owned`].
    #[must_use]
    pub fn into_owned(self) -> OwnedTypedMessage<T> {
        OwnedTypedMessage { message: self.message.into_owned(), of: PhantomData }
    }
}

/// A received value that does not borrow from its link, as an [`OwnedMessage`].
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// let trainer = options.create(&shmesh::config::LinkConfig::new("batches".parse()?))?.typed::<[f32]>()?;
/// let loader = options.attach("batches", shmesh::Side::Secondary)?.typed::<[f32]>()?;
/// loader.send(&[0.5; 10_000])?;
/// let tensor = trainer.receive()?.expect("it was just sent").into_owned();
/// let worker = std::thread::spawn(move || tensor.value().iter().sum::<f32>());
/// assert_eq!(worker.join().expect("it does not panic"), 5_000.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct OwnedTypedMessage<T: ?Sized> {
    pub(super) message: OwnedMessage,
    pub(super) of: PhantomData<fn(&T)>,
}

/// Accessors of received values.
macro_rules! readable_value {
    ($typed:ident<$($lifetime:lifetime,)? T $(, $other:ident)?>) => {
        impl<$($lifetime,)? T: Payload + ?Sized $(, $other: ?Sized)?> $typed<$($lifetime,)? T $(, $other)?> {
            /// The value in place, for a receiver that trusts the other processes of the link, as with
            /// [`Message::msg`](crate::Message::msg).
            #[must_use]
            #[inline]
            pub fn value(&self) -> &T {
                let bytes = $crate::link::typed::part!(self.message);
                let Ok(value) = T::ref_from_bytes(bytes.trusted()) else {
                    unreachable!("length and alignment were checked, and do not change")
                };
                value
            }
        }

        impl<$($lifetime,)? T: Payload $(, $other: ?Sized)?> $typed<$($lifetime,)? T $(, $other)?> {
            /// A copy of the value, for a receiver that does not trust the other processes of the link. Each byte is read
            /// once, so a value that was checked cannot change any more.
            #[must_use]
            pub fn copied(&self) -> T {
                let mut value = T::new_zeroed();
                $crate::link::typed::part!(self.message).copy_to(value.as_mut_bytes());
                value
            }
        }

        impl<$($lifetime,)? T: FromBytes + IntoBytes + Immutable + KnownLayout $(, $other: ?Sized)?>
            $typed<$($lifetime,)? [T] $(, $other)?>
        {
            /// A copy of the values, for a receiver that does not trust the other processes of the link. Each byte is read
            /// once.
            #[must_use]
            pub fn to_vec(&self) -> Vec<T> {
                let bytes = $crate::link::typed::part!(self.message);
                let mut values: Vec<T> =
                    (0..bytes.len() / size_of::<T>()).map(|_| T::new_zeroed()).collect();
                bytes.copy_to(values.as_mut_slice().as_mut_bytes());
                values
            }
        }

        impl<$($lifetime,)? T: ?Sized $(, $other: ?Sized)?> fmt::Debug for $typed<$($lifetime,)? T $(, $other)?> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($typed)).field(&self.message).finish()
            }
        }
    };
}
pub(super) use readable_value;

/// The message of a received value.
macro_rules! untyped_message {
    ($typed:ident<$($lifetime:lifetime,)? T>, $message:ty) => {
        impl<$($lifetime,)? T: ?Sized> $typed<$($lifetime,)? T> {
            /// The message with the value: its ids, and its bytes, which another process may change.
            #[must_use]
            pub fn message(&self) -> &$message {
                &self.message
            }

            /// The message without the type.
            #[must_use]
            pub fn into_message(self) -> $message {
                self.message
            }
        }
    };
}

readable_value!(TypedMessage<'a, T>);
readable_value!(OwnedTypedMessage<T>);
untyped_message!(TypedMessage<'a, T>, Message<'a>);
untyped_message!(OwnedTypedMessage<T>, OwnedMessage);

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::config::LinkConfig;
    use crate::{LinkOptions, Side};

    struct World {
        options: LinkOptions,
        primary: Link,
        _dir: tempfile::TempDir,
    }

    impl World {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let options = LinkOptions::new().dir(dir.path());
            let config = LinkConfig::new("prices".parse().unwrap());
            Self { primary: options.create(&config).unwrap(), options, _dir: dir }
        }

        fn secondary(&self) -> Link {
            self.options.attach("prices", Side::Secondary).unwrap()
        }

        fn typed<T: Payload>(&self) -> Result<TypedLink<T>> {
            self.secondary().typed::<T>()
        }
    }

    fn kind<T>(result: Result<T>) -> String {
        let error = result.err().expect("it is refused");
        format!("{:?}", error.kind())
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn stopped_participant_that_declares_a_type_blocks_no_user_of_the_declared_one() {
        let world = World::new();
        let _user = world.typed::<u32>().unwrap();
        let stopped = world.secondary();
        stopped.core().type_role().claim(&stopped.endpoint.me, &stopped.core().seats).unwrap();
        world.typed::<u32>().unwrap();
        let error = world.typed::<u64>().map(drop).unwrap_err();
        let seat = format!("seat {} (process {}) is declaring", stopped.seat(), std::process::id());
        assert!(matches!(error.kind(), ErrorKind::TypeUndecided { .. }) && error.is_retryable());
        assert!(error.to_string().contains(&seat), "{error}");
        assert!(error.to_string().contains("`Link::evict`"), "{error}");
        assert!(world.primary.core().seats.evict(&stopped.endpoint.me));
        assert!(kind(world.typed::<u64>()).starts_with("OtherType"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn type_is_restored_after_a_participant_died_while_replacing_it() {
        let world = World::new();
        let user = world.typed::<u32>().unwrap();
        // It dies before it sees that the type is used.
        for side in [Side::Primary, Side::Secondary] {
            let line = world.primary.core().payload_type(side);
            line.withdraw(line.declared_fingerprint());
        }
        assert!(kind(world.typed::<u64>()).contains("u32"));
        world.typed::<u32>().unwrap();
        drop(user);
        world.typed::<u64>().unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn handle_without_its_type_does_not_keep_the_type() {
        let world = World::new();
        let untyped = world.typed::<u32>().unwrap().into_link();
        world.typed::<u64>().unwrap();
        drop(untyped);
    }

    #[test]
    fn names_have_no_modules() {
        for (path, name) in [
            ("u32", "u32"),
            ("phy::fapi::Slot", "Slot"),
            ("[phy::Slot; 4]", "[Slot; 4]"),
            ("a::Pair<b::C_1, [d::E; 2]>", "Pair<C_1, [E; 2]>"),
            ("a::Größe", "Gr??e"),
        ] {
            assert_eq!(without_modules(path), name);
        }
    }
}
