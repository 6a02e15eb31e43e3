//! Many far nodes with many links, in virtual time: all of them are cut off at once, or their bridges are killed in turn.
//!
//! Order, counting and limits are the product's own [`Sender`] and [`Receiver`], and the frames its own bytes. When a side sends again,
//! takes messages, or tells its state is decided in `session.rs` among threads and clocks; the rules here are a model of those, with the
//! same numbers. A run follows from its seed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use shmesh_bridge::frame::{
    Frame, FrameError, ITEM_HEAD_BYTES, ItemHead, ItemKind, ProtocolVersions, Status,
};
use shmesh_bridge::stream::{Arrival, Receiver, Sender};

use crate::processes::scattered;

/// The versions of a release and of the next one: today's bytes under three numbers.
const OLD: ProtocolVersions = ProtocolVersions { lowest: 1, highest: 2 };
const NEW: ProtocolVersions = ProtocolVersions { lowest: 2, highest: 3 };

const MS: u64 = 1000;
const SECOND: u64 = 1000 * MS;
const PEER_TIMEOUT: u64 = 10 * SECOND;
const STATUS_EVERY: u64 = PEER_TIMEOUT / 5;
const TELL_AFTER: u64 = 20 * MS;
const AGAIN_AFTER: u64 = 300 * MS;
const AGAIN_AFTER_MAX: u64 = 5 * SECOND;
const ASK_EVERY: u64 = 100 * MS;
const WINDOW: u64 = 64;
/// As measured: frames take 5 to 10 ms each way.
const ROUND_TRIP: u64 = 15 * MS;
/// A link's program sends this often.
const MESSAGE_EVERY: u64 = 500 * MS;
/// Messages that wait in the link's ring at most; the program waits while it is full.
const RING: u64 = 64;

/// The state of an end: what it knows of the other, and when it was active last.
struct End {
    instance: u64,
    /// The versions that it reads, and the one that it writes.
    reads: ProtocolVersions,
    writes: u16,
    other: Option<Status>,
    other_seen: u64,
    told: Option<(u64, [u64; 5])>,
    must_tell: bool,
    asks: bool,
    asked: Option<(u64, u64)>,
    wakes_at: u64,
}

impl End {
    /// The end of a process that has just started.
    fn new(instance: u64, reads: ProtocolVersions) -> Self {
        Self {
            instance,
            reads,
            writes: reads.lowest,
            other: None,
            other_seen: 0,
            told: None,
            must_tell: true,
            asks: false,
            asked: None,
            wakes_at: 0,
        }
    }

    fn is_connected(&self, now: u64) -> bool {
        self.other.is_some() && now < self.other_seen + PEER_TIMEOUT
    }

    fn other_instance(&self) -> u64 {
        self.other.as_ref().map_or(0, |other| other.instance)
    }
}

/// One direction of a link: the end that sends messages, and the end that receives them.
struct Line {
    node: usize,
    /// When the last frame to each end arrives.
    arrives_at: [u64; 2],
    sending: End,
    receiving: End,
    sender: Sender,
    receiver: Receiver,
    received_at: u64,
    /// When it sent again last, and how long it waits before it does so next.
    sent_again: (u64, u64),
    /// Messages that the program has sent, and those that the bridge has taken.
    made: u64,
    taken: u64,
    arrived: u64,
    last: u64,
    counted: u64,
    /// Messages that were with a bridge when it was killed.
    with_killed: u64,
    again: u64,
}

impl Line {
    fn agree_on_version(&mut self, place: Place, others: ProtocolVersions) {
        let end = if place == Place::Sending { &mut self.sending } else { &mut self.receiving };
        end.writes = end.reads.common(others).expect("they are of releases next to each other");
        if place == Place::Sending {
            self.sender.set_version(end.writes);
        }
    }
}

/// The two ends of a line.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Place {
    Sending,
    Receiving,
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Event {
    Frame(Vec<u8>),
    Wake,
    Make,
}

/// Its time, its number, its line and end.
type ScheduledEvent = Reverse<(u64, u64, usize, Place, Event)>;

