//! Links in tasks of tokio: waits end, nothing is lost when a future is dropped, and one task waits for many links.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use futures_sink::Sink;
use shmesh::config::PoolId;
use shmesh::{AsyncLink, Link, LinkOptions, PeerEvent, Side};
use shmesh_testing::{Peer, Watchdog, config, ipc_dir, send};

const MODES: [&str; 2] = ["mode=mpmc", "mode=spsc"];

fn run<T>(task: impl Future<Output = T>) -> T {
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
fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
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

const fn is_send<T: Send>(_: &T) {}

/// Checked by the compiler, and never run.
const _: fn(&mut AsyncLink) = |link| {
    is_send(&*link);
    is_send(&link.recv());
    is_send(&link.loan(1));
    is_send(&link.send_inline(1, 0, b""));
    is_send(&link.next_event());
};
