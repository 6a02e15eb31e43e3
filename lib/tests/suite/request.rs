//! Requests and replies between threads and processes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use shmesh::config::PoolId;
use shmesh::{
    Error, ErrorKind, Link, LinkOptions, OwnedLoan, OwnedPendingReply, OwnedRequest, PendingReply,
    REPLIES_MAX, Request, Side,
};
use shmesh_testing::{HANGS, Peer, Watchdog, config, ipc_dir, notified, refused, until};

struct Ends {
    server: Link,
    client: Link,
    dir: tempfile::TempDir,
}

impl Ends {
    fn options(&self) -> LinkOptions {
        LinkOptions::new().dir(self.dir.path())
    }

    fn client(&self) -> Link {
        self.options().attach("link", Side::Secondary).unwrap()
    }

    fn peer(&self, side: Side) -> Peer {
        let mut peer = Peer::start(self.dir.path());
        peer.tell(&format!("attach link {side} 60000"));
        peer
    }
}

fn ends(changes: &str) -> Ends {
    let dir = ipc_dir();
    let options = LinkOptions::new().dir(dir.path());
    let server = options.create(&config("link", changes)).unwrap();
    let client = options.attach("link", Side::Secondary).unwrap();
    Ends { server, client, dir }
}

fn take(server: &Link) -> Request<'_> {
    assert!(server.wait_request(Some(HANGS)).unwrap(), "a request comes");
    server.receive_request().unwrap().expect("no other server takes it")
}

fn next(pending: &mut PendingReply<'_>) -> (i32, Vec<u8>) {
    let reply = pending.wait(Some(HANGS)).unwrap().expect("a reply comes");
    (reply.msg_id(), reply.msg().to_vec())
}

fn failure(pending: &mut PendingReply<'_>) -> Error {
    refused(pending.wait(Some(HANGS)))
}

/// All MSG and DATA buffers can be loaned.
#[track_caller]
fn assert_all_free(link: &Link) {
    let (_, messages) = link.pool(PoolId::CpuMsg).unwrap();
    let (_, data) = link.pool(PoolId::CpuData).unwrap();
    let mut all: Vec<_> = std::iter::from_fn(|| link.loan_with(PoolId::CpuData).ok()).collect();
    assert_eq!(all.len(), data as usize, "DATA buffers");
    all.extend(std::iter::from_fn(|| link.loan().ok()));
    assert_eq!(all.len(), messages as usize, "MSG buffers");
}

fn requests_and_replies_of_each_kind(changes: &str) {
    let ends = ends(changes);
    let pattern = |len: usize| -> Vec<u8> { (0..len).map(|i| (i * 7 + len).to_le_bytes()[0]).collect() };
    for len in [0, 1, 39, 40, 41, shmesh::REQUEST_INLINE_MAX_BYTES] {
        let mut pending = ends.client.request_inline(1, 2, &pattern(len)).unwrap();
        let mut request = take(&ends.server);
        assert_eq!((request.msg_id(), request.cell_id()), (1, 2));
        assert_eq!((request.msg(), request.is_inline()), (&pattern(len)[..], true));
        assert!(request.reply_inline(3, 4, &pattern(len + 8)).unwrap());
        let reply = pending.wait(Some(HANGS)).unwrap().unwrap();
        assert_eq!((reply.msg_id(), reply.cell_id(), reply.msg()), (3, 4, &pattern(len + 8)[..]));
        assert!(pending.is_over());
    }
    for len in [0, 1, 256] {
        let mut loan = ends.client.loan_with(PoolId::CpuData).unwrap();
        loan.resize_msg(len).unwrap().copy_from_slice(&pattern(len));
        loan.resize_data(16 * len).unwrap().copy_from_slice(&pattern(16 * len));
        let mut pending = ends.client.request(loan).unwrap();
        let mut request = take(&ends.server);
        assert_eq!((request.msg(), request.data()), (&pattern(len)[..], &pattern(16 * len)[..]));
        let mut loan = ends.server.loan_with(PoolId::CpuData).unwrap();
        loan.resize_data(len).unwrap().copy_from_slice(&pattern(len));
        assert!(request.reply(loan).unwrap());
        assert_eq!(pending.wait(Some(HANGS)).unwrap().unwrap().data(), pattern(len));
    }
    assert_all_free(&ends.server);
}

#[test]
fn requests_and_replies_are_received_as_they_were_sent() {
    requests_and_replies_of_each_kind("requests=1");
    requests_and_replies_of_each_kind("requests=64 backing=memfd");
}

#[test]
fn requests_and_replies_can_be_in_any_buffer_of_the_pool() {
    // More MSG buffers than inline cells.
    let ends = ends("requests=1 ring=1 msg=64x100");
    let _held: Vec<_> = (0..98).map(|_| ends.client.loan().unwrap()).collect();
    let mut pending = ends.client.request(ends.client.loan().unwrap().with_msg_id(1)).unwrap();
    let mut request = take(&ends.server);
    assert_eq!(request.msg_id(), 1);
    assert!(request.reply(ends.server.loan().unwrap().with_msg_id(2)).unwrap());
    assert_eq!(next(&mut pending).0, 2);
}

