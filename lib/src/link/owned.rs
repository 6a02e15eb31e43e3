//! Messages and loans that do not borrow from their link.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

#[cfg(feature = "typed")]
use super::core::Cell;
use super::core::DataRef;
use super::inline_buffers;
use super::lease::SeatLease;
use super::loan::Loan;
use super::message::{Message, ReceivedParts, readable};
use super::{Link, SharedBytes};
use crate::config::PoolId;
use crate::error::{Error, ErrorKind, Result};
#[cfg(feature = "typed")]
use crate::pool::owner::DataOwner;
use crate::pool::owner::MsgOwner;
use crate::ring::Ring;
use crate::ring::broadcast::ReadToken;
use crate::sync::LINE_BYTES;

/// A received message that does not borrow from its link. It can be kept next to the [`Link`] in a struct, moved to another
/// thread, and held across an `.await`.
///
/// Its buffers are released when it is dropped, in any thread. It keeps the link's memory mapped, and the seat of the
/// handle that received it taken: peers see that participant detach when the handle and the last of its owned messages are
/// gone.
///
/// A handle that is [evicted](Link::evict) loses its buffers: on a broadcast link with `slow: evict`, the writer may
/// overwrite them while an owned message of an evicted reader is being read. Receive or wait with the handle to find out.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// let mut loan = mac.loan()?;
/// loan.resize_msg(5)?.copy_from_slice(b"hello");
/// loan.with_msg_id(7).send()?;
///
/// let message = phy.receive()?.expect("it was just sent").into_owned();
/// drop(phy); // the message stays as it is
/// let worker = std::thread::spawn(move || (message.msg_id(), message.msg().to_vec()));
/// assert_eq!(worker.join().expect("it does not panic"), (7, b"hello".to_vec()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct OwnedMessage {
    received: ReceivedParts,
    /// MSG and DATA, if they could not keep their buffers.
    copy: Option<AlignedCopy>,
    /// When it was received, in nanoseconds, if it is a sampled one; otherwise 0.
    since: u64,
    lease: Arc<SeatLease>,
}

#[expect(unsafe_code, reason = "pointers into memory that the lease keeps, held by this message alone")]
mod message_threads {
    // SAFETY: the owner word, or the cursor or hold of its reader, keeps the buffers for this message, and an inline message
    // has its bytes in an allocation of its own. Releasing them changes words in shared memory, and what `OwnedReads` keeps
    // under a lock; it uses nothing that belongs to the thread of the link's handle.
    unsafe impl Send for super::OwnedMessage {}
    // SAFETY: through a reference the bytes are only read.
    unsafe impl Sync for super::OwnedMessage {}
}

impl Message<'_> {
    /// Makes the message independent of the link's handle. Copies nothing, with one exception: on a broadcast link with
    /// `slow: skip`, where a reader can hold six messages in buffers, the sixth is copied, so that the handle can still
    /// receive. If its DATA part is in device memory, it keeps its buffers like the others.
    ///
    /// On a broadcast link, a message counts as unread until it is dropped, owned or not.
    #[must_use]
    pub fn into_owned(self) -> OwnedMessage {
        let (link, received) = (self.link(), self.received);
        let lease = Arc::clone(&link.lease);
        if let (Some(token), Ring::Broadcast(ring)) = (received.owner.token(), link.incoming()) {
            let (reader, token) = (link.endpoint.reader(), ReadToken(token));
            if received.data.parts().is_some_and(|(pool, _)| link.core().pool(pool).is_none()) {
                ring.own_hold(reader, token);
            } else if !ring.own(reader, token) {
                let copy = Some(AlignedCopy::of(self.msg(), self.data()));
                return OwnedMessage { received, copy, since: 0, lease };
            }
        }
        let _kept = ManuallyDrop::new(self);
        let since =
            if received.is_inline() { 0 } else { link.endpoint.sampled_since(received.cell, received.owner) };
        OwnedMessage { received, copy: None, since, lease }
    }
}

/// A copy of MSG and DATA. Each is aligned as in a buffer.
struct AlignedCopy {
    bytes: Box<[u8]>,
    msg: Range<usize>,
    data: Range<usize>,
}

impl AlignedCopy {
    fn of(msg: &[u8], data: &[u8]) -> Self {
        let mut bytes = vec![0; 2 * LINE_BYTES + msg.len() + data.len()].into_boxed_slice();
        // The allocation does not move.
        let start = bytes.as_ptr().addr().wrapping_neg() % LINE_BYTES;
        let msg_end = start + msg.len();
        let data_start = start + msg.len().next_multiple_of(LINE_BYTES);
        let (msg_at, data_at) = (start..msg_end, data_start..data_start + data.len());
        bytes[msg_at.clone()].copy_from_slice(msg);
        bytes[data_at.clone()].copy_from_slice(data);
        Self { bytes, msg: msg_at, data: data_at }
    }

