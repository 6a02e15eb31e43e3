//! Requests of hostile peers. Each is refused, counted and recorded, and has no effect on others: `Town::refuses` checks
//! that nothing else has happened, and each test ends with what the others can still do.

use shmesh_proto::broker::{
    Attach, BareTgid, Code, Hello, List, Mechanism, Offer, Request, reply, request::Op,
};
use shmesh_proto::identity::{PeerIdentity, Pod};
use shmesh_sidecar::broker::{Command, Effect, FdToken, Policy, Reason, SessionId};

use crate::broker::town::*;

/// An exporter, an importer that it admits, and a process that is not admitted.
struct Scene {
    town: Town,
    exporter: SessionId,
    importer: SessionId,
    stranger: SessionId,
    key: Vec<u8>,
}

fn scene(op: Op) -> Scene {
    let mut town = Town::new(Policy::default());
    let exporter = town.open(&in_pod(100, "a"));
    let importer = town.open(&in_pod(200, "b"));
    let stranger = town.open(&in_pod(300, "c"));
    let key = town.export(exporter, op);
    town.does(exporter, admit(&key, &[200]));
    Scene { town, exporter, importer, stranger, key }
}

impl Scene {
    /// Checks that exporter and importer can still use the key.
    fn goes_on(mut self) {
        let imported = self.town.import(self.importer, &self.key);
        self.town.does(self.importer, ack(&imported.grant, true));
        self.town.does(self.importer, close(&self.key));
        self.town.does(self.exporter, close(&self.key));
    }
}

#[test]
fn guessing_keys() {
    let mut scene = scene(host(1));
    let mut texts = Vec::new();
    for n in 0..=u8::MAX {
        // Differs from a real key in one bit, or in many.
        let mut guess = scene.key.clone();
        let at = usize::from(n) % 64;
        guess[at] = if guess[at] == b'0' { b'1' } else { b'0' };
        for op in [import(&guess), close(&guess), force(&guess), admit(&guess, &[300])] {
            texts.push(scene.town.refuses(scene.stranger, op, Code::Denied, Reason::UnknownKey));
        }
    }
    // The real key is refused with the same text.
    texts.push(scene.town.refuses(scene.stranger, import(&scene.key), Code::Denied, Reason::NotAdmitted));
    texts.push(scene.town.refuses(scene.stranger, close(&scene.key), Code::Denied, Reason::NotImporter));
    texts.push(scene.town.refuses(scene.stranger, force(&scene.key), Code::Denied, Reason::NotImporter));
    texts.push(scene.town.refuses(
        scene.stranger,
        admit(&scene.key, &[300]),
        Code::Denied,
        Reason::NotExporter,
    ));
    texts.dedup();
    assert_eq!(texts.len(), 1, "{texts:?}");
    scene.goes_on();
}

#[test]
fn keys_of_a_wrong_shape() {
    let mut scene = scene(host(1));
    let real = scene.key.clone();
    let with = |at: usize, byte: u8| {
        let mut key = real.clone();
        key[at] = byte;
        key
    };
    let shapes = [
        Vec::new(),
        real[..64].to_vec(),
        real[..1].to_vec(),
        [&real[..], &[0]].concat(),
        vec![0; 65],
        with(64, b'0'),
        with(0, 0),
        with(63, b' '),
        with(5, 0xff),
        vec![b'0'; 8000],
    ];
    for shape in shapes {
        for op in [import(&shape), close(&shape), force(&shape), admit(&shape, &[200])] {
            scene.town.refuses(scene.importer, op, Code::Invalid, Reason::Malformed);
        }
    }
    scene.goes_on();
}

#[test]
fn importing_from_a_process_that_is_not_listed() {
    let mut scene = scene(host(1));
    // Another process of the exporter's pod, of the importer's pod, and one in no pod.
    for peer in [in_pod(101, "a"), in_pod(201, "b"), process(301)] {
        let session = scene.town.open(&peer);
        scene.town.refuses(session, import(&scene.key), Code::Denied, Reason::NotAdmitted);
    }
    scene.goes_on();
}

#[test]
fn importing_with_the_number_of_a_process_that_is_gone() {
    let mut scene = scene(host(1));
    // The broker does not know of the death yet.
    let replaced = PeerIdentity { start_time: 2, ..in_pod(200, "b") };
    let session = scene.town.open(&replaced);
    scene.town.refuses(session, import(&scene.key), Code::Denied, Reason::ProcessReplaced);
    scene.goes_on();
}

#[test]
fn importing_with_number_and_start_time_of_a_process_that_is_gone() {
    let mut town = Town::new(Policy::default());
    let listed = PeerIdentity { pidfd_inode: 5, ..process(200) };
    let (a, b) = (town.open(&process(100)), town.open(&listed));
    let key = town.export(a, host(1));
    town.does(a, admit(&key, &[200]));
    let replaced = town.open(&PeerIdentity { pidfd_inode: 6, ..process(200) });
    town.refuses(replaced, import(&key), Code::Denied, Reason::ProcessReplaced);
    town.import(b, &key);
}

