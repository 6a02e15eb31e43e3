//! Messages between participants and the broker of a link.
//!
//! A session is one connection. The broker answers each request of a participant with one [`Reply`] of the same id, and
//! may send an [`Event`] at any time. Without a sidecar, the process that created a link whose memory has no names is
//! its host: it answers `Hello`, `Attach` and `PoolMemory`, and refuses other requests as [`Code::Unsupported`].

use prost::{Enumeration, Message, Oneof};

use crate::identity::PeerIdentity;
use crate::limits::VERSION;

/// The side of a link.
#[derive(Clone, Copy, Debug, Enumeration, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(i32)]
pub enum Side {
    /// The field was not set.
    Unspecified = 0,
    /// The side that creates the link.
    Primary = 1,
    /// The side that attaches to the link.
    Secondary = 2,
}

/// The mechanism that shares device memory between processes.
#[derive(Clone, Copy, Debug, Enumeration, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(i32)]
pub enum Mechanism {
    /// The field was not set.
    Unspecified = 0,
    /// A sealed memfd: host memory in place of device memory.
    Host = 1,
    /// A descriptor of CUDA's virtual memory management.
    CudaVmm = 2,
    /// A key of the Ascend runtime.
    Ascend = 3,
    /// A CUDA IPC handle.
    CudaLegacy = 4,
}

/// Asks for the caller's identity as the broker knows it.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Hello {}

/// Asks for the segments of a link that have no names.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Attach {
    /// The side that the caller will attach to.
    #[prost(enumeration = "Side", tag = "1")]
    pub side: i32,
}

/// Ends everything that the caller has here: its exports and imports, and its place among the participants.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Detach {}

/// Offers the segments of a link that have no names to a host that has answered [`Wanted`]. Their descriptors are in
/// the packet: the link's own segment, then the pools in order of id.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Offer {}

/// Claims a seat of the link for the caller: when its process ends, the seat is recovered.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Seated {
    /// Number of the seat.
    #[prost(uint32, tag = "1")]
    pub seat: u32,
    /// The word of the seat, as the caller wrote it.
    #[prost(uint64, tag = "2")]
    pub word: u64,
}

/// Asks for the caller's bare thread-group id.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct BareTgid {}

/// Exports device memory. With the mechanisms `host` and `cuda-vmm`, its descriptor is in the packet.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ExportKey {
    /// The size in bytes.
    #[prost(uint64, tag = "1")]
    pub size: u64,
    /// 0: importers must be admitted. 1: any process may import, if the operator's policy permits that.
    #[prost(uint64, tag = "2")]
    pub flags: u64,
    /// The mechanism that shares the memory.
    #[prost(enumeration = "Mechanism", tag = "3")]
    pub mechanism: i32,
    /// The vendor's key or handle, and the device: `cuda-vmm` a UUID of 16 bytes; `ascend` a key of 65; `cuda-legacy` a
    /// handle of 64, a UUID, and the exporter's own process id, 4 bytes, little-endian.
    #[prost(bytes = "vec", tag = "4")]
    pub handle: Vec<u8>,
}

/// Admits importers to a key that the caller exported.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct SetImportPid {
    /// The key of the memory.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// Bare thread-group ids of living processes.
    #[prost(int32, repeated, tag = "2")]
    pub bare_tgids: Vec<i32>,
    /// Names of pods, as `namespace/name`.
    #[prost(string, repeated, tag = "3")]
    pub pods: Vec<String>,
    /// Service accounts, as `namespace/name`.
    #[prost(string, repeated, tag = "4")]
    pub service_accounts: Vec<String>,
}

/// Imports the memory of a key.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ImportByKey {
    /// The key of the memory.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
}

