//! The IPC directory: whether it exists, its file system, and a trial file in it.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use shmesh_sys::errno::{self, Errno};
use shmesh_sys::file;
use shmesh_sys::mount::{FsKind, file_system};

use super::source::{Source, UnknownFact};
use shmesh_sys::mountinfo::{self, Mount};

/// Mode and owner of the directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct DirOwner {
    /// Permission bits with setuid, setgid and sticky.
    pub(super) mode: u32,
    /// The user who owns it.
    pub(super) uid: u32,
    /// The group that owns it.
    pub(super) gid: u32,
}

/// Sizes as reported by `statfs`.
#[derive(Clone, Debug)]
pub(super) struct Space {
    /// `tmpfs`, `hugetlbfs`, or the magic number.
    pub(super) kind: String,
    /// Total bytes; `None` without a limit.
    pub(super) size: Option<u64>,
    /// Bytes that are free for this user; `None` without a limit.
    pub(super) free: Option<u64>,
    /// Free inodes; `None` without a limit.
    pub(super) inodes: Option<u64>,
}

/// A trial file in the directory, without a name if the file system supports that.
#[derive(Debug)]
pub(super) struct Scratch {
    /// The file, or the error.
    pub(super) file: Result<OwnedFd, Errno>,
    /// Whether `O_TMPFILE` is supported.
    pub(super) anonymous: Result<(), Errno>,
}

/// All facts about the directory.
#[derive(Debug)]
pub(super) struct Facts {
    /// The path, as given by the user.
    pub(super) dir: PathBuf,
    /// Mode and owner of the directory.
    pub(super) owner: Result<DirOwner, UnknownFact>,
    /// Space in the file system.
    pub(super) space: Result<Space, UnknownFact>,
    /// The mount of the directory, and the number of mounts hidden below it.
    pub(super) seen: Result<(Mount, usize), UnknownFact>,
    /// The result of creating a trial file.
    pub(super) scratch: Scratch,
    /// Links in NVIPC's layout, with a remark about their primaries.
    pub(super) nvipc_links: Vec<String>,
}

impl Facts {
    /// Inspects the directory and creates a trial file, which is removed at once.
    pub(super) fn gather(source: &Source, dir: &Path) -> Self {
        let owner = owner(dir);
        let scratch = match &owner {
            Ok(_) => scratch(dir),
            Err(_) => Scratch { file: Err(Errno::ENOENT), anonymous: Err(Errno::ENOENT) },
        };
        let nvipc_links = nvipc_links(dir);
        Self { dir: dir.to_owned(), owner, space: space(dir), seen: seen(source, dir), scratch, nvipc_links }
    }

    /// The mount of the directory, if known.
    pub(super) fn mount(&self) -> Option<&Mount> {
        self.seen.as_ref().ok().map(|(mount, _)| mount)
    }
}

/// Lists the links in NVIPC's layout.
fn nvipc_links(dir: &Path) -> Vec<String> {
    let names = shmesh::inspect::names(dir).unwrap_or_default();
    let remark = |is_served| if is_served { "its primary lives" } else { "no primary" };
    let link =
        |name| crate::nvipc::seen(dir, name).map(|seen| format!("{name} ({})", remark(seen.is_served)));
    names.iter().filter_map(link).collect()
}

/// Reads mode and owner. Fails if the path is not a directory.
fn owner(dir: &Path) -> Result<DirOwner, UnknownFact> {
    let meta = std::fs::metadata(dir).map_err(|why| UnknownFact(why.to_string()))?;
    if !meta.is_dir() {
        return Err(UnknownFact("not a directory".into()));
    }
    Ok(DirOwner { mode: meta.mode() & 0o7777, uid: meta.uid(), gid: meta.gid() })
}

/// Reads the sizes of the file system.
fn space(dir: &Path) -> Result<Space, UnknownFact> {
    let found = file_system(dir).map_err(|why| UnknownFact(format!("statfs: {}", why.desc())))?;
    let kind = match found.kind {
        FsKind::Tmpfs => "tmpfs".to_owned(),
        FsKind::Hugetlbfs => "hugetlbfs".to_owned(),
        FsKind::Other(magic) => format!("{magic:#x}"),
    };
    // tmpfs mounted with size=0 or nr_inodes=0 has no limit and reports a total of 0.
    let limited = |total: u64, amount: u64| (total > 0).then_some(amount);
    Ok(Space {
        kind,
        size: limited(found.total_bytes, found.total_bytes),
        free: limited(found.total_bytes, found.available_bytes),
        inodes: limited(found.files, found.files_free),
    })
}

/// Finds the mount of the directory, with symbolic links resolved.
fn seen(source: &Source, dir: &Path) -> Result<(Mount, usize), UnknownFact> {
    let path = dir.canonicalize().map_err(|why| UnknownFact(why.to_string()))?;
    let mounts = mountinfo::parse(&source.text("/proc/self/mountinfo")?);
    mountinfo::covering(&mounts, &path)
        .map(|(mount, hidden)| (mount.clone(), hidden))
        .ok_or_else(|| UnknownFact("no mount in /proc/self/mountinfo covers it".into()))
}

/// Creates a file without a name; if that is not supported, one whose name is removed at once.
fn scratch(dir: &Path) -> Scratch {
    let why = match file::unnamed(dir, 0o600) {
        Ok(file) => return Scratch { file: Ok(file.into()), anonymous: Ok(()) },
        Err(why) => errno::of(&why),
    };
    let name = dir.join(format!(".shmesh-doctor-{}", std::process::id()));
    let file = file::create_empty(&name, 0o600).map(OwnedFd::from).map_err(|why| errno::of(&why));
    if file.is_ok() {
        // On failure one empty file stays, which is no reason to stop.
        let _ = std::fs::remove_file(&name);
    }
    Scratch { file, anonymous: Err(why) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tests::Tree;
    use crate::doctor::{FindingStatus, shm};

    #[test]
    fn real_directories() {
        let tree = Tree::new();
        tree.file("proc/self/mountinfo", "1 0 0:1 / / rw - ext4 /dev/x rw\n");
        let dir = tempfile::tempdir().unwrap();
        let facts = Facts::gather(&tree.source(), dir.path());
        assert!(facts.scratch.file.is_ok());
        assert_eq!(facts.mount().unwrap().kind, "ext4");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing stays behind");

        let missing = Facts::gather(&tree.source(), &dir.path().join("none"));
        let found = shm::findings(&missing);
        assert_eq!((found.len(), found[0].status), (1, FindingStatus::Fail));
        std::fs::write(dir.path().join("file"), "").unwrap();
        let found = shm::findings(&Facts::gather(&tree.source(), &dir.path().join("file")));
        assert_eq!(found[0].value["reason"], "not a directory");
    }
}
