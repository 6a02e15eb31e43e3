//! [Zenoh](https://zenoh.io) as the engine.
//!
//! The frames of a link go to `shmesh/<group>/<link>/home/<node>` and `shmesh/<group>/<link>/far/<node>`. Nothing is found by
//! multicast or told on by gossip: bridges connect to the addresses that they were given. On a cluster, a bridge that has the link
//! keeps a liveliness token `shmesh/<group>/<link>/at/<place>/<id of its session>`.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::ToSocketAddrs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, anyhow};
use bytes::Bytes;
use zenoh::bytes::ZBytes;
use zenoh::pubsub::{Publisher, Subscriber};
use zenoh::qos::{CongestionControl, Priority};
use zenoh::sample::SampleKind;
use zenoh::{Session, Wait};

use crate::certificates::CertificateCounts;
use crate::engine::{AddressLookup, Engine, Guard, OnFrame, OnPlace, Outlet, SentFrame};
pub use crate::renewable_session::NetworkPlace;
use crate::renewable_session::{CertificateWatcher, RenewableSession};

/// Sessions with the other bridges.
///
/// Links with the same addresses have one session. Links with different addresses have one each, also where one bridge has all of
/// these addresses, as on a cluster: Zenoh has one connection for two processes, and would try the other addresses for ever.
#[derive(Debug)]
pub struct ZenohEngine {
    place: NetworkPlace,
    counts: CertificateCounts,
    /// By the addresses to connect to.
    sessions: Mutex<HashMap<Vec<String>, OpenSession>>,
}

#[derive(Debug)]
struct OpenSession {
    /// Ends before the session.
    watcher: Option<CertificateWatcher>,
    session: Arc<RenewableSession>,
}

impl OpenSession {
    fn open(place: NetworkPlace, counts: &CertificateCounts) -> Result<Self> {
        let interval = place.certificates.as_ref().map(|_| place.certificate_interval);
        let session = Arc::new(RenewableSession::open(place, counts.clone())?);
        let watcher = interval.map(|interval| CertificateWatcher::start(Arc::clone(&session), interval));
        Ok(Self { watcher: watcher.transpose()?, session })
    }
}

impl ZenohEngine {
    /// An engine that listens and connects as soon as it has a link.
    #[must_use]
    pub fn new(place: NetworkPlace, counts: CertificateCounts) -> Self {
        Self { place, counts, sessions: Mutex::default() }
    }

    /// Replaces no more sessions. To be called before what is declared on them is given up: that waits for a replacement.
    pub fn keep_sessions(&self) {
        let sessions = lock(&self.sessions);
        sessions.values().filter_map(|open| open.watcher.as_ref()).for_each(CertificateWatcher::stop);
    }

    /// Where to connect to for a link.
    fn connect(&self, link: &str) -> Vec<String> {
        let of_link = self.place.connect_links.iter().filter(|(name, _)| name == link);
        self.place.connect.iter().chain(of_link.map(|(_, address)| address)).cloned().collect()
    }

    /// The session for the addresses of a link. Returns before a connection is made.
    fn session(&self, link: &str) -> Result<Arc<RenewableSession>> {
        let connect = self.connect(link);
        let mut sessions = lock(&self.sessions);
        if let Some(open) = sessions.get(&connect) {
            return Ok(Arc::clone(&open.session));
        }
        let place = NetworkPlace { connect: connect.clone(), ..self.place.clone() };
        let open = OpenSession::open(place, &self.counts)?;
        let session = Arc::clone(&open.session);
        sessions.insert(connect, open);
        Ok(session)
    }