#[test]
fn importing_from_another_pod() {
    let mut town = Town::new(Policy::default());
    let a = town.open(&in_pod(100, "a"));
    let key = town.export(a, host(1));
    town.does(a, admit_subjects(&key, &["ns/b"], &["ns/sa-b"]));
    let with = |tgid, change: &dyn Fn(&mut Pod)| {
        let mut peer = in_pod(tgid, "b");
        peer.pod.as_mut().map(change);
        peer
    };
    let pretenders = [
        in_pod(300, "c"),
        // Its name is not confirmed: it comes from the cgroup alone.
        with(301, &|pod| pod.confirmed = false),
        // The same names in another namespace.
        with(302, &|pod| pod.namespace = "other".into()),
        with(303, &|pod| pod.namespace = String::new()),
        // A pod with the name of the service account, and the reverse.
        with(304, &|pod| (pod.name, pod.service_account) = ("sa-b".into(), "b".into())),
        with(305, &|pod| (pod.name, pod.service_account) = (String::new(), String::new())),
        PeerIdentity { pod: None, ..in_pod(306, "b") },
    ];
    for peer in pretenders {
        let session = town.open(&peer);
        town.refuses(session, import(&key), Code::Denied, Reason::NotAdmitted);
    }
    let b = town.open(&in_pod(200, "b"));
    town.import(b, &key);
}

#[test]
fn replaying_a_grant() {
    let mut scene = scene(host(1));
    let imported = scene.town.import(scene.importer, &scene.key);
    scene.town.does(scene.importer, ack(&imported.grant, true));
    for done in [true, false] {
        let replay = ack(&imported.grant, done);
        scene.town.refuses(scene.importer, replay, Code::Denied, Reason::GrantUsed);
    }
    scene.town.does(scene.importer, close(&scene.key));
    scene.town.refuses(scene.importer, ack(&imported.grant, true), Code::Denied, Reason::GrantUsed);
    scene.goes_on();
}

#[test]
fn replaying_the_exporters_grant() {
    let mut scene = scene(ascend());
    let waits = scene.town.ask(scene.importer, import(&scene.key));
    let admission = scene.town.admission();
    scene.town.does(scene.exporter, ack(&admission, true));
    let imported = scene.town.imported(scene.importer, waits);
    scene.town.refuses(scene.exporter, ack(&admission, true), Code::Denied, Reason::GrantUsed);
    scene.town.refuses(scene.exporter, ack(&admission, false), Code::Denied, Reason::GrantUsed);
    scene.town.does(scene.importer, ack(&imported.grant, true));
}

#[test]
fn using_the_grant_of_another_process() {
    let mut scene = scene(ascend());
    let waits = scene.town.ask(scene.importer, import(&scene.key));
    let admission = scene.town.admission();
    // The importer uses its own grant; another process does; another process reports a failure with it.
    for (who, done) in [(scene.importer, true), (scene.stranger, true), (scene.stranger, false)] {
        scene.town.refuses(who, ack(&admission, done), Code::Denied, Reason::ForeignGrant);
    }
    scene.town.does(scene.exporter, ack(&admission, true));
    let imported = scene.town.imported(scene.importer, waits);
    for (who, done) in [(scene.exporter, true), (scene.exporter, false), (scene.stranger, false)] {
        scene.town.refuses(who, ack(&imported.grant, done), Code::Denied, Reason::ForeignGrant);
    }
    scene.town.does(scene.importer, ack(&imported.grant, true));
}

#[test]
fn guessing_grants() {
    let mut scene = scene(host(1));
    for grant in [[0; 16], [0xff; 16]] {
        scene.town.refuses(scene.stranger, ack(&grant, true), Code::Denied, Reason::UnknownGrant);
    }
    for grant in [&[][..], &[0; 15], &[0; 17], &[0; 65]] {
        scene.town.refuses(scene.stranger, ack(grant, true), Code::Invalid, Reason::Malformed);
    }
    scene.goes_on();
}

#[test]
fn grant_of_a_key_that_is_gone() {
    let mut scene = scene(host(1));
    let imported = scene.town.import(scene.importer, &scene.key);
    scene.town.died(&in_pod(100, "a"));
    scene.town.refuses(scene.importer, ack(&imported.grant, true), Code::Denied, Reason::GrantCancelled);
}

#[test]
fn closing_in_the_wrong_order() {
    let mut scene = scene(host(1));
    scene.town.import(scene.importer, &scene.key);
    let busy = scene.town.refuses(scene.exporter, close(&scene.key), Code::Busy, Reason::Busy);
    assert_eq!(busy.importers, [200]);
    scene.town.does(scene.importer, close(&scene.key));
    scene.goes_on();
}

#[test]
fn closing_twice() {
    let mut scene = scene(host(1));
    scene.town.import(scene.importer, &scene.key);
    scene.town.does(scene.importer, close(&scene.key));
    scene.town.refuses(scene.importer, close(&scene.key), Code::Denied, Reason::NotImporter);
    scene.town.does(scene.exporter, close(&scene.key));
    scene.town.refuses(scene.exporter, close(&scene.key), Code::Denied, Reason::UnknownKey);
}

