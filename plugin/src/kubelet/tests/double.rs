//! A keeper and the kubelet double, in one paused runtime: thousands of steps at random, with real sockets.
//!
//! The oracle: three seconds after whatever happened, the kubelet may hand out what is healthy, no device is held twice, each pod
//! holds what it asked for, and at the end nothing is lost.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use shmesh_fake_kubelet::{Config, Container, Node as Double, Phase, Pod};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::handover::{HandoverRole, Ownership};
use crate::kubelet::{AllocationTimes, Mode, NodeContext, Registrar, ResourceOffer, remove_stale};
use crate::metrics::Metrics;
use crate::resource::allocate::AllocateSettings;
use crate::resource::{Resource, ResourceKind, Unit};

const R: &str = "shmesh.io/shm";
const UNITS: usize = 6;
const SOON: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug)]
enum Step {
    KubeletRestarts,
    KubeletDown(u16),
    PluginEnds,
    PluginCrashes,
    StreamCut,
    SocketRemoved,
    PodAdded(u8),
    PodDeleted(u8),
    Health(u8),
    /// Less than it takes to recover, before the next step.
    Hurry(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        Just(Step::KubeletRestarts),
        (0..5_000_u16).prop_map(Step::KubeletDown),
        Just(Step::PluginEnds),
        Just(Step::PluginCrashes),
        Just(Step::StreamCut),
        Just(Step::SocketRemoved),
        (1..4_u8).prop_map(Step::PodAdded),
        (1..4_u8).prop_map(Step::PodAdded),
        any::<u8>().prop_map(Step::PodDeleted),
        any::<u8>().prop_map(Step::PodDeleted),
        any::<u8>().prop_map(Step::Health),
        (0..900_u16).prop_map(Step::Hurry),
    ]
}

/// The units whose bit is set in `unhealthy` are.
fn resource(unhealthy: u8) -> Arc<Resource> {
    let unit =
        |at| Unit { id: format!("u{at}"), numa: None, device: at, is_healthy: unhealthy & (1 << at) == 0 };
    Arc::new(Resource::new(R.into(), ResourceKind::Shm { unit: 1 << 26 }, (0..UNITS).map(unit).collect()))
}

/// A list that is too long for the kubelet, which ends the stream.
fn too_long() -> Arc<Resource> {
    let unit =
        |at| Unit { id: format!("{at}{}", "x".repeat(1_000_000)), numa: None, device: 0, is_healthy: true };
    Arc::new(Resource::new(R.into(), ResourceKind::Shm { unit: 1 << 26 }, (0..5).map(unit).collect()))
}

struct World {
    _dir: tempfile::TempDir,
    double: Double,
    node: NodeContext,
    offer: watch::Sender<ResourceOffer>,
    unhealthy: u8,
    stop: CancellationToken,
    keeper: JoinHandle<()>,
    pods: Vec<(String, usize)>,
}

impl World {
    async fn new(seed: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::new(dir.path());
        config.seed = seed;
        let double = Double::new(config);
        double.start_kubelet().await.unwrap();
        let node = NodeContext {
            mode: Mode::Register,
            sockets: double.paths().device_plugins(),
            endpoints: std::path::PathBuf::new(),
            start: 1,
            ownership: Ownership::new(HandoverRole::Owner),
            kubelet: double.paths().kubelet_socket(),
            form: Arc::new(AllocateSettings::of(&crate::config::Config::default())),
            allocation_times: Arc::new(AllocationTimes::default()),
            metrics: Metrics::default(),
            events: crate::events::Events::default(),
        };
        let offer = watch::Sender::new(ResourceOffer { now: resource(0), before: None });
        let stop = CancellationToken::new();
        let keeper = Registrar::new(node.clone(), offer.subscribe(), watch::Sender::new(false));
        let keeper = tokio::spawn(keeper.run(stop.clone()));
        Self { _dir: dir, double, node, offer, unhealthy: 0, stop, keeper, pods: Vec::new() }
    }

    fn start(&mut self) {
        self.node.start += 1;
        remove_stale(&self.node.sockets, "shmesh.io", self.node.start).unwrap();
        self.stop = CancellationToken::new();
        let keeper = Registrar::new(self.node.clone(), self.offer.subscribe(), watch::Sender::new(false));
        self.keeper = tokio::spawn(keeper.run(self.stop.clone()));
    }

