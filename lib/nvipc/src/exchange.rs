//! The handshake: each side gives the other its eventfd, once, over a stream socket in the IPC directory.
//!
//! NVIPC closes the connection right after it, so the end of the connection does not mean that the peer has ended. The
//! pidfd of the peer tells that. Peers with this library keep the connection open for one more byte, [`GOODBYE`], which a
//! process sends when it closes its endpoint and goes on running.

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

/// Delay between attempts to find the primary.
const AGAIN: Duration = Duration::from_millis(20);

/// The byte that a closing endpoint sends over the connection. Only this library does so.
const GOODBYE: u8 = b'.';
/// How long a peer may take for its half of the handshake. NVIPC has no limit.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(10);
/// How long it may take once its half has begun to arrive, because it is sent in one piece.
const REST_LIMIT: Duration = Duration::from_secs(1);
/// The shortest timeout to set on a socket: the kernel takes 0 for no limit.
const LIMIT_MIN: Duration = Duration::from_millis(1);
/// Maximum number of descriptors accepted with the handshake; NVIPC sends one.
const FDS_MAX: usize = 8;
/// How long to keep releasing threads that are blocked while they write to a peer that was replaced.
const FREE_LIMIT: Duration = Duration::from_secs(1);

/// The identity of a process, as the kernel reports it.
#[derive(Debug)]
struct PeerProcess {
    /// `None` before Linux 6.5; then the death of the process is not detected.
    pidfd: Option<Pidfd>,
    /// Its process id, or 0 if it has none in our pid namespace.
    pid: u32,
}

impl PeerProcess {
    fn of(connection: &OwnedFd) -> Self {
        let pidfd = socket::peer_pidfd(connection).ok().and_then(|fd| Pidfd::given(fd).ok());
        Self { pidfd, pid: socket::peer(connection).map_or(0, |peer| peer.pid) }
    }

    /// Whether both are the same process: by the inode of the pidfd, or by process id before Linux 6.9, where the inode is
    /// 0.
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
pub(crate) struct ExchangePeer {
    process: PeerProcess,
    connection: OwnedFd,
    /// Nothing more will arrive on the connection.
    hung_up: AtomicBool,
    /// The eventfd that the peer waits on. The peer can fill its counter, and then a write to it blocks.
    eventfd: OwnedFd,
    /// Number of threads that are writing to it.
    posting: AtomicU32,
    /// The counter was found full. Notifications of an honest peer do not fill 64 bits, so nothing is written from then on.
    full: AtomicBool,
}

impl ExchangePeer {
    fn new(process: PeerProcess, connection: OwnedFd, eventfd: OwnedFd) -> Self {
        let [hung_up, full] = [(); 2].map(|()| AtomicBool::new(false));
        Self { process, connection, hung_up, eventfd, posting: AtomicU32::new(0), full }
    }

    /// The connection, readable when the peer has sent something or hung up. `None` once nothing more will arrive.
    pub(crate) fn connection(&self) -> Option<BorrowedFd<'_>> {
        (!self.hung_up.load(Relaxed)).then(|| self.connection.as_fd())
    }

    /// Whether the peer has sent its goodbye. Called when the connection is readable.
    pub(crate) fn has_left(&self) -> bool {
        match socket::receive_byte(&self.connection) {
            Ok(None) => false,
            Ok(Some(GOODBYE)) => true,
            // NVIPC closes the connection after the handshake and goes on running.
            Ok(Some(_)) | Err(_) => {
                self.hung_up.store(true, Relaxed);
                false
            }
        }
    }

    /// Tells the peer that this side will not touch the link any more. NVIPC's processes ignore it.
    pub(crate) fn say_goodbye(&self) {
        let _ = socket::send_now(&self.connection, &[GOODBYE], &[]);
    }

