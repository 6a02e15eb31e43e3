//! The actor: one task that owns all state. Sessions, deaths and identities come in as [`ActorEvent`]; packets go out to sessions.
//!
//! What concerns device keys goes through the [`Broker`].
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | what comes in, and who deals with it; refusals |
//! | `process.rs` | the processes that have connected, and their end |
//! | `link.rs` | who gets a link, its pools of device memory, and whose its seats are |
//! | `effects.rs` | what the broker is told, and what it wants done |
//! | `descriptors.rs` | which descriptors are memory |

mod descriptors;
mod effects;
mod link;
mod process;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shmesh_proto::broker::{self, Code, Reply, Request, reply, request};
use shmesh_proto::identity::PeerIdentity;
use shmesh_proto::limits::VERSION;
use shmesh_proto::packet;
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::sync::oneshot;
use tokio::time::Instant;

pub(crate) use self::descriptors::Descriptors;
use self::descriptors::Held;
use self::process::Process;
use crate::audit::AuditLog;
use crate::broker::{
    Account, Broker, Command, Credentials, Op, Outcome, Party, ProcessId, Reason, Record, SessionId, Ticket,
};
use crate::identity::Resolver;
use crate::links::{LinkIndex, Links};
use crate::metrics::Metrics;
use crate::session::Outgoing;
use crate::shares::{Share, Shares};

/// Metrics are this old at most while something happens.
const OBSERVE_AFTER: Duration = Duration::from_millis(20);

/// What the actor hears.
#[derive(Debug)]
pub(crate) enum ActorEvent {
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
    /// A link was lost, and the next one of its name has other seats. The sender waits until the last ones are forgotten.
    LinkLost {
        link: LinkIndex,
        done: oneshot::Sender<()>,
    },
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

/// All state of the sidecar.
#[derive(Debug)]
pub(crate) struct Actor {
    links: Arc<Links>,
    broker: Broker,
    resolver: Resolver,
    metrics: Metrics,
    audit: AuditLog,
    descriptors: Descriptors,
    sessions: HashMap<SessionId, Session>,
    processes: BTreeMap<ProcessId, Process>,
    held: Held,
    /// Bytes that wait to be read, by whom they are for.
    outgoing: Arc<Mutex<Shares<Account>>>,
    myself: mpsc::Sender<ActorEvent>,
}

impl Actor {
    pub(crate) fn new(
        links: Arc<Links>,
        broker: Broker,
        resolver: Resolver,
        metrics: Metrics,
        audit: AuditLog,
        descriptors: Descriptors,
        myself: mpsc::Sender<ActorEvent>,
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
            held: Held::new(descriptors),
            outgoing: Arc::new(Mutex::new(Shares::new(descriptors.outgoing))),
            myself,
        }
    }

