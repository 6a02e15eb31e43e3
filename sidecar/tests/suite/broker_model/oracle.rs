//! The oracle: the same rules, implemented again with lists and loops, and without redundant state.

use sha2::{Digest as _, Sha256};
use shmesh_proto::broker::event::SessionEvent;
use shmesh_proto::broker::{
    Admit, Admitted, AllKeys, Code, Done, ExportKey, Exported, Imported, KeyInfo, Keys, Listed, Mechanism,
    Request, Restore, Tgid, Welcome, reply, request,
};
use shmesh_proto::identity::PeerIdentity;
use shmesh_proto::key::DeviceKey;
use shmesh_sidecar::broker::{
    Command, FdToken, Holdings, Millis, Op, Outcome, Policy, ProcessId, Reason, SessionId, Stats, Ticket,
};

/// An effect without the parts that the oracle does not predict: texts, hashes, and the other party of a record.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Out {
    Reply(SessionId, u64, reply::Result, Option<FdToken>),
    Refused(SessionId, u64, Code, Vec<i32>),
    Event(SessionId, SessionEvent),
    CloseSession(SessionId),
    DropFd(FdToken),
    Watch(ProcessId),
    Unwatch(ProcessId),
    Resolve(Ticket, Vec<i32>),
    Audit(Op, Outcome, Option<Reason>),
    Denied(Reason),
}

/// A counter in place of random numbers.
#[derive(Clone, Default)]
pub(crate) struct Entropy(u64);

impl Entropy {
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        self.0 += 1;
        bytes.fill(0xa5);
        bytes[..8].copy_from_slice(&self.0.to_le_bytes());
    }
}

struct Import {
    by: ProcessId,
    session: SessionId,
    /// The request that waits for the exporter.
    waits: Option<u64>,
    /// The session on which the exporter was asked.
    asked: Option<SessionId>,
    grant: Option<Vec<u8>>,
}

struct Region {
    /// Changes when the key ends and is registered again.
    number: u64,
    key: Vec<u8>,
    exporter: ProcessId,
    session: SessionId,
    size: u64,
    mechanism: Mechanism,
    handle: Vec<u8>,
    fd: Option<FdToken>,
    open: bool,
    closing: bool,
    awaited: bool,
    /// More of the processes that it admits will follow.
    partial: bool,
    /// Its exporter's close was refused as busy, while importers were awaited.
    wanted: bool,
    pids: Vec<ProcessId>,
    subjects: Vec<(char, String)>,
    imports: Vec<Import>,
}

impl Region {
    fn importers(&self) -> Vec<ProcessId> {
        let mut all: Vec<_> = self.imports.iter().filter(|i| i.waits.is_none()).map(|i| i.by).collect();
        all.sort();
        all
    }
}

struct Grant {
    bytes: Vec<u8>,
    key: Vec<u8>,
    importer: ProcessId,
    for_exporter: bool,
    deadline: u64,
    over: Option<Reason>,
}

struct Question {
    ticket: Ticket,
    session: SessionId,
    request: u64,
    key: Vec<u8>,
    region: u64,
    known: Vec<ProcessId>,
    asked: Vec<i32>,
    subjects: Vec<(char, String)>,
    deadline: u64,
}

/// An import from before the restart, or an import request that waits for a key from then.
struct Former {
    key: Vec<u8>,
    by: PeerIdentity,
    session: SessionId,
    /// The request that waits; without one it is a claim.
    waits: Option<u64>,
}

pub(crate) struct Oracle {
    policy: Policy,
    now: u64,
    draining: bool,
    entropy: Entropy,
    sessions: Vec<(SessionId, Option<PeerIdentity>)>,
    regions: Vec<Region>,
    grants: Vec<Grant>,
    questions: Vec<Question>,
    tickets: u64,
    numbers: u64,
    watched: Vec<PeerIdentity>,
    /// The end of the recovery from a restart.
    until: Option<u64>,
    former: Vec<Former>,
    out: Vec<Out>,
}

type Verdict = Result<Option<(reply::Result, Option<FdToken>)>, (Code, Reason, Vec<i32>)>;

fn no<T>(code: Code, reason: Reason) -> Result<T, (Code, Reason, Vec<i32>)> {
    Err((code, reason, Vec::new()))
}

const DONE: reply::Result = reply::Result::Done(Done { admitted: Vec::new() });

fn id(peer: &PeerIdentity) -> ProcessId {
    ProcessId { bare_tgid: peer.bare_tgid, start_time: peer.start_time, pidfd_inode: peer.pidfd_inode }
}

fn admitted(p: &ProcessId) -> Admitted {
    Admitted { bare_tgid: p.bare_tgid, start_time: p.start_time, pidfd_inode: p.pidfd_inode }
}

fn process(a: &Admitted) -> ProcessId {
    ProcessId { bare_tgid: a.bare_tgid, start_time: a.start_time, pidfd_inode: a.pidfd_inode }
}

/// The reply that lists processes.
fn done(pids: &[ProcessId]) -> reply::Result {
    let mut pids = pids.to_vec();
    pids.sort();
    reply::Result::Done(Done { admitted: pids.iter().map(admitted).collect() })
}

/// Derives the key from a secret.
fn key_of(secret: &[u8], exporter: &PeerIdentity) -> Vec<u8> {
    let numbers = [&exporter.bare_tgid.to_le_bytes()[..], &exporter.start_time.to_le_bytes()].concat();
    DeviceKey::from_entropy(Sha256::digest([secret, &numbers].concat()).into()).as_bytes().to_vec()
}

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("a few")
}

fn account(peer: &PeerIdentity) -> String {
    match &peer.pod {
        Some(pod) => format!("pod {}", pod.uid),
        None => format!("user {}", peer.uid),
    }
}

impl Oracle {
    pub(crate) fn new(policy: Policy) -> Self {
        Self {
            policy,
            now: 0,
            draining: false,
            entropy: Entropy::default(),
            sessions: Vec::new(),
            regions: Vec::new(),
            grants: Vec::new(),
            questions: Vec::new(),
            tickets: 0,
            numbers: 0,
            watched: Vec::new(),
            until: None,
            former: Vec::new(),
            out: Vec::new(),
        }
    }

    /// An oracle for the restarted broker, with other random numbers.
    pub(crate) fn restarted(&self) -> (Self, Entropy) {
        let new = Self { entropy: self.entropy.clone(), now: self.now, ..Self::new(self.policy.clone()) };
        (new, self.entropy.clone())
    }

