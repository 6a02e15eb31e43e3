//! Questions about the cluster, the plugin and its nodes.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use shmesh_injector::bytes_of;

use super::state::ClusterState;
use super::{
    CheckAnswer, Outcome, QuestionEntry, QuestionResult, count, failure, ok, skipped, some, warning,
};
use crate::pods::{condition, container_statuses, full_name, label, list, name, namespace, number, text};

/// The oldest Kubernetes that the chart supports, and the oldest with what the DRA driver needs.
const OLDEST: [u32; 2] = [31, 36];
/// How long a restart is reported.
const RECENT_HOURS: u64 = 24;

pub(super) const CLUSTER: [QuestionEntry; 4] = [
    ("api-server", "the API server answers and is supported", api_server),
    ("installation", "shmesh is installed, once for each domain", installation),
    ("pod-security", "the namespace of the installation admits privileged pods", pod_security),
    ("runtime", "the container runtime of each node has CDI", runtime),
];

pub(super) const PLUGIN: [QuestionEntry; 10] = [
    ("plugin-config", "the plugin's configuration is valid", plugin_config),
    ("plugin-scheduled", "each node has a pod of the plugin", plugin_scheduled),
    ("plugin-ready", "all pods of the plugin are ready", plugin_ready),
    ("plugin-rollout", "all pods of the plugin are of the current revision", plugin_rollout),
    ("plugin-restarts", "no container of the plugin restarted in the last 24 hours", plugin_restarts),
    ("plugin-groups", "the plugin is in the group of each pool", plugin_groups),
    ("plugin-rights", "the plugin has the rights that it needs", plugin_rights),
    ("node-pressure", "nodes with the plugin are ready and have memory", node_pressure),
    ("node-resources", "each node advertises the resources", node_resources),
    ("node-health", "all advertised devices are healthy", node_health),
];

fn api_server(state: &ClusterState) -> QuestionResult {
    let found = match state.objects.get("version") {
        Some(Ok(found)) => found,
        Some(Err(error)) => {
            return Err(failure(error, "choose a cluster by --context or --kubeconfig, and log in"));
        }
        None => &Vec::new(),
    };
    let version = found.first().ok_or_else(|| failure("it does not say its version", "check --context"))?;
    let shown = text(version, "/gitVersion");
    let minor = text(version, "/minor").trim_end_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0);
    let needed = OLDEST[usize::from(state.valid_plugin_config().is_ok_and(|config| config.is_dra))];
    if text(version, "/major") == "1" && minor < needed {
        return Err(failure(shown, format!("upgrade the cluster to Kubernetes 1.{needed} or later")));
    }
    Ok(ok(shown))
}

fn installation(state: &ClusterState) -> QuestionResult {
    let plugin = state.plugin()?;
    let version = label(plugin, "app.kubernetes.io/version");
    let others = state.all("daemonsets")?.iter().filter(|other| {
        label(other, "app.kubernetes.io/component") == "plugin" && full_name(other) != full_name(plugin)
    });
    let others: Vec<String> = others.map(full_name).collect();
    if !others.is_empty() {
        return Err(warning(
            format!("{}, and also {}", full_name(plugin), some(&others)),
            "give each release a domain (config.domain) and nodes (plugin.nodeSelector) of its own; --namespace chooses the one to check",
        ));
    }
    Ok(ok(format!("{}, version {version}", full_name(plugin))))
}

fn pod_security(state: &ClusterState) -> QuestionResult {
    let wanted = namespace(state.plugin()?);
    let found = state.all("namespaces")?.iter().find(|object| name(object) == wanted);
    let found =
        found.ok_or_else(|| failure(format!("there is no namespace {wanted}"), "run helm install again"))?;
    let remedy =
        format!("kubectl label --overwrite namespace {wanted} pod-security.kubernetes.io/enforce=privileged");
    match label(found, "pod-security.kubernetes.io/enforce") {
        "privileged" => Ok(ok(format!("namespace {wanted}"))),
        "" if plugin_ready(state).is_ok_and(|answer| answer.outcome == Outcome::Ok) => {
            Ok(ok(format!("namespace {wanted}, by the cluster's default")))
        }
        "" => Err(warning(
            format!("namespace {wanted} has no Pod Security level; the cluster's default applies"),
            remedy,
        )),
        level => Err(failure(format!("namespace {wanted} has the level {level}"), remedy)),
    }
}

