//! Programs of the workspace, for tests.

pub(crate) mod container;
pub(crate) mod machine;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A program of the workspace, beside this test.
pub(crate) fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().and_then(Path::parent).unwrap().join(name);
    assert!(path.exists(), "{} is not built: run `cargo build --workspace` first", path.display());
    path
}

/// A daemon that has said in its log that it is there.
pub(crate) struct Daemon(Child);

impl Daemon {
    pub(crate) fn start(mut command: Command, there: &'static str) -> Self {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        assert!(log.any(|line| line.contains(there)), "{there}");
        std::thread::spawn(move || log.for_each(drop));
        Self(child)
    }

    /// The identity service, in this pid namespace.
    pub(crate) fn identity(socket: &Path) -> Self {
        let mut command = Command::new(program("shmesh-plugin"));
        command.args(["identity", "--socket", socket.to_str().unwrap()]);
        Self::start(command, "\"listening\"")
    }

    /// A sidecar, in one of its own.
    pub(crate) fn sidecar(dir: &Path, socket: &Path, flags: &[&str]) -> Self {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(program("shmesh-sidecar"));
        command.args(["--link", "link", "--any-file-system", "--log-format", "json"]);
        command.args(["--dir", dir.to_str().unwrap(), "--identity", socket.to_str().unwrap()]);
        command.args(flags);
        Self::start(command, "\"ready\"")
    }
}

impl Daemon {
    /// The process that `unshare` has started.
    pub(crate) fn child(&self) -> String {
        child_of(self.0.id())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The process that a peer started by `unshare` really is.
pub(crate) fn child_of(pid: u32) -> String {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_whitespace().next().unwrap().to_owned()
}
