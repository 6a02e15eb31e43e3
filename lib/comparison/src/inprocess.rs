//! Queues for threads. They are upper bounds: no shared mapping, no offsets, no crash of the other side.

use std::sync::atomic::AtomicU32;
use std::thread;

use anyhow::Result;
use crossbeam_queue::ArrayQueue;

use crate::harness::{self, Meet};
use crate::measure::{Ctx, Dist, Rx, Tx};
use crate::payload::read;
use crate::report::{Case, Kind};

const DEPTH: usize = 1024;

pub(crate) const CASES: &[Case] = &[
    peer("arrayqueue-rtt", Kind::RoundTrip, 64, |ctx| rtt(ctx, array_queue::<8>)).note(ARRAY),
    peer("arrayqueue-oneway", Kind::OneWay, 64, |ctx| oneway(ctx, array_queue::<8>)).note(ARRAY),
    peer("arrayqueue-op", Kind::Op, 64, |ctx| alone(ctx, array_queue::<8>)).note("push and pop, one thread"),
    peer("arrayqueue-op-u64", Kind::Op, 8, |ctx| alone(ctx, array_queue::<1>))
        .note("push and pop, one thread"),
    peer("rtrb-rtt", Kind::RoundTrip, 64, |ctx| rtt(ctx, rtrb_queue::<8>)).note(RTRB),
    peer("rtrb-oneway", Kind::OneWay, 64, |ctx| oneway(ctx, rtrb_queue::<8>)).note(RTRB),
    peer("rtrb-op", Kind::Op, 64, |ctx| alone(ctx, rtrb_queue::<8>)).note("push and pop, one thread"),
    peer("rtrb-op-u64", Kind::Op, 8, |ctx| alone(ctx, rtrb_queue::<1>)).note("push and pop, one thread"),
];

const ARRAY: &str = "crossbeam 0.3 ArrayQueue of 1024, MPMC, two threads";
const RTRB: &str = "rtrb 0.4 ring of 1024, SPSC, two threads";

const fn peer(name: &'static str, kind: Kind, bytes: usize, run: fn(&Ctx) -> Result<Dist>) -> Case {
    Case::peer(name, kind, bytes, run).one_process()
}

/// The check of a payload received by value.
#[inline(always)]
fn word_of<const W: usize>(payload: &[u64; W]) -> u64 {
    // SAFETY: a local array of W initialised words.
    unsafe { read(payload.as_ptr(), W) }
}

struct Array<'a, const W: usize>(&'a ArrayQueue<[u64; W]>);

impl<const W: usize> Tx for Array<'_, W> {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        while self.0.push([word; W]).is_err() {}
    }
}

impl<const W: usize> Rx for Array<'_, W> {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        loop {
            if let Some(payload) = self.0.pop() {
                return word_of(&payload);
            }
        }
    }
}

struct RtrbTx<const W: usize>(rtrb::Producer<[u64; W]>);

impl<const W: usize> Tx for RtrbTx<W> {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        while self.0.push([word; W]).is_err() {}
    }
}

struct RtrbRx<const W: usize>(rtrb::Consumer<[u64; W]>);

impl<const W: usize> Rx for RtrbRx<W> {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        loop {
            if let Ok(payload) = self.0.pop() {
                return word_of(&payload);
            }
        }
    }
}

/// A queue that lives until the worker's process ends, so that threads may borrow it without counting.
fn array_queue<const W: usize>() -> (Array<'static, W>, Array<'static, W>) {
    let queue: &'static _ = Box::leak(Box::new(ArrayQueue::new(DEPTH)));
    (Array(queue), Array(queue))
}

fn rtrb_queue<const W: usize>() -> (RtrbTx<W>, RtrbRx<W>) {
    let (tx, rx) = rtrb::RingBuffer::new(DEPTH);
    (RtrbTx(tx), RtrbRx(rx))
}

fn rtt<T: Tx + Send, R: Rx + Send>(ctx: &Ctx, queue: fn() -> (T, R)) -> Result<Dist> {
    harness::solo(ctx, || {
        let ((mut there, mut at_peer), (mut back, mut at_home)) = (queue(), queue());
        two_threads(
            ctx,
            move || {
                ctx.echo(&mut back, &mut at_peer);
                None
            },
            move || Some(ctx.ping(&mut there, &mut at_home)),
        )
    })
}

fn oneway<T: Tx + Send, R: Rx + Send>(ctx: &Ctx, queue: fn() -> (T, R)) -> Result<Dist> {
    harness::solo(ctx, || {
        let (mut tx, mut rx) = queue();
        two_threads(
            ctx,
            move || Some(ctx.consume(&mut rx, 1024)),
            move || {
                ctx.produce(&mut tx, 1024);
                None
            },
        )
    })
}

/// Runs `second` in a new thread on the second core and `first` in this one, which is on the first core.
///
/// A panic of either ends the process: its partner would spin until the watchdog came.
fn two_threads(
    ctx: &Ctx,
    second: impl FnOnce() -> Option<Dist> + Send,
    first: impl FnOnce() -> Option<Dist>,
) -> Dist {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        hook(info);
        std::process::abort();
    }));
    let arrived = AtomicU32::new(0);
    thread::scope(|scope| {
        let second = scope.spawn(|| {
            harness::pin(ctx.cores.1);
            Meet::new(&arrived).wait();
            second()
        });
        Meet::new(&arrived).wait();
        let first = first();
        let second = second.join().expect("a panic has ended the process");
        first.or(second).expect("one of the two measures")
    })
}

fn alone<T: Tx, R: Rx>(ctx: &Ctx, queue: fn() -> (T, R)) -> Result<Dist> {
    harness::solo(ctx, || {
        let (mut tx, mut rx) = queue();
        ctx.alone(&mut tx, &mut rx)
    })
}
