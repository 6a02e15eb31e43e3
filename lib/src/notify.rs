//! The words through which receivers say that they sleep, and senders wake them.
//!
//! A sender must know whether to wake a receiver without a system call. So a receiver that is going to sleep sets its bit in
//! the ring's `SLEEPERS` word, and one that has a bell (a FIFO, for poll and epoll) its bit in `BELLS`; then it looks at the
//! ring once more. A sender that has published looks at both words. Between each one's store and its load stands a
//! sequentially consistent fence (`DEKKER`, at both ends): without it both could miss the other, and the receiver would sleep
//! over a message. This is the only place of the library that needs one.
//!
//! Participants that wait for events alone sleep on words of their own, behind the seats: so a notification costs no system call
//! while nobody waits for a message.
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

/// Where participants sleep that wait for one thing: the receivers of a ring for messages, or all for events.
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

    /// Says that `seat` will sleep. Look once more after this at what it waits for.
    pub(crate) fn fall_asleep(self, seat: SeatIndex) {
        self.asleep.fetch_or(seat.bit(), Ordering::Relaxed);
        // DEKKER
        fence(Ordering::SeqCst);
    }

    /// Says that `seat` is awake.
    pub(crate) fn wake_up(self, seat: SeatIndex) {
        self.asleep.fetch_and(!seat.bit(), Ordering::Relaxed);
    }

    /// Sleeps until [`wake_all`](Self::wake_all), unless [`wakes`](Self::wakes) no longer is `expected`. May return early.
    pub(crate) fn sleep(self, expected: u32, limit: Duration) -> io::Result<()> {
        futex::wait(machine_word(self.wakes), expected, Some(limit)).map(drop)
    }

    /// What to expect of the futex word when going to sleep. Call it before the last look at what it waits for.
    pub(crate) fn wakes(self) -> u32 {
        // WAKE: Acquire pairs with the fence before `wake`: a participant that sees the increase finds what was published
        // before it.
        #[expect(clippy::cast_possible_truncation, reason = "a futex compares the low half")]
        let wakes = self.wakes.load(Ordering::Acquire) as u32;
        wakes
    }

    /// Which seats sleep here. Publish before this.
    pub(crate) fn asleep(self) -> u64 {
        // DEKKER
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::Relaxed)
    }

    /// Makes participants that are about to sleep return at once. Call it after [`waiting`] or [`asleep`](Self::asleep), and then
    /// wake those that sleep.
    pub(crate) fn wake(self) {
        // WAKE: the fence of `waiting` or `asleep`, which comes before this, pairs with the Acquire of `wakes`.
        self.wakes.fetch_add(1, Ordering::Relaxed);
    }

    /// Wakes all that sleep. Call it after [`wake`](Self::wake).
    pub(crate) fn wake_all(self) {
        // Refused for an address that is none only.
        let _ = futex::wake(machine_word(self.wakes), u32::MAX);
    }
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
    Sleepers::of(ring).wake_up(seat);
    disarm(ring, seat);
}

/// Which receivers of a ring must be woken, as bits of seats.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    sleepers: u64,
    bells: u64,
}

impl Waiting {
    /// Of these, the one at `seat`.
    #[inline]
    pub(crate) fn only(self, seat: SeatIndex) -> Self {
        Self { sleepers: self.sleepers & seat.bit(), bells: self.bells & seat.bit() }
    }

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

/// Takes all of the first `posted` posts that were not taken.
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
