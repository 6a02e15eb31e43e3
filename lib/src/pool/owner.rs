//! Owner words: one per buffer, which alone decides who holds it.
//!
//! Every change of owner is one compare-and-swap of this word. The lists of free buffers ([`super::hints`]) are hints:
//! a stale one costs a retry, a lost one is found by recovery, and neither can hand out a buffer twice.
//!
//! ```text
//! MSG    | epoch 54 | seat 8 | state 2 |
//! DATA   | epoch 24 | epoch of the MSG, low 18 | cell of the MSG 20 | state 2 |
//!
//! MSG    Free --loan(p)--> Loaned(p) --receive(c)--> Borrowed(c) --release--> Free
//!                          Loaned(p) --broadcast---> Published(p) --passed--> Free
//! DATA   Free --loan-----> Attached(MSG cell, epoch) ------release--> Free
//! ```
//!
//! A MSG buffer that is queued in a ring stays `Loaned` by its sender: the ring says that it was sent. In a broadcast
//! ring it is `Published`: it belongs to the ring until its writer finds that all readers have passed it. A DATA buffer
//! belongs to the MSG that it was attached to, so it changes owners with it and needs no exchange of its own; when that
//! epoch of the MSG is over, the DATA buffer is orphaned and recovery frees it.
//!
//! The epoch grows with each loan. It fences a participant that was declared dead and resumes: its compare-and-swap
//! names an epoch that is over.

use crate::participant::{MAX_SEATS, SeatIndex};

const STATE_BITS: u32 = 2;
const STATE_MASK: u64 = 3;
const SEAT_MASK: u64 = 0xff;
const MSG_EPOCH_SHIFT: u32 = 10;
const DATA_CELL_BITS: u32 = 20;
const DATA_MSG_EPOCH_BITS: u32 = 18;
const DATA_EPOCH_SHIFT: u32 = STATE_BITS + DATA_CELL_BITS + DATA_MSG_EPOCH_BITS;

const FREE: u64 = 0;
const LOANED: u64 = 1;
const BORROWED: u64 = 2;
const PUBLISHED: u64 = 3;
const ATTACHED: u64 = 3;

/// The owner word of a MSG buffer or of an inline cell, as read at one instant.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct MsgOwner(pub(crate) u64);

/// The state of a MSG buffer, with its owner.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Holder {
    /// No participant owns it.
    Free,
    /// The participant that writes it, or wrote and sent it.
    Loaned(SeatIndex),
    /// The participant that received it.
    Borrowed(SeatIndex),
    /// A broadcast ring; this is the participant that sent it.
    Published(SeatIndex),
    /// A value that this library never writes.
    Impossible,
}

impl MsgOwner {
    /// A placeholder where nothing is held any more: no buffer has it, so no exchange that names it succeeds.
    pub(crate) const NONE: Self = Self(u64::MAX);

    /// The state and owner of the buffer.
    #[must_use]
    pub(crate) fn holder(self) -> Holder {
        let seat = SeatIndex::from_wild(self.0 >> STATE_BITS & SEAT_MASK);
        match (self.0 & STATE_MASK, seat) {
            (FREE, _) => Holder::Free,
            (LOANED, Some(seat)) => Holder::Loaned(seat),
            (BORROWED, Some(seat)) => Holder::Borrowed(seat),
            (PUBLISHED, Some(seat)) => Holder::Published(seat),
            _ => Holder::Impossible,
        }
    }

    /// Whether a participant has loaned it: a faster [`holder`](Self::holder) for the hot path.
    #[inline(always)]
    pub(crate) fn is_loaned(self) -> bool {
        const NO_SEAT: u64 = SEAT_MASK & !(MAX_SEATS as u64 - 1);
        self.0 & (STATE_MASK | NO_SEAT << STATE_BITS) == LOANED
    }

    /// The number of this loan of the buffer; grows by one with each.
    #[must_use]
    pub(crate) fn epoch(self) -> u64 {
        self.0 >> MSG_EPOCH_SHIFT
    }

    pub(crate) fn is_free(self) -> bool {
        self.0 & STATE_MASK == FREE
    }

    fn with(self, state: u64, seat: SeatIndex) -> Self {
        Self(self.epoch() << MSG_EPOCH_SHIFT | u64::from(seat.value()) << STATE_BITS | state)
    }

    /// A placeholder for the word of a message that several receivers hold: the token of this receiver's hold.
    #[inline]
    pub(crate) fn of_token(token: u64) -> Self {
        Self(token << STATE_BITS | PUBLISHED)
    }

    /// The token of [`of_token`](Self::of_token). Every receiver of a published message has one.
    #[inline]
    pub(crate) fn token(self) -> Option<u64> {
        (self.0 & STATE_MASK == PUBLISHED).then_some(self.0 >> STATE_BITS)
    }

    /// The word of the next epoch, loaned by `seat`.
    pub(crate) fn loaned(self, seat: SeatIndex) -> Self {
        Self(self.epoch().wrapping_add(1) << MSG_EPOCH_SHIFT).with(LOANED, seat)
    }

    /// The word of a loan by `seat` with the same epoch.
    pub(crate) fn loaned_still(self, seat: SeatIndex) -> Self {
        self.with(LOANED, seat)
    }

