//! Writing a pcapng file: one section, one interface, one packet for each message.
//!
//! A packet begins with a header of 32 bytes, little-endian; `wireshark/shmesh.lua` reads it.
//!
//! | at | |
//! |---|---|
//! | 0 | version of this header: 1 |
//! | 1 | sender: 0 primary, 1 secondary |
//! | 2 | bit 0: an inline message; bit 1: its DATA part was overwritten before it could be copied |
//! | 3 | pool of the DATA part, 0: none |
//! | 4, 8 | msg_id, cell_id |
//! | 12, 16 | sent bytes of MSG and of DATA |
//! | 20 | recorded bytes of MSG, which follow; the bytes of DATA come after them |
//! | 24 | position of the message in its direction, 64 bits |

use std::borrow::Cow;
use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pcap_parser::{
    EnhancedPacketBlock, InterfaceDescriptionBlock, InterfaceStatisticsBlock, Linktype, OptionCode,
    PcapNGOption, SectionHeaderBlock, ToVec,
};
use shmesh::Side;
use shmesh::inspect::{LostCounts, TappedMessage};

/// LINKTYPE_USER0, which Wireshark reserves for private dissectors.
pub(super) const LINK_TYPE: i32 = 147;
const HEADER_BYTES: usize = 32;
/// Maximum length of a packet in Wireshark; it refuses the rest of a file with a longer one.
const PACKET_MAX_BYTES: usize = 262_144;
const FORM: u8 = 1;
/// Options of an interface: its name and description.
const IF_NAME: u16 = 2;
/// Option of a packet: 1 inbound, 2 outbound, as seen by the primary.
const EPB_FLAGS: u16 = 2;
/// Options of the statistics: number of recorded and of lost packets.
const ISB_IFRECV: u16 = 4;
const ISB_IFDROP: u16 = 5;
/// Resolution of times: nanoseconds (10^-9).
const NANOSECONDS: u8 = 9;

/// Writes messages as a pcapng file.
pub(super) struct PcapngWriter<W> {
    out: W,
    packet: Vec<u8>,
    /// Whether no bytes of the parts are recorded.
    bare: bool,
}

impl<W: Write> PcapngWriter<W> {
    /// Begins a file about a link. `bare` leaves out the bytes of its messages.
    pub(super) fn new(mut out: W, link: &str, bare: bool) -> io::Result<Self> {
        let mut section = SectionHeaderBlock {
            block_type: 0,
            block_len1: 0,
            bom: 0,
            major_version: 1,
            minor_version: 0,
            section_len: -1,
            options: vec![option(
                OptionCode::ShbUserAppl.0,
                concat!("shmesh ", env!("CARGO_PKG_VERSION")).into(),
            )],
            block_len2: 0,
        };
        out.write_all(&bytes(section.to_vec())?)?;
        let mut interface = InterfaceDescriptionBlock {
            block_type: 0,
            block_len1: 0,
            linktype: Linktype(LINK_TYPE),
            reserved: 0,
            snaplen: 0,
            options: vec![option(IF_NAME, link.as_bytes().to_vec())],
            block_len2: 0,
            if_tsresol: NANOSECONDS,
            if_tsoffset: 0,
        };
        out.write_all(&bytes(interface.to_vec())?)?;
        Ok(Self { out, packet: Vec::new(), bare })
    }

    /// Writes one message as a packet.
    pub(super) fn message(&mut self, seen: &TappedMessage<'_>) -> io::Result<()> {
        let secondary = seen.from == Side::Secondary;
        let no_data = seen.data_len > 0 && seen.data.is_empty() && !self.bare;
        let msg = &seen.msg[..seen.msg.len().min(PACKET_MAX_BYTES - HEADER_BYTES)];
        let data = &seen.data[..seen.data.len().min(PACKET_MAX_BYTES - HEADER_BYTES - msg.len())];
        let packet = &mut self.packet;
        packet.clear();
        packet.extend([
            FORM,
            u8::from(secondary),
            u8::from(seen.inline) | u8::from(no_data) << 1,
            seen.data_pool.map_or(0, |pool| pool as u8),
        ]);
        let msg_here = u32::try_from(msg.len()).unwrap_or(u32::MAX);
        for word in
            [seen.msg_id.cast_unsigned(), seen.cell_id.cast_unsigned(), seen.msg_len, seen.data_len, msg_here]
        {
            packet.extend(word.to_le_bytes());
        }
        packet.extend(seen.position.to_le_bytes());
        debug_assert_eq!(packet.len(), HEADER_BYTES);
        packet.extend_from_slice(msg);
        packet.extend_from_slice(data);
        let (ts_high, ts_low) = stamp(seen.at);
        let length = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        let whole = HEADER_BYTES as u64 + u64::from(seen.msg_len) + u64::from(seen.data_len);
        let flags: u32 = if secondary { 1 } else { 2 };
        let mut block = EnhancedPacketBlock {
            block_type: 0,
            block_len1: 0,
            if_id: 0,
            ts_high,
            ts_low,
            caplen: length(packet.len() as u64),
            origlen: length(whole),
            data: packet,
            options: vec![option(EPB_FLAGS, flags.to_le_bytes().to_vec())],
            block_len2: 0,
        };
        self.out.write_all(&bytes(block.to_vec())?)
    }

    /// Passes written bytes to the system, so that a reader sees them and an abrupt end loses nothing.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Ends the file with the numbers of recorded and lost messages.
    pub(super) fn finish(mut self, seen: u64, lost: LostCounts) -> io::Result<()> {
        let (ts_high, ts_low) = stamp(SystemTime::now());
        let dropped = lost.overwritten.saturating_add(lost.reused).saturating_add(lost.damaged);
        let mut statistics = InterfaceStatisticsBlock {
            block_type: 0,
            block_len1: 0,
            if_id: 0,
            ts_high,
            ts_low,
            options: vec![
                option(ISB_IFRECV, seen.saturating_add(dropped).to_le_bytes().to_vec()),
                option(ISB_IFDROP, dropped.to_le_bytes().to_vec()),
            ],
            block_len2: 0,
        };
        self.out.write_all(&bytes(statistics.to_vec())?)?;
        self.out.flush()
    }
}

fn option(code: u16, value: Vec<u8>) -> PcapNGOption<'static> {
    let len = u16::try_from(value.len()).unwrap_or(u16::MAX);
    PcapNGOption { code: OptionCode(code), len, value: Cow::Owned(value) }
}

fn bytes<E: std::fmt::Debug>(made: Result<Vec<u8>, E>) -> io::Result<Vec<u8>> {
    made.map_err(|error| io::Error::other(format!("{error:?}")))
}

fn stamp(at: SystemTime) -> (u32, u32) {
    let since: Duration = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let nanos = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    let halves = ((nanos >> 32) as u32, nanos as u32);
    halves
}
