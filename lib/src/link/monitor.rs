//! The monitor: one thread of this process that watches all its links, and recovers what dead participants held.
//!
//! No process serves a link whose memory has names, so no connection closes when a participant dies. But the kernel closes the
//! files of a dead process, and inotify reports that a link's lock file was opened or closed, by any process of any user and in any
//! namespace. Then the monitor looks for the dead.
//!
//! It also keeps a connection to the sidecar of the link, if there is one: the sidecar learns which seat is whose, and sees
//! deaths exactly. No call waits for the sidecar or for the monitor.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
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
use super::holder::{ASKED, Reap, find, lock_path, proof, reap};
use crate::error::{Error, Result};

const STACK_BYTES: usize = 128 * 1024;
const CLOSE_STACK_BYTES: usize = 64 * 1024;
/// How often to look for the dead where inotify is not to be had: a user has 128 instances, unless the node says otherwise.
const PERIOD: Duration = Duration::from_secs(1);
/// Between two connections that the sidecar ends, at least; each time twice as long, until it takes one.
const RETRY_MIN: Duration = Duration::from_millis(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Packets of a sidecar that are read before other links have their turn.
const PACKETS_MAX: usize = 16;
/// How long the last link of a process waits for the thread, so that the library can be unloaded. It does not take that long
/// unless a sidecar sends a descriptor that cannot be closed.
const END_LIMIT: Duration = Duration::from_secs(1);

/// The monitor of this process. A forked child finds its parent's, and makes its own.
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
    // What it guards is changed whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has the monitor watch a link for as long as it lives.
#[derive(Debug)]
pub(super) struct Watch {
    id: u64,
}

impl Watch {
    /// Starts watching, in a thread that is started if there is none yet.
    pub(super) fn start(shared: &Arc<Shared>) -> Result<Self> {
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
        let _ = thread.wake.signal();
        Ok(Self { id })
    }

    /// Stops watching. The caller must be the process that started it.
    pub(super) fn stop(&self) {
        let mut state = lock(&monitor().state);
        state.links.retain(|(id, _)| *id != self.id);
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
    // The application's signals are for its own threads, which have a stack for its handlers.
    let _blocked = Blocked::all();
    let (thread, mut watching) = (Arc::clone(thread), Watching::new());
    let builder = std::thread::Builder::new().name("shmesh-monitor".into()).stack_size(STACK_BYTES);
    let spawned = builder.spawn(move || {
        watching.run(&thread);
        *lock(&thread.ended) = true;
        thread.end.notify_all();
    });
    spawned.map(drop)
}

/// A link, as the thread sees it.
struct Watched {
    id: u64,
    shared: Weak<Shared>,
    watch: Option<inotify::File>,
    reap: Reap,
    sidecar: Option<Arc<OwnedFd>>,
    /// When to connect again, and how long to wait after the next refusal.
    retry: (Instant, Duration),
}

struct Watching {
    inotify: Option<Watcher>,
    links: Vec<Watched>,
}

impl Watching {
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
                self.refresh();
            }
            self.read_events();
            for link in &mut self.links {
                link.look();
            }
        }
    }

    /// Sleeps until something has happened, or a link is to be looked at.
    fn wait(&self, thread: &Thread) {
        let sidecars = self.links.iter().filter_map(|link| link.sidecar.as_ref());
        let fds: Vec<_> = std::iter::once(thread.wake.as_fd())
            .chain(self.inotify.iter().map(AsFd::as_fd))
            .chain(sidecars.map(|sidecar| sidecar.as_fd()))
            .collect();
        let mut watches: Vec<_> = fds.iter().map(poll::Watch::readable).collect();
        let limit = self.links.iter().filter_map(|link| link.reap.pause()).min();
        let waited = poll::wait_once(&mut watches, limit);
        if waited.is_err_and(|error| error.kind() != std::io::ErrorKind::Interrupted) {
            // A process may lower its limit of descriptors below what it has.
            std::thread::sleep(PERIOD);
        }
    }

    /// Takes up links that have come, and drops those that have gone.
    fn refresh(&mut self) {
        let state = lock(&monitor().state);
        let (gone, stay): (Vec<_>, Vec<_>) = std::mem::take(&mut self.links)
            .into_iter()
            // Sorted by id, because ids are given in order.
            .partition(|link| state.links.binary_search_by_key(&link.id, |(id, _)| *id).is_err());
        self.links = stay;
        let known = self.links.last().map_or(0, |link| link.id + 1);
        let new = state.links.partition_point(|(id, _)| *id < known);
        for (id, shared) in &state.links[new..] {
            self.links.push(Watched::new(*id, shared, self.inotify.as_ref()));
        }
        drop(state);
        for mut link in gone {
            if let (Some(shared), Some(sidecar)) = (link.shared.upgrade(), link.sidecar.take()) {
                hang_up(&shared, sidecar);
            }
            let Some(watch) = link.watch else { continue };
            // Two handles on one link have one watch.
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
            // All of them when some were lost.
            if touched.as_ref().is_none_or(|files| link.watch.is_some_and(|watch| files.contains(&watch))) {
                link.reap.begin();
            }
        }
    }
}

