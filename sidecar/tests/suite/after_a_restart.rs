//! A sidecar dies and another takes its place: keys, imports and the rules between them continue.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::client::{ask, refusal};
use crate::support::{Sidecar, audited};
use crate::vendors::ascend::npud;
use crate::vendors::cuda::library;
use crate::vendors::peer;
use shmesh::LinkOptions;
use shmesh::device::{DeviceMemory, HostMemory, Session};
use shmesh_proto::broker::{
    Claim, Code, ExportKey, Mechanism, Refused, Reply, Request, Restore, SetImportPid, Welcome, reply,
    request,
};
use shmesh_proto::packet;
use shmesh_sys::socket;
use shmesh_testing::{Peer, Watchdog, config, ipc_dir, is_root, key_of, stranger, until};

fn start(dir: &Path, seconds: &str) -> Sidecar {
    Sidecar::start_with(dir, "mpmc", &["--restore-seconds", seconds])
}

fn connected(dir: &Path) -> Peer {
    let mut peer = Peer::start(dir);
    peer.tell("device connect");
    peer
}

#[test]
fn keys_imports_and_whitelists_outlive_a_sidecar() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = start(dir.path(), "4");
    let [mut exporter, mut importer, mut late, mut stranger] = [(); 4].map(|()| connected(dir.path()));
    let (importer_tgid, late_tgid) = (importer.ask("device tgid"), late.ask("device tgid"));
    let keys: Vec<String> = (0..40).map(|_| exporter.ask("device export weights 0")).collect();
    for key in &keys {
        exporter.tell(&format!("device admit {key} {importer_tgid}"));
        exporter.tell(&format!("device admit {key} {late_tgid}"));
        assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    }

    sidecar.kill();
    assert_eq!(importer.ask(&format!("device read {}", keys[0])), "weights", "the mapping stays");
    assert_eq!(importer.ask("device event"), "none", "nothing is lost");
    let sidecar = start(dir.path(), "4");
    for key in &keys {
        assert_eq!(late.ask(&format!("device import {key}")), "weights");
    }
    let refused = stranger.ask(&format!("device import {}", keys[0]));
    assert!(refused.starts_with("err Denied"), "the whitelist is the old one: {refused}");

    let key = &keys[0];
    until("both importers are known", || {
        let busy = exporter.ask(&format!("device close {key}"));
        assert!(busy.starts_with("err Busy"), "{busy}");
        busy.contains(&importer_tgid) && busy.contains(&late_tgid)
    });
    importer.tell(&format!("device close {key}"));
    late.tell(&format!("device close {key}"));
    until("no other importer can reconnect", || exporter.ask(&format!("device close {key}")) == "ok");
    until("one key is gone", || sidecar.metric("shmesh_sidecar_keys") == 39);

    // Old keys behave as new ones do: when the exporter dies, its importers are notified.
    exporter.kill();
    until("the importer is notified", || importer.ask("device event") == "lost");
    until("nothing is left", || sidecar.metric("shmesh_sidecar_keys") == 0);
}

#[test]
fn deaths_during_a_restart_are_detected() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = start(dir.path(), "2");
    let [mut exporter, mut doomed, mut importer] = [(); 3].map(|()| connected(dir.path()));
    let tgid = importer.ask("device tgid");
    let (stays, goes) = (exporter.ask("device export weights 0"), doomed.ask("device export weights 0"));
    exporter.tell(&format!("device admit {stays} {tgid}"));
    doomed.tell(&format!("device admit {goes} {tgid}"));
    for key in [&stays, &goes] {
        assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    }
    sidecar.kill();
    doomed.kill();
    let sidecar = start(dir.path(), "2");
    until("the importer is notified that one is lost", || importer.ask("device event") == "lost");
    importer.tell(&format!("device close {goes}"));
    assert!(exporter.ask(&format!("device close {stays}")).starts_with("err Busy"), "the other is not");

    sidecar.kill();
    importer.kill();
    let _sidecar = start(dir.path(), "2");
    until("an importer that has died has closed", || exporter.ask(&format!("device close {stays}")) == "ok");
}

