//! A link between two pods through a pool.

use anyhow::{Result, ensure};

use crate::pods;
use crate::traffic::{Talk, flows};

use super::Setup;

/// Returns both ends of the link of `two-pods.yaml`.
pub(super) fn talks(namespace: &str) -> [Talk<'_>; 2] {
    [("phy", "phy"), ("mac", "mac")].map(|(pod, container)| Talk { namespace, pod, container })
}

/// Starts both pods, waits until messages flow, and returns their node.
pub(super) async fn start(setup: &Setup<'_>, namespace: &str) -> Result<String> {
    setup.start(pods::TWO_PODS, namespace, pods::ready).await?;
    let (phy, mac) = (setup.cluster.pod(namespace, "phy").await?, setup.cluster.pod(namespace, "mac").await?);
    let (of_phy, of_mac) = (pods::node(&phy)?, pods::node(&mac)?);
    ensure!(of_phy == of_mac, "the primary is on node {of_phy}, its secondary on {of_mac}");
    flows(&setup.cluster, &talks(namespace)).await?;
    Ok(of_phy.to_owned())
}

pub(super) async fn run(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    start(setup, namespace).await.map(drop)
}
