//! A broker together with its clients, for short tests.

use shmesh_proto::broker::{
    Ack, Close, Code, Detach, ExportKey, ImportByKey, Imported, List, Mechanism, Refused, Request,
    SetImportPid, Stands, event::SessionEvent, reply, request::Op,
};
use shmesh_proto::identity::{PeerIdentity, Pod};
use shmesh_sidecar::broker::{
    Broker, Command, Effect, FdToken, Millis, Outcome, Policy, ProcessId, Reason, Record, SessionId,
};

pub(crate) struct Town {
    pub(crate) broker: Broker,
    pub(crate) now: u64,
    sessions: u64,
    requests: u64,
    fds: u64,
    /// Effects of the last command.
    pub(crate) effects: Vec<Effect>,
}

/// A process outside of pods, with a user of its own.
pub(crate) fn process(bare_tgid: i32) -> PeerIdentity {
    let uid = bare_tgid.unsigned_abs();
    PeerIdentity { bare_tgid, start_time: 1, uid, ..PeerIdentity::default() }
}

/// A process of pod `ns/<name>` with service account `ns/sa-<name>`.
pub(crate) fn in_pod(bare_tgid: i32, name: &str) -> PeerIdentity {
    let pod = Pod {
        uid: format!("uid-{name}"),
        namespace: "ns".into(),
        name: name.into(),
        service_account: format!("sa-{name}"),
        confirmed: true,
        ..Pod::default()
    };
    PeerIdentity { pod: Some(pod), ..process(bare_tgid) }
}

pub(crate) fn id(peer: &PeerIdentity) -> ProcessId {
    ProcessId::of(peer).expect("a process")
}

pub(crate) fn host(size: u64) -> Op {
    export(size, 0, Mechanism::Host, 0)
}

pub(crate) fn ascend() -> Op {
    export(1, 0, Mechanism::Ascend, 65)
}

pub(crate) fn export(size: u64, flags: u64, mechanism: Mechanism, handle: usize) -> Op {
    Op::ExportKey(ExportKey { size, flags, mechanism: mechanism.into(), handle: vec![9; handle] })
}

pub(crate) fn admit(key: &[u8], tgids: &[i32]) -> Op {
    let (key, bare_tgids) = (key.to_vec(), tgids.to_vec());
    Op::SetImportPid(SetImportPid { key, bare_tgids, ..SetImportPid::default() })
}

pub(crate) fn admit_subjects(key: &[u8], pods: &[&str], accounts: &[&str]) -> Op {
    let owned = |all: &[&str]| all.iter().map(ToString::to_string).collect();
    let (pods, service_accounts) = (owned(pods), owned(accounts));
    Op::SetImportPid(SetImportPid { key: key.to_vec(), bare_tgids: Vec::new(), pods, service_accounts })
}

pub(crate) fn import(key: &[u8]) -> Op {
    Op::ImportByKey(ImportByKey { key: key.to_vec() })
}

pub(crate) fn ack(grant: &[u8], done: bool) -> Op {
    Op::Ack(Ack { grant: grant.to_vec(), done })
}

pub(crate) fn stands(grant: &[u8]) -> Op {
    Op::Stands(Stands { grant: grant.to_vec() })
}

pub(crate) fn close(key: &[u8]) -> Op {
    Op::Close(Close { key: key.to_vec(), force: false })
}

pub(crate) fn force(key: &[u8]) -> Op {
    Op::Close(Close { key: key.to_vec(), force: true })
}

pub(crate) const DETACH: Op = Op::Detach(Detach {});

impl Town {
    pub(crate) fn new(policy: Policy) -> Self {
        let mut drawn = 0_u64;
        let entropy = move |bytes: &mut [u8]| {
            drawn += 1;
            bytes[..8].copy_from_slice(&drawn.to_be_bytes());
        };
        Self {
            broker: Broker::new(policy, entropy),
            now: 0,
            sessions: 0,
            requests: 0,
            fds: 0,
            effects: Vec::new(),
        }
    }

    pub(crate) fn tell(&mut self, command: Command) -> &[Effect] {
        self.effects = self.broker.handle(Millis(self.now), command);
        self.broker.check().expect("tables agree");
        &self.effects
    }

    pub(crate) fn wait(&mut self, millis: u64) -> &[Effect] {
        self.now += millis;
        self.tell(Command::Tick)
    }

    pub(crate) fn open(&mut self, peer: &PeerIdentity) -> SessionId {
        self.open_unknown(Some(peer.clone()))
    }

    pub(crate) fn open_unknown(&mut self, peer: Option<PeerIdentity>) -> SessionId {
        self.sessions += 1;
        let session = SessionId(self.sessions);
        self.tell(Command::Opened { session, peer });
        session
    }

    pub(crate) fn closed(&mut self, session: SessionId) -> &[Effect] {
        self.tell(Command::Closed { session })
    }

    pub(crate) fn died(&mut self, peer: &PeerIdentity) -> &[Effect] {
        self.tell(Command::Died { process: id(peer) })
    }

    /// Sends a request, with the descriptors that its mechanism needs.
    pub(crate) fn ask(&mut self, session: SessionId, op: Op) -> u64 {
        let count = match &op {
            Op::ExportKey(export) => match export.mechanism() {
                Mechanism::Host | Mechanism::CudaVmm => 1,
                _ => 0,
            },
            _ => 0,
        };
        self.ask_with(session, op, count)
    }

