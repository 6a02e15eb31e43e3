//! Compares the broker with an oracle: random commands, after each of which effects and counters must match, and the tables
//! be consistent.

mod oracle;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use self::oracle::{Entropy, Oracle, Out};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use shmesh_proto::broker::{
    Ack, Admitted, Attach, BareTgid, Claim, Close, Code, Detach, ExportKey, Hello, ImportByKey, List,
    ListKeys, ListProcesses, Mechanism, Offer, Request, Restore, Seated, SetImportPid, Stands, reply,
    request,
};
use shmesh_proto::identity::{PeerIdentity, Pod};
use shmesh_sidecar::broker::{
    Broker, Command, Effect, FdToken, Millis, Outcome, Policy, ProcessId, Reason, SessionId, Ticket,
};

/// A request. Numbers select modulo the number of candidates.
#[derive(Clone, Debug)]
enum Ask {
    Hello,
    /// A request that the broker does not handle.
    Other(usize),
    Detach,
    BareTgid,
    List(u32),
    Nothing,
    OtherVersion,
    Export {
        size: usize,
        flags: usize,
        mechanism: i32,
        odd_handle: bool,
        odd_fds: bool,
    },
    Admit {
        key: usize,
        tgids: Vec<usize>,
        subjects: Vec<usize>,
    },
    AdmitMany(usize, usize),
    Import(usize),
    Ack(usize, bool),
    Stands(usize),
    Close(usize, bool),
    Restore {
        key: usize,
        tgids: Vec<usize>,
        closing: bool,
        /// Selects what is invalid about the request, if anything.
        odd: usize,
    },
    Claim(usize),
}

#[derive(Clone, Debug)]
enum Step {
    /// The broker loses its state. Some clients reconnect, in some order.
    Restart(usize, usize),
    /// The exporter of a key disconnects, then all other clients try to import it.
    Leave(usize),
    Open(usize),
    OpenAgain(usize),
    Closed(usize),
    /// Whether the request has one descriptor too many.
    Ask(usize, bool, Ask),
    Died(usize),
    Resolved(usize, usize),
    Wait(u64),
    UntilDeadline,
    Drain,
}

/// Many random choices from one random number. Proptest's own strategies take longer to generate a step than the rest takes
/// to run it. A different number is a different step, so failures still shrink.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> usize {
        let face = self.0 % sides;
        self.0 /= sides;
        usize::try_from(face).expect("a small number")
    }

    fn pick(&mut self) -> usize {
        self.roll(64)
    }

    fn picks(&mut self) -> Vec<usize> {
        (0..self.roll(4)).map(|_| self.pick()).collect()
    }

    fn once_in(&mut self, sides: u64) -> bool {
        self.roll(sides) == 0
    }

    fn step(mut self) -> Step {
        match self.roll(112) {
            0..12 => Step::Open(self.pick()),
            12 => Step::OpenAgain(self.pick()),
            13..19 => Step::Closed(self.pick()),
            19..21 => Step::Died(self.pick()),
            21..27 => Step::Resolved(self.pick(), self.pick()),
            27..33 => Step::Wait(self.pick() as u64),
            33 => Step::UntilDeadline,
            34 if self.once_in(10) => Step::Drain,
            35..37 => Step::Restart(self.pick(), self.pick()),
            37 => Step::Leave(self.pick()),
            _ => Step::Ask(self.pick(), self.once_in(50), self.ask()),
        }
    }

    fn ask(mut self) -> Ask {
        match self.roll(158) {
            0 => Ask::Hello,
            1 => Ask::Other(self.roll(5)),
            2 => Ask::Detach,
            3 => Ask::BareTgid,
            4..6 => Ask::List(u32::try_from(self.roll(4)).expect("a small number")),
            6 => Ask::Nothing,
            7 => Ask::OtherVersion,
            8 => Ask::AdmitMany(self.pick(), 30 + self.roll(3)),
            9..33 => Ask::Export {
                size: self.pick(),
                flags: self.pick(),
                mechanism: [1, 1, 1, 2, 3, 3, 3, 3, 4, 0, 5][self.roll(11)],
                odd_handle: self.once_in(20),
                odd_fds: self.once_in(20),
            },
            33..57 => Ask::Admit { key: self.pick(), tgids: self.picks(), subjects: self.picks() },
            57..105 => Ask::Import(self.pick()),
            105..126 => Ask::Ack(self.pick(), !self.once_in(4)),
            126..134 => Ask::Stands(self.pick()),
            134..138 => Ask::Claim(self.pick()),
            138..144 => Ask::Restore {
                key: self.pick(),
                tgids: self.picks(),
                closing: self.once_in(4),
                odd: self.pick(),
            },
            _ => Ask::Close(self.pick(), self.once_in(2)),
        }
    }
}

