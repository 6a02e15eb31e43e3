//! A node: what a script does to it, and what it can see.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fmt, io};

use crate::api::{Api, Quantity};
use crate::clock::Clock;
use crate::config::{Config, Paths};
use crate::journal::{Event, Journal, Record};
use crate::kubelet::Kubelet;
use crate::pod::{ContainerState, ContainerStatus, Phase, Pod, PodStatus};
use crate::random::Chance;

/// A node with its pods and containers, and a kubelet that can be started and killed. Clones are the same node.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap().block_on(async {
/// use shmesh_fake_kubelet::{Config, Container, Node, Phase, Pod};
///
/// let dir = tempfile::tempdir()?;
/// let node = Node::new(Config::new(dir.path()));
/// node.start_kubelet().await?;
/// let status = node.add_pod(Pod::new("a").container(Container::new("main"))).await;
/// assert_eq!(status.phase, Phase::Running, "it asks for nothing");
/// node.kill_kubelet().await;
/// # Ok::<(), std::io::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Node {
    config: Config,
    journal: Arc<Journal>,
    api: Arc<Api>,
    kubelet: Arc<Mutex<Option<Arc<Kubelet>>>>,
    chance: Arc<Mutex<Chance>>,
}

/// Who has a device.
///
/// ```
/// let holder = shmesh_fake_kubelet::Holder { device: "u0".into(), pod: "a".into(), container: "main".into() };
/// assert_eq!(holder.device, "u0");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// The device's name.
    pub device: String,
    /// Uid of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
}

/// What was waited for did not come. It says what there was instead.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap().block_on(async {
/// use std::time::Duration;
/// use shmesh_fake_kubelet::{Config, Node};
///
/// let node = Node::new(Config::new("/tmp/nowhere"));
/// let late = node.wait_for(Duration::from_secs(1), |node| node.allocatable("a.b/c") == 1).await.unwrap_err();
/// assert!(late.to_string().starts_with("not within 1s"));
/// # });
/// ```
#[derive(Clone, Debug)]
pub struct Late {
    limit: Duration,
    resources: BTreeMap<String, Quantity>,
    last: Vec<Record>,
}

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not within {:?}; resources: {:?}; lately: {:?}", self.limit, self.resources, self.last)
    }
}

impl std::error::Error for Late {}

impl Node {
    /// A node whose kubelet has not been started yet.
    pub fn new(config: Config) -> Self {
        Self {
            journal: Arc::new(Journal::new(config.clock.clone())),
            api: Arc::default(),
            kubelet: Arc::default(),
            chance: Arc::new(Mutex::new(Chance::new(config.seed))),
            config,
        }
    }

    /// Where its files are.
    pub fn paths(&self) -> Paths {
        self.config.paths()
    }

    /// The time that it goes by.
    pub fn clock(&self) -> &Clock {
        &self.config.clock
    }

