//! Broadcast links in tasks of tokio: every reader gets everything, policies for slow readers, nothing is lost when a future is
//! dropped, and waiting takes neither threads nor descriptors.

use std::future::Future;
use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use futures_sink::Sink;
use shmesh::config::PoolId;
use shmesh::{AsyncLink, LinkOptions, OwnedMessage, PeerEvent, Side};
use shmesh_testing::{Peer, Watchdog, config, ipc_dir, kind_of, own_process, refused};

use crate::async_link::{next, poll, run};

struct World {
    options: LinkOptions,
    writer: AsyncLink,
    dir: tempfile::TempDir,
}

impl World {
    /// In a runtime, as `reader`.
    fn new(changes: &str) -> Self {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let link = options.create(&config("link", &format!("mode=broadcast {changes}"))).unwrap();
        Self { options, writer: AsyncLink::new(link).unwrap(), dir }
    }

    fn reader(&self) -> AsyncLink {
        AsyncLink::new(self.options.attach("link", Side::Secondary).unwrap()).unwrap()
    }

    /// The buffers that the writer can loan when all readers are past all messages.
    fn free_buffers(&self) -> usize {
        let loans: Vec<_> = std::iter::from_fn(|| self.writer.link().loan().ok()).collect();
        loans.len()
    }
}

/// Sends a message by one of the ways, in turns.
async fn send(writer: &mut AsyncLink, id: i32) {
    if id % 3 == 0 {
        return writer.send_inline(id, 0, &id.to_le_bytes()).await.unwrap();
    }
    let mut loan = writer.loan_with(PoolId::CpuData, 4, 8).await.unwrap();
    loan.msg_mut().copy_from_slice(&id.to_le_bytes());
    loan.data_mut().fill(id.to_le_bytes()[0]);
    if id % 3 == 1 {
        return writer.send(loan).await.unwrap();
    }
    let mut sink = Pin::new(writer);
    std::future::poll_fn(|cx| sink.as_mut().poll_ready(cx)).await.unwrap();
    sink.as_mut().start_send(loan).unwrap();
    std::future::poll_fn(|cx| sink.as_mut().poll_flush(cx)).await.unwrap();
}

fn id_of(message: &OwnedMessage) -> i32 {
    let id = i32::from_le_bytes(message.msg().try_into().unwrap());
    let data_len = if id % 3 == 0 { 0 } else { 8 };
    assert_eq!(message.data().len(), data_len);
    assert!(message.data().iter().all(|&byte| byte == id.to_le_bytes()[0]));
    id
}

#[test]
fn every_reader_gets_everything_in_order() {
    let _watchdog = Watchdog::start();
    const COUNT: i32 = 500;
    for backing in ["named", "memfd"] {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            // So small that the writer waits for slots and for buffers.
            let mut world = World::new(&format!("ring=4 msg=64x3 data=64x3 backing={backing}"));
            let (mut by_recv, mut by_stream, mut impatient) =
                (world.reader(), world.reader(), world.reader());
            let readers = [
                tokio::spawn(async move {
                    for id in 0..COUNT {
                        let message = by_recv.recv().await.unwrap();
                        // Held across an `.await`.
                        tokio::task::yield_now().await;
                        assert_eq!(id_of(&message), id);
                    }
                }),
                tokio::spawn(async move {
                    for id in 0..COUNT {
                        assert_eq!(id_of(&next(&mut by_stream).await.unwrap().unwrap()), id);
                    }
                }),
                tokio::spawn(async move {
                    for id in 0..COUNT {
                        // Futures that are dropped at their first wait, again and again.
                        let message = loop {
                            tokio::select! {
                                biased;
                                message = impatient.recv() => break message.unwrap(),
                                () = tokio::task::yield_now() => {}
                            }
                        };
                        assert_eq!(id_of(&message), id);
                    }
                }),
            ];
            for id in 0..COUNT {
                send(&mut world.writer, id).await;
            }
            for reader in readers {
                reader.await.unwrap();
            }
            assert_eq!(world.free_buffers(), 3, "{backing}");
        });
    }
}

