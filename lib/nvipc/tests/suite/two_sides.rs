//! Two endpoints in separate processes over NVIPC's layout.

use crate::support::{
    HANGS, Peer, check, count_free, default_pools, ipc_dir, options, pools, receive, send, until,
};
use shmesh::config::PoolId;
use shmesh_nvipc_wire::{Buffers, Error, Message};

#[test]
fn files_match_nvipcs() {
    let dir = ipc_dir();
    let phy = options(dir.path()).create("nvipc", pools()).unwrap();
    let mut files: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len()))
        .collect();
    files.sort();
    let expected = [
        ("nvipc_cmd_ring", 1600),
        ("nvipc_cpu_data", 32 + 4 * 8 + 4 * 4096),
        ("nvipc_cpu_large", 32 + 2 * 8 + 2 * 8192),
        ("nvipc_cpu_msg", 32 + 8 * 8 + 8 * 256),
        ("nvipc_debug", 760 + 160 * 8),
        ("nvipc_fw", 24 + 32 + 8 * 8),
        ("nvipc_shm", 2 * (32 + 8 * 8) + 32 * 8),
        ("nvipc_un_sock_server", 0),
        ("sem.nvipc_dbg_sem", 32),
    ];
    assert_eq!(files, expected.map(|(name, len)| (name.to_owned(), len)));
    let debug = std::fs::read(dir.path().join("nvipc_debug")).unwrap();
    let word = |at: usize| i32::from_le_bytes(debug[at..][..4].try_into().unwrap());
    assert_eq!((word(40), word(44), word(48), word(200)), (3, 1, -1, 2530));
    assert_eq!((word(56), word(60), word(64), word(68)), (256, 8, 4096, 4));
    assert_eq!(&debug[96..102], b"nvipc\0");
    drop(phy);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a primary removes what it made");
}

#[test]
fn every_pool_in_both_directions_and_either_role() {
    for ours in ["create", "attach"] {
        let dir = ipc_dir();
        let mut peer = Peer::start(dir.path());
        let link = if ours == "create" {
            let link = options(dir.path()).create("fapi", pools()).unwrap();
            peer.tell("attach fapi");
            link
        } else {
            peer.tell("create fapi");
            options(dir.path()).attach("fapi").unwrap()
        };
        until("they have met", || link.has_peer());
        peer.tell("meet");
        for round in 0..40 {
            let id = 0x80 + round;
            send(&link, id, 256, None).unwrap();
            send(&link, id + 1, 1, Some((PoolId::CpuData, 4096))).unwrap();
            send(&link, id + 2, 0, Some((PoolId::CpuLarge, 8192))).unwrap();
            link.notify().unwrap();
            assert_eq!(peer.ask("wait"), "true");
            for expected in [id, id + 1, id + 2] {
                assert_eq!(peer.ask("receive"), expected.to_string());
            }
            assert_eq!(peer.ask("receive"), "none");

            peer.tell(&format!("send {id} 256"));
            peer.tell(&format!("send {id} 7 1 4096"));
            peer.tell(&format!("send {id} 7 2 100"));
            assert_eq!(link.queued(), 3);
            peer.tell("notify");
            assert!(link.wait(Some(HANGS)).unwrap());
            for _ in 0..3 {
                assert_eq!(receive(&link).unwrap(), Some(id));
            }
            assert_eq!(receive(&link).unwrap(), None);
        }
        assert_eq!(count_free(&link, None), 8);
        assert_eq!(count_free(&link, Some(PoolId::CpuData)), 4);
        assert_eq!(count_free(&link, Some(PoolId::CpuLarge)), 2);
    }
}

#[test]
fn thousands_of_round_trips_with_notification() {
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    let mut peer = Peer::start(dir.path());
    peer.tell("attach fapi");
    peer.order("echo 3000");
    until("the peer has connected", || link.has_peer());
    let (mut sent, mut back) = (0, 0);
    while back < 3000 {
        while sent < 3000 {
            let data = (sent % 2 == 0).then_some((PoolId::CpuData, 64));
            match send(&link, sent % 256, 100, data) {
                Ok(()) => sent += 1,
                Err(Error::Empty { .. }) => break,
                Err(other) => panic!("{other}"),
            }
        }
        link.notify().unwrap();
        assert!(link.wait(Some(HANGS)).unwrap());
        while let Some(id) = receive(&link).unwrap() {
            assert_eq!(id, back % 256, "in the order of sending");
            back += 1;
        }
    }
    assert_eq!(peer.answer(), "ok");
    assert_eq!(count_free(&link, Some(PoolId::CpuData)), 4);
    assert_eq!(count_free(&link, None), 8);
}