fn policy() -> impl Strategy<Value = Policy> {
    let tight = Policy {
        sessions: 7,
        sessions_per_process: 2,
        sessions_per_account: 3,
        sessions_unidentified: 1,
        processes: 6,
        processes_per_account: 2,
        keys: 5,
        keys_per_session: 2,
        keys_per_account: 3,
        bytes_per_account: 100,
        admitted_per_account: 4,
        imports_per_account: 2,
        grants_per_account: 2,
        grants_per_key: 2,
        pids_per_key: 2,
        subjects_per_key: 2,
        questions_per_session: 1,
        grant_millis: 100,
        answer_millis: 50,
        restore_millis: 80,
        ..Policy::default()
    };
    let roomy = Policy { grant_millis: 100, answer_millis: 50, restore_millis: 80, ..Policy::default() };
    // A single low limit, because several would hide each other.
    let one = |n: usize| match n {
        0 => Policy { imports_per_account: 1, ..roomy.clone() },
        1 => Policy { grants_per_key: 1, ..roomy.clone() },
        2 => Policy { processes: 3, ..roomy.clone() },
        3 => Policy { sessions: 4, ..roomy.clone() },
        4 => Policy { admitted_per_account: 3, ..roomy.clone() },
        8 => Policy { keys: 2, ..roomy.clone() },
        6 => Policy { grants_per_account: 1, ..roomy.clone() },
        7 => Policy { questions_per_session: 1, ..roomy.clone() },
        5 => Policy { processes_per_account: 1, ..roomy.clone() },
        _ => tight.clone(),
    };
    let policies: Vec<Policy> = (0..11).map(one).chain(std::iter::repeat_n(roomy.clone(), 6)).collect();
    let flags = (prop::bool::weighted(0.3), any::<bool>(), prop::bool::weighted(0.9));
    (prop::sample::select(policies), flags).prop_map(|(policy, (open_keys, cuda_legacy, bare_numbers))| {
        Policy { open_keys, cuda_legacy, bare_numbers, ..policy }
    })
}

/// The processes. Numbers are reused with another start time, or with only another inode; one claims to belong to a pod.
fn people() -> Vec<PeerIdentity> {
    let pod = |uid: &str, name: &str, account: &str, confirmed| {
        let [uid, name, service_account] = [uid, name, account].map(String::from);
        Some(Pod { uid, namespace: "ns".into(), name, service_account, confirmed, ..Pod::default() })
    };
    let peer = |bare_tgid, start_time, pidfd_inode, pod| PeerIdentity {
        bare_tgid,
        start_time,
        pidfd_inode,
        pod,
        ..PeerIdentity::default()
    };
    vec![
        peer(100, 1, 0, pod("u-a", "a", "sa", true)),
        peer(101, 1, 0, pod("u-b", "b", "sb", true)),
        peer(101, 2, 0, pod("u-b", "b", "sb", true)),
        peer(102, 1, 5, None),
        peer(102, 1, 6, None),
        peer(103, 1, 0, pod("u-c", "a", "sa", false)),
        peer(104, 1, 0, pod("u-a", "a", "sa", true)),
        peer(0, 1, 0, None),
    ]
}

const SIZES: [u64; 8] = [0, 1, 1, 20, 40, 60, 101, u64::MAX];
const TGIDS: [i32; 9] = [100, 101, 102, 103, 104, 105, 0, 101, -1];
const SUBJECTS: [&str; 5] = ["ns/a", "ns/b", "ns/sa", "ns/sb", "ns"];

struct World {
    broker: Broker,
    oracle: Oracle,
    people: Vec<PeerIdentity>,
    now: u64,
    sessions: u64,
    requests: u64,
    fds: u64,
    /// Every key, grant and question that the broker has issued.
    keys: Vec<Vec<u8>>,
    /// The secret and the export of each key, to register the key again.
    secrets: BTreeMap<Vec<u8>, (Vec<u8>, ExportKey)>,
    last_export: Option<ExportKey>,
    grants: Vec<Vec<u8>>,
    questions: Vec<(Ticket, Vec<i32>)>,
    dropped: BTreeSet<FdToken>,
    seen: BTreeSet<Reason>,
}

