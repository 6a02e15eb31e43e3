//! The broker's tables, and the only code that changes them, so that indexes and counters stay consistent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shmesh_proto::identity::PeerIdentity;
use shmesh_proto::key::DeviceKey;

use super::digest::Digest;
use super::region::{AdmittedSubject, Import, ImportStage, Region, RegionId, RegionPin};
use super::{ProcessId, SessionId, Ticket};

/// One connection of a client.
#[derive(Debug, Default)]
pub(super) struct SessionEntry {
    /// The process; `None` if it cannot be identified.
    pub(super) peer: Option<(ProcessId, Arc<PeerIdentity>)>,
    /// Number of keys that it has exported.
    pub(super) keys: usize,
    /// Its pending questions to the identity service.
    pub(super) questions: BTreeSet<Ticket>,
}

/// A process with a session, a key or an import.
#[derive(Debug)]
pub(super) struct ProcessEntry {
    pub(super) identity: Arc<PeerIdentity>,
    account: Account,
    pub(super) sessions: BTreeSet<SessionId>,
    pub(super) exports: BTreeSet<RegionId>,
    pub(super) imports: BTreeSet<RegionId>,
    /// Imports that it claims, whose exporter has not restored the key yet.
    pub(super) claims: BTreeMap<Digest, EarlyClaim>,
}

impl ProcessEntry {
    fn is_idle(&self) -> bool {
        self.sessions.is_empty()
            && self.exports.is_empty()
            && self.imports.is_empty()
            && self.claims.is_empty()
    }
}

/// A claim to an import of a key that is not restored yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct EarlyClaim {
    pub(super) key: DeviceKey,
    pub(super) session: SessionId,
}

/// The pod or user that quotas are charged to.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Account {
    /// A pod, by its uid, which is known even before its name is confirmed.
    Pod(String),
    /// A user outside pods.
    User(u32),
}

impl Account {
    pub(crate) fn of(identity: &PeerIdentity) -> Self {
        identity.pod.as_ref().map_or(Self::User(identity.uid), |pod| Self::Pod(pod.uid.clone()))
    }
}

/// The quotas that an account uses.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Usage {
    pub(super) sessions: usize,
    pub(super) processes: usize,
    pub(super) keys: usize,
    pub(super) bytes: u64,
    pub(super) admitted: usize,
    pub(super) imports: usize,
    pub(super) grants: usize,
}

#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) sessions: BTreeMap<SessionId, SessionEntry>,
    pub(super) processes: BTreeMap<ProcessId, ProcessEntry>,
    pub(super) regions: BTreeMap<RegionId, Region>,
    by_key: BTreeMap<Digest, RegionId>,
    accounts: BTreeMap<Account, Usage>,
    regions_ever: u64,
    /// Sessions of unidentified processes.
    pub(super) unidentified: usize,
}

impl Tables {
    /// The region of a key. The hash finds it, and then the keys are compared in constant time.
    pub(super) fn find(&self, key: &DeviceKey, digest: &Digest) -> Option<(RegionId, &Region)> {
        let id = *self.by_key.get(digest)?;
        self.regions.get(&id).filter(|region| region.key == *key).map(|region| (id, region))
    }

    pub(super) fn is_taken(&self, digest: &Digest) -> bool {
        self.by_key.contains_key(digest)
    }

    pub(super) fn usage(&self, process: &ProcessId) -> Usage {
        let account = self.processes.get(process).map(|process| &process.account);
        account.and_then(|account| self.accounts.get(account)).copied().unwrap_or_default()
    }

    /// The usage of an identity that may not be known yet.
    pub(super) fn usage_of(&self, identity: &PeerIdentity) -> Usage {
        self.accounts.get(&Account::of(identity)).copied().unwrap_or_default()
    }

    fn account(&mut self, process: &ProcessId, change: impl FnOnce(&mut Usage)) {
        let Some(process) = self.processes.get(process) else { return };
        let usage = self.accounts.entry(process.account.clone()).or_default();
        change(usage);
        if *usage == Usage::default() {
            self.accounts.remove(&process.account);
        }
    }

    /// A session of a process: the preferred one, or any.
    pub(super) fn session_of(&self, process: &ProcessId, preferred: SessionId) -> Option<SessionId> {
        let sessions = &self.processes.get(process)?.sessions;
        sessions.get(&preferred).or_else(|| sessions.first()).copied()
    }

    /// The known processes with this process id. There can be two for the moment between the death of the first and the
    /// news of it.
    pub(super) fn with_tgid(&self, bare_tgid: i32) -> impl Iterator<Item = &ProcessId> {
        let first = ProcessId { bare_tgid, start_time: 0, pidfd_inode: 0 };
        let last = ProcessId { bare_tgid, start_time: u64::MAX, pidfd_inode: u64::MAX };
        self.processes.range(first..=last).map(|(process, _)| process)
    }

