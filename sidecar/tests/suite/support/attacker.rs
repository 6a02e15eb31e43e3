//! A participant of link `aaa` that attacks it in every way it can, and two clients of link `bbb` that must not be
//! affected.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shmesh::{Link, LinkOptions, Side};
use shmesh_proto::broker::{Attach, Hello, Request, request::Op};
use shmesh_proto::packet;
use shmesh_sys::closing::Lingering;
use shmesh_sys::file::{ByteLock, open as open_file, try_lock_byte};
use shmesh_sys::socket;
use shmesh_testing::{Peer, Stubborn, broker_of, is_root, until};

use super::Sidecar;

pub(crate) const LINKS: [&str; 2] = ["aaa", "bbb"];
pub(crate) const FILES: [&str; 3] = ["aaa_shm", "aaa_cpu_msg", "aaa_cpu_data"];

const MEMBERS_MAX: usize = 6;

/// Removes all files of the link.
pub(crate) fn remove_aaa(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap().map_while(Result::ok) {
        if entry.file_name().to_str().unwrap().starts_with("aaa") {
            let path = entry.path();
            let _ = if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                fs::remove_dir(path)
            } else {
                fs::remove_file(path)
            };
        }
    }
}

pub(crate) fn is_ready(sidecar: &Sidecar, link: &str) -> bool {
    sidecar.metric(&format!("shmesh_sidecar_link_ready{{link=\"{link}\"}}")) == 1
}

/// The seed of a random test: `SHMESH_SEED`, or the time. It is printed.
pub(crate) fn seed() -> u64 {
    let seed = std::env::var("SHMESH_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs());
    println!("SHMESH_SEED={seed}");
    seed
}

/// Both sides of `bbb`, and the times of their round trips.
pub(crate) struct Clients {
    pub(crate) phy: Link,
    mac: Link,
    pub(crate) took: Vec<Duration>,
}

impl Clients {
    pub(crate) fn attach(dir: &Path) -> Self {
        let options = LinkOptions::new().dir(dir).timeout(Duration::from_secs(60));
        let phy = options.attach("bbb", Side::Primary).unwrap();
        let mac = options.attach("bbb", Side::Secondary).unwrap();
        Self { phy, mac, took: Vec::new() }
    }

    pub(crate) fn talk(&mut self) {
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
}

/// Random numbers from a seed (SplitMix64).
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

/// Attacks `aaa` from processes that are alive, stopped, forked or dead, of this or another user, in this or another pid
/// namespace.
pub(crate) struct Attacker {
    chance: Chance,
    dir: PathBuf,
    members: Vec<Peer>,
    /// Dead participants whose forked children live.
    dead: Vec<Peer>,
    connections: Vec<OwnedFd>,
    locks: Vec<File>,
    stubborn: Stubborn,
}

impl Attacker {
    pub(crate) fn new(seed: u64, dir: &Path) -> Self {
        Self {
            chance: Chance(seed),
            dir: dir.to_owned(),
            members: Vec::new(),
            dead: Vec::new(),
            connections: Vec::new(),
            locks: Vec::new(),
            stubborn: Stubborn::listen(),
        }
    }

    /// Performs one action, and returns its description.
    pub(crate) fn act(&mut self, sidecar: &mut Sidecar) -> &'static str {
        let file = self.dir.join(FILES[self.chance.below(FILES.len())]);
        match self.chance.below(18) {
            0 => {
                // Does not follow a symbolic link, which could lead to the other link.
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
                    self.locks.push(file);
                }
                "lock"
            }
            8 | 9 if self.members.len() < MEMBERS_MAX => {
                self.attach();
                "attach"
            }
            8..=10 => {
                if let Some(member) = self.pick() {
                    self.members.swap_remove(member).kill();
                }
                "kill"
            }
            11 => {
                if let Some(member) = self.pick() {
                    let member = self.members.swap_remove(member);
                    member.signal(Signal::SIGKILL);
                    self.dead.push(member);
                    if self.dead.len() > MEMBERS_MAX {
                        self.dead.remove(0).kill();
                    }
                }
                "kill, but not its child"
            }
            12 => {
                if let Some(member) = self.pick() {
                    let is_stop = self.chance.below(2) == 0;
                    self.members[member].signal(if is_stop { Signal::SIGSTOP } else { Signal::SIGCONT });
                }
                "stop or continue"
            }
            13 | 14 => {
                self.connect();
                "connect"
            }
            15 => {
                self.connections.clear();
                "hang up"
            }
            16 => {
                let pid = Pid::from_raw(sidecar.pid().cast_signed());
                kill(pid, Signal::SIGSTOP).unwrap();
                self.connect();
                kill(pid, Signal::SIGCONT).unwrap();
                "stop the sidecar"
            }
            _ => {
                self.locks.clear();
                remove_aaa(&self.dir);
                // The next sidecar does not wait before it retries.
                sidecar.restart(&self.dir, &LINKS);
                until("the other is adopted", || is_ready(sidecar, "bbb"));
                "clean, and kill the sidecar"
            }
        }
    }

    fn pick(&mut self) -> Option<usize> {
        (!self.members.is_empty()).then(|| self.chance.below(self.members.len()))
    }

    /// Attaches a new participant of a random kind.
    fn attach(&mut self) {
        let is_root = is_root();
        let mut member = if is_root && self.chance.below(3) == 0 {
            Peer::start_alone(&self.dir)
        } else {
            Peer::start(&self.dir)
        };
        if is_root && self.chance.below(2) == 0 {
            // Of the files' group, so that it may attach.
            member.tell("prepare user 65533 0");
        }
        let fork = ["", "", "fork", "fork-unseen"][self.chance.below(4)];
        if member.ask("attach aaa secondary 0") == "ok" && !fork.is_empty() {
            member.tell(fork);
        }
        self.members.push(member);
    }

    fn connect(&mut self) {
        let Some(path) = broker_of(&self.dir, "aaa") else { return };
        let Ok(fd) = socket::connect_now(&path) else { return };
        let attach = packet::encode(&Request::new(1, Op::Attach(Attach { side: 0 })));
        let hello = packet::encode(&Request::new(1, Op::Hello(Hello {})));
        // Fails if the sidecar has closed the connection, or does not read.
        let _ = match self.chance.below(4) {
            0 => socket::send(&fd, &[0xff; 64], &[]),
            1 => socket::send(&fd, &attach, &[]),
            2 => Ok(()),
            _ => {
                let stream = self.stubborn.one();
                let sent = socket::send(&fd, &hello, &[stream.as_fd()]);
                // The sidecar has the last copy, or there is none. Not closed in a thread: a process that is started
                // meanwhile would have a copy until its exec.
                Lingering::from(vec![OwnedFd::from(stream)]).close().unwrap();
                sent
            }
        };
        if self.connections.len() < 16 {
            self.connections.push(fd);
        }
    }

    /// Ends everything that it has started.
    pub(crate) fn give_up(&mut self) {
        self.locks.clear();
        self.connections.clear();
        self.members.drain(..).chain(self.dead.drain(..)).for_each(Peer::kill);
        self.stubborn = Stubborn::listen();
        remove_aaa(&self.dir);
    }
}
