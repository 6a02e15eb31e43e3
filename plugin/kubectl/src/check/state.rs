//! The objects of a cluster that questions are asked about.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use shmesh_injector::bytes_of;
use shmesh_plugin::ConfigSummary;

use super::{CheckAnswer, failure, skipped, warning};
use crate::kubectl::{Kubectl, in_parallel};
use crate::pods::{annotation, is_finished, label, list, name, namespace, text};

/// Selects the objects of all releases.
const PRODUCT: &str = "--selector=app.kubernetes.io/name=shmesh";
/// The label with the release of an object.
const INSTANCE: &str = "app.kubernetes.io/instance";
/// The label with the part of the product.
const COMPONENT: &str = "app.kubernetes.io/component";

/// Objects by their kind in the plural, or why they cannot be read.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterState {
    pub(super) objects: BTreeMap<&'static str, Result<Vec<Value>, String>>,
    /// Namespace of the installation.
    pub(super) namespace: Option<String>,
    /// The time in seconds since 1970.
    pub(super) now: u64,
}

/// Each list of objects: its key, and the arguments of `kubectl get`.
const FETCHED: [(&str, &[&str]); 17] = [
    ("version", &["--raw=/version"]),
    ("daemonsets", &["daemonsets", "--all-namespaces", PRODUCT]),
    ("deployments", &["deployments", "--all-namespaces", PRODUCT]),
    ("services", &["services", "--all-namespaces", PRODUCT]),
    ("endpointslices", &["endpointslices", "--all-namespaces", PRODUCT]),
    ("configmaps", &["configmaps", "--all-namespaces", PRODUCT]),
    ("namespaces", &["namespaces"]),
    ("nodes", &["nodes"]),
    ("pods", &["pods", "--all-namespaces"]),
    ("mutatingwebhookconfigurations", &["mutatingwebhookconfigurations", PRODUCT]),
    ("mutatingadmissionpolicybindings", &["mutatingadmissionpolicybindings"]),
    ("validatingadmissionpolicybindings", &["validatingadmissionpolicybindings"]),
    ("clusterrolebindings", &["clusterrolebindings", PRODUCT]),
    ("rolebindings", &["rolebindings", "--all-namespaces", PRODUCT]),
    ("deviceclasses", &["deviceclasses", PRODUCT]),
    ("resourceslices", &["resourceslices"]),
    ("resourceclaims", &["resourceclaims", "--all-namespaces"]),
];

impl ClusterState {
    /// Fetches the objects. What cannot be read is an answer of the questions that need it.
    pub(super) fn fetch(kubectl: &Kubectl, namespace: Option<&str>) -> Self {
        let get = |(key, args): &(&'static str, &[&str])| {
            let found = if *key == "version" {
                let parse = |text: String| serde_json::from_str(&text).map_err(|error| error.to_string());
                let text = kubectl.call(&["get", "--raw=/version"]).map_err(|error| error.to_string());
                text.and_then(parse).map(|version: Value| vec![version])
            } else {
                match kubectl.get(args) {
                    // An API server of another version.
                    Err(error) if error.is_unknown_kind() => Ok(Vec::new()),
                    found => found.map_err(|error| error.to_string()),
                }
            };
            (*key, found)
        };
        // One call first: without an API server, each of the others would wait as long.
        let version = get(&FETCHED[0]);
        let mut objects: BTreeMap<_, _> = if let Err(error) = &version.1 {
            FETCHED.iter().map(|(key, _)| (*key, Err(error.clone()))).collect()
        } else {
            in_parallel(&FETCHED[1..], get).into_iter().collect()
        };
        objects.insert(version.0, version.1);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut state = Self { objects, namespace: namespace.map(str::to_owned), now };
        if let Ok(deployment) = state.injector() {
            let secret = format!("{}-tls", name(deployment));
            let namespace = format!("--namespace={}", self::namespace(deployment));
            // Only the certificate: not the key.
            let args = ["get", "secret", &secret, &namespace, r"--output=jsonpath={.data.tls\.crt}"];
            let found = kubectl.call(&args).map(|text| vec![Value::from(text)]);
            state.objects.insert("secret", found.map_err(|error| error.to_string()));
        }
        state
    }

    /// The objects of a kind.
    ///
    /// # Errors
    /// A warning with the reason why they cannot be read.
    pub(super) fn all(&self, kind: &'static str) -> Result<&[Value], CheckAnswer> {
        match self.objects.get(kind) {
            Some(Ok(found)) => Ok(found),
            Some(Err(error)) => Err(warning(
                format!("{kind} cannot be read: {error}"),
                "run the check as a user that may read them; the question is not answered",
            )),
            None => Ok(&[]),
        }
    }

    /// The DaemonSet of the plugin.
    pub(super) fn plugin(&self) -> Result<&Value, CheckAnswer> {
        let is_ours = |daemonset: &&Value| {
            label(daemonset, COMPONENT) == "plugin"
                && self.namespace.as_deref().is_none_or(|name| namespace(daemonset) == name)
        };
        self.all("daemonsets")?.iter().find(is_ours).ok_or_else(|| {
            let place =
                self.namespace.as_ref().map_or_else(String::new, |name| format!(" in namespace {name}"));
            failure(
                format!("there is no DaemonSet with the label {COMPONENT}=plugin{place}"),
                "install shmesh: helm install shmesh helm --namespace shmesh-system --create-namespace",
            )
        })
    }

