//! Two links in one sidecar: whatever happens to `aaa`, `bbb` is served.

use std::any::Any;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::lingering::Stubborn;
use crate::support::Sidecar;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shmesh::{Link, LinkOptions, Side};
use shmesh_proto::broker::{Attach, Hello, Request, request::Op};
use shmesh_proto::packet;
use shmesh_sys::file::{ByteLock, open as open_file, try_lock_byte};
use shmesh_sys::socket;
use shmesh_testing::{Peer, Watchdog, broker_of, ipc_dir, is_root, own_process, until};

const LINKS: [&str; 2] = ["aaa", "bbb"];
const FILES: [&str; 3] = ["aaa_shm", "aaa_cpu_msg", "aaa_cpu_data"];

/// What must stay in place for the damage to last.
type Held = Vec<Box<dyn Any>>;

struct Damage {
    name: &'static str,
    /// Whether the link cannot be kept while it lasts, whoever the sidecar is.
    is_certain: bool,
    inflict: fn(&Path) -> Held,
}

const fn certain(name: &'static str, inflict: fn(&Path) -> Held) -> Damage {
    Damage { name, is_certain: true, inflict }
}

const fn perhaps(name: &'static str, inflict: fn(&Path) -> Held) -> Damage {
    Damage { name, is_certain: false, inflict }
}

const DAMAGES: [Damage; 14] = [
    certain("eight bytes of the header overwritten", |dir| {
        let mut file = open(&dir.join("aaa_shm"));
        file.seek(SeekFrom::Start(24)).unwrap();
        file.write_all(&[0xff; 8]).unwrap();
        Held::new()
    }),
    certain("no magic number", |dir| {
        open(&dir.join("aaa_cpu_msg")).write_all(&[0; 8]).unwrap();
        Held::new()
    }),
    certain("a missing pool", |dir| {
        fs::remove_file(dir.join("aaa_cpu_data")).unwrap();
        Held::new()
    }),
    certain("a directory in place of the link", |dir| {
        fs::remove_file(dir.join("aaa_shm")).unwrap();
        fs::create_dir(dir.join("aaa_shm")).unwrap();
        Held::new()
    }),
    certain("a directory in place of a pool", |dir| {
        fs::remove_file(dir.join("aaa_cpu_msg")).unwrap();
        fs::create_dir(dir.join("aaa_cpu_msg")).unwrap();
        Held::new()
    }),
    certain("a symbolic link to another link", |dir| {
        fs::remove_file(dir.join("aaa_shm")).unwrap();
        std::os::unix::fs::symlink("bbb_shm", dir.join("aaa_shm")).unwrap();
        Held::new()
    }),
    certain("a FIFO in place of a pool", |dir| {
        fs::remove_file(dir.join("aaa_cpu_msg")).unwrap();
        let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
        nix::unistd::mkfifo(&dir.join("aaa_cpu_msg"), mode).unwrap();
        Held::new()
    }),
    certain("a truncated pool", |dir| {
        open(&dir.join("aaa_cpu_msg")).set_len(4096).unwrap();
        Held::new()
    }),
    certain("an empty link", |dir| {
        open(&dir.join("aaa_shm")).set_len(0).unwrap();
        Held::new()
    }),
    certain("a directory in place of the lock file", |dir| {
        fs::remove_file(dir.join("aaa.lock")).unwrap();
        fs::create_dir(dir.join("aaa.lock")).unwrap();
        Held::new()
    }),
    perhaps("a lock of a stranger on the first byte of the lock file", |dir| lock(dir, 0)),
    perhaps("a lock of a stranger on the second byte of the lock file", |dir| lock(dir, 1)),
    perhaps("a file in place of the socket", |dir| {
        fs::write(socket_of_aaa(dir), "mine").unwrap();
        Held::new()
    }),
    perhaps("a socket of a stranger, and files without permission", |dir| {
        let listener = UnixListener::bind(socket_of_aaa(dir)).unwrap();
        for name in FILES {
            fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o000)).unwrap();
        }
        vec![Box::new(listener)]
    }),
];

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// Where the sidecar listens unless something else has the name.
fn socket_of_aaa(dir: &Path) -> PathBuf {
    dir.join(format!("aaa.broker-{:x}", u64::from(nix::unistd::geteuid().as_raw()) << 8))
}

