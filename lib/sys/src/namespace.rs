//! The namespaces of this process, which decide which process ids it sees.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

/// Inode of the initial pid namespace, the same on every Linux system (`PROC_PID_INIT_INO`).
const INITIAL_PID: u64 = 0xefff_fffc;
/// Inode of the initial cgroup namespace (`PROC_CGROUP_INIT_INO`).
const INITIAL_CGROUP: u64 = 0xefff_fffb;

/// The pid and cgroup namespaces of a process.
///
/// ```
/// use shmesh_sys::namespace::Namespaces;
/// let ours = Namespaces::own()?;
/// println!("process ids are {}the machine's", if ours.is_initial_pid() { "" } else { "not " });
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Namespaces {
    /// Inode of the pid namespace.
    pub pid: u64,
    /// Inode of the cgroup namespace.
    pub cgroup: u64,
}

impl Namespaces {
    /// The namespaces of this process.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn own() -> io::Result<Self> {
        let inode = |kind: &str| fs::metadata(format!("/proc/self/ns/{kind}")).map(|file| file.ino());
        Ok(Self { pid: inode("pid")?, cgroup: inode("cgroup")? })
    }

    /// Whether process ids here are the machine's. In kind they are the node's, which is the outermost
    /// namespace of its pods.
    #[must_use]
    pub fn is_initial_pid(&self) -> bool {
        self.pid == INITIAL_PID
    }

    /// Whether cgroup paths begin at the root of the machine.
    #[must_use]
    pub fn is_initial_cgroup(&self) -> bool {
        self.cgroup == INITIAL_CGROUP
    }
}