#[test]
fn replies_find_their_callers_among_four_client_processes() {
    let _watchdog = Watchdog::start();
    const EACH: usize = 1_000;
    let dir = ipc_dir();
    let mut server = Peer::start(dir.path());
    server.tell("create link requests=2 spin=50");
    let mut clients: Vec<_> = (0..4).map(|_| Peer::start(dir.path())).collect();
    for client in &mut clients {
        client.tell("attach link secondary 60000");
    }
    // The second server, beside the process above.
    let options = LinkOptions::new().dir(dir.path()).allow_second_primary(true);
    let second = options.attach("link", Side::Primary).unwrap();
    server.order(&format!("answer {}", 2 * EACH));
    for client in &mut clients {
        client.order(&format!("ask {EACH}"));
    }
    for _ in 0..2 * EACH {
        let mut request = loop {
            assert!(second.wait_request(Some(HANGS)).unwrap());
            if let Some(request) = second.receive_request().unwrap() {
                break request;
            }
        };
        let bytes = request.msg().to_vec();
        if request.is_inline() {
            assert!(request.reply_inline(1, 0, &bytes).unwrap());
        } else {
            let mut loan = second.loan().unwrap();
            loan.resize_msg(bytes.len()).unwrap().copy_from_slice(&bytes);
            assert!(request.reply(loan).unwrap());
        }
    }
    assert_eq!(server.answer(), (2 * EACH).to_string());
    for client in &mut clients {
        assert_eq!(client.answer(), EACH.to_string(), "each reply is its caller's");
    }
    assert_all_free(&second);
}

#[test]
fn requests_that_a_dead_server_took_fail_and_its_successor_serves_the_rest() {
    let ends = ends("requests=4");
    let Ends { server, client, dir } = ends;
    drop(server);
    let mut dying = Peer::start(dir.path());
    dying.tell("create link requests=4");
    let mut pending: Vec<_> = (0..2).map(|_| client.request_inline(1, 0, b"lost").unwrap()).collect();
    pending.push(client.request(client.loan_with(PoolId::CpuData).unwrap()).unwrap());
    let mut waiting = client.request_inline(7, 0, b"served").unwrap();
    // Two replies to each of three requests.
    assert_eq!(dying.ask("hold-requests 3 2"), "3");
    let pid = dying.pid();
    dying.kill();
    for pending in &mut pending {
        assert_eq!((next(pending).0, next(pending).0), (0, 1), "sent before it died");
        let error = failure(pending);
        assert!(matches!(error.kind(), ErrorKind::ServerGone { pid: dead, .. } if *dead == pid), "{error}");
        assert!(error.to_string().contains(&pid.to_string()));
        assert!(pending.is_over());
    }
    let server = LinkOptions::new().dir(dir.path()).create(&config("link", "requests=4")).unwrap();
    let mut request = take(&server);
    assert_eq!(request.msg(), b"served");
    assert!(request.reply_inline(8, 0, b"").unwrap());
    drop(request);
    assert_eq!(next(&mut waiting).0, 8);
    assert_all_free(&client);
}

#[test]
fn blocked_client_wakes_when_its_server_dies() {
    let Ends { server, client, dir } = ends("requests=4");
    drop(server);
    let mut dying = Peer::start(dir.path());
    dying.tell("create link requests=4");
    let waiter = std::thread::spawn(move || {
        let mut pending = client.request_inline(1, 0, b"").unwrap();
        failure(&mut pending)
    });
    assert_eq!(dying.ask("hold-requests 1 0"), "1");
    dying.kill();
    assert!(matches!(waiter.join().unwrap().kind(), ErrorKind::ServerGone { .. }));
}

#[test]
fn reply_wakes_its_own_client_only() {
    const ROUNDS: usize = 300;
    let ends = ends("requests=4 spin=0");
    let (server, client, other) = (&ends.server, ends.client(), ends.client());
    let (say, tid) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let idle = scope.spawn(move || {
            say.send(nix::unistd::gettid()).unwrap();
            next(&mut other.request_inline(1, 0, b"last").unwrap())
        });
        let mut last = take(server);
        let status = format!("/proc/self/task/{}/status", tid.recv().unwrap());
        let sleeps = || {
            let status = std::fs::read_to_string(&status).unwrap();
            let count = shmesh_sys::procfs::field(&status, "voluntary_ctxt_switches").unwrap();
            count.parse::<usize>().unwrap()
        };
        let before = sleeps();
        let busy = scope.spawn(move || {
            for _ in 0..ROUNDS {
                next(&mut client.request_inline(2, 0, b"").unwrap());
            }
        });
        for _ in 0..ROUNDS {
            take(server).reply_inline(2, 0, b"").unwrap();
        }
        busy.join().unwrap();
        // It falls asleep once, and looks again each second.
        let slept = sleeps() - before;
        assert!(slept < ROUNDS / 5, "woken {slept} times by {ROUNDS} replies to another client");
        last.reply_inline(1, 0, b"").unwrap();
        assert_eq!(idle.join().unwrap().0, 1);
    });
}

