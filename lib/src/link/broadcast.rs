//! Readers of a broadcast ring, as the writer and they themselves see them.

use std::time::Duration;

use super::Link;
use crate::error::Result;
use crate::ring::Ring;
use crate::ring::broadcast::{Broadcast, Writer};

impl Link {
    /// Messages that this handle did not get because the writer overtook it: with ring mode `broadcast` and `slow: skip`. 0 on
    /// other links.
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
        if self.incoming().is_broadcast() { self.endpoint.reader().lost() } else { 0 }
    }

    /// Participants that get what the writer of a broadcast ring sends: those of the secondary side that were not evicted. 0 on
    /// other links.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("weights".parse()?);
    /// # config.ring_mode = shmesh::config::RingMode::Broadcast;
    /// let writer = options.create(&config)?;
    /// assert_eq!(writer.readers(), 0);
    /// let reader = options.attach("weights", shmesh::Side::Secondary)?;
    /// assert_eq!(writer.readers(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn readers(&self) -> usize {
        let count = |ring: &Ring| match ring {
            Ring::Broadcast(ring) => ring.readers(&self.core().seats).count(),
            Ring::Spsc(_) | Ring::Mpmc(_) => 0,
        };
        self.core().rings().iter().map(count).sum()
    }

    /// Waits until there are `count` [readers](Self::readers), at most `timeout` (`None`: for ever): for a writer that sends
    /// nothing before all are there. `false`: the time is over.
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
    /// writer.send_inline(1, 0, b"everybody gets this")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait_for_readers(&self, count: usize, timeout: Option<Duration>) -> Result<bool> {
        self.wait_for(timeout, self.shared.notify, |_| self.readers() >= count)
    }

    /// Loans once more, after messages that all have read, or that are skipped, were freed. `None`: the pool has no buffer.
    #[cold]
    pub(super) fn loan_after_freeing<T>(&self, loan: impl Fn() -> Option<T>) -> Result<Option<T>> {
        let Ring::Broadcast(ring) = self.outgoing() else { return Ok(None) };
        // Another has the role, and frees them.
        let Ok(writer) = self.writer(ring) else { return Ok(None) };
        loop {
            // What taking up the role has freed.
            if let Some(loan) = loan() {
                return Ok(Some(loan));
            }
            // Ends: messages of a ring are freed once, and a reader is evicted once.
            if !self.endpoint.make_free(ring, writer) && !self.evict_slow(ring, writer)? {
                return Ok(None);
            }
        }
    }

    /// Evicts the readers that have held the writer up for longer than they may. `false`: there are none.
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
    fn newcomer_is_not_evicted_in_place_of_the_reader_before_it() {
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
