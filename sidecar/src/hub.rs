//! The hub: one task that owns all state. Sessions, deaths and identities come in as [`ToHub`]; packets go out to sessions.
//!
//! Attaching and seats are dealt with here; what concerns device keys goes through the [`Broker`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{SFlag, fstat, major};
use nix::unistd::geteuid;
use shmesh::{Participant, Recovered, SeatIndex, SeatWord};
use shmesh_daemon::descriptor::watched;
use shmesh_proto::broker::{
    self, Code, Mechanism, PoolMemory, Processes, Reply, Request, event, reply, request,
};
use shmesh_proto::identity::PeerIdentity;
use shmesh_proto::limits::VERSION;
use shmesh_proto::packet;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::audit::AuditLog;
use crate::broker::{
    Broker, Command, Credentials, Effect, FdToken, Op, Outcome, Party, ProcessId, Reason, Record, SessionId,
    Ticket,
};
use crate::identity::Resolver;
use crate::inspect;
use crate::links::{Kept, LinkIndex};
use crate::metrics::Metrics;
use crate::session::Outgoing;

/// Metrics are this old at most while something happens.
const OBSERVE_AFTER: Duration = Duration::from_millis(20);
/// Seats that one process may say it has.
const SEATS_PER_PROCESS: usize = shmesh::MAX_SEATS * 16;

/// What the hub hears.
#[derive(Debug)]
pub(crate) enum ToHub {
    Opened {
        session: SessionId,
        link: LinkIndex,
        /// As the kernel says here, without asking anybody.
        credentials: Option<Credentials>,
        identity: Option<PeerIdentity>,
        pidfd: Option<OwnedFd>,
        outgoing: mpsc::Sender<Outgoing>,
    },
    Request {
        session: SessionId,
        request: Request,
        /// Those that can be memory.
        fds: Vec<OwnedFd>,
        /// Whether there were others.
        is_strange: bool,
        /// Whether the process that made the connection has sent it.
        is_connectors: bool,
    },
    /// The answer to a question of the broker.
    Resolved {
        ticket: Ticket,
        /// `None`: nobody says.
        found: Option<Vec<PeerIdentity>>,
    },
    /// A session broke a rule, and is going to end.
    Broke {
        session: SessionId,
        reason: Reason,
    },
    Ended {
        session: SessionId,
    },
    Died(ProcessId),
    Drain,
}

#[derive(Debug)]
struct Session {
    link: LinkIndex,
    credentials: Option<Credentials>,
    process: Option<ProcessId>,
    outgoing: mpsc::Sender<Outgoing>,
    is_dismissed: bool,
}

/// A process that has connected and lives.
#[derive(Debug, Default)]
struct Process {
    identity: Option<PeerIdentity>,
    /// Links that it has attached to: its peers there hear of its death.
    links: BTreeSet<LinkIndex>,
    sessions: usize,
    is_watched_by_broker: bool,
    seats: Vec<(LinkIndex, SeatIndex, SeatWord)>,
    watch: Option<Watch>,
}

/// What tells of the end of a process.
#[derive(Debug)]
struct Watch {
    pidfd: Arc<AsyncFd<OwnedFd>>,
    task: JoinHandle<()>,
}

impl Watch {
    /// Now, whether it was told already or not.
    fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ended| ended > 0)
    }
}

/// All state of the sidecar.
#[derive(Debug)]
pub(crate) struct Hub {
    links: Arc<[Kept]>,
    broker: Broker,
    resolver: Resolver,
    metrics: Metrics,
    audit: AuditLog,
    descriptors: Descriptors,
    sessions: HashMap<SessionId, Session>,
    processes: BTreeMap<ProcessId, Process>,
    /// How many of them have attached: each takes a descriptor until it ends, connected or not.
    attached: usize,
    fds: HashMap<FdToken, Arc<OwnedFd>>,
    fds_ever: u64,
    myself: mpsc::Sender<ToHub>,
}

impl Hub {
    pub(crate) fn new(
        links: Arc<[Kept]>,
        broker: Broker,
        resolver: Resolver,
        metrics: Metrics,
        audit: AuditLog,
        descriptors: Descriptors,
        myself: mpsc::Sender<ToHub>,
    ) -> Self {
        Self {
            links,
            broker,
            resolver,
            metrics,
            audit,
            descriptors,
            sessions: HashMap::new(),
            processes: BTreeMap::new(),
            attached: 0,
            fds: HashMap::new(),
            fds_ever: 0,
            myself,
        }
    }

