//! Emptying a link that an earlier run left behind.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::attachment::Attachment;
use super::open::{RECOVERY, RETRY};
use super::request_steps::RequestSteps as _;
use super::{Link, Shared};
use crate::error::{Error, ErrorKind, Result};
use crate::notify;
use crate::participant::{Participant, Side};
use crate::ring::Ring;

/// How long newcomers wait for a participant that empties the link. If it is stopped for longer, newcomers go ahead: they
/// may receive messages that it has not dropped yet, and it reports that the link was in use.
const EMPTYING_MAX: Duration = Duration::from_secs(1);

impl Link {
    /// Takes a seat once no participant is emptying the link, and recovers what dead participants held.
    pub(super) fn seated_beside_emptier(
        shared: &Arc<Shared>,
        attachment: &Arc<Attachment>,
        side: Side,
    ) -> Result<Self> {
        let start = Instant::now();
        loop {
            let link = Self::seated(Arc::clone(shared), Arc::clone(attachment), side)?;
            // A restarted process finds the seat of its predecessor free.
            link.recover()?;
            let (core, seats) = (link.core(), &link.core().seats);
            let Some(emptier) = seats.emptier(core.emptier_role()) else { return Ok(link) };
            if start.elapsed() >= EMPTYING_MAX {
                core.emptier_role().release(&emptier);
            }
            drop(link);
            std::thread::sleep(RETRY);
        }
    }

    /// Drops messages and posts of earlier participants. Fails unless this handle is the only participant.
    pub(super) fn empty(&self) -> Result<()> {
        let (core, me) = (self.core(), &self.endpoint.me);
        let in_use = |other: &Participant| {
            let (link, side, pid) = (self.link(), other.word.side(), other.word.pid());
            Error::from(ErrorKind::InUse { link, side, pid })
        };
        // As long as we have the role, newcomers detach again.
        core.seats.begin_to_empty(me, core.emptier_role()).map_err(|other| in_use(&other))?;
        let done = self.wait_to_be_alone(in_use).and_then(|()| self.drop_leftovers(in_use));
        let had_role = core.emptier_role().release(me);
        match self.other() {
            Some(other) if done.is_ok() && !had_role => Err(in_use(&other)),
            _ => done,
        }
    }

    /// Another participant. An evicted one does not count: it sends nothing more, and its process may hang for ever.
    fn other(&self) -> Option<Participant> {
        match self.core().seats.all_at_once() {
            Some(all) => {
                let mut others = all.into_iter().map(|(other, _)| other);
                others.find(|other| other.seat != self.seat() && !other.word.is_evicted())
            }
            // Participants come and go too fast to name one.
            None => Some(self.endpoint.me),
        }
    }

    fn wait_to_be_alone(&self, in_use: impl Fn(&Participant) -> Error) -> Result<()> {
        let start = Instant::now();
        while let Some(other) = self.other() {
            if start.elapsed() >= RECOVERY {
                return Err(in_use(&other));
            }
            std::thread::sleep(RETRY);
            // A process that was killed just before may have ended only now.
            self.recover()?;
        }
        Ok(())
    }

    fn drop_leftovers(&self, in_use: impl Fn(&Participant) -> Error) -> Result<()> {
        // A participant that was stopped for longer than `EMPTYING_MAX` has lost the role, and what waits is new.
        let keeps_role = || match self.core().emptier_role().holder(&self.core().seats) {
            Some(holder) if holder == self.endpoint.me => Ok(()),
            _ => Err(in_use(&self.other().unwrap_or(self.endpoint.me))),
        };
        keeps_role()?;
        // Newcomers detach before they can send, so everything that is queued now is old.
        let requests = self.core().requests().map_or(0, |requests| requests.ring.queued().count());
        for _ in 0..requests {
            match self.endpoint.take_request() {
                Ok(Some(taken)) => self.endpoint.release_request(&taken),
                Ok(None) => break,
                // A damaged message is dropped, too.
                Err(_) => {}
            }
        }
        for side in [Side::Primary, Side::Secondary] {
            keeps_role()?;
            let ring = self.core().incoming(side);
            notify::forget_posts(ring, notify::posted(ring));
            // With a participant of its own: this handle must not become the consumer or writer of a ring that has only
            // one.
            let mut temporary =
                Self::seated(Arc::clone(&self.shared), Arc::clone(&self.attachment), self.side())?;
            if let Ring::Broadcast(broadcast) = ring {
                temporary.endpoint.outgoing = ring.clone();
                temporary.endpoint.forget(broadcast, temporary.writer(broadcast)?);
                continue;
            }
            temporary.endpoint.incoming = ring.clone();
            let positions: Vec<_> = ring.queued().map(|(position, _)| position).collect();
            temporary.discard(&positions)?;
        }
        keeps_role()?;
        // Last: what waits has those types.
        self.core().clear_types();
        Ok(())
    }
}
