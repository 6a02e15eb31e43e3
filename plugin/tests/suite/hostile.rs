//! Misbehaving clients: the service continues, counts each violation, and leaks no descriptor.

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Command;

use crate::support::*;
use nix::errno::Errno;
use nix::sys::eventfd::EventFd;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt};
use nix::unistd::Pid;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use shmesh_proto::identity::{Question, Subject, Unknown, answer};
use shmesh_proto::limits::{MAX_PACKET_BYTES, VERSION};
use shmesh_proto::packet;
use shmesh_testing::own_process;

/// Maximum descriptors per packet in the kernel.
const MOST_FDS: usize = 253;
/// Maximum connections of one client.
const CONNECTIONS_PER_CLIENT: usize = 64;

fn unix_pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap()
}

#[test]
fn wrong_descriptor_types_are_refused() {
    let service = Service::start();
    let mut asker = service.asker();
    assert!(asker.ask(Subject::Pidfd, &me()).is_ok());
    let before = service.open_fds();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp_client: OwnedFd = TcpStream::connect(tcp.local_addr().unwrap()).unwrap().into();
    let dir = tempfile::tempdir().unwrap();
    let wrong: Vec<(&str, OwnedFd)> = vec![
        ("a file", tempfile::tempfile().unwrap().into()),
        ("a directory", std::fs::File::open("/").unwrap().into()),
        ("a file of /proc", std::fs::File::open("/proc/self/status").unwrap().into()),
        (
            "a directory of /proc, which some take for a pidfd",
            std::fs::File::open("/proc/self").unwrap().into(),
        ),
        ("an eventfd", EventFd::new().unwrap().into()),
        ("a pipe", nix::unistd::pipe().unwrap().0),
        ("a tcp listener", tcp.into()),
        ("a tcp connection", tcp_client),
        ("a listening unix socket", listen_on(&dir.path().join("x"))),
        ("an unconnected unix socket", seqpacket()),
    ];
    for (what, fd) in &wrong {
        for subject in [Subject::Pidfd, Subject::Socket] {
            assert_eq!(asker.ask(subject, fd), Err(Unknown::BadDescriptor), "{what} as {subject:?}");
        }
    }
    // Valid descriptors, each declared as the other kind.
    let (ours, _theirs) = unix_pair();
    assert_eq!(asker.ask(Subject::Pidfd, &ours), Err(Unknown::BadDescriptor));
    assert_eq!(asker.ask(Subject::Socket, &me()), Err(Unknown::BadDescriptor));
    assert_eq!(asker.ask(Subject::Unspecified, &me()), Err(Unknown::BadQuestion));
    assert!(asker.ask(Subject::Pidfd, &me()).is_ok(), "the service continues");
    back_to(&service, before);
    let counters = service.stop();
    assert_eq!(counters["bad_descriptors"], wrong.len() * 2 + 2);
    assert_eq!(counters["bad_questions"], 1);
}

#[test]
fn pidfd_of_a_thread_is_refused() {
    const PIDFD_THREAD: u32 = libc::O_EXCL.cast_unsigned();
    let service = Service::start();
    let mut asker = service.asker();
    let tid = nix::unistd::gettid().as_raw();
    assert_ne!(tid, std::process::id().cast_signed(), "tests run in threads");
    assert!(pidfd_open(tid, 0).is_err(), "without the flag the kernel refuses");
    for pid in [tid, std::process::id().cast_signed()] {
        match pidfd_open(pid, PIDFD_THREAD) {
            // Even the first thread's: it ends with the thread, not with the process.
            Ok(fd) => assert_eq!(asker.ask(Subject::Pidfd, &fd), Err(Unknown::BadDescriptor)),
            Err(error) => eprintln!("skipped: Linux before 6.9 has no such pidfd: {error}"),
        }
    }
}

#[test]
fn question_requires_exactly_one_descriptor() {
    let service = Service::start();
    let (me, before) = (me(), service.open_fds());
    assert_eq!(service.asker().ask_with(Subject::Pidfd, &[]), Err(Unknown::BadDescriptor));
    for count in [2, 8, MOST_FDS] {
        let mut asker = service.asker();
        let many: Vec<BorrowedFd<'_>> = vec![me.as_fd(); count];
        assert_eq!(asker.ask_with(Subject::Pidfd, &many), Err(Unknown::BadDescriptor), "{count}");
        assert_eq!(asker.answer(), None, "let go");
    }
    back_to(&service, before);
    assert_eq!(service.stop()["bad_descriptors"], 4);
}

