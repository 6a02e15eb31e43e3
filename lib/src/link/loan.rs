//! Loans: messages being written, and sending them.

use std::fmt;
use std::ptr::NonNull;

use super::Link;
use super::core::{DataRef, pack};
use crate::config::PoolId;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::owner::MsgOwner;
use crate::ring::broadcast::{Broadcast, Writer};
use crate::ring::entry::RingEntry;
use crate::ring::mpmc::PushError;
use crate::ring::{INLINE_MAX_BYTES, Ring, RingFull};
use crate::segment::prefetch_exclusive_at;

/// A message being written: a MSG buffer, and optionally a DATA buffer, that no other participant has.
///
/// [`send`](Self::send) makes it visible to the other side. If it is dropped without being sent, its buffers return to
/// their pools. Buffers are not cleared: they have the content of their last use.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// let loan = mac.loan()?;
/// let index = loan.index();
/// drop(loan); // not sent
/// assert!(!phy.has_message());
/// assert_eq!(mac.loan()?.index(), index, "the buffer was free again");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a loan that is dropped is not sent"]
pub struct Loan<'a> {
    pub(super) link: &'a Link,
    pub(super) cell: u32,
    pub(super) owner: MsgOwner,
    pub(super) data: DataRef,
}

/// The error of a message that was not sent, together with the message.
///
/// `?` keeps the error and drops the message, in functions that return [`shmesh::Error`](Error) or `Box<dyn std::error::Error>`. A
/// `SendError` borrows from the link, so `anyhow` and the like take it as `loan.send().map_err(shmesh::Error::from)?`.
///
/// With [`Evicted`](crate::ErrorKind::Evicted), the message may have been sent nevertheless, and the loan is empty: drop
/// it.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::{ErrorKind, SendError};
/// config.ring_len = 1;
/// # let phy = options.create(&config)?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// mac.loan()?.send()?;
/// let SendError { loan, error } = mac.loan()?.send().unwrap_err();
/// assert!(matches!(error.kind(), ErrorKind::Full { len: 1, .. }));
/// drop(phy.receive()?); // now there is a slot
/// loan.send()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
// Not a `std::error::Error`: a borrowing error fits into no boxed error, and the conversion below would not be possible.
#[derive(Debug)]
pub struct SendError<'a> {
    /// The message, to be sent again or dropped.
    pub loan: Loan<'a>,
    /// The reason why it was not sent.
    pub error: Error,
}

impl fmt::Display for SendError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl From<SendError<'_>> for Error {
    fn from(failed: SendError<'_>) -> Self {
        failed.error
    }
}

impl<'b> From<SendError<'_>> for Box<dyn std::error::Error + 'b> {
    fn from(failed: SendError<'_>) -> Self {
        failed.error.into()
    }
}

impl<'b> From<SendError<'_>> for Box<dyn std::error::Error + Send + Sync + 'b> {
    fn from(failed: SendError<'_>) -> Self {
        failed.error.into()
    }
}