struct World {
    now: u64,
    random: u64,
    scheduled: BinaryHeap<ScheduledEvent>,
    number: u64,
    lines: Vec<Line>,
    /// The nodes that are cut off.
    cut: Vec<bool>,
    frames: u64,
    /// Frames of a version that the receiver did not read.
    unread: u64,
    most_kept: usize,
}

impl World {
    fn new(nodes: usize, links: usize) -> Self {
        let mut world = Self {
            now: 0,
            random: 1,
            scheduled: BinaryHeap::new(),
            number: 0,
            lines: Vec::new(),
            cut: vec![false; nodes],
            frames: 0,
            unread: 0,
            most_kept: 0,
        };
        for line in 0..nodes * links {
            let (sending, receiving, stream) = (world.draw(), world.draw(), world.draw());
            let end = |instance| End::new(instance, OLD);
            world.lines.push(Line {
                node: line / links,
                arrives_at: [0; 2],
                sending: end(sending),
                receiving: end(receiving),
                sender: Sender::new(stream, 0),
                receiver: Receiver::new(0, 0, WINDOW),
                received_at: 0,
                sent_again: (0, AGAIN_AFTER),
                made: 0,
                taken: 0,
                arrived: 0,
                last: 0,
                counted: 0,
                with_killed: 0,
                again: 0,
            });
            for (place, event) in [
                (Place::Sending, Event::Wake),
                (Place::Receiving, Event::Wake),
                (Place::Sending, Event::Make),
            ] {
                let at = world.draw() % STATUS_EVERY;
                world.schedule(at, line, place, event);
            }
        }
        world
    }

    /// Never 0, as the numbers of processes and streams.
    fn draw(&mut self) -> u64 {
        self.random += 1;
        scattered(self.random) | 1
    }

    fn schedule(&mut self, at: u64, line: usize, place: Place, event: Event) {
        self.number += 1;
        self.scheduled.push(Reverse((at, self.number, line, place, event)));
    }

    /// Frames take 5 to 10 ms. None overtakes another on its connection.
    fn send(&mut self, line: usize, to: Place, frame: Vec<u8>) {
        self.frames += 1;
        if !self.cut[self.lines[line].node] {
            let at = self.now + 5 * MS + self.draw() % (5 * MS);
            let last = &mut self.lines[line].arrives_at[to as usize];
            *last = at.max(*last);
            let at = *last;
            self.schedule(at, line, to, Event::Frame(frame));
        }
    }

    fn run_until(&mut self, end: u64) {
        while let Some(Reverse((at, ..))) = self.scheduled.peek()
            && *at <= end
        {
            let Some(Reverse((at, _, line, place, event))) = self.scheduled.pop() else { return };
            self.now = at;
            match event {
                // One that was cut off on its way is lost.
                Event::Frame(_) if self.cut[self.lines[line].node] => continue,
                Event::Frame(frame) => self.receive(line, place, frame),
                Event::Make => {
                    let state = &mut self.lines[line];
                    state.made += u64::from(state.made - state.taken < RING);
                    self.schedule(at + MESSAGE_EVERY, line, place, Event::Make);
                }
                Event::Wake => {}
            }
            self.step(line, place);
        }
        self.now = end;
    }

