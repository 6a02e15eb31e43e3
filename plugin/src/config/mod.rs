//! Configuration of the device plugin: one schema for the file, for `--set` and for the chart.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | all keys with defaults and meaning |
//! | `quantity.rs` | shares of the node's memory (`50%`) |
//! | `reload.rs` | checks whether a running plugin can take over a changed configuration |
//! | `source.rs` | merges the file and `--set` into one document |
//! | `shape.rs` | checks the document against the schema and reports every mismatch |
//! | `rules.rs` | checks rules that the schema cannot express and reports every violation |
//! | `summary.rs` | the part of a configuration that a cluster shows |

mod quantity;
mod reload;
mod rules;
mod shape;
mod source;
mod summary;

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use quantity::Budget;
pub(crate) use reload::check_reload;
pub(crate) use rules::{ConfigLimits, check_mount_path, default_gid};
pub(crate) use shape::conform;
pub(crate) use shmesh_sys::quantity::Bytes;
pub(crate) use source::{Override, stamp};
pub use summary::ConfigSummary;

/// Configuration of the device plugin.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Domain of the resource names: the part before the `/`.
    pub(crate) domain: String,
    /// The server for the kubelet: the device plugin, or the DRA driver. One of them per node.
    pub(crate) mode: FrontEnd,
    /// The DRA driver, for `mode: dra`.
    pub(crate) dra: Dra,
    /// Where the root directory of the node is mounted in the plugin's container. All other paths are paths
    /// of the node.
    pub(crate) host_root: PathBuf,
    /// Communication with the kubelet.
    pub(crate) kubelet: Kubelet,
    /// CDI specifications for the container runtime.
    pub(crate) cdi: Cdi,
    /// Private shared memory for containers, in units.
    pub(crate) shm: Shm,
    /// Parent directory of pools without a `directory` of their own; must be on a tmpfs.
    pub(crate) pools_directory: PathBuf,
    /// Directories that containers of several pods share; each is a resource.
    pub(crate) pools: Vec<Pool>,
    /// IPC slots of GPUs: `<domain>/gpu-ipc`.
    pub(crate) gpu_ipc: Slots,
    /// IPC slots of NPUs: `<domain>/npu-ipc`.
    pub(crate) npu_ipc: Slots,
    /// A file on the node that lists GPUs and NPUs instead of the real ones, for tests and demonstrations.
    pub(crate) fake_inventory: Option<PathBuf>,
    /// The identity service, which runs in the same process.
    pub(crate) identity: Identity,
    /// Health checks of advertised devices.
    pub(crate) health: Health,
    /// Garbage collection of pools: removing files of dead pods.
    pub(crate) sweep: Sweep,
}

/// The server for the kubelet. A node has one of them, because a resource name must not come from both.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum FrontEnd {
    /// The device plugin: counted resources in `resources.limits`. Works with every Kubernetes.
    DevicePlugin,
    /// The DRA driver: ResourceClaims with a directory and bytes of their own. Needs Kubernetes 1.36.
    Dra,
}

/// The DRA driver. Its name is `domain`.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Dra {
    /// Parent of the directories of claims; must be on a tmpfs, and nothing else may be in it.
    pub(crate) directory: PathBuf,
    /// Memory that claims can reserve, in bytes or as a share of the node's memory.
    #[schemars(extend("minimum" = rules::MIN_DRA_BUDGET))]
    pub(crate) budget: Budget,
    /// How many claims can have a directory at the same time; at most `gids.count`.
    #[schemars(range(min = 1))]
    pub(crate) attachments: u32,
    /// Groups, one of which each claim gets. All of them must be supplemental groups of the plugin.
    pub(crate) gids: GidRange,
    /// Directory of the sockets of DRA drivers. This one, `stateDirectory` and `kubelet.pluginsRegistryDir` must have the
    /// same path in the plugin's container as on the node, without `hostRoot`, because the kubelet connects to it.
    pub(crate) plugins_dir: PathBuf,
    /// Directory of the checkpoint, which outlives the plugin; default `<pluginsDir>/<domain>`.
    pub(crate) state_directory: Option<PathBuf>,
}

