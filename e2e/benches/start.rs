//! The time that injection adds to a pod's start, below the cluster: a pod as it was written, and the same pod as it was injected, from
//! its admission by the kubelet double until its application runs. Image pulls and a container engine come on top, for both.
//!
//! `cargo build --release && cargo bench -p shmesh-e2e --bench start`, as root.

#![allow(clippy::unwrap_used, reason = "a bench may panic")]

#[path = "../tests/suite/support/mod.rs"]
#[allow(dead_code, reason = "it uses a part of what the tests do")]
mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::container::tool;
use support::machine::{Machine, RunningProcess};
use support::program;

const ROUNDS: usize = 50;
/// Sizes of the pool `cpu_data`, in buffers of 1 MiB.
const MEBIBYTES: [u32; 3] = [1, 64, 512];

/// A pod with one link of its own, whose memory is mostly one pool.
fn manifest(name: &str, mebibytes: u32) -> Value {
    let links = format!(
        "- name: radio\n  scope: pool/fronthaul\n  side: primary\n  pools:\n    cpu_msg: {{buf_size_bytes: 4096, pool_len: 64}}\n    \
         cpu_data: {{buf_size_bytes: 1048576, pool_len: {mebibytes}}}\n"
    );
    serde_json::json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "radio", "annotations": {"shmesh.io/links": links}},
        "spec": {
            "securityContext": {"runAsNonRoot": true, "runAsUser": 10_001},
            "containers": [{"name": "app", "image": "app", "resources": {"limits": {"memory": "2Gi"}}}],
        },
    })
}

fn injected(machine: &Machine, pod: &Value) -> Value {
    let (config, file) = (machine.path("injector.yaml"), machine.path("pod.json"));
    std::fs::write(&config, "pools: [{name: fronthaul}]").unwrap();
    std::fs::write(&file, pod.to_string()).unwrap();
    let mut inject = Command::new(program("shmesh-plugin"));
    inject.args(["inject", "--output", "json", "-f"]).arg(file).arg("--config").arg(config);
    let injected = inject.stderr(Stdio::inherit()).output().unwrap();
    assert!(injected.status.success());
    serde_json::from_slice(&injected.stdout).unwrap()
}

/// Ends with its pod.
struct SidecarProcess(Child);

impl Drop for SidecarProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs until it has written a line with these words.
fn until_it_says(mut command: Command, words: &str) -> SidecarProcess {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (out, log) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let mut lines: Box<dyn Iterator<Item = _> + Send> = if words.contains("ready") {
        Box::new(BufReader::new(log).lines().map_while(Result::ok))
    } else {
        Box::new(BufReader::new(out).lines().map_while(Result::ok))
    };
    assert!(lines.any(|line| line.contains(words)), "never said {words}");
    std::thread::spawn(move || lines.for_each(drop));
    SidecarProcess(child)
}

/// The application: as small a program as there is.
fn application(machine: &Machine, pod: &RunningProcess) -> SidecarProcess {
    let mut command = machine.runtime(pod, "app").command(&tool("echo"));
    command.arg("here");
    until_it_says(command, "here")
}

/// Milliseconds until a sidecar, if there is one, is ready, and from there until the application runs.
async fn start(machine: &Machine, pod: &Value) -> (f64, f64) {
    let millis = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
    let begin = Instant::now();
    let running = machine.pod_of(pod).await;
    let sidecar = pod["spec"]["initContainers"][0]["name"].as_str().map(|name| {
        until_it_says(machine.runtime(&running, name).command(&program("shmesh-sidecar")), "\"ready\"")
    });
    let (ready, begin) = (millis(begin), Instant::now());
    let app = application(machine, &running);
    let runs = millis(begin);
    drop((app, sidecar));
    machine.node.delete_pod(&running.uid);
    let limit = Instant::now();
    while !machine.pool_files().is_empty() {
        assert!(limit.elapsed() < Duration::from_secs(30), "the pool is not swept");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    (ready, runs)
}

fn median(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[times.len() - 1])
}

async fn row(machine: &Machine, name: &str, pod: &Value, rounds: usize) {
    let (mut ready, mut runs) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let mut pod = pod.clone();
        pod["metadata"]["name"] = format!("{}-{round}", pod["metadata"]["name"].as_str().unwrap()).into();
        let (to_ready, to_running) = start(machine, &pod).await;
        ready.push(to_ready);
        runs.push(to_running);
    }
    let ((ready, slowest), (runs, last)) = (median(ready), median(runs));
    println!(
        "{name:<28} before the application {ready:>7.1} ms (slowest {slowest:>7.1})   application {runs:>6.1} ms (slowest {last:>6.1})"
    );
}

#[tokio::main]
async fn main() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: containers are made by unshare, which takes root");
        return;
    }
    assert!(Path::new("/proc/self/ns/pid").exists());
    let machine = Machine::start().await;
    let mut plain = manifest("plain", 1);
    plain["metadata"]["annotations"] = serde_json::json!({});
    row(&machine, "as it was written", &plain, ROUNDS).await;
    for mebibytes in MEBIBYTES {
        let pod = injected(&machine, &manifest(&format!("with-{mebibytes}"), mebibytes));
        let rounds = if mebibytes > 100 { ROUNDS / 5 } else { ROUNDS };
        row(&machine, &format!("injected, link of {mebibytes} MiB"), &pod, rounds).await;
    }
}
