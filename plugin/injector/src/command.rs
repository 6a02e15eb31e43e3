//! The subcommands `inject`, `claim` and `webhook` of `shmesh-plugin`.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use shmesh_daemon::telemetry::LogFilter;
use shmesh_sys::terminal::is_closed_pipe;

use crate::config::Config;
use crate::domain_claim::{ClaimKind, claims};
use crate::manifest::{self, InjectedManifest, OutputFormat};
use crate::webhook::{self, CertSource, Settings};

/// Options of `shmesh-plugin inject`.
#[derive(Args, Clone, Debug)]
pub struct Inject {
    /// File with documents in YAML or JSON; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Format of the output
    #[arg(short, long, value_name = "FORMAT", default_value = "yaml")]
    pub output: OutputFormat,
    /// Namespace for objects without one
    #[arg(short, long, value_name = "NAME", default_value = "default")]
    pub namespace: String,
    /// Configuration of the injector in YAML, as in the chart's ConfigMap
    #[arg(long, env = "SHMESH_INJECTOR_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Options of `shmesh-plugin claim`.
#[derive(Args, Clone, Debug)]
pub struct ClaimArgs {
    /// File with pods and pod templates in YAML or JSON; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Name of the claim for links in no scope `claim/<name>`; the default is the name of their object
    #[arg(short, long, value_name = "NAME")]
    pub name: Option<String>,
    /// Print a ResourceClaimTemplate, from which each pod gets a claim of its own
    #[arg(long)]
    pub template: bool,
    /// Format of the output
    #[arg(short, long, value_name = "FORMAT", default_value = "yaml")]
    pub output: OutputFormat,
    /// Namespace for objects without one
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub namespace: String,
    /// Configuration of the injector in YAML, as in the chart's ConfigMap
    #[arg(long, env = "SHMESH_INJECTOR_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Options of `shmesh-plugin webhook`.
#[derive(Args, Clone, Debug)]
pub struct Webhook {
    /// Address of the webhook
    #[arg(long, env = "SHMESH_WEBHOOK_LISTEN", value_name = "IP:PORT", default_value = "0.0.0.0:8443")]
    pub listen: SocketAddr,
    /// Address for /livez, /readyz, /metrics and /log-level; not served by default
    #[arg(long, env = "SHMESH_ADMIN", value_name = "IP:PORT")]
    pub admin: Option<SocketAddr>,
    /// Configuration of the injector in YAML
    #[arg(long, env = "SHMESH_INJECTOR_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Name of the webhook's Service
    #[arg(long, env = "SHMESH_WEBHOOK_SERVICE", value_name = "NAME", default_value = "shmesh-injector")]
    pub service: String,
    /// Namespace of the Service and the Secret
    #[arg(long, env = "SHMESH_NAMESPACE", value_name = "NAME", default_value = "shmesh")]
    pub namespace: String,
    /// Secret in which the replicas share their certificate
    #[arg(long, env = "SHMESH_WEBHOOK_SECRET", value_name = "NAME", default_value = "shmesh-injector-tls")]
    pub secret: String,
    /// MutatingWebhookConfiguration whose caBundle is updated
    #[arg(
        long,
        env = "SHMESH_WEBHOOK_CONFIGURATION",
        value_name = "NAME",
        default_value = "shmesh-injector"
    )]
    pub webhook_configuration: String,
    /// Lifetime of a certificate in days; it is renewed after two thirds
    #[arg(long, env = "SHMESH_WEBHOOK_CERTIFICATE_DAYS", value_name = "N", default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub certificate_days: u32,
    /// Certificate file that is managed externally, for example by cert-manager
    #[arg(long, env = "SHMESH_WEBHOOK_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// File with the private key of --tls-cert
    #[arg(long, env = "SHMESH_WEBHOOK_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Seconds to keep serving after a shutdown request, until the Service stops routing to this replica
    #[arg(long, env = "SHMESH_WEBHOOK_LINGER_SECONDS", value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=300))]
    pub linger_seconds: u32,
}

/// Why a subcommand failed, which determines the exit status.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The configuration is invalid.
    #[error("invalid configuration")]
    Config(#[source] anyhow::Error),
    /// An operation failed at run time.
    #[error("the operation failed")]
    Failed(#[source] anyhow::Error),
}

/// Maximum size of the input.
const MAX_BYTES: u64 = 64 << 20;

/// Injects documents, and writes all of them or none.
///
/// # Errors
/// The file cannot be read, or pods are refused; the error lists all refusals.
pub fn inject(args: &Inject, out: &mut impl Write) -> Result<(), CommandError> {
    let config = config(args.config.as_deref()).map_err(CommandError::Config)?;
    let text = read(&args.file)?;
    let InjectedManifest { text, warnings, .. } =
        manifest::injected(&text, &args.namespace, &config, args.output)
            .map_err(|error| CommandError::Failed(error.into()))?;
    write(&text, warnings, out)
}

/// Prints the claims for the pods of a file.
///
/// # Errors
/// The file cannot be read, no pod asks for links or a claim, or pods are refused; the error lists all refusals.
pub fn claim(args: &ClaimArgs, out: &mut impl Write) -> Result<(), CommandError> {
    let config = config(args.config.as_deref()).map_err(CommandError::Config)?;
    let text = read(&args.file)?;
    let kind = if args.template { ClaimKind::Template } else { ClaimKind::Claim };
    let (text, warnings) = claims(&text, &args.namespace, args.name.as_deref(), &config, kind, args.output)
        .map_err(|error| CommandError::Failed(error.into()))?;
    write(&text, warnings, out)
}

fn read(file: &Path) -> Result<String, CommandError> {
    let mut text = String::new();
    let read = if file.as_os_str() == "-" {
        std::io::stdin().take(MAX_BYTES).read_to_string(&mut text)
    } else {
        std::fs::File::open(file).and_then(|file| file.take(MAX_BYTES).read_to_string(&mut text))
    };
    read.with_context(|| format!("cannot read {}", file.display())).map_err(CommandError::Failed)?;
    Ok(text)
}

fn write(text: &str, warnings: Vec<String>, out: &mut impl Write) -> Result<(), CommandError> {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if is_closed_pipe(&error) => Ok(()),
        written => written.context("cannot write").map_err(CommandError::Failed),
    }
}

/// Serves the webhook until SIGTERM or SIGINT.
///
/// # Errors
/// As [`webhook::run`].
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

/// Loads the configuration file over the defaults.
fn config(file: Option<&Path>) -> Result<Config> {
    let Some(path) = file else { return Ok(Config::default()) };
    let named = || format!("the injector's configuration {}", path.display());
    let text = std::fs::read_to_string(path).with_context(named)?;
    Config::from_yaml(&path.display().to_string(), &text)
        .map_err(|error| anyhow!("the injector's configuration: {error}"))
}
