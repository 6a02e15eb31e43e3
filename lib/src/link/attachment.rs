//! What all handles of this process on one link share beside its memory: being watched, being the host, and the end of both.
//!
//! Every process on a link shares the presence, a lock on `<link>.lock`, from before it takes a seat until it has left. Who leaves
//! removes the link only if it can shut the presence for all others, so nobody is left on a link without a name.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::Shared;
use super::host::{Listening, Place};
use super::monitor::{Start, Watch};
use super::open::serve_memory;
use crate::config::{Backing, PoolId};
use crate::error::Result;
use crate::segment::lock::Host;

/// Processes that can leave one after the other while one of them looks whether it is the last.
const RETIRE_ROUNDS_MAX: u32 = 128;

/// This process's part in a link, until it is dropped.
#[derive(Debug)]
pub(super) struct Attachment {
    shared: Arc<Shared>,
    /// Where this process listens as the link's host.
    place: Mutex<Option<Place>>,
    watch: OnceLock<Watch>,
}

impl Attachment {
    /// The presence must be joined.
    pub(super) fn new(shared: &Arc<Shared>, listening: Option<&Listening>) -> Self {
        let place = listening.map(|listening| listening.place.clone());
        Self { shared: Arc::clone(shared), place: Mutex::new(place), watch: OnceLock::new() }
    }

    /// Becomes the host of a link that needs one and has none. `false`: there is one, or none is needed.
    pub(super) fn become_host(&self) -> Result<bool> {
        let Some(watch) = self.watch.get().filter(|_| self.shared.me.is_me()) else { return Ok(false) };
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(listening) = serve_memory(&self.shared, Some(Host::Participant))? else { return Ok(false) };
        *place = Some(listening.place.clone());
        watch.serve(listening);
        Ok(true)
    }

    /// Has the monitor watch the link, and serve it.
    pub(super) fn watch(&self, start: Start) -> Result<()> {
        let _ = self.watch.set(Watch::start(&self.shared, start)?);
        Ok(())
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // A forked child has no say in it.
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
        // The lock file stays open for as long as somebody here holds memory of the link.
        self.shared.lock.release();
    }
}

/// Removes the link if nobody is there any more and nothing waits in it.
fn remove_if_last(shared: &Shared) {
    let lock = &shared.lock;
    lock.leave();
    // Once more for each process that leaves just now.
    for _ in 0..RETIRE_ROUNDS_MAX {
        // Whoever has the duty creates the link, or has to come here too, after us.
        if !lock.try_take_duty().unwrap_or(false) || !lock.is_named() {
            return;
        }
        if lock.try_close().unwrap_or(false) {
            return remove(shared);
        }
        lock.leave_duty();
        // Those who are here will look when they go; but if they went while we had the duty, they left it to us.
        if lock.others_joined().unwrap_or(true) {
            return;
        }
    }
}

/// Removes the files of a link that nobody is on, unless messages wait in it. Only with the duty, and the presence shut.
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
                // A creator that waited in vain, because this process was stopped, has made another link meanwhile.
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

    /// It was stopped with the right to remove the link, and a creator has gone past it.
    #[test]
    fn process_that_goes_on_removing_a_link_spares_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let (options, config) =
            (LinkOptions::new().dir(dir.path()), LinkConfig::new("link".parse().unwrap()));
        let old = options.create(&config).unwrap();
        let shared = std::sync::Arc::clone(&old.shared);
        // As the creator does.
        shared.store.remove(&shared.store.path(None), None, shared.segments[0].header.epoch).unwrap();
        assert!(shared.lock.remove().unwrap());
        let new = options.create(&config).unwrap();
        assert!(new.was_created());
        super::remove(&shared);
        // Even from its last step on.
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
