//! Recovery: participants die in every state, and two others recover what they held while a third goes on working. A
//! newcomer takes the seat as soon as it is vacant.

use loom::sync::{Arc, Mutex};
use shmesh_sys::process::Liveness;

use super::super::stage::{
    self, abandon, attach, describe, entry_of, leave, link, loan, loan_with, process, release,
};
use super::{Bytes, assert_all_free, drain, explore, loan_and_write, receive, send, spawn, until};
use crate::link::core::{Core, RecoveryStats};
use crate::link::endpoint::Endpoint;
use crate::participant::Side::{Primary, Secondary};
use crate::participant::{Participant, Role, Side};
use crate::pool::owner::DataOwner;
use crate::ring::{CONSUMER_ROLE, Owners, Ring};
use crate::sync::Ordering;

/// The sum of what two concurrent recoveries did.
fn both(core: &Core, dead: Participant, first: Side, second: Side, live: impl FnOnce()) -> RecoveryStats {
    let (a, b) = (attach(core, first), attach(core, second));
    let late = {
        let core = core.clone();
        spawn(move || core.reclaim(&dead, b.me.seat, false))
    };
    // Beside one recovery and before the other. A third thread finds no more errors and takes a hundred times as long.
    live();
    let a = core.reclaim(&dead, a.me.seat, false);
    let b = late.join().unwrap();
    assert_eq!(a.participants + b.participants, 1, "one of them has recovered it");
    RecoveryStats {
        participants: 1,
        messages: a.messages + b.messages,
        data_buffers: a.data_buffers + b.data_buffers,
        readmitted: a.readmitted + b.readmitted,
        kept: a.kept + b.kept,
    }
}

/// The dead participant held a loan with DATA and a received message. A peer continues to loan.
#[test]
fn dead_loan_is_taken_back_once() {
    explore("dead_loan_is_taken_back_once", || {
        let core = link(1, true, 2, 1);
        let bytes = Bytes::new(2);
        let dead = attach(&core, Primary);
        let peer = attach(&core, Secondary);
        let held = loan_with(&dead).unwrap().unwrap();
        bytes.write(held.cell, 1);
        let dead = abandon(dead);
        let done = both(&core, dead, Primary, Secondary, || {
            if let Some(held) = loan_and_write(&peer, &bytes, 2) {
                assert!(release(&peer, &held));
            }
        });
        assert_eq!((done.messages, done.data_buffers), (1, 1));
        assert_all_free(&peer, &bytes);
    });
}

/// The dead participant held a received message.
fn received(name: &str, single: bool) {
    explore(name, move || {
        let core = link(1, single, 2, 1);
        let bytes = Bytes::new(2);
        let dead = attach(&core, Secondary);
        let peer = attach(&core, Primary);
        let mut held = loan_with(&peer).unwrap().unwrap();
        held.msg_id = 1;
        assert!(stage::send(&peer, &held));
        assert!(stage::receive(&dead).unwrap().is_some());
        let dead = abandon(dead);
        let done = both(&core, dead, Primary, Secondary, || {
            if let Some(held) = loan_and_write(&peer, &bytes, 2) {
                assert!(release(&peer, &held));
            }
        });
        assert_eq!((done.messages, done.data_buffers), (1, 1));
        assert_all_free(&peer, &bytes);
    });
}

#[test]
fn dead_receiver_spsc() {
    received("dead_receiver_spsc", true);
}

#[test]
fn dead_receiver_mpmc() {
    received("dead_receiver_mpmc", false);
}

