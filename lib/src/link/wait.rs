//! Waiting for messages, and waking receivers that wait.

use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use shmesh_sys::futex;

use super::bell::Cause;
use super::lease::SeatLease;
use super::{Link, Shared};
use crate::error::{Error, Result};
use crate::notify::{self, Sleepers};
use crate::participant::SeatIndex;
use crate::ring::Ring;
use crate::sync::spin;

/// Checks of the ring per reading of the clock, which costs as much as several of them.
const LOOKS_PER_CLOCK: u32 = 16;
/// How long a receiver sleeps at most before it checks again: a peer that breaks the protocol can suppress a wake-up, and
/// must not block the others of its link.
const SLEEP_MAX: Duration = Duration::from_secs(1);

impl Link {
    /// Wakes the other side if a receiver sleeps or has asked for the file descriptor. Call it after sending, once per
    /// batch. While the peer is awake it costs a fence and a load, and no system call.
    ///
    /// # Errors
    /// [`NoNotification`](crate::ErrorKind::NoNotification).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// let waiter = std::thread::spawn(move || phy.wait(None));
    /// mac.send_inline(1, 0, b"first")?;
    /// mac.send_inline(1, 0, b"second")?;
    /// mac.notify()?; // once for both
    /// assert!(waiter.join().expect("it does not panic")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn notify(&self) -> Result<()> {
        self.check_notify()?;
        self.lease.notify()
    }

    /// Waits until a message can be received, for at most `timeout` (`None`: no limit). Returns `false` if it timed out.
    ///
    /// Events of other participants do not end the wait: use [`wait_event`](Self::wait_event) for events, and
    /// [`wait_any`](Self::wait_any) for both.
    ///
    /// Spins for the link's `spin_us`, then sleeps on a futex in shared memory: a sender must [`notify`](Self::notify), or
    /// the message is detected up to a second later. On a link without notification it only spins.
    ///
    /// # Errors
    /// [`Evicted`](crate::ErrorKind::Evicted); [`System`](crate::ErrorKind::System) if the futex call fails.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use std::time::Duration;
    /// assert!(!phy.wait(Some(Duration::from_millis(1)))?);
    /// mac.send_inline(1, 0, b"wake up")?;
    /// mac.notify()?;
    /// assert!(phy.wait(None)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool> {
        self.wait_for(timeout, self.shared.notify, |_| self.has_message())
    }

    /// Spins for a message for the link's `spin_us`, and never sleeps.
    #[cfg(feature = "tokio")]
    pub(super) fn spin(&self) -> Result<bool> {
        // A timeout no longer than the time of spinning never sleeps.
        self.wait(Some(Duration::from_micros(u64::from(self.shared.spin_us))))
    }

    /// Ends a TTI: posts the semaphore of the other side once, and wakes it. Send the TTI's messages first.
    ///
    /// # Errors
    /// [`NoNotification`](crate::ErrorKind::NoNotification).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use std::time::Duration;
    /// mac.post()?;
    /// mac.post()?;
    /// assert!(phy.wait_tti(None)? && phy.wait_tti(None)?, "posts add up");
    /// assert!(!phy.wait_tti(Some(Duration::ZERO))?, "and each is taken once");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn post(&self) -> Result<()> {
        self.check_notify()?;
        notify::post(self.outgoing());
        self.notify()
    }

    /// Waits for a TTI: consumes one post of the other side. Then receive until there is no message. Returns `false` if it
    /// timed out. Posts are counted, and each is consumed by one waiter.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), and [`NoNotification`](crate::ErrorKind::NoNotification).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// mac.send_inline(1, 0, b"first")?;
    /// mac.send_inline(1, 0, b"second")?;
    /// mac.post()?;
    /// assert!(phy.wait_tti(None)?);
    /// let mut received = 0;
    /// while phy.receive()?.is_some() {
    ///     received += 1;
    /// }
    /// assert_eq!(received, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait_tti(&self, timeout: Option<Duration>) -> Result<bool> {
        self.check_notify()?;
        self.wait_for(timeout, true, notify::take_post)
    }

    /// Prepares to sleep until the other side posts, for callers that must sleep in a system call of their own. Returns
    /// `Some` if there was no post: poll this descriptor for reading, then call [`end_sleep`](Self::end_sleep). Returns
    /// `None` if a post was consumed.
    ///
    /// Spins first, as [`wait_tti`](Self::wait_tti) does. The descriptor may become readable without a post.
    ///
    /// # Errors
    /// As [`wait_tti`](Self::wait_tti).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// assert!(phy.begin_sleep()?.is_some(), "nothing was posted");
    /// mac.post()?;
    /// phy.end_sleep();
    /// assert!(phy.begin_sleep()?.is_none(), "the post was taken");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn begin_sleep(&self) -> Result<Option<BorrowedFd<'_>>> {
        let spin = Duration::from_micros(u64::from(self.shared.spin_us));
        // A timeout no longer than the time of spinning never sleeps.
        if self.wait_tti(Some(spin))? {
            return Ok(None);
        }
        let ring = self.incoming();
        let bell = self.bell.get()?;
        self.bell.arm();
        // Consumes old signals, and checks the ring after each. A peer that signals without end must not keep the caller
        // here.
        for _ in 0..1_000 {
            let step = match notify::take_post(ring) {
                true => Ok(None),
                false => match bell.take() {
                    Ok(true) => continue,
                    Ok(false) => return Ok(Some(bell.as_fd())),
                    Err(error) => Err(Error::system(&self.shared.store.link, "read the bell", error)),
                },
            };
            self.end_sleep();
            return step;
        }
        Ok(Some(bell.as_fd()))
    }

    /// Ends what [`begin_sleep`](Self::begin_sleep) began: the other side no longer signals for it.
    pub fn end_sleep(&self) {
        self.bell.disarm();
    }

    /// The bell of this handle, for select, poll, epoll or tokio. From now on it becomes readable after each
    /// [`notify`](Self::notify) and [`post`](Self::post) of the other side, and after each event of another participant.
    /// When it is readable, consume the signals with [`take_signal`](Self::take_signal), then [receive](Self::receive) and
    /// ask for [events](Self::next_event) until there are none: it is readable while it has signals, not while there are
    /// messages or events.
    ///
    /// It is a datagram socket with a name in the IPC directory. The first call creates it, and dropping the handle removes
    /// it.
    ///
    /// Messages and events before the first call may not have signalled: receive, and ask for events, once after it.
    ///
    /// # Errors
    /// [`NoNotification`](crate::ErrorKind::NoNotification); [`Evicted`](crate::ErrorKind::Evicted);
    /// [`System`](crate::ErrorKind::System) if the socket cannot be created, for example because its path would be longer
    /// than 107 bytes.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// let mut polled = [nix::poll::PollFd::new(phy.fd()?, nix::poll::PollFlags::POLLIN)];
    /// mac.send_inline(1, 0, b"ring")?;
    /// mac.notify()?;
    /// assert_eq!(nix::poll::poll(&mut polled, nix::poll::PollTimeout::NONE)?, 1);
    /// assert_eq!(phy.take_signal()?, Some(1));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.bell.fd()
    }

    /// Consumes one signal of this handle's bell, or returns `None` if there is none. Never waits. `Some(1)` is a
    /// notification or a post, `Some(0)` an event of another participant.
    ///
    /// # Errors
    /// [`NoNotification`](crate::ErrorKind::NoNotification).
    pub fn take_signal(&self) -> Result<Option<u64>> {
        self.bell.take_signal()
    }

    #[inline]
    fn check_notify(&self) -> Result<()> {
        self.bell.check_notify()
    }

    /// Waits until `ready`. Without `sleeps` it only spins, because no sender wakes it.
    pub(super) fn wait_for(
        &self,
        timeout: Option<Duration>,
        sleeps: bool,
        ready: impl Fn(&Ring) -> bool,
    ) -> Result<bool> {
        let ring = self.incoming();
        self.lease.wait_for(timeout, sleeps, || ready(ring))
    }
}

