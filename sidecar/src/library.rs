//! Copies the preload library of the image into a volume, from which the containers of a pod load it.

use std::fs::{self, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use anyhow::{Context, Result};

/// Where the image of the sidecar has the library.
pub const PATH: &str = "/usr/lib/shmesh/libshmesh_posix.so";

/// Name while the copy is incomplete.
const INCOMPLETE: &str = ".libshmesh_posix.so.new";

/// Copies the library into the directory, with mode 0755, and gives it a link in each folder that glibc may take `$LIB` for.
/// One that is there is replaced in one step, and programs that have loaded it keep theirs.
///
/// With `$LIB` in `LD_PRELOAD`, musl's loader does not find the library and starts the program without it. If it found it, it
/// would end the program, because the library needs glibc.
///
/// # Errors
/// The library cannot be read, or the directory cannot be written; then it has what it had before.
pub fn install(library: &Path, dir: &Path) -> Result<()> {
    let name = library.file_name().with_context(|| format!("{} has no file name", library.display()))?;
    let (incomplete, target) = (dir.join(INCOMPLETE), dir.join(name));
    let mut from = File::open(library).with_context(|| {
        format!("cannot read the preload library {}; use the image of the sidecar", library.display())
    })?;
    remove(&incomplete).with_context(|| format!("cannot remove {}", incomplete.display()))?;
    let copied = copy(&mut from, &incomplete)
        .and_then(|()| fs::rename(&incomplete, &target))
        .with_context(|| format!("cannot copy {} to {}", library.display(), target.display()));
    if copied.is_err() {
        // The first error is the one to report.
        let _ = remove(&incomplete);
    }
    copied?;
    link_folders(dir, Path::new(name))
}

/// The value of `$LIB` depends on the distribution: Debian's, Red Hat's and SUSE's, and all others'.
fn link_folders(dir: &Path, name: &Path) -> Result<()> {
    let of_debian = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    for (folder, up) in [("lib", ".."), ("lib64", ".."), (of_debian.as_str(), "../..")] {
        let folder = dir.join(folder);
        let made = folder_for_all(&folder).and_then(|()| {
            match symlink(Path::new(up).join(name), folder.join(name)) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
                other => other,
            }
        });
        made.with_context(|| format!("cannot link the library in {}", folder.display()))?;
    }
    Ok(())
}

fn folder_for_all(folder: &Path) -> std::io::Result<()> {
    match fs::create_dir(folder) {
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

fn copy(from: &mut File, to: &Path) -> std::io::Result<()> {
    let mut file = File::create_new(to)?;
    std::io::copy(from, &mut file)?;
    // Whatever the umask is.
    file.set_permissions(Permissions::from_mode(0o755))
}

fn remove(file: &Path) -> std::io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
