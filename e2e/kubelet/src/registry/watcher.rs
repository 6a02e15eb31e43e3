//! Tracks sockets that are created and removed in a directory and its subdirectories.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, io};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use shmesh_daemon::descriptor::watched;
use tokio::io::unix::AsyncFd;

/// The sockets that exist, each with a number that changes when it is created again.
#[derive(Clone, Debug, Default)]
pub(super) struct Sockets(Arc<Mutex<(u64, BTreeMap<PathBuf, u64>)>>);

impl Sockets {
    pub(super) fn all(&self) -> BTreeMap<PathBuf, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    fn add(&self, path: PathBuf) {
        let mut sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.0 += 1;
        let made = sockets.0;
        sockets.1.insert(path, made);
    }

    fn remove(&self, path: &Path) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.remove(path);
    }
}

/// Keeps [`Sockets`] up to date by inotify.
#[derive(Debug)]
pub(super) struct Watcher {
    queue: Inotify,
    /// The same queue, registered with tokio.
    readiness: AsyncFd<OwnedFd>,
    dirs: Vec<(WatchDescriptor, PathBuf)>,
    sockets: Sockets,
}

impl Watcher {
    /// Watches `root`, and adds the sockets that exist in it.
    pub(super) fn new(root: &Path, sockets: Sockets) -> io::Result<Self> {
        fs::create_dir_all(root)?;
        let queue = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let readiness = watched(queue.as_fd().try_clone_to_owned()?)?;
        let mut watcher = Self { queue, readiness, dirs: Vec::new(), sockets };
        watcher.watch(root)?;
        Ok(watcher)
    }

    /// Handles the events of the directories; never returns.
    pub(super) async fn run(mut self) {
        loop {
            let events = {
                let Ok(mut ready) = self.readiness.readable().await else { return };
                match ready.try_io(|_| Ok(self.queue.read_events()?)) {
                    Ok(Ok(events)) => events,
                    Ok(Err(_)) | Err(_) => continue,
                }
            };
            for event in events {
                self.see(&event);
            }
        }
    }

    fn see(&mut self, event: &InotifyEvent) {
        let Some((_, dir)) = self.dirs.iter().find(|(watch, _)| *watch == event.wd) else { return };
        let Some(name) = &event.name else { return };
        let path = dir.join(name);
        if event.mask.intersects(AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO) {
            self.appeared(name, path);
        } else if event.mask.contains(AddWatchFlags::IN_DELETE) {
            self.sockets.remove(&path);
        }
    }

    fn appeared(&mut self, name: &OsStr, path: PathBuf) {
        if name.as_bytes().starts_with(b".") {
            return;
        }
        let Ok(meta) = fs::metadata(&path) else { return };
        if meta.is_dir() {
            let _ = self.watch(&path);
        } else if meta.file_type().is_socket() {
            self.sockets.add(path);
        }
    }

    /// Watches a directory and its subdirectories, and adds the sockets that exist in them.
    fn watch(&mut self, dir: &Path) -> io::Result<()> {
        let flags = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_DELETE;
        let watch = self.queue.add_watch(dir, flags)?;
        self.dirs.push((watch, dir.to_owned()));
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.watch(&entry.path())?;
            } else if kind.is_socket() {
                self.appeared(&entry.file_name(), entry.path());
            }
        }
        Ok(())
    }
}