#[test]
fn threads_of_both_processes_share_a_link() {
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    let mut peer = Peer::start(dir.path());
    peer.tell("attach fapi");
    until("the peer has connected", || link.has_peer());
    peer.order("echo 4000");
    let back = std::sync::atomic::AtomicUsize::new(0);
    let count = || back.load(std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|scope| {
        for turn in 0..2 {
            let link = &link;
            scope.spawn(move || {
                let mut sent = 0;
                while sent < 2000 {
                    match send(link, turn, 32, None) {
                        Ok(()) => {
                            link.notify().unwrap();
                            sent += 1;
                        }
                        Err(Error::Empty { .. }) => std::thread::yield_now(),
                        Err(other) => panic!("{other}"),
                    }
                }
            });
            scope.spawn(|| {
                while count() < 4000 {
                    match receive(link).unwrap() {
                        Some(_) => drop(back.fetch_add(1, std::sync::atomic::Ordering::Relaxed)),
                        None => std::thread::yield_now(),
                    }
                }
            });
        }
    });
    assert_eq!(peer.answer(), "ok");
    assert_eq!(count_free(&link, None), 8);
}

#[test]
fn exhaustion_is_an_immediate_error_and_temporary() {
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    let all: Vec<_> = (0..8).map(|_| link.allocate(None).unwrap()).collect();
    let error = link.allocate(None).unwrap_err();
    assert_eq!(
        error.to_string(),
        "pool cpu_msg: all 8 buffers are in use; release messages, or raise its pool_len"
    );
    link.release(all[0]).unwrap();
    // The MSG buffer is released if there is no DATA buffer for it.
    let data: Vec<_> = (0..1).map(|_| link.allocate(Some(PoolId::CpuLarge)).unwrap()).collect();
    link.release(all[1]).unwrap();
    let second = link.allocate(Some(PoolId::CpuLarge)).unwrap();
    link.release(all[2]).unwrap();
    let error = link.allocate(Some(PoolId::CpuLarge)).unwrap_err();
    assert!(matches!(error, Error::Empty { pool: PoolId::CpuLarge, len: 2 }), "{error}");
    assert!(link.allocate(None).is_ok());
    link.release(data[0]).unwrap();
    link.release(second).unwrap();
}

#[test]
fn addresses_that_are_not_held_are_refused() {
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    let message = |buffers| Message { msg_id: 1, cell_id: 0, msg_len: 8, data_len: 8, buffers };
    let mut here = [0_u8; 8];
    let foreign = Buffers { msg: here.as_mut_ptr(), ..Buffers::NONE };
    let not_held =
        |result: Result<(), Error>| assert!(matches!(result, Err(Error::NotHeld { .. })), "{result:?}");
    not_held(link.send(message(foreign)));
    not_held(link.release(foreign));
    not_held(link.send(message(Buffers::NONE)));
    link.release(Buffers::NONE).unwrap();

    let both = link.allocate(Some(PoolId::CpuData)).unwrap();
    // A DATA buffer belongs to one pool, and a free one is not held.
    not_held(link.release(Buffers { data_pool: Some(PoolId::CpuLarge), msg: std::ptr::null_mut(), ..both }));
    not_held(link.release(Buffers { data: both.msg, msg: std::ptr::null_mut(), ..both }));
    not_held(link.send(message(Buffers { data: both.data.wrapping_add(4096), ..both })));
    not_held(link.send(message(Buffers { data: both.data.wrapping_sub(1), ..both })));
    let past = link.send(message(Buffers { msg: both.msg.wrapping_add(8 * 256), ..both }));
    not_held(past);
    // One after the other: NVIPC's programs may keep the DATA part longer than the MSG part.
    link.release(Buffers { data: std::ptr::null_mut(), ..both }).unwrap();
    not_held(link.release(Buffers { data: std::ptr::null_mut(), ..both }));
    link.release(Buffers { msg: std::ptr::null_mut(), ..both }).unwrap();
    not_held(link.release(Buffers { msg: std::ptr::null_mut(), ..both }));

    let buffers = link.allocate(Some(PoolId::CpuData)).unwrap();
    for (msg_len, data_len) in [(-1, 0), (257, 0), (i32::MAX, 0), (0, -1), (0, 4097)] {
        let bad = link.send(Message { msg_len, data_len, ..message(buffers) });
        assert!(matches!(bad, Err(Error::Length { .. })), "{bad:?}");
    }
    link.send(message(buffers)).unwrap();
    not_held(link.send(message(buffers)));
    not_held(link.release(buffers));
    assert!(matches!(link.allocate(Some(PoolId::CudaData)), Err(Error::NoPool { .. })));
    assert!(matches!(link.allocate(Some(PoolId::CpuMsg)), Err(Error::NoPool { .. })));
}