impl World {
    fn new(policy: Policy) -> Self {
        let mut entropy = Entropy::default();
        Self {
            broker: Broker::new(policy.clone(), move |bytes| entropy.fill(bytes)),
            oracle: Oracle::new(policy),
            people: people(),
            now: 0,
            sessions: 0,
            requests: 0,
            fds: 0,
            keys: Vec::new(),
            secrets: BTreeMap::new(),
            last_export: None,
            grants: Vec::new(),
            questions: Vec::new(),
            dropped: BTreeSet::new(),
            seen: BTreeSet::new(),
        }
    }

    fn fd(&mut self) -> FdToken {
        self.fds += 1;
        FdToken(self.fds)
    }

    /// A key that was issued, usually a recent one, or one that was never issued.
    fn key(&self, n: usize) -> Vec<u8> {
        let mut unknown = vec![b'0'; 64];
        unknown.push(0);
        match n {
            60 => unknown,
            61 => unknown[..64].to_vec(),
            62 => [&unknown[..], b"0"].concat(),
            63 => Vec::new(),
            _ => pick(&self.keys, n).unwrap_or(unknown),
        }
    }

    fn request(&mut self, ask: Ask) -> (Request, Vec<FdToken>) {
        use request::Op;
        let (is_nothing, is_other) = (matches!(ask, Ask::Nothing), matches!(ask, Ask::OtherVersion));
        let mut fds = Vec::new();
        let op = match ask {
            Ask::Hello => Op::Hello(Hello {}),
            Ask::Other(0) => Op::Attach(Attach::default()),
            Ask::Other(1) => Op::Offer(Offer {}),
            Ask::Other(2) => Op::Seated(Seated { seat: 1, word: 1 }),
            Ask::Other(3) => Op::ListProcesses(ListProcesses { skip: 0 }),
            Ask::Other(_) => Op::ListKeys(ListKeys { skip: 0 }),
            Ask::Detach => Op::Detach(Detach {}),
            Ask::BareTgid | Ask::Nothing | Ask::OtherVersion => Op::BareTgid(BareTgid {}),
            Ask::List(skip) => Op::List(List { skip }),
            Ask::Export { size, flags, mechanism, odd_handle, odd_fds } => {
                let takes = match Mechanism::try_from(mechanism) {
                    Ok(Mechanism::Host) => (1, 0),
                    Ok(Mechanism::CudaVmm) => (1, 16),
                    Ok(Mechanism::Ascend) => (0, 65),
                    Ok(Mechanism::CudaLegacy) => (0, 84),
                    _ => (0, 0),
                };
                let count = takes.0 + usize::from(odd_fds);
                fds = (0..count).map(|_| self.fd()).collect();
                let export = ExportKey {
                    size: SIZES[size % SIZES.len()],
                    flags: if flags < 48 { 0 } else { [1, 1, 1, 2][flags % 4] },
                    mechanism,
                    handle: vec![7; takes.1 + usize::from(odd_handle)],
                };
                self.last_export = Some(export.clone());
                Op::ExportKey(export)
            }
            Ask::Admit { key, tgids, subjects } => {
                let named = |kind: usize| {
                    let of_kind = subjects.iter().filter(|s| (**s / 8) % 2 == kind);
                    // The invalid subject is rare.
                    of_kind.map(|s| SUBJECTS[if *s == 63 { 4 } else { s % 4 }].to_owned()).collect()
                };
                Op::SetImportPid(SetImportPid {
                    key: self.key(key),
                    bare_tgids: tgids.iter().map(|t| TGIDS[if *t == 63 { 8 } else { t % 8 }]).collect(),
                    pods: named(0),
                    service_accounts: named(1),
                })
            }
            Ask::AdmitMany(key, many) => {
                let key = self.key(key);
                Op::SetImportPid(SetImportPid { key, bare_tgids: vec![101; many], ..Default::default() })
            }
            Ask::Import(key) => Op::ImportByKey(ImportByKey { key: self.key(key) }),
            Ask::Ack(63, done) => Op::Ack(Ack { grant: vec![1; 15], done }),
            Ask::Ack(62, done) => Op::Ack(Ack { grant: vec![1; 16], done }),
            Ask::Ack(n, done) => {
                let grant = pick(&self.grants, n).unwrap_or(vec![1; 16]);
                Op::Ack(Ack { grant, done })
            }
            Ask::Stands(63) => Op::Stands(Stands { grant: vec![1; 15] }),
            Ask::Stands(n) => Op::Stands(Stands { grant: pick(&self.grants, n).unwrap_or(vec![1; 16]) }),
            Ask::Close(key, force) => Op::Close(Close { key: self.key(key), force }),
            Ask::Claim(key) => Op::Claim(Claim { key: self.key(key) }),
            Ask::Restore { key, tgids, closing, odd } => {
                let key = self.key(key);
                let restore = self.restore(key, &tgids, closing, odd);
                fds = restore.1;
                Op::Restore(restore.0)
            }
        };
        self.requests += 1;
        let mut request = Request::new(self.requests, op);
        if is_nothing {
            request.op = None;
        }
        if is_other {
            request.version = 2;
        }
        (request, fds)
    }

