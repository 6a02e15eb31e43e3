//! Waking up: nobody sleeps over a message, and posts are neither lost nor doubled.

use loom::sync::{Arc, Condvar, Mutex};

use super::super::stage::{attach, link, receive, send_inline};
use super::{explore, spawn, until};
use crate::link::desk::Desk;
use crate::notify;
use crate::participant::Side::{Primary, Secondary};
use crate::ring::Ring;

/// An eventfd in semaphore mode.
#[derive(Debug)]
struct Bell {
    signals: Mutex<u32>,
    rung: Condvar,
}

impl Bell {
    fn new() -> Arc<Self> {
        Arc::new(Self { signals: Mutex::new(0), rung: Condvar::new() })
    }

    fn signal(&self) {
        *self.signals.lock().unwrap() += 1;
        self.rung.notify_all();
    }

    fn take(&self) -> bool {
        let mut signals = self.signals.lock().unwrap();
        let taken = *signals > 0;
        *signals -= u32::from(taken);
        taken
    }

    /// Takes no signal, as `poll`.
    fn wait(&self) {
        let mut signals = self.signals.lock().unwrap();
        while *signals == 0 {
            signals = self.rung.wait(signals).unwrap();
        }
    }
}

/// As `Link::notify`.
fn ring_for(desk: &Desk, bell: &Bell) {
    if notify::anybody_asleep(&desk.outgoing, &desk.core.seats) {
        bell.signal();
    }
}

/// As `Link::wait_for` after it has spun.
fn sleep(desk: &Desk, bell: &Bell, ready: impl Fn(&Ring) -> bool) {
    let ring = &desk.incoming;
    notify::fall_asleep(ring, desk.me.seat);
    loop {
        if ready(ring) {
            break;
        }
        if bell.take() {
            continue;
        }
        bell.wait();
    }
    notify::wake_up(ring, desk.me.seat);
}

fn never_sleeps_over(name: &'static str, single: bool) {
    explore(name, Some(3), move || {
        let core = link(2, single, 1, 0);
        let (producer, consumer, bell) = (attach(&core, Primary), attach(&core, Secondary), Bell::new());
        let sender = {
            let bell = Arc::clone(&bell);
            spawn(move || {
                for value in 1..=2 {
                    send_inline(&producer, value).unwrap();
                    ring_for(&producer, &bell);
                }
            })
        };
        for value in 1..=2 {
            // A lost wake-up is a deadlock here.
            sleep(&consumer, &bell, Ring::has_message);
            assert_eq!(receive(&consumer).unwrap().unwrap().msg_id(), value);
        }
        sender.join().unwrap();
    });
}

#[test]
fn nobody_sleeps_over_a_message_spsc() {
    never_sleeps_over("nobody_sleeps_over_a_message_spsc", true);
}

#[test]
fn nobody_sleeps_over_a_message_mpmc() {
    never_sleeps_over("nobody_sleeps_over_a_message_mpmc", false);
}

/// Posts add up: each is taken once, wakes somebody, and brings what was sent before it.
#[test]
fn posts() {
    explore("posts", Some(2), || {
        let core = link(2, false, 1, 0);
        let bell = Bell::new();
        let (producer, other) = (attach(&core, Primary), attach(&core, Primary));
        let consumers = [attach(&core, Secondary), attach(&core, Secondary)];
        let ring = consumers[0].incoming.clone();
        let sender = {
            let bell = Arc::clone(&bell);
            spawn(move || {
                notify::post(&producer.outgoing);
                ring_for(&producer, &bell);
            })
        };
        notify::post(&other.outgoing);
        ring_for(&other, &bell);
        let waiting = consumers.map(|consumer| {
            let bell = Arc::clone(&bell);
            spawn(move || sleep(&consumer, &bell, notify::take_post))
        });
        for consumer in waiting {
            consumer.join().unwrap();
        }
        sender.join().unwrap();
        assert!(!notify::take_post(&ring), "two posts, two taken");
    });
}

/// What was sent before a post is there after it.
#[test]
fn a_post_brings_its_messages() {
    explore("a_post_brings_its_messages", None, || {
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

/// Who sits in the seat of a dead participant sleeps, while somebody still takes back what the dead one held.
#[test]
fn a_late_recoverer_takes_no_wake_up_away() {
    explore("a_late_recoverer_takes_no_wake_up_away", Some(2), || {
        let core = link(2, true, 1, 0);
        let dead = attach(&core, Secondary);
        let (producer, late) = (attach(&core, Primary), attach(&core, Primary));
        notify::fall_asleep(&dead.incoming, dead.me.seat);
        let dead = dead.me;
        let bell = Bell::new();
        let second = {
            let core = core.clone();
            spawn(move || core.reclaim(&dead, late.me.seat, false))
        };
        core.reclaim(&dead, producer.me.seat, false);
        let sender = {
            let bell = Arc::clone(&bell);
            spawn(move || {
                send_inline(&producer, 1).unwrap();
                ring_for(&producer, &bell);
            })
        };
        let newcomer = attach(&core, Secondary);
        assert_eq!(newcomer.me.seat, dead.seat);
        sleep(&newcomer, &bell, Ring::has_message);
        assert_eq!(receive(&newcomer).unwrap().unwrap().msg_id(), 1);
        second.join().unwrap();
        sender.join().unwrap();
    });
}
