//! Recovery after a restart: exporters restore their keys, importers claim what they have mapped.

use std::collections::{BTreeMap, BTreeSet};

use shmesh_proto::broker::{Admit, Exported, Restore, event::SessionEvent, reply};
use shmesh_proto::key::DeviceKey;
use shmesh_proto::limits::MAX_RESTORED_PIDS;

use super::admit::subjects;
use super::audit::{self, Op, Outcome, Reason, Record};
use super::digest::{Digest, SECRET_BYTES, key_of};
use super::export;
use super::grant::{GRANT_BYTES, GrantStep};
use super::refusal::Refusal;
use super::region::{Import, ImportStage, RegionId, RegionPin};
use super::request::{Caller, Response};
use super::table::EarlyClaim;
use super::{Broker, Effect, FdToken, Millis, ProcessId, SessionId};

/// Imports of one session that wait for a key to be restored.
const PARKED_PER_SESSION: usize = 4;

/// The recovery after a restart.
#[derive(Debug)]
pub(super) struct Recovery {
    pub(super) until: Millis,
    parked: Vec<ParkedImport>,
}

/// An import of a key that is not restored yet.
#[derive(Debug)]
struct ParkedImport {
    caller: Caller,
    key: Vec<u8>,
}

impl Broker {
    pub(super) fn recover(&mut self) {
        let until = self.now.after(self.policy.restore_millis);
        self.recovery.get_or_insert(Recovery { until, parked: Vec::new() });
    }

    /// Refuses parked imports as draining, so that their clients retry with the next broker.
    pub(super) fn drain(&mut self) {
        self.draining = true;
        let parked = self.recovery.as_mut().map(|recovery| std::mem::take(&mut recovery.parked));
        for parked in parked.into_iter().flatten() {
            self.refuse_parked(&parked, Refusal::draining());
        }
    }

    /// Restores a key. Takes the descriptor out of `fds` only if a region is created to hold it.
    pub(super) fn restore(
        &mut self,
        caller: &Caller,
        restore: Restore,
        fds: &mut Vec<FdToken>,
        record: &mut Record,
    ) -> Result<Response, Refusal> {
        let secret = <[u8; SECRET_BYTES]>::try_from(restore.secret.as_slice());
        let (Some(key), Ok(secret), Some(export)) =
            (DeviceKey::from_wild(&restore.key), secret, restore.export)
        else {
            let text = "the key must have 64 characters and a zero byte, its secret 32 bytes, and both must belong to one export";
            return Err(Refusal::invalid(Reason::Malformed, text));
        };
        let digest = Digest::of(key.as_bytes());
        record.key_hash = Some(digest.short());
        record.size_bytes = Some(export.size);
        let mechanism = export.mechanism();
        record.mechanism = Some(audit::name(mechanism));
        if key_of(&secret, &caller.process) != key {
            return Err(Refusal::key(Reason::NotExporter));
        }
        self.may_export(&export, mechanism, fds)?;
        let subjects = subjects(restore.pods, restore.service_accounts)?;
        if restore.admitted.len() > MAX_RESTORED_PIDS {
            let what = "processes in one packet: send another for the rest";
            return Err(Refusal::limit(Reason::RestoredPids, MAX_RESTORED_PIDS, what));
        }
        if restore.admitted.iter().any(|admitted| admitted.bare_tgid <= 0) {
            return Err(Refusal::invalid(Reason::BadPid, "process ids must be above 0"));
        }
        let pins: BTreeMap<_, _> = restore
            .admitted
            .iter()
            .map(|admitted| (admitted.bare_tgid, RegionPin::restored(admitted)))
            .collect();
        let pids: BTreeSet<i32> = pins.keys().copied().collect();
        let admits = !pids.is_empty() || !subjects.is_empty();
        let answer = reply::Result::Exported(Exported { key: key.as_bytes().to_vec(), secret: Vec::new() });

        let id = if let Some((id, region)) = self.tables.find(&key, &digest) {
            if region.exporter != caller.process {
                return Err(Refusal::key(Reason::NotExporter));
            }
            if admits && !region.closing {
                self.may_admit(region, &pids, &subjects)?;
                self.tables.admit(id, pins, subjects);
            }
            self.tables.move_region(id, caller.session);
            id
        } else if restore.closing && self.recovery.is_none() {
            // Its importers got `RegionLost`.
            let unused = SessionEvent::Unused(key.as_bytes().to_vec());
            self.effects.push(Effect::Event { session: caller.session, happened: unused });
            return Ok(Response::Now(answer, None));
        } else {
            self.has_quota(caller, export.size)?;
            let mut region = export::region(caller, key, export);
            if admits {
                self.may_admit(&region, &pids, &subjects)?;
            }
            region.is_awaited = self.recovery.is_some();
            region.closing = restore.closing;
            region.fd = if restore.closing { None } else { fds.pop() };
            let id = self.tables.insert(region);
            self.tables.admit(id, pins, subjects);
            id
        };
        if let Some(region) = self.tables.regions.get_mut(&id) {
            region.is_partial = restore.more && self.recovery.is_some();
        }
        self.settle_claims(id);
        self.ask_exporter_again(id, caller.session);
        Ok(Response::Now(answer, None))
    }

