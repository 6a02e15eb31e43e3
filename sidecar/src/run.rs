//! Lifecycle of the sidecar: keeping links, accepting connections, readiness, shutdown.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use prometheus_client::registry::Registry;
use shmesh::config::{Backing, LinkConfig, PoolId};
use shmesh_daemon::admin::{self, Admin};
use shmesh_daemon::descriptor::try_watched;
use shmesh_daemon::readiness::Readiness;
use shmesh_daemon::shutdown;
use shmesh_daemon::telemetry::LogFilter;
use shmesh_proto::identity::PeerIdentity;
use shmesh_proto::limits::{MAX_FDS, MAX_PACKET_BYTES, MAX_SESSIONS, MAX_SESSIONS_PER_PROCESS};
use shmesh_sys::cgroup;
use shmesh_sys::file::set_nonblocking;
use shmesh_sys::namespace::Namespaces;
use shmesh_sys::pidfd::PeerPidfd;
use shmesh_sys::procfs;
use shmesh_sys::rlimit::{self, OpenFiles};
use shmesh_sys::socket::{self, hang_up};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::task::TaskTracker;

use crate::actor::{Actor, ActorEvent, Descriptors};
use crate::args::Args;
use crate::audit::AuditLog;
use crate::broker::{Broker, Credentials, Op, Outcome, Party, Policy, Reason, Record, SessionId};
use crate::events::{close_connection, close_foreign, close_now};
use crate::identity::{Connector, KnownPeer, Resolver};
use crate::links::{LinkIndex, Links};
use crate::metrics::{LinksMetrics, Metrics};
use crate::pending::PendingClients;
use crate::session::{self, ClientConnection, OUTGOING_BYTES_MAX, OUTGOING_MAX};
use crate::shares::{Share, ShareFull, Shares};

