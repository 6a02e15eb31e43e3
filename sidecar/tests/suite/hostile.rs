//! What a hostile process, or an identity service in trouble, can make a sidecar do: nothing that others notice.

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::{Sidecar, audited};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shmesh_proto::broker::{
    Ack, Attach, Close, Code, ExportKey, Hello, ImportByKey, Mechanism, Refused, Reply, Request, reply,
    request::Op,
};
use shmesh_proto::identity::{Answer, PeerIdentity, Question, Subject, Unknown, answer};
use shmesh_proto::limits::{MAX_SESSIONS, MAX_SESSIONS_PER_PROCESS};
use shmesh_proto::packet;
use shmesh_sys::socket;
use shmesh_testing::{Peer, Watchdog, broker, ipc_dir, key_of, stranger, until};

const HELLO: Op = Op::Hello(Hello {});

fn tell(fd: &OwnedFd, op: Op, fds: &[BorrowedFd<'_>]) {
    socket::send(fd, &packet::encode(&Request::new(5, op)), fds).unwrap();
}

fn answer(fd: &OwnedFd) -> reply::Result {
    let (bytes, _) = socket::receive(fd).unwrap();
    assert!(!bytes.is_empty(), "closed without an answer");
    packet::decode::<Reply>(&bytes).unwrap().result.unwrap()
}

fn refusal(result: reply::Result) -> Refused {
    match result {
        reply::Result::Refused(refused) => refused,
        other => panic!("this must be refused: {other:?}"),
    }
}

fn signal(sidecar: &Sidecar, signal: Signal) {
    kill(Pid::from_raw(sidecar.pid().cast_signed()), signal).unwrap();
}

fn denied(sidecar: &Sidecar, reason: &str) -> u64 {
    sidecar.metric(&format!("shmesh_sidecar_denied_total{{reason=\"{reason}\"}}"))
}

/// An identity service that does what a test wants.
struct Service {
    path: PathBuf,
    /// What it does with questions about numbers.
    numbers: Arc<Mutex<Numbers>>,
    most: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, PartialEq)]
enum Numbers {
    Answered,
    /// The connection is closed, as when the service ends in the middle of a question.
    Broken,
    Unavailable,
    /// Never answered.
    Ignored,
}

