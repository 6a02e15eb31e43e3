//! Process-local buffers for the bytes of received inline messages.
//!
//! If a message carried its bytes with it, they would be copied on each move, and all messages would be larger. So a handle
//! keeps the bytes in buffers of its own, which it reuses.
// UNSAFETY: hands out raw pointers to the buffers, and frees them. A buffer is written only while no message has it.
#![expect(unsafe_code, reason = "buffers are used by one message at a time and outlive it")]

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

use crate::ring::inline::InlineWords;

/// The bytes of one inline message, aligned like the buffers of pools, as a typed value may require.
#[derive(Debug, Default)]
#[repr(align(64))]
struct InlineBuffer(InlineWords);

const _: () = assert!(align_of::<InlineBuffer>() == crate::sync::LINE_BYTES);

/// Free list of buffers for inline messages: as many as one handle ever held at the same time.
#[derive(Debug, Default)]
pub(super) struct InlineBuffers {
    /// The buffer that was returned last. It is the only one if one message is received at a time.
    spare: Cell<Option<NonNull<InlineBuffer>>>,
    free: RefCell<Vec<NonNull<InlineBuffer>>>,
}

// SAFETY: the buffers belong to this value and move with it. A handle with outstanding messages is borrowed and cannot
// move.
unsafe impl Send for InlineBuffers {}

impl InlineBuffers {
    /// Returns a buffer that `fill` has written, for [`give_back`](Self::give_back). `fill` finds the content of its last
    /// use.
    #[inline(always)]
    pub(super) fn put(&self, fill: impl FnOnce(&mut InlineWords)) -> NonNull<u8> {
        let mut place = self.spare.take().unwrap_or_else(|| self.another());
        // SAFETY: the pointer is from a box of `InlineBuffer`, and no message has it.
        fill(&mut unsafe { place.as_mut() }.0);
        place.cast()
    }

    #[cold]
    fn another(&self) -> NonNull<InlineBuffer> {
        self.free.borrow_mut().pop().unwrap_or_else(|| NonNull::from(Box::leak(Box::default())))
    }

    /// Takes a buffer back that `put` returned.
    #[inline]
    pub(super) fn give_back(&self, place: NonNull<u8>) {
        if let Some(other) = self.spare.replace(Some(place.cast())) {
            self.keep(other);
        }
    }

    #[cold]
    fn keep(&self, place: NonNull<InlineBuffer>) {
        self.free.borrow_mut().push(place);
    }
}

impl Drop for InlineBuffers {
    fn drop(&mut self) {
        for place in self.spare.take().into_iter().chain(self.free.take()) {
            free(place.cast());
        }
    }
}

/// Frees a buffer that `put` returned and whose message does not give it back.
pub(super) fn free(place: NonNull<u8>) {
    // SAFETY: allocated in `another` as a box, and no message has it any more.
    drop(unsafe { Box::from_raw(place.cast::<InlineBuffer>().as_ptr()) });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_distinct_while_in_use_and_reused_afterwards() {
        let inline_buffers = InlineBuffers::default();
        let (a, b) = (inline_buffers.put(|words| words.fill(1)), inline_buffers.put(|words| words.fill(2)));
        assert_ne!(a, b);
        inline_buffers.give_back(a);
        inline_buffers.give_back(b);
        let (c, d) = (inline_buffers.put(|words| words.fill(3)), inline_buffers.put(|words| words.fill(4)));
        assert_eq!((c, d), (b, a));
        // SAFETY: `d` was not given back, and was just written.
        assert_eq!(unsafe { d.cast::<u64>().read() }, 4);
        inline_buffers.give_back(c);
        inline_buffers.give_back(d);
    }
}
