//! Which namespaces the service runs in: that decides which numbers it sees.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

/// Inode of the initial pid namespace, the same on every Linux (`PROC_PID_INIT_INO`).
const INITIAL_PID: u64 = 0xefff_fffc;
/// Inode of the initial cgroup namespace (`PROC_CGROUP_INIT_INO`).
const INITIAL_CGROUP: u64 = 0xefff_fffb;

/// What was found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Namespaces {
    /// Inode of the pid namespace.
    pub(super) pid: u64,
    /// Inode of the cgroup namespace.
    pub(super) cgroup: u64,
}

impl Namespaces {
    /// Ours.
    pub(super) fn own() -> io::Result<Self> {
        let inode = |kind: &str| fs::metadata(format!("/proc/self/ns/{kind}")).map(|file| file.ino());
        Ok(Self { pid: inode("pid")?, cgroup: inode("cgroup")? })
    }

    /// Whether our numbers are the machine's. In kind they are the node's, which is as far out as its pods get.
    pub(super) fn is_initial_pid(&self) -> bool {
        self.pid == INITIAL_PID
    }

    /// Whether cgroup paths begin at the machine's root.
    pub(super) fn is_initial_cgroup(&self) -> bool {
        self.cgroup == INITIAL_CGROUP
    }
}
