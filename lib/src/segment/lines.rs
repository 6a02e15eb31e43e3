//! Windows of cache lines over a mapping.
// UNSAFETY: turns a mapped address range into `&[Line]`. A line consists of atomics only, so the reference is sound
// whatever another process writes there; the range and its alignment are checked when the window is made.
#![expect(unsafe_code, reason = "the only place where mapped memory becomes a reference")]

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use shmesh_sys::sigbus::Mapping;

use crate::sync::Line;

/// Memory of a segment: mapped in production, on the heap for loom, Miri and property tests.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<Line>,
    lines: usize,
    /// The mapping; `None` for memory on the heap.
    map: Option<Mapping>,
}

// SAFETY: the memory is a plain range without thread affinity, and everything reachable through `&Memory` is atomic
// words or raw pointers.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Takes over a mapping. Its length is rounded down to whole lines.
    #[must_use]
    pub(crate) fn mapped(map: impl Into<Mapping>) -> Arc<Self> {
        let map = map.into();
        let base = NonNull::new(map.as_mut_ptr().cast::<Line>()).unwrap_or(NonNull::dangling());
        debug_assert!(base.is_aligned(), "mmap returns page-aligned addresses");
        Arc::new(Self { base, lines: map.len() / size_of::<Line>(), map: Some(map) })
    }

    /// Zeroed heap memory of `lines` lines, for tests and models.
    #[must_use]
    pub(crate) fn heap(lines: usize) -> Arc<Self> {
        let boxed: Box<[Line]> = (0..lines).map(|_| Line::zeroed()).collect();
        let base = NonNull::from(Box::leak(boxed)).cast::<Line>();
        Arc::new(Self { base, lines, map: None })
    }

    /// Whether its file was truncated. Only guarded mappings notice that.
    pub(crate) fn is_damaged(&self) -> bool {
        self.map.as_ref().is_some_and(Mapping::is_damaged)
    }

    /// A window of `count` lines from line `start`. `None` if it does not fit.
    #[must_use]
    pub(crate) fn window(self: &Arc<Self>, start: usize, count: usize) -> Option<Lines> {
        let end = start.checked_add(count)?;
        if end > self.lines {
            return None;
        }
        // SAFETY: `start <= lines`, inside one allocation or mapping.
        let first = unsafe { self.base.add(start) };
        Some(Lines { first, count, memory: Arc::clone(self) })
    }

    /// The address of line `start`, for payload bytes. `None` if `lines` lines from there do not fit.
    pub(crate) fn payload(&self, start: usize, lines: usize) -> Option<NonNull<u8>> {
        let end = start.checked_add(lines)?;
        if end > self.lines {
            return None;
        }
        // SAFETY: `start <= lines`, inside one allocation or mapping.
        Some(unsafe { self.base.add(start) }.cast::<u8>())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.map.is_none() {
            let slice = NonNull::slice_from_raw_parts(self.base, self.lines);
            // SAFETY: `base` and `lines` come from the box leaked in `heap`, and only this frees it.
            drop(unsafe { Box::from_raw(slice.as_ptr()) });
        }
    }
}

/// A checked window of lines that keeps its memory alive. Dereferences to `[Line]`.
#[derive(Clone, Debug)]
pub(crate) struct Lines {
    first: NonNull<Line>,
    count: usize,
    memory: Arc<Memory>,
}

// SAFETY: a window is a shared reference to atomics plus an `Arc` of its owner.
unsafe impl Send for Lines {}
// SAFETY: as above.
unsafe impl Sync for Lines {}

impl Lines {
    /// Zeroed heap lines, for tests and models.
    #[must_use]
    pub(crate) fn heap(count: usize) -> Self {
        let memory = Memory::heap(count);
        Self { first: memory.base, count, memory }
    }

    /// A window inside this one, which must be large enough.
    pub(crate) fn slice(&self, start: usize, count: usize) -> Self {
        let first = NonNull::from(&self[start..][..count]).cast::<Line>();
        Self { first, count, memory: Arc::clone(&self.memory) }
    }
}

impl Deref for Lines {
    type Target = [Line];

    #[inline]
    fn deref(&self) -> &[Line] {
        // SAFETY: the window was checked against its memory, which `memory` keeps alive; a `Line` is valid for any bits
        // and holds atomics only, so writes by others are not data races.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

/// Prefetches `line` in exclusive state, for an atomic exchange that follows soon.
///
/// A locked instruction waits for its line and for all earlier stores; prefetched, several lines arrive at once.
#[inline]
pub(crate) fn prefetch_exclusive(line: &Line) {
    prefetch_exclusive_at(std::ptr::from_ref(line).cast());
}

/// Prefetches `line` for reading, together with another line that is read first.
#[inline]
pub(crate) fn prefetch_shared(line: &Line) {
    let address: *const Line = line;
    #[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
    // SAFETY: a prefetch reads and writes nothing and does not fault, whatever the address.
    unsafe {
        std::arch::asm!("prefetcht0 [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(all(target_arch = "aarch64", not(miri), not(loom)))]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri, loom))]
    let _ = address;
}

/// As [`prefetch_exclusive`], for the first line of a buffer.
#[inline]
pub(crate) fn prefetch_exclusive_at(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
    // SAFETY: a prefetch reads and writes nothing and does not fault, whatever the address.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(all(target_arch = "aarch64", not(miri), not(loom)))]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri, loom))]
    let _ = address;
}
