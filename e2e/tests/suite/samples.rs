//! The samples below the cluster: a sidecar with the pod's annotation, and the containers' own commands, as processes. What
//! injection and the kubelet add is not tried here.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::program;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Ended with the test, however that ends.
struct RunningSample(Child);

impl RunningSample {
    fn start(mut command: Command) -> Self {
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    /// Asked to end; in order.
    fn end(mut self) {
        kill(Pid::from_raw(self.0.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for RunningSample {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The pods of a sample.
fn pods(sample: &str) -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/samples").join(sample);
    let documents: Vec<Value> = serde_saphyr::from_multiple(&fs::read_to_string(file).unwrap()).unwrap();
    documents.into_iter().filter(|one| one["kind"] == "Pod").collect()
}

/// The container's command, with the program that was built here.
fn command(container: &Value, dir: &Path) -> Command {
    let words: Vec<_> =
        container["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    let mut command = Command::new(program(words[0]));
    command.args(&words[1..]).env("SHMESH_DIR", dir).stdout(Stdio::piped());
    command
}

/// Runs a sample of two containers until the second has said this, and both end in order.
fn talks(sample: &str, said: &str) {
    // Another text would be waited for without end.
    let _watchdog = shmesh_testing::Watchdog::start();
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let pods = pods(sample);
    let annotation = dir.path().join("links.yaml");
    let links = pods[0]["metadata"]["annotations"]["shmesh.io/links"].as_str().unwrap();
    fs::write(&annotation, links).unwrap();
    let mut sidecar = Command::new(program("shmesh-sidecar"));
    sidecar.arg("--annotation").arg(&annotation).env("SHMESH_DIR", dir.path()).stderr(Stdio::null());
    let sidecar = RunningSample::start(sidecar);
    let containers: Vec<&Value> =
        pods.iter().flat_map(|pod| pod["spec"]["containers"].as_array().unwrap()).collect();
    // Both sides wait until the link exists.
    let mut primary = RunningSample::start(command(containers[0], dir.path()));
    // Kept open: a process that writes to a closed pipe ends.
    let _read = attached(&mut primary);
    let mut secondary = RunningSample::start(command(containers[1], dir.path()));
    let lines = attached(&mut secondary);
    let is_said = |line: &String| line.contains(said) && !line.contains("received 0,");
    assert!(lines.map_while(Result::ok).any(|line| is_said(&line)), "{sample}: {said}");
    for one in [secondary, primary, sidecar] {
        one.end();
    }
}

type Lines = std::io::Lines<BufReader<std::process::ChildStdout>>;

fn attached(talk: &mut RunningSample) -> Lines {
    let mut lines = BufReader::new(talk.0.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("attached to "));
    lines
}

#[test]
fn two_containers_of_a_pod() {
    talks("two-containers.yaml", "lost or duplicate 0");
}

#[test]
fn exporter_and_importer_share_device_memory() {
    talks("device-memory.yaml", "read 1048576 bytes of the other side's region; all are as written");
}

/// The first line that is no count: those depend on the time.
fn first_but_counts(said: &[String]) -> &str {
    said.iter().find(|line| !line.starts_with("sent ")).expect("another line")
}

/// As pods: what `e2e/pods/device-keys.yaml` runs, with this process in the place of the node's first.
#[test]
fn leaked_device_key_is_refused() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut sidecar = Command::new(program("shmesh-sidecar"));
    let audit = tempfile::NamedTempFile::new().unwrap();
    sidecar.args(["--link", "weights", "--audit"]).arg(audit.path());
    sidecar.env("SHMESH_DIR", dir.path()).stderr(Stdio::null());
    let sidecar = RunningSample::start(sidecar);
    let talk = |side: &str, more: &[&str]| {
        let mut command = Command::new(program("shmesh"));
        command.args(["talk", "weights", "--region", "--side", side]).args(more);
        RunningSample::start({
            command.env("SHMESH_DIR", dir.path()).stdout(Stdio::piped());
            command
        })
    };
    let mut lender = talk("primary", &[]);
    let _read = attached(&mut lender);
    let admitted = std::process::id().to_string();
    let mut wrong = talk("secondary", &["--ask-for", &admitted]);
    let said: Vec<_> = attached(&mut wrong).map_while(Result::ok).collect();
    assert!(wrong.0.wait().unwrap().success(), "it ends well because it was refused: {said:?}");
    assert_eq!(first_but_counts(&said), format!("refused: the key is for process {admitted}"));
    assert!(fs::read_to_string(audit.path()).unwrap().contains("\"not_admitted\""));
    let mut right = talk("secondary", &[]);
    assert!(attached(&mut right).map_while(Result::ok).any(|line| line.starts_with("read 1048576 bytes")));
    right.end();
    lender.end();
    for flags in [&["--ask-for", "1"][..], &["--refused"], &["--service-account", "a/b"]] {
        let mut command = Command::new(program("shmesh"));
        command.args(["talk", "weights", "--side", "secondary"]).args(flags);
        let output = command.env("SHMESH_DIR", dir.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?} is for --region");
    }

    // What `e2e/pods/service-accounts.yaml` runs, outside of pods: no process has a service account.
    let mut owner = talk("primary", &["--service-account", "radio/reader"]);
    let _read = attached(&mut owner);
    let mut stranger = talk("secondary", &["--refused"]);
    let said: Vec<_> = attached(&mut stranger).map_while(Result::ok).collect();
    assert!(stranger.0.wait().unwrap().success(), "{said:?}");
    assert_eq!(first_but_counts(&said), "refused: the key is not for this process");
    for one in [owner, sidecar] {
        one.end();
    }
}
