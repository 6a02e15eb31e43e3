//! The rules of the broker, one by one.

use shmesh_proto::broker::{
    Admitted, BareTgid, Claim, Code, Exported, Hello, Mechanism, Restore, event::SessionEvent, reply,
    request::Op,
};
use shmesh_proto::key::DeviceKey;
use shmesh_sidecar::broker::{
    Broker, Command, Effect, FdToken, Millis, Outcome, Policy, Reason, SessionId, Stats,
};

use crate::broker::town::*;

fn roomy() -> Policy {
    Policy { open_keys: true, cuda_legacy: true, ..Policy::default() }
}

/// An exporter, an importer, and a key that admits the importer.
fn pair(policy: Policy, op: Op) -> (Town, SessionId, SessionId, Vec<u8>) {
    let mut town = Town::new(policy);
    let a = town.open(&process(100));
    let b = town.open(&process(200));
    let key = town.export(a, op);
    town.does(a, admit(&key, &[200]));
    (town, a, b, key)
}

#[test]
fn hello_and_bare_tgid_report_the_kernels_identity() {
    let mut town = Town::new(roomy());
    let a = town.open(&in_pod(100, "a"));
    let hello = town.ask(a, Op::Hello(Hello {}));
    match town.answer(a, hello) {
        Some(reply::Result::Welcome(welcome)) => assert_eq!(welcome.identity, Some(in_pod(100, "a"))),
        other => panic!("{other:?}"),
    }
    let asked = town.ask(a, Op::BareTgid(BareTgid {}));
    assert!(matches!(town.answer(a, asked), Some(reply::Result::Tgid(tgid)) if tgid.bare_tgid == 100));
}

#[test]
fn every_export_has_a_key_of_its_own() {
    let mut town = Town::new(roomy());
    let a = town.open(&process(100));
    let (one, two) = (town.export(a, host(1)), town.export(a, host(1)));
    assert_ne!(one, two);
    assert!(DeviceKey::from_wild(&one).is_some());
}

#[test]
fn source_of_random_numbers_must_not_repeat_itself() {
    let mut broker = Broker::new(roomy(), |bytes| bytes.fill(7));
    let session = SessionId(1);
    broker.handle(Millis(0), Command::Opened { session, peer: Some(process(100)) });
    let mut export = |fd| {
        let request = shmesh_proto::broker::Request::new(1, host(1));
        broker.handle(Millis(0), Command::Request { session, request, fds: vec![FdToken(fd)] })
    };
    assert!(!export(1).contains(&Effect::Denied(Reason::Entropy)));
    let second = export(2);
    assert!(second.contains(&Effect::Denied(Reason::Entropy)));
    assert!(second.contains(&Effect::DropFd(FdToken(2))));
}

#[test]
fn export_has_a_size_a_flag_and_a_mechanism_that_exist() {
    use Mechanism::{Ascend, CudaLegacy, CudaVmm, Host, Unspecified};
    let mut town = Town::new(roomy());
    let a = town.open(&process(100));
    let mut refuses = |op, descriptors, reason| {
        town.refuses_with(a, op, descriptors, Code::Invalid, reason);
    };
    refuses(export(0, 0, Host, 0), 1, Reason::BadSize);
    for flags in [2, 3, 1 << 63] {
        refuses(export(1, flags, Host, 0), 1, Reason::BadFlags);
    }
    refuses(export(1, 0, Unspecified, 0), 1, Reason::BadMechanism);
    for (mechanism, right, handle) in [(Host, 1, 0), (CudaVmm, 1, 16), (Ascend, 0, 65), (CudaLegacy, 0, 84)] {
        for descriptors in (0..=2).filter(|n| *n != right) {
            refuses(export(1, 0, mechanism, handle), descriptors, Reason::BadDescriptors);
        }
        for wrong in [handle + 1, handle.max(1) - 1].into_iter().filter(|n| *n != handle) {
            refuses(export(1, 0, mechanism, wrong), right, Reason::BadHandle);
        }
    }
    for (mechanism, handle) in [(Host, 0), (CudaVmm, 16), (Ascend, 65), (CudaLegacy, 84)] {
        town.export(a, export(1, 0, mechanism, handle));
    }
    assert_eq!(town.broker.stats().descriptors, 2);
}

