//! [Zenoh](https://zenoh.io) as the engine.
//!
//! The frames of a link go to `shmesh/<group>/<link>/home/<node>` and `shmesh/<group>/<link>/far/<node>`. Nothing is found by
//! multicast or told on by gossip: bridges connect to the addresses that they were given. On a cluster, a bridge that has the link
//! keeps a liveliness token `shmesh/<group>/<link>/at/<place>/<id of its session>`.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow};
use bytes::Bytes;
use prometheus_client::metrics::counter::Counter;
use tracing::warn;
use zenoh::bytes::ZBytes;
use zenoh::pubsub::{Publisher, Subscriber};
use zenoh::qos::CongestionControl;
use zenoh::sample::SampleKind;
use zenoh::{Session, Wait};

use crate::engine::{Engine, Guard, OnFrame, OnPlace, Outlet, SentFrame};

/// Where a bridge listens and connects, and with which certificates.
#[derive(Clone, Debug, Default)]
pub struct NetworkPlace {
    /// Addresses to listen on, as `tcp/0.0.0.0:7447`.
    pub listen: Vec<String>,
    /// Addresses to connect to, again and again until it succeeds.
    pub connect: Vec<String>,
    /// Bridges of different groups do not carry each other's links; in a cluster, its name and the namespace.
    pub group: String,
    /// Certificates for addresses that start with `tls/` or `quic/`.
    pub certificates: Option<Certificates>,
    /// Common names of the certificates that may use the keys of the group; empty: all certificates of the authority may.
    pub allowed_certificates: Vec<String>,
}

/// Files with certificates, in PEM.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// The certificate of the authority that signed the other bridges' certificates.
    pub authority: PathBuf,
    /// The certificate of this bridge.
    pub certificate: PathBuf,
    /// The private key of this bridge.
    pub key: PathBuf,
}

/// A session with the other bridges.
#[derive(Debug)]
pub struct ZenohEngine {
    session: Session,
    group: String,
}

impl ZenohEngine {
    /// Listens and connects. Returns before a connection is made. Counts connections with a certificate that is not
    /// [allowed](NetworkPlace::allowed_certificates) in `refused`.
    ///
    /// # Errors
    /// An address or a certificate cannot be used.
    pub fn open(place: &NetworkPlace, refused: &Counter) -> Result<Self> {
        let mut config = zenoh::Config::default();
        let mut set = |key: &str, value: String| {
            config.insert_json5(key, &value).map_err(|error| anyhow!("{key}: {error}"))
        };
        let list = |addresses: &[String]| format!("{addresses:?}");
        set("mode", "\"peer\"".into())?;
        set("listen/endpoints", list(&place.listen))?;
        set("connect/endpoints", list(&place.connect))?;
        // The other bridge may start later, and again.
        set("connect/timeout_ms", "-1".into())?;
        set("connect/exit_on_failure", "false".into())?;
        set("connect/retry", "{period_init_ms: 100, period_max_ms: 2000, period_increase_factor: 2}".into())?;
        set("scouting/multicast/enabled", "false".into())?;
        set("scouting/gossip/enabled", "false".into())?;
        if let Some(certificates) = &place.certificates {
            let text = |path: &PathBuf| format!("{:?}", path.display().to_string());
            set("transport/link/tls/root_ca_certificate", text(&certificates.authority))?;
            set("transport/link/tls/listen_certificate", text(&certificates.certificate))?;
            set("transport/link/tls/listen_private_key", text(&certificates.key))?;
            set("transport/link/tls/connect_certificate", text(&certificates.certificate))?;
            set("transport/link/tls/connect_private_key", text(&certificates.key))?;
            set("transport/link/tls/enable_mtls", "true".into())?;
        }
        if !place.allowed_certificates.is_empty() {
            set("access_control", access(&place.group, &place.allowed_certificates))?;
        }
        let session = zenoh::open(config).wait().map_err(|error| anyhow!("{error}"));
        let session = session.with_context(|| {
            format!("cannot listen on {:?} and connect to {:?}", place.listen, place.connect)
        })?;
        if !place.allowed_certificates.is_empty() {
            audit(&session, place.allowed_certificates.clone(), refused)?;
        }
        Ok(Self { session, group: place.group.clone() })
    }

