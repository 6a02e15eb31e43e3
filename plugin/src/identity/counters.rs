//! What was done and what was refused, in numbers.

use std::cell::Cell;

/// One number for each way that things go.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Connections taken.
    pub(crate) connections: Cell<u64>,
    /// Connections refused: too many of all or of one client.
    pub(crate) connections_refused: Cell<u64>,
    /// Times that there was no descriptor for a connection or for what came with a question.
    pub(crate) exhausted: Cell<u64>,
    /// Questions answered with an identity.
    pub(crate) identified: Cell<u64>,
    /// Questions that were none.
    pub(crate) bad_questions: Cell<u64>,
    /// Questions with the wrong descriptor.
    pub(crate) bad_descriptors: Cell<u64>,
    /// Processes that had ended.
    pub(crate) gone: Cell<u64>,
    /// Processes of which the service sees no number.
    pub(crate) out_of_sight: Cell<u64>,
    /// Questions that could not be answered.
    pub(crate) unavailable: Cell<u64>,
    /// Clients let go because they did not take their answer, or did not ask.
    pub(crate) too_slow: Cell<u64>,
}

impl Counters {
    /// One more.
    pub(crate) fn add(counter: &Cell<u64>) {
        counter.set(counter.get().wrapping_add(1));
    }

    /// Sum of all: whether anything happened.
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

    /// A line in the log.
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
