//! One link and one peer: a bridge that has the link and a far node, seen from either of them.
//!
//! A session has a thread, which waits on its link and on frames alike. It is a participant of the link only while the other side has
//! participants for whom it stands: so programs learn from the link's own events when their peers come, leave, or are cut off.
//!
//! The engine's thread that brings a message passes it to the link itself, because to wake the session for it would cost as much as the
//! message's way. It does nothing that can wait: it sends nothing on the network, and leaves everything else to the session's thread.

use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use prometheus_client::metrics::counter::Counter;
use shmesh::config::{LinkConfig, LinkName, PoolId, Receivers, RingMode};
use shmesh::inspect::{View, far_node_file};
use shmesh::{Error, ErrorKind, Link, LinkOptions, Liveness, SharedBytes, Side, Waiter};
use shmesh_sys::file;
use tracing::{debug, error, info, warn};

use crate::connected_gauge::ConnectedGauge;
use crate::engine::{Outlet, SentFrame};
use crate::frame::{
    Frame, FrameError, ITEM_HEAD_BYTES, ItemHead, ItemKind, PartBytes, ProtocolVersions, Status, WireShape,
    is_item,
};
use crate::journal::Journal;
use crate::stream::{Arrival, FRAME_OVERHEAD, MAX_BYTES, Receiver, Sender, weight};

/// How long a change may wait until it is sent, so that many are sent at once.
const TELL_AFTER: Duration = Duration::from_millis(20);
/// How long a sender waits for the other side to receive before it sends again, at least and at most. Each time in vain it waits twice as
/// long: on a slow network everything that is sent once more keeps the rest from arriving.
const AGAIN_AFTER: Duration = Duration::from_millis(300);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(5);
/// How often the receiver asks for the same missing message.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// How often a session without its link looks for it, at first and while nothing changes for long.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const LOOK_EVERY_MAX: Duration = Duration::from_secs(1);
/// How often it looks for room in a full ring. Receivers wake no senders.
const ROOM_EVERY: Duration = Duration::from_millis(1);
/// How long a full ring holds up a post that is behind its messages.
const POST_AFTER: Duration = Duration::from_millis(20);
/// After how many times the limit of silence the session of a far node ends, if nothing is kept for it. If messages are, it then makes
/// room for another node.
const FORGOTTEN_AFTER: u32 = 60;
/// The same if messages are kept for it.
const GIVEN_UP_AFTER: u32 = 720;
/// How long a session does not take messages after it failed to.
const PAUSE: Duration = Duration::from_millis(100);
/// Over which time the rate is measured that people are shown.
const RATE_OVER: Duration = Duration::from_secs(1);
/// How long a stopping session waits for what it has taken to arrive.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// Messages that wait in the receiving bridge at most.
const WINDOW_MAX: u64 = 256;
/// Bytes of statuses that wait in it at most, in addition.
const STATUSES_BYTES: usize = 32 << 10;

/// Which end of the bridge this is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BridgeEnd {
    /// The link is here. The bridge is a participant of its secondary side.
    Home,
    /// The replica is here. The bridge is its primary.
    Far,
}

impl BridgeEnd {
    /// The side of the programs for which the other end stands.
    fn opposite(self) -> Side {
        match self {
            Self::Home => Side::Primary,
            Self::Far => Side::Secondary,
        }
    }
}

/// The counters of a session.
#[derive(Clone, Debug, Default)]
pub struct BridgeCounts {
    /// Messages taken from the link and sent to the other side.
    pub sent: Counter,
    /// Messages received from the other side and sent on the link.
    pub received: Counter,
    /// Messages of the other side that can no longer come.
    pub lost: Counter,
    /// Frames sent once more.
    pub again: Counter,
    /// Frames that were refused: damaged, of another version, or beyond the limit.
    pub refused: Counter,
    /// Whether the other side answers.
    pub connected: ConnectedGauge,
}

/// Frames for a session, from the engine's threads.
#[derive(Debug, Default)]
struct FrameInbox {
    state: Mutex<FrameInboxState>,
    arrived: Condvar,
}

#[derive(Debug)]
struct FrameInboxState {
    frames: VecDeque<Vec<u8>>,
    /// Bytes of the messages and posts.
    item_bytes: usize,
    /// Bytes of all other frames.
    status_bytes: usize,
    /// Bytes of messages and posts that were taken out, and wait for the link.
    waiting_bytes: usize,
    /// The most that messages and posts may be together.
    limit: usize,
    /// Something else than a frame is to be looked at.
    is_woken: bool,
    /// Wakes the session where it waits on its link.
    waiter: Option<Arc<Waiter>>,
}

impl Default for FrameInboxState {
    fn default() -> Self {
        Self {
            frames: VecDeque::new(),
            item_bytes: 0,
            status_bytes: 0,
            waiting_bytes: 0,
            // Until the link is known.
            limit: STATUSES_BYTES,
            is_woken: false,
            waiter: None,
        }
    }
}

impl FrameInbox {
    /// Adds a frame, and returns whether it fits. If not, it was sent twice, or by a sender that ignores the limits. Messages leave the room
    /// of statuses free: these say which messages have arrived, and that the other side is there.
    fn add(&self, frame: Vec<u8>) -> bool {
        let mut state = self.lock();
        let (before, limit) = match is_item(&frame) {
            true => (state.item_bytes + state.waiting_bytes, state.limit),
            false => (state.status_bytes, STATUSES_BYTES),
        };
        let is_added = before + weight(&frame) <= limit;
        if is_added {
            *state.bytes_of(&frame) += weight(&frame);
            state.frames.push_back(frame);
        }
        is_added
    }

    /// Makes the session look at once.
    fn wake(&self) {
        let mut state = self.lock();
        state.is_woken = true;
        let waiter = state.waiter.clone();
        drop(state);
        self.arrived.notify_one();
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, FrameInboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_woken(&self) -> bool {
        self.lock().is_woken
    }

    /// Notes how much waits for the link.
    fn set_waiting(&self, bytes: usize) {
        self.lock().waiting_bytes = bytes;
    }

    fn set_limit(&self, bytes: usize) {
        self.lock().limit = bytes;
    }

    /// The next frame, while so many bytes wait for the link. If there is none, the session may sleep.
    fn pop(&self, waiting_bytes: usize) -> Option<Vec<u8>> {
        let mut state = self.lock();
        state.waiting_bytes = waiting_bytes;
        let frame = state.pop();
        state.is_woken &= frame.is_some();
        frame
    }

    /// The next frame, if it is a message or a post.
    fn pop_item(&self, waiting_bytes: usize) -> Option<Vec<u8>> {
        let mut state = self.lock();
        state.waiting_bytes = waiting_bytes;
        if state.frames.front().is_some_and(|frame| is_item(frame)) { state.pop() } else { None }
    }

    fn is_empty(&self) -> bool {
        self.lock().frames.is_empty()
    }

    fn set_waiter(&self, waiter: Option<Arc<Waiter>>) {
        self.lock().waiter = waiter;
    }

    fn wait(&self, timeout: Duration) {
        let state = self.lock();
        let _ = self.arrived.wait_timeout_while(state, timeout, |state| !state.is_woken);
    }
}

impl FrameInboxState {
    fn pop(&mut self) -> Option<Vec<u8>> {
        let frame = self.frames.pop_front()?;
        *self.bytes_of(&frame) -= weight(&frame);
        if is_item(&frame) {
            self.waiting_bytes += weight(&frame);
        }
        Some(frame)
    }

