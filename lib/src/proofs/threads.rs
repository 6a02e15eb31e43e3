//! Real threads on a heap link, with payload written and read through the pointers of production code. Small enough for
//! Miri, which finds undefined behaviour and every access that is not ordered.

#![allow(clippy::disallowed_types, reason = "counts of the test itself")]

use std::sync::atomic::{AtomicU64 as Count, Ordering};

use super::stage::{
    HeldBuffers, ReceivedItem, Release, abandon, attach, broadcast, link, loan, loan_with, own, receive,
    receive_batch, release, release_anywhere, rules, send, send_inline_of,
};
use crate::config::SlowReaders;
use crate::link::endpoint::Endpoint;
use crate::participant::Side::{Primary, Secondary};
use crate::ring::Ring;

const MESSAGES: i32 = if cfg!(miri) { 12 } else { 5_000 };

#[expect(unsafe_code, reason = "the bytes of a buffer that the caller holds exclusively")]
mod bytes {
    use super::{Endpoint, HeldBuffers};

    pub(super) fn write(endpoint: &Endpoint, held: &HeldBuffers) {
        let value = u64::from(held.msg_id.cast_unsigned());
        // SAFETY: the buffer has 64 bytes, and its owner word gives it to this loan alone.
        unsafe { endpoint.msg_pool().buffer(held.cell).cast::<u64>().write(value) };
        if let Some((pool, index)) = held.data {
            let buffer = endpoint.core.pool(pool).expect("it was loaned from there").buffer(index);
            // SAFETY: as above.
            unsafe { buffer.cast::<u64>().add(7).write(!value) };
        }
    }

    pub(super) fn check(endpoint: &Endpoint, held: &HeldBuffers) {
        let value = u64::from(held.msg_id.cast_unsigned());
        // SAFETY: the buffer has 64 bytes, written before it was sent, and this message holds it.
        assert_eq!(unsafe { endpoint.msg_pool().buffer(held.cell).cast::<u64>().read() }, value);
        if let Some((pool, index)) = held.data {
            let buffer = endpoint.core.pool(pool).expect("it was loaned from there").buffer(index);
            // SAFETY: as above.
            assert_eq!(unsafe { buffer.cast::<u64>().add(7).read() }, !value);
        }
    }
}

fn until<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        std::thread::yield_now();
    }
}

/// Every third message is inline, the others have DATA.
fn send_all(endpoint: &Endpoint, first: i32) {
    let free = || match &endpoint.outgoing {
        Ring::Broadcast(ring) => endpoint.make_free(ring, endpoint.writer(ring).expect("the role")),
        _ => false,
    };
    for id in first..first + MESSAGES {
        if id % 3 == 0 {
            // In one line and in two.
            let len = if id % 2 == 0 { 48 } else { 112 };
            until(|| send_inline_of(endpoint, id, len).ok());
            continue;
        }
        let mut held = until(|| {
            let held = loan_with(endpoint).and_then(Result::ok);
            if held.is_none() {
                free();
            }
            held
        });
        held.msg_id = id;
        bytes::write(endpoint, &held);
        until(|| send(endpoint, &held).then_some(()));
    }
}

fn finish(endpoint: &Endpoint, got: &ReceivedItem) -> u64 {
    match got {
        ReceivedItem::Pooled(held) => {
            bytes::check(endpoint, held);
            assert!(release(endpoint, held));
        }
        ReceivedItem::Inline(id, first, last) => {
            assert_eq!(
                (*first, *last),
                (u64::from(id.cast_unsigned()), u64::from(id.cast_unsigned())),
                "torn"
            );
        }
    }
    u64::from(got.msg_id().cast_unsigned())
}

