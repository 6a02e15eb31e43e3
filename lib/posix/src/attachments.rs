//! Where this process has semaphores and System V segments mapped: a table of fixed size, behind a lock that a forked child takes
//! over when another thread of its parent had it.

// UNSAFETY: one place that only one thread at a time uses.
#![expect(
    unsafe_code,
    reason = "a lock that works in forked children, which none of the standard library does"
)]

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::sys;

/// As many as the kernel has System V segments by default, with room for semaphores.
const MAX_ATTACHMENTS: usize = 8192;

/// The purpose of a recorded mapping.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) enum Use {
    /// Nothing: a vacant place.
    Vacant,
    /// A named semaphore, opened once or more.
    Semaphore,
    /// A segment that the program has attached.
    Segment,
    /// A page that cannot be read, by which this process has a lease on a segment that it made or looked up.
    Interest,
}

/// One mapping of this process.
#[derive(Clone, Copy)]
pub(crate) struct ShmAttachment {
    pub(crate) purpose: Use,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) start: usize,
    pub(crate) len: usize,
    /// The process that mapped it; in a forked child it may be the parent.
    pub(crate) process: i32,
    /// How often the program has opened it.
    pub(crate) count: usize,
}

impl ShmAttachment {
    pub(crate) const NONE: Self =
        Self { purpose: Use::Vacant, device: 0, inode: 0, start: 0, len: 0, process: 0, count: 0 };
}

/// All mappings of this process.
pub(crate) struct AttachmentTable {
    places: [ShmAttachment; MAX_ATTACHMENTS],
    /// Places that were ever used, so that short tables are searched quickly.
    used: usize,
}

impl AttachmentTable {
    pub(crate) fn find(&mut self, is_it: impl Fn(&ShmAttachment) -> bool) -> Option<&mut ShmAttachment> {
        self.all().find(|place| place.purpose != Use::Vacant && is_it(place))
    }

    /// A place for a new mapping; `None`: all are taken.
    pub(crate) fn vacant(&mut self) -> Option<&mut ShmAttachment> {
        if self.all().all(|place| place.purpose != Use::Vacant) {
            self.used = self.used.saturating_add(1);
        }
        self.all().find(|place| place.purpose == Use::Vacant)
    }

    pub(crate) fn all(&mut self) -> impl Iterator<Item = &mut ShmAttachment> {
        self.places.iter_mut().take(self.used)
    }
}

/// The table behind its lock.
pub(crate) struct Attachments {
    /// The process that has the lock; 0 if none has. In a forked child it may be the parent, one of whose threads had it.
    owner: AtomicI32,
    table: UnsafeCell<AttachmentTable>,
}

// SAFETY: the table is used by the thread that has the lock only.
unsafe impl Sync for Attachments {}

pub(crate) static ATTACHMENTS: Attachments = Attachments {
    owner: AtomicI32::new(0),
    table: UnsafeCell::new(AttachmentTable { places: [ShmAttachment::NONE; MAX_ATTACHMENTS], used: 0 }),
};

impl Attachments {
    /// Calls `with` while no other thread has the table. It must not call this again.
    pub(crate) fn with<T>(&self, with: impl FnOnce(&mut AttachmentTable) -> T) -> T {
        let us = sys::pid();
        loop {
            match self.owner.compare_exchange(0, us, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                // Of the parent: its thread does not exist here. It wrote at most one entry, which may be incomplete.
                Err(owner) if owner != us => {
                    if self.owner.compare_exchange(owner, us, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        break;
                    }
                }
                Err(_) => sys::yield_now(),
            }
        }
        // SAFETY: the lock is ours, and `with` is called once.
        let result = with(unsafe { &mut *self.table.get() });
        self.owner.store(0, Ordering::Release);
        result
    }
}
