//! Messages arrive as they were sent: each kind of message, in both directions, on each kind of link.

use std::collections::BTreeSet;

use shmesh::config::PoolId;
use shmesh::{INLINE_MAX_BYTES, Link, LinkOptions, Side};
use shmesh_testing::{config, ipc_dir, kind_of, receive, refused, send};

/// Each kind of link on which messages travel differently.
const KINDS: [&str; 4] = ["mode=mpmc", "mode=spsc", "mode=mpmc backing=memfd", "mode=spsc backing=memfd"];

struct Ends {
    primary: Link,
    secondary: Link,
    _dir: tempfile::TempDir,
}

fn ends(changes: &str) -> Ends {
    let dir = ipc_dir();
    let options = LinkOptions::new().dir(dir.path());
    let primary = options.create(&config("link", changes)).unwrap();
    let secondary = options.attach("link", Side::Secondary).unwrap();
    Ends { primary, secondary, _dir: dir }
}

/// Runs a test on each kind of link and in both directions: with a sender and a receiver.
fn both_ways(changes: &str, test: impl Fn(&Link, &Link, &str)) {
    for kind in KINDS {
        let ends = ends(&format!("{kind} {changes}"));
        test(&ends.primary, &ends.secondary, &format!("{kind}, down"));
        test(&ends.secondary, &ends.primary, &format!("{kind}, up"));
    }
}

/// Bytes that are not the same anywhere, so that a message in the wrong place is noticed.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31) ^ (i >> 8) ^ (seed * 7)).to_le_bytes()[0]).collect()
}

#[test]
fn msg_only() {
    both_ways("", |from, to, kind| {
        for len in [0, 1, 63, 64, 65, 255, 256] {
            let mut loan = from.loan().unwrap();
            loan.resize_msg(len).unwrap().copy_from_slice(&pattern(len, len));
            assert_eq!(loan.data_pool(), None);
            loan.send().unwrap();
            let message = to.receive().unwrap().expect(kind);
            assert_eq!(message.msg(), pattern(len, len), "{kind}, {len} bytes");
            assert!(
                message.data().is_empty() && message.data_pool().is_none() && !message.is_inline(),
                "{kind}"
            );
        }
        assert!(to.receive().unwrap().is_none());
    });
}

#[test]
fn msg_and_data() {
    both_ways("large=100000x2", |from, to, kind| {
        for (pool, limit) in [(PoolId::CpuData, 4096), (PoolId::CpuLarge, 100_000)] {
            for len in [0, 1, limit - 1, limit] {
                let mut loan = from.loan_with(pool).unwrap();
                loan.resize_msg(7).unwrap().copy_from_slice(&pattern(7, 1));
                loan.resize_data(len).unwrap().copy_from_slice(&pattern(len, 2));
                assert_eq!(loan.data_pool(), Some(pool));
                loan.send().unwrap();
                let message = to.receive().unwrap().expect(kind);
                assert_eq!(message.msg(), pattern(7, 1), "{kind}, {pool}");
                assert!(message.data() == pattern(len, 2), "{kind}, {pool}, {len} bytes");
                assert_eq!(message.data_pool(), Some(pool), "{kind}");
            }
        }
    });
}

#[test]
fn inline_messages_of_each_length() {
    both_ways("", |from, to, kind| {
        for len in 0..=INLINE_MAX_BYTES {
            from.send_inline(3, 4, &pattern(len, len)).unwrap();
            let message = to.receive().unwrap().expect(kind);
            assert!(message.is_inline() && message.data().is_empty(), "{kind}");
            assert_eq!((message.msg_id(), message.cell_id()), (3, 4), "{kind}");
            assert_eq!(message.msg(), pattern(len, len), "{kind}, {len} bytes");
        }
    });
}

