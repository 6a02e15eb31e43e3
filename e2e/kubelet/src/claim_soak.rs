//! Random sequences of events around claims, against an oracle: the claims that a driver must have prepared.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};

use crate::apiserver::ApiServer;
use crate::node::Node;
use crate::pod::{Container, Phase, Pod};
use crate::random::Chance;

/// How long it may take, by the node's clock, until the driver has prepared exactly the claims of the pods: the loop of the kubelet and
/// the retry of a pod, twice.
const RECOVERY_LIMIT: Duration = Duration::from_secs(200);
/// How long a correct state must last.
const SETTLED: Duration = Duration::from_secs(3);
/// How many pods there are at most.
const PODS_MAX: usize = 6;

/// A driver that runs against a node, with the operations that the sequence needs.
pub trait DriverSubject {
    /// Kills the driver and starts it again. It may return before the driver has registered.
    fn restart(&mut self) -> impl Future<Output = ()>;

    /// Starts a second instance, lets both live for a moment, and ends the first.
    fn roll(&mut self) -> impl Future<Output = ()>;

    /// Returns the uids of the claims that are prepared, by all that the driver has on the node.
    fn prepared(&self) -> BTreeSet<String>;

    /// Returns a claim for a new pod, without status, in the namespace `default`.
    fn claim(&self, name: &str) -> ResourceClaim;
}

/// The events that can happen around claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimStep {
    /// The kubelet is killed and started again.
    KubeletRestart,
    /// The kubelet is killed, a pod is deleted by force, and it is started again after a while.
    KubeletDown,
    /// Containers, kubelet and driver end, and start again.
    Reboot,
    /// The driver is killed and started again.
    DriverRestart,
    /// The driver is replaced by a rolling update.
    DriverUpdate,
    /// Kubelet and driver are restarted at the same time.
    BothRestart,
    /// The API server is away for up to a minute.
    ApiOutage,
    /// A pod with a claim of its own is created.
    PodAdd,
    /// A pod that shares a claim is created.
    PodShare,
    /// A pod is deleted, or ends.
    PodEnd,
}

impl ClaimStep {
    /// All events, of which each step takes one.
    pub const ALL: [Self; 10] = [
        Self::KubeletRestart,
        Self::KubeletDown,
        Self::Reboot,
        Self::DriverRestart,
        Self::DriverUpdate,
        Self::BothRestart,
        Self::ApiOutage,
        Self::PodAdd,
        Self::PodShare,
        Self::PodEnd,
    ];
}

/// The result of a run of [`claim_soak`] without errors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimReport {
    /// How often each step was taken.
    pub steps: BTreeMap<ClaimStep, usize>,
    /// Pods that ran with their claims.
    pub started: usize,
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

impl std::error::Error for Failure {}

/// Takes `steps` steps, and after each checks that, within 200 seconds, every pod runs, the driver has prepared exactly the claims
/// of these pods, its slices are published, and no claim is allocated without a pod. The kubelet and the driver must run, and the
/// driver must publish devices for eight claims.
pub async fn claim_soak<S: DriverSubject>(
    node: &Node,
    server: &ApiServer,
    subject: &mut S,
    steps: usize,
    seed: u64,
) -> Result<ClaimReport, Failure> {
    let mut run = Run {
        node,
        server,
        subject,
        chance: Chance::new(seed),
        users: BTreeMap::new(),
        count: 0,
        report: ClaimReport::default(),
    };
    let mut history = Vec::new();
    let mut outcome = run.settle().await;
    while outcome.is_ok() && history.len() < steps {
        let step = ClaimStep::ALL[run.chance.below(ClaimStep::ALL.len())];
        history.push(step);
        *run.report.steps.entry(step).or_default() += 1;
        outcome = run.take(step).await;
        node.clear_events();
    }
    let history = history.iter().map(|step| format!("{step:?}")).collect();
    let report = run.report;
    outcome.map(|()| report).map_err(|what| Failure { seed, history, what })
}

struct Run<'a, S> {
    node: &'a Node,
    server: &'a ApiServer,
    subject: &'a mut S,
    chance: Chance,
    /// The name of the claim of each living pod.
    users: BTreeMap<String, String>,
    count: u64,
    report: ClaimReport,
}

