//! What the cluster has and allows.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use shmesh_daemon::bytes::Bytes;

/// What injection is told. Where the device plugin has the same thing, the words are the same.
///
/// ```
/// let config: shmesh_injector::Config = serde_json::from_str(r#"{"pools": [{"name": "radio"}]}"#)?;
/// assert_eq!(config.pools[0].mount_path, "/dev/shm");
/// assert_eq!(config.annotation("links"), "shmesh.io/links");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Config {
    /// Before the `/` in annotations and in the names of resources.
    pub domain: String,
    /// The device plugin's pools.
    pub pools: Vec<Pool>,
    /// The device plugin's private shared memory.
    pub shm: Shm,
    /// The resource, after the `/`, that gives a container the identity service's directory and nothing else; a sidecar that
    /// gets no pool requests it. Empty: there is none, and then such a pod must have `shareProcessNamespace`.
    pub agent_resource: String,
    /// The sidecar.
    pub sidecar: Sidecar,
    /// How much may be asked for.
    pub limits: Limits,
    /// Let pods with `hostPID` have links.
    pub allow_host_pid: bool,
}

/// A pool, as the device plugin's configuration has it; keys that matter on nodes alone are read over.
///
/// ```
/// use shmesh_injector::{Pool, UserNamespaces};
/// let pool: Pool = serde_json::from_str(r#"{"name": "radio", "gid": 60001, "userNamespaces": "mixed"}"#)?;
/// assert_eq!(pool.user_namespaces, UserNamespaces::Mixed);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// After the `/` in the resource's name.
    pub name: String,
    /// Where containers see it.
    #[serde(default = "Pool::mount_path")]
    pub mount_path: String,
    /// Which pods may use it.
    #[serde(default)]
    pub user_namespaces: UserNamespaces,
}

/// Which pods may use a pool.
///
/// ```
/// assert_eq!(shmesh_injector::UserNamespaces::default(), shmesh_injector::UserNamespaces::Never);
/// ```
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum UserNamespaces {
    /// Those without `hostUsers: false`.
    #[default]
    Never,
    /// Those with it.
    Always,
    /// All.
    Mixed,
}

/// The device plugin's private shared memory.
///
/// ```
/// assert_eq!(shmesh_injector::Shm::default().unit.to_string(), "64Mi");
/// ```
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Shm {
    /// One unit of `<domain>/shm`.
    pub unit: Bytes,
}

/// The sidecar.
///
/// ```
/// assert_eq!(shmesh_injector::Sidecar::default().admin_port, 9902);
/// ```
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Sidecar {
    /// Its image.
    pub image: String,
    /// When the image is pulled.
    pub image_pull_policy: String,
    /// Its share of a CPU; in a pod whose containers all have equal requests and limits, its limit too.
    pub cpu: String,
    /// Memory beside that of the links.
    pub memory: Bytes,
    /// Where probes and metrics are served; `[::]` where pods have IPv6 alone.
    pub admin_address: String,
    /// At which port.
    pub admin_port: u16,
    /// The user it runs as where the pod would make it root.
    pub user: u32,
    /// What it logs.
    pub log: String,
}

/// How much may be asked for. What is not there is not limited.
///
/// ```
/// let limits: shmesh_injector::Limits = serde_json::from_str(r#"{"pod": "1Gi", "namespaces": {"radio": "8Gi"}}"#)?;
/// assert_eq!(limits.of_pod("radio").unwrap().to_string(), "8Gi");
/// assert_eq!(limits.of_pod("elsewhere").unwrap().to_string(), "1Gi");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// The memory of all links that one pod keeps.
    pub pod: Option<Bytes>,
    /// The same for pods of these namespaces.
    pub namespaces: BTreeMap<String, Bytes>,
    /// What the largest node can give: more can never be scheduled.
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

impl Pool {
    fn mount_path() -> String {
        shmesh::DEFAULT_DIR.into()
    }
}

impl Limits {
    /// What a pod of this namespace may keep.
    ///
    /// ```
    /// assert_eq!(shmesh_injector::Limits::default().of_pod("radio"), None, "as much as it wants");
    /// ```
    #[must_use]
    pub fn of_pod(&self, namespace: &str) -> Option<Bytes> {
        self.namespaces.get(namespace).copied().or(self.pod)
    }
}

impl Config {
    /// The key of an annotation.
    ///
    /// ```
    /// assert_eq!(shmesh_injector::Config::default().annotation("containers"), "shmesh.io/containers");
    /// ```
    #[must_use]
    pub fn annotation(&self, name: &str) -> String {
        format!("{}/{name}", self.domain)
    }

    pub(crate) fn pool(&self, name: &str) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.name == name)
    }
}

/// The schema of [`Config`], from which the chart's is made.
///
/// ```
/// assert!(shmesh_injector::schema().as_value()["properties"]["pools"].is_object());
/// ```
#[must_use]
pub fn schema() -> schemars::Schema {
    schemars::schema_for!(Config)
}
