//! A running sidecar, for tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SIDECAR: &str = env!("CARGO_BIN_EXE_shmesh-sidecar");

pub(crate) struct Sidecar {
    child: Child,
    admin: String,
}

impl Sidecar {
    /// Starts one with a link named `link` of the size that peers make theirs, and waits until it is ready.
    pub(crate) fn start(dir: &Path, changes: &str) -> Self {
        Self::start_with(dir, changes, &[])
    }

    pub(crate) fn start_with(dir: &Path, changes: &str, flags: &[&str]) -> Self {
        Self::start_by(Command::new(SIDECAR), dir, changes, flags)
    }

    /// In a pid namespace of its own: it sees none of those who connect. Takes root.
    pub(crate) fn start_alone(dir: &Path, flags: &[&str]) -> Self {
        let mut unshare = Command::new("unshare");
        unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc", SIDECAR]);
        Self::start_by(unshare, dir, "mpmc", flags)
    }

    /// With so few descriptors at most.
    pub(crate) fn start_with_limit(dir: &Path, changes: &str, descriptors: u32, flags: &[&str]) -> Self {
        let mut limited = Command::new("sh");
        limited.args(["-c", &format!("ulimit -n {descriptors} && exec \"$0\" \"$@\""), SIDECAR]);
        Self::start_by(limited, dir, changes, flags)
    }

    /// With a command that ends in the program.
    pub(crate) fn start_by(mut command: Command, dir: &Path, changes: &str, flags: &[&str]) -> Self {
        let path = dir.join("links.yaml");
        let mode = if changes.contains("spsc") { "spsc" } else { "mpmc" };
        let backing = if changes.contains("memfd") { "memfd" } else { "named" };
        let notify = !changes.contains("notify=off");
        let file_mode = if changes.contains("0660") { "0660" } else { "0600" };
        let on_device = if changes.contains("cuda") {
            "    cuda_data: { buf_size_bytes: 64, pool_len: 4 }\n"
        } else {
            ""
        };
        let yaml = format!(
            "- name: link\n  ring: {{ len: 16, mode: {mode} }}\n  backing: {backing}\n  \
             memory: {{ file_mode: \"{file_mode}\" }}\n  notify: {{ enabled: {notify}, spin_us: 0 }}\n  pools:\n    \
             cpu_msg: {{ buf_size_bytes: 256, pool_len: 32 }}\n    cpu_data: {{ buf_size_bytes: 4096, pool_len: 16 }}\n{on_device}"
        );
        std::fs::write(&path, yaml).unwrap();
        let mut child = command
            .args([
                "--annotation",
                path.to_str().unwrap(),
                "--dir",
                dir.to_str().unwrap(),
                "--any-file-system",
            ])
            .args(["--admin", "127.0.0.1:0", "--log-format", "json"])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let (mut admin, mut is_ready) = (String::new(), false);
        for line in log.by_ref() {
            let said: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"));
            match said["message"].as_str() {
                Some("probes and metrics") => said["address"].as_str().unwrap().clone_into(&mut admin),
                Some("ready") => {
                    is_ready = true;
                    break;
                }
                _ => {}
            }
        }
        assert!(is_ready, "it became ready");
        // Nobody reads the rest; but it must not block on a full pipe.
        std::thread::spawn(move || log.for_each(drop));
        Self { child, admin }
    }

    pub(crate) fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.admin).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// One number of `/metrics`, 0 when it is not there.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let metrics = self.get("/metrics");
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or(0)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How many descriptors it has.
    pub(crate) fn fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// Ends it as a node does.
    pub(crate) fn stop(mut self) {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM).unwrap();
        assert!(self.child.wait().unwrap().success(), "it drains, and says that all is well");
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The lines of an audit log of this operation that name this reason; an empty reason: those that were done.
pub(crate) fn audited(log: &Path, op: &str, reason: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(log).unwrap();
    // The last line may be half written.
    let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let records = lines.map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")));
    records
        .filter(|record: &serde_json::Value| {
            record["op"] == op && record["reason"].as_str().unwrap_or_default() == reason
        })
        .collect()
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