#[test]
fn received_messages_can_be_forwarded_with_data() {
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    let mut peer = Peer::start(dir.path());
    peer.tell("attach fapi");
    peer.tell("send 5 10 1 100");
    let message = link.receive().unwrap().unwrap();
    check(&message);
    // The DATA buffer is sent with it, named or not.
    let unnamed = Buffers { data: std::ptr::null_mut(), data_pool: None, ..message.buffers };
    link.send(Message { buffers: unnamed, ..message }).unwrap();
    assert_eq!(peer.ask("receive"), "5");
    assert_eq!(count_free(&link, Some(PoolId::CpuData)), 4);
}

#[test]
fn data_buffer_sent_alone_leaves_its_old_msg() {
    let dir = ipc_dir();
    let link = options(dir.path()).create("fapi", pools()).unwrap();
    let message = |buffers| Message { msg_id: 1, cell_id: 0, msg_len: 8, data_len: 8, buffers };
    let old = link.allocate(Some(PoolId::CpuLarge)).unwrap();
    link.release(Buffers { msg: std::ptr::null_mut(), ..old }).unwrap();
    // The buffer that has been free for the longest comes next, so allocating the whole pool yields it.
    let all: Vec<_> = (0..2).map(|_| link.allocate(Some(PoolId::CpuLarge)).unwrap()).collect();
    let new = *all.iter().find(|new| new.data == old.data).unwrap();
    link.send_to_self(message(Buffers { data: std::ptr::null_mut(), data_pool: None, ..old })).unwrap();
    let received = link.receive().unwrap().unwrap();
    assert_eq!((received.buffers.msg, received.buffers.data_pool), (old.msg, None));
    link.release(received.buffers).unwrap();
    // It now belongs to the other MSG buffer, and is sent with that.
    link.send_to_self(message(Buffers { data: std::ptr::null_mut(), data_pool: None, ..new })).unwrap();
    assert_eq!(link.receive().unwrap().unwrap().buffers, new);
}

#[test]
fn device_pools_use_host_memory() {
    let dir = ipc_dir();
    let mut with_device = pools();
    with_device[PoolId::CudaData.index()] = shmesh::config::PoolConfig { buf_size_bytes: 512, pool_len: 2 };
    let link = options(dir.path()).create("fapi", with_device).unwrap();
    let mut peer = Peer::start(dir.path());
    peer.tell("attach fapi");
    send(&link, 5, 10, Some((PoolId::CudaData, 512))).unwrap();
    assert_eq!(peer.ask("receive"), "5");
    peer.tell("send 6 10 3 512");
    let message = link.receive().unwrap().unwrap();
    check(&message);
    assert_eq!(link.room_at(PoolId::CudaData, message.buffers.data.wrapping_add(500)), Some(12));
    link.release(message.buffers).unwrap();
}

#[test]
fn links_in_one_directory_are_separate() {
    let dir = ipc_dir();
    let one = options(dir.path()).create("one", pools()).unwrap();
    let two = options(dir.path()).create("two", pools()).unwrap();
    let mut peer_of_two = Peer::start(dir.path());
    let mut peer_of_one = Peer::start(dir.path());
    peer_of_one.tell("attach one");
    peer_of_two.tell("attach two");
    send(&one, 1, 10, None).unwrap();
    send(&two, 2, 10, None).unwrap();
    assert_eq!((peer_of_one.ask("receive"), peer_of_two.ask("receive")), ("1".to_owned(), "2".to_owned()));
    let buffers = one.allocate(None).unwrap();
    assert!(matches!(two.release(buffers), Err(Error::NotHeld { .. })));
    assert!(one.is_inside(buffers.msg) && !two.is_inside(buffers.msg));
}

#[test]
fn default_link_reserves_its_space_at_once() {
    let dir = ipc_dir();
    let mut pools = default_pools();
    pools[PoolId::CpuData.index()].pool_len = 16;
    pools[PoolId::CpuLarge.index()].pool_len = 0;
    let link = options(dir.path()).create("fapi", pools).unwrap();
    assert_eq!(count_free(&link, None), 4096);
    let files = || {
        let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    let before = files();
    pools[PoolId::CpuData.index()].pool_len = 1 << 20;
    let error = options(dir.path()).create("huge", pools).unwrap_err();
    assert!(matches!(error, Error::NoSpace { .. } | Error::System { .. }), "{error}");
    assert_eq!(files(), before, "nothing is left behind");
}
