//! Audit records: process, operation, key, outcome and reason.
//!
//! A record has hashes of keys and grants, never the keys, grants or handles themselves.

use serde::Serialize;
use shmesh_proto::broker::{Mechanism, Request, request};
use shmesh_proto::identity::PeerIdentity;

use super::Millis;

/// The operation that a record is about.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// A client connected to the sidecar.
    Open,
    /// A client sent an invalid packet, or does not read.
    Packet,
    /// A client asks for its identity: `Hello`.
    Hello,
    /// A client attaches to a link: `Attach`.
    Attach,
    /// A participant claims its seat: `Seated`.
    Seated,
    /// A participant offers memory to a host: `Offer`.
    Offer,
    /// A process gives up its keys and imports: `Detach`.
    Detach,
    /// A process asks for its bare thread-group id: `BareTgid`.
    BareTgid,
    /// An exporter registers memory: `ExportKey`.
    Export,
    /// An exporter admits importers: `SetImportPid`.
    Admit,
    /// An importer asks for memory: `ImportByKey`.
    Import,
    /// A grant is acknowledged: `Ack`.
    Ack,
    /// An exporter checks a grant: `Stands`.
    Stands,
    /// An exporter registers a key again: `Restore`.
    Restore,
    /// An importer registers an import again: `Claim`.
    Claim,
    /// An export or import is closed: `Close`.
    Close,
    /// A process lists its keys: `List`.
    List,
    /// An operator lists all processes or keys: `ListProcesses`, `ListKeys`.
    Inspect,
    /// Device memory of a pool is offered or fetched: `PoolMemory`.
    PoolMemory,
    /// A request without an operation was sent.
    Nothing,
    /// Records of one account that were suppressed by the rate limit.
    Suppressed,
}

impl Op {
    /// The operation of a request.
    pub(crate) fn of(request: &Request) -> Self {
        use request::Op;
        match &request.op {
            None => Self::Nothing,
            Some(Op::Hello(_)) => Self::Hello,
            Some(Op::Attach(_) | Op::Proof(_)) => Self::Attach,
            Some(Op::Seated(_)) => Self::Seated,
            Some(Op::Offer(_)) => Self::Offer,
            Some(Op::ListProcesses(_) | Op::ListKeys(_)) => Self::Inspect,
            Some(Op::PoolMemory(_)) => Self::PoolMemory,
            Some(Op::Detach(_)) => Self::Detach,
            Some(Op::BareTgid(_)) => Self::BareTgid,
            Some(Op::ExportKey(_)) => Self::Export,
            Some(Op::SetImportPid(_)) => Self::Admit,
            Some(Op::ImportByKey(_)) => Self::Import,
            Some(Op::Ack(_)) => Self::Ack,
            Some(Op::Stands(_)) => Self::Stands,
            Some(Op::Restore(_)) => Self::Restore,
            Some(Op::Claim(_)) => Self::Claim,
            Some(Op::Close(_)) => Self::Close,
            Some(Op::List(_)) => Self::List,
        }
    }
}

/// The outcome of an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The operation was carried out.
    Done,
    /// It waits for the exporter or the identity service.
    Waits,
    /// The operation was refused.
    Refused,
    /// It was ended by another process or a timeout.
    Ended,
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// The reason of a refusal or an end, for the audit log and the metrics, which may be precise.
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub enum Reason {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Reason {
            /// Every reason, so that each can have a counter from the start.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The name in the audit log and in the metrics.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }
        }
    };
}

