//! Every limit of the protocol.

/// The protocol version of this crate. Requests of another version are refused as such.
pub const VERSION: u32 = 1;

/// Maximum number of bytes in one packet.
pub const MAX_PACKET_BYTES: usize = 8192;

/// Maximum number of descriptors in one packet: six segments, and two in reserve.
pub const MAX_FDS: usize = 8;

/// Maximum number of sessions of one broker at the same time.
pub const MAX_SESSIONS: usize = 1024;

/// Maximum number of sessions of one process at one broker.
pub const MAX_SESSIONS_PER_PROCESS: usize = 64;

/// Maximum number of keys that one session can export.
pub const MAX_KEYS_PER_SESSION: usize = 16_384;

/// Maximum number of process ids in one `SetImportPid`, as in a driver's call.
pub const MAX_PIDS_PER_CALL: usize = 31;

/// Maximum number of processes in one `Restore`.
pub const MAX_RESTORED_PIDS: usize = 128;

/// Maximum number of process ids that one key admits.
pub const MAX_PIDS_PER_KEY: usize = 32_768;

/// Maximum number of pods or service accounts that one key admits.
pub const MAX_SUBJECTS_PER_KEY: usize = 64;

/// Maximum number of bytes in the name of a pod or service account.
pub const MAX_SUBJECT_BYTES: usize = 253;

/// Maximum number of grants of one key that wait for their acknowledgement.
pub const MAX_GRANTS_PER_KEY: usize = 1024;

/// Maximum number of keys in one answer to `List`.
pub const MAX_LISTED: usize = 64;

/// Maximum number of importers that are named if a key is `Busy`; there may be more.
pub const MAX_NAMED: usize = 1024;

/// Maximum number of importers that are named for each key in one answer to `List`; there may be more.
pub const MAX_LISTED_IMPORTERS: usize = 8;

/// Milliseconds that a grant waits for the exporter and for its delivery.
pub const GRANT_MILLIS: u64 = 10_000;

/// Milliseconds after the start of a broker in which exporters and importers of the previous one register again. Keys
/// that are not registered by then are lost for their importers.
pub const RESTORE_MILLIS: u64 = 10_000;

/// Milliseconds that an answer may take.
pub const ANSWER_MILLIS: u64 = 1_000;
