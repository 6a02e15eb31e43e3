//! The cost of the device plugin for a node, and the time of its answers, with 10, 500 and 10,000 devices:
//! `cargo bench -p shmesh-plugin --bench kubelet`.
//!
//! The kubelet is the double, in this process; the plugin is a process of its own. Times are those of the caller.

#![allow(clippy::unwrap_used, reason = "a measurement may panic")]

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use hyper_util::rt::TokioIo;
use shmesh_fake_kubelet::{Config, Node};
use shmesh_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use shmesh_kubelet_api::deviceplugin::{AllocateRequest, ContainerAllocateRequest};
use tonic::transport::{Channel, Endpoint};

const LIMIT: Duration = Duration::from_secs(60);
const SAMPLES: usize = 5_000;
const STARTS: usize = 20;
const IDLE: Duration = Duration::from_secs(10);
const SHM: &str = "shmesh.io/shm";

struct Plugin(Child);

impl Plugin {
    fn start(root: &std::path::Path, units: u64) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"));
        command.args(["run", "--log", "error", "--set", &format!("hostRoot={}", root.display())]);
        // Small units, so that any machine has ten thousand.
        command.args(["--set", "shm.unit=64Ki", "--set", &format!("shm.budget={}", units << 16)]);
        command.args(["--set", "pools=[{name: fronthaul, gid: 60001}]"]);
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }

    /// A line of `/proc/<pid>/status`, in KiB.
    fn status(&self, name: &str) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().find_map(|word| word.parse().ok()).unwrap()
    }

    /// Time on a processor so far.
    fn cpu(&self) -> Duration {
        let text = fs::read_to_string(format!("/proc/{}/schedstat", self.0.id())).unwrap();
        Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn client(root: &std::path::Path) -> DevicePluginClient<Channel> {
    let entries = fs::read_dir(root.join("var/lib/kubelet/device-plugins")).unwrap().flatten();
    let name = |entry: &fs::DirEntry| entry.file_name().into_string().unwrap();
    let mut sockets: Vec<_> = entries.filter(|entry| name(entry).starts_with("shmesh.io_shm.")).collect();
    sockets.sort_by_key(name);
    let socket = sockets.pop().unwrap().path();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    DevicePluginClient::new(endpoint.connect_with_connector(connector).await.unwrap())
}

fn quantiles(name: &str, units: u64, times: &Histogram<u64>) {
    let at = |quantile| times.value_at_quantile(quantile) as f64 / 1e6;
    println!("{name:24} {units:8} {:10.3} {:10.3} {:10.3}", at(0.5), at(0.99), at(1.0));
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).unwrap()
}

fn add(times: &mut Histogram<u64>, began: Instant) {
    times.saturating_record(u64::try_from(began.elapsed().as_nanos()).unwrap());
}

async fn measure(units: u64) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    for path in ["dev/shm", "run", "var/lib/kubelet/device-plugins"] {
        fs::create_dir_all(dir.path().join(path)).unwrap();
    }
    let node = Node::new(Config::new(dir.path().join("var/lib/kubelet")));
    node.start_kubelet().await.unwrap();
    let there = |node: &Node| node.allocatable(SHM) == units && node.allocatable("shmesh.io/fronthaul") == 64;

    let mut times = histogram();
    for _ in 0..STARTS {
        node.wait_for(LIMIT, |node| node.allocatable(SHM) == 0).await.unwrap();
        let began = Instant::now();
        let _plugin = Plugin::start(dir.path(), units);
        node.wait_for(LIMIT, there).await.unwrap();
        add(&mut times, began);
    }
    quantiles("start to allocatable", units, &times);

    node.wait_for(LIMIT, |node| node.allocatable(SHM) == 0).await.unwrap();
    let plugin = Plugin::start(dir.path(), units);
    node.wait_for(LIMIT, there).await.unwrap();
    let mut client = client(dir.path()).await;
    for (name, count) in [("Allocate of 1", 1), ("Allocate of all", units)] {
        let devices_ids: Vec<_> = (0..count).map(|at| format!("u{at}")).collect();
        let container_requests = vec![ContainerAllocateRequest { devices_ids }];
        let mut times = histogram();
        for _ in 0..if count > 1000 { SAMPLES / 10 } else { SAMPLES } {
            let request = AllocateRequest { container_requests: container_requests.clone() };
            let began = Instant::now();
            client.allocate(request).await.unwrap();
            add(&mut times, began);
        }
        quantiles(name, units, &times);
    }

    let mut times = histogram();
    for _ in 0..STARTS {
        node.kill_kubelet().await;
        let began = Instant::now();
        node.start_kubelet().await.unwrap();
        node.wait_for(LIMIT, there).await.unwrap();
        add(&mut times, began);
    }
    quantiles("kubelet restart", units, &times);

    let before = plugin.cpu();
    tokio::time::sleep(IDLE).await;
    let cpu = (plugin.cpu() - before).as_secs_f64() / IDLE.as_secs_f64() * 100.0;
    let [all, anonymous] = ["VmRSS:", "RssAnon:"].map(|name| plugin.status(name) as f64 / 1024.0);
    println!("{:24} {units:8} {cpu:10.3} % of a core", "idle");
    println!("{:24} {units:8} {all:10.1} MiB, {anonymous:.1} of it anonymous", "resident");
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    println!("{:24} {:>8} {:>10} {:>10} {:>10}", "milliseconds", "devices", "p50", "p99", "max");
    for units in [10, 500, 10_000] {
        runtime.block_on(measure(units));
    }
}
