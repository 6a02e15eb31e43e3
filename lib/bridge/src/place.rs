//! Where the ends of a link are: on a cluster, a bridge learns at run time whether the link is in its own IPC directory.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Longest part of a node's name that a place has, so that the place can be the name of a far node.
const MAX_NODE_BYTES: usize = 54;

/// The name of an IPC directory: the node's, and a number for the directory. All containers that have the directory get the same
/// name, wherever they have it mounted.
///
/// # Errors
/// There is no such directory.
pub fn place_of(node: &str, dir: &Path) -> io::Result<String> {
    let directory = std::fs::metadata(dir)?;
    // FNV-1a, which is the same in each version of this program.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let numbers = [directory.dev().to_le_bytes(), directory.ino().to_le_bytes()];
    for byte in node.bytes().chain(numbers.into_iter().flatten()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    let shown: String = node.chars().filter(char::is_ascii).take(MAX_NODE_BYTES).collect();
    Ok(format!("{shown}.{:08x}", (hash >> 32) ^ (hash & 0xffff_ffff)))
}

/// Where the link is, seen from a bridge that may have to make a replica.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Distance {
    /// No bridge that has the link is connected.
    Unknown,
    /// In this bridge's own IPC directory.
    Near,
    /// In the IPC directory of another bridge.
    Far,
}

/// The places of the bridges that have a link and are connected.
#[derive(Debug, Default)]
pub(crate) struct Places {
    known: Mutex<KnownNames>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct KnownNames {
    names: HashSet<String>,
    /// There is a change for which nothing has waited yet.
    is_changed: bool,
}

impl Places {
    /// A bridge at this place has come, or gone. One name stands for one bridge: `<place>/<number>`.
    pub(crate) fn set(&self, name: &str, is_there: bool) {
        let mut known = self.known();
        if is_there {
            known.names.insert(name.to_owned());
        } else {
            known.names.remove(name);
        }
        drop(known);
        self.wake();
    }

    pub(crate) fn distance(&self, own: &str) -> Distance {
        let known = self.known();
        if known.names.iter().any(|name| name.split('/').next() == Some(own)) {
            Distance::Near
        } else if known.names.is_empty() {
            Distance::Unknown
        } else {
            Distance::Far
        }
    }

    /// The places at which the link is. A link has one primary, and so one place.
    pub(crate) fn all(&self) -> BTreeSet<String> {
        let place = |name: &String| name.split('/').next().unwrap_or_default().to_owned();
        self.known().names.iter().map(place).collect()
    }

    pub(crate) fn wake(&self) {
        self.known().is_changed = true;
        self.changed.notify_all();
    }

    /// Waits for a change since it waited last.
    pub(crate) fn wait(&self, limit: Duration) {
        let waited = self.changed.wait_timeout_while(self.known(), limit, |known| !known.is_changed);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_changed = false;
    }

    fn known(&self) -> MutexGuard<'_, KnownNames> {
        // Each change is one call on the set, or one store.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_is_that_of_the_directory() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let place = |node: &str, dir: &Path| place_of(node, dir).unwrap();
        let link = two.path().join("same");
        std::os::unix::fs::symlink(one.path(), &link).unwrap();
        assert_eq!(place("n", one.path()), place("n", &link), "another path of it");
        assert_ne!(place("n", one.path()), place("n", two.path()));
        assert_ne!(place("n", one.path()), place("m", one.path()));
        let (long, longer) = ("a".repeat(250), "a".repeat(251));
        assert_eq!(place(&long, one.path()).len(), 63);
        assert_ne!(place(&long, one.path()), place(&longer, one.path()));
        assert!(place_of("n", &one.path().join("none")).is_err());
    }

    #[test]
    fn link_is_near_while_one_bridge_of_it_is() {
        let places = Places::default();
        assert_eq!(places.distance("a.1"), Distance::Unknown);
        places.set("b.1/7", true);
        assert_eq!(places.distance("a.1"), Distance::Far);
        places.set("a.1/8", true);
        places.set("a.1/9", true);
        places.set("a.1/8", false);
        assert_eq!(places.distance("a.1"), Distance::Near);
        places.set("a.1/9", false);
        assert_eq!(places.distance("a.1"), Distance::Far);
        places.set("b.1/6", true);
        assert_eq!(places.all(), BTreeSet::from(["b.1".to_owned()]), "two bridges of one place");
        places.set("b.1/6", false);
        places.set("b.1/7", false);
        assert_eq!(places.distance("a.1"), Distance::Unknown);
    }

    #[test]
    fn change_before_the_wait_is_not_missed() {
        let places = Places::default();
        places.set("b.1/7", true);
        let begun = std::time::Instant::now();
        places.wait(Duration::from_secs(60));
        assert!(begun.elapsed() < Duration::from_secs(50));
        places.wait(Duration::from_millis(1));
    }
}
