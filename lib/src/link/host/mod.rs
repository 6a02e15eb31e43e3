//! The host: the one process that hands out what has no name.
//!
//! A link whose memory has names needs none: it is its files. Memfds and device memory have no names, so one process gives them to
//! whoever comes: the sidecar ([`LinkHost`]), or the process that created the link while there was none. Participants never take
//! its place. When it has died, what they hold bridges the time: their monitors connect to the next host, a sidecar or a process
//! that creates the link again, and offer it what they have.
//!
//! A lock on `<link>.lock` says who is the host and where it listens. A host that finds the presence of others waits for their
//! offer, because with memory of its own there would be two links of one name.

mod gather;
mod link_host;
mod service;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use shmesh_proto::broker::{self, Code, Reply, Request, reply, request};
use shmesh_proto::packet;
use shmesh_sys::file::{may_be_memory, set_nonblocking};
use shmesh_sys::{errno, socket, user};

use super::Shared;
use crate::config::Backing;
use crate::error::{Error, ErrorKind, Result};
use crate::segment::header::LAYOUT_VERSION;
use crate::segment::lock::{Host, Lock};
use crate::segment::store::Store;
pub(super) use gather::{Gathered, gather};
pub use link_host::{LinkHost, LinkHostOffer};
pub(super) use service::Service;

/// Connections at the same time: one per process of the link, and as many strangers.
const SESSIONS_MAX: usize = 128;
/// How long the other end of a connection may take to say what it has to.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// Threads at the same time that close what strangers have sent. Beyond that it stays open: nothing else would be bounded.
const CLOSERS_MAX: usize = 8;

/// The id of the one question that a newcomer asks.
pub(super) const ASKED: u64 = 1;
/// The id of what a session tells of device memory.
pub(super) const TOLD: u64 = 2;

/// It may be about to serve: a sidecar makes all its links before it does.
pub(super) const SILENT: &str = "does not answer: its process is stopped or stuck";
/// It has died, or has no memory yet.
pub(super) const WANTING: &str =
    "has not got the link's memory yet: the processes that have it are stopped or stuck";
pub(super) const NO_HOST: &str = "is not there, and processes are still on the link: start its sidecar, or have a process create it \
                                  again";
pub(super) const OTHER_SIDECAR: &str = "is another sidecar; end that first";
const STRANGER: &str = "is not a shmesh host; end that program, or use another link name";

/// What the host gives to a newcomer.
#[derive(Debug, Default)]
pub(crate) struct Offer {
    /// The link's own segment and its pools, unless they have names.
    pub(crate) segments: Vec<File>,
}

/// What the host of a link says to who asks for it.
pub(crate) enum Asked {
    /// The connection stays open as a sign of life.
    Given(Offer, OwnedFd, (Host, u64)),
    /// It has not got the memory yet.
    Wanted,
    /// There is none just now.
    Nobody,
}

/// What the names of all sockets of a link's hosts begin with. Each has a number that is its own for as long as it lives, so
/// what a dead process of another user has left is in nobody's way.
pub(crate) fn socket_prefix(link: &str) -> String {
    format!("{link}.broker-")
}

pub(super) fn socket_path(store: &Store, number: u64) -> PathBuf {
    store.dir.join(format!("{}{number:x}", socket_prefix(&store.link)))
}

/// Who is the host of a link, and the number of its socket.
fn host_of(store: &Store, lock: &Lock) -> Result<Option<(Host, u64)>> {
    lock.host().map_err(|error| Error::system(&store.link, "look at the lock file", error))
}

/// Where the host of a link listens, if there is one.
pub(crate) fn find(store: &Store, lock: &Lock) -> Result<Option<PathBuf>> {
    Ok(host_of(store, lock)?.map(|(_, number)| socket_path(store, number)))
}

pub(crate) fn lock_path(store: &Store) -> PathBuf {
    store.dir.join(format!("{}.lock", store.link))
}

/// What an old kernel's sidecar wants to hear before it says who we are.
pub(crate) fn proof(challenge: broker::Challenge) -> Vec<u8> {
    packet::encode(&Request::new(0, request::Op::Proof(broker::Proof { nonce: challenge.nonce })))
}

/// The next packet that is no event, and no memory that others have made: those are for sessions that stay.
pub(super) fn answer_of(connection: &OwnedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    loop {
        let (bytes, fds) = socket::receive(connection)?;
        match packet::decode(&bytes) {
            Ok(
                Reply { result: Some(reply::Result::Event(_)), .. }
                | Reply { id: 0, result: Some(reply::Result::PoolMemory(_)) },
            ) => {}
            Ok(Reply { result: Some(reply::Result::Challenge(challenge)), .. }) => {
                socket::send(connection, &proof(challenge), &[])?;
            }
            _ => return Ok((bytes, fds)),
        }
    }
}