/// A process that a key admits.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Admitted {
    /// The bare thread-group id of the process.
    #[prost(int32, tag = "1")]
    pub bare_tgid: i32,
    /// Start time in clock ticks after boot: a later process with the same id is not admitted.
    #[prost(uint64, tag = "2")]
    pub start_time: u64,
    /// Inode of its pidfd; 0 before Linux 6.9.
    #[prost(uint64, tag = "3")]
    pub pidfd_inode: u64,
}

/// Registers an export again, under its old key: after a restart of the broker, and when the exporter has reconnected.
/// The memory's descriptor is in the packet as with [`ExportKey`]. Can be sent several times, if not all admitted
/// processes fit into one packet.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Restore {
    /// The key of the memory.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// The secret from [`Exported`]: importers know the key, but not the secret.
    #[prost(bytes = "vec", tag = "2")]
    pub secret: Vec<u8>,
    /// The export as it was registered.
    #[prost(message, optional, tag = "3")]
    pub export: Option<ExportKey>,
    /// Processes that the key admits, from [`Done`]: up to [`MAX_RESTORED_PIDS`](crate::limits::MAX_RESTORED_PIDS).
    #[prost(message, repeated, tag = "4")]
    pub admitted: Vec<Admitted>,
    /// Pods that it admits, as `namespace/name`.
    #[prost(string, repeated, tag = "5")]
    pub pods: Vec<String>,
    /// Service accounts that it admits, as `namespace/name`.
    #[prost(string, repeated, tag = "6")]
    pub service_accounts: Vec<String>,
    /// Whether the exporter has closed the key by force, and waits for its importers.
    #[prost(bool, tag = "7")]
    pub closing: bool,
    /// Whether more packets follow for this key, with further admitted processes. Until the last one, imports and
    /// claims of processes that are not on the list yet wait.
    #[prost(bool, tag = "8")]
    pub more: bool,
}

/// Registers an import again, after a restart of the broker: the caller has the memory of this key mapped.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Claim {
    /// The key of the memory.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
}

/// Acknowledges a grant: the exporter has admitted the importer in its driver, or the importer has mapped the memory.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Ack {
    /// The grant's 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub grant: Vec<u8>,
    /// Whether the step succeeded.
    #[prost(bool, tag = "2")]
    pub done: bool,
}

/// Asks whether a grant is still valid. The exporter asks before it passes a process id to its driver, because the id
/// of a dead process may belong to another one.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Stands {
    /// The grant's 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub grant: Vec<u8>,
}

/// Ends an import, or an export if the caller is its exporter.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Close {
    /// The key of the memory.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// Whether the exporter does not wait for importers: they get an event, and lose the memory.
    #[prost(bool, tag = "2")]
    pub force: bool,
}

/// Lists the caller's keys, without the keys themselves.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct List {
    /// Number of keys to skip.
    #[prost(uint32, tag = "1")]
    pub skip: u32,
}

/// The answer to a [`Challenge`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Proof {
    /// The bytes of the challenge.
    #[prost(bytes = "vec", tag = "1")]
    pub nonce: Vec<u8>,
}

/// Lists all processes that the broker knows. Only for its operator.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ListProcesses {
    /// Number of processes to skip.
    #[prost(uint32, tag = "1")]
    pub skip: u32,
}

/// Lists the keys of all processes, without the keys themselves. Only for the broker's operator.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ListKeys {
    /// Number of keys to skip.
    #[prost(uint32, tag = "1")]
    pub skip: u32,
}

/// The device memory of a pool. As a request it asks for the memory, and may offer some if there is none yet: the first
/// offer is kept, and the answer is the memory of the link. With an offer, and with an answer that has memory, its
/// descriptor is in the packet.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PoolMemory {
    /// The pool's number: 3 `cuda_data`, 4 `gpu_data`.
    #[prost(uint32, tag = "1")]
    pub pool: u32,
    /// Identifies the memory in messages: a random number that the allocating process chose. 0 if nothing is offered,
    /// or there is none.
    #[prost(uint64, tag = "2")]
    pub id: u64,
    /// The size in bytes.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// The mechanism that shares the memory: `host` or `cuda-vmm`.
    #[prost(enumeration = "Mechanism", tag = "4")]
    pub mechanism: i32,
    /// The device that has the memory: for `cuda-vmm` a UUID of 16 bytes.
    #[prost(bytes = "vec", tag = "5")]
    pub handle: Vec<u8>,
}

