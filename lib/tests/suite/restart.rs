//! Processes come and go, by themselves or by `kill -9`; the link stays, and so does everything in it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use shmesh::{LinkOptions, Side};
use shmesh_testing::{Peer, Watchdog, config, files, ipc_dir, is_root, receive, refused, send, until};

/// Each kind of link that restarts differently.
const KINDS: [&str; 6] = [
    "mode=mpmc",
    "mode=spsc",
    "mode=mpmc backing=memfd",
    "mode=spsc backing=memfd",
    "mode=mpmc notify=off",
    "mode=spsc notify=off",
];

/// How a process ends.
const ENDS: [fn(Peer); 2] = [Peer::kill, Peer::exit];

fn named(kinds: &[&'static str]) -> Vec<&'static str> {
    kinds.iter().copied().filter(|kind| !kind.contains("memfd")).collect()
}

#[test]
fn primary_may_start_first() {
    for kind in KINDS {
        let dir = ipc_dir();
        let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
        primary.tell(&format!("create link {kind}"));
        secondary.tell("attach link secondary 0");
        secondary.tell("send 1 up");
        primary.tell("send 2 down");
        assert_eq!(
            (primary.ask("receive"), secondary.ask("receive")),
            ("1 up".into(), "2 down".into()),
            "{kind}"
        );
    }
}

#[test]
fn secondary_may_start_first_and_waits() {
    for kind in KINDS {
        let dir = ipc_dir();
        let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
        secondary.order("attach link secondary 100000");
        assert_eq!(secondary.answered(), None, "nothing to attach to yet");
        primary.tell(&format!("create link {kind}"));
        assert_eq!(secondary.answer(), "ok", "{kind}");
        secondary.tell("send 1 up");
        assert_eq!(primary.ask("receive"), "1 up", "{kind}");
    }
}

/// One side ends with messages queued in both directions, and comes back. The other side does nothing about it.
fn restarts_alone(side: &str) {
    for kind in KINDS {
        for end in ENDS {
            let dir = ipc_dir();
            let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
            let create = format!("create link {kind}");
            primary.tell(&create);
            secondary.tell("attach link secondary 0");
            for i in 0..5 {
                primary.tell(&format!("send {i} down{i}"));
                secondary.tell(&format!("send {i} up{i}"));
            }
            primary.tell("inline 5 down5");
            secondary.tell("data 6 4096");
            // Some are received before, so the ring is not at its start.
            assert_eq!(
                (primary.ask("receive"), secondary.ask("receive")),
                ("0 up0".into(), "0 down0".into())
            );

            let gone = if side == "primary" { &mut primary } else { &mut secondary };
            end(std::mem::replace(gone, Peer::start(dir.path())));
            gone.tell(if side == "primary" { &create } else { "attach link secondary 10000" });

            for i in 1..5 {
                assert_eq!(primary.ask("receive"), format!("{i} up{i}"), "{kind}");
                assert_eq!(secondary.ask("receive"), format!("{i} down{i}"), "{kind}");
            }
            assert_eq!(primary.ask("receive-data"), "6 4096 true", "{kind}");
            assert_eq!(secondary.ask("receive"), "5 down5", "{kind}");
            assert_eq!((primary.ask("receive"), secondary.ask("receive")), ("none".into(), "none".into()));
            // Both go on with the same ring and the same pools.
            for i in 0..40 {
                primary.tell(&format!("send {i} again"));
                secondary.tell(&format!("send {i} again"));
                assert_eq!(primary.ask("receive"), format!("{i} again"), "{kind}");
                assert_eq!(secondary.ask("receive"), format!("{i} again"), "{kind}");
            }
            assert_eq!(
                primary.ask("participants"),
                "2",
                "{kind}: the seat of the one that ended was given free"
            );
        }
    }
}

#[test]
fn primary_restarts_alone() {
    let _watchdog = Watchdog::start();
    restarts_alone("primary");
}

#[test]
fn secondary_restarts_alone() {
    let _watchdog = Watchdog::start();
    restarts_alone("secondary");
}

#[test]
fn buffers_of_the_dead_are_recovered() {
    let _watchdog = Watchdog::start();
    comes_back(Peer::start);
}

/// Each is process 1 in its own eyes, and sees no other; nor is there a sidecar.
#[test]
fn buffers_of_the_dead_are_recovered_across_pid_namespaces() {
    let _watchdog = Watchdog::start();
    if is_root() {
        comes_back(Peer::start_alone);
    }
}

fn comes_back(start: fn(&Path) -> Peer) {
    for kind in KINDS {
        let dir = ipc_dir();
        let (mut primary, mut secondary) = (start(dir.path()), start(dir.path()));
        primary.tell(&format!("create link {kind} msg=64x4 data=64x4"));
        secondary.tell("attach link secondary 0");
        primary.tell("data 1 64");
        secondary.tell("hold-message");
        for _ in 0..3 {
            secondary.tell("hold-loan");
        }
        assert!(primary.ask("data 2 64").starts_with("err Exhausted"), "{kind}: the secondary has all four");
        secondary.kill();
        let mut secondary = start(dir.path());
        secondary.tell("attach link secondary 10000");
        for _ in 0..4 {
            primary.tell("data 2 64");
        }
        for _ in 0..4 {
            assert_eq!(secondary.ask("receive-data"), "2 64 true", "{kind}");
        }
    }
}

#[test]
fn next_primary_adopts_files_of_killed_processes() {
    for kind in named(&KINDS) {
        let dir = ipc_dir();
        let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
        primary.tell(&format!("create link {kind}"));
        secondary.tell("attach link secondary 0");
        secondary.tell("send 7 kept");
        secondary.kill();
        primary.kill();
        let inode = std::fs::metadata(dir.path().join("link_shm")).expect("the file stays").ino();

        let mut primary = Peer::start(dir.path());
        primary.tell(&format!("create link {kind}"));
        assert_eq!(primary.ask("receive"), "7 kept", "{kind}");
        assert_eq!(std::fs::metadata(dir.path().join("link_shm")).expect("the file").ino(), inode, "{kind}");
    }
}

#[test]
fn secondary_adopts_files_of_killed_processes() {
    for kind in named(&KINDS) {
        let dir = ipc_dir();
        let mut primary = Peer::start(dir.path());
        primary.tell(&format!("create link {kind}"));
        primary.tell("send 1 kept");
        primary.kill();
        let mut secondary = Peer::start(dir.path());
        secondary.tell("attach link secondary 0");
        let mut primary = Peer::start(dir.path());
        primary.tell(&format!("create link {kind}"));
        assert_eq!(secondary.ask("receive"), "1 kept", "{kind}");
        secondary.tell("send 2 up");
        assert_eq!(primary.ask("receive"), "2 up", "{kind}");
    }
}

#[test]
fn last_participant_to_detach_removes_the_files() {
    for kind in named(&KINDS) {
        for primary_last in [false, true] {
            let dir = ipc_dir();
            let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
            primary.tell(&format!("create link {kind}"));
            secondary.tell("attach link secondary 0");
            let (first, last) = if primary_last { (secondary, primary) } else { (primary, secondary) };
            first.exit();
            assert!(files(dir.path()).contains(&"link_shm".to_owned()), "{kind}: one is still there");
            last.exit();
            assert_eq!(files(dir.path()), [""; 0], "{kind}");
        }
    }
}

#[test]
fn concurrent_detach_removes_the_files() {
    for kind in KINDS {
        for _ in 0..10 {
            let dir = ipc_dir();
            let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
            primary.tell(&format!("create link {kind}"));
            secondary.tell("attach link secondary 0");
            primary.order("close");
            secondary.order("close");
            assert_eq!((primary.answer(), secondary.answer()), ("ok".into(), "ok".into()));
            assert_eq!(files(dir.path()), [""; 0], "{kind}");
        }
    }
}

#[test]
fn queued_messages_keep_the_files() {
    for kind in named(&KINDS) {
        let dir = ipc_dir();
        let mut primary = Peer::start(dir.path());
        primary.tell(&format!("create link {kind}"));
        primary.tell("send 1 later");
        primary.exit();
        let mut secondary = Peer::start(dir.path());
        secondary.tell("attach link secondary 0");
        assert_eq!(secondary.ask("receive"), "1 later", "{kind}");
        secondary.exit();
        assert_eq!(files(dir.path()), [""; 0], "{kind}");
    }
}

#[test]
fn pools_without_a_link_are_replaced() {
    let dir = ipc_dir();
    {
        let peer = Peer::start(dir.path());
        let mut peer = peer;
        peer.tell("create link data=128x8");
        peer.kill();
    }
    // As a creator leaves them that dies before the last name.
    std::fs::remove_file(dir.path().join("link_shm")).unwrap();
    assert!(dir.path().join("link_cpu_data").exists());
    let options = LinkOptions::new().dir(dir.path());
    let link = options.create(&config("link", "data=4096x16")).unwrap();
    assert_eq!(link.pool(shmesh::config::PoolId::CpuData), Some((4096, 16)));
    options.attach("link", Side::Secondary).unwrap();
}

#[test]
fn memfd_link_lives_as_long_as_any_process() {
    for mode in ["mode=mpmc", "mode=spsc"] {
        let dir = ipc_dir();
        let create = format!("create link {mode} backing=memfd");
        let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
        primary.tell(&create);
        secondary.tell("attach link secondary 0");
        // Each generation finds what the one before left, though each time the host is killed.
        for generation in 0..4 {
            secondary.tell(&format!("send {generation} up"));
            primary.kill();
            primary = Peer::start(dir.path());
            primary.tell(&create);
            assert_eq!(primary.ask("receive"), format!("{generation} up"), "{mode}");
            primary.tell(&format!("send {generation} down"));
            secondary.kill();
            secondary = Peer::start(dir.path());
            secondary.tell("attach link secondary 10000");
            assert_eq!(secondary.ask("receive"), format!("{generation} down"), "{mode}");
        }
        secondary.kill();
        primary.kill();
        // The kernel has it now: a new one is empty.
        let mut primary = Peer::start(dir.path());
        primary.tell(&create);
        assert_eq!(primary.ask("receive"), "none");
    }
}

/// The peer that stays sleeps all the while: in `wait`, or in a `poll` of its own.
fn wakes_after_restart(side: &str, order: &str) {
    for kind in KINDS.iter().filter(|kind| !kind.contains("notify=off")) {
        for end in ENDS {
            let dir = ipc_dir();
            let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
            let create = format!("create link {kind}");
            primary.tell(&create);
            secondary.tell("attach link secondary 0");
            let (gone, sleeper) = if side == "primary" {
                (&mut primary, &mut secondary)
            } else {
                (&mut secondary, &mut primary)
            };
            sleeper.order(order);
            sleeper.until_asleep();
            end(std::mem::replace(gone, Peer::start(dir.path())));
            gone.tell(if side == "primary" { &create } else { "attach link secondary 10000" });
            let waits = order.starts_with("wait");
            if waits {
                assert_eq!(sleeper.answered(), None, "{kind}: asleep still");
            }
            gone.tell("send 1 wake");
            gone.tell("notify");
            assert_eq!(sleeper.answer(), "true", "{kind}");
            let mut received = sleeper.ask("receive");
            // A death wakes all that sleep. `wait` checks and sleeps on; a process that polls by itself checks, and polls again.
            while !waits && received == "none" {
                sleeper.order(order);
                assert_eq!(sleeper.answer(), "true", "{kind}");
                received = sleeper.ask("receive");
            }
            assert_eq!(received, "1 wake", "{kind}");
            // And the other way.
            gone.order("wait -1");
            gone.until_asleep();
            sleeper.tell("send 2 back");
            sleeper.tell("notify");
            assert_eq!(gone.answer(), "true", "{kind}");
        }
    }
}

#[test]
fn restarted_primary_wakes_a_sleeping_secondary() {
    let _watchdog = Watchdog::start();
    wakes_after_restart("primary", "wait -1");
}

#[test]
fn restarted_secondary_wakes_a_sleeping_primary() {
    let _watchdog = Watchdog::start();
    wakes_after_restart("secondary", "wait -1");
}

#[test]
fn restarted_primary_wakes_a_secondary_in_poll() {
    let _watchdog = Watchdog::start();
    wakes_after_restart("primary", "poll -1");
}

#[test]
fn restart_beside_a_stopped_peer_makes_no_second_link() {
    restart_while_the_other_side_is_stopped(&KINDS[2..3]);
}

/// A process that removes a link locks bytes 0 and 1 of its lock file, and is stopped there.
#[test]
fn process_that_is_stopped_while_it_removes_a_link_holds_up_no_creator() {
    let _watchdog = Watchdog::start();
    std::thread::scope(|scope| {
        for (kind, waits) in [(KINDS[0], false), (KINDS[1], true), (KINDS[2], false)] {
            scope.spawn(move || {
                let dir = ipc_dir();
                let mut peer = Peer::start(dir.path());
                peer.tell(&format!("create link {kind}"));
                if waits {
                    peer.tell("send 1 waits");
                }
                peer.kill();
                let lock = shmesh_sys::file::open(&dir.path().join("link.lock"), true).unwrap();
                until("the dead have no lock", || shmesh_sys::file::try_lock_range(&lock, &(0..2)).unwrap());
                let options = LinkOptions::new().dir(dir.path());
                let phy = options.create(&config("link", kind)).unwrap();
                assert_eq!(phy.was_created(), !waits, "{kind}");
                let mac = options.attach("link", Side::Secondary).unwrap();
                assert_eq!(mac.queued(), usize::from(waits), "{kind}");
                drop((phy, mac));
                if !waits {
                    assert_eq!(files(dir.path()), [""; 0], "{kind}");
                }
            });
        }
    });
}

#[test]
#[ignore = "long: two seconds of each kind of link"]
fn restart_beside_a_stopped_peer_makes_no_second_link_of_any_kind() {
    restart_while_the_other_side_is_stopped(&KINDS);
}

fn restart_while_the_other_side_is_stopped(kinds: &[&str]) {
    // The one that has the descriptors cannot hand them out just now, but it is alive: newcomers must wait for it, or
    // get an error, and must not create other segments.
    for kind in kinds.iter().filter(|kind| kind.contains("memfd")) {
        let dir = ipc_dir();
        let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
        let create = format!("create link {kind}");
        primary.tell(&create);
        secondary.tell("attach link secondary 0");
        primary.tell("send 1 before");
        secondary.stop();
        primary.kill();
        let mut primary = Peer::start(dir.path());
        let refused = primary.ask(&create);
        assert!(refused.starts_with("err Host link link: "), "{kind}: {refused}");
        assert!(refused.contains("stopped"), "{kind}: {refused}");

        primary.order(&create);
        secondary.go_on();
        assert_eq!(primary.answer(), "ok", "{kind}");
        assert_eq!(secondary.ask("receive"), "1 before", "{kind}");
        secondary.order("wait -1");
        secondary.until_asleep();
        primary.tell("send 2 after");
        primary.tell("notify");
        assert_eq!(secondary.answer(), "true", "{kind}");
    }
}

/// Users that share nothing but a group, in directories where one cannot remove the files of another.
const DIR_MODES: [u32; 3] = [0o1777, 0o3770, 0o2770];

fn dir_of_users(mode: u32) -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let dir = ipc_dir();
    std::os::unix::fs::chown(dir.path(), None, Some(60_001)).unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    dir
}

fn user(dir: &Path, uid: u32) -> Peer {
    let mut peer = Peer::start(dir);
    peer.tell(&format!("prepare user {uid} 60001"));
    peer
}

#[test]
fn killed_primary_restarts_as_any_user() {
    // Every kind in the directory of a pool, and one in the others.
    restart_as_any_user(|mode, kind| mode == DIR_MODES[0] || kind == KINDS[0]);
}

#[test]
#[ignore = "long: every kind in every directory"]
fn killed_primary_restarts_as_any_user_in_every_directory() {
    restart_as_any_user(|_, _| true);
}

fn restart_as_any_user(is_wanted: impl Fn(u32, &str) -> bool) {
    if !is_root() {
        eprintln!("skipped: this takes root, to be several users");
        return;
    }
    let _watchdog = Watchdog::start();
    for mode in DIR_MODES {
        for kind in KINDS.into_iter().filter(|kind| is_wanted(mode, kind)) {
            for stopped in [false, true] {
                if stopped && kind.contains("memfd") {
                    // It alone has the memory: see restart_beside_a_stopped_peer_makes_no_second_link.
                    continue;
                }
                let dir = dir_of_users(mode);
                let create = format!("create link {kind} file_mode=660");
                let (mut primary, mut secondary) = (user(dir.path(), 10_001), user(dir.path(), 20_002));
                primary.tell(&create);
                secondary.tell("attach link secondary 0");
                secondary.tell("send 1 before");
                if !kind.contains("notify=off") {
                    // So that there is a bell of the dead in the way of the next one.
                    primary.tell("arm");
                }
                if stopped {
                    secondary.stop();
                }
                primary.kill();
                let mut primary = user(dir.path(), 10_001);
                primary.tell(&create);
                assert_eq!(primary.ask("receive"), "1 before", "{mode:o} {kind}");
                primary.tell("send 2 after");
                if stopped {
                    secondary.go_on();
                }
                assert_eq!(secondary.ask("receive"), "2 after", "{mode:o} {kind}");
                // And then as yet another user.
                primary.kill();
                let mut primary = user(dir.path(), 30_003);
                primary.tell(&create);
                if !kind.contains("notify=off") {
                    primary.tell("arm");
                    secondary.tell("notify");
                }
                secondary.tell("send 3 again");
                assert_eq!(primary.ask("receive"), "3 again", "{mode:o} {kind}");
            }
        }
    }
}

/// The socket that a dead process of another user has left cannot be unlinked.
#[test]
fn stale_socket_of_another_user_does_not_block_a_host() {
    if !is_root() {
        eprintln!("skipped: this takes root, to be several users");
        return;
    }
    let _watchdog = Watchdog::start();
    for mode in DIR_MODES {
        let dir = dir_of_users(mode);
        let create = "create link backing=memfd file_mode=660";
        for uid in [10_001, 20_002, 30_003, 10_001] {
            let (mut primary, mut secondary) = (user(dir.path(), uid), user(dir.path(), 40_004));
            primary.tell(create);
            secondary.tell("attach link secondary 0");
            primary.tell("send 1 here");
            assert_eq!(secondary.ask("receive"), "1 here", "{mode:o} {uid}");
            // Neither removes its socket.
            secondary.kill();
            primary.kill();
        }
        let sockets = files(dir.path()).into_iter().filter(|name| name.contains(".broker")).count();
        assert_eq!(sockets, 3, "{mode:o}: one of each user");
    }
}

#[test]
fn all_processes_of_a_side_are_killed_at_once() {
    if !is_root() {
        eprintln!("skipped: this takes root, to be several users");
        return;
    }
    let _watchdog = Watchdog::start();
    for kind in KINDS.iter().filter(|kind| kind.contains("mpmc")) {
        let dir = dir_of_users(0o3770);
        let create = format!("create link {kind} file_mode=660 msg=64x8");
        let mut primary = user(dir.path(), 10_001);
        primary.tell(&create);
        let mut side: Vec<_> = (0..4).map(|i| user(dir.path(), 20_000 + i)).collect();
        for (i, peer) in side.iter_mut().enumerate() {
            peer.tell("attach link secondary 0");
            peer.tell(&format!("send {i} x"));
            peer.tell("hold-loan");
        }
        side.drain(..).for_each(Peer::kill);
        let mut newcomer = user(dir.path(), 40_004);
        newcomer.tell("attach link secondary 0");
        for i in 0..4 {
            assert_eq!(primary.ask("receive"), format!("{i} x"), "{kind}");
        }
        // All that they held is back.
        for i in 0..8 {
            newcomer.tell(&format!("send {i} y"));
        }
        assert_eq!(primary.ask("receive"), "0 y", "{kind}");
    }
}

/// Of those who have the memory of a link, one that is awake is enough.
#[test]
fn any_participant_can_replace_a_killed_host() {
    if !is_root() {
        eprintln!("skipped: this takes root, to be several users");
        return;
    }
    let _watchdog = Watchdog::start();
    let replace = |mode: u32| {
        let dir = dir_of_users(mode);
        let create = "create link backing=memfd file_mode=660";
        let mut primary = user(dir.path(), 10_001);
        primary.tell(create);
        let mut others: Vec<_> = (0..4).map(|i| user(dir.path(), 20_000 + i)).collect();
        for (i, other) in others.iter_mut().enumerate() {
            other.tell("attach link secondary 0");
            other.tell(&format!("send {i} x"));
        }
        // Stopped, dead at the same moment as the host, and one that is neither.
        others[0].stop();
        others[1].stop();
        primary.kill();
        others.remove(2).kill();
        let refused = Peer::start(dir.path()).ask("attach link secondary 0");
        assert!(
            refused.contains("err Host") && refused.contains("create the link again"),
            "{mode:o}: {refused}"
        );
        let mut primary = user(dir.path(), 30_003);
        primary.tell(create);
        for i in 0..4 {
            assert_eq!(primary.ask("receive"), format!("{i} x"), "{mode:o}");
        }
        let mut newcomer = user(dir.path(), 40_004);
        newcomer.tell("attach link secondary 0");
        newcomer.tell("send 7 hello");
        assert_eq!(primary.ask("receive"), "7 hello", "{mode:o}");
        others[0].go_on();
        others[0].tell("send 8 still");
        assert_eq!(primary.ask("receive"), "8 still", "{mode:o}");
    };
    // Each mode waits for two seconds.
    std::thread::scope(|scope| {
        for mode in DIR_MODES {
            scope.spawn(move || replace(mode));
        }
    });
}

#[test]
fn bells_ring_between_users_of_a_common_group() {
    if !is_root() {
        eprintln!("skipped: this takes root, to be several users");
        return;
    }
    let _watchdog = Watchdog::start();
    for mode in [0o1777, 0o3770] {
        let dir = dir_of_users(mode);
        let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
        primary.tell("prepare user 10001 60001");
        // Its own group is another one, so that its files would be, too.
        secondary.tell("prepare user 20002 20002 60001");
        primary.tell("create link file_mode=660");
        secondary.tell("attach link secondary 0");
        for (from, to) in [(0, 1), (1, 0)] {
            let peers = [&mut primary, &mut secondary];
            peers[to].tell("arm");
            peers[from].tell("send 1 x");
            peers[from].tell("notify");
            assert_eq!(peers[to].ask("poll -1"), "true", "{mode:o}");
        }
    }
}

#[test]
fn removing_a_link_removes_the_bells_of_the_dead() {
    let dir = ipc_dir();
    let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
    primary.tell("create link");
    secondary.tell("attach link secondary 0");
    primary.tell("arm");
    secondary.tell("arm");
    let bells = || files(dir.path()).into_iter().filter(|name| name.starts_with("link.bell-")).count();
    assert_eq!(bells(), 2);
    // Both at once, as far as each other knows.
    primary.stop();
    secondary.kill();
    primary.kill();
    assert!(bells() > 0);
    let remains = shmesh::inspect::Remains::of(dir.path(), &"link".parse().unwrap()).unwrap();
    remains.remove().unwrap();
    assert_eq!(files(dir.path()), [""; 0]);
}

#[test]
fn monitor_notices_a_death() {
    for kind in KINDS {
        let dir = ipc_dir();
        let primary = LinkOptions::new().dir(dir.path()).create(&config("link", kind)).unwrap();
        let mut secondary = Peer::start(dir.path());
        secondary.tell("attach link secondary 0");
        secondary.tell("hold-loan");
        secondary.kill();
        until("the dead participant's seat is free", || primary.participants().count() == 1);
    }
}

#[test]
fn concurrent_primaries_create_one_link() {
    race_of_primaries(1);
}

#[test]
#[ignore = "long: 20 races of each kind"]
fn concurrent_primaries_create_one_link_in_every_race() {
    race_of_primaries(20);
}

fn race_of_primaries(races: u32) {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        for _ in 0..races {
            let dir = ipc_dir();
            let mut racers: Vec<_> = (0..4).map(|_| Peer::start(dir.path())).collect();
            for racer in &mut racers {
                racer.order(&format!("create link {kind}"));
            }
            let answers: Vec<_> = racers.iter().map(Peer::answer).collect();
            let won = answers.iter().position(|answer| answer == "ok").expect("one of them is the primary");
            for (i, answer) in answers.iter().enumerate().filter(|&(i, _)| i != won) {
                assert!(answer.starts_with("err AlreadyOwned"), "{kind}: racer {i}: {answer}");
            }
            let mut secondary = Peer::start(dir.path());
            secondary.tell("attach link secondary 10000");
            secondary.tell("send 1 hello");
            assert_eq!(racers[won].ask("receive"), "1 hello", "{kind}");
        }
    }
}

