//! The oracle of requests: random sequences of operations and failures of clients and servers, compared with a model of
//! queues.
//!
//! Each reply has a number, so a reply that reaches another request, or reaches its own twice, is detected. At the end,
//! when all participants have detached, every buffer and cell is free.

use std::collections::{BTreeSet, VecDeque};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::stage::{
    self, DATA, HeldBuffers, ReceivedItem, abandon, attach, link_with_requests, loan, loan_with, release,
    take_reply,
};
use crate::link::core::Core;
use crate::link::endpoint::Endpoint;
use crate::link::request_steps::{RequestSteps as _, TakenRequest};
use crate::participant::Side::{Primary, Secondary};
use crate::participant::{Participant, SeatIndex};
use crate::pool::OwnerTable;
use crate::ring::reply::{REPLIES, ReplyOutcome, RequestId, Status};

#[derive(Clone, Debug)]
enum Operation {
    Attach(bool),
    Detach(bool, usize),
    Abandon(bool, usize),
    Recover(bool, usize),
    Evict(bool, usize),
    Request(usize, u8),
    Take(usize),
    Reply(usize, usize, u8, bool),
    DropRequest(usize, usize),
    TakeReply(usize, usize),
    DropPending(usize, usize),
    Release(usize, usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let n = || 0..64_usize;
    let is_client = any::<bool>;
    prop_oneof![
        2 => is_client().prop_map(Attach),
        1 => (is_client(), n()).prop_map(|(a, b)| Detach(a, b)),
        1 => (is_client(), n()).prop_map(|(a, b)| Abandon(a, b)),
        2 => (is_client(), n()).prop_map(|(a, b)| Recover(a, b)),
        1 => (is_client(), n()).prop_map(|(a, b)| Evict(a, b)),
        12 => (n(), 0..3_u8).prop_map(|(a, b)| Request(a, b)),
        10 => n().prop_map(Take),
        16 => (n(), n(), 0..3_u8, any::<bool>()).prop_map(|(a, b, c, d)| Reply(a, b, c, d)),
        2 => (n(), n()).prop_map(|(a, b)| DropRequest(a, b)),
        16 => (n(), n()).prop_map(|(a, b)| TakeReply(a, b)),
        2 => (n(), n()).prop_map(|(a, b)| DropPending(a, b)),
        6 => (n(), n()).prop_map(|(a, b)| Release(a, b)),
    ]
}

/// The number of a request in the model.
type Number = usize;

/// The state of a request in the model.
#[derive(Debug, Default)]
struct RequestState {
    msg_id: i32,
    /// Whether its client still waits.
    is_wanted: bool,
    client: Option<SeatIndex>,
    /// Replies that the client has not received: their ids, whether each is the last, and their kinds as in `Reply`.
    replies: VecDeque<(i32, bool, u8)>,
    /// Whether its server ended the request: `Some(true)` by dying, `Some(false)` by dropping it.
    failed: Option<bool>,
}

struct ClientRequest {
    number: Number,
    id: RequestId,
    taken: u64,
}

struct ServerRequest {
    number: Number,
    taken: TakenRequest,
    held: HeldBuffers,
    sent: u64,
    is_over: bool,
}

struct Agent {
    endpoint: Box<Endpoint>,
    pending: Vec<ClientRequest>,
    serving: Vec<ServerRequest>,
    messages: Vec<HeldBuffers>,
}

struct World {
    core: Core,
    window: usize,
    clients: Vec<Agent>,
    servers: Vec<Agent>,
    dead: Vec<(Participant, Vec<Number>, Vec<Number>)>,
    ring: VecDeque<Number>,
    capacity: usize,
    known: Vec<RequestState>,
    next_id: i32,
    /// The ids of received replies.
    received: BTreeSet<i32>,
}

impl World {
    fn new(capacity: u32, msg: u32, data: u32, window: u32) -> Self {
        let mut world = Self {
            core: link_with_requests(capacity, false, msg, data, window),
            window: window as usize,
            clients: Vec::new(),
            servers: Vec::new(),
            dead: Vec::new(),
            ring: VecDeque::new(),
            capacity: capacity as usize,
            known: Vec::new(),
            next_id: 0,
            received: BTreeSet::new(),
        };
        for is_client in [true, false] {
            world.attach(is_client);
        }
        world
    }

    fn attach(&mut self, is_client: bool) {
        if self.clients.len() + self.servers.len() + self.dead.len() < 8 {
            let endpoint = attach(&self.core, if is_client { Secondary } else { Primary });
            let agent = Agent { endpoint, pending: Vec::new(), serving: Vec::new(), messages: Vec::new() };
            self.side(is_client).push(agent);
        }
    }

