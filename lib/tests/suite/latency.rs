//! Samples of how long messages are on their way and held.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use shmesh::config::PoolId;
use shmesh::inspect::{LinkTimes, View};
use shmesh::{Link, LinkOptions, Side};
use shmesh_testing::{config, ipc_dir};

fn pair(dir: &std::path::Path, changes: &str) -> (Link, Link) {
    let options = LinkOptions::new().dir(dir);
    let link = options.create(&config("link", changes)).unwrap();
    (link, options.attach("link", Side::Secondary).unwrap())
}

fn times(dir: &std::path::Path) -> Option<LinkTimes> {
    View::open(dir, &"link".parse().unwrap()).unwrap().times()
}

fn counts(dir: &std::path::Path) -> (u64, u64) {
    let times = times(dir).unwrap();
    (times.latency.count(), times.hold.count())
}

fn send_pooled(link: &Link) {
    let mut loan = link.loan().unwrap();
    loan.resize_msg(8).unwrap();
    loan.send().unwrap();
}

const MODES: [&str; 5] =
    ["", "mode=spsc", "mode=broadcast", "mode=broadcast slow=skip", "mode=broadcast slow=evict"];

#[test]
fn each_sampled_message_is_counted_once_in_every_mode() {
    for mode in MODES {
        let dir = ipc_dir();
        // More messages than slots, so that the words of the samples are used again.
        let (phy, mac) = pair(dir.path(), &format!("latency=4 ring=16 msg=64x64 {mode}"));
        for message in 0..64 {
            if message % 2 == 0 {
                send_pooled(&phy);
            } else {
                phy.send_inline(1, 0, b"inline").unwrap();
            }
            drop(mac.receive().unwrap().unwrap());
        }
        // Positions 0, 4, 8 and so on, which are messages in buffers.
        assert_eq!(counts(dir.path()), (16, 16), "{mode}");
        for _ in 0..8 {
            mac.send_inline(1, 0, b"the other way").unwrap();
            phy.receive().unwrap().unwrap();
        }
        assert_eq!(counts(dir.path()), (18, 16), "{mode}: an inline message is not held");
    }
}

/// Senders and receivers find out which positions are sampled from where their predecessors stopped, and a full ring moves
/// none of them.
#[test]
fn sampled_positions_do_not_depend_on_who_uses_them() {
    for mode in MODES {
        for (ring, interval) in [(2, 4), (16, 4), (16, 16), (16, 1)] {
            let dir = ipc_dir();
            let changes = format!("latency={interval} ring={ring} msg=64x64 {mode}");
            let options = LinkOptions::new().dir(dir.path());
            let mut mac = None;
            let mut sent = 0;
            for round in 0..24 {
                let phy = options.create(&config("link", &changes)).unwrap();
                if round % 3 == 0 {
                    mac = Some(options.attach("link", Side::Secondary).unwrap());
                }
                let mac = mac.as_ref().unwrap();
                for _ in 0..=round {
                    // Where readers are skipped, none may be overtaken.
                    if mode.contains("skip") {
                        while mac.receive().unwrap().is_some() {}
                    }
                    while let Err(error) = phy.send_inline(1, 0, b"") {
                        assert!(matches!(error.kind(), shmesh::ErrorKind::Full { .. }), "{error}");
                        mac.receive().unwrap().unwrap();
                    }
                    sent += 1;
                }
                while mac.receive().unwrap().is_some() {}
                assert_eq!(counts(dir.path()).0, u64::div_ceil(sent, interval), "{changes}, round {round}");
            }
        }
    }
}

#[test]
fn messages_of_a_batch_are_counted() {
    for mode in MODES {
        let dir = ipc_dir();
        let (phy, mac) = pair(dir.path(), &format!("latency=4 ring=16 msg=64x64 {mode}"));
        let mut loans: Vec<_> = (0..8).map(|_| phy.loan().unwrap()).collect();
        phy.send_batch(&mut loans).unwrap();
        let mut messages = Vec::new();
        assert_eq!(
            mac.receive_batch(&mut messages, if mode.contains("skip") { 6 } else { 8 }).unwrap() % 2,
            0
        );
        drop(messages);
        assert_eq!(counts(dir.path()), (2, 2), "{mode}");
    }
}

#[test]
fn times_are_those_from_sending_to_receiving_to_releasing() {
    let dir = ipc_dir();
    let (phy, mac) = pair(dir.path(), "latency=1");
    send_pooled(&phy);
    std::thread::sleep(Duration::from_millis(20));
    let message = mac.receive().unwrap().unwrap();
    std::thread::sleep(Duration::from_millis(2));
    drop(message);
    let LinkTimes { latency, hold, sample } = times(dir.path()).unwrap();
    assert_eq!(sample, 1);
    assert!(latency.sum() >= Duration::from_millis(20) && hold.sum() >= Duration::from_millis(2));
    // A machine may be slow, but not faster than the clock.
    assert!(latency.quantile(1.0).unwrap() >= Duration::from_millis(16), "{latency:?}");
    assert!(hold.sum() < Duration::from_secs(60));
}

