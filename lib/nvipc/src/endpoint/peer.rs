//! The service thread: accepts peers, and detects when they end.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use shmesh_sys::eventfd;
use shmesh_sys::poll::{self, Watch};

use super::link::Shared;
use crate::exchange::{ConnectingPeer, ExchangePeer};

/// Asks the application whether a secondary may connect again; `false` refuses it.
pub(super) type ReconnectCheck = Box<dyn Fn() -> bool + Send>;

/// Maximum number of callers that wait while another secondary is alive; more are refused.
const WAITING_MAX: usize = 8;

/// Delay before retrying after a lack of resources.
const AGAIN: Duration = Duration::from_millis(20);

/// How often to check for a notifying thread that a full counter blocks, and for parked buffers that are not used.
const LOOK: Duration = Duration::from_secs(1);

/// Serves peers until the endpoint is closed or its primary has ended. Only a primary has a `listener`.
pub(super) fn serve(shared: &Arc<Shared>, listener: Option<&OwnedFd>, reconnecting: Option<&ReconnectCheck>) {
    meet_all(shared, listener, reconnecting);
    if let Some(peer) = shared.peer() {
        peer.free_posting();
    }
}

fn meet_all(shared: &Arc<Shared>, listener: Option<&OwnedFd>, reconnecting: Option<&ReconnectCheck>) {
    let (mut met, mut waiting) = (false, VecDeque::<ConnectingPeer>::new());
    let (mut released, mut looked) = (0, Instant::now());
    while !shared.closed.load(Acquire) {
        let peer = shared.peer();
        let (pidfd, connection) = match &peer {
            Some(peer) => (peer.pidfd(), peer.connection()),
            None => (None, None),
        };
        let watched = [Some(shared.over.as_fd()), listener.map(AsFd::as_fd), pidfd, connection];
        let mut fds: Vec<_> = watched.iter().flatten().map(Watch::readable).collect();
        // Callers that have sent their half stay readable until their turn comes, so they are not polled.
        let silent = || waiting.iter().filter(|caller| !caller.has_spoken());
        fds.extend(silent().map(Watch::readable));
        let look = Instant::now().checked_add(LOOK);
        let until = silent().filter_map(ConnectingPeer::silent_until).chain(look).min();
        let waited = poll::wait(&mut fds, until);
        if look.is_none_or(|look| Instant::now() >= look) || looked.elapsed() >= LOOK {
            released = shared.return_parked(released);
            looked = Instant::now();
        }
        if waited.is_err() {
            // Retry rather than stop: without a listener, the link would look abandoned.
            std::thread::sleep(AGAIN);
            continue;
        }
        let mut ready = fds.iter().map(Watch::is_ready);
        let [_, called, ended, said] = watched.map(|fd| fd.is_some() && ready.next() == Some(true));
        drop(ready);
        drop(fds);
        if let Some(peer) = peer.as_ref().filter(|peer| peer.has_blocked_writer()) {
            peer.free_posting();
        }
        if shared.closed.load(Acquire) {
            return;
        }
        let left = said && peer.is_some_and(|peer| peer.has_left());
        match listener {
            Some(_) if ended => shared.secondary_ended(),
            // It has released what it held.
            Some(_) if left => shared.set_peer(None),
            None if ended || left => return shared.end_with_primary(),
            _ => {}
        }
        if let (true, Some(listener)) = (called, listener) {
            match ConnectingPeer::accepted(listener) {
                Ok(caller) => waiting.push_back(caller),
                // Usually there are no descriptors left. The listener stays readable, so pause instead of spinning.
                Err(_) => std::thread::sleep(AGAIN),
            }
        }
        // A caller that has gone must not keep its place, nor lead to a question to the application.
        waiting.retain(|caller| !caller.has_hung_up() && !caller.is_too_late());
        while waiting.len() > WAITING_MAX {
            // Refuse silent callers first, so that connecting without a word keeps no secondary out.
            let silent = waiting.iter().position(|caller| !caller.has_spoken());
            waiting.remove(silent.unwrap_or(WAITING_MAX));
        }
        // NVIPC admits every caller and wipes the link under the secondary that is alive. Here callers wait until it has
        // ended. The
        // living secondary itself does not wait if it connects again; callers before it still do.
        while let Some(at) =
            waiting.iter().position(|caller| caller.has_spoken() && !shared.is_taken_from(caller))
        {
            let Some(caller) = waiting.remove(at) else { break };
            met |= shared.meet(caller, met, reconnecting);
        }
    }
}

impl Shared {
    fn set_peer(&self, peer: Option<ExchangePeer>) {
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

    /// Ends the link on a secondary whose primary has ended, and wakes the calls that wait.
    fn end_with_primary(&self) {
        let alone = self.alone();
        self.primary_ended.store(true, Release);
        drop(alone);
        let _ = eventfd::post(&self.over);
    }

    /// Whether a living secondary other than the caller has the link.
    fn is_taken_from(&self, caller: &ConnectingPeer) -> bool {
        self.peer().is_some_and(|peer| peer.pidfd().is_some() && !peer.has_ended() && !peer.is(caller))
    }

    /// Exchanges eventfds with a caller. Returns `false` if it did not become the peer.
    fn meet(&self, caller: ConnectingPeer, again: bool, reconnecting: Option<&ReconnectCheck>) -> bool {
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
