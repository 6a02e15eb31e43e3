//! Polling with a timeout.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// The result of one poll.
#[derive(Debug)]
pub(crate) enum PollResult<T> {
    There(T),
    /// Not yet reached, with a description of the current state.
    NotYet(String),
    /// Can never be reached, with the reason.
    Never(String),
}

/// Timeout and interval of polling.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) limit: Duration,
    pub(crate) poll: Duration,
}

impl Pace {
    /// Polls until the state is reached. Errors count as not reached, because API servers restart.
    pub(crate) async fn until<T>(
        self,
        what: &str,
        mut look: impl AsyncFnMut() -> Result<PollResult<T>>,
    ) -> Result<T> {
        let began = Instant::now();
        loop {
            let seen = match look().await {
                Ok(PollResult::There(found)) => return Ok(found),
                Ok(PollResult::Never(why)) => bail!("{what}: {why}"),
                Ok(PollResult::NotYet(seen)) => seen,
                Err(error) => format!("{error:#}"),
            };
            if began.elapsed() >= self.limit {
                let seconds = self.limit.as_secs();
                bail!("{what}: gave up after {seconds} s (--timeout-seconds); last seen: {seen}");
            }
            tokio::time::sleep(self.poll).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(limit: Duration) -> Pace {
        Pace { limit, poll: Duration::from_millis(1) }
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn polling_survives_failures() {
        let mut looks = vec![PollResult::There(7), PollResult::NotYet("nothing".into())];
        let mut fails = true;
        let found = pace(LONG).until("seven", async || {
            if std::mem::take(&mut fails) {
                bail!("the server is away");
            }
            Ok(looks.pop().unwrap())
        });
        assert_eq!(found.await.unwrap(), 7);
        assert!(looks.is_empty());
    }

    #[tokio::test]
    async fn timeout_reports_the_last_state() {
        let late = pace(Duration::ZERO)
            .until("a pod", async || Ok(PollResult::<()>::NotYet("Pending".into())))
            .await;
        assert_eq!(
            late.unwrap_err().to_string(),
            "a pod: gave up after 0 s (--timeout-seconds); last seen: Pending"
        );
        let away = pace(Duration::ZERO)
            .until("a pod", async || -> Result<PollResult<()>> { bail!("refused") })
            .await;
        assert!(away.unwrap_err().to_string().ends_with("last seen: refused"));
        let never = pace(LONG).until("a pod", async || Ok(PollResult::<()>::Never("it failed".into()))).await;
        assert_eq!(never.unwrap_err().to_string(), "a pod: it failed");
    }
}
