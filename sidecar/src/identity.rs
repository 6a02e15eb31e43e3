//! Who is at the other end of a connection: as the kernel says here, or as the node's identity service says.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use shmesh::sys::socket;
use shmesh_daemon::descriptor::{pidfd_open, watched};
use shmesh_proto::identity::{Answer, PeerIdentity, Question, Subject, answer};
use shmesh_proto::limits::ANSWER_MILLIS;
use shmesh_proto::packet;
use tokio::io::Interest;

/// Where identities come from.
#[derive(Clone, Debug)]
pub(crate) enum Resolver {
    /// This pid namespace: bare only if it is the outermost.
    Own,
    /// The node's identity service.
    Service(PathBuf),
}

/// What is known of a connection.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Who it is; without it nobody is let in.
    pub(crate) identity: Option<PeerIdentity>,
    /// Readable when the process has ended. Since Linux 6.5.
    pub(crate) pidfd: Option<OwnedFd>,
}

impl Resolver {
    /// Looks at a new connection.
    pub(crate) async fn resolve(&self, connection: &OwnedFd) -> Known {
        let (pidfd, identity) = match peer_pidfd(connection) {
            Err(error) => (None, Err(error)),
            Ok(pidfd) => {
                let identity = match self {
                    Self::Own => own(connection, pidfd.as_ref()),
                    Self::Service(path) => ask(path, connection, pidfd.as_ref()).await,
                };
                (pidfd, identity)
            }
        };
        let identity = identity
            .inspect_err(
                |error| tracing::warn!(error = %error, "a process cannot be identified: it is refused"),
            )
            .ok();
        Known { identity, pidfd }
    }

    /// Who has this number now: a process, not one of its threads. The identity service does not answer this; processes that
    /// are connected are known without.
    pub(crate) fn by_tgid(&self, tgid: i32) -> Option<PeerIdentity> {
        let Self::Own = self else { return None };
        let before = start_time(tgid).ok()?;
        let status = std::fs::read_to_string(format!("/proc/{tgid}/status")).ok()?;
        let number = |name: &str| -> Option<u32> {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name)?.split_ascii_whitespace().next()?.parse().ok())
        };
        let is_process = number("Tgid:") == u32::try_from(tgid).ok();
        // Twice the same: all of it was read of one process.
        (is_process && start_time(tgid).ok()? == before).then_some(PeerIdentity {
            bare_tgid: tgid,
            start_time: before,
            pidfd_inode: 0,
            uid: number("Uid:")?,
            gid: number("Gid:")?,
            pod: None,
        })
    }
}

/// The process that made the connection. `None` where the kernel has no answer, before Linux 6.5, and this pid namespace
/// does not show it. One that has ended is an error: its number may be another's by now.
fn peer_pidfd(connection: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    match socket::peer_pidfd(connection) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            match socket::peer(connection)?.pid {
                0 => Ok(None),
                pid => pidfd_open(pid.cast_signed()).map(Some),
            }
        }
        Err(error) => Err(error),
    }
}

fn own(connection: &OwnedFd, pidfd: Option<&OwnedFd>) -> io::Result<PeerIdentity> {
    let peer = socket::peer(connection)?;
    let pid = pidfd.map_or(Ok(0), pid_of)?;
    if pid <= 0 {
        return Err(io::Error::other("it has ended, or is in a pid namespace that cannot be seen from here"));
    }
    let start_time = start_time(pid)?;
    // Read while the process lived: otherwise the number may have been another's.
    if pidfd.is_some_and(has_ended) {
        return Err(io::Error::other("it has ended"));
    }
    let pidfd_inode = pidfd.map_or(Ok(0), inode)?;
    Ok(PeerIdentity { bare_tgid: pid, start_time, pidfd_inode, uid: peer.uid, gid: peer.gid, pod: None })
}

fn pid_of(pidfd: &OwnedFd) -> io::Result<i32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
    pid.ok_or_else(|| io::Error::other("the kernel does not say whose pidfd it is"))
}

fn start_time(pid: i32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name may hold anything, also brackets: what counts comes after the last one.
    let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_ascii_whitespace());
    let field = fields.and_then(|mut fields| fields.nth(19)?.parse().ok());
    field.ok_or_else(|| io::Error::other("the kernel does not say when it started"))
}

/// Inodes of pidfds tell processes apart only on a pidfs, since Linux 6.9.
fn inode(pidfd: &OwnedFd) -> io::Result<u64> {
    const PIDFS_MAGIC: i64 = 0x5049_4446;
    let on = nix::sys::statfs::fstatfs(pidfd)?.filesystem_type();
    #[expect(clippy::useless_conversion, reason = "its width differs between architectures")]
    let is_pidfs = i64::from(on.0) == PIDFS_MAGIC;
    Ok(if is_pidfs { nix::sys::stat::fstat(pidfd)?.st_ino } else { 0 })
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// Forwards the pidfd, or on an old kernel the connection itself, to the service.
async fn ask(path: &Path, connection: &OwnedFd, pidfd: Option<&OwnedFd>) -> io::Result<PeerIdentity> {
    let limit = Duration::from_millis(ANSWER_MILLIS);
    tokio::time::timeout(limit, ask_once(path, connection, pidfd))
        .await
        .unwrap_or_else(|_| Err(io::Error::other("the identity service does not answer")))
}

async fn ask_once(path: &Path, connection: &OwnedFd, pidfd: Option<&OwnedFd>) -> io::Result<PeerIdentity> {
    let service = socket::connect_now(path)
        .map_err(|error| io::Error::other(format!("the identity service at {}: {error}", path.display())))?;
    let (subject, fd) = match pidfd {
        Some(pidfd) => (Subject::Pidfd, pidfd),
        None => (Subject::Socket, connection),
    };
    let service = watched(service)?;
    let question = packet::encode(&Question::new(1, subject));
    service.async_io(Interest::WRITABLE, |service| socket::send(service, &question, &[fd.as_fd()])).await?;
    let (bytes, _) = service.async_io(Interest::READABLE, socket::receive).await?;
    let answer: Answer = packet::decode(&bytes).map_err(io::Error::other)?;
    match answer.result {
        Some(answer::Result::Peer(peer)) if peer.bare_tgid > 0 => Ok(peer),
        Some(answer::Result::Unknown(why)) => {
            let why = shmesh_proto::identity::Unknown::try_from(why).unwrap_or_default();
            Err(io::Error::other(format!("the identity service says: {why:?}")))
        }
        _ => Err(io::Error::other("the identity service says nothing")),
    }
}
