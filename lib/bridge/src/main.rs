//! `shmesh-bridge`: carries the messages of links to another machine, and back.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{CommandFactory, Parser};
use prometheus_client::registry::Registry;
use shmesh::MAX_SEATS;
use shmesh::config::LinkName;
use shmesh_bridge::bridge::{Bridge, BridgeConfig, ClusterPlace, Metrics};
use shmesh_bridge::certificates::Certificates;
use shmesh_bridge::frame::VERSIONS;
use shmesh_bridge::place::place_of;
use shmesh_bridge::session::BridgeEnd;
use shmesh_bridge::zenoh_engine::{NetworkPlace, ZenohEngine};
use shmesh_daemon::admin::{self, Admin};
use shmesh_daemon::args::{DaemonArgs, exit_status};
use shmesh_daemon::readiness::Readiness;
use shmesh_daemon::telemetry::LogFilter;
use tokio_util::sync::CancellationToken;

/// Carry the messages of links to another machine, and back
///
/// Where the links are, it listens. Where their programs' peers are, it connects, and makes a replica of each link, to which the
/// programs there attach as to any link:
///
///   here:   shmesh-bridge --link fronthaul --listen tcp/0.0.0.0:7447
///   there:  shmesh-bridge --link fronthaul --connect tcp/here:7447
#[derive(Debug, Parser)]
#[command(name = "shmesh-bridge", version)]
struct Args {
    /// Link to carry; repeat it for more
    #[arg(long = "link", value_name = "LINK", required = true)]
    links: Vec<LinkName>,

    /// The links are on this machine: listen for bridges of others, as tcp/0.0.0.0:7447
    #[arg(long, value_name = "ADDRESS", required_unless_present = "connect", conflicts_with = "connect")]
    listen: Vec<String>,

    /// The links are on another machine, whose bridge listens here: make replicas of them. `LINK=` is before an address for one link
    /// alone, which then has a connection of its own
    #[arg(long, value_name = "[LINK=]ADDRESS")]
    connect: Vec<String>,

    /// Name of this machine, which no other that connects may have; the host name unless given
    #[arg(long, value_name = "NAME")]
    node: Option<String>,

    /// Name of the cluster's node, in place of --node: the directory's number is added, bridges with one IPC directory stand in for
    /// each other, and the bridge that has the links announces where they are
    #[arg(long, value_name = "NAME", conflicts_with = "node")]
    cluster_node: Option<String>,

    /// Link that may be in this IPC directory itself, of which a replica is made only while it is not; repeat it for more
    #[arg(long, value_name = "LINK", requires_all = ["cluster_node", "connect"])]
    near: Vec<LinkName>,

    /// IPC directory of the links
    #[arg(long, env = "SHMESH_DIR", default_value = shmesh::DEFAULT_DIR, value_name = "DIR")]
    dir: PathBuf,

    /// Bridges of other groups do not carry these links
    #[arg(long, default_value = "default", value_name = "NAME")]
    group: String,

    /// Far nodes of each link at most, for --listen: others are refused while these are there. Each needs memory for messages
    #[arg(long, default_value_t = MAX_SEATS as u64, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..=MAX_SEATS as u64))]
    peers: u64,

    /// Seconds of silence after which the other side's programs count as gone, until it answers again
    #[arg(long, default_value_t = 10, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    peer_timeout: u64,

    /// Certificate of the authority that signed the bridges' certificates (PEM), for addresses like quic/host:7447
    #[arg(long, value_name = "FILE", requires_all = ["certificate", "key"])]
    authority: Option<PathBuf>,

    /// Certificate of this bridge (PEM)
    #[arg(long, value_name = "FILE", requires = "authority")]
    certificate: Option<PathBuf>,

    /// Private key of this bridge (PEM)
    #[arg(long, value_name = "FILE", requires = "authority")]
    key: Option<PathBuf>,

    /// Seconds between two looks at these three files: when they have changed, all connections are made again with the new ones
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    certificate_interval: u64,

    /// Common name of a certificate that may use these links, others of the authority may not; repeat it for more
    #[arg(long, value_name = "NAME", requires = "authority")]
    allow_certificate: Vec<String>,

