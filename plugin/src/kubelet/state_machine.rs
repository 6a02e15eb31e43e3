//! Decides when to listen, register and wait. It has no clock, socket or kubelet: events go in, actions come
//! out, so tests can simulate thousands of days per second.
//!
//! Rules:
//!
//! 1. Our socket disappeared: listen again under a new name. A starting kubelet deletes all sockets.
//! 2. The kubelet's socket changed or appeared: register at once.
//! 3. All `ListAndWatch` streams ended: register again after a short random delay. Up to version 1.36 a
//!    kubelet drops a new registration when the old stream ends, and does not report it.
//! 4. Registered, but no stream was opened: register again.
//! 5. Never register while a stream of this kubelet is open, because two registrations cause that race.
//! 6. Owner again, after another instance of the plugin served too: register, although a stream is open, because the kubelet may
//!    have forgotten it. Between `Released` and `Owned`, do nothing: the other instance registers.
//! 7. Retry failures with a growing delay up to [`MAX_BACKOFF`].
//!
//! In discovery mode (`pluginsRegistry`), listening again under the same name replaces registering.

use std::time::Duration;

/// Time since the creation of the state machine.
pub(crate) type Moment = Duration;

/// Interval for polling the sockets.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum delay after a stream ended, while the kubelet still drops our registration.
const MIN_BACKOFF: Duration = Duration::from_millis(200);
/// Maximum delay, before jitter.
pub(crate) const MAX_BACKOFF: Duration = Duration::from_millis(1_500);
/// Maximum delay in discovery mode, in which the kubelet polls once a second.
const MAX_DISCOVERY_BACKOFF: Duration = Duration::from_secs(10);
/// Timeout for the stream after a registration; the kubelet opens it immediately.
const STREAM_TIMEOUT: Duration = Duration::from_millis(1_500);
/// Timeout of a registration; the kubelet itself waits ten seconds for us.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(12);
/// A stream that lived this long resets the backoff.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// Identity of a socket file. Inode numbers are reused, change times are not.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct FileId {
    pub(crate) dev: u64,
    pub(crate) ino: u64,
    pub(crate) changed: (i64, i64),
}

/// Whether we register or the kubelet discovers us.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mode {
    /// We register at the kubelet's socket.
    Register,
    /// The kubelet discovers our socket.
    Discovered,
}

/// Input of the state machine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Event {
    /// The sockets were polled: the kubelet's socket, and whether ours still exists.
    Polled { kubelet: Option<FileId>, ours: bool },
    /// We listen on a new socket; all previous streams are closed.
    Listening,
    /// Listening on a socket failed.
    NotListening,
    /// The registration attempt with this number succeeded.
    Registered(u64),
    /// The registration attempt with this number failed.
    NotRegistered(u64),
    /// A `ListAndWatch` stream was opened.
    StreamBegan,
    /// A `ListAndWatch` stream was closed.
    StreamEnded,
    /// Another instance of the plugin is about to register.
    Released,
    /// This is the only instance of the plugin again.
    Owned,
}

/// Output of the state machine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Action {
    /// Listen on a new socket instead of the current one.
    Listen,
    /// Register, with the number of the attempt. Earlier attempts become irrelevant.
    Register(u64),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ListenState {
    Closed,
    /// Listening was requested and not yet confirmed.
    Opening,
    Open,
}

/// Registration state of one resource; see the module.
#[derive(Clone, Debug)]
pub(crate) struct StateMachine {
    mode: Mode,
    listening: ListenState,
    kubelet: Option<FileId>,
    /// The kubelet with which we are registered, as far as known.
    registered: Option<FileId>,
    /// Number, start and kubelet of the pending attempt.
    attempt: Option<(u64, Moment, FileId)>,
    attempts: u64,
    streams: u32,
    /// Whether another instance of the plugin registers.
    is_released: bool,
    /// The kubelet may have forgotten the registration whose streams are open.
    is_doubtful: bool,
    stream_began: Moment,
    /// Earliest time of the next action.
    next: Moment,
    /// Consecutive failures, for the backoff.
    failures: u32,
    /// State of the random generator, so that a seed determines everything.
    rng_state: u64,
}

impl StateMachine {
    /// Creates a state machine that first listens. `seed` should differ between nodes.
    pub(crate) fn new(mode: Mode, seed: u64) -> Self {
        Self {
            mode,
            listening: ListenState::Closed,
            kubelet: None,
            registered: None,
            attempt: None,
            attempts: 0,
            streams: 0,
            is_released: false,
            is_doubtful: false,
            stream_began: Moment::ZERO,
            next: Moment::ZERO,
            failures: 0,
            rng_state: seed,
        }
    }

    /// Whether the kubelet has our device list.
    pub(crate) fn is_served(&self) -> bool {
        self.streams > 0
    }

    /// Returns when to poll next if no event occurs; [`POLL_INTERVAL`] applies in addition.
    pub(crate) fn wake(&self, now: Moment) -> Option<Moment> {
        let given_up = self.attempt.map(|(_, began, _)| began + REGISTER_TIMEOUT);
        let next = (self.next > now).then_some(self.next);
        given_up.into_iter().chain(next).min()
    }

    /// Processes an event and returns the action to take.
    pub(crate) fn step(&mut self, now: Moment, event: Event) -> Option<Action> {
        match event {
            Event::Polled { kubelet, ours } => self.polled(now, kubelet, ours),
            Event::Listening => {
                self.listening = ListenState::Open;
                let were = std::mem::take(&mut self.streams);
                self.registered = None;
                match self.mode {
                    // The kubelet should see the old stream end before it sees the new socket.
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
                    self.is_doubtful = false;
                    self.next = now + self.with_jitter(STREAM_TIMEOUT);
                }
            }
            Event::NotRegistered(number) => {
                if self.finish(number).is_some() {
                    self.failed(now);
                }
            }
            Event::Released => {
                self.is_released = true;
                self.attempt = None;
            }
            Event::Owned => {
                self.is_released = false;
                self.is_doubtful = true;
                self.next = now;
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
            // A pending attempt went to the old kubelet.
            self.attempt = None;
            if self.mode == Mode::Register {
                self.next = now;
            }
        }
    }

    fn decide(&mut self, now: Moment) -> Option<Action> {
        if self.is_released {
            return None;
        }
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
                if (is_registered && !self.is_doubtful) || self.attempt.is_some() {
                    return None;
                }
                Some(self.register(now, with))
            }
            Mode::Discovered if self.streams == 0 => {
                self.failures += 1;
                Some(self.listen())
            }
            Mode::Discovered if self.is_doubtful && self.attempt.is_none() => {
                let with = self.kubelet?;
                Some(self.register(now, with))
            }
            Mode::Discovered => None,
        }
    }

    fn register(&mut self, now: Moment, with: FileId) -> Action {
        self.attempts += 1;
        self.attempt = Some((self.attempts, now, with));
        Action::Register(self.attempts)
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

    /// Adds up to a third of random delay, so that nodes do not act in lockstep.
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
