//! Pools in device memory, over host memory in its place: real processes, real deaths.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Barrier};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use shmesh::config::PoolId;
use shmesh::device::{DeviceBuffer, DeviceMemory, DevicePool, HostMemory};
use shmesh::inspect::View;
use shmesh::{Link, LinkOptions, Side};
use shmesh_proto::broker::{Attach, Mechanism, PoolMemory, Reply, Request, reply, request};
use shmesh_proto::packet;
use shmesh_sys::socket;
use shmesh_testing::{Peer, Watchdog, config, ipc_dir, kind_of, refused, stranger, until};

const KINDS: [&str; 5] =
    ["mode=mpmc", "mode=spsc", "backing=memfd", "mode=spsc backing=memfd notify=off", "notify=off"];

/// A link whose `cuda_data` has four buffers of 64 bytes.
fn create(dir: &Path, changes: &str) -> Link {
    LinkOptions::new().dir(dir).create(&config("link", &format!("cuda=64x4 {changes}"))).unwrap()
}

fn attach(dir: &Path) -> Link {
    LinkOptions::new().dir(dir).timeout(shmesh_testing::HANGS).attach("link", Side::Secondary).unwrap()
}

fn open(link: &Link) -> DevicePool<HostMemory> {
    link.device_pool(PoolId::CudaData, HostMemory::new).unwrap()
}

fn send(link: &Link, pool: &DevicePool<HostMemory>, id: i32, text: &str) {
    let mut loan = link.loan_with(PoolId::CudaData).unwrap();
    pool.resize_data(&mut loan, text.len()).unwrap().copy_to_device(0, text.as_bytes()).unwrap();
    loan.with_msg_id(id).send().unwrap();
}

fn receive(link: &Link, pool: &DevicePool<HostMemory>) -> String {
    let message = link.receive().unwrap().expect("a message waits");
    let data = pool.data(&message).unwrap();
    let mut bytes = vec![0; data.len()];
    data.copy_to_host(0, &mut bytes).unwrap();
    format!("{} {}", message.msg_id(), String::from_utf8(bytes).unwrap())
}

#[test]
fn queued_payload_survives_a_restart_of_either_side() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let start = |order: &str, pool: &str| {
            let mut peer = Peer::start(dir.path());
            until("the other's end is noticed", || peer.ask(order) == "ok");
            assert_eq!(peer.ask("pool open"), pool, "{kind}");
            peer
        };
        let (create, attach) = (format!("create link cuda=64x4 {kind}"), "attach link secondary 10000");
        let mut phy = start(&create, "made");
        let mut mac = start(attach, "found");
        phy.tell("pool send 1 down");
        mac.tell("pool send 2 up");
        assert_eq!(mac.ask("pool receive"), "1 down", "{kind}");
        phy.tell("pool send 3 waits");
        phy.kill();

        // Now the other one has it.
        let mut phy = start(&create, "found");
        assert_eq!(phy.ask("pool receive"), "2 up", "{kind}");
        phy.tell("pool send 4 again");
        mac.kill();
        let mut mac = start(attach, "found");
        assert_eq!(mac.ask("pool receive"), "3 waits", "{kind}");
        assert_eq!(mac.ask("pool receive"), "4 again", "{kind}");
        mac.tell("pool send 5 last");
        assert_eq!(phy.ask("pool receive"), "5 last", "{kind}");
    }
}

#[test]
fn participant_that_never_opened_the_pool_keeps_it_alive() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let (mut phy, mut mac) = (Peer::start(dir.path()), Peer::start(dir.path()));
        phy.tell(&format!("create link cuda=64x4 {kind}"));
        mac.tell("attach link secondary 10000");
        assert_eq!(phy.ask("pool open"), "made");
        phy.tell("pool send 1 payload");
        phy.kill();
        assert_eq!(mac.ask("pool open"), "found", "{kind}");
        assert_eq!(mac.ask("pool receive"), "1 payload", "{kind}");
    }
}

