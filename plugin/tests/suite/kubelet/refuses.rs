//! All mistakes are reported at start, before any socket or file is made.

use std::fs;
use std::io::Read;
use std::process::Command;

use crate::kubelet::plugin::*;

/// Status and log of a plugin that should not start.
fn refused(place: &TestNode, settings: &[&str]) -> (Option<i32>, String) {
    let mut child = Plugin::command(&place.settings(), settings, None).spawn().unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (child.wait().unwrap().code(), said)
}

#[test]
fn all_problems_are_printed_with_exit_status_64() {
    let place = TestNode::new();
    let wrong = [
        "domain=kubernetes.io",
        "shm.unit=0",
        "shm.budget=99999Ti",
        "pools=[{name: a}, {name: a}, {name: b/c}]",
        "gpuIpc.slotsPerDevice=many",
        "cdi.directory=/fake.yaml/cdi",
    ];
    let (code, said) = refused(&place, &wrong);
    assert_eq!(code, Some(64), "{said}");
    for part in [
        "domain: ",
        "shm.unit: ",
        "shm.budget: ",
        "pools[a]: duplicate pool",
        "pools[b/c].name: ",
        "gpuIpc.slotsPerDevice: ",
        "cdi.directory: ",
    ] {
        assert!(said.contains(part), "{part} is in {said}");
    }
    assert!(said.contains("7 problems"), "{said}");
    assert_eq!(fs::read_dir(place.sockets()).unwrap().count(), 0);
    for path in ["var/run", "dev/shm/shmesh", "run/shmesh"] {
        assert!(!place.path(path).exists(), "{path} was made");
    }
}

#[test]
fn missing_directory_exits_with_64() {
    let place = TestNode::new();
    fs::remove_dir(place.sockets()).unwrap();
    let (code, said) = refused(&place, &[]);
    assert_eq!(code, Some(64), "{said}");
    assert!(said.contains("mount the kubelet's directory there"), "{said}");
}

#[test]
fn contradicting_flags_exit_with_64() {
    let place = TestNode::new();
    let (code, said) = refused(&place, &["cdi.enabled=false"]);
    assert_eq!(code, Some(64), "{said}");
    assert!(said.contains("shm.budget: ") && said.contains("pools[a].gid: "), "{said}");
    let twice = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"))
        .args(["run", "--check", "--set", "shm.unit=1Mi", "--set", "shm.unit=2Mi"])
        .output()
        .unwrap();
    assert_eq!(twice.status.code(), Some(64));
    assert!(String::from_utf8(twice.stderr).unwrap().contains("set twice"));
}

#[test]
fn invalid_environment_variable_exits_with_64() {
    let exits = |command: &str, variable: &str, flag: &str| {
        let mut plugin = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"));
        plugin.args([command, flag]).env(variable, "wrong").output().unwrap().status.code()
    };
    for (command, variable) in [
        ("run", "SHMESH_LOG_FORMAT"),
        ("run", "SHMESH_PLUGIN_SET"),
        ("identity", "SHMESH_IDENTITY_SOCKET_MODE"),
        ("webhook", "SHMESH_WEBHOOK_CERTIFICATE_DAYS"),
    ] {
        assert_eq!(exits(command, variable, "--log=info"), Some(64), "{variable}");
    }
    assert_eq!(exits("run", "SHMESH_LOG_FORMAT", "--log-format=wrong"), Some(2));
}

#[test]
fn schema_is_printed() {
    let output = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin")).arg("schema").output().unwrap();
    let schema: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(schema["additionalProperties"], false);
    assert!(schema["properties"]["pools"]["description"].is_string());
}
