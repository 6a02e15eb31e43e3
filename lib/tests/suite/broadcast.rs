//! Broadcast rings: each reader gets everything, newcomers get the history, slow readers are waited for, overtaken or evicted,
//! and readers and writers may die.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use shmesh::config::{MAX_READERS, PoolId};
use shmesh::{ErrorKind, Link, LinkOptions, PeerEvent, Side};
use shmesh_testing::{
    HANGS, Peer, Watchdog, config, ipc_dir, kind_of, notified, receive, refused, send, until,
};

const SLOW: [&str; 3] = ["slow=wait", "slow=skip", "slow=evict"];

struct World {
    options: LinkOptions,
    writer: Link,
    dir: tempfile::TempDir,
}

impl World {
    fn new(changes: &str) -> Self {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let writer = options.create(&config("link", &format!("mode=broadcast {changes}"))).unwrap();
        Self { options, writer, dir }
    }

    fn reader(&self) -> Link {
        self.options.attach("link", Side::Secondary).unwrap()
    }

    fn send(&self, id: i32) {
        send(&self.writer, id, &id.to_string()).unwrap();
    }
}

/// The ids of all messages that wait.
fn drain(reader: &Link) -> Vec<i32> {
    std::iter::from_fn(|| receive(reader).unwrap())
        .map(|(id, text)| {
            assert_eq!(text, id.to_string());
            id
        })
        .collect()
}

#[test]
fn every_reader_gets_everything_in_order() {
    for backing in ["", "backing=memfd", "notify=off"] {
        for slow in SLOW {
            let world = World::new(&format!("{slow} {backing}"));
            let readers = [world.reader(), world.reader(), world.reader()];
            // Several times round the ring and the pools.
            for id in 0..100 {
                match id % 3 {
                    0 => world.writer.send_inline(id, 1, &[7; 112]).unwrap(),
                    1 => world.send(id),
                    _ => {
                        let mut loan = world.writer.loan_with(PoolId::CpuData).unwrap();
                        loan.resize_msg(3).unwrap().copy_from_slice(b"msg");
                        loan.resize_data(4096).unwrap().fill(id.to_le_bytes()[0]);
                        loan.with_msg_id(id).send().unwrap();
                    }
                }
                for reader in &readers {
                    assert!(reader.has_message() && reader.queued() == 1);
                    let message = reader.receive().unwrap().expect("it was just sent");
                    assert_eq!(message.msg_id(), id, "{slow} {backing}");
                    match id % 3 {
                        0 => assert!(message.is_inline() && message.msg() == [7; 112]),
                        1 => assert_eq!(message.msg(), id.to_string().as_bytes()),
                        _ => {
                            assert_eq!(
                                (message.msg(), message.data_pool()),
                                (&b"msg"[..], Some(PoolId::CpuData))
                            );
                            assert!(message.data() == [id.to_le_bytes()[0]; 4096]);
                        }
                    }
                }
            }
            assert!(readers.iter().all(|reader| reader.lost() == 0 && !reader.has_message()));
        }
    }
}

#[test]
fn slowest_reader_sets_the_pace() {
    let world = World::new("ring=4");
    let (slow, fast) = (world.reader(), world.reader());
    for id in 0..4 {
        world.send(id);
    }
    assert_eq!(drain(&fast), [0, 1, 2, 3]);
    let full = refused(send(&world.writer, 4, "4"));
    assert!(matches!(full.kind(), ErrorKind::Full { len: 4, .. }) && full.is_retryable());
    // A message counts until it is dropped.
    let first = slow.receive().unwrap().expect("four wait");
    assert_eq!(kind_of(&refused(send(&world.writer, 4, "4"))), "Full");
    let second = slow.receive().unwrap().expect("three wait");
    drop(second);
    assert_eq!(kind_of(&refused(world.writer.send_inline(4, 0, b"4"))), "Full", "the first is older");
    assert_eq!(first.msg(), b"0");
    drop(first);
    world.send(4);
    world.send(5);
    assert_eq!(drain(&slow), [2, 3, 4, 5]);
    assert_eq!(drain(&fast), [4, 5]);
}

