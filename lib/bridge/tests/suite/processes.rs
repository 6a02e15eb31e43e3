//! Bridges in processes of their own, with Zenoh between them.
#![expect(clippy::disallowed_types, reason = "counts of the test itself")]

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shmesh::config::LinkConfig;
use shmesh::inspect::View;
use shmesh::{Link, LinkOptions, Side};
use shmesh_testing::until;

use crate::wait_for_peer;

const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn bridge(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-bridge"));
    command.args(["--link", "fronthaul", "--dir"]).arg(dir).args(args);
    command.env_remove("SHMESH_DIR").stdin(Stdio::null()).stdout(Stdio::null());
    command
}

pub(crate) struct BridgeProcess(Child);

impl BridgeProcess {
    pub(crate) fn start(mut command: Command) -> Self {
        Self(command.stderr(Stdio::null()).spawn().unwrap())
    }

    fn end(mut self) {
        kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for BridgeProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that was free a moment ago.
pub(crate) fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn address(protocol: &str) -> String {
    format!("{protocol}/{}", free_address())
}

pub(crate) fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

pub(crate) fn create(dir: &Path) -> Link {
    LinkOptions::new().dir(dir).create(&LinkConfig::new("fronthaul".parse().unwrap())).unwrap()
}

pub(crate) fn attach(dir: &Path) -> Link {
    LinkOptions::new().dir(dir).timeout(PATIENCE).attach("fronthaul", Side::Secondary).unwrap()
}

pub(crate) fn send(link: &Link, number: u64) {
    until("room", || link.send_inline(1, 0, &number.to_le_bytes()).is_ok());
    link.notify().unwrap();
}

fn number(link: &Link) -> Option<u64> {
    let message = link.receive().unwrap()?;
    Some(u64::from_le_bytes(message.msg().try_into().unwrap()))
}

pub(crate) fn receive(link: &Link) -> u64 {
    let start = Instant::now();
    loop {
        if let Some(number) = number(link) {
            return number;
        }
        assert!(start.elapsed() < PATIENCE, "no message");
        link.wait(Some(Duration::from_millis(100))).unwrap();
    }
}

#[test]
fn messages_cross_both_ways_between_processes() {
    let (home, far, address) = (dir(), dir(), address("tcp"));
    let phy = create(home.path());
    // In this order, so that the first connection fails.
    let connects = BridgeProcess::start(bridge(far.path(), &["--connect", &address, "--node", "edge"]));
    std::thread::sleep(Duration::from_millis(300));
    let listens = BridgeProcess::start(bridge(home.path(), &["--listen", &address]));
    let mac = attach(far.path());
    wait_for_peer(&phy);
    for turn in 0..200 {
        send(&phy, turn);
        assert_eq!(receive(&mac), turn);
        send(&mac, turn);
        assert_eq!(receive(&phy), turn);
    }
    connects.end();
    listens.end();
}

/// The value of a metric that a bridge serves.
fn metric(admin: &str, name: &str) -> Option<u64> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(admin).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.lines().find(|line| line.starts_with(name))?.rsplit(' ').next()?.parse().ok()
}

/// A stream of numbers from home to the far node while the bridges are killed: order is kept, nothing is doubled, and what is missing was
/// counted. A bridge that dies takes the messages that it has; its peer counts them, but that count ends with the peer. So only one of
/// the two is killed here.
fn killed(kills_home: bool, kills: u32) {
    let (home, far, address) = (dir(), dir(), address("tcp"));
    let admin = free_address();
    let phy = create(home.path());
    let start = |is_home: bool| {
        let (dir, flag) = if is_home { (&home, "--listen") } else { (&far, "--connect") };
        let mut args = vec![flag, &address, "--node", "edge", "--peer-timeout", "5"];
        // The bridge that lives.
        if is_home != kills_home {
            args.extend(["--admin", &admin]);
        }
        BridgeProcess::start(bridge(dir.path(), &args))
    };
    let lives = start(!kills_home);
    let first = start(kills_home);
    let mac = attach(far.path());
    wait_for_peer(&phy);
    drop(first);
    let (is_over, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let (sent, received) = std::thread::scope(|scope| {
        let (is_over, count) = (&is_over, &count);
        let receiver = scope.spawn(move || {
            let mut received = Vec::new();
            let mut last = Instant::now();
            // Until nothing has come for a while after the last message.
            while !is_over.load(Ordering::Acquire) || last.elapsed() < Duration::from_secs(4) {
                match number(&mac) {
                    Some(number) => {
                        received.push(number);
                        count.store(received.len() as u64, Ordering::Release);
                        last = Instant::now();
                    }
                    None => {
                        mac.wait(Some(Duration::from_millis(20))).unwrap();
                    }
                }
            }
            received
        });
        let (mut sent, mut running) = (0, Some(start(kills_home)));
        for round in 0..kills {
            // Killed while messages are on their way, each time after another number of them.
            let until = count.load(Ordering::Acquire) + 100 + u64::from(round) * 37 % 200;
            let begun = Instant::now();
            while count.load(Ordering::Acquire) < until {
                assert!(begun.elapsed() < PATIENCE, "no message comes after {round} kills");
                if phy.send_inline(1, 0, &u64::to_le_bytes(sent)).is_ok() {
                    sent += 1;
                    phy.notify().unwrap();
                } else {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
            drop(running.take());
            running = Some(start(kills_home));
        }
        until("the ring is empty", || {
            let view = View::open(home.path(), &"fronthaul".parse().unwrap()).unwrap();
            view.snapshot().rings[0].queued.is_empty()
        });
        is_over.store(true, Ordering::Release);
        let received = receiver.join().unwrap();
        drop(running);
        (sent, received)
    });
    assert!(received.is_sorted_by(|a, b| a < b), "doubled or out of order");
    let missing = sent - received.len() as u64;
    assert!(received.len() as u64 > sent / 4, "{missing} of {sent} are missing");
    println!("{sent} sent, {missing} missing after {kills} kills");
    if kills_home {
        let counted = metric(&admin, "shmesh_bridge_messages_lost_total{").unwrap();
        // One more for each kill: a message that was about to be taken counts, and comes later.
        assert!(
            (missing..=missing + u64::from(kills)).contains(&counted),
            "{missing} missing, {counted} counted"
        );
    } else {
        // What the home bridge has, it sends again. Only a message that was being sent on the link can be lost.
        assert!(missing <= u64::from(kills), "{missing} are missing");
    }
    drop(lives);
}

#[test]
fn home_bridge_is_killed() {
    killed(true, 5);
}

#[test]
fn far_bridge_is_killed() {
    killed(false, 5);
}

#[test]
#[ignore = "long"]
fn home_bridge_is_killed_50_times() {
    killed(true, 50);
}

#[test]
#[ignore = "long"]
fn far_bridge_is_killed_50_times() {
    killed(false, 50);
}

pub(crate) struct Authority {
    dir: tempfile::TempDir,
}

impl Authority {
    /// An authority, and a bridge's certificate of it.
    pub(crate) fn new() -> Self {
        use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
        let dir = dir();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = params.self_signed(&key).unwrap();
        let issuer = Issuer::new(params, key);
        let own = KeyPair::generate().unwrap();
        let signed = CertificateParams::new(vec!["localhost".into(), "127.0.0.1".into()]).unwrap();
        let certificate = signed.signed_by(&own, &issuer).unwrap();
        std::fs::write(dir.path().join("ca.pem"), authority.pem()).unwrap();
        std::fs::write(dir.path().join("cert.pem"), certificate.pem()).unwrap();
        std::fs::write(dir.path().join("key.pem"), own.serialize_pem()).unwrap();
        Self { dir }
    }

    pub(crate) fn args(&self) -> Vec<String> {
        let file = |name: &str| self.dir.path().join(name).display().to_string();
        let (authority, certificate, key) = (file("ca.pem"), file("cert.pem"), file("key.pem"));
        ["--authority", &authority, "--certificate", &certificate, "--key", &key].map(str::to_owned).to_vec()
    }
}

#[test]
fn certificates_of_another_authority_are_refused() {
    let (home, far, address) = (dir(), dir(), address("tls"));
    let (ours, theirs) = (Authority::new(), Authority::new());
    let args = |flag, authority: &Authority| {
        let mut args = vec![flag, address.clone(), "--node".to_owned(), "edge".to_owned()];
        args.extend(authority.args());
        args
    };
    let start = |dir: &Path, args: &[String]| {
        BridgeProcess::start(bridge(dir, &args.iter().map(String::as_str).collect::<Vec<_>>()))
    };
    let phy = create(home.path());
    let _listens = start(home.path(), &args("--listen".to_owned(), &ours));
    let stranger = start(far.path(), &args("--connect".to_owned(), &theirs));
    let options = LinkOptions::new().dir(far.path()).timeout(Duration::from_secs(3));
    assert!(options.attach("fronthaul", Side::Secondary).is_err(), "a stranger has made a replica");
    drop(stranger);
    let _connects = start(far.path(), &args("--connect".to_owned(), &ours));
    let mac = attach(far.path());
    wait_for_peer(&phy);
    send(&phy, 7);
    assert_eq!(receive(&mac), 7);
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn wrong_command_lines_are_refused_with_a_remedy() {
    let dir = dir();
    let neither = bridge(dir.path(), &[]).output().unwrap();
    assert!(!neither.status.success() && said(&neither).contains("--listen"), "{}", said(&neither));
    let both = bridge(dir.path(), &["--listen", "tcp/[::1]:0", "--connect", "tcp/[::1]:1"]).output().unwrap();
    assert!(!both.status.success() && said(&both).contains("cannot be used with"), "{}", said(&both));
    let bad_node = bridge(dir.path(), &["--connect", "tcp/[::1]:1", "--node", "a/b"]).output().unwrap();
    assert!(!bad_node.status.success() && said(&bad_node).contains("a/b"), "{}", said(&bad_node));
    let bad_address = bridge(dir.path(), &["--listen", "carrier-pigeon"]).output().unwrap();
    assert!(
        !bad_address.status.success() && said(&bad_address).contains("carrier-pigeon"),
        "{}",
        said(&bad_address)
    );
}
