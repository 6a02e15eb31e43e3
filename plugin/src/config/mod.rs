//! What it is told: one schema for the file, for `--set`, and for the chart.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | the form: every key, its default, and what it means |
//! | `quantity.rs` | shares of the node's memory (`50%`) |
//! | `source.rs` | the file and `--set` become one document |
//! | `shape.rs` | the document against the schema: every mismatch, with its path |
//! | `rules.rs` | what the schema cannot say: every broken rule, with its path and the remedy |

mod quantity;
mod rules;
mod shape;
mod source;

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) use quantity::Budget;
pub(crate) use rules::{Limits, default_gid};
pub(crate) use shmesh_daemon::bytes::Bytes;
pub(crate) use source::{Override, stamp};

/// The device plugin.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Before the `/` in the names of resources.
    pub(crate) domain: String,
    /// Where the node's root directory is seen from here. Every other path is the node's.
    pub(crate) host_root: PathBuf,
    /// How to talk to the kubelet.
    pub(crate) kubelet: Kubelet,
    /// How to tell the container runtime what a container gets.
    pub(crate) cdi: Cdi,
    /// Private shared memory of a container, in units.
    pub(crate) shm: Shm,
    /// Where pools without a `directory` of their own are; a tmpfs.
    pub(crate) pools_directory: PathBuf,
    /// Directories that containers of several pods share, each a resource of its own.
    pub(crate) pools: Vec<Pool>,
    /// IPC slots of GPUs: `<domain>/gpu-ipc`.
    pub(crate) gpu_ipc: Slots,
    /// IPC slots of NPUs: `<domain>/npu-ipc`.
    pub(crate) npu_ipc: Slots,
    /// A file (the node's path) that lists GPUs and NPUs in place of what the node has; for tests and demonstrations.
    pub(crate) fake_inventory: Option<PathBuf>,
    /// The identity service, in the same process.
    pub(crate) identity: Identity,
    /// How often it is looked whether what is advertised works.
    pub(crate) health: Health,
    /// Taking away what dead pods left in pools.
    pub(crate) sweep: Sweep,
}

/// How to talk to the kubelet.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Kubelet {
    /// Who begins.
    pub(crate) registration: Registration,
    /// Where the kubelet's socket and those of device plugins are.
    pub(crate) device_plugins_dir: PathBuf,
    /// Where the kubelet looks for plugins, for `registration: pluginsRegistry`.
    pub(crate) plugins_registry_dir: PathBuf,
    /// Where the kubelet says which pods have which devices.
    pub(crate) pod_resources_socket: PathBuf,
}

/// Who begins.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Registration {
    /// The plugin registers at the kubelet's socket: every kubelet.
    Legacy,
    /// The kubelet finds the plugin's socket: newer kubelets, quicker after their restart.
    PluginsRegistry,
}

/// How to tell the container runtime what a container gets.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Cdi {
    /// Whether the runtime understands CDI (kubelet 1.31; containerd 2.0 or with `enable_cdi`; CRI-O).
    pub(crate) enabled: bool,
    /// Where the runtime reads specifications.
    pub(crate) directory: PathBuf,
}

/// Private shared memory of a container, in units.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Shm {
    /// One unit: a container that asks for N gets N times this.
    pub(crate) unit: Bytes,
    /// How much of the node's memory may be given away; 0 advertises nothing.
    pub(crate) budget: Budget,
    /// Tell the kubelet which units belong to which NUMA node, where there are several.
    pub(crate) numa: bool,
}

/// A directory that containers of several pods share.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Pool {
    /// After the `/` in the resource's name: up to 63 letters and digits, with `-`, `_` and `.` between them.
    #[schemars(regex(pattern = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"))]
    pub(crate) name: String,
    /// How many containers of the node may have it at once.
    #[serde(default = "Pool::attachments")]
    pub(crate) attachments: u32,
    /// The directory, if not `<poolsDirectory>/<name>`.
    #[serde(default)]
    pub(crate) directory: Option<PathBuf>,
    /// Where containers see it.
    #[serde(default = "Pool::mount_path")]
    pub(crate) mount_path: PathBuf,
    /// The group that may enter; by default made from the name.
    #[serde(default)]
    pub(crate) gid: Option<u32>,
    /// Which pods use it.
    #[serde(default)]
    pub(crate) user_namespaces: UserNamespaces,
    /// The NUMA node that its memory is on, if it is one.
    #[serde(default)]
    pub(crate) numa_node: Option<u32>,
    /// With less free in its file system nobody is let in.
    #[serde(default = "Pool::min_free")]
    pub(crate) min_free: Bytes,
    /// A command that succeeds if the pool may be used.
    #[serde(default)]
    pub(crate) health_command: Vec<String>,
}

/// Which pods use a pool. A mount is either for those with a user namespace of their own or for those without.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum UserNamespaces {
    /// None has `hostUsers: false`.
    #[default]
    Never,
    /// All have it.
    Always,
    /// Some have it; then the mount cannot be `nosuid,nodev,noexec`.
    Mixed,
}

/// IPC slots of accelerators.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Slots {
    /// How many containers may share the memory of one device; 0 advertises nothing.
    pub(crate) slots_per_device: u32,
    /// A command that succeeds if the device that `SHMESH_DEVICE` names may be used.
    pub(crate) health_command: Vec<String>,
}

