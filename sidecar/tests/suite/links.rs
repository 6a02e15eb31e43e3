//! Links that a sidecar keeps, with real processes and real deaths.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use crate::support::Sidecar;
use shmesh::{Link, LinkOptions, Side};
use shmesh_testing::{Peer, Watchdog, files, ipc_dir, is_root, until};

const KINDS: [&str; 6] = ["mpmc", "spsc", "mpmc memfd", "spsc memfd", "mpmc notify=off", "spsc notify=off"];

fn attach(dir: &std::path::Path, side: Side) -> shmesh::Result<Link> {
    LinkOptions::new().dir(dir).timeout(Duration::from_secs(60)).attach("link", side)
}

#[test]
fn participants_attach_through_it() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let sidecar = Sidecar::start(dir.path(), kind);
        assert!(sidecar.get("/readyz").starts_with("HTTP/1.1 200"), "{kind}");
        let phy = attach(dir.path(), Side::Primary).unwrap();
        let mut mac = Peer::start(dir.path());
        mac.tell("attach link secondary 0");
        mac.tell("send 1 up");
        assert_eq!(phy.receive().unwrap().unwrap().msg(), b"up", "{kind}");
        if !kind.contains("notify=off") {
            phy.send_inline(2, 0, b"down").unwrap();
            phy.notify().unwrap();
            assert_eq!(mac.ask("wait -1"), "true", "{kind}");
        }
        until("both are known", || sidecar.metric("shmesh_sidecar_attached_total") == 2);
        until("both are seen", || sidecar.metric("shmesh_sidecar_participants{link=\"link\"}") == 2);
    }
}

#[test]
fn link_outlives_its_processes() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let _sidecar = Sidecar::start(dir.path(), kind);
        let mut mac = Peer::start(dir.path());
        mac.tell("attach link secondary 0");
        mac.tell("send 7 waits");
        mac.exit();
        let phy = attach(dir.path(), Side::Primary).unwrap();
        assert_eq!(phy.receive().unwrap().unwrap().msg(), b"waits", "{kind}");
    }
}

#[test]
fn sidecar_that_restarts_adopts_what_it_finds() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        for is_killed in [true, false] {
            let dir = ipc_dir();
            let sidecar = Sidecar::start(dir.path(), kind);
            let phy = attach(dir.path(), Side::Primary).unwrap();
            let mut mac = Peer::start(dir.path());
            mac.tell("attach link secondary 0");
            mac.tell("send 1 before");
            if is_killed {
                sidecar.kill()
            } else {
                sidecar.stop()
            }
            // Participants continue without the sidecar. A newcomer to memfds waits for it.
            mac.tell("send 2 without");
            let mut other = Peer::start(dir.path());
            if kind.starts_with("mpmc") {
                other.order("attach link secondary 60000");
            }
            let sidecar = Sidecar::start(dir.path(), kind);
            if kind.starts_with("mpmc") {
                assert_eq!(other.answer(), "ok", "{kind}");
                other.tell("send 3 newcomer");
            }
            mac.tell("send 4 after");
            let mut ids = Vec::new();
            while let Some(message) = phy.receive().unwrap() {
                ids.push(message.msg_id());
            }
            let expected: &[i32] = if kind.starts_with("mpmc") { &[1, 2, 3, 4] } else { &[1, 2, 4] };
            assert_eq!(ids, expected, "{kind}: nothing was lost");
            // Each process connects again, so that its death will be detected.
            let processes = if kind.starts_with("mpmc") { 3 } else { 2 };
            until("they have come back", || sidecar.metric("shmesh_sidecar_sessions") == processes);
        }
    }
}

/// A participant that created the link without a sidecar is its host until a sidecar starts.
#[test]
fn sidecar_that_starts_later_becomes_the_host() {
    let _watchdog = Watchdog::start();
    for kind in ["backing=named", "backing=memfd"] {
        let dir = ipc_dir();
        let (mut phy, mut mac) = (Peer::start(dir.path()), Peer::start(dir.path()));
        phy.tell(&format!("create link {kind}"));
        mac.tell("attach link secondary 0");
        mac.tell("send 1 before");
        let sidecar = Sidecar::start(dir.path(), if kind.contains("memfd") { "mpmc memfd" } else { "mpmc" });
        until("both have come", || sidecar.metric("shmesh_sidecar_sessions") == 2);
        until("there is one host", || {
            files(dir.path()).iter().filter(|name| name.starts_with("link.broker-")).count() == 1
        });
        // Sidecar and primary end at once. The remaining participant has the memory.
        sidecar.kill();
        phy.kill();
        let sidecar = Sidecar::start(dir.path(), if kind.contains("memfd") { "mpmc memfd" } else { "mpmc" });
        let phy = attach(dir.path(), Side::Primary).unwrap();
        assert_eq!(phy.receive().unwrap().unwrap().msg(), b"before", "{kind}");
        until("both have come", || sidecar.metric("shmesh_sidecar_sessions") == 2);
    }
}

