//! The oracle of broadcast rings: random sequences of operations by a writer and readers, compared with the list of all
//! messages.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::stage::{
    self, DATA, HeldBuffers, InlineError, ReceivedItem, Release, abandon, attach, broadcast, loan, loan_with,
    release, rules, send, send_inline,
};
use crate::config::SlowReaders;
use crate::link::core::Core;
use crate::link::endpoint::Endpoint;
use crate::participant::Participant;
use crate::participant::Side::{Primary, Secondary};
use crate::pool::owner::{DataOwner, Holder, MsgOwner};
use crate::ring::Ring;
use crate::sync::Ordering;

#[derive(Clone, Debug)]
enum Operation {
    Join,
    Leave(usize),
    Die(usize),
    Evict(usize),
    Recover,
    /// The writer detaches or dies, and another one takes its role.
    Succeed(bool),
    Send(bool),
    SendInline,
    Receive(usize),
    /// As `Receive`, and the message is made independent of the handle.
    ReceiveOwned(usize),
    Release(usize, usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let n = || 0..64_usize;
    prop_oneof![
        2 => Just(Join),
        1 => n().prop_map(Leave),
        1 => n().prop_map(Die),
        1 => n().prop_map(Evict),
        1 => Just(Recover),
        1 => any::<bool>().prop_map(Succeed),
        12 => any::<bool>().prop_map(Send),
        6 => Just(SendInline),
        20 => n().prop_map(Receive),
        10 => n().prop_map(ReceiveOwned),
        12 => (n(), n()).prop_map(|(a, b)| Release(a, b)),
    ]
}

struct Reader {
    endpoint: Box<Endpoint>,
    /// Index of the next message.
    next: usize,
    held: Vec<(usize, HeldBuffers)>,
    /// Owned messages, and what releases each.
    owned: Vec<(usize, HeldBuffers, Release)>,
    lost: u64,
}

impl Reader {
    /// The position of its cursor.
    fn oldest(&self) -> usize {
        self.held().map(|(index, _)| index).min().unwrap_or(self.next)
    }

    /// The messages in buffers that it holds, and their indices.
    fn held(&self) -> impl Iterator<Item = (usize, &HeldBuffers)> {
        let owned = self.owned.iter().map(|(index, held, _)| (*index, held));
        self.held.iter().map(|(index, held)| (*index, held)).chain(owned)
    }
}

struct World {
    core: Core,
    slow: SlowReaders,
    history: usize,
    capacity: usize,
    writer: Box<Endpoint>,
    readers: Vec<Reader>,
    dead: Vec<(Participant, Option<usize>)>,
    /// Every message sent: its id, and its buffer unless it is inline.
    sent: Vec<(i32, Option<u32>)>,
    /// The first message that is not overwritten. With `skip` the ring determines it.
    low_mark: usize,
    fresh: i32,
}

impl World {
    fn new(slow: SlowReaders, capacity: u32, history: u32, msg: u32, data: u32) -> Self {
        let core = broadcast(capacity, rules(slow, history), msg, data);
        let writer = attach(&core, Primary);
        Self {
            core,
            slow,
            history: history as usize,
            capacity: capacity as usize,
            writer,
            readers: Vec::new(),
            dead: Vec::new(),
            sent: Vec::new(),
            low_mark: 0,
            fresh: 0,
        }
    }

    fn skips(&self) -> bool {
        self.slow == SlowReaders::Skip
    }

    fn make_free(&self) -> bool {
        let Ring::Broadcast(ring) = &self.writer.outgoing else { unreachable!() };
        self.writer.make_free(ring, self.writer.writer(ring).unwrap())
    }

    /// Where the writer finds the slowest cursor. Readers that died and were not recovered count.
    fn look(&mut self) -> usize {
        let cursors = self.readers.iter().map(Reader::oldest);
        let dead = self.dead.iter().filter_map(|(_, cursor)| *cursor);
        let slowest = cursors.chain(dead).min().unwrap_or(self.sent.len());
        self.low_mark = self.low_mark.max(slowest.min(self.sent.len().saturating_sub(self.history)));
        self.low_mark
    }