#[test]
fn invalid_packets_are_refused() {
    let service = Service::start();
    let (me, before) = (me(), service.open_fds());
    let question = packet::encode(&Question::new(7, Subject::Pidfd));
    let garbled: [&[u8]; 5] = [
        &[0xff; 3],
        &question[..question.len() - 1],
        &[0; MAX_PACKET_BYTES],
        &[0; MAX_PACKET_BYTES + 1],
        &[7; 100_000],
    ];
    for bytes in garbled {
        for fds in [&[][..], &[me.as_fd()][..]] {
            let asker = service.asker();
            asker.send(bytes, fds).unwrap();
            assert_eq!(
                asker.answer().as_ref().and_then(unknown),
                Some(Unknown::BadQuestion),
                "{}",
                bytes.len()
            );
            assert_eq!(asker.answer(), None, "let go");
        }
    }
    // A valid question with a tail that was cut off is not half believed.
    let mut long = question.clone();
    long.resize(MAX_PACKET_BYTES + 1, 0);
    let asker = service.asker();
    asker.send(&long, &[me.as_fd()]).unwrap();
    assert_eq!(asker.answer().as_ref().and_then(unknown), Some(Unknown::BadQuestion));
    // A client of another version gets an answer and may retry.
    let mut other = service.asker();
    other
        .send(
            &packet::encode(&Question { version: VERSION + 1, ..Question::new(9, Subject::Pidfd) }),
            &[me.as_fd()],
        )
        .unwrap();
    let answer = other.answer().unwrap();
    assert_eq!((answer.id, unknown(&answer)), (9, Some(Unknown::BadQuestion)));
    assert!(other.ask(Subject::Pidfd, &me).is_ok());
    // Nothing at all, but with descriptors, is the end.
    let empty = service.asker();
    empty.send(&[], &[me.as_fd(), me.as_fd()]).unwrap();
    assert_eq!(empty.answer(), None);
    drop((asker, other, empty));
    back_to(&service, before);
    assert_eq!(service.stop()["bad_questions"], 12);
}

#[test]
fn client_that_does_not_read_is_disconnected() {
    let service = Service::start();
    let (me, before) = (me(), service.open_fds());
    let lazy = service.asker();
    setsockopt(&lazy.fd, sockopt::SendTimeout, &nix::sys::time::TimeVal::new(60, 0)).unwrap();
    let question = packet::encode(&Question::new(1, Subject::Pidfd));
    // Until the answers fill its queue, then its questions fill the service's, then the service has enough of it.
    let end = loop {
        if let Err(error) = lazy.send(&question, &[me.as_fd()]) {
            break error;
        }
        assert!(service.asker().ask(Subject::Pidfd, &me).is_ok(), "others are answered meanwhile");
    };
    assert!(matches!(end, Errno::EPIPE | Errno::ECONNRESET), "{end}");
    drop(lazy);
    back_to(&service, before);
    assert_eq!(service.stop()["too_slow"], 1);
}

#[test]
fn idle_client_is_disconnected() {
    let service = Service::start_with(&["--idle-seconds", "1"], |_| {});
    assert_eq!(service.asker().answer(), None);
    assert_eq!(service.stop()["too_slow"], 1);
}

#[test]
fn flooding_client_does_not_block_others() {
    // It raises the limit of this process, and counts against the one client that this process is.
    own_process(|| {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        if setrlimit(Resource::RLIMIT_NOFILE, hard.max(12_000), hard.max(12_000)).is_err() {
            eprintln!("skipped: not so many descriptors here ({soft})");
            return;
        }
        let service = Service::start();
        let before = service.open_fds();
        let mut asker = service.asker();
        assert!(asker.ask(Subject::Pidfd, &me()).is_ok());
        let many: Vec<Asker> = (0..10_000).map(|_| service.asker()).collect();
        // The last of them has been seen when it is refused.
        assert_eq!(many.last().unwrap().answer(), None);
        assert!(service.open_fds() <= before + CONNECTIONS_PER_CLIENT);
        assert!(asker.ask(Subject::Pidfd, &me()).is_ok(), "who is connected goes on");
        // Another process is another client.
        if is_root() {
            let mut other = Helper::start("asks", "", false);
            other.say(service.path().to_str().unwrap());
            assert_eq!(other.hear(), "identified");
        }
        drop((many, asker));
        back_to(&service, before);
        assert!(service.asker().ask(Subject::Pidfd, &me()).is_ok());
        assert_eq!(service.stop()["connections_refused"], 10_001 - CONNECTIONS_PER_CLIENT);
    });
}

#[expect(unsafe_code, reason = "prlimit of another process")]
fn limit_descriptors(pid: i32, soft: u64) -> u64 {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both limits live for the calls.
    let result = unsafe {
        let got = libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut old);
        let new = libc::rlimit { rlim_cur: soft, rlim_max: old.rlim_max };
        got | libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const new, std::ptr::null_mut())
    };
    assert_eq!(result, 0);
    old.rlim_cur
}

