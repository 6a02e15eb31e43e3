//! Hand-over between two instances of the plugin on a node, so that a rolling update leaves no gap.
//!
//! Three locked files say who does what. The kernel unlocks the files of a process that ends, however it ends.
//!
//! | lock | held by |
//! |---|---|
//! | owner | the instance that writes: CDI files, pools, garbage collection |
//! | successor | an instance that wants to take over, until the kubelet has its devices |
//! | predecessor | an instance that no longer writes, until it has ended its service |
//!
//! 1. The newcomer locks `successor`.
//! 2. The owner sees that, locks `predecessor`, finishes what it writes, and unlocks `owner`. It answers the kubelet as before.
//! 3. The newcomer locks `owner`, registers with the kubelet, and unlocks `successor`.
//! 4. The predecessor ends its service, and unlocks `predecessor`. The newcomer registers again, because kubelets up to 1.36 can
//!    forget it in this moment.
//!
//! If the newcomer ends before step 4, `successor` and `owner` are unlocked, and the predecessor is the owner again. If
//! the predecessor ends, the newcomer has all that it waits for.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow};
use shmesh_sys::file::{Locked, open_lock_file};
use tokio::sync::{OwnedRwLockReadGuard, RwLock, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::{info, warn};

/// Interval at which the locks are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Time that an owner has to hand over. Earlier versions never do.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest time in which the kubelet notices that the predecessor's sockets are gone.
pub(crate) const SETTLE: Duration = Duration::from_secs(5);
/// Looks at the owner's lock that find it free before a retired instance gives up.
const ABANDONED_LOOKS: u32 = 40;

/// The part of this instance on its node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum HandoverRole {
    /// Owner, while the predecessor still serves.
    Successor,
    /// Owner, and the only instance.
    Owner,
    /// Serves, and writes nothing: the successor is about to register.
    Released,
    /// Serves no more: the successor has registered.
    Retired,
}

/// The role of this instance, and the tasks that depend on it.
#[derive(Clone, Debug)]
pub(crate) struct Ownership {
    role: watch::Sender<HandoverRole>,
    writers: Arc<RwLock<()>>,
    services: TaskTracker,
}

impl Ownership {
    pub(crate) fn new(role: HandoverRole) -> Self {
        Self { role: watch::Sender::new(role), writers: Arc::default(), services: TaskTracker::new() }
    }

    /// Subscribes to the role.
    pub(crate) fn role(&self) -> watch::Receiver<HandoverRole> {
        self.role.subscribe()
    }

    /// Waits until this instance may write. It remains the owner until the guard is dropped.
    pub(crate) async fn write(&self) -> OwnedRwLockReadGuard<()> {
        self.guard(|role| matches!(role, HandoverRole::Successor | HandoverRole::Owner)).await
    }

    /// Waits until this instance may remove what no pod uses, which requires that no other instance serves.
    pub(crate) async fn collect(&self) -> OwnedRwLockReadGuard<()> {
        self.guard(|role| role == HandoverRole::Owner).await
    }

    async fn guard(&self, may: impl Fn(HandoverRole) -> bool) -> OwnedRwLockReadGuard<()> {
        let mut role = self.role();
        loop {
            // This value has the sender, so that waiting cannot fail.
            let _ = role.wait_for(|role| may(*role)).await;
            let guard = Arc::clone(&self.writers).read_owned().await;
            if may(*role.borrow()) {
                return guard;
            }
        }
    }

    /// Returns a token that a service holds until it has ended.
    pub(crate) fn service(&self) -> TaskTrackerToken {
        self.services.token()
    }
}

/// One of the three locks.
#[derive(Clone, Copy, Debug)]
enum HandoverLock {
    Owner,
    Successor,
    Predecessor,
}

/// The lock files of a domain.
#[derive(Debug)]
struct Locks {
    directory: PathBuf,
    domain: String,
}

