//! Everything at random, against an oracle: what the kubelet may hand out is always soon right again, nothing is handed out
//! twice, and nothing leaks.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use shmesh_fake_kubelet::Phase;

use crate::kubelet::plugin::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    KubeletRestarts,
    KubeletDown(u8),
    PluginCrashes,
    PluginEnds,
    SocketRemoved(u8),
    PodAdded(u8, u8),
    PodDeleted(u8),
    Sick,
    Well,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::KubeletRestarts),
        1 => (0..40_u8).prop_map(Step::KubeletDown),
        2 => Just(Step::PluginCrashes),
        1 => Just(Step::PluginEnds),
        2 => (0..4_u8).prop_map(Step::SocketRemoved),
        6 => (1..5_u8, 0..4_u8).prop_map(|(units, slots)| Step::PodAdded(units, slots)),
        5 => any::<u8>().prop_map(Step::PodDeleted),
        1 => Just(Step::Sick),
        1 => Just(Step::Well),
    ]
}

#[test]
fn any_order() {
    steps_in_any_order(6);
}

/// `SHMESH_STEPS` says how many.
#[test]
#[ignore = "long: 60 steps"]
fn any_order_for_long() {
    steps_in_any_order(std::env::var("SHMESH_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(60));
}

fn steps_in_any_order(steps_count: usize) {
    let mut runner = TestRunner::new(Config {
        cases: 1,
        failure_persistence: None,
        max_shrink_iters: 0,
        ..Config::default()
    });
    let steps = proptest::collection::vec(step(), steps_count);
    runner
        .run(&steps, |steps| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(play(steps));
            Ok(())
        })
        .unwrap();
}

async fn play(steps: Vec<Step>) {
    let place = TestNode::with_kubelet().await;
    let mut plugin = place.start_with(&["sweep.enabled=false"]);
    let mut pods: Vec<String> = Vec::new();
    let mut slowest = Duration::ZERO;
    let mut is_well = true;
    for (number, step) in steps.into_iter().enumerate() {
        match step {
            Step::KubeletRestarts => place.node.restart_kubelet().await.unwrap(),
            Step::KubeletDown(hundredths) => {
                place.node.kill_kubelet().await;
                tokio::time::sleep(Duration::from_millis(10 * u64::from(hundredths))).await;
                place.node.start_kubelet().await.unwrap();
            }
            Step::PluginCrashes => {
                plugin.crash();
                plugin = place.start_with(&["sweep.enabled=false"]);
            }
            Step::PluginEnds => {
                assert!(plugin.end().success());
                assert!(place.plugin_sockets().is_empty());
                plugin = place.start_with(&["sweep.enabled=false"]);
            }
            Step::SocketRemoved(which) => {
                if let Some(socket) = place.plugin_sockets().get(usize::from(which)) {
                    // It may be gone by now.
                    let _ = fs::remove_file(socket);
                }
            }
            Step::PodAdded(units, slots) => {
                let name = format!("p{number}");
                let limits = [(SHM, units.into()), (POOL, 1), (AGENT, 1), (GPU, slots.into())];
                let wanted: Vec<_> = limits.into_iter().filter(|(_, count)| *count > 0).collect();
                let status = place.node.add_pod(pod(&name, &wanted)).await;
                if status.phase == Phase::Running {
                    pods.push(name);
                } else {
                    place.node.delete_pod(&name);
                }
            }
            Step::PodDeleted(which) => {
                if !pods.is_empty() {
                    let pod = pods.remove(usize::from(which) % pods.len());
                    place.node.delete_pod(&pod);
                }
            }
            Step::Sick => {
                let _ = fs::remove_file(place.path("dev/nvidia0"));
                is_well = false;
            }
            Step::Well => {
                fs::write(place.path("dev/nvidia0"), "").unwrap();
                is_well = true;
            }
        }
        let began = Instant::now();
        place.allocatable(SHM, 16).await;
        place.allocatable(POOL, 8).await;
        place.allocatable(AGENT, 256).await;
        place.allocatable(GPU, if is_well { 8 } else { 4 }).await;
        slowest = slowest.max(began.elapsed());
        for resource in [SHM, POOL, AGENT, GPU] {
            let holders = place.node.holders(resource);
            let devices: BTreeSet<_> = holders.iter().map(|holder| &holder.device).collect();
            assert_eq!(devices.len(), holders.len(), "handed out twice: {holders:?}");
        }
    }
    println!("slowest recovery: {slowest:?}");
    for name in pods {
        place.node.delete_pod(&name);
    }
    // Freed by the next request. The kubelet may notice a crash only now and refuse one pod; a leak would refuse all.
    let until_then = Instant::now() + LIMIT;
    loop {
        let status = place.node.add_pod(pod("last", &[(SHM, 16), (POOL, 8)])).await;
        if status.phase == Phase::Running {
            break;
        }
        assert!(Instant::now() < until_then, "something leaked: {status:?}");
        place.node.delete_pod("last");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until("four sockets", || place.plugin_sockets().len() == 4).await;
}