    fn bytes_of(&mut self, frame: &[u8]) -> &mut usize {
        if is_item(frame) { &mut self.item_bytes } else { &mut self.status_bytes }
    }
}

/// The link and the peer of a session.
#[derive(Clone, Debug)]
pub struct SessionSettings {
    /// Which end this is.
    pub end: BridgeEnd,
    /// The IPC directory of the link.
    pub dir: PathBuf,
    /// The link, or its replica.
    pub link: LinkName,
    /// The name of the far node.
    pub node: String,
    /// How long the other side may be silent until its participants count as gone.
    pub peer_timeout: Duration,
    /// The mode of a replica's files.
    pub file_mode: u32,
    /// The versions of the protocol that it reads.
    pub versions: ProtocolVersions,
    /// The numbers that a greeting has given to the other side; without them the session draws its own.
    pub identity: Option<SessionIdentity>,
}

/// The numbers by which the other side knows a session, if it has had a greeting before the session began.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SessionIdentity {
    /// The number of this process of the bridge.
    pub instance: u64,
    /// The stream that it will send.
    pub stream: u64,
}

impl SessionSettings {
    fn journal(&self) -> PathBuf {
        far_node_file(&self.dir, &self.link, &self.node)
    }
}

struct LinkHandle {
    link: Link,
    waiter: Arc<Waiter>,
    /// The position in a broadcast ring less the number in the stream.
    base: Option<u64>,
    /// The shape of a replica.
    shape: Option<WireShape>,
    has_notification: bool,
}

struct Other {
    status: Status,
    heard: Instant,
}

/// A session: run by a thread of its own, and given frames by the engine's.
pub struct PeerSession {
    inbox: Arc<FrameInbox>,
    /// Counts frames that do not fit.
    refused: Counter,
    /// `None` when it has ended: an engine's thread that still has the session keeps neither its link nor its journal.
    state: Mutex<Option<SessionState>>,
}

impl fmt::Debug for PeerSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerSession").finish_non_exhaustive()
    }
}

impl PeerSession {
    /// A session that continues where the last process of this bridge stopped.
    ///
    /// # Errors
    /// Its journal cannot be opened.
    pub fn new(settings: SessionSettings, outlet: Arc<dyn Outlet>, counts: BridgeCounts) -> Result<Self> {
        let inbox = Arc::<FrameInbox>::default();
        let refused = counts.refused.clone();
        let state = SessionState::new(settings, outlet, Arc::clone(&inbox), counts)?;
        Ok(Self { inbox, refused, state: Mutex::new(Some(state)) })
    }

    /// Gives it a frame, in pieces. It does not wait.
    pub fn push(&self, pieces: &[&[u8]]) {
        let state = match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            // The thread is busy, and may have looked for frames already.
            Err(TryLockError::WouldBlock) => None,
        };
        let is_done = match state {
            Some(mut state) => state.as_mut().is_none_or(|state| {
                if !state.pass_on_at_once(pieces) {
                    self.inbox.set_waiting(state.receiver.waiting_bytes());
                    self.add(pieces);
                }
                state.pass_on()
            }),
            None => {
                self.add(pieces);
                false
            }
        };
        if !is_done {
            self.inbox.wake();
        }
    }

    fn add(&self, pieces: &[&[u8]]) {
        if !self.inbox.add(pieces.concat()) {
            self.refused.inc();
        }
    }

    /// How long the other side has been silent, if it counts as gone and the session holds nothing for it, or it has been silent for long.
    pub fn spare_for(&self) -> Option<Duration> {
        self.state.try_lock().ok()?.as_ref()?.spare_for()
    }

    /// Makes its thread look whether it is to stop.
    pub fn wake(&self) {
        self.inbox.wake();
    }

    /// Carries messages until `stop`, and then until what was taken has arrived, for at most five seconds. Returns whether the far node
    /// is gone and nothing is left of it, not even its journal, because no message was ever sent or received.
    pub fn run(&self, stop: &AtomicBool) -> bool {
        loop {
            let Some((timeout, waiter)) = self.step(stop) else {
                return self.lock().take().is_some_and(SessionState::remove_unused_journal);
            };
            match waiter {
                None => self.inbox.wait(timeout),
                Some(waiter) => {
                    let is_ready =
                        || self.inbox.is_woken() || self.lock().as_mut().is_none_or(SessionState::is_ready);
                    if waiter.wait_until(Some(timeout), is_ready).is_err() {
                        // Evicted: the link is left when it is looked at next.
                        self.inbox.wait(timeout.min(LOOK_EVERY));
                    }
                }
            }
        }
    }

    /// In a function of its own, so that the lock is free while the thread waits.
    fn step(&self, stop: &AtomicBool) -> Option<(Duration, Option<Arc<Waiter>>)> {
        self.lock().as_mut()?.step(stop)
    }

    fn lock(&self) -> MutexGuard<'_, Option<SessionState>> {
        // What a panic leaves is what a kill can leave: every number is in the journal.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct SessionState {
    settings: SessionSettings,
    outlet: Arc<dyn Outlet>,
    inbox: Arc<FrameInbox>,
    counts: BridgeCounts,
    journal: Journal,
    instance: u64,
    sender: Sender,
    receiver: Receiver,
    attached: Option<LinkHandle>,
    other: Option<Other>,
    /// The process of the other bridge before the present one.
    earlier_instance: Option<u64>,
    /// The shape of the link, where it is.
    shape: Option<WireShape>,
    /// Participants of the link on the side for which this end does not stand.
    peers: u32,
    /// A broadcast ring has passed over messages, which are left out as soon as the others have arrived.
    waits_to_skip: bool,
    /// When taking a message failed.
    paused: Option<Instant>,
    /// Messages taken so far, and the counts after which posts come, with their number.
    taken: u64,
    posts: VecDeque<(u64, u32)>,
    /// Posts that were taken while waiting.
    posted: u32,
    /// Why a message could not be passed on: the thread leaves the link.
    failure: Option<Error>,
    /// The thread wakes in time to send what has changed.
    is_tell_due: bool,
    /// When the rate was measured last, and how many bytes had crossed.
    rated: (Instant, u64),
    started: Instant,
    /// The clock of the other side in its last status, and when that came.
    other_clock: (u64, Instant),
    round_trip: Option<Duration>,
    told: Option<(Instant, Status)>,
    must_tell: bool,
    /// Whether the next status asks for missing messages, and when one did last, after which number.
    asks: bool,
    asked: Option<(Instant, u64)>,
    /// Since when the link has had no room, while messages wait for it.
    blocked: Option<Instant>,
    received_at: Instant,
    /// When it sent again last, and how long it waits before it does so next.
    sent_again: (Instant, Duration),
    looked_at: Option<Instant>,
    look_every: Duration,
    /// The findings of the last look: participants of both sides, whether the link and the other side are there, and whether messages
    /// wait.
    found: (u32, u32, bool, bool, bool),
    stopping: Option<Instant>,
    last_complaint: String,
}

