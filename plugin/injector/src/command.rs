//! `shmesh-plugin inject` and `shmesh-plugin webhook`.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use shmesh::config::show_yaml_error;
use shmesh_daemon::telemetry::LogFilter;

use crate::config::Config;
use crate::manifest::{self, InjectedManifest, OutputFormat};
use crate::webhook::{self, CertSource, Settings};

/// Flags of `shmesh-plugin inject`.
///
/// ```
/// use clap::Parser;
/// #[derive(clap::Parser)]
/// struct Cli {
///     #[command(flatten)]
///     inject: shmesh_injector::command::Inject,
/// }
/// assert_eq!(Cli::parse_from(["inject", "-f", "-"]).inject.file.to_str(), Some("-"));
/// ```
#[derive(Args, Clone, Debug)]
pub struct Inject {
    /// Documents in YAML or JSON; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// How they are written
    #[arg(short, long, value_name = "FORM", default_value = "yaml")]
    pub output: OutputFormat,
    /// The namespace of objects that do not say theirs
    #[arg(short, long, value_name = "NAME", default_value = "default")]
    pub namespace: String,
    /// What the cluster has and allows, in YAML: the chart's ConfigMap
    #[arg(long, env = "SHMESH_INJECTOR_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Flags of `shmesh-plugin webhook`.
///
/// ```
/// use clap::Parser;
/// #[derive(clap::Parser)]
/// struct Cli {
///     #[command(flatten)]
///     webhook: shmesh_injector::command::Webhook,
/// }
/// let cli = Cli::parse_from(["webhook", "--tls-cert", "tls.crt", "--tls-key", "tls.key"]);
/// assert_eq!(cli.webhook.listen.port(), 8443);
/// ```
#[derive(Args, Clone, Debug)]
pub struct Webhook {
    /// Where the API server asks
    #[arg(long, env = "SHMESH_WEBHOOK_LISTEN", value_name = "IP:PORT", default_value = "0.0.0.0:8443")]
    pub listen: SocketAddr,
    /// Where /livez, /readyz, /metrics and /log-level are served; without it they are not
    #[arg(long, env = "SHMESH_ADMIN", value_name = "IP:PORT")]
    pub admin: Option<SocketAddr>,
    /// What the cluster has and allows, in YAML
    #[arg(long, env = "SHMESH_INJECTOR_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The webhook's Service
    #[arg(long, env = "SHMESH_WEBHOOK_SERVICE", value_name = "NAME", default_value = "shmesh-injector")]
    pub service: String,
    /// The namespace of the Service and the Secret
    #[arg(long, env = "SHMESH_NAMESPACE", value_name = "NAME", default_value = "shmesh")]
    pub namespace: String,
    /// The Secret in which replicas keep their certificate together
    #[arg(long, env = "SHMESH_WEBHOOK_SECRET", value_name = "NAME", default_value = "shmesh-injector-tls")]
    pub secret: String,
    /// The MutatingWebhookConfiguration whose caBundle is kept current
    #[arg(
        long,
        env = "SHMESH_WEBHOOK_CONFIGURATION",
        value_name = "NAME",
        default_value = "shmesh-injector"
    )]
    pub webhook_configuration: String,
    /// How many days a certificate is good; it is replaced after two thirds
    #[arg(long, env = "SHMESH_WEBHOOK_CERTIFICATE_DAYS", value_name = "N", default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub certificate_days: u32,
    /// A certificate that somebody else keeps, cert-manager for example
    #[arg(long, env = "SHMESH_WEBHOOK_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its key
    #[arg(long, env = "SHMESH_WEBHOOK_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Seconds to serve on after the end was asked for, until nobody is sent here any more
    #[arg(long, env = "SHMESH_WEBHOOK_LINGER_SECONDS", value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=300))]
    pub linger_seconds: u32,
}

/// Why a command failed, and whose fault it was.
///
/// ```
/// let failure = shmesh_injector::command::CommandError::Config(anyhow::anyhow!("no such key"));
/// assert_eq!(failure.to_string(), "the configuration is wrong");
/// ```
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// What it was told is wrong.
    #[error("the configuration is wrong")]
    Config(#[source] anyhow::Error),
    /// It tried.
    #[error("it failed")]
    Failed(#[source] anyhow::Error),
}

/// Most of a file that is read.
const MAX_BYTES: u64 = 64 << 20;

/// Injects documents, and writes all of them or none.
///
/// # Errors
/// A file that cannot be read, and all refusals.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use shmesh_injector::{command, manifest::OutputFormat};
/// let file = dir.path().join("map.yaml");
/// std::fs::write(&file, "kind: ConfigMap\n")?;
/// let args = command::Inject { file, output: OutputFormat::Yaml, namespace: "default".into(), config: None };
/// let mut out = Vec::new();
/// command::inject(&args, &mut out)?;
/// assert_eq!(out, b"kind: ConfigMap\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn inject(args: &Inject, out: &mut impl Write) -> Result<(), CommandError> {
    let config = config(args.config.as_deref()).map_err(CommandError::Config)?;
    let mut text = String::new();
    let read = if args.file.as_os_str() == "-" {
        std::io::stdin().take(MAX_BYTES).read_to_string(&mut text)
    } else {
        std::fs::File::open(&args.file).and_then(|file| file.take(MAX_BYTES).read_to_string(&mut text))
    };
    let named = || format!("cannot read {}", args.file.display());
    read.with_context(named).map_err(CommandError::Failed)?;
    let InjectedManifest { text, warnings, .. } =
        manifest::injected(&text, &args.namespace, &config, args.output)
            .map_err(|error| CommandError::Failed(error.into()))?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reader has seen enough, as `head` has.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write").map_err(CommandError::Failed),
    }
}

/// Serves the webhook until it is told to end.
///
/// # Errors
/// As [`webhook::run`].
///
/// ```no_run
/// # fn example(args: shmesh_injector::command::Webhook) -> Result<(), shmesh_injector::command::CommandError> {
/// shmesh_injector::command::webhook(&args, None)
/// # }
/// ```
pub fn webhook(args: &Webhook, log: Option<LogFilter>) -> Result<(), CommandError> {
    let config = config(args.config.as_deref()).map_err(CommandError::Config)?;
    let certificate = match (&args.tls_cert, &args.tls_key) {
        (Some(certificate), Some(key)) => {
            CertSource::Files { certificate: certificate.clone(), key: key.clone() }
        }
        _ => CertSource::Cluster {
            service: args.service.clone(),
            namespace: args.namespace.clone(),
            secret: args.secret.clone(),
            webhook: args.webhook_configuration.clone(),
            lifetime: Duration::from_secs(u64::from(args.certificate_days) * 86_400),
        },
    };
    let linger = Duration::from_secs(args.linger_seconds.into());
    let settings = Settings { listen: args.listen, admin: args.admin, certificate, config, linger };
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the event loop")
        .and_then(|runtime| runtime.block_on(webhook::run(settings, log)))
        .map_err(CommandError::Failed)
}

/// The configuration: what the file says, over the defaults.
fn config(file: Option<&Path>) -> Result<Config> {
    let Some(path) = file else { return Ok(Config::default()) };
    let named = || format!("the injector's configuration {}", path.display());
    let text = std::fs::read_to_string(path).with_context(named)?;
    if text.trim().is_empty() {
        return Ok(Config::default());
    }
    let shown = |error| show_yaml_error(&path.display().to_string(), &text, &error);
    serde_saphyr::from_str(&text).map_err(|error| anyhow!("the injector's configuration: {}", shown(error)))
}
