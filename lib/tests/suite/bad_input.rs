//! Each kind of bad input has an error of its own, which names the link, the limit or file, and the remedy.

#![allow(clippy::type_complexity, reason = "tables of cases")]

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind, listen, recv,
    send as send_on, socket,
};
use shmesh::config::PoolId;
use shmesh::{Error, Link, LinkOptions, MAX_SEATS, Side};
use shmesh_proto::broker::{self, Code, Reply, Request, reply, request};
use shmesh_proto::limits::MAX_PACKET_BYTES;
use shmesh_proto::packet;
use shmesh_testing::{Peer, broker, config, ipc_dir, is_root, kind_of, pose_as_host, refused, send, until};

/// Asserts that the error is of this kind, and that its text has all of these parts.
#[track_caller]
fn says(error: &Error, kind: &str, parts: &[&str]) {
    let text = error.to_string();
    assert_eq!(kind_of(error), kind, "{text}");
    said(&text, parts);
}

#[track_caller]
fn said(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
    assert!(!text.contains('\n'), "one line: {text}");
}

fn options(dir: &Path) -> LinkOptions {
    LinkOptions::new().dir(dir)
}

fn attach(dir: &Path) -> shmesh::Result<Link> {
    options(dir).attach("link", Side::Secondary)
}

fn create(dir: &Path, changes: &str) -> shmesh::Result<Link> {
    options(dir).create(&config("link", changes))
}

/// Creates the files of a link whose only process was killed. A message is queued in it.
fn abandoned(dir: &Path, changes: &str) {
    let mut peer = Peer::start(dir);
    peer.tell(&format!("create link {changes}"));
    peer.tell("send 1 waits");
    peer.kill();
}

/// Asserts that attaching and creating fail with the same error.
#[track_caller]
fn both_say(dir: &Path, kind: &str, parts: &[&str]) {
    says(&refused(attach(dir)), kind, parts);
    says(&refused(create(dir, "")), kind, parts);
}

/// As [`both_say`], for a link whose memory has no names: only such a link asks the host's socket.
fn both_say_without_names(dir: &Path, kind: &str, parts: &[&str]) {
    says(&refused(attach(dir)), kind, parts);
    says(&refused(create(dir, MEMFD)), kind, parts);
}

const MEMFD: &str = "backing=memfd";

#[test]
fn foreign_files_are_refused() {
    let text_of = |dir: &Path| dir.join("link_shm").display().to_string();
    let random: Vec<u8> =
        (0..8192_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24).to_le_bytes()[0]).collect();
    for content in [&random[..], &random[..100], &[0; 8192], &[]] {
        let dir = ipc_dir();
        std::fs::write(dir.path().join("link_shm"), content).unwrap();
        both_say(dir.path(), "NotOurs", &["link link: ", &text_of(dir.path()), "move it away"]);
        assert_eq!(std::fs::read(dir.path().join("link_shm")).unwrap(), content, "it is left as it was");
    }
    let make: [(&str, fn(&Path)); 4] = [
        ("directory", |path| std::fs::create_dir(path).unwrap()),
        ("fifo", |path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRUSR).unwrap()),
        ("symlink", |path| std::os::unix::fs::symlink("/etc/passwd", path).unwrap()),
        ("socket", |path| drop(std::os::unix::net::UnixListener::bind(path).unwrap())),
    ];
    for (what, make) in make {
        let dir = ipc_dir();
        make(&dir.path().join("link_shm"));
        let error = refused(attach(dir.path()));
        says(&error, "NotOurs", &["link link: ", &text_of(dir.path()), "move it away"]);
        says(&refused(create(dir.path(), "")), "NotOurs", &["link link: "]);
        assert!(std::fs::symlink_metadata(dir.path().join("link_shm")).is_ok(), "the {what} is left there");
    }
}

#[test]
fn symlinks_are_not_followed() {
    let (real, dir) = (ipc_dir(), ipc_dir());
    abandoned(real.path(), "");
    for file in ["link_shm", "link_cpu_msg", "link_cpu_data"] {
        std::os::unix::fs::symlink(real.path().join(file), dir.path().join(file)).unwrap();
    }
    both_say(dir.path(), "NotOurs", &["link link: ", "link_shm"]);
}

#[test]
fn truncated_file_is_refused() {
    for (file, len) in [("link_shm", 4096), ("link_cpu_msg", 8192), ("link_cpu_data", 4096)] {
        let dir = ipc_dir();
        abandoned(dir.path(), "");
        let path = dir.path().join(file);
        let whole = std::fs::metadata(&path).unwrap().len();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
        let parts = [path.display().to_string(), len.to_string(), whole.to_string()];
        both_say(
            dir.path(),
            "Truncated",
            &["link link: ", &parts[0], &parts[1], &parts[2], "shmesh rm link"],
        );
    }
}

#[test]
fn file_of_another_size_is_refused() {
    let dir = ipc_dir();
    abandoned(dir.path(), "");
    let path = dir.path().join("link_shm");
    let whole = std::fs::metadata(&path).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(whole + 4096).unwrap();
    both_say(dir.path(), "Truncated", &["link link: ", &whole.to_string(), &(whole + 4096).to_string()]);
    // Less than a header is no segment at all.
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(64).unwrap();
    both_say(dir.path(), "NotOurs", &["link link: "]);
}

