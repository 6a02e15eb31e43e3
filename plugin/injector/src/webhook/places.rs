//! Places for connections: so many in all and for one address, and who gives way to a newcomer.
//!
//! A newcomer always gets a place, unless all are taken by questions that are being answered: whoever has not asked yet gives
//! way first, the oldest of them; then whoever idles; then whoever still sends its question. So neither half-open nor
//! silent connections keep the API server out, not even from its own address.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// Connections at a time. An API server uses a few.
pub(super) const MAX_CONNECTIONS: usize = 512;
/// Connections of one address at a time.
pub(super) const MAX_OF_ADDRESS: usize = 128;

/// What a connection does, in the order in which they give way.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Stage {
    /// It has not asked anything yet.
    New,
    /// It has asked, and may ask again.
    Idle,
    /// Its question arrives.
    Asking,
    /// Its question is here.
    Answering,
}

/// Which limit somebody gave way for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Limit {
    Address,
    All,
}

impl Limit {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::All => "all",
        }
    }
}

#[derive(Debug)]
struct Connection {
    address: IpAddr,
    stage: Stage,
    evicted: CancellationToken,
}

/// By the order in which they came.
type Table = BTreeMap<u64, Connection>;

#[derive(Clone, Debug, Default)]
pub(super) struct Places(Arc<Mutex<(u64, Table)>>);

impl Places {
    /// A place for a connection from this address; and for which limit somebody else lost one. `None`: all are busy.
    pub(super) fn enter(&self, address: IpAddr) -> Option<(Place, Option<Limit>)> {
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
            let may_go = table.iter().filter(|(_, one)| match limit {
                Limit::Address => one.address == address,
                Limit::All => true,
            });
            let may_go = may_go.filter(|(_, one)| one.stage != Stage::Answering);
            // Of whom there are most: one with a few connections never pays for one with many.
            let first = may_go.min_by_key(|(id, one)| (usize::MAX - of(&one.address), one.stage, **id));
            let id = first.map(|(id, _)| *id)?;
            if let Some(gone) = table.remove(&id) {
                gone.evicted.cancel();
            }
        }
        *ever += 1;
        let (id, evicted) = (*ever, CancellationToken::new());
        table.insert(id, Connection { address, stage: Stage::New, evicted: evicted.clone() });
        drop(inner);
        Some((Place { places: self.clone(), id, evicted }, limit))
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Table)> {
        // Each entry is written whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Places,
    id: u64,
    /// Somebody else has it now.
    pub(super) evicted: CancellationToken,
}

impl Place {
    pub(super) fn is_at(&self, stage: Stage) {
        if let Some(connection) = self.places.lock().1.get_mut(&self.id) {
            connection.stage = stage;
        }
    }

    pub(super) fn has_asked(&self) -> bool {
        self.places.lock().1.get(&self.id).is_some_and(|connection| connection.stage != Stage::New)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().1.remove(&self.id);
    }
}

/// What counts as one source: an IPv4 address, or the 64 bits of an IPv6 address that one machine can choose none of.
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

    fn enter(places: &Places, address: IpAddr, stage: Stage, count: usize) -> Vec<Place> {
        let each = (0..count).map(|_| places.enter(address).expect("a place").0);
        each.inspect(|place| place.is_at(stage)).collect()
    }

    #[test]
    fn oldest_that_asked_nothing_gives_way_first() {
        let places = Places::default();
        let idle = enter(&places, v4(1), Stage::Idle, 1);
        let new = enter(&places, v4(1), Stage::New, MAX_OF_ADDRESS - 1);
        let (_next, limit) = places.enter(v4(1)).unwrap();
        assert_eq!(limit, Some(Limit::Address));
        assert!(new[0].evicted.is_cancelled() && !new[1].evicted.is_cancelled());
        assert!(!idle[0].evicted.is_cancelled());
        assert_eq!(places.enter(v4(2)).unwrap().1, None, "another address");
    }

    #[test]
    fn address_with_most_connections_gives_way_when_all_are_taken() {
        let places = Places::default();
        let few = enter(&places, v4(9), Stage::New, 3);
        let many: Vec<_> = (0..4).flat_map(|last| enter(&places, v4(last), Stage::Idle, 127)).collect();
        let rest = enter(&places, v4(10), Stage::New, 1);
        assert_eq!(places.lock().1.len(), MAX_CONNECTIONS);
        let (_next, limit) = places.enter(v4(11)).unwrap();
        assert_eq!(limit, Some(Limit::All));
        assert_eq!(many.iter().filter(|place| place.evicted.is_cancelled()).count(), 1);
        assert!(few.iter().chain(&rest).all(|place| !place.evicted.is_cancelled()));
    }

    #[test]
    fn answers_are_never_cut_off() {
        let places = Places::default();
        let _all = enter(&places, v4(1), Stage::Answering, MAX_OF_ADDRESS);
        assert!(places.enter(v4(1)).is_none());
        let _asking = enter(&places, v4(2), Stage::Asking, MAX_OF_ADDRESS);
        assert!(places.enter(v4(2)).is_some());
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
        let places = Places::default();
        drop(enter(&places, v4(1), Stage::New, MAX_OF_ADDRESS));
        assert!(places.lock().1.is_empty());
    }
}