    /// Adds a session. Returns `true` if its process is new.
    pub(super) fn open(&mut self, session: SessionId, peer: Option<(ProcessId, Arc<PeerIdentity>)>) -> bool {
        let mut is_new = false;
        if let Some((process, identity)) = &peer {
            let process = self.processes.entry(*process).or_insert_with(|| {
                is_new = true;
                ProcessEntry {
                    identity: Arc::clone(identity),
                    account: Account::of(identity),
                    sessions: BTreeSet::new(),
                    exports: BTreeSet::new(),
                    imports: BTreeSet::new(),
                    claims: BTreeMap::new(),
                }
            });
            process.sessions.insert(session);
        }
        if let Some((process, _)) = &peer {
            self.account(process, |usage| {
                usage.sessions += 1;
                usage.processes += usize::from(is_new);
            });
        } else {
            self.unidentified += 1;
        }
        self.sessions.insert(session, SessionEntry { peer, ..SessionEntry::default() });
        is_new
    }

    pub(super) fn close(&mut self, session: SessionId) -> Option<SessionEntry> {
        let closed = self.sessions.remove(&session)?;
        if let Some((process, _)) = &closed.peer {
            self.account(process, |usage| usage.sessions = usage.sessions.saturating_sub(1));
            if let Some(process) = self.processes.get_mut(process) {
                process.sessions.remove(&session);
            }
        } else {
            self.unidentified -= 1;
        }
        Some(closed)
    }

    /// Forgets a process without sessions, keys and imports. Returns `true` if it was known until now.
    pub(super) fn forget(&mut self, process: &ProcessId) -> bool {
        let idle = self.processes.get(process).is_some_and(ProcessEntry::is_idle);
        if idle {
            self.account(process, |usage| usage.processes = usage.processes.saturating_sub(1));
            self.processes.remove(process);
        }
        idle
    }

    /// All claims, by process.
    pub(super) fn claims(&self) -> impl Iterator<Item = (ProcessId, Digest, EarlyClaim)> {
        let all = self.processes.iter();
        all.flat_map(|(process, known)| {
            known.claims.iter().map(|(digest, claim)| (*process, *digest, *claim))
        })
    }

    pub(super) fn insert_claim(&mut self, process: &ProcessId, digest: Digest, claimed: EarlyClaim) {
        let Some(known) = self.processes.get_mut(process) else { return };
        if known.claims.insert(digest, claimed).is_none() {
            self.account(process, |usage| usage.imports += 1);
        }
    }

    pub(super) fn remove_claim(&mut self, process: &ProcessId, digest: &Digest) -> Option<EarlyClaim> {
        let claimed = self.processes.get_mut(process)?.claims.remove(digest)?;
        self.account(process, |usage| usage.imports = usage.imports.saturating_sub(1));
        Some(claimed)
    }

    /// Moves a region to another session of its exporter.
    pub(super) fn move_region(&mut self, id: RegionId, to: SessionId) {
        let Some(region) = self.regions.get_mut(&id) else { return };
        let from = std::mem::replace(&mut region.session, to);
        if let Some(session) = self.sessions.get_mut(&from) {
            session.keys = session.keys.saturating_sub(1);
        }
        if let Some(session) = self.sessions.get_mut(&to) {
            session.keys += 1;
        }
    }

    pub(super) fn insert(&mut self, region: Region) -> RegionId {
        let id = RegionId(self.regions_ever);
        self.regions_ever += 1;
        self.by_key.insert(region.digest, id);
        self.account(&region.exporter, |usage| {
            usage.keys += 1;
            usage.bytes = usage.bytes.saturating_add(region.size);
        });
        if let Some(process) = self.processes.get_mut(&region.exporter) {
            process.exports.insert(id);
        }
        if let Some(session) = self.sessions.get_mut(&region.session) {
            session.keys += 1;
        }
        self.regions.insert(id, region);
        id
    }

    /// Removes a region without imports.
    pub(super) fn remove(&mut self, id: RegionId) -> Option<Region> {
        let region = self.regions.remove(&id)?;
        debug_assert!(region.imports.is_empty(), "imports end before their region");
        self.by_key.remove(&region.digest);
        let admitted = region.admitted();
        self.account(&region.exporter, |usage| {
            usage.keys = usage.keys.saturating_sub(1);
            usage.bytes = usage.bytes.saturating_sub(region.size);
            usage.admitted = usage.admitted.saturating_sub(admitted);
        });
        if let Some(process) = self.processes.get_mut(&region.exporter) {
            process.exports.remove(&id);
        }
        if let Some(session) = self.sessions.get_mut(&region.session) {
            session.keys = session.keys.saturating_sub(1);
        }
        Some(region)
    }

    pub(super) fn admit(
        &mut self,
        id: RegionId,
        pids: BTreeMap<i32, RegionPin>,
        subjects: BTreeSet<AdmittedSubject>,
    ) {
        let Some(region) = self.regions.get_mut(&id) else { return };
        let before = region.admitted();
        region.pids.extend(pids);
        region.subjects.extend(subjects);
        let more = region.admitted() - before;
        let exporter = region.exporter;
        self.account(&exporter, |usage| usage.admitted += more);
    }

