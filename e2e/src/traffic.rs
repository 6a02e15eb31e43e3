//! Message counts of `shmesh talk`, before and after a component is killed.

use anyhow::{Context, Result, ensure};

use crate::cluster::Cluster;
use crate::wait::PollResult;

/// Number of further messages that count as flowing.
const ENOUGH: u64 = 20;

/// The counts of a `talk` process since its start.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Count {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) lost_or_duplicate: u64,
}

impl Count {
    /// Parses the last count in a log.
    pub(crate) fn last(log: &str) -> Option<Self> {
        log.lines().rev().find_map(Self::parse)
    }

    fn parse(line: &str) -> Option<Self> {
        let line = line.strip_prefix("ended: ").unwrap_or(line);
        let (sent, line) = line.strip_prefix("sent ")?.split_once(", received ")?;
        let (received, lost_or_duplicate) = line.split_once(", lost or duplicate ")?;
        Some(Self {
            sent: sent.parse().ok()?,
            received: received.parse().ok()?,
            lost_or_duplicate: lost_or_duplicate.trim_end().parse().ok()?,
        })
    }
}

/// A `talk` process on the cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Talk<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) pod: &'a str,
    pub(crate) container: &'a str,
}

impl Talk<'_> {
    async fn count(&self, cluster: &Cluster, previous: bool) -> Result<Count> {
        let log = cluster.log(self.namespace, self.pod, self.container, previous).await?;
        Count::last(&log).with_context(|| format!("{}/{} has counted nothing yet", self.pod, self.container))
    }
}

/// Waits until every process has received more messages, and fails if any were lost.
pub(crate) async fn flows(cluster: &Cluster, talks: &[Talk<'_>]) -> Result<()> {
    let mut before = Vec::new();
    for talk in talks {
        // The first count is printed after a second.
        before.push(talk.count(cluster, false).await.unwrap_or_default());
        // Counts of the killed process, if there is one.
        if let Ok(last) = talk.count(cluster, true).await {
            let (pod, container) = (talk.pod, talk.container);
            ensure!(
                last.lost_or_duplicate == 0,
                "{pod}/{container} had lost messages when it was killed: {last:?}"
            );
        }
    }
    for (talk, before) in talks.iter().zip(before) {
        let what = format!("messages at {}/{}", talk.pod, talk.container);
        cluster
            .pace
            .until(&what, async || {
                let now = talk.count(cluster, false).await?;
                if now.lost_or_duplicate > 0 {
                    return Ok(PollResult::Never(format!(
                        "{} were lost or came twice: {now:?}",
                        now.lost_or_duplicate
                    )));
                }
                // A lower count means that the process was restarted.
                let since = now.received.checked_sub(before.received).unwrap_or(now.received);
                Ok(if since >= ENOUGH {
                    PollResult::There(())
                } else {
                    PollResult::NotYet(format!("{now:?}, before {before:?}"))
                })
            })
            .await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_count_is_parsed() {
        let count = |sent, received, lost_or_duplicate| Some(Count { sent, received, lost_or_duplicate });
        let log = "attached to radio as Primary, seat 0\nsent 50, received 49, lost or duplicate 0\n\
                   sent 100, received 99, lost or duplicate 2\nadmitted process 7 to 9 bytes\n";
        assert_eq!(Count::last(log), count(100, 99, 2));
        assert_eq!(Count::last("ended: sent 1, received 2, lost or duplicate 0"), count(1, 2, 0));
        for none in ["", "attached", "sent x, received 1, lost or duplicate 0", "sent 1, received 2"] {
            assert_eq!(Count::last(none), None, "{none}");
        }
    }
}