    /// The keys that clients can register again: exporters with the processes that they admit, and importers.
    pub(crate) fn holders(&self) -> Vec<(PeerIdentity, Vec<u8>, Option<Restore>)> {
        let mut all = Vec::new();
        for r in &self.regions {
            let admitted = r.pids.iter().map(admitted).collect();
            let named = |kind| r.subjects.iter().filter(move |s| s.0 == kind).map(|s| s.1.clone()).collect();
            let restore = Restore {
                key: r.key.clone(),
                admitted: if r.closing { Vec::new() } else { admitted },
                pods: named('p'),
                service_accounts: named('s'),
                closing: r.closing,
                more: false,
                secret: Vec::new(),
                export: Some(ExportKey {
                    size: r.size,
                    flags: r.open.into(),
                    mechanism: r.mechanism.into(),
                    handle: r.handle.clone(),
                }),
            };
            all.push((self.peer(r.exporter), r.key.clone(), Some(restore)));
            all.extend(r.importers().into_iter().map(|p| (self.peer(p), r.key.clone(), None)));
        }
        all
    }

    /// The sessions of a key's exporter, and those of other processes.
    pub(crate) fn sides(&self, key: &[u8]) -> (Vec<SessionId>, Vec<SessionId>) {
        let exporter = self.find(key).ok().map(|r| r.exporter);
        let (own, others): (Vec<_>, Vec<_>) =
            self.sessions.iter().partition(|(_, p)| p.as_ref().map(id) == exporter && exporter.is_some());
        let ids = |all: Vec<&(SessionId, Option<PeerIdentity>)>| all.into_iter().map(|(s, _)| *s).collect();
        (ids(own), ids(others))
    }

    pub(crate) fn policy(&self) -> Policy {
        self.policy.clone()
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats {
            sessions: self.sessions.len(),
            processes: self.watched.len(),
            keys: self.regions.len(),
            bytes: self.regions.iter().map(|r| r.size).sum(),
            descriptors: self.regions.iter().filter(|r| r.fd.is_some()).count(),
            imports: self.regions.iter().map(|r| r.imports.len()).sum(),
            grants: self.grants.iter().filter(|g| g.over.is_none()).count(),
            questions: self.questions.len(),
            claims: self.former.iter().filter(|f| f.waits.is_none()).count(),
        }
    }

    pub(crate) fn all_keys(&self, skip: usize) -> AllKeys {
        let page = self.regions.iter().skip(skip).take(64);
        let info = |r: &Region| KeyInfo {
            hash: String::new(),
            size: r.size,
            mechanism: r.mechanism.into(),
            exporter: r.exporter.bare_tgid,
            importers: r.importers().iter().take(8).map(|p| p.bare_tgid).collect(),
            importer_count: count(r.importers().len()),
            admitted: count(r.pids.len() + r.subjects.len()),
            open: r.open,
            closing: r.closing,
        };
        AllKeys { keys: page.map(info).collect(), total: count(self.regions.len()) }
    }

    pub(crate) fn holdings(&self, process: ProcessId) -> Holdings {
        let imports = |r: &&Region| r.imports.iter().any(|i| i.by == process);
        Holdings {
            exports: self.regions.iter().filter(|r| r.exporter == process).count(),
            imports: self.regions.iter().filter(imports).count(),
        }
    }

    pub(crate) fn next_deadline(&self) -> Option<Millis> {
        let grants = self.grants.iter().filter(|g| g.over.is_none()).map(|g| g.deadline);
        grants.chain(self.questions.iter().map(|q| q.deadline)).chain(self.until).min().map(Millis)
    }

    pub(crate) fn fds(&self) -> Vec<FdToken> {
        self.regions.iter().filter_map(|r| r.fd).collect()
    }

    pub(crate) fn sessions(&self) -> Vec<SessionId> {
        self.sessions.iter().map(|(session, _)| *session).collect()
    }

    pub(crate) fn keys(&self) -> Vec<Vec<u8>> {
        self.regions.iter().map(|r| r.key.clone()).collect()
    }

    pub(crate) fn handle(&mut self, now: u64, command: &Command) -> Vec<Out> {
        self.now = self.now.max(now);
        self.expire();
        match command {
            Command::Opened { session, peer } => self.opened(*session, peer.clone()),
            Command::Closed { session } => {
                self.forget_session(*session);
                let waits: Vec<_> = (self.regions.iter())
                    .flat_map(|r| r.imports.iter().map(|i| (r.key.clone(), i)))
                    .filter(|(_, i)| i.session == *session && i.waits.is_some())
                    .map(|(key, i)| (key, i.by))
                    .collect();
                for (key, by) in waits {
                    self.end_import(&key, by, Reason::Cancelled);
                }
            }
            Command::Request { session, request, fds } => self.request(*session, request, fds),
            Command::Died { process } => self.died(*process),
            Command::Resolved { ticket, found } => self.resolved(*ticket, found),
            Command::Unanswered { ticket } => {
                let (late, open) =
                    std::mem::take(&mut self.questions).into_iter().partition(|q| q.ticket == *ticket);
                self.questions = open;
                self.unanswered(late);
            }
            Command::Recover => self.until = self.until.or(Some(self.now + self.policy.restore_millis)),
            Command::Tick => {}
            Command::Drain => {
                self.draining = true;
                let waits = self.former.extract_if(.., |f| f.waits.is_some()).collect::<Vec<_>>();
                for f in waits {
                    self.denied(
                        Some((f.session, f.waits.expect("waits"))),
                        Op::Import,
                        (Code::Draining, Reason::Draining, Vec::new()),
                    );
                }
            }
        }
        // A process that has nothing here is no longer watched.
        let idle = |me: &Self, process: ProcessId| {
            !me.sessions.iter().any(|(_, p)| p.as_ref().map(id) == Some(process))
                && !me
                    .regions
                    .iter()
                    .any(|r| r.exporter == process || r.imports.iter().any(|i| i.by == process))
                && !me.former.iter().any(|f| f.waits.is_none() && id(&f.by) == process)
        };
        let (gone, watched) = std::mem::take(&mut self.watched).into_iter().partition(|p| idle(self, id(p)));
        self.watched = watched;
        let gone: Vec<PeerIdentity> = gone;
        for peer in gone {
            if !matches!(command, Command::Died { process } if *process == id(&peer)) {
                self.out.push(Out::Unwatch(id(&peer)));
            }
        }
        std::mem::take(&mut self.out)
    }

    fn region(&mut self, key: &[u8]) -> Option<&mut Region> {
        self.regions.iter_mut().find(|r| r.key == key)
    }

    fn peer(&self, process: ProcessId) -> PeerIdentity {
        self.watched
            .iter()
            .find(|p| id(p) == process)
            .expect("a process that holds something is watched")
            .clone()
    }

    fn denied(
        &mut self,
        to: Option<(SessionId, u64)>,
        op: Op,
        (code, reason, who): (Code, Reason, Vec<i32>),
    ) {
        if let Some((session, request)) = to {
            self.out.push(Out::Refused(session, request, code, who));
        }
        self.out.push(Out::Audit(op, Outcome::Refused, Some(reason)));
        self.out.push(Out::Denied(reason));
    }