#[test]
fn requests_and_replies_of_a_dead_client_are_freed() {
    let ends = ends("requests=8 msg=64x20");
    let mut dying = ends.peer(Side::Secondary);
    dying.tell("leave-requests 8");
    // One is answered, two are in a stream, one is taken and the others wait in the ring.
    let mut requests: Vec<_> = (0..4).map(|_| take(&ends.server)).collect();
    assert!(requests[0].reply(ends.server.loan().unwrap()).unwrap());
    for request in &mut requests[1..3] {
        assert!(request.stream(ends.server.loan().unwrap()).unwrap());
        assert!(request.stream_inline(1, 0, b"").unwrap());
    }
    dying.kill();
    until("the death is recovered", || {
        ends.server.recover().unwrap();
        ends.server.participants().count() == 2
    });
    for request in &mut requests[1..] {
        assert!(!request.is_wanted());
        assert!(!request.reply(ends.server.loan().unwrap()).unwrap(), "the client has gone");
    }
    drop(requests);
    while let Some(mut request) = ends.server.receive_request().unwrap() {
        assert!(!request.reply_inline(1, 0, b"").unwrap());
    }
    assert_all_free(&ends.server);
    // Its seat's next participant has the whole window, and no reply of before.
    let newcomer = ends.client();
    let mut pending: Vec<_> = (0..8).map(|_| newcomer.request_inline(1, 0, b"").unwrap()).collect();
    assert!(pending.iter_mut().all(|pending| pending.try_take().unwrap().is_none()));
}

#[test]
fn stream_of_a_slow_client_is_bounded_and_arrives_in_order() {
    const TOTAL: i32 = 100;
    let ends = ends("requests=1 msg=64x32");
    let server = ends.server.try_clone().unwrap();
    let serving = std::thread::spawn(move || {
        let mut request = take(&server);
        let mut id = 0;
        while id < TOTAL {
            let loan = server.loan().unwrap().with_msg_id(id);
            let is_last = id == TOTAL - 1;
            match if is_last { request.reply(loan) } else { request.stream(loan) } {
                Ok(sent) => {
                    assert!(sent);
                    id += 1;
                }
                Err(refused) => {
                    let kind = refused.error.kind();
                    assert!(matches!(kind, ErrorKind::RepliesFull { limit: REPLIES_MAX, .. }), "{kind}");
                    drop(refused.loan);
                    assert!(request.wait_room(Some(HANGS)).unwrap());
                }
            }
        }
    });
    let mut pending = ends.client.request_inline(1, 0, b"").unwrap();
    let mut held = Vec::new();
    for id in 0..TOTAL {
        let reply = pending.wait(Some(HANGS)).unwrap().expect("a reply comes");
        assert_eq!(reply.msg_id(), id);
        assert_eq!(pending.is_over(), id == TOTAL - 1);
        held.push(reply);
        if held.len() > 8 {
            held.clear();
        }
    }
    assert!(matches!(refused(pending.try_take()).kind(), ErrorKind::RequestOver { .. }));
    serving.join().unwrap();
    drop(held);
    assert_all_free(&ends.client);
}

#[test]
fn server_that_waits_for_room_goes_on_when_the_stream_is_dropped() {
    let ends = ends("requests=1");
    let pending = ends.client.request_inline(1, 0, b"").unwrap();
    let server = ends.server.try_clone().unwrap();
    let (full, is_full) = std::sync::mpsc::channel();
    let serving = std::thread::spawn(move || {
        let mut request = take(&server);
        while request.stream_inline(1, 0, b"part").is_ok() {}
        full.send(()).unwrap();
        assert!(request.wait_room(Some(HANGS)).unwrap());
        assert!(!request.stream_inline(1, 0, b"part").unwrap() && !request.is_wanted());
    });
    is_full.recv().unwrap();
    drop(pending);
    serving.join().unwrap();
    // The slot is free again, and nothing of before is in it.
    let mut pending = ends.client.request_inline(2, 0, b"").unwrap();
    assert!(pending.try_take().unwrap().is_none());
    assert!(take(&ends.server).reply_inline(2, 0, b"").unwrap());
    assert_eq!(next(&mut pending).0, 2);
}

#[test]
fn replies_to_a_dropped_request_go_nowhere_and_their_buffers_come_back() {
    let ends = ends("requests=2 msg=64x20");
    for taken in 0..3 {
        let mut pending = ends.client.request(ends.client.loan().unwrap()).unwrap();
        let mut request = take(&ends.server);
        for id in 0..3 {
            let loan = ends.server.loan_with(PoolId::CpuData).unwrap();
            assert!(request.stream(loan.with_msg_id(id)).unwrap());
        }
        for id in 0..taken {
            assert_eq!(next(&mut pending).0, id);
        }
        drop(pending);
        // A new request has the slot before the old server answers once more.
        let mut later = ends.client.request_inline(7, 0, b"").unwrap();
        assert!(!request.reply(ends.server.loan().unwrap()).unwrap());
        assert!(later.try_take().unwrap().is_none(), "an old reply is not a new one's");
        drop(request);
        assert!(later.try_take().unwrap().is_none(), "nor is its end");
        drop(later);
        drop(ends.server.receive_request().unwrap());
        assert_all_free(&ends.client);
    }
}

