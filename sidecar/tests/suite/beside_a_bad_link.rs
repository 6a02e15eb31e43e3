//! Two links in one sidecar: whatever happens to `aaa`, `bbb` is served.

use std::any::Any;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::Sidecar;
use crate::support::attacker::{Attacker, Clients, FILES, LINKS, is_ready, remove_aaa, seed};
use shmesh::{LinkOptions, Side};
use shmesh_sys::file::{ByteLock, try_lock_byte};
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, own_process, until};

/// Values that must live for the damage to last.
type DamageGuards = Vec<Box<dyn Any>>;

struct Damage {
    name: &'static str,
    /// Whether the link cannot be kept while the damage lasts, whatever user the sidecar runs as.
    is_certain: bool,
    inflict: fn(&Path) -> DamageGuards,
}

const fn certain(name: &'static str, inflict: fn(&Path) -> DamageGuards) -> Damage {
    Damage { name, is_certain: true, inflict }
}

const fn perhaps(name: &'static str, inflict: fn(&Path) -> DamageGuards) -> Damage {
    Damage { name, is_certain: false, inflict }
}

static DAMAGES: [Damage; 14] = [
    certain("eight bytes of the header overwritten", |dir| {
        let mut file = open(&dir.join("aaa_shm"));
        file.seek(SeekFrom::Start(24)).unwrap();
        file.write_all(&[0xff; 8]).unwrap();
        DamageGuards::new()
    }),
    certain("no magic number", |dir| {
        open(&dir.join("aaa_cpu_msg")).write_all(&[0; 8]).unwrap();
        DamageGuards::new()
    }),
    certain("a missing pool", |dir| {
        fs::remove_file(dir.join("aaa_cpu_data")).unwrap();
        DamageGuards::new()
    }),
    certain("a directory in place of the link", |dir| {
        fs::remove_file(dir.join("aaa_shm")).unwrap();
        fs::create_dir(dir.join("aaa_shm")).unwrap();
        DamageGuards::new()
    }),
    certain("a directory in place of a pool", |dir| {
        fs::remove_file(dir.join("aaa_cpu_msg")).unwrap();
        fs::create_dir(dir.join("aaa_cpu_msg")).unwrap();
        DamageGuards::new()
    }),
    certain("a symbolic link to another link", |dir| {
        fs::remove_file(dir.join("aaa_shm")).unwrap();
        std::os::unix::fs::symlink("bbb_shm", dir.join("aaa_shm")).unwrap();
        DamageGuards::new()
    }),
    certain("a FIFO in place of a pool", |dir| {
        fs::remove_file(dir.join("aaa_cpu_msg")).unwrap();
        let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
        nix::unistd::mkfifo(&dir.join("aaa_cpu_msg"), mode).unwrap();
        DamageGuards::new()
    }),
    certain("a truncated pool", |dir| {
        open(&dir.join("aaa_cpu_msg")).set_len(4096).unwrap();
        DamageGuards::new()
    }),
    certain("an empty link", |dir| {
        open(&dir.join("aaa_shm")).set_len(0).unwrap();
        DamageGuards::new()
    }),
    certain("a directory in place of the lock file", |dir| {
        fs::remove_file(dir.join("aaa.lock")).unwrap();
        fs::create_dir(dir.join("aaa.lock")).unwrap();
        DamageGuards::new()
    }),
    perhaps("a lock of a stranger on the first byte of the lock file", |dir| lock(dir, 0)),
    perhaps("a lock of a stranger on the second byte of the lock file", |dir| lock(dir, 1)),
    perhaps("a file in place of the socket", |dir| {
        fs::write(socket_of_aaa(dir), "mine").unwrap();
        DamageGuards::new()
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

/// The path at which the sidecar listens, unless something else has the name.
fn socket_of_aaa(dir: &Path) -> PathBuf {
    dir.join(format!("aaa.broker-{:x}", u64::from(nix::unistd::geteuid().as_raw()) << 8))
}

fn lock(dir: &Path, byte: u32) -> DamageGuards {
    let file = open(&dir.join("aaa.lock"));
    assert!(try_lock_byte(&file, byte, ByteLock::Exclusive).unwrap());
    vec![Box::new(file)]
}

fn all_ready(sidecar: &Sidecar) -> bool {
    sidecar.get("/readyz").starts_with("HTTP/1.1 200")
}

/// Attaches a new participant, which the sidecar must answer.
fn newcomer_attaches(dir: &Path, sidecar: &Sidecar) {
    let before = sidecar.metric("shmesh_sidecar_attached_total");
    let mut newcomer = Peer::start(dir);
    newcomer.tell("attach bbb secondary 60000");
    until("the sidecar answers a newcomer", || sidecar.metric("shmesh_sidecar_attached_total") > before);
    newcomer.exit();
}

#[test]
fn damage_to_one_link_leaves_the_other_served() {
    // One of each kind.
    damage_one_link([&DAMAGES[5], &DAMAGES[10]].into_iter(), true);
}

#[test]
#[ignore = "long: all kinds of damage, several seconds each"]
fn every_damage_to_one_link_leaves_the_other_served() {
    damage_one_link(DAMAGES.iter(), false);
}

/// Scrapes notice damage at once. Without them the sidecar checks the files every ten seconds.
fn damage_one_link(damages: impl Iterator<Item = &'static Damage>, is_scraped: bool) {
    let _watchdog = Watchdog::start();
    for Damage { name, is_certain, inflict } in damages {
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
        if *is_certain {
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
            if is_scraped {
                is_ready(&sidecar, "aaa");
            }
            all_ready(&sidecar)
        });
        let mut healed = Peer::start(dir.path());
        healed.tell("attach aaa secondary 60000");
        newcomer_attaches(dir.path(), &sidecar);
        clients.talk();
    }
}

/// The start ends when each link is kept or has failed for a while. So a pod with one bad link starts, but is not ready.
#[test]
#[ignore = "long: the start waits ten seconds for the link"]
fn start_ends_though_a_link_is_bad() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    fs::create_dir(dir.path().join("aaa_shm")).unwrap();
    let sidecar = Sidecar::start_links(dir.path(), &LINKS);
    let waited = sidecar.await_start(60);
    assert!(waited.status.success(), "{}", String::from_utf8_lossy(&waited.stderr));
    assert!(sidecar.get("/startupz").starts_with("HTTP/1.1 200"));
    assert!(sidecar.get("/readyz").contains("link aaa ("));
}

#[test]
fn start_is_over_when_the_links_are_kept() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start_links(dir.path(), &LINKS);
    assert!(sidecar.await_start(60).status.success());
    assert!(all_ready(&sidecar));
}

