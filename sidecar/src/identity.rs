//! Identity of the process behind a connection, from the kernel or from the node's identity service.
//!
//! Since Linux 6.5 the kernel gives a pidfd of the process that made a connection. Before, it only gives a process id,
//! which may belong to another process by now. So that process must have started before the connection was accepted,
//! must answer a challenge on the connection ([`KnownPeer::needs_proof`]) with packets that the kernel attributes to
//! that process id, and must be alive until then.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use shmesh_daemon::descriptor::watched;
use shmesh_daemon::log_limit::LogLimit;
use shmesh_proto::identity::{Answer, PeerIdentity, Question, Subject, answer};
use shmesh_proto::limits::ANSWER_MILLIS;
use shmesh_proto::packet;
use shmesh_sys::file;
use shmesh_sys::identify::identify;
use shmesh_sys::pidfd::{PeerPidfd, Pidfd, Unknown};
use shmesh_sys::procfs::Kernel;
use shmesh_sys::socket::{self, Packet};
use shmesh_sys::time::boot_ticks;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Time limit for an answer of the identity service.
const LIMIT: Duration = Duration::from_millis(ANSWER_MILLIS);

/// Identifies processes by the kernel or the identity service.
#[derive(Clone, Debug)]
pub(crate) struct Resolver {
    /// Socket of the node's identity service; without it only processes in this pid namespace can be identified.
    pub(crate) service: Option<PathBuf>,
    peer_pidfd: PeerPidfd,
    /// Rate limit of the warning about unidentified clients, which any client can cause.
    unknown: Arc<Mutex<LogLimit>>,
    /// Permits for simultaneous questions to the service.
    turns: Arc<Semaphore>,
}

/// Maximum number of simultaneous questions to the identity service, which accepts 64 connections of a pod.
const QUESTIONS_MAX: usize = 32;

/// The facts known about the process behind a connection.
#[derive(Debug, Default)]
pub(crate) struct KnownPeer {
    /// Its identity. Without one, the client is refused.
    pub(crate) identity: Option<PeerIdentity>,
    /// A pidfd, readable when the process has ended.
    pub(crate) pidfd: Option<Pidfd>,
    /// Whether the pidfd or the identity was found by process id only.
    pub(crate) needs_proof: bool,
}

impl Resolver {
    pub(crate) fn new(service: Option<PathBuf>, peer_pidfd: PeerPidfd) -> Self {
        let unknown = Arc::new(Mutex::new(LogLimit::new(1, Duration::from_secs(1))));
        Self { service, peer_pidfd, unknown, turns: Arc::new(Semaphore::new(QUESTIONS_MAX)) }
    }

    /// Identifies the process behind a new connection.
    pub(crate) async fn resolve(&self, connection: &OwnedFd) -> KnownPeer {
        self.look(connection).await.unwrap_or_else(|error| {
            if let Some(left_out) = self.may_say() {
                tracing::warn!(%error, left_out, "refused a client that cannot be identified");
            }
            KnownPeer::default()
        })
    }

    /// Whether to log a warning about an unidentified client, and how many were suppressed before.
    pub(crate) fn may_say(&self) -> Option<u64> {
        self.unknown.lock().unwrap_or_else(PoisonError::into_inner).allow(Instant::now())
    }

    async fn look(&self, connection: &OwnedFd) -> io::Result<KnownPeer> {
        let accepted = boot_ticks()?;
        let pidfd = match Pidfd::of_peer(connection.as_fd(), self.peer_pidfd) {
            Ok(pidfd) => Some(pidfd),
            Err(Unknown::OutOfSight) => None,
            Err(unknown) => return Err(said(unknown)),
        };
        match (&self.service, pidfd) {
            (None, None) => Err(said(Unknown::OutOfSight)),
            (None, Some(pidfd)) => {
                let identity = identify(&Kernel, &pidfd, |_| None).map_err(said)?;
                let needs_proof = pidfd.is_by_number();
                if needs_proof && identity.start_time > accepted {
                    return Err(said(Unknown::Gone));
                }
                Ok(KnownPeer { identity: Some(identity), pidfd: Some(pidfd), needs_proof })
            }
            (Some(path), Some(pidfd)) if !pidfd.is_by_number() => {
                let question = Question::new(1, Subject::Pidfd);
                let (identity, _) = self.within(ask_once(path, &question, Some(pidfd.as_fd()))).await?;
                Ok(KnownPeer { identity: Some(identity), pidfd: Some(pidfd), needs_proof: false })
            }
            (Some(path), _) => {
                let question = Question::new(1, Subject::Socket).accepted_by(accepted);
                let (identity, fds) =
                    self.within(ask_once(path, &question, Some(connection.as_fd()))).await?;
                let pidfd = fds.into_iter().next().and_then(|fd| Pidfd::given(fd).ok());
                Ok(KnownPeer { identity: Some(identity), pidfd, needs_proof: true })
            }
        }
    }

