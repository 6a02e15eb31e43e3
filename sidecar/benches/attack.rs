//! The cost of an attack on one link for the clients of another link of the same sidecar: `cargo bench -p shmesh-sidecar --bench attack`.
//!
//! Slices of three kinds take turns, so that a loaded machine loads all of them: no attack; the attack on the link beside; and the
//! same attack on a link of another sidecar in another directory, which costs the machine the same. Of each slice the 99th
//! percentile of round trips is taken, and of each kind the median of these. The last two columns differ by what the links share.

#![allow(clippy::unwrap_used, reason = "a measurement may panic")]

#[allow(dead_code, reason = "shared with the tests, which use more of it")]
#[path = "../tests/suite/support/mod.rs"]
mod support;

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use shmesh_testing::{ipc_dir, until};
use support::Sidecar;
use support::attacker::{Attacker, Clients, LINKS, is_ready, seed};

const SLICES: usize = 40;
const SLICE: Duration = Duration::from_millis(500);

/// A sidecar with both links, and an attacker of the first one.
struct Site {
    dir: tempfile::TempDir,
    sidecar: Sidecar,
    attacker: Attacker,
}

impl Site {
    fn new(seed: u64) -> Self {
        let dir = ipc_dir();
        set_permissions(dir.path(), Permissions::from_mode(0o1777)).unwrap();
        let sidecar = Sidecar::start_links(dir.path(), &LINKS);
        until("both are ready", || LINKS.iter().all(|link| is_ready(&sidecar, link)));
        let attacker = Attacker::new(seed, dir.path());
        Self { dir, sidecar, attacker }
    }
}

fn p99_of(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() * 99 / 100]
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() / 2]
}

fn main() {
    if shmesh_testing::is_peer() {
        return shmesh_testing::serve();
    }
    let seed = seed();
    let (mut here, mut elsewhere) = (Site::new(seed), Site::new(seed));
    let mut clients = Clients::attach(here.dir.path());
    // Which site is attacked: 0 none, 1 that of the clients, 2 the other one.
    let (attacked, acts) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (is_acting, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut p99 = [Vec::new(), Vec::new(), Vec::new()];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                is_acting.store(true, Ordering::SeqCst);
                let site = match attacked.load(Ordering::SeqCst) {
                    1 => Some(&mut here),
                    2 => Some(&mut elsewhere),
                    _ => None,
                };
                match site {
                    Some(site) => {
                        site.attacker.act(&mut site.sidecar);
                        acts.fetch_add(1, Ordering::Relaxed);
                    }
                    None => {
                        is_acting.store(false, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            }
        });
        for slice in 0..SLICES * 3 {
            let kind = slice % 3;
            // What was begun in the last slice ends before this one begins.
            attacked.store(0, Ordering::SeqCst);
            until("the attacker rests", || !is_acting.load(Ordering::SeqCst));
            attacked.store(kind, Ordering::SeqCst);
            let end = std::time::Instant::now() + SLICE;
            while std::time::Instant::now() < end {
                clients.talk();
            }
            p99[kind].push(p99_of(std::mem::take(&mut clients.took)));
        }
        is_over.store(true, Ordering::SeqCst);
    });
    for site in [&mut here, &mut elsewhere] {
        site.attacker.give_up();
    }
    let [quiet, beside, apart] = p99.map(median);
    println!("{SLICES} slices of {SLICE:?} each, {} acts of the attackers", acts.into_inner());
    println!("p99 of a round trip, median of the slices:");
    println!("no attack {quiet:?}   attack on the link beside {beside:?}   attack elsewhere {apart:?}");
    println!("ratio beside / elsewhere: {:.2}", beside.as_secs_f64() / apart.as_secs_f64());
}
