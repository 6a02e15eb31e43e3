//! Pods: what they ask for, and what became of them.

use std::collections::{BTreeMap, BTreeSet};

/// A pod that has been bound to the node. Its uid tells it from others.
///
/// ```
/// use shmesh_fake_kubelet::{Container, Pod};
///
/// let pod = Pod::new("trainer").container(Container::new("main").limit("shmesh.io/shm", 4));
/// assert_eq!((pod.uid.as_str(), pod.containers[0].limits["shmesh.io/shm"]), ("trainer", 4));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Unique on the node, over all time.
    pub uid: String,
    /// As in the API.
    pub namespace: String,
    /// As in the API.
    pub name: String,
    /// Init containers, in the order of the spec; those with [`Container::restartable`] are native sidecars.
    pub init: Vec<Container>,
    /// The others, in the order of the spec.
    pub containers: Vec<Container>,
}

impl Pod {
    /// A pod of this name and uid in the default namespace, without containers.
    pub fn new(name: &str) -> Self {
        Self {
            uid: name.to_owned(),
            namespace: "default".to_owned(),
            name: name.to_owned(),
            init: Vec::new(),
            containers: Vec::new(),
        }
    }

    /// With another container.
    #[must_use]
    pub fn container(mut self, container: Container) -> Self {
        self.containers.push(container);
        self
    }

    /// With another init container.
    #[must_use]
    pub fn init(mut self, container: Container) -> Self {
        self.init.push(container);
        self
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Container> {
        self.init.iter().chain(&self.containers)
    }

    /// What the scheduler and the kubelet's predicates count for the pod.
    pub(crate) fn request(&self, resource: &str) -> u64 {
        let of = |container: &Container| container.limits.get(resource).copied().unwrap_or(0);
        let (mut sidecars, mut peak) = (0, 0);
        for container in &self.init {
            if container.restartable {
                sidecars += of(container);
            }
            peak = peak.max(if container.restartable { sidecars } else { sidecars + of(container) });
        }
        peak.max(sidecars + self.containers.iter().map(of).sum::<u64>())
    }
}

/// A container of a [`Pod`].
///
/// ```
/// let container = shmesh_fake_kubelet::Container::new("main").limit("a.b/c", 1).env("A", "1").numa([0]);
/// assert!(!container.restartable && container.numa.is_some());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Unique in the pod.
    pub name: String,
    /// How many devices of which resource.
    pub limits: BTreeMap<String, u64>,
    /// Of an init container: it goes on running beside those that come after it.
    pub restartable: bool,
    /// The environment of the pod's spec.
    pub env: Vec<(String, String)>,
    /// Container path and host path of the pod's volumes.
    pub mounts: Vec<(String, String)>,
    /// What the topology manager decided for it: the NUMA nodes to take devices from, if they can be had there.
    pub numa: Option<BTreeSet<i64>>,
}

impl Container {
    /// A container that asks for nothing.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            limits: BTreeMap::new(),
            restartable: false,
            env: Vec::new(),
            mounts: Vec::new(),
            numa: None,
        }
    }

    /// Asking for so many devices of a resource.
    #[must_use]
    pub fn limit(mut self, resource: &str, count: u64) -> Self {
        self.limits.insert(resource.to_owned(), count);
        self
    }

    /// As an init container, a native sidecar.
    #[must_use]
    pub fn restartable(mut self) -> Self {
        self.restartable = true;
        self
    }

    /// With a variable in its spec.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// With a volume in its spec.
    #[must_use]
    pub fn mount(mut self, container_path: &str, host_path: &str) -> Self {
        self.mounts.push((container_path.to_owned(), host_path.to_owned()));
        self
    }

    /// Placed by the topology manager on these NUMA nodes.
    #[must_use]
    pub fn numa(mut self, nodes: impl IntoIterator<Item = i64>) -> Self {
        self.numa = Some(nodes.into_iter().collect());
        self
    }
}

/// What became of a pod.
///
/// ```
/// let status = shmesh_fake_kubelet::PodStatus::default();
/// assert_eq!(status.phase, shmesh_fake_kubelet::Phase::Pending);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodStatus {
    /// How far it is.
    pub phase: Phase,
    /// In a word, why it failed.
    pub reason: String,
    /// In a sentence, why it failed.
    pub message: String,
    /// Its containers, init containers too, by name.
    pub containers: BTreeMap<String, ContainerStatus>,
}

/// How far a pod is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Not admitted yet, or a container has not started yet.
    #[default]
    Pending,
    /// Every container has started.
    Running,
    /// Over, and all went well.
    Succeeded,
    /// Over: it was not admitted.
    Failed,
}

/// What became of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerStatus {
    /// Whether it runs.
    pub state: ContainerState,
    /// How often it was started again.
    pub restarts: u32,
    /// `allocatedResourcesStatus`: health of each device by resource. Only of containers that are not init containers.
    pub devices: BTreeMap<String, BTreeMap<String, String>>,
    /// What the runtime was told when it was started last.
    pub options: RunOptions,
}

/// Whether a container runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerState {
    /// Not started; if it was tried, why it did not start.
    Waiting(Option<String>),
    /// It runs.
    Running,
    /// An init container that is done.
    Completed,
}

impl Default for ContainerState {
    fn default() -> Self {
        Self::Waiting(None)
    }
}

/// What the container runtime is told: all resources' answers to Allocate, then what the pod's spec says.
///
/// ```
/// let options = shmesh_fake_kubelet::RunOptions { envs: vec![("A".into(), "1".into()), ("A".into(), "2".into())], ..Default::default() };
/// assert_eq!(options.env("A"), Some("2"), "the later one counts, and the pod's come last");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// Environment.
    pub envs: Vec<(String, String)>,
    /// Mounts: private, and not relabelled for SELinux.
    pub mounts: Vec<shmesh_kubelet_api::deviceplugin::Mount>,
    /// Device nodes.
    pub devices: Vec<shmesh_kubelet_api::deviceplugin::DeviceSpec>,
    /// Annotations, the kubelet's own over the plugins'.
    pub annotations: BTreeMap<String, String>,
    /// CDI names.
    pub cdi_devices: Vec<String>,
    /// What two plugins disagreed about; the kubelet logs it and takes the first.
    pub conflicts: Vec<String>,
}

impl RunOptions {
    /// What the container will find in its environment.
    pub fn env(&self, name: &str) -> Option<&str> {
        self.envs.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}
