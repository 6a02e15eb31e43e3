//! State that outlives the kubelet: the pods and the node in the API server, and the containers of the runtime.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::dra::Health;
use crate::pod::{ContainerState, Phase, Pod, PodStatus};

/// A resource of the node in the API server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quantity {
    /// Devices, healthy or not.
    pub capacity: u64,
    /// Devices that are allocated or can be.
    pub allocatable: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    pod: Pod,
    status: PodStatus,
    /// Whether the runtime has a sandbox, for which the claims were prepared.
    sandbox: bool,
}

#[derive(Debug, Default)]
struct State {
    /// In the order in which they were added.
    pods: Vec<Entry>,
    node: BTreeMap<String, Quantity>,
    /// The kubelet has received all its pods since it started.
    all_known: bool,
    /// Containers that ran when the kubelet started.
    survivors: BTreeSet<(String, String)>,
    /// Pods that have ended and whose claims are not unprepared yet.
    ending: Vec<Pod>,
}

/// State that outlives the kubelet.
#[derive(Debug, Default)]
pub(crate) struct Api {
    state: Mutex<State>,
    health: Mutex<Health>,
}

impl Api {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the health reports of drivers.
    pub(crate) fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn has_sandbox(&self, uid: &str) -> bool {
        self.state().pods.iter().any(|entry| entry.pod.uid == uid && entry.sandbox)
    }

    pub(crate) fn set_sandbox(&self, uid: &str) {
        if let Some(entry) = self.state().pods.iter_mut().find(|entry| entry.pod.uid == uid) {
            entry.sandbox = true;
        }
    }

    pub(crate) fn add_ending(&self, pod: Pod) {
        self.state().ending.push(pod);
    }

    pub(crate) fn remove_ending(&self, uid: &str) {
        self.state().ending.retain(|pod| pod.uid != uid);
    }

    pub(crate) fn ending(&self) -> Vec<Pod> {
        self.state().ending.clone()
    }

    /// Returns the pods whose claims the kubelet must not unprepare in its loop.
    pub(crate) fn with_resources(&self) -> BTreeSet<String> {
        let mut uids = self.active_uids();
        uids.extend(self.ending().into_iter().map(|pod| pod.uid));
        uids
    }

    /// Records that a kubelet has started: it knows the running containers from the runtime, and no pod yet.
    pub(crate) fn kubelet_started(&self) {
        let mut state = self.state();
        state.all_known = false;
        let running = |entry: &Entry| {
            let uid = entry.pod.uid.clone();
            let containers = entry.status.containers.clone().into_iter();
            containers
                .filter(|(_, status)| status.state == ContainerState::Running)
                .map(move |(name, _)| (uid.clone(), name))
        };
        state.survivors = state.pods.iter().flat_map(running).collect();
    }

    pub(crate) fn set_all_known(&self) {
        self.state().all_known = true;
    }

    pub(crate) fn all_known(&self) -> bool {
        self.state().all_known
    }

    pub(crate) fn is_running(&self, uid: &str, container: &str) -> bool {
        self.state().survivors.contains(&(uid.to_owned(), container.to_owned()))
    }

    /// Stops every container, as if the node were switched off.
    pub(crate) fn stop_containers(&self) {
        for entry in &mut self.state().pods {
            let restarts = |state: &ContainerState| u32::from(*state != ContainerState::Waiting(None));
            for status in entry.status.containers.values_mut() {
                status.restarts += restarts(&status.state);
                status.state = ContainerState::default();
            }
            entry.sandbox = false;
            if entry.status.phase == Phase::Running {
                entry.status.phase = Phase::Pending;
            }
        }
    }

    /// Adds a pod. Returns `false` if there is a pod with this uid.
    pub(crate) fn add(&self, pod: Pod) -> bool {
        let mut state = self.state();
        if state.pods.iter().any(|entry| entry.pod.uid == pod.uid) {
            return false;
        }
        let containers = pod.all().map(|container| (container.name.clone(), Default::default())).collect();
        let status = PodStatus { containers, ..PodStatus::default() };
        state.pods.push(Entry { pod, status, sandbox: false });
        true
    }

    pub(crate) fn remove(&self, uid: &str) -> bool {
        let mut state = self.state();
        let before = state.pods.len();
        state.pods.retain(|entry| entry.pod.uid != uid);
        state.pods.len() != before
    }

    pub(crate) fn pod(&self, uid: &str) -> Option<(Pod, PodStatus)> {
        let state = self.state();
        let entry = state.pods.iter().find(|entry| entry.pod.uid == uid)?;
        Some((entry.pod.clone(), entry.status.clone()))
    }

    pub(crate) fn update(&self, uid: &str, change: impl FnOnce(&mut PodStatus)) {
        if let Some(entry) = self.state().pods.iter_mut().find(|entry| entry.pod.uid == uid) {
            change(&mut entry.status);
        }
    }

    /// The pods that have not ended, in the order in which they were added.
    pub(crate) fn active(&self) -> Vec<Pod> {
        let state = self.state();
        let active = |entry: &&Entry| matches!(entry.status.phase, Phase::Pending | Phase::Running);
        state.pods.iter().filter(active).map(|entry| entry.pod.clone()).collect()
    }

    pub(crate) fn active_uids(&self) -> BTreeSet<String> {
        self.active().into_iter().map(|pod| pod.uid).collect()
    }

    pub(crate) fn node(&self) -> BTreeMap<String, Quantity> {
        self.state().node.clone()
    }

    pub(crate) fn update_node(&self, change: impl FnOnce(&mut BTreeMap<String, Quantity>)) {
        change(&mut self.state().node);
    }
}