#[test]
fn message_that_another_thread_releases_is_counted() {
    for mode in MODES {
        let dir = ipc_dir();
        let (phy, mac) = pair(dir.path(), &format!("latency=2 ring=16 msg=64x64 {mode}"));
        send_pooled(&phy);
        let owned = mac.receive().unwrap().unwrap().into_owned();
        assert_eq!(counts(dir.path()), (1, 0), "{mode}");
        std::thread::spawn(move || drop(owned)).join().unwrap();
        assert_eq!(counts(dir.path()), (1, 1), "{mode}");
        // Not sampled.
        send_pooled(&phy);
        drop(mac.receive().unwrap().unwrap().into_owned());
        assert_eq!(counts(dir.path()), (1, 1), "{mode}");
    }
}

#[test]
fn inline_message_that_becomes_independent_ends_no_other_hold() {
    let dir = ipc_dir();
    let (phy, mac) = pair(dir.path(), "latency=2 ring=16 msg=64x1");
    send_pooled(&phy);
    phy.send_inline(1, 0, b"").unwrap();
    let held = mac.receive().unwrap().unwrap();
    drop(mac.receive().unwrap().unwrap().into_owned());
    assert_eq!(counts(dir.path()), (1, 0));
    drop(held);
    assert_eq!(counts(dir.path()), (1, 1));
}

#[test]
fn message_that_is_held_while_others_come_and_go_is_counted() {
    for mode in MODES {
        let dir = ipc_dir();
        let (phy, mac) = pair(dir.path(), &format!("latency=2 ring=16 msg=64x64 {mode}"));
        send_pooled(&phy);
        let held = mac.receive().unwrap().unwrap();
        for _ in 0..9 {
            send_pooled(&phy);
            drop(mac.receive().unwrap().unwrap());
        }
        assert_eq!(counts(dir.path()), (5, 4), "{mode}");
        std::thread::sleep(Duration::from_millis(5));
        drop(held);
        assert_eq!(counts(dir.path()), (5, 5), "{mode}");
        assert!(times(dir.path()).unwrap().hold.sum() >= Duration::from_millis(5), "{mode}");
    }
}

#[test]
fn discarded_messages_are_not_counted() {
    // A link with a broadcast ring is removed with its last process, whatever is in the ring.
    for mode in &MODES[..2] {
        let dir = ipc_dir();
        let (phy, mac) = pair(dir.path(), &format!("latency=1 ring=16 msg=64x64 {mode}"));
        send_pooled(&phy);
        phy.send_inline(1, 0, b"").unwrap();
        drop((phy, mac));
        let options = LinkOptions::new().dir(dir.path()).fresh(true);
        let fresh = options.create(&config("link", &format!("latency=1 ring=16 msg=64x64 {mode}"))).unwrap();
        assert_eq!((fresh.was_created(), fresh.queued()), (false, 0), "{mode}");
        assert_eq!(counts(dir.path()), (0, 0), "{mode}");
    }
}

#[test]
fn link_without_samples_has_no_times_and_no_bytes_for_them() {
    let dir = ipc_dir();
    let (phy, mac) = pair(dir.path(), "");
    send_pooled(&phy);
    drop(mac.receive().unwrap().unwrap());
    assert!(times(dir.path()).is_none());
    let bytes = |changes| config("link", changes).segment_bytes();
    assert!((130_000..150_000).contains(&(bytes("latency=64") - bytes(""))));
}

#[test]
fn requests_and_replies_are_not_sampled() {
    let dir = ipc_dir();
    let (phy, mac) = pair(dir.path(), "latency=1 requests=2");
    let mut pending = mac.request_inline(1, 0, b"what").unwrap();
    phy.receive_request().unwrap().unwrap().reply_inline(2, 0, b"that").unwrap();
    drop(pending.wait(Some(Duration::from_secs(10))).unwrap());
    assert_eq!(counts(dir.path()), (0, 0));
    let mut loan = mac.loan_with(PoolId::CpuData).unwrap();
    loan.resize_data(8).unwrap();
    loan.send().unwrap();
    drop(phy.receive().unwrap().unwrap());
    assert_eq!(counts(dir.path()), (1, 1));
}

/// Whatever stands in the words of the samples, messages are not affected, and times can be read.
#[test]
fn words_of_samples_may_have_any_value() {
    for mode in MODES {
        let dir = ipc_dir();
        let (phy, mac) = pair(dir.path(), &format!("latency=1 ring=16 msg=64x64 {mode}"));
        let file = std::fs::File::options().write(true).open(dir.path().join("link_shm")).unwrap();
        let end = file.metadata().unwrap().len();
        // The last words of the segment, of which nothing else uses any.
        for word in [u64::MAX, 1 << 63, 1 << 48, 0x5555_5555_5555_5555, 1] {
            for at in (end - 64 * 2 * 17 * 64..end).step_by(8) {
                file.write_all_at(&word.to_ne_bytes(), at).unwrap();
            }
            for id in 0..20 {
                send_pooled(&phy);
                phy.send_inline(id, 0, b"inline").unwrap();
                drop(mac.receive().unwrap().unwrap());
                assert_eq!(mac.receive().unwrap().unwrap().msg_id(), id, "{mode}");
            }
            let LinkTimes { latency, hold, .. } = times(dir.path()).unwrap();
            for histogram in [latency, hold] {
                let quantiles = [0.0, 0.5, 1.0].map(|share| histogram.quantile(share).unwrap());
                assert!(quantiles.is_sorted() && histogram.count() > 0 && histogram.sum() > Duration::ZERO);
            }
        }
    }
}