/// The words of a header, to be changed and written back with a checksum that fits.
fn patch_header(path: &Path, change: impl Fn(&mut [u64; 16])) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut bytes = [0; 128];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let mut words: [u64; 16] =
        std::array::from_fn(|i| u64::from_le_bytes(bytes[i * 8..][..8].try_into().unwrap()));
    change(&mut words);
    words[15] = words[..15]
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, word| (sum ^ word).wrapping_mul(0x0100_0000_01b3));
    for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    file.write_all_at(&bytes, 0).unwrap();
}

#[test]
fn other_layout_version_is_refused() {
    for (file, version) in [("link_shm", 1_u64), ("link_shm", 77), ("link_cpu_msg", 1)] {
        let dir = ipc_dir();
        abandoned(dir.path(), "");
        patch_header(&dir.path().join(file), |words| words[0] = words[0] & ((1 << 48) - 1) | version << 48);
        let found = format!("version {version}");
        both_say(dir.path(), "Version", &["link link: ", file, &found, "supports 2", "shmesh rm link"]);
    }
}

#[test]
fn contradictory_headers_are_refused() {
    let changes: [fn(&mut [u64; 16]); 8] = [
        |words| words[4] = 3,        // a ring whose length is no power of two
        |words| words[4] = 0,        // none
        |words| words[4] = 1 << 30,  // one too long
        |words| words[5] = 0,        // no MSG pool
        |words| words[6] = 5 << 32,  // buffers but none of them
        |words| words[7] = u64::MAX, // too many and too large
        |words| words[1] = 99,       // no such pool
        |words| words[1] = u64::MAX, // nor that
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let dir = ipc_dir();
        abandoned(dir.path(), "");
        patch_header(&dir.path().join("link_shm"), change);
        let error = refused(attach(dir.path()));
        says(
            &error,
            "Damaged",
            &["link link: ", "link_shm", "its header contradicts itself", "shmesh rm link"],
        );
        assert_eq!(kind_of(&refused(create(dir.path(), ""))), "Damaged", "change {i}");
    }
    // Without a checksum that fits.
    let dir = ipc_dir();
    abandoned(dir.path(), "");
    let file = std::fs::OpenOptions::new().read(true).write(true).open(dir.path().join("link_shm")).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 3 * 8).unwrap();
    file.write_all_at(&[!byte[0]], 3 * 8).unwrap();
    both_say(dir.path(), "Damaged", &["link link: ", "its header contradicts itself"]);
}

#[test]
fn swapped_segment_is_refused() {
    let dir = ipc_dir();
    abandoned(dir.path(), "");
    std::fs::copy(dir.path().join("link_cpu_msg"), dir.path().join("link_shm")).unwrap();
    both_say(dir.path(), "Damaged", &["link link: ", "link_shm", "it holds another segment"]);
}

#[test]
fn pool_of_another_link_is_refused() {
    let (dir, other) = (ipc_dir(), ipc_dir());
    abandoned(dir.path(), "");
    abandoned(other.path(), "");
    std::fs::copy(other.path().join("link_cpu_msg"), dir.path().join("link_cpu_msg")).unwrap();
    both_say(dir.path(), "Damaged", &["link link: ", "link_cpu_msg", "another link of the same name"]);
}

#[test]
fn missing_pool_is_refused() {
    let dir = ipc_dir();
    abandoned(dir.path(), "");
    std::fs::remove_file(dir.path().join("link_cpu_data")).unwrap();
    both_say(dir.path(), "Damaged", &["link link: ", "link_cpu_data", "it is missing", "shmesh rm link"]);
}

#[test]
fn foreign_pool_file_is_not_removed() {
    let dir = ipc_dir();
    std::fs::write(dir.path().join("link_cpu_msg"), "another program's").unwrap();
    says(&refused(create(dir.path(), "")), "NotOurs", &["link link: ", "link_cpu_msg", "move it away"]);
    assert_eq!(std::fs::read(dir.path().join("link_cpu_msg")).unwrap(), b"another program's");
}

#[test]
fn link_of_another_user_is_refused() {
    if !is_root() {
        return;
    }
    for changes in ["", "backing=memfd", "notify=off"] {
        let dir = ipc_dir();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let mut owner = Peer::start(dir.path());
        owner.tell(&format!("create link {changes}"));
        let mut stranger = Peer::start(dir.path());
        stranger.tell("prepare user 65534 65534");
        for order in ["attach link secondary 0", "attach link primary 0", "create link"] {
            let answer = stranger.ask(&format!("{order}{}", if order == "create link" { " " } else { "" }));
            let parts = ["err Permission link link: ", &dir.path().display().to_string(), "file_mode 0660"];
            said(&answer, &parts);
        }
        // Also when its owner has gone.
        if changes.is_empty() {
            owner.tell("send 1 waits");
            owner.kill();
            said(&stranger.ask("attach link secondary 0"), &["err Permission link link: ", "file_mode 0660"]);
        }
    }
}

