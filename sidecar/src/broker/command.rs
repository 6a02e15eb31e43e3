//! Commands to the broker, and effects that it returns.

use shmesh_proto::broker::{Reply, Request, event};
use shmesh_proto::identity::PeerIdentity;

use super::audit::{Reason, Record};

/// One connection, identified by a number that the socket never reuses.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SessionId(pub u64);

/// A descriptor that the socket holds for the broker, identified by a number that is never reused. The broker says when
/// to send a copy of it ([`Effect::Reply`]) and, exactly once, when to close it ([`Effect::DropFd`]).
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FdToken(pub u64);

/// A question of the broker about processes: [`Effect::Resolve`], answered with [`Command::Resolved`].
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Ticket(pub u64);

/// One process, as opposed to a later one with the same process id.
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
    /// The process of an identity. `None` if the process id is not valid.
    #[must_use]
    pub fn of(identity: &PeerIdentity) -> Option<Self> {
        let &PeerIdentity { bare_tgid, start_time, pidfd_inode, .. } = identity;
        (bare_tgid > 0).then_some(Self { bare_tgid, start_time, pidfd_inode })
    }
}

/// An input of the broker. Do not log it: requests contain keys and handles.
#[derive(Clone, Debug)]
pub enum Command {
    /// A client connected to the sidecar.
    Opened {
        /// The session of the connection.
        session: SessionId,
        /// Its identity, from the kernel or the identity service; `None` if unknown.
        peer: Option<PeerIdentity>,
    },
    /// A connection has ended. Its process may still be alive.
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
        /// The descriptors of its packet, in order.
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
        /// The processes that are alive. A missing one does not exist.
        found: Vec<PeerIdentity>,
    },
    /// [`Effect::Resolve`] failed, so it is unknown whether the processes are alive.
    Unanswered {
        /// The question that is meant.
        ticket: Ticket,
    },
    /// A previous broker may have had keys and imports, which are registered again for
    /// [`Policy::restore_millis`](super::Policy::restore_millis) from now on.
    Recover,
    /// A deadline has passed: see [`Broker::next_deadline`](super::Broker::next_deadline).
    Tick,
    /// The sidecar is shutting down: refuse new exports and imports.
    Drain,
}

/// An action for the socket, to be carried out in order. Do not log it, as with [`Command`]; [`Effect::Audit`] is meant
/// for logs.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send an answer to a request.
    Reply {
        /// The session that asked.
        session: SessionId,
        /// The answer to send.
        reply: Reply,
        /// Send a copy of this descriptor with the reply, and keep the descriptor.
        fd: Option<FdToken>,
    },
    /// Send an event to a session.
    Event {
        /// The session that gets it.
        session: SessionId,
        /// The event to send.
        happened: event::SessionEvent,
    },
    /// Close a session. The broker has forgotten it.
    CloseSession(SessionId),
    /// Close a descriptor. The broker has forgotten it.
    DropFd(FdToken),
    /// Report [`Command::Died`] when this process has ended, from now until [`Effect::Unwatch`] or its death.
    Watch(ProcessId),
    /// Stop watching a process.
    Unwatch(ProcessId),
    /// Find the processes with these process ids; answer with [`Command::Resolved`].
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