    /// The pidfd of the peer, readable when it has ended. `None` where the kernel has none.
    pub(crate) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.process.pidfd.as_ref().map(AsFd::as_fd)
    }

    /// Whether the peer is known to have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.process.pidfd.as_ref().is_some_and(|pidfd| pidfd.has_ended().unwrap_or(false))
    }

    /// Whether the caller is the process of this peer.
    pub(crate) fn is(&self, other: &ConnectingPeer) -> bool {
        self.process.is(&other.process)
    }

    /// Wakes the peer. No lock is held: the peer may fill its counter between the check and the write, which then blocks
    /// until [`free_posting`](Self::free_posting).
    pub(crate) fn post(&self) -> io::Result<()> {
        // Counted before the check, so that `free_posting` knows of every thread that has not seen `full`.
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
            // The peer has more than enough wake-ups pending.
            self.full.store(true, SeqCst);
            return Ok(());
        }
        eventfd::post(&self.eventfd)
    }

    /// Whether a thread of ours is blocked in a write, as far as one look shows.
    pub(crate) fn has_blocked_writer(&self) -> bool {
        self.posting.load(Relaxed) > 0 && !eventfd::has_room(&self.eventfd).unwrap_or(true)
    }

    /// Releases threads that are blocked in a write, by reading from the full counter. The peer misses no wake-up, as many
    /// are left.
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

/// A process that has connected and has not completed the handshake.
#[derive(Debug)]
pub(crate) struct ConnectingPeer {
    connection: OwnedFd,
    process: PeerProcess,
    since: Instant,
}

impl ConnectingPeer {
    fn of(connection: OwnedFd) -> Self {
        Self { process: PeerProcess::of(&connection), connection, since: Instant::now() }
    }

    pub(crate) fn accepted(listener: &OwnedFd) -> io::Result<Self> {
        let connection = socket::accept(listener)?;
        socket::limit_wait(&connection, REST_LIMIT)?;
        Ok(Self::of(connection))
    }

    /// Whether its half of the handshake has arrived. A secondary sends it at once; a caller without it is not a secondary
    /// yet.
    pub(crate) fn has_spoken(&self) -> bool {
        poll::is_readable(&self.connection).unwrap_or(true)
    }

    /// The deadline for the first byte of its half.
    pub(crate) fn silent_until(&self) -> Option<Instant> {
        self.since.checked_add(EXCHANGE_LIMIT)
    }

    /// Whether that deadline has passed.
    pub(crate) fn is_too_late(&self) -> bool {
        self.since.elapsed() >= EXCHANGE_LIMIT && !self.has_spoken()
    }

    /// Whether it has closed the connection: it has ended, or has given up to retry.
    pub(crate) fn has_hung_up(&self) -> bool {
        // The kernel reports a hang-up even if no events are requested.
        poll::wait(&mut [Watch::hung_up(&self.connection)], Some(Instant::now())).is_ok_and(|ready| ready > 0)
    }

    /// Sends our eventfd and receives the peer's.
    pub(crate) fn exchange(self, ours: &OwnedFd) -> io::Result<ExchangePeer> {
        // Two bytes, for "nothing" and "success" of NVIPC's protocol, and the descriptor as ancillary data.
        socket::send(&self.connection, &[0, 0], &[ours.as_fd()])?;
        let eventfd = receive_eventfd(&self.connection)?;
        Ok(ExchangePeer::new(self.process, self.connection, eventfd))
    }
}

impl AsFd for ConnectingPeer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// Receives the eventfd of the peer. Any other kind of descriptor is refused.
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
            return Err(bad("the peer sent more than one descriptor"));
        }
        read += len;
    }
    if bytes != [0, 0] {
        return Err(bad("the peer could not create an eventfd"));
    }
    let fd = fds.pop().ok_or_else(|| bad("the peer sent no descriptor"))?;
    if !eventfd::is_eventfd(&fd)? {
        return Err(bad("the peer sent a descriptor that is not an eventfd"));
    }
    Ok(fd)
}

/// A function for the reason why a secondary still waits, and the period of its calls.
pub(crate) type WaitReport = (Duration, fn(&Error));

/// Finds the primary and exchanges eventfds with it. `report` is called with the reason for waiting, again and again after its time.
pub(crate) fn meet(
    path: &Path,
    ours: &OwnedFd,
    patience: Option<Duration>,
    report: Option<WaitReport>,
) -> Result<ExchangePeer> {
    let start = Instant::now();
    let mut reported = start;
    loop {
        let left = patience.map_or(EXCHANGE_LIMIT, |patience| patience.saturating_sub(start.elapsed()));
        let met = socket::connect_stream(path, left.clamp(LIMIT_MIN, EXCHANGE_LIMIT))
            .and_then(|connection| ConnectingPeer::of(connection).exchange(ours));
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
        if !again || patience.is_some_and(|patience| start.elapsed() >= patience) {
            return Err(not_met(path, error));
        }
        if let Some((every, report)) = report
            && reported.elapsed() >= every
        {
            reported = Instant::now();
            report(&not_met(path, error));
        }
        std::thread::sleep(AGAIN);
    }
}

