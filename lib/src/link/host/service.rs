//! A participant that is the host: it accepts newcomers and answers requests. The monitor does this, so nothing here waits.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use shmesh_proto::broker::{self, Code, Reply, Request, reply, request};
use shmesh_proto::limits::VERSION;
use shmesh_proto::packet;
use shmesh_sys::fork::NotInherited;
use shmesh_sys::{errno, socket};

use super::{HostListener, SESSIONS_MAX, discard, hang_up, memories, offer};
use crate::link::{Shared, device};

/// How long no newcomer is accepted after this process ran out of descriptors.
const FULL_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of newcomers, and of packets of one connection, that are handled before others.
const TURNS_MAX: usize = 16;

/// A connection. A forked child does not keep it open.
struct ServedConnection {
    connection: NotInherited,
    uid: u32,
}

/// The host service of one link.
pub(in crate::link) struct HostService {
    listener: NotInherited,
    sessions: Vec<ServedConnection>,
    /// The last newcomer could not be accepted, for lack of descriptors or memory.
    full_until: Option<Instant>,
}

impl HostService {
    pub(in crate::link) fn new(listening: HostListener) -> Self {
        let listener = NotInherited::new(listening.listener.into());
        Self { listener, sessions: Vec::new(), full_until: None }
    }

    /// The descriptors to poll.
    pub(in crate::link) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        // The listener stays readable as long as a newcomer waits: without a pause this would be a busy loop.
        let listener = self.full_until.is_none().then(|| self.listener.as_fd());
        listener.into_iter().chain(self.sessions.iter().map(|session| session.connection.as_fd()))
    }

    /// The limit for the poll.
    pub(in crate::link) fn pause(&self) -> Option<Duration> {
        self.full_until.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Handles what is ready. Returns `true` if a connection was closed by its peer.
    pub(in crate::link) fn look(&mut self, shared: &Shared) -> bool {
        if self.full_until.is_none_or(|at| at <= Instant::now()) {
            self.full_until = None;
            self.admit();
        }
        let (mut has_ended, mut i) = (false, 0);
        while i < self.sessions.len() {
            match self.serve(shared, i) {
                Some(()) => i += 1,
                None => {
                    drop(self.sessions.remove(i));
                    has_ended = true;
                }
            }
        }
        has_ended
    }

    fn admit(&mut self) {
        for _ in 0..TURNS_MAX {
            let connection = match socket::accept_nonblocking(&self.listener) {
                Ok(connection) => connection,
                Err(error) => {
                    self.full_until = errno::is_exhausted(&error).then(|| Instant::now() + FULL_PAUSE);
                    return;
                }
            };
            let Ok(peer) = socket::peer(&connection) else { continue };
            if self.sessions.len() >= SESSIONS_MAX {
                self.make_room();
            }
            self.sessions
                .push(ServedConnection { connection: NotInherited::new(connection.into()), uid: peer.uid });
        }
    }

    /// Closes the oldest session of the user with the most sessions. An honest client connects again.
    fn make_room(&mut self) {
        let count = |uid| self.sessions.iter().filter(|session| session.uid == uid).count();
        // Of equal users, the one with the oldest session.
        let most = self.sessions.iter().map(|session| count(session.uid)).max().unwrap_or(0);
        if let Some(oldest) = self.sessions.iter().position(|session| count(session.uid) == most) {
            drop(self.sessions.remove(oldest));
        }
    }

    /// Serves one connection. Returns `None` if the peer has gone, does not read, or breaks the protocol.
    fn serve(&mut self, shared: &Shared, i: usize) -> Option<()> {
        for _ in 0..TURNS_MAX {
            let packet = match socket::receive_now(&self.sessions[i].connection) {
                Ok(packet) => packet,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Some(()),
                Err(_) => return None,
            };
            let Ok(request) = packet::decode::<Request>(&packet.bytes) else {
                discard(packet.fds);
                return None;
            };
            if packet.bytes.is_empty() || packet.bytes_cut {
                discard(packet.fds);
                return None;
            }
            let id = request.id;
            if let Some(told) = self.answer(shared, i, request, packet.fds)? {
                for other in (0..self.sessions.len()).filter(|other| *other != i) {
                    // A peer that has gone need not be notified.
                    let _ = tell(&self.sessions[other], 0, &told);
                }
                // The offering process is answered last: it may end as soon as it has the answer.
                tell(&self.sessions[i], id, &told).ok()?;
            }
        }
        Some(())
    }

    /// Answers one packet. Returns `Some(Some)` if it brought device memory that all sessions must be notified of.
    fn answer(
        &self,
        shared: &Shared,
        i: usize,
        request: Request,
        fds: Vec<OwnedFd>,
    ) -> Option<Option<device::PoolMemoryUpdate>> {
        let (session, link, id) = (&self.sessions[i], &shared.store.link, request.id);
        let send = |reply: Reply, fds: &[BorrowedFd<'_>]| {
            socket::send_now(&session.connection, &packet::encode(&reply), fds).ok().map(|()| None)
        };
        let refuse = |code, text: String| send(Reply::refused(id, code, text), &[]);
        let fds = if matches!(&request.op, Some(request::Op::PoolMemory(_))) {
            memories(fds)?
        } else {
            discard(fds);
            Vec::new()
        };
        if request.version != VERSION {
            let text = format!("link {link}: this host speaks version {VERSION} of the protocol");
            return refuse(Code::Version, text);
        }
        match request.op? {
            request::Op::Attach(_) => {
                let (attached, fds) = offer(shared);
                send(Reply::new(id, reply::Result::Attached(attached)), &fds)
            }
            request::Op::Hello(_) => {
                send(Reply::new(id, reply::Result::Welcome(broker::Welcome { identity: None })), &[])
            }
            // Seats only matter to a sidecar, which can detect more deaths than this process.
            request::Op::Seated(_) => Some(None),
            request::Op::PoolMemory(told) => match shared.lend(&told, fds) {
                Ok(answer) if answer.is_news => Some(Some(answer)),
                Ok(answer) if answer.memory.is_none() && shared.is_gathering() => refuse(
                    Code::Draining,
                    format!("link {link}: a process may still offer the memory of this pool; retry"),
                ),
                Ok(answer) => tell(session, id, &answer).ok().map(|()| None),
                Err(text) => refuse(Code::Invalid, text),
            },
            request::Op::Offer(_) => refuse(Code::Denied, format!("link {link}: this host has its memory")),
            _ => refuse(
                Code::Unsupported,
                format!("link {link}: a process of the link serves it, and keeps no keys; run a sidecar"),
            ),
        }
    }
}

impl Drop for ServedConnection {
    fn drop(&mut self) {
        // The queue may have descriptors from another process.
        if let Ok(copy) = self.connection.as_fd().try_clone_to_owned() {
            hang_up(copy);
        }
    }
}

/// Sends what device memory a pool has: an answer, or an announcement with id 0.
fn tell(session: &ServedConnection, id: u64, told: &device::PoolMemoryUpdate) -> io::Result<()> {
    let packet = packet::encode(&Reply::new(id, reply::Result::PoolMemory(told.message())));
    socket::send_now(&session.connection, &packet, &told.fds())
}
