//! Command-line flags shared by all daemons.

use std::net::SocketAddr;

use clap::{Args, ValueEnum};

/// The format of log lines.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// Lines for people to read.
    Text,
}

/// Flags for logging and the admin address.
///
/// ```
/// use clap::Parser;
/// #[derive(clap::Parser)]
/// struct Args {
///     #[command(flatten)]
///     daemon: shmesh_daemon::args::DaemonArgs,
/// }
/// let args = Args::parse_from(["daemon", "--log", "debug"]);
/// assert_eq!(args.daemon.log, "debug");
/// ```
#[derive(Args, Clone, Debug)]
pub struct DaemonArgs {
    /// Log level, or filter such as `info,shmesh_sidecar=debug`
    #[arg(long, env = "SHMESH_LOG", default_value = "info", value_name = "FILTER")]
    pub log: String,

    /// Format of log lines, which are written to standard error
    #[arg(long, env = "SHMESH_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,

    /// Address for /livez, /readyz, /metrics and /log-level; not served by default
    #[arg(long, env = "SHMESH_ADMIN", value_name = "IP:PORT")]
    pub admin: Option<SocketAddr>,
}
