//! Where the bytes of inline messages stay after they left their slot.
//!
//! A message that carried its 48 bytes with it would be copied each time it is moved, and all messages would pay for the
//! small ones. So a handle keeps the bytes in places of its own, which it uses again.
// UNSAFETY: hands out raw places and frees them. A place is written only while no message has it.
#![expect(unsafe_code, reason = "places are used by one message at a time and outlive it")]

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

use crate::ring::INLINE_MAX_BYTES;

type Bytes = [u8; INLINE_MAX_BYTES];

/// Places for the bytes of inline messages: as many as one handle ever held at once.
#[derive(Debug, Default)]
pub(super) struct Slab {
    /// The place that was given back last: the only one, for who takes one message at a time.
    spare: Cell<Option<NonNull<Bytes>>>,
    free: RefCell<Vec<NonNull<Bytes>>>,
}

// SAFETY: the places belong to the slab and move with it; a handle with messages out is borrowed and cannot move.
unsafe impl Send for Slab {}

impl Slab {
    /// A place with these bytes in it, for [`give_back`](Self::give_back).
    #[inline]
    pub(super) fn put(&self, words: [u64; 6]) -> NonNull<u8> {
        let place = self.spare.take().unwrap_or_else(|| self.another());
        // SAFETY: the place was allocated for `Bytes`, with the alignment of `u64`, and nobody else has it.
        unsafe { place.cast::<[u64; 6]>().write(words) };
        place.cast()
    }

    #[cold]
    fn another(&self) -> NonNull<Bytes> {
        self.free.borrow_mut().pop().unwrap_or_else(|| NonNull::from(Box::leak(Box::new([0_u64; 6]))).cast())
    }

    /// Takes a place back that `put` gave.
    #[inline]
    pub(super) fn give_back(&self, place: NonNull<u8>) {
        if let Some(other) = self.spare.replace(Some(place.cast())) {
            self.keep(other);
        }
    }

    #[cold]
    fn keep(&self, place: NonNull<Bytes>) {
        self.free.borrow_mut().push(place);
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        for place in self.spare.take().into_iter().chain(self.free.take()) {
            // SAFETY: allocated in `another` as a box of `[u64; 6]`, and back from its message.
            drop(unsafe { Box::from_raw(place.cast::<[u64; 6]>().as_ptr()) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_distinct_while_they_are_out_and_used_again_after() {
        let slab = Slab::default();
        let (a, b) = (slab.put([1; 6]), slab.put([2; 6]));
        assert_ne!(a, b);
        slab.give_back(a);
        slab.give_back(b);
        let (c, d) = (slab.put([3; 6]), slab.put([4; 6]));
        assert_eq!((c, d), (b, a));
        // SAFETY: `d` is out and was just written.
        assert_eq!(unsafe { d.cast::<u64>().read() }, 4);
        slab.give_back(c);
        slab.give_back(d);
    }
}
