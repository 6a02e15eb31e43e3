//! Free memory of the cgroups of this process and of the machine.
//!
//! Allocating shared memory beyond that does not fail: the kernel kills the process that touches it, even in
//! `fallocate`. So it must be checked before.

use std::fs;
use std::path::{Path, PathBuf};

use crate::procfs::field_bytes;

/// Bytes that can still be charged to this process, by the tightest of its memory cgroups and the free memory of the
/// machine. `None` if neither can be read.
///
/// ```
/// match shmesh_sys::cgroup::room_bytes() {
///     Some(room) => println!("{room} bytes until the kernel kills a process"),
///     None => println!("no limit"),
/// }
/// ```
#[must_use]
pub fn room_bytes() -> Option<u64> {
    let membership = fs::read_to_string("/proc/self/cgroup").ok();
    let allowed = membership.and_then(|membership| room_below(Path::new("/sys/fs/cgroup"), &membership));
    let there = fs::read_to_string("/proc/meminfo").ok().and_then(|meminfo| room_of_machine(&meminfo));
    allowed.into_iter().chain(there).min()
}

/// Available memory of the machine, including swap: a memfd has no other limit.
fn room_of_machine(meminfo: &str) -> Option<u64> {
    Some(field_bytes(meminfo, "MemAvailable")? + field_bytes(meminfo, "SwapFree").unwrap_or(0))
}

fn room_below(root: &Path, membership: &str) -> Option<u64> {
    membership
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let path = path.trim_start_matches('/');
            if controllers.is_empty() {
                tightest(root.to_path_buf(), path, Version::V2)
            } else if controllers.split(',').any(|controller| controller == "memory") {
                tightest(root.join("memory"), path, Version::V1)
            } else {
                None
            }
        })
        .min()
}

/// The minimum of all levels on the way from `root` to `root/path`. Levels that a private cgroup namespace hides are
/// skipped.
fn tightest(root: PathBuf, path: &str, version: Version) -> Option<u64> {
    let mut levels = vec![root.clone()];
    let mut level = root;
    for part in path.split('/').filter(|part| !part.is_empty() && *part != "..") {
        level.push(part);
        levels.push(level.clone());
    }
    levels.iter().filter_map(|level| Level::read(level, version)?.room()).min()
}

/// The two layouts of the memory controller.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Version {
    /// A separate tree for each controller (version 1).
    V1,
    /// The unified hierarchy (version 2).
    V2,
}

/// One level of the memory hierarchy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Level {
    /// The limit in bytes; `None` if there is none.
    pub limit: Option<u64>,
    /// Bytes that are charged.
    pub used: u64,
    /// The page cache in `used`, which the kernel drops before it kills. Shared memory is not part of it.
    pub reclaimable: u64,
}

impl Level {
    /// Reads the level with this directory. `None` if it has no memory files, as the root of version 2.
    #[must_use]
    pub fn read(dir: &Path, version: Version) -> Option<Self> {
        let text = |name: &str| fs::read_to_string(dir.join(name)).ok();
        let (limit, used) = match version {
            Version::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            Version::V2 => ("memory.max", "memory.current"),
        };
        let details = text("memory.stat").unwrap_or_default();
        // Version 1 reports the smallest limit of all ancestors, even of those that are not visible here, such as the
        // pod's.
        let above = stat(&details, "hierarchical_memory_limit").filter(|limit| *limit < NO_LIMIT);
        let limit = parse_limit(&text(limit)?).into_iter().chain(above).min();
        // Version 1 counts those below this level with the prefix "total_".
        let cache = ["active_file", "inactive_file"].iter().map(|name| {
            stat(&details, &format!("total_{name}")).or_else(|| stat(&details, name)).unwrap_or(0)
        });
        Some(Self { limit, used: text(used)?.trim().parse().ok()?, reclaimable: cache.sum() })
    }

    /// Bytes that can still be charged before the kernel kills; `None` without a limit.
    #[must_use]
    pub fn room(&self) -> Option<u64> {
        Some(self.limit?.saturating_sub(self.used.saturating_sub(self.reclaimable)))
    }
}

/// The threshold for "no limit": version 1 writes the largest page-aligned number, and anything near it counts.
const NO_LIMIT: u64 = 1 << 60;

/// Parses a limit as the kernel writes it: `max` (version 2) or a number.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|limit| *limit < NO_LIMIT)
}

/// The value of a key in `memory.stat`.
fn stat(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        dir
    }

    #[test]
    fn smallest_limit_of_all_levels_counts() {
        let root = tree(&[
            ("a/memory.max", "1000\n"),
            ("a/memory.current", "400\n"),
            ("a/b/memory.max", "max\n"),
            ("a/b/memory.current", "100\n"),
            ("a/memory.stat", "anon 5\nactive_file 30\ninactive_file 20\nshmem 7\n"),
        ]);
        assert_eq!(room_below(root.path(), "0::/a/b\n"), Some(650));
        assert_eq!(room_below(root.path(), "0::/\n"), None);
        assert_eq!(room_below(root.path(), "nonsense"), None);
    }

    #[test]
    fn machine_limit_is_available_memory_and_swap() {
        let meminfo = "MemTotal:  4000 kB\nMemFree: 1 kB\nMemAvailable:    100 kB\nSwapFree:  5 kB\n";
        assert_eq!(room_of_machine(meminfo), Some(105 << 10));
        assert_eq!(room_of_machine("MemAvailable: 7 kB\n"), Some(7 << 10));
        assert_eq!(room_of_machine("MemAvailable: much\n"), None);
        assert_eq!(room_of_machine(""), None);
    }

    #[test]
    fn version_1_has_its_own_tree_and_a_huge_number_for_no_limit() {
        let root = tree(&[
            ("memory/pod/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/pod/memory.usage_in_bytes", "5\n"),
            ("memory/pod/c/memory.limit_in_bytes", "100\n"),
            ("memory/pod/c/memory.usage_in_bytes", "130\n"),
        ]);
        assert_eq!(room_below(root.path(), "4:memory:/pod\n0::/pod\n"), None);
        assert_eq!(room_below(root.path(), "4:cpu,memory:/pod/c\n"), Some(0));
    }

    #[test]
    fn limits_and_statistics() {
        assert_eq!(parse_limit("max\n"), None);
        assert_eq!(parse_limit("9223372036854771712"), None);
        assert_eq!(parse_limit("4096\n"), Some(4096));
        assert_eq!(stat("inactive_file_x 3\ninactive_file 4\n", "inactive_file"), Some(4));
        let full = Level { limit: Some(10), used: 30, reclaimable: 5 };
        assert_eq!(full.room(), Some(0));
    }

    #[test]
    fn version_1_reports_the_limit_of_the_parent() {
        let root = tree(&[
            ("memory/c/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/c/memory.usage_in_bytes", "30\n"),
            ("memory/c/memory.stat", "hierarchical_memory_limit 100\ntotal_active_file 5\nactive_file 2\n"),
        ]);
        assert_eq!(room_below(root.path(), "4:memory:/c\n"), Some(75));
    }
}
