//! Pods of the scenarios, and their status.

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use serde_json::Value;

use crate::args::{Args, Image};
use crate::wait::PollResult;

pub(crate) const TWO_CONTAINERS: &str = include_str!("../../manifests/samples/two-containers.yaml");
pub(crate) const TWO_PODS: &str = include_str!("../../manifests/samples/two-pods.yaml");
pub(crate) const CLAIM: &str = include_str!("../../manifests/samples/claim.yaml");
pub(crate) const DEVICE_KEYS: &str = include_str!("../pods/device-keys.yaml");
pub(crate) const SERVICE_ACCOUNTS: &str = include_str!("../pods/service-accounts.yaml");
pub(crate) const SHARE: &str = include_str!("../pods/share.yaml");
pub(crate) const SIZED: &str = include_str!("../pods/sized.yaml");
pub(crate) const LATE: &str = include_str!("../pods/late.yaml");
pub(crate) const TOOL: &str = include_str!("../pods/tool.yaml");

/// Parses the objects of a kind and sets their namespace.
pub(crate) fn objects(text: &str, kind: &str, namespace: &str) -> Result<Vec<Value>> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(text).context("an object of this program is not valid YAML")?;
    let mut objects: Vec<Value> = documents.into_iter().filter(|one| one["kind"] == kind).collect();
    objects.iter_mut().for_each(|object| object["metadata"]["namespace"] = namespace.into());
    Ok(objects)
}

/// Parses pods and sets their namespace and images from the flags.
pub(crate) fn prepared(text: &str, namespace: &str, args: &Args) -> Result<Vec<Value>> {
    let mut pods = objects(text, "Pod", namespace)?;
    for pod in &mut pods {
        for container in pod["spec"]["containers"].as_array_mut().into_iter().flatten() {
            let image = container["image"].as_str().unwrap_or_default();
            container["image"] = match image.split(':').next().unwrap_or_default() {
                "sidecar" | "shmesh-sidecar" => args.image(Image::Sidecar).into(),
                "tool" => args.tool_image.clone().into(),
                other => bail!("a pod of this program has the unknown image {other:?}"),
            };
            container["imagePullPolicy"] = args.pull_policy.name().into();
        }
    }
    Ok(pods)
}

/// Returns the container statuses of a pod, the sidecar first.
pub(crate) fn containers(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    let status = pod.status.iter();
    status
        .flat_map(|status| status.init_container_statuses.iter().chain(&status.container_statuses).flatten())
}

pub(crate) fn container<'a>(pod: &'a Pod, name: &str) -> Result<&'a ContainerStatus> {
    containers(pod)
        .find(|one| one.name == name)
        .with_context(|| format!("no container {name} in {}", describe(pod)))
}

/// Returns the container id without the runtime prefix.
pub(crate) fn container_id(status: &ContainerStatus) -> Result<&str> {
    let id = status.container_id.as_deref().and_then(|id| id.split_once("://")).map(|(_, id)| id);
    id.with_context(|| format!("container {} has no id yet", status.name))
}

pub(crate) fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

pub(crate) fn node(pod: &Pod) -> Result<&str> {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    node.with_context(|| format!("the pod {} is on no node", name(pod)))
}

pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Unknown")
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let is_ending = pod.metadata.deletion_timestamp.is_some();
    !is_ending && conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
}

/// Whether the pod is ready.
pub(crate) fn ready(pod: Pod) -> PollResult<Pod> {
    match phase(&pod) {
        "Succeeded" | "Failed" => PollResult::Never(format!("it has ended: {}", describe(&pod))),
        _ if is_ready(&pod) => PollResult::There(pod),
        _ => PollResult::NotYet(describe(&pod)),
    }
}

/// Whether the pod has succeeded.
pub(crate) fn succeeded(pod: Pod) -> PollResult<Pod> {
    match phase(&pod) {
        "Succeeded" => PollResult::There(pod),
        "Failed" => PollResult::Never(describe(&pod)),
        _ => PollResult::NotYet(describe(&pod)),
    }
}

