//! Garbage collection of links that no process has, in a pool that pods use.
//!
//! Each participant of a link, each sidecar that keeps it and each process that creates or removes it has a lock in the link's
//! lock file, which the kernel releases when the process ends, whatever its pid namespace. A link without any lock for the grace
//! period belongs to dead pods. Only the locks are read: pods can truncate files that would be mapped.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use shmesh::config::LinkName;
use shmesh::inspect::{Remains, unused_names};

use super::SweepReport;

/// Links for whose removal the directory is read in one round, so that a pool with many does not delay the others.
const MAX_REMOVED: usize = 64;
/// Links that are observed in one pool. Further ones wait until some of these are removed.
const MAX_LINKS: usize = 16 * 1024;

/// The unused links of a pool, and since when each was seen to be unused.
#[derive(Debug, Default)]
pub(crate) struct UnusedLinks(HashMap<LinkName, Instant>);

impl UnusedLinks {
    /// Removes the links that no process has had in any round for the grace period.
    pub(crate) fn collect(&mut self, directory: &Path, now: Instant, grace: Duration) -> SweepReport {
        let mut report = SweepReport::default();
        let Ok(unused) = unused_names(directory, MAX_LINKS) else { return report };
        self.0.retain(|name, _| unused.contains(name));
        for name in unused {
            self.0.entry(name).or_insert(now);
        }
        let due = self.0.iter_mut().filter(|(_, since)| now.saturating_duration_since(**since) >= grace);
        for (name, since) in due.take(MAX_REMOVED) {
            remove(directory, name, &mut report);
            // One that could not be removed lets the others go first.
            *since = now;
        }
        report
    }
}

fn remove(directory: &Path, name: &LinkName, report: &mut SweepReport) {
    let remains = match Remains::unused(directory, name) {
        // A process has it again; or a file has the name of one of the link's, but is another program's.
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
