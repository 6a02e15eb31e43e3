//! Prepare, Unprepare and start on real directories: crashes at each step, reboots, damage and limits.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kubelet_dra::{DeviceStatuses, Driver};
use serde_json::{Value, json};
use shmesh_daemon::log_limit::LogLimit;
use shmesh_fake_kubelet::{ApiServer, Clock};
use tokio::sync::watch;

use super::checkpoint::Checkpoint;
use super::claim_metrics::ClaimMetrics;
use super::claim_plan::{AllocatedDevice, ClaimGrant, ClaimPlan, ClaimRefusal, DomainGrant, plan_claim};
use super::claim_store::{ClaimStore, CrashPoint, StoreError, StoreSettings};
use super::device_names::{ClaimDevice, claim_devices};
use super::driver::{DomainDriver, SharedClaims, device_health};
use crate::cdi::SpecFiles;
use crate::config::{Config, FrontEnd};
use crate::devices::{Accelerator, AcceleratorKind, PciPlace};
use crate::pools::{self, SweepReport};
use crate::resource::{NodeResources, plan};

const A: &str = "aaaaaaaa-0000-1111-2222-333333333333";
const B: &str = "bbbbbbbb-0000-1111-2222-333333333333";

impl ClaimStore {
    /// Releases, erases and forgets, as the driver does.
    fn unprepare(&mut self, uid: &str) -> Result<SweepReport, StoreError> {
        let left = self.release(uid)?;
        self.erase(uid, &left)
    }

    /// As the garbage collector does.
    fn retry(&mut self) -> SweepReport {
        let mut sum = SweepReport::default();
        for uid in self.released() {
            let left = self.paths_to_erase(&uid).unwrap();
            let erased = self.erase(&uid, &left).unwrap();
            sum.files += erased.files;
            sum.failures += erased.failures;
        }
        sum
    }

    fn erase(&mut self, uid: &str, left: &[PathBuf]) -> Result<SweepReport, StoreError> {
        let mut sum = SweepReport::default();
        for path in left {
            let erased = pools::erase(path);
            sum.files += erased.files;
            sum.failures += erased.failures;
        }
        self.forget(uid)?;
        Ok(sum)
    }
}

/// A node with the directories of the driver.
struct Node {
    dir: tempfile::TempDir,
    boot: &'static str,
    gids: std::ops::Range<u32>,
}

impl Node {
    fn new() -> Self {
        // Only this group can be given away without capabilities; root can give any.
        let gid = nix::unistd::getegid().as_raw();
        let gids = if nix::unistd::geteuid().is_root() { 61_000..61_256 } else { gid..gid + 1 };
        Self { dir: tempfile::tempdir_in("/dev/shm").unwrap(), boot: "first", gids }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn claims(&self) -> PathBuf {
        self.path("shm/claims")
    }

    fn checkpoint(&self) -> PathBuf {
        self.path("state/claims.checkpoint")
    }

    /// A start, with the first round of the garbage collector.
    fn open(&self) -> ClaimStore {
        let mut store = self.open_at(self.claims());
        store.retry();
        store
    }

    fn shared(&self) -> SharedClaims {
        SharedClaims::new(self.open(), ClaimMetrics::default(), None)
    }

    fn open_at(&self, seen_directory: PathBuf) -> ClaimStore {
        ClaimStore::open(StoreSettings {
            directory: "/dev/shm/shmesh-claims".into(),
            seen_directory,
            state_directory: self.path("state"),
            gids: self.gids.clone(),
            files: SpecFiles { directory: self.path("cdi"), domain: "shmesh.io".into() },
            agent: "/run/shmesh/agent".into(),
            seen_agent: self.path("agent"),
            boot_id: self.boot.into(),
        })
        .unwrap()
    }

    fn spec(&self, uid: &str) -> Option<Value> {
        let file = self.path("cdi").join(format!("shmesh.io-claim-{uid}.json"));
        fs::read(file).ok().map(|text| serde_json::from_slice(&text).unwrap())
    }

    /// Everything that claims have on the node: directories, specifications, leased groups.
    fn census(&self) -> (Vec<String>, Vec<String>, Vec<u32>) {
        let names = |dir: &Path| {
            let mut names: Vec<_> = fs::read_dir(dir)
                .map(|entries| entries.map(|one| one.unwrap().file_name().into_string().unwrap()).collect())
                .unwrap_or_default();
            names.sort();
            names
        };
        let checkpoint = Checkpoint::load(&self.checkpoint()).unwrap().unwrap();
        let gids = checkpoint.claims.values().filter_map(|entry| entry.gid).collect();
        (names(&self.claims()), names(&self.path("cdi")), gids)
    }

    fn assert_nothing(&self, when: &str) {
        assert_eq!(self.census(), (vec![], vec![], vec![]), "{when}");
    }

    /// One claim has one directory, one specification, one group.
    fn assert_one(&self, uid: &str, when: &str) {
        let (mut directories, specs, gids) = self.census();
        // What is being erased is no claim's.
        directories.retain(|name| !name.starts_with('.'));
        assert_eq!(directories, [uid], "{when}");
        assert_eq!(specs, [format!("shmesh.io-claim-{uid}.json")], "{when}");
        assert_eq!(gids.len(), 1, "{when}");
        let found = fs::metadata(self.claims().join(uid)).unwrap();
        assert_eq!((found.mode() & 0o7777, found.gid()), (0o3770, gids[0]), "{when}");
        let spec = self.spec(uid).unwrap();
        assert_eq!(spec["devices"][0]["containerEdits"]["additionalGids"], json!([gids[0]]), "{when}");
    }
}

fn grant(name: &str) -> ClaimGrant {
    let domain = DomainGrant { bytes: 2 << 20, mount_path: "/dev/shm".into(), has_user_namespaces: false };
    ClaimGrant {
        namespace: "radio".into(),
        name: name.into(),
        suffix: name.to_uppercase(),
        domain: Some(domain),
        pools: Vec::new(),
        gpus: Vec::new(),
        npus: Vec::new(),
    }
}

#[test]
fn claim_is_one_directory_one_group_and_one_specification() {
    let node = Node::new();
    let mut store = node.open();
    store.prepare(A, &grant("a")).unwrap();
    let edits = node.spec(A).unwrap()["devices"][0]["containerEdits"].clone();
    assert_eq!(edits["mounts"].as_array().unwrap().len(), 1, "no identity service, no mount of it");
    assert!(!edits["env"].to_string().contains("SHMESH_IDENTITY"), "{edits}");
    fs::create_dir(node.path("agent")).unwrap();
    for _ in 0..3 {
        store.prepare(A, &grant("a")).unwrap();
        node.assert_one(A, "prepared");
    }
    let spec = node.spec(A).unwrap();
    assert_eq!((&spec["cdiVersion"], &spec["kind"]), (&json!("0.7.0"), &json!("shmesh.io/claim")));
    assert_eq!(spec["devices"].as_array().unwrap().len(), 1);
    assert_eq!(spec["devices"][0]["name"], A);
    let edits = &spec["devices"][0]["containerEdits"];
    let env = json!([
        "SHMESH_CLAIM=radio/a",
        "SHMESH_BYTES=2097152",
        "SHMESH_DIR_A=/dev/shm",
        "SHMESH_BYTES_A=2097152",
        "SHMESH_IDENTITY=/run/shmesh/agent/agent.sock",
        "SHMESH_DIR=/dev/shm"
    ]);
    assert_eq!(edits["env"], env);
    let mounts = json!([
        {
            "hostPath": format!("/dev/shm/shmesh-claims/{A}"), "containerPath": "/dev/shm", "type": "none",
            "options": ["rbind", "rw", "nosuid", "nodev", "noexec", "rprivate"],
        },
        {
            "hostPath": "/run/shmesh/agent", "containerPath": "/run/shmesh/agent", "type": "none",
            "options": ["rbind", "ro", "nosuid", "nodev", "noexec", "rprivate"],
        },
    ]);
    assert_eq!(edits["mounts"], mounts);
    // What containers write is gone with the claim, and what links name is not.
    fs::write(node.path("precious"), "x").unwrap();
    let directory = node.claims().join(A);
    fs::create_dir_all(directory.join("sub/sub")).unwrap();
    fs::write(directory.join("sub/sub/file"), vec![1; 10_000]).unwrap();
    symlink(node.path("precious"), directory.join("link")).unwrap();
    symlink(node.dir.path(), directory.join("sub/up")).unwrap();
    let erased = store.unprepare(A).unwrap();
    assert_eq!((erased.files, erased.failures), (5, 0));
    node.assert_nothing("released");
    assert_eq!(fs::read(node.path("precious")).unwrap(), b"x");
    assert_eq!(store.unprepare(A).unwrap().files, 0, "a claim that is unknown is released");
}

#[test]
fn specification_that_was_lost_is_written_again() {
    let node = Node::new();
    let mut store = node.open();
    store.prepare(A, &grant("a")).unwrap();
    fs::remove_dir_all(node.path("cdi")).unwrap();
    store.prepare(A, &grant("a")).unwrap();
    node.assert_one(A, "prepared again");
    fs::remove_dir_all(node.path("cdi")).unwrap();
    drop(store);
    node.open();
    node.assert_one(A, "after a start");
}

/// The steps of a call, with how often each is passed before the crash.
const OF_PREPARE: [(CrashPoint, u32); 4] = [
    (CrashPoint::Staged, 0),
    (CrashPoint::Leased, 0),
    (CrashPoint::DirectoryCreated, 0),
    (CrashPoint::SpecWritten, 0),
];
const OF_UNPREPARE: [(CrashPoint, u32); 7] = [
    (CrashPoint::Staged, 0),
    (CrashPoint::Released, 0),
    (CrashPoint::SpecRemoved, 0),
    (CrashPoint::DirectoryMoved, 0),
    (CrashPoint::DirectoryRemoved, 0),
    (CrashPoint::Staged, 1),
    (CrashPoint::Forgotten, 0),
];

/// The step after the crash: the same call, the other one, or a start, in the same process or a new one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum After {
    Same,
    Other,
    StartThenSame,
    StartThenOther,
}

