//! NVIPC's array queue (see [`crate::queue`]) over memory of the caller, for applications that use the queue by itself.
#![expect(unsafe_code, reason = "a queue lies where its user says")]

use std::ptr::NonNull;

use crate::layout::{QUEUE_WORDS, queue_bytes};
use crate::memory::Memory;
use crate::queue::IndexQueue;

/// Maximum length of a queue: indices are signed 32-bit words.
const LEN_MAX: u32 = 1 << 24;

/// NVIPC's array queue in memory of the caller: a FIFO of the numbers below its length, each at most once.
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
pub struct ArrayQueue(IndexQueue);

impl ArrayQueue {
    /// Size of a queue of this length in bytes.
    #[must_use]
    pub const fn bytes(len: u32) -> usize {
        queue_bytes(len as usize)
    }

    /// Creates a queue over memory that starts at a multiple of 8.
    ///
    /// Returns `None` if the address is not aligned, or if the length is 0 or above 2^24.
    ///
    /// # Safety
    /// [`bytes`](Self::bytes) bytes at `start` must stay valid as long as the queue is used, and only such queues may
    /// access them.
    #[must_use]
    pub unsafe fn over(start: *mut u8, len: u32) -> Option<Self> {
        if len == 0 || len > LEN_MAX {
            return None;
        }
        // SAFETY: the caller guarantees that the memory is valid for this long.
        let memory = unsafe { Memory::lent(NonNull::new(start)?, Self::bytes(len)) };
        memory.words(0, QUEUE_WORDS + len as usize).map(IndexQueue::new).map(Self)
    }

    /// Maximum number of values that it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// Approximate number of values in the queue.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "the length is approximate, so `is_empty` would be misleading"
    )]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Appends a number. Returns `false` if it is out of range or already queued.
    #[must_use]
    pub fn enqueue(&self, value: u32) -> bool {
        self.0.enqueue(value).is_ok()
    }

    /// Takes the oldest number, or returns `None` if the queue is empty.
    #[must_use]
    pub fn dequeue(&self) -> Option<u32> {
        self.0.dequeue().ok().flatten()
    }

    /// Returns the number after `value`, or the oldest one for `None`. No other thread may use the queue meanwhile.
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

    /// Removes all numbers. No other thread may use the queue meanwhile.
    pub fn clear(&self) {
        self.0.refill([]);
    }
}
