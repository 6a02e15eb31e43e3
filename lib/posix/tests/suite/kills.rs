//! Programs that are killed at any moment leave stale files only, which collection removes while others are in use.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sys::statvfs::statvfs;
use shmesh_testing::{files, ipc_dir, is_root, own_process_by, passed, this_test, until};

use crate::program::{RunningProgram, folder, left_after_collection, path, with_library};

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
    let mut server = peer(dir.path(), &["many", "852", "16384", "16384", "reserved"]);
    server.expect("ready");
    assert_eq!(left_after_collection(dir.path()).len(), 852 + HELD.len());
    server.kill();
    until("the segments of the killed server are gone", || left_after_collection(dir.path()) == HELD);
    holder.go_on();
    holder.expect("intact");
    holder.end();
    until("the lease of the holder ends", || left_after_collection(dir.path()).is_empty());
}

/// The same with the sizes of the field, 9 to 300 MB, of which each segment has one page: 131 GB of memory are too much here. And with all
/// of their memory, where the sizes are divided so that they take a quarter of what is free. The file system is theirs alone, so its
/// bytes are counted.
#[test]
#[ignore = "long: 852 segments of 9 to 300 MB"]
fn segments_of_9_to_300_mb_are_removed_while_another_goes_on() {
    if !is_root() {
        return;
    }
    let (first, last, count) = (9_000_000_u64, 300_000_000_u64, 852);
    let free = std::fs::read_to_string("/proc/meminfo").unwrap();
    let free =
        free.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next()).unwrap();
    let divisor = (4 * count * (first + last) / 2).div_ceil(free.parse::<u64>().unwrap() * 1024);
    // The programs are built outside.
    folder();
    let in_own_mounts = || {
        let mut command = Command::new("unshare");
        command.arg("--mount").arg(this_test().get_program()).env("SHMESH_POSIX_IS_BUILT", "1");
        command
    };
    let ran = own_process_by(in_own_mounts, || {
        for (first, last, kind) in [(first, last, "sparse"), (first / divisor, last / divisor, "reserved")] {
            println!("{count} segments of {first} to {last} bytes, {kind}");
            let dir = ipc_dir();
            let mount = |command: &mut Command| assert!(command.arg(dir.path()).status().unwrap().success());
            mount(Command::new("mount").args(["-t", "tmpfs", "-o", "size=100%", "tmpfs"]));
            let used = || {
                let found = statvfs(dir.path()).unwrap();
                (found.blocks() - found.blocks_free()) * found.fragment_size()
            };
            let mut holder = peer(dir.path(), &["hold"]);
            holder.expect("ready");
            let held = used();
            let sizes = [first.to_string(), last.to_string()];
            let mut server = peer(dir.path(), &["many", &count.to_string(), &sizes[0], &sizes[1], kind]);
            server.expect("ready");
            let expected = if kind == "sparse" { count * 4096 } else { count * (first + last) / 2 };
            assert!(used() - held >= expected, "{} of {expected}", used() - held);
            assert_eq!(left_after_collection(dir.path()).len() as u64, count + HELD.len() as u64);
            server.kill();
            until("the segments are gone", || left_after_collection(dir.path()) == HELD && used() == held);
            holder.go_on();
            holder.expect("intact");
            holder.end();
            until("no byte is left", || left_after_collection(dir.path()).is_empty() && used() == 0);
            mount(&mut Command::new("umount"));
        }
    });
    if let Some(output) = ran {
        assert!(passed(&output), "{}", output.status);
    }
}