#[test]
fn exhausted_descriptors_are_logged_and_recovered_from() {
    let mut service = Service::start();
    let (me, before) = (me(), service.open_fds());
    let mut asker = service.asker();
    assert!(asker.ask(Subject::Pidfd, &me).is_ok());
    let other = service.asker();
    // No descriptor is left, neither for questions nor for connections.
    let enough = limit_descriptors(service.pid(), 0);
    assert_eq!(asker.ask(Subject::Pidfd, &me), Err(Unknown::Unavailable));
    assert_eq!(asker.ask_with(Subject::Pidfd, &[]), Err(Unknown::BadDescriptor));
    let waiting = service.asker();
    service.line("no free descriptor for another connection");
    limit_descriptors(service.pid(), enough);
    let mut waiting = waiting;
    assert!(waiting.ask(Subject::Pidfd, &me).is_ok(), "who waited is served");
    assert!(asker.ask(Subject::Pidfd, &me).is_ok());
    drop((asker, other, waiting));
    back_to(&service, before);
    assert!(service.stop()["exhausted"].as_u64().unwrap() >= 2);
}

#[test]
fn truncated_descriptors_are_closed() {
    let service = Service::start();
    let (me, before) = (me(), service.open_fds());
    let mut asker = service.asker();
    assert!(asker.ask(Subject::Pidfd, &me).is_ok());
    // Room for some of them: the kernel makes those and drops the rest (MSG_CTRUNC).
    let enough = limit_descriptors(service.pid(), service.open_fds() as u64 + 5);
    assert_eq!(asker.ask_with(Subject::Pidfd, &vec![me.as_fd(); 100]), Err(Unknown::BadDescriptor));
    assert_eq!(asker.answer(), None, "let go");
    drop(asker);
    back_to(&service, before);
    limit_descriptors(service.pid(), enough);
    assert!(service.asker().ask(Subject::Pidfd, &me).is_ok());
}

#[test]
fn pending_questions_are_answered_at_shutdown() {
    let mut service = Service::start();
    let mut asker = service.asker();
    let me = me();
    assert!(asker.ask(Subject::Pidfd, &me).is_ok());
    // Stopped, it cannot answer: the questions wait in its queue when SIGTERM comes.
    service.pause();
    for id in 10..15 {
        asker.send(&packet::encode(&Question::new(id, Subject::Pidfd)), &[me.as_fd()]).unwrap();
    }
    kill(Pid::from_raw(service.pid()), Signal::SIGTERM).unwrap();
    kill(Pid::from_raw(service.pid()), Signal::SIGCONT).unwrap();
    for id in 10..15 {
        let answer = asker.answer().expect("an answer");
        assert_eq!(answer.id, id);
        assert!(matches!(answer.result, Some(answer::Result::Peer(_))));
    }
    assert_eq!(asker.answer(), None);
    service.line("drained");
    let (status, _) = service.wait();
    assert_eq!(status.code(), Some(0));
}

#[test]
fn failed_start_has_reason_and_exit_status() {
    let run = |args: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_shmesh-plugin")).arg("identity").args(args).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "precious: yes").unwrap();
    let file = file.to_str().unwrap();
    let (code, log) = run(&["--socket", file]);
    assert!(code == 1 && log.contains("exists and is not a socket"), "{code} {log}");
    let (code, log) = run(&["--socket", "/nowhere/x", "--pods", file]);
    assert!(code == 64 && log.contains("is not a valid file of pods"), "{code} {log}");
    assert_eq!(run(&["--socket-mode", "rw"]).0, 2);
    assert_eq!(run(&["--log", "=/="]).0, 64);
    let service = Service::start();
    // Of one that was killed the name is left, and replaced.
    let path = service.path();
    kill(Pid::from_raw(service.pid()), Signal::SIGKILL).unwrap();
    let dir = service.wait_and_keep();
    assert!(path.exists());
    let again = Service::start_in(dir, &[], |_| {});
    assert!(again.asker().ask(Subject::Pidfd, &me()).is_ok());
}

/// One service takes all packets; each is answered or the connection ends, and nothing is kept.
#[test]
fn arbitrary_packets_are_survived() {
    let service = Service::start();
    let (me, before) = (me(), service.open_fds());
    let packets = prop_oneof![
        prop::collection::vec(any::<u8>(), 1..200),
        (any::<u32>(), any::<u64>(), any::<i32>(), any::<u64>()).prop_map(
            |(version, id, subject, latest_start)| {
                let (version, subject, latest_start) = (version % 3, subject % 4, latest_start % 2);
                packet::encode(&Question { version, id, subject, latest_start, bare_tgid: 1 })
            }
        ),
    ];
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let done = runner.run(&(packets, 0_usize..4), |(bytes, fds)| {
        let asker = service.asker();
        prop_assert!(asker.send(&bytes, &vec![me.as_fd(); fds]).is_ok());
        let _ = asker.answer();
        prop_assert!(service.asker().ask(Subject::Pidfd, &me).is_ok());
        Ok(())
    });
    done.unwrap();
    back_to(&service, before);
    service.stop();
}
