//! Connections, deaths of processes, and timeouts.

use std::sync::Arc;

use shmesh_proto::broker::event::SessionEvent;
use shmesh_proto::identity::PeerIdentity;

use super::audit::{Op, Party, Reason, Record};
use super::grant::GrantStep;
use super::refusal::Refusal;
use super::region::{ImportStage, RegionId};
use super::{Broker, Effect, ProcessId, SessionId};

impl Broker {
    pub(super) fn opened(&mut self, session: SessionId, peer: Option<PeerIdentity>) {
        if self.tables.sessions.contains_key(&session) {
            // An error of the socket: the existing session stays unchanged.
            return;
        }
        let mut record = Record::new(self.now, Op::Open);
        record.caller = peer.as_ref().map(Party::from);
        let peer = peer.and_then(|identity| Some((ProcessId::of(&identity)?, Arc::new(identity))));
        if let Err(refusal) = self.has_room(peer.as_ref()) {
            // The client has sent no request yet, so the refusal has id 0.
            self.refuse(Some((session, 0)), refusal, record);
            self.effects.push(Effect::CloseSession(session));
            return;
        }
        let process = peer.as_ref().map(|(process, _)| *process);
        if self.tables.open(session, peer)
            && let Some(process) = process
        {
            self.effects.push(Effect::Watch(process));
        }
    }

    fn has_room(&self, peer: Option<&(ProcessId, Arc<PeerIdentity>)>) -> Result<(), Refusal> {
        let policy = &self.policy;
        let below = |used: usize, limit: usize, reason, what| {
            if used < limit { Ok(()) } else { Err(Refusal::limit(reason, limit, what)) }
        };
        below(self.tables.sessions.len(), policy.sessions, Reason::Sessions, "sessions")?;
        let Some((process, identity)) = peer else {
            let what = "sessions of unidentified processes";
            let used = self.tables.unidentified;
            return below(used, policy.sessions_unidentified, Reason::SessionsUnidentified, what);
        };
        let what = "sessions of one pod: close some";
        let known = self.tables.processes.get(process);
        // A known process keeps the account of its first session.
        let usage = match known {
            Some(_) => self.tables.usage(process),
            None => self.tables.usage_of(identity),
        };
        below(usage.sessions, policy.sessions_per_account, Reason::SessionsOfAccount, what)?;
        if let Some(known) = known {
            let what = "sessions of one process: close some";
            let used = known.sessions.len();
            return below(used, policy.sessions_per_process, Reason::SessionsOfProcess, what);
        }
        let what = "processes of one pod";
        below(usage.processes, policy.processes_per_account, Reason::ProcessesOfAccount, what)?;
        below(self.tables.processes.len(), policy.processes, Reason::Processes, "processes")
    }

    /// Ends the pending requests of a session. The keys and imports of its process stay.
    pub(super) fn closed(&mut self, session: SessionId) {
        let Some(closed) = self.tables.close(session) else { return };
        for ticket in closed.questions {
            self.questions.remove(&ticket);
        }
        self.forget_parked(session);
        let Some((process, _)) = closed.peer else { return };
        let imports = self.tables.processes.get(&process).map(|p| p.imports.clone()).unwrap_or_default();
        for id in imports {
            let import = self.tables.regions.get(&id).and_then(|region| region.imports.get(&process));
            let waits = |stage| matches!(stage, ImportStage::Admitting { .. });
            if import.is_some_and(|import| import.session == session && waits(import.stage)) {
                self.end_import(id, process, Reason::Cancelled);
            }
        }
        self.forget(process);
    }

    pub(super) fn died(&mut self, process: ProcessId) {
        let Some(dead) = self.tables.processes.get(&process) else { return };
        let (sessions, imports, exports) =
            (dead.sessions.clone(), dead.imports.clone(), dead.exports.clone());
        self.end_claims(&process, Reason::ImporterDied);
        for id in imports {
            self.end_import(id, process, Reason::ImporterDied);
        }
        for id in exports {
            self.lose(id);
        }
        // A child may have inherited the connection: it is not the process that was identified.
        for session in sessions {
            self.effects.push(Effect::CloseSession(session));
            for ticket in self.tables.close(session).map(|closed| closed.questions).unwrap_or_default() {
                self.questions.remove(&ticket);
            }
            self.forget_parked(session);
        }
        self.tables.forget(&process);
    }

    /// Handles the death of a region's exporter.
    fn lose(&mut self, id: RegionId) {
        let Some(region) = self.tables.regions.get(&id) else { return };
        let key = region.key.as_bytes().to_vec();
        let imports: Vec<_> = region.imports.iter().map(|(p, i)| (*p, i.stage, i.session)).collect();
        for (importer, stage, session) in imports {
            if stage == ImportStage::Delivered {
                self.tell(&importer, session, SessionEvent::RegionLost(key.clone()));
            }
            self.drop_import(id, importer, Reason::ExporterDied);
            self.forget(importer);
        }
        self.remove(id, Reason::ExporterDied);
    }

    /// Removes a region without imports.
    pub(super) fn remove(&mut self, id: RegionId, why: Reason) {
        let Some(region) = self.tables.regions.get(&id) else { return };
        let record = self.record(Op::Export, id, &region.exporter);
        if let Some(region) = self.tables.remove(id) {
            self.effects.extend(region.fd.map(Effect::DropFd));
            self.ended(record, why);
        }
    }

    /// Sends an event to a process, if it has a session.
    pub(super) fn tell(&mut self, process: &ProcessId, preferred: SessionId, happened: SessionEvent) {
        if let Some(session) = self.tables.session_of(process, preferred) {
            self.effects.push(Effect::Event { session, happened });
        }
    }

    /// Forgets a process without sessions, keys and imports.
    pub(super) fn forget(&mut self, process: ProcessId) {
        if self.tables.forget(&process) {
            self.effects.push(Effect::Unwatch(process));
        }
    }

    /// Ends everything whose time limit has passed.
    pub(super) fn expire(&mut self) {
        while let Some(digest) = self.grants.late(self.now) {
            let Some(grant) = self.grants.end(&digest, Reason::GrantExpired) else { return };
            match grant.step {
                GrantStep::Admit => {
                    let exporter = self.tables.regions.get(&grant.region).map(|r| (r.exporter, r.session));
                    let is_there =
                        exporter.and_then(|(process, first)| self.tables.session_of(&process, first));
                    let why = if is_there.is_some() { Reason::GrantExpired } else { Reason::ExporterAway };
                    self.end_import(grant.region, grant.importer, why);
                }
                // The memory was delivered and may be mapped, so the import stays; only the grant is void.
                GrantStep::Map => {
                    self.tables.take_grant(grant.region, &grant.importer);
                    let mut record = self.record(Op::Ack, grant.region, &grant.importer);
                    record.grant_hash = Some(digest.short());
                    self.ended(record, Reason::GrantExpired);
                }
            }
        }
        while let Some(entry) = self.questions.first_entry()
            && entry.get().deadline <= self.now
        {
            let ticket = *entry.key();
            self.unanswered(ticket);
        }
        if self.recovery.as_ref().is_some_and(|recovery| recovery.until <= self.now) {
            self.settle();
        }
    }
}
