//! The machine in a world of its own: a kubelet that restarts, forgets and races, in virtual time.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;

use crate::kubelet::state_machine::*;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[derive(Clone, Copy, Debug)]
enum Act {
    KubeletStops,
    KubeletStarts,
    /// The connection of the newest stream breaks.
    StreamCut,
    /// Another process removes our socket.
    SocketRemoved,
    PluginRestarts,
    Wait(u16),
}

/// A stream, by the server that it is of.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Stream {
    server: u64,
    number: u64,
}

#[derive(Clone, Copy, Debug)]
enum Arrival {
    /// For the machine, if the plugin's life is still this one.
    Heard(u64, Event),
    /// The kubelet has done what Register asks.
    Registers { attempt: u64, kubelet: u64, server: u64, life: u64 },
    /// The kubelet's end of a stream is over.
    EndSeen(u64, Stream),
}

struct World {
    now: Moment,
    machine: StateMachine,
    life: u64,
    queue: Vec<(Moment, u64, Arrival)>,
    queued: u64,
    looked: Moment,
    kubelet: Option<u64>,
    kubelets: u64,
    /// The file at the kubelet's name, also after the kubelet has stopped.
    file: Option<FileId>,
    client: Option<Stream>,
    streams: BTreeSet<Stream>,
    server: u64,
    is_socket_there: bool,
    registrations: u64,
    most_streams: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            now: ms(0),
            machine: StateMachine::new(Mode::Register, seed),
            life: 0,
            queue: Vec::new(),
            queued: 0,
            looked: ms(0),
            kubelet: None,
            kubelets: 0,
            file: None,
            client: None,
            streams: BTreeSet::new(),
            server: 0,
            is_socket_there: false,
            registrations: 0,
            most_streams: 0,
        }
    }

    fn later(&mut self, after: Duration, arrival: Arrival) {
        self.queued += 1;
        self.queue.push((self.now + after, self.queued, arrival));
    }

    fn tell(&mut self, event: Event) {
        match self.machine.step(self.now, event) {
            None => {}
            Some(Action::Listen) => {
                // The old server goes, and with it its streams.
                self.end_streams(self.server);
                self.server += 1;
                self.is_socket_there = true;
                self.later(ms(1), Arrival::Heard(self.life, Event::Listening));
            }
            Some(Action::Register(attempt)) => {
                self.registrations += 1;
                let refused = Arrival::Heard(self.life, Event::NotRegistered(attempt));
                match self.kubelet {
                    None => self.later(ms(1), refused),
                    Some(_) if !self.is_socket_there => self.later(ms(10_000), refused),
                    Some(kubelet) => {
                        let (server, life) = (self.server, self.life);
                        self.later(ms(5), Arrival::Registers { attempt, kubelet, server, life });
                    }
                }
            }
        }
    }

    fn end_streams(&mut self, server: u64) {
        let ended: Vec<_> = self.streams.iter().copied().filter(|stream| stream.server == server).collect();
        for stream in ended {
            if let Some(kubelet) = self.kubelet {
                self.later(ms(3), Arrival::EndSeen(kubelet, stream));
            }
        }
    }

    /// A kubelet up to 1.36 drops the current registration of the resource when any stream ends.
    fn end_seen(&mut self, stream: Stream) {
        if !self.streams.remove(&stream) {
            return;
        }
        self.heard_end(stream);
        if let Some(client) = self.client.take() {
            self.streams.remove(&client);
            if client != stream {
                self.heard_end(client);
            }
        }
    }

    fn heard_end(&mut self, stream: Stream) {
        if stream.server == self.server {
            self.later(ms(1), Arrival::Heard(self.life, Event::StreamEnded));
        }
    }

    fn arrive(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Heard(life, event) if life == self.life => self.tell(event),
            Arrival::Registers { attempt, kubelet, server, life } if Some(kubelet) == self.kubelet => {
                if life == self.life && server == self.server && self.is_socket_there {
                    self.queued += 1;
                    let stream = Stream { server, number: self.queued };
                    self.client = Some(stream);
                    self.streams.insert(stream);
                    self.most_streams = self.most_streams.max(self.streams.len());
                    self.later(ms(1), Arrival::Heard(life, Event::Registered(attempt)));
                    self.later(ms(1), Arrival::Heard(life, Event::StreamBegan));
                } else {
                    self.later(ms(10_000), Arrival::Heard(life, Event::NotRegistered(attempt)));
                }
            }
            Arrival::EndSeen(kubelet, stream) if Some(kubelet) == self.kubelet => self.end_seen(stream),
            _ => {}
        }
    }

    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            let arrival = self.queue.iter().map(|&(at, order, _)| (at, order)).min();
            let look = self.looked + POLL_INTERVAL;
            let next = arrival.map_or(look, |(at, _)| at.min(look));
            let next = self.machine.wake(self.now).map_or(next, |wake| wake.min(next));
            if next > until {
                self.now = until;
                return;
            }
            self.now = self.now.max(next);
            match arrival {
                Some((at, order)) if at <= self.now => {
                    let place = self.queue.iter().position(|queued| queued.1 == order).unwrap();
                    let (_, _, arrival) = self.queue.remove(place);
                    self.arrive(arrival);
                }
                _ if look <= self.now => {
                    self.looked = self.now;
                    self.tell(Event::Polled { kubelet: self.file, ours: self.is_socket_there });
                }
                _ => self.tell(Event::Polled { kubelet: self.file, ours: self.is_socket_there }),
            }
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::KubeletStops => {
                self.kubelet = None;
                self.client = None;
                for stream in std::mem::take(&mut self.streams) {
                    self.heard_end(stream);
                }
            }
            Act::KubeletStarts => {
                self.act(Act::KubeletStops);
                self.is_socket_there = false;
                self.kubelets += 1;
                self.kubelet = Some(self.kubelets);
                let changed =
                    (i64::try_from(self.now.as_millis()).unwrap(), i64::try_from(self.kubelets).unwrap());
                // The same inode, as file systems like to do.
                self.file = Some(FileId { dev: 1, ino: 2, changed });
            }
            Act::StreamCut => {
                if let Some(stream) = self.streams.last().copied() {
                    self.end_seen(stream);
                }
            }
            Act::SocketRemoved => self.is_socket_there = false,
            Act::PluginRestarts => {
                self.end_streams(self.server);
                self.server += 1;
                self.is_socket_there = false;
                self.life += 1;
                self.machine = StateMachine::new(Mode::Register, self.life);
                // It measures from its own start; here that is the world's.
                self.looked = self.now;
            }
            Act::Wait(millis) => self.pass(ms(millis.into())),
        }
    }

    fn is_served(&self) -> bool {
        self.client.is_some_and(|client| client.server == self.server && self.streams.contains(&client))
    }

    fn settle(&mut self) {
        if self.kubelet.is_none() {
            self.act(Act::KubeletStarts);
        }
        self.pass(ms(3_000));
        assert!(self.is_served(), "not served 3 s later: {:?}", self.machine);
        assert!(self.machine.is_served());
        assert_eq!(self.streams.len(), 1);
    }
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        Just(Act::KubeletStops),
        Just(Act::KubeletStarts),
        Just(Act::StreamCut),
        Just(Act::SocketRemoved),
        Just(Act::PluginRestarts),
        (0..4_000_u16).prop_map(Act::Wait),
        (0..20_u16).prop_map(Act::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever happens, three seconds after it has stopped the kubelet has our list, once.
    #[test]
    fn served_again_within_three_seconds(acts in proptest::collection::vec(act(), 0..120), seed: u64) {
        let mut world = World::new(seed);
        for (at, act) in acts.into_iter().enumerate() {
            world.act(act);
            if at % 40 == 39 {
                world.settle();
            }
        }
        world.settle();
        // And then there is quiet.
        let registrations = world.registrations;
        world.pass(ms(120_000));
        prop_assert_eq!(world.registrations, registrations);
        prop_assert!(world.is_served());
    }
}

