//! Looking for messages without the handle.

use shmesh_sys::sigbus;

use super::Link;
use crate::participant::SeatWord;
use crate::ring::Ring;
use crate::segment::Lines;
use crate::sync::Ordering;

/// Tells, without borrowing a handle, that it has no message to receive. See [`Link::probe`].
#[derive(Clone, Debug)]
pub struct Probe {
    seat: SeatWord,
    seat_line: Lines,
    incoming: Ring,
}

impl Link {
    /// A probe of this handle, for threads that share the handle behind a lock: a poll that finds nothing needs no lock then.
    ///
    /// It keeps the link's own segment mapped, without the pools, even after the handle is dropped.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use std::sync::Mutex;
    /// let (probe, phy) = (phy.probe(), Mutex::new(phy));
    /// assert!(probe.is_empty());
    /// mac.send_inline(7, 0, b"up")?;
    /// assert!(!probe.is_empty() && phy.lock().expect("no thread panics").receive()?.is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn probe(&self) -> Probe {
        let me = &self.endpoint.me;
        Probe {
            seat: me.word,
            seat_line: self.core().seats.line(me.seat),
            incoming: self.endpoint.incoming.clone(),
        }
    }
}

impl Probe {
    /// Whether [`receive`](Link::receive) of the handle would have returned `None` at some time during this call.
    ///
    /// `false` says nothing: there may be no message, or an error to report. It is always `false` with ring modes other than
    /// `mpmc`, and once the handle is dropped.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        let Ring::Mpmc(ring) = &self.incoming else { return false };
        // As `receive` checks it. Relaxed there, too.
        let is_seated = self.seat.is(self.seat_line[0].word(0).load(Ordering::Relaxed));
        is_seated && !sigbus::any_damage() && ring.is_empty_now()
    }
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use crate::config::{LinkConfig, RingMode};
    use crate::{LinkOptions, Side};

    #[test]
    fn probe_reports_an_empty_ring_while_the_handle_has_its_seat() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let mut config = LinkConfig::new("link".parse().unwrap());
        config.ring_mode = RingMode::Mpmc;
        config.ring_len = 4;
        let phy = options.create(&config).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        let probe = phy.probe();
        for _ in 0..9 {
            assert!(probe.is_empty());
            mac.loan().unwrap().send().unwrap();
            mac.send_inline(0, 0, b"").unwrap();
            for _ in 0..2 {
                assert!(!probe.is_empty());
                drop(phy.receive().unwrap().unwrap());
            }
        }
        assert!(probe.is_empty());
        drop(phy);
        assert!(!probe.is_empty(), "`receive` would fail");
    }
}