fn lock(dir: &Path, byte: u32) -> Held {
    let file = open(&dir.join("aaa.lock"));
    assert!(try_lock_byte(&file, byte, ByteLock::Exclusive).unwrap());
    vec![Box::new(file)]
}

/// Everything that has the name of the link.
fn remove_aaa(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        if entry.file_name().to_str().unwrap().starts_with("aaa") {
            let path = entry.path();
            let _ = if entry.file_type().unwrap().is_dir() {
                fs::remove_dir(path)
            } else {
                fs::remove_file(path)
            };
        }
    }
}

fn is_ready(sidecar: &Sidecar, link: &str) -> bool {
    sidecar.metric(&format!("shmesh_sidecar_link_ready{{link=\"{link}\"}}")) == 1
}

fn all_ready(sidecar: &Sidecar) -> bool {
    sidecar.get("/readyz").starts_with("HTTP/1.1 200")
}

/// Both ends of `bbb`, and how long its round trips took.
struct Clients {
    phy: Link,
    mac: Link,
    took: Vec<Duration>,
}

impl Clients {
    fn attach(dir: &Path) -> Self {
        let options = LinkOptions::new().dir(dir).timeout(Duration::from_secs(60));
        let phy = options.attach("bbb", Side::Primary).unwrap();
        let mac = options.attach("bbb", Side::Secondary).unwrap();
        Self { phy, mac, took: Vec::new() }
    }

    fn talk(&mut self) {
        for n in 0..20 {
            let start = Instant::now();
            self.phy.send_inline(n, 0, b"there").unwrap();
            assert_eq!(self.mac.receive().unwrap().unwrap().msg_id(), n);
            let mut loan = self.mac.loan().unwrap();
            loan.resize_msg(4).unwrap().copy_from_slice(b"back");
            loan.with_msg_id(n).send().unwrap();
            assert_eq!(self.phy.receive().unwrap().unwrap().msg(), b"back");
            self.took.push(start.elapsed());
        }
    }

    /// The 99th percentile so far; the next one starts anew.
    fn p99(&mut self) -> Duration {
        self.took.sort_unstable();
        let p99 = self.took[self.took.len() * 99 / 100];
        self.took.clear();
        p99
    }
}

/// A newcomer attaches, and the sidecar answers it.
fn newcomer_attaches(dir: &Path, sidecar: &Sidecar) {
    let before = sidecar.metric("shmesh_sidecar_attached_total");
    let mut newcomer = Peer::start(dir);
    newcomer.tell("attach bbb secondary 60000");
    until("the sidecar answers a newcomer", || sidecar.metric("shmesh_sidecar_attached_total") > before);
    newcomer.exit();
}

#[test]
fn damage_to_one_link_leaves_the_other_served() {
    let _watchdog = Watchdog::start();
    for Damage { name, is_certain, inflict } in DAMAGES {
        let dir = ipc_dir();
        let sidecar = Sidecar::start_links(dir.path(), &LINKS);
        until("both are ready", || all_ready(&sidecar));
        sidecar.stop();

        let held = inflict(dir.path());
        let sidecar = Sidecar::start_links(dir.path(), &LINKS);
        until("the other is kept", || is_ready(&sidecar, "bbb"));
        let mut clients = Clients::attach(dir.path());
        clients.talk();
        newcomer_attaches(dir.path(), &sidecar);
        if is_certain {
            until("it has failed", || {
                sidecar.metric("shmesh_sidecar_link_failures_total{link=\"aaa\"}") >= 2
            });
            let answer = sidecar.get("/readyz");
            assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("link aaa ("), "{name}: {answer}");
            assert!(!answer.contains("bbb ("), "{name}: {answer}");
            assert!(!is_ready(&sidecar, "aaa") && is_ready(&sidecar, "bbb"), "{name}");
            until("it is logged", || {
                sidecar.has_logged(&["link not kept", "\"link\":\"aaa\"", "\"reason\":"])
            });
        }
        assert!(sidecar.get("/livez").starts_with("HTTP/1.1 200"), "{name}");

        drop(held);
        remove_aaa(dir.path());
        until(name, || {
            clients.talk();
            all_ready(&sidecar)
        });
        let mut healed = Peer::start(dir.path());
        healed.tell("attach aaa secondary 60000");
        newcomer_attaches(dir.path(), &sidecar);
        clients.talk();
    }
}

