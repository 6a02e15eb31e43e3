//! The webhook's certificate: made, kept, replaced in time.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | a certificate with its authorities, and when it is to be replaced |
//! | `make.rs` | a new one |
//! | `served.rs` | what the server presents, changed while it runs |
//! | `store.rs` | where replicas keep it together: a trait, and a double for tests |
//! | `kube.rs` | that place in a cluster: a Secret, and the webhook's configuration |
//! | `rotator.rs` | one step: read, replace what is due, publish, present |
//! | `files.rs` | a certificate that somebody else keeps in files, cert-manager for example |
//!
//! Each certificate has an authority of its own, whose key is forgotten once it has signed: nothing that could sign is ever
//! stored. The API server is told of the new authority and of the one before, so that replicas may change over one by one.

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
pub use resolver::CertResolver;
pub use rotator::{CertRotator, RotationStep};
pub use store::{MemoryStore, Store, StoredCert};

/// A certificate, its key, and the authorities that clients are told of. Texts are PEM.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use shmesh_injector::certificate::make;
/// let names = ["injector.shmesh.svc".to_owned()];
/// let bundle = make(&names, Duration::from_secs(86_400), SystemTime::now(), None)?;
/// assert!(!format!("{bundle:?}").contains("PRIVATE KEY"), "not even by mistake");
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Clone, Eq, PartialEq)]
pub struct Bundle {
    /// The authority that signed it, and the one before.
    pub authorities: String,
    /// The certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
    /// What the certificate says, for those who do not read certificates.
    pub terms: Terms,
}

/// For whom and how long a certificate is.
///
/// ```
/// use std::time::{Duration, SystemTime, UNIX_EPOCH};
/// use shmesh_injector::certificate::Terms;
/// let terms = Terms { names: vec!["a".into()], from: 0, until: 90 };
/// let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
/// assert!(!terms.is_due(at(59)) && terms.is_due(at(60)), "after two thirds");
/// assert!(!terms.is_over(at(89)) && terms.is_over(at(90)));
/// ```
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Terms {
    /// The server's names.
    pub names: Vec<String>,
    /// Since when, in seconds after 1970.
    pub from: u64,
    /// Until when.
    pub until: u64,
}

impl Terms {
    /// Whether it is time for another one.
    #[must_use]
    pub fn is_due(&self, now: SystemTime) -> bool {
        seconds(now) >= self.from + self.until.saturating_sub(self.from) / 3 * 2
    }

    /// Whether nobody accepts it any more.
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

/// The first certificate of a PEM text.
fn first(pem: &str) -> &str {
    const END: &str = "-----END CERTIFICATE-----";
    pem.find(END).map_or("", |at| &pem[..at + END.len()])
}