    fn sockets(&self) -> Vec<std::path::PathBuf> {
        let entries = fs::read_dir(&self.node.sockets).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("shmesh.io_")).collect()
    }

    fn advertise(&self, now: Arc<Resource>) {
        self.offer.send_modify(|offer| offer.now = now);
    }

    async fn act(&mut self, number: usize, step: Step) {
        match step {
            Step::KubeletRestarts => self.double.restart_kubelet().await.unwrap(),
            Step::KubeletDown(millis) => {
                self.double.kill_kubelet().await;
                tokio::time::sleep(Duration::from_millis(millis.into())).await;
                self.double.start_kubelet().await.unwrap();
            }
            Step::PluginEnds => {
                self.stop.cancel();
                (&mut self.keeper).await.unwrap();
                assert!(self.sockets().is_empty(), "a socket stays");
                self.start();
            }
            Step::PluginCrashes => {
                self.keeper.abort();
                assert!((&mut self.keeper).await.unwrap_err().is_cancelled());
                self.start();
            }
            Step::StreamCut => {
                self.advertise(too_long());
                // Until it has been sent.
                tokio::time::sleep(Duration::from_millis(1)).await;
                self.advertise(resource(self.unhealthy));
            }
            Step::SocketRemoved => {
                for socket in self.sockets() {
                    fs::remove_file(socket).unwrap();
                }
            }
            Step::PodAdded(count) => {
                let name = format!("p{number}");
                let container = Container::new("main").limit(R, count.into());
                let status = self.double.add_pod(Pod::new(&name).container(container)).await;
                match status.phase {
                    Phase::Running => self.pods.push((name, count.into())),
                    _ => drop(self.double.delete_pod(&name)),
                }
            }
            Step::PodDeleted(which) if !self.pods.is_empty() => {
                let (name, _) = self.pods.remove(usize::from(which) % self.pods.len());
                self.double.delete_pod(&name);
            }
            Step::PodDeleted(_) => {}
            Step::Health(unhealthy) => {
                self.unhealthy = unhealthy & ((1 << UNITS) - 1);
                self.advertise(resource(self.unhealthy));
            }
            Step::Hurry(millis) => tokio::time::sleep(Duration::from_millis(millis.into())).await,
        }
    }

    /// One pod gets all units. A registration that is under way refuses pods that would be let in a moment later.
    async fn gives_everything(&self) {
        let start = tokio::time::Instant::now();
        loop {
            let all = Container::new("main").limit(R, UNITS as u64);
            let status = self.double.add_pod(Pod::new("last").container(all)).await;
            if status.phase == Phase::Running {
                return;
            }
            assert!(start.elapsed() < SOON, "something leaked: {status:?}");
            self.double.delete_pod("last");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn settles(&self, wanted: usize) {
        let right = |node: &Double| node.allocatable(R) == wanted as u64 && node.capacity(R) == UNITS as u64;
        self.double.wait_for(SOON, right).await.unwrap();
        let holders = self.double.holders(R);
        let devices: BTreeSet<_> = holders.iter().map(|holder| &holder.device).collect();
        assert_eq!(devices.len(), holders.len(), "held twice: {holders:?}");
        for (pod, count) in &self.pods {
            assert_eq!(holders.iter().filter(|holder| holder.pod == *pod).count(), *count, "{pod}");
        }
    }
}

async fn play(steps: Vec<Step>, seed: u64) {
    let mut world = World::new(seed).await;
    world.settles(UNITS).await;
    for (number, step) in steps.into_iter().enumerate() {
        world.act(number, step).await;
        if !matches!(step, Step::Hurry(_)) || number % 3 == 0 {
            let well = UNITS - world.unhealthy.count_ones() as usize;
            world.settles(well).await;
        }
    }
    world.act(usize::MAX, Step::Health(0)).await;
    world.settles(UNITS).await;
    for (name, _) in std::mem::take(&mut world.pods) {
        world.double.delete_pod(&name);
    }
    world.gives_everything().await;
    world.stop.cancel();
    (&mut world.keeper).await.unwrap();
    assert!(world.sockets().is_empty());
}

fn random_sequences(cases_count: u32) {
    let config = ProptestConfig {
        cases: cases_count,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    };
    let sequences = (proptest::collection::vec(step(), 150..250), any::<u64>());
    let result = proptest::test_runner::TestRunner::new(config).run(&sequences, |(steps, seed)| {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(play(steps, seed));
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn random_sequences_recover_within_three_seconds() {
    random_sequences(1);
}

#[test]
#[ignore = "long: 16 sequences"]
fn random_sequences_recover_within_three_seconds_long() {
    random_sequences(16);
}