    /// With as many descriptors as the mechanism needs.
    fn restore(
        &mut self,
        key: Vec<u8>,
        tgids: &[usize],
        closing: bool,
        odd: usize,
    ) -> (Restore, Vec<FdToken>) {
        let (secret, export) = self.secrets.get(&key).cloned().unzip();
        let takes = export.as_ref().is_some_and(|e| matches!(e.mechanism, 1 | 2));
        let fds = (0..usize::from(takes)).map(|_| self.fd()).collect();
        let admitted = |tgid: &usize| Admitted {
            bare_tgid: TGIDS[if *tgid == 63 { 8 } else { tgid % 6 }],
            start_time: 1 + (*tgid as u64 / 8) % 2,
            pidfd_inode: 0,
        };
        let mut restore = Restore {
            key,
            secret: secret.unwrap_or(vec![7; 32]),
            export,
            admitted: tgids.iter().map(admitted).collect(),
            closing,
            ..Restore::default()
        };
        match odd {
            61 => restore.secret = vec![7; 32],
            62 => restore.secret = Vec::new(),
            63 => restore.admitted = vec![admitted(&0); 129],
            60 => restore.pods = vec!["ns".into()],
            40..50 => restore.more = true,
            50..60 => restore.pods = vec!["ns/a".into()],
            _ => {}
        }
        (restore, fds)
    }

    /// Most clients that had a session or a key reconnect, each with a new session, and report what they have.
    fn restart(&mut self, order: usize, who: usize) -> Result<(), TestCaseError> {
        let mut holders = self.oracle.holders();
        let (oracle, mut entropy) = self.oracle.restarted();
        let policy = oracle.policy();
        self.dropped.extend(self.oracle.fds());
        self.oracle = oracle;
        self.broker = Broker::new(policy, move |bytes| entropy.fill(bytes));
        self.check(Command::Recover)?;
        let middle = order.checked_rem(holders.len()).unwrap_or(0);
        holders.rotate_left(middle);
        if order.is_multiple_of(2) {
            holders.reverse();
        }
        let mut sessions = BTreeMap::new();
        let mut further = Vec::new();
        for (n, (peer, key, restore)) in holders.into_iter().enumerate() {
            let process = ProcessId::of(&peer).expect("a process");
            if who % 8 == n % 8 || who == 63 {
                continue;
            }
            let session = match sessions.get(&process) {
                Some(session) => *session,
                None => {
                    self.sessions += 1;
                    let session = SessionId(self.sessions);
                    self.check(Command::Opened { session, peer: Some(peer) })?;
                    *sessions.entry(process).or_insert(session)
                }
            };
            let (op, fds) = match restore {
                None => (request::Op::Claim(Claim { key }), Vec::new()),
                Some(mut restore) => {
                    let (said, fds) = self.restore(key.clone(), &[], restore.closing, 0);
                    (restore.secret, restore.export) = (said.secret, said.export);
                    // Sometimes in two packets, between which all other clients try to import the key.
                    if restore.admitted.len() > 1 && order % 4 < 2 {
                        let mut second = restore.clone();
                        second.admitted = restore.admitted.split_off(1);
                        restore.more = true;
                        further.push((session, key, second));
                    }
                    (request::Op::Restore(restore), fds)
                }
            };
            self.ask(session, op, fds)?;
        }
        for (session, key, second) in further {
            for other in self.oracle.sides(&key).1 {
                let op = if order.is_multiple_of(4) {
                    request::Op::ImportByKey(ImportByKey { key: key.clone() })
                } else {
                    request::Op::Claim(Claim { key: key.clone() })
                };
                self.ask(other, op, Vec::new())?;
            }
            let takes = second.export.as_ref().is_some_and(|e| matches!(e.mechanism, 1 | 2));
            let fds = (0..usize::from(takes)).map(|_| self.fd()).collect();
            self.ask(session, request::Op::Restore(second), fds)?;
        }
        Ok(())
    }

