//! Attaching to a link, the device memory of its pools, and its seats.

use std::os::fd::OwnedFd;

use shmesh::{SeatIndex, SeatWord};
use shmesh_proto::broker::{Code, PoolMemory, Reply, reply};

use super::{Actor, ClientSession};
use crate::broker::{Op, ProcessId, Reason, Record, SessionId};
use crate::links::LinkIndex;

/// Maximum number of seats that one process may claim.
const SEATS_PER_PROCESS: usize = shmesh::MAX_SEATS * 16;

impl Actor {
    /// Answers `Attach`. Fails closed: a process that is not identified is refused.
    pub(super) fn attach(
        &mut self,
        session: SessionId,
        link: LinkIndex,
        process: Option<ProcessId>,
        id: u64,
    ) {
        if process.is_none() {
            let name = self.links.name(link);
            let text = format!("link {name}: this process cannot be identified; see the sidecar's log");
            self.refuse(session, id, Op::Attach, Code::Unidentified, Reason::Unidentified, text);
            return;
        }
        let Some(kept) = self.links.kept(link) else {
            return self.refuse_without_link(session, id, Op::Attach, link);
        };
        let owner = process.and_then(|process| self.owner(process));
        let known = process.and_then(|process| self.processes.get_mut(&process));
        if let (Some(known), Some((_, account))) = (known, owner) {
            if known.attached.is_none() {
                if let Err((reason, text)) = self.fd_table.attach(&account) {
                    return self.refuse(session, id, Op::Attach, Code::Limit, reason, text);
                }
                known.attached = Some(account);
            }
            known.links.insert(link);
        }
        let (attached, fds) = (kept.attached, kept.fds.clone());
        self.metrics.attached();
        self.audit.write(&self.record(session, Op::Attach));
        self.send(session, &Reply::new(id, reply::Result::Attached(attached)), fds);
    }

    /// Refuses a request because the link is not kept at the moment. The code asks the client to retry later.
    fn refuse_without_link(&mut self, session: SessionId, id: u64, op: Op, link: LinkIndex) {
        let text = format!(
            "link {}: the sidecar does not keep it at the moment and retries; its log and /readyz state the reason",
            self.links.name(link)
        );
        self.refuse(session, id, op, Code::Draining, Reason::LinkNotKept, text);
    }

    /// The sessions on a link whose processes have attached to it.
    fn attached_to(&self, link: LinkIndex) -> impl Iterator<Item = SessionId> {
        let is_attached = move |known: &ClientSession| {
            let process = known.process.and_then(|process| self.processes.get(&process));
            known.link == link && process.is_some_and(|process| process.links.contains(&link))
        };
        self.sessions.iter().filter(move |(_, known)| is_attached(known)).map(|(session, _)| *session)
    }

    /// Stores or hands out the device memory of a pool, as with the link's segments, for attached processes only.
    pub(super) fn pool_memory(&mut self, session: SessionId, id: u64, told: &PoolMemory, fds: Vec<OwnedFd>) {
        let Some(link) = self.sessions.get(&session).map(|known| known.link) else { return };
        let Some(kept) = self.links.kept(link) else {
            return self.refuse_without_link(session, id, Op::PoolMemory, link);
        };
        if !self.attached_to(link).any(|other| other == session) {
            let text =
                format!("link {}: this process has not attached to it; attach first", self.links.name(link));
            return self.refuse(session, id, Op::PoolMemory, Code::Denied, Reason::NotAttached, text);
        }
        let is_offer = told.id != 0;
        if is_offer && !fds.iter().all(|fd| self.descriptors.is_memory_of(fd, told.mechanism(), told.size)) {
            let text = "the descriptor must be a device, or a memfd of this size that is sealed against shrinking and growing";
            return self.refuse(session, id, Op::PoolMemory, Code::Invalid, Reason::BadDescriptors, text);
        }
        let (answer, fd, is_news) = match kept.host.pool_memory(told, fds) {
            Ok(answered) => answered,
            Err(text) => {
                let reason = Reason::BadPoolMemory;
                return self.refuse(session, id, Op::PoolMemory, Code::Invalid, reason, text);
            }
        };
        if answer.id == 0 && kept.host.is_gathering() {
            let name = self.links.name(link);
            let text = format!(
                "link {name}: the sidecar was restarted, and participants may still offer it the memory of this pool; retry"
            );
            return self.send(session, &Reply::refused(id, Code::Draining, text), Vec::new());
        }
        let fds: Vec<_> = fd.into_iter().collect();
        if is_news {
            let size_bytes = Some(answer.size);
            self.audit.write(&Record { size_bytes, ..self.record(session, Op::PoolMemory) });
            // So that participants can offer it to the next sidecar.
            let others: Vec<_> = self.attached_to(link).filter(|other| *other != session).collect();
            for other in others {
                self.send(other, &Reply::new(0, reply::Result::PoolMemory(answer.clone())), fds.clone());
            }
        }
        self.send(session, &Reply::new(id, reply::Result::PoolMemory(answer)), fds);
    }

    pub(super) fn seated(&mut self, session: SessionId, seat: u32, word: u64) {
        match self.sit(session, seat, word) {
            Ok(false) => {}
            Ok(true) => {
                self.audit.write(&Record { seat: Some(seat), ..self.record(session, Op::Seated) });
            }
            Err(reason) => self.deny(session, Op::Seated, reason, Some(seat)),
        }
    }

    /// Records that the process of a session has a seat. Returns `false` if that was recorded before.
    fn sit(&mut self, session: SessionId, seat: u32, word: u64) -> Result<bool, Reason> {
        let known = self.sessions.get(&session);
        let Some((link, process)) = known.and_then(|known| Some((known.link, known.process?))) else {
            return Err(Reason::Unidentified);
        };
        let seat = SeatIndex::from_wild(seat.into()).ok_or(Reason::NotSeated)?;
        let word = SeatWord::from_wild(word);
        let entry = (link, seat, word);
        if self.processes.iter().any(|(other, known)| *other != process && known.seats.contains(&entry)) {
            return Err(Reason::SeatTaken);
        }
        let known = self.processes.get_mut(&process).ok_or(Reason::Unidentified)?;
        if known.seats.contains(&entry) {
            return Ok(false);
        }
        // A claim to a seat with the start time of another process is refused.
        let is_there = self.links.participants(link).iter().any(|other| {
            other.seat == seat
                && other.word == word
                && (other.start_time == 0 || other.start_time == process.start_time)
        });
        if !is_there {
            return Err(Reason::NotSeated);
        }
        if known.seats.len() >= SEATS_PER_PROCESS {
            // Forget seats that it has left since.
            let links = &self.links;
            known.seats.retain(|(link, seat, word)| {
                let participants = links.participants(*link);
                participants.iter().any(|other| other.seat == *seat && other.word == *word)
            });
        }
        if known.seats.len() >= SEATS_PER_PROCESS {
            return Err(Reason::SeatsOfProcess);
        }
        known.seats.push(entry);
        Ok(true)
    }
}