/// Also several times, and with a key that is closed by force meanwhile.
#[test]
fn force_is_remembered() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let mut sidecar = start(dir.path(), "2");
    let [mut exporter, mut importer] = [(); 2].map(|()| connected(dir.path()));
    let tgid = importer.ask("device tgid");
    let key = exporter.ask("device export weights 0");
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    exporter.tell(&format!("device force {key}"));
    until("the importer is notified", || importer.ask("device event") == "closing");
    for _ in 0..2 {
        sidecar.kill();
        sidecar = start(dir.path(), "2");
        until("the importer is notified again", || importer.ask("device event") == "closing");
        assert_eq!(exporter.ask("device event"), "none", "it is still mapped");
    }
    importer.tell(&format!("device close {key}"));
    until("the exporter may free it", || exporter.ask("device event") == "unused");
    until("the key is gone", || sidecar.metric("shmesh_sidecar_keys") == 0);
}

/// A call during which no sidecar runs is answered by the next one.
#[test]
fn call_waits_for_the_next_sidecar() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = start(dir.path(), "2");
    let [mut exporter, mut importer] = [(); 2].map(|()| connected(dir.path()));
    let tgid = importer.ask("device tgid");
    sidecar.kill();
    exporter.order("device export weights 0");
    let _sidecar = start(dir.path(), "2");
    let key = exporter.answer();
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
}

#[test]
#[ignore = "long: waits as long as a call does"]
fn unanswered_call_is_an_error() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = start(dir.path(), "2");
    let mut exporter = connected(dir.path());
    exporter.ask("device tgid");
    sidecar.kill();
    let answer = exporter.ask("device tgid");
    assert!(answer.starts_with("err NoBroker"), "{answer}");
}

/// A sidecar creates the link before it listens, and a process that found the link connects at once.
#[test]
fn session_waits_for_a_sidecar_that_is_starting() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    assert!(Session::<HostMemory>::connect(dir.path(), "link").is_err(), "no link, so nothing to wait for");
    start(dir.path(), "2").kill();
    let (tgid, _sidecar) = std::thread::scope(|scope| {
        let tgid = scope.spawn(|| {
            loop {
                let begun = Instant::now();
                match Session::<HostMemory>::connect(dir.path(), "link") {
                    Ok(mut session) => break session.bare_tgid(),
                    // The sidecar may take longer than the product waits.
                    Err(error) => {
                        assert!(begun.elapsed() > Duration::from_secs(10), "it did not wait: {error}")
                    }
                }
            }
        });
        let sidecar = start(dir.path(), "2");
        (tgid.join().unwrap(), sidecar)
    });
    assert_eq!(i64::from(tgid.unwrap().0), i64::from(std::process::id()));
}

fn ask_with(fd: &OwnedFd, op: request::Op, memory: &HostMemory) -> reply::Result {
    ask(fd, op, memory.fd().as_slice())
}

/// For a while, the node cannot identify the sidecar's client.
#[test]
fn session_reconnects_until_the_sidecar_can_identify_it() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = start(dir.path(), "10");
    let mut exporter = connected(dir.path());
    exporter.ask("device export weights 0");
    sidecar.kill();
    let host = LinkOptions::new().dir(dir.path()).keep(&config("link", "")).unwrap();
    let accept = || {
        let mut accepted = None;
        until("it connects", || {
            accepted = socket::accept(&host.listener()).ok();
            accepted.is_some()
        });
        accepted.unwrap()
    };
    let answer = |fd: &OwnedFd, result: fn() -> reply::Result| {
        let (bytes, _) = socket::receive(fd).unwrap();
        let request = packet::decode::<Request>(&bytes).unwrap();
        socket::send(fd, &packet::encode(&Reply::new(request.id, result())), &[]).unwrap();
        request.op.unwrap()
    };
    let welcome = || reply::Result::Welcome(Welcome::default());
    let refused =
        || reply::Result::Refused(Refused { code: Code::Unidentified.into(), ..Refused::default() });
    let first = accept();
    answer(&first, welcome);
    assert!(matches!(answer(&first, refused), request::Op::Restore(_)));
    let second = accept();
    answer(&second, welcome);
    assert!(matches!(answer(&second, refused), request::Op::Restore(_)), "the first connection lives");
    drop(first);
}

