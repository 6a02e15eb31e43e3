//! Broadcast rings: readers that join, hold messages and are overtaken, while a writer frees and overwrites.

use loom::sync::Arc;

use super::super::stage::{self, abandon, attach, broadcast, rules, send_inline_of};
use super::{Bytes, explore, loan_and_write, receive, spawn, until};
use crate::config::SlowReaders::{Skip, Wait};
use crate::link::endpoint::Endpoint;
use crate::participant::Side::{Primary, Secondary};
use crate::ring::Ring;

fn make_free(writer: &Endpoint) {
    let Ring::Broadcast(ring) = &writer.outgoing else { unreachable!() };
    writer.make_free(ring, writer.writer(ring).expect("the role"));
}

/// Sends a message, retrying until there is room.
fn send(writer: &Endpoint, bytes: &Bytes, value: i32) {
    let held = until(|| {
        let held = loan_and_write(writer, bytes, value);
        if held.is_none() {
            make_free(writer);
        }
        held
    });
    until(|| stage::send(writer, &held).then_some(()));
}

/// PASSED: a buffer is not written again before both readers have read it.
#[test]
fn broadcast_to_two() {
    explore("broadcast_to_two", || {
        let core = broadcast(1, rules(Wait, 0), 1, 0);
        let bytes = Bytes::new(1);
        let writer = attach(&core, Primary);
        let readers = [attach(&core, Secondary), attach(&core, Secondary)];
        send(&writer, &bytes, 1);
        let threads = readers.map(|reader| {
            let bytes = bytes.clone();
            spawn(move || {
                assert_eq!(receive(&reader, &bytes), Some(1));
                reader
            })
        });
        // One attempt while they read: threads that wait for each other would multiply the schedules.
        make_free(&writer);
        let early = loan_and_write(&writer, &bytes, 2);
        let readers = threads.map(|thread| thread.join().unwrap());
        match early {
            Some(held) => assert!(stage::send(&writer, &held), "both have read"),
            None => send(&writer, &bytes, 2),
        }
        assert!(readers.iter().all(|reader| receive(reader, &bytes) == Some(2)));
    });
}

/// PASSED: a buffer is not written again while an owned message has it, which another thread releases, also after the
/// reader's handle is dropped.
#[test]
fn owned_message_is_not_overwritten() {
    for (name, slow, leaves) in [
        ("owned_message_is_not_overwritten_wait", Wait, false),
        ("owned_message_is_not_overwritten_wait_and_leave", Wait, true),
        ("owned_message_is_not_overwritten_skip", Skip, false),
        ("owned_message_is_not_overwritten_skip_and_leave", Skip, true),
    ] {
        explore(name, move || {
            let core = broadcast(2, rules(slow, 0), 2, 0);
            let bytes = Bytes::new(2);
            let (writer, reader) = (attach(&core, Primary), attach(&core, Secondary));
            let [first, second] = [1, 2].map(|value| {
                send(&writer, &bytes, value);
                receive_and_own(&reader, &bytes)
            });
            let other = spawn(first);
            let handle = spawn(move || {
                second();
                if leaves {
                    reader.retire();
                }
                reader
            });
            // One attempt while they read, as above.
            make_free(&writer);
            if let Some(held) = loan_and_write(&writer, &bytes, 3) {
                stage::send(&writer, &held);
            }
            other.join().unwrap();
            drop(handle.join().unwrap());
            // Nothing is held any more.
            send(&writer, &bytes, 4);
        });
    }
}

/// Receives a message and makes it independent. The result reads its bytes and releases it, in any thread.
fn receive_and_own(reader: &Endpoint, bytes: &Bytes) -> impl FnOnce() + Send + use<> {
    let got = stage::receive(reader).expect("no damage").expect("it was sent");
    let stage::ReceivedItem::Pooled(held) = got else { unreachable!("all are in buffers") };
    let release = stage::own(reader, &held).expect("a free hold");
    let bytes = bytes.clone();
    move || {
        assert_eq!(bytes.read(held.cell), held.msg_id);
        release();
    }
}

