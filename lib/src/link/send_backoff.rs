//! The pauses of a sender in a tokio task that waits for room.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// How often a sender yields to other tasks before it sleeps for room.
const YIELDS: u32 = 8;
/// How long a sender sleeps before it checks for room again, at first and at most. Receivers do not wake senders, so that
/// releasing a message costs them nothing.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(16);

/// The time at which a sender checks for room again.
#[derive(Debug, Default)]
pub(super) struct SendBackoff {
    attempts: u32,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl SendBackoff {
    /// Ready when it is time to check again.
    pub(super) fn poll_pause(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(sleep) = &mut self.sleep {
            ready!(sleep.as_mut().poll(cx));
            self.sleep = None;
            return Poll::Ready(());
        }
        self.attempts += 1;
        let Some(slept) = self.attempts.checked_sub(YIELDS) else {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        };
        let pause = PAUSE_MIN.saturating_mul(1 << slept.min(10)).min(PAUSE_MAX);
        let sleep = self.sleep.insert(Box::pin(tokio::time::sleep_until(Instant::now() + pause)));
        let elapsed = sleep.as_mut().poll(cx);
        if elapsed.is_ready() {
            self.sleep = None;
        }
        elapsed
    }
}
