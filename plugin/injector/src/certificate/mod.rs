//! The webhook's certificate: issued, shared between replicas, renewed before it expires.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | a certificate bundle and its validity |
//! | `make.rs` | issues a certificate |
//! | `resolver.rs` | the certificate that the server presents |
//! | `store.rs` | storage shared by replicas: trait and in-memory double |
//! | `kube.rs` | storage in a cluster: a Secret and the webhook configuration |
//! | `rotator.rs` | one step: read, renew if due, publish, present |
//! | `files.rs` | a certificate in files, managed for example by cert-manager |
//!
//! Each certificate has its own authority, whose key is discarded after signing: no signing key is ever
//! stored. The `caBundle` contains the current and the previous authority, so that replicas can switch one by
//! one.

mod files;
mod kube;
mod make;
mod resolver;
mod rotator;
mod store;

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

pub use self::kube::KubeStore;
pub use files::CertFiles;
pub use make::make;
pub use resolver::{CertResolver, verify};
pub use rotator::{CertRotator, RotationStep};
pub use store::{CertStore, MemoryStore, StoredCert};

/// A certificate, its key, and the authorities that clients trust, in PEM. `Debug` does not print the key.
#[derive(Clone, Eq, PartialEq)]
pub struct Bundle {
    /// The current and the previous authority.
    pub authorities: String,
    /// The certificate chain in PEM.
    pub certificate: String,
    /// The private key in PEM.
    pub key: String,
    /// Names and validity of the certificate.
    pub terms: Terms,
}

/// Names and validity of a certificate.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Terms {
    /// DNS names of the server.
    pub names: Vec<String>,
    /// Start of validity, in seconds since 1970.
    pub from: u64,
    /// End of validity, in seconds since 1970.
    pub until: u64,
}

impl Terms {
    /// Whether two thirds of the lifetime have passed, so that it must be renewed.
    #[must_use]
    pub fn is_due(&self, now: SystemTime) -> bool {
        seconds(now) >= self.from + self.until.saturating_sub(self.from) / 3 * 2
    }

    /// Whether the certificate has expired.
    #[must_use]
    pub fn is_over(&self, now: SystemTime) -> bool {
        seconds(now) >= self.until
    }
}

impl fmt::Debug for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bundle").field("terms", &self.terms).finish_non_exhaustive()
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// Returns the first certificate of a PEM text.
fn first(pem: &str) -> &str {
    const END: &str = "-----END CERTIFICATE-----";
    pem.find(END).map_or("", |at| &pem[..at + END.len()])
}
