//! The identity service of the node: identifies the process at the other end of a socket.
//!
//! | file | concept |
//! |---|---|
//! | `limits.rs` | all limits |
//! | `socket.rs` | the listening socket |
//! | `clients.rs` | connected clients and their limits |
//! | `service.rs` | connections, questions and answers |
//! | `process.rs` | maps a pidfd to an identity with pod; the kernel calls are in `lib/sys` |
//! | `cgroup.rs` | maps a cgroup path to a pod and container |
//! | `pods.rs` | sources of pod names |
//! | `node_pods.rs` | the pods of the node from the API server |
//! | `counters.rs` | counters of outcomes |

mod cgroup;
mod clients;
mod counters;
mod limits;
mod node_pods;
mod pods;
mod process;
mod service;
mod socket;

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context;
use shmesh_sys::namespace::Namespaces;
use shmesh_sys::pidfd::PeerPidfd;
use shmesh_sys::rlimit::OpenFiles;
use shmesh_sys::{procfs, rlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;
use tracing::{error, info, warn};

use crate::RunError;
use crate::args::IdentityArgs;
use clients::Clients;
use limits::{FIRST_LIST, MAX_CONNECTIONS, RESERVED_FDS};
use node_pods::NodePods;
use pods::{NoPods, PodFile, Pods};
use service::ServiceState;

/// Runs the service until SIGTERM or SIGINT.
pub(crate) fn serve(args: &IdentityArgs) -> Result<(), RunError> {
    let ready = IdentityService::new(args)?;
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        tokio::task::LocalSet::new().block_on(&runtime, async {
            // Installed before listening, so that a signal always causes an orderly shutdown.
            let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
            let stop = async move {
                tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
            };
            tokio::task::spawn_local(shmesh_daemon::resident::unmap_code_each_minute());
            ready.listen()?.run(stop).await
        })
    };
    run().map_err(RunError::Failed)
}

/// Tests whether a service answers on the socket.
pub(crate) fn check(args: &IdentityArgs) -> Result<(), RunError> {
    let named = args.socket.display();
    match shmesh_sys::socket::answers(&args.socket) {
        Ok(true) => Ok(()),
        Ok(false) => Err(RunError::Failed(anyhow::anyhow!("no service answers on {named}"))),
        Err(error) => {
            Err(RunError::Failed(anyhow::Error::new(error).context(format!("cannot connect to {named}"))))
        }
    }
}

/// A service that is configured and not yet listening.
#[derive(Debug)]
pub(crate) struct IdentityService {
    args: IdentityArgs,
    node_pods: Option<NodePodsTask>,
    service: Rc<ServiceState<procfs::Kernel>>,
}

/// The name of this node, and its pods.
type NodePodsTask = (String, Rc<NodePods>);

impl IdentityService {
    /// Checks the environment and loads the file of pods.
    pub(crate) fn new(args: &IdentityArgs) -> Result<Self, RunError> {
        check_environment(args.require_initial_pid_namespace).map_err(RunError::Environment)?;
        let node_pods = args.node.clone().map(|node| (node, Rc::new(NodePods::new())));
        let pods: Rc<dyn Pods> = match &node_pods {
            Some((_, pods)) => Rc::clone(pods) as Rc<dyn Pods>,
            None => load(args.pods.as_deref()).map_err(RunError::Config)?,
        };
        let first_list = node_pods.as_ref().map(|(_, pods)| (pods.is_listed(), Instant::now() + FIRST_LIST));
        let max_connections = descriptors().map_err(RunError::Environment)?;
        let own_cgroup = procfs::own(procfs::ProcFile::Cgroup).context("cannot read /proc/self/cgroup");
        let roots = cgroup::CgroupRoots::of_own(&own_cgroup.map_err(RunError::Environment)?);
        let service = Rc::new(ServiceState {
            resolver: process::ProcessResolver { proc: procfs::Kernel, roots },
            peer_pidfd: PeerPidfd::Newest,
            pods: RefCell::new(pods),
            first_list,
            clients: Clients::new(max_connections),
            idle: Duration::from_secs(args.idle_seconds.into()),
            counters: counters::Counters::default(),
        });
        Ok(Self { args: args.clone(), node_pods, service })
    }