/// The identity service.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Identity {
    /// Run it in this process. If another process does, its directory is given to containers all the same.
    pub(crate) enabled: bool,
    /// The directory with its socket, which containers get.
    pub(crate) directory: PathBuf,
    /// How many containers of the node may have nothing but it at once: `<domain>/agent`, which a sidecar asks for whose
    /// links stay in its pod. 0 advertises nothing.
    pub(crate) attachments: u32,
    /// A file of pods that confirms uids and gives names.
    pub(crate) pods: Option<PathBuf>,
    /// Refuse to start in a nested pid namespace.
    pub(crate) require_initial_pid_namespace: bool,
}

/// How often it is looked whether what is advertised works.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Health {
    /// Between two looks.
    pub(crate) interval_seconds: u32,
    /// A command that takes longer has failed.
    pub(crate) command_timeout_seconds: u32,
}

/// Taking away what dead pods left in pools.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Sweep {
    /// Whether at all.
    pub(crate) enabled: bool,
    /// Between two questions which pods live.
    pub(crate) interval_seconds: u32,
    /// How long nobody must have had a pool before it is emptied.
    pub(crate) grace_seconds: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            domain: "shmesh.io".into(),
            host_root: "/".into(),
            kubelet: Kubelet::default(),
            cdi: Cdi::default(),
            shm: Shm::default(),
            pools_directory: "/dev/shm/shmesh".into(),
            pools: Vec::new(),
            gpu_ipc: Slots::default(),
            npu_ipc: Slots::default(),
            fake_inventory: None,
            identity: Identity::default(),
            health: Health::default(),
            sweep: Sweep::default(),
        }
    }
}

impl Default for Kubelet {
    fn default() -> Self {
        Self {
            registration: Registration::Legacy,
            device_plugins_dir: shmesh_kubelet_api::DEVICE_PLUGINS_DIR.into(),
            plugins_registry_dir: shmesh_kubelet_api::PLUGINS_REGISTRY_DIR.into(),
            pod_resources_socket: shmesh_kubelet_api::POD_RESOURCES_SOCKET.into(),
        }
    }
}

impl Default for Cdi {
    fn default() -> Self {
        Self { enabled: true, directory: "/var/run/cdi".into() }
    }
}

impl Default for Shm {
    fn default() -> Self {
        Self { unit: Bytes(64 << 20), budget: Budget::Percent(50), numa: true }
    }
}

impl Default for Slots {
    fn default() -> Self {
        Self { slots_per_device: 8, health_command: Vec::new() }
    }
}

impl Default for Identity {
    fn default() -> Self {
        Self {
            enabled: true,
            directory: "/run/shmesh/agent".into(),
            attachments: 256,
            pods: None,
            require_initial_pid_namespace: false,
        }
    }
}

impl Default for Health {
    fn default() -> Self {
        Self { interval_seconds: 5, command_timeout_seconds: 5 }
    }
}

impl Default for Sweep {
    fn default() -> Self {
        Self { enabled: true, interval_seconds: 10, grace_seconds: 60 }
    }
}

impl Pool {
    fn attachments() -> u32 {
        64
    }

    fn mount_path() -> PathBuf {
        "/dev/shm".into()
    }

    fn min_free() -> Bytes {
        Bytes(16 << 20)
    }

    /// Where it is on the node.
    pub(crate) fn directory(&self, config: &Config) -> PathBuf {
        self.directory.clone().unwrap_or_else(|| config.pools_directory.join(&self.name))
    }

    /// Who may enter.
    pub(crate) fn gid(&self) -> u32 {
        self.gid.unwrap_or_else(|| default_gid(&self.name))
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Problem {
    /// Where: `pools[1].gid`.
    pub(crate) path: String,
    /// What, the limit, and the remedy.
    pub(crate) what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.what)
    }
}

/// All that is wrong.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
#[error("{} in the configuration:\n{}", count(.0.len()), lines(.0))]
pub(crate) struct Problems(pub(crate) Vec<Problem>);

fn count(problems: usize) -> String {
    if problems == 1 { "one problem".into() } else { format!("{problems} problems") }
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("  {problem}")).collect::<Vec<_>>().join("\n")
}

impl Config {
    /// Reads the file and the settings. Nothing is bound or made.
    ///
    /// All that is wrong is in the error, also when some of it hides the rest.
    pub(crate) fn load(
        file: Option<&Path>,
        settings: &[Override],
        limits: &Limits,
    ) -> Result<Self, Problems> {
        let (mut document, mut problems) = source::document(file, settings);
        problems.extend(shape::conform(&mut document, schema().as_value()));
        // What does not conform is out of the document by now, so that the rest can be judged.
        match serde_json::from_value::<Self>(document) {
            Ok(config) => {
                problems.extend(rules::check(&config, limits));
                if problems.is_empty() { Ok(config) } else { Err(Problems(problems)) }
            }
            Err(error) => {
                problems.push(Problem { path: "(document)".into(), what: error.to_string() });
                Err(Problems(problems))
            }
        }
    }

    /// A path of the node, as it is seen from here.
    pub(crate) fn seen(&self, path: &Path) -> PathBuf {
        seen(&self.host_root, path)
    }
}

/// A path of the node, as it is seen where the node's root is `root`.
pub(crate) fn seen(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// The schema, as the chart has it too.
pub(crate) fn schema() -> schemars::Schema {
    schemars::schema_for!(Config)
}
