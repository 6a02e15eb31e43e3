//! Processes that have connected: their sessions, links and deaths, and listing them for the operator.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use shmesh::{Participant, RecoveryStats, SeatIndex, SeatWord};
use shmesh_daemon::descriptor::watched;
use shmesh_proto::broker::{Code, Processes, Reply, event, reply};
use shmesh_proto::identity::PeerIdentity;
use shmesh_sys::{poll, user};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;

use super::{Actor, ActorEvent};
use crate::broker::{Account, Command, Op, ProcessId, Reason, SessionId};
use crate::inspect;
use crate::links::LinkIndex;

/// A living process that has connected.
#[derive(Debug, Default)]
pub(super) struct ConnectedProcess {
    pub(super) identity: Option<PeerIdentity>,
    /// Links that it has attached to. Their participants get `PeerDied`.
    pub(super) links: BTreeSet<LinkIndex>,
    /// The account that its place among the attached processes is charged to. The process may change its user
    /// meanwhile.
    pub(super) attached: Option<Account>,
    sessions: usize,
    pub(super) is_watched_by_broker: bool,
    pub(super) seats: Vec<(LinkIndex, SeatIndex, SeatWord)>,
    watch: Option<ProcessWatch>,
}

/// The pidfd of a process, and the task that waits for its end.
#[derive(Debug)]
struct ProcessWatch {
    pidfd: Arc<AsyncFd<OwnedFd>>,
    task: JoinHandle<()>,
}

impl ProcessWatch {
    /// Whether the process has ended, whether or not the event has arrived.
    fn has_ended(&self) -> bool {
        poll::is_readable(&*self.pidfd).unwrap_or(false)
    }
}

impl Actor {
    pub(super) fn watch(
        &mut self,
        process: ProcessId,
        pidfd: Option<OwnedFd>,
        identity: Option<PeerIdentity>,
    ) {
        let known = self.processes.entry(process).or_default();
        known.sessions += 1;
        known.identity = identity;
        let (None, Some(Ok(pidfd))) = (&known.watch, pidfd.map(watched)) else { return };
        let (pidfd, actor) = (Arc::new(pidfd), self.myself.clone());
        let ended = Arc::clone(&pidfd);
        let task = tokio::spawn(async move {
            if ended.readable().await.is_ok() {
                let _ = actor.send(ActorEvent::Died(process)).await;
            }
        });
        known.watch = Some(ProcessWatch { pidfd, task });
    }

    /// Forgets a process that has no session, key or link any more.
    pub(super) fn forget_if_idle(&mut self, process: ProcessId) {
        let Some(known) = self.processes.get(&process) else { return };
        // An attached process may have a seat that it has not claimed yet. It is watched until it dies, because its connections
        // close before its death is visible.
        if known.sessions == 0
            && !known.is_watched_by_broker
            && known.seats.is_empty()
            && known.links.is_empty()
        {
            if let Some(watch) = &known.watch {
                watch.task.abort();
            }
            self.processes.remove(&process);
        }
    }

    /// Handles the death of an importer whose event has not arrived yet, because its process id may belong to another
    /// process by now.
    pub(super) fn check_for_death(&mut self, importer: Option<ProcessId>) {
        let watch = |process| self.processes.get(&process)?.watch.as_ref();
        if let Some(process) = importer
            && watch(process).is_some_and(ProcessWatch::has_ended)
        {
            self.died(process);
        }
    }

    /// Answers an operator, and refuses all others.
    pub(super) fn inspect(
        &mut self,
        session: SessionId,
        id: u64,
        answer: impl FnOnce(&Self) -> reply::Result,
    ) {
        let credentials = self.sessions.get(&session).and_then(|known| known.credentials);
        if inspect::is_operator(credentials, user::effective()) {
            let reply = Reply::new(id, answer(self));
            return self.send(session, &reply, Vec::new());
        }
        let text = "only an operator may list this: run the command in the sidecar's container, as the sidecar's user or as root";
        self.refuse(session, id, Op::Inspect, Code::Denied, Reason::NotOperator, text);
    }

    /// Lists all processes after the first `skip`.
    pub(super) fn all_processes(&self, link: LinkIndex, skip: usize) -> Processes {
        let participants = self.links.participants(link);
        let sits = |known: &ConnectedProcess, other: &Participant| {
            known.seats.contains(&(link, other.seat, other.word))
        };
        let identified =
            || self.processes.iter().filter_map(|(id, known)| Some((id, known, known.identity.as_ref()?)));
        let all = identified().skip(skip).map(|(id, known, identity)| {
            let seats = participants.iter().copied().filter(|other| sits(known, other));
            inspect::process(identity, known.sessions, seats, self.broker.holdings(id))
        });
        let unclaimed = || {
            let is_claimed = |other: &Participant| self.processes.values().any(|known| sits(known, other));
            participants.iter().filter(|other| !is_claimed(other)).map(inspect::seat).collect()
        };
        Processes {
            processes: inspect::page(all),
            total: inspect::count(identified().count()),
            unidentified: inspect::count(self.sessions.values().filter(|s| s.process.is_none()).count()),
            unclaimed: if skip == 0 { unclaimed() } else { Vec::new() },
        }
    }

    pub(super) fn ended(&mut self, session: SessionId) {
        let Some(known) = self.sessions.remove(&session) else { return };
        self.tell_broker(Command::Closed { session });
        if let Some(process) = known.process {
            let is_last = self.processes.get_mut(&process).is_some_and(|known| {
                known.sessions = known.sessions.saturating_sub(1);
                known.sessions == 0 && known.watch.is_none()
            });
            if is_last {
                // Before Linux 6.5, without a pidfd: a process without connections counts as dead.
                self.died(process);
            }
            self.forget_if_idle(process);
        }
    }

    /// Forgets the seats and participants of a link.
    pub(super) fn forget_link(&mut self, link: LinkIndex) {
        let ids: Vec<_> = self.processes.keys().copied().collect();
        for id in ids {
            let Some(known) = self.processes.get_mut(&id) else { continue };
            known.seats.retain(|(of, ..)| *of != link);
            if known.links.remove(&link)
                && known.links.is_empty()
                && let Some(account) = known.attached.take()
            {
                self.fd_table.detach(&account);
            }
            self.forget_if_idle(id);
        }
    }

    pub(super) fn died(&mut self, process: ProcessId) {
        let Some(dead) = self.processes.remove(&process) else { return };
        if let Some(account) = &dead.attached {
            self.fd_table.detach(account);
        }
        let mut done = RecoveryStats::default();
        for &(link, seat, word) in &dead.seats {
            let taken = self.links.recover_participant(link, seat, word);
            done.participants += taken.participants;
            done.messages += taken.messages;
        }
        // Recovers seats that it had taken and not claimed yet, if their lock or pid shows the death.
        for (_, kept) in self.links.all_kept() {
            done.participants += kept.host.recover().participants;
        }
        tracing::info!(
            tgid = process.bare_tgid,
            participants = done.participants,
            messages = done.messages,
            "a process has died"
        );
        self.tell_broker(Command::Died { process });
        let told: Vec<_> = self
            .sessions
            .iter()
            .filter(|(_, other)| dead.links.contains(&other.link) && other.process != Some(process))
            .map(|(session, _)| *session)
            .collect();
        for session in told {
            self.send(session, &Reply::event(event::SessionEvent::PeerDied(process.bare_tgid)), Vec::new());
        }
    }
}