impl Service {
    /// As long as so many ask at the same time; more are turned away.
    fn start(dir: &Path, places: usize, takes: Duration) -> Self {
        let path = dir.join("agent.sock");
        let listener = socket::listen_on(&path, 0o600).unwrap();
        let numbers = Arc::new(Mutex::new(Numbers::Answered));
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let service = Self { path, numbers: Arc::clone(&numbers), most: Arc::clone(&most) };
        std::thread::spawn(move || {
            while let Ok(connection) = socket::accept(&listener) {
                let here = now.fetch_add(1, Ordering::SeqCst) + 1;
                most.fetch_max(here, Ordering::SeqCst);
                let (numbers, now) = (Arc::clone(&numbers), Arc::clone(&now));
                std::thread::spawn(move || {
                    if here <= places {
                        std::thread::sleep(takes);
                        serve(&connection, &numbers);
                    }
                    now.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        service
    }
}

fn serve(connection: &OwnedFd, numbers: &Mutex<Numbers>) {
    while let Ok((bytes, fds)) = socket::receive(connection) {
        let question: Question = packet::decode(&bytes).unwrap();
        if bytes.is_empty() {
            return;
        }
        let result = if question.subject() == Subject::Number {
            match *numbers.lock().unwrap() {
                Numbers::Answered => answer::Result::Unknown(Unknown::Gone.into()),
                Numbers::Unavailable => answer::Result::Unknown(Unknown::Unavailable.into()),
                Numbers::Broken => return,
                Numbers::Ignored => continue,
            }
        } else {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", raw(&fds[0]))).unwrap();
            let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")).unwrap().trim();
            let peer =
                PeerIdentity { bare_tgid: pid.parse().unwrap(), start_time: 1, ..PeerIdentity::default() };
            answer::Result::Peer(peer)
        };
        let _ =
            socket::send(connection, &packet::encode(&Answer { id: question.id, result: Some(result) }), &[]);
    }
}

fn raw(fd: &OwnedFd) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(fd)
}

/// Whoever is asked about numbers and does not say: that is no word of a process that is not there.
#[test]
fn a_service_that_ends_in_the_middle_of_a_question_says_nothing_of_the_living() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let service = Service::start(dir.path(), usize::MAX, Duration::ZERO);
    let audit = dir.path().join("audit");
    let flags = ["--identity", service.path.to_str().unwrap(), "--audit", audit.to_str().unwrap()];
    let _sidecar = Sidecar::start_with(dir.path(), "mpmc", &flags);
    let mut exporter = Peer::start(dir.path());
    exporter.tell("device connect");
    let key = exporter.ask("device export weights 0");
    for numbers in [Numbers::Broken, Numbers::Unavailable, Numbers::Ignored] {
        *service.numbers.lock().unwrap() = numbers;
        let said = exporter.ask(&format!("device admit {key} 4000000"));
        assert!(said.contains("did not answer"), "{said}");
    }
    *service.numbers.lock().unwrap() = Numbers::Answered;
    let said = exporter.ask(&format!("device admit {key} 4000000"));
    assert!(said.contains("no living process"), "and it recovers: {said}");
    until("it is written down", || audited(&audit, "admit", "no_answer").len() == 3);
    until("so is that", || audited(&audit, "admit", "not_alive").len() == 1);
}

/// The service has a number of places for each pod, and a sidecar is one process of its pod.
#[test]
fn a_crowd_does_not_take_all_places_at_the_identity_service() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let service = Service::start(dir.path(), 64, Duration::from_millis(20));
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--identity", service.path.to_str().unwrap()]);
    // At once: it begins to accept when all are there.
    signal(&sidecar, Signal::SIGSTOP);
    let crowd: Vec<_> = (0..MAX_SESSIONS_PER_PROCESS).map(|_| stranger(dir.path())).collect();
    let mut other = Peer::start(dir.path());
    other.order("device connect");
    other.answer();
    other.order("device tgid");
    signal(&sidecar, Signal::SIGCONT);
    for fd in &crowd {
        tell(fd, HELLO, &[]);
        let reply::Result::Welcome(welcome) = answer(fd) else { panic!("welcome") };
        assert!(welcome.identity.is_some());
    }
    assert_eq!(other.answer(), other.pid().to_string());
    assert!(service.most.load(Ordering::SeqCst) < 64, "{:?}", service.most);
    assert_eq!(denied(&sidecar, "unidentified"), 0);
}

/// Before Linux 6.5 nobody is let in before a challenge is answered, and only who asks something is challenged.
#[test]
fn on_an_old_kernel_who_says_nothing_does_not_take_all_places() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let audit = dir.path().join("audit");
    let flags = ["--old-kernel", "--audit", audit.to_str().unwrap()];
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &flags);
    let before = sidecar.fds();
    let crowd: Vec<_> =
        (0..MAX_SESSIONS + 100).map_while(|_| socket::connect_to(&broker(dir.path())).ok()).collect();
    let mut other = Peer::start(dir.path());
    other.tell("device connect");
    assert_eq!(other.ask("device tgid"), other.pid().to_string());
    assert!(denied(&sidecar, "limit_sessions_per_process") > 0);
    let written = || audited(&audit, "open", "limit_sessions_per_process");
    until("the first are written down", || !written().is_empty());
    assert_eq!(written()[0]["caller"]["bare_tgid"], std::process::id());
    drop((crowd, other));
    until("all descriptors are closed", || sidecar.fds() <= before);
}

#[test]
fn on_an_old_kernel_nonsense_is_counted_too() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let audit = dir.path().join("audit");
    let flags = ["--old-kernel", "--audit", audit.to_str().unwrap()];
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &flags);
    let before = sidecar.fds();
    // Who comes and goes has done nothing wrong.
    drop(stranger(dir.path()));
    let fd = stranger(dir.path());
    let file = std::fs::File::open("/dev/null").unwrap();
    tell(&fd, HELLO, &[file.as_fd(); 100]);
    until("it is counted", || denied(&sidecar, "malformed") == 1);
    until("it is written down", || !audited(&audit, "packet", "malformed").is_empty());
    // Descriptors of somebody who proves nothing do not pile up.
    let hoarder = stranger(dir.path());
    for _ in 0..16 {
        let _ = socket::send(&hoarder, &packet::encode(&Request::new(5, HELLO)), &[file.as_fd(); 8]);
    }
    until("it is nobody", || denied(&sidecar, "unidentified") > 0);
    drop((fd, hoarder));
    until("all descriptors are closed", || sidecar.fds() <= before);
    until("the hoarder is written down", || audited(&audit, "open", "unidentified").len() == 1);
}