const AFTER: [After; 4] = [After::Same, After::Other, After::StartThenSame, After::StartThenOther];

#[test]
fn crash_at_each_step_of_prepare_is_repaired() {
    for crash in OF_PREPARE {
        for after in AFTER {
            let when = format!("{crash:?}, then {after:?}");
            let node = Node::new();
            let mut store = node.open();
            store.crash = Some(crash);
            assert!(matches!(store.prepare(A, &grant("a")), Err(StoreError::Crashed(_))), "{when}");
            // A process that continues has what it had in memory; a new one reads the disk.
            store.crash = None;
            if matches!(after, After::StartThenSame | After::StartThenOther) {
                store = node.open();
            }
            if matches!(after, After::Same | After::StartThenSame) {
                store.prepare(A, &grant("a")).unwrap();
                node.assert_one(A, &when);
            }
            store.unprepare(A).unwrap();
            // A staged checkpoint that nothing reads is replaced by the next.
            node.assert_nothing(&when);
            drop(store);
            node.open();
            node.assert_nothing(&when);
        }
    }
}

#[test]
fn crash_at_each_step_of_unprepare_is_repaired() {
    for crash in OF_UNPREPARE {
        for after in AFTER {
            let when = format!("{crash:?}, then {after:?}");
            let node = Node::new();
            let mut store = node.open();
            store.prepare(A, &grant("a")).unwrap();
            fs::write(node.claims().join(A).join("file"), "x").unwrap();
            store.crash = Some(crash);
            assert!(matches!(store.unprepare(A), Err(StoreError::Crashed(_))), "{when}");
            store.crash = None;
            if matches!(after, After::StartThenSame | After::StartThenOther) {
                store = node.open();
                // Only a crash before the release leaves something to release.
                if crash != (CrashPoint::Staged, 0) {
                    node.assert_nothing(&when);
                }
            }
            if matches!(after, After::Other | After::StartThenOther) {
                store.prepare(A, &grant("a")).unwrap();
                node.assert_one(A, &when);
            }
            store.unprepare(A).unwrap();
            node.assert_nothing(&when);
        }
    }
}

#[test]
fn crash_between_creation_and_mode_is_repaired() {
    let node = Node::new();
    let mut store = node.open();
    store.crash = Some((CrashPoint::Leased, 0));
    store.prepare(A, &grant("a")).unwrap_err();
    // As after `mkdir` and before `fchown`; and half of a specification.
    fs::create_dir_all(node.claims()).unwrap();
    fs::create_dir(node.claims().join(A)).unwrap();
    fs::set_permissions(node.claims().join(A), fs::Permissions::from_mode(0o700)).unwrap();
    fs::create_dir_all(node.path("cdi")).unwrap();
    fs::write(node.path("cdi").join(format!("shmesh.io-claim-{A}.new")), "{\"cdiVer").unwrap();
    let mut store = node.open();
    node.assert_one(A, "after a start");
    store.unprepare(A).unwrap();
    node.assert_nothing("released");
}

#[test]
fn reboot_leaves_nothing_of_the_boot_before() {
    // The tmpfs and the specifications are gone, or still there, as where they are on a disk.
    for keeps_files in [false, true] {
        let mut node = Node::new();
        let mut store = node.open();
        store.prepare(A, &grant("a")).unwrap();
        store.prepare(B, &ClaimGrant { domain: None, ..grant("b") }).unwrap();
        drop(store);
        if !keeps_files {
            fs::remove_dir_all(node.path("shm")).unwrap();
            fs::remove_dir_all(node.path("cdi")).unwrap();
        }
        node.boot = "second";
        let mut store = node.open();
        node.assert_nothing("after a reboot");
        // The kubelet prepares the claims of its pods again.
        store.prepare(A, &grant("a")).unwrap();
        node.assert_one(A, "prepared after a reboot");
        assert_eq!(Checkpoint::load(&node.checkpoint()).unwrap().unwrap().boot_id, "second");
    }
}

/// Nothing is synchronised with the disk: the last content can be an old one, or part of one.
#[test]
fn torn_checkpoint_of_the_boot_before_holds_nothing() {
    for part in ["nothing", "half", "zeros"] {
        for keeps_specifications in [false, true] {
            let when = format!("{part} of it, specifications on a disk: {keeps_specifications}");
            let mut node = Node::new();
            node.open().prepare(A, &grant("a")).unwrap();
            let whole = fs::read(node.checkpoint()).unwrap();
            let torn = match part {
                "nothing" => Vec::new(),
                "half" => whole[..whole.len() / 2].to_vec(),
                _ => vec![0; whole.len()],
            };
            fs::write(node.checkpoint(), torn).unwrap();
            fs::remove_dir_all(node.path("shm")).unwrap();
            if !keeps_specifications {
                fs::remove_dir_all(node.path("cdi")).unwrap();
            }
            node.boot = "second";
            let mut store = node.open();
            assert_eq!(node.census().2, [] as [u32; 0], "{when}");
            if keeps_specifications {
                // The kubelet knows the claim of a pod that did not come back.
                store.unprepare(A).unwrap();
            }
            node.assert_nothing(&when);
            store.prepare(A, &grant("a")).unwrap();
            node.assert_one(A, &when);
        }
    }
}