reasons! {
    /// The request is of another version.
    Version = "version",
    /// The request cannot be decoded or lacks a field.
    Malformed = "malformed",
    /// The broker does not support this operation.
    Unsupported = "unsupported",
    /// The caller cannot be identified.
    Unidentified = "unidentified",
    /// The packet was sent by another process than the connection's.
    ForeignSender = "foreign_sender",
    /// The session has ended, or never existed.
    NoSession = "no_session",
    /// The sidecar is shutting down.
    Draining = "draining",
    /// The packet has the wrong number of descriptors.
    BadDescriptors = "bad_descriptors",
    /// A vendor's handle has the wrong length.
    BadHandle = "bad_handle",
    /// The size is 0.
    BadSize = "bad_size",
    /// A flag is not defined.
    BadFlags = "bad_flags",
    /// The policy does not permit keys that are open to all processes.
    OpenNotPermitted = "open_not_permitted",
    /// The mechanism is not known.
    BadMechanism = "bad_mechanism",
    /// The policy does not permit this mechanism.
    MechanismNotPermitted = "mechanism_not_permitted",
    /// The source of random numbers repeated itself.
    Entropy = "entropy",
    /// The key does not exist.
    UnknownKey = "unknown_key",
    /// The caller did not export the key.
    NotExporter = "not_exporter",
    /// The caller does not import the key.
    NotImporter = "not_importer",
    /// The caller is on none of the key's lists.
    NotAdmitted = "not_admitted",
    /// The caller has the process id of an admitted process, but is another process.
    ProcessReplaced = "process_replaced",
    /// The key is open to all processes, so it has no list.
    OpenKey = "open_key",
    /// The process id is 0 or negative.
    BadPid = "bad_pid",
    /// The text is not a pod or service account.
    BadSubject = "bad_subject",
    /// The call names no process to admit.
    NoProcess = "no_process",
    /// No living process has this process id.
    NotAlive = "not_alive",
    /// The identity service did not answer in time.
    NoAnswer = "no_answer",
    /// The caller exported the key, so it has the memory already.
    SelfImport = "self_import",
    /// The caller imports the key already.
    AlreadyImported = "already_imported",
    /// The exporter closes the key.
    Closing = "closing",
    /// The exporter has died.
    ExporterDied = "exporter_died",
    /// The exporter has not registered the key again in time, after a restart of the broker.
    NotRestored = "not_restored",
    /// The exporter had no session in time to admit the importer.
    ExporterAway = "exporter_away",
    /// The exporter could not admit the importer.
    ExporterRefused = "exporter_refused",
    /// The importer could not map the memory.
    NotMapped = "not_mapped",
    /// The importer has died.
    ImporterDied = "importer_died",
    /// The importer cancelled the import.
    Cancelled = "cancelled",
    /// Other processes import the key.
    Busy = "busy",
    /// The grant does not exist.
    UnknownGrant = "unknown_grant",
    /// The grant belongs to another process.
    ForeignGrant = "foreign_grant",
    /// The grant was used before.
    GrantUsed = "grant_used",
    /// The grant was not acknowledged in time.
    GrantExpired = "grant_expired",
    /// The grant's import ended before it was acknowledged.
    GrantCancelled = "grant_cancelled",
    /// Limit: sessions of all clients.
    Sessions = "limit_sessions",
    /// Limit: sessions of one process.
    SessionsOfProcess = "limit_sessions_per_process",
    /// Limit: sessions of one account.
    SessionsOfAccount = "limit_sessions_per_account",
    /// Limit: sessions of unidentified processes.
    SessionsUnidentified = "limit_sessions_unidentified",
    /// Limit: processes of one account.
    ProcessesOfAccount = "limit_processes_per_account",
    /// Limit: processes of all accounts.
    Processes = "limit_processes",
    /// Limit: keys of all processes.
    Keys = "limit_keys",
    /// Limit: keys of one session.
    KeysOfSession = "limit_keys_per_session",
    /// Limit: keys of one account.
    KeysOfAccount = "limit_keys_per_account",
    /// Limit: bytes of one account.
    BytesOfAccount = "limit_bytes_per_account",
    /// Limit: processes and subjects admitted by the keys of one account.
    AdmittedOfAccount = "limit_admitted_per_account",
    /// Limit: imports of one account.
    ImportsOfAccount = "limit_imports_per_account",
    /// Limit: grants of one account.
    GrantsOfAccount = "limit_grants_per_account",
    /// Limit: grants of one key.
    GrantsOfKey = "limit_grants_per_key",
    /// Limit: process ids in one call.
    PidsOfCall = "limit_pids_per_call",
    /// Limit: processes in one `Restore`.
    RestoredPids = "limit_restored_pids",
    /// Limit: process ids of one key.
    PidsOfKey = "limit_pids_per_key",
    /// Limit: pods and service accounts of one key.
    SubjectsOfKey = "limit_subjects_per_key",
    /// Limit: pending questions about processes of one session.
    Questions = "limit_questions_per_session",
    /// The client does not read its packets.
    Slow = "slow",
    /// The caller is not the operator of the sidecar.
    NotOperator = "not_operator",
    /// This sidecar keeps the link and needs no offers.
    KeptHere = "kept_here",
    /// The link is damaged and not kept at the moment.
    LinkNotKept = "link_not_kept",
    /// The caller has not attached to the link.
    NotAttached = "not_attached",
    /// The offered memory does not fit this pool.
    BadPoolMemory = "bad_pool_memory",
    /// The seat is vacant, or another process has it.
    NotSeated = "not_seated",
    /// Another process has claimed this seat before.
    SeatTaken = "seat_taken",
    /// Limit: seats of one process.
    SeatsOfProcess = "limit_seats_per_process",
    /// Limit: descriptors of this sidecar.
    Descriptors = "limit_descriptors",
    /// Limit: descriptors for one process.
    DescriptorsOfProcess = "limit_descriptors_per_process",
    /// Limit: descriptors for one account.
    DescriptorsOfAccount = "limit_descriptors_per_account",
    /// Limit: connections of one user.
    SessionsOfUser = "limit_sessions_per_user",
    /// Limit: bytes that wait to be read by one account.
    OutgoingOfAccount = "limit_outgoing_per_account",
}

