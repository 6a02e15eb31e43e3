//! What keeps a seat: the handle of a participant, and the messages and loans that outlive a borrow of it.

use std::sync::Arc;

use super::Shared;
use super::attachment::Attachment;
use super::core::{Core, DataRef};
use crate::participant::Participant;
use crate::pool::owner::MsgOwner;

/// A participant's right to its seat. The last to drop it leaves the link.
///
/// Every owner word that names the seat is of a buffer that the handle or an owned message holds, so the seat must not be
/// another's before all of them are gone.
#[derive(Debug)]
pub(super) struct SeatLease {
    pub(super) shared: Arc<Shared>,
    pub(super) me: Participant,
    /// The process stays present on the link, and its monitor at work, as long as it has a seat.
    _attachment: Arc<Attachment>,
}

impl SeatLease {
    pub(super) fn new(shared: &Arc<Shared>, me: Participant, attachment: &Arc<Attachment>) -> Arc<Self> {
        Arc::new(Self { shared: Arc::clone(shared), me, _attachment: Arc::clone(attachment) })
    }

    #[inline]
    pub(super) fn core(&self) -> &Core {
        &self.shared.core
    }

    /// Frees the buffers of a message or loan, from any thread.
    pub(super) fn release(&self, cell: u32, owner: MsgOwner, data: DataRef) {
        // A forked child has copies of what its parent holds. Refused only if the participant was evicted.
        if self.shared.me.is_me() {
            let _ = self.core().release_anywhere(cell, owner, data);
        }
    }
}

impl Drop for SeatLease {
    fn drop(&mut self) {
        // A forked child has no right to give up the parent's seat.
        if self.shared.me.is_me() {
            self.shared.unlock(&self.me);
            self.shared.core.leave(&self.me);
            self.shared.wake_for_events();
        }
    }
}
