//! The scripts of the tool's pod, run here: real processes are killed, whose `/proc` is a copy that names their pods.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

const VICTIM: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const OTHER: &str = "1123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("pods").join(name)
}

/// The processes of a node.
struct Node {
    proc: TempDir,
    processes: Vec<Child>,
}

impl Node {
    /// Processes that really run, each with its control group and its name.
    fn new(processes: &[(&str, &str)]) -> Self {
        let proc = tempfile::tempdir().unwrap();
        let start = |(cgroup, comm): &(&str, &str)| {
            let child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
            let dir = proc.path().join(child.id().to_string());
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("cgroup"), cgroup).unwrap();
            fs::write(dir.join("comm"), format!("{comm}\n")).unwrap();
            child
        };
        let processes = processes.iter().map(start).collect();
        // As there are in a real one: no processes, and one that has just ended.
        fs::create_dir(proc.path().join("sys")).unwrap();
        fs::create_dir(proc.path().join("4194303")).unwrap();
        Self { proc, processes }
    }

    fn kill(&self, args: &[&str]) -> Output {
        Command::new("sh")
            .arg(script("kill.sh"))
            .args(args)
            .env("PROC_ROOT", self.proc.path())
            .output()
            .unwrap()
    }

    /// Which of them are dead: those that were killed, and by which signal.
    fn dead(&mut self) -> Vec<Option<i32>> {
        self.processes
            .iter_mut()
            .map(|child| child.try_wait().unwrap().and_then(|status| status.signal()))
            .collect()
    }

    /// Waits for those that must die.
    fn wait_for(&mut self, which: &[usize]) {
        for at in which {
            assert_eq!(self.processes[*at].wait().unwrap().signal(), Some(9));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for child in &mut self.processes {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn kill_script_kills_exactly_one_container() {
    // Version 1, version 2 with systemd, and another control group namespace.
    let mut node = Node::new(&[
        (&format!("4:memory:/kubepods/pod1/{VICTIM}\n3:cpu:/\n"), "app"),
        (&format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{VICTIM}.scope\n"), "app"),
        (&format!("0::/../../pod1/{VICTIM}\n"), "child"),
        (&format!("0::/kubepods/pod1/{OTHER}\n"), "app"),
        ("0::/system.slice/kubelet.service\n", "kubelet"),
    ]);
    let output = node.kill(&["container", VICTIM]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(said(&output), format!("killed 3 of container {VICTIM}\n"));
    node.wait_for(&[0, 1, 2]);
    assert_eq!(node.dead(), [Some(9), Some(9), Some(9), None, None]);
}

#[test]
fn kill_script_kills_containers_together() {
    let of = |id: &str| format!("0::/kubepods/pod1/{id}\n");
    let kill = |args: &[&str]| {
        let mut node = Node::new(&[
            (&of(VICTIM), "sidecar"),
            (&of(OTHER), "app"),
            (&of(&"a".repeat(64)), "other"),
            (&of(VICTIM), "child"),
        ]);
        let output = node.kill(args);
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(said(&output), format!("killed 3 of together {}\n", args[1]));
        node.wait_for(&[0, 1, 3]);
        assert_eq!(node.dead()[2], None);
    };
    kill(&["together", "1", VICTIM, OTHER]);
    kill(&["together", "65535", OTHER, VICTIM]);
    let node = Node::new(&[(&of(VICTIM), "app")]);
    for wrong in [&["together", "1"][..], &["together", "x", VICTIM], &["together", "1", VICTIM, "."]] {
        assert_eq!(node.kill(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn kill_script_finds_the_kubelet_by_name() {
    let mut node =
        Node::new(&[("0::/a\n", "kubelet"), ("0::/kubelet\n", "kubelet-proxy"), ("0::/kubelet\n", "sh")]);
    let output = node.kill(&["process", "kubelet"]);
    assert!(output.status.success(), "{}", said(&output));
    node.wait_for(&[0]);
    assert_eq!(node.dead(), [Some(9), None, None]);
    // k3s has none.
    let mut node = Node::new(&[("0::/a\n", "k3s-server")]);
    let output = node.kill(&["process", "kubelet"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("there is no process kubelet on this node"));
    assert_eq!(node.dead(), [None]);
}

/// An id that is too short would be in many paths.
#[test]
fn kill_script_ignores_a_wrong_id() {
    let mut node = Node::new(&[(&format!("0::/pod1/{VICTIM}\n"), "app")]);
    for wrong in [
        &["container", ""][..],
        &["container"],
        &["container", &VICTIM[..63]],
        &["container", "."],
        &["pod", VICTIM],
        &[],
    ] {
        let output = node.kill(wrong);
        assert!(!output.status.success(), "{wrong:?}: {}", said(&output));
    }
    let dots = ".".repeat(64);
    assert_eq!(node.kill(&["container", &dots]).status.code(), Some(2), "an id, and not a pattern");
    assert_eq!(node.dead(), [None]);
}

#[test]
fn remaining_files_are_listed() {
    let root = tempfile::tempdir().unwrap();
    let look = || {
        let output =
            Command::new("sh").arg(script("left.sh")).arg("0").env("ROOT", root.path()).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(look(), "looked\n", "a node that never had it");
    // Directories stay, and what belongs to others.
    for dir in ["dev/shm/shmesh/fronthaul", "var/lib/kubelet/device-plugins", "run/shmesh/agent", "run/cdi"] {
        fs::create_dir_all(root.path().join(dir)).unwrap();
    }
    fs::write(root.path().join("var/lib/kubelet/device-plugins/kubelet.sock"), "").unwrap();
    // Absolute, as in Debian: followed from here, it leads elsewhere.
    std::os::unix::fs::symlink("/run", root.path().join("var/run")).unwrap();
    assert_eq!(look(), "looked\n");
    let files = [
        "/dev/shm/shmesh/fronthaul/radio_shm",
        "/var/lib/kubelet/device-plugins/shmesh.io-shm.1.1.sock",
        "/run/shmesh/agent/agent.sock",
        "/run/cdi/shmesh.io-shm.json",
    ];
    for file in files {
        fs::write(root.path().join(&file[1..]), "").unwrap();
    }
    let wanted: String = files.iter().map(|file| format!("left {file}\n")).collect();
    assert_eq!(look(), wanted + "looked\n");
}