/// A message that the dead participant had sent is received once, while its buffers are recovered.
fn sent(name: &str, single: bool, until_tail: bool) {
    explore(name, move || {
        let core = link(1, single, 2, 0);
        let bytes = Bytes::new(2);
        let dead = attach(&core, Primary);
        let consumer = attach(&core, Secondary);
        let held = loan_and_write(&dead, &bytes, 1).unwrap();
        if until_tail {
            assert!(stage::send(&dead, &held));
        } else {
            // Died between the exchange on the slot and the one on `tail`.
            describe(&dead, &held);
            core.outgoing(Primary).slot(0).store(entry_of(&held).in_lap(1), Ordering::Release);
        }
        let dead = abandon(dead);
        let done = both(&core, dead, Primary, Secondary, || {
            assert_eq!(receive(&consumer, &bytes), Some(1));
            assert_eq!(receive(&consumer, &bytes), None);
        });
        assert_eq!(done.messages, 0, "it held nothing");
        // The ring still works.
        let producer = attach(&core, Primary);
        send(&producer, &bytes, 2);
        assert_eq!(receive(&consumer, &bytes), Some(2));
        assert_all_free(&producer, &bytes);
    });
}

#[test]
fn dead_sender_spsc() {
    sent("dead_sender_spsc", true, true);
}

#[test]
fn dead_sender_mpmc() {
    sent("dead_sender_mpmc", false, true);
}

#[test]
fn sender_dead_before_tail() {
    sent("sender_dead_before_tail", false, false);
}

/// A message behind another producer's message is kept, although the recoverer has not synchronized with that producer.
#[test]
fn dead_sender_behind_another() {
    explore("dead_sender_behind_another", || {
        let core = link(2, false, 2, 0);
        let bytes = Bytes::new(2);
        let (dead, other) = (attach(&core, Primary), attach(&core, Primary));
        let consumer = attach(&core, Secondary);
        let before = {
            let bytes = bytes.clone();
            spawn(move || send(&other, &bytes, 1))
        };
        send(&dead, &bytes, 2);
        assert_eq!(core.reclaim(&abandon(dead), consumer.me.seat, false).messages, 0);
        before.join().unwrap();
        let mut all = drain(&consumer, &bytes);
        all.sort_unstable();
        assert_eq!(all, [1, 2]);
    });
}

/// Makes `endpoint` the owner of the oldest message on the ring, without moving `head`.
fn take_only(endpoint: &Endpoint) {
    let (_, entry) = endpoint.incoming.queued().next().unwrap();
    let receiving = endpoint.receiving();
    let crate::ring::Look::Here(word) = receiving.look(entry).unwrap() else { panic!("it waits") };
    match &endpoint.incoming {
        Ring::Spsc(ring) => {
            endpoint.consumer(ring).unwrap();
            receiving.take_alone(receiving.cell(entry).unwrap(), word);
        }
        Ring::Mpmc(_) => assert!(receiving.take(entry, word)),
        Ring::Broadcast(_) => unreachable!("its messages change no owner when received"),
    }
}

/// The single consumer dies between the store to the owner word and the one to `head`. The next consumer gets the message,
/// even in the same seat.
fn before_head(name: &str, same_seat: bool) {
    explore(name, move || {
        let core = link(1, true, 2, 0);
        let bytes = Bytes::new(2);
        let dead = attach(&core, Secondary);
        let (producer, late) = (attach(&core, Primary), attach(&core, Primary));
        send(&producer, &bytes, 1);
        take_only(&dead);
        let dead = abandon(dead);
        let early = (!same_seat).then(|| attach(&core, Secondary));
        let second = {
            let core = core.clone();
            spawn(move || core.reclaim(&dead, late.me.seat, false))
        };
        assert_eq!(core.reclaim(&dead, producer.me.seat, false).messages, 0);
        let next = early.unwrap_or_else(|| attach(&core, Secondary));
        assert_eq!(next.me.seat == dead.seat, same_seat);
        assert_eq!(receive(&next, &bytes), Some(1));
        send(&producer, &bytes, 2);
        assert_eq!(receive(&next, &bytes), Some(2));
        assert_eq!(second.join().unwrap().messages, 0);
        assert_all_free(&producer, &bytes);
    });
}

#[test]
fn single_consumer_dead_before_head() {
    before_head("single_consumer_dead_before_head", false);
}

