//! Waiting for something on the cluster, with an end.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// What a look has found.
#[derive(Debug)]
pub(crate) enum PollResult<T> {
    There(T),
    /// Not yet, and what is there instead.
    NotYet(String),
    /// It will not come, and why.
    Never(String),
}

/// How long, and how often.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) limit: Duration,
    pub(crate) poll: Duration,
}

impl Pace {
    /// Looks until it is there. A look that fails is one that found nothing: API servers restart.
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
    async fn it_waits_through_failures_and_ends_at_what_is_there() {
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
    async fn it_says_what_it_saw_last() {
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
