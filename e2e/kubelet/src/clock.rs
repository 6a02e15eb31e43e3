//! The clock of a node.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use tokio::time::Instant;

/// The clock for all timeouts of the fake kubelet, starting at zero. It follows tokio's clock: in a runtime with paused time it
/// stands still and jumps to the next timer.
#[derive(Clone, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Returns tokio's clock. Call it inside the runtime.
    pub fn runtime() -> Self {
        Self(Instant::now())
    }

    /// Returns the time since the clock was created.
    pub fn now(&self) -> Duration {
        self.0.elapsed()
    }

    /// Sleeps until the clock has advanced by `time`.
    pub fn sleep(&self, time: Duration) -> impl Future<Output = ()> + Send + use<> {
        tokio::time::sleep(time)
    }

    /// Returns the output of `work`, or `None` if the clock advances by `limit` first.
    pub async fn timeout<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        tokio::select! {
            biased;
            done = &mut work => Some(done),
            () = self.sleep(limit) => None,
        }
    }
}
