//! Device keys: 65 bytes, 64 characters and a zero.

use std::fmt;

/// Bytes of a key.
pub const KEY_BYTES: usize = 65;

/// Identifies exported device memory. A process that has the key must still be admitted; even so, keys are never logged.
#[derive(Clone, Copy)]
pub struct DeviceKey([u8; KEY_BYTES]);

impl DeviceKey {
    /// Creates a key of 256 random bits.
    #[must_use]
    pub fn from_entropy(entropy: [u8; 32]) -> Self {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut bytes = [0; KEY_BYTES];
        for (pair, byte) in bytes.chunks_exact_mut(2).zip(entropy) {
            pair[0] = DIGITS[usize::from(byte >> 4)];
            pair[1] = DIGITS[usize::from(byte & 15)];
        }
        Self(bytes)
    }

    /// Checks untrusted bytes: the length, 64 printable characters, and the zero at the end.
    #[must_use]
    pub fn from_wild(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; KEY_BYTES] = bytes.try_into().ok()?;
        let (last, rest) = bytes.split_last()?;
        (*last == 0 && rest.iter().all(u8::is_ascii_graphic)).then_some(Self(bytes))
    }

    /// The bytes of the key.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

/// Compares in constant time, so that the duration does not reveal where two keys differ.
impl PartialEq for DeviceKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

impl Eq for DeviceKey {}

impl fmt::Debug for DeviceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_is_read_back_and_not_printed() {
        let key = DeviceKey::from_entropy([7; 32]);
        assert_eq!(DeviceKey::from_wild(key.as_bytes()), Some(key));
        assert_eq!(format!("{key:?}"), "DeviceKey(..)");
    }
}
