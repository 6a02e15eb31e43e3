//! Delays that double, with an upper limit, and begin again after a quiet time.

use std::time::Duration;

use tokio::time::Instant;

/// Delays of successive attempts.
#[derive(Debug)]
pub(super) struct Backoff {
    first: Duration,
    last: Duration,
    next: Duration,
    used: Option<Instant>,
    is_scheduled: bool,
}

impl Backoff {
    pub(super) fn new(first: Duration, last: Duration) -> Self {
        Self { first, last, next: first, used: None, is_scheduled: false }
    }

    /// The delay from now on. It begins again when it was not needed for twice the longest delay.
    pub(super) fn delay(&mut self) -> Duration {
        let now = Instant::now();
        if self.used.is_none_or(|used| now - used > 2 * self.last) {
            self.next = self.first;
        }
        let delay = self.next;
        self.used = Some(now + delay);
        self.next = (delay * 2).min(self.last);
        delay
    }

    /// The delay, unless an attempt is scheduled already.
    pub(super) fn schedule(&mut self) -> Option<Duration> {
        (!std::mem::replace(&mut self.is_scheduled, true)).then(|| self.delay())
    }

    /// An attempt begins: what happens from now on is the reason for another one.
    pub(super) fn begin(&mut self) {
        self.is_scheduled = false;
    }

    pub(super) fn reset(&mut self) {
        self.used = None;
    }
}

/// Up to a quarter more, so that the nodes of a cluster do not come back at the same time.
pub(super) fn with_jitter(delay: Duration) -> Duration {
    let random = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |now| now.subsec_micros() % 1000);
    delay + delay * random / 4000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn delays_double_until_it_is_quiet() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(3));
        let mut delays = || (0..4).map(|_| backoff.delay().as_secs()).collect::<Vec<_>>();
        assert_eq!(delays(), [1, 2, 3, 3]);
        tokio::time::advance(Duration::from_secs(8)).await;
        assert_eq!(delays(), [3, 3, 3, 3]);
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(delays(), [1, 2, 3, 3]);
        backoff.reset();
        assert_eq!(backoff.schedule().map(|delay| delay.as_secs()), Some(1));
        assert_eq!(backoff.schedule(), None);
        backoff.begin();
        assert_eq!(backoff.schedule().map(|delay| delay.as_secs()), Some(2));
        let delay = with_jitter(Duration::from_secs(4));
        assert!((4..5).contains(&delay.as_secs()), "{delay:?}");
    }
}
