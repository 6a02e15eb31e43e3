//! Messages: what was received, until it is dropped.

use std::fmt;

use super::Link;
use super::core::{DataRef, Descriptor, unpack};
use crate::config::PoolId;
use crate::error::Result;
use crate::pool::owner::MsgOwner;
use crate::ring::entry::Entry;
use crate::ring::spsc::{InlineWords, Popped};
use crate::ring::{INLINE_MAX_BYTES, Ring, Wild};
use crate::sync::Ordering;

/// A received message. It holds its buffers until it is dropped; then they can be loaned again, by this handle first.
///
/// The other side can no longer write to the buffers by this library, but a process that breaks the rules can: check what
/// you read from it once you have copied it.
pub struct Message<'a> {
    link: &'a Link,
    body: Body,
    descriptor: Descriptor,
}

enum Body {
    Pooled { cell: u32, owner: MsgOwner, data: Option<DataRef> },
    Inline([u8; INLINE_MAX_BYTES]),
}

impl Link {
    /// Takes the oldest message; `None` when there is none. Never waits.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) when a peer wrote what it must not, after which the next message can be
    /// received; [`Error::RoleTaken`](crate::Error::RoleTaken); [`Error::Evicted`](crate::Error::Evicted).
    #[inline]
    pub fn receive(&self) -> Result<Option<Message<'_>>> {
        let mut received = None;
        self.receive_each(1, |message| received = Some(message))?;
        received.transpose()
    }

    /// Takes up to `max` messages, oldest first, and appends them to `messages`. Returns how many.
    ///
    /// # Errors
    /// As [`receive`](Self::receive). Messages that came before the one that is wrong are in `messages`.
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
    pub fn receive_batch<'a>(&'a self, messages: &mut Vec<Message<'a>>, max: usize) -> Result<usize> {
        let mut failed = None;
        let before = messages.len();
        self.receive_each(max, |message| match message {
            Ok(message) => messages.push(message),
            Err(error) => failed = failed.take().or(Some(error)),
        })?;
        failed.map_or(Ok(messages.len() - before), Err)
    }

    #[inline]
    fn receive_each<'a>(&'a self, max: usize, mut each: impl FnMut(Result<Message<'a>>)) -> Result<()> {
        self.check_seated()?;
        let receiving = self.core().receiving(self.me.seat);
        let taken = match self.incoming() {
            Ring::Spsc(ring) => ring.pop(self.consumer(ring)?, &receiving, max, |popped| match popped {
                Popped::Pooled(entry, word) => each(self.pooled(entry, word)),
                Popped::Inline(entry, words) => each(self.inline(entry, words)),
            }),
            Ring::Mpmc(ring) => ring.pop(&receiving, max, |entry, word| {
                if entry.is_inline() {
                    each(self.inline_cell(entry, word));
                } else {
                    each(self.pooled(entry, word));
                }
            }),
        };
        match taken {
            Ok(_) => Ok(()),
            Err(wild) => Err(self.corrupt(wild)),
        }
    }

    /// A message in a MSG buffer that was just made ours.
    #[inline]
    fn pooled(&self, entry: Entry, word: u64) -> Result<Message<'_>> {
        let (cell, owner) = (entry.wild_cell(), MsgOwner(word).borrowed(self.me.seat));
        match self.core().read_descriptor(cell, owner) {
            Ok((descriptor, data)) => {
                Ok(Message { link: self, body: Body::Pooled { cell, owner, data }, descriptor })
            }
            Err(wild) => {
                self.core().release(self.me.seat, &self.recents, cell, owner, None);
                Err(self.corrupt(wild))
            }
        }
    }

    #[inline]
    fn inline(&self, entry: Entry, words: InlineWords) -> Result<Message<'_>> {
        let Some(len) = entry.inline_len() else {
            return Err(self.corrupt(Wild("an inline message longer than its slot")));
        };
        let (msg_id, cell_id) = unpack(words[0]);
        let mut bytes = [0; INLINE_MAX_BYTES];
        for (chunk, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(&words[1..]) {
            *chunk = word.to_ne_bytes();
        }
        let msg_len = u32::try_from(len).unwrap_or(0);
        let descriptor = Descriptor { msg_id, cell_id, msg_len, data_len: 0 };
        Ok(Message { link: self, body: Body::Inline(bytes), descriptor })
    }

    /// An inline message in a cell that was just made ours: copied, so that the cell is free again at once.
    fn inline_cell(&self, entry: Entry, word: u64) -> Result<Message<'_>> {
        let (cell, owner) = (entry.wild_cell(), MsgOwner(word).borrowed(self.me.seat));
        let Some(table) = self.core().inline() else {
            return Err(self.corrupt(Wild("an inline cell on a link that has none")));
        };
        let line = table.cell(cell);
        let words = std::array::from_fn(|i| line.word(i + 1).load(Ordering::Relaxed));
        table.release(self.me.seat, &self.recents[super::core::INLINE], cell, owner.0, owner.freed().0);
        self.inline(entry, words)
    }
}

