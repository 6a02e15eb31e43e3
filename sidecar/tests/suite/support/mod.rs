//! A sidecar process for tests.

pub(crate) mod attacker;
pub(crate) mod client;

use std::io::{BufRead, BufReader};
use std::ops::Not;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

const SIDECAR: &str = env!("CARGO_BIN_EXE_shmesh-sidecar");

/// By default, a restarted sidecar does not wait for earlier exporters.
const NO_RESTORE: [&str; 2] = ["--restore-seconds", "0"];

pub(crate) struct Sidecar {
    child: Child,
    admin: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl Sidecar {
    /// Starts a sidecar with a link named `link` of the peers' size, and waits until it is ready.
    pub(crate) fn start(dir: &Path, changes: &str) -> Self {
        Self::start_with(dir, changes, &[])
    }

    pub(crate) fn start_with(dir: &Path, changes: &str, flags: &[&str]) -> Self {
        Self::start_by(Command::new(SIDECAR), dir, changes, flags)
    }

    /// Starts it in a pid namespace of its own, where it sees no client. Requires root.
    pub(crate) fn start_alone(dir: &Path, flags: &[&str]) -> Self {
        let mut unshare = Command::new("unshare");
        unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc", SIDECAR]);
        Self::start_by(unshare, dir, "mpmc", flags)
    }

    /// Starts it with a limit on descriptors.
    pub(crate) fn start_with_limit(dir: &Path, changes: &str, descriptors: u32, flags: &[&str]) -> Self {
        let mut limited = Command::new("sh");
        limited.args(["-c", &format!("ulimit -n {descriptors} && exec \"$0\" \"$@\""), SIDECAR]);
        Self::start_by(limited, dir, changes, flags)
    }

    /// Starts it with these links, without waiting until they are ready.
    pub(crate) fn start_links(dir: &Path, names: &[&str]) -> Self {
        let link = |name: &&str| {
            format!(
                "- name: {name}\n  ring: {{ len: 16 }}\n  memory: {{ file_mode: \"0660\" }}\n  notify: {{ spin_us: 0 }}\n  pools:\n    \
                 cpu_msg: {{ buf_size_bytes: 256, pool_len: 32 }}\n    cpu_data: {{ buf_size_bytes: 4096, pool_len: 16 }}\n"
            )
        };
        Self::start_yaml(dir, &names.iter().map(link).collect::<String>())
    }

    pub(crate) fn start_yaml(dir: &Path, yaml: &str) -> Self {
        Self::start_until("serving probes and metrics", Command::new(SIDECAR), dir, yaml, &[])
    }

    /// Starts it by a command that ends in the sidecar's program.
    pub(crate) fn start_by(command: Command, dir: &Path, changes: &str, flags: &[&str]) -> Self {
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
        Self::start_until("ready", command, dir, &yaml, flags)
    }

    /// Waits until it logs this message.
    fn start_until(awaited: &str, mut command: Command, dir: &Path, yaml: &str, flags: &[&str]) -> Self {
        let path = dir.join("links.yaml");
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
            .args(flags.contains(&"--restore-seconds").not().then_some(NO_RESTORE).into_iter().flatten())
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let (mut admin, mut is_there) = (String::new(), false);
        for line in lines.by_ref() {
            let said: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"));
            if said["message"] == "serving probes and metrics" {
                said["address"].as_str().unwrap().clone_into(&mut admin);
            }
            is_there = said["message"] == awaited;
            if is_there {
                break;
            }
        }
        assert!(is_there, "it has not logged {awaited:?}");
        let log = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&log);
        // It must not block on a full pipe.
        std::thread::spawn(move || lines.for_each(|line| kept.lock().unwrap().push(line)));
        Self { child, admin, log }
    }

    /// Whether it has logged a line with all these parts since it was ready.
    pub(crate) fn has_logged(&self, parts: &[&str]) -> bool {
        self.log.lock().unwrap().iter().any(|line| parts.iter().all(|part| line.contains(part)))
    }

    pub(crate) fn lives(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn get(&self, path: &str) -> String {
        shmesh_testing::http_get(&self.admin, path).unwrap()
    }

    /// Runs the hook of an injected sidecar, with the environment of its container.
    pub(crate) fn await_start(&self, seconds: u64) -> Output {
        Command::new(SIDECAR)
            .args(["await-start", "--seconds", &seconds.to_string()])
            .env("SHMESH_ADMIN", &self.admin)
            .envs([("SHMESH_ANNOTATION", "/run/shmesh/podinfo/links"), ("SHMESH_DIR", "/dev/shm")])
            .output()
            .unwrap()
    }

    /// One number of `/metrics`, or 0 if it is missing.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        shmesh_testing::metric(&self.get("/metrics"), name).unwrap_or(0)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Stops it, and returns when it has stopped.
    pub(crate) fn pause(&self) {
        let pid = Pid::from_raw(self.pid().cast_signed());
        kill(pid, Signal::SIGSTOP).unwrap();
        let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert_eq!(stopped, WaitStatus::Stopped(pid, Signal::SIGSTOP));
    }

    /// Continues it after [`Sidecar::pause`].
    pub(crate) fn go_on(&self) {
        kill(Pid::from_raw(self.pid().cast_signed()), Signal::SIGCONT).unwrap();
    }

    /// Number of its open descriptors.
    pub(crate) fn fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// Ends it by SIGTERM, as a node does.
    pub(crate) fn stop(mut self) {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM).unwrap();
        assert!(self.child.wait().unwrap().success(), "it drains, and says that all is well");
    }

    /// Kills it, and starts another one with these links.
    pub(crate) fn restart(&mut self, dir: &Path, names: &[&str]) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        *self = Self::start_links(dir, names);
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The records of an audit log with this operation and reason. An empty reason means success.
pub(crate) fn audited(log: &Path, op: &str, reason: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(log).unwrap();
    // The last line may be incomplete.
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
