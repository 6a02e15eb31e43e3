//! Where the bytes of inline messages stay after they left their slot.
//!
//! A message that carried its bytes with it would be copied each time it is moved, and all messages would pay for the
//! small ones. So a handle keeps the bytes in places of its own, which it uses again.
// UNSAFETY: hands out raw places and frees them. A place is written only while no message has it.
#![expect(unsafe_code, reason = "places are used by one message at a time and outlive it")]

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

use crate::ring::inline::InlineWords;

/// The bytes of one inline message, aligned as the buffers of pools are: a typed value may need it.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Place(InlineWords);

const _: () = assert!(align_of::<Place>() == crate::sync::LINE_BYTES);

/// Places for the bytes of inline messages: as many as one handle ever held at once.
#[derive(Debug, Default)]
pub(super) struct InlineBuffers {
    /// The place that was given back last: the only one, for who takes one message at a time.
    spare: Cell<Option<NonNull<Place>>>,
    free: RefCell<Vec<NonNull<Place>>>,
}

// SAFETY: the places belong to the inline_buffers and move with it; a handle with messages out is borrowed and cannot move.
unsafe impl Send for InlineBuffers {}

impl InlineBuffers {
    /// A place that `fill` has written, for [`give_back`](Self::give_back). It finds in it what the last user left.
    #[inline(always)]
    pub(super) fn put(&self, fill: impl FnOnce(&mut InlineWords)) -> NonNull<u8> {
        let mut place = self.spare.take().unwrap_or_else(|| self.another());
        // SAFETY: the place is a box of `Place`, and nobody else has it.
        fill(&mut unsafe { place.as_mut() }.0);
        place.cast()
    }

    #[cold]
    fn another(&self) -> NonNull<Place> {
        self.free.borrow_mut().pop().unwrap_or_else(|| NonNull::from(Box::leak(Box::default())))
    }

    /// Takes a place back that `put` gave.
    #[inline]
    pub(super) fn give_back(&self, place: NonNull<u8>) {
        if let Some(other) = self.spare.replace(Some(place.cast())) {
            self.keep(other);
        }
    }

    #[cold]
    fn keep(&self, place: NonNull<Place>) {
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

/// Frees a place that `put` gave, whose message does not give it back.
pub(super) fn free(place: NonNull<u8>) {
    // SAFETY: allocated in `another` as a box, and no message has it any more.
    drop(unsafe { Box::from_raw(place.cast::<Place>().as_ptr()) });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_distinct_while_they_are_out_and_used_again_after() {
        let inline_buffers = InlineBuffers::default();
        let (a, b) = (inline_buffers.put(|words| words.fill(1)), inline_buffers.put(|words| words.fill(2)));
        assert_ne!(a, b);
        inline_buffers.give_back(a);
        inline_buffers.give_back(b);
        let (c, d) = (inline_buffers.put(|words| words.fill(3)), inline_buffers.put(|words| words.fill(4)));
        assert_eq!((c, d), (b, a));
        // SAFETY: `d` is out and was just written.
        assert_eq!(unsafe { d.cast::<u64>().read() }, 4);
        inline_buffers.give_back(c);
        inline_buffers.give_back(d);
    }
}