#[test]
fn missing_kubelet_is_not_called() {
    let mut world = World::new(1);
    world.pass(ms(60_000));
    assert_eq!((world.registrations, world.is_socket_there), (0, true));
    world.act(Act::KubeletStarts);
    world.pass(ms(1_200));
    assert!(world.is_served(), "found by the second look");
}

#[test]
fn registration_backs_off_while_the_kubelet_is_stopped() {
    let mut world = World::new(2);
    world.settle();
    world.act(Act::KubeletStops);
    let before = world.registrations;
    world.pass(ms(60_000));
    let asked = world.registrations - before;
    assert!((30..=45).contains(&asked), "{asked}");
}

#[test]
fn registration_race_is_survived() {
    let mut world = World::new(3);
    world.settle();
    // An old stream of ours that the kubelet still has, as after a quick restart.
    let old = Stream { server: 0, number: 0 };
    world.streams.insert(old);
    world.end_seen(old);
    assert!(!world.is_served(), "the kubelet has dropped the wrong one");
    world.settle();
}

#[test]
fn at_most_one_stream_is_open() {
    let mut world = World::new(4);
    for _ in 0..50 {
        world.act(Act::SocketRemoved);
        world.settle();
        world.act(Act::StreamCut);
        world.settle();
    }
    assert_eq!(world.most_streams, 1, "never registered while a stream is open");
}