    fn tell(&mut self, process: ProcessId, preferred: SessionId, happened: SessionEvent) {
        let mine = self.sessions.iter().filter(|(_, p)| p.as_ref().map(id) == Some(process)).map(|(s, _)| *s);
        let mine: Vec<_> = mine.collect();
        let to = mine.iter().find(|s| **s == preferred).or(mine.iter().min());
        if let Some(session) = to {
            self.out.push(Out::Event(*session, happened));
        }
    }

    fn opened(&mut self, session: SessionId, peer: Option<PeerIdentity>) {
        if self.sessions.iter().any(|(s, _)| *s == session) {
            return;
        }
        let peer = peer.filter(|p| p.bare_tgid > 0);
        let is_new = peer.as_ref().is_some_and(|p| !self.watched.iter().any(|w| id(w) == id(p)));
        let of = |f: &dyn Fn(&PeerIdentity) -> bool| {
            self.sessions.iter().filter(|(_, p)| p.as_ref().is_some_and(f)).count()
        };
        let policy = &self.policy;
        let problem = if self.sessions.len() >= policy.sessions {
            Some(Reason::Sessions)
        } else if let Some(peer) = &peer {
            let ours = self.watched.iter().filter(|w| account(w) == account(peer)).count();
            if of(&|p| account(p) == account(peer)) >= policy.sessions_per_account {
                Some(Reason::SessionsOfAccount)
            } else if !is_new {
                (of(&|p| id(p) == id(peer)) >= policy.sessions_per_process)
                    .then_some(Reason::SessionsOfProcess)
            } else if ours >= policy.processes_per_account {
                Some(Reason::ProcessesOfAccount)
            } else {
                (self.watched.len() >= policy.processes).then_some(Reason::Processes)
            }
        } else {
            let unknown = self.sessions.iter().filter(|(_, p)| p.is_none()).count();
            (unknown >= policy.sessions_unidentified).then_some(Reason::SessionsUnidentified)
        };
        if let Some(reason) = problem {
            self.denied(Some((session, 0)), Op::Open, (Code::Limit, reason, Vec::new()));
            self.out.push(Out::CloseSession(session));
            return;
        }
        if is_new && let Some(peer) = &peer {
            self.watched.push(peer.clone());
            self.out.push(Out::Watch(id(peer)));
        }
        self.sessions.push((session, peer));
    }

    fn forget_session(&mut self, session: SessionId) {
        self.sessions.retain(|(s, _)| *s != session);
        self.questions.retain(|q| q.session != session);
        self.former.retain(|f| f.waits.is_none() || f.session != session);
    }

    /// Ends the claims of a process, and returns them.
    fn end_claims(&mut self, by: impl Fn(&Former) -> bool, why: Option<Reason>) -> Vec<Former> {
        let ended: Vec<_> = self.former.extract_if(.., |f| f.waits.is_none() && by(f)).collect();
        if let Some(why) = why {
            self.out.extend(ended.iter().map(|_| Out::Audit(Op::Claim, Outcome::Ended, Some(why))));
        }
        ended
    }

    fn died(&mut self, dead: ProcessId) {
        if !self.watched.iter().any(|w| id(w) == dead) {
            return;
        }
        self.end_claims(|f| id(&f.by) == dead, Some(Reason::ImporterDied));
        for key in self.keys() {
            if self.regions.iter().any(|r| r.key == key && r.imports.iter().any(|i| i.by == dead)) {
                self.end_import(&key, dead, Reason::ImporterDied);
            }
        }
        for key in self.keys() {
            let Some(region) = self.region(&key).filter(|r| r.exporter == dead) else { continue };
            let all: Vec<_> = region.imports.iter().map(|i| (i.by, i.session, i.waits)).collect();
            for (by, session, waits) in all {
                if waits.is_none() {
                    self.tell(by, session, SessionEvent::RegionLost(key.clone()));
                }
                self.take_import(&key, by, Reason::ExporterDied);
            }
            self.take_region(&key, Reason::ExporterDied);
        }
        let mine = self.sessions.iter().filter(|(_, p)| p.as_ref().map(id) == Some(dead)).map(|(s, _)| *s);
        for session in mine.collect::<Vec<_>>() {
            self.out.push(Out::CloseSession(session));
            self.forget_session(session);
        }
    }

    fn expire(&mut self) {
        for n in 0..self.grants.len() {
            let grant = &mut self.grants[n];
            if grant.over.is_some() || grant.deadline > self.now {
                continue;
            }
            grant.over = Some(Reason::GrantExpired);
            let (key, importer) = (grant.key.clone(), grant.importer);
            if grant.for_exporter {
                let exporter = self.find(&key).expect("a grant has its region").exporter;
                let is_there = self.sessions.iter().any(|(_, p)| p.as_ref().map(id) == Some(exporter));
                let why = if is_there { Reason::GrantExpired } else { Reason::ExporterAway };
                self.end_import(&key, importer, why);
            } else {
                let region = self.region(&key).expect("a grant has its region");
                region.imports.iter_mut().filter(|i| i.by == importer).for_each(|i| i.grant = None);
                self.out.push(Out::Audit(Op::Ack, Outcome::Ended, Some(Reason::GrantExpired)));
            }
        }
        let now = self.now;
        let (late, open) = std::mem::take(&mut self.questions).into_iter().partition(|q| q.deadline <= now);
        self.questions = open;
        self.unanswered(late);
        if self.until.is_some_and(|until| until <= now) {
            self.settle();
        }
    }

    /// Marks what was not registered again as lost.
    fn settle(&mut self) {
        self.until = None;
        self.regions.iter_mut().for_each(|r| r.partial = false);
        let waiting = self.former.extract_if(.., |f| f.waits.is_some()).collect();
        self.resume(waiting);
        for f in self.end_claims(|_| true, Some(Reason::NotRestored)) {
            self.tell(id(&f.by), f.session, SessionEvent::RegionLost(f.key));
        }
        for key in self.keys() {
            let region = self.region(&key).expect("it is there");
            let is_waited_for = region.closing || region.wanted;
            if std::mem::take(&mut region.awaited) && is_waited_for && region.importers().is_empty() {
                let (exporter, session, closing) = (region.exporter, region.session, region.closing);
                self.tell(exporter, session, SessionEvent::Unused(key.clone()));
                if closing {
                    self.take_region(&key, Reason::Closing);
                }
            }
        }
    }

    fn unanswered(&mut self, late: Vec<Question>) {
        for q in late {
            let why = (Code::Unidentified, Reason::NoAnswer, Vec::new());
            self.denied(Some((q.session, q.request)), Op::Admit, why);
        }
    }

