//! Command-line flags shared by all daemons.

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, Command, ValueEnum};

/// Exit status for an invalid command line, as in clap.
const BAD_COMMAND_LINE: u8 = 2;
/// Exit status for an invalid configuration (`EX_USAGE` of sysexits).
const BAD_CONFIG: u8 = 64;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// Lines for people to read.
    Text,
}

/// Flags for logging and the admin address.
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

/// The exit status for an error that `command` returned for `args`: 0 for help, 64 if an environment variable has an invalid
/// value, because a chart or an injector sets it as configuration, and otherwise 2.
pub fn exit_status(error: &clap::Error, command: &Command, args: &[OsString]) -> u8 {
    if !error.use_stderr() {
        return 0;
    }
    let Some(ContextValue::String(shown)) = error.get(ContextKind::InvalidArg) else {
        return BAD_COMMAND_LINE;
    };
    // Shown as `--size <SIZE>`. clap does not say where a value is from; a flag on the command line has precedence.
    let flag = shown.split([' ', '=']).next().unwrap_or_default();
    let is_given = args.iter().filter_map(|arg| arg.to_str()).any(|arg| arg.split('=').next() == Some(flag));
    if !is_given && flag.strip_prefix("--").is_some_and(|long| has_variable(command, long)) {
        BAD_CONFIG
    } else {
        BAD_COMMAND_LINE
    }
}

/// Whether the option of this name, of the command or of a subcommand, has an environment variable that is set.
fn has_variable(command: &Command, long: &str) -> bool {
    let is_set = |name: &OsStr| std::env::var_os(name).is_some();
    command.get_arguments().any(|arg| arg.get_long() == Some(long) && arg.get_env().is_some_and(is_set))
        || command.get_subcommands().any(|command| has_variable(command, long))
}
