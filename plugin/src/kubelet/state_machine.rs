//! When to listen, when to register, when to wait. No clock, no socket, no kubelet: what happened goes in, what to do comes
//! out, so that thousands of days can be tried in a second.
//!
//! The rules:
//!
//! 1. Our socket is gone: listen again, under a new name. A kubelet deletes all sockets when it starts.
//! 2. The kubelet's socket is another one, or is there at last: register at once.
//! 3. All `ListAndWatch` streams have ended while we live: register again after a short while that differs by chance. Up to
//!    1.36 a kubelet drops the new registration when the old stream ends, and nobody else would notice.
//! 4. Registered, and no stream comes: register again.
//! 5. Never register while a stream of this kubelet is open: two at once are what makes the race.
//! 6. What fails is tried again, ever less often, and never less often than [`MAX_BACKOFF`].
//!
//! Where the kubelet finds us (`pluginsRegistry`), to listen again under the same name stands for registering.

use std::time::Duration;

/// A moment, after the machine was made.
pub(crate) type Moment = Duration;

/// Between two looks at the sockets.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The least that is waited after a stream has ended: the kubelet is then still forgetting us.
const MIN_BACKOFF: Duration = Duration::from_millis(200);
/// The most that is waited, but for chance.
pub(crate) const MAX_BACKOFF: Duration = Duration::from_millis(1_500);
/// The most where the kubelet finds us: it looks once a second.
const MAX_DISCOVERY_BACKOFF: Duration = Duration::from_secs(10);
/// How long after a registration the stream may take. The kubelet opens it at once.
const STREAM_TIMEOUT: Duration = Duration::from_millis(1_500);
/// How long a registration may take: the kubelet itself waits ten seconds for us.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(12);
/// A stream that lived so long was a good one.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// Which file a socket is. Inode numbers are used again, times of change are not.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct FileId {
    pub(crate) dev: u64,
    pub(crate) ino: u64,
    pub(crate) changed: (i64, i64),
}

/// Who begins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mode {
    /// We register.
    Register,
    /// The kubelet finds us.
    Discovered,
}

/// What happened.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Event {
    /// A look at the sockets: the kubelet's, and whether ours is still there.
    Polled { kubelet: Option<FileId>, ours: bool },
    /// We listen (again). All streams of before are over.
    Listening,
    /// We cannot listen.
    NotListening,
    /// The attempt of this number went well.
    Registered(u64),
    /// The attempt of this number did not.
    NotRegistered(u64),
    /// A `ListAndWatch` stream began.
    StreamBegan,
    /// One ended.
    StreamEnded,
}