#[test]
fn failing_creators_neither_disturb_others_nor_leave_anything() {
    beside_failing_creators(10);
}

#[test]
#[ignore = "long: 1,000 links of each kind"]
fn failing_creators_never_disturb_others() {
    beside_failing_creators(1000);
}

fn beside_failing_creators(links: u32) {
    let _watchdog = Watchdog::start();
    for kind in KINDS.into_iter().chain(["cuda=64x4", "backing=memfd cuda=64x4"]) {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let exchange = || -> shmesh::Result<()> {
            let phy = options.create(&config("link", kind))?;
            let mac = options.attach("link", Side::Secondary)?;
            send(&mac, 1, "hello")?;
            assert_eq!(receive(&phy)?, Some((1, "hello".to_owned())), "{kind}");
            Ok(())
        };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    // More than any file system has.
                    let config = config("link", "data=16777216x65000");
                    while !is_over.load(Ordering::Relaxed) {
                        refused(options.create(&config));
                    }
                });
            }
            let exchanged = (0..links).try_for_each(|_| exchange());
            is_over.store(true, Ordering::Relaxed);
            exchanged.unwrap_or_else(|error| panic!("{kind}: {error}"));
        });
        assert_eq!(files(dir.path()), [""; 0], "{kind}");
    }
}

