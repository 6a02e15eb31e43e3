//! Pods and their status.

use std::collections::{BTreeMap, BTreeSet};

/// A pod that is bound to the node, identified by its uid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Unique on the node for all time.
    pub uid: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Init containers in order; those with [`Container::restartable`] are native sidecars.
    pub init: Vec<Container>,
    /// Other containers in order.
    pub containers: Vec<Container>,
    /// Resource claims of the pod, which its containers name.
    pub claims: Vec<PodClaim>,
}

/// An entry of `spec.resourceClaims` of a pod: a claim in the pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodClaim {
    /// The name that containers use.
    pub name: String,
    /// The name of the ResourceClaim.
    pub object: String,
}

impl Pod {
    /// Creates a pod with this name and uid in the default namespace, without containers.
    pub fn new(name: &str) -> Self {
        Self {
            uid: name.to_owned(),
            namespace: "default".to_owned(),
            name: name.to_owned(),
            init: Vec::new(),
            containers: Vec::new(),
            claims: Vec::new(),
        }
    }

    /// Adds a claim that exists in the namespace of the pod.
    #[must_use]
    pub fn claim(mut self, name: &str, object: &str) -> Self {
        self.claims.push(PodClaim { name: name.to_owned(), object: object.to_owned() });
        self
    }

    /// Adds a container to the pod.
    #[must_use]
    pub fn container(mut self, container: Container) -> Self {
        self.containers.push(container);
        self
    }

    /// Adds an init container to the pod.
    #[must_use]
    pub fn init(mut self, container: Container) -> Self {
        self.init.push(container);
        self
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Container> {
        self.init.iter().chain(&self.containers)
    }

    /// Returns the request of the pod as the scheduler and the kubelet compute it.
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Unique in the pod.
    pub name: String,
    /// Number of devices per resource.
    pub limits: BTreeMap<String, u64>,
    /// For init containers: whether it is a native sidecar.
    pub restartable: bool,
    /// Environment in the pod's spec.
    pub env: Vec<(String, String)>,
    /// Container path and host path of volumes.
    pub mounts: Vec<(String, String)>,
    /// NUMA nodes preferred by the topology manager.
    pub numa: Option<BTreeSet<i64>>,
    /// Names of claims of the pod, each with one of its requests, or with all.
    pub claims: Vec<(String, Option<String>)>,
}

impl Container {
    /// Creates a container without requests.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            limits: BTreeMap::new(),
            restartable: false,
            env: Vec::new(),
            mounts: Vec::new(),
            numa: None,
            claims: Vec::new(),
        }
    }

    /// Uses all devices of a claim of the pod.
    #[must_use]
    pub fn claim(mut self, name: &str) -> Self {
        self.claims.push((name.to_owned(), None));
        self
    }

    /// Uses the devices of one request of a claim of the pod.
    #[must_use]
    pub fn claim_request(mut self, name: &str, request: &str) -> Self {
        self.claims.push((name.to_owned(), Some(request.to_owned())));
        self
    }

    /// Requests devices of a resource.
    #[must_use]
    pub fn limit(mut self, resource: &str, count: u64) -> Self {
        self.limits.insert(resource.to_owned(), count);
        self
    }

    /// Makes an init container a native sidecar.
    #[must_use]
    pub fn restartable(mut self) -> Self {
        self.restartable = true;
        self
    }

    /// Adds an environment variable to the spec.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Adds a volume mount to the spec.
    #[must_use]
    pub fn mount(mut self, container_path: &str, host_path: &str) -> Self {
        self.mounts.push((container_path.to_owned(), host_path.to_owned()));
        self
    }

    /// Sets the NUMA nodes chosen by the topology manager.
    #[must_use]
    pub fn numa(mut self, nodes: impl IntoIterator<Item = i64>) -> Self {
        self.numa = Some(nodes.into_iter().collect());
        self
    }
}

/// The status of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodStatus {
    /// Phase of the pod.
    pub phase: Phase,
    /// Reason of a failure as one word.
    pub reason: String,
    /// Message of a failure as a sentence.
    pub message: String,
    /// Status of all containers, including init containers, by name.
    pub containers: BTreeMap<String, ContainerStatus>,
}

/// The phase of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Not admitted yet, or a container has not started.
    #[default]
    Pending,
    /// Every container has started.
    Running,
    /// All containers ended successfully.
    Succeeded,
    /// The pod was not admitted.
    Failed,
}

/// The status of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerStatus {
    /// State of the container.
    pub state: ContainerState,
    /// Number of restarts so far.
    pub restarts: u32,
    /// `allocatedResourcesStatus`: health of each device by resource. Empty for init containers.
    pub devices: BTreeMap<String, BTreeMap<String, String>>,
    /// Options passed to the runtime at the last start.
    pub options: RunOptions,
}

/// The state of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerState {
    /// Not started, with the reason if a start failed.
    Waiting(Option<String>),
    /// The container is running.
    Running,
    /// A completed init container.
    Completed,
}

impl Default for ContainerState {
    fn default() -> Self {
        Self::Waiting(None)
    }
}

/// Options for the container runtime, merged from all Allocate responses and the pod's spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// Environment variables in order.
    pub envs: Vec<(String, String)>,
    /// Private mounts without SELinux relabelling.
    pub mounts: Vec<shmesh_kubelet_api::deviceplugin::Mount>,
    /// Device nodes to add.
    pub devices: Vec<shmesh_kubelet_api::deviceplugin::DeviceSpec>,
    /// Annotations; the kubelet's own take precedence.
    pub annotations: BTreeMap<String, String>,
    /// Names of CDI devices.
    pub cdi_devices: Vec<String>,
    /// Conflicts between plugins; the kubelet logs them and uses the first value.
    pub conflicts: Vec<String>,
}

impl RunOptions {
    /// Returns the value of an environment variable in the container.
    pub fn env(&self, name: &str) -> Option<&str> {
        self.envs.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}
