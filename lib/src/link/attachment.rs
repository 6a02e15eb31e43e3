//! The part of a link that all handles of this process share beside its memory: the monitor's watch, the host role, and
//! detaching.
//!
//! Every process on a link shares the attachment lock of `<link>.lock`, from before it takes a seat until it has detached.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::Shared;
use super::host::{HostListener, HostSocket, serve_memory};
use super::monitor::{LinkWatch, Start};
use super::removal::retire;
use crate::error::Result;
use crate::segment::lock::Host;

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
        // The lock file stays open as long as a handle of this process maps memory of the link.
        retire(&self.shared.store, &self.shared.lock, Some(&self.shared));
    }
}
