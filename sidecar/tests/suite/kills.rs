//! Sidecar, exporters and importers are killed at random moments: no key is left over, no descriptor leaks, no message is
//! lost.
//!
//! `SHMESH_KILLS` sets the number of kills, `SHMESH_SEED` repeats a run.

use std::time::Duration;

use crate::support::Sidecar;
use shmesh::{LinkOptions, Side};
use shmesh_testing::{Peer, Watchdog, ipc_dir, until};

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// SplitMix64, to choose the moments.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % limit
    }
}

/// An exporter and an importer run through their steps, and one of them is killed during a step.
#[test]
fn exporters_and_importers() {
    kill_exporters_and_importers(8);
}

#[test]
#[ignore = "long: 1,000 kills"]
fn exporters_and_importers_a_thousand_times() {
    kill_exporters_and_importers(number("SHMESH_KILLS", 1000));
}

fn kill_exporters_and_importers(kills: u64) {
    let _watchdog = Watchdog::start();
    let seed = number("SHMESH_SEED", u64::from(std::process::id()));
    println!("SHMESH_SEED={seed}");
    let mut random = Random(seed);
    let dir = ipc_dir();
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    let before = sidecar.fds();
    for kill in 0..kills {
        let (mut exporter, mut importer) = (Peer::start(dir.path()), Peer::start(dir.path()));
        exporter.tell("device connect");
        importer.tell("device connect");
        let tgid = importer.ask("device tgid");
        let key = exporter.ask("device export weights 0");
        let admit = format!("device admit {key} {tgid}");
        let (import, close) = (format!("device import {key}"), format!("device close {key}"));
        // The steps, and which side is killed during the last one.
        let steps: [(bool, &str); 4] = [(true, &admit), (false, &import), (false, &close), (true, &close)];
        let last = usize::try_from(random.below(4)).unwrap();
        for (is_exporter, step) in &steps[..last] {
            if *is_exporter { exporter.tell(step) } else { drop(importer.ask(step)) }
        }
        let (is_exporter, step) = steps[last];
        let dies_is_exporter = random.below(2) == 0;
        if is_exporter {
            exporter.order(step)
        } else {
            importer.order(step)
        }
        std::thread::sleep(Duration::from_micros(random.below(300)));
        if dies_is_exporter {
            exporter.kill()
        } else {
            importer.kill()
        }
        // The survivor ends normally.
        until("no key stays", || sidecar.metric("shmesh_sidecar_keys") <= u64::from(!dies_is_exporter));
        until("the dead one is forgotten", || sidecar.metric("shmesh_sidecar_sessions") <= 1);
        assert!(
            kill == 0 || sidecar.fds() <= before + 8,
            "descriptors are bounded by the processes that live"
        );
    }
    until("nothing is left", || sidecar.metric("shmesh_sidecar_keys") == 0 && sidecar.fds() <= before);
}

/// The sidecar is killed while messages flow between two other processes and this one.
#[test]
fn sidecars() {
    kill_sidecars(8);
}

#[test]
#[ignore = "long: 1,000 kills"]
fn sidecars_a_thousand_times() {
    kill_sidecars(number("SHMESH_KILLS", 1000));
}

fn kill_sidecars(kills: u64) {
    let _watchdog = Watchdog::start();
    let seed = number("SHMESH_SEED", u64::from(std::process::id()));
    println!("SHMESH_SEED={seed}");
    let mut random = Random(seed);
    for kind in ["mpmc", "spsc memfd"] {
        let dir = ipc_dir();
        let mut sidecar = Sidecar::start(dir.path(), kind);
        let options = LinkOptions::new().dir(dir.path());
        let phy = options.attach("link", Side::Primary).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        let (mut sent, mut received) = (0, 0);
        for _ in 0..kills / 2 {
            for _ in 0..random.below(200) {
                if mac.send_inline(sent, 0, b"").is_ok() {
                    sent += 1;
                }
                if let Some(message) = phy.receive().unwrap() {
                    assert_eq!(message.msg_id(), received, "{kind}");
                    received += 1;
                }
            }
            sidecar.kill();
            sidecar = Sidecar::start(dir.path(), kind);
        }
        while let Some(message) = phy.receive().unwrap() {
            assert_eq!(message.msg_id(), received, "{kind}");
            received += 1;
        }
        assert_eq!(sent, received, "{kind}: nothing lost, nothing doubled");
        until("both have come back", || sidecar.metric("shmesh_sidecar_sessions") == 2);
    }
}