#[test]
fn tmpfs_that_is_gone_without_a_reboot_is_made_again() {
    let node = Node::new();
    node.open().prepare(A, &grant("a")).unwrap();
    fs::remove_dir_all(node.path("shm")).unwrap();
    fs::remove_dir_all(node.path("cdi")).unwrap();
    node.open();
    node.assert_one(A, "after a start");
}

#[test]
fn damaged_checkpoint_loses_nothing_of_running_pods() {
    let spoils: [fn(&str) -> Vec<u8>; 8] = [
        |_| Vec::new(),
        |text| text.as_bytes()[..text.len() - 2].to_vec(),
        |text| text.replacen("\"gid\":", "\"gid\":1", 1).into_bytes(),
        |text| text.replacen("claims 1 ", "claims 2 ", 1).into_bytes(),
        |_| b"{}\n".to_vec(),
        |_| vec![0xff; 100],
        |_| vec![0; 4096],
        |text| format!("{text}{text}").into_bytes(),
    ];
    for (at, spoil) in spoils.into_iter().enumerate() {
        let node = Node::new();
        node.open().prepare(A, &grant("a")).unwrap();
        let (_, _, gids) = node.census();
        let file = node.claims().join(A).join("file");
        fs::write(&file, "x").unwrap();
        let good = fs::read_to_string(node.checkpoint()).unwrap();
        fs::write(node.checkpoint(), spoil(&good)).unwrap();
        let mut store = node.open();
        node.assert_one(A, &format!("after damage {at}"));
        assert_eq!(node.census().2, gids, "and the group stays leased");
        let kept = if at == 3 { "claims.other-version" } else { "claims.damaged" };
        assert!(file.exists() && node.path("state").join(kept).exists(), "damage {at}");
        store.prepare(A, &grant("a")).unwrap();
        node.assert_one(A, "prepared again");
        store.unprepare(A).unwrap();
        node.assert_nothing("released");
    }
    // Without a checkpoint too.
    let node = Node::new();
    node.open().prepare(A, &grant("a")).unwrap();
    fs::remove_file(node.checkpoint()).unwrap();
    let mut store = node.open();
    node.assert_one(A, "without a checkpoint");
    store.unprepare(A).unwrap();
    node.assert_nothing("released");
}

#[test]
fn start_removes_only_what_looks_like_a_claim() {
    let node = Node::new();
    let mut store = node.open();
    store.prepare(A, &grant("a")).unwrap();
    let stray = node.claims().join(B);
    fs::create_dir_all(stray.join("sub")).unwrap();
    fs::write(stray.join("sub/file"), "x").unwrap();
    fs::create_dir(node.claims().join("lost+found")).unwrap();
    fs::write(node.path("cdi").join(format!("shmesh.io-claim-{B}.json")), "{}").unwrap();
    fs::write(node.path("cdi/shmesh.io-pool.json"), "{}").unwrap();
    fs::write(node.path("cdi/other.io-claim-x.json"), "{}").unwrap();
    node.open();
    let (directories, specs, _) = node.census();
    assert_eq!(directories, [A, "lost+found"]);
    let own = format!("shmesh.io-claim-{A}.json");
    assert_eq!(specs, ["other.io-claim-x.json", own.as_str(), "shmesh.io-pool.json"]);
}

#[test]
fn link_in_place_of_a_directory_is_not_followed() {
    let node = Node::new();
    let mut store = node.open();
    fs::create_dir_all(node.claims()).unwrap();
    let victim = node.path("victim");
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("precious"), "x").unwrap();
    let mode = fs::metadata(&victim).unwrap().mode();
    symlink(&victim, node.claims().join(A)).unwrap();
    let error = store.prepare(A, &grant("a")).unwrap_err();
    assert!(error.to_string().contains(A) && error.reason() == "directory", "{error}");
    let report = store.unprepare(A).unwrap();
    assert_eq!(report.failures, 1, "a link is not what was made, so it is left to a person");
    assert_eq!(fs::metadata(&victim).unwrap().mode(), mode);
    assert!(victim.join("precious").exists());
    fs::remove_file(node.claims().join(A)).unwrap();
    assert_eq!(store.retry().failures, 0);
    node.assert_nothing("released at last");
}

#[test]
fn directory_that_others_can_replace_is_refused() {
    let node = Node::new();
    let mut store = node.open();
    fs::create_dir_all(node.claims()).unwrap();
    fs::set_permissions(node.claims(), fs::Permissions::from_mode(0o777)).unwrap();
    let error = store.prepare(A, &grant("a")).unwrap_err().to_string();
    assert!(error.contains("other users could replace the claim's directory"), "{error}");
    fs::set_permissions(node.claims(), fs::Permissions::from_mode(0o755)).unwrap();
    store.prepare(A, &grant("a")).unwrap();
}

#[test]
fn groups_are_leased_once_and_run_out() {
    let mut node = Node::new();
    node.gids.end = node.gids.start + 1;
    let mut store = node.open();
    store.prepare(A, &grant("a")).unwrap();
    let error = store.prepare(B, &grant("b")).unwrap_err();
    assert_eq!(error.reason(), "gids_exhausted");
    assert!(error.to_string().contains("raise dra.gids.count"), "{error}");
    // A claim without a directory needs none, and the first keeps its own.
    store.prepare(B, &ClaimGrant { domain: None, ..grant("b") }).unwrap();
    store.unprepare(B).unwrap();
    store.prepare(A, &grant("a")).unwrap();
    node.assert_one(A, "still");
    store.unprepare(A).unwrap();
    store.prepare(B, &grant("b")).unwrap();
    node.assert_one(B, "in its place");
}

#[test]
fn claim_of_the_same_name_and_another_uid_is_another_claim() {
    let node = Node::new();
    if node.gids.len() < 2 {
        eprintln!("skipped: two groups require root");
        return;
    }
    let mut store = node.open();
    store.prepare(A, &grant("same")).unwrap();
    store.prepare(B, &grant("same")).unwrap();
    let (directories, _, gids) = node.census();
    assert_eq!(directories, [A, B]);
    assert_ne!(gids[0], gids[1]);
    fs::write(node.claims().join(B).join("file"), "x").unwrap();
    store.unprepare(A).unwrap();
    node.assert_one(B, "untouched");
    assert!(node.claims().join(B).join("file").exists());
}

#[test]
fn uid_that_is_a_path_is_refused() {
    let node = Node::new();
    let mut store = node.open();
    for uid in ["", ".", "..", "../x", "a/b", "-a", "a b", "ä", &"a".repeat(65)] {
        assert_eq!(store.prepare(uid, &grant("a")).unwrap_err().reason(), "uid", "{uid:?}");
        store.unprepare(uid).unwrap();
    }
    node.assert_nothing("refused");
}

#[test]
fn claim_larger_than_the_free_space_is_refused() {
    let node = Node::new();
    let mut store = node.open();
    let mut large = grant("a");
    large.domain.as_mut().unwrap().bytes = u64::MAX / 2;
    let error = store.prepare(A, &large).unwrap_err();
    assert_eq!(error.reason(), "tmpfs_full");
    assert!(error.to_string().contains("bytes free, and the claim has"), "{error}");
    node.assert_nothing("refused");
    // A claim that is prepared already uses the space itself.
    store.prepare(A, &grant("a")).unwrap();
    store.prepare(A, &large).unwrap();
}

