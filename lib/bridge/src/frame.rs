//! The frames between two bridges.
//!
//! All numbers are little-endian. A frame starts with the version of the protocol (2 bytes) and its kind (1 byte). A status goes on with
//! the lowest and the highest version that its sender reads (2 bytes each): these seven bytes are the same in every version. What follows
//! is fixed by the version: nothing is read by guessing, and a frame with too few or too many bytes is refused.
//!
//! A bridge begins with the lowest version that it reads, and goes on with the highest that both read. So bridges of releases next to each
//! other work together, in any order of an upgrade. A message has the same layout in all versions that a bridge reads, since one that is
//! sent again may be for a process of another version.

use std::fmt;

use shmesh::config::{BroadcastConfig, LinkConfig, PoolConfig, PoolId, Receivers, RingMode, SlowReaders};

/// The versions of the protocol that a bridge reads and writes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ProtocolVersions {
    /// The lowest version that it reads.
    pub lowest: u16,
    /// The highest version that it reads.
    pub highest: u16,
}

/// The versions of this release.
pub const VERSIONS: ProtocolVersions = ProtocolVersions { lowest: 1, highest: 1 };

impl ProtocolVersions {
    fn contains(self, version: u16) -> bool {
        (self.lowest..=self.highest).contains(&version)
    }

    /// The highest version that both have.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u16> {
        let highest = self.highest.min(other.highest);
        (highest >= self.lowest.max(other.lowest)).then_some(highest)
    }

    /// Says how to mend that a bridge has no version in common with this one.
    #[must_use]
    pub fn remedy(self, other: Self) -> String {
        format!(
            "the other bridge has {other} of the protocol, and this one {self}: upgrade the older one, one release at a time"
        )
    }
}

impl fmt::Display for ProtocolVersions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lowest, highest } = self;
        if lowest == highest {
            write!(f, "version {lowest}")
        } else {
            write!(f, "versions {lowest} to {highest}")
        }
    }
}

/// Numbers of messages are below this, so that sums of them do not overflow. No stream comes near it.
const NUMBER_END: u64 = 1 << 62;

/// A status is never longer, in any version.
const STATUS_BYTES_MAX: usize = 4096;

/// Bytes of a message's head.
pub const ITEM_HEAD_BYTES: usize = 2 + 1 + 8 + 8 + 8 + 8 + 1 + 4 + 4 + 1 + 4 + 4;
const KIND_ITEM: u8 = 1;
const KIND_STATUS: u8 = 2;

/// The kinds of messages that one direction of a link carries.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ItemKind {
    /// A message whose sender had it travel in the ring.
    Inline,
    /// A message in a MSG buffer, and in a DATA buffer if it has a pool.
    Pooled,
    /// A post for one TTI.
    Post,
}

/// The head of a message or a post. Its MSG part follows, then its DATA part.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ItemHead {
    /// The process of the bridge that it is for.
    pub to: u64,
    /// The stream that it belongs to: a new one whenever the sender's count starts again.
    pub stream: u64,
    /// Its number in the stream; the first is 1.
    pub number: u64,
    /// The lowest number that the sender can still send again.
    pub oldest: u64,
    /// The kind of the message.
    pub kind: ItemKind,
    /// The message's id, as in NVIPC.
    pub msg_id: i32,
    /// The message's cell id, as in NVIPC.
    pub cell_id: i32,
    /// The pool of the DATA part, if it has one.
    pub pool: Option<PoolId>,
    /// Bytes of the MSG part.
    pub msg_len: u32,
    /// Bytes of the DATA part.
    pub data_len: u32,
}

/// The state of a bridge, sent when it changes and from time to time.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Status {
    /// The versions that this process reads.
    pub reads: ProtocolVersions,
    /// The number of this process of the bridge.
    pub instance: u64,
    /// The process that it is for, as far as it is known; 0: any.
    pub to: u64,
    /// The stream that it sends.
    pub stream: u64,
    /// The lowest number that it can still send again.
    pub oldest: u64,
    /// The number of the next message.
    pub next: u64,
    /// The stream of the other side that it knows; 0: none.
    pub known_stream: u64,
    /// The last number of that stream which it has passed to its link.
    pub delivered: u64,
    /// The last number that it has received; those after it must be sent again if they are lost.
    pub received: u64,
    /// The other side may send numbers below this.
    pub limit: u64,
    /// The clock of the process when it sends this, in microseconds.
    pub clock_us: u64,
    /// The last clock that it got from the other side; 0: none yet.
    pub echo_us: u64,
    /// How long it has had `echo_us`, in microseconds.
    pub echo_age_us: u64,
    /// It misses messages after `received`: send them again.
    pub again: bool,
    /// Participants of its link that wait for the other side's messages.
    pub peers: u32,
    /// Nothing is left to be sent.
    pub is_drained: bool,
    /// The shape of the link, from the side that has it.
    pub shape: Option<WireShape>,
}

