//! Shared by models and oracles: a link on the heap, its endpoints, and the steps of `Link` without files and bells.

use shmesh_sys::process::ProcessIdentity;

use crate::config::{BroadcastConfig, PoolId, SlowReaders};
use crate::link::core::{Core, DataRef};
use crate::link::endpoint::Endpoint;
use crate::link::request_steps::{RequestSteps as _, TakenRequest};
use crate::participant::{Participant, Side};
use crate::pool::owner::MsgOwner;
use crate::ring::broadcast::{ReadToken, TakeError};
use crate::ring::entry::RingEntry;
use crate::ring::inline::InlineLines;
use crate::ring::reply::{ReplyOutcome, RequestId};
use crate::ring::spsc::TakenMessage;
use crate::ring::{Ring, WildWord};
use crate::segment::layout::LinkShape;

pub(super) const DATA: PoolId = PoolId::CpuData;

/// A link with `msg` MSG buffers and `data` DATA buffers of 64 bytes.
pub(super) fn link(ring_capacity: u32, single: bool, msg: u32, data: u32) -> Core {
    link_with_requests(ring_capacity, single, msg, data, 0)
}

/// A link with requests, of which each client can have `request_window` pending.
pub(super) fn link_with_requests(
    ring_capacity: u32,
    single: bool,
    msg: u32,
    data: u32,
    request_window: u32,
) -> Core {
    Core::heap(&LinkShape { request_window, ..shape(ring_capacity, single, None, msg, data) })
}

/// As [`link`], with a broadcast ring.
pub(super) fn broadcast(ring_capacity: u32, rules: BroadcastConfig, msg: u32, data: u32) -> Core {
    Core::heap(&shape(ring_capacity, false, Some(rules), msg, data))
}

pub(super) fn rules(slow: SlowReaders, history: u32) -> BroadcastConfig {
    BroadcastConfig { slow, history, evict_after_ms: 1 }
}

fn shape(
    ring_capacity: u32,
    single: bool,
    broadcast: Option<BroadcastConfig>,
    msg: u32,
    data: u32,
) -> LinkShape {
    let mut pools = [(0, 0); PoolId::COUNT];
    pools[PoolId::CpuMsg as usize] = (64, msg);
    pools[DATA as usize] = if data == 0 { (0, 0) } else { (64, data) };
    // Every second message, in rings that may have one slot. Miri would take minutes for the counts.
    let latency_sample = if cfg!(miri) { 0 } else { 2 };
    LinkShape { ring_capacity, single, broadcast, pools, request_window: 0, latency_sample }
}

pub(super) fn process(pid: u32) -> ProcessIdentity {
    ProcessIdentity { pid, start_time: 1, pid_namespace: 1 }
}

/// Boxed, because loom's threads have small stacks.
#[inline(never)]
pub(super) fn attach(core: &Core, side: Side) -> Box<Endpoint> {
    Box::new(Endpoint::new(core, core.seats.attach(&process(1), side).expect("a free seat")))
}

/// A MSG buffer that a participant holds, with its DATA buffer.
#[derive(Debug)]
pub(super) struct HeldBuffers {
    pub(super) cell: u32,
    pub(super) owner: MsgOwner,
    pub(super) data: Option<(PoolId, u32)>,
    pub(super) msg_id: i32,
}

/// A message that was received.
#[derive(Debug)]
pub(super) enum ReceivedItem {
    Pooled(HeldBuffers),
    /// The id of an inline message, and its first and last word, which must be equal.
    Inline(i32, u64, u64),
}

impl ReceivedItem {
    pub(super) fn msg_id(&self) -> i32 {
        match self {
            Self::Pooled(held) => held.msg_id,
            Self::Inline(msg_id, ..) => *msg_id,
        }
    }
}

pub(super) fn loan(endpoint: &Endpoint) -> Option<HeldBuffers> {
    let (cell, owner) = endpoint.loan_msg()?;
    Some(HeldBuffers { cell, owner, data: None, msg_id: 0 })
}

/// `Some(Err(()))` if the DATA pool is exhausted; the MSG buffer was released, as in `Link::loan_with`.
pub(super) fn loan_with(endpoint: &Endpoint) -> Option<Result<HeldBuffers, ()>> {
    let mut held = loan(endpoint)?;
    match endpoint.loan_data(DATA, held.cell, held.owner) {
        Some(index) => {
            held.data = Some((DATA, index));
            Some(Ok(held))
        }
        None => {
            assert!(release(endpoint, &held));
            Some(Err(()))
        }
    }
}