/// Asks the host of a link for it.
pub(crate) fn ask(store: &Store, lock: &Lock) -> Result<Asked> {
    let Some(at) = host_of(store, lock)? else { return Ok(Asked::Nobody) };
    let path = socket_path(store, at.1);
    let host =
        |what| Error::from(ErrorKind::Host { link: Arc::clone(&store.link), path: path.clone(), what });
    let connection = match socket::connect_to(&path) {
        Ok(connection) => connection,
        Err(error) => {
            return match error.raw_os_error() {
                // Nobody listens (any more).
                Some(errno::ENOENT | errno::ECONNREFUSED | errno::EAGAIN) => Ok(Asked::Nobody),
                // A socket of another kind.
                Some(errno::EPROTOTYPE) => Err(host(STRANGER)),
                _ => Err(store.refused(&path.display().to_string(), error)),
            };
        }
    };
    let attach = Request::new(ASKED, request::Op::Attach(broker::Attach { side: 0 }));
    let asked = socket::limit_wait(&connection, ANSWER_LIMIT)
        .and_then(|()| socket::send(&connection, &packet::encode(&attach), &[]))
        .and_then(|()| answer_of(&connection));
    let (bytes, fds) = match asked {
        Ok((bytes, _)) if bytes.is_empty() => return Ok(Asked::Nobody),
        Ok(answer) => answer,
        // It ends just now.
        Err(error) if matches!(error.raw_os_error(), Some(errno::EPIPE | errno::ECONNRESET)) => {
            return Ok(Asked::Nobody);
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(host(SILENT));
        }
        // A packet longer than any of ours.
        Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(host(STRANGER)),
        Err(error) => return Err(store.refused(&path.display().to_string(), error)),
    };
    let attached = match packet::decode::<Reply>(&bytes) {
        Ok(Reply { id: ASKED, result: Some(reply::Result::Wanted(_)) }) => return Ok(Asked::Wanted),
        Ok(Reply { id: ASKED, result: Some(reply::Result::Attached(attached)) }) => attached,
        // Of id 0: the connection as a whole is refused.
        Ok(Reply { id: ASKED | 0, result: Some(reply::Result::Refused(refused)) }) => {
            return Err(match refused.code() {
                Code::Version => {
                    host("speaks another version of the protocol; run one version on both sides")
                }
                Code::Draining => return Ok(Asked::Nobody),
                _ => host("does not let this process in; its log says why"),
            });
        }
        _ => return Err(host(STRANGER)),
    };
    if attached.layout != u32::from(LAYOUT_VERSION) {
        return Err(Error::from(ErrorKind::Version {
            link: Arc::clone(&store.link),
            what: path.display().to_string(),
            found: u16::try_from(attached.layout).unwrap_or(u16::MAX),
            ours: LAYOUT_VERSION,
        }));
    }
    let fds = memories(fds).ok_or_else(|| host("sent what is no memory"))?;
    if u32::try_from(fds.len()) != Ok(attached.segments) {
        return Err(host("sent other descriptors than it announced"));
    }
    Ok(Asked::Given(Offer { segments: fds.into_iter().map(File::from).collect() }, connection, at))
}

/// The error of who cannot listen.
pub(super) fn deaf(store: &Store, error: io::Error) -> Error {
    if error.raw_os_error() == Some(errno::ENAMETOOLONG) {
        let what = "has a path too long for a socket; use a shorter directory";
        return refused(store, what).into();
    }
    Error::system(&store.link, "listen for participants", error)
}

/// The error of a link whose host does something that keeps others away.
pub(super) fn refused(store: &Store, what: &'static str) -> ErrorKind {
    ErrorKind::Host { link: Arc::clone(&store.link), path: lock_path(store), what }
}

/// Opens the lock file of a link; makes it for who creates one, or finds one without it. `None`: there is no link.
pub(super) fn lock_file(store: &Store, create: bool) -> Result<Option<Lock>> {
    let path = lock_path(store);
    let opened = Lock::open(&path).and_then(|opened| {
        if opened.is_some() {
            return Ok(opened);
        }
        // Who may lock it is who may use the link; whether that is one, and whole, is looked at later.
        let there = std::fs::symlink_metadata(store.path(None)).ok().map(|metadata| metadata.mode() & 0o660);
        match there {
            Some(mode) => Lock::open_or_make(&path, mode | store.file_mode),
            None if create => Lock::open_or_make(&path, store.file_mode),
            None => Ok(None),
        }
    });
    opened.map_err(|error| store.refused(&path.display().to_string(), error))
}

/// The right to create or remove the link. `None`: somebody has it, or uses the link.
pub(crate) fn try_lock(store: &Store) -> Result<Option<Lock>> {
    let failed = |error| store.refused(&lock_path(store).display().to_string(), error);
    let Some(lock) = lock_file(store, true)? else { return Ok(None) };
    let free = lock.try_take_duty().map_err(failed)?
        && lock.is_named()
        && lock.host().map_err(failed)?.is_none()
        && !lock.others_joined().map_err(failed)?;
    Ok(free.then_some(lock))
}

