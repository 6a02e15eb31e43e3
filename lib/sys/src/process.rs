//! This process and others: identity, liveness, and signals to children.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use nix::sys::signal::{self, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::procfs::{self, Proc, start_time};

/// The liveness of a process, as far as this process can tell.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Liveness {
    /// The process runs, or is stopped.
    Alive,
    /// The process has ended, or its id belongs to another process.
    Dead,
    /// The process id is from another pid namespace: only a process that sees it, such as the sidecar, knows.
    Unknown,
}

/// The identity of a process, which no later process with the same id has.
///
/// ```
/// use shmesh_sys::process::ProcessIdentity;
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
    /// Identifies the calling process.
    ///
    /// # Errors
    /// `/proc` is not mounted or not readable.
    pub fn me() -> io::Result<Self> {
        let pid = std::process::id();
        let stat = procfs::own(procfs::ProcFile::Stat)?;
        let start_time =
            start_time(&stat).ok_or_else(|| io::Error::other("/proc/self/stat has no start time"))?;
        // A /proc of another pid namespace numbers processes differently: then we cannot judge other processes, nor they us.
        let pid_namespace =
            if procfs::is_pid(&stat, pid) { fs::metadata("/proc/self/ns/pid")?.ino() } else { 0 };
        Ok(Self { pid, start_time, pid_namespace })
    }

    /// Whether the caller is this process, and not a child that it forked.
    #[must_use]
    pub fn is_me(&self) -> bool {
        std::process::id() == self.pid
    }

    /// The start time of process `pid` in our pid namespace. `None` if it does not exist or has ended.
    ///
    /// # Errors
    /// It cannot be determined, because `/proc` is hidden or no descriptors are left. That is not a proof of death.
    pub fn start_time_of(&self, pid: u32) -> io::Result<Option<u64>> {
        match procfs::Kernel.read(pid.cast_signed(), procfs::ProcFile::Stat) {
            Ok(stat) => Ok(start_time(&stat)),
            Err(error) => match signal::kill(Pid::from_raw(pid.cast_signed()), None) {
                // Only this proves a death: a `/proc` mounted with `hidepid` does not show the processes of others.
                Err(nix::errno::Errno::ESRCH) => Ok(None),
                _ => Err(error),
            },
        }
    }
}

/// Kills a child that was not reaped yet, so that the process id is still its own.
///
/// # Errors
/// The process does not exist, or belongs to another user.
pub fn kill(child: u32) -> io::Result<()> {
    Ok(signal::kill(number(child)?, Signal::SIGKILL)?)
}

/// Kills a child that leads a process group, and the whole group.
///
/// # Errors
/// The group does not exist.
pub fn kill_group(leader: u32) -> io::Result<()> {
    Ok(signal::killpg(number(leader)?, Signal::SIGKILL)?)
}

/// Stops a child, and waits until it has stopped.
///
/// # Errors
/// The child does not exist.
pub fn stop(child: u32) -> io::Result<()> {
    signal::kill(number(child)?, Signal::SIGSTOP)?;
    waitpid(number(child)?, Some(WaitPidFlag::WUNTRACED))?;
    Ok(())
}

/// Waits for the end of a child. Returns `true` if it exited with status 0.
///
/// # Errors
/// The child does not exist.
///
/// ```
/// use shmesh_sys::process;
/// let child = std::process::Command::new("sleep").arg("600").spawn()?;
/// process::stop(child.id())?;
/// process::kill(child.id())?;
/// assert!(!process::reap(child.id())?);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn reap(child: u32) -> io::Result<bool> {
    Ok(matches!(waitpid(number(child)?, None)?, WaitStatus::Exited(_, 0)))
}

fn number(pid: u32) -> io::Result<Pid> {
    // 0 and negative numbers mean process groups.
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0);
    pid.map(Pid::from_raw).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Makes the kernel kill this process when its parent ends.
///
/// # Errors
/// Never fails in normal use.
pub fn die_with_parent() -> io::Result<()> {
    Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "reads /proc")]
    fn own_process_is_visible_and_others_are_not() {
        let me = ProcessIdentity::me().unwrap();
        assert_eq!(me.start_time_of(me.pid).unwrap(), Some(me.start_time));
        assert_eq!(me.start_time_of(4_194_304).unwrap(), None, "above the largest pid");
    }
}
