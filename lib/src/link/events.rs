//! Peer events: other participants attach, detach and die.

use std::time::Duration;

use super::Link;
use super::wait::Sleep;
use crate::error::Result;
use crate::participant::PeerEvent;

/// The result of [`Link::wait_any`]. All fields are false if it timed out, or if another receiver has taken the message.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct WaitOutcome {
    /// A message can be received.
    pub message: bool,
    /// [`Link::receive_request`] has a request.
    pub request: bool,
    /// [`Link::next_event`] has an event.
    pub event: bool,
}

impl Link {
    /// The next event of another participant: it attached, detached, died or was evicted, or messages of the other side were lost
    /// between nodes. Returns `None` if there is none. Never waits.
    /// Participants that are attached when this handle attaches are reported first, as attached. From then on, each
    /// participant is reported once as attached, and later once as detached, died or evicted. No queue can overflow: a
    /// handle that does not ask for a long time gets [`PeerEvent::Missed`] with the number of participants that came and
    /// went meanwhile. Each handle has its own events.
    ///
    /// A death becomes an event when a process recovers the dead participant's buffers, which the monitor of any process on
    /// the link does within milliseconds.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use shmesh::PeerEvent;
    /// while let Some(event) = phy.next_event() {
    ///     match event {
    ///         PeerEvent::Attached(peer) => println!("{} {} attached", peer.word.side(), peer.word.pid()),
    ///         PeerEvent::Died(peer) => println!("{} {} died", peer.word.side(), peer.word.pid()),
    ///         event => println!("{event:?}"),
    ///     }
    /// }
    /// assert!(!phy.has_event());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn next_event(&self) -> Option<PeerEvent> {
        self.peers.borrow_mut().next(&self.core().seats)
    }

    /// Whether [`next_event`](Self::next_event) has an event.
    #[must_use]
    pub fn has_event(&self) -> bool {
        self.peers.borrow_mut().look(&self.core().seats)
    }

    /// Waits until [`next_event`](Self::next_event) has an event, for at most `timeout` (`None`: no limit). Returns `false`
    /// if it timed out.
    ///
    /// It sleeps on a futex in shared memory that is only for events, so it costs senders nothing. It also sleeps on a link
    /// without notification.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use std::time::Duration;
    /// assert!(!phy.wait_event(Some(Duration::from_millis(1)))?);
    /// let waiter = std::thread::spawn(move || phy.wait_event(None));
    /// let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// assert!(waiter.join().expect("it does not panic")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait_event(&self, timeout: Option<Duration>) -> Result<bool> {
        let sleep = Sleep::Events(self.core().seats.event_sleepers());
        self.lease.wait_on(timeout, Some(sleep), || self.has_event())
    }

    /// Waits until there is a message, a request or an event, for at most `timeout` (`None`: no limit).
    ///
    /// It returns at once as long as any is pending, so receive all messages, requests and events before waiting again. To
    /// wait for messages alone, use [`wait`](Self::wait). On a link without notification it spins.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// use shmesh::PeerEvent;
    /// mac.send_inline(1, 0, b"the last one")?;
    /// drop(mac);
    /// let (mut received, mut is_over) = (0, false);
    /// while !is_over {
    ///     phy.wait_any(None)?;
    ///     while phy.receive()?.is_some() {
    ///         received += 1;
    ///     }
    ///     while let Some(event) = phy.next_event() {
    ///         is_over |= matches!(event, PeerEvent::Detached(_) | PeerEvent::Died(_));
    ///     }
    /// }
    /// assert_eq!(received, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait_any(&self, timeout: Option<Duration>) -> Result<WaitOutcome> {
        self.wait_for(timeout, self.shared.notify, |_| {
            self.has_message() || self.has_request() || self.has_event()
        })?;
        Ok(WaitOutcome { message: self.has_message(), request: self.has_request(), event: self.has_event() })
    }

    /// Reports to the receivers of the other side that `messages` for them were lost before they reached the link. For programs that
    /// forward messages of others, as the bridge between nodes does.
    ///
    /// A receiver that gets a message which is sent after this call sees them in [`lost`](Self::lost) and has
    /// [`PeerEvent::Lost`] already. Participants that wait are woken.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::{PeerEvent, Side};
    /// let forwarder = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// let mac = options.attach("fronthaul", Side::Secondary)?;
    /// forwarder.report_lost(3);
    /// forwarder.send_inline(4, 0, b"the fourth")?;
    /// assert_eq!(mac.receive()?.expect("it was sent").msg_id(), 4);
    /// assert_eq!(mac.lost(), 3);
    /// assert!(std::iter::from_fn(|| mac.next_event()).any(|event| event == PeerEvent::Lost(3)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn report_lost(&self, messages: u64) {
        if messages > 0 {
            self.core().seats.count_lost(self.endpoint.me.word.side(), messages);
            self.shared.wake_to_look_for_events();
        }
    }

    /// Announces that this participant has attached.
    pub(super) fn announce_attached(&self) {
        self.core().seats.record_attached(&self.endpoint.me);
        self.shared.wake_for_events();
    }
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use crate::config::LinkConfig;
    use crate::notify::Sleepers;
    use crate::{LinkOptions, PeerEvent, Side};

    /// If the participant slept with the receivers, each notification of its side would be a system call.
    #[test]
    fn waiting_for_events_costs_senders_no_system_call() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let phy = options.create(&LinkConfig::new("link".parse().unwrap())).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        assert!(matches!(phy.next_event(), Some(PeerEvent::Attached(_))));
        let waiter = std::thread::spawn(move || (phy.wait_event(None).unwrap(), phy.next_event(), phy));
        let seats = mac.core().seats.clone();
        let asleep = |sleepers: Sleepers<'_>| sleepers.asleep().count_ones();
        while asleep(seats.event_sleepers()) == 0 {
            assert!(!waiter.is_finished());
            std::thread::yield_now();
        }
        let rung = seats.rung();
        for i in 0..1000 {
            mac.send_inline(i, 0, b"x").unwrap();
            mac.notify().unwrap();
        }
        assert_eq!((seats.rung() - rung, asleep(Sleepers::of(mac.outgoing()))), (0, 0));
        assert!(!waiter.is_finished());
        drop(mac);
        let (woken, event, phy) = waiter.join().unwrap();
        assert!(woken && matches!(event, Some(PeerEvent::Detached(_))));
        assert_eq!((asleep(seats.event_sleepers()), phy.queued()), (0, 1000));
    }
}
