//! Making the directory of a pool, and looking at what it holds.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::sys::statvfs::statvfs;

/// With a group of its own: its members only, each their own files, all of the group.
const FOR_ITS_GROUP: u32 = 0o3770;
/// Where containers cannot be given a group: everybody who has the mount.
const FOR_ALL: u32 = 0o1777;

/// Makes the directory, or makes it right.
pub(crate) fn prepare(directory: &Path, gid: u32, has_group: bool) -> Result<()> {
    let named = || format!("the pool's directory {}", directory.display());
    if let Some(parent) = directory.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).with_context(named),
        _ => {}
    }
    // By descriptor: the name may be in a directory where others can put a link.
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(directory).with_context(named)?;
    let (mode, gid) = if has_group { (FOR_ITS_GROUP, Some(gid)) } else { (FOR_ALL, None) };
    own(&opened, mode, gid).with_context(named)
}

fn own(directory: &File, mode: u32, gid: Option<u32>) -> Result<()> {
    let found = directory.metadata()?;
    if let Some(gid) = gid
        && found.gid() != gid
    {
        fchown(directory, None, Some(gid)).with_context(|| {
            format!("cannot be given to group {gid}: add it to the supplementalGroups of the plugin's pod")
        })?;
    }
    if found.mode() & 0o7777 != mode {
        directory.set_permissions(fs::Permissions::from_mode(mode))?;
        // The kernel drops set-group-id without a word, of who is not in the group.
        ensure!(
            directory.metadata()?.mode() & 0o7777 == mode,
            "cannot be given mode {mode:o}: add its group to the supplementalGroups of the plugin's pod"
        );
    }
    Ok(())
}

/// Bytes that are free where the directory is.
pub(crate) fn free(directory: &Path) -> Result<u64> {
    let stat = statvfs(directory).with_context(|| format!("cannot look at {}", directory.display()))?;
    Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

/// Bytes that the files in it take, and how many there are. What cannot be looked at counts as empty.
pub(crate) fn used(directory: &Path) -> (u64, u64) {
    let Ok(entries) = fs::read_dir(directory) else { return (0, 0) };
    let mut sum = (0, 0);
    for entry in entries.flatten() {
        let Ok(found) = entry.metadata() else { continue };
        let below = if found.is_dir() { used(&entry.path()) } else { (0, 0) };
        sum.0 += found.blocks() * 512 + below.0;
        sum.1 += 1 + below.1;
    }
    sum
}
