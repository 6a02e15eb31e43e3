//! The limit of open files of this process (`RLIMIT_NOFILE`).

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The current limit of open files, and the maximum to which this process may raise it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct OpenFiles {
    /// The limit in force.
    pub soft: u64,
    /// The maximum to which the soft limit can be raised.
    pub hard: u64,
}

/// The limit of open files.
///
/// # Errors
/// Never fails in normal use.
pub fn open_files() -> io::Result<OpenFiles> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(OpenFiles { soft, hard })
}

/// Sets the limit of open files; the hard limit stays.
///
/// # Errors
/// The limit exceeds the hard limit.
///
/// ```
/// use shmesh_sys::rlimit::{open_files, set_open_files};
/// let hard = open_files()?.hard;
/// set_open_files(hard)?;
/// assert_eq!(open_files()?.soft, hard);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn set_open_files(soft: u64) -> io::Result<()> {
    let hard = open_files()?.hard;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?)
}
