//! The exchange: a stream socket in the IPC directory, on which each side gives the other its eventfd, once.
//!
//! NVIPC does not keep the connection, so its end says nothing of who lives. The kernel's word for who made it does: a pidfd.
//! Ours keep it for one byte more, [`GOODBYE`], with which a process that lives on says that it has closed its endpoint.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use shmesh_sys::pidfd::Pidfd;
use shmesh_sys::poll::{self, Watch};
use shmesh_sys::{eventfd, socket};

use crate::memory::AtomicU32;

use crate::{Error, Result};

/// How long to wait before looking for the primary again.
const AGAIN: Duration = Duration::from_millis(20);

/// What comes over the connection after the exchange, from ours alone.
const GOODBYE: u8 = b'.';
/// How long the other end of a connection may take for its half of the exchange. NVIPC has no limit.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(10);
/// The same, once its half has begun to arrive: it comes in one piece.
const REST_LIMIT: Duration = Duration::from_secs(1);
/// Less is not asked of the kernel, where 0 is no limit.
const LIMIT_MIN: Duration = Duration::from_millis(1);
/// Descriptors that may come along with the exchange; NVIPC sends one.
const FDS_MAX: usize = 8;
/// How long who goes on without a peer frees those that still wait to write to it.
const FREE_LIMIT: Duration = Duration::from_secs(1);

/// A process, as the kernel knows it.
#[derive(Debug)]
struct Process {
    /// None before Linux 6.5, and then its death goes unnoticed.
    pidfd: Option<Pidfd>,
    /// Its process id, or 0 if it has none in our namespace.
    pid: u32,
}

impl Process {
    fn of(connection: &OwnedFd) -> Self {
        let pidfd = socket::peer_pidfd(connection).ok().and_then(|fd| Pidfd::given(fd).ok());
        Self { pidfd, pid: socket::peer(connection).map_or(0, |peer| peer.pid) }
    }

    /// Whether the other is the same one: by the inode of the pidfd, which is 0 before Linux 6.9, or else by number.
    fn is(&self, other: &Self) -> bool {
        let inode = |process: &Self| process.pidfd.as_ref().map_or(0, Pidfd::inode);
        match (inode(self), inode(other)) {
            (0, _) | (_, 0) => self.pid != 0 && self.pid == other.pid,
            (one, another) => one == another,
        }
    }
}

/// The process at the other end.
#[derive(Debug)]
pub(crate) struct Peer {
    process: Process,
    connection: OwnedFd,
    /// It will say nothing more.
    hung_up: AtomicBool,
    /// What it waits on. It is the peer's as much as ours, and writing to it waits while its counter is full.
    eventfd: OwnedFd,
    /// How many threads write to it.
    posting: AtomicU32,
    /// The counter was full. Posts of an honest peer do not fill 64 bits, so nothing is written any more.
    full: AtomicBool,
}

impl Peer {
    fn new(process: Process, connection: OwnedFd, eventfd: OwnedFd) -> Self {
        let [hung_up, full] = [(); 2].map(|()| AtomicBool::new(false));
        Self { process, connection, hung_up, eventfd, posting: AtomicU32::new(0), full }
    }

