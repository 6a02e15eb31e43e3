//! Connections, questions and answers.
//!
//! One thread, one task per connection, one question of a connection at a time. Nothing on the way to an answer waits for
//! anybody but the kernel; what may wait for a client (sending, closing what it sent) has a limit and hurts only that client.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use shmesh_daemon::descriptor::watched;
use shmesh_proto::identity::{Answer, PeerIdentity, Question, Subject, Unknown, answer};
use shmesh_proto::limits::VERSION;
use shmesh_proto::packet;
use shmesh_sys::errno;
use shmesh_sys::pidfd::{PeerPidfd, Pidfd};
use shmesh_sys::procfs::Proc;
use shmesh_sys::socket::{self, Packet};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{sleep, timeout};
use tracing::{debug, error, info, warn};

use super::clients::{ClientKey, Clients, ClosePermit, ConnectionPermit};
use super::counters::Counters;
use super::limits::{DRAIN, EXHAUSTED, REPORT, SEND};
use super::pods::Pods;
use super::process::Resolver;
use super::socket::Listener;

/// The service: who asks, who is asked about, and what is counted.
#[derive(Debug)]
pub(crate) struct Service<P> {
    /// Tells who processes are.
    pub(crate) resolver: Resolver<P>,
    /// How sockets are asked for their other end.
    pub(crate) peer_pidfd: PeerPidfd,
    /// Who knows the pods; replaced while the service runs.
    pub(crate) pods: RefCell<Rc<dyn Pods>>,
    /// Who is connected.
    pub(crate) clients: Clients,
    /// How long a connection may stay without a question.
    pub(crate) idle: Duration,
    /// What happened.
    pub(crate) counters: Counters,
}