    #[command(flatten)]
    daemon: DaemonArgs,
}

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            let given: Vec<_> = std::env::args_os().collect();
            return ExitCode::from(exit_status(&error, &Args::command(), &given));
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("shmesh-bridge: {error:#}");
            ExitCode::from(1)
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let filter = shmesh_daemon::telemetry::init(&args.daemon.log, args.daemon.log_format)?;
    let cluster = match &args.cluster_node {
        None => None,
        Some(node) => {
            let place = place_of(node, &args.dir);
            let place =
                place.with_context(|| format!("cannot read the IPC directory {}", args.dir.display()))?;
            Some(ClusterPlace { place, near: args.near.clone() })
        }
    };
    let node = match (&args.node, &cluster) {
        (Some(node), _) => node.clone(),
        (None, Some(cluster)) => cluster.place.clone(),
        (None, None) => {
            std::fs::read_to_string("/proc/sys/kernel/hostname").context("no host name")?.trim().to_owned()
        }
    };
    let certificates = match (&args.authority, &args.certificate, &args.key) {
        (Some(authority), Some(certificate), Some(key)) => Some(Certificates {
            authority: authority.clone(),
            certificate: certificate.clone(),
            key: key.clone(),
        }),
        _ => None,
    };
    let (connect, connect_links) = addresses(args)?;
    let place = NetworkPlace {
        listen: args.listen.clone(),
        connect,
        connect_links,
        group: args.group.clone(),
        certificates,
        certificate_interval: Duration::from_secs(args.certificate_interval),
        allowed_certificates: args.allow_certificate.clone(),
    };
    let config = BridgeConfig {
        end: if args.connect.is_empty() { BridgeEnd::Home } else { BridgeEnd::Far },
        dir: args.dir.clone(),
        links: args.links.clone(),
        node,
        peers: usize::try_from(args.peers)?,
        peer_timeout: Duration::from_secs(args.peer_timeout),
        cluster,
        versions: VERSIONS,
    };
    let metrics = Metrics::default();
    let engine = ZenohEngine::new(place, metrics.certificates.clone());
    let bridge = Bridge::start(&config, &engine, &metrics)?;
    let served = serve(args, filter, &metrics);
    engine.keep_sessions();
    bridge.stop();
    served
}

/// A link, and an address for it alone.
type LinkAddress = (String, String);

/// The addresses to connect to: for all links, and for one link each.
fn addresses(args: &Args) -> Result<(Vec<String>, Vec<LinkAddress>)> {
    let (mut common, mut of_links) = (Vec::new(), Vec::new());
    for given in &args.connect {
        match given.split_once('=').filter(|(link, _)| !link.contains('/')) {
            None => common.push(given.clone()),
            Some((link, address)) if args.links.iter().any(|known| known.as_str() == link) => {
                of_links.push((link.to_owned(), address.to_owned()));
            }
            Some((link, _)) => {
                bail!("--connect {given}: there is no --link {link}; add it, or correct the name")
            }
        }
    }
    let has_address = |link: &LinkName| of_links.iter().any(|(name, _)| name == link.as_str());
    match args.links.iter().find(|link| args.listen.is_empty() && common.is_empty() && !has_address(link)) {
        Some(link) => bail!(
            "link {link} has no address; add --connect {link}=ADDRESS, or --connect ADDRESS for all links"
        ),
        None => Ok((common, of_links)),
    }
}

/// Serves probes and metrics until SIGTERM or SIGINT.
fn serve(args: &Args, filter: LogFilter, metrics: &Metrics) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop: CancellationToken = shmesh_daemon::shutdown::on_signal()?;
        if let Some(address) = args.daemon.admin {
            let listener = tokio::net::TcpListener::bind(address)
                .await
                .with_context(|| format!("cannot listen on {address}"))?;
            let mut registry = Registry::default();
            metrics.register(&mut registry);
            let admin =
                Admin { readiness: Readiness::default(), metrics: Arc::new(registry), log: Some(filter) };
            return admin::serve(listener, admin, stop).await;
        }
        stop.cancelled().await;
        Ok(())
    })
}
