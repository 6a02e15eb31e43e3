//! Every limit of the protocol.

/// The version that this crate speaks. Another one is refused by name, never guessed at.
pub const VERSION: u32 = 1;

/// Bytes in one packet.
pub const MAX_PACKET_BYTES: usize = 8192;

/// Descriptors with one packet: six segments, and room for two more.
pub const MAX_FDS: usize = 8;

/// Sessions of one broker at the same time.
pub const MAX_SESSIONS: usize = 1024;

/// Sessions of one process at one broker.
pub const MAX_SESSIONS_PER_PROCESS: usize = 64;

/// Keys that one session may have exported.
pub const MAX_KEYS_PER_SESSION: usize = 16_384;

/// Process ids in one `SetImportPid`: what a driver takes per call.
pub const MAX_PIDS_PER_CALL: usize = 31;

/// Processes in one `Restore`.
pub const MAX_RESTORED_PIDS: usize = 128;

/// Process ids that one key admits.
pub const MAX_PIDS_PER_KEY: usize = 32_768;

/// Pods or service accounts that one key admits.
pub const MAX_SUBJECTS_PER_KEY: usize = 64;

/// Bytes of a pod's or service account's name.
pub const MAX_SUBJECT_BYTES: usize = 253;

/// Grants that wait to be taken, for one key.
pub const MAX_GRANTS_PER_KEY: usize = 1024;

/// Keys in one answer to `List`.
pub const MAX_LISTED: usize = 64;

/// Importers named when a key is `Busy`; there may be more.
pub const MAX_NAMED: usize = 1024;

/// Importers named for each key in one answer to `List`; there may be more.
pub const MAX_LISTED_IMPORTERS: usize = 8;

/// Milliseconds that a grant waits for the exporter's word and to be delivered.
pub const GRANT_MILLIS: u64 = 10_000;

/// Milliseconds after the start of a broker in which exporters and importers of the previous one register again. Keys that
/// were not registered by then are lost for their importers.
pub const RESTORE_MILLIS: u64 = 10_000;

/// Milliseconds that one side may take to answer.
pub const ANSWER_MILLIS: u64 = 1_000;
