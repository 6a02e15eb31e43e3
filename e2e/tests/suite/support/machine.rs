//! A node without a cluster: the kubelet double, the real plugin with its identity service, and containers made by `unshare`.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use shmesh_fake_kubelet::{Config, Container, Node, Phase, Pod};
use tempfile::TempDir;

use super::container::Runtime;
use super::program;

/// The pool that all nodes here have, and the resource that stands for it.
pub(crate) const POOL: &str = "shmesh.io/fronthaul";
pub(crate) const SHM: &str = "shmesh.io/shm";
const GID: u32 = 60_001;
/// Longer than anything takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct Machine {
    /// The node's root: what is `/` to the plugin.
    root: TempDir,
    /// A directory that every container can read.
    pub(crate) shared: TempDir,
    pub(crate) node: Node,
    plugin: Option<Child>,
}

impl Machine {
    /// A node with everything running.
    pub(crate) async fn start() -> Self {
        let root = tempfile::tempdir_in("/dev/shm").unwrap();
        for path in ["dev/shm", "run", "var/lib/kubelet/device-plugins"] {
            std::fs::create_dir_all(root.path().join(path)).unwrap();
        }
        // Containers of other users go through it.
        open_to_all(root.path());
        let shared = tempfile::tempdir().unwrap();
        open_to_all(shared.path());
        let mut config = Config::new(root.path().join("var/lib/kubelet"));
        config.status_period = Duration::from_millis(100);
        let mut machine = Self { node: Node::new(config), root, shared, plugin: None };
        machine.node.start_kubelet().await.unwrap();
        machine.start_plugin().await;
        machine
    }

    pub(crate) async fn start_plugin(&mut self) {
        let mut command = Command::new(program("shmesh-plugin"));
        command.args(["run", "--log-format", "json"]);
        for setting in [
            format!("hostRoot={}", self.root.path().display()),
            "shm.budget=1Gi".into(),
            format!("pools=[{{name: fronthaul, attachments: 16, gid: {GID}, minFree: 4Ki}}]"),
            "sweep.intervalSeconds=1".into(),
            "sweep.graceSeconds=1".into(),
        ] {
            command.args(["--set", &setting]);
        }
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        drain(child.stderr.take().unwrap(), "all resources are registered with the kubelet");
        self.plugin = Some(child);
        self.all_there().await;
    }

    /// Waits until the kubelet hands out what the plugin has.
    pub(crate) async fn all_there(&self) {
        let is_all = |node: &Node| (node.allocatable(POOL), node.allocatable(SHM)) == (16, 16);
        self.node.wait_for(LIMIT, is_all).await.unwrap();
    }

    /// As a crash does.
    pub(crate) fn kill_plugin(&mut self) {
        let mut child = self.plugin.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// A file or directory of the node.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path.trim_start_matches('/'))
    }

    /// The names of the files in the pool.
    pub(crate) fn pool_files(&self) -> BTreeSet<String> {
        let entries = std::fs::read_dir(self.path("dev/shm/shmesh/fronthaul")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Admits a pod of such containers, each with one unit of the resource, and run by this user.
    pub(crate) async fn pod(
        &self,
        name: &str,
        containers: &[&str],
        limit: (&str, u64),
        user: u32,
    ) -> RunningProcess {
        let pod = containers.iter().fold(Pod::new(name), |pod, container| {
            pod.container(Container::new(container).limit(limit.0, limit.1))
        });
        let uid = pod.uid.clone();
        let status = self.node.add_pod(pod).await;
        assert_eq!(status.phase, Phase::Running, "{status:?}");
        RunningProcess { uid, user }
    }

    /// Admits a pod as the API server would have it: what its containers ask for, their environment, and what the downward API
    /// writes into their volumes.
    pub(crate) async fn pod_of(&self, manifest: &Value) -> RunningProcess {
        let (metadata, spec) = (&manifest["metadata"], &manifest["spec"]);
        let name = metadata["name"].as_str().unwrap();
        let mut pod = Pod::new(name);
        let of = |key: &str| spec[key].as_array().cloned().unwrap_or_default();
        for container in of("initContainers") {
            assert_eq!(container["restartPolicy"], "Always", "only sidecars are started here");
            pod = pod.init(self.container_of(manifest, &container).restartable());
        }
        for container in of("containers") {
            pod = pod.container(self.container_of(manifest, &container));
        }
        let uid = pod.uid.clone();
        let status = self.node.add_pod(pod).await;
        assert_eq!(status.phase, Phase::Running, "{status:?}");
        let user = spec["securityContext"]["runAsUser"].as_u64().unwrap().try_into().unwrap();
        RunningProcess { uid, user }
    }

    fn container_of(&self, manifest: &Value, container: &Value) -> Container {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let mut made = Container::new(&text(&container["name"]));
        for (resource, count) in container["resources"]["limits"].as_object().unwrap() {
            if resource.contains('/') {
                made = made.limit(resource, count.as_str().unwrap().parse().unwrap());
            }
        }
        for env in container["env"].as_array().into_iter().flatten() {
            made = made.env(&text(&env["name"]), &text(&env["value"]));
        }
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            let named = |volume: &&Value| volume["name"] == mount["name"];
            let volume = manifest["spec"]["volumes"].as_array().unwrap().iter().find(named).unwrap();
            let host = format!(
                "/var/lib/kubelet/volumes/{}-{}",
                text(&manifest["metadata"]["name"]),
                text(&mount["name"])
            );
            std::fs::create_dir_all(self.path(&host)).unwrap();
            for item in volume["downwardAPI"]["items"].as_array().unwrap() {
                let field = text(&item["fieldRef"]["fieldPath"]);
                let key = field
                    .strip_prefix("metadata.annotations['")
                    .and_then(|key| key.strip_suffix("']"))
                    .unwrap();
                let value = text(&manifest["metadata"]["annotations"][key]);
                std::fs::write(self.path(&host).join(text(&item["path"])), value).unwrap();
            }
            made = made.mount(&text(&mount["mountPath"]), &host);
        }
        made
    }

    /// A container of a pod, as the kubelet said that it should be.
    pub(crate) fn runtime(&self, pod: &RunningProcess, container: &str) -> Runtime {
        let status = self.node.pod(&pod.uid).unwrap();
        Runtime::new(self.root.path(), &status.containers[container].options, pod.user)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(mut plugin) = self.plugin.take() {
            let _ = kill(Pid::from_raw(plugin.id().cast_signed()), Signal::SIGTERM);
            let _ = plugin.wait();
        }
    }
}

/// A pod that was admitted.
pub(crate) struct RunningProcess {
    pub(crate) uid: String,
    user: u32,
}

/// Waits for a log line, and drains the rest so that the writer never blocks.
pub(crate) fn drain(log: impl std::io::Read + Send + 'static, there: &str) {
    let mut log = BufReader::new(log).lines().map_while(Result::ok);
    let mut before = Vec::new();
    let is_there = log.by_ref().any(|line| {
        let is = line.contains(there);
        before.push(line);
        is
    });
    assert!(is_there, "never said {there:?}, but:\n{}", before.join("\n"));
    std::thread::spawn(move || log.for_each(drop));
}

fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
}
