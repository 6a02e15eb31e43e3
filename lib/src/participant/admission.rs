//! Admission: deciding between participants that attach at the same moment.
//!
//! `EMPTY`: a participant that empties the link takes a role and then looks at the seats; a newcomer takes its seat and
//! then looks at that role. A sequentially consistent fence stands between the two steps of each, so at least one of
//! them sees the other. Otherwise both could continue, and the newcomer would receive messages that are being dropped.
//!
//! A side that takes one process only has a role for its admission, held from the look at the seats until the newcomer
//! is in the history of its seat. So of two processes that attach at once exactly one is admitted.

use super::{Participant, Role, SeatIndex, SeatWord, Seats};
use crate::sync::{Ordering, fence};

/// Whether a newcomer may be the only process of its side.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Admission {
    /// The newcomer may stay. It holds the role until it is in the history of its seat, or leaves.
    Admitted,
    /// A participant of another process is attached already.
    Taken(Participant),
    /// Another participant is being admitted at this moment, or participants change too fast to tell: retry.
    Undecided(Participant),
}

impl Seats {
    /// All participants that were seated at one instant, and whether each was attached by its history then. `None` if
    /// participants change too fast for that, or a hostile one makes it seem so.
    pub(crate) fn all_at_once(&self) -> Option<Vec<(Participant, bool)>> {
        // Acquire: a reader of the departure of a handle sees the clone that it left behind at its next look.
        let look = || {
            SeatIndex::all()
                .map(|seat| (self.word(seat).load(Ordering::Acquire), self.history(seat).unmarked()))
                .collect::<Vec<_>>()
        };
        let mut before = look();
        for _ in 0..super::MAX_SEATS {
            let now = look();
            // Both words count the participants of their seat. So nothing changed between the end of the first look and the
            // beginning of the second.
            if now == before {
                let seats = SeatIndex::all().zip(now).filter_map(|(seat, (word, history))| {
                    let who = self.seen(seat, SeatWord(word))?;
                    Some((who, history.is_attached(&who)))
                });
                return Some(seats.collect());
            }
            before = now;
        }
        None
    }

    /// Decides whether `me` may be the only process on its side. `role` is the side's admission role; `is_mine` says
    /// whether a participant belongs to this process.
    pub(crate) fn admit_alone(
        &self,
        me: &Participant,
        role: Role<'_>,
        is_mine: impl Fn(&Participant) -> bool,
    ) -> Admission {
        if let Err(holder) = role.claim(me, self) {
            return Admission::Undecided(holder);
        }
        let refused = match self.all_at_once() {
            None => Admission::Undecided(*me),
            Some(all) => {
                let rival = |(other, is_attached): &(Participant, bool)| {
                    *is_attached && other.word.side() == me.word.side() && !is_mine(other)
                };
                match all.into_iter().find(rival) {
                    None => return Admission::Admitted,
                    Some((owner, _)) => Admission::Taken(owner),
                }
            }
        };
        role.release(me);
        refused
    }

    /// Takes the role of the participant that empties the link. Look at the seats after this.
    pub(crate) fn begin_to_empty(&self, me: &Participant, role: Role<'_>) -> Result<(), Participant> {
        role.claim(me, self)?;
        // EMPTY
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// The participant that is emptying the link. Take a seat before this.
    pub(crate) fn emptier(&self, role: Role<'_>) -> Option<Participant> {
        // EMPTY
        fence(Ordering::SeqCst);
        role.holder(self)
    }
}
