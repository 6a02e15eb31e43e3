//! One run of the kubelet: from its start until it is killed.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use crate::api::{Api, Quantity};
use crate::config::Config;
use crate::devices::Manager;
use crate::dra::Dra;
use crate::journal::{Event, Journal};
use crate::pod::{Container, ContainerState, ContainerStatus, Phase, Pod};
use crate::podresources;
use crate::process::Process;
use crate::registry::Registry;

/// How often a pod is looked at without a reason; up to half as much is added at random.
const RESYNC_PERIOD: Duration = Duration::from_secs(60);
/// When the end of a pod that failed is tried again.
const END_BACK_OFF: Duration = Duration::from_secs(10);

/// The steps that the kubelet takes for one pod at a time.
#[derive(Clone, Debug, Default)]
struct Worker {
    busy: Arc<Mutex<()>>,
    /// Cancelled when the pod ends.
    ended: CancellationToken,
}

#[derive(Debug)]
pub(crate) struct Kubelet {
    config: Config,
    journal: Arc<Journal>,
    api: Arc<Api>,
    pub(crate) manager: Arc<Manager>,
    pub(crate) dra: Arc<Dra>,
    pub(crate) process: Process,
    /// Locked during an admission: the kubelet admits one pod at a time.
    admission: Mutex<()>,
    /// Locked while a pod is being started or ended, by its uid.
    workers: std::sync::Mutex<BTreeMap<String, Worker>>,
}

impl Kubelet {
    /// Starts a kubelet that listens on its sockets and knows no pod yet.
    pub(crate) fn start(config: &Config, journal: &Arc<Journal>, api: &Arc<Api>) -> io::Result<Arc<Self>> {
        let process = Process::default();
        api.kubelet_started();
        let manager = Arc::new(Manager::new(config.clone(), Arc::clone(journal), Arc::clone(api)));
        if !manager.has_checkpoint() {
            // Without a checkpoint the kubelet assumes a new node.
            api.update_node(|node| node.values_mut().for_each(|quantity| *quantity = Default::default()));
        }
        let dra = Dra::new(config.clone(), Arc::clone(journal), Arc::clone(api), process.clone())?;
        let handlers = (Arc::clone(&manager), Arc::clone(&dra));
        let registry = Registry::new(config.clone(), Arc::clone(journal), handlers, process.clone());
        registry.serve_legacy()?;
        podresources::start(config, Arc::clone(api), Arc::clone(&manager), &process)?;
        registry.watch_sockets()?;
        dra.start();
        let kubelet = Arc::new(Self {
            config: config.clone(),
            journal: Arc::clone(journal),
            api: Arc::clone(api),
            manager,
            dra,
            process: process.clone(),
            admission: Mutex::default(),
            workers: std::sync::Mutex::default(),
        });
        let housekeeper = Arc::clone(&kubelet);
        process.spawn(async move { housekeeper.keep_house().await });
        journal.add(Event::KubeletStarted);
        Ok(kubelet)
    }

    async fn keep_house(self: Arc<Self>) {
        loop {
            self.update_node();
            for pod in self.api.active() {
                let failed =
                    |status: &ContainerStatus| matches!(status.state, ContainerState::Waiting(Some(_)));
                let status = self.api.pod(&pod.uid).map(|(_, status)| status).unwrap_or_default();
                if status.containers.values().any(failed) {
                    let kubelet = Arc::clone(&self);
                    self.process.spawn(async move { kubelet.start_containers(&pod.uid).await });
                }
            }
            self.config.clock.sleep(self.config.status_period).await;
        }
    }

    /// Reports capacity and allocatable resources to the API server.
    pub(crate) fn update_node(&self) {
        let (present, removed) = self.manager.capacity();
        self.api.update_node(|node| {
            for (resource, capacity, allocatable) in present {
                node.insert(resource, Quantity { capacity, allocatable });
            }
            for resource in removed {
                node.insert(resource, Quantity::default());
            }
        });
        self.journal.changed();
    }