    /// Works until it is told to drain; nothing happens while nothing happens.
    pub(crate) async fn run(mut self, mut inbox: mpsc::Receiver<ToHub>) {
        let mut observe_at = None;
        let mut is_draining = false;
        // At the end the identity service may still answer, and it does so soon or never.
        while !is_draining || self.broker.stats().questions > 0 {
            let deadline = self.broker.next_deadline().map(|at| self.audit.instant(at));
            let told = tokio::select! {
                told = inbox.recv() => told,
                // Not for each packet: it looks at everything.
                () = until(observe_at) => {
                    self.metrics.observe(self.sessions.len(), self.broker.stats());
                    observe_at = None;
                    continue;
                }
                () = until(deadline) => {
                    self.tell_broker(Command::Tick);
                    continue;
                }
            };
            match told {
                Some(ToHub::Drain) => {
                    is_draining = true;
                    self.tell_broker(Command::Drain);
                }
                Some(told) => self.hear(told),
                None => break,
            }
            observe_at.get_or_insert_with(|| Instant::now() + OBSERVE_AFTER);
        }
        // Whoever asked before the end is answered.
        inbox.close();
        while let Ok(told) = inbox.try_recv() {
            self.hear(told);
        }
        self.audit.close();
    }

    fn hear(&mut self, told: ToHub) {
        match told {
            ToHub::Opened { session, link, credentials, identity, pidfd, outgoing } => {
                let process = identity.as_ref().and_then(ProcessId::of);
                self.sessions
                    .insert(session, Session { link, credentials, process, outgoing, is_dismissed: false });
                match process {
                    Some(process) => self.watch(process, pidfd, identity.clone()),
                    // It may say hello.
                    None => self.deny(session, Op::Open, Reason::Unidentified, None),
                }
                self.tell_broker(Command::Opened { session, peer: identity });
            }
            ToHub::Request { session, request, is_strange: true, is_connectors: true, .. }
                if request.version == VERSION =>
            {
                let text = "a descriptor came with it that is neither sealed memory nor a device";
                self.refuse(
                    session,
                    request.id,
                    Op::of(&request),
                    Code::Invalid,
                    Reason::BadDescriptors,
                    text,
                );
            }
            ToHub::Request { session, request, fds, is_connectors: true, .. } => {
                self.request(session, request, fds);
            }
            ToHub::Request { session, request, .. } => self.foreign(session, request.id),
            ToHub::Resolved { ticket, found } => self.tell_broker(match found {
                Some(found) => Command::Resolved { ticket, found },
                None => Command::Unanswered { ticket },
            }),
            ToHub::Broke { session, reason } => self.deny(session, Op::Packet, reason, None),
            ToHub::Ended { session } => self.ended(session),
            ToHub::Died(process) => self.died(process),
            ToHub::Drain => {}
        }
    }

    fn watch(&mut self, process: ProcessId, pidfd: Option<OwnedFd>, identity: Option<PeerIdentity>) {
        let known = self.processes.entry(process).or_default();
        known.sessions += 1;
        known.identity = identity;
        let (None, Some(Ok(pidfd))) = (&known.watch, pidfd.map(watched)) else { return };
        let (pidfd, hub) = (Arc::new(pidfd), self.myself.clone());
        let ended = Arc::clone(&pidfd);
        let task = tokio::spawn(async move {
            if ended.readable().await.is_ok() {
                let _ = hub.send(ToHub::Died(process)).await;
            }
        });
        known.watch = Some(Watch { pidfd, task });
    }

    /// Forgets a process of which nothing is left here.
    fn forget_if_idle(&mut self, process: ProcessId) {
        let Some(known) = self.processes.get(&process) else { return };
        // Who has attached may have a seat that it has not told of: it is watched until it dies, and its death is seen after
        // its connections are closed.
        if known.sessions == 0
            && !known.is_watched_by_broker
            && known.seats.is_empty()
            && known.links.is_empty()
        {
            if let Some(watch) = &known.watch {
                watch.task.abort();
            }
            self.processes.remove(&process);
        }
    }