#[test]
fn batch_is_received_in_order_and_held_as_one() {
    let world = World::new("ring=8");
    let reader = world.reader();
    (0..8).for_each(|id| world.send(id));
    let mut messages = Vec::new();
    assert_eq!(reader.receive_batch(&mut messages, 5).unwrap(), 5);
    assert_eq!(messages.iter().map(|message| message.msg_id()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(kind_of(&refused(send(&world.writer, 8, "8"))), "Full");
    messages.clear();
    (8..13).for_each(|id| world.send(id));
    assert_eq!(reader.receive_batch(&mut messages, 100).unwrap(), 8);
}

#[test]
fn newcomers_get_the_history() {
    for slow in SLOW {
        let world = World::new(&format!("{slow} history=3"));
        assert_eq!(drain(&world.reader()), [0; 0], "{slow}: nothing was sent");
        (0..2).for_each(|id| world.send(id));
        assert_eq!(drain(&world.reader()), [0, 1], "{slow}");
        for last in 2..100 {
            world.send(last);
            assert_eq!(drain(&world.reader()), [last - 2, last - 1, last], "{slow}");
        }
        // Also of a writer that has gone.
        drop(world.reader());
        let keeper = world.reader();
        let World { options, writer, dir } = world;
        drop(writer);
        let late = options.attach("link", Side::Secondary).unwrap();
        assert_eq!(drain(&late), [97, 98, 99], "{slow}");
        let world = World {
            writer: options.create(&config("link", &format!("mode=broadcast {slow} history=3"))).unwrap(),
            options,
            dir,
        };
        world.send(100);
        assert_eq!(drain(&late), [100], "{slow}");
        assert_eq!(drain(&world.reader()), [98, 99, 100], "{slow}");
        assert_eq!(drain(&keeper), [97, 98, 99, 100], "{slow}");
    }
}

/// A loan that finds nothing frees what all have read, and never the history.
#[test]
fn loan_that_fails_leaves_the_history() {
    for slow in SLOW {
        let world = World::new(&format!("{slow} history=3 msg=256x5 data=4096x4"));
        (0..10).for_each(|id| world.send(id));
        let loans = [world.writer.loan().unwrap(), world.writer.loan().unwrap()];
        for _ in 0..3 {
            assert_eq!(kind_of(&refused(world.writer.loan())), "Exhausted", "{slow}");
        }
        assert_eq!(drain(&world.reader()), [7, 8, 9], "{slow}");
        drop(loans);
        world.send(10);
        assert_eq!(drain(&world.reader()), [8, 9, 10], "{slow}");
    }
}

#[test]
fn history_that_ring_or_pools_cannot_keep_is_refused() {
    for (changes, limit) in [
        ("ring=4 history=4", "the limit is 3 (ring.len)"),
        ("msg=256x4 history=4", "the limit is 3 (pools.cpu_msg.pool_len)"),
        ("data=256x2 history=2", "the limit is 1 (pools.cpu_data.pool_len)"),
        ("ring=8 history=5 slow=evict", "the limit is 4 (half of ring.len)"),
        ("ring=1 slow=skip", "needs ring.len 2 or more"),
        ("slow=evict evict_after=0", "give 1 to 3600000"),
        ("receivers=one", "for many readers"),
    ] {
        let options = LinkOptions::new().dir(Path::new("/nowhere"));
        let error = refused(options.create(&config("link", &format!("mode=broadcast {changes}"))));
        assert!(error.to_string().contains(limit), "{changes}: {error}");
    }
}

#[test]
fn reader_that_is_overtaken_goes_on_with_the_newest() {
    let world = World::new("ring=4 slow=skip");
    let (slow, fast) = (world.reader(), world.reader());
    for id in 0..50 {
        world.send(id);
        assert_eq!(drain(&fast), [id]);
    }
    assert_eq!(slow.receive().unwrap().map(|message| message.msg_id()), Some(49));
    assert_eq!((slow.lost(), fast.lost()), (49, 0));
    world.send(50);
    assert_eq!(drain(&slow), [50]);
    assert_eq!(slow.lost(), 49);
}

#[test]
fn two_slots_and_one_message_of_history_are_the_latest_value() {
    let world = World::new("ring=2 slow=skip history=1 msg=256x2 data=4096x2");
    let reader = world.reader();
    for id in 0..20 {
        world.send(2 * id);
        world.send(2 * id + 1);
        assert_eq!(drain(&reader), [2 * id + 1]);
        assert_eq!(drain(&world.reader()), [2 * id + 1], "a newcomer has it at once");
    }
    assert_eq!(reader.lost(), 20);
    for value in 0..7 {
        world.writer.send_inline(value, 0, &[value.to_le_bytes()[0]; 100]).unwrap();
    }
    let latest = reader.receive().unwrap().expect("the latest");
    assert_eq!(latest.msg(), [6; 100]);
    assert!(!reader.has_message());
}

#[test]
fn held_message_stays_while_writer_continues() {
    let world = World::new("ring=4 slow=skip msg=256x16");
    let reader = world.reader();
    let mut held = Vec::new();
    for id in 0..6 {
        world.send(id);
        held.push(reader.receive().unwrap().expect("it was just sent"));
    }
    world.send(6);
    let error = refused(reader.receive());
    assert!(matches!(error.kind(), ErrorKind::HoldingTooMany { limit: 6, .. }), "{error}");
    (7..100).for_each(|id| world.send(id));
    for (id, message) in held.iter().enumerate() {
        assert_eq!(message.msg(), id.to_string().as_bytes(), "it was not overwritten");
    }
    held.remove(2);
    let (id, text) = receive(&reader).unwrap().expect("the newest");
    assert_eq!((id, text.as_str()), (99, "99"));
    held.clear();
    // All come back, including those that are not borrowed any more.
    (100..110).for_each(|id| world.send(id));
    let loans: Vec<_> = std::iter::from_fn(|| world.writer.loan().ok()).collect();
    assert_eq!(loans.len(), 16);
}

#[test]
fn reader_that_holds_the_writer_up_is_evicted() {
    let world = World::new("ring=4 slow=evict evict_after=20");
    let (slow, fast) = (world.reader(), world.reader());
    assert!(slow.receive().unwrap().is_none());
    for id in 0..4 {
        world.send(id);
    }
    assert_eq!(drain(&fast), [0, 1, 2, 3]);
    let start = Instant::now();
    until("there is room", || match send(&world.writer, 4, "4") {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(kind_of(&error), "Full");
            false
        }
    });
    assert!(start.elapsed() >= Duration::from_millis(20), "it had its time");
    assert_eq!(drain(&fast), [4]);
    assert_eq!(world.writer.readers(), 1);
    assert_eq!(kind_of(&refused(slow.receive())), "Evicted");
    assert_eq!(kind_of(&refused(slow.wait(None))), "Evicted");
    let seat = slow.seat();
    let events: Vec<_> = std::iter::from_fn(|| world.writer.next_event()).collect();
    assert!(
        events.iter().any(|event| matches!(event, PeerEvent::Evicted(peer) if peer.seat == seat)),
        "{events:?}"
    );
    // It may come again.
    drop(slow);
    let again = world.reader();
    world.send(5);
    assert_eq!((drain(&again), drain(&fast)), (vec![5], vec![5]));
}

/// The pool is smaller than the ring, so that there is room and no buffer.
#[test]
fn reader_that_holds_the_buffers_is_evicted() {
    let world = World::new("slow=evict evict_after=20 msg=256x4 data=4096x2");
    let (slow, fast) = (world.reader(), world.reader());
    for with_data in [false, true] {
        let count = if with_data { 2 } else { 4 };
        for id in 0..count {
            let loan = if with_data { world.writer.loan_with(PoolId::CpuData) } else { world.writer.loan() };
            loan.unwrap().with_msg_id(id).send().unwrap();
            assert_eq!(fast.receive().unwrap().map(|message| message.msg_id()), Some(id));
        }
        if !with_data {
            assert_eq!(slow.queued(), 4);
            while slow.receive().unwrap().is_some() {}
        }
    }
    until("a buffer is free", || world.writer.loan_with(PoolId::CpuData).is_ok());
    assert_eq!(kind_of(&refused(slow.receive())), "Evicted");
    assert_eq!(world.writer.readers(), 1);
}

/// However many slow readers come one after the other, each message is held up for no longer than the limit.
#[test]
fn newcomers_do_not_hold_the_writer_up_for_ever() {
    let world = World::new("ring=2 slow=evict history=1 evict_after=5");
    let mut readers = Vec::new();
    for id in 0..20 {
        until("there is room", || {
            // One more before each attempt: none of them has held it up for long.
            if readers.len() < 60 {
                readers.push(world.reader());
            }
            send(&world.writer, id, &id.to_string()).is_ok()
        });
        readers
            .retain(|reader: &Link| !matches!(reader.receive(), Err(error) if kind_of(&error) == "Evicted"));
    }
}

#[test]
fn dead_reader_does_not_block_writer() {
    let _watchdog = Watchdog::start();
    for changes in ["ring=4", "ring=4 backing=memfd", "msg=256x4"] {
        let world = World::new(changes);
        let living = world.reader();
        for round in 0..3 {
            let mut dead = Peer::start(world.dir.path());
            dead.tell("attach link secondary 0");
            world.send(0);
            dead.tell("hold-message");
            drain(&living);
            for id in 1..4 {
                world.send(id);
            }
            assert_eq!(drain(&living), [1, 2, 3]);
            assert!(matches!(kind_of(&refused(send(&world.writer, 4, "4"))).as_str(), "Full" | "Exhausted"));
            dead.kill();
            // By the monitor of this process: no call looks for the dead.
            until("the dead reader is forgotten", || send(&world.writer, 4, "4").is_ok());
            assert_eq!(drain(&living), [4], "{changes}, {round}");
            assert_eq!(world.writer.readers(), 1);
        }
        until("all seats are free", || world.writer.participants().count() == 2);
    }
}

#[test]
fn dead_writer_has_a_successor() {
    let _watchdog = Watchdog::start();
    for slow in SLOW {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let create = format!("create link mode=broadcast {slow} ring=8 msg=256x8 data=4096x8 history=2");
        let mut first = Peer::start(dir.path());
        first.tell(&create);
        let [early, slow_reader] = [(), ()].map(|()| options.attach("link", Side::Secondary).unwrap());
        for id in 0..5 {
            first.tell(&format!("send {id} {id}"));
        }
        first.tell("data 5 4096");
        first.tell("hold-loan");
        assert_eq!(receive(&early).unwrap(), Some((0, "0".into())));
        let held = early.receive().unwrap().expect("the second");
        first.kill();
        let mut second = Peer::start(dir.path());
        second.tell(&create);
        second.tell("send 6 6");
        assert_eq!(held.msg(), b"1", "it is still there");
        drop(held);
        for reader in [&early, &slow_reader] {
            let first = if std::ptr::eq(reader, &raw const early) { 2 } else { 0 };
            for id in first..5 {
                assert_eq!(receive(reader).unwrap(), Some((id, id.to_string())), "{slow}");
            }
            let message = reader.receive().unwrap().expect("the sixth");
            assert_eq!((message.msg_id(), message.data_len()), (5, 4096));
            drop(message);
            assert_eq!(receive(reader).unwrap(), Some((6, "6".into())));
        }
        // Many times round: nothing that the first writer had is missing.
        for id in 7..50 {
            second.tell(&format!("send {id} {id}"));
            assert_eq!(drain(&early), [id], "{slow}");
            assert_eq!(drain(&slow_reader), [id], "{slow}");
        }
        second.exit();
        let last = options.create(&config("link", create.split_once("link ").unwrap().1)).unwrap();
        let loans: Vec<_> = std::iter::from_fn(|| last.loan().ok()).collect();
        assert_eq!(loans.len(), 6, "{slow}: all but the history");
        drop(loans);
        let loans: Vec<_> = std::iter::from_fn(|| last.loan_with(PoolId::CpuData).ok()).collect();
        assert_eq!(loans.len(), 6, "{slow}: the history has none");
    }
}

/// Their messages were the dead writer's, and no reader is left to release them.
#[test]
fn readers_that_die_after_the_writer_keep_nothing() {
    let _watchdog = Watchdog::start();
    for slow in SLOW {
        let dir = ipc_dir();
        let create = format!("create link mode=broadcast {slow} ring=4 msg=256x4 data=4096x4");
        let mut writer = Peer::start(dir.path());
        writer.tell(&create);
        let keeper = LinkOptions::new().dir(dir.path()).attach("link", Side::Secondary).unwrap();
        let mut readers = [Peer::start(dir.path()), Peer::start(dir.path())];
        readers.iter_mut().for_each(|reader| reader.tell("attach link secondary 0"));
        writer.tell("data 1 64");
        writer.tell("data 2 64");
        readers.iter_mut().for_each(|reader| reader.tell("hold-message"));
        writer.kill();
        readers.into_iter().for_each(Peer::kill);
        until("their seats are free", || keeper.participants().count() == 1);
        let last = LinkOptions::new()
            .dir(dir.path())
            .create(&config("link", create.split_once("link ").unwrap().1))
            .unwrap();
        drain_any(&keeper);
        let loans: Vec<_> = std::iter::from_fn(|| last.loan_with(PoolId::CpuData).ok()).collect();
        assert_eq!(loans.len(), 4, "{slow}");
    }
}

fn drain_any(reader: &Link) {
    while reader.receive().unwrap().is_some() {}
}

#[test]
fn buffers_are_free_when_the_last_reader_is_past_them() {
    for slow in ["slow=wait", "slow=evict"] {
        let world = World::new(&format!("{slow} data=4096x2"));
        let (a, b) = (world.reader(), world.reader());
        for id in 0..2 {
            world.writer.loan_with(PoolId::CpuData).unwrap().with_msg_id(id).send().unwrap();
        }
        drain_any(&a);
        let held = b.receive().unwrap().expect("two were sent");
        assert_eq!(kind_of(&refused(world.writer.loan_with(PoolId::CpuData))), "Exhausted");
        drop(held);
        assert!(world.writer.loan_with(PoolId::CpuData).is_ok(), "{slow}");
        // A reader that leaves is past everything.
        world.writer.loan_with(PoolId::CpuData).unwrap().send().unwrap();
        assert_eq!(kind_of(&refused(world.writer.loan_with(PoolId::CpuData))), "Exhausted");
        drop((a, b));
        let loans = [world.writer.loan_with(PoolId::CpuData), world.writer.loan_with(PoolId::CpuData)];
        assert!(loans.iter().all(Result::is_ok), "{slow}");
    }
}

#[test]
fn readers_answer_on_the_other_ring() {
    let world = World::new("");
    let readers = [world.reader(), world.reader()];
    world.send(1);
    for (i, reader) in (0..).zip(&readers) {
        let question = receive(reader).unwrap().expect("both get it");
        send(reader, 10 + i, &question.1).unwrap();
        reader.send_inline(20 + i, 0, b"done").unwrap();
    }
    let answers: Vec<_> = std::iter::from_fn(|| receive(&world.writer).unwrap()).map(|(id, _)| id).collect();
    assert_eq!(answers, [10, 20, 11, 21]);
    assert!(readers.iter().all(|reader| !reader.has_message()));
}

#[test]
fn link_has_one_writer_and_sixty_two_readers() {
    let world = World::new("");
    let second = world.writer.try_clone().unwrap();
    world.send(0);
    let taken = refused(second.send_inline(1, 0, b""));
    assert!(matches!(taken.kind(), ErrorKind::RoleTaken { role: "producer", .. }), "{taken}");
    drop(second);
    let first = world.reader();
    let mut readers: Vec<_> = (1..MAX_READERS).map(|_| first.try_clone().unwrap()).collect();
    readers.push(first);
    let crowded = refused(world.options.attach("link", Side::Secondary));
    assert!(matches!(crowded.kind(), ErrorKind::Crowded { limit: MAX_READERS, .. }), "{crowded}");
    assert_eq!(world.writer.readers(), MAX_READERS);
    world.send(1);
    assert!(readers.iter().all(|reader| drain(reader) == [1]));
    let still = refused(readers[0].evict(world.writer.seat()));
    assert!(matches!(still.kind(), ErrorKind::StillAlive { .. }), "{still}");
    readers.pop();
    assert!(world.options.attach("link", Side::Secondary).is_ok());
}

#[test]
fn writer_waits_for_readers() {
    let _watchdog = Watchdog::start();
    for notify in ["notify=on", "notify=off"] {
        let world = World::new(notify);
        assert!(!world.writer.wait_for_readers(1, Some(Duration::from_millis(1))).unwrap());
        let World { options: _options, writer, dir } = world;
        let waiting = std::thread::spawn(move || {
            assert!(writer.wait_for_readers(3, None).unwrap());
            send(&writer, 1, "1").unwrap();
            writer
        });
        let mut readers = [(), (), ()].map(|()| Peer::start(dir.path()));
        readers.iter_mut().for_each(|reader| reader.tell("attach link secondary 0"));
        let _writer = waiting.join().unwrap();
        assert!(readers.iter_mut().all(|reader| reader.ask("receive") == "1 1"));
    }
}

#[test]
fn sleeping_reader_is_woken() {
    let _watchdog = Watchdog::start();
    let world = World::new("");
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let reader = world.reader();
            std::thread::spawn(move || {
                assert!(reader.wait(Some(HANGS)).unwrap());
                drain(&reader)
            })
        })
        .collect();
    let bell = world.reader();
    let _fd = bell.fd().unwrap();
    world.send(1);
    world.writer.notify().unwrap();
    assert_eq!(notified(&bell), Some(1));
    for thread in waiting {
        assert_eq!(thread.join().unwrap(), [1]);
    }
}