    fn open_end(
        &self,
        link: &str,
        hear: &str,
        tell: &'static str,
        on_frame: OnFrame,
    ) -> Result<Box<dyn Outlet>> {
        let prefix = format!("shmesh/{}/{link}", self.place.group);
        let key = format!("{prefix}/{hear}");
        let connection = self.session(link)?;
        let subscribe = move |session: &Session| {
            let on_frame = Arc::clone(&on_frame);
            let subscriber = session.declare_subscriber(&key).callback(move |sample| {
                let node = sample.key_expr().as_str().rsplit('/').next().unwrap_or_default();
                let payload = sample.payload();
                let (mut pieces, mut count) = ([&[][..]; PIECES], 0);
                for piece in payload.slices() {
                    if let Some(place) = pieces.get_mut(count) {
                        *place = piece;
                    }
                    count += 1;
                }
                match pieces.get(..count) {
                    Some(pieces) => on_frame(node, pieces),
                    None => on_frame(node, &payload.slices().collect::<Vec<_>>()),
                }
            });
            let subscriber = subscriber.wait().map_err(|error| anyhow!("cannot receive {key}: {error}"))?;
            Ok(Box::new(subscriber) as Guard)
        };
        // On both sessions for a moment: a frame that comes twice does no harm.
        let subscriber = connection.declare(false, Box::new(subscribe))?;
        Ok(Box::new(ZenohOutlet {
            connection,
            prefix: format!("{prefix}/{tell}"),
            publishers: Mutex::default(),
            _subscriber: subscriber,
        }))
    }
}

impl Engine for ZenohEngine {
    fn open_home(&self, link: &str, on_frame: OnFrame) -> Result<Box<dyn Outlet>> {
        self.open_end(link, "home/*", "far", on_frame)
    }

    fn open_far(&self, link: &str, node: &str, on_frame: OnFrame) -> Result<Box<dyn Outlet>> {
        self.open_end(link, &format!("far/{node}"), "home", on_frame)
    }

    fn announce(&self, link: &str, place: &str) -> Result<Guard> {
        let prefix = format!("shmesh/{}/{link}/at/{place}", self.place.group);
        let announce = move |session: &Session| {
            let key = format!("{prefix}/{}", session.zid());
            let token = session.liveliness().declare_token(&key).wait();
            Ok(Box::new(token.map_err(|error| anyhow!("cannot announce {key}: {error}"))?) as Guard)
        };
        self.session(link)?.declare(true, Box::new(announce))
    }

    fn watch(&self, link: &str, on_place: OnPlace) -> Result<Guard> {
        let prefix = format!("shmesh/{}/{link}/at/", self.place.group);
        let watch = move |session: &Session| {
            let known = Arc::new(Mutex::new(KnownPlaces::new(Arc::clone(&on_place))));
            let (of_callback, prefix, key) = (Arc::clone(&known), prefix.clone(), format!("{prefix}*/*"));
            let watch = session.liveliness().declare_subscriber(&key).history(true);
            let watch = watch.callback(move |sample| {
                if let Some(name) = sample.key_expr().as_str().strip_prefix(&prefix) {
                    lock(&of_callback).set(name, sample.kind() == SampleKind::Put);
                }
            });
            let subscriber = watch.wait().map_err(|error| anyhow!("cannot watch {key}: {error}"))?;
            Ok(Box::new(PlaceWatch { _subscriber: subscriber, known }) as Guard)
        };
        self.session(link)?.declare(true, Box::new(watch))
    }

    fn addresses(&self, link: &str) -> AddressLookup {
        let connect = self.connect(link);
        Box::new(move || {
            let mut addresses: Vec<_> = connect.iter().flat_map(|address| resolved(address)).collect();
            addresses.sort_unstable();
            addresses.dedup();
            addresses
        })
    }
}

/// The network addresses of a host, from an address like `quic/host:7447`.
fn resolved(address: &str) -> Vec<String> {
    let host = address.split_once('/').map_or(address, |(_, host)| host);
    let host = host.split(['?', '#']).next().unwrap_or(host);
    // A host without addresses has no bridge.
    let found = host.to_socket_addrs().into_iter().flatten();
    found.map(|found| found.ip().to_string()).collect()
}

/// The announcements that a session has seen.
struct KnownPlaces {
    on_place: OnPlace,
    /// `None` when the watch has ended.
    names: Option<HashSet<String>>,
}

impl KnownPlaces {
    fn new(on_place: OnPlace) -> Self {
        Self { on_place, names: Some(HashSet::new()) }
    }