    pub(crate) fn ask_with(&mut self, session: SessionId, op: Op, descriptors: u64) -> u64 {
        let fds = (1..=descriptors).map(|n| FdToken(self.fds + n)).collect();
        self.fds += descriptors;
        self.requests += 1;
        let request = Request::new(self.requests, op);
        self.tell(Command::Request { session, request, fds });
        self.requests
    }

    /// The last command's reply to a request.
    pub(crate) fn answer(&self, session: SessionId, id: u64) -> Option<reply::Result> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Reply { session: to, reply, .. } if *to == session && reply.id == id => {
                reply.result.clone()
            }
            _ => None,
        })
    }

    pub(crate) fn refusal(&self, session: SessionId, id: u64) -> Refused {
        match self.answer(session, id) {
            Some(reply::Result::Refused(refused)) => refused,
            other => panic!("not refused: {other:?}"),
        }
    }

    pub(crate) fn does(&mut self, session: SessionId, op: Op) {
        let id = self.ask(session, op);
        assert!(matches!(self.answer(session, id), Some(reply::Result::Done(_))), "{:?}", self.effects);
    }

    pub(crate) fn export(&mut self, session: SessionId, op: Op) -> Vec<u8> {
        let id = self.ask(session, op);
        match self.answer(session, id) {
            Some(reply::Result::Exported(exported)) => exported.key,
            other => panic!("not exported: {other:?}"),
        }
    }

    pub(crate) fn import(&mut self, session: SessionId, key: &[u8]) -> Imported {
        let id = self.ask(session, import(key));
        self.imported(session, id)
    }

    pub(crate) fn imported(&self, session: SessionId, id: u64) -> Imported {
        match self.answer(session, id) {
            Some(reply::Result::Imported(imported)) => imported,
            other => panic!("not imported: {other:?}"),
        }
    }

    pub(crate) fn list(&mut self, session: SessionId, skip: u32) -> shmesh_proto::broker::Keys {
        let id = self.ask(session, Op::List(List { skip }));
        match self.answer(session, id) {
            Some(reply::Result::Keys(keys)) => keys,
            other => panic!("not listed: {other:?}"),
        }
    }

    /// Checks that the request is refused with this code, counted and recorded with this reason, and has no other effect:
    /// the tables do not change, no client is notified, and the descriptors that came with it are dropped.
    pub(crate) fn refuses(&mut self, session: SessionId, op: Op, code: Code, reason: Reason) -> Refused {
        let count = u64::from(
            matches!(&op, Op::ExportKey(e) if matches!(e.mechanism(), Mechanism::Host | Mechanism::CudaVmm)),
        );
        self.refuses_with(session, op, count, code, reason)
    }

    pub(crate) fn refuses_with(
        &mut self,
        session: SessionId,
        op: Op,
        descriptors: u64,
        code: Code,
        reason: Reason,
    ) -> Refused {
        let before = self.broker.stats();
        let first = self.fds + 1;
        let id = self.ask_with(session, op, descriptors);
        let refused = self.refusal(session, id);
        assert_eq!((refused.code(), self.reasons()), (code, vec![reason]));
        assert_eq!(self.broker.stats(), before, "nothing has changed");
        let dropped = (first..=self.fds).map(|fd| Effect::DropFd(FdToken(fd)));
        assert_eq!(self.effects.split_off(3), dropped.collect::<Vec<_>>(), "reply, record, count");
        refused
    }

    /// The reasons of the last command's refusals, which are the same in counters and records.
    pub(crate) fn reasons(&self) -> Vec<Reason> {
        let counted = self.effects.iter().filter_map(|effect| match effect {
            Effect::Denied(reason) => Some(*reason),
            _ => None,
        });
        let counted: Vec<_> = counted.collect();
        let refused = self.records().into_iter().filter(|record| record.outcome == Outcome::Refused);
        assert_eq!(refused.filter_map(|record| record.reason).collect::<Vec<_>>(), counted);
        counted
    }

    pub(crate) fn records(&self) -> Vec<Record> {
        let record = |effect: &Effect| match effect {
            Effect::Audit(record) => Some((**record).clone()),
            _ => None,
        };
        self.effects.iter().filter_map(record).collect()
    }

    pub(crate) fn events(&self) -> Vec<(SessionId, SessionEvent)> {
        let event = |effect: &Effect| match effect {
            Effect::Event { session, happened } => Some((*session, happened.clone())),
            _ => None,
        };
        self.effects.iter().filter_map(event).collect()
    }

    /// The grant of the request to admit that the last command sent to an exporter.
    pub(crate) fn admission(&self) -> Vec<u8> {
        match self.events().first() {
            Some((_, SessionEvent::Admit(admit))) => admit.grant.clone(),
            other => panic!("not asked to admit: {other:?}"),
        }
    }

    pub(crate) fn dropped(&self) -> Vec<FdToken> {
        let dropped = |effect: &Effect| match effect {
            Effect::DropFd(fd) => Some(*fd),
            _ => None,
        };
        self.effects.iter().filter_map(dropped).collect()
    }
}
