//! A node: actions for test scripts, and its state.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fmt, io};

use crate::api::{Api, Quantity};
use crate::clock::Clock;
use crate::config::{Config, Paths};
use crate::dra::PreparedClaim;
use crate::journal::{Event, Journal, Record};
use crate::kubelet::Kubelet;
use crate::pod::{ContainerState, ContainerStatus, Phase, Pod, PodStatus};
use crate::random::Chance;

/// A node with its pods and containers, and a kubelet that can be started and killed. Clones share the same
/// node.
#[derive(Clone, Debug)]
pub struct Node {
    config: Config,
    journal: Arc<Journal>,
    api: Arc<Api>,
    kubelet: Arc<Mutex<Option<Arc<Kubelet>>>>,
    chance: Arc<Mutex<Chance>>,
}

/// The container that holds a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Id of the device.
    pub device: String,
    /// Uid of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
}

/// The timeout of [`Node::wait_for`], with the last state.
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
    /// Creates a node whose kubelet is not running.
    pub fn new(config: Config) -> Self {
        Self {
            journal: Arc::new(Journal::new(config.clock.clone())),
            api: Arc::default(),
            kubelet: Arc::default(),
            chance: Arc::new(Mutex::new(Chance::new(config.seed))),
            config,
        }
    }

    /// Returns the paths of the node.
    pub fn paths(&self) -> Paths {
        self.config.paths()
    }

    /// Returns the clock of the node.
    pub fn clock(&self) -> &Clock {
        &self.config.clock
    }

    fn kubelet(&self) -> Option<Arc<Kubelet>> {
        self.kubelet.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Starts the kubelet and waits until it has admitted all pods again.
    pub async fn start_kubelet(&self) -> io::Result<()> {
        self.start_kubelet_alone().await?;
        self.learn_pods().await;
        Ok(())
    }

    /// Starts the kubelet without a connection to the API server: it knows no pods until
    /// [`Node::learn_pods`].
    pub async fn start_kubelet_alone(&self) -> io::Result<()> {
        let mut running = self.kubelet.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_some() {
            let error = "the kubelet runs already: kill it first";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, error));
        }
        *running = Some(Kubelet::start(&self.config, &self.journal, &self.api)?);
        Ok(())
    }

    /// Gives the kubelet its pods, in arbitrary order. Does nothing if it has them or does not run.
    pub async fn learn_pods(&self) {
        let Some(kubelet) = self.kubelet() else { return };
        if !self.api.all_known() {
            let pods = self.api.active();
            let pods = self.chance.lock().unwrap_or_else(PoisonError::into_inner).shuffled(pods);
            kubelet.process.run(kubelet.learn_pods(pods)).await;
        }
    }

    /// Kills the kubelet: all connections end, socket files remain, containers continue. Does nothing if it
    /// does not run.
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

    /// Switches the node off: kubelet and containers end, files remain. The caller must stop the plugins.
    pub async fn switch_off(&self) {
        self.kill_kubelet().await;
        self.api.stop_containers();
    }

    /// Binds a pod to the node and returns when it was admitted and its containers were started, or not.
    /// Without a running kubelet the pod stays pending. An existing uid is left unchanged.
    pub async fn add_pod(&self, pod: Pod) -> PodStatus {
        let uid = pod.uid.clone();
        let added = self.api.add(pod.clone());
        if let Some(kubelet) = self.kubelet().filter(|_| added && self.api.all_known()) {
            kubelet.process.run(kubelet.add_pod(&pod)).await;
        }
        self.pod(&uid).unwrap_or_default()
    }

    /// Deletes a pod; returns whether it existed. Device plugins are not called, and their devices are freed at the next admission.
    /// Claims are unprepared in the background. Without a running kubelet, the pod is deleted by force, and the kubelet unprepares
    /// its claims in its loop.
    pub fn delete_pod(&self, uid: &str) -> bool {
        let pod = self.api.pod(uid);
        let deleted = self.api.remove(uid);
        if let Some((pod, status)) = pod.filter(|(_, status)| status.phase != Phase::Succeeded) {
            self.end_pod(pod, &status);
        }
        self.journal.changed();
        deleted
    }

    fn end_pod(&self, pod: Pod, status: &PodStatus) {
        if pod.claims.is_empty() {
            return;
        }
        // The claims of a pod that was not admitted were never prepared.
        match self.kubelet().filter(|_| status.phase != Phase::Failed) {
            Some(kubelet) => {
                self.api.add_ending(pod.clone());
                kubelet.end_pod(pod);
            }
            None => {
                if let Some(server) = &self.config.api {
                    server.release(&pod.uid);
                }
            }
        }
    }

    /// Returns the claims that the kubelet knows; none if it does not run.
    pub fn claims(&self) -> Vec<PreparedClaim> {
        self.kubelet().map(|kubelet| kubelet.dra.all()).unwrap_or_default()
    }

    /// Returns whether the kubelet is still unpreparing claims of pods that have ended.
    pub fn is_ending_pods(&self) -> bool {
        !self.api.ending().is_empty()
    }

    /// Ends a pod successfully. It stays known but inactive, and its claims are unprepared as by [`Node::delete_pod`].
    pub fn finish_pod(&self, uid: &str) {
        let pod = self.api.pod(uid);
        self.api.update(uid, |status| {
            status.phase = Phase::Succeeded;
            status.containers.values_mut().for_each(|status| status.state = ContainerState::Completed);
        });
        if let Some((pod, status)) = pod.filter(|(_, status)| status.phase != Phase::Succeeded) {
            self.end_pod(pod, &status);
        }
        self.journal.changed();
    }

    /// Ends a container and restarts it. Returns `None` without such a container or a running kubelet.
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

    /// Returns the status of a pod, if it exists.
    pub fn pod(&self, uid: &str) -> Option<PodStatus> {
        let (pod, mut status) = self.api.pod(uid)?;
        if let Some(kubelet) = self.kubelet() {
            for container in &pod.containers {
                let Some(of) = status.containers.get_mut(&container.name) else { continue };
                let claimed = kubelet.dra.health_of(&pod, container);
                let devices = kubelet.manager.health_of(uid, &container.name);
                for (resource, device, health) in devices.into_iter().chain(claimed) {
                    of.devices.entry(resource).or_default().insert(device, health);
                }
            }
        }
        Some(status)
    }

    /// Returns the resources that the kubelet would report now; empty if it does not run.
    pub fn resources(&self) -> BTreeMap<String, Quantity> {
        let present = self.kubelet().map(|kubelet| kubelet.manager.capacity().0).unwrap_or_default();
        let quantity = |(resource, capacity, allocatable)| (resource, Quantity { capacity, allocatable });
        present.into_iter().map(quantity).collect()
    }

    /// Returns the number of allocatable devices of a resource, including allocated ones.
    pub fn allocatable(&self, resource: &str) -> u64 {
        self.resources().get(resource).map_or(0, |quantity| quantity.allocatable)
    }

    /// Returns the number of devices of a resource, healthy or not.
    pub fn capacity(&self, resource: &str) -> u64 {
        self.resources().get(resource).map_or(0, |quantity| quantity.capacity)
    }

    /// Returns the status of the node in the API server.
    pub fn status(&self) -> BTreeMap<String, Quantity> {
        self.api.node()
    }

    /// Updates the status in the API server now instead of at the end of the period.
    pub fn update_status(&self) {
        if let Some(kubelet) = self.kubelet() {
            kubelet.update_node();
        }
    }

    /// Returns devices that are not free: held by containers, by pods that are not yet forgotten, or leaked.
    pub fn allocated(&self, resource: &str) -> BTreeSet<String> {
        self.kubelet().map(|kubelet| kubelet.manager.allocated(resource)).unwrap_or_default()
    }

    /// Returns the containers that hold devices of a resource.
    pub fn holders(&self, resource: &str) -> Vec<Holder> {
        let holders = self.kubelet().map(|kubelet| kubelet.manager.holders(resource)).unwrap_or_default();
        holders.into_iter().map(|(device, pod, container)| Holder { device, pod, container }).collect()
    }

    /// Returns all events in order.
    pub fn events(&self) -> Vec<Record> {
        self.journal.records()
    }

    /// Clears the recorded events.
    pub fn clear_events(&self) {
        self.journal.clear();
    }

    /// Waits until `state` holds, which is checked after every change. Fails after `limit`.
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
