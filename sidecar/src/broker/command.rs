//! What goes into the broker and what comes out.

use shmesh_proto::broker::{Reply, Request, event};
use shmesh_proto::identity::PeerIdentity;

use super::audit::{Reason, Record};

/// One connection, by a number that its socket gives it and never gives again.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SessionId(pub u64);

/// A descriptor that the socket holds for the broker, by a number that it never gives again. The broker says when to send
/// a copy of it ([`Effect::Reply`]) and, exactly once, when to close it ([`Effect::DropFd`]).
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FdToken(pub u64);

/// A question of the broker about processes: [`Effect::Resolve`], answered with [`Command::Resolved`].
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Ticket(pub u64);

/// One process, and no other that gets its number later.
///
/// ```
/// use shmesh_proto::identity::PeerIdentity;
/// use shmesh_sidecar::broker::ProcessId;
/// let peer = PeerIdentity { bare_tgid: 4711, start_time: 12, pidfd_inode: 9, ..PeerIdentity::default() };
/// assert_eq!(ProcessId::of(&peer), Some(ProcessId { bare_tgid: 4711, start_time: 12, pidfd_inode: 9 }));
/// assert_eq!(ProcessId::of(&PeerIdentity::default()), None, "0 is a process that the kernel does not show");
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ProcessId {
    /// Its thread-group id in the outermost pid namespace.
    pub bare_tgid: i32,
    /// When it started, in clock ticks after boot.
    pub start_time: u64,
    /// Inode of its pidfd; 0 before Linux 6.9.
    pub pidfd_inode: u64,
}

impl ProcessId {
    /// The process of an identity. `None` for a number that no process has.
    #[must_use]
    pub fn of(identity: &PeerIdentity) -> Option<Self> {
        let &PeerIdentity { bare_tgid, start_time, pidfd_inode, .. } = identity;
        (bare_tgid > 0).then_some(Self { bare_tgid, start_time, pidfd_inode })
    }
}

/// What happened outside. Not for logs: a request has keys and handles in it, and prints them.
#[derive(Clone, Debug)]
pub enum Command {
    /// A client connected to the sidecar.
    Opened {
        /// The session of the connection.
        session: SessionId,
        /// Its identity, from the kernel or the identity service; `None` if unknown.
        peer: Option<PeerIdentity>,
    },
    /// The connection is gone. Its process may live on.
    Closed {
        /// The session that ended.
        session: SessionId,
    },
    /// A session sends a request.
    Request {
        /// The session that sent it.
        session: SessionId,
        /// The request as decoded.
        request: Request,
        /// The descriptors that came along, in their order.
        fds: Vec<FdToken>,
    },
    /// A process that the broker watches has ended.
    Died {
        /// The process that ended.
        process: ProcessId,
    },
    /// The answer to [`Effect::Resolve`].
    Resolved {
        /// The question that is meant.
        ticket: Ticket,
        /// The processes of it that are alive. One that is missing has no process.
        found: Vec<PeerIdentity>,
    },
    /// [`Effect::Resolve`] failed; whether the processes live is unknown.
    Unanswered {
        /// The question that is meant.
        ticket: Ticket,
    },
    /// A broker was here before, and its keys and imports are registered again for
    /// [`Policy::restore_millis`](super::Policy::restore_millis) from now on.
    Recover,
    /// Time has passed: see [`Broker::next_deadline`](super::Broker::next_deadline).
    Tick,
    /// The sidecar is going to end: no new exports and imports.
    Drain,
}

/// What is to be done outside, in this order. Not for logs, as [`Command`]; [`Effect::Audit`] is what can be written down.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send an answer to a request.
    Reply {
        /// The session that asked.
        session: SessionId,
        /// The answer to send.
        reply: Reply,
        /// Send a copy of this descriptor with it, and keep the descriptor.
        fd: Option<FdToken>,
    },
    /// Send an event to a session.
    Event {
        /// The session that gets it.
        session: SessionId,
        /// The event to send.
        happened: event::Happened,
    },
    /// Close a session. The broker has forgotten it.
    CloseSession(SessionId),
    /// Close a descriptor. The broker has forgotten it.
    DropFd(FdToken),
    /// Say [`Command::Died`] when this process has ended, from now until [`Effect::Unwatch`] or its death.
    Watch(ProcessId),
    /// Its death no longer matters.
    Unwatch(ProcessId),
    /// Ask who has these numbers now; answer with [`Command::Resolved`].
    Resolve {
        /// The question that is meant.
        ticket: Ticket,
        /// Bare thread-group ids to resolve.
        bare_tgids: Vec<i32>,
    },
    /// Write this to the audit log.
    Audit(Box<Record>),
    /// Count one refusal in the metrics.
    Denied(Reason),
}