    /// Readable when it has something to say; none when it will not.
    pub(crate) fn connection(&self) -> Option<BorrowedFd<'_>> {
        (!self.hung_up.load(Relaxed)).then(|| self.connection.as_fd())
    }

    /// Whether it has said goodbye, for who found the connection readable.
    pub(crate) fn has_left(&self) -> bool {
        match socket::receive_byte(&self.connection) {
            Ok(None) => false,
            Ok(Some(GOODBYE)) => true,
            // NVIPC hangs up after the exchange, and lives on.
            Ok(Some(_)) | Err(_) => {
                self.hung_up.store(true, Relaxed);
                false
            }
        }
    }

    /// Says that this side will not touch the link any more. Who does not listen does not hear it.
    pub(crate) fn say_goodbye(&self) {
        let _ = socket::send_now(&self.connection, &[GOODBYE], &[]);
    }

    /// Readable when it has ended; none where that cannot be known.
    pub(crate) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.process.pidfd.as_ref().map(AsFd::as_fd)
    }

    /// Whether it has ended, as far as can be known.
    pub(crate) fn has_ended(&self) -> bool {
        self.process.pidfd.as_ref().is_some_and(|pidfd| pidfd.has_ended().unwrap_or(false))
    }

    /// Whether the other is the same process.
    pub(crate) fn is(&self, other: &Caller) -> bool {
        self.process.is(&other.process)
    }

    /// Wakes it. Not with a lock: it may fill its counter between our look and our write, and then this waits for
    /// [`free_posting`](Self::free_posting).
    pub(crate) fn post(&self) -> io::Result<()> {
        // Counted before the look, so that who frees those that wait knows of all that have not seen `full`.
        self.posting.fetch_add(1, SeqCst);
        let posted = self.post_counted();
        self.posting.fetch_sub(1, SeqCst);
        posted
    }

    fn post_counted(&self) -> io::Result<()> {
        if self.full.load(SeqCst) {
            return Ok(());
        }
        if !eventfd::has_room(&self.eventfd)? {
            // Who reads has plenty to wake up for.
            self.full.store(true, SeqCst);
            return Ok(());
        }
        eventfd::post(&self.eventfd)
    }

    /// Whether a thread of ours waits to write, as far as one look tells.
    pub(crate) fn keeps_somebody(&self) -> bool {
        self.posting.load(Relaxed) > 0 && !eventfd::has_room(&self.eventfd).unwrap_or(true)
    }

    /// Frees the threads that wait to write: by taking from a counter that is full, of which the peer does not miss one.
    pub(crate) fn free_posting(&self) {
        self.full.store(true, SeqCst);
        let start = Instant::now();
        while self.posting.load(SeqCst) > 0 && start.elapsed() < FREE_LIMIT {
            if !eventfd::has_room(&self.eventfd).unwrap_or(true) {
                let _ = eventfd::take(&self.eventfd);
            }
            std::thread::yield_now();
        }
    }
}

/// Who is at the other end of a connection.
#[derive(Debug)]
pub(crate) struct Caller {
    connection: OwnedFd,
    process: Process,
    since: Instant,
}

impl Caller {
    fn of(connection: OwnedFd) -> Self {
        Self { process: Process::of(&connection), connection, since: Instant::now() }
    }

    pub(crate) fn accepted(listener: &OwnedFd) -> io::Result<Self> {
        let connection = socket::accept(listener)?;
        socket::limit_wait(&connection, REST_LIMIT)?;
        Ok(Self::of(connection))
    }

    /// Whether its half of the exchange is there: each secondary sends it at once, so who has not is none yet.
    pub(crate) fn has_spoken(&self) -> bool {
        poll::is_readable(&self.connection).unwrap_or(true)
    }

    /// Until when it may be silent.
    pub(crate) fn silent_until(&self) -> Option<Instant> {
        self.since.checked_add(EXCHANGE_LIMIT)
    }

    /// Whether it was silent for too long.
    pub(crate) fn is_too_late(&self) -> bool {
        self.since.elapsed() >= EXCHANGE_LIMIT && !self.has_spoken()
    }

    /// Whether it waits no longer: it has gone, or has given up to try again.
    pub(crate) fn has_hung_up(&self) -> bool {
        // The kernel reports it without being asked.
        poll::wait(&mut [Watch::hung_up(&self.connection)], Some(Instant::now())).is_ok_and(|ready| ready > 0)
    }

    /// Gives our eventfd and takes the other's.
    pub(crate) fn exchange(self, ours: &OwnedFd) -> io::Result<Peer> {
        // Two bytes, "nothing" and "well", and the descriptor beside them.
        socket::send(&self.connection, &[0, 0], &[ours.as_fd()])?;
        let eventfd = receive_eventfd(&self.connection)?;
        Ok(Peer::new(self.process, self.connection, eventfd))
    }
}

impl AsFd for Caller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// Receives the eventfd of the other end, and nothing but an eventfd.
fn receive_eventfd(from: &OwnedFd) -> io::Result<OwnedFd> {
    let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut bytes = [0xff_u8; 2];
    let (mut read, mut fds) = (0, Vec::new());
    while read < bytes.len() {
        let (len, more) = socket::receive_part(from, &mut bytes[read..])?;
        fds.extend(more);
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if fds.len() > FDS_MAX {
            return Err(bad("the peer sends more descriptors than an exchange has"));
        }
        read += len;
    }
    if bytes != [0, 0] {
        return Err(bad("the peer has no eventfd to give"));
    }
    let fd = fds.pop().ok_or_else(|| bad("no descriptor came with it"))?;
    if !eventfd::is_eventfd(&fd)? {
        return Err(bad("what the peer gave is no eventfd"));
    }
    Ok(fd)
}