    pub(super) fn insert_import(&mut self, id: RegionId, importer: ProcessId, import: Import) {
        let Some(region) = self.regions.get_mut(&id) else { return };
        let grants = usize::from(import.grant.is_some());
        region.grants += grants;
        region.imports.insert(importer, import);
        if let Some(process) = self.processes.get_mut(&importer) {
            process.imports.insert(id);
        }
        self.account(&importer, |usage| {
            usage.imports += 1;
            usage.grants += grants;
        });
    }

    pub(super) fn remove_import(&mut self, id: RegionId, importer: &ProcessId) -> Option<Import> {
        self.take_grant(id, importer);
        let import = self.regions.get_mut(&id)?.imports.remove(importer)?;
        if let Some(process) = self.processes.get_mut(importer) {
            process.imports.remove(&id);
        }
        self.account(importer, |usage| usage.imports = usage.imports.saturating_sub(1));
        Some(import)
    }

    /// Replaces the grant of an import that waits for its exporter.
    pub(super) fn renew_grant(
        &mut self,
        id: RegionId,
        importer: &ProcessId,
        grant: Digest,
        stage: ImportStage,
    ) {
        let Some(region) = self.regions.get_mut(&id) else { return };
        let Some(import) = region.imports.get_mut(importer) else { return };
        import.stage = stage;
        if import.grant.replace(grant).is_none() {
            region.grants += 1;
            self.account(importer, |usage| usage.grants += 1);
        }
    }

    /// Removes the grant of an import.
    pub(super) fn take_grant(&mut self, id: RegionId, importer: &ProcessId) -> Option<Digest> {
        let region = self.regions.get_mut(&id)?;
        let grant = region.imports.get_mut(importer)?.grant.take()?;
        region.grants = region.grants.saturating_sub(1);
        self.account(importer, |usage| usage.grants = usage.grants.saturating_sub(1));
        Some(grant)
    }

    /// Recounts all tables. `None` if they are consistent.
    pub(super) fn inconsistency(&self) -> Option<&'static str> {
        let mut accounts = BTreeMap::<Account, Usage>::new();
        let mut keys = BTreeMap::<SessionId, usize>::new();
        let mut links = 0;
        for process in self.processes.values() {
            let usage = accounts.entry(process.account.clone()).or_default();
            usage.processes += 1;
            usage.sessions += process.sessions.len();
            usage.imports += process.claims.len();
        }
        for (id, region) in &self.regions {
            let Some(exporter) = self.processes.get(&region.exporter) else { return Some("no exporter") };
            if self.by_key.get(&region.digest) != Some(id) || !exporter.exports.contains(id) {
                return Some("region not indexed");
            }
            let usage = accounts.entry(exporter.account.clone()).or_default();
            usage.keys += 1;
            usage.bytes += region.size;
            usage.admitted += region.admitted();
            *keys.entry(region.session).or_default() += 1;
            if region.closing && (region.fd.is_some() || !region.may_be_used()) {
                return Some("closing without need");
            }
            if region.grants != region.imports.values().filter(|import| import.grant.is_some()).count() {
                return Some("grants of a region");
            }
            for (process, import) in &region.imports {
                links += 1;
                let Some(importer) = self.processes.get(process) else { return Some("no importer") };
                if !importer.imports.contains(id) || *process == region.exporter {
                    return Some("import not indexed");
                }
                let usage = accounts.entry(importer.account.clone()).or_default();
                usage.imports += 1;
                usage.grants += usize::from(import.grant.is_some());
            }
        }
        let sum = |count: fn(&ProcessEntry) -> usize| self.processes.values().map(count).sum::<usize>();
        let checks = [
            (self.by_key.len() == self.regions.len(), "keys without region"),
            (sum(|process| process.exports.len()) == self.regions.len(), "exports without region"),
            (sum(|process| process.imports.len()) == links, "imports without region"),
            (accounts == self.accounts, "accounts"),
            (
                self.sessions.values().filter(|session| session.peer.is_none()).count() == self.unidentified,
                "unidentified sessions",
            ),
            (
                self.sessions.iter().all(|(id, s)| s.keys == keys.get(id).copied().unwrap_or_default()),
                "keys of a session",
            ),
            (
                self.processes.iter().all(|(id, process)| {
                    let mine =
                        |s: &SessionId| self.sessions.get(s)?.peer.as_ref().map(|(owner, _)| owner == id);
                    process.sessions.iter().all(|session| mine(session) == Some(true))
                }),
                "sessions of a process",
            ),
            (!self.processes.values().any(ProcessEntry::is_idle), "a process that has nothing"),
        ];
        checks.iter().find(|(holds, _)| !holds).map(|(_, what)| *what)
    }
}
