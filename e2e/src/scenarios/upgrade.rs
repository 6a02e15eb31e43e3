//! Upgrades and rolls back the chart while pods exchange messages.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};

use crate::traffic::flows;
use crate::wait::PollResult;
use crate::{node, pods};

use super::{Setup, allocate, two_pods};

pub(super) async fn run(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    let on = two_pods::start(setup, namespace).await?;
    let restarts = setup.restarts(namespace).await?;
    let first = plugins(setup).await?;
    setup.release.upgrade().await?;
    let second = replaced(setup, &first).await.context("after the upgrade")?;
    goes_on(setup, namespace, &on).await.context("after the upgrade")?;
    setup.release.roll_back().await?;
    replaced(setup, &second).await.context("after the rollback")?;
    goes_on(setup, namespace, &on).await.context("after the rollback")?;
    let now = setup.restarts(namespace).await?;
    ensure!(now == restarts, "containers were restarted: {restarts:?}, then {now:?}");
    setup.start(pods::LATE, namespace, pods::succeeded).await.context("a pod that comes after it")
}

/// Returns the uids of the plugin pods.
pub(super) async fn plugins(setup: &Setup<'_>) -> Result<BTreeSet<String>> {
    let pods = setup.cluster.pods(&setup.release.namespace, node::PLUGIN).await?;
    Ok(pods.into_iter().filter_map(|pod| pod.metadata.uid).collect())
}

/// Waits until all plugin pods are replaced.
pub(super) async fn replaced(setup: &Setup<'_>, old: &BTreeSet<String>) -> Result<BTreeSet<String>> {
    let look = async || {
        let now = plugins(setup).await?;
        let is_done = now.len() == old.len() && now.is_disjoint(old);
        Ok(if is_done {
            PollResult::There(now)
        } else {
            PollResult::NotYet(format!("{now:?}, before {old:?}"))
        })
    };
    setup.cluster.pace.until("other plugins", look).await
}

async fn goes_on(setup: &Setup<'_>, namespace: &str, on: &str) -> Result<()> {
    flows(&setup.cluster, &two_pods::talks(namespace)).await?;
    node::advertises(setup, on, &allocate::ALL).await
}
