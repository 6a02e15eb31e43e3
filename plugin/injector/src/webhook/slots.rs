//! Connection slots: limits of connections and of memory for their requests, and which connection is evicted for a new one.
//!
//! A new connection gets a slot unless every other connection is being answered. The connection that is evicted for it is one
//! that has sent no request, else an idle one, else one that is still sending, the oldest first. So neither half-open nor silent
//! connections shut out the API server, not even from its own address.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// Maximum number of connections, of some 45 KiB each. An API server uses a few.
pub(super) const MAX_CONNECTIONS: usize = 256;
/// Maximum number of connections from one address.
pub(super) const MAX_OF_ADDRESS: usize = 64;
/// Memory for the bodies of all requests together, in bytes.
pub(super) const MAX_BODY_BYTES: usize = 12 << 20;

/// Stage of a connection, in the order of eviction.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum ConnectionStage {
    /// No request has been received yet.
    New,
    /// A request was answered, and another may follow.
    Idle,
    /// The body of a request is being received.
    Receiving,
    /// The request is being answered.
    Answering,
}

/// The limit that caused an eviction.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Limit {
    Address,
    All,
    BodyMemory,
}

impl Limit {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::All => "all",
            Self::BodyMemory => "body_memory",
        }
    }
}

#[derive(Debug)]
struct Connection {
    address: IpAddr,
    stage: ConnectionStage,
    /// Bytes of its request's body that are in memory.
    body_bytes: usize,
    evicted: CancellationToken,
}

/// The connections by number, in the order in which they were accepted.
type Connections = BTreeMap<u64, Connection>;

#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionSlots(Arc<Mutex<(u64, Connections)>>);

impl ConnectionSlots {
    /// Takes a slot for a connection from this address. Returns the limit if another connection was evicted for it, and `None`
    /// if every connection that could be evicted is being answered.
    pub(super) fn enter(&self, address: IpAddr) -> Option<(ConnectionSlot, Option<Limit>)> {
        let address = source(address);
        let mut inner = self.lock();
        let (ever, table) = &mut *inner;
        let mut counts = BTreeMap::<IpAddr, usize>::new();
        for connection in table.values() {
            *counts.entry(connection.address).or_default() += 1;
        }
        let of = |address: &IpAddr| counts.get(address).copied().unwrap_or(0);
        let limit = if of(&address) >= MAX_OF_ADDRESS {
            Some(Limit::Address)
        } else {
            (table.len() >= MAX_CONNECTIONS).then_some(Limit::All)
        };
        if let Some(limit) = limit {
            let may_go = table.iter().filter(|(_, one)| limit != Limit::Address || one.address == address);
            let may_go = may_go.filter(|(_, one)| one.stage != ConnectionStage::Answering);
            // From the address with the most connections, so that an address with a few is not affected by one with many.
            let first = may_go.min_by_key(|(id, one)| (usize::MAX - of(&one.address), one.stage, **id));
            let id = first.map(|(id, _)| *id)?;
            if let Some(gone) = table.remove(&id) {
                gone.evicted.cancel();
            }
        }
        *ever += 1;
        let (id, evicted) = (*ever, CancellationToken::new());
        table.insert(
            id,
            Connection { address, stage: ConnectionStage::New, body_bytes: 0, evicted: evicted.clone() },
        );
        drop(inner);
        Some((ConnectionSlot { slots: self.clone(), id, evicted }, limit))
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Connections)> {
        // Each entry is replaced as a whole, so a panic leaves none half written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The slot of a connection, free again when this is dropped.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    slots: ConnectionSlots,
    id: u64,
    /// Cancelled when the connection is evicted.
    pub(super) evicted: CancellationToken,
}

impl ConnectionSlot {
    pub(super) fn set_stage(&self, stage: ConnectionStage) {
        if let Some(connection) = self.slots.lock().1.get_mut(&self.id) {
            connection.stage = stage;
        }
    }

    /// Takes memory for a part of the request's body. Beyond the limit, connections that are still sending are evicted, first the connections of
    /// the address with the most memory, the oldest first. Returns how many were, and `None` if this one is among them.
    pub(super) fn take_body_memory(&self, bytes: usize) -> Option<usize> {
        let mut inner = self.slots.lock();
        let table = &mut inner.1;
        table.get_mut(&self.id)?.body_bytes += bytes;
        let mut evicted = 0;
        loop {
            let mut sums = BTreeMap::<IpAddr, usize>::new();
            for connection in table.values() {
                *sums.entry(connection.address).or_default() += connection.body_bytes;
            }
            if sums.values().sum::<usize>() <= MAX_BODY_BYTES {
                return Some(evicted);
            }
            let sending =
                table.iter().filter(|(_, one)| one.stage != ConnectionStage::Answering && one.body_bytes > 0);
            let first = sending.min_by_key(|(id, one)| (usize::MAX - sums[&one.address], **id));
            let id = first.map(|(id, _)| *id)?;
            if let Some(gone) = table.remove(&id) {
                gone.evicted.cancel();
            }
            if id == self.id {
                return None;
            }
            evicted += 1;
        }
    }

