//! The datagram format of messages between nodes.
//!
//! ```text
//!  0  "shm1"                 20  cell_id
//!  4  session of the sender  24  bytes of MSG
//!  8  number of the message  28  bytes of DATA
//! 12  number of the part     32  pool of DATA, 0: none
//! 14  parts                  36  where this part begins in MSG and DATA, one after the other
//! 16  msg_id                 40  bytes of this part
//! ```
//!
//! All fields are little-endian. A sender chooses its session at random when it starts, so a receiver can tell that its
//! peer has restarted and does not take the new message numbers for old ones.

use shmesh::config::PoolId;

/// Bytes before the payload.
pub(super) const HEADER_BYTES: usize = 40;
const MAGIC: [u8; 4] = *b"shm1";

/// The header of each datagram of a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct DatagramHeader {
    pub(super) session: u32,
    pub(super) number: u32,
    pub(super) part: u16,
    pub(super) parts: u16,
    pub(super) msg_id: i32,
    pub(super) cell_id: i32,
    pub(super) msg_len: u32,
    pub(super) data_len: u32,
    pub(super) data_pool: Option<PoolId>,
    pub(super) offset: u32,
}

impl DatagramHeader {
    /// Bytes of MSG and DATA together.
    pub(super) fn total(&self) -> u64 {
        u64::from(self.msg_len) + u64::from(self.data_len)
    }

    /// Bytes of each part but the last, given the payload of this datagram. A correct sender splits a message into equal
    /// parts, so that they cover it without overlap. Returns `None` if this part is not from such a split.
    pub(super) fn stride(&self, payload: usize) -> Option<u32> {
        let (part, parts) = (u32::from(self.part), u32::from(self.parts));
        let len = u32::try_from(payload).ok()?;
        let ends = u64::from(self.offset) + u64::from(len) == self.total();
        if part + 1 < parts {
            let is_cut = len > 0 && part.checked_mul(len) == Some(self.offset);
            return (is_cut && !ends).then_some(len);
        }
        if part == 0 {
            return (self.offset == 0 && ends).then_some(0);
        }
        let stride = self.offset / part;
        (ends && stride * part == self.offset && (1..=stride).contains(&len)).then_some(stride)
    }

    /// Whether both are parts of one message.
    pub(super) fn same_message(&self, other: &Self) -> bool {
        Self { part: 0, offset: 0, ..*self } == Self { part: 0, offset: 0, ..*other }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        let mut put = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        put(4, self.session);
        put(8, self.number);
        put(12, u32::from(self.parts) << 16 | u32::from(self.part));
        put(16, self.msg_id.cast_unsigned());
        put(20, self.cell_id.cast_unsigned());
        put(24, self.msg_len);
        put(28, self.data_len);
        put(32, self.data_pool.map_or(0, |pool| pool as u32));
        put(36, self.offset);
        bytes
    }

    /// Parses a datagram into header and payload. Returns `None` if no correct sender made it.
    pub(super) fn parse(datagram: &[u8]) -> Option<(Self, &[u8])> {
        let (head, payload) = datagram.split_at_checked(HEADER_BYTES)?;
        let get = |at: usize| head[at..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        if head[..4] != MAGIC {
            return None;
        }
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let (part, parts) = (get(12)? as u16, (get(12)? >> 16) as u16);
        let pool = get(32)?;
        let header = Self {
            session: get(4)?,
            number: get(8)?,
            part,
            parts,
            msg_id: get(16)?.cast_signed(),
            cell_id: get(20)?.cast_signed(),
            msg_len: get(24)?,
            data_len: get(28)?,
            data_pool: if pool == 0 { None } else { Some(PoolId::from_index(pool)?) },
            offset: get(36)?,
        };
        let end = u64::from(header.offset) + payload.len() as u64;
        let whole = header.part < header.parts && end <= header.total();
        let alone = header.data_pool.is_some() || header.data_len == 0;
        (whole && alone).then_some((header, payload))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEADER: DatagramHeader = DatagramHeader {
        session: 7,
        number: u32::MAX,
        part: 1,
        parts: 3,
        msg_id: 0x80,
        cell_id: -1,
        msg_len: 20,
        data_len: 4000,
        data_pool: Some(PoolId::CpuLarge),
        offset: 1400,
    };

    #[test]
    fn header_round_trips_through_bytes() {
        let bytes = [HEADER.to_bytes().as_slice(), &[9; 100]].concat();
        assert_eq!(bytes[..4], *b"shm1");
        assert_eq!(bytes[36..40], 1400_u32.to_le_bytes());
        assert_eq!(DatagramHeader::parse(&bytes), Some((HEADER, &[9; 100][..])));
        assert!(HEADER.same_message(&DatagramHeader { part: 2, offset: 0, ..HEADER }));
        assert!(!HEADER.same_message(&DatagramHeader { data_len: 1, ..HEADER }));
    }

    #[test]
    fn parts_beyond_the_message_are_refused() {
        let parse = |header: DatagramHeader, len: usize| {
            DatagramHeader::parse(&[header.to_bytes().as_slice(), &vec![0; len]].concat()).is_some()
        };
        assert!(parse(HEADER, 2620) && !parse(HEADER, 2621));
        assert!(!parse(DatagramHeader { part: 3, ..HEADER }, 1));
        assert!(!parse(DatagramHeader { offset: u32::MAX, ..HEADER }, 1));
        assert!(!parse(DatagramHeader { data_pool: None, ..HEADER }, 1));
        assert!(DatagramHeader::parse(&HEADER.to_bytes()[..39]).is_none());
    }

    #[test]
    fn parts_of_unequal_size_are_refused() {
        let stride = |part, offset, len| DatagramHeader { part, offset, ..HEADER }.stride(len);
        assert_eq!(stride(0, 0, 1400), Some(1400));
        assert_eq!(stride(1, 1400, 1400), Some(1400));
        assert_eq!(stride(2, 2800, 1220), Some(1400));
        // At another part's offset, with a gap, too short or too long for its place, and longer than the parts before it.
        for (part, offset, len) in [
            (1, 0, 1400),
            (1, 1401, 1400),
            (0, 0, 0),
            (0, 0, 4020),
            (2, 2800, 1219),
            (2, 2801, 1219),
            (2, 0, 4020),
            (2, 2000, 2020),
            (2, 4020, 0),
        ] {
            assert_eq!(stride(part, offset, len), None, "{part} {offset} {len}");
        }
        let alone = DatagramHeader { part: 0, parts: 1, offset: 0, ..HEADER };
        assert_eq!((alone.stride(4020), alone.stride(4019)), (Some(0), None));
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_parsed(mut bytes in prop::collection::vec(any::<u8>(), 0..80), magic: bool) {
            if magic && bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&MAGIC);
            }
            if let Some((header, payload)) = DatagramHeader::parse(&bytes) {
                prop_assert!(u64::from(header.offset) + payload.len() as u64 <= header.total());
            }
        }
    }
}