impl Link {
    /// Loans a MSG buffer: the one that this handle released last, if it is free.
    ///
    /// Never waits. Ids and lengths are 0; the bytes are left from the buffer's last use.
    ///
    /// # Errors
    /// [`Exhausted`](crate::ErrorKind::Exhausted) if all buffers are in use; [`Evicted`](crate::ErrorKind::Evicted).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// use shmesh::{ErrorKind, config::PoolId};
    /// config.pools[PoolId::CpuMsg.index()].pool_len = 1;
    /// # let link = options.create(&config)?;
    /// let only = link.loan()?;
    /// assert!(matches!(link.loan().unwrap_err().kind(), ErrorKind::Exhausted { len: 1, .. }));
    /// drop(only);
    /// assert!(link.loan().is_ok());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline(always)]
    pub fn loan(&self) -> Result<Loan<'_>> {
        self.loan_msg()?.ok_or_else(|| self.exhausted(PoolId::CpuMsg))
    }

    /// `None` if all MSG buffers are in use.
    #[inline(always)]
    fn loan_msg(&self) -> Result<Option<Loan<'_>>> {
        self.check_seated()?;
        let (cell, owner) = match self.endpoint.loan_msg() {
            Some(loaned) => loaned,
            None => match self.loan_after_freeing(|| self.endpoint.loan_msg())? {
                Some(loaned) => loaned,
                None => return Ok(None),
            },
        };
        // The receiver was the last to access this line. Prefetched now, it arrives while the caller prepares its data.
        prefetch_exclusive_at(self.endpoint.msg_pool().buffer(cell).as_ptr());
        self.endpoint.cell(cell).clear();
        Ok(Some(Loan { link: self, cell, owner, data: DataRef::NONE }))
    }

    /// Loans a MSG buffer with a DATA buffer of `pool`.
    ///
    /// # Errors
    /// [`NoPool`](crate::ErrorKind::NoPool) when the link does not have the pool; [`MsgPool`](crate::ErrorKind::MsgPool); else as [`loan`](Self::loan).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::config::PoolId;
    /// let mut loan = link.loan_with(PoolId::CpuData)?;
    /// loan.resize_msg(2)?.copy_from_slice(b"TX");
    /// loan.resize_data(4096)?.fill(0xa5);
    /// loan.send()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn loan_with(&self, pool: PoolId) -> Result<Loan<'_>> {
        if pool == PoolId::CpuMsg {
            return Err(Error::from(ErrorKind::MsgPool { link: self.link() }));
        }
        let mut loan = self.loan()?;
        if self.attach_data(&mut loan, pool)? { Ok(loan) } else { Err(self.exhausted(pool)) }
    }

    /// Attaches a DATA buffer to a loan. Returns `false` if all are in use.
    #[inline]
    fn attach_data(&self, loan: &mut Loan<'_>, pool: PoolId) -> Result<bool> {
        let data = || self.endpoint.loan_data(pool, loan.cell, loan.owner);
        let index = match data() {
            Some(index) => index,
            None if self.pool(pool).is_some() => match self.loan_after_freeing(data)? {
                Some(index) => index,
                None => return Ok(false),
            },
            None => return Err(self.exhausted(pool)),
        };
        loan.data = DataRef::new(pool, index);
        self.endpoint.cell(loan.cell).set_data(loan.data);
        Ok(true)
    }

    /// As [`loan`](Self::loan), or [`loan_with`](Self::loan_with) the pool `data`. The inner error is the pool whose buffers
    /// are all in use: for callers that poll, because [`Exhausted`](crate::ErrorKind::Exhausted) costs as much as the search
    /// for a buffer.
    ///
    /// # Errors
    /// As of the two, except `Exhausted`.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// use shmesh::config::PoolId;
    /// config.pools[PoolId::CpuData.index()].pool_len = 1;
    /// # let link = options.create(&config)?;
    /// let only = link.try_loan(Some(PoolId::CpuData))?;
    /// assert!(only.is_ok());
    /// assert_eq!(link.try_loan(Some(PoolId::CpuData))?.err(), Some(PoolId::CpuData));
    /// assert!(link.try_loan(None)?.is_ok(), "there are more MSG buffers");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline(always)]
    pub fn try_loan(&self, data: Option<PoolId>) -> Result<std::result::Result<Loan<'_>, PoolId>> {
        if data == Some(PoolId::CpuMsg) {
            return Err(Error::from(ErrorKind::MsgPool { link: self.link() }));
        }
        match (self.loan_msg()?, data) {
            (None, _) => Ok(Err(PoolId::CpuMsg)),
            (Some(loan), None) => Ok(Ok(loan)),
            (Some(loan), Some(pool)) => self.try_with_data(loan, pool),
        }
    }

    /// By value: a loan without DATA, whose address is never taken, stays in registers.
    #[inline(never)]
    fn try_with_data<'a>(
        &self,
        mut loan: Loan<'a>,
        pool: PoolId,
    ) -> Result<std::result::Result<Loan<'a>, PoolId>> {
        Ok(if self.attach_data(&mut loan, pool)? { Ok(loan) } else { Err(pool) })
    }

    /// The index of the MSG buffer that begins at `address`; `None` if none does. Says nothing about who holds it.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let (_other, mut loan) = (link.loan()?, link.loan()?);
    /// let (index, start) = (loan.index(), loan.msg_start());
    /// assert_eq!(link.msg_index_of(start.as_ptr()), Some(index));
    /// assert_eq!(link.msg_index_of(start.as_ptr().wrapping_add(1)), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    #[inline]
    pub fn msg_index_of(&self, address: *const u8) -> Option<u32> {
        self.endpoint.msg_pool().bytes.index_of(address)
    }

    /// Sends up to [`INLINE_MAX_BYTES`] inside the ring's slot, without a pool: 48 bytes cross with one cache line, more
    /// with two.
    ///
    /// # Errors
    /// [`InlineTooLong`](crate::ErrorKind::InlineTooLong); [`Full`](crate::ErrorKind::Full); [`InlineExhausted`](crate::ErrorKind::InlineExhausted); [`RoleTaken`](crate::ErrorKind::RoleTaken); [`Evicted`](crate::ErrorKind::Evicted).
    #[inline(always)]
    pub fn send_inline(&self, msg_id: i32, cell_id: i32, msg: &[u8]) -> Result<()> {
        if msg.len() > INLINE_MAX_BYTES {
            return Err(Error::from(ErrorKind::InlineTooLong { link: self.link(), len: msg.len() }));
        }
        self.check_seated()?;
        let ids = pack(msg_id, cell_id);
        match self.outgoing() {
            Ring::Spsc(ring) => {
                let producer = self.producer(ring)?;
                ring.push_inline(producer, ids, msg).map_err(|RingFull| self.full())
            }
            Ring::Mpmc(ring) => {
                let Some((cell, owner)) = self.endpoint.loan_inline() else {
                    return Err(self.lease.inline_exhausted());
                };
                if let Some(lines) = self.core().inline_lines(cell) {
                    lines.write(ids, msg);
                }
                let entry = RingEntry::inline_cell(cell, owner.epoch(), msg.len());
                ring.push(&self.endpoint.shared_producer, entry).map_err(|error| {
                    self.endpoint.release_inline(cell, owner);
                    self.push_error(error)
                })?;
                self.check_not_overtaken()
            }
            Ring::Broadcast(ring) => {
                let writer = self.writer(ring)?;
                self.until_room(ring, writer, || self.endpoint.broadcast_inline(ring, writer, ids, msg))
            }
        }
    }

    /// Sends on a broadcast ring. If it is full, evicts readers that have blocked the writer for too long.
    #[inline(always)]
    fn until_room(
        &self,
        ring: &Broadcast,
        writer: &Writer,
        mut send: impl FnMut() -> std::result::Result<(), RingFull>,
    ) -> Result<()> {
        while let Err(RingFull) = send() {
            if !self.evict_slow(ring, writer)? {
                return Err(self.full());
            }
        }
        Ok(())
    }

    /// Sends loans in order, and stops at the first that cannot be sent. That one and the rest stay in `loans`.
    ///
    /// Returns the number of messages sent. One [`notify`](Self::notify) after a batch is enough.
    ///
    /// # Errors
    /// The error of the first loan, if it could not be sent. A later loan that could not be sent just stays in `loans`.
    /// [`ForeignLoan`](crate::ErrorKind::ForeignLoan) if a loan belongs to another handle: then none was sent.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let mut loans = Vec::new();
    /// for i in 0..10 {
    ///     let mut loan = link.loan()?;
    ///     loan.resize_msg(1)?[0] = i;
    ///     loans.push(loan);
    /// }
    /// assert_eq!(link.send_batch(&mut loans)?, 10);
    /// assert!(loans.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn send_batch<'a>(&'a self, loans: &mut Vec<Loan<'a>>) -> Result<usize> {
        if loans.iter().any(|loan| !std::ptr::eq(loan.link, self)) {
            return Err(Error::from(ErrorKind::ForeignLoan { link: self.link() }));
        }
        let mut sent = 0;
        let mut failed = None;
        // `drain` would drop the rest after a failure.
        let mut rest = std::mem::take(loans).into_iter();
        for loan in rest.by_ref() {
            match loan.send() {
                Ok(()) => sent += 1,
                Err(SendError { loan, error }) => {
                    loans.push(loan);
                    failed = Some(error);
                    break;
                }
            }
        }
        loans.extend(rest);
        match failed {
            Some(error) if sent == 0 => Err(error),
            _ => Ok(sent),
        }
    }

    /// FENCE: after a message was sent on a ring with many producers.
    #[inline(always)]
    pub(super) fn check_not_overtaken(&self) -> Result<()> {
        if self.endpoint.is_current() { Ok(()) } else { Err(self.lease.overtaken()) }
    }

    /// Ends a loan. By value: a loan whose address is never taken can stay in registers.
    #[inline(never)]
    fn take_back_loan(&self, cell: u32, owner: MsgOwner, data: DataRef) {
        // Fails only if this participant was evicted, and then others have the buffers.
        let _ = self.endpoint.release(cell, owner, data);
    }

    #[cold]
    fn full(&self) -> Error {
        Error::from(ErrorKind::Full { link: self.link(), len: self.ring_len() })
    }

    #[cold]
    pub(super) fn push_error(&self, error: PushError) -> Error {
        match error {
            PushError::Full => self.full(),
            PushError::Wild(wild) => self.corrupt(wild),
        }
    }
}

