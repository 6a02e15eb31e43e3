//! Configuration of a node, and its paths.

use std::path::{Path, PathBuf};
use std::time::Duration;

use shmesh_kubelet_api::KUBELET_SOCKET;

use crate::apiserver::ApiServer;
use crate::clock::Clock;

/// Configuration of a node.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory used as `/var/lib/kubelet`. Keep it short: a socket path has at most 107 bytes.
    pub root: PathBuf,
    /// Behaviour in the registration race.
    pub race: Race,
    /// The clock for all timeouts.
    pub clock: Clock,
    /// Seed for the order of unordered sets.
    pub seed: u64,
    /// Interval for updating the status of the node and retrying containers.
    pub status_period: Duration,
    /// The API server; without one, pods cannot use claims.
    pub api: Option<ApiServer>,
    /// Name of the node in the API server.
    pub node_name: String,
}

/// Behaviour in races that a newer kubelet does not have any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Race {
    /// Up to 1.36: device plugins are identified by their resource, so the end of a stream disconnects the newer one permanently. A
    /// pod that never got a claim unprepares it for the only other pod, and a pod that comes while a claim is being unprepared uses
    /// it.
    #[default]
    ByName,
    /// Since 1.37 (kubernetes#135437, #140212, #140527): device plugins are identified by their socket too, and claims in use are
    /// not unprepared.
    Fixed,
}

impl Config {
    /// Creates the configuration of a Kubernetes 1.36 node with files in `root`, on tokio's clock. Call it
    /// inside the runtime.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            race: Race::default(),
            clock: Clock::runtime(),
            seed: 0,
            status_period: Duration::from_secs(10),
            api: None,
            node_name: "node".to_owned(),
        }
    }

    /// Returns the paths of the node.
    pub fn paths(&self) -> Paths {
        Paths { root: self.root.clone() }
    }
}

/// The paths of a node.
#[derive(Clone, Debug)]
pub struct Paths {
    root: PathBuf,
}

impl Paths {
    /// Creates the paths below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the directory of device plugin sockets.
    pub fn device_plugins(&self) -> PathBuf {
        self.root.join("device-plugins")
    }

    /// Returns the socket at which device plugins register.
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins().join(KUBELET_SOCKET)
    }

    /// Returns the checkpoint file of the device manager.
    pub fn checkpoint(&self) -> PathBuf {
        self.device_plugins().join("kubelet_internal_checkpoint")
    }

    /// Returns the checkpoint file of claims.
    pub fn dra_checkpoint(&self) -> PathBuf {
        self.root.join("dra_manager_state")
    }

    /// Returns the directory below which drivers place their sockets and state.
    pub fn plugins(&self) -> PathBuf {
        self.root.join("plugins")
    }

    /// Returns the directory in which plugins are discovered.
    pub fn plugins_registry(&self) -> PathBuf {
        self.root.join("plugins_registry")
    }

    /// Returns the socket of the pod resources API.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.root.join("pod-resources").join(KUBELET_SOCKET)
    }

    /// Returns the directory used as `/var/lib/kubelet`.
    pub fn root(&self) -> &Path {
        &self.root
    }
}