impl<S: DriverSubject> Run<'_, S> {
    async fn take(&mut self, step: ClaimStep) -> Result<(), String> {
        let io = |error: std::io::Error| error.to_string();
        match step {
            ClaimStep::KubeletRestart => self.node.restart_kubelet().await.map_err(io)?,
            ClaimStep::KubeletDown => {
                self.node.kill_kubelet().await;
                self.end_pod(false);
                self.pause(40_000).await;
                self.node.start_kubelet().await.map_err(io)?;
            }
            ClaimStep::Reboot => {
                self.node.switch_off().await;
                self.subject.restart().await;
                self.node.start_kubelet().await.map_err(io)?;
            }
            ClaimStep::DriverRestart => self.subject.restart().await,
            ClaimStep::DriverUpdate => self.subject.roll().await,
            ClaimStep::BothRestart => {
                self.node.kill_kubelet().await;
                self.subject.restart().await;
                self.node.start_kubelet().await.map_err(io)?;
            }
            ClaimStep::ApiOutage => {
                self.server.stop();
                self.pause(60_000).await;
                self.server.resume();
            }
            ClaimStep::PodAdd => return self.add_pod(false).await,
            ClaimStep::PodShare => return self.add_pod(true).await,
            ClaimStep::PodEnd => {
                let finish = self.chance.below(2) == 0;
                self.end_pod(finish);
            }
        }
        // Sometimes the next step begins before the effects of this one have ended.
        if self.chance.below(4) == 0 {
            return Ok(());
        }
        self.settle().await
    }

    async fn pause(&mut self, milliseconds_max: usize) {
        let pause = Duration::from_millis(self.chance.below(milliseconds_max) as u64);
        self.node.clock().sleep(pause).await;
    }

    async fn add_pod(&mut self, share: bool) -> Result<(), String> {
        self.settle().await?;
        if self.users.len() >= PODS_MAX {
            return Ok(());
        }
        let shared = self.users.values().nth(self.chance.below(self.users.len().max(1))).cloned();
        let name = format!("pod{}", self.count);
        self.count += 1;
        let claim = match shared.filter(|_| share) {
            Some(claim) => claim,
            None => {
                let claim = format!("claim-{name}");
                self.server.create(&self.subject.claim(&claim)).map_err(|error| error.to_string())?;
                claim
            }
        };
        let pod = Pod::new(&name).claim("c", &claim).container(Container::new("main").claim("c"));
        self.server.schedule(&pod, &["node"])?;
        self.users.insert(name, claim);
        self.node.add_pod(pod).await;
        self.report.started += 1;
        self.settle().await
    }

    fn end_pod(&mut self, finish: bool) {
        let Some(name) = self.users.keys().nth(self.chance.below(self.users.len().max(1))).cloned() else {
            return;
        };
        self.users.remove(&name);
        if finish {
            self.node.finish_pod(&name);
        } else {
            self.node.delete_pod(&name);
        }
    }

    /// Waits until everything has been as the oracle says for three seconds.
    async fn settle(&mut self) -> Result<(), String> {
        let start = self.node.clock().now();
        let mut correct_since = None;
        loop {
            let now = self.node.clock().now();
            match self.wrong() {
                None => {
                    let since = *correct_since.get_or_insert(now);
                    if now - since >= SETTLED {
                        self.report.slowest = self.report.slowest.max(since - start);
                        return Ok(());
                    }
                }
                Some(what) if now - start > RECOVERY_LIMIT => {
                    let events = self.node.events();
                    let last = &events[events.len().saturating_sub(10)..];
                    return Err(format!("{what}; lately: {last:?}"));
                }
                Some(_) => correct_since = None,
            }
            self.node.clock().sleep(Duration::from_millis(500)).await;
        }
    }

    /// Returns what differs from the oracle.
    fn wrong(&self) -> Option<String> {
        let waiting = self
            .users
            .keys()
            .find(|name| self.node.pod(name).is_none_or(|status| status.phase != Phase::Running));
        if let Some(name) = waiting {
            return Some(format!("{name} does not run"));
        }
        if self.node.is_ending_pods() {
            return Some("claims of pods that have ended are not unprepared".to_owned());
        }
        let claims: Vec<ResourceClaim> = self.server.list();
        let used: BTreeSet<&String> = self.users.values().collect();
        let is_used =
            |claim: &&ResourceClaim| claim.metadata.name.as_ref().is_some_and(|name| used.contains(name));
        let uid = |claim: &ResourceClaim| claim.metadata.uid.clone().unwrap_or_default();
        let expected: BTreeSet<String> = claims.iter().filter(is_used).map(uid).collect();
        let prepared = self.subject.prepared();
        if prepared != expected {
            return Some(format!("prepared are {prepared:?}, pods use {expected:?}"));
        }
        let is_allocated =
            |claim: &&ResourceClaim| claim.status.as_ref().is_some_and(|status| status.allocation.is_some());
        if let Some(claim) = claims.iter().filter(is_allocated).find(|claim| !is_used(claim)) {
            return Some(format!("claim {:?} is allocated without a pod", claim.metadata.name));
        }
        if self.server.list::<ResourceSlice>().is_empty() {
            return Some("no slice is published".to_owned());
        }
        None
    }
}
