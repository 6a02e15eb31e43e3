//! The user of this process, and its permissions.

use std::path::Path;

use nix::unistd::{AccessFlags, access};

use crate::errno::Errno;

/// The effective user id.
#[must_use]
pub fn effective() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Checks whether this process may create files in a directory.
///
/// # Errors
/// The reason why it may not.
pub fn may_write_in(dir: &Path) -> Result<(), Errno> {
    access(dir, AccessFlags::W_OK | AccessFlags::X_OK)
}

/// Changes the user of this process to `uid` for ever: real, effective and saved. Its files in `/proc` stay its own.
///
/// # Errors
/// The process is not root.
pub fn become_user(uid: u32) -> std::io::Result<()> {
    let user = nix::unistd::Uid::from_raw(uid);
    nix::unistd::setresuid(user, user, user)?;
    // Otherwise the files in `/proc` that a driver reads of its own process would belong to root.
    nix::sys::prctl::set_dumpable(true)?;
    Ok(())
}
