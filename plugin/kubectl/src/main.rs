//! `kubectl shmesh`: a plugin of kubectl for clusters with shmesh.
//!
//! | file | concept |
//! |---|---|
//! | `main.rs` | command line |
//! | `kubectl.rs` | calls of the user's own kubectl |
//! | `pods.rs` | access to pods in JSON |
//! | `sidecars.rs` | `ls`, `who`, `dump` and `top` in the sidecars of pods |
//! | `check/` | `check`: questions about an installation |
//! | `complete.rs` | completions |
//! | `output.rs` | colours, tables and lines that follow the terminal |
//!
//! `inject` and `claim` are the injector's own commands.

mod check;
mod complete;
mod kubectl;
mod output;
mod pods;
mod sidecars;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use shmesh_daemon::args::LogFormat;
use shmesh_injector::command::{self as injector, ClaimArgs, CommandError, Inject};
use shmesh_sys::terminal::{is_closed_pipe, printable};

/// Exit status after a failure, or if a check found one.
const FAILED: u8 = 1;
/// Exit status for an invalid configuration (`EX_USAGE`).
const BAD_CONFIG: u8 = 64;

const EXAMPLES: &str = "\
Examples:
  kubectl shmesh check                     check an installation for problems, with remedies
  kubectl shmesh ls -A                     list the links of all pods
  kubectl shmesh top -n ran                watch rates, queues and pools
  kubectl shmesh who fronthaul -n ran      list the processes on a link
  kubectl shmesh dump fronthaul phy-0      show queued messages and the owners of buffers
  kubectl shmesh inject -f pod.yaml | kubectl apply -f -

The cluster is reached through kubectl, with its kubeconfig file, context and credentials. ls, who, dump and top run `shmesh` in the
sidecars of pods by `kubectl exec`.

Exit status: 0 success, 1 failure, or a check or a pod failed, 2 invalid command line, 64 invalid configuration of the injector.
Colors follow the terminal and NO_COLOR.";

/// Check an installation of shmesh, and look at the links of pods
#[derive(Parser, Debug)]
#[command(
    name = "kubectl-shmesh",
    bin_name = "kubectl shmesh",
    version,
    after_help = EXAMPLES,
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Check an installation for problems, and print a remedy for each
    Check(check::InstallationArgs),
    /// List the links of pods
    Ls(sidecars::PodArgs),
    /// Watch the rates, queues and pools of links
    ///
    /// With a POD on a terminal, shows the screen of `shmesh top`.
    Top(sidecars::TopArgs),
    /// List the processes on a link
    Who(sidecars::PodLinkArgs),
    /// Show queued messages of a link and the owners of its buffers
    Dump(sidecars::PodLinkArgs),
    /// Inject sidecars into pods and pod templates in YAML or JSON
    Inject(Inject),
    /// Print ResourceClaims for the links of pods and pod templates in YAML or JSON
    Claim(ClaimArgs),
    /// Print completions for a shell
    Completions(complete::ShellArgs),
}

fn main() -> ExitCode {
    let mut args: Vec<_> = std::env::args_os().collect();
    if complete::is_completion(&args) {
        args.remove(0);
        print!("{}", complete::complete(&args));
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse();
    let mut out = io::BufWriter::new(io::stdout());
    let done = run(&cli.command, &mut out).and_then(|is_good| Ok(out.flush().map(|()| is_good)?));
    match done {
        Ok(is_good) => ExitCode::from(if is_good { 0 } else { FAILED }),
        Err(error) if is_closed_pipe(error.as_ref()) => ExitCode::SUCCESS,
        Err(error) => {
            let lines: Vec<String> = format!("{error:#}").lines().map(printable).collect();
            eprintln!("error: {}", lines.join("\n"));
            let is_config = matches!(error.downcast_ref(), Some(CommandError::Config(_)));
            ExitCode::from(if is_config { BAD_CONFIG } else { FAILED })
        }
    }
}

/// Returns whether the command found no failure.
fn run(command: &Command, out: &mut dyn Write) -> anyhow::Result<bool> {
    // Warnings of inject and claim.
    shmesh_daemon::telemetry::init("warn", LogFormat::Text)?;
    match command {
        Command::Check(args) => check::check(args, out),
        Command::Ls(args) => sidecars::ls(args, out),
        Command::Top(args) => sidecars::top(args, out),
        Command::Who(args) => sidecars::who(args, out),
        Command::Dump(args) => sidecars::dump(args, out),
        Command::Inject(args) => Ok(injector::inject(args, &mut &mut *out).map(|()| true)?),
        Command::Claim(args) => Ok(injector::claim(args, &mut &mut *out).map(|()| true)?),
        Command::Completions(args) => complete::completions(args, out).map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