    /// Handles the first update of the API server: admits every pod of the node again.
    pub(crate) async fn learn_pods(self: &Arc<Self>, pods: Vec<Pod>) {
        for pod in pods {
            self.add_pod(&pod).await;
        }
        self.api.set_all_known();
        for pod in self.api.ending() {
            self.end_pod(pod);
        }
    }

    /// Admits the pod, one at a time, and starts its containers.
    pub(crate) async fn add_pod(self: &Arc<Self>, pod: &Pod) {
        let admitted = {
            let _one_at_a_time = self.admission.lock().await;
            self.admit(pod).await
        };
        if admitted {
            self.start_containers(&pod.uid).await;
        }
    }

    async fn admit(&self, pod: &Pod) -> bool {
        if !self.api.active_uids().contains(&pod.uid) {
            return false;
        }
        let verdict = match self.allocate_all(pod).await {
            Ok(()) => self.check_node(pod),
            Err(error) => {
                let message = format!("Allocate failed due to {error}, which is unexpected");
                Err(("UnexpectedAdmissionError".to_owned(), message))
            }
        };
        let uid = pod.uid.clone();
        match verdict {
            Ok(()) => {
                self.journal.add(Event::Admitted { pod: uid });
                true
            }
            Err((reason, message)) => {
                self.api.update(&uid, |status| {
                    status.phase = Phase::Failed;
                    status.reason = reason.clone();
                    status.message = message.clone();
                    status.containers.values_mut().for_each(|status| status.state = Default::default());
                });
                self.journal.add(Event::Rejected { pod: uid, reason, message });
                false
            }
        }
    }

    async fn allocate_all(&self, pod: &Pod) -> Result<(), String> {
        for container in pod.all() {
            self.manager.allocate(pod, container).await?;
        }
        Ok(())
    }

    /// Checks that the node has the resources of the pod, as the scheduler does: of the known capacity, or of the allocated
    /// amount if that is more.
    fn check_node(&self, pod: &Pod) -> Result<(), (String, String)> {
        let allocatable = |(resource, quantity): (String, Quantity)| (resource, quantity.allocatable);
        let mut node: BTreeMap<String, u64> = self.api.node().into_iter().map(allocatable).collect();
        for (resource, allocated) in self.manager.allocated_counts(&pod.uid).into_iter().flatten() {
            let known = node.entry(resource).or_default();
            *known = allocated.max(*known);
        }
        let others: Vec<Pod> = self.api.active().into_iter().filter(|other| other.uid != pod.uid).collect();
        for (resource, capacity) in node {
            let requested = pod.request(&resource);
            let used: u64 = others.iter().map(|other| other.request(&resource)).sum();
            if requested > 0 && used + requested > capacity {
                let message = format!(
                    "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
                );
                return Err((format!("OutOf{resource}"), message));
            }
        }
        Ok(())
    }

    fn worker(&self, uid: &str) -> Worker {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.entry(uid.to_owned()).or_default().clone()
    }

    /// Prepares the claims of the pod unless it has a sandbox. A failure is an event, and it is tried again after 60 to 90 seconds.
    async fn create_sandbox(self: &Arc<Self>, pod: &Pod) -> bool {
        let uid = &pod.uid;
        if pod.claims.is_empty() || self.api.has_sandbox(uid) {
            return true;
        }
        let Err(error) = self.dra.prepare(pod).await else {
            self.api.set_sandbox(uid);
            return true;
        };
        self.journal.add(Event::PrepareFailed { pod: uid.clone(), error });
        self.start_later(uid);
        false
    }

    fn start_later(self: &Arc<Self>, uid: &str) {
        let jitter = u64::try_from(self.dra.below(30_000)).unwrap_or_default();
        let pause = self.config.clock.sleep(RESYNC_PERIOD + Duration::from_millis(jitter));
        let (kubelet, uid) = (Arc::clone(self), uid.to_owned());
        self.process.spawn(async move {
            pause.await;
            kubelet.start_containers(&uid).await;
        });
    }

