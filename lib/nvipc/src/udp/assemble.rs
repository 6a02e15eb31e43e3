//! Assembles datagrams to messages, in order, and counts what is missing.
//!
//! Messages are delivered as they become complete. Older messages that are incomplete at that moment are lost, as there is
//! no retransmission.
//!
//! Datagrams can be forged by any host on the network path, and a forged one can be delivered as a message. It must not do
//! more harm than that. So a sender is recognized by its session and the current message number. A datagram with another
//! session, or with a number far ahead, starts a *stream* beside the trusted one, which continues. Only a second message of
//! the new stream ends the others: then the sender has restarted, or many messages were lost.

use std::collections::VecDeque;

use shmesh::config::PoolId;

use super::wire::DatagramHeader;
use super::{LossStats, Pools};
use crate::endpoint::{Buffers, Message};

/// Maximum number of incomplete messages. One more drops the oldest.
const PARTIAL_MAX: usize = 8;
/// Maximum number of streams. One more drops the oldest that is not trusted.
const STREAMS_MAX: usize = 4;
/// Maximum gap between message numbers in a stream. A larger gap starts another stream.
const AHEAD_MAX: u32 = 64;
/// How far a datagram may lag behind the trusted stream and still count as late.
const LATE_MAX: u32 = 1 << 16;
/// Of two message numbers, `b` is later than `a` if `b - a` is less than this (modulo 2^32).
const HALF: u32 = 1 << 31;

/// The messages from one sender, as far as senders can be distinguished.
#[derive(Clone, Copy, Debug)]
struct Stream {
    session: u32,
    /// The number of its first message.
    first: u32,
    /// The number after the last delivered message.
    next: u32,
    delivered: bool,
}

impl Stream {
    fn begun_by(header: &DatagramHeader) -> Self {
        Self { session: header.session, first: header.number, next: header.number, delivered: false }
    }

    fn continues(&self, header: &DatagramHeader) -> bool {
        self.session == header.session && header.number.wrapping_sub(self.next) < AHEAD_MAX
    }

    /// Whether a datagram is too late for this stream, but by no more than `max` messages.
    fn has_passed(&self, header: &DatagramHeader, max: u32) -> bool {
        self.session == header.session && (1..=max).contains(&self.next.wrapping_sub(header.number))
    }
}

/// An incomplete message: some of its parts have arrived.
#[derive(Debug)]
struct Partial {
    header: DatagramHeader,
    /// Bytes of each part but the last.
    stride: u32,
    msg: u32,
    data: Option<u32>,
    /// Which parts have arrived.
    parts: Vec<bool>,
    missing: usize,
}

/// The state of reception from one peer.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    /// The streams; the first is the trusted one.
    streams: Vec<Stream>,
    partial: VecDeque<Partial>,
    pub(super) lost: LossStats,
}