impl<P: Proc + 'static> Service<P> {
    /// Serves until `stop`, then answers what was asked by then.
    pub(crate) async fn run(
        self: Rc<Self>,
        listener: Listener,
        stop: impl Future<Output = ()>,
    ) -> io::Result<()> {
        let listener = listener.watched()?;
        let (stopping, stopped) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let mut stop = std::pin::pin!(stop);
        let mut report = tokio::time::interval(REPORT);
        let reported = Cell::new(0);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break,
                _ = report.tick() => if reported.replace(self.counters.all()) != self.counters.all() {
                    self.counters.log(self.clients.open(), "so far");
                },
                Some(ended) = tasks.join_next() => if let Err(error) = ended {
                    error!(%error, "a connection's task failed");
                },
                ready = listener.readable() => match ready?.try_io(|listener| listener.get_ref().accept()) {
                    // Nobody waits any more.
                    Err(_) => {}
                    Ok(Ok(fd)) => match self.admit(&fd) {
                        Some(permit) => {
                            tasks.spawn_local(Rc::clone(&self).attend(fd, permit, stopped.clone()));
                        }
                        None => self.turn_away(fd),
                    },
                    Ok(Err(error)) => self.not_accepted(error).await?,
                },
            }
            // Many connections may wait; those that are here have their turn too.
            yield_now().await;
        }
        drop(listener);
        let open = self.clients.open();
        info!(open, "draining");
        // No receiver: no connection either.
        let _ = stopping.send(true);
        let all_ended = timeout(DRAIN, async { while tasks.join_next().await.is_some() {} }).await;
        match all_ended {
            Ok(()) => self.counters.log(0, "drained"),
            Err(_) => self.counters.log(self.clients.open(), "not drained in time"),
        }
        Ok(())
    }

    async fn not_accepted(&self, error: io::Error) -> io::Result<()> {
        if errno::is_exhausted(&error) {
            Counters::add(&self.counters.exhausted);
            warn!(%error, "no descriptor for another connection");
            // It stays ready: without a pause this would be all that we do.
            sleep(EXHAUSTED).await;
            return Ok(());
        }
        match error.kind() {
            io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => Ok(()),
            _ => Err(error),
        }
    }

    /// A permit for the connection, if its client may have one more. A client is known by the same means as anybody else.
    fn admit(&self, fd: &OwnedFd) -> Option<ConnectionPermit> {
        let who = Pidfd::of_peer(fd.as_fd(), self.peer_pidfd)
            .and_then(|pidfd| self.resolver.identify(&pidfd, 0, &super::pods::NoPods))
            .map_or(ClientKey::Unknown, |peer| match peer.pod {
                Some(pod) => ClientKey::Pod(pod.uid),
                None => ClientKey::Process(peer.bare_tgid, peer.start_time),
            });
        let permit = self.clients.permit(who);
        match &permit {
            Ok(_) => Counters::add(&self.counters.connections),
            Err(who) => {
                Counters::add(&self.counters.connections_refused);
                debug!(?who, open = self.clients.open(), "connection refused: too many");
            }
        }
        permit.ok()
    }

    fn turn_away(&self, fd: OwnedFd) {
        if let Some(unread) = socket::hang_up(fd)
            && let Some(closing) = self.clients.turned_away()
        {
            closing.close(vec![unread]);
        }
    }

    async fn attend(self: Rc<Self>, fd: OwnedFd, permit: ConnectionPermit, stopping: watch::Receiver<bool>) {
        let Ok(fd) = watched(fd) else {
            return Counters::add(&self.counters.exhausted);
        };
        self.converse(&fd, &permit, stopping).await;
        // The permit is its client's until all is closed that waits there.
        if let Some(unread) = socket::hang_up(fd.into_inner()) {
            permit.closing().await.close(vec![unread]);
        }
    }

    async fn converse(
        &self,
        fd: &AsyncFd<OwnedFd>,
        permit: &ConnectionPermit,
        mut stopping: watch::Receiver<bool>,
    ) {
        while let Some((received, closing)) = self.next(fd, permit, &mut stopping).await {
            let reply = self.reply(received);
            closing.close(reply.leftovers);
            let bytes = packet::encode(&reply.answer);
            let pidfd = reply.pidfd.as_ref().map(AsFd::as_fd);
            let fds = pidfd.as_slice();
            let sent = fd.async_io(Interest::WRITABLE, |fd| socket::send_now(fd, &bytes, fds));
            match timeout(SEND, sent).await {
                Ok(Ok(())) if reply.is_last => return,
                Ok(Ok(())) => {}
                Ok(Err(error)) => return debug!(%error, "the client has gone"),
                Err(_) => return Counters::add(&self.counters.too_slow),
            }
            yield_now().await;
        }
    }

    /// The next packet, and leave to close what comes with it; none when the connection is over.
    async fn next(
        &self,
        fd: &AsyncFd<OwnedFd>,
        permit: &ConnectionPermit,
        stopping: &mut watch::Receiver<bool>,
    ) -> Option<(Packet, ClosePermit)> {
        loop {
            let is_last_look = *stopping.borrow();
            if !is_last_look {
                tokio::select! {
                    biased;
                    // Readiness is remembered from the last packet: that there is another one must be seen.
                    ready = fd.async_io(Interest::READABLE, socket::has_packet) => ready.ok()?,
                    _ = stopping.changed() => continue,
                    () = sleep(self.idle) => {
                        Counters::add(&self.counters.too_slow);
                        return None;
                    }
                }
            }
            let Ok(closing) = timeout(SEND, permit.closing()).await else {
                Counters::add(&self.counters.exhausted);
                warn!(who = ?permit.who(), "what this client sent does not let itself be closed; it is let go");
                return None;
            };
            // Nobody else takes from this socket: what was seen is there still. At the end it may be that nothing is.
            let received = socket::receive_now(fd.get_ref())
                .inspect_err(|error| debug!(%error, "nothing to receive"))
                .ok()?;
            if received.bytes.is_empty() {
                closing.close(received.fds);
                return None;
            }
            return Some((received, closing));
        }
    }

    fn reply(&self, received: Packet) -> Reply {
        let Packet { bytes, fds, bytes_cut, fds_cut, .. } = received;
        let Some(question) = packet::decode::<Question>(&bytes).ok().filter(|_| !bytes_cut) else {
            // Whoever speaks another language is told once.
            return self.refusal(0, Unknown::BadQuestion, fds, true);
        };
        let id = question.id;
        if question.version != VERSION {
            return self.refusal(id, Unknown::BadQuestion, fds, false);
        }
        if fds_cut && fds.is_empty() {
            Counters::add(&self.counters.exhausted);
            return self.refusal(id, Unknown::Unavailable, fds, false);
        }
        if question.subject() == Subject::Number && fds.is_empty() && !fds_cut {
            return self.about(id, question.bare_tgid);
        }
        let only = match <[OwnedFd; 1]>::try_from(fds) {
            Ok([fd]) if !fds_cut => fd,
            Ok(fds) => return self.refusal(id, Unknown::BadDescriptor, fds.into(), true),
            Err(fds) => {
                let is_flood = fds.len() > 1;
                return self.refusal(id, Unknown::BadDescriptor, fds, is_flood);
            }
        };
        let (pidfd, leftovers) = match question.subject() {
            Subject::Pidfd => match Pidfd::given(only) {
                Ok(pidfd) => (Ok(pidfd), Vec::new()),
                Err((fd, unknown)) => (Err(unknown), vec![fd]),
            },
            // Ours may be the last descriptor of the socket, and in its queue may be anything.
            Subject::Socket => (Pidfd::of_peer(only.as_fd(), self.peer_pidfd), vec![only]),
            Subject::Number | Subject::Unspecified => (Err(Unknown::BadQuestion), vec![only]),
        };
        let pods = Rc::clone(&self.pods.borrow());
        let identified = pidfd
            .and_then(|pidfd| Ok((self.resolver.identify(&pidfd, question.latest_start, &*pods)?, pidfd)));
        match identified {
            Ok((peer, pidfd)) => {
                let pidfd = (question.subject() == Subject::Socket).then_some(pidfd);
                self.identity(id, peer, pidfd, leftovers)
            }
            Err(unknown) => self.refusal(id, unknown, leftovers, false),
        }
    }

    /// Who has a number now: enough to tell it from whoever has it later.
    fn about(&self, id: u64, bare_tgid: i32) -> Reply {
        let peer = Pidfd::of_number(bare_tgid)
            .and_then(|pidfd| self.resolver.identify(&pidfd, 0, &super::pods::NoPods));
        match peer {
            Ok(PeerIdentity { bare_tgid, start_time, pidfd_inode, .. }) => {
                let peer = PeerIdentity { bare_tgid, start_time, pidfd_inode, ..PeerIdentity::default() };
                self.identity(id, peer, None, Vec::new())
            }
            Err(unknown) => self.refusal(id, unknown, Vec::new(), false),
        }
    }

    fn identity(&self, id: u64, peer: PeerIdentity, pidfd: Option<Pidfd>, leftovers: Vec<OwnedFd>) -> Reply {
        Counters::add(&self.counters.identified);
        debug!(id, ?peer, "identified");
        let answer = Answer { id, result: Some(answer::Result::Peer(peer)) };
        Reply { answer, pidfd, leftovers, is_last: false }
    }

    fn refusal(&self, id: u64, unknown: Unknown, leftovers: Vec<OwnedFd>, is_last: bool) -> Reply {
        Counters::add(match unknown {
            Unknown::BadQuestion => &self.counters.bad_questions,
            Unknown::BadDescriptor => &self.counters.bad_descriptors,
            Unknown::Gone => &self.counters.gone,
            Unknown::OutOfSight => &self.counters.out_of_sight,
            Unknown::Unavailable | Unknown::Unspecified => &self.counters.unavailable,
        });
        debug!(id, ?unknown, "not identified");
        let answer = Answer { id, result: Some(answer::Result::Unknown(unknown.into())) };
        Reply { answer, pidfd: None, leftovers, is_last }
    }
}

struct Reply {
    answer: Answer,
    /// To be sent with it.
    pidfd: Option<Pidfd>,
    /// Foreign descriptors still to be closed.
    leftovers: Vec<OwnedFd>,
    /// The client is let go after it.
    is_last: bool,
}