#[test]
fn file_that_cannot_be_removed_keeps_the_group() {
    if nix::unistd::geteuid().is_root() {
        eprintln!("skipped: root can remove everything");
        return;
    }
    let node = Node::new();
    let mut store = node.open();
    store.prepare(A, &grant("a")).unwrap();
    let locked = node.claims().join(A).join("locked");
    fs::create_dir(&locked).unwrap();
    fs::write(locked.join("file"), "x").unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o500)).unwrap();
    assert!(store.unprepare(A).unwrap().failures > 0);
    let (directories, specs, gids) = node.census();
    assert_eq!((directories.len(), specs.len(), gids.len()), (1, 0, 1));
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(store.retry().failures, 0);
    node.assert_nothing("removed at last");
}

/// Runs on one thread for blocking work, so that calls are made in order.
fn in_order<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
    runtime.unwrap().block_on(work)
}

/// Polls a future once.
fn poll<T>(future: &mut std::pin::Pin<Box<impl Future<Output = T>>>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(done) => Some(done),
        std::task::Poll::Pending => None,
    }
}

#[test]
fn call_that_was_given_up_changes_nothing() {
    let node = Node::new();
    let claims = node.shared();
    let calls = async {
        {
            // Another call has the store for long.
            let _store = claims.lock().unwrap();
            let mut late = Box::pin(claims.call(|store| store.prepare(A, &grant("a"))));
            assert!(poll(&mut late).is_none());
            // The kubelet gives it up.
        }
        // After its turn.
        claims.held_pools("shmesh.io".into()).await.unwrap();
        node.assert_nothing("given up");
        claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        node.assert_one(A, "prepared");
        {
            let _store = claims.lock().unwrap();
            let mut late = Box::pin(claims.release(A));
            assert!(poll(&mut late).is_none());
        }
        claims.held_pools("shmesh.io".into()).await.unwrap();
        node.assert_one(A, "the release was given up");
    };
    in_order(calls);
}

#[test]
fn claim_is_prepared_again_while_its_old_directory_is_erased() {
    let node = Node::new();
    let claims = node.shared();
    let calls = async {
        claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        fs::write(node.claims().join(A).join("old"), "x").unwrap();
        let erasing = claims.eraser.clone().acquire_owned().await.unwrap();
        let mut release = Box::pin(claims.release(A));
        for _ in 0..2 {
            assert!(poll(&mut release).is_none(), "another claim is being erased");
            // After its turn.
            claims.held_pools("shmesh.io".into()).await.unwrap();
        }
        assert!(!node.claims().join(A).exists(), "renamed");
        claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        node.assert_one(A, "prepared again");
        assert_eq!(node.census().0.len(), 2, "the old one is still there");
        drop(erasing);
        assert_eq!(release.await.unwrap().files, 1);
        assert_eq!(node.census().0, [A]);
        node.assert_one(A, "the old one is gone, and the claim keeps its group");
    };
    in_order(calls);
}

/// Puts a link in place of the claim's directory, which is neither followed nor removed.
fn lock_directory(node: &Node, uid: &str) -> PathBuf {
    let directory = node.claims().join(uid);
    fs::remove_dir(&directory).unwrap();
    symlink("/nonexistent", &directory).unwrap();
    directory
}

#[test]
fn claim_that_cannot_be_erased_is_tried_again_after_a_wait() {
    let node = Node::new();
    let claims = node.shared();
    let calls = async {
        claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        let link = lock_directory(&node, A);
        assert_eq!(claims.release(A).await.unwrap().failures, 1);
        fs::remove_file(link).unwrap();
        claims.collect().await;
        assert_eq!(node.census().2.len(), 1, "its turn is in ten seconds");
        claims.attempts.lock().unwrap().clear();
        claims.collect().await;
        node.assert_nothing("its turn came");
    };
    in_order(calls);
}

#[test]
fn groups_of_released_claims_are_named_when_groups_run_out() {
    let mut node = Node::new();
    node.gids.end = node.gids.start + 1;
    let mut store = node.open();
    store.prepare(A, &grant("a")).unwrap();
    let error = store.prepare(B, &grant("b")).unwrap_err().to_string();
    assert!(!error.contains("released"), "{error}");
    lock_directory(&node, A);
    store.unprepare(A).unwrap();
    let error = store.prepare(B, &grant("b")).unwrap_err().to_string();
    assert!(error.contains("1 of them belong to released claims"), "{error}");
    assert!(error.contains("/dev/shm/shmesh-claims/.*.gone"), "{error}");
}

#[test]
fn recovered_claims_have_groups_of_the_range_and_each_its_own() {
    let node = Node::new();
    if node.gids.len() < 2 {
        eprintln!("skipped: other groups require root");
        return;
    }
    // As after `mkdir` and before `fchown`, with the checkpoint lost; its group is 0.
    fs::create_dir_all(node.claims().join(A)).unwrap();
    let mut store = node.open();
    assert_eq!(node.census().2, [] as [u32; 0]);
    store.prepare(A, &grant("a")).unwrap();
    node.assert_one(A, "prepared again");
    assert_eq!(node.census().2, [node.gids.start]);
    // Another directory of the same group.
    let second = node.claims().join(B);
    fs::create_dir(&second).unwrap();
    std::os::unix::fs::chown(&second, None, Some(node.gids.start)).unwrap();
    fs::remove_file(node.checkpoint()).unwrap();
    let mut store = node.open();
    assert_eq!(node.census().2, [node.gids.start], "one of them has it");
    store.prepare(A, &grant("a")).unwrap();
    store.prepare(B, &grant("b")).unwrap();
    assert_ne!(fs::metadata(node.claims().join(A)).unwrap().gid(), fs::metadata(second).unwrap().gid());
}

#[test]
fn pools_of_recovered_claims_are_held() {
    let node = Node::new();
    let pools = read(&json!({"results": [result("domain", "domain"), result("radio", "pool-fronthaul")]}));
    node.open().prepare(A, &pools.unwrap().grant).unwrap();
    fs::remove_file(node.checkpoint()).unwrap();
    let claims = node.shared();
    let held = || in_order(claims.held_pools("shmesh.io".into()));
    assert_eq!(held().unwrap(), [("shmesh.io/fronthaul".to_owned(), (1, 1))].into());
    // Without a specification they are unknown, and no pool is swept.
    fs::remove_dir_all(node.path("cdi")).unwrap();
    assert!(format!("{:#}", held().unwrap_err()).contains(A));
}

#[test]
fn directory_that_was_deleted_under_its_mount_is_unhealthy() {
    let node = Node::new();
    let claims = node.path("mounted");
    fs::create_dir(&claims).unwrap();
    let mount = fs::File::open(&claims).unwrap();
    let seen = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&mount));
    let mut store = node.open_at(PathBuf::from(&seen));
    let shared = node.shared();
    let config = |directory: &Path| {
        let dra = crate::config::Dra { directory: directory.to_owned(), ..Default::default() };
        Config { dra, ..Config::default() }
    };
    let problem = |directory: &Path| shared.problem(&config(directory));
    assert_eq!(problem(Path::new(&seen)), None);
    store.prepare(A, &grant("a")).unwrap();
    store.unprepare(A).unwrap();
    fs::remove_dir(&claims).unwrap();
    assert!(problem(&claims).is_some(), "it has no name any more");
    let problem = problem(Path::new(&seen)).unwrap();
    assert!(problem.contains("restart the pod of the plugin"), "{problem}");
    let error = store.prepare(A, &grant("a")).unwrap_err();
    assert_eq!(error.reason(), "directory");
    assert!(error.to_string().contains("was deleted or moved on the node"), "{error}");
    let is_healthy = |problem: Option<&str>| {
        let health = device_health("node-1", &resources(&Config::default()), problem);
        let domain = health.into_iter().find(|one| one.device == "domain").unwrap();
        (domain.state == kubelet_dra::HealthState::Healthy, domain.message)
    };
    assert_eq!(is_healthy(Some(&problem)), (false, problem));
    assert_eq!(is_healthy(None), (true, String::new()));
}