#[test]
fn pending_replies_time_out_and_are_still_pending() {
    for changes in ["requests=1", "requests=1 notify=off"] {
        let ends = ends(changes);
        let start = Instant::now();
        let mut pending = ends.client.request_inline(1, 0, b"").unwrap();
        assert!(pending.wait(Some(Duration::from_millis(20))).unwrap().is_none());
        assert!(start.elapsed() >= Duration::from_millis(20));
        assert!(take(&ends.server).reply_inline(2, 0, b"").unwrap());
        assert_eq!(next(&mut pending).0, 2);
    }
}

#[test]
fn dropped_requests_are_unanswered() {
    let ends = ends("requests=2");
    let mut pending = ends.client.request_inline(1, 0, b"").unwrap();
    let mut request = take(&ends.server);
    assert!(request.stream_inline(5, 0, b"").unwrap());
    drop(request);
    assert_eq!(next(&mut pending).0, 5, "what was sent comes first");
    let error = failure(&mut pending);
    let me = std::process::id();
    assert!(matches!(error.kind(), ErrorKind::Unanswered { pid, .. } if *pid == me), "{error}");
    assert!(matches!(failure(&mut pending).kind(), ErrorKind::RequestOver { .. }));
    // A server that leaves with a request has dropped it.
    let mut pending = ends.client.request(ends.client.loan().unwrap()).unwrap();
    let leaving = ends.server.try_clone().unwrap();
    std::mem::forget(take(&leaving));
    drop(leaving);
    assert!(matches!(failure(&mut pending).kind(), ErrorKind::ServerGone { .. }));
    assert_all_free(&ends.client);
}

#[test]
fn evicted_servers_and_clients_answer_and_receive_nothing() {
    let ends = ends("requests=4");
    let evicted = ends.server.try_clone().unwrap();
    let mut pending = [
        ends.client.request_inline(1, 0, b"").unwrap(),
        ends.client.request(ends.client.loan().unwrap()).unwrap(),
    ];
    let mut requests = [take(&evicted), take(&evicted)];
    let held = evicted.loan().unwrap();
    ends.server.evict(evicted.seat()).unwrap();
    for pending in &mut pending {
        assert!(matches!(failure(pending).kind(), ErrorKind::ServerGone { .. }));
    }
    assert!(matches!(requests[1].reply(held).unwrap_err().error.kind(), ErrorKind::Evicted { .. }));
    assert!(matches!(refused(requests[0].reply_inline(1, 0, b"")).kind(), ErrorKind::Evicted { .. }));
    drop((requests, pending));
    drop(evicted);
    assert_all_free(&ends.server);

    let evicted = ends.client();
    let mut pending =
        [evicted.request_inline(1, 0, b"").unwrap(), evicted.request_inline(2, 0, b"").unwrap()];
    let (mut first, mut second) = (take(&ends.server), take(&ends.server));
    assert!(first.reply(ends.server.loan().unwrap()).unwrap());
    ends.server.evict(evicted.seat()).unwrap();
    assert!(!second.reply(ends.server.loan().unwrap()).unwrap());
    for pending in &mut pending {
        assert!(matches!(failure(pending).kind(), ErrorKind::Evicted { .. }));
    }
    drop((first, second, pending));
    drop(evicted);
    assert_all_free(&ends.server);
}

#[test]
fn bell_rings_for_replies_and_requests() {
    let ends = ends("requests=1");
    let other = ends.client();
    for link in [&ends.server, &ends.client, &other] {
        link.fd().unwrap();
        assert_eq!(notified(link), None);
    }
    let mut pending = ends.client.request_inline(1, 0, b"").unwrap();
    assert_eq!((notified(&ends.server), notified(&ends.client), notified(&other)), (Some(1), None, None));
    assert!(take(&ends.server).reply_inline(2, 0, b"").unwrap());
    assert_eq!((notified(&ends.client), notified(&other)), (Some(1), None), "it is not the other's reply");
    assert!(pending.is_ready());
    assert_eq!(next(&mut pending).0, 2);
}