/// A range of group ids.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct GidRange {
    /// The first group id.
    pub(crate) first: u32,
    /// The number of group ids, all of which the plugin's pod lists.
    #[schemars(range(min = 1, max = 1024))]
    pub(crate) count: u32,
}

/// Communication with the kubelet.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Kubelet {
    /// Whether the plugin registers or the kubelet discovers it.
    pub(crate) registration: Registration,
    /// Directory of the kubelet's socket and the sockets of device plugins.
    pub(crate) device_plugins_dir: PathBuf,
    /// Directory in which the kubelet discovers plugins, for `registration: pluginsRegistry`.
    pub(crate) plugins_registry_dir: PathBuf,
    /// Socket on which the kubelet lists the devices of its pods.
    pub(crate) pod_resources_socket: PathBuf,
}

/// Whether the plugin registers or the kubelet discovers it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Registration {
    /// The plugin registers at the kubelet's socket. Works with every kubelet.
    Legacy,
    /// The kubelet discovers the plugin's socket. Recovers faster after a restart of newer kubelets.
    PluginsRegistry,
}

/// CDI specifications for the container runtime.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Cdi {
    /// Whether the runtime supports CDI (kubelet 1.31; containerd 2.0, containerd 1.7 with `enable_cdi`,
    /// CRI-O).
    pub(crate) enabled: bool,
    /// Directory from which the runtime reads CDI specifications.
    pub(crate) directory: PathBuf,
}

/// Private shared memory for containers, in units.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Shm {
    /// Size of a unit: a container that requests N units gets N times this much.
    pub(crate) unit: Bytes,
    /// Memory to advertise, in bytes or as a share of the node's memory; 0 disables the resource.
    pub(crate) budget: Budget,
    /// Whether to report the NUMA node of each unit to the kubelet on nodes with several NUMA nodes.
    pub(crate) numa: bool,
}

/// A directory that containers of several pods share.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Pool {
    /// Resource name after the `/`: up to 63 letters and digits, with `-`, `_` and `.` between them.
    #[schemars(regex(pattern = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"))]
    pub(crate) name: String,
    /// How many containers of the node can mount the pool at the same time.
    #[serde(default = "Pool::attachments")]
    pub(crate) attachments: u32,
    /// Directory on the node; default `<poolsDirectory>/<name>`.
    #[serde(default)]
    pub(crate) directory: Option<PathBuf>,
    /// Mount path in containers.
    #[serde(default = "Pool::mount_path")]
    pub(crate) mount_path: PathBuf,
    /// Group with access to the pool; the default is derived from the name.
    #[serde(default)]
    pub(crate) gid: Option<u32>,
    /// Which pods can use the pool, by their user namespace.
    #[serde(default)]
    pub(crate) user_namespaces: UserNamespaces,
    /// NUMA node of the pool's memory, if there is exactly one.
    #[serde(default)]
    pub(crate) numa_node: Option<u32>,
    /// Below this much free space the pool is unhealthy and no new container can mount it.
    #[serde(default = "Pool::min_free")]
    pub(crate) min_free: Bytes,
    /// A command that exits with 0 if the pool is healthy.
    #[serde(default)]
    pub(crate) health_command: Vec<String>,
}

/// Which pods can use a pool. A mount works either for pods with a user namespace or for pods without one.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum UserNamespaces {
    /// Only pods without `hostUsers: false`.
    #[default]
    Never,
    /// Only pods with `hostUsers: false`.
    Always,
    /// Both; the mount then lacks `nosuid,nodev,noexec`.
    Mixed,
}

/// IPC slots of accelerators.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Slots {
    /// How many containers can share the memory of one device; 0 disables the resource.
    pub(crate) slots_per_device: u32,
    /// A command that exits with 0 if the device named by `SHMESH_DEVICE` is healthy.
    pub(crate) health_command: Vec<String>,
}

