//! Peer events: a participant learns that others attach, detach and die, in whatever way it waits.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use shmesh::{Link, LinkOptions, Participant, PeerEvent, Side};
use shmesh_testing::{HANGS, Peer, Watchdog, config, ipc_dir, is_root, send, until};

const KINDS: [&str; 3] = ["mode=mpmc", "mode=spsc", "mode=mpmc backing=memfd"];

fn created(dir: &Path, changes: &str) -> Link {
    LinkOptions::new().dir(dir).create(&config("link", changes)).unwrap()
}

/// Kind and pid of an event.
fn words(event: PeerEvent) -> (&'static str, u32) {
    let (what, peer) = match event {
        PeerEvent::Attached(peer) => ("attached", peer),
        PeerEvent::Detached(peer) => ("detached", peer),
        PeerEvent::Died(peer) => ("died", peer),
        PeerEvent::Evicted(peer) => ("evicted", peer),
        event => panic!("unexpected: {event:?}"),
    };
    (what, peer.word.pid())
}

/// Peers attach and detach, attach and are killed, while events are taken with `next`.
fn peers_come_and_go(dir: &Path, link: &Link, next: impl Fn(&Link) -> PeerEvent) {
    assert_eq!(link.next_event(), None);
    for round in 0..3 {
        let mut peer = Peer::start(dir);
        let pid = peer.pid();
        peer.tell("attach link secondary 0");
        assert_eq!(words(next(link)), ("attached", pid), "{round}");
        peer.tell("close");
        assert_eq!(words(next(link)), ("detached", pid), "{round}");
        peer.tell("attach link secondary 0");
        assert_eq!(words(next(link)), ("attached", pid), "{round}");
        peer.kill();
        assert_eq!(words(next(link)), ("died", pid), "{round}");
        assert_eq!(link.next_event(), None, "{round}");
    }
}

#[test]
fn waiting_thread_gets_peer_events() {
    let _watchdog = Watchdog::start();
    for kind in KINDS.into_iter().chain(["notify=off"]) {
        let dir = ipc_dir();
        let link = created(dir.path(), kind);
        peers_come_and_go(dir.path(), &link, |link| {
            assert!(link.wait_event(None).unwrap(), "{kind}");
            link.next_event().expect("an event")
        });
    }
}

#[test]
fn wait_for_messages_and_events_says_which() {
    let _watchdog = Watchdog::start();
    for kind in KINDS.into_iter().chain(["notify=off"]) {
        let dir = ipc_dir();
        let link = created(dir.path(), kind);
        let none = link.wait_any(Some(Duration::from_millis(1))).unwrap();
        assert!(!none.message && !none.event, "{kind}");
        peers_come_and_go(dir.path(), &link, |link| {
            let ready = link.wait_any(None).unwrap();
            assert!(ready.event && !ready.message, "{kind}");
            link.next_event().expect("an event")
        });
        let mut peer = Peer::start(dir.path());
        peer.tell("attach link secondary 0");
        peer.tell("send 7 last");
        peer.exit();
        until("the peer has gone", || link.participants().count() == 1);
        let ready = link.wait_any(None).unwrap();
        assert!(ready.event && ready.message, "{kind}");
        assert_eq!(link.receive().unwrap().map(|message| message.msg_id()), Some(7));
        assert!(!link.wait_any(None).unwrap().message, "{kind}: an event is pending until it is taken");
        while link.next_event().is_some() {}
        assert_eq!(link.wait_any(Some(Duration::ZERO)).unwrap(), none, "{kind}");
    }
}

fn in_epoll(fd: BorrowedFd<'_>) -> Epoll {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0)).unwrap();
    epoll
}

#[test]
fn epoll_user_gets_peer_events() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let link = created(dir.path(), kind);
        let epoll = in_epoll(link.fd().unwrap());
        peers_come_and_go(dir.path(), &link, |link| {
            loop {
                // As the documentation says: sleep, take the signals, then look.
                if let Some(event) = link.next_event() {
                    return event;
                }
                let mut events = [EpollEvent::empty()];
                let limit = EpollTimeout::try_from(HANGS).unwrap();
                assert_eq!(epoll.wait(&mut events, limit).unwrap(), 1, "{kind}: nothing rang");
                while link.take_signal().unwrap().is_some() {}
            }
        });
    }
}

#[test]
fn descriptor_is_quiet_when_signals_were_taken_though_an_event_waits() {
    let dir = ipc_dir();
    let link = created(dir.path(), "");
    let epoll = in_epoll(link.fd().unwrap());
    let other = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
    let is_readable = || epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::ZERO).unwrap() > 0;
    assert!(is_readable());
    // The monitor rings as well if it looks between the change and the wake-up.
    until("its signals are taken", || {
        while link.take_signal().unwrap().is_some() {}
        !is_readable()
    });
    assert!(link.has_event());
    assert!(matches!(link.next_event(), Some(PeerEvent::Attached(_))));
    drop(other);
    assert!(is_readable());
}

