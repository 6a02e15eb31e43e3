//! Emptying a link that an earlier run left.

use std::sync::Arc;
use std::time::Instant;

use super::Link;
use super::open::{RECOVERY, RETRY};
use crate::error::{Error, ErrorKind, Result};
use crate::notify;
use crate::participant::{Participant, Side};

impl Link {
    /// Drops what earlier participants sent and posted. Refused unless this handle is the only participant.
    pub(super) fn empty(&self) -> Result<()> {
        // Newcomers wait until the link is empty, unless a sidecar is present too.
        let is_closed = self.shared.lock.try_close().unwrap_or(false);
        let done = self.drop_leftovers();
        if is_closed {
            // Shared again; nobody else can have it meanwhile.
            let _ = self.shared.lock.try_join();
        }
        done
    }

    fn drop_leftovers(&self) -> Result<()> {
        let start = Instant::now();
        let leftovers = loop {
            // Counted before the seats are read: if no other seat is taken, the senders of all of it have left. What a
            // newcomer sends comes after it.
            let leftovers = [Side::Primary, Side::Secondary].map(|side| {
                let ring = self.core().incoming(side);
                (side, ring.queued().count(), notify::posted(ring))
            });
            // An evicted one sends nothing more, and its process may hang for ever.
            let is_other = |other: &Participant| other.seat != self.seat() && !other.word.is_evicted();
            let Some(other) = self.core().seats.all().find(is_other) else {
                break leftovers;
            };
            if start.elapsed() >= RECOVERY {
                return Err(Error::from(ErrorKind::InUse {
                    link: self.link(),
                    side: other.word.side(),
                    pid: other.word.pid(),
                }));
            }
            std::thread::sleep(RETRY);
            // Who was killed just before may have died only now.
            self.recover()?;
        };
        for (side, queued, posted) in leftovers {
            notify::forget_posts(self.core().incoming(side), posted);
            // A participant of its own: this handle must not become the consumer of a ring that has one. On the primary side,
            // whichever ring it is: a newcomer on the other one would take it for a second receiver there.
            let mut reader =
                Self::seated(Arc::clone(&self.shared), Arc::clone(&self.attachment), self.side())?;
            reader.endpoint.incoming = self.core().incoming(side).clone();
            for _ in 0..queued {
                match reader.receive() {
                    Ok(Some(message)) => drop(message),
                    Ok(None) => break,
                    // Dropped, too.
                    Err(error) if matches!(error.kind(), ErrorKind::Corrupt { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}