/// Maximum number of attached processes: as many as the broker knows.
const MAX_ATTACHED: usize = 4096;
/// Maximum number of keys of all processes.
const MAX_KEYS: usize = 16_384;
/// Length of the actor's queue. Sessions wait while it is full.
const INBOX_MAX: usize = 256;
/// Pause in accepting connections after `accept` failed, for example for lack of descriptors.
const FULL_PAUSE: Duration = Duration::from_millis(100);
/// Refused connections whose queues are being closed, at the same time.
const CLOSINGS_MAX: usize = 4;
/// How long the last answers may take at shutdown.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// Runs a sidecar until SIGTERM or SIGINT.
///
/// # Errors
/// An address or file cannot be opened. A link that cannot be kept is retried.
pub async fn run(args: &Args, configs: &[LinkConfig], filter: LogFilter) -> Result<()> {
    // Before the hook of the pod's start counts as memory of this container.
    let memory = memory_without(configs, &args.dir);
    let stop = shutdown::on_signal().context("cannot catch signals")?;
    let readiness = Readiness::default();
    tokio::spawn(shmesh_daemon::resident::unmap_startup_code());
    // Before the probes answer, so that readiness includes every link.
    let links = Arc::new(Links::new(&args.dir, configs, !args.old_kernel, &readiness));

    let metrics = Metrics::default();
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    LinksMetrics(Arc::clone(&links)).register(&mut registry);
    let admin = match args.daemon.admin {
        None => None,
        Some(address) => {
            let listener = tokio::net::TcpListener::bind(address)
                .await
                .with_context(|| format!("cannot serve probes and metrics at {address}"))?;
            // Port 0 means any free port.
            let address =
                listener.local_addr().context("cannot determine the address for probes and metrics")?;
            tracing::info!(%address, "serving probes and metrics");
            let admin =
                Admin { readiness: readiness.clone(), metrics: Arc::new(registry), log: Some(filter) };
            Some(tokio::spawn(admin::serve(listener, admin, stop.clone())))
        }
    };

    let audit = AuditLog::open(args.audit.as_deref(), metrics.clone())?;
    let peer_pidfd = if args.old_kernel { PeerPidfd::Old } else { PeerPidfd::Newest };
    let resolver = Resolver::new(args.identity.clone(), peer_pidfd);
    let bare_numbers = resolver.service.is_some() || are_bare()?;
    let budget = FdBudget::of(
        raise_limit(),
        procfs::open_descriptors().unwrap_or(64) + configs.iter().map(descriptors_of).sum::<usize>(),
        memory,
    );
    let policy = Policy {
        open_keys: args.allow_open_keys,
        cuda_legacy: args.allow_cuda_legacy,
        bare_numbers,
        keys: budget.keys,
        restore_millis: args.restore_seconds * 1000,
        ..policy_for(configs.len(), budget.sessions)
    };
    if args.memfds_for_devices {
        tracing::warn!("--memfds-for-devices: any memfd counts as device memory; for tests only");
    }
    let (to_actor, inbox) = mpsc::channel(INBOX_MAX);
    let actor = Actor::new(
        Arc::clone(&links),
        Broker::new(policy, entropy()?),
        resolver.clone(),
        metrics.clone(),
        audit.clone(),
        Descriptors {
            keys: budget.keys,
            attached: budget.attached,
            outgoing: budget.outgoing,
            memfds_for_devices: args.memfds_for_devices,
        },
        to_actor.clone(),
    );
    let mut actor = tokio::spawn(actor.run(inbox));

    let sessions = TaskTracker::new();
    let acceptor = Arc::new(Acceptor {
        sessions: sessions.clone(),
        resolver,
        actor: to_actor.clone(),
        metrics,
        audit,
        links: Arc::clone(&links),
        places: Arc::new(Mutex::new(Shares::new(budget.sessions))),
        closings: Arc::new(Semaphore::new(CLOSINGS_MAX)),
        pending: PendingClients::default(),
        sessions_ever: Mutex::new(0),
    });
    for link in links.indices() {
        let (acceptor, links, stop) = (Arc::clone(&acceptor), Arc::clone(&links), stop.clone());
        let readiness = readiness.clone();
        tokio::spawn(async move {
            let serve = |listener| {
                tracing::info!(link = links.name(link), "link ready");
                if readiness.is_ready() {
                    tracing::info!("ready");
                }
                Arc::clone(&acceptor).serve(listener, link)
            };
            let forget = || async {
                let (done, forgotten) = oneshot::channel();
                if acceptor.actor.send(ActorEvent::LinkLost { link, done }).await.is_ok() {
                    let _ = forgotten.await;
                }
            };
            tokio::select! {
                () = stop.cancelled() => {}
                () = links.keep(link, serve, forget) => {}
            }
        });
    }

    tokio::select! {
        () = stop.cancelled() => {}
        // Nothing works without the actor: exit, to be restarted.
        ended = &mut actor => return ended.context("the sidecar's state was lost"),
    }
    let _ = to_actor.send(ActorEvent::Drain).await;
    // Participants continue, and offer memory without names to the next sidecar. Queued answers are sent first.
    sessions.close();
    let drained = tokio::time::timeout(DRAIN_LIMIT, async {
        let ended = actor.await;
        sessions.wait().await;
        ended
    });
    let drained = drained.await;
    if let Some(admin) = admin {
        admin.abort();
    }
    links.release();
    match drained {
        Ok(ended) => ended.context("the sidecar's state was lost")?,
        // A slow reader can cause this; it is not a failure of the sidecar.
        Err(_) => tracing::warn!("shutdown limit reached: some clients did not read their last answers"),
    }
    tracing::info!("stopped");
    Ok(())
}

/// A process has a session for each of its links, so the limits grow with the number of links. No process gets more than half.
fn policy_for(links: usize, sessions: usize) -> Policy {
    let Policy { sessions_per_process, sessions_per_account, .. } = Policy::default();
    let more = links.saturating_sub(1);
    Policy {
        sessions_per_process: (sessions_per_process + more).min(sessions.div_ceil(2)),
        sessions_per_account: (sessions_per_account + 2 * more).min(MAX_SESSIONS * 3 / 4),
        ..Policy::default()
    }
}

/// Whether process ids in this pid namespace are the node's.
fn are_bare() -> Result<bool> {
    let ours = Namespaces::own().context("cannot read /proc/self/ns")?;
    if !ours.is_initial_pid() {
        tracing::warn!(
            pid_namespace = ours.pid,
            "process ids of this pid namespace differ from those that drivers use: to share device memory with other pods, set \
             the node's identity service (--identity)"
        );
    }
    Ok(ours.is_initial_pid())
}

/// The kernel's random numbers. Opened once, because later there may be no descriptor left.
fn entropy() -> Result<impl FnMut(&mut [u8])> {
    let mut random = std::fs::File::open("/dev/urandom").context("cannot open /dev/urandom")?;
    Ok(move |bytes: &mut [u8]| {
        // Without random numbers keys could be guessed: exit, to be restarted.
        assert!(random.read_exact(bytes).is_ok(), "/dev/urandom cannot be read");
    })
}