    fn receive(&mut self, line: usize, place: Place, frame: Vec<u8>) {
        let now = self.now;
        let state = &mut self.lines[line];
        let end = if place == Place::Sending { &mut state.sending } else { &mut state.receiving };
        let decoded = match Frame::decode(&frame, end.reads) {
            Ok(decoded) => decoded,
            Err(FrameError::Version { sender_reads, .. }) => {
                self.unread += 1;
                let Some(reads) = sender_reads else { return };
                end.must_tell = true;
                state.agree_on_version(place, reads);
                return;
            }
            Err(error) => panic!("{error}"),
        };
        if let Frame::Status(status) = &decoded {
            state.agree_on_version(place, status.reads);
        }
        match (place, decoded) {
            (Place::Sending, Frame::Status(status)) => {
                let end = &mut state.sending;
                let before = end.other.as_ref().map(|other| (other.instance, other.received));
                if before != Some((status.instance, status.received)) {
                    state.received_at = now;
                    state.sent_again.1 = AGAIN_AFTER.max(2 * (ROUND_TRIP + TELL_AFTER));
                }
                end.must_tell |= before.map(|before| before.0) != Some(status.instance);
                state.sender.acknowledge(status.known_stream, status.delivered, status.limit);
                let is_asked = status.again && now >= state.sent_again.0 + ROUND_TRIP;
                (end.other, end.other_seen) = (Some(*status), now);
                if is_asked {
                    self.send_again(line);
                }
            }
            (Place::Receiving, Frame::Status(status)) => {
                let end = &mut state.receiving;
                end.must_tell |= end.other_instance() != status.instance;
                end.must_tell |= state.receiver.adopt(status.stream, status.oldest);
                state.counted += state.receiver.give_up_before(status.stream, status.oldest);
                (end.other, end.other_seen) = (Some(*status), now);
            }
            (Place::Receiving, Frame::Item(head, _)) => {
                let end = &mut state.receiving;
                let is_mine = end.other.as_ref().is_some_and(|other| other.stream == head.stream);
                if !is_mine || head.to != end.instance {
                    return;
                }
                end.other_seen = now;
                match state.receiver.accept(head, frame) {
                    Arrival::Next { lost } => state.counted += lost,
                    Arrival::Old => end.must_tell = true,
                    Arrival::Early => {
                        let received = state.receiver.received();
                        let is_asked =
                            end.asked.is_some_and(|(at, before)| before == received && now < at + ASK_EVERY);
                        if !is_asked {
                            end.asked = Some((now, received));
                            (end.must_tell, end.asks) = (true, true);
                        }
                    }
                    Arrival::Beyond => panic!("a sender ignores the limit"),
                }
                while let Some(received) = state.receiver.front() {
                    let message = u64::from_le_bytes(received.frame()[ITEM_HEAD_BYTES..].try_into().unwrap());
                    assert!(message > state.last, "message {message} comes after {}", state.last);
                    (state.last, state.arrived) = (message, state.arrived + 1);
                    state.receiver.pop();
                }
            }
            (Place::Sending, Frame::Item(..)) => panic!("messages cross in one direction"),
        }
    }

    /// Does the work of an end after a frame, a message of its program, or a pause.
    fn step(&mut self, line: usize, place: Place) {
        let now = self.now;
        if place == Place::Sending {
            let state = &mut self.lines[line];
            if received_by_other(state) + 1 == state.sender.next() {
                state.received_at = now;
            }
            loop {
                let state = &mut self.lines[line];
                let may_take = state.taken < state.made && state.sender.has_room();
                if !may_take || !state.sending.is_connected(now) {
                    break;
                }
                state.taken += 1;
                let message = state.taken.to_le_bytes();
                let to = state.sending.other_instance();
                let head = ItemHead { msg_len: 8, ..ItemHead::new(ItemKind::Inline, to) };
                let frame = state.sender.add(head, |frame| frame.extend_from_slice(&message)).to_vec();
                let kept = state.sender.next() - state.sender.oldest();
                self.most_kept = self.most_kept.max(usize::try_from(kept).unwrap());
                self.send(line, Place::Receiving, frame);
            }
            let state = &self.lines[line];
            let received = received_by_other(state);
            let is_stalled = !state.sender.is_drained()
                && received + 1 < state.sender.next()
                && now >= state.received_at.max(state.sent_again.0) + state.sent_again.1
                && state.sending.is_connected(now);
            if is_stalled {
                self.lines[line].sent_again.1 = (2 * self.lines[line].sent_again.1).min(AGAIN_AFTER_MAX);
                self.send_again(line);
            }
        }
        self.tell(line, place);
    }

    fn send_again(&mut self, line: usize) {
        let state = &mut self.lines[line];
        state.sent_again.0 = self.now;
        let (to, received) = (state.sending.other_instance(), received_by_other(state));
        let frames: Vec<_> = state.sender.again(to, received).map(|frame| frame.to_vec()).collect();
        state.again += frames.len() as u64;
        frames.into_iter().for_each(|frame| self.send(line, Place::Receiving, frame));
    }

