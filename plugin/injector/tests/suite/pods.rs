//! Pods in and out, as files. `SHMESH_UPDATE=1 cargo test -p shmesh-injector --test suite pods` writes what comes out.

use crate::support::{check_patch, config, files, pod_of, pods, violations};
use serde_json::{Value, json};
use shmesh_injector::manifest::{OutputFormat, injected};
use shmesh_injector::{bytes_of, inject};

fn object(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap()
}

#[test]
fn injection_matches_the_golden_files() {
    let is_update = std::env::var_os("SHMESH_UPDATE").is_some();
    for file in files(&pods(), ".in.yaml") {
        let text = std::fs::read_to_string(&file).unwrap();
        let written = injected(&text, "default", &config(), OutputFormat::Yaml).unwrap();
        assert_eq!(written.warnings, [""; 0], "{}", file.display());
        let out = file.to_str().unwrap().replace(".in.yaml", ".out.yaml");
        if is_update {
            std::fs::write(&out, &written.text).unwrap();
        }
        let expected = std::fs::read_to_string(&out).unwrap();
        assert_eq!(written.text, expected, "{out}");
        assert_eq!(
            injected(&expected, "default", &config(), OutputFormat::Yaml).unwrap().text,
            expected,
            "once is twice"
        );

        let (before, after) = (object(&text), object(&expected));
        let namespace = before["metadata"]["namespace"].as_str().unwrap_or("default");
        let result = inject(pod_of(&before), namespace, &config()).unwrap();
        check_patch(pod_of(&before), &result);
        assert_eq!(&result.pod, pod_of(&after));
        assert_eq!(violations(pod_of(&before)), [""; 0], "{}", file.display());
        assert_eq!(violations(pod_of(&after)), [""; 0], "{out} passes restricted as its pod did");
    }
}

