//! Worker processes that are killed at random instants: what the kill tests share.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use shmesh::{Error, Link};

/// The longest time without progress of a process. What is waited for inside of it has less time, so that its error comes first.
pub(crate) const STALL: Duration = Duration::from_secs(90);

pub(crate) fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The seed of a run: `SHMESH_KILL_SEED`, or the time.
pub(crate) fn seed() -> u64 {
    let now = std::time::UNIX_EPOCH.elapsed().expect("a time").as_micros();
    from_env("SHMESH_KILL_SEED").unwrap_or(u64::try_from(now % 1_000_000_007).expect("small"))
}

pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("shmesh-kill-").tempdir_in("/dev/shm").expect("a directory")
}

/// In a worker: the numbers and the directory with which it was started. It does not outlive the test.
pub(crate) fn started_with<const N: usize>(arguments: &str) -> ([u64; N], PathBuf) {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("prctl");
    let mut parts = arguments.splitn(N + 1, ' ');
    let numbers = std::array::from_fn(|_| parts.next().and_then(|part| part.parse().ok()).expect("a number"));
    (numbers, PathBuf::from(parts.next().expect("a directory")))
}

/// Attaches, again and again while the other side or a host is being replaced; calls `retried` before each further try.
pub(crate) fn attached(attach: impl Fn() -> Result<Link, Error>, retried: impl Fn()) -> Result<Link, Error> {
    let deadline = Instant::now() + STALL / 2;
    loop {
        match attach() {
            Err(error) if error.is_retryable() && Instant::now() < deadline => {
                retried();
                std::thread::sleep(Duration::from_millis(1));
            }
            attached => return attached,
        }
    }
}

/// A monitor may be at work just now, in a seat of its own.
pub(crate) fn until_participants(link: &Link, count: usize) {
    let deadline = Instant::now() + STALL;
    while link.participants().count() != count {
        assert!(Instant::now() < deadline, "seats leaked: {:?}", link.participants().collect::<Vec<_>>());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The processes that run, by number.
pub(crate) struct Workers {
    children: Vec<Option<Child>>,
    /// The last sign of progress of each, and when it came.
    progress: Vec<(u64, Instant)>,
    /// Processes that `SIGKILL` has ended.
    pub(crate) killed: u64,
}

impl Workers {
    pub(crate) fn new(count: usize) -> Self {
        Self {
            children: (0..count).map(|_| None).collect(),
            progress: vec![(0, Instant::now()); count],
            killed: 0,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.children.len()
    }

    /// Starts this program again, with the arguments in this variable.
    pub(crate) fn spawn(&mut self, worker: usize, variable: &str, arguments: String) {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        self.children[worker] = Some(command.env(variable, arguments).spawn().expect("start a worker"));
        self.progress[worker].1 = Instant::now();
    }

    /// `false`: it does not run.
    pub(crate) fn kill(&mut self, worker: usize) -> bool {
        let Some(mut child) = self.children[worker].take() else { return false };
        child.kill().expect("kill");
        let status = child.wait().expect("wait");
        let killed = Some(Signal::SIGKILL as i32);
        assert_eq!(status.signal(), killed, "worker {worker} ended by itself: {status}");
        self.killed += 1;
        true
    }

    /// Every process that runs makes progress, which is a number that changes.
    pub(crate) fn watch(&mut self, progress: impl Fn(usize) -> u64) {
        for (worker, child) in self.children.iter_mut().enumerate() {
            let Some(child) = child else { continue };
            let (now, (seen, since)) = (progress(worker), &mut self.progress[worker]);
            if now != *seen {
                (*seen, *since) = (now, Instant::now());
            }
            if let Some(status) = child.try_wait().expect("wait") {
                panic!("worker {worker} ended by itself: {status}");
            }
            assert!(since.elapsed() < STALL, "worker {worker}, process {}, stalls", child.id());
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
