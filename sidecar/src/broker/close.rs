//! Ending imports and exports of device keys.

use shmesh_proto::broker::{Close, event::SessionEvent};
use shmesh_proto::limits::MAX_NAMED;

use super::audit::{Op, Reason, Record};
use super::refusal::Refusal;
use super::region::{ImportStage, RegionId};
use super::request::{Caller, Response};
use super::{Broker, Effect, ProcessId};

impl Broker {
    pub(super) fn close(
        &mut self,
        caller: &Caller,
        close: &Close,
        record: &mut Record,
    ) -> Result<Response, Refusal> {
        if self.unclaim(caller, &close.key) {
            return Ok(Response::done());
        }
        let (id, region) = self.find(&close.key, record)?;
        if region.exporter == caller.process {
            // Importers got the event when closing began.
            if region.may_be_used() && (region.closing || !close.force) {
                let importers = region.importers().take(MAX_NAMED).map(|process| process.bare_tgid).collect();
                if let Some(region) = self.tables.regions.get_mut(&id) {
                    region.is_wanted = region.is_awaited;
                }
                return Err(Refusal::busy(importers));
            }
            self.close_export(id);
            return Ok(Response::done());
        }
        if !region.imports.contains_key(&caller.process) {
            return Err(Refusal::key(Reason::NotImporter));
        }
        self.end_import(id, caller.process, Reason::Cancelled);
        Ok(Response::done())
    }

    /// Ends all imports and exports of the caller's process. Imports come first, as in a driver when a process exits.
    pub(super) fn detach(&mut self, caller: &Caller) -> Response {
        if let Some(process) = self.tables.processes.get(&caller.process) {
            let (imports, exports) = (process.imports.clone(), process.exports.clone());
            self.end_claims(&caller.process, Reason::Cancelled);
            for id in imports {
                self.end_import(id, caller.process, Reason::Cancelled);
            }
            for id in exports {
                self.close_export(id);
            }
        }
        Response::done()
    }

    /// Prevents new imports and sends the importers `ExporterClosing`. Without importers, the region ends.
    fn close_export(&mut self, id: RegionId) {
        let Some(region) = self.tables.regions.get_mut(&id) else { return };
        if region.closing {
            return;
        }
        let key = region.key.as_bytes().to_vec();
        let (used, waiting): (Vec<_>, Vec<_>) = region
            .imports
            .iter()
            .map(|(process, import)| (*process, import.session, import.stage))
            .partition(|(_, _, stage)| *stage == ImportStage::Delivered);
        let stays = region.may_be_used();
        if stays {
            region.closing = true;
            self.effects.extend(region.fd.take().map(Effect::DropFd));
        }
        for (importer, _, _) in waiting {
            self.drop_import(id, importer, Reason::Closing);
        }
        if !stays {
            self.remove(id, Reason::Closing);
        }
        for (importer, session, _) in used {
            self.tell(&importer, session, SessionEvent::ExporterClosing(key.clone()));
        }
    }

    /// Removes an import, and informs the exporter if it was the last one.
    pub(super) fn end_import(&mut self, id: RegionId, importer: ProcessId, why: Reason) {
        if self.drop_import(id, importer, why) != Some(ImportStage::Delivered) {
            return;
        }
        let Some(region) = self.tables.regions.get(&id) else { return };
        if region.is_used() {
            return;
        }
        // Other processes that have it mapped may still reconnect.
        if region.is_awaited && region.closing {
            return;
        }
        self.unused(id);
    }

    /// Handles the end of the last import.
    pub(super) fn unused(&mut self, id: RegionId) {
        let Some(region) = self.tables.regions.get(&id) else { return };
        let (exporter, session, closing) = (region.exporter, region.session, region.closing);
        let unused = SessionEvent::Unused(region.key.as_bytes().to_vec());
        self.tell(&exporter, session, unused);
        if closing {
            self.remove(id, Reason::Closing);
            self.forget(exporter);
        }
    }

    /// Removes an import. An importer that still waits for it is refused.
    pub(super) fn drop_import(
        &mut self,
        id: RegionId,
        importer: ProcessId,
        why: Reason,
    ) -> Option<ImportStage> {
        let mut record = self.record(Op::Import, id, &importer);
        if let Some(grant) = self.tables.take_grant(id, &importer) {
            // Unless it has ended for a more specific reason.
            self.grants.end(&grant, Reason::GrantCancelled);
            record.grant_hash = Some(grant.short());
        }
        let import = self.tables.remove_import(id, &importer)?;
        match import.stage {
            ImportStage::Admitting { request, .. }
                if why != Reason::ImporterDied && self.tables.sessions.contains_key(&import.session) =>
            {
                self.refuse(Some((import.session, request)), Refusal::key(why), record);
            }
            _ => self.ended(record, why),
        }
        Some(import.stage)
    }
}