/// One request of a client.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Request {
    /// [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The caller's id of this request, which the reply has too.
    #[prost(uint64, tag = "2")]
    pub id: u64,
    /// The operation that is requested.
    #[prost(
        oneof = "request::Op",
        tags = "3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22"
    )]
    pub op: Option<request::Op>,
}

impl Request {
    /// Creates a request of this version.
    #[must_use]
    pub fn new(id: u64, op: request::Op) -> Self {
        Self { version: VERSION, id, op: Some(op) }
    }
}

/// The operations of a [`Request`].
pub mod request {
    use super::{
        Ack, Attach, BareTgid, Claim, Close, Detach, ExportKey, Hello, ImportByKey, List, ListKeys,
        ListProcesses, Offer, Oneof, PoolMemory, Proof, Restore, Seated, SetImportPid, Stands,
    };

    /// The operation that is requested.
    #[derive(Clone, PartialEq, Eq, Oneof)]
    pub enum Op {
        /// [`Hello`].
        #[prost(message, tag = "3")]
        Hello(Hello),
        /// [`Attach`].
        #[prost(message, tag = "4")]
        Attach(Attach),
        /// [`Detach`].
        #[prost(message, tag = "5")]
        Detach(Detach),
        /// [`BareTgid`].
        #[prost(message, tag = "6")]
        BareTgid(BareTgid),
        /// [`ExportKey`].
        #[prost(message, tag = "7")]
        ExportKey(ExportKey),
        /// [`SetImportPid`].
        #[prost(message, tag = "8")]
        SetImportPid(SetImportPid),
        /// [`ImportByKey`].
        #[prost(message, tag = "9")]
        ImportByKey(ImportByKey),
        /// [`Ack`].
        #[prost(message, tag = "10")]
        Ack(Ack),
        /// [`Close`].
        #[prost(message, tag = "11")]
        Close(Close),
        /// [`List`].
        #[prost(message, tag = "12")]
        List(List),
        /// [`Seated`].
        #[prost(message, tag = "14")]
        Seated(Seated),
        /// [`Proof`].
        #[prost(message, tag = "15")]
        Proof(Proof),
        /// [`ListProcesses`].
        #[prost(message, tag = "16")]
        ListProcesses(ListProcesses),
        /// [`ListKeys`].
        #[prost(message, tag = "17")]
        ListKeys(ListKeys),
        /// [`PoolMemory`].
        #[prost(message, tag = "18")]
        PoolMemory(PoolMemory),
        /// [`Stands`].
        #[prost(message, tag = "19")]
        Stands(Stands),
        /// [`Restore`].
        #[prost(message, tag = "20")]
        Restore(Restore),
        /// [`Claim`].
        #[prost(message, tag = "21")]
        Claim(Claim),
        /// [`Offer`].
        #[prost(message, tag = "22")]
        Offer(Offer),
    }
}

/// Sent before Linux 6.5 in answer to the first request of a session, with id 0: answer with [`Proof`], and continue to
/// wait for the reply. It proves that the process that made the connection was alive after the broker had identified
/// it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Challenge {
    /// Random bytes that cannot be guessed.
    #[prost(bytes = "vec", tag = "1")]
    pub nonce: Vec<u8>,
}

/// The request was executed.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Done {
    /// After [`SetImportPid`]: the admitted processes, for [`Restore`].
    #[prost(message, repeated, tag = "1")]
    pub admitted: Vec<Admitted>,
}

/// The identity of the caller as the broker knows it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Welcome {
    /// Missing if the broker does not identify its peers: a participant that is the host.
    #[prost(message, optional, tag = "1")]
    pub identity: Option<PeerIdentity>,
}