    fn take_region(&mut self, key: &[u8], why: Reason) {
        let n = self.regions.iter().position(|r| r.key == key).expect("it is there");
        let region = self.regions.remove(n);
        assert!(region.imports.is_empty());
        self.out.extend(region.fd.map(Out::DropFd));
        self.out.push(Out::Audit(Op::Export, Outcome::Ended, Some(why)));
    }

    fn take_import(&mut self, key: &[u8], by: ProcessId, why: Reason) -> Import {
        let region = self.region(key).expect("it is there");
        let n = region.imports.iter().position(|i| i.by == by).expect("it is there");
        let import = region.imports.remove(n);
        for grant in self.grants.iter_mut().filter(|g| Some(&g.bytes) == import.grant.as_ref()) {
            grant.over = grant.over.or(Some(Reason::GrantCancelled));
        }
        let listens = self.sessions.iter().any(|(s, _)| *s == import.session);
        match import.waits {
            Some(request) if listens && why != Reason::ImporterDied => {
                self.denied(Some((import.session, request)), Op::Import, (Code::Denied, why, Vec::new()));
            }
            _ => self.out.push(Out::Audit(Op::Import, Outcome::Ended, Some(why))),
        }
        import
    }

    fn end_import(&mut self, key: &[u8], by: ProcessId, why: Reason) {
        let was_delivered = self.take_import(key, by, why).waits.is_none();
        let region = self.region(key).expect("it is there");
        if was_delivered && region.importers().is_empty() && !(region.closing && region.awaited) {
            let (exporter, session, closing) = (region.exporter, region.session, region.closing);
            self.tell(exporter, session, SessionEvent::Unused(key.to_vec()));
            if closing {
                self.take_region(key, Reason::Closing);
            }
        }
    }

    fn request(&mut self, session: SessionId, request: &Request, fds: &[FdToken]) {
        use request::Op as Ask;
        let op = match &request.op {
            None => Op::Nothing,
            Some(Ask::Hello(_)) => Op::Hello,
            Some(Ask::Attach(_) | Ask::Proof(_)) => Op::Attach,
            Some(Ask::Seated(_)) => Op::Seated,
            Some(Ask::Offer(_)) => Op::Offer,
            Some(Ask::ListProcesses(_) | Ask::ListKeys(_)) => Op::Inspect,
            Some(Ask::PoolMemory(_)) => Op::PoolMemory,
            Some(Ask::Detach(_)) => Op::Detach,
            Some(Ask::BareTgid(_)) => Op::BareTgid,
            Some(Ask::ExportKey(_)) => Op::Export,
            Some(Ask::SetImportPid(_)) => Op::Admit,
            Some(Ask::ImportByKey(_)) => Op::Import,
            Some(Ask::Ack(_)) => Op::Ack,
            Some(Ask::Stands(_)) => Op::Stands,
            Some(Ask::Close(_)) => Op::Close,
            Some(Ask::List(_)) => Op::List,
            Some(Ask::Restore(_)) => Op::Restore,
            Some(Ask::Claim(_)) => Op::Claim,
        };
        let known = self.sessions.iter().any(|(s, _)| *s == session);
        let verdict = self.verdict(session, request, fds);
        let is_kept = fds.iter().any(|fd| self.regions.iter().any(|r| r.fd == Some(*fd)));
        match verdict {
            Ok(Some((result, fd))) => {
                self.out.push(Out::Reply(session, request.id, result, fd));
                if !matches!(op, Op::Hello | Op::BareTgid | Op::List | Op::Stands) {
                    self.out.push(Out::Audit(op, Outcome::Done, None));
                }
            }
            Ok(None) => self.out.push(Out::Audit(op, Outcome::Waits, None)),
            Err(why) => self.denied(known.then_some((session, request.id)), op, why),
        }
        if op == Op::Restore {
            let (back, stay) = std::mem::take(&mut self.former)
                .into_iter()
                .partition(|f| f.waits.is_some() && !self.may_come_back(&f.by, &f.key));
            self.former = stay;
            self.resume(back);
        }
        if !is_kept {
            self.out.extend(fds.iter().copied().map(Out::DropFd));
        }
    }

    fn resume(&mut self, waiting: Vec<Former>) {
        for f in waiting {
            let request = f.waits.expect("it waits");
            match self.import(f.session, request, &f.by, &f.key) {
                Ok(Some((result, fd))) => {
                    self.out.push(Out::Reply(f.session, request, result, fd));
                    self.out.push(Out::Audit(Op::Import, Outcome::Done, None));
                }
                Ok(None) => self.out.push(Out::Audit(Op::Import, Outcome::Waits, None)),
                Err(why) => self.denied(Some((f.session, request)), Op::Import, why),
            }
        }
    }

    /// Whether a broker from before the restart may have had this key, or admitted this process to it.
    fn may_come_back(&self, peer: &PeerIdentity, key: &[u8]) -> bool {
        let me = id(peer);
        match self.find(key) {
            Err((_, reason, _)) => reason == Reason::UnknownKey,
            Ok(r) => {
                r.partial
                    && r.exporter != me
                    && r.imports.iter().all(|i| i.by != me)
                    && self.admits(key, peer).is_err()
            }
        }
    }

