//! Shared words through which receivers announce that they sleep, and senders wake them.
//!
//! A sender must know without a system call whether to wake a receiver. So a receiver that is about to sleep sets its bit
//! in the ring's `SLEEPERS` word, and a receiver with a bell (a datagram socket, for poll and epoll) its bit in `BELLS`;
//! then it checks the ring once more. A sender that has published reads both words. Each has a sequentially consistent
//! fence (`DEKKER`) between its store and its load: without it, both could miss the other, and the receiver would sleep
//! while a message waits.
//!
//! Participants that only wait for events sleep on words of their own, after the seats. So a notification costs no system
//! call if no receiver waits for a message.
//!
//! Sleepers wait on the futex word `WAKES`. It is incremented before the futex is woken, and read before the last check of
//! the ring (`WAKE`), so a wake-up between that check and the system call makes the call return at once. What is sent to one seat,
//! as a reply is, wakes that seat alone: the kernel keeps a mask for each sleeper. It has 32 bits, so two seats share one.
//!
//! Only the participant in a seat writes the seat's bits, because a recovery cannot know whether the seat has a new
//! participant that already sleeps. So a dead participant leaves its bits behind, the next one in the seat clears them, and
//! bits of a vacant seat do not count.
//!
//! Posts are a counting semaphore per direction, for one wake-up per transmission time interval. It is two counters on lines of
//! their own: posts made, written by senders, and posts consumed, written by receivers.

use std::io;
use std::time::Duration;

use shmesh_sys::futex;

use crate::participant::{Participant, SeatIndex, Seats};
use crate::ring::{BELLS, POSTS, POSTS_TAKEN, Ring, SLEEPERS, WAKES};
use crate::sync::{AtomicU64, Ordering, fence, machine_word};

/// The bitmap and the futex of participants that wait for the same: receivers of a ring for messages, or all for events.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sleepers<'a> {
    /// One bit per seat.
    asleep: &'a AtomicU64,
    /// The low half is the futex.
    wakes: &'a AtomicU64,
}

impl<'a> Sleepers<'a> {
    pub(crate) fn new(asleep: &'a AtomicU64, wakes: &'a AtomicU64) -> Self {
        Self { asleep, wakes }
    }

    /// The receivers of a ring.
    pub(crate) fn of(ring: &'a Ring) -> Self {
        let words = ring.words();
        Self::new(words.control(SLEEPERS), words.beside(SLEEPERS, WAKES))
    }

    /// Announces that `seat` is about to sleep. The caller must check once more after this.
    pub(crate) fn fall_asleep(self, seat: SeatIndex) {
        self.asleep.fetch_or(seat.bit(), Ordering::Relaxed);
        // DEKKER
        fence(Ordering::SeqCst);
    }

    /// Announces that `seat` is awake.
    pub(crate) fn wake_up(self, seat: SeatIndex) {
        self.asleep.fetch_and(!seat.bit(), Ordering::Relaxed);
    }

    /// Sleeps until [`wake_seats`](Self::wake_seats) for `seat`, unless [`wakes`](Self::wakes) differs from `expected`. May return
    /// early.
    pub(crate) fn sleep(self, seat: SeatIndex, expected: u32, limit: Duration) -> io::Result<futex::Wait> {
        futex::wait(machine_word(self.wakes), expected, Some(limit), mask(seat.bit()))
    }

    /// The value to expect when going to sleep. The caller must read it before its last check.
    pub(crate) fn wakes(self) -> u32 {
        // WAKE: Acquire pairs with the fence before `wake`: a participant that sees the increase finds what was published
        // before it.
        #[expect(clippy::cast_possible_truncation, reason = "a futex compares the low half")]
        let wakes = self.wakes.load(Ordering::Acquire) as u32;
        wakes
    }

    /// The seats that sleep here. The caller must publish before this.
    pub(crate) fn asleep(self) -> u64 {
        // DEKKER
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::Relaxed)
    }

    /// Makes participants that are about to sleep return at once. Called after [`waiting`] or [`asleep`](Self::asleep), and
    /// before sleepers are woken.
    pub(crate) fn wake(self) {
        // WAKE: the fence of `waiting` or `asleep`, which comes before this, pairs with the Acquire of `wakes`.
        self.wakes.fetch_add(1, Ordering::Relaxed);
    }

    /// Wakes the sleepers in these seats, and maybe others. Called after [`wake`](Self::wake).
    pub(crate) fn wake_seats(self, seats: u64) {
        // Fails only for an invalid address, or without seats.
        let _ = futex::wake(machine_word(self.wakes), u32::MAX, mask(seats));
    }
}

