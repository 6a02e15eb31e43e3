//! Attacks on a running sidecar: each is refused, counted and audited, and does not disturb two processes that share a link
//! and a key.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use crate::support::client::{HELLO, answer, ask, packet_of, refusal, tell};
use crate::support::{Sidecar, audited};
use serde_json::Value;
use shmesh::device::{DeviceMemory, HostMemory};
use shmesh::{LinkOptions, Side};
use shmesh_proto::broker::{
    Ack, BareTgid, Close, Code, ExportKey, ImportByKey, Imported, List, Mechanism, Offer, Request, Seated,
    SetImportPid, reply, request::Op,
};
use shmesh_proto::limits::{MAX_PACKET_BYTES, MAX_SESSIONS_PER_PROCESS};
use shmesh_proto::packet;
use shmesh_sys::socket;
use shmesh_testing::{
    HANGS, Peer, Watchdog, broker, ipc_dir, is_root, key_of, kind_of, own_process_by, passed, refused,
    stranger, this_test, until,
};

/// Two processes that share a link and a key, and a sidecar that others can attack.
struct Scene {
    dir: tempfile::TempDir,
    sidecar: Sidecar,
    phy: Peer,
    mac: Peer,
    key: String,
    /// Number of the sidecar's descriptors before the attack.
    fds: usize,
    counted: u64,
}

impl Scene {
    fn new() -> Self {
        Self::with(Sidecar::start_with)
    }

    fn with(start: impl FnOnce(&std::path::Path, &str, &[&str]) -> Sidecar) -> Self {
        let dir = ipc_dir();
        let audit = dir.path().join("audit");
        let sidecar = start(dir.path(), "mpmc", &["--audit", audit.to_str().unwrap()]);
        let (mut phy, mut mac) = (Peer::start(dir.path()), Peer::start(dir.path()));
        phy.tell("attach link primary 1000");
        mac.tell("attach link secondary 1000");
        phy.tell("device connect");
        mac.tell("device connect");
        let key = phy.ask("device export weights 0");
        let tgid = mac.ask("device tgid");
        phy.tell(&format!("device admit {key} {tgid}"));
        until("both are known", || sidecar.metric("shmesh_sidecar_attached_total") == 2);
        let fds = sidecar.fds();
        let mut scene = Self { dir, sidecar, phy, mac, key, fds, counted: 0 };
        scene.others_are_undisturbed();
        scene
    }

    fn audit(&self) -> PathBuf {
        self.dir.path().join("audit")
    }

    fn connect(&self) -> OwnedFd {
        stranger(self.dir.path())
    }

    fn denied(&self, reason: &str) -> u64 {
        self.sidecar.metric(&format!("shmesh_sidecar_refused_requests_total{{reason=\"{reason}\"}}"))
    }

    /// Checks that at least `times` refusals are counted, and that as many audit records match `is_by`.
    fn was_refused(&self, op: &str, reason: &str, times: u64, is_by: impl Fn(&Value) -> bool) {
        until(&format!("{reason} is counted"), || self.denied(reason) >= times);
        assert_eq!(self.denied(reason), times, "{reason}");
        let records = || audited(&self.audit(), op, reason);
        until(&format!("{reason} is written down"), || records().len() as u64 >= times);
        for record in records() {
            assert_eq!(record["outcome"], "refused", "{record}");
            assert!(is_by(&record), "{record}");
            assert!(!record.to_string().contains(&self.key), "never a key");
        }
        assert_eq!(records().len() as u64, times, "{reason}");
    }

    /// Checks that both can exchange messages, still have their sessions, and can use the key.
    fn others_are_undisturbed(&mut self) {
        let (phy, mac, key) = (&mut self.phy, &mut self.mac, &self.key);
        self.counted += 1;
        phy.tell(&format!("send {} hello", self.counted));
        assert_eq!(mac.ask("receive"), format!("{} hello", self.counted));
        mac.tell(&format!("inline {} back", self.counted));
        assert_eq!(phy.ask("receive"), format!("{} back", self.counted));
        assert_ne!(phy.ask("device tgid"), mac.ask("device tgid"));
        assert_eq!(mac.ask(&format!("device import {key}")), "weights");
        mac.tell(&format!("device close {key}"));
    }