/// A socket at which a host listens.
#[derive(Debug)]
pub(super) struct Listening {
    pub(super) listener: OwnedFd,
    pub(super) place: Place,
}

/// Where a host listens.
#[derive(Clone, Debug)]
pub(super) struct Place {
    number: u64,
    path: PathBuf,
}

impl Place {
    /// Is the host no more, once: removes the socket's name, and leaves its number to others.
    pub(super) fn end(&self, lock: &Lock) {
        if lock.withdraw() {
            if lock.is_named() {
                let _ = std::fs::remove_file(&self.path);
            }
            lock.leave_socket(self.number);
        }
    }
}

/// Listens for newcomers, in this way, and becomes the host, in one last step. `None`: there is one of this kind.
pub(super) fn listen(
    store: &Store,
    lock: &Lock,
    host: Host,
    on: fn(&Path, u32) -> io::Result<OwnedFd>,
) -> Result<Option<Listening>> {
    let listening = bind(store, lock, on).map_err(|error| deaf(store, error))?;
    let failed = |error| Error::system(&store.link, "lock the lock file", error);
    if lock.try_publish(host, listening.place.number).map_err(failed)? {
        // Whoever watches the lock file sees that there is something new.
        drop(Lock::open(&lock_path(store)));
        return Ok(Some(listening));
    }
    let _ = std::fs::remove_file(&listening.place.path);
    lock.leave_socket(listening.place.number);
    Ok(None)
}

fn bind(store: &Store, lock: &Lock, on: fn(&Path, u32) -> io::Result<OwnedFd>) -> io::Result<Listening> {
    let mut from = 0;
    while let Some(number) = lock.take_socket(user::effective(), from)? {
        let path = socket_path(store, number);
        // The number is ours, so a socket that is there is a dead process's.
        if std::fs::symlink_metadata(&path).is_ok_and(|there| there.file_type().is_socket()) {
            let _ = std::fs::remove_file(&path);
        }
        match on(&path, store.file_mode).and_then(|listener| set_nonblocking(&listener).map(|()| listener)) {
            Ok(listener) => return Ok(Listening { listener, place: Place { number, path } }),
            Err(error) => {
                lock.leave_socket(number);
                // Another's, who may not be removed.
                if error.kind() != io::ErrorKind::AddrInUse {
                    return Err(error);
                }
            }
        }
        from = (number & 0xff) + 1;
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// What a newcomer gets: the segments that have no names.
pub(super) fn offer(shared: &Shared) -> (broker::Attached, Vec<BorrowedFd<'_>>) {
    let segments: &[_] = if shared.store.backing == Backing::Memfd { &shared.segments } else { &[] };
    let attached = broker::Attached {
        layout: LAYOUT_VERSION.into(),
        segments: u32::try_from(segments.len()).unwrap_or(u32::MAX),
    };
    (attached, segments.iter().filter_map(|segment| segment.file.as_ref().map(AsFd::as_fd)).collect())
}

/// The descriptors, if all of them can be memory. Otherwise they are closed: the connection they came by is a stranger's.
pub(super) fn memories(fds: Vec<OwnedFd>) -> Option<Vec<OwnedFd>> {
    if fds.iter().all(may_be_memory) {
        return Some(fds);
    }
    discard(fds);
    None
}

/// Closes descriptors that others have sent. What is no memory may take as long as its sender likes: that is done elsewhere.
pub(super) fn discard(fds: Vec<OwnedFd>) {
    let strange: Vec<_> = fds.into_iter().filter(|fd| !may_be_memory(fd)).collect();
    if !strange.is_empty() {
        drop_elsewhere(strange);
    }
}

/// Ends a connection, in whose queue there may be what others have sent.
pub(super) fn hang_up(connection: OwnedFd) {
    if let Some(unread) = socket::hang_up(connection) {
        drop_elsewhere(unread);
    }
}

fn drop_elsewhere<T: Send + 'static>(what: T) {
    static CLOSERS: AtomicUsize = AtomicUsize::new(0);
    let what = std::mem::ManuallyDrop::new(what);
    if CLOSERS.fetch_add(1, Ordering::Relaxed) < CLOSERS_MAX {
        let _blocked = shmesh_sys::signal::Blocked::all();
        let builder = std::thread::Builder::new().name("shmesh-close".into()).stack_size(64 * 1024);
        let spawned = builder.spawn(move || {
            drop(std::mem::ManuallyDrop::into_inner(what));
            CLOSERS.fetch_sub(1, Ordering::Relaxed);
        });
        if spawned.is_ok() {
            return;
        }
    }
    CLOSERS.fetch_sub(1, Ordering::Relaxed);
}