impl<'a> Loan<'a> {
    /// Sets the length of the MSG part in bytes, and returns the bytes to write.
    ///
    /// They have the content of the buffer's last use, or what was written before. The last successful call counts; without
    /// one, the MSG part is empty.
    ///
    /// # Errors
    /// [`TooLong`](crate::ErrorKind::TooLong) when the buffer is smaller; [`Evicted`](crate::ErrorKind::Evicted).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// let mut loan = mac.loan()?;
    /// loan.resize_msg(5)?.copy_from_slice(b"hello");
    /// assert!(loan.resize_msg(8193).is_err(), "the buffers have 8192 bytes");
    /// loan.send()?;
    /// assert_eq!(phy.receive()?.expect("it was just sent").msg(), b"hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline(always)]
    pub fn resize_msg(&mut self, len: usize) -> Result<&mut [u8]> {
        self.link.check_seated()?;
        let pool = self.link.endpoint.msg_pool();
        let fits = self.link.fits(PoolId::CpuMsg, pool.buf_size(), len)?;
        self.link.endpoint.cell(self.cell).set_msg_len(fits);
        Ok(bytes_mut(self, pool.buffer(self.cell), len))
    }

    /// The first byte of the MSG buffer. It may be written as long as the loan lives and is not lent otherwise.
    #[must_use]
    #[inline]
    pub fn msg_start(&mut self) -> NonNull<u8> {
        self.link.endpoint.msg_pool().buffer(self.cell)
    }

