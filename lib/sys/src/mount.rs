//! The file system of a path, and its free space.

use std::path::Path;

use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};

use crate::errno::Errno;

/// The file systems that links can be on; others by their magic number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FsKind {
    /// A tmpfs file system.
    Tmpfs,
    /// A hugetlbfs file system.
    Hugetlbfs,
    /// Another type, by its magic number.
    Other(i64),
}

/// The result of `statfs(2)`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FileSystem {
    /// The type of the file system.
    pub kind: FsKind,
    /// Total bytes; 0 if a tmpfs has no limit.
    pub total_bytes: u64,
    /// Free bytes for this user.
    pub available_bytes: u64,
    /// Total inodes; 0 if a tmpfs has no limit.
    pub files: u64,
    /// Number of free inodes.
    pub files_free: u64,
}

/// Queries the file system of a path.
///
/// # Errors
/// The path does not exist.
pub fn file_system(path: &Path) -> Result<FileSystem, Errno> {
    let stat = statfs(path)?;
    let block = u64::try_from(stat.block_size()).map_err(|_| Errno::EOVERFLOW)?;
    let kind = match stat.filesystem_type() {
        TMPFS_MAGIC => FsKind::Tmpfs,
        HUGETLBFS_MAGIC => FsKind::Hugetlbfs,
        #[allow(clippy::unnecessary_cast, clippy::cast_lossless, reason = "musl has another type")]
        other => FsKind::Other(other.0 as i64),
    };
    Ok(FileSystem {
        kind,
        total_bytes: stat.blocks().saturating_mul(block),
        available_bytes: stat.blocks_available().saturating_mul(block),
        files: stat.files(),
        files_free: stat.files_free(),
    })
}

/// Free bytes for this user on the file system of `path`.
///
/// # Errors
/// The path does not exist.
pub fn free_bytes(path: &Path) -> Result<u64, Errno> {
    let stat = nix::sys::statvfs::statvfs(path)?;
    Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
}
