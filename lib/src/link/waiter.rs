//! Waiting on a link while other threads use its handle.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::lease::SeatLease;
use super::wait::look_and_spin;
use super::{Link, Shared};
use crate::error::{Error, ErrorKind, Result};
use crate::notify::Sleepers;
use crate::participant::Participant;

/// Waits on a link without borrowing its handle: other threads may use, lock or drop the handle meanwhile. See
/// [`Link::waiter`].
pub struct Waiter {
    shared: Arc<Shared>,
    me: Participant,
    /// Not held while it waits: a handle that is dropped gives its seat up, and that ends the wait.
    lease: Weak<SeatLease>,
    /// Threads that sleep, with this waiter or otherwise. The seat has one bit for all of them.
    asleep: Arc<Mutex<u32>>,
}

impl Link {
    /// A waiter of this handle. Meanwhile other threads may wait with the handle, with further waiters and with the handle's
    /// [`OwnedPendingReply`](super::OwnedPendingReply)s: a notification wakes all of them.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use std::sync::Mutex;
    /// let (waiter, phy) = (phy.waiter(), Mutex::new(phy));
    /// let has_message = || phy.lock().expect("no thread panics").has_message();
    /// std::thread::scope(|scope| {
    ///     let waiting = scope.spawn(|| waiter.wait_until(None, has_message));
    ///     mac.send_inline(1, 0, b"wake up")?;
    ///     mac.notify()?;
    ///     waiting.join().expect("it does not panic")
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn waiter(&self) -> Waiter {
        Waiter {
            shared: Arc::clone(&self.shared),
            me: self.endpoint.me,
            lease: Arc::downgrade(&self.lease),
            asleep: Arc::clone(&self.lease.asleep),
        }
    }
}