/// The start ends when each link is there or has failed for a while, so that a pod with one bad link comes up, and is not ready.
#[test]
fn start_ends_though_a_link_is_bad() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    fs::create_dir(dir.path().join("aaa_shm")).unwrap();
    let sidecar = Sidecar::start_links(dir.path(), &LINKS);
    until("the start is over", || sidecar.get("/startupz").starts_with("HTTP/1.1 200"));
    assert!(sidecar.get("/readyz").contains("link aaa ("));
}

#[test]
fn truncated_link_is_given_up_and_the_other_is_served() {
    let _watchdog = Watchdog::start();
    for (name, len) in
        [("aaa_shm", 0), ("aaa_shm", 8192), ("aaa_cpu_msg", 0), ("aaa_cpu_data", 0), ("aaa_cpu_data", 16_384)]
    {
        let dir = ipc_dir();
        let mut sidecar = Sidecar::start_links(dir.path(), &LINKS);
        until("both are ready", || all_ready(&sidecar));
        let mut clients = Clients::attach(dir.path());
        // It is on the link when that is damaged, and reads nothing there.
        let mut witness = Peer::start(dir.path());
        witness.tell("attach aaa secondary 60000");
        until("all are known", || sidecar.metric("shmesh_sidecar_attached_total") == 3);

        let file = open(&dir.path().join(name));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(10));
                file.set_len(len).unwrap();
            });
            until("a scrape finds the damage", || {
                clients.talk();
                !is_ready(&sidecar, "aaa")
            });
        });
        assert!(sidecar.lives() && is_ready(&sidecar, "bbb"), "{name}");
        until("it is named", || {
            let answer = sidecar.get("/readyz");
            answer.starts_with("HTTP/1.1 503") && answer.contains("link aaa (") && answer.contains(name)
        });
        until("it is logged", || sidecar.has_logged(&["link not kept", "\"link\":\"aaa\"", "truncated"]));
        newcomer_attaches(dir.path(), &sidecar);
        // Deaths are noticed on the link that is whole.
        let mut mortal = Peer::start(dir.path());
        mortal.tell("attach bbb secondary 60000");
        mortal.kill();
        until("the dead one is reaped", || clients.phy.participants().count() == 2);
        witness.kill();
        remove_aaa(dir.path());
        until("it is made anew", || all_ready(&sidecar));
        clients.talk();
        sidecar.stop();
    }
}

/// Numbers that depend on the seed alone (SplitMix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).unwrap()
    }
}

/// Does to `aaa` whatever a member of it can do.
struct Attacker {
    chance: Chance,
    dir: PathBuf,
    peers: Vec<Peer>,
    connections: Vec<OwnedFd>,
    locks: Held,
    stubborn: Stubborn,
}