#[test]
fn directory_of_another_user_is_refused() {
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let mut stranger = Peer::start(dir.path());
    stranger.tell("prepare user 65534 65534");
    said(&stranger.ask("create link"), &["err Permission link link: ", &dir.path().display().to_string()]);
    assert_eq!(shmesh_testing::files(dir.path()), [""; 0]);
}

#[test]
fn full_file_system_is_reported() {
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let mut peer = Peer::start(dir.path());
    peer.tell(&format!("prepare tmpfs {} 1m", dir.path().display()));
    let answer = peer.ask("create link data=65536x64");
    let parts = [
        "err NoSpace link link: ",
        "link_cpu_data",
        "bytes",
        "free",
        &dir.path().display().to_string(),
        "sizeLimit",
    ];
    said(&answer, &parts);
    // It took nothing, so a smaller one fits, again and again.
    for _ in 0..3 {
        peer.tell("create link data=4096x64");
        peer.tell("close");
        said(&peer.ask("create link data=65536x64"), &["err NoSpace"]);
    }
}

/// Attempts that fail before there are segments, and after.
#[test]
fn failed_attempt_leaves_the_directory_as_it_was() {
    let dir = ipc_dir();
    let before = |dir: &Path, changes: &str| {
        let before = shmesh_testing::files(dir);
        let config = config("link", changes);
        let attempts = [
            refused(options(dir).create(&config)),
            refused(options(dir).keep(&config)),
            refused(options(dir).attach("link", Side::Secondary)),
        ];
        assert_eq!(shmesh_testing::files(dir), before, "{attempts:?}");
        kind_of(&attempts[0])
    };
    // More than any file system has.
    let kind = before(dir.path(), "data=16777216x65000");
    assert!(["NoSpace", "System", "MemoryLimit"].contains(&&*kind), "{kind}");
    // Segments of a link with a pool in device memory have names by the time that its host listens.
    let deep = dir.path().join("a".repeat(120));
    std::fs::create_dir(&deep).unwrap();
    for changes in ["backing=memfd", "cuda=64x4"] {
        assert_eq!(before(&deep, changes), "Host", "{changes}");
    }
    let link = create(dir.path(), "cuda=64x4").unwrap();
    let no_memory = |_| Err::<shmesh::device::HostMemory, _>(std::io::ErrorKind::OutOfMemory.into());
    refused(link.device_pool(PoolId::CudaData, no_memory));
    drop(link);
    assert_eq!(shmesh_testing::files(dir.path()), ["a".repeat(120)]);
    std::fs::write(dir.path().join("link_shm"), "another program's").unwrap();
    for changes in ["", "backing=memfd"] {
        assert_eq!(before(dir.path(), changes), "NotOurs", "{changes}");
    }
}

#[test]
fn remains_of_a_dead_creator_are_reused() {
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let mut peer = Peer::start(dir.path());
    peer.tell(&format!("prepare tmpfs {} 1m", dir.path().display()));
    peer.tell("create link data=8192x64");
    // Threads of the peer alone see that file system: the one that mounted it, and those that came from it.
    // A thread that ends while they are listed can hide others.
    let mut found = None;
    until("a thread of the peer shows its file system", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", peer.pid())).unwrap();
        found = tasks
            .filter_map(Result::ok)
            .map(|task| task.path().join("root").join(dir.path().strip_prefix("/").unwrap()))
            .find(|seen| std::fs::read_dir(seen).is_ok_and(|mut files| files.next().is_some()));
        found.is_some()
    });
    let seen = found.unwrap();
    let pool = seen.join("link_cpu_data");
    let left = std::fs::read(&pool).unwrap();
    peer.tell("close");
    assert!(!pool.exists());
    // It died when the pool had its name and the link had not.
    // The monitor of the peer may have the closed link mapped for a moment.
    until("the memory of the closed link is free", || std::fs::write(&pool, &left).is_ok());
    peer.tell("create link data=8192x64");
    peer.tell("close");
    assert_eq!(shmesh_testing::files(&seen), [""; 0]);
}

#[test]
fn memory_limit_is_reported() {
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let mut peer = Peer::start(dir.path());
    // The kernel would kill the process, so the library has to look before: at files that only this process sees.
    peer.tell("prepare memory 3000000 1000000");
    for backing in ["", "backing=memfd"] {
        let answer = peer.ask(&format!("create link data=65536x64 {backing}"));
        said(&answer, &["err MemoryLimit link link: ", "2000000 remain", "resources.limits.memory"]);
        assert_eq!(shmesh_testing::files(dir.path()), [""; 0]);
    }
    peer.tell("create link data=4096x64");
}

#[test]
fn names() {
    let long = "a".repeat(32);
    let cases = [
        (&*long, vec!["has 32 bytes", "the limit is 31", "shorten it"]),
        ("a/b", vec!["\"a/b\"", "0x2f at position 1", "use only ASCII letters"]),
        ("", vec!["must not be empty", "1 to 31"]),
        ("..", vec!["starts with '.'"]),
        ("a\nb", vec!["0x0a"]),
        ("ä", vec!["use only ASCII letters"]),
    ];
    let dir = ipc_dir();
    for (name, parts) in cases {
        says(&refused(options(dir.path()).attach(name, Side::Secondary)), "Name", &parts);
    }
    assert_eq!(shmesh_testing::files(dir.path()), [""; 0]);
    let name = "a".repeat(31);
    let link = options(dir.path()).create(&config(&name, "")).unwrap();
    options(dir.path()).attach(&name, Side::Secondary).unwrap();
    drop(link);
}

