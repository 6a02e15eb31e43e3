//! Connected clients and their resource limits.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::warn;

use super::limits::{MAX_CLOSINGS, MAX_CLOSINGS_PER_CLIENT, MAX_CONNECTIONS_PER_CLIENT};

/// Identifies a client for limits: all processes of a pod are one client.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) enum ClientKey {
    /// A pod with this uid.
    Pod(String),
    /// A process outside any pod, by id and start time.
    Process(i32, u64),
    /// All processes that cannot be identified.
    Unknown,
}

/// All clients and the shared limits.
#[derive(Debug)]
pub(crate) struct Clients(Rc<Shared>);

#[derive(Debug)]
struct Shared {
    by_key: RefCell<HashMap<ClientKey, Rc<ClientUse>>>,
    open: Cell<usize>,
    max: usize,
    close_permits: Arc<Semaphore>,
    refused_closes: Arc<Semaphore>,
}

#[derive(Debug)]
struct ClientUse {
    connections: Cell<usize>,
    close_permits: Arc<Semaphore>,
}

impl Clients {
    /// Creates the limits, with at most `max` connections.
    pub(crate) fn new(max: usize) -> Self {
        let [close_permits, refused_closes] = [(); 2].map(|()| Arc::new(Semaphore::new(MAX_CLOSINGS)));
        Self(Rc::new(Shared {
            by_key: RefCell::default(),
            open: Cell::new(0),
            max,
            close_permits,
            refused_closes,
        }))
    }

    /// Returns the number of open connections.
    pub(crate) fn open(&self) -> usize {
        self.0.open.get()
    }

    /// Returns a permit to close a refused connection, or `None` at the limit.
    pub(crate) fn close_refused(&self) -> Option<ClosePermit> {
        let one = Arc::clone(&self.0.refused_closes).try_acquire_owned().ok()?;
        Some(ClosePermit { _permits: [Some(one), None] })
    }

    /// Returns a permit for one more connection of `who`, or `who` itself at a limit.
    pub(crate) fn permit(&self, who: ClientKey) -> Result<ConnectionPermit, ClientKey> {
        if self.open() >= self.0.max {
            return Err(who);
        }
        let mut by_key = self.0.by_key.borrow_mut();
        let client = by_key.entry(who.clone()).or_insert_with(|| {
            let close_permits = Arc::new(Semaphore::new(MAX_CLOSINGS_PER_CLIENT));
            Rc::new(ClientUse { connections: Cell::new(0), close_permits })
        });
        if client.connections.get() >= MAX_CONNECTIONS_PER_CLIENT {
            return Err(who);
        }
        client.connections.set(client.connections.get() + 1);
        self.0.open.set(self.open() + 1);
        Ok(ConnectionPermit { all: Rc::clone(&self.0), client: Rc::clone(client), who })
    }
}

/// The permit for one connection, returned when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionPermit {
    all: Rc<Shared>,
    client: Rc<ClientUse>,
    who: ClientKey,
}

impl ConnectionPermit {
    /// Returns the client that holds the permit.
    pub(crate) fn who(&self) -> &ClientKey {
        &self.who
    }

    /// Waits until received descriptors may be closed.
    pub(crate) async fn closing(&self) -> ClosePermit {
        // The semaphores are never closed, so acquiring cannot fail.
        let one = Arc::clone(&self.client.close_permits).acquire_owned().await;
        let all = Arc::clone(&self.all.close_permits).acquire_owned().await;
        ClosePermit { _permits: [one.ok(), all.ok()] }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.all.open.set(self.all.open.get() - 1);
        let left = self.client.connections.get() - 1;
        self.client.connections.set(left);
        // A client with pending closes is remembered, so that reconnecting does not reset its limit.
        if left == 0 && self.client.close_permits.available_permits() == MAX_CLOSINGS_PER_CLIENT {
            self.all.by_key.borrow_mut().remove(&self.who);
        }
    }
}

/// The permit to close received descriptors.
#[derive(Debug)]
pub(crate) struct ClosePermit {
    _permits: [Option<OwnedSemaphorePermit>; 2],
}

impl ClosePermit {
    /// Closes descriptors in a separate thread, because the client controls how long that takes: a lingering
    /// socket, or a file on its own FUSE file system.
    pub(crate) fn close<T: Send + 'static>(self, fds: Vec<T>) {
        if fds.is_empty() {
            return;
        }
        let closing =
            std::thread::Builder::new().name("close".into()).stack_size(64 * 1024).spawn(move || {
                drop(fds);
                drop(self);
            });
        if let Err(error) = closing {
            // The failed spawn dropped the closure, which closed them here.
            warn!(%error, "cannot start a thread to close descriptors");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_cannot_take_all_connections() {
        let clients = Clients::new(100);
        let ours = ClientKey::Pod("u".into());
        let permits: Vec<_> =
            (0..MAX_CONNECTIONS_PER_CLIENT).map(|_| clients.permit(ours.clone()).unwrap()).collect();
        assert_eq!(clients.permit(ours.clone()).unwrap_err(), ours);
        let other = clients.permit(ClientKey::Process(1, 2)).unwrap();
        assert_eq!(clients.open(), MAX_CONNECTIONS_PER_CLIENT + 1);
        drop((permits, other));
        assert_eq!((clients.open(), clients.0.by_key.borrow().len()), (0, 0));
        assert!(clients.permit(ours).is_ok());
    }

    #[test]
    fn connections_are_limited_in_total() {
        let clients = Clients::new(2);
        let _seats = [
            clients.permit(ClientKey::Process(1, 1)).unwrap(),
            clients.permit(ClientKey::Process(2, 1)).unwrap(),
        ];
        assert_eq!(clients.permit(ClientKey::Process(3, 1)).unwrap_err(), ClientKey::Process(3, 1));
    }
}
