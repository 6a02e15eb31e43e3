//! Garbage collection of links and marked files that no process has, in a pool that pods use.
//!
//! Each participant of a link, each sidecar that keeps it and each process that creates or removes it has a lock in the link's
//! lock file, which the kernel releases when the process ends, whatever its pid namespace. A link without any lock for the grace
//! period belongs to dead pods. Only the locks are read: pods can truncate files that would be mapped.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::path::Path;
use std::time::{Duration, Instant};

use shmesh::config::LinkName;
use shmesh::inspect::{FileRemoval, Remains, StaleFile, remove_stale, stale_files, unused_names};

use super::SweepReport;

/// Maximum number of links that are removed in one round, so that a pool with many does not delay the others.
const MAX_REMOVED: usize = 64;
/// Maximum number of links that are observed in one pool. Further ones wait until some of these are removed.
const MAX_LINKS: usize = 16 * 1024;

/// The unused links and stale files of a pool, and since when each was seen to be unused.
#[derive(Debug, Default)]
pub(crate) struct UnusedLinks {
    links: HashMap<LinkName, Instant>,
    files: HashMap<StaleFile, Instant>,
}

impl UnusedLinks {
    /// Removes the links and files that no process has had in any round for the grace period.
    pub(crate) fn collect(&mut self, directory: &Path, now: Instant, grace: Duration) -> SweepReport {
        let mut report = SweepReport::default();
        if let Ok(unused) = unused_names(directory, MAX_LINKS) {
            each_due(&mut self.links, unused, now, grace, |name| remove(directory, name, &mut report));
        }
        if let Ok(stale) = stale_files(directory, MAX_LINKS) {
            each_due(&mut self.files, stale, now, grace, |file| match remove_stale(directory, &file.name) {
                Ok(FileRemoval::Removed(bytes)) => {
                    report.files += 1;
                    report.bytes += bytes;
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(name = ?file.name, %error, "cannot be removed");
                    report.failures += 1;
                }
            });
        }
        report
    }
}

/// Calls `remove` for those that were unused in all rounds for the grace period.
fn each_due<T: Eq + Hash>(
    known: &mut HashMap<T, Instant>,
    unused: HashSet<T>,
    now: Instant,
    grace: Duration,
    mut remove: impl FnMut(&T),
) {
    known.retain(|name, _| unused.contains(name));
    for name in unused {
        known.entry(name).or_insert(now);
    }
    let due = known.iter_mut().filter(|(_, since)| now.saturating_duration_since(**since) >= grace);
    for (name, since) in due.take(MAX_REMOVED) {
        remove(name);
        // One that could not be removed lets the others go first.
        *since = now;
    }
}

fn remove(directory: &Path, name: &LinkName, report: &mut SweepReport) {
    let remains = match Remains::unused(directory, name) {
        // A process uses the link again; or a file has the name of one of the link's, but belongs to another program.
        Ok(None) => return,
        Ok(Some(remains)) if !remains.foreign.is_empty() => return,
        Ok(Some(remains)) => remains,
        Err(error) => return failed(name, &error, report),
    };
    let files = remains.files.len() as u64;
    match remains.remove() {
        Ok(bytes) => {
            report.files += files;
            report.bytes += bytes;
        }
        Err(error) => failed(name, &error, report),
    }
}

fn failed(name: &LinkName, error: &shmesh::Error, report: &mut SweepReport) {
    tracing::debug!(%name, %error, "cannot be removed");
    report.failures += 1;
}

#[cfg(test)]
mod tests {
    use shmesh::{LinkOptions, Side};

    use super::*;

    const GRACE: Duration = Duration::from_secs(60);

    /// A link whose last participant has left a message.
    fn leave(dir: &Path, name: &str) {
        let config = shmesh_testing::config(name, "");
        let link = LinkOptions::new().dir(dir).create(&config).unwrap();
        link.send_inline(1, 0, b"").unwrap();
    }

