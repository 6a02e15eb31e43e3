//! The real kubectl, where it is installed: it accepts what the program passes to the stand-in, and runs the program as its plugin.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use crate::{StandIn, in_path, pod, repository, succeeded, text};

/// The real kubectl in an environment without a cluster; `None`, with a message, where there is none.
fn kubectl(home: &Path) -> Option<Command> {
    let mut command = Command::new("kubectl");
    if command.arg("version").arg("--client").output().is_err() {
        eprintln!("skipped: kubectl is not installed");
        return None;
    }
    let mut command = Command::new("kubectl");
    command.env("HOME", home).env("KUBECONFIG", home.join("none"));
    Some(command)
}

#[test]
fn real_kubectl_accepts_the_arguments_that_the_stand_in_gets() {
    let stand_in = StandIn::new(&["phy-0"]);
    let manifest = std::fs::read_to_string(repository().join("manifests/install.yaml")).unwrap();
    for kind in ["daemonsets", "deployments"] {
        let object = manifest.split("\n---\n").find(|text| {
            text.contains(&format!("kind: {}", if kind == "daemonsets" { "DaemonSet" } else { "Deployment" }))
        });
        let object: serde_json::Value = serde_saphyr::from_str(object.unwrap()).unwrap();
        stand_in.answer(&format!("{kind}.json"), &serde_json::json!({ "items": [object] }).to_string());
    }
    stand_in.answer("version.json", "{}");
    stand_in.answer("pod-phy-0.json", &pod("phy-0").to_string());
    let cluster = ["--context", "c", "--request-timeout", "1s"];
    for args in [
        &["check"][..],
        &["ls", "-A", "-l", "app=phy", "--node", "worker-1"],
        &["who", "radio", "-n", "ran"],
        &["dump", "radio", "phy-0"],
        &["top", "phy-0", "--count", "1"],
    ] {
        stand_in.run(&[args, &cluster].concat());
    }
    let calls = stand_in.calls();
    assert!(calls.iter().any(|call| call.contains(&"secret".to_owned())), "{calls:?}");
    let home = tempfile::tempdir().unwrap();
    let refused = |args: &[&str]| -> Option<String> {
        // Arguments are read before the kubeconfig file, which has no such context.
        let output: Output = kubectl(home.path())?.args(args).output().unwrap();
        Some(text(&output.stderr))
    };
    // One call of each form: without a server, kubectl takes any kind.
    let form = |call: &Vec<String>| {
        let options = call
            .iter()
            .filter(|arg| arg.starts_with('-'))
            .map(|arg| arg.split('=').next().map(str::to_owned));
        (call.contains(&"exec".to_owned()), options.collect::<Vec<_>>())
    };
    let forms: BTreeMap<_, _> = calls.iter().map(|call| (form(call), call)).collect();
    assert!(forms.len() >= 8, "{forms:?}");
    for call in forms.values() {
        let args: Vec<&str> = call.iter().map(String::as_str).collect();
        let Some(said) = refused(&args) else { return };
        assert!(said.contains("context") && !said.contains("unknown"), "{call:?}: {said}");
    }
    for wrong in [
        &["get", "pods", "--frobnicate"][..],
        &["exec", "--context=c", "phy-0", "--containers", "x", "--", "y"],
    ] {
        let said = refused(wrong).unwrap();
        assert!(said.contains("unknown flag"), "{said}");
    }
}

#[test]
fn real_kubectl_runs_the_plugin_and_completes_it() {
    let (home, bin) = (tempfile::tempdir().unwrap(), in_path());
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let run = |args: &[&str]| {
        Some(succeeded(&kubectl(home.path())?.args(args).env("PATH", &path).output().unwrap()))
    };
    let Some(listed) = run(&["shmesh", "check", "--list"]) else { return };
    assert!(listed.contains("webhook-certificate"), "{listed}");
    let completed = run(&["__complete", "shmesh", "ch"]).unwrap();
    assert!(completed.starts_with("check\tCheck an installation"), "{completed}");
    let completed = run(&["__complete", "shmesh", "ls", "--all"]).unwrap();
    assert!(completed.starts_with("--all-namespaces"), "{completed}");
}