impl SessionState {
    fn new(
        settings: SessionSettings,
        outlet: Arc<dyn Outlet>,
        inbox: Arc<FrameInbox>,
        counts: BridgeCounts,
    ) -> Result<Self> {
        let path = settings.journal();
        let (journal, past) =
            Journal::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let mut stream = past.sent_stream;
        let identity = settings.identity;
        if stream == 0 {
            stream = identity.map_or_else(random, |identity| Ok(identity.stream))?;
            journal.begin_sent_stream(stream);
        }
        if past.is_last_lost {
            counts.lost.inc();
        }
        let mut sender = Sender::new(stream, past.taken);
        sender.set_version(settings.versions.lowest);
        let now = Instant::now();
        let rated = (now, journal.bytes());
        Ok(Self {
            settings,
            outlet,
            inbox,
            counts,
            journal,
            instance: identity.map_or_else(random, |identity| Ok(identity.instance))?,
            sender,
            receiver: Receiver::new(past.received_stream, past.delivered, 1),
            attached: None,
            other: None,
            earlier_instance: None,
            shape: None,
            peers: 0,
            waits_to_skip: false,
            paused: None,
            taken: 0,
            posts: VecDeque::new(),
            posted: 0,
            failure: None,
            is_tell_due: false,
            rated,
            started: now,
            other_clock: (0, now),
            round_trip: None,
            told: None,
            must_tell: true,
            asks: false,
            asked: None,
            blocked: None,
            received_at: now,
            sent_again: (now, AGAIN_AFTER),
            looked_at: None,
            look_every: LOOK_EVERY,
            found: (0, 0, false, false, false),
            stopping: None,
            last_complaint: String::new(),
        })
    }

    /// Does what there is to do. Returns for how long to wait then, and with what: until the link or a frame wakes the thread, or until a
    /// frame does. `None` if the session has ended.
    fn step(&mut self, stop: &AtomicBool) -> Option<(Duration, Option<Arc<Waiter>>)> {
        while let Some(frame) = self.inbox.pop(self.receiver.waiting_bytes()) {
            self.hear(frame);
        }
        // After `pop`, which allows to sleep, so that the wake-up for a stop is never the one that is forgotten.
        if stop.load(Ordering::Acquire) {
            let since = *self.stopping.get_or_insert_with(Instant::now);
            let is_sent = self.sender.is_drained() || !self.is_connected();
            let is_passed_on = self.receiver.front().is_none() || self.attached.is_none();
            if is_sent && is_passed_on || since.elapsed() > DRAIN_LIMIT {
                self.tell();
                return None;
            }
        }
        if self.is_forgotten() {
            let (link, node) = (&self.settings.link, &self.settings.node);
            match self.sender.next() - self.sender.oldest() {
                0 => info!(%link, node, "the node has not answered for long: its session ends"),
                kept => {
                    warn!(%link, node, kept, "the node has not answered for long: what was kept for it is dropped")
                }
            }
            return None;
        }
        self.attach_or_detach();
        let failed = self.failure.take().map_or(Ok(()), Err);
        let worked = failed.and_then(|()| self.deliver()).and_then(|()| self.take());
        if let Err(error) = worked {
            // Evicted, or the link is damaged. It is looked for again.
            self.complain(format!("the link failed: {error}"));
            self.leave_link();
        }
        self.send_again_if_stalled();
        self.tell_if_changed();
        Some(self.plan_wait())
    }

    /// In the engine's thread: copies the message of a frame straight into a loan of the link, if nothing is before it. Returns whether it
    /// did; otherwise the frame is still to be received.
    fn pass_on_at_once(&mut self, pieces: &[&[u8]]) -> bool {
        if self.failure.is_some() || !self.inbox.is_empty() {
            return false;
        }
        let Some(head) = Frame::item_head(pieces, self.settings.versions) else { return false };
        if self.attached.is_none() || !self.receiver.is_next(&head) || !self.is_from_other(&head) {
            return false;
        }
        self.report_lost();
        let Some(attached) = &self.attached else { return false };
        let parts = PartBytes::behind_head(pieces);
        let mut sent = send(&attached.link, &self.journal, &self.counts, &head, parts);
        if sent.is_ok() && attached.has_notification {
            sent = attached.link.notify();
        }
        let is_done = self.journal.is_done(head.number);
        if is_done {
            self.receiver.pass();
            self.failure = sent.err();
        }
        // If not, the frame is queued, and `deliver` deals with the error.
        is_done
    }

    /// In the engine's thread: passes received messages to the link. Returns whether there is nothing more to do.
    fn pass_on(&mut self) -> bool {
        if self.attached.is_none() {
            return false;
        }
        while let Some(frame) = self.inbox.pop_item(self.receiver.waiting_bytes()) {
            self.hear(frame);
        }
        if let Err(error) = self.deliver() {
            self.failure = Some(error);
        }
        let is_all_done = self.inbox.is_empty() && self.receiver.front().is_none() && self.failure.is_none();
        is_all_done && !self.must_tell && self.is_tell_due && !self.is_window_used()
    }

    /// Whether a far node has gone for good, as far as this can be seen. If it comes back, it counts the messages that were kept for it as
    /// lost: their numbers are in the journal.
    fn is_forgotten(&self) -> bool {
        let patience = if self.is_empty() { FORGOTTEN_AFTER } else { GIVEN_UP_AFTER };
        self.settings.end == BridgeEnd::Home
            && self.attached.is_none()
            && self.silence() > self.settings.peer_timeout * patience
    }

    /// Removes the journal of a far node that counts as gone, if nothing is counted in it: nodes with ever new names leave nothing.
    fn remove_unused_journal(self) -> bool {
        let is_gone = self.settings.end == BridgeEnd::Home && self.silence() >= self.settings.peer_timeout;
        // What the node has sent and no program has received counts as lost if the node returns without it.
        let has_sent = self.other.as_ref().is_some_and(|other| other.status.next > 1);
        let is_unused = self.is_empty() && !has_sent && self.journal.is_unused();
        // Locked until the file is gone.
        is_gone && is_unused && std::fs::remove_file(self.settings.journal()).is_ok()
    }

    fn silence(&self) -> Duration {
        self.other.as_ref().map_or(self.started, |other| other.heard).elapsed()
    }

