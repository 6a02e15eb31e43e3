//! The sidecar in a restricted pod: user 65532, no capabilities, no new privileges, a read-only root.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

use crate::support::Sidecar;
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, until};

const NOBODY: u32 = 65_532;

/// Runs a program with a read-only root, except for the IPC directory, and as an unprivileged user.
const RESTRICTED: &str = r#"
set -e
dir=$1; shift
mount --make-rprivate /
mount --bind "$dir" "$dir"
mount -o remount,bind,ro /
grep ' / / ' /proc/self/mountinfo | grep -q ' ro,' || { echo "the root can still be written" >&2; exit 99; }
exec setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all -- "$@"
"#;

#[test]
fn runs_unprivileged_with_only_the_ipc_directory() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    std::os::unix::fs::chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o770)).unwrap();
    // A copy of the program that the user may run: the build directory need not be accessible to it.
    let program = tempfile::tempdir().unwrap();
    std::fs::set_permissions(program.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let binary = program.path().join("shmesh-sidecar");
    // By a process of its own: see `shmesh_testing::write_script`.
    shmesh_testing::succeed(Command::new("cp").args([env!("CARGO_BIN_EXE_shmesh-sidecar")]).arg(&binary));

    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", RESTRICTED, "sh"]).arg(dir.path()).arg(&binary);
    let sidecar = Sidecar::start_by(command, dir.path(), "mpmc", &[]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", sidecar.pid())).unwrap();
    let field =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    assert!(field("Uid:").starts_with("65532\t65532\t65532"), "{status}");
    for none in ["CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(field(none), "0000000000000000", "{none}");
    }
    assert_eq!(std::fs::metadata(dir.path().join("link_shm")).unwrap().uid(), NOBODY);

    // Everything that it does: accept clients, detect a death, broker keys, drain.
    let (mut phy, mut mac) = (Peer::start(dir.path()), Peer::start_alone(dir.path()));
    phy.tell("attach link primary 0");
    mac.tell("attach link secondary 0");
    mac.tell("hold-loan");
    mac.tell("send 1 last");
    mac.kill();
    until("it is taken back", || phy.ask("participants") == "1");
    assert_eq!(phy.ask("receive"), "1 last");
    let mut importer = Peer::start(dir.path());
    phy.tell("device connect");
    importer.tell("device connect");
    let (key, tgid) = (phy.ask("device export weights 0"), importer.ask("device tgid"));
    phy.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    sidecar.stop();
}