    /// Sets all fields of a message whose bytes are written already: faster than the methods for each. Without a DATA part,
    /// `data_len` is ignored.
    ///
    /// # Errors
    /// As [`resize_msg`](Self::resize_msg) and [`resize_data`](Self::resize_data); then no field has changed.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// let mut loan = mac.loan()?;
    /// loan.resize_msg(64)?.fill(7);
    /// loan.describe(1, 2, 3, 0)?;
    /// assert!(loan.describe(1, 2, 8193, 0).is_err(), "the buffers have 8192 bytes");
    /// loan.send()?;
    /// let message = phy.receive()?.expect("it was just sent");
    /// assert_eq!((message.msg_id(), message.cell_id(), message.msg()), (1, 2, &[7; 3][..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline(always)]
    pub fn describe(&mut self, msg_id: i32, cell_id: i32, msg_len: usize, data_len: usize) -> Result<()> {
        let link = self.link;
        link.check_seated()?;
        let msg_len = link.fits(PoolId::CpuMsg, link.endpoint.msg_pool().buf_size(), msg_len)?;
        let data_len = match self.data.parts() {
            None => 0,
            Some((pool, _)) => {
                let Some(bytes) = link.core().pool(pool) else { return Err(link.beyond_the_cpu(pool)) };
                link.fits(pool, bytes.buf_size(), data_len)?
            }
        };
        link.endpoint.cell(self.cell).describe(pack(msg_id, cell_id), (msg_len, data_len));
        Ok(())
    }