    /// Whether no message is kept, for the other side or for the link.
    fn is_empty(&self) -> bool {
        self.sender.is_drained() && self.receiver.front().is_none()
    }

    fn spare_for(&self) -> Option<Duration> {
        let silence = self.silence();
        let patience = if self.is_empty() { 1 } else { FORGOTTEN_AFTER };
        let is_spare = self.attached.is_none() && silence >= self.settings.peer_timeout * patience;
        is_spare.then_some(silence)
    }

    fn is_connected(&self) -> bool {
        self.other.as_ref().is_some_and(|other| other.heard.elapsed() < self.settings.peer_timeout)
    }

    fn hear(&mut self, frame: Vec<u8>) {
        match Frame::decode(&frame, self.settings.versions) {
            Ok(Frame::Status(status)) => self.hear_status(*status),
            Ok(Frame::Item(head, _)) => self.hear_item(head, frame),
            Err(FrameError::Version { sender_reads: Some(reads), .. }) => {
                // It does not know yet which versions this side reads.
                self.must_tell |= self.agree_on_version(reads);
            }
            // On its way since the other side was of another version. It is sent again.
            Err(FrameError::Version { sender_reads: None, .. }) => {
                self.counts.refused.inc();
            }
            Err(error) => {
                self.counts.refused.inc();
                self.complain(format!("a frame was refused: {error}"));
            }
        }
    }

    /// Writes in the highest version that both sides read. Returns whether there is one.
    fn agree_on_version(&mut self, others: ProtocolVersions) -> bool {
        let own = self.settings.versions;
        let Some(version) = own.common(others) else {
            self.counts.refused.inc();
            self.complain(own.remedy(others));
            return false;
        };
        // It may have waited for a status that it can read.
        self.must_tell |= version != self.sender.version();
        self.sender.set_version(version);
        true
    }

    fn hear_status(&mut self, status: Status) {
        if self.earlier_instance == Some(status.instance) && self.is_connected() {
            self.counts.refused.inc();
            self.complain(format!(
                "two bridges answer for link {} and node {}: stop one of them, or give it another --node",
                self.settings.link, self.settings.node
            ));
            return;
        }
        // Also of one that is for an earlier process of this bridge, which may have been of another release.
        let is_readable = self.agree_on_version(status.reads);
        if !is_readable || (status.to != 0 && status.to != self.instance) {
            return;
        }
        let known = self.other.as_ref().map(|other| other.status.instance);
        if known != Some(status.instance) {
            self.earlier_instance = known;
            self.round_trip = None;
            // It knows nothing of this side yet.
            self.must_tell = true;
        }
        let before = self.other.as_ref().map(|other| other.status.received);
        if before != Some(status.received) || known != Some(status.instance) {
            self.received_at = Instant::now();
            self.sent_again.1 = self.again_after();
        }
        self.other_clock = (status.clock_us, Instant::now());
        if status.to == self.instance && status.echo_us > 0 {
            let trip = self.clock_us().saturating_sub(status.echo_us).saturating_sub(status.echo_age_us);
            self.round_trip = Some(Duration::from_micros(trip));
        }
        self.sender.acknowledge(status.known_stream, status.delivered, status.limit);
        if self.receiver.adopt(status.stream, status.oldest) {
            self.journal.begin_received_stream(status.stream, self.receiver.delivered());
            self.must_tell = true;
        }
        let lost = self.receiver.give_up_before(status.stream, status.oldest);
        self.count_lost(lost);
        if let Some(shape) = status.shape.as_ref().filter(|_| self.settings.end == BridgeEnd::Far) {
            set_limits(&mut self.sender, &mut self.receiver, &self.inbox, shape);
        }
        let is_asked = status.again;
        let is_news = self.other.as_ref().is_none_or(|Other { status: last, .. }| {
            (last.peers, last.is_drained, &last.shape) != (status.peers, status.is_drained, &status.shape)
        });
        if is_news {
            self.look_every = LOOK_EVERY;
        }
        self.other = Some(Other { status, heard: Instant::now() });
        // What was sent again is still on its way.
        if is_asked && self.sent_again.0.elapsed() >= self.round_trip.unwrap_or_default().min(AGAIN_AFTER_MAX)
        {
            self.send_again();
        }
    }

    /// Whether a message is of the process that was heard last, and for this one: another may answer to the same name.
    fn is_from_other(&mut self, head: &ItemHead) -> bool {
        let is_mine = |other: &&mut Other| other.status.stream == head.stream && head.to == self.instance;
        let other = self.other.as_mut().filter(is_mine);
        other.map(|other| other.heard = Instant::now()).is_some()
    }

    fn hear_item(&mut self, head: ItemHead, frame: Vec<u8>) {
        if !self.is_from_other(&head) {
            return;
        }
        match self.receiver.accept(head, frame) {
            Arrival::Next { lost } => self.count_lost(lost),
            // The sender did not get the last status.
            Arrival::Old => self.must_tell = true,
            Arrival::Early => {
                // All that is on its way behind a missing message is early. One request is enough for them.
                let received = self.receiver.received();
                let is_asked =
                    self.asked.is_some_and(|(at, before)| before == received && at.elapsed() < ASK_EVERY);
                if !is_asked {
                    self.asked = Some((Instant::now(), received));
                    self.must_tell = true;
                    self.asks = true;
                }
            }
            Arrival::Beyond => {
                self.counts.refused.inc();
            }
        }
    }

    fn count_lost(&mut self, lost: u64) {
        if lost > 0 {
            let delivered = self.receiver.delivered();
            // In this order: a kill in between counts them once more, not once less.
            self.journal.lost(lost);
            self.journal.passed(delivered);
            self.counts.lost.inc_by(lost);
            warn!(link = %self.settings.link, node = self.settings.node, lost, "messages of the other side are lost");
        }
    }

    /// Logs what is wrong, once until something else is.
    fn complain(&mut self, what: String) {
        if self.last_complaint != what {
            error!(link = %self.settings.link, node = self.settings.node, "{what}");
            self.last_complaint = what;
        }
    }

    // ---- the link ----

    fn attach_or_detach(&mut self) {
        let is_connected = self.is_connected();
        if self.counts.connected.set(is_connected) {
            let what = if is_connected { "the other side answers" } else { "the other side does not answer" };
            info!(link = %self.settings.link, node = self.settings.node, "{what}");
            self.look_every = LOOK_EVERY;
        }
        let is_due = self.looked_at.is_none_or(|at| at.elapsed() >= self.look_every);
        if let Some(attached) = &self.attached {
            let mut has_changed = is_due;
            while attached.link.next_event().is_some() {
                has_changed = true;
            }
            if !has_changed {
                return;
            }
        } else if !is_due {
            return;
        }
        self.looked_at = Some(Instant::now());
        self.look_at_link();
        let other = self.other.as_ref().map(|other| &other.status);
        let (peers, is_drained) = other.map_or((0, true), |status| (status.peers, status.is_drained));
        let has_more = self.receiver.front().is_some() || !is_drained;
        let found = (self.peers, peers, self.shape.is_some(), is_connected, has_more);
        let is_quiet = self.attached.is_none() && found == self.found;
        self.look_every = if is_quiet { (2 * self.look_every).min(LOOK_EVERY_MAX) } else { LOOK_EVERY };
        self.found = found;
        let is_replica_old = self.settings.end == BridgeEnd::Far && self.has_other_shape();
        let is_wanted = is_connected && (peers > 0 || has_more) && self.stopping.is_none() && !is_replica_old;
        match (&self.attached, is_wanted) {
            (None, true) => self.attach(),
            (Some(_), false) if self.may_detach() => self.detach(),
            _ => {}
        }
    }

