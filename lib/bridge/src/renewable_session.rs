//! A Zenoh session that is replaced when the certificate files are.
//!
//! What was declared on the session is declared again on the next one. A bridge that listens has to close the session before it can open
//! the next, because both need the port; a bridge that connects keeps the session until the next one is connected. Frames that are lost
//! meanwhile are sent again by the streams.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use tracing::{error, info, warn};
use zenoh::sample::SampleKind;
use zenoh::{Session, Wait};

use crate::certificates::{CertificateCounts, Certificates, LoadedCertificates};
use crate::engine::Guard;

/// How long a new session may take to connect to as many bridges as the present one.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long a bridge tries to listen with new certificates until it tries the last ones.
const LISTEN_LIMIT: Duration = Duration::from_secs(5);
/// How often it looks whether either has happened.
const INTERVAL: Duration = Duration::from_millis(100);

/// Where a bridge listens and connects, and with which certificates.
#[derive(Clone, Debug, Default)]
pub struct NetworkPlace {
    /// Addresses to listen on, as `tcp/0.0.0.0:7447`.
    pub listen: Vec<String>,
    /// Addresses to connect to, again and again until it succeeds.
    pub connect: Vec<String>,
    /// More addresses to connect to, each for one link.
    pub connect_links: Vec<(String, String)>,
    /// Bridges of different groups do not carry each other's links; in a cluster, its name and the namespace.
    pub group: String,
    /// Certificates for addresses that start with `tls/` or `quic/`.
    pub certificates: Option<Certificates>,
    /// How often the certificate files are read, to replace the connections when they have changed.
    pub certificate_interval: Duration,
    /// Common names of the certificates that may use the keys of the group; empty: all certificates of the authority may.
    pub allowed_certificates: Vec<String>,
}

/// Declares something on a session, and keeps it declared until the guard is dropped.
type Declare = Box<dyn Fn(&Session) -> Result<Guard> + Send>;

struct Declaration {
    declare: Declare,
    /// Whether the old guard is dropped before the next one is made.
    is_exclusive: bool,
    guard: Option<Guard>,
    /// Whether it is still to be declared on the present session.
    is_failed: bool,
}

impl Declaration {
    fn renew(&mut self, session: &Session) -> Result<()> {
        if self.is_exclusive {
            self.guard = None;
        }
        self.guard = Some((self.declare)(session)?);
        self.is_failed = false;
        Ok(())
    }
}

#[derive(Default)]
struct Declarations {
    count: u64,
    by_number: BTreeMap<u64, Declaration>,
}

impl Declarations {
    /// Declares on the present session what is not declared there. What fails is tried again with the next look at the files.
    fn renew_failed(&mut self, session: &Session) {
        for declaration in self.by_number.values_mut().filter(|declaration| declaration.is_failed) {
            if let Err(error) = declaration.renew(session) {
                error!("{error:#}");
            }
        }
    }
}

/// The present session, and what the next one needs.
pub(crate) struct RenewableSession {
    place: NetworkPlace,
    counts: CertificateCounts,
    /// The present session and its number, from 0.
    session: RwLock<(u64, Session)>,
    declarations: Mutex<Declarations>,
    /// The certificates of the session.
    loaded: Mutex<Option<LoadedCertificates>>,
}

impl std::fmt::Debug for RenewableSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RenewableSession").field("place", &self.place).finish_non_exhaustive()
    }
}

impl RenewableSession {
    pub(crate) fn open(place: NetworkPlace, counts: CertificateCounts) -> Result<Self> {
        let loaded = place.certificates.as_ref().map(LoadedCertificates::read).transpose()?;
        let session = open(&place, loaded.as_ref(), &counts)?;
        Ok(Self {
            place,
            counts,
            session: RwLock::new((0, session)),
            declarations: Mutex::default(),
            loaded: Mutex::new(loaded),
        })
    }

    /// The number of the present session. It costs a read lock that is free but for the moment of a replacement.
    pub(crate) fn generation(&self) -> u64 {
        self.session.read().unwrap_or_else(PoisonError::into_inner).0
    }

