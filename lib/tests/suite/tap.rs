//! A tap on links in use, after a crash, and beside a hostile writer.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use shmesh::config::PoolId;
use shmesh::inspect::{Filter, LostCounts, Tap, View};
use shmesh::{INLINE_MAX_BYTES, Link, LinkOptions, Side};
use shmesh_testing::{Peer, Watchdog, config, ipc_dir, receive, send};

fn tap(dir: &std::path::Path, name: &str) -> Tap {
    Tap::new(View::open(dir, &name.parse().unwrap()).unwrap(), Filter::default())
}

fn pair(dir: &std::path::Path, changes: &str) -> (Link, Link) {
    let options = LinkOptions::new().dir(dir);
    let phy = options.create(&config("tapped", changes)).unwrap();
    let mac = options.attach("tapped", Side::Secondary).unwrap();
    (phy, mac)
}

/// A message whose every byte follows from its number.
fn say(link: &Link, number: u32, inline: bool) -> bool {
    let id = number.cast_signed();
    let [byte, ..] = number.to_le_bytes();
    if inline {
        return link.send_inline(id, -id, &[byte; INLINE_MAX_BYTES][..inline_len(id)]).is_ok();
    }
    let Ok(mut loan) = link.loan_with(PoolId::CpuData) else { return false };
    loan.resize_msg(200).unwrap().fill(byte);
    loan.resize_data(2000).unwrap().fill(byte);
    loan.with_msg_id(id).with_cell_id(-id).send().is_ok()
}

/// In one line or in two.
fn inline_len(id: i32) -> usize {
    if id % 4 == 0 { 48 } else { INLINE_MAX_BYTES }
}

fn is_whole(seen: &shmesh::inspect::TappedMessage<'_>) -> bool {
    let [byte, ..] = seen.msg_id.to_le_bytes();
    let lens = if seen.inline { (u32::try_from(inline_len(seen.msg_id)).unwrap(), 0) } else { (200, 2000) };
    seen.cell_id == -seen.msg_id
        && (seen.msg_len, seen.data_len) == lens
        && seen.msg.len() == lens.0 as usize
        && (seen.data.is_empty() || seen.data.len() == lens.1 as usize)
        && seen.msg.iter().chain(seen.data).all(|b| *b == byte)
}

#[test]
fn frequent_tap_sees_every_message_once() {
    let _watchdog = Watchdog::start();
    for mode in ["spsc", "mpmc"] {
        let dir = ipc_dir();
        let (phy, mac) = pair(dir.path(), &format!("mode={mode}"));
        let mut tap = tap(dir.path(), "tapped");
        let mut seen = Vec::new();
        for number in 0..200 {
            let (from, to) = if number % 3 == 0 { (&phy, &mac) } else { (&mac, &phy) };
            assert!(say(from, number, number % 2 == 0), "{mode} {number}");
            // Before it is received, after it was, and after its buffer was given back.
            if number % 5 == 0 {
                tap.poll(|message| seen.push((message.msg_id, message.from, is_whole(message))));
            }
            let message = to.receive().unwrap().unwrap();
            if number % 5 == 1 {
                tap.poll(|message| seen.push((message.msg_id, message.from, is_whole(message))));
            }
            drop(message);
            tap.poll(|message| seen.push((message.msg_id, message.from, is_whole(message))));
        }
        let expected: Vec<_> = (0..200)
            .map(|number| (number, if number % 3 == 0 { Side::Primary } else { Side::Secondary }, true))
            .collect();
        assert_eq!(seen, expected, "{mode}");
        let LostCounts { overwritten, reused, damaged, restarts, .. } = tap.lost();
        assert_eq!((overwritten, reused, damaged, restarts), (0, 0, 0, 0), "{mode}");
    }
}

#[test]
fn tap_sees_whole_messages_or_counts_them_as_lost() {
    tap_while_threads_send(2_000);
}

#[test]
#[ignore = "long: 30,000 messages of each kind"]
fn tap_sees_whole_messages_or_counts_them_as_lost_for_long() {
    tap_while_threads_send(30_000);
}

fn tap_while_threads_send(total: u32) {
    let _watchdog = Watchdog::start();
    for (mode, inline) in [("spsc", true), ("spsc", false), ("mpmc", true), ("mpmc", false)] {
        let dir = ipc_dir();
        let (phy, mac) = pair(dir.path(), &format!("mode={mode}"));
        let mut tap = tap(dir.path(), "tapped");
        let over = AtomicBool::new(false);
        let (mut shown, mut last) = (0_u64, -1);
        std::thread::scope(|scope| {
            let over = &over;
            scope.spawn(move || {
                let mut number = 0;
                while number < total {
                    if say(&mac, number, inline) {
                        number += 1;
                    } else {
                        std::thread::yield_now();
                    }
                }
            });
            scope.spawn(move || {
                let mut received = 0;
                while received < total {
                    match phy.receive().unwrap() {
                        Some(_) => received += 1,
                        None => std::thread::yield_now(),
                    }
                }
                over.store(true, Ordering::Release);
            });
            let mut look = || {
                tap.poll(|message| {
                    assert!(is_whole(message), "{mode} {message:?}");
                    assert!(message.msg_id > last, "in order, and once");
                    assert_eq!(u64::from(message.msg_id.cast_unsigned()), message.position);
                    last = message.msg_id;
                    shown += 1;
                });
            };
            while !over.load(Ordering::Acquire) {
                look();
            }
            // Once for what came meanwhile, and once for what a look leaves that a restart of the ring ended.
            look();
            look();
        });
        let LostCounts { overwritten, reused, damaged, restarts, .. } = tap.lost();
        assert_eq!((damaged, restarts), (0, 0), "{mode}");
        assert_eq!(shown + overwritten + reused, u64::from(total), "{mode}: seen or counted");
        assert!(shown > 0);
    }
}