#[test]
fn ids_are_chosen_by_the_application() {
    both_ways("", |from, to, kind| {
        for (msg_id, cell_id) in [(0, 0), (1, -1), (-1, 1), (i32::MIN, i32::MAX), (i32::MAX, i32::MIN)] {
            from.loan().unwrap().with_msg_id(msg_id).with_cell_id(cell_id).send().unwrap();
            from.send_inline(msg_id, cell_id, b"small").unwrap();
            for _ in 0..2 {
                let message = to.receive().unwrap().expect(kind);
                assert_eq!((message.msg_id(), message.cell_id()), (msg_id, cell_id), "{kind}");
            }
        }
        // A buffer that is used again does not remember them.
        from.loan().unwrap().send().unwrap();
        let message = to.receive().unwrap().expect(kind);
        assert_eq!((message.msg_id(), message.cell_id(), message.msg().len()), (0, 0, 0), "{kind}");
    });
}

#[test]
fn last_length_counts() {
    both_ways("", |from, to, kind| {
        let mut loan = from.loan_with(PoolId::CpuData).unwrap();
        loan.resize_msg(100).unwrap().fill(1);
        loan.resize_msg(3).unwrap().copy_from_slice(b"abc");
        loan.resize_data(4096).unwrap().fill(1);
        loan.resize_data(2).unwrap().copy_from_slice(b"de");
        refused(loan.resize_msg(257).map(|_| ()));
        refused(loan.resize_data(4097).map(|_| ()));
        loan.send().unwrap();
        let message = to.receive().unwrap().expect(kind);
        assert_eq!((message.msg(), message.data()), (&b"abc"[..], &b"de"[..]), "{kind}");
    });
}

#[test]
fn small_and_large_messages_keep_their_order() {
    both_ways("ring=64", |from, to, kind| {
        for round in 0..20 {
            for i in 0..10 {
                match (round + i) % 3 {
                    0 => from.send_inline(i, 0, b"").unwrap(),
                    1 => send(from, i, "pooled").unwrap(),
                    _ => from.loan_with(PoolId::CpuData).unwrap().with_msg_id(i).send().unwrap(),
                }
            }
            for i in 0..10 {
                assert_eq!(to.receive().unwrap().expect(kind).msg_id(), i, "{kind}");
            }
        }
    });
}

#[test]
fn batches() {
    both_ways("ring=16", |from, to, kind| {
        let loans =
            |count: i32| -> Vec<_> { (0..count).map(|i| from.loan().unwrap().with_msg_id(i)).collect() };
        let mut some = loans(10);
        assert_eq!(from.send_batch(&mut some).unwrap(), 10, "{kind}");
        assert!(some.is_empty());
        // Six more fit; the others stay with the sender, in order.
        let mut more = loans(10);
        assert_eq!(from.send_batch(&mut more).unwrap(), 6, "{kind}");
        assert_eq!(more.len(), 4, "{kind}");
        assert_eq!(kind_of(&refused(from.send_batch(&mut more))), "Full", "{kind}");
        assert_eq!(more.len(), 4, "{kind}");

        let mut messages = Vec::new();
        assert_eq!(to.receive_batch(&mut messages, 3).unwrap(), 3, "{kind}");
        assert_eq!(to.receive_batch(&mut messages, 0).unwrap(), 0, "{kind}");
        assert_eq!(to.receive_batch(&mut messages, 100).unwrap(), 13, "{kind}");
        assert_eq!(to.receive_batch(&mut messages, 100).unwrap(), 0, "{kind}");
        let ids: Vec<_> = messages.iter().map(shmesh::Message::msg_id).collect();
        assert_eq!(ids, (0..10).chain(0..6).collect::<Vec<_>>(), "{kind}");
        messages.clear();

        assert_eq!(from.send_batch(&mut more).unwrap(), 4, "{kind}");
        from.send_inline(-1, 0, b"last").unwrap();
        assert_eq!(to.receive_batch(&mut messages, 100).unwrap(), 5, "{kind}");
        let ids: Vec<_> = messages.iter().map(shmesh::Message::msg_id).collect();
        assert_eq!(ids, [6, 7, 8, 9, -1], "{kind}");
    });
}

