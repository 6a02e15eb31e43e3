//! Peers: separate processes that execute orders of a test and that the test can kill at any moment.
//!
//! A peer is the test binary, started again to run one test only: `peer_process`, which the root of each binary with
//! peers defines with [`peer_process!`](crate::peer_process). It executes lines from its standard input and answers each
//! with one line, so a test reads like a script.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use crate::{HANGS, until};

/// Set in the environment of peers, so that `peer_process` does nothing when the harness runs it as a test.
const MARKER: &str = "SHMESH_TEST_PEER";

/// Defines the test that a peer runs. It executes orders with the given function, such as [`serve`](crate::serve).
#[macro_export]
macro_rules! peer_process {
    ($serve:expr) => {
        #[test]
        #[ignore = "the body of other processes"]
        fn peer_process() {
            if $crate::is_peer() {
                $serve();
            }
        }
    };
}

/// Whether this process was started as a [`Peer`].
pub fn is_peer() -> bool {
    std::env::var_os(MARKER).is_some()
}

/// A peer process, killed when dropped.
pub struct Peer {
    child: Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Peer {
    /// Starts a peer that works in `dir`.
    pub fn start(dir: &Path) -> Self {
        Self::start_by(Command::new(std::env::current_exe().expect("the path of this test")), dir)
    }

    /// Like `start`, in a pid namespace of its own, where it is process 1. Needs root.
    pub fn start_alone(dir: &Path) -> Self {
        let mut unshare = Command::new("unshare");
        unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        unshare.arg(std::env::current_exe().expect("the path of this test"));
        Self::start_by(unshare, dir)
    }

    /// Starts a peer by a command that runs this test program.
    pub fn start_by(mut command: Command, dir: &Path) -> Self {
        let mut child = command
            .args(["peer_process", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("SHMESH_DIR", dir)
            .env(MARKER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start a peer");
        let commands = child.stdin.take();
        let output = child.stdout.take().expect("piped");
        let (tell, answers) = mpsc::channel();
        std::thread::spawn(move || {
            // The test harness prints to the same output; our lines begin with '@', wherever in the line that is.
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some((_, answer)) = line.split_once('@')
                    && tell.send(answer.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        let peer = Self { child, commands, answers };
        assert_eq!(peer.answer(), "ready");
        peer
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends an order without waiting for the answer.
    #[track_caller]
    pub fn order(&mut self, line: &str) {
        let commands = self.commands.as_mut().expect("the peer lives");
        commands.write_all(format!("{line}\n").as_bytes()).expect("the peer lives");
    }

    /// The answer to the last order.
    #[track_caller]
    pub fn answer(&self) -> String {
        self.answers.recv_timeout(HANGS).expect("an answer of the peer")
    }

    /// The answer to the last order, if it has arrived.
    pub fn answered(&self) -> Option<String> {
        self.answers.try_recv().ok()
    }

    /// Sends an order and waits for the answer.
    #[track_caller]
    pub fn ask(&mut self, line: &str) -> String {
        self.order(line);
        self.answer()
    }

    /// Sends an order that must be answered with "ok".
    #[track_caller]
    pub fn tell(&mut self, line: &str) {
        assert_eq!(self.ask(line), "ok", "{line}");
    }

    /// Kills it, as in a crash.
    pub fn kill(mut self) {
        let pid = self.pid();
        // In a namespace of its own it is a child of `unshare`, and dies after it.
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        self.child.kill().expect("kill the peer");
        self.child.wait().expect("reap the peer");
        for child in children.split_whitespace() {
            // A peer that has changed its user does not die with its parent.
            let pid = nix::unistd::Pid::from_raw(child.parse().expect("a pid"));
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            let stat = PathBuf::from(format!("/proc/{child}/stat"));
            until("the peer has ended", || {
                let text = std::fs::read_to_string(&stat).unwrap_or_default();
                // Its main thread may end before the others, which have the descriptors, too.
                text.rsplit_once(") ").is_none_or(|(_, rest)| {
                    rest.starts_with(['Z', 'X']) && rest.split(' ').nth(17) == Some("1")
                })
            });
        }
    }

    /// Lets it return from `main`.
    pub fn exit(mut self) {
        drop(self.commands.take());
        let start = Instant::now();
        while self.child.try_wait().expect("look at the peer").is_none() {
            assert!(start.elapsed() < HANGS, "the peer does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops it by SIGSTOP, and waits until it has stopped.
    pub fn stop(&self) {
        self.signal(nix::sys::signal::Signal::SIGSTOP);
        until("the peer stops", || self.state() == Some('T'));
    }

    pub fn go_on(&self) {
        self.signal(nix::sys::signal::Signal::SIGCONT);
    }

    /// Sends it a signal; in a pid namespace of its own, not to the `unshare` that created it.
    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = self.pid();
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let inner = children.trim().parse().ok().filter(|_| comm.trim() == "unshare");
        let pid = nix::unistd::Pid::from_raw(inner.unwrap_or(pid.cast_signed()));
        nix::sys::signal::kill(pid, signal).expect("signal the peer");
    }

    /// The fields of `/proc/PID/stat` after the name, beginning with the state.
    fn stat(&self) -> Option<Vec<String>> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).ok()?;
        Some(stat.rsplit_once(") ")?.1.split(' ').map(str::to_owned).collect())
    }

    /// The state of its main thread.
    fn state(&self) -> Option<char> {
        self.stat()?.first()?.chars().next()
    }

    /// CPU time in hundredths of a second, in user and kernel mode.
    pub fn ticks(&self) -> u64 {
        let stat = self.stat().expect("the peer lives");
        stat[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("ticks")).sum()
    }

    /// Waits until the thread that executes orders sleeps in `poll`.
    pub fn until_asleep(&self) {
        let numbers = [
            libc::SYS_futex,
            libc::SYS_ppoll,
            // The system call of a wait that was interrupted by a signal.
            libc::SYS_restart_syscall,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll,
        ];
        self.until_in(&numbers);
    }

    /// Waits until the thread that executes orders is in one of these system calls.
    pub fn until_in(&self, numbers: &[i64]) {
        let tasks = PathBuf::from(format!("/proc/{}/task", self.pid()));
        let text = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        until("the peer is in the system call", || {
            let threads = std::fs::read_dir(&tasks).expect("the peer lives");
            let mut threads = threads.map_while(Result::ok).map(|thread| thread.path());
            let obeys = threads.find(|thread| text(thread.join("comm")).trim() == "peer_process");
            let call = text(obeys.expect("the thread of the test").join("syscall"));
            let number = call.split(' ').next().and_then(|number| number.parse().ok());
            number.is_some_and(|number| numbers.contains(&number))
        });
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// As [`serve`], for peers with other orders.
pub fn serve_by(mut obey: impl FnMut(&str) -> String) {
    // A failing test kills its peers, whatever they wait for.
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).expect("end with the test");
    say("ready");
    for line in std::io::stdin().lines().map_while(Result::ok) {
        say(&obey(&line));
    }
}

fn say(answer: &str) {
    let mut out = std::io::stdout().lock();
    // Written in one piece, whatever else the process prints.
    let _ = out.write_all(format!("@{answer}\n").as_bytes());
    let _ = out.flush();
}