    fn tell(&mut self, line: usize, place: Place) {
        let now = self.now;
        let state = &mut self.lines[line];
        let end = if place == Place::Sending { &mut state.sending } else { &mut state.receiving };
        let mut status = Status {
            to: end.other_instance(),
            clock_us: now,
            again: end.asks,
            ..Status::new(end.reads, end.instance, 1)
        };
        match place {
            Place::Sending => {
                (status.stream, status.oldest) = (state.sender.stream(), state.sender.oldest());
                (status.next, status.is_drained) = (state.sender.next(), state.sender.is_drained());
            }
            Place::Receiving => {
                (status.known_stream, status.limit) = (state.receiver.stream(), state.receiver.limit());
                (status.delivered, status.received) = (state.receiver.delivered(), state.receiver.received());
            }
        }
        let news =
            [status.to, status.known_stream, status.delivered, status.limit, u64::from(status.is_drained)];
        let is_due = end.must_tell
            || end
                .told
                .is_none_or(|(at, told)| now >= at + if told == news { STATUS_EVERY } else { TELL_AFTER });
        if is_due {
            (end.must_tell, end.asks, end.told) = (false, false, Some((now, news)));
        }
        let (at, told) = end.told.unwrap_or_default();
        let mut wakes_at = at + if told == news { STATUS_EVERY } else { TELL_AFTER };
        if place == Place::Sending && !status.is_drained {
            wakes_at = wakes_at.min(now + AGAIN_AFTER / 2);
        }
        // One wake-up is enough, if it comes in time.
        let is_planned = (now + 1..=wakes_at).contains(&end.wakes_at);
        if !is_planned {
            end.wakes_at = wakes_at;
        }
        let writes = end.writes;
        if !is_planned {
            self.schedule(wakes_at, line, place, Event::Wake);
        }
        if is_due {
            let to = if place == Place::Sending { Place::Receiving } else { Place::Sending };
            let frame = status.encode(writes);
            self.send(line, to, frame);
        }
    }

    /// The bridge of this end is killed, and starts at once with what its journal has.
    fn restart(&mut self, line: usize, place: Place, reads: ProtocolVersions) {
        let (instance, wait) = (self.draw(), self.draw() % (100 * MS));
        let at = self.now + wait;
        let state = &mut self.lines[line];
        let end = End::new(instance, reads);
        match place {
            Place::Sending => {
                state.with_killed += state.sender.next() - state.sender.oldest();
                state.sender = Sender::new(state.sender.stream(), state.sender.next() - 1);
                state.sender.set_version(end.writes);
                state.sending = end;
            }
            Place::Receiving => {
                let (stream, delivered) = (state.receiver.stream(), state.receiver.delivered());
                state.receiver = Receiver::new(stream, delivered, WINDOW);
                state.receiving = end;
            }
        }
        self.schedule(at, line, place, Event::Wake);
    }

    /// Lines on which something that was sent has neither arrived nor been counted.
    fn unfinished(&self) -> usize {
        self.lines.iter().filter(|line| !line.sender.is_drained() || line.taken < line.made).count()
    }

    /// No program sends any longer; checks what came out.
    fn finish(&mut self, what: &str) {
        self.scheduled.retain(|Reverse((.., event))| *event != Event::Make);
        self.run_until(self.now + 2 * STATUS_EVERY);
        assert_eq!(self.unfinished(), 0);
        let (mut messages, mut counted, mut again) = (0, 0, 0);
        for line in &self.lines {
            assert_eq!(line.arrived + line.counted, line.made, "a gap that was not counted");
            assert!(line.counted <= line.with_killed, "lost though its sender lived");
            (messages, counted, again) = (messages + line.made, counted + line.counted, again + line.again);
        }
        println!(
            "{what}, {} links: {messages} messages, {counted} lost and counted, {again} sent again, {} frames, at most {} kept by a link",
            self.lines.len(),
            self.frames,
            self.most_kept
        );
    }
}

fn received_by_other(line: &Line) -> u64 {
    let knows = |other: &&Status| other.known_stream == line.sender.stream();
    line.sending.other.as_ref().filter(knows).map_or(0, |other| other.received)
}

