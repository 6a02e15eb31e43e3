//! Encoding and decoding of packets.

use std::fmt;

use prost::Message;

use crate::limits::MAX_PACKET_BYTES;

/// The reason why bytes are not a packet of this protocol.
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
pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M, Malformed> {
    if bytes.len() > MAX_PACKET_BYTES {
        return Err(Malformed::TooLong);
    }
    M::decode(bytes).map_err(|_| Malformed::Garbled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::{Attach, Code, Reply, Request, Side, reply, request};

    #[test]
    fn packets_are_decoded_as_they_were_encoded() {
        let request = Request::new(1, request::Op::Attach(Attach { side: Side::Secondary.into() }));
        assert_eq!((request.version, decode(&encode(&request))), (crate::limits::VERSION, Ok(request)));
        let refused = Reply::refused(3, Code::Denied, "no such key, or this process is not admitted to it");
        assert!(matches!(refused.result, Some(reply::Result::Refused(_))));
        assert_eq!(decode(&encode(&refused)), Ok(refused));
    }

    #[test]
    fn invalid_packets_are_refused_with_the_reason() {
        let error = decode::<Request>(&[0xff; 3]).unwrap_err();
        assert_eq!(error, Malformed::Garbled);
        assert!(error.to_string().contains("not a packet"));
        assert_eq!(decode::<Request>(&[0; MAX_PACKET_BYTES + 1]), Err(Malformed::TooLong));
    }
}
