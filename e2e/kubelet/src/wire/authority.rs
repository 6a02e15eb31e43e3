//! The `:authority` that Go derives from a path.
//!
//! grpc-go sends the percent-encoded path of a socket as `:authority` by default. Rust's `http` treats a `%`
//! there as an error: a Rust server answers `PROTOCOL_ERROR`, and a Rust client cannot send it. So the request is made with a
//! placeholder of the same length, and the bytes are replaced before they reach the socket.

use std::path::Path;

/// The name of the server in the requests of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Authority(String);

/// A character whose Huffman code has 5 bits, `00011`.
const FILL: char = 'a';

impl Authority {
    /// The name that the kubelet's code sets.
    pub(crate) fn localhost() -> Self {
        Self("localhost".to_owned())
    }

    /// The name that grpc-go derives from a path.
    pub(crate) fn of_path(path: &Path) -> Self {
        let mut name = String::new();
        for byte in path.as_os_str().as_encoded_bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => name.push(char::from(*byte)),
                other if b"-_.~!$&'()*+,;=:[]@".contains(other) => name.push(char::from(*other)),
                other => name.push_str(&format!("%{other:02X}")),
            }
        }
        Self(name)
    }

    /// A name that `http` accepts and that is as long as the authority, so that sizes in both tables of HPACK agree.
    pub(crate) fn placeholder(&self) -> http::uri::Authority {
        let fill: String = std::iter::repeat_n(FILL, self.0.len()).collect();
        fill.parse().expect("letters are an authority")
    }

    /// The same header block with the authority in place of the placeholder.
    pub(crate) fn replace(&self, block: &[u8]) -> Option<Vec<u8>> {
        let placeholder = self.encoded_placeholder();
        let at = block.windows(placeholder.len()).position(|window| window == placeholder)?;
        let mut replaced = block[..at].to_vec();
        replaced.extend(length(self.0.len(), 0));
        replaced.extend(self.0.bytes());
        replaced.extend(&block[at + placeholder.len()..]);
        Some(replaced)
    }

    fn encoded_placeholder(&self) -> Vec<u8> {
        let mut bits: Vec<bool> = (0..self.0.len()).flat_map(|_| [false, false, false, true, true]).collect();
        bits.resize(bits.len().div_ceil(8) * 8, true);
        let coded = bits.chunks(8).map(|byte| byte.iter().fold(0, |sum, bit| sum << 1 | u8::from(*bit)));
        let mut encoded = length(bits.len() / 8, 0x80);
        encoded.extend(coded);
        encoded
    }
}

/// HPACK's integer with 7 bits in the first byte.
fn length(length: usize, flag: u8) -> Vec<u8> {
    let byte = |value: usize| u8::try_from(value).expect("less than 128");
    if length < 0x7f {
        return vec![flag | byte(length)];
    }
    let mut bytes = vec![flag | 0x7f];
    let mut rest = length - 0x7f;
    while rest >= 0x80 {
        bytes.push(0x80 | byte(rest & 0x7f));
        rest >>= 7;
    }
    bytes.push(byte(rest));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_is_encoded_like_go() {
        let path = Path::new("/var/lib/kubelet/plugins_registry/shm.example.com@reg.sock");
        let Authority(name) = Authority::of_path(path);
        assert_eq!(name, "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fshm.example.com@reg.sock");
    }

    #[test]
    fn placeholder_is_replaced() {
        let authority = Authority("x%y".to_owned());
        assert_eq!(authority.placeholder().as_str(), "aaa");
        // 00011 00011 00011 and one bit of padding.
        let block = [0x83, 0x41, 0x82, 0b0001_1000, 0b1100_0111, 0x87];
        let replaced = authority.replace(&block).expect("found");
        assert_eq!(replaced, [0x83, 0x41, 0x03, b'x', b'%', b'y', 0x87]);
        assert_eq!(authority.replace(&[0x83]), None);
        assert_eq!(length(300, 0), [0x7f, 0xad, 0x01]);
    }
}