/// A process that detaches leaves the link to a creator that is just opening it, and gives up because of another shape.
#[test]
fn creator_that_gives_up_beside_the_last_process_removes_the_link() {
    let _watchdog = Watchdog::start();
    // Mapping these takes so long that the other process often detaches meanwhile.
    for kind in ["data=65536x512", "data=65536x512 cuda=64x4"] {
        let dir = ipc_dir();
        let (mut last, mut creator) = (Peer::start(dir.path()), Peer::start(dir.path()));
        for round in 0..40 {
            last.tell(&format!("create link {kind}"));
            creator.order(&format!("create link ring=64 {kind}"));
            std::thread::sleep(Duration::from_micros(round * 200));
            last.tell("close");
            if creator.answer() == "ok" {
                creator.tell("close");
            }
            assert_eq!(files(dir.path()), [""; 0], "{kind}, round {round}");
        }
    }
}

#[test]
fn link_is_removed_although_another_process_looks_at_its_files() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let mut peer = Peer::start(dir.path());
    for round in 0..100 {
        peer.tell("create link");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    drop(shmesh::inspect::Remains::of(dir.path(), &"link".parse().unwrap()));
                }
            });
            peer.tell("close");
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(files(dir.path()), [""; 0], "round {round}");
    }
}

/// A creator that is stopped at any moment blocks no other process, and later finds their link.
#[test]
fn creator_that_is_stopped_does_not_block_others() {
    stop_while_creating(3..5);
}

