//! Recovery of dead participants, and eviction of stuck ones.

use shmesh_sys::process::Liveness;

use super::Link;
use super::core::RecoveryStats;
use crate::error::{Error, ErrorKind, Result};
use crate::participant::{Participant, SeatIndex, SeatWord};
use crate::sync::{Ordering, fence};

impl RecoveryStats {
    pub(super) fn add(&mut self, other: Self) {
        self.participants += other.participants;
        self.messages += other.messages;
        self.data_buffers += other.data_buffers;
        self.readmitted += other.readmitted;
        self.kept += other.kept;
    }
}

impl Link {
    /// Becomes the host of a link with memfds or device pools whose host has ended: newcomers get its memory from this
    /// process. Returns `false` if there is a host, or the link needs none, or this handle has no monitor.
    ///
    /// A restarted sidecar, or a process that creates the link again, becomes the host automatically.
    ///
    /// # Errors
    /// [`System`](crate::ErrorKind::System) if the socket cannot be created.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::Side;
    /// use shmesh::config::{Backing, LinkConfig};
    /// let mut config = LinkConfig::new("fronthaul".parse()?);
    /// config.backing = Backing::Memfd;
    /// let phy = options.create(&config)?;
    /// assert!(!phy.become_host()?, "its creator is");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn become_host(&self) -> Result<bool> {
        self.attachment.become_host()
    }

    /// The user that owns the lock file of this link, and its mode: they decide which processes can attach, and hand out memory
    /// without names. It is the file that this handle opened when it attached, whatever has its name now.
    ///
    /// # Errors
    /// [`System`](crate::ErrorKind::System).
    pub fn lock_file_owner(&self) -> Result<(u32, u32)> {
        let owner = self.shared.lock.owner();
        let (uid, _, mode) =
            owner.map_err(|error| Error::system(&self.shared.store.link, "look at its lock file", error))?;
        Ok((uid, mode & 0o7777))
    }

    /// Recovers participants that have ended: their loans, received messages and seats. Messages that they had sent stay
    /// queued. Other participants are not disturbed.
    ///
    /// For a process in another pid namespace, the lock of its seat shows whether it has ended. A participant without that
    /// lock cannot be checked from here, and is left alone: use [`recover_participant`](Self::recover_participant) if you
    /// know that it has ended.
    ///
    /// # Errors
    /// [`Evicted`](crate::ErrorKind::Evicted).
    pub fn recover(&self) -> Result<RecoveryStats> {
        self.check_seated()?;
        let mut done = RecoveryStats::default();
        for other in self.shared.dead().filter(|other| other.seat != self.endpoint.me.seat) {
            done.add(self.take_back(&other, false));
        }
        Ok(done)
    }

    fn take_back(&self, other: &Participant, keep_seated: bool) -> RecoveryStats {
        let done = self.core().reclaim(other, self.endpoint.me.seat, keep_seated);
        self.core().seats.count_recovered(done.participants);
        self.shared.wake_after_a_death();
        if !keep_seated {
            self.shared.remove_bell(other);
        }
        done
    }

    /// Recovers the participant in `seat`. The caller must know that its process has ended. `word` is its value from
    /// [`participants`](Self::participants): if the seat has another participant by now, nothing happens.
    ///
    /// # Errors
    /// [`Evicted`](crate::ErrorKind::Evicted), if the caller was.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// let dead = phy.participants().find(|other| other.seat == mac.seat()).expect("it is attached");
    /// std::mem::forget(mac); // as if its process had been killed
    /// assert_eq!(phy.recover_participant(dead.seat, dead.word)?.participants, 1);
    /// assert_eq!(phy.recover_participant(dead.seat, dead.word)?.participants, 0, "it was done before");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn recover_participant(&self, seat: SeatIndex, word: SeatWord) -> Result<RecoveryStats> {
        self.check_seated()?;
        match self.core().seats.at(seat) {
            Some(dead) if dead.word.is_same(word) && seat != self.endpoint.me.seat => {
                Ok(self.take_back(&dead, false))
            }
            _ => Ok(RecoveryStats::default()),
        }
    }

    /// Declares a participant dead that may still run, because it is stuck or stopped, and recovers its buffers.
    ///
    /// If it resumes, its loans, sends, receptions and waits fail with [`Evicted`](crate::ErrorKind::Evicted), and it
    /// cannot free or send a buffer a second time. But memory stays mapped in its process: a write that it had begun may
    /// still reach a buffer that others have by now. End the process if you can. Its seat stays taken until it has ended.
    ///
    /// Does nothing if the seat is vacant, or is the caller's own.
    ///
    /// # Errors
    /// [`StillAlive`](crate::ErrorKind::StillAlive) if the process lives, on a link with ring mode `spsc`, and for the
    /// writer with ring mode `broadcast`: there, its place in the ring cannot be fenced.
    /// [`Evicted`](crate::ErrorKind::Evicted), if the caller was.
    pub fn evict(&self, seat: SeatIndex) -> Result<RecoveryStats> {
        self.check_seated()?;
        match self.core().seats.at(seat).filter(|_| seat != self.endpoint.me.seat) {
            Some(other) => self.evict_participant(&other),
            None => Ok(RecoveryStats::default()),
        }
    }

    /// Evicts this participant, but not a later one in its seat.
    pub(super) fn evict_participant(&self, other: &Participant) -> Result<RecoveryStats> {
        let alive = self.shared.liveness(other) != Liveness::Dead;
        let still_alive = || {
            Err(Error::from(ErrorKind::StillAlive {
                link: self.link(),
                seat: other.seat.value(),
                pid: other.word.pid(),
            }))
        };
        if alive && (self.core().shape.single || self.core().is_writer(other)) {
            return still_alive();
        }
        if alive && !self.core().seats.evict(other) {
            return Ok(RecoveryStats::default());
        }
        // It may have become the writer just now, and be sending. It gets the error `Evicted`, and keeps its buffers until
        // its process ends.
        fence(Ordering::SeqCst);
        if alive && self.core().is_writer(other) {
            return still_alive();
        }
        Ok(self.take_back(other, alive))
    }

    /// All attached participants, dead or alive.
    pub fn participants(&self) -> impl Iterator<Item = Participant> + '_ {
        self.core().seats.all()
    }
}