/// The mask of all seats.
pub(crate) const ALL_SEATS: u64 = u64::MAX;

/// The kernel's mask for seats, of which two have one bit.
#[expect(clippy::cast_possible_truncation, reason = "both halves are in the low one")]
fn mask(seats: u64) -> u32 {
    (seats | seats >> 32) as u32
}

/// Announces that `seat` has a bell, which every notification must ring. The caller must check the ring after this.
pub(crate) fn arm(ring: &Ring, seat: SeatIndex) {
    ring.words().beside(SLEEPERS, BELLS).fetch_or(seat.bit(), Ordering::Relaxed);
    // DEKKER
    fence(Ordering::SeqCst);
}

/// Reverses the effect of [`arm`].
pub(crate) fn disarm(ring: &Ring, seat: SeatIndex) {
    ring.words().beside(SLEEPERS, BELLS).fetch_and(!seat.bit(), Ordering::Relaxed);
}

/// Clears the bits that an earlier participant may have left for `seat`.
pub(crate) fn reset(ring: &Ring, seat: SeatIndex) {
    Sleepers::of(ring).wake_up(seat);
    disarm(ring, seat);
}

/// Receivers of a ring that must be woken, as bits of seats.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitingReceivers {
    /// The seats to wake, whether they wait or not.
    seats: u64,
    sleepers: u64,
    bells: u64,
}

impl WaitingReceivers {
    /// Only the receiver in `seat`.
    #[inline]
    pub(crate) fn only(self, seat: SeatIndex) -> Self {
        let seats = self.seats & seat.bit();
        Self { seats, sleepers: self.sleepers & seats, bells: self.bells & seats }
    }

    /// The seats to wake, whether they wait or not.
    pub(crate) fn seats(self) -> u64 {
        self.seats
    }

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.sleepers | self.bells == 0
    }

    /// Whether a participant sleeps on the futex word.
    pub(crate) fn is_any_asleep(self, seats: &Seats) -> bool {
        seats.is_any_taken(self.sleepers)
    }

    /// The participants that have a bell.
    pub(crate) fn bells(self, seats: &Seats) -> impl Iterator<Item = Participant> + '_ {
        seats.all_of(self.bells)
    }
}

/// The receivers that must be woken. The caller must publish before this.
#[inline]
pub(crate) fn waiting(ring: &Ring) -> WaitingReceivers {
    // DEKKER
    fence(Ordering::SeqCst);
    WaitingReceivers {
        seats: ALL_SEATS,
        sleepers: ring.words().control(SLEEPERS).load(Ordering::Relaxed),
        bells: ring.words().beside(SLEEPERS, BELLS).load(Ordering::Relaxed),
    }
}

/// Adds one post to the ring.
pub(crate) fn post(ring: &Ring) {
    // Release pairs with the Acquire of `take_post`: messages sent before the post are visible after it.
    ring.words().control(POSTS).fetch_add(1, Ordering::Release);
}

/// Number of posts since the link was created, modulo 2^64.
pub(crate) fn posted(ring: &Ring) -> u64 {
    ring.words().control(POSTS).load(Ordering::Acquire)
}

/// Consumes all of the first `posted` posts that are left.
pub(crate) fn forget_posts(ring: &Ring, posted: u64) {
    let taken = ring.words().control(POSTS_TAKEN);
    let mut current = taken.load(Ordering::Relaxed);
    for _ in 0..1_000 {
        if posted.wrapping_sub(current).cast_signed() <= 0 {
            return;
        }
        match taken.compare_exchange(current, posted, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => current = now,
        }
    }
}

/// Consumes one post and returns whether there was one.
pub(crate) fn take_post(ring: &Ring) -> bool {
    let taken = ring.words().control(POSTS_TAKEN);
    let mut current = taken.load(Ordering::Relaxed);
    // One round for each other receiver that consumes a post meanwhile. A hostile one may cause more, so they are bounded.
    for _ in 0..1_000 {
        if ring.words().control(POSTS).load(Ordering::Acquire).wrapping_sub(current).cast_signed() <= 0 {
            return false;
        }
        match taken.compare_exchange(current, current.wrapping_add(1), Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => current = now,
        }
    }
    false
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn each_seat_is_in_the_mask_of_all() {
        assert_eq!(mask(ALL_SEATS), u32::MAX);
        for seat in SeatIndex::all() {
            assert!(mask(seat.bit()).is_power_of_two(), "{seat:?}");
        }
    }
}
