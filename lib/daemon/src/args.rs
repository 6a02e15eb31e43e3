//! Flags that every daemon has.

use std::net::SocketAddr;

use clap::{Args, ValueEnum};

/// How log lines look.
///
/// ```
/// use clap::ValueEnum;
/// assert!(shmesh_daemon::args::LogFormat::from_str("json", true).is_ok());
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// For people.
    Text,
}

/// Logs and the admin address.
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
    /// What is logged: a level, or a filter such as `info,shmesh_sidecar=debug`
    #[arg(long, env = "SHMESH_LOG", default_value = "info", value_name = "FILTER")]
    pub log: String,

    /// How log lines look; they go to standard error
    #[arg(long, env = "SHMESH_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,

    /// Where /livez, /readyz, /metrics and /log-level are served; without it they are not
    #[arg(long, env = "SHMESH_ADMIN", value_name = "IP:PORT")]
    pub admin: Option<SocketAddr>,
}
