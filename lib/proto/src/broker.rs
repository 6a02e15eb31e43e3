//! Participants and the broker of a link.
//!
//! A session is one connection. The participant asks, the broker answers each request with one [`Reply`] of the same id,
//! and may send an [`Event`] at any time. Without a sidecar, the process that created a link whose memory has no names is its host: it
//! answers `Hello`, `Attach` and `PoolMemory`, and refuses the rest as [`Code::Unsupported`].

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

/// What carries device memory from one process to another.
#[derive(Clone, Copy, Debug, Enumeration, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(i32)]
pub enum Mechanism {
    /// The field was not set.
    Unspecified = 0,
    /// A sealed memfd: host memory in the place of a device's.
    Host = 1,
    /// A descriptor of CUDA's virtual memory management.
    CudaVmm = 2,
    /// A key of the Ascend runtime.
    Ascend = 3,
    /// A CUDA IPC handle.
    CudaLegacy = 4,
}

/// Asks who the broker takes the caller for.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Hello {}

/// Asks for the segments of the link, when they have no names.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Attach {
    /// The side that the caller is going to be on.
    #[prost(enumeration = "Side", tag = "1")]
    pub side: i32,
}

/// Ends what the caller has here: its exports and imports, and its place among the participants.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Detach {}

/// Offers the segments of a link that have no names to a host that has said [`Wanted`]. They come along: the link's own, then
/// the pools in order of id.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Offer {}

/// Says which seat of the link the caller has taken: when its process ends, what that seat held is taken back.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Seated {
    /// Number of the seat.
    #[prost(uint32, tag = "1")]
    pub seat: u32,
    /// Its word, as the caller wrote it.
    #[prost(uint64, tag = "2")]
    pub word: u64,
}

/// Asks for the caller's bare thread-group id.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct BareTgid {}

/// Exports device memory. With the mechanisms `host` and `cuda-vmm`, its descriptor comes along.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ExportKey {
    /// The size in bytes.
    #[prost(uint64, tag = "1")]
    pub size: u64,
    /// 0: importers must be admitted. 1: they need not, where the operator's policy allows that.
    #[prost(uint64, tag = "2")]
    pub flags: u64,
    /// How the memory travels.
    #[prost(enumeration = "Mechanism", tag = "3")]
    pub mechanism: i32,
    /// The vendor's key or handle, for the mechanisms that have one, and which device it is: `cuda-vmm` a UUID of 16 bytes,
    /// `ascend` a key of 65, `cuda-legacy` a handle of 64, a UUID, and the exporter's own process id, 4 bytes, little-endian.
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

/// Asks for the memory behind a key.
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
    /// When it started, in clock ticks after boot: another process that gets the number later is not admitted.
    #[prost(uint64, tag = "2")]
    pub start_time: u64,
    /// Inode of its pidfd; 0 before Linux 6.9.
    #[prost(uint64, tag = "3")]
    pub pidfd_inode: u64,
}

/// Registers an export again, under its old key: after a restart of the broker, and when the exporter has connected again. The
/// memory's descriptor comes along as with [`ExportKey`]. May be sent several times, to admit more than one packet holds.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Restore {
    /// The key of the memory.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// The secret that came with the key in [`Exported`]: importers know the key, but not this.
    #[prost(bytes = "vec", tag = "2")]
    pub secret: Vec<u8>,
    /// The export, as it was.
    #[prost(message, optional, tag = "3")]
    pub export: Option<ExportKey>,
    /// Processes that the key admits, as [`Done`] named them: up to
    /// [`MAX_RESTORED_PIDS`](crate::limits::MAX_RESTORED_PIDS).
    #[prost(message, repeated, tag = "4")]
    pub admitted: Vec<Admitted>,
    /// Pods that it admits, as `namespace/name`.
    #[prost(string, repeated, tag = "5")]
    pub pods: Vec<String>,
    /// Service accounts that it admits, as `namespace/name`.
    #[prost(string, repeated, tag = "6")]
    pub service_accounts: Vec<String>,
    /// The exporter has closed the key by force, and waits for its importers.
    #[prost(bool, tag = "7")]
    pub closing: bool,
    /// More packets follow for this key, with further processes that it admits. Until the last one, imports and claims of
    /// processes that are not on the list yet wait.
    #[prost(bool, tag = "8")]
    pub more: bool,
}

