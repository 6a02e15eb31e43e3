//! Our own minimal primitives: what a message costs when nothing but the message moves.
//!
//! Both rings have one producer and one consumer. The consumer polls the slot itself, never an index, and says only
//! now and then how far it has read; the producer remembers that and looks again when the ring seems full.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;

use crate::harness::{self, Shared};
use crate::measure::{Ctx, Dist, Rx, Tx};
use crate::payload::{fill, read};
use crate::report::{Case, Group, Kind};

/// Slots of every ring for small messages.
pub(crate) const DEPTH: usize = 1024;
/// Buffers of the ring for 64 KiB.
const BULK_DEPTH: usize = 16;
/// Words of a message inside the slot: with the sequence and one spare word, a cache line.
const INLINE_WORDS: usize = 6;

/// The first two lines of a ring: how many messages the consumer has read, in steps.
pub(crate) const SLOTS_AT: usize = 128;

pub(crate) const CASES: &[Case] = &[
    Case::new("inline-rtt", Group::Limit, Kind::RoundTrip, 48, |ctx| rtt(ctx, &InlineRing::new))
        .note("own: sequence and payload in one cache line"),
    Case::new("inline-oneway", Group::Limit, Kind::OneWay, 48, |ctx| oneway(ctx, InlineRing::new()?, 1024))
        .note("own: sequence and payload in one cache line, ring of 1024"),
    Case::new("inline-op", Group::Limit, Kind::Op, 48, |ctx| alone(ctx, InlineRing::new()?))
        .note("own: push and pop"),
    Case::new("pooled-rtt", Group::Limit, Kind::RoundTrip, 64, |ctx| rtt(ctx, &PooledRing::<8>::small))
        .note("own: slot word and buffer"),
    Case::new("pooled-oneway", Group::Limit, Kind::OneWay, 64, |ctx| {
        oneway(ctx, PooledRing::<8>::small()?, 1024)
    })
    .note("own: slot word and buffer, ring of 1024, buffers freed in steps of 128"),
    Case::new("pooled-op", Group::Limit, Kind::Op, 64, |ctx| alone(ctx, PooledRing::<8>::small()?))
        .note("own: push and pop with payload"),
    Case::new("pooled-rtt-64k", Group::Limit, Kind::RoundTrip, 65536, |ctx| {
        rtt(ctx, &PooledRing::<8192>::bulk)
    })
    .note("own: slot word and buffer, filled and read on both sides"),
    Case::new("fill-read-64k", Group::Limit, Kind::Bulk, 65536, |ctx| {
        oneway(ctx, PooledRing::<8192>::bulk()?, 16)
    })
    .note("own: the best primitive, ring of 16 buffers"),
];

/// A ring with its two roles.
pub(crate) trait Ring {
    type Tx: Tx;
    type Rx: Rx;
    fn shared(&self) -> &Shared;
    /// The roles. Each may be taken by one thread of one process only.
    fn tx(&self) -> Self::Tx;
    fn rx(&self) -> Self::Rx;
}

pub(crate) fn rtt<R: Ring>(ctx: &Ctx, ring: &dyn Fn() -> Result<R>) -> Result<Dist> {
    let (there, back) = (ring()?, ring()?);
    let ready = || {
        there.shared().prefault();
        back.shared().prefault();
    };
    harness::pair(
        ctx,
        |meet| {
            ready();
            meet.wait();
            Some(ctx.ping(&mut there.tx(), &mut back.rx()))
        },
        |meet| {
            ready();
            meet.wait();
            ctx.echo(&mut back.tx(), &mut there.rx());
            None
        },
    )
}

pub(crate) fn oneway<R: Ring>(ctx: &Ctx, ring: R, batch: u64) -> Result<Dist> {
    harness::pair(
        ctx,
        |meet| {
            ring.shared().prefault();
            meet.wait();
            ctx.produce(&mut ring.tx(), batch);
            None
        },
        |meet| {
            ring.shared().prefault();
            meet.wait();
            Some(ctx.consume(&mut ring.rx(), batch))
        },
    )
}

fn alone<R: Ring>(ctx: &Ctx, ring: R) -> Result<Dist> {
    harness::solo(ctx, || {
        ring.shared().prefault();
        ctx.alone(&mut ring.tx(), &mut ring.rx())
    })
}

/// The producer's knowledge of the room in the ring.
pub(crate) struct FreeSlots {
    pub(crate) read: *const AtomicU64,
    /// How many messages the consumer had read when last looked: may be stale, never too high.
    pub(crate) seen: u64,
    pub(crate) depth: u64,
}

impl FreeSlots {
    /// Waits until the slot for message number `position` is free.
    #[inline(always)]
    pub(crate) fn wait(&mut self, position: u64) {
        while position - self.seen == self.depth {
            // SAFETY: inside the mapping, which the ring keeps, and only ever used as an atomic.
            // Acquire pairs with the Release "done reading" of `Progress::note`.
            self.seen = unsafe { &*self.read }.load(Ordering::Acquire);
        }
    }
}

/// The consumer's side of [`FreeSlots`].
pub(crate) struct Progress {
    pub(crate) read: *const AtomicU64,
    pub(crate) step: u64,
}

impl Progress {
    /// Says that all messages before `position` have been read, once per step.
    #[inline(always)]
    pub(crate) fn note(&self, position: u64) {
        if position.is_multiple_of(self.step) {
            // SAFETY: as in `FreeSlots::wait`, with which this Release "done reading" pairs.
            unsafe { &*self.read }.store(position, Ordering::Release);
        }
    }
}

