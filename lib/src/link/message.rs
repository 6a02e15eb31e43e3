//! Received messages, which hold their buffers until they are dropped.

use std::fmt;
use std::ptr::NonNull;

use super::Link;
use super::SharedBytes;
use super::core::{Cell, Core, DataRef, Descriptor, EntryCell, unpack};
use super::inline_buffers::InlineBuffers;
use crate::config::PoolId;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::owner::MsgOwner;
use crate::ring::broadcast::{Broadcast, HOLDS_MAX, ReadToken, TakeError};
use crate::ring::entry::RingEntry;
use crate::ring::inline::InlineLines;
use crate::ring::spsc::TakenMessage;
use crate::ring::{Ring, WildWord};

/// A received message. It holds its buffers until it is dropped; then they can be loaned again, by this handle first.
///
/// With this library, the other side can no longer write to the buffers, but a process that breaks the protocol can. If
/// that is a risk, read the payload through [`SharedBytes`], which copies it.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::config::PoolId;
/// config.pools[PoolId::CpuMsg.index()].pool_len = 1;
/// # let phy = options.create(&config)?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// mac.loan()?.with_msg_id(7).send()?;
/// let message = phy.receive()?.expect("it was just sent");
/// assert!(mac.loan().is_err(), "the message still holds the only buffer");
/// assert_eq!((message.msg_id(), message.msg().len(), message.data_pool()), (7, 0, None));
/// drop(message);
/// assert!(mac.loan().is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Message<'a> {
    link: &'a Link,
    pub(super) received: ReceivedParts,
}

/// A received message: its checked descriptor, and its buffers.
#[derive(Clone, Copy)]
pub(super) struct ReceivedParts {
    pub(super) bytes: NonNull<u8>,
    pub(super) descriptor: Descriptor,
    /// The owner word of the MSG buffer; [`INLINE`] for an inline message.
    pub(super) owner: MsgOwner,
    pub(super) cell: u32,
    /// The DATA buffer, if any.
    pub(super) data: DataRef,
}

impl ReceivedParts {
    /// A message in a MSG buffer that was just made ours.
    #[inline(always)]
    pub(super) fn pooled(
        core: &Core,
        cell: EntryCell<'_>,
        owner: MsgOwner,
    ) -> std::result::Result<Self, WildWord> {
        let EntryCell { line, index: cell, bytes } = cell;
        let (descriptor, data) = core.descriptor_in(line, cell, owner)?;
        Ok(Self { bytes, descriptor, owner, cell, data })
    }

    /// An inline message whose bytes come after so many words, and are copied into a place of `buffers`.
    #[inline(always)]
    pub(super) fn inline(
        words_before: usize,
        entry: RingEntry,
        lines: InlineLines<'_>,
        buffers: &InlineBuffers,
    ) -> std::result::Result<Self, WildWord> {
        let Some(all) = entry.inline_len() else {
            return Err(WildWord("an inline message longer than its slot"));
        };
        let before = u32::try_from(words_before * size_of::<u64>()).unwrap_or(u32::MAX);
        let Some(len) = all.checked_sub(before) else {
            return Err(WildWord("an inline request without its id"));
        };
        let (msg_id, cell_id) = unpack(lines.ids());
        let bytes = buffers.put(|words| {
            lines.read(all, words);
            words.copy_within(words_before.., 0);
        });
        let descriptor = Descriptor { msg_id, cell_id, msg_len: len, data_len: 0 };
        Ok(Self { bytes, descriptor, owner: INLINE, cell: 0, data: DataRef::NONE })
    }

    #[inline]
    pub(super) fn is_inline(&self) -> bool {
        self.owner == INLINE
    }

    /// The first byte of the MSG part, and its length.
    #[inline]
    pub(super) fn msg(&self) -> (NonNull<u8>, u32) {
        (self.bytes, self.descriptor.msg_len)
    }

    /// The buffer of the DATA part, and the id of its device memory according to the sender.
    pub(super) fn device_data(&self, core: &Core) -> Option<(PoolId, u32, u64)> {
        let (pool, index) = self.data.parts()?;
        Some((pool, index, Cell(core.msg().table.cell(self.cell)).memory()))
    }

    /// The first byte of the DATA part, and its length. The length is 0 without a DATA part in host memory.
    #[inline]
    pub(super) fn data(&self, core: &Core) -> (NonNull<u8>, u32) {
        match self.data.parts().and_then(|(pool, index)| Some(core.pool(pool)?.buffer(index))) {
            Some(start) => (start, self.descriptor.data_len),
            None => (NonNull::dangling(), 0),
        }
    }
}

