//! The only source of atomics: the machine's, or loom's when a model explores them.
//!
//! Everything in shared memory consists of [`Line`]s, and every word of a line is atomic, so no data structure of this
//! crate holds a plain reference into memory that another process writes. Only pool buffers are plain bytes, and those are
//! reached through the loan or message that holds them exclusively.

// Aliases and not re-exports: clippy's `disallowed_types` looks through a `pub use`.
#[cfg(not(loom))]
mod word {
    #![allow(clippy::disallowed_types, reason = "the facade that the rule refers to")]
    /// A 64-bit word that several threads or processes write.
    pub(crate) type AtomicU64 = core::sync::atomic::AtomicU64;
    pub(crate) use core::sync::atomic::fence;
    pub(crate) use std::sync::{Mutex, MutexGuard};
    /// Stores a word that others change by exchange.
    #[inline(always)]
    pub(crate) fn overwrite(word: &AtomicU64, value: u64, order: core::sync::atomic::Ordering) {
        word.store(value, order);
    }
    pub(crate) fn spin() {
        core::hint::spin_loop();
    }
    /// The word as the kernel sees it.
    pub(crate) fn machine_word(word: &AtomicU64) -> &AtomicU64 {
        word
    }
}
#[cfg(loom)]
mod word {
    use core::sync::atomic::Ordering;
    pub(crate) use loom::sync::{Mutex, MutexGuard};

    /// Loom's atomic word, with a correction.
    ///
    /// For each word, loom remembers the last access and the last write, and looks for races with these alone. A thread
    /// that loads and then exchanges hides what others loaded before, so orders that matter are never tried. So each access
    /// also writes `turn`, for which the last access suffices.
    #[derive(Debug)]
    pub(crate) struct AtomicU64 {
        word: loom::sync::atomic::AtomicU64,
        turn: loom::sync::atomic::AtomicU64,
    }

    impl AtomicU64 {
        pub(crate) fn new(value: u64) -> Self {
            use loom::sync::atomic::AtomicU64 as Word;
            Self { word: Word::new(value), turn: Word::new(0) }
        }

        fn word(&self) -> &loom::sync::atomic::AtomicU64 {
            self.turn.swap(0, Ordering::Relaxed);
            &self.word
        }

        #[track_caller]
        pub(crate) fn load(&self, order: Ordering) -> u64 {
            let order = weakened(order);
            self.word().load(order)
        }

        #[track_caller]
        pub(crate) fn store(&self, value: u64, order: Ordering) {
            let order = weakened(order);
            self.word().store(value, order);
        }

        #[track_caller]
        pub(crate) fn compare_exchange(
            &self,
            current: u64,
            new: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            let (success, failure) = (weakened(success), weakened(failure));
            self.word().compare_exchange(current, new, success, failure)
        }

        #[track_caller]
        pub(crate) fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
            let order = weakened(order);
            self.word().fetch_or(bits, order)
        }

        #[track_caller]
        pub(crate) fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
            let order = weakened(order);
            self.word().fetch_and(bits, order)
        }

        #[track_caller]
        pub(crate) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            let order = weakened(order);
            self.word().fetch_add(value, order)
        }

        #[track_caller]
        pub(crate) fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
            let order = weakened(order);
            self.word().fetch_max(value, order)
        }
    }

    /// Stores a word that others change by exchange. Loom orders a store before an exchange that was executed earlier,
    /// although that exchange read an older store of the same thread, which coherence forbids. So here it is a swap.
    #[track_caller]
    pub(crate) fn overwrite(word: &AtomicU64, value: u64, order: Ordering) {
        let order = weakened(order);
        word.word().swap(value, order);
    }

    /// Weakened if a mutation test asks for it.
    #[cfg(test)]
    use crate::proofs::weaken::weakened;
    #[cfg(not(test))]
    fn weakened(order: Ordering) -> Ordering {
        order
    }

    #[track_caller]
    pub(crate) fn fence(order: Ordering) {
        match weakened(order) {
            Ordering::Relaxed => {}
            order => loom::sync::atomic::fence(order),
        }
    }

    pub(crate) fn spin() {
        loom::thread::yield_now();
    }

    /// The word as the kernel sees it. Models use a condition variable instead.
    #[expect(clippy::disallowed_types, reason = "the machine's")]
    pub(crate) fn machine_word(_word: &AtomicU64) -> &'static core::sync::atomic::AtomicU64 {
        unreachable!("no model calls the kernel")
    }
}

pub(crate) use core::sync::atomic::Ordering;
pub(crate) use word::{AtomicU64, Mutex, MutexGuard};
pub(crate) use word::{fence, machine_word, overwrite, spin};

/// Locks a mutex of this process whose value is valid even if a thread panicked with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Words in a [`Line`].
pub(crate) const WORDS_PER_LINE: usize = 8;
/// Bytes in a [`Line`] as it lies in shared memory: the cache line of x86-64 and of most aarch64 cores.
pub(crate) const LINE_BYTES: usize = 64;

/// One cache line of shared memory: the unit of layout of all tables in a segment.
///
/// Tables count in lines and not in bytes, because loom's atomics are larger than the machine's.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Line([AtomicU64; WORDS_PER_LINE]);

#[cfg(not(loom))]
const _: () = assert!(size_of::<Line>() == LINE_BYTES && align_of::<Line>() == LINE_BYTES);

impl Line {
    /// A line of zeros, as in fresh shared memory.
    #[must_use]
    pub(crate) fn zeroed() -> Self {
        Self(core::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// The word with index `i`.
    #[inline]
    #[must_use]
    pub(crate) fn word(&self, i: usize) -> &AtomicU64 {
        &self.0[i]
    }
}
