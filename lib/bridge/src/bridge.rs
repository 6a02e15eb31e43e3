//! A bridge: its sessions, one for each peer of each link.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use prometheus_client::registry::Registry;
use shmesh::MAX_SEATS;
use shmesh::config::LinkName;
use tracing::error;

use crate::engine::{Engine, Outlet};
use crate::frame::Frame;
use crate::session::{BridgeCounts, BridgeEnd, PeerSession, SessionSettings};

/// The sessions of a link, by the name of the far node.
type Sessions = HashMap<String, SessionThread>;
type SessionLabels = Vec<(&'static str, String)>;

/// The metrics of all sessions, by link and far node.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    sent: Family<SessionLabels, Counter>,
    received: Family<SessionLabels, Counter>,
    lost: Family<SessionLabels, Counter>,
    again: Family<SessionLabels, Counter>,
    refused: Family<SessionLabels, Counter>,
    connected: Family<SessionLabels, Gauge>,
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
    }

    fn of(&self, link: &LinkName, node: &str) -> BridgeCounts {
        let labels = vec![("link", link.to_string()), ("node", node.to_owned())];
        BridgeCounts {
            sent: self.sent.get_or_create_owned(&labels),
            received: self.received.get_or_create_owned(&labels),
            lost: self.lost.get_or_create_owned(&labels),
            again: self.again.get_or_create_owned(&labels),
            refused: self.refused.get_or_create_owned(&labels),
            connected: self.connected.get_or_create_owned(&labels),
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
    /// How long the other side may be silent until its participants count as gone.
    pub peer_timeout: Duration,
}

/// The bridge of one node. It runs until [`stop`](Self::stop).
#[derive(Debug)]
pub struct Bridge {
    ends: Vec<Arc<HomeOrFar>>,
}

/// All sessions of a link.
#[derive(Debug)]
struct HomeOrFar {
    template: SessionSettings,
    metrics: Metrics,
    outlet: OnceLock<Arc<dyn Outlet>>,
    stop: Arc<AtomicBool>,
    sessions: Mutex<Sessions>,
}

#[derive(Debug)]
struct SessionThread {
    session: Arc<PeerSession>,
    thread: JoinHandle<()>,
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
            };
            let end = Arc::new(HomeOrFar {
                template,
                metrics: metrics.clone(),
                outlet: OnceLock::new(),
                stop: Arc::default(),
                sessions: Mutex::default(),
            });
            let hearer: Weak<HomeOrFar> = Arc::downgrade(&end);
            let on_frame = Arc::new(move |node: &str, frame: Vec<u8>| {
                if let Some(end) = hearer.upgrade() {
                    end.hear(node, frame);
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
            if config.end == BridgeEnd::Far {
                end.begin(&mut end.sessions(), &config.node)?;
            }
            ends.push(end);
        }
        Ok(Self { ends })
    }

    /// Stops taking messages, waits for at most five seconds until those that were taken have arrived, and detaches.
    pub fn stop(self) {
        for end in &self.ends {
            end.stop.store(true, Ordering::Release);
        }
        for end in &self.ends {
            let sessions = std::mem::take(&mut *end.sessions());
            for running in sessions.into_values() {
                running.session.wake();
                // A session that panicked has been logged.
                let _ = running.thread.join();
            }
        }
    }
}

impl HomeOrFar {
    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        // A session is added as a whole, so a poisoned lock guards a valid table.
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a frame to its session. At home a new far node gets one with its first status.
    fn hear(&self, node: &str, frame: Vec<u8>) {
        let mut sessions = self.sessions();
        // One ends when its node is silent for long.
        sessions.retain(|_, running| !running.thread.is_finished());
        if let Some(running) = sessions.get(node) {
            let session = Arc::clone(&running.session);
            drop(sessions);
            return session.push(frame);
        }
        let is_known = self.template.end == BridgeEnd::Home || node == self.template.node;
        let is_new = is_known && matches!(Frame::decode(&frame), Ok(Frame::Status(_)));
        let count = sessions.len();
        if !is_new || self.stop.load(Ordering::Acquire) {
            return;
        }
        if count >= MAX_SEATS {
            error!(node, "link {} has {count} far nodes already, as many as it can have", self.template.link);
            return;
        }
        match check_node(node).and_then(|()| self.begin(&mut sessions, node)) {
            Ok(session) => session.push(frame),
            Err(error) => error!(node, "cannot begin with this node: {error:#}"),
        }
    }

    fn begin(&self, sessions: &mut Sessions, node: &str) -> Result<Arc<PeerSession>> {
        // At the start of a far node, a frame may have been first.
        if let Some(running) = sessions.get(node) {
            return Ok(Arc::clone(&running.session));
        }
        let settings = SessionSettings { node: node.to_owned(), ..self.template.clone() };
        let outlet = Arc::clone(self.outlet.get().context("the bridge is still starting")?);
        let counts = self.metrics.of(&settings.link, node);
        let session = Arc::new(PeerSession::new(settings, outlet, counts)?);
        let running = Arc::clone(&session);
        let (stop, name) = (Arc::clone(&self.stop), format!("{}:{node}", self.template.link));
        let thread = std::thread::Builder::new().name(name).spawn(move || running.run(&stop));
        let thread = thread.context("cannot start a thread")?;
        sessions.insert(node.to_owned(), SessionThread { session: Arc::clone(&session), thread });
        Ok(session)
    }
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