#[test]
fn second_creation_needs_same_settings_of_readers() {
    let world = World::new("slow=evict history=2 evict_after=100");
    let World { options, writer, dir: _dir } = world;
    let _reader = options.attach("link", Side::Secondary).unwrap();
    drop(writer);
    for (changes, field) in [
        ("slow=wait history=2", "ring.slow"),
        ("slow=evict history=3 evict_after=100", "ring.history"),
        ("slow=evict history=2 evict_after=200", "ring.evict_after_ms"),
    ] {
        let differs = refused(options.create(&config("link", &format!("mode=broadcast {changes}"))));
        assert!(
            matches!(differs.kind(), ErrorKind::Differs { field: found, .. } if found == field),
            "{differs}"
        );
    }
    let differs = refused(options.create(&config("link", "mode=mpmc")));
    assert!(differs.to_string().contains("broadcast"), "{differs}");
}

#[test]
fn nothing_is_left_when_all_have_gone() {
    let world = World::new("history=2");
    let reader = world.reader();
    (0..5).for_each(|id| world.send(id));
    let World { options, writer, dir } = world;
    drop((reader, writer));
    assert_eq!(shmesh_testing::files(dir.path()), [""; 0]);
    let writer = options.create(&config("link", "mode=broadcast history=2")).unwrap();
    assert!(writer.was_created());
}