/// The owner word of a message that is not in a pool. No buffer has this value, as no message has this state.
const INLINE: MsgOwner = MsgOwner(0);

impl Link {
    /// Receives the oldest message, or returns `None` if there is none. Never waits.
    ///
    /// # Errors
    /// [`Corrupt`](crate::ErrorKind::Corrupt) if a peer broke the protocol; the next message can be received.
    /// [`RoleTaken`](crate::ErrorKind::RoleTaken); [`Evicted`](crate::ErrorKind::Evicted);
    /// [`HoldingTooMany`](crate::ErrorKind::HoldingTooMany).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// assert!(phy.receive()?.is_none());
    /// mac.send_inline(7, 0, b"up")?;
    /// let message = phy.receive()?.expect("it was just sent");
    /// assert_eq!((message.msg_id(), message.msg()), (7, &b"up"[..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline(always)]
    pub fn receive(&self) -> Result<Option<Message<'_>>> {
        self.check_seated()?;
        let receiving = self.endpoint.receiving();
        let message = match self.incoming() {
            Ring::Spsc(ring) => {
                let consumer = self.consumer(ring)?;
                match ring.take(consumer, &receiving) {
                    Ok(Some(TakenMessage::Inline(entry, lines))) => {
                        let message = self.inline(entry, lines);
                        ring.pass(consumer);
                        message
                    }
                    Ok(Some(TakenMessage::Pooled(cell, word))) => {
                        ring.pass(consumer);
                        self.pooled(cell, word)
                    }
                    Ok(None) => return Ok(None),
                    Err(wild) => Err(wild),
                }
            }
            Ring::Mpmc(ring) => match ring.pop(&receiving) {
                Ok(Some((entry, cell, word))) => self.open_shared(entry, cell, word),
                Ok(None) => return Ok(None),
                Err(wild) => Err(wild),
            },
            Ring::Broadcast(ring) => return self.receive_broadcast(ring),
        };
        match message {
            Ok(message) => Ok(Some(message)),
            Err(wild) => Err(self.corrupt(wild)),
        }
    }

    /// Receives up to `max` messages, oldest first, but not more than the ring holds, and appends them to `messages`.
    /// Returns their number.
    ///
    /// # Errors
    /// As [`receive`](Self::receive). Messages before and after the damaged one are in `messages`.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// for cell_id in 0..3 {
    ///     mac.send_inline(1, cell_id, b"")?;
    /// }
    /// let mut messages = Vec::new();
    /// assert_eq!(phy.receive_batch(&mut messages, 16)?, 3);
    /// assert_eq!(messages[2].cell_id(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn receive_batch<'a>(&'a self, messages: &mut Vec<Message<'a>>, max: usize) -> Result<usize> {
        self.check_seated()?;
        if let Ring::Broadcast(ring) = self.incoming() {
            return self.receive_batch_broadcast(ring, messages, max);
        }
        let receiving = self.endpoint.receiving();
        let mut failed = None;
        let before = messages.len();
        let mut keep = |message| match message {
            Ok(message) => messages.push(message),
            Err(wild) => failed = failed.or(Some(wild)),
        };
        let taken = match self.incoming() {
            Ring::Spsc(ring) => ring.pop_batch(self.consumer(ring)?, &receiving, max, |taken| {
                keep(match taken {
                    TakenMessage::Inline(entry, lines) => self.inline(entry, lines),
                    TakenMessage::Pooled(cell, word) => self.pooled(cell, word),
                });
            }),
            Ring::Mpmc(ring) => {
                ring.pop_batch(&receiving, max, |entry, cell, word| keep(self.open_shared(entry, cell, word)))
            }
            Ring::Broadcast(_) => Ok(0),
        };
        match taken.err().or(failed) {
            None => Ok(messages.len() - before),
            Some(wild) => Err(self.corrupt(wild)),
        }
    }

    /// Drops the queued messages at these positions. With many consumers, messages that another one receives meanwhile
    /// count too, and later ones are not touched.
    pub(super) fn discard(&self, positions: &[u64]) -> Result<()> {
        match self.incoming() {
            Ring::Mpmc(ring) => {
                let receiving = self.endpoint.receiving();
                for (entry, cell, word) in positions.iter().filter_map(|at| ring.pop_at(*at, &receiving)) {
                    // Damaged or not, it is dropped.
                    let _ = self.open_shared(entry, cell, word);
                }
            }
            // Emptied by a writer: see `Endpoint::forget`.
            Ring::Broadcast(_) => {}
            // There is no other consumer.
            Ring::Spsc(ring) => {
                let consumer = self.consumer(ring)?;
                // Not counted as received.
                let receiving = self.core().receiving(self.endpoint.me.seat);
                for _ in positions {
                    // Damaged or not, it is dropped.
                    let Ok(Some(taken)) = ring.take(consumer, &receiving) else { continue };
                    ring.pass(consumer);
                    if let TakenMessage::Pooled(cell, word) = taken {
                        let _ = self.pooled(cell, word);
                    }
                }
            }
        }
        Ok(())
    }

    /// Receives from a broadcast ring, where the message stays for the other readers.
    #[inline(always)]
    fn receive_broadcast(&self, ring: &Broadcast) -> Result<Option<Message<'_>>> {
        let reader = self.endpoint.reader();
        let taken = ring.take(
            reader,
            #[inline(always)]
            |entry, lines| self.inline(entry, lines),
            #[inline(always)]
            |entry, token| {
                let shared = self.shared_with_others(entry, token);
                shared.inspect_err(|_| ring.release(reader, token))
            },
            |Message { received, .. }, age, now| {
                let held = (!received.is_inline()).then_some((received.cell, received.owner));
                self.endpoint.receiving().count_age(age, now, held);
            },
        );
        taken.map_err(|error| match error {
            TakeError::Wild(wild) => self.corrupt(wild),
            TakeError::Holding => {
                Error::from(ErrorKind::HoldingTooMany { link: self.link(), limit: HOLDS_MAX })
            }
        })
    }

    /// Receives at most as many messages as the ring holds, as a fast writer must not keep the caller here.
    fn receive_batch_broadcast<'a>(
        &'a self,
        ring: &Broadcast,
        messages: &mut Vec<Message<'a>>,
        max: usize,
    ) -> Result<usize> {
        let max = max.min(self.ring_len() as usize);
        for taken in 0..max {
            match self.receive_broadcast(ring) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => return Ok(taken),
                // The next call reports it again.
                Err(error) if taken > 0 && matches!(error.kind(), ErrorKind::HoldingTooMany { .. }) => {
                    return Ok(taken);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(max)
    }

    /// A message in a MSG buffer that other readers receive, too.
    #[inline(always)]
    fn shared_with_others(
        &self,
        entry: RingEntry,
        token: ReadToken,
    ) -> std::result::Result<Message<'_>, WildWord> {
        let (cell, owner) = self.core().look_published(entry)?;
        let (descriptor, data) = self.core().read_descriptor(cell, owner)?;
        let bytes = self.endpoint.msg_pool().buffer(cell);
        let received = ReceivedParts { bytes, descriptor, owner: MsgOwner::of_token(token.0), cell, data };
        Ok(Message { link: self, received })
    }

    /// Receives from a ring with many consumers.
    #[inline(always)]
    fn open_shared(
        &self,
        entry: RingEntry,
        cell: EntryCell<'_>,
        word: u64,
    ) -> std::result::Result<Message<'_>, WildWord> {
        if entry.is_inline() { self.inline_cell(entry, word) } else { self.pooled(cell, word) }
    }

    /// A message in a MSG buffer of which this participant has just become the owner.
    #[inline(always)]
    pub(super) fn pooled(
        &self,
        cell: EntryCell<'_>,
        word: u64,
    ) -> std::result::Result<Message<'_>, WildWord> {
        let owner = MsgOwner(word).borrowed(self.endpoint.me.seat);
        match ReceivedParts::pooled(self.core(), cell, owner) {
            Ok(received) => Ok(Message { link: self, received }),
            Err(wild) => {
                self.endpoint.release(cell.index, owner, DataRef::NONE);
                Err(wild)
            }
        }
    }

    /// A message of this handle.
    #[inline(always)]
    pub(super) fn message(&self, received: ReceivedParts) -> Message<'_> {
        Message { link: self, received }
    }

    /// An inline message: copied, so that its lines are free at once.
    #[inline(always)]
    fn inline(&self, entry: RingEntry, lines: InlineLines<'_>) -> std::result::Result<Message<'_>, WildWord> {
        ReceivedParts::inline(0, entry, lines, &self.inline_buffers).map(|received| self.message(received))
    }

    /// An inline message in a cell of which this participant has just become the owner.
    #[inline(always)]
    pub(super) fn inline_cell(
        &self,
        entry: RingEntry,
        word: u64,
    ) -> std::result::Result<Message<'_>, WildWord> {
        let (cell, owner) = (entry.wild_cell(), MsgOwner(word).borrowed(self.endpoint.me.seat));
        let Some(lines) = self.core().inline_lines(cell) else {
            return Err(WildWord("an inline cell on a link that has none"));
        };
        let message = self.inline(entry, lines);
        self.endpoint.release_inline(cell, owner);
        message
    }
}

