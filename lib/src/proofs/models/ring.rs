//! Rings that go round: more messages than slots, each taken once, in order, with its bytes.

use super::super::stage::{attach, link, loan, receive_batch, send_inline};
use super::{Bytes, assert_all_free, consume, drain, explore, receive, send, spawn, until};
use crate::participant::Side::{Primary, Secondary};

fn one_to_one(name: &str, capacity: u32, buffers: u32, count: i32, single: bool) {
    explore(name, Some(3), move || {
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
    explore(name, Some(2), move || {
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

/// A batch moves `head` once; the slots before it must not be overwritten earlier.
fn batch(name: &str, single: bool, inline: bool) {
    explore(name, Some(2), move || {
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

/// `producers` send two messages each, `consumers` try to take some; the rest is taken when all is quiet.
fn many(
    name: &str,
    capacity: u32,
    buffers: u32,
    producers: i32,
    consumers: i32,
    each: i32,
    preemptions: usize,
) {
    explore(name, Some(preemptions), move || {
        let core = link(capacity, false, buffers, 0);
        let bytes = Bytes::new(buffers as usize);
        let mut senders = Vec::new();
        for p in 0..producers {
            let (desk, bytes) = (attach(&core, Primary), bytes.clone());
            senders.push(spawn(move || (1..=each).for_each(|i| send(&desk, &bytes, 10 * p + i))));
        }
        let first = attach(&core, Secondary);
        let total = usize::try_from(producers * each).unwrap();
        let mut takers = Vec::new();
        for _ in 1..consumers {
            let (desk, bytes) = (attach(&core, Secondary), bytes.clone());
            takers.push(spawn(move || {
                let mut values = Vec::new();
                for _ in 0..2 {
                    values.extend(receive(&desk, &bytes));
                }
                values
            }));
        }
        let mut runs = Vec::new();
        if consumers == 1 {
            runs.push((0..total).map(|_| until(|| receive(&first, &bytes))).collect::<Vec<_>>());
        } else {
            runs.push((0..total).filter_map(|_| receive(&first, &bytes)).collect());
        }
        // Senders may wait for somebody who takes.
        let mut rest = Vec::new();
        let mut taken: usize = runs.iter().map(Vec::len).sum();
        let others: Vec<Vec<i32>> = takers.into_iter().map(|taker| taker.join().unwrap()).collect();
        taken += others.iter().map(Vec::len).sum::<usize>();
        while taken < total {
            rest.push(until(|| receive(&first, &bytes)));
            taken += 1;
        }
        for sender in senders {
            sender.join().unwrap();
        }
        rest.extend(drain(&first, &bytes));
        runs[0].extend(rest);
        runs.extend(others);
        for run in &runs {
            for p in 0..producers {
                assert!(run.iter().filter(|&&value| value / 10 == p).is_sorted(), "in order per producer");
            }
        }
        let mut all: Vec<_> = runs.concat();
        all.sort_unstable();
        let sent: Vec<_> = (0..producers).flat_map(|p| (1..=each).map(move |i| 10 * p + i)).collect();
        assert_eq!(all, sent, "each exactly once");
        assert_all_free(&first, &bytes);
    });
}

#[test]
fn mpmc_two_producers_capacity_1() {
    many("mpmc_two_producers_capacity_1", 1, 2, 2, 1, 1, 3);
}

#[test]
fn mpmc_two_producers_capacity_2() {
    many("mpmc_two_producers_capacity_2", 2, 4, 2, 1, 2, 2);
}

#[test]
fn mpmc_two_consumers_capacity_1() {
    many("mpmc_two_consumers_capacity_1", 1, 2, 1, 2, 2, 3);
}

#[test]
fn mpmc_two_consumers_capacity_2() {
    many("mpmc_two_consumers_capacity_2", 2, 3, 1, 2, 3, 2);
}

/// The role of a ring's producer passes from hand to hand with everything that its last holder knew.
#[test]
fn a_producer_hands_its_role_over() {
    explore("a_producer_hands_its_role_over", Some(3), || {
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
                first.leave();
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
        assert_eq!(until(|| receive(&consumer, &bytes)), 1);
        assert_eq!(until(|| receive(&consumer, &bytes)), 2);
        sender.join().unwrap();
        next.join().unwrap();
    });
}

/// And so does the consumer's.
#[test]
fn a_consumer_hands_its_role_over() {
    explore("a_consumer_hands_its_role_over", Some(3), || {
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
                first.leave();
            })
        };
        until(|| second.consumer(ring).ok().map(drop));
        assert_eq!(until(|| receive(&second, &bytes)), 2);
        taker.join().unwrap();
        assert_eq!(receive(&second, &bytes), None);
        assert!(loan(&second).is_some());
    });
}