/// A reader that writes a wrong cursor harms itself alone.
#[test]
fn wild_cursor_is_its_readers_own_loss() {
    for slow in SLOW {
        let world = World::new(&format!("{slow} ring=4 evict_after=1"));
        let (good, wild) = (world.reader(), world.reader());
        let file = File::options().read(true).write(true).open(world.dir.path().join("link_shm")).unwrap();
        let size = file.metadata().unwrap().len();
        // The table of cursors ends in the last page; its lines are found by what they say.
        world.send(0);
        assert_eq!((drain(&good), drain(&wild)), (vec![0], vec![0]));
        let words: Vec<u64> = (size - 8192..size)
            .step_by(64)
            .filter(|&at| {
                let mut word = [0; 8];
                file.read_exact_at(&mut word, at).unwrap();
                u64::from_ne_bytes(word) == 1
            })
            .collect();
        assert_eq!(words.len(), 2, "two cursors, after the first message");
        let mut id = 0;
        for value in [u64::MAX, 0, 1 << 63, 1 << 40, 5] {
            // The seats were taken in order.
            file.write_all_at(&value.to_ne_bytes(), words[1]).unwrap();
            for _ in 0..8 {
                id += 1;
                until("there is room", || {
                    let _ = wild.receive();
                    send(&world.writer, id, &id.to_string()).is_ok()
                });
                assert_eq!(drain(&good), [id], "{slow}, {value:x}");
            }
        }
    }
}