#[test]
fn open_keys_require_the_operators_permission() {
    let mut town = Town::new(Policy::default());
    let a = town.open(&process(100));
    let open = export(1, 1, Mechanism::Host, 0);
    town.refuses(a, open, Code::Denied, Reason::OpenNotPermitted);
    let legacy = export(1, 0, Mechanism::CudaLegacy, 84);
    town.refuses(a, legacy, Code::Denied, Reason::MechanismNotPermitted);
}

#[test]
fn open_key_admits_any_process_and_has_no_list() {
    let mut town = Town::new(roomy());
    let (a, b) = (town.open(&process(100)), town.open(&process(200)));
    let key = town.export(a, export(1, 1, Mechanism::Ascend, 65));
    town.refuses(a, admit(&key, &[200]), Code::Invalid, Reason::OpenKey);
    // The driver asks for no list, so the exporter is not asked either.
    assert_eq!(town.import(b, &key).handle, vec![9; 65]);
}

#[test]
fn host_memory_is_delivered_at_once_and_acknowledged() {
    let (mut town, a, b, key) = pair(roomy(), host(4096));
    let imported = town.import(b, &key);
    assert_eq!((imported.size, imported.mechanism()), (4096, Mechanism::Host));
    let sent = town.effects.iter().any(|e| matches!(e, Effect::Reply { fd: Some(FdToken(1)), .. }));
    assert!(sent && town.dropped().is_empty(), "a duplicate is sent, the original stays");
    assert_eq!(town.broker.stats().grants, 1);
    town.does(b, ack(&imported.grant, true));
    assert_eq!((town.broker.stats().grants, town.broker.stats().imports), (0, 1));
    town.does(b, close(&key));
    assert_eq!(town.events(), [(a, SessionEvent::Unused(key.clone()))]);
    town.does(a, close(&key));
    assert_eq!(town.dropped(), [FdToken(1)]);
    let expected = Stats { sessions: 2, processes: 2, ..Stats::default() };
    assert_eq!(town.broker.stats(), expected);
}

#[test]
fn key_that_admits_in_a_driver_waits_for_its_exporter() {
    let (mut town, a, b, key) = pair(roomy(), ascend());
    let other = town.open(&process(100));
    let waits = town.ask(b, import(&key));
    assert_eq!(town.answer(b, waits), None);
    assert_eq!(town.records()[0].outcome, Outcome::Waits);
    let (to, admission) = (town.events()[0].0, town.admission());
    assert_eq!(to, a, "the session of the export");
    // Another session of the exporter's process acts for the exporter too.
    town.does(other, ack(&admission, true));
    let imported = town.imported(b, waits);
    assert_eq!(imported.handle, vec![9; 65]);
    assert_ne!(imported.grant, admission, "each step has its own grant");
    town.does(b, ack(&imported.grant, true));
}

#[test]
fn exporter_may_fail_to_admit_be_gone_or_be_slow() {
    let (mut town, a, b, key) = pair(roomy(), ascend());
    let waits = town.ask(b, import(&key));
    let admission = town.admission();
    town.does(a, ack(&admission, false));
    assert_eq!(town.refusal(b, waits).code(), Code::Denied);
    assert_eq!(town.reasons(), [Reason::ExporterRefused]);

    let waits = town.ask(b, import(&key));
    let admission = town.admission();
    town.wait(9_999);
    assert_eq!(town.effects, []);
    town.wait(1);
    assert_eq!(town.refusal(b, waits).code(), Code::Denied);
    town.refuses(a, ack(&admission, true), Code::Denied, Reason::GrantExpired);
    assert_eq!(town.broker.stats().imports, 0);

    town.closed(a);
    let waits = town.ask(b, import(&key));
    assert_eq!(town.events(), [], "no session is left");
    town.wait(10_000);
    assert_eq!(town.refusal(b, waits).code(), Code::Denied);
    assert_eq!(town.reasons(), [Reason::ExporterAway]);
}