    fn verdict(&mut self, session: SessionId, request: &Request, fds: &[FdToken]) -> Verdict {
        use request::Op as Ask;
        let Some((_, peer)) = self.sessions.iter().find(|(s, _)| *s == session).cloned() else {
            return no(Code::Denied, Reason::NoSession);
        };
        if request.version != 1 {
            return no(Code::Version, Reason::Version);
        }
        if !fds.is_empty() && !matches!(request.op, Some(Ask::ExportKey(_) | Ask::Restore(_))) {
            return no(Code::Invalid, Reason::BadDescriptors);
        }
        if let Some(Ask::Hello(_)) = request.op {
            return Ok(Some((reply::Result::Welcome(Welcome { identity: peer }), None)));
        }
        let Some(peer) = peer else { return no(Code::Unidentified, Reason::Unidentified) };
        let Some(ask) = &request.op else { return no(Code::Invalid, Reason::Malformed) };
        let works =
            matches!(ask, Ask::ExportKey(_) | Ask::SetImportPid(_) | Ask::ImportByKey(_) | Ask::Attach(_));
        if self.draining && works {
            return no(Code::Draining, Reason::Draining);
        }
        match ask {
            Ask::Hello(_) => unreachable!(),
            Ask::Attach(_)
            | Ask::Seated(_)
            | Ask::Offer(_)
            | Ask::Proof(_)
            | Ask::ListProcesses(_)
            | Ask::ListKeys(_)
            | Ask::PoolMemory(_) => no(Code::Unsupported, Reason::Unsupported),
            Ask::BareTgid(_) => Ok(Some((reply::Result::Tgid(Tgid { bare_tgid: peer.bare_tgid }), None))),
            Ask::ExportKey(export) => self.export(session, &peer, export, fds),
            Ask::SetImportPid(admit) => self.admit(session, request.id, &peer, admit),
            Ask::ImportByKey(import) => {
                let may_come_back = self.may_come_back(&peer, &import.key);
                let waiting =
                    self.former.iter().filter(|f| f.waits.is_some() && f.session == session).count();
                if self.until.is_some() && may_come_back && waiting < 4 {
                    let (key, waits) = (import.key.clone(), Some(request.id));
                    self.former.push(Former { key, by: peer, session, waits });
                    return Ok(None);
                }
                self.import(session, request.id, &peer, &import.key)
            }
            Ask::Restore(restore) => self.restore(session, &peer, restore, fds),
            Ask::Claim(claim) => self.claim(session, &peer, &claim.key),
            Ask::Ack(ack) => self.ack(&peer, &ack.grant, ack.done),
            Ask::Stands(stands) => self.granted(&peer, &stands.grant).map(|_| Some((DONE, None))),
            Ask::Close(close) => self.close(&peer, &close.key, close.force),
            Ask::Detach(_) => {
                self.end_claims(|f| id(&f.by) == id(&peer), Some(Reason::Cancelled));
                for key in self.keys() {
                    if self.region(&key).is_some_and(|r| r.imports.iter().any(|i| i.by == id(&peer))) {
                        self.end_import(&key, id(&peer), Reason::Cancelled);
                    }
                }
                for key in self.keys() {
                    if self.region(&key).is_some_and(|r| r.exporter == id(&peer) && !r.closing) {
                        self.close_export(&key);
                    }
                }
                Ok(Some((DONE, None)))
            }
            Ask::List(list) => {
                let me = id(&peer);
                let exports = self.regions.iter().filter(|r| r.exporter == me);
                let imports = self.regions.iter().filter(|r| r.imports.iter().any(|i| i.by == me));
                let all: Vec<_> = exports.chain(imports).collect();
                let listed = |r: &&Region| {
                    let importers: Vec<_> = r.importers().iter().map(|p| p.bare_tgid).collect();
                    let mine = r.exporter == me;
                    Listed {
                        hash: String::new(),
                        size: r.size,
                        is_exporter: mine,
                        importer_count: if mine { count(importers.len()) } else { 0 },
                        importers: if mine { importers.into_iter().take(8).collect() } else { Vec::new() },
                    }
                };
                let page = all.iter().skip(list.skip as usize).take(64).map(listed).collect();
                let keys = Keys { keys: page, total: count(all.len()) };
                Ok(Some((reply::Result::Keys(keys), None)))
            }
        }
    }

    fn may_export(&self, export: &ExportKey, fds: &[FdToken]) -> Result<(), (Code, Reason, Vec<i32>)> {
        let policy = &self.policy;
        let mechanism = export.mechanism();
        let shape = match mechanism {
            Mechanism::Ascend => (0, 65),
            Mechanism::CudaLegacy => (0, 84),
            Mechanism::CudaVmm => (1, 16),
            _ => (1, 0),
        };
        if export.size == 0 {
            return no(Code::Invalid, Reason::BadSize);
        } else if export.flags > 1 {
            return no(Code::Invalid, Reason::BadFlags);
        } else if export.flags == 1 && !policy.open_keys {
            return no(Code::Denied, Reason::OpenNotPermitted);
        } else if mechanism == Mechanism::Unspecified {
            return no(Code::Invalid, Reason::BadMechanism);
        } else if mechanism == Mechanism::CudaLegacy && !policy.cuda_legacy
            || mechanism == Mechanism::Ascend && !policy.bare_numbers
        {
            return no(Code::Denied, Reason::MechanismNotPermitted);
        } else if fds.len() != shape.0 {
            return no(Code::Invalid, Reason::BadDescriptors);
        } else if export.handle.len() != shape.1 {
            return no(Code::Invalid, Reason::BadHandle);
        }
        Ok(())
    }

    fn has_quota(
        &self,
        session: SessionId,
        peer: &PeerIdentity,
        size: u64,
    ) -> Result<(), (Code, Reason, Vec<i32>)> {
        let policy = &self.policy;
        if self.regions.len() >= policy.keys {
            return no(Code::Limit, Reason::Keys);
        }
        if self.regions.iter().filter(|r| r.session == session).count() >= policy.keys_per_session {
            return no(Code::Limit, Reason::KeysOfSession);
        }
        let ours: Vec<_> =
            self.regions.iter().filter(|r| account(&self.peer(r.exporter)) == account(peer)).collect();
        if ours.len() >= policy.keys_per_account {
            return no(Code::Limit, Reason::KeysOfAccount);
        }
        let bytes: u128 = ours.iter().map(|r| u128::from(r.size)).sum();
        if bytes + u128::from(size) > u128::from(policy.bytes_per_account) {
            return no(Code::Limit, Reason::BytesOfAccount);
        }
        Ok(())
    }

    fn export(
        &mut self,
        session: SessionId,
        peer: &PeerIdentity,
        export: &ExportKey,
        fds: &[FdToken],
    ) -> Verdict {
        self.may_export(export, fds)?;
        self.has_quota(session, peer, export.size)?;
        let mechanism = export.mechanism();
        let mut random = [0; 32];
        self.entropy.fill(&mut random);
        let key = key_of(&random, peer);
        self.numbers += 1;
        self.regions.push(Region {
            number: self.numbers,
            key: key.clone(),
            exporter: id(peer),
            session,
            size: export.size,
            mechanism,
            handle: export.handle.clone(),
            fd: fds.first().copied(),
            open: export.flags == 1,
            closing: false,
            awaited: false,
            partial: false,
            wanted: false,
            pids: Vec::new(),
            subjects: Vec::new(),
            imports: Vec::new(),
        });
        Ok(Some((reply::Result::Exported(Exported { key, secret: random.to_vec() }), None)))
    }