#[test]
#[ignore = "long: a second for each moment"]
fn creator_that_is_stopped_at_any_moment_does_not_block_others() {
    stop_while_creating(0..24);
}

fn stop_while_creating(rounds: std::ops::Range<u64>) {
    let _watchdog = Watchdog::start();
    for round in rounds {
        let dir = ipc_dir();
        let (mut first, mut second, mut third) =
            (Peer::start(dir.path()), Peer::start(dir.path()), Peer::start(dir.path()));
        first.order("create link msg=4096x1024");
        std::thread::sleep(Duration::from_micros(round * 150));
        first.stop();
        let created = second.ask("create link msg=4096x1024");
        // It may have come that far.
        assert!(created == "ok" || created.starts_with("err AlreadyOwned"), "round {round}: {created}");
        third.tell("attach link secondary 0");
        third.tell("send 1 x");
        first.go_on();
        let answer = first.answer();
        let (winner, loser) = if created == "ok" { (&mut second, answer) } else { (&mut first, created) };
        assert!(loser.starts_with("err AlreadyOwned"), "round {round}: {loser}");
        assert_eq!(winner.ask("receive"), "1 x", "round {round}");
        winner.tell("close");
        third.tell("close");
        assert_eq!(files(dir.path()), [""; 0], "round {round}");
    }
}