    fn open_end(
        &self,
        link: &str,
        hear: &str,
        tell: &'static str,
        on_frame: OnFrame,
    ) -> Result<Box<dyn Outlet>> {
        let prefix = format!("shmesh/{}/{link}", self.group);
        let key = format!("{prefix}/{hear}");
        let subscriber = self
            .session
            .declare_subscriber(&key)
            .callback(move |sample| {
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
            })
            .wait()
            .map_err(|error| anyhow!("cannot receive {key}: {error}"))?;
        Ok(Box::new(ZenohOutlet {
            session: self.session.clone(),
            prefix: format!("{prefix}/{tell}"),
            publishers: Mutex::default(),
            _subscriber: subscriber,
        }))
    }
}

/// Logs and counts connections that access control leaves without rights. Zenoh itself drops their messages silently.
fn audit(session: &Session, allowed: Vec<String>, refused: &Counter) -> Result<()> {
    let refused = refused.clone();
    let info = session.info();
    let listener = info.link_events_listener().history(true).callback(move |event| {
        let link = event.link();
        let name = link.auth_identifier().unwrap_or("");
        if event.kind() == SampleKind::Put && !allowed.iter().any(|allowed| allowed == name) {
            refused.inc();
            warn!(
                certificate = name,
                from = %link.dst(),
                "refused: a certificate of this name may not use the links of this bridge, only {allowed:?} may"
            );
        }
    });
    listener.background().wait().map_err(|error| anyhow!("cannot watch connections: {error}"))
}

/// Access control: only these certificates may use the keys of the group, and no certificate may use others.
fn access(group: &str, names: &[String]) -> String {
    let messages = "['put', 'delete', 'declare_subscriber', 'query', 'reply', 'declare_queryable', 'liveliness_token', \
                    'liveliness_query', 'declare_liveliness_subscriber']";
    let keys = format!("{:?}", format!("shmesh/{group}/**"));
    format!(
        "{{ enabled: true, default_permission: 'deny',
            rules: [{{ id: 'group', messages: {messages}, flows: ['ingress', 'egress'], permission: 'allow', key_exprs: [{keys}] }}],
            subjects: [{{ id: 'group', cert_common_names: {names:?} }}],
            policies: [{{ rules: ['group'], subjects: ['group'] }}] }}"
    )
}

impl Engine for ZenohEngine {
    fn open_home(&self, link: &str, on_frame: OnFrame) -> Result<Box<dyn Outlet>> {
        self.open_end(link, "home/*", "far", on_frame)
    }

    fn open_far(&self, link: &str, node: &str, on_frame: OnFrame) -> Result<Box<dyn Outlet>> {
        self.open_end(link, &format!("far/{node}"), "home", on_frame)
    }

    fn announce(&self, link: &str, place: &str) -> Result<Guard> {
        let key = format!("shmesh/{}/{link}/at/{place}/{}", self.group, self.session.zid());
        let token = self.session.liveliness().declare_token(&key).wait();
        Ok(Box::new(token.map_err(|error| anyhow!("cannot announce {key}: {error}"))?))
    }

    fn watch(&self, link: &str, on_place: OnPlace) -> Result<Guard> {
        let prefix = format!("shmesh/{}/{link}/at/", self.group);
        let key = format!("{prefix}*/*");
        let watch = self
            .session
            .liveliness()
            .declare_subscriber(&key)
            .history(true)
            .callback(move |sample| {
                if let Some(name) = sample.key_expr().as_str().strip_prefix(&prefix) {
                    on_place(name, sample.kind() == SampleKind::Put);
                }
            })
            .wait();
        Ok(Box::new(watch.map_err(|error| anyhow!("cannot watch {key}: {error}"))?))
    }
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
    session: Session,
    prefix: String,
    publishers: Mutex<HashMap<String, Arc<Publisher<'static>>>>,
    _subscriber: Subscriber<()>,
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
}

impl ZenohOutlet {
    fn publisher(&self, node: &str) -> Result<Arc<Publisher<'static>>> {
        let mut publishers = self.publishers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(publisher) = publishers.get(node) {
            return Ok(Arc::clone(publisher));
        }
        let key = format!("{}/{node}", self.prefix);
        let publisher = self.session.declare_publisher(key.clone());
        // Express: a frame is sent at once, and does not wait for others to fill a batch.
        let publisher = publisher.congestion_control(CongestionControl::Block).express(true).wait();
        let publisher = Arc::new(publisher.map_err(|error| anyhow!("cannot send {key}: {error}"))?);
        publishers.insert(node.to_owned(), Arc::clone(&publisher));
        Ok(publisher)
    }
}
