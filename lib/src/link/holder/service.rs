//! Being the holder: letting newcomers in, answering them, noticing who goes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use std::os::unix::fs::{FileTypeExt, MetadataExt};

use shmesh_proto::broker::{self, Code, Reply, Request, reply, request};
use shmesh_proto::limits::VERSION;
use shmesh_proto::packet;
use shmesh_sys::eventfd::Doorbell;
use shmesh_sys::poll::{self, Watch};
use shmesh_sys::{errno, socket, user};

use super::{ANSWER_LIMIT, FULL_PAUSE, HAND_OVER_LIMIT, REAP_ROUNDS, SESSIONS_MAX, socket_path};
use crate::config::Backing;
use crate::link::{Recovered, Shared, device};
use crate::participant::{Participant, Side, Stage};
use crate::segment::header::LAYOUT_VERSION;
use crate::segment::lock::{Host, Lock};

/// What ended a wait.
pub(super) enum Woken {
    Stop,
    Ready(Vec<usize>),
}

pub(super) fn wait_any(stop: &Doorbell, others: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Woken {
    let mut watches: Vec<_> =
        std::iter::once(Watch::readable(stop)).chain(others.iter().map(Watch::readable)).collect();
    // An interrupted or refused poll finds nothing, and the caller comes again.
    if poll::wait_once(&mut watches, timeout).is_err_and(|error| error.kind() != io::ErrorKind::Interrupted) {
        // A process may lower its limit of descriptors below what it has, and must be able to leave all the same.
        std::thread::sleep(FULL_PAUSE);
        return if stop.take().unwrap_or(false) { Woken::Stop } else { Woken::Ready(Vec::new()) };
    }
    if watches[0].is_ready() {
        return Woken::Stop;
    }
    Woken::Ready(
        watches[1..].iter().enumerate().filter(|(_, watch)| watch.is_ready()).map(|(i, _)| i).collect(),
    )
}

/// Between two rounds at least.
const ROUND_PAUSE: Duration = Duration::from_millis(10);

/// Looking for the dead again and again after a connection closed, each time twice as long after the last. By the clock:
/// whatever else wakes the holder meanwhile must not use the rounds up.
#[derive(Default)]
pub(in crate::link) struct Reap {
    /// The next round and its time.
    next: Option<(u32, Instant)>,
    /// The last round's time.
    last: Option<Instant>,
}

impl Reap {
    pub(in crate::link) fn begin(&mut self) {
        // However often something happens, or somebody makes it happen.
        let now = Instant::now();
        self.next = Some((0, self.last.map_or(now, |last| now.max(last + ROUND_PAUSE))));
    }

    /// One round now.
    pub(in crate::link) fn once(&mut self) {
        self.once_in(Duration::ZERO);
    }

    /// One round after a while.
    pub(in crate::link) fn once_in(&mut self, pause: Duration) {
        self.next = Some((REAP_ROUNDS - 1, Instant::now() + pause));
    }

    pub(in crate::link) fn pause(&self) -> Option<Duration> {
        self.next.map(|(_, at)| at.saturating_duration_since(Instant::now()))
    }

    /// Whether it is time; then the next round is set.
    pub(in crate::link) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let Some((round, _)) = self.next.filter(|&(_, at)| at <= now) else { return false };
        let after = Duration::from_millis(1 << round);
        self.last = Some(now);
        self.next = (round + 1 < REAP_ROUNDS).then(|| (round + 1, now + after));
        true
    }
}

/// Being the holder.
pub(super) struct Service {
    listening: Listening,
    sessions: Vec<OwnedFd>,
    /// When to look for the dead again.
    reap: Reap,
    /// The last newcomer could not be let in, for want of descriptors or memory.
    is_full: bool,
}

impl Service {
    pub(super) fn begin(shared: &Shared) -> io::Result<Self> {
        let listening = listen(shared, Host::Participant, socket::listen_on)?;
        Ok(Self { listening, sessions: Vec::new(), reap: Reap::default(), is_full: false })
    }

    pub(super) fn look_for_the_dead(&mut self) {
        self.reap.begin();
    }

    pub(super) fn run(mut self, shared: &Arc<Shared>, stop: &Doorbell) -> End {
        let lock = &shared.lock;
        loop {
            // The listener stays readable as long as somebody waits there: without a pause this would be a busy loop.
            let listener = (!self.is_full).then(|| self.listening.listener.as_fd());
            let listens = usize::from(listener.is_some());
            let fds: Vec<_> = listener.into_iter().chain(self.sessions.iter().map(AsFd::as_fd)).collect();
            let full = self.is_full.then_some(FULL_PAUSE);
            let timeout = full.into_iter().chain(self.reap.pause()).min();
            self.is_full = false;
            let ready = match wait_any(stop, &fds, timeout) {
                Woken::Stop => break,
                Woken::Ready(ready) => ready,
            };
            if self.reap.is_due() {
                reap(shared);
            }
            // From the back, so that removing one moves none that is still to be looked at.
            for i in ready.into_iter().rev() {
                match i.checked_sub(listens) {
                    None => self.admit(),
                    Some(session) => match answer(shared, &self.sessions[session]) {
                        Some(Answered::Stays) => {}
                        // Who has brought it comes last: it may end as soon as it knows.
                        Some(Answered::HasMemory(told, request)) => {
                            self.tell_of_memory(session, &told);
                            let _ = tell(&self.sessions[session], request, &told);
                        }
                        Some(Answered::TakesOver(request)) => {
                            let heir = self.sessions.swap_remove(session);
                            return self.hand_over(lock, stop, &heir, request);
                        }
                        None => {
                            self.sessions.swap_remove(session);
                            self.reap.begin();
                        }
                    },
                }
            }
        }
        self.listening.end(lock);
        End::Stopped
    }