    #[test]
    fn link_without_locks_is_removed_after_the_grace_period() {
        let dir = shmesh_testing::ipc_dir();
        leave(dir.path(), "dead");
        leave(dir.path(), "used");
        let used = LinkOptions::new().dir(dir.path()).attach("used", Side::Secondary).unwrap();
        let (mut links, start) = (UnusedLinks::default(), Instant::now());
        for after in [Duration::ZERO, GRACE / 2, GRACE - Duration::from_millis(1)] {
            assert_eq!(links.collect(dir.path(), start + after, GRACE), SweepReport::default());
        }
        let report = links.collect(dir.path(), start + GRACE, GRACE);
        assert!(report.files >= 2 && report.bytes > 0 && report.failures == 0, "{report:?}");
        let left: Vec<_> =
            shmesh::inspect::names(dir.path()).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(left, ["used"]);
        assert!(!dir.path().join("dead.lock").exists());
        drop(used);
    }

    #[test]
    fn link_that_is_used_in_between_starts_again() {
        let dir = shmesh_testing::ipc_dir();
        leave(dir.path(), "link");
        let (mut links, start) = (UnusedLinks::default(), Instant::now());
        links.collect(dir.path(), start, GRACE);
        let link = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
        links.collect(dir.path(), start + GRACE, GRACE);
        drop(link);
        assert_eq!(links.collect(dir.path(), start + GRACE * 2, GRACE), SweepReport::default());
        assert!(links.collect(dir.path(), start + GRACE * 3, GRACE).files > 0);
    }

    #[test]
    fn stale_file_of_another_program_is_removed_after_the_grace_period() {
        let dir = shmesh_testing::ipc_dir();
        let create = |name: &str| shmesh_sys::lease::create(&dir.path().join(name), 0o660, 4096).unwrap();
        drop(create("stale"));
        let leased = create("leased");
        let (mut links, start) = (UnusedLinks::default(), Instant::now());
        assert_eq!(links.collect(dir.path(), start, GRACE), SweepReport::default());
        // A process that another test starts has copies of this one's descriptors for a moment; the grace period begins after it.
        let mut rounds = 1..;
        let mut removed = SweepReport::default();
        shmesh_testing::until("the stale file is removed", || {
            removed = links.collect(dir.path(), start + GRACE * rounds.next().unwrap(), GRACE);
            removed.files > 0
        });
        assert_eq!(removed, SweepReport { files: 1, bytes: 4096, failures: 0 });
        assert_eq!(shmesh_testing::files(dir.path()), ["leased"]);
        drop(leased);
    }

    /// A name that is used again and again by processes that end soon, so that each round sees a stale file of it.
    #[test]
    fn new_file_with_the_name_of_a_stale_one_has_its_own_grace_period() {
        let dir = shmesh_testing::ipc_dir();
        let path = dir.path().join("name");
        let is_stale = || stale_files(dir.path(), 10).unwrap().len() == 1;
        let (mut links, start) = (UnusedLinks::default(), Instant::now());
        for round in 0..3 {
            drop(shmesh_sys::lease::create(&path, 0o660, 4096).unwrap());
            shmesh_testing::until("the file is stale", is_stale);
            assert_eq!(links.collect(dir.path(), start + GRACE * round, GRACE), SweepReport::default());
            std::fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn files_of_other_programs_are_left_alone() {
        let dir = shmesh_testing::ipc_dir();
        let file = |name: &str| dir.path().join(name);
        std::fs::write(file("app_shm"), "a program's").unwrap();
        std::fs::write(file("app.lock"), "").unwrap();
        leave(dir.path(), "mixed");
        std::fs::write(file("mixed_cpu_msg"), "a program's").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", file("passwd_shm")).unwrap();
        let (mut links, start) = (UnusedLinks::default(), Instant::now());
        for after in [Duration::ZERO, GRACE, GRACE * 2] {
            links.collect(dir.path(), start + after, GRACE);
        }
        for name in ["app_shm", "app.lock", "mixed_shm", "mixed_cpu_msg", "passwd_shm"] {
            assert!(file(name).symlink_metadata().is_ok(), "{name}");
        }
    }
}