    fn set(&mut self, name: &str, is_there: bool) {
        let Some(names) = &mut self.names else { return };
        if is_there {
            names.insert(name.to_owned());
        } else {
            names.remove(name);
        }
        (self.on_place)(name, is_there);
    }
}

/// A watch on one session. When it ends, all that it has seen counts as gone: the next session sees what is still there.
struct PlaceWatch {
    _subscriber: Subscriber<()>,
    known: Arc<Mutex<KnownPlaces>>,
}

impl Drop for PlaceWatch {
    fn drop(&mut self) {
        let mut known = lock(&self.known);
        for name in known.names.take().into_iter().flatten() {
            (known.on_place)(&name, false);
        }
    }
}

/// Each change under these locks is one call on a collection, which a panic leaves whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pieces of a frame for which nothing is allocated: half a megabyte.
const PIECES: usize = 8;

/// Frames that are not longer are copied.
const COPIED_BYTES: usize = 4 << 10;

struct SharedFrame(SentFrame);

impl AsRef<[u8]> for SharedFrame {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

struct ZenohOutlet {
    connection: Arc<RenewableSession>,
    prefix: String,
    publishers: Mutex<Publishers>,
    _subscriber: Guard,
}

/// The publishers on one session, by node.
#[derive(Default)]
struct Publishers {
    generation: u64,
    by_node: HashMap<String, Arc<Publisher<'static>>>,
}

impl fmt::Debug for ZenohOutlet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZenohOutlet").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl Outlet for ZenohOutlet {
    fn put(&self, node: &str, frame: &SentFrame) -> Result<()> {
        // The lock is not held while a frame is sent: that waits when the connection to this node is slow.
        let publisher = self.publisher(node)?;
        let payload = match frame.len() {
            // To share a few bytes costs more than to copy them.
            ..=COPIED_BYTES => ZBytes::from(&frame[..]),
            _ => Bytes::from_owner(SharedFrame(Arc::clone(frame))).into(),
        };
        publisher.put(payload).wait().map_err(|error| anyhow!("{error}"))
    }

    fn put_or_drop(&self, node: &str, frame: &SentFrame) -> Result<()> {
        let session = self.connection.session();
        let put = session.put(format!("{}/{node}", self.prefix), &frame[..]);
        // Messages have a queue of their own, behind which this one would wait.
        put.congestion_control(CongestionControl::Drop)
            .priority(Priority::InteractiveHigh)
            .express(true)
            .wait()
            .map_err(|error| anyhow!("{error}"))
    }

    fn forget(&self, node: &str) {
        // Undeclared when the lock is free.
        let publisher = lock(&self.publishers).by_node.remove(node);
        drop(publisher);
    }
}

impl ZenohOutlet {
    fn publisher(&self, node: &str) -> Result<Arc<Publisher<'static>>> {
        let mut publishers = lock(&self.publishers);
        let generation = self.connection.generation();
        if publishers.generation != generation {
            *publishers = Publishers { generation, by_node: HashMap::new() };
        }
        if let Some(publisher) = publishers.by_node.get(node) {
            return Ok(Arc::clone(publisher));
        }
        let key = format!("{}/{node}", self.prefix);
        let session = self.connection.session();
        let publisher = session.declare_publisher(key.clone());
        // Express: a frame is sent at once, and does not wait for others to fill a batch.
        let publisher = publisher.congestion_control(CongestionControl::Block).express(true).wait();
        let publisher = Arc::new(publisher.map_err(|error| anyhow!("cannot send {key}: {error}"))?);
        publishers.by_node.insert(node.to_owned(), Arc::clone(&publisher));
        Ok(publisher)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_the_host() {
        assert_eq!(resolved("quic/192.0.2.7:7447"), ["192.0.2.7"]);
        assert_eq!(resolved("tcp/[::1]:7447#iface=lo"), ["::1"]);
        assert!(resolved("tcp/localhost:7447").contains(&"127.0.0.1".to_owned()));
        assert_eq!(resolved("quic/none.invalid:7447"), [""; 0]);
        assert_eq!(resolved("pigeon"), [""; 0]);
    }
}
