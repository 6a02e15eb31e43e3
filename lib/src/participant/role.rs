//! Roles, each of which one participant has at a time: primary of a link, producer or consumer of a ring with one.

use super::{Participant, SeatIndex, Seats};
use crate::sync::{AtomicU64, Ordering};

const HELD: u64 = 1;

/// The word of a role: `| epoch of the seat 16 | seat 8 | held 1 |`, or 0.
///
/// It names its holder by seat and epoch, so it needs no cleaning when the holder dies: once the seat is vacant, or belongs
/// to another participant, the role is open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Role<'a>(pub(crate) &'a AtomicU64);

impl Role<'_> {
    fn word(participant: &Participant) -> u64 {
        participant.word.epoch() << 9 | u64::from(participant.seat.value()) << 1 | HELD
    }

    fn holder_of(word: u64, seats: &Seats) -> Option<Participant> {
        if word & HELD == 0 {
            return None;
        }
        let holder = seats.at(SeatIndex::from_wild(word >> 1 & 0xff)?)?;
        (Self::word(&holder) == word).then_some(holder)
    }

    /// Takes the role. If another participant that is still seated has it, returns that participant.
    pub(crate) fn claim(&self, me: &Participant, seats: &Seats) -> Result<(), Participant> {
        let mut current = self.0.load(Ordering::Acquire);
        // One round for each participant that could take it between the load and the exchange.
        for _ in 0..super::MAX_SEATS {
            if current == Self::word(me) {
                return Ok(());
            }
            if let Some(holder) = Self::holder_of(current, seats) {
                return Err(holder);
            }
            // Acquire pairs with the Release of `release`: the last holder's writes to the ring come before ours.
            match self.0.compare_exchange(current, Self::word(me), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(()),
                Err(now) => current = now,
            }
        }
        Err(*me)
    }

    /// The participant that has the role, if it is still seated.
    pub(crate) fn holder(&self, seats: &Seats) -> Option<Participant> {
        Self::holder_of(self.0.load(Ordering::Acquire), seats)
    }

    /// Gives up the role. Returns `false` if `holder` no longer has it.
    pub(crate) fn release(&self, holder: &Participant) -> bool {
        self.0.compare_exchange(Self::word(holder), 0, Ordering::Release, Ordering::Relaxed).is_ok()
    }
}
