//! Which processes have files and arrays open or mapped, as far as `/proc` shows them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use shmesh::inspect::{ARRAY_MEMFD, MemoryFile};

/// The process ids of one file's users, in this pid namespace.
pub(crate) type FileUsers = Vec<u32>;

/// The users of each file. Processes of others that this user may not look into are missing.
pub(crate) fn users(files: &[MemoryFile]) -> Vec<FileUsers> {
    let mut users = vec![FileUsers::new(); files.len()];
    if files.is_empty() {
        return users;
    }
    let index: HashMap<(u64, u64), usize> =
        files.iter().enumerate().map(|(at, file)| (file.id, at)).collect();
    let names: HashSet<&OsStr> = files.iter().map(|file| file.name.as_os_str()).collect();
    for (pid, folder) in folders() {
        for at in files_in(&folder, &names, &index) {
            if let Some(of_file) = users.get_mut(at) {
                add(of_file, pid);
            }
        }
    }
    users.iter_mut().for_each(|users| users.sort_unstable());
    users
}

/// The folders of each process whose links lead to its files, also to those that it only has mapped.
fn folders() -> impl Iterator<Item = (u32, PathBuf)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbered = entries.filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, entry.path()))
    });
    numbered.flat_map(|(pid, path)| ["fd", "map_files"].map(|folder| (pid, path.join(folder))))
}

fn add(users: &mut FileUsers, pid: u32) {
    if !users.contains(&pid) {
        users.push(pid);
    }
}

/// The memory of one array of the Python package: a memfd, which is in no directory, so that it is found at its users.
pub(crate) struct Array {
    pub(crate) len: u64,
    pub(crate) bytes: u64,
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) age: Duration,
    pub(crate) users: FileUsers,
}

/// The arrays of all processes that this user may look into, by their inodes.
pub(crate) fn arrays() -> BTreeMap<u64, Array> {
    let mut arrays = BTreeMap::new();
    let (now, name) = (SystemTime::now(), format!("/memfd:{ARRAY_MEMFD} (deleted)"));
    for (pid, folder) in folders() {
        for link in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if std::fs::read_link(link.path()).is_ok_and(|target| target == Path::new(&name))
                && let Ok(found) = std::fs::metadata(link.path())
            {
                let array = arrays.entry(found.ino()).or_insert_with(|| Array {
                    len: found.len(),
                    bytes: found.blocks() * 512,
                    user: found.uid(),
                    group: found.gid(),
                    age: found
                        .modified()
                        .ok()
                        .and_then(|then| now.duration_since(then).ok())
                        .unwrap_or_default(),
                    users: FileUsers::new(),
                });
                add(&mut array.users, pid);
            }
        }
    }
    arrays
}

/// The directory may have another path where the process is, so names are compared first. Files with others are not asked: they
/// may be on a file system that does not answer.
fn files_in(folder: &Path, names: &HashSet<&OsStr>, index: &HashMap<(u64, u64), usize>) -> Vec<usize> {
    let links = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let identify = |link: std::fs::DirEntry| {
        let target = std::fs::read_link(link.path()).ok()?;
        let name = name_of(&target)?;
        if !names.contains(name) && !is_unnamed(name, index) {
            return None;
        }
        let found = std::fs::metadata(link.path()).ok()?;
        index.get(&(found.dev(), found.ino())).copied()
    };
    links.filter_map(identify).collect()
}

/// The name of a file in a link of `/proc`, which says of a removed one that it is.
fn name_of(path: &Path) -> Option<&OsStr> {
    let name = path.file_name()?.as_bytes();
    Some(OsStr::from_bytes(name.strip_suffix(b" (deleted)").unwrap_or(name)))
}

/// Whether it is the name of a file that was made without one (`O_TMPFILE`) and is one of these: `#` and its inode. Where the file
/// was opened as it was made, this stays its name in `/proc`.
fn is_unnamed(name: &OsStr, index: &HashMap<(u64, u64), usize>) -> bool {
    let inode = name.to_str().and_then(|name| name.strip_prefix('#')).and_then(|number| number.parse().ok());
    inode.is_some_and(|inode: u64| index.keys().any(|(_, known)| *known == inode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_with_names_of_the_directory_are_asked() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        for name in ["used", "unused"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        let _used = std::fs::File::open(dir.path().join("used")).unwrap();
        let files = shmesh::inspect::memory_files(dir.path()).unwrap();
        let is_user: Vec<_> = users(&files).iter().map(|users| users.contains(&std::process::id())).collect();
        let names: Vec<_> = files.iter().map(|file| file.name.to_str().unwrap()).collect();
        assert_eq!((names, is_user), (vec!["unused", "used"], vec![false, true]));
        // The file with another name is not looked at, though it would be found.
        let index = HashMap::from([(files[1].id, 1)]);
        let found =
            |name: &str| files_in(Path::new("/proc/self/fd"), &HashSet::from([OsStr::new(name)]), &index);
        assert_eq!(found("used"), [1]);
        assert!(found("unused").is_empty());
    }

    #[test]
    fn file_that_was_made_without_a_name_is_found() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let _leased = shmesh_sys::lease::create(&dir.path().join("made"), 0o600, 4096).unwrap();
        let files = shmesh::inspect::memory_files(dir.path()).unwrap();
        assert!(users(&files)[0].contains(&std::process::id()));
    }

    #[test]
    fn removed_file_has_its_name_still() {
        for (link, name) in [("/a/b", Some("b")), ("/a/b (deleted)", Some("b")), ("/", None)] {
            assert_eq!(name_of(Path::new(link)), name.map(OsStr::new));
        }
    }
}
