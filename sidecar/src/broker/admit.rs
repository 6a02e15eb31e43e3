//! Admitting processes, pods and service accounts to a key.
//!
//! As in the drivers, only the exporting process may admit, with 1 to 31 process ids per call, and a process must be
//! alive when it is admitted, because its number may belong to another process later. Its identity is known from its
//! session, or the identity service is asked. Process id 0 and the exporter's own are skipped, as the Ascend driver
//! skips them: callers pass arrays padded with 0, and an exporter has the memory anyway. A negative id is refused,
//! because `aclrtDeviceGetBareTgid` leaves one behind when it fails. If no process remains, the call is refused, as in
//! the driver.

use std::collections::{BTreeMap, BTreeSet};

use shmesh_proto::broker::{Done, Reply, SetImportPid, reply};
use shmesh_proto::identity::PeerIdentity;
use shmesh_proto::limits::MAX_PIDS_PER_CALL;

use super::audit::{Outcome, Reason, Record};
use super::refusal::Refusal;
use super::region::{AdmittedSubject, Region, RegionId, RegionPin};
use super::request::{Caller, Response};
use super::{Broker, Effect, Millis, ProcessId, SessionId, Ticket};

/// A `SetImportPid` that waits for the identities of its processes.
#[derive(Debug)]
pub(super) struct PendingAdmission {
    pub(super) session: SessionId,
    request: u64,
    region: RegionId,
    known: BTreeMap<i32, RegionPin>,
    asked: BTreeSet<i32>,
    subjects: BTreeSet<AdmittedSubject>,
    pub(super) deadline: Millis,
    record: Record,
}

impl Broker {
    pub(super) fn admit(
        &mut self,
        caller: &Caller,
        admit: SetImportPid,
        record: &mut Record,
    ) -> Result<Response, Refusal> {
        let (id, region) = self.find(&admit.key, record)?;
        if region.exporter != caller.process {
            return Err(Refusal::key(Reason::NotExporter));
        }
        if admit.bare_tgids.len() > MAX_PIDS_PER_CALL {
            let what = "process ids in one call: call again for the rest";
            return Err(Refusal::limit(Reason::PidsOfCall, MAX_PIDS_PER_CALL, what));
        }
        if admit.bare_tgids.iter().any(|tgid| *tgid < 0) {
            return Err(Refusal::invalid(Reason::BadPid, "process ids must be above 0"));
        }
        let own = caller.process.bare_tgid;
        let pids: BTreeSet<i32> =
            admit.bare_tgids.into_iter().filter(|tgid| *tgid != 0 && *tgid != own).collect();
        let subjects = subjects(admit.pods, admit.service_accounts)?;
        if pids.is_empty() && subjects.is_empty() {
            return Err(Refusal::invalid(
                Reason::NoProcess,
                "the call names only 0 and the exporter itself; name the process ids of importers",
            ));
        }
        record.admits = pids.iter().map(|tgid| format!("process {tgid}")).collect();
        record.admits.extend(subjects.iter().map(AdmittedSubject::to_string));
        self.may_admit(region, &pids, &subjects)?;

        let (known, asked) = self.split(pids);
        if asked.is_empty() {
            let done = done(&known);
            self.tables.admit(id, known, subjects);
            return Ok(Response::Now(done, None));
        }
        let Caller { session, request, .. } = *caller;
        let ticket = Ticket(self.questions_ever);
        let limit = self.policy.questions_per_session;
        match self.tables.sessions.get_mut(&session) {
            Some(open) if open.questions.len() < limit => open.questions.insert(ticket),
            _ => {
                let what = "SetImportPid of one session that wait for the identity service: try later";
                return Err(Refusal::limit(Reason::Questions, limit, what));
            }
        };
        self.questions_ever += 1;
        self.effects.push(Effect::Resolve { ticket, bare_tgids: asked.iter().copied().collect() });
        let deadline = self.now.after(self.policy.answer_millis);
        let record = record.clone();
        let question =
            PendingAdmission { session, request, region: id, known, asked, subjects, deadline, record };
        self.questions.insert(ticket, question);
        Ok(Response::Later)
    }

    /// Splits numbers into processes that are known here and numbers that the identity service must resolve.
    fn split(&self, pids: BTreeSet<i32>) -> (BTreeMap<i32, RegionPin>, BTreeSet<i32>) {
        let mut known = BTreeMap::new();
        let mut asked = BTreeSet::new();
        for tgid in pids {
            let mut found = self.tables.with_tgid(tgid);
            match (found.next(), found.next()) {
                (Some(process), None) => drop(known.insert(tgid, RegionPin::of(process))),
                _ => drop(asked.insert(tgid)),
            }
        }
        (known, asked)
    }