#[test]
fn filters_choose_by_id_cell_and_side() {
    let dir = ipc_dir();
    let (phy, mac) = pair(dir.path(), "");
    let ids = |filter: Filter| {
        let view = View::open(dir.path(), &"tapped".parse().unwrap()).unwrap();
        let mut ids = BTreeSet::new();
        Tap::new(view, filter).poll(|message| {
            ids.insert((message.msg_id, message.cell_id));
        });
        ids.into_iter().collect::<Vec<_>>()
    };
    for (id, cell) in [(1, 0), (2, 0), (1, 5)] {
        phy.send_inline(id, cell, b"x").unwrap();
    }
    let mut loan = mac.loan().unwrap();
    loan.resize_msg(3).unwrap().fill(1);
    loan.with_msg_id(1).with_cell_id(9).send().unwrap();
    assert_eq!(ids(Filter::default()), [(1, 0), (1, 5), (1, 9), (2, 0)]);
    assert_eq!(ids(Filter { msg_ids: vec![2, 7], ..Filter::default() }), [(2, 0)]);
    assert_eq!(ids(Filter { cell_ids: vec![5, 9], ..Filter::default() }), [(1, 5), (1, 9)]);
    assert_eq!(ids(Filter { from: Some(Side::Secondary), ..Filter::default() }), [(1, 9)]);
}

#[test]
fn late_tap_counts_lost_messages_and_continues() {
    let dir = ipc_dir();
    let (phy, mac) = pair(dir.path(), "");
    let mut tap = tap(dir.path(), "tapped");
    for number in 0..100 {
        assert!(say(&mac, number, true));
        drop(phy.receive().unwrap());
    }
    let mut ids = Vec::new();
    tap.poll(|message| ids.push(message.msg_id));
    assert_eq!(tap.lost().overwritten, 84, "a ring of 16 remembers 16");
    assert_eq!(ids.len() + usize::try_from(tap.lost().reused).unwrap(), 16);
    assert_eq!(ids.last(), Some(&99));
    // One that is asked for what was before loses nothing by that.
    let view = View::open(dir.path(), &"tapped".parse().unwrap()).unwrap();
    let mut late = Tap::new(view, Filter::default()).with_history();
    assert!(late.poll(|_| {}) > 0);
    assert_eq!(late.lost().overwritten, 0);
}

#[test]
fn tap_reads_a_link_after_a_crash() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let options = LinkOptions::new().dir(dir.path());
    let phy = options.create(&config("tapped", "")).unwrap();
    let mut peer = Peer::start(dir.path());
    peer.tell("attach tapped secondary 60000");
    send(&phy, 1, "to the one that dies").unwrap();
    peer.kill();
    std::mem::forget(phy);
    let mut tap = tap(dir.path(), "tapped");
    let mut texts = Vec::new();
    tap.poll(|message| texts.push((message.msg_id, String::from_utf8_lossy(message.msg).into_owned())));
    assert_eq!(texts, [(1, "to the one that dies".to_owned())]);
    // Files that are removed meanwhile stay mapped.
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    assert_eq!(tap.poll(|_| {}), 0);
}

#[test]
fn tap_changes_nothing() {
    let dir = ipc_dir();
    let (phy, mac) = pair(dir.path(), "");
    send(&phy, 1, "hello").unwrap();
    let state = || {
        let mut files: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_file())
            .map(|path| (path.clone(), std::fs::read(path).unwrap()))
            .collect();
        files.sort();
        files
    };
    let before = state();
    let mut tap = tap(dir.path(), "tapped").with_history();
    assert_eq!(tap.poll(|_| {}), 1);
    drop(tap);
    assert!(state() == before);
    assert_eq!(receive(&mac).unwrap(), Some((1, "hello".to_owned())));
}

/// Whatever the words of the segments are, a look returns and shows no more than is there.
#[test]
fn hostile_words_neither_crash_nor_block_the_tap() {
    use std::os::unix::fs::FileExt;
    let _watchdog = Watchdog::start();
    for mode in ["spsc", "mpmc"] {
        let dir = ipc_dir();
        let (phy, mac) = pair(dir.path(), &format!("mode={mode}"));
        let mut tap = tap(dir.path(), "tapped").limit_bytes(100_000);
        let files: Vec<_> = ["tapped_shm", "tapped_cpu_msg", "tapped_cpu_data"]
            .map(|name| std::fs::OpenOptions::new().write(true).open(dir.path().join(name)).unwrap())
            .into();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        for turn in 0..4000_u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let _ = say(if turn % 2 == 0 { &phy } else { &mac }, 3, turn % 3 == 0);
            // Not the header, which was checked when the link was opened, and not its length.
            let place = 128 + (random >> 20) % 6000 / 8 * 8;
            let value = [random, u64::MAX, random % 64, random << 32][(random >> 10) as usize % 4];
            files[(random >> 60) as usize % 3].write_at(&value.to_ne_bytes(), place).unwrap();
            let shown = tap.poll(|message| {
                assert!(message.msg.len() <= 256 && message.data.len() <= 4096);
            });
            assert!(shown <= 64);
        }
        std::mem::forget((phy, mac));
    }
}
