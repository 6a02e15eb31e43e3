//! `shmesh-e2e` itself, without a cluster: the real program talks HTTP to an API server's double. `helm`, `kind` and `docker` are
//! scripts that write down how they were called. What a cluster would do is not shown here; that the program sees it, is.

mod server;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use self::server::{Server, Wrong};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;
use serde_json::Value;
use shmesh_testing::write_script;
use tempfile::TempDir;

/// Commands of others, a kubeconfig, and a server.
struct World {
    dir: TempDir,
    server: Server,
}

impl World {
    async fn new(wrong: Wrong) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::new(wrong, &dir.path().join("calls"));
        let address = server.start().await;
        let kubeconfig = format!(
            "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}], \
             clusters: [{{name: c, cluster: {{server: 'http://{address}'}}}}], users: [{{name: u, user: {{token: t}}}}]}}"
        );
        fs::write(dir.path().join("kubeconfig"), kubeconfig).unwrap();
        let world = Self { dir, server };
        world.command(
            "helm",
            "[ ! -e \"$here/helm-fails\" ] || { echo 'Error: context deadline exceeded' >&2; exit 1; }",
        );
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A command that writes down how it was called, and then does this.
    fn command(&self, name: &str, script: &str) {
        let bin = self.path("bin");
        fs::create_dir_all(&bin).unwrap();
        let text = format!(
            "#!/bin/sh\nhere={}\necho \"{name} $*\" >>$here/calls\n{script}\n",
            self.dir.path().display()
        );
        // Renamed into place, because the last one may be running.
        write_script(&bin.join("new"), &text);
        fs::rename(bin.join("new"), bin.join(name)).unwrap();
    }

    fn with_kind(&self) {
        let create = "case $1 in create) while [ $# -gt 1 ]; do [ \"$1\" != --kubeconfig ] || cp $here/kubeconfig \"$2\"; shift; done;; esac";
        self.command(
            "kind",
            &format!("{create}\n[ \"$1 $2\" != 'get clusters' ] || cat $here/clusters 2>/dev/null || true"),
        );
        self.command("docker", "[ \"$1\" != save ] || touch \"$3\"");
    }

    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The verbs of a command, in order.
    fn verbs(&self, command: &str) -> Vec<String> {
        let calls = self.calls();
        let of = calls.iter().filter_map(|line| line.strip_prefix(command)?.strip_prefix(' '));
        of.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    }

