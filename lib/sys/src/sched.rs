//! Which processors a thread may run on.

use std::io;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Ties the calling thread to one processor.
///
/// # Errors
/// This process may not use that processor, or it cannot exist.
pub fn pin(core: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(core)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// The processors that the calling thread may use.
///
/// # Errors
/// None in normal use.
pub fn cores() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..CpuSet::count()).filter(|&core| set.is_set(core).unwrap_or(false)).collect())
}
