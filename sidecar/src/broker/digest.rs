//! Hashes of keys and grants, for tables and for the audit log.

use std::fmt::Write;

use sha2::{Digest as _, Sha256};
use shmesh_proto::key::DeviceKey;

use super::ProcessId;

/// Bytes of the secret behind a key.
pub(super) const SECRET_BYTES: usize = 32;

/// SHA-256 of a secret. Lookups compare hashes, so their duration reveals nothing about the secret; no caller can
/// choose secrets whose hashes share a long prefix with the hash of an unknown secret.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Digest([u8; 32]);

impl Digest {
    pub(super) fn of(secret: &[u8]) -> Self {
        Self(Sha256::digest(secret).into())
    }

    /// Its first bytes in hexadecimal, as in `List` and the audit log.
    pub(super) fn short(&self) -> String {
        let mut text = String::with_capacity(16);
        for byte in &self.0[..8] {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    }
}

/// Derives a key from a secret and a process: a process that shows the secret is its exporter, even to a broker that
/// has never seen the key.
pub(super) fn key_of(secret: &[u8; SECRET_BYTES], exporter: &ProcessId) -> DeviceKey {
    let hash = Sha256::new()
        .chain_update(secret)
        .chain_update(exporter.bare_tgid.to_le_bytes())
        .chain_update(exporter.start_time.to_le_bytes());
    DeviceKey::from_entropy(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_is_sha_256() {
        assert_eq!(Digest::of(b"abc").short(), "ba7816bf8f01cfea");
    }
}