/// The words on which a thread sleeps.
#[derive(Clone, Copy)]
pub(super) enum Sleep<'a> {
    /// Those of the ring, for messages and replies to the seat.
    Notified,
    /// Those for events. Only the handle uses them.
    Events(Sleepers<'a>),
}

impl SeatLease {
    /// Wakes the receiver in `seat` if it waits. The message is visible already, so errors are ignored: a sleeping receiver
    /// checks again within a second.
    #[inline]
    pub(super) fn notify_seat(&self, seat: SeatIndex) {
        if self.shared.notify {
            let ring = self.outgoing();
            let waiting = notify::waiting(ring).only(seat);
            if !waiting.is_empty() {
                let _ = self.wake(ring, waiting);
            }
        }
    }

    /// As [`Link::notify`], on a link with notification.
    #[inline]
    fn notify(&self) -> Result<()> {
        let ring = self.outgoing();
        let waiting = notify::waiting(ring);
        if !waiting.is_empty() {
            self.wake(ring, waiting)?;
        }
        Ok(())
    }

    /// As [`Link::notify`], on any link and without errors, as [`notify_seat`](Self::notify_seat).
    #[inline]
    pub(super) fn notify_other_side(&self) {
        if self.shared.notify {
            let _ = self.notify();
        }
    }