    /// A replica without programs lives by this participant, and so do the messages in it.
    fn may_detach(&self) -> bool {
        match self.settings.end {
            // What was taken is sent again without the link.
            BridgeEnd::Home => true,
            BridgeEnd::Far => self.peers > 0 || self.has_other_shape(),
        }
    }

    /// Whether the link now has a different shape than the replica.
    fn has_other_shape(&self) -> bool {
        let shape = self.other.as_ref().and_then(|other| other.status.shape.as_ref());
        shape.is_some() && self.attached.as_ref().is_some_and(|attached| attached.shape.as_ref() != shape)
    }

    fn leave_link(&mut self) {
        self.inbox.set_waiter(None);
        self.attached = None;
        self.posts.clear();
        self.posted = 0;
    }

    fn detach(&mut self) {
        self.leave_link();
        info!(link = %self.settings.link, node = self.settings.node, "detached: the other side has no participants");
    }

    fn look_at_link(&mut self) {
        let opposite = self.settings.end.opposite();
        let count = |of: usize| u32::try_from(of).unwrap_or(u32::MAX);
        if let Some(attached) = &self.attached {
            let peers = attached.link.participants().filter(|peer| peer.word.side() == opposite).count();
            self.peers = count(peers);
            // An evicted participant of a link without messages learns it here.
            if let Err(error) = attached.link.wait(Some(Duration::ZERO)) {
                self.complain(format!("the link failed: {error}"));
                self.leave_link();
            }
            return;
        }
        let view = View::open(&self.settings.dir, &self.settings.link);
        if let Err(error) = &view
            && !matches!(error.kind(), ErrorKind::NotFound { .. })
        {
            self.complain(format!("cannot read the link: {error}"));
        }
        let seats = view.as_ref().map(View::seats).unwrap_or_default();
        let is_peer = |seat: &&shmesh::inspect::SeatView| {
            seat.participant.word.side() == opposite && seat.liveness != Liveness::Dead
        };
        self.peers = count(seats.iter().filter(is_peer).count());
        if self.settings.end == BridgeEnd::Home {
            self.shape = view.ok().map(|view| view.config()).and_then(|config| self.checked(config));
            if let Some(shape) = &self.shape {
                set_limits(&mut self.sender, &mut self.receiver, &self.inbox, shape);
            }
        }
    }

    /// The shape, if a bridge can carry the link.
    fn checked(&mut self, config: LinkConfig) -> Option<WireShape> {
        let name = config.name.clone();
        if let Some(pool) = config.device_pool() {
            self.complain(format!(
                "link {name} has the pool {} in device memory, which no bridge carries: use a link without it between nodes",
                pool.name()
            ));
            return None;
        }
        if config.request_window > 0 {
            self.complain(format!(
                "link {name} has requests, which no bridge carries yet: use two links with messages between nodes"
            ));
            return None;
        }
        Some(WireShape(config))
    }

    fn attach(&mut self) {
        let settings = &self.settings;
        let options = LinkOptions::new().dir(&settings.dir).timeout(Duration::from_secs(1));
        let opened = match settings.end {
            BridgeEnd::Home if self.shape.is_none() => return,
            BridgeEnd::Home => options.attach(settings.link.as_str(), Side::Secondary),
            BridgeEnd::Far => {
                let shape = self.other.as_ref().and_then(|other| other.status.shape.as_ref());
                let Some(WireShape(config)) = shape else { return };
                options.create(&LinkConfig {
                    name: settings.link.clone(),
                    file_mode: settings.file_mode,
                    ..config.clone()
                })
            }
        };
        match opened {
            Ok(link) => {
                if let Some(error) = self.second_receiver(&link) {
                    return self.complain(error);
                }
                let base = self.base_of(&link);
                let shape = self.other.as_ref().and_then(|other| other.status.shape.clone());
                let waiter = Arc::new(link.waiter());
                self.inbox.set_waiter(Some(Arc::clone(&waiter)));
                let has_notification = link.notify().is_ok();
                self.attached = Some(LinkHandle { link, waiter, base, shape, has_notification });
                info!(link = %self.settings.link, node = self.settings.node, "attached");
                self.last_complaint.clear();
                self.look_at_link();
            }
            Err(error) => self.complain(format!("cannot attach: {error}")),
        }
    }

    /// Why another session of this process keeps this one from the link, which has one receiver.
    fn second_receiver(&self, link: &Link) -> Option<String> {
        let WireShape(shape) = self.shape.as_ref().filter(|_| self.settings.end == BridgeEnd::Home)?;
        let is_single = shape.ring_mode == RingMode::Spsc || shape.receivers == Receivers::One;
        let mut others = link.participants().filter(|other| {
            other.word.side() == Side::Secondary
                && other.word.pid() == std::process::id()
                && other.seat != link.seat()
        });
        (is_single && others.next().is_some()).then(|| {
            format!(
                "link {} has one receiver, and another far node has it: use ring mode mpmc or broadcast, or one far node",
                self.settings.link
            )
        })
    }

    /// For a broadcast ring: with which position the numbers begin. It stays the same for as long as the link exists, so that what the
    /// ring passed over while this bridge was away is counted.
    fn base_of(&self, link: &Link) -> Option<u64> {
        let position = link.position()?;
        let epoch = View::open(&self.settings.dir, &self.settings.link).ok()?.epoch();
        Some(self.journal.base(epoch).unwrap_or_else(|| {
            let base = position.wrapping_sub(self.sender.next());
            self.journal.set_base(epoch, base);
            base
        }))
    }

    /// Reports to the receivers of the link what is lost, before they get the next message.
    fn report_lost(&self) {
        let lost = self.journal.unreported();
        if let Some(attached) = self.attached.as_ref().filter(|_| lost > 0) {
            attached.link.report_lost(lost);
            self.journal.reported();
        }
    }