/// JOIN: a newcomer's first message is not overwritten while it joins, whatever the writer does.
#[test]
fn newcomer_keeps_its_first_message() {
    explore("newcomer_keeps_its_first_message", || {
        let core = broadcast(2, rules(Wait, 1), 2, 0);
        let bytes = Bytes::new(2);
        let writer = attach(&core, Primary);
        send(&writer, &bytes, 1);
        let sender = {
            let bytes = bytes.clone();
            spawn(move || {
                for value in 2..=3 {
                    // As often as there is room. A newcomer that reads nothing may block the writer.
                    make_free(&writer);
                    let Some(held) = loan_and_write(&writer, &bytes, value) else { break };
                    if !stage::send(&writer, &held) {
                        break;
                    }
                }
            })
        };
        let reader = attach(&core, Secondary);
        let first = receive(&reader, &bytes).expect("the history has one");
        let rest: Vec<_> = std::iter::from_fn(|| receive(&reader, &bytes)).collect();
        sender.join().unwrap();
        let rest: Vec<_> = rest.into_iter().chain(std::iter::from_fn(|| receive(&reader, &bytes))).collect();
        assert!(
            rest.iter().zip(first + 1..).all(|(value, expected)| *value == expected),
            "{first}, then {rest:?}"
        );
    });
}

/// HOLD: a buffer is not written again while a reader has it, although the writer does not wait.
#[test]
fn held_message_is_not_overwritten() {
    explore("held_message_is_not_overwritten", || {
        let core = broadcast(2, rules(Skip, 0), 2, 0);
        let bytes = Bytes::new(2);
        let (writer, reader) = (attach(&core, Primary), attach(&core, Secondary));
        send(&writer, &bytes, 1);
        let sender = {
            let bytes = bytes.clone();
            spawn(move || {
                for value in 2..=3 {
                    make_free(&writer);
                    let Some(held) = loan_and_write(&writer, &bytes, value) else { break };
                    assert!(stage::send(&writer, &held), "the writer never waits");
                }
            })
        };
        let mut last = 0;
        for _ in 0..2 {
            if let Some(value) = receive(&reader, &bytes) {
                assert!(value > last);
                last = value;
            }
        }
        sender.join().unwrap();
    });
}

/// OVERWRITE: a small message is whole, or of a later position.
#[test]
fn overwritten_inline_message_is_not_torn() {
    explore("overwritten_inline_message_is_not_torn", || {
        let core = broadcast(2, rules(Skip, 0), 1, 0);
        let bytes = Bytes::new(1);
        let (writer, reader) = (attach(&core, Primary), attach(&core, Secondary));
        // Two words and the ids. Loom may return each as any message wrote it.
        send_inline_of(&writer, 1, 16).unwrap();
        let sender = spawn(move || (2..=3).for_each(|value| send_inline_of(&writer, value, 16).unwrap()));
        let early = receive(&reader, &bytes);
        sender.join().unwrap();
        let last = receive(&reader, &bytes);
        assert!(early.is_none_or(|value| last.is_none_or(|last| last > value)), "{early:?}, then {last:?}");
        assert!(early == Some(3) || last == Some(3), "the newest: {early:?}, then {last:?}");
    });
}

/// A writer dies. Its successor knows what readers hold, and frees the rest.
#[test]
fn writers_role_is_inherited() {
    explore("writers_role_is_inherited", || {
        let core = broadcast(2, rules(Wait, 0), 2, 0);
        let bytes = Bytes::new(2);
        let (first, reader) = (attach(&core, Primary), attach(&core, Secondary));
        send(&first, &bytes, 1);
        send(&first, &bytes, 2);
        let dead = abandon(first);
        let next = {
            let bytes = bytes.clone();
            spawn(move || {
                let second = attach(&core, Primary);
                core.reclaim(&dead, second.me.seat, false);
                send(&second, &bytes, 3);
            })
        };
        for value in 1..=3 {
            assert_eq!(until(|| receive(&reader, &bytes)), value);
        }
        next.join().unwrap();
    });
}

/// A reader that detaches has passed all messages. A later reader in the same seat is a different one.
#[test]
fn writer_does_not_wait_for_a_detached_reader() {
    explore("writer_does_not_wait_for_a_detached_reader", || {
        let core = broadcast(1, rules(Wait, 0), 1, 0);
        let bytes = Bytes::new(1);
        let (writer, first) = (attach(&core, Primary), attach(&core, Secondary));
        send(&writer, &bytes, 1);
        let (core, shared) = (Arc::new(core), bytes.clone());
        let reader = {
            let core = Arc::clone(&core);
            spawn(move || {
                assert_eq!(receive(&first, &shared), Some(1));
                stage::leave(&first);
                let second = attach(&core, Secondary);
                let got = receive(&second, &shared);
                assert!(got.is_none_or(|value| value == 2), "{got:?}");
                stage::leave(&second);
            })
        };
        send(&writer, &bytes, 2);
        reader.join().unwrap();
    });
}
