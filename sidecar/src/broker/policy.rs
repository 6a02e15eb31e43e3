//! The policy of the operator: which mechanisms are permitted, and all limits.

use shmesh_proto::limits;

/// The policy of the operator. A limit is the largest number that is still accepted.
///
/// An *account* is what quotas are for: a pod, or for processes outside pods a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Whether keys may be exported that are open to every process that knows them (flag 0x1).
    pub open_keys: bool,
    /// Whether legacy CUDA IPC handles may be exported. They cannot be revoked: a process that has seen one can use it
    /// for ever.
    pub cuda_legacy: bool,
    /// Whether process ids are the node's. Otherwise a driver that admits by process id would admit the
    /// wrong processes.
    pub bare_numbers: bool,
    /// Sessions at the same time.
    pub sessions: usize,
    /// Sessions of one process at the same time.
    pub sessions_per_process: usize,
    /// Sessions of one account at the same time.
    pub sessions_per_account: usize,
    /// Sessions of unidentified processes at the same time.
    pub sessions_unidentified: usize,
    /// Processes that have a session, a key or an import.
    pub processes: usize,
    /// Processes of one account that have a session, a key or an import.
    pub processes_per_account: usize,
    /// Maximum number of keys.
    pub keys: usize,
    /// Keys that one session has exported.
    pub keys_per_session: usize,
    /// Keys of one account.
    pub keys_per_account: usize,
    /// Total size of the keys of one account in bytes.
    pub bytes_per_account: u64,
    /// Processes, pods and service accounts that the keys of one account admit, in total.
    pub admitted_per_account: usize,
    /// Imports of one account.
    pub imports_per_account: usize,
    /// Grants of one account that wait for an acknowledgement.
    pub grants_per_account: usize,
    /// Grants of one key that wait for an acknowledgement.
    pub grants_per_key: usize,
    /// Process ids that one key admits.
    pub pids_per_key: usize,
    /// Pods and service accounts that one key admits.
    pub subjects_per_key: usize,
    /// Pending questions about processes of one session.
    pub questions_per_session: usize,
    /// Milliseconds that a grant waits for its acknowledgement.
    pub grant_millis: u64,
    /// Milliseconds that a question about processes waits for its answer.
    pub answer_millis: u64,
    /// Milliseconds after [`Command::Recover`](super::Command::Recover) in which keys and imports of a previous broker
    /// are registered again.
    pub restore_millis: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            open_keys: false,
            cuda_legacy: false,
            bare_numbers: true,
            sessions: limits::MAX_SESSIONS,
            sessions_per_process: limits::MAX_SESSIONS_PER_PROCESS,
            sessions_per_account: 256,
            sessions_unidentified: 64,
            processes: 4096,
            processes_per_account: 512,
            keys: 65_536,
            keys_per_session: limits::MAX_KEYS_PER_SESSION,
            keys_per_account: limits::MAX_KEYS_PER_SESSION,
            // More than the memory of any eight devices.
            bytes_per_account: 16 << 40,
            admitted_per_account: 131_072,
            imports_per_account: limits::MAX_KEYS_PER_SESSION,
            grants_per_account: limits::MAX_GRANTS_PER_KEY,
            grants_per_key: limits::MAX_GRANTS_PER_KEY,
            pids_per_key: limits::MAX_PIDS_PER_KEY,
            subjects_per_key: limits::MAX_SUBJECTS_PER_KEY,
            questions_per_session: 4,
            grant_millis: limits::GRANT_MILLIS,
            answer_millis: limits::ANSWER_MILLIS,
            restore_millis: limits::RESTORE_MILLIS,
        }
    }
}