#[test]
fn grant_is_valid_for_its_process_until_it_expires() {
    let (mut town, a, b, key) = pair(roomy(), ascend());
    let waits = town.ask(b, import(&key));
    let admission = town.admission();
    for _ in 0..2 {
        town.does(a, stands(&admission));
        assert_eq!(town.records(), [], "nothing changed");
    }
    town.refuses(b, stands(&admission), Code::Denied, Reason::ForeignGrant);
    town.refuses(a, stands(&[7; 16]), Code::Denied, Reason::UnknownGrant);
    town.refuses(a, stands(&[7; 15]), Code::Invalid, Reason::Malformed);
    assert_eq!(town.broker.stats().grants, 1);
    town.does(a, ack(&admission, true));
    let imported = town.imported(b, waits);
    town.refuses(a, stands(&admission), Code::Denied, Reason::GrantUsed);
    town.does(b, stands(&imported.grant));
    town.does(b, close(&key));

    town.ask(b, import(&key));
    let admission = town.admission();
    town.wait(10_000);
    town.refuses(a, stands(&admission), Code::Denied, Reason::GrantExpired);
    town.ask(b, import(&key));
    let admission = town.admission();
    town.died(&process(200));
    town.refuses(a, stands(&admission), Code::Denied, Reason::GrantCancelled);
}

#[test]
fn late_acknowledgement_is_void_and_the_import_stays() {
    let (mut town, a, b, key) = pair(roomy(), host(1));
    let imported = town.import(b, &key);
    town.wait(10_000);
    assert_eq!(town.records()[0].reason, Some(Reason::GrantExpired));
    town.refuses(b, ack(&imported.grant, true), Code::Denied, Reason::GrantExpired);
    let busy = town.refuses(a, close(&key), Code::Busy, Reason::Busy);
    assert_eq!(busy.importers, [200], "the importer may have mapped the memory");
    town.does(b, close(&key));
    town.does(a, close(&key));
}

#[test]
fn late_acknowledgement_is_late_without_a_tick() {
    let (mut town, _, b, key) = pair(roomy(), host(1));
    let imported = town.import(b, &key);
    assert_eq!(town.broker.next_deadline(), Some(Millis(10_000)));
    town.now = 10_000;
    let id = town.ask(b, ack(&imported.grant, true));
    assert_eq!(town.refusal(b, id).code(), Code::Denied);
}

#[test]
fn importer_that_cannot_map_has_no_import() {
    let (mut town, a, b, key) = pair(roomy(), host(1));
    let imported = town.import(b, &key);
    town.does(b, ack(&imported.grant, false));
    assert_eq!(town.events(), [(a, SessionEvent::Unused(key.clone()))]);
    town.refuses(b, close(&key), Code::Denied, Reason::NotImporter);
}

#[test]
fn pods_and_service_accounts_are_admitted_by_name() {
    let mut town = Town::new(roomy());
    let a = town.open(&process(100));
    let (b, c, d) =
        (town.open(&in_pod(200, "b")), town.open(&in_pod(300, "c")), town.open(&in_pod(400, "d")));
    let key = town.export(a, host(1));
    town.does(a, admit_subjects(&key, &["ns/b"], &["ns/sa-c"]));
    town.import(b, &key);
    town.import(c, &key);
    town.refuses(d, import(&key), Code::Denied, Reason::NotAdmitted);
    let long = format!("ns/{}", "x".repeat(251));
    for bad in ["", "b", "/b", "ns/", "ns/a/b", "ns/B", "ns/a b", "*/*", &long] {
        town.refuses(a, admit_subjects(&key, &[bad], &[]), Code::Invalid, Reason::BadSubject);
        town.refuses(a, admit_subjects(&key, &[], &[bad]), Code::Invalid, Reason::BadSubject);
    }
}

#[test]
fn processes_of_a_call_count_as_in_the_driver() {
    let mut town = Town::new(roomy());
    let a = town.open(&process(100));
    town.open(&process(200));
    let key = town.export(a, host(1));
    town.refuses(a, admit(&key, &[]), Code::Invalid, Reason::NoProcess);
    town.refuses(a, admit(&key, &[0, 100, 0]), Code::Invalid, Reason::NoProcess);
    town.refuses(a, admit(&key, &[200, -1]), Code::Invalid, Reason::BadPid);
    town.does(a, admit(&key, &[0, 100, 200]));
    assert_eq!(town.records()[0].admits, ["process 200"]);
}

