//! A bridge: its sessions, one for each peer of each link.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use prometheus_client::registry::Registry;
use shmesh::MAX_SEATS;
use shmesh::config::LinkName;
use shmesh::inspect::far_node_file;
use shmesh_daemon::log_limit::LogLimit;
use tracing::{debug, error, info};

use crate::certificates::CertificateCounts;
use crate::connected_gauge::{ConnectedGauge, SessionLabels};
use crate::engine::{AddressLookup, Engine, Guard, Outlet};
use crate::frame::{Frame, ProtocolVersions, Status};
use crate::place::{Distance, Places};
use crate::session::{BridgeCounts, BridgeEnd, PeerSession, SessionIdentity, SessionSettings};

/// The sessions of a link, by the name of the far node.
type Sessions = HashMap<String, SessionThread>;

/// The metrics of all sessions, by link and far node.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    sent: Family<SessionLabels, Counter>,
    received: Family<SessionLabels, Counter>,
    lost: Family<SessionLabels, Counter>,
    again: Family<SessionLabels, Counter>,
    refused: Family<SessionLabels, Counter>,
    connected: Family<SessionLabels, Gauge>,
    near: Family<SessionLabels, Gauge>,
    standby: Family<SessionLabels, Gauge>,
    primaries: Family<SessionLabels, Gauge>,
    /// Counters of certificates that were refused, replaced or unusable.
    pub certificates: CertificateCounts,
}

impl Metrics {
    /// Adds them to `registry`, with the prefix `shmesh_bridge_`.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("shmesh_bridge");
        registry.register(
            "messages_sent",
            "Messages taken from the link and sent to the other node",
            self.sent.clone(),
        );
        registry.register(
            "messages_received",
            "Messages of the other node that were sent on the link",
            self.received.clone(),
        );
        registry.register(
            "messages_lost",
            "Messages of the other node that can no longer come, because a bridge ended while it had them",
            self.lost.clone(),
        );
        registry.register(
            "frames_again",
            "Frames sent once more, because they did not arrive",
            self.again.clone(),
        );
        registry.register(
            "frames_refused",
            "Frames that were damaged, of another version, or beyond the limit",
            self.refused.clone(),
        );
        registry.register("connected", "1 if the other node's bridge answers", self.connected.clone());
        registry.register(
            "near",
            "1 if the link is in this bridge's own IPC directory, so that nothing is carried",
            self.near.clone(),
        );
        registry.register(
            "primaries",
            "Places with a primary of the link, as announcements and the addresses of its Service say; more than 1 is a mistake",
            self.primaries.clone(),
        );
        registry.register("standby", "1 if another bridge of this node has the link", self.standby.clone());
        registry.register(
            "certificates_refused",
            "Connections with a certificate that may not use the keys of this bridge",
            self.certificates.refused.clone(),
        );
        registry.register(
            "certificates_renewed",
            "Replacements of the certificates of this bridge, after which all connections were made again",
            self.certificates.renewed.clone(),
        );
        registry.register(
            "certificates_unusable",
            "Attempts to use new certificate files that failed, so that the last ones stay in use",
            self.certificates.unusable.clone(),
        );
    }

    /// Exports no counters of this session any longer.
    fn forget(&self, labels: &SessionLabels) {
        for family in [&self.sent, &self.received, &self.lost, &self.again, &self.refused] {
            family.remove(labels);
        }
    }

    fn of(&self, link: &LinkName, node: &str, connected: ConnectedGauge) -> BridgeCounts {
        let labels = labels(link, node);
        BridgeCounts {
            sent: self.sent.get_or_create_owned(&labels),
            received: self.received.get_or_create_owned(&labels),
            lost: self.lost.get_or_create_owned(&labels),
            again: self.again.get_or_create_owned(&labels),
            refused: self.refused.get_or_create_owned(&labels),
            connected,
        }
    }
}