    fn ask(&mut self, session: SessionId, op: request::Op, fds: Vec<FdToken>) -> Result<(), TestCaseError> {
        self.requests += 1;
        let request = Request::new(self.requests, op);
        self.check(Command::Request { session, request, fds })
    }

    fn leave(&mut self, key: usize) -> Result<(), TestCaseError> {
        let key = pick(&self.oracle.keys(), key).unwrap_or_default();
        let (own, others) = self.oracle.sides(&key);
        for session in own {
            self.check(Command::Closed { session })?;
        }
        for session in others {
            self.requests += 1;
            let request =
                Request::new(self.requests, request::Op::ImportByKey(ImportByKey { key: key.clone() }));
            self.check(Command::Request { session, request, fds: Vec::new() })?;
        }
        Ok(())
    }

    fn command(&mut self, step: Step) -> Command {
        // Sometimes a session that has ended or never existed.
        let session = |me: &Self, n: usize| match n {
            62.. => SessionId(1 + n as u64 % (me.sessions + 1)),
            _ => pick(&me.oracle.sessions(), n).unwrap_or(SessionId(1)),
        };
        match step {
            Step::Open(n) => {
                self.sessions += 1;
                let peer = self.people.get(n % 17 % 9).cloned();
                Command::Opened { session: SessionId(self.sessions), peer }
            }
            Step::OpenAgain(n) => {
                // A session number that is in use, which would be an error of the socket layer.
                let Some(session) = pick(&self.oracle.sessions(), n) else { return Command::Tick };
                Command::Opened { session, peer: self.people.first().cloned() }
            }
            Step::Closed(n) => Command::Closed { session: session(self, n) },
            Step::Ask(n, extra, ask) => {
                let (request, mut fds) = self.request(ask);
                if extra {
                    fds.push(self.fd());
                }
                Command::Request { session: session(self, n), request, fds }
            }
            Step::Died(n) => {
                let PeerIdentity { bare_tgid, start_time, pidfd_inode, .. } =
                    self.people[n % self.people.len()];
                Command::Died { process: ProcessId { bare_tgid, start_time, pidfd_inode } }
            }
            Step::Resolved(n, mask) => {
                let Some((ticket, asked)) = pick(&self.questions, n) else { return Command::Tick };
                let alive = |tgid: &i32| {
                    let start_time = 1 + (mask as u64 & 1);
                    PeerIdentity { bare_tgid: *tgid, start_time, ..PeerIdentity::default() }
                };
                if mask % 16 == 15 {
                    return Command::Unanswered { ticket };
                }
                // Usually all are alive. The last one was not asked about.
                let all = asked.iter().skip(usize::from(mask % 8 == 7)).map(alive);
                Command::Resolved { ticket, found: all.chain([alive(&100)]).collect() }
            }
            Step::Wait(millis) => {
                self.now += millis;
                Command::Tick
            }
            Step::UntilDeadline => {
                self.now = self.broker.next_deadline().map_or(self.now, |deadline| deadline.0);
                Command::Tick
            }
            Step::Drain => Command::Drain,
            Step::Restart(..) | Step::Leave(_) => Command::Tick,
        }
    }

    fn apply(&mut self, step: Step) -> Result<(), TestCaseError> {
        if let Step::Restart(order, who) = step {
            return self.restart(order, who);
        }
        if let Step::Leave(key) = step {
            return self.leave(key);
        }
        let command = self.command(step);
        self.check(command)
    }