    fn msg(&self) -> &[u8] {
        &self.bytes[self.msg.clone()]
    }

    fn data(&self) -> &[u8] {
        &self.bytes[self.data.clone()]
    }
}

/// The bytes of a part, whose length in a message is 32 bits.
fn part(bytes: &[u8]) -> (NonNull<u8>, u32) {
    (NonNull::from(bytes).cast(), u32::try_from(bytes.len()).unwrap_or(0))
}

impl OwnedMessage {
    /// Creates a reply that the participant of `lease` has received.
    pub(super) fn new(received: ReceivedParts, lease: &Arc<SeatLease>) -> Self {
        Self { received, copy: None, since: 0, lease: Arc::clone(lease) }
    }

    pub(super) fn lease(&self) -> &Arc<SeatLease> {
        &self.lease
    }

    #[inline]
    fn msg_bytes(&self) -> (NonNull<u8>, u32) {
        self.copy.as_ref().map_or_else(|| self.received.msg(), |copy| part(copy.msg()))
    }

    #[inline]
    fn data_bytes(&self) -> (NonNull<u8>, u32) {
        let received = || self.received.data(self.lease.core());
        self.copy.as_ref().map_or_else(received, |copy| part(copy.data()))
    }

    fn name(&self) -> &str {
        &self.lease.shared.store.link
    }

    pub(crate) fn device_data(&self) -> Option<(PoolId, u32, u64)> {
        self.received.device_data(self.lease.core())
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.lease.shared.epoch()
    }
}

readable!(OwnedMessage);

impl Drop for OwnedMessage {
    fn drop(&mut self) {
        let ReceivedParts { bytes, owner, cell, data, .. } = self.received;
        if self.received.is_inline() {
            inline_buffers::free(bytes);
        } else if self.copy.is_none() {
            if self.since > 0 {
                self.lease.count_hold(self.since);
            }
            self.lease.release(cell, owner, data);
        }
    }
}

/// A message being written that does not borrow from its link, so that another thread can write it.
///
/// Its lengths are those that [`resize_msg`](Loan::resize_msg) and [`resize_data`](Loan::resize_data) have set. To send it,
/// its handle takes it back with [`Link::adopt`]. If it is dropped without being sent, in any thread, its buffers return to
/// their pools. Like an [`OwnedMessage`] it keeps the memory mapped and the seat taken.
///
/// A handle that is [evicted](Link::evict) loses its loans. An owned loan reports that only when it is adopted; writes to
/// it in between may overwrite the bytes of another participant.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// let mut loan = mac.loan()?;
/// loan.resize_msg(5)?;
/// let mut loan = loan.into_owned();
/// let worker = std::thread::spawn(move || {
///     loan.msg_mut().copy_from_slice(b"hello");
///     loan
/// });
/// mac.adopt(worker.join().expect("it does not panic"))?.send()?;
/// assert_eq!(phy.receive()?.expect("it was just sent").msg(), b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a loan that is dropped is not sent"]
pub struct OwnedLoan {
    cell: u32,
    owner: MsgOwner,
    buffer: DataRef,
    msg: OwnedPart,
    data: OwnedPart,
    lease: Arc<SeatLease>,
}

/// Address and length of some bytes of a buffer.
#[derive(Clone, Copy)]
struct OwnedPart(NonNull<u8>, usize);

impl OwnedPart {
    fn of(bytes: &mut [u8]) -> Self {
        Self(NonNull::from(&mut *bytes).cast(), bytes.len())
    }

    fn bytes(self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.0, self.1)
    }
}

#[expect(unsafe_code, reason = "pointers into memory that the lease keeps, held by this loan alone")]
mod loan_threads {
    // SAFETY: the owner words give the buffers to this loan, and releasing them only exchanges words in shared memory.
    unsafe impl Send for super::OwnedLoan {}
    // SAFETY: a shared reference gives no access to the bytes.
    unsafe impl Sync for super::OwnedLoan {}
}

impl Loan<'_> {
    /// Makes the loan independent of the link's handle, with the lengths that are set.
    pub fn into_owned(mut self) -> OwnedLoan {
        let (msg, data) = self.set_lengths();
        let msg = self.resize_msg(msg).map_or(OwnedPart(NonNull::dangling(), 0), OwnedPart::of);
        // Without a DATA part, or with one in device memory, there are no bytes to write.
        let data = self.resize_data(data).map_or(OwnedPart(NonNull::dangling(), 0), OwnedPart::of);
        let lease = Arc::clone(&self.link().lease);
        let held = ManuallyDrop::new(self);
        OwnedLoan { cell: held.cell, owner: held.owner, buffer: held.data, msg, data, lease }
    }
}

