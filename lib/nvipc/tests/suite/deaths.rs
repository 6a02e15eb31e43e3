//! The death of either side at any time: the link continues, or reports an error.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use crate::support::{
    HANGS, Peer, count_free, ipc_dir, is_root, notices_deaths, options, pools, receive, send, until,
};
use shmesh::config::PoolId;
use shmesh_nvipc_wire::{Error, Options, RecoveryStats};

#[test]
fn buffers_of_a_dead_secondary_are_recovered_and_queued_messages_stay() {
    if !notices_deaths() {
        return;
    }
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    let mut peer = Peer::start(dir.path());
    peer.tell("attach fapi");
    until("the peer has connected", || link.has_peer());
    send(&link, 1, 10, Some((PoolId::CpuData, 10))).unwrap();
    send(&link, 2, 10, None).unwrap();
    peer.tell("keep");
    peer.tell("hold");
    peer.tell("send 3 10 1 50");
    let ours = link.allocate(None).unwrap();
    assert_eq!(count_free(&link, None), 3);
    peer.kill();
    until("its death is noticed", || link.recovered().peers == 1);
    assert_eq!(link.recovered(), RecoveryStats { peers: 1, msg_buffers: 2, data_buffers: 2 });
    assert!(matches!(link.notify(), Err(Error::NoPeer)));
    // One is ours, and two are queued, one in each direction.
    assert_eq!(count_free(&link, None), 5);

    let mut next = Peer::start(dir.path());
    next.tell("attach fapi");
    assert_eq!(next.ask("receive"), "2", "sent before it came, and not lost");
    assert_eq!(receive(&link).unwrap(), Some(3), "sent by the dead one");
    link.release(ours).unwrap();
    assert_eq!(next.ask("free"), "8");
    assert_eq!(count_free(&link, Some(PoolId::CpuData)), 4);
    until("the next has connected", || link.has_peer());
    link.notify().unwrap();
    assert_eq!(next.ask("wait"), "true");
}

#[test]
fn death_at_any_point_leaks_no_buffer() {
    if !notices_deaths() {
        return;
    }
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    for turn in 1..=30_u32 {
        let mut peer = Peer::start(dir.path());
        peer.tell("attach fapi");
        until("the peer has connected", || link.has_peer());
        peer.order("echo 1000000");
        // We stop after a different number of messages in each turn.
        for i in 0..turn * 17 {
            match send(&link, 7, 20, (i % 2 == 0).then_some((PoolId::CpuData, 20))) {
                Ok(()) => drop(link.notify()),
                Err(Error::Empty { .. }) => {}
                Err(other) => panic!("{other}"),
            }
            while receive(&link).unwrap().is_some() {}
        }
        peer.kill();
        until("its death is noticed", || link.recovered().peers == u64::from(2 * turn - 1));
        while receive(&link).unwrap().is_some() {}
        // Only messages queued for the next secondary are missing.
        let mut reader = Peer::start(dir.path());
        reader.tell("attach fapi");
        while reader.ask("receive") != "none" {}
        assert_eq!(count_free(&link, None), 8, "turn {turn}");
        assert_eq!(count_free(&link, Some(PoolId::CpuData)), 4, "turn {turn}");
        reader.kill();
        until("the reader's too", || link.recovered().peers == u64::from(2 * turn));
    }
}

#[test]
fn second_secondary_waits_until_the_first_has_ended() {
    if !notices_deaths() {
        return;
    }
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    let mut first = Peer::start(dir.path());
    first.tell("attach fapi");
    first.tell("hold");
    let mut second = Peer::start(dir.path());
    second.order("attach fapi");
    // It has connected, and waits for the answer.
    second.until_in(&[libc::SYS_recvmsg]);
    // More silent connections after it, until the first of them is refused: then the primary has looked at all of them.
    let server = dir.path().join("fapi_un_sock_server");
    let mut others: Vec<_> = (0..8).map(|_| UnixStream::connect(&server).unwrap()).collect();
    let sent_away = others.remove(0).read(&mut [0]);
    assert!(matches!(sent_away, Ok(0)), "{sent_away:?}");
    assert_eq!(second.answered(), None);
    send(&link, 1, 10, None).unwrap();
    link.notify().unwrap();
    assert_eq!(first.ask("wait"), "true", "the first is still notified");
    assert_eq!(first.ask("receive"), "1");
    assert_eq!(count_free(&link, None), 7, "nothing was wiped under the first");
    drop(others);
    first.kill();
    assert_eq!(second.answer(), "ok");
    assert_eq!(second.ask("free"), "8");
}

