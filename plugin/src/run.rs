//! Lifecycle of the device plugin: load the configuration, lock, advertise, reconcile, clean up.

use std::io::Write;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow};
use kubelet_dra::DeviceStatuses;
use prometheus_client::registry::Registry;
use shmesh_daemon::admin::{self, Admin};
use shmesh_daemon::readiness::Readiness;
use shmesh_daemon::shutdown;
use shmesh_daemon::telemetry::LogFilter;
use shmesh_sys::terminal::is_closed_pipe;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::args::{DrainArgs, IdentityArgs, RunArgs};
use crate::config::{Config, ConfigLimits, FrontEnd, Registration, schema};
use crate::domain::{ClaimMetrics, DomainDriver, DomainService, open_claims, set_draining};
use crate::events::{Events, log_destination};
use crate::handover::{HandOver, HandoverRole, Ownership, SETTLE};
use crate::identity::IdentityService;
use crate::kubelet::{AllocationTimes, Mode, NodeContext, remove_stale};
use crate::metrics::Metrics;
use crate::reconciler::{ConfigSource, Reconciler};
use crate::resource::allocate::{AGENT_SOCKET, AllocateSettings};
use crate::{REPEATED_LOG, RunError, devices, pool_gc};

/// Blocking threads for file operations; each has its own stack.
const MAX_BLOCKING: usize = 4;
/// Above this number of units, pod status and device lists become long enough to log a warning.
const MANY_UNITS: usize = 1000;

/// Begins or ends draining of this node.
pub(crate) fn drain(args: &DrainArgs) -> Result<(), RunError> {
    let limits = limits().map_err(RunError::Environment)?;
    let config = Config::load(args.config.as_deref(), &args.set, &limits);
    let config = config.map_err(|problems| RunError::Config(problems.into()))?;
    if config.mode != FrontEnd::Dra {
        let what = "only the DRA driver can be drained: mode is devicePlugin; use kubectl drain";
        return Err(RunError::Config(anyhow!(what)));
    }
    set_draining(&config.state_directory(), !args.undo).map_err(RunError::Failed)
}

/// Prints the JSON schema of the configuration.
pub(crate) fn print_schema() -> Result<(), RunError> {
    let print = || {
        let text = serde_json::to_string_pretty(&schema())?;
        match writeln!(std::io::stdout(), "{text}") {
            Err(error) if is_closed_pipe(&error) => Ok(()),
            printed => printed.context("cannot print"),
        }
    };
    print().map_err(RunError::Failed)
}

/// Runs the device plugin until SIGTERM or SIGINT.
pub(crate) fn run(args: &RunArgs, filter: LogFilter) -> Result<(), RunError> {
    let source = ConfigSource {
        file: args.config.clone(),
        settings: args.set.clone(),
        limits: limits().map_err(RunError::Environment)?,
    };
    let config = source.load().map_err(|problems| RunError::Config(problems.into()))?;
    if args.check {
        info!("the configuration is valid");
        return Ok(());
    }
    if config.mode == FrontEnd::Dra && args.node.is_none() {
        let what = "mode: dra needs the name of the node: give --node, or set SHMESH_NODE from spec.nodeName";
        return Err(RunError::Config(anyhow!(what)));
    }
    let identity = identity(&config)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(MAX_BLOCKING).build();
    let runtime = runtime.map_err(|error| RunError::Failed(error.into()))?;
    let serving = serve(args, source, config, identity, filter);
    let outcome = tokio::task::LocalSet::new().block_on(&runtime, serving);
    // A blocked file operation must not delay the exit.
    runtime.shutdown_background();
    outcome
}

fn limits() -> anyhow::Result<ConfigLimits> {
    let page = shmesh_sys::time::page_bytes().context("cannot read the page size")?;
    let kernel = Path::new("/");
    let memory = devices::memory(kernel).context("/proc/meminfo has no MemTotal")?;
    Ok(ConfigLimits { page, memory, numa: devices::numa(kernel), has_paths: true })
}

fn identity(config: &Config) -> Result<Option<IdentityService>, RunError> {
    let asked = &config.identity;
    if !asked.enabled {
        return Ok(None);
    }
    let socket = config.seen(&asked.directory).join(AGENT_SOCKET);
    IdentityService::new(&IdentityArgs::for_plugin(
        socket,
        asked.pods.clone(),
        asked.require_initial_pid_namespace,
    ))
    .map(Some)
}