/// Rings and pools of a link, as they cross.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WireShape(pub LinkConfig);

/// A frame that was read and checked.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Frame<'a> {
    /// A message or a post, with the bytes of its parts.
    Item(ItemHead, &'a [u8]),
    /// The state of the other side.
    Status(Box<Status>),
}

/// Why a frame was refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum FrameError {
    /// It is of another version of the protocol. A status of any version says which ones its sender reads.
    #[error("it has version {version} of the protocol")]
    Version {
        /// The version of the frame.
        version: u16,
        /// The versions that its sender reads.
        sender_reads: Option<ProtocolVersions>,
    },
    /// Its bytes are damaged.
    #[error("a frame is damaged: {0}")]
    Damaged(&'static str),
}

struct FrameReader<'a>(&'a [u8]);

impl<'a> FrameReader<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(FrameError::Damaged("it is too short"))?;
        self.0 = rest;
        Ok(*head)
    }
    fn u8(&mut self) -> Result<u8, FrameError> {
        Ok(self.array::<1>()?[0])
    }
    fn u16(&mut self) -> Result<u16, FrameError> {
        self.array().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Result<u32, FrameError> {
        self.array().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Result<u64, FrameError> {
        self.array().map(u64::from_le_bytes)
    }
    fn bool(&mut self) -> Result<bool, FrameError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(FrameError::Damaged("a flag is neither 0 nor 1")),
        }
    }
}

impl ItemHead {
    /// The head of a message without parts, for this process. The sender gives it its numbers.
    #[must_use]
    pub fn new(kind: ItemKind, to: u64) -> Self {
        Self {
            to,
            stream: 0,
            number: 0,
            oldest: 0,
            kind,
            msg_id: 0,
            cell_id: 0,
            pool: None,
            msg_len: 0,
            data_len: 0,
        }
    }

    /// Bytes of the parts.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.msg_len) + u64::from(self.data_len)
    }

    /// Writes the head into an empty buffer.
    pub fn encode(&self, version: u16, to: &mut Vec<u8>) {
        to.extend_from_slice(&version.to_le_bytes());
        to.push(KIND_ITEM);
        for number in [self.stream, self.number, self.to, self.oldest] {
            to.extend_from_slice(&number.to_le_bytes());
        }
        to.push(match self.kind {
            ItemKind::Inline => 0,
            ItemKind::Pooled => 1,
            ItemKind::Post => 2,
        });
        to.extend_from_slice(&self.msg_id.to_le_bytes());
        to.extend_from_slice(&self.cell_id.to_le_bytes());
        to.push(self.pool.map_or(0, |pool| 1 + u8::try_from(pool.index()).expect("there are five pools")));
        to.extend_from_slice(&self.msg_len.to_le_bytes());
        to.extend_from_slice(&self.data_len.to_le_bytes());
    }

    /// Reads and checks the head of a message. `parts` are the bytes behind it.
    fn decode(reader: &mut FrameReader<'_>, parts: impl Fn(&[u8]) -> usize) -> Result<Self, FrameError> {
        let head = Self {
            stream: reader.u64()?,
            number: reader.u64()?,
            to: reader.u64()?,
            oldest: reader.u64()?,
            kind: match reader.u8()? {
                0 => ItemKind::Inline,
                1 => ItemKind::Pooled,
                2 => ItemKind::Post,
                _ => return Err(FrameError::Damaged("there is no such kind of message")),
            },
            msg_id: i32::from_le_bytes(reader.array()?),
            cell_id: i32::from_le_bytes(reader.array()?),
            pool: match reader.u8()? {
                0 => None,
                one => Some(
                    PoolId::from_index(u32::from(one) - 1)
                        .ok_or(FrameError::Damaged("there is no such pool"))?,
                ),
            },
            msg_len: reader.u32()?,
            data_len: reader.u32()?,
        };
        let is_number = (1..NUMBER_END).contains(&head.number);
        if head.stream == 0 || !is_number || head.oldest == 0 || head.oldest > head.number {
            return Err(FrameError::Damaged("its numbers contradict each other"));
        }
        if parts(reader.0) as u64 != head.bytes() {
            return Err(FrameError::Damaged("its length is not that of its parts"));
        }
        let fits = match head.kind {
            ItemKind::Inline => head.pool.is_none() && head.data_len == 0,
            ItemKind::Pooled => head.pool.is_some() || head.data_len == 0,
            ItemKind::Post => head.pool.is_none() && head.msg_len == 0 && head.data_len == 0,
        };
        if !fits || head.pool.is_some_and(PoolId::is_device) {
            return Err(FrameError::Damaged("its parts do not fit its kind"));
        }
        Ok(head)
    }
}