    /// Sets the length of the DATA part in bytes, and returns the bytes to write. The last successful call counts.
    ///
    /// # Errors
    /// [`TooLong`](crate::ErrorKind::TooLong) when the buffer is smaller; [`NoDataPart`](crate::ErrorKind::NoDataPart) when the loan
    /// has none, whatever `len` is; [`OnDevice`](crate::ErrorKind::OnDevice) when it is in device memory, whatever `len` is;
    /// [`Evicted`](crate::ErrorKind::Evicted).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use shmesh::config::PoolId;
    /// let mut loan = mac.loan_with(PoolId::CpuData)?;
    /// loan.resize_data(3)?.copy_from_slice(&[1, 2, 3]);
    /// loan.send()?;
    /// assert_eq!(phy.receive()?.expect("it was just sent").data(), [1, 2, 3]);
    /// assert!(mac.loan()?.resize_data(0).is_err(), "a loan without DATA has nothing to write");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn resize_data(&mut self, len: usize) -> Result<&mut [u8]> {
        self.link.check_seated()?;
        let Some((pool, index)) = self.data.parts() else {
            return Err(Error::from(ErrorKind::NoDataPart { link: self.link.link() }));
        };
        let Some(bytes) = self.link.core().pool(pool) else { return Err(self.link.beyond_the_cpu(pool)) };
        let fits = self.link.fits(pool, bytes.buf_size(), len)?;
        self.link.endpoint.cell(self.cell).set_data_len(fits);
        Ok(bytes_mut(self, bytes.buffer(index), len))
    }

    /// As [`resize_data`](Self::resize_data), for a DATA part in the device memory `memory`. Returns its pool and index.
    pub(crate) fn set_device_data(&mut self, len: usize, memory: u64) -> Result<(PoolId, u32)> {
        self.link.check_seated()?;
        let Some((pool, index)) = self.data.parts() else {
            return Err(Error::from(ErrorKind::NoDataPart { link: self.link.link() }));
        };
        let limit = self.link.core().data_table(pool).map_or(0, |(_, buf_size)| buf_size);
        let fits = self.link.fits(pool, limit, len)?;
        let cell = self.link.endpoint.cell(self.cell);
        cell.set_data_len(fits);
        cell.set_memory(memory);
        Ok((pool, index))
    }

    pub(crate) fn link(&self) -> &'a Link {
        self.link
    }

    /// The lengths of both parts, 0 if not set.
    pub(super) fn set_lengths(&self) -> (usize, usize) {
        let (descriptor, _) = self.link.core().peek_descriptor(self.cell);
        (descriptor.msg_len as usize, descriptor.data_len as usize)
    }

    /// The index of the MSG buffer, and its owner word.
    pub(super) fn msg(&self) -> (u32, MsgOwner) {
        (self.cell, self.owner)
    }

    /// Sets the message id, as the application defines it.
    ///
    /// The default is 0.
    #[inline]
    pub fn with_msg_id(self, msg_id: i32) -> Self {
        // If the participant was evicted, the message is no longer its own. Sending it will report that.
        if self.link.endpoint.is_current() {
            self.link.endpoint.cell(self.cell).set_msg_id(msg_id);
        }
        self
    }

    /// Sets the id of the radio cell that the message is about, as the application defines it.
    ///
    /// The default is 0.
    #[inline]
    pub fn with_cell_id(self, cell_id: i32) -> Self {
        if self.link.endpoint.is_current() {
            self.link.endpoint.cell(self.cell).set_cell_id(cell_id);
        }
        self
    }

    /// The pool of the DATA part; `None` without a DATA part.
    #[must_use]
    pub fn data_pool(&self) -> Option<PoolId> {
        self.data.parts().map(|(pool, _)| pool)
    }

    /// Index of the MSG buffer in its pool, as in `shmesh dump`.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.cell
    }

    /// Makes the message visible to the other side. Does not wake a sleeping receiver: see [`Link::notify`].
    ///
    /// Messages of one handle are received in the order in which it sent them, inline messages included. The receiver sees
    /// everything that was written to the buffers before.
    ///
    /// # Errors
    /// A message that was not sent is in the [`SendError`]: [`Full`](crate::ErrorKind::Full),
    /// [`RoleTaken`](crate::ErrorKind::RoleTaken). [`Evicted`](crate::ErrorKind::Evicted): this participant was declared
    /// dead. It is not known whether the message was sent or recovered.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// # config.ring_len = 2;
    /// # let phy = options.create(&config)?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// mac.loan()?.with_msg_id(1).send()?;
    /// mac.loan()?.with_msg_id(2).send()?;
    /// let mut third = mac.loan()?.with_msg_id(3);
    /// while let Err(failed) = third.send() {
    ///     assert!(failed.error.is_retryable(), "{failed}");
    ///     assert_eq!(phy.receive()?.expect("the ring is full").msg_id(), 1, "the oldest first");
    ///     third = failed.loan;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline(always)]
    pub fn send(mut self) -> std::result::Result<(), SendError<'a>> {
        match self.push() {
            Ok(()) => {
                // The buffers belong to the receiver now.
                std::mem::forget(self);
                Ok(())
            }
            Err(error) => Err(SendError { loan: self, error }),
        }
    }

    /// Publishes the message. After `Ok` the loan no longer holds anything, and must be forgotten.
    #[inline(always)]
    fn push(&mut self) -> Result<()> {
        let link = self.link;
        link.check_seated()?;
        let entry = RingEntry::pooled(self.cell, self.owner.epoch());
        match link.outgoing() {
            Ring::Spsc(ring) => {
                let producer = link.producer(ring)?;
                ring.push(producer, entry).map_err(|RingFull| link.full())
            }
            Ring::Mpmc(ring) => {
                ring.push(&link.endpoint.shared_producer, entry).map_err(|error| link.push_error(error))?;
                // FENCE: a participant that was evicted before the message was sent cannot know whether it is delivered.
                link.check_not_overtaken().inspect_err(|_| self.give_up())
            }
            Ring::Broadcast(ring) => {
                let writer = link.writer(ring)?;
                let message = (self.cell, self.owner, self.data);
                link.until_room(ring, writer, || link.endpoint.broadcast(ring, writer, message))
            }
        }
    }

    /// Gives up buffers that other participants may have by now.
    #[cold]
    pub(super) fn give_up(&mut self) {
        self.owner = MsgOwner::NONE;
        self.data = DataRef::NONE;
    }
}

