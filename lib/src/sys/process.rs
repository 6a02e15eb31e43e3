//! Who this process is, and whether another one lives.
//!
//! ```
//! let me = shmesh::sys::process::ProcessIdentity::me()?;
//! assert_eq!(me, shmesh::sys::process::ProcessIdentity::me()?, "it stays what it is");
//! # Ok::<(), std::io::Error>(())
//! ```

use std::fs;
use std::os::unix::fs::MetadataExt;

/// Whether a process lives.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// use shmesh::sys::process::{Liveness, ProcessIdentity};
/// let me = ProcessIdentity::me()?;
/// let dead = link.participants().filter(|other| other.liveness(&me) == Liveness::Dead);
/// assert_eq!(dead.count(), 0, "for recover() to take back");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Liveness {
    /// It runs, or is stopped.
    Alive,
    /// It has ended, or its number belongs to another process by now.
    Dead,
    /// Its number is from another pid namespace: only somebody who can see it (the sidecar) knows.
    Unknown,
}

/// A process, told apart from any later one with the same number.
///
/// ```
/// use shmesh::sys::process::ProcessIdentity;
/// let me = ProcessIdentity::me()?;
/// let later = ProcessIdentity { start_time: me.start_time + 100, ..me };
/// assert_ne!(me, later, "one with the same number that began a second later");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ProcessIdentity {
    /// Process id in its own pid namespace.
    pub pid: u32,
    /// Start time in clock ticks after boot.
    pub start_time: u64,
    /// Inode of its pid namespace.
    pub pid_namespace: u64,
}

impl ProcessIdentity {
    /// This process.
    ///
    /// # Errors
    /// `/proc` is not mounted or not readable.
    ///
    /// ```
    /// use shmesh::sys::process::ProcessIdentity;
    /// let me = ProcessIdentity::me()?;
    /// assert_eq!(me.pid, std::process::id());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn me() -> std::io::Result<Self> {
        let pid = std::process::id();
        let stat = fs::read_to_string("/proc/self/stat")?;
        let start_time =
            running_since(&stat).ok_or_else(|| std::io::Error::other("/proc/self/stat has no start time"))?;
        // A /proc of another pid namespace numbers processes its own way: then we can judge nobody, and nobody us.
        let numbers_are_ours = stat.split_ascii_whitespace().next() == Some(pid.to_string().as_str());
        let pid_namespace = if numbers_are_ours { fs::metadata("/proc/self/ns/pid")?.ino() } else { 0 };
        Ok(Self { pid, start_time, pid_namespace })
    }

    /// Whether the caller is this process, and not one forked from it.
    #[must_use]
    pub(crate) fn is_me(&self) -> bool {
        std::process::id() == self.pid
    }

    /// When the process `pid` of our pid namespace started; `None` when there is none or it has ended.
    ///
    /// # Errors
    /// The question has no answer here: `/proc` is hidden or there are no descriptors left. That proves no death.
    pub(crate) fn start_time_of(&self, pid: u32) -> std::io::Result<Option<u64>> {
        match fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => Ok(running_since(&stat)),
            Err(error) => match nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), None) {
                // Only this proves a death: a /proc mounted with `hidepid` does not show the processes of others.
                Err(nix::errno::Errno::ESRCH) => Ok(None),
                _ => Err(error),
            },
        }
    }
}

/// Field 22 of `/proc/PID/stat`, unless the whole process has ended and only waits to be reaped.
fn running_since(stat: &str) -> Option<u64> {
    // The name, field 2, may hold spaces and parentheses: count from the last one.
    let after_name = stat.rsplit_once(')')?.1;
    let mut fields = after_name.split_ascii_whitespace();
    let state = fields.next()?;
    let threads: u64 = fields.nth(16)?.parse().ok()?;
    let start_time = fields.nth(1)?.parse().ok()?;
    // The first thread may end before the others: the process is dead when it is the last one.
    if matches!(state, "Z" | "X" | "x") && threads <= 1 { None } else { Some(start_time) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "42 (a) b (c) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 3 0 777 1 2 3";

    #[test]
    fn reads_the_start_time_behind_any_name() {
        assert_eq!(running_since(STAT), Some(777));
        assert_eq!(running_since(""), None);
        assert_eq!(running_since("1 (x) S"), None);
    }

    #[test]
    fn a_zombie_is_dead_unless_other_threads_of_it_run() {
        let zombie = STAT.replace(" S ", " Z ");
        assert_eq!(running_since(&zombie), Some(777));
        assert_eq!(running_since(&zombie.replace(" 3 0 777", " 1 0 777")), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads /proc")]
    fn knows_itself_and_nobody_else() {
        let me = ProcessIdentity::me().unwrap();
        assert_eq!(me.start_time_of(me.pid).unwrap(), Some(me.start_time));
        assert_eq!(me.start_time_of(4_194_304).unwrap(), None, "above the largest pid");
    }
}