/// Describes a pod in one line: node, unmet conditions, containers.
pub(crate) fn describe(pod: &Pod) -> String {
    let mut said = vec![format!("{} on {}: {}", name(pod), node(pod).unwrap_or("no node"), phase(pod))];
    let Some(status) = &pod.status else { return said.remove(0) };
    let join = |parts: [Option<&str>; 2]| parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    if let Some(why) =
        Some(join([status.reason.as_deref(), status.message.as_deref()])).filter(|why| !why.is_empty())
    {
        said.push(why);
    }
    for condition in status.conditions.iter().flatten().filter(|one| one.status != "True") {
        let why = join([condition.reason.as_deref(), condition.message.as_deref()]);
        said.push(format!("{} {} ({why})", condition.type_, condition.status));
    }
    for container in containers(pod) {
        let mut states = Vec::new();
        for (state, when) in [(&container.state, "is"), (&container.last_state, "was")] {
            let Some(state) = state else { continue };
            if let Some(waiting) = &state.waiting {
                states.push(format!(
                    "{when} waiting ({})",
                    join([waiting.reason.as_deref(), waiting.message.as_deref()])
                ));
            }
            if let Some(ended) = &state.terminated {
                let why = join([ended.reason.as_deref(), ended.message.as_deref()]);
                states.push(format!("{when} ended with {} ({why})", ended.exit_code));
            }
        }
        if !container.ready || container.restart_count > 0 {
            let word = if container.ready { "ready" } else { "not ready" };
            states.insert(0, format!("{word}, {} restarts", container.restart_count));
        }
        if !states.is_empty() {
            said.push(format!("container {} {}", container.name, states.join(", ")));
        }
    }
    said.join("; ")
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;

    fn pod(status: Value) -> Pod {
        serde_json::from_value(
            json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": []}, "status": status}),
        )
        .unwrap()
    }

    #[test]
    fn pod_summary_states_the_reason() {
        let waiting = pod(json!({
            "phase": "Pending",
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "not a"},
            ],
            "containerStatuses": [{
                "name": "a", "ready": false, "restartCount": 2, "image": "", "imageID": "",
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            }],
        }));
        assert_eq!(
            describe(&waiting),
            "p on n: Pending; Ready False (ContainersNotReady, not a); container a not ready, 2 restarts, \
             is waiting (CrashLoopBackOff), was ended with 137 (OOMKilled)"
        );
        assert!(matches!(ready(waiting), PollResult::NotYet(_)));
        assert!(matches!(ready(pod(json!({"phase": "Failed"}))), PollResult::Never(_)));
        assert!(matches!(succeeded(pod(json!({"phase": "Failed", "reason": "UnexpectedAdmissionError"}))),
            PollResult::Never(why) if why.contains("UnexpectedAdmissionError")));
    }

    /// Every key of the samples exists in the Kubernetes types and survives a round trip.
    #[test]
    fn sample_pods_match_the_kubernetes_types() {
        fn lost(path: &str, given: &Value, kept: &Value) -> Vec<String> {
            match (given, kept) {
                (Value::Object(given), Value::Object(kept)) => given
                    .iter()
                    .flat_map(|(key, value)| match kept.get(key) {
                        Some(kept) => lost(&format!("{path}.{key}"), value, kept),
                        None => vec![format!("{path}.{key}")],
                    })
                    .collect(),
                (Value::Array(given), Value::Array(kept)) if given.len() == kept.len() => {
                    given.iter().zip(kept).flat_map(|(given, kept)| lost(path, given, kept)).collect()
                }
                (given, kept) if given == kept => vec![],
                _ => vec![path.to_owned()],
            }
        }
        let args = Args::parse_from([
            "shmesh-e2e",
            "--pull-policy",
            "Never",
            "--tool-image",
            "t:1",
            "--registry",
            "r",
        ]);
        let mut count = 0;
        for text in [TWO_CONTAINERS, TWO_PODS, DEVICE_KEYS, SERVICE_ACCOUNTS, SHARE, SIZED, LATE, TOOL] {
            for one in prepared(text, "ns", &args).unwrap() {
                let typed: Pod = serde_json::from_value(one.clone()).unwrap();
                assert_eq!(lost("pod", &one, &serde_json::to_value(&typed).unwrap()), [""; 0]);
                for container in typed.spec.unwrap().containers {
                    assert!(["r/shmesh-sidecar:0.1.0", "t:1"].contains(&container.image.unwrap().as_str()));
                    assert_eq!(container.image_pull_policy.unwrap(), "Never");
                }
                assert_eq!(one["metadata"]["namespace"], "ns");
                count += 1;
            }
        }
        assert_eq!(count, 14);
        // The comparison detects an unknown key.
        let mut wrong = prepared(LATE, "ns", &args).unwrap().remove(0);
        wrong["spec"]["containers"][0]["resource"] = json!({});
        let typed: Pod = serde_json::from_value(wrong.clone()).unwrap();
        assert_eq!(
            lost("pod", &wrong, &serde_json::to_value(&typed).unwrap()),
            ["pod.spec.containers.resource"]
        );
    }
}