/// The peer sleeps without a limit, and uses no processor time though it has an event that it did not take.
#[test]
fn wait_for_messages_is_not_ended_by_events_and_does_not_spin() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let mut sleeper = Peer::start(dir.path());
    sleeper.tell("create link");
    sleeper.order("wait -1");
    sleeper.until_asleep();
    let other = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
    let _clone = other.try_clone().unwrap();
    idles(&sleeper);
    send(&other, 1, "x").unwrap();
    other.notify().unwrap();
    assert_eq!(sleeper.answer(), "true");
    assert_eq!(sleeper.ask("event 0"), "attached secondary 1");
    assert_eq!(sleeper.ask("event 0"), "attached secondary 2");
    sleeper.order("event -1");
    sleeper.until_asleep();
    idles(&sleeper);
    drop(other);
    assert_eq!(sleeper.answer(), "detached secondary 1");
}

/// One that spins uses a tick in a hundredth of a second.
fn idles(peer: &Peer) {
    peer.until_asleep();
    let before = peer.ticks();
    std::thread::sleep(Duration::from_millis(500));
    let used = peer.ticks() - before;
    assert!(used <= 5, "it used {used} ticks of 50");
    assert_eq!(peer.answered(), None);
}

#[test]
fn simultaneous_deaths_are_each_reported_once() {
    let _watchdog = Watchdog::start();
    for kind in ["", "backing=memfd"] {
        let dir = ipc_dir();
        let link = created(dir.path(), kind);
        let mut peers: Vec<_> = (0..4).map(|_| Peer::start(dir.path())).collect();
        let pids = |peers: &[Peer]| {
            let mut pids: Vec<_> = peers.iter().map(Peer::pid).collect();
            pids.sort_unstable();
            pids
        };
        for peer in &mut peers {
            peer.tell("attach link secondary 0");
        }
        let all = pids(&peers);
        let hear = |wanted: &str| {
            let mut heard: Vec<_> = (0..all.len())
                .map(|_| {
                    assert!(link.wait_event(Some(HANGS)).unwrap(), "{kind}");
                    let (what, pid) = words(link.next_event().expect("an event"));
                    assert_eq!(what, wanted, "{kind}");
                    pid
                })
                .collect();
            heard.sort_unstable();
            heard
        };
        assert_eq!(hear("attached"), all, "{kind}");
        for peer in &peers {
            peer.signal(nix::sys::signal::Signal::SIGKILL);
        }
        peers.clear();
        assert_eq!(hear("died"), all, "{kind}");
        until("the dead are recovered", || link.participants().count() == 1);
        assert_eq!(link.next_event(), None, "{kind}: nothing twice");
    }
}

#[test]
fn peers_killed_while_they_attach_and_detach_leave_nothing_unreported() {
    kill_while_they_churn(10);
}

#[test]
#[ignore = "long: 500 kills"]
fn peers_killed_while_they_attach_and_detach_leave_nothing_unreported_in_hundreds_of_kills() {
    kill_while_they_churn(500);
}

fn kill_while_they_churn(kills: u64) {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let link = created(dir.path(), "");
    let epoll = in_epoll(link.fd().unwrap());
    let mut present: Vec<Participant> = Vec::new();
    // Participants that left between a `Missed` and the look that follows it: their ends may still be reported.
    let mut ending: Vec<Participant> = Vec::new();
    for kill in 0..kills {
        let mut peers = [Peer::start(dir.path()), Peer::start(dir.path())];
        for peer in &mut peers {
            peer.order("churn link");
        }
        let (end, mut heard) = (Instant::now() + Duration::from_micros(kill * 2_654_435 % 20_000), 0);
        let mut killed = false;
        // Each event that is still missing comes with a signal; a seat without one is recovered silently.
        while !killed || !present.is_empty() || link.participants().count() > 1 {
            if !killed && Instant::now() >= end && heard > 0 {
                for peer in &peers {
                    peer.signal(nix::sys::signal::Signal::SIGKILL);
                }
                killed = true;
            }
            let is_owed = killed && !present.is_empty();
            let limit = EpollTimeout::try_from(if is_owed { HANGS } else { Duration::from_millis(1) });
            let woken = epoll.wait(&mut [EpollEvent::empty()], limit.unwrap()).unwrap();
            assert!(woken == 1 || !is_owed, "kill {kill}: nothing rang, and {present:?} are present");
            while link.take_signal().unwrap().is_some() {}
            while let Some(event) = link.next_event() {
                heard += 1;
                match event {
                    PeerEvent::Attached(peer) => {
                        assert!(!present.contains(&peer), "kill {kill}: {peer:?} attached twice");
                        present.push(peer);
                    }
                    PeerEvent::Detached(peer) | PeerEvent::Died(peer) => {
                        let known =
                            [&mut present, &mut ending].into_iter().find(|known| known.contains(&peer));
                        let known = known.unwrap_or_else(|| panic!("kill {kill}: {peer:?} was never here"));
                        known.retain(|one| *one != peer);
                    }
                    PeerEvent::Missed(_) => {
                        let there: Vec<_> = link.participants().map(|one| one.word).collect();
                        ending.extend(present.extract_if(.., |one| !there.contains(&one.word)));
                    }
                    event => panic!("kill {kill}: {event:?}"),
                }
            }
        }
    }
}

