//! Rolling updates: an instance takes over from another one, and pods that come meanwhile notice nothing.

use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use shmesh_fake_kubelet::{Config, Event, Phase, Race};

use crate::kubelet::plugin::*;

/// Pods of each replacement, at least.
const PODS: u32 = 20;
/// Pause between two pods.
const PAUSE: Duration = Duration::from_millis(25);
const TAKEN_OVER: &str = "another instance of the plugin has taken over";
/// How many units of each resource the node has.
const COUNTS: [(&str, u64); 4] = [(SHM, 16), (POOL, 8), (AGENT, 256), (GPU, 8)];

/// The kubelet discovers the plugin, instead of being asked to register it.
const DISCOVERED: &[&str] = &["kubelet.registration=pluginsRegistry"];

/// Starts an instance whose kubelet notices soon that the previous one has ended: at once, or within the second after which it
/// looks for sockets.
fn start(place: &TestNode, settings: &[&str]) -> Plugin {
    let mut command = Plugin::command(&place.settings(), settings, None);
    command.args(["--settle", if settings == DISCOVERED { "2500" } else { "500" }]);
    Plugin::run(command)
}

/// Adds pods one after the other while an instance replaces another one, and returns the newer one.
async fn replace(place: &TestNode, settings: &[&str], old: Plugin) -> Plugin {
    let mut new = None;
    let is_replaced = |new: &Option<Plugin>| {
        new.as_ref().is_some_and(|new| new.get("/readyz").starts_with("HTTP/1.1 200"))
            && old.get("/readyz").contains(TAKEN_OVER)
    };
    let began = Instant::now();
    let mut number = 0;
    while number < PODS || !is_replaced(&new) {
        assert!(began.elapsed() < LIMIT, "not replaced after {number} pods");
        if number == PODS / 4 {
            new = Some(start(place, settings));
        }
        let status = place.node.add_pod(pod("p", &[(SHM, 1), (POOL, 1), (AGENT, 1), (GPU, 1)])).await;
        assert_eq!(status.phase, Phase::Running, "pod {number}: {status:?}");
        place.node.delete_pod("p");
        for (resource, count) in COUNTS {
            assert_eq!(place.node.allocatable(resource), count, "{resource} after pod {number}");
            assert_eq!(place.node.capacity(resource), count, "{resource} after pod {number}");
        }
        tokio::time::sleep(PAUSE).await;
        number += 1;
    }
    // The kubelet of this test must answer while the instance ends.
    assert!(tokio::task::spawn_blocking(move || old.end()).await.unwrap().success());
    for (resource, count) in COUNTS {
        assert_eq!(place.node.allocatable(resource), count, "{resource} at the end");
    }
    new.unwrap()
}

async fn replacements(race: Race, settings: &[&str], rounds: usize) {
    let mut place = TestNode::new();
    let kubelet = place.path("var/lib/kubelet");
    let status_period = Duration::from_millis(100);
    place.node = shmesh_fake_kubelet::Node::new(Config { race, status_period, ..Config::new(kubelet) });
    place.node.start_kubelet().await.unwrap();
    let mut plugin = start(&place, settings);
    place.all_there().await;
    for _ in 0..rounds {
        plugin = replace(&place, settings, plugin).await;
    }
    // It registers once more, so that the kubelet notices its end.
    let registered = || -> Vec<String> {
        let of_shm = |event: Event| match event {
            Event::Registered { resource, socket } if resource == SHM => Some(socket),
            _ => None,
        };
        let sockets = place.node.events().into_iter().filter_map(|record| of_shm(record.event));
        sockets.filter_map(|socket| Some(socket.rsplit('/').next()?.to_owned())).collect()
    };
    until("registered again", || {
        let sockets = registered();
        sockets.iter().filter(|socket| Some(*socket) == sockets.last()).count() >= 2
    })
    .await;
    // Otherwise a list that comes after the crash makes the devices healthy again, for good.
    until("the new registration is served", || {
        let events: Vec<Event> = place.node.events().into_iter().map(|record| record.event).collect();
        let last = |is_wanted: fn(&Event) -> bool| events.iter().rposition(is_wanted);
        let listed = last(|event| matches!(event, Event::Listed { resource, .. } if resource == SHM));
        listed > last(|event| matches!(event, Event::Registered { resource, .. } if resource == SHM))
    })
    .await;
    let directory =
        if settings.is_empty() { place.sockets() } else { place.path("var/lib/kubelet/plugins_registry") };
    until("no other socket", || place.plugin_sockets_in(&directory).len() <= 4).await;
    plugin.crash();
    place.allocatable(SHM, 0).await;
}

#[tokio::test]
async fn rollout_fails_no_pod() {
    replacements(Race::ByName, &[], 1).await;
}

#[tokio::test]
#[ignore = "long: the kubelet looks for sockets once a second; quick twins are the rollouts of a plugin that registers"]
async fn rollout_of_a_discovered_plugin_fails_no_pod() {
    replacements(Race::ByName, DISCOVERED, 1).await;
}

#[tokio::test]
async fn rollout_fails_no_pod_of_a_kubelet_without_the_race() {
    replacements(Race::Fixed, &[], 1).await;
}

#[tokio::test]
#[ignore = "long: ten replacements for each kind of kubelet"]
async fn ten_rollouts_fail_no_pod() {
    for settings in [&[], DISCOVERED] {
        replacements(Race::ByName, settings, 10).await;
        replacements(Race::Fixed, settings, 10).await;
    }
}

#[tokio::test]
async fn killed_successor_leaves_the_predecessor_in_charge() {
    let place = TestNode::with_kubelet().await;
    let old = start(&place, &[]);
    place.all_there().await;
    let new = start(&place, &[]);
    old.said("handed over");
    new.crash();
    old.said("this instance continues to serve");
    place.all_there().await;
    // It still hands over, and writes: a specification that was removed is there again.
    let spec = place.path("var/run/cdi/shmesh.io-agent.json");
    std::fs::remove_file(&spec).unwrap();
    until("the specification is back", || spec.exists()).await;
    let _new = replace(&place, &[], old).await;
}

#[tokio::test]
async fn killed_predecessor_leaves_the_successor_in_charge() {
    let place = TestNode::with_kubelet().await;
    let old = start(&place, &[]);
    place.all_there().await;
    let new = start(&place, &[]);
    old.said("handed over");
    old.crash();
    place.all_there().await;
    until("it is ready", || new.get("/readyz").starts_with("HTTP/1.1 200")).await;
    assert!(tokio::task::spawn_blocking(move || new.end()).await.unwrap().success());
}

#[tokio::test]
#[ignore = "long: such a version gets ten seconds; the quick twin is a test of the locks"]
async fn version_without_hand_over_is_waited_for() {
    let place = TestNode::with_kubelet().await;
    // Such a version holds the lock until it ends.
    let path = place.sockets().join(".shmesh.io.lock");
    let lock = std::fs::OpenOptions::new().create(true).append(true).mode(0o600).open(path).unwrap();
    lock.lock().unwrap();
    let new = place.start();
    new.said("waiting until it hands over");
    new.said("holds the lock and does not hand over");
    assert!(place.plugin_sockets().is_empty(), "it does nothing before");
    // A rolling update stops the older version when this one is ready.
    until("it is ready", || new.get("/readyz").starts_with("HTTP/1.1 200")).await;
    lock.unlock().unwrap();
    place.all_there().await;
    new.signal(Signal::SIGTERM);
}