fn data_ref(held: &HeldBuffers) -> DataRef {
    held.data.map_or(DataRef::NONE, |(pool, index)| DataRef::new(pool, index))
}

/// The steps of `Link::end`; of a loan, those of `Link::take_back_loan`.
pub(super) fn release(endpoint: &Endpoint, held: &HeldBuffers) -> bool {
    let released = match (held.owner.token(), &endpoint.incoming) {
        (Some(token), Ring::Broadcast(ring)) => {
            ring.release(endpoint.reader(), ReadToken(token));
            true
        }
        _ => endpoint.release(held.cell, held.owner, data_ref(held)),
    };
    if released {
        endpoint.count_hold(held.cell, held.owner);
    }
    released
}

/// Releases as an owned message does, from any thread.
pub(super) fn release_anywhere(core: &Core, held: &HeldBuffers) -> bool {
    core.release_anywhere(held.cell, held.owner, data_ref(held))
}

/// Releases an owned message, in any thread.
pub(super) type Release = Box<dyn FnOnce() + Send>;

/// Makes a message of a broadcast ring independent of its reader's handle, as `Message::into_owned` does. Returns what
/// releases it, in any thread; `None` if it has to be copied.
pub(super) fn own(reader: &Endpoint, held: &HeldBuffers) -> Option<Release> {
    let (Some(token), Ring::Broadcast(ring)) = (held.owner.token(), &reader.incoming) else { unreachable!() };
    if !ring.own(reader.reader(), ReadToken(token)) {
        return None;
    }
    let (owned, who, core) = (reader.reader().owned.clone(), reader.me, reader.core.clone());
    Some(Box::new(move || {
        let Ring::Broadcast(ring) = core.incoming(who.word.side()) else { unreachable!() };
        ring.release_owned(&owned, &who, &core.seats, ReadToken(token));
    }))
}

pub(super) fn entry_of(held: &HeldBuffers) -> RingEntry {
    RingEntry::pooled(held.cell, held.owner.epoch())
}

pub(super) fn describe(endpoint: &Endpoint, held: &HeldBuffers) {
    let cell = endpoint.cell(held.cell);
    cell.clear();
    cell.set_msg_id(held.msg_id);
    cell.set_msg_len(8);
    if held.data.is_some() {
        cell.set_data(data_ref(held));
        cell.set_data_len(8);
    }
}

