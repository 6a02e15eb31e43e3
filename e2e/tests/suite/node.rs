//! One node, below the cluster: the kubelet double hands out what the real plugin advertises, containers are made
//! of its answers by `unshare`, and the sidecar and applications run in them, as users of their own and in namespaces of their
//! own. It takes root; not tried here are a real container runtime, cgroups and the API server.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::container::tool;
use crate::support::machine::{Machine, POOL, RunningProcess, SHM, drain};
use crate::support::{child_of, program};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use shmesh_testing::{Peer, Watchdog, is_root, until};

/// Two pods of different users: one with a sidecar and an application, one with an application.
const DU: u32 = 10_001;
const RIC: u32 = 20_002;

const LINK: &str = "- name: link\n  ring: { len: 64 }\n  memory: { file_mode: \"0660\" }\n  notify: { spin_us: 0 }\n  pools:\n    \
                    cpu_msg: { buf_size_bytes: 256, pool_len: 64 }\n    cpu_data: { buf_size_bytes: 4096, pool_len: 16 }\n";

/// Ends with the test.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sidecar(machine: &Machine, pod: &RunningProcess) -> KillOnDrop {
    let links = machine.shared.path().join("links");
    std::fs::write(&links, LINK).unwrap();
    let mut command = machine.runtime(pod, "sidecar").command(&program("shmesh-sidecar"));
    // The directory and the identity service's socket are the container's by the environment of the answer.
    command.args(["--log-format", "json", "--annotation"]).arg(links);
    ready(command)
}

/// A sidecar that has said so.
fn ready(mut command: Command) -> KillOnDrop {
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    drain(child.stderr.take().unwrap(), "\"ready\"");
    KillOnDrop(child)
}

fn app(machine: &Machine, pod: &RunningProcess, container: &str) -> Peer {
    let command = machine.runtime(pod, container).command(&std::env::current_exe().unwrap());
    Peer::start_by(command, Path::new("/dev/shm"))
}

async fn du_and_ric(machine: &Machine) -> (RunningProcess, RunningProcess) {
    let du = machine.pod("du", &["sidecar", "app"], (POOL, 1), DU).await;
    let ric = machine.pod("ric", &["app"], (POOL, 1), RIC).await;
    (du, ric)
}