/// The sidecar watches who has attached until it ends, and that takes a descriptor.
#[test]
fn those_who_attach_and_hang_up_do_not_take_all_descriptors() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start_with_limit(dir.path(), "mpmc memfd", 160, &[]);
    let mut honest = Peer::start(dir.path());
    honest.tell("device connect");
    // Processes that end with this test, each attached once.
    let (mut refused, mut crowd) = (0, Vec::new());
    while refused == 0 && crowd.len() < 160 {
        let mut peer = Peer::start(dir.path());
        let said = peer.ask("attach link secondary 0");
        refused += usize::from(said.starts_with("err"));
        peer.order("close");
        peer.answer();
        crowd.push(peer);
    }
    assert!(refused > 0, "there is an end to it");
    assert_ne!(
        denied(&sidecar, "limit_descriptors_per_account"),
        0,
        "it is refused by the sidecar, and the probes still work"
    );
    assert_eq!(honest.ask("device tgid"), honest.pid().to_string());
    drop(crowd);
    let mut peer = Peer::start(dir.path());
    until("there is room again", || peer.ask("attach link secondary 0") == "ok");
}

/// Whoever is turned away was not let in a moment before, whatever it had sent by then.
#[test]
fn who_is_turned_away_has_not_attached() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let audit = dir.path().join("audit");
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--audit", audit.to_str().unwrap()]);
    let crowd: Vec<_> = (0..MAX_SESSIONS_PER_PROCESS).map(|_| stranger(dir.path())).collect();
    for fd in &crowd {
        tell(fd, HELLO, &[]);
        answer(fd);
    }
    signal(&sidecar, Signal::SIGSTOP);
    let one_more = stranger(dir.path());
    tell(&one_more, Op::Attach(Attach { side: 1 }), &[]);
    signal(&sidecar, Signal::SIGCONT);
    assert_eq!(refusal(answer(&one_more)).code(), Code::Limit);
    until("it is written down", || audited(&audit, "open", "limit_sessions_per_process").len() == 1);
    // What has come in before is done by now.
    tell(&crowd[0], HELLO, &[]);
    answer(&crowd[0]);
    assert_eq!(sidecar.metric("shmesh_sidecar_attached_total"), 0);
    assert_eq!(audited(&audit, "attach", "").len(), 0);
}

/// What it was asked before the end it answers, if only with that.
#[test]
fn a_question_that_is_open_at_the_end_is_answered() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let service = Service::start(dir.path(), usize::MAX, Duration::ZERO);
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--identity", service.path.to_str().unwrap()]);
    let mut exporter = Peer::start(dir.path());
    exporter.tell("device connect");
    let key = exporter.ask("device export weights 0");
    *service.numbers.lock().unwrap() = Numbers::Ignored;
    exporter.order(&format!("device admit {key} 4000000"));
    until("it is asked", || {
        service.most.load(Ordering::SeqCst) > 0 && exporter.answered().is_none() && {
            std::thread::sleep(Duration::from_millis(100));
            true
        }
    });
    signal(&sidecar, Signal::SIGTERM);
    let said = exporter.answer();
    assert!(said.contains("going to end") || said.contains("did not answer"), "{said}");
    sidecar.stop();
}

/// Somebody who reads, but slowly: it is not waited for without end, and nothing has failed.
#[test]
fn who_reads_slowly_does_not_make_the_end_a_failure() {
    end_before_a_slow_reader(600);
}

#[test]
#[ignore = "long: 3,500 events"]
fn who_reads_slowly_does_not_make_the_end_a_failure_or_with_thousands_of_events() {
    end_before_a_slow_reader(3500);
}

