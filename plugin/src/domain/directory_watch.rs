//! Waits until entries of directories appear or vanish. Where inotify cannot be used, each second counts as a change.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use shmesh_daemon::descriptor;
use shmesh_sys::inotify::Watcher;
use tokio::io::unix::AsyncFd;
use tokio::time::sleep;
use tracing::warn;

/// Interval of changes where there is no watch.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time after a change for which others are awaited: a claim that is prepared makes several.
const SETTLE_TIME: Duration = Duration::from_millis(50);

/// A watch on directories and their parents, so that a directory that comes back is noticed.
#[derive(Debug)]
pub(super) struct DirectoryWatch {
    directories: Vec<PathBuf>,
    queue: Option<WatchQueue>,
    is_complete: bool,
}

#[derive(Debug)]
struct WatchQueue {
    watcher: Watcher,
    /// The same queue, registered with tokio.
    readiness: AsyncFd<OwnedFd>,
}

impl WatchQueue {
    fn new() -> io::Result<Self> {
        let watcher = Watcher::new()?;
        let readiness = descriptor::watched(watcher.as_fd().try_clone_to_owned()?)?;
        Ok(Self { watcher, readiness })
    }

    /// Watches a directory, if it exists, and its parent.
    fn add(&self, directory: &Path) -> io::Result<()> {
        if let Err(error) = self.watcher.add_directory(directory)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        self.watcher.add_directory(directory.parent().unwrap_or(directory)).map(drop)
    }

    async fn changed(&self) -> io::Result<()> {
        loop {
            let mut ready = self.readiness.readable().await?;
            if self.watcher.touched()?.is_none_or(|touched| !touched.is_empty()) {
                return Ok(());
            }
            ready.clear_ready();
        }
    }
}

impl DirectoryWatch {
    /// Changes count from now on.
    pub(super) fn new(directories: impl Into<Vec<PathBuf>>) -> Self {
        let queue = WatchQueue::new().inspect_err(|error| {
            warn!(
                %error,
                "directories are looked at once a second, because they cannot be watched: raise fs.inotify.max_user_instances"
            );
        });
        let mut watch = Self { directories: directories.into(), queue: queue.ok(), is_complete: false };
        watch.renew();
        watch
    }

    /// Watches directories that were made since.
    fn renew(&mut self) {
        let is_watched =
            |queue: &WatchQueue| self.directories.iter().all(|directory| queue.add(directory).is_ok());
        self.is_complete = self.queue.as_ref().is_some_and(is_watched);
    }

    /// Waits for a change after the last one, and may return without one.
    pub(super) async fn changed(&mut self) {
        // Until `renew` has run: a caller that gives up after the events were read looks again in a second.
        let was_complete = std::mem::replace(&mut self.is_complete, false);
        let watched = async {
            match &self.queue {
                Some(queue) if queue.changed().await.is_ok() => sleep(SETTLE_TIME).await,
                Some(_) => sleep(POLL_INTERVAL).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = watched => {}
            () = sleep(POLL_INTERVAL), if !was_complete => {}
        }
        self.renew();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Whether there is a change soon.
    async fn is_changed(watch: &mut DirectoryWatch) -> bool {
        tokio::time::timeout(Duration::from_millis(200), watch.changed()).await.is_ok()
    }

    #[tokio::test]
    async fn changes_of_directories_are_noticed_and_nothing_else() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let directory = root.path().join("claims");
        fs::create_dir(&directory).expect("it is new");
        let mut watch = DirectoryWatch::new([directory.clone()]);
        assert!(watch.is_complete, "or each second would be a change");
        fs::write(directory.join("draining"), "").expect("it is new");
        watch.changed().await;
        assert!(!is_changed(&mut watch).await, "one change is noticed once");
        fs::remove_file(directory.join("draining")).expect("it exists");
        watch.changed().await;
        fs::remove_dir(&directory).expect("it is empty");
        watch.changed().await;
        while is_changed(&mut watch).await {}
        // Its parent is watched, and it is watched again.
        fs::create_dir(&directory).expect("it is new");
        watch.changed().await;
        while is_changed(&mut watch).await {}
        fs::write(directory.join("draining"), "").expect("it is new");
        watch.changed().await;
    }

    #[tokio::test(start_paused = true)]
    async fn each_second_counts_without_inotify() {
        let mut watch = DirectoryWatch { directories: Vec::new(), queue: None, is_complete: false };
        let began = tokio::time::Instant::now();
        watch.changed().await;
        assert_eq!(began.elapsed(), POLL_INTERVAL);
    }
}
