//! The share of the shared buffers that a client can leave in replies that it does not take.
//!
//! A reply waits for its client in an inline cell or a MSG buffer, perhaps with a DATA buffer, and all participants share
//! those. So that clients that take no replies cannot use them up, a server's reply to a client that has its share is refused
//! ([`ReplyOutcome::OverShare`](super::reply::ReplyOutcome::OverShare)), and the server can go on with other clients.
//!
//! A client can leave one reply to each of its requests. With `S` clients attached, each with a window of `W` requests, a
//! table of `len` cells has room for so many from each:
//!
//! ```text
//! share = min(W, 3/8 len / S)
//! ```
//!
//! Beyond their shares, all clients together can leave `len / 4`: further replies to the same request, as a rule. So replies
//! take five eighths of a table. A client that attaches when others have left as much, because they had larger shares before,
//! can still leave one.
//!
//! So a client that takes its replies always gets the next one, and a client can leave some requests alone and take the
//! replies to others. The table of inline cells has room for `W` from each of 63 clients, unless it has the most cells that
//! an entry can name. Two servers that send at the same moment may both see the last of a share as free: there are at most as
//! many replies beyond it as there are servers.

use super::reply::{RepliesLeft, ReplySlots, RequestId};
use crate::participant::{MAX_SEATS, SeatIndex, Seats, Side};
use crate::ring::entry::RingEntry;

/// The number of seats, by which a table is divided.
#[expect(clippy::cast_possible_truncation, reason = "64 seats")]
const SEATS: u32 = MAX_SEATS as u32;

/// How many replies a client can leave in one table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyShare {
    len: u32,
    window: u32,
}

impl ReplyShare {
    /// For a table of `len` cells of a link whose clients have `window` requests pending.
    pub(crate) fn of(len: u32, window: u32) -> Self {
        Self { len, window }
    }

    /// Cells for one reply to each request of all clients.
    fn for_requests(self) -> u32 {
        self.len / 8 * 3 + self.len % 8 * 3 / 8
    }

    /// The requests of a client to which a reply can wait.
    fn requests(self, clients: u32) -> u32 {
        self.window.min(self.for_requests() / clients.max(1)).max(1)
    }

    /// Whether a client can leave one more reply. `has_earlier` tells that another one to the same request waits, and `all`
    /// are what the clients have left.
    fn has_room(self, own: RepliesLeft, has_earlier: bool, all: &[RepliesLeft]) -> bool {
        if own.replies == 0 {
            return true;
        }
        let (share, common) = (self.requests(u32::try_from(all.len()).unwrap_or(SEATS)), self.len / 4);
        if all.iter().map(|left| left.replies).sum::<u32>() >= self.for_requests() + common {
            return false;
        }
        let beyond = |left: &RepliesLeft| left.replies - left.requests.min(share).min(left.replies);
        !has_earlier && own.requests < share || all.iter().map(beyond).sum::<u32>() < common
    }

    /// Whether the client can leave the reply at `position`. `is_here` says which replies are in the table.
    #[inline]
    pub(crate) fn allows(
        self,
        replies: &ReplySlots,
        seats: &Seats,
        id: RequestId,
        position: u64,
        is_here: impl Fn(RingEntry) -> bool,
    ) -> bool {
        // The client takes replies in their order.
        let slot = replies.slot(id);
        let has_earlier = position > 0 && slot.is_some_and(|slot| slot.has_reply(position - 1));
        // Most replies need no count. One of the participants is the server.
        let most = u32::try_from(seats.used()).unwrap_or(SEATS).saturating_sub(1);
        if !has_earlier && most * self.window <= self.for_requests() {
            return true;
        }
        self.allows_by_count(replies, seats, id, has_earlier, is_here)
    }

    #[cold]
    fn allows_by_count(
        self,
        replies: &ReplySlots,
        seats: &Seats,
        id: RequestId,
        has_earlier: bool,
        is_here: impl Fn(RingEntry) -> bool,
    ) -> bool {
        let own = replies.left_by(id.seat, &is_here);
        let mut all = [RepliesLeft::default(); MAX_SEATS];
        let mut clients = 0;
        for seat in SeatIndex::all().take(seats.used()) {
            if seat == id.seat || seats.at(seat).is_some_and(|other| other.word.side() == Side::Secondary) {
                all[clients] = if seat == id.seat { own } else { replies.left_by(seat, &is_here) };
                clients += 1;
            }
        }
        self.has_room(own, has_earlier, &all[..clients])
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// Lets a client leave all that it can with `window` requests. With `first_only`, one reply to each.
    fn leave(share: ReplyShare, client: usize, all: &mut [RepliesLeft], first_only: bool) {
        for _ in 0..share.window {
            let mut sent = 0;
            while sent < if first_only { 1 } else { 7 } && share.has_room(all[client], sent > 0, all) {
                all[client].replies += 1;
                all[client].requests += u32::from(sent == 0);
                sent += 1;
            }
        }
    }

    fn sum(all: &[RepliesLeft]) -> u32 {
        all.iter().map(|left| left.replies).sum()
    }

    #[test]
    #[cfg_attr(miri, ignore = "thousands of sums, and no memory to check")]
    fn replies_of_all_clients_leave_room_in_each_table() {
        for len in [256, 300, 1_000, 12_345, 1 << 20] {
            for window in [1, 8, 64] {
                let share = ReplyShare::of(len, window);
                for clients in [1, 5, 20, 63] {
                    let mut all = vec![RepliesLeft::default(); clients];
                    (0..clients).for_each(|client| leave(share, client, &mut all, false));
                    assert!(sum(&all) <= len * 5 / 8 + 1, "{len} {window} {clients}");
                }
                // They attach one after another, and each leaves all that it can at once.
                let mut all = Vec::new();
                for client in 0..63 {
                    all.push(RepliesLeft::default());
                    leave(share, client, &mut all, client % 2 == 0);
                    assert!(all[client].replies > 0, "{len} {window} {client}");
                }
                assert!(sum(&all) <= len * 7 / 8, "{len} {window}: {}", sum(&all));
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "thousands of sums, and no memory to check")]
    fn client_has_its_share_whatever_others_leave() {
        for (len, window) in
            [1, 2, 7, 16, 31, 100, 256].into_iter().flat_map(|len| [1, 8, 64].map(|window| (len, window)))
        {
            let share = ReplyShare::of(len, window);
            for clients in [1, 3, 8, 63] {
                let mut all = vec![RepliesLeft::default(); clients];
                (1..clients).for_each(|client| leave(share, client, &mut all, client % 2 == 0));
                leave(share, 0, &mut all, true);
                let count = u32::try_from(clients).unwrap();
                assert!(
                    all[0].requests >= (len * 3 / 8 / count).clamp(1, window),
                    "{len} {window} {clients}"
                );
            }
        }
    }
}