/// Host and maker are killed, and the next host gets it from one that never opened it.
#[test]
fn next_host_gets_device_memory_from_any_participant() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let mut peers: Vec<_> = (0..4).map(|_| Peer::start(dir.path())).collect();
    peers[0].tell("create link cuda=64x4");
    peers[1].tell("attach link secondary 10000");
    // Not the host.
    assert_eq!(peers[1].ask("pool open"), "made");
    peers[2].tell("attach link secondary 10000");
    peers.remove(0).kill();
    peers.remove(0).kill();
    let mut host = peers.remove(1);
    host.tell("create link cuda=64x4");
    assert_eq!(host.ask("pool open"), "found", "from one that came when it was there");
    let mut newcomer = Peer::start(dir.path());
    newcomer.tell("attach link secondary 10000");
    assert_eq!(newcomer.ask("pool open"), "found");
}

#[test]
fn buffers_of_the_dead_are_recovered() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let phy = create(dir.path(), kind);
        let pool = open(&phy);
        send(&phy, &pool, 1, "received");
        let mut mac = Peer::start(dir.path());
        mac.tell("attach link secondary 0");
        assert_eq!(mac.ask("pool open"), "found");
        mac.tell("pool hold-message");
        for i in 0..3 {
            mac.tell(&format!("pool hold loan-{i}"));
        }
        assert_eq!(kind_of(&refused(phy.loan_with(PoolId::CudaData))), "Exhausted", "{kind}");
        mac.kill();
        until("it is taken back", || {
            phy.recover().unwrap();
            phy.participants().count() == 1
        });
        let all = std::iter::from_fn(|| phy.loan_with(PoolId::CudaData).ok()).collect::<Vec<_>>();
        assert_eq!(all.len(), 4, "{kind}: every buffer");
    }
}

#[test]
fn killed_sender_loses_or_duplicates_no_payload() {
    let _watchdog = Watchdog::start();
    for round in 0..60 {
        let kind = KINDS[round % KINDS.len()];
        let dir = ipc_dir();
        let phy = create(dir.path(), kind);
        let pool = open(&phy);
        let mut mac = Peer::start(dir.path());
        mac.tell("attach link secondary 0");
        assert_eq!(mac.ask("pool open"), "found");
        mac.order("pool pump");
        let mut next = 0;
        let mut receive_all = || {
            while phy.has_message() {
                assert_eq!(receive(&phy, &pool), format!("{next} payload-{next}"), "{kind}");
                next += 1;
            }
            next
        };
        // Another number of messages in each round, and another moment after the last.
        let enough = i32::try_from(round * 7 % 50).unwrap();
        until("it has sent so many", || receive_all() >= enough);
        for _ in 0..round * 1000 {
            std::hint::spin_loop();
        }
        mac.kill();
        until("it is taken back", || {
            phy.recover().unwrap();
            phy.participants().count() == 1
        });
        receive_all();
        let all = std::iter::from_fn(|| phy.loan_with(PoolId::CudaData).ok()).collect::<Vec<_>>();
        assert_eq!(all.len(), 4, "{kind}: every buffer");
    }
}

#[test]
fn buffers_are_reused_and_run_out() {
    let dir = ipc_dir();
    let (phy, mac) = (create(dir.path(), ""), attach(dir.path()));
    let (here, there) = (open(&phy), open(&mac));
    for round in 0..100 {
        for i in 0..4 {
            send(&phy, &here, i, &format!("round {round} {i}"));
        }
        assert_eq!(kind_of(&refused(phy.loan_with(PoolId::CudaData))), "Exhausted");
        for i in 0..4 {
            assert_eq!(receive(&mac, &there), format!("{i} round {round} {i}"));
        }
    }
}

