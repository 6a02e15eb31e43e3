//! Encoding and decoding of packets.

use std::fmt;

use prost::Message;

use crate::limits::MAX_PACKET_BYTES;

/// The reason why bytes are not a packet of this protocol.
///
/// ```
/// use shmesh_proto::{broker::Request, packet};
/// let error = packet::decode::<Request>(&[0xff; 3]).unwrap_err();
/// assert!(error.to_string().contains("not a packet"));
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Malformed {
    /// There are more bytes than the limit.
    TooLong,
    /// The bytes cannot be decoded.
    Garbled,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong => write!(f, "not a packet of this protocol: more than {MAX_PACKET_BYTES} bytes"),
            Self::Garbled => f.write_str("not a packet of this protocol: it cannot be decoded"),
        }
    }
}

impl std::error::Error for Malformed {}

/// Encodes a message as a packet.
#[must_use]
pub fn encode(message: &impl Message) -> Vec<u8> {
    message.encode_to_vec()
}

/// Decodes a received packet.
///
/// # Errors
/// [`Malformed`].
///
/// ```
/// use shmesh_proto::limits::MAX_PACKET_BYTES;
/// use shmesh_proto::{broker::Request, packet};
/// let long = vec![0; MAX_PACKET_BYTES + 1];
/// assert_eq!(packet::decode::<Request>(&long), Err(packet::Malformed::TooLong));
/// ```
pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M, Malformed> {
    if bytes.len() > MAX_PACKET_BYTES {
        return Err(Malformed::TooLong);
    }
    M::decode(bytes).map_err(|_| Malformed::Garbled)
}