impl Link {
    /// Ends a message. By value: a message whose address is never taken can stay in registers.
    #[inline]
    fn end(&self, bytes: NonNull<u8>, owner: MsgOwner, cell: u32, data: DataRef) {
        if owner == INLINE {
            return self.inline_buffers.give_back(bytes);
        }
        if self.endpoint.holds_samples() {
            return self.end_counted(owner, cell, data);
        }
        self.release(owner, cell, data);
    }

    /// Ends a message in a buffer, and counts how long it was held if it is a sampled one.
    #[cold]
    #[inline(never)]
    fn end_counted(&self, owner: MsgOwner, cell: u32, data: DataRef) {
        if self.release(owner, cell, data) {
            self.endpoint.count_hold(cell, owner);
        }
    }

    /// Releases a message in a buffer. Returns `false` if this participant was evicted, and others have the buffers.
    #[inline(always)]
    fn release(&self, owner: MsgOwner, cell: u32, data: DataRef) -> bool {
        if let (Some(token), Ring::Broadcast(ring)) = (owner.token(), self.incoming()) {
            ring.release(self.endpoint.reader(), ReadToken(token));
            return true;
        }
        self.endpoint.release(cell, owner, data)
    }
}

impl<'a> Message<'a> {
    #[inline]
    fn msg_bytes(&self) -> (NonNull<u8>, u32) {
        self.received.msg()
    }

