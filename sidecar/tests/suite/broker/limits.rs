//! Each limit: at the limit, one above it, and again after something was released.

use shmesh_proto::broker::Code;
use shmesh_sidecar::broker::{Effect, Policy, Reason, SessionId};

use crate::broker::town::*;

fn limit(town: &mut Town, session: SessionId, op: shmesh_proto::broker::request::Op, reason: Reason) {
    let refused = town.refuses(session, op, Code::Limit, reason);
    assert!(refused.text.starts_with("at most "), "the text names the limit: {}", refused.text);
}

#[test]
fn keys_of_one_session() {
    let mut town = Town::new(Policy { keys_per_session: 2, ..Policy::default() });
    let (a, other) = (town.open(&process(100)), town.open(&process(100)));
    let first = town.export(a, host(1));
    town.export(a, host(1));
    limit(&mut town, a, host(1), Reason::KeysOfSession);
    town.export(other, host(1));
    // Closed from another session, and still credited to the session that exported it.
    town.does(other, close(&first));
    town.export(a, host(1));
    limit(&mut town, a, host(1), Reason::KeysOfSession);
}

#[test]
fn keys_and_bytes_of_one_pod() {
    let mut town = Town::new(Policy { keys_per_account: 3, bytes_per_account: 100, ..Policy::default() });
    let (a, b, c) =
        (town.open(&in_pod(100, "a")), town.open(&in_pod(200, "a")), town.open(&in_pod(300, "c")));
    let key = town.export(a, host(60));
    limit(&mut town, b, host(41), Reason::BytesOfAccount);
    limit(&mut town, b, host(u64::MAX), Reason::BytesOfAccount);
    town.export(b, host(39));
    let last = town.export(a, host(1));
    limit(&mut town, a, host(1), Reason::KeysOfAccount);
    limit(&mut town, b, host(1), Reason::KeysOfAccount);
    town.export(c, host(100));
    town.does(a, close(&last));
    limit(&mut town, b, host(2), Reason::BytesOfAccount);
    town.does(a, close(&key));
    town.export(b, host(61));
}

#[test]
fn grants_of_one_key_and_of_one_pod() {
    let policy = Policy { grants_per_key: 2, grants_per_account: 2, ..Policy::default() };
    let mut town = Town::new(policy);
    let a = town.open(&process(100));
    let keys = [town.export(a, host(1)), town.export(a, host(1)), town.export(a, host(1))];
    let people: Vec<_> = (1..=3).map(|n| town.open(&process(200 + n))).collect();
    for key in &keys {
        town.does(a, admit(key, &[201, 202, 203]));
    }
    let first = town.import(people[0], &keys[0]);
    town.import(people[1], &keys[0]);
    limit(&mut town, people[2], import(&keys[0]), Reason::GrantsOfKey);
    town.does(people[0], ack(&first.grant, true));
    town.import(people[2], &keys[0]);

    let second = town.import(people[0], &keys[1]);
    town.import(people[0], &keys[2]);
    let fourth = town.export(a, host(1));
    town.does(a, admit(&fourth, &[201]));
    limit(&mut town, people[0], import(&fourth), Reason::GrantsOfAccount);
    town.does(people[0], ack(&second.grant, false));
    town.import(people[0], &fourth);
    // Expired grants no longer count.
    town.wait(10_000);
    assert_eq!(town.broker.stats().grants, 0);
    town.import(people[0], &keys[1]);
}

#[test]
fn imports_of_one_pod() {
    let mut town = Town::new(Policy { imports_per_account: 2, ..Policy::default() });
    let (a, b, c) = (town.open(&process(100)), town.open(&in_pod(200, "b")), town.open(&in_pod(300, "b")));
    let keys = [town.export(a, host(1)), town.export(a, host(1))];
    for key in &keys {
        town.does(a, admit_subjects(key, &["ns/b"], &[]));
    }
    town.import(b, &keys[0]);
    town.import(c, &keys[0]);
    limit(&mut town, b, import(&keys[1]), Reason::ImportsOfAccount);
    town.does(c, close(&keys[0]));
    town.import(b, &keys[1]);
}

#[test]
fn process_ids_of_one_call() {
    let mut town = Town::new(Policy::default());
    let a = town.open(&process(100));
    town.open(&process(200));
    let key = town.export(a, host(1));
    town.does(a, admit(&key, &[200; 31]));
    limit(&mut town, a, admit(&key, &[200; 32]), Reason::PidsOfCall);
}