/// Finds the primary and exchanges eventfds with it.
pub(crate) fn meet(path: &Path, ours: &OwnedFd, patience: Option<Duration>) -> Result<Peer> {
    let start = Instant::now();
    loop {
        let left = patience.map_or(EXCHANGE_LIMIT, |patience| patience.saturating_sub(start.elapsed()));
        let met = socket::connect_stream(path, left.clamp(LIMIT_MIN, EXCHANGE_LIMIT))
            .and_then(|connection| Caller::of(connection).exchange(ours));
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
                io::ErrorKind::WouldBlock => {
                    let why = "the primary accepts and does not answer (it has a secondary that lives, or it is stopped): end \
                               that secondary, or start the primary anew";
                    Error::system(format!("connect to {}: {why}", path.display()), error)
                }
                _ => Error::system(format!("exchange eventfds at {}", path.display()), error),
            });
        }
        std::thread::sleep(AGAIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> (Peer, OwnedFd) {
        let (peer, _other, eventfd) = connected();
        (peer, eventfd)
    }

    fn connected() -> (Peer, OwnedFd, OwnedFd) {
        let (connection, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let (connection, eventfd) = (OwnedFd::from(connection), eventfd::blocking().unwrap());
        let ours = eventfd.try_clone().unwrap();
        (Peer::new(Process::of(&connection), connection, ours), other.into(), eventfd)
    }

    #[test]
    fn only_a_goodbye_is_one() {
        let (peer, other, _eventfd) = connected();
        assert!(!peer.has_left() && peer.connection().is_some());
        socket::send(&other, &[GOODBYE], &[]).unwrap();
        assert!(peer.has_left());
        // As NVIPC does at once.
        drop(other);
        assert!(!peer.has_left() && peer.connection().is_none());
        peer.say_goodbye();
        let (peer, other, _eventfd) = connected();
        socket::send(&other, &[0], &[]).unwrap();
        assert!(!peer.has_left() && peer.connection().is_none(), "whoever it is, it is none of ours");
    }

    fn fill(eventfd: &OwnedFd) {
        nix::unistd::write(eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }

    #[test]
    fn processes_are_told_apart_also_where_they_have_no_number() {
        let (connection, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let connection = connection.into();
        let process = |pid| Process { pid, ..Process::of(&connection) };
        if process(0).pidfd.as_ref().is_none_or(|pidfd| pidfd.inode() == 0) {
            eprintln!("skipped: this kernel has no inode of a process");
            return;
        }
        assert!(process(0).is(&process(0)));
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let other = Process { pidfd: Pidfd::of_number(child.id().cast_signed()).ok(), pid: 0 };
        assert!(!process(0).is(&other) && other.is(&other));
        let unknown = |pid| Process { pidfd: None, pid };
        assert!(!unknown(0).is(&unknown(0)) && unknown(7).is(&unknown(7)) && !unknown(7).is(&unknown(8)));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_full_counter_keeps_nobody() {
        let (peer, theirs) = peer();
        peer.post().unwrap();
        assert!(eventfd::take(&theirs).unwrap());
        fill(&theirs);
        peer.post().unwrap();
        assert!(!peer.keeps_somebody());
        peer.free_posting();
    }

    #[test]
    fn who_waits_to_write_is_freed() {
        let (peer, theirs) = peer();
        fill(&theirs);
        std::thread::scope(|scope| {
            // As after a look that saw room.
            let waiters = [(); 3].map(|()| {
                scope.spawn(|| {
                    peer.posting.fetch_add(1, SeqCst);
                    eventfd::post(&peer.eventfd).unwrap();
                    peer.posting.fetch_sub(1, SeqCst);
                })
            });
            while !waiters.iter().all(|waiter| waiter.is_finished()) {
                if peer.keeps_somebody() {
                    peer.free_posting();
                }
                std::thread::yield_now();
            }
        });
        peer.post().unwrap();
    }
}
