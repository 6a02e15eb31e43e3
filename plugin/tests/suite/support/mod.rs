//! A service as a process, clients in namespaces, and what they say to each other.

use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::CloneFlags;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    self as nix_socket, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, recv, sendmsg,
};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use shmesh_proto::identity::{Answer, PeerIdentity, Question, Subject, Unknown, answer};
use shmesh_proto::packet;
use shmesh_sys::socket;

pub(crate) use shmesh_testing::is_root;

pub(crate) fn seqpacket() -> OwnedFd {
    nix_socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap()
}

/// Unlike the product, waits as long as it takes.
pub(crate) fn connect_to(path: &Path) -> OwnedFd {
    let fd = seqpacket();
    nix_socket::connect(fd.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
    fd
}

pub(crate) fn listen_on(path: &Path) -> OwnedFd {
    socket::listen_on(path, 0o600).unwrap()
}

pub(crate) fn accept(listener: &OwnedFd) -> OwnedFd {
    socket::accept(listener).unwrap()
}

pub(crate) fn peer_pidfd(connection: &OwnedFd) -> OwnedFd {
    socket::peer_pidfd(connection).unwrap()
}

#[expect(unsafe_code, reason = "pidfd_open")]
pub(crate) fn pidfd_open(pid: i32, flags: u32) -> nix::Result<OwnedFd> {
    // SAFETY: two numbers.
    let fd = nix::errno::Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) })?;
    // SAFETY: the kernel has just made it.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap()) })
}

/// Waits until the process has ended.
pub(crate) fn wait_for_end(pidfd: BorrowedFd<'_>) {
    let mut polled = [PollFd::new(pidfd, PollFlags::POLLIN)];
    assert_eq!(poll(&mut polled, PollTimeout::from(60_000_u16)), Ok(1), "it did not end");
}

/// A connection to the service.
pub(crate) struct Asker {
    pub(crate) fd: OwnedFd,
    next: u64,
}

impl Asker {
    pub(crate) fn new(path: &Path) -> Self {
        Self { fd: connect_to(path), next: 1 }
    }

    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> nix::Result<()> {
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control: &[_] = if raw.is_empty() { &[] } else { &rights };
        let flags = MsgFlags::MSG_NOSIGNAL;
        sendmsg::<UnixAddr>(self.fd.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None).map(drop)
    }

    /// The next answer; none when the service has let go.
    pub(crate) fn answer(&self) -> Option<Answer> {
        let mut polled = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut polled, PollTimeout::from(60_000_u16)), Ok(1), "no answer");
        let mut bytes = [0; 8192];
        match recv(self.fd.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
            Ok(0) | Err(nix::errno::Errno::ECONNRESET) => None,
            Ok(len) => Some(packet::decode(&bytes[..len]).unwrap()),
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) fn ask_with(
        &mut self,
        subject: Subject,
        fds: &[BorrowedFd<'_>],
    ) -> Result<PeerIdentity, Unknown> {
        self.put(Question::new(self.next, subject), fds)
    }

    /// Asks who has a number.
    pub(crate) fn ask_about(&mut self, tgid: i32) -> Result<PeerIdentity, Unknown> {
        self.put(Question::about(self.next, tgid), &[])
    }

    fn put(&mut self, question: Question, fds: &[BorrowedFd<'_>]) -> Result<PeerIdentity, Unknown> {
        let id = question.id;
        self.next += 1;
        self.send(&packet::encode(&question), fds).unwrap();
        let answer = self.answer().expect("let go instead of answered");
        assert_eq!(answer.id, id);
        match answer.result.unwrap() {
            answer::Result::Peer(peer) => Ok(peer),
            answer::Result::Unknown(unknown) => Err(Unknown::try_from(unknown).unwrap()),
        }
    }

    pub(crate) fn ask(&mut self, subject: Subject, fd: &OwnedFd) -> Result<PeerIdentity, Unknown> {
        self.ask_with(subject, &[fd.as_fd()])
    }
}

/// A running process of `shmesh-plugin identity`.
pub(crate) struct Service {
    pub(crate) child: Child,
    dir: Option<tempfile::TempDir>,
    log: BufReader<std::process::ChildStderr>,
}

impl Service {
    pub(crate) fn start() -> Self {
        Self::start_with(&[], |_| {})
    }

    pub(crate) fn start_with(args: &[&str], prepare: impl FnOnce(&mut Command)) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), args, prepare)
    }

    pub(crate) fn start_in(
        dir: tempfile::TempDir,
        args: &[&str],
        prepare: impl FnOnce(&mut Command),
    ) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"));
        command.args(["identity", "--socket"]).arg(dir.path().join("agent.sock")).args(args);
        command.env("SHMESH_LOG", "info").stderr(Stdio::piped());
        prepare(&mut command);
        let mut child = command.spawn().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        let mut service = Self { child, dir: Some(dir), log };
        service.line("listening");
        service
    }

    /// The next line of the log with this message.
    pub(crate) fn line(&mut self, message: &str) -> serde_json::Value {
        let mut seen = String::new();
        loop {
            let start = seen.len();
            assert!(self.log.read_line(&mut seen).unwrap() > 0, "no line {message:?} in:\n{seen}");
            let line: serde_json::Value = serde_json::from_str(&seen[start..]).expect(&seen[start..]);
            if line["message"] == message {
                return line;
            }
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.as_ref().unwrap().path().join("agent.sock")
    }

    pub(crate) fn asker(&self) -> Asker {
        Asker::new(&self.path())
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Descriptors that the service has now.
    pub(crate) fn open_fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    /// Stops it, and returns when it has stopped.
    pub(crate) fn pause(&self) {
        let pid = Pid::from_raw(self.pid());
        kill(pid, Signal::SIGSTOP).unwrap();
        let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert_eq!(stopped, WaitStatus::Stopped(pid, Signal::SIGSTOP));
    }

    /// Ends it in order; the counters of its last line.
    pub(crate) fn stop(mut self) -> serde_json::Value {
        kill(Pid::from_raw(self.pid()), Signal::SIGTERM).unwrap();
        let counters = self.line("drained");
        assert!(self.child.wait().unwrap().success());
        assert!(!self.path().exists(), "the socket's name stays");
        counters
    }

    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap(), rest)
    }
}