#[test]
fn absent_process_is_looked_up_and_pinned() {
    let mut town = Town::new(roomy());
    let a = town.open(&process(100));
    let key = town.export(a, host(1));
    let waits = town.ask(a, admit(&key, &[300, 200]));
    let Some(Effect::Resolve { ticket, bare_tgids }) = town.effects.first().cloned() else {
        panic!("{:?}", town.effects)
    };
    assert_eq!(bare_tgids, [200, 300]);
    town.tell(Command::Resolved { ticket, found: vec![process(200), process(300)] });
    assert!(matches!(town.answer(a, waits), Some(reply::Result::Done(_))));
    let b = town.open(&process(200));
    town.import(b, &key);
    // A question can be answered only once.
    assert_eq!(town.tell(Command::Resolved { ticket, found: Vec::new() }), []);
}

#[test]
fn all_of_a_call_must_be_alive_and_known_in_time() {
    let mut town = Town::new(roomy());
    let (a, b) = (town.open(&process(100)), town.open(&process(200)));
    let key = town.export(a, host(1));
    let ask = |town: &mut Town| {
        let id = town.ask(a, admit(&key, &[200, 300]));
        match town.effects.first() {
            Some(Effect::Resolve { ticket, .. }) => (id, *ticket),
            other => panic!("{other:?}"),
        }
    };
    let (id, ticket) = ask(&mut town);
    town.tell(Command::Resolved { ticket, found: vec![process(400)] });
    assert!(town.refusal(a, id).text.contains("300"));
    assert_eq!(town.reasons(), [Reason::NotAlive]);

    let (id, ticket) = ask(&mut town);
    town.wait(999);
    assert_eq!(town.effects, []);
    town.wait(1);
    assert_eq!(town.refusal(a, id).code(), Code::Unidentified);
    assert_eq!(town.tell(Command::Resolved { ticket, found: vec![process(300)] }), []);

    // The key is gone when the answer arrives.
    let (id, ticket) = ask(&mut town);
    town.does(a, close(&key));
    town.tell(Command::Resolved { ticket, found: vec![process(300)] });
    assert_eq!(town.refusal(a, id).code(), Code::Denied);
    town.refuses(b, import(&key), Code::Denied, Reason::UnknownKey);
}

#[test]
fn state_at_the_time_of_the_answer_counts() {
    let (mut town, a, b, key) = pair(Policy { pids_per_key: 2, ..roomy() }, host(1));
    town.import(b, &key);
    let ask = |town: &mut Town, tgid| {
        let id = town.ask(a, admit(&key, &[tgid]));
        match town.effects.first() {
            Some(Effect::Resolve { ticket, .. }) => (id, *ticket),
            other => panic!("{other:?}"),
        }
    };
    let ((first, one), (second, two)) = (ask(&mut town, 300), ask(&mut town, 400));
    town.tell(Command::Resolved { ticket: one, found: vec![process(300)] });
    assert!(matches!(town.answer(a, first), Some(reply::Result::Done(_))));
    town.tell(Command::Resolved { ticket: two, found: vec![process(400)] });
    assert_eq!((town.refusal(a, second).code(), town.reasons()), (Code::Limit, vec![Reason::PidsOfKey]));

    let (id, ticket) = ask(&mut town, 300);
    town.does(a, force(&key));
    town.tell(Command::Resolved { ticket, found: vec![process(300)] });
    assert_eq!((town.refusal(a, id).code(), town.reasons()), (Code::Invalid, vec![Reason::Closing]));
}

#[test]
fn number_is_pinned_anew_when_it_is_admitted_again() {
    let (mut town, a, _, key) = pair(roomy(), host(1));
    town.died(&process(200));
    let again = shmesh_proto::identity::PeerIdentity { start_time: 2, ..process(200) };
    let b = town.open(&again);
    town.refuses(b, import(&key), Code::Denied, Reason::ProcessReplaced);
    town.does(a, admit(&key, &[200]));
    town.import(b, &key);
}