    fn side(&mut self, is_client: bool) -> &mut Vec<Agent> {
        if is_client { &mut self.clients } else { &mut self.servers }
    }

    fn remove(&mut self, is_client: bool, i: usize) -> Option<Agent> {
        let side = self.side(is_client);
        (!side.is_empty()).then(|| side.remove(i % side.len()))
    }

    fn ended(&mut self, pending: &[Number], serving: &[Number], died: bool) {
        for &number in pending {
            let known = &mut self.known[number];
            known.is_wanted = false;
            known.replies.clear();
        }
        for &number in serving {
            let known = &mut self.known[number];
            known.failed = known.failed.or(known.is_wanted.then_some(died));
        }
    }

    fn numbers(agent: &Agent) -> (Vec<Number>, Vec<Number>) {
        let open = agent.serving.iter().filter(|serving| !serving.is_over);
        (agent.pending.iter().map(|pending| pending.number).collect(), open.map(|s| s.number).collect())
    }

    /// Whether the client of a request can leave one more reply: inline, in a MSG buffer, or in one with DATA.
    fn has_share(core: &Core, known: &[RequestState], number: Number, kind: u8, window: usize) -> bool {
        let len = |table: Option<&OwnerTable>| table.map_or(0, OwnerTable::len);
        let (inline, msg, data) = (len(core.inline()), len(core.table(0)), len(core.table(1)));
        let tables: &[(usize, &[u8])] = match kind {
            0 => &[(inline, &[0])],
            1 => &[(msg, &[1, 2])],
            _ => &[(msg, &[1, 2]), (data, &[2])],
        };
        let seats = SeatIndex::all().filter_map(|seat| core.seats.at(seat));
        let clients = seats.filter(|other| other.word.side() == Secondary).count().max(1);
        let is_first = known[number].replies.is_empty();
        tables.iter().all(|&(len, kinds)| {
            let (for_requests, common) = (len * 3 / 8, len / 4);
            let left = |request: &RequestState| {
                request.replies.iter().filter(|(.., kind)| kinds.contains(kind)).count()
            };
            // The replies, and the requests to which they are.
            let left_by = |seat| {
                let of_client = known.iter().filter(|request| request.client == Some(seat)).map(left);
                of_client.fold((0, 0), |(all, requests), left| (all + left, requests + left.min(1)))
            };
            let all: Vec<_> = SeatIndex::all().map(left_by).collect();
            let own = known[number].client.map_or((0, 0), left_by);
            let share = window.min(for_requests / clients).max(1);
            let beyond = all.iter().map(|(left, requests)| left - share.min(*requests)).sum::<usize>();
            is_first && (core.seats.used() - 1) * window <= for_requests
                || own.0 == 0
                || all.iter().map(|(left, _)| left).sum::<usize>() < for_requests + common
                    && (is_first && own.1 < share || beyond < common)
        })
    }

    fn id(&mut self) -> i32 {
        self.next_id += 1;
        self.next_id
    }

    /// A loan with or without DATA, if there are buffers.
    fn loan(endpoint: &Endpoint, kind: u8, msg_id: i32) -> Option<HeldBuffers> {
        let held = if kind == 1 { loan(endpoint) } else { loan_with(endpoint)?.ok() };
        held.map(|held| HeldBuffers { msg_id, ..held })
    }

