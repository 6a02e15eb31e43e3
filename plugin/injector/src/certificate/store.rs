//! Storage for the certificate that replicas share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, bail};

use super::Bundle;

/// The content of a store.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct StoredCert {
    /// The certificate; `None` if it is missing or unreadable.
    pub bundle: Option<Bundle>,
    /// Version for optimistic locking; `None` if nothing is stored.
    pub version: Option<String>,
}

/// Storage that replicas share.
pub trait CertStore: Send + Sync {
    /// Reads the stored certificate and its version.
    fn read(&self) -> impl Future<Output = Result<StoredCert>> + Send;

    /// Replaces the version that was read. Returns `false` if another replica was faster.
    fn write(&self, found: &StoredCert, bundle: &Bundle) -> impl Future<Output = Result<bool>> + Send;

    /// Publishes authorities to the API server. Returns `true` if they changed.
    fn publish(&self, authorities: &str) -> impl Future<Output = Result<bool>> + Send;
}

/// A store in memory, for tests.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Mutex<Inside>>);

#[derive(Debug, Default)]
struct Inside {
    bundle: Option<Bundle>,
    version: u64,
    published: String,
    fails: bool,
}

impl MemoryStore {
    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answering(&self) -> Result<MutexGuard<'_, Inside>> {
        let inside = self.inside();
        if inside.fails {
            bail!("the API server is unavailable");
        }
        Ok(inside)
    }

    /// Makes all further requests fail, or succeed again.
    pub fn fail(&self, fails: bool) {
        self.inside().fails = fails;
    }

    /// Returns the authorities published last.
    #[must_use]
    pub fn published(&self) -> String {
        self.inside().published.clone()
    }

    /// Overwrites the bundle, as another writer would.
    pub fn spoil(&self, bundle: Option<Bundle>) {
        let mut inside = self.inside();
        inside.bundle = bundle;
        inside.version += 1;
    }
}

impl CertStore for MemoryStore {
    async fn read(&self) -> Result<StoredCert> {
        let inside = self.answering()?;
        let version = (inside.version > 0).then(|| inside.version.to_string());
        Ok(StoredCert { bundle: inside.bundle.clone(), version })
    }

    async fn write(&self, found: &StoredCert, bundle: &Bundle) -> Result<bool> {
        let mut inside = self.answering()?;
        let version = (inside.version > 0).then(|| inside.version.to_string());
        if version != found.version {
            return Ok(false);
        }
        inside.version += 1;
        inside.bundle = Some(bundle.clone());
        Ok(true)
    }

    async fn publish(&self, authorities: &str) -> Result<bool> {
        let mut inside = self.answering()?;
        let is_new = inside.published != authorities;
        authorities.clone_into(&mut inside.published);
        Ok(is_new)
    }
}
