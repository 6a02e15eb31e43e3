//! Programs that are killed at any moment leave stale files only, which collection removes while others are in use.

use std::path::Path;
use std::time::Duration;

use shmesh_testing::{files, ipc_dir, until};

use crate::program::{RunningProgram, left_after_collection, path, with_library};

fn peer(dir: &Path, arguments: &[&str]) -> RunningProgram {
    let mut command = with_library(path("peer"), dir);
    RunningProgram::start(command.args(arguments))
}

const HELD: [&str; 3] = ["held", "sem.held", "sysv.00000042"];

/// Kills programs that make and remove memory, semaphores and segments, while another one holds its own.
fn kill_at_random(kills: u64) {
    let seed = std::env::var("SHMESH_KILL_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| u64::from_le_bytes(shmesh_sys::file::random().unwrap()));
    println!("SHMESH_KILL_SEED={seed}");
    let dir = ipc_dir();
    let mut holder = peer(dir.path(), &["hold"]);
    holder.expect("ready");
    let mut random = seed;
    let mut most = 0;
    for kill in 0..kills {
        // Linear congruential, with Knuth's numbers: the upper bits are good enough.
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut killed = peer(dir.path(), &["churn", &(random >> 40).to_string()]);
        killed.expect("ready");
        std::thread::sleep(Duration::from_micros((random >> 33) % 4000));
        killed.kill();
        if kill % 10 == 9 {
            most = most.max(files(dir.path()).len());
            until("only what is held is left", || left_after_collection(dir.path()) == HELD);
        }
    }
    until("only what is held is left", || left_after_collection(dir.path()) == HELD);
    assert!(most > HELD.len(), "the kills left nothing to remove, so this test shows nothing");
    holder.go_on();
    holder.expect("intact");
    holder.kill();
    until("nothing is left", || left_after_collection(dir.path()).is_empty());
}

#[test]
fn nothing_is_left_of_killed_programs() {
    kill_at_random(30);
}

#[test]
#[ignore = "long: 1,000 kills"]
fn nothing_is_left_of_a_thousand_killed_programs() {
    kill_at_random(std::env::var("SHMESH_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(1000));
}

/// A server that dies with 852 segments, as seen in the field; here of 16 KiB.
#[test]
fn segments_of_a_killed_server_are_removed_while_another_goes_on() {
    let dir = ipc_dir();
    let mut holder = peer(dir.path(), &["hold"]);
    holder.expect("ready");
    let mut server = peer(dir.path(), &["many", "852", "16384"]);
    server.expect("ready");
    assert_eq!(left_after_collection(dir.path()).len(), 852 + HELD.len());
    server.kill();
    until("the segments of the killed server are gone", || left_after_collection(dir.path()) == HELD);
    holder.go_on();
    holder.expect("intact");
    holder.end();
    until("the lease of the holder ends", || left_after_collection(dir.path()).is_empty());
}
