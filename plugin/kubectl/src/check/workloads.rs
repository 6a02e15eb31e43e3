//! Questions about pods with links.

use std::collections::BTreeMap;

use serde_json::Value;
use shmesh::Side;
use shmesh::config::Scope;

use super::injector::injector_config;
use super::installation::{restarts, trouble};
use super::state::ClusterState;
use super::{CheckAnswer, QuestionEntry, QuestionResult, count, failure, ok, some, warning};
use crate::pods::{
    condition, container_statuses, full_name, is_finished, label, links, namespace, sidecar, sidecar_status,
    text,
};

pub(super) const PODS: [QuestionEntry; 10] = [
    ("annotations", "the annotations of all pods are valid", annotations),
    ("pods-injected", "each pod that needs a sidecar for its links has one", injected),
    ("sidecars-ready", "all sidecars are ready", sidecars_ready),
    ("sidecars-restarts", "no sidecar restarted in the last 24 hours", sidecars_restarts),
    ("sidecars-image", "all sidecars have the configured image", sidecars_image),
    ("peers", "each link between pods has both sides", peers),
    ("pods-pending", "no pod waits for a resource", pending),
    ("pods-admitted", "no pod was refused by a node", admitted),
    ("pods-cdi", "no container fails to start for its devices", cdi),
    ("versions", "command, plugin and injector are of one version", versions),
];

/// Pods with links that have not ended.
fn linked(state: &ClusterState) -> Result<(String, Vec<&Value>), CheckAnswer> {
    let domain = state.domain()?;
    let mut pods = state.annotated_pods(&domain, &["links"])?;
    pods.retain(|pod| !is_finished(pod) && text(pod, "/metadata/deletionTimestamp").is_empty());
    Ok((domain, pods))
}

fn annotations(state: &ClusterState) -> QuestionResult {
    let (domain, pods) = linked(state)?;
    let mistake =
        |pod: &&Value| links(pod, &domain)?.err().map(|error| format!("{}: {error}", full_name(pod)));
    let bad: Vec<String> = pods.iter().filter_map(mistake).collect();
    if bad.is_empty() {
        return Ok(ok(count(pods.len(), "pod")));
    }
    Err(failure(some(&bad), "correct the annotation, and create the pod again"))
}

fn injected(state: &ClusterState) -> QuestionResult {
    let (domain, pods) = linked(state)?;
    let keeps = |pod: &&&Value| {
        links(pod, &domain)
            .is_some_and(|links| links.is_ok_and(|links| links.iter().any(|link| link.is_kept_here())))
    };
    let keepers: Vec<&Value> = pods.iter().filter(keeps).copied().collect();
    let bad: Vec<String> =
        keepers.iter().filter(|pod| sidecar(pod).is_none()).map(|pod| full_name(pod)).collect();
    if bad.is_empty() {
        return Ok(ok(count(keepers.len(), "pod")));
    }
    Err(failure(
        some(&bad),
        "create the pods again; they were created without the injector, or are in a namespace that injector.excludedNamespaces names",
    ))
}

/// Pods with a sidecar that have not ended.
fn with_sidecar(state: &ClusterState) -> Result<Vec<&Value>, CheckAnswer> {
    let (_, mut pods) = linked(state)?;
    pods.retain(|pod| sidecar(pod).is_some());
    Ok(pods)
}

fn sidecars_ready(state: &ClusterState) -> QuestionResult {
    let pods = with_sidecar(state)?;
    let (mut bad, mut starting) = (Vec::new(), Vec::new());
    for pod in &pods {
        // A pod that waits for a node has no sidecar yet.
        let Some(status) = sidecar_status(pod) else { continue };
        let Some(reason) = trouble(status) else { continue };
        let is_starting =
            matches!(text(status, "/state/waiting/reason"), "ContainerCreating" | "PodInitializing");
        let list = if is_starting { &mut starting } else { &mut bad };
        list.push(format!("{}: {reason}", full_name(pod)));
    }
    if bad.is_empty() && !starting.is_empty() {
        return Err(warning(
            some(&starting),
            "ask again in a minute; kubectl describe pod shows what a pod waits for",
        ));
    }
    if bad.is_empty() {
        return Ok(ok(count(pods.len(), "sidecar")));
    }
    Err(failure(
        some(&bad),
        "kubectl logs POD --container shmesh; its /readyz names the link that it cannot keep",
    ))
}

fn sidecars_restarts(state: &ClusterState) -> QuestionResult {
    let remedy = "kubectl logs --previous POD --container shmesh; after OOMKilled raise sidecar.memory";
    restarts(state, &with_sidecar(state)?, Some(shmesh_injector::SIDECAR), remedy)
}

fn sidecars_image(state: &ClusterState) -> QuestionResult {
    let pods = with_sidecar(state)?;
    let config = injector_config(state)?.unwrap_or_default();
    let image =
        |pod: &&Value| sidecar(pod).map_or("", |sidecar| text(sidecar, "/image")) != config.sidecar.image;
    let bad: Vec<String> = pods.iter().filter(|pod| image(pod)).map(|pod| full_name(pod)).collect();
    if bad.is_empty() {
        return Ok(ok(config.sidecar.image));
    }
    Err(warning(
        some(&bad),
        format!("running pods keep their image; create them again for {}", config.sidecar.image),
    ))
}

