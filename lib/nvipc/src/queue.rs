//! NVIPC's array queue: a linked list in which the slot of a value has the value as its index.
//!
//! A word has an index (`-1`: none) and a counter that grows by one with each link. `head` names the first value and `tail`
//! the last. The slot of a value names the next value, and the slot of the last value names itself. A slot without an index
//! is not in the queue. A dequeue of the only value leaves `head` as it is, and the next enqueue repairs it.
//!
//! The order of the steps, and the steps that a thread completes for another, must be NVIPC's, because both implementations
//! complete each other's. Beyond NVIPC, each index is checked before use, every loop is bounded, and an impossible state is
//! an error.
//!
//! A process that dies between two steps leaves a value that is in no queue, or a value that its queue counts as present.
//! [`values`](IndexQueue::values) and [`refill`](IndexQueue::refill) repair that; no other thread may use the queue meanwhile.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crate::layout::QUEUE_WORDS;
use crate::memory::{AtomicU64, WordArray};

const HEAD: usize = 0;
const TAIL: usize = 1;
const ENQUEUED: usize = 2;
const DEQUEUED: usize = 3;

/// A round fails only if another thread makes progress or a peer writes garbage. After this many failed rounds the queue is
/// treated as damaged.
const ROUNDS_MAX: u32 = 1 << 16;

/// The queue is in a state that no correct user produces.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct WildIndex;

/// The reason why `enqueue` failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum EnqueueError {
    /// The value is queued already, or a process died while it took the value out.
    AlreadyQueued,
    Wild,
}

/// One word of a queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct QueueNode {
    /// `None` is NVIPC's NULL, which is any negative index.
    next: Option<u32>,
    counter: u32,
}

impl QueueNode {
    const EMPTY: Self = Self { next: None, counter: 0 };

    fn of(word: u64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the low half")]
        let next = word as u32;
        Self { next: (next.cast_signed() >= 0).then_some(next), counter: (word >> 32) as u32 }
    }

    fn word(self) -> u64 {
        u64::from(self.counter) << 32 | u64::from(self.next.unwrap_or(u32::MAX))
    }

    /// The word that follows this one and names `next`.
    fn then(self, next: Option<u32>) -> Self {
        Self { next, counter: self.counter.wrapping_add(1) }
    }

    fn is_one_after(self, other: Self) -> bool {
        self.counter == other.counter.wrapping_add(1)
    }
}

/// A FIFO of the values below its length, each at most once.
#[derive(Debug)]
pub(crate) struct IndexQueue {
    words: WordArray<AtomicU64>,
}

impl IndexQueue {
    /// Creates a queue over its words: control words and slots.
    pub(crate) fn new(words: WordArray<AtomicU64>) -> Self {
        debug_assert!(words.len() >= QUEUE_WORDS);
        Self { words }
    }

    /// Number of its slots.
    pub(crate) fn capacity(&self) -> usize {
        self.words.len() - QUEUE_WORDS
    }

    /// Approximate number of values.
    pub(crate) fn len(&self) -> usize {
        let held = self.words[ENQUEUED].load(Relaxed).wrapping_sub(self.words[DEQUEUED].load(Relaxed));
        // The two counters are read at different times, so the difference can be negative.
        usize::try_from(held.cast_signed()).unwrap_or(0).min(self.capacity())
    }

    #[inline]
    fn slot(&self, value: u32) -> Result<&AtomicU64, WildIndex> {
        self.words.get(QUEUE_WORDS + value as usize).ok_or(WildIndex)
    }

    #[inline]
    fn load(word: &AtomicU64) -> QueueNode {
        QueueNode::of(word.load(Acquire))
    }

    #[inline]
    fn exchange(word: &AtomicU64, old: QueueNode, new: QueueNode) -> bool {
        word.compare_exchange(old.word(), new.word(), AcqRel, Relaxed).is_ok()
    }

    /// Appends `value` at the end.
    pub(crate) fn enqueue(&self, value: u32) -> Result<(), EnqueueError> {
        let slot = self.slot(value).map_err(|WildIndex| EnqueueError::Wild)?;
        let before = Self::load(slot);
        if before.next.is_some() {
            return Err(EnqueueError::AlreadyQueued);
        }
        match self.link(value, slot) {
            Ok(()) => {
                self.words[ENQUEUED].fetch_add(1, Relaxed);
                Ok(())
            }
            Err(WildIndex) => {
                // The value was never linked, and must not look queued.
                slot.store(before.word(), Release);
                Err(EnqueueError::Wild)
            }
        }
    }