#[test]
fn directory_too_long_for_a_socket_is_refused() {
    let dir = ipc_dir();
    let deep = dir.path().join("d".repeat(100));
    std::fs::create_dir(&deep).unwrap();
    says(
        &refused(create(&deep, MEMFD)),
        "Host",
        &["link link: ", "too long for a socket", "use a shorter directory"],
    );
    // A link with names needs no socket.
    let phy = create(&deep, "").unwrap();
    send(&attach(&deep).unwrap(), 1, "deep").unwrap();
    assert!(phy.receive().unwrap().is_some());
}

#[test]
fn missing_directory_is_reported() {
    let dir = ipc_dir();
    let missing = dir.path().join("no");
    both_say(&missing, "NoDirectory", &["link link: ", &missing.display().to_string(), "SHMESH_DIR"]);
    std::fs::write(dir.path().join("file"), "").unwrap();
    both_say(&dir.path().join("file"), "NoDirectory", &["link link: ", "SHMESH_DIR"]);
    // As the environment names it.
    let mut peer = Peer::start(&missing);
    said(&peer.ask("create link"), &["err NoDirectory link link: ", &missing.display().to_string()]);
}

#[test]
fn missing_link_is_reported() {
    let dir = ipc_dir();
    let error = refused(attach(dir.path()));
    says(&error, "NotFound", &["link link: ", &dir.path().display().to_string(), "start its primary"]);
    assert!(error.is_retryable());
    let waited = options(dir.path()).timeout(Duration::from_millis(20)).attach("link", Side::Secondary);
    says(&refused(waited), "NotFound", &["link link: "]);
    assert_eq!(shmesh_testing::files(dir.path()), [""; 0], "looking leaves nothing behind");
}

#[test]
fn messages_larger_than_buffers_are_refused() {
    let dir = ipc_dir();
    let link = create(dir.path(), "large=8192x1").unwrap();
    let mut loan = link.loan_with(PoolId::CpuData).unwrap();
    let error = refused(loan.resize_msg(257).map(|_| ()));
    says(&error, "TooLong", &["link link: ", "257 bytes", "pool cpu_msg", "256", "raise its buf_size_bytes"]);
    let error = refused(loan.resize_data(4097).map(|_| ()));
    says(&error, "TooLong", &["link link: ", "4097 bytes", "pool cpu_data", "4096"]);
    refused(loan.resize_data(usize::MAX).map(|_| ()));
    refused(loan.resize_data(1 << 32).map(|_| ()));
    let mut loan = link.loan_with(PoolId::CpuLarge).unwrap();
    let error = refused(loan.resize_data(8193).map(|_| ()));
    says(&error, "TooLong", &["link link: ", "8193 bytes", "pool cpu_large", "8192"]);
    let error = refused(link.loan().unwrap().resize_data(1).map(|_| ()));
    says(&error, "NoDataPart", &["link link: ", "`loan_with`"]);
    let error = refused(link.send_inline(0, 0, &[0; 113]));
    says(&error, "InlineTooLong", &["link link: ", "at most 112 bytes", "not 113", "loan a buffer"]);
    assert!(!error.is_retryable());
}

#[test]
fn exhausted_pools_and_full_rings_are_reported() {
    for mode in ["mode=mpmc", "mode=spsc"] {
        let dir = ipc_dir();
        let link = create(dir.path(), &format!("{mode} ring=4 msg=64x8 data=64x2")).unwrap();
        let peer = attach(dir.path()).unwrap();
        let loans: Vec<_> = (0..8).map(|_| link.loan().unwrap()).collect();
        let error = refused(link.loan());
        says(&error, "Exhausted", &["link link: ", "all 8 buffers", "pool cpu_msg", "raise its pool_len"]);
        assert!(error.is_retryable());
        drop(loans);
        let loans: Vec<_> = (0..2).map(|_| link.loan_with(PoolId::CpuData).unwrap()).collect();
        says(&refused(link.loan_with(PoolId::CpuData)), "Exhausted", &["all 2 buffers", "pool cpu_data"]);
        drop(loans);

        for _ in 0..4 {
            send(&link, 0, "x").unwrap();
        }
        let error = refused(send(&link, 0, "x"));
        says(&error, "Full", &["link link: ", "full with 4 messages", "raise the ring's len"]);
        assert!(error.is_retryable());
        let failed = link.loan().unwrap().send().unwrap_err();
        says(&failed.error, "Full", &["link link: "]);
        drop(failed);
        while peer.receive().unwrap().is_some() {}
    }
}