#[test]
fn exporter_waits_for_its_importers_or_forces_them() {
    let (mut town, a, b, key) = pair(roomy(), host(1));
    let c = town.open(&process(300));
    town.does(a, admit(&key, &[300]));
    town.import(b, &key);
    assert_eq!(town.refuses(a, close(&key), Code::Busy, Reason::Busy).importers, [200]);
    town.does(a, force(&key));
    assert_eq!(town.events(), [(b, SessionEvent::ExporterClosing(key.clone()))]);
    assert_eq!(town.dropped(), [FdToken(1)], "no new importer needs it");
    town.refuses(c, import(&key), Code::Denied, Reason::Closing);
    town.refuses(a, admit(&key, &[300]), Code::Invalid, Reason::Closing);
    // It is still in use, and a second forced close does not change that.
    town.refuses(a, close(&key), Code::Busy, Reason::Busy);
    town.refuses(a, force(&key), Code::Busy, Reason::Busy);
    town.does(b, close(&key));
    assert_eq!(town.events(), [(a, SessionEvent::Unused(key.clone()))]);
    assert_eq!((town.broker.stats().keys, town.dropped()), (0, Vec::new()));
    town.refuses(a, close(&key), Code::Denied, Reason::UnknownKey);
}

#[test]
fn pending_imports_of_a_closing_key_are_refused() {
    let (mut town, a, b, key) = pair(roomy(), ascend());
    let waits = town.ask(b, import(&key));
    let admission = town.admission();
    town.does(a, close(&key));
    assert_eq!(town.refusal(b, waits).code(), Code::Denied);
    town.refuses(a, ack(&admission, true), Code::Denied, Reason::GrantCancelled);
}

#[test]
fn one_import_of_a_key_for_each_process() {
    let (mut town, a, b, key) = pair(roomy(), host(1));
    let other = town.open(&process(200));
    town.import(b, &key);
    town.refuses(other, import(&key), Code::Invalid, Reason::AlreadyImported);
    town.does(other, close(&key));
    town.refuses(b, close(&key), Code::Denied, Reason::NotImporter);
    town.refuses(a, import(&key), Code::Invalid, Reason::SelfImport);
}

#[test]
fn death_of_an_importer_closes_its_imports() {
    let (mut town, a, b, key) = pair(roomy(), host(1));
    town.import(b, &key);
    town.died(&process(200));
    assert_eq!(town.events(), [(a, SessionEvent::Unused(key.clone()))]);
    assert!(town.effects.contains(&Effect::CloseSession(b)));
    assert!(!town.effects.contains(&Effect::Unwatch(id(&process(200)))), "a dead process is not watched");
    town.does(a, close(&key));
    assert_eq!(town.died(&process(200)), [], "once");
}

#[test]
fn death_of_an_exporter_loses_its_regions() {
    let (mut town, a, b, key) = pair(roomy(), host(1));
    let waiting = town.export(a, ascend());
    town.does(a, admit(&waiting, &[200]));
    town.import(b, &key);
    let waits = town.ask(b, import(&waiting));
    town.died(&process(100));
    assert_eq!(town.events(), [(b, SessionEvent::RegionLost(key.clone()))]);
    assert_eq!(town.refusal(b, waits).code(), Code::Denied);
    assert_eq!(town.dropped(), [FdToken(1)]);
    let ended = town.records().into_iter().filter(|r| r.reason == Some(Reason::ExporterDied)).count();
    assert_eq!(ended, 4, "two keys, an import and a request");
    town.refuses(b, import(&key), Code::Denied, Reason::UnknownKey);
    town.refuses(b, close(&key), Code::Denied, Reason::UnknownKey);
    assert_eq!(town.broker.stats(), Stats { sessions: 1, processes: 1, ..Stats::default() });
}

#[test]
fn keys_and_imports_outlive_sessions() {
    let (mut town, a, b, key) = pair(roomy(), host(1));
    town.import(b, &key);
    assert_eq!(town.closed(a), [], "still watched");
    assert_eq!(town.closed(b), []);
    let (a, b) = (town.open(&process(100)), town.open(&process(200)));
    assert_eq!(town.effects, [], "it has been watched throughout");
    assert_eq!(town.refuses(a, close(&key), Code::Busy, Reason::Busy).importers, [200]);
    town.does(b, close(&key));
    assert_eq!(town.events(), [(a, SessionEvent::Unused(key.clone()))]);
    town.closed(b);
    assert_eq!(town.effects, [Effect::Unwatch(id(&process(200)))]);
}

