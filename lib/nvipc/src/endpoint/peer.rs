//! The thread that meets peers and notices when they end.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::link::Shared;
use crate::exchange::{Caller, Peer};
use crate::sys;

/// What the application says when a secondary connects again; `false` refuses it.
pub(super) type Reconnecting = Box<dyn Fn() -> bool + Send>;

/// Most that wait for the place of a secondary that lives; more are sent away.
const WAITING_MAX: usize = 8;

/// Before trying again what failed for want of something.
const AGAIN: Duration = Duration::from_millis(20);

/// How often to look whether a peer that fills its counter keeps a thread that notifies.
const LOOK: Duration = Duration::from_secs(1);

/// Runs until the endpoint is closed, or its primary has ended. `listener`: a primary's.
pub(super) fn serve(shared: &Arc<Shared>, listener: Option<&OwnedFd>, reconnecting: Option<&Reconnecting>) {
    meet_all(shared, listener, reconnecting);
    if let Some(peer) = shared.peer() {
        peer.free_posting();
    }
}

fn meet_all(shared: &Arc<Shared>, listener: Option<&OwnedFd>, reconnecting: Option<&Reconnecting>) {
    let (mut met, mut waiting) = (false, VecDeque::new());
    while !shared.closed.load(Acquire) {
        let peer = shared.peer();
        let pidfd = peer.as_ref().and_then(|peer| peer.pidfd());
        let mut fds = vec![PollFd::new(shared.over.as_fd(), PollFlags::POLLIN)];
        fds.extend(listener.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
        fds.extend(pidfd.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let look = peer.as_ref().and_then(|_| Instant::now().checked_add(LOOK));
        if sys::wait_for(&mut fds, look).is_err() {
            // Not the end: without a listener the link would look like one that was left behind.
            std::thread::sleep(AGAIN);
            continue;
        }
        let is_ready = |fd: &PollFd<'_>| fd.any() == Some(true);
        let called = listener.is_some() && is_ready(&fds[1]);
        let ended = pidfd.is_some() && fds.last().is_some_and(is_ready);
        drop(fds);
        if let Some(peer) = peer.filter(|peer| peer.keeps_somebody()) {
            peer.free_posting();
        }
        if shared.closed.load(Acquire) {
            return;
        }
        if ended {
            match listener {
                Some(_) => shared.secondary_ended(),
                None => return shared.end_with_primary(),
            }
        }
        if let (true, Some(listener)) = (called, listener) {
            match Caller::accepted(listener) {
                Ok(caller) if waiting.len() < WAITING_MAX => waiting.push_back(caller),
                Ok(_) => {}
                // No descriptors, mostly: it stays ready, and this must not spin until there are some.
                Err(_) => std::thread::sleep(AGAIN),
            }
        }
        // NVIPC lets everybody in, and wipes the link under the one that lives. Here others wait as they would for a primary.
        while let Some(caller) = waiting.pop_front() {
            if shared.is_taken_from(&caller) {
                waiting.push_front(caller);
                break;
            }
            met |= shared.meet(caller, met, reconnecting);
        }
    }
}

impl Shared {
    fn set_peer(&self, peer: Option<Peer>) {
        let mut place = self.peer.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *place, peer.map(Arc::new));
        drop(place);
        if let Some(before) = before {
            before.free_posting();
        }
    }

    fn secondary_ended(&self) {
        self.recover();
        self.set_peer(None);
    }

    /// A secondary: the link is over, and who waits shall hear of it.
    fn end_with_primary(&self) {
        let alone = self.alone();
        self.primary_ended.store(true, Release);
        drop(alone);
        let _ = sys::post(&self.over);
    }

    /// Whether another secondary lives.
    fn is_taken_from(&self, caller: &Caller) -> bool {
        self.peer().is_some_and(|peer| peer.pidfd().is_some() && !peer.has_ended() && !peer.is(caller))
    }

    /// Meets one that connects. `false`: it is not the peer.
    fn meet(&self, caller: Caller, again: bool, reconnecting: Option<&Reconnecting>) -> bool {
        let ended = self.peer().is_some_and(|peer| peer.has_ended());
        if ended {
            self.secondary_ended();
        }
        if again && reconnecting.is_some_and(|agrees| !agrees()) {
            return false;
        }
        match caller.exchange(&self.eventfd) {
            Ok(peer) => {
                self.set_peer(Some(peer));
                true
            }
            Err(_) => false,
        }
    }
}