#[test]
fn exhausted_inline_cells_are_reported() {
    let dir = ipc_dir();
    let link = create(dir.path(), "mode=mpmc ring=4").unwrap();
    let peer = attach(dir.path()).unwrap();
    // Both directions share them.
    for _ in 0..4 {
        link.send_inline(0, 0, b"").unwrap();
        peer.send_inline(0, 0, b"").unwrap();
    }
    let error = refused(link.send_inline(0, 0, b""));
    says(
        &error,
        "InlineExhausted",
        &["link link: ", "all 8 slots for inline messages", "raise the ring's len"],
    );
    assert!(error.is_retryable());
    while peer.receive().unwrap().is_some() {}
    link.send_inline(0, 0, b"").unwrap();
}

#[test]
fn missing_pools_are_reported() {
    let dir = ipc_dir();
    let link = create(dir.path(), "").unwrap();
    says(&refused(link.loan_with(PoolId::CpuMsg)), "MsgPool", &["link link: ", "cpu_msg", "another pool"]);
    for pool in [PoolId::CpuLarge, PoolId::CudaData, PoolId::GpuData] {
        let error = refused(link.loan_with(pool));
        says(&error, "NoPool", &["link link: ", pool.name(), "buf_size_bytes and pool_len"]);
        assert!(!error.is_retryable());
    }
}

#[test]
fn device_pools_refuse_cpu_access() {
    for (change, pool, name) in
        [("gpu=64x4", PoolId::GpuData, "gpu_data"), ("cuda=64x4", PoolId::CudaData, "cuda_data")]
    {
        let dir = ipc_dir();
        let link = create(dir.path(), change).unwrap();
        let error = refused(link.loan_with(pool).unwrap().resize_data(1).map(drop));
        says(&error, "OnDevice", &["link link: ", name, "Link::device_pool"]);
        let error = refused(link.device_pool(PoolId::CpuData, shmesh::device::HostMemory::new));
        says(&error, "NotOnDevice", &["link link: ", "cpu_data", "cuda_data and gpu_data"]);
    }
}

#[test]
fn configurations_out_of_bounds_are_refused() {
    let dir = ipc_dir();
    let cases = [
        ("ring=0", ["ring length is 0", "1 to 1048576"]),
        ("ring=1048577", ["ring length is 1048577", "1 to 1048576"]),
        ("msg=64x0", ["cpu_msg is mandatory", "above 0"]),
        ("data=64x524289", ["pool_len 524289", "the limit is 524288"]),
        ("data=2147483648x1", ["2147483648 bytes", "the limit is 2147483647"]),
        ("spin=1000001", ["spin_us is 1000001", "the limit is 1000000"]),
        ("file_mode=644", ["file_mode is 0644", "\"0660\""]),
    ];
    for (change, parts) in cases {
        says(&refused(create(dir.path(), change)), "Config", &["link link: ", parts[0], parts[1]]);
    }
    assert_eq!(shmesh_testing::files(dir.path()), [""; 0]);
}

#[test]
fn no_notification() {
    let dir = ipc_dir();
    let link = create(dir.path(), "notify=off").unwrap();
    let parts = ["link link: ", "without notification", "poll with receive()"];
    says(&refused(link.notify()), "NoNotification", &parts);
    says(&refused(link.post()), "NoNotification", &parts);
    says(&refused(link.fd()), "NoNotification", &parts);
    says(&refused(link.take_signal()), "NoNotification", &parts);
    says(&refused(link.wait_tti(Some(Duration::ZERO))), "NoNotification", &parts);
}

#[test]
fn different_configuration_is_refused() {
    for living in [true, false] {
        let cases = [
            ("ring=32", "ring.len", "16", "32"),
            ("mode=spsc", "ring.mode", "mpmc", "spsc"),
            ("msg=512x32", "pools.cpu_msg", "256 bytes x 32", "512 bytes x 32"),
            ("data=4096x8", "pools.cpu_data", "4096 bytes x 16", "4096 bytes x 8"),
            ("large=64x1", "pools.cpu_large", "0 bytes x 0", "64 bytes x 1"),
            ("latency=64", "latency.sample", "none", "64"),
            ("backing=memfd", "backing", "named", "memfd"),
            ("notify=off", "notify.enabled", "true", "false"),
            ("spin=7", "notify.spin_us", "0", "7"),
        ];
        let dir = ipc_dir();
        let link = if living {
            Some(create(dir.path(), "").unwrap())
        } else {
            abandoned(dir.path(), "");
            None
        };
        for (change, field, existing, asked) in cases {
            let error = refused(create(dir.path(), change));
            let parts = ["link link: ", field, existing, asked, "the same configuration", "shmesh rm link"];
            says(&error, "Differs", &parts);
        }
        // None of them did any harm.
        drop(link);
        create(dir.path(), "").unwrap();
    }
    let dir = ipc_dir();
    let _link = create(dir.path(), "backing=memfd").unwrap();
    says(&refused(create(dir.path(), "")), "Differs", &["backing", "memfd", "named"]);
}

#[test]
fn second_primary_is_refused() {
    for changes in ["", "backing=memfd", "notify=off", "mode=spsc"] {
        let dir = ipc_dir();
        let mut owner = Peer::start(dir.path());
        owner.tell(&format!("create link {changes}"));
        owner.tell("send 1 waits");
        let pid = owner.pid().to_string();
        let parts = ["link link: ", "already its primary", "stop that process first", &pid];
        let error = refused(create(dir.path(), changes));
        says(&error, "AlreadyOwned", &parts);
        assert!(error.is_retryable());
        says(&refused(options(dir.path()).attach("link", Side::Primary)), "AlreadyOwned", &parts);
        // Nor was anything taken from it.
        assert_eq!(attach(dir.path()).unwrap().receive().unwrap().unwrap().msg(), b"waits", "{changes}");
    }
}