fn not_met(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            Error::NoPrimary { path: path.to_owned() }
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            let why = "the primary refuses, because it has another living secondary; end that process first";
            Error::system(format!("connect to {}: {why}", path.display()), error)
        }
        io::ErrorKind::WouldBlock => {
            let why = "the primary accepts and does not answer (it has another living secondary, or it is stopped): end that \
                       secondary, or start the primary anew";
            Error::system(format!("connect to {}: {why}", path.display()), error)
        }
        _ => Error::system(format!("exchange eventfds at {}", path.display()), error),
    }
}

#[cfg(test)]
mod tests {
    use shmesh_testing::own_process;

    use super::*;

    fn peer() -> (ExchangePeer, OwnedFd) {
        let (peer, _other, eventfd) = connected();
        (peer, eventfd)
    }

    fn connected() -> (ExchangePeer, OwnedFd, OwnedFd) {
        let (connection, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let (connection, eventfd) = (OwnedFd::from(connection), eventfd::blocking().unwrap());
        let ours = eventfd.try_clone().unwrap();
        (ExchangePeer::new(PeerProcess::of(&connection), connection, ours), other.into(), eventfd)
    }

    #[test]
    fn goodbye_byte_differs_from_hang_up() {
        // In a process of its own: a child that another test starts has copies of all descriptors for a moment.
        own_process(|| {
            let (peer, other, _eventfd) = connected();
            assert!(!peer.has_left() && peer.connection().is_some());
            socket::send(&other, &[GOODBYE], &[]).unwrap();
            assert!(peer.has_left());
            // NVIPC does so at once.
            drop(other);
            assert!(!peer.has_left() && peer.connection().is_none());
            peer.say_goodbye();
            let (peer, other, _eventfd) = connected();
            socket::send(&other, &[0], &[]).unwrap();
            assert!(!peer.has_left() && peer.connection().is_none(), "it is not a goodbye of this library");
        });
    }

    fn fill(eventfd: &OwnedFd) {
        nix::unistd::write(eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }

    #[test]
    fn processes_in_other_pid_namespaces_are_distinguished() {
        let (connection, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let connection = connection.into();
        let process = |pid| PeerProcess { pid, ..PeerProcess::of(&connection) };
        if process(0).pidfd.as_ref().is_none_or(|pidfd| pidfd.inode() == 0) {
            eprintln!("skipped: this kernel has no inode of a process");
            return;
        }
        assert!(process(0).is(&process(0)));
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let other = PeerProcess { pidfd: Pidfd::of_number(child.id().cast_signed()).ok(), pid: 0 };
        assert!(!process(0).is(&other) && other.is(&other));
        let unknown = |pid| PeerProcess { pidfd: None, pid };
        assert!(!unknown(0).is(&unknown(0)) && unknown(7).is(&unknown(7)) && !unknown(7).is(&unknown(8)));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn full_counter_blocks_no_caller() {
        let (peer, theirs) = peer();
        peer.post().unwrap();
        assert!(eventfd::take(&theirs).unwrap());
        fill(&theirs);
        peer.post().unwrap();
        assert!(!peer.has_blocked_writer());
        peer.free_posting();
    }

    #[test]
    fn blocked_writers_are_released() {
        let (peer, theirs) = peer();
        fill(&theirs);
        std::thread::scope(|scope| {
            // As if each thread had found the counter not full.
            let waiters = [(); 3].map(|()| {
                scope.spawn(|| {
                    peer.posting.fetch_add(1, SeqCst);
                    eventfd::post(&peer.eventfd).unwrap();
                    peer.posting.fetch_sub(1, SeqCst);
                })
            });
            while !waiters.iter().all(|waiter| waiter.is_finished()) {
                if peer.has_blocked_writer() {
                    peer.free_posting();
                }
                std::thread::yield_now();
            }
        });
        peer.post().unwrap();
    }
}