/// A cache line: the number of the message in it, counted from 1, and the message.
#[repr(C, align(64))]
struct Line {
    sequence: AtomicU64,
    payload: UnsafeCell<[u64; INLINE_WORDS]>,
}

/// Messages inside the slots.
struct InlineRing(Shared);

impl InlineRing {
    fn new() -> Result<Self> {
        Ok(Self(Shared::new(SLOTS_AT + DEPTH * size_of::<Line>())?))
    }
}

impl Ring for InlineRing {
    type Tx = InlineTx;
    type Rx = InlineRx;

    fn shared(&self) -> &Shared {
        &self.0
    }

    fn tx(&self) -> InlineTx {
        let room = FreeSlots { read: self.0.at(0, 1), seen: 0, depth: DEPTH as u64 };
        InlineTx { lines: self.0.at(SLOTS_AT, DEPTH), position: 0, room }
    }

    fn rx(&self) -> InlineRx {
        let progress = Progress { read: self.0.at(0, 1), step: DEPTH as u64 / 8 };
        InlineRx { lines: self.0.at(SLOTS_AT, DEPTH), position: 0, progress }
    }
}

struct InlineTx {
    lines: *const Line,
    position: u64,
    room: FreeSlots,
}

impl Tx for InlineTx {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        self.room.wait(self.position);
        // SAFETY: the masked index is below DEPTH, and the mapping holds DEPTH lines.
        let line = unsafe { &*self.lines.add(self.position as usize % DEPTH) };
        // SAFETY: there was room, so the consumer is done with this line until the sequence is published.
        unsafe { fill(line.payload.get().cast(), INLINE_WORDS, word) };
        self.position += 1;
        // Release "message is whole" pairs with the Acquire in `InlineRx::recv`.
        line.sequence.store(self.position, Ordering::Release);
    }
}

struct InlineRx {
    lines: *const Line,
    position: u64,
    progress: Progress,
}

impl Rx for InlineRx {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        // SAFETY: the masked index is below DEPTH, and the mapping holds DEPTH lines.
        let line = unsafe { &*self.lines.add(self.position as usize % DEPTH) };
        self.position += 1;
        // Acquire pairs with the Release "message is whole" in `InlineTx::send`.
        while line.sequence.load(Ordering::Acquire) != self.position {}
        // SAFETY: published, and not overwritten before we say that it was read.
        let word = unsafe { read(line.payload.get().cast(), INLINE_WORDS) };
        self.progress.note(self.position);
        word
    }
}

/// Slot words {sequence: 32, buffer: 32} and buffers of `W` words, used in turn.
struct PooledRing<const W: usize> {
    shared: Shared,
    depth: usize,
    step: usize,
}

impl<const W: usize> PooledRing<W> {
    fn small() -> Result<Self> {
        Self::new(DEPTH, DEPTH / 8)
    }

    fn bulk() -> Result<Self> {
        Self::new(BULK_DEPTH, 1)
    }

    fn new(depth: usize, step: usize) -> Result<Self> {
        let shared = Shared::new(Self::buffers_at(depth) + depth * W * 8)?;
        Ok(Self { shared, depth, step })
    }

    fn buffers_at(depth: usize) -> usize {
        SLOTS_AT + (depth * 8).next_multiple_of(4096)
    }

    fn half<F>(&self, flow: F) -> PooledHalf<W, F> {
        PooledHalf {
            slots: self.shared.at(SLOTS_AT, self.depth),
            buffers: self.shared.at(Self::buffers_at(self.depth), self.depth),
            mask: self.depth as u64 - 1,
            position: 0,
            flow,
        }
    }
}

impl<const W: usize> Ring for PooledRing<W> {
    type Tx = PooledHalf<W, FreeSlots>;
    type Rx = PooledHalf<W, Progress>;

    fn shared(&self) -> &Shared {
        &self.shared
    }

    fn tx(&self) -> Self::Tx {
        self.half(FreeSlots { read: self.shared.at(0, 1), seen: 0, depth: self.depth as u64 })
    }

    fn rx(&self) -> Self::Rx {
        self.half(Progress { read: self.shared.at(0, 1), step: self.step as u64 })
    }
}

/// One role of a [`PooledRing`]; `F` is what it knows about the flow.
struct PooledHalf<const W: usize, F> {
    slots: *const AtomicU64,
    buffers: *mut [u64; W],
    mask: u64,
    position: u64,
    flow: F,
}

impl<const W: usize> Tx for PooledHalf<W, FreeSlots> {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        self.flow.wait(self.position);
        let index = self.position & self.mask;
        // SAFETY: the index is below the depth; there was room, so the consumer is done with this buffer.
        unsafe { fill(self.buffers.add(index as usize).cast(), W, word) };
        self.position += 1;
        // SAFETY: the index is below the depth, and the mapping holds that many slots.
        let slot = unsafe { &*self.slots.add(index as usize) };
        // Release "buffer is whole" pairs with the Acquire in `recv`.
        slot.store(self.position << 32 | index, Ordering::Release);
    }
}

impl<const W: usize> Rx for PooledHalf<W, Progress> {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        // SAFETY: the masked index is below the depth, and the mapping holds that many slots.
        let slot = unsafe { &*self.slots.add((self.position & self.mask) as usize) };
        self.position += 1;
        let index = loop {
            // Acquire pairs with the Release "buffer is whole" in `send`.
            let slot = slot.load(Ordering::Acquire);
            if slot >> 32 == self.position & u64::from(u32::MAX) {
                break slot & self.mask;
            }
        };
        // SAFETY: masked, so below the depth; published, and not overwritten before we say that it was read.
        let word = unsafe { read(self.buffers.add(index as usize).cast(), W) };
        self.flow.note(self.position);
        word
    }
}