    #[cold]
    fn wake(&self, ring: &Ring, waiting: notify::WaitingReceivers) -> Result<()> {
        self.core().seats.rang(self.me.seat);
        let woken = self.shared.wake(ring, waiting, Cause::Notification);
        woken.map_err(|error| Error::system(&self.shared.store.link, "open the bell of a receiver", error))
    }

    /// As [`Link::wait_for`], in any thread.
    pub(super) fn wait_for(
        &self,
        timeout: Option<Duration>,
        sleeps: bool,
        ready: impl Fn() -> bool,
    ) -> Result<bool> {
        self.wait_on(timeout, sleeps.then_some(Sleep::Notified), ready)
    }

    /// Waits until `ready`; spins first, then sleeps there. With `None` it only spins.
    pub(super) fn wait_on(
        &self,
        timeout: Option<Duration>,
        sleep: Option<Sleep<'_>>,
        ready: impl Fn() -> bool,
    ) -> Result<bool> {
        self.check_seated()?;
        if ready() {
            return Ok(true);
        }
        let start = Instant::now();
        let deadline = timeout.and_then(|timeout| start.checked_add(timeout));
        let spin_end = start + Duration::from_micros(u64::from(self.shared.spin_us));
        let sleep = loop {
            let now = match look_and_spin(deadline, &ready) {
                ControlFlow::Break(is_ready) => return Ok(is_ready),
                ControlFlow::Continue(now) => now,
            };
            match sleep {
                None => self.check_seated()?,
                Some(sleep) if now >= spin_end => break sleep,
                Some(_) => {}
            }
        };
        match sleep {
            Sleep::Notified => {
                self.fall_asleep();
                let slept = self.sleep(self.sleepers(), deadline, ready);
                self.wake_up();
                slept
            }
            Sleep::Events(sleepers) => {
                sleepers.fall_asleep(self.me.seat);
                let slept = self.sleep(sleepers, deadline, ready);
                sleepers.wake_up(self.me.seat);
                slept
            }
        }
    }

    fn sleep(
        &self,
        sleepers: Sleepers<'_>,
        deadline: Option<Instant>,
        ready: impl Fn() -> bool,
    ) -> Result<bool> {
        self.shared.sleep_until(sleepers, self.me.seat, deadline, false, || self.check_seated(), ready)
    }
}

/// Calls `ready` for as long as one reading of the clock is worth. Breaks with whether it is ready when the wait is over, else
/// continues with the time.
#[inline]
pub(super) fn look_and_spin(
    deadline: Option<Instant>,
    ready: &impl Fn() -> bool,
) -> ControlFlow<bool, Instant> {
    for _ in 0..LOOKS_PER_CLOCK {
        if ready() {
            return ControlFlow::Break(true);
        }
        spin();
    }
    let now = Instant::now();
    if deadline.is_some_and(|deadline| now >= deadline) {
        ControlFlow::Break(false)
    } else {
        ControlFlow::Continue(now)
    }
}

impl Shared {
    /// Sleeps until `ready`, which it calls after each wake-up and at least once a second, or until `check` fails. The caller
    /// has announced that its seat sleeps. With `ends_at_signal` it also returns after a signal handler ran in this thread.
    pub(super) fn sleep_until(
        &self,
        sleepers: Sleepers<'_>,
        seat: SeatIndex,
        deadline: Option<Instant>,
        ends_at_signal: bool,
        check: impl Fn() -> Result<()>,
        ready: impl Fn() -> bool,
    ) -> Result<bool> {
        loop {
            let wakes = sleepers.wakes();
            if ready() {
                return Ok(true);
            }
            check()?;
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            let woken = sleepers.sleep(seat, wakes, left.map_or(SLEEP_MAX, |left| left.min(SLEEP_MAX)));
            let woken =
                woken.map_err(|error| Error::system(&self.store.link, "sleep on the futex", error))?;
            if ends_at_signal && woken == futex::Wait::Interrupted {
                return Ok(ready());
            }
        }
    }
}

impl Link {
    /// Whether a message can be received, as far as one look shows.
    #[must_use]
    pub fn has_message(&self) -> bool {
        match self.incoming() {
            Ring::Broadcast(ring) => ring.has_message(self.endpoint.reader()),
            ring => ring.has_message(),
        }
    }
}
