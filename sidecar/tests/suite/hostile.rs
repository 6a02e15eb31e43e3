//! Hostile processes and a failing identity service: they must not affect other clients.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::client::{self, HELLO, ask, packet_of, refusal, tell};
use crate::support::{Sidecar, audited};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shmesh_proto::broker::{Ack, Attach, Close, Code, ExportKey, ImportByKey, Mechanism, reply, request::Op};
use shmesh_proto::identity::{Answer, PeerIdentity, Question, Subject, Unknown, answer};
use shmesh_proto::limits::{MAX_SESSIONS, MAX_SESSIONS_PER_PROCESS};
use shmesh_proto::packet;
use shmesh_sys::socket;
use shmesh_testing::{Peer, Watchdog, broker, ipc_dir, key_of, stranger, until};

fn answer(fd: &OwnedFd) -> reply::Result {
    client::answer(fd).expect("closed without an answer")
}

fn signal(sidecar: &Sidecar, signal: Signal) {
    kill(Pid::from_raw(sidecar.pid().cast_signed()), signal).unwrap();
}

fn denied(sidecar: &Sidecar, reason: &str) -> u64 {
    sidecar.metric(&format!("shmesh_sidecar_refused_requests_total{{reason=\"{reason}\"}}"))
}

/// An identity service under the test's control.
struct Service {
    path: PathBuf,
    /// How it answers questions about process numbers.
    numbers: Arc<Mutex<Numbers>>,
    most: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, PartialEq)]
enum Numbers {
    Answered,
    /// Closes the connection, as when the service ends during a question.
    Broken,
    Unavailable,
    /// Never sends an answer.
    Ignored,
}

impl Service {
    /// Starts a service that answers up to `places` questions at a time, and refuses more.
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

/// A service that fails to answer about a number does not mean that the process is dead.
#[test]
fn service_that_ends_mid_question_does_not_affect_living_processes() {
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
    assert!(said.contains("no living process"), "the service has recovered: {said}");
    until("it is written down", || audited(&audit, "admit", "no_answer").len() == 3);
    until("that is written down too", || audited(&audit, "admit", "not_alive").len() == 1);
}

/// The service limits the connections per pod, and the whole sidecar is one process of its pod.
#[test]
fn crowd_does_not_take_all_places_at_the_identity_service() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let service = Service::start(dir.path(), 64, Duration::from_millis(20));
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--identity", service.path.to_str().unwrap()]);
    // All connect at once: the sidecar accepts them when it continues.
    sidecar.pause();
    let crowd: Vec<_> = (0..MAX_SESSIONS_PER_PROCESS).map(|_| stranger(dir.path())).collect();
    let mut other = Peer::start(dir.path());
    other.order("device connect");
    other.answer();
    other.order("device tgid");
    sidecar.go_on();
    for fd in &crowd {
        let reply::Result::Welcome(welcome) = ask(fd, HELLO, &[]) else { panic!("welcome") };
        assert!(welcome.identity.is_some());
    }
    assert_eq!(other.answer(), other.pid().to_string());
    assert!(service.most.load(Ordering::SeqCst) < 64, "{:?}", service.most);
    assert_eq!(denied(&sidecar, "unidentified"), 0);
}

/// Before Linux 6.5 a client is accepted only after it has answered a challenge, which it gets with its first request.
#[test]
fn on_an_old_kernel_silent_clients_do_not_take_all_places() {
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
    // Connecting and disconnecting is no error.
    drop(stranger(dir.path()));
    let fd = stranger(dir.path());
    let file = std::fs::File::open("/dev/null").unwrap();
    tell(&fd, HELLO, &[file.as_fd(); 100]);
    until("it is counted", || denied(&sidecar, "malformed") == 1);
    until("it is written down", || !audited(&audit, "packet", "malformed").is_empty());
    // Descriptors of a client that does not answer the challenge do not pile up.
    let hoarder = stranger(dir.path());
    for _ in 0..16 {
        let _ = socket::send(&hoarder, &packet_of(HELLO), &[file.as_fd(); 8]);
    }
    until("it is refused as unidentified", || denied(&sidecar, "unidentified") > 0);
    drop((fd, hoarder));
    until("all descriptors are closed", || sidecar.fds() <= before);
    until("the hoarder is written down", || audited(&audit, "open", "unidentified").len() == 1);
}