#[test]
fn calls_on_other_than_requests_are_refused() {
    let ends = ends("requests=2 msg=64x9 ring=2");
    let kind = |error: Error| shmesh_testing::kind_of(&error);
    let (server, client) = (&ends.server, &ends.client);
    assert_eq!(kind(refused(server.request_inline(1, 0, b""))), "RequestSide");
    assert_eq!(kind(refused(client.receive_request())), "RequestSide");
    assert_eq!(kind(refused(client.wait_request(None))), "RequestSide");
    assert_eq!(kind(refused(client.request_inline(1, 0, &[0; 105]))), "InlineRequestTooLong");
    let other = ends.client();
    let foreign = client.request(other.loan().unwrap()).unwrap_err();
    assert_eq!(kind(foreign.into()), "ForeignLoan");
    let pending = [client.request_inline(1, 0, b"").unwrap(), client.request_inline(1, 0, b"").unwrap()];
    assert_eq!(kind(refused(client.request_inline(1, 0, b""))), "WindowFull");
    assert_eq!(kind(refused(other.request_inline(1, 0, b""))), "Full", "the servers are behind");
    let full = other.request(other.loan().unwrap()).unwrap_err();
    assert_eq!(kind(full.into()), "Full");
    let mut request = take(server);
    assert_eq!(kind(refused(request.reply_inline(1, 0, &[0; 113]))), "InlineTooLong");
    assert_eq!(kind(request.reply(client.loan().unwrap()).unwrap_err().into()), "ForeignLoan");
    assert!(request.reply_inline(1, 0, b"").unwrap());
    assert_eq!(kind(refused(request.stream_inline(1, 0, b""))), "RequestOver");
    assert!(request.wait_room(None).unwrap(), "there is nothing to wait for");
    drop((request, pending));
    assert!(other.request_inline(1, 0, b"").is_ok(), "the refused ones hold no slot");

    let Ends { server, client, .. } = self::ends("");
    assert_eq!(client.request_window(), None);
    assert_eq!(kind(refused(client.request_inline(1, 0, b""))), "NoRequests");
    assert_eq!(kind(refused(server.receive_request())), "NoRequests");
    assert!(!server.has_request());
    let options = ends.options();
    assert_eq!(kind(refused(options.create(&config("other", "requests=1 mode=spsc")))), "Config");
    assert_eq!(kind(refused(options.create(&config("other", "requests=65")))), "Config");
    let differs = refused(
        ends.options().allow_second_primary(true).create(&config("link", "requests=3 msg=64x9 ring=2")),
    );
    assert!(differs.to_string().contains("requests.window"), "{differs}");
}

#[test]
fn link_that_starts_empty_has_no_requests_of_before() {
    let Ends { server, client, dir } = ends("requests=4");
    for _ in 0..3 {
        let _ = client.request(client.loan().unwrap()).unwrap();
        let _ = client.request_inline(1, 0, b"").unwrap();
    }
    // Something waits on a plain ring, so the link is not removed.
    server.send_inline(1, 0, b"").unwrap();
    drop((client, server));
    let options = LinkOptions::new().dir(dir.path()).fresh(true);
    let server = options.create(&config("link", "requests=4")).unwrap();
    assert!(!server.has_request());
    assert_all_free(&server);
}

/// In a struct beside the link that it came from: the types say so.
struct Client {
    link: Link,
    pending: Vec<OwnedPendingReply>,
}

#[test]
fn owned_pending_replies_are_waited_for_in_many_threads() {
    let _watchdog = Watchdog::start();
    const EACH: i32 = 200;
    let ends = ends("requests=8 spin=50");
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let server = ends.server.try_clone().unwrap();
        let stopped = &stopped;
        let serving = scope.spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                server.wait_request(Some(Duration::from_millis(1))).unwrap();
                while let Some(mut request) = server.receive_request().unwrap() {
                    let id = request.msg_id();
                    if id % 2 == 0 {
                        assert!(request.reply_inline(id, 0, b"inline").unwrap());
                        continue;
                    }
                    let mut loan = server.loan_with(PoolId::CpuData).unwrap().with_msg_id(id);
                    loan.resize_data(6).unwrap().copy_from_slice(b"pooled");
                    assert!(request.reply(loan).unwrap());
                }
            }
        });
        let mut client = Client { link: ends.client.try_clone().unwrap(), pending: Vec::new() };
        for round in 0..EACH {
            for id in 0..8 {
                let pending = client.link.request_inline(8 * round + id, 0, b"").unwrap();
                client.pending.push(pending.into_owned());
            }
            let waiters: Vec<_> = (8 * round..)
                .zip(client.pending.drain(..))
                .map(|(id, mut pending)| {
                    scope.spawn(move || {
                        let reply = pending.wait(Some(HANGS)).unwrap().expect("a reply comes");
                        let text = [reply.msg(), reply.data()].concat();
                        assert_eq!((reply.msg_id(), pending.is_over()), (id, true));
                        assert_eq!(text, if id % 2 == 0 { b"inline" } else { b"pooled" });
                    })
                })
                .collect();
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        }
        stopped.store(true, Ordering::Relaxed);
        serving.join().unwrap();
    });
    assert_all_free(&ends.server);
}

