//! Two primaries of one link, which is a mistake of those who wrote the pods.

use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use shmesh::MAX_SEATS;
use shmesh_bridge::bridge::{Bridge, BridgeConfig, ClusterPlace, Metrics};
use shmesh_bridge::engine::{Engine, Fate, MemoryEngine};
use shmesh_bridge::frame::VERSIONS;
use shmesh_bridge::session::BridgeEnd;
use shmesh_bridge::zenoh_engine::{NetworkPlace, ZenohEngine};
use shmesh_testing::until;

use crate::processes::dir;

fn primaries(metrics: &Metrics) -> Option<u64> {
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    let line = text.lines().find(|line| line.starts_with("shmesh_bridge_primaries{"))?;
    assert!(line.contains("link=\"fronthaul\""), "{line}");
    line.rsplit(' ').next()?.parse().ok()
}

fn far(dir: &tempfile::TempDir, engine: &dyn Engine, metrics: &Metrics) -> Bridge {
    let config = BridgeConfig {
        end: BridgeEnd::Far,
        dir: dir.path().to_owned(),
        links: vec!["fronthaul".parse().unwrap()],
        node: "worker-1.0".to_owned(),
        peers: MAX_SEATS,
        peer_timeout: Duration::from_secs(10),
        versions: VERSIONS,
        cluster: Some(ClusterPlace { place: "worker-1.0".to_owned(), near: Vec::new() }),
    };
    Bridge::start(&config, engine, metrics).unwrap()
}

#[test]
fn announcements_of_two_places_are_two_primaries() {
    let (dir, metrics, engine) = (dir(), Metrics::default(), MemoryEngine::new(|| Fate::Arrives));
    let first = engine.announce("fronthaul", "worker-2.0").unwrap();
    let bridge = far(&dir, &engine, &metrics);
    until("one primary", || primaries(&metrics) == Some(1));
    let second = engine.announce("fronthaul", "worker-3.0").unwrap();
    until("two primaries", || primaries(&metrics) == Some(2));
    drop(first);
    until("one primary again", || primaries(&metrics) == Some(1));
    let _same_place = engine.announce("fronthaul", "worker-3.0").unwrap();
    let _other_link = engine.announce("midhaul", "worker-4.0").unwrap();
    drop(second);
    until("no second place", || primaries(&metrics) == Some(1));
    bridge.stop();
}

/// A headless Service has the addresses of all pods with its label.
#[test]
fn two_addresses_are_two_primaries() {
    let (dir, metrics) = (dir(), Metrics::default());
    let place = NetworkPlace {
        connect_links: ["tcp/127.0.0.1:1", "tcp/127.0.0.2:1"]
            .map(|address| ("fronthaul".to_owned(), address.to_owned()))
            .to_vec(),
        group: "east/ran".to_owned(),
        ..NetworkPlace::default()
    };
    let engine = ZenohEngine::new(place, metrics.certificates.clone());
    let bridge = far(&dir, &engine, &metrics);
    until("two primaries", || primaries(&metrics) == Some(2));
    bridge.stop();
}
