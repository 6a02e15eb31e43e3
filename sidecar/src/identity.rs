//! Who is at the other end of a connection: as the kernel says here, or as the node's identity service says.
//!
//! Since Linux 6.5 a connection gives a pidfd of who made it. Before, there is only a number, and who has that number now
//! need not be who connected. So it must have started before the connection was accepted; it must answer a challenge on the
//! connection ([`Known::needs_proof`]), with packets of which the kernel says that they are from that number; and it must have
//! lived all the while.

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

/// How long the identity service may take.
const LIMIT: Duration = Duration::from_millis(ANSWER_MILLIS);

/// Where identities come from.
#[derive(Clone, Debug)]
pub(crate) struct Resolver {
    /// The node's identity service; without it this process knows whom its own pid namespace shows.
    pub(crate) service: Option<PathBuf>,
    peer_pidfd: PeerPidfd,
    /// When to say that nobody knows who connected.
    unknown: Arc<Mutex<LogLimit>>,
    /// Who has one may ask the service.
    turns: Arc<Semaphore>,
}

/// Questions to the identity service at the same time: it has 64 places for all of one pod.
const QUESTIONS_MAX: usize = 32;

/// What is known of a connection.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Who it is; without it nobody is let in.
    pub(crate) identity: Option<PeerIdentity>,
    /// Readable when the process has ended.
    pub(crate) pidfd: Option<Pidfd>,
    /// The pidfd, or the identity, was found by a number.
    pub(crate) needs_proof: bool,
}

impl Resolver {
    pub(crate) fn new(service: Option<PathBuf>, peer_pidfd: PeerPidfd) -> Self {
        let unknown = Arc::new(Mutex::new(LogLimit::new(1, Duration::from_secs(1))));
        Self { service, peer_pidfd, unknown, turns: Arc::new(Semaphore::new(QUESTIONS_MAX)) }
    }

    /// Looks at a new connection.
    pub(crate) async fn resolve(&self, connection: &OwnedFd) -> Known {
        self.look(connection).await.unwrap_or_else(|error| {
            if let Some(left_out) = self.may_say() {
                tracing::warn!(%error, left_out, "a process cannot be identified: it is refused");
            }
            Known::default()
        })
    }

    /// Whether to say that nobody knows who connected, and how often that was not said. Strangers can cause it.
    pub(crate) fn may_say(&self) -> Option<u64> {
        self.unknown.lock().unwrap_or_else(PoisonError::into_inner).allow(Instant::now())
    }

    async fn look(&self, connection: &OwnedFd) -> io::Result<Known> {
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
                Ok(Known { identity: Some(identity), pidfd: Some(pidfd), needs_proof })
            }
            (Some(path), Some(pidfd)) if !pidfd.is_by_number() => {
                let question = Question::new(1, Subject::Pidfd);
                let (identity, _) = self.within(ask_once(path, &question, Some(pidfd.as_fd()))).await?;
                Ok(Known { identity: Some(identity), pidfd: Some(pidfd), needs_proof: false })
            }
            (Some(path), _) => {
                let question = Question::new(1, Subject::Socket).accepted_by(accepted);
                let (identity, fds) =
                    self.within(ask_once(path, &question, Some(connection.as_fd()))).await?;
                let pidfd = fds.into_iter().next().and_then(|fd| Pidfd::given(fd).ok());
                Ok(Known { identity: Some(identity), pidfd, needs_proof: true })
            }
        }
    }

    /// Who has these numbers now: processes, not their threads. Who is not found is not among them. `None`: nobody says.
    pub(crate) async fn by_number(&self, tgids: Vec<i32>) -> Option<Vec<PeerIdentity>> {
        let Some(path) = &self.service else {
            let here = |tgid| Pidfd::of_number(tgid).and_then(|pidfd| identify(&Kernel, &pidfd, |_| None));
            let found = tgids.into_iter().map(|tgid| unless_absent(here(tgid)));
            return said_by(found.filter_map(Result::transpose).collect());
        };
        let asked = async {
            let service = Service::connect(path)?;
            let mut found = Vec::new();
            for tgid in tgids {
                let answer = service.ask(&Question::about(1, tgid), None).await?;
                found.extend(unless_absent(answer.map(|(peer, _)| peer))?);
            }
            Ok(found)
        };
        said_by(self.within(asked).await)
    }

    /// Waits for a turn, and for the answer, and not for long.
    async fn within<T>(&self, asking: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let asking = async {
            // Never closed, and without a turn nothing is worse than with one.
            let _turn = self.turns.acquire().await;
            asking.await
        };
        let late = |_| Err(io::Error::other("the identity service does not answer"));
        timeout(LIMIT, asking).await.unwrap_or_else(late)
    }
}

/// Who made a connection, to be compared with who sends on it: it may have been passed on, or inherited.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connector {
    pid: u32,
    /// Since Linux 6.9; 0 before.
    inode: u64,
}

impl Connector {
    pub(crate) fn of(connection: &OwnedFd, known: &Known) -> io::Result<Self> {
        let pidfd = known.pidfd.as_ref().filter(|pidfd| !pidfd.is_by_number() && !known.needs_proof);
        Ok(Self { pid: socket::peer(connection)?.pid, inode: pidfd.map_or(0, Pidfd::inode) })
    }

    /// Whether the kernel says that this packet is from who made the connection. On kernels before 6.9, it can tell apart
    /// only processes that our pid namespace shows.
    pub(crate) fn has_sent(&self, packet: &Packet) -> bool {
        match &packet.sender_pidfd {
            Some(sender) if self.inode != 0 => file::inode(sender).is_ok_and(|inode| inode == self.inode),
            // No descriptor was left for it.
            None if self.inode != 0 => packet.sender_pid == self.pid && self.pid != 0,
            _ => packet.sender_pid == self.pid,
        }
    }
}

/// No process has a number, or nobody can say: those are two things.
fn unless_absent(answer: Result<PeerIdentity, Unknown>) -> io::Result<Option<PeerIdentity>> {
    match answer {
        Ok(peer) => Ok(Some(peer)),
        Err(Unknown::Gone | Unknown::BadDescriptor) => Ok(None),
        Err(unknown) => Err(said(unknown)),
    }
}

fn said_by(found: io::Result<Vec<PeerIdentity>>) -> Option<Vec<PeerIdentity>> {
    found.inspect_err(|error| tracing::warn!(%error, "nobody says which processes are to be admitted")).ok()
}

fn said(unknown: Unknown) -> io::Error {
    io::Error::other(match unknown {
        Unknown::Gone => "it has ended",
        Unknown::OutOfSight => {
            "it is of a pid namespace that cannot be seen from here: give the sidecar the node's identity service \
             (--identity)"
        }
        Unknown::Unavailable => {
            "the kernel does not say who it is: /proc is hidden, or no descriptor is left"
        }
        Unknown::BadQuestion | Unknown::BadDescriptor | Unknown::Unspecified => {
            "the identity service does not understand: run one version of both"
        }
    })
}

async fn ask_once(
    path: &Path,
    question: &Question,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<(PeerIdentity, Vec<OwnedFd>)> {
    Service::connect(path)?.ask(question, fd).await?.map_err(said)
}

/// A connection to the identity service. One for each question: it is asked seldom, and may be another one next time.
struct Service(AsyncFd<OwnedFd>);

impl Service {
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
            _ => Err(io::Error::other("the identity service says nothing")),
        }
    }
}
