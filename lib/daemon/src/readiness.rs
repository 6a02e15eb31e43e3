//! Readiness of a daemon: ready when all latches are open.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The set of conditions that a daemon waits for before it is ready.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    latches: Arc<Mutex<Latches>>,
}

/// A condition for readiness. If dropped without being opened, the daemon stays unready.
#[derive(Debug)]
pub struct Latch {
    latches: Arc<Mutex<Latches>>,
    name: Cow<'static, str>,
}

type Latches = BTreeMap<Cow<'static, str>, State>;

#[derive(Debug)]
struct State {
    is_open: bool,
    /// Whether it has been open, or has failed, since the start.
    is_started: bool,
    /// The reason why it is closed; empty if none was given.
    reason: String,
}

impl State {
    fn shown(&self, name: &str) -> String {
        if self.reason.is_empty() { name.to_owned() } else { format!("{name} ({})", self.reason) }
    }
}

fn locked(latches: &Mutex<Latches>) -> MutexGuard<'_, Latches> {
    // Each state is replaced as a whole, so a panic leaves none half written.
    latches.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Readiness {
    /// Adds a condition to wait for.
    #[must_use]
    pub fn latch(&self, name: impl Into<Cow<'static, str>>) -> Latch {
        let latch = Latch { latches: Arc::clone(&self.latches), name: name.into() };
        latch.set(State { is_open: false, is_started: false, reason: String::new() });
        latch
    }

    /// Returns the closed latches with the reason for each, in alphabetical order.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        self.those(|state| !state.is_open)
    }

    /// Returns the latches that have neither opened nor failed since the start: until then, the daemon is starting.
    #[must_use]
    pub fn starting(&self) -> Vec<String> {
        self.those(|state| !state.is_started)
    }

    fn those(&self, which: impl Fn(&State) -> bool) -> Vec<String> {
        let latches = locked(&self.latches);
        latches.iter().filter(|(_, state)| which(state)).map(|(name, state)| state.shown(name)).collect()
    }

    /// Whether all latches are open.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        locked(&self.latches).values().all(|state| state.is_open)
    }
}

impl Latch {
    /// Marks the condition as fulfilled.
    pub fn open(&self) {
        self.set(State { is_open: true, is_started: true, reason: String::new() });
    }

    /// Marks the condition as failed, with the reason. It may be opened later.
    pub fn fail(&self, reason: impl Into<String>) {
        self.set(State { is_open: false, is_started: true, reason: reason.into() });
    }

    /// Gives the reason why the condition is not fulfilled yet. The daemon is still starting.
    pub fn delay(&self, reason: impl Into<String>) {
        let mut latches = locked(&self.latches);
        if let Some(state) = latches.get_mut(&self.name) {
            state.is_open = false;
            state.reason = reason.into();
        }
    }

    fn set(&self, state: State) {
        locked(&self.latches).insert(self.name.clone(), state);
    }
}
