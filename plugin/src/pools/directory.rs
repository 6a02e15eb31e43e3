//! Creates the directory of a pool and measures its use.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use shmesh_sys::{dir, mount, user};

use super::tree;

/// Mode with a group: members create files, which belong to the group and only their owner can remove.
const FOR_ITS_GROUP: u32 = 0o3770;
/// Mode without a group, where CDI is disabled: every container with the mount.
const FOR_ALL: u32 = 0o1777;
/// Sticky bit: only the owner of a file can remove it.
const STICKY: u32 = 0o1000;

/// Creates the directory of a pool or a claim, or corrects its group and mode. `owner` says which, for errors.
pub(crate) fn prepare(owner: &str, directory: &Path, gid: u32, has_group: bool) -> Result<()> {
    let named = || format!("the {owner}'s directory {}", directory.display());
    if let Some(parent) = directory.parent() {
        prepare_parent(owner, parent).with_context(named)?;
    }
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).with_context(named),
        _ => {}
    }
    // Opened without following links: the name may be in a directory where others can replace it.
    let opened = dir::open_as_file(directory).with_context(named)?;
    let (mode, gid) = if has_group { (FOR_ITS_GROUP, Some(gid)) } else { (FOR_ALL, None) };
    own(&opened, mode, gid, Some(user::effective())).with_context(named)
}

/// Creates the parent of such directories, in which only root and this user may replace them.
pub(crate) fn prepare_parent(of: &str, parent: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(parent)
        .with_context(|| format!("cannot create {}", parent.display()))?;
    trust(of, parent, user::effective())
}

/// Requires that only root and this user can replace the directory.
fn trust(of: &str, parent: &Path, uid: u32) -> Result<()> {
    let is_trusted = |owner: u32| owner == 0 || owner == uid;
    // Checks the name itself and the target of a link.
    let (name, found) = (parent.symlink_metadata()?, parent.metadata()?);
    ensure!(
        is_trusted(name.uid()) && is_trusted(found.uid()),
        "{} belongs to uid {}, which could replace the {of}'s directory: remove it, or give it to root",
        parent.display(),
        if is_trusted(name.uid()) { found.uid() } else { name.uid() }
    );
    let mode = found.mode();
    ensure!(
        mode & 0o022 == 0 || mode & STICKY != 0,
        "{} has mode {:o}, so other users could replace the {of}'s directory: remove their write permission, or set the sticky bit",
        parent.display(),
        mode & 0o7777
    );
    Ok(())
}

/// Gives a directory to a group, with this mode. It must belong to `uid`, if given.
pub(crate) fn own(directory: &File, mode: u32, gid: Option<u32>, uid: Option<u32>) -> Result<()> {
    let found = directory.metadata()?;
    if let Some(uid) = uid {
        ensure!(
            found.uid() == uid,
            "belongs to uid {} instead of uid {uid}: remove it, or give it to uid {uid}",
            found.uid()
        );
    }
    if let Some(gid) = gid
        && found.gid() != gid
    {
        fchown(directory, None, Some(gid)).with_context(|| {
            format!(
                "cannot be given to group {gid}: add the group to the supplementalGroups of the plugin's pod"
            )
        })?;
    }
    if found.mode() & 0o7777 != mode {
        directory.set_permissions(fs::Permissions::from_mode(mode))?;
        // The kernel silently clears set-group-id if the caller is not a member of the group.
        ensure!(
            directory.metadata()?.mode() & 0o7777 == mode,
            "cannot be given mode {mode:o}: add its group {} to the supplementalGroups of the plugin's pod",
            gid.unwrap_or(found.gid())
        );
    }
    Ok(())
}

/// Returns the free bytes of the file system.
pub(crate) fn free(directory: &Path) -> Result<u64> {
    mount::free_bytes(directory).with_context(|| format!("cannot look at {}", directory.display()))
}

/// Returns the bytes and number of files in the directory. Unreadable parts count as empty.
pub(crate) fn used(directory: &Path) -> (u64, u64) {
    let sum = tree::count(directory);
    (sum.bytes, sum.files)
}
