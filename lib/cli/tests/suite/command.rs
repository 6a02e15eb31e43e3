//! The real command, as users and scripts call it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use shmesh::config::{LinkConfig, LinkName, PoolId, RingMode};
use shmesh::inspect::{FAR_NODE_MAGIC, FAR_NODE_WORDS, FarNodeWord, far_node_file};
use shmesh::{Link, LinkOptions, Side};
use shmesh_testing::until;

/// Where a process that this test starts again finds the directory of its link.
const VICTIM_DIR: &str = "SHMESH_TEST_VICTIM_DIR";

fn shmesh(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh"));
    command.args(args).env("SHMESH_DIR", dir).stdin(Stdio::null()).output().unwrap()
}

fn status(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs it, expects success, and returns what it printed.
fn ok(dir: &Path, args: &[&str]) -> String {
    let output = shmesh(dir, args);
    assert_eq!(status(&output), 0, "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs it, expects this exit status, and returns its complaint.
fn fails(dir: &Path, args: &[&str], expected: i32) -> String {
    let output = shmesh(dir, args);
    let complaint = text(&output.stderr);
    assert_eq!(status(&output), expected, "{args:?}: {complaint}{}", text(&output.stdout));
    complaint
}

fn json(dir: &Path, args: &[&str]) -> Value {
    serde_json::from_str(&ok(dir, args)).unwrap()
}

fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Names and contents: what looking must not touch.
fn state(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let content = |name: String| (name.clone(), fs::read(dir.join(&name)).unwrap_or_default());
    files(dir).into_iter().map(content).collect()
}

fn config(name: &str, mode: RingMode) -> LinkConfig {
    let mut config = LinkConfig::new(name.parse().unwrap());
    config.ring_mode = mode;
    config.ring_len = 16;
    config.pools[PoolId::CpuMsg.index()].pool_len = 32;
    config.pools[PoolId::CpuMsg.index()].buf_size_bytes = 1000;
    config.pools[PoolId::CpuData.index()].pool_len = 8;
    config
}

/// Three messages to the primary: with a DATA part, in a MSG buffer, and inline.
fn fill(sender: &Link) {
    let mut loan = sender.loan_with(PoolId::CpuData).unwrap();
    loan.resize_msg(5).unwrap().copy_from_slice(b"first");
    loan.resize_data(3000).unwrap().fill(0xd1);
    loan.with_msg_id(101).with_cell_id(-1).send().unwrap();
    let mut loan = sender.loan().unwrap();
    loan.resize_msg(900).unwrap().fill(0x5a);
    loan.with_msg_id(102).send().unwrap();
    sender.send_inline(103, 7, b"inline").unwrap();
}

#[test]
fn every_subcommand_has_help_with_examples() {
    let dir = tempfile::tempdir().unwrap();
    let top = ok(dir.path(), &["--help"]);
    for name in ["demo", "bench", "ls", "dump", "capture", "who", "keys", "rm", "talk", "doctor"] {
        assert!(top.contains(name), "{top}");
        let help = ok(dir.path(), &[name, "--help"]);
        assert!(help.contains("--dir"), "{help}");
        assert!(name == "doctor" || help.contains("Examples:"), "{help}");
    }
    assert!(
        top.contains("Exit status") && !top.contains("demo-side") && !top.contains("bench-side"),
        "{top}"
    );
    assert!(ok(dir.path(), &["bench", "links", "--help"]).contains("--counts"));
    assert!(ok(dir.path(), &["bench", "--help"]).contains("--ring broadcast --readers 1,2,4"));
    // The injector's name of the container.
    for name in ["who", "keys"] {
        assert!(ok(dir.path(), &[name, "--help"]).contains("kubectl exec my-pod -c shmesh --"));
    }
    for typo in ["demo-", "demo-sid", "benchside", "device-sides"] {
        let complaint = fails(dir.path(), &[typo], 2);
        assert!(!complaint.contains("-side'"), "{complaint}");
    }
}

#[test]
fn reference_page_has_the_help_of_every_subcommand() {
    let about = "The command for people. [capture.md](../capture.md) explains `shmesh capture`, [daemons.md](../daemons.md) the sidecar that `who` and `keys` ask.";
    shmesh_testing::assert_reference(
        "shmesh.md",
        &shmesh_testing::help_page(env!("CARGO_BIN_EXE_shmesh"), about),
    );
}

#[test]
fn exit_status_shows_the_kind_of_failure() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fails(dir, &["frobnicate"], 2);
    fails(dir, &["dump"], 2);
    assert!(fails(dir, &["rm"], 2).contains("--stale"));
    fails(dir, &["rm", "a", "--stale"], 2);
    assert!(fails(dir, &["dump", "../etc"], 2).contains("link name"));
    fails(dir, &["demo", "--seconds", "-1"], 2);
    fails(dir, &["bench", "--sizes", "7"], 2);
    fails(dir, &["bench", "--cores", "0,0"], 2);
    fails(dir, &["bench", "--ring", "broadcast", "--readers", "63"], 2);
    fails(dir, &["bench", "--floor", "9,1"], 2);
    fails(dir, &["bench", "--form", "inline", "--sizes", "128"], 2);
    assert!(fails(dir, &["dump", "missing"], 1).starts_with("error: link missing: not found"));
    assert!(fails(dir, &["rm", "missing"], 1).contains("not found"));
    assert!(fails(dir, &["who", "missing"], 1).starts_with("error: link missing: not found"));
    assert!(fails(dir, &["keys", "missing"], 1).contains("link missing: not found"));
    for name in ["who", "keys"] {
        fails(dir, &[name], 2);
        fails(dir, &[name, "../etc"], 2);
    }
    let missing = fails(dir, &["ls", "--dir", "/nonexistent"], 1);
    assert_eq!(missing.matches("caused by:").count(), 1, "{missing}");

    let bad = dir.join("bad.yaml");
    fs::write(&bad, "version: 1\nlinks:\n  - name: x\n    frobnicate: 1\n").unwrap();
    let complaint = fails(dir, &["demo", "--config", bad.to_str().unwrap()], 64);
    assert!(
        complaint.starts_with("error: ") && complaint.contains("unknown key \"frobnicate\""),
        "{complaint}"
    );
    let snippet = format!("\n --> {}:4:5\n  |\n4 |     frobnicate: 1\n  |     ^\n", bad.display());
    assert!(complaint.ends_with(&snippet) && !complaint.contains("line 4"), "{complaint}");
    fails(dir, &["demo", "--config", "/nonexistent.yaml"], 64);
}

#[test]
fn demo_verifies_and_leaves_nothing() {
    for kill in ["secondary", "primary"] {
        let dir = tempfile::tempdir().unwrap();
        let report = json(dir.path(), &["demo", "--seconds", "1", "--kill", kill, "--output", "json"]);
        assert_eq!(report["verdict"], "verified", "{report}");
        assert!(report["messages_checked"].as_u64().unwrap() > 100);
        assert_eq!(files(dir.path()), [""; 0]);
    }
}

#[test]
fn demo_uses_the_configuration_of_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("links.yaml");
    let pools = "pools: { cpu_msg: { buf_size_bytes: 100, pool_len: 6 }, cpu_data: { buf_size_bytes: 0, pool_len: 0 }, cpu_large: { buf_size_bytes: 99, pool_len: 3 } }";
    let link =
        |name, more| format!("  - name: {name}\n    {pools}\n    ring: {{ len: 4, mode: spsc }}\n{more}");
    let links = [
        link("other", ""),
        link("small", "    notify: { enabled: false }\n"),
        link("hidden", "    backing: memfd\n"),
    ];
    fs::write(&file, format!("version: 1\nlinks:\n{}", links.concat())).unwrap();
    for name in ["small", "hidden"] {
        let out =
            ok(dir.path(), &["demo", "--seconds", "1", "--config", file.to_str().unwrap(), "--link", name]);
        assert!(out.contains("ring spsc 4, cpu_msg 6 x 100 B, cpu_large 3 x 99 B"), "{out}");
        assert!(out.contains("none lost, none duplicated"), "{out}");
        assert_eq!(files(dir.path()), ["links.yaml"]);
    }
    let complaint = fails(dir.path(), &["demo", "--config", file.to_str().unwrap(), "--link", "none"], 64);
    assert!(complaint.contains("no link none"), "{complaint}");
}

#[test]
fn interrupted_demo_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh"));
    command.args(["demo", "--seconds", "60"]).env("SHMESH_DIR", dir.path()).stdout(Stdio::null());
    let mut demo = command.spawn().unwrap();
    while files(dir.path()).len() < 3 {
        assert!(demo.try_wait().unwrap().is_none(), "it ended early");
        std::thread::yield_now();
    }
    kill(pid(&demo), Signal::SIGINT).unwrap();
    assert_eq!(demo.wait().unwrap().code(), Some(130));
    assert_eq!(files(dir.path()), [""; 0]);
}