fn send_with_data(writer: &Link, id: i32) {
    let mut loan = writer.loan_with(PoolId::CpuData).unwrap();
    loan.resize_msg(3).unwrap().copy_from_slice(b"msg");
    loan.resize_data(4096).unwrap().fill(0xa5);
    loan.with_msg_id(id).send().unwrap();
}

#[test]
fn owned_message_keeps_its_buffers_and_counts_as_unread() {
    let _watchdog = Watchdog::start();
    for slow in SLOW {
        let world = World::new(&format!("{slow} ring=8"));
        let reader = world.reader();
        send_with_data(&world.writer, 7);
        send_with_data(&world.writer, 8);
        let [first, second] = [(); 2].map(|()| reader.receive().unwrap().expect("it was just sent"));
        let places = [first.msg().as_ptr(), first.data().as_ptr()];
        // Not in the order in which they were received.
        let (second, first) = (second.into_owned(), first.into_owned());
        assert_eq!(places, [first.msg().as_ptr(), first.data().as_ptr()], "{slow}: nothing was copied");
        drop(second);
        drop(reader);
        let check = move || {
            assert_eq!(
                (first.msg_id(), first.msg(), first.data()),
                (7, &b"msg"[..], &[0xa5; 4096][..]),
                "{slow}"
            );
        };
        let mut sent = 0;
        while sent < 100 && send(&world.writer, sent, &sent.to_string()).is_ok() {
            sent += 1;
        }
        assert_eq!(sent, if slow.contains("skip") { 100 } else { 6 }, "{slow}: two of eight are not past it");
        assert_eq!(world.writer.readers(), 1, "{slow}: it counts as a reader");
        std::thread::spawn(check).join().unwrap();
        assert_eq!(world.writer.readers(), 0, "{slow}");
        for id in 0..100 {
            world.send(id);
        }
    }
}

