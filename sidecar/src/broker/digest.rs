//! Hashes of keys and grants: what tables are sorted by and what the audit log has.

use std::fmt::Write;

use sha2::{Digest as _, Sha256};
use shmesh_proto::key::DeviceKey;

use super::ProcessId;

/// Bytes of the secret behind a key.
pub(super) const SECRET_BYTES: usize = 32;

/// SHA-256 of a secret. Looking one up compares hashes, so how long it takes says nothing of the secret; no caller can
/// choose secrets so that their hashes share a long beginning with that of one they do not know.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Digest([u8; 32]);

impl Digest {
    pub(super) fn of(secret: &[u8]) -> Self {
        Self(Sha256::digest(secret).into())
    }

    /// Its first bytes, as `List` and the audit log have them.
    pub(super) fn short(&self) -> String {
        let mut text = String::with_capacity(16);
        for byte in &self.0[..8] {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    }
}

/// The key that a secret makes, for one process: a process that shows the secret is its exporter, also to a broker that has never
/// seen the key.
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
    fn a_digest_is_sha_256() {
        assert_eq!(Digest::of(b"abc").short(), "ba7816bf8f01cfea");
    }
}