/// Registers an import again, after a restart of the broker: the caller has the memory behind this key mapped.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Claim {
    /// The key of the memory.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
}

/// Says that the step that a grant waits for is done: the exporter has admitted the importer in its driver, or the
/// importer has mapped the memory.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Ack {
    /// The grant's 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub grant: Vec<u8>,
    /// Whether it could be done.
    #[prost(bool, tag = "2")]
    pub done: bool,
}

/// Asks whether a grant still stands: the exporter's question before it tells its driver a number, because a process that has
/// died leaves its number to another.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Stands {
    /// The grant's 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub grant: Vec<u8>,
}

/// Ends an import, or an export when the caller is its exporter.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Close {
    /// The key of the memory.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// The exporter does not wait for importers: they get an event, and lose the memory.
    #[prost(bool, tag = "2")]
    pub force: bool,
}

/// Asks for the caller's keys, without the keys themselves.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct List {
    /// Leave out so many.
    #[prost(uint32, tag = "1")]
    pub skip: u32,
}

/// The answer to a [`Challenge`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Proof {
    /// Bytes of the key.
    #[prost(bytes = "vec", tag = "1")]
    pub nonce: Vec<u8>,
}

/// Asks for all processes that the broker knows. For its operator alone.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ListProcesses {
    /// Leave out so many.
    #[prost(uint32, tag = "1")]
    pub skip: u32,
}

/// Lists the keys of all processes, without the keys themselves. For the broker's operator alone.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ListKeys {
    /// Leave out so many.
    #[prost(uint32, tag = "1")]
    pub skip: u32,
}

/// The device memory that a pool of the link is in. As a request it asks for that, and may offer some where there is none
/// yet: the first offer stays, and the answer is what the link has. With an offer, and with an answer that has memory, its
/// descriptor comes along.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PoolMemory {
    /// The pool's number: 3 `cuda_data`, 4 `gpu_data`.
    #[prost(uint32, tag = "1")]
    pub pool: u32,
    /// Identifies the memory in messages: a random number that the allocating process chose. 0: nothing is
    /// offered, or there is none.
    #[prost(uint64, tag = "2")]
    pub id: u64,
    /// The size in bytes.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// How the memory travels: `host` or `cuda-vmm`.
    #[prost(enumeration = "Mechanism", tag = "4")]
    pub mechanism: i32,
    /// Which device it is on: for `cuda-vmm` a UUID of 16 bytes.
    #[prost(bytes = "vec", tag = "5")]
    pub handle: Vec<u8>,
}

/// One request of a client.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Request {
    /// [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The caller's number for this request; the reply has it too.
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
    /// A request in this version.
    #[must_use]
    pub fn new(id: u64, op: request::Op) -> Self {
        Self { version: VERSION, id, op: Some(op) }
    }
}

/// What a [`Request`] holds.
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

/// Before Linux 6.5, to the first request of a session and with id 0: answer with [`Proof`], and wait on for the reply. It
/// shows that who made the connection lived after the broker had looked who it is.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Challenge {
    /// Random bytes that cannot be guessed.
    #[prost(bytes = "vec", tag = "1")]
    pub nonce: Vec<u8>,
}

/// The request was executed.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Done {
    /// After [`SetImportPid`]: which processes were admitted, for [`Restore`].
    #[prost(message, repeated, tag = "1")]
    pub admitted: Vec<Admitted>,
}

/// The identity of the caller as the broker knows it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Welcome {
    /// Not there when the broker does not know its peers: a participant that is the host.
    #[prost(message, optional, tag = "1")]
    pub identity: Option<PeerIdentity>,
}

/// The segments of a link come along.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Attached {
    /// Version of the layout in shared memory.
    #[prost(uint32, tag = "1")]
    pub layout: u32,
    /// How many segments come along.
    #[prost(uint32, tag = "3")]
    pub segments: u32,
}