#[test]
fn owned_requests_are_answered_by_worker_threads() {
    let _watchdog = Watchdog::start();
    const TOTAL: i32 = 40;
    let ends = ends("requests=2 msg=64x32");
    let (to_worker, work) = std::sync::mpsc::channel::<(OwnedRequest, OwnedLoan)>();
    let worker = std::thread::spawn(move || {
        for (mut request, loan) in work {
            assert_eq!(request.msg(), b"question");
            for id in 0..TOTAL {
                while let Err(full) = request.stream_inline(id, 0, b"part") {
                    assert!(matches!(full.kind(), ErrorKind::RepliesFull { .. }), "{full}");
                    assert!(request.wait_room(Some(HANGS)).unwrap());
                }
            }
            let mut loan = Some(loan);
            while let Some(unsent) = loan.take() {
                match request.reply(unsent) {
                    Ok(sent) => assert!(sent),
                    Err(full) => {
                        loan = Some(full.loan);
                        assert!(request.wait_room(Some(HANGS)).unwrap());
                    }
                }
            }
        }
    });
    for in_buffer in [false, true] {
        let mut pending = if in_buffer {
            let mut loan = ends.client.loan().unwrap();
            loan.resize_msg(8).unwrap().copy_from_slice(b"question");
            ends.client.request(loan).unwrap()
        } else {
            ends.client.request_inline(1, 0, b"question").unwrap()
        };
        // Another handle of the process loans the buffer of the reply.
        let lender = ends.server.try_clone().unwrap();
        let mut loan = lender.loan_with(PoolId::CpuData).unwrap().with_msg_id(TOTAL);
        loan.resize_data(3).unwrap().copy_from_slice(b"end");
        to_worker.send((take(&ends.server).into_owned(), loan.into_owned())).unwrap();
        for id in 0..TOTAL {
            assert_eq!(next(&mut pending), (id, b"part".to_vec()));
        }
        let last = pending.wait(Some(HANGS)).unwrap().expect("a reply comes");
        assert_eq!((last.msg_id(), last.data()), (TOTAL, &b"end"[..]));
    }
    drop(to_worker);
    worker.join().unwrap();
    let foreign = self::ends("");
    let mut pending = ends.client.request_inline(1, 0, b"kept").unwrap();
    let mut request = take(&ends.server).into_owned();
    let refused = request.reply(foreign.server.loan().unwrap().into_owned()).unwrap_err();
    assert!(matches!(refused.error.kind(), ErrorKind::ForeignLoan { .. }));
    request.give_up();
    assert!(matches!(failure(&mut pending).kind(), ErrorKind::Unanswered { .. }));
    assert_eq!(request.msg(), b"kept");
    assert!(matches!(self::refused(request.reply_inline(1, 0, b"")).kind(), ErrorKind::RequestOver { .. }));
    drop((refused, request));
    assert_all_free(&ends.server);
}

#[test]
fn owned_pending_replies_and_requests_outlive_their_handles() {
    let _watchdog = Watchdog::start();
    let ends = ends("requests=4");
    let (client, server) = (ends.client(), ends.server.try_clone().unwrap());
    let [mut waited, mut unanswered, dropped] =
        [(); 3].map(|()| client.request(client.loan().unwrap()).unwrap().into_owned());
    let [mut answering, giving_up, late] = [(); 3].map(|()| take(&server).into_owned());
    let (seat, is_seated) =
        (client.seat(), |seat| ends.server.participants().any(|other| other.seat == seat));
    drop((client, server));
    assert!(is_seated(seat), "requests are pending");
    let waiter = std::thread::spawn(move || {
        let reply = waited.wait(Some(HANGS)).unwrap().expect("a reply comes");
        reply.msg().to_vec()
    });
    assert!(answering.reply_inline(1, 0, b"answer").unwrap());
    assert_eq!(waiter.join().unwrap(), b"answer");
    drop(giving_up);
    let error = refused(unanswered.wait(Some(HANGS)));
    assert!(matches!(error.kind(), ErrorKind::Unanswered { .. }), "{error}");
    std::thread::spawn(move || drop(dropped)).join().unwrap();
    assert!(!late.is_wanted());
    drop((unanswered, answering, late));
    assert!(!is_seated(seat));
    assert_all_free(&ends.server);
}

#[test]
fn window_is_free_again_when_requests_end_in_other_threads() {
    let ends = ends("requests=2 msg=64x32");
    for _ in 0..50 {
        let first = ends.client.request_inline(1, 0, b"").unwrap().into_owned();
        let second = ends.client.request(ends.client.loan().unwrap()).unwrap().into_owned();
        let kind = shmesh_testing::kind_of(&refused(ends.client.request_inline(1, 0, b"")));
        assert_eq!(kind, "WindowFull");
        let mut request = take(&ends.server);
        assert!(request.stream(ends.server.loan().unwrap()).unwrap());
        std::thread::spawn(move || drop((first, second))).join().unwrap();
        assert!(!request.stream(ends.server.loan().unwrap()).unwrap());
        drop((request, take(&ends.server)));
        assert_all_free(&ends.client);
    }
}

/// Clients that never take a reply, and one that does.
struct Negligent<'a> {
    clients: &'a [Link],
    /// Whether replies are inline, in a MSG buffer, or with DATA.
    part: Part,
}

#[derive(Clone, Copy, Debug)]
enum Part {
    Inline,
    Msg,
    Data,
}

impl Part {
    fn stream<'a>(self, server: &'a Link, request: &mut Request<'a>) -> shmesh::Result<bool> {
        match self {
            Part::Inline => request.stream_inline(1, 0, &[7; 112]),
            Part::Msg => Ok(request.stream(server.loan()?)?),
            Part::Data => Ok(request.stream(server.loan_with(PoolId::CpuData)?)?),
        }
    }
}

