//! The actor: one task that owns all state. It receives connections, deaths and identities as [`ActorEvent`] and sends
//! packets to sessions.
//!
//! Operations on device keys go through the [`Broker`].
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | events and their dispatch; refusals |
//! | `process.rs` | processes that have connected, and their deaths |
//! | `link.rs` | attaching to a link, the device memory of its pools, the owners of its seats |
//! | `effects.rs` | commands to the broker, and its effects |
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
use self::descriptors::FdTable;
use self::process::ConnectedProcess;
use crate::audit::AuditLog;
use crate::broker::{
    Account, Broker, Command, Credentials, Op, Outcome, Party, ProcessId, Reason, Record, SessionId, Ticket,
};
use crate::identity::Resolver;
use crate::links::{LinkIndex, Links};
use crate::metrics::Metrics;
use crate::shares::{Share, Shares};

/// Maximum age of the metrics while events arrive.
const OBSERVE_AFTER: Duration = Duration::from_millis(20);

/// An event that the actor reacts to.
#[derive(Debug)]
pub(crate) enum ActorEvent {
    Opened {
        session: SessionId,
        link: LinkIndex,
        /// The credentials of the connection from the kernel, as numbered in this pid namespace.
        credentials: Option<Credentials>,
        identity: Option<PeerIdentity>,
        pidfd: Option<OwnedFd>,
        outgoing: mpsc::Sender<OutgoingPacket>,
    },
    Request {
        session: SessionId,
        request: Request,
        /// Descriptors that can be memory.
        fds: Vec<OwnedFd>,
        /// Whether the packet also had other descriptors.
        is_strange: bool,
        /// Whether the packet was sent by the process that made the connection.
        is_connectors: bool,
    },
    /// The identities that the broker has asked for.
    Resolved {
        ticket: Ticket,
        /// `None` if the identity service did not answer.
        found: Option<Vec<PeerIdentity>>,
    },
    /// A session broke a rule of the protocol and is about to end.
    Broke {
        session: SessionId,
        reason: Reason,
    },
    Ended {
        session: SessionId,
    },
    Died(ProcessId),
    /// A link was lost, and its successor has new seats. The sender of this event waits until the old seats are
    /// forgotten.
    LinkLost {
        link: LinkIndex,
        done: oneshot::Sender<()>,
    },
    Drain,
}

/// One packet to a participant.
#[derive(Debug)]
pub(crate) struct OutgoingPacket {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<Arc<OwnedFd>>,
    /// Its share of the bytes that may wait; a challenge has none.
    pub(crate) _room: Option<Share<Account>>,
}

impl OutgoingPacket {
    /// Memory of a packet besides its bytes, in the queue and in the allocator.
    const OVERHEAD: usize = 128;
}

