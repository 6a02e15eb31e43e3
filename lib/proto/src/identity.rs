//! Sidecars and the node's identity service.
//!
//! A sidecar forwards the pidfd of its client, or before Linux 6.5 the accepted socket itself, as the one descriptor of the
//! packet. The service answers with the identity from the kernel. No process states its own pid.
//!
//! To the question about a socket comes, beside the answer, a pidfd of the process: an old kernel gives the sidecar none.

use prost::{Enumeration, Message, Oneof};

use crate::limits::VERSION;

/// What the descriptor beside the question is.
#[derive(Clone, Copy, Debug, Enumeration, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(i32)]
pub enum Subject {
    /// Nothing that this version knows.
    Unspecified = 0,
    /// A pidfd of the process.
    Pidfd = 1,
    /// An accepted unix socket, whose other end is the process in question.
    Socket = 2,
    /// None: the question is which process has a number now. The answer says when it started and its pidfd's inode, and no
    /// more: a client could ask about every process.
    Number = 3,
}

/// Who is that? One descriptor comes with it, unless it is about a number.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Question {
    /// [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The caller's number for this question; the answer has it too.
    #[prost(uint64, tag = "2")]
    pub id: u64,
    /// What the descriptor is.
    #[prost(enumeration = "Subject", tag = "3")]
    pub subject: i32,
    /// When the caller had accepted the connection, in clock ticks after boot; 0 if it does not say. A process that started
    /// later cannot be who connected: before Linux 6.5 this is what tells it from one that was given its number since.
    #[prost(uint64, tag = "4")]
    pub latest_start: u64,
    /// The number that is asked about, with [`Subject::Number`].
    #[prost(int32, tag = "5")]
    pub bare_tgid: i32,
}

impl Question {
    /// A question in this version.
    #[must_use]
    pub fn new(id: u64, subject: Subject) -> Self {
        Self { version: VERSION, id, subject: subject.into(), ..Self::default() }
    }

    /// A question about a number.
    #[must_use]
    pub fn about(id: u64, bare_tgid: i32) -> Self {
        Self { bare_tgid, ..Self::new(id, Subject::Number) }
    }

    /// The same about a connection that had been accepted by then.
    #[must_use]
    pub fn accepted_by(self, ticks: u64) -> Self {
        Self { latest_start: ticks, ..self }
    }
}

/// The pod of a process, from its cgroup and confirmed by the source of pods.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Pod {
    /// Its uid, with dashes.
    #[prost(string, tag = "1")]
    pub uid: String,
    /// Its namespace; empty when only the cgroup is known.
    #[prost(string, tag = "2")]
    pub namespace: String,
    /// Its name; empty as above.
    #[prost(string, tag = "3")]
    pub name: String,
    /// The container's name; empty as above.
    #[prost(string, tag = "4")]
    pub container: String,
    /// The container's id in the runtime.
    #[prost(string, tag = "5")]
    pub container_id: String,
    /// Its service account; empty when not known.
    #[prost(string, tag = "6")]
    pub service_account: String,
    /// Whether the source of pods knows this uid and container.
    #[prost(bool, tag = "7")]
    pub confirmed: bool,
}

/// The identity of a process, from the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct PeerIdentity {
    /// Its thread-group id in the outermost pid namespace that the service sees.
    #[prost(int32, tag = "1")]
    pub bare_tgid: i32,
    /// When it started, in clock ticks after boot.
    #[prost(uint64, tag = "2")]
    pub start_time: u64,
    /// Inode of its pidfd: the same for every observer; 0 before Linux 6.9.
    #[prost(uint64, tag = "3")]
    pub pidfd_inode: u64,
    /// Its user, as the service's user namespace numbers it.
    #[prost(uint32, tag = "4")]
    pub uid: u32,
    /// Effective group of the process.
    #[prost(uint32, tag = "5")]
    pub gid: u32,
    /// Its pod, if it is in one.
    #[prost(message, optional, tag = "6")]
    pub pod: Option<Pod>,
}

/// Why there is no identity.
#[derive(Clone, Copy, Debug, Enumeration, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(i32)]
pub enum Unknown {
    /// The field was not set.
    Unspecified = 0,
    /// The question is malformed, or of another version.
    BadQuestion = 1,
    /// The descriptor is missing, more than one, or no pidfd or socket.
    BadDescriptor = 2,
    /// The process has ended.
    Gone = 3,
    /// The service cannot see it: it does not run in an outer pid namespace.
    OutOfSight = 4,
    /// The service cannot answer just now.
    Unavailable = 5,
}

/// The answer to one question.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Answer {
    /// That of the question.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The identity, or the reason why it is not known.
    #[prost(oneof = "answer::Result", tags = "2, 3")]
    pub result: Option<answer::Result>,
}

/// What an [`Answer`] holds.
pub mod answer {
    use super::{Oneof, PeerIdentity, Unknown};

    /// The identity, or the reason why it is not known.
    #[derive(Clone, PartialEq, Eq, Oneof)]
    pub enum Result {
        /// The identity of the process.
        #[prost(message, tag = "2")]
        Peer(PeerIdentity),
        /// Why that is not known.
        #[prost(enumeration = "Unknown", tag = "3")]
        Unknown(i32),
    }
}