#[test]
fn kept_demo_can_be_inspected_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let out = ok(dir, &["demo", "--seconds", "1", "--keep"]);
    assert!(out.contains("the link is kept"), "{out}");
    let listed = json(dir, &["ls", "--output", "json"]);
    let name = listed["links"][0]["name"].as_str().unwrap();
    let dump = json(dir, &["dump", name, "--output", "json"]);
    assert!(dump["participants"].as_array().unwrap().iter().all(|one| one["state"] == "dead"), "{dump}");
    assert!(dump["rings"].as_array().unwrap().iter().any(|ring| ring["queued"].as_u64() > Some(0)), "{dump}");
    assert!(ok(dir, &["rm", "--stale"]).contains("kept"));
    assert!(ok(dir, &["rm", name]).contains("queued messages"));
    assert_eq!(files(dir), [""; 0]);
}

/// A link of another user in a directory like `/dev/shm` is reported, and the links after it are removed.
#[test]
fn link_that_cannot_be_removed_does_not_end_the_removal_of_stale_links() {
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::os::unix::process::CommandExt;
    const USER: u32 = 20_001;
    if !nix::unistd::Uid::effective().is_root() {
        eprintln!("skipped: changing users needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o1777)).unwrap();
    for name in ["aaa", "bbb"] {
        let link = LinkOptions::new().dir(dir).create(&LinkConfig::new(name.parse().unwrap())).unwrap();
        link.send_inline(1, 0, b"keeps the files when the last participant detaches").unwrap();
    }
    for name in files(dir) {
        let path = dir.join(&name);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        chown(&path, name.starts_with("bbb").then_some(USER), None).unwrap();
    }
    // A copy: the user may not be able to reach the directory of the build. By a process of its own: a child of another thread would
    // inherit the descriptor, and a file that is open for writing cannot be run.
    let program = dir.join("program");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_shmesh")).arg(&program).status().unwrap().success());
    let output = Command::new(&program)
        .args(["rm", "--stale", "--force"])
        .env("SHMESH_DIR", dir)
        .uid(USER)
        .gid(USER)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (out, complaint) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(status(&output), 1, "{out}{complaint}");
    assert!(
        complaint.starts_with("error: link aaa: cannot remove ")
            && complaint.contains("1 link could not be removed"),
        "{complaint}"
    );
    assert!(out.contains("removed bbb") && out.contains("1 link removed"), "{out}{complaint}");
    assert!(files(dir).iter().all(|name| !name.starts_with("bbb")), "{:?}", files(dir));
    assert!(files(dir).iter().any(|name| name.starts_with("aaa")), "{:?}", files(dir));
}

/// Memory of programs that know nothing of links: seen by `ls`, and removed by `rm --stale` when it is marked and not in use.
#[test]
fn memory_of_other_programs_is_listed_and_removed_when_stale() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = dir.path();
    let create = |name: &str| shmesh_sys::lease::create(&dir.join(name), 0o660, 8192).unwrap();
    let leased = create("psm_leased");
    drop(create("sem.stale"));
    fs::write(dir.join("unmarked"), "a file of another program").unwrap();
    assert!(ok(dir, &["ls"]).contains("psm_leased"));
    // A process that another test starts has copies of this one's descriptors for a moment.
    let again = |args: &[&str], so: &dyn Fn(&str) -> bool| {
        let said = (0..60_000).map(|_| ok(dir, args)).find(|said| so(said));
        said.unwrap_or_else(|| panic!("never as expected: {args:?}"))
    };
    let listed: Value =
        serde_json::from_str(&again(&["ls", "--output", "json"], &|said| said.contains("\"stale\"")))
            .unwrap();
    let files_listed = listed["files"].as_array().unwrap();
    let seen: Vec<_> = files_listed
        .iter()
        .map(|file| (file["name"].as_str().unwrap(), file["use"].as_str().unwrap()))
        .collect();
    assert_eq!(seen, [("psm_leased", "leased"), ("sem.stale", "stale"), ("unmarked", "unknown")]);
    assert_eq!(files_listed[0]["bytes"], 8192);
    assert_eq!(files_listed[1]["kind"], "semaphore");
    let processes = files_listed[0]["processes"].as_array().unwrap();
    assert!(processes.iter().any(|pid| pid.as_u64() == Some(std::process::id().into())), "{processes:?}");
    let out = again(&["rm", "--stale"], &|said| said.contains("removed sem.stale"));
    assert!(out.contains("kept    psm_leased: a process uses it") && out.contains("1 file removed"), "{out}");
    assert_eq!(files(dir), ["psm_leased", "unmarked"]);
    drop(leased);
}

/// Memory without a file, as the Python package makes it: found at the processes that have it open or only mapped.
#[test]
fn arrays_are_listed_with_their_owner_and_users() {
    let dir = tempfile::tempdir().unwrap();
    let make = |bytes: u64| {
        let file = shmesh_sys::file::memfd(shmesh::inspect::ARRAY_MEMFD, false).unwrap();
        shmesh_sys::file::reserve(&file, bytes).unwrap();
        file
    };
    let (open, mapped) = (make(8192), make(12288));
    let inode = |file: &fs::File| file.metadata().unwrap().ino();
    let (open_inode, mapped_inode) = (inode(&open), inode(&mapped));
    let mapping = shmesh_sys::file::map(&mapped, 12288, false).unwrap();
    drop(mapped);
    let listed = json(dir.path(), &["ls", "--arrays", "--output", "json"]);
    let me = std::process::id();
    for (inode, bytes) in [(open_inode, 8192), (mapped_inode, 12288)] {
        let all = listed["arrays"].as_array().unwrap();
        let array =
            all.iter().find(|array| array["inode"] == inode).unwrap_or_else(|| panic!("{inode}: {all:?}"));
        assert_eq!((&array["bytes"], &array["len"]), (&bytes.into(), &bytes.into()));
        assert_eq!(array["user"], nix::unistd::geteuid().as_raw());
        assert!(array["processes"].as_array().unwrap().contains(&me.into()), "{array}");
    }
    assert!(ok(dir.path(), &["ls", "--arrays"]).contains(&open_inode.to_string()));
    assert!(json(dir.path(), &["ls", "--output", "json"]).get("arrays").is_none());
    drop(mapping);
}

/// Buffers of such a demo are not released, so pools this small run out of them.
#[test]
fn kept_demo_leaves_as_much_as_fits() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let file = dir.join("links.yaml");
    let pools =
        "{ cpu_msg: { buf_size_bytes: 100, pool_len: 6 }, cpu_data: { buf_size_bytes: 64, pool_len: 1 } }";
    fs::write(
        &file,
        format!("version: 1\nlinks:\n  - name: small\n    pools: {pools}\n    ring: {{ len: 4 }}\n"),
    )
    .unwrap();
    let out = ok(dir, &["demo", "--seconds", "1", "--keep", "--config", file.to_str().unwrap()]);
    assert!(out.contains("none lost, none duplicated") && out.contains("the link is kept"), "{out}");
    let link = &json(dir, &["ls", "--output", "json"])["links"][0];
    assert!(["m2s", "s2m"].iter().any(|ring| link["queued"][ring].as_u64() > Some(0)), "{link}");
    assert!(ok(dir, &["rm", "--stale", "--force"]).contains("1 link removed"));
}