    fn restore(
        &mut self,
        session: SessionId,
        peer: &PeerIdentity,
        restore: &Restore,
        fds: &[FdToken],
    ) -> Verdict {
        let key = restore.key.clone();
        let is_key = !matches!(self.find(&key), Err((_, Reason::Malformed, _)));
        let (true, 32, Some(export)) = (is_key, restore.secret.len(), &restore.export) else {
            return no(Code::Invalid, Reason::Malformed);
        };
        if key_of(&restore.secret, peer) != key {
            return no(Code::Denied, Reason::NotExporter);
        }
        self.may_export(export, fds)?;
        let bad = |s: &String| s.split('/').count() != 2 || s.split('/').any(str::is_empty);
        if restore.pods.iter().chain(&restore.service_accounts).any(bad) {
            return no(Code::Invalid, Reason::BadSubject);
        } else if restore.admitted.len() > 128 {
            return no(Code::Limit, Reason::RestoredPids);
        } else if restore.admitted.iter().any(|a| a.bare_tgid <= 0) {
            return no(Code::Invalid, Reason::BadPid);
        }
        let pods = restore.pods.iter().map(|s| ('p', s.clone()));
        let subjects: Vec<_> =
            pods.chain(restore.service_accounts.iter().map(|s| ('s', s.clone()))).collect();
        let pins: Vec<ProcessId> = restore.admitted.iter().map(process).collect();
        let tgids: Vec<_> = pins.iter().map(|p| p.bare_tgid).collect();
        let admits = !pins.is_empty() || !subjects.is_empty();
        let exported = reply::Result::Exported(Exported { key: key.clone(), secret: Vec::new() });
        let there = self.regions.iter().find(|r| r.key == key).map(|r| (r.exporter, r.closing));
        match there {
            Some((exporter, _)) if exporter != id(peer) => return no(Code::Denied, Reason::NotExporter),
            Some((_, closing)) => {
                if admits && !closing {
                    self.fits(&key, &tgids, &subjects)?;
                    self.enter(&key, pins, subjects);
                }
                self.region(&key).expect("it is there").session = session;
            }
            None if restore.closing && self.until.is_none() => {
                self.out.push(Out::Event(session, SessionEvent::Unused(key)));
                return Ok(Some((exported, None)));
            }
            None => {
                self.has_quota(session, peer, export.size)?;
                self.numbers += 1;
                self.regions.push(Region {
                    number: self.numbers,
                    key: key.clone(),
                    exporter: id(peer),
                    session,
                    size: export.size,
                    mechanism: export.mechanism(),
                    handle: export.handle.clone(),
                    fd: fds.first().copied(),
                    open: export.flags == 1,
                    closing: false,
                    awaited: self.until.is_some(),
                    partial: false,
                    wanted: false,
                    pids: Vec::new(),
                    subjects: Vec::new(),
                    imports: Vec::new(),
                });
                if admits && let Err(why) = self.fits(&key, &tgids, &subjects) {
                    self.regions.pop();
                    return Err(why);
                }
                self.enter(&key, pins, subjects);
                let region = self.region(&key).expect("it is there");
                if restore.closing {
                    (region.closing, region.fd) = (true, None);
                }
            }
        }
        self.region(&key).expect("it is there").partial = restore.more && self.until.is_some();
        // Claims of processes that it admits, and imports that its exporter was asked to admit on another session.
        for n in (0..self.former.len()).rev() {
            let f = &self.former[n];
            if f.waits.is_none() && f.key == key && id(&f.by) != id(peer) && self.admits(&key, &f.by).is_ok()
            {
                let f = self.former.remove(n);
                self.enter_claim(&key, id(&f.by), f.session);
            }
        }
        let region = self.regions.iter().find(|r| r.key == key).expect("it is there");
        let mut waiting: Vec<_> = region
            .imports
            .iter()
            .filter(|i| i.waits.is_some() && i.asked != Some(session))
            .map(|i| (i.by, i.grant.clone().expect("it waits for that")))
            .collect();
        waiting.sort();
        for (by, old) in waiting {
            let mut bytes = vec![0; 16];
            self.entropy.fill(&mut bytes);
            let grant = self.grants.iter_mut().find(|g| g.bytes == old).expect("a grant");
            grant.over = Some(Reason::GrantCancelled);
            let new = Grant { bytes: bytes.clone(), key: key.clone(), over: None, ..*grant };
            self.grants.push(new);
            let region = self.region(&key).expect("it is there");
            let import = region.imports.iter_mut().find(|i| i.by == by).expect("it waits");
            (import.grant, import.asked) = (Some(bytes.clone()), Some(session));
            let admit = Admit { grant: bytes, key: key.clone(), bare_tgid: by.bare_tgid };
            self.out.push(Out::Event(session, SessionEvent::Admit(admit)));
        }
        Ok(Some((exported, None)))
    }

    fn enter_claim(&mut self, key: &[u8], by: ProcessId, session: SessionId) {
        let region = self.region(key).expect("it is there");
        region.imports.push(Import { by, session, waits: None, asked: None, grant: None });
        self.tell_of_closing(key, by, session);
    }

    fn tell_of_closing(&mut self, key: &[u8], by: ProcessId, session: SessionId) {
        if self.region(key).expect("it is there").closing {
            self.tell(by, session, SessionEvent::ExporterClosing(key.to_vec()));
        }
    }

    fn claim(&mut self, session: SessionId, peer: &PeerIdentity, key: &[u8]) -> Verdict {
        let me = id(peer);
        let is_mine = |f: &&Former| f.waits.is_none() && f.key == key && id(&f.by) == me;
        if self.until.is_some() && self.may_come_back(peer, key) {
            if !self.former.iter().any(|f| is_mine(&f)) {
                self.may_import(peer)?;
            }
            self.former.retain(|f| !is_mine(&f));
            self.former.push(Former { key: key.to_vec(), by: peer.clone(), session, waits: None });
            return Ok(Some((DONE, None)));
        }
        match self.find(key).map(|r| (r.exporter == me, r.imports.iter().find(|i| i.by == me))) {
            Err(why) => return Err(why),
            Ok((true, _)) => return no(Code::Invalid, Reason::SelfImport),
            Ok((_, Some(import))) if import.waits.is_none() => {
                self.tell_of_closing(key, me, session);
                return Ok(Some((DONE, None)));
            }
            Ok((_, Some(_))) => return no(Code::Invalid, Reason::AlreadyImported),
            Ok((_, None)) => {}
        }
        self.admits(key, peer)?;
        let region = self.find(key)?;
        if region.closing && !region.awaited {
            return no(Code::Denied, Reason::Closing);
        }
        self.may_import(peer)?;
        self.enter_claim(key, me, session);
        Ok(Some((DONE, None)))
    }

    fn may_import(&self, peer: &PeerIdentity) -> Result<(), (Code, Reason, Vec<i32>)> {
        let imports = self.regions.iter().flat_map(|r| &r.imports).map(|i| i.by);
        let claims = self.former.iter().filter(|f| f.waits.is_none()).map(|f| id(&f.by));
        let ours = imports.chain(claims).filter(|by| account(&self.peer(*by)) == account(peer));
        if ours.count() >= self.policy.imports_per_account {
            return no(Code::Limit, Reason::ImportsOfAccount);
        }
        Ok(())
    }