/// Returns the kubelet sockets and the state that all registrars share.
fn node(config: &Config, metrics: Metrics, events: Events, ownership: Ownership) -> NodeContext {
    let (mode, sockets) = match config.kubelet.registration {
        Registration::Legacy => (Mode::Register, &config.kubelet.device_plugins_dir),
        Registration::PluginsRegistry => (Mode::Discovered, &config.kubelet.plugins_registry_dir),
    };
    let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    NodeContext {
        mode,
        endpoints: relative(sockets, &config.kubelet.device_plugins_dir),
        start: start.as_secs() * 1000 + u64::from(start.subsec_millis()),
        ownership,
        sockets: config.seen(sockets),
        kubelet: config.seen(&config.kubelet.device_plugins_dir.join(shmesh_kubelet_api::KUBELET_SOCKET)),
        form: Arc::new(AllocateSettings::of(config)),
        allocation_times: Arc::new(AllocationTimes::default()),
        metrics,
        events,
    }
}

/// Returns the path from one directory to another.
fn relative(to: &Path, from: &Path) -> PathBuf {
    let common = to.components().zip(from.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(common).map(|_| Component::ParentDir);
    up.chain(to.components().skip(common)).collect()
}

async fn serve(
    args: &RunArgs,
    source: ConfigSource,
    config: Config,
    identity: Option<IdentityService>,
    filter: LogFilter,
) -> Result<(), RunError> {
    let failed =
        |what: &'static str| move |error: std::io::Error| RunError::Failed(anyhow!(error).context(what));
    // Before anything exists that must be cleaned up.
    let stop = shutdown::on_signal().map_err(failed("cannot catch signals"))?;
    let mut hup = signal(SignalKind::hangup()).map_err(failed("cannot catch SIGHUP"))?;
    let metrics = Metrics::default();
    log_destination(args.node.as_deref());
    let about = |node: &String| Events::about(node, &config.domain, metrics.clone());
    let events = args.node.as_ref().map(about).unwrap_or_default();
    let is_dra = config.mode == FrontEnd::Dra;
    let kubelet_directory = match config.kubelet.registration {
        Registration::Legacy => &config.kubelet.device_plugins_dir,
        Registration::PluginsRegistry => &config.kubelet.plugins_registry_dir,
    };
    let lock_directory = if is_dra { config.state_directory() } else { config.seen(kubelet_directory) };
    if is_dra {
        std::fs::create_dir_all(&lock_directory).map_err(failed("cannot create dra.stateDirectory"))?;
    }

    let readiness = Readiness::default();
    let latch = Arc::new(readiness.latch("kubelet"));
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    let claim_metrics = ClaimMetrics::default();
    if is_dra {
        claim_metrics.register(&mut registry);
    }
    let admin = Admin { readiness, metrics: Arc::new(registry), log: Some(filter) };
    if let Some(address) = args.admin {
        let listener = tokio::net::TcpListener::bind(address).await;
        let listener = listener.map_err(failed("cannot serve probes and metrics"))?;
        // Resolves port 0 to the assigned port.
        let address = listener.local_addr().map_err(failed("cannot read the admin address"))?;
        info!(%address, "serving probes and metrics");
        tokio::spawn(admin::serve(listener, admin, stop.clone()));
    }

    let hand_over = tokio::select! {
        biased;
        () = stop.cancelled() => return Ok(()),
        // Ready: a rolling update stops the other instance then.
        taken = HandOver::take(&lock_directory, &config.domain, || latch.open()) => taken,
    };
    let hand_over = hand_over.map_err(failed("cannot lock the kubelet's directory"))?;
    let ownership = hand_over.ownership().clone();
    let node = node(&config, metrics.clone(), events.clone(), ownership.clone());
    let mut role = ownership.role();
    if !is_dra && *role.borrow_and_update() == HandoverRole::Owner {
        remove_stale(&node.sockets, &config.domain, node.start)
            .map_err(failed("cannot remove sockets of an earlier plugin"))?;
    }
    let claims = is_dra.then(|| open_claims(&config, claim_metrics)).transpose();
    let claims = claims.map_err(RunError::Environment)?;
    let (served, retired) = (CancellationToken::new(), stop.child_token());
    tokio::spawn({
        let (sockets, domain, start) = (node.sockets.clone(), config.domain.clone(), node.start);
        let (latch, retired) = (Arc::clone(&latch), retired.clone());
        async move {
            while role.changed().await.is_ok() {
                let now = *role.borrow_and_update();
                match now {
                    HandoverRole::Owner if !is_dra => {
                        if let Err(error) = remove_stale(&sockets, &domain, start) {
                            warn!(%error, "cannot remove sockets of another instance of the plugin");
                        }
                    }
                    HandoverRole::Retired => {
                        latch.fail("another instance of the plugin has taken over");
                        retired.cancel();
                    }
                    _ => {}
                }
            }
        }
    });
    let mut handing_over =
        tokio::spawn(hand_over.run(served.clone(), args.settle.map_or(SETTLE, Duration::from_millis)));

    // Containers mount the directory of this socket, so it must exist before the first allocation.
    let identity = identity.map(IdentityService::listen).transpose().map_err(RunError::Failed)?;
    let allocation_times = Arc::clone(&node.allocation_times);
    log_cdi_requirements(&config);
    let (domain, memory) = (config.domain.clone(), source.limits.memory);
    let mut reconciler = Reconciler::new(source, config, node);
    let begun = tokio::select! {
        biased;
        // A health command may run for long.
        () = stop.cancelled() => return Ok(()),
        begun = reconciler.start() => begun,
    };
    begun.map_err(RunError::Environment)?;
    let resources = reconciler.resources();
    for resource in &resources.borrow().1 {
        if resource.units().len() > MANY_UNITS {
            let units = resource.units().len();
            warn!(
                resource = resource.name,
                units, "this many units make pod status long; choose a larger unit"
            );
        }
    }
    let dra = match (&claims, &args.node) {
        (Some(claims), Some(node)) => {
            let driver = DomainDriver {
                domain,
                node: node.clone(),
                claims: claims.clone(),
                resources: resources.clone(),
                allocation_times: Arc::clone(&allocation_times),
                registered: watch::Sender::new(false),
                registration_log: Arc::new(Mutex::new(REPEATED_LOG)),
                statuses: DeviceStatuses::default(),
            };
            let instance = args.pod_uid.clone().unwrap_or_else(|| std::process::id().to_string());
            let service = DomainService { driver, instance, memory };
            let (stop, service_token) = (stop.clone(), ownership.service());
            Some(tokio::spawn(async move {
                let ready = move || {
                    latch.open();
                    served.cancel();
                };
                let outcome = service.run(ready, retired.clone()).await;
                drop(service_token);
                if !retired.is_cancelled() {
                    // Without it the plugin is of no use.
                    stop.cancel();
                }
                outcome
            }))
        }
        _ => {
            let all_served = reconciler.all_served();
            tokio::spawn(async move {
                all_served.await;
                latch.open();
                served.cancel();
                info!("ready: all resources are registered with the kubelet");
            });
            None
        }
    };
    tokio::spawn(shmesh_daemon::resident::unmap_code_each_minute());
    tokio::spawn(pool_gc::run(resources, allocation_times, metrics, events, claims, ownership));
    let (to_reload, reload) = mpsc::channel(1);
    tokio::spawn(async move {
        while hup.recv().await.is_some() {
            // A pending reload will read the latest file anyway.
            let _ = to_reload.try_send(());
        }
    });

    let (others, ending) = (CancellationToken::new(), stop.clone());
    let orphaned = tokio::spawn(async move {
        tokio::select! {
            () = ending.cancelled() => Ok(()),
            ended = &mut handing_over => {
                ending.cancel();
                Err(ended.unwrap_or_else(|error| anyhow!(error).context("the hand-over panicked")))
            }
        }
    });
    let identity = identity.map(|identity| {
        let stop = others.clone();
        tokio::task::spawn_local(identity.run(async move { stop.cancelled().await }))
    });
    let outcome = match identity {
        None => {
            reconciler.run(reload, stop).await;
            Ok(())
        }
        Some(mut identity) => {
            let kubelet = stop.child_token();
            let follow = reconciler.run(reload, kubelet.clone());
            let mut follow = std::pin::pin!(follow);
            tokio::select! {
                () = &mut follow => {
                    others.cancel();
                    ended(identity.await)
                }
                early = &mut identity => {
                    kubelet.cancel();
                    follow.await;
                    ended(early)
                }
            }
        }
    };
    let served = match dra {
        Some(dra) => dra.await.context("the DRA driver panicked").and_then(|outcome| outcome),
        None => Ok(()),
    };
    let orphaned = orphaned.await.context("the hand-over panicked").and_then(|outcome| outcome);
    info!("shut down");
    outcome.and(served).and(orphaned).map_err(RunError::Failed)
}

fn ended(outcome: Result<anyhow::Result<()>, tokio::task::JoinError>) -> anyhow::Result<()> {
    outcome.context("the identity service panicked")?.context("the identity service failed")
}

fn log_cdi_requirements(config: &Config) {
    if config.cdi.enabled {
        let directory = config.cdi.directory.display();
        info!(%directory, "the container runtime must read CDI specifications from this directory: containerd 2.0, CRI-O, or containerd 1.7 with enable_cdi");
    } else {
        warn!(
            "CDI is disabled: {}/shm is not advertised, and pools are mounted without nosuid, nodev, noexec and without a group; set \
             cdi.enabled if the runtime supports it (containerd 2.0, CRI-O, containerd 1.7 with enable_cdi = true)",
            config.domain
        );
    }
}
