//! The monitor: one thread of this process that watches all its links, and recovers dead participants.
//!
//! Participants have no connections to each other that would close on a death. But the kernel closes the files of a dead
//! process, and inotify reports when a link's lock file is opened or closed, by any process of any user and in any
//! namespace. Then the monitor looks for dead participants.
//!
//! It also keeps a session with the link's host, if there is one. Through it, a sidecar learns which process has which
//! seat, and detects deaths exactly, and a new host without the link's memory gets it. The monitor also serves links whose
//! host is this process. No call waits for a host or for the monitor.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use shmesh_proto::broker::{self, Reply, Request, reply, request};
use shmesh_proto::packet;
use shmesh_sys::eventfd::Doorbell;
use shmesh_sys::inotify::{self, Watcher};
use shmesh_sys::signal::Blocked;
use shmesh_sys::{poll, socket, user};

use super::Shared;
use super::host::{
    ASKED, HostListener, HostService, HostSocket, TOLD, discard, hang_up, lock_path, proof, socket_path,
};
use super::reap::{Reap, reap};
use crate::config::Backing;
use crate::error::{Error, Result};
use crate::segment::lock::Host;

const STACK_BYTES: usize = 128 * 1024;
/// Interval of looking for dead participants if inotify is not available: a user has 128 instances by default.
const PERIOD: Duration = Duration::from_secs(1);
/// Minimum delay before connecting again to a host that closed a connection or refused it. It doubles until the host accepts
/// one. Another host, as a sidecar that was started again, is tried at once.
const RETRY_MIN: Duration = Duration::from_millis(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Maximum number of a sidecar's packets that are read before other links have their turn.
const PACKETS_MAX: usize = 16;
/// How long the last link of a process waits for the thread to end, so that the library can be unloaded. It takes that long
/// only if a sidecar sent a descriptor whose close blocks.
const END_LIMIT: Duration = Duration::from_secs(1);

/// The monitor of this process. A forked child finds its parent's, and replaces it.
static MONITOR: AtomicPtr<Monitor> = AtomicPtr::new(std::ptr::null_mut());

#[derive(Debug)]
struct Monitor {
    process: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    links: Vec<(u64, Weak<Shared>)>,
    /// Links that the thread has not started to watch yet.
    starts: Vec<(u64, Start)>,
    thread: Option<Arc<Thread>>,
}

/// State shared between the thread and the calls that start and stop it.
#[derive(Debug)]
struct Thread {
    wake: Doorbell,
    stop: AtomicBool,
    ended: Mutex<bool>,
    end: Condvar,
}

// UNSAFETY: one pointer to a box that is never freed.
#[expect(
    unsafe_code,
    reason = "a monitor is replaced after a fork without a lock that the parent may have had"
)]
fn monitor() -> &'static Monitor {
    let found = MONITOR.load(Ordering::Acquire);
    // SAFETY: null, or a box that was leaked below.
    if let Some(monitor) = unsafe { found.as_ref() }
        && monitor.process == std::process::id()
    {
        return monitor;
    }
    let new = Box::into_raw(Box::new(Monitor { process: std::process::id(), state: Mutex::default() }));
    match MONITOR.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: it was just leaked, and is never freed.
        Ok(_) => unsafe { &*new },
        Err(other) => {
            // SAFETY: `new` was not published; `other` is a box that another thread of this process has leaked here.
            unsafe {
                drop(Box::from_raw(new));
                &*other
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded values are changed as a whole, so a poisoned lock guards valid ones.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The initial state of a watched link.
#[derive(Debug, Default)]
pub(super) struct Start {
    /// The connection to the host from which this process got the link.
    pub(super) session: Option<(OwnedFd, (Host, u64))>,
    /// The listener, if this process is the host.
    pub(super) listening: Option<HostListener>,
}

/// Lets the monitor watch a link until it is stopped.
#[derive(Debug)]
pub(super) struct LinkWatch {
    id: u64,
}

impl LinkWatch {
    /// Starts watching. The thread is started if it does not run yet.
    pub(super) fn start(shared: &Arc<Shared>, start: Start) -> Result<Self> {
        let failed = |doing: &str, error| Error::system(&shared.store.link, doing, error);
        let mut state = lock(&monitor().state);
        let thread = match &state.thread {
            Some(thread) => Arc::clone(thread),
            None => {
                let wake = Doorbell::new().map_err(|error| failed("make an eventfd", error))?;
                let (stop, ended) = (AtomicBool::new(false), Mutex::new(false));
                let thread = Arc::new(Thread { wake, stop, ended, end: Condvar::new() });
                spawn(&thread).map_err(|error| failed("start a thread", error))?;
                Arc::clone(state.thread.insert(thread))
            }
        };
        let id = state.next;
        state.next += 1;
        state.links.push((id, Arc::downgrade(shared)));
        state.starts.push((id, start));
        let _ = thread.wake.signal();
        Ok(Self { id })
    }

    /// Lets the monitor serve the link, whose host this process has become.
    pub(super) fn serve(&self, listening: HostListener) {
        let mut state = lock(&monitor().state);
        state.starts.push((self.id, Start { session: None, listening: Some(listening) }));
        if let Some(thread) = &state.thread {
            let _ = thread.wake.signal();
        }
    }

    /// Stops watching. The caller must be the process that started it.
    pub(super) fn stop(&self) {
        let mut state = lock(&monitor().state);
        state.links.retain(|(id, _)| *id != self.id);
        state.starts.retain(|(id, _)| *id != self.id);
        let last = state.links.is_empty();
        let thread = if last { state.thread.take() } else { state.thread.clone() };
        drop(state);
        let Some(thread) = thread else { return };
        if last {
            thread.stop.store(true, Ordering::Release);
        }
        let _ = thread.wake.signal();
        if last {
            let ended = lock(&thread.ended);
            let _ = thread.end.wait_timeout_while(ended, END_LIMIT, |ended| !*ended);
        }
    }
}

fn spawn(thread: &Arc<Thread>) -> std::io::Result<()> {
    // Signals are for the application's own threads, whose stacks have room for its handlers.
    let _blocked = Blocked::all();
    let (thread, mut watching) = (Arc::clone(thread), WatchLoop::new());
    let builder = std::thread::Builder::new().name("shmesh-monitor".into()).stack_size(STACK_BYTES);
    let spawned = builder.spawn(move || {
        watching.run(&thread);
        *lock(&thread.ended) = true;
        thread.end.notify_all();
    });
    spawned.map(drop)
}

/// A link, as the thread watches it.
struct WatchedLink {
    id: u64,
    shared: Weak<Shared>,
    watch: Option<inotify::WatchedFile>,
    reap: Reap,
    session: Option<HostConnection>,
    service: Option<(HostService, HostSocket)>,
    retry: Option<Retry>,
}

/// A host that has closed the last connection, or refused it.
struct Retry {
    host: (Host, u64),
    /// Inode of its socket. A host that is started again takes the same number, but makes another socket.
    socket: Option<u64>,
    /// When to connect again.
    at: Instant,
    /// How long to wait after the next refusal.
    pause: Duration,
}

/// A connection to the host of a link.
struct HostConnection {
    connection: Arc<OwnedFd>,
    host: (Host, u64),
}

impl Drop for HostConnection {
    fn drop(&mut self) {
        // The queue may have descriptors from another process.
        if let Ok(copy) = self.connection.try_clone() {
            hang_up(copy);
        }
    }
}

struct WatchLoop {
    inotify: Option<Watcher>,
    links: Vec<WatchedLink>,
}

impl WatchLoop {
    fn new() -> Self {
        Self { inotify: Watcher::new().ok(), links: Vec::new() }
    }

    fn run(&mut self, thread: &Thread) {
        loop {
            self.wait(thread);
            if thread.wake.take().unwrap_or(true) {
                if thread.stop.load(Ordering::Acquire) {
                    return;
                }
                self.refresh(thread);
            }
            self.read_events();
            for link in &mut self.links {
                link.look();
            }
        }
    }

    /// Sleeps until something has happened, or a link is due.
    fn wait(&self, thread: &Thread) {
        let sessions = self.links.iter().filter_map(|link| link.session.as_ref());
        let services = || self.links.iter().filter_map(|link| Some(&link.service.as_ref()?.0));
        let fds: Vec<_> = std::iter::once(thread.wake.as_fd())
            .chain(self.inotify.iter().map(AsFd::as_fd))
            .chain(sessions.map(|session| session.connection.as_fd()))
            .chain(services().flat_map(HostService::fds))
            .collect();
        let mut watches: Vec<_> = fds.iter().map(poll::Watch::readable).collect();
        let pauses = self.links.iter().filter_map(|link| link.reap.pause());
        let limit = pauses.chain(services().filter_map(HostService::pause)).min();
        let waited = poll::wait_once(&mut watches, limit);
        if waited.is_err_and(|error| error.kind() != ErrorKind::Interrupted) {
            // A process may lower its limit of descriptors below the number that it polls.
            std::thread::sleep(PERIOD);
        }
    }

    /// Starts to watch new links, and drops those that were stopped.
    fn refresh(&mut self, thread: &Thread) {
        let mut state = lock(&monitor().state);
        // The monitor was stopped after it was woken: the next thread starts the work.
        if !state.thread.as_ref().is_some_and(|current| std::ptr::eq(Arc::as_ptr(current), thread)) {
            return;
        }
        let mut starts = std::mem::take(&mut state.starts);
        let (gone, stay): (Vec<_>, Vec<_>) = std::mem::take(&mut self.links)
            .into_iter()
            // Sorted by id, because ids increase.
            .partition(|link| state.links.binary_search_by_key(&link.id, |(id, _)| *id).is_err());
        self.links = stay;
        let known = self.links.last().map_or(0, |link| link.id + 1);
        let new = state.links.partition_point(|(id, _)| *id < known);
        for (id, shared) in &state.links[new..] {
            let start = starts.iter().position(|(of, _)| of == id).map(|i| starts.swap_remove(i).1);
            self.links.push(WatchedLink::new(*id, shared, start.unwrap_or_default(), self.inotify.as_ref()));
        }
        drop(state);
        for (id, start) in starts {
            if let (Some(link), Some(listening)) =
                (self.links.iter_mut().find(|link| link.id == id), start.listening)
            {
                link.serve(listening);
            }
        }
        for watch in gone.into_iter().filter_map(|link| link.watch) {
            // Two handles on one link share a watch.
            if !self.links.iter().any(|link| link.watch == Some(watch))
                && let Some(inotify) = &self.inotify
            {
                inotify.remove(watch);
            }
        }
    }

    fn read_events(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        let Ok(touched) = inotify.touched() else { return };
        for link in &mut self.links {
            // If inotify lost events, all links are checked.
            if touched.as_ref().is_none_or(|files| link.watch.is_some_and(|watch| files.contains(&watch))) {
                link.reap.begin();
            }
        }
    }
}

impl WatchedLink {
    fn new(id: u64, shared: &Weak<Shared>, start: Start, inotify: Option<&Watcher>) -> Self {
        let watch = shared.upgrade().and_then(|shared| inotify?.add(&lock_path(&shared.store)).ok());
        let mut reap = Reap::default();
        // For deaths before the watch began.
        reap.once();
        let mut link =
            Self { id, shared: Weak::clone(shared), watch, reap, session: None, service: None, retry: None };
        if let Some(listening) = start.listening {
            link.serve(listening);
        }
        if let (Some((connection, host)), Some(shared)) = (start.session, shared.upgrade()) {
            link.session = Some(HostConnection { connection: Arc::new(connection), host });
            link.begin(&shared);
        }
        link
    }

    fn serve(&mut self, listening: HostListener) {
        let place = listening.place.clone();
        self.service = Some((HostService::new(listening), place));
    }

    fn look(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        if let Some(session) = &self.session {
            match read_host(&shared, &session.connection) {
                HostMessages::None => {}
                HostMessages::Wanted => self.retry = None,
                HostMessages::Attached => {
                    self.retry = None;
                    self.begin(&shared);
                }
                HostMessages::Ended => self.end(&shared),
            }
        }
        if let Some((service, _)) = &mut self.service
            && service.look(&shared)
        {
            self.reap.begin();
        }
        if self.reap.is_due() {
            reap(&shared);
            self.connect(&shared);
            if self.reap.pause().is_none() {
                // Nothing else may happen that would cause another round.
                let looks = self.watch.is_none() || shared.is_any_dying();
                let retry = self.retry.as_ref().filter(|_| self.session.is_none());
                let retry = retry.map(|retry| retry.at.saturating_duration_since(Instant::now()));
                if let Some(pause) = retry.into_iter().chain(looks.then_some(PERIOD)).min() {
                    self.reap.once_in(pause);
                }
            }
        }
    }

    /// Called when the host knows this process.
    fn begin(&mut self, shared: &Shared) {
        let Some(session) = &self.session else { return };
        *shared.broker() = Some(Arc::clone(&session.connection));
        // Later seats are announced when they are taken; these were taken before.
        for mine in shared.core.seats.all().filter(|other| other.is_of(&shared.me)) {
            shared.announce(&mine);
        }
        shared.announce_memory(&session.connection);
        // The link has a host.
        if session.host.0 == Host::Sidecar
            && let Some((_, place)) = self.service.take()
        {
            place.end(&shared.lock);
        }
    }

    fn end(&mut self, shared: &Shared) {
        *shared.broker() = None;
        if let Some(session) = self.session.take() {
            self.refused(shared, session.host);
        }
        // It may restart soon.
        self.reap.begin();
    }

    fn refused(&mut self, shared: &Shared, host: (Host, u64)) {
        let socket = socket_inode(shared, host);
        let pause = self.retry_of(host, socket).map_or(RETRY_MIN, |retry| retry.pause);
        let at = Instant::now() + pause;
        self.retry = Some(Retry { host, socket, at, pause: (pause * 2).min(RETRY_MAX) });
    }

    fn retry_of(&self, host: (Host, u64), socket: Option<u64>) -> Option<&Retry> {
        self.retry.as_ref().filter(|retry| (retry.host, retry.socket) == (host, socket))
    }

    /// Connects to the host of the link, unless that is this process, or is connected already.
    fn connect(&mut self, shared: &Shared) {
        let Ok(found) = shared.lock.host() else {
            self.retry = None;
            return;
        };
        match (&self.session, found) {
            (Some(session), Some(host)) if session.host == host => return,
            // A forked child may keep the connection of a dead host open.
            (Some(session), None) => {
                // Packets that it has sent before.
                let _ = read_host(shared, &session.connection);
                return self.end(shared);
            }
            (Some(_), Some(_)) => {
                *shared.broker() = None;
                self.session = None;
            }
            (None, _) => {}
        }
        let Some(host) = found.filter(|(kind, _)| *kind == Host::Sidecar || self.service.is_none()) else {
            self.retry = None;
            return;
        };
        let retry = self.retry_of(host, socket_inode(shared, host));
        if retry.is_none_or(|retry| Instant::now() >= retry.at) {
            self.session = connect(shared, host);
            if self.session.is_none() {
                self.refused(shared, host);
            }
        }
    }
}

fn socket_inode(shared: &Shared, host: (Host, u64)) -> Option<u64> {
    Some(std::fs::symlink_metadata(socket_path(&shared.store, host.1)).ok()?.ino())
}

/// Connects to the host of a link.
///
/// The host will be offered the link's memory, and any process that may write to the directory can listen there. So the
/// host's process must be one that may open the lock file.
fn connect(shared: &Shared, host: (Host, u64)) -> Option<HostConnection> {
    let connection = socket::connect_now(&socket_path(&shared.store, host.1)).ok()?;
    let (uid, gid, mode) = shared.lock.owner().ok()?;
    let peer = socket::peer(&connection).ok()?;
    let is_in_group =
        || peer.gid == gid || socket::peer_groups(&connection).is_ok_and(|groups| groups.contains(&gid));
    let is_member = [0, user::effective(), uid].contains(&peer.uid)
        || shared.owner.is_some_and(|(uid, _)| uid == peer.uid)
        || mode & 0o006 == 0o006
        || mode & 0o060 == 0o060 && is_in_group();
    if !is_member {
        return None;
    }
    let attach = Request::new(ASKED, request::Op::Attach(broker::Attach { side: 0 }));
    let sent = socket::send_now(&connection, &packet::encode(&attach), &[]);
    // A host that has closed the connection already refuses this process like one that closes it later: `read_host` finds the
    // end, and the next attempt waits.
    if sent.is_err_and(|error| !matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)) {
        return None;
    }
    Some(HostConnection { connection: Arc::new(connection), host })
}

/// The result of reading a host's packets.
enum HostMessages {
    None,
    /// The host knows this process now.
    Attached,
    /// The host is new, and was offered the link.
    Wanted,
    /// The host has ended or refuses this process, or is not a host.
    Ended,
}

fn read_host(shared: &Shared, host: &OwnedFd) -> HostMessages {
    let mut messages = HostMessages::None;
    for _ in 0..PACKETS_MAX {
        let packet = match socket::receive_now(host) {
            Ok(packet) => packet,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return messages,
            Err(_) => return HostMessages::Ended,
        };
        let said = packet::decode::<Reply>(&packet.bytes);
        if let Ok(Reply { result: Some(reply::Result::PoolMemory(_)), .. }) = &said {
            shared.memory_announced(&packet.bytes, packet.fds);
            continue;
        }
        discard(packet.fds);
        if packet.bytes.is_empty() {
            return HostMessages::Ended;
        }
        match said {
            Ok(Reply { result: Some(reply::Result::Challenge(challenge)), .. }) => {
                if socket::send_now(host, &proof(challenge), &[]).is_err() {
                    return HostMessages::Ended;
                }
            }
            Ok(Reply { id: ASKED, result: Some(reply::Result::Attached(_)) }) => {
                messages = HostMessages::Attached
            }
            Ok(Reply { id: ASKED, result: Some(reply::Result::Wanted(_)) }) => {
                if shared.store.backing != Backing::Memfd {
                    return HostMessages::Ended;
                }
                let segments = shared.segments.iter().filter_map(|segment| segment.file.as_ref());
                let fds: Vec<_> = segments.map(AsFd::as_fd).collect();
                let offer = packet::encode(&Request::new(ASKED, request::Op::Offer(broker::Offer {})));
                if socket::send_now(host, &offer, &fds).is_err() {
                    return HostMessages::Ended;
                }
                messages = HostMessages::Wanted;
            }
            // There is none, but there may be later.
            Ok(Reply { id: TOLD, .. }) => {}
            Ok(Reply { result: Some(reply::Result::Refused(_)), .. }) | Err(_) => return HostMessages::Ended,
            Ok(_) => {}
        }
    }
    messages
}