#[test]
fn far_nodes_of_a_link_are_listed() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    let name: LinkName = "fronthaul".parse().unwrap();
    let _link = LinkOptions::new().dir(dir).create(&LinkConfig::new(name.clone())).unwrap();
    assert_eq!(json(dir, &["ls", "--output", "json"])["links"][0]["far"], serde_json::json!([]));
    let mut words = [0_u64; FAR_NODE_WORDS];
    words[0] = FAR_NODE_MAGIC;
    for (word, value) in [
        (FarNodeWord::WrittenMs, shmesh_sys::time::monotonic_nanos() / 1_000_000),
        (FarNodeWord::PeerTimeoutMs, 600_000),
        (FarNodeWord::IsConnected, 1),
        (FarNodeWord::RoundTripUs, 180),
        (FarNodeWord::Sent, 12_034),
        (FarNodeWord::Lost, 3),
        (FarNodeWord::BytesPerSecond, 3 << 20),
    ] {
        words[word as usize] = value;
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    fs::write(far_node_file(dir, &name, "edge-1"), bytes).unwrap();
    let line = "link fronthaul: far node edge-1: connected, round trip 180.0 \u{b5}s, 3 MiB/s; 12 034 sent, 0 received, 3 lost";
    let listed = ok(dir, &["ls"]);
    assert!(listed.contains(line), "{listed}");
    assert!(!listed.contains("FILE"), "the file belongs to the link: {listed}");
    let far = &json(dir, &["ls", "--output", "json"])["links"][0]["far"][0];
    assert_eq!((far["node"].as_str(), far["round_trip_us"].as_u64()), (Some("edge-1"), Some(180)));
}

