//! The oracle: random sequences of operations by participants, compared with a model of queues and holders.
//!
//! After each step the owner words match the model, and a loan fails if and only if nothing is free. At the end, when all
//! participants have detached, everything is free and can be loaned.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::stage::{
    self, DATA, HeldBuffers, InlineError, ReceivedItem, abandon, attach, leave, link, loan, loan_with,
    receive_batch, release, release_anywhere, send_inline,
};
use crate::link::core::Core;
use crate::link::endpoint::Endpoint;
use crate::participant::Side::{Primary, Secondary};
use crate::participant::{Participant, SeatIndex, Side};
use crate::pool::owner::{self, DataOwner, Holder, MsgOwner};
use crate::ring::Ring;
use crate::sync::Ordering;

#[derive(Clone, Debug)]
enum Operation {
    Attach(bool),
    Detach(usize),
    Abandon(usize),
    Recover(usize),
    Evict(usize, usize),
    Loan(usize),
    LoanWith(usize),
    Drop(usize, usize),
    Send(usize, usize),
    SendInline(usize),
    Receive(usize),
    ReceiveBatch(usize, usize),
    Release(usize, usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let n = || 0..64_usize;
    prop_oneof![
        2 => any::<bool>().prop_map(Attach),
        1 => n().prop_map(Detach),
        1 => n().prop_map(Abandon),
        1 => n().prop_map(Recover),
        1 => (n(), n()).prop_map(|(a, b)| Evict(a, b)),
        6 => n().prop_map(Loan),
        6 => n().prop_map(LoanWith),
        3 => (n(), n()).prop_map(|(a, b)| Drop(a, b)),
        12 => (n(), n()).prop_map(|(a, b)| Send(a, b)),
        4 => n().prop_map(SendInline),
        10 => n().prop_map(Receive),
        3 => (n(), 1..5_usize).prop_map(|(a, b)| ReceiveBatch(a, b)),
        10 => (n(), n()).prop_map(|(a, b)| Release(a, b)),
    ]
}

struct Agent {
    endpoint: Box<Endpoint>,
    loans: Vec<HeldBuffers>,
    messages: Vec<HeldBuffers>,
    evicted: bool,
}

/// A message in a ring: its id, and its buffer unless it is inline.
type QueuedItem = (i32, Option<u32>);

struct World {
    core: Core,
    single: bool,
    capacity: usize,
    agents: Vec<Agent>,
    dead: Vec<Participant>,
    /// One per ring: first the ring on which the primary sends.
    queues: [VecDeque<QueuedItem>; 2],
    /// The participants with the roles of a ring with one producer and one consumer: `[ring][producer, consumer]`.
    roles: [[Option<SeatIndex>; 2]; 2],
    /// For each MSG buffer in use, its holder and its DATA buffer.
    held: BTreeMap<u32, (Holder, Option<u32>)>,
    next_id: i32,
}

fn ring_of(side: Side, receives: bool) -> usize {
    usize::from((side == Secondary) != receives)
}

impl World {
    fn new(single: bool, capacity: u32, msg: u32, data: u32) -> Self {
        let core = link(capacity, single, msg, data);
        let mut world = Self {
            core,
            single,
            capacity: capacity as usize,
            agents: Vec::new(),
            dead: Vec::new(),
            queues: [VecDeque::new(), VecDeque::new()],
            roles: [[None; 2]; 2],
            held: BTreeMap::new(),
            next_id: 0,
        };
        world.attach(Primary);
        world.attach(Secondary);
        world
    }

    fn attach(&mut self, side: Side) {
        if self.agents.len() + self.dead.len() < 8 {
            let endpoint = attach(&self.core, side);
            self.agents.push(Agent { endpoint, loans: Vec::new(), messages: Vec::new(), evicted: false });
        }
    }

    fn pick(&self, i: usize) -> Option<usize> {
        (!self.agents.is_empty()).then(|| i % self.agents.len())
    }