#[test]
fn pending_requests_end_with_their_session() {
    let (mut town, a, b, key) = pair(roomy(), ascend());
    town.ask(b, import(&key));
    let admission = town.admission();
    town.closed(b);
    assert_eq!(town.broker.stats().imports, 0);
    town.refuses(a, ack(&admission, true), Code::Denied, Reason::GrantCancelled);
    town.ask(a, admit(&key, &[300]));
    assert_eq!(town.broker.stats().questions, 1);
    town.closed(a);
    assert_eq!((town.broker.stats().questions, town.broker.next_deadline()), (0, None));
}

#[test]
fn detach_ends_the_keys_and_imports_of_a_process() {
    let (mut town, a, b, key) = pair(roomy(), host(1));
    let mine = town.export(b, host(1));
    let unused = town.export(a, host(1));
    town.does(b, admit(&mine, &[100]));
    town.import(b, &key);
    town.import(a, &mine);
    town.does(a, DETACH);
    assert_eq!(
        town.events(),
        [(b, SessionEvent::Unused(mine.clone())), (b, SessionEvent::ExporterClosing(key.clone()))]
    );
    assert_eq!(town.dropped(), [FdToken(1), FdToken(3)]);
    town.refuses(a, close(&unused), Code::Denied, Reason::UnknownKey);
    town.refuses(b, import(&unused), Code::Denied, Reason::UnknownKey);
    assert_eq!(town.broker.stats().keys, 2, "one that is closing, and one of the other process");
    town.does(b, DETACH);
    assert_eq!(town.broker.stats().keys, 0);
}

#[test]
fn draining_broker_finishes_and_begins_nothing() {
    let (mut town, a, b, key) = pair(roomy(), ascend());
    let waits = town.ask(b, import(&key));
    let admission = town.admission();
    town.tell(Command::Drain);
    town.refuses(a, host(1), Code::Draining, Reason::Draining);
    town.refuses(a, admit(&key, &[200]), Code::Draining, Reason::Draining);
    town.refuses(b, import(&key), Code::Draining, Reason::Draining);
    town.does(a, ack(&admission, true));
    let imported = town.imported(b, waits);
    town.does(b, ack(&imported.grant, true));
    assert!(!town.broker.is_idle());
    town.does(b, close(&key));
    town.does(a, close(&key));
    assert!(town.broker.is_idle());
}

#[test]
fn list_has_pages_and_hashes() {
    list_with(9);
}

#[test]
#[ignore = "long: 20 importers of 65 keys"]
fn list_has_pages_and_hashes_with_many_importers() {
    list_with(20);
}

fn list_with(importers: i32) {
    let mut town = Town::new(roomy());
    let a = town.open(&process(100));
    let keys: Vec<_> = (0..65).map(|_| town.export(a, host(1))).collect();
    let hash = town.records()[0].key_hash.clone();
    let (first, second) = (town.list(a, 0), town.list(a, 64));
    assert_eq!((first.keys.len(), first.total, second.keys.len()), (64, 65, 1));
    assert_eq!(Some(second.keys[0].hash.clone()), hash, "the same hash as in the audit log");
    assert_eq!(town.list(a, 65).keys, []);
    // The number of importers is given, and some are named, so that a page fits into a packet.
    for tgid in 200..200 + importers {
        let b = town.open(&process(tgid));
        for key in &keys {
            town.does(a, admit(key, &[tgid]));
            town.import(b, key);
        }
        let mine = town.list(b, 0);
        assert!(mine.keys.iter().all(|listed| !listed.is_exporter && listed.importers.is_empty()));
    }
    let first = town.list(a, 0);
    assert_eq!((first.keys[0].importers.len(), first.keys[0].importer_count), (8, importers.unsigned_abs()));
    assert!(shmesh_proto::packet::encode(&first).len() < shmesh_proto::limits::MAX_PACKET_BYTES);
}