#[test]
fn live_link_is_shown_and_not_modified() {
    for mode in [RingMode::Spsc, RingMode::Mpmc] {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let primary = options.create(&config("fronthaul", mode)).unwrap();
        let secondary = options.attach("fronthaul", Side::Secondary).unwrap();
        fill(&secondary);
        let received = primary.receive().unwrap().unwrap();
        let loan = primary.loan().unwrap();
        let dir = dir.path();
        let before = state(dir);

        let link = &json(dir, &["ls", "--output", "json"])["links"][0];
        assert_eq!((&link["name"], &link["usable"]), (&"fronthaul".into(), &true.into()));
        assert_eq!((&link["queued"]["m2s"], &link["queued"]["s2m"]), (&0.into(), &2.into()), "{link}");
        let me = std::process::id();
        for participant in link["participants"].as_array().unwrap() {
            assert_eq!((&participant["pid"], &participant["state"]), (&me.into(), &"alive".into()));
        }
        let table = ok(dir, &["ls"]);
        assert!(table.contains("fronthaul") && table.contains("cpu_msg 32x1000B"), "{table}");

        let dump = json(dir, &["dump", "fronthaul", "--output", "json", "--payload", "8"]);
        let messages = dump["rings"][1]["messages"].as_array().unwrap();
        assert_eq!((&messages[0]["msg_id"], &messages[0]["msg_len"]), (&102.into(), &900.into()));
        assert_eq!(messages[0]["msg_hex"], "5a5a5a5a5a5a5a5a");
        assert_eq!((&messages[1]["inline"], &messages[1]["cell_id"]), (&true.into(), &7.into()));
        assert_eq!(messages[1]["msg_hex"], "696e6c696e65");
        let pool = |i: usize| &dump["pool_use"][i];
        let counts =
            |i: usize| ["free", "loaned", "queued", "borrowed"].map(|what| pool(i)[what].as_u64().unwrap());
        assert_eq!((&pool(0)["pool"], counts(0)), (&"cpu_msg".into(), [29, 1, 1, 1]), "{dump}");
        assert_eq!((&pool(1)["pool"], counts(1)), (&"cpu_data".into(), [7, 0, 0, 1]), "{dump}");

        let shown = ok(dir, &["dump", "fronthaul", "--limit", "1", "--payload", "16"]);
        assert!(shown.contains("and 1 more") && shown.contains("|ZZZZZZZZZZZZZZZZ|"), "{shown}");
        assert!(fails(dir, &["rm", "fronthaul"], 1).contains(&format!("process {me}")));
        assert!(ok(dir, &["rm", "--stale"]).contains("kept    fronthaul"));
        assert_eq!(state(dir), before, "the link was modified");

        drop((loan, received));
        assert_eq!(primary.receive().unwrap().unwrap().msg_id(), 102, "the link still works");
        assert!(ok(dir, &["rm", "fronthaul", "--force"]).starts_with("removed fronthaul"));
        assert_eq!(files(dir), [""; 0]);
    }
}

#[test]
fn readers_of_a_broadcast_ring_are_shown_with_their_lag() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config("prices", RingMode::Broadcast);
    config.ring_len = 8;
    config.broadcast.slow = shmesh::config::SlowReaders::Skip;
    let options = LinkOptions::new().dir(dir.path());
    let writer = options.create(&config).unwrap();
    let [_slow, overtaken] = [(); 2].map(|()| options.attach("prices", Side::Secondary).unwrap());
    (0..40).for_each(|price| writer.send_inline(price, 0, b"").unwrap());
    assert_eq!(overtaken.receive().unwrap().unwrap().msg_id(), 39);

    let table = ok(dir.path(), &["ls"]);
    assert!(table.contains("broadcast 8"), "{table}");
    assert!(
        table.contains("link prices: 2 readers, the slowest 7 messages behind; 39 lost in all"),
        "{table}"
    );
    let dumped = ok(dir.path(), &["dump", "prices"]);
    assert!(dumped.contains("0 behind, 39 lost") && dumped.contains("7 behind"), "{dumped}");
    let listed = &json(dir.path(), &["ls", "--output", "json"])["links"][0];
    assert_eq!(listed["ring"]["mode"], "broadcast");
    let readers = listed["participants"].as_array().unwrap().iter().map(|who| &who["reader"]);
    let mut lost: Vec<_> = readers.filter_map(|reader| reader["lost"].as_u64()).collect();
    lost.sort_unstable();
    assert_eq!(lost, [0, 39]);
}