#[test]
fn truncated_link_is_given_up_and_the_other_is_served() {
    truncate_one_link(&[("aaa_shm", 0), ("aaa_cpu_data", 16_384)]);
}

#[test]
#[ignore = "long: three more truncations"]
fn link_truncated_anywhere_is_given_up_and_the_other_is_served() {
    truncate_one_link(&[("aaa_shm", 8192), ("aaa_cpu_msg", 0), ("aaa_cpu_data", 0)]);
}

fn truncate_one_link(truncations: &[(&str, u64)]) {
    let _watchdog = Watchdog::start();
    for &(name, len) in truncations {
        let dir = ipc_dir();
        let mut sidecar = Sidecar::start_links(dir.path(), &LINKS);
        until("both are ready", || all_ready(&sidecar));
        let mut clients = Clients::attach(dir.path());
        // Attached when the link is damaged, and reads nothing there.
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
        // Deaths on the intact link are detected.
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

/// Each damage makes the next retry wait longer, so a participant that damages its link all the time does not keep the
/// sidecar busy.
#[test]
fn link_that_is_damaged_again_and_again_keeps_its_backoff() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start_links(dir.path(), &LINKS);
    for pause in ["100", "200", "400", "800"] {
        until("it is kept again", || all_ready(&sidecar));
        remove_aaa(dir.path());
        until("the damage is noticed", || {
            is_ready(&sidecar, "aaa");
            sidecar.has_logged(&["link not kept", &format!("\"retry_ms\":{pause},")])
        });
    }
}

/// Only the sidecar can see this death: another process holds the locks of all seats, and the participant is in another pid
/// namespace.
#[test]
fn death_is_recovered_though_the_link_was_not_kept_then() {
    if !is_root() {
        return;
    }
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start_links(dir.path(), &LINKS);
    until("both are ready", || all_ready(&sidecar));
    let lock_file = open(&dir.path().join("aaa.lock"));
    for seat in 2..66 {
        assert!(try_lock_byte(&lock_file, seat, ByteLock::Exclusive).unwrap());
    }
    let mut mortal = Peer::start_alone(dir.path());
    mortal.tell("attach aaa secondary 60000");
    until("the sidecar knows its seat", || sidecar.has_logged(&["audit", "seated"]));
    let (file, away) = (dir.path().join("aaa_cpu_data"), dir.path().join("away"));
    fs::rename(&file, &away).unwrap();
    until("the link is not kept", || !is_ready(&sidecar, "aaa"));
    mortal.kill();
    until("the death is known", || sidecar.has_logged(&["a process has died"]));
    fs::rename(&away, &file).unwrap();
    until("the link is kept again", || all_ready(&sidecar));
    let link = LinkOptions::new().dir(dir.path()).attach("aaa", Side::Primary).unwrap();
    until("its seat is free", || link.participants().count() == 1);
}

fn attack(rounds: u32) {
    let _watchdog = Watchdog::start();
    let seed = seed();
    let dir = ipc_dir();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let mut sidecar = Sidecar::start_links(dir.path(), &LINKS);
    until("both are ready", || all_ready(&sidecar));
    let mut clients = Clients::attach(dir.path());
    let mut attacker = Attacker::new(seed, dir.path());
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
    attacker.give_up();
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