    /// Leaves the duty to `heir`. Those who follow us do not notice before it serves, or has gone: they would take the duty
    /// themselves.
    fn hand_over(self, lock: &Lock, stop: &Doorbell, heir: &OwnedFd, request: u64) -> End {
        // Before anybody can listen in our place: what is there from now on is not ours to remove.
        self.listening.end(lock);
        drop(self.listening);
        lock.leave_duty();
        let done = packet::encode(&Reply::new(request, reply::Result::Done(broker::Done::default())));
        if socket::send(heir, &done, &[]).is_err() {
            return End::HandedOver;
        }
        match wait_any(stop, &[heir.as_fd()], Some(HAND_OVER_LIMIT)) {
            Woken::Stop => End::Stopped,
            Woken::Ready(_) => End::HandedOver,
        }
    }

    /// Everybody but one: whoever takes our place one day has to have it.
    fn tell_of_memory(&self, but: usize, told: &device::Answer) {
        for (_, session) in self.sessions.iter().enumerate().filter(|(i, _)| *i != but) {
            // Who has gone need not be told.
            let _ = tell(session, 0, told);
        }
    }

    fn admit(&mut self) {
        let connection = match socket::accept(&self.listening.listener) {
            Ok(connection) => connection,
            Err(error) => {
                self.is_full = errno::is_exhausted(&error);
                return;
            }
        };
        // Who comes when all places are taken finds the connection closed, and tries again.
        if self.sessions.len() < SESSIONS_MAX && socket::limit_wait(&connection, ANSWER_LIMIT).is_ok() {
            self.sessions.push(connection);
        }
    }
}

/// How a service ended.
pub(super) enum End {
    /// The process leaves the link.
    Stopped,
    /// Another process has the duty now.
    HandedOver,
}

/// What a packet led to.
enum Answered {
    Stays,
    /// It has brought device memory; the request that is still to be answered.
    HasMemory(device::Answer, u64),
    /// It is going to be the holder; the request that is still to be answered.
    TakesOver(u64),
}

/// A socket at which a host listens.
#[derive(Debug)]
pub(in crate::link) struct Listening {
    pub(in crate::link) listener: OwnedFd,
    number: u64,
    pub(in crate::link) path: PathBuf,
}

impl Listening {
    /// Removes the socket's name, and leaves its number to others.
    pub(in crate::link) fn end(&self, lock: &Lock) {
        lock.withdraw();
        if lock.is_named() {
            let _ = std::fs::remove_file(&self.path);
        }
        lock.leave_socket(self.number);
    }
}

/// Listens for newcomers, in this way, and tells where. Only for who has the duty.
pub(in crate::link) fn listen(
    shared: &Shared,
    host: Host,
    on: fn(&Path, u32) -> io::Result<OwnedFd>,
) -> io::Result<Listening> {
    let listening = bind(shared, on)?;
    if !shared.lock.try_publish(host, listening.number)? {
        listening.end(&shared.lock);
        return Err(io::ErrorKind::AddrInUse.into());
    }
    Ok(listening)
}

