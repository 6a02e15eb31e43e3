//! The holder: the process that keeps a link's descriptors and hands them to newcomers.
//!
//! A link whose memory has names has none: it is its files, and its processes need the lock file and the monitor only.
//!
//! Memfds and device memory have no names, so somebody who has them must give them to whoever comes. Every process on such
//! a link is ready to: the one that has the duty (a lock on `<link>.lock`) listens on `<link>.broker`, the others keep a
//! connection to it. When it ends, however it ends, the kernel frees the lock and closes the connections, and one of the
//! others takes its place with the descriptors that it has. So they live as long as any process of the link does, and either
//! side may restart.
//!
//! The processes of every link share a second lock on that file, the presence, from before they ask for the descriptors
//! until they have left. Who comes and finds nobody serving, but somebody present, must not make descriptors of its own: there
//! would be two links of one name. It waits until one of those takes over. And who goes removes the link only if it can shut
//! the presence for all others, so nobody is left on a link without a name.
//!
//! A connection that closes also says that a process has gone: the holder then takes back what it held.

mod service;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use shmesh_proto::broker::{self, Code, Reply, Request, reply, request};
use shmesh_proto::packet;
use shmesh_sys::eventfd::Doorbell;
use shmesh_sys::process::ProcessIdentity;
use shmesh_sys::signal::Blocked;
use shmesh_sys::{errno, socket};

use super::Shared;
use super::monitor::Watch;
use crate::config::{Backing, PoolId};
use crate::error::{Error, ErrorKind, Result};
use crate::segment::header::LAYOUT_VERSION;
use crate::segment::lock::Lock;
use crate::segment::store::Store;
use service::{End, Service, Woken, wait_any};
pub(super) use service::{Listening, Reap, listen, offer, reap, take_back};

/// Connections at the same time: one per process of the link, and as many strangers.
const SESSIONS_MAX: usize = 128;
/// How long the other end of a connection may take to say what it has to.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// How often to look for the dead after a connection closed: a process closes its connections before it is gone, and a
/// large one takes long to go. Each time twice as long after the last, from one millisecond.
const REAP_ROUNDS: u32 = 12;
/// How long nobody is let in after a process of ours ran out of descriptors.
const FULL_PAUSE: Duration = Duration::from_millis(100);
/// How long who takes over may take to listen.
const HAND_OVER_LIMIT: Duration = Duration::from_secs(2);
const STACK_BYTES: usize = 128 * 1024;
/// Between two attempts to become the holder: from one millisecond to a quarter of a second.
const ELECT_ROUNDS_MAX: u32 = 8;
/// Processes that can leave one after the other while one of them looks whether it is the last.
const RETIRE_ROUNDS_MAX: u32 = 128;

/// The id of the one question that a newcomer asks.
pub(super) const ASKED: u64 = 1;

/// It may be about to serve: a sidecar makes all its links before it does.
pub(super) const SILENT: &str = "does not answer: its process is stopped or stuck";
const STRANGER: &str = "is not a shmesh holder; end that program, or use another link name";

/// What the holder gives to a newcomer.
#[derive(Debug, Default)]
pub(crate) struct Offer {
    /// The link's own segment and its pools, unless they have names.
    pub(crate) segments: Vec<File>,
}

/// This process's readiness to be the holder, in a thread of its own; or, of a link that needs none, what watches it.
#[derive(Debug)]
pub(crate) struct Holder {
    me: ProcessIdentity,
    /// What stops it, and its end.
    thread: Option<(Arc<Doorbell>, JoinHandle<()>)>,
    /// Without a thread: a link with names, and without device memory, has nothing to hand out.
    idle: Option<(Arc<Shared>, Option<Watch>)>,
}

/// What the names of all sockets of a link's hosts begin with. Each has a number that is its own for as long as it lives, so
/// what a dead process of another user has left is in nobody's way.
pub(crate) fn socket_prefix(link: &str) -> String {
    format!("{link}.broker-")
}

pub(super) fn socket_path(store: &Store, number: u64) -> PathBuf {
    store.dir.join(format!("{}{number:x}", socket_prefix(&store.link)))
}

