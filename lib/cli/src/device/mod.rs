//! `shmesh device`: checks whether memory of this machine's GPUs can be shared between processes.
//!
//! Two processes load the driver. This one, which stands between them and passes descriptors on, never loads it, as the
//! sidecar never does.
//!
//! | file | concept |
//! |---|---|
//! | `wire.rs` | messages between the processes |
//! | `side.rs` | a process that loads the driver |
//! | `pair.rs` | two such processes, and this one between them |
//! | `plan.rs`, `steps.rs` | the steps, P0 to P9 |
//! | `finding.rs` | the results, as a table and as JSON |

mod finding;
mod pair;
mod plan;
mod side;
mod steps;
mod wire;

use std::io::Write;
use std::process::ExitCode;

use shmesh_sys::quantity::{Bytes, QuantityError};

pub(crate) use side::{SideArgs, run as side};

use crate::args::Output;

/// Exit status if there is no device, so that nothing was checked.
const NO_DEVICE: u8 = 3;

const EXAMPLES: &str = "\
Tests with two processes that use the CUDA driver and one that does not: data written by one is read by the other (P1), the time to
share memory (P2), bandwidth compared to private memory (P3), namespaces and users (P4, as root), cleanup after deaths (P5),
revocation (P6, P7), valid and invalid descriptors (P8), and the latency of work that waits for the other process (P9). The test takes
one or two minutes and uses memory of the first device as limited below.

Examples:
  shmesh device check
  shmesh device check --output json > device.json       for a bug report
  SHMESH_CUDA_LIBRARY=/opt/libcuda.so.1 shmesh device check

Exit status: 0 all tests passed, 1 a test failed, 2 invalid command line, 3 no device.";

/// The options of `shmesh device`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Clone, Debug)]
enum Command {
    /// Check whether memory of the first GPU can be shared, and how fast
    Check(CheckArgs),
}

/// The options of `shmesh device check`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct CheckArgs {
    /// Output format: text or JSON
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Output::Text)]
    output: Output,
    /// Number of measurements per test
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// Maximum device memory to use at once, such as 64Mi, at least 4Mi; at most a quarter of the free memory is used
    #[arg(long, value_name = "SIZE", default_value = "1Gi", value_parser = max_bytes)]
    max_bytes: Bytes,
}

fn max_bytes(text: &str) -> Result<Bytes, String> {
    let bytes: Bytes = text.parse().map_err(|error: QuantityError| error.to_string())?;
    if (4 << 20..=1 << 40).contains(&bytes.0) {
        Ok(bytes)
    } else {
        Err("must lie between 4Mi and 1Ti".to_owned())
    }
}

/// Runs all checks, and prints their results.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let Command::Check(args) = &args.command;
    let text: Option<&mut dyn Write> = match args.output {
        Output::Text => Some(&mut *out),
        Output::Json => None,
    };
    let report = plan::run(args, text)?;
    match args.output {
        Output::Text => finding::verdict(&report, out)?,
        Output::Json => {
            serde_json::to_writer_pretty(&mut *out, &report)?;
            writeln!(out)?;
        }
    }
    Ok(match report.verdict {
        finding::Verdict::Works => ExitCode::SUCCESS,
        finding::Verdict::Fails => ExitCode::from(crate::FAILED),
        finding::Verdict::NoDevice => ExitCode::from(NO_DEVICE),
    })
}