    fn request(&mut self, session: SessionId, request: Request, fds: Vec<OwnedFd>) {
        let Some(known) = self.sessions.get(&session) else { return };
        if known.is_dismissed {
            return;
        }
        let (link, process, id) = (known.link, known.process, request.id);
        match &request.op {
            // The broker says so.
            _ if request.version != VERSION => self.ask_broker(session, request, fds),
            Some(request::Op::Attach(_)) => self.attach(session, link, process, id),
            Some(request::Op::Seated(seated)) => self.seated(session, seated.seat, seated.word),
            Some(request::Op::Yield(_)) => {
                let name = self.links[link.0].keeper.name();
                let text = format!("link {name} is kept by a sidecar; end that one first");
                self.refuse(session, id, Op::Yield, Code::Denied, Reason::KeptHere, text);
            }
            Some(request::Op::PoolMemory(told)) => self.pool_memory(session, id, told, fds),
            Some(request::Op::ListProcesses(list)) => {
                let skip = usize::try_from(list.skip).unwrap_or(usize::MAX);
                self.inspect(session, id, |hub| reply::Result::Processes(hub.everybody(link, skip)));
            }
            Some(request::Op::ListKeys(list)) => {
                self.inspect(session, id, |hub| reply::Result::AllKeys(hub.broker.all_keys(list.skip)));
            }
            Some(
                request::Op::Ack(broker::Ack { grant, .. }) | request::Op::Stands(broker::Stands { grant }),
            ) => {
                self.hear_of_the_death_of(self.broker.importer(grant));
                self.ask_broker(session, request, fds);
            }
            Some(request::Op::ExportKey(export))
                if !fds
                    .iter()
                    .all(|fd| self.descriptors.is_memory_of(fd, export.mechanism(), export.size)) =>
            {
                let text = "the descriptor is no device's, or no sealed memfd of this size: seal it against shrinking \
                            and growing";
                self.refuse(session, id, Op::Export, Code::Invalid, Reason::BadDescriptors, text);
            }
            Some(request::Op::ExportKey(_))
                if self.fds.len() + self.attached + fds.len() > self.descriptors.max =>
            {
                let text =
                    format!("at most {} keys with descriptors in all: close some", self.descriptors.max);
                self.refuse(session, id, Op::Export, Code::Limit, Reason::Descriptors, text);
            }
            _ => self.ask_broker(session, request, fds),
        }
    }

    /// A number is its process's until that has ended, and not until that was heard of here.
    fn hear_of_the_death_of(&mut self, importer: Option<ProcessId>) {
        let watch = |process| self.processes.get(&process)?.watch.as_ref();
        if let Some(process) = importer
            && watch(process).is_some_and(Watch::has_ended)
        {
            self.died(process);
        }
    }

    /// Whoever has got hold of somebody's connection does not speak for it.
    fn foreign(&mut self, session: SessionId, id: u64) {
        let text = "another process made this connection: connect yourself";
        self.refuse(session, id, Op::Open, Code::Denied, Reason::ForeignSender, text);
    }

    fn ask_broker(&mut self, session: SessionId, request: Request, fds: Vec<OwnedFd>) {
        let fds = fds.into_iter().map(|fd| self.hold(fd)).collect();
        self.tell_broker(Command::Request { session, request, fds });
    }

    /// Refuses as the broker does: told, written down, counted.
    fn refuse(
        &mut self,
        session: SessionId,
        id: u64,
        op: Op,
        code: Code,
        reason: Reason,
        text: impl Into<String>,
    ) {
        self.send(session, &Reply::refused(id, code, text), Vec::new());
        self.deny(session, op, reason, None);
    }

    /// Writes down and counts that something was refused.
    fn deny(&mut self, session: SessionId, op: Op, reason: Reason, seat: Option<u32>) {
        let record =
            Record { outcome: Outcome::Refused, reason: Some(reason), seat, ..self.record(session, op) };
        self.audit.write(&record);
        self.metrics.denied(reason);
    }

    /// A record of what a session did to its link.
    fn record(&self, session: SessionId, op: Op) -> Record {
        let known = self.sessions.get(&session);
        let identity =
            known.and_then(|known| self.processes.get(&known.process?)).and_then(|p| p.identity.as_ref());
        Record {
            caller: identity.map(Party::from),
            socket: known.filter(|_| identity.is_none()).and_then(|known| known.credentials),
            link: known.map(|known| self.links[known.link.0].keeper.name().to_owned()),
            ..Record::new(self.audit.now(), op)
        }
    }

