//! Random sequences of events on a node, against an oracle of the expected allocations.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;
use std::{fmt, fs};

use crate::node::Node;
use crate::pod::{Container, Phase, Pod};
use crate::random::Chance;

/// How long a plugin may take, by the node's clock, until the kubelet counts its devices correctly again.
const RECOVERY_LIMIT: Duration = Duration::from_secs(3);

/// A device plugin that runs against a node, with the operations that the driver needs.
pub trait Subject {
    /// Kills the plugin, as the end of its container does, and starts it again. It may return before the plugin has registered.
    fn restart(&mut self) -> impl Future<Output = ()>;

    /// Changes the health of some devices at random.
    fn flip(&mut self, chance: &mut Chance);

    /// The healthy devices by resource, which the kubelet must count.
    fn healthy(&self) -> BTreeMap<String, BTreeSet<String>>;

    /// The sockets that it serves now, which the driver deletes.
    fn sockets(&self) -> Vec<PathBuf>;
}

/// The events that can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The kubelet is killed and started again.
    KubeletRestart,
    /// The kubelet is killed, pods are deleted, and it is started again after a while.
    KubeletDown,
    /// The plugin is killed and started again.
    PluginRestart,
    /// Kubelet and plugin are restarted at the same time.
    BothRestart,
    /// The kubelet disconnects the plugin, as it does in the race by name.
    StreamCut,
    /// A socket of the plugin is deleted.
    SocketRemoval,
    /// Health of devices changes.
    HealthFlip,
    /// A pod is created.
    PodAdd,
    /// A pod is deleted.
    PodDelete,
}

impl Step {
    /// Checks after every step:
    pub const ALL: [Self; 9] = [
        Self::KubeletRestart,
        Self::KubeletDown,
        Self::PluginRestart,
        Self::BothRestart,
        Self::StreamCut,
        Self::SocketRemoval,
        Self::HealthFlip,
        Self::PodAdd,
        Self::PodDelete,
    ];
}

/// The result of a run without errors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How often each step was taken.
    pub steps: BTreeMap<Step, usize>,
    /// Pods that got the devices that they requested.
    pub admitted: usize,
    /// Pods that requested more devices than there were, and were refused.
    pub refused: usize,
    /// The longest time until the state was correct again.
    pub slowest: Duration,
}

/// The first error, with the steps before it.
#[derive(Clone, Debug)]
pub struct Failure {
    seed: u64,
    history: Vec<String>,
    what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = &self.history[self.history.len().saturating_sub(8)..];
        let Self { seed, history, what } = self;
        write!(f, "step {} of seed {seed}: {what}; last steps: [{}]", history.len(), last.join(", "))
    }
}

impl Failure {
    pub(crate) fn new(seed: u64, history: Vec<String>, what: String) -> Self {
        Self { seed, history, what }
    }
}

impl std::error::Error for Failure {}

/// Takes `steps` steps, and after each checks that, within three seconds, the kubelet counts as many devices as are healthy;
/// that no device is allocated twice, or to a pod that did not request it; that a pod is admitted if and only if there is enough;
/// and that no allocation is left without a pod. The kubelet must run, and the plugin too.
pub async fn soak<S: Subject>(
    node: &Node,
    subject: &mut S,
    steps: usize,
    seed: u64,
) -> Result<Report, Failure> {
    let chance = Chance::new(seed);
    let mut run = Run {
        node,
        subject,
        chance,
        asked: BTreeMap::new(),
        next_pod: 0,
        history: Vec::new(),
        report: Report::default(),
    };
    let mut outcome = run.settle().await;
    while outcome.is_ok() && run.history.len() < steps {
        let step = Step::ALL[run.chance.below(Step::ALL.len())];
        run.history.push(step);
        *run.report.steps.entry(step).or_default() += 1;
        outcome = run.take(step).await;
        node.clear_events();
    }
    let Run { history, report, .. } = run;
    let history = history.iter().map(|step| format!("{step:?}")).collect();
    outcome.map(|()| report).map_err(|what| Failure::new(seed, history, what))
}

struct Run<'a, S> {
    node: &'a Node,
    subject: &'a mut S,
    chance: Chance,
    /// Resource and count that each living pod requested.
    asked: BTreeMap<String, (String, u64)>,
    next_pod: u64,
    history: Vec<Step>,
    report: Report,
}