/// The host is new and does not have the segments yet: a process with them sends [`Offer`], one without asks again.
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
    /// 32 bytes that the exporter keeps secret and sends in [`Restore`]. Empty in the response to that.
    #[prost(bytes = "vec", tag = "2")]
    pub secret: Vec<u8>,
}

/// The memory behind a key. With the mechanisms `host` and `cuda-vmm`, its descriptor comes along.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Imported {
    /// The size in bytes.
    #[prost(uint64, tag = "1")]
    pub size: u64,
    /// How the memory travels.
    #[prost(enumeration = "Mechanism", tag = "2")]
    pub mechanism: i32,
    /// The vendor's key or handle, for the mechanisms that have one.
    #[prost(bytes = "vec", tag = "3")]
    pub handle: Vec<u8>,
    /// To be acknowledged when the memory is mapped.
    #[prost(bytes = "vec", tag = "4")]
    pub grant: Vec<u8>,
}

/// One key of the caller.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Listed {
    /// The first bytes of a hash of the key, as the audit log has it.
    #[prost(string, tag = "1")]
    pub hash: String,
    /// Size of the memory in bytes.
    #[prost(uint64, tag = "2")]
    pub size: u64,
    /// Whether the caller exported it; otherwise it imports it.
    #[prost(bool, tag = "3")]
    pub is_exporter: bool,
    /// Bare thread-group ids of the importers, for the exporter alone: the first
    /// [`MAX_LISTED_IMPORTERS`](crate::limits::MAX_LISTED_IMPORTERS).
    #[prost(int32, repeated, tag = "4")]
    pub importers: Vec<i32>,
    /// How many import it, for its exporter alone.
    #[prost(uint32, tag = "5")]
    pub importer_count: u32,
}

/// The keys that the caller exported.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Keys {
    /// At most [`MAX_LISTED`](crate::limits::MAX_LISTED) keys.
    #[prost(message, repeated, tag = "1")]
    pub keys: Vec<Listed>,
    /// How many there are in all.
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
    /// The process id that the participant has written there, as its own pid namespace numbers it.
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
    /// Its seats on this link, as far as it has told of them.
    #[prost(message, repeated, tag = "3")]
    pub seats: Vec<Seat>,
    /// How many keys it has exported.
    #[prost(uint32, tag = "4")]
    pub exports: u32,
    /// How many keys it imports.
    #[prost(uint32, tag = "5")]
    pub imports: u32,
}

/// All processes that the broker knows.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Processes {
    /// As many as a packet holds, by their bare thread-group ids.
    #[prost(message, repeated, tag = "1")]
    pub processes: Vec<Process>,
    /// How many there are in all.
    #[prost(uint32, tag = "2")]
    pub total: u32,
    /// Connections of unidentified processes.
    #[prost(uint32, tag = "3")]
    pub unidentified: u32,
    /// Seats of this link that none of the processes has told of; only where nothing is left out.
    #[prost(message, repeated, tag = "4")]
    pub unclaimed: Vec<Seat>,
}

/// One key, for the broker's operator.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct KeyInfo {
    /// The first bytes of a hash of the key, as the audit log has it.
    #[prost(string, tag = "1")]
    pub hash: String,
    /// Size of the memory in bytes.
    #[prost(uint64, tag = "2")]
    pub size: u64,
    /// How the memory travels.
    #[prost(enumeration = "Mechanism", tag = "3")]
    pub mechanism: i32,
    /// Bare thread-group id of the exporter.
    #[prost(int32, tag = "4")]
    pub exporter: i32,
    /// Bare thread-group ids of the importers: the first
    /// [`MAX_LISTED_IMPORTERS`](crate::limits::MAX_LISTED_IMPORTERS).
    #[prost(int32, repeated, tag = "5")]
    pub importers: Vec<i32>,
    /// How many import it.
    #[prost(uint32, tag = "6")]
    pub importer_count: u32,
    /// How many processes, pods and service accounts it admits.
    #[prost(uint32, tag = "7")]
    pub admitted: u32,
    /// Every process that knows the key may import it (flag 0x1).
    #[prost(bool, tag = "8")]
    pub open: bool,
    /// Its exporter has closed it, and waits for its importers.
    #[prost(bool, tag = "9")]
    pub closing: bool,
}

