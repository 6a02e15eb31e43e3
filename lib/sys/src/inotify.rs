//! Detecting that any process opens or closes a file, or changes the entries of a directory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};

/// A file or directory that a [`Watcher`] watches. Watches of the same file are equal.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct WatchedFile(WatchDescriptor);

/// An inotify instance, readable if watched files have been opened or closed.
///
/// ```
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("link.lock");
/// let file = std::fs::File::create(&path)?;
/// let watcher = shmesh_sys::inotify::Watcher::new()?;
/// let watched = watcher.add(&path)?;
/// drop(file); // here, or in any other process, however that ends
/// assert_eq!(watcher.touched()?, Some(vec![watched]));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Watcher(Inotify);

impl Watcher {
    /// Creates an inotify instance.
    ///
    /// # Errors
    /// This user has the maximum number of instances (`fs.inotify.max_user_instances`, 128 by default), or the process
    /// has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?))
    }

    /// Watches a file from now on.
    ///
    /// # Errors
    /// The file does not exist or cannot be read, or this user has the maximum number of watches
    /// (`fs.inotify.max_user_watches`).
    pub fn add(&self, path: &Path) -> io::Result<WatchedFile> {
        let flags = AddWatchFlags::IN_OPEN | AddWatchFlags::IN_CLOSE | AddWatchFlags::IN_DONT_FOLLOW;
        Ok(WatchedFile(self.0.add_watch(path, flags)?))
    }

    /// Watches a directory from now on: entries that appear, vanish or are renamed, and the directory itself. To add it again changes
    /// nothing.
    ///
    /// A directory that is deleted while another process or a mount uses it has no event for that, but for each of its last entries.
    ///
    /// # Errors
    /// The directory does not exist or cannot be read, or this user has the maximum number of watches.
    pub fn add_directory(&self, path: &Path) -> io::Result<WatchedFile> {
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        Ok(WatchedFile(self.0.add_watch(path, flags)?))
    }

    /// Stops watching a file.
    pub fn remove(&self, file: WatchedFile) {
        let _ = self.0.rm_watch(file.0);
    }

    /// The files and directories with events since the last call. `None` if the kernel has dropped events, so that it
    /// could be any file.
    ///
    /// # Errors
    /// Never fails in normal use.
    pub fn touched(&self) -> io::Result<Option<Vec<WatchedFile>>> {
        let mut files = Vec::new();
        match self.0.read_events() {
            Ok(events) if events.iter().any(|event| event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW)) => {
                return Ok(None);
            }
            Ok(events) => {
                files.extend(events.iter().map(|event| WatchedFile(event.wd)));
                files.dedup();
            }
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(Some(files))
    }
}

impl AsFd for Watcher {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