impl Assembler {
    /// Adds a part. Returns the message if this was its last missing part.
    pub(super) fn put(&mut self, header: DatagramHeader, payload: &[u8], pools: &Pools) -> Option<Message> {
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

    /// Returns the stream of a datagram, and starts one if needed. Returns `None` if the datagram is too late.
    fn stream_of(&mut self, header: &DatagramHeader, pools: &Pools) -> Option<usize> {
        if let Some(at) = self.streams.iter().position(|stream| stream.continues(header)) {
            return Some(at);
        }
        // A stream that is not trusted says little about the position of the sender.
        let max = |at| if at == 0 { LATE_MAX } else { AHEAD_MAX };
        if self.streams.iter().enumerate().any(|(at, stream)| stream.has_passed(header, max(at))) {
            self.lost.late += 1;
            return None;
        }
        if self.streams.len() == STREAMS_MAX {
            let ended = self.streams.remove(1);
            self.end(&[ended], pools);
        }
        // The sender's first number is unknown, so messages before this one do not count as lost.
        self.streams.push(Stream::begun_by(header));
        Some(self.streams.len() - 1)
    }

    fn begin(&mut self, header: DatagramHeader, stride: u32, pools: &Pools) -> Option<usize> {
        let (msg, data) = loop {
            if let Some(taken) = pools.take(&header) {
                break taken;
            }
            // Incomplete messages must not take the buffers that a complete one needs.
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
        // Older ones are counted by the gap in numbers. Those of other streams are not older.
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

    /// Makes the stream at `at` the trusted one, and ends the others.
    fn believe(&mut self, at: usize, pools: &Pools) {
        let stream = self.streams.swap_remove(at);
        let ended = std::mem::replace(&mut self.streams, vec![stream]);
        let before = ended[0];
        let between = stream.first.wrapping_sub(before.next);
        self.lost.messages += if before.session != stream.session {
            // The numbers of an untrusted stream do not tell how many messages were lost.
            self.partial.iter().filter(|partial| before.continues(&partial.header)).count() as u64
        } else if between < HALF {
            u64::from(between)
        } else {
            0
        };
        self.end(&ended, pools);
    }

    /// Drops the incomplete messages of streams that have ended.
    fn end(&mut self, ended: &[Stream], pools: &Pools) {
        let streams = std::mem::take(&mut self.streams);
        self.drop_partials(pools, |partial| {
            let is_of = |streams: &[Stream]| streams.iter().any(|stream| stream.continues(partial));
            is_of(ended) && !is_of(&streams)
        });
        self.streams = streams;
    }

    /// Returns the buffers of incomplete messages that match.
    fn drop_partials(&mut self, pools: &Pools, such: impl Fn(&DatagramHeader) -> bool) {
        self.partial.retain(|partial| {
            let goes = such(&partial.header);
            if goes {
                pools.give(partial.msg, partial.header.data_pool.zip(partial.data));
            }
            !goes
        });
    }

    /// Drops one incomplete message. It is counted as lost when a later one of its stream is delivered.
    fn give_up(&mut self, old: &Partial, pools: &Pools) {
        pools.give(old.msg, old.header.data_pool.zip(old.data));
    }

    /// Counts a datagram that no correct sender produces.
    pub(super) fn refuse(&mut self) {
        self.lost.damaged += 1;
    }
}

impl Pools {
    /// Whether the buffers of the pools are long enough for a message.
    fn would_fit(&self, header: &DatagramHeader) -> bool {
        let holds = |id, len| self.get(id).is_some_and(|pool| len <= pool.config.buf_size_bytes);
        holds(PoolId::CpuMsg, header.msg_len) && header.data_pool.is_none_or(|id| holds(id, header.data_len))
    }

    /// Takes buffers for a message of which a part has arrived.
    fn take(&self, header: &DatagramHeader) -> Option<(u32, Option<u32>)> {
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

    fn write(&self, msg: u32, data: Option<u32>, header: &DatagramHeader, offset: usize, payload: &[u8]) {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shmesh::config::PoolConfig;

    use super::super::pool::Pool;
    use super::*;

    const LEN: u32 = 12;

    fn pools() -> Pools {
        let pool = |id, buf_size_bytes| Pool::new(id, PoolConfig { buf_size_bytes, pool_len: LEN }).ok();
        Pools([pool(PoolId::CpuMsg, 32), pool(PoolId::CpuData, 64), None, None, None])
    }

    /// One part of a message whose bytes all follow from its number.
    fn datagram(
        session: u32,
        number: u32,
        lens: (u32, u32),
        parts: u16,
        part: u16,
    ) -> (DatagramHeader, Vec<u8>) {
        let data_pool = (lens.1 > 0).then_some(PoolId::CpuData);
        let header = DatagramHeader {
            session,
            number,
            part,
            parts,
            msg_id: number.cast_signed(),
            cell_id: 0,
            msg_len: lens.0,
            data_len: lens.1,
            data_pool,
            offset: 0,
        };
        let stride = u32::try_from(header.total()).unwrap().div_ceil(u32::from(parts).max(1));
        let offset = stride * u32::from(part);
        let len = stride.min((lens.0 + lens.1).saturating_sub(offset));
        (DatagramHeader { offset, ..header }, vec![number.to_le_bytes()[0]; len as usize])
    }

    /// Checks every byte of a message, and returns its buffers.
    fn check(message: &Message, pools: &Pools) -> u32 {
        let number = message.msg_id.cast_unsigned();
        for (part, len) in [(message.buffers.msg, message.msg_len), (message.buffers.data, message.data_len)]
        {
            for i in 0..usize::try_from(len).unwrap() {
                // SAFETY: the byte is inside the buffer, which was delivered to this test.
                #[expect(unsafe_code, reason = "buffers are addresses")]
                let byte = unsafe { part.add(i).read() };
                assert_eq!(byte, number.to_le_bytes()[0], "bytes of this message");
            }
        }
        let index = |id| pools.get(id).unwrap();
        let msg = index(PoolId::CpuMsg).held_index(message.buffers.msg).unwrap();
        let data = (!message.buffers.data.is_null())
            .then(|| (PoolId::CpuData, index(PoolId::CpuData).held_index(message.buffers.data).unwrap()));
        pools.give(msg, data);
        number
    }

    fn free(pools: &Pools, id: PoolId) -> usize {
        let pool = pools.get(id).unwrap();
        let all: Vec<_> = std::iter::from_fn(|| pool.take().ok()).collect();
        all.iter().for_each(|index| assert!(pool.give(*index)));
        all.len()
    }

    proptest! {
        #[test]
        fn any_datagrams_yield_only_whole_messages_and_leak_no_buffer(
            datagrams in prop::collection::vec(
                (0_u32..3, prop_oneof![0_u32..200, any::<u32>()], (0_u32..40, 0_u32..70), 0_u16..5, 0_u16..5, -1_i32..2),
                0..200,
            ),
        ) {
            let (pools, mut assembler) = (pools(), Assembler::default());
            for (session, number, lens, parts, part, shift) in datagrams {
                let (header, payload) = datagram(session, number, lens, parts, part);
                // As the parser allows.
                let header = DatagramHeader { offset: header.offset.wrapping_add_signed(shift), ..header };
                let end = u64::from(header.offset) + payload.len() as u64;
                if part < parts && end <= header.total()
                    && let Some(message) = assembler.put(header, &payload, &pools)
                {
                    prop_assert_eq!(check(&message, &pools), number);
                }
                prop_assert!(assembler.partial.len() <= PARTIAL_MAX && assembler.streams.len() <= STREAMS_MAX);
                let is_awaited = |partial: &Partial| {
                    assembler.streams.iter().any(|stream| stream.continues(&partial.header))
                };
                prop_assert!(assembler.partial.iter().all(is_awaited));
            }
            let with_data = assembler.partial.iter().filter(|partial| partial.data.is_some()).count();
            prop_assert_eq!(free(&pools, PoolId::CpuMsg), LEN as usize - assembler.partial.len());
            prop_assert_eq!(free(&pools, PoolId::CpuData), LEN as usize - with_data);
        }

        #[test]
        fn messages_of_one_sender_arrive_once_in_order_or_count_as_lost(
            begin: u32,
            messages in prop::collection::vec((0_u32..33, 0_u32..65, 1_u16..4, 0_u32..10), 1..150),
            forged in prop::collection::vec((0_usize..150, any::<u32>(), any::<bool>()), 0..3),
        ) {
            let (pools, mut assembler) = (pools(), Assembler::default());
            let (mut last, mut delivered, mut whole) = (None, 0_u64, 0_u64);
            for (turn, (msg_len, data_len, parts, fate)) in messages.iter().enumerate() {
                let number = begin.wrapping_add(u32::try_from(turn).unwrap());
                let parts = (*parts).min(u16::try_from((msg_len + data_len).max(1)).unwrap());
                let is_last = turn + 1 == messages.len();
                // One in ten is lost, one in ten arrives twice.
                let times = match fate { 0 if !is_last && turn > 0 => 0, 1 => 2, _ => 1 };
                let mut passed = 0;
                for part in 0..parts {
                    let (header, payload) = datagram(1, number, (*msg_len, *data_len), parts, part);
                    // A correct sender sends no empty parts: it sends fewer parts.
                    if header.stride(payload.len()).is_none() {
                        continue;
                    }
                    passed += u16::from(times > 0);
                    for _ in 0..times {
                        if let Some(message) = assembler.put(header, &payload, &pools) {
                            let number = check(&message, &pools);
                            prop_assert!(last.is_none_or(|last| number.wrapping_sub(last) < HALF && number != last));
                            last = Some(number);
                            delivered += 1;
                        }
                    }
                    for (_, number, same) in forged.iter().filter(|(at, ..)| *at == turn && part == 0) {
                        // A number close to the sender's is a message like any other.
                        let far = (1 << 20..u32::MAX - (1 << 20)).contains(&number.wrapping_sub(begin));
                        let session = if *same { 1 } else { *number };
                        let (header, payload) = datagram(session, *number, (5, 0), 1, 0);
                        if far && let Some(message) = assembler.put(header, &payload, &pools) {
                            check(&message, &pools);
                        }
                    }
                }
                whole += u64::from(passed == parts);
            }
            prop_assert_eq!(delivered, whole);
            if assembler.partial.is_empty() {
                prop_assert_eq!(whole + assembler.lost.messages, messages.len() as u64);
            }
        }
    }
}
