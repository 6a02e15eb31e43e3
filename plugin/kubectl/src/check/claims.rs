//! Questions about the DRA driver; they are skipped in mode `devicePlugin`.

use std::collections::BTreeSet;

use serde_json::Value;
use shmesh_plugin::ConfigSummary;

use super::state::ClusterState;
use super::{CheckAnswer, QuestionEntry, QuestionResult, count, failure, ok, skipped, some, warning};
use crate::pods::{full_name, list, name, namespace, text};

pub(super) const CLAIMS: [QuestionEntry; 5] = [
    ("claim-classes", "the DeviceClasses of the driver exist", classes),
    ("claim-policy", "a policy limits the driver to objects of its node", policy),
    ("claim-slices", "each node has published its devices", slices),
    ("claim-drained", "no node is drained of claims", drained),
    ("claim-ready", "each claim in use is ready", ready),
];

/// The bindings of the policies in `helm/policy/claims.yaml`.
const POLICIES: [&str; 2] = ["shmesh-claims", "shmesh-slices"];

fn dra(state: &ClusterState) -> Result<ConfigSummary, CheckAnswer> {
    let config = state.valid_plugin_config()?;
    if config.is_dra { Ok(config) } else { Err(skipped("mode devicePlugin has no claims")) }
}

fn classes(state: &ClusterState) -> QuestionResult {
    let config = dra(state)?;
    let there: Vec<&str> = state.all("deviceclasses")?.iter().map(name).collect();
    let wanted = config.pools.iter().map(|(name, _)| format!("shmesh-pool-{name}"));
    let missing: Vec<String> = ["shmesh-domain".to_owned()]
        .into_iter()
        .chain(wanted)
        .filter(|name| !there.contains(&name.as_str()))
        .collect();
    if missing.is_empty() {
        return Ok(ok(format!("{} found", config.pools.len() + 1)));
    }
    Err(failure(
        format!("no DeviceClass {}", some(&missing)),
        "run helm upgrade again; Kubernetes 1.36 or later has the kind",
    ))
}

fn policy(state: &ClusterState) -> QuestionResult {
    dra(state)?;
    let there: Vec<&str> = state.all("validatingadmissionpolicybindings")?.iter().map(name).collect();
    let missing: Vec<String> =
        POLICIES.iter().filter(|name| !there.contains(name)).map(|&name| name.to_owned()).collect();
    if missing.is_empty() {
        return Ok(ok(POLICIES.join(", ")));
    }
    Err(warning(
        format!("no ValidatingAdmissionPolicyBinding {}", some(&missing)),
        "run helm upgrade again: without them a driver that is taken over could write objects of other nodes",
    ))
}

/// The slices of the driver.
fn own_slices<'a>(state: &'a ClusterState, domain: &str) -> Result<Vec<&'a Value>, CheckAnswer> {
    Ok(state.all("resourceslices")?.iter().filter(|slice| text(slice, "/spec/driver") == domain).collect())
}

fn slices(state: &ClusterState) -> QuestionResult {
    let config = dra(state)?;
    let slices = own_slices(state, &config.domain)?;
    let there: BTreeSet<&str> = slices.iter().map(|slice| text(slice, "/spec/nodeName")).collect();
    let pods = state.pods_of("plugin")?;
    let nodes: BTreeSet<&str> = pods.iter().map(|pod| text(pod, "/spec/nodeName")).collect();
    let missing: Vec<String> = nodes.difference(&there).map(|&node| node.to_owned()).collect();
    if missing.is_empty() {
        return Ok(ok(count(nodes.len(), "node")));
    }
    Err(failure(
        format!("no ResourceSlice of {} on {}", config.domain, some(&missing)),
        "the plugin's log says why it is not registered with the kubelet or cannot publish",
    ))
}

fn drained(state: &ClusterState) -> QuestionResult {
    let config = dra(state)?;
    let key = format!("{}/draining", config.domain);
    let is_drained = |slice: &&&Value| {
        list(slice, "/spec/devices")
            .flat_map(|device| list(device, "/taints"))
            .any(|taint| text(taint, "/key") == key)
    };
    let slices = own_slices(state, &config.domain)?;
    let nodes: BTreeSet<String> =
        slices.iter().filter(is_drained).map(|slice| text(slice, "/spec/nodeName").to_owned()).collect();
    if nodes.is_empty() {
        return Ok(ok("none"));
    }
    let nodes: Vec<String> = nodes.into_iter().collect();
    Err(warning(
        format!("no new claims on {}", some(&nodes)),
        format!(
            "when the maintenance is over: kubectl exec --namespace {} POD --container plugin -- shmesh-plugin drain --undo",
            namespace(state.plugin()?)
        ),
    ))
}

fn ready(state: &ClusterState) -> QuestionResult {
    let config = dra(state)?;
    let is_ours = |claim: &&Value| {
        list(claim, "/status/allocation/devices/results")
            .any(|result| text(result, "/driver") == config.domain)
            && list(claim, "/status/reservedFor").next().is_some()
    };
    // The driver writes the condition when it has prepared the claim.
    let is_ready = |claim: &Value| {
        list(claim, "/status/devices").filter(|device| text(device, "/driver") == config.domain).any(
            |device| {
                list(device, "/conditions")
                    .any(|one| text(one, "/type") == "Ready" && text(one, "/status") == "True")
            },
        )
    };
    let used: Vec<&Value> = state.all("resourceclaims")?.iter().filter(is_ours).collect();
    let bad: Vec<String> =
        used.iter().filter(|claim| !is_ready(claim)).map(|claim| full_name(claim)).collect();
    if bad.is_empty() {
        return Ok(ok(count(used.len(), "claim")));
    }
    Err(warning(
        some(&bad),
        "kubectl describe pod shows why the claim cannot be prepared; so does the log of the node's plugin",
    ))
}
