//! Mapped files, and checked windows of atomic words over them.
// UNSAFETY: turns mapped address ranges into slices of atomics, which are valid for any bits and any concurrent writer.
// Range and alignment are checked when a window is created.
#![expect(unsafe_code, reason = "the only place where mapped memory becomes a reference")]

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

/// The atomic types of this crate.
mod word {
    #![allow(
        clippy::disallowed_types,
        reason = "the layout has words of both sizes, and no model explores it"
    )]
    /// A 64-bit word that several processes write.
    pub(crate) type AtomicU64 = core::sync::atomic::AtomicU64;
    /// A state that only this process writes.
    pub(crate) type AtomicU8 = core::sync::atomic::AtomicU8;
    /// A 32-bit word that several processes write.
    pub(crate) type AtomicU32 = core::sync::atomic::AtomicU32;
}
pub(crate) use word::{AtomicU8, AtomicU32, AtomicU64};

/// Memory of a segment: mapped, or on the heap for tests.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    len: usize,
    owner: MemoryOwner,
}

#[derive(Debug)]
enum MemoryOwner {
    Map(memmap2::MmapRaw),
    /// Owned by the caller, which keeps it alive.
    Lent,
    #[cfg(test)]
    #[expect(dead_code, reason = "keeps the memory")]
    Heap(Box<[AtomicU64]>),
}

// SAFETY: the memory is a plain range without thread affinity, and through `&Memory` only atomics and raw pointers can be
// reached.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Takes ownership of a mapping.
    pub(crate) fn mapped(map: memmap2::MmapRaw) -> Arc<Self> {
        let base = NonNull::new(map.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Arc::new(Self { base, len: map.len(), owner: MemoryOwner::Map(map) })
    }

    /// Uses memory that the caller owns.
    ///
    /// # Safety
    /// `len` bytes must be valid as long as this or a window of it lives, and must only be accessed by atomics.
    pub(crate) unsafe fn lent(base: NonNull<u8>, len: usize) -> Arc<Self> {
        Arc::new(Self { base, len, owner: MemoryOwner::Lent })
    }

    /// Zeroed heap memory of at least `bytes`.
    #[cfg(test)]
    pub(crate) fn heap(bytes: usize) -> Arc<Self> {
        let boxed: Box<[AtomicU64]> = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        let base = NonNull::from(&boxed[..]).cast();
        Arc::new(Self { base, len: boxed.len() * 8, owner: MemoryOwner::Heap(boxed) })
    }

    /// Gives the memory of a mapping back to the system. Its addresses stay valid, and show zeros.
    pub(crate) fn discard(&self) {
        if let MemoryOwner::Map(map) = &self.owner {
            // If it fails, the memory is kept until this is dropped.
            let _ = shmesh_sys::resident::discard(map);
        }
    }

    /// Size of the memory in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of `len` bytes at `offset`, or `None` if they do not fit.
    pub(crate) fn payload(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: inside the mapping.
        Some(unsafe { self.base.add(offset) })
    }

    /// Returns a window of `count` words at `offset`, or `None` if they do not fit or are not aligned.
    pub(crate) fn words<W: Word>(self: &Arc<Self>, offset: usize, count: usize) -> Option<WordArray<W>> {
        let first = self.payload(offset, count.checked_mul(size_of::<W>())?)?.cast::<W>();
        first.is_aligned().then(|| WordArray { first, count, memory: Arc::clone(self) })
    }
}

/// A type that is valid for any bits and may change at any time.
///
/// # Safety
/// The type must be an atomic integer.
pub(crate) unsafe trait Word {}
// SAFETY: `AtomicU64` is an atomic integer.
unsafe impl Word for AtomicU64 {}
// SAFETY: `AtomicU32` is an atomic integer.
unsafe impl Word for AtomicU32 {}

/// A checked window of words that keeps its memory alive. Dereferences to a slice.
#[derive(Debug)]
pub(crate) struct WordArray<W> {
    first: NonNull<W>,
    count: usize,
    memory: Arc<Memory>,
}

impl<W> WordArray<W> {
    /// The memory that this window is in.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }
}

// SAFETY: a window is a shared reference to atomics and an `Arc` of their owner.
unsafe impl<W: Word> Send for WordArray<W> {}
// SAFETY: as above.
unsafe impl<W: Word> Sync for WordArray<W> {}

impl<W: Word> Deref for WordArray<W> {
    type Target = [W];

    #[inline]
    fn deref(&self) -> &[W] {
        // SAFETY: the window was checked against its memory, which lives as long as this; atomics are valid for any bits.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}