fn end_before_a_slow_reader(events: u32) {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--allow-open-keys"]);
    let slow = stranger(dir.path());
    let ask = |op| {
        tell(&slow, op, &[]);
        answer(&slow)
    };
    let mut exporter = Peer::start(dir.path());
    exporter.tell("device connect");
    for _ in 0..events {
        let key = key_of(&exporter.ask("device export weights 1")).as_bytes().to_vec();
        let reply::Result::Imported(imported) = ask(Op::ImportByKey(ImportByKey { key })) else {
            panic!("it is for everybody")
        };
        assert!(matches!(ask(Op::Ack(Ack { grant: imported.grant, done: true })), reply::Result::Done(_)));
    }
    // One event for each, read so slowly as is not too slow: there is room again in time, and not for much.
    exporter.kill();
    until("its keys are gone", || sidecar.metric("shmesh_sidecar_keys") == 0);
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let reads = std::thread::spawn(move || {
        while stopped.recv_timeout(Duration::from_millis(400)) == Err(RecvTimeoutError::Timeout) {
            for _ in 0..300 {
                if !socket::receive(&slow).is_ok_and(|(bytes, _)| !bytes.is_empty()) {
                    return;
                }
            }
        }
    });
    sidecar.stop();
    drop(stop);
    reads.join().unwrap();
}

/// The bad input of the five calls, as a whole sidecar answers it.
#[test]
fn keys_that_are_none_and_closes_that_cannot_be() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    let (mut exporter, fd) = (Peer::start(dir.path()), stranger(dir.path()));
    let ask = |op| {
        tell(&fd, op, &[]);
        answer(&fd)
    };
    for bytes in [0, 1, 64, 66, 4096] {
        let key = vec![b'0'; bytes];
        for op in [
            Op::ImportByKey(ImportByKey { key: key.clone() }),
            Op::Close(Close { key: key.clone(), force: true }),
        ] {
            assert_eq!(refusal(ask(op)).code(), Code::Invalid, "{bytes}");
        }
    }
    let nothing = ExportKey { size: 0, flags: 0, mechanism: Mechanism::Host.into(), handle: Vec::new() };
    assert_eq!(refusal(ask(Op::ExportKey(nothing))).text, "there is no memory of 0 bytes");

    exporter.tell("device connect");
    let text = exporter.ask("device export weights 0");
    exporter.tell(&format!("device admit {text} {}", std::process::id()));
    let key = key_of(&text).as_bytes().to_vec();
    assert!(matches!(ask(Op::ImportByKey(ImportByKey { key: key.clone() })), reply::Result::Imported(_)));
    let early = exporter.ask(&format!("device close {text}"));
    assert!(early.starts_with("err Busy") && early.contains(&std::process::id().to_string()), "{early}");
    let close = || ask(Op::Close(Close { key: key.clone(), force: false }));
    assert!(matches!(close(), reply::Result::Done(_)));
    assert_eq!(refusal(close()).code(), Code::Denied, "twice");
    exporter.tell(&format!("device close {text}"));
    let again = exporter.ask(&format!("device close {text}"));
    assert!(again.starts_with("err Denied"), "{again}");
}

#[test]
fn an_invalid_log_filter_is_a_wrong_configuration() {
    let dir = ipc_dir();
    let output = Command::new(env!("CARGO_BIN_EXE_shmesh-sidecar"))
        .args(["--link", "link", "--any-file-system", "--log", "a=b=c", "--dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(64), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A pipe that is full, with nobody at the other end who reads.
#[test]
fn an_audit_log_that_nobody_reads_does_not_hold_up_the_end() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let yaml = dir.path().join("links.yaml");
    std::fs::write(&yaml, "- name: link\n  ring: { len: 16 }\n").unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_shmesh-sidecar"))
        .args(["--link", "link", "--any-file-system", "--audit", "-", "--dir"])
        .arg(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(log.any(|line| line.contains("ready")));
    let log = std::thread::spawn(move || log.for_each(drop));
    let fd = stranger(dir.path());
    for _ in 0..2000 {
        tell(&fd, Op::Attach(Attach { side: 1 }), &[]);
        answer(&fd);
    }
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    let start = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if start.elapsed() > Duration::from_secs(60) => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("it does not end");
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    assert_eq!(status.code(), Some(0));
    log.join().unwrap();
}
