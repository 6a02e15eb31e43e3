//! Unknown clients of the socket and invalid requests: refused and counted, without effect on others.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};

use crate::support::Sidecar;
use shmesh::client::Client;
use shmesh::{LinkOptions, Side};
use shmesh_proto::broker::{self, Code, Reply, Request, reply, request};
use shmesh_proto::limits::{MAX_PACKET_BYTES, MAX_SESSIONS};
use shmesh_proto::packet;
use shmesh_sys::socket;
use shmesh_testing::{Watchdog, broker, ipc_dir, stranger, until};

fn ask(fd: &OwnedFd, op: request::Op, fds: &[std::os::fd::BorrowedFd<'_>]) -> reply::Result {
    socket::send(fd, &packet::encode(&Request::new(5, op)), fds).unwrap();
    let (bytes, _) = socket::receive(fd).unwrap();
    let reply: Reply = packet::decode(&bytes).unwrap();
    assert_eq!(reply.id, 5);
    reply.result.unwrap()
}

fn hello() -> request::Op {
    request::Op::Hello(broker::Hello {})
}

#[test]
fn hello_reports_the_callers_identity() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    let me = stranger(dir.path());
    let reply::Result::Welcome(welcome) = ask(&me, hello(), &[]) else { panic!("welcome") };
    let identity = welcome.identity.unwrap();
    assert_eq!(identity.bare_tgid, std::process::id().cast_signed());
    assert_eq!(identity.uid, nix::unistd::geteuid().as_raw());
    let tgid = ask(&me, request::Op::BareTgid(broker::BareTgid {}), &[]);
    assert_eq!(tgid, reply::Result::Tgid(broker::Tgid { bare_tgid: identity.bare_tgid }));
    let reply::Result::Refused(refused) = ask(&me, request::Op::Offer(broker::Offer {}), &[]) else {
        panic!("a sidecar does not hand its role over")
    };
    assert!(refused.text.contains("kept by this sidecar"), "{}", refused.text);
}

#[test]
fn nonsense_is_refused() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    let before = sidecar.fds();
    for bytes in [&[0xff; 100][..], &[0; MAX_PACKET_BYTES + 1]] {
        let fd = stranger(dir.path());
        socket::send(&fd, bytes, &[]).unwrap();
        let (answer, _) = socket::receive(&fd).unwrap_or_default();
        assert!(answer.is_empty(), "it is closed");
    }
    until("they are counted", || {
        sidecar.metric("shmesh_sidecar_refused_requests_total{reason=\"malformed\"}") == 2
    });

    let file = std::fs::File::open("/dev/null").unwrap();
    let gives = stranger(dir.path());
    let list = request::Op::List(broker::List { skip: 0 });
    let reply::Result::Refused(refused) = ask(&gives, list, &[file.as_fd(); 4]) else {
        panic!("no descriptors")
    };
    assert_eq!(refused.code(), Code::Invalid);
    // More than any request takes: the kernel truncates them, and those that arrived are closed.
    let too_many = stranger(dir.path());
    socket::send(&too_many, &packet::encode(&Request::new(1, hello())), &[file.as_fd(); 100]).unwrap();
    let (answer, _) = socket::receive(&too_many).unwrap_or_default();
    assert!(answer.is_empty(), "it is closed");

    let other = stranger(dir.path());
    let future = Request { version: 9, ..Request::new(5, hello()) };
    socket::send(&other, &packet::encode(&future), &[]).unwrap();
    let (bytes, _) = socket::receive(&other).unwrap();
    let reply: Reply = packet::decode(&bytes).unwrap();
    assert!(matches!(reply.result, Some(reply::Result::Refused(refused)) if refused.code() == Code::Version));
    drop((gives, too_many, other));
    until("all descriptors are closed", || sidecar.fds() <= before);
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
        child.stdin.take().unwrap().write_all(&packet::encode(&Request::new(77, hello()))).unwrap();
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
        socket::send(fd, &packet::encode(&Request::new(5, hello())), &[]).unwrap();
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

#[test]
fn client_that_does_not_read_is_disconnected() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    let before = sidecar.fds();
    let deaf = stranger(dir.path());
    nix::fcntl::fcntl(&deaf, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
    let bytes = packet::encode(&Request::new(5, hello()));
    until("it is closed", || {
        socket::send(&deaf, &bytes, &[]).is_err_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    });
    assert!(sidecar.metric("shmesh_sidecar_refused_requests_total{reason=\"slow\"}") > 0);
    until("its descriptors are closed", || sidecar.fds() <= before);
}

#[test]
fn crowd_is_refused_without_effect_on_others() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    let options = LinkOptions::new().dir(dir.path());
    let phy = options.attach("link", Side::Primary).unwrap();
    until("it is known", || sidecar.metric("shmesh_sidecar_attached_total") == 1);
    let before = sidecar.fds();
    let crowd: Vec<_> =
        (0..MAX_SESSIONS + 200).map_while(|_| socket::connect_to(&broker(dir.path())).ok()).collect();
    until("some are turned away", || {
        sidecar.metric("shmesh_sidecar_refused_connections_total")
            + sidecar.metric("shmesh_sidecar_refused_requests_total{reason=\"limit_sessions_per_process\"}")
            > 0
    });
    drop(crowd);
    until("all descriptors are closed", || sidecar.fds() <= before);
    let mac = options.attach("link", Side::Secondary).unwrap();
    mac.send_inline(1, 0, b"undisturbed").unwrap();
    assert_eq!(phy.receive().unwrap().unwrap().msg(), b"undisturbed");
}