#[test]
fn second_spsc_secondary_is_refused() {
    let dir = ipc_dir();
    let _primary = create(dir.path(), "mode=spsc").unwrap();
    let mut first = Peer::start(dir.path());
    first.tell("attach link secondary 0");
    let pid = first.pid().to_string();
    says(
        &refused(attach(dir.path())),
        "AlreadyOwned",
        &["link link: ", "already its secondary", "stop that process first", &pid],
    );
    first.kill();
    options(dir.path()).timeout(Duration::from_secs(10)).attach("link", Side::Secondary).unwrap();
}

#[test]
fn taken_role_is_refused() {
    let dir = ipc_dir();
    let _primary = create(dir.path(), "mode=spsc").unwrap();
    let first = attach(dir.path()).unwrap();
    let second = first.try_clone().unwrap();
    first.send_inline(0, 0, b"").unwrap();
    let (pid, seat) = (std::process::id().to_string(), format!("participant {}", first.seat()));
    let parts = ["link link: ", &pid, &seat, "ring mode spsc", "ring mode mpmc"];
    let error = refused(second.send_inline(0, 0, b""));
    says(&error, "RoleTaken", &parts);
    said(&error.to_string(), &["producer"]);
    let failed = second.loan().unwrap().send().unwrap_err();
    says(&failed.error, "RoleTaken", &parts);
    drop(failed);
    assert!(first.receive().unwrap().is_none());
    let error = refused(second.receive());
    says(&error, "RoleTaken", &parts);
    said(&error.to_string(), &["consumer"]);
}

#[test]
fn full_seat_table_is_reported() {
    let dir = ipc_dir();
    let primary = create(dir.path(), "").unwrap();
    let mut clones: Vec<_> = (1..MAX_SEATS).map(|_| primary.try_clone().unwrap()).collect();
    let parts = ["link link: ", "all 64 seats", "detach a participant", "recover()"];
    let error = refused(primary.try_clone());
    says(&error, "Crowded", &parts);
    assert!(error.is_retryable());
    says(&refused(attach(dir.path())), "Crowded", &parts);
    clones.pop();
    attach(dir.path()).unwrap();
}

/// Something that listens where the host of a link does, and answers each newcomer so; `None`: not at all.
fn impostor(dir: &Path, answer: Option<Vec<u8>>) {
    let listener = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::empty(), None).unwrap();
    bind(listener.as_raw_fd(), &UnixAddr::new(&pose_as_host(dir)).unwrap()).unwrap();
    listen(&listener, Backlog::new(8).unwrap()).unwrap();
    std::thread::spawn(move || {
        // Until the test ends.
        while let Ok(connection) = accept4(listener.as_raw_fd(), SockFlag::empty()) {
            let mut packet = [0; 64];
            let _ = recv(connection, &mut packet, MsgFlags::empty());
            if let Some(answer) = &answer {
                let _ = send_on(connection, answer, MsgFlags::MSG_NOSIGNAL);
            }
        }
    });
}

/// The host's answer to a newcomer: layout version and number of segments.
fn attached(layout: u32, segments: u32) -> Vec<u8> {
    let attached = broker::Attached { layout, segments };
    packet::encode(&Reply::new(1, reply::Result::Attached(attached)))
}

#[test]
fn host_with_another_protocol_is_refused() {
    let dir = ipc_dir();
    impostor(dir.path(), Some(packet::encode(&Reply::refused(1, Code::Version, "version 2"))));
    both_say_without_names(
        dir.path(),
        "Host",
        &["link link: ", "link.broker", "version of the protocol", "one version on both"],
    );
    let dir = ipc_dir();
    impostor(dir.path(), Some(packet::encode(&Reply::refused(1, Code::Denied, "who are you"))));
    both_say_without_names(
        dir.path(),
        "Host",
        &["link link: ", "link.broker", "refuses this process", "log"],
    );
}

#[test]
fn host_with_another_version_is_refused() {
    let dir = ipc_dir();
    impostor(dir.path(), Some(attached(77, 6)));
    both_say_without_names(
        dir.path(),
        "Version",
        &["link link: ", "link.broker", "version 77", "supports 2", "same version on both"],
    );
}

#[test]
fn impostor_hosts_are_refused() {
    let socket = |dir: &Path| dir.join("link.broker-7").display().to_string();
    let other_answer = packet::encode(&Reply::new(2, reply::Result::Done(broker::Done::default())));
    for answer in [&b"HTTP/1.1 400 Bad Request"[..], b"SHMESH!", b"x", &other_answer] {
        let dir = ipc_dir();
        impostor(dir.path(), Some(answer.to_vec()));
        both_say_without_names(
            dir.path(),
            "Host",
            &["link link: ", &socket(dir.path()), "is not a shmesh host"],
        );
    }
    // Of our version, but it promises six segments and sends nothing.
    let dir = ipc_dir();
    impostor(dir.path(), Some(attached(2, 6)));
    both_say_without_names(
        dir.path(),
        "Host",
        &["link link: ", &socket(dir.path()), "other descriptors than it announced"],
    );
    // Longer than any packet.
    let dir = ipc_dir();
    impostor(dir.path(), Some(vec![b'S'; MAX_PACKET_BYTES + 1]));
    both_say_without_names(dir.path(), "Host", &["link link: ", &socket(dir.path()), "is not a shmesh host"]);
}

