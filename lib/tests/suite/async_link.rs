//! Links in tasks of tokio: waits end, nothing is lost when a future is dropped, and one task waits for many links.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use futures_sink::Sink;
use shmesh::config::PoolId;
use shmesh::{AsyncLink, AsyncPendingReply, ErrorKind, Link, LinkOptions, PeerEvent, Side};
use shmesh_testing::{Peer, Watchdog, config, ipc_dir, kind_of, refused, send};

const MODES: [&str; 2] = ["mode=mpmc", "mode=spsc"];

pub(crate) fn run<T>(task: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(task)
}

/// The primary side in this process, and a peer that is a process of its own.
fn with_peer(dir: &std::path::Path, changes: &str) -> (Link, Peer) {
    let link = LinkOptions::new().dir(dir).create(&config("link", changes)).unwrap();
    let mut peer = Peer::start(dir);
    peer.tell("attach link secondary 0");
    (link, peer)
}

fn pair(dir: &std::path::Path, changes: &str) -> (AsyncLink, AsyncLink) {
    let options = LinkOptions::new().dir(dir);
    let primary = options.create(&config("link", changes)).unwrap();
    let secondary = options.attach("link", Side::Secondary).unwrap();
    (AsyncLink::new(primary).unwrap(), AsyncLink::new(secondary).unwrap())
}

/// Polls a future once.
pub(crate) fn poll<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn task_is_woken_by_another_process() {
    let _watchdog = Watchdog::start();
    for mode in MODES {
        let dir = ipc_dir();
        let (link, mut peer) = with_peer(dir.path(), mode);
        run(async {
            let mut link = AsyncLink::new(link).unwrap();
            for id in 0..20 {
                // Asleep first, at times: whether it is does not matter.
                let (message, ()) = tokio::join!(link.recv(), async {
                    tokio::task::yield_now().await;
                    peer.tell(&format!("send {id} text"));
                    peer.tell("notify");
                });
                let message = message.unwrap();
                assert_eq!((message.msg_id(), message.msg()), (id, &b"text"[..]), "{mode}");
            }
        });
    }
}

#[test]
fn stream_and_sink_move_more_than_fits_in_order() {
    let _watchdog = Watchdog::start();
    const COUNT: i32 = 2_000;
    for mode in MODES {
        let dir = ipc_dir();
        let changes = format!("{mode} ring=4 msg=64x3 data=64x3");
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut primary, mut secondary) = pair(dir.path(), &changes);
            // Their futures are `Send`, and their messages are held across `.await`.
            let sender = tokio::spawn(async move {
                for id in 0..COUNT {
                    let mut loan = secondary.loan_with(PoolId::CpuData, 4, 8).await.unwrap();
                    loan.msg_mut().copy_from_slice(&id.to_le_bytes());
                    loan.data_mut().fill(7);
                    if id % 2 == 0 {
                        secondary.send(loan).await.unwrap();
                        continue;
                    }
                    let mut sink = Pin::new(&mut secondary);
                    std::future::poll_fn(|cx| sink.as_mut().poll_ready(cx)).await.unwrap();
                    sink.as_mut().start_send(loan).unwrap();
                    std::future::poll_fn(|cx| sink.as_mut().poll_flush(cx)).await.unwrap();
                }
                secondary.send_inline(-1, 0, b"end").await.unwrap();
            });
            let mut received = 0;
            let mut last = None;
            loop {
                let mut stream = Pin::new(&mut primary);
                let message = std::future::poll_fn(|cx| stream.as_mut().poll_next(cx)).await;
                let message = message.expect("it never ends").unwrap();
                tokio::task::yield_now().await;
                if message.msg_id() == -1 {
                    break;
                }
                assert_eq!((message.msg(), message.data()), (&i32::to_le_bytes(received)[..], &[7; 8][..]));
                received += 1;
                last = Some(message);
            }
            assert_eq!((received, last.unwrap().data_len()), (COUNT, 8), "{mode}");
            sender.await.unwrap();
        });
    }
}