    fn kubelet(&self) -> Option<Arc<Kubelet>> {
        self.kubelet.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Starts the kubelet, which admits all pods again before this returns.
    pub async fn start_kubelet(&self) -> io::Result<()> {
        self.start_kubelet_alone().await?;
        self.learn_pods().await;
        Ok(())
    }

    /// Starts the kubelet, but does not let it reach the API server: it knows no pods until [`Node::learn_pods`].
    pub async fn start_kubelet_alone(&self) -> io::Result<()> {
        let mut running = self.kubelet.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_some() {
            let error = "the kubelet runs already: kill it first";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, error));
        }
        *running = Some(Kubelet::start(&self.config, &self.journal, &self.api)?);
        Ok(())
    }

    /// Lets the kubelet have its pods, in no order. Does nothing if it has them, or does not run.
    pub async fn learn_pods(&self) {
        let Some(kubelet) = self.kubelet() else { return };
        if !self.api.all_known() {
            let pods = self.api.active();
            let pods = self.chance.lock().unwrap_or_else(PoisonError::into_inner).shuffled(pods);
            kubelet.process.run(kubelet.learn_pods(pods)).await;
        }
    }

    /// Kills the kubelet: every connection ends, sockets stay as files, containers run on. Does nothing if it does not run.
    pub async fn kill_kubelet(&self) {
        let kubelet = self.kubelet.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(kubelet) = kubelet {
            kubelet.process.kill().await;
            self.journal.add(Event::KubeletKilled);
        }
    }

    /// Kills the kubelet and starts it again.
    pub async fn restart_kubelet(&self) -> io::Result<()> {
        self.kill_kubelet().await;
        self.start_kubelet().await
    }

    /// Switches the node off: the kubelet is killed and containers end. What is on disk stays; plugins are the caller's.
    pub async fn switch_off(&self) {
        self.kill_kubelet().await;
        self.api.stop_containers();
    }

    /// Lets the kubelet give up the plugin of a resource, as it does in the race by name: the connection is closed, the plugin
    /// lives, and its socket is untouched. Does nothing if nobody is registered.
    pub fn give_up(&self, resource: &str) {
        if let Some(kubelet) = self.kubelet() {
            kubelet.registry.give_up(resource);
        }
    }

    /// Binds a pod to the node, and returns when it has been admitted and its containers were started, or not. Where no
    /// kubelet runs, it waits for one, and this does not. A uid that is there already is left as it is.
    pub async fn add_pod(&self, pod: Pod) -> PodStatus {
        let uid = pod.uid.clone();
        let added = self.api.add(pod.clone());
        if let Some(kubelet) = self.kubelet().filter(|_| added && self.api.all_known()) {
            kubelet.process.run(kubelet.add_pod(&pod)).await;
        }
        self.pod(&uid).unwrap_or_default()
    }

    /// Deletes a pod. Nobody tells the plugin, and its devices are free when the next pod is admitted. Whether it was there.
    pub fn delete_pod(&self, uid: &str) -> bool {
        let deleted = self.api.remove(uid);
        self.journal.changed();
        deleted
    }

    /// Lets a pod end well. It stays known, but is not active any more.
    pub fn finish_pod(&self, uid: &str) {
        self.api.update(uid, |status| {
            status.phase = Phase::Succeeded;
            status.containers.values_mut().for_each(|status| status.state = ContainerState::Completed);
        });
        self.journal.changed();
    }

    /// Lets a container end and be started again. `None` if there is no such container, or no kubelet to start it.
    pub async fn restart_container(&self, uid: &str, container: &str) -> Option<ContainerStatus> {
        let (pod, _) = self.api.pod(uid)?;
        let container = pod.all().find(|other| other.name == container)?;
        let kubelet = self.kubelet()?;
        self.api.update(uid, |status| {
            if let Some(status) = status.containers.get_mut(&container.name) {
                status.restarts += 1;
                status.state = ContainerState::Waiting(None);
            }
        });
        let start = kubelet.start_container(&pod, container, ContainerState::Running);
        kubelet.process.run(start).await;
        self.pod(uid)?.containers.remove(&container.name)
    }

    /// Tries again to start containers that did not start.
    pub async fn sync_pod(&self, uid: &str) {
        if let Some(kubelet) = self.kubelet() {
            kubelet.process.run(kubelet.start_containers(uid)).await;
        }
    }

    /// What became of a pod, if it is there.
    pub fn pod(&self, uid: &str) -> Option<PodStatus> {
        let (pod, mut status) = self.api.pod(uid)?;
        if let Some(kubelet) = self.kubelet() {
            for container in &pod.containers {
                let Some(of) = status.containers.get_mut(&container.name) else { continue };
                for (resource, device, health) in kubelet.manager.health_of(uid, &container.name) {
                    of.devices.entry(resource).or_default().insert(device, health);
                }
            }
        }
        Some(status)
    }

    /// What the kubelet would tell the API server now. Nothing where no kubelet runs.
    pub fn resources(&self) -> BTreeMap<String, Quantity> {
        let present = self.kubelet().map(|kubelet| kubelet.manager.capacity().0).unwrap_or_default();
        let quantity = |(resource, capacity, allocatable)| (resource, Quantity { capacity, allocatable });
        present.into_iter().map(quantity).collect()
    }

    /// Devices of a resource that may be handed out, or are.
    pub fn allocatable(&self, resource: &str) -> u64 {
        self.resources().get(resource).map_or(0, |quantity| quantity.allocatable)
    }

    /// Devices of a resource, healthy or not.
    pub fn capacity(&self, resource: &str) -> u64 {
        self.resources().get(resource).map_or(0, |quantity| quantity.capacity)
    }

    /// What the API server knows of the node.
    pub fn status(&self) -> BTreeMap<String, Quantity> {
        self.api.node()
    }

    /// Tells the API server now, not at the end of the period.
    pub fn update_status(&self) {
        if let Some(kubelet) = self.kubelet() {
            kubelet.update_node();
        }
    }

    /// Devices that are not free: those that a container has, those of pods that are gone but not yet forgotten, and those
    /// that leaked.
    pub fn allocated(&self, resource: &str) -> BTreeSet<String> {
        self.kubelet().map(|kubelet| kubelet.manager.allocated(resource)).unwrap_or_default()
    }

    /// Who has which devices of a resource.
    pub fn holders(&self, resource: &str) -> Vec<Holder> {
        let holders = self.kubelet().map(|kubelet| kubelet.manager.holders(resource)).unwrap_or_default();
        holders.into_iter().map(|(device, pod, container)| Holder { device, pod, container }).collect()
    }

    /// What has happened, in order.
    pub fn events(&self) -> Vec<Record> {
        self.journal.records()
    }

    /// Forgets what has happened.
    pub fn clear_events(&self) {
        self.journal.clear();
    }

    /// Returns when `state` holds, which it asks after every change. An error if that takes longer than `limit`.
    pub async fn wait_for(&self, limit: Duration, state: impl Fn(&Self) -> bool) -> Result<(), Late> {
        let mut changes = self.journal.changes();
        let holds = async {
            while !state(self) {
                if changes.changed().await.is_err() {
                    std::future::pending().await
                }
            }
        };
        if self.config.clock.timeout(limit, holds).await.is_some() {
            return Ok(());
        }
        let events = self.events();
        let last = events[events.len().saturating_sub(10)..].to_vec();
        Err(Late { limit, resources: self.resources(), last })
    }
}