/// Configuration of the identity service.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Identity {
    /// Whether to run the service in this process. If disabled, containers still get its directory.
    pub(crate) enabled: bool,
    /// Directory of the socket, which is mounted into containers.
    pub(crate) directory: PathBuf,
    /// Units of `<domain>/agent`, which provides the service and nothing else, for sidecars without a pool; 0
    /// disables the resource.
    pub(crate) attachments: u32,
    /// A file with the pods of the node, which confirms uids and adds names.
    pub(crate) pods: Option<PathBuf>,
    /// Whether to fail in a nested pid namespace.
    pub(crate) require_initial_pid_namespace: bool,
}

/// Health checks of advertised devices.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Health {
    /// Seconds between two health checks.
    pub(crate) interval_seconds: u32,
    /// Timeout of a health command in seconds.
    pub(crate) command_timeout_seconds: u32,
}

/// Garbage collection of pools: removing files of dead pods.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Sweep {
    /// Whether to empty unused pools.
    pub(crate) enabled: bool,
    /// Seconds between two requests for the kubelet's list of pods.
    pub(crate) interval_seconds: u32,
    /// Seconds that a pool must be unused before it is emptied.
    pub(crate) grace_seconds: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            domain: "shmesh.io".into(),
            mode: FrontEnd::DevicePlugin,
            dra: Dra::default(),
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

impl Default for Dra {
    fn default() -> Self {
        Self {
            directory: "/dev/shm/shmesh-claims".into(),
            budget: Budget::Percent(50),
            attachments: 64,
            gids: GidRange::default(),
            plugins_dir: "/var/lib/kubelet/plugins".into(),
            state_directory: None,
        }
    }
}

impl Default for GidRange {
    fn default() -> Self {
        Self { first: 61_000, count: 256 }
    }
}

impl GidRange {
    /// Returns the group ids.
    pub(crate) fn range(self) -> std::ops::Range<u32> {
        self.first..self.first.saturating_add(self.count)
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

    /// Returns the directory on the node.
    pub(crate) fn directory(&self, config: &Config) -> PathBuf {
        self.directory.clone().unwrap_or_else(|| config.pools_directory.join(&self.name))
    }

    /// Returns the group with access to the pool.
    pub(crate) fn gid(&self) -> u32 {
        self.gid.unwrap_or_else(|| default_gid(&self.name))
    }
}

/// One invalid key of the configuration.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Problem {
    /// Path of the key, such as `pools[1].gid`.
    pub(crate) path: String,
    /// The problem, the limit, and the remedy.
    pub(crate) what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.what)
    }
}

/// All problems of a configuration.
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
    /// Loads the file and the overrides, without side effects.
    ///
    /// The error lists all problems, even if one of them prevents parsing the rest.
    pub(crate) fn load(
        file: Option<&Path>,
        settings: &[Override],
        limits: &ConfigLimits,
    ) -> Result<Self, Problems> {
        let (document, problems) = source::document(file, settings);
        Self::checked(document, problems, limits)
    }

    /// Checks a document. `problems` has the mistakes in parts of it that could not be parsed.
    fn checked(
        mut document: Value,
        mut problems: Vec<Problem>,
        limits: &ConfigLimits,
    ) -> Result<Self, Problems> {
        problems.extend(conform(&mut document, schema().as_value()));
        // `conform` removed nonconforming values, so that the rules can check the rest.
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

    /// Returns the directory of the DRA driver's checkpoint and socket on the node.
    pub(crate) fn state_directory(&self) -> PathBuf {
        let given = self.dra.state_directory.clone();
        given.unwrap_or_else(|| self.dra.plugins_dir.join(&self.domain))
    }

    /// Maps a path of the node to a path of this process.
    pub(crate) fn seen(&self, path: &Path) -> PathBuf {
        seen(&self.host_root, path)
    }
}

/// Maps a path of the node to a path of this process, given the node's root.
pub(crate) fn seen(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Returns the JSON schema, which the chart embeds.
pub(crate) fn schema() -> schemars::Schema {
    schemars::schema_for!(Config)
}