/// The links of a bridge, and its part in carrying them.
#[derive(Clone, Debug)]
pub struct BridgeConfig {
    /// Whether the link is here, or its replica.
    pub end: BridgeEnd,
    /// The IPC directory of its links.
    pub dir: PathBuf,
    /// The names of its links.
    pub links: Vec<LinkName>,
    /// The name of this node. Only a far node needs one; no two may have the same.
    pub node: String,
    /// Far nodes of each link at most, where the links are: [`MAX_SEATS`](shmesh::MAX_SEATS), or fewer.
    pub peers: usize,
    /// How long the other side may be silent until its participants count as gone.
    pub peer_timeout: Duration,
    /// On a cluster: where this bridge is.
    pub cluster: Option<ClusterPlace>,
    /// The versions of the protocol that it reads: [`VERSIONS`](crate::frame::VERSIONS), or fewer.
    pub versions: ProtocolVersions,
}

/// Where the bridge of a pod is.
///
/// Bridges of one place stand in for each other: while one has a link, the others wait. A place is a far node's name, too.
#[derive(Clone, Debug, Default)]
pub struct ClusterPlace {
    /// Name of its IPC directory, from [`place_of`](crate::place::place_of).
    pub place: String,
    /// Links that may be in this IPC directory themselves: while they are, they have no replica.
    pub near: Vec<LinkName>,
}

/// How often the addresses of a link are looked up.
const LOOK_UP_INTERVAL: Duration = Duration::from_secs(10);
/// How long a link may have two primaries, as while a pod is replaced, until it is an error.
const TWO_PRIMARIES_LIMIT: Duration = Duration::from_secs(30);

/// How often a bridge tries to get a link that another bridge of its place has.
const STANDBY_INTERVAL: Duration = Duration::from_millis(500);
/// How often a bridge that waits for nothing checks that its session runs, and how many primaries there are.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The bridge of one node. It runs until [`stop`](Self::stop).
#[derive(Debug)]
pub struct Bridge {
    ends: Vec<Arc<HomeOrFar>>,
}