    /// Selects an agent that may take a role, or has it already.
    fn may(&self, agent: usize, receives: bool) -> bool {
        let me = &self.agents[agent];
        if me.evicted {
            return false;
        }
        let role = self.roles[ring_of(me.endpoint.side(), receives)][usize::from(receives)];
        !self.single || role.is_none_or(|seat| seat == me.endpoint.me.seat)
    }

    fn plays(&mut self, agent: usize, receives: bool) -> usize {
        let (side, seat) = (self.agents[agent].endpoint.side(), self.agents[agent].endpoint.me.seat);
        let ring = ring_of(side, receives);
        self.roles[ring][usize::from(receives)] = Some(seat);
        ring
    }

    fn free_messages(&self) -> usize {
        self.core.msg().table.len() - self.held.len()
    }

    fn free_data(&self) -> usize {
        let len = self.core.pool(DATA).map_or(0, |pool| pool.table.len());
        len - self.held.values().filter(|(_, data)| data.is_some()).count()
    }

    /// The seat is vacant: what it held, and did not send, is free.
    fn forget(&mut self, seat: SeatIndex) -> (u32, u32) {
        let queued: Vec<u32> = self.queues.iter().flatten().filter_map(|sent| sent.1).collect();
        let mut freed = (0, 0);
        self.held.retain(|cell, (holder, data)| {
            let stays = *holder != Holder::Borrowed(seat)
                && (*holder != Holder::Loaned(seat) || queued.contains(cell));
            if !stays {
                freed.0 += 1;
                freed.1 += u32::from(data.is_some());
            }
            stays
        });
        freed
    }

    fn vacate(&mut self, seat: SeatIndex) {
        for role in self.roles.iter_mut().flatten() {
            *role = role.filter(|&holder| holder != seat);
        }
    }

    fn got(&mut self, agent: usize, ring: usize, got: Option<ReceivedItem>) {
        let expected = self.queues[ring].pop_front();
        let seat = self.agents[agent].endpoint.me.seat;
        match (expected, got) {
            (None, None) => {}
            (Some((id, None)), Some(ReceivedItem::Inline(found, first, last))) => {
                assert_eq!(
                    (found, first, last),
                    (id, u64::from(id.cast_unsigned()), u64::from(id.cast_unsigned()))
                );
            }
            (Some((id, Some(cell))), Some(ReceivedItem::Pooled(held))) => {
                assert_eq!((held.msg_id, held.cell), (id, cell));
                let entry = self.held.get_mut(&cell).expect("it was sent");
                assert_eq!(held.data.map(|(_, index)| index), entry.1);
                entry.0 = Holder::Borrowed(seat);
                self.agents[agent].messages.push(held);
            }
            (expected, got) => panic!("expected {expected:?}, got {got:?}"),
        }
    }

