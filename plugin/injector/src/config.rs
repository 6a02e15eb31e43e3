//! Configuration of the injector.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use shmesh::config::show_yaml_error;
use shmesh_sys::quantity::Bytes;

/// Configuration of the injector. Keys shared with the device plugin have the same names.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Config {
    /// Domain of annotations and resources: the part before the `/`.
    pub domain: String,
    /// Pools of the device plugin.
    pub pools: Vec<Pool>,
    /// Private shared memory of the device plugin.
    pub shm: Shm,
    /// Resource name after the `/` that provides only the identity service; sidecars without a pool request
    /// it. If empty, such pods need `shareProcessNamespace`.
    pub agent_resource: String,
    /// Settings of injected sidecars.
    pub sidecar: Sidecar,
    /// Settings of injected bridges, which carry links to other nodes.
    pub bridge: InjectedBridge,
    /// Limits for the memory of links.
    pub limits: Limits,
    /// Whether pods with `hostPID` may have links.
    pub allow_host_pid: bool,
}

/// A pool as in the device plugin's configuration; keys that only matter on nodes are ignored.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// Resource name after the `/`.
    pub name: String,
    /// Mount path in containers.
    #[serde(default = "Pool::mount_path")]
    pub mount_path: String,
    /// Which pods may use the pool.
    #[serde(default)]
    pub user_namespaces: UserNamespaces,
}

/// Which pods may use a pool, by their user namespace.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum UserNamespaces {
    /// Only pods without `hostUsers: false`.
    #[default]
    Never,
    /// Only pods with `hostUsers: false`.
    Always,
    /// Pods with and without `hostUsers: false`.
    Mixed,
}

/// Private shared memory of the device plugin.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Shm {
    /// Size of one unit of `<domain>/shm`.
    pub unit: Bytes,
}

/// Settings of injected sidecars.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Sidecar {
    /// Image of the sidecar.
    pub image: String,
    /// Pull policy of the image.
    pub image_pull_policy: String,
    /// CPU request; in pods of QoS class Guaranteed also the limit.
    pub cpu: String,
    /// Memory limit in addition to the memory of the links.
    pub memory: Bytes,
    /// Listen address for probes and metrics; `[::]` if pods have only IPv6.
    pub admin_address: String,
    /// Port for probes and metrics.
    pub admin_port: u16,
    /// User id of the sidecar in pods that would otherwise run it as root.
    pub user: u32,
    /// Log filter of the sidecar.
    pub log: String,
}

/// Settings of injected bridges.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct InjectedBridge {
    /// Namespaces with links to other nodes, for which the chart makes Services and certificates. Elsewhere such links are refused.
    pub namespaces: Vec<BridgeNamespace>,
    /// Name of the cluster, which the bridges' keys begin with; clusters whose bridges trust one authority must have different ones.
    pub cluster: String,
    /// Image of the bridge.
    pub image: String,
    /// Pull policy of the image.
    pub image_pull_policy: String,
    /// CPU request; in pods of QoS class Guaranteed also the limit.
    pub cpu: String,
    /// Memory limit in addition to the memory of replicas and of the messages that bridges hold.
    pub memory: Bytes,
    /// Far nodes of one link that a primary's bridge admits, and for which its memory limit has room.
    #[schemars(range(min = 1, max = 64))]
    pub peers: u32,
    /// Port for probes and metrics.
    pub admin_port: u16,
    /// Log filter of the bridge.
    pub log: String,
}

/// A namespace with links to other nodes.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BridgeNamespace {
    /// Name of the namespace.
    pub name: String,
    /// Names of its links to other nodes.
    pub links: Vec<String>,
}

/// Limits for the memory of links. Omitted limits do not apply.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// Memory of all links that one pod keeps.
    pub pod: Option<Bytes>,
    /// The same for pods of these namespaces.
    pub namespaces: BTreeMap<String, Bytes>,
    /// Memory of the largest node, beyond which a pod can never be scheduled.
    pub node: Option<Bytes>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            domain: "shmesh.io".into(),
            pools: Vec::new(),
            shm: Shm::default(),
            agent_resource: "agent".into(),
            sidecar: Sidecar::default(),
            bridge: InjectedBridge::default(),
            limits: Limits::default(),
            allow_host_pid: false,
        }
    }
}

impl Default for Shm {
    fn default() -> Self {
        Self { unit: Bytes(64 << 20) }
    }
}

impl Default for Sidecar {
    fn default() -> Self {
        Self {
            image: concat!("shmesh-sidecar:", env!("CARGO_PKG_VERSION")).into(),
            image_pull_policy: "IfNotPresent".into(),
            cpu: "50m".into(),
            memory: Bytes(16 << 20),
            admin_address: "0.0.0.0".into(),
            admin_port: 9902,
            user: 65_532,
            log: "info".into(),
        }
    }
}

impl Default for InjectedBridge {
    fn default() -> Self {
        Self {
            namespaces: Vec::new(),
            cluster: "default".into(),
            image: concat!("shmesh-bridge:", env!("CARGO_PKG_VERSION")).into(),
            image_pull_policy: "IfNotPresent".into(),
            cpu: "50m".into(),
            memory: Bytes(128 << 20),
            peers: 4,
            admin_port: 9903,
            log: "info".into(),
        }
    }
}

impl InjectedBridge {
    /// Whether the chart has made what bridges of this link need.
    pub(crate) fn has(&self, namespace: &str, link: &str) -> bool {
        let mut of_namespace = self.namespaces.iter().filter(|each| each.name == namespace);
        of_namespace.any(|each| each.links.iter().any(|name| name == link))
    }
}

impl Pool {
    fn mount_path() -> String {
        shmesh::DEFAULT_DIR.into()
    }
}

impl Limits {
    /// Returns the limit for a pod in this namespace.
    #[must_use]
    pub fn of_pod(&self, namespace: &str) -> Option<Bytes> {
        self.namespaces.get(namespace).copied().or(self.pod)
    }
}

impl Config {
    /// Reads the text of a configuration file over the defaults; `name` is its name in errors.
    ///
    /// # Errors
    /// The text is not a valid configuration; the error shows the line.
    pub fn from_yaml(name: &str, text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        serde_saphyr::from_str(text).map_err(|error| show_yaml_error(name, text, &error))
    }

    /// Returns the full key of an annotation.
    #[must_use]
    pub fn annotation(&self, name: &str) -> String {
        format!("{}/{name}", self.domain)
    }

    pub(crate) fn pool(&self, name: &str) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.name == name)
    }
}

/// Returns the JSON schema of [`Config`], from which the chart's schema is generated.
#[must_use]
pub fn schema() -> schemars::Schema {
    schemars::schema_for!(Config)
}