/// All sessions of a link.
#[derive(Debug)]
struct HomeOrFar {
    template: SessionSettings,
    /// The greatest number of sessions.
    peers: usize,
    metrics: Metrics,
    outlet: OnceLock<Arc<dyn Outlet>>,
    stop: AtomicBool,
    sessions: Mutex<Sessions>,
    /// Keys of the greetings, so that a bridge can answer each far node with numbers of its own and keep none of them.
    greetings: RandomState,
    /// Limits the log lines that unknown machines cause.
    log_limit: Mutex<LogLimit>,
    /// On a cluster, a far node's session begins and ends with what it finds there.
    places: Option<Arc<Places>>,
    /// The addresses of bridges with the link, when they were looked up last.
    addresses: Mutex<Vec<String>>,
    /// The announcements and watches at the engine.
    guards: Mutex<Vec<Guard>>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct SessionThread {
    session: Arc<PeerSession>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl SessionThread {
    fn session(&self) -> Arc<PeerSession> {
        Arc::clone(&self.session)
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.session.wake();
    }

    fn join(self) {
        // A session that panicked has been logged.
        let _ = self.thread.join();
    }
}

impl Bridge {
    /// Begins to carry messages.
    ///
    /// # Errors
    /// The name of the node is none, the engine fails, or a journal cannot be opened.
    pub fn start(config: &BridgeConfig, engine: &dyn Engine, metrics: &Metrics) -> Result<Self> {
        let mut ends = Vec::new();
        for link in &config.links {
            let template = SessionSettings {
                end: config.end,
                dir: config.dir.clone(),
                link: link.clone(),
                node: config.node.clone(),
                peer_timeout: config.peer_timeout,
                versions: config.versions,
                identity: None,
                // In a pod the programs may be other users, of the group of the directory.
                file_mode: if config.cluster.is_some() { 0o660 } else { 0o600 },
            };
            let end = Arc::new(HomeOrFar {
                template,
                peers: config.peers,
                metrics: metrics.clone(),
                outlet: OnceLock::new(),
                stop: AtomicBool::default(),
                sessions: Mutex::default(),
                greetings: RandomState::new(),
                log_limit: Mutex::new(LogLimit::new(5, Duration::from_secs(10))),
                places: config
                    .cluster
                    .as_ref()
                    .filter(|_| config.end == BridgeEnd::Far)
                    .map(|_| Arc::default()),
                addresses: Mutex::default(),
                guards: Mutex::default(),
                keeper: Mutex::default(),
            });
            let hearer: Weak<HomeOrFar> = Arc::downgrade(&end);
            let on_frame = Arc::new(move |node: &str, pieces: &[&[u8]]| {
                if let Some(end) = hearer.upgrade() {
                    end.hear(node, pieces);
                }
            });
            let outlet = match config.end {
                BridgeEnd::Home => engine.open_home(link.as_str(), on_frame)?,
                BridgeEnd::Far => {
                    check_node(&config.node)?;
                    engine.open_far(link.as_str(), &config.node, on_frame)?
                }
            };
            let _ = end.outlet.set(Arc::from(outlet));
            match (config.end, &config.cluster) {
                (BridgeEnd::Home, None) => {}
                (BridgeEnd::Home, Some(cluster)) => {
                    end.guard(engine.announce(link.as_str(), &cluster.place)?)
                }
                (BridgeEnd::Far, None) => {
                    end.begin(&mut end.sessions(), &config.node, None, None)?;
                }
                (BridgeEnd::Far, Some(cluster)) => end.keep_on_cluster(engine, cluster)?,
            }
            ends.push(end);
        }
        Ok(Self { ends })
    }

    /// Stops taking messages, waits for at most five seconds until those that were taken have arrived, and detaches.
    pub fn stop(self) {
        for end in &self.ends {
            end.stop.store(true, Ordering::Release);
            if let Some(places) = &end.places {
                places.wake();
            }
        }
        // No session begins after this.
        for end in &self.ends {
            let keeper = end.keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(keeper) = keeper {
                let _ = keeper.join();
            }
        }
        let sessions: Vec<_> =
            self.ends.iter().flat_map(|end| std::mem::take(&mut *end.sessions()).into_values()).collect();
        sessions.iter().for_each(SessionThread::stop);
        sessions.into_iter().for_each(SessionThread::join);
    }
}

impl HomeOrFar {
    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        // A session is added as a whole, so a poisoned lock guards a valid table.
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a frame to its session. At home a new far node gets one as soon as it has answered a greeting: a sender of frames that gets
    /// none takes neither a session nor a journal.
    fn hear(&self, node: &str, pieces: &[&[u8]]) {
        // Only for as long as it is looked up: frames of all nodes come by here.
        let known = self
            .sessions()
            .get(node)
            .filter(|running| !running.thread.is_finished())
            .map(SessionThread::session);
        if let Some(session) = known {
            return session.push(pieces);
        }
        // On a cluster, the keeper of a far end begins its session.
        if self.places.is_some() || self.stop.load(Ordering::Acquire) {
            return;
        }
        let Some(status) = Frame::status(pieces, self.template.versions) else { return };
        let identity = match self.template.end {
            BridgeEnd::Far if node == self.template.node => None,
            BridgeEnd::Far => return,
            BridgeEnd::Home if check_node(node).is_err() => return,
            BridgeEnd::Home if far_node_file(&self.template.dir, &self.template.link, node).exists() => None,
            BridgeEnd::Home => {
                let identity = self.identity_of(node);
                if !status.as_ref().is_ok_and(|status| status.to == identity.instance) {
                    return self.greet(node, identity, status);
                }
                Some(identity)
            }
        };
        let mut sessions = self.sessions();
        // All that run are taken from here when the bridge stops.
        if self.stop.load(Ordering::Acquire) {
            return;
        }
        // One ends when its node is silent for long.
        sessions.retain(|_, running| !running.thread.is_finished());
        // A frame in another thread may have begun it.
        if sessions.len() >= self.peers && !sessions.contains_key(node) {
            return self.make_room(&sessions, node);
        }
        let begun = self.begin(&mut sessions, node, identity, None);
        drop(sessions);
        match begun {
            Ok(session) => session.push(pieces),
            Err(error) if self.may_log() => error!(node, "cannot begin with this node: {error:#}"),
            Err(_) => {}
        }
    }

    fn identity_of(&self, node: &str) -> SessionIdentity {
        // 0 is no number.
        let number = |of: &str| self.greetings.hash_one((of, node)) | 1;
        SessionIdentity { instance: number("instance"), stream: number("stream") }
    }

    /// Answers a far node that this bridge does not know, and keeps nothing of it.
    fn greet(&self, node: &str, identity: SessionIdentity, status: Result<Box<Status>, ProtocolVersions>) {
        let own = self.template.versions;
        let (to, others) = status.map_or_else(|reads| (0, reads), |status| (status.instance, status.reads));
        let version = own.common(others).unwrap_or_else(|| {
            self.metrics.refused.get_or_create_owned(&labels(&self.template.link, "")).inc();
            if self.may_log() {
                error!(node, "{}", own.remedy(others));
            }
            own.lowest
        });
        let answer = Status { to, peers: 0, ..Status::new(own, identity.instance, identity.stream) };
        let Some(outlet) = self.outlet.get() else { return };
        if let Err(error) = outlet.put_or_drop(node, &Arc::new(answer.encode(version))) {
            debug!(node, "cannot send a greeting: {error:#}");
        }
    }

    /// Ends the session that has been silent for longest, so that `node` can have its place with the next status.
    fn make_room(&self, sessions: &Sessions, node: &str) {
        // One place is enough. It is free as soon as that session's thread has ended.
        if sessions.values().any(SessionThread::is_stopping) {
            return;
        }
        let spare = sessions.values().filter_map(|running| Some((running.session.spare_for()?, running)));
        match spare.max_by_key(|(silence, _)| *silence) {
            Some((_, running)) => running.stop(),
            None if self.may_log() => error!(
                node,
                "refused: link {} has {} far nodes, as many as this bridge may have (--peers, the chart's bridge.peers): allow more, at most \
                 {MAX_SEATS}, or stop the bridge of another node",
                self.template.link,
                sessions.len()
            ),
            None => {}
        }
    }

    fn connected_gauge(&self, node: &str) -> ConnectedGauge {
        ConnectedGauge::new(&self.metrics.connected, labels(&self.template.link, node))
    }

    fn may_log(&self) -> bool {
        self.log_limit.lock().unwrap_or_else(PoisonError::into_inner).allow(Instant::now()).is_some()
    }

    fn settings_of(&self, node: &str) -> SessionSettings {
        SessionSettings { node: node.to_owned(), ..self.template.clone() }
    }

    fn begin(
        &self,
        sessions: &mut Sessions,
        node: &str,
        identity: Option<SessionIdentity>,
        connected: Option<ConnectedGauge>,
    ) -> Result<Arc<PeerSession>> {
        // At the start of a far node, a frame may have been first.
        if let Some(running) = sessions.get(node) {
            return Ok(running.session());
        }
        let settings = SessionSettings { identity, ..self.settings_of(node) };
        let outlet = Arc::clone(self.outlet.get().context("the bridge is still starting")?);
        let connected = connected.unwrap_or_else(|| self.connected_gauge(node));
        let counts = self.metrics.of(&settings.link, node, connected);
        let (labels, metrics) = (labels(&settings.link, node), self.metrics.clone());
        let session = Arc::new(PeerSession::new(settings, Arc::clone(&outlet), counts)?);
        let running = Arc::clone(&session);
        let name = format!("{}:{node}", self.template.link);
        let stop: Arc<AtomicBool> = Arc::default();
        let of_session = Arc::clone(&stop);
        let node_name = node.to_owned();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            if running.run(&of_session) {
                metrics.forget(&labels);
                outlet.forget(&node_name);
            }
        });
        let thread = thread.context("cannot start a thread")?;
        sessions.insert(node.to_owned(), SessionThread { session: Arc::clone(&session), stop, thread });
        Ok(session)
    }

