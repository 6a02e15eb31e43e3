//! The two users of the DaemonSet's pod: uid 0 without capabilities makes the directory, uid 65532 serves in it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const PLUGIN: &str = env!("CARGO_BIN_EXE_shmesh-plugin");

/// This program as this user, without capabilities, as a container of the pod.
fn as_user(user: &str, args: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", user, "--regid", user, "--groups", "65532"]);
    command.args(["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", PLUGIN]).args(args);
    command
}

fn run(user: &str, args: &[&str]) -> Output {
    as_user(user, args).output().unwrap()
}

#[test]
fn prepared_directory_works_for_another_user() {
    let can = Command::new("setpriv").args(["--reuid", "65532", "--clear-groups", "true"]).status();
    if !can.is_ok_and(|status| status.success()) {
        eprintln!("skipped: running as another user requires root and setpriv");
        return;
    }
    // Like /run/shmesh: owned by root and searchable by all. The program must be reachable too.
    let parent = tempfile::tempdir_in("/run").unwrap();
    fs::set_permissions(parent.path(), fs::Permissions::from_mode(0o755)).unwrap();
    if !Path::new(PLUGIN).ancestors().skip(1).all(|dir| dir.metadata().unwrap().permissions().mode() & 1 != 0)
    {
        eprintln!("skipped: the program is in a directory that another user cannot enter");
        return;
    }
    let directory = parent.path().join("agent");
    let socket = directory.join("agent.sock");
    let (directory, socket) = (directory.to_str().unwrap(), socket.to_str().unwrap());
    let refused = run("65532", &["prepare", "--directory", directory]);
    assert!(!refused.status.success(), "another user must not be able to");

    let other = run("0", &["prepare", "--directory", directory, "--gid", "60001"]);
    let said = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && said.contains("supplementalGroups"), "{said}");

    for _ in 0..2 {
        let made = run("0", &["prepare", "--directory", directory]);
        assert!(made.status.success(), "{made:?}");
        assert!(
            !run("0", &["identity", "--check", "--socket", socket]).status.success(),
            "no service listens yet"
        );
        let mut service =
            as_user("65532", &["identity", "--socket", socket]).stderr(Stdio::null()).spawn().unwrap();
        while !run("65532", &["identity", "--check", "--socket", socket]).status.success() {
            assert!(service.try_wait().unwrap().is_none(), "the service ended");
        }
        // Killed: what it leaves behind is replaced by the next.
        service.kill().unwrap();
        service.wait().unwrap();
    }
}
