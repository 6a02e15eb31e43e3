//! A participant that is the host: letting newcomers in, and answering them. The monitor does it, so nothing here waits.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use shmesh_proto::broker::{self, Code, Reply, Request, reply, request};
use shmesh_proto::limits::VERSION;
use shmesh_proto::packet;
use shmesh_sys::fork::NotInherited;
use shmesh_sys::{errno, socket};

use super::{Listening, SESSIONS_MAX, discard, hang_up, memories, offer};
use crate::link::{Shared, device};

/// How long nobody is let in after this process ran out of descriptors.
const FULL_PAUSE: Duration = Duration::from_millis(100);
/// Newcomers, and packets of one connection, before others have their turn.
const TURNS_MAX: usize = 16;

/// A connection. A forked child does not keep it open.
struct Session {
    connection: NotInherited,
    uid: u32,
}

/// A link that this process serves.
pub(in crate::link) struct Service {
    listener: NotInherited,
    sessions: Vec<Session>,
    /// The last newcomer could not be let in, for want of descriptors or memory.
    full_until: Option<Instant>,
}

impl Service {
    pub(in crate::link) fn new(listening: Listening) -> Self {
        let listener = NotInherited::new(listening.listener.into());
        Self { listener, sessions: Vec::new(), full_until: None }
    }

    /// What it waits for.
    pub(in crate::link) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        // The listener stays readable as long as somebody waits there: without a pause this would be a busy loop.
        let listener = self.full_until.is_none().then(|| self.listener.as_fd());
        listener.into_iter().chain(self.sessions.iter().map(|session| session.connection.as_fd()))
    }

    /// How long it waits at most.
    pub(in crate::link) fn pause(&self) -> Option<Duration> {
        self.full_until.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Does what there is to do. `true`: somebody has gone.
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
            self.sessions.push(Session { connection: NotInherited::new(connection.into()), uid: peer.uid });
        }
    }

    /// Ends the oldest session of the user that has the most: it connects again, if it means well.
    fn make_room(&mut self) {
        let count = |uid| self.sessions.iter().filter(|session| session.uid == uid).count();
        // The first of equals is the oldest.
        let most = self.sessions.iter().map(|session| count(session.uid)).max().unwrap_or(0);
        if let Some(oldest) = self.sessions.iter().position(|session| count(session.uid) == most) {
            drop(self.sessions.remove(oldest));
        }
    }

    /// `None`: it has gone, does not read, or speaks something else.
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
                    // Who has gone need not be told.
                    let _ = tell(&self.sessions[other], 0, &told);
                }
                // Who has brought it comes last: it may end as soon as it knows.
                tell(&self.sessions[i], id, &told).ok()?;
            }
        }
        Some(())
    }

    /// Answers one packet. `Some(Some)`: it has brought device memory, of which everybody is to hear.
    fn answer(
        &self,
        shared: &Shared,
        i: usize,
        request: Request,
        fds: Vec<OwnedFd>,
    ) -> Option<Option<device::Answer>> {
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
            // Whose seat is whose matters to who can see deaths better than we do.
            request::Op::Seated(_) => Some(None),
            request::Op::PoolMemory(told) => match shared.lend(&told, fds) {
                Ok(answer) if answer.is_news => Some(Some(answer)),
                Ok(answer) if answer.memory.is_none() && shared.is_gathering() => {
                    refuse(Code::Draining, format!("link {link}: somebody may still offer it; ask again"))
                }
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

impl Drop for Session {
    fn drop(&mut self) {
        // What waits in it is a stranger's.
        if let Ok(copy) = self.connection.as_fd().try_clone_to_owned() {
            hang_up(copy);
        }
    }
}

/// What device memory a pool has. With id 0, to who has not asked.
fn tell(session: &Session, id: u64, told: &device::Answer) -> io::Result<()> {
    let packet = packet::encode(&Reply::new(id, reply::Result::PoolMemory(told.message())));
    socket::send_now(&session.connection, &packet, &told.fds())
}