    /// Answers an operator, and nobody else.
    fn inspect(&mut self, session: SessionId, id: u64, answer: impl FnOnce(&Self) -> reply::Result) {
        let credentials = self.sessions.get(&session).and_then(|known| known.credentials);
        if inspect::is_operator(credentials, geteuid().as_raw()) {
            let reply = Reply::new(id, answer(self));
            return self.send(session, &reply, Vec::new());
        }
        let text = "this is for the operator of the sidecar: ask where it runs, as its user or root";
        self.refuse(session, id, Op::Inspect, Code::Denied, Reason::NotOperator, text);
    }

    /// All processes, without the first `skip` of them.
    fn everybody(&self, link: LinkIndex, skip: usize) -> Processes {
        let keeper = &self.links[link.0].keeper;
        let sits =
            |known: &Process, other: &Participant| known.seats.contains(&(link, other.seat, other.word));
        let identified =
            || self.processes.iter().filter_map(|(id, known)| Some((id, known, known.identity.as_ref()?)));
        let all = identified().skip(skip).map(|(id, known, identity)| {
            let seats = keeper.participants().filter(|other| sits(known, other));
            inspect::process(identity, known.sessions, seats, self.broker.holdings(id))
        });
        let unclaimed = || {
            let is_claimed = |other: &Participant| self.processes.values().any(|known| sits(known, other));
            keeper
                .participants()
                .filter(|other| !is_claimed(other))
                .map(|other| inspect::seat(&other))
                .collect()
        };
        Processes {
            processes: inspect::page(all),
            total: inspect::count(identified().count()),
            unidentified: inspect::count(self.sessions.values().filter(|s| s.process.is_none()).count()),
            unclaimed: if skip == 0 { unclaimed() } else { Vec::new() },
        }
    }

    /// Fails closed: who is not known does not get in.
    fn attach(&mut self, session: SessionId, link: LinkIndex, process: Option<ProcessId>, id: u64) {
        let kept = &self.links[link.0];
        if process.is_none() {
            let text =
                format!("link {}: who you are is not known here; see the sidecar's log", kept.keeper.name());
            self.refuse(session, id, Op::Attach, Code::Unidentified, Reason::Unidentified, text);
            return;
        }
        if let Some(known) = process.and_then(|process| self.processes.get_mut(&process)) {
            if known.links.is_empty() {
                if self.fds.len() + self.attached >= self.descriptors.max {
                    let text = "there are no descriptors left to watch one more process with";
                    return self.refuse(session, id, Op::Attach, Code::Limit, Reason::Descriptors, text);
                }
                self.attached += 1;
            }
            known.links.insert(link);
        }
        let (attached, fds) = (kept.attached, kept.fds.clone());
        self.metrics.attached();
        self.audit.write(&self.record(session, Op::Attach));
        self.send(session, &Reply::new(id, reply::Result::Attached(attached)), fds);
    }

    /// The sessions on a link whose processes have attached to it.
    fn attached_to(&self, link: LinkIndex) -> impl Iterator<Item = SessionId> {
        let is_attached = move |known: &Session| {
            let process = known.process.and_then(|process| self.processes.get(&process));
            known.link == link && process.is_some_and(|process| process.links.contains(&link))
        };
        self.sessions.iter().filter(move |(_, known)| is_attached(known)).map(|(session, _)| *session)
    }

    /// The device memory of a pool: for who may have the link's segments, and kept as they are.
    fn pool_memory(&mut self, session: SessionId, id: u64, told: &PoolMemory, fds: Vec<OwnedFd>) {
        let Some(link) = self.sessions.get(&session).map(|known| known.link) else { return };
        let links = Arc::clone(&self.links);
        let keeper = &links[link.0].keeper;
        if !self.attached_to(link).any(|other| other == session) {
            let text = format!("link {}: attach to it first", keeper.name());
            return self.refuse(session, id, Op::PoolMemory, Code::Denied, Reason::NotAttached, text);
        }
        let is_offer = told.id != 0;
        if is_offer && !fds.iter().all(|fd| self.descriptors.is_memory_of(fd, told.mechanism(), told.size)) {
            let text = "the descriptor is no device's, or no sealed memfd of this size: seal it against shrinking and \
                        growing";
            return self.refuse(session, id, Op::PoolMemory, Code::Invalid, Reason::BadDescriptors, text);
        }
        let (answer, fd, is_news) = match keeper.pool_memory(told, fds) {
            Ok(answered) => answered,
            Err(text) => {
                let reason = Reason::BadPoolMemory;
                return self.refuse(session, id, Op::PoolMemory, Code::Invalid, reason, text);
            }
        };
        let fds: Vec<_> = fd.into_iter().collect();
        if is_news {
            let size_bytes = Some(answer.size);
            self.audit.write(&Record { size_bytes, ..self.record(session, Op::PoolMemory) });
            // Whoever takes this sidecar's place one day has to have it.
            let others: Vec<_> = self.attached_to(link).filter(|other| *other != session).collect();
            for other in others {
                self.send(other, &Reply::new(0, reply::Result::PoolMemory(answer.clone())), fds.clone());
            }
        }
        self.send(session, &Reply::new(id, reply::Result::PoolMemory(answer)), fds);
    }