#[test]
fn refusals_have_line_and_remedy() {
    let mut wrong = Vec::new();
    for file in files(&pods().join("refused"), ".yaml") {
        let named = file.file_name().unwrap().display().to_string();
        let text = std::fs::read_to_string(&file).unwrap();
        let expected = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("# {key}: ")));
            line.unwrap_or_else(|| panic!("{named} has no {key}"))
        };
        let pod = object(&text);
        let namespace = pod["metadata"]["namespace"].as_str().unwrap_or("default");
        let refusal = inject(&pod, namespace, &config()).expect_err(&named);
        let said = refusal.to_string();
        let place = format!("{} {}", refusal.line, refusal.column);
        let has_words = expected("says").split(" | ").all(|words| said.contains(words));
        if refusal.reason != expected("reason") || place != expected("place") || !has_words {
            wrong.push(format!("{named}: {}: {said}", refusal.reason));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn sidecar_resources_match_the_links() {
    let links = "- name: a\n- { name: b, ring: { len: 8 }, backing: memfd }\n";
    let pod = json!({
        "metadata": {"annotations": {"shmesh.io/links": links}},
        "spec": {"securityContext": {"runAsUser": 1}, "containers": [{"name": "a"}]},
    });
    let out = inject(&pod, "default", &config()).unwrap().pod;
    let real = |at: usize| {
        let dir = tempfile::tempdir().unwrap();
        let links = shmesh::config::from_annotation(links).unwrap().links;
        shmesh::LinkOptions::new().dir(dir.path()).keep(&links[at]).unwrap().segment_bytes()
    };
    let (named, memfd) = (real(0), real(1));
    assert_eq!(bytes_of(&out["spec"]["volumes"][0]["emptyDir"]["sizeLimit"]), Some(named), "exactly");
    let resources = &out["spec"]["initContainers"][0]["resources"];
    let limit = bytes_of(&resources["limits"]["memory"]).unwrap();
    assert!(limit > named + memfd && limit < named + memfd + (18 << 20), "{limit}");
    assert_eq!(resources["limits"]["memory"], resources["requests"]["memory"]);
}

#[test]
fn guaranteed_pod_stays_guaranteed() {
    let pod = |resources: Value| {
        json!({
            "metadata": {"annotations": {"shmesh.io/links": "- name: a"}},
            "spec": {"securityContext": {"runAsUser": 1}, "containers": [{"name": "a", "resources": resources}]},
        })
    };
    let limits_of = |resources| {
        let out = inject(&pod(resources), "default", &config()).unwrap().pod;
        out["spec"]["initContainers"][0]["resources"]["limits"].clone()
    };
    assert_eq!(limits_of(json!({"limits": {"cpu": "4", "memory": "1Gi"}}))["cpu"], "50m");
    assert_eq!(
        limits_of(json!({"limits": {"cpu": "4", "memory": "1Gi"}, "requests": {"cpu": "1"}}))["cpu"],
        Value::Null
    );
    assert_eq!(limits_of(json!({}))["cpu"], Value::Null);
}

#[test]
fn sidecar_runs_as_the_user_of_its_links() {
    let user = |spec: &str| {
        let text =
            format!("{{ metadata: {{ annotations: {{ shmesh.io/links: '- name: a' }} }}, spec: {spec} }}");
        let result = inject(&object(&text), "default", &config()).unwrap();
        let context = result.pod["spec"]["initContainers"][0]["securityContext"].clone();
        (context["runAsUser"].as_u64(), result.warnings.len())
    };
    assert_eq!(
        user("{ securityContext: { runAsUser: 7 }, containers: [{ name: a }] }"),
        (None, 0),
        "inherited"
    );
    assert_eq!(user("{ containers: [{ name: a, securityContext: { runAsUser: 8 } }] }"), (Some(8), 0));
    assert_eq!(user("{ securityContext: { runAsUser: 0 }, containers: [{ name: a }] }"), (Some(65_532), 0));
    assert_eq!(user("{ containers: [{ name: a }] }"), (None, 1), "root, probably");
}

#[test]
fn without_identity_service_a_shared_pid_namespace_is_required() {
    let config = shmesh_injector::Config { agent_resource: String::new(), ..config() };
    let text = "{ metadata: { annotations: { shmesh.io/links: '- name: a' } },
                  spec: { securityContext: { runAsUser: 7 }, containers: [{ name: a }] } }";
    let mut pod = object(text);
    let refusal = inject(&pod, "default", &config).unwrap_err();
    assert_eq!(refusal.reason, "identity");
    assert!(refusal.remedy.contains("give the links scope claim/<name>"), "{refusal}");
    // Of a release whose nodes have the service.
    let injected = inject(&pod, "default", &crate::support::config()).unwrap().pod;
    assert_eq!(inject(&injected, "default", &config).unwrap().pod, injected);
    pod["spec"]["shareProcessNamespace"] = true.into();
    let limits =
        inject(&pod, "default", &config).unwrap().pod["spec"]["initContainers"][0]["resources"]["limits"]
            .clone();
    assert_eq!(limits.as_object().unwrap().len(), 1, "memory alone: {limits}");
}

const EXACT: &str = "- name: a\n- { name: b, ring: { len: 64 }, pools: { cpu_data: { pool_len: 3 } } }\n";

/// Run by the test below, in a mount namespace of its own.
#[test]
fn rotator() {
    let Some(dir) = std::env::var_os("SHMESH_TEST_TMPFS") else { return };
    for link in shmesh::config::from_annotation(EXACT).unwrap().links {
        let options = shmesh::LinkOptions::new().dir(&dir);
        let rotator = options.keep(&link).unwrap();
        // A participant needs nothing beside it.
        drop(rotator);
    }
}