#[test]
fn closing_and_admitting_for_another_process() {
    let mut scene = scene(host(1));
    scene.town.import(scene.importer, &scene.key);
    for op in [close(&scene.key), force(&scene.key)] {
        scene.town.refuses(scene.stranger, op, Code::Denied, Reason::NotImporter);
    }
    for who in [scene.importer, scene.stranger] {
        scene.town.refuses(who, admit(&scene.key, &[300]), Code::Denied, Reason::NotExporter);
    }
    // Another process of the same pod is not the exporter, nor is a process that has reused its number.
    let same_pod = scene.town.open(&in_pod(101, "a"));
    let same_number = scene.town.open(&PeerIdentity { start_time: 2, ..in_pod(100, "a") });
    for who in [same_pod, same_number] {
        scene.town.refuses(who, admit(&scene.key, &[300]), Code::Denied, Reason::NotExporter);
        scene.town.refuses(who, force(&scene.key), Code::Denied, Reason::NotImporter);
    }
    scene.town.does(scene.importer, close(&scene.key));
    scene.goes_on();
}

#[test]
fn detaching_ends_nothing_of_others() {
    let mut scene = scene(host(1));
    let before = scene.town.broker.stats();
    scene.town.does(scene.stranger, DETACH);
    assert_eq!((scene.town.broker.stats(), scene.town.events()), (before, Vec::new()));
    scene.goes_on();
}

#[test]
fn asking_without_an_identity() {
    let mut scene = scene(ascend());
    scene.town.ask(scene.importer, import(&scene.key));
    let admission = scene.town.admission();
    let nobody = [None, Some(process(0)), Some(process(-1))];
    for peer in nobody {
        let session = scene.town.open_unknown(peer);
        let hello = scene.town.ask(session, Op::Hello(Hello {}));
        match scene.town.answer(session, hello) {
            Some(reply::Result::Welcome(welcome)) => assert_eq!(welcome.identity, None),
            other => panic!("{other:?}"),
        }
        for op in [
            Op::BareTgid(BareTgid {}),
            Op::List(List { skip: 0 }),
            Op::Attach(Attach::default()),
            Op::Offer(Offer {}),
            DETACH,
            host(1),
            admit(&scene.key, &[300]),
            import(&scene.key),
            ack(&admission, true),
            close(&scene.key),
            force(&scene.key),
        ] {
            scene.town.refuses(session, op, Code::Unidentified, Reason::Unidentified);
        }
    }
    scene.town.does(scene.exporter, ack(&admission, true));
}

#[test]
fn speaking_through_the_session_of_the_dead() {
    let mut scene = scene(host(1));
    scene.town.died(&in_pod(200, "b"));
    assert_eq!(scene.town.effects, [Effect::CloseSession(scene.importer)]);
    // A child that inherited the socket was faster.
    let request = Request::new(7, host(1));
    let fds = vec![FdToken(77)];
    scene.town.tell(Command::Request { session: scene.importer, request, fds });
    assert_eq!(scene.town.reasons(), [Reason::NoSession]);
    assert_eq!(scene.town.dropped(), [FdToken(77)]);
    assert_eq!(scene.town.effects.len(), 3, "there is no session to answer: {:?}", scene.town.effects);
}

#[test]
fn sending_unexpected_descriptors() {
    let mut scene = scene(host(1));
    for op in [Op::Hello(Hello {}), import(&scene.key), close(&scene.key), DETACH, ack(&[0; 16], true)] {
        for count in [1, 8] {
            let (code, reason) = (Code::Invalid, Reason::BadDescriptors);
            scene.town.refuses_with(scene.importer, op.clone(), count, code, reason);
        }
    }
    let ascend = export(1, 0, Mechanism::Ascend, 65);
    scene.town.refuses_with(scene.importer, ascend, 1, Code::Invalid, Reason::BadDescriptors);
    scene.goes_on();
}

#[test]
fn empty_requests_and_other_versions() {
    let mut scene = scene(host(1));
    let mut tell = |request: Request, reason| {
        scene.town.tell(Command::Request { session: scene.stranger, request, fds: vec![] });
        assert_eq!(scene.town.reasons(), [reason]);
    };
    for version in [0, 2, u32::MAX] {
        tell(Request { version, ..Request::new(1, Op::Hello(Hello {})) }, Reason::Version);
    }
    tell(Request { op: None, ..Request::new(1, Op::Hello(Hello {})) }, Reason::Malformed);
    for op in [Op::Attach(Attach::default()), Op::Offer(Offer {})] {
        tell(Request::new(1, op), Reason::Unsupported);
    }
    scene.goes_on();
}

#[test]
fn admitting_the_dead() {
    let mut scene = scene(host(1));
    scene.town.died(&in_pod(300, "c"));
    scene.town.ask(scene.exporter, admit(&scene.key, &[300]));
    let Some(Effect::Resolve { ticket, .. }) = scene.town.effects.first().cloned() else {
        panic!("{:?}", scene.town.effects)
    };
    scene.town.tell(Command::Resolved { ticket, found: Vec::new() });
    assert_eq!(scene.town.reasons(), [Reason::NotAlive]);
    scene.goes_on();
}
