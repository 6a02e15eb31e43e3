//! Notification: no receiver sleeps while a message waits, and posts are neither lost nor duplicated.

use loom::sync::{Arc, Condvar, Mutex};

use super::super::stage::{abandon, attach, link, receive, send_inline};
use super::{explore, spawn, until};
use crate::link::endpoint::Endpoint;
use crate::notify::{self, Sleepers};
use crate::participant::Side::{Primary, Secondary};
use crate::participant::{PeerEvent, PeerObserver};
use crate::ring::Ring;

/// The kernel's part of a futex.
#[derive(Debug)]
struct Futex {
    queue: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    fn new() -> Arc<Self> {
        Arc::new(Self { queue: Mutex::new(()), woken: Condvar::new() })
    }

    fn wake_all(&self) {
        let _queue = self.queue.lock().unwrap();
        self.woken.notify_all();
    }

    /// Compares the word and queues the thread in one step, as the kernel does.
    fn wait(&self, sleepers: Sleepers<'_>, expected: u32) {
        let queue = self.queue.lock().unwrap();
        if sleepers.wakes() == expected {
            drop(self.woken.wait(queue).unwrap());
        }
    }
}

/// The steps of `Link::notify`.
fn wake(endpoint: &Endpoint, futex: &Futex) {
    let waiting = notify::waiting(&endpoint.outgoing);
    if !waiting.is_empty() && waiting.is_any_asleep(&endpoint.core.seats) {
        Sleepers::of(&endpoint.outgoing).wake();
        futex.wake_all();
    }
}

/// The steps of `Link::wait_for` after spinning.
fn sleep(endpoint: &Endpoint, futex: &Futex, ready: impl Fn(&Ring) -> bool) {
    let ring = &endpoint.incoming;
    sleep_on(endpoint, Sleepers::of(ring), futex, || ready(ring));
}

fn sleep_on(endpoint: &Endpoint, sleepers: Sleepers<'_>, futex: &Futex, ready: impl Fn() -> bool) {
    sleepers.fall_asleep(endpoint.me.seat);
    loop {
        let wakes = sleepers.wakes();
        if ready() {
            break;
        }
        futex.wait(sleepers, wakes);
    }
    sleepers.wake_up(endpoint.me.seat);
}

fn never_sleeps_over(name: &'static str, single: bool) {
    explore(name, move || {
        let core = link(2, single, 1, 0);
        let (producer, consumer, futex) = (attach(&core, Primary), attach(&core, Secondary), Futex::new());
        let sender = {
            let futex = Arc::clone(&futex);
            spawn(move || {
                for value in 1..=2 {
                    send_inline(&producer, value).unwrap();
                    wake(&producer, &futex);
                }
            })
        };
        for value in 1..=2 {
            // A lost wake-up is a deadlock here.
            sleep(&consumer, &futex, Ring::has_message);
            assert_eq!(receive(&consumer).unwrap().unwrap().msg_id(), value);
        }
        sender.join().unwrap();
    });
}

#[test]
fn no_receiver_sleeps_over_a_message_spsc() {
    never_sleeps_over("no_receiver_sleeps_over_a_message_spsc", true);
}

#[test]
fn no_receiver_sleeps_over_a_message_mpmc() {
    never_sleeps_over("no_receiver_sleeps_over_a_message_mpmc", false);
}

/// Posts are counted: each is taken once, wakes a sleeper, and makes visible what was sent before it.
#[test]
fn posts() {
    explore("posts", || {
        let core = link(2, false, 1, 0);
        let futex = Futex::new();
        let (producer, other) = (attach(&core, Primary), attach(&core, Primary));
        let consumers = [attach(&core, Secondary), attach(&core, Secondary)];
        let ring = consumers[0].incoming.clone();
        let sender = {
            let futex = Arc::clone(&futex);
            spawn(move || {
                notify::post(&producer.outgoing);
                wake(&producer, &futex);
            })
        };
        notify::post(&other.outgoing);
        wake(&other, &futex);
        let waiting = consumers.map(|consumer| {
            let futex = Arc::clone(&futex);
            spawn(move || sleep(&consumer, &futex, notify::take_post))
        });
        for consumer in waiting {
            consumer.join().unwrap();
        }
        sender.join().unwrap();
        assert!(!notify::take_post(&ring), "two posts, two taken");
    });
}

