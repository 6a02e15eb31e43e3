//! Injection by policies instead of a server.

use crate::config::Config;

/// The policies as they are kept, with marks such as `@IMAGE@` where a cluster's values go.
///
/// ```
/// assert!(shmesh_injector::POLICY.contains("@IMAGE@"));
/// ```
pub const POLICY: &str = include_str!("../policy/policy.yaml");

/// The MutatingAdmissionPolicy, the ValidatingAdmissionPolicy that refuses with words, and their bindings.
///
/// They know what needs no YAML: links in scope `pod`, in a directory whose size the pod says by `shmesh.io/size`. There must be
/// an [`agent_resource`](Config::agent_resource). `namespace` is that of the product, which is left alone.
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
