//! Creates the directory of the identity service's socket for a service that does not run as root.
//!
//! A process without capabilities cannot give a directory to another user, only to a group of which it is a
//! member.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};

use crate::RunError;
use crate::args::Prepare;
use crate::pools;

/// The group can create and remove sockets; all users can list the directory and connect.
const MODE: u32 = 0o2775;

/// Creates the directory, or corrects its group and mode.
pub(crate) fn prepare(args: &Prepare) -> Result<(), RunError> {
    create(&args.directory, args.gid).map_err(RunError::Failed)?;
    tracing::info!(directory = %args.directory.display(), gid = args.gid, "directory prepared for the identity service");
    Ok(())
}

fn create(directory: &Path, gid: u32) -> Result<()> {
    let named = || format!("the identity service's directory {}", directory.display());
    match fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).with_context(named),
        _ => {}
    }
    // Opened without following links, so that the checks below apply to one directory.
    let opened = shmesh_sys::dir::open_as_file(directory).with_context(named)?;
    pools::own(&opened, MODE, Some(gid), None).with_context(named)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use nix::unistd::getgid;

    use super::*;

    #[test]
    fn existing_directory_is_corrected() {
        let dir = tempfile::tempdir().unwrap();
        let agent = dir.path().join("agent");
        let gid = getgid().as_raw();
        for _ in 0..2 {
            create(&agent, gid).unwrap();
            let found = fs::metadata(&agent).unwrap();
            assert_eq!((found.mode() & 0o7777, found.gid()), (MODE, gid));
            fs::set_permissions(&agent, Permissions::from_mode(0o700)).unwrap();
        }
    }

    #[test]
    fn link_or_file_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        for path in [&file, &link, &dir.path().join("none/agent")] {
            let said = format!("{:#}", create(path, getgid().as_raw()).unwrap_err());
            assert!(said.contains(&path.display().to_string()), "{said}");
        }
        assert_eq!(fs::metadata(dir.path()).unwrap().mode() & 0o2000, 0, "what the link names is untouched");
    }
}