    fn check(&mut self, command: Command) -> Result<(), TestCaseError> {
        let expected = self.oracle.handle(self.now, &command);
        let effects = self.broker.handle(Millis(self.now), command.clone());

        let mut got = Vec::new();
        for effect in effects {
            self.look(&effect)?;
            got.push(out(effect));
        }
        // In any order: the oracle's order differs.
        let mut missing = expected;
        got.retain(|out| {
            let found = missing.iter().position(|other| other == out);
            found.map(|n| missing.swap_remove(n)).is_none()
        });
        prop_assert!(got.is_empty() && missing.is_empty(), "{command:?}: {got:?} instead of {missing:?}");

        prop_assert_eq!(self.broker.check(), Ok(()), "{:?}", command);
        prop_assert_eq!(self.broker.stats(), self.oracle.stats());
        // The view of an operator.
        for skip in [0_u32, 2, 100] {
            let mut seen = self.broker.all_keys(skip);
            seen.keys.iter_mut().for_each(|key| key.hash.clear());
            prop_assert_eq!(seen, self.oracle.all_keys(skip as usize));
        }
        for process in self.people.iter().filter_map(ProcessId::of) {
            prop_assert_eq!(self.broker.holdings(&process), self.oracle.holdings(process));
        }
        prop_assert_eq!(self.broker.next_deadline(), self.oracle.next_deadline());
        prop_assert_eq!(
            self.broker.is_idle(),
            self.oracle.keys().is_empty() && self.oracle.stats().questions == 0
        );
        // Every descriptor is held or was dropped.
        let held = BTreeSet::from_iter(self.oracle.fds());
        let all = BTreeSet::from_iter((1..=self.fds).map(FdToken));
        prop_assert_eq!(&(&held | &self.dropped), &all);
        prop_assert!(held.is_disjoint(&self.dropped));
        Ok(())
    }

