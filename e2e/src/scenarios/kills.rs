//! Kills every component in turn while messages flow, then all processes of pods together, many times. No other component
//! restarts, no message is lost, and pods that start later get their resources.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::traffic::flows;
use crate::wait::PollResult;
use crate::{node, pods};

use super::{Setup, allocate, two_pods};

pub(super) async fn run(setup: &Setup<'_>, namespace: &str) -> Result<()> {
    let on = two_pods::start(setup, namespace).await?;
    for (pod, container) in [("phy", "shmesh"), ("mac", "mac"), ("phy", "phy")] {
        let killed = kill(setup, namespace, pod, container, &on).await;
        killed.with_context(|| format!("{pod}/{container} was killed"))?;
    }
    for container in ["plugin", "identity"] {
        let release = &setup.release.namespace;
        let plugins = setup.cluster.pods(release, node::PLUGIN).await?;
        let here = plugins.iter().find(|pod| pods::node(pod).is_ok_and(|node| node == on));
        let here = here.with_context(|| format!("there is no plugin on node {on}"))?;
        let killed = kill_of(setup, namespace, release, pods::name(here), container, &on).await;
        killed.with_context(|| format!("the container {container} of the plugin was killed"))?;
    }
    let before = setup.restarts(namespace).await?;
    node::kill_kubelet(setup, &on).await?;
    goes_on(setup, namespace, &on).await.context("the kubelet was killed")?;
    let after = setup.restarts(namespace).await?;
    ensure!(before == after, "the kubelet was killed, and containers restarted: {before:?}, then {after:?}");
    let mut late = pods::prepared(pods::LATE, namespace, setup.args)?.remove(0);
    let there = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [on]}]});
    let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [there]}});
    late["spec"]["affinity"] = json!({"nodeAffinity": required});
    setup.cluster.apply(&late).await?;
    setup.wait_for(namespace, "late", pods::succeeded).await?;
    for round in 1..=setup.args.kill_rounds {
        together(setup, namespace, round)
            .await
            .with_context(|| format!("round {round} of kills together"))?;
    }
    Ok(())
}

/// Kills all processes of one of the two pods, or of both, which run as different users. The pods are new, because a kubelet
/// restarts a container that has crashed before with a delay.
async fn together(setup: &Setup<'_>, namespace: &str, round: u32) -> Result<()> {
    for pod in ["phy", "mac"] {
        setup.cluster.delete_pod(namespace, pod).await?;
    }
    let on = two_pods::start(setup, namespace).await?;
    let victims: &[&str] = match round % 3 {
        0 => &["phy", "mac"],
        1 => &["phy"],
        _ => &["mac"],
    };
    let mut expected = setup.restarts(namespace).await?;
    let mut ids = Vec::new();
    for pod in victims {
        for container in pods::containers(&setup.cluster.pod(namespace, pod).await?) {
            ids.push(pods::container_id(container)?.to_owned());
            expected.insert(format!("{pod}/{}", container.name), container.restart_count + 1);
        }
    }
    node::kill_together(setup, &on, round, &ids).await?;
    let is_back = async || {
        let found = setup.restarts(namespace).await?;
        let mut ready = true;
        for pod in victims {
            ready &= pods::is_ready(&setup.cluster.pod(namespace, pod).await?);
        }
        let what = format!("restarts of containers are {found:?}, and should be {expected:?}");
        let is_over = found.iter().any(|(name, count)| expected.get(name).is_some_and(|most| count > most));
        Ok(match (found == expected, ready) {
            (true, true) => PollResult::There(()),
            (true, false) => PollResult::NotYet(format!("{what}; not all pods are ready")),
            (false, _) if is_over => PollResult::Never(what),
            (false, _) => PollResult::NotYet(what),
        })
    };
    let what = format!("{victims:?} after all their processes were killed");
    setup.cluster.pace.until(&what, is_back).await?;
    goes_on(setup, namespace, &on).await
}

async fn kill(setup: &Setup<'_>, namespace: &str, pod: &str, container: &str, on: &str) -> Result<()> {
    kill_of(setup, namespace, namespace, pod, container, on).await
}

/// Kills a container, waits for its restart, and checks all other components.
async fn kill_of(
    setup: &Setup<'_>,
    namespace: &str,
    of: &str,
    pod: &str,
    container: &str,
    on: &str,
) -> Result<()> {
    let mut expected = setup.restarts(namespace).await?;
    let victim = setup.cluster.pod(of, pod).await?;
    let status = pods::container(&victim, container)?;
    let restarts = status.restart_count + 1;
    node::kill_container(setup, on, pods::container_id(status)?).await?;
    let what = format!("{pod}/{container} after its restart");
    let is_back = async || is_back(&setup.cluster.pod(of, pod).await?, container, restarts);
    setup.cluster.pace.until(&what, is_back).await?;
    goes_on(setup, namespace, on).await?;
    if of == namespace {
        expected.insert(format!("{pod}/{container}"), restarts);
    }
    let found = setup.restarts(namespace).await?;
    ensure!(found == expected, "restarts of containers are {found:?}, and should be {expected:?}");
    Ok(())
}

fn is_back(pod: &Pod, container: &str, restarts: i32) -> Result<PollResult<()>> {
    let now = pods::container(pod, container)?;
    if now.restart_count > restarts {
        return Ok(PollResult::Never(format!("it was restarted more than once: {}", pods::describe(pod))));
    }
    let is_back = now.restart_count == restarts && now.ready && pods::is_ready(pod);
    Ok(if is_back { PollResult::There(()) } else { PollResult::NotYet(pods::describe(pod)) })
}

/// Checks that messages flow and that the node advertises all resources.
async fn goes_on(setup: &Setup<'_>, namespace: &str, on: &str) -> Result<()> {
    flows(&setup.cluster, &two_pods::talks(namespace)).await?;
    node::advertises(setup, on, &allocate::ALL).await
}