/// Raises the limit of descriptors to the hard limit and returns it.
fn raise_limit() -> usize {
    let Ok(OpenFiles { soft, hard }) = rlimit::open_files() else { return 1024 };
    let limit = match rlimit::set_open_files(hard) {
        Ok(()) => hard,
        Err(error) => {
            tracing::warn!(%error, soft, "cannot raise the limit of open files");
            soft
        }
    };
    usize::try_from(limit).unwrap_or(usize::MAX)
}

/// Free bytes of memory, without the links. Existing links are charged already.
fn memory_without(links: &[LinkConfig], dir: &Path) -> Option<u64> {
    let exists = |link: &LinkConfig| dir.join(format!("{}_shm", link.name)).exists();
    let needed = links.iter().filter(|link| !exists(link)).map(LinkConfig::payload_bytes);
    cgroup::room_bytes().map(|budget| budget.saturating_sub(needed.sum()))
}

/// Descriptors of a link: the lock file, two for the listener, and up to two per segment without a name.
fn descriptors_of(link: &LinkConfig) -> usize {
    let pools = PoolId::ALL.into_iter().filter(|pool| link.pool(*pool).is_enabled());
    let (on_device, here): (Vec<_>, Vec<_>) = pools.partition(|pool| pool.is_device());
    let segments = 1 + here.len();
    let of_segments = match link.backing {
        Backing::Memfd => 2 * segments,
        Backing::Named if !on_device.is_empty() => segments,
        Backing::Named => 0,
    };
    3 + of_segments + on_device.len()
}

/// Limits that follow from the descriptors and the memory of this process. Clients beyond them are refused, so that descriptors remain
/// for `accept`, received packets, probes and metrics.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct FdBudget {
    /// Maximum number of connections.
    sessions: usize,
    /// Maximum number of attached processes: each needs a descriptor for its pidfd until it ends, connected or not.
    attached: usize,
    /// Maximum number of keys.
    keys: usize,
    /// Maximum number of bytes that wait for participants to read them.
    outgoing: usize,
}

impl FdBudget {
    /// Descriptors of a session: its connection, its pidfd, one for the identity service, and the descriptors in a packet.
    const PER_SESSION: usize = 3 + MAX_FDS;
    /// Divisor of the remaining descriptors for attached processes; they are never used for keys.
    const PART_OF_ATTACHED: usize = 4;
    /// Descriptors for probes, `/proc`, and connections that are being refused.
    const SPARE: usize = 24 + CLOSINGS_MAX;

    /// Bytes of a session: 7.5 KiB measured, plus what the kernel charges for sockets and descriptors.
    const SESSION_BYTES: u64 = 12 << 10;
    /// Bytes that an attached process takes, with its pidfd.
    const ATTACHED_BYTES: u64 = 2 << 10;
    /// Bytes of a key: 760 measured, plus what the kernel charges for its file, without imports.
    const KEY_BYTES: u64 = 1536;
    /// Bytes for this program: code, stacks, the queue of the audit log.
    const PROGRAM_BYTES: u64 = 4 << 20;

    /// The limits for `limit` descriptors, of which `used` are taken, and these bytes of memory.
    fn of(limit: usize, used: usize, memory: Option<u64>) -> Self {
        // Two eighths for sessions, one for attached processes, three for keys, two for unread bytes.
        let memory = memory.map_or(u64::MAX, |bytes| bytes.saturating_sub(Self::PROGRAM_BYTES));
        let fit =
            |eighths, bytes: u64| usize::try_from(memory / 8 * eighths / bytes).unwrap_or(usize::MAX).max(1);
        let free = limit.saturating_sub(used).saturating_sub(Self::SPARE);
        // A quarter: there are more keys than participants.
        let sessions = (free / 4 / Self::PER_SESSION).min(fit(2, Self::SESSION_BYTES)).clamp(1, MAX_SESSIONS);
        let rest = free.saturating_sub(sessions * Self::PER_SESSION);
        let attached = rest / Self::PART_OF_ATTACHED;
        let budget = Self {
            sessions,
            attached: attached.min(fit(1, Self::ATTACHED_BYTES)).min(MAX_ATTACHED),
            keys: (rest - attached).min(fit(3, Self::KEY_BYTES)).min(MAX_KEYS),
            outgoing: fit(2, 1).clamp(MAX_PACKET_BYTES * MAX_SESSIONS_PER_PROCESS, OUTGOING_BYTES_MAX),
        };
        if sessions < MAX_SESSIONS {
            tracing::info!(
                limit,
                memory,
                ?budget,
                "raise the limit of descriptors (ulimit -n) or of memory (sidecar.memory) for more participants and keys"
            );
        }
        budget
    }
}

