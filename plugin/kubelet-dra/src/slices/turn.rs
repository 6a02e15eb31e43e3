//! Which instance of a driver publishes: the one that started last.
//!
//! Two file locks decide. `publish.lock` is held by the instance that publishes. A newcomer holds `publish.next`
//! until it has the other one; that the lock is held tells the instance before it to stop. When an instance dies,
//! its locks are free, and one that had stopped goes on. Locks are looked at by sharing them, so that two looks
//! do not take each other for a newcomer.

use std::fs::{File, TryLockError};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::sleep;
use tracing::warn;

use crate::instance_lock::{open, try_lock};

/// Interval at which the locks are looked at.
const INTERVAL: Duration = Duration::from_millis(500);

/// The right to publish, among the instances of a driver on a node.
#[derive(Debug)]
pub(super) struct PublisherTurn {
    directory: PathBuf,
    is_newcomer: bool,
}

impl PublisherTurn {
    pub(super) fn new(directory: PathBuf) -> Self {
        Self { directory, is_newcomer: true }
    }

    /// Waits for the turn, which lasts as long as the file is open. Without it if the directory cannot be used: two
    /// publishing instances are better than none.
    pub(super) async fn take(&mut self) -> Option<File> {
        match self.wait().await {
            Ok(file) => Some(file),
            Err(error) => {
                warn!("{} cannot be locked against other instances: {error}", self.directory.display());
                None
            }
        }
    }

    async fn wait(&mut self) -> io::Result<File> {
        std::fs::create_dir_all(&self.directory)?;
        let (next, turn) = (self.next()?, open(&self.directory.join("publish.lock"))?);
        if std::mem::replace(&mut self.is_newcomer, false) {
            while !try_lock(&next)? {
                sleep(INTERVAL).await;
            }
            while !try_lock(&turn)? {
                sleep(INTERVAL).await;
            }
        } else {
            while is_locked(&next)? || !try_lock(&turn)? {
                sleep(INTERVAL).await;
            }
        }
        Ok(turn)
    }

    /// Waits until another instance wants the turn.
    pub(super) async fn until_wanted(&self) {
        loop {
            sleep(INTERVAL).await;
            // A lock that cannot be opened is one that no instance can want.
            if self.next().and_then(|next| is_locked(&next)).unwrap_or(false) {
                return;
            }
        }
    }

    fn next(&self) -> io::Result<File> {
        open(&self.directory.join("publish.next"))
    }
}

/// Whether another process holds the lock. The file is closed soon, and with it the share of the lock.
fn is_locked(file: &File) -> io::Result<bool> {
    match file.try_lock_shared() {
        Ok(()) => file.unlock().map(|()| false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}
