//! The user of this process, and what it may do.

use std::path::Path;

use nix::unistd::{AccessFlags, access};

use crate::errno::Errno;

/// The effective user id.
#[must_use]
pub fn effective() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Whether this process may make files in a directory.
///
/// # Errors
/// Why it may not.
pub fn may_write_in(dir: &Path) -> Result<(), Errno> {
    access(dir, AccessFlags::W_OK | AccessFlags::X_OK)
}

/// Gives this process the user `uid` for good: real, effective and saved. Its files in `/proc` stay its own.
///
/// # Errors
/// This process is not root.
pub fn become_user(uid: u32) -> std::io::Result<()> {
    let user = nix::unistd::Uid::from_raw(uid);
    nix::unistd::setresuid(user, user, user)?;
    // Otherwise the files that a driver reads of its own process would be root's.
    nix::sys::prctl::set_dumpable(true)?;
    Ok(())
}