    fn admits(&self, key: &[u8], peer: &PeerIdentity) -> Result<(), (Code, Reason, Vec<i32>)> {
        let me = id(peer);
        let region = self.find(key)?;
        let pin = region.pids.iter().find(|p| p.bare_tgid == me.bare_tgid);
        let is_pinned = pin.is_some_and(|p| {
            p.start_time == me.start_time
                && (p.pidfd_inode == me.pidfd_inode || p.pidfd_inode == 0 || me.pidfd_inode == 0)
        });
        let is_subject = peer.pod.as_ref().filter(|pod| pod.confirmed).is_some_and(|pod| {
            let pod_name = ('p', format!("{}/{}", pod.namespace, pod.name));
            let account = ('s', format!("{}/{}", pod.namespace, pod.service_account));
            region.subjects.contains(&pod_name) || region.subjects.contains(&account)
        });
        if !region.open && !is_pinned && !is_subject {
            let why = if pin.is_some() { Reason::ProcessReplaced } else { Reason::NotAdmitted };
            return no(Code::Denied, why);
        }
        Ok(())
    }

    fn find(&self, key: &[u8]) -> Result<&Region, (Code, Reason, Vec<i32>)> {
        if key.len() != 65 || key[64] != 0 || key[..64].iter().any(|c| !(33..127).contains(c)) {
            return no(Code::Invalid, Reason::Malformed);
        }
        let found = self.regions.iter().find(|r| r.key == key);
        found.map_or_else(|| no(Code::Denied, Reason::UnknownKey), Ok)
    }

    fn admit(
        &mut self,
        session: SessionId,
        request: u64,
        peer: &PeerIdentity,
        admit: &shmesh_proto::broker::SetImportPid,
    ) -> Verdict {
        let region = self.find(&admit.key)?;
        if region.exporter != id(peer) {
            return no(Code::Denied, Reason::NotExporter);
        } else if admit.bare_tgids.len() > 31 {
            return no(Code::Limit, Reason::PidsOfCall);
        } else if admit.bare_tgids.iter().any(|t| *t < 0) {
            return no(Code::Invalid, Reason::BadPid);
        }
        let mut pids: Vec<i32> = admit.bare_tgids.clone();
        pids.retain(|t| *t != 0 && *t != peer.bare_tgid);
        pids.sort();
        pids.dedup();
        let named = admit.pods.iter().chain(&admit.service_accounts);
        if named.clone().any(|s| s.split('/').count() != 2 || s.split('/').any(str::is_empty)) {
            return no(Code::Invalid, Reason::BadSubject);
        }
        let pods = admit.pods.iter().map(|s| ('p', s.clone()));
        let mut subjects: Vec<_> =
            pods.chain(admit.service_accounts.iter().map(|s| ('s', s.clone()))).collect();
        subjects.sort();
        subjects.dedup();
        if pids.is_empty() && subjects.is_empty() {
            return no(Code::Invalid, Reason::NoProcess);
        }
        self.fits(&admit.key, &pids, &subjects)?;
        let mut known = Vec::new();
        let mut asked = Vec::new();
        for tgid in pids {
            let here: Vec<_> = self.watched.iter().map(id).filter(|p| p.bare_tgid == tgid).collect();
            if here.len() == 1 { known.push(here[0]) } else { asked.push(tgid) }
        }
        if asked.is_empty() {
            let done = done(&known);
            self.enter(&admit.key, known, subjects);
            return Ok(Some((done, None)));
        }
        if self.questions.iter().filter(|q| q.session == session).count() >= self.policy.questions_per_session
        {
            return no(Code::Limit, Reason::Questions);
        }
        let ticket = Ticket(self.tickets);
        self.tickets += 1;
        self.out.push(Out::Resolve(ticket, asked.clone()));
        let deadline = self.now + self.policy.answer_millis;
        let (key, region) = (admit.key.clone(), self.find(&admit.key)?.number);
        self.questions.push(Question {
            ticket,
            session,
            request,
            key,
            region,
            known,
            asked,
            subjects,
            deadline,
        });
        Ok(None)
    }

    fn fits(
        &self,
        key: &[u8],
        pids: &[i32],
        subjects: &[(char, String)],
    ) -> Result<(), (Code, Reason, Vec<i32>)> {
        let region = self.find(key)?;
        if region.open {
            return no(Code::Invalid, Reason::OpenKey);
        } else if region.closing {
            return no(Code::Invalid, Reason::Closing);
        }
        let mut all_pids: Vec<i32> = region.pids.iter().map(|p| p.bare_tgid).chain(pids.to_vec()).collect();
        all_pids.sort();
        all_pids.dedup();
        let mut all_subjects = [&region.subjects[..], subjects].concat();
        all_subjects.sort();
        all_subjects.dedup();
        let mine = account(&self.peer(region.exporter));
        let others = self.regions.iter().filter(|r| r.key != key && account(&self.peer(r.exporter)) == mine);
        let others: usize = others.map(|r| r.pids.len() + r.subjects.len()).sum();
        if all_pids.len() > self.policy.pids_per_key {
            return no(Code::Limit, Reason::PidsOfKey);
        } else if all_subjects.len() > self.policy.subjects_per_key {
            return no(Code::Limit, Reason::SubjectsOfKey);
        } else if all_pids.len() + all_subjects.len() + others > self.policy.admitted_per_account {
            return no(Code::Limit, Reason::AdmittedOfAccount);
        }
        Ok(())
    }

    fn enter(&mut self, key: &[u8], pids: Vec<ProcessId>, subjects: Vec<(char, String)>) {
        let region = self.region(key).expect("it is there");
        for pid in pids {
            region.pids.retain(|p| p.bare_tgid != pid.bare_tgid);
            region.pids.push(pid);
        }
        for subject in subjects {
            if !region.subjects.contains(&subject) {
                region.subjects.push(subject);
            }
        }
    }

    fn resolved(&mut self, ticket: Ticket, found: &[PeerIdentity]) {
        let Some(n) = self.questions.iter().position(|q| q.ticket == ticket) else { return };
        let q = self.questions.remove(n);
        let to = (q.session, q.request);
        let mut all = q.known.clone();
        for tgid in &q.asked {
            let Some(alive) = found.iter().find(|p| p.bare_tgid == *tgid) else {
                let why = (Code::Invalid, Reason::NotAlive, Vec::new());
                return self.denied(Some(to), Op::Admit, why);
            };
            all.push(id(alive));
        }
        let pids: Vec<_> = all.iter().map(|p| p.bare_tgid).collect();
        let is_there = self.regions.iter().any(|r| r.number == q.region);
        let fits = if is_there {
            self.fits(&q.key, &pids, &q.subjects)
        } else {
            no(Code::Denied, Reason::UnknownKey)
        };
        match fits {
            Err(why) => self.denied(Some(to), Op::Admit, why),
            Ok(()) => {
                let done = done(&all);
                self.enter(&q.key, all, q.subjects);
                self.out.push(Out::Reply(to.0, to.1, done, None));
                self.out.push(Out::Audit(Op::Admit, Outcome::Done, None));
            }
        }
    }

