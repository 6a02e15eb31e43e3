//! Clients that the sidecar identifies, and those that it cannot.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};

use crate::support::Sidecar;
use crate::support::client::{HELLO, ask, packet_of, refusal};
use shmesh::client::Client;
use shmesh_proto::broker::{self, Code, Reply, Request, reply, request};
use shmesh_proto::packet;
use shmesh_sys::socket;
use shmesh_testing::{Watchdog, ipc_dir, stranger, until};

#[test]
fn hello_reports_the_callers_identity() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    let me = stranger(dir.path());
    let reply::Result::Welcome(welcome) = ask(&me, HELLO, &[]) else { panic!("welcome") };
    let identity = welcome.identity.unwrap();
    assert_eq!(identity.bare_tgid, std::process::id().cast_signed());
    assert_eq!(identity.uid, nix::unistd::geteuid().as_raw());
    let tgid = ask(&me, request::Op::BareTgid(broker::BareTgid {}), &[]);
    assert_eq!(tgid, reply::Result::Tgid(broker::Tgid { bare_tgid: identity.bare_tgid }));
    // A sidecar does not hand its role over.
    let refused = refusal(ask(&me, request::Op::Offer(broker::Offer {}), &[]));
    assert!(refused.text.contains("kept by this sidecar"), "{}", refused.text);
}

/// Both ways in which kernels report the process that connected and the process that sends.
const KERNELS: [&[&str]; 2] = [&[], &["--old-kernel"]];

#[test]
fn inherited_connection_does_not_speak_for_its_creator() {
    let _watchdog = Watchdog::start();
    for kernel in KERNELS {
        let dir = ipc_dir();
        let sidecar = Sidecar::start_with(dir.path(), "mpmc", kernel);
        let mut me = Client::connect(dir.path(), "link").unwrap();
        assert!(me.identity().unwrap().is_some());
        // A child that has this connection as its standard output, and sends the requests of an honest client.
        let mine = me.as_fd().try_clone_to_owned().unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(mine).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&packet::encode(&Request::new(77, HELLO))).unwrap();
        assert!(child.wait().unwrap().success());
        let (bytes, _) = socket::receive(&me).unwrap();
        let reply: Reply = packet::decode(&bytes).unwrap();
        let Some(reply::Result::Refused(refused)) = reply.result else { panic!("{reply:?}") };
        assert_eq!((reply.id, refused.code()), (77, Code::Denied));
        assert_eq!(sidecar.metric("shmesh_sidecar_refused_requests_total{reason=\"foreign_sender\"}"), 1);
        assert!(me.identity().unwrap().is_some(), "its maker goes on");
    }
}

/// Before Linux 6.5 a connection gives only a process number. The client must prove that it is alive.
#[test]
fn on_an_old_kernel_unanswered_challenge_means_unidentified() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--old-kernel"]);
    let challenged = |fd: &OwnedFd| {
        socket::send(fd, &packet_of(HELLO), &[]).unwrap();
        let (bytes, _) = socket::receive(fd).unwrap();
        let reply: Reply = packet::decode(&bytes).unwrap();
        let Some(reply::Result::Challenge(challenge)) = reply.result else { panic!("{reply:?}") };
        challenge.nonce
    };
    let welcomed = |fd: &OwnedFd| {
        let (bytes, _) = socket::receive(fd).unwrap();
        let reply: Reply = packet::decode(&bytes).unwrap();
        let Some(reply::Result::Welcome(welcome)) = reply.result else { panic!("{reply:?}") };
        welcome.identity
    };
    let proof = |nonce| packet::encode(&Request::new(0, request::Op::Proof(broker::Proof { nonce })));

    // It has a second for that, which can be short on a busy machine.
    let mut nonce = Vec::new();
    until("who answers in time is known", || {
        let honest = stranger(dir.path());
        nonce = challenged(&honest);
        socket::send(&honest, &proof(nonce.clone()), &[]).unwrap();
        welcomed(&honest).is_some_and(|me| me.bare_tgid == std::process::id().cast_signed())
    });

    let wrong = stranger(dir.path());
    assert_ne!(challenged(&wrong), nonce, "another one each time");
    socket::send(&wrong, &proof(nonce), &[]).unwrap();
    assert_eq!(welcomed(&wrong), None);
    let refused = ask(&wrong, request::Op::Attach(broker::Attach { side: 1 }), &[]);
    assert!(matches!(refused, reply::Result::Refused(refused) if refused.code() == Code::Unidentified));

    // From another process, with the right answer.
    let passed_on = stranger(dir.path());
    let nonce = challenged(&passed_on);
    let its = passed_on.try_clone().unwrap();
    let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(its).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&proof(nonce)).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(welcomed(&passed_on), None);

    let silent = stranger(dir.path());
    challenged(&silent);
    assert_eq!(welcomed(&silent), None, "after a second");
    assert!(sidecar.metric("shmesh_sidecar_refused_requests_total{reason=\"unidentified\"}") > 0);
}