fn credentials(connection: &OwnedFd) -> Option<Credentials> {
    let peer = socket::peer(connection).ok()?;
    Some(Credentials { pid: peer.pid, uid: peer.uid, gid: peer.gid })
}

/// Accepts connections and starts their sessions.
struct Acceptor {
    sessions: TaskTracker,
    resolver: Resolver,
    actor: mpsc::Sender<ActorEvent>,
    metrics: Metrics,
    audit: AuditLog,
    links: Arc<Links>,
    /// Connections by user id: nothing else is known when a connection is accepted.
    places: Arc<Mutex<Shares<u32>>>,
    /// Permits for closing the queues of refused connections.
    closings: Arc<Semaphore>,
    /// Clients without a proof, before Linux 6.5.
    pending: PendingClients,
    sessions_ever: Mutex<u64>,
}

impl Acceptor {
    async fn serve(self: Arc<Self>, listener: AsyncFd<OwnedFd>, link: LinkIndex) {
        loop {
            match listener.async_io(Interest::READABLE, socket::accept).await {
                Ok(connection) => self.admit(connection, link).await,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection; retrying");
                    tokio::time::sleep(FULL_PAUSE).await;
                }
            }
        }
    }

    async fn admit(self: &Arc<Self>, connection: OwnedFd, link: LinkIndex) {
        let user = credentials(&connection).map_or(u32::MAX, |socket| socket.uid);
        let place = Share::take(&self.places, user, 1, 1);
        if let Err(full) = place {
            // Closed at once. The client may connect again later.
            self.metrics.refused_connection();
            let reason = if full == ShareFull::All { Reason::Sessions } else { Reason::SessionsOfUser };
            self.metrics.refuse_request(reason);
            self.turn_away(Op::Open, &connection, None, link, reason);
            if let Some(stubborn) = hang_up(connection) {
                // A bounded number close at the same time. Each takes milliseconds, so accepting continues.
                let closing = Arc::clone(&self.closings).acquire_owned().await;
                tokio::spawn(async move {
                    close_now(stubborn).await;
                    drop(closing);
                });
            }
            return;
        }
        let session = {
            let mut ever = self.sessions_ever.lock().unwrap_or_else(PoisonError::into_inner);
            *ever += 1;
            SessionId(*ever)
        };
        let acceptor = Arc::clone(self);
        self.sessions.spawn(async move {
            acceptor.receive(connection, session, link).await;
            drop(place);
        });
    }

    /// Writes an audit record of a refused connection.
    fn turn_away(
        &self,
        op: Op,
        connection: &OwnedFd,
        who: Option<&PeerIdentity>,
        link: LinkIndex,
        reason: Reason,
    ) {
        self.audit.write(&Record {
            outcome: Outcome::Refused,
            reason: Some(reason),
            caller: who.map(Party::from),
            socket: credentials(connection).filter(|_| who.is_none()),
            link: Some(self.links.name(link).to_owned()),
            ..Record::new(self.audit.now(), op)
        });
    }

    async fn receive(&self, connection: OwnedFd, id: SessionId, link: LinkIndex) {
        let known = self.resolver.resolve(&connection).await;
        // Its queue is never closed on this thread, even if something fails.
        let connector = match Connector::of(&connection, &known) {
            Ok(connector) if set_nonblocking(&connection).is_ok() => connector,
            _ => return close_connection(connection).await,
        };
        let connection = match try_watched(connection) {
            Ok(connection) => connection,
            Err((connection, error)) => {
                tracing::warn!(%error, "cannot watch a connection; closing it");
                return close_connection(connection).await;
            }
        };
        let session = ClientConnection { id, connection, connector };
        self.converse(&session, known, link).await;
        // Its place becomes free when everything it sent is closed.
        close_connection(session.connection.into_inner()).await;
        let _ = self.actor.send(ActorEvent::Ended { session: id }).await;
    }

    async fn converse(&self, session: &ClientConnection, mut known: KnownPeer, link: LinkIndex) {
        let connection = session.connection.get_ref();
        let mut early = Vec::new();
        if let Some(who) = known.identity.as_ref().filter(|_| known.needs_proof) {
            let _place = match self.pending.enter(who) {
                Ok(place) => place,
                Err(reason) => {
                    self.metrics.refuse_request(reason);
                    return self.turn_away(Op::Open, connection, Some(who), link, reason);
                }
            };
            match session::answers_challenge(session, &known, &mut early).await {
                Ok(true) => {}
                Ok(false) => {
                    if let Some(left_out) = self.resolver.may_say() {
                        tracing::warn!(
                            left_out,
                            "refused a client that did not answer the challenge on its connection"
                        );
                    }
                    known = KnownPeer::default();
                }
                Err(end) => {
                    // The identity is not proved.
                    if let Some(reason) = end.reason() {
                        self.metrics.refuse_request(reason);
                        self.turn_away(Op::Packet, connection, None, link, reason);
                    }
                    return close_foreign(
                        early.into_iter().flat_map(|packet| packet.fds).collect::<Vec<_>>(),
                    )
                    .await;
                }
            }
        }
        let (outgoing, mut to_send) = mpsc::channel(OUTGOING_MAX);
        let (session_id, credentials) = (session.id, credentials(connection));
        let KnownPeer { identity, pidfd, .. } = known;
        let pidfd = pidfd.map(OwnedFd::from);
        let opened = ActorEvent::Opened { session: session_id, link, credentials, identity, pidfd, outgoing };
        if self.actor.send(opened).await.is_err() {
            return close_foreign(early.into_iter().flat_map(|packet| packet.fds).collect::<Vec<_>>()).await;
        }
        let end = session::serve(session, early, &self.actor, &mut to_send).await;
        if let Some(reason) = end.reason() {
            let _ = self.actor.send(ActorEvent::Broke { session: session_id, reason }).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_may_be_on_every_link_and_take_no_more_than_half_of_all_places() {
        for links in [1, 64, 100, 400] {
            let policy = policy_for(links, MAX_SESSIONS);
            assert!(
                policy.sessions_per_process > links
                    && policy.sessions_per_account > policy.sessions_per_process
            );
        }
        let many = policy_for(100_000, MAX_SESSIONS);
        assert_eq!((many.sessions_per_process, many.sessions_per_account), (512, 768));
        assert_eq!(policy_for(1, 11).sessions_per_process, 6, "few descriptors");
    }

    #[test]
    fn few_descriptors_make_little_room() {
        let roomy = FdBudget::of(1 << 20, 20, None);
        assert_eq!(roomy.sessions, MAX_SESSIONS);
        assert_eq!((roomy.attached, roomy.keys), (MAX_ATTACHED, MAX_KEYS));
        for (limit, used) in [(0, 20), (20, 20), (64, 20), (256, 30), (1024, 20), (4096, 40)] {
            let FdBudget { sessions, attached, keys, .. } = FdBudget::of(limit, used, None);
            assert!((1..=MAX_SESSIONS).contains(&sessions));
            let needs = used + sessions * FdBudget::PER_SESSION + attached + keys;
            assert!(needs <= limit.max(used + FdBudget::PER_SESSION), "{limit}: {needs}");
        }
        let outgoing = OUTGOING_BYTES_MAX;
        assert_eq!(FdBudget::of(512, 30, None), FdBudget { sessions: 10, attached: 86, keys: 258, outgoing });
        assert!(FdBudget::of(20_000, 30, None).keys > 11_000, "as many keys as are measured");
    }

    /// The injector's default limit, with two mebibytes used by then, and four times that.
    #[test]
    fn all_that_is_allowed_fits_into_memory() {
        for (mebibytes, sessions, keys) in [(14, 200, 2_000), (62, MAX_SESSIONS, 14_000)] {
            let budget = FdBudget::of(1 << 20, 20, Some(mebibytes << 20));
            assert!(budget.sessions >= sessions && budget.keys >= keys, "{budget:?}");
            let takes = budget.sessions as u64 * FdBudget::SESSION_BYTES
                + budget.attached as u64 * FdBudget::ATTACHED_BYTES
                + budget.keys as u64 * FdBudget::KEY_BYTES
                + budget.outgoing as u64
                + FdBudget::PROGRAM_BYTES;
            assert!(takes <= mebibytes << 20, "{budget:?} takes {takes}");
        }
        let none = FdBudget::of(1 << 20, 20, Some(0));
        assert!(none.sessions == 1 && none.keys == 1, "{none:?}");
    }
}