#[test]
fn dropped_futures_lose_no_message_and_no_buffer() {
    let _watchdog = Watchdog::start();
    for mode in MODES {
        let dir = ipc_dir();
        run(async {
            let (mut primary, mut secondary) = pair(dir.path(), &format!("{mode} ring=4 msg=64x4 data=64x4"));
            for id in 0..4 {
                send(secondary.link(), id, "text").unwrap();
            }
            // The ring is full, and the pool empty: neither is waited for to the end.
            assert!(poll(pin!(secondary.loan(4))).is_pending());
            assert!(poll(pin!(secondary.send_inline(9, 0, b"unsent"))).is_pending());
            for id in 0..4 {
                let received = primary.recv().await.unwrap();
                assert_eq!(received.msg_id(), id, "{mode}");
                drop(received);
                // A wait that is given up: what comes later is the next one's.
                if id == 3 {
                    assert!(poll(pin!(primary.recv())).is_pending());
                }
            }
            let loan = secondary.loan(4).await.unwrap();
            secondary.send(loan).await.unwrap();
            assert_eq!(primary.recv().await.unwrap().msg_id(), 0);
            // An unsent loan that was dropped with its future.
            for _ in 0..4 {
                send(secondary.link(), 5, "full").unwrap();
                if secondary.link().loan().is_err() {
                    break;
                }
            }
            while primary.link().receive().unwrap().is_some() {}
            let loans: Vec<_> = std::iter::from_fn(|| secondary.link().loan().ok()).collect();
            assert_eq!(loans.len(), 4, "{mode}: every buffer is free and known");
        });
    }
}

#[test]
fn sender_waits_until_there_is_a_slot() {
    let _watchdog = Watchdog::start();
    for mode in MODES {
        let dir = ipc_dir();
        run(async {
            let (mut primary, mut secondary) = pair(dir.path(), &format!("{mode} ring=4"));
            for id in 0..4 {
                secondary.send_inline(id, 0, b"").await.unwrap();
            }
            let loan = secondary.loan(0).await.unwrap();
            {
                let mut sending = pin!(secondary.send(loan));
                for _ in 0..4 {
                    assert!(poll(sending.as_mut()).is_pending(), "{mode}: the ring is full");
                }
                let (sent, received) = tokio::join!(sending, primary.recv());
                sent.unwrap();
                assert_eq!(received.unwrap().msg_id(), 0);
            }
            // Given up before there was a slot: not sent.
            let loan = secondary.loan(0).await.unwrap();
            assert!(poll(pin!(secondary.send(loan))).is_pending());
            for id in [1, 2, 3, 0] {
                assert_eq!(primary.recv().await.unwrap().msg_id(), id, "{mode}");
            }
            assert!(!primary.link().has_message(), "{mode}");
        });
    }
}

#[test]
fn one_task_waits_for_many_links_and_for_events() {
    let _watchdog = Watchdog::start();
    let dirs = [ipc_dir(), ipc_dir(), ipc_dir()];
    run(async {
        let [(mut a, to_a), (mut b, to_b), (mut c, to_c)] =
            [0, 1, 2].map(|i: usize| pair(dirs[i].path(), MODES[i % 2]));
        let mut counts = [0; 3];
        for round in 0..30 {
            send([&to_a, &to_b, &to_c][round % 3].link(), 1, "text").unwrap();
            [&to_a, &to_b, &to_c][round % 3].link().notify().unwrap();
            let from = tokio::select! {
                message = a.recv() => message.map(|_| 0),
                message = b.recv() => message.map(|_| 1),
                message = c.recv() => message.map(|_| 2),
            };
            counts[from.unwrap()] += 1;
        }
        assert_eq!(counts, [10; 3]);

        assert!(matches!(b.next_event().await.unwrap(), PeerEvent::Attached(_)));
        let (event, ()) = tokio::join!(b.next_event(), async {
            tokio::task::yield_now().await;
            drop(to_b);
        });
        assert!(matches!(event.unwrap(), PeerEvent::Detached(_)));
    });
}