#[derive(Debug)]
struct ClientSession {
    link: LinkIndex,
    credentials: Option<Credentials>,
    process: Option<ProcessId>,
    outgoing: mpsc::Sender<OutgoingPacket>,
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
    sessions: HashMap<SessionId, ClientSession>,
    processes: BTreeMap<ProcessId, ConnectedProcess>,
    fd_table: FdTable,
    /// Bytes that wait to be read, by the account of the reader.
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
            fd_table: FdTable::new(descriptors),
            outgoing: Arc::new(Mutex::new(Shares::new(descriptors.outgoing))),
            myself,
        }
    }

    /// Runs until `Drain`. Never wakes while idle.
    pub(crate) async fn run(mut self, mut inbox: mpsc::Receiver<ActorEvent>) {
        // A previous sidecar may have had keys.
        self.tell_broker(Command::Recover);
        let mut observe_at = None;
        let mut is_draining = false;
        // While draining, waits for answers of the identity service, which come within their timeout.
        while !is_draining || self.broker.stats().questions > 0 {
            let deadline = self.broker.next_deadline().map(|at| self.audit.instant(at));
            let event = tokio::select! {
                event = inbox.recv() => event,
                // Not after each packet: it counts everything.
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
            match event {
                Some(ActorEvent::Drain) => {
                    is_draining = true;
                    self.tell_broker(Command::Drain);
                }
                Some(event) => {
                    self.handle(event);
                    self.links.look_for_damage();
                }
                None => break,
            }
            observe_at.get_or_insert_with(|| Instant::now() + OBSERVE_AFTER);
        }
        // Requests that were sent before the end are still answered.
        inbox.close();
        while let Ok(event) = inbox.try_recv() {
            self.handle(event);
        }
        self.audit.close();
    }

    fn handle(&mut self, event: ActorEvent) {
        match event {
            ActorEvent::Opened { session, link, credentials, identity, pidfd, outgoing } => {
                let process = identity.as_ref().and_then(ProcessId::of);
                self.sessions.insert(
                    session,
                    ClientSession { link, credentials, process, outgoing, is_dismissed: false },
                );
                match process {
                    Some(process) => self.watch(process, pidfd, identity.clone()),
                    // Only `Hello` is answered.
                    None => self.deny(session, Op::Open, Reason::Unidentified, None),
                }
                self.tell_broker(Command::Opened { session, peer: identity });
            }
            ActorEvent::Request { session, request, is_strange: true, is_connectors: true, .. }
                if request.version == VERSION =>
            {
                let text = "a descriptor in this packet is neither a sealed memfd nor a device";
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
            // Refused by the broker.
            _ if request.version != VERSION => self.ask_broker(session, request, fds),
            Some(request::Op::Attach(_)) => self.attach(session, link, process, id),
            Some(request::Op::Seated(seated)) => self.seated(session, seated.seat, seated.word),
            Some(request::Op::Offer(_)) => {
                let name = self.links.name(link);
                let text = format!("link {name} is kept by this sidecar, which has its memory already");
                self.refuse(session, id, Op::Offer, Code::Denied, Reason::KeptHere, text);
            }
            Some(request::Op::PoolMemory(told)) => self.pool_memory(session, id, told, fds),
            Some(request::Op::ListProcesses(list)) => {
                let skip = usize::try_from(list.skip).unwrap_or(usize::MAX);
                self.inspect(session, id, |actor| reply::Result::Processes(actor.all_processes(link, skip)));
            }
            Some(request::Op::ListKeys(list)) => {
                self.inspect(session, id, |actor| reply::Result::AllKeys(actor.broker.all_keys(list.skip)));
            }
            Some(
                request::Op::Ack(broker::Ack { grant, .. }) | request::Op::Stands(broker::Stands { grant }),
            ) => {
                self.check_for_death(self.broker.importer(grant));
                self.ask_broker(session, request, fds);
            }
            Some(op) if exported(op).is_some_and(|export| !self.are_memory_of(&fds, export)) => {
                let text = "the descriptor must be a device, or a memfd of this size that is sealed against shrinking and growing";
                self.refuse(session, id, Op::of(&request), Code::Invalid, Reason::BadDescriptors, text);
            }
            Some(op) if exported(op).is_some() && !fds.is_empty() => match self.may_export(process, op) {
                Err((reason, text)) => {
                    self.refuse(session, id, Op::of(&request), Code::Limit, reason, text);
                }
                Ok(()) => self.ask_broker(session, request, fds),
            },
            _ => self.ask_broker(session, request, fds),
        }
    }

    /// Whether a process may export one more descriptor. A process that is not identified may, because the broker
    /// refuses it. A process that has exported the key already may, because no descriptor is added.
    fn may_export(&self, process: Option<ProcessId>, op: &request::Op) -> Result<(), (Reason, String)> {
        if let (Some(process), request::Op::Restore(restore)) = (process, op)
            && self.broker.is_exporter(&process, &restore.key)
        {
            return Ok(());
        }
        let owner = process.and_then(|process| self.owner(process));
        owner.map_or(Ok(()), |(process, account)| self.fd_table.may_export(&process, &account))
    }

    fn owner(&self, process: ProcessId) -> Option<(ProcessId, Account)> {
        let identity = self.processes.get(&process)?.identity.as_ref()?;
        Some((process, Account::of(identity)))
    }

    fn are_memory_of(&self, fds: &[OwnedFd], export: &broker::ExportKey) -> bool {
        fds.iter().all(|fd| self.descriptors.is_memory_of(fd, export.mechanism(), export.size))
    }

    /// Refuses a packet of a process that did not make the connection.
    fn foreign(&mut self, session: SessionId, id: u64) {
        let text = "another process made this connection; connect in the process that sends";
        self.refuse(session, id, Op::Open, Code::Denied, Reason::ForeignSender, text);
    }

    /// Refuses a request: sends the refusal, writes an audit record and counts it.
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

    /// Writes an audit record of a refusal and counts it.
    fn deny(&mut self, session: SessionId, op: Op, reason: Reason, seat: Option<u32>) {
        let record =
            Record { outcome: Outcome::Refused, reason: Some(reason), seat, ..self.record(session, op) };
        self.audit.write(&record);
        self.metrics.refuse_request(reason);
    }

    /// An audit record of an operation of a session on its link.
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

    /// Queues a reply. A session that does not read is dismissed, which bounds the memory of its queue.
    fn send(&mut self, session: SessionId, reply: &Reply, fds: Vec<Arc<OwnedFd>>) {
        let Some(known) = self.sessions.get(&session) else { return };
        let bytes = packet::encode(reply);
        let account = known.process.and_then(|process| self.owner(process));
        let user = || Account::User(known.credentials.map_or(u32::MAX, |socket| socket.uid));
        let account = account.map_or_else(user, |(_, account)| account);
        let amount = bytes.len() + OutgoingPacket::OVERHEAD;
        let reason = match Share::take(&self.outgoing, account, amount, 1) {
            Err(_) => Reason::OutgoingOfAccount,
            Ok(room) => match known.outgoing.try_send(OutgoingPacket { bytes, fds, _room: Some(room) }) {
                Err(TrySendError::Full(_)) => Reason::Slow,
                // Closed: the session has ended, and its `Ended` event follows.
                Ok(()) | Err(TrySendError::Closed(_)) => return,
            },
        };
        self.deny(session, Op::Packet, reason, None);
        self.dismiss(session);
    }

    /// Ends a session: its task closes the connection at the end of the queue. The broker gets `Closed` after that.
    fn dismiss(&mut self, session: SessionId) {
        if let Some(known) = self.sessions.get_mut(&session) {
            known.outgoing = mpsc::channel(1).0;
            known.is_dismissed = true;
        }
    }
}

/// The export in a request, whether new or restored.
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