impl Watched {
    fn new(id: u64, shared: &Weak<Shared>, inotify: Option<&Watcher>) -> Self {
        let watch = shared.upgrade().and_then(|shared| inotify?.add(&lock_path(&shared.store)).ok());
        let mut reap = Reap::default();
        // Deaths before the watch began.
        reap.once();
        Self {
            id,
            shared: Weak::clone(shared),
            watch,
            reap,
            sidecar: None,
            retry: (Instant::now(), RETRY_MIN),
        }
    }

    fn look(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        if let Some(sidecar) = self.sidecar.take() {
            let heard = hear(&shared, &sidecar);
            if matches!(heard, Heard::Ended) {
                hang_up(&shared, sidecar);
                self.retry = (Instant::now() + self.retry.1, (self.retry.1 * 2).min(RETRY_MAX));
                // It may be back soon.
                self.reap.begin();
            } else {
                self.sidecar = Some(sidecar);
            }
            if matches!(heard, Heard::Attached) {
                self.retry.1 = RETRY_MIN;
            }
        }
        if self.reap.is_due() {
            reap(&shared);
            if self.sidecar.is_none() && Instant::now() >= self.retry.0 {
                self.sidecar = connect(&shared);
            }
            if self.reap.pause().is_none() && (self.watch.is_none() || shared.is_any_dying()) {
                self.reap.once_in(PERIOD);
            }
        }
    }
}

/// A connection to the sidecar that keeps a link, if there is one.
///
/// Any member of the link can take the name of its socket where no sidecar has it, so only root, this user and the user that
/// created the link are trusted: a descriptor that another sends could keep this thread for as long as its sender likes.
fn connect(shared: &Shared) -> Option<Arc<OwnedFd>> {
    let sidecar = socket::connect_now(&find(&shared.store, &shared.lock).ok()??).ok()?;
    let uid = socket::peer(&sidecar).ok()?.uid;
    if uid != 0 && uid != user::effective() && Some(uid) != shared.owner.map(|(uid, _)| uid) {
        return None;
    }
    let attach = Request::new(ASKED, request::Op::Attach(broker::Attach { side: 0 }));
    socket::send(&sidecar, &packet::encode(&attach), &[]).ok()?;
    Some(Arc::new(sidecar))
}

/// Ends the connection to a sidecar. What waits in it is closed elsewhere.
fn hang_up(shared: &Shared, sidecar: Arc<OwnedFd>) {
    *shared.broker() = None;
    match Arc::try_unwrap(sidecar) {
        Ok(sidecar) => {
            if let Some(unread) = socket::hang_up(sidecar) {
                close_elsewhere(unread);
            }
        }
        // Another thread announces a seat just now.
        Err(sidecar) => close_elsewhere(sidecar),
    }
}

/// Closes what a sidecar has sent in a thread of its own: if it is none, a descriptor that lingers may be among it. Without a thread
/// it stays open.
fn close_elsewhere<T: Send + 'static>(strange: T) {
    let strange = Arc::new(Mutex::new(Some(ManuallyDrop::new(strange))));
    let _blocked = Blocked::all();
    let close = move || drop(lock(&strange).take().map(ManuallyDrop::into_inner));
    let _ =
        std::thread::Builder::new().name("shmesh-close".into()).stack_size(CLOSE_STACK_BYTES).spawn(close);
}

/// What a sidecar has said.
enum Heard {
    Nothing,
    /// It knows this process now.
    Attached,
    /// It has ended or refuses, or is not a sidecar.
    Ended,
}

fn hear(shared: &Shared, sidecar: &Arc<OwnedFd>) -> Heard {
    let mut heard = Heard::Nothing;
    for _ in 0..PACKETS_MAX {
        let bytes = match socket::receive_all(sidecar) {
            Ok((packet, is_whole)) if !packet.fds.is_empty() || is_whole.is_err() => {
                // A sidecar sends none here.
                close_elsewhere(packet.fds);
                return Heard::Ended;
            }
            Ok((packet, _)) if !packet.bytes.is_empty() => packet.bytes,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return heard,
            _ => return Heard::Ended,
        };
        match packet::decode::<Reply>(&bytes) {
            Ok(Reply { result: Some(reply::Result::Challenge(challenge)), .. }) => {
                if socket::send(sidecar, &proof(challenge), &[]).is_err() {
                    return Heard::Ended;
                }
            }
            Ok(Reply { id: ASKED, result: Some(reply::Result::Attached(_)) }) => {
                *shared.broker() = Some(Arc::clone(sidecar));
                heard = Heard::Attached;
                // Later seats are announced when they are taken; these are taken already.
                for mine in shared.core.seats.all().filter(|other| other.is_of(&shared.me)) {
                    shared.announce(&mine);
                }
            }
            Ok(Reply { result: Some(reply::Result::Refused(_)), .. }) | Err(_) => return Heard::Ended,
            Ok(_) => {}
        }
    }
    heard
}
