//! Deaths at random moments must leave nothing behind: no key, no descriptor, no device memory.

use shmesh_fake_ascend::Npud;

use crate::support::Sidecar;
use crate::vendors::ascend::npud;
use crate::vendors::cuda::{Observer, device_of, library};
use crate::vendors::peer::start;
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, until};

/// Rounds of each kind; `SHMESH_DEVICE_KILLS` sets the number.
fn rounds() -> u32 {
    std::env::var("SHMESH_DEVICE_KILLS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(500)
}

/// A small generator. Its seed is printed, so that a run can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// One lifetime of a key. One side is killed after a number of steps, right after an order that it may have started.
fn round(random: &mut Random, exporter: Peer, importer: Peer) {
    let mut sides = [Some(exporter), Some(importer)];
    let victim = usize::try_from(random.below(2)).unwrap();
    let last = random.below(7);
    let mut key = "0".repeat(64);
    let mut tgid = "1".to_owned();
    for step in 0..=last {
        let (side, order) = match step {
            0 => (0, "connect".to_owned()),
            1 => (1, "connect".to_owned()),
            2 => (1, "tgid".to_owned()),
            3 => (0, "export weights 0".to_owned()),
            4 => (0, format!("admit {key} {tgid}")),
            5 => (1, format!("import {key}")),
            _ => (1, format!("close {key}")),
        };
        let [Some(_), Some(_)] = &sides else { unreachable!("both live until the last step") };
        let peer = sides[side].as_mut().unwrap();
        peer.order(&order);
        if step == last {
            // Nothing is awaited: the side dies before, during or after the order.
            let delay = std::time::Duration::from_micros(random.below(3_000));
            std::thread::sleep(delay);
            break;
        }
        let mut answer = None;
        until("an answer", || {
            // The exporter must read its events if its driver has a whitelist.
            if step == 5 {
                sides[0].as_mut().unwrap().ask("event");
            }
            answer = sides[side].as_ref().unwrap().answered();
            answer.is_some()
        });
        assert!(!answer.as_ref().unwrap().starts_with("err"), "no side was killed yet: {order}: {answer:?}");
        match step {
            2 => tgid = answer.unwrap(),
            3 => key = answer.unwrap(),
            _ => {}
        }
    }
    sides[victim].take().unwrap().kill();
    // The other side continues for a while, and then ends normally.
    if let Some(other) = sides[1 - victim].take() {
        other.kill();
    }
}

fn random() -> Random {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let seed = (since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos())) | 1;
    println!("seed {seed}");
    Random(seed)
}

#[test]
fn of_gpu_memory() {
    kill_over_gpu_memory(6);
}

#[test]
#[ignore = "long: 500 deaths"]
fn of_gpu_memory_at_length() {
    kill_over_gpu_memory(rounds());
}

fn kill_over_gpu_memory(rounds: u32) {
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let device = device_of(dir.path(), 64);
    let (library, place) = (library(), device.to_str().unwrap().to_owned());
    let variables = [("SHMESH_CUDA_LIBRARY", library.as_str()), ("FAKE_CUDA_DIR", place.as_str())];
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--memfds-for-devices"]);
    let mut observer = Observer::start(dir.path(), &variables);
    let (all, fds) = (observer.free(), sidecar.fds());
    let mut random = random();
    for _ in 0..rounds {
        let _watchdog = Watchdog::start();
        let [exporter, importer] = [(), ()].map(|()| start(dir.path(), "cuda", &variables, &[]));
        round(&mut random, exporter, importer);
        until("nothing is left", || {
            sidecar.metric("shmesh_sidecar_keys") == 0 && observer.is_free_again(all) && sidecar.fds() <= fds
        });
    }
}

#[test]
fn of_npu_memory() {
    kill_over_npu_memory(6);
}

#[test]
#[ignore = "long: 500 deaths"]
fn of_npu_memory_at_length() {
    kill_over_npu_memory(rounds());
}

fn kill_over_npu_memory(rounds: u32) {
    let dir = ipc_dir();
    let (daemon, variables): (Npud, _) = npud(dir.path());
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    let fds = sidecar.fds();
    let mut random = random();
    for _ in 0..rounds {
        let _watchdog = Watchdog::start();
        let [exporter, importer] = [(), ()].map(|()| start(dir.path(), "ascend", &variables, &[]));
        round(&mut random, exporter, importer);
        until("nothing is left", || {
            sidecar.metric("shmesh_sidecar_keys") == 0 && daemon.count() == (0, 0) && sidecar.fds() <= fds
        });
    }
}
