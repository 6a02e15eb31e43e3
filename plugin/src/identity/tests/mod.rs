//! Tests that need the inside of the service: a process that ends between two looks at it, and a new kernel that is asked as
//! an old one is.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, connect, listen, socket, socketpair,
};
use nix::unistd::Pid;
use shmesh_proto::identity::{PeerIdentity, Unknown};
use shmesh_sys::pidfd::{PeerPidfd, Pidfd};
use shmesh_sys::procfs::{Kernel, Proc, ProcFile};

use super::cgroup::CgroupRoots;
use super::pods::{NoPods, Pods};
use super::process::ProcessResolver;

/// A process that lives until its standard input is closed.
fn sleeper() -> Child {
    Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
}

fn pid(child: &Child) -> i32 {
    child.id().cast_signed()
}

fn pidfd(pid: i32) -> Pidfd {
    Pidfd::of_number(pid).unwrap()
}

fn resolver<P: Proc>(proc: P) -> ProcessResolver<P> {
    ProcessResolver { proc, roots: CgroupRoots::default() }
}

fn identify(pidfd: &Pidfd) -> Result<PeerIdentity, Unknown> {
    resolver(Kernel).identify(pidfd, 0, &NoPods)
}

/// Kills a process just before one of its files is read, and reads on in those of another process: as if its number had
/// been given away by then.
struct KillsBefore {
    file: ProcFile,
    victim: i32,
    successor: i32,
    killed: Cell<bool>,
}

impl Proc for KillsBefore {
    fn read(&self, tgid: i32, file: ProcFile) -> io::Result<String> {
        assert_eq!(tgid, self.victim);
        if file == self.file {
            kill_and_wait(self.victim);
            self.killed.set(true);
        }
        let tgid = if self.killed.get() { self.successor } else { tgid };
        Ok(Kernel
            .read(tgid, file)?
            .replace(&format!("Tgid:\t{}", self.successor), &format!("Tgid:\t{}", self.victim)))
    }
}

/// Ends a process and leaves it to be reaped by its parent, as it is when its pidfd first says so.
fn kill_and_wait(pid: i32) {
    let pidfd = Pidfd::of_number(pid).unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let mut polled = [nix::poll::PollFd::new(pidfd.as_fd(), nix::poll::PollFlags::POLLIN)];
    assert_eq!(nix::poll::poll(&mut polled, nix::poll::PollTimeout::NONE), Ok(1));
}

#[test]
fn exit_while_reading_proc_never_mixes_two_processes() {
    let mut successor = sleeper();
    for file in [ProcFile::Stat, ProcFile::Status, ProcFile::Cgroup] {
        let mut child = sleeper();
        let pidfd = pidfd(pid(&child));
        let proc =
            KillsBefore { file, victim: pid(&child), successor: pid(&successor), killed: Cell::new(false) };
        assert_eq!(resolver(proc).identify(&pidfd, 0, &NoPods), Err(Unknown::Gone), "{file:?}");
        child.wait().unwrap();
        assert_eq!(identify(&pidfd), Err(Unknown::Gone), "reaped");
    }
    successor.kill().unwrap();
    successor.wait().unwrap();
}

/// A source of pods that ends the process while it is asked.
#[derive(Debug)]
struct Kills(i32);

impl Pods for Kills {
    fn find(&self, _uid: Option<&str>, _container_id: &str) -> Option<shmesh_proto::identity::Pod> {
        kill_and_wait(self.0);
        None
    }
}

/// A `/proc` in which every process is in a pod.
struct InPod;

impl Proc for InPod {
    fn read(&self, tgid: i32, file: ProcFile) -> io::Result<String> {
        match file {
            ProcFile::Cgroup => Ok(format!("0::/kubepods/pod{}/{}\n", "a".repeat(32), "b".repeat(64))),
            other => Kernel.read(tgid, other),
        }
    }
}

#[test]
fn exit_after_reading_proc_yields_gone() {
    let mut child = sleeper();
    let pidfd = pidfd(pid(&child));
    let before = resolver(InPod).identify(&pidfd, 0, &NoPods).unwrap();
    assert_eq!(before.pod.unwrap().uid, "a".repeat(32));
    assert_eq!(resolver(InPod).identify(&pidfd, 0, &Kills(pid(&child))), Err(Unknown::Gone));
    child.wait().unwrap();
}