    /// Passes what was received to the link.
    fn deliver(&mut self) -> Result<(), Error> {
        let blocked = self.blocked.take();
        let mut delivered = 0_u64;
        let mut complaint = None;
        self.report_lost();
        while let (Some(attached), Some(received)) = (&self.attached, self.receiver.front()) {
            let number = received.head.number;
            if received.is_done {
                self.journal.passed(number);
                self.receiver.pop();
                continue;
            }
            let pieces = [received.frame()];
            let parts = PartBytes::behind_head(&pieces);
            match send(&attached.link, &self.journal, &self.counts, &received.head, parts) {
                Ok(()) => delivered += 1,
                Err(error) if error.lacks_room() => {
                    self.blocked = blocked.filter(|_| delivered == 0).or_else(|| Some(Instant::now()));
                    break;
                }
                Err(error) if is_evicted(&error) => {
                    if self.journal.is_done(number) {
                        self.receiver.pop();
                    }
                    return Err(error);
                }
                Err(error) => {
                    // The other side's link has another shape.
                    complaint = Some(format!("a message was dropped: {error}"));
                    self.counts.lost.inc();
                    self.journal.lost(1);
                    self.journal.passed(number);
                    self.report_lost();
                }
            }
            self.receiver.pop();
        }
        // A program that waits for a post receives nothing until it comes, and a post may be behind more messages than have room.
        if let Some(attached) = &self.attached
            && self.blocked.is_some_and(|since| since.elapsed() >= POST_AFTER)
            && self.receiver.take_post()
        {
            self.blocked = Some(Instant::now());
            attached.link.post()?;
        }
        if let Some(attached) =
            self.attached.as_ref().filter(|attached| delivered > 0 && attached.has_notification)
        {
            attached.link.notify()?;
        }
        if delivered > 0 {
            self.inbox.set_waiting(self.receiver.waiting_bytes());
        }
        if let Some(complaint) = complaint {
            self.complain(complaint);
        }
        Ok(())
    }

    /// Takes messages from the link, and sends them.
    fn take(&mut self) -> Result<(), Error> {
        let Some(to) = self.may_take() else { return Ok(()) };
        let Some(attached) = &self.attached else { return Ok(()) };
        let mut failure = None;
        if self.received() + 1 == self.sender.next() {
            // After a pause nothing is late yet.
            self.received_at = Instant::now();
        }
        loop {
            // Before each message: one that is noticed later than its neighbours could be behind more messages than have room, and
            // then a program that waits for it receives none of them.
            while attached.has_notification
                && (self.posted > 0 || attached.link.wait_tti(Some(Duration::ZERO))?)
            {
                self.posted = self.posted.saturating_sub(1);
                // What was sent before the post comes before it.
                let after = self.taken + attached.link.queued() as u64;
                match self.posts.back_mut() {
                    Some((last, count)) if *last == after => *count += 1,
                    _ => self.posts.push_back((after, 1)),
                }
            }
            if !self.sender.has_room() {
                break;
            }
            // What a broadcast ring has passed over is left out of the numbers, too.
            let place = attached.link.position().zip(attached.base);
            let passed_over = place.map_or(0, |(position, base)| {
                position.wrapping_sub(base).wrapping_sub(self.sender.next()).cast_signed()
            });
            self.waits_to_skip = passed_over > 0;
            if self.waits_to_skip {
                if !self.sender.is_drained() {
                    break;
                }
                self.waits_to_skip = false;
                self.sender.skip(passed_over.unsigned_abs());
                self.journal.taking(self.sender.next() - 1);
                self.must_tell = true;
            }
            if passed_over < 0 {
                // The last of the past, which a newcomer gets once more.
                if attached.link.receive()?.is_none() {
                    break;
                }
                continue;
            }
            // Other receivers may have taken what it waits for.
            let is_due = |after: u64| after <= self.taken || !attached.link.has_message();
            if let Some((_, count)) = self.posts.front_mut().filter(|(after, _)| is_due(*after)) {
                *count -= 1;
                if *count == 0 {
                    self.posts.pop_front();
                }
                self.journal.taking(self.sender.next());
                let frame = self.sender.add(ItemHead::new(ItemKind::Post, to), |_| {});
                put(&*self.outlet, &self.settings.node, frame);
                continue;
            }
            if !attached.link.has_message() {
                break;
            }
            self.journal.taking(self.sender.next());
            match attached.link.receive() {
                Ok(Some(message)) => {
                    let (msg, data) = (message.msg_shared(), message.data_shared());
                    let kind = if message.is_inline() { ItemKind::Inline } else { ItemKind::Pooled };
                    let head = ItemHead {
                        msg_id: message.msg_id(),
                        cell_id: message.cell_id(),
                        pool: message.data_pool(),
                        msg_len: length(msg.len()),
                        data_len: length(data.len()),
                        ..ItemHead::new(kind, to)
                    };
                    let frame = self.sender.add(head, |frame| {
                        append(frame, msg);
                        append(frame, data);
                    });
                    put(&*self.outlet, &self.settings.node, frame);
                    self.taken += 1;
                    self.counts.sent.inc();
                    self.journal.sent(head.bytes());
                }
                Ok(None) => {
                    self.journal.taking(self.sender.next() - 1);
                    break;
                }
                Err(error) => {
                    self.journal.taking(self.sender.next() - 1);
                    if is_evicted(&error) {
                        return Err(error);
                    }
                    failure = Some(error);
                    break;
                }
            }
        }
        if let Some(error) = failure {
            self.paused = Some(Instant::now());
            self.complain(error.to_string());
        }
        Ok(())
    }

    /// The process to which messages may be sent: not while no program there would get them.
    fn may_take(&self) -> Option<u64> {
        let is_paused = self.paused.is_some_and(|since| since.elapsed() < PAUSE);
        let other = self.other.as_ref().filter(|other| other.status.peers > 0)?;
        (self.stopping.is_none() && !is_paused && self.is_connected()).then_some(other.status.instance)
    }

    // ---- the other side ----

    fn send_again_if_stalled(&mut self) {
        let is_stalled = !self.sender.is_drained()
            && self.received() + 1 < self.sender.next()
            && self.received_at.max(self.sent_again.0).elapsed() >= self.sent_again.1
            && self.is_connected();
        if is_stalled {
            self.sent_again.1 = (self.sent_again.1 * 2).min(AGAIN_AFTER_MAX);
            self.send_again();
        }
    }

    /// Twice the time that a message and its acknowledgement take.
    fn again_after(&self) -> Duration {
        let round_trip = self.round_trip.unwrap_or_default();
        (2 * (round_trip + TELL_AFTER)).clamp(AGAIN_AFTER, AGAIN_AFTER_MAX)
    }

    /// The last number that the other side has received.
    fn received(&self) -> u64 {
        let knows = |other: &&Other| other.status.known_stream == self.sender.stream();
        self.other.as_ref().filter(knows).map_or(0, |other| other.status.received)
    }

    /// The process of the other bridge; 0: none yet.
    fn other_instance(&self) -> u64 {
        self.other.as_ref().map_or(0, |other| other.status.instance)
    }

    fn send_again(&mut self) {
        self.sent_again.0 = Instant::now();
        let (to, received) = (self.other_instance(), self.received());
        for frame in self.sender.again(to, received) {
            put(&*self.outlet, &self.settings.node, frame);
            self.counts.again.inc();
        }
    }