    /// Objects of the release, of one component.
    pub(super) fn of_release(&self, kind: &'static str, component: &str) -> Result<Vec<&Value>, CheckAnswer> {
        let plugin = self.plugin()?;
        // Another release may have the same name in another namespace. A webhook configuration is in none, but its Service is.
        let is_ours = |object: &&Value| {
            let of_service = text(object, "/webhooks/0/clientConfig/service/namespace");
            label(object, INSTANCE) == label(plugin, INSTANCE)
                && label(object, COMPONENT) == component
                && [namespace(object), of_service].contains(&namespace(plugin))
        };
        Ok(self.all(kind)?.iter().filter(is_ours).collect())
    }

    /// The Deployment of the webhook.
    pub(super) fn injector(&self) -> Result<&Value, CheckAnswer> {
        let found = self.of_release("deployments", "injector")?;
        found.first().copied().ok_or_else(|| skipped("the release has no webhook (injector.mode)"))
    }

    /// The injector's webhook configuration.
    pub(super) fn webhook(&self) -> Result<&Value, CheckAnswer> {
        let deployment = self.injector()?;
        let found = self.of_release("mutatingwebhookconfigurations", "injector")?;
        found.first().copied().ok_or_else(|| {
            failure(
                format!("the Deployment {} has no MutatingWebhookConfiguration", name(deployment)),
                "run helm upgrade again: pods with links are created without a sidecar",
            )
        })
    }

    /// Pods of a component of the release that have not ended.
    pub(super) fn pods_of(&self, component: &str) -> Result<Vec<&Value>, CheckAnswer> {
        let mut pods = self.of_release("pods", component)?;
        pods.retain(|pod| !is_finished(pod));
        Ok(pods)
    }

    /// The nodes that the plugin's `nodeSelector` selects.
    pub(super) fn selected_nodes(&self) -> Result<Vec<&Value>, CheckAnswer> {
        let selector = self.plugin()?.pointer("/spec/template/spec/nodeSelector").and_then(Value::as_object);
        let is_selected = |node: &&Value| {
            selector.into_iter().flatten().all(|(key, value)| Some(label(node, key)) == value.as_str())
        };
        Ok(self.all("nodes")?.iter().filter(is_selected).collect())
    }

    /// The text of the plugin's configuration.
    pub(super) fn plugin_config_text(&self) -> Result<&str, CheckAnswer> {
        let volumes = "/spec/template/spec/volumes";
        let plugin = self.plugin()?;
        let volume = list(plugin, volumes).find(|volume| text(volume, "/name") == "config");
        self.config_map(volume.map_or("", |volume| text(volume, "/configMap/name")), "plugin.yaml")
    }

    /// The text of a file in a ConfigMap of the release.
    pub(super) fn config_map(&self, wanted: &str, file: &str) -> Result<&str, CheckAnswer> {
        let of = namespace(self.plugin()?);
        let map = self.all("configmaps")?.iter().find(|map| name(map) == wanted && namespace(map) == of);
        map.and_then(|map| map.get("data")?.get(file)?.as_str()).ok_or_else(|| {
            failure(format!("ConfigMap {of}/{wanted} has no {file}"), "run helm upgrade again")
        })
    }

    /// The plugin's configuration, as it is on the node with the least memory.
    ///
    /// # Errors
    /// The configuration is invalid; the error has all problems.
    pub(super) fn plugin_config(&self) -> Result<Result<ConfigSummary, String>, CheckAnswer> {
        let memory = |node: &&Value| node.pointer("/status/capacity/memory").and_then(bytes_of);
        let least = self.selected_nodes()?.iter().filter_map(memory).min().unwrap_or(1 << 34);
        Ok(ConfigSummary::read(self.plugin_config_text()?, least))
    }

    /// The plugin's configuration, for questions about something else.
    pub(super) fn valid_plugin_config(&self) -> Result<ConfigSummary, CheckAnswer> {
        self.plugin_config()?.map_err(|_| skipped("the plugin's configuration is invalid"))
    }

    /// The domain of annotations and resources.
    pub(super) fn domain(&self) -> Result<String, CheckAnswer> {
        let unknown = |_| skipped("the domain is not known without the plugin's configuration");
        self.valid_plugin_config().map(|config| config.domain).map_err(unknown)
    }

    /// Pods that ask for links, share a pool, or have a sidecar.
    pub(super) fn annotated_pods(&self, domain: &str, names: &[&str]) -> Result<Vec<&Value>, CheckAnswer> {
        let keys: Vec<String> = names.iter().map(|name| format!("{domain}/{name}")).collect();
        let asks = |pod: &&Value| keys.iter().any(|key| annotation(pod, key).is_some());
        Ok(self.all("pods")?.iter().filter(asks).collect())
    }
}