    fn pick(&self, i: usize) -> Option<usize> {
        (!self.readers.is_empty()).then(|| i % self.readers.len())
    }

    /// Sends a loan, and compares the result with the list.
    fn sends(&mut self, cell: Option<u32>, sent: bool) {
        if !self.skips() {
            let room = self.sent.len() - self.look() < self.capacity;
            assert_eq!(sent, room, "the slowest reader sets the pace");
        } else {
            assert!(sent, "the writer never waits");
        }
        if sent {
            self.sent.push((self.fresh, cell));
        }
    }

    fn loan(&mut self, with_data: bool) -> Option<HeldBuffers> {
        loop {
            let loaned =
                if with_data { loan_with(&self.writer).and_then(Result::ok) } else { loan(&self.writer) };
            if loaned.is_some() || !self.make_free() {
                return loaned;
            }
        }
    }

    fn step(&mut self, operation: &Operation) {
        use Operation::*;
        match *operation {
            Join if self.readers.len() + self.dead.len() < 6 => {
                let next = self.sent.len().saturating_sub(self.history);
                self.readers.push(Reader {
                    endpoint: attach(&self.core, Secondary),
                    next,
                    held: Vec::new(),
                    owned: Vec::new(),
                    lost: 0,
                });
            }
            Join => {}
            Leave(i) | Die(i) | Evict(i) => {
                let Some(i) = self.pick(i) else { return };
                let reader = self.readers.swap_remove(i);
                let oldest = reader.oldest();
                match operation {
                    Leave(_) => {
                        // The seat stays taken until the last owned message is released.
                        reader.endpoint.retire();
                        for (_, held, release) in reader.owned {
                            self.check_held(&held);
                            release();
                        }
                        stage::leave(&reader.endpoint);
                    }
                    Die(_) => self.dead.push((abandon(reader.endpoint), Some(oldest))),
                    _ => {
                        let other = abandon(reader.endpoint);
                        assert!(self.core.seats.evict(&other));
                        self.core.reclaim(&other, self.writer.me.seat, true);
                        self.dead.push((other, None));
                    }
                }
            }
            Recover => {
                for (dead, _) in std::mem::take(&mut self.dead) {
                    self.core.reclaim(&dead, self.writer.me.seat, false);
                }
            }
            Succeed(dies) => {
                let next = attach(&self.core, Primary);
                let writer = std::mem::replace(&mut self.writer, next);
                if dies {
                    let dead = abandon(writer);
                    self.core.reclaim(&dead, self.writer.me.seat, false);
                } else {
                    stage::leave(&writer);
                }
                let Ring::Broadcast(ring) = &self.writer.outgoing else { unreachable!() };
                self.writer.writer(ring).expect("the role is open");
            }
            Send(with_data) => {
                if with_data && self.core.pool(DATA).is_none() {
                    return;
                }
                let Some(mut held) = self.loan(with_data) else {
                    return self.check_exhausted(with_data);
                };
                self.fresh += 1;
                held.msg_id = self.fresh;
                let sent = send(&self.writer, &held);
                self.sends(Some(held.cell), sent);
                assert!(sent || release(&self.writer, &held));
            }
            SendInline => {
                self.fresh += 1;
                let sent = send_inline(&self.writer, self.fresh);
                assert_ne!(sent, Err(InlineError::NoCell));
                self.sends(None, sent.is_ok());
            }
            Receive(i) => {
                let Some(i) = self.pick(i) else { return };
                if self.readers[i].held().count() < 6 {
                    self.receive(i);
                }
            }
            ReceiveOwned(i) => {
                let Some(i) = self.pick(i) else { return };
                let count = self.readers[i].held().count();
                if count == 6 {
                    return;
                }
                self.receive(i);
                let reader = &mut self.readers[i];
                if reader.held().count() == count {
                    return;
                }
                let (index, held) = reader.held.pop().expect("it was just received");
                match stage::own(&reader.endpoint, &held) {
                    Some(release) => reader.owned.push((index, held, release)),
                    None => {
                        assert!(self.slow == SlowReaders::Skip && count == 5, "all holds are in use");
                        assert!(release(&reader.endpoint, &held));
                    }
                }
            }
            Release(i, j) => {
                let Some(i) = self.pick(i) else { return };
                let reader = &mut self.readers[i];
                let all = reader.held().count();
                let Some(j) = j.checked_rem(all) else { return };
                if j < reader.held.len() {
                    let held = reader.held.swap_remove(j).1;
                    assert!(release(&reader.endpoint, &held));
                } else {
                    let release = reader.owned.swap_remove(j - reader.held.len()).2;
                    release();
                }
            }
        }
    }

