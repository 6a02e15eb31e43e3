//! The clock of a node: tokio's or a manual one.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// The clock for all timeouts of the fake kubelet, starting at zero.
///
/// [`Clock::runtime`] follows tokio's clock: in a runtime with paused time it stands still and jumps to the next timer.
/// [`Clock::manual`] moves only with its [`Hand`], independently of the runtime or process of the plugin.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    Runtime(Instant),
    Manual(watch::Receiver<Duration>),
}

/// Moves a manual [`Clock`]. When dropped, the clock stops for good.
#[derive(Debug)]
pub struct Hand(watch::Sender<Duration>);

impl Hand {
    /// Moves the clock forward and wakes sleeping tasks.
    pub fn advance(&self, by: Duration) {
        self.0.send_modify(|now| *now += by);
    }
}

impl Clock {
    /// Returns tokio's clock. Call it inside the runtime.
    pub fn runtime() -> Self {
        Self(Source::Runtime(Instant::now()))
    }

    /// Returns a clock that only moves with its hand.
    pub fn manual() -> (Self, Hand) {
        let (hand, clock) = watch::channel(Duration::ZERO);
        (Self(Source::Manual(clock)), Hand(hand))
    }

    /// Returns the time since the clock was created.
    pub fn now(&self) -> Duration {
        match &self.0 {
            Source::Runtime(start) => start.elapsed(),
            Source::Manual(now) => *now.borrow(),
        }
    }

    /// Sleeps until the clock has advanced by `time`.
    pub fn sleep(&self, time: Duration) -> impl Future<Output = ()> + Send + use<> {
        let (source, deadline) = (self.0.clone(), self.now() + time);
        async move {
            match source {
                Source::Runtime(start) => tokio::time::sleep_until(start + deadline).await,
                Source::Manual(mut now) => {
                    if now.wait_for(|now| *now >= deadline).await.is_err() {
                        std::future::pending().await
                    }
                }
            }
        }
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
