//! Device pools of a link that a sidecar keeps, with host memory in place of device memory.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use crate::support::client::{ask, refusal};
use crate::support::{Sidecar, audited};
use shmesh::config::PoolId;
use shmesh::device::{DeviceMemory, HostMemory};
use shmesh::{LinkOptions, Side};
use shmesh_proto::broker::{Attach, Code, Mechanism, PoolMemory, reply, request};
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, stranger, until};

const KINDS: [&str; 5] = ["mpmc", "spsc", "mpmc memfd", "spsc memfd", "mpmc notify=off"];

fn sidecar(dir: &Path, kind: &str) -> Sidecar {
    Sidecar::start(dir, &format!("cuda {kind}"))
}

fn attached(dir: &Path, side: &str) -> Peer {
    let mut peer = Peer::start(dir);
    peer.tell(&format!("attach link {side} 10000"));
    peer
}

#[test]
fn memory_outlives_both_sides() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let _sidecar = sidecar(dir.path(), kind);
        let (mut phy, mut mac) = (attached(dir.path(), "primary"), attached(dir.path(), "secondary"));
        assert_eq!((mac.ask("pool open"), phy.ask("pool open")), ("made".to_owned(), "found".to_owned()));
        phy.tell("pool send 1 down");
        mac.tell("pool send 2 up");
        phy.kill();
        mac.kill();
        // Only the sidecar is on the link.
        let (mut phy, mut mac) = (attached(dir.path(), "primary"), attached(dir.path(), "secondary"));
        assert_eq!((phy.ask("pool open"), mac.ask("pool open")), ("found".to_owned(), "found".to_owned()));
        assert_eq!(phy.ask("pool receive"), "2 up", "{kind}");
        assert_eq!(mac.ask("pool receive"), "1 down", "{kind}");
    }
}

#[test]
fn memory_outlives_the_sidecar() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        for is_killed in [true, false] {
            let dir = ipc_dir();
            let before = sidecar(dir.path(), kind);
            let (mut phy, mut mac) = (attached(dir.path(), "primary"), attached(dir.path(), "secondary"));
            assert_eq!(phy.ask("pool open"), "made", "{kind}");
            phy.tell("pool send 1 payload");
            // The other participant never opened the pool, but has the memory, whichever of them serves the link meanwhile.
            if is_killed {
                before.kill()
            } else {
                before.stop()
            }
            let after = sidecar(dir.path(), kind);
            assert_eq!(phy.ask("pool open"), "found", "{kind}");
            phy.kill();
            assert_eq!(mac.ask("pool open"), "found", "{kind}");
            assert_eq!(mac.ask("pool receive"), "1 payload", "{kind}");
            mac.tell("pool send 2 answer");
            mac.kill();
            let mut phy = attached(dir.path(), "primary");
            assert_eq!(phy.ask("pool open"), "found", "{kind}: the sidecar has it");
            assert_eq!(phy.ask("pool receive"), "2 answer", "{kind}");
            drop(after);
        }
    }
}

#[test]
fn memory_crosses_pid_namespaces_and_buffers_of_the_dead_return() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    for kernel in [&[][..], &["--old-kernel"]] {
        let dir = ipc_dir();
        let sidecar = Sidecar::start_with(dir.path(), "cuda mpmc", kernel);
        let (mut phy, mut mac) = (Peer::start_alone(dir.path()), Peer::start_alone(dir.path()));
        phy.tell("attach link primary 0");
        mac.tell("attach link secondary 0");
        assert_eq!((mac.ask("pool open"), phy.ask("pool open")), ("made".to_owned(), "found".to_owned()));
        mac.tell("pool send 1 sent");
        for i in 0..3 {
            mac.tell(&format!("pool hold loan-{i}"));
        }
        assert!(phy.ask("pool send 2 x").starts_with("err Exhausted"));
        mac.kill();
        until("it is counted", || sidecar.metric("shmesh_sidecar_reaped_total{link=\"link\"}") == 1);
        assert_eq!(phy.ask("pool receive"), "1 sent", "its message is delivered");
        for i in 0..4 {
            phy.tell(&format!("pool send {i} again"));
        }
    }
}

#[test]
fn memory_requires_attachment_and_wrong_offers_are_refused() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let log = dir.path().join("audit.log");
    let sidecar = Sidecar::start_with(dir.path(), "cuda mpmc", &["--audit", log.to_str().unwrap()]);
    let connection = stranger(dir.path());
    let memory = HostMemory::new(4 * 256 + 256).unwrap();
    let fd = memory.fd().unwrap();
    let good = PoolMemory {
        pool: 3,
        id: 9,
        size: memory.size(),
        mechanism: Mechanism::Host.into(),
        handle: Vec::new(),
    };
    for told in [&PoolMemory { pool: 3, ..PoolMemory::default() }, &good] {
        let fds = if told.id == 0 { &[][..] } else { &[fd] };
        let refused = refusal(ask(&connection, request::Op::PoolMemory(told.clone()), fds));
        assert!(refused.code() == Code::Denied && refused.text.contains("attach"), "{refused:?}");
    }
    ask(&connection, request::Op::Attach(Attach { side: 0 }), &[]);
    let file = tempfile::tempfile_in(dir.path()).unwrap();
    let offers: [(PoolMemory, &[BorrowedFd<'_>]); 6] = [
        (PoolMemory { pool: 1, ..good.clone() }, &[fd]),
        (PoolMemory { size: 1, ..good.clone() }, &[fd]),
        (PoolMemory { mechanism: Mechanism::CudaVmm.into(), ..good.clone() }, &[fd]),
        (PoolMemory { mechanism: Mechanism::Ascend.into(), ..good.clone() }, &[]),
        (good.clone(), &[fd, fd]),
        (good.clone(), &[file.as_fd()]),
    ];
    let wrong = offers.len();
    for (offer, fds) in offers {
        let refused = refusal(ask(&connection, request::Op::PoolMemory(offer), fds));
        assert_eq!(refused.code(), Code::Invalid, "{}", refused.text);
    }
    until("all is written down", || {
        let count = |reason| audited(&log, "pool_memory", reason).len();
        count("not_attached") == 2 && count("bad_pool_memory") + count("bad_descriptors") == wrong
    });
    let fds = sidecar.fds();
    let kept = |answer| matches!(answer, reply::Result::PoolMemory(PoolMemory { id: 9, .. }));
    assert!(kept(ask(&connection, request::Op::PoolMemory(good.clone()), &[fd])));
    assert!(
        kept(ask(&connection, request::Op::PoolMemory(PoolMemory { id: 10, ..good }), &[fd])),
        "the first stays"
    );
    until("one more descriptor, for good", || sidecar.fds() == fds + 1);
    until("it is written down", || audited(&log, "pool_memory", "").len() == 1);
    drop(connection);
    let phy = LinkOptions::new().dir(dir.path()).attach("link", Side::Primary).unwrap();
    let pool =
        phy.device_pool(PoolId::CudaData, |_| -> std::io::Result<HostMemory> { panic!("it is there") });
    assert_eq!(pool.unwrap().memory().size(), memory.size());
}