    /// The processes (not threads) that have these process ids now; ids without a process are missing. `None` if the
    /// service does not answer.
    pub(crate) async fn by_number(&self, tgids: Vec<i32>) -> Option<Vec<PeerIdentity>> {
        let Some(path) = &self.service else {
            let here = |tgid| Pidfd::of_number(tgid).and_then(|pidfd| identify(&Kernel, &pidfd, |_| None));
            let found = tgids.into_iter().map(|tgid| unless_absent(here(tgid)));
            return said_by(found.filter_map(Result::transpose).collect());
        };
        let asked = async {
            let service = IdentityConnection::connect(path)?;
            let mut found = Vec::new();
            for tgid in tgids {
                let answer = service.ask(&Question::about(1, tgid), None).await?;
                found.extend(unless_absent(answer.map(|(peer, _)| peer))?);
            }
            Ok(found)
        };
        said_by(self.within(asked).await)
    }

    /// Waits for a permit and the answer, up to the limit.
    async fn within<T>(&self, asking: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let asking = async {
            // The semaphore is never closed.
            let _turn = self.turns.acquire().await;
            asking.await
        };
        let late = |_| Err(io::Error::other("the identity service does not answer"));
        timeout(LIMIT, asking).await.unwrap_or_else(late)
    }
}

/// The process that made a connection, to be compared with the senders of its packets: a connection may be passed on or
/// inherited.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connector {
    pid: u32,
    /// Inode of its pidfd, since Linux 6.9; 0 before.
    inode: u64,
}

impl Connector {
    pub(crate) fn of(connection: &OwnedFd, known: &KnownPeer) -> io::Result<Self> {
        let pidfd = known.pidfd.as_ref().filter(|pidfd| !pidfd.is_by_number() && !known.needs_proof);
        Ok(Self { pid: socket::peer(connection)?.pid, inode: pidfd.map_or(0, Pidfd::inode) })
    }

    /// Whether the kernel attributes this packet to the process that made the connection. Before Linux 6.9, it distinguishes only
    /// processes that this pid namespace shows.
    pub(crate) fn has_sent(&self, packet: &Packet) -> bool {
        match &packet.sender_pidfd {
            Some(sender) if self.inode != 0 => file::inode(sender).is_ok_and(|inode| inode == self.inode),
            // No descriptor was left for its pidfd.
            None if self.inode != 0 => packet.sender_pid == self.pid && self.pid != 0,
            _ => packet.sender_pid == self.pid,
        }
    }
}

/// Distinguishes "no process has this id" from "it cannot be determined".
fn unless_absent(answer: Result<PeerIdentity, Unknown>) -> io::Result<Option<PeerIdentity>> {
    match answer {
        Ok(peer) => Ok(Some(peer)),
        Err(Unknown::Gone | Unknown::BadDescriptor) => Ok(None),
        Err(unknown) => Err(said(unknown)),
    }
}

fn said_by(found: io::Result<Vec<PeerIdentity>>) -> Option<Vec<PeerIdentity>> {
    found
        .inspect_err(|error| tracing::warn!(%error, "cannot identify the processes that an exporter admits"))
        .ok()
}

fn said(unknown: Unknown) -> io::Error {
    io::Error::other(match unknown {
        Unknown::Gone => "the process has ended",
        Unknown::OutOfSight => {
            "the process is in a pid namespace that is not visible from here: give the sidecar the node's identity service \
             (--identity)"
        }
        Unknown::Unavailable => "the process is not visible: /proc is hidden, or no file descriptor is left",
        Unknown::BadQuestion | Unknown::BadDescriptor | Unknown::Unspecified => {
            "the identity service does not understand the request: run the same version of both"
        }
    })
}

async fn ask_once(
    path: &Path,
    question: &Question,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<(PeerIdentity, Vec<OwnedFd>)> {
    IdentityConnection::connect(path)?.ask(question, fd).await?.map_err(said)
}

/// A connection to the identity service. One per question: questions are rare, and the service may restart in between.
struct IdentityConnection(AsyncFd<OwnedFd>);

impl IdentityConnection {
    fn connect(path: &Path) -> io::Result<Self> {
        let connected = socket::connect_now(path).and_then(watched);
        let named = |error| io::Error::other(format!("the identity service at {}: {error}", path.display()));
        connected.map(Self).map_err(named)
    }

    async fn ask(
        &self,
        question: &Question,
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<Result<(PeerIdentity, Vec<OwnedFd>), Unknown>> {
        let bytes = packet::encode(question);
        let fds = fd.as_slice();
        self.0.async_io(Interest::WRITABLE, |service| socket::send(service, &bytes, fds)).await?;
        let (bytes, fds) = self.0.async_io(Interest::READABLE, socket::receive).await?;
        let answer: Answer = packet::decode(&bytes).map_err(io::Error::other)?;
        match answer.result {
            Some(answer::Result::Peer(peer)) if peer.bare_tgid > 0 => Ok(Ok((peer, fds))),
            Some(answer::Result::Unknown(why)) => {
                Ok(Err(Unknown::try_from(why).unwrap_or(Unknown::Unavailable)))
            }
            _ => Err(io::Error::other("the identity service sent an empty answer")),
        }
    }
}