    fn receive(&mut self, i: usize) {
        let (skips, len) = (self.skips(), self.sent.len());
        let reader = &mut self.readers[i];
        let got = stage::receive(&reader.endpoint).expect("no damage");
        let Some(got) = got else {
            // Without a history, a writer that needs buffers skips even the newest message.
            assert!(reader.next == len || skips && self.history == 0, "everything was received");
            reader.lost += (len - reader.next) as u64;
            reader.next = len;
            assert_eq!(reader.endpoint.reader().lost(), reader.lost);
            return;
        };
        let index = self.sent.iter().position(|(id, _)| *id == got.msg_id()).expect("it was sent");
        if index != reader.next {
            assert!(
                skips && index > reader.next && index == len - 1,
                "an overtaken reader continues with the newest message"
            );
            reader.lost += (index - reader.next) as u64;
        }
        assert_eq!(reader.endpoint.reader().lost(), reader.lost);
        reader.next = index + 1;
        match got {
            ReceivedItem::Pooled(held) => {
                assert_eq!(Some(held.cell), self.sent[index].1);
                reader.held.push((index, held));
            }
            ReceivedItem::Inline(id, first, last) => {
                let word = u64::from(id.cast_unsigned());
                assert_eq!((first, last, self.sent[index].1), (word, word, None));
            }
        }
    }

    /// No buffer can be loaned: the history or readers keep all of them.
    fn check_exhausted(&mut self, with_data: bool) {
        let low_mark = if self.skips() { self.sent.len().saturating_sub(self.history) } else { self.look() };
        let cells = self.sent[low_mark..].iter().filter_map(|sent| sent.1);
        let held = self.readers.iter().flat_map(|reader| reader.held().map(|(_, held)| held.cell));
        let mut kept: BTreeSet<u32> = cells.collect();
        if self.skips() {
            kept.extend(held);
            // A hold of a reader that died without being recovered counts like any other.
            if !self.dead.is_empty() {
                return;
            }
        }
        let len = self.core.msg().table.len();
        assert!(with_data || kept.len() == len, "{} of {len} buffers are kept", kept.len());
    }

    fn owner(&self, cell: u32) -> MsgOwner {
        MsgOwner(self.core.msg().table.owner(cell).load(Ordering::Relaxed))
    }

    fn check_held(&self, held: &HeldBuffers) {
        let owner = self.owner(held.cell);
        assert!(matches!(owner.holder(), Holder::Published(_)), "a reader has it");
        if let Some((pool, index)) = held.data {
            let table = self.core.data_table(pool).unwrap().0;
            let data = DataOwner(table.owner(index).load(Ordering::Relaxed));
            assert!(data.belongs_to(held.cell, owner));
        }
    }

    /// Messages that readers hold or have not received are in the ring, and each DATA buffer belongs to one message.
    fn check(&self) {
        let mut kept = BTreeMap::new();
        for reader in &self.readers {
            for (_, held) in reader.held() {
                self.check_held(held);
                kept.insert(held.cell, held.msg_id);
            }
            if !self.skips() {
                for (id, cell) in &self.sent[reader.next..] {
                    let Some(cell) = cell else { continue };
                    let holder = self.owner(*cell).holder();
                    assert!(matches!(holder, Holder::Published(_)), "it waits for a reader");
                    assert!(
                        kept.insert(*cell, *id).is_none_or(|other| other == *id),
                        "one buffer for one message"
                    );
                }
            }
            assert_eq!(
                matches!(&reader.endpoint.incoming, Ring::Broadcast(ring) if ring.has_message(reader.endpoint.reader())),
                reader.next < self.sent.len()
            );
        }
    }