fn kubelet(started: i64) -> Option<FileId> {
    Some(FileId { dev: 1, ino: 2, changed: (started, 0) })
}

/// A look at the kubelet of the next test, in order.
const POLLED: Event = Event::Polled { kubelet: Some(FileId { dev: 1, ino: 2, changed: (1, 0) }), ours: true };

#[test]
fn hanging_registration_times_out() {
    let mut machine = StateMachine::new(Mode::Register, 5);
    assert_eq!(machine.step(ms(0), Event::Polled { kubelet: kubelet(1), ours: false }), Some(Action::Listen));
    assert_eq!(machine.step(ms(1), Event::Listening), Some(Action::Register(1)));
    let wake = machine.wake(ms(1)).unwrap();
    assert_eq!(machine.step(wake, POLLED), None);
    let wake = machine.wake(wake).unwrap();
    assert_eq!(machine.step(wake, POLLED), Some(Action::Register(2)));
    // The first comes back late, and means nothing.
    assert_eq!(machine.step(wake, Event::NotRegistered(1)), None);
    assert_eq!(machine.step(wake + ms(5_000), POLLED), None, "the second goes on");
    assert_eq!(machine.step(wake + ms(5_000), Event::Registered(2)), None);
}

#[test]
fn new_kubelet_is_registered_with_immediately() {
    let mut machine = StateMachine::new(Mode::Register, 8);
    assert_eq!(machine.step(ms(0), Event::Polled { kubelet: kubelet(1), ours: false }), Some(Action::Listen));
    assert_eq!(machine.step(ms(1), Event::Listening), Some(Action::Register(1)));
    assert_eq!(machine.step(ms(2), Event::StreamBegan), None);
    assert_eq!(machine.step(ms(3), Event::Registered(1)), None);
    assert_eq!(machine.step(ms(5_000), Event::Polled { kubelet: kubelet(1), ours: true }), None, "content");
    // The same inode, and we have not heard yet that the old stream is over.
    let other = Event::Polled { kubelet: kubelet(2), ours: true };
    assert_eq!(machine.step(ms(6_000), other), Some(Action::Register(2)));
}

#[test]
fn failed_listen_is_retried() {
    let mut machine = StateMachine::new(Mode::Register, 6);
    let look = Event::Polled { kubelet: None, ours: false };
    assert_eq!(machine.step(ms(0), look), Some(Action::Listen));
    assert_eq!(machine.step(ms(1), Event::NotListening), None);
    let wake = machine.wake(ms(1)).unwrap();
    assert_eq!(machine.step(wake, look), Some(Action::Listen));
}

#[test]
fn discovery_mode_never_registers() {
    let mut machine = StateMachine::new(Mode::Discovered, 7);
    assert_eq!(machine.step(ms(0), Event::Polled { kubelet: None, ours: false }), Some(Action::Listen));
    assert_eq!(machine.step(ms(1), Event::Listening), None);
    assert_eq!(machine.step(ms(1_000), Event::StreamBegan), None);
    for second in 2..100 {
        let event = Event::Polled { kubelet: kubelet(0), ours: true };
        assert_eq!(machine.step(ms(second * 1_000), event), None, "content");
    }
    // Cancelled while we live: the socket is made again, which the kubelet notices.
    assert_eq!(machine.step(ms(100_000), Event::StreamEnded), None);
    let wake = machine.wake(ms(100_000)).unwrap();
    assert!(wake < ms(100_300));
    let look = Event::Polled { kubelet: kubelet(0), ours: true };
    assert_eq!(machine.step(wake, look), Some(Action::Listen));
}