    fn seated(&mut self, session: SessionId, seat: u32, word: u64) {
        match self.sit(session, seat, word) {
            Ok(false) => {}
            Ok(true) => {
                self.audit.write(&Record { seat: Some(seat), ..self.record(session, Op::Seated) });
            }
            Err(reason) => self.deny(session, Op::Seated, reason, Some(seat)),
        }
    }

    /// `false`: that was known.
    fn sit(&mut self, session: SessionId, seat: u32, word: u64) -> Result<bool, Reason> {
        let known = self.sessions.get(&session);
        let Some((link, process)) = known.and_then(|known| Some((known.link, known.process?))) else {
            return Err(Reason::Unidentified);
        };
        let seat = SeatIndex::from_wild(seat.into()).ok_or(Reason::NotSeated)?;
        let word = SeatWord::from_wild(word);
        let entry = (link, seat, word);
        if self.processes.iter().any(|(other, known)| *other != process && known.seats.contains(&entry)) {
            return Err(Reason::SeatTaken);
        }
        let known = self.processes.get_mut(&process).ok_or(Reason::Unidentified)?;
        if known.seats.contains(&entry) {
            return Ok(false);
        }
        // A seat that is somebody else's by what it says of itself is not believed.
        let is_there = self.links[link.0].keeper.participants().any(|other| {
            other.seat == seat
                && other.word == word
                && (other.start_time == 0 || other.start_time == process.start_time)
        });
        if !is_there {
            return Err(Reason::NotSeated);
        }
        if known.seats.len() >= SEATS_PER_PROCESS {
            // Those that it has left since.
            let links = &self.links;
            known.seats.retain(|(link, seat, word)| {
                links[link.0].keeper.participants().any(|other| other.seat == *seat && other.word == *word)
            });
        }
        if known.seats.len() >= SEATS_PER_PROCESS {
            return Err(Reason::SeatsOfProcess);
        }
        known.seats.push(entry);
        Ok(true)
    }

    fn ended(&mut self, session: SessionId) {
        let Some(known) = self.sessions.remove(&session) else { return };
        self.tell_broker(Command::Closed { session });
        if let Some(process) = known.process {
            let is_last = self.processes.get_mut(&process).is_some_and(|known| {
                known.sessions = known.sessions.saturating_sub(1);
                known.sessions == 0 && known.watch.is_none()
            });
            if is_last {
                // Before Linux 6.5, and out of sight: a process without connections is as good as dead.
                self.died(process);
            }
            self.forget_if_idle(process);
        }
    }

    fn died(&mut self, process: ProcessId) {
        let Some(dead) = self.processes.remove(&process) else { return };
        self.attached -= usize::from(!dead.links.is_empty());
        let mut done = Recovered::default();
        for &(link, seat, word) in &dead.seats {
            let taken = self.links[link.0].keeper.recover_participant(seat, word);
            done.participants += taken.participants;
            done.messages += taken.messages;
        }
        // Seats that it had taken and not told of yet, where this process can see whose they are.
        for kept in self.links.iter() {
            done.participants += kept.keeper.recover().participants;
        }
        self.metrics.reaped(done.participants);
        tracing::info!(
            tgid = process.bare_tgid,
            participants = done.participants,
            messages = done.messages,
            "a process has died"
        );
        self.tell_broker(Command::Died { process });
        let told: Vec<_> = self
            .sessions
            .iter()
            .filter(|(_, other)| dead.links.contains(&other.link) && other.process != Some(process))
            .map(|(session, _)| *session)
            .collect();
        for session in told {
            self.send(session, &Reply::event(event::Happened::PeerDied(process.bare_tgid)), Vec::new());
        }
    }