impl Message<'_> {
    /// The message's id, as the sender set it.
    #[must_use]
    #[inline]
    pub fn msg_id(&self) -> i32 {
        self.descriptor.msg_id
    }

    /// The id of the cell that it is about, as the sender set it.
    #[must_use]
    #[inline]
    pub fn cell_id(&self) -> i32 {
        self.descriptor.cell_id
    }

    /// The MSG part.
    #[must_use]
    #[inline]
    pub fn msg(&self) -> &[u8] {
        let len = self.descriptor.msg_len as usize;
        match &self.body {
            Body::Pooled { cell, .. } => bytes(self, self.link.core().msg().buffer(*cell), len),
            Body::Inline(bytes) => &bytes[..len.min(INLINE_MAX_BYTES)],
        }
    }

    /// The DATA part; empty when there is none.
    #[must_use]
    #[inline]
    pub fn data(&self) -> &[u8] {
        let Body::Pooled { data: Some(data), .. } = &self.body else { return &[] };
        match self.link.core().pool(data.pool) {
            Some(pool) => bytes(self, pool.buffer(data.index), self.descriptor.data_len as usize),
            None => &[],
        }
    }

    /// The pool of the DATA part; `None` when there is none.
    #[must_use]
    #[inline]
    pub fn data_pool(&self) -> Option<PoolId> {
        match &self.body {
            Body::Pooled { data, .. } => data.map(|data| data.pool),
            Body::Inline(_) => None,
        }
    }

    /// Whether it came inside the ring's slot.
    #[must_use]
    pub fn is_inline(&self) -> bool {
        matches!(self.body, Body::Inline(_))
    }
}

impl Drop for Message<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Body::Pooled { cell, owner, data } = self.body {
            // Refused only if this participant was evicted, and then others have the buffers.
            let _ = self.link.core().release(self.link.me.seat, &self.link.recents, cell, owner, data);
        }
    }
}

impl fmt::Debug for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("link", &self.link.name())
            .field("descriptor", &self.descriptor)
            .field("data_pool", &self.data_pool())
            .field("inline", &self.is_inline())
            .finish()
    }
}

// UNSAFETY: hands out the bytes of a received buffer.
#[expect(unsafe_code, reason = "the bytes of a buffer that this message holds")]
#[inline]
fn bytes<'b>(_message: &'b Message<'_>, start: std::ptr::NonNull<u8>, len: usize) -> &'b [u8] {
    // SAFETY: `read_descriptor` checked `len` against the size of the buffer, which lies in memory that the link keeps
    // mapped. The owner word gives the buffer to this message until it is dropped, and bytes are valid whatever they hold.
    unsafe { std::slice::from_raw_parts(start.as_ptr(), len) }
}
