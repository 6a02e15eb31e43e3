//! A node in a directory, with a kubelet double and the plugin as a process.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shmesh_fake_kubelet::{Config, Container, Node, Pod};
use shmesh_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

/// Longer than anything takes on a busy machine; nothing is asserted about time but where it is said.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
pub(crate) const SHM: &str = "shmesh.io/shm";
pub(crate) const POOL: &str = "shmesh.io/a";
pub(crate) const AGENT: &str = "shmesh.io/agent";
pub(crate) const GPU: &str = "shmesh.io/gpu-ipc";

/// A node's root directory.
pub(crate) struct TestNode {
    pub(crate) dir: TempDir,
    pub(crate) node: Node,
}

impl TestNode {
    /// On a tmpfs, as pools are. The kubelet does not run yet.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        for path in ["dev/shm", "run", "var/lib/kubelet/device-plugins", "var/lib/kubelet/plugins_registry"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        let fake = "gpus: [{uuid: GPU-a, numaNode: 0, file: /dev/nvidia0}, {uuid: GPU-b, numaNode: 1}]\n";
        fs::write(dir.path().join("fake.yaml"), fake).unwrap();
        fs::write(dir.path().join("dev/nvidia0"), "").unwrap();
        let mut config = Config::new(dir.path().join("var/lib/kubelet"));
        config.status_period = Duration::from_millis(100);
        Self { node: Node::new(config), dir }
    }

    pub(crate) async fn with_kubelet() -> Self {
        let place = Self::new();
        place.node.start_kubelet().await.unwrap();
        place
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path.trim_start_matches('/'))
    }

    pub(crate) fn sockets(&self) -> PathBuf {
        self.path("var/lib/kubelet/device-plugins")
    }

    /// The plugin's sockets, in order.
    pub(crate) fn plugin_sockets(&self) -> Vec<PathBuf> {
        self.plugin_sockets_in(&self.sockets())
    }

    pub(crate) fn plugin_sockets_in(&self, directory: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
        let is_ours = |entry: &fs::DirEntry| {
            entry.file_type().unwrap().is_socket()
                && entry.file_name().to_str().unwrap().starts_with("shmesh.io_")
        };
        let mut found: Vec<_> = entries.filter(is_ours).map(|entry| entry.path()).collect();
        found.sort();
        found
    }

    /// The pool, with more keys.
    pub(crate) fn pool(more: &str) -> String {
        // Root's own group is refused, and is what tests often run as.
        let gid = match nix::unistd::getegid().as_raw() {
            0 => 60_001,
            gid => gid,
        };
        format!("pools=[{{name: a, attachments: 8, gid: {gid}, minFree: 4Ki{more}}}]")
    }

    /// Sixteen units of memory, a pool `a` of eight, and two GPUs of four slots.
    pub(crate) fn settings(&self) -> Vec<String> {
        vec![
            format!("hostRoot={}", self.dir.path().display()),
            "shm.budget=1Gi".into(),
            Self::pool(""),
            "gpuIpc.slotsPerDevice=4".into(),
            "fakeInventory=/fake.yaml".into(),
            "health.intervalSeconds=1".into(),
            "sweep.intervalSeconds=1".into(),
            "sweep.graceSeconds=1".into(),
        ]
    }

    pub(crate) fn start(&self) -> Plugin {
        self.start_with(&[])
    }

    pub(crate) fn start_with(&self, settings: &[&str]) -> Plugin {
        Plugin::start(&self.settings(), settings, None)
    }

    /// Waits until the kubelet hands out everything.
    pub(crate) async fn all_there(&self) {
        self.allocatable(SHM, 16).await;
        self.allocatable(POOL, 8).await;
        self.allocatable(AGENT, 256).await;
        self.allocatable(GPU, 8).await;
    }

    pub(crate) async fn allocatable(&self, resource: &str, count: u64) {
        self.node.wait_for(LIMIT, |node| node.allocatable(resource) == count).await.unwrap();
    }
}

/// Waits until it holds.
pub(crate) async fn until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < until, "not: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A pod whose only container asks for so many.
pub(crate) fn pod(name: &str, limits: &[(&str, u64)]) -> Pod {
    let main =
        limits.iter().fold(Container::new("main"), |main, (resource, count)| main.limit(resource, *count));
    Pod::new(name).container(main)
}

/// The plugin, killed when dropped.
pub(crate) struct Plugin {
    child: Child,
    log: mpsc::Receiver<String>,
    pub(crate) admin: SocketAddr,
}

impl Plugin {
    pub(crate) fn command(settings: &[String], more: &[&str], config: Option<&Path>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"));
        command.args(["run", "--admin", "127.0.0.1:0", "--log-format", "json"]);
        let all: Vec<_> = settings.iter().map(String::as_str).chain(more.iter().copied()).collect();
        // Of two settings of one key, the later is meant.
        let key = |setting: &str| setting.split('=').next().unwrap().to_owned();
        for (at, setting) in all.iter().enumerate() {
            if !all[at + 1..].iter().any(|later| key(later) == key(setting)) {
                command.args(["--set", setting]);
            }
        }
        if let Some(config) = config {
            command.arg("--config").arg(config);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    pub(crate) fn start(settings: &[String], more: &[&str], config: Option<&Path>) -> Self {
        Self::run(Self::command(settings, more, config))
    }

    pub(crate) fn run(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (to, log) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| to.send(line)));
        let mut plugin = Self { child, log, admin: ([127, 0, 0, 1], 0).into() };
        let line = plugin.said("probes and metrics");
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        plugin.admin = line["address"].as_str().unwrap().parse().unwrap();
        plugin
    }

    /// Waits for a line of the log.
    pub(crate) fn said(&self, part: &str) -> String {
        let until = Instant::now() + LIMIT;
        let mut last = String::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.log.recv_timeout(left);
            let line = line.unwrap_or_else(|_| panic!("never said: {part}; the last line: {last}"));
            last.clone_from(&line);
            if line.contains(part) {
                return line;
            }
        }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Tells it to end, and waits.
    pub(crate) fn end(mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.child.wait().unwrap()
    }

    /// Sends SIGTERM and returns the remaining log lines.
    pub(crate) fn end_and_tell(mut self) -> Vec<String> {
        self.signal(Signal::SIGTERM);
        assert!(self.child.wait().unwrap().success());
        self.log.iter().collect()
    }

    /// Ends it as a crash does.
    pub(crate) fn crash(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn get(&self, path: &str) -> String {
        shmesh_testing::http_get(self.admin, path).unwrap()
    }

    /// A number in the metrics; none if it is not there.
    pub(crate) fn metric(&self, name: &str) -> Option<f64> {
        shmesh_testing::metric(&self.get("/metrics"), name)
    }

    /// Waits for a number in the metrics.
    pub(crate) async fn shows(&self, name: &str, wanted: impl Fn(f64) -> bool) {
        until(name, || self.metric(name).is_some_and(&wanted)).await;
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client of the plugin's socket for a resource.
pub(crate) async fn client(place: &TestNode, resource: &str) -> DevicePluginClient<Channel> {
    let name = resource.replace('/', "_");
    let socket = place
        .plugin_sockets()
        .into_iter()
        .rfind(|path| path.file_name().unwrap().to_str().unwrap().starts_with(&format!("{name}.")));
    let socket = socket.unwrap();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap();
    DevicePluginClient::new(channel).max_decoding_message_size(64 << 20).max_encoding_message_size(64 << 20)
}
