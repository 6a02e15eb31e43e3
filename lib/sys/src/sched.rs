//! Processor affinity: the cores on which a thread may run.

use std::io;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Pins the calling thread to one core.
///
/// # Errors
/// This process may not use the core, or it does not exist.
pub fn pin(core: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(core)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// The cores that the calling thread may use.
///
/// # Errors
/// Never fails in normal use.
pub fn cores() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..CpuSet::count()).filter(|&core| set.is_set(core).unwrap_or(false)).collect())
}
