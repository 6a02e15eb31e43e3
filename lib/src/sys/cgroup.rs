//! How much memory the cgroups of this process still allow, and the machine has.
//!
//! Shared memory beyond that does not fail: the kernel kills the process that touches it, `fallocate` included. So the
//! question must be asked before.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that can still be charged to this process, by the tightest of its memory cgroups and by what the machine has;
/// `None` when nothing of it can be read.
///
/// ```
/// match shmesh::sys::cgroup::room_bytes() {
///     Some(room) => println!("{room} bytes until somebody is killed"),
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

/// What the machine has, swap included: a memfd has no other limit.
fn room_of_machine(meminfo: &str) -> Option<u64> {
    let kibibytes = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().trim_end_matches("kB").trim_end().parse().ok()
    };
    Some((kibibytes("MemAvailable")? + kibibytes("SwapFree").unwrap_or(0)) << 10)
}

fn room_below(root: &Path, membership: &str) -> Option<u64> {
    membership
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let path = path.trim_start_matches('/');
            if controllers.is_empty() {
                tightest(root.to_path_buf(), path, "memory.max", "memory.current")
            } else if controllers.split(',').any(|controller| controller == "memory") {
                tightest(root.join("memory"), path, "memory.limit_in_bytes", "memory.usage_in_bytes")
            } else {
                None
            }
        })
        .min()
}

/// The least room on the way from `root` to `root/path`. Levels that a private cgroup namespace hides are skipped.
fn tightest(root: PathBuf, path: &str, limit: &str, usage: &str) -> Option<u64> {
    let mut levels = vec![root.clone()];
    let mut level = root;
    for part in path.split('/').filter(|part| !part.is_empty() && *part != "..") {
        level.push(part);
        levels.push(level.clone());
    }
    levels
        .iter()
        .filter_map(|level| {
            let used = number(&level.join(usage))?.saturating_sub(page_cache(&level.join("memory.stat")));
            Some(number(&level.join(limit))?.saturating_sub(used))
        })
        .min()
}

/// Bytes of files that were only read: the kernel drops them before it refuses anything. Shared memory is not among them.
fn page_cache(stat: &Path) -> u64 {
    let text = fs::read_to_string(stat).unwrap_or_default();
    let value = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
    };
    // Version 1 counts those below this level under "total_".
    ["active_file", "inactive_file"]
        .iter()
        .map(|name| value(&format!("total_{name}")).or_else(|| value(name)).unwrap_or(0))
        .sum()
}

/// A number in a file; `None` for "max", for cgroup v1's "no limit", and for what is not there.
fn number(path: &Path) -> Option<u64> {
    let value: u64 = fs::read_to_string(path).ok()?.trim().parse().ok()?;
    (value < 1 << 60).then_some(value)
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
    fn the_tightest_level_counts() {
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
    fn the_machine_has_what_is_available_and_its_swap() {
        let meminfo = "MemTotal:  4000 kB\nMemFree: 1 kB\nMemAvailable:    100 kB\nSwapFree:  5 kB\n";
        assert_eq!(room_of_machine(meminfo), Some(105 << 10));
        assert_eq!(room_of_machine("MemAvailable: 7 kB\n"), Some(7 << 10));
        assert_eq!(room_of_machine("MemAvailable: much\n"), None);
        assert_eq!(room_of_machine(""), None);
    }

    #[test]
    fn version_1_has_a_tree_of_its_own_and_a_huge_number_for_no_limit() {
        let root = tree(&[
            ("memory/pod/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/pod/memory.usage_in_bytes", "5\n"),
            ("memory/pod/c/memory.limit_in_bytes", "100\n"),
            ("memory/pod/c/memory.usage_in_bytes", "130\n"),
        ]);
        assert_eq!(room_below(root.path(), "4:memory:/pod\n0::/pod\n"), None);
        assert_eq!(room_below(root.path(), "4:cpu,memory:/pod/c\n"), Some(0));
    }
}