    /// Handles the claim of a process that has the memory mapped.
    pub(super) fn claim(
        &mut self,
        caller: &Caller,
        key: &[u8],
        record: &mut Record,
    ) -> Result<Response, Refusal> {
        if self.may_come_back(caller, key) {
            self.find(key, record).map(drop).or_else(|refusal| match refusal.reason {
                Reason::UnknownKey => Ok(()),
                _ => Err(refusal),
            })?;
            return self.enter_early_claim(caller, key);
        }
        let (id, region) = self.find(key, record)?;
        if region.exporter == caller.process {
            let text = "an exporter has the memory already";
            return Err(Refusal::invalid(Reason::SelfImport, text));
        }
        match region.imports.get(&caller.process).map(|import| import.stage) {
            Some(ImportStage::Delivered) => {
                // The first event may have been sent to a session that had ended.
                self.tell_of_closing(id, caller.process, caller.session);
                return Ok(Response::done());
            }
            Some(ImportStage::Admitting { .. }) => {
                let text = "this process already waits to import the key; wait for that answer";
                return Err(Refusal::invalid(Reason::AlreadyImported, text));
            }
            None => {}
        }
        region.admission(&caller.process, &caller.identity).map_err(Refusal::key)?;
        if region.closing && !region.is_awaited {
            return Err(Refusal::key(Reason::Closing));
        }
        self.may_import(caller)?;
        self.enter_claim(id, caller.process, caller.session);
        Ok(Response::done())
    }

    /// Whether a key may still be registered again, or admit the caller once its list is complete.
    fn may_come_back(&self, caller: &Caller, key: &[u8]) -> bool {
        let Some(key) = DeviceKey::from_wild(key).filter(|_| self.recovery.is_some()) else { return false };
        let found = self.tables.find(&key, &Digest::of(key.as_bytes()));
        found.is_none_or(|(_, region)| region.may_admit_later(&caller.process, &caller.identity))
    }

    /// Registers a claim to a key that may still be restored.
    fn enter_early_claim(&mut self, caller: &Caller, key: &[u8]) -> Result<Response, Refusal> {
        let Some(key) = DeviceKey::from_wild(key) else { return Err(Refusal::key(Reason::UnknownKey)) };
        let digest = Digest::of(key.as_bytes());
        if !self.has_claim(&caller.process, &digest) {
            self.may_import(caller)?;
        }
        let claimed = EarlyClaim { key, session: caller.session };
        self.tables.insert_claim(&caller.process, digest, claimed);
        Ok(Response::done())
    }

