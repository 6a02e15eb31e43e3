//! What runs once per node.
//!
//! | file | concept |
//! |---|---|
//! | `args.rs` | the command line |
//! | `identity/` | the identity service: which process, of which pod, is at the other end of that socket |
//!
//! The device plugin, which will advertise shared memory and pools to the kubelet, is not built yet.

mod args;
mod cdi;
mod config;
mod devices;
mod identity;
mod kubelet;
mod resource;

use std::ffi::OsString;

use clap::Parser;
use shmesh_daemon::telemetry;

use args::{Cli, Command};
use identity::Failure;

/// It worked.
const DONE: u8 = 0;
/// Something was tried and failed.
const FAILED: u8 = 1;
/// The command line is wrong, as clap has it.
const BAD_REQUEST: u8 = 2;
/// The configuration is wrong: nothing was tried (`EX_USAGE` of sysexits).
const BAD_CONFIG: u8 = 64;
/// This place does not let it work (`EX_UNAVAILABLE`).
const BAD_PLACE: u8 = 69;

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
    if let Err(error) = telemetry::init(&cli.log.log, cli.log.log_format) {
        eprintln!("error: {error:#}");
        return BAD_CONFIG;
    }
    let Command::Identity(args) = cli.command;
    match identity::serve(&args) {
        Ok(()) => DONE,
        Err(failure) => {
            let code = match &failure {
                Failure::Config(_) => BAD_CONFIG,
                Failure::Place(_) => BAD_PLACE,
                Failure::Failed(_) => FAILED,
            };
            tracing::error!(code, "{:#}", anyhow::Error::from(failure));
            code
        }
    }
}