    /// Checks that all descriptors of the attackers are closed in the end.
    fn ends(mut self) {
        self.others_are_undisturbed();
        until("all their descriptors are closed", || self.sidecar.fds() <= self.fds);
    }
}

/// Whether the record names this process.
fn by_me(record: &Value) -> bool {
    record["caller"]["bare_tgid"] == std::process::id()
}

/// Whether the sidecar has closed a connection. Earlier answers are skipped.
fn is_closed(fd: &OwnedFd) -> bool {
    loop {
        match socket::receive(fd) {
            Ok((bytes, _)) if bytes.is_empty() => return true,
            // An earlier answer.
            Ok(_) => {}
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}

fn import(key: &str) -> Op {
    Op::ImportByKey(ImportByKey { key: key_of(key).as_bytes().to_vec() })
}

fn close(key: &str, force: bool) -> Op {
    Op::Close(Close { key: key_of(key).as_bytes().to_vec(), force })
}

fn export(mechanism: Mechanism, size: u64) -> Op {
    Op::ExportKey(ExportKey { size, flags: 0, mechanism: mechanism.into(), handle: Vec::new() })
}

#[test]
fn invalid_packets() {
    let _watchdog = Watchdog::start();
    let scene = Scene::new();
    let (hello, export) = (packet_of(HELLO), packet_of(export(Mechanism::Host, 4096)));
    let oversized = [&hello[..], &[0; MAX_PACKET_BYTES]].concat();
    let attacks: [&[u8]; 4] = [&[0xff; 100], &oversized, &export[..export.len() - 1], &[0x12]];
    for bytes in attacks {
        let fd = scene.connect();
        socket::send(&fd, bytes, &[]).unwrap();
        assert!(is_closed(&fd));
    }
    scene.was_refused("packet", "malformed", attacks.len() as u64, by_me);
    let fd = scene.connect();
    let future = Request { version: 9, ..Request::new(5, HELLO) };
    socket::send(&fd, &packet::encode(&future), &[]).unwrap();
    assert_eq!(refusal(answer(&fd).unwrap()).code(), Code::Version);
    drop(fd);
    scene.ends();
}

#[test]
fn too_many_descriptors() {
    let _watchdog = Watchdog::start();
    let scene = Scene::new();
    let file = std::fs::File::open("/dev/null").unwrap();
    for count in [9, 100, 253] {
        let fd = scene.connect();
        tell(&fd, HELLO, &vec![file.as_fd(); count]);
        assert!(is_closed(&fd), "{count}");
    }
    scene.was_refused("packet", "malformed", 3, by_me);
    scene.ends();
}

#[test]
fn descriptors_without_memory() {
    let _watchdog = Watchdog::start();
    let scene = Scene::new();
    let fd = scene.connect();
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    let memory = HostMemory::new(4096).unwrap();
    let memfd = DeviceMemory::fd(&memory).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(scene.dir.path().join("other")).unwrap();
    let directory = std::fs::File::open(scene.dir.path()).unwrap();
    let (pipe, _other) = nix::unistd::pipe().unwrap();
    let wrong: [(&[BorrowedFd<'_>], u64); 8] = [
        (&[file.as_fd()], 4096),
        (&[fd.as_fd()], 4096),
        (&[listener.as_fd()], 4096),
        (&[directory.as_fd()], 1),
        (&[pipe.as_fd()], 1),
        (&[memfd], 4097),
        (&[], 4096),
        (&[memfd, memfd], 4096),
    ];
    for (fds, size) in wrong {
        assert_eq!(refusal(ask(&fd, export(Mechanism::Host, size), fds)).code(), Code::Invalid);
    }
    assert_eq!(
        refusal(ask(&fd, HELLO, &[memfd])).code(),
        Code::Invalid,
        "a request that takes no descriptor"
    );
    until("all are counted", || scene.denied("bad_descriptors") == 9);
    until("all are written down", || audited(&scene.audit(), "export", "bad_descriptors").len() == 8);
    assert!(audited(&scene.audit(), "export", "bad_descriptors").iter().all(by_me));
    until("the last too", || audited(&scene.audit(), "hello", "bad_descriptors").len() == 1);
    drop(fd);
    scene.ends();
}

#[test]
fn grant_used_twice_is_refused() {
    let _watchdog = Watchdog::start();
    let mut scene = Scene::new();
    let fd = scene.connect();
    let me = std::process::id().to_string();
    let key = scene.key.clone();
    scene.phy.tell(&format!("device admit {key} {me}"));
    let reply::Result::Imported(Imported { grant, .. }) = ask(&fd, import(&key), &[]) else {
        panic!("it is admitted")
    };
    let ack = |grant: &[u8]| Op::Ack(Ack { grant: grant.to_vec(), done: true });
    // Another connection of the same process may use the grant; another process may not, and it cannot be used twice.
    assert!(matches!(ask(&fd, ack(&grant), &[]), reply::Result::Done(_)));
    let twice = refusal(ask(&fd, ack(&grant), &[]));
    let unknown = refusal(ask(&fd, ack(&[7; 16]), &[]));
    assert_eq!((twice.code(), &twice.text), (Code::Denied, &unknown.text), "the same words");
    scene.was_refused("ack", "grant_used", 1, by_me);
    scene.was_refused("ack", "unknown_grant", 1, by_me);
    assert!(matches!(ask(&fd, close(&key, false), &[]), reply::Result::Done(_)));
    drop(fd);
    scene.ends();
}

/// Each guess is counted. The audit log has at least as many as a correct program ever causes, and the number of the
/// others.
#[test]
fn guessing_keys() {
    guess_keys(300, false);
}

#[test]
#[ignore = "long: 2,000 guesses"]
fn guessing_keys_for_long() {
    guess_keys(2000, true);
}

fn guess_keys(guesses: u64, waits: bool) {
    let _watchdog = Watchdog::start();
    let mut scene = Scene::new();
    let fd = scene.connect();
    for n in 0..guesses {
        let refused = refusal(ask(&fd, import(&format!("{n:064x}")), &[]));
        assert_eq!(refused.text, "no such key, or this process is not admitted to it");
        if n % 500 == 0 {
            scene.others_are_undisturbed();
        }
    }
    // A key that exists.
    assert_eq!(
        refusal(ask(&fd, import(&scene.key), &[])).text,
        "no such key, or this process is not admitted to it"
    );
    assert_eq!(scene.denied("unknown_key"), guesses);
    drop(fd);
    scene.others_are_undisturbed();
    let audit = scene.audit();
    // Every ten seconds while it runs, and the rest when it ends.
    if waits {
        until("it is said while it runs", || !audited(&audit, "suppressed", "not_admitted").is_empty());
    }
    scene.sidecar.stop();
    let written =
        audited(&audit, "import", "unknown_key").len() + audited(&audit, "import", "not_admitted").len();
    let text = std::fs::read_to_string(&audit).unwrap();
    let said: u64 = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|record| record["op"] == "suppressed")
        .inspect(|record| assert!(by_me(record), "{record}"))
        .map(|record| record["suppressed"].as_u64().unwrap())
        .sum();
    assert_eq!(written as u64 + said, guesses + 1, "each has a record, or is counted in one");
    assert!((100..200).contains(&written), "{written}");
}

#[test]
fn process_that_is_not_admitted() {
    let _watchdog = Watchdog::start();
    let scene = Scene::new();
    let fd = scene.connect();
    let me = std::process::id().cast_signed();
    let admit_me = SetImportPid {
        key: key_of(&scene.key).as_bytes().to_vec(),
        bare_tgids: vec![me],
        ..SetImportPid::default()
    };
    for op in [import(&scene.key), close(&scene.key, true), Op::SetImportPid(admit_me)] {
        assert_eq!(refusal(ask(&fd, op, &[])).text, "no such key, or this process is not admitted to it");
    }
    scene.was_refused("import", "not_admitted", 1, by_me);
    scene.was_refused("close", "not_importer", 1, by_me);
    scene.was_refused("admit", "not_exporter", 1, by_me);
    let reply::Result::Keys(keys) = ask(&fd, Op::List(List { skip: 0 }), &[]) else { panic!("its own keys") };
    assert_eq!(keys.total, 0);
    drop(fd);
    scene.ends();
}

/// A pod has its own process numbers. A process that claims the number of an admitted one is identified by the kernel.
#[test]
fn another_pod_that_shares_the_socket() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let mut intruder = Peer::start_alone(scene.dir.path());
    intruder.tell("device connect");
    let tgid = intruder.ask("device tgid");
    let key = &scene.key;
    for order in [
        format!("device import {key}"),
        format!("device close {key}"),
        format!("device admit {key} 1"),
        format!("device admit {key} {tgid}"),
        format!("device import {key}"),
    ] {
        assert!(intruder.ask(&order).starts_with("err Denied"), "{order}");
    }
    let tgid: i32 = tgid.parse().unwrap();
    let by_intruder = |record: &Value| record["caller"]["bare_tgid"] == tgid;
    scene.was_refused("import", "not_admitted", 2, by_intruder);
    scene.was_refused("admit", "not_exporter", 2, by_intruder);
    scene.was_refused("close", "not_importer", 1, by_intruder);
    drop(intruder);
    scene.ends();
}

/// In a pid namespace of its own, where no other process takes numbers.
#[test]
fn listed_process_that_was_replaced() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let in_a_namespace = || {
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(this_test().get_program());
        unshare
    };
    let output = own_process_by(in_a_namespace, || {
        let mut scene = Scene::new();
        let key = scene.key.clone();
        let mut victim = Peer::start(scene.dir.path());
        victim.tell("device connect");
        let tgid: u32 = victim.ask("device tgid").parse().unwrap();
        assert_eq!(tgid, victim.pid());
        scene.phy.tell(&format!("device admit {key} {tgid}"));
        let started = start_time(tgid);
        victim.kill();
        let mut replacement = None;
        until("its number is given again", || {
            std::fs::write("/proc/sys/kernel/ns_last_pid", (tgid - 1).to_string()).unwrap();
            let peer = Peer::start(scene.dir.path());
            let is_it = peer.pid() == tgid && start_time(tgid) != started;
            replacement = is_it.then_some(peer);
            is_it
        });
        let mut replacement = replacement.unwrap();
        replacement.tell("device connect");
        assert_eq!(replacement.ask("device tgid"), tgid.to_string());
        assert!(replacement.ask(&format!("device import {key}")).starts_with("err Denied"));
        scene.was_refused("import", "process_replaced", 1, |record| record["caller"]["bare_tgid"] == tgid);
        drop(replacement);
        scene.ends();
    });
    assert!(output.is_none_or(|output| passed(&output)));
}

fn start_time(pid: u32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().to_owned()
}

#[test]
fn connections_beyond_the_limit_are_refused_and_counted() {
    connect_beyond_the_limit(600);
}

#[test]
#[ignore = "long: 20,000 connections"]
fn twenty_thousand_connections_beyond_the_limit_are_refused_and_counted() {
    connect_beyond_the_limit(20_000);
}

/// A process with the maximum number of sessions connects so many times more.
fn connect_beyond_the_limit(attempts: u64) {
    let _watchdog = Watchdog::start();
    let mut scene = Scene::new();
    let crowd = crowd(&scene);
    let mut came = 0;
    for n in 0..attempts {
        // The kernel refuses connections when the backlog is full.
        came += u64::from(socket::connect_to(&broker(scene.dir.path())).is_ok());
        if n % 300 == 0 {
            scene.others_are_undisturbed();
        }
    }
    let refused = || {
        scene.denied("limit_sessions_per_process")
            + scene.sidecar.metric("shmesh_sidecar_refused_connections_total")
    };
    until("each is counted", || refused() >= came);
    assert_eq!(refused(), came, "no more than there were connections");
    assert!(came > attempts / 2, "{came}");
    let written = || audited(&scene.audit(), "open", "limit_sessions_per_process");
    until("the first are written down", || !written().is_empty());
    assert!(written().iter().all(by_me));
    until("each is in the log, or counted", || {
        let written = audited(&scene.audit(), "open", "limit_sessions_per_process").len()
            + audited(&scene.audit(), "open", "limit_sessions").len()
            + audited(&scene.audit(), "open", "limit_sessions_per_user").len();
        let left_out = ["rate", "queue", "writer"].map(|cause| {
            scene.sidecar.metric(&format!("shmesh_sidecar_audit_suppressed_total{{cause=\"{cause}\"}}"))
        });
        written as u64 + left_out.iter().sum::<u64>() == came
    });
    assert!(std::fs::metadata(scene.audit()).unwrap().len() < 1 << 20, "the log stays small");
    drop(crowd);
    scene.ends();
}

/// As many connections as this process may have.
fn crowd(scene: &Scene) -> Vec<OwnedFd> {
    let crowd: Vec<_> = (0..MAX_SESSIONS_PER_PROCESS).map(|_| scene.connect()).collect();
    for fd in &crowd {
        assert!(matches!(ask(fd, HELLO, &[]), reply::Result::Welcome(_)));
    }
    crowd
}

/// Packets arrive whole or not at all, so a slow client can only connect and be silent.
#[test]
fn silent_clients() {
    let _watchdog = Watchdog::start();
    let scene = Scene::new();
    let crowd: Vec<_> = (0..MAX_SESSIONS_PER_PROCESS).map(|_| scene.connect()).collect();
    let one_more = scene.connect();
    assert!(is_closed(&one_more), "the queue is in order, so the others are accepted");
    scene.was_refused("open", "limit_sessions_per_process", 1, by_me);
    let mut other = Peer::start(scene.dir.path());
    other.tell("device connect");
    assert_eq!(other.ask("device tgid"), other.pid().to_string(), "there is room for another process");
    drop((crowd, one_more, other));
    scene.ends();
}

#[test]
fn client_that_never_reads() {
    let _watchdog = Watchdog::start();
    let mut scene = Scene::new();
    let deaf = scene.connect();
    nix::fcntl::fcntl(&deaf, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
    let bytes = packet_of(Op::BareTgid(BareTgid {}));
    let is_closed = |_| {
        socket::send(&deaf, &bytes, &[]).is_err_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    };
    until("it is closed", || (0..100).any(is_closed));
    scene.was_refused("packet", "slow", 1, by_me);
    scene.others_are_undisturbed();
    drop(deaf);
    scene.ends();
}

#[test]
fn seats_and_duties_of_others() {
    let _watchdog = Watchdog::start();
    let scene = Scene::new();
    let fd = scene.connect();
    assert!(refusal(ask(&fd, Op::Offer(Offer {}), &[])).text.contains("kept by this sidecar"));
    scene.was_refused("offer", "kept_here", 1, by_me);
    // A seat that does not exist, a free seat, and a word that differs from the seat's.
    for (seat, word) in [(64, 1), (40, 1), (0, 1)] {
        tell(&fd, Op::Seated(Seated { seat, word }), &[]);
    }
    scene.was_refused("seated", "not_seated", 3, by_me);
    assert_eq!(audited(&scene.audit(), "seated", "").len(), 2, "those of the others were accepted");
    assert_eq!(audited(&scene.audit(), "attach", "").len(), 2);
    drop(fd);
    scene.ends();
}

/// A client that cannot be identified is audited with what the kernel reports for the socket.
#[test]
fn unidentified_client() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (audit, absent) = (dir.path().join("audit"), dir.path().join("absent.sock"));
    let flags = ["--audit", audit.to_str().unwrap(), "--identity", absent.to_str().unwrap()];
    let sidecar = Sidecar::start_with(dir.path(), "mpmc memfd", &flags);
    let fd = stranger(dir.path());
    let asked = [
        ("attach", Op::Attach(shmesh_proto::broker::Attach { side: 1 })),
        ("bare_tgid", Op::BareTgid(BareTgid {})),
        ("import", import(&"0".repeat(64))),
    ];
    for (name, op) in asked {
        assert_eq!(refusal(ask(&fd, op, &[])).code(), Code::Unidentified, "{name}");
        until("it is written down", || audited(&audit, name, "unidentified").len() == 1);
        let record = &audited(&audit, name, "unidentified")[0];
        assert_eq!(record["socket"]["pid"], std::process::id(), "{record}");
        assert_eq!(record["socket"]["uid"], nix::unistd::geteuid().as_raw(), "{record}");
    }
    assert_eq!(audited(&audit, "open", "unidentified").len(), 1);
    // The library: one refusal on connecting, one on the request.
    let options = LinkOptions::new().dir(dir.path()).timeout(HANGS);
    let error = refused(options.attach("link", Side::Secondary));
    assert_eq!(kind_of(&error), "Host");
    assert!(error.to_string().contains("read the reason in the host's log"), "{error}");
    assert_eq!(sidecar.metric("shmesh_sidecar_refused_requests_total{reason=\"unidentified\"}"), 6);
}

#[test]
fn descriptors_run_out() {
    let _watchdog = Watchdog::start();
    let mut scene = Scene::with(|dir, _, flags| Sidecar::start_with_limit(dir, "mpmc", 512, flags));
    // All sessions.
    let mut crowd = Vec::new();
    until("there is no more room", || {
        crowd.extend((0..16).filter_map(|_| socket::connect_to(&broker(scene.dir.path())).ok()));
        scene.sidecar.metric("shmesh_sidecar_refused_connections_total") > 0
    });
    let written = || audited(&scene.audit(), "open", "limit_sessions_per_user");
    until("it is written down", || !written().is_empty());
    assert_eq!(written()[0]["socket"]["pid"], std::process::id());
    scene.others_are_undisturbed();

    // All descriptors for keys, from a client that was accepted.
    let thief = crowd.remove(0);
    let memory = HostMemory::new(4096).unwrap();
    let memfd = DeviceMemory::fd(&memory).unwrap();
    let mut keys = 0;
    let refused = loop {
        match ask(&thief, export(Mechanism::Host, 4096), &[memfd]) {
            reply::Result::Exported(_) => keys += 1,
            other => break refusal(other),
        }
        assert!(keys < 512, "it has 512 descriptors");
    };
    assert_eq!(refused.code(), Code::Limit);
    assert!(refused.text.contains("keys with descriptors") && keys > 50, "{keys}: {}", refused.text);
    scene.was_refused("export", "limit_descriptors_per_process", 1, by_me);
    scene.others_are_undisturbed();

    // Descriptors with packets, as fast as they can be sent, while everything above is still in use.
    let file = std::fs::File::open("/dev/null").unwrap();
    nix::fcntl::fcntl(&thief, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
    let bytes = packet_of(HELLO);
    for _ in 0..2000 {
        let _ = socket::send(&thief, &bytes, &[file.as_fd(); 8]);
        while socket::receive(&thief).is_ok_and(|(bytes, _)| !bytes.is_empty()) {}
    }
    scene.others_are_undisturbed();
    assert!(scene.denied("bad_descriptors") > 0);
    // Keys belong to the process, not to the connection, which may have been closed meanwhile.
    tell(&crowd[0], Op::Detach(shmesh_proto::broker::Detach {}), &[]);
    until("the keys are gone", || scene.sidecar.metric("shmesh_sidecar_keys") == 1);
    drop((crowd, thief));
    scene.ends();
}