/// Sends one way and the other, and counts.
fn talk(phy: &mut Peer, mac: &mut Peer, from: u32) {
    for i in from..from + 10 {
        phy.tell(&format!("send {i} down"));
        mac.tell(&format!("send {i} up"));
        assert_eq!(mac.ask("receive"), format!("{i} down"));
        assert_eq!(phy.ask("receive"), format!("{i} up"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_pods_exchange_messages_through_a_pool() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let machine = Machine::start().await;
    let (du, ric) = du_and_ric(&machine).await;
    let _sidecar = sidecar(&machine, &du);
    let (mut phy, mut mac) = (app(&machine, &du, "app"), app(&machine, &ric, "app"));
    phy.tell("attach link primary 0");
    mac.tell("attach link secondary 0");
    talk(&mut phy, &mut mac, 0);
    phy.tell("data 7 4096");
    assert_eq!(mac.ask("receive-data"), "7 4096 true");

    // Both processes have pid 1 in their namespace and another pid on the node.
    for peer in [&mut phy, &mut mac] {
        peer.tell("device connect");
    }
    assert_ne!(phy.ask("device tgid"), mac.ask("device tgid"));

    // A death in one pod is noticed in the other; nothing that was sent is lost.
    mac.tell("hold-loan");
    mac.tell("send 9 last");
    mac.kill();
    until("it is taken back", || phy.ask("participants") == "1");
    assert_eq!(phy.ask("receive"), "9 last");

    // Pods end, and the node is as it was.
    drop(phy);
    assert!(!machine.pool_files().is_empty());
    machine.node.delete_pod(&du.uid);
    machine.node.delete_pod(&ric.uid);
    until("the pool is swept", || machine.pool_files().is_empty());
}

/// The sample's own pods, with what injection adds, as the kubelet would start them: nothing here says what they need.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn injected_two_pods_sample_runs() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let machine = Machine::start().await;
    let config = machine.path("injector.yaml");
    std::fs::write(&config, "pools: [{name: fronthaul}]").unwrap();
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/samples/two-pods.yaml");
    let mut inject = Command::new(program("shmesh-plugin"));
    inject.args(["inject", "--output", "json", "-f"]).arg(sample).arg("--config").arg(config);
    let injected = inject.stderr(Stdio::inherit()).output().unwrap();
    assert!(injected.status.success());
    let list: Value = serde_json::from_slice(&injected.stdout).unwrap();
    let pods: Vec<_> = list["items"].as_array().unwrap().iter().filter(|one| one["kind"] == "Pod").collect();
    let [phy, mac] = pods[..] else { panic!("{list}") };

    // The secondary first: it waits.
    let running = machine.pod_of(mac).await;
    let mut mac = started(&machine, &running, &mac["spec"]["containers"][0]);
    let running = machine.pod_of(phy).await;
    let sidecar = &phy["spec"]["initContainers"][0];
    let name = sidecar["name"].as_str().unwrap();
    runs_hook(sidecar);
    let _sidecar = ready(machine.runtime(&running, name).command(&program("shmesh-sidecar")));
    let mut phy = started(&machine, &running, &phy["spec"]["containers"][0]);
    for side in [&mut phy, &mut mac] {
        drain(side.0.stdout.take().unwrap(), "lost or duplicate 0");
    }
}

/// The sidecar's program knows the command of its hook. A container here has no network to ask the sidecar by, so the limit is 0.
fn runs_hook(sidecar: &Value) {
    let hook = &sidecar["lifecycle"]["postStart"]["exec"]["command"];
    let words: Vec<_> = hook.as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    let ["/usr/bin/shmesh-sidecar", arguments @ .., limit] = &words[..] else { panic!("{hook}") };
    assert!(limit.parse::<u64>().unwrap() >= 60);
    let mut command = Command::new(program("shmesh-sidecar"));
    let hook = command.args(arguments).arg("0").env("SHMESH_ADMIN", "127.0.0.1:1").output().unwrap();
    let said = String::from_utf8_lossy(&hook.stderr);
    assert!(said.contains("has not started within 0ns: no answer from 127.0.0.1:1"), "{said}");
}

/// A container's own command.
fn started(machine: &Machine, pod: &RunningProcess, container: &Value) -> KillOnDrop {
    let words: Vec<_> =
        container["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    let mut command = machine.runtime(pod, container["name"].as_str().unwrap()).command(&program(words[0]));
    command.args(&words[1..]);
    KillOnDrop(command.stdout(Stdio::piped()).spawn().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn device_key_works_only_for_admitted_processes() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let machine = Machine::start().await;
    let (du, ric) = du_and_ric(&machine).await;
    let wrong = machine.pod("wrong", &["app"], (POOL, 1), RIC).await;
    let _sidecar = sidecar(&machine, &du);
    let mut exporter = app(&machine, &du, "app");
    let (mut importer, mut other) = (app(&machine, &ric, "app"), app(&machine, &wrong, "app"));
    for peer in [&mut exporter, &mut importer, &mut other] {
        peer.tell("device connect");
    }
    let tgid = importer.ask("device tgid");
    let key = exporter.ask("device export weights 0");
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    let refused = other.ask(&format!("device import {key}"));
    assert!(refused.starts_with("err Denied"), "of the same user, and another pod: {refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_any_component_loses_no_message() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let mut machine = Machine::start().await;
    let (du, ric) = du_and_ric(&machine).await;
    let keeper = sidecar(&machine, &du);
    let (mut phy, mut mac) = (app(&machine, &du, "app"), app(&machine, &ric, "app"));
    phy.tell("attach link primary 0");
    mac.tell("attach link secondary 0");
    talk(&mut phy, &mut mac, 0);

    // The sidecar, with a message on its way.
    phy.tell("send 100 waits");
    drop(keeper);
    talk_after(&mut phy, &mut mac, "100 waits", 101);
    let keeper = sidecar(&machine, &du);
    talk(&mut phy, &mut mac, 120);

    // An application.
    phy.tell("send 200 waits");
    mac.kill();
    machine.node.restart_container(&ric.uid, "app").await.unwrap();
    let mut mac = app(&machine, &ric, "app");
    mac.tell("attach link secondary 10000");
    talk_after(&mut phy, &mut mac, "200 waits", 201);

    // Kills the plugin with the identity service: existing clients are unaffected, new ones are admitted after the restart.
    machine.kill_plugin();
    talk(&mut phy, &mut mac, 300);
    machine.start_plugin().await;
    mac.kill();
    let mut mac = app(&machine, &ric, "app");
    mac.tell("attach link secondary 10000");
    talk(&mut phy, &mut mac, 320);

    // The kubelet.
    machine.node.restart_kubelet().await.unwrap();
    talk(&mut phy, &mut mac, 400);
    machine.all_there().await;
    let late = machine.pod("late", &["app"], (POOL, 1), RIC).await;
    mac.kill();
    let mut mac = app(&machine, &late, "app");
    mac.tell("attach link secondary 10000");
    talk(&mut phy, &mut mac, 420);
    drop(keeper);
}

fn talk_after(phy: &mut Peer, mac: &mut Peer, waits: &str, from: u32) {
    assert_eq!(mac.ask("receive"), waits);
    talk(phy, mac, from);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_gets_exactly_its_units_of_shared_memory() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let machine = Machine::start().await;
    let pod = machine.pod("sized", &["app"], (SHM, 2), DU).await;
    let in_it = |script: &str| {
        let mut command = machine.runtime(&pod, "app").command(&tool("sh"));
        let done = command.args(["-c", script]).output().unwrap();
        String::from_utf8(done.stdout).unwrap()
    };
    let size = in_it("df --block-size=1 --output=size /dev/shm | tail -n 1");
    assert_eq!(size.trim(), (2_u64 << 26).to_string());
    let full = in_it(
        "fallocate -l 134217728 /dev/shm/all && echo all; fallocate -l 4096 /dev/shm/more || echo full",
    );
    assert_eq!(full.trim(), "all\nfull");
    assert_eq!(in_it("id -u").trim(), DU.to_string());
}

/// Kills all these processes, in an order and with pauses that differ from round to round.
fn kill_together(mut pids: Vec<i32>, round: u32) {
    let mut random = u64::from(round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    while !pids.is_empty() {
        let at = usize::try_from(next(pids.len() as u64)).unwrap();
        kill(Pid::from_raw(pids.swap_remove(at)), Signal::SIGKILL).unwrap();
        if next(2) == 0 {
            std::thread::sleep(Duration::from_micros(next(5_000)));
        }
    }
}

/// A pod's sidecar and application, another pod's application, or all three are killed at once and started again. What was sent to
/// a side that died is received by its successor, as long as one process of the link has lived.
async fn pods_killed_together(rounds: u32) {
    if !is_root() {
        return;
    }
    let machine = Machine::start().await;
    let (du, ric) = du_and_ric(&machine).await;
    let mut keeper = sidecar(&machine, &du);
    let (mut phy, mut mac) = (app(&machine, &du, "app"), app(&machine, &ric, "app"));
    phy.tell("attach link primary 10000");
    mac.tell("attach link secondary 10000");
    for round in 0..rounds {
        talk(&mut phy, &mut mac, 0);
        phy.tell(&format!("send {round} down"));
        mac.tell(&format!("send {round} up"));
        let (kills_du, kills_ric) = (round % 3 != 1, round % 3 != 0);
        let mut victims = Vec::new();
        if kills_du {
            victims.extend([keeper.0.id(), phy.pid()]);
        }
        if kills_ric {
            victims.push(mac.pid());
        }
        kill_together(victims.into_iter().map(|unshare| child_of(unshare).parse().unwrap()).collect(), round);
        if kills_ric {
            mac.kill();
            machine.node.restart_container(&ric.uid, "app").await.unwrap();
            mac = app(&machine, &ric, "app");
        }
        if kills_du {
            drop(keeper);
            phy.kill();
            for container in ["sidecar", "app"] {
                machine.node.restart_container(&du.uid, container).await.unwrap();
            }
            keeper = sidecar(&machine, &du);
            phy = app(&machine, &du, "app");
            phy.tell("attach link primary 10000");
        }
        if kills_ric {
            mac.tell("attach link secondary 10000");
        }
        if kills_du != kills_ric {
            assert_eq!(phy.ask("receive"), format!("{round} up"), "round {round}");
            assert_eq!(mac.ask("receive"), format!("{round} down"), "round {round}");
        } else {
            // The plugin may have removed the link meanwhile, with its messages.
            for side in [&mut phy, &mut mac] {
                while side.ask("receive") != "none" {}
            }
        }
    }
    talk(&mut phy, &mut mac, 0);
    drop(keeper);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_killed_together_lose_no_message() {
    let _watchdog = Watchdog::start();
    pods_killed_together(3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: a hundred rounds"]
async fn pods_killed_together_a_hundred_times_lose_no_message() {
    pods_killed_together(100).await;
}