#[test]
fn record_is_one_line_that_says_all_but_secrets() {
    let mut town = Town::new(roomy());
    let (a, b) = (town.open(&process(100)), town.open(&in_pod(200, "b\n\"")));
    let key = town.export(a, host(4096));
    town.refuses(b, import(&key), Code::Denied, Reason::NotAdmitted);
    town.ask(b, import(&key));
    let line = town.records()[0].to_line();
    assert!(!line.contains('\n') && !line.contains(std::str::from_utf8(&key[..64]).unwrap()));
    let json: serde_json::Value = serde_json::from_str(&line).unwrap();
    for (field, value) in [
        ("/at_ms", "0"),
        ("/op", "\"import\""),
        ("/outcome", "\"refused\""),
        ("/reason", "\"not_admitted\""),
        ("/caller/bare_tgid", "200"),
        ("/caller/start_time", "1"),
        ("/caller/pod/uid", "\"uid-b\\n\\\"\""),
        ("/other/bare_tgid", "100"),
        ("/size_bytes", "4096"),
        ("/mechanism", "\"host\""),
    ] {
        assert_eq!(json.pointer(field).map(ToString::to_string).as_deref(), Some(value), "{field}");
    }
    assert_eq!(json["key_hash"].as_str().map(str::len), Some(16));
}

#[test]
fn debug_output_has_no_secrets() {
    let (town, ..) = pair(roomy(), export(1, 0, Mechanism::CudaLegacy, 84));
    let printed = format!("{:?}", town.broker);
    assert!(printed.contains("keys: 1") && !printed.contains("9, 9"), "{printed}");
}

#[test]
fn thousand_keys_at_the_same_time() {
    keys_at_the_same_time(1_000);
}

#[test]
#[ignore = "long: 10,000 keys"]
fn ten_thousand_keys_at_the_same_time() {
    keys_at_the_same_time(10_000);
}

fn keys_at_the_same_time(count: usize) {
    let mut town = Town::new(roomy());
    let (a, b) = (town.open(&process(100)), town.open(&process(200)));
    let request = |id, op| shmesh_proto::broker::Request::new(id, op);
    for n in 0..count as u64 {
        let fds = vec![FdToken(n)];
        let effects =
            town.broker.handle(Millis(0), Command::Request { session: a, request: request(n, host(1)), fds });
        let Some(Effect::Reply { reply, .. }) = effects.first() else { panic!("{effects:?}") };
        let Some(reply::Result::Exported(exported)) = &reply.result else { panic!("{reply:?}") };
        let ask = |town: &mut Town, session, op| {
            let request = request(n, op);
            town.broker.handle(Millis(0), Command::Request { session, request, fds: Vec::new() })
        };
        ask(&mut town, a, admit(&exported.key, &[200]));
        let effects = ask(&mut town, b, import(&exported.key));
        let Some(Effect::Reply { reply, .. }) = effects.first() else { panic!("{effects:?}") };
        let Some(reply::Result::Imported(imported)) = &reply.result else { panic!("{reply:?}") };
        ask(&mut town, b, ack(&imported.grant, true));
    }
    assert_eq!((town.broker.stats().keys, town.broker.stats().imports), (count, count));
    town.died(&process(100));
    assert_eq!((town.broker.stats().keys, town.dropped().len()), (0, count));
}

/// Exports memory, and returns the request that registers the key with the next broker.
fn restorable(town: &mut Town, session: SessionId, op: Op) -> Op {
    let Op::ExportKey(export) = op.clone() else { panic!("not an export: {op:?}") };
    let id = town.ask(session, op);
    let Some(reply::Result::Exported(Exported { key, secret })) = town.answer(session, id) else {
        panic!("not exported: {:?}", town.effects)
    };
    Op::Restore(Restore { key, secret, export: Some(export), ..Restore::default() })
}

fn key(restore: &Op) -> Vec<u8> {
    let Op::Restore(restore) = restore else { panic!("{restore:?}") };
    restore.key.clone()
}

