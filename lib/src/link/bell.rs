//! Bells: named datagram sockets through which a receiver learns of notifications in poll, epoll or an event loop.
//!
//! A receiver that asks for a descriptor binds a socket for its seat, and every notification sends a byte to it. Each ringer
//! has a socket of its own for each bell, so no process can make another one wait.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use shmesh_sys::bell::{Bell, Ringer, is_absent};

use super::Shared;
use crate::notify::{Sleepers, Waiting};
use crate::participant::{Participant, SeatIndex, SeatWord};
use crate::ring::Ring;

/// The bells of other participants that this process has opened.
#[derive(Debug, Default)]
pub(super) struct Bells(Mutex<HashMap<SeatIndex, (SeatWord, Ringer)>>);

/// What a bell is rung for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Cause {
    Notification,
    /// These are rare: the descriptor to a bell that was not open yet does not stay open.
    Event,
}

/// What the names of all bells of a link begin with.
pub(crate) fn prefix(link: &str) -> String {
    format!("{link}.bell-")
}

impl Shared {
    /// Path of the bell of a participant. The name is unique to the participant, so a stale bell of another user does not
    /// block a new one.
    pub(super) fn bell_path(&self, of: &Participant) -> PathBuf {
        let epoch = self.segments.first().map_or(0, |segment| segment.header.epoch);
        let name = format!("{}{epoch:016x}-{}-{}", prefix(&self.store.link), of.seat, of.word.epoch());
        self.store.dir.join(name)
    }

    /// Creates the bell of a participant of this process.
    pub(super) fn make_bell(&self, me: &Participant) -> io::Result<Bell> {
        let path = self.bell_path(me);
        let create = || Bell::create(&path, self.store.file_mode, self.owner.map(|(_, gid)| gid));
        match create() {
            // 65,536 participants ago, one in this seat was killed with its bell, and it was not removed.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                std::fs::remove_file(&path)?;
                create()
            }
            made => made,
        }
    }

    /// Removes the bell of a participant, if it has one and this user may.
    pub(super) fn remove_bell(&self, of: &Participant) {
        let _ = std::fs::remove_file(self.bell_path(of));
    }

    /// Wakes the receivers of a ring. Never blocks.
    #[cold]
    pub(super) fn wake(&self, ring: &Ring, waiting: Waiting, cause: Cause) -> io::Result<()> {
        if waiting.is_any_asleep(&self.core.seats) {
            let sleepers = Sleepers::of(ring);
            sleepers.wake();
            sleepers.wake_all();
        }
        let mut done = Ok(());
        for receiver in waiting.bells(&self.core.seats) {
            done = done.and(self.bells.ring(&receiver, cause, || self.bell_path(&receiver)));
        }
        done
    }
}

impl Bells {
    fn ring(&self, receiver: &Participant, cause: Cause, path: impl FnOnce() -> PathBuf) -> io::Result<()> {
        let byte = u8::from(cause == Cause::Notification);
        // A bell is replaced whole.
        let mut bells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((word, bell)) = bells.get(&receiver.seat)
            && word.is_same(receiver.word)
        {
            return bell.ring_with(byte);
        }
        match Ringer::open(&path()) {
            Ok(bell) => {
                let rung = bell.ring_with(byte);
                if cause == Cause::Notification {
                    bells.insert(receiver.seat, (receiver.word, bell));
                }
                rung
            }
            // The receiver has just left, or claims a bell that it does not have. Not remembered: a newcomer in the seat may
            // create one later.
            Err(error) if is_absent(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