    fn step(&mut self, operation: &Operation) {
        use Operation::*;
        match *operation {
            Attach(is_client) => self.attach(is_client),
            Detach(is_client, i) => {
                let Some(agent) = self.remove(is_client, i) else { return };
                let (pending, serving) = Self::numbers(&agent);
                agent.endpoint.core.leave(&agent.endpoint.me);
                self.ended(&pending, &serving, true);
            }
            Abandon(is_client, i) => {
                let Some(agent) = self.remove(is_client, i) else { return };
                let (pending, serving) = Self::numbers(&agent);
                self.dead.push((abandon(agent.endpoint), pending, serving));
            }
            Recover(is_client, i) => {
                let side = self.side(is_client);
                if side.is_empty() {
                    return;
                }
                let me = side[i % side.len()].endpoint.me.seat;
                for (dead, pending, serving) in std::mem::take(&mut self.dead) {
                    let done = self.core.reclaim(&dead, me, false);
                    assert_eq!((done.participants, done.readmitted), (1, 0));
                    self.ended(&pending, &serving, true);
                }
            }
            Evict(is_client, i) => {
                let Some(agent) = self.remove(is_client, i) else { return };
                let Some(other) = self.clients.iter().chain(&self.servers).next() else {
                    self.side(is_client).push(agent);
                    return;
                };
                let (me, (pending, serving)) = (other.endpoint.me.seat, Self::numbers(&agent));
                assert!(self.core.seats.evict(&agent.endpoint.me));
                self.core.reclaim(&agent.endpoint.me, me, true);
                self.ended(&pending, &serving, true);
                assert!(!agent.endpoint.is_current());
                // The evicted process continues for a moment, and then ends.
                for serving in agent.serving.iter().filter(|serving| !serving.is_over) {
                    let pushed =
                        stage::reply_inline(&agent.endpoint, serving.taken.id, (serving.sent, true), -1);
                    assert_ne!(pushed, Some(ReplyOutcome::Sent));
                }
                self.dead.push((abandon(agent.endpoint), Vec::new(), Vec::new()));
            }
            Request(i, kind) => {
                let id = self.id();
                let Some(count) = self.clients.len().checked_sub(1) else { return };
                let agent = &mut self.clients[i % (count + 1)];
                let endpoint = &agent.endpoint;
                let made = if kind == 0 {
                    stage::request_inline(endpoint, id)
                } else {
                    let Some(held) = Self::loan(endpoint, kind, id) else { return };
                    let made = stage::request(endpoint, &held);
                    if made.is_none() {
                        assert!(release(endpoint, &held));
                    }
                    made
                };
                let may = agent.pending.len() < self.window && self.ring.len() < self.capacity;
                // Inline cells can be used up, too.
                assert!(made.is_none() || may);
                assert!(made.is_some() || !may || kind == 0);
                if let Some(id) = made {
                    let number = self.known.len();
                    agent.pending.push(ClientRequest { number, id, taken: 0 });
                    self.known.push(RequestState {
                        msg_id: self.next_id,
                        is_wanted: true,
                        client: Some(id.seat),
                        ..RequestState::default()
                    });
                    self.ring.push_back(number);
                }
            }
            Take(i) => {
                let Some(count) = self.servers.len().checked_sub(1) else { return };
                let agent = &mut self.servers[i % (count + 1)];
                let taken = agent.endpoint.take_request().expect("no damage");
                let number = self.ring.pop_front();
                assert_eq!(taken.is_some(), number.is_some());
                let (Some(taken), Some(number)) = (taken, number) else { return };
                let held = stage::open_request(&agent.endpoint, &taken).expect("no damage");
                let known = &self.known[number];
                assert_eq!(held.msg_id, known.msg_id);
                let status = agent.endpoint.request_status(taken.id);
                assert_eq!(status == Status::Pending, known.is_wanted);
                agent.serving.push(ServerRequest { number, taken, held, sent: 0, is_over: false });
            }
            Reply(i, j, kind, is_last) => {
                let id = self.id();
                let servers = self.servers.len();
                let Some(agent) = self.servers.get(i.checked_rem(servers).unwrap_or(0)) else { return };
                let requests = agent.serving.len();
                let Some(serving) = agent.serving.get(j.checked_rem(requests).unwrap_or(0)) else { return };
                if serving.is_over {
                    return;
                }
                let at = (serving.sent, is_last);
                let number = serving.number;
                let has_share = Self::has_share(&self.core, &self.known, number, kind, self.window);
                let agent = &mut self.servers[i % servers];
                let serving = &mut agent.serving[j % requests];
                let pushed = if kind == 0 {
                    let Some(pushed) = stage::reply_inline(&agent.endpoint, serving.taken.id, at, id) else {
                        return;
                    };
                    pushed
                } else {
                    let Some(held) = Self::loan(&agent.endpoint, kind, id) else { return };
                    let pushed = stage::reply(&agent.endpoint, serving.taken.id, at, &held);
                    if matches!(pushed, ReplyOutcome::Full | ReplyOutcome::OverShare) {
                        assert!(release(&agent.endpoint, &held));
                    }
                    pushed
                };
                let known = &mut self.known[serving.number];
                let expected = if !known.is_wanted {
                    ReplyOutcome::Unwanted
                } else if !has_share {
                    ReplyOutcome::OverShare
                } else if known.replies.len() as u64 == REPLIES {
                    ReplyOutcome::Full
                } else {
                    ReplyOutcome::Sent
                };
                assert_eq!(pushed, expected);
                if pushed == ReplyOutcome::Sent {
                    known.replies.push_back((id, is_last, kind));
                    serving.sent += 1;
                    serving.is_over = is_last;
                }
            }
            DropRequest(i, j) => {
                let Some(count) = self.servers.len().checked_sub(1) else { return };
                let agent = &mut self.servers[i % (count + 1)];
                let Some(count) = agent.serving.len().checked_sub(1) else { return };
                let serving = agent.serving.remove(j % (count + 1));
                if serving.is_over {
                    stage::end_request(&agent.endpoint, &serving.taken, &serving.held);
                } else {
                    agent.endpoint.release_request(&serving.taken);
                    self.ended(&[], &[serving.number], false);
                }
            }
            TakeReply(i, j) => {
                let Some(count) = self.clients.len().checked_sub(1) else { return };
                let agent = &mut self.clients[i % (count + 1)];
                let Some(count) = agent.pending.len().checked_sub(1) else { return };
                let at = j % (count + 1);
                let pending = &mut agent.pending[at];
                let got = take_reply(&agent.endpoint, pending.id, pending.taken).expect("no damage");
                let known = &mut self.known[pending.number];
                let Some((got, is_last)) = got else {
                    assert!(known.replies.is_empty());
                    let status = agent.endpoint.request_status(pending.id);
                    let ended = match status {
                        Status::Pending => None,
                        Status::ServerDied(1) => Some(true),
                        Status::Unanswered(1) => Some(false),
                        other => panic!("{other:?}"),
                    };
                    assert_eq!(ended, known.failed);
                    if ended.is_some() {
                        agent.endpoint.close_request(pending.id);
                        agent.pending.remove(at);
                    }
                    return;
                };
                let is_inline = !matches!(got, ReceivedItem::Pooled(_));
                let expected = known.replies.pop_front().map(|(id, is_last, kind)| (id, is_last, kind == 0));
                assert_eq!(expected, Some((got.msg_id(), is_last, is_inline)));
                assert!(self.received.insert(got.msg_id()), "received once");
                pending.taken += 1;
                if is_last {
                    known.is_wanted = false;
                    agent.pending.remove(at);
                }
                if let ReceivedItem::Pooled(held) = got {
                    agent.messages.push(held);
                }
            }
            DropPending(i, j) => {
                let Some(count) = self.clients.len().checked_sub(1) else { return };
                let agent = &mut self.clients[i % (count + 1)];
                let Some(count) = agent.pending.len().checked_sub(1) else { return };
                let pending = agent.pending.remove(j % (count + 1));
                agent.endpoint.close_request(pending.id);
                self.ended(&[pending.number], &[], false);
            }
            Release(i, j) => {
                let Some(count) = self.clients.len().checked_sub(1) else { return };
                let agent = &mut self.clients[i % (count + 1)];
                if let Some(count) = agent.messages.len().checked_sub(1) {
                    assert!(release(&agent.endpoint, &agent.messages.remove(j % (count + 1))));
                }
            }
        }
    }