#[test]
fn reconnecting_secondary_is_not_queued_behind_others() {
    if !notices_deaths() {
        return;
    }
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    let mut first = Peer::start(dir.path());
    first.tell("attach fapi");
    let mut second = Peer::start(dir.path());
    second.order("attach fapi");
    // It has connected before the first connects again.
    second.until_in(&[libc::SYS_recvmsg]);
    first.tell("forget");
    first.tell("attach fapi");
    assert_eq!(second.answered(), None);
    send(&link, 1, 10, None).unwrap();
    assert_eq!(first.ask("receive"), "1");
    first.kill();
    assert_eq!(second.answer(), "ok");
}

#[test]
fn closed_connections_do_not_block_the_queue() {
    if !notices_deaths() {
        return;
    }
    let dir = ipc_dir();
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = std::sync::Arc::clone(&asked);
    let count = move || counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < usize::MAX;
    let _link = options(dir.path()).create_with("fapi", pools(), count).unwrap();
    let mut first = Peer::start(dir.path());
    first.tell("attach fapi");
    let server = dir.path().join("fapi_un_sock_server");
    for _ in 0..20 {
        drop(UnixStream::connect(&server).unwrap());
    }
    let mut waits = UnixStream::connect(&server).unwrap();
    waits.write_all(&[0]).unwrap();
    first.kill();
    assert_eq!(waits.read(&mut [0; 8]).unwrap(), 2, "it is accepted, and gets a descriptor");
    assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 1, "closed connections lead to no question");
}

#[test]
fn silent_connections_do_not_delay_a_secondary() {
    let dir = ipc_dir();
    let _link = options(dir.path()).create("fapi", pools()).unwrap();
    let start = std::time::Instant::now();
    let server = dir.path().join("fapi_un_sock_server");
    let mut silent: Vec<_> = (0..6).map(|_| UnixStream::connect(&server).unwrap()).collect();
    let mut secondary = Peer::start(dir.path());
    secondary.tell("attach fapi");
    // Each of them has 10 s, and the secondary would wait for 60.
    assert!(start.elapsed().as_secs() < 30);
    secondary.tell("send 1 10");
    for connection in &mut silent {
        connection.set_nonblocking(true).unwrap();
        // Not even the first one has been given up for its sake.
        assert!(connection.read(&mut [0]).is_err() || start.elapsed().as_secs() >= 10);
    }
}

#[test]
fn unresponsive_primary_is_an_error_with_the_remedy() {
    let dir = ipc_dir();
    let _listener = std::os::unix::net::UnixListener::bind(dir.path().join("fapi_un_sock_server")).unwrap();
    let limited = Options::new().dir(dir.path()).patience(std::time::Duration::from_millis(50));
    let start = std::time::Instant::now();
    let error = limited.attach("fapi").unwrap_err().to_string();
    // Without the limit, one attempt takes 10 s.
    assert!(start.elapsed().as_secs() < 8, "{:?}", start.elapsed());
    assert!(error.contains("does not answer") && error.contains("start the primary anew"), "{error}");
}

#[test]
fn wait_for_the_primary_is_reported() {
    static REASONS: std::sync::Mutex<Vec<String>> = std::sync::Mutex::new(Vec::new());
    let dir = ipc_dir();
    let options = Options::new().dir(dir.path()).patience(std::time::Duration::from_secs(1));
    let options = options.report_wait(std::time::Duration::ZERO, |why| {
        REASONS.lock().unwrap().push(why.to_string());
    });
    let error = options.attach("fapi").unwrap_err().to_string();
    let reasons = REASONS.lock().unwrap();
    assert!(!reasons.is_empty() && reasons.iter().all(|reason| *reason == error), "{reasons:?}");
}