#[test]
fn type_of_typed_messages_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let options = LinkOptions::new().dir(dir.path());
    let primary = options.create(&config("fronthaul", RingMode::Mpmc)).unwrap();
    let payload_type = || json(dir.path(), &["ls", "--output", "json"])["links"][0]["payload_type"].clone();
    assert_eq!(payload_type(), Value::Null);
    let _typed = primary.typed_as::<[u32]>("Samples/1").unwrap();
    let shown = "[Samples/1] (4 bytes each, aligned to 4)";
    assert_eq!(payload_type(), shown);
    for args in [&["ls"][..], &["dump", "fronthaul"]] {
        assert!(ok(dir.path(), args).contains(&format!("typed messages of {shown}")), "{args:?}");
    }
    let mut requests = config("requests", RingMode::Mpmc);
    requests.request_window = 2;
    let _typed =
        options.create(&requests).unwrap().typed_requests_as::<u64, [f32]>("Query", "Batch").unwrap();
    let shown = "[Batch] (4 bytes each, aligned to 4) from the primary side and Query (8 bytes, aligned to 8) from the secondary side";
    for args in [&["ls"][..], &["dump", "requests"]] {
        assert!(ok(dir.path(), args).contains(&format!("typed messages of {shown}")), "{args:?}");
    }
}

#[test]
fn participants_are_listed_without_a_sidecar() {
    let dir = tempfile::tempdir().unwrap();
    let options = LinkOptions::new().dir(dir.path());
    let primary = options.create(&config("fronthaul", RingMode::Mpmc)).unwrap();
    let secondary = options.attach("fronthaul", Side::Secondary).unwrap();
    let dir = dir.path();
    let me = std::process::id();
    let who = json(dir, &["who", "fronthaul", "--output", "json"]);
    assert!(who["served_by"].is_null(), "{who}");
    let sides: Vec<&Value> = who["participants"].as_array().unwrap().iter().map(|one| &one["side"]).collect();
    assert_eq!(sides, ["primary", "secondary"]);
    assert!(who["participants"].as_array().unwrap().iter().all(|one| one["pid"] == me), "{who}");
    let shown = ok(dir, &["who", "fronthaul"]);
    assert!(shown.contains("no sidecar keeps it") && shown.contains(&me.to_string()), "{shown}");
    assert!(ok(dir, &["keys", "fronthaul"]).contains("no sidecar"));
    let keys = json(dir, &["keys", "fronthaul", "--output", "json"]);
    assert_eq!((&keys["served_by"], keys["keys"].as_array().unwrap().len()), (&Value::Null, 0));
    drop((primary, secondary));
    leave_a_crash(dir);
    let shown = ok(dir, &["who", "fronthaul"]);
    assert!(shown.contains("not served by any process") && shown.contains("dead"), "{shown}");
}

/// Not a test: the process that `after_a_kill_…` starts and kills. It says that it is ready, and waits.
#[test]
#[ignore = "the victim of another test"]
fn victim() {
    let Ok(dir) = std::env::var(VICTIM_DIR) else { return };
    let options = LinkOptions::new().dir(dir);
    let primary = options.create(&config("fronthaul", RingMode::Mpmc)).unwrap();
    let secondary = options.attach("fronthaul", Side::Secondary).unwrap();
    fill(&secondary);
    let _received = primary.receive().unwrap();
    let _loan = secondary.loan_with(PoolId::CpuData).unwrap();
    println!("ready");
    loop {
        std::thread::park();
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed())
}

fn leave_a_crash(dir: &Path) -> u32 {
    use std::io::{BufRead, BufReader};
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "command::victim", "--ignored", "--nocapture"]).env(VICTIM_DIR, dir);
    let mut victim = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(victim.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("ready")));
    kill(pid(&victim), Signal::SIGKILL).unwrap();
    victim.wait().unwrap();
    victim.id()
}

#[test]
fn processes_of_another_pid_namespace_are_alive_or_dead() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let elsewhere = |more: &[&str]| {
        let mut unshare = Command::new("unshare");
        unshare.args(["--pid", "--fork", "--mount-proc", env!("CARGO_BIN_EXE_shmesh"), "ls"]).args(more);
        unshare.env("SHMESH_DIR", dir).stdin(Stdio::null()).output().unwrap()
    };
    let states = || -> Vec<String> {
        let listed: Value = serde_json::from_slice(&elsewhere(&["--output", "json"]).stdout).unwrap();
        let participants = listed["links"][0]["participants"].as_array().unwrap();
        participants.iter().map(|who| who["state"].as_str().unwrap().to_owned()).collect()
    };
    if !elsewhere(&[]).status.success() {
        eprintln!("skipped: no right to make namespaces here");
        return;
    }
    leave_a_crash(dir);
    assert_eq!(states(), ["dead", "dead"]);
    let options = LinkOptions::new().dir(dir);
    let _phy = options.create(&config("fronthaul", RingMode::Mpmc)).unwrap();
    let _mac = options.attach("fronthaul", Side::Secondary).unwrap();
    assert_eq!(states(), ["alive", "alive"]);
    // Without the evidence, the reason.
    fs::remove_file(dir.join("fronthaul.lock")).unwrap();
    assert_eq!(states(), ["unknown", "unknown"]);
    let table = text(&elsewhere(&[]).stdout);
    assert!(table.contains("the lock file of the link cannot be opened"), "{table}");
}

