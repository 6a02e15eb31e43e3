//! The bell of a handle in a tokio runtime, shared by all tasks that wait on it.
//!
//! A signal does not say for which task it is. So the task that consumes signals wakes the others. Each task registers
//! before it checks its condition, and so misses no signal.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use tokio::io::unix::AsyncFd;

use super::bell::HandleBell;
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering};

/// A registration of at most one task that waits on a shared bell.
#[derive(Debug)]
pub(super) struct AsyncWaiter {
    bell: Arc<AsyncBell>,
    number: u64,
}

#[derive(Debug)]
struct AsyncBell {
    fd: AsyncFd<BellFd>,
    waiters: Arc<Waiters>,
    /// Wakes all registered tasks.
    waker: Waker,
    next_number: AtomicU64,
}

/// The descriptor of a bell, which stays open as long as this lives.
#[derive(Debug)]
struct BellFd(Arc<HandleBell>, RawFd);

impl AsRawFd for BellFd {
    fn as_raw_fd(&self) -> RawFd {
        self.1
    }
}

#[derive(Debug, Default)]
struct Waiters(Mutex<BTreeMap<u64, Waker>>);

impl Waiters {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Waker>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the waker of a task. Returns `true` if it was not stored yet; then the caller must check once more before it
    /// waits.
    fn register(&self, number: u64, waker: &Waker) -> bool {
        let mut wakers = self.lock();
        match wakers.get_mut(&number) {
            Some(known) => {
                known.clone_from(waker);
                false
            }
            None => {
                wakers.insert(number, waker.clone());
                true
            }
        }
    }
}

impl Wake for Waiters {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let wakers = std::mem::take(&mut *self.lock());
        wakers.into_values().for_each(Waker::wake);
    }
}

impl AsyncWaiter {
    /// Registers a bell whose descriptor was handed out with the runtime of the calling task.
    pub(super) fn new(bell: &Arc<HandleBell>) -> Result<Self> {
        let fd = bell.fd()?.as_raw_fd();
        #[expect(
            unsafe_code,
            reason = "tokio requires that a descriptor refers to the same file while it is registered"
        )]
        // SAFETY: the bell is closed only when the last reference to it is dropped.
        let registered = unsafe { AsyncFd::register(BellFd(Arc::clone(bell), fd)) };
        let fd = registered.map_err(|error| Error::system(bell.name(), "register the bell", error.into()))?;
        let waiters = Arc::new(Waiters::default());
        let waker = Waker::from(Arc::clone(&waiters));
        let bell = Arc::new(AsyncBell { fd, waiters, waker, next_number: AtomicU64::new(1) });
        Ok(Self { bell, number: 0 })
    }

    /// Another registration on the same bell.
    pub(super) fn another(&self) -> Self {
        let number = self.bell.next_number.fetch_add(1, Ordering::Relaxed);
        Self { bell: Arc::clone(&self.bell), number }
    }

    /// Ready when there may have been a signal since the last call; then check the task's condition again.
    pub(super) fn poll_signals(&self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let AsyncBell { fd, waiters, waker, .. } = &*self.bell;
        if waiters.register(self.number, cx.waker()) {
            return Poll::Ready(Ok(()));
        }
        let mut ready = ready!(fd.poll_read_ready(&mut Context::from_waker(waker)))
            .map_err(|error| Error::system(fd.get_ref().0.name(), "wait for the bell", error))?;
        // A peer that signals without end must not keep the task in this loop. The next call consumes the other signals.
        for _ in 0..1_000 {
            if ready.get_inner().0.take_signal()?.is_none() {
                ready.clear_ready();
                break;
            }
        }
        waiters.wake_by_ref();
        Poll::Ready(Ok(()))
    }
}

impl Drop for AsyncWaiter {
    fn drop(&mut self) {
        self.bell.waiters.lock().remove(&self.number);
    }
}
