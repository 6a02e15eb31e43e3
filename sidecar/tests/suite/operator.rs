//! The view that an operator has of a running sidecar, which no other user may have.

use crate::support::Sidecar;
use shmesh::client::{Client, Mechanism, Process};
use shmesh_proto::broker::Side;
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, until};

fn of(all: &[Process], tgid: &str) -> Process {
    let tgid: i32 = tgid.parse().unwrap();
    let found = all.iter().find(|process| process.identity.as_ref().is_some_and(|it| it.bare_tgid == tgid));
    found.unwrap_or_else(|| panic!("{tgid} in {all:?}")).clone()
}

#[test]
fn operator_sees_processes_and_their_keys() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    let (mut exporter, mut importer) = (Peer::start(dir.path()), Peer::start(dir.path()));
    exporter.tell("attach link primary 1000");
    exporter.tell("device connect");
    importer.tell("device connect");
    let (from, to) = (exporter.ask("device tgid"), importer.ask("device tgid"));
    let key = exporter.ask("device export weights 0");
    exporter.tell(&format!("device admit {key} {to}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");

    let mut operator = Client::connect(dir.path(), "link").unwrap();
    until("its seat is known", || {
        let all = operator.processes().unwrap().unwrap();
        of(&all.processes, &from).seats.len() == 1 && all.unclaimed.is_empty()
    });
    let all = operator.processes().unwrap().unwrap();
    assert_eq!((all.processes.len(), all.unidentified), (3, 0), "both and this process");
    let exporting = of(&all.processes, &from);
    assert_eq!((exporting.sessions, exporting.exports, exporting.imports), (2, 1, 0));
    assert_eq!(exporting.seats[0].side(), Side::Primary);
    assert_eq!(exporting.seats[0].pid.to_string(), from, "both are in this pid namespace");
    let importing = of(&all.processes, &to);
    assert_eq!((importing.sessions, importing.exports, importing.imports), (1, 0, 1));
    assert!(importing.seats.is_empty());

    let keys = operator.all_keys().unwrap().unwrap();
    let [shown] = &keys[..] else { panic!("{keys:?}") };
    assert_eq!((shown.size, shown.mechanism(), shown.admitted), (4096, Mechanism::Host, 1));
    assert_eq!((shown.exporter.to_string(), &shown.importers[..]), (from, &[to.parse::<i32>().unwrap()][..]));
    assert_eq!((shown.importer_count, shown.open, shown.closing), (1, false, false));
    assert!(!format!("{keys:?}").contains(&key), "never the key");

    exporter.tell(&format!("device force {key}"));
    assert!(operator.all_keys().unwrap().unwrap()[0].closing);
    importer.kill();
    until("the dead process has no keys", || operator.all_keys().unwrap().unwrap().is_empty());
    assert_eq!(operator.processes().unwrap().unwrap().processes.len(), 2);
}

#[test]
fn many_keys_come_in_pages() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    let mut exporter = Peer::start(dir.path());
    exporter.tell("device connect");
    for _ in 0..150 {
        exporter.ask("device export weights 0");
    }
    let keys = Client::connect(dir.path(), "link").unwrap().all_keys().unwrap().unwrap();
    let hashes: std::collections::BTreeSet<_> = keys.iter().map(|key| key.hash.clone()).collect();
    assert_eq!((keys.len(), hashes.len()), (150, 150));
}

/// A sidecar in a pid namespace of its own cannot identify this process, whatever its user.
#[test]
fn other_users_may_not_inspect() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let audit = dir.path().join("audit");
    let sidecar = Sidecar::start_alone(dir.path(), &["--audit", audit.to_str().unwrap()]);
    let mut stranger = Client::connect(dir.path(), "link").unwrap();
    for refused in [stranger.processes().map(drop), stranger.all_keys().map(drop)] {
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("only an operator may"), "{said}");
    }
    assert_eq!(sidecar.metric("shmesh_sidecar_refused_requests_total{reason=\"not_operator\"}"), 2);
    until("it is written down", || crate::support::audited(&audit, "inspect", "not_operator").len() == 2);
    let record = &crate::support::audited(&audit, "inspect", "not_operator")[0];
    assert_eq!((&record["socket"]["pid"], &record["socket"]["uid"]), (&0.into(), &0.into()), "{record}");
}

#[test]
fn reference_page_has_the_help_of_every_subcommand() {
    let about = "The process that keeps links and brokers device keys. [daemons.md](../daemons.md#shmesh-sidecar) explains it.";
    let page = shmesh_testing::help_page(env!("CARGO_BIN_EXE_shmesh-sidecar"), about);
    shmesh_testing::assert_reference("shmesh-sidecar.md", &page);
}
