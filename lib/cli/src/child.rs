//! Child processes of the demo and the benchmarks, and their clean-up at the end, also after Ctrl-C.

use std::fmt::Debug;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use shmesh::config::LinkName;
use shmesh::inspect::Remains;
use shmesh_sys::process;
use shmesh_sys::signal::{Awaited, Signal};

/// Exit status of an interrupted command, as in shells.
const INTERRUPTED: i32 = 130;

/// The processes to end and the files to remove.
#[derive(Debug, Default)]
struct Duties {
    children: Vec<u32>,
    links: Vec<(PathBuf, LinkName)>,
    dirs: Vec<PathBuf>,
}

impl Duties {
    fn do_all(&mut self) {
        for pid in self.children.drain(..) {
            // Not reaped yet, so the process id is still theirs.
            let _ = process::kill(pid);
            let _ = process::reap(pid);
        }
        for (dir, link) in self.links.drain(..) {
            if let Ok(remains) = Remains::of(&dir, &link) {
                let _ = remains.remove();
            }
        }
        for dir in self.dirs.drain(..) {
            let _ = std::fs::remove_dir_all(dir);
        }
    }
}

/// A run with child processes. Dropping or interrupting it ends them and removes its links and directories.
#[derive(Debug)]
pub(crate) struct ProcessGroup {
    duties: Arc<Mutex<Duties>>,
}

fn locked(duties: &Mutex<Duties>) -> MutexGuard<'_, Duties> {
    duties.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProcessGroup {
    /// Begins a run. Call this before other threads exist: signals must be blocked in all of them.
    pub(crate) fn begin() -> Result<Self> {
        let duties = Arc::new(Mutex::new(Duties::default()));
        let signals = Awaited::block(&[Signal::Interrupt, Signal::Terminate, Signal::HangUp])
            .context("cannot block signals")?;
        let shared = Arc::clone(&duties);
        let wait = move || {
            if signals.wait().is_ok() {
                // Held until the end, so that no further process is started.
                let mut duties = locked(&shared);
                duties.do_all();
                std::process::exit(INTERRUPTED);
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(wait).context("cannot start a thread")?;
        Ok(Self { duties })
    }

    /// Removes a link at the end.
    pub(crate) fn owns_link(&self, dir: &Path, link: &LinkName) {
        locked(&self.duties).links.push((dir.to_owned(), link.clone()));
    }

    /// Keeps the links at the end.
    pub(crate) fn keeps_links(&self) {
        locked(&self.duties).links.clear();
    }

    /// Creates a directory that is removed at the end.
    pub(crate) fn make_dir(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir(dir).with_context(|| format!("cannot make the directory {}", dir.display()))?;
        locked(&self.duties).dirs.push(dir.to_owned());
        Ok(())
    }

    /// Starts this program as `subcommand` with `spec`; `stdin` is its standard input.
    pub(crate) fn spawn(&self, subcommand: &str, spec: &impl Serialize, stdin: Stdio) -> Result<Child> {
        self.start(Command::new(this_program()?), subcommand, spec, stdin)
    }

    /// As [`spawn`](Self::spawn), in namespaces of its own: like a container, without its root directory and user.
    pub(crate) fn spawn_apart(&self, subcommand: &str, spec: &impl Serialize, stdin: Stdio) -> Result<Child> {
        let mut command = Command::new("unshare");
        // Its children end with it, whatever the reason.
        command.args([
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--mount",
            "--ipc",
            "--net",
            "--uts",
            "--cgroup",
        ]);
        command.arg("--").arg(this_program()?);
        self.start(command, subcommand, spec, stdin)
    }

    fn start(
        &self,
        mut command: Command,
        subcommand: &str,
        spec: &impl Serialize,
        stdin: Stdio,
    ) -> Result<Child> {
        command.arg(subcommand).arg(serde_json::to_string(spec)?).stdin(stdin).stdout(Stdio::piped());
        let mut duties = locked(&self.duties);
        let mut child = command.spawn().context("cannot start a process")?;
        let pid = child.id();
        duties.children.push(pid);
        let stdout = child.stdout.take().context("a child process has no standard output")?;
        Ok(Child { pid, lines: lines_of(stdout)?, duties: Arc::clone(&self.duties), ended: false })
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        locked(&self.duties).do_all();
    }
}

fn this_program() -> Result<PathBuf> {
    std::env::current_exe().context("cannot determine the path of this program")
}

fn lines_of(stdout: ChildStdout) -> Result<Receiver<String>> {
    let (sender, receiver) = channel();
    let read = move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("child".into()).spawn(read).context("cannot start a thread")?;
    Ok(receiver)
}

/// A child process. It reports results as lines of JSON on standard output; its errors go to our standard error.
#[derive(Debug)]
pub(crate) struct Child {
    pid: u32,
    lines: Receiver<String>,
    duties: Arc<Mutex<Duties>>,
    ended: bool,
}

impl Child {
    /// The process id of the child.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// The next result, waiting until `deadline`; calls `tick` meanwhile.
    pub(crate) fn says<T: DeserializeOwned>(&self, deadline: Instant, mut tick: impl FnMut()) -> Result<T> {
        loop {
            match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => {
                    return serde_json::from_str(&line)
                        .with_context(|| format!("a child process printed {line:?}, which is not a result"));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(anyhow!("process {} ended early; its message is above", self.pid));
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                    bail!("process {} did not report in time: is the machine overloaded?", self.pid);
                }
                Err(RecvTimeoutError::Timeout) => tick(),
            }
        }
    }

    /// Stops it by SIGSTOP, and waits until it has stopped.
    pub(crate) fn stop(&self) -> Result<()> {
        process::stop(self.pid).context("cannot stop a process")
    }

    /// Kills it by SIGKILL, at whatever instruction it is.
    pub(crate) fn kill(&mut self) {
        let _ = process::kill(self.pid);
        self.reap();
    }

    /// Waits until it has exited by itself.
    pub(crate) fn join(mut self, deadline: Instant) -> Result<()> {
        // Its output closes when it ends.
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Disconnected) => {}
            _ => bail!("process {} did not exit in time", self.pid),
        }
        match self.reap() {
            Some(true) => Ok(()),
            _ => bail!("process {} failed; its message is above", self.pid),
        }
    }

    /// Whether it exited successfully; `None` if that is unknown.
    fn reap(&mut self) -> Option<bool> {
        let mut duties = locked(&self.duties);
        self.ended = true;
        duties.children.retain(|&pid| pid != self.pid);
        process::reap(self.pid).ok()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.ended {
            self.kill();
        }
    }
}

/// Makes a process of [`ProcessGroup::spawn`] end with its parent. For the child.
pub(crate) fn die_with_parent() -> Result<()> {
    process::die_with_parent().context("cannot make this process end with its parent")
}

/// Reports a result to the parent. For the child.
pub(crate) fn say(what: &(impl Serialize + Debug)) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    writeln!(out)?;
    Ok(out.flush()?)
}
