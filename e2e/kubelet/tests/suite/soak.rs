//! The driver of random sequences: a plugin that does its duty passes, and one that neglects any of it is found out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use shmesh_fake_kubelet::{Chance, Node, Race, Subject, soak};
use shmesh_kubelet_api::{HEALTHY, UNHEALTHY};
use tokio::task::JoinHandle;

use crate::plugin::{Fake, device, register};
use crate::{R, node_with};

/// The duties that a plugin neglects.
#[derive(Clone, Copy, Debug, Default)]
struct Duties {
    ignores_cuts: bool,
    ignores_removal: bool,
    ignores_restarts: bool,
    never_recovers: bool,
}

/// A plugin and the loop that keeps it registered.
struct SoakNode {
    node: Node,
    duties: Duties,
    fake: Fake,
    health: Vec<bool>,
    runs: u32,
    keeper: Option<JoinHandle<()>>,
}

async fn keep(node: Node, fake: Fake, name: String, duties: Duties) {
    // Numbers of inodes are used again, so the time counts too.
    let kubelet = || {
        let meta = fs::metadata(node.paths().kubelet_socket()).ok()?;
        Some((meta.ino(), meta.ctime(), meta.ctime_nsec()))
    };
    loop {
        let served = fake.serve_at(&node, &name);
        let path = node.paths().device_plugins().join(&name);
        let (seen, streams) = (kubelet(), fake.calls("list").len());
        let registered = register(&node, &name).await.is_ok();
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let cut = fake.calls("list").len() > streams && fake.streams() == 0;
            if !registered
                || (kubelet() != seen && !duties.ignores_restarts)
                || (!path.exists() && !duties.ignores_removal)
                || (cut && !duties.ignores_cuts)
            {
                break;
            }
        }
        drop(served);
    }
}

impl SoakNode {
    fn new(node: &Node, count: usize, duties: Duties) -> Self {
        let health = vec![true; count];
        let mut kept = Self { node: node.clone(), duties, fake: Fake::new(0), health, runs: 0, keeper: None };
        kept.start();
        kept
    }

    fn name(&self) -> String {
        format!("plugin{}.sock", self.runs)
    }

    fn start(&mut self) {
        self.runs += 1;
        self.fake = Fake::new(0);
        self.tell();
        let keeper = keep(self.node.clone(), self.fake.clone(), self.name(), self.duties);
        self.keeper = Some(tokio::spawn(keeper));
    }

    fn tell(&self) {
        let word = |healthy: &bool| if *healthy { HEALTHY } else { UNHEALTHY };
        let list = self.health.iter().enumerate();
        self.fake.list(list.map(|(n, healthy)| device(&format!("d{n}"), word(healthy), &[])).collect());
    }
}

impl Subject for SoakNode {
    async fn restart(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            keeper.abort();
            let _ = keeper.await;
        }
        self.start();
    }

    fn flip(&mut self, chance: &mut Chance) {
        let which = chance.below(self.health.len());
        self.health[which] = !self.health[which];
        if !(self.duties.never_recovers && self.health[which]) {
            self.tell();
        }
    }

    fn healthy(&self) -> BTreeMap<String, BTreeSet<String>> {
        let healthy = self.health.iter().enumerate().filter(|(_, healthy)| **healthy);
        [(R.to_owned(), healthy.map(|(n, _)| format!("d{n}")).collect())].into()
    }

    fn sockets(&self) -> Vec<PathBuf> {
        vec![self.node.paths().device_plugins().join(self.name())]
    }
}

impl Drop for SoakNode {
    fn drop(&mut self) {
        self.keeper.take().inspect(JoinHandle::abort);
    }
}

#[tokio::test(start_paused = true)]
async fn correct_plugin_passes() {
    soak_a_dutiful_plugin(&[(1, Race::ByName)]).await;
}

#[tokio::test(start_paused = true)]
#[ignore = "long: three soaks"]
async fn correct_plugin_passes_with_any_seed_and_race() {
    soak_a_dutiful_plugin(&[(1, Race::ByName), (2, Race::ByName), (3, Race::Fixed)]).await;
}

async fn soak_a_dutiful_plugin(races: &[(u64, Race)]) {
    for &(seed, race) in races {
        let (_dir, node) = node_with(|config| (config.race, config.seed) = (race, seed)).await;
        let mut plugin = SoakNode::new(&node, 8, Duties::default());
        let report = soak(&node, &mut plugin, 250, seed).await.unwrap();
        assert!(report.admitted > 5 && report.refused > 2 && report.steps.len() == 9, "{report:?}");
        assert!(report.slowest >= Duration::from_millis(200), "recovery takes the time that it takes");
    }
}

#[tokio::test(start_paused = true)]
async fn incorrect_plugins_are_detected() {
    let duties = [
        (Duties { ignores_cuts: true, ..Default::default() }, "StreamCut"),
        (
            Duties {
                ignores_removal: true,
                ignores_restarts: true,
                ignores_cuts: true,
                ..Default::default()
            },
            "Restart",
        ),
        (Duties { never_recovers: true, ..Default::default() }, "HealthFlip"),
    ];
    for (duties, cause) in duties {
        let (_dir, node) = node_with(|_| {}).await;
        let mut plugin = SoakNode::new(&node, 8, duties);
        let failure = soak(&node, &mut plugin, 400, 1).await.unwrap_err().to_string();
        assert!(failure.contains("should be allocatable"), "{failure}");
        assert!(failure.contains(cause), "{duties:?}: {failure}");
    }
}