pub(crate) async fn next<S: Stream + Unpin>(stream: &mut S) -> Option<S::Item> {
    std::future::poll_fn(|cx| Pin::new(&mut *stream).poll_next(cx)).await
}

#[test]
fn tasks_await_the_replies_of_another_process() {
    let _watchdog = Watchdog::start();
    const TASKS: usize = 8;
    const EACH: usize = 100;
    let dir = ipc_dir();
    let mut server = Peer::start(dir.path());
    server.tell("create link requests=4 spin=50");
    server.order(&format!("answer {}", TASKS * EACH));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let link = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
        let mut client = AsyncLink::new(link).unwrap();
        let mut tasks = Vec::new();
        for i in 0..TASKS * EACH {
            let text = i.to_string();
            // Waits while the window is full: tasks take their replies meanwhile.
            let mut pending = if i % 2 == 0 {
                client.request_inline(1, 0, text.as_bytes()).await.unwrap()
            } else {
                let mut loan = client.loan(text.len()).await.unwrap();
                loan.msg_mut().copy_from_slice(text.as_bytes());
                client.request(loan).await.unwrap()
            };
            tasks.push(tokio::spawn(async move {
                let reply = pending.recv().await.unwrap();
                assert_eq!((reply.msg(), pending.is_over()), (text.as_bytes(), true));
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    });
    assert_eq!(server.answer(), (TASKS * EACH).to_string());
}

#[test]
fn task_answers_requests_of_other_processes() {
    let _watchdog = Watchdog::start();
    const EACH: usize = 200;
    let dir = ipc_dir();
    let server = LinkOptions::new().dir(dir.path()).create(&config("link", "requests=2 spin=50")).unwrap();
    let mut clients = [Peer::start(dir.path()), Peer::start(dir.path())];
    for client in &mut clients {
        client.tell("attach link secondary 60000");
        client.order(&format!("ask {EACH}"));
    }
    run(async {
        let mut server = AsyncLink::new(server).unwrap();
        let mut tasks = Vec::new();
        for _ in 0..2 * EACH {
            let mut request = server.receive_request().await.unwrap();
            let loan = match request.is_inline() {
                true => None,
                false => Some(server.loan(request.msg().len()).await.unwrap()),
            };
            tasks.push(tokio::spawn(async move {
                tokio::task::yield_now().await;
                let bytes = request.msg().to_vec();
                assert!(match loan {
                    None => request.reply_inline(1, 0, &bytes).await.unwrap(),
                    Some(mut loan) => {
                        loan.msg_mut().copy_from_slice(&bytes);
                        request.reply(loan).await.unwrap()
                    }
                });
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    });
    for client in &mut clients {
        assert_eq!(client.answer(), EACH.to_string(), "each reply is its caller's");
    }
}

#[test]
fn replies_are_a_stream_that_ends() {
    let _watchdog = Watchdog::start();
    const TOTAL: i32 = 100;
    let dir = ipc_dir();
    run(async {
        let (mut server, mut client) = pair(dir.path(), "requests=1 msg=64x32");
        let mut pending = client.request_inline(1, 0, b"").await.unwrap();
        let serving = async {
            let mut request = server.receive_request().await.unwrap();
            for id in 0..TOTAL {
                if id % 2 == 0 {
                    assert!(request.stream_inline(id, 0, b"part").await.unwrap());
                } else {
                    let loan = server.link().loan().unwrap().with_msg_id(id).into_owned();
                    assert!(request.stream(loan).await.unwrap());
                }
            }
            assert!(request.reply_inline(TOTAL, 0, b"last").await.unwrap());
            assert_eq!(kind_of(&refused(request.reply_inline(0, 0, b"").await)), "RequestOver");
        };
        let receiving = async {
            for id in 0..=TOTAL {
                // Slower than the server, at times.
                tokio::task::yield_now().await;
                assert_eq!(next(&mut pending).await.unwrap().unwrap().msg_id(), id);
            }
            assert!(next(&mut pending).await.is_none() && pending.is_over());
            assert_eq!(kind_of(&refused(pending.recv().await)), "RequestOver");
        };
        tokio::join!(serving, receiving);
        // One that fails yields the error, and ends.
        let mut pending = client.request_inline(1, 0, b"").await.unwrap();
        let ((), failed) =
            tokio::join!(async { drop(server.receive_request().await.unwrap()) }, next(&mut pending),);
        assert_eq!(kind_of(&refused(failed.unwrap())), "Unanswered");
        assert!(next(&mut pending).await.is_none());
    });
}

#[test]
fn dropped_futures_lose_no_reply_and_dropped_requests_free_the_window() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    run(async {
        let (mut server, mut client) = pair(dir.path(), "requests=1 msg=64x4");
        assert!(poll(pin!(server.receive_request())).is_pending());
        let mut pending = client.request_inline(1, 0, b"").await.unwrap();
        // The window is full; a request that is given up was not made.
        assert!(poll(pin!(client.request_inline(9, 0, b""))).is_pending());
        let loan = client.loan(1).await.unwrap();
        assert!(poll(pin!(client.request(loan))).is_pending());
        assert!(poll(pin!(pending.recv())).is_pending());
        let mut request = server.receive_request().await.unwrap();
        assert!(request.stream_inline(2, 0, b"").await.unwrap());
        assert_eq!(pending.recv().await.unwrap().msg_id(), 2);
        assert!(poll(pin!(pending.recv())).is_pending());
        // Full: a reply that is given up was not sent.
        for _ in 0..shmesh::REPLIES_MAX {
            assert!(request.stream_inline(3, 0, b"").await.unwrap());
        }
        let loan = server.loan(1).await.unwrap();
        assert!(poll(pin!(request.stream(loan))).is_pending());
        let waiting = request.stream_inline(4, 0, b"");
        let (sent, ()) = tokio::join!(waiting, async {
            tokio::task::yield_now().await;
            drop(pending);
        });
        assert!(!sent.unwrap() && !request.is_wanted());
        drop(request);
        let mut pending = client.request_inline(5, 0, b"").await.unwrap();
        let mut request = server.receive_request().await.unwrap();
        assert_eq!(request.msg_id(), 5, "the next one");
        assert!(request.reply_inline(6, 0, b"").await.unwrap());
        assert_eq!(pending.recv().await.unwrap().msg_id(), 6);
        let loans: Vec<_> = std::iter::from_fn(|| client.link().loan().ok()).collect();
        assert_eq!(loans.len(), 4, "every buffer is free and known");
    });
}

#[test]
fn task_is_woken_when_the_server_of_its_request_dies() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let mut server = Peer::start(dir.path());
    server.tell("create link requests=4");
    run(async {
        let link = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
        let mut client = AsyncLink::new(link).unwrap();
        let mut pending = client.request_inline(1, 0, b"").await.unwrap();
        let pid = server.pid();
        let (reply, ()) = tokio::join!(
            async {
                drop(pending.recv().await.unwrap());
                pending.recv().await
            },
            async {
                assert_eq!(server.ask("hold-requests 1 1"), "1");
                tokio::task::yield_now().await;
                server.kill();
            }
        );
        let error = refused(reply);
        assert!(matches!(error.kind(), ErrorKind::ServerGone { pid: dead, .. } if *dead == pid), "{error}");
    });
}

#[test]
fn pending_replies_outlive_their_async_link() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    run(async {
        let (mut server, mut client) = pair(dir.path(), "requests=2");
        let mut pending = client.request_inline(1, 0, b"").await.unwrap();
        drop(client);
        assert!(poll(pin!(pending.recv())).is_pending());
        let (reply, ()) = tokio::join!(pending.recv(), async {
            let mut request = server.receive_request().await.unwrap();
            tokio::task::yield_now().await;
            assert!(request.reply_inline(2, 0, b"").await.unwrap());
        });
        assert_eq!(reply.unwrap().msg_id(), 2);
        drop(pending);
        assert_eq!(server.link().participants().count(), 1);
    });
}

#[test]
fn stream_of_an_evicted_handle_yields_the_error_once_and_ends() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    run(async {
        let (primary, mut secondary) = pair(dir.path(), "mode=mpmc");
        assert!(poll(pin!(next(&mut secondary))).is_pending());
        let (item, ()) = tokio::join!(next(&mut secondary), async {
            tokio::task::yield_now().await;
            primary.link().evict(secondary_seat(primary.link())).unwrap();
        });
        assert_eq!(kind_of(&refused(item.unwrap())), "Evicted");
        assert!(next(&mut secondary).await.is_none() && next(&mut secondary).await.is_none());
    });
}

fn secondary_seat(primary: &Link) -> shmesh::SeatIndex {
    primary.participants().find(|other| other.word.side() == Side::Secondary).unwrap().seat
}

const fn is_send<T: Send>(_: &T) {}

/// Checked by the compiler, and never run.
const _: fn(&mut AsyncLink) = |link| {
    is_send(&*link);
    is_send(&link.recv());
    is_send(&link.loan(1));
    is_send(&link.send_inline(1, 0, b""));
    is_send(&link.next_event());
    is_send(&link.request_inline(1, 0, b""));
    is_send(&link.receive_request());
};

/// Checked by the compiler, and never run.
const _: fn(&mut AsyncPendingReply) = |pending| {
    is_send(&pending.recv());
};

#[test]
fn task_that_gets_errors_only_yields_to_others() {
    let _watchdog = Watchdog::start();
    for asks in [false, true] {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let mut config = config("link", "mode=mpmc");
        config.request_window = 2;
        let server = options.create(&config).unwrap();
        let client = options.attach("link", Side::Secondary).unwrap();
        let yields = run(async {
            let seat = server.seat();
            let mut server = AsyncLink::new(server).unwrap();
            client.evict(seat).unwrap();
            let other = tokio::spawn(async {});
            for round in 0..1_000_000 {
                let error = match asks {
                    false => server.recv().await.map(drop),
                    true => server.receive_request().await.map(drop),
                };
                assert_eq!(kind_of(&error.unwrap_err()), "Evicted");
                if other.is_finished() {
                    return round;
                }
            }
            panic!("the other task never ran");
        });
        assert!(yields > 0, "in the budget of one turn, at least one error");
    }
}

#[test]
fn typed_values_wait_for_room_and_other_messages_are_refused() {
    let _watchdog = Watchdog::start();
    for mode in MODES {
        let dir = ipc_dir();
        run(async {
            let (primary, secondary) = pair(dir.path(), &format!("{mode} ring=2 msg=64x2 data=4096x2"));
            let untyped = secondary.link().try_clone().unwrap();
            let (mut primary, mut secondary) =
                (primary.typed::<[u64]>().unwrap(), secondary.typed::<[u64]>().unwrap());
            let (values, sent) = tokio::join!(
                async {
                    let mut values = Vec::new();
                    for _ in 0..100 {
                        // Held across an `.await`.
                        let value = primary.recv().await?;
                        tokio::task::yield_now().await;
                        values.push(value.value().to_vec());
                    }
                    Ok::<_, shmesh::Error>(values)
                },
                async {
                    for len in 0..100 {
                        secondary.send(&vec![7; len]).await?;
                    }
                    Ok::<_, shmesh::Error>(())
                }
            );
            sent.unwrap();
            let expected: Vec<_> = (0..100).map(|len| vec![7; len]).collect();
            assert_eq!(values.unwrap(), expected, "{mode}");

            let other = AsyncLink::new(untyped.try_clone().unwrap()).unwrap().typed::<u32>();
            assert_eq!(kind_of(&other.map(drop).unwrap_err()), "OtherType");
            drop(secondary);
            if mode == "mode=mpmc" {
                untyped.send_inline(1, 0, &[0; 3]).unwrap();
                assert_eq!(kind_of(&primary.recv().await.map(drop).unwrap_err()), "NotOfType");
            }
            primary.into_link().send_inline(1, 0, b"untyped").await.unwrap();
        });
    }
}