#[test]
fn concurrent_spsc_secondaries_are_not_both_admitted() {
    for _ in 0..10 {
        let dir = ipc_dir();
        let mut primary = Peer::start(dir.path());
        primary.tell("create link mode=spsc");
        let mut racers: Vec<_> = (0..3).map(|_| Peer::start(dir.path())).collect();
        for racer in &mut racers {
            racer.order("attach link secondary 0");
        }
        let answers: Vec<_> = racers.iter().map(Peer::answer).collect();
        assert!(answers.iter().filter(|answer| *answer == "ok").count() <= 1, "{answers:?}");
        assert!(
            answers.iter().all(|answer| answer == "ok" || answer.starts_with("err AlreadyOwned")),
            "{answers:?}"
        );
        // Refused processes do not block later ones.
        drop(racers);
        Peer::start(dir.path()).tell("attach link secondary 10000");
    }
}

#[test]
fn many_participants_attach_at_once() {
    let _watchdog = Watchdog::start();
    for backing in ["backing=named", "backing=memfd"] {
        let dir = ipc_dir();
        let mut primary = Peer::start(dir.path());
        let mut many: Vec<_> = (0..12).map(|_| Peer::start(dir.path())).collect();
        for one in &mut many {
            one.order("attach link secondary 100000");
        }
        primary.tell(&format!("create link mode=mpmc ring=64 {backing}"));
        for one in &many {
            assert_eq!(one.answer(), "ok", "{backing}");
        }
        assert_eq!(primary.ask("participants"), "13", "{backing}");
        for (i, one) in many.iter_mut().enumerate() {
            one.tell(&format!("send {i} here"));
        }
        let mut heard: Vec<_> = many.iter().map(|_| primary.ask("receive")).collect();
        heard.sort();
        let mut expected: Vec<_> = (0..many.len()).map(|i| format!("{i} here")).collect();
        expected.sort();
        assert_eq!(heard, expected, "{backing}");
        // All of them die at once, and the next finds every seat free.
        for one in many {
            one.kill();
        }
        Peer::start(dir.path()).tell("attach link secondary 10000");
        until("the seats of the dead are free", || {
            primary.ask("participants") == "2" || primary.ask("participants") == "1"
        });
    }
}

