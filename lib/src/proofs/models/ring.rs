//! Rings whose positions wrap: more messages than slots, each received once, in order, with its bytes.

use std::sync::Arc;

use super::super::stage::{self, attach, leave, link, loan, receive_batch, send_inline, send_inline_of};
use super::{Bytes, assert_all_free, consume, drain, explore, loan_and_write, receive, send, spawn, until};
use crate::link::endpoint::Endpoint;
use crate::participant::Side::{Primary, Secondary};
use crate::sync::{AtomicU64, Ordering};

fn one_to_one(name: &str, capacity: u32, buffers: u32, count: i32, single: bool) {
    explore(name, move || {
        let core = link(capacity, single, buffers, 0);
        let bytes = Bytes::new(buffers as usize);
        let (producer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
        let sender = {
            let bytes = bytes.clone();
            spawn(move || (1..=count).for_each(|value| send(&producer, &bytes, value)))
        };
        for value in 1..=count {
            assert_eq!(until(|| receive(&consumer, &bytes)), value);
        }
        sender.join().unwrap();
        assert_all_free(&consumer, &bytes);
    });
}

#[test]
fn spsc_capacity_1() {
    one_to_one("spsc_capacity_1", 1, 2, 3, true);
}

#[test]
fn spsc_capacity_2() {
    one_to_one("spsc_capacity_2", 2, 3, 3, true);
}

#[test]
fn mpmc_one_to_one() {
    one_to_one("mpmc_one_to_one", 1, 2, 2, false);
}

fn inline(name: &str, capacity: u32, count: i32, single: bool) {
    explore(name, move || {
        let core = link(capacity, single, 1, 0);
        let bytes = Bytes::new(1);
        let (producer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
        let sender = spawn(move || {
            (1..=count).for_each(|value| until(|| send_inline(&producer, value).ok()));
        });
        for value in 1..=count {
            assert_eq!(until(|| receive(&consumer, &bytes)), value);
        }
        sender.join().unwrap();
    });
}

/// Bytes in both lines of the only slot or cell, and its next message in one line only.
fn two_lines(name: &str, single: bool) {
    explore(name, move || {
        let core = link(1, single, 1, 0);
        let bytes = Bytes::new(1);
        let (producer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
        let sender = spawn(move || {
            for (value, len) in [(1, 112), (2, 48), (3, 56)] {
                until(|| send_inline_of(&producer, value, len).ok());
            }
        });
        for value in 1..=3 {
            assert_eq!(until(|| receive(&consumer, &bytes)), value);
        }
        sender.join().unwrap();
    });
}

#[test]
fn spsc_inline_two_lines() {
    two_lines("spsc_inline_two_lines", true);
}

#[test]
fn mpmc_inline_two_lines() {
    two_lines("mpmc_inline_two_lines", false);
}

#[test]
fn spsc_inline_capacity_1() {
    inline("spsc_inline_capacity_1", 1, 2, true);
}

#[test]
fn spsc_inline_capacity_2() {
    inline("spsc_inline_capacity_2", 2, 3, true);
}

#[test]
fn mpmc_inline_capacity_1() {
    inline("mpmc_inline_capacity_1", 1, 2, false);
}

/// A batch moves `head` once. The slots before it must not be overwritten earlier.
fn batch(name: &str, single: bool, inline: bool) {
    explore(name, move || {
        let core = link(2, single, 3, 0);
        let bytes = Bytes::new(3);
        let (producer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
        let sender = {
            let bytes = bytes.clone();
            spawn(move || {
                for value in 1..=3 {
                    if inline {
                        until(|| send_inline(&producer, value).ok());
                    } else {
                        send(&producer, &bytes, value);
                    }
                }
            })
        };
        let mut values = Vec::new();
        while values.len() < 3 {
            let got = receive_batch(&consumer, 2).unwrap();
            if got.is_empty() {
                loom::thread::yield_now();
            }
            values.extend(got.iter().map(|got| consume(&consumer, &bytes, got)));
        }
        assert_eq!(values, [1, 2, 3]);
        sender.join().unwrap();
    });
}

#[test]
fn spsc_batch() {
    batch("spsc_batch", true, false);
}

#[test]
fn spsc_inline_batch() {
    batch("spsc_inline_batch", true, true);
}

#[test]
fn mpmc_batch() {
    batch("mpmc_batch", false, false);
}

/// Several producers and consumers at once, each with a fixed number of attempts: threads that wait for each other would
/// multiply the schedules without new orders of the ring's own steps. One message is exchanged first, so that positions
/// pass the end of the slots.
fn many(name: &str, capacity: u32, producers: i32, consumers: usize, each: i32) {
    explore(name, move || {
        let buffers = capacity + 2;
        let core = link(capacity, false, buffers, 0);
        let bytes = Bytes::new(buffers as usize);
        let senders: Vec<_> = (0..producers).map(|_| attach(&core, Primary)).collect();
        let first = attach(&core, Secondary);
        send(&senders[0], &bytes, 0);
        assert_eq!(receive(&first, &bytes), Some(0));

        let senders: Vec<_> = std::iter::zip(1.., senders)
            .map(|(p, endpoint)| {
                let bytes = bytes.clone();
                let values = (1..=each).map(move |i| 10 * p + i);
                spawn(move || values.filter(|&value| try_send(&endpoint, &bytes, value)).collect::<Vec<_>>())
            })
            .collect();
        let takers: Vec<_> = (1..consumers)
            .map(|_| {
                let (endpoint, bytes) = (attach(&core, Secondary), bytes.clone());
                spawn(move || (0..each).filter_map(|_| receive(&endpoint, &bytes)).collect::<Vec<_>>())
            })
            .collect();
        let mut mine: Vec<_> = (0..each).filter_map(|_| receive(&first, &bytes)).collect();

        let mut sent: Vec<_> = senders.into_iter().flat_map(|sender| sender.join().unwrap()).collect();
        let mut runs: Vec<_> = takers.into_iter().map(|taker| taker.join().unwrap()).collect();
        mine.extend(drain(&first, &bytes));
        runs.push(mine);
        for run in &runs {
            for p in 1..=producers {
                assert!(run.iter().filter(|&&value| value / 10 == p).is_sorted(), "in order per producer");
            }
        }
        let mut taken = runs.concat();
        taken.sort_unstable();
        sent.sort_unstable();
        assert!(!sent.is_empty(), "an empty ring takes at least one message");
        assert_eq!(taken, sent, "each exactly once");
        assert_all_free(&first, &bytes);
    });
}

/// Tries once to send. Returns `false` if there is no buffer, or no room in the ring.
fn try_send(endpoint: &Endpoint, bytes: &Bytes, value: i32) -> bool {
    let Some(held) = loan_and_write(endpoint, bytes, value) else { return false };
    let sent = stage::send(endpoint, &held);
    assert!(sent || stage::release(endpoint, &held), "a refused message stays the sender's");
    sent
}

#[test]
fn mpmc_two_producers_capacity_1() {
    many("mpmc_two_producers_capacity_1", 1, 2, 1, 1);
}

#[test]
fn mpmc_two_producers_capacity_2() {
    many("mpmc_two_producers_capacity_2", 2, 2, 1, 1);
}

#[test]
fn mpmc_two_consumers_capacity_1() {
    many("mpmc_two_consumers_capacity_1", 1, 1, 2, 1);
}

#[test]
fn mpmc_two_consumers_capacity_2() {
    many("mpmc_two_consumers_capacity_2", 2, 1, 2, 2);
}

/// The producer's role passes from one participant to the next, with all that the last one knew.
#[test]
fn producer_hands_its_role_over() {
    explore("producer_hands_its_role_over", || {
        let core = link(2, true, 3, 0);
        let bytes = Bytes::new(3);
        let (first, second, consumer) =
            (attach(&core, Primary), attach(&core, Primary), attach(&core, Secondary));
        let crate::ring::Ring::Spsc(ring) = &first.outgoing else { unreachable!() };
        first.producer(ring).unwrap();
        let sender = {
            let bytes = bytes.clone();
            spawn(move || {
                send(&first, &bytes, 1);
                leave(&first);
            })
        };
        let next = {
            let bytes = bytes.clone();
            spawn(move || {
                let crate::ring::Ring::Spsc(ring) = &second.outgoing else { unreachable!() };
                until(|| second.producer(ring).ok().map(drop));
                send(&second, &bytes, 2);
            })
        };
        // One look while they work: a consumer that waits for each message would multiply the schedules, and the ring has
        // room for both.
        let mut received = Vec::from_iter(receive(&consumer, &bytes));
        sender.join().unwrap();
        next.join().unwrap();
        received.extend(drain(&consumer, &bytes));
        assert_eq!(received, [1, 2]);
    });
}

/// The consumer's role passes in the same way.
#[test]
fn consumer_hands_its_role_over() {
    explore("consumer_hands_its_role_over", || {
        let core = link(2, true, 3, 0);
        let bytes = Bytes::new(3);
        let producer = attach(&core, Primary);
        let (first, second) = (attach(&core, Secondary), attach(&core, Secondary));
        send(&producer, &bytes, 1);
        send(&producer, &bytes, 2);
        let crate::ring::Ring::Spsc(ring) = &second.incoming else { unreachable!() };
        first.consumer(ring).unwrap();
        let taker = {
            let bytes = bytes.clone();
            spawn(move || {
                assert_eq!(receive(&first, &bytes), Some(1));
                leave(&first);
            })
        };
        until(|| second.consumer(ring).ok().map(drop));
        assert_eq!(until(|| receive(&second, &bytes)), 2);
        taker.join().unwrap();
        assert_eq!(receive(&second, &bytes), None);
        assert!(loan(&second).is_some());
    });
}

/// A consumer that knows of a message finds the ring not empty, even if the producer of an earlier one has not moved `tail`.
#[test]
fn known_message_is_not_overlooked() {
    explore("known_message_is_not_overlooked", || {
        let core = link(2, false, 2, 0);
        let bytes = Bytes::new(2);
        let (first, second, consumer) =
            (attach(&core, Primary), attach(&core, Primary), attach(&core, Secondary));
        let sent = Arc::new(AtomicU64::new(0));
        let other = {
            let bytes = bytes.clone();
            spawn(move || send(&first, &bytes, 1))
        };
        let sender = {
            let (bytes, sent) = (bytes.clone(), Arc::clone(&sent));
            spawn(move || {
                send(&second, &bytes, 2);
                sent.store(1, Ordering::Release);
            })
        };
        let crate::ring::Ring::Mpmc(ring) = &consumer.incoming else { unreachable!() };
        let is_known = sent.load(Ordering::Acquire) == 1;
        assert!(!ring.is_empty_now() || !is_known);
        let received = receive(&consumer, &bytes);
        assert!(received.is_some() || !is_known);
        other.join().unwrap();
        sender.join().unwrap();
        let all = received.into_iter().chain(drain(&consumer, &bytes));
        assert_eq!(all.sum::<i32>(), 3);
        assert!(ring.is_empty_now());
    });
}