    /// Microseconds since this session began, and never 0.
    fn clock_us(&self) -> u64 {
        micros(self.started.elapsed()) + 1
    }

    fn status(&self, again: bool) -> Status {
        Status {
            reads: self.settings.versions,
            instance: self.instance,
            to: self.other_instance(),
            stream: self.sender.stream(),
            oldest: self.sender.oldest(),
            next: self.sender.next(),
            known_stream: self.receiver.stream(),
            delivered: self.receiver.delivered(),
            received: self.receiver.received(),
            limit: self.receiver.limit(),
            clock_us: self.clock_us(),
            echo_us: self.other_clock.0,
            echo_age_us: micros(self.other_clock.1.elapsed()),
            again,
            peers: self.told_peers(),
            is_drained: self.is_drained(),
            shape: self.shape.clone(),
        }
    }

    fn tell_if_changed(&mut self) {
        let Some((at, told)) = &self.told else { return self.tell() };
        let is_due = self.must_tell
            || self.is_window_used()
            || at.elapsed() >= self.settings.peer_timeout / 5
            || (at.elapsed() >= TELL_AFTER && self.has_changed(told));
        if is_due {
            self.tell();
        }
    }

    /// Whether so much of the window was delivered that the sender may soon have to wait.
    fn is_window_used(&self) -> bool {
        let quarter = (self.receiver.limit() - self.receiver.delivered()) / 4;
        self.told.as_ref().is_some_and(|(_, told)| self.receiver.delivered() > told.delivered + quarter)
    }

    /// Whether there is news. `next` and `oldest` are none: the messages tell them themselves.
    fn has_changed(&self, told: &Status) -> bool {
        told.to != self.other_instance()
            || told.known_stream != self.receiver.stream()
            || told.delivered != self.receiver.delivered()
            || told.received != self.receiver.received()
            || told.limit != self.receiver.limit()
            || told.peers != self.told_peers()
            || told.is_drained != self.is_drained()
            || told.shape != self.shape
    }

    /// The participants that the other side stands for.
    fn told_peers(&self) -> u32 {
        if self.stopping.is_some() { 0 } else { self.peers }
    }

    /// Whether nothing is left to be sent. What waits for programs that are not there is not sent.
    fn is_drained(&self) -> bool {
        let queued = || self.attached.as_ref().is_some_and(|attached| attached.link.has_message());
        self.sender.is_drained() && !(self.may_take().is_some() && queued())
    }

    fn tell(&mut self) {
        let asks = std::mem::take(&mut self.asks);
        let status = self.status(asks);
        self.must_tell = false;
        put(&*self.outlet, &self.settings.node, &Arc::new(status.encode(self.sender.version())));
        self.told = Some((Instant::now(), status));
        let (at, bytes) = self.rated;
        let elapsed = at.elapsed();
        if elapsed >= RATE_OVER {
            self.rated = (Instant::now(), self.journal.bytes());
            let crossed = u128::from(self.rated.1.wrapping_sub(bytes));
            let rate = crossed * 1_000_000 / elapsed.as_micros().max(1);
            self.journal.set_rate(u64::try_from(rate).unwrap_or(u64::MAX));
        }
        self.journal.tell(self.is_connected(), self.settings.peer_timeout, self.round_trip);
    }

    fn plan_wait(&mut self) -> (Duration, Option<Arc<Waiter>>) {
        let mut timeout = match (&self.attached, self.looked_at) {
            (None, Some(at)) => self.look_every.saturating_sub(at.elapsed()),
            _ => self.settings.peer_timeout / 5,
        };
        if let Some((at, told)) = &self.told {
            self.is_tell_due = self.has_changed(told);
            let next = if self.is_tell_due { TELL_AFTER } else { self.settings.peer_timeout / 5 };
            timeout = timeout.min(next.saturating_sub(at.elapsed()));
        }
        if !self.sender.is_drained() || self.stopping.is_some() {
            timeout = timeout.min(AGAIN_AFTER / 2);
        }
        if self.paused.is_some_and(|since| since.elapsed() < PAUSE) {
            timeout = timeout.min(PAUSE);
        }
        if self.blocked.is_some() {
            timeout = timeout.min(ROOM_EVERY);
        }
        let Some(attached) = &self.attached else { return (timeout, None) };
        if attached.has_notification {
            return (timeout, Some(Arc::clone(&attached.waiter)));
        }
        let has_work = attached.link.has_message() && self.sender.has_room() && self.may_take().is_some();
        (if has_work { Duration::ZERO } else { timeout.min(ROOM_EVERY) }, None)
    }

    /// Whether the link has something to do for the thread, which waits on it.
    fn is_ready(&mut self) -> bool {
        // The engine's thread may have made the wait too long.
        let Some(attached) = &self.attached else { return true };
        if attached.link.wait_tti(Some(Duration::ZERO)).unwrap_or(false) {
            self.posted += 1;
            return true;
        }
        let may_take = self.sender.has_room() && !self.waits_to_skip && self.may_take().is_some();
        (may_take && attached.link.has_message()) || attached.link.has_event()
    }
}

/// Gives a frame to the engine. If that fails, it is lost, and sent again as others that are lost.
fn put(outlet: &dyn Outlet, node: &str, frame: &SentFrame) {
    if let Err(error) = outlet.put(node, frame) {
        debug!(node, "cannot send a frame: {error:#}");
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX - 1)
}

/// A length of a part of a message: no buffer is larger than 2 GiB.
fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

fn append(frame: &mut Vec<u8>, bytes: SharedBytes<'_>) {
    let start = frame.len();
    frame.resize(start + bytes.len(), 0);
    bytes.copy_to(&mut frame[start..]);
}

/// Lets as many messages be kept for the other side, and wait here, as a link of this shape may have, whichever part of the bridge has
/// them.
fn set_limits(
    sender: &mut Sender,
    receiver: &mut Receiver,
    inbox: &FrameInbox,
    WireShape(config): &WireShape,
) {
    let window = u64::from(config.ring_len).clamp(1, WINDOW_MAX);
    let size = |pool: PoolId| config.pool(pool).buf_size_bytes as usize;
    let data = PoolId::ALL.into_iter().filter(|pool| *pool != PoolId::CpuMsg).map(size).max();
    let largest = size(PoolId::CpuMsg) + data.unwrap_or(0) + ITEM_HEAD_BYTES + FRAME_OVERHEAD;
    let messages = usize::try_from(window).unwrap_or(usize::MAX).saturating_mul(largest);
    sender.set_window(window);
    receiver.set_window(window);
    inbox.set_limit(messages.min(MAX_BYTES + largest));
}