/// The segments of a link, whose descriptors are in the packet.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Attached {
    /// Version of the layout in shared memory.
    #[prost(uint32, tag = "1")]
    pub layout: u32,
    /// The number of segments in the packet.
    #[prost(uint32, tag = "3")]
    pub segments: u32,
}

/// The host is new and does not have the segments yet: a process that has them sends [`Offer`], others retry.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Wanted {}

/// The caller's bare thread-group id.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Tgid {
    /// The bare thread-group id.
    #[prost(int32, tag = "1")]
    pub bare_tgid: i32,
}

/// The key of exported memory.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Exported {
    /// The 65 bytes of the key.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// A secret of 32 bytes that the exporter sends in [`Restore`]. Empty in the response to that.
    #[prost(bytes = "vec", tag = "2")]
    pub secret: Vec<u8>,
}

/// The memory of a key. With the mechanisms `host` and `cuda-vmm`, its descriptor is in the packet.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Imported {
    /// The size in bytes.
    #[prost(uint64, tag = "1")]
    pub size: u64,
    /// The mechanism that shares the memory.
    #[prost(enumeration = "Mechanism", tag = "2")]
    pub mechanism: i32,
    /// The vendor's key or handle, for the mechanisms that have one.
    #[prost(bytes = "vec", tag = "3")]
    pub handle: Vec<u8>,
    /// The grant to acknowledge when the memory is mapped.
    #[prost(bytes = "vec", tag = "4")]
    pub grant: Vec<u8>,
}

/// One key of the caller.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Listed {
    /// The first bytes of a hash of the key, as in the audit log.
    #[prost(string, tag = "1")]
    pub hash: String,
    /// Size of the memory in bytes.
    #[prost(uint64, tag = "2")]
    pub size: u64,
    /// Whether the caller exported it; otherwise it imports it.
    #[prost(bool, tag = "3")]
    pub is_exporter: bool,
    /// Bare thread-group ids of the importers, only for the exporter: the first
    /// [`MAX_LISTED_IMPORTERS`](crate::limits::MAX_LISTED_IMPORTERS).
    #[prost(int32, repeated, tag = "4")]
    pub importers: Vec<i32>,
    /// The number of importers, only for the exporter.
    #[prost(uint32, tag = "5")]
    pub importer_count: u32,
}

/// The keys that the caller exported.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Keys {
    /// At most [`MAX_LISTED`](crate::limits::MAX_LISTED) keys.
    #[prost(message, repeated, tag = "1")]
    pub keys: Vec<Listed>,
    /// The total number of keys.
    #[prost(uint32, tag = "2")]
    pub total: u32,
}

/// A seat of the link.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Seat {
    /// Number of the seat.
    #[prost(uint32, tag = "1")]
    pub seat: u32,
    /// The side that it is on.
    #[prost(enumeration = "Side", tag = "2")]
    pub side: i32,
    /// The process id that the participant has written into the seat, as numbered in its own pid namespace.
    #[prost(uint32, tag = "3")]
    pub pid: u32,
}

/// One process that the broker knows.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Process {
    /// The identity of the process.
    #[prost(message, optional, tag = "1")]
    pub identity: Option<PeerIdentity>,
    /// Its connections, to all links of this broker.
    #[prost(uint32, tag = "2")]
    pub sessions: u32,
    /// Its seats on this link that it has claimed.
    #[prost(message, repeated, tag = "3")]
    pub seats: Vec<Seat>,
    /// The number of keys that it has exported.
    #[prost(uint32, tag = "4")]
    pub exports: u32,
    /// The number of keys that it imports.
    #[prost(uint32, tag = "5")]
    pub imports: u32,
}