impl Negligent<'_> {
    /// Fills what these clients can leave, and checks that an honest client gets each of its replies at the first attempt.
    fn hold_up_no_other(&self, server: &Link, honest: &Link, window: usize) {
        let mut kept = Vec::new();
        let mut refused = 0;
        for client in self.clients {
            for _ in 0..window {
                let pending = client.request_inline(1, 0, b"all of it").unwrap();
                let mut request = server.receive_request().unwrap().expect("it was just made");
                // A server that goes on until it is refused.
                let error = loop {
                    match self.part.stream(server, &mut request) {
                        Ok(sent) => assert!(sent),
                        Err(error) => break error,
                    }
                };
                let ErrorKind::RepliesFull { seat, pid, .. } = error.kind() else { panic!("{error}") };
                assert_eq!((*seat, *pid), (client.seat().value(), std::process::id()), "{error}");
                assert!(error.to_string().contains("pool_len"), "{error}");
                refused += u32::from(error.to_string().contains("its share"));
                assert!(!request.wait_room(Some(Duration::ZERO)).unwrap(), "there is none");
                kept.push((pending, request));
            }
        }
        assert!(refused > 0, "{:?}: they reach their share", self.part);
        for _ in 0..200 {
            let mut pending = honest.request_inline(1, 0, b"a part").unwrap();
            let mut request = server.receive_request().unwrap().expect("it was just made");
            for _ in 0..3 {
                assert!(request.wait_room(Some(Duration::ZERO)).unwrap(), "it takes its replies");
                assert!(self.part.stream(server, &mut request).unwrap());
                assert!(pending.try_take().unwrap().is_some());
            }
            assert!(request.reply_inline(1, 0, b"").unwrap());
            assert!(pending.try_take().unwrap().is_some() && pending.is_over());
            // It can loan buffers, too, and send on the rings.
            drop(honest.loan_with(PoolId::CpuData).unwrap());
            honest.send_inline(1, 0, &[7; 112]).unwrap();
            server.send_inline(1, 0, &[7; 112]).unwrap();
            assert!(server.receive().unwrap().is_some() && honest.receive().unwrap().is_some());
        }
        // When one of them takes its replies, it gets further ones.
        for (pending, _) in &mut kept[..window] {
            while pending.try_take().unwrap().is_some() {}
        }
        let (_, request) = &mut kept[0];
        assert!(request.wait_room(Some(HANGS)).unwrap());
        assert!(self.part.stream(server, request).unwrap());
    }
}

fn negligent_clients_hold_up_no_other(count: usize, changes: &str, window: usize) {
    for part in [Part::Inline, Part::Msg, Part::Data] {
        let ends = ends(&format!("requests={window} {changes}"));
        let clients: Vec<Link> = (0..count).map(|_| ends.client()).collect();
        Negligent { clients: &clients, part }.hold_up_no_other(&ends.server, &ends.client, window);
    }
}

#[test]
fn clients_that_take_no_replies_hold_up_no_other() {
    negligent_clients_hold_up_no_other(12, "ring=16 msg=64x256 data=64x256", 8);
    negligent_clients_hold_up_no_other(12, "ring=2 msg=64x32 data=64x32", 4);
}

#[test]
fn client_that_leaves_some_streams_gets_all_of_another() {
    for part in [Part::Inline, Part::Msg, Part::Data] {
        let ends = ends("requests=4 msg=64x32 data=64x16");
        let server = &ends.server;
        let mut opened = Vec::new();
        for _ in 0..4 {
            let pending = ends.client.request_inline(1, 0, b"all of it").unwrap();
            let mut request = server.receive_request().unwrap().expect("it was just made");
            while part.stream(server, &mut request).is_ok() {}
            opened.push((pending, request));
        }
        let (pending, request) = &mut opened[3];
        for _ in 0..100 {
            assert!(pending.try_take().unwrap().is_some(), "{part:?}");
            while pending.try_take().unwrap().is_some() {}
            assert!(request.wait_room(Some(HANGS)).unwrap());
            assert!(part.stream(server, request).unwrap(), "{part:?}");
        }
    }
}

#[test]
fn as_many_clients_as_there_are_seats_that_take_no_replies_hold_up_no_other() {
    // One seat is the server's, and one the honest client's.
    negligent_clients_hold_up_no_other(62, "ring=16 msg=64x256 data=64x256", 2);
    negligent_clients_hold_up_no_other(62, "ring=1 msg=64x1024 data=64x256", 1);
}

/// Lets each client leave all that it can.
fn leave_all<'a>(
    part: Part,
    server: &'a Link,
    clients: &'a [Link],
    window: usize,
    ask: impl Fn(&'a Link) -> PendingReply<'a>,
) -> Vec<(PendingReply<'a>, Request<'a>)> {
    let mut kept = Vec::new();
    for client in clients {
        for _ in 0..window {
            let pending = ask(client);
            let mut request = server.receive_request().unwrap().expect("it was just made");
            while part.stream(server, &mut request).is_ok() {}
            kept.push((pending, request));
        }
    }
    kept
}

