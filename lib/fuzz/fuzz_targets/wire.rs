//! Input from sockets: any bytes as a packet, and packets, descriptors, deaths and time in any order for the broker.
#![no_main]

// The state machine alone: the sidecar brings nearly sixty crates, which take minutes to build with the sanitizer.
#[path = "../../../sidecar/src/broker/mod.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    unfulfilled_lint_expectations,
    reason = "a part of another crate"
)]
mod broker;
mod support;

use std::collections::BTreeSet;

use broker::{Broker, Command, Effect, FdToken, Millis, Policy, ProcessId, SessionId, Ticket};
use shmesh_proto::broker::{
    Ack, Attach, BareTgid, Close, Detach, ExportKey, Hello, ImportByKey, List, Reply, Request, SetImportPid,
    Stands, event::SessionEvent, reply, request::Op,
};
use shmesh_proto::identity::{Answer, PeerIdentity, Pod, Question};
use shmesh_proto::limits::MAX_PACKET_BYTES;
use shmesh_proto::packet;
use support::Bytes;

/// A packet that can be decoded is the same after encoding and decoding it again.
fn decode<M: prost::Message + Default + PartialEq>(bytes: &[u8]) {
    if let Ok(message) = packet::decode::<M>(bytes) {
        let again = packet::encode(&message);
        assert!(
            packet::decode::<M>(&again).is_ok_and(|same| same == message) || again.len() > MAX_PACKET_BYTES
        );
    }
}

/// Processes. Some numbers are reused; one process is in no pod, and one is invalid.
fn people() -> Vec<PeerIdentity> {
    let pod = |name: &str| {
        let [uid, namespace, name] = [name, "ns", name].map(String::from);
        Some(Pod { uid, namespace, service_account: name.clone(), name, confirmed: true, ..Pod::default() })
    };
    let peer =
        |bare_tgid, start_time, pod| PeerIdentity { bare_tgid, start_time, pod, ..PeerIdentity::default() };
    vec![
        peer(100, 1, pod("a")),
        peer(101, 1, pod("b")),
        peer(101, 2, pod("b")),
        peer(102, 1, None),
        peer(103, 1, pod("a")),
        peer(0, 1, None),
    ]
}

fn policy(flags: u8) -> Policy {
    let tight = Policy {
        sessions: 6,
        sessions_per_process: 2,
        sessions_unidentified: 1,
        processes: 4,
        keys_per_session: 2,
        bytes_per_account: 1 << 20,
        imports_per_account: 2,
        grants_per_key: 1,
        pids_per_key: 3,
        subjects_per_key: 2,
        questions_per_session: 1,
        ..Policy::default()
    };
    let policy = if flags & 2 == 0 { Policy::default() } else { tight };
    Policy { open_keys: flags & 4 == 0, cuda_legacy: flags & 8 == 0, ..policy }
}

struct World {
    broker: Broker,
    people: Vec<PeerIdentity>,
    now: u64,
    sessions: u64,
    fds: u64,
    dropped: BTreeSet<FdToken>,
    keys: Vec<Vec<u8>>,
    grants: Vec<Vec<u8>>,
    questions: Vec<(Ticket, Vec<i32>)>,
}

impl World {
    fn tell(&mut self, command: Command) {
        for effect in self.broker.handle(Millis(self.now), command) {
            match effect {
                Effect::Reply { reply, fd, .. } => {
                    assert!(fd.is_none_or(|fd| !self.dropped.contains(&fd)), "sent after it was dropped");
                    self.look(&reply);
                }
                Effect::Event { happened, .. } => self.look(&Reply::event(happened)),
                Effect::DropFd(fd) => assert!(self.dropped.insert(fd), "dropped twice"),
                Effect::Resolve { ticket, bare_tgids } => self.questions.push((ticket, bare_tgids)),
                Effect::Audit(record) => {
                    let line = record.to_line();
                    assert!(!line.is_empty() && !line.contains('\n'));
                    let has = |key: &Vec<u8>| line.contains(std::str::from_utf8(&key[..64]).expect("digits"));
                    assert!(!self.keys.iter().any(has), "a key in the audit log");
                }
                _ => {}
            }
        }
        assert_eq!(self.broker.check(), Ok(()));
        let stats = self.broker.stats();
        assert!(
            stats.descriptors as u64 == self.fds - self.dropped.len() as u64,
            "each is held or was dropped"
        );
        let page = reply::Result::AllKeys(self.broker.all_keys(0));
        assert!(packet::encode(&Reply::new(u64::MAX, page)).len() <= MAX_PACKET_BYTES);
    }

    fn look(&mut self, reply: &Reply) {
        assert!(packet::encode(reply).len() <= MAX_PACKET_BYTES);
        match &reply.result {
            Some(reply::Result::Exported(exported)) => self.keys.push(exported.key.clone()),
            Some(reply::Result::Imported(imported)) => self.grants.push(imported.grant.clone()),
            Some(reply::Result::Event(event)) => {
                if let Some(SessionEvent::Admit(admit)) = &event.happened {
                    self.grants.push(admit.grant.clone());
                }
            }
            _ => {}
        }
    }

    /// A secret that was issued, or any bytes.
    fn secret(bytes: &mut Bytes<'_>, all: &[Vec<u8>]) -> Vec<u8> {
        let n = usize::from(bytes.byte());
        match n.checked_sub(240) {
            None => all.get(n.checked_rem(all.len()).unwrap_or(0)).cloned().unwrap_or_default(),
            Some(_) => raw(bytes),
        }
    }