/// All processes that the broker knows.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Processes {
    /// As many processes as fit into a packet, in order of their bare thread-group ids.
    #[prost(message, repeated, tag = "1")]
    pub processes: Vec<Process>,
    /// The total number of processes.
    #[prost(uint32, tag = "2")]
    pub total: u32,
    /// Connections of unidentified processes.
    #[prost(uint32, tag = "3")]
    pub unidentified: u32,
    /// Seats of this link that no process has claimed; only in the last packet.
    #[prost(message, repeated, tag = "4")]
    pub unclaimed: Vec<Seat>,
}

/// A device key, as listed for the broker's operator.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct KeyInfo {
    /// The first bytes of a hash of the key, as in the audit log.
    #[prost(string, tag = "1")]
    pub hash: String,
    /// Size of the memory in bytes.
    #[prost(uint64, tag = "2")]
    pub size: u64,
    /// The mechanism that shares the memory.
    #[prost(enumeration = "Mechanism", tag = "3")]
    pub mechanism: i32,
    /// Bare thread-group id of the exporter.
    #[prost(int32, tag = "4")]
    pub exporter: i32,
    /// Bare thread-group ids of the importers: the first
    /// [`MAX_LISTED_IMPORTERS`](crate::limits::MAX_LISTED_IMPORTERS).
    #[prost(int32, repeated, tag = "5")]
    pub importers: Vec<i32>,
    /// The number of importers.
    #[prost(uint32, tag = "6")]
    pub importer_count: u32,
    /// The number of processes, pods and service accounts that it admits.
    #[prost(uint32, tag = "7")]
    pub admitted: u32,
    /// Whether every process that knows the key may import it (flag 0x1).
    #[prost(bool, tag = "8")]
    pub open: bool,
    /// Whether its exporter has closed it, and waits for its importers.
    #[prost(bool, tag = "9")]
    pub closing: bool,
}

/// The keys of all processes.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct AllKeys {
    /// Up to [`MAX_LISTED`](crate::limits::MAX_LISTED), in the order in which they were exported.
    #[prost(message, repeated, tag = "1")]
    pub keys: Vec<KeyInfo>,
    /// The total number of keys.
    #[prost(uint32, tag = "2")]
    pub total: u32,
}

/// The reason for a refusal. Requests for keys of other processes are always [`Denied`](Self::Denied), whether or not
/// they exist.
#[derive(Clone, Copy, Debug, Enumeration, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(i32)]
pub enum Code {
    /// The field was not set.
    Unspecified = 0,
    /// The broker supports another version.
    Version = 1,
    /// The broker does not support the operation: it is a participant that is the host.
    Unsupported = 2,
    /// The request breaks a rule; the text says which.
    Invalid = 3,
    /// The caller is not permitted, or the object does not exist.
    Denied = 4,
    /// Other processes, which are named, still import the memory.
    Busy = 5,
    /// A limit is reached; the text names it.
    Limit = 6,
    /// The broker cannot identify the caller, because the identity service does not answer.
    Unidentified = 7,
    /// The broker is shutting down.
    Draining = 8,
}

/// A request was refused.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Refused {
    /// The kind of refusal.
    #[prost(enumeration = "Code", tag = "1")]
    pub code: i32,
    /// The refusal in words, with limit and remedy.
    #[prost(string, tag = "2")]
    pub text: String,
    /// Bare thread-group ids of the importers, with [`Code::Busy`]: the first [`MAX_NAMED`](crate::limits::MAX_NAMED).
    #[prost(int32, repeated, tag = "3")]
    pub importers: Vec<i32>,
}

/// The answer to one request.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Reply {
    /// The id of the request. 0 for events, challenges and memory that was not requested, and when the connection itself is
    /// refused.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The result of the request; [`reply::Result::Event`] answers none.
    #[prost(oneof = "reply::Result", tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15")]
    pub result: Option<reply::Result>,
}

impl Reply {
    /// Creates a reply of the broker.
    #[must_use]
    pub fn new(id: u64, result: reply::Result) -> Self {
        Self { id, result: Some(result) }
    }

