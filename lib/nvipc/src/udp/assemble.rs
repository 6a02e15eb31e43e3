//! Parts become messages again, in order, and what is missing is counted.
//!
//! Whoever completes first goes first, and everything older that is not complete then is lost: nothing is asked for again.
//!
//! Anybody on the way can forge a datagram, and then this side may be given a message that was never sent. More than that it
//! shall not cost. So a sender is known by its session and by where its numbers have come to, and a datagram that is of
//! another session, or from far ahead, begins a *stream* beside the one that is believed, which goes on. Only a second message
//! of such a stream ends the others: the sender has started anew, or a long time is missing.

use std::collections::VecDeque;

use shmesh::config::PoolId;

use super::wire::Header;
use super::{Lost, Pools};
use crate::endpoint::{Buffers, Message};

/// Most messages that are in pieces at once. One more ends the oldest.
const PARTIAL_MAX: usize = 8;
/// Most streams at once. One more ends the oldest that is not believed.
const STREAMS_MAX: usize = 4;
/// Messages that may be missing in a stream. After more of them it is another one.
const AHEAD_MAX: u32 = 64;
/// How old a datagram may be to be of the stream that is believed, and too late.
const LATE_MAX: u32 = 1 << 16;
/// Of two numbers the other is later, if it is less than this after the one.
const HALF: u32 = 1 << 31;

/// What comes from one sender, as far as can be known.
#[derive(Clone, Copy, Debug)]
struct Stream {
    session: u32,
    /// The number of its first message.
    first: u32,
    /// The number after that of the last message delivered.
    next: u32,
    delivered: bool,
}

impl Stream {
    fn begun_by(header: &Header) -> Self {
        Self { session: header.session, first: header.number, next: header.number, delivered: false }
    }

    fn continues(&self, header: &Header) -> bool {
        self.session == header.session && header.number.wrapping_sub(self.next) < AHEAD_MAX
    }

    /// Whether it is too late for a datagram, which is not older than so much.
    fn has_passed(&self, header: &Header, max: u32) -> bool {
        self.session == header.session && (1..=max).contains(&self.next.wrapping_sub(header.number))
    }
}

/// A message of which parts are here.
#[derive(Debug)]
struct Partial {
    header: Header,
    /// Bytes of a part.
    stride: u32,
    msg: u32,
    data: Option<u32>,
    /// Which parts are here.
    parts: Vec<bool>,
    missing: usize,
}

/// What comes from one peer.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    /// The first is the one that is believed.
    streams: Vec<Stream>,
    partial: VecDeque<Partial>,
    pub(super) lost: Lost,
}

impl Assembler {
    /// Takes a part. Some: it was the last of its message.
    pub(super) fn put(&mut self, header: Header, payload: &[u8], pools: &Pools) -> Option<Message> {
        let Some(stride) = header.stride(payload.len()) else {
            self.refuse();
            return None;
        };
        let stream = self.stream_of(&header, pools)?;
        let is_its = |partial: &Partial| partial.header.same_message(&header) && (partial.stride == stride);
        let at = match self.partial.iter().position(is_its) {
            Some(at) => at,
            None => self.begin(header, stride, pools)?,
        };
        let partial = &mut self.partial[at];
        let part = usize::from(header.part);
        if std::mem::replace(&mut partial.parts[part], true) {
            self.lost.late += 1;
            return None;
        }
        pools.write(partial.msg, partial.data, &partial.header, header.offset as usize, payload);
        partial.missing -= 1;
        if partial.missing > 0 {
            return None;
        }
        let whole = self.partial.remove(at)?;
        Some(self.deliver(&whole, stream, pools))
    }

    /// The stream that a datagram is of; a new one if need be. `None`: it is too late.
    fn stream_of(&mut self, header: &Header, pools: &Pools) -> Option<usize> {
        if let Some(at) = self.streams.iter().position(|stream| stream.continues(header)) {
            return Some(at);
        }
        // One that is not believed says little about where the sender is.
        let max = |at| if at == 0 { LATE_MAX } else { AHEAD_MAX };
        if self.streams.iter().enumerate().any(|(at, stream)| stream.has_passed(header, max(at))) {
            self.lost.late += 1;
            return None;
        }
        if self.streams.len() == STREAMS_MAX {
            let ended = self.streams.remove(1);
            self.end(&[ended], pools);
        }
        // Where it began is not known, so nothing before its first part counts as lost.
        self.streams.push(Stream::begun_by(header));
        Some(self.streams.len() - 1)
    }

    fn begin(&mut self, header: Header, stride: u32, pools: &Pools) -> Option<usize> {
        let (msg, data) = loop {
            if let Some(taken) = pools.take(&header) {
                break taken;
            }
            // What is in pieces must not keep the whole out.
            if pools.would_fit(&header)
                && let Some(oldest) = self.partial.pop_front()
            {
                self.give_up(&oldest, pools);
            } else {
                self.lost.no_buffer += 1;
                return None;
            }
        };
        if self.partial.len() == PARTIAL_MAX
            && let Some(oldest) = self.partial.pop_front()
        {
            self.give_up(&oldest, pools);
        }
        let parts = usize::from(header.parts);
        self.partial.push_back(Partial {
            header,
            stride,
            msg,
            data,
            parts: vec![false; parts],
            missing: parts,
        });
        Some(self.partial.len() - 1)
    }