#[test]
fn buffers_of_the_dead_are_recovered() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let sidecar = Sidecar::start(dir.path(), kind);
        let phy = attach(dir.path(), Side::Primary).unwrap();
        let mut mac = Peer::start(dir.path());
        mac.tell("attach link secondary 0");
        for _ in 0..5 {
            mac.tell("hold-loan");
        }
        mac.kill();
        until("it is taken back", || phy.participants().count() == 1);
        let all: Vec<_> = std::iter::from_fn(|| phy.loan().ok()).collect();
        assert_eq!(all.len(), 32, "{kind}: every buffer");
        until("it is counted", || sidecar.metric("shmesh_sidecar_reaped_total{link=\"link\"}") == 1);
    }
}

/// Each participant is process 1 of its own pid namespace: only the sidecar can tell which one has died.
#[test]
fn deaths_in_other_pid_namespaces_are_noticed() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let kernels: [&[&str]; 2] = [&[], &["--old-kernel"]];
    for (kind, kernel) in KINDS.iter().zip(kernels.iter().cycle()) {
        let dir = ipc_dir();
        let sidecar = Sidecar::start_with(dir.path(), kind, kernel);
        let (mut phy, mut mac) = (Peer::start_alone(dir.path()), Peer::start_alone(dir.path()));
        phy.tell("attach link primary 0");
        mac.tell("attach link secondary 0");
        for _ in 0..5 {
            mac.tell("hold-loan");
        }
        mac.tell("send 1 last");
        mac.kill();
        until("it is taken back", || phy.ask("participants") == "1");
        assert_eq!(phy.ask("receive"), "1 last", "{kind}: what it had sent stays sent");
        until("it is counted", || sidecar.metric("shmesh_sidecar_reaped_total{link=\"link\"}") == 1);
        let mut mac = Peer::start_alone(dir.path());
        mac.tell("attach link secondary 0");
        mac.tell("send 2 again");
        assert_eq!(phy.ask("receive"), "2 again", "{kind}");
    }
}

#[test]
fn deaths_without_a_sidecar_are_detected_by_the_next() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    for kind in KINDS {
        let dir = ipc_dir();
        let sidecar = Sidecar::start(dir.path(), kind);
        let mut mac = Peer::start_alone(dir.path());
        mac.tell("attach link secondary 0");
        mac.tell("hold-loan");
        mac.tell("send 1 last");
        // With memfds, the newcomer must attach before the sidecar is killed: only a host hands the memory out.
        let mut phy = Peer::start_alone(dir.path());
        phy.tell("attach link primary 10000");
        sidecar.kill();
        mac.kill();
        let _sidecar = Sidecar::start(dir.path(), kind);
        until("it is taken back", || phy.ask("participants") == "1");
        assert_eq!(phy.ask("receive"), "1 last", "{kind}: what it had sent stays sent");
    }
}

#[test]
fn drains_and_leaves_the_link() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    let before = files(dir.path());
    assert!(before.iter().any(|name| name.starts_with("link.broker-")));
    sidecar.stop();
    let after: Vec<_> = before.into_iter().filter(|name| !name.starts_with("link.broker-")).collect();
    assert_eq!(files(dir.path()), after, "the link stays");
}

#[test]
fn stale_sockets_do_not_prevent_serving() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let program = tempfile::tempdir().unwrap();
    std::fs::set_permissions(program.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let binary = program.path().join("shmesh-sidecar");
    // Copied by another program: a descriptor that another test's child inherits would make the file busy.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_shmesh-sidecar")).arg(&binary).status();
    assert!(copied.unwrap().success());
    for kind in ["mpmc", "mpmc memfd"] {
        let dir = ipc_dir();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o1777)).unwrap();
        // Also at the path where it would listen first.
        for name in ["link.broker".to_owned(), format!("link.broker-{:x}", 65_532 << 8)] {
            let path = dir.path().join(name);
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            std::os::unix::fs::chown(&path, Some(10_001), None).unwrap();
        }
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65532", "--regid", "65532", "--clear-groups"]).arg(&binary);
        let sidecar = Sidecar::start_by(command, dir.path(), kind, &[]);
        let mut peer = Peer::start(dir.path());
        peer.tell("attach link secondary 0");
        until("it is known", || sidecar.metric("shmesh_sidecar_sessions") == 1);
    }
}

