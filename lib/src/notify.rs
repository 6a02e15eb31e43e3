//! The words through which receivers say that they sleep, and senders wake them.
//!
//! A sender must know whether to wake a receiver without a system call. So a receiver that is going to sleep sets its bit in
//! the ring's `SLEEPERS` word, and one that has a bell (a FIFO, for poll and epoll) its bit in `BELLS`; then it looks at the
//! ring once more. A sender that has published looks at both words. Between each one's store and its load stands a
//! sequentially consistent fence (`DEKKER`, at both ends): without it both could miss the other, and the receiver would sleep
//! over a message. This is the only place of the library that needs one.
//!
//! Sleepers wait on the futex word `WAKES`. It is increased before the futex is woken, and read before the last look at the
//! ring (`WAKE`), so a wake-up between that look and the system call makes the call return at once.
//!
//! Only the participant in a seat writes the seat's bits: recovery cannot know that the seat has no new participant that
//! sleeps already. So a dead participant leaves its bits behind; the next one in the seat clears them, and until then a
//! vacant seat does not count.
//!
//! Posts (the semaphore of TTI style) are two counters on lines of their own: what was posted, by senders, and what was
//! taken, by receivers.

use std::io;
use std::time::Duration;

use shmesh_sys::futex;

use crate::participant::{Participant, SeatIndex, Seats};
use crate::ring::{BELLS, POSTS, POSTS_TAKEN, Ring, SLEEPERS, WAKES};
use crate::sync::{AtomicU64, Ordering, fence, machine_word};

/// Says that `seat` will sleep. Look at the ring after this.
pub(crate) fn fall_asleep(ring: &Ring, seat: SeatIndex) {
    ring.words().control(SLEEPERS).fetch_or(seat.bit(), Ordering::Relaxed);
    // DEKKER
    fence(Ordering::SeqCst);
}

/// Says that `seat` is awake.
pub(crate) fn wake_up(ring: &Ring, seat: SeatIndex) {
    ring.words().control(SLEEPERS).fetch_and(!seat.bit(), Ordering::Relaxed);
}

/// Says that `seat` has a bell, to be rung by every notification. Look at the ring after this.
pub(crate) fn arm(ring: &Ring, seat: SeatIndex) {
    ring.words().beside(SLEEPERS, BELLS).fetch_or(seat.bit(), Ordering::Relaxed);
    // DEKKER
    fence(Ordering::SeqCst);
}

/// Takes back what [`arm`] said.
pub(crate) fn disarm(ring: &Ring, seat: SeatIndex) {
    ring.words().beside(SLEEPERS, BELLS).fetch_and(!seat.bit(), Ordering::Relaxed);
}

/// Clears what an earlier participant may have left at `seat`.
pub(crate) fn reset(ring: &Ring, seat: SeatIndex) {
    wake_up(ring, seat);
    disarm(ring, seat);
}

fn word(ring: &Ring) -> &AtomicU64 {
    ring.words().beside(SLEEPERS, WAKES)
}

/// Sleeps until [`wake_all`], unless [`wakes`] no longer is `expected`. May return early: look at the ring.
pub(crate) fn sleep(ring: &Ring, expected: u32, limit: Duration) -> io::Result<()> {
    futex::wait(machine_word(word(ring)), expected, Some(limit)).map(drop)
}

/// Wakes all receivers that sleep. Call it after [`wake`].
pub(crate) fn wake_all(ring: &Ring) {
    // Refused for an address that is none only.
    let _ = futex::wake(machine_word(word(ring)), u32::MAX);
}

/// What to expect of the futex word when going to sleep. Call it before the last look at the ring.
pub(crate) fn wakes(ring: &Ring) -> u32 {
    // WAKE: Acquire pairs with the fence of `waiting`: a receiver that sees the increase of `wake` finds what was published
    // before it.
    #[expect(clippy::cast_possible_truncation, reason = "a futex compares the low half")]
    let wakes = word(ring).load(Ordering::Acquire) as u32;
    wakes
}

/// Makes receivers that are about to sleep on the futex word return at once. Call it after [`waiting`], and then wake
/// those that sleep.
pub(crate) fn wake(ring: &Ring) {
    // WAKE: the fence of `waiting`, which comes before this, pairs with the Acquire of `wakes`.
    word(ring).fetch_add(1, Ordering::Relaxed);
}

/// Which receivers of a ring must be woken, as bits of seats.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    sleepers: u64,
    bells: u64,
}

impl Waiting {
    #[inline]
    pub(crate) fn nobody(self) -> bool {
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

/// Which receivers must be woken. Publish before this.
#[inline]
pub(crate) fn waiting(ring: &Ring) -> Waiting {
    // DEKKER
    fence(Ordering::SeqCst);
    Waiting {
        sleepers: ring.words().control(SLEEPERS).load(Ordering::Relaxed),
        bells: ring.words().beside(SLEEPERS, BELLS).load(Ordering::Relaxed),
    }
}

/// Adds one post.
pub(crate) fn post(ring: &Ring) {
    // Release pairs with the Acquire of `take_post`: what was sent before the post is there after it.
    ring.words().control(POSTS).fetch_add(1, Ordering::Release);
}

/// How many posts there were since the link was created, modulo 2^64.
pub(crate) fn posted(ring: &Ring) -> u64 {
    ring.words().control(POSTS).load(Ordering::Acquire)
}

/// Takes all of the first `posted` posts. Only while no other receiver is attached.
pub(crate) fn forget_posts(ring: &Ring, posted: u64) {
    ring.words().control(POSTS_TAKEN).store(posted, Ordering::Relaxed);
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