/// All far nodes are cut off, for longer than the limit of silence, and come back at once.
fn reconnect_storm(nodes: usize, links: usize) {
    let mut world = World::new(nodes, links);
    world.run_until(5 * SECOND);
    assert!(world.lines.iter().all(|line| line.arrived > 0 && line.again == 0), "nothing was late");
    world.cut.fill(true);
    world.run_until(20 * SECOND);
    let before: BTreeMap<usize, u64> = world.lines.iter().map(|line| line.arrived).enumerate().collect();
    let frames = world.frames;
    world.cut.fill(false);
    // Each side is heard of with its next status, after two seconds at the latest, and the ring is then empty in a few round trips.
    world.run_until(23 * SECOND);
    for (number, line) in world.lines.iter().enumerate() {
        let waited = line.arrived - before[&number];
        assert!(waited >= 25, "{waited} messages of line {number} have come three seconds later");
    }
    let (lines, again) = (world.lines.len() as u64, world.lines.iter().map(|line| line.again).max().unwrap());
    assert!(again <= 2 * WINDOW, "a line has sent {again} frames again");
    let in_storm = (world.frames - frames) / lines;
    assert!(in_storm <= 4 * WINDOW, "{in_storm} frames a line");
    assert!(world.most_kept as u64 <= WINDOW);
    world.finish("reconnect storm");
}

/// Kills the bridge of each far node in turn, then the home node's, which has all links. Those that start are of the next release. Then
/// half of the far nodes go back to the old one.
fn rolling_upgrade(nodes: usize, links: usize) {
    let mut world = World::new(nodes, links);
    world.run_until(5 * SECOND);
    let written = |world: &World| {
        let both = world.lines.iter().flat_map(|line| [line.sending.writes, line.receiving.writes]);
        both.fold([0; 4], |mut counts, version| {
            counts[usize::from(version)] += 1;
            counts
        })
    };
    let ends = 2 * nodes * links;
    assert_eq!(written(&world), [0, 0, ends, 0]);
    for node in 0..nodes {
        world.run_until(world.now + 50 * MS);
        for line in node * links..(node + 1) * links {
            // Of every other link the far node is the one that sends.
            world.restart(line, if line % 2 == 0 { Place::Receiving } else { Place::Sending }, NEW);
        }
    }
    // Messages are on their way when the home node's bridge is killed.
    world.cut.fill(true);
    world.run_until(world.now + SECOND);
    world.cut.fill(false);
    for line in 0..world.lines.len() {
        world.restart(line, if line % 2 == 0 { Place::Sending } else { Place::Receiving }, NEW);
    }
    world.run_until(world.now + 3 * SECOND);
    assert!(world.lines.iter().any(|line| line.with_killed > 0));
    assert_eq!(written(&world), [0, 0, 0, ends]);
    for line in 0..nodes / 2 * links {
        world.restart(line, if line % 2 == 0 { Place::Receiving } else { Place::Sending }, OLD);
    }
    world.run_until(world.now + 3 * SECOND);
    let old = nodes / 2 * links * 2;
    assert_eq!(written(&world), [0, 0, old, ends - old]);
    assert!(world.unread > 0, "an old bridge began in a version that a new one does not read");
    world.finish("rolling upgrade");
}

#[test]
fn storm_of_reconnections_is_bounded() {
    reconnect_storm(10, 10);
}

#[test]
fn rolling_upgrade_counts_each_gap() {
    rolling_upgrade(10, 10);
}

/// Far nodes with a hundred links each.
fn many_nodes() -> usize {
    std::env::var("SHMESH_BRIDGE_NODES").map_or(20, |nodes| nodes.parse().unwrap())
}

#[test]
#[ignore = "long: 20 far nodes with 100 links each"]
fn storm_of_2000_reconnections_is_bounded() {
    reconnect_storm(many_nodes(), 100);
}

#[test]
#[ignore = "long: 20 far nodes with 100 links each"]
fn rolling_upgrade_of_20_nodes_counts_each_gap() {
    rolling_upgrade(many_nodes(), 100);
}