#[test]
fn cpu_access_to_device_buffers_is_refused() {
    let dir = ipc_dir();
    let (phy, mac) = (create(dir.path(), "gpu=64x4"), attach(dir.path()));
    let (pool, other) = (open(&phy), phy.device_pool(PoolId::GpuData, HostMemory::new).unwrap());
    let mut loan = phy.loan_with(PoolId::CudaData).unwrap();
    for len in [0, 1, 64, 65, usize::MAX] {
        let error = refused(loan.resize_data(len).map(drop));
        assert_eq!(kind_of(&error), "OnDevice");
        assert!(
            error.to_string().contains("cuda_data") && error.to_string().contains("device_pool"),
            "{error}"
        );
    }
    assert_eq!(kind_of(&refused(pool.resize_data(&mut loan, 65).map(drop))), "TooLong");
    assert_eq!(
        kind_of(&refused(other.resize_data(&mut loan, 1).map(drop))),
        "NotOnDevice",
        "of another pool"
    );
    assert_eq!(kind_of(&refused(pool.resize_data(&mut phy.loan().unwrap(), 1).map(drop))), "NoDataPart");
    let mut of_host = phy.loan_with(PoolId::CpuData).unwrap();
    assert_eq!(kind_of(&refused(pool.resize_data(&mut of_host, 1).map(drop))), "NotOnDevice");
    let elsewhere = ipc_dir();
    let stranger = create(elsewhere.path(), "");
    let mut of_another = stranger.loan_with(PoolId::CudaData).unwrap();
    assert_eq!(
        kind_of(&refused(pool.resize_data(&mut of_another, 1).map(drop))),
        "NotOnDevice",
        "of another link"
    );
    drop(of_host);

    let mut data = pool.resize_data(&mut loan, 8).unwrap();
    data.copy_to_device(0, b"payload!").unwrap();
    for (offset, len) in [(0, 9), (8, 1), (9, 0), (usize::MAX, 1), (1, usize::MAX >> 1)] {
        // A length that is not there at all: nothing is read before it is found out.
        if len < 1 << 20 {
            assert!(data.copy_to_device(offset, &vec![0; len]).is_err(), "{offset} {len}");
            assert!(data.copy_to_host(offset, &mut vec![0; len]).is_err(), "{offset} {len}");
        }
    }
    loan.with_msg_id(1).send().unwrap();
    let view = View::open(dir.path(), &"link".parse().unwrap()).unwrap();
    let queued = view.snapshot().rings[0].queued[0];
    assert_eq!(queued.data.map(|(pool, _, len)| (pool, len)), Some((PoolId::CudaData, 8)));
    assert_eq!(
        view.payload(Side::Primary, &queued, 64),
        (Vec::new(), Vec::new()),
        "its bytes are not visible"
    );

    // Without ever having asked where it is.
    phy.loan_with(PoolId::CudaData).unwrap().with_msg_id(2).send().unwrap();
    let message = mac.receive().unwrap().unwrap();
    assert_eq!(
        (message.data(), message.data_len(), message.data_pool()),
        (&[][..], 8, Some(PoolId::CudaData))
    );
    let there = open(&mac);
    let mut bytes = [0; 8];
    there.data(&message).unwrap().copy_to_host(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"payload!");
    assert_eq!(kind_of(&refused(other.data(&message).map(drop))), "NotOnDevice");
    let empty = mac.receive().unwrap().unwrap();
    assert!(there.data(&empty).unwrap().is_empty());
    mac.send_inline(1, 0, b"").unwrap();
    let inline = phy.receive().unwrap().unwrap();
    assert_eq!(kind_of(&refused(pool.data(&inline).map(drop))), "NoDataPart");
}

#[test]
fn pool_memory_comes_only_from_its_device() {
    let dir = ipc_dir();
    let mut big = config("link", "cuda=1048576x64");
    big.backing = shmesh::config::Backing::Memfd;
    let small = config("link", "");
    assert!(big.segment_bytes() < small.segment_bytes() + (1 << 16), "no buffers in shared memory");
    let phy = LinkOptions::new().dir(dir.path()).create(&big).unwrap();
    assert_eq!(open(&phy).memory().size(), (64 << 20) + 256);
    let error = refused(phy.device_pool(PoolId::CpuData, HostMemory::new));
    assert_eq!(kind_of(&error), "NotOnDevice");
    assert_eq!(kind_of(&refused(phy.device_pool(PoolId::GpuData, HostMemory::new))), "NoPool");
}

