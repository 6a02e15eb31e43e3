//! Admission policies: for injection instead of a server, for private shared memory, for labels of bridges, and for claims.

use crate::config::Config;

/// Template of the policies, with placeholders such as `@IMAGE@` for the values of a cluster.
pub const POLICY: &str = include_str!("../policy/policy.yaml");

/// Renders the MutatingAdmissionPolicy, the ValidatingAdmissionPolicy that rejects with messages, and their
/// bindings.
///
/// They support what needs no YAML parser: links in scope `pod`, with the size of the directory in
/// `shmesh.io/size`. An [`agent_resource`](Config::agent_resource) is required. Pods in `namespace`, the one
/// of the release, are skipped.
#[must_use]
pub fn policy(config: &Config, namespace: &str) -> String {
    let sidecar = &config.sidecar;
    let (overhead, port) = (sidecar.memory.0.to_string(), sidecar.admin_port.to_string());
    let marks = [
        ("@DOMAIN@", config.domain.as_str()),
        ("@NAMESPACE@", namespace),
        ("@IMAGE@", &sidecar.image),
        ("@PULL@", &sidecar.image_pull_policy),
        ("@OVERHEAD@", &overhead),
        ("@CPU@", &sidecar.cpu),
        ("@ADDRESS@", &sidecar.admin_address),
        ("@PORT@", &port),
        ("@LOG@", &sidecar.log),
        ("@AGENT@", &config.agent_resource),
    ];
    marks.into_iter().fold(POLICY.to_owned(), |text, (mark, value)| text.replace(mark, value))
}

/// Template of the policy for private shared memory, with placeholders as in [`POLICY`].
pub const MEMORY_POLICY: &str = include_str!("../policy/memory.yaml");

/// Renders the ValidatingAdmissionPolicy that refuses containers with more private shared memory, in units of `unit`, than their
/// memory limit, and its binding. `name` is the name of the release's objects.
#[must_use]
pub fn memory_policy(name: &str, domain: &str, unit: &str) -> String {
    let marks = [("@NAME@", name), ("@DOMAIN@", domain), ("@UNIT@", unit), ("@ACTION@", "Deny")];
    marks.into_iter().fold(MEMORY_POLICY.to_owned(), |text, (mark, value)| text.replace(mark, value))
}

/// Template of the policy for the labels of pods with a bridge, with placeholders as in [`POLICY`].
pub const LABELS_POLICY: &str = include_str!("../policy/labels.yaml");

/// Renders the ValidatingAdmissionPolicy that refuses pods of `namespace` with the labels of a bridge that they do not have, and its
/// binding. `name` is the name of the release's objects.
#[must_use]
pub fn labels_policy(name: &str, domain: &str, namespace: &str) -> String {
    let marks = [("@NAMESPACES@", namespace), ("@NAME@", name), ("@DOMAIN@", domain)];
    marks.into_iter().fold(LABELS_POLICY.to_owned(), |text, (mark, value)| text.replace(mark, value))
}

/// Template of the policies for mode `dra`, with placeholders as in [`POLICY`].
pub const CLAIMS_POLICY: &str = include_str!("../policy/claims.yaml");

/// Renders the ValidatingAdmissionPolicies of mode `dra`: one for the configuration of claims, and one that lets the driver,
/// whose ServiceAccount is `account` in `namespace`, write the ResourceSlices of its own node only.
#[must_use]
pub fn claims_policy(domain: &str, namespace: &str, account: &str) -> String {
    let marks = [("@DOMAIN@", domain), ("@NAMESPACE@", namespace), ("@ACCOUNT@", account)];
    marks.into_iter().fold(CLAIMS_POLICY.to_owned(), |text, (mark, value)| text.replace(mark, value))
}
