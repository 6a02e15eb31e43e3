//! Inspects a node, or kills processes on it, through a privileged pod.

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Node;
use serde_json::json;

use crate::pods;
use crate::scenarios::Setup;
use crate::wait::PollResult;

const KILL: &str = include_str!("../pods/kill.sh");
const LEFT: &str = include_str!("../pods/left.sh");

/// Files that may remain on a node after uninstalling, because restarting containers need them. See
/// docs/installing.md.
const MAY_STAY: &str = "/run/cdi/shmesh";

/// Runs a script on a node and returns its log, also if it fails.
async fn run(setup: &Setup<'_>, node: &str, script: &str, args: &[&str]) -> Result<String> {
    setup.tools.set(setup.tools.get() + 1);
    let name = format!("tool-{}", setup.tools.get());
    let namespace = &setup.release.namespace;
    let mut pod = pods::prepared(pods::TOOL, namespace, setup.args)?.remove(0);
    pod["metadata"]["name"] = name.clone().into();
    pod["spec"]["nodeName"] = node.into();
    pod["spec"]["containers"][0]["command"][2] = script.into();
    for arg in args {
        pod["spec"]["containers"][0]["command"]
            .as_array_mut()
            .context("the tool has no command")?
            .push(json!(arg));
    }
    setup.cluster.apply(&pod).await?;
    let what = format!("{args:?} on node {node} (pod {name})");
    let ended = async || Ok(pods::succeeded(setup.cluster.pod(namespace, &name).await?));
    let ended = setup.cluster.pace.until(&what, ended).await;
    let said = setup.cluster.log(namespace, &name, "tool", false).await.unwrap_or_default();
    match ended {
        Ok(_) => Ok(said),
        Err(error) => Err(error.context(format!("{what} said: {}", said.trim()))),
    }
}

/// Kills every process of a container.
pub(crate) async fn kill_container(setup: &Setup<'_>, node: &str, id: &str) -> Result<()> {
    run(setup, node, KILL, &["container", id]).await.map(drop)
}

/// Kills every process of several containers, in an order and with pauses that the seed determines.
pub(crate) async fn kill_together(setup: &Setup<'_>, node: &str, seed: u32, ids: &[String]) -> Result<()> {
    let seed = seed.to_string();
    let args: Vec<_> = ["together", &seed].into_iter().chain(ids.iter().map(String::as_str)).collect();
    run(setup, node, KILL, &args).await.map(drop)
}

/// Kills the kubelet. The next kubelet reports the end of the pod.
pub(crate) async fn kill_kubelet(setup: &Setup<'_>, node: &str) -> Result<()> {
    run(setup, node, KILL, &["process", "kubelet"]).await.map(drop).context(
        "if the kubelet is part of another process (k3s), this scenario cannot run: skip it with --only",
    )
}

/// Waits until the pools are empty.
pub(crate) async fn swept(setup: &Setup<'_>, node: &str) -> Result<()> {
    let left = left(setup, node, "60").await?;
    let in_pools: Vec<_> = left.iter().filter(|path| path.starts_with("/dev/shm/")).collect();
    if !in_pools.is_empty() {
        bail!("no pod has a pool on node {node}, and after 60 s there still are {in_pools:?}");
    }
    Ok(())
}

/// Reports files and sockets that should be gone after uninstalling.
pub(crate) async fn is_clean(setup: &Setup<'_>, node: &str) -> Result<()> {
    let mut left = left(setup, node, "0").await?;
    left.retain(|path| !path.contains(MAY_STAY));
    if !left.is_empty() {
        bail!("left on node {node}: {left:?}");
    }
    Ok(())
}

async fn left(setup: &Setup<'_>, node: &str, seconds: &str) -> Result<Vec<String>> {
    let said = run(setup, node, LEFT, &[seconds]).await?;
    if said.lines().last() != Some("looked") {
        bail!("the inspection of node {node} ended early: {said}");
    }
    Ok(said.lines().filter_map(|line| line.strip_prefix("left ")).map(str::to_owned).collect())
}

/// Returns the allocatable amount of each shmesh resource on a node.
pub(crate) fn allocatable(node: &Node) -> Vec<(String, u64)> {
    let all = node.status.iter().flat_map(|status| status.allocatable.iter().flatten());
    let ours = all.filter(|(name, _)| name.starts_with("shmesh.io/"));
    ours.map(|(name, count)| (name.clone(), count.0.parse().unwrap_or(0))).collect()
}

/// Returns the nodes with a plugin.
pub(crate) async fn with_plugin(setup: &Setup<'_>) -> Result<Vec<String>> {
    let plugins = setup.cluster.pods(&setup.release.namespace, PLUGIN).await?;
    plugins.iter().map(|pod| pods::node(pod).map(str::to_owned)).collect()
}

pub(crate) const PLUGIN: &str = "app.kubernetes.io/component=plugin";

/// Waits until a node has some of each of these resources.
pub(crate) async fn advertises(setup: &Setup<'_>, name: &str, wanted: &[&str]) -> Result<()> {
    let what = format!("{wanted:?} of node {name}");
    setup
        .cluster
        .pace
        .until(&what, async || {
            let node = named(setup, name).await?;
            let there = allocatable(&node);
            let has = |wanted: &&str| there.iter().any(|(name, count)| name == wanted && *count > 0);
            Ok(if wanted.iter().all(has) {
                PollResult::There(())
            } else {
                PollResult::NotYet(format!("{there:?}"))
            })
        })
        .await
}

/// Waits until a node has no shmesh resources.
pub(crate) async fn has_nothing(setup: &Setup<'_>, name: &str) -> Result<()> {
    let what = format!("no shmesh.io resources of node {name}");
    setup
        .cluster
        .pace
        .until(&what, async || {
            let there = allocatable(&named(setup, name).await?);
            let is_gone = there.iter().all(|(_, count)| *count == 0);
            Ok(if is_gone { PollResult::There(()) } else { PollResult::NotYet(format!("{there:?}")) })
        })
        .await
}

async fn named(setup: &Setup<'_>, name: &str) -> Result<Node> {
    let nodes = setup.cluster.nodes().await?;
    nodes
        .into_iter()
        .find(|node| node.metadata.name.as_deref() == Some(name))
        .with_context(|| format!("there is no node {name}"))
}