#[test]
fn ring_holds_exactly_its_length() {
    // A length that is no power of two is rounded up, and the link says to what.
    for (asked, holds) in [(1, 1), (2, 2), (5, 8), (16, 16)] {
        both_ways(&format!("ring={asked} msg=64x100"), |from, to, kind| {
            assert_eq!(from.ring_len(), holds, "{kind}");
            // Several times, so that the ring goes round.
            for _ in 0..5 {
                for i in 0..holds {
                    send(from, i.cast_signed(), "x").unwrap();
                }
                assert_eq!(to.queued(), holds as usize, "{kind}");
                assert_eq!(kind_of(&refused(send(from, 0, "x"))), "Full", "{kind}");
                assert_eq!(kind_of(&refused(from.send_inline(0, 0, b"x"))), "Full", "{kind}");
                for i in 0..holds {
                    assert_eq!(receive(to).unwrap().expect(kind).0, i.cast_signed(), "{kind}");
                }
                assert_eq!(receive(to).unwrap(), None, "{kind}");
            }
        });
    }
}

#[test]
fn pool_holds_exactly_its_length() {
    both_ways("msg=64x70 data=64x3 ring=128", |from, to, kind| {
        for _ in 0..3 {
            let loans: Vec<_> = (0..70).map(|_| from.loan().unwrap()).collect();
            let indices: BTreeSet<_> = loans.iter().map(shmesh::Loan::index).collect();
            assert_eq!(indices, (0..70).collect(), "{kind}: each buffer once");
            assert_eq!(kind_of(&refused(from.loan())), "Exhausted", "{kind}");
            assert_eq!(kind_of(&refused(to.loan())), "Exhausted", "{kind}: both sides share a pool");
            drop(loans);
            let loans: Vec<_> = (0..3).map(|_| to.loan_with(PoolId::CpuData).unwrap()).collect();
            assert_eq!(kind_of(&refused(to.loan_with(PoolId::CpuData))), "Exhausted", "{kind}");
            // The MSG buffer that was taken for it came back.
            assert_eq!((0..67).map(|_| to.loan().unwrap()).collect::<Vec<_>>().len(), 67, "{kind}");
            drop(loans);
        }
    });
}

#[test]
fn last_released_buffer_is_loaned_first() {
    both_ways("", |from, to, kind| {
        let loans: Vec<_> = (0..8).map(|_| from.loan().unwrap()).collect();
        let indices: Vec<_> = loans.iter().map(shmesh::Loan::index).collect();
        for loan in loans {
            drop(loan);
        }
        let again: Vec<_> = (0..8).map(|_| from.loan().unwrap()).collect();
        let again: Vec<_> = again.iter().map(shmesh::Loan::index).collect();
        assert_eq!(again, indices.into_iter().rev().collect::<Vec<_>>(), "{kind}");

        // A receiver answers in the buffer that it has just read.
        let loan = from.loan().unwrap();
        let index = loan.index();
        loan.send().unwrap();
        drop(to.receive().unwrap().expect(kind));
        assert_eq!(to.loan().unwrap().index(), index, "{kind}");
    });
}

#[test]
fn large_pool_reuses_few_buffers() {
    both_ways("msg=64x1024 data=64x1024 ring=16", |from, to, kind| {
        let (mut touched, mut data_touched) = (BTreeSet::new(), BTreeSet::new());
        for i in 0..10_000 {
            // At most four in flight.
            let mut loan = from.loan_with(PoolId::CpuData).unwrap();
            touched.insert(loan.index());
            data_touched.insert(loan.resize_data(1).unwrap().as_ptr().addr());
            loan.with_msg_id(i).send().unwrap();
            if i >= 3 {
                assert_eq!(to.receive().unwrap().expect(kind).msg_id(), i - 3, "{kind}");
            }
        }
        while to.receive().unwrap().is_some() {}
        // The sender takes what the receiver released, 32 at a time.
        assert!(touched.len() <= 64, "{kind}: {} of 1024 MSG buffers", touched.len());
        assert!(data_touched.len() <= 64, "{kind}: {} of 1024 DATA buffers", data_touched.len());
    });
}

