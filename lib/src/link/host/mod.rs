//! The host: the one process that hands out memory without names.
//!
//! A link whose memory has names needs no host: it consists of its files. Memfds and device memory have no names, so one
//! process gives them to newcomers: the sidecar ([`LinkHost`]), or, without one, the process that created the link.
//! Participants never take over as host. After its death, they keep the memory: their monitors connect to the next host,
//! which is a sidecar or a process that creates the link again, and offer it the memory.
//!
//! A lock on `<link>.lock` shows which process is the host and where it listens. A host that finds other processes present
//! waits for their offer, because new memory would make a second link with the same name.

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
use crate::segment::lock::{Host, Lock, inode_of};
use crate::segment::store::Store;
pub(super) use gather::{GatherOutcome, gather};
pub use link_host::{LinkHost, LinkHostOffer};
pub(super) use service::HostService;

/// Maximum number of connections: one per process of the link, and as many others.
const SESSIONS_MAX: usize = 128;
/// How long a peer may take to send its packet.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// Maximum number of threads that close descriptors from other processes. Further descriptors stay open, as nothing else
/// would be bounded.
const CLOSERS_MAX: usize = 8;

/// The id of a newcomer's only request.
pub(super) const ASKED: u64 = 1;
/// The id of announcements of device memory in a session.
pub(super) const TOLD: u64 = 2;

/// It may be about to serve: a sidecar creates all its links before it answers.
pub(super) const SILENT: &str = "does not answer: its process is stopped or stuck";
/// The previous host has died, or the new one has no memory yet.
pub(super) const WANTING: &str =
    "has not got the link's memory yet: the processes that have it are stopped or stuck";
pub(super) const NO_HOST: &str = "does not run, and processes are still attached to the link: start its sidecar, or let a process \
                                  create the link again";
pub(super) const OTHER_SIDECAR: &str = "is another sidecar; end that first";
const STRANGER: &str = "is not a shmesh host; end that program, or use another link name";

/// The memory that the host hands to a newcomer.
#[derive(Debug, Default)]
pub(crate) struct HandedMemory {
    /// The link's own segment and its pools, unless they have names.
    pub(crate) segments: Vec<File>,
}

/// The host's answer to a newcomer.
pub(crate) enum HostAnswer {
    /// The connection stays open as a sign of life.
    Offer(HandedMemory, OwnedFd, (Host, u64)),
    /// The host does not have the memory yet.
    NeedsMemory,
    /// There is no host at the moment.
    NoHost,
}

/// The common prefix of the names of a link's host sockets. Each socket has a number that is unique while its process
/// lives, so a stale socket of another user does not block a new one.
pub(crate) fn socket_prefix(link: &str) -> String {
    format!("{link}.broker-")
}

pub(crate) fn socket_path(store: &Store, number: u64) -> PathBuf {
    store.dir.join(format!("{}{number:x}", socket_prefix(&store.link)))
}

/// The host of a link, and the number of its socket.
fn host_of(store: &Store, lock: &Lock) -> Result<Option<(Host, u64)>> {
    lock.host().map_err(|error| Error::system(&store.link, "look at the lock file", error))
}

/// The path at which the host of a link listens, if there is a host.
pub(crate) fn find(store: &Store, lock: &Lock) -> Result<Option<PathBuf>> {
    Ok(host_of(store, lock)?.map(|(_, number)| socket_path(store, number)))
}

pub(crate) fn lock_path(store: &Store) -> PathBuf {
    store.dir.join(format!("{}.lock", store.link))
}

/// The answer to the challenge by which a sidecar on an old kernel identifies this process.
pub(crate) fn proof(challenge: broker::Challenge) -> Vec<u8> {
    packet::encode(&Request::new(0, request::Op::Proof(broker::Proof { nonce: challenge.nonce })))
}

/// Receives the next packet that is neither an event nor an announcement of memory: those are for sessions that stay open.
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