/// Where the host of a link listens, if there is one.
pub(crate) fn find(store: &Store, lock: &Lock) -> Result<Option<PathBuf>> {
    let found = lock.host().map_err(|error| Error::system(&store.link, "look at the lock file", error))?;
    Ok(found.map(|(_, number)| socket_path(store, number)))
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

impl Holder {
    /// Asks the holder of a link. `None`: there is none just now. The connection stays open as a sign of life.
    pub(crate) fn ask(store: &Store, lock: &Lock) -> Result<Option<(Offer, OwnedFd)>> {
        let Some(path) = find(store, lock)? else { return Ok(None) };
        let holder =
            |what| Error::from(ErrorKind::Holder { link: Arc::clone(&store.link), path: path.clone(), what });
        let connection = match socket::connect_to(&path) {
            Ok(connection) => connection,
            Err(error) => {
                return match error.raw_os_error() {
                    // Nobody listens (any more).
                    Some(errno::ENOENT | errno::ECONNREFUSED | errno::EAGAIN) => Ok(None),
                    // A socket of another kind.
                    Some(errno::EPROTOTYPE) => Err(holder(STRANGER)),
                    _ => Err(store.refused(&path.display().to_string(), error)),
                };
            }
        };
        let attach = Request::new(ASKED, request::Op::Attach(broker::Attach { side: 0 }));
        let asked = socket::limit_wait(&connection, ANSWER_LIMIT)
            .and_then(|()| socket::send(&connection, &packet::encode(&attach), &[]))
            .and_then(|()| answer_of(&connection));
        let (bytes, fds) = match asked {
            Ok((bytes, _)) if bytes.is_empty() => return Ok(None),
            Ok(answer) => answer,
            // It ends just now; somebody else will take its place.
            Err(error) if matches!(error.raw_os_error(), Some(errno::EPIPE | errno::ECONNRESET)) => {
                return Ok(None);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(holder(SILENT));
            }
            // A packet longer than any of ours.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(holder(STRANGER)),
            Err(error) => return Err(store.refused(&path.display().to_string(), error)),
        };
        let attached = match packet::decode::<Reply>(&bytes) {
            Ok(Reply { id: ASKED, result: Some(reply::Result::Attached(attached)) }) => attached,
            // Of id 0: the connection as a whole is refused.
            Ok(Reply { id: ASKED | 0, result: Some(reply::Result::Refused(refused)) }) => {
                return Err(match refused.code() {
                    Code::Version => {
                        holder("speaks another version of the protocol; run one version on both sides")
                    }
                    Code::Draining => return Ok(None),
                    _ => holder("does not let this process in; its log says why"),
                });
            }
            _ => return Err(holder(STRANGER)),
        };
        if attached.layout != u32::from(LAYOUT_VERSION) {
            return Err(Error::from(ErrorKind::Version {
                link: Arc::clone(&store.link),
                what: path.display().to_string(),
                found: u16::try_from(attached.layout).unwrap_or(u16::MAX),
                ours: LAYOUT_VERSION,
            }));
        }
        if u32::try_from(fds.len()) != Ok(attached.segments) {
            return Err(holder("sent other descriptors than it announced"));
        }
        Ok(Some((Offer { segments: fds.into_iter().map(File::from).collect() }, connection)))
    }

    /// Asks the holder at the other end to leave its duty to us. It waits, with all who follow it, until the connection is
    /// closed. `false`: it does not, or has gone.
    pub(super) fn ask_to_yield(connection: &OwnedFd) -> bool {
        let ask = Request::new(ASKED, request::Op::Yield(broker::Yield {}));
        let answer = socket::send(connection, &packet::encode(&ask), &[])
            .and_then(|()| answer_of(connection))
            .map(|(bytes, _)| packet::decode::<Reply>(&bytes));
        matches!(answer, Ok(Ok(Reply { id: ASKED, result: Some(reply::Result::Done(_)) })))
    }

    /// The error of who cannot listen.
    pub(super) fn deaf(store: &Store, error: io::Error) -> Error {
        if error.raw_os_error() == Some(errno::ENAMETOOLONG) {
            let what = "has a path too long for a socket; use a shorter directory";
            return Self::refused(store, what).into();
        }
        Error::system(&store.link, "listen for participants", error)
    }

    /// The error of a link whose holder does something that keeps others away.
    pub(super) fn refused(store: &Store, what: &'static str) -> ErrorKind {
        ErrorKind::Holder { link: Arc::clone(&store.link), path: lock_path(store), what }
    }

    /// Opens the lock file of a link; makes it for who creates one, or finds one without it. `None`: there is no link.
    pub(super) fn lock_file(store: &Store, create: bool) -> Result<Option<Lock>> {
        let path = lock_path(store);
        let opened = Lock::open(&path).and_then(|opened| {
            if opened.is_some() {
                return Ok(opened);
            }
            // Who may lock it is who may use the link; whether that is one, and whole, is looked at later.
            let there =
                std::fs::symlink_metadata(store.path(None)).ok().map(|metadata| metadata.mode() & 0o660);
            match there {
                Some(mode) => Lock::open_or_make(&path, mode | store.file_mode),
                None if create => Lock::open_or_make(&path, store.file_mode),
                None => Ok(None),
            }
        });
        opened.map_err(|error| store.refused(&path.display().to_string(), error))
    }

    /// The right to be the holder, and to create or remove the link. `None`: somebody has it, or uses the link.
    pub(crate) fn try_lock(store: &Store) -> Result<Option<Lock>> {
        let failed = |error| store.refused(&lock_path(store).display().to_string(), error);
        let Some(lock) = Self::lock_file(store, true)? else { return Ok(None) };
        let free = lock.try_take_duty().map_err(failed)?
            && lock.is_named()
            && !lock.others_joined().map_err(failed)?;
        Ok(free.then_some(lock))
    }

    /// Starts serving, or keeping the connection to who serves. The lock must be joined, and without a connection it must
    /// have the duty.
    pub(super) fn start(shared: &Arc<Shared>, connection: Option<OwnedFd>, monitor: bool) -> Result<Self> {
        let link = &shared.store.link;
        let failed = |doing: &str, error| Error::system(link, doing, error);
        if !shared.has_descriptors() {
            let watch = monitor.then(|| Watch::start(shared)).transpose()?;
            return Ok(Self { me: shared.me, thread: None, idle: Some((Arc::clone(shared), watch)) });
        }
        let stop = Arc::new(Doorbell::new().map_err(|error| failed("make an eventfd", error))?);
        // Listening before the caller goes on: who is told of the link must be able to attach.
        let duty = match connection {
            Some(connection) => Duty::follow(shared, connection),
            None => Duty::Serve(Service::begin(shared).map_err(|error| Self::deaf(&shared.store, error))?),
        };
        let me = shared.me;
        // The application's signals are for its own threads, which have a stack for its handlers. The new thread inherits
        // what is blocked here.
        let blocked = Blocked::all();
        let (shared, stopped) = (Arc::clone(shared), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("shmesh-holder".into()).stack_size(STACK_BYTES).spawn(
            move || {
                run(&shared, &stopped, duty);
                retire(&shared);
            },
        );
        drop(blocked);
        let thread = thread.map_err(|error| failed("start a thread", error))?;
        Ok(Self { me, thread: Some((stop, thread)), idle: None })
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if !self.me.is_me() {
            // In a forked child: the thread is the parent's, and so is the eventfd that stops it.
            std::mem::forget(self.thread.take());
            return;
        }
        if let Some((stop, thread)) = self.thread.take() {
            let _ = stop.signal();
            let _ = thread.join();
        }
        if let Some((shared, watch)) = self.idle.take() {
            if let Some(watch) = watch {
                watch.stop();
            }
            retire(&shared);
        }
    }
}

/// What the thread does just now.
enum Duty {
    /// We are the holder.
    Serve(Service),
    /// Somebody else is; the connection says how long.
    Follow(Arc<OwnedFd>),
    /// Nobody is that we know of.
    Elect,
}

impl Duty {
    /// From now on, who serves hears of each seat that this process takes, and now of those that it has, and of memory.
    fn follow(shared: &Shared, connection: OwnedFd) -> Self {
        let connection = Arc::new(connection);
        *shared.broker() = Some(Arc::clone(&connection));
        for mine in shared.core.seats.all().filter(|other| other.is_of(&shared.me)) {
            shared.announce(&mine);
        }
        shared.tell_of_memory(&connection);
        Self::Follow(connection)
    }
}

fn run(shared: &Arc<Shared>, stop: &Doorbell, mut duty: Duty) {
    let mut attempts = 0;
    loop {
        duty = match duty {
            Duty::Serve(service) => match service.run(shared, stop) {
                End::Stopped => return,
                End::HandedOver => Duty::Elect,
            },
            Duty::Follow(connection) => match wait_any(stop, &[connection.as_fd()], None) {
                Woken::Stop => return,
                Woken::Ready(_) => match socket::receive(&connection) {
                    Ok((bytes, fds)) if !bytes.is_empty() => {
                        // The rest of what a broker tells its sessions is for those who asked it something.
                        shared.hear_of_memory(&bytes, fds);
                        Duty::Follow(connection)
                    }
                    _ => {
                        *shared.broker() = None;
                        attempts = 0;
                        Duty::Elect
                    }
                },
            },
            Duty::Elect => match elect(shared) {
                Some(duty) => duty,
                None => {
                    // Another is about to serve; or nobody can, and then this goes on for as long as the link does.
                    let pause = Duration::from_millis(1 << attempts);
                    attempts = (attempts + 1).min(ELECT_ROUNDS_MAX);
                    match wait_any(stop, &[], Some(pause)) {
                        Woken::Stop => return,
                        Woken::Ready(_) => Duty::Elect,
                    }
                }
            },
        };
    }
}

fn elect(shared: &Arc<Shared>) -> Option<Duty> {
    let lock = &shared.lock;
    // Somebody removed the link from under us, and one of the same name may be there by now: that is not ours.
    if !lock.is_named() {
        return None;
    }
    if let Ok(Some((_, connection))) = Holder::ask(&shared.store, &shared.lock) {
        return Some(Duty::follow(shared, connection));
    }
    if !lock.try_take_duty().ok()? {
        return None;
    }
    match Service::begin(shared) {
        Ok(mut service) => {
            // The last holder has gone, and perhaps more with it.
            service.look_for_the_dead();
            Some(Duty::Serve(service))
        }
        Err(_) => {
            lock.leave_duty();
            None
        }
    }
}

/// Leaves the link.
fn retire(shared: &Shared) {
    remove_if_last(shared);
    // The lock file stays open for as long as somebody here holds memory of the link.
    shared.lock.release();
}

/// Removes the link if nobody is there any more and nothing waits in it.
fn remove_if_last(shared: &Shared) {
    let lock = &shared.lock;
    lock.leave();
    // Once more for each process that leaves just now.
    for _ in 0..RETIRE_ROUNDS_MAX {
        // Whoever has the duty has to come here too, after us.
        if !lock.try_take_duty().unwrap_or(false) || !lock.is_named() {
            return;
        }
        if lock.try_close().unwrap_or(false) {
            return remove(shared);
        }
        lock.leave_duty();
        // Those who are here will look when they go; but if they went while we had the duty, they left it to us.
        if lock.others_joined().unwrap_or(true) {
            return;
        }
    }
}

/// Removes the files of a link that nobody is on, unless messages wait in it. Only with the duty, and the presence shut.
fn remove(shared: &Shared) {
    if shared.store.backing == Backing::Named {
        if shared.core.rings().iter().any(|ring| ring.has_message()) {
            return;
        }
        for dead in shared.core.seats.all() {
            shared.remove_bell(&dead);
        }
        // The link's own segment first: without it there is no link.
        for pool in std::iter::once(None).chain(PoolId::ALL.map(Some)) {
            let _ = std::fs::remove_file(shared.store.path(pool));
        }
    }
    let _ = std::fs::remove_file(lock_path(&shared.store));
}