impl Service {
    /// Waits for the end of one that was killed, and keeps what it leaves.
    pub(crate) fn wait_and_keep(mut self) -> tempfile::TempDir {
        self.child.wait().unwrap();
        self.dir.take().unwrap()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client in a process of its own, by the role `asks`.
pub(crate) fn asks() {
    tell("ready");
    let path = told().unwrap();
    let mut asker = Asker::new(path.as_ref());
    asker.ask(Subject::Pidfd, &me()).unwrap();
    tell("identified");
}

/// The task of a helper, which is this test's own executable once more.
pub(crate) const ROLE: &str = "SHMESH_TEST_ROLE";
/// Something that only one helper has in its environment.
pub(crate) const TOKEN: &str = "SHMESH_TEST_TOKEN";

/// Another process of this test, spoken to line by line. It ends when its input does.
pub(crate) struct Helper {
    pub(crate) child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Helper {
    /// Starts `role` with a token; `nested` in new pid and cgroup namespaces of its own, as process 1.
    pub(crate) fn start(role: &str, token: &str, nested: bool) -> Self {
        Self::start_prepared(role, token, nested, |_| {})
    }

    pub(crate) fn start_prepared(
        role: &str,
        token: &str,
        nested: bool,
        prepare: impl FnOnce(&mut Command),
    ) -> Self {
        let mut command = this_helper();
        command.env(ROLE, role);
        if nested {
            as_process_1(&mut command);
        }
        command.env(TOKEN, token).stdin(Stdio::piped()).stdout(Stdio::piped());
        prepare(&mut command);
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut helper = Self { child, input, output };
        assert_eq!(helper.hear(), "ready");
        helper
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// The next word that it says; what the test harness prints is passed over.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the helper has ended");
            if let Some((_, word)) = line.trim_end().rsplit_once("@@") {
                return word.to_owned();
            }
        }
    }

    pub(crate) fn end(mut self) {
        drop(self.input.take());
        self.child.wait().unwrap();
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// This test's executable, to run only the helper in it.
fn this_helper() -> Command {
    let mut command = shmesh_testing::this_test();
    command.args(["--exact", "helper", "--nocapture", "--test-threads=1"]);
    command
}

/// The command begins in new namespaces (its children, for a pid namespace).
#[expect(unsafe_code, reason = "pre_exec")]
pub(crate) fn in_namespaces(command: &mut Command, flags: CloneFlags) {
    // SAFETY: unshare is a system call and allocates nothing.
    unsafe { command.pre_exec(move || Ok(nix::sched::unshare(flags)?)) };
}

/// The command begins as process 1 of a new pid namespace. A process is never moved to another one, only its children are:
/// so there is one more process in between, which waits.
#[expect(unsafe_code, reason = "pre_exec, fork")]
pub(crate) fn as_process_1(command: &mut Command) {
    let begin = || {
        nix::sched::unshare(CloneFlags::CLONE_NEWPID)?;
        // SAFETY: between fork and exec there are only system calls here.
        let child = nix::errno::Errno::result(unsafe { libc::fork() })?;
        if child == 0 {
            return Ok(());
        }
        // SAFETY: numbers only. What the parent waits to be closed must be closed here too, and nothing is run any more.
        unsafe {
            libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0);
            libc::waitpid(child, std::ptr::null_mut(), 0);
            libc::_exit(0)
        }
    };
    // SAFETY: as above.
    unsafe { command.pre_exec(begin) };
}

/// Sends a word to the parent of this helper.
pub(crate) fn tell(word: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "@@{word}").unwrap();
    out.flush().unwrap();
}

/// Returns the next word of the helper's parent, or `None` at the end.
pub(crate) fn told() -> Option<String> {
    let mut line = String::new();
    (std::io::stdin().read_line(&mut line).unwrap() > 0).then(|| line.trim_end().to_owned())
}

/// The token in the environment of a process, as the kernel keeps it: which helper it really is.
pub(crate) fn token_of(pid: i32) -> String {
    let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    let text = String::from_utf8_lossy(&environ).into_owned();
    let found = text.split('\0').find_map(|variable| variable.strip_prefix(TOKEN)?.strip_prefix('='));
    found.unwrap_or_default().to_owned()
}

/// Field 22 of `stat`.
pub(crate) fn start_time_of(pid: i32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap()
}

/// A pidfd of this process.
pub(crate) fn me() -> OwnedFd {
    pidfd_open(std::process::id().cast_signed(), 0).unwrap()
}

/// Returns the reason in an answer without identity.
pub(crate) fn unknown(answer: &Answer) -> Option<Unknown> {
    match answer.result {
        Some(answer::Result::Unknown(unknown)) => Unknown::try_from(unknown).ok(),
        _ => None,
    }
}

/// Waits until the service has no more descriptors than before: closing is over a moment after the answer.
pub(crate) fn back_to(service: &Service, before: usize) {
    shmesh_testing::until("the service has closed all", || service.open_fds() <= before);
}