    /// Unprepares the claims of a pod that has ended, and tries until it succeeds. A start of the pod in progress is cancelled.
    pub(crate) fn end_pod(self: &Arc<Self>, pod: Pod) {
        let kubelet = Arc::clone(self);
        self.process.spawn(async move {
            let worker = kubelet.worker(&pod.uid);
            worker.ended.cancel();
            let _one_at_a_time = worker.busy.lock().await;
            while let Err(error) = kubelet.dra.unprepare(&pod).await {
                kubelet.journal.add(Event::UnprepareFailed { pod: pod.uid.clone(), error });
                kubelet.config.clock.sleep(END_BACK_OFF).await;
            }
            kubelet.api.remove_ending(&pod.uid);
            if let Some(server) = &kubelet.config.api {
                server.release(&pod.uid);
            }
            kubelet.workers.lock().unwrap_or_else(PoisonError::into_inner).remove(&pod.uid);
            kubelet.journal.add(Event::Unprepared { pod: pod.uid });
        });
    }

    /// Starts the containers that do not run, unless the pod ends first.
    pub(crate) async fn start_containers(self: &Arc<Self>, uid: &str) {
        let worker = self.worker(uid);
        let start = async {
            let _one_at_a_time = worker.busy.lock().await;
            self.sync_containers(uid).await;
        };
        worker.ended.run_until_cancelled(start).await;
    }

    /// Starts the containers that do not run. Init containers start one after the other, and the first that fails ends this.
    async fn sync_containers(self: &Arc<Self>, uid: &str) {
        let Some((pod, _)) = self.api.pod(uid) else { return };
        if !self.api.active_uids().contains(uid) || !self.create_sandbox(&pod).await {
            return;
        }
        let Some((pod, status)) = self.api.pod(uid) else { return };
        let plain =
            |container: &Container| pod.init.iter().any(|init| init == container && !init.restartable);
        for container in pod.all() {
            let state = status.containers.get(&container.name).map(|status| &status.state);
            if !matches!(state, Some(ContainerState::Waiting(_))) {
                continue;
            }
            let state = if plain(container) { ContainerState::Completed } else { ContainerState::Running };
            let started = self.start_container(&pod, container, state).await;
            if !started && pod.init.contains(container) {
                return;
            }
        }
        self.api.update(uid, |status| {
            let waiting = |state: &ContainerState| matches!(state, ContainerState::Waiting(_));
            if status.phase == Phase::Pending && !status.containers.values().any(|c| waiting(&c.state)) {
                status.phase = Phase::Running;
            }
        });
        self.journal.changed();
    }

    pub(crate) async fn start_container(
        &self,
        pod: &Pod,
        container: &Container,
        then: ContainerState,
    ) -> bool {
        let claimed = self.dra.cdi_devices(pod, container);
        let options = match claimed {
            Ok(claimed) => self.manager.run_options(pod, container).await.map(|mut options| {
                options.cdi_devices.splice(..0, claimed);
                options
            }),
            Err(error) => Err(error),
        };
        let started = options.is_ok();
        let (uid, name) = (pod.uid.clone(), container.name.clone());
        let (event, state, options) = match options {
            Ok(options) => (Event::ContainerStarted { pod: uid, container: name }, then, Some(options)),
            Err(error) => {
                let state = ContainerState::Waiting(Some(error.clone()));
                (Event::ContainerFailed { pod: uid, container: name, error }, state, None)
            }
        };
        self.api.update(&pod.uid, |status| {
            let Some(status) = status.containers.get_mut(&container.name) else { return };
            status.state = state;
            if let Some(mut options) = options {
                let restarts = status.restarts.to_string();
                options.annotations.insert("io.kubernetes.container.restartCount".to_owned(), restarts);
                status.options = options;
            }
        });
        self.journal.add(event);
        started
    }
}
