//! The liveness of a link's participants, by the locks of their seats.

use std::path::PathBuf;
use std::sync::OnceLock;

use shmesh_sys::process::{Liveness, ProcessIdentity};

use crate::link::liveness_by_lock;
use crate::participant::{Participant, Seats};
use crate::segment::lock::{Host, Lock};

/// The lock file of a link, opened at its first use: opening it makes the monitors of the link look for deaths.
#[derive(Debug)]
pub(super) struct SeatLocks {
    path: PathBuf,
    opened: OnceLock<Lock>,
}

impl SeatLocks {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, opened: OnceLock::new() }
    }

    pub(super) fn opened_already(path: PathBuf, lock: Lock) -> Self {
        Self { path, opened: OnceLock::from(lock) }
    }

    /// Whether participants that attach now use the same lock file, if it is open.
    pub(super) fn are_current(&self) -> bool {
        self.opened.get().is_none_or(Lock::is_named)
    }

    /// The host of the link, by the lock of its socket's number.
    pub(super) fn host(&self) -> Option<(Host, u64)> {
        self.opened()?.host().ok()?
    }

    fn opened(&self) -> Option<&Lock> {
        if self.opened.get().is_none() {
            let _ = self.opened.set(Lock::open_for_reading(&self.path).ok()?);
        }
        self.opened.get()
    }

    /// Whether a participant is alive, and the reason if that is unknown.
    pub(super) fn liveness(
        &self,
        seats: &Seats,
        other: &Participant,
        me: &ProcessIdentity,
    ) -> (Liveness, Option<&'static str>) {
        let known = other.liveness(me);
        if known != Liveness::Unknown {
            return (known, None);
        }
        let Some(lock) = self.opened() else {
            return (
                known,
                Some(
                    "the process is in another pid namespace, and the lock file of the link cannot be opened",
                ),
            );
        };
        match liveness_by_lock(seats, other, lock) {
            Liveness::Unknown => (
                known,
                Some(
                    "the process is in another pid namespace, and has not locked its seat in this lock file",
                ),
            ),
            known => (known, None),
        }
    }
}