impl Attacker {
    fn act(&mut self, sidecar: &mut Sidecar) -> &'static str {
        let file = self.dir.join(FILES[self.chance.below(FILES.len())]);
        match self.chance.below(16) {
            0 => {
                // Not what a symbolic link leads to: that is the other link.
                if let Ok(file) = open_file(&file, true) {
                    let _ = file.set_len(self.chance.next() % 100_000);
                }
                "truncate"
            }
            1..=3 => {
                let words: Vec<u8> = (0..64).flat_map(|_| self.chance.next().to_le_bytes()).collect();
                if let Ok(mut file) = open_file(&file, true) {
                    let len = file.metadata().unwrap().len().max(1);
                    file.seek(SeekFrom::Start(self.chance.next() % len)).unwrap();
                    file.write_all(&words).unwrap();
                }
                "overwrite"
            }
            4 => {
                let _ = fs::remove_file(&file);
                "remove"
            }
            5 => {
                let _ = fs::remove_file(&file);
                let _ = fs::create_dir(&file);
                "directory"
            }
            6 => {
                let _ = fs::remove_file(&file);
                let _ = std::os::unix::fs::symlink("bbb_shm", &file);
                "symlink"
            }
            7 => {
                if let Ok(file) = File::options().write(true).read(true).open(self.dir.join("aaa.lock")) {
                    let byte = u32::try_from(self.chance.below(4)).unwrap();
                    let _ = try_lock_byte(&file, byte, ByteLock::Exclusive);
                    self.locks.push(Box::new(file));
                }
                "lock"
            }
            8 if self.peers.len() < 4 => {
                let mut peer = Peer::start(&self.dir);
                if is_root() && self.chance.below(3) == 0 {
                    peer.tell("prepare user 65533 65533");
                }
                if peer.ask("attach aaa secondary 0") == "ok" {
                    peer.ask("hold-loan");
                }
                self.peers.push(peer);
                "attach"
            }
            8 | 9 => {
                if let Some(peer) = self.peers.pop() {
                    peer.kill();
                }
                "kill"
            }
            10 => {
                let index = self.chance.below(self.peers.len().max(1));
                if let Some(peer) = self.peers.get(index) {
                    peer.signal(if self.chance.below(2) == 0 { Signal::SIGSTOP } else { Signal::SIGCONT });
                }
                "stop or continue"
            }
            11 | 12 => {
                self.connect();
                "connect"
            }
            13 => {
                self.connections.clear();
                "hang up"
            }
            14 => {
                let pid = Pid::from_raw(sidecar.pid().cast_signed());
                kill(pid, Signal::SIGSTOP).unwrap();
                self.connect();
                kill(pid, Signal::SIGCONT).unwrap();
                "stop the sidecar"
            }
            _ => {
                self.locks.clear();
                remove_aaa(&self.dir);
                // The next one does not wait before it tries again.
                sidecar.restart(&self.dir, &LINKS);
                until("the other is adopted", || is_ready(sidecar, "bbb"));
                "clean, and kill the sidecar"
            }
        }
    }

    fn connect(&mut self) {
        let Some(path) = broker_of(&self.dir, "aaa") else { return };
        let Ok(fd) = socket::connect_now(&path) else { return };
        let attach = packet::encode(&Request::new(1, Op::Attach(Attach { side: 0 })));
        let hello = packet::encode(&Request::new(1, Op::Hello(Hello {})));
        // Refused when the sidecar has hung up, or does not read.
        let _ = match self.chance.below(4) {
            0 => socket::send(&fd, &[0xff; 64], &[]),
            1 => socket::send(&fd, &attach, &[]),
            2 => Ok(()),
            _ => {
                let stream = self.stubborn.one();
                let sent = socket::send(&fd, &hello, &[stream.as_fd()]);
                // It may be the last, and linger here.
                std::thread::spawn(move || drop(stream));
                sent
            }
        };
        if self.connections.len() < 16 {
            self.connections.push(fd);
        }
    }

    fn gives_up(&mut self) {
        self.locks.clear();
        self.connections.clear();
        self.peers.drain(..).for_each(Peer::kill);
        self.stubborn = Stubborn::new();
    }
}

fn attack(rounds: u32) {
    let _watchdog = Watchdog::start();
    let seed = std::env::var("SHMESH_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs());
    println!("SHMESH_SEED={seed}");
    let dir = ipc_dir();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let mut sidecar = Sidecar::start_links(dir.path(), &LINKS);
    until("both are ready", || all_ready(&sidecar));
    let mut clients = Clients::attach(dir.path());
    (0..rounds).for_each(|_| clients.talk());
    let quiet = clients.p99();
    let mut attacker = Attacker {
        chance: Chance(seed),
        dir: dir.path().to_owned(),
        peers: Vec::new(),
        connections: Vec::new(),
        locks: Held::new(),
        stubborn: Stubborn::new(),
    };
    let (mut last, mut kept) = (Vec::new(), 0);
    for round in 0..rounds {
        last.push(attacker.act(&mut sidecar));
        clients.talk();
        kept += u32::from(is_ready(&sidecar, "aaa"));
        assert!(sidecar.lives(), "round {round} of seed {seed}: {last:?}");
        assert!(is_ready(&sidecar, "bbb"), "round {round} of seed {seed}: {last:?}");
        if round % 50 == 49 {
            newcomer_attaches(dir.path(), &sidecar);
        }
    }
    println!("aaa was kept in {kept} of {rounds} rounds");
    println!("p99 of bbb: {quiet:?} before the attack, {:?} meanwhile", clients.p99());
    attacker.gives_up();
    remove_aaa(dir.path());
    until("both are ready again", || {
        clients.talk();
        all_ready(&sidecar)
    });
    newcomer_attaches(dir.path(), &sidecar);
    sidecar.stop();
}

#[test]
fn random_attacks_on_one_link_leave_the_other_served() {
    own_process(|| attack(60));
}

#[test]
#[ignore = "long: 1,000 rounds"]
fn random_attacks_on_one_link_leave_the_other_served_for_long() {
    own_process(|| attack(1_000));
}
