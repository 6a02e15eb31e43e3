//! This process and others: identity, liveness, and signals to children.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use nix::sys::signal::{self, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::procfs::{self, Proc, start_time};

/// Whether a process lives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Liveness {
    /// It runs, or is stopped.
    Alive,
    /// It has ended, or its number belongs to another process by now.
    Dead,
    /// Its number is from another pid namespace: only a process that can see it, such as the sidecar, knows.
    Unknown,
}

/// A process, told apart from any later one with the same number.
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

    /// Whether the caller is this process, and not one forked from it.
    #[must_use]
    pub fn is_me(&self) -> bool {
        std::process::id() == self.pid
    }

    /// When the process `pid` of our pid namespace started; `None` when there is none or it has ended.
    ///
    /// # Errors
    /// The question has no answer here: `/proc` is hidden or there are no descriptors left. That proves no death.
    pub fn start_time_of(&self, pid: u32) -> io::Result<Option<u64>> {
        match procfs::Kernel.read(pid.cast_signed(), procfs::ProcFile::Stat) {
            Ok(stat) => Ok(start_time(&stat)),
            Err(error) => match signal::kill(Pid::from_raw(pid.cast_signed()), None) {
                // Only this proves a death: a /proc mounted with `hidepid` does not show the processes of others.
                Err(nix::errno::Errno::ESRCH) => Ok(None),
                _ => Err(error),
            },
        }
    }
}

/// Ends a child that was not reaped yet, so that the number is still its own.
///
/// # Errors
/// There is no such process, or it is another user's.
pub fn kill(child: u32) -> io::Result<()> {
    Ok(signal::kill(number(child)?, Signal::SIGKILL)?)
}

/// Ends a child that leads a process group, and all of the group.
///
/// # Errors
/// There is no such group.
pub fn kill_group(leader: u32) -> io::Result<()> {
    Ok(signal::killpg(number(leader)?, Signal::SIGKILL)?)
}

/// Stops a child where it is, and waits until it stands.
///
/// # Errors
/// There is no such child.
pub fn stop(child: u32) -> io::Result<()> {
    signal::kill(number(child)?, Signal::SIGSTOP)?;
    waitpid(number(child)?, Some(WaitPidFlag::WUNTRACED))?;
    Ok(())
}

/// Waits for the end of a child; `true` if it exited with status 0.
///
/// # Errors
/// There is no such child.
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
    // 0 and negative numbers mean groups.
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0);
    pid.map(Pid::from_raw).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Has the kernel kill this process when its parent ends.
///
/// # Errors
/// None in normal use.
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