    fn import(&mut self, session: SessionId, request: u64, peer: &PeerIdentity, key: &[u8]) -> Verdict {
        let me = id(peer);
        let region = self.find(key)?;
        if region.exporter == me {
            return no(Code::Invalid, Reason::SelfImport);
        } else if region.imports.iter().any(|i| i.by == me) {
            return no(Code::Invalid, Reason::AlreadyImported);
        }
        self.admits(key, peer)?;
        if region.closing {
            return no(Code::Denied, Reason::Closing);
        }
        let ours = |i: &&Import| account(&self.peer(i.by)) == account(peer);
        let of_key = region.imports.iter().filter(|i| i.grant.is_some()).count();
        let imports: Vec<_> = self.regions.iter().flat_map(|r| &r.imports).filter(ours).collect();
        if of_key >= self.policy.grants_per_key {
            return no(Code::Limit, Reason::GrantsOfKey);
        } else if imports.iter().filter(|i| i.grant.is_some()).count() >= self.policy.grants_per_account {
            return no(Code::Limit, Reason::GrantsOfAccount);
        }
        self.may_import(peer)?;
        let region = self.find(key)?;
        if region.mechanism != Mechanism::Ascend || region.open {
            return Ok(Some(self.deliver(key, me, session)));
        }
        let (exporter, preferred) = (region.exporter, region.session);
        let theirs =
            self.sessions.iter().filter(|(_, p)| p.as_ref().map(id) == Some(exporter)).map(|(s, _)| *s);
        let theirs: Vec<_> = theirs.collect();
        let asked = theirs.iter().find(|s| **s == preferred).or(theirs.iter().min()).copied();
        let grant = self.promise(key, me, session, Some(request), asked);
        if let Some(session) = asked {
            let admit = Admit { grant, key: key.to_vec(), bare_tgid: me.bare_tgid };
            self.out.push(Out::Event(session, SessionEvent::Admit(admit)));
        }
        Ok(None)
    }

    fn promise(
        &mut self,
        key: &[u8],
        by: ProcessId,
        session: SessionId,
        waits: Option<u64>,
        asked: Option<SessionId>,
    ) -> Vec<u8> {
        let mut bytes = vec![0; 16];
        self.entropy.fill(&mut bytes);
        self.grants.push(Grant {
            bytes: bytes.clone(),
            key: key.to_vec(),
            importer: by,
            for_exporter: waits.is_some(),
            deadline: self.now + self.policy.grant_millis,
            over: None,
        });
        let import = Import { by, session, waits, asked, grant: Some(bytes.clone()) };
        self.region(key).expect("it is there").imports.push(import);
        bytes
    }

    fn deliver(&mut self, key: &[u8], by: ProcessId, session: SessionId) -> (reply::Result, Option<FdToken>) {
        let grant = self.promise(key, by, session, None, None);
        let region = self.region(key).expect("it is there");
        let imported = Imported {
            size: region.size,
            mechanism: region.mechanism.into(),
            handle: region.handle.clone(),
            grant,
        };
        (reply::Result::Imported(imported), region.fd)
    }

    /// The index of a grant, if it belongs to this process and is not over.
    fn granted(&mut self, peer: &PeerIdentity, bytes: &[u8]) -> Result<usize, (Code, Reason, Vec<i32>)> {
        if bytes.len() != 16 {
            return no(Code::Invalid, Reason::Malformed);
        }
        let Some(n) = self.grants.iter().position(|g| g.bytes == bytes) else {
            return no(Code::Denied, Reason::UnknownGrant);
        };
        if let Some(why) = self.grants[n].over {
            return no(Code::Denied, why);
        }
        let (key, importer, for_exporter) =
            (self.grants[n].key.clone(), self.grants[n].importer, self.grants[n].for_exporter);
        let exporter = self.region(&key).expect("a grant has its region").exporter;
        if id(peer) != if for_exporter { exporter } else { importer } {
            return no(Code::Denied, Reason::ForeignGrant);
        }
        Ok(n)
    }

    fn ack(&mut self, peer: &PeerIdentity, bytes: &[u8], done: bool) -> Verdict {
        let n = self.granted(peer, bytes)?;
        let (key, importer, for_exporter) =
            (self.grants[n].key.clone(), self.grants[n].importer, self.grants[n].for_exporter);
        self.grants[n].over = Some(Reason::GrantUsed);
        let region = self.region(&key).expect("a grant has its region");
        let at = region.imports.iter().position(|i| i.by == importer).expect("a grant has its import");
        match (for_exporter, done) {
            (true, true) => {
                let import = region.imports.remove(at);
                let (result, fd) = self.deliver(&key, importer, import.session);
                let request = import.waits.expect("it waits for this");
                self.out.push(Out::Reply(import.session, request, result, fd));
                self.out.push(Out::Audit(Op::Import, Outcome::Done, None));
            }
            (true, false) => self.end_import(&key, importer, Reason::ExporterRefused),
            (false, true) => region.imports[at].grant = None,
            (false, false) => self.end_import(&key, importer, Reason::NotMapped),
        }
        Ok(Some((DONE, None)))
    }

    fn close(&mut self, peer: &PeerIdentity, key: &[u8], force: bool) -> Verdict {
        if !self.end_claims(|f| f.key == key && id(&f.by) == id(peer), None).is_empty() {
            return Ok(Some((DONE, None)));
        }
        let region = self.find(key)?;
        if region.exporter == id(peer) {
            let importers = region.importers();
            if (region.awaited || !importers.is_empty()) && (!force || region.closing) {
                let region = self.region(key).expect("it is there");
                region.wanted = region.awaited;
                return Err((Code::Busy, Reason::Busy, importers.iter().map(|p| p.bare_tgid).collect()));
            }
            self.close_export(key);
        } else if region.imports.iter().any(|i| i.by == id(peer)) {
            self.end_import(key, id(peer), Reason::Cancelled);
        } else {
            return no(Code::Denied, Reason::NotImporter);
        }
        Ok(Some((DONE, None)))
    }

    fn close_export(&mut self, key: &[u8]) {
        let region = self.region(key).expect("it is there");
        let all: Vec<_> = region.imports.iter().map(|i| (i.by, i.session, i.waits)).collect();
        let is_used = region.awaited || !region.importers().is_empty();
        region.closing = true;
        let fd = region.fd.take();
        self.out.extend(fd.map(Out::DropFd));
        for (by, session, waits) in all {
            if waits.is_some() {
                self.take_import(key, by, Reason::Closing);
            } else {
                self.tell(by, session, SessionEvent::ExporterClosing(key.to_vec()));
            }
        }
        if !is_used {
            self.take_region(key, Reason::Closing);
        }
    }
}
