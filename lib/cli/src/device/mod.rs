//! `shmesh device`: whether memory of this machine's GPUs can be shared between processes, tried out.
//!
//! Two processes with the driver, and between them this one, which never loads it, as the sidecar never does: it only
//! passes descriptors on.
//!
//! | file | concept |
//! |---|---|
//! | `wire.rs` | what the processes say to each other |
//! | `side.rs` | a process with the driver |
//! | `pair.rs` | two of them, and this one between them |
//! | `plan.rs`, `steps.rs` | what is tried, P0 to P9 |
//! | `finding.rs` | what was found, as a table and as JSON |

mod finding;
mod pair;
mod plan;
mod side;
mod steps;
mod wire;

use std::io::Write;
use std::process::ExitCode;

pub(crate) use side::{SideArgs, run as side};

use crate::args::Output;

/// There is no device here, so nothing was tried.
const NO_DEVICE: u8 = 3;

const EXAMPLES: &str = "\
Tries, between two processes with the CUDA driver and one without it: that what one writes the other reads (P1), how long
sharing takes (P2), bandwidth of shared memory against a process's own (P3), namespaces and users (P4, as root), what deaths
leave behind (P5), what cannot be taken back (P6, P7), that descriptors and what is none are handled well (P8), and how fast work of
one process follows work of the other (P9). It takes a minute or two, and memory of the first device as said below.

Examples:
  shmesh device check
  shmesh device check --output json > device.json       to send along with a question
  SHMESH_CUDA_LIBRARY=/opt/libcuda.so.1 shmesh device check

Exit status: 0 all that was tried works, 1 something does not, 2 the command line is wrong, 3 there is no device here.";

/// What `shmesh device` is asked.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Clone, Debug)]
enum Command {
    /// Tries whether memory of the first GPU can be shared, and how fast that is
    Check(CheckArgs),
}

/// What `shmesh device check` is asked.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct CheckArgs {
    /// How to print
    #[arg(long, value_enum, value_name = "FORM", default_value_t = Output::Text)]
    output: Output,
    /// How often each thing is measured
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// The most device memory to take at once, in MiB; never more than a quarter of what is free
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(4..=1_048_576))]
    max_mib: u64,
}

/// Tries it, and prints what was found.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let Command::Check(args) = &args.command;
    let report = plan::run(args)?;
    match args.output {
        Output::Text => finding::text(&report, out)?,
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