/// The bytes of a message's parts, which may be in pieces.
#[derive(Debug)]
pub struct PartBytes<'a> {
    first: &'a [u8],
    others: &'a [&'a [u8]],
}

impl<'a> PartBytes<'a> {
    /// The bytes behind the head in a frame that is in pieces. The first has the head.
    #[must_use]
    pub fn behind_head(pieces: &'a [&'a [u8]]) -> Self {
        let first = pieces.first().and_then(|first| first.get(ITEM_HEAD_BYTES..));
        Self { first: first.unwrap_or_default(), others: pieces.get(1..).unwrap_or_default() }
    }

    /// The next bytes without a copy, if they are in one piece.
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.first.split_at_checked(len)?;
        self.first = rest;
        Some(taken)
    }

    /// Copies the next bytes. Those that are missing stay as they are.
    pub fn copy_to(&mut self, mut to: &mut [u8]) {
        loop {
            let len = self.first.len().min(to.len());
            let (now, later) = to.split_at_mut(len);
            now.copy_from_slice(&self.first[..len]);
            self.first = &self.first[len..];
            to = later;
            match self.others.split_first() {
                Some((next, others)) if self.first.is_empty() => (self.first, self.others) = (next, others),
                _ => return,
            }
        }
    }
}

/// Whether a frame has a message or a post, as far as its kind says.
#[must_use]
pub fn is_item(frame: &[u8]) -> bool {
    frame.get(2) == Some(&KIND_ITEM)
}

/// Changes an encoded message that is sent again: the version and the process that it is for, and the oldest number.
pub fn set_receiver(encoded: &mut [u8], version: u16, to: u64, oldest: u64) {
    encoded[..2].copy_from_slice(&version.to_le_bytes());
    encoded[19..27].copy_from_slice(&to.to_le_bytes());
    encoded[27..35].copy_from_slice(&oldest.to_le_bytes());
}

impl WireShape {
    fn encode(&self, to: &mut Vec<u8>) {
        let config = &self.0;
        to.extend_from_slice(&config.ring_len.to_le_bytes());
        to.push(match config.ring_mode {
            RingMode::Spsc => 0,
            RingMode::Broadcast => 2,
            _ => 1,
        });
        to.push(match config.broadcast.slow {
            SlowReaders::Wait => 0,
            SlowReaders::Skip => 1,
            SlowReaders::Evict => 2,
        });
        to.extend_from_slice(&config.broadcast.history.to_le_bytes());
        to.extend_from_slice(&config.broadcast.evict_after_ms.to_le_bytes());
        to.push(u8::from(config.receivers == Receivers::One));
        for pool in &config.pools {
            to.extend_from_slice(&pool.buf_size_bytes.to_le_bytes());
            to.extend_from_slice(&pool.pool_len.to_le_bytes());
        }
        to.extend_from_slice(&config.latency_sample.to_le_bytes());
        to.push(u8::from(config.notify));
        to.extend_from_slice(&config.spin_us.to_le_bytes());
    }