    /// Checks the limits. Called again after a question to the identity service, because they may have been reached
    /// meanwhile.
    pub(super) fn may_admit(
        &self,
        region: &Region,
        pids: &BTreeSet<i32>,
        subjects: &BTreeSet<AdmittedSubject>,
    ) -> Result<(), Refusal> {
        if region.open {
            let text = "this key is open to all processes (flag 0x1) and has no list of processes";
            return Err(Refusal::invalid(Reason::OpenKey, text));
        }
        if region.closing {
            return Err(Refusal::invalid(Reason::Closing, "this key is being closed"));
        }
        let policy = &self.policy;
        let new_pids = pids.iter().filter(|tgid| !region.pids.contains_key(tgid)).count();
        if region.pids.len() + new_pids > policy.pids_per_key {
            let what = "process ids that one key admits: export another key";
            return Err(Refusal::limit(Reason::PidsOfKey, policy.pids_per_key, what));
        }
        let new_subjects = subjects.difference(&region.subjects).count();
        if region.subjects.len() + new_subjects > policy.subjects_per_key {
            let what = "pods and service accounts that one key admits: export another key";
            return Err(Refusal::limit(Reason::SubjectsOfKey, policy.subjects_per_key, what));
        }
        let admitted = self.tables.usage(&region.exporter).admitted;
        if admitted + new_pids + new_subjects > policy.admitted_per_account {
            let what = "processes, pods and service accounts that the keys of one pod admit: close some";
            return Err(Refusal::limit(Reason::AdmittedOfAccount, policy.admitted_per_account, what));
        }
        Ok(())
    }

    pub(super) fn resolved(&mut self, ticket: Ticket, found: &[PeerIdentity]) {
        let Some(question) = self.take_question(ticket) else { return };
        let to = (question.session, question.request);
        let mut record = question.record.clone();
        match self.admit_resolved(question, found) {
            Ok(done) => {
                record.at = self.now;
                record.outcome = Outcome::Done;
                let reply = Reply::new(to.1, done);
                self.effects.push(Effect::Reply { session: to.0, reply, fd: None });
                self.effects.push(Effect::Audit(Box::new(record)));
            }
            Err(refusal) => {
                record.at = self.now;
                self.refuse(Some(to), refusal, record);
            }
        }
    }

    /// Admits all processes of a question, or none.
    fn admit_resolved(
        &mut self,
        question: PendingAdmission,
        found: &[PeerIdentity],
    ) -> Result<reply::Result, Refusal> {
        let mut pids = question.known;
        for identity in found {
            if let Some(process) = ProcessId::of(identity)
                && question.asked.contains(&process.bare_tgid)
            {
                pids.insert(process.bare_tgid, RegionPin::of(&process));
            }
        }
        if let Some(missing) = question.asked.iter().find(|tgid| !pids.contains_key(tgid)) {
            let text =
                format!("no living process has the thread-group id {missing} in the outermost pid namespace");
            return Err(Refusal::invalid(Reason::NotAlive, text));
        }
        // Region numbers are never reused, so this is still the region of the question, and the caller its exporter.
        let region = self.tables.regions.get(&question.region).ok_or(Refusal::key(Reason::UnknownKey))?;
        self.may_admit(region, &pids.keys().copied().collect(), &question.subjects)?;
        let done = done(&pids);
        self.tables.admit(question.region, pids, question.subjects);
        Ok(done)
    }

    /// Refuses a `SetImportPid` whose question failed or timed out.
    pub(super) fn unanswered(&mut self, ticket: Ticket) {
        let Some(question) = self.take_question(ticket) else { return };
        let mut record = question.record;
        record.at = self.now;
        self.refuse(Some((question.session, question.request)), Refusal::no_answer(), record);
    }

    fn take_question(&mut self, ticket: Ticket) -> Option<PendingAdmission> {
        let question = self.questions.remove(&ticket)?;
        if let Some(session) = self.tables.sessions.get_mut(&question.session) {
            session.questions.remove(&ticket);
        }
        Some(question)
    }
}

/// Lists the admitted processes, which the exporter sends again after a restart of the broker.
fn done(pids: &BTreeMap<i32, RegionPin>) -> reply::Result {
    let admitted = pids.iter().map(|(tgid, pin)| pin.admitted(*tgid)).collect();
    reply::Result::Done(Done { admitted })
}

pub(super) fn subjects(
    pods: Vec<String>,
    accounts: Vec<String>,
) -> Result<BTreeSet<AdmittedSubject>, Refusal> {
    if let Some(bad) = pods.iter().chain(&accounts).find(|text| !AdmittedSubject::is_sane(text)) {
        let text = format!("a pod or service account is namespace/name, not {:?}", shortened(bad));
        return Err(Refusal::invalid(Reason::BadSubject, text));
    }
    Ok(pods
        .into_iter()
        .map(AdmittedSubject::Pod)
        .chain(accounts.into_iter().map(AdmittedSubject::ServiceAccount))
        .collect())
}

/// Limits a text of the client, so that the reply fits into a packet.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}
