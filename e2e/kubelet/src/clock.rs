//! Whose time it is: the runtime's, or the script's.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// The time that the double goes by, counted from the clock's making. Every timeout of the kubelet is measured with it.
///
/// [`Clock::runtime`] is tokio's clock, so it stands still, and jumps to the next timer, in a runtime whose time is paused.
/// [`Clock::manual`] moves only when its [`Hand`] does, whatever runtime or process the plugin is in.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use shmesh_fake_kubelet::Clock;
///
/// let (clock, hand) = Clock::manual();
/// let nap = clock.sleep(Duration::from_secs(300));
/// hand.advance(Duration::from_secs(301));
/// nap.await;
/// assert_eq!(clock.now(), Duration::from_secs(301));
/// # });
/// ```
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    Runtime(Instant),
    Manual(watch::Receiver<Duration>),
}

/// What moves a manual [`Clock`]. When it is dropped, time stands still for good.
///
/// ```
/// let (clock, hand) = shmesh_fake_kubelet::Clock::manual();
/// hand.advance(std::time::Duration::from_millis(5));
/// assert_eq!(clock.now().as_millis(), 5);
/// ```
#[derive(Debug)]
pub struct Hand(watch::Sender<Duration>);

impl Hand {
    /// Moves the clock forward and wakes who slept until then.
    pub fn advance(&self, by: Duration) {
        self.0.send_modify(|now| *now += by);
    }
}

impl Clock {
    /// Tokio's clock. To be made inside the runtime whose time it is to follow.
    pub fn runtime() -> Self {
        Self(Source::Runtime(Instant::now()))
    }

    /// A clock that stands still until its hand is moved.
    pub fn manual() -> (Self, Hand) {
        let (hand, clock) = watch::channel(Duration::ZERO);
        (Self(Source::Manual(clock)), Hand(hand))
    }

    /// How long ago, by its own count, the clock was made.
    pub fn now(&self) -> Duration {
        match &self.0 {
            Source::Runtime(start) => start.elapsed(),
            Source::Manual(now) => *now.borrow(),
        }
    }

    /// Ends when the clock has moved on by `time` since this call.
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

    /// What `work` returned, or `None` if the clock moved on by `limit` first.
    pub async fn timeout<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        tokio::select! {
            biased;
            done = &mut work => Some(done),
            () = self.sleep(limit) => None,
        }
    }
}
