//! Parsing `/proc/PID/mountinfo`: the mount of a directory, and mounts that are hidden below it.

use std::path::{Path, PathBuf};

/// A mount, from one line of mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The id, which is also in `fdinfo` of each file that was opened through the mount.
    pub id: u64,
    /// The directory of the file system that is mounted.
    pub root: String,
    /// The directory that it is mounted on.
    pub point: PathBuf,
    /// Options of this mount (`rw,nosuid,...`).
    pub options: String,
    /// Type of the file system.
    pub kind: String,
    /// The source: a device, or a word such as `tmpfs` or `shm`.
    pub origin: String,
    /// Options of the file system (`size=65536k,huge=advise,...`, or a cgroup's controllers).
    pub super_options: String,
}

impl Mount {
    /// Whether `option` is among either kind of options.
    #[must_use]
    pub fn has(&self, option: &str) -> bool {
        self.options.split(',').chain(self.super_options.split(',')).any(|one| one == option)
    }

    /// The value of `key=value` among the file system's options.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&str> {
        self.super_options.split(',').find_map(|one| one.strip_prefix(key)?.strip_prefix('='))
    }
}

/// The mounts of a mountinfo file, in its order. Lines of another form are skipped.
#[must_use]
pub fn parse(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_line).collect()
}

/// Parses a line such as `25 24 0:23 / /dev/shm rw,relatime shared:4 - tmpfs tmpfs rw,size=65536k`.
fn parse_line(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ');
    let mut right = right.split(' ');
    Some(Mount {
        id: left.next()?.parse().ok()?,
        root: unescape(left.nth(2)?),
        point: PathBuf::from(unescape(left.next()?)),
        options: left.next()?.to_owned(),
        kind: right.next()?.to_owned(),
        origin: unescape(right.next()?),
        super_options: right.next().unwrap_or_default().to_owned(),
    })
}

/// Decodes the kernel's `\040` for blanks and the like.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = (first == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The mount of `path` (absolute, resolved), and the number of mounts hidden at the same point.
#[must_use]
pub fn covering<'a>(mounts: &'a [Mount], path: &Path) -> Option<(&'a Mount, usize)> {
    let depth = |mount: &&Mount| mount.point.components().count();
    // Of equal depth the last one is on top: max_by_key returns the last.
    let top = mounts.iter().filter(|mount| path.starts_with(&mount.point)).max_by_key(depth)?;
    let hidden = mounts.iter().filter(|mount| mount.point == top.point).count() - 1;
    Some((top, hidden))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTAINERD: &str = "\
603 541 0:88 / / rw,relatime master:190 - overlay overlay rw,lowerdir=/a:/b
604 603 0:90 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
605 603 0:91 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
608 605 0:81 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k
609 608 0:95 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=98304k,noswap,huge=advise
610 603 8:1 /x\\040y /data\\134z rw - ext4 /dev/sda1
junk
";

    #[test]
    fn reads_a_container() {
        let mounts = parse(CONTAINERD);
        assert_eq!(mounts.len(), 6);
        let (top, hidden) = covering(&mounts, Path::new("/dev/shm/sub")).unwrap();
        assert_eq!((top.origin.as_str(), hidden), ("tmpfs", 1));
        assert_eq!(top.value("size"), Some("98304k"));
        assert_eq!(top.value("huge"), Some("advise"));
        assert!(top.has("noswap") && top.has("relatime") && !top.has("ro"));
        assert_eq!(covering(&mounts, Path::new("/home")).unwrap().0.kind, "overlay");
        assert_eq!(
            (mounts[5].id, mounts[5].root.as_str(), mounts[5].super_options.as_str()),
            (610, "/x y", "")
        );
        assert_eq!(mounts[5].point, Path::new("/data\\z"));
    }

    #[test]
    fn prefixes_are_whole_components() {
        let mounts = parse("1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / /dev/sh rw - tmpfs b rw\n");
        assert_eq!(covering(&mounts, Path::new("/dev/shm")).unwrap().0.kind, "ext4");
        assert!(covering(&[], Path::new("/")).is_none());
    }
}