#[test]
fn silent_host_is_reported() {
    let dir = ipc_dir();
    impostor(dir.path(), None);
    let parts = ["link link: ", "link.lock", "does not answer", "stopped or stuck"];
    says(&refused(attach(dir.path())), "Host", &parts);
}

#[test]
fn stream_socket_in_place_of_the_host_is_refused() {
    let dir = ipc_dir();
    let _listener = std::os::unix::net::UnixListener::bind(pose_as_host(dir.path())).unwrap();
    both_say_without_names(dir.path(), "Host", &["link link: ", "link.broker", "is not a shmesh host"]);
}

#[test]
fn foreign_files_at_the_socket_path_are_not_removed() {
    let dir = ipc_dir();
    // Its first two names.
    let user = u64::from(nix::unistd::geteuid().as_raw()) << 8;
    let [file, directory] = [user, user + 1].map(|number| dir.path().join(format!("link.broker-{number:x}")));
    std::fs::write(&file, "another program's").unwrap();
    std::fs::create_dir(&directory).unwrap();
    let _link = create(dir.path(), MEMFD).unwrap();
    attach(dir.path()).unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), b"another program's");
    assert!(directory.is_dir() && broker(dir.path()).ends_with(format!("link.broker-{:x}", user + 2)));
}

/// Poses as a host that closes each connection, until the test ends. Returns how many it has closed.
fn refusing_host(dir: &Path) -> std::sync::Arc<AtomicUsize> {
    let listener = shmesh_sys::socket::listen_on(&pose_as_host(dir), 0o600).unwrap();
    let connections = std::sync::Arc::new(AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&connections);
    std::thread::spawn(move || {
        while shmesh_sys::socket::accept(&listener).is_ok() {
            counted.fetch_add(1, Ordering::Relaxed);
        }
    });
    connections
}

#[test]
fn socket_that_closes_connections_causes_no_busy_loop() {
    let dir = ipc_dir();
    let connections = refusing_host(dir.path());
    let _link = create(dir.path(), "").unwrap();
    until("it was tried", || connections.load(Ordering::Relaxed) > 0);
    std::thread::sleep(Duration::from_secs(2));
    let tried = connections.load(Ordering::Relaxed);
    assert!(tried < 30, "connected {tried} times in two seconds");
}

#[test]
#[ignore = "long: eight seconds"]
fn host_that_refuses_for_long_is_still_tried() {
    let dir = ipc_dir();
    let connections = refusing_host(dir.path());
    let _link = create(dir.path(), "").unwrap();
    // The 14th attempt comes after 8 seconds, later than any round of looking for the dead.
    until("14 attempts", || connections.load(Ordering::Relaxed) >= 14);
}

#[test]
fn named_link_ignores_the_host_socket() {
    let occupants: [fn(&Path); 4] = [
        |dir| impostor(dir, None),
        |dir| impostor(dir, Some(b"HTTP/1.1 400 Bad Request".to_vec())),
        |dir| std::fs::write(pose_as_host(dir), "another program's").unwrap(),
        |dir| std::mem::forget(std::os::unix::net::UnixListener::bind(pose_as_host(dir)).unwrap()),
    ];
    for occupy in occupants {
        let dir = ipc_dir();
        occupy(dir.path());
        let phy = create(dir.path(), "").unwrap();
        let mac = attach(dir.path()).unwrap();
        send(&mac, 1, "hello").unwrap();
        assert!(phy.receive().unwrap().is_some());
        assert!(dir.path().join("link.broker-7").exists(), "it is not ours to remove");
    }
}

#[test]
fn stopped_primary_differs_from_a_missing_one() {
    let dir = ipc_dir();
    let mut owner = Peer::start(dir.path());
    owner.tell("create link backing=memfd");
    owner.stop();
    says(&refused(attach(dir.path())), "Host", &["link link: ", "does not answer", "stopped"]);
    owner.go_on();
    until("the primary answers again", || attach(dir.path()).is_ok());
}

#[test]
fn attach_with_timeout_waits_for_a_silent_host() {
    let dir = ipc_dir();
    let (mut owner, mut other) = (Peer::start(dir.path()), Peer::start(dir.path()));
    owner.tell("create link backing=memfd");
    owner.stop();
    other.order("attach link secondary 60000");
    // Longer than one question waits for its answer.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(other.answered(), None, "it asks again");
    owner.go_on();
    assert_eq!(other.answer(), "ok");
}