#[test]
fn parked_buffers_return_from_dead_and_idle_peers() {
    if !notices_deaths() {
        return;
    }
    let dir = ipc_dir();
    let mut large = pools();
    large[PoolId::CpuMsg.index()].pool_len = 64;
    large[PoolId::CpuData.index()].pool_len = 64;
    let link = options(dir.path()).create("fapi", large).unwrap();
    // The buffer that was released last is allocated first.
    let pair = [(); 2].map(|()| link.allocate(Some(PoolId::CpuData)).unwrap());
    pair.iter().for_each(|buffers| link.release(*buffers).unwrap());
    assert_eq!(link.allocate(Some(PoolId::CpuData)).unwrap(), pair[1]);
    link.release(pair[1]).unwrap();
    for killed in [true, false] {
        let mut peer = Peer::start(dir.path());
        peer.tell("attach fapi");
        for id in 0..20 {
            send(&link, id, 10, Some((PoolId::CpuData, 10))).unwrap();
            assert_eq!(peer.ask("receive"), id.to_string());
        }
        if killed {
            peer.kill();
        }
        let all = || (count_free(&link, None), count_free(&link, Some(PoolId::CpuData)));
        until("all come back", || all() == (64, 64));
    }
}

#[test]
fn closing_without_exiting_is_announced() {
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    let mut first = Peer::start(dir.path());
    first.tell("attach fapi");
    until("they have met", || link.has_peer());
    first.tell("hold");
    let mut second = Peer::start(dir.path());
    second.order("attach fapi");
    first.tell("close");
    assert_eq!(second.answer(), "ok", "the first has left");
    assert_eq!(second.ask("free"), "8");
    send(&link, 1, 10, None).unwrap();
    until("the second has connected", || link.notify().is_ok());
    assert_eq!(second.ask("wait"), "true");

    // The same for a primary: its secondary need not wait for the end of its process.
    second.tell("close");
    until("it has gone", || !link.has_peer());
    drop(link);
    let mut primary = Peer::start(dir.path());
    primary.tell("create fapi");
    let link = options(dir.path()).attach("fapi").unwrap();
    primary.tell("send 1 10");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| link.wait(Some(HANGS)));
        primary.tell("close");
        assert!(matches!(waiter.join().unwrap(), Err(Error::PrimaryEnded)), "who waits is woken");
    });
    assert_eq!(receive(&link).unwrap(), Some(1), "what was sent can be received");
    assert!(matches!(link.receive(), Err(Error::PrimaryEnded)));
    primary.tell("create fapi");
    drop(link);
    let link = options(dir.path()).attach("fapi").unwrap();
    assert_eq!(count_free(&link, None), 8);
}

/// Neither sees the other's processes: the kernel reports process id 0 for both.
#[test]
fn secondary_of_another_pid_namespace_can_reattach() {
    if !notices_deaths() || !is_root() {
        return;
    }
    let dir = ipc_dir();
    let (mut primary, mut secondary) = (Peer::start_alone(dir.path()), Peer::start_alone(dir.path()));
    primary.tell("create fapi");
    for id in ["1", "2", "3"] {
        secondary.tell("attach fapi");
        secondary.tell(&format!("send {id} 10"));
        assert_eq!(primary.ask("receive"), id);
        secondary.tell("close");
    }
    assert_eq!(primary.ask("free"), "8");
}

#[test]
fn secondary_detects_the_end_of_its_primary() {
    if !notices_deaths() {
        return;
    }
    let dir = ipc_dir();
    let mut primary = Peer::start(dir.path());
    primary.tell("create fapi");
    let link = options(dir.path()).attach("fapi").unwrap();
    primary.tell("send 1 10 1 10");
    let held = link.allocate(None).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| link.wait(Some(HANGS)));
        primary.kill();
        assert!(matches!(waiter.join().unwrap(), Err(Error::PrimaryEnded)), "who waits is woken");
    });
    assert!(matches!(link.allocate(None), Err(Error::PrimaryEnded)));
    assert!(matches!(link.notify(), Err(Error::PrimaryEnded)));
    assert!(!link.has_peer());
    assert_eq!(receive(&link).unwrap(), Some(1), "what was sent can be received");
    assert!(matches!(link.receive(), Err(Error::PrimaryEnded)));
    link.release(held).unwrap();

    // Its successor creates new files, and the old ones stay as they are under us.
    let mut next = Peer::start(dir.path());
    next.tell("create fapi");
    assert_eq!(next.ask("free"), "8");
    drop(link);
    let link = options(dir.path()).attach("fapi").unwrap();
    assert_eq!(count_free(&link, None), 8);
    send(&link, 9, 10, None).unwrap();
    assert_eq!(next.ask("receive"), "9");
}

