//! Parts become messages again, in order, and what is missing is counted.
//!
//! Whoever completes first goes first, and everything older that is not complete then is lost: nothing is asked for again.

use std::collections::VecDeque;

use shmesh::config::PoolId;

use super::wire::Header;
use super::{Lost, Pools};
use crate::endpoint::{Buffers, Message};

/// Most messages that are in pieces at once. One more ends the oldest.
const PARTIAL_MAX: usize = 8;
/// How much older than the newest a number may be and still be of its session.
const HALF: u32 = 1 << 31;

/// A message of which parts are here.
#[derive(Debug)]
struct Partial {
    header: Header,
    msg: u32,
    data: Option<u32>,
    /// Which parts are here.
    parts: Vec<bool>,
    missing: usize,
    bytes: u64,
}

/// What comes from one peer.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    session: Option<u32>,
    /// The number after that of the last message delivered.
    next: u32,
    partial: VecDeque<Partial>,
    pub(super) lost: Lost,
}

impl Assembler {
    /// Takes a part. Some: it was the last of its message.
    pub(super) fn put(&mut self, header: Header, payload: &[u8], pools: &Pools) -> Option<Message> {
        if self.session != Some(header.session) {
            // A new sender. Where it began is not known, so nothing before its first part counts as lost.
            while let Some(old) = self.partial.pop_front() {
                self.lose(&old, pools);
            }
            (self.session, self.next) = (Some(header.session), header.number);
        }
        if header.number.wrapping_sub(self.next) >= HALF {
            self.lost.late += 1;
            return None;
        }
        let at = match self.partial.iter().position(|partial| partial.header.number == header.number) {
            Some(at) if self.partial[at].header.same_message(&header) => at,
            Some(_) => {
                self.lost.damaged += 1;
                return None;
            }
            None => self.begin(header, pools)?,
        };
        let partial = &mut self.partial[at];
        let part = usize::from(header.part);
        if std::mem::replace(&mut partial.parts[part], true) {
            self.lost.late += 1;
            return None;
        }
        pools.write(partial.msg, partial.data, &partial.header, header.offset as usize, payload);
        partial.missing -= 1;
        partial.bytes += payload.len() as u64;
        if partial.missing > 0 {
            return None;
        }
        let whole = self.partial.remove(at)?;
        if whole.bytes != whole.header.total() {
            // All parts, and not all bytes: no sender of ours.
            self.lost.damaged += 1;
            pools.give(whole.msg, whole.header.data_pool.zip(whole.data));
            return None;
        }
        Some(self.deliver(&whole, pools))
    }

    fn begin(&mut self, header: Header, pools: &Pools) -> Option<usize> {
        let (msg, data) = loop {
            if let Some(taken) = pools.take(&header) {
                break taken;
            }
            // What is in pieces must not keep the whole out.
            if pools.would_fit(&header)
                && let Some(oldest) = self.partial.pop_front()
            {
                self.lose(&oldest, pools);
            } else {
                self.lost.no_buffer += 1;
                return None;
            }
        };
        if self.partial.len() == PARTIAL_MAX
            && let Some(oldest) = self.partial.pop_front()
        {
            self.lose(&oldest, pools);
        }
        let parts = usize::from(header.parts);
        self.partial.push_back(Partial {
            header,
            msg,
            data,
            parts: vec![false; parts],
            missing: parts,
            bytes: 0,
        });
        Some(self.partial.len() - 1)
    }

    fn deliver(&mut self, whole: &Partial, pools: &Pools) -> Message {
        let header = whole.header;
        self.lost.messages += u64::from(header.number.wrapping_sub(self.next));
        self.next = header.number.wrapping_add(1);
        // Older ones are counted by that already.
        let next = self.next;
        self.partial.retain(|partial| {
            let newer = partial.header.number.wrapping_sub(next) < HALF;
            if !newer {
                pools.give(partial.msg, partial.header.data_pool.zip(partial.data));
            }
            newer
        });
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

    /// Gives up a message in pieces. Counted when a newer one is delivered, unless there will be none.
    fn lose(&mut self, old: &Partial, pools: &Pools) {
        pools.give(old.msg, old.header.data_pool.zip(old.data));
        if self.session != Some(old.header.session) {
            self.lost.messages += 1;
        }
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
