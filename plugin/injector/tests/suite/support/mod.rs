//! Pods in files, and the rules of Pod Security *restricted*.

use std::path::{Path, PathBuf};

use serde_json::Value;
use shmesh_injector::{Config, Injection, Operation};

/// Where the pods are.
pub(crate) fn pods() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pods")
}

pub(crate) fn config() -> Config {
    serde_saphyr::from_str(&std::fs::read_to_string(pods().join("config.yaml")).unwrap()).unwrap()
}

/// The files of a folder whose names end so, in order.
pub(crate) fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let listed = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = listed.filter(|path| path.to_str().unwrap().ends_with(end)).collect();
    found.sort();
    assert!(!found.is_empty(), "no {end} in {}", folder.display());
    found
}

/// The pod, or the pod of the template.
pub(crate) fn pod_of(object: &Value) -> &Value {
    object.pointer("/spec/template").unwrap_or(object)
}

/// Another implementation of patches agrees, and nothing that was there is written over.
pub(crate) fn check_patch(before: &Value, injected: &Injection) {
    let mut patched = before.clone();
    for Operation { op, path, value } in &injected.operations {
        if *op == "replace" {
            // Of the kind that adds, too: what was there stays, at the beginning.
            let text = patched.pointer_mut(path).unwrap();
            let (old, new) = (text.as_str().unwrap(), value.as_str().unwrap());
            assert!(
                path.ends_with("/value") && new.starts_with(old) && new != old,
                "{path}: {old} is written over"
            );
            *text = value.clone();
            continue;
        }
        assert_eq!(*op, "add");
        let is_list =
            path.rsplit_once('/').is_some_and(|(list, _)| patched.pointer(list).unwrap().is_array());
        assert!(is_list || patched.pointer(path).is_none_or(Value::is_null), "{path} is written over");
        let patch = serde_json::json!([{ "op": op, "path": path, "value": value }]);
        let patch: json_patch::Patch = serde_json::from_value(patch).unwrap();
        json_patch::patch(&mut patched, &patch).unwrap();
    }
    assert_eq!(patched, injected.pod);
}

/// The violations of Pod Security *restricted* (1.33) by a pod.
/// <https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted>
pub(crate) fn violations(pod: &Value) -> Vec<String> {
    let spec = &pod["spec"];
    let mut found = Vec::new();
    for key in ["hostNetwork", "hostPID", "hostIPC"] {
        if spec[key] == true {
            found.push(key.to_owned());
        }
    }
    let allowed = [
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ];
    for volume in spec["volumes"].as_array().into_iter().flatten() {
        for kind in volume.as_object().unwrap().keys().filter(|key| *key != "name") {
            if !allowed.contains(&kind.as_str()) {
                found.push(format!("volume {kind}"));
            }
        }
    }
    let of_pod = &spec["securityContext"];
    if !of_pod["sysctls"].as_array().is_none_or(Vec::is_empty) {
        found.push("sysctls".into());
    }
    let lists = ["initContainers", "containers", "ephemeralContainers"];
    for container in lists.iter().filter_map(|list| spec[list].as_array()).flatten() {
        let context = &container["securityContext"];
        let name = container["name"].as_str().unwrap();
        let effective = |key: &str| if context[key].is_null() { &of_pod[key] } else { &context[key] };
        let mut no = |what: &str, is_so: bool| {
            if is_so {
                found.push(format!("{name}: {what}"));
            }
        };
        no("privileged", context["privileged"] == true);
        no("allowPrivilegeEscalation", context["allowPrivilegeEscalation"] != false);
        no("runAsNonRoot", effective("runAsNonRoot") != true);
        no("runAsUser", effective("runAsUser") == 0);
        let seccomp = &effective("seccompProfile")["type"];
        no("seccompProfile", seccomp != "RuntimeDefault" && seccomp != "Localhost");
        let dropped = context["capabilities"]["drop"].as_array();
        no("capabilities.drop", !dropped.is_some_and(|drop| drop.iter().any(|name| name == "ALL")));
        let added = context["capabilities"]["add"].as_array();
        no("capabilities.add", !added.is_none_or(|add| add.iter().all(|name| name == "NET_BIND_SERVICE")));
        let mount = &context["procMount"];
        no("procMount", !mount.is_null() && mount != "Default");
        let windows = &effective("windowsOptions")["hostProcess"];
        no("hostProcess", windows == true);
        let ports = container["ports"].as_array().into_iter().flatten();
        no("hostPort", ports.filter_map(|port| port["hostPort"].as_u64()).any(|port| port != 0));
        for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
            no("probe host", !container[probe]["httpGet"]["host"].is_null());
        }
    }
    found
}
