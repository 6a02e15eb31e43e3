//! Waiting for messages, and waking who waits.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::Link;
use crate::error::{Error, ErrorKind, Result};
use crate::notify;
use crate::ring::Ring;
use crate::sync::spin;
use crate::sys::eventfd::Doorbell;

/// Looks at the ring between two looks at the clock, which costs as much as several of them.
const LOOKS_PER_CLOCK: u32 = 16;

impl Link {
    /// Wakes the other side if somebody there sleeps or has taken the file descriptor. Call it after sending: once for a
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
        let ring = self.outgoing();
        let bell = self.bell(ring)?;
        if notify::anybody_asleep(ring, &self.core().seats) {
            bell.signal()
                .map_err(|error| Error::system(&self.shared.store.link, "ring the doorbell", error))?;
            self.core().seats.rang(self.desk.me.seat);
        }
        Ok(())
    }

    /// Waits until a message is there to be received, at most `timeout` (`None`: for ever). `false`: the time is over.
    ///
    /// Spins as long as the link's `spin_us` says, then sleeps on the doorbell: a sender must [`notify`](Self::notify).
    /// On a link without notification it spins only.
    ///
    /// # Errors
    /// [`Evicted`](crate::ErrorKind::Evicted); [`System`](crate::ErrorKind::System) when the kernel refuses to poll.
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
        self.wait_for(timeout, |ring| ring.has_message())
    }

    /// Ends a TTI: posts the semaphore of the other side once, and wakes it. Send the TTI's messages before.
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
        let ring = self.outgoing();
        self.bell(ring)?;
        notify::post(ring);
        self.notify()
    }

    /// Waits for a TTI: takes one post of the other side. Then receive until there is nothing more. `false`: the time is
    /// over. Posts add up, and each is taken by one waiter.
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
        self.bell(self.incoming())?;
        self.wait_for(timeout, notify::take_post)
    }

    /// Prepares to sleep until the other side posts, for callers that must sleep in a system call of their own. `Some`: nothing
    /// was posted; poll this descriptor for reading, then call [`end_sleep`](Self::end_sleep). `None`: a post was taken.
    ///
    /// Spins first, as [`wait_tti`](Self::wait_tti) does. A descriptor that is readable does not promise a post.
    ///
    /// # Errors
    /// As [`wait_tti`](Self::wait_tti).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// assert!(phy.begin_sleep()?.is_some(), "nothing was posted");
    /// mac.post()?;
    /// phy.end_sleep();
    /// assert!(phy.begin_sleep()?.is_none(), "the post was taken");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn begin_sleep(&self) -> Result<Option<BorrowedFd<'_>>> {
        let spin = Duration::from_micros(u64::from(self.shared.spin_us));
        // With no more time than the spinning takes it never sleeps.
        if self.wait_tti(Some(spin))? {
            return Ok(None);
        }
        let ring = self.incoming();
        let bell = self.bell(ring)?;
        notify::fall_asleep(ring, self.desk.me.seat);
        // Old signals are taken, and the ring is read after each. A peer that signals for ever must not keep the caller here.
        for _ in 0..1_000 {
            let step = match notify::take_post(ring) {
                true => Ok(None),
                false => match bell.take() {
                    Ok(true) => continue,
                    Ok(false) => return Ok(Some(bell.as_fd())),
                    Err(error) => Err(Error::system(&self.shared.store.link, "read the doorbell", error)),
                },
            };
            self.end_sleep();
            return step;
        }
        Ok(Some(bell.as_fd()))
    }

    /// Ends what [`begin_sleep`](Self::begin_sleep) began: the other side no longer signals for it.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// phy.begin_sleep()?;
    /// phy.end_sleep();
    /// mac.notify()?;
    /// assert_eq!(phy.value()?, None, "nothing was signalled");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn end_sleep(&self) {
        if !self.armed.get() {
            notify::wake_up(self.incoming(), self.desk.me.seat);
        }
    }

    /// The doorbell of this side, for select, poll, epoll or tokio: readable after each [`notify`](Self::notify) and
    /// [`post`](Self::post) of the other side, from now on. Take the signals with [`value`](Self::value).
    ///
    /// Messages sent before the first call may not have rung: receive once after it.
    ///
    /// # Errors
    /// [`NoNotification`](crate::ErrorKind::NoNotification).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// let fd = phy.fd()?; // give it to epoll
    /// mac.send_inline(1, 0, b"ring")?;
    /// mac.notify()?;
    /// assert_eq!(phy.value()?, Some(1));
    /// # let _ = fd;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        let ring = self.incoming();
        let bell = self.bell(ring)?;
        if !self.armed.replace(true) {
            notify::fall_asleep(ring, self.desk.me.seat);
        }
        Ok(bell.as_fd())
    }

    /// Takes one signal off the doorbell of this side: `Some(1)`, or `None` when there is none. Never waits.
    ///
    /// # Errors
    /// [`NoNotification`](crate::ErrorKind::NoNotification).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// phy.fd()?; // from now on it is signalled each time
    /// mac.send_inline(1, 0, b"ring")?;
    /// mac.notify()?;
    /// assert_eq!(phy.value()?, Some(1));
    /// assert_eq!(phy.value()?, None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn value(&self) -> Result<Option<u64>> {
        let taken = self.bell(self.incoming())?.take();
        let taken =
            taken.map_err(|error| Error::system(&self.shared.store.link, "read the doorbell", error))?;
        Ok(taken.then_some(1))
    }

    #[inline]
    fn bell(&self, ring: &Ring) -> Result<&Doorbell> {
        let outgoing = std::ptr::eq(ring, self.outgoing());
        // The doorbells are in the order of the rings: the primary's outgoing one first.
        let first = outgoing == (self.side() == super::Side::Primary);
        match &self.shared.doorbells {
            Some(bells) => Ok(&bells[usize::from(!first)]),
            None => Err(Error::from(ErrorKind::NoNotification { link: self.link() })),
        }
    }

    fn wait_for(&self, timeout: Option<Duration>, ready: impl Fn(&Ring) -> bool) -> Result<bool> {
        self.check_seated()?;
        let ring = self.incoming();
        if ready(ring) {
            return Ok(true);
        }
        let start = Instant::now();
        let deadline = timeout.and_then(|timeout| start.checked_add(timeout));
        let spin_end = start + Duration::from_micros(u64::from(self.shared.spin_us));
        let bell = self.bell(ring).ok();
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if ready(ring) {
                    return Ok(true);
                }
                spin();
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(false);
            }
            if bell.is_some() && now >= spin_end {
                break;
            }
            if bell.is_none() {
                self.check_seated()?;
            }
        }
        let Some(bell) = bell else { return Ok(false) };
        notify::fall_asleep(ring, self.desk.me.seat);
        let slept = self.sleep(bell, deadline, || ready(ring));
        if !self.armed.get() {
            notify::wake_up(ring, self.desk.me.seat);
        }
        slept
    }

    fn sleep(&self, bell: &Doorbell, deadline: Option<Instant>, ready: impl Fn() -> bool) -> Result<bool> {
        let failed = |error| Error::system(&self.shared.store.link, "sleep on the doorbell", error);
        loop {
            if ready() {
                return Ok(true);
            }
            // A signal may be old, from a message that was received while we were awake: take it and look again.
            // However many there are, the time may be over.
            let over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if over {
                return Ok(false);
            }
            if bell.take().map_err(failed)? {
                self.check_seated()?;
                continue;
            }
            if !bell.wait(deadline).map_err(failed)? {
                return Ok(ready());
            }
            self.check_seated()?;
        }
    }
}

impl Link {
    /// Whether a message waits to be received, as far as one look can tell.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// assert!(!link.has_message());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn has_message(&self) -> bool {
        self.incoming().has_message()
    }
}
