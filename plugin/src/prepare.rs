//! The directory of the identity service's socket, where the service runs as another user than who may make directories.
//!
//! A process without capabilities cannot give a directory to another user, but it can give it to a group that it is in.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::RunError;
use crate::args::Prepare;

/// The group makes and removes sockets; everybody may look and connect.
const MODE: u32 = 0o2775;

/// Makes the directory, or makes it right.
pub(crate) fn prepare(args: &Prepare) -> Result<(), RunError> {
    made(&args.directory, args.gid).map_err(RunError::Failed)?;
    tracing::info!(directory = %args.directory.display(), gid = args.gid, "the identity service may use it");
    Ok(())
}

fn made(directory: &Path, gid: u32) -> Result<()> {
    let named = || format!("the identity service's directory {}", directory.display());
    match fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).with_context(named),
        _ => {}
    }
    // By descriptor, and no link: what it is may not change between the looks.
    let opened = shmesh_sys::dir::open_as_file(directory).with_context(named)?;
    let found = opened.metadata().with_context(named)?;
    if found.gid() != gid {
        fchown(&opened, None, Some(gid)).with_context(|| {
            format!("{} cannot be given to group {gid}: add it to the pod's supplementalGroups", named())
        })?;
    }
    if found.mode() & 0o7777 != MODE {
        opened.set_permissions(Permissions::from_mode(MODE)).with_context(named)?;
    }
    let mode = opened.metadata().with_context(named)?.mode() & 0o7777;
    // The kernel drops set-group-id without a word, of who is not in the group.
    ensure!(
        mode == MODE,
        "{} cannot be given mode {MODE:o}: add group {gid} to the pod's supplementalGroups",
        named()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::getgid;

    #[test]
    fn the_directory_is_the_groups_whatever_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let agent = dir.path().join("agent");
        let gid = getgid().as_raw();
        for _ in 0..2 {
            made(&agent, gid).unwrap();
            let found = fs::metadata(&agent).unwrap();
            assert_eq!((found.mode() & 0o7777, found.gid()), (MODE, gid));
            fs::set_permissions(&agent, Permissions::from_mode(0o700)).unwrap();
        }
    }

    #[test]
    fn a_link_and_a_file_are_refused_with_their_name() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        for path in [&file, &link, &dir.path().join("none/agent")] {
            let said = format!("{:#}", made(path, getgid().as_raw()).unwrap_err());
            assert!(said.contains(&path.display().to_string()), "{said}");
        }
        assert_eq!(fs::metadata(dir.path()).unwrap().mode() & 0o2000, 0, "what the link names is untouched");
    }
}