#[test]
fn one_of_two_concurrent_creators_prevails() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (phy, mac) = (create(dir.path(), ""), attach(dir.path()));
    let both = Arc::new(Barrier::new(2));
    let make = |both: Arc<Barrier>| {
        move |size| {
            // Each has been told that there is none.
            both.wait();
            HostMemory::new(size)
        }
    };
    let (first, second) = (make(Arc::clone(&both)), make(both));
    let other = std::thread::spawn(move || (mac.device_pool(PoolId::CudaData, first).unwrap(), mac));
    let here = phy.device_pool(PoolId::CudaData, second).unwrap();
    let (there, mac) = other.join().unwrap();
    send(&phy, &here, 1, "down");
    send(&mac, &there, 2, "up");
    assert_eq!((receive(&mac, &there), receive(&phy, &here)), ("1 down".to_owned(), "2 up".to_owned()));
}

#[test]
fn failed_creation_leaves_the_pool_to_others() {
    let dir = ipc_dir();
    let (phy, mac) = (create(dir.path(), ""), attach(dir.path()));
    let failed = refused(phy.device_pool(PoolId::CudaData, |_| -> std::io::Result<HostMemory> {
        Err(std::io::Error::other("no device here"))
    }));
    assert_eq!(kind_of(&failed), "System");
    assert!(failed.to_string().contains("make the device memory of pool cuda_data"), "{failed}");
    let short = refused(phy.device_pool(PoolId::CudaData, |size| HostMemory::new(size - 1)));
    assert_eq!(kind_of(&short), "Refused");
    assert!(short.to_string().contains("must have 1280 bytes, not 1279"), "{short}");
    open(&mac);
}

/// A memfd of this size, with a seal on it or not.
fn memfd(size: i64, is_sealed: bool) -> OwnedFd {
    let fd = memfd_create(c"offered", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&fd, size).unwrap();
    if is_sealed {
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW)).unwrap();
    }
    fd
}

