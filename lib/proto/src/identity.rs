//! Messages between sidecars and the node's identity service.
//!
//! A sidecar forwards the pidfd of its client, or before Linux 6.5 the accepted socket itself, as the only descriptor
//! of the packet. The service answers with the identity from the kernel. No process states its own pid.
//!
//! The answer about a socket has a pidfd of the process, because an old kernel gives the sidecar none.

use prost::{Enumeration, Message, Oneof};

use crate::limits::VERSION;

/// The kind of the descriptor of a question.
#[derive(Clone, Copy, Debug, Enumeration, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(i32)]
pub enum Subject {
    /// A kind that this version does not know.
    Unspecified = 0,
    /// A pidfd of the process.
    Pidfd = 1,
    /// An accepted unix socket, whose other end is the process in question.
    Socket = 2,
    /// No descriptor: the question is which process has a process id now. The answer has only the start time and the
    /// pidfd's inode, because a client could ask about every process.
    Number = 3,
}

/// A question about a process. Its packet has one descriptor, unless it is about a process id.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Question {
    /// [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The caller's id of this question, which the answer has too.
    #[prost(uint64, tag = "2")]
    pub id: u64,
    /// The kind of the descriptor.
    #[prost(enumeration = "Subject", tag = "3")]
    pub subject: i32,
    /// Time at which the caller accepted the connection, in clock ticks after boot; 0 if unknown. A process that
    /// started later did not connect: before Linux 6.5 this excludes a process that got the same id since.
    #[prost(uint64, tag = "4")]
    pub latest_start: u64,
    /// The process id in question, with [`Subject::Number`].
    #[prost(int32, tag = "5")]
    pub bare_tgid: i32,
}

impl Question {
    /// Creates a question of this version.
    #[must_use]
    pub fn new(id: u64, subject: Subject) -> Self {
        Self { version: VERSION, id, subject: subject.into(), ..Self::default() }
    }

    /// Creates a question about a process id.
    #[must_use]
    pub fn about(id: u64, bare_tgid: i32) -> Self {
        Self { bare_tgid, ..Self::new(id, Subject::Number) }
    }

    /// Adds the time at which the connection had been accepted.
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
    /// Its namespace; empty if only the cgroup is known.
    #[prost(string, tag = "2")]
    pub namespace: String,
    /// Its name; empty if only the cgroup is known.
    #[prost(string, tag = "3")]
    pub name: String,
    /// The container's name; empty if only the cgroup is known.
    #[prost(string, tag = "4")]
    pub container: String,
    /// The container's id in the runtime.
    #[prost(string, tag = "5")]
    pub container_id: String,
    /// Its service account; empty if unknown.
    #[prost(string, tag = "6")]
    pub service_account: String,
    /// Whether the source of pods vouches for the namespace, name and service account.
    #[prost(bool, tag = "7")]
    pub confirmed: bool,
}

/// The identity of a process, from the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct PeerIdentity {
    /// Its thread-group id in the outermost pid namespace that the service sees.
    #[prost(int32, tag = "1")]
    pub bare_tgid: i32,
    /// Start time in clock ticks after boot.
    #[prost(uint64, tag = "2")]
    pub start_time: u64,
    /// Inode of its pidfd: the same for every observer; 0 before Linux 6.9.
    #[prost(uint64, tag = "3")]
    pub pidfd_inode: u64,
    /// User id, as numbered in the service's user namespace.
    #[prost(uint32, tag = "4")]
    pub uid: u32,
    /// Effective group of the process.
    #[prost(uint32, tag = "5")]
    pub gid: u32,
    /// Its pod, if it is in one.
    #[prost(message, optional, tag = "6")]
    pub pod: Option<Pod>,
}

/// The reason why a process was not identified.
#[derive(Clone, Copy, Debug, Enumeration, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(i32)]
pub enum Unknown {
    /// The field was not set.
    Unspecified = 0,
    /// The question is malformed, or of another version.
    BadQuestion = 1,
    /// There is no descriptor or more than one, or it is not a pidfd or socket.
    BadDescriptor = 2,
    /// The process has ended.
    Gone = 3,
    /// The process is not visible, because the service does not run in an outer pid namespace.
    OutOfSight = 4,
    /// The service temporarily cannot answer.
    Unavailable = 5,
}

/// The answer to one question.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Answer {
    /// The id of the question.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The identity, or the reason why it is not known.
    #[prost(oneof = "answer::Result", tags = "2, 3")]
    pub result: Option<answer::Result>,
}

/// The results of an [`Answer`].
pub mod answer {
    use super::{Oneof, PeerIdentity, Unknown};

    /// The identity, or the reason why it is not known.
    #[derive(Clone, PartialEq, Eq, Oneof)]
    pub enum Result {
        /// The identity of the process.
        #[prost(message, tag = "2")]
        Peer(PeerIdentity),
        /// The reason why the identity is unknown.
        #[prost(enumeration = "Unknown", tag = "3")]
        Unknown(i32),
    }
}