#[test]
fn sixth_owned_message_is_copied_so_that_its_reader_can_receive() {
    let world = World::new("slow=skip ring=8");
    let reader = world.reader();
    let mut kept = Vec::new();
    for id in 0..40 {
        send_with_data(&world.writer, id);
        let message = reader.receive().unwrap().expect("it was just sent");
        let place = message.data().as_ptr();
        let owned = message.into_owned();
        assert_eq!(owned.data().as_ptr() == place, id < 5, "{id}");
        kept.push(owned);
    }
    assert!(kept.iter().all(|owned| owned.msg() == b"msg" && owned.data() == [0xa5; 4096]));
    // The hold of a dropped message is used again.
    kept.remove(2);
    send_with_data(&world.writer, 40);
    let message = reader.receive().unwrap().expect("it was just sent");
    let place = message.data().as_ptr();
    assert_eq!(message.into_owned().data().as_ptr(), place);
}

#[test]
fn fresh_link_has_no_history_and_all_buffers() {
    for slow in SLOW {
        let (dir, config) = (ipc_dir(), config("link", &format!("mode=broadcast {slow} history=2")));
        let options = LinkOptions::new().dir(dir.path());
        // The link stays while no participant is attached.
        let _host = options.keep(&config).unwrap();
        let writer = options.create(&config).unwrap();
        for id in 0..4 {
            send(&writer, id, &id.to_string()).unwrap();
        }
        drop(writer);
        assert_eq!(drain(&options.attach("link", Side::Secondary).unwrap()), [2, 3], "{slow}");

        let writer = options.clone().fresh(true).create(&config).unwrap();
        assert!(!writer.was_created(), "{slow}");
        let reader = options.attach("link", Side::Secondary).unwrap();
        assert_eq!(drain(&reader), [0; 0], "{slow}");
        for id in 10..110 {
            send(&writer, id, &id.to_string()).unwrap();
            assert_eq!(drain(&reader), [id], "{slow}");
        }
    }
}
