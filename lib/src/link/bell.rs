//! Bells: named datagram sockets that signal notifications to receivers in poll, epoll or an event loop.
//!
//! A receiver that asks for a descriptor binds a socket for its seat, and every notification sends a byte to it. Each
//! sender has a socket of its own for each bell, so no process can block another.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use shmesh_sys::bell::{Bell, Ringer, is_absent};

use super::Shared;
use super::lease::SeatLease;
use crate::error::{Error, ErrorKind, Result};
use crate::notify::{self, Sleepers, WaitingReceivers};
use crate::participant::{Participant, SeatIndex, SeatWord};
use crate::ring::Ring;

/// The sockets of this process to the bells of other participants.
#[derive(Debug, Default)]
pub(super) struct Bells(Mutex<HashMap<SeatIndex, (SeatWord, Ringer)>>);

/// The reason for ringing a bell.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Cause {
    Notification,
    /// Events are rare, so a descriptor that is opened for one does not stay open.
    Event,
}

impl Shared {
    pub(super) fn bell_path(&self, of: &Participant) -> PathBuf {
        self.store.bell_path(self.epoch(), of)
    }

    /// Creates the bell of a participant of this process.
    pub(super) fn make_bell(&self, me: &Participant) -> io::Result<Bell> {
        let path = self.bell_path(me);
        let create = || Bell::create(&path, self.store.file_mode, self.owner.map(|(_, gid)| gid));
        match create() {
            // 65,536 participants earlier, one in this seat was killed, and its bell was not removed.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                std::fs::remove_file(&path)?;
                create()
            }
            made => made,
        }
    }

    /// Removes the bell of a participant, if it exists and this user may.
    pub(super) fn remove_bell(&self, of: &Participant) {
        let _ = std::fs::remove_file(self.bell_path(of));
    }

    /// Wakes the receivers of a ring. Never blocks.
    #[cold]
    pub(super) fn wake(&self, ring: &Ring, waiting: WaitingReceivers, cause: Cause) -> io::Result<()> {
        if waiting.is_any_asleep(&self.core.seats) {
            let sleepers = Sleepers::of(ring);
            sleepers.wake();
            sleepers.wake_seats(waiting.seats());
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
        // Bells are replaced as a whole, so a poisoned lock guards valid values.
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
            // The receiver has just detached, or claims a bell that it does not have. Not remembered, as a newcomer in the
            // seat may create one later.
            Err(error) if is_absent(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// The bell of one handle, shared with pending replies that are independent of it. The last owner that drops it removes the
/// bell.
#[derive(Debug)]
pub(super) struct HandleBell {
    /// Readable after each notification, while its bit is set.
    bell: OnceLock<Bell>,
    /// The descriptor was handed out, so every notification must reach it.
    has_fd: AtomicBool,
    lease: Arc<SeatLease>,
}

impl HandleBell {
    pub(super) fn new(lease: &Arc<SeatLease>) -> Arc<Self> {
        let (bell, has_fd) = (OnceLock::new(), AtomicBool::new(false));
        Arc::new(Self { bell, has_fd, lease: Arc::clone(lease) })
    }

    #[inline]
    pub(super) fn check_notify(&self) -> Result<()> {
        if self.lease.shared.notify {
            Ok(())
        } else {
            Err(Error::from(ErrorKind::NoNotification { link: self.lease.link() }))
        }
    }

    /// The bell, created at the first call. Only for the handle.
    pub(super) fn get(&self) -> Result<&Bell> {
        self.check_notify()?;
        if let Some(bell) = self.bell.get() {
            return Ok(bell);
        }
        let SeatLease { shared, me, .. } = &*self.lease;
        self.lease.check_seated()?;
        let made = shared.make_bell(me).map_err(|error| {
            let path = shared.bell_path(me);
            Error::system(&shared.store.link, format!("create the bell {}", path.display()), error)
        })?;
        Ok(self.bell.get_or_init(|| made))
    }

    /// Makes every notification ring from now on. Only for the handle.
    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>> {
        let bell = self.get()?;
        if !self.has_fd.swap(true, Ordering::Relaxed) {
            self.arm();
        }
        Ok(bell.as_fd())
    }

    pub(super) fn arm(&self) {
        notify::arm(self.incoming(), self.lease.me.seat);
    }

    /// Reverses [`arm`](Self::arm), unless the descriptor was handed out.
    pub(super) fn disarm(&self) {
        if !self.has_fd.load(Ordering::Relaxed) {
            notify::disarm(self.incoming(), self.lease.me.seat);
        }
    }

    /// Consumes one signal of the bell.
    pub(super) fn take_signal(&self) -> Result<Option<u64>> {
        self.check_notify()?;
        let taken = self.bell.get().map_or(Ok(None), Bell::take_byte);
        let name = &self.lease.shared.store.link;
        let taken = taken.map_err(|error| Error::system(name, "read the bell", error))?;
        Ok(taken.map(|byte| u64::from(byte != 0)))
    }

    #[cfg(feature = "tokio")]
    pub(super) fn name(&self) -> &Arc<str> {
        &self.lease.shared.store.link
    }

    fn incoming(&self) -> &Ring {
        self.lease.core().incoming(self.lease.me.word.side())
    }
}

impl Drop for HandleBell {
    fn drop(&mut self) {
        let SeatLease { shared, me, .. } = &*self.lease;
        // A forked child must not remove its parent's bell.
        if self.bell.get().is_some() && shared.me.is_me() {
            notify::disarm(self.incoming(), me.seat);
            shared.remove_bell(me);
        }
    }
}
