//! From start to end.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use prometheus_client::registry::Registry;
use shmesh_daemon::admin::{self, Admin};
use shmesh_daemon::readiness::{Latch, Readiness};
use shmesh_daemon::shutdown;
use shmesh_daemon::telemetry::LogFilter;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::Metrics;
use crate::certificate::{CertFiles, CertResolver, CertRotator, KubeStore};
use crate::config::Config;

/// Between two looks at the certificate.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Between two looks while there is none that works.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long those who have asked may take for the answer, after the end was asked for.
const GRACE: Duration = Duration::from_secs(10);

/// Where the certificate comes from.
///
/// ```
/// use shmesh_injector::webhook::CertSource;
/// let certificate = CertSource::Files { certificate: "/tls/tls.crt".into(), key: "/tls/tls.key".into() };
/// assert!(matches!(certificate, CertSource::Files { .. }));
/// ```
#[derive(Clone, Debug)]
pub enum CertSource {
    /// The replicas make it, and keep it in the cluster.
    Cluster {
        /// The webhook's Service.
        service: String,
        /// The namespace of Service and Secret.
        namespace: String,
        /// The Secret.
        secret: String,
        /// The `MutatingWebhookConfiguration`.
        webhook: String,
        /// How long one is good.
        lifetime: Duration,
    },
    /// Somebody else keeps it in files.
    Files {
        /// The certificate, with its chain.
        certificate: PathBuf,
        /// Its key.
        key: PathBuf,
    },
}

/// What the webhook is told.
///
/// ```
/// use shmesh_injector::{Config, webhook::{CertSource, Settings}};
/// let certificate = CertSource::Files { certificate: "/tls/tls.crt".into(), key: "/tls/tls.key".into() };
/// let settings = Settings {
///     listen: "0.0.0.0:8443".parse()?, admin: None, certificate, config: Config::default(), linger: Default::default(),
/// };
/// assert_eq!(settings.listen.port(), 8443);
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where the API server asks.
    pub listen: SocketAddr,
    /// Where probes and metrics are.
    pub admin: Option<SocketAddr>,
    /// Where the certificate comes from.
    pub certificate: CertSource,
    /// What injection does.
    pub config: Config,
    /// How long it serves on after it was told to end: until nobody is sent here any more.
    pub linger: Duration,
}

/// Serves until it is told to end.
///
/// # Errors
/// An address cannot be had, or there is no cluster.
///
/// ```no_run
/// # async fn example(settings: shmesh_injector::webhook::Settings) -> anyhow::Result<()> {
/// shmesh_injector::webhook::run(settings, None).await?;
/// # Ok(())
/// # }
/// ```
pub async fn run(settings: Settings, log: Option<LogFilter>) -> Result<()> {
    let told = shutdown::on_signal().context("cannot catch signals")?;
    let readiness = Readiness::default();
    let has_certificate = readiness.latch("certificate");
    let metrics = Metrics::default();
    let mut registry = Registry::default();
    metrics.register(&mut registry);

    let stop = CancellationToken::new();
    let listener = bound(settings.listen).await?;
    tracing::info!(address = %listener.local_addr()?, "webhook");
    let admin = match settings.admin {
        None => None,
        Some(address) => {
            let listener = bound(address).await?;
            tracing::info!(address = %listener.local_addr()?, "probes and metrics");
            let admin = Admin { readiness: readiness.clone(), metrics: Arc::new(registry), log };
            Some(tokio::spawn(admin::serve(listener, admin, stop.clone())))
        }
    };

    let served = CertResolver::default();
    let tls = served.server_config()?;
    let kept =
        tokio::spawn(keep(settings.certificate, served, metrics.clone(), has_certificate, stop.clone()));
    let (config, until) = (Arc::new(settings.config), stop.clone());
    let serving = tokio::spawn(super::serve(listener, tls, config, metrics, until, GRACE));

    tokio::select! {
        () = told.cancelled() => {}
        ended = kept => ended??,
    }
    let leaving = readiness.latch("the end");
    tracing::info!(seconds = settings.linger.as_secs(), "serves on until nobody is sent here any more");
    tokio::time::sleep(settings.linger).await;
    stop.cancel();
    serving.await?;
    if let Some(admin) = admin {
        admin.await??;
    }
    drop(leaving);
    Ok(())
}

async fn bound(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen at {address}"))
}

/// Looks after the certificate. Ends with an error only where there is no cluster at all.
async fn keep(
    certificate: CertSource,
    served: CertResolver,
    metrics: Metrics,
    ready: Latch,
    stop: CancellationToken,
) -> Result<()> {
    let mut ready = Some(ready);
    let mut opened = |works: bool| {
        if works && let Some(ready) = ready.take() {
            ready.open();
        }
        if ready.is_some() || !works { RETRY_INTERVAL } else { CHECK_INTERVAL }
    };
    match certificate {
        CertSource::Files { certificate, key } => {
            let mut files = CertFiles::new(certificate, key, served);
            loop {
                let rotation = files.step();
                match &rotation {
                    Ok(true) => tracing::info!("the certificate was read"),
                    Ok(false) => {}
                    Err(error) => {
                        metrics.certificate_failed();
                        tracing::warn!(error = format!("{error:#}"), "the certificate stays as it was");
                    }
                }
                if !pause(opened(rotation.is_ok()), &stop).await {
                    return Ok(());
                }
            }
        }
        CertSource::Cluster { service, namespace, secret, webhook, lifetime } => {
            let client = kube::Client::try_default()
                .await
                .context("no cluster: neither a service account nor a kubeconfig")?;
            let names =
                ["", ".cluster.local"].map(|tail| format!("{service}.{namespace}.svc{tail}")).to_vec();
            let store = KubeStore::new(client, &namespace, &secret, &webhook);
            let mut rotator = CertRotator::new(store, served, names, lifetime);
            loop {
                let rotation = rotator.step(SystemTime::now()).await;
                match &rotation {
                    Ok(rotation) => {
                        metrics.certificate(rotation.made, rotation.until);
                        if rotation.made || rotation.published || rotation.presented {
                            tracing::info!(?rotation, "the certificate was looked after");
                        }
                    }
                    Err(error) => {
                        metrics.certificate_failed();
                        tracing::warn!(
                            error = format!("{error:#}"),
                            "the certificate cannot be looked after; tried again"
                        );
                    }
                }
                if !pause(opened(rotation.is_ok()), &stop).await {
                    return Ok(());
                }
            }
        }
    }
}

/// Whether to go on.
async fn pause(length: Duration, stop: &CancellationToken) -> bool {
    tokio::select! {
        () = stop.cancelled() => false,
        () = tokio::time::sleep(length) => true,
    }
}
