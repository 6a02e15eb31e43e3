//! Exported memory, the processes that may import it, and its importers.

use std::collections::{BTreeMap, BTreeSet};

use shmesh_proto::broker::{Admitted, Mechanism};
use shmesh_proto::identity::{PeerIdentity, Pod};
use shmesh_proto::key::DeviceKey;
use shmesh_proto::limits::MAX_SUBJECT_BYTES;

use super::audit::Reason;
use super::digest::Digest;
use super::{FdToken, ProcessId, SessionId};

/// A region's number, never reused: everything that is bound to it ends with it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct RegionId(pub(super) u64);

/// Exported memory with its key.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) key: DeviceKey,
    pub(super) digest: Digest,
    pub(super) exporter: ProcessId,
    /// The session that exported it. It may have ended.
    pub(super) session: SessionId,
    pub(super) size: u64,
    pub(super) mechanism: Mechanism,
    pub(super) handle: Vec<u8>,
    pub(super) fd: Option<FdToken>,
    /// Whether every process that knows the key may import it.
    pub(super) open: bool,
    /// Whether the exporter has closed it while others import it; new imports are refused.
    pub(super) closing: bool,
    /// Whether it was restored from a previous broker, so that importers may not have reconnected yet.
    pub(super) is_awaited: bool,
    /// Whether further packets with admitted processes follow.
    pub(super) is_partial: bool,
    /// Whether its exporter got `Busy` because it is awaited, and waits for `Unused`.
    pub(super) is_wanted: bool,
    pub(super) pids: BTreeMap<i32, RegionPin>,
    pub(super) subjects: BTreeSet<AdmittedSubject>,
    pub(super) imports: BTreeMap<ProcessId, Import>,
    /// Number of imports that have a grant.
    pub(super) grants: usize,
}

/// The process that a process id meant when it was admitted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct RegionPin {
    start_time: u64,
    pidfd_inode: u64,
}

impl RegionPin {
    pub(super) fn of(process: &ProcessId) -> Self {
        Self { start_time: process.start_time, pidfd_inode: process.pidfd_inode }
    }

    /// The identity of a process in the exporter's `Restore`.
    pub(super) fn restored(admitted: &Admitted) -> Self {
        Self { start_time: admitted.start_time, pidfd_inode: admitted.pidfd_inode }
    }

    pub(super) fn admitted(self, bare_tgid: i32) -> Admitted {
        Admitted { bare_tgid, start_time: self.start_time, pidfd_inode: self.pidfd_inode }
    }

    /// Whether this is the process. Inodes are compared if the kernel has them.
    fn is(self, process: &ProcessId) -> bool {
        let inode_differs =
            self.pidfd_inode != 0 && process.pidfd_inode != 0 && self.pidfd_inode != process.pidfd_inode;
        self.start_time == process.start_time && !inode_differs
    }
}

/// A pod or service account.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum AdmittedSubject {
    Pod(String),
    ServiceAccount(String),
}

impl AdmittedSubject {
    /// Whether a text can be `namespace/name`.
    pub(super) fn is_sane(text: &str) -> bool {
        let allowed = |part: &str| {
            let char = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-' || c == b'.';
            !part.is_empty() && part.bytes().all(char)
        };
        text.len() <= MAX_SUBJECT_BYTES
            && text.split_once('/').is_some_and(|(namespace, name)| allowed(namespace) && allowed(name))
    }

    /// The subjects of a process; none unless the identity service has confirmed its pod.
    fn of(pod: &Pod) -> impl Iterator<Item = Self> {
        let known = |name: &str| pod.confirmed && !pod.namespace.is_empty() && !name.is_empty();
        let full = |name: &str| known(name).then(|| format!("{}/{name}", pod.namespace));
        let name = full(&pod.name).map(Self::Pod);
        let account = full(&pod.service_account).map(Self::ServiceAccount);
        name.into_iter().chain(account)
    }
}

impl std::fmt::Display for AdmittedSubject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pod(name) => write!(f, "pod {name}"),
            Self::ServiceAccount(name) => write!(f, "service account {name}"),
        }
    }
}

/// One process's import of a region.
#[derive(Debug)]
pub(super) struct Import {
    pub(super) stage: ImportStage,
    /// The session that requested it. It may have ended, unless the exporter has not admitted the importer yet.
    pub(super) session: SessionId,
    /// The grant that waits for its acknowledgement.
    pub(super) grant: Option<Digest>,
}

/// The progress of an import.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ImportStage {
    /// Waiting until the exporter admits the importer; then this request is answered. `asked` is the session that got
    /// `Admit`, if any.
    Admitting { request: u64, asked: Option<SessionId> },
    /// The memory was delivered. Whether acknowledged or not, the importer may have mapped it.
    Delivered,
}

impl Region {
    /// Whether a process may import this, or the reason why not.
    pub(super) fn admission(&self, process: &ProcessId, identity: &PeerIdentity) -> Result<(), Reason> {
        let pin = self.pids.get(&process.bare_tgid);
        if self.open || pin.is_some_and(|pin| pin.is(process)) {
            return Ok(());
        }
        if identity.pod.iter().flat_map(AdmittedSubject::of).any(|subject| self.subjects.contains(&subject)) {
            return Ok(());
        }
        Err(if pin.is_some() { Reason::ProcessReplaced } else { Reason::NotAdmitted })
    }

    /// Whether its list is not complete yet, so that a process may still be added.
    pub(super) fn may_admit_later(&self, process: &ProcessId, identity: &PeerIdentity) -> bool {
        self.is_partial
            && self.exporter != *process
            && !self.imports.contains_key(process)
            && self.admission(process, identity).is_err()
    }

    /// The processes that may have the memory mapped.
    pub(super) fn importers(&self) -> impl Iterator<Item = &ProcessId> {
        self.imports
            .iter()
            .filter(|(_, import)| import.stage == ImportStage::Delivered)
            .map(|(process, _)| process)
    }

    pub(super) fn is_used(&self) -> bool {
        self.importers().next().is_some()
    }

    /// Whether importers have it mapped, or may have.
    pub(super) fn may_be_used(&self) -> bool {
        self.is_awaited || self.is_used()
    }

    /// Number of processes, pods and service accounts that it admits.
    pub(super) fn admitted(&self) -> usize {
        self.pids.len() + self.subjects.len()
    }
}
