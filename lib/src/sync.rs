//! The one door to atomics: the machine's, or loom's when a model explores them.
//!
//! Everything that lives in shared memory is made of [`Line`]s, and every word of a line is atomic, so no data structure
//! of this crate ever holds a plain reference into memory that another process writes. Only pool buffers are plain bytes,
//! and those are reached through the loan or message that holds them exclusively.

// Aliases and not re-exports: clippy's `disallowed_types` looks through a `pub use`.
#[cfg(not(loom))]
mod word {
    #![allow(clippy::disallowed_types, reason = "this is the facade that the rule sends everybody to")]
    /// A 64-bit word that several threads or processes write.
    pub(crate) type AtomicU64 = core::sync::atomic::AtomicU64;
    pub(crate) use core::sync::atomic::fence;
    pub(crate) fn spin() {
        core::hint::spin_loop();
    }
}
#[cfg(loom)]
mod word {
    pub type AtomicU64 = loom::sync::atomic::AtomicU64;
    pub(crate) use loom::sync::atomic::fence;
    pub(crate) fn spin() {
        loom::thread::yield_now();
    }
}

pub(crate) use core::sync::atomic::Ordering;
pub(crate) use word::AtomicU64;
pub(crate) use word::{fence, spin};

/// Words in a [`Line`].
pub(crate) const WORDS_PER_LINE: usize = 8;
/// Bytes in a [`Line`] as it lies in shared memory: the cache line of x86-64 and of most aarch64 cores.
pub(crate) const LINE_BYTES: usize = 64;

/// One cache line of shared memory: the unit in which every table of a segment is laid out.
///
/// Tables count in lines and not in bytes, because loom's atomics are larger than the machine's.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Line([AtomicU64; WORDS_PER_LINE]);

#[cfg(not(loom))]
const _: () = assert!(size_of::<Line>() == LINE_BYTES && align_of::<Line>() == LINE_BYTES);

impl Line {
    /// A line of zeroes, which is what fresh shared memory holds.
    #[must_use]
    pub(crate) fn zeroed() -> Self {
        Self(core::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// The `i`-th word.
    #[inline]
    #[must_use]
    pub(crate) fn word(&self, i: usize) -> &AtomicU64 {
        &self.0[i]
    }
}
