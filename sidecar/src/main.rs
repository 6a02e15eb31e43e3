//! `shmesh-sidecar`: keeps the links of a pod, controls attachment, brokers device keys, recovers dead participants.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser};
use shmesh_daemon::args::exit_status;
use shmesh_daemon::telemetry::LogFilter;
use shmesh_sidecar::args::{Args, Task};
use shmesh_sidecar::{config, library, run, start};

/// Exit status for a wrong configuration: a file, the annotation, the IPC directory, the log filter, an environment variable
/// (`EX_USAGE` of sysexits, as in the other programs). It is 2 where the command line itself is wrong.
const BAD_CONFIG: u8 = 64;

/// How long shutdown waits for an attempt to keep a link.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            let given: Vec<_> = std::env::args_os().collect();
            return ExitCode::from(exit_status(&error, &Args::command(), &given));
        }
    };
    if let Some(task) = &args.task {
        let done = match task {
            Task::InstallLibrary { dir, from } => library::install(from, dir),
            Task::AwaitStart { admin, seconds } => start::wait(*admin, Duration::from_secs(*seconds)),
        };
        return match done {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error, 1),
        };
    }
    let links = match config::links(&args) {
        Ok(links) => links,
        Err(error) => return failed(&error, BAD_CONFIG),
    };
    let filter = match shmesh_daemon::telemetry::init(&args.daemon.log, args.daemon.log_format) {
        Ok(filter) => filter,
        Err(error) => return failed(&error, BAD_CONFIG),
    };
    match keep_links(&args, &links, filter) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error, 1),
    }
}

fn failed(error: &anyhow::Error, code: u8) -> ExitCode {
    eprintln!("shmesh-sidecar: {error:#}");
    ExitCode::from(code)
}

fn keep_links(args: &Args, links: &[shmesh::config::LinkConfig], filter: LogFilter) -> Result<()> {
    // A single thread: there is little to do, and an idle thread costs memory in every pod.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the event loop")?;
    let ended = runtime.block_on(run::run(args, links, filter));
    // An attempt to keep a link may take longer, or hang in a file system.
    runtime.shutdown_timeout(ATTEMPT_LIMIT);
    ended
}