#[test]
fn pool_of_size_0_is_not_created() {
    for changes in ["data=0x16", "data=4096x0"] {
        for kind in ["", "backing=memfd"] {
            let dir = ipc_dir();
            let options = LinkOptions::new().dir(dir.path());
            let primary = options.create(&config("link", &format!("{changes} {kind}"))).unwrap();
            let secondary = options.attach("link", Side::Secondary).unwrap();
            assert!(!dir.path().join("link_cpu_data").exists());
            assert!(!dir.path().join("link_cpu_large").exists());
            assert_eq!(secondary.pool(PoolId::CpuData), None, "{changes}");
            assert_eq!(secondary.pool(PoolId::CpuMsg), Some((256, 32)), "{changes}");
            assert_eq!(kind_of(&refused(secondary.loan_with(PoolId::CpuData))), "NoPool");
            // The attempt cost no MSG buffer.
            assert_eq!((0..32).map(|_| secondary.loan().unwrap()).collect::<Vec<_>>().len(), 32);
            send(&secondary, 1, "without").unwrap();
            assert_eq!(receive(&primary).unwrap(), Some((1, "without".to_owned())));
        }
    }
}

#[test]
fn dropped_loan_is_not_sent() {
    both_ways("msg=64x2 data=64x2", |from, to, kind| {
        for _ in 0..10 {
            drop(from.loan_with(PoolId::CpuData).unwrap());
        }
        assert!(to.receive().unwrap().is_none(), "{kind}");
        send(from, 1, "sent").unwrap();
        assert_eq!(receive(to).unwrap(), Some((1, "sent".to_owned())), "{kind}");
    });
}

#[test]
fn message_is_unchanged_while_borrowed() {
    both_ways("msg=64x4 ring=16", |from, to, kind| {
        from.send_inline(1, 0, b"small and held").unwrap();
        send(from, 2, "held").unwrap();
        let small = to.receive().unwrap().expect(kind);
        let pooled = to.receive().unwrap().expect(kind);
        // The ring goes round many times, and every other buffer is used again and again.
        for _ in 0..100 {
            from.send_inline(3, 0, b"something else").unwrap();
            send(from, 4, "other").unwrap();
            drop((to.receive().unwrap(), to.receive().unwrap()));
        }
        assert_eq!((small.msg(), pooled.msg()), (&b"small and held"[..], &b"held"[..]), "{kind}");
    });
}

#[test]
fn sent_messages_survive_detach_of_the_sender() {
    for kind in KINDS {
        let Ends { primary, secondary, _dir } = ends(kind);
        send(&secondary, 1, "pooled").unwrap();
        secondary.send_inline(2, 0, b"inline").unwrap();
        drop(secondary);
        assert_eq!(receive(&primary).unwrap(), Some((1, "pooled".to_owned())), "{kind}");
        assert_eq!(receive(&primary).unwrap(), Some((2, "inline".to_owned())), "{kind}");
    }
}

#[test]
fn evicted_participant_is_recovered_by_its_old_seat_word() {
    let dir = ipc_dir();
    let options = LinkOptions::new().dir(dir.path());
    let phy = options.create(&config("link", "")).unwrap();
    let mac = options.attach("link", Side::Secondary).unwrap();
    let seen = phy.participants().find(|other| other.seat == mac.seat()).unwrap();
    phy.evict(seen.seat).unwrap();
    assert_eq!(
        phy.recover_participant(seen.seat, seen.word).unwrap().participants,
        1,
        "the same one sits there"
    );
    assert_eq!(phy.participants().count(), 1);
    assert_eq!(kind_of(&refused(mac.loan().map(|_| ()))), "Evicted");
}