/// Asks the host of a link for its memory.
pub(crate) fn ask(store: &Store, lock: &Lock) -> Result<HostAnswer> {
    let Some(at) = host_of(store, lock)? else { return Ok(HostAnswer::NoHost) };
    let path = socket_path(store, at.1);
    let host =
        |what| Error::from(ErrorKind::Host { link: Arc::clone(&store.link), path: path.clone(), what });
    let connection = match socket::connect_to(&path) {
        Ok(connection) => connection,
        Err(error) => {
            return match error.raw_os_error() {
                // No process listens (any more).
                Some(errno::ENOENT | errno::ECONNREFUSED | errno::EAGAIN) => Ok(HostAnswer::NoHost),
                // A socket of another type.
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
        Ok((bytes, _)) if bytes.is_empty() => return Ok(HostAnswer::NoHost),
        Ok(answer) => answer,
        // The host is just ending.
        Err(error) if matches!(error.raw_os_error(), Some(errno::EPIPE | errno::ECONNRESET)) => {
            return Ok(HostAnswer::NoHost);
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(host(SILENT));
        }
        // A packet that is longer than any of the protocol.
        Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(host(STRANGER)),
        Err(error) => return Err(store.refused(&path.display().to_string(), error)),
    };
    let attached = match packet::decode::<Reply>(&bytes) {
        Ok(Reply { id: ASKED, result: Some(reply::Result::Wanted(_)) }) => {
            return Ok(HostAnswer::NeedsMemory);
        }
        Ok(Reply { id: ASKED, result: Some(reply::Result::Attached(attached)) }) => attached,
        // Id 0: the connection as a whole is refused.
        Ok(Reply { id: ASKED | 0, result: Some(reply::Result::Refused(refused)) }) => {
            return Err(match refused.code() {
                Code::Version => {
                    host("speaks another version of the protocol; run one version on both sides")
                }
                Code::Draining => return Ok(HostAnswer::NoHost),
                _ => host("refuses this process; read the reason in the host's log"),
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
    let fds =
        memories(fds).ok_or_else(|| host("sent a descriptor that is neither a memfd nor device memory"))?;
    if u32::try_from(fds.len()) != Ok(attached.segments) {
        return Err(host("sent other descriptors than it announced"));
    }
    Ok(HostAnswer::Offer(
        HandedMemory { segments: fds.into_iter().map(File::from).collect() },
        connection,
        at,
    ))
}

/// The error if the socket cannot be created.
pub(super) fn deaf(store: &Store, error: io::Error) -> Error {
    if error.raw_os_error() == Some(errno::ENAMETOOLONG) {
        let what = "has a path too long for a socket; use a shorter directory";
        return refused(store, what).into();
    }
    Error::system(&store.link, "listen for participants", error)
}

/// The error if another process keeps this one from hosting or attaching.
pub(super) fn refused(store: &Store, what: &'static str) -> ErrorKind {
    ErrorKind::Host { link: Arc::clone(&store.link), path: lock_path(store), what }
}

/// Opens the lock file of a link. Creates it for a creator, or if a link exists without it. Returns `None` if there is no
/// link.
pub(crate) fn lock_file(store: &Store, create: bool) -> Result<Option<Lock>> {
    let path = lock_path(store);
    let opened = Lock::open(&path).and_then(|opened| {
        if opened.is_some() {
            return Ok(opened);
        }
        // The lock file gets the permissions of the link. Whether that is a complete link is checked later.
        let there = std::fs::symlink_metadata(store.path(None)).ok().map(|metadata| metadata.mode() & 0o660);
        match there {
            Some(mode) => Lock::open_or_make(&path, mode | store.file_mode),
            None if create => Lock::open_or_make(&path, store.file_mode),
            None => Ok(None),
        }
    });
    opened.map_err(|error| store.refused(&path.display().to_string(), error))
}

/// A socket on which a host listens, and its number.
#[derive(Debug)]
pub(super) struct HostListener {
    pub(super) listener: OwnedFd,
    pub(super) place: HostSocket,
}

/// The path and number of a host's socket.
#[derive(Clone, Debug)]
pub(super) struct HostSocket {
    number: u64,
    path: PathBuf,
    inode: Option<(u64, u64)>,
}

impl HostSocket {
    /// Ends the host role, once: removes the socket's name and releases its number.
    pub(super) fn end(&self, lock: &Lock) {
        if lock.withdraw() {
            self.remove(lock);
        }
    }

    fn remove(&self, lock: &Lock) {
        // If the lock file was removed by force, another process may have this number in the next one.
        if inode_of(&self.path) == self.inode {
            let _ = std::fs::remove_file(&self.path);
        }
        lock.leave_socket(self.number);
    }
}

/// The error if the lock file of a link cannot be locked.
pub(super) fn locking(store: &Store, error: io::Error) -> Error {
    Error::system(&store.link, "lock the lock file", error)
}

/// Listens for newcomers and becomes the host, in one last step. Returns `None` if there is a host of this kind, or if the link
/// is being removed.
pub(super) fn listen(store: &Store, lock: &Lock, host: Host) -> Result<Option<HostListener>> {
    // A sidecar needs the credentials of each sender.
    let on = if host == Host::Sidecar { socket::listen_for_senders } else { socket::listen_on };
    let Some(listening) = bind(store, lock, on).map_err(|error| deaf(store, error))? else { return Ok(None) };
    if lock.try_publish(host, listening.place.number).map_err(|error| locking(store, error))? {
        // Processes that watch the lock file by inotify see the change.
        drop(Lock::open(&lock_path(store)));
        return Ok(Some(listening));
    }
    listening.place.remove(lock);
    Ok(None)
}

/// Makes this process the host of a link whose memory it has: always in a sidecar; in a participant, if newcomers need a
/// host and there is none.
pub(super) fn serve_memory(shared: &Shared, host: Option<Host>) -> Result<Option<HostListener>> {
    let (store, lock) = (&shared.store, &shared.lock);
    let is_needed = match host {
        Some(Host::Sidecar) => true,
        Some(Host::Participant) => {
            shared.has_descriptors() && lock.host().map_err(|error| locking(store, error))?.is_none()
        }
        None => false,
    };
    if !is_needed {
        return Ok(None);
    }
    let host = host.unwrap_or(Host::Participant);
    let listening = listen(store, lock, host)?;
    if listening.is_some() && lock.others_joined().map_err(|error| locking(store, error))? {
        shared.begin_to_gather();
    }
    Ok(listening)
}

/// Returns `None` if the link is being removed.
fn bind(
    store: &Store,
    lock: &Lock,
    on: fn(&Path, u32) -> io::Result<OwnedFd>,
) -> io::Result<Option<HostListener>> {
    let mut from = 0;
    while let Some(number) = lock.take_socket(user::effective(), from)? {
        // From now on the lock file keeps its name, so no other process has this number.
        if !lock.is_open()? {
            lock.leave_socket(number);
            return Ok(None);
        }
        let path = socket_path(store, number);
        // The number is ours, so an existing socket is stale.
        if std::fs::symlink_metadata(&path).is_ok_and(|there| there.file_type().is_socket()) {
            let _ = std::fs::remove_file(&path);
        }
        match on(&path, store.file_mode).and_then(|listener| set_nonblocking(&listener).map(|()| listener)) {
            Ok(listener) => {
                let inode = inode_of(&path);
                return Ok(Some(HostListener { listener, place: HostSocket { number, path, inode } }));
            }
            Err(error) => {
                lock.leave_socket(number);
                // Another user's socket, which may not be removed.
                if error.kind() != io::ErrorKind::AddrInUse {
                    return Err(error);
                }
            }
        }
        from = (number & 0xff) + 1;
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// The answer to a newcomer, with the segments that have no names.
pub(super) fn offer(shared: &Shared) -> (broker::Attached, Vec<BorrowedFd<'_>>) {
    let segments: &[_] = if shared.store.backing == Backing::Memfd { &shared.segments } else { &[] };
    let attached = broker::Attached {
        layout: LAYOUT_VERSION.into(),
        segments: u32::try_from(segments.len()).unwrap_or(u32::MAX),
    };
    (attached, segments.iter().filter_map(|segment| segment.file.as_ref().map(AsFd::as_fd)).collect())
}

/// Returns the descriptors if all of them can be memory. Otherwise they are closed, because the peer does not keep the
/// protocol.
pub(super) fn memories(fds: Vec<OwnedFd>) -> Option<Vec<OwnedFd>> {
    if fds.iter().all(may_be_memory) {
        return Some(fds);
    }
    discard(fds);
    None
}

/// Closes descriptors from other processes. Closing one that is not memory may block as long as its sender likes, so it is
/// done in another thread.
pub(super) fn discard(fds: Vec<OwnedFd>) {
    let strange: Vec<_> = fds.into_iter().filter(|fd| !may_be_memory(fd)).collect();
    if !strange.is_empty() {
        drop_elsewhere(strange);
    }
}

/// Closes a connection, whose queue may have descriptors from other processes.
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