#[test]
fn one_to_one() {
    let core = link(2, true, 3, 3);
    let (producer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
    std::thread::scope(|scope| {
        scope.spawn(move || send_all(&producer, 1));
        for id in 1..=MESSAGES {
            let got = until(|| receive(&consumer).expect("no damage"));
            assert_eq!(got.msg_id(), id);
            finish(&consumer, &got);
        }
    });
}

/// Owned messages: a third thread reads and releases what the consumer received.
#[test]
fn released_in_another_thread() {
    let core = link(2, true, 3, 3);
    let (producer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
    let reader = attach(&core, Secondary);
    let (to_reader, received) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || send_all(&producer, 1));
        scope.spawn(move || {
            for held in received {
                bytes::check(&reader, &held);
                assert!(release_anywhere(&reader.core, &held));
            }
        });
        for id in 1..=MESSAGES {
            let got = until(|| receive(&consumer).expect("no damage"));
            assert_eq!(got.msg_id(), id);
            if let ReceivedItem::Pooled(held) = got {
                to_reader.send(held).expect("the reader runs");
            }
        }
        drop(to_reader);
    });
}

#[test]
fn many_to_many() {
    let core = link(2, false, 5, 5);
    let (count, sum) = (Count::new(0), Count::new(0));
    let total = 2 * u64::from(MESSAGES.cast_unsigned());
    let endpoints: [_; 2] = std::array::from_fn(|_| (attach(&core, Primary), attach(&core, Secondary)));
    std::thread::scope(|scope| {
        for (i, (producer, consumer)) in (0..).zip(endpoints) {
            scope.spawn(move || send_all(&producer, 1 + i * MESSAGES));
            let (count, sum) = (&count, &sum);
            scope.spawn(move || {
                let mut last = [0; 2];
                while count.load(Ordering::Relaxed) < total {
                    let all = if i == 0 {
                        receive(&consumer).expect("no damage").into_iter().collect()
                    } else {
                        receive_batch(&consumer, 2).expect("no damage")
                    };
                    for got in &all {
                        let id = got.msg_id();
                        let producer = usize::from(id > MESSAGES);
                        assert!(id > last[producer], "in order per producer");
                        last[producer] = id;
                        sum.fetch_add(finish(&consumer, got), Ordering::Relaxed);
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                    if all.is_empty() {
                        std::thread::yield_now();
                    }
                }
            });
        }
    });
    assert_eq!((count.into_inner(), sum.into_inner()), (total, total * (total + 1) / 2));
}

/// Each reader gets every message, and a message is kept until both have read it.
#[test]
fn one_to_all() {
    let core = broadcast(4, rules(SlowReaders::Wait, 0), 3, 3);
    let (writer, readers) = (attach(&core, Primary), [attach(&core, Secondary), attach(&core, Secondary)]);
    std::thread::scope(|scope| {
        scope.spawn(move || send_all(&writer, 1));
        for reader in readers {
            scope.spawn(move || {
                let mut held = None;
                for id in 1..=MESSAGES {
                    let got = until(|| receive(&reader).expect("no damage"));
                    assert_eq!(got.msg_id(), id);
                    // The bytes do not change while the next message is received.
                    if let Some(held) = held.replace(got) {
                        finish(&reader, &held);
                    }
                }
                finish(&reader, &held.expect("the last one"));
            });
        }
    });
}

/// Owned messages: a third thread reads and releases what the reader received, also after the reader's handle is dropped.
#[test]
fn broadcast_messages_released_in_another_thread() {
    for slow in [SlowReaders::Wait, SlowReaders::Skip] {
        let core = broadcast(4, rules(slow, 0), 12, 12);
        let (writer, reader, other) =
            (attach(&core, Primary), attach(&core, Secondary), attach(&core, Secondary));
        // It reads nothing, and must not hold the writer up.
        other.retire();
        let (to_other, received) = std::sync::mpsc::channel::<(HeldBuffers, Release)>();
        std::thread::scope(|scope| {
            scope.spawn(move || send_all(&writer, 1));
            scope.spawn(move || {
                let mut kept = Vec::new();
                for (held, release) in received {
                    kept.push((held, release));
                    // Not in the order in which they were received.
                    if kept.len() == 2 {
                        for (held, release) in kept.drain(..).rev() {
                            bytes::check(&other, &held);
                            release();
                        }
                    }
                }
                for (held, release) in kept {
                    bytes::check(&other, &held);
                    release();
                }
            });
            let mut last = 0;
            while last < MESSAGES {
                let got = until(|| receive(&reader).expect("no damage"));
                assert!(got.msg_id() > last, "in order, and each once");
                assert!(slow == SlowReaders::Skip || got.msg_id() == last + 1, "each");
                last = got.msg_id();
                match got {
                    ReceivedItem::Pooled(held) => match own(&reader, &held) {
                        Some(release) => to_other.send((held, release)).expect("the other thread runs"),
                        None => {
                            finish(&reader, &ReceivedItem::Pooled(held));
                        }
                    },
                    inline => {
                        finish(&reader, &inline);
                    }
                }
            }
            reader.retire();
            drop(to_other);
        });
        let Ring::Broadcast(ring) = core.outgoing(Primary) else { unreachable!() };
        assert_eq!(ring.readers(&core.seats).count(), 0, "the last owned message unsubscribes");
    }
}

/// Readers for which the writer does not wait get each message whole or not at all.
#[test]
fn one_writer_to_readers_with_skip() {
    for capacity in [2, 16] {
        let core = broadcast(capacity, rules(SlowReaders::Skip, 1), capacity + 6, capacity + 6);
        let (writer, readers) =
            (attach(&core, Primary), [attach(&core, Secondary), attach(&core, Secondary)]);
        std::thread::scope(|scope| {
            scope.spawn(move || send_all(&writer, 1));
            for reader in readers {
                scope.spawn(move || {
                    let (mut last, mut held, mut received) = (0, None, 0);
                    while last < MESSAGES {
                        let got = until(|| receive(&reader).expect("no damage"));
                        assert!(got.msg_id() > last, "in order, and each once");
                        last = got.msg_id();
                        received += 1;
                        // The bytes do not change while the next message is received.
                        if let Some(held) = held.replace(got) {
                            finish(&reader, &held);
                        }
                    }
                    finish(&reader, &held.expect("the last one"));
                    let all = u64::try_from(MESSAGES).expect("a count");
                    assert_eq!(reader.reader().lost() + received, all);
                });
            }
        });
    }
}

/// Participants die with what they hold, two others recover it, and a fourth keeps sending to itself.
#[test]
fn recovery_beside_traffic() {
    let core = link(2, false, 6, 6);
    let rounds = if cfg!(miri) { 3 } else { 200 };
    let (producer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
    let recoverers = [attach(&core, Primary), attach(&core, Secondary)];
    std::thread::scope(|scope| {
        scope.spawn(move || send_all(&producer, 1));
        scope.spawn(move || {
            for id in 1..=MESSAGES {
                let got = until(|| receive(&consumer).expect("no damage"));
                assert_eq!(got.msg_id(), id);
                finish(&consumer, &got);
            }
        });
        for _ in 0..rounds {
            let dead = attach(&core, Primary);
            let mut held = 0;
            for _ in 0..2 {
                if let Some(Ok(loaned)) = loan_with(&dead) {
                    bytes::write(&dead, &loaned);
                    held += 1;
                }
            }
            let dead = abandon(dead);
            let (core, [first, second]) = (&core, &recoverers);
            let (first, second) = (first.me.seat, second.me.seat);
            std::thread::scope(|scope| {
                let other = scope.spawn(move || core.reclaim(&dead, first, false).messages);
                let mine = core.reclaim(&dead, second, false).messages;
                assert_eq!(mine + other.join().unwrap(), held);
            });
        }
    });
}

/// Each thread has at most one buffer at a time, and there are as many buffers, so none may find the pool exhausted.
/// What is released goes to the reserve, from where each loan moves all hints.
#[test]
fn free_buffer_is_found_while_others_move_the_hints() {
    const THREADS: u32 = 3;
    let core = link(1, false, THREADS, 0);
    std::thread::scope(|scope| {
        for seat in 0..THREADS {
            let core = &core;
            scope.spawn(move || {
                let endpoint = attach(core, if seat == 0 { Primary } else { Secondary });
                for round in 0..10 * MESSAGES {
                    let held = loan(&endpoint).unwrap_or_else(|| panic!("exhausted in round {round}"));
                    assert!(release_anywhere(core, &held));
                }
            });
        }
    });
}