    fn request(&mut self, bytes: &mut Bytes<'_>) -> Option<Request> {
        let op = match bytes.byte() % 16 {
            0 => Op::Hello(Hello {}),
            1 => Op::Attach(Attach { side: bytes.byte().into() }),
            2 => Op::Detach(Detach {}),
            3 => Op::BareTgid(BareTgid {}),
            4 | 5 => Op::ExportKey(ExportKey {
                size: bytes.value(1),
                flags: u64::from(bytes.byte() % 3),
                mechanism: i32::from(bytes.byte() % 6),
                handle: vec![7; [0, 65, 84, 16][usize::from(bytes.byte() % 4)]],
            }),
            6 | 7 => Op::SetImportPid(SetImportPid {
                key: Self::secret(bytes, &self.keys),
                bare_tgids: (0..bytes.byte() % 40).map(|_| 98 + i32::from(bytes.byte() % 8)).collect(),
                pods: (0..bytes.byte() % 3).map(|_| text(bytes)).collect(),
                service_accounts: (0..bytes.byte() % 3).map(|_| text(bytes)).collect(),
            }),
            8 | 9 => Op::ImportByKey(ImportByKey { key: Self::secret(bytes, &self.keys) }),
            10 | 11 => Op::Ack(Ack { grant: Self::secret(bytes, &self.grants), done: bytes.byte() % 4 != 0 }),
            12 => Op::Close(Close { key: Self::secret(bytes, &self.keys), force: bytes.byte() % 2 == 0 }),
            13 => Op::List(List { skip: bytes.byte().into() }),
            14 => Op::Stands(Stands { grant: Self::secret(bytes, &self.grants) }),
            // Any bytes as a packet.
            _ => return packet::decode(&raw(bytes)).ok(),
        };
        Some(Request { version: 1 + u32::from(bytes.byte() == 255), ..Request::new(bytes.byte().into(), op) })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        let session =
            |me: &Self, bytes: &mut Bytes<'_>| SessionId(u64::from(bytes.byte()) % (me.sessions + 2));
        match bytes.byte() % 32 {
            0..4 => {
                self.sessions += 1;
                let peer = self.people.get(usize::from(bytes.byte()) % 8).cloned();
                self.tell(Command::Opened { session: SessionId(self.sessions), peer });
            }
            4 => {
                let session = session(self, bytes);
                self.tell(Command::Closed { session });
            }
            5 => {
                let peer = self.people[usize::from(bytes.byte()) % self.people.len()].clone();
                if let Some(process) = ProcessId::of(&peer) {
                    self.tell(Command::Died { process });
                }
            }
            6 => {
                let Some((ticket, asked)) = self.questions.pop() else { return };
                let skip = usize::from(bytes.byte() % 4 == 0);
                let found = asked.iter().skip(skip).map(|tgid| PeerIdentity {
                    bare_tgid: *tgid,
                    start_time: 1,
                    ..PeerIdentity::default()
                });
                let found = found.collect();
                self.tell(Command::Resolved { ticket, found });
            }
            7 => {
                self.now = self.now.saturating_add(bytes.value(self.now) >> 32);
                self.tell(Command::Tick);
            }
            8 if bytes.byte() == 0 => self.tell(Command::Drain),
            _ => {
                let session = session(self, bytes);
                let Some(request) = self.request(bytes) else { return };
                // Usually as many as the mechanism needs.
                let wanted = match &request.op {
                    Some(Op::ExportKey(export)) => u64::from(matches!(export.mechanism, 1 | 2)),
                    _ => 0,
                };
                let count = match bytes.byte() {
                    n @ 0..8 => u64::from(n),
                    _ => wanted,
                };
                let fds = (1..=count).map(|n| FdToken(self.fds + n)).collect();
                self.fds += count;
                self.tell(Command::Request { session, request, fds });
            }
        }
    }
}

fn raw(bytes: &mut Bytes<'_>) -> Vec<u8> {
    (0..bytes.byte()).map(|_| bytes.byte()).collect()
}

fn text(bytes: &mut Bytes<'_>) -> String {
    match bytes.byte() {
        0..100 => "ns/a".to_owned(),
        100..200 => "ns/b".to_owned(),
        // As long as a packet allows, with characters that the log escapes.
        200..220 => "\"\n".repeat(usize::from(bytes.byte()) * 8),
        _ => String::from_utf8_lossy(&raw(bytes)).into_owned(),
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let flags = bytes.byte();
    if flags & 1 != 0 {
        decode::<Request>(bytes.0);
        decode::<Reply>(bytes.0);
        decode::<Question>(bytes.0);
        return decode::<Answer>(bytes.0);
    }
    let mut random = 0_u64;
    let entropy = move |bytes: &mut [u8]| {
        random += 1;
        bytes.fill(0xa5);
        bytes[..8].copy_from_slice(&random.to_le_bytes());
    };
    let mut world = World {
        broker: Broker::new(policy(flags), entropy),
        people: people(),
        now: 0,
        sessions: 0,
        fds: 0,
        dropped: BTreeSet::new(),
        keys: Vec::new(),
        grants: Vec::new(),
        questions: Vec::new(),
    };
    while !bytes.is_empty() {
        world.step(&mut bytes);
    }
    // When all processes have died, no state is left.
    for process in people().iter().filter_map(ProcessId::of) {
        world.tell(Command::Died { process });
    }
    let left = world.broker.stats();
    assert_eq!((left.keys, left.imports, left.grants, left.processes, left.descriptors), (0, 0, 0, 0, 0));
});