    pub(crate) fn session(&self) -> Session {
        self.session.read().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    /// Declares something on this session and on those that follow. `is_exclusive`: never on two at once.
    pub(crate) fn declare(self: &Arc<Self>, is_exclusive: bool, declare: Declare) -> Result<Guard> {
        let mut declarations = self.declarations();
        let guard = Some(declare(&self.session())?);
        declarations.count += 1;
        let number = declarations.count;
        declarations.by_number.insert(number, Declaration { declare, is_exclusive, guard, is_failed: false });
        Ok(Box::new(DeclarationGuard { connection: Arc::clone(self), number }))
    }

    fn declarations(&self) -> MutexGuard<'_, Declarations> {
        // A panic of Zenoh can leave one undeclared, which a later session repairs.
        self.declarations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the session if its certificate files have changed. On an error the last certificates stay in use.
    fn renew(&self, stop: &AtomicBool) -> Result<()> {
        let Some(files) = &self.place.certificates else { return Ok(()) };
        let new = LoadedCertificates::read(files)?;
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if loaded.as_ref().is_some_and(|loaded| loaded.is_same(&new)) {
            self.declarations().renew_failed(&self.session());
            return Ok(());
        }
        // Whether the files can be used at all, which does not need the bridge's own port.
        let trial = NetworkPlace {
            listen: vec!["quic/127.0.0.1:0".into()],
            connect: Vec::new(),
            ..self.place.clone()
        };
        let unusable = || {
            let (authority, certificate) = (files.authority.display(), files.certificate.display());
            format!("cannot use {authority}, {certificate} and {} together", files.key.display())
        };
        close(&open(&trial, Some(&new), &self.counts).with_context(unusable)?);
        if let Some(loaded) = &*loaded {
            check_name(loaded, &new, &files.certificate)?;
        }
        if self.place.listen.is_empty() {
            self.replace_connected(&new, stop)?;
        } else {
            self.replace_listening(&new, loaded.as_ref(), stop)?;
        }
        *loaded = Some(new);
        self.counts.renewed.inc();
        info!("the certificate files have changed: all connections are made again with the new ones");
        Ok(())
    }

    fn replace_connected(&self, new: &LoadedCertificates, stop: &AtomicBool) -> Result<()> {
        let old = self.session();
        let next = open(&self.place, Some(new), &self.counts)?;
        let begun = Instant::now();
        // While the other bridges replace theirs, either can be without a connection.
        while peers(&next) == 0 || peers(&next) < peers(&old) {
            if stop.load(Ordering::Acquire) || begun.elapsed() > CONNECT_LIMIT && peers(&old) > 0 {
                let (connected, wanted) = (peers(&next), peers(&old));
                close(&next);
                bail!(
                    "with the new certificates {connected} of {wanted} bridges can be connected: give those bridges an authority file \
                     that has the new certificate's authority, too"
                );
            }
            if begun.elapsed() > CONNECT_LIMIT {
                break;
            }
            thread::park_timeout(INTERVAL);
        }
        self.replace(&mut self.declarations(), next);
        close(&old);
        Ok(())
    }

    fn replace_listening(
        &self,
        new: &LoadedCertificates,
        old: Option<&LoadedCertificates>,
        stop: &AtomicBool,
    ) -> Result<()> {
        let mut declarations = self.declarations();
        declarations.by_number.values_mut().for_each(|declaration| declaration.guard = None);
        close(&self.session());
        let begun = Instant::now();
        let mut is_logged = false;
        loop {
            let error = match open(&self.place, Some(new), &self.counts) {
                Ok(session) => {
                    self.replace(&mut declarations, session);
                    return Ok(());
                }
                Err(error) => error,
            };
            if begun.elapsed() > LISTEN_LIMIT {
                match open(&self.place, old, &self.counts) {
                    Ok(session) => {
                        self.replace(&mut declarations, session);
                        return Err(error);
                    }
                    Err(with_old) if !is_logged => {
                        error!("this bridge cannot listen any longer, and tries it again: {with_old:#}");
                        self.counts.unusable.inc();
                        is_logged = true;
                    }
                    Err(_) => {}
                }
            }
            if stop.load(Ordering::Acquire) {
                return Err(error);
            }
            thread::park_timeout(INTERVAL);
        }
    }

    fn replace(&self, declarations: &mut Declarations, session: Session) {
        declarations.by_number.values_mut().for_each(|declaration| declaration.is_failed = true);
        declarations.renew_failed(&session);
        let mut present = self.session.write().unwrap_or_else(PoisonError::into_inner);
        *present = (present.0 + 1, session);
    }
}

/// Undeclares on the present session when it is dropped.
struct DeclarationGuard {
    connection: Arc<RenewableSession>,
    number: u64,
}

impl Drop for DeclarationGuard {
    fn drop(&mut self) {
        let declaration = self.connection.declarations().by_number.remove(&self.number);
        drop(declaration);
    }
}

/// The thread that replaces sessions. It is stopped when this is dropped, or before.
#[derive(Debug)]
pub(crate) struct CertificateWatcher {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl CertificateWatcher {
    pub(crate) fn start(connection: Arc<RenewableSession>, interval: Duration) -> Result<Self> {
        let stop = Arc::<AtomicBool>::default();
        let of_thread = Arc::clone(&stop);
        let thread = thread::Builder::new().name("certificates".into());
        let thread = thread.spawn(move || watch(&connection, interval, &of_thread));
        Ok(Self { stop, thread: Some(thread.context("cannot start a thread")?) })
    }
}

impl CertificateWatcher {
    /// Lets the thread end, without waiting for it.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for CertificateWatcher {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // A panic has been logged.
            let _ = thread.join();
        }
    }
}