#[test]
fn eviction_is_an_event_of_its_own_and_the_last() {
    let dir = ipc_dir();
    let link = created(dir.path(), "");
    let other = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
    let Some(PeerEvent::Attached(peer)) = link.next_event() else { panic!("it has attached") };
    link.evict(other.seat()).unwrap();
    assert_eq!(link.next_event(), Some(PeerEvent::Evicted(peer)));
    assert!(other.wait_event(None).is_err(), "the evicted participant gets an error");
    drop(other);
    assert_eq!(link.next_event(), None);
}

#[test]
fn refused_newcomer_and_recovery_are_no_events() {
    let dir = ipc_dir();
    let options = LinkOptions::new().dir(dir.path());
    let link = created(dir.path(), "");
    let mut peer = Peer::start(dir.path());
    for _ in 0..20 {
        assert!(peer.ask("attach link primary 0").starts_with("err AlreadyOwned"));
    }
    assert_eq!(link.next_event(), None);
    // Recovery takes a seat for a moment each time.
    for _ in 0..20 {
        std::mem::forget(options.attach("link", Side::Secondary).unwrap());
        let (seat, word) = link.participants().nth(1).map(|dead| (dead.seat, dead.word)).unwrap();
        link.recover_participant(seat, word).unwrap();
        assert_eq!(words(link.next_event().unwrap()).0, "attached");
        assert_eq!(words(link.next_event().unwrap()).0, "died");
    }
    assert_eq!(link.next_event(), None);
}

#[test]
fn death_is_reported_by_recovery_without_a_monitor() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let link = LinkOptions::new().dir(dir.path()).monitor(false).create(&config("link", "")).unwrap();
    let (mut dead, mut other) = (Peer::start(dir.path()), Peer::start(dir.path()));
    dead.tell("attach link secondary 0");
    other.tell("attach link secondary 0");
    let pids = [dead.pid(), other.pid()];
    for pid in pids {
        assert!(link.wait_event(Some(HANGS)).unwrap());
        assert_eq!(words(link.next_event().unwrap()), ("attached", pid));
    }
    dead.kill();
    assert!(link.wait_event(Some(HANGS)).unwrap());
    assert_eq!(words(link.next_event().unwrap()), ("died", pids[0]));
    other.kill();
    // No process is left that would notice by itself.
    link.recover().unwrap();
    assert_eq!(words(link.next_event().unwrap()), ("died", pids[1]));
}

/// Each side listens to the other, of another user or in another pid namespace.
#[test]
fn peers_of_other_users_and_pid_namespaces_are_reported() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    for (start, prepare) in [
        (Peer::start as fn(&Path) -> Peer, "prepare user 60002 60001"),
        (Peer::start_alone, "prepare user 60002 60001"),
        (Peer::start_alone, "prepare user 0 60001"),
    ] {
        let dir = ipc_dir();
        nix::unistd::chown(dir.path(), None, Some(nix::unistd::Gid::from_raw(60_001))).unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o3770)).unwrap();
        let (mut primary, mut secondary) = (Peer::start(dir.path()), start(dir.path()));
        primary.tell("prepare user 60003 60001");
        secondary.tell(prepare);
        primary.tell("create link file_mode=0660");
        secondary.tell("attach link secondary 0");
        assert_eq!(secondary.ask("event -1"), "attached primary 0");
        assert_eq!(primary.ask("event -1"), "attached secondary 1");
        primary.order("event -1");
        secondary.tell("close");
        assert_eq!(primary.answer(), "detached secondary 1");
        secondary.tell("attach link secondary 0");
        assert_eq!(primary.ask("event -1"), "attached secondary 1");
        primary.order("event -1");
        secondary.kill();
        assert_eq!(primary.answer(), "died secondary 1");
        let mut next = start(dir.path());
        next.tell(prepare);
        next.tell("attach link secondary 0");
        assert_eq!(next.ask("event -1"), "attached primary 0");
        next.order("event -1");
        primary.kill();
        assert_eq!(next.answer(), "died primary 0");
    }
}
