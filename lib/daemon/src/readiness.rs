//! Readiness of a daemon: ready when all latches are open.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The set of conditions that a daemon waits for before it is ready.
///
/// ```
/// use shmesh_daemon::readiness::Readiness;
/// let readiness = Readiness::default();
/// let links = readiness.latch("links");
/// assert_eq!(readiness.missing(), ["links"]);
/// links.open();
/// assert!(readiness.is_ready());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    closed: Arc<Mutex<Names>>,
}

/// A condition for readiness. If dropped without being opened, the daemon stays unready.
#[derive(Debug)]
pub struct Latch {
    closed: Arc<Mutex<Names>>,
    name: &'static str,
}

type Names = BTreeSet<&'static str>;

fn locked(set: &Mutex<Names>) -> MutexGuard<'_, Names> {
    // An interrupted insertion or removal leaves the set consistent.
    set.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Readiness {
    /// Adds a condition to wait for.
    #[must_use]
    pub fn latch(&self, name: &'static str) -> Latch {
        locked(&self.closed).insert(name);
        Latch { closed: Arc::clone(&self.closed), name }
    }

    /// Returns the names of closed latches in alphabetical order.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        locked(&self.closed).iter().copied().collect()
    }

    /// Whether all latches are open.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        locked(&self.closed).is_empty()
    }
}

impl Latch {
    /// Marks the condition as fulfilled.
    pub fn open(self) {
        locked(&self.closed).remove(self.name);
    }
}
