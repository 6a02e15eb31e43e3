//! The share of the shared buffers that a client can leave in replies that it does not take.
//!
//! A reply waits for its client in an inline cell or a MSG buffer, perhaps with a DATA buffer, and all participants share
//! those. So that clients that take no replies cannot use them up, a server's reply to a client that has its share is refused
//! ([`ReplyOutcome::OverShare`]), and the server can go on with other clients.
//!
//! For a table of `len` cells, with `S` seats that were used beside the server's, each with a window of `W` requests:
//!
//! | | the first reply that waits for a request | each other one |
//! |---|---|---|
//! | `S W <= len / 3` | always | the client has left fewer than `len / 16 / 64`, or all clients together fewer than `len / 4` |
//! | otherwise | the client has left fewer than `len / 4 / 64`, at least 1, or all clients together fewer than `len / 4` | as the first |
//!
//! Only replies beyond the first are counted in the first row, all in the second. So replies take two thirds of a table with at
//! least 256 cells, or nine tenths if more clients attach meanwhile, and a client that takes its replies can always get the
//! next one. In the first row a client can leave some requests alone and take the replies to others. Two servers that send at
//! the same moment may both see the last of a share as free: there are at most as many replies beyond it as there are servers.
//!
//! The table of inline cells is always in the first row, unless it has the most cells that an entry can name.

use super::reply::{ReplySlots, RequestId};
use crate::participant::{MAX_SEATS, SeatIndex};

/// The number of seats, by which a table is divided.
#[expect(clippy::cast_possible_truncation, reason = "64 seats")]
const SEATS: u32 = MAX_SEATS as u32;

/// How many replies a client can leave in one table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyShare {
    len: u32,
    window: u32,
    /// Each client can leave as many: in the first row of the table above, and in the second.
    reserved: [u32; 2],
    /// All clients together can leave as many, if some leave more than `reserved`.
    common: u32,
}

impl ReplyShare {
    /// For a table of `len` cells of a link whose clients have `window` requests pending.
    pub(crate) fn of(len: u32, window: u32) -> Self {
        Self { len, window, reserved: [len / 16 / SEATS, (len / 4 / SEATS).max(1)], common: len / 4 }
    }

    /// Whether the first reply that waits for a request does not count.
    #[inline]
    fn is_first_free(self, clients: u32) -> bool {
        clients * self.window <= self.len / 3
    }

    /// Whether a client may make room for other replies when it takes the last one to a request.
    #[inline]
    pub(crate) fn counts_last(self) -> bool {
        !self.is_first_free(SEATS)
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
        // One of them is the server.
        let clients = u32::try_from(seats_used).unwrap_or(SEATS).saturating_sub(1);
        let first_free = self.is_first_free(clients);
        if first_free && !has_earlier() {
            return true;
        }
        let left = |seat| replies.left_by(seat, is_inline, first_free);
        left(id.seat) < self.reserved[usize::from(!first_free)] || {
            let seats = (0..seats_used as u64).filter_map(SeatIndex::from_wild);
            seats.map(left).sum::<u32>() < self.common
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn replies_of_all_seats_leave_room_in_each_table() {
        for len in (256..5_000).chain([10_000, 1 << 18, 1 << 20]) {
            for window in 1..=64 {
                let share = ReplyShare::of(len, window);
                let most_first =
                    (0..SEATS).filter(|&clients| share.is_first_free(clients)).max().unwrap_or(0);
                // The clients that came first leave all they can, and then more attach.
                let early = most_first * window + share.common + SEATS * share.reserved[0];
                let late = SEATS * share.reserved[1];
                assert!(early <= len * 2 / 3 && late <= len / 4, "{len} {window}");
                assert!(early + late <= len * 9 / 10, "{len} {window}");
            }
        }
    }

    #[test]
    fn every_client_has_a_share_of_each_table() {
        for (len, window) in (1..5_000).flat_map(|len| (1..=64).map(move |window| (len, window))) {
            assert!(ReplyShare::of(len, window).reserved[1] > 0, "{len} {window}");
        }
    }
}
