//! The holder: the process that keeps a link's descriptors and hands them to newcomers.
//!
//! Eventfds and memfds have no names, so somebody who has them must give them to whoever comes. Every process on a link is
//! ready to: the one that has the lock `<link>.lock` listens on `<link>.broker`, the others keep a connection to it. When it
//! ends, however it ends, the kernel frees the lock and closes the connections, and one of the others takes its place with
//! the descriptors that it has. So they live as long as any process of the link does, and either side may restart.
//!
//! A connection that closes also says that a process has gone: the holder then takes back what it held.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Shared;
use crate::config::{Backing, PoolId};
use crate::error::{Error, ErrorKind, Result};
use crate::participant::Side;
use crate::segment::header::LAYOUT_VERSION;
use crate::segment::store::Store;
use crate::sys::eventfd::Doorbell;
use crate::sys::file::Lock;
use crate::sys::process::{Liveness, ProcessIdentity};
use crate::sys::socket;

/// Connections at the same time: one per process of the link, and as many strangers.
const SESSIONS_MAX: usize = 128;
/// How long the other end of a connection may take to say what it has to.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// How often to look for the dead after a connection closed: a process closes its connections before it is gone, and a
/// large one takes long to go. Each time twice as long after the last, from one millisecond.
const REAP_ROUNDS: u32 = 12;
const STACK_BYTES: usize = 128 * 1024;

const HELLO: [u8; 8] = *b"SHMESH?\0";
const OFFER: [u8; 8] = *b"SHMESH!\0";
const PACKET_BYTES: usize = 16;

/// What the holder gives to a newcomer.
#[derive(Debug, Default)]
pub(crate) struct Offer {
    /// One per ring, unless the link has no notification.
    pub(crate) doorbells: Option<[Doorbell; 2]>,
    /// The link's own segment and its pools, unless they have names.
    pub(crate) segments: Vec<File>,
}

/// This process's readiness to be the holder, in a thread of its own.
#[derive(Debug)]
pub(crate) struct Holder {
    me: ProcessIdentity,
    stop: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
    /// Without a thread: a named link without notification has nothing to hand out.
    idle: Option<Arc<Shared>>,
}

fn socket_path(store: &Store) -> PathBuf {
    store.dir.join(format!("{}.broker", store.link))
}

fn lock_path(store: &Store) -> PathBuf {
    store.dir.join(format!("{}.lock", store.link))
}

/// `| magic 8 | version 2 | doorbells 1 | segments 1 | 0 4 |`
fn packet(magic: [u8; 8], doorbells: bool, segments: u8) -> [u8; PACKET_BYTES] {
    let mut bytes = [0; PACKET_BYTES];
    bytes[..8].copy_from_slice(&magic);
    bytes[8..10].copy_from_slice(&LAYOUT_VERSION.to_le_bytes());
    bytes[10] = u8::from(doorbells);
    bytes[11] = segments;
    bytes
}

