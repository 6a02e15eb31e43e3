//! The tables of what the structures of a caller refer to: loans, messages and requests of a handle.

use std::sync::atomic::{AtomicUsize, Ordering};

use shmesh::{Loan, Message, PendingReply, Request};

/// The loans, messages and requests of one handle. They are dropped before its link.
#[derive(Debug)]
pub(crate) struct Borrows {
    pub(crate) loans: BorrowTable<Loan<'static>>,
    pub(crate) messages: BorrowTable<Message<'static>>,
    pub(crate) pending: BorrowTable<PendingReply<'static>>,
    pub(crate) requests: BorrowTable<Request<'static>>,
}

impl Borrows {
    pub(crate) fn new() -> Self {
        Self {
            loans: BorrowTable::new(),
            messages: BorrowTable::new(),
            pending: BorrowTable::new(),
            requests: BorrowTable::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.loans.in_use() + self.messages.in_use() + self.pending.in_use() + self.requests.in_use()
    }
}

/// A table of loans, messages or requests. A C structure refers to an entry by index and number. A number is used once, so a copy of a
/// structure that has ended refers to nothing.
#[derive(Debug)]
pub(crate) struct BorrowTable<T> {
    entries: Vec<BorrowEntry<T>>,
    vacant: Vec<u32>,
    /// The number of the newest entry; 0 is never used.
    last_number: u64,
}

#[derive(Debug)]
struct BorrowEntry<T> {
    /// 0 if the entry is vacant.
    number: u64,
    value: Option<T>,
}

impl<T> BorrowTable<T> {
    fn new() -> Self {
        // Far apart, so that the words of one handle do not match an entry of another.
        static TABLES: AtomicUsize = AtomicUsize::new(1);
        let table = TABLES.fetch_add(1, Ordering::Relaxed) as u64;
        let last_number = table.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { entries: Vec::new(), vacant: Vec::new(), last_number }
    }

    fn in_use(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    /// A vacant entry, which stays vacant until [`fill`](Self::fill). Values are made in place, because moving them costs more
    /// than the rest of a call.
    #[inline(always)]
    pub(crate) fn vacancy(&mut self) -> (u32, &mut Option<T>) {
        if self.vacant.is_empty() {
            self.grow();
        }
        let index = self.vacant[self.vacant.len() - 1];
        (index, &mut self.entries[index as usize].value)
    }

    #[cold]
    fn grow(&mut self) {
        // At most as many entries as a link has buffers: far fewer than 2^32.
        self.vacant.push(u32::try_from(self.entries.len()).unwrap_or(u32::MAX));
        self.entries.push(BorrowEntry { number: 0, value: None });
    }

    /// Marks the entry of [`vacancy`](Self::vacancy) as used. Returns the words that refer to it.
    #[inline(always)]
    pub(crate) fn fill(&mut self, index: u32) -> [u64; 2] {
        self.vacant.pop();
        self.last_number = self.last_number.wrapping_add(1).max(1);
        self.entries[index as usize].number = self.last_number;
        [index.into(), self.last_number]
    }

    #[inline(always)]
    pub(crate) fn find(&mut self, [index, number]: [u64; 2]) -> Option<(u32, &mut Option<T>)> {
        let index = u32::try_from(index).ok()?;
        let place = self.entries.get_mut(index as usize)?;
        (place.number == number && number != 0).then_some((index, &mut place.value))
    }

    /// Makes an entry of [`find`](Self::find) vacant. Its value was taken before.
    #[inline(always)]
    pub(crate) fn end(&mut self, index: u32) {
        self.entries[index as usize].number = 0;
        self.vacant.push(index);
    }
}
