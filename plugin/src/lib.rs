//! The per-node daemon of shmesh: device plugin, identity service and injector commands.
//!
//! | file | concept |
//! |---|---|
//! | `args.rs` | command line |
//! | `config/` | configuration: one schema, all problems reported at once |
//! | `devices/` | hardware of the node: memory, NUMA nodes, GPUs, NPUs |
//! | `resource/` | advertised resources and allocations; pure |
//! | `cdi/` | CDI specifications for the container runtime |
//! | `domain/` | the DRA driver: claims, their directories, the devices of the node's slices |
//! | `pools/` | directories of pools: creation, usage, garbage collection |
//! | `kubelet/` | registration and gRPC service of one resource |
//! | `health.rs` | health checks of advertised devices |
//! | `reconciler.rs` | makes advertised resources match configuration, devices and health |
//! | `pool_gc.rs` | tracks allocations and garbage-collects unused pools |
//! | `events.rs` | Kubernetes Events about the node |
//! | `metrics.rs` | metrics of the device plugin |
//! | `handover.rs` | hand-over between two instances on a node, in a rolling update |
//! | `run.rs` | lifecycle of the device plugin |
//! | `prepare.rs` | creates the directory of the identity service |
//! | `identity/` | the identity service |
//!
//! Injection is a crate of its own, `injector/`, with the subcommands `inject`, `claim` and `webhook`.

mod args;
mod cdi;
mod config;
mod devices;
mod domain;
mod events;
mod handover;
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

use clap::{CommandFactory, Parser};
use shmesh_daemon::args::exit_status;
use shmesh_daemon::log_limit::LogLimit;
use shmesh_daemon::telemetry;
use shmesh_injector::command as injector;

use args::{Cli, Command};

pub use config::ConfigSummary;

/// Repeated failures are logged five times and then once a minute.
const REPEATED_LOG: LogLimit = LogLimit::new(5, Duration::from_secs(60));

/// Exit status after success or an orderly shutdown.
const DONE: u8 = 0;
/// Exit status if an operation failed.
const FAILED: u8 = 1;
/// Exit status for an invalid configuration; nothing was changed (`EX_USAGE`).
const BAD_CONFIG: u8 = 64;
/// Exit status for an unsuitable environment (`EX_UNAVAILABLE`).
const BAD_ENVIRONMENT: u8 = 69;

/// Why a subcommand failed to start or exited.
#[derive(Debug)]
pub(crate) enum RunError {
    /// The configuration is invalid; nothing was changed.
    Config(anyhow::Error),
    /// The environment is unsuitable: namespaces, limits, groups.
    Environment(anyhow::Error),
    /// An operation failed at run time.
    Failed(anyhow::Error),
}

impl RunError {
    /// Returns the error with its causes, for the log or a terminal.
    fn text(&self) -> String {
        match self {
            Self::Config(error) => format!("invalid configuration: {error:#}"),
            Self::Environment(error) => format!("unsuitable environment: {error:#}"),
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

/// Runs `shmesh-plugin` with these arguments, including the program name, and returns the exit status.
pub fn run(args: impl IntoIterator<Item = impl Into<OsString>>) -> u8 {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return exit_status(&error, &Cli::command(), &args);
        }
    };
    let filter = match telemetry::init(&cli.log.log, cli.log.log_format) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("error: {error:#}");
            return BAD_CONFIG;
        }
    };
    // Daemons write errors to their log; commands write them to standard error.
    let is_command = matches!(cli.command, Command::Inject(_) | Command::Claim(_) | Command::Drain(_));
    let outcome = match cli.command {
        Command::Claim(args) => injector::claim(&args, &mut std::io::stdout()).map_err(RunError::from),
        Command::Drain(args) => run::drain(&args),
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