#[test]
fn application_may_refuse_a_reconnect() {
    if !notices_deaths() {
        return;
    }
    let dir = ipc_dir();
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = std::sync::Arc::clone(&asked);
    let count = move || asked.load(std::sync::atomic::Ordering::SeqCst);
    let link = options(dir.path())
        .create_with("fapi", pools(), move || counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst) > 0)
        .unwrap();
    let mut first = Peer::start(dir.path());
    first.tell("attach fapi");
    assert_eq!(count(), 0, "the first is not asked about");
    first.kill();
    until("its death is noticed", || !link.has_peer());
    let mut second = Peer::start(dir.path());
    second.tell("attach fapi");
    assert!(count() >= 2, "refused once, and let in when it came again");
}

#[test]
fn second_primary_does_not_touch_the_link_of_the_first() {
    let dir = ipc_dir();
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = std::sync::Arc::clone(&asked);
    let agrees = move || counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < 1000;
    let link = options(dir.path()).create_with("fapi", pools(), agrees).unwrap();
    let mut peer = Peer::start(dir.path());
    peer.tell("attach fapi");
    // A secondary has attached as soon as it has the primary's descriptor; the primary has the secondary's some time later.
    until("the peer has connected", || link.has_peer());
    peer.tell("hold");
    for _ in 0..20 {
        assert!(matches!(options(dir.path()).create("fapi", pools()), Err(Error::InUse { .. })));
    }
    send(&link, 1, 10, None).unwrap();
    link.notify().unwrap();
    assert_eq!(peer.ask("wait"), "true");
    assert_eq!(peer.ask("receive"), "1");
    assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 0, "no secondary has reconnected");
    assert_eq!(count_free(&link, None), 7);
}

#[test]
fn incomplete_link_files_are_refused_with_the_remedy() {
    let dir = ipc_dir();
    let now = Options::new().dir(dir.path()).patience(std::time::Duration::ZERO);
    let error = now.attach("fapi").unwrap_err();
    assert!(error.to_string().contains("no primary listens there; start the primary"), "{error}");

    // A killed primary leaves its files, and a socket without a listener.
    let mut dead = Peer::start(dir.path());
    dead.tell("create fapi");
    dead.kill();
    assert!(matches!(now.attach("fapi"), Err(Error::NoPrimary { .. })));
    let link = now.create("fapi", pools()).unwrap();

    // Half-written, truncated, another version, missing; with a listener.
    let debug = dir.path().join("fapi_debug");
    let whole = std::fs::read(&debug).unwrap();
    let expect = |what: &str, kind: fn(&Error) -> bool| {
        // The primary answers in a thread of its own, as soon as that is scheduled.
        let error = options(dir.path()).attach("fapi").unwrap_err();
        assert!(kind(&error), "{what}: {error}");
        assert!(
            error.to_string().contains("restart") || error.to_string().contains("2530"),
            "{what}: {error}"
        );
    };
    let replace = |path: &std::path::Path, bytes: &[u8]| {
        // Replace the file: truncating a mapped one would raise SIGBUS in processes that use it.
        std::fs::remove_file(path).unwrap();
        std::fs::write(path, bytes).unwrap();
    };
    replace(&debug, &whole[..300]);
    expect("short", |error| matches!(error, Error::Truncated { .. }));
    replace(&debug, &[]);
    expect("empty", |error| matches!(error, Error::Damaged { .. }));
    let mut other = whole.clone();
    other[200] ^= 1;
    replace(&debug, &other);
    expect("version", |error| matches!(error, Error::Version { .. }));
    let mut other = whole.clone();
    other[44] = 0;
    replace(&debug, &other);
    expect("transport", |error| matches!(error, Error::Damaged { .. }));
    let mut other = whole.clone();
    other[60] = 200;
    replace(&debug, &other);
    expect("more buffers than there are", |error| matches!(error, Error::Truncated { .. }));
    replace(&debug, &whole);
    let msg = dir.path().join("fapi_cpu_msg");
    std::fs::remove_file(&msg).unwrap();
    expect("missing", |error| matches!(error, Error::Damaged { .. }));
    std::os::unix::fs::symlink("/etc/passwd", &msg).unwrap();
    assert!(options(dir.path()).attach("fapi").is_err());
    drop(link);
    std::fs::remove_file(&debug).ok();

    // Links of another layout use the same names.
    let options = shmesh::LinkOptions::new().dir(dir.path());
    let native = options.create(&shmesh::config::LinkConfig::new("native".parse().unwrap())).unwrap();
    let error = now.create("native", pools()).unwrap_err();
    assert!(matches!(error, Error::NotTheirs { .. }), "{error}");
    drop(native);
}