fn ask(connection: &OwnedFd, op: request::Op, fds: &[BorrowedFd<'_>]) -> (reply::Result, usize) {
    socket::send(connection, &packet::encode(&Request::new(7, op)), fds).unwrap();
    let (bytes, fds) = socket::receive(connection).unwrap();
    let reply: Reply = packet::decode(&bytes).unwrap();
    assert_eq!(reply.id, 7);
    (reply.result.unwrap(), fds.len())
}

#[test]
fn invalid_offers_are_refused_with_the_rule() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _phy = create(dir.path(), "");
    let connection = stranger(dir.path());
    ask(&connection, request::Op::Attach(Attach { side: 0 }), &[]);
    let size = 4 * 256 + 256;
    let good = PoolMemory { pool: 3, id: 9, size, mechanism: Mechanism::Host.into(), handle: Vec::new() };
    let (sealed, open, short) = (memfd(1280, true), memfd(1280, false), memfd(1279, true));
    let (sealed, open, short) = (sealed.as_fd(), open.as_fd(), short.as_fd());
    let offers: [(PoolMemory, &[BorrowedFd<'_>], &str); 14] = [
        (PoolMemory { pool: 1, ..good.clone() }, &[sealed], "has no pool 1"),
        (PoolMemory { pool: 4, ..good.clone() }, &[sealed], "has no pool 4"),
        (PoolMemory { pool: u32::MAX, ..good.clone() }, &[sealed], "has no pool 4294967295"),
        (PoolMemory { size: 0, ..good.clone() }, &[sealed], "must have 1280 bytes, not 0"),
        (PoolMemory { size: size - 1, ..good.clone() }, &[sealed], "must have 1280 bytes, not 1279"),
        (PoolMemory { size: size + (1 << 30), ..good.clone() }, &[sealed], "must have 1280 bytes"),
        (PoolMemory { size: u64::MAX, ..good.clone() }, &[sealed], "must have 1280 bytes"),
        (PoolMemory { mechanism: Mechanism::Ascend.into(), ..good.clone() }, &[sealed], "host or cuda-vmm"),
        (PoolMemory { mechanism: 77, ..good.clone() }, &[sealed], "host or cuda-vmm"),
        (PoolMemory { handle: vec![1], ..good.clone() }, &[sealed], "handle of 0 bytes, not 1"),
        (good.clone(), &[], "one descriptor"),
        (good.clone(), &[sealed, sealed], "one descriptor"),
        (good.clone(), &[open], "seal it"),
        (good.clone(), &[short], "seal it"),
    ];
    for (offer, fds, why) in offers {
        let (answer, got) = ask(&connection, request::Op::PoolMemory(offer), fds);
        let reply::Result::Refused(refused) = answer else { panic!("{why}: {answer:?}") };
        assert!(
            refused.text.contains("link link: ") && refused.text.contains(why),
            "{why}: {}",
            refused.text
        );
        assert_eq!(got, 0);
    }
    let question = PoolMemory { pool: 3, ..PoolMemory::default() };
    let (answer, _) = ask(&connection, request::Op::PoolMemory(question.clone()), &[sealed]);
    assert!(
        matches!(&answer, reply::Result::Refused(refused) if refused.text.contains("without a descriptor"))
    );
    let there_is = |answer: (reply::Result, usize)| match answer {
        (reply::Result::PoolMemory(memory), fds) => (memory.id, fds),
        (other, _) => panic!("{other:?}"),
    };
    assert_eq!(there_is(ask(&connection, request::Op::PoolMemory(question.clone()), &[])), (0, 0));

    // None of them stands in the way of a good one; and then that is there for good.
    assert_eq!(there_is(ask(&connection, request::Op::PoolMemory(good.clone()), &[sealed])), (9, 1));
    let later = PoolMemory { id: 10, ..good };
    assert_eq!(there_is(ask(&connection, request::Op::PoolMemory(later), &[sealed])), (9, 1));
    assert_eq!(there_is(ask(&connection, request::Op::PoolMemory(question), &[])), (9, 1));
}

/// A named link outlives its processes, and device memory does not.
#[test]
fn lost_payload_is_reported() {
    let _watchdog = Watchdog::start();
    for kind in ["mode=mpmc", "mode=spsc", "notify=off"] {
        let dir = ipc_dir();
        let order = format!("create link cuda=64x4 {kind}");
        let mut phy = Peer::start(dir.path());
        phy.tell(&order);
        assert_eq!(phy.ask("pool open"), "made");
        phy.tell("pool send 1 lost");
        phy.kill();
        let mut phy = Peer::start(dir.path());
        phy.tell(&order);
        let mac = attach(dir.path());
        let pool = open(&mac);
        let message = mac.receive().unwrap().expect("it waits");
        assert_eq!(kind_of(&refused(pool.data(&message).map(drop))), "OtherMemory", "{kind}");
        drop(message);
        assert_eq!(phy.ask("pool open"), "found");
        phy.tell("pool send 2 again");
        assert_eq!(receive(&mac, &pool), "2 again", "{kind}");
    }
}

#[test]
fn device_memory_ends_with_the_link() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let mut phy = Peer::start(dir.path());
    phy.tell("create link cuda=64x4");
    assert_eq!(phy.ask("pool open"), "made");
    phy.tell("pool close");
    assert_eq!(phy.ask("pool open"), "found", "the link has it");
    phy.tell("close");
    phy.tell("create link cuda=64x4");
    assert_eq!(phy.ask("pool open"), "made", "it is another link");
}

/// The text of a message's payload.
fn text(data: shmesh::Result<DeviceBuffer<'_, HostMemory>>) -> String {
    let data = data.unwrap();
    let mut bytes = vec![0; data.len()];
    data.copy_to_host(0, &mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn broadcast_frees_device_buffers_behind_the_last_reader() {
    for slow in ["wait", "skip", "evict"] {
        let dir = ipc_dir();
        let writer = create(dir.path(), &format!("mode=broadcast slow={slow} history=1 ring=8"));
        let readers = [attach(dir.path()), attach(dir.path())];
        let (here, there) = (open(&writer), readers.each_ref().map(open));
        // Several times round the pool.
        for id in 0..40 {
            send(&writer, &here, id, &format!("round {id}"));
            for (reader, pool) in readers.iter().zip(&there) {
                assert_eq!(receive(reader, pool), format!("{id} round {id}"), "{slow}");
            }
        }
        // A reader has a message in its hands.
        send(&writer, &here, 40, "held");
        let held = readers[0].receive().unwrap().expect("it was just sent");
        let later = || {
            for id in 41..200 {
                let loan = writer.loan_with(PoolId::CudaData);
                let Ok(mut loan) = loan else { return Some(kind_of(&refused(loan))) };
                here.resize_data(&mut loan, 5).unwrap().copy_to_device(0, b"later").unwrap();
                loan.with_msg_id(id).send().unwrap();
                drop(readers[1].receive().unwrap().expect("it was just sent"));
            }
            None
        };
        drop(readers[1].receive().unwrap().expect("it was just sent"));
        match slow {
            "skip" => assert_eq!(later(), None, "the writer goes on"),
            _ => assert_eq!(later().as_deref(), Some("Exhausted"), "{slow}"),
        }
        assert_eq!(text(there[0].data(&held)), "held", "{slow}");
        drop(held);
        drop(writer.loan_with(PoolId::CudaData).unwrap());
    }
}

/// Bytes of device memory have no address in the host; without one they would pass for an empty slice.
#[test]
fn data_on_a_device_is_no_typed_value() {
    let dir = ipc_dir();
    let (phy, mac) = (create(dir.path(), ""), attach(dir.path()));
    let here = open(&phy);
    let mac = mac.typed::<[u8]>().unwrap();
    send(&phy, &here, 1, "on the device");
    assert_eq!(kind_of(&refused(mac.receive())), "OnDevice");
    phy.send_inline(2, 0, b"here").unwrap();
    assert_eq!(mac.receive().unwrap().expect("it was just sent").value(), b"here");
}

#[test]
fn owned_message_keeps_its_device_buffer() {
    let dir = ipc_dir();
    let (phy, mac) = (create(dir.path(), ""), attach(dir.path()));
    let (here, there) = (open(&phy), open(&mac));
    send(&phy, &here, 1, "kept");
    let owned = mac.receive().unwrap().expect("it was just sent").into_owned();
    for id in 0..20 {
        send(&phy, &here, id, "other");
        assert_eq!(receive(&mac, &there), format!("{id} other"));
    }
    assert_eq!((owned.data_pool(), owned.data_len(), owned.data()), (Some(PoolId::CudaData), 4, &[][..]));
    assert_eq!(text(there.owned_data(&owned)), "kept");
    drop(mac);
    assert_eq!(text(there.owned_data(&owned)), "kept", "without the handle");
    let elsewhere = ipc_dir();
    let stranger = open(&create(elsewhere.path(), ""));
    assert_eq!(kind_of(&refused(stranger.owned_data(&owned).map(drop))), "NotOnDevice");
    drop(owned);
    assert_eq!(std::iter::from_fn(|| phy.loan_with(PoolId::CudaData).ok()).collect::<Vec<_>>().len(), 4);

    // On a broadcast link, where other readers have it too.
    let dir = ipc_dir();
    let (writer, reader) = (create(dir.path(), "mode=broadcast"), attach(dir.path()));
    let (here, there) = (open(&writer), open(&reader));
    send(&writer, &here, 7, "shared");
    let owned = reader.receive().unwrap().expect("it was just sent").into_owned();
    drop(reader);
    assert_eq!((owned.msg_id(), owned.data_pool(), owned.data_len()), (7, Some(PoolId::CudaData), 6));
    assert_eq!(text(there.owned_data(&owned)), "shared");
}