    fn step(&mut self, operation: &Operation) {
        use Operation::*;
        let first = match *operation {
            Attach(primary) => {
                self.attach(if primary { Primary } else { Secondary });
                return;
            }
            Detach(i)
            | Abandon(i)
            | Recover(i)
            | Evict(i, _)
            | Loan(i)
            | LoanWith(i)
            | Drop(i, _)
            | Send(i, _)
            | SendInline(i)
            | Receive(i)
            | ReceiveBatch(i, _)
            | Release(i, _) => i,
        };
        let Some(a) = self.pick(first) else { return };
        let seat = self.agents[a].endpoint.me.seat;
        match *operation {
            Attach(_) => unreachable!(),
            Detach(_) => {
                let agent = self.agents.remove(a);
                leave(&agent.endpoint);
                self.forget(seat);
                self.vacate(seat);
            }
            Abandon(_) => {
                let agent = self.agents.remove(a);
                self.dead.push(abandon(agent.endpoint));
            }
            Recover(_) if self.agents[a].evicted => {}
            Recover(_) => {
                for dead in std::mem::take(&mut self.dead) {
                    let done = self.core.reclaim(&dead, seat, false);
                    let freed = self.forget(dead.seat);
                    assert_eq!((done.messages, done.data_buffers, done.readmitted), (freed.0, freed.1, 0));
                    self.vacate(dead.seat);
                }
            }
            Evict(_, b) => {
                let b = b % self.agents.len();
                if self.single || a == b || self.agents[a].evicted || self.agents[b].evicted {
                    return;
                }
                let other = self.agents[b].endpoint.me;
                assert!(self.core.seats.evict(&other));
                let done = self.core.reclaim(&other, seat, true);
                let freed = self.forget(other.seat);
                assert_eq!((done.messages, done.data_buffers), freed);
                self.agents[b].evicted = true;
                assert!(!self.agents[b].endpoint.is_current());
            }
            Loan(_) if self.agents[a].evicted => {}
            Loan(_) => match loan(&self.agents[a].endpoint) {
                Some(held) => {
                    assert!(
                        self.held.insert(held.cell, (Holder::Loaned(seat), None)).is_none(),
                        "it was free"
                    );
                    self.agents[a].loans.push(held);
                }
                None => assert_eq!(self.free_messages(), 0, "nothing is free"),
            },
            LoanWith(_) if self.agents[a].evicted || self.core.pool(DATA).is_none() => {}
            LoanWith(_) => match loan_with(&self.agents[a].endpoint) {
                Some(Ok(held)) => {
                    let data = held.data.map(|(_, index)| index);
                    assert!(self.held.values().all(|(_, other)| *other != data), "it was free");
                    assert!(
                        self.held.insert(held.cell, (Holder::Loaned(seat), data)).is_none(),
                        "it was free"
                    );
                    self.agents[a].loans.push(held);
                }
                Some(Err(())) => assert_eq!(self.free_data(), 0, "no DATA buffer is free"),
                None => assert_eq!(self.free_messages(), 0, "nothing is free"),
            },
            Drop(_, i) | Release(_, i) => {
                let agent = &mut self.agents[a];
                let of = if matches!(operation, Drop(..)) { &mut agent.loans } else { &mut agent.messages };
                if of.is_empty() {
                    return;
                }
                let held = of.swap_remove(i % of.len());
                // Released as an owned message, or as a borrowed one.
                let released = match i % 2 {
                    0 => release_anywhere(&agent.endpoint.core, &held),
                    _ => release(&agent.endpoint, &held),
                };
                assert_eq!(released, !agent.evicted, "releasing fails only after an eviction");
                if !agent.evicted {
                    self.held.remove(&held.cell);
                }
            }
            Send(_, i) => {
                if self.agents[a].loans.is_empty() || !self.may(a, false) {
                    return;
                }
                let ring = self.plays(a, false);
                let i = i % self.agents[a].loans.len();
                let mut held = self.agents[a].loans.swap_remove(i);
                self.next_id += 1;
                held.msg_id = self.next_id;
                let room = self.queues[ring].len() < self.capacity;
                assert_eq!(stage::send(&self.agents[a].endpoint, &held), room);
                if room {
                    self.queues[ring].push_back((held.msg_id, Some(held.cell)));
                } else {
                    self.agents[a].loans.push(held);
                }
            }
            SendInline(_) => {
                if !self.may(a, false) {
                    return;
                }
                let ring = self.plays(a, false);
                self.next_id += 1;
                let inline = self.queues.iter().flatten().filter(|sent| sent.1.is_none()).count();
                let expected = if !self.single && inline == 2 * self.capacity {
                    Err(InlineError::NoCell)
                } else if self.queues[ring].len() == self.capacity {
                    Err(InlineError::Full)
                } else {
                    Ok(())
                };
                assert_eq!(send_inline(&self.agents[a].endpoint, self.next_id), expected);
                if expected.is_ok() {
                    self.queues[ring].push_back((self.next_id, None));
                }
            }
            Receive(_) => {
                if !self.may(a, true) {
                    return;
                }
                let ring = self.plays(a, true);
                let got = stage::receive(&self.agents[a].endpoint).expect("no damage");
                self.got(a, ring, got);
            }
            ReceiveBatch(_, max) => {
                if !self.may(a, true) {
                    return;
                }
                let ring = self.plays(a, true);
                let all = receive_batch(&self.agents[a].endpoint, max).expect("no damage");
                assert_eq!(all.len(), max.min(self.queues[ring].len()));
                all.into_iter().for_each(|got| self.got(a, ring, Some(got)));
            }
        }
    }

