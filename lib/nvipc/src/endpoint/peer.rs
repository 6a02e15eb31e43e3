//! The thread that meets peers and notices when they end.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use shmesh_sys::eventfd;
use shmesh_sys::poll::{self, Watch};

use super::link::Shared;
use crate::exchange::{Caller, Peer};

/// What the application says when a secondary connects again; `false` refuses it.
pub(super) type Reconnecting = Box<dyn Fn() -> bool + Send>;

/// Most that wait for the place of a secondary that lives; more are sent away.
const WAITING_MAX: usize = 8;

/// Before trying again what failed for want of something.
const AGAIN: Duration = Duration::from_millis(20);

/// How often to look whether a peer that fills its counter keeps a thread that notifies, and whether buffers lie here unused.
const LOOK: Duration = Duration::from_secs(1);

/// Runs until the endpoint is closed, or its primary has ended. `listener`: a primary's.
pub(super) fn serve(shared: &Arc<Shared>, listener: Option<&OwnedFd>, reconnecting: Option<&Reconnecting>) {
    meet_all(shared, listener, reconnecting);
    if let Some(peer) = shared.peer() {
        peer.free_posting();
    }
}

fn meet_all(shared: &Arc<Shared>, listener: Option<&OwnedFd>, reconnecting: Option<&Reconnecting>) {
    let (mut met, mut waiting) = (false, VecDeque::<Caller>::new());
    let (mut released, mut looked) = (0, Instant::now());
    while !shared.closed.load(Acquire) {
        let peer = shared.peer();
        let (pidfd, connection) = match &peer {
            Some(peer) => (peer.pidfd(), peer.connection()),
            None => (None, None),
        };
        let watched = [Some(shared.over.as_fd()), listener.map(AsFd::as_fd), pidfd, connection];
        let mut fds: Vec<_> = watched.iter().flatten().map(Watch::readable).collect();
        // Those that have spoken wait for their turn, and are ready all the time.
        let silent = || waiting.iter().filter(|caller| !caller.has_spoken());
        fds.extend(silent().map(Watch::readable));
        let look = Instant::now().checked_add(LOOK);
        let until = silent().filter_map(Caller::silent_until).chain(look).min();
        let waited = poll::wait(&mut fds, until);
        if look.is_none_or(|look| Instant::now() >= look) || looked.elapsed() >= LOOK {
            released = shared.return_parked(released);
            looked = Instant::now();
        }
        if waited.is_err() {
            // Not the end: without a listener the link would look like one that was left behind.
            std::thread::sleep(AGAIN);
            continue;
        }
        let mut ready = fds.iter().map(Watch::is_ready);
        let [_, called, ended, said] = watched.map(|fd| fd.is_some() && ready.next() == Some(true));
        drop(ready);
        drop(fds);
        if let Some(peer) = peer.as_ref().filter(|peer| peer.keeps_somebody()) {
            peer.free_posting();
        }
        if shared.closed.load(Acquire) {
            return;
        }
        let left = said && peer.is_some_and(|peer| peer.has_left());
        match listener {
            Some(_) if ended => shared.secondary_ended(),
            // It has given back what it held.
            Some(_) if left => shared.set_peer(None),
            None if ended || left => return shared.end_with_primary(),
            _ => {}
        }
        if let (true, Some(listener)) = (called, listener) {
            match Caller::accepted(listener) {
                Ok(caller) => waiting.push_back(caller),
                // No descriptors, mostly: it stays ready, and this must not spin until there are some.
                Err(_) => std::thread::sleep(AGAIN),
            }
        }
        // Who has gone would keep another's place, and the application would be asked about it.
        waiting.retain(|caller| !caller.has_hung_up() && !caller.is_too_late());
        while waiting.len() > WAITING_MAX {
            // The silent ones first: whoever connects and says nothing keeps no secondary out.
            let silent = waiting.iter().position(|caller| !caller.has_spoken());
            waiting.remove(silent.unwrap_or(WAITING_MAX));
        }
        // NVIPC lets everybody in, and wipes the link under the one that lives. Here others wait as they would for a primary;
        // not the one that lives, if it comes back: who is before it waits for it.
        while let Some(at) =
            waiting.iter().position(|caller| caller.has_spoken() && !shared.is_taken_from(caller))
        {
            let Some(caller) = waiting.remove(at) else { break };
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
        let _ = eventfd::post(&self.over);
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
