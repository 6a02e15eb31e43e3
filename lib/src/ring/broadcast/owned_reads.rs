//! Messages of a broadcast ring that do not borrow from their reader's handle, and are released in any thread.
//!
//! They are private to the process: other participants see the cursor and the holds, which stay as they are for messages
//! that borrow. The lock orders the threads that release. So the Release of a cursor (`PASSED`) covers what all of them
//! have read before.

use std::collections::VecDeque;

use super::{Broadcast, CURSOR, HOLDS, HOLDS_MAX, ReadToken, Reader};
use crate::participant::{Participant, Seats};
use crate::sync::{Mutex, MutexGuard, Ordering, lock};

/// The owned messages of a reader. Its handle and these messages share it.
#[derive(Debug)]
pub(crate) struct OwnedReads(Mutex<State>);

#[derive(Debug)]
struct State {
    /// The oldest message that the handle holds, or its next one. `None` after the handle was dropped.
    handle: Option<u64>,
    /// The tokens of the owned messages, in order.
    tokens: VecDeque<u64>,
    /// The holds that owned messages had, as bits, until the handle uses them again.
    returned: u8,
}

impl OwnedReads {
    pub(super) fn new(first: u64) -> Self {
        Self(Mutex::new(State { handle: Some(first), tokens: VecDeque::new(), returned: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl State {
    /// The position of the cursor. `None` if nothing is left to receive or to release.
    fn cursor(&self) -> Option<u64> {
        match (self.handle, self.tokens.front().copied()) {
            (Some(handle), Some(owned)) if owned.wrapping_sub(handle).cast_signed() > 0 => Some(handle),
            (handle, owned) => owned.or(handle),
        }
    }
}

impl Broadcast {
    /// Makes a received message in a buffer independent of the handle. Returns `false` if it has to be copied instead,
    /// because all holds of a ring with `skip` are in use: then the handle could not receive any more.
    pub(crate) fn own(&self, me: &Reader, token: ReadToken) -> bool {
        if self.skips() && self.free_hold(me).is_none() {
            return false;
        }
        self.own_hold(me, token);
        true
    }

    /// As [`own`](Self::own), even if all holds are in use.
    pub(crate) fn own_hold(&self, me: &Reader, ReadToken(token): ReadToken) {
        let mut owned = me.owned.lock();
        let at = owned.tokens.partition_point(|&other| other < token);
        owned.tokens.insert(at, token);
        if self.skips() {
            return;
        }
        owned.handle = Some(me.oldest.get());
        me.has_owned.set(true);
        drop(owned);
        // From here on, the token keeps the cursor, and not the handle.
        self.release(me, ReadToken(token));
    }

    /// A free hold. Takes back the holds of owned messages that were released.
    #[inline]
    pub(super) fn free_hold(&self, me: &Reader) -> Option<usize> {
        let free = |holds: u8| Some((!holds).trailing_zeros() as usize).filter(|hold| *hold < HOLDS_MAX);
        free(me.holds.get()).or_else(|| {
            let returned = std::mem::take(&mut me.owned.lock().returned);
            me.holds.set(me.holds.get() & !returned);
            free(me.holds.get())
        })
    }

    /// Moves the handle's part of a cursor that owned messages may keep.
    #[cold]
    pub(super) fn move_shared_cursor(&self, me: &Reader, oldest: u64) {
        let mut owned = me.owned.lock();
        owned.handle = Some(oldest);
        me.has_owned.set(!owned.tokens.is_empty());
        // PASSED
        me.line[0].word(CURSOR).store(owned.cursor().unwrap_or(oldest), Ordering::Release);
    }

    /// Releases an owned message of `who`, from any thread.
    pub(crate) fn release_owned(
        &self,
        owned: &OwnedReads,
        who: &Participant,
        seats: &Seats,
        token: ReadToken,
    ) {
        // The line may be another reader's by now.
        if !seats.is_seated(who) {
            return;
        }
        let ReadToken(token) = token;
        let line = &self.cursors[who.seat.as_usize()];
        let mut owned = owned.lock();
        if let Ok(at) = owned.tokens.binary_search(&token) {
            owned.tokens.remove(at);
        }
        if self.skips() {
            // PASSED
            #[expect(clippy::cast_possible_truncation, reason = "the number of a hold")]
            line.word(HOLDS + token as usize).store(0, Ordering::Release);
            owned.returned |= 1 << token;
        } else if let Some(cursor) = owned.cursor() {
            // PASSED
            line.word(CURSOR).store(cursor, Ordering::Release);
        }
        if owned.handle.is_none() && owned.tokens.is_empty() {
            self.unsubscribe(who.seat);
        }
    }

    /// Unsubscribes a reader whose handle is dropped: now, or with the last of its owned messages. Until then the writer
    /// keeps their buffers.
    pub(crate) fn leave(&self, me: &Reader, who: &Participant) {
        let mut owned = me.owned.lock();
        owned.handle = None;
        match owned.cursor() {
            None => self.unsubscribe(who.seat),
            Some(_) if self.skips() => {}
            // PASSED
            Some(cursor) => me.line[0].word(CURSOR).store(cursor, Ordering::Release),
        }
    }
}