    fn decode(reader: &mut FrameReader<'_>) -> Result<Self, FrameError> {
        // Each bridge has the name of its own link: the two names may differ.
        let mut config = LinkConfig::new("bridged".parse().map_err(|_| FrameError::Damaged("a name"))?);
        config.ring_len = reader.u32()?;
        config.ring_mode = match reader.u8()? {
            0 => RingMode::Spsc,
            1 => RingMode::Mpmc,
            2 => RingMode::Broadcast,
            _ => return Err(FrameError::Damaged("there is no such ring mode")),
        };
        let slow = match reader.u8()? {
            0 => SlowReaders::Wait,
            1 => SlowReaders::Skip,
            2 => SlowReaders::Evict,
            _ => return Err(FrameError::Damaged("there is no such rule for slow readers")),
        };
        config.broadcast = BroadcastConfig { slow, history: reader.u32()?, evict_after_ms: reader.u32()? };
        config.receivers = if reader.bool()? { Receivers::One } else { Receivers::Many };
        for pool in &mut config.pools {
            *pool = PoolConfig { buf_size_bytes: reader.u32()?, pool_len: reader.u32()? };
        }
        config.latency_sample = reader.u32()?;
        config.notify = reader.bool()?;
        config.spin_us = reader.u32()?;
        config.validate().map_err(|_| FrameError::Damaged("no link can have this shape"))?;
        Ok(Self(config))
    }
}

impl Status {
    /// The status of a process that has sent and received nothing, for a link with one participant that waits for messages.
    #[must_use]
    pub fn new(reads: ProtocolVersions, instance: u64, stream: u64) -> Self {
        Self {
            reads,
            instance,
            to: 0,
            stream,
            oldest: 1,
            next: 1,
            known_stream: 0,
            delivered: 0,
            received: 0,
            limit: 0,
            clock_us: 1,
            echo_us: 0,
            echo_age_us: 0,
            again: false,
            peers: 1,
            is_drained: true,
            shape: None,
        }
    }

    /// The bytes of the frame, in this version.
    #[must_use]
    pub fn encode(&self, version: u16) -> Vec<u8> {
        let mut to = Vec::with_capacity(192);
        to.extend_from_slice(&version.to_le_bytes());
        to.push(KIND_STATUS);
        to.extend_from_slice(&self.reads.lowest.to_le_bytes());
        to.extend_from_slice(&self.reads.highest.to_le_bytes());
        for number in [
            self.instance,
            self.to,
            self.stream,
            self.oldest,
            self.next,
            self.known_stream,
            self.delivered,
            self.received,
            self.limit,
            self.clock_us,
            self.echo_us,
            self.echo_age_us,
        ] {
            to.extend_from_slice(&number.to_le_bytes());
        }
        to.push(u8::from(self.again));
        to.extend_from_slice(&self.peers.to_le_bytes());
        to.push(u8::from(self.is_drained));
        to.push(u8::from(self.shape.is_some()));
        if let Some(shape) = &self.shape {
            shape.encode(&mut to);
        }
        to
    }

    fn decode(reads: ProtocolVersions, reader: &mut FrameReader<'_>) -> Result<Self, FrameError> {
        let status = Self {
            reads,
            instance: reader.u64()?,
            to: reader.u64()?,
            stream: reader.u64()?,
            oldest: reader.u64()?,
            next: reader.u64()?,
            known_stream: reader.u64()?,
            delivered: reader.u64()?,
            received: reader.u64()?,
            limit: reader.u64()?,
            clock_us: reader.u64()?,
            echo_us: reader.u64()?,
            echo_age_us: reader.u64()?,
            again: reader.bool()?,
            peers: reader.u32()?,
            is_drained: reader.bool()?,
            shape: if reader.bool()? { Some(WireShape::decode(reader)?) } else { None },
        };
        if !reader.0.is_empty() {
            return Err(FrameError::Damaged("it is too long"));
        }
        let numbers = [status.next, status.delivered, status.received, status.limit];
        let are_numbers = numbers.iter().all(|number| *number < NUMBER_END);
        if status.stream == 0 || !are_numbers || status.oldest == 0 || status.oldest > status.next {
            return Err(FrameError::Damaged("its numbers contradict each other"));
        }
        Ok(status)
    }
}

impl<'a> Frame<'a> {
    /// Reads and checks a frame of one of these versions.
    ///
    /// # Errors
    /// [`FrameError`] says what is wrong with it.
    pub fn decode(bytes: &'a [u8], versions: ProtocolVersions) -> Result<Self, FrameError> {
        let mut reader = FrameReader(bytes);
        let (version, kind) = (reader.u16()?, reader.u8()?);
        let sender_reads = match kind {
            KIND_STATUS => Some(ProtocolVersions { lowest: reader.u16()?, highest: reader.u16()? }),
            _ => None,
        };
        if !versions.contains(version) {
            return Err(FrameError::Version { version, sender_reads });
        }
        match (kind, sender_reads) {
            (KIND_ITEM, _) => {
                let head = ItemHead::decode(&mut reader, <[u8]>::len)?;
                Ok(Self::Item(head, reader.0))
            }
            (_, Some(reads)) => {
                Status::decode(reads, &mut reader).map(|status| Self::Status(Box::new(status)))
            }
            _ => Err(FrameError::Damaged("there is no such kind of frame")),
        }
    }