    /// All participants detach or die. A last writer finds everything free except the history.
    fn finish(mut self) {
        for operation in [Operation::Recover, Operation::Succeed(true)] {
            self.step(&operation);
        }
        for reader in std::mem::take(&mut self.readers) {
            // After the writer that sent their messages.
            self.dead.push((abandon(reader.endpoint), None));
        }
        self.step(&Operation::Recover);
        self.step(&Operation::Succeed(true));
        while self.make_free() {}
        let history = self.sent.len().saturating_sub(self.history);
        let kept = self.sent[history..].iter().filter(|sent| sent.1.is_some()).count();
        let table = &self.core.msg().table;
        let newcomer = attach(&self.core, Secondary);
        for (id, _) in &self.sent[history..] {
            let got = stage::receive(&newcomer).expect("no damage").expect("the history");
            assert_eq!(got.msg_id(), *id);
            assert!(stage::finish(&newcomer, &got));
        }
        let free = std::iter::from_fn(|| loan(&self.writer)).count();
        assert_eq!(free, table.len() - kept, "every other MSG buffer is free and known");
        stage::leave(&newcomer);
    }
}

fn random_rings(cases: u32) {
    let slow = prop_oneof![Just(SlowReaders::Wait), Just(SlowReaders::Skip), Just(SlowReaders::Evict)];
    let rings = (slow, 1..6_u32, 0..32_u32, 1..40_u32, 0..20_u32, prop::collection::vec(operation(), 1..400));
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&rings, |(slow, shift, history, msg, data, operations)| {
        let history = (history % (1 << shift)).min(msg - 1).min(data.max(1) - 1);
        let mut world = World::new(slow, 1 << shift, history, msg, data);
        for operation in &operations {
            world.step(operation);
            world.check();
        }
        world.finish();
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn owned_message_of_a_reader_without_its_seat_does_not_affect_its_successor() {
    for slow in [SlowReaders::Wait, SlowReaders::Skip] {
        let core = broadcast(4, rules(slow, 0), 2, 0);
        let (writer, reader) = (attach(&core, Primary), attach(&core, Secondary));
        let receive = |reader: &Endpoint| match stage::receive(reader).expect("no damage") {
            Some(ReceivedItem::Pooled(held)) => held,
            other => panic!("{other:?}"),
        };
        assert!(send(&writer, &loan(&writer).unwrap()));
        let release_first = stage::own(&reader, &receive(&reader)).unwrap();
        // As if its process had ended.
        core.reclaim(&reader.me, writer.me.seat, false);
        let newcomer = attach(&core, Secondary);
        assert_eq!(newcomer.me.seat, reader.me.seat);
        assert!(send(&writer, &loan(&writer).unwrap()));
        let held = receive(&newcomer);
        let Ring::Broadcast(ring) = &writer.outgoing else { unreachable!() };
        if slow == SlowReaders::Wait {
            assert!(release(&newcomer, &held));
        }
        release_first();
        assert_eq!(ring.place_of(&newcomer.me, &core.seats), Some((0, 0)));
        let made = writer.writer(ring).unwrap();
        while writer.make_free(ring, made) {}
        let free = std::iter::from_fn(|| loan(&writer)).count();
        assert_eq!(free, if slow == SlowReaders::Wait { 2 } else { 1 }, "{slow:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "too many cases")]
fn rings_match_the_model() {
    random_rings(24);
}

#[test]
#[ignore = "long: 1,000 cases"]
fn rings_match_the_model_in_many_cases() {
    random_rings(1_000);
}