/// The devices of a node with a pool and two GPUs.
fn devices() -> BTreeMap<String, ClaimDevice> {
    let mut config = Config { mode: FrontEnd::Dra, ..Config::default() };
    config.pools =
        serde_saphyr::from_str("[{name: fronthaul, gid: 60001, mountPath: /radio}, {name: b}]").unwrap();
    claim_devices(&resources(&config))
}

fn resources(config: &Config) -> Vec<Arc<crate::resource::Resource>> {
    let gpu = |id: &str, address: &str| Accelerator {
        kind: AcceleratorKind::Gpu,
        id: id.into(),
        file: None,
        numa: Some(1),
        pci: Some(PciPlace { address: address.into(), root: Some("pci0000:3a".into()) }),
    };
    let accelerators = vec![gpu("GPU-11111111-x", "0000:3b:00.0"), gpu("GPU-22222222-x", "0000:3c:00.0")];
    let node = NodeResources { memory: 1 << 30, accelerators, ..NodeResources::default() };
    plan(config, &node).into_iter().map(Arc::new).collect()
}

fn read(allocation: &Value) -> Result<ClaimPlan, ClaimRefusal> {
    let claim = json!({
        "metadata": {"namespace": "radio", "name": "a", "uid": A},
        "spec": {"devices": {}},
        "status": {"allocation": {"devices": allocation}},
    });
    plan_claim(&serde_json::from_value(claim).unwrap(), "shmesh.io", "node-1", &devices())
}

fn result(request: &str, device: &str) -> Value {
    json!({
        "request": request, "driver": "shmesh.io", "pool": "node-1", "device": device, "shareID": "s1",
        "consumedCapacity": {"bytes": "64Mi", "attachments": "1"},
    })
}

fn config(source: &str, requests: &[&str], more: &Value) -> Value {
    let mut parameters = json!({"apiVersion": "shmesh.io/v1alpha1", "kind": "DomainConfig"});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"source": source, "requests": requests, "opaque": {"driver": "shmesh.io", "parameters": parameters}})
}

#[test]
fn allocation_becomes_a_grant() {
    let other = json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-0"});
    let plan = read(&json!({
        "results": [
            result("domain", "domain"), other, result("radio", "pool-fronthaul"),
            result("slot/large", "gpu-11111111"), result("slot2", "gpu-22222222"),
        ],
        "config": [
            config("FromClass", &[], &json!({"mountPath": "/class"})),
            config("FromClaim", &["domain"], &json!({"mountPath": "/claim", "userNamespaces": "always"})),
            json!({"source": "FromClaim", "requests": ["gpu"], "opaque": {"driver": "gpu.nvidia.com", "parameters": {"a": 1}}}),
        ],
    }))
    .unwrap();
    let domain = DomainGrant { bytes: 64 << 20, mount_path: "/claim".into(), has_user_namespaces: true };
    assert_eq!(plan.grant.domain, Some(domain));
    assert_eq!(plan.grant.pools[0].name, "fronthaul");
    assert_eq!(plan.grant.gpus, ["GPU-11111111-x", "GPU-22222222-x"]);
    let suffixes: Vec<_> = plan.devices.iter().map(|one| one.cdi_suffix.as_str()).collect();
    assert_eq!(suffixes, ["", "-pool-fronthaul", "-gpu-ipc", "-gpu-ipc"]);
    let first = AllocatedDevice {
        request: "domain".into(),
        pool: "node-1".into(),
        device: "domain".into(),
        share_id: Some("s1".into()),
        cdi_suffix: String::new(),
    };
    assert_eq!(plan.devices[0], first);
    // The specification has every device that the plan names.
    let node = Node::new();
    node.open().prepare(A, &plan.grant).unwrap();
    let spec = node.spec(A).unwrap();
    let names: Vec<_> =
        spec["devices"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, [A.to_owned(), format!("{A}-pool-fronthaul"), format!("{A}-gpu-ipc")]);
    let edits = |at: usize| &spec["devices"][at]["containerEdits"];
    assert!(edits(0)["mounts"][0]["options"].as_array().unwrap().contains(&json!("idmap")));
    assert_eq!(edits(1)["additionalGids"], json!([60001]));
    assert_eq!(edits(1)["env"][0], "SHMESH_POOL=fronthaul");
    assert_eq!(edits(2)["env"][0], "SHMESH_GPU_UUIDS=GPU-11111111-x,GPU-22222222-x");
}

#[test]
fn configuration_of_two_requests_is_one_although_the_scheduler_repeats_it() {
    let both = config("FromClaim", &["domain", "radio"], &json!({"mountPath": "/run/shmesh/agents"}));
    let results = json!([result("domain", "domain"), result("radio", "pool-fronthaul")]);
    let plan = read(&json!({"results": results, "config": [both, both]})).unwrap();
    assert_eq!(plan.grant.domain.unwrap().mount_path, Path::new("/run/shmesh/agents"));
}

/// Two claims in one container have variables of their own, in whatever order they are applied.
#[test]
fn each_claim_has_variables_with_its_name() {
    let suffix = |name: &str, annotations: Value| {
        let claim = json!({
            "metadata": {"namespace": "radio", "name": name, "uid": A, "annotations": annotations},
            "spec": {},
            "status": {"allocation": {"devices": {"results": [result("domain", "domain")]}}},
        });
        let plan = plan_claim(&serde_json::from_value(claim).unwrap(), "shmesh.io", "node-1", &devices());
        plan.unwrap().grant.suffix
    };
    assert_eq!(suffix("du-0-cell", Value::Null), "DU_0_CELL");
    assert_eq!(suffix("du-0.cell", Value::Null), "DU_0_dot_CELL");
    assert_eq!(suffix("du-0-dot-cell", Value::Null), "DU_0_DOT_CELL");
    let of_template = json!({"resource.kubernetes.io/pod-claim-name": "ipc"});
    assert_eq!(suffix("pod-0-ipc-x7k2p", of_template), "IPC");
    let by_hand = json!({"resource.kubernetes.io/pod-claim-name": "x".repeat(200_000)});
    assert_eq!(suffix("du", by_hand), "DU");
}

#[test]
fn variables_of_the_directory_are_those_of_the_domain() {
    let values = |grant: &ClaimGrant| -> Vec<Vec<String>> {
        let node = Node::new();
        node.open().prepare(A, grant).unwrap();
        let spec = node.spec(A).unwrap();
        let of = |device: &Value| {
            let env = device["containerEdits"]["env"].as_array().unwrap().iter();
            let env = env.map(|one| one.as_str().unwrap().to_owned());
            env.filter(|one| one.starts_with("SHMESH_DIR=") || one.starts_with("SHMESH_BYTES=")).collect()
        };
        spec["devices"].as_array().unwrap().iter().map(of).collect()
    };
    let pool = read(&json!({"results": [result("radio", "pool-fronthaul")]})).unwrap().grant;
    assert_eq!(values(&pool), [["SHMESH_DIR=/radio"]]);
    let both = ClaimGrant { pools: pool.pools, ..grant("a") };
    let domain = vec!["SHMESH_BYTES=2097152".to_owned(), "SHMESH_DIR=/dev/shm".to_owned()];
    assert_eq!(values(&both), [domain, vec![]]);
}