impl Link {
    #[inline(always)]
    fn fits(&self, pool: PoolId, limit: u32, len: usize) -> Result<u32> {
        match u32::try_from(len) {
            Ok(fits) if fits <= limit => Ok(fits),
            _ => Err(self.too_long(pool, len, limit)),
        }
    }

    #[cold]
    fn beyond_the_cpu(&self, pool: PoolId) -> Error {
        Error::from(ErrorKind::OnDevice { link: self.link(), pool })
    }

    #[cold]
    fn too_long(&self, pool: PoolId, len: usize, limit: u32) -> Error {
        Error::from(ErrorKind::TooLong { link: self.link(), pool, len, limit })
    }
}

impl Drop for Loan<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.link.take_back_loan(self.cell, self.owner, self.data);
    }
}

impl fmt::Debug for Loan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan")
            .field("link", &self.link.name())
            .field("index", &self.cell)
            .field("data", &self.data.parts())
            .finish()
    }
}

#[expect(unsafe_code, reason = "the bytes of a buffer that this loan holds exclusively")]
#[inline]
fn bytes_mut<'b>(_loan: &'b mut Loan<'_>, start: NonNull<u8>, len: usize) -> &'b mut [u8] {
    // SAFETY: `fits` checked `len` against the size of the buffer, which lies in memory that the link keeps mapped. The
    // owner word gives the buffer to this loan alone, the borrow of the loan makes the slice unique in this process, and
    // any bytes are valid.
    unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) }
}
