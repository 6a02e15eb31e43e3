//! Who is connected, and how much of the service each client may take.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::warn;

use super::limits::{MAX_CLOSINGS, MAX_CLOSINGS_PER_CLIENT, MAX_CONNECTIONS_PER_CLIENT};

/// A client: everything in one pod is one.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) enum ClientKey {
    /// A pod, by its uid.
    Pod(String),
    /// A process outside any pod, by id and start time.
    Process(i32, u64),
    /// One that cannot be identified: all of them share.
    Unknown,
}

/// All clients.
#[derive(Debug)]
pub(crate) struct Clients(Rc<Shared>);

#[derive(Debug)]
struct Shared {
    by_key: RefCell<HashMap<ClientKey, Rc<Client>>>,
    open: Cell<usize>,
    max: usize,
    close_permits: Arc<Semaphore>,
    turned_away: Arc<Semaphore>,
}

#[derive(Debug)]
struct Client {
    connections: Cell<usize>,
    close_permits: Arc<Semaphore>,
}

impl Clients {
    /// With room for so many connections.
    pub(crate) fn new(max: usize) -> Self {
        let [close_permits, turned_away] = [(); 2].map(|()| Arc::new(Semaphore::new(MAX_CLOSINGS)));
        Self(Rc::new(Shared {
            by_key: RefCell::default(),
            open: Cell::new(0),
            max,
            close_permits,
            turned_away,
        }))
    }

    /// Connections now.
    pub(crate) fn open(&self) -> usize {
        self.0.open.get()
    }

    /// Leave to close a connection for which there is no permit; none when too many of those are being closed.
    pub(crate) fn turned_away(&self) -> Option<ClosePermit> {
        let one = Arc::clone(&self.0.turned_away).try_acquire_owned().ok()?;
        Some(ClosePermit { _permits: [Some(one), None] })
    }

    /// One more connection of `who`, who comes back if there is no room.
    pub(crate) fn permit(&self, who: ClientKey) -> Result<ConnectionPermit, ClientKey> {
        if self.open() >= self.0.max {
            return Err(who);
        }
        let mut by_key = self.0.by_key.borrow_mut();
        let client = by_key.entry(who.clone()).or_insert_with(|| {
            let close_permits = Arc::new(Semaphore::new(MAX_CLOSINGS_PER_CLIENT));
            Rc::new(Client { connections: Cell::new(0), close_permits })
        });
        if client.connections.get() >= MAX_CONNECTIONS_PER_CLIENT {
            return Err(who);
        }
        client.connections.set(client.connections.get() + 1);
        self.0.open.set(self.open() + 1);
        Ok(ConnectionPermit { all: Rc::clone(&self.0), client: Rc::clone(client), who })
    }
}

/// The place of one connection, given back when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionPermit {
    all: Rc<Shared>,
    client: Rc<Client>,
    who: ClientKey,
}

impl ConnectionPermit {
    /// Whose it is.
    pub(crate) fn who(&self) -> &ClientKey {
        &self.who
    }

    /// Waits until something may be received that has to be closed again.
    pub(crate) async fn closing(&self) -> ClosePermit {
        // Never closed, so never refused; and without a permit nothing is worse than with one.
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
        // Somebody whose descriptors still wait to be closed is remembered: connecting anew is no way around the limit.
        if left == 0 && self.client.close_permits.available_permits() == MAX_CLOSINGS_PER_CLIENT {
            self.all.by_key.borrow_mut().remove(&self.who);
        }
    }
}

/// Leave to close foreign descriptors.
#[derive(Debug)]
pub(crate) struct ClosePermit {
    _permits: [Option<OwnedSemaphorePermit>; 2],
}

impl ClosePermit {
    /// Closes descriptors of which nobody knows how long that takes: a socket that lingers, a file of a client's own file
    /// system. So not in the thread that serves.
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
            // They were closed here instead.
            warn!(%error, "no thread to close descriptors");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_cannot_take_all_places() {
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
    fn there_is_an_end_to_all_places() {
        let clients = Clients::new(2);
        let _seats = [
            clients.permit(ClientKey::Process(1, 1)).unwrap(),
            clients.permit(ClientKey::Process(2, 1)).unwrap(),
        ];
        assert_eq!(clients.permit(ClientKey::Process(3, 1)).unwrap_err(), ClientKey::Process(3, 1));
    }
}
