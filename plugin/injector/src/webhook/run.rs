//! Lifecycle of the webhook.

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

/// Interval for checking the certificate.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Number of check intervals between two readings of the Secret and the webhook configuration, while no connection fails.
const QUIET_INTERVALS: u32 = 6;
/// Interval for retries while no valid certificate is loaded.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Time limit for pending requests at shutdown.
const GRACE: Duration = Duration::from_secs(10);

/// Source of the webhook's certificate.
#[derive(Clone, Debug)]
pub enum CertSource {
    /// The replicas issue the certificate and share it in the cluster.
    Cluster {
        /// Name of the webhook's Service.
        service: String,
        /// Namespace of the Service and the Secret.
        namespace: String,
        /// Name of the Secret.
        secret: String,
        /// Name of the `MutatingWebhookConfiguration`.
        webhook: String,
        /// Lifetime of a certificate.
        lifetime: Duration,
    },
    /// The certificate is managed externally.
    Files {
        /// File with the certificate chain.
        certificate: PathBuf,
        /// File with the private key.
        key: PathBuf,
    },
}

/// Settings of the webhook.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Address for admission requests.
    pub listen: SocketAddr,
    /// Address for probes and metrics.
    pub admin: Option<SocketAddr>,
    /// Source of the certificate.
    pub certificate: CertSource,
    /// Configuration of the injection.
    pub config: Config,
    /// How long to keep serving after a shutdown request, until the Service stops routing to this replica.
    pub linger: Duration,
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// An address is unavailable, or there is no cluster.
pub async fn run(settings: Settings, log: Option<LogFilter>) -> Result<()> {
    let stopped = shutdown::on_signal().context("cannot catch signals")?;
    let readiness = Readiness::default();
    let has_certificate = readiness.latch("certificate");
    let metrics = Metrics::default();
    let mut registry = Registry::default();
    metrics.register(&mut registry);

    let stop = CancellationToken::new();
    let listener = bound(settings.listen).await?;
    tracing::info!(address = %listener.local_addr()?, "serving the webhook");
    let admin = match settings.admin {
        None => None,
        Some(address) => {
            let listener = bound(address).await?;
            tracing::info!(address = %listener.local_addr()?, "serving probes and metrics");
            let admin = Admin { readiness: readiness.clone(), metrics: Arc::new(registry), log };
            Some(tokio::spawn(admin::serve(listener, admin, stop.clone())))
        }
    };

    tokio::spawn(shmesh_daemon::resident::unmap_code_each_minute());
    let served = CertResolver::default();
    let tls = served.server_config()?;
    let kept =
        tokio::spawn(keep(settings.certificate, served, metrics.clone(), has_certificate, stop.clone()));
    let (config, until) = (Arc::new(settings.config), stop.clone());
    let serving = tokio::spawn(super::serve(listener, tls, config, metrics, until, GRACE));

    tokio::select! {
        () = stopped.cancelled() => {}
        ended = kept => ended??,
    }
    let leaving = readiness.latch("shutdown");
    tracing::info!(
        seconds = settings.linger.as_secs(),
        "shutting down; serving until the Service stops routing here"
    );
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

/// Loads and rotates the certificate. Fails only if there is no cluster.
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
                .context("no cluster: found neither a service account nor a kubeconfig")?;
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
                            tracing::info!(?rotation, "certificate rotated");
                        }
                    }
                    Err(error) => {
                        metrics.certificate_failed();
                        tracing::warn!(
                            error = format!("{error:#}"),
                            "cannot rotate the certificate; retrying"
                        );
                    }
                }
                let interval = opened(rotation.is_ok());
                let goes_on = if interval == CHECK_INTERVAL {
                    quiet_pause(&metrics, &stop).await
                } else {
                    pause(interval, &stop).await
                };
                if !goes_on {
                    return Ok(());
                }
            }
        }
    }
}

/// Sleeps longer while no connection fails: all do if the API server no longer trusts the certificate, because the webhook
/// configuration was replaced.
async fn quiet_pause(metrics: &Metrics, stop: &CancellationToken) -> bool {
    let failed = metrics.failed_connection_count();
    for _ in 0..QUIET_INTERVALS {
        if !pause(CHECK_INTERVAL, stop).await {
            return false;
        }
        if metrics.failed_connection_count() != failed {
            break;
        }
    }
    true
}

/// Sleeps; returns `false` if the webhook stops.
async fn pause(length: Duration, stop: &CancellationToken) -> bool {
    tokio::select! {
        () = stop.cancelled() => false,
        () = tokio::time::sleep(length) => true,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn cluster_is_asked_once_a_minute_and_soon_after_a_failed_connection() {
        let (metrics, stop) = (Metrics::default(), CancellationToken::new());
        let pause = async || {
            let began = Instant::now();
            assert!(quiet_pause(&metrics, &stop).await);
            began.elapsed().as_secs()
        };
        assert_eq!(pause().await, 60);
        let failing = async {
            tokio::time::sleep(Duration::from_secs(15)).await;
            metrics.failed_connections();
        };
        assert_eq!(tokio::join!(pause(), failing).0, 20);
        assert_eq!(pause().await, 60, "failures of earlier connections");
        stop.cancel();
        assert!(!quiet_pause(&metrics, &stop).await);
    }
}