#[test]
fn top_opens_the_files_of_a_link_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let link = LinkOptions::new().dir(dir).create(&config("fronthaul", RingMode::Mpmc)).unwrap();
    let watch = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
    watch.add_watch(dir, AddWatchFlags::IN_OPEN).unwrap();
    // In another pid namespace, where only the lock file shows that this process is alive.
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--mount-proc", env!("CARGO_BIN_EXE_shmesh")]);
    unshare.args(["top", "--output", "json", "--interval", "0.1", "--count", "4"]).env("SHMESH_DIR", dir);
    let output = unshare.stdin(Stdio::null()).output().unwrap();
    if !output.status.success() && text(&output.stderr).contains("unshare") {
        shmesh_testing::skip("NAMESPACES", "no right to make namespaces here");
        return;
    }
    let printed = text(&output.stdout);
    assert_eq!(printed.matches(r#""state":"alive""#).count(), 4, "{printed}{}", text(&output.stderr));
    let mut opened: Vec<String> =
        watch.read_events().unwrap().into_iter().filter_map(|event| event.name?.into_string().ok()).collect();
    opened.sort();
    assert_eq!(opened, ["fronthaul.lock", "fronthaul_cpu_data", "fronthaul_cpu_msg", "fronthaul_shm"]);
    drop(link);
}

#[test]
fn buffers_of_a_killed_process_are_shown_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let dead = leave_a_crash(dir);
    let before = state(dir);
    let table = ok(dir, &["ls"]);
    assert!(table.contains(&format!("{dead} dead")), "{table}");
    let dump = json(dir, &["dump", "fronthaul", "--output", "json"]);
    let pool = |i: usize, what: &str| dump["pool_use"][i][what].as_u64().unwrap();
    assert_eq!((pool(0, "queued"), pool(0, "orphaned"), pool(0, "loaned")), (1, 2, 0), "{dump}");
    assert_eq!((pool(1, "orphaned"), pool(2, "queued")), (2, 1), "{dump}");
    let shown = ok(dir, &["dump", "fronthaul"]);
    assert!(shown.contains(&format!("pid {dead} dead")), "{shown}");
    assert_eq!(state(dir), before, "the link was modified");

    assert!(ok(dir, &["rm", "--stale"]).contains("kept    fronthaul: 2 queued messages"));
    assert!(ok(dir, &["rm", "--stale", "--force"]).contains("removed fronthaul"));
    assert_eq!(files(dir), [""; 0]);
    leave_a_crash(dir);
    assert!(ok(dir, &["rm", "fronthaul"]).contains("2 queued messages"));
    assert_eq!(files(dir), [""; 0]);
}

#[test]
fn unusable_links_are_named_and_not_fatal() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let options = LinkOptions::new().dir(dir);
    let good = options.create(&config("good", RingMode::Mpmc)).unwrap();
    let shm = fs::read(dir.join("good_shm")).unwrap();
    let mut other = shm.clone();
    other[6] = 99;
    let mut damaged = shm.clone();
    damaged[33] ^= 1;
    fs::write(dir.join("version_shm"), &other).unwrap();
    fs::write(dir.join("damaged_shm"), &damaged).unwrap();
    fs::write(dir.join("short_shm"), &shm[..shm.len() - 4096]).unwrap();
    fs::write(dir.join("alone_shm"), &shm).unwrap();
    fs::write(dir.join("text_shm"), "not a segment at all").unwrap();
    fs::write(dir.join("empty_shm"), "").unwrap();
    fs::create_dir(dir.join("folder_shm")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", dir.join("symlink_shm")).unwrap();
    fs::write(dir.join("bystander"), "nothing of ours").unwrap();
    drop(std::os::unix::net::UnixListener::bind(dir.join("gone.broker-1")).unwrap());

    let table = ok(dir, &["ls"]);
    let listed = json(dir, &["ls", "--output", "json"]);
    let error = |name: &str| {
        let links = listed["links"].as_array().unwrap();
        let link =
            links.iter().find(|link| link["name"] == name).unwrap_or_else(|| panic!("{name}: {listed}"));
        link["error"].as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(error("good"), "");
    for (name, what) in [
        ("version", "layout version 99"),
        ("damaged", "damaged"),
        ("short", "truncated"),
        ("alone", "is missing"),
        ("text", "not a shmesh segment"),
        ("empty", "not a shmesh segment"),
        ("folder", "not a shmesh segment"),
        ("symlink", "not a shmesh segment"),
        ("gone", "no other process kept the memory"),
    ] {
        assert!(error(name).contains(what), "{name}: {}", error(name));
        assert!(table.contains(name), "{table}");
        assert!(fails(dir, &["dump", name], 1).contains(what), "{name}");
    }
    let (of_links, of_files) = table.split_once("\nFILE").unwrap();
    assert!(!of_links.contains("bystander") && of_files.contains("bystander"), "{table}");
    assert!(!of_files.contains("good") && !of_files.contains("version"), "{table}");

    for foreign in ["text", "empty", "folder", "symlink"] {
        for force in [&["rm", foreign][..], &["rm", foreign, "--force"]] {
            assert!(fails(dir, force, 1).contains("is not a file of a shmesh link"), "{foreign}");
        }
    }
    for ours in ["version", "damaged", "short", "gone"] {
        ok(dir, &["rm", ours]);
    }
    // Its pools are gone, but its own segment tells who lives.
    assert!(fails(dir, &["rm", "alone"], 1).contains("uses it"));
    ok(dir, &["rm", "alone", "--force"]);
    drop(good);
    assert_eq!(files(dir), ["bystander", "empty_shm", "folder_shm", "symlink_shm", "text_shm"]);
    assert!(!fs::read_to_string("/etc/passwd").unwrap().is_empty());
}

#[test]
fn nvipc_link_is_listed_and_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let pools = config("theirs", RingMode::Mpmc).pools;
    let link = shmesh_nvipc_wire::Options::new().dir(dir).create("theirs", pools).unwrap();
    let buffers = link.allocate(None).unwrap();
    let message = shmesh_nvipc_wire::Message { msg_id: 77, cell_id: 3, msg_len: 5, data_len: 0, buffers };
    link.send(message).unwrap();
    let before = files(dir);

    let table = ok(dir, &["ls"]);
    assert!(table.contains("theirs") && table.contains("nvipc") && table.contains("alive"), "{table}");
    assert!(!table.contains("move it away"), "{table}");
    let listed = &json(dir, &["ls", "--output", "json"])["links"][0];
    assert_eq!((&listed["layout"], &listed["queued"]["m2s"]), (&"nvipc".into(), &1.into()));
    let dumped = json(dir, &["dump", "theirs", "--output", "json"]);
    assert_eq!(dumped["messages"]["m2s"][0]["msg_id"], 77);
    assert_eq!(dumped["pools"][0]["free"], pools[0].pool_len - 1);
    assert!(ok(dir, &["dump", "theirs"]).contains("77"));
    // Not by `json`: other findings may fail here.
    let report: Value = serde_json::from_slice(&shmesh(dir, &["doctor", "--output", "json"]).stdout).unwrap();
    let mut findings = report["findings"].as_array().unwrap().iter();
    let note = findings.find(|finding| finding["id"] == "dir.nvipc").unwrap();
    assert_eq!(note["value"], serde_json::json!(["theirs (its primary lives)"]));
    for refused in [&["capture", "theirs", "-o", "-"][..], &["rm", "theirs"], &["rm", "theirs", "--force"]] {
        assert!(fails(dir, refused, 1).contains("NVIPC's layout, and its primary is alive"), "{refused:?}");
    }
    assert_eq!(files(dir), before);
    drop(link);
    assert!(ok(dir, &["ls"]).contains("no links"));
}