    /// Creates a refusal of a request.
    #[must_use]
    pub fn refused(id: u64, code: Code, text: impl Into<String>) -> Self {
        let refused = Refused { code: code.into(), text: text.into(), importers: Vec::new() };
        Self::new(id, reply::Result::Refused(refused))
    }

    /// Creates an event, which has no request.
    #[must_use]
    pub fn event(happened: event::SessionEvent) -> Self {
        Self::new(0, reply::Result::Event(Event { happened: Some(happened) }))
    }
}

/// The results of a [`Reply`].
pub mod reply {
    use super::{
        AllKeys, Attached, Challenge, Done, Event, Exported, Imported, Keys, Oneof, PoolMemory, Processes,
        Refused, Tgid, Wanted, Welcome,
    };

    /// The result of a request, or an event.
    #[derive(Clone, PartialEq, Eq, Oneof)]
    pub enum Result {
        /// [`Done`].
        #[prost(message, tag = "2")]
        Done(Done),
        /// [`Welcome`].
        #[prost(message, tag = "3")]
        Welcome(Welcome),
        /// [`Attached`].
        #[prost(message, tag = "4")]
        Attached(Attached),
        /// [`Tgid`].
        #[prost(message, tag = "5")]
        Tgid(Tgid),
        /// [`Exported`].
        #[prost(message, tag = "6")]
        Exported(Exported),
        /// [`Imported`].
        #[prost(message, tag = "7")]
        Imported(Imported),
        /// [`Keys`].
        #[prost(message, tag = "8")]
        Keys(Keys),
        /// [`Refused`].
        #[prost(message, tag = "9")]
        Refused(Refused),
        /// [`Event`].
        #[prost(message, tag = "10")]
        Event(Event),
        /// [`Challenge`].
        #[prost(message, tag = "11")]
        Challenge(Challenge),
        /// [`Processes`].
        #[prost(message, tag = "12")]
        Processes(Processes),
        /// [`AllKeys`].
        #[prost(message, tag = "13")]
        AllKeys(AllKeys),
        /// [`PoolMemory`].
        #[prost(message, tag = "14")]
        PoolMemory(PoolMemory),
        /// [`Wanted`].
        #[prost(message, tag = "15")]
        Wanted(Wanted),
    }
}

/// Asks the exporter to admit an importer in its driver, and to [`Ack`] that.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Admit {
    /// The grant to acknowledge.
    #[prost(bytes = "vec", tag = "1")]
    pub grant: Vec<u8>,
    /// The key of the memory.
    #[prost(bytes = "vec", tag = "2")]
    pub key: Vec<u8>,
    /// The process to admit.
    #[prost(int32, tag = "3")]
    pub bare_tgid: i32,
}

/// An event that the broker reports.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Event {
    /// The kind of the event.
    #[prost(oneof = "event::SessionEvent", tags = "1, 2, 3, 4, 5")]
    pub happened: Option<event::SessionEvent>,
}

/// The kinds of an [`Event`].
pub mod event {
    use super::{Admit, Oneof};

    /// An event of a session, by its kind.
    #[derive(Clone, PartialEq, Eq, Oneof)]
    pub enum SessionEvent {
        /// A participant of the link has died; this is its bare thread-group id.
        #[prost(int32, tag = "1")]
        PeerDied(i32),
        /// The exporter of this key has died, or has not reconnected after a restart of the broker: its memory may be
        /// gone.
        #[prost(bytes, tag = "2")]
        RegionLost(Vec<u8>),
        /// The exporter of this key is closing: unmap the memory, and close the key.
        #[prost(bytes, tag = "3")]
        ExporterClosing(Vec<u8>),
        /// [`Admit`].
        #[prost(message, tag = "4")]
        Admit(Admit),
        /// The last importer of this key has closed.
        #[prost(bytes, tag = "5")]
        Unused(Vec<u8>),
    }
}
