//! The command line tool asks a running sidecar.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::{Daemon, program};
use serde_json::Value;
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, until, write_script};

fn shmesh(dir: &Path, args: &[&str]) -> Output {
    Command::new(program("shmesh")).args(args).env("SHMESH_DIR", dir).output().unwrap()
}

fn ok(dir: &Path, args: &[&str]) -> String {
    let output = shmesh(dir, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(dir: &Path, args: &[&str]) -> Value {
    serde_json::from_str(&ok(dir, args)).unwrap()
}

/// A ready sidecar that keeps the link `link`.
fn sidecar_of_link(dir: &Path) -> Daemon {
    let mut sidecar = Command::new(program("shmesh-sidecar"));
    sidecar.args(["--link", "link", "--any-file-system", "--log-format", "json"]);
    sidecar.args(["--dir", dir.to_str().unwrap()]);
    Daemon::start(sidecar, "\"ready\"")
}

#[test]
fn commands_who_and_keys_list_clients_and_keys() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = sidecar_of_link(dir.path());
    let dir = dir.path();
    assert_eq!(ok(dir, &["keys", "link"]), "no device keys\n");

    let (mut exporter, mut importer) = (Peer::start(dir), Peer::start(dir));
    exporter.tell("attach link primary 1000");
    exporter.tell("device connect");
    importer.tell("device connect");
    let (from, to) = (exporter.ask("device tgid"), importer.ask("device tgid"));
    let key = exporter.ask("device export weights 0");
    exporter.tell(&format!("device admit {key} {to}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");

    let who = || json(dir, &["who", "link", "--output", "json"]);
    let process = |who: &Value, tgid: &str| {
        let all = who["processes"].as_array().unwrap();
        let tgid: i32 = tgid.parse().unwrap();
        all.iter().find(|one| one["bare_tgid"] == tgid).unwrap_or_else(|| panic!("{who}")).clone()
    };
    until("it has told of its seat", || process(&who(), &from)["seats"][0]["side"] == "primary");
    let shown = who();
    assert_eq!(shown["served_by"], "sidecar");
    let (exporting, importing) = (process(&shown, &from), process(&shown, &to));
    assert_eq!((&exporting["exports"], &exporting["imports"]), (&1.into(), &0.into()));
    assert_eq!((&importing["exports"], &importing["imports"]), (&0.into(), &1.into()));
    let table = ok(dir, &["who", "link"]);
    assert!(table.contains("kept by a sidecar") && table.contains("0 primary"), "{table}");

    let keys = json(dir, &["keys", "link", "--output", "json"]);
    let [shown] = &keys["keys"].as_array().unwrap()[..] else { panic!("{keys}") };
    assert_eq!((shown["exporter"].to_string(), shown["importers"][0].to_string()), (from.clone(), to));
    assert_eq!(
        (&shown["size_bytes"], &shown["mechanism"], &shown["admitted"]),
        (&4096.into(), &"host".into(), &1.into())
    );
    let table = ok(dir, &["keys", "link"]);
    assert!(table.contains(&from) && table.contains("4 KiB"), "{table}");
    assert!(!table.contains(&key) && !keys.to_string().contains(&key), "never the key");
}

#[test]
fn unrelated_user_is_refused_with_a_hint() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let mut sidecar = Command::new("unshare");
    sidecar.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(program("shmesh-sidecar"));
    sidecar.args(["--link", "link", "--any-file-system", "--log-format", "json"]);
    sidecar.args(["--dir", dir.path().to_str().unwrap()]);
    let sidecar = Daemon::start(sidecar, "\"ready\"");
    for name in ["who", "keys"] {
        let output = shmesh(dir.path(), &[name, "link"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(said.contains("run the command in the sidecar's container"), "{said}");
        // As `kubectl exec` into its container.
        let inside = sidecar.child();
        let output = Command::new("nsenter")
            .args(["--pid", "--mount", "--target", &inside])
            .arg(program("shmesh"))
            .args([name, "link", "--dir", dir.path().to_str().unwrap()])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// A stand-in for kubectl with one pod, in which commands run on this machine.
const KUBECTL: &str = r#"#!/bin/sh
case "$1" in
get) echo '{"metadata": {"name": "phy", "namespace": "ran"}, "spec": {"nodeName": "worker"},
    "status": {"initContainerStatuses": [{"name": "shmesh", "state": {"running": {}}}]}}' ;;
exec) shift 8; exec "$SHMESH" "$@" ;;
esac
"#;

#[test]
fn kubectl_plugin_reads_what_the_command_prints_in_a_pod() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = sidecar_of_link(dir.path());
    let mut peer = Peer::start(dir.path());
    peer.tell("attach link primary 1000");
    peer.tell("device connect");
    let (tgid, scripts) = (peer.ask("device tgid"), tempfile::tempdir().unwrap());
    let kubectl = scripts.path().join("kubectl");
    write_script(&kubectl, KUBECTL);
    let row = |args: &[&str]| {
        let mut command = Command::new(program("kubectl-shmesh"));
        command.args(args).arg("--kubectl").arg(&kubectl);
        let output = command.env("SHMESH", program("shmesh")).env("SHMESH_DIR", dir.path()).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().nth(1).unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    until("it has told of its seat", || row(&["who", "link"]).contains(&"primary".to_owned()));
    let who = row(&["who", "link"]);
    assert_eq!(who[..5], ["ran", "phy", "worker", "link", tgid.as_str()]);
    let ls = row(&["ls"]);
    assert!(
        !ls.contains(&"unusable".to_owned()) && ls.ends_with(&["-", "0", "0"].map(str::to_owned)),
        "{ls:?}"
    );
    assert!(ls[6].ends_with("Ki") || ls[6].ends_with("Mi"), "{ls:?}");
    let top = row(&["top", "--count", "1", "--interval", "1"]);
    assert!(top[5].parse::<u32>().is_ok() && top[7..12] == ["0", "/s", "0", "/s", "0"], "{top:?}");
    assert!(row(&["dump", "link"])[..2] == ["link", "link:"]);
}
