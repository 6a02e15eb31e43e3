//! [`Handle`]: a participant of a link, shared by all that Python has of it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::fork::ForkGuard;

/// A participant of a link, which one thread uses at a time.
#[derive(Debug)]
pub(crate) struct Handle {
    link: Mutex<shmesh::Link>,
    /// Number of released messages after which to post, for senders that wait for buffers; 0 for never.
    post_after: AtomicUsize,
    /// Number of messages released since the last post. Changed under the lock.
    unposted: AtomicUsize,
    /// Whether each released message is notified of, for a writer that waits for room.
    notify_releases: AtomicBool,
    /// Waits without the lock, so that other threads can release messages meanwhile.
    waiter: shmesh::Waiter,
    /// Whether waiting threads must stop.
    closed: AtomicBool,
    /// Whether batches can no longer be sent, because consumers may have seen the end of the queue.
    finished: AtomicBool,
    made: ForkGuard,
}

impl Handle {
    pub(crate) fn new(link: shmesh::Link) -> Self {
        Self {
            notify_releases: AtomicBool::new(false),
            waiter: link.waiter(),
            closed: AtomicBool::new(false),
            link: Mutex::new(link),
            post_after: AtomicUsize::new(0),
            unposted: AtomicUsize::new(0),
            finished: AtomicBool::new(false),
            made: ForkGuard::here(),
        }
    }

    pub(crate) fn post_releases(&self, after: usize) {
        self.post_after.store(after, Ordering::Relaxed);
    }

    pub(crate) fn notify_releases(&self) {
        self.notify_releases.store(true, Ordering::Relaxed);
    }

    /// Waits until `ready`, or until the timeout, a signal or [`stop_waiting`](Self::stop_waiting) may end the wait.
    pub(crate) fn wait_until(
        &self,
        timeout: Duration,
        ready: impl Fn(&shmesh::Link) -> bool,
    ) -> shmesh::Result<bool> {
        self.waiter.wait_until(Some(timeout), || self.closed.load(Ordering::SeqCst) || ready(&self.lock()))
    }

    /// Makes waiting threads return.
    pub(crate) fn stop_waiting(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.waiter.wake();
    }

    pub(crate) fn finish(&self) {
        self.finished.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Relaxed)
    }

    /// Counts a released message. Waking a sender for each buffer would cost more than it gains.
    pub(crate) fn released(&self) {
        let (notifies, after) =
            (self.notify_releases.load(Ordering::Relaxed), self.post_after.load(Ordering::Relaxed));
        // In a forked child the lock is a copy, which a thread of the parent may have held.
        if !notifies && after == 0 || !self.is_here() {
            return;
        }
        let link = self.lock();
        if notifies {
            // A writer that is not woken checks again within a second.
            let _ = link.notify();
        }
        if after > 0 && self.unposted.fetch_add(1, Ordering::Relaxed) + 1 >= after {
            self.post_now(&link);
        }
    }

    /// Posts once for each message released since the last time. Each post may wake another sender.
    pub(crate) fn post_now(&self, link: &shmesh::Link) {
        for _ in 0..self.unposted.swap(0, Ordering::Relaxed) {
            // On a link without notification, no sender waits for posts.
            let _ = link.post();
        }
    }

    pub(crate) fn is_here(&self) -> bool {
        self.made.is_here()
    }

    /// Do not wait for the interpreter while holding this lock: a thread with the interpreter may wait for the lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, shmesh::Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
