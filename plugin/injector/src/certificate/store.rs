//! Where replicas keep their certificate together.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, bail};

use super::Bundle;

/// What a store has.
///
/// ```
/// assert_eq!(shmesh_injector::certificate::StoredCert::default().bundle, None);
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct StoredCert {
    /// The certificate; `None` when there is none, or none that can be read.
    pub bundle: Option<Bundle>,
    /// Which writing it was; `None` when there is nothing to write over.
    pub version: Option<String>,
}

/// A place that replicas share.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> anyhow::Result<()> {
/// use shmesh_injector::certificate::{MemoryStore, Store};
/// assert_eq!(MemoryStore::default().read().await?.version, None);
/// # Ok(())
/// # }
/// ```
pub trait Store: Send + Sync {
    /// What is there.
    fn read(&self) -> impl Future<Output = Result<StoredCert>> + Send;

    /// Writes over what was found. `false`: somebody else was faster.
    fn write(&self, found: &StoredCert, bundle: &Bundle) -> impl Future<Output = Result<bool>> + Send;

    /// Tells the API server of these authorities, if it knows others. `true`: it did.
    fn publish(&self, authorities: &str) -> impl Future<Output = Result<bool>> + Send;
}

/// A store in memory, for tests.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> anyhow::Result<()> {
/// use shmesh_injector::certificate::{MemoryStore, Store};
/// let store = MemoryStore::default();
/// assert!(store.publish("PEM").await? && !store.publish("PEM").await?);
/// assert_eq!(store.published(), "PEM");
/// store.fail(true);
/// assert!(store.read().await.is_err());
/// # Ok(())
/// # }
/// ```
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
            bail!("the API server does not answer");
        }
        Ok(inside)
    }

    /// Whether everything fails from now on.
    pub fn fail(&self, fails: bool) {
        self.inside().fails = fails;
    }

    /// What the API server was told.
    #[must_use]
    pub fn published(&self) -> String {
        self.inside().published.clone()
    }

    /// Somebody else writes.
    pub fn spoil(&self, bundle: Option<Bundle>) {
        let mut inside = self.inside();
        inside.bundle = bundle;
        inside.version += 1;
    }
}

impl Store for MemoryStore {
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