    /// The head of a message whose frame is in pieces, if it is a good one and its head is in the first piece.
    #[must_use]
    pub fn item_head(pieces: &[&[u8]], versions: ProtocolVersions) -> Option<ItemHead> {
        let (first, others) = pieces.split_first()?;
        let mut reader = FrameReader(first);
        let (version, kind) = (reader.u16().ok()?, reader.u8().ok()?);
        let rest: usize = others.iter().map(|piece| piece.len()).sum();
        let head = ItemHead::decode(&mut reader, |behind| behind.len() + rest).ok()?;
        (kind == KIND_ITEM && versions.contains(version)).then_some(head)
    }

    /// The status in a frame, in pieces; of a version that is not read, the versions that its sender reads. `None` if it is not a status.
    #[must_use]
    pub fn status(
        pieces: &[&[u8]],
        versions: ProtocolVersions,
    ) -> Option<Result<Box<Status>, ProtocolVersions>> {
        let len: usize = pieces.iter().map(|piece| piece.len()).sum();
        if len > STATUS_BYTES_MAX {
            return None;
        }
        match Frame::decode(&pieces.concat(), versions) {
            Ok(Frame::Status(status)) => Some(Ok(status)),
            Err(FrameError::Version { sender_reads: Some(reads), .. }) => Some(Err(reads)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn status(shape: Option<WireShape>) -> Status {
        Status {
            reads: VERSIONS,
            instance: 9,
            to: 6,
            stream: 5,
            oldest: 3,
            next: 4,
            known_stream: 7,
            delivered: 8,
            received: 9,
            limit: 20,
            clock_us: 30,
            echo_us: 40,
            echo_age_us: 2,
            again: true,
            peers: 2,
            is_drained: false,
            shape,
        }
    }

    fn read(bytes: &[u8]) -> Result<Frame<'_>, FrameError> {
        Frame::decode(bytes, VERSIONS)
    }

    fn item() -> ItemHead {
        ItemHead {
            to: 6,
            stream: 5,
            number: 4,
            oldest: 3,
            kind: ItemKind::Pooled,
            msg_id: -1,
            cell_id: 7,
            pool: Some(PoolId::CpuData),
            msg_len: 3,
            data_len: 2,
        }
    }

    #[test]
    fn frames_are_read_as_written() {
        let mut config = LinkConfig::new("bridged".parse().unwrap());
        config.ring_mode = RingMode::Broadcast;
        config.broadcast = BroadcastConfig { slow: SlowReaders::Evict, history: 4, evict_after_ms: 70 };
        config.ring_len = 32;
        for shape in [None, Some(WireShape(config))] {
            let (status, bytes) = (status(shape.clone()), status(shape).encode(1));
            assert_eq!(read(&bytes), Ok(Frame::Status(Box::new(status))));
            for len in 0..bytes.len() {
                assert!(read(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
            }
        }
        let mut bytes = Vec::new();
        item().encode(1, &mut bytes);
        assert_eq!(bytes.len(), ITEM_HEAD_BYTES);
        bytes.extend_from_slice(b"abcde");
        assert_eq!(read(&bytes), Ok(Frame::Item(item(), b"abcde")));
        set_receiver(&mut bytes, 1, 1, 2);
        assert_eq!(read(&bytes), Ok(Frame::Item(ItemHead { to: 1, oldest: 2, ..item() }, b"abcde")));
        bytes.push(0);
        assert!(matches!(read(&bytes), Err(FrameError::Damaged(_))), "a byte too many");
    }

    #[test]
    fn status_of_any_version_says_what_its_sender_reads() {
        let reads = ProtocolVersions { lowest: 8, highest: 9 };
        let mut bytes = Status { reads, ..status(None) }.encode(9);
        bytes.truncate(7);
        bytes.extend_from_slice(b"another layout");
        assert_eq!(read(&bytes), Err(FrameError::Version { version: 9, sender_reads: Some(reads) }));
        let of = |pieces: &[&[u8]]| Frame::status(pieces, VERSIONS);
        assert_eq!(of(&[&bytes[..5], &bytes[5..]]), Some(Err(reads)));
        assert_eq!(of(&[&bytes, &[0; STATUS_BYTES_MAX]]), None);
        assert_eq!(of(&[&bytes[..6]]), None);
        assert_eq!(of(&[&status(None).encode(1)]), Some(Ok(Box::new(status(None)))));
        let mut bytes = Vec::new();
        item().encode(9, &mut bytes);
        assert_eq!(read(&bytes), Err(FrameError::Version { version: 9, sender_reads: None }));
        assert_eq!(of(&[&bytes]), None);
    }

    #[test]
    fn highest_common_version_is_chosen() {
        let versions = |lowest, highest| ProtocolVersions { lowest, highest };
        let common = |a: (u16, u16), b: (u16, u16)| versions(a.0, a.1).common(versions(b.0, b.1));
        assert_eq!(common((1, 2), (2, 3)), Some(2));
        assert_eq!(common((2, 3), (1, 2)), Some(2));
        assert_eq!(common((1, 4), (2, 3)), Some(3));
        assert_eq!((common((1, 1), (2, 2)), common((3, 4), (1, 2))), (None, None));
        assert_eq!(common((1, 9), (5, 4)), None, "a range that has none");
        assert_eq!(
            (versions(1, 1).to_string(), versions(1, 2).to_string()),
            ("version 1".into(), "versions 1 to 2".into())
        );
    }

    #[test]
    fn frame_in_pieces_is_read_as_a_whole_one() {
        let mut bytes = Vec::new();
        item().encode(1, &mut bytes);
        bytes.extend_from_slice(b"abcde");
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let pieces = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                let head = Frame::item_head(&pieces, VERSIONS);
                assert_eq!(head, (first >= ITEM_HEAD_BYTES).then(item), "{first} bytes, then {second}");
                if head.is_some() {
                    let (mut parts, mut msg, mut data) = (PartBytes::behind_head(&pieces), [0; 3], [0; 4]);
                    parts.copy_to(&mut msg);
                    parts.copy_to(&mut data);
                    assert_eq!((&msg, &data), (b"abc", b"de\0\0"), "{first} bytes, then {second}");
                }
                assert_eq!(
                    Frame::item_head(&pieces[..2], VERSIONS).is_some(),
                    head.is_some() && second == bytes.len()
                );
            }
        }
        let pieces = [&bytes[..]];
        let mut parts = PartBytes::behind_head(&pieces);
        assert_eq!(
            (parts.take(3), parts.take(3), parts.take(2)),
            (Some(&b"abc"[..]), None, Some(&b"de"[..]))
        );
        assert_eq!(Frame::item_head(&[], VERSIONS), None);
        assert_eq!(Frame::item_head(&pieces, ProtocolVersions { lowest: 2, highest: 3 }), None);
        assert_eq!(Frame::item_head(&[&status(None).encode(1)], VERSIONS), None);
    }

    #[test]
    fn parts_in_device_memory_are_refused() {
        let mut bytes = Vec::new();
        ItemHead { pool: Some(PoolId::CudaData), ..item() }.encode(1, &mut bytes);
        bytes.extend_from_slice(b"abcde");
        assert!(read(&bytes).is_err());
    }

    #[test]
    fn numbers_that_would_overflow_are_refused() {
        for number in [u64::MAX, 1 << 62] {
            let mut bytes = Vec::new();
            ItemHead { number, oldest: number, ..item() }.encode(1, &mut bytes);
            bytes.extend_from_slice(b"abcde");
            assert!(read(&bytes).is_err());
            assert!(read(&Status { next: number, ..status(None) }.encode(1)).is_err());
            assert!(read(&Status { limit: number, ..status(None) }.encode(1)).is_err());
            assert!(read(&Status { delivered: number, ..status(None) }.encode(1)).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300), kind in 0_u8..4) {
            let mut frame = vec![1, 0, kind, 1, 0, 1, 0];
            frame.extend_from_slice(&bytes);
            let _ = read(&bytes);
            let _ = read(&frame);
        }

        #[test]
        fn damaged_frames_are_read_or_refused(at in 0_usize..200, to in any::<u8>()) {
            let mut bytes = status(Some(WireShape(LinkConfig::new("bridged".parse().unwrap())))).encode(1);
            let at = at % bytes.len();
            bytes[at] = to;
            if let Ok(Frame::Status(status)) = read(&bytes) {
                prop_assert_eq!(status.encode(1), bytes);
            }
        }
    }
}