    /// Returns the memory of the body.
    pub(super) fn give_body_memory_back(&self) {
        if let Some(connection) = self.slots.lock().1.get_mut(&self.id) {
            connection.body_bytes = 0;
        }
    }

    pub(super) fn has_sent_request(&self) -> bool {
        self.slots.lock().1.get(&self.id).is_some_and(|connection| connection.stage != ConnectionStage::New)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.slots.lock().1.remove(&self.id);
    }
}

/// The source that connections of an address count for: an IPv4 address, or the /64 of an IPv6 address, in which a
/// machine can choose freely.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn enter(
        slots: &ConnectionSlots,
        address: IpAddr,
        stage: ConnectionStage,
        count: usize,
    ) -> Vec<ConnectionSlot> {
        let each = (0..count).map(|_| slots.enter(address).expect("a slot").0);
        each.inspect(|slot| slot.set_stage(stage)).collect()
    }

    #[test]
    fn oldest_that_asked_nothing_gives_way_first() {
        let slots = ConnectionSlots::default();
        let idle = enter(&slots, v4(1), ConnectionStage::Idle, 1);
        let new = enter(&slots, v4(1), ConnectionStage::New, MAX_OF_ADDRESS - 1);
        let (_next, limit) = slots.enter(v4(1)).unwrap();
        assert_eq!(limit, Some(Limit::Address));
        assert!(new[0].evicted.is_cancelled() && !new[1].evicted.is_cancelled());
        assert!(!idle[0].evicted.is_cancelled());
        assert_eq!(slots.enter(v4(2)).unwrap().1, None, "another address");
    }

    #[test]
    fn address_with_most_connections_gives_way_when_all_are_taken() {
        let slots = ConnectionSlots::default();
        let few = enter(&slots, v4(9), ConnectionStage::New, 3);
        let many: Vec<_> = (0..4)
            .flat_map(|last| enter(&slots, v4(last), ConnectionStage::Idle, MAX_OF_ADDRESS - 1))
            .collect();
        let rest = enter(&slots, v4(10), ConnectionStage::New, 1);
        assert_eq!(slots.lock().1.len(), MAX_CONNECTIONS);
        let (_next, limit) = slots.enter(v4(11)).unwrap();
        assert_eq!(limit, Some(Limit::All));
        assert_eq!(many.iter().filter(|slot| slot.evicted.is_cancelled()).count(), 1);
        assert!(few.iter().chain(&rest).all(|slot| !slot.evicted.is_cancelled()));
    }

    #[test]
    fn address_that_fills_the_memory_of_bodies_gives_way() {
        let slots = ConnectionSlots::default();
        let share = MAX_BODY_BYTES / 4;
        let [few, first, second, third] = [9, 1, 1, 1].map(|last| slots.enter(v4(last)).unwrap().0);
        assert_eq!(few.take_body_memory(share), Some(0));
        for slot in [&first, &second, &third] {
            slot.set_stage(ConnectionStage::Receiving);
            assert_eq!(slot.take_body_memory(share), Some(0), "all of it is taken");
        }
        second.set_stage(ConnectionStage::Answering);
        assert_eq!(few.take_body_memory(1), Some(1));
        assert!(first.evicted.is_cancelled() && !second.evicted.is_cancelled());
        assert_eq!(third.take_body_memory(MAX_BODY_BYTES), None, "too much for it");
        assert!(third.evicted.is_cancelled() && !few.evicted.is_cancelled());
        second.give_body_memory_back();
        drop((first, second, third));
        assert_eq!(few.take_body_memory(MAX_BODY_BYTES - share - 1), Some(0));
        assert_eq!(few.take_body_memory(1), None);
    }

    #[test]
    fn answers_are_never_cut_off() {
        let slots = ConnectionSlots::default();
        let _all = enter(&slots, v4(1), ConnectionStage::Answering, MAX_OF_ADDRESS);
        assert!(slots.enter(v4(1)).is_none());
        let _asking = enter(&slots, v4(2), ConnectionStage::Receiving, MAX_OF_ADDRESS);
        assert!(slots.enter(v4(2)).is_some());
    }

    #[test]
    fn one_machine_is_one_source() {
        let v6 = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(source(v6("fd00::1:2:3:4")), source(v6("fd00::5:6:7:8")));
        assert_ne!(source(v6("fd00:0:0:1::1")), source(v6("fd00:0:0:2::1")));
        assert_eq!(source(v6("::ffff:10.0.0.1")), v4(1));
    }

    #[test]
    fn places_come_back() {
        let slots = ConnectionSlots::default();
        drop(enter(&slots, v4(1), ConnectionStage::New, MAX_OF_ADDRESS));
        assert!(slots.lock().1.is_empty());
    }
}