#[expect(unsafe_code, reason = "the bytes of buffers that this loan holds exclusively")]
fn bytes_mut(_loan: &mut OwnedLoan, OwnedPart(start, len): OwnedPart) -> &mut [u8] {
    // SAFETY: `resize_msg` or `resize_data` returned these bytes to the original loan, and the lease keeps them mapped.
    unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) }
}

impl OwnedLoan {
    /// Loans a buffer of `pool` with `len` bytes: of the MSG part, or of the DATA part. For a thread that does not have the
    /// handle, in a pool in host memory.
    #[cfg(feature = "typed")]
    pub(super) fn claim(lease: &Arc<SeatLease>, pool: PoolId, len: u32) -> Result<Self> {
        lease.check_seated()?;
        let core = lease.core();
        let exhausted = |pool: PoolId| {
            let len = core.table(pool as usize).map_or(0, |table| table.len());
            let len = u32::try_from(len).unwrap_or(u32::MAX);
            Error::from(ErrorKind::Exhausted { link: lease.link(), pool, len })
        };
        let msg = core.msg();
        let loaned = msg.table.claim(|free| MsgOwner(free).loaned(lease.me.seat).0);
        let (index, word) = loaned.ok_or_else(|| exhausted(PoolId::CpuMsg))?;
        let cell = Cell(msg.table.cell(index));
        cell.clear();
        let owner = MsgOwner(word);
        let none = OwnedPart(NonNull::dangling(), 0);
        // Dropped on an error, it frees the MSG buffer.
        let mut loan = Self {
            cell: index,
            owner,
            buffer: DataRef::NONE,
            msg: none,
            data: none,
            lease: Arc::clone(lease),
        };
        let bytes = |start| OwnedPart(start, len as usize);
        if pool == PoolId::CpuMsg {
            cell.set_msg_len(len);
            loan.msg = bytes(msg.buffer(index));
        } else if let Some(data) = core.pool(pool) {
            let attached = data.table.claim(|free| DataOwner(free).attached(index, owner).0);
            let (at, _) = attached.ok_or_else(|| exhausted(pool))?;
            loan.buffer = DataRef::new(pool, at);
            cell.set_data(loan.buffer);
            cell.set_data_len(len);
            loan.data = bytes(data.buffer(at));
        }
        Ok(loan)
    }

    pub(super) fn lease(&self) -> &Arc<SeatLease> {
        &self.lease
    }

    /// The index of the MSG buffer, and its owner word.
    pub(super) fn msg(&self) -> (u32, MsgOwner) {
        (self.cell, self.owner)
    }

    /// Gives up the buffers, which have another owner now.
    pub(super) fn give_up(&mut self) {
        // Both: a DATA buffer only has 18 bits of the epoch of its MSG buffer, so its owner word alone would not protect
        // it.
        (self.owner, self.buffer) = (MsgOwner::NONE, DataRef::NONE);
    }

    /// Address and length of the bytes of the MSG part, for a C library or another language. They may be written and read
    /// until the loan is dropped or adopted.
    #[must_use]
    pub fn msg_ptr(&self) -> NonNull<[u8]> {
        self.msg.bytes()
    }

    /// As [`msg_ptr`](Self::msg_ptr), for the DATA part. Empty without one, and if it is in device memory.
    #[must_use]
    pub fn data_ptr(&self) -> NonNull<[u8]> {
        self.data.bytes()
    }

    /// The bytes of the MSG part.
    pub fn msg_mut(&mut self) -> &mut [u8] {
        let part = self.msg;
        bytes_mut(self, part)
    }

    /// The bytes of the DATA part. Empty without one, and if it is in device memory.
    pub fn data_mut(&mut self) -> &mut [u8] {
        let part = self.data;
        bytes_mut(self, part)
    }
}

impl Link {
    /// Takes a loan of this handle back from [`into_owned`](Loan::into_owned), to send it.
    ///
    /// # Errors
    /// [`ForeignLoan`](ErrorKind::ForeignLoan) if another handle loaned it; [`Evicted`](ErrorKind::Evicted). In both cases
    /// the loan is dropped.
    pub fn adopt(&self, mut loan: OwnedLoan) -> Result<Loan<'_>> {
        self.check_seated()?;
        if !Arc::ptr_eq(&self.lease, &loan.lease) {
            return Err(Error::from(ErrorKind::ForeignLoan { link: self.link() }));
        }
        let (cell, owner, data) = (loan.cell, loan.owner, loan.buffer);
        // The link has its own reference to the lease, so this one does not end it.
        loan.give_up();
        Ok(Loan { link: self, cell, owner, data })
    }
}

impl Drop for OwnedLoan {
    fn drop(&mut self) {
        self.lease.release(self.cell, self.owner, self.buffer);
    }
}

impl fmt::Debug for OwnedLoan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedLoan")
            .field("link", &self.lease.shared.store.link)
            .field("msg", &self.msg.1)
            .field("data", &self.data.1)
            .finish()
    }
}