#[test]
fn strangers_cannot_disturb_a_host() {
    let dir = ipc_dir();
    let mut owner = Peer::start(dir.path());
    owner.tell("create link backing=memfd");
    let address = UnixAddr::new(&broker(dir.path())).unwrap();
    let stranger = |packet: Option<&[u8]>| {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::empty(), None).unwrap();
        nix::sys::socket::connect(fd.as_raw_fd(), &address).unwrap();
        if let Some(packet) = packet {
            send_on(fd.as_raw_fd(), packet, MsgFlags::MSG_NOSIGNAL).unwrap();
        }
        fd
    };
    let mut kept: Vec<_> = (0..40).map(|_| stranger(None)).collect();
    kept.push(stranger(Some(b"GET / HTTP/1.1")));
    kept.push(stranger(Some(&[0; 4096])));
    let marked = dir.path().join("marked");
    let file = std::fs::File::create(&marked).unwrap();
    let many: Vec<_> = std::iter::repeat_n(file.as_raw_fd(), 253).collect();
    let gives = stranger(None);
    let rights = [nix::sys::socket::ControlMessage::ScmRights(&many)];
    let bytes = [std::io::IoSlice::new(b"take these")];
    nix::sys::socket::sendmsg::<UnixAddr>(gives.as_raw_fd(), &bytes, &rights, MsgFlags::empty(), None)
        .unwrap();
    assert_eq!(recv(gives.as_raw_fd(), &mut [0; 8], MsgFlags::empty()).unwrap_or(0), 0, "it is closed");
    let of_host = std::fs::read_dir(format!("/proc/{}/fd", owner.pid())).unwrap();
    let is_marked = |fd: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_link(fd.unwrap().path()).is_ok_and(|to| to == marked)
    };
    assert_eq!(of_host.map(is_marked).filter(|&still| still).count(), 0, "and so are they");
    // Decodes to nothing; of another version; asks for what only a sidecar has.
    kept.push(stranger(Some(b"")));
    let list = Request::new(1, request::Op::List(broker::List { skip: 0 }));
    kept.push(stranger(Some(&packet::encode(&Request { version: 9, ..list.clone() }))));
    let refused = |fd: &std::os::fd::OwnedFd, code: Code| {
        let mut bytes = [0; MAX_PACKET_BYTES];
        let len = recv(fd.as_raw_fd(), &mut bytes, MsgFlags::empty()).unwrap();
        let reply: Reply = packet::decode(&bytes[..len]).unwrap();
        assert!(matches!(reply.result, Some(reply::Result::Refused(refused)) if refused.code() == code));
    };
    refused(&kept[kept.len() - 1], Code::Version);
    let asks = stranger(Some(&packet::encode(&list)));
    refused(&asks, Code::Unsupported);
    let newcomer = Request::new(1, request::Op::Attach(broker::Attach { side: 2 }));
    drop(stranger(Some(&packet::encode(&newcomer))));
    let link = attach(dir.path()).unwrap();
    send(&link, 1, "hello").unwrap();
    assert_eq!(owner.ask("receive"), "1 hello");
}

#[test]
fn host_without_free_descriptors_waits() {
    let dir = ipc_dir();
    let mut owner = Peer::start(dir.path());
    owner.tell("create link backing=memfd");
    owner.tell("prepare descriptors none");
    let before = owner.ticks();
    says(&refused(attach(dir.path())), "Host", &["link link: ", "does not answer"]);
    let spent = owner.ticks() - before;
    assert!(spent < 20, "it was tried for a second, and the host was busy for {spent} hundredths of it");
    owner.tell("prepare descriptors most");
    until("the primary answers again", || attach(dir.path()).is_ok());
}

#[test]
fn detach_works_after_lowering_the_descriptor_limit() {
    let dir = ipc_dir();
    let mut owner = Peer::start(dir.path());
    owner.tell("create link");
    owner.tell("prepare limit 1");
    owner.tell("close");
}

#[test]
fn loan_of_another_handle_is_refused() {
    let dir = ipc_dir();
    let link = create(dir.path(), "").unwrap();
    let other = link.try_clone().unwrap();
    let mut loans = vec![link.loan().unwrap(), other.loan().unwrap()];
    says(&refused(link.send_batch(&mut loans)), "ForeignLoan", &["link link: ", "another handle", "made it"]);
    assert_eq!((loans.len(), link.queued()), (2, 0), "all of them stay with the caller");
}

#[test]
fn foreign_lock_file_is_refused() {
    let dir = ipc_dir();
    std::fs::create_dir(dir.path().join("link.lock")).unwrap();
    let error = refused(create(dir.path(), ""));
    said(&error.to_string(), &["link link: ", "link.lock"]);
    // Nor are other files opened through the symlink.
    let dir = ipc_dir();
    std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link.lock")).unwrap();
    let error = refused(create(dir.path(), ""));
    said(&error.to_string(), &["link link: ", "link.lock"]);
}

#[test]
fn system_error_has_a_source() {
    let dir = ipc_dir();
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(dir.path().join("x"))
        .unwrap();
    file.write_all(b"x").unwrap();
    // A path through a file.
    let error = refused(create(&dir.path().join("x/y"), ""));
    says(&error, "NoDirectory", &["link link: "]);
    std::fs::create_dir(dir.path().join("link.lock")).unwrap();
    let error = refused(create(dir.path(), ""));
    assert!(std::error::Error::source(&error).is_some(), "{error}");
}