/// An importer knows the key, and could put its own memory behind it.
#[test]
fn only_its_exporter_restores_a_key() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let audit = dir.path().join("audit");
    let flags = ["--restore-seconds", "10", "--audit", audit.to_str().unwrap()];
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &flags);
    let (mut exporter, mut importer) = (connected(dir.path()), connected(dir.path()));
    let key = exporter.ask("device export weights 0");
    let tgid = importer.ask("device tgid");
    exporter.tell(&format!("device admit {key} {tgid}"));
    // Before and after the exporter has reconnected. A stopped exporter does not reconnect.
    exporter.stop();
    sidecar.kill();
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", &flags);
    let thief = stranger(dir.path());
    let memory = HostMemory::new(4096).unwrap();
    let export = ExportKey { size: 4096, flags: 0, mechanism: Mechanism::Host.into(), handle: Vec::new() };
    let key_bytes = key_of(&key).as_bytes().to_vec();
    let restore = |key: &[u8], secret: &[u8]| {
        let (key, secret, export) = (key.to_vec(), secret.to_vec(), Some(export.clone()));
        request::Op::Restore(Restore { key, secret, export, ..Restore::default() })
    };
    let refused = |result| refusal(result).code();
    let mut others = vec![ask_with(&thief, restore(&key_bytes, &[7; 32]), &memory)];
    exporter.go_on();
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    others.push(ask_with(&thief, restore(&key_bytes, &[7; 32]), &memory));
    // The secret of another key is refused, and so is that of the thief's own key.
    let reply::Result::Exported(own) = ask_with(&thief, request::Op::ExportKey(export.clone()), &memory)
    else {
        panic!("its own")
    };
    others.push(ask_with(&thief, restore(&key_bytes, &own.secret), &memory));
    for other in others {
        assert_eq!(refused(other), Code::Denied);
    }
    until("it is written down", || audited(&audit, "restore", "not_exporter").len() == 3);
    // A claim does not keep an exporter from closing that has not admitted the claimant.
    let claim = request::Op::Claim(Claim { key: key_bytes.clone() });
    assert_eq!(refused(ask(&thief, claim, &[])), Code::Denied);
    let admit = SetImportPid { key: key_bytes, bare_tgids: vec![1], ..SetImportPid::default() };
    assert_eq!(refused(ask(&thief, request::Op::SetImportPid(admit), &[])), Code::Denied);
    // Its own key can be restored repeatedly, and stays a single key.
    let again = ask_with(&thief, restore(&own.key, &own.secret), &memory);
    assert!(matches!(again, reply::Result::Exported(_)), "{again:?}");
    assert_eq!(importer.ask(&format!("device read {key}")), "weights");
    until("two keys are there", || sidecar.metric("shmesh_sidecar_keys") == 2);
}

#[test]
fn of_gpu_memory() {
    if !is_root() {
        return;
    }
    let library = library();
    let variables = [("SHMESH_CUDA_LIBRARY", library.as_str())];
    over("cuda", &variables, &["--restore-seconds", "4", "--memfds-for-devices"]);
}

#[test]
fn of_npu_memory() {
    let dir = ipc_dir();
    let (_daemon, variables) = npud(dir.path());
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    over("ascend", &variables, &["--restore-seconds", "4"]);
}

fn over(mechanism: &str, variables: &[(&str, &str)], flags: &[&str]) {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", flags);
    let [mut exporter, mut importer, mut late] = [(); 3].map(|()| {
        let mut peer = peer::start(dir.path(), mechanism, variables, &[]);
        peer.tell("connect");
        peer
    });
    let (tgid, late_tgid) = (importer.ask("tgid"), late.ask("tgid"));
    let key = exporter.ask("export weights 0");
    assert_eq!(key.len(), 64, "{key}");
    exporter.tell(&format!("admit {key} {tgid}"));
    exporter.tell(&format!("admit {key} {late_tgid}"));
    assert_eq!(peer::import(&mut importer, &mut exporter, &key), "weights");
    // The sidecar dies after it asked the exporter to admit the importer, whose call continues with the next sidecar.
    late.order(&format!("import {key}"));
    sidecar.kill();
    let sidecar = Sidecar::start_with(dir.path(), "mpmc", flags);
    let mut answer = None;
    until("the import is answered", || {
        assert_eq!(exporter.ask("event"), "none");
        answer = late.answered();
        answer.is_some()
    });
    assert_eq!(answer.as_deref(), Some("weights"));
    assert_eq!(importer.ask(&format!("read {key}")), "weights");
    until("both importers are known", || {
        let busy = exporter.ask(&format!("close {key}"));
        busy.starts_with("err Busy") && busy.contains(&tgid) && busy.contains(&late_tgid)
    });
    for importer in [&mut importer, &mut late] {
        importer.tell(&format!("close {key}"));
    }
    until("it is closed", || exporter.ask(&format!("close {key}")) == "ok");
    until("the key is gone", || sidecar.metric("shmesh_sidecar_keys") == 0);
}