    fn link(&self, value: u32, slot: &AtomicU64) -> Result<(), WildIndex> {
        let (head, tail) = (&self.words[HEAD], &self.words[TAIL]);
        for _ in 0..ROUNDS_MAX {
            let last = Self::load(tail);
            let place = match last.next {
                None => head,
                Some(value) => self.slot(value)?,
            };
            let there = Self::load(place);
            if Self::load(tail) != last {
                continue;
            }
            if there == last {
                if last.next == Some(value) {
                    return Err(WildIndex);
                }
                let new = last.then(Some(value));
                slot.store(new.word(), Release);
                // A successful exchange makes it part of the queue.
                if Self::exchange(place, last, new) {
                    Self::exchange(tail, last, new);
                    return Ok(());
                }
            } else if there.is_one_after(last) && there.next != last.next {
                if there.next.is_none() {
                    // The last value was taken, and `head` still names it.
                    Self::exchange(head, last, last.then(None));
                } else {
                    self.slot(there.next.unwrap_or(0))?;
                }
                Self::exchange(tail, last, last.then(there.next));
            } else {
                return Err(WildIndex);
            }
        }
        Err(WildIndex)
    }

    /// Whether there was no value at some time during this call. Writes nothing. `false` may also mean that other threads
    /// changed the queue meanwhile, or that it is damaged.
    #[inline]
    pub(crate) fn is_empty_now(&self) -> bool {
        let head = &self.words[HEAD];
        let first = Self::load(head);
        let Some(value) = first.next else { return true };
        self.slot(value).is_ok_and(|slot| Self::load(slot).next.is_none() && Self::load(head) == first)
    }

    /// Takes the first value, or returns `None` if the queue is empty.
    pub(crate) fn dequeue(&self) -> Result<Option<u32>, WildIndex> {
        let (head, tail) = (&self.words[HEAD], &self.words[TAIL]);
        for _ in 0..ROUNDS_MAX {
            let first = Self::load(head);
            let Some(value) = first.next else { return Ok(None) };
            let slot = self.slot(value)?;
            let after = Self::load(slot);
            let last = Self::load(tail);
            if Self::load(head) != first {
                continue;
            }
            let Some(next) = after.next else { return Ok(None) };
            self.slot(next)?;
            if last.next == Some(value) && next != value && after.is_one_after(last) {
                // The next value is linked, and `tail` lags behind.
                Self::exchange(tail, last, last.then(Some(next)));
                continue;
            }
            if last.next.is_none() && first.is_one_after(last) {
                Self::exchange(tail, last, last.then(Some(value)));
            }
            let cleared = QueueNode { next: None, counter: after.counter.wrapping_add(1) };
            if next == value && after.counter == first.counter {
                // The only value: `head` stays, and the next enqueue repairs it.
                if Self::exchange(slot, after, cleared) {
                    self.words[DEQUEUED].fetch_add(1, Relaxed);
                    return Ok(Some(value));
                }
            } else if next != value && after.is_one_after(first) {
                if Self::exchange(head, first, first.then(Some(next))) {
                    slot.store(cleared.word(), Release);
                    self.words[DEQUEUED].fetch_add(1, Relaxed);
                    return Ok(Some(value));
                }
            } else {
                return Err(WildIndex);
            }
        }
        Err(WildIndex)
    }

    /// The values, first to last, each once, as far as the links can be followed. Other threads may change the queue
    /// meanwhile.
    pub(crate) fn values(&self) -> Vec<u32> {
        let mut values = Vec::new();
        let mut seen = vec![false; self.capacity()];
        let mut next = Self::load(&self.words[HEAD]).next;
        while let Some(value) = next {
            let Some(seen) = seen.get_mut(value as usize) else { break };
            let Ok(slot) = self.slot(value) else { break };
            let after = Self::load(slot).next;
            if after.is_none() || std::mem::replace(seen, true) {
                break;
            }
            values.push(value);
            next = after.filter(|after| *after != value);
        }
        values
    }