#[test]
fn tasks_are_woken_by_other_processes() {
    let _watchdog = Watchdog::start();
    for slow in ["wait", "skip", "evict"] {
        let dir = ipc_dir();
        let mut writer = Peer::start(dir.path());
        writer.tell(&format!("create link mode=broadcast slow={slow} backing=memfd"));
        run(async {
            let options = LinkOptions::new().dir(dir.path());
            let [mut one, mut other] =
                [(); 2].map(|()| AsyncLink::new(options.attach("link", Side::Secondary).unwrap()).unwrap());
            for id in 0..10 {
                let (one, other, ()) = tokio::join!(one.recv(), other.recv(), async {
                    tokio::task::yield_now().await;
                    writer.tell(&format!("send {id} text"));
                    writer.tell("notify");
                });
                assert_eq!([one, other].map(|message| message.unwrap().msg_id()), [id; 2], "{slow}");
            }
        });
    }
}

#[test]
fn writer_waits_for_a_reader_in_another_process() {
    let _watchdog = Watchdog::start();
    run(async {
        let mut world = World::new("ring=4");
        let mut reader = Peer::start(world.dir.path());
        reader.tell("attach link secondary 0");
        for id in 0..4 {
            send(&mut world.writer, id).await;
        }
        {
            let mut sending = pin!(world.writer.send_inline(4, 0, b""));
            assert!(poll(sending.as_mut()).is_pending());
            let (sent, ()) = tokio::join!(sending, async { drop(reader.ask("receive")) });
            sent.unwrap();
        }
        // A reader that died is waited for no longer.
        let mut sending = pin!(world.writer.send_inline(5, 0, b""));
        assert!(poll(sending.as_mut()).is_pending());
        reader.kill();
        sending.await.unwrap();
    });
}

#[test]
fn dropped_futures_lose_no_message_and_no_buffer() {
    let _watchdog = Watchdog::start();
    run(async {
        let mut world = World::new("ring=4 msg=64x4 data=64x4");
        let [mut one, mut other] = [world.reader(), world.reader()];
        assert!(poll(pin!(one.recv())).is_pending() && poll(pin!(next(&mut one))).is_pending());
        for id in [1, 2, 4, 5] {
            send(&mut world.writer, id).await;
        }
        // All buffers and slots are in use. What was given up is not sent.
        assert!(poll(pin!(world.writer.loan(4))).is_pending());
        assert!(poll(pin!(world.writer.loan_with(PoolId::CpuData, 4, 4))).is_pending());
        assert!(poll(pin!(world.writer.send_inline(9, 0, b"unsent"))).is_pending());
        assert_eq!(id_of(&one.recv().await.unwrap()), 1);
        assert_eq!(id_of(&other.recv().await.unwrap()), 1);
        let loan = world.writer.loan(0).await.unwrap();
        world.writer.send_inline(6, 0, &6_i32.to_le_bytes()).await.unwrap();
        assert!(poll(pin!(world.writer.send(loan))).is_pending());
        for reader in [&mut one, &mut other] {
            for id in [2, 4, 5, 6] {
                assert_eq!(id_of(&reader.recv().await.unwrap()), id);
            }
            assert!(poll(pin!(reader.recv())).is_pending());
            assert_eq!(reader.link().queued(), 0);
        }
        assert_eq!(world.free_buffers(), 4);
    });
}

#[test]
fn writer_with_skip_never_waits_and_readers_count_what_they_lost() {
    let _watchdog = Watchdog::start();
    run(async {
        let mut world = World::new("slow=skip ring=4");
        let mut reader = world.reader();
        for id in 0..100 {
            assert!(poll(pin!(send(&mut world.writer, id))).is_ready());
            // The runtime makes a task pause that does not.
            tokio::task::yield_now().await;
        }
        assert_eq!((id_of(&reader.recv().await.unwrap()), reader.link().lost()), (99, 99));
        assert!(poll(pin!(reader.recv())).is_pending());
        let (message, ()) = tokio::join!(next(&mut reader), send(&mut world.writer, 100));
        assert_eq!((id_of(&message.unwrap().unwrap()), reader.link().lost()), (100, 99));
    });
}

