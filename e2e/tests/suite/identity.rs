//! A sidecar that cannot see its clients, and the identity service of the node that can: each client, and the sidecar, is
//! process 1 of a pid namespace of its own, as in pods.

use std::process::Command;

use crate::support::{Daemon, child_of};
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, until};

/// Both ways in which a kernel says who connected.
const KERNELS: [&[&str]; 2] = [&[], &["--old-kernel"]];

#[test]
fn memory_is_shared_with_identified_processes() {
    let _watchdog = Watchdog::start();
    if is_root() {
        KERNELS.iter().for_each(|kernel| shared_with_whom_the_node_knows(kernel));
    }
}

fn shared_with_whom_the_node_knows(kernel: &[&str]) {
    let dir = ipc_dir();
    let socket = dir.path().join("agent.sock");
    let _identity = Daemon::identity(&socket);
    let _sidecar = Daemon::sidecar(dir.path(), &socket, kernel);
    let (mut exporter, mut importer) = (Peer::start_alone(dir.path()), Peer::start_alone(dir.path()));
    exporter.tell("device connect");
    importer.tell("device connect");
    let tgid = importer.ask("device tgid");
    assert_eq!(tgid, child_of(importer.pid()), "its number where the node looks from");
    assert_ne!(tgid, exporter.ask("device tgid"), "both are process 1 in their own eyes");

    let key = exporter.ask("device export weights 0");
    assert!(importer.ask(&format!("device import {key}")).starts_with("err Denied"));
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    importer.kill();
    until("its death is its close", || exporter.ask(&format!("device close {key}")) == "ok");

    // Admitted by a number that this sidecar has never seen; the node has.
    let mut late = Peer::start_alone(dir.path());
    let key = exporter.ask("device export weights 0");
    until("it has started", || {
        std::fs::read_to_string(format!("/proc/{}/task/{0}/children", late.pid()))
            .is_ok_and(|c| !c.is_empty())
    });
    exporter.tell(&format!("device admit {key} {}", child_of(late.pid())));
    late.tell("device connect");
    assert_eq!(late.ask(&format!("device import {key}")), "weights");
    let refused = exporter.ask(&format!("device admit {key} {}", i32::MAX));
    assert!(refused.contains("no living process"), "{refused}");
}

#[test]
fn buffers_of_dead_processes_in_other_namespaces_are_recovered() {
    let _watchdog = Watchdog::start();
    if is_root() {
        KERNELS.iter().for_each(|kernel| comes_back(kernel));
    }
}

fn comes_back(kernel: &[&str]) {
    let dir = ipc_dir();
    let socket = dir.path().join("agent.sock");
    let _identity = Daemon::identity(&socket);
    let _sidecar = Daemon::sidecar(dir.path(), &socket, kernel);
    let (mut phy, mut mac) = (Peer::start_alone(dir.path()), Peer::start_alone(dir.path()));
    phy.tell("attach link primary 0");
    mac.tell("attach link secondary 0");
    mac.tell("hold-loan");
    mac.tell("send 1 last");
    mac.kill();
    until("it is taken back", || phy.ask("participants") == "1");
    assert_eq!(phy.ask("receive"), "1 last");
}

#[test]
fn unavailable_identity_service_blocks_new_clients_until_it_returns() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let socket = dir.path().join("agent.sock");
    let identity = Daemon::identity(&socket);
    let _sidecar = Daemon::sidecar(dir.path(), &socket, &[]);
    let (mut phy, mut mac) = (Peer::start_alone(dir.path()), Peer::start_alone(dir.path()));
    phy.tell("attach link primary 0");
    drop(identity);
    // The files of the link say who may attach; only the sidecar says who may have keys.
    mac.tell("attach link secondary 0");
    mac.tell("device connect");
    let refused = mac.ask("device tgid");
    assert!(refused.starts_with("err "), "{refused}");
    assert_eq!(phy.ask("participants"), "2");
    let _identity = Daemon::identity(&socket);
    mac.tell("device connect");
    assert!(mac.ask("device tgid").parse::<i32>().is_ok());
    mac.tell("send 1 hello");
    assert_eq!(phy.ask("receive"), "1 hello");
}

/// As in a pod with `shareProcessNamespace`: the sidecar sees its clients, by numbers that mean others to the node.
#[test]
fn shared_pid_namespace_still_yields_node_pids() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let socket = dir.path().join("agent.sock");
    let _identity = Daemon::identity(&socket);
    let sidecar = Daemon::sidecar(dir.path(), &socket, &[]);
    let beside_it = || {
        let mut command = Command::new("nsenter");
        command.args(["--target", &sidecar.child(), "--pid", "--mount"]);
        command.arg(std::env::current_exe().unwrap());
        Peer::start_by(command, dir.path())
    };
    let (mut exporter, mut importer) = (beside_it(), beside_it());
    exporter.tell("device connect");
    importer.tell("device connect");
    let process = child_of(importer.pid());
    assert_eq!(importer.ask("device tgid"), process, "its number where the node looks from");
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
    let here = numbers.split_whitespace().last().unwrap();
    assert_ne!(here, process, "the sidecar's own kernel calls it {here}");

    let key = exporter.ask("device export weights 0");
    // On the node this pid belongs to another process or none: either way the importer is not admitted.
    let _ = exporter.ask(&format!("device admit {key} {here}"));
    assert!(importer.ask(&format!("device import {key}")).starts_with("err Denied"));
    exporter.tell(&format!("device admit {key} {process}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
}