    fn guard(&self, guard: Guard) {
        self.guards.lock().unwrap_or_else(PoisonError::into_inner).push(guard);
    }

    /// Starts the thread that begins and ends the session of a far node on a cluster.
    fn keep_on_cluster(self: &Arc<Self>, engine: &dyn Engine, cluster: &ClusterPlace) -> Result<()> {
        let link = &self.template.link;
        let may_be_near = cluster.near.contains(link);
        let Some(places) = &self.places else { return Ok(()) };
        // Not this end itself, whose guards may not be dropped in a callback of theirs.
        let of_watch = Arc::clone(places);
        let on_place = Arc::new(move |name: &str, is_there| of_watch.set(name, is_there));
        self.guard(engine.watch(link.as_str(), on_place)?);
        let (end, lookup) = (Arc::downgrade(self), engine.addresses(link.as_str()));
        let addresses = std::thread::Builder::new().name(format!("{link}:addresses"));
        addresses.spawn(move || look_up(&end, &lookup)).context("cannot start a thread")?;
        let (end, place) = (Arc::clone(self), cluster.place.clone());
        let keeper = std::thread::Builder::new().name(format!("{link}:keeper"));
        let keeper = keeper.spawn(move || end.keep(&place, may_be_near)).context("cannot start a thread")?;
        *self.keeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(keeper);
        Ok(())
    }

