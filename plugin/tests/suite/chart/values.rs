//! Types of the chart's values, from which `helm/values.schema.json` is generated.
//!
//! `config` has the schema that `shmesh-plugin schema` prints.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde_json::{Map, Value};

/// Values of the shmesh chart.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(title = "shmesh")]
#[expect(dead_code, reason = "only its schema is wanted")]
pub(crate) struct Values {
    image: Option<Image>,
    /// Listen address for probes, metrics and the webhook.
    listen_address: Option<ListenAddress>,
    namespace: Option<NamespaceValues>,
    /// Configuration of the device plugin.
    config: Option<Map<String, Value>>,
    plugin: Option<PluginValues>,
    injector: Option<InjectorValues>,
    sidecar: Option<SidecarValues>,
    bridge: Option<BridgeValues>,
    network_policy: Option<NetworkPolicyValues>,
    monitoring: Option<MonitoringValues>,
    /// Global values of parent charts.
    global: Option<Map<String, Value>>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct Image {
    /// Registry and path for all images.
    registry: Option<String>,
    /// Tag of all images; empty means the chart's appVersion.
    tag: Option<String>,
    /// When the kubelet pulls the images.
    pull_policy: Option<PullPolicy>,
    /// Names of image pull Secrets in the namespace of the release.
    pull_secrets: Option<Vec<String>>,
}

#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is wanted")]
enum PullPolicy {
    Always,
    IfNotPresent,
    Never,
}

#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is wanted")]
enum ListenAddress {
    #[serde(rename = "0.0.0.0")]
    Four,
    #[serde(rename = "[::]")]
    Six,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct NamespaceValues {
    /// Create the namespace of the release with its Pod Security labels.
    create: Option<bool>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct PluginValues {
    /// Name of the image, below `image.registry`.
    image: Option<String>,
    /// Log level or filter.
    log: Option<String>,
    /// Port of probes and metrics.
    #[schemars(range(min = 1, max = 65535))]
    admin_port: Option<u16>,
    /// Write Events about the node, with the right to create them.
    events: Option<bool>,
    resources: Option<Resources>,
    identity: Option<IdentityValues>,
    /// PriorityClass of the pods; some clusters allow the default only in namespaces with a ResourceQuota.
    priority_class_name: Option<String>,
    /// Labels of the nodes that run the plugin.
    node_selector: Option<BTreeMap<String, String>>,
    /// Tolerations of the pods; by default of all taints.
    tolerations: Option<Vec<Map<String, Value>>>,
    /// Affinity of the pods.
    affinity: Option<Map<String, Value>>,
    /// Action for new pods with more shm than the memory limit of the container.
    memory_policy: Option<MemoryPolicy>,
    /// Nodes on which the new plugin takes over from the old one during an upgrade.
    max_surge: Option<CountOrShare>,
    /// Nodes that may be without the plugin during an upgrade, if maxSurge is 0.
    max_unavailable: Option<CountOrShare>,
    /// Annotations of the pods.
    pod_annotations: Option<BTreeMap<String, String>>,
}

/// Action of the policy for memory limits.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is wanted")]
enum MemoryPolicy {
    Deny,
    Warn,
    Audit,
    /// There is no policy.
    None,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct IdentityValues {
    /// Read the names and service accounts of the node's pods from the API server, with the right to watch pods.
    pod_names: Option<bool>,
    /// Fail if the node itself runs in a nested pid namespace; must be false in kind.
    require_initial_pid_namespace: Option<bool>,
    resources: Option<Resources>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct Resources {
    /// Resource requests of the container.
    requests: Option<BTreeMap<String, Quantity>>,
    /// Resource limits of the container.
    limits: Option<BTreeMap<String, Quantity>>,
}

/// A Kubernetes quantity, as a number or a string.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is wanted")]
enum Quantity {
    Number(f64),
    Text(String),
}

/// A number or a percentage of nodes.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is wanted")]
enum CountOrShare {
    Count(u32),
    Share(#[schemars(regex(pattern = "^[0-9]+%$"))] String),
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct InjectorValues {
    mode: Option<Mode>,
    /// While the webhook is unavailable, pods with links are rejected (`Fail`) or created without links (`Ignore`).
    failure_policy: Option<FailurePolicy>,
    /// Number of the webhook's pods.
    #[schemars(range(min = 1))]
    replicas: Option<u32>,
    /// Log level or filter.
    log: Option<String>,
    /// Port of probes and metrics.
    #[schemars(range(min = 1, max = 65535))]
    admin_port: Option<u16>,
    resources: Option<Resources>,
    /// PriorityClass of the pods.
    priority_class_name: Option<String>,
    /// Labels of the nodes that run the injector.
    node_selector: Option<BTreeMap<String, String>>,
    /// Tolerations of the pods.
    tolerations: Option<Vec<Map<String, Value>>>,
    /// Namespaces without injection, in addition to kube-system.
    excluded_namespaces: Option<Vec<String>>,
    limits: Option<shmesh_injector::Limits>,
    /// Allow links in pods with hostPID.
    allow_host_pid: Option<bool>,
    certificate: Option<Certificate>,
}

/// How pods are injected.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "only its schema is wanted")]
enum Mode {
    /// A webhook, which supports every cluster and the whole annotation.
    Webhook,
    /// A MutatingAdmissionPolicy, which requires Kubernetes 1.36.
    Policy,
    /// No injection in the cluster; use `shmesh-plugin inject`.
    None,
}

#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is wanted")]
enum FailurePolicy {
    Fail,
    Ignore,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct Certificate {
    /// `self`: the webhook issues and renews its own certificate. `certManager`: cert-manager does.
    from: Option<CertificateFrom>,
    /// Issuer for cert-manager; empty creates a self-signed Issuer.
    issuer: Option<Map<String, Value>>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "only its schema is wanted")]
enum CertificateFrom {
    /// The webhook issues and renews its own certificate.
    #[serde(rename = "self")]
    Own,
    CertManager,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct SidecarValues {
    /// Name of the image, below `image.registry`.
    image: Option<String>,
    /// CPU request of injected sidecars.
    cpu: Option<Quantity>,
    /// Memory limit in addition to the memory of the links.
    memory: Option<Quantity>,
    /// Port of probes and metrics.
    #[schemars(range(min = 1, max = 65535))]
    admin_port: Option<u16>,
    /// User id of the sidecar in pods that would otherwise run it as root.
    #[schemars(range(min = 1))]
    user: Option<u32>,
    /// Log level or filter.
    log: Option<String>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct BridgeValues {
    /// Allow links to other nodes, which bridges carry, in the listed namespaces.
    enabled: Option<bool>,
    /// Name of the cluster, which the bridges' keys begin with.
    #[schemars(regex(pattern = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"))]
    cluster: Option<String>,
    /// Name of the image, below `image.registry`.
    image: Option<String>,
    /// CPU request of injected bridges.
    cpu: Option<Quantity>,
    /// Memory limit in addition to the memory of replicas and of the messages that bridges hold.
    memory: Option<Quantity>,
    /// Far nodes of one link that a primary's bridge admits, and for which its memory limit has room.
    #[schemars(range(min = 1, max = 64))]
    peers: Option<u32>,
    /// Port of probes and metrics.
    #[schemars(range(min = 1, max = 65535))]
    admin_port: Option<u16>,
    /// Log level or filter.
    log: Option<String>,
    /// Namespaces with links to other nodes.
    namespaces: Option<Vec<BridgeNamespaceValues>>,
    certificate: Option<BridgeCertificate>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct BridgeNamespaceValues {
    /// Name of the namespace, which must exist.
    #[schemars(regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    name: String,
    /// Names of the links to other nodes.
    links: Vec<FarLink>,
    /// Whether pods of the namespace are isolated by a policy of yours; then only the port of bridges is opened.
    isolated: Option<bool>,
}

/// Name of a link: lower-case letters, digits and `-`.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct FarLink(#[schemars(regex(pattern = "^[a-z0-9]([-a-z0-9]{0,29}[a-z0-9])?$"))] String);

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct BridgeCertificate {
    /// `chart`: Helm makes the certificates, and keeps them over upgrades. `certManager`: cert-manager does.
    from: Option<BridgeCertificateFrom>,
    /// ClusterIssuer for cert-manager, of which bridges trust the authority.
    issuer: Option<Map<String, Value>>,
    /// Days for which the chart's certificates are valid.
    #[schemars(range(min = 1))]
    days: Option<u32>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "only its schema is wanted")]
enum BridgeCertificateFrom {
    /// Helm makes the certificates.
    Chart,
    CertManager,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct NetworkPolicyValues {
    /// Restrict traffic to the plugin and the injector to probes, metrics and admission.
    enabled: Option<bool>,
    /// Ports of the API server (Service port and target port).
    api_server_ports: Option<Vec<u16>>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct MonitoringValues {
    /// Create a PodMonitor for plugins and sidecars and a ServiceMonitor for the injector.
    monitors: Option<bool>,
    /// Interval of the scrapes.
    #[schemars(regex(pattern = "^([0-9]+(ms|s|m|h))+$"))]
    interval: Option<String>,
    /// Create a PrometheusRule with the alerts.
    rules: Option<bool>,
    /// Create a ConfigMap with the Grafana dashboard.
    dashboard: Option<bool>,
    /// Labels that Prometheus and Grafana select on.
    labels: Option<BTreeMap<String, String>>,
}

/// Returns the chart's schema, with the device plugin's schema for `config`.
pub(crate) fn schema(plugin: Value) -> Value {
    let mut schema = serde_json::to_value(schemars::schema_for!(Values)).unwrap();
    let Value::Object(mut plugin) = plugin else { panic!("the plugin's schema is not an object") };
    for key in ["$schema", "title"] {
        plugin.remove(key);
    }
    if let Some(Value::Object(defs)) = plugin.remove("$defs") {
        let ours = schema["$defs"].as_object_mut().unwrap();
        for (name, def) in defs {
            // Both have bytes, and those are one type.
            let other = ours.insert(name.clone(), def.clone());
            assert!(
                other.is_none_or(|other| other == def),
                "two types are called {name}: rename the chart's"
            );
        }
    }
    schema["properties"]["config"] = Value::Object(plugin);
    flatten(&mut schema);
    schema
}

/// Replaces `anyOf` and `oneOf` by `type` and `enum`, for which Helm reports the allowed values.
fn flatten(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.values_mut().for_each(flatten);
            if let Some(Value::Array(branches)) = map.remove("anyOf") {
                let branches = branches.iter().map(|branch| branch.as_object().unwrap());
                // Helm removes keys whose value is null before it looks at the schema.
                let branches: Vec<_> =
                    branches.filter(|branch| branch.get("type") != Some(&"null".into())).collect();
                if branches.len() > 1 {
                    // Branches of different types: a keyword of one says nothing of the other's values.
                    map.insert("type".into(), branches.iter().map(|branch| branch["type"].clone()).collect());
                }
                for (key, value) in branches.into_iter().flatten().filter(|(key, _)| *key != "format") {
                    map.entry(key.clone()).or_insert_with(|| value.clone());
                }
            }
            if let Some(Value::Array(branches)) = map.remove("oneOf") {
                let words = |branch: &Value| match &branch["enum"] {
                    Value::Array(words) => words.clone(),
                    _ => vec![branch["const"].clone()],
                };
                map.insert("type".into(), "string".into());
                map.insert("enum".into(), branches.iter().flat_map(words).collect());
            }
        }
        Value::Array(list) => list.iter_mut().for_each(flatten),
        _ => {}
    }
}
