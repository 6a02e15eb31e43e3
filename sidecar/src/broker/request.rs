//! Handling of one request: the caller, its answer and the audit record.

use std::sync::Arc;

use shmesh_proto::broker::{Done, Keys, Listed, Reply, Request, Tgid, Welcome, reply, request};
use shmesh_proto::identity::PeerIdentity;
use shmesh_proto::key::DeviceKey;
use shmesh_proto::limits::{MAX_LISTED, MAX_LISTED_IMPORTERS, VERSION};

use super::audit::{self, Op, Outcome, Party, Reason, Record};
use super::digest::Digest;
use super::refusal::Refusal;
use super::region::{Region, RegionId};
use super::{Broker, Effect, FdToken, ProcessId, SessionId};

/// The process that made a request, and the address of the answer.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub(super) session: SessionId,
    pub(super) request: u64,
    pub(super) process: ProcessId,
    pub(super) identity: Arc<PeerIdentity>,
}

pub(super) enum Response {
    Now(reply::Result, Option<FdToken>),
    /// The answer follows the answer of the exporter or the identity service.
    Later,
}

impl Response {
    pub(super) fn done() -> Self {
        Self::Now(reply::Result::Done(Done::default()), None)
    }
}

impl Broker {
    pub(super) fn request(&mut self, session: SessionId, request: Request, mut fds: Vec<FdToken>) {
        let id = request.id;
        let op = Op::of(&request);
        let mut record = Record::new(self.now, op);
        let changes = !matches!(op, Op::Hello | Op::BareTgid | Op::List | Op::Stands);
        let answer = self.answer(session, request, &mut fds, &mut record);
        self.finish((session, id), answer, record, changes);
        if op == Op::Restore {
            self.unpark();
        }
        // Close descriptors that no region has taken.
        self.effects.extend(fds.into_iter().map(Effect::DropFd));
    }

    /// Answers a request, and writes an audit record if it `changes` something.
    pub(super) fn finish(
        &mut self,
        (session, id): (SessionId, u64),
        answer: Result<Response, Refusal>,
        mut record: Record,
        changes: bool,
    ) {
        match answer {
            Ok(Response::Now(result, fd)) => {
                self.effects.push(Effect::Reply { session, reply: Reply::new(id, result), fd });
                if changes {
                    self.effects.push(Effect::Audit(Box::new(record)));
                }
            }
            Ok(Response::Later) => {
                record.outcome = Outcome::Waits;
                self.effects.push(Effect::Audit(Box::new(record)));
            }
            Err(refusal) => {
                let known = self.tables.sessions.contains_key(&session);
                self.refuse(known.then_some((session, id)), refusal, record);
            }
        }
    }

    /// Sends a refusal, writes an audit record and counts it. Without a session, no reply is sent.
    pub(super) fn refuse(&mut self, to: Option<(SessionId, u64)>, refusal: Refusal, mut record: Record) {
        let reason = refusal.reason;
        if let Some((session, id)) = to {
            self.effects.push(Effect::Reply { session, reply: refusal.into_reply(id), fd: None });
        }
        record.outcome = Outcome::Refused;
        record.reason = Some(reason);
        self.effects.push(Effect::Audit(Box::new(record)));
        self.effects.push(Effect::Denied(reason));
    }

    /// Writes an audit record of an end.
    pub(super) fn ended(&mut self, mut record: Record, why: Reason) {
        record.outcome = Outcome::Ended;
        record.reason = Some(why);
        self.effects.push(Effect::Audit(Box::new(record)));
    }