    /// Has a session while the link is far, and no other bridge of this place has one.
    fn keep(&self, place: &str, may_be_near: bool) {
        let Some(places) = &self.places else { return };
        let link = &self.template.link;
        let of_link = vec![("link", link.to_string())];
        let near = self.metrics.near.get_or_create_owned(&of_link);
        let standby = self.metrics.standby.get_or_create_owned(&of_link);
        let primaries = self.metrics.primaries.get_or_create_owned(&of_link);
        let mut complaint = String::new();
        let mut check = PrimariesCheck::default();
        // The session has the same gauge. It is also exported while there is no session, if the link could be carried.
        let mut connected = None;
        while !self.stop.load(Ordering::Acquire) {
            let mut interval = CHECK_INTERVAL;
            let distance = if may_be_near { places.distance(place) } else { Distance::Far };
            match distance {
                // It stays as it is until a bridge with the link is back.
                Distance::Unknown => {
                    connected.get_or_insert_with(|| self.connected_gauge(&self.template.node));
                }
                Distance::Near => {
                    if near.set(1) == 0 {
                        info!(%link, place, "the link is in this IPC directory: nothing is carried");
                    }
                    standby.set(0);
                    self.end_session();
                    connected = None;
                }
                Distance::Far => {
                    if near.set(0) == 1 {
                        info!(%link, place, "the link is no longer in this IPC directory");
                    }
                    let gauge = connected.take().unwrap_or_else(|| self.connected_gauge(&self.template.node));
                    match self.begin_if_none(&gauge) {
                        Ok(()) => {
                            connected = Some(gauge);
                            if standby.set(0) == 1 {
                                info!(%link, place, "this bridge takes the link over");
                            }
                            complaint.clear();
                        }
                        Err(error) => {
                            interval = STANDBY_INTERVAL;
                            let is_standby = is_in_use(&error);
                            standby.set(i64::from(is_standby));
                            // The bridge that has the link says whether it is connected.
                            connected = (!is_standby).then_some(gauge);
                            let text = format!("{error:#}");
                            if text != complaint {
                                match is_standby {
                                    true => info!(%link, place, "standing by: {text}"),
                                    false => error!(%link, place, "cannot carry the link: {text}"),
                                }
                                complaint = text;
                            }
                        }
                    }
                }
            }
            primaries.set(check.count(link, &places.all(), &self.addresses()));
            places.wait(interval);
        }
    }

    fn addresses(&self) -> MutexGuard<'_, Vec<String>> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_if_none(&self, connected: &ConnectedGauge) -> Result<()> {
        let mut sessions = self.sessions();
        sessions.retain(|_, running| !running.thread.is_finished());
        self.begin(&mut sessions, &self.template.node, None, Some(connected.clone())).map(drop)
    }

    fn end_session(&self) {
        let running = self.sessions().remove(&self.template.node);
        if let Some(running) = running {
            running.stop();
            running.join();
        }
    }
}

