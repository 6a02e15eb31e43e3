//! Who sleeps, and how often was posted: the words beside the doorbells.
//!
//! A sender must know whether to ring, without a system call. So a receiver that is going to sleep sets its bit in the
//! ring's `SLEEPERS` word and looks at the ring once more; a sender that has published looks at the word. Between each
//! one's store and its load stands a sequentially consistent fence (`DEKKER`, at both ends): without it both could miss the
//! other, and the receiver would sleep over a message. This is the only place of the library that needs one.
//!
//! Nobody but its holder writes a seat's bit: recovery cannot know that the seat has no new holder that sleeps already. So
//! a dead participant leaves its bit behind; whoever sits down next clears it, and until then a vacant seat does not count.
//!
//! Posts (the semaphore of TTI style) are two counters on lines of their own: what was posted, by senders, and what was
//! taken, by receivers.

use crate::participant::{SeatIndex, Seats};
use crate::ring::{POSTS, POSTS_TAKEN, Ring, SLEEPERS};
use crate::sync::{Ordering, fence};

/// Says that `seat` will sleep, or wants to hear of every notification. Look at the ring after this.
pub(crate) fn fall_asleep(ring: &Ring, seat: SeatIndex) {
    ring.words().control(SLEEPERS).fetch_or(seat.bit(), Ordering::Relaxed);
    // DEKKER
    fence(Ordering::SeqCst);
}

/// Says that `seat` is awake.
pub(crate) fn wake_up(ring: &Ring, seat: SeatIndex) {
    ring.words().control(SLEEPERS).fetch_and(!seat.bit(), Ordering::Relaxed);
}

/// Whether somebody must be rung for. Publish before this.
#[inline]
pub(crate) fn anybody_asleep(ring: &Ring, seats: &Seats) -> bool {
    // DEKKER
    fence(Ordering::SeqCst);
    let asleep = ring.words().control(SLEEPERS).load(Ordering::Relaxed);
    asleep != 0 && seats.is_any_taken(asleep)
}

/// Adds one post.
pub(crate) fn post(ring: &Ring) {
    // Release pairs with the Acquire of `take_post`: what was sent before the post is there after it.
    ring.words().control(POSTS).fetch_add(1, Ordering::Release);
}

/// Takes one post, if there is one.
pub(crate) fn take_post(ring: &Ring) -> bool {
    let taken = ring.words().control(POSTS_TAKEN);
    let mut current = taken.load(Ordering::Relaxed);
    // One round for each other receiver that takes a post meanwhile; a hostile one may keep us at it, but not for ever.
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
