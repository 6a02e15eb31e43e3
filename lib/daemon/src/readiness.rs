//! Ready when all latches are open.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a daemon waits for before it says that it is ready.
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

/// One thing that a daemon waits for. Dropped without being opened, it stays closed.
///
/// ```
/// use shmesh_daemon::readiness::Readiness;
/// let readiness = Readiness::default();
/// drop(readiness.latch("broker"));
/// assert!(!readiness.is_ready(), "what failed is not ready");
/// ```
#[derive(Debug)]
pub struct Latch {
    closed: Arc<Mutex<Names>>,
    name: &'static str,
}

type Names = BTreeSet<&'static str>;

fn locked(set: &Mutex<Names>) -> MutexGuard<'_, Names> {
    // Inserting and removing names leaves nothing half done.
    set.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Readiness {
    /// One more thing to wait for.
    ///
    /// ```
    /// use shmesh_daemon::readiness::Readiness;
    /// let readiness = Readiness::default();
    /// let (a, b) = (readiness.latch("a"), readiness.latch("b"));
    /// a.open();
    /// assert_eq!(readiness.missing(), ["b"]);
    /// # drop(b);
    /// ```
    #[must_use]
    pub fn latch(&self, name: &'static str) -> Latch {
        locked(&self.closed).insert(name);
        Latch { closed: Arc::clone(&self.closed), name }
    }

    /// What is missing, in the order of the alphabet.
    ///
    /// ```
    /// assert!(shmesh_daemon::readiness::Readiness::default().missing().is_empty());
    /// ```
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        locked(&self.closed).iter().copied().collect()
    }

    /// Whether nothing is missing.
    ///
    /// ```
    /// assert!(shmesh_daemon::readiness::Readiness::default().is_ready());
    /// ```
    #[must_use]
    pub fn is_ready(&self) -> bool {
        locked(&self.closed).is_empty()
    }
}

impl Latch {
    /// It is there.
    ///
    /// ```
    /// let readiness = shmesh_daemon::readiness::Readiness::default();
    /// readiness.latch("identity").open();
    /// assert!(readiness.is_ready());
    /// ```
    pub fn open(self) {
        locked(&self.closed).remove(self.name);
    }
}
