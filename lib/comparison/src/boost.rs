//! Boost: the message queue of Boost.Interprocess, and the queues of Boost.Lockfree in a managed segment.
//!
//! All of them carry messages by value: a message is written here, copied in, copied out and read here.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::NonNull;

use anyhow::{Context, Result, anyhow};

use crate::harness;
use crate::leftovers::Names;
use crate::measure::{Ctx, Dist, Rx, Tx};
use crate::payload::{BULK, SMALL, fill, read};
use crate::report::{Case, Kind};

pub(crate) const CASES: &[Case] = &[
    Case::peer("boost-spsc-rtt", Kind::RoundTrip, 64, |ctx| rtt::<SMALL>(ctx, c"spsc")).note(SPSC),
    Case::peer("boost-spsc-oneway", Kind::OneWay, 64, |ctx| oneway::<SMALL>(ctx, c"spsc", 1024)).note(SPSC),
    Case::peer("boost-spsc-rtt-64k", Kind::RoundTrip, 65536, |ctx| rtt::<BULK>(ctx, c"spsc")).note(SPSC_BULK),
    Case::peer("boost-spsc-oneway-64k", Kind::Bulk, 65536, |ctx| oneway::<BULK>(ctx, c"spsc", 16))
        .note(SPSC_BULK),
    Case::peer("boost-mpmc-rtt", Kind::RoundTrip, 64, |ctx| rtt::<SMALL>(ctx, c"mpmc")).note(MPMC),
    Case::peer("boost-mpmc-oneway", Kind::OneWay, 64, |ctx| oneway::<SMALL>(ctx, c"mpmc", 1024)).note(MPMC),
    Case::peer("boost-mq-rtt", Kind::RoundTrip, 64, |ctx| rtt::<SMALL>(ctx, c"locked")).note("blocking"),
    Case::peer("boost-mq-rtt-poll", Kind::RoundTrip, 64, |ctx| rtt::<SMALL>(ctx, c"locked-poll"))
        .note("try_send and try_receive"),
    Case::peer("boost-mq-oneway", Kind::OneWay, 64, |ctx| oneway::<SMALL>(ctx, c"locked", 1024))
        .note("blocking, 1024"),
    Case::peer("boost-mq-rtt-64k", Kind::RoundTrip, 65536, |ctx| rtt::<BULK>(ctx, c"locked-poll"))
        .note("try_send and try_receive"),
    Case::peer("boost-mq-oneway-64k", Kind::Bulk, 65536, |ctx| oneway::<BULK>(ctx, c"locked", 16))
        .note("blocking, 16"),
];

const SPSC: &str = "lockfree::spsc_queue of 1024 in a managed segment";
const SPSC_BULK: &str = "lockfree::spsc_queue of 16 in a managed segment";
const MPMC: &str = "lockfree::queue of 1024 in a managed segment";

// Declared as `boost.cpp` defines them; no exception leaves those functions.
unsafe extern "C" {
    fn boost_queue_new(kind: *const c_char, bytes: usize, name: *const c_char) -> *mut c_void;
    fn boost_queue_delete(queue: *mut c_void);
    fn boost_queue_prefault(queue: *mut c_void) -> bool;
    fn boost_queue_send(queue: *mut c_void, message: *const c_void) -> bool;
    fn boost_queue_receive(queue: *mut c_void, message: *mut c_void) -> bool;
    fn boost_error() -> *const c_char;
}

fn last_error() -> String {
    // SAFETY: a string of this thread (`thread_local` in `boost.cpp`), unchanged until its next failure.
    unsafe { CStr::from_ptr(boost_error()) }.to_string_lossy().into_owned()
}

/// A queue that the workers forked after it share.
struct Queue(NonNull<c_void>);

impl Queue {
    fn new<const W: usize>(kind: &CStr, names: &Names, direction: &str) -> Result<Self> {
        let name = CString::new(format!("{}_{direction}", names.prefix())).context("the name of a queue")?;
        // SAFETY: both strings outlive the call.
        let queue = unsafe { boost_queue_new(kind.as_ptr(), W * 8, name.as_ptr()) };
        NonNull::new(queue).map(Self).ok_or_else(|| anyhow!("making a queue: {}", last_error()))
    }

    /// An end of this queue in the calling worker.
    fn end<const W: usize>(&self) -> Result<End<'_, W>> {
        // SAFETY: the queue lives as long as `self`.
        let done = unsafe { boost_queue_prefault(self.0.as_ptr()) };
        if done { Ok(End { queue: self, message: Box::new([1; W]) }) } else { Err(anyhow!(last_error())) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: made by `boost_queue_new`, and used by nothing else in this process any more.
        unsafe { boost_queue_delete(self.0.as_ptr()) }
    }
}

/// One end of a queue of messages of `W` words, with the message that it copies from or to.
struct End<'a, const W: usize> {
    queue: &'a Queue,
    message: Box<[u64; W]>,
}

impl<const W: usize> Tx for End<'_, W> {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        let message = self.message.as_mut_ptr();
        // SAFETY: our own message of W words.
        unsafe { fill(message, W, word) };
        // SAFETY: the queue lives, and its messages have W words.
        let sent = unsafe { boost_queue_send(self.queue.0.as_ptr(), message.cast()) };
        assert!(sent, "sending: {}", last_error());
    }
}

impl<const W: usize> Rx for End<'_, W> {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        let message = self.message.as_mut_ptr();
        // SAFETY: the queue lives, and its messages have W words.
        let received = unsafe { boost_queue_receive(self.queue.0.as_ptr(), message.cast()) };
        assert!(received, "receiving: {}", last_error());
        // SAFETY: our own message of W words.
        unsafe { read(message, W) }
    }
}

fn rtt<const W: usize>(ctx: &Ctx, kind: &CStr) -> Result<Dist> {
    let names = Names::new();
    let there = Queue::new::<W>(kind, &names, "there")?;
    let back = Queue::new::<W>(kind, &names, "back")?;
    harness::round_trips(
        ctx,
        |_| Ok((there.end::<W>()?, back.end::<W>()?)),
        |_| Ok((back.end::<W>()?, there.end::<W>()?)),
    )
}

fn oneway<const W: usize>(ctx: &Ctx, kind: &CStr, batch: u64) -> Result<Dist> {
    let names = Names::new();
    let queue = Queue::new::<W>(kind, &names, "there")?;
    harness::stream(ctx, batch, |_| queue.end::<W>(), |_| queue.end::<W>())
}
