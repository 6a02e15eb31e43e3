//! The part of a link that all handles of this process share beside its memory: the monitor's watch, the host role, and
//! detaching.
//!
//! Every process on a link shares the attachment lock of `<link>.lock`, from before it takes a seat until it has detached. A
//! process that detaches removes the link only if it can take that lock exclusively, so that no process is left on a
//! link without a name.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::Shared;
use super::host::{HostListener, HostSocket, serve_memory};
use super::monitor::{LinkWatch, Start};
use crate::config::{Backing, PoolId};
use crate::error::Result;
use crate::segment::lock::Host;

/// Maximum number of processes that may detach one after the other while one of them checks whether it is the last.
const RETIRE_ROUNDS_MAX: u32 = 128;

/// This process's attachment to a link, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct Attachment {
    shared: Arc<Shared>,
    /// The socket on which this process listens as the link's host.
    place: Mutex<Option<HostSocket>>,
    watch: OnceLock<LinkWatch>,
}

impl Attachment {
    /// The attachment lock must be shared already.
    pub(super) fn new(shared: &Arc<Shared>, listening: Option<&HostListener>) -> Self {
        let place = listening.map(|listening| listening.place.clone());
        Self { shared: Arc::clone(shared), place: Mutex::new(place), watch: OnceLock::new() }
    }

    /// Becomes the host of a link that needs one and has none. Returns `false` if there is a host, or none is needed.
    pub(super) fn become_host(&self) -> Result<bool> {
        let Some(watch) = self.watch.get().filter(|_| self.shared.me.is_me()) else { return Ok(false) };
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(listening) = serve_memory(&self.shared, Some(Host::Participant))? else { return Ok(false) };
        *place = Some(listening.place.clone());
        watch.serve(listening);
        Ok(true)
    }

    /// Lets the monitor watch the link, and serve it as its host.
    pub(super) fn watch(&self, start: Start) -> Result<()> {
        let _ = self.watch.set(LinkWatch::start(&self.shared, start)?);
        Ok(())
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // A forked child must not detach its parent.
        if !self.shared.me.is_me() {
            return;
        }
        if let Some(place) = self.place.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            place.end(&self.shared.lock);
        }
        if let Some(watch) = self.watch.take() {
            watch.stop();
        }
        remove_if_last(&self.shared);
        // The lock file stays open as long as a handle of this process maps memory of the link.
        self.shared.lock.release();
    }
}

/// Removes the link if no process is on it and no message is queued.
fn remove_if_last(shared: &Shared) {
    let lock = &shared.lock;
    lock.leave();
    // Repeated for each process that detaches at this moment.
    for _ in 0..RETIRE_ROUNDS_MAX {
        // A process with the host role creates the link, or will run this check after us.
        if !lock.try_take_host_role().unwrap_or(false) || !lock.is_named() {
            return;
        }
        if lock.try_close().unwrap_or(false) {
            return remove(shared);
        }
        lock.leave_host_role();
        // Remaining processes check when they detach. If they detached while we had the role, they left the removal to us.
        if lock.others_joined().unwrap_or(true) {
            return;
        }
    }
}

/// Removes the files of a link that no process is on, unless messages are queued. Requires the host role and the
/// exclusive attachment lock.
fn remove(shared: &Shared) {
    let (lock, store) = (&shared.lock, &shared.store);
    if store.backing == Backing::Named {
        if shared.core.rings().iter().any(|ring| ring.has_message()) {
            return;
        }
        for dead in shared.core.seats.all() {
            shared.remove_bell(&dead);
        }
        let epoch = shared.segments.first().map_or(0, |segment| segment.header.epoch);
        // The link's own segment first: without it there is no link.
        for pool in std::iter::once(None).chain(PoolId::ALL.map(Some)) {
            let spare = pool.map(|pool| store.spare_path(pool, epoch));
            for path in std::iter::once(store.path(pool)).chain(spare) {
                // If this process was stopped, a creator may have given up waiting and created another link.
                if !lock.is_named() {
                    return;
                }
                let _ = store.remove(&path, pool, epoch);
            }
        }
    }
    let _ = lock.remove();
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use crate::config::LinkConfig;
    use crate::{LinkOptions, Side};

    /// The process was stopped while it had the right to remove the link, and a creator went ahead without it.
    #[test]
    fn stopped_removal_does_not_remove_the_next_link() {
        let dir = tempfile::tempdir().unwrap();
        let (options, config) =
            (LinkOptions::new().dir(dir.path()), LinkConfig::new("link".parse().unwrap()));
        let old = options.create(&config).unwrap();
        let shared = std::sync::Arc::clone(&old.shared);
        // The steps of the creator.
        shared.store.remove(&shared.store.path(None), None, shared.segments[0].header.epoch).unwrap();
        assert!(shared.lock.remove().unwrap());
        let new = options.create(&config).unwrap();
        assert!(new.was_created());
        super::remove(&shared);
        // Even at its last step.
        assert!(!shared.lock.remove().unwrap_or(false));
        let epoch = shared.segments[0].header.epoch;
        assert!(!shared.store.remove(&shared.store.path(None), None, epoch).unwrap());
        let mac = options.attach("link", Side::Secondary).unwrap();
        mac.send_inline(1, 0, b"to the new one").unwrap();
        assert_eq!((new.queued(), old.queued()), (1, 0));
        drop((old, mac));
        assert!(options.attach("link", Side::Secondary).is_ok());
    }
}
