//! Readers of a broadcast ring: counting them, waiting for them, evicting slow ones.

use std::time::Duration;

use super::Link;
use crate::error::Result;
use crate::ring::Ring;
use crate::ring::broadcast::{Broadcast, Writer};

impl Link {
    /// Number of messages that this handle did not get since it attached.
    ///
    /// The writer overtook it, with ring mode `broadcast` and `slow: skip`; or a bridge ended while it had them, on a link between nodes,
    /// in any mode ([`PeerEvent::Lost`](crate::PeerEvent::Lost)). Those are counted before the first message after them can be received,
    /// and for every participant of the receiving side. Posts count, too. A bridge that is killed may count some twice, or some that come
    /// after all.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("prices".parse()?);
    /// use shmesh::{Side, config::{RingMode, SlowReaders}};
    /// config.ring_mode = RingMode::Broadcast;
    /// config.ring_len = 4;
    /// config.broadcast.slow = SlowReaders::Skip;
    /// let writer = options.create(&config)?;
    /// let reader = options.attach("prices", Side::Secondary)?;
    /// for price in 0..10 {
    ///     writer.send_inline(price, 0, b"")?;
    /// }
    /// assert_eq!(reader.receive()?.expect("the newest").msg_id(), 9);
    /// assert_eq!(reader.lost(), 9);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn lost(&self) -> u64 {
        let overtaken = if self.incoming().is_broadcast() { self.endpoint.reader().lost() } else { 0 };
        overtaken.wrapping_add(self.peers.borrow().lost(&self.core().seats))
    }

    /// The position of the next message that this handle receives: the number of messages that were sent on the link before it.
    /// `None` on links that are not `broadcast`. It tells a reader that attaches again what it missed.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("prices".parse()?);
    /// use shmesh::{Side, config::RingMode};
    /// config.ring_mode = RingMode::Broadcast;
    /// let writer = options.create(&config)?;
    /// let reader = options.attach("prices", Side::Secondary)?;
    /// assert_eq!(reader.position(), Some(0));
    /// drop(reader);
    /// writer.send_inline(1, 0, b"")?;
    /// let reader = options.attach("prices", Side::Secondary)?;
    /// assert_eq!(reader.position(), Some(1), "it missed one");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn position(&self) -> Option<u64> {
        self.incoming().is_broadcast().then(|| self.endpoint.reader().position())
    }

    /// Number of readers of a broadcast ring: participants of the secondary side that were not evicted. 0 on other links.
    #[must_use]
    pub fn readers(&self) -> usize {
        let count = |ring: &Ring| match ring {
            Ring::Broadcast(ring) => ring.readers(&self.core().seats).count(),
            Ring::Spsc(_) | Ring::Mpmc(_) => 0,
        };
        self.core().rings().iter().map(count).sum()
    }

    /// Waits until there are `count` [readers](Self::readers), for at most `timeout` (`None`: no limit). Use it in a writer
    /// that must not send before all readers are attached. Returns `false` if it timed out.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("weights".parse()?);
    /// # config.ring_mode = shmesh::config::RingMode::Broadcast;
    /// use std::time::Duration;
    /// let writer = options.create(&config)?;
    /// assert!(!writer.wait_for_readers(1, Some(Duration::from_millis(1)))?);
    /// let reader = options.attach("weights", shmesh::Side::Secondary)?;
    /// assert!(writer.wait_for_readers(1, None)?);
    /// writer.send_inline(1, 0, b"for every reader")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait_for_readers(&self, count: usize, timeout: Option<Duration>) -> Result<bool> {
        self.wait_for(timeout, self.shared.notify, |_| self.readers() >= count)
    }

    /// Loans again, after freeing messages that all readers have read, or that are skipped. Returns `None` if the pool has
    /// no buffer.
    #[cold]
    pub(super) fn loan_after_freeing<T>(&self, loan: impl Fn() -> Option<T>) -> Result<Option<T>> {
        let Ring::Broadcast(ring) = self.outgoing() else { return Ok(None) };
        // Another participant has the writer's role, and frees them.
        let Ok(writer) = self.writer(ring) else { return Ok(None) };
        loop {
            // Taking the role may have freed some.
            if let Some(loan) = loan() {
                return Ok(Some(loan));
            }
            // Terminates: messages of a ring are freed once, and a reader is evicted once.
            if !self.endpoint.make_free(ring, writer) && !self.evict_slow(ring, writer)? {
                return Ok(None);
            }
        }
    }

    /// Evicts readers that have blocked the writer for longer than allowed. Returns `false` if there are none.
    #[cold]
    pub(super) fn evict_slow(&self, ring: &Broadcast, writer: &Writer) -> Result<bool> {
        let Some(limit) = ring.evicts_after() else { return Ok(false) };
        let slow = ring.holding_up(writer, &self.core().seats);
        if slow.is_empty() || !ring.is_patience_over(writer, limit) {
            return Ok(false);
        }
        for (seat, word) in slow {
            // Not a newcomer that has taken the seat since.
            if let Some(reader) = self.core().seats.at(seat).filter(|now| now.word.is_same(word)) {
                self.evict_participant(&reader)?;
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use crate::config::{LinkConfig, RingMode, SlowReaders};
    use crate::{LinkOptions, Side};

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn newcomer_is_not_evicted_in_place_of_its_predecessor() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let mut config = LinkConfig::new("prices".parse().unwrap());
        config.ring_mode = RingMode::Broadcast;
        config.broadcast.slow = SlowReaders::Evict;
        let writer = options.create(&config).unwrap();
        let slow = options.attach("prices", Side::Secondary).unwrap().endpoint.me;
        let newcomer = options.attach("prices", Side::Secondary).unwrap();
        assert_eq!(newcomer.seat(), slow.seat, "the slow one has left");
        assert_eq!(writer.evict_participant(&slow).unwrap().participants, 0);
        writer.send_inline(1, 0, b"").unwrap();
        assert!(newcomer.receive().unwrap().is_some());
    }
}