    /// Starts listening. Clients that connect before [`BoundService::run`] are queued.
    pub(crate) fn listen(self) -> anyhow::Result<BoundService> {
        let hup = signal(SignalKind::hangup())?;
        let listener = socket::Listener::bind(&self.args.socket, self.args.socket_mode.0)?;
        info!(socket = %self.args.socket.display(), mode = %self.args.socket_mode, "listening");
        Ok(BoundService {
            hup,
            listener,
            pods: self.args.pods,
            node_pods: self.node_pods,
            service: self.service,
        })
    }
}

/// A service that listens on its socket.
#[derive(Debug)]
pub(crate) struct BoundService {
    hup: Signal,
    listener: socket::Listener,
    pods: Option<std::path::PathBuf>,
    node_pods: Option<NodePodsTask>,
    service: Rc<ServiceState<procfs::Kernel>>,
}

impl BoundService {
    /// Serves until `stop`. Must run in a `LocalSet`.
    pub(crate) async fn run(self, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        let reloads = match self.node_pods {
            Some((node, pods)) => tokio::task::spawn_local(async move {
                // Ignores SIGHUP instead of ending by it.
                let _hup = self.hup;
                pods.follow(&node, connect).await;
            }),
            None => tokio::task::spawn_local(reload(self.hup, self.pods, Rc::clone(&self.service))),
        };
        let outcome = self.service.run(self.listener, stop).await;
        reloads.abort();
        Ok(outcome?)
    }
}

/// Connects to the API server of this cluster. A watch may be silent for longer than any timeout of a request.
async fn connect() -> anyhow::Result<kube::Client> {
    let mut config = kube::Config::infer().await.context("no API server is configured")?;
    config.read_timeout = None;
    Ok(kube::Client::try_from(config)?)
}

/// Logs the namespaces, and fails in an environment where identities would be wrong.
fn check_environment(must_be_initial: bool) -> anyhow::Result<()> {
    let ours = Namespaces::own().context("cannot read /proc/self/ns")?;
    let is_initial = ours.is_initial_pid();
    let own = shmesh_sys::identify::own_start_time().context("cannot read /proc/self/stat")?;
    anyhow::ensure!(own.is_some(), "/proc belongs to another pid namespace: mount the /proc of this one");
    info!(
        pid_namespace = ours.pid,
        initial_pid_namespace = is_initial,
        cgroup_namespace = ours.cgroup,
        initial_cgroup_namespace = ours.is_initial_cgroup(),
        "identifying processes in this pid namespace"
    );
    anyhow::ensure!(
        is_initial || !must_be_initial,
        "the pid namespace {} is not the initial one: run with hostPID, or without --require-initial-pid-namespace \
         where the node itself is nested, as in kind",
        ours.pid
    );
    Ok(())
}

fn load(path: Option<&Path>) -> anyhow::Result<Rc<dyn Pods>> {
    let Some(path) = path else {
        warn!("neither --node nor a file of pods: pods have a uid but no name, and are not confirmed");
        return Ok(Rc::new(NoPods));
    };
    let pods = PodFile::load(path)?;
    let (pods_known, containers) = pods.counts();
    info!(file = %path.display(), pods = pods_known, containers, "file of pods loaded");
    Ok(Rc::new(pods))
}

async fn reload<P>(mut hup: Signal, path: Option<std::path::PathBuf>, service: Rc<ServiceState<P>>) {
    while hup.recv().await.is_some() {
        match load(path.as_deref()) {
            Ok(pods) => {
                service.pods.replace(pods);
            }
            Err(error) => error!(
                error = format!("{error:#}"),
                "cannot reload the file of pods; keeping the previous one"
            ),
        }
    }
}

/// Raises the limit of open files and returns the number of connections it allows.
fn descriptors() -> anyhow::Result<usize> {
    let OpenFiles { soft, hard } = rlimit::open_files()?;
    let wanted = (RESERVED_FDS + MAX_CONNECTIONS) as u64;
    let limit = if soft < wanted { hard.min(wanted) } else { soft };
    if limit != soft {
        rlimit::set_open_files(limit)?;
    }
    let room = usize::try_from(limit)?.saturating_sub(RESERVED_FDS);
    anyhow::ensure!(
        room > 0,
        "the limit of {limit} open files leaves none for connections: {RESERVED_FDS} are reserved"
    );
    if room < MAX_CONNECTIONS {
        warn!(limit, connections = room, "the limit of open files reduces the number of connections");
    }
    Ok(room.min(MAX_CONNECTIONS))
}
