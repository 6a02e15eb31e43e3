//! Passes commands to the broker, and carries out the effects that it returns.

use std::os::fd::OwnedFd;

use shmesh_proto::broker::{Reply, Request};

use super::{Actor, ActorEvent};
use crate::broker::{Command, Effect, SessionId};

impl Actor {
    pub(super) fn ask_broker(&mut self, session: SessionId, request: Request, fds: Vec<OwnedFd>) {
        let process = self.sessions.get(&session).and_then(|known| known.process);
        let owner = process.filter(|_| !fds.is_empty()).and_then(|process| self.owner(process));
        let fds = fds.into_iter().map(|fd| self.fd_table.hold(fd, owner.clone())).collect();
        self.tell_broker(Command::Request { session, request, fds });
    }

    pub(super) fn tell_broker(&mut self, command: Command) {
        // If the identity is unknown, the record has the credentials of the connection.
        let asked_on = match &command {
            Command::Opened { session, .. } | Command::Request { session, .. } => self.sessions.get(session),
            _ => None,
        };
        let credentials =
            asked_on.filter(|known| known.process.is_none()).and_then(|known| known.credentials);
        for effect in self.broker.handle(self.audit.now(), command) {
            match effect {
                Effect::Reply { session, reply, fd } => {
                    let fds = fd.and_then(|fd| self.fd_table.get(fd)).into_iter().collect();
                    self.send(session, &reply, fds);
                }
                Effect::Event { session, happened } => {
                    self.send(session, &Reply::event(happened), Vec::new())
                }
                Effect::CloseSession(session) => self.dismiss(session),
                Effect::DropFd(fd) => self.fd_table.release(fd),
                Effect::Watch(process) => {
                    self.processes.entry(process).or_default().is_watched_by_broker = true;
                }
                Effect::Unwatch(process) => {
                    if let Some(known) = self.processes.get_mut(&process) {
                        known.is_watched_by_broker = false;
                    }
                    self.forget_if_idle(process);
                }
                Effect::Resolve { ticket, bare_tgids } => {
                    let (resolver, actor) = (self.resolver.clone(), self.myself.clone());
                    tokio::spawn(async move {
                        let found = resolver.by_number(bare_tgids).await;
                        let _ = actor.send(ActorEvent::Resolved { ticket, found }).await;
                    });
                }
                Effect::Audit(mut record) => {
                    record.socket = credentials.filter(|_| record.caller.is_none());
                    self.audit.write(&record);
                }
                Effect::Denied(reason) => self.metrics.refuse_request(reason),
            }
        }
    }
}