    /// Whether this process has exported the key.
    pub(crate) fn is_exporter(&self, process: &ProcessId, key: &[u8]) -> bool {
        let key = DeviceKey::from_wild(key);
        let found = key.and_then(|key| self.tables.find(&key, &Digest::of(key.as_bytes())));
        found.is_some_and(|(_, region)| region.exporter == *process)
    }

    fn has_claim(&self, process: &ProcessId, digest: &Digest) -> bool {
        self.tables.processes.get(process).is_some_and(|known| known.claims.contains_key(digest))
    }

    fn enter_claim(&mut self, id: RegionId, importer: ProcessId, session: SessionId) {
        self.tables.insert_import(
            id,
            importer,
            Import { stage: ImportStage::Delivered, session, grant: None },
        );
        self.tell_of_closing(id, importer, session);
    }

    fn tell_of_closing(&mut self, id: RegionId, importer: ProcessId, session: SessionId) {
        if let Some(region) = self.tables.regions.get(&id).filter(|region| region.closing) {
            let closing = SessionEvent::ExporterClosing(region.key.as_bytes().to_vec());
            self.tell(&importer, session, closing);
        }
    }

    /// Turns the claims that a restored key admits into imports.
    fn settle_claims(&mut self, id: RegionId) {
        let Some(region) = self.tables.regions.get(&id) else { return };
        let digest = region.digest;
        let others = self.tables.processes.iter().filter(|(process, _)| **process != region.exporter);
        let claims: Vec<_> = others
            .filter_map(|(process, known)| Some((process, known, known.claims.get(&digest)?.session)))
            .filter(|(process, known, _)| region.admission(process, &known.identity).is_ok())
            .map(|(process, _, session)| (*process, session))
            .collect();
        for (process, session) in claims {
            self.tables.remove_claim(&process, &digest);
            self.enter_claim(id, process, session);
        }
    }

    /// Sends `Admit` again for waiting importers: the session that got it has ended or does not know the key.
    fn ask_exporter_again(&mut self, id: RegionId, session: SessionId) {
        let Some(region) = self.tables.regions.get(&id) else { return };
        let key = region.key.as_bytes().to_vec();
        let waiting: Vec<_> = region
            .imports
            .iter()
            .filter_map(|(importer, import)| match import.stage {
                ImportStage::Admitting { request, asked } if asked != Some(session) => {
                    Some((*importer, request))
                }
                _ => None,
            })
            .collect();
        for (importer, request) in waiting {
            let Some(old) = self.tables.take_grant(id, &importer) else { continue };
            let Some(ended) = self.grants.end(&old, Reason::GrantCancelled) else { continue };
            let grant: [u8; GRANT_BYTES] = self.draw();
            let digest = Digest::of(&grant);
            if self.grants.is_taken(&digest) {
                self.end_import(id, importer, Reason::Entropy);
                continue;
            }
            self.grants.add(digest, id, importer, GrantStep::Admit, ended.deadline);
            let stage = ImportStage::Admitting { request, asked: Some(session) };
            self.tables.renew_grant(id, &importer, digest, stage);
            let admit = Admit { grant: grant.to_vec(), key: key.clone(), bare_tgid: importer.bare_tgid };
            self.effects.push(Effect::Event { session, happened: SessionEvent::Admit(admit) });
        }
    }

    /// Parks an import whose key, or place on the list, may still be restored. Returns `false` if it does not wait.
    pub(super) fn waits_for(&mut self, caller: &Caller, key: &[u8]) -> bool {
        if !self.may_come_back(caller, key) {
            return false;
        }
        let Some(recovery) = &mut self.recovery else { return false };
        let of_session = |parked: &&ParkedImport| parked.caller.session == caller.session;
        if recovery.parked.iter().filter(of_session).count() >= PARKED_PER_SESSION {
            return false;
        }
        recovery.parked.push(ParkedImport { caller: caller.clone(), key: key.to_vec() });
        true
    }