/// A tmpfs of the `sizeLimit` holds the links, and one a page smaller does not.
#[test]
fn shm_size_limit_is_exact() {
    let pod = json!({
        "metadata": {"annotations": {"shmesh.io/links": EXACT}},
        "spec": {"securityContext": {"runAsUser": 1}, "containers": [{"name": "a"}]},
    });
    let out = inject(&pod, "default", &config()).unwrap().pod;
    let size = bytes_of(&out["spec"]["volumes"][0]["emptyDir"]["sizeLimit"]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run = |size: u64, what: &str| {
        let script = format!("mount -t tmpfs -o size={size} tmpfs \"$SHMESH_TEST_TMPFS\" && exec {what}");
        std::process::Command::new("unshare")
            .args(["-m", "sh", "-c", &script])
            .env("SHMESH_TEST_TMPFS", dir.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
    };
    if !run(1 << 20, "true").is_ok_and(|status| status.success()) {
        eprintln!("skipped: nothing can be mounted here");
        return;
    }
    let rotator = format!("{} --exact pods::rotator", std::env::current_exe().unwrap().display());
    assert!(run(size, &rotator).unwrap().success(), "{size}");
    assert!(!run(size - 4096, &rotator).unwrap().success(), "{size} is more than is needed");
}

#[test]
fn share_warns_where_the_pool_is_not_at_dev_shm() {
    let pod = |pool: &str| {
        json!({
            "metadata": {"annotations": {"shmesh.io/share": pool}},
            "spec": {"containers": [{"name": "shmesh"}]},
        })
    };
    let wide = inject(&pod("wide"), "default", &config()).unwrap();
    assert!(matches!(&wide.warnings[..], [one] if one.contains("pool wide is mounted at /run/wide")));
    let container = &wide.pod["spec"]["containers"][0];
    assert_eq!(container["env"], json!([{"name": "SHMESH_DIR", "value": "/run/wide"}]), "of whatever name");
    assert_eq!(container["resources"]["limits"], json!({"shmesh.io/wide": "1"}));
    let none = inject(&pod("radio"), "default", &shmesh_injector::Config::default()).unwrap_err();
    assert!(none.remedy.starts_with("no pool is configured") && none.reason == "pool", "{none}");
}

#[test]
fn claim_of_a_pod_with_a_user_namespace_needs_a_setting() {
    for annotation in [
        json!({"shmesh.io/share": "claim/du"}),
        json!({"shmesh.io/links": "- {name: a, scope: claim/du, side: secondary}"}),
    ] {
        let mut pod =
            json!({"metadata": {"annotations": annotation}, "spec": {"containers": [{"name": "a"}]}});
        assert_eq!(inject(&pod, "default", &config()).unwrap().warnings, [""; 0]);
        pod["spec"]["hostUsers"] = false.into();
        let warnings = inject(&pod, "default", &config()).unwrap().warnings;
        assert!(
            matches!(&warnings[..], [one] if one.contains("claim du must have userNamespaces: always")),
            "{warnings:?}"
        );
    }
}

#[test]
fn container_with_another_request_of_the_claim_is_warned_of() {
    for annotation in [("links", "- { name: a, scope: claim/du, side: primary }"), ("share", "claim/du")] {
        let warnings = |request: &str| {
            let pod = json!({
                "metadata": {"annotations": {format!("shmesh.io/{}", annotation.0): annotation.1}},
                "spec": {
                    "securityContext": {"runAsUser": 1},
                    "resourceClaims": [{"name": "du", "resourceClaimName": "du"}],
                    "containers": [{"name": "a", "resources": {"claims": [{"name": "du", "request": request}]}}],
                },
            });
            inject(&pod, "default", &config()).unwrap().warnings
        };
        assert_eq!(warnings("domain"), [""; 0]);
        let warned = warnings("gpu");
        assert!(
            matches!(&warned[..], [one] if one.contains("container a uses only gpu of claim du")),
            "{warned:?}"
        );
    }
}

#[test]
fn library_is_not_copied_as_root() {
    let user = |context: Value| {
        let pod = json!({
            "metadata": {"annotations": {"shmesh.io/share": "radio", "shmesh.io/as": " posix\n"}},
            "spec": {"securityContext": context, "containers": [{"name": "a"}]},
        });
        let result = inject(&pod, "default", &config()).unwrap();
        result.pod["spec"]["initContainers"][0]["securityContext"]["runAsUser"].as_u64()
    };
    assert_eq!(user(json!({"runAsUser": 7})), None, "inherited");
    assert_eq!(user(json!(null)), None, "the image's");
    assert_eq!(user(json!({"runAsUser": 0})), Some(65_532));
}