#[test]
fn unusable_allocations_are_refused_with_the_remedy() {
    let domain = || result("domain", "domain");
    let with = |key: &str, value: Value| {
        let mut one = domain();
        one[key] = value;
        one
    };
    let links = json!({"links": [{"name": "a", "pools": {"cpu_data": {"buf_size_bytes": 1 << 20, "pool_len": 100}}}]});
    let both = config("FromClaim", &["domain"], &json!({}));
    let other = config("FromClaim", &["domain"], &json!({"mountPath": "/other"}));
    let at = |path: &str| config("FromClaim", &[], &json!({"mountPath": path}));
    for (allocation, reason, part) in [
        (json!({}), "no_device", "shmesh-domain"),
        (json!({"results": [with("driver", json!("other.io"))]}), "no_device", "shmesh.io"),
        (json!({"results": [with("pool", json!("node-2"))]}), "other_node", "node-2"),
        (json!({"results": [result("x", "pool-gone")]}), "unknown_device", "pool-gone"),
        (json!({"results": [domain(), result("second", "domain")]}), "two_domains", "second"),
        (json!({"results": [with("consumedCapacity", json!({}))]}), "no_bytes", "DRAConsumableCapacity"),
        (json!({"results": [with("consumedCapacity", json!({"bytes": "much"}))]}), "no_bytes", "much"),
        (json!({"results": [domain()], "config": [both, other]}), "two_configs", "domain"),
        (
            json!({"results": [domain()], "config": [both, config("FromClaim", &[], &json!({}))]}),
            "two_configs",
            "request domain",
        ),
        (
            json!({"results": [domain()], "config": [config("FromClaim", &[], &json!({"x": 1}))]}),
            "config",
            "x: is not a known key",
        ),
        (
            json!({"results": [domain()], "config": [config("FromClass", &[], &json!({"links": [{"name": "a/b"}]}))]}),
            "config",
            "links[0].name",
        ),
        (
            json!({"results": [domain(), result("p", "pool-b")], "config": [config("FromClaim", &["p"], &json!({}))]}),
            "config_not_for_domain",
            "request p",
        ),
        (
            json!({"results": [domain()], "config": [config("FromClaim", &[], &links)]}),
            "too_few_bytes",
            "request bytes: 110Mi",
        ),
        (
            json!({"results": [result("p", "pool-b")], "config": [at("/other")]}),
            "config_not_for_domain",
            "for all requests of the claim, and none is for a domain",
        ),
        (
            json!({"results": [domain()], "config": [at("/run/shmesh/agent")]}),
            "identity_path",
            "/run/shmesh/agent",
        ),
        (json!({"results": [domain()], "config": [at("/run")]}), "identity_path", "mounted at /run,"),
        (json!({"results": [domain()], "config": [at("/run/shmesh/agent/x")]}), "identity_path", "agent/x"),
        (json!({"results": [domain(), result("p", "pool-b")]}), "same_path", "pool b"),
    ] {
        let refusal = read(&allocation).unwrap_err();
        assert_eq!(refusal.reason(), reason, "{refusal}");
        assert!(refusal.to_string().contains(part), "{refusal} names {part:?}");
    }
}

#[test]
fn slices_list_what_claims_can_have() {
    let mut config = Config { mode: FrontEnd::Dra, ..Config::default() };
    config.pools = serde_saphyr::from_str("[{name: radio, attachments: 3}]").unwrap();
    config.dra.directory = std::env::temp_dir();
    let devices = super::slice::devices(&config, &resources(&config), (1 << 30) + 4096, false, false);
    let json = serde_json::to_value(&devices).unwrap();
    let names: Vec<_> = devices.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["domain", "gpu-11111111", "gpu-22222222", "pool-radio"]);
    let bytes = json!({
        "value": "512Mi",
        "requestPolicy": {"default": "64Mi", "validRange": {"min": "2Mi", "step": "2Mi"}},
    });
    assert_eq!(json[0]["capacity"]["bytes"], bytes);
    assert_eq!(json[0]["capacity"]["attachments"]["value"], "64");
    assert_eq!(json[0]["attributes"], json!({"kind": {"string": "domain"}}));
    let gpu = json!({
        "kind": {"string": "gpu"}, "uuid": {"string": "GPU-11111111-x"}, "numa": {"int": 1},
        "resource.kubernetes.io/pciBusID": {"string": "0000:3b:00.0"},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:3a"},
    });
    assert_eq!(json[1]["attributes"], gpu);
    assert_eq!(json[1]["capacity"]["slots"]["value"], "8");
    assert_eq!(json[3]["capacity"]["attachments"]["value"], "3");
    assert!(devices.iter().all(|one| one.allow_multiple_allocations == Some(true) && one.taints.is_none()));
    let draining = super::slice::devices(&config, &resources(&config), 1 << 30, true, false);
    let taint = json!([{"key": "shmesh.io/draining", "effect": "NoSchedule"}]);
    assert!(draining.iter().all(|one| serde_json::to_value(&one.taints).unwrap() == taint));
}

#[tokio::test]
async fn slices_of_small_capacities_are_accepted() {
    for (attachments, budget) in [(1, "2Mi"), (2, "4Mi"), (1, "3Mi"), (64, "1Gi")] {
        let mut config = Config { mode: FrontEnd::Dra, ..Config::default() };
        config.pools =
            serde_saphyr::from_str(&format!("[{{name: radio, attachments: {attachments}}}]")).unwrap();
        config.dra.attachments = attachments;
        config.dra.budget = budget.parse().unwrap();
        config.gpu_ipc.slots_per_device = attachments;
        config.dra.directory = std::env::temp_dir();
        let devices = super::slice::devices(&config, &resources(&config), 1 << 30, false, false);
        assert_eq!(devices.len(), 4, "{devices:?}");
        let slice = json!({
            "metadata": {"name": "a"},
            "spec": {
                "driver": "shmesh.io", "nodeName": "n1", "devices": devices,
                "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
            },
        });
        let slice: ResourceSlice = serde_json::from_value(slice).unwrap();
        ApiServer::new(Clock::runtime()).create(&slice).unwrap();
    }
    // A device without capacity is none.
    let mut config = Config { mode: FrontEnd::Dra, ..Config::default() };
    config.dra.budget = "1Mi".parse().unwrap();
    config.dra.directory = std::env::temp_dir();
    assert_eq!(super::slice::devices(&config, &[], 1 << 30, false, false), []);
}

#[test]
fn no_more_bytes_are_published_than_the_file_system_has() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut config = Config { mode: FrontEnd::Dra, ..Config::default() };
    config.dra.directory = directory.path().join("claims");
    let total = shmesh_sys::mount::file_system(directory.path()).unwrap().total_bytes;
    let most = total / (2 << 20) * (2 << 20);
    let devices = super::slice::devices(&config, &[], 1 << 50, false, false);
    let capacity = devices[0].capacity.as_ref().unwrap();
    assert_eq!(capacity["bytes"].value.0, crate::config::Bytes(most).to_string());
}