fn peers(state: &ClusterState) -> QuestionResult {
    let (domain, pods) = linked(state)?;
    // A pool is shared by the namespaces of a node, a claim is not.
    let mut sides: BTreeMap<[String; 4], BTreeMap<&str, String>> = BTreeMap::new();
    for pod in pods {
        for link in links(pod, &domain).and_then(Result::ok).into_iter().flatten() {
            let of = match link.scope {
                Scope::Pod => continue,
                Scope::Pool(_) => String::new(),
                Scope::Claim(_) => namespace(pod).to_owned(),
            };
            let side = if link.side == Side::Primary { "primary" } else { "secondary" };
            let node = text(pod, "/spec/nodeName").to_owned();
            let key = [node, of, link.scope.to_string(), link.config.name.to_string()];
            sides.entry(key).or_default().insert(side, full_name(pod));
        }
    }
    let bad = |([_, _, scope, link], sides): (&[String; 4], &BTreeMap<&str, String>)| {
        let (side, pod) = sides.first_key_value().filter(|_| sides.len() == 1)?;
        let missing = if *side == "primary" { "secondary" } else { "primary" };
        Some(format!("{link} in {scope}: {pod} has no {missing}"))
    };
    let bad: Vec<String> = sides.iter().filter_map(bad).collect();
    if bad.is_empty() {
        return Ok(ok(count(sides.len(), "link")));
    }
    Err(warning(
        some(&bad),
        "create the other pod on the same node, with the same link name and scope; a secondary waits for its primary",
    ))
}

fn pending(state: &ClusterState) -> QuestionResult {
    let prefix = format!("{}/", state.domain()?);
    let waits = |pod: &Value| {
        let (status, message) = condition(pod, "PodScheduled")?;
        (status == "False" && message.contains("nsufficient") && message.contains(&prefix))
            .then(|| format!("{}: {message}", full_name(pod)))
    };
    let bad: Vec<String> = state.all("pods")?.iter().filter_map(waits).collect();
    if bad.is_empty() {
        return Ok(ok("none"));
    }
    Err(failure(
        some(&bad),
        "the resource is used up or no node has it: kubectl describe node; raise config.shm.budget or config.pools[].attachments",
    ))
}

fn admitted(state: &ClusterState) -> QuestionResult {
    let domain = state.domain()?;
    let is_refused = |pod: &&Value| {
        text(pod, "/status/reason") == "UnexpectedAdmissionError"
            && (uses_resources(pod, &domain) || text(pod, "/status/message").contains("shmesh"))
    };
    let refused = state.all("pods")?.iter().filter(is_refused);
    let bad: Vec<String> =
        refused.map(|pod| format!("{}: {}", full_name(pod), text(pod, "/status/message"))).collect();
    if bad.is_empty() {
        return Ok(ok("none"));
    }
    Err(warning(
        some(&bad),
        "delete the pod; a pod of the plugin was away from the node, or the allocation was refused for this reason",
    ))
}

/// Whether a container requests a resource of the domain.
fn uses_resources(pod: &Value, domain: &str) -> bool {
    let prefix = format!("{domain}/");
    crate::pods::containers(pod).any(|container| {
        let limits = container.pointer("/resources/limits").and_then(Value::as_object);
        limits.is_some_and(|limits| limits.keys().any(|key| key.starts_with(&prefix)))
    })
}

fn cdi(state: &ClusterState) -> QuestionResult {
    let device = format!("{}/", state.domain()?);
    let failing = |pod: &Value| {
        let message = container_statuses(pod).map(|status| text(status, "/state/waiting/message"));
        let message =
            { message }.find(|message| message.contains("CDI device") && message.contains(&device))?;
        Some(format!("{}: {message}", full_name(pod)))
    };
    let bad: Vec<String> = state.all("pods")?.iter().filter_map(failing).collect();
    if bad.is_empty() {
        return Ok(ok("none"));
    }
    Err(failure(
        some(&bad),
        "enable CDI in the container runtime (containerd 1.7: enable_cdi = true), or set config.cdi to its directory",
    ))
}

fn versions(state: &ClusterState) -> QuestionResult {
    const KEY: &str = "app.kubernetes.io/version";
    let command = env!("CARGO_PKG_VERSION");
    let plugin = state.plugin()?;
    let mut found = vec![("plugin", label(plugin, KEY))];
    found.extend(state.injector().ok().map(|injector| ("injector", label(injector, KEY))));
    let other: Vec<String> = found
        .iter()
        .filter(|(_, version)| *version != command)
        .map(|(name, version)| format!("{name} {version}"))
        .collect();
    if other.is_empty() {
        return Ok(ok(command));
    }
    Err(warning(
        format!("command {command}, {}", some(&other)),
        "upgrade what is older: kubectl krew upgrade shmesh, or helm upgrade",
    ))
}