fn runtime(state: &ClusterState) -> QuestionResult {
    if state.valid_plugin_config().is_ok_and(|config| !config.has_cdi) {
        return Ok(skipped("config.cdi.enabled is false"));
    }
    let (mut without, mut unsure) = (Vec::new(), Vec::new());
    let nodes = state.selected_nodes()?;
    for node in &nodes {
        let runtime = text(node, "/status/nodeInfo/containerRuntimeVersion");
        let (kind, version) = runtime.split_once("://").unwrap_or((runtime, ""));
        let mut numbers =
            version.trim_start_matches('v').split(['.', '-']).map(|part| part.parse().unwrap_or(0));
        let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        match kind {
            "containerd" if version >= (2, 0) => {}
            "cri-o" => {}
            "containerd" if version >= (1, 7) => unsure.push(format!("{}: {runtime}", name(node))),
            _ => without.push(format!("{}: {runtime}", name(node))),
        }
    }
    if !without.is_empty() {
        return Err(failure(
            some(&without),
            "upgrade to containerd 2.0 or CRI-O, or set config.cdi.enabled to false",
        ));
    }
    if !unsure.is_empty() {
        return Err(warning(
            some(&unsure),
            "make sure that the configuration of containerd 1.7 has enable_cdi = true",
        ));
    }
    Ok(ok(count(nodes.len(), "node")))
}

fn plugin_config(state: &ClusterState) -> QuestionResult {
    match state.plugin_config()? {
        Ok(config) if config.is_dra => Ok(ok(format!("mode dra, driver {}", config.domain))),
        Ok(config) => Ok(ok(format!("domain {}, {}", config.domain, count(config.pools.len(), "pool")))),
        Err(problems) => {
            Err(failure(problems, "correct the value config of the chart, and run helm upgrade"))
        }
    }
}

/// Names of the nodes on which the plugin has pods.
fn covered(state: &ClusterState) -> Result<BTreeSet<&str>, CheckAnswer> {
    let nodes = state.pods_of("plugin")?.into_iter().map(|pod| text(pod, "/spec/nodeName"));
    // A pod that waits for a node has none.
    Ok(nodes.filter(|node| !node.is_empty()).collect())
}

fn plugin_scheduled(state: &ClusterState) -> QuestionResult {
    let nodes = state.selected_nodes()?;
    if nodes.is_empty() {
        return Err(failure(
            "the plugin's nodeSelector selects no node",
            "change plugin.nodeSelector, or label nodes",
        ));
    }
    let covered = covered(state)?;
    let without: Vec<String> = nodes
        .iter()
        .map(|node| name(node).to_owned())
        .filter(|name| !covered.contains(name.as_str()))
        .collect();
    let desired = number(state.plugin()?, "/status/desiredNumberScheduled");
    if without.is_empty() {
        return Ok(ok(count(nodes.len(), "node")));
    }
    let seen = format!("no pod on {}", some(&without));
    if usize::try_from(desired).unwrap_or(0) <= covered.len() {
        return Err(warning(
            seen,
            "a taint, plugin.tolerations or plugin.affinity keeps it away: change them, or ignore this",
        ));
    }
    Err(failure(
        seen,
        format!(
            "kubectl describe daemonset --namespace {} {}",
            namespace(state.plugin()?),
            name(state.plugin()?)
        ),
    ))
}

/// Why a container does not run or is not ready; `None` if it is ready.
pub(super) fn trouble(status: &Value) -> Option<String> {
    if status.get("ready") == Some(&Value::Bool(true)) {
        return None;
    }
    let reason = ["/state/waiting", "/state/terminated", "/lastState/terminated"].iter().find_map(|path| {
        let state = status.pointer(path)?;
        let message = text(state, "/message");
        let separator = if message.is_empty() { "" } else { ": " };
        Some(format!("{}{separator}{message}", text(state, "/reason")))
    });
    Some(format!("{} {}", text(status, "/name"), reason.unwrap_or_else(|| "is not ready".to_owned())))
}

/// Pods whose containers are not ready, each with the reason.
fn not_ready(pods: &[&Value]) -> Vec<String> {
    let reason = |pod: &&Value| {
        let is_ready = condition(pod, "Ready").is_some_and(|(status, _)| status == "True");
        let of_container = || list(pod, "/status/containerStatuses").find_map(trouble);
        let node = text(pod, "/spec/nodeName");
        (!is_ready).then(|| {
            format!("{} on {node}: {}", name(pod), of_container().unwrap_or_else(|| "not ready".to_owned()))
        })
    };
    pods.iter().filter_map(reason).collect()
}

