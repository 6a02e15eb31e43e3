//! Counters of answered and refused questions.

use std::cell::Cell;

/// One counter per outcome.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Connections that were accepted.
    pub(crate) connections: Cell<u64>,
    /// Connections refused at the total or per-client limit.
    pub(crate) connections_refused: Cell<u64>,
    /// Failures because no file descriptor was free.
    pub(crate) exhausted: Cell<u64>,
    /// Questions answered with an identity.
    pub(crate) identified: Cell<u64>,
    /// Questions that could not be parsed.
    pub(crate) bad_questions: Cell<u64>,
    /// Questions with a wrong descriptor.
    pub(crate) bad_descriptors: Cell<u64>,
    /// Questions about processes that had exited.
    pub(crate) gone: Cell<u64>,
    /// Questions about processes in other pid namespaces.
    pub(crate) out_of_sight: Cell<u64>,
    /// Questions that could not be answered.
    pub(crate) unavailable: Cell<u64>,
    /// Connections closed because the client was idle or did not read its answer.
    pub(crate) too_slow: Cell<u64>,
}

impl Counters {
    /// Adds one to a counter.
    pub(crate) fn add(counter: &Cell<u64>) {
        counter.set(counter.get().wrapping_add(1));
    }

    /// Returns the sum of all counters, to detect activity.
    pub(crate) fn all(&self) -> u64 {
        [
            &self.connections,
            &self.connections_refused,
            &self.exhausted,
            &self.identified,
            &self.bad_questions,
            &self.bad_descriptors,
            &self.gone,
            &self.out_of_sight,
            &self.unavailable,
            &self.too_slow,
        ]
        .iter()
        .fold(0, |sum, counter| sum.wrapping_add(counter.get()))
    }

    /// Logs all counters in one line.
    pub(crate) fn log(&self, open: usize, when: &'static str) {
        tracing::info!(
            open,
            connections = self.connections.get(),
            connections_refused = self.connections_refused.get(),
            exhausted = self.exhausted.get(),
            identified = self.identified.get(),
            bad_questions = self.bad_questions.get(),
            bad_descriptors = self.bad_descriptors.get(),
            gone = self.gone.get(),
            out_of_sight = self.out_of_sight.get(),
            unavailable = self.unavailable.get(),
            too_slow = self.too_slow.get(),
            "{when}"
        );
    }
}