#[test]
fn attaching_and_detaching_never_strands_a_participant() {
    attach_while_the_other_side_detaches(20);
}

#[test]
#[ignore = "long: 300 rounds of each kind"]
fn attaching_and_detaching_never_strands_a_participant_in_hundreds_of_rounds() {
    attach_while_the_other_side_detaches(300);
}

fn attach_while_the_other_side_detaches(rounds: u32) {
    // One side leaves for good, as the last it thinks, while the other comes. Whatever happens first: the one that came
    // must be on the link that the next one finds.
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let (mut primary, mut secondary) = (Peer::start(dir.path()), Peer::start(dir.path()));
        let create = format!("create link {kind}");
        for round in 0..rounds {
            primary.tell(&create);
            primary.order("close");
            secondary.order("attach link secondary 0");
            primary.answer();
            let attached = secondary.answer();
            if attached == "ok" {
                secondary.tell("send 1 there");
                primary.tell(&create);
                assert_eq!(
                    primary.ask("receive"),
                    "1 there",
                    "{kind}, round {round}: there are two links of one name"
                );
                primary.tell("close");
                secondary.tell("close");
            } else {
                assert!(attached.starts_with("err NotFound"), "{kind}: {attached}");
            }
        }
    }
}

#[test]
fn every_host_admits_the_same_users_as_the_creator() {
    // The creator's umask and the defaults of attaching processes must not decide it.
    if !is_root() {
        return;
    }
    for kind in ["backing=named", "backing=memfd"] {
        let dir = ipc_dir();
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o770)).unwrap();
        nix::unistd::chown(dir.path(), None, Some(nix::unistd::Gid::from_raw(65534))).unwrap();
        let started = |uid: u32| {
            let mut peer = Peer::start(dir.path());
            peer.tell(&format!("prepare user {uid} 65534"));
            peer.tell("prepare umask 077");
            peer
        };
        let create = format!("create link file_mode=660 {kind}");
        let (mut primary, mut secondary) = (started(65533), started(65534));
        primary.tell(&create);
        secondary.tell("attach link secondary 0");
        primary.tell("send 1 before");
        primary.kill();
        let mut primary = started(65532);
        primary.tell(&create);
        primary.tell("send 2 after");
        assert_eq!(
            (secondary.ask("receive"), secondary.ask("receive")),
            ("1 before".into(), "2 after".into()),
            "{kind}"
        );
        // A third user finds the link of a second that adopted it from the first.
        secondary.kill();
        let mut secondary = started(65531);
        secondary.tell("attach link secondary 10000");
        secondary.tell("send 3 up");
        assert_eq!(primary.ask("receive"), "3 up", "{kind}");
    }
}