    /// All participants detach or die, pending requests are dropped, and nothing is missing.
    fn finish(mut self) {
        while !self.clients.is_empty() || !self.servers.is_empty() {
            self.step(&Operation::Detach(true, 0));
            self.step(&Operation::Detach(false, 0));
        }
        let last = attach(&self.core, Primary);
        for (dead, ..) in std::mem::take(&mut self.dead) {
            self.core.reclaim(&dead, last.me.seat, false);
        }
        while let Some(taken) = last.take_request().expect("no damage") {
            assert_eq!(last.request_status(taken.id), Status::Over);
            last.release_request(&taken);
            self.ring.pop_front().expect("it was made");
        }
        assert!(self.ring.is_empty());
        let requests = self.core.requests().expect("it has some");
        for seat in (0..8).filter_map(SeatIndex::from_wild) {
            assert!(requests.replies.of(seat).all(|slot| slot.seen().count() == 0 && !slot.is_pending()));
        }
        let all: Vec<_> = std::iter::from_fn(|| loan(&last)).collect();
        assert_eq!(all.len(), self.core.msg().table.len(), "every MSG buffer is free and known");
        if let Some(pool) = self.core.pool(DATA) {
            let count = std::iter::from_fn(|| last.loan_data(DATA, all[0].cell, all[0].owner)).count();
            assert_eq!(count, pool.table.len(), "every DATA buffer is free and known");
        }
        let cells = std::iter::from_fn(|| last.loan_inline()).count();
        assert_eq!(
            cells,
            self.core.inline().map_or(0, |table| table.len()),
            "every inline cell is free and known"
        );
    }
}

fn random_requests(cases: u32) {
    let links = (
        (0..4_u32).prop_map(|shift| 1 << shift),
        1..40_u32,
        0..40_u32,
        1..5_u32,
        prop::collection::vec(operation(), 1..400),
    );
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&links, |(capacity, msg, data, window, operations)| {
        let mut world = World::new(capacity, msg, data, window);
        operations.iter().for_each(|operation| world.step(operation));
        world.finish();
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
#[cfg_attr(miri, ignore = "too many cases")]
fn requests_match_the_model() {
    random_requests(32);
}

#[test]
#[ignore = "long: 256 cases"]
fn requests_match_the_model_in_many_cases() {
    random_requests(256);
}