#[test]
fn memfd_link_is_requested_from_its_host() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config("hidden", RingMode::Spsc);
    config.backing = shmesh::config::Backing::Memfd;
    let primary = LinkOptions::new().dir(dir.path()).create(&config).unwrap();
    primary.send_inline(5, 0, b"x").unwrap();
    let link = &json(dir.path(), &["ls", "--output", "json"])["links"][0];
    assert_eq!((&link["backing"], &link["queued"]["m2s"]), (&"memfd".into(), &1.into()));
    assert!(fails(dir.path(), &["rm", "hidden"], 1).contains("uses it"));
}

#[test]
fn closed_output_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let _link = LinkOptions::new().dir(dir.path()).create(&config("fronthaul", RingMode::Mpmc)).unwrap();
    for args in [&["ls"][..], &["dump", "fronthaul"], &["doctor"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh"));
        command.args(args).env("SHMESH_DIR", dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command.stdout(writer).output().unwrap();
        assert_eq!((status(&output), text(&output.stderr).as_str()), (0, ""), "{args:?}");
    }
}

#[test]
fn benchmarks_measure_and_clean_up() {
    benchmarks(&["data"], &["fd"], &["inline"], &["1"], &["broadcast"]);
}

#[test]
#[ignore = "long: every form and way to wait takes its time"]
fn benchmarks_measure_every_form_and_way_to_wait() {
    benchmarks(
        &["pooled", "data"],
        &["spin", "fd"],
        &["inline", "pooled"],
        &["1", "2"],
        &["broadcast", "spsc"],
    );
}

fn benchmarks(forms: &[&str], waits: &[&str], broadcast_forms: &[&str], readers: &[&str], rings: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert_eq!(
        ok(dir, &["bench", "--list", "--metric", "rtt", "--sizes", "64", "--ring", "spsc", "--wait", "spin"])
            .trim(),
        "inline-rtt-64-spsc-spin\npooled-rtt-64-spsc-spin"
    );
    let quick = ["--seconds", "0.1", "--repeat", "1", "--output", "json"];
    let mut grid = vec!["bench", "--ring", "mpmc", "--sizes", "64", "--batch", "16"];
    let (form, wait) = (forms.join(","), waits.join(","));
    grid.extend(["--form", &form, "--wait", &wait]);
    let rows = json(dir, &[&grid[..], &quick].concat());
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 2 * forms.len() * waits.len(), "{rows:?}");
    for row in rows {
        assert_eq!((&row["group"], &row["processes"]), (&"shmesh".into(), &2.into()));
        assert!(row["p50"].as_f64().unwrap() > 0.0 && row["floor_ns"].as_f64().unwrap() > 0.0, "{row}");
    }
    let mut grid = vec!["bench", "--ring", "broadcast", "--sizes", "64", "--wait", "poll", "--batch", "1"];
    let (form, counts) = (broadcast_forms.join(","), readers.join(","));
    grid.extend(["--readers", &counts, "--form", &form]);
    let rows = json(dir, &[&grid[..], &quick].concat());
    let rows: Vec<_> = rows.as_array().unwrap().iter().map(|row| (&row["name"], &row["processes"])).collect();
    let expected = |name: &str, processes: u64| (Value::from(name), Value::from(processes));
    let expected: Vec<_> = ["rtt", "oneway"]
        .iter()
        .flat_map(|metric| broadcast_forms.iter().map(move |form| format!("{form}-{metric}")))
        .flat_map(|test| {
            let count = |n: &&str| (n.to_string(), n.parse::<u64>().unwrap() + 1);
            readers
                .iter()
                .map(count)
                .map(move |(n, processes)| expected(&format!("{test}-64-broadcast{n}-poll"), processes))
        })
        .collect();
    assert_eq!(rows, expected.iter().map(|(name, processes)| (name, processes)).collect::<Vec<_>>());
    for ring in rings {
        let ops = json(dir, &[&["bench", "ops", "--ring", ring][..], &quick].concat());
        assert_eq!(ops.as_array().unwrap().len(), 6);
    }
    let links = json(dir, &["bench", "links", "--counts", "2", "--output", "json"]);
    assert!(
        links.as_array().unwrap().iter().any(|row| row["metric"] == "fds" && row["p50"].as_f64() > Some(1.0))
    );
    assert_eq!(files(dir), [""; 0]);
}