    /// Checks one effect by itself, and records what was issued.
    fn look(&mut self, effect: &Effect) -> Result<(), TestCaseError> {
        match effect {
            Effect::DropFd(fd) => prop_assert!(self.dropped.insert(*fd), "dropped twice: {fd:?}"),
            Effect::Reply { reply, fd, .. } => {
                prop_assert!(fd.is_none_or(|fd| !self.dropped.contains(&fd)), "sent after it was dropped");
                let size = shmesh_proto::packet::encode(reply).len();
                prop_assert!(size <= shmesh_proto::limits::MAX_PACKET_BYTES);
                match &reply.result {
                    Some(reply::Result::Exported(exported)) if !exported.secret.is_empty() => {
                        self.keys.push(exported.key.clone());
                        let export = self.last_export.clone().expect("it was requested");
                        self.secrets.insert(exported.key.clone(), (exported.secret.clone(), export));
                    }
                    Some(reply::Result::Imported(imported)) => self.grants.push(imported.grant.clone()),
                    _ => {}
                }
            }
            Effect::Event { happened: shmesh_proto::broker::event::SessionEvent::Admit(admit), .. } => {
                self.grants.push(admit.grant.clone());
            }
            Effect::Resolve { ticket, bare_tgids } => self.questions.push((*ticket, bare_tgids.clone())),
            Effect::Audit(record) => {
                let line = record.to_line();
                prop_assert!(!line.contains('\n'));
                for key in &self.keys {
                    prop_assert!(!line.contains(std::str::from_utf8(&key[..64]).expect("digits")));
                }
                prop_assert_eq!(
                    record.reason.is_none(),
                    matches!(record.outcome, Outcome::Done | Outcome::Waits)
                );
                self.seen.extend(record.reason);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Selects one element: every second time one of the last four.
fn pick<T: Clone>(all: &[T], n: usize) -> Option<T> {
    let from = if n.is_multiple_of(2) { all.len().saturating_sub(4) } else { 0 };
    let recent = all.get(from..)?;
    recent.get((n / 2).checked_rem(recent.len())?).cloned()
}

fn out(effect: Effect) -> Out {
    match effect {
        Effect::Reply { session, reply, fd } => match reply.result.expect("a reply has a result") {
            reply::Result::Refused(refused) => {
                Out::Refused(session, reply.id, refused.code(), refused.importers)
            }
            reply::Result::Keys(mut keys) => {
                keys.keys.iter_mut().for_each(|listed| listed.hash.clear());
                Out::Reply(session, reply.id, reply::Result::Keys(keys), fd)
            }
            result => Out::Reply(session, reply.id, result, fd),
        },
        Effect::Event { session, happened } => Out::Event(session, happened),
        Effect::CloseSession(session) => Out::CloseSession(session),
        Effect::DropFd(fd) => Out::DropFd(fd),
        Effect::Watch(process) => Out::Watch(process),
        Effect::Unwatch(process) => Out::Unwatch(process),
        Effect::Resolve { ticket, bare_tgids } => Out::Resolve(ticket, bare_tgids),
        Effect::Audit(record) => Out::Audit(record.op, record.outcome, record.reason),
        Effect::Denied(reason) => Out::Denied(reason),
    }
}

fn cases() -> impl Strategy<Value = (Policy, Vec<Step>)> {
    let steps = prop::collection::vec(any::<u64>(), 1..150);
    (policy(), steps.prop_map(|all| all.into_iter().map(|number| Dice(number).step()).collect()))
}

fn run(policy: Policy, steps: Vec<Step>) -> Result<BTreeSet<Reason>, TestCaseError> {
    let mut world = World::new(policy);
    // Some clients are connected from the start.
    for who in [0, 1, 3, 6, 0] {
        world.apply(Step::Open(who))?;
    }
    for step in steps {
        world.apply(step)?;
    }
    // When all processes have died, no state is left.
    for who in 0..world.people.len() {
        world.apply(Step::Died(who))?;
    }
    let left = world.broker.stats();
    prop_assert_eq!(
        (left.keys, left.imports, left.grants, left.processes, left.descriptors),
        (0, 0, 0, 0, 0)
    );
    Ok(world.seen)
}

fn random_sequences(cases_count: u32) {
    let config = Config { cases: cases_count, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&cases(), |(policy, steps)| run(policy, steps).map(drop));
    result.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn broker_matches_the_oracle() {
    random_sequences(60);
}

#[test]
#[ignore = "long: 5,000 sequences"]
fn broker_matches_the_oracle_in_thousands_of_sequences() {
    random_sequences(5000);
}

/// Reasons that are never reached are not tested. The sequences are always the same, so the result is deterministic.
#[test]
#[ignore = "long: 1,500 sequences"]
fn sequences_reach_every_reason() {
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let config = Config { cases: 1500, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let into = Arc::clone(&seen);
    let result = runner.run(&cases(), |(policy, steps)| {
        let reasons = run(policy, steps)?;
        into.lock().expect("no thread has panicked").extend(reasons);
        Ok(())
    });
    result.expect("as the other test");
    let seen = seen.lock().expect("no thread has panicked");
    // The entropy source of this test never repeats.
    let is_for_others = |r: &Reason| *r == Reason::Entropy || Reason::OF_THE_SOCKET.contains(r);
    let missed: Vec<_> = Reason::ALL.iter().filter(|r| !seen.contains(r) && !is_for_others(r)).collect();
    assert!(missed.is_empty(), "{missed:?}");
}

#[test]
fn refusal_does_not_reveal_whether_a_key_exists() {
    let refusals = |effects: Vec<Effect>| {
        effects.into_iter().find_map(|effect| match effect {
            Effect::Reply { reply, .. } => match reply.result {
                Some(reply::Result::Refused(refused)) => Some(refused),
                _ => None,
            },
            _ => None,
        })
    };
    let mut world = World::new(Policy::default());
    for who in [0, 1] {
        let open = world.command(Step::Open(who));
        world.broker.handle(Millis(0), open);
    }
    let export = Ask::Export { size: 1, flags: 0, mechanism: 1, odd_handle: false, odd_fds: false };
    let (request, fds) = world.request(export);
    let effects = world.broker.handle(Millis(0), Command::Request { session: SessionId(1), request, fds });
    effects.iter().for_each(|effect| world.look(effect).expect("an export"));
    // The first key exists, the second does not.
    let mut ask = |key| {
        let mut all = Vec::new();
        for ask in [
            Ask::Import(key),
            Ask::Close(key, false),
            Ask::Admit { key, tgids: vec![0], subjects: Vec::new() },
        ] {
            let (request, fds) = world.request(ask);
            let session = SessionId(2);
            all.push(refusals(world.broker.handle(Millis(0), Command::Request { session, request, fds })));
        }
        all
    };
    let there = ask(0);
    assert_eq!(there, ask(60));
    assert!(there.iter().flatten().all(|refused| refused.code() == Code::Denied));
    assert_eq!(there.iter().flatten().count(), 3);
}