    fn deliver(&mut self, whole: &Partial, at: usize, pools: &Pools) -> Message {
        let header = whole.header;
        let stream = &mut self.streams[at];
        self.lost.messages += u64::from(header.number.wrapping_sub(stream.next));
        stream.next = header.number.wrapping_add(1);
        let confirmed = std::mem::replace(&mut stream.delivered, true);
        let stream = *stream;
        // Older ones are counted by that already; those of another stream are not older.
        self.drop_partials(pools, |partial| stream.has_passed(partial, AHEAD_MAX));
        if confirmed && at > 0 {
            self.believe(at, pools);
        }
        let buffers = pools.buffers(whole.msg, header.data_pool.zip(whole.data));
        let int = |len: u32| i32::try_from(len).unwrap_or(i32::MAX);
        Message {
            msg_id: header.msg_id,
            cell_id: header.cell_id,
            msg_len: int(header.msg_len),
            data_len: int(header.data_len),
            buffers,
        }
    }

    /// The stream at `at` is the sender's now, and the others have ended.
    fn believe(&mut self, at: usize, pools: &Pools) {
        let stream = self.streams.swap_remove(at);
        let ended = std::mem::replace(&mut self.streams, vec![stream]);
        let before = ended[0];
        let between = stream.first.wrapping_sub(before.next);
        self.lost.messages += if before.session != stream.session {
            // Nothing says how far that one came.
            self.partial.iter().filter(|partial| before.continues(&partial.header)).count() as u64
        } else if between < HALF {
            u64::from(between)
        } else {
            0
        };
        self.end(&ended, pools);
    }

    /// Gives up what is in pieces of streams that are gone.
    fn end(&mut self, ended: &[Stream], pools: &Pools) {
        let streams = std::mem::take(&mut self.streams);
        self.drop_partials(pools, |partial| {
            let is_of = |streams: &[Stream]| streams.iter().any(|stream| stream.continues(partial));
            is_of(ended) && !is_of(&streams)
        });
        self.streams = streams;
    }

    /// Gives the buffers of such messages back.
    fn drop_partials(&mut self, pools: &Pools, such: impl Fn(&Header) -> bool) {
        self.partial.retain(|partial| {
            let goes = such(&partial.header);
            if goes {
                pools.give(partial.msg, partial.header.data_pool.zip(partial.data));
            }
            !goes
        });
    }

    /// Gives up a message in pieces. It is counted when a later one of its stream is delivered.
    fn give_up(&mut self, old: &Partial, pools: &Pools) {
        pools.give(old.msg, old.header.data_pool.zip(old.data));
    }

    /// A datagram that no sender of ours made.
    pub(super) fn refuse(&mut self) {
        self.lost.damaged += 1;
    }
}

impl Pools {
    /// Whether buffers are long enough for a message.
    fn would_fit(&self, header: &Header) -> bool {
        let holds = |id, len| self.get(id).is_some_and(|pool| len <= pool.config.buf_size_bytes);
        holds(PoolId::CpuMsg, header.msg_len) && header.data_pool.is_none_or(|id| holds(id, header.data_len))
    }

    /// Buffers for a message that is coming.
    fn take(&self, header: &Header) -> Option<(u32, Option<u32>)> {
        if !self.would_fit(header) {
            return None;
        }
        let msg_pool = self.get(PoolId::CpuMsg)?;
        let data_pool = header.data_pool.and_then(|id| self.get(id));
        let msg = msg_pool.take().ok()?;
        match data_pool.map(super::pool::Pool::take).transpose() {
            Ok(data) => Some((msg, data)),
            Err(_) => {
                msg_pool.give(msg);
                None
            }
        }
    }

    fn write(&self, msg: u32, data: Option<u32>, header: &Header, offset: usize, payload: &[u8]) {
        let split = (header.msg_len as usize).saturating_sub(offset).min(payload.len());
        let (of_msg, of_data) = payload.split_at(split);
        if let Some(pool) = self.get(PoolId::CpuMsg).filter(|_| !of_msg.is_empty()) {
            pool.write(msg, offset, of_msg);
        }
        if let Some((pool, data)) = header.data_pool.and_then(|id| self.get(id)).zip(data)
            && !of_data.is_empty()
        {
            pool.write(data, (offset + split) - header.msg_len as usize, of_data);
        }
    }

    pub(super) fn give(&self, msg: u32, data: Option<(PoolId, u32)>) {
        if let Some(pool) = self.get(PoolId::CpuMsg) {
            pool.give(msg);
        }
        if let Some((pool, index)) = data.and_then(|(id, index)| self.get(id).zip(Some(index))) {
            pool.give(index);
        }
    }

    pub(super) fn buffers(&self, msg: u32, data: Option<(PoolId, u32)>) -> Buffers {
        let address =
            |id: PoolId, index: u32| self.get(id).map_or(std::ptr::null_mut(), |pool| pool.address(index));
        Buffers {
            msg: address(PoolId::CpuMsg, msg),
            data: data.map_or(std::ptr::null_mut(), |(id, index)| address(id, index)),
            data_pool: data.map(|(id, _)| id),
        }
    }
}
