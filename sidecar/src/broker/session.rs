//! Connections and processes come and go, and time passes.

use std::sync::Arc;

use shmesh_proto::broker::event::Happened;
use shmesh_proto::identity::PeerIdentity;

use super::audit::{Op, Party, Reason, Record};
use super::grant::Step;
use super::refusal::Refusal;
use super::region::{RegionId, Stage};
use super::{Broker, Effect, ProcessId, SessionId};

impl Broker {
    pub(super) fn opened(&mut self, session: SessionId, peer: Option<PeerIdentity>) {
        if self.tables.sessions.contains_key(&session) {
            // The socket's mistake. The one that is there has done nothing.
            return;
        }
        let mut record = Record::new(self.now, Op::Open);
        record.caller = peer.as_ref().map(Party::from);
        let peer = peer.and_then(|identity| Some((ProcessId::of(&identity)?, Arc::new(identity))));
        if let Err(refusal) = self.has_room(peer.as_ref().map(|(process, _)| process)) {
            // It has asked nothing yet, so this answers nothing.
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

    fn has_room(&self, process: Option<&ProcessId>) -> Result<(), Refusal> {
        let policy = &self.policy;
        if self.tables.sessions.len() >= policy.sessions {
            return Err(Refusal::limit(Reason::Sessions, policy.sessions, "sessions"));
        }
        let Some(process) = process else { return Ok(()) };
        match self.tables.processes.get(process) {
            Some(known) if known.sessions.len() >= policy.sessions_per_process => {
                let limit = policy.sessions_per_process;
                Err(Refusal::limit(Reason::SessionsOfProcess, limit, "sessions of one process"))
            }
            None if self.tables.processes.len() >= policy.processes => {
                Err(Refusal::limit(Reason::Processes, policy.processes, "processes"))
            }
            _ => Ok(()),
        }
    }

    /// What waits for an answer on this session ends; what its process has stays.
    pub(super) fn closed(&mut self, session: SessionId) {
        let Some(closed) = self.tables.close(session) else { return };
        for ticket in closed.questions {
            self.questions.remove(&ticket);
        }
        let Some((process, _)) = closed.peer else { return };
        let imports = self.tables.processes.get(&process).map(|p| p.imports.clone()).unwrap_or_default();
        for id in imports {
            let import = self.tables.regions.get(&id).and_then(|region| region.imports.get(&process));
            let waits = |stage| matches!(stage, Stage::Admitting { .. });
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
        for id in imports {
            self.end_import(id, process, Reason::ImporterDied);
        }
        for id in exports {
            self.lose(id);
        }
        // A child may have inherited the connection: it is not the one that was identified.
        for session in sessions {
            self.effects.push(Effect::CloseSession(session));
            for ticket in self.tables.close(session).map(|closed| closed.questions).unwrap_or_default() {
                self.questions.remove(&ticket);
            }
        }
        self.tables.forget(&process);
    }

    /// The exporter of a region has died.
    fn lose(&mut self, id: RegionId) {
        let Some(region) = self.tables.regions.get(&id) else { return };
        let key = region.key.as_bytes().to_vec();
        let imports: Vec<_> = region.imports.iter().map(|(p, i)| (*p, i.stage, i.session)).collect();
        for (importer, stage, session) in imports {
            if stage == Stage::Delivered {
                self.tell(&importer, session, Happened::RegionLost(key.clone()));
            }
            self.drop_import(id, importer, Reason::ExporterDied);
            self.forget(importer);
        }
        self.remove(id, Reason::ExporterDied);
    }

    /// Takes a region that nobody imports out of the books.
    pub(super) fn remove(&mut self, id: RegionId, why: Reason) {
        let Some(region) = self.tables.regions.get(&id) else { return };
        let record = self.record(Op::Export, id, &region.exporter);
        if let Some(region) = self.tables.remove(id) {
            self.effects.extend(region.fd.map(Effect::DropFd));
            self.ended(record, why);
        }
    }

    /// Tells a process, if it has a session.
    pub(super) fn tell(&mut self, process: &ProcessId, preferred: SessionId, happened: Happened) {
        if let Some(session) = self.tables.session_of(process, preferred) {
            self.effects.push(Effect::Event { session, happened });
        }
    }

    /// Forgets a process that has nothing here any more.
    pub(super) fn forget(&mut self, process: ProcessId) {
        if self.tables.forget(&process) {
            self.effects.push(Effect::Unwatch(process));
        }
    }

    /// Ends what has waited too long.
    pub(super) fn expire(&mut self) {
        while let Some(digest) = self.grants.late(self.now) {
            let Some(grant) = self.grants.end(&digest, Reason::GrantExpired) else { return };
            match grant.step {
                Step::Admit => self.end_import(grant.region, grant.importer, Reason::GrantExpired),
                // The memory was delivered and may be mapped, so the import stays; only the grant is void.
                Step::Map => {
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
    }
}
