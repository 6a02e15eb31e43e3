//! A node of the cluster: a pod of ours looks at it, or kills something there.

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Node;
use serde_json::json;

use crate::pods;
use crate::scenarios::Setup;
use crate::wait::PollResult;

const KILL: &str = include_str!("../pods/kill.sh");
const LEFT: &str = include_str!("../pods/left.sh");

/// What may be on a node after the release is gone: containers that start again need it. See docs/operations.md.
const MAY_STAY: &str = "/run/cdi/shmesh";

/// Runs a script on a node to its end; its log, also when it fails.
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

/// Kills the kubelet. Who sees that the pod has ended is the next one.
pub(crate) async fn kill_kubelet(setup: &Setup<'_>, node: &str) -> Result<()> {
    run(setup, node, KILL, &["process", "kubelet"])
        .await
        .map(drop)
        .context("where the kubelet is part of another process (k3s), this cannot be tried")
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

/// Says what should not be there when the release is gone.
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
        bail!("the look at node {node} was cut short: {said}");
    }
    Ok(said.lines().filter_map(|line| line.strip_prefix("left ")).map(str::to_owned).collect())
}

/// How much of our resources a node has for pods, by name.
pub(crate) fn allocatable(node: &Node) -> Vec<(String, u64)> {
    let all = node.status.iter().flat_map(|status| status.allocatable.iter().flatten());
    let ours = all.filter(|(name, _)| name.starts_with("shmesh.io/"));
    ours.map(|(name, count)| (name.clone(), count.0.parse().unwrap_or(0))).collect()
}

/// Nodes with a plugin.
pub(crate) async fn with_plugin(setup: &Setup<'_>) -> Result<Vec<String>> {
    let plugins = setup.cluster.pods(&setup.release.namespace, PLUGIN).await?;
    plugins.iter().map(|pod| pods::node(pod).map(str::to_owned)).collect()
}

pub(crate) const PLUGIN: &str = "app.kubernetes.io/component=plugin";

/// Waits until a node has some of each of these.
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

/// Waits until a node has none of ours.
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
