//! Making the directory of a pool, and looking at what it holds.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use shmesh_sys::{dir, mount, user};

use super::tree;

/// With a group of its own: its members only, each their own files, all of the group.
const FOR_ITS_GROUP: u32 = 0o3770;
/// Where containers cannot be given a group: everybody who has the mount.
const FOR_ALL: u32 = 0o1777;
/// Only the owner of a file in the directory can remove it.
const STICKY: u32 = 0o1000;

/// Makes the directory, or makes it right.
pub(crate) fn prepare(directory: &Path, gid: u32, has_group: bool) -> Result<()> {
    let named = || format!("the pool's directory {}", directory.display());
    if let Some(parent) = directory.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(parent)
            .with_context(|| format!("cannot make {}", parent.display()))?;
        trust(parent, user::effective()).with_context(named)?;
    }
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).with_context(named),
        _ => {}
    }
    // By descriptor: the name may be in a directory where others can put a link.
    let opened = dir::open_as_file(directory).with_context(named)?;
    let (mode, gid) = if has_group { (FOR_ITS_GROUP, Some(gid)) } else { (FOR_ALL, None) };
    own(&opened, mode, gid, user::effective()).with_context(named)
}

/// Who can swap the directory for another must be us or root.
fn trust(parent: &Path, uid: u32) -> Result<()> {
    let is_trusted = |owner: u32| owner == 0 || owner == uid;
    // Of the name itself, and of what it leads to.
    let (name, found) = (parent.symlink_metadata()?, parent.metadata()?);
    ensure!(
        is_trusted(name.uid()) && is_trusted(found.uid()),
        "{} belongs to uid {}, who could put another directory there: remove it, or give it to root",
        parent.display(),
        if is_trusted(name.uid()) { found.uid() } else { name.uid() }
    );
    let mode = found.mode();
    ensure!(
        mode & 0o022 == 0 || mode & STICKY != 0,
        "{} has mode {:o}, and others could put another directory there: take their right to write, or set the sticky bit",
        parent.display(),
        mode & 0o7777
    );
    Ok(())
}

pub(super) fn own(directory: &File, mode: u32, gid: Option<u32>, uid: u32) -> Result<()> {
    let found = directory.metadata()?;
    ensure!(
        found.uid() == uid,
        "belongs to uid {}, who could change it at will, and not to uid {uid}: remove it, or give it to uid {uid}",
        found.uid()
    );
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
    mount::free_bytes(directory).with_context(|| format!("cannot look at {}", directory.display()))
}

/// Bytes that the files in it take, and how many there are. What cannot be looked at counts as empty.
pub(crate) fn used(directory: &Path) -> (u64, u64) {
    let sum = tree::count(directory);
    (sum.bytes, sum.files)
}