/// The sidecar watches each process that has attached until it ends, which takes a descriptor.
#[test]
fn attached_processes_without_sessions_do_not_take_all_descriptors() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start_with_limit(dir.path(), "mpmc memfd", 160, &[]);
    let mut honest = Peer::start(dir.path());
    honest.tell("device connect");
    // Processes that live as long as this test. Each attaches once.
    let (mut refused, mut crowd) = (0, Vec::new());
    while refused == 0 && crowd.len() < 160 {
        let mut peer = Peer::start(dir.path());
        let said = peer.ask("attach link secondary 0");
        refused += usize::from(said.starts_with("err"));
        peer.order("close");
        peer.answer();
        crowd.push(peer);
    }
    assert!(refused > 0, "there is a limit");
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

/// A refused client was never accepted, whatever it had sent before.
#[test]
fn refused_client_has_not_attached() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let audit = dir.path().join("audit");
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--audit", audit.to_str().unwrap()]);
    let crowd: Vec<_> = (0..MAX_SESSIONS_PER_PROCESS).map(|_| stranger(dir.path())).collect();
    for fd in &crowd {
        ask(fd, HELLO, &[]);
    }
    sidecar.pause();
    let one_more = stranger(dir.path());
    tell(&one_more, Op::Attach(Attach { side: 1 }), &[]);
    sidecar.go_on();
    assert_eq!(refusal(answer(&one_more)).code(), Code::Limit);
    until("it is written down", || audited(&audit, "open", "limit_sessions_per_process").len() == 1);
    // Earlier packets have been processed by now.
    ask(&crowd[0], HELLO, &[]);
    assert_eq!(sidecar.metric("shmesh_sidecar_attached_total"), 0);
    assert_eq!(audited(&audit, "attach", "").len(), 0);
}

/// A request that is pending at the end gets at least an answer that says so.
#[test]
fn question_that_is_open_at_the_end_is_answered() {
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
    assert!(said.contains("shutting down") || said.contains("did not answer"), "{said}");
    sidecar.stop();
}

/// A slow reader does not delay the end without limit, and does not make it a failure.
#[test]
fn slow_reader_does_not_fail_the_shutdown() {
    end_before_a_slow_reader(600);
}

#[test]
#[ignore = "long: 3,500 events"]
fn slow_reader_does_not_fail_the_shutdown_with_thousands_of_events() {
    end_before_a_slow_reader(3500);
}

fn end_before_a_slow_reader(events: u32) {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--allow-open-keys"]);
    let slow = stranger(dir.path());
    let ask = |op| ask(&slow, op, &[]);
    let mut exporter = Peer::start(dir.path());
    exporter.tell("device connect");
    for _ in 0..events {
        let key = key_of(&exporter.ask("device export weights 1")).as_bytes().to_vec();
        let reply::Result::Imported(imported) = ask(Op::ImportByKey(ImportByKey { key })) else {
            panic!("an open key admits any process")
        };
        assert!(matches!(ask(Op::Ack(Ack { grant: imported.grant, done: true })), reply::Result::Done(_)));
    }
    // One event per key, read slowly but not too slowly: there is room again in time, but not for many.
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

/// Bad input to the five calls, and the answers of a whole sidecar.
#[test]
fn invalid_keys_and_closes_are_refused() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    let (mut exporter, fd) = (Peer::start(dir.path()), stranger(dir.path()));
    let ask = |op| ask(&fd, op, &[]);
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
    assert_eq!(refusal(ask(Op::ExportKey(nothing))).text, "size is 0; give the size of the memory in bytes");

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
fn invalid_log_filter_is_a_wrong_configuration() {
    let dir = ipc_dir();
    let output = Command::new(env!("CARGO_BIN_EXE_shmesh-sidecar"))
        .args(["--link", "link", "--any-file-system", "--log", "a=b=c", "--dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(64), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A full pipe without a reader.
#[test]
fn unread_audit_log_does_not_delay_the_shutdown() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-sidecar"));
    command.stdout(Stdio::piped());
    let sidecar = Sidecar::start_by(command, dir.path(), "mpmc", &["--audit", "-"]);
    let fd = stranger(dir.path());
    for _ in 0..2000 {
        ask(&fd, Op::Attach(Attach { side: 1 }), &[]);
    }
    sidecar.stop();
}
