//! What runs once per node.
//!
//! | file | concept |
//! |---|---|
//! | `args.rs` | the command line |
//! | `config/` | what it is told: one schema, and every problem at once |
//! | `devices/` | what the node has: memory, NUMA nodes, GPUs, NPUs |
//! | `resource/` | what is advertised, and what a container gets; pure |
//! | `cdi/` | specifications for the container runtime |
//! | `pools/` | directories of pools: made, measured, swept |
//! | `kubelet/` | one resource and the kubelet: when to register, and the kubelet's questions |
//! | `health.rs` | whether what is advertised works |
//! | `reconciler.rs` | what is advertised follows configuration, devices and health |
//! | `pool_gc.rs` | who holds what, and pools that are nobody's |
//! | `events.rs` | what happens, as Kubernetes Events about the node |
//! | `metrics.rs` | what `/metrics` shows |
//! | `run.rs` | from start to end |
//! | `prepare.rs` | the directory that the identity service needs, where it runs as another user |
//! | `identity/` | the identity service: which process, of which pod, is at the other end of that socket |
//!
//! Injection is a crate of its own, `injector/`: the subcommands `inject` and `webhook`.

mod args;
mod cdi;
mod config;
mod devices;
mod events;
mod health;
mod identity;
mod kubelet;
mod metrics;
mod pool_gc;
mod pools;
mod prepare;
mod reconciler;
mod resource;
mod run;

use std::ffi::OsString;
use std::time::Duration;

use clap::Parser;
use shmesh_daemon::log_limit::LogLimit;
use shmesh_daemon::telemetry;
use shmesh_injector::command as injector;

use args::{Cli, Command};

/// What fails again and again is said five times, and then once a minute.
const REPEATED_LOG: LogLimit = LogLimit::new(5, Duration::from_secs(60));

/// It worked.
const DONE: u8 = 0;
/// Something was tried and failed.
const FAILED: u8 = 1;
/// The command line is wrong, as clap has it.
const BAD_REQUEST: u8 = 2;
/// The configuration is wrong: nothing was tried (`EX_USAGE` of sysexits).
const BAD_CONFIG: u8 = 64;
/// This place does not let it work (`EX_UNAVAILABLE`).
const BAD_ENVIRONMENT: u8 = 69;

/// Why it did not start, or ended.
#[derive(Debug)]
pub(crate) enum RunError {
    /// The configuration is wrong.
    Config(anyhow::Error),
    /// The environment does not let it work.
    Environment(anyhow::Error),
    /// Something was tried and failed.
    Failed(anyhow::Error),
}

impl RunError {
    /// The failure with its causes, for a log or a terminal.
    fn text(&self) -> String {
        match self {
            Self::Config(error) => format!("the configuration is wrong: {error:#}"),
            Self::Environment(error) => format!("the environment does not let it work: {error:#}"),
            Self::Failed(error) => format!("{error:#}"),
        }
    }
}

impl From<injector::CommandError> for RunError {
    fn from(failure: injector::CommandError) -> Self {
        match failure {
            injector::CommandError::Config(error) => Self::Config(error),
            injector::CommandError::Failed(error) => Self::Failed(error),
        }
    }
}

/// Runs the command `shmesh-plugin` with these arguments, the first of which is its name, and returns the exit status.
///
/// ```
/// assert_eq!(shmesh_plugin::run(["shmesh-plugin", "identity", "--help"]), 0);
/// assert_eq!(shmesh_plugin::run(["shmesh-plugin", "identity", "--socket-mode", "rw"]), 2);
/// ```
pub fn run(args: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Nobody reads: nothing to be done.
            let _ = error.print();
            return if error.use_stderr() { BAD_REQUEST } else { DONE };
        }
    };
    let filter = match telemetry::init(&cli.log.log, cli.log.log_format) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("error: {error:#}");
            return BAD_CONFIG;
        }
    };
    // A daemon writes to its log; a command's words are for who called it.
    let is_command = matches!(cli.command, Command::Inject(_));
    let outcome = match cli.command {
        Command::Identity(args) if args.check => identity::check(&args),
        Command::Identity(args) => identity::serve(&args),
        Command::Inject(args) => injector::inject(&args, &mut std::io::stdout()).map_err(RunError::from),
        Command::Prepare(args) => prepare::prepare(&args),
        Command::Run(args) => run::run(&args, filter),
        Command::Schema => run::print_schema(),
        Command::Webhook(args) => injector::webhook(&args, Some(filter)).map_err(RunError::from),
    };
    match outcome {
        Ok(()) => DONE,
        Err(failure) => {
            let code = match &failure {
                RunError::Config(_) => BAD_CONFIG,
                RunError::Environment(_) => BAD_ENVIRONMENT,
                RunError::Failed(_) => FAILED,
            };
            let text = failure.text();
            if is_command {
                eprintln!("error: {text}");
            } else {
                tracing::error!(code, "{text}");
            }
            code
        }
    }
}
