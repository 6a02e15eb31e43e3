//! The driver of random sequences around claims: a driver that does its duty passes, and one that neglects any of it is found out.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use shmesh_fake_kubelet::{ApiServer, Clock, DriverSubject, Node, claim_soak};
use tokio::task::JoinHandle;

use crate::driver::{FakeDriver, Sockets};
use crate::{claim, class, node_with, slice};

/// The duties that a driver neglects.
#[derive(Clone, Copy, Debug, Default)]
struct Neglect {
    forgets: bool,
    never_unprepares: bool,
    never_publishes_again: bool,
}

/// A driver, and the task that publishes its slices.
struct SoakDriver {
    node: Node,
    neglect: Neglect,
    state: Arc<Mutex<BTreeSet<String>>>,
    runs: u32,
    instance: Option<(FakeDriver, Sockets)>,
    publisher: JoinHandle<()>,
}

const DEVICES: [&str; 8] = ["d0", "d1", "d2", "d3", "d4", "d5", "d6", "d7"];

impl SoakDriver {
    fn new(node: &Node, server: &ApiServer, neglect: Neglect) -> Self {
        let publisher = {
            let server = server.clone();
            tokio::spawn(async move {
                loop {
                    if server.list::<ResourceSlice>().is_empty() {
                        server.create(&slice("slice", "node", &DEVICES)).unwrap();
                        if neglect.never_publishes_again {
                            return;
                        }
                    }
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            })
        };
        let node = node.clone();
        let mut driver = Self { node, neglect, state: Arc::default(), runs: 0, instance: None, publisher };
        driver.instance = Some(driver.start());
        driver
    }

    fn start(&mut self) -> (FakeDriver, Sockets) {
        self.runs += 1;
        if self.neglect.forgets {
            self.state = Arc::default();
        }
        let driver = FakeDriver::with_state(&format!("r{}", self.runs), Arc::clone(&self.state));
        if self.neglect.never_unprepares {
            driver.script(|script| script.lies = true);
        }
        let sockets = driver.start(&self.node);
        (driver, sockets)
    }
}

impl DriverSubject for SoakDriver {
    async fn restart(&mut self) {
        // A process that is killed leaves its sockets, and the next one removes them.
        if let Some((_, sockets)) = self.instance.take() {
            tokio::time::sleep(Duration::from_millis(500)).await;
            sockets.stop();
        }
        self.instance = Some(self.start());
    }

    async fn roll(&mut self) {
        let new = self.start();
        tokio::time::sleep(Duration::from_secs(3)).await;
        if let Some((_, sockets)) = self.instance.replace(new) {
            sockets.stop();
        }
    }

    fn prepared(&self) -> BTreeSet<String> {
        self.state.lock().unwrap().clone()
    }

    fn claim(&self, name: &str) -> ResourceClaim {
        claim(name, None)
    }
}

impl Drop for SoakDriver {
    fn drop(&mut self) {
        self.publisher.abort();
    }
}

async fn soak_with(
    neglect: Neglect,
    steps: usize,
    seed: u64,
) -> Result<shmesh_fake_kubelet::ClaimReport, String> {
    let server = ApiServer::new(Clock::runtime());
    server.create(&class()).unwrap();
    let (_dir, node) = node_with(|config| (config.api, config.seed) = (Some(server.clone()), seed)).await;
    let mut driver = SoakDriver::new(&node, &server, neglect);
    claim_soak(&node, &server, &mut driver, steps, seed).await.map_err(|failure| failure.to_string())
}

#[tokio::test(start_paused = true)]
async fn correct_driver_passes() {
    let report = soak_with(Neglect::default(), 70, 1).await.unwrap();
    assert!(report.started > 5 && report.steps.len() == 10, "{report:?}");
    assert!(
        report.slowest >= Duration::from_secs(30),
        "the loop of the kubelet takes the time that it takes: {report:?}"
    );
}

#[tokio::test(start_paused = true)]
#[ignore = "long: two soaks of 500 steps"]
async fn correct_driver_passes_with_any_seed() {
    for seed in 2..4 {
        soak_with(Neglect::default(), 500, seed).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn incorrect_drivers_are_detected() {
    let neglects = [
        (Neglect { forgets: true, ..Default::default() }, "pods use"),
        (Neglect { never_unprepares: true, ..Default::default() }, "prepared are"),
        (Neglect { never_publishes_again: true, ..Default::default() }, "no slice is published"),
    ];
    for (neglect, text) in neglects {
        let failure = soak_with(neglect, 60, 1).await.unwrap_err();
        assert!(failure.contains(text), "{neglect:?}: {failure}");
    }
}