/// Messages that were sent before a post are visible after it.
#[test]
fn post_makes_messages_visible() {
    explore("post_makes_messages_visible", || {
        let core = link(2, true, 1, 0);
        let (producer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
        let sender = spawn(move || {
            send_inline(&producer, 1).unwrap();
            notify::post(&producer.outgoing);
        });
        until(|| notify::take_post(&consumer.incoming).then_some(()));
        assert_eq!(receive(&consumer).unwrap().map(|got| got.msg_id()), Some(1));
        sender.join().unwrap();
    });
}

/// A participant in the seat of a dead one sleeps, while another still recovers the dead one's buffers.
#[test]
fn late_recovery_loses_no_wake_up() {
    explore("late_recovery_loses_no_wake_up", || {
        let core = link(2, true, 1, 0);
        let dead = attach(&core, Secondary);
        let (producer, late) = (attach(&core, Primary), attach(&core, Primary));
        Sleepers::of(&dead.incoming).fall_asleep(dead.me.seat);
        let dead = dead.me;
        let futex = Futex::new();
        let second = {
            let core = core.clone();
            spawn(move || core.reclaim(&dead, late.me.seat, false))
        };
        core.reclaim(&dead, producer.me.seat, false);
        let sender = {
            let futex = Arc::clone(&futex);
            spawn(move || {
                send_inline(&producer, 1).unwrap();
                wake(&producer, &futex);
            })
        };
        let newcomer = attach(&core, Secondary);
        assert_eq!(newcomer.me.seat, dead.seat);
        sleep(&newcomer, &futex, Ring::has_message);
        assert_eq!(receive(&newcomer).unwrap().unwrap().msg_id(), 1);
        second.join().unwrap();
        sender.join().unwrap();
    });
}

/// The steps of `Shared::wake_for_events`.
fn wake_for_events(endpoint: &Endpoint, futex: &Futex) {
    endpoint.core.seats.wake_for_events(|| wake_to_look_for_events(endpoint, futex));
}

/// The steps of `Shared::wake_to_look_for_events` for those that sleep until there is an event.
fn wake_to_look_for_events(endpoint: &Endpoint, futex: &Futex) {
    let seats = &endpoint.core.seats;
    if seats.is_any_taken(seats.event_sleepers().asleep()) {
        seats.event_sleepers().wake();
        futex.wake_all();
    }
}

/// Messages are reported as lost while a participant sleeps for events: it is woken. Another one that receives the next message knows.
#[test]
fn no_participant_sleeps_over_lost_messages() {
    explore("no_participant_sleeps_over_lost_messages", || {
        let core = link(1, true, 1, 0);
        let (sleeper, receiver) = (attach(&core, Secondary), attach(&core, Secondary));
        let (forwarder, futex) = (attach(&core, Primary), Futex::new());
        let observe =
            |endpoint: &Endpoint| PeerObserver::new(&core.seats, endpoint.me.seat, endpoint.me.word.side());
        let (mut of_sleeper, of_receiver) = (observe(&sleeper), observe(&receiver));
        let other = {
            let (core, futex) = (core.clone(), Arc::clone(&futex));
            spawn(move || {
                core.seats.count_lost(Primary, 3);
                wake_to_look_for_events(&forwarder, &futex);
                send_inline(&forwarder, 4).unwrap();
            })
        };
        if let Ok(Some(_)) = receive(&receiver) {
            assert_eq!(of_receiver.lost(&core.seats), 3);
        }
        {
            // A lost wake-up is a deadlock here.
            let ready = std::cell::RefCell::new(&mut of_sleeper);
            sleep_on(&sleeper, core.seats.event_sleepers(), &futex, || ready.borrow_mut().look(&core.seats));
        }
        assert_eq!(of_sleeper.next(&core.seats), Some(PeerEvent::Lost(3)));
        other.join().unwrap();
    });
}

/// A peer attaches and dies while a participant sleeps for events: it is woken for both, and each is reported once.
#[test]
fn no_participant_sleeps_over_an_event() {
    explore("no_participant_sleeps_over_an_event", || {
        let core = link(1, true, 1, 0);
        let (sleeper, recoverer, futex) = (attach(&core, Secondary), attach(&core, Primary), Futex::new());
        let mut peers = PeerObserver::new(&core.seats, sleeper.me.seat, sleeper.me.word.side());
        let other = {
            let (core, futex) = (core.clone(), Arc::clone(&futex));
            spawn(move || {
                let peer = attach(&core, Primary);
                core.seats.record_attached(&peer.me);
                wake_for_events(&peer, &futex);
                let dead = abandon(peer);
                core.reclaim(&dead, recoverer.me.seat, false);
                wake_for_events(&recoverer, &futex);
                dead
            })
        };
        let mut events = Vec::new();
        while events.len() < 2 {
            // A lost wake-up is a deadlock here.
            let ready = std::cell::RefCell::new(&mut peers);
            sleep_on(&sleeper, core.seats.event_sleepers(), &futex, || ready.borrow_mut().look(&core.seats));
            events.extend(std::iter::from_fn(|| peers.next(&core.seats)));
        }
        let dead = other.join().unwrap();
        let same = |peer: &crate::participant::Participant| peer.word == dead.word;
        assert!(matches!(&events[..], [PeerEvent::Attached(a), PeerEvent::Died(b)] if same(a) && same(b)));
        assert_eq!(peers.next(&core.seats), None);
    });
}

/// As [`never_sleeps_over`]: all readers of a broadcast ring are woken.
#[test]
fn no_reader_sleeps_over_a_broadcast() {
    use super::super::stage::{broadcast, rules};
    explore("no_reader_sleeps_over_a_broadcast", || {
        let core = broadcast(2, rules(crate::config::SlowReaders::Wait, 0), 1, 0);
        let (writer, futex) = (attach(&core, Primary), Futex::new());
        let readers = [attach(&core, Secondary), attach(&core, Secondary)].map(|reader| {
            let futex = Arc::clone(&futex);
            spawn(move || {
                let has_message = |ring: &Ring| {
                    let Ring::Broadcast(ring) = ring else { unreachable!() };
                    ring.has_message(reader.reader())
                };
                sleep(&reader, &futex, has_message);
                assert_eq!(receive(&reader).unwrap().unwrap().msg_id(), 1);
            })
        });
        send_inline(&writer, 1).unwrap();
        wake(&writer, &futex);
        for reader in readers {
            reader.join().unwrap();
        }
    });
}
