//! A user that takes as much of a sidecar as it can leaves enough for another user.

use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;

use crate::support::client::{HELLO, answer, packet_of};
use crate::support::{Sidecar, audited};
use nix::unistd::{Uid, setresuid};
use shmesh::device::{DeviceMemory, HostMemory};
use shmesh_proto::broker::{Code, ExportKey, ImportByKey, Mechanism, reply, request::Op};
use shmesh_sys::socket;
use shmesh_testing::{Peer, Watchdog, broker, ipc_dir, is_root, own_process, until};

/// The user id of the attacker.
const ATTACKER: Uid = Uid::from_raw(65_531);

fn ask(fd: &OwnedFd, op: Op, memory: Option<&HostMemory>) -> Option<reply::Result> {
    let fds: Vec<_> = memory.and_then(DeviceMemory::fd).into_iter().collect();
    socket::send(fd, &packet_of(op), &fds).ok()?;
    answer(fd)
}

#[test]
fn greedy_user_leaves_enough_for_another() {
    if !is_root() {
        return;
    }
    own_process(|| {
        let _watchdog = Watchdog::start();
        let dir = ipc_dir();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o770)).unwrap();
        let audit = dir.path().join("audit");
        let flags = ["--audit", audit.to_str().unwrap()];
        let sidecar = Sidecar::start_with_limit(dir.path(), "mpmc memfd 0660", 1024, &flags);
        let denied =
            |reason| sidecar.metric(&format!("shmesh_sidecar_refused_requests_total{{reason=\"{reason}\"}}"));
        let (mut phy, mut mac) = (Peer::start(dir.path()), Peer::start(dir.path()));

        let path = broker(dir.path());
        setresuid(ATTACKER, ATTACKER, Uid::from_raw(0)).unwrap();
        let connect = || socket::connect_to(&path);
        let crowd: Vec<_> = (0..200).map_while(|_| connect().ok()).collect();
        until("it has all connections that it may", || {
            denied("limit_sessions_per_user") + denied("limit_sessions_per_process") > 0
        });
        let let_in: Vec<_> = crowd
            .iter()
            .filter(|fd| matches!(ask(fd, HELLO, None), Some(reply::Result::Welcome(_))))
            .collect();
        assert!(!let_in.is_empty());
        let memory = HostMemory::new(4096).unwrap();
        let mut keys = 0;
        let refused = loop {
            let mechanism = Mechanism::Host.into();
            let export = Op::ExportKey(ExportKey { size: 4096, flags: 0, mechanism, handle: Vec::new() });
            match ask(let_in[0], export, Some(&memory)).unwrap() {
                reply::Result::Exported(_) => keys += 1,
                reply::Result::Refused(refused) => break refused,
                other => panic!("{other:?}"),
            }
            assert!(keys < 1024, "it has 1024 descriptors");
        };
        assert_eq!(refused.code(), Code::Limit);
        assert!(
            refused.text.contains("this process has its share") && refused.text.contains("close some"),
            "{}",
            refused.text
        );
        assert!(keys > 100, "{keys}: the share is too small");
        assert_eq!(denied("limit_descriptors_per_process"), 1);
        // More refusals than the log accepts from one client, as fast as they can be caused.
        let unknown = || Op::ImportByKey(ImportByKey { key: [&[b'0'; 64][..], &[0]].concat() });
        for _ in 0..500 {
            ask(let_in[0], unknown(), None).unwrap();
        }

        setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0)).unwrap();
        phy.tell("attach link primary 1000");
        mac.tell("attach link secondary 1000");
        phy.tell("send 1 hello");
        assert_eq!(mac.ask("receive"), "1 hello");
        phy.tell("device connect");
        mac.tell("device connect");
        let key = phy.ask("device export weights 0");
        let refused = mac.ask(&format!("device import {key}"));
        assert!(refused.starts_with("err Denied"), "not admitted yet: {refused}");
        let tgid = mac.ask("device tgid");
        phy.tell(&format!("device admit {key} {tgid}"));
        assert_eq!(mac.ask(&format!("device import {key}")), "weights");
        until("its refusal is written down", || {
            audited(&audit, "import", "not_admitted").iter().any(|record| record["caller"]["uid"] == 0)
        });
        let left_out = || sidecar.metric("shmesh_sidecar_audit_suppressed_total{cause=\"rate\"}");
        let written = || {
            let text = std::fs::read_to_string(&audit).unwrap();
            let of_attacker = |line: &&str| line.contains("\"uid\":65531") && line.contains("\"refused\"");
            text.lines().filter(of_attacker).count() as u64
        };
        until("each is in the log or counted", || left_out() + written() >= 500);
        assert!((100..300).contains(&written()), "the rest of the attacker's is counted: {}", written());
    });
}

/// A daemon that attaches as root and then drops its privileges.
#[test]
fn session_limit_follows_a_process_that_changes_its_user() {
    if !is_root() {
        return;
    }
    own_process(|| {
        let _watchdog = Watchdog::start();
        let dir = ipc_dir();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let _sidecar = Sidecar::start_with_limit(dir.path(), "mpmc memfd 0660", 256, &[]);
        for _ in 0..30 {
            until("there is a place for one more", || {
                let mut peer = Peer::start(dir.path());
                let is_in = peer.ask("attach link secondary 0") == "ok";
                peer.tell("become 65531");
                peer.tell("device connect");
                peer.ask("device tgid");
                peer.kill();
                is_in
            });
        }
    });
}