/// The keys of all processes.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct AllKeys {
    /// Up to [`MAX_LISTED`](crate::limits::MAX_LISTED), in the order in which they were exported.
    #[prost(message, repeated, tag = "1")]
    pub keys: Vec<KeyInfo>,
    /// How many there are in all.
    #[prost(uint32, tag = "2")]
    pub total: u32,
}

/// Why a request was refused. Requests for keys of other processes are always [`Denied`](Self::Denied), whether or not they
/// exist.
#[derive(Clone, Copy, Debug, Enumeration, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(i32)]
pub enum Code {
    /// The field was not set.
    Unspecified = 0,
    /// The broker speaks another version.
    Version = 1,
    /// This broker does not do that: it is a participant that is the host.
    Unsupported = 2,
    /// The request breaks a rule; the text says which.
    Invalid = 3,
    /// The caller may not, or there is no such thing.
    Denied = 4,
    /// Others still import the memory; they are named.
    Busy = 5,
    /// A limit is reached; the text names it.
    Limit = 6,
    /// The broker does not know who the caller is, because the identity service does not answer.
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
    /// The same for people, with limit and remedy.
    #[prost(string, tag = "2")]
    pub text: String,
    /// Bare thread-group ids of those who import, with [`Code::Busy`]: the first
    /// [`MAX_NAMED`](crate::limits::MAX_NAMED).
    #[prost(int32, repeated, tag = "3")]
    pub importers: Vec<i32>,
}

/// The answer to one request.
///
/// ```
/// use shmesh_proto::broker::{Code, Reply, reply};
/// let refused = Reply::refused(3, Code::Denied, "no such key, or not for you");
/// assert!(matches!(refused.result, Some(reply::Result::Refused(_))));
/// ```
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Reply {
    /// The id of the request. 0 for events, challenges and memory that was not requested, and when the connection itself is
    /// refused.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// What came of it; [`reply::Result::Event`] answers nothing.
    #[prost(oneof = "reply::Result", tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15")]
    pub result: Option<reply::Result>,
}

impl Reply {
    /// One reply of the broker.
    #[must_use]
    pub fn new(id: u64, result: reply::Result) -> Self {
        Self { id, result: Some(result) }
    }

    /// A request that was refused.
    #[must_use]
    pub fn refused(id: u64, code: Code, text: impl Into<String>) -> Self {
        let refused = Refused { code: code.into(), text: text.into(), importers: Vec::new() };
        Self::new(id, reply::Result::Refused(refused))
    }

    /// An event that was not requested.
    #[must_use]
    pub fn event(happened: event::Happened) -> Self {
        Self::new(0, reply::Result::Event(Event { happened: Some(happened) }))
    }
}

/// What a [`Reply`] holds.
pub mod reply {
    use super::{
        AllKeys, Attached, Challenge, Done, Event, Exported, Imported, Keys, Oneof, PoolMemory, Processes,
        Refused, Tgid, Wanted, Welcome,
    };

    /// What came of a request, or an event.
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

/// The exporter is to admit an importer in its driver, and to [`Ack`] that.
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
    /// What the event is.
    #[prost(oneof = "event::Happened", tags = "1, 2, 3, 4, 5")]
    pub happened: Option<event::Happened>,
}

/// What an [`Event`] holds.
pub mod event {
    use super::{Admit, Oneof};

    /// The kinds of events.
    #[derive(Clone, PartialEq, Eq, Oneof)]
    pub enum Happened {
        /// A participant of the link has died; its bare thread-group id.
        #[prost(int32, tag = "1")]
        PeerDied(i32),
        /// The exporter of this key has died, or has not come back after a restart of the broker: its memory may be gone.
        #[prost(bytes, tag = "2")]
        RegionLost(Vec<u8>),
        /// The exporter of this key closes: unmap it, and close.
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