/// Whether all pods of a component are ready.
pub(super) fn pods_ready(state: &ClusterState, component: &str, container: &str) -> QuestionResult {
    let pods = state.pods_of(component)?;
    let bad = not_ready(&pods);
    if pods.is_empty() {
        return Err(failure(
            "there are no pods",
            format!("kubectl get events --namespace {}", namespace(state.plugin()?)),
        ));
    }
    if bad.is_empty() {
        return Ok(ok(count(pods.len(), "pod")));
    }
    Err(failure(
        some(&bad),
        format!(
            "kubectl logs --namespace {} POD --container {container}; /readyz of the pod says what it waits for",
            namespace(state.plugin()?)
        ),
    ))
}

fn plugin_ready(state: &ClusterState) -> QuestionResult {
    pods_ready(state, "plugin", "plugin")
}

fn plugin_rollout(state: &ClusterState) -> QuestionResult {
    let plugin = state.plugin()?;
    let (updated, desired) =
        (number(plugin, "/status/updatedNumberScheduled"), number(plugin, "/status/desiredNumberScheduled"));
    let is_seen = number(plugin, "/status/observedGeneration") >= number(plugin, "/metadata/generation");
    if is_seen && updated >= desired {
        return Ok(ok(format!("{updated} of {desired}")));
    }
    let status =
        format!("kubectl rollout status --namespace {} daemonset/{}", namespace(plugin), name(plugin));
    Err(warning(format!("{updated} of {desired}"), format!("an upgrade is under way or stuck: {status}")))
}

/// Whether containers restarted lately or restart all the time. A counter of restarts never goes back, so it says nothing about now.
pub(super) fn restarts(
    state: &ClusterState,
    pods: &[&Value],
    only: Option<&str>,
    remedy: &str,
) -> QuestionResult {
    let of_container = |pod: &Value, status: &Value| {
        let name = text(status, "/name");
        let last = |key| text(status, &format!("/lastState/terminated/{key}"));
        let end = last("finishedAt").parse().map_or(0, Timestamp::as_second);
        let is_recent = u64::try_from(end).unwrap_or(0) + RECENT_HOURS * 3600 > state.now;
        let is_looping = text(status, "/state/waiting/reason") == "CrashLoopBackOff";
        let is_asked = only.is_none_or(|only| only == name) && number(status, "/restartCount") > 0;
        (is_asked && (is_recent || is_looping)).then(|| {
            let (restarts, reason) = (number(status, "/restartCount"), last("reason"));
            format!("{} {name}: {restarts} times, {reason} at {}", full_name(pod), last("finishedAt"))
        })
    };
    let of_pod = |pod: &&Value| {
        container_statuses(pod).filter_map(|status| of_container(pod, status)).collect::<Vec<_>>()
    };
    let bad: Vec<String> = pods.iter().flat_map(of_pod).collect();
    if bad.is_empty() { Ok(ok("none")) } else { Err(warning(some(&bad), remedy)) }
}

fn plugin_restarts(state: &ClusterState) -> QuestionResult {
    let remedy = "kubectl logs --previous shows why; after OOMKilled raise plugin.resources";
    restarts(state, &state.pods_of("plugin")?, None, remedy)
}

fn plugin_groups(state: &ClusterState) -> QuestionResult {
    let config = state.valid_plugin_config()?;
    if config.pools.is_empty() {
        return Ok(skipped("no pools are configured"));
    }
    let groups = "/spec/template/spec/securityContext/supplementalGroups";
    let groups: Vec<u64> = list(state.plugin()?, groups).filter_map(Value::as_u64).collect();
    let missing: Vec<String> = config
        .pools
        .iter()
        .filter(|(_, gid)| !groups.contains(&u64::from(*gid)))
        .map(|(name, gid)| format!("{name}: {gid}"))
        .collect();
    if missing.is_empty() {
        return Ok(ok(count(config.pools.len(), "pool")));
    }
    Err(failure(
        some(&missing),
        "set config.pools[].gid, and run helm upgrade, which adds supplementalGroups",
    ))
}

/// Whether a service account is bound to a role whose name ends with `suffix`.
pub(super) fn is_bound(
    state: &ClusterState,
    kind: &'static str,
    account: &str,
    suffix: &str,
) -> Result<bool, CheckAnswer> {
    let of = namespace(state.plugin()?);
    Ok(state.all(kind)?.iter().any(|binding| {
        text(binding, "/roleRef/name").ends_with(suffix)
            && list(binding, "/subjects")
                .any(|subject| text(subject, "/name") == account && text(subject, "/namespace") == of)
    }))
}

