//! Injection by admission policies instead of a server.

use crate::config::Config;

/// Template of the policies, with placeholders such as `@IMAGE@` for the values of a cluster.
pub const POLICY: &str = include_str!("../policy/policy.yaml");

/// Renders the MutatingAdmissionPolicy, the ValidatingAdmissionPolicy that rejects with messages, and their
/// bindings.
///
/// They support what needs no YAML parser: links in scope `pod`, with the size of the directory in
/// `shmesh.io/size`. An [`agent_resource`](Config::agent_resource) is required. Pods in `namespace`, the one
/// of the release, are skipped.
///
/// ```
/// use shmesh_injector::{Config, policy};
/// let text = policy(&Config::default(), "shmesh");
/// assert!(text.contains("kind: MutatingAdmissionPolicy") && !text.contains('@'));
/// ```
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
