//! Output, exit status and calls of the program.

use std::process::Command;

use serde_json::Value;
use shmesh_injector::{ClaimKind, Config, claims, manifest};

use crate::{PROGRAM, StandIn, repository, succeeded, text};

const LINKS: &str = r#"{"links": [
    {"name": "radio", "usable": true, "ring": {"mode": "spsc", "len": 1024}, "bytes": 25165824, "queued": {"m2s": 3, "s2m": 0},
     "participants": [{"side": "primary", "pid": 10, "state": "alive"}, {"side": "secondary", "pid": 20, "state": "dead"}]},
    {"name": "bad", "usable": false, "error": "link bad: damaged"}
]}"#;

/// One link with samples, one without, and one that cannot be read.
const RATES: &str = r#"{"interval_seconds": 1.0, "links": [
    {"name": "radio", "usable": true, "mode": "spsc", "messages_per_second": {"m2s": 1500.5, "s2m": null}, "queued": {"m2s": 3, "s2m": 1},
     "wake_ups_per_second": 0.0, "pools": [{"pool": "cpu_msg", "used": 1, "len": 4}, {"pool": "cpu_data", "used": 3, "len": 4}],
     "latency_seconds": {"p50": 3.1e-7, "p99": 0.004}, "participants": [{"side": "primary", "pid": 10, "state": "alive", "asleep": true}]},
    {"name": "plain", "usable": true, "mode": "mpmc", "messages_per_second": {"m2s": 0.0, "s2m": 12345678.0}, "queued": {"m2s": 0, "s2m": 0},
     "wake_ups_per_second": 20.0, "pools": [{"pool": "cpu_msg", "used": 0, "len": 4}], "latency_seconds": null, "participants": []},
    {"name": "bad", "usable": false, "error": "link bad: damaged"}
]}"#;

const PROCESSES: &str = r#"{"link": "radio", "processes": [
    {"bare_tgid": 4711, "uid": 10001, "sessions": 1, "exports": 2, "imports": 0, "seats": [{"seat": 3, "side": "primary", "pid": 7}],
     "pod": {"uid": "u", "namespace": "ran", "name": "phy-0"}}
]}"#;

