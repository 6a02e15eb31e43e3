//! The form of the chart's values: what `helm/values.schema.json` is made of.
//!
//! `config` is the device plugin's own configuration, in the words of `shmesh-plugin schema`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde_json::{Map, Value};

/// Everything that can be set.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(title = "shmesh")]
#[expect(dead_code, reason = "only its schema is wanted")]
pub(crate) struct Values {
    image: Option<Image>,
    /// Where probes, metrics and the webhook are served.
    listen_address: Option<ListenAddress>,
    namespace: Option<NamespaceValues>,
    /// Replaced by the device plugin's schema.
    config: Option<Map<String, Value>>,
    plugin: Option<PluginValues>,
    injector: Option<InjectorValues>,
    sidecar: Option<SidecarValues>,
    network_policy: Option<NetworkPolicyValues>,
    monitoring: Option<Monitoring>,
    test: Option<TestValues>,
    /// Of charts that have this one as a part.
    global: Option<Map<String, Value>>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct Image {
    /// Before the names of all images.
    registry: Option<String>,
    /// Of all images; the chart's appVersion when empty.
    tag: Option<String>,
    pull_policy: Option<PullPolicy>,
    /// Names of secrets in the release's namespace.
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
    /// Make the release's namespace part of the release, with its Pod Security labels.
    create: Option<bool>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct PluginValues {
    image: Option<String>,
    /// A log filter.
    log: Option<String>,
    #[schemars(range(min = 1, max = 65535))]
    admin_port: Option<u16>,
    /// Events about the node, with a token that may create Events and nothing else.
    events: Option<bool>,
    resources: Option<Resources>,
    identity: Option<IdentityValues>,
    priority_class_name: Option<String>,
    node_selector: Option<BTreeMap<String, String>>,
    tolerations: Option<Vec<Map<String, Value>>>,
    affinity: Option<Map<String, Value>>,
    /// Nodes that may be without the plugin at once during an upgrade.
    max_unavailable: Option<CountOrShare>,
    pod_annotations: Option<BTreeMap<String, String>>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct IdentityValues {
    /// Refuse a node whose pid namespace is nested; false in kind.
    require_initial_pid_namespace: Option<bool>,
    resources: Option<Resources>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct Resources {
    requests: Option<BTreeMap<String, Quantity>>,
    limits: Option<BTreeMap<String, Quantity>>,
}

/// A quantity of Kubernetes.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is wanted")]
enum Quantity {
    Number(f64),
    Text(String),
}

/// So many, or such a share.
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
    failure_policy: Option<FailurePolicy>,
    #[schemars(range(min = 1))]
    replicas: Option<u32>,
    /// A log filter.
    log: Option<String>,
    #[schemars(range(min = 1, max = 65535))]
    admin_port: Option<u16>,
    resources: Option<Resources>,
    priority_class_name: Option<String>,
    node_selector: Option<BTreeMap<String, String>>,
    tolerations: Option<Vec<Map<String, Value>>>,
    /// Namespaces beside this release's and kube-system whose pods are never looked at.
    excluded_namespaces: Option<Vec<String>>,
    limits: Option<shmesh_injector::Limits>,
    /// Let pods with hostPID have links.
    allow_host_pid: Option<bool>,
    certificate: Option<Certificate>,
}

/// Who injects.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "only its schema is wanted")]
enum Mode {
    /// A webhook: every cluster, and the annotation in full.
    Webhook,
    /// A MutatingAdmissionPolicy: Kubernetes 1.36 and later.
    Policy,
    /// People, by hand.
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
    from: Option<CertificateFrom>,
    /// For cert-manager; empty: an issuer of our own.
    issuer: Option<Map<String, Value>>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "only its schema is wanted")]
enum CertificateFrom {
    /// The webhook makes its own and replaces it in time.
    #[serde(rename = "self")]
    Own,
    CertManager,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct SidecarValues {
    image: Option<String>,
    /// Its share of a CPU.
    cpu: Option<Quantity>,
    /// Memory beside that of the links.
    memory: Option<Quantity>,
    #[schemars(range(min = 1, max = 65535))]
    admin_port: Option<u16>,
    /// The user it runs as where the pod would make it root.
    #[schemars(range(min = 1))]
    user: Option<u32>,
    /// A log filter.
    log: Option<String>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct NetworkPolicyValues {
    enabled: Option<bool>,
    /// Ports of the API server, before and behind its Service.
    api_server_ports: Option<Vec<u16>>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct Monitoring {
    /// PodMonitor for plugins and sidecars, ServiceMonitor for the injector.
    monitors: Option<bool>,
    #[schemars(regex(pattern = "^([0-9]+(ms|s|m|h))+$"))]
    interval: Option<String>,
    /// Alerts.
    rules: Option<bool>,
    /// A ConfigMap with the dashboard.
    dashboard: Option<bool>,
    labels: Option<BTreeMap<String, String>>,
}

#[derive(JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is wanted")]
struct TestValues {
    /// Where `helm test` makes a pod that asks for a link.
    namespace: Option<String>,
}

/// The chart's schema: the values, and the device plugin's configuration in its place.
pub(crate) fn schema(plugin: Value) -> Value {
    let mut schema = serde_json::to_value(schemars::schema_for!(Values)).unwrap();
    let Value::Object(mut plugin) = plugin else { panic!("the plugin's schema is no object") };
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

/// Writes alternatives as one schema each. Helm reports a value that fits no branch of `anyOf` or `oneOf` without saying what
/// would fit; `type` and `enum` are reported by name.
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
