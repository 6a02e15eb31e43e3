//! Threads: any number per side, each with a handle of its own.

use std::sync::atomic::{AtomicUsize, Ordering};

use shmesh::{Error, Link, LinkOptions, Side};
use shmesh_testing::{Watchdog, config, ipc_dir, kind_of, refused};

/// Sends as soon as there is room.
fn send_patiently(link: &Link, msg_id: i32, cell_id: i32, small: bool) {
    loop {
        let sent = if small {
            link.send_inline(msg_id, cell_id, &msg_id.to_le_bytes())
        } else {
            link.loan().and_then(|mut loan| {
                loan.resize_msg(4)?.copy_from_slice(&msg_id.to_le_bytes());
                loan.with_msg_id(msg_id).with_cell_id(cell_id).send().map_err(Error::from)
            })
        };
        match sent {
            Ok(()) => return,
            Err(error) if error.is_retryable() => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn many_to_many_delivers_once_in_producer_order() {
    exchange_many_to_many(1_000);
}

#[test]
#[ignore = "long: 50,000 messages of each thread"]
fn many_to_many_delivers_once_in_producer_order_for_long() {
    exchange_many_to_many(50_000);
}

fn exchange_many_to_many(each: i32) {
    const PRODUCERS: i32 = 4;
    const CONSUMERS: usize = 4;
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let options = LinkOptions::new().dir(dir.path());
    // Small, so that it is full and empty again and again.
    let primary = options.create(&config("link", "mode=mpmc ring=64 msg=64x96")).unwrap();
    let secondary = options.attach("link", Side::Secondary).unwrap();
    let received = AtomicUsize::new(0);
    let total = usize::try_from(PRODUCERS * each).unwrap();
    let heard: Vec<Vec<(i32, i32)>> = std::thread::scope(|scope| {
        for producer in 0..PRODUCERS {
            let link = secondary.try_clone().unwrap();
            scope.spawn(move || {
                for i in 0..each {
                    send_patiently(&link, i, producer, i % 5 == 0);
                }
            });
        }
        let consumers: Vec<_> = (0..CONSUMERS)
            .map(|consumer| {
                let link = primary.try_clone().unwrap();
                let received = &received;
                scope.spawn(move || {
                    let mut heard = Vec::new();
                    let mut batch = Vec::new();
                    while received.load(Ordering::Relaxed) < total {
                        // Half of them one by one, half of them in batches.
                        let max = if consumer % 2 == 0 { 1 } else { 16 };
                        let taken = link.receive_batch(&mut batch, max).unwrap();
                        for message in batch.drain(..) {
                            assert_eq!(message.msg(), message.msg_id().to_le_bytes());
                            heard.push((message.cell_id(), message.msg_id()));
                        }
                        received.fetch_add(taken, Ordering::Relaxed);
                        if taken == 0 {
                            std::thread::yield_now();
                        }
                    }
                    heard
                })
            })
            .collect();
        consumers.into_iter().map(|consumer| consumer.join().unwrap()).collect()
    });
    for (consumer, heard) in heard.iter().enumerate() {
        for producer in 0..PRODUCERS {
            let ids: Vec<_> = heard.iter().filter(|(from, _)| *from == producer).map(|(_, id)| *id).collect();
            assert!(ids.is_sorted(), "consumer {consumer} got messages of producer {producer} out of order");
        }
    }
    let mut all: Vec<_> = heard.into_iter().flatten().collect();
    all.sort_unstable();
    let expected: Vec<_> = (0..PRODUCERS).flat_map(|from| (0..each).map(move |id| (from, id))).collect();
    assert!(all == expected, "each message once");
    // Nothing leaked: every buffer is free again.
    assert_eq!((0..96).map(|_| primary.loan().unwrap()).collect::<Vec<_>>().len(), 96);
}

#[test]
fn one_thread_sends_and_one_receives_on_each_side() {
    exchange_between_two_threads_each(1_000);
}

#[test]
#[ignore = "long: 50,000 messages of each thread"]
fn one_thread_sends_and_one_receives_on_each_side_for_long() {
    exchange_between_two_threads_each(50_000);
}

fn exchange_between_two_threads_each(each: i32) {
    let _watchdog = Watchdog::start();
    for mode in ["mode=spsc", "mode=mpmc"] {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let primary = options.create(&config("link", &format!("{mode} ring=32 msg=64x96"))).unwrap();
        let secondary = options.attach("link", Side::Secondary).unwrap();
        std::thread::scope(|scope| {
            for link in [&primary, &secondary] {
                let (sender, receiver) = (link.try_clone().unwrap(), link.try_clone().unwrap());
                scope.spawn(move || {
                    for i in 0..each {
                        send_patiently(&sender, i, 7, i % 3 == 0);
                    }
                });
                scope.spawn(move || {
                    for i in 0..each {
                        let message = loop {
                            match receiver.receive().unwrap() {
                                Some(message) => break message,
                                None => std::thread::yield_now(),
                            }
                        };
                        assert_eq!((message.msg_id(), message.cell_id()), (i, 7), "{mode}");
                        assert_eq!(message.msg(), i.to_le_bytes(), "{mode}");
                    }
                });
            }
        });
    }
}

#[test]
fn spsc_role_passes_between_threads() {
    let dir = ipc_dir();
    let options = LinkOptions::new().dir(dir.path());
    let primary = options.create(&config("link", "mode=spsc")).unwrap();
    let secondary = options.attach("link", Side::Secondary).unwrap();
    secondary.send_inline(0, 0, b"").unwrap();
    let other = secondary.try_clone().unwrap();
    let error = refused(other.send_inline(1, 0, b""));
    assert_eq!(kind_of(&error), "RoleTaken");
    assert!(error.to_string().contains("producer"), "{error}");
    // The role is of the handle, and goes with it.
    drop(secondary);
    std::thread::spawn(move || other.send_inline(1, 0, b"")).join().unwrap().unwrap();
    for i in 0..2 {
        assert_eq!(primary.receive().unwrap().unwrap().msg_id(), i);
    }
    let receiver = primary.try_clone().unwrap();
    assert_eq!(kind_of(&refused(receiver.receive())), "RoleTaken");
    drop(primary);
    assert!(receiver.receive().unwrap().is_none());
}

#[test]
fn handle_moves_between_threads() {
    let dir = ipc_dir();
    let options = LinkOptions::new().dir(dir.path());
    let primary = options.create(&config("link", "")).unwrap();
    let secondary = options.attach("link", Side::Secondary).unwrap();
    let first = secondary.loan().unwrap().index();
    std::thread::spawn(move || {
        assert_eq!(secondary.loan().unwrap().index(), first, "it remembers what it released last");
        secondary.send_inline(1, 0, b"moved").unwrap();
        secondary.notify().unwrap();
    })
    .join()
    .unwrap();
    assert_eq!(primary.receive().unwrap().unwrap().msg(), b"moved");
}

#[test]
fn clones_keep_the_link_after_the_first_handle_is_dropped() {
    for changes in ["", "backing=memfd", "notify=off"] {
        let dir = ipc_dir();
        let options = LinkOptions::new().dir(dir.path());
        let primary = options.create(&config("link", changes)).unwrap();
        let clone = primary.try_clone().unwrap();
        drop(primary);
        let secondary = options.attach("link", Side::Secondary).unwrap();
        secondary.send_inline(1, 0, b"hello").unwrap();
        assert_eq!(clone.receive().unwrap().unwrap().msg(), b"hello", "{changes}");
        drop((clone, secondary));
        assert_eq!(shmesh_testing::files(dir.path()), [""; 0], "{changes}");
    }
}
