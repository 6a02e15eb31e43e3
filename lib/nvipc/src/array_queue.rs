//! The queue of [`crate::queue`] for others: NVIPC's programs use it in memory of their own.
#![expect(unsafe_code, reason = "a queue lies where its user says")]

use std::ptr::NonNull;

use crate::layout::{QUEUE_WORDS, queue_bytes};
use crate::memory::Memory;
use crate::queue::Queue;

/// Longest queue: indices are signed words of 32 bits.
const LEN_MAX: u32 = 1 << 24;

/// NVIPC's array queue in memory of the caller: numbers below its length, each at most once, first in, first out.
///
/// Any thread of any process that has the memory may use it at any time.
///
/// ```
/// use shmesh_nvipc_wire::ArrayQueue;
/// let mut memory = vec![0_u64; ArrayQueue::bytes(8) / 8];
/// // SAFETY: the memory outlives the queue, and nothing else uses it.
/// let queue = unsafe { ArrayQueue::over(memory.as_mut_ptr().cast(), 8) }.expect("aligned, and not too long");
/// queue.clear();
/// assert!(queue.enqueue(5) && queue.enqueue(2) && !queue.enqueue(5) && !queue.enqueue(8));
/// assert_eq!(queue.after(None), Some(5));
/// assert_eq!(queue.after(Some(5)), Some(2));
/// assert_eq!((queue.dequeue(), queue.dequeue(), queue.dequeue()), (Some(5), Some(2), None));
/// ```
#[derive(Debug)]
pub struct ArrayQueue(Queue);

impl ArrayQueue {
    /// Bytes of a queue of this length.
    #[must_use]
    pub const fn bytes(len: u32) -> usize {
        queue_bytes(len as usize)
    }

    /// A queue over memory that begins at a multiple of 8. `None` if it does not, or if the length is 0 or above 2^24.
    ///
    /// # Safety
    /// [`bytes`](Self::bytes) bytes lie there for as long as the queue is used, and only such queues access them.
    #[must_use]
    pub unsafe fn over(start: *mut u8, len: u32) -> Option<Self> {
        if len == 0 || len > LEN_MAX {
            return None;
        }
        // SAFETY: the caller's promise.
        let memory = unsafe { Memory::lent(NonNull::new(start)?, Self::bytes(len)) };
        memory.words(0, QUEUE_WORDS + len as usize).map(Queue::new).map(Self)
    }

    /// How many numbers it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// About how many it holds.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "nobody may act on an approximate `is_empty`")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Puts a number at the end. `false`: it is not below the length, or is in the queue.
    #[must_use]
    pub fn enqueue(&self, value: u32) -> bool {
        self.0.enqueue(value).is_ok()
    }

    /// Takes the oldest. `None`: there is none.
    #[must_use]
    pub fn dequeue(&self) -> Option<u32> {
        self.0.dequeue().ok().flatten()
    }

    /// The number after `value`, or the oldest of all; for who is alone.
    #[must_use]
    pub fn after(&self, value: Option<u32>) -> Option<u32> {
        let values = self.0.values();
        match value {
            None => values.first().copied(),
            Some(value) => {
                values.iter().position(|at| *at == value).and_then(|at| values.get(at + 1)).copied()
            }
        }
    }

    /// Empties it; for who is alone.
    pub fn clear(&self) {
        self.0.refill([]);
    }
}
