//! `shmesh-plugin inject` and `shmesh-plugin webhook`, as they are called.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shmesh_injector::certificate::make;
use shmesh_testing::{http_get, until};

const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: p, annotations: {shmesh.io/links: '- name: a'}}\n\
                   spec: {securityContext: {runAsUser: 1000}, containers: [{name: a, image: a}]}\n";

fn inject(flags: &[&str], input: &str) -> Output {
    command("inject", flags, input)
}

fn command(name: &str, flags: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"))
        .arg(name)
        .args(flags)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It may end before it has read all.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

#[test]
fn documents_from_standard_input() {
    let map = "kind: ConfigMap # as it was\n";
    let out = inject(&["-f", "-"], &format!("{map}---\n{POD}"));
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(
        out.status.success() && text.starts_with(map) && text.contains("restartPolicy: Always"),
        "{text}"
    );
    let again = inject(&["-f", "-"], &text);
    assert_eq!(String::from_utf8(again.stdout).unwrap(), text);
    let json = inject(&["-f", "-", "-o", "json"], &text);
    let list: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!((&list["kind"], list["items"].as_array().unwrap().len()), (&"List".into(), 2));
}

#[test]
fn refusal_writes_no_document() {
    let bad = POD.replace("- name: a'", "- name: a/b'");
    let out = inject(&["-f", "-", "-n", "radio"], &format!("{POD}---\n{bad}"));
    assert_eq!((out.status.code(), out.stdout.len()), (Some(1), 0));
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(
        said.contains("Pod radio/p: metadata.annotations[shmesh.io/links]")
            && said.contains("(line 1, column 9)"),
        "{said}"
    );
    assert!(said.starts_with("error: Pod radio/p: "), "{said}");
    assert_eq!(inject(&["-f", "/nonexistent"], "").status.code(), Some(1));
    assert_eq!(inject(&[], "").status.code(), Some(2), "a file must be named");
}

#[test]
fn claim_for_the_links_of_a_pod() {
    let out = command("claim", &["-f", "-", "-n", "du", "--namespace", "radio", "-o", "json"], POD);
    let claim: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((out.status.code(), out.stderr.len()), (Some(0), 0));
    assert_eq!(claim["kind"], "ResourceClaim");
    assert_eq!(claim["metadata"], serde_json::json!({"name": "du", "namespace": "radio"}));
    let template = command("claim", &["-f", "-", "--template"], POD);
    let template = String::from_utf8(template.stdout).unwrap();
    assert!(
        template.contains("kind: ResourceClaimTemplate\n") && template.contains("name: p\n"),
        "{template}"
    );

    let bad = POD.replace("- name: a'", "- name: a/b'");
    let out = command("claim", &["-f", "-"], &bad);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!((out.status.code(), out.stdout.len()), (Some(1), 0));
    assert!(said.starts_with("error: Pod default/p: ") && said.contains("(line 1, column 9)"), "{said}");
    let none = command("claim", &["-f", "-"], "kind: ConfigMap\n");
    assert_eq!(none.status.code(), Some(1), "{none:?}");
    assert_eq!(command("claim", &["-f", "/nonexistent"], "").status.code(), Some(1));
    assert_eq!(command("claim", &[], "").status.code(), Some(2), "a file must be named");
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("injector.yaml");
    std::fs::write(&config, "domian: x\n").unwrap();
    let out = command("claim", &["-f", "-", "--config", config.to_str().unwrap()], POD);
    assert_eq!(out.status.code(), Some(64), "{out:?}");
}

#[test]
fn closed_output_pipe_is_not_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let pod = dir.path().join("pod.yaml");
    std::fs::write(&pod, POD).unwrap();
    for args in [&["schema"][..], &["inject", "-f", pod.to_str().unwrap()]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"));
        let output = command.args(args).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}: {output:?}");
    }
}

#[test]
fn text_logs_are_coloured_only_on_terminals() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"));
    let output =
        command.args(["run", "--set", "nonsense=1", "--check", "--log-format", "text"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("nonsense") && !said.contains('\x1b'), "{said:?}");
}

/// How a mistake at line 2 and column 5 of a file is shown.
fn snippet(name: &str, line: &str) -> String {
    format!("\n --> {name}:2:5\n  |\n2 | {line}\n  |     ^")
}

#[test]
fn yaml_errors_have_one_format() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    let path = file.to_str().unwrap();
    let (text, line) = ("domain: x\n - a: b\n", " - a: b");
    std::fs::write(&file, text).unwrap();
    let mut run = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"));
    let log = run.args(["run", "--check", "--config", path]).output().unwrap().stderr;
    let log: serde_json::Value = serde_json::from_slice(&log).unwrap();
    let commands = [inject(&["-f", "-", "--config", path], POD), inject(&["-f", "-"], text)];
    let said = commands.map(|output| String::from_utf8(output.stderr).unwrap());
    let [config, document] = said;
    for (name, said) in [(path, log["message"].as_str().unwrap()), (path, &config), ("document 1", &document)]
    {
        assert!(said.contains(&snippet(name, line)), "{said}");
        assert!(said.matches(":2:5").count() == 1 && !said.contains("line 2"), "{said}");
    }
}

#[test]
fn unknown_configuration_keys_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("injector.yaml");
    let with = |text: &str, pod: &str| {
        std::fs::write(&file, text).unwrap();
        inject(&["-f", "-", "--config", file.to_str().unwrap()], pod)
    };
    let out =
        with("domain: mesh.example\nsidecar: { image: mine }\n", &POD.replace("shmesh.io", "mesh.example"));
    assert!(String::from_utf8(out.stdout).unwrap().contains("image: mine"));
    let out = with("domian: x\n", POD);
    assert_eq!(out.status.code(), Some(64));
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(said.contains("domian") && said.contains("injector.yaml"), "{said}");
}

/// A webhook that ends with the test.
struct Webhook {
    child: Child,
    admin: String,
}

impl Drop for Webhook {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Webhook {
    fn start(dir: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"))
            .args(["webhook", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--linger-seconds", "0"])
            .args([
                "--tls-cert",
                dir.join("tls.crt").to_str().unwrap(),
                "--tls-key",
                dir.join("tls.key").to_str().unwrap(),
            ])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let admin = lines
            .find_map(|line| {
                let line: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
                (line["message"] == "serving probes and metrics")
                    .then(|| line["address"].as_str().unwrap().to_owned())
            })
            .unwrap();
        // What it says later must find a reader.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, admin }
    }

    fn ask(&self, path: &str) -> String {
        http_get(&self.admin, path).unwrap()
    }
}

#[test]
fn webhook_is_ready_with_a_certificate_and_stops_on_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let mut webhook = Webhook::start(dir.path());
    assert!(webhook.ask("/livez").contains(" 200 "));
    until("it waits for a certificate", || webhook.ask("/readyz").contains("waits for: certificate"));
    let bundle = make(&["a.svc".to_owned()], Duration::from_secs(86_400), SystemTime::now(), None).unwrap();
    std::fs::write(dir.path().join("tls.crt"), &bundle.certificate).unwrap();
    std::fs::write(dir.path().join("tls.key"), &bundle.key).unwrap();
    until("it is ready", || webhook.ask("/readyz").contains(" 200 "));
    assert!(webhook.ask("/metrics").contains("shmesh_injector_admission_seconds"));
    kill(Pid::from_raw(webhook.child.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    assert_eq!(webhook.child.wait().unwrap().code(), Some(0));
}
