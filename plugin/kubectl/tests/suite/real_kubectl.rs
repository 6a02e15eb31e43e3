//! The real kubectl, where it is installed: it accepts what the program passes to the stand-in, and runs the program as its plugin.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{StandIn, in_path, pod, repository, succeeded, text};

/// The first minor version of kubectl 1 that completes the arguments of plugins.
const OLDEST: u64 = 26;

/// Whether the real kubectl is installed; the test is skipped if not, or fails where it is required.
fn has_kubectl() -> bool {
    let output = Command::new("kubectl").args(["version", "--client", "--output=json"]).output();
    let version = output.ok().and_then(|output| serde_json::from_slice::<Value>(&output.stdout).ok());
    let minor = version.as_ref().and_then(|version| version["clientVersion"]["minor"].as_str());
    // Some distributors write `32+`.
    let minor = minor.and_then(|minor| minor.trim_end_matches('+').parse::<u64>().ok());
    let is_good = minor.is_some_and(|minor| minor >= OLDEST);
    if !is_good {
        let why =
            format!("kubectl shmesh was not run by kubectl: kubectl 1.{OLDEST} or later is not installed");
        shmesh_testing::skip("KUBECTL", &why);
    }
    is_good
}

/// The real kubectl in an environment without a cluster.
fn kubectl(home: &Path) -> Command {
    let mut command = Command::new("kubectl");
    command.env("HOME", home).env("KUBECONFIG", home.join("none"));
    command
}

#[test]
fn real_kubectl_accepts_the_arguments_that_the_stand_in_gets() {
    if !has_kubectl() {
        return;
    }
    let stand_in = StandIn::new(&["phy-0"]);
    let manifest = std::fs::read_to_string(repository().join("manifests/install.yaml")).unwrap();
    for (file, kind) in [("daemonsets.json", "kind: DaemonSet"), ("deployments.json", "kind: Deployment")] {
        let object = manifest.split("\n---\n").find(|text| text.contains(kind)).unwrap();
        let object: Value = serde_saphyr::from_str(object).unwrap();
        stand_in.answer(file, &serde_json::json!({ "items": [object] }).to_string());
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
    // Arguments are read before the kubeconfig file, which has no such context.
    let refused = |args: &[&str]| text(&kubectl(home.path()).args(args).output().unwrap().stderr);
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
        let said = refused(&args);
        assert!(said.contains("context") && !said.contains("unknown"), "{call:?}: {said}");
    }
    for wrong in [
        &["get", "pods", "--frobnicate"][..],
        &["exec", "--context=c", "phy-0", "--containers", "x", "--", "y"],
    ] {
        let said = refused(wrong);
        assert!(said.contains("unknown flag"), "{said}");
    }
}

#[test]
fn real_kubectl_runs_the_plugin_and_completes_it() {
    if !has_kubectl() {
        return;
    }
    let (home, bin) = (tempfile::tempdir().unwrap(), in_path());
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let run =
        |args: &[&str]| succeeded(&kubectl(home.path()).args(args).env("PATH", &path).output().unwrap());
    let listed = run(&["shmesh", "check", "--list"]);
    assert!(listed.contains("webhook-certificate"), "{listed}");
    let completed = run(&["__complete", "shmesh", "ch"]);
    assert!(completed.starts_with("check\tCheck an installation"), "{completed}");
    let completed = run(&["__complete", "shmesh", "ls", "--all"]);
    assert!(completed.starts_with("--all-namespaces"), "{completed}");
    let completed = run(&["__complete", "shmesh", "inject", "-f", ""]);
    assert!(completed.starts_with(":0\n"), "the shell completes files: {completed}");
}