#[test]
fn benchmarks_run_between_namespaces() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let asked = ["bench", "--apart", "--metric", "rtt", "--sizes", "48", "--ring", "spsc", "--wait", "poll"];
    let quick = ["--seconds", "0.1", "--repeat", "1", "--output", "json"];
    let can = Command::new("unshare").args(["--pid", "--fork", "--mount-proc", "true"]).output();
    if !can.is_ok_and(|ran| ran.status.success()) {
        eprintln!("skipped: no right to make namespaces here; and it says so");
        fails(dir, &asked, 2);
        return;
    }
    let rows = json(dir, &[&asked[..], &quick].concat());
    let names: Vec<_> = rows.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["inline-rtt-48-spsc-poll", "inline-rtt-48-spsc-poll-apart"]);
    assert!(rows[1]["p50"].as_f64().unwrap() > 0.0);
    assert_eq!(files(dir), [""; 0]);
}

#[test]
fn doctor_command_runs() {
    let dir = tempfile::tempdir().unwrap();
    let output = shmesh(dir.path(), &["doctor", "--output", "json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let expected = if report["verdict"] == "works" { 0 } else { 1 };
    assert_eq!(status(&output), expected, "{report}");
}

#[test]
fn completions_and_man_pages_cover_every_subcommand() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = ok(dir.path(), &["completions", shell]);
        for name in ["capture", "doctor", "completions"] {
            assert!(script.contains(name), "{shell} has no completion for {name}");
        }
        assert!(!script.contains("demo-side"), "{shell} completes the command line of a test process");
    }
    assert!(fails(dir.path(), &["completions", "dos"], 2).contains("bash"));
    let man = dir.path().join("new/man1");
    ok(dir.path(), &["man", man.to_str().unwrap()]);
    for page in ["shmesh.1", "shmesh-dump.1", "shmesh-bench-links.1"] {
        assert!(files(&man).iter().any(|name| name == page), "{page} is not among {:?}", files(&man));
    }
    assert!(fs::read_to_string(man.join("shmesh-dump.1")).unwrap().contains("\\-\\-dir"));
    assert!(fails(dir.path(), &["man", "/proc/none"], 1).contains("/proc/none"));
}

/// Messages of a thread that does not stop: some of a sample are sent after the one before.
#[test]
fn top_prints_rates_and_times_of_links_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let options = LinkOptions::new().dir(dir.path());
    let timed = LinkConfig { latency_sample: 4, ..config("radio", RingMode::Spsc) };
    let primary = options.create(&timed).unwrap();
    let secondary = options.attach("radio", Side::Secondary).unwrap();
    let top = ["top", "--interval", "0.1", "--count", "1", "--output", "json"];
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                primary.loan().unwrap().send().unwrap();
                drop(secondary.receive().unwrap());
            }
        });
        until("top shows rates and times", || {
            let line = json(dir.path(), &top);
            assert!(line["interval_seconds"].as_f64().unwrap() >= 0.1, "{line}");
            let link = &line["links"][0];
            assert_eq!(link["messages_per_second"]["s2m"], 0.0, "{link}");
            assert_eq!((&link["name"], &link["mode"]), (&"radio".into(), &"spsc".into()));
            assert_eq!(link["participants"].as_array().unwrap().len(), 2);
            let times = ["latency_seconds", "hold_seconds"].map(|time| {
                let [p50, p99] = ["p50", "p99"].map(|quantile| link[time][quantile].as_f64());
                p50.zip(p99).is_some_and(|(p50, p99)| 0.0 < p50 && p50 <= p99)
            });
            link["messages_per_second"]["m2s"].as_f64().unwrap() > 0.0 && times == [true; 2]
        });
        until("top prints times", || {
            let table = ok(dir.path(), &["top", "--interval", "0.1", "--count", "1"]);
            let row = table.lines().nth(1).unwrap_or_default().trim_end().to_owned();
            assert!(table.contains("P50") && table.contains("P99"), "{table}");
            // The 99th percentile with its unit, and not a dash.
            row.ends_with('s')
        });
        drop(stop);
    });
}

#[test]
fn top_prints_a_table_for_each_interval_where_there_is_no_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let options = LinkOptions::new().dir(dir.path());
    let _link = options.create(&config("radio", RingMode::Mpmc)).unwrap();
    fs::write(dir.path().join("broken"), b"SHMESH").unwrap();
    let top = ok(dir.path(), &["top", "--interval", "0.1", "--count", "2"]);
    assert_eq!(top.matches("LINK").count(), 2, "{top}");
    assert_eq!(top.matches("radio  mpmc").count(), 2, "{top}");
    let missing = ok(dir.path(), &["top", "absent", "--interval", "0.1", "--count", "1"]);
    assert!(missing.contains("absent"), "{missing}");
    let before = state(dir.path());
    ok(dir.path(), &["top", "--interval", "0.1", "--count", "1"]);
    assert_eq!(state(dir.path()), before, "top changes nothing");
    fails(&dir.path().join("absent"), &["top", "--count", "1"], 1);
    fails(dir.path(), &["top", "--count", "0"], 2);
    fails(dir.path(), &["top", "--interval", "0"], 2);
}