/// Counts the primaries of a link, and logs if there are two for long.
#[derive(Default)]
struct PrimariesCheck {
    since: Option<Instant>,
    is_logged: bool,
}

impl PrimariesCheck {
    fn count(&mut self, link: &LinkName, places: &BTreeSet<String>, addresses: &[String]) -> i64 {
        let count = places.len().max(addresses.len());
        if count < 2 {
            *self = Self::default();
        } else if self.since.get_or_insert_with(Instant::now).elapsed() >= TWO_PRIMARIES_LIMIT
            && !self.is_logged
        {
            self.is_logged = true;
            error!(
                %link,
                ?places,
                ?addresses,
                "the link has {count} primaries: give `side: primary` to one pod of the namespace. This bridge stays with the one that it is \
                 connected to"
            );
        }
        i64::try_from(count).unwrap_or(i64::MAX)
    }
}

/// Looks up the addresses of a link until it has gone. In a thread of its own, because a look-up can take long.
fn look_up(end: &Weak<HomeOrFar>, lookup: &AddressLookup) {
    loop {
        let found = lookup();
        let Some(end) = end.upgrade() else { return };
        let before = std::mem::replace(&mut *end.addresses(), found.clone());
        if let Some(places) = end.places.as_ref().filter(|_| before != found) {
            places.wake();
        }
        drop(end);
        std::thread::sleep(LOOK_UP_INTERVAL);
    }
}

/// Whether another bridge has the journal.
fn is_in_use(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    kind == Some(io::ErrorKind::WouldBlock)
}

fn labels(link: &LinkName, node: &str) -> SessionLabels {
    vec![("link", link.to_string()), ("node", node.to_owned())]
}

/// Names of nodes are parts of keys and of file names.
fn check_node(node: &str) -> Result<()> {
    let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if node.is_empty() || node.len() > 63 || !node.chars().all(is_good) || node.starts_with('.') {
        bail!(
            "a node cannot be called {node:?}: use 1 to 63 letters, digits, `-`, `_` and `.`, and no `.` first"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Fate, MemoryEngine};
    use crate::frame::VERSIONS;

    /// The bridge that has the link. A node that is silent at all counts as gone.
    fn home(dir: &tempfile::TempDir) -> Bridge {
        let config = BridgeConfig {
            end: BridgeEnd::Home,
            dir: dir.path().to_owned(),
            links: vec!["fronthaul".parse().unwrap()],
            node: String::new(),
            peers: 3,
            peer_timeout: Duration::ZERO,
            cluster: None,
            versions: VERSIONS,
        };
        Bridge::start(&config, &MemoryEngine::new(|| Fate::Lost), &Metrics::default()).unwrap()
    }

    /// A session that does nothing, not even stop.
    fn idle_session(end: &HomeOrFar, node: &str) -> SessionThread {
        let outlet = Arc::clone(end.outlet.get().unwrap());
        let session = PeerSession::new(end.settings_of(node), outlet, BridgeCounts::default()).unwrap();
        SessionThread { session: Arc::new(session), stop: Arc::default(), thread: std::thread::spawn(|| ()) }
    }

    #[test]
    fn one_node_at_a_time_makes_room() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let bridge = home(&dir);
        let end = &bridge.ends[0];
        let nodes = ["silent-1", "silent-2", "silent-3"];
        let mut sessions: Sessions =
            nodes.map(|node| (node.to_owned(), idle_session(end, node))).into_iter().collect();
        let stopping =
            |sessions: &Sessions| sessions.values().filter(|running| running.is_stopping()).count();
        assert_eq!(stopping(&sessions), 0);
        for _ in 0..3 {
            end.make_room(&sessions, "edge");
            assert_eq!(stopping(&sessions), 1);
        }
        // It has ended.
        sessions.retain(|_, running| !running.is_stopping());
        end.make_room(&sessions, "edge");
        assert_eq!(stopping(&sessions), 1);
        bridge.stop();
    }
}