impl Holder {
    /// Asks the holder of a link. `None`: there is none just now. The connection stays open as a sign of life.
    pub(crate) fn ask(store: &Store) -> Result<Option<(Offer, OwnedFd)>> {
        let path = socket_path(store);
        let holder =
            |what| Error::from(ErrorKind::Holder { link: Arc::clone(&store.link), path: path.clone(), what });
        let connection = match socket::connect_to(&path) {
            Ok(connection) => connection,
            Err(error) => {
                return match error.raw_os_error() {
                    // Nobody listens (any more).
                    Some(libc::ENOENT | libc::ECONNREFUSED | libc::EAGAIN) => Ok(None),
                    Some(libc::ENAMETOOLONG) => {
                        Err(holder("has a path too long for a socket; use a shorter directory"))
                    }
                    _ => Err(store.refused(&path.display().to_string(), error)),
                };
            }
        };
        let asked = socket::limit_wait(&connection, ANSWER_LIMIT)
            .and_then(|()| socket::send(&connection, &packet(HELLO, false, 0), &[]))
            .and_then(|()| socket::receive(&connection));
        let (bytes, fds) = match asked {
            Ok((bytes, _)) if bytes.is_empty() => return Ok(None),
            Ok(answer) => answer,
            // It ends just now; somebody else will take its place.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPIPE | libc::ECONNRESET)) => {
                return Ok(None);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(holder("does not answer: its process is stopped or stuck"));
            }
            Err(error) => return Err(store.refused(&path.display().to_string(), error)),
        };
        let [b'S', b'H', b'M', b'E', b'S', b'H', b'!', 0, low, high, doorbells, segments, ..] = bytes[..]
        else {
            return Err(holder("is not a shmesh holder"));
        };
        let version = u16::from_le_bytes([low, high]);
        if version != LAYOUT_VERSION {
            return Err(Error::from(ErrorKind::Version {
                link: Arc::clone(&store.link),
                what: path.display().to_string(),
                found: version,
                ours: LAYOUT_VERSION,
            }));
        }
        if fds.len() != usize::from(doorbells != 0) * 2 + usize::from(segments) {
            return Err(holder("sent other descriptors than it announced"));
        }
        let mut fds = fds.into_iter();
        let mut bell = || fds.next().map(Doorbell::from_fd);
        let doorbells = if doorbells == 0 { None } else { bell().zip(bell()).map(|(a, b)| [a, b]) };
        Ok(Some((Offer { doorbells, segments: fds.map(File::from).collect() }, connection)))
    }

    /// The right to be the holder, and to create or remove the link. `None`: somebody has it.
    pub(crate) fn try_lock(store: &Store) -> Result<Option<Lock>> {
        let path = lock_path(store);
        Lock::try_take(&path, store.file_mode)
            .map_err(|error| store.refused(&path.display().to_string(), error))
    }

    /// The error of a link whose holder cannot be reached.
    pub(super) fn missing(store: &Store) -> Error {
        let what = "cannot be reached: its process is stopped or stuck; end it, or let it go on";
        ErrorKind::Holder { link: Arc::clone(&store.link), path: socket_path(store), what }.into()
    }

    /// Starts serving, which takes the lock, or keeping the connection to who serves.
    pub(super) fn start(
        shared: &Arc<Shared>,
        lock: &mut Option<Lock>,
        connection: Option<OwnedFd>,
    ) -> Result<Self> {
        let link = &shared.store.link;
        let failed = |doing: &str, error| Error::system(link, doing, error);
        let stop = Arc::new(Doorbell::new().map_err(|error| failed("make an eventfd", error))?);
        if shared.doorbells.is_none() && shared.store.backing == Backing::Named {
            return Ok(Self { me: shared.me, stop, thread: None, idle: Some(Arc::clone(shared)) });
        }
        // Listening before the caller goes on: who is told of the link must be able to attach.
        let state = match (lock.take(), connection) {
            (Some(lock), _) => Duty::Serve(
                Service::begin(shared, lock)
                    .map_err(|error| failed("listen for other participants", error))?,
            ),
            (None, Some(connection)) => Duty::Follow(connection),
            (None, None) => Duty::Elect,
        };
        let me = shared.me;
        let (shared, stopped) = (Arc::clone(shared), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("shmesh-holder".into())
            .stack_size(STACK_BYTES)
            .spawn(move || run(&shared, &stopped, state))
            .map_err(|error| failed("start a thread", error))?;
        Ok(Self { me, stop, thread: Some(thread), idle: None })
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if !self.me.is_me() {
            // In a forked child: the thread is the parent's, and so is the eventfd that stops it.
            std::mem::forget(self.thread.take());
            return;
        }
        let _ = self.stop.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(shared) = self.idle.take()
            && let Ok(Some(_lock)) = Self::try_lock(&shared.store)
        {
            remove_if_last(&shared);
        }
    }
}

/// What the thread does just now.
enum Duty {
    /// We are the holder.
    Serve(Service),
    /// Somebody else is; the connection says how long.
    Follow(OwnedFd),
    /// Nobody is that we know of.
    Elect,
}

fn run(shared: &Arc<Shared>, stop: &Doorbell, mut duty: Duty) {
    loop {
        duty = match duty {
            Duty::Serve(service) => return service.run(shared, stop),
            Duty::Follow(connection) => match wait_any(stop, &[connection.as_fd()], None) {
                Woken::Stop => return,
                _ => Duty::Elect,
            },
            Duty::Elect => match elect(shared) {
                Some(duty) => duty,
                None if matches!(wait_any(stop, &[], Some(Duration::from_millis(2))), Woken::Stop) => return,
                None => Duty::Elect,
            },
        };
    }
}

fn elect(shared: &Arc<Shared>) -> Option<Duty> {
    if let Ok(Some((_, connection))) = Holder::ask(&shared.store) {
        return Some(Duty::Follow(connection));
    }
    let lock = Holder::try_lock(&shared.store).ok()??;
    let mut service = Service::begin(shared, lock).ok()?;
    // The last holder has gone, and perhaps more with it.
    service.reap = Some(0);
    Some(Duty::Serve(service))
}

enum Woken {
    Stop,
    Ready(Vec<usize>),
}