/// What to do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Action {
    /// Listen, instead of where we listened before.
    Listen,
    /// Register; this is the attempt's number. An earlier attempt that goes on counts no more.
    Register(u64),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ListenState {
    Closed,
    /// Told to listen, and not heard of yet.
    Opening,
    Open,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct StateMachine {
    mode: Mode,
    listening: ListenState,
    kubelet: Option<FileId>,
    /// Which kubelet we are registered with, as far as we know.
    registered: Option<FileId>,
    /// The attempt under way, when it began, and with whom.
    attempt: Option<(u64, Moment, FileId)>,
    attempts: u64,
    streams: u32,
    stream_began: Moment,
    /// Not before then.
    next: Moment,
    /// In a row.
    failures: u32,
    /// Where chance comes from: a state of its own, so that a seed says it all.
    rng_state: u64,
}

impl StateMachine {
    /// A machine that listens first. `seed` should differ between nodes.
    pub(crate) fn new(mode: Mode, seed: u64) -> Self {
        Self {
            mode,
            listening: ListenState::Closed,
            kubelet: None,
            registered: None,
            attempt: None,
            attempts: 0,
            streams: 0,
            stream_began: Moment::ZERO,
            next: Moment::ZERO,
            failures: 0,
            rng_state: seed,
        }
    }

    /// Whether the kubelet has our list.
    pub(crate) fn is_served(&self) -> bool {
        self.streams > 0
    }

    /// When to look, if nothing happens before; a look is made every [`POLL_INTERVAL`] besides.
    pub(crate) fn wake(&self, now: Moment) -> Option<Moment> {
        let given_up = self.attempt.map(|(_, began, _)| began + REGISTER_TIMEOUT);
        let next = (self.next > now).then_some(self.next);
        given_up.into_iter().chain(next).min()
    }

    /// What follows from what happened.
    pub(crate) fn step(&mut self, now: Moment, event: Event) -> Option<Action> {
        match event {
            Event::Polled { kubelet, ours } => self.polled(now, kubelet, ours),
            Event::Listening => {
                self.listening = ListenState::Open;
                let were = std::mem::take(&mut self.streams);
                self.registered = None;
                match self.mode {
                    // The kubelet should see the old stream end before it hears of the new socket.
                    Mode::Register if were > 0 => self.next = now + self.with_jitter(MIN_BACKOFF),
                    Mode::Register => {}
                    Mode::Discovered => {
                        let wait = (STREAM_TIMEOUT * 2)
                            .saturating_mul(1 << self.failures.min(2))
                            .min(MAX_DISCOVERY_BACKOFF);
                        self.next = now + self.with_jitter(wait);
                    }
                }
            }
            Event::NotListening => {
                self.listening = ListenState::Closed;
                self.failed(now);
            }
            Event::Registered(number) => {
                if let Some((_, _, with)) = self.finish(number) {
                    self.registered = Some(with);
                    self.next = now + self.with_jitter(STREAM_TIMEOUT);
                }
            }
            Event::NotRegistered(number) => {
                if self.finish(number).is_some() {
                    self.failed(now);
                }
            }
            Event::StreamBegan => {
                self.streams += 1;
                self.stream_began = now;
            }
            Event::StreamEnded => {
                self.streams = self.streams.saturating_sub(1);
                if self.streams == 0 {
                    if now.saturating_sub(self.stream_began) >= STABLE_AFTER {
                        self.failures = 0;
                    }
                    self.registered = None;
                    self.failed(now);
                }
            }
        }
        self.decide(now)
    }

    fn polled(&mut self, now: Moment, kubelet: Option<FileId>, ours: bool) {
        if self.listening == ListenState::Open && !ours {
            self.listening = ListenState::Closed;
            self.attempt = None;
            self.next = self.next.min(now);
        }
        if kubelet != self.kubelet {
            self.kubelet = kubelet;
            self.failures = 0;
            // One that asks a kubelet that is gone counts no more.
            self.attempt = None;
            if self.mode == Mode::Register {
                self.next = now;
            }
        }
    }

    fn decide(&mut self, now: Moment) -> Option<Action> {
        match self.listening {
            ListenState::Opening => return None,
            ListenState::Closed => {
                return (now >= self.next).then(|| self.listen());
            }
            ListenState::Open => {}
        }
        if self.attempt.is_some_and(|(_, began, _)| now >= began + REGISTER_TIMEOUT) {
            self.attempt = None;
            self.failed(now);
        }
        if now < self.next {
            return None;
        }
        match self.mode {
            Mode::Register => {
                let with = self.kubelet?;
                let is_registered =
                    self.streams > 0 && self.registered.is_none_or(|registered| registered == with);
                if is_registered || self.attempt.is_some() {
                    return None;
                }
                self.attempts += 1;
                self.attempt = Some((self.attempts, now, with));
                Some(Action::Register(self.attempts))
            }
            Mode::Discovered if self.streams == 0 => {
                self.failures += 1;
                Some(self.listen())
            }
            Mode::Discovered => None,
        }
    }

    fn listen(&mut self) -> Action {
        self.listening = ListenState::Opening;
        Action::Listen
    }

    fn finish(&mut self, number: u64) -> Option<(u64, Moment, FileId)> {
        self.attempt.take_if(|(current, ..)| *current == number)
    }

    fn failed(&mut self, now: Moment) {
        let slowest = match self.mode {
            Mode::Register => MAX_BACKOFF,
            Mode::Discovered => MAX_DISCOVERY_BACKOFF,
        };
        let wait = MIN_BACKOFF.saturating_mul(1 << self.failures.min(10)).min(slowest);
        self.failures = self.failures.saturating_add(1);
        self.next = now + self.with_jitter(wait);
    }

    /// So long, and up to a third more: not every node at once.
    fn with_jitter(&mut self, wait: Duration) -> Duration {
        // SplitMix64.
        self.rng_state = self.rng_state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.rng_state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        let thousandth = u32::try_from(mixed % 1000).unwrap_or(0);
        wait + wait / 3 * thousandth / 1000
    }
}