impl Locks {
    fn try_lock(&self, lock: HandoverLock) -> io::Result<Option<Locked>> {
        let name = match lock {
            // The name that versions without hand-over use.
            HandoverLock::Owner => format!(".{}.lock", self.domain),
            HandoverLock::Successor => format!(".{}.successor.lock", self.domain),
            HandoverLock::Predecessor => format!(".{}.predecessor.lock", self.domain),
        };
        match Locked::try_lock(open_lock_file(&self.directory.join(name), 0o600)?) {
            Ok(locked) => Ok(Some(locked)),
            Err((_, error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err((_, error)) => Err(error),
        }
    }

    fn is_held(&self, lock: HandoverLock) -> io::Result<bool> {
        Ok(self.try_lock(lock)?.is_none())
    }
}

/// The locks that this instance holds.
#[derive(Debug)]
pub(crate) struct HandOver {
    locks: Locks,
    owner: Option<Locked>,
    successor: Option<Locked>,
    predecessor: Option<Locked>,
    ownership: Ownership,
}

impl HandOver {
    /// Waits until this instance is the owner. Calls `replace` if the owner does not hand over, so that it must be stopped first.
    pub(crate) async fn take(directory: &Path, domain: &str, replace: impl FnOnce()) -> io::Result<Self> {
        let locks = Locks { directory: directory.to_owned(), domain: domain.to_owned() };
        let began = Instant::now();
        let (mut replace, mut is_logged, mut successor) = (Some(replace), false, None);
        loop {
            if successor.is_none() {
                // One hand-over at a time.
                successor = locks.try_lock(HandoverLock::Successor)?;
                if locks.is_held(HandoverLock::Predecessor)? {
                    successor = None;
                }
            }
            if successor.is_some()
                && let Some(owner) = locks.try_lock(HandoverLock::Owner)?
            {
                let has_predecessor = locks.is_held(HandoverLock::Predecessor)?;
                let role = if has_predecessor { HandoverRole::Successor } else { HandoverRole::Owner };
                let ownership = Ownership::new(role);
                return Ok(Self { locks, owner: Some(owner), successor, predecessor: None, ownership });
            }
            if !std::mem::replace(&mut is_logged, true) {
                info!(domain, "another instance of the plugin serves this node; waiting until it hands over");
            }
            if began.elapsed() >= PATIENCE
                && let Some(replace) = replace.take()
            {
                warn!(
                    domain,
                    directory = %locks.directory.display(),
                    "another instance of the plugin holds the lock and does not hand over, as older versions do: stop it. \
                     This instance is ready to take over, and until it does, pods that request resources of this node can fail"
                );
                replace();
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    pub(crate) fn ownership(&self) -> &Ownership {
        &self.ownership
    }

    /// Hands over to the next instance, and returns an error when that has ended. `served` is cancelled when the kubelet has the
    /// devices of this instance, and `settle` is the time in which it notices that the predecessor's sockets are gone.
    pub(crate) async fn run(mut self, served: CancellationToken, settle: Duration) -> anyhow::Error {
        let mut abandoned = 0;
        loop {
            if self.successor.is_some() {
                served.cancelled().await;
                self.successor = None;
            }
            sleep(POLL_INTERVAL).await;
            let role = *self.ownership.role.borrow();
            let outcome = match role {
                HandoverRole::Successor => self.follow_predecessor(settle).await,
                HandoverRole::Owner => self.look_for_successor().await,
                HandoverRole::Released => self.follow_successor().await,
                HandoverRole::Retired => self.look_for_owner(&mut abandoned),
            };
            match outcome {
                Ok(()) => {}
                Err(error) if role == HandoverRole::Retired => return error,
                Err(error) => warn!(error = format!("{error:#}"), "cannot look at the locks of the plugin"),
            }
        }
    }

    async fn follow_predecessor(&self, settle: Duration) -> Result<()> {
        if !self.locks.is_held(HandoverLock::Predecessor)? {
            sleep(settle).await;
            info!("the previous instance of the plugin has ended its service");
            self.ownership.role.send_replace(HandoverRole::Owner);
        }
        Ok(())
    }

    async fn look_for_successor(&mut self) -> Result<()> {
        if !self.locks.is_held(HandoverLock::Successor)? {
            return Ok(());
        }
        let Some(predecessor) = self.locks.try_lock(HandoverLock::Predecessor)? else { return Ok(()) };
        self.predecessor = Some(predecessor);
        self.ownership.role.send_replace(HandoverRole::Released);
        drop(self.ownership.writers.write().await);
        self.owner = None;
        info!("handed over to another instance of the plugin; serving until it is registered");
        Ok(())
    }

    async fn follow_successor(&mut self) -> Result<()> {
        let Some(successor) = self.locks.try_lock(HandoverLock::Successor)? else { return Ok(()) };
        if let Some(owner) = self.locks.try_lock(HandoverLock::Owner)? {
            self.owner = Some(owner);
            warn!("the new instance ended during the handover; this instance continues to serve");
            self.ownership.role.send_replace(HandoverRole::Owner);
        } else {
            drop(successor);
            info!("another instance of the plugin has taken over; this one waits until it is stopped");
            self.ownership.role.send_replace(HandoverRole::Retired);
            self.ownership.services.close();
            self.ownership.services.wait().await;
        }
        self.predecessor = None;
        Ok(())
    }

    fn look_for_owner(&self, abandoned: &mut u32) -> Result<()> {
        *abandoned = if self.locks.is_held(HandoverLock::Owner).unwrap_or(true) { 0 } else { *abandoned + 1 };
        if *abandoned < ABANDONED_LOOKS {
            return Ok(());
        }
        Err(anyhow!("the instance of the plugin that took over has ended: this one starts again"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct PluginInstance {
        ownership: Ownership,
        served: CancellationToken,
        task: tokio::task::JoinHandle<anyhow::Error>,
    }

    async fn take(directory: &Path) -> PluginInstance {
        let taken = HandOver::take(directory, "shmesh.io", || {}).await.expect("the directory is writable");
        let (ownership, served) = (taken.ownership().clone(), CancellationToken::new());
        let task = tokio::spawn(taken.run(served.clone(), SETTLE));
        PluginInstance { ownership, served, task }
    }

    impl PluginInstance {
        async fn becomes(&self, role: HandoverRole) {
            self.ownership.role().wait_for(|now| *now == role).await.expect("it lives");
        }

        /// Ends as a crash does: all locks are free at once.
        async fn crash(self) {
            self.task.abort();
            let _ = self.task.await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn instance_hands_over_and_retires_when_the_next_one_is_served() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let first = take(dir.path()).await;
        first.becomes(HandoverRole::Owner).await;
        first.served.cancel();
        let service = first.ownership.service();
        let second = take(dir.path()).await;
        assert_eq!(*first.ownership.role().borrow(), HandoverRole::Released);
        assert_eq!(*second.ownership.role().borrow(), HandoverRole::Successor);
        sleep(POLL_INTERVAL * 8).await;
        assert_eq!(*first.ownership.role().borrow(), HandoverRole::Released, "the second is not served yet");
        second.served.cancel();
        first.becomes(HandoverRole::Retired).await;
        sleep(SETTLE * 2).await;
        assert_eq!(*second.ownership.role().borrow(), HandoverRole::Successor, "the first still serves");
        drop(service);
        second.becomes(HandoverRole::Owner).await;
        // The first one starts again when there is no other any more.
        second.crash().await;
        let said = first.task.await.expect("it ends");
        assert!(said.to_string().contains("this one starts again"), "{said}");
    }

    #[tokio::test(start_paused = true)]
    async fn crash_of_either_instance_leaves_one_owner() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let first = take(dir.path()).await;
        first.served.cancel();
        // The successor dies as the owner, before it is served.
        take(dir.path()).await.crash().await;
        first.becomes(HandoverRole::Owner).await;
        // The predecessor dies before the successor is served, and after.
        let second = take(dir.path()).await;
        first.crash().await;
        second.becomes(HandoverRole::Successor).await;
        second.served.cancel();
        second.becomes(HandoverRole::Owner).await;
        let third = take(dir.path()).await;
        third.served.cancel();
        second.becomes(HandoverRole::Retired).await;
        second.crash().await;
        third.becomes(HandoverRole::Owner).await;
    }

    #[tokio::test(start_paused = true)]
    async fn owner_finishes_what_it_writes_before_it_hands_over() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let first = take(dir.path()).await;
        first.served.cancel();
        let writing = first.ownership.write().await;
        let mut second = tokio::spawn({
            let path = dir.path().to_owned();
            async move { take(&path).await }
        });
        let early = tokio::time::timeout(PATIENCE, &mut second).await;
        assert!(early.is_err(), "it has not finished");
        drop(writing);
        let _second = second.await.expect("it takes over");
        let late = tokio::time::timeout(PATIENCE, first.ownership.write()).await;
        assert!(late.is_err(), "the first one must not write any more");
    }

    #[tokio::test(start_paused = true)]
    async fn older_version_is_waited_for_and_must_be_replaced() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let locks = Locks { directory: dir.path().to_owned(), domain: "shmesh.io".into() };
        let old = locks.try_lock(HandoverLock::Owner).expect("the directory is writable");
        let asked = CancellationToken::new();
        let taking = HandOver::take(dir.path(), "shmesh.io", || asked.cancel());
        let mut taking = std::pin::pin!(taking);
        tokio::select! {
            _ = &mut taking => panic!("the old one has the lock"),
            () = asked.cancelled() => {}
        }
        drop(old);
        let taken = taking.await.expect("the directory is writable");
        assert_eq!(*taken.ownership().role().borrow(), HandoverRole::Owner, "and it has no predecessor");
    }
}