fn wait_any(stop: &Doorbell, others: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Woken {
    let mut fds: Vec<_> = std::iter::once(stop.as_fd())
        .chain(others.iter().copied())
        .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
        .collect();
    let timeout = timeout.map_or(PollTimeout::NONE, |t| PollTimeout::try_from(t).unwrap_or(PollTimeout::MAX));
    // An interrupted or refused poll finds nothing, and the caller comes again.
    let _ = poll(&mut fds, timeout);
    let ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
    if ready(&fds[0]) {
        return Woken::Stop;
    }
    Woken::Ready(fds[1..].iter().enumerate().filter(|(_, fd)| ready(fd)).map(|(i, _)| i).collect())
}

/// Being the holder.
struct Service {
    listener: OwnedFd,
    sessions: Vec<OwnedFd>,
    /// How often we have looked for the dead since a connection closed.
    reap: Option<u32>,
    path: PathBuf,
    _lock: Lock,
}

impl Service {
    fn begin(shared: &Shared, lock: Lock) -> io::Result<Self> {
        let path = socket_path(&shared.store);
        // We have the lock, so a socket that is there belongs to a holder that died.
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = socket::listen_on(&path, shared.store.file_mode)?;
        Ok(Self { listener, sessions: Vec::new(), reap: None, path, _lock: lock })
    }

    fn run(mut self, shared: &Arc<Shared>, stop: &Doorbell) {
        loop {
            let fds: Vec<_> =
                std::iter::once(self.listener.as_fd()).chain(self.sessions.iter().map(AsFd::as_fd)).collect();
            let timeout = self.reap.map(|round| Duration::from_millis(1 << round));
            let ready = match wait_any(stop, &fds, timeout) {
                Woken::Stop => break,
                Woken::Ready(ready) => ready,
            };
            if let Some(round) = self.reap {
                reap(shared);
                self.reap = (round + 1 < REAP_ROUNDS).then_some(round + 1);
            }
            // From the back, so that removing one moves none that is still to be looked at.
            for i in ready.into_iter().rev() {
                match i.checked_sub(1) {
                    None => self.admit(),
                    Some(session) => {
                        if answer(shared, &self.sessions[session]).is_none() {
                            self.sessions.swap_remove(session);
                            self.reap = Some(0);
                        }
                    }
                }
            }
        }
        let _ = std::fs::remove_file(&self.path);
        // Who has a connection is on the link, or about to be: it has had our answer.
        self.sessions.retain(|session| !socket::is_closed(session));
        if self.sessions.is_empty() {
            remove_if_last(shared);
        }
    }

    fn admit(&mut self) {
        let Ok(connection) = socket::accept(&self.listener) else { return };
        // Who comes when all places are taken finds the connection closed, and tries again.
        if self.sessions.len() < SESSIONS_MAX && socket::limit_wait(&connection, ANSWER_LIMIT).is_ok() {
            self.sessions.push(connection);
        }
    }
}

/// Answers one packet of a newcomer. `None`: it has gone, or speaks something else.
fn answer(shared: &Shared, session: &OwnedFd) -> Option<()> {
    let (bytes, _) = socket::receive(session).ok()?;
    if !bytes.starts_with(&HELLO) {
        return None;
    }
    let bells = shared.doorbells.iter().flatten().map(AsFd::as_fd);
    let segments: &[_] = if shared.store.backing == Backing::Memfd { &shared.segments } else { &[] };
    let fds: Vec<_> = bells.chain(segments.iter().map(|segment| segment.file.as_fd())).collect();
    let count = u8::try_from(segments.len()).ok()?;
    socket::send(session, &packet(OFFER, shared.doorbells.is_some(), count), &fds).ok()
}

/// Takes back what dead participants held, from a seat of its own: a seat's lists are its handle's alone.
fn reap(shared: &Shared) {
    let seats = &shared.core.seats;
    let dead: Vec<_> = seats.all().filter(|other| other.liveness(&shared.me) == Liveness::Dead).collect();
    if dead.is_empty() {
        return;
    }
    // With every seat taken, whoever attaches next has to recover anyway.
    let Some(me) = seats.attach(&shared.me, Side::Primary) else { return };
    for other in dead {
        shared.core.reclaim(&other, me.seat, false);
    }
    seats.vacate(&me);
}

/// Removes the files of a named link when its last participant leaves in peace and nothing waits in it. Only with the lock.
fn remove_if_last(shared: &Shared) {
    let others = shared.core.seats.all().any(|other| other.liveness(&shared.me) != Liveness::Dead);
    let waiting = shared.core.rings().iter().any(|ring| ring.has_message());
    if shared.store.backing == Backing::Named && (others || waiting) {
        return;
    }
    if shared.store.backing == Backing::Named {
        // The link's own segment first: without it there is no link.
        for pool in std::iter::once(None).chain(PoolId::ALL.map(Some)) {
            let _ = std::fs::remove_file(shared.store.path(pool));
        }
    }
    let _ = std::fs::remove_file(lock_path(&shared.store));
}
