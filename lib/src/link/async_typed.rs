//! Typed messages in tokio tasks.

use std::fmt;
use std::marker::PhantomData;

use super::typed::{check_value, name_of};
use super::{AsyncLink, OwnedTypedMessage, Payload};
use crate::error::Result;
use crate::segment::payload_type::PayloadType;

/// A [`TypedLink`](crate::TypedLink) in tokio tasks: an [`AsyncLink`] whose messages are values of `T`, in both directions.
///
/// ```
/// use shmesh::config::LinkConfig;
/// use shmesh::{AsyncLink, LinkOptions, Side};
///
/// # let dir = tempfile::tempdir()?;
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let options = LinkOptions::new().dir(dir.path()); // /dev/shm unless named
/// let trainer = AsyncLink::new(options.create(&LinkConfig::new("batches".parse()?))?)?;
/// let loader = AsyncLink::new(options.attach("batches", Side::Secondary)?)?;
/// let (mut trainer, mut loader) = (trainer.typed::<[f32]>()?, loader.typed::<[f32]>()?);
///
/// let (tensor, sent) = tokio::join!(trainer.recv(), loader.send(&[0.5; 10_000]));
/// sent?;
/// assert_eq!(tensor?.value().iter().sum::<f32>(), 5_000.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct AsyncTypedLink<T: ?Sized> {
    link: AsyncLink,
    payload: PayloadType,
    of: PhantomData<fn(&T)>,
}

impl AsyncLink {
    /// Restricts the messages to values of `T`, as [`Link::typed`](crate::Link::typed).
    ///
    /// # Errors
    /// As [`Link::typed`](crate::Link::typed).
    pub fn typed<T: Payload + ?Sized>(self) -> Result<AsyncTypedLink<T>> {
        self.typed_as(&name_of::<T>())
    }

    /// As [`typed`](Self::typed), with a name for the type, as [`Link::typed_as`](crate::Link::typed_as).
    ///
    /// # Errors
    /// As [`Link::typed_as`](crate::Link::typed_as).
    pub fn typed_as<T: Payload + ?Sized>(self, name: &str) -> Result<AsyncTypedLink<T>> {
        let payload = self.link().declare_payload::<T>(name)?;
        Ok(AsyncTypedLink { link: self, payload, of: PhantomData })
    }
}

impl<T: Payload + ?Sized> AsyncTypedLink<T> {
    /// Waits for the next value. Dropping the future loses none.
    ///
    /// # Errors
    /// As [`TypedLink::receive`](crate::TypedLink::receive).
    pub async fn recv(&mut self) -> Result<OwnedTypedMessage<T>> {
        let message = self.link.recv().await?;
        check_value!(T, message.lease(), &self.payload, message)?;
        Ok(OwnedTypedMessage { message, of: PhantomData })
    }

    /// Sends a copy of the value and wakes the other side. Waits while there is no slot or buffer.
    ///
    /// # Errors
    /// As [`TypedLink::send`](crate::TypedLink::send), except for a lack of room, and as
    /// [`Link::notify`](crate::Link::notify).
    pub async fn send(&mut self, value: &T) -> Result<()> {
        let payload = &self.payload;
        self.link.when_there_is_room(|link| link.send_value(payload, value)).await?;
        self.link.link().notify()
    }

    /// The handle without the type, which this participant no longer uses.
    #[must_use]
    pub fn into_link(self) -> AsyncLink {
        self.link.link().endpoint.give_up_type();
        self.link
    }
}

impl<T: ?Sized> fmt::Debug for AsyncTypedLink<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncTypedLink")
            .field("payload", &self.payload.to_string())
            .field("link", &self.link)
            .finish()
    }
}
