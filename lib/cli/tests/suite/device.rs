//! `shmesh device check` with a double of the driver, and without any.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use serde_json::Value;

fn check(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh"));
    command.args(["device", "check"]).args(args).envs(variables.iter().copied()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn missing_driver_has_its_own_exit_status() {
    let nowhere = [("SHMESH_CUDA_LIBRARY", "/nowhere/libcuda.so.1")];
    let found = check(&[], &nowhere);
    let said = text(&found.stdout);
    assert_eq!(found.status.code(), Some(3), "{said}");
    assert!(said.contains("/nowhere/libcuda.so.1") && said.contains("no device was found"), "{said}");
    let found = check(&["--output", "json"], &nowhere);
    let report: Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!((found.status.code(), report["verdict"].as_str()), (Some(3), Some("no_device")));
}

#[test]
fn old_driver_is_not_a_missing_device() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = std::fs::read(shmesh_fake_cuda::library()).unwrap();
    // The double, with one of its functions under another name.
    let name = b"cuMemCreate\0";
    for at in (0..bytes.len() - name.len()).rev() {
        if bytes[at..].starts_with(name) {
            bytes[at] = b'x';
        }
    }
    let old = dir.path().join("libcuda.so.1");
    std::fs::write(&old, bytes).unwrap();
    let found =
        check(&["--rounds", "1", "--max-bytes", "4Mi"], &[("SHMESH_CUDA_LIBRARY", old.to_str().unwrap())]);
    let said = text(&found.stdout);
    assert_eq!(found.status.code(), Some(1), "{said}");
    assert!(said.contains("without cuMemCreate") && said.contains("has no cuMemCreate"), "{said}");
}

/// Where permitted, mounts a file system there for this thread and its children, whose memory no other test uses.
fn own_memory(dir: &Path) {
    // Root in a container mostly may not.
    if unshare(CloneFlags::CLONE_NEWNS).is_err() {
        return;
    }
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
    mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), Some("size=64m")).unwrap();
}

#[test]
fn all_checks_run_on_the_fake_driver() {
    run_all_checks("1", false);
}

#[test]
#[ignore = "long: more rounds, and once more for the output that people read"]
fn all_checks_run_in_rounds_and_for_people() {
    run_all_checks("3", true);
}

fn run_all_checks(rounds: &str, also_for_people: bool) {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    own_memory(dir.path());
    // All users may use devices.
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    // And so is the driver's library; the tree of the build need not be.
    let place = tempfile::tempdir().unwrap();
    std::fs::set_permissions(place.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let library = place.path().join("libcuda.so.1");
    std::fs::copy(shmesh_fake_cuda::library(), &library).unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let contexts = || std::fs::read_to_string(log.path()).unwrap().lines().count();
    let variables = [
        ("SHMESH_CUDA_LIBRARY", library.to_str().unwrap()),
        ("FAKE_CUDA_CONTEXT_LOG", log.path().to_str().unwrap()),
        // The free bytes of the directory's file system are the device's.
        ("FAKE_CUDA_DIR", dir.path().to_str().unwrap()),
    ];
    let found = check(&["--output", "json", "--rounds", rounds, "--max-bytes", "4Mi"], &variables);
    let report: Value =
        serde_json::from_slice(&found.stdout).unwrap_or_else(|_| panic!("{}", text(&found.stderr)));
    assert_eq!(found.status.code(), Some(0), "{report:#}");
    assert_eq!((&report["verdict"], &report["device"]), (&"works".into(), &"fake CUDA device".into()));
    let findings = report["findings"].as_array().unwrap();
    let of = |step: &str| {
        findings
            .iter()
            .filter(|finding| finding["id"].as_str().unwrap().starts_with(step))
            .collect::<Vec<_>>()
    };
    for step in ["P0", "P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9"] {
        assert!(!of(step).is_empty(), "{step}: {report:#}");
    }
    for exact in of("P1 exact") {
        assert_eq!((&exact["value"]["wrong_there"], &exact["value"]["wrong_back"]), (&0.into(), &0.into()));
    }
    if nix::unistd::Uid::effective().is_root() {
        for kind in ["none", "pid", "ipc", "mount", "net", "uts", "cgroup", "all"] {
            assert_eq!(of(&format!("P4 {kind}, cuda-vmm"))[0]["status"], "ok", "{kind}");
            let legacy = if matches!(kind, "pid" | "all") { "note" } else { "ok" };
            assert_eq!(of(&format!("P4 {kind}, cuda-legacy"))[0]["status"], legacy, "{kind}");
        }
    }
    if nix::unistd::Uid::effective().is_root() {
        assert_eq!(of("P4 pid, numbers differ")[0]["status"], "ok");
        assert_eq!(of("P4 another user, cuda-vmm")[0]["status"], "ok");
        // The double's are files of one user.
        assert_eq!(of("P4 another user, cuda-legacy")[0]["status"], "note");
    }
    assert!(of("P9")[0]["value"]["round_trip_p50_ns"].as_u64().unwrap() > 0);

    // Each process makes one context, before anything is measured.
    let before = contexts();
    assert!(before > 0);
    if also_for_people {
        let found = check(&["--rounds", "1", "--max-bytes", "4Mi"], &variables);
        assert_eq!(contexts() - before, before);
        let said = text(&found.stdout);
        assert!(said.starts_with("P0 probe") && said.contains("P9 timeline"), "{said}");
    }
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "nothing is left behind");
    // Nothing is mounted there where it takes more than this test has.
    let _ = umount2(dir.path(), MntFlags::MNT_DETACH);
}
