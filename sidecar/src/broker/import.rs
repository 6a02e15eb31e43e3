//! Delivering the memory of a key to admitted processes, and its acknowledgement.

use shmesh_proto::broker::{Ack, Admit, Imported, Mechanism, Reply, event::SessionEvent, reply};

use super::audit::{Op, Reason, Record};
use super::digest::Digest;
use super::grant::{GRANT_BYTES, Grant, GrantStep};
use super::refusal::Refusal;
use super::region::{Import, ImportStage, Region, RegionId};
use super::request::{Caller, Response};
use super::{Broker, Effect, FdToken, ProcessId, SessionId};

impl Broker {
    pub(super) fn import(
        &mut self,
        caller: &Caller,
        key: &[u8],
        record: &mut Record,
    ) -> Result<Response, Refusal> {
        if self.waits_for(caller, key) {
            return Ok(Response::Later);
        }
        let (id, region) = self.find(key, record)?;
        if region.exporter == caller.process {
            let text = "an exporter has the memory already";
            return Err(Refusal::invalid(Reason::SelfImport, text));
        }
        if region.imports.contains_key(&caller.process) {
            let text = "this process imports the key already: use that import, or close it first";
            return Err(Refusal::invalid(Reason::AlreadyImported, text));
        }
        // Before the limits, which only admitted processes may learn.
        region.admission(&caller.process, &caller.identity).map_err(Refusal::key)?;
        if region.closing {
            return Err(Refusal::key(Reason::Closing));
        }
        self.has_room_for(caller, region)?;

        // With an open key the driver needs no list, so there is nothing to wait for.
        if region.mechanism != Mechanism::Ascend || region.open {
            let (imported, fd, grant) = self.deliver(id, caller.process, caller.session)?;
            record.grant_hash = Some(grant.short());
            return Ok(Response::Now(imported, fd));
        }
        let key = region.key.as_bytes().to_vec();
        // An exporter without a session may reconnect in time.
        let asked = self.tables.session_of(&region.exporter, region.session);
        let stage = ImportStage::Admitting { request: caller.request, asked };
        let (grant, digest) = self.promise(id, caller.process, caller.session, stage)?;
        record.grant_hash = Some(digest.short());
        if let Some(session) = asked {
            let admit = Admit { grant: grant.to_vec(), key, bare_tgid: caller.process.bare_tgid };
            self.effects.push(Effect::Event { session, happened: SessionEvent::Admit(admit) });
        }
        Ok(Response::Later)
    }

    fn has_room_for(&self, caller: &Caller, region: &Region) -> Result<(), Refusal> {
        let policy = &self.policy;
        let usage = self.tables.usage(&caller.process);
        if region.grants >= policy.grants_per_key {
            let what = "imports of one key that wait to be acknowledged: try later";
            return Err(Refusal::limit(Reason::GrantsOfKey, policy.grants_per_key, what));
        }
        if usage.grants >= policy.grants_per_account {
            let what = "imports of one pod that wait to be acknowledged: acknowledge them";
            return Err(Refusal::limit(Reason::GrantsOfAccount, policy.grants_per_account, what));
        }
        self.may_import(caller)
    }

    pub(super) fn may_import(&self, caller: &Caller) -> Result<(), Refusal> {
        let limit = self.policy.imports_per_account;
        if self.tables.usage(&caller.process).imports < limit {
            return Ok(());
        }
        Err(Refusal::limit(Reason::ImportsOfAccount, limit, "imports of one pod: close some"))
    }

    /// Registers an import with a new grant.
    fn promise(
        &mut self,
        id: RegionId,
        importer: ProcessId,
        session: SessionId,
        stage: ImportStage,
    ) -> Result<([u8; GRANT_BYTES], Digest), Refusal> {
        let grant = self.draw();
        let digest = Digest::of(&grant);
        if self.grants.is_taken(&digest) {
            return Err(Refusal::entropy());
        }
        let step = if stage == ImportStage::Delivered { GrantStep::Map } else { GrantStep::Admit };
        self.grants.add(digest, id, importer, step, self.now.after(self.policy.grant_millis));
        self.tables.insert_import(id, importer, Import { stage, session, grant: Some(digest) });
        Ok((grant, digest))
    }

