//! The real program with a stand-in for kubectl, and the real kubectl with the arguments that the stand-in got.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

mod plugin;
mod real_kubectl;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use shmesh_testing::write_script;

const PROGRAM: &str = env!("CARGO_BIN_EXE_kubectl-shmesh");

/// A directory with the stand-in and what it answers.
struct StandIn(tempfile::TempDir);

impl StandIn {
    /// A stand-in that knows these pods, all with a sidecar.
    fn new(pods: &[&str]) -> Self {
        let stand_in = Self(tempfile::tempdir().unwrap());
        write_script(&stand_in.path("kubectl"), include_str!("../kubectl.sh"));
        let items: Vec<Value> = pods.iter().map(|name| pod(name)).collect();
        stand_in.answer("pods.json", &json!({ "items": items }).to_string());
        stand_in
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn answer(&self, file: &str, text: &str) {
        fs::write(self.path(file), text).unwrap();
    }

    /// Runs `kubectl shmesh` with the stand-in.
    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        let (subcommand, rest) = args.split_first().unwrap();
        command.arg(subcommand).arg("--kubectl").arg(self.path("kubectl")).args(rest);
        command
    }

    /// The arguments of all calls.
    fn calls(&self) -> Vec<Vec<String>> {
        let files = fs::read_dir(self.path("calls")).unwrap().map(|entry| entry.unwrap().path());
        let mut calls: Vec<Vec<String>> = files
            .map(|file| fs::read_to_string(file).unwrap().lines().map(str::to_owned).collect())
            .collect();
        calls.sort();
        calls
    }
}

/// A running pod with a sidecar.
fn pod(name: &str) -> Value {
    json!({
        "metadata": { "name": name, "namespace": "ran" },
        "spec": { "nodeName": "worker-1" },
        "status": { "initContainerStatuses": [{ "name": "shmesh", "state": { "running": {} } }] },
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A directory with the program under both of its names.
fn in_path() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["kubectl-shmesh", "kubectl_complete-shmesh"] {
        symlink(PROGRAM, dir.path().join(name)).unwrap();
    }
    dir
}