    #[inline]
    fn data_bytes(&self) -> (NonNull<u8>, u32) {
        self.received.data(self.link.core())
    }

    fn name(&self) -> &str {
        self.link.name()
    }

    pub(crate) fn link(&self) -> &'a Link {
        self.link
    }

    pub(crate) fn device_data(&self) -> Option<(PoolId, u32, u64)> {
        self.received.device_data(self.link.core())
    }
}

/// Accessors of both types of received messages.
macro_rules! readable {
    ($message:ty) => {
        impl $message {
            /// The message id, as the sender set it.
            #[must_use]
            #[inline]
            pub fn msg_id(&self) -> i32 {
                self.received.descriptor.msg_id
            }

            /// The id of the radio cell that the message is about, as the sender set it.
            #[must_use]
            #[inline]
            pub fn cell_id(&self) -> i32 {
                self.received.descriptor.cell_id
            }

            /// The MSG part, with the length that the sender set, or empty if it set none.
            #[must_use]
            #[inline]
            pub fn msg(&self) -> &[u8] {
                self.msg_shared().trusted()
            }

            /// The DATA part. Empty without one, and if it is in device memory: there,
            /// [`DevicePool`](crate::device::DevicePool) has its address.
            #[must_use]
            #[inline]
            pub fn data(&self) -> &[u8] {
                self.data_shared().trusted()
            }

            /// The MSG part, for a receiver that does not trust the other processes of the link.
            #[must_use]
            #[inline]
            pub fn msg_shared(&self) -> SharedBytes<'_> {
                SharedBytes::of(self, self.msg_bytes())
            }

            /// The DATA part, for a receiver that does not trust the other processes of the link. Empty where
            /// [`data`](Self::data) is.
            #[must_use]
            #[inline]
            pub fn data_shared(&self) -> SharedBytes<'_> {
                SharedBytes::of(self, self.data_bytes())
            }

            /// Number of bytes of the DATA part, wherever it is; 0 without one.
            #[must_use]
            #[inline]
            pub fn data_len(&self) -> usize {
                self.received.descriptor.data_len as usize
            }

            /// The pool of the DATA part; `None` without one.
            #[must_use]
            #[inline]
            pub fn data_pool(&self) -> Option<PoolId> {
                self.received.data.parts().map(|(pool, _)| pool)
            }

            /// Whether it was an inline message.
            #[must_use]
            #[inline]
            pub fn is_inline(&self) -> bool {
                self.received.is_inline()
            }
        }

        impl fmt::Debug for $message {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($message))
                    .field("link", &self.name())
                    .field("descriptor", &self.received.descriptor)
                    .field("data_pool", &self.data_pool())
                    .field("inline", &self.is_inline())
                    .finish()
            }
        }
    };
}
pub(super) use readable;

readable!(Message<'_>);

impl Drop for Message<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let ReceivedParts { bytes, owner, cell, data, .. } = self.received;
        self.link.end(bytes, owner, cell, data);
    }
}
