//! Which processes have files open or mapped, as far as `/proc` shows them.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use shmesh::inspect::MemoryFile;

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
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // The links lead to the files themselves, also when they are mapped only.
        for folder in ["fd", "map_files"] {
            for at in files_in(&entry.path().join(folder), &index) {
                if let Some(of_file) = users.get_mut(at)
                    && !of_file.contains(&pid)
                {
                    of_file.push(pid);
                }
            }
        }
    }
    users.iter_mut().for_each(|users| users.sort_unstable());
    users
}

fn files_in(folder: &Path, index: &HashMap<(u64, u64), usize>) -> Vec<usize> {
    let links = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let identify = |link: std::fs::DirEntry| {
        let found = std::fs::metadata(link.path()).ok()?;
        index.get(&(found.dev(), found.ino())).copied()
    };
    links.filter_map(identify).collect()
}
