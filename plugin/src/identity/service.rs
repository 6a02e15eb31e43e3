//! Connections, questions and answers of the identity service.
//!
//! One thread; one task per connection, which handles one question at a time. Answering waits only for the
//! kernel. Operations that can wait for a client (sending, closing its descriptors) have a time limit and
//! affect only that client.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use shmesh_daemon::descriptor::try_watched;
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
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::{debug, error, info, warn};

use super::clients::{ClientKey, Clients, ClosePermit, ConnectionPermit};
use super::counters::Counters;
use super::limits::{DRAIN, EXHAUSTED, REPORT, SEND};
use super::pods::Pods;
use super::process::ProcessResolver;
use super::socket::Listener;

/// State of the identity service.
#[derive(Debug)]
pub(crate) struct ServiceState<P> {
    /// Identifies processes and their pods.
    pub(crate) resolver: ProcessResolver<P>,
    /// How to get a pidfd for the peer of a socket.
    pub(crate) peer_pidfd: PeerPidfd,
    /// Source of pod names, replaced on SIGHUP.
    pub(crate) pods: RefCell<Rc<dyn Pods>>,
    /// Whether the source of pods has been read once, and how long answers wait for that.
    pub(crate) first_list: Option<(watch::Receiver<bool>, Instant)>,
    /// Connected clients and their limits.
    pub(crate) clients: Clients,
    /// Idle limit of a connection.
    pub(crate) idle: Duration,
    /// Counters of all outcomes.
    pub(crate) counters: Counters,
}

impl<P: Proc + 'static> ServiceState<P> {
    /// Serves until `stop`, then answers pending questions.
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
                    error!(%error, "the task of a connection panicked");
                },
                ready = listener.readable() => match ready?.try_io(|listener| listener.get_ref().accept()) {
                    // Spurious readiness: no connection is pending.
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
            // Gives existing connections a turn between accepts.
            yield_now().await;
        }
        drop(listener);
        let open = self.clients.open();
        info!(open, "draining");
        // Fails only if no connection is open.
        let _ = stopping.send(true);
        let all_ended = timeout(DRAIN, async { while tasks.join_next().await.is_some() {} }).await;
        match all_ended {
            Ok(()) => self.counters.log(0, "drained"),
            Err(_) => self.counters.log(self.clients.open(), "drain timed out"),
        }
        Ok(())
    }

    async fn not_accepted(&self, error: io::Error) -> io::Result<()> {
        if errno::is_exhausted(&error) {
            Counters::add(&self.counters.exhausted);
            warn!(%error, "no free descriptor for another connection");
            // The listener stays readable, so without a pause this would spin.
            sleep(EXHAUSTED).await;
            return Ok(());
        }
        match error.kind() {
            io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => Ok(()),
            _ => Err(error),
        }
    }

    /// Returns a permit for the connection if its client is within the limits.
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
                debug!(?who, open = self.clients.open(), "connection refused at the limit");
            }
        }
        permit.ok()
    }

    fn turn_away(&self, fd: OwnedFd) {
        if let Some(unread) = socket::hang_up(fd)
            && let Some(closing) = self.clients.close_refused()
        {
            closing.close(vec![unread]);
        }
    }

    async fn attend(self: Rc<Self>, fd: OwnedFd, permit: ConnectionPermit, stopping: watch::Receiver<bool>) {
        let fd = match try_watched(fd) {
            Ok(fd) => {
                self.converse(&fd, &permit, stopping).await;
                fd.into_inner()
            }
            Err((fd, _)) => {
                Counters::add(&self.counters.exhausted);
                fd
            }
        };
        // The permit is held until the unread data of the connection is closed.
        if let Some(unread) = socket::hang_up(fd) {
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
            self.pods_listed().await;
            let reply = self.reply(received);
            closing.close(reply.leftovers);
            let bytes = packet::encode(&reply.answer);
            let pidfd = reply.pidfd.as_ref().map(AsFd::as_fd);
            let fds = pidfd.as_slice();
            let sent = fd.async_io(Interest::WRITABLE, |fd| socket::send_now(fd, &bytes, fds));
            match timeout(SEND, sent).await {
                Ok(Ok(())) if reply.is_last => return,
                Ok(Ok(())) => {}
                Ok(Err(error)) => return debug!(%error, "the client disconnected"),
                Err(_) => return Counters::add(&self.counters.too_slow),
            }
            yield_now().await;
        }
    }

    /// Returns the next packet with a permit to close its descriptors, or `None` at the end of the
    /// connection.
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
                    // Readiness is cached from the last packet, so check that another one exists.
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
                warn!(who = ?permit.who(), "closing descriptors of this client blocks; disconnecting it");
                return None;
            };
            // This task is the only reader, so a packet that was seen is still there. When stopping there may
            // be none.
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

    /// Waits for the first list of pods, for a short time after the start.
    async fn pods_listed(&self) {
        if let Some((is_listed, until)) = &self.first_list
            && !*is_listed.borrow()
        {
            let _ = timeout_at(*until, is_listed.clone().wait_for(|is_listed| *is_listed)).await;
        }
    }

    fn reply(&self, received: Packet) -> IdentityReply {
        let Packet { bytes, fds, bytes_cut, fds_cut, .. } = received;
        let Some(question) = packet::decode::<Question>(&bytes).ok().filter(|_| !bytes_cut) else {
            // A peer with another protocol gets one answer.
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
            // Ours may be the last descriptor of the socket, and its queue may contain anything.
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

    /// Identifies the process that has a pid now, well enough to detect reuse of the pid.
    fn about(&self, id: u64, bare_tgid: i32) -> IdentityReply {
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

    fn identity(
        &self,
        id: u64,
        peer: PeerIdentity,
        pidfd: Option<Pidfd>,
        leftovers: Vec<OwnedFd>,
    ) -> IdentityReply {
        Counters::add(&self.counters.identified);
        debug!(id, ?peer, "identified");
        let answer = Answer { id, result: Some(answer::Result::Peer(peer)) };
        IdentityReply { answer, pidfd, leftovers, is_last: false }
    }

    fn refusal(&self, id: u64, unknown: Unknown, leftovers: Vec<OwnedFd>, is_last: bool) -> IdentityReply {
        Counters::add(match unknown {
            Unknown::BadQuestion => &self.counters.bad_questions,
            Unknown::BadDescriptor => &self.counters.bad_descriptors,
            Unknown::Gone => &self.counters.gone,
            Unknown::OutOfSight => &self.counters.out_of_sight,
            Unknown::Unavailable | Unknown::Unspecified => &self.counters.unavailable,
        });
        debug!(id, ?unknown, "not identified");
        let answer = Answer { id, result: Some(answer::Result::Unknown(unknown.into())) };
        IdentityReply { answer, pidfd: None, leftovers, is_last }
    }
}

struct IdentityReply {
    answer: Answer,
    /// Sent together with the answer.
    pidfd: Option<Pidfd>,
    /// Received descriptors that must be closed.
    leftovers: Vec<OwnedFd>,
    /// Whether the connection is closed after the answer.
    is_last: bool,
}