#[test]
fn process_ids_and_subjects_of_one_key_and_of_one_pod() {
    let policy =
        Policy { pids_per_key: 2, subjects_per_key: 2, admitted_per_account: 5, ..Policy::default() };
    let mut town = Town::new(policy);
    let a = town.open(&in_pod(100, "a"));
    for tgid in [200, 300, 400] {
        town.open(&process(tgid));
    }
    let (one, two) = (town.export(a, host(1)), town.export(a, host(1)));
    town.does(a, admit(&one, &[200, 300]));
    limit(&mut town, a, admit(&one, &[400]), Reason::PidsOfKey);
    let default = Policy::default();
    assert!(default.pids_per_key == 32_768 && default.admitted_per_account >= default.pids_per_key);
    town.does(a, admit(&one, &[200]));
    town.does(a, admit_subjects(&one, &["ns/a"], &["ns/a"]));
    limit(&mut town, a, admit_subjects(&one, &["ns/b"], &[]), Reason::SubjectsOfKey);
    town.does(a, admit_subjects(&one, &["ns/a"], &[]));
    town.does(a, admit(&two, &[200]));
    limit(&mut town, a, admit(&two, &[300]), Reason::AdmittedOfAccount);
    limit(&mut town, a, admit_subjects(&two, &["ns/a"], &[]), Reason::AdmittedOfAccount);
    town.does(a, close(&one));
    town.does(a, admit(&two, &[300]));
}

#[test]
fn questions_of_one_session() {
    let mut town = Town::new(Policy { questions_per_session: 1, ..Policy::default() });
    let a = town.open(&process(100));
    let key = town.export(a, host(1));
    town.ask(a, admit(&key, &[200]));
    limit(&mut town, a, admit(&key, &[300]), Reason::Questions);
    town.wait(1_000);
    town.ask(a, admit(&key, &[300]));
    assert!(matches!(town.effects[0], Effect::Resolve { .. }));
}

/// The newcomer has sent no request yet. It gets the reason, and its connection is closed.
fn turned_away(town: &mut Town, peer: Option<shmesh_proto::identity::PeerIdentity>, reason: Reason) {
    let before = town.broker.stats();
    let session = town.open_unknown(peer);
    assert_eq!((town.refusal(session, 0).code(), town.reasons()), (Code::Limit, vec![reason]));
    assert_eq!(town.effects.last(), Some(&Effect::CloseSession(session)));
    assert_eq!(town.broker.stats(), before);
}

#[test]
fn sessions_and_processes() {
    let roomy = Policy::default();
    let mut town = Town::new(Policy { sessions: 2, ..roomy.clone() });
    let first = town.open(&process(100));
    town.open(&process(200));
    turned_away(&mut town, Some(process(300)), Reason::Sessions);
    turned_away(&mut town, None, Reason::Sessions);
    town.closed(first);
    town.open(&process(300));
    assert_eq!(town.broker.stats().sessions, 2);

    let mut town = Town::new(Policy { sessions_per_process: 2, ..roomy.clone() });
    let first = town.open(&process(100));
    town.open(&process(100));
    turned_away(&mut town, Some(process(100)), Reason::SessionsOfProcess);
    town.open(&process(200));
    town.closed(first);
    town.open(&process(100));
    assert_eq!(town.broker.stats().sessions, 3);

    let mut town = Town::new(Policy { sessions_per_account: 2, ..roomy.clone() });
    town.open(&in_pod(100, "a"));
    let second = town.open(&in_pod(200, "a"));
    turned_away(&mut town, Some(in_pod(300, "a")), Reason::SessionsOfAccount);
    turned_away(&mut town, Some(in_pod(100, "a")), Reason::SessionsOfAccount);
    town.open(&in_pod(300, "b"));
    town.closed(second);
    town.open(&in_pod(300, "a"));

    let mut town = Town::new(Policy { processes: 2, processes_per_account: 1, ..roomy.clone() });
    town.open(&in_pod(100, "a"));
    turned_away(&mut town, Some(in_pod(200, "a")), Reason::ProcessesOfAccount);
    town.open(&in_pod(100, "a"));
    town.open(&in_pod(200, "b"));
    turned_away(&mut town, Some(in_pod(300, "c")), Reason::Processes);
    town.died(&in_pod(100, "a"));
    town.open(&in_pod(300, "c"));

    let mut town = Town::new(Policy { sessions_unidentified: 1, ..roomy });
    let first = town.open_unknown(None);
    turned_away(&mut town, None, Reason::SessionsUnidentified);
    town.open(&process(100));
    town.closed(first);
    town.open_unknown(None);
    assert_eq!(town.broker.stats().sessions, 2);
}