fn bind(shared: &Shared, on: fn(&Path, u32) -> io::Result<OwnedFd>) -> io::Result<Listening> {
    let (lock, mut from) = (&shared.lock, 0);
    while let Some(number) = lock.take_socket(user::effective(), from)? {
        let path = socket_path(&shared.store, number);
        // The number is ours, so a socket that is there is a dead process's.
        if std::fs::symlink_metadata(&path).is_ok_and(|there| there.file_type().is_socket()) {
            let _ = std::fs::remove_file(&path);
        }
        match on(&path, shared.store.file_mode) {
            Ok(listener) => return Ok(Listening { listener, number, path }),
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

/// Answers one packet of a newcomer. `None`: it has gone, or speaks something else.
fn answer(shared: &Shared, session: &OwnedFd) -> Option<Answered> {
    let (bytes, fds) = socket::receive(session).ok()?;
    let request = packet::decode::<Request>(&bytes).ok()?;
    let reply = |result| packet::encode(&Reply::new(request.id, result));
    let refuse = |code, text: String| packet::encode(&Reply::refused(request.id, code, text));
    let link = &shared.store.link;
    if request.version != VERSION {
        let text = format!("link {link}: this holder speaks version {VERSION} of the protocol");
        return socket::send(session, &refuse(Code::Version, text), &[]).ok().map(|()| Answered::Stays);
    }
    let (packet, fds) = match request.op? {
        request::Op::Attach(_) => {
            let (attached, fds) = offer(shared);
            (reply(reply::Result::Attached(attached)), fds)
        }
        request::Op::Hello(_) => {
            (reply(reply::Result::Welcome(broker::Welcome { identity: None })), Vec::new())
        }
        // Whose seat is whose matters to who can see deaths better than we do.
        request::Op::Seated(_) => return Some(Answered::Stays),
        request::Op::PoolMemory(told) => {
            return match shared.lend(&told, fds) {
                Ok(answer) if answer.is_news => Some(Answered::HasMemory(answer, request.id)),
                Ok(answer) => tell(session, request.id, &answer).ok().map(|()| Answered::Stays),
                Err(text) => {
                    socket::send(session, &refuse(Code::Invalid, text), &[]).ok().map(|()| Answered::Stays)
                }
            };
        }
        request::Op::Yield(_) if may_take_over(shared, session) => {
            return Some(Answered::TakesOver(request.id));
        }
        request::Op::Yield(_) => {
            let text = format!(
                "link {link}: only root, its maker and the user of the process that serves it may take over"
            );
            (refuse(Code::Denied, text), Vec::new())
        }
        _ => {
            let text =
                format!("link {link}: a process of the link serves it, and keeps no keys; run a sidecar");
            (refuse(Code::Unsupported, text), Vec::new())
        }
    };
    socket::send(session, &packet, &fds).ok().map(|()| Answered::Stays)
}

/// What device memory a pool has. With id 0, to who has not asked.
fn tell(session: &OwnedFd, id: u64, told: &device::Answer) -> io::Result<()> {
    let packet = packet::encode(&Reply::new(id, reply::Result::PoolMemory(told.message())));
    socket::send(session, &packet, &told.fds())
}

/// Whoever may end this process anyway, and whoever made the link.
fn may_take_over(shared: &Shared, session: &OwnedFd) -> bool {
    let ours = user::effective();
    let maker =
        shared.segments.first().and_then(|segment| Some(segment.file.as_ref()?.metadata().ok()?.uid()));
    socket::peer(session).is_ok_and(|peer| peer.uid == 0 || peer.uid == ours || Some(peer.uid) == maker)
}

/// What a newcomer gets: the segments that have no names.
pub(in crate::link) fn offer(shared: &Shared) -> (broker::Attached, Vec<BorrowedFd<'_>>) {
    let segments: &[_] = if shared.store.backing == Backing::Memfd { &shared.segments } else { &[] };
    let attached = broker::Attached {
        layout: LAYOUT_VERSION.into(),
        segments: u32::try_from(segments.len()).unwrap_or(u32::MAX),
    };
    (attached, segments.iter().filter_map(|segment| segment.file.as_ref().map(AsFd::as_fd)).collect())
}

/// Takes back what participants held that have ended, as far as this process can see them.
pub(in crate::link) fn reap(shared: &Shared) {
    let dead: Vec<_> = shared.dead().collect();
    take_back(shared, &dead);
    // A participant may have attached or detached, and died before it woke the others.
    shared.wake_for_events();
}

/// Takes back what dead participants held, from a seat of its own: a seat's lists are its handle's alone.
pub(in crate::link) fn take_back(shared: &Shared, dead: &[Participant]) -> Recovered {
    let mut done = Recovered::default();
    if dead.is_empty() {
        return done;
    }
    let me = shared.sit(Side::Primary);
    for other in dead {
        // With every seat taken it is done from their own.
        let seat = me.map_or(other.seat, |me| me.seat);
        if me.is_none() {
            // Otherwise it would seem to have detached. Else it becomes known when all is taken back.
            shared.core.seats.record_end(other, Stage::Died);
        }
        done.add(shared.core.reclaim(other, seat, false));
    }
    if let Some(me) = me {
        shared.unlock(&me);
        shared.core.seats.vacate(&me);
    }
    shared.core.seats.count_recovered(done.participants);
    shared.wake_after_a_death();
    for other in dead {
        shared.remove_bell(other);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_go_by_the_clock() {
        let mut reap = Reap::default();
        assert!(!reap.is_due() && reap.pause().is_none());
        reap.begin();
        assert!(reap.is_due(), "the first round is at once");
        let first = Instant::now();
        reap.begin();
        while !reap.is_due() {}
        assert!(first.elapsed() >= ROUND_PAUSE / 2, "however often it begins");
        // However often something else wakes the holder.
        while !reap.is_due() {}
        let (round, _) = reap.next.expect("ten more");
        assert_eq!(round, 2);
        assert!(reap.pause().is_some_and(|pause| pause <= Duration::from_millis(2)));
        reap.next = Some((REAP_ROUNDS - 1, Instant::now()));
        assert!(reap.is_due() && reap.next.is_none(), "that was the last");
    }
}