#[test]
fn single_consumer_dead_before_head_and_its_seat() {
    before_head("single_consumer_dead_before_head_and_its_seat", true);
}

/// One of many consumers dies between the exchange on the owner word and the one on `head`. The ring keeps working.
#[test]
fn one_of_many_consumers_dead_before_head() {
    explore("one_of_many_consumers_dead_before_head", || {
        let core = link(1, false, 2, 0);
        let bytes = Bytes::new(2);
        let dead = attach(&core, Secondary);
        let (producer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
        send(&producer, &bytes, 1);
        take_only(&dead);
        let dead = abandon(dead);
        let (late, seat) = (attach(&core, Primary), producer.me.seat);
        let second = {
            let (core, bytes) = (core.clone(), bytes.clone());
            spawn(move || {
                let done = core.reclaim(&dead, late.me.seat, false);
                send(&late, &bytes, 2);
                done
            })
        };
        assert_eq!(receive(&consumer, &bytes).unwrap_or(2), 2);
        let first = core.reclaim(&dead, seat, false);
        let second = second.join().unwrap();
        assert_eq!(first.messages + second.messages, 1);
        assert!(drain(&consumer, &bytes).len() <= 1);
        assert_all_free(&consumer, &bytes);
    });
}

/// A newcomer loans, or receives, in the seat of the dead participant while the second recoverer still runs.
///
/// One thread recovers, attaches and works, so that the other learns of the newcomer by its owner words alone.
fn newcomer(name: &str, single: bool, receives: bool) {
    explore(name, move || {
        let core = link(1, single, 1, 0);
        let bytes = Bytes::new(1);
        let dead = attach(&core, Secondary);
        let (peer, late) = (attach(&core, Primary), attach(&core, Primary));
        if receives {
            send(&peer, &bytes, 3);
        }
        let dead = abandon(dead);
        let second = {
            let core = core.clone();
            spawn(move || core.reclaim(&dead, late.me.seat, false))
        };
        core.reclaim(&dead, peer.me.seat, false);
        let newcomer = attach(&core, Secondary);
        // It is the same seat: our recovery was complete when we attached.
        assert_eq!(newcomer.me.seat, dead.seat);
        if receives {
            let got = stage::receive(&newcomer).unwrap().expect("it was sent");
            assert_eq!(super::consume(&newcomer, &bytes, &got), 3);
        } else {
            let held = loan_and_write(&newcomer, &bytes, 4).expect("it is free");
            assert_eq!(bytes.read(held.cell), 4);
            assert!(release(&newcomer, &held), "it is alive, and keeps what it loaned");
        }
        assert_eq!(second.join().unwrap().messages, 0);
        assert_all_free(&newcomer, &bytes);
    });
}

#[test]
fn newcomer_keeps_its_loan() {
    newcomer("newcomer_keeps_its_loan", true, false);
}

#[test]
fn newcomer_keeps_its_message_spsc() {
    newcomer("newcomer_keeps_its_message_spsc", true, true);
}

#[test]
fn newcomer_keeps_its_message_mpmc() {
    newcomer("newcomer_keeps_its_message_mpmc", false, true);
}

/// A living pair of MSG and DATA never looks orphaned.
#[test]
fn living_pair_is_not_orphaned() {
    explore("living_pair_is_not_orphaned", || {
        let core = link(1, true, 1, 1);
        let dead = abandon(attach(&core, Secondary));
        let (peer, recoverer) = (attach(&core, Primary), attach(&core, Secondary));
        let other = {
            let core = core.clone();
            spawn(move || core.reclaim(&dead, recoverer.me.seat, false))
        };
        let held = loan_with(&peer).unwrap().unwrap();
        assert_eq!(other.join().unwrap().data_buffers, 0);
        let (pool, index) = held.data.unwrap();
        let word = core.pool(pool).unwrap().table.owner(index).load(Ordering::Relaxed);
        assert!(DataOwner(word).belongs_to(held.cell, held.owner), "it was not recovered");
    });
}

/// A consumer that stops between reading a slot and the owner word must not take a later loan of the buffer, although the
/// slot's word matches it as well.
#[test]
fn late_consumer_does_not_take_a_later_loan() {
    explore("late_consumer_does_not_take_a_later_loan", || {
        let core = link(1, false, 1, 0);
        let bytes = Bytes::new(1);
        let (producer, consumer, late) =
            (attach(&core, Primary), attach(&core, Secondary), attach(&core, Secondary));
        send(&producer, &bytes, 1);
        let other = {
            let bytes = bytes.clone();
            spawn(move || receive(&late, &bytes))
        };
        let mine = receive(&consumer, &bytes);
        if mine.is_some() {
            let held = loan(&consumer).unwrap();
            assert!(release(&consumer, &held));
            let held = loan_and_write(&consumer, &bytes, 3).unwrap();
            assert!(release(&consumer, &held), "it was not taken");
        }
        let theirs = other.join().unwrap();
        assert_eq!(mine.into_iter().chain(theirs).chain(drain(&consumer, &bytes)).collect::<Vec<_>>(), [1]);
    });
}

/// A message of a dead participant is received and held, while what the participant held is recovered.
#[test]
fn message_of_the_dead_is_kept() {
    explore("message_of_the_dead_is_kept", || {
        let core = link(1, true, 1, 0);
        let bytes = Bytes::new(1);
        let (dead, consumer, late) =
            (attach(&core, Primary), attach(&core, Secondary), attach(&core, Primary));
        send(&dead, &bytes, 1);
        let dead = abandon(dead);
        let other = {
            let core = core.clone();
            spawn(move || core.reclaim(&dead, late.me.seat, false))
        };
        let got = stage::receive(&consumer).unwrap().unwrap();
        assert_eq!(other.join().unwrap().messages, 0);
        super::consume(&consumer, &bytes, &got);
    });
}

/// A participant that loans a buffer of a dead one has synchronized by the owner word alone, and writes where the dead one
/// wrote.
#[test]
fn bytes_of_the_dead_are_not_written_late() {
    explore("bytes_of_the_dead_are_not_written_late", || {
        let core = link(1, true, 1, 0);
        let bytes = Bytes::new(1);
        let (dead, late, peer) = (attach(&core, Primary), attach(&core, Primary), attach(&core, Secondary));
        let other = {
            let (core, bytes) = (core.clone(), bytes.clone());
            spawn(move || {
                loan_and_write(&dead, &bytes, 1)
                    .map(|_| core.reclaim(&abandon(dead), late.me.seat, false).messages)
            })
        };
        let held = until(|| loan_and_write(&peer, &bytes, 2));
        assert!(release(&peer, &held));
        assert_ne!(other.join().unwrap(), Some(0));
    });
}

/// The successor in a dead participant's role has synchronized by the seat alone, and continues where the role stopped.
#[test]
fn consumers_role_is_inherited() {
    explore("consumers_role_is_inherited", || {
        let core = link(2, true, 2, 0);
        let bytes = Bytes::new(2);
        let (producer, dead) = (attach(&core, Primary), attach(&core, Secondary));
        let (late, heir) = (attach(&core, Primary), attach(&core, Secondary));
        send(&producer, &bytes, 1);
        send(&producer, &bytes, 2);
        let Ring::Spsc(ring) = &heir.incoming else { unreachable!() };
        dead.consumer(ring).unwrap();
        let other = {
            let (core, bytes) = (core.clone(), bytes.clone());
            spawn(move || {
                assert_eq!(receive(&dead, &bytes), Some(1));
                core.reclaim(&abandon(dead), late.me.seat, false)
            })
        };
        until(|| heir.consumer(ring).ok().map(drop));
        assert_eq!(receive(&heir, &bytes), Some(2));
        other.join().unwrap();
    });
}

#[test]
fn producers_role_is_inherited() {
    explore("producers_role_is_inherited", || {
        let core = link(2, true, 2, 0);
        let bytes = Bytes::new(2);
        let (dead, consumer) = (attach(&core, Primary), attach(&core, Secondary));
        let (late, heir) = (attach(&core, Secondary), attach(&core, Primary));
        let Ring::Spsc(ring) = &heir.outgoing else { unreachable!() };
        dead.producer(ring).unwrap();
        let other = {
            let (core, bytes) = (core.clone(), bytes.clone());
            spawn(move || {
                send(&dead, &bytes, 1);
                core.reclaim(&abandon(dead), late.me.seat, false)
            })
        };
        until(|| heir.producer(ring).ok().map(drop));
        send(&heir, &bytes, 2);
        other.join().unwrap();
        assert_eq!(drain(&consumer, &bytes), [1, 2]);
    });
}

/// The participant is evicted while it runs: it releases, or sends, what is being recovered.
fn evicted(name: &str, sends: bool) {
    explore(name, move || {
        let core = link(1, false, 2, 1);
        let bytes = Bytes::new(2);
        let slow = attach(&core, Primary);
        let (recoverer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
        let mut held = loan_with(&slow).unwrap().unwrap();
        held.msg_id = 1;
        bytes.write(held.cell, 1);
        let me = slow.me;
        assert!(core.seats.evict(&me));
        let stuck = spawn(move || if sends { stage::send(&slow, &held) } else { release(&slow, &held) });
        let reclaimed = core.reclaim(&me, recoverer.me.seat, true);
        let got = match stage::receive(&consumer).unwrap() {
            Some(stage::ReceivedItem::Pooled(held)) => {
                assert_eq!((held.msg_id, bytes.read(held.cell)), (1, 1));
                assert!(release(&consumer, &held), "received is received");
                1
            }
            other => u32::from(other.is_some()),
        };
        let won = stuck.join().unwrap();
        let late = u32::from(receive(&consumer, &bytes).is_some());
        if sends {
            assert!(won, "there was room in the ring");
            assert!(reclaimed.messages + got + late <= 1, "sent or taken back, not both");
        } else {
            assert_eq!(reclaimed.messages + u32::from(won), 1, "one of them gave it back");
        }
        core.reclaim(&me, recoverer.me.seat, false);
        assert_all_free(&recoverer, &bytes);
    });
}

#[test]
fn evicted_participant_releases() {
    evicted("evicted_participant_releases", false);
}

#[test]
fn evicted_participant_sends() {
    evicted("evicted_participant_sends", true);
}

/// The participant is evicted while it sends. If it still has its seat afterwards, the message is received.
fn overtaken(name: &str, wrongly_found_dead: bool) {
    explore(name, move || {
        let core = link(2, false, 2, 0);
        let bytes = Bytes::new(2);
        let (slow, recoverer) = (attach(&core, Primary), attach(&core, Secondary));
        let me = slow.me;
        let sender = {
            let bytes = bytes.clone();
            let held = loan_and_write(&slow, &bytes, 1).unwrap();
            spawn(move || stage::send(&slow, &held) && slow.is_current())
        };
        let reclaimed = core.reclaim(&me, recoverer.me.seat, !wrongly_found_dead);
        let sent = sender.join().unwrap();
        let got = u32::from(receive(&recoverer, &bytes).is_some());
        assert!(got >= u32::from(sent), "its `send` succeeded");
        assert_eq!(reclaimed.messages + got, 1, "sent or taken back");
    });
}

#[test]
fn send_before_an_eviction_arrives() {
    overtaken("send_before_an_eviction_arrives", false);
}

#[test]
fn send_before_a_false_report_of_death_arrives() {
    overtaken("send_before_a_false_report_of_death_arrives", true);
}

/// The same beside another producer, which may move `tail` on behalf of the evicted one.
#[test]
fn send_before_an_eviction_arrives_beside_another_producer() {
    explore("send_before_an_eviction_arrives_beside_another_producer", || {
        let core = link(2, false, 2, 0);
        let bytes = Bytes::new(2);
        let (slow, other) = (attach(&core, Primary), attach(&core, Primary));
        let recoverer = attach(&core, Secondary);
        let me = slow.me;
        let sender = {
            let held = loan_and_write(&slow, &bytes, 1).unwrap();
            spawn(move || stage::send(&slow, &held) && slow.is_current())
        };
        send(&other, &bytes, 2);
        assert!(core.seats.evict(&me));
        let reclaimed = core.reclaim(&me, recoverer.me.seat, true);
        let sent = sender.join().unwrap();
        let got = drain(&recoverer, &bytes);
        assert!(got.contains(&1) || !sent, "its `send` succeeded");
        assert!(got.contains(&2));
        assert_eq!(reclaimed.messages as usize + got.len(), 2, "sent or taken back");
    });
}

/// Here the other producer runs after the recovery, and moves `tail` on behalf of the evicted one.
#[test]
fn send_before_an_eviction_arrives_before_another_producer() {
    explore("send_before_an_eviction_arrives_before_another_producer", || {
        let core = link(2, false, 2, 0);
        let bytes = Bytes::new(2);
        let (slow, other) = (attach(&core, Primary), attach(&core, Primary));
        let recoverer = attach(&core, Secondary);
        let me = slow.me;
        let sender = {
            let held = loan_and_write(&slow, &bytes, 1).unwrap();
            spawn(move || stage::send(&slow, &held) && slow.is_current())
        };
        assert!(core.seats.evict(&me));
        let reclaimed = core.reclaim(&me, recoverer.me.seat, true);
        send(&other, &bytes, 2);
        let sent = sender.join().unwrap();
        let got = drain(&recoverer, &bytes);
        assert!(got.contains(&1) || !sent, "its `send` succeeded");
        assert!(got.contains(&2));
        assert_eq!(reclaimed.messages as usize + got.len(), 2, "sent or taken back");
    });
}

/// Two processes free the seat of a dead participant, and a newcomer takes it as soon as possible. The later of the two
/// does not change the newcomer's details.
#[test]
fn newcomer_keeps_its_details() {
    explore("newcomer_keeps_its_details", || {
        let core = link(1, true, 1, 0);
        let dead = core.seats.attach(&process(7), Primary).unwrap();
        let late = {
            let core = core.clone();
            spawn(move || core.seats.vacate(&dead))
        };
        core.seats.vacate(&dead);
        let newcomer = core.seats.attach(&process(9), Primary).unwrap();
        late.join().unwrap();
        let seen = core.seats.at(newcomer.seat).unwrap();
        assert_eq!((seen.word, seen.start_time, seen.pid_namespace), (newcomer.word, 1, 1));
    });
}

/// The kernel's lock of a seat: whether it is held.
type KernelLock = Arc<Mutex<bool>>;

fn sit_and_lock(core: &Core, lock: &KernelLock) -> Participant {
    let me = core.seats.attach(&process(7), Primary).unwrap();
    *lock.lock().unwrap() = true;
    core.seats.mark_locked(&me, INODE);
    me
}

/// The steps of dropping a `Link`.
fn unlock_and_leave(core: &Core, lock: &KernelLock, me: &Participant) {
    core.seats.mark_locked(me, 0);
    *lock.lock().unwrap() = false;
    core.seats.vacate(me);
}

const INODE: u64 = 4711;

/// A process in another pid namespace checks the lock of a seat while its holder detaches and the next handle of the same
/// process takes it. Neither counts as dead; a participant that ends without detaching does.
#[test]
fn released_lock_means_death_unless_detached() {
    explore("released_lock_means_death_unless_detached", || {
        let core = link(1, false, 1, 0);
        let lock: KernelLock = Arc::new(Mutex::new(false));
        let comes_and_goes = {
            let (core, lock) = (core.clone(), Arc::clone(&lock));
            spawn(move || {
                let first = sit_and_lock(&core, &lock);
                unlock_and_leave(&core, &lock, &first);
                sit_and_lock(&core, &lock)
            })
        };
        let is_taken = || Ok(*lock.lock().unwrap());
        for other in core.seats.all() {
            assert_ne!(core.seats.liveness_by_lock(&other, INODE, is_taken), Liveness::Dead, "it lives");
        }
        let second = comes_and_goes.join().unwrap();
        assert_ne!(core.seats.liveness_by_lock(&second, INODE, is_taken), Liveness::Dead);
        *lock.lock().unwrap() = false;
        assert_eq!(core.seats.liveness_by_lock(&second, INODE, is_taken), Liveness::Dead, "its lock is free");
        assert_eq!(
            core.seats.liveness_by_lock(&second, INODE + 1, is_taken),
            Liveness::Unknown,
            "another file"
        );
    });
}

/// Two participants claim the role of a dead one: exactly one gets it.
#[test]
fn role_has_one_successor() {
    explore("role_has_one_successor", || {
        let core = link(1, true, 1, 0);
        let dead = attach(&core, Secondary);
        let Ring::Spsc(ring) = &dead.incoming else { unreachable!() };
        dead.consumer(ring).unwrap();
        let recoverer = attach(&core, Primary);
        let dead = abandon(dead);
        core.reclaim(&dead, recoverer.me.seat, false);
        let they = core.seats.attach(&process(2), Secondary).unwrap();
        let other = {
            let core = core.clone();
            spawn(move || {
                let words = core.incoming(Secondary).words().clone();
                Role(words.control(CONSUMER_ROLE)).claim(&they, &core.seats).is_ok()
            })
        };
        // The other participant learns of our seat by the role's word alone.
        let me = core.seats.attach(&process(3), Secondary).unwrap();
        let words = core.incoming(Secondary).words().clone();
        let mine = Role(words.control(CONSUMER_ROLE)).claim(&me, &core.seats).is_ok();
        let theirs = other.join().unwrap();
        assert!(mine != theirs, "one of two");
        let again = Role(words.control(CONSUMER_ROLE)).claim(if mine { &they } else { &me }, &core.seats);
        assert_eq!(again.unwrap_err().seat, if mine { me.seat } else { they.seat });
    });
}

/// Two participants attach and one detaches: no seat is shared, and its details are its participant's.
#[test]
fn seats_are_not_shared() {
    explore("seats_are_not_shared", || {
        let core = link(1, true, 1, 0);
        let first = core.seats.attach(&process(7), Primary).unwrap();
        let other = {
            let core = core.clone();
            spawn(move || core.seats.attach(&process(8), Secondary).unwrap())
        };
        assert!(core.seats.vacate(&first));
        let mine = core.seats.attach(&process(9), Primary).unwrap();
        let theirs = other.join().unwrap();
        assert_ne!(mine.seat, theirs.seat);
        for who in [mine, theirs] {
            let seen = core.seats.at(who.seat).unwrap();
            assert_eq!((seen.word, seen.start_time, seen.pid_namespace), (who.word, 1, 1));
        }
    });
}

/// Another participant drains a newcomer's messages, while the newcomer's predecessor is still being recovered.
#[test]
fn detaching_releases_everything() {
    explore("detaching_releases_everything", || {
        let core = link(2, false, 2, 0);
        let bytes = Bytes::new(2);
        let (leaver, consumer) = (attach(&core, Primary), attach(&core, Secondary));
        let other = {
            let bytes = bytes.clone();
            spawn(move || {
                send(&leaver, &bytes, 1);
                let forgotten = loan(&leaver);
                leave(&leaver);
                forgotten.is_some()
            })
        };
        let early = receive(&consumer, &bytes);
        other.join().unwrap();
        let late = drain(&consumer, &bytes);
        assert_eq!(early.into_iter().chain(late).collect::<Vec<_>>(), [1]);
        assert_all_free(&consumer, &bytes);
    });
}