/// Sends a message on the link, writes down when it is sent, and counts it. A participant that is evicted meanwhile does not know whether it
/// was sent: then it counts as lost, and is [done with](Journal::is_done).
fn send(
    link: &Link,
    journal: &Journal,
    counts: &BridgeCounts,
    head: &ItemHead,
    mut parts: PartBytes<'_>,
) -> Result<(), Error> {
    let (msg_len, data_len) = (head.msg_len as usize, head.data_len as usize);
    let sent = match head.kind {
        ItemKind::Post => {
            journal.delivering(head.number);
            link.post()
        }
        ItemKind::Inline => {
            let mut whole = Vec::new();
            let msg = match parts.take(msg_len) {
                Some(msg) => msg,
                None => {
                    whole.resize(msg_len, 0);
                    parts.copy_to(&mut whole);
                    &whole
                }
            };
            journal.delivering(head.number);
            link.send_inline(head.msg_id, head.cell_id, msg)
        }
        ItemKind::Pooled => {
            let mut loan = match head.pool {
                None => link.loan()?,
                Some(pool) => link.loan_with(pool)?,
            };
            parts.copy_to(loan.resize_msg(msg_len)?);
            if head.pool.is_some() {
                parts.copy_to(loan.resize_data(data_len)?);
            }
            let loan = loan.with_msg_id(head.msg_id).with_cell_id(head.cell_id);
            journal.delivering(head.number);
            loan.send().map_err(Error::from)
        }
    };
    match &sent {
        Ok(()) => {
            counts.received.inc();
            journal.received(head.bytes());
            journal.done(head.number);
        }
        // It may have been sent before: it is not sent again.
        Err(error) if is_evicted(error) => {
            counts.lost.inc();
            journal.lost(1);
            journal.done(head.number);
        }
        Err(_) => journal.not_delivered(head.number),
    }
    sent
}

fn is_evicted(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Evicted { .. })
}

/// A number that no other process or stream has; never 0, which means that there is none.
fn random() -> Result<u64> {
    Ok(u64::from_ne_bytes(file::random().context("cannot read /dev/urandom")?) | 1)
}

#[cfg(test)]
mod tests {
    use shmesh::config::PoolConfig;

    use super::*;
    use crate::engine::{Engine, Fate, MemoryEngine};
    use crate::frame::VERSIONS;

    /// A frame of so many bytes that has a message, as far as its kind says.
    fn item(bytes: usize) -> Vec<u8> {
        let mut frame = Vec::new();
        ItemHead::new(ItemKind::Inline, 0).encode(1, &mut frame);
        frame.resize(bytes, 0);
        assert!(is_item(&frame));
        frame
    }

    #[test]
    fn frames_that_wait_for_the_link_count_with_those_that_wait_for_the_session() {
        let inbox = FrameInbox::default();
        let fill = || {
            (0..100).for_each(|_| {
                let _ = inbox.add(item(100 - FRAME_OVERHEAD));
            })
        };
        inbox.set_limit(1000);
        fill();
        let taken: Vec<_> = std::iter::from_fn(|| inbox.pop(0)).collect();
        assert_eq!(taken.len(), 10);
        // The tenth is with the session, and seven wait for the link.
        inbox.set_waiting(700);
        fill();
        assert_eq!(inbox.lock().item_bytes, 300);
        assert!(inbox.pop(700).is_some());
        fill();
        assert_eq!(inbox.lock().frames.len(), 2, "one is with the session");
    }

    /// A session with a far node, from which no status has come.
    fn home_session(dir: &tempfile::TempDir, peer_timeout: Duration, counts: BridgeCounts) -> PeerSession {
        let settings = SessionSettings {
            end: BridgeEnd::Home,
            dir: dir.path().to_owned(),
            link: "fronthaul".parse().unwrap(),
            node: "edge".to_owned(),
            peer_timeout,
            file_mode: 0o600,
            versions: VERSIONS,
            identity: None,
        };
        let outlet = MemoryEngine::new(|| Fate::Lost).open_home("fronthaul", Arc::new(|_, _| {})).unwrap();
        PeerSession::new(settings, Arc::from(outlet), counts).unwrap()
    }

    const SHORT: Duration = Duration::from_millis(100);

    #[test]
    fn journal_stays_if_the_node_has_sent_messages() {
        for (next, is_removed) in [(1, true), (2, false)] {
            let dir = tempfile::tempdir_in("/dev/shm").unwrap();
            let session = home_session(&dir, SHORT, BridgeCounts::default());
            let mut state = session.lock().take().unwrap();
            let heard = Instant::now() - state.settings.peer_timeout;
            state.other = Some(Other { status: Status { next, ..Status::new(VERSIONS, 1, 2) }, heard });
            let journal = state.settings.journal();
            assert_eq!((state.remove_unused_journal(), !journal.exists()), (is_removed, is_removed));
        }
    }

    #[test]
    fn silent_node_makes_room_later_if_messages_are_kept_for_it() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let session = home_session(&dir, SHORT, BridgeCounts::default());
        let change = |change: &dyn Fn(&mut SessionState)| {
            change(session.lock().as_mut().unwrap());
            session.spare_for().is_some()
        };
        assert!(change(&|state| state.started -= Duration::from_secs(1)));
        assert!(!change(&|state| {
            state.sender.add(ItemHead::new(ItemKind::Post, 0), |_| ());
        }));
        assert!(change(&|state| state.started -= state.settings.peer_timeout * FORGOTTEN_AFTER));
    }

    /// While the session's thread is busy, a sender that ignores the limits fills no more memory than a sender that follows them.
    #[test]
    fn busy_session_keeps_what_the_link_may_have() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut config = LinkConfig::new("fronthaul".parse().unwrap());
        (config.ring_len, config.ring_mode) = (8, RingMode::Mpmc);
        config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 4096, pool_len: 64 };
        config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 65_536, pool_len: 64 };
        let _link = LinkOptions::new().dir(dir.path()).create(&config).unwrap();
        let counts = BridgeCounts::default();
        let session = home_session(&dir, Duration::from_secs(10), counts.clone());
        let frames = [item(4096), item(65_536), vec![0; 4096]];
        let flood = || {
            let refused = counts.refused.get();
            (0..10_000).for_each(|_| session.push(&[&frames[0]]));
            (0..10).for_each(|_| session.push(&[&frames[1]]));
            assert!(counts.refused.get() > refused, "the others are counted");
            // There is room for statuses.
            (0..10_000).for_each(|_| session.push(&[&frames[2]]));
            let inbox = session.inbox.lock();
            assert!((4096..=STATUSES_BYTES).contains(&inbox.status_bytes), "{}", inbox.status_bytes);
            inbox.item_bytes
        };
        let busy = session.lock();
        // The link is not known yet.
        assert!(flood() <= STATUSES_BYTES);
        drop(busy);
        session.step(&AtomicBool::new(false)).unwrap();
        let _busy = session.lock();
        let bytes = flood();
        let messages = 8 * (4096 + 65_536);
        assert!((messages..messages + 32 * 1024).contains(&bytes), "{bytes}");
    }
}