#[test]
fn window_of_single_replies_waits_also_after_a_burst_of_attaches() {
    for part in [Part::Inline, Part::Msg, Part::Data] {
        let ends = ends("requests=8 ring=16 msg=64x256 data=64x256");
        drop((0..50).map(|_| ends.client()).collect::<Vec<_>>());
        let negligent: Vec<Link> = (0..3).map(|_| ends.client()).collect();
        let _kept = leave_all(part, &ends.server, &negligent, 8, ask_inline);
        let mut pending: Vec<_> = (0..8).map(|_| ask_inline(&ends.client)).collect();
        let mut requests: Vec<_> = (0..8).map(|_| take(&ends.server)).collect();
        for request in &mut requests {
            assert!(part.stream(&ends.server, request).unwrap(), "{part:?}");
        }
        assert!(pending.iter_mut().all(|pending| pending.try_take().unwrap().is_some()));
    }
}

fn ask_inline(client: &Link) -> PendingReply<'_> {
    client.request_inline(1, 0, b"all of it").unwrap()
}

fn ask_in_buffer(client: &Link) -> PendingReply<'_> {
    client.request(client.loan().unwrap()).unwrap()
}

#[test]
fn replies_without_data_take_no_share_of_a_data_pool() {
    let ends = ends("requests=4 ring=16 msg=64x256 data=64x16");
    let _pending = ask_inline(&ends.client);
    let mut request = take(&ends.server);
    for _ in 1..REPLIES_MAX {
        assert!(Part::Msg.stream(&ends.server, &mut request).unwrap());
    }
    assert!(Part::Data.stream(&ends.server, &mut request).unwrap(), "all DATA buffers were free");
}

#[test]
fn room_in_the_slot_is_enough_after_it_was_full() {
    let ends = ends("requests=4 ring=16 msg=64x16 data=64x16");
    let negligent = [ends.client()];
    let _kept = leave_all(Part::Msg, &ends.server, &negligent, 4, ask_inline);
    let mut first = ask_inline(&ends.client);
    let mut kept = take(&ends.server);
    assert!(Part::Msg.stream(&ends.server, &mut kept).unwrap(), "it has its share");
    let mut second = ask_inline(&ends.client);
    let mut request = take(&ends.server);
    for _ in 0..REPLIES_MAX {
        assert!(Part::Inline.stream(&ends.server, &mut request).unwrap());
    }
    let refused = Part::Msg.stream(&ends.server, &mut request).unwrap_err();
    assert!(refused.to_string().contains("its share"), "{refused}");
    let full = Part::Inline.stream(&ends.server, &mut request).unwrap_err();
    assert!(full.to_string().contains("to this request"), "{full}");
    assert!(second.try_take().unwrap().is_some());
    assert!(request.wait_room(Some(Duration::ZERO)).unwrap());
    assert!(Part::Inline.stream(&ends.server, &mut request).unwrap());
    assert!(first.try_take().unwrap().is_some());
}

#[test]
fn last_reply_that_is_taken_wakes_no_server() {
    let ends = ends("requests=8 ring=16 msg=64x256");
    let mut pending = ask_inline(&ends.client);
    let mut request = take(&ends.server);
    assert!(request.reply(ends.server.loan().unwrap()).unwrap());
    ends.server.fd().unwrap();
    while notified(&ends.server).is_some() {}
    assert!(pending.try_take().unwrap().is_some() && pending.is_over());
    assert_eq!(notified(&ends.server), None);
}

#[test]
fn server_that_waits_for_a_share_goes_on_when_the_client_takes_last_replies() {
    let _watchdog = Watchdog::start();
    let ends = ends("requests=16 ring=16 msg=64x16");
    let mut pending: Vec<_> = (0..16).map(|_| ask_inline(&ends.client).into_owned()).collect();
    let taker = std::thread::spawn(move || {
        for pending in &mut pending {
            assert!(pending.wait(Some(HANGS)).unwrap().is_some() && pending.is_over());
        }
    });
    let mut refused = 0;
    let mut requests: Vec<_> = (0..16).map(|_| take(&ends.server)).collect();
    for request in &mut requests {
        let mut loan = Some(ends.server.loan().unwrap());
        while let Some(unsent) = loan.take() {
            if let Err(full) = request.reply(unsent) {
                refused += 1;
                loan = Some(full.loan);
                assert!(request.wait_room(Some(HANGS)).unwrap(), "refused {refused}");
            }
        }
    }
    taker.join().unwrap();
}

#[test]
fn requests_in_buffers_fit_beside_the_replies_that_clients_leave() {
    // A third of the pool for them: 14 clients with 4 requests each. See "What is bounded" in docs/architecture.md.
    for part in [Part::Msg, Part::Data] {
        let ends = ends("requests=4 ring=16 msg=64x176 data=64x176");
        let negligent: Vec<Link> = (0..13).map(|_| ends.client()).collect();
        let _kept = leave_all(part, &ends.server, &negligent, 4, ask_in_buffer);
        for _ in 0..100 {
            let mut pending: Vec<_> = (0..4).map(|_| ask_in_buffer(&ends.client)).collect();
            let mut requests: Vec<_> = (0..4).map(|_| take(&ends.server)).collect();
            for request in &mut requests {
                assert!(part.stream(&ends.server, request).unwrap(), "{part:?}");
            }
            assert!(pending.iter_mut().all(|pending| pending.try_take().unwrap().is_some()));
        }
    }
}
