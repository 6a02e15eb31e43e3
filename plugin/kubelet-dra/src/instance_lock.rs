//! Excludes other instances of the driver on the node while this one works on claims.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};

/// Interval of attempts while another instance has the lock. Only a rolling update has two instances.
const RETRY: Duration = Duration::from_millis(20);
/// Longest wait for the lock. An instance that is stopped holds it until it is killed, and the kubelet gives up a call after 45 s.
const PATIENCE: Duration = Duration::from_secs(10);

/// A file lock that all calls of this instance share, and instances do not.
#[derive(Debug)]
pub(crate) struct InstanceLock {
    path: PathBuf,
    held: Mutex<Weak<File>>,
}

impl InstanceLock {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, held: Mutex::new(Weak::new()) }
    }

    /// Waits until no other instance has the lock, which is given back with the last clone of the returned value. Calls that
    /// wait together give up together.
    pub(crate) async fn acquire(&self) -> io::Result<Arc<File>> {
        let late = |_| {
            let text = format!("another instance has locked {} for {PATIENCE:?}", self.path.display());
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        timeout(PATIENCE, self.locked()).await.map_err(late)?
    }

    async fn locked(&self) -> io::Result<Arc<File>> {
        let mut held = self.held.lock().await;
        if let Some(file) = held.upgrade() {
            return Ok(file);
        }
        let file = open(&self.path)?;
        while !try_lock(&file)? {
            sleep(RETRY).await;
        }
        let file = Arc::new(file);
        *held = Arc::downgrade(&file);
        Ok(file)
    }
}

/// Opens a lock file, and creates it if there is none.
pub(crate) fn open(path: &std::path::Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// Takes the lock of an open file if no other process has it.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn calls_share_it_and_instances_do_not() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("serialize.lock");
        let one = InstanceLock::new(path.clone());
        let other = InstanceLock::new(path);
        let first = one.acquire().await.expect("the file can be opened");
        let second = one.acquire().await.expect("the same lock");
        drop(first);
        let waits = timeout(RETRY * 3, other.acquire()).await;
        assert!(waits.is_err(), "the second call of the first instance still has it");
        drop(second);
        other.acquire().await.expect("it is free");
        one.acquire().await.expect("it is free again");
    }

    #[tokio::test(start_paused = true)]
    async fn stopped_instance_does_not_block_others() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("serialize.lock");
        let stopped = open(&path).expect("the directory is writable");
        assert!(try_lock(&stopped).expect("the file system has locks"));
        let other = InstanceLock::new(path);
        let both = tokio::join!(other.acquire(), other.acquire());
        for outcome in [both.0, both.1] {
            let said = outcome.expect_err("it is locked").to_string();
            assert!(
                said.contains("another instance has locked") && said.contains("serialize.lock"),
                "{said}"
            );
        }
        drop(stopped);
        other.acquire().await.expect("it is free");
    }
}