fn watch(connection: &RenewableSession, interval: Duration, stop: &AtomicBool) {
    let mut complaint = String::new();
    let mut looked = Instant::now();
    while !stop.load(Ordering::Acquire) {
        let left = interval.saturating_sub(looked.elapsed());
        if !left.is_zero() {
            thread::park_timeout(left);
            continue;
        }
        match connection.renew(stop) {
            Ok(()) => complaint.clear(),
            Err(_) if stop.load(Ordering::Acquire) => {}
            Err(error) => {
                connection.counts.unusable.inc();
                let text = format!("{error:#}");
                if text != complaint {
                    error!("the new certificate files are not used, the last ones stay in use: {text}");
                    complaint = text;
                }
            }
        }
        looked = Instant::now();
    }
}

/// Refuses a certificate of another name. Bridges that allow certificates by name accept its connection and drop its messages, which this
/// bridge could not tell from silence.
fn check_name(present: &LoadedCertificates, new: &LoadedCertificates, file: &Path) -> Result<()> {
    let shown = |name: Option<String>| {
        name.map_or_else(|| "no common name".into(), |name| format!("the common name {name:?}"))
    };
    let [present, new] = [present.common_name()?, new.common_name()?];
    if present != new {
        bail!(
            "{} has {}, and the certificate in use has {}, which may be the only one that the other bridges allow: issue it with the same \
             name, or, if they allow the new one, start this bridge again",
            file.display(),
            shown(new),
            shown(present)
        );
    }
    Ok(())
}

fn open(
    place: &NetworkPlace,
    certificates: Option<&LoadedCertificates>,
    counts: &CertificateCounts,
) -> Result<Session> {
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
    // QUIC does not tell when the other process was killed.
    set("transport/link/tx/lease", "5000".into())?;
    // Of `put_or_drop`, which callbacks use: no wait for room at all.
    set("transport/link/tx/queue/congestion_control/drop/wait_before_drop", "0".into())?;
    set("scouting/multicast/enabled", "false".into())?;
    set("scouting/gossip/enabled", "false".into())?;
    if let Some(certificates) = certificates {
        let [authority, certificate, key] = certificates.paths().map(|path| format!("{path:?}"));
        set("transport/link/tls/root_ca_certificate", authority)?;
        set("transport/link/tls/listen_certificate", certificate.clone())?;
        set("transport/link/tls/listen_private_key", key.clone())?;
        set("transport/link/tls/connect_certificate", certificate)?;
        set("transport/link/tls/connect_private_key", key)?;
        set("transport/link/tls/enable_mtls", "true".into())?;
    }
    if !place.allowed_certificates.is_empty() {
        set("access_control", access(&place.group, &place.allowed_certificates))?;
    }
    if place.listen.iter().chain(&place.connect).any(|address| address.starts_with("tls/")) {
        warn!(
            "Zenoh reads and writes a TLS stream at the same time, which can crash this process (eclipse-zenoh/zenoh#2557): use quic/ \
             in place of tls/, with the same certificates"
        );
    }
    let session = zenoh::open(config).wait().map_err(|error| anyhow!("{error}"));
    let session = session
        .with_context(|| format!("cannot listen on {:?} and connect to {:?}", place.listen, place.connect))?;
    if !place.allowed_certificates.is_empty() {
        audit(&session, place.allowed_certificates.clone(), counts)?;
    }
    Ok(session)
}

/// Closes a session. Zenoh 1.10 can panic here, after one of its threads has: the caller goes on, because it has another session or ends.
fn close(session: &Session) {
    match catch_unwind(AssertUnwindSafe(|| session.close().wait())) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!("cannot close a session: {error}"),
        Err(_) => error!("the network library failed while it closed a session; its threads may stay"),
    }
}

/// Bridges that a session is connected to.
fn peers(session: &Session) -> usize {
    session.info().peers_zid().wait().count()
}

/// Logs and counts connections that access control leaves without rights. Zenoh itself drops their messages silently.
fn audit(session: &Session, allowed: Vec<String>, counts: &CertificateCounts) -> Result<()> {
    let refused = counts.refused.clone();
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
