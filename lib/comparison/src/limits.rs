//! Limits of the machine itself: a bare cache line, a bare copy, a bare wake-up.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use anyhow::{Context, Result};

use crate::harness::{self, Shared, checked};
use crate::measure::{Ctx, Dist, Rx, STOP, Tx};
use crate::report::{Case, Group, Kind};

pub(crate) const CASES: &[Case] = &[
    Case::new("cacheline-rtt", Group::Limit, Kind::RoundTrip, 8, cacheline)
        .note("two atomics, each on its own 128 bytes"),
    Case::new("memcpy-64k", Group::Limit, Kind::Copy, 64 << 10, |ctx| copy(ctx, 64 << 10, 16))
        .one_process()
        .note("hot in cache"),
    Case::new("memcpy-1m", Group::Limit, Kind::Copy, 1 << 20, |ctx| copy(ctx, 1 << 20, 1)).one_process(),
    Case::new("memcpy-64m", Group::Limit, Kind::Copy, 64 << 20, |ctx| copy(ctx, 64 << 20, 1))
        .one_process()
        .note("from memory"),
    Case::new("eventfd-rtt", Group::Limit, Kind::RoundTrip, 8, eventfd).note("both sides sleep in read(2)"),
    Case::new("futex-rtt", Group::Limit, Kind::RoundTrip, 8, futex)
        .note("both sides sleep in a shared futex"),
];

/// One direction of the ping-pong: a counter that one side writes and the other polls.
struct BareLine(*const AtomicU64);

impl BareLine {
    fn new(shared: &Shared, offset: usize) -> Self {
        Self(shared.at(offset, 1))
    }
}

impl Tx for BareLine {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        // Zero is "nothing yet". STOP + 1 is zero again, so it goes as itself.
        let value = if word == STOP { STOP } else { word + 1 };
        // SAFETY: inside a mapping that outlives the worker, and only ever used as an atomic.
        unsafe { &*self.0 }.store(value, Ordering::Release);
    }
}

/// The polling side: the line and the last value seen in it.
struct BarePoll(BareLine, u64);

impl Rx for BarePoll {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        loop {
            // SAFETY: as in `send`.
            let value = unsafe { &*self.0.0 }.load(Ordering::Acquire);
            if value != self.1 {
                self.1 = value;
                return if value == STOP { STOP } else { value - 1 };
            }
        }
    }
}

/// The round trip of a bare cache line, which is also the yardstick taken around every other test.
pub(crate) fn cacheline(ctx: &Ctx) -> Result<Dist> {
    let shared = Shared::new(4096)?;
    let half = |to, from| {
        shared.prefault();
        (BareLine::new(&shared, to), BarePoll(BareLine::new(&shared, from), 0))
    };
    harness::pair(
        ctx,
        |meet| {
            let (mut tx, mut rx) = half(0, 128);
            meet.wait();
            Some(ctx.ping(&mut tx, &mut rx))
        },
        |meet| {
            let (mut tx, mut rx) = half(128, 0);
            meet.wait();
            ctx.echo(&mut tx, &mut rx);
            None
        },
    )
}

fn copy(ctx: &Ctx, len: usize, batch: u64) -> Result<Dist> {
    harness::solo(ctx, || {
        let from = vec![1u8; len];
        let mut to = vec![2u8; len];
        ctx.repeat(batch, |_| {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&mut to);
        })
    })
}

/// One direction of the eventfd hand-over; the counter itself carries the message.
struct Bell<'a>(&'a OwnedFd);

/// The largest value that an eventfd's counter takes.
const BELL_STOP: u64 = u64::MAX - 1;

impl Tx for Bell<'_> {
    fn send(&mut self, word: u64) {
        let value = if word == STOP { BELL_STOP } else { word + 1 };
        // SAFETY: the buffer is eight readable bytes.
        let n = unsafe { libc::write(self.0.as_raw_fd(), (&raw const value).cast(), 8) };
        assert!(n == 8, "writing an eventfd: {}", io::Error::last_os_error());
    }
}

impl Rx for Bell<'_> {
    fn recv(&mut self) -> u64 {
        let mut value = 0u64;
        // SAFETY: the buffer is eight writable bytes.
        let n = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut value).cast(), 8) };
        assert!(n == 8, "reading an eventfd: {}", io::Error::last_os_error());
        if value == BELL_STOP { STOP } else { value - 1 }
    }
}

fn eventfd(ctx: &Ctx) -> Result<Dist> {
    let open = || -> Result<OwnedFd> {
        // SAFETY: takes plain numbers only.
        let fd = checked(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) }).context("opening an eventfd")?;
        // SAFETY: the descriptor is new and has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    let (there, back) = (open()?, open()?);
    harness::pair(
        ctx,
        |meet| {
            meet.wait();
            Some(ctx.ping(&mut Bell(&there), &mut Bell(&back)))
        },
        |meet| {
            meet.wait();
            ctx.echo(&mut Bell(&back), &mut Bell(&there));
            None
        },
    )
}

/// One direction of the futex hand-over: the message, and a count of messages to sleep on.
struct Sleeper {
    word: *const AtomicU64,
    count: *const AtomicU32,
    /// The count that the receiver has dealt with.
    seen: u32,
}

impl Sleeper {
    fn new(shared: &Shared, offset: usize) -> Self {
        Self { word: shared.at(offset, 1), count: shared.at(offset + 8, 1), seen: 0 }
    }

    fn futex(&self, operation: libc::c_int, value: u32) -> libc::c_long {
        // SAFETY: the word is an aligned, mapped u32; without a timeout the other arguments are not read.
        unsafe {
            libc::syscall(libc::SYS_futex, self.count, operation, value, std::ptr::null::<libc::timespec>())
        }
    }
}

impl Tx for Sleeper {
    fn send(&mut self, word: u64) {
        // SAFETY: both lie inside a mapping that outlives the worker, and are only ever used as atomics.
        let (place, count) = unsafe { (&*self.word, &*self.count) };
        place.store(word, Ordering::Relaxed);
        // Release "word is there" pairs with the Acquire in `recv`.
        count.fetch_add(1, Ordering::Release);
        self.futex(libc::FUTEX_WAKE, 1);
    }
}

impl Rx for Sleeper {
    fn recv(&mut self) -> u64 {
        // SAFETY: as in `send`.
        let (place, count) = unsafe { (&*self.word, &*self.count) };
        // Acquire pairs with the Release "word is there" in `send`. A count that moved on makes the wait return at once.
        while count.load(Ordering::Acquire) == self.seen {
            self.futex(libc::FUTEX_WAIT, self.seen);
        }
        self.seen = self.seen.wrapping_add(1);
        place.load(Ordering::Relaxed)
    }
}

fn futex(ctx: &Ctx) -> Result<Dist> {
    let shared = Shared::new(4096)?;
    let half = |to, from| {
        shared.prefault();
        (Sleeper::new(&shared, to), Sleeper::new(&shared, from))
    };
    harness::pair(
        ctx,
        |meet| {
            let (mut tx, mut rx) = half(0, 128);
            meet.wait();
            Some(ctx.ping(&mut tx, &mut rx))
        },
        |meet| {
            let (mut tx, mut rx) = half(128, 0);
            meet.wait();
            ctx.echo(&mut tx, &mut rx);
            None
        },
    )
}