    /// Delivers the memory. From here on the importer may have it mapped.
    fn deliver(
        &mut self,
        id: RegionId,
        importer: ProcessId,
        session: SessionId,
    ) -> Result<(reply::Result, Option<FdToken>, Digest), Refusal> {
        let (grant, digest) = self.promise(id, importer, session, ImportStage::Delivered)?;
        let region = self.tables.regions.get(&id).ok_or(Refusal::key(Reason::UnknownKey))?;
        let imported = Imported {
            size: region.size,
            mechanism: region.mechanism.into(),
            handle: region.handle.clone(),
            grant: grant.to_vec(),
        };
        Ok((reply::Result::Imported(imported), region.fd, digest))
    }

    /// The importer of a grant, while the grant is valid.
    #[must_use]
    pub(crate) fn importer(&self, grant: &[u8]) -> Option<ProcessId> {
        self.grants.get(&Digest::of(grant)).map(|grant| grant.importer)
    }

    /// The caller's grant, if it is still valid.
    pub(super) fn granted(
        &self,
        caller: &Caller,
        bytes: &[u8],
        record: &mut Record,
    ) -> Result<(Digest, Grant), Refusal> {
        if bytes.len() != GRANT_BYTES {
            return Err(Refusal::invalid(Reason::Malformed, "a grant has 16 bytes"));
        }
        let digest = Digest::of(bytes);
        record.grant_hash = Some(digest.short());
        let Some(grant) = self.grants.get(&digest).copied() else {
            return Err(Refusal::grant(self.grants.reason(&digest)));
        };
        let Some(region) = self.tables.regions.get(&grant.region) else {
            return Err(Refusal::grant(Reason::UnknownGrant));
        };
        self.describe(region, record);
        let whose = if grant.step == GrantStep::Admit { region.exporter } else { grant.importer };
        if whose != caller.process {
            return Err(Refusal::grant(Reason::ForeignGrant));
        }
        if grant.step == GrantStep::Admit {
            record.other = self.party(&grant.importer);
        }
        Ok((digest, grant))
    }

    pub(super) fn ack(
        &mut self,
        caller: &Caller,
        ack: &Ack,
        record: &mut Record,
    ) -> Result<Response, Refusal> {
        let (digest, grant) = self.granted(caller, &ack.grant, record)?;
        let (id, importer) = (grant.region, grant.importer);
        self.grants.end(&digest, Reason::GrantUsed);
        match (grant.step, ack.done) {
            (GrantStep::Admit, true) => self.admitted(id, importer),
            (GrantStep::Admit, false) => self.end_import(id, importer, Reason::ExporterRefused),
            (GrantStep::Map, true) => drop(self.tables.take_grant(id, &importer)),
            (GrantStep::Map, false) => self.end_import(id, importer, Reason::NotMapped),
        }
        Ok(Response::done())
    }

    /// Answers the importer, because the exporter has admitted it.
    fn admitted(&mut self, id: RegionId, importer: ProcessId) {
        let Some(import) = self.tables.remove_import(id, &importer) else { return };
        let ImportStage::Admitting { request, .. } = import.stage else { return };
        let mut record = self.record(Op::Import, id, &importer);
        let session = import.session;
        match self.deliver(id, importer, session) {
            Ok((imported, fd, grant)) => {
                record.grant_hash = Some(grant.short());
                self.effects.push(Effect::Reply { session, reply: Reply::new(request, imported), fd });
                self.effects.push(Effect::Audit(Box::new(record)));
            }
            Err(refusal) => self.refuse(Some((session, request)), refusal, record),
        }
    }

    /// An audit record of an operation of a process on a region.
    pub(super) fn record(&self, op: Op, id: RegionId, process: &ProcessId) -> Record {
        let mut record = Record::new(self.now, op);
        record.caller = self.party(process);
        if let Some(region) = self.tables.regions.get(&id) {
            self.describe(region, &mut record);
        }
        record
    }
}