    /// Makes the queue hold exactly `values`. No other thread may use it meanwhile.
    pub(crate) fn refill(&self, values: impl IntoIterator<Item = u32>) {
        for word in &self.words[QUEUE_WORDS..] {
            word.store(QueueNode::EMPTY.word(), Relaxed);
        }
        for (word, to) in self.words.iter().zip([QueueNode::EMPTY.word(), QueueNode::EMPTY.word(), 0, 0]) {
            word.store(to, Release);
        }
        for value in values {
            let put = self.enqueue(value);
            debug_assert!(put.is_ok(), "{value} is in range and was not in the queue");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::layout::queue_bytes;
    use crate::memory::Memory;

    fn queue(len: usize) -> (Arc<Memory>, IndexQueue) {
        let memory = Memory::heap(queue_bytes(len));
        let queue = IndexQueue::new(memory.words(0, QUEUE_WORDS + len).unwrap());
        queue.refill([]);
        (memory, queue)
    }

    #[test]
    fn words_are_index_and_counter() {
        let (memory, queue) = queue(3);
        let words =
            || memory.words::<AtomicU64>(0, 7).unwrap().iter().map(|w| w.load(Relaxed)).collect::<Vec<_>>();
        let null = 0xffff_ffff;
        assert_eq!(words(), [null, null, 0, 0, null, null, null]);
        queue.enqueue(2).unwrap();
        assert_eq!(words(), [1 << 32 | 2, 1 << 32 | 2, 1, 0, null, null, 1 << 32 | 2]);
        queue.enqueue(0).unwrap();
        assert_eq!(words(), [1 << 32 | 2, 2 << 32, 2, 0, 2 << 32, null, 2 << 32]);
        assert_eq!(queue.dequeue(), Ok(Some(2)));
        assert_eq!(words(), [2 << 32, 2 << 32, 2, 1, 2 << 32, null, 3 << 32 | null]);
        assert_eq!(queue.dequeue(), Ok(Some(0)));
        assert_eq!(words(), [2 << 32, 2 << 32, 2, 2, 3 << 32 | null, null, 3 << 32 | null]);
        assert_eq!(queue.dequeue(), Ok(None));
        queue.enqueue(1).unwrap();
        assert_eq!(words()[..2], [4 << 32 | 1, 4 << 32 | 1], "head was repaired");
    }

    proptest! {
        #[test]
        fn behaves_as_a_fifo_queue(steps in prop::collection::vec(0_u32..12, 0..300)) {
            let (_memory, queue) = queue(8);
            let mut model = VecDeque::new();
            for step in steps {
                if step < 8 {
                    let put = queue.enqueue(step);
                    if model.contains(&step) {
                        prop_assert_eq!(put, Err(EnqueueError::AlreadyQueued));
                    } else {
                        prop_assert_eq!(put, Ok(()));
                        model.push_back(step);
                    }
                } else {
                    prop_assert_eq!(queue.dequeue(), Ok(model.pop_front()));
                }
                prop_assert_eq!(queue.values(), model.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(queue.len(), model.len());
                prop_assert_eq!(queue.is_empty_now(), model.is_empty());
            }
        }

        #[test]
        fn calls_return_for_any_contents(
            words in prop::collection::vec(prop_oneof![any::<u64>(), (0_u64..4, 0_u64..4).prop_map(|(c, n)| c << 32 | n)], 8),
            steps in prop::collection::vec(0_u32..6, 1..20),
        ) {
            let (memory, queue) = queue(4);
            for (word, value) in memory.words::<AtomicU64>(0, 8).unwrap().iter().zip(words) {
                word.store(value, Relaxed);
            }
            for step in steps {
                prop_assert!(queue.values().len() <= 4);
                prop_assert!(queue.len() <= 4);
                if step < 4 {
                    let _ = queue.enqueue(step);
                } else if let Ok(Some(value)) = queue.dequeue() {
                    prop_assert!(value < 4);
                }
            }
            queue.refill([3, 1]);
            prop_assert_eq!(queue.values(), vec![3, 1]);
        }
    }

    #[test]
    fn threads_neither_lose_nor_duplicate_values() {
        let (_memory, a) = queue(16);
        let (_other, b) = queue(16);
        a.refill(0..16);
        std::thread::scope(|scope| {
            for turn in 0..4 {
                let (from, to) = if turn % 2 == 0 { (&a, &b) } else { (&b, &a) };
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        if let Some(value) = from.dequeue().unwrap() {
                            to.enqueue(value).unwrap();
                        }
                    }
                });
            }
        });
        let mut all = [a.values(), b.values()].concat();
        all.sort_unstable();
        assert_eq!(all, (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn queue_of_a_dead_process_is_repaired() {
        let (memory, queue) = queue(4);
        queue.refill(0..4);
        let words = memory.words::<AtomicU64>(0, 8).unwrap();
        // Died after `head` moved and before the slot was cleared: 0 was not delivered, and cannot be enqueued.
        words[HEAD].store(words[QUEUE_WORDS].load(Relaxed), Relaxed);
        assert_eq!(queue.values(), [1, 2, 3]);
        assert_eq!(queue.enqueue(0), Err(EnqueueError::AlreadyQueued));
        queue.refill([1, 2, 3, 0]);
        assert_eq!(queue.dequeue(), Ok(Some(1)));
        assert_eq!(queue.values(), [2, 3, 0]);
    }
}