/// Numbers every process as a thread of process 1.
struct Thread;

impl Proc for Thread {
    fn read(&self, tgid: i32, file: ProcFile) -> io::Result<String> {
        Ok(Kernel.read(tgid, file)?.replace(&format!("Tgid:\t{tgid}\n"), "Tgid:\t1\n"))
    }
}

#[test]
fn thread_id_is_refused() {
    let me = pidfd(std::process::id().cast_signed());
    assert_eq!(resolver(Thread).identify(&me, 0, &NoPods), Err(Unknown::BadDescriptor));
}

/// A source of pods that says this of every container.
#[derive(Debug)]
struct Always(&'static str);

impl Pods for Always {
    fn find(&self, _uid: Option<&str>, _container_id: &str) -> Option<shmesh_proto::identity::Pod> {
        let uid = self.0.repeat(32);
        Some(shmesh_proto::identity::Pod { uid, name: "du-0".into(), confirmed: true, ..Default::default() })
    }
}

#[test]
fn cgroup_decides_the_pod_and_the_file_confirms() {
    let me = pidfd(std::process::id().cast_signed());
    let agreed = resolver(InPod).identify(&me, 0, &Always("a")).unwrap().pod.unwrap();
    assert!(agreed.confirmed && agreed.name == "du-0" && agreed.container_id == "b".repeat(64));
    let contradicted = resolver(InPod).identify(&me, 0, &Always("c")).unwrap().pod.unwrap();
    assert_eq!(
        (contradicted.uid, contradicted.name.as_str(), contradicted.confirmed),
        ("a".repeat(32), "", false)
    );
}

/// A listening socket in a directory of its own, and its address.
fn listening() -> (tempfile::TempDir, OwnedFd, UnixAddr) {
    let dir = tempfile::tempdir().unwrap();
    let address = UnixAddr::new(&dir.path().join("x")).unwrap();
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(fd.as_raw_fd(), &address).unwrap();
    listen(&fd, Backlog::new(8).unwrap()).unwrap();
    (dir, fd, address)
}

fn accepted() -> (tempfile::TempDir, OwnedFd, OwnedFd) {
    let (dir, listener, address) = listening();
    let client = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    connect(client.as_raw_fd(), &address).unwrap();
    (dir, socket_of(&listener), client)
}

fn socket_of(listener: &OwnedFd) -> OwnedFd {
    use std::os::fd::FromRawFd;
    let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC).unwrap();
    #[expect(unsafe_code, reason = "nix hands out a raw descriptor")]
    // SAFETY: the kernel has just made it for us.
    unsafe {
        OwnedFd::from_raw_fd(fd)
    }
}

#[test]
fn socket_identity_matches_without_peer_pidfd() {
    let (_dir, accepted, _client) = accepted();
    let [old, new] = [PeerPidfd::Old, PeerPidfd::Newest]
        .map(|how| identify(&Pidfd::of_peer(accepted.as_fd(), how).unwrap()).unwrap());
    assert_eq!(old, new);
    assert_eq!(old.bare_tgid, std::process::id().cast_signed());
}

#[test]
fn reused_pid_is_rejected_without_peer_pidfd() {
    let (_dir, accepted, _client) = accepted();
    let me = Pidfd::of_peer(accepted.as_fd(), PeerPidfd::Old).unwrap();
    let start_time = identify(&me).unwrap().start_time;
    let with = |latest| resolver(Kernel).identify(&me, latest, &NoPods);
    assert_eq!(with(start_time - 1), Err(Unknown::Gone));
    assert!(with(start_time).is_ok());
}

#[test]
fn unaccepted_socket_is_refused() {
    let (_dir, listener, _address) = listening();
    let never = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (datagrams, _other) =
        socketpair(AddressFamily::Unix, SockType::Datagram, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    for how in [PeerPidfd::Old, PeerPidfd::Newest] {
        for fd in [listener.as_fd(), never.as_fd(), tcp.as_fd(), datagrams.as_fd(), file.as_fd()] {
            assert_eq!(Pidfd::of_peer(fd, how).unwrap_err(), Unknown::BadDescriptor);
        }
    }
}
