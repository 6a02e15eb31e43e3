//! The share of the shared buffers that a client can leave in replies that it does not take.
//!
//! A reply waits for its client in an inline cell or a MSG buffer, perhaps with a DATA buffer, and all participants share
//! those. So that clients that take no replies cannot use them up, a server's reply to a client that has its share is refused
//! ([`ReplyOutcome::OverShare`]), and the server can go on with other clients.
//!
//! For a table of `len` cells, each seat with a window of `W` requests:
//!
//! | | the first reply that waits for a request | each other one |
//! |---|---|---|
//! | `64 W <= len / 3` | always | the client has left fewer than `len / 16 / 64`, or all clients together fewer than `len / 16` |
//! | otherwise | the client has left fewer than `len / 4 / 64`, at least 1, or all clients together fewer than `len / 4` | as the first |
//!
//! The table of inline cells is always in the first row, unless it has the most cells that an entry can name.
//!
//! Only replies beyond the first are counted in the first row, all in the second. So replies take less than half of a table
//! with at least 256 cells, whatever clients do, and a client that takes its replies can always get the next one. Two servers
//! that send at the same moment may both see the last of a share as free: there are at most as many replies beyond it as
//! there are servers.

use super::reply::{ReplySlots, RequestId};
use crate::participant::{MAX_SEATS, SeatIndex};

/// The number of seats, by which a table is divided.
#[expect(clippy::cast_possible_truncation, reason = "64 seats")]
const SEATS: u32 = MAX_SEATS as u32;

/// How many replies a client can leave in one table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyShare {
    /// The first reply that waits for a request does not count.
    pub(crate) is_first_free: bool,
    /// Each client can leave as many.
    reserved: u32,
    /// All clients together can leave as many, if some leave more than `reserved`.
    common: u32,
}

impl ReplyShare {
    /// For a table of `len` cells of a link whose clients have `window` requests pending.
    pub(crate) fn of(len: u32, window: u32) -> Self {
        if SEATS * window <= len / 3 {
            Self { is_first_free: true, reserved: len / 16 / SEATS, common: len / 16 }
        } else {
            Self { is_first_free: false, reserved: (len / 4 / SEATS).max(1), common: len / 4 }
        }
    }

    /// Whether the client can leave the reply at `position`. `is_inline` says which replies are in the table.
    #[inline]
    pub(crate) fn allows(
        self,
        replies: &ReplySlots,
        seats_used: usize,
        id: RequestId,
        position: u64,
        is_inline: bool,
    ) -> bool {
        // The client takes replies in their order.
        let has_earlier = || {
            let slot = replies.slot(id);
            position > 0 && slot.is_some_and(|slot| slot.has_reply(position - 1))
        };
        self.is_first_free && !has_earlier() || self.is_left(replies, seats_used, id.seat, is_inline)
    }

    fn is_left(self, replies: &ReplySlots, seats_used: usize, client: SeatIndex, is_inline: bool) -> bool {
        let left = |seat| replies.left_by(seat, is_inline, self.is_first_free);
        left(client) < self.reserved || {
            let seats = (0..seats_used as u64).filter_map(SeatIndex::from_wild);
            seats.map(left).sum::<u32>() < self.common
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// Replies that clients can leave at most, in a table of this length.
    fn most(len: u32, window: u32) -> u32 {
        let share = ReplyShare::of(len, window);
        let first = if share.is_first_free { SEATS * window } else { 0 };
        // The last seat that is within `common` has at least its reserved share.
        first + share.common + SEATS * share.reserved
    }

    #[test]
    fn replies_of_all_seats_take_less_than_half_of_a_table() {
        for len in (256..5_000).chain([10_000, 1 << 18, 1 << 20]) {
            for window in 1..=64 {
                assert!(most(len, window) <= len / 2, "{len} {window}");
            }
        }
    }

    #[test]
    fn every_client_has_a_share_of_each_table() {
        for len in 1..5_000 {
            for window in 1..=64 {
                let share = ReplyShare::of(len, window);
                assert!(share.is_first_free || share.reserved > 0, "{len} {window}");
            }
        }
    }
}