#[test]
fn process_has_a_session_on_each_of_many_links() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let more = dir.path().join("more.yaml");
    let yaml: String = (0..80)
        .map(|i| {
            format!(
                "  - name: l{i}\n    backing: {}\n    ring: {{ len: 16 }}\n    pools:\n      cpu_msg: {{ buf_size_bytes: 256, \
                 pool_len: 8 }}\n      cpu_data: {{ buf_size_bytes: 256, pool_len: 8 }}\n",
                if i % 2 == 0 { "named" } else { "memfd" }
            )
        })
        .collect();
    std::fs::write(&more, format!("links:\n{yaml}")).unwrap();
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--config", more.to_str().unwrap()]);
    let options = LinkOptions::new().dir(dir.path()).timeout(Duration::from_secs(60));
    let links: Vec<_> = (0..80).map(|i| options.attach(&format!("l{i}"), Side::Secondary).unwrap()).collect();
    until("each has its session", || sidecar.metric("shmesh_sidecar_sessions") == 80);
    drop(links);
}

/// The exit code and the error message of a sidecar that does not start.
fn fails(flags: &[&str]) -> (Option<i32>, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_shmesh-sidecar")).args(flags).output().unwrap();
    (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
}

#[test]
fn invalid_environment_variable_exits_with_64() {
    let exits = |variable: &str, value: &str, flag: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-sidecar"));
        command.args(["--link=a", flag]).env(variable, value).output().unwrap().status.code()
    };
    for (variable, value) in
        [("SHMESH_BYTES", "many"), ("SHMESH_RESTORE_SECONDS", "-1"), ("SHMESH_ADMIN", "")]
    {
        assert_eq!(exits(variable, value, "--any-file-system"), Some(64), "{variable}");
    }
    assert_eq!(exits("SHMESH_BYTES", "1Gi", "--max-bytes=many"), Some(2));
}

#[test]
fn invalid_configurations_are_reported() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let at = dir.path().to_str().unwrap();
    let (code, said) = fails(&["--dir", at]);
    assert!(code == Some(64) && said.contains("--link NAME"), "{code:?} {said}");
    let (code, said) = fails(&["--link", "a/b", "--dir", at]);
    assert!(code == Some(2) && said.contains("a/b"), "{code:?} {said}");
    let (code, said) = fails(&["--link", "a", "--dir", "/proc"]);
    assert!(code == Some(64) && said.contains("not on a tmpfs"), "{code:?} {said}");
    let (code, said) = fails(&["--link", "a", "--dir", at, "--max-bytes", "1Ki"]);
    assert!(code == Some(64) && said.contains("the limit is 1024 bytes (SHMESH_BYTES"), "{code:?} {said}");
    let file = dir.path().join("links.yaml");
    let shown =
        "unknown key \"frobnicate\"; known here: name, ring, pools, receivers, backing, memory, notify";
    for (flag, text, at) in [
        (
            "--config",
            "links:\n  - name: x\n    frobnicate: 1\n",
            "3:5\n  |\n3 |     frobnicate: 1\n  |     ^\n",
        ),
        ("--annotation", "- name: x\n  frobnicate: 1\n", "2:3\n  |\n2 |   frobnicate: 1\n  |   ^\n"),
    ] {
        std::fs::write(&file, text).unwrap();
        let (code, said) = fails(&[flag, file.to_str().unwrap(), "--dir", dir.path().to_str().unwrap()]);
        let snippet = format!("\n --> {}:{at}", file.display());
        assert!(code == Some(64) && said.contains(shown) && said.ends_with(&snippet), "{code:?} {said}");
        assert!(!said.contains("(line"), "{said}");
    }
    std::fs::remove_file(&file).unwrap();
}

/// It keeps retrying: another sidecar may end, or a link of another shape be removed.
#[test]
fn link_that_cannot_be_kept_yet_is_retried() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let first = Sidecar::start_links(dir.path(), &["link"]);
    until("it is kept", || first.get("/readyz").starts_with("HTTP/1.1 200"));
    let second = Sidecar::start_links(dir.path(), &["link"]);
    until("the reason is shown", || second.get("/readyz").contains("link link ("));
    until("it is the other sidecar", || second.get("/readyz").contains("another sidecar"));
    first.stop();
    until("it takes the link over", || second.get("/readyz").starts_with("HTTP/1.1 200"));
    second.stop();

    let third = Sidecar::start_yaml(dir.path(), "- name: link\n  ring: { len: 64 }\n");
    until("the other shape is shown", || third.get("/readyz").contains("ring.len"));
}

#[test]
fn peers_are_notified_of_a_death() {
    let _watchdog = Watchdog::start();
    for kind in KINDS {
        let dir = ipc_dir();
        let sidecar = Sidecar::start(dir.path(), kind);
        let (mut phy, mut mac) = (Peer::start(dir.path()), Peer::start(dir.path()));
        phy.tell("attach link primary 0");
        phy.tell("device connect");
        mac.tell("attach link secondary 0");
        until("both are known", || sidecar.metric("shmesh_sidecar_attached_total") == 2);
        let pid = mac.pid();
        mac.kill();
        until("the peer is notified", || phy.ask("device event") == format!("died {pid}"));
    }
}