/// Leaves the remains of an earlier run: messages, posts, and buffers that killed processes of both sides held.
fn leave_a_run_behind(dir: &Path, kind: &str) {
    let (mut primary, mut secondary) = (Peer::start(dir), Peer::start(dir));
    primary.tell(&format!("create link {kind}"));
    secondary.tell("attach link secondary 0");
    for i in 0..5 {
        primary.tell(&format!("send {i} down{i}"));
        secondary.tell(&format!("send {i} up{i}"));
    }
    secondary.tell("inline 5 up5");
    primary.tell("data 6 4096");
    if !kind.contains("notify=off") {
        primary.tell("post");
        secondary.tell("post");
    }
    primary.tell("hold-message");
    primary.kill();
    secondary.kill();
}

#[test]
fn fresh_link_starts_empty() {
    for kind in named(&KINDS) {
        let (dir, config) = (ipc_dir(), config("link", kind));
        let options = LinkOptions::new().dir(dir.path());
        leave_a_run_behind(dir.path(), kind);

        // As it was, unless it shall be fresh.
        let phy = options.create(&config).unwrap();
        assert!(!phy.was_created() && phy.queued() > 0, "{kind}");
        // The last handle removes the link.
        drop(phy);
        leave_a_run_behind(dir.path(), kind);
        let phy = options.clone().fresh(true).create(&config).unwrap();
        assert!(!phy.was_created(), "{kind}");
        let mac = options.attach("link", Side::Secondary).unwrap();
        let none = Some(Duration::ZERO);
        for link in [&phy, &mac] {
            assert_eq!((link.queued(), link.has_message()), (0, false), "{kind}");
            if config.notify {
                assert!(!link.wait_tti(none).unwrap(), "{kind}: a post of the earlier run");
            }
        }
        // All buffers are there, and the rings take as many messages as ever, in both directions.
        let data = config.pools[1].pool_len;
        let loans: Vec<_> =
            (0..data).map(|_| phy.loan_with(shmesh::config::PoolId::CpuData).unwrap()).collect();
        drop(loans);
        for (from, to) in [(&phy, &mac), (&mac, &phy)] {
            for i in 0..16 {
                send(from, i, "new").unwrap();
            }
            for i in 0..16 {
                assert_eq!(receive(to).unwrap(), Some((i, "new".to_owned())), "{kind}");
            }
        }
        if config.notify {
            mac.post().unwrap();
            assert!(phy.wait_tti(none).unwrap() && !phy.wait_tti(none).unwrap(), "{kind}");
        }
        drop((phy, mac));
        assert!(options.fresh(true).create(&config).unwrap().was_created(), "{kind}");
    }
}

#[test]
fn fresh_is_refused_while_a_participant_is_attached() {
    for kind in [KINDS[0], KINDS[3]] {
        let (dir, config) = (ipc_dir(), config("link", kind));
        let options = LinkOptions::new().dir(dir.path());
        let fresh = options.clone().fresh(true);
        let phy = fresh.create(&config).unwrap();
        assert!(phy.was_created(), "{kind}");
        let mut mac = Peer::start(dir.path());
        mac.tell("attach link secondary 0");
        mac.tell("send 1 waits");
        drop(phy);
        let refused = fresh.create(&config).unwrap_err().to_string();
        for word in ["link link", "fresh", "secondary", &mac.pid().to_string()] {
            assert!(refused.contains(word), "{kind}: {refused}");
        }
        let phy = options.create(&config).unwrap();
        assert_eq!(receive(&phy).unwrap(), Some((1, "waits".to_owned())), "{kind}");
        // A handle of this process counts, too.
        mac.kill();
        until("the death is seen", || phy.recover().is_ok() && phy.participants().count() == 1);
        let refused = fresh.create(&config).unwrap_err();
        assert!(matches!(refused.kind(), shmesh::ErrorKind::InUse { pid, .. } if *pid == std::process::id()));
    }
}

#[test]
fn fresh_empties_a_kept_link() {
    // A host of the other kinds is stopped in this test.
    for kind in named(&KINDS) {
        let (dir, config) = (ipc_dir(), config("link", kind));
        let options = LinkOptions::new().dir(dir.path());
        let host = options.keep(&config).unwrap();
        leave_a_run_behind(dir.path(), kind);
        let phy = options.fresh(true).create(&config).unwrap();
        assert_eq!((phy.was_created(), phy.queued()), (false, 0), "{kind}");
        drop(host);
    }
}