    fn answer(
        &mut self,
        session: SessionId,
        request: Request,
        fds: &mut Vec<FdToken>,
        record: &mut Record,
    ) -> Result<Response, Refusal> {
        use request::Op;
        let Some(known) = self.tables.sessions.get(&session) else {
            return Err(Refusal::denied(Reason::NoSession, "this session has ended; connect again"));
        };
        let peer = known.peer.clone();
        record.caller = peer.as_ref().map(|(_, identity)| Party::from(&**identity));
        if request.version != VERSION {
            return Err(Refusal::version(request.version));
        }
        if !fds.is_empty() && !matches!(request.op, Some(Op::ExportKey(_) | Op::Restore(_))) {
            return Err(Refusal::invalid(Reason::BadDescriptors, "this request takes no descriptor"));
        }
        if let Some(Op::Hello(_)) = request.op {
            let identity = peer.map(|(_, identity)| (*identity).clone());
            return Ok(Response::Now(reply::Result::Welcome(Welcome { identity }), None));
        }
        let Some((process, identity)) = peer else { return Err(Refusal::unidentified()) };
        let caller = Caller { session, request: request.id, process, identity };
        let is_new_work = matches!(
            request.op,
            Some(Op::ExportKey(_) | Op::SetImportPid(_) | Op::ImportByKey(_) | Op::Attach(_))
        );
        if self.draining && is_new_work {
            return Err(Refusal::draining());
        }
        match request.op {
            None => Err(Refusal::invalid(Reason::Malformed, "the request has no operation")),
            // Answered above.
            Some(Op::Hello(_)) => Ok(Response::done()),
            Some(
                Op::Attach(_)
                | Op::Seated(_)
                | Op::Offer(_)
                | Op::Proof(_)
                | Op::ListProcesses(_)
                | Op::ListKeys(_)
                | Op::PoolMemory(_),
            ) => Err(Refusal::unsupported()),
            Some(Op::BareTgid(_)) => {
                let tgid = Tgid { bare_tgid: caller.process.bare_tgid };
                Ok(Response::Now(reply::Result::Tgid(tgid), None))
            }
            Some(Op::ExportKey(export)) => self.export(&caller, export, fds, record),
            Some(Op::Restore(restore)) => self.restore(&caller, restore, fds, record),
            Some(Op::Claim(claim)) => self.claim(&caller, &claim.key, record),
            Some(Op::SetImportPid(admit)) => self.admit(&caller, admit, record),
            Some(Op::ImportByKey(import)) => self.import(&caller, &import.key, record),
            Some(Op::Ack(ack)) => self.ack(&caller, &ack, record),
            Some(Op::Stands(stands)) => {
                self.granted(&caller, &stands.grant, record).map(|_| Response::done())
            }
            Some(Op::Close(close)) => self.close(&caller, &close, record),
            Some(Op::Detach(_)) => Ok(self.detach(&caller)),
            Some(Op::List(list)) => Ok(self.list(&caller, list.skip)),
        }
    }

    /// The region of a key that a caller sent.
    pub(super) fn find(&self, key: &[u8], record: &mut Record) -> Result<(RegionId, &Region), Refusal> {
        let Some(key) = DeviceKey::from_wild(key) else {
            return Err(Refusal::invalid(Reason::Malformed, "a key must have 64 characters and a zero byte"));
        };
        let digest = Digest::of(key.as_bytes());
        record.key_hash = Some(digest.short());
        let found = self.tables.find(&key, &digest).ok_or(Refusal::key(Reason::UnknownKey))?;
        self.describe(found.1, record);
        Ok(found)
    }

    /// Adds the region to an audit record. The other party is its exporter, unless that is the caller.
    pub(super) fn describe(&self, region: &Region, record: &mut Record) {
        record.key_hash = Some(region.digest.short());
        record.size_bytes = Some(region.size);
        record.mechanism = Some(audit::name(region.mechanism));
        let exporter = self.party(&region.exporter);
        if record.caller != exporter {
            record.other = exporter;
        }
    }

    pub(super) fn party(&self, process: &ProcessId) -> Option<Party> {
        self.tables.processes.get(process).map(|process| Party::from(&*process.identity))
    }

    fn list(&self, caller: &Caller, skip: u32) -> Response {
        let mut keys = Keys::default();
        if let Some(process) = self.tables.processes.get(&caller.process) {
            let total = process.exports.len() + process.imports.len();
            keys.total = u32::try_from(total).unwrap_or(u32::MAX);
            let skip = usize::try_from(skip).unwrap_or(usize::MAX);
            let all = process.exports.iter().chain(&process.imports).skip(skip).take(MAX_LISTED);
            keys.keys = all.filter_map(|id| self.tables.regions.get(id)).map(|r| listed(r, caller)).collect();
        }
        Response::Now(reply::Result::Keys(keys), None)
    }
}

/// The list entry of a region. Only the exporter sees the importers.
fn listed(region: &Region, caller: &Caller) -> Listed {
    let is_exporter = region.exporter == caller.process;
    let mut listed =
        Listed { hash: region.digest.short(), size: region.size, is_exporter, ..Listed::default() };
    if is_exporter {
        listed.importers = region.importers().take(MAX_LISTED_IMPORTERS).map(|p| p.bare_tgid).collect();
        listed.importer_count = u32::try_from(region.importers().count()).unwrap_or(u32::MAX);
    }
    listed
}