    /// Resumes parked imports whose key is restored.
    pub(super) fn unpark(&mut self) {
        let Some(recovery) = &mut self.recovery else { return };
        let is_there = |parked: &mut ParkedImport| {
            let key = DeviceKey::from_wild(&parked.key);
            let found = key.and_then(|key| self.tables.find(&key, &Digest::of(key.as_bytes())));
            let Caller { process, identity, .. } = &parked.caller;
            found.is_some_and(|(_, region)| !region.may_admit_later(process, identity))
        };
        let ready: Vec<_> = recovery.parked.extract_if(.., is_there).collect();
        for parked in ready {
            self.resume(&parked);
        }
    }

    fn resume(&mut self, ParkedImport { caller, key }: &ParkedImport) {
        let mut record = Record::new(self.now, Op::Import);
        record.caller = self.party(&caller.process);
        let answer = self.import(caller, key, &mut record);
        self.finish((caller.session, caller.request), answer, record, true);
    }

    pub(super) fn forget_parked(&mut self, session: SessionId) {
        if let Some(recovery) = &mut self.recovery {
            recovery.parked.retain(|parked| parked.caller.session != session);
        }
    }

    fn refuse_parked(&mut self, parked: &ParkedImport, refusal: Refusal) {
        let mut record = Record::new(self.now, Op::Import);
        record.caller = self.party(&parked.caller.process);
        record.key_hash = DeviceKey::from_wild(&parked.key).map(|key| Digest::of(key.as_bytes()).short());
        self.refuse(Some((parked.caller.session, parked.caller.request)), refusal, record);
    }

    /// Ends the claim of a process to a key. Returns `false` if it has none.
    pub(super) fn unclaim(&mut self, caller: &Caller, key: &[u8]) -> bool {
        let Some(key) = DeviceKey::from_wild(key) else { return false };
        self.tables.remove_claim(&caller.process, &Digest::of(key.as_bytes())).is_some()
    }

    pub(super) fn end_claims(&mut self, process: &ProcessId, why: Reason) {
        let known = self.tables.processes.get(process);
        let claims: Vec<_> = known.map(|known| known.claims.keys().copied().collect()).unwrap_or_default();
        for digest in claims {
            self.end_claim(process, &digest, why);
        }
    }

    fn end_claim(&mut self, process: &ProcessId, digest: &Digest, why: Reason) -> Option<EarlyClaim> {
        let claimed = self.tables.remove_claim(process, digest)?;
        let mut record = Record::new(self.now, Op::Claim);
        record.caller = self.party(process);
        record.key_hash = Some(digest.short());
        record.outcome = Outcome::Ended;
        self.ended(record, why);
        Some(claimed)
    }

    /// Ends the recovery: keys that were not restored are lost.
    pub(super) fn settle(&mut self) {
        let Some(recovery) = self.recovery.take() else { return };
        for parked in recovery.parked {
            // Refused: the key is unknown, or does not admit the importer.
            self.resume(&parked);
        }
        let claims: Vec<_> = self.tables.claims().map(|(process, digest, _)| (process, digest)).collect();
        for (process, digest) in claims {
            if let Some(claimed) = self.end_claim(&process, &digest, Reason::NotRestored) {
                let lost = SessionEvent::RegionLost(claimed.key.as_bytes().to_vec());
                self.tell(&process, claimed.session, lost);
            }
            self.forget(process);
        }
        self.tables.regions.values_mut().for_each(|region| region.is_partial = false);
        let awaited = self.tables.regions.iter_mut().filter(|(_, region)| region.is_awaited);
        let unused: Vec<_> = awaited
            .filter_map(|(id, region)| {
                region.is_awaited = false;
                ((region.closing || region.is_wanted) && !region.is_used()).then_some(*id)
            })
            .collect();
        for id in unused {
            self.unused(id);
        }
    }
}
