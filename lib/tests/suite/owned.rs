//! Owned messages and loans: in other threads, longer than their handle, and taken away from under them.

use shmesh::config::PoolId;
use shmesh::{ErrorKind, Link, LinkOptions, OwnedMessage, PeerEvent, Side};
use shmesh_testing::{Watchdog, config, ipc_dir, kind_of, refused, send};

const MODES: [&str; 2] = ["mode=mpmc", "mode=spsc"];

fn pair(dir: &std::path::Path, changes: &str) -> (Link, Link) {
    let options = LinkOptions::new().dir(dir);
    let primary = options.create(&config("link", changes)).unwrap();
    (primary, options.attach("link", Side::Secondary).unwrap())
}

fn send_both(link: &Link, id: i32) {
    let mut loan = link.loan_with(PoolId::CpuData).unwrap();
    loan.resize_msg(4).unwrap().copy_from_slice(&id.to_le_bytes());
    loan.resize_data(100).unwrap().fill(id.to_le_bytes()[0]);
    loan.with_msg_id(id).send().unwrap();
}

fn next(link: &Link) -> OwnedMessage {
    link.receive().unwrap().expect("a message").into_owned()
}

fn check(message: &OwnedMessage) {
    let id = message.msg_id();
    assert_eq!(message.msg_shared().to_vec(), id.to_le_bytes());
    assert_eq!(message.data(), [id.to_le_bytes()[0]; 100]);
}

/// How many messages with DATA `link` can loan at once: all that nothing else holds, and whose hints are not lost.
fn free(link: &Link) -> usize {
    let loans: Vec<_> = std::iter::from_fn(|| link.loan_with(PoolId::CpuData).ok()).collect();
    loans.len()
}

#[test]
fn owned_messages_are_released_in_other_threads() {
    let _watchdog = Watchdog::start();
    for mode in MODES {
        let dir = ipc_dir();
        let (primary, secondary) = pair(dir.path(), &format!("{mode} msg=256x8 data=128x8"));
        let (to_worker, work) = std::sync::mpsc::sync_channel::<OwnedMessage>(4);
        let worker = std::thread::spawn(move || {
            let mut sum = 0;
            for message in work {
                check(&message);
                sum += message.msg_id();
            }
            sum
        });
        // Buffers go round: loaned here, released by the worker, many times each.
        for id in 0..1_000 {
            while refused_for_now(secondary.loan_with(PoolId::CpuData).map(drop)) {
                std::thread::yield_now();
            }
            send_both(&secondary, id);
            to_worker.send(next(&primary)).unwrap();
        }
        drop(to_worker);
        assert_eq!(worker.join().unwrap(), (0..1_000).sum::<i32>(), "{mode}");
        assert_eq!(free(&secondary), 8, "{mode}: every buffer is free and known");
    }
}

