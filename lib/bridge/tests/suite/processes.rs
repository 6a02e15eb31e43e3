//! Bridges in processes of their own, with Zenoh between them.
#![expect(clippy::disallowed_types, reason = "counts of the test itself")]

use std::fs::OpenOptions;
use std::io::Read;
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shmesh::config::LinkConfig;
use shmesh::inspect::{View, far_nodes};
use shmesh::{Link, LinkOptions, Side};
use shmesh_testing::{http_get, until};

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
        self.terminate();
        assert!(self.0.wait().unwrap().success());
    }

    fn terminate(&self) {
        kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    }

    /// Waits until it ends, and returns its log.
    fn output(mut self) -> String {
        let mut text = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for BridgeProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that was free a moment ago, for TCP and for UDP. The kernel gives none below 32768 to programs that ask for any, so no other test
/// gets it while a bridge is restarted.
pub(crate) fn free_address() -> String {
    static DRAWN: Mutex<u32> = Mutex::new(0);
    loop {
        let mut drawn = DRAWN.lock().unwrap();
        *drawn += 1;
        let address = format!("127.0.0.1:{}", 10_000 + (std::process::id() * 101 + *drawn) % 20_000);
        if TcpListener::bind(&address).is_ok() && UdpSocket::bind(&address).is_ok() {
            return address;
        }
    }
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

/// Messages that the bridges of an IPC directory have counted as lost, over all their processes.
pub(crate) fn lost_at(dir: &Path) -> u64 {
    far_nodes(dir, &"fronthaul".parse().unwrap()).unwrap().iter().map(|node| node.lost).sum()
}

/// A number that follows from `number` and has little to do with it: the finalizer of SplitMix64.
pub(crate) fn scattered(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// The bridges that are killed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Victims {
    Home,
    Far,
    /// At random one of the two, or both at once.
    Any,
}

/// A stream of numbers from home to the far node while the bridges are killed: order is kept, nothing is doubled, and what is missing was
/// counted. The count is in a file of the far node, which outlives its bridge.
fn killed(victims: Victims, kills: u32) {
    let (home, far, address) = (dir(), dir(), address("tcp"));
    let phy = create(home.path());
    let start = |is_home: bool| {
        let (dir, flag) = if is_home { (&home, "--listen") } else { (&far, "--connect") };
        BridgeProcess::start(bridge(dir.path(), &[flag, &address, "--node", "edge", "--peer-timeout", "5"]))
    };
    let mut running = [true, false].map(|is_home| Some(start(is_home)));
    let mac = attach(far.path());
    wait_for_peer(&phy);
    let (is_over, count) = (AtomicBool::new(false), AtomicU64::new(0));
    // Messages that a kill counts as lost though they come later, or that it loses uncounted, at most.
    let mut slack = 0;
    let (sent, received, known) = std::thread::scope(|scope| {
        let (is_over, count) = (&is_over, &count);
        let receiver = scope.spawn(move || {
            let mut received = Vec::new();
            let mut last = Instant::now();
            // Until nothing has come for a while after the last message.
            while !is_over.load(Ordering::Acquire) || last.elapsed() < Duration::from_secs(4) {
                match number(&mac) {
                    Some(number) => {
                        received.push(number);
                        let missing = number + 1 - received.len() as u64;
                        assert!(
                            mac.lost() >= missing,
                            "{} of {missing} are known before {number}",
                            mac.lost()
                        );
                        count.store(received.len() as u64, Ordering::Release);
                        last = Instant::now();
                    }
                    None => {
                        mac.wait(Some(Duration::from_millis(20))).unwrap();
                    }
                }
            }
            (received, mac.lost())
        });
        let mut sent = 0;
        for round in 0..kills {
            let random = scattered(u64::from(round));
            // Killed while messages are on their way, each time after another number of them.
            let until = count.load(Ordering::Acquire) + 100 + random % 200;
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
            let dies = match victims {
                Victims::Home => [true, false],
                Victims::Far => [false, true],
                Victims::Any => {
                    [[true, false], [false, true], [true, true]][usize::try_from((random >> 32) % 3).unwrap()]
                }
            };
            // First all die, then all start.
            for (end, _) in running.iter_mut().zip(dies).filter(|(_, dies)| *dies) {
                drop(end.take());
                slack += 1;
            }
            for (end, is_home) in running.iter_mut().zip([true, false]) {
                end.get_or_insert_with(|| start(is_home));
            }
        }
        until("the ring is empty", || {
            let view = View::open(home.path(), &"fronthaul".parse().unwrap()).unwrap();
            view.snapshot().rings[0].queued.is_empty()
        });
        is_over.store(true, Ordering::Release);
        let (received, known) = receiver.join().unwrap();
        (sent, received, known)
    });
    drop(running);
    assert!(received.is_sorted_by(|a, b| a < b), "doubled or out of order");
    let missing = sent - received.len() as u64;
    assert!(received.len() as u64 > sent / 4, "{missing} of {sent} are missing");
    let counted = lost_at(far.path());
    println!(
        "{victims:?}: {sent} sent, {missing} missing, {counted} counted after {slack} processes in {kills} kills"
    );
    // One more for each process: a message that was about to be taken, or passed on, counts, and comes later or has come.
    assert!((missing..=missing + slack).contains(&counted), "{missing} missing, {counted} counted");
    // A bridge that is killed while it reports them reports them once more.
    assert!(known >= counted, "the program knows of {known} of {counted}");
}

#[test]
fn home_bridge_is_killed() {
    killed(Victims::Home, 3);
}

#[test]
fn far_bridge_is_killed() {
    killed(Victims::Far, 3);
}

#[test]
fn both_bridges_are_killed() {
    killed(Victims::Any, 4);
}

#[test]
#[ignore = "long: 100 kills"]
fn bridges_are_killed_100_times() {
    let kills = std::env::var("SHMESH_BRIDGE_KILLS").map_or(100, |kills| kills.parse().unwrap());
    killed(Victims::Any, kills);
}

pub(crate) struct Authority {
    dir: tempfile::TempDir,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
        let dir = dir();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = params.self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.pem"), authority.pem()).unwrap();
        let authority = Self { dir, issuer: Issuer::new(params, key) };
        authority.certify();
        authority
    }

    /// Writes another certificate and key in place of the last ones.
    fn certify(&self) {
        self.args_of("bridge");
    }

    /// Writes a certificate for bridges of this namespace, and returns the flags for it.
    fn args_of(&self, namespace: &str) -> Vec<String> {
        use rcgen::{CertificateParams, DnType, KeyPair};
        let own = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".into(), "127.0.0.1".into()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, format!("{namespace}.shmesh"));
        let certificate = params.signed_by(&own, &self.issuer).unwrap();
        let flags = self.flags(namespace);
        std::fs::write(&flags[3], certificate.pem()).unwrap();
        std::fs::write(&flags[5], own.serialize_pem()).unwrap();
        flags
    }

    fn flags(&self, namespace: &str) -> Vec<String> {
        let file = |name: &str| self.dir.path().join(name).display().to_string();
        let (authority, certificate, key) =
            (file("ca.pem"), file(&format!("{namespace}.pem")), file(&format!("{namespace}.key")));
        ["--authority", &authority, "--certificate", &certificate, "--key", &key].map(str::to_owned).to_vec()
    }

    pub(crate) fn args(&self) -> Vec<String> {
        self.flags("bridge")
    }
}

#[test]
fn certificates_of_another_authority_are_refused() {
    let (home, far, address) = (dir(), dir(), address("quic"));
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

/// Both bridges share the files here. One after the other is restarted with new ones, while messages cross and the other goes on.
#[test]
fn certificates_are_replaced_in_turn() {
    let (home, far, address, authority) = (dir(), dir(), address("quic"), Authority::new());
    let start = |is_home: bool| {
        let (dir, flag) = if is_home { (&home, "--listen") } else { (&far, "--connect") };
        let mut args = vec![flag, &address, "--node", "edge"];
        let certificates = authority.args();
        args.extend(certificates.iter().map(String::as_str));
        BridgeProcess::start(bridge(dir.path(), &args))
    };
    let phy = create(home.path());
    let mut bridges = [true, false].map(|is_home| Some(start(is_home)));
    let mac = attach(far.path());
    wait_for_peer(&phy);
    for (turn, is_home) in [(0, true), (100, false)] {
        (turn..turn + 50).for_each(|number| send(&phy, number));
        authority.certify();
        let restarted = &mut bridges[usize::from(!is_home)];
        restarted.take().unwrap().end();
        *restarted = Some(start(is_home));
        (turn + 50..turn + 100).for_each(|number| send(&phy, number));
        (turn..turn + 100).for_each(|number| assert_eq!(receive(&mac), number));
    }
    assert_eq!(lost_at(far.path()), 0);
}

/// The value of a metric that a bridge serves.
fn metric(admin: &str, name: &str) -> Option<u64> {
    http_get(admin, "/metrics")
        .ok()?
        .lines()
        .find(|line| line.starts_with(name))?
        .rsplit(' ')
        .next()?
        .parse()
        .ok()
}

/// Two pods of one node have one IPC directory: the bridge of one waits while the other has the link.
#[test]
fn second_bridge_of_a_directory_stands_by_and_takes_over() {
    let (home, far, address) = (dir(), dir(), address("tcp"));
    let admins = [free_address(), free_address()];
    let phy = create(home.path());
    let _listens = BridgeProcess::start(bridge(home.path(), &["--listen", &address, "--cluster-node", "a"]));
    let start = |admin: &str| {
        let args = ["--connect", &address, "--cluster-node", "b", "--near", "fronthaul", "--admin", admin];
        BridgeProcess::start(bridge(far.path(), &args))
    };
    let first = start(&admins[0]);
    let mac = attach(far.path());
    wait_for_peer(&phy);
    let second = start(&admins[1]);
    until("the second stands by", || metric(&admins[1], "shmesh_bridge_standby{") == Some(1));
    assert!(answers(&admins[1], "/readyz"), "a bridge that stands by is ready");
    send(&phy, 1);
    assert_eq!(receive(&mac), 1);
    drop(first);
    until("the second has taken over", || metric(&admins[1], "shmesh_bridge_standby{") == Some(0));
    send(&phy, 2);
    assert_eq!(receive(&mac), 2);
    second.end();
}

fn answers(admin: &str, path: &str) -> bool {
    http_get(admin, path).unwrap().lines().next().is_some_and(|line| line.contains(" 200"))
}

/// One authority signs the certificates of all namespaces.
#[test]
fn certificate_of_another_namespace_has_no_access() {
    let (home, far, address) = (dir(), dir(), address("quic"));
    let admin = free_address();
    let authority = Authority::new();
    let start = |flag: &str, dir: &Path, namespace: &str, allows: &str| {
        let mut args: Vec<String> =
            [flag, &address, "--group", "east/ran", "--cluster-node", "n"].map(Into::into).into();
        args.extend(authority.args_of(namespace));
        args.extend(["--allow-certificate".to_owned(), format!("{allows}.shmesh")]);
        if flag == "--listen" {
            args.extend(["--admin".to_owned(), admin.clone()]);
        } else {
            // So the announcements cross, too, or no replica would be made.
            args.extend(["--near".to_owned(), "fronthaul".to_owned()]);
        }
        BridgeProcess::start(bridge(dir, &args.iter().map(String::as_str).collect::<Vec<_>>()))
    };
    let phy = create(home.path());
    let listens = start("--listen", home.path(), "ran", "ran");
    // The stranger itself would accept everything.
    let stranger = start("--connect", far.path(), "core", "ran");
    until("the refusal is counted", || {
        metric(&admin, "shmesh_bridge_certificates_refused_total").is_some_and(|count| count > 0)
    });
    let options = LinkOptions::new().dir(far.path()).timeout(Duration::from_secs(3));
    assert!(options.attach("fronthaul", Side::Secondary).is_err(), "a stranger has made a replica");
    assert_eq!(metric(&admin, "shmesh_bridge_connected{"), None, "a stranger's frame was heard");
    drop(stranger);
    let connects = start("--connect", far.path(), "ran", "ran");
    let mac = attach(far.path());
    wait_for_peer(&phy);
    send(&phy, 7);
    assert_eq!(receive(&mac), 7);
    connects.end();
    listens.end();
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A library of another layout version cannot be had here, so the version is changed in the file of a link.
#[test]
fn link_of_another_layout_version_is_named_in_the_log() {
    let (home, far, address) = (dir(), dir(), address("tcp"));
    let _phy = create(home.path());
    let segment = OpenOptions::new().write(true).open(home.path().join("fronthaul_shm")).unwrap();
    // Bits 48 to 63 of the first word.
    segment.write_all_at(&99_u16.to_le_bytes(), 6).unwrap();
    let mut command = bridge(home.path(), &["--listen", &address]);
    let listens = BridgeProcess(command.stderr(Stdio::piped()).spawn().unwrap());
    let connects = BridgeProcess::start(bridge(far.path(), &["--connect", &address, "--node", "edge"]));
    until("the bridges answer each other", || {
        let nodes = far_nodes(home.path(), &"fronthaul".parse().unwrap()).unwrap();
        nodes.iter().any(|node| node.is_connected)
    });
    // Several looks at the link, and statuses without a shape.
    std::thread::sleep(Duration::from_millis(500));
    assert!(!far.path().join("fronthaul_shm").exists(), "a replica of a link that cannot be read");
    connects.end();
    listens.terminate();
    let log = listens.output();
    assert!(log.contains("has layout version 99, but this library supports"), "{log}");
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

/// The number of times that a bridge's own threads have slept, and that all of its threads have.
fn sleeps(bridge: &BridgeProcess) -> [u64; 2] {
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let mut sums = [0; 2];
    for task in std::fs::read_dir(format!("/proc/{}/task", bridge.0.id())).unwrap() {
        let task = task.unwrap().path();
        let status = read(task.join("status"));
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        let count: u64 = line.map_or(0, |count| count.trim().parse().unwrap());
        sums[0] += if read(task.join("comm")).starts_with("fronthaul:") { count } else { 0 };
        sums[1] += count;
    }
    sums
}

#[test]
#[ignore = "a measurement: 80 seconds"]
fn wake_ups_of_idle_bridges() {
    let (home, far, address) = (dir(), dir(), address("tcp"));
    let listens = BridgeProcess::start(bridge(home.path(), &["--listen", &address]));
    let connects = BridgeProcess::start(bridge(far.path(), &["--connect", &address, "--node", "edge"]));
    let measure = |what: &str| {
        std::thread::sleep(Duration::from_secs(20));
        let before = [&listens, &connects].map(sleeps);
        std::thread::sleep(Duration::from_secs(20));
        for (end, (after, before)) in
            ["home", "far"].into_iter().zip([&listens, &connects].map(sleeps).into_iter().zip(before))
        {
            let [sessions, all] = [after[0] - before[0], after[1] - before[1]];
            println!(
                "{what}, {end}: {sessions} wake-ups of the session in 20 s, {} of Zenoh and others",
                all - sessions
            );
        }
    };
    measure("without a link");
    let (phy, mac) = (create(home.path()), attach(far.path()));
    wait_for_peer(&phy);
    measure("with programs");
    drop((phy, mac));
    connects.end();
    listens.end();
}