#[test]
fn reconnected_exporter_is_asked_again_on_its_new_session() {
    let mut town = Town::new(roomy());
    let (a, b) = (town.open(&process(100)), town.open(&process(200)));
    let restore = restorable(&mut town, a, ascend());
    let key = key(&restore);
    town.does(a, admit(&key, &[200]));
    // The session of its link, which knows no key.
    let other = town.open(&process(100));
    town.closed(a);
    town.ask(b, import(&key));
    let lost = town.admission();
    assert_eq!(town.events()[0].0, other);
    let again = town.open(&process(100));
    town.ask(again, restore);
    let grant = town.admission();
    assert!(town.events()[0].0 == again && grant != lost);
    town.does(again, ack(&grant, true));
    assert_eq!(town.broker.stats().imports, 1);
}

#[test]
fn busy_exporter_is_notified_after_a_restart_when_it_can_close() {
    let mut town = Town::new(roomy());
    let a = town.open(&process(100));
    let restore = restorable(&mut town, a, host(1));
    let mut town = Town::new(roomy());
    town.tell(Command::Recover);
    let a = town.open(&process(100));
    town.ask_with(a, restore.clone(), 1);
    town.refuses(a, close(&key(&restore)), Code::Busy, Reason::Busy);
    town.wait(Policy::default().restore_millis);
    assert_eq!(town.events(), [(a, SessionEvent::Unused(key(&restore)))]);
    town.does(a, close(&key(&restore)));
}

/// More than 128 processes take several packets. Those of the second packet are not refused because the first has arrived.
#[test]
fn imports_and_claims_wait_for_the_rest_of_a_list_of_processes() {
    let mut town = Town::new(roomy());
    let a = town.open(&process(100));
    let Op::Restore(restore) = restorable(&mut town, a, host(1)) else { panic!("a restore") };
    let page = |tgid: i32, more| {
        let start_time = process(tgid).start_time;
        let admitted = vec![Admitted { bare_tgid: tgid, start_time, pidfd_inode: 0 }];
        Op::Restore(Restore { admitted, more, ..restore.clone() })
    };
    let mut town = Town::new(roomy());
    town.tell(Command::Recover);
    let [a, first, second, claimant, stranger] =
        [100, 200, 201, 202, 300].map(|tgid| town.open(&process(tgid)));
    let waits = town.ask(second, import(&restore.key));
    town.ask_with(a, page(200, true), 1);
    assert!(town.answer(second, waits).is_none(), "the list is not complete");
    town.import(first, &restore.key);
    town.does(claimant, Op::Claim(Claim { key: restore.key.clone() }));
    let refused = town.ask(stranger, import(&restore.key));
    assert!(town.answer(stranger, refused).is_none(), "this is not decided yet either");
    town.ask_with(a, page(202, true), 1);
    town.ask_with(a, page(201, false), 1);
    town.imported(second, waits);
    assert_eq!(town.refusal(stranger, refused).code(), Code::Denied);
    assert_eq!(town.broker.stats().imports, 3);
}

/// The exporter dies between the packets, or never sends the last one.
#[test]
fn incomplete_list_of_processes_is_final_after_the_timeout() {
    let mut town = Town::new(roomy());
    let a = town.open(&process(100));
    let Op::Restore(restore) = restorable(&mut town, a, host(1)) else { panic!("a restore") };
    let mut town = Town::new(roomy());
    town.tell(Command::Recover);
    let [a, b] = [100, 200].map(|tgid| town.open(&process(tgid)));
    town.ask_with(a, Op::Restore(Restore { more: true, ..restore.clone() }), 1);
    let waits = town.ask(b, import(&restore.key));
    assert!(town.answer(b, waits).is_none());
    town.wait(Policy::default().restore_millis);
    assert_eq!(town.refusal(b, waits).code(), Code::Denied);
    town.refuses(b, import(&restore.key), Code::Denied, Reason::NotAdmitted);
}

#[test]
fn reconnected_importer_learns_that_the_exporter_is_closing() {
    let (mut town, a, b, key) = pair(roomy(), host(1));
    town.import(b, &key);
    town.closed(b);
    town.does(a, force(&key));
    assert!(town.events().is_empty(), "no session is left to notify");
    let again = town.open(&process(200));
    town.does(again, Op::Claim(Claim { key: key.clone() }));
    assert_eq!(town.events(), [(again, SessionEvent::ExporterClosing(key))]);
}