/// Two instances of a rolling update.
#[test]
fn instances_see_each_others_claims() {
    let node = Node::new();
    let (old, new) = (node.shared(), node.shared());
    in_order(async {
        old.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        new.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        node.assert_one(A, "prepared by both");
        new.release(A).await.unwrap();
        old.release(A).await.unwrap();
        node.assert_nothing("released by both");
        old.call(|store| store.prepare(B, &grant("b"))).await.unwrap();
        node.assert_one(B, "with the group that the other one gave back");
        new.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        let gid = |uid: &str| fs::metadata(node.claims().join(uid)).unwrap().gid();
        assert_ne!(gid(A), gid(B), "the other one has leased a group");
        let checkpoint = fs::read_to_string(node.checkpoint()).unwrap();
        assert!(checkpoint.contains(A) && checkpoint.contains(B), "{checkpoint}");
    });
}

#[test]
fn call_is_refused_while_another_process_holds_the_lock() {
    let node = Node::new();
    let claims = node.shared();
    in_order(async {
        claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        let before = fs::read(node.checkpoint()).unwrap();
        let stopped = fs::File::open(node.path("state/claims.lock")).unwrap();
        stopped.lock().unwrap();
        let (reason, said) = claims.release(A).await.unwrap_err();
        assert_eq!(reason, "locked");
        assert!(said.contains("state/claims.lock: another instance of the driver has locked it"), "{said}");
        claims.call(|store| store.prepare(B, &grant("b"))).await.unwrap_err();
        claims.held_pools("shmesh.io".into()).await.unwrap_err();
        claims.collect().await;
        assert_eq!(fs::read(node.checkpoint()).unwrap(), before);
        node.assert_one(A, "refused");
        drop(stopped);
        claims.release(A).await.unwrap();
        node.assert_nothing("the kubelet tries again");
    });
}

#[test]
fn checkpoint_of_another_version_is_not_overwritten() {
    let node = Node::new();
    let claims = node.shared();
    in_order(async {
        claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        let good = fs::read(node.checkpoint()).unwrap();
        let text = "shmesh-claims 2 0000000000000000\n{}";
        fs::write(node.checkpoint(), text).unwrap();
        let (reason, said) = claims.call(|store| store.prepare(B, &grant("b"))).await.unwrap_err();
        assert_eq!(reason, "checkpoint");
        assert!(said.contains("claims.checkpoint again, and nothing is changed: it has version 2"), "{said}");
        claims.release(A).await.unwrap_err();
        claims.collect().await;
        assert_eq!(fs::read_to_string(node.checkpoint()).unwrap(), text, "not overwritten");
        assert!(node.claims().join(A).exists() && node.spec(A).is_some(), "nothing is removed");
        assert!(!node.claims().join(B).exists() && node.spec(B).is_none(), "nor created");
        fs::write(node.checkpoint(), good).unwrap();
        claims.release(A).await.unwrap();
        node.assert_nothing("readable again");
    });
}

#[test]
fn checkpoint_that_is_damaged_under_a_running_plugin_is_written_again() {
    for text in ["shmesh-claims 1 0000000000000000\n{}", "\n", ""] {
        let node = Node::new();
        let (claims, other) = (node.shared(), node.shared());
        in_order(async {
            claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
            let good = fs::read(node.checkpoint()).unwrap();
            // Another instance releases one claim, and this one knows nothing of it.
            claims.call(|store| store.prepare(B, &ClaimGrant { domain: None, ..grant("b") })).await.unwrap();
            other.release(B).await.unwrap();
            fs::write(node.checkpoint(), text).unwrap();
            claims.held_pools("shmesh.io".into()).await.unwrap();
            assert_eq!(fs::read(node.checkpoint()).unwrap(), good, "grant and group are those before");
            assert_eq!(fs::read_to_string(node.path("state/claims.damaged")).unwrap(), text);
            node.assert_one(A, "as before");
            other.release(A).await.unwrap();
            node.assert_nothing("the other one has read it");
        });
    }
}

/// Releases a claim, and leaves its renamed directory to be erased. Until then the instance remembers the claim as released.
async fn release_without_erasing(claims: &SharedClaims, uid: &str) {
    let _erasing = claims.eraser.clone().acquire_owned().await.unwrap();
    let mut release = Box::pin(claims.release(uid));
    for _ in 0..2 {
        assert!(poll(&mut release).is_none(), "another claim is being erased");
        // After its turn.
        claims.held_pools("shmesh.io".into()).await.unwrap();
    }
}

#[test]
fn claim_that_another_instance_prepared_again_outlives_a_damaged_checkpoint() {
    let spoils =
        ["nothing", "specification", "directory", "removed", "unsaved", "unlisted claims", "unlisted cdi"];
    for spoil in spoils {
        let node = Node::new();
        if spoil == "directory" && node.gids.len() < 2 {
            eprintln!("skipped: other groups require root");
            continue;
        }
        let (claims, other) = (node.shared(), node.shared());
        in_order(async {
            claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
            release_without_erasing(&claims, A).await;
            other.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
            let file = node.claims().join(A).join("file");
            fs::write(&file, "x").unwrap();
            let specification = node.path("cdi").join(format!("shmesh.io-claim-{A}.json"));
            match spoil {
                "specification" => fs::write(&specification, "{\"cdiVer").unwrap(),
                // As between `mkdir` and `fchown`.
                "directory" => std::os::unix::fs::chown(node.claims().join(A), None, Some(0)).unwrap(),
                _ => {}
            }
            fs::write(node.checkpoint(), "").unwrap();
            // The first attempt fails, and must not leave the instance with what it remembers.
            let fails_once = match spoil {
                "removed" => {
                    fs::remove_file(node.checkpoint()).unwrap();
                    None
                }
                "unsaved" => Some((node.checkpoint().with_extension("new"), None)),
                "unlisted claims" => Some((node.claims(), Some(node.path("away")))),
                "unlisted cdi" => Some((node.path("cdi"), Some(node.path("away")))),
                _ => None,
            };
            if let Some((path, away)) = &fails_once {
                match away {
                    Some(away) => {
                        fs::rename(path, away).unwrap();
                        fs::write(path, "").unwrap();
                    }
                    None => fs::create_dir(path).unwrap(),
                }
                claims.collect().await;
                assert!(claims.held_pools("shmesh.io".into()).await.is_err(), "{spoil}");
                match away {
                    Some(away) => {
                        fs::remove_file(path).unwrap();
                        fs::rename(away, path).unwrap();
                    }
                    None => fs::remove_dir(path).unwrap(),
                }
            }
            claims.collect().await;
            claims.collect().await;
            assert!(file.exists() && specification.exists(), "{spoil}: a pod runs with it");
            assert_eq!(node.census().2, [node.gids.start], "{spoil}: the group stays leased");
            let held = claims.held_pools("shmesh.io".into()).await;
            assert_eq!(
                held.is_err(),
                spoil == "specification",
                "{spoil}: pools that are unknown are not swept"
            );
            other.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
            assert!(file.exists(), "{spoil}");
            node.assert_one(A, &format!("{spoil}: prepared again"));
            claims.release(A).await.unwrap();
            node.assert_nothing(&format!("{spoil}: released"));
        });
    }
}

#[test]
fn grant_of_an_earlier_allocation_is_not_written_again_after_a_damaged_checkpoint() {
    let node = Node::new();
    let (claims, other) = (node.shared(), node.shared());
    let elsewhere = || {
        let mut grant = grant("a");
        grant.domain.as_mut().unwrap().mount_path = "/elsewhere".into();
        grant
    };
    in_order(async {
        claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        other.release(A).await.unwrap();
        other.call(move |store| store.prepare(A, &elsewhere())).await.unwrap();
        let specification = node.spec(A);
        assert!(specification.as_ref().unwrap().to_string().contains("/elsewhere"));
        fs::write(node.checkpoint(), "").unwrap();
        claims.held_pools("shmesh.io".into()).await.unwrap();
        node.open();
        assert_eq!(node.spec(A), specification);
    });
}