    /// Works until it is told to drain; nothing happens while nothing happens.
    pub(crate) async fn run(mut self, mut inbox: mpsc::Receiver<ActorEvent>) {
        // There may have been another before.
        self.tell_broker(Command::Recover);
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
                    observe_at.get_or_insert_with(|| Instant::now() + OBSERVE_AFTER);
                    continue;
                }
            };
            match told {
                Some(ActorEvent::Drain) => {
                    is_draining = true;
                    self.tell_broker(Command::Drain);
                }
                Some(told) => {
                    self.hear(told);
                    self.links.look_for_damage();
                }
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

    fn hear(&mut self, told: ActorEvent) {
        match told {
            ActorEvent::Opened { session, link, credentials, identity, pidfd, outgoing } => {
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
            ActorEvent::Request { session, request, is_strange: true, is_connectors: true, .. }
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
            ActorEvent::Request { session, request, fds, is_connectors: true, .. } => {
                self.request(session, request, fds);
            }
            ActorEvent::Request { session, request, .. } => self.foreign(session, request.id),
            ActorEvent::Resolved { ticket, found } => self.tell_broker(match found {
                Some(found) => Command::Resolved { ticket, found },
                None => Command::Unanswered { ticket },
            }),
            ActorEvent::Broke { session, reason } => self.deny(session, Op::Packet, reason, None),
            ActorEvent::Ended { session } => self.ended(session),
            ActorEvent::Died(process) => self.died(process),
            ActorEvent::LinkLost { link, done } => {
                self.forget_link(link);
                let _ = done.send(());
            }
            ActorEvent::Drain => {}
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
            Some(request::Op::Offer(_)) => {
                let name = self.links.name(link);
                let text = format!("link {name} is kept by a sidecar, which has its memory");
                self.refuse(session, id, Op::Offer, Code::Denied, Reason::KeptHere, text);
            }
            Some(request::Op::PoolMemory(told)) => self.pool_memory(session, id, told, fds),
            Some(request::Op::ListProcesses(list)) => {
                let skip = usize::try_from(list.skip).unwrap_or(usize::MAX);
                self.inspect(session, id, |actor| reply::Result::Processes(actor.everybody(link, skip)));
            }
            Some(request::Op::ListKeys(list)) => {
                self.inspect(session, id, |actor| reply::Result::AllKeys(actor.broker.all_keys(list.skip)));
            }
            Some(
                request::Op::Ack(broker::Ack { grant, .. }) | request::Op::Stands(broker::Stands { grant }),
            ) => {
                self.hear_of_the_death_of(self.broker.importer(grant));
                self.ask_broker(session, request, fds);
            }
            Some(op) if exported(op).is_some_and(|export| !self.are_memory_of(&fds, export)) => {
                let text = "the descriptor is no device's, or no sealed memfd of this size: seal it against shrinking \
                            and growing";
                self.refuse(session, id, Op::of(&request), Code::Invalid, Reason::BadDescriptors, text);
            }
            Some(op) if exported(op).is_some() && !fds.is_empty() => match self.may_export(process) {
                Err((reason, text)) => {
                    self.refuse(session, id, Op::of(&request), Code::Limit, reason, text);
                }
                Ok(()) => self.ask_broker(session, request, fds),
            },
            _ => self.ask_broker(session, request, fds),
        }
    }

    /// Nobody knows who is not identified: the broker refuses it.
    fn may_export(&self, process: Option<ProcessId>) -> Result<(), (Reason, String)> {
        let owner = process.and_then(|process| self.owner(process));
        owner.map_or(Ok(()), |(process, account)| self.held.may_export(&process, &account))
    }

    fn owner(&self, process: ProcessId) -> Option<(ProcessId, Account)> {
        let identity = self.processes.get(&process)?.identity.as_ref()?;
        Some((process, Account::of(identity)))
    }

    fn are_memory_of(&self, fds: &[OwnedFd], export: &broker::ExportKey) -> bool {
        fds.iter().all(|fd| self.descriptors.is_memory_of(fd, export.mechanism(), export.size))
    }

    /// Whoever has got hold of somebody's connection does not speak for it.
    fn foreign(&mut self, session: SessionId, id: u64) {
        let text = "another process made this connection: connect yourself";
        self.refuse(session, id, Op::Open, Code::Denied, Reason::ForeignSender, text);
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
            link: known.map(|known| self.links.name(known.link).to_owned()),
            ..Record::new(self.audit.now(), op)
        }
    }

    /// Who does not read is dismissed: its queue must not become our memory.
    fn send(&mut self, session: SessionId, reply: &Reply, fds: Vec<Arc<OwnedFd>>) {
        let Some(known) = self.sessions.get(&session) else { return };
        let bytes = packet::encode(reply);
        let account = known.process.and_then(|process| self.owner(process));
        let user = || Account::User(known.credentials.map_or(u32::MAX, |socket| socket.uid));
        let account = account.map_or_else(user, |(_, account)| account);
        let amount = bytes.len() + Outgoing::OVERHEAD;
        let reason = match Share::take(&self.outgoing, account, amount, 1) {
            Err(_) => Reason::OutgoingOfAccount,
            Ok(room) => match known.outgoing.try_send(Outgoing { bytes, fds, _room: Some(room) }) {
                Err(TrySendError::Full(_)) => Reason::Slow,
                // Closed: it has ended, and we are going to hear of it.
                Ok(()) | Err(TrySendError::Closed(_)) => return,
            },
        };
        self.deny(session, Op::Packet, reason, None);
        self.dismiss(session);
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

/// What a request exports, for the first time or again.
fn exported(op: &request::Op) -> Option<&broker::ExportKey> {
    match op {
        request::Op::ExportKey(export) => Some(export),
        request::Op::Restore(restore) => restore.export.as_ref(),
        _ => None,
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