    fn hold(&mut self, fd: OwnedFd) -> FdToken {
        self.fds_ever += 1;
        let token = FdToken(self.fds_ever);
        self.fds.insert(token, Arc::new(fd));
        token
    }

    fn tell_broker(&mut self, command: Command) {
        // Who is asked about in vain may still be told by the connection.
        let asked_on = match &command {
            Command::Opened { session, .. } | Command::Request { session, .. } => self.sessions.get(session),
            _ => None,
        };
        let credentials =
            asked_on.filter(|known| known.process.is_none()).and_then(|known| known.credentials);
        for effect in self.broker.handle(self.audit.now(), command) {
            match effect {
                Effect::Reply { session, reply, fd } => {
                    let fds = fd.and_then(|fd| self.fds.get(&fd).cloned()).into_iter().collect();
                    self.send(session, &reply, fds);
                }
                Effect::Event { session, happened } => {
                    self.send(session, &Reply::event(happened), Vec::new())
                }
                Effect::CloseSession(session) => self.dismiss(session),
                Effect::DropFd(fd) => {
                    self.fds.remove(&fd);
                }
                Effect::Watch(process) => {
                    self.processes.entry(process).or_default().is_watched_by_broker = true;
                }
                Effect::Unwatch(process) => {
                    if let Some(known) = self.processes.get_mut(&process) {
                        known.is_watched_by_broker = false;
                    }
                    self.forget_if_idle(process);
                }
                Effect::Resolve { ticket, bare_tgids } => {
                    let (resolver, hub) = (self.resolver.clone(), self.myself.clone());
                    tokio::spawn(async move {
                        let found = resolver.by_number(bare_tgids).await;
                        let _ = hub.send(ToHub::Resolved { ticket, found }).await;
                    });
                }
                Effect::Audit(mut record) => {
                    record.socket = credentials.filter(|_| record.caller.is_none());
                    self.audit.write(&record);
                }
                Effect::Denied(reason) => self.metrics.denied(reason),
            }
        }
    }

    /// Who does not read is dismissed: its queue must not become our memory.
    fn send(&mut self, session: SessionId, reply: &Reply, fds: Vec<Arc<OwnedFd>>) {
        let Some(known) = self.sessions.get(&session) else { return };
        // Closed: it has ended, and we are going to hear of it.
        if let Err(TrySendError::Full(_)) =
            known.outgoing.try_send(Outgoing { bytes: packet::encode(reply), fds })
        {
            self.deny(session, Op::Packet, Reason::Slow, None);
            self.dismiss(session);
        }
    }

    /// Ends a session: its task sees that nothing more is to be sent, and closes the connection. The broker hears of it when
    /// it has.
    fn dismiss(&mut self, session: SessionId) {
        if let Some(known) = self.sessions.get_mut(&session) {
            known.outgoing = mpsc::channel(1).0;
            known.is_dismissed = true;
        }
    }
}

/// Of the character devices whose descriptors are memory of a GPU.
const NVIDIA_MAJOR: u64 = 195;

/// Which descriptors keys and pools may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptors {
    /// How many keys may have, all together.
    pub(crate) max: usize,
    /// Whether a memfd passes for a device's, as that of a double is one.
    pub(crate) memfds_for_devices: bool,
}

impl Descriptors {
    /// Whether a descriptor is what the mechanism needs. Memory that can be truncated would be a bus error in the importer.
    fn is_memory_of(self, fd: &OwnedFd, mechanism: Mechanism, size: u64) -> bool {
        if mechanism != Mechanism::Host {
            // A device's, where the mechanism has one at all.
            return fstat(fd).is_ok_and(|stat| {
                let kind = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
                kind == SFlag::S_IFCHR && major(stat.st_rdev) == NVIDIA_MAJOR
                    || self.memfds_for_devices && kind == SFlag::S_IFREG
            });
        }
        let wanted = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
        let seals = fcntl(fd, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_truncate);
        let found = fstat(fd).ok().and_then(|stat| u64::try_from(stat.st_size).ok());
        seals.is_ok_and(|seals| seals.contains(wanted)) && found.is_some_and(|found| found >= size)
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