#[test]
fn groups_of_claims_on_the_node_win_over_those_in_memory() {
    let node = Node::new();
    if node.gids.len() < 2 {
        eprintln!("skipped: two groups require root");
        return;
    }
    let first = node.gids.start;
    for is_released in [true, false] {
        fs::remove_file(node.checkpoint()).ok();
        let (claims, other) = (node.shared(), node.shared());
        in_order(async {
            claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
            if is_released {
                release_without_erasing(&claims, A).await;
            }
            // The other instance gives the group to another claim, and the next one to this claim.
            other.collect().await;
            other.release(A).await.unwrap();
            for (uid, name) in [(B, "b"), (A, "a")] {
                other.call(move |store| store.prepare(uid, &grant(name))).await.unwrap();
            }
            fs::write(node.checkpoint(), "").unwrap();
            claims.held_pools("shmesh.io".into()).await.unwrap();
            let leased = Checkpoint::load(&node.checkpoint()).unwrap().unwrap().claims;
            let of = |uid: &str| (leased[uid].gid, leased[uid].is_released);
            assert_eq!((of(A), of(B)), ((Some(first + 1), false), (Some(first), false)), "{is_released}");
            for uid in [A, B] {
                claims.release(uid).await.unwrap();
            }
            node.assert_nothing("released");
        });
    }
}

#[test]
fn claim_that_another_instance_released_is_erased_after_a_damaged_checkpoint() {
    let node = Node::new();
    let (claims, other) = (node.shared(), node.shared());
    in_order(async {
        claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        release_without_erasing(&other, A).await;
        fs::write(node.checkpoint(), "").unwrap();
        claims.held_pools("shmesh.io".into()).await.unwrap();
        assert_eq!(node.census().2, [node.gids.start], "its directory has the group");
        claims.collect().await;
        node.assert_nothing("erased");
    });
}

#[test]
fn pools_of_a_claim_with_a_torn_specification_stay_known_when_the_checkpoint_is_damaged() {
    let node = Node::new();
    let pools = read(&json!({"results": [result("domain", "domain"), result("radio", "pool-fronthaul")]}));
    let [with_pool, without] = [pools.unwrap().grant, grant("a")];
    let claims = node.shared();
    let held = || in_order(claims.held_pools("shmesh.io".into())).unwrap();
    in_order(claims.call(move |store| store.prepare(A, &with_pool))).unwrap();
    let expected = [("shmesh.io/fronthaul".to_owned(), (1, 1))].into();
    for specification in
        [fs::read(node.path("cdi").join(format!("shmesh.io-claim-{A}.json"))).unwrap(), b"{".to_vec()]
    {
        fs::write(node.path("cdi").join(format!("shmesh.io-claim-{A}.json")), specification).unwrap();
        fs::write(node.checkpoint(), "").unwrap();
        assert_eq!(held(), expected);
        assert_eq!(node.census().2, [node.gids.start]);
    }
    // Another instance has prepared the claim for another allocation.
    let other = node.shared();
    in_order(other.release(A)).unwrap();
    in_order(other.call(move |store| store.prepare(A, &without))).unwrap();
    fs::write(node.checkpoint(), "").unwrap();
    assert!(held().is_empty(), "the specification says so");
}

#[test]
fn group_of_files_that_are_left_stays_leased_when_the_checkpoint_is_damaged() {
    let node = Node::new();
    let claims = node.shared();
    in_order(async {
        claims.call(|store| store.prepare(A, &grant("a"))).await.unwrap();
        let link = lock_directory(&node, A);
        claims.release(A).await.unwrap();
        fs::write(node.checkpoint(), "").unwrap();
        claims.held_pools("shmesh.io".into()).await.unwrap();
        assert_eq!(node.census().2.len(), 1);
        fs::remove_file(link).unwrap();
        claims.attempts.lock().unwrap().clear();
        claims.collect().await;
        node.assert_nothing("its turn came");
    });
}

#[test]
fn checkpoint_of_a_version_without_suffixes_gives_no_unfinished_names() {
    let node = Node::new();
    node.open().prepare(A, &ClaimGrant { suffix: String::new(), ..grant("a") }).unwrap();
    node.open();
    let env = node.spec(A).unwrap()["devices"][0]["containerEdits"]["env"].to_string();
    assert!(env.contains("SHMESH_BYTES=") && !env.contains("_="), "{env}");
}

/// Prints the time of Prepare without the API server, and the time to synchronise one file, in turns on one disk:
/// [performance.md](../../../docs/performance.md) has the results.
#[test]
#[ignore = "long: a measurement, 600 calls"]
fn prepare_is_measured_with_many_claims() {
    let mut node = Node::new();
    if node.gids.len() < 2 {
        eprintln!("skipped: many groups require root");
        return;
    }
    node.gids.end = node.gids.start + 1_000;
    // The checkpoint is on a disk, and specifications too, which is the worst case.
    let disk = tempfile::tempdir().unwrap();
    for name in ["state", "cdi"] {
        fs::create_dir(disk.path().join(name)).unwrap();
        symlink(disk.path().join(name), node.path(name)).unwrap();
    }
    let claims = node.shared();
    let driver = DomainDriver {
        domain: "shmesh.io".into(),
        node: "node-1".into(),
        claims: claims.clone(),
        resources: watch::channel((Config::default(), resources(&Config::default()))).1,
        allocation_times: Arc::default(),
        registered: watch::channel(true).0,
        registration_log: Arc::new(Mutex::new(LogLimit::new(1, Duration::from_secs(1)))),
        statuses: DeviceStatuses::default(),
    };
    let claim = |number: usize| -> Arc<ResourceClaim> {
        let claim = json!({
            "metadata": {"namespace": "radio", "name": format!("c{number}"), "uid": format!("{number:08}-0000-1111-2222-333333333333")},
            "spec": {},
            "status": {"allocation": {"devices": {"results": [result("domain", "domain")]}}},
        });
        Arc::new(serde_json::from_value(claim).unwrap())
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut prepared = 0;
        for wanted in [0, 100, 500] {
            while prepared < wanted {
                driver.prepare(claim(prepared)).await.unwrap();
                prepared += 1;
            }
            let [mut ours, mut synchronised] = [Vec::new(), Vec::new()];
            let bytes = fs::read(node.checkpoint()).unwrap();
            for _ in 0..200 {
                let began = Instant::now();
                driver.prepare(claim(prepared)).await.unwrap();
                ours.push(began.elapsed());
                claims.release(&format!("{prepared:08}-0000-1111-2222-333333333333")).await.unwrap();
                let (new, file) = (disk.path().join("new"), disk.path().join("file"));
                let began = Instant::now();
                let mut out = fs::File::create(&new).unwrap();
                out.write_all(&bytes).unwrap();
                out.sync_all().unwrap();
                fs::rename(new, file).unwrap();
                synchronised.push(began.elapsed());
            }
            assert_eq!(node.census().2.len(), prepared);
            for times in [&mut ours, &mut synchronised] {
                times.sort();
            }
            let of = |times: &[Duration]| {
                format!("p50 {:?}, p99 {:?}, most {:?}", times[100], times[198], times[199])
            };
            eprintln!(
                "{prepared} claims, checkpoint of {} bytes: prepare {}; one synchronised file {}",
                bytes.len(),
                of(&ours),
                of(&synchronised)
            );
        }
    });
}