    fn check(&self) {
        let table = &self.core.msg().table;
        for cell in 0..u32::try_from(table.len()).unwrap() {
            let owner = MsgOwner(table.owner(cell).load(Ordering::Relaxed));
            let (holder, data) = self.held.get(&cell).copied().unwrap_or((Holder::Free, None));
            assert_eq!(owner.holder(), holder, "MSG buffer {cell}");
            if let (Some(index), Some(pool)) = (data, self.core.pool(DATA)) {
                let word = DataOwner(pool.table.owner(index).load(Ordering::Relaxed));
                assert!(word.belongs_to(cell, owner), "DATA buffer {index}");
            }
        }
        if let Some(pool) = self.core.pool(DATA) {
            let indices = 0..u32::try_from(pool.table.len()).unwrap();
            let attached = |&index: &u32| {
                DataOwner(pool.table.owner(index).load(Ordering::Relaxed)).attached_to().is_some()
            };
            assert_eq!(indices.filter(attached).count(), pool.table.len() - self.free_data());
        }
        for (ring, queue) in self.core.rings().iter().zip(&self.queues) {
            assert_eq!(ring.queued().count(), queue.len());
            assert_eq!(ring.has_message(), !queue.is_empty());
        }
    }

    /// All participants detach or die, queued messages are received, and nothing is missing.
    fn finish(mut self) {
        while !self.agents.is_empty() {
            self.step(&Operation::Detach(0));
        }
        let mut last = [Primary, Secondary].map(|side| attach(&self.core, side));
        for dead in std::mem::take(&mut self.dead) {
            self.core.reclaim(&dead, last[0].me.seat, false);
            self.forget(dead.seat);
        }
        self.check();
        for (queue, endpoint) in self.queues.iter().zip([&last[1], &last[0]]) {
            for &(id, _) in queue {
                let got = stage::receive(endpoint).expect("no damage").expect("it was sent");
                assert_eq!(got.msg_id(), id);
                assert!(stage::finish(endpoint, &got));
            }
            assert!(stage::receive(endpoint).unwrap().is_none());
        }
        let endpoint = &mut last[0];
        let all: Vec<_> = std::iter::from_fn(|| loan(endpoint)).collect();
        assert_eq!(all.len(), self.core.msg().table.len(), "every MSG buffer is free and known");
        if let Some(pool) = self.core.pool(DATA) {
            let count = std::iter::from_fn(|| endpoint.loan_data(DATA, all[0].cell, all[0].owner)).count();
            assert_eq!(count, pool.table.len(), "every DATA buffer is free and known");
        }
        if let Ring::Mpmc(_) = &endpoint.outgoing {
            let cells = std::iter::from_fn(|| endpoint.loan_inline()).count();
            assert_eq!(cells, 2 * self.capacity, "every inline cell is free and known");
        }
    }
}

/// A handle remembers what it released last, and other seats may have stolen all of it. Too rare in random sequences.
#[test]
fn stolen_hints_do_not_exhaust_a_pool() {
    let core = link(1, true, 1, 0);
    let (a, b) = (attach(&core, Primary), attach(&core, Secondary));
    for _ in 0..100 {
        let held = loan(&a).expect("stolen from the other");
        assert!(stage::send(&a, &held));
        let got = stage::receive(&b).expect("no damage").expect("it was sent");
        assert!(stage::finish(&b, &got));
    }
    assert!(release(&a, &loan(&a).expect("stolen from the other")));
    assert!(loan(&b).is_some(), "one buffer, and it is free");
}

/// A participant that is stopped while it moves hints hides no buffer, and its recovery makes the hints whole again.
#[test]
fn stopped_mover_hides_no_buffer() {
    const BUFFERS: u32 = if cfg!(miri) { 70 } else { 600 };
    let core = link(1, true, BUFFERS, 0);
    let (a, b) = (attach(&core, Primary), attach(&core, Secondary));
    let table = &core.msg().table;
    let all = |endpoint| std::iter::from_fn(|| loan(endpoint)).collect::<Vec<_>>();
    let count = |held: &[HeldBuffers]| u32::try_from(held.len()).unwrap();

    table.stop_while_all_hints_move(b.me.seat);
    let held = all(&a);
    assert_eq!(count(&held), BUFFERS);
    assert!(held.iter().all(|held| release(&a, held)));
    let (_, word) = table.claim(|free| MsgOwner(free).loaned(a.me.seat).0).expect("they have hints again");
    assert!(!owner::is_free(word));

    table.stop_while_all_hints_move(b.me.seat);
    let (index, word) = table.claim(|free| MsgOwner(free).loaned(a.me.seat).0).expect("without a hint");
    assert!(table.release(index, word, MsgOwner(word).freed().0));

    // The buffer claimed first stays in use.
    assert_eq!(core.reclaim(&abandon(b), a.me.seat, false).readmitted, BUFFERS - 2);
    assert_eq!(count(&all(&a)), BUFFERS - 1);
}

/// A search that found nothing is not repeated until a buffer is released: by whatever way, or by one that died before it had
/// counted the release.
#[test]
fn exhausted_pool_is_searched_after_each_release() {
    let core = link(1, true, 3, 0);
    let (a, b) = (attach(&core, Primary), attach(&core, Secondary));
    let table = &core.msg().table;
    let mine = loan(&a).unwrap();
    let others = [loan(&b).unwrap(), loan(&b).unwrap()];
    let finds_nothing = || (0..3).all(|_| loan(&a).is_none());
    assert!(finds_nothing());

    assert!(release(&a, &mine));
    assert!(loan(&a).is_some(), "released by its own handle");
    assert!(finds_nothing());
    assert!(release(&b, &others[0]));
    let taken = loan(&a).expect("released by another participant");
    assert!(finds_nothing());
    assert!(release_anywhere(&core, &taken));
    assert!(loan(&a).is_some(), "released by a thread without the handle");
    assert!(finds_nothing());

    // As by a process that dies after it has set the hint.
    let MsgOwner(held) = others[1].owner;
    assert!(table.reclaim(b.me.seat, others[1].cell, held, others[1].owner.freed().0));
    assert!(finds_nothing(), "the search is skipped, or this test shows nothing");
    core.reclaim(&abandon(b), a.me.seat, false);
    assert_eq!(loan(&a).map(|found| found.cell), Some(others[1].cell), "released by a dead process");
}

fn random_links(cases_count: u32) {
    let links = (
        any::<bool>(),
        (0..4_u32).prop_map(|shift| 1 << shift),
        1..71_u32,
        0..71_u32,
        any::<bool>(),
        prop::collection::vec(operation(), 1..400),
    );
    let config = Config { cases: cases_count, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&links, |(single, capacity, msg, data, small, operations)| {
        // Half of the cases run out of buffers all the time.
        let (msg, data) = if small { (msg % 4 + 1, data % 4) } else { (msg, data) };
        let mut world = World::new(single, capacity, msg, data);
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
#[cfg_attr(miri, ignore = "too many cases")]
fn links_match_the_model() {
    random_links(12);
}

#[test]
#[ignore = "long: 256 cases"]
fn links_match_the_model_in_many_cases() {
    random_links(256);
}