#[test]
fn ls_has_a_row_for_each_link_of_each_pod() {
    let kubectl = StandIn::new(&["phy-0", "phy-1"]);
    kubectl.answer("phy-0-ls", LINKS);
    kubectl.answer("phy-1-ls", r#"{"links": []}"#);
    let printed = succeeded(&kubectl.run(&["ls", "-A", "-l", "app=phy", "--node", "worker-1"]));
    assert_eq!(
        printed,
        "NAMESPACE  POD    NODE      LINK   RING                         SIZE  PRIMARY  SECONDARY  M2S  S2M\n\
         ran        phy-0  worker-1  radio  spsc 1024                    24Mi  10       20 dead      3    0\n\
         ran        phy-0  worker-1  bad    unusable: link bad: damaged\n"
    );
    let listed = "get pods --field-selector=spec.nodeName=worker-1 --selector=app=phy --all-namespaces";
    assert!(kubectl.calls().iter().any(|call| call[..5].join(" ") == listed), "{:?}", kubectl.calls());
    let exec = "exec --namespace ran phy-1 --container shmesh -- shmesh ls --output json";
    assert!(kubectl.calls().iter().any(|call| call.join(" ") == exec));
    let json: Value = serde_json::from_str(&succeeded(&kubectl.run(&["ls", "--output", "json"]))).unwrap();
    assert_eq!(
        (&json[0]["namespace"], &json[0]["pod"], &json[0]["node"]),
        (&"ran".into(), &"phy-0".into(), &"worker-1".into())
    );
    assert_eq!((&json[0]["links"][0]["name"], json.as_array().unwrap().len()), (&"radio".into(), 2));
}

#[test]
fn pod_that_does_not_answer_does_not_hold_up_the_others() {
    let kubectl = StandIn::new(&["hangs", "phy-0", "fails"]);
    kubectl.answer("hangs-ls.hangs", "");
    kubectl.answer("phy-0-ls", LINKS);
    kubectl.answer("fails-ls.error", "error: Internal error occurred: executable file not found in $PATH\n");
    // The two that answer may need longer than a second on a busy machine.
    let (seconds, output) = ["1", "5", "25"]
        .iter()
        .map(|seconds| (seconds, kubectl.run(&["ls", "--timeout", seconds])))
        .find(|(_, output)| text(&output.stderr).matches("did not end within").count() == 1)
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (printed, said) = (text(&output.stdout), text(&output.stderr));
    assert!(printed.contains("phy-0  worker-1  radio"), "{printed}");
    for part in [
        "error: pod ran/hangs: ",
        &format!("did not end within {seconds} s; look at the pod"),
        "exec --namespace ran fails --container shmesh",
        "executable file not found in $PATH; the image of the container has no command shmesh",
    ] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn pods_without_the_link_are_left_out() {
    let kubectl = StandIn::new(&["phy-0", "other"]);
    let missing = "error: link radio: not found\ncommand terminated with exit code 1\n";
    for command in ["who", "dump"] {
        kubectl.answer(&format!("other-{command}.error"), missing);
    }
    kubectl.answer("phy-0-who", PROCESSES);
    kubectl.answer("phy-0-dump", "link radio: ring spsc 1024\n\x1b[2J\n");
    let printed = succeeded(&kubectl.run(&["who", "radio"]));
    assert!(
        printed.ends_with("radio  4711  10001  ran/phy-0         1  3 primary        2        0\n"),
        "{printed}"
    );
    assert_eq!(printed.lines().count(), 2, "{printed}");
    assert_eq!(
        succeeded(&kubectl.run(&["dump", "radio"])),
        "pod ran/phy-0 on node worker-1\nlink radio: ring spsc 1024\n\u{fffd}[2J\n"
    );
    let only_other = StandIn::new(&["other"]);
    only_other.answer("other-who.error", missing);
    let output = only_other.run(&["who", "radio"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no sidecar of the selected pods has a link radio"));
}

#[test]
fn top_prints_the_rates_of_each_interval() {
    let kubectl = StandIn::new(&["phy-0", "phy-1"]);
    kubectl.answer("phy-0-top", RATES);
    kubectl.answer("phy-1-top", RATES);
    let printed = succeeded(&kubectl.run(&["top", "--count", "2", "--output", "json"]));
    let lines: Vec<Value> = printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let pods: Vec<&Value> = lines.iter().map(|line| &line["pod"]).collect();
    assert_eq!(pods, ["phy-0", "phy-1", "phy-0", "phy-1"]);
    let printed = succeeded(&kubectl.run(&["top", "--count", "1", "--interval", "5"]));
    let table: Vec<&str> = printed.lines().collect();
    assert_eq!(
        [table[0], &table[4..].join("\n")],
        [
            "NAMESPACE  POD    NODE      LINK   RING      PRIMARY  SECONDARY    M2S/S      S2M/S  QUEUED  POOL          ASLEEP  WOKEN/S     P50      P99",
            "ran        phy-1  worker-1  radio  spsc      10       -          1.5 k/s          -       4  cpu_data 75%       1     0 /s  310 ns  4.00 ms\n\
             ran        phy-1  worker-1  plain  mpmc      -        -             0 /s  12.35 M/s       0  cpu_msg 0%         0    20 /s       -        -\n\
             ran        phy-1  worker-1  bad    unusable\n\
             pod ran/phy-0: link bad: damaged\n\
             pod ran/phy-1: link bad: damaged"
        ]
    );
    assert!(kubectl.calls().iter().any(|call| call.ends_with(&["--interval".into(), "5".into()])));
}

#[test]
fn answer_without_rates_is_an_error_of_its_pod() {
    let kubectl = StandIn::new(&["phy-0", "odd"]);
    kubectl.answer("phy-0-top", RATES);
    kubectl.answer("odd-top", r#"{"links": [{"name": 7}]}"#);
    let output = kubectl.run(&["top", "--count", "1"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("phy-0  worker-1  radio"), "{output:?}");
    let said = text(&output.stderr);
    assert!(
        said.contains("error: pod ran/odd: the answer of its sidecar is not one of `shmesh top`"),
        "{said}"
    );
}

#[test]
fn options_of_the_cluster_are_passed_on() {
    let kubectl = StandIn::new(&[]);
    let options = ["--context", "c", "--kubeconfig", "/f", "--request-timeout", "5s", "-n", "ran"];
    let output = kubectl.run(&[&["ls"], &options[..]].concat());
    assert_eq!(succeeded(&output), "no links\n");
    assert!(text(&output.stderr).contains("-A selects the pods of all namespaces"));
    let call = "--context=c --kubeconfig=/f --request-timeout=5s get pods --namespace=ran --output=json";
    assert_eq!(kubectl.calls(), [call.split(' ').collect::<Vec<_>>()]);
}

#[test]
fn errors_name_the_command_and_a_remedy() {
    let kubectl = StandIn::new(&[]);
    let said = |args: &[&str]| {
        let output = kubectl.run(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        text(&output.stderr)
    };
    kubectl.answer("pod-mac.json", r#"{"kind": "Pod", "metadata": {"name": "mac", "namespace": "ran"}}"#);
    assert!(said(&["ls", "mac"]).contains("pod mac has no running container shmesh"));
    let missing = said(&["ls", "gone"]);
    assert!(
        missing.contains("kubectl get pods gone --output=json` failed: Error from server (NotFound)"),
        "{missing}"
    );
    assert!(missing.contains("check the name and --namespace"), "{missing}");
    kubectl.answer("pod-phy.json.error", "Error from server (Forbidden): pods is forbidden\n");
    assert!(said(&["ls", "phy"]).contains("ask the cluster's administrator for this right"));
    let output = Command::new(PROGRAM).args(["ls", "--kubectl", "/nonexistent"]).output().unwrap();
    assert!(text(&output.stderr).contains("install kubectl, or give its path by --kubectl"), "{output:?}");
    assert_eq!(kubectl.run(&["ls", "--frobnicate"]).status.code(), Some(2));
}

#[test]
fn check_without_an_installation_fails_with_a_remedy() {
    let kubectl = StandIn::new(&[]);
    kubectl.answer("version.json", r#"{"major": "1", "minor": "36", "gitVersion": "v1.36.2"}"#);
    kubectl.answer("daemonsets.json", r#"{"items": []}"#);
    let output = kubectl.run(&["check", "--output", "json"]);
    assert_eq!(output.status.code(), Some(1));
    let answers: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let of = |id: &str| answers.iter().find(|answer| answer["id"] == id).unwrap();
    assert_eq!(of("api-server")["outcome"], "ok");
    assert_eq!(of("installation")["outcome"], "failure");
    assert!(of("installation")["remedy"].as_str().unwrap().contains("helm install"));
    assert!(of("pods-pending")["outcome"] == "skipped" && answers.len() >= 30);
    let listed = succeeded(&kubectl.run(&["check", "--list"]));
    assert_eq!(listed.lines().count(), answers.len());
}

#[test]
fn cluster_that_does_not_answer_is_asked_once() {
    let kubectl = StandIn::new(&[]);
    kubectl.answer("version.json.error", "The connection to the server localhost:8080 was refused\n");
    let output = kubectl.run(&["check"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stdout).contains("remedy: choose a cluster by --context or --kubeconfig"),
        "{output:?}"
    );
    assert_eq!(kubectl.calls().len(), 1);
}

#[test]
fn inject_and_claim_are_those_of_the_injector() {
    let sample = repository().join("manifests/samples/two-containers.yaml");
    let path = sample.to_str().unwrap();
    let yaml = std::fs::read_to_string(&sample).unwrap();
    let run = |args: &[&str]| succeeded(&Command::new(PROGRAM).args(args).output().unwrap());
    let injected =
        manifest::injected(&yaml, "default", &Config::default(), manifest::OutputFormat::Yaml).unwrap();
    assert_eq!(run(&["inject", "-f", path]), injected.text);
    let (text, _) = claims(
        &yaml,
        "default",
        Some("x"),
        &Config::default(),
        ClaimKind::Claim,
        manifest::OutputFormat::Yaml,
    )
    .unwrap();
    assert_eq!(run(&["claim", "-f", path, "-n", "x"]), text);
    let output =
        Command::new(PROGRAM).args(["inject", "-f", path, "--config", "/nonexistent"]).output().unwrap();
    assert_eq!(output.status.code(), Some(64));
}

/// Runs the program on a terminal of 60 columns.
const ON_A_TERMINAL: &str = "
import fcntl, os, pty, struct, sys, termios
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 60, 0, 0))
    os.execv(sys.argv[1], sys.argv[1:])
while True:
    try:
        data = os.read(terminal, 4096)
    except OSError:
        break
    if not data:
        break
    sys.stdout.buffer.write(data)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";

/// Runs `kubectl shmesh` on such a terminal, and returns its output.
fn on_terminal(kubectl: &StandIn, args: &[&str], variables: &[(&str, &str)]) -> String {
    let mut command = Command::new("python3");
    command.args(["-c", ON_A_TERMINAL, PROGRAM]).args(args).arg("--kubectl").arg(kubectl.path("kubectl"));
    command.env_remove("NO_COLOR").env("TERM", "xterm").envs(variables.iter().copied());
    succeeded(&command.output().unwrap())
}

#[test]
fn colours_and_width_follow_the_terminal() {
    let kubectl = StandIn::new(&["a-pod-with-quite-a-long-name"]);
    kubectl.answer("a-pod-with-quite-a-long-name-ls", LINKS);
    let plain = succeeded(&kubectl.run(&["ls"]));
    assert!(!plain.contains('\x1b') && plain.contains("a-pod-with-quite-a-long-name"), "{plain:?}");
    let colored = on_terminal(&kubectl, &["ls"], &[]);
    assert!(colored.starts_with("\x1b[90mNAMES"), "{colored:?}");
    let plain = on_terminal(&kubectl, &["ls"], &[("NO_COLOR", "1")]);
    assert!(!plain.contains('\x1b') && plain.contains('…'), "{plain:?}");
    // Ten columns of at least six characters need more than 60.
    assert!(plain.lines().all(|line| line.chars().count() <= 10 * 6 + 9 * 2), "{plain}");
}

#[test]
fn narrow_terminal_shortens_names_but_not_numbers() {
    let kubectl = StandIn::new(&["a-pod-with-quite-a-long-name"]);
    kubectl.answer("a-pod-with-quite-a-long-name-top", RATES);
    let printed = on_terminal(&kubectl, &["top", "--count", "1"], &[("NO_COLOR", "1")]);
    let row = printed.lines().find(|line| line.contains("radio")).unwrap_or_default();
    assert!(row.contains("a-pod…") && !row.contains("a-pod-with"), "{printed}");
    assert!(row.contains("1.5 k/s") && row.ends_with("310 ns  4.00 ms"), "{printed}");
}

#[test]
fn completions_are_for_three_shells() {
    for shell in ["bash", "zsh", "fish"] {
        let script = succeeded(&Command::new(PROGRAM).args(["completions", shell]).output().unwrap());
        assert!(script.contains("kubectl-shmesh") && script.contains("check"), "{shell}: {script}");
    }
}

#[test]
fn reference_page_has_the_help_of_every_subcommand() {
    let about = "The plugin of kubectl. [monitoring.md](../monitoring.md#check-an-installation) explains it.";
    shmesh_testing::assert_reference("kubectl-shmesh.md", &shmesh_testing::help_page(PROGRAM, about));
}