#[test]
fn slow_reader_is_evicted_and_its_futures_end() {
    let _watchdog = Watchdog::start();
    const LIMIT: Duration = Duration::from_millis(30);
    run(async {
        let mut world = World::new("slow=evict evict_after=30 ring=4");
        let [mut slow, mut watching, mut good] = [world.reader(), world.reader(), world.reader()];
        let began = Instant::now();
        let writing = async {
            for id in 0..20 {
                send(&mut world.writer, id).await;
            }
        };
        let reading = async {
            for id in 0..20 {
                assert_eq!(id_of(&good.recv().await.unwrap()), id);
            }
        };
        // It waits for events only, and reads nothing.
        let watching_events = async {
            loop {
                match watching.next_event().await {
                    Ok(PeerEvent::Evicted(who)) if who.seat == watching.link().seat() => break,
                    Ok(_) => {}
                    Err(error) => break assert_eq!(kind_of(&error), "Evicted"),
                }
            }
        };
        tokio::join!(writing, reading, watching_events);
        assert!(began.elapsed() >= LIMIT);
        assert_eq!(kind_of(&refused(slow.recv().await)), "Evicted");
        assert_eq!(kind_of(&refused(next(&mut slow).await.unwrap())), "Evicted");
        assert!(next(&mut slow).await.is_none());
        assert_eq!(kind_of(&refused(watching.recv().await)), "Evicted");
        assert_eq!(world.writer.link().readers(), 1);
    });
}

#[test]
fn one_task_waits_for_many_links() {
    let _watchdog = Watchdog::start();
    run(async {
        let mut worlds = ["slow=wait", "slow=skip", "slow=evict"].map(World::new);
        let [mut a, mut b, mut c] = [worlds[0].reader(), worlds[1].reader(), worlds[2].reader()];
        let mut counts = [0; 3];
        for round in 0..60 {
            send(&mut worlds[round % 3].writer, i32::try_from(round).unwrap()).await;
            let from = tokio::select! {
                message = a.recv() => message.map(|_| 0),
                message = next(&mut b) => message.unwrap().map(|_| 1),
                message = c.recv() => message.map(|_| 2),
            };
            counts[from.unwrap()] += 1;
        }
        assert_eq!(counts, [20; 3]);
    });
}

#[test]
fn waiting_takes_no_thread_and_a_link_a_bounded_number_of_descriptors() {
    own_process(|| {
        const LINKS: usize = 50;
        let _watchdog = Watchdog::start();
        let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
        run(async {
            let make = |_| {
                let world = World::new("ring=4 msg=64x4");
                let readers = [world.reader(), world.reader()];
                (world, readers)
            };
            // The first starts what all of them share.
            let first = make(0);
            let (threads, fds) = (count("task"), count("fd"));
            let mut all: Vec<_> = (0..LINKS).map(make).collect();
            for (world, _) in &mut all {
                for id in [0, 3, 6, 9] {
                    send(&mut world.writer, id).await;
                }
            }
            let with_links = count("fd");
            assert_eq!(count("task"), threads);
            let for_links = with_links - fds;
            assert!(for_links <= 3 * 3 * LINKS, "{for_links} for {LINKS} links of three handles");
            // Of each link, the writer waits for room, one reader for messages and the other for events.
            let mut waits: Vec<Pin<Box<dyn Future<Output = ()>>>> = Vec::new();
            let mut rest = Vec::new();
            for (World { mut writer, options, dir }, [mut one, mut other]) in all {
                rest.push((options, dir));
                waits.push(Box::pin(async move { writer.send_inline(12, 0, b"").await.unwrap() }));
                waits.push(Box::pin(async move {
                    loop {
                        drop(one.recv().await.unwrap());
                    }
                }));
                waits.push(Box::pin(async move {
                    loop {
                        other.next_event().await.unwrap();
                    }
                }));
            }
            for _ in 0..3 {
                for wait in &mut waits {
                    assert!(poll(wait.as_mut()).is_pending());
                }
                assert_eq!((count("task"), count("fd")), (threads, with_links));
            }
            drop(waits);
            assert_eq!((count("task"), count("fd")), (threads, fds), "with the links go their descriptors");
            drop((first, rest));
        });
    });
}