impl Serialize for Reason {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// One of the two sides of a record.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[expect(missing_docs, reason = "the fields of PeerIdentity and Pod, which say what they are")]
pub struct Party {
    pub bare_tgid: i32,
    pub start_time: u64,
    pub pidfd_inode: u64,
    pub uid: u32,
    pub gid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PartyPod>,
}

/// The pod of a [`Party`].
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[expect(missing_docs, reason = "the fields of Pod, which say what they are")]
pub struct PartyPod {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub container: String,
    pub container_id: String,
    pub service_account: String,
    pub confirmed: bool,
}

impl From<&PeerIdentity> for Party {
    fn from(peer: &PeerIdentity) -> Self {
        let pod = peer.pod.as_ref().map(|pod| PartyPod {
            uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            container: pod.container.clone(),
            container_id: pod.container_id.clone(),
            service_account: pod.service_account.clone(),
            confirmed: pod.confirmed,
        });
        let &PeerIdentity { bare_tgid, start_time, pidfd_inode, uid, gid, .. } = peer;
        Self { bare_tgid, start_time, pidfd_inode, uid, gid, pod }
    }
}

impl Reason {
    /// Reasons that concern connections and seats, which do not involve the broker of keys.
    pub const OF_THE_SOCKET: &[Self] = &[
        Self::ForeignSender,
        Self::Slow,
        Self::NotOperator,
        Self::KeptHere,
        Self::LinkNotKept,
        Self::NotAttached,
        Self::BadPoolMemory,
        Self::NotSeated,
        Self::SeatTaken,
        Self::SeatsOfProcess,
        Self::Descriptors,
        Self::DescriptorsOfProcess,
        Self::DescriptorsOfAccount,
        Self::SessionsOfUser,
        Self::OutgoingOfAccount,
    ];
}

/// Credentials of a connection, from the kernel: the only information about an unidentified client.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Credentials {
    /// Process id, as numbered in the sidecar's pid namespace; 0 if it has none there.
    pub pid: u32,
    /// User id of the process.
    pub uid: u32,
    /// Group id of the process.
    pub gid: u32,
}

/// One record of the audit log.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Record {
    /// Time of the operation, on the broker's clock.
    #[serde(rename = "at_ms", serialize_with = "millis")]
    pub at: Millis,
    /// The operation that the record is about.
    pub op: Op,
    /// The outcome of an operation.
    pub outcome: Outcome,
    /// The reason of a refusal or an end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// The process that did it, or whose import or export ended; omitted for an unidentified session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caller: Option<Party>,
    /// The credentials of the connection, if the process is not identified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<Credentials>,
    /// The link of the connection, for operations on the link.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
    /// The seat of the link.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seat: Option<u32>,
    /// The other side: the exporter of an import, the importer of an exporter's acknowledgement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other: Option<Party>,
    /// The first bytes of the key's hash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_hash: Option<String>,
    /// The first bytes of the grant's hash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grant_hash: Option<String>,
    /// Size of the key's memory in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// The mechanism that shares the memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mechanism: Option<&'static str>,
    /// The processes and subjects that a `SetImportPid` admits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub admits: Vec<String>,
    /// Number of suppressed records.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suppressed: Option<u64>,
}

impl Record {
    /// Creates a record of a successful operation.
    #[must_use]
    pub fn new(at: Millis, op: Op) -> Self {
        Self {
            at,
            op,
            outcome: Outcome::Done,
            reason: None,
            caller: None,
            socket: None,
            link: None,
            seat: None,
            other: None,
            key_hash: None,
            grant_hash: None,
            size_bytes: None,
            mechanism: None,
            admits: Vec::new(),
            suppressed: None,
        }
    }

    /// The record as one line of JSON, without a line end.
    #[must_use]
    pub fn to_line(&self) -> String {
        // Names, numbers and texts only, all of which JSON can represent.
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it so")]
fn millis<S: serde::Serializer>(at: &Millis, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(at.0)
}

/// The name of a mechanism, as in configuration and documents.
pub(super) fn name(mechanism: Mechanism) -> &'static str {
    match mechanism {
        Mechanism::Unspecified => "unspecified",
        Mechanism::Host => "host",
        Mechanism::CudaVmm => "cuda-vmm",
        Mechanism::Ascend => "ascend",
        Mechanism::CudaLegacy => "cuda-legacy",
    }
}
