//! The exchange: a stream socket in the IPC directory, on which each side gives the other its eventfd, once.
//!
//! The connection is not kept, so it says nothing of who lives. The kernel's word for who made it does: a pidfd.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use shmesh::sys::socket;

use crate::{Error, Result, sys};

/// How long to wait before looking for the primary again.
const AGAIN: Duration = Duration::from_millis(20);

/// The process at the other end.
#[derive(Debug)]
pub(crate) struct Peer {
    /// What it waits on.
    pub(crate) eventfd: OwnedFd,
    /// Readable when it has ended; none before Linux 6.5, and then its death goes unnoticed.
    pub(crate) pidfd: Option<OwnedFd>,
    /// Its process id, or 0 if it has none in our namespace.
    pid: u32,
}

impl Peer {
    /// Whether it has ended, as far as can be known.
    pub(crate) fn has_ended(&self) -> bool {
        self.pidfd.as_ref().is_some_and(sys::has_ended)
    }

    /// Whether the other is the same process.
    pub(crate) fn is(&self, other: &Caller) -> bool {
        self.pid != 0 && self.pid == other.pid
    }
}

/// Who is at the other end of a connection.
#[derive(Debug)]
pub(crate) struct Caller {
    connection: OwnedFd,
    pidfd: Option<OwnedFd>,
    pid: u32,
}

impl Caller {
    fn of(connection: OwnedFd) -> Self {
        let pidfd = socket::peer_pidfd(&connection).ok();
        let pid = socket::peer(&connection).map_or(0, |peer| peer.pid);
        Self { connection, pidfd, pid }
    }

    pub(crate) fn accepted(listener: &OwnedFd) -> io::Result<Self> {
        Ok(Self::of(sys::accept(listener)?))
    }

    /// Gives our eventfd and takes the other's.
    pub(crate) fn exchange(self, ours: &OwnedFd) -> io::Result<Peer> {
        sys::send_fd(&self.connection, ours.as_fd())?;
        let eventfd = sys::receive_eventfd(&self.connection)?;
        Ok(Peer { eventfd, pidfd: self.pidfd, pid: self.pid })
    }
}

/// Finds the primary and exchanges eventfds with it.
pub(crate) fn meet(path: &Path, ours: &OwnedFd, patience: Option<Duration>) -> Result<Peer> {
    let start = Instant::now();
    loop {
        let met = sys::connect_to(path).and_then(|connection| Caller::of(connection).exchange(ours));
        let error = match met {
            Ok(peer) => return Ok(peer),
            Err(error) => error,
        };
        let again = matches!(
            error.kind(),
            io::ErrorKind::NotFound
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::WouldBlock
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::UnexpectedEof
                | io::ErrorKind::Interrupted
        );
        if !again {
            return Err(Error::system(format!("exchange eventfds at {}", path.display()), error));
        }
        if patience.is_some_and(|patience| start.elapsed() >= patience) {
            return Err(match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    Error::NoPrimary { path: path.to_owned() }
                }
                io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                    let why = "the primary refuses (it has a secondary that lives)";
                    Error::system(format!("connect to {}: {why}", path.display()), error)
                }
                _ => Error::system(format!("exchange eventfds at {}", path.display()), error),
            });
        }
        std::thread::sleep(AGAIN);
    }
}
