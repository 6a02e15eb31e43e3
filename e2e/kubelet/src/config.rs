//! What a node is like, and where its files are.

use std::path::{Path, PathBuf};
use std::time::Duration;

use shmesh_kubelet_api::KUBELET_SOCKET;

use crate::clock::Clock;

/// What a node is like.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use shmesh_fake_kubelet::{Config, Race};
///
/// let config = Config { race: Race::Fixed, seed: 42, ..Config::new("/tmp/node") };
/// assert_eq!(config.paths().kubelet_socket(), std::path::Path::new("/tmp/node/device-plugins/kubelet.sock"));
/// # });
/// ```
#[derive(Clone, Debug)]
pub struct Config {
    /// Stands for `/var/lib/kubelet`. Keep it short: a socket's path has at most 107 bytes.
    pub root: PathBuf,
    /// Which kubelet it is.
    pub race: Race,
    /// The time that it goes by.
    pub clock: Clock,
    /// What chance makes of its sets, which have no order.
    pub seed: u64,
    /// How often the node's status is told to the API server, and containers that did not start are tried again.
    pub status_period: Duration,
}

/// What the end of an old stream does to a newer registration of the same resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Race {
    /// Up to 1.36: plugins are told apart by their resource alone, so it disconnects the newer one, for good.
    #[default]
    ByName,
    /// From 1.37 (kubernetes#135437): they are told apart by their socket too.
    Fixed,
}

impl Config {
    /// A node of Kubernetes 1.36 whose files are in `root`, on the runtime's clock. To be made inside the runtime.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            race: Race::default(),
            clock: Clock::runtime(),
            seed: 0,
            status_period: Duration::from_secs(10),
        }
    }

    /// Where its files are.
    pub fn paths(&self) -> Paths {
        Paths { root: self.root.clone() }
    }
}

/// Where the files of a node are.
///
/// ```
/// let paths = shmesh_fake_kubelet::Paths::new("/var/lib/kubelet");
/// assert_eq!(paths.device_plugins(), std::path::Path::new("/var/lib/kubelet/device-plugins"));
/// ```
#[derive(Clone, Debug)]
pub struct Paths {
    root: PathBuf,
}

impl Paths {
    /// The paths below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where plugins of the legacy way have their sockets.
    pub fn device_plugins(&self) -> PathBuf {
        self.root.join("device-plugins")
    }

    /// Where they register.
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins().join(KUBELET_SOCKET)
    }

    /// What the kubelet remembers over a restart.
    pub fn checkpoint(&self) -> PathBuf {
        self.device_plugins().join("kubelet_internal_checkpoint")
    }

    /// The directory that is watched for sockets of plugins.
    pub fn plugins_registry(&self) -> PathBuf {
        self.root.join("plugins_registry")
    }

    /// Where the kubelet says which pod has which device.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.root.join("pod-resources").join(KUBELET_SOCKET)
    }

    /// What stands for `/var/lib/kubelet`.
    pub fn root(&self) -> &Path {
        &self.root
    }
}