    fn start(&self, flags: &[&str]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-e2e"));
        // A test that is wrong ends too.
        if !flags.contains(&"--timeout-seconds") {
            command.args(["--timeout-seconds", "60"]);
        }
        command
            .args(["--poll-ms", "10"])
            .args(flags)
            .env("PATH", format!("{}:/usr/bin:/bin", self.path("bin").display()));
        command
            .env_remove("SHMESH_E2E_KUBECONFIG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Runs it to its end, while the server serves.
    async fn run(&self, flags: &[&str]) -> Ran {
        let child = self.start(flags);
        ended(child).await
    }

    async fn run_here(&self, flags: &[&str]) -> Ran {
        let kubeconfig = self.path("kubeconfig");
        self.run(&[&["--kubeconfig", kubeconfig.to_str().unwrap()], flags].concat()).await
    }
}

struct Ran {
    code: i32,
    out: String,
    err: String,
}

async fn ended(child: Child) -> Ran {
    let output: Output =
        tokio::task::spawn_blocking(move || child.wait_with_output().unwrap()).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
}

/// The scenarios that run unless others are asked for; `claim` runs only then.
const NAMES: [&str; 9] = [
    "allocate",
    "sized",
    "two-containers",
    "two-pods",
    "share",
    "device-keys",
    "kills",
    "upgrade",
    "uninstall",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn successful_run_leaves_nothing_behind() {
    let world = World::new(Wrong::Nothing).await;
    let ran = world
        .run_here(&[
            "--registry",
            "r.example/x",
            "--tag",
            "9",
            "--pull-policy",
            "Always",
            "--kill-rounds",
            "3",
        ])
        .await;
    assert_eq!(ran.code, 0, "{}\n{}", ran.out, ran.err);
    let lines: Vec<Vec<&str>> =
        ran.out.lines().map(|line| line.split_whitespace().take(2).collect()).collect();
    assert_eq!(lines, NAMES.map(|name| vec!["passed", name]));
    // Pods of scenarios were restricted, and all namespaces are gone.
    let made = world.server.made();
    assert_eq!(made["shmesh-e2e"], "privileged");
    assert!(NAMES.iter().all(|name| made[&format!("shmesh-e2e-{name}")] == "restricted"));
    assert_eq!(world.server.namespaces(), [""; 0]);
    // Each was killed once, and those of the two pods twice more: alone, and together with the other's.
    let killed = world.server.killed();
    let victims = ["mac/mac", "phy/phy", "phy/shmesh", "plugin-1/identity", "plugin-1/plugin"];
    assert_eq!(
        killed.iter().map(|(name, count)| (name.as_str(), *count)).collect::<Vec<_>>(),
        victims.map(|name| (name, if name.starts_with("plugin") { 1 } else { 3 }))
    );
    assert_eq!(world.verbs("helm"), ["install", "test", "upgrade", "rollback", "uninstall", "uninstall"]);
    let install = &world.calls()[0];
    assert!(install.contains("--namespace shmesh-e2e ") && install.contains("e2e/values.yaml"), "{install}");
    assert!(install.contains("--wait"), "{install}");
    assert_eq!(world.verbs("kind"), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_messages_fail_the_run() {
    let world = World::new(Wrong::Loses).await;
    let ran = world.run_here(&["--only", "two-pods", "--only", "allocate", "--output", "json"]).await;
    assert_eq!(ran.code, 1, "{}", ran.err);
    let said: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((&said["passed"], &said["scenarios"][0]["outcome"]), (&false.into(), &"passed".into()));
    assert_eq!(
        (&said["scenarios"][1]["name"], &said["scenarios"][1]["outcome"]),
        (&"two-pods".into(), &"failed".into())
    );
    let error = said["scenarios"][1]["error"].as_str().unwrap();
    assert!(error.starts_with("messages at phy/phy: 1 were lost or came twice: "), "{error}");
    for shown in [
        "n1: ready, allocatable [(\"shmesh.io/agent\", 256), (\"shmesh.io/fronthaul\", 64), (\"shmesh.io/shm\", 8)]",
        "--- namespace shmesh-e2e-two-pods: pods\nmac on n1: Running\nphy on n1: Running\n",
        "Warning phy FailedScheduling: 0/1 nodes are available (3 times)",
        "--- log of shmesh-e2e-two-pods/phy, container shmesh\nready\n",
        "--- log of shmesh-e2e-two-pods/mac, container mac\nattached\nsent ",
        "--- log of shmesh-e2e/plugin-1, container identity\nthe kubelet has every resource\n",
    ] {
        assert!(ran.err.contains(shown), "{shown:?} is not in:\n{}", ran.err);
    }
    assert_eq!(world.server.namespaces(), [""; 0], "a failure is cleaned up too");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_that_does_not_start_is_described() {
    let world = World::new(Wrong::NoImage("sized")).await;
    let ran = world.run_here(&["--only", "sized", "--only", "two-pods", "--timeout-seconds", "1"]).await;
    assert_eq!(ran.code, 1);
    let lines: Vec<&str> = ran.out.lines().collect();
    assert!(lines[0].starts_with("failed   sized"), "{lines:?}");
    let why = "last seen: sized on n1: Pending; Ready False (ContainersNotReady); container sized not ready, 0 restarts, \
               is waiting (ImagePullBackOff, no such image)";
    assert!(lines[0].ends_with(why), "{lines:?}");
    assert!(lines[1].starts_with("passed   two-pods"), "others run: {lines:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keep_stops_at_the_first_failure_and_keeps_everything() {
    let world = World::new(Wrong::NoImage("sized")).await;
    let ran =
        world.run_here(&["--only", "sized", "--only", "two-pods", "--keep", "--timeout-seconds", "1"]).await;
    assert_eq!(ran.code, 1);
    assert!(ran.out.contains("not run  two-pods"), "{}", ran.out);
    assert_eq!(world.server.namespaces(), ["shmesh-e2e", "shmesh-e2e-sized"]);
    assert!(ran.err.contains("helm uninstall shmesh --namespace shmesh-e2e"), "{}", ran.err);
    assert_eq!(world.verbs("helm"), ["install"]);
    // Now they are there, and they are not ours to take.
    let again = world.run_here(&["--only", "sized"]).await;
    assert_eq!(again.code, 3);
    assert!(again.err.contains("the namespace shmesh-e2e exists already"), "{}", again.err);
    assert_eq!(world.server.namespaces(), ["shmesh-e2e", "shmesh-e2e-sized"]);
    assert_eq!(world.verbs("helm"), ["install"], "and what is in it is not uninstalled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_namespace_is_not_deleted() {
    let world = World::new(Wrong::Nothing).await;
    world.server.add_namespace("shmesh-e2e-sized");
    let ran = world.run_here(&["--only", "sized"]).await;
    assert_eq!(ran.code, 1);
    assert!(ran.out.contains("the namespace shmesh-e2e-sized exists already"), "{}", ran.out);
    assert_eq!(world.server.namespaces(), ["shmesh-e2e-sized"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_restart_is_detected() {
    let world = World::new(Wrong::Spreads).await;
    let ran = world.run_here(&["--only", "kills"]).await;
    assert_eq!(ran.code, 1);
    assert!(ran.out.contains("phy/shmesh was killed: restarts of containers are"), "{}", ran.out);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remaining_node_state_is_reported() {
    let world = World::new(Wrong::Litters).await;
    let ran = world.run_here(&["--only", "uninstall"]).await;
    assert_eq!(ran.code, 1);
    let named = "left on node n1: [\"/run/shmesh/agent/agent.sock\"]";
    assert!(ran.out.contains(named), "CDI files may stay, sockets may not: {}", ran.out);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_installation_reports_the_error_of_helm() {
    let world = World::new(Wrong::Nothing).await;
    fs::write(world.path("helm-fails"), "").unwrap();
    let ran = world.run_here(&["--only", "sized"]).await;
    assert_eq!(ran.code, 1, "there is a cluster, and it failed");
    assert!(ran.err.contains("the chart cannot be installed: helm install shmesh"), "{}", ran.err);
    assert!(
        ran.err.contains("Error: context deadline exceeded") && ran.err.contains("--- nodes"),
        "{}",
        ran.err
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kind_cluster_is_created_and_deleted() {
    let world = World::new(Wrong::Nothing).await;
    world.with_kind();
    let ran = world.run(&["--only", "two-pods", "--namespace", "here"]).await;
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert_eq!(world.verbs("docker"), ["build", "build", "save"]);
    assert_eq!(world.verbs("kind"), ["get", "create", "load", "delete"]);
    let calls = world.calls();
    let has = |words: &[&str]| calls.iter().any(|line| words.iter().all(|word| line.contains(word)));
    assert!(has(&[
        "docker build --target sidecar --tag docker.io/library/shmesh-sidecar:",
        "helm/images/Dockerfile"
    ]));
    assert!(has(&["docker save", "docker.io/library/shmesh-plugin:", "docker.io/library/shmesh-sidecar:"]));
    assert!(
        has(&["kind create cluster --name here", "e2e/kind.yaml"])
            && has(&["kind delete cluster --name here"])
    );

    // With a registry nothing is built.
    fs::remove_file(world.path("calls")).unwrap();
    let world_again = World::new(Wrong::Nothing).await;
    world_again.with_kind();
    let ran = world_again.run(&["--only", "two-pods", "--registry", "r.example"]).await;
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert_eq!(
        (world_again.verbs("docker"), world_again.verbs("kind")),
        (vec![], vec!["get".into(), "create".into(), "delete".into()])
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn existing_kind_cluster_is_not_touched() {
    let world = World::new(Wrong::Nothing).await;
    world.with_kind();
    fs::write(world.path("clusters"), "other\nshmesh-e2e\n").unwrap();
    let ran = world.run(&["--only", "sized"]).await;
    assert_eq!(ran.code, 3);
    assert!(ran.err.contains("there is a kind cluster shmesh-e2e already"), "{}", ran.err);
    assert_eq!(world.verbs("kind"), ["get"], "neither made nor deleted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupt_removes_the_cluster() {
    // A pod that never starts: there is time.
    for (signal, wait_for) in [(Signal::SIGINT, "the pod"), (Signal::SIGTERM, "kind create")] {
        let world = World::new(Wrong::NoImage("sized")).await;
        world.with_kind();
        if wait_for == "kind create" {
            let slow = "case $1 in create) sleep 600;; esac";
            world.command("kind", slow);
        }
        let child = world.start(&["--only", "sized"]);
        let began = Instant::now();
        let is_there = || match wait_for {
            "the pod" => world.server.namespaces().contains(&"shmesh-e2e-sized".to_owned()),
            _ => world.verbs("kind").contains(&"create".to_owned()),
        };
        while !is_there() {
            assert!(began.elapsed() < Duration::from_secs(60), "never came to {wait_for}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        let ran = ended(child).await;
        assert!(ran.err.contains("error: interrupted"), "{}", ran.err);
        assert_eq!(ran.code, if wait_for == "the pod" { 1 } else { 3 });
        assert_eq!(world.verbs("kind").last().unwrap(), "delete");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_tools_are_listed() {
    let world = World::new(Wrong::Installed).await;
    let ran = world.run_here(&[]).await;
    assert_eq!(ran.code, 3);
    assert!(ran.err.contains("shmesh is already installed (shmesh-system/shmesh-plugin)"), "{}", ran.err);
    assert_eq!(world.server.made().len(), 0);

    let nothing = tempfile::tempdir().unwrap();
    let without = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-e2e"));
        command.env_clear().env("PATH", nothing.path()).args(flags);
        let output = command.output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = without(&[]);
    assert_eq!(code, 3);
    for missing in ["helm (https://", "kind (https://", "--kubeconfig of a cluster", "docker or podman"] {
        assert!(said.contains(missing), "{missing}: {said}");
    }
    let (code, said) = without(&["--kubeconfig", "/no/such/file"]);
    assert!(code == 3 && said.contains("helm") && !said.contains("kind ("), "{said}");

    let ran = world.run(&["--kubeconfig", "/no/such/file"]).await;
    assert!(ran.code == 3 && ran.err.contains("/no/such/file does not exist"), "{}", ran.err);
    let unreachable = world.path("kubeconfig");
    let text = fs::read_to_string(&unreachable).unwrap();
    let port = text.split("127.0.0.1:").nth(1).unwrap().split('\'').next().unwrap();
    fs::write(&unreachable, text.replace(&format!(":{port}"), ":1")).unwrap();
    let ran = world.run_here(&[]).await;
    assert!(
        ran.code == 3 && ran.err.contains("127.0.0.1:1/") && ran.err.contains("does not answer"),
        "{}",
        ran.err
    );
    fs::write(&unreachable, "clusters: [").unwrap();
    assert_eq!(world.run_here(&[]).await.code, 3);
}

#[test]
fn invalid_flags_are_refused() {
    let run = |flags: &[&str]| Command::new(env!("CARGO_BIN_EXE_shmesh-e2e")).args(flags).output().unwrap();
    for flags in [
        &["--only", "all"][..],
        &["--pull-policy", "Sometimes"],
        &["--namespace", "Shmesh"],
        &["--namespace", "a-"],
        &["--timeout-seconds", "0"],
        &["x"],
    ] {
        let output = run(flags);
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        assert!(output.stdout.is_empty());
    }
    let help = run(&["--help"]);
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(
        help.status.success()
            && text.contains("Exit status: 0 all passed")
            && text.contains("SHMESH_E2E_KUBECONFIG")
    );
    let list: Vec<Value> = serde_json::from_slice(&run(&["--list", "--output", "json"]).stdout).unwrap();
    let (last, others) = NAMES.split_last().unwrap();
    let names: Vec<_> = list.iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, [others, &["rollout", "claim", last]].concat());
    assert!(list.iter().all(|one| one["shows"].as_str().is_some_and(|text| text.len() > 20)));
    let text = String::from_utf8(run(&["--list"]).stdout).unwrap();
    assert_eq!(text.lines().count(), names.len());
}

/// kind's configuration, as far as ours uses it; another key is an error, as it is to kind.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct KindConfig {
    kind: String,
    api_version: String,
    nodes: Vec<KindNode>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KindNode {
    role: String,
}

#[test]
fn kind_configuration_is_valid() {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("kind.yaml")).unwrap();
    let config: KindConfig = serde_saphyr::from_str(&text).unwrap();
    assert_eq!((config.kind.as_str(), config.api_version.as_str()), ("Cluster", "kind.x-k8s.io/v1alpha4"));
    assert_eq!(config.nodes.iter().filter(|node| node.role == "control-plane").count(), 1);
    assert!(config.nodes.iter().filter(|node| node.role == "worker").count() >= 2);
}