fn refused_for_now(result: shmesh::Result<()>) -> bool {
    match result {
        Ok(()) => false,
        Err(error) if matches!(error.kind(), ErrorKind::Exhausted { .. }) => true,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn seat_stays_until_the_last_owned_message_is_dropped() {
    for mode in MODES {
        let dir = ipc_dir();
        let (primary, secondary) = pair(dir.path(), mode);
        send_both(&secondary, 1);
        send_both(&secondary, 2);
        secondary.send_inline(3, 0, &[3; 112]).unwrap();
        let (first, second, small) = (next(&primary), next(&primary), next(&primary));
        let seat = primary.seat();
        let is_seated = |link: &Link| link.participants().any(|other| other.seat == seat);
        while secondary.next_event().is_some() {}
        drop(primary);
        assert!(is_seated(&secondary), "{mode}");
        assert_eq!(secondary.next_event(), None, "{mode}");
        assert_eq!(secondary.recover().unwrap().participants, 0, "{mode}: its process lives");

        // The roles are free at once: another handle receives what comes next.
        let heir = LinkOptions::new().dir(dir.path()).create(&config("link", mode)).unwrap();
        send_both(&secondary, 4);
        check(&next(&heir));
        while secondary.next_event().is_some() {}

        check(&first);
        drop(first);
        check(&second);
        assert_eq!((small.msg(), small.is_inline()), (&[3; 112][..], true));
        drop(second);
        assert!(is_seated(&secondary), "{mode}: an inline message holds it, too");
        drop(small);
        assert!(!is_seated(&secondary), "{mode}");
        assert!(
            matches!(secondary.next_event(), Some(PeerEvent::Detached(peer)) if peer.seat == seat),
            "{mode}"
        );
        assert_eq!(free(&secondary), 16, "{mode}: every buffer is free and known");
    }
}

#[test]
fn owned_message_of_an_evicted_handle_frees_no_buffer_of_others() {
    let dir = ipc_dir();
    let (primary, secondary) = pair(dir.path(), "mode=mpmc msg=256x1 data=128x1");
    send_both(&secondary, 1);
    let message = next(&primary);
    assert_eq!(secondary.evict(primary.seat()).unwrap().messages, 1);
    // The only buffers are another's now.
    let mut loan = secondary.loan_with(PoolId::CpuData).unwrap();
    loan.resize_msg(3).unwrap().copy_from_slice(b"new");
    drop(message);
    drop(primary);
    assert_eq!(kind_of(&refused(secondary.loan().map(drop))), "Exhausted");
    loan.send().unwrap();
    let heir = LinkOptions::new().dir(dir.path()).allow_second_primary(true);
    let heir = heir.create(&config("link", "mode=mpmc msg=256x1 data=128x1")).unwrap();
    assert_eq!(heir.receive().unwrap().expect("it was sent").msg(), b"new");
}

#[test]
fn link_is_removed_when_the_last_owned_message_is_dropped() {
    let dir = ipc_dir();
    let (primary, secondary) = pair(dir.path(), "mode=mpmc");
    send_both(&secondary, 7);
    let message = next(&primary);
    drop((primary, secondary));
    assert!(!shmesh_testing::files(dir.path()).is_empty(), "the message is on the link");
    check(&message);
    drop(message);
    assert_eq!(shmesh_testing::files(dir.path()), Vec::<String>::new());
}

#[test]
fn owned_loan_is_written_elsewhere_and_sent_by_its_handle() {
    for mode in MODES {
        let dir = ipc_dir();
        let (primary, secondary) = pair(dir.path(), &format!("{mode} msg=256x2 data=128x2"));
        let mut loan = secondary.loan_with(PoolId::CpuData).unwrap().with_msg_id(5);
        loan.resize_msg(4).unwrap();
        loan.resize_data(100).unwrap();
        let mut loan = loan.into_owned();
        let loan = std::thread::spawn(move || {
            loan.msg_mut().copy_from_slice(&5_i32.to_le_bytes());
            loan.data_mut().fill(5);
            loan
        });
        secondary.adopt(loan.join().unwrap()).unwrap().send().unwrap();
        check(&next(&primary));

        let foreign = secondary.loan().unwrap().into_owned();
        assert_eq!(kind_of(&refused(primary.adopt(foreign).map(drop))), "ForeignLoan");
        let mut empty = secondary.loan().unwrap().into_owned();
        assert_eq!((empty.msg_mut().len(), empty.data_mut().len()), (0, 0), "no lengths were set");
        std::thread::spawn(move || drop(empty)).join().unwrap();
        assert_eq!(free(&secondary), 2, "{mode}: every buffer is free and known");
    }
}

#[test]
fn evicted_handle_adopts_no_loan() {
    let dir = ipc_dir();
    let (primary, secondary) = pair(dir.path(), "msg=256x2 data=128x2");
    let loan = secondary.loan().unwrap().into_owned();
    primary.evict(secondary.seat()).unwrap();
    assert_eq!(kind_of(&refused(secondary.adopt(loan).map(drop))), "Evicted");
    assert_eq!(free(&primary), 2, "it was taken back once");
}

/// A DATA buffer remembers 18 bits of the number of its message's loan; one of these numbers also is that of no loan.
#[test]
fn adopted_loans_keep_their_data_whatever_their_number() {
    let dir = ipc_dir();
    let (primary, secondary) = pair(dir.path(), "msg=256x1 data=128x2");
    for _ in 0..(1 << 18) - 4 {
        drop(secondary.loan().unwrap());
    }
    for id in 0..8 {
        let mut loan = secondary.loan_with(PoolId::CpuData).unwrap().with_msg_id(id);
        loan.resize_msg(4).unwrap().copy_from_slice(&id.to_le_bytes());
        loan.resize_data(100).unwrap().fill(id.to_le_bytes()[0]);
        secondary.adopt(loan.into_owned()).unwrap().send().unwrap();
        check(&next(&primary));
    }
}

/// In a struct beside the link that it came from, and held across threads of an executor: the types say so.
#[test]
fn owned_messages_stay_beside_their_link() {
    struct Worker {
        link: Link,
        kept: Vec<OwnedMessage>,
    }
    let dir = ipc_dir();
    let (primary, secondary) = pair(dir.path(), "mode=mpmc");
    let mut worker = Worker { link: primary, kept: Vec::new() };
    send(&secondary, 1, "first").unwrap();
    send(&secondary, 2, "second").unwrap();
    worker = std::thread::spawn(move || {
        while let Some(message) = worker.link.receive().unwrap() {
            worker.kept.push(message.into_owned());
        }
        worker
    })
    .join()
    .unwrap();
    let texts: Vec<_> = worker.kept.iter().map(OwnedMessage::msg).collect();
    assert_eq!(texts, [&b"first"[..], b"second"]);
}