impl<S: Subject> Run<'_, S> {
    async fn take(&mut self, step: Step) -> Result<(), String> {
        let io = |error: std::io::Error| error.to_string();
        match step {
            Step::KubeletRestart => self.node.restart_kubelet().await.map_err(io)?,
            Step::KubeletDown => {
                self.node.kill_kubelet().await;
                self.delete_pod();
                let pause = Duration::from_millis(self.chance.below(20_000) as u64);
                self.node.clock().sleep(pause).await;
                self.node.start_kubelet().await.map_err(io)?;
            }
            Step::PluginRestart => self.subject.restart().await,
            Step::BothRestart => {
                self.node.kill_kubelet().await;
                self.subject.restart().await;
                self.node.start_kubelet().await.map_err(io)?;
            }
            Step::StreamCut => {
                for resource in self.subject.healthy().into_keys() {
                    self.node.give_up(&resource);
                }
            }
            Step::SocketRemoval => {
                let sockets = self.subject.sockets();
                if !sockets.is_empty() {
                    let _ = fs::remove_file(&sockets[self.chance.below(sockets.len())]);
                }
            }
            Step::HealthFlip => self.subject.flip(&mut self.chance),
            Step::PodAdd => return self.add_pod().await,
            Step::PodDelete => self.delete_pod(),
        }
        // Sometimes the next step begins before the effects of this one have ended.
        if self.chance.below(4) == 0 {
            return Ok(());
        }
        self.settle().await
    }

    /// Waits until the kubelet counts correctly, and checks the devices of each pod.
    async fn settle(&mut self) -> Result<(), String> {
        let healthy = self.subject.healthy();
        let start = self.node.clock().now();
        let right = |node: &Node| {
            let resources = node.resources();
            let count = |resource| resources.get(resource).map(|quantity| quantity.allocatable);
            healthy.iter().all(|(resource, names)| count(resource) == Some(names.len() as u64))
        };
        let counts: BTreeMap<_, _> = healthy.iter().map(|(name, names)| (name, names.len())).collect();
        let waited = self.node.wait_for(RECOVERY_LIMIT, right).await;
        waited.map_err(|late| format!("{counts:?} should be allocatable: {late}"))?;
        self.report.slowest = self.report.slowest.max(self.node.clock().now() - start);
        self.check_holders(healthy.keys())
    }

    fn check_holders<'b>(&self, resources: impl Iterator<Item = &'b String>) -> Result<(), String> {
        for resource in resources {
            let mut seen = BTreeSet::new();
            let mut counts: BTreeMap<String, u64> = BTreeMap::new();
            for holder in self.node.holders(resource) {
                *counts.entry(holder.pod.clone()).or_default() += 1;
                // A device of a dead pod may be allocated again only after it was freed.
                if !seen.insert(holder.device.clone()) {
                    return Err(format!("{} of {resource} was allocated twice", holder.device));
                }
            }
            for (pod, count) in counts {
                match self.asked.get(&pod) {
                    Some((of, asked)) if of != resource || *asked != count => {
                        return Err(format!(
                            "pod {pod} asked for {asked} of {of}, has {count} of {resource}"
                        ));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    async fn add_pod(&mut self) -> Result<(), String> {
        // A pod that is added while the plugin does not run is refused, which is correct. A correct state must also last.
        self.node.clock().sleep(RECOVERY_LIMIT).await;
        self.settle().await?;
        let healthy = self.subject.healthy();
        let Some((resource, names)) = healthy.iter().nth(self.chance.below(healthy.len().max(1))) else {
            return Ok(());
        };
        let living = |pod: &String| self.asked.contains_key(pod);
        let taken: BTreeSet<String> = self
            .node
            .holders(resource)
            .into_iter()
            .filter(|holder| living(&holder.pod))
            .map(|holder| holder.device)
            .collect();
        let free = names.difference(&taken).count();
        let count = 1 + self.chance.below(free + 1) as u64;
        let uid = format!("pod{}", self.next_pod);
        self.next_pod += 1;
        let pod = Pod::new(&uid).container(Container::new("main").limit(resource, count));
        let status = self.node.add_pod(pod).await;
        let enough = count <= free as u64;
        match status.phase {
            Phase::Running if enough => {
                self.asked.insert(uid, (resource.clone(), count));
                self.report.admitted += 1;
            }
            Phase::Failed if !enough => self.report.refused += 1,
            phase => {
                return Err(format!(
                    "{uid} asked for {count} of {resource}, {free} were free, and it is {phase:?}: {}",
                    status.message
                ));
            }
        }
        // An admission frees the devices of dead pods, so now every allocation has a pod.
        let holders = self.node.holders(resource);
        let held: BTreeSet<String> = holders.iter().map(|holder| holder.device.clone()).collect();
        let allocated = self.node.allocated(resource);
        let ghosts: Vec<_> = holders.iter().filter(|holder| !self.asked.contains_key(&holder.pod)).collect();
        if held != allocated || !ghosts.is_empty() {
            return Err(format!(
                "{resource}: {allocated:?} are allocated, {held:?} are held by pods, {ghosts:?} by dead pods"
            ));
        }
        self.check_holders(healthy.keys())
    }

    fn delete_pod(&mut self) {
        let pods: Vec<String> = self.asked.keys().cloned().collect();
        if !pods.is_empty() {
            let uid = &pods[self.chance.below(pods.len())];
            self.asked.remove(uid);
            self.node.delete_pod(uid);
        }
    }
}
