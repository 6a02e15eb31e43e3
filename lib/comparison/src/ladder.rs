//! Steps from the bare rings of `rings.rs` to a pooled message of shmesh, one at a time.
//!
//! Each buffer has a line of its own with an owner word and a descriptor, as in shmesh. Buffers are used in turn, so the
//! claim of a buffer always succeeds; what a step costs is its lines and its locked instructions.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;

use crate::harness::Shared;
use crate::measure::{Ctx, Dist, Rx, Tx};
use crate::payload::{fill, read};
use crate::report::{Case, Group, Kind};
use crate::rings::{DEPTH, FreeSlots, Progress, Ring, SLOTS_AT, oneway, rtt};

/// Plain stores: that a process died, or that two hold a buffer, would stay unnoticed.
const DESCRIBED: u8 = 0;
/// The receiver takes and releases the buffer by exchanges: a peer that was declared dead cannot release it twice.
const RELEASED: u8 = 1;
/// The sender claims the buffer by an exchange, too: any process could be the sender.
const CLAIMED: u8 = 2;

pub(crate) const CASES: &[Case] = &[
    Case::new("described-rtt", Group::Limit, Kind::RoundTrip, 64, round_trip::<DESCRIBED>)
        .note("own: slot, buffer, owner and descriptor by plain stores"),
    Case::new("described-oneway", Group::Limit, Kind::OneWay, 64, stream::<DESCRIBED>),
    Case::new("released-rtt", Group::Limit, Kind::RoundTrip, 64, round_trip::<RELEASED>)
        .note("own: the receiver releases by an exchange"),
    Case::new("released-oneway", Group::Limit, Kind::OneWay, 64, stream::<RELEASED>),
    Case::new("claimed-rtt", Group::Limit, Kind::RoundTrip, 64, round_trip::<CLAIMED>)
        .note("own: the sender claims by an exchange"),
    Case::new("claimed-oneway", Group::Limit, Kind::OneWay, 64, stream::<CLAIMED>),
];

fn round_trip<const STEP: u8>(ctx: &Ctx) -> Result<Dist> {
    rtt(ctx, &OwnedRing::<STEP>::new)
}

fn stream<const STEP: u8>(ctx: &Ctx) -> Result<Dist> {
    oneway(ctx, OwnedRing::<STEP>::new()?, 1024)
}

const WORDS: usize = 8;
/// States in the low bits of an owner word; the rest counts the uses of the buffer.
const FREE: u64 = 0;
const LOANED: u64 = 1;
const BORROWED: u64 = 2;

/// A line for each buffer.
#[repr(C, align(64))]
struct Cell {
    owner: AtomicU64,
    ids: AtomicU64,
    lens: AtomicU64,
}

/// Slot words {sequence: 32, buffer: 32}, cells, and buffers.
struct OwnedRing<const STEP: u8>(Shared);

impl<const STEP: u8> OwnedRing<STEP> {
    const CELLS_AT: usize = SLOTS_AT + (DEPTH * 8).next_multiple_of(4096);
    const BUFFERS_AT: usize = Self::CELLS_AT + DEPTH * size_of::<Cell>();

    fn new() -> Result<Self> {
        Ok(Self(Shared::new(Self::BUFFERS_AT + DEPTH * WORDS * 8)?))
    }

    fn half<F>(&self, flow: F) -> Half<STEP, F> {
        Half {
            slots: self.0.at(SLOTS_AT, DEPTH),
            cells: self.0.at(Self::CELLS_AT, DEPTH),
            buffers: self.0.at(Self::BUFFERS_AT, DEPTH),
            position: 0,
            flow,
        }
    }
}

impl<const STEP: u8> Ring for OwnedRing<STEP> {
    type Tx = Half<STEP, FreeSlots>;
    type Rx = Half<STEP, Progress>;

    fn shared(&self) -> &Shared {
        &self.0
    }

    fn tx(&self) -> Self::Tx {
        self.half(FreeSlots { read: self.0.at(0, 1), seen: 0, depth: DEPTH as u64 })
    }

    fn rx(&self) -> Self::Rx {
        self.half(Progress { read: self.0.at(0, 1), step: DEPTH as u64 / 8 })
    }
}

/// One role of an [`OwnedRing`]; `F` is what it knows about the flow.
struct Half<const STEP: u8, F> {
    slots: *const AtomicU64,
    cells: *const Cell,
    buffers: *mut [u64; WORDS],
    position: u64,
    flow: F,
}

impl<const STEP: u8, F> Half<STEP, F> {
    /// The slot and the cell of the message at a position, and the position's use of its buffer.
    #[inline(always)]
    fn at(&self, position: u64) -> (&AtomicU64, &Cell, u64) {
        let index = position as usize % DEPTH;
        let epoch = position / DEPTH as u64;
        // SAFETY: the index is below DEPTH, the mapping holds that many of both, and both are only used as atomics.
        unsafe { (&*self.slots.add(index), &*self.cells.add(index), epoch << 2) }
    }

    #[inline(always)]
    fn buffer(&self, index: u64) -> *mut u64 {
        // SAFETY: inside the mapping, which holds DEPTH buffers.
        unsafe { self.buffers.add(index as usize % DEPTH) }.cast()
    }
}

/// Changes an owner word that must be `from`: by a plain store before the step `first`, by an exchange from it on.
#[inline(always)]
fn change<const STEP: u8>(owner: &AtomicU64, first: u8, from: u64, to: u64) {
    if STEP < first {
        owner.store(to, Ordering::Release);
    } else {
        let changed = owner.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
        assert!(changed.is_ok(), "two hold a buffer");
    }
}

impl<const STEP: u8> Tx for Half<STEP, FreeSlots> {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        self.flow.wait(self.position);
        let (slot, cell, epoch) = self.at(self.position);
        change::<STEP>(&cell.owner, CLAIMED, epoch | FREE, epoch | LOANED);
        // SAFETY: there was room, so the consumer is done with this buffer.
        unsafe { fill(self.buffer(self.position), WORDS, word) };
        cell.ids.store(word, Ordering::Relaxed);
        cell.lens.store(WORDS as u64 * 8, Ordering::Relaxed);
        // Release "buffer and descriptor are whole" pairs with the Acquire in `recv`.
        slot.store(((self.position + 1) << 32) | (self.position % DEPTH as u64), Ordering::Release);
        self.position += 1;
    }
}

impl<const STEP: u8> Rx for Half<STEP, Progress> {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        let (slot, cell, epoch) = self.at(self.position);
        let position = self.position + 1;
        let index = loop {
            // Acquire pairs with the Release in `send`.
            let slot = slot.load(Ordering::Acquire);
            if slot >> 32 == position & u64::from(u32::MAX) {
                break slot & u64::from(u32::MAX);
            }
        };
        assert!(cell.lens.load(Ordering::Relaxed) == WORDS as u64 * 8, "another length");
        change::<STEP>(&cell.owner, RELEASED, epoch | LOANED, epoch | BORROWED);
        // SAFETY: `buffer` keeps the index below DEPTH; published, and not overwritten before we say that it was read.
        let word = unsafe { read(self.buffer(index), WORDS) };
        assert!(cell.ids.load(Ordering::Relaxed) == word, "ids of another message");
        change::<STEP>(&cell.owner, RELEASED, epoch | BORROWED, (epoch + 4) | FREE);
        self.flow.note(position);
        self.position = position;
        word
    }
}