#[test]
fn newcomers_wait_while_a_link_is_emptied() {
    let _watchdog = Watchdog::start();
    let (dir, config) = (ipc_dir(), config("link", "mode=mpmc"));
    let options = LinkOptions::new().dir(dir.path());
    leave_a_run_behind(dir.path(), "mode=mpmc");
    let start = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let mac = scope.spawn(|| {
            start.wait();
            options.attach("link", Side::Secondary).unwrap()
        });
        start.wait();
        // Whichever comes first: either the link is empty, or this is refused.
        let phy = options.clone().fresh(true).create(&config);
        let mac = mac.join().unwrap();
        match phy {
            Ok(phy) => assert_eq!(phy.queued(), 0),
            Err(error) => assert!(matches!(error.kind(), shmesh::ErrorKind::InUse { .. }), "{error}"),
        }
        drop(mac);
    });
}

#[test]
fn second_receiver_is_refused_until_the_first_ends() {
    for kind in ["mode=mpmc receivers=one", "mode=spsc receivers=one", "mode=mpmc receivers=one notify=off"] {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let (mut primary, mut first) = (Peer::start(dir.path()), Peer::start(dir.path()));
        primary.tell(&format!("create link {kind}"));
        first.tell("attach link secondary 0");
        for end in ENDS {
            let mut second = Peer::start(dir.path());
            let refused = second.ask("attach link secondary 0");
            assert!(refused.starts_with("err "), "{kind}: {refused}");
            for word in ["link link", "secondary", &format!("process {}", first.pid())] {
                assert!(refused.contains(word), "{kind}: {refused}");
            }
            assert_eq!(refused.contains("`receivers: one`"), kind.contains("mpmc"), "{kind}: {refused}");
            // Other handles of the process that has the side are part of it.
            first.tell("clone");
            end(std::mem::replace(&mut first, second));
            first.tell("attach link secondary 0");
            primary.tell("send 1 for-this-one");
            assert_eq!(first.ask("receive"), "1 for-this-one", "{kind}");
        }
        // The primary side has one receiver, too, even with several processes on it.
        let refused =
            options.clone().allow_second_primary(true).attach("link", Side::Primary).unwrap_err().to_string();
        assert!(refused.contains(&format!("process {}", primary.pid())), "{kind}: {refused}");
        first.tell("close");
        primary.kill();
        let phy = options.create(&config("link", kind)).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        let second = options.attach("link", Side::Secondary).unwrap();
        drop((phy, mac, second));
    }
}

#[test]
fn link_with_one_receiver_differs_from_one_with_many() {
    let dir = ipc_dir();
    let options = LinkOptions::new().dir(dir.path());
    let _link = options.create(&config("link", "receivers=one")).unwrap();
    let error = options.create(&config("link", "")).unwrap_err().to_string();
    assert!(error.contains("receivers one, but many was requested"), "{error}");
}

#[test]
fn one_of_two_concurrent_receivers_is_admitted() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let mut primary = Peer::start(dir.path());
    primary.tell("create link receivers=one");
    let mut peers = [Peer::start(dir.path()), Peer::start(dir.path())];
    for _ in 0..50 {
        peers.iter_mut().for_each(|peer| peer.order("attach link secondary 0"));
        let answers = [peers[0].answer(), peers[1].answer()];
        assert_eq!(answers.iter().filter(|answer| *answer == "ok").count(), 1, "{answers:?}");
        for (peer, answer) in peers.iter_mut().zip(answers) {
            if answer == "ok" {
                peer.tell("close");
            } else {
                assert!(answer.starts_with("err ReceiverTaken"), "{answer}");
            }
        }
    }
}

#[test]
fn newcomers_are_not_refused_while_a_kept_link_is_emptied() {
    attach_while_a_kept_link_is_emptied((0..40).step_by(8));
}

#[test]
#[ignore = "long: 40 moments of each kind"]
fn newcomers_are_not_refused_at_any_moment_while_a_kept_link_is_emptied() {
    attach_while_a_kept_link_is_emptied(0..40);
}

fn attach_while_a_kept_link_is_emptied(moments: impl Iterator<Item = u64> + Clone) {
    let _watchdog = Watchdog::start();
    for kind in ["mode=spsc", "mode=mpmc"] {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let mut mac = Peer::start(dir.path());
        let mut config = config("link", kind);
        (config.ring_len, config.pools[0].pool_len) = (4096, 4200);
        let keeper = options.keep(&config).unwrap();
        for moment in moments.clone() {
            let phy = options.create(&config).unwrap();
            while phy.send_inline(1, 0, b"old").is_ok() {}
            drop(phy);
            let (phy, first) = std::thread::scope(|scope| {
                let phy = scope.spawn(|| options.clone().fresh(true).create(&config));
                std::thread::sleep(Duration::from_micros(100 * moment));
                mac.tell("attach link secondary 10000");
                let first = mac.ask("receive");
                (phy.join().unwrap(), first)
            });
            match phy {
                Ok(_) => assert_eq!(first, "none", "{kind}: the link was emptied under a newcomer"),
                Err(error) => assert!(matches!(error.kind(), shmesh::ErrorKind::InUse { .. }), "{error}"),
            }
            mac.tell("close");
        }
        drop(keeper);
    }
}

#[test]
fn evicted_participant_frees_its_place_while_its_process_lives() {
    let (dir, config) = (ipc_dir(), config("link", "receivers=one"));
    let options = LinkOptions::new().dir(dir.path());
    let phy = options.create(&config).unwrap();
    let (mut hung, mut second) = (Peer::start(dir.path()), Peer::start(dir.path()));
    hung.tell("attach link secondary 0");
    phy.evict(phy.participants().find(|other| other.word.side() == Side::Secondary).unwrap().seat).unwrap();
    second.tell("attach link secondary 0");
    second.tell("close");
    drop(phy);
    assert!(options.fresh(true).create(&config).is_ok());
    assert!(hung.ask("receive").starts_with("err Evicted"));
}