/// Returns `false` if the ring is full. The message still belongs to the sender.
pub(super) fn send(endpoint: &Endpoint, held: &HeldBuffers) -> bool {
    describe(endpoint, held);
    match &endpoint.outgoing {
        Ring::Spsc(ring) => ring.push(endpoint.producer(ring).expect("the role"), entry_of(held)).is_ok(),
        Ring::Mpmc(ring) => ring.push(&endpoint.shared_producer, entry_of(held)).is_ok(),
        Ring::Broadcast(ring) => {
            let writer = endpoint.writer(ring).expect("the role");
            endpoint.broadcast(ring, writer, (held.cell, held.owner, data_ref(held))).is_ok()
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum InlineError {
    Full,
    NoCell,
}

/// Sends 48 bytes, which fit in one line.
pub(super) fn send_inline(endpoint: &Endpoint, msg_id: i32) -> Result<(), InlineError> {
    send_inline_of(endpoint, msg_id, 48)
}

/// Sends `len` bytes, a multiple of 8.
pub(super) fn send_inline_of(endpoint: &Endpoint, msg_id: i32, len: usize) -> Result<(), InlineError> {
    let word = u64::from(msg_id.cast_unsigned());
    let (ids, msg) = (word << 32, word.to_ne_bytes().repeat(len / 8));
    match &endpoint.outgoing {
        Ring::Spsc(ring) => {
            let producer = endpoint.producer(ring).expect("the role");
            ring.push_inline(producer, ids, &msg).map_err(|_| InlineError::Full)
        }
        Ring::Mpmc(ring) => {
            let (cell, owner) = endpoint.loan_inline().ok_or(InlineError::NoCell)?;
            endpoint.core.inline_lines(cell).expect("inline cells").write(ids, &msg);
            let entry = RingEntry::inline_cell(cell, owner.epoch(), len);
            ring.push(&endpoint.shared_producer, entry).map_err(|_| {
                endpoint.release_inline(cell, owner);
                InlineError::Full
            })
        }
        Ring::Broadcast(ring) => {
            let writer = endpoint.writer(ring).expect("the role");
            endpoint.broadcast_inline(ring, writer, ids, &msg).map_err(|_| InlineError::Full)
        }
    }
}

fn inline(entry: RingEntry, lines: InlineLines<'_>) -> Result<ReceivedItem, WildWord> {
    let len = entry.inline_len().ok_or(WildWord("an inline message longer than its slot"))?;
    let msg_id = ((lines.ids() >> 32) as u32).cast_signed();
    let mut words = [0; 14];
    lines.read(len, &mut words);
    Ok(ReceivedItem::Inline(msg_id, words[0], words[len as usize / 8 - 1]))
}

fn pooled(endpoint: &Endpoint, cell: u32, word: u64) -> Result<ReceivedItem, WildWord> {
    let owner = MsgOwner(word).borrowed(endpoint.me.seat);
    match endpoint.core.read_descriptor(cell, owner) {
        Ok((descriptor, data)) => Ok(ReceivedItem::Pooled(HeldBuffers {
            cell,
            owner,
            data: data.parts(),
            msg_id: descriptor.msg_id,
        })),
        Err(wild) => {
            endpoint.release(cell, owner, DataRef::NONE);
            Err(wild)
        }
    }
}

fn open_shared(endpoint: &Endpoint, entry: RingEntry, word: u64) -> Result<ReceivedItem, WildWord> {
    if !entry.is_inline() {
        return pooled(endpoint, entry.wild_cell(), word);
    }
    let (cell, owner) = (entry.wild_cell(), MsgOwner(word).borrowed(endpoint.me.seat));
    let got = inline(entry, endpoint.core.inline_lines(cell).expect("inline cells"));
    endpoint.release_inline(cell, owner);
    got
}

/// As `Link::receive`, in its order of steps.
pub(super) fn receive(endpoint: &Endpoint) -> Result<Option<ReceivedItem>, WildWord> {
    let receiving = endpoint.receiving();
    match &endpoint.incoming {
        Ring::Spsc(ring) => {
            let me = endpoint.consumer(ring).expect("the role");
            match ring.take(me, &receiving)? {
                None => Ok(None),
                Some(TakenMessage::Inline(entry, lines)) => {
                    let got = inline(entry, lines);
                    ring.pass(me);
                    got.map(Some)
                }
                Some(TakenMessage::Pooled(cell, word)) => {
                    ring.pass(me);
                    pooled(endpoint, cell.index, word).map(Some)
                }
            }
        }
        Ring::Mpmc(ring) => match ring.pop(&receiving)? {
            Some((entry, _, word)) => open_shared(endpoint, entry, word).map(Some),
            None => Ok(None),
        },
        Ring::Broadcast(ring) => {
            let reader = endpoint.reader();
            let pooled =
                |entry, token| shared(endpoint, entry, token).inspect_err(|_| ring.release(reader, token));
            let sampled = |got: &ReceivedItem, age, now| {
                let held = match got {
                    ReceivedItem::Pooled(held) => Some((held.cell, held.owner)),
                    ReceivedItem::Inline(..) => None,
                };
                receiving.count_age(age, now, held);
            };
            match ring.take(reader, inline, pooled, sampled) {
                Ok(got) => Ok(got),
                Err(TakeError::Wild(wild)) => Err(wild),
                Err(TakeError::Holding) => panic!("tests hold few messages"),
            }
        }
    }
}

/// The steps of `Link::shared_with_others`.
fn shared(endpoint: &Endpoint, entry: RingEntry, token: ReadToken) -> Result<ReceivedItem, WildWord> {
    let (cell, owner) = endpoint.core.look_published(entry)?;
    let (descriptor, data) = endpoint.core.read_descriptor(cell, owner)?;
    let owner = MsgOwner::of_token(token.0);
    Ok(ReceivedItem::Pooled(HeldBuffers { cell, owner, data: data.parts(), msg_id: descriptor.msg_id }))
}

/// As `Link::receive_batch`, in its order of steps.
pub(super) fn receive_batch(endpoint: &Endpoint, max: usize) -> Result<Vec<ReceivedItem>, WildWord> {
    let receiving = endpoint.receiving();
    let mut all = Vec::new();
    match &endpoint.incoming {
        Ring::Spsc(ring) => {
            let me = endpoint.consumer(ring).expect("the role");
            ring.pop_batch(me, &receiving, max, |taken| {
                all.push(match taken {
                    TakenMessage::Inline(entry, lines) => inline(entry, lines),
                    TakenMessage::Pooled(cell, word) => pooled(endpoint, cell.index, word),
                });
            })?;
        }
        Ring::Mpmc(ring) => {
            ring.pop_batch(&receiving, max, |entry, _, word| all.push(open_shared(endpoint, entry, word)))?;
        }
        Ring::Broadcast(_) => unreachable!("`Link::receive_batch` receives one by one"),
    }
    all.into_iter().collect()
}

/// Sends a request in a MSG buffer. Returns `None` if the window or the ring is full; the message still belongs to the
/// client.
pub(super) fn request(endpoint: &Endpoint, held: &HeldBuffers) -> Option<RequestId> {
    let id = endpoint.open_request()?;
    describe(endpoint, held);
    match endpoint.push_request(id, held.cell, held.owner) {
        Ok(()) => Some(id),
        Err(_) => {
            endpoint.close_request(id);
            None
        }
    }
}

/// Sends a request of 40 bytes.
#[cfg(not(loom))]
pub(super) fn request_inline(endpoint: &Endpoint, msg_id: i32) -> Option<RequestId> {
    let id = endpoint.open_request()?;
    let word = u64::from(msg_id.cast_unsigned());
    match endpoint.push_inline_request(id, word << 32, &word.to_ne_bytes().repeat(5)) {
        Ok(()) => Some(id),
        Err(_) => {
            endpoint.close_request(id);
            None
        }
    }
}

/// The message id of a received request, and its DATA buffer.
pub(super) fn open_request(endpoint: &Endpoint, taken: &TakenRequest) -> Result<HeldBuffers, WildWord> {
    let cell = taken.entry.wild_cell();
    if taken.entry.is_inline() {
        let lines = endpoint.core.inline_lines(cell).expect("inline cells");
        let msg_id = ((lines.ids() >> 32) as u32).cast_signed();
        return Ok(HeldBuffers { cell, owner: taken.owner, data: None, msg_id });
    }
    let (descriptor, data) = endpoint.core.read_descriptor(cell, taken.owner)?;
    Ok(HeldBuffers { cell, owner: taken.owner, data: data.parts(), msg_id: descriptor.msg_id })
}

/// The steps of `Request::drop` after the last reply.
pub(super) fn end_request(endpoint: &Endpoint, taken: &TakenRequest, held: &HeldBuffers) {
    if taken.entry.is_inline() {
        endpoint.release_inline(held.cell, held.owner);
    } else {
        assert!(release(endpoint, held));
    }
}

/// Sends a reply in a MSG buffer, which is freed if the client no longer waits.
pub(super) fn reply(endpoint: &Endpoint, id: RequestId, at: (u64, bool), held: &HeldBuffers) -> ReplyOutcome {
    describe(endpoint, held);
    let pushed = endpoint.push_reply(id, at.0, at.1, entry_of(held));
    if pushed == ReplyOutcome::Unwanted {
        assert!(release(endpoint, held));
    }
    pushed
}

/// Sends a reply of 48 bytes. Returns `None` if no cell is free.
#[cfg(not(loom))]
pub(super) fn reply_inline(
    endpoint: &Endpoint,
    id: RequestId,
    at: (u64, bool),
    msg_id: i32,
) -> Option<ReplyOutcome> {
    let word = u64::from(msg_id.cast_unsigned());
    endpoint.push_inline_reply(id, at.0, at.1, word << 32, &word.to_ne_bytes().repeat(6))
}

/// Receives the reply at a position, and whether it is the last.
pub(super) fn take_reply(
    endpoint: &Endpoint,
    id: RequestId,
    position: u64,
) -> Result<Option<(ReceivedItem, bool)>, WildWord> {
    let Some(taken) = endpoint.take_reply(id, position)? else { return Ok(None) };
    if taken.is_last {
        endpoint.finish_request(id);
    }
    Ok(Some((open_shared(endpoint, taken.entry, taken.word)?, taken.is_last)))
}

/// Releases a received message.
#[cfg(not(loom))]
pub(super) fn finish(endpoint: &Endpoint, got: &ReceivedItem) -> bool {
    match got {
        ReceivedItem::Pooled(held) => release(endpoint, held),
        ReceivedItem::Inline(..) => true,
    }
}

/// Ends a participant as dropping a `Link` does.
pub(super) fn leave(endpoint: &Endpoint) {
    endpoint.retire();
    endpoint.core.leave(&endpoint.me);
}

/// Ends a participant as a crash does: what it holds stays in shared memory.
pub(super) fn abandon(endpoint: Box<Endpoint>) -> Participant {
    endpoint.me
}