impl Waiter {
    /// Waits until `ready`, for at most `timeout` (`None`: no limit). Returns `false` if it timed out, or a signal handler
    /// ran in this thread.
    ///
    /// It calls `ready` after each [notification](Link::notify) of the other side, each event of another participant and each
    /// [`wake`](Self::wake), and at least once a second. So it waits for any state whose changes are notified: a sender waits for
    /// room if the receivers notify it when they have released a message.
    ///
    /// # Errors
    /// As [`Link::wait`], and [`NoNotification`](crate::ErrorKind::NoNotification).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// config.ring_len = 2;
    /// let phy = options.create(&config)?;
    /// let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// while phy.send_inline(1, 0, b"more").is_ok() {}
    /// let reader = std::thread::spawn(move || {
    ///     mac.receive()?;
    ///     mac.notify()
    /// });
    /// assert!(phy.waiter().wait_until(None, || phy.send_inline(1, 0, b"the last").is_ok())?);
    /// reader.join().expect("it does not panic")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait_until(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) -> Result<bool> {
        if !self.shared.notify {
            return Err(Error::from(ErrorKind::NoNotification { link: self.link() }));
        }
        let start = Instant::now();
        let deadline = timeout.and_then(|timeout| start.checked_add(timeout));
        let spin_end = start + Duration::from_micros(u64::from(self.shared.spin_us));
        loop {
            match look_and_spin(deadline, &ready) {
                ControlFlow::Break(is_ready) => return Ok(is_ready),
                ControlFlow::Continue(now) if now >= spin_end => break,
                ControlFlow::Continue(_) => {}
            }
        }
        let Some(lease) = self.lease.upgrade() else { return Err(self.evicted()) };
        lease.fall_asleep();
        drop(lease);
        let slept = self.shared.sleep_until(
            self.sleepers(),
            self.me.seat,
            deadline,
            true,
            || self.check_seated(),
            ready,
        );
        // Without a lease the bit belongs to the next participant in the seat, which has cleared it when it came.
        if let Some(lease) = self.lease.upgrade() {
            lease.wake_up();
        }
        slept
    }

    /// Makes the threads that wait with this call `ready` once more. Change the state that it depends on first.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    /// let (waiter, stop) = (phy.waiter(), AtomicBool::new(false));
    /// std::thread::scope(|scope| {
    ///     let waiting = scope.spawn(|| waiter.wait_until(None, || stop.load(SeqCst)));
    ///     stop.store(true, SeqCst);
    ///     waiter.wake();
    ///     waiting.join().expect("it does not panic")
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wake(&self) {
        // The lock orders this with a thread that is about to sleep: either that is counted, or it calls `ready` after
        // this.
        if self.count(|asleep| *asleep > 0) {
            let sleepers = self.sleepers();
            // WAKE: for its fence, which orders the caller's change before the wake-up.
            sleepers.asleep();
            sleepers.wake();
            sleepers.wake_seats(self.me.seat.bit());
        }
    }

    /// Without the lease: a thread that sleeps keeps no seat of a handle that was dropped.
    fn check_seated(&self) -> Result<()> {
        if self.shared.core.seats.is_current(&self.me) { Ok(()) } else { Err(self.evicted()) }
    }

    fn sleepers(&self) -> Sleepers<'_> {
        Sleepers::of(self.shared.core.incoming(self.me.word.side()))
    }

    fn count<T>(&self, change: impl FnOnce(&mut u32) -> T) -> T {
        change(&mut self.asleep.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[cold]
    fn evicted(&self) -> Error {
        Error::from(ErrorKind::Evicted { link: self.link() })
    }

    fn link(&self) -> Arc<str> {
        Arc::clone(&self.shared.store.link)
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").field("link", &self.shared.store.link).field("seat", &self.me.seat).finish()
    }
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::time::{Duration, Instant};

    use crate::config::LinkConfig;
    use crate::notify::Sleepers;
    use crate::{Link, LinkOptions, Side};

    fn asleep(link: &Link) -> u32 {
        Sleepers::of(link.incoming()).asleep().count_ones()
    }

    fn until(what: impl Fn() -> bool) {
        let start = Instant::now();
        while !what() {
            assert!(start.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
    }

    #[test]
    fn threads_of_one_seat_sleep_where_notifications_and_wakes_reach_them() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let phy = options.create(&LinkConfig::new("link".parse().unwrap())).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        for (link, other) in [(&phy, &mac), (&mac, &phy)] {
            let (waiter, first, second) = (link.waiter(), AtomicBool::new(false), AtomicBool::new(false));
            std::thread::scope(|scope| {
                let one = scope.spawn(|| waiter.wait_until(None, || first.load(SeqCst)));
                let two = scope.spawn(|| waiter.wait_until(None, || second.load(SeqCst)));
                until(|| *waiter.asleep.lock().unwrap() == 2);
                let (rung, wakes) = (other.core().seats.rung(), waiter.sleepers().wakes());
                first.store(true, SeqCst);
                other.notify().unwrap();
                assert!(other.core().seats.rung() > rung && waiter.sleepers().wakes() > wakes);
                assert!(one.join().unwrap().unwrap());
                assert_eq!(asleep(link), 1, "the other thread still sleeps in the seat");
                second.store(true, SeqCst);
                waiter.wake();
                assert!(waiter.sleepers().wakes() > wakes + 1);
                assert!(two.join().unwrap().unwrap());
            });
            assert_eq!(asleep(link), 0);
        }
        assert!(!phy.waiter().wait_until(Some(Duration::ZERO), || false).unwrap());
    }

    /// The next participant in the seat may sleep already.
    #[test]
    fn waiter_of_a_dropped_handle_leaves_the_seat_alone() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let phy = options.create(&LinkConfig::new("link".parse().unwrap())).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        let (seat, waiter) = (mac.seat(), mac.waiter());
        let next = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| waiter.wait_until(None, || false));
            until(|| *waiter.asleep.lock().unwrap() == 1);
            drop(mac);
            let error = waiting.join().unwrap().unwrap_err();
            assert!(matches!(error.kind(), crate::ErrorKind::Evicted { .. }), "{error}");
            options.attach("link", Side::Secondary).unwrap()
        });
        assert_eq!(next.seat(), seat);
        next.lease.fall_asleep();
        assert!(waiter.wait_until(None, || false).is_err());
        assert_eq!(asleep(&next), 1);
        next.lease.wake_up();
        drop(phy);
    }
}