    /// The word of the same epoch, borrowed by the receiver in `seat`.
    pub(crate) fn borrowed(self, seat: SeatIndex) -> Self {
        self.with(BORROWED, seat)
    }

    /// The word of the same epoch in a broadcast ring, sent by the participant in `seat`.
    pub(crate) fn published(self, seat: SeatIndex) -> Self {
        self.with(PUBLISHED, seat)
    }

    /// The word that ends this epoch.
    pub(crate) fn freed(self) -> Self {
        Self(self.epoch() << MSG_EPOCH_SHIFT)
    }
}

/// The owner word of a DATA buffer, as read at one instant.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct DataOwner(pub(crate) u64);

impl DataOwner {
    /// The MSG cell this buffer is attached to and the low bits of its epoch; `None` if it is free.
    #[must_use]
    pub(crate) fn attached_to(self) -> Option<(u32, u64)> {
        if self.0 & STATE_MASK != ATTACHED {
            return None;
        }
        let cell = self.0 >> STATE_BITS & ((1 << DATA_CELL_BITS) - 1);
        let epoch = self.0 >> (STATE_BITS + DATA_CELL_BITS) & ((1 << DATA_MSG_EPOCH_BITS) - 1);
        Some((u32::try_from(cell).ok()?, epoch))
    }

    /// Whether the buffer is attached to cell `cell` in the very epoch of `msg`.
    #[must_use]
    pub(crate) fn belongs_to(self, cell: u32, msg: MsgOwner) -> bool {
        self.attached_to() == Some((cell, msg.epoch() & ((1 << DATA_MSG_EPOCH_BITS) - 1)))
    }

    pub(crate) fn is_free(self) -> bool {
        is_free(self.0)
    }

    pub(crate) fn attached(self, cell: u32, msg: MsgOwner) -> Self {
        let epoch = (self.0 >> DATA_EPOCH_SHIFT).wrapping_add(1);
        let of_msg = msg.epoch() & ((1 << DATA_MSG_EPOCH_BITS) - 1);
        Self(
            epoch << DATA_EPOCH_SHIFT
                | of_msg << (STATE_BITS + DATA_CELL_BITS)
                | u64::from(cell) << STATE_BITS
                | ATTACHED,
        )
    }

    pub(crate) fn freed(self) -> Self {
        Self(self.0 >> DATA_EPOCH_SHIFT << DATA_EPOCH_SHIFT)
    }
}

/// Whether an owner word of either kind is free: both keep the state in the same two bits.
#[inline]
pub(crate) fn is_free(word: u64) -> bool {
    word & STATE_MASK == FREE
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn seat(i: u8) -> SeatIndex {
        SeatIndex::from_wild(u64::from(i)).unwrap()
    }

    #[test]
    fn msg_word_passes_through_all_states() {
        let free = MsgOwner(0);
        assert_eq!(free.holder(), Holder::Free);
        let loaned = free.loaned(seat(63));
        assert_eq!((loaned.holder(), loaned.epoch()), (Holder::Loaned(seat(63)), 1));
        let borrowed = loaned.borrowed(seat(7));
        assert_eq!((borrowed.holder(), borrowed.epoch()), (Holder::Borrowed(seat(7)), 1));
        let again = borrowed.freed();
        assert!(again.is_free() && is_free(again.0));
        assert_eq!(again.loaned(seat(0)).epoch(), 2);
    }

    #[test]
    fn epoch_wraps_without_changing_neighbouring_bits() {
        let last = MsgOwner(u64::MAX << MSG_EPOCH_SHIFT);
        assert_eq!(last.loaned(seat(5)).epoch(), 0);
        let last = DataOwner(u64::MAX << DATA_EPOCH_SHIFT);
        let msg = MsgOwner(0).loaned(seat(1));
        assert!(last.attached(9, msg).belongs_to(9, msg));
    }

    #[test]
    fn data_word_belongs_to_one_epoch_of_one_msg() {
        let msg = MsgOwner(0).loaned(seat(1));
        let data = DataOwner(0).attached(0xf_ffff, msg);
        assert!(data.belongs_to(0xf_ffff, msg));
        assert!(!data.belongs_to(0, msg));
        assert!(data.belongs_to(0xf_ffff, msg.borrowed(seat(2))), "it changes hands with its MSG");
        assert!(!data.belongs_to(0xf_ffff, msg.freed().loaned(seat(1))));
        assert!(is_free(data.freed().0) && !data.freed().belongs_to(0, MsgOwner(0)));
    }

    #[test]
    fn random_words_never_panic() {
        for bits in 0..64 {
            let word = 0x9e37_79b9_7f4a_7c15_u64.rotate_left(bits);
            let _ = (MsgOwner(word).holder(), DataOwner(word).attached_to());
        }
        assert_eq!(MsgOwner(200 << STATE_BITS | LOANED).holder(), Holder::Impossible);
        assert_eq!(MsgOwner(PUBLISHED).holder(), Holder::Published(seat(0)));
        assert_eq!(MsgOwner(200 << STATE_BITS | PUBLISHED).holder(), Holder::Impossible);
    }
}