fn plugin_rights(state: &ClusterState) -> QuestionResult {
    let plugin = state.plugin()?;
    let account = text(plugin, "/spec/template/spec/serviceAccountName");
    let has_node = |container: &str| {
        let found =
            list(plugin, "/spec/template/spec/containers").find(|one| text(one, "/name") == container);
        found
            .is_some_and(|found| list(found, "/env").any(|variable| text(variable, "/name") == "SHMESH_NODE"))
    };
    let is_dra = state.valid_plugin_config().is_ok_and(|config| config.is_dra);
    let wanted = [
        (has_node("plugin"), "rolebindings", "-plugin-events", "to create Events"),
        (has_node("identity"), "clusterrolebindings", "-plugin-pods", "to watch pods"),
        (is_dra, "clusterrolebindings", "-plugin-dra", "to read claims and write ResourceSlices"),
    ];
    let mut missing = Vec::new();
    for (is_wanted, kind, suffix, what) in wanted {
        if is_wanted && !is_bound(state, kind, account, suffix)? {
            missing.push(what.to_owned());
        }
    }
    if missing.is_empty() {
        return Ok(ok(format!("service account {account}")));
    }
    Err(failure(
        format!("service account {account} has no role {}", some(&missing)),
        "run helm upgrade again",
    ))
}

fn node_pressure(state: &ClusterState) -> QuestionResult {
    let covered = covered(state)?;
    let nodes: Vec<&Value> =
        state.selected_nodes()?.into_iter().filter(|node| covered.contains(name(node))).collect();
    let trouble = |node: &&&Value| {
        let is = |kind| condition(node, kind).is_some_and(|(status, _)| status == "True");
        !is("Ready") || is("MemoryPressure")
    };
    let bad: Vec<String> = nodes.iter().filter(trouble).map(|node| name(node).to_owned()).collect();
    if bad.is_empty() {
        return Ok(ok(count(nodes.len(), "node")));
    }
    Err(warning(
        format!("not ready, or short of memory: {}", some(&bad)),
        "kubectl describe node; memory of links and pools is memory of the node: lower config.shm.budget, or remove unused links",
    ))
}

/// Amount of a resource of a node.
fn amount(node: &Value, kind: &str, resource: &str) -> u64 {
    node.pointer("/status").and_then(|status| status.get(kind)?.get(resource)).and_then(bytes_of).unwrap_or(0)
}

fn node_resources(state: &ClusterState) -> QuestionResult {
    let config = state.valid_plugin_config()?;
    if config.is_dra {
        return Ok(skipped("mode dra has ResourceSlices instead"));
    }
    let covered = covered(state)?;
    let wanted: Vec<String> =
        config.resources.iter().map(|name| format!("{}/{name}", config.domain)).collect();
    let missing = |node: &&Value| {
        let missing: Vec<String> =
            wanted.iter().filter(|resource| amount(node, "capacity", resource) == 0).cloned().collect();
        (covered.contains(name(node)) && !missing.is_empty())
            .then(|| format!("{} lacks {}", name(node), some(&missing)))
    };
    let bad: Vec<String> = state.selected_nodes()?.iter().filter_map(missing).collect();
    if bad.is_empty() {
        return Ok(ok(some(&wanted)));
    }
    Err(failure(
        some(&bad),
        "the plugin is not registered with the kubelet: read its log, and check that the kubelet runs",
    ))
}

fn node_health(state: &ClusterState) -> QuestionResult {
    let prefix = format!("{}/", state.domain()?);
    let mut bad = Vec::new();
    for node in state.selected_nodes()? {
        let resources = node.pointer("/status/capacity").and_then(Value::as_object);
        for resource in
            resources.into_iter().flatten().map(|(key, _)| key).filter(|key| key.starts_with(&prefix))
        {
            let (all, good) = (amount(node, "capacity", resource), amount(node, "allocatable", resource));
            if good < all {
                bad.push(format!("{}: {} of {all} {resource} are unhealthy", name(node), all - good));
            }
        }
    }
    if bad.is_empty() {
        return Ok(ok("all"));
    }
    Err(warning(
        some(&bad),
        "kubectl describe node shows the Event with the reason: a full or removed directory, or a device",
    ))
}
