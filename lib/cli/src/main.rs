//! The `shmesh` command.

mod args;
mod bench;
mod capture;
mod child;
mod demo;
mod device;
mod doctor;
mod dump;
mod human;
mod keys;
mod ls;
mod people;
mod rm;
mod table;
mod talk;
mod who;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use shmesh::ErrorKind;
use shmesh::config::{ConfigError, NameError};

/// Something was tried and failed, or was found unhealthy.
const FAILED: u8 = 1;
/// The command line asks for what cannot be, as clap has it.
const BAD_REQUEST: u8 = 2;
/// The configuration is wrong: nothing was tried (`EX_USAGE` of sysexits, as our daemons have it).
const BAD_CONFIG: u8 = 64;

/// What was asked for cannot be, and nothing was tried.
#[derive(Debug)]
enum Refusal {
    /// The command line is wrong in a way that clap cannot see.
    Request(String),
    /// The configuration does not have what the command line names.
    Config(String),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Request(what) | Self::Config(what)) = self;
        f.write_str(what)
    }
}

impl std::error::Error for Refusal {}

const EXAMPLES: &str = "\
Examples:
  shmesh demo                      two processes, a crash and a recovery, in ten seconds
  shmesh device check              whether memory of this machine's GPU can be shared, and how fast
  shmesh doctor                    what this machine or container gives, and what follows for links
  shmesh ls                        who is connected to whom
  shmesh dump fronthaul            what waits in a link, and who holds which buffer
  shmesh capture fronthaul -o a.pcapng    what passes, for Wireshark
  shmesh who fronthaul             who is on it, as its sidecar knows
  shmesh keys fronthaul            which device keys there are, and who has them
  shmesh rm --stale                removes what crashes left behind
  shmesh talk fronthaul --side primary    one side of it; the other elsewhere
  shmesh bench --ring spsc         how fast it is here, with what the hardware allows beside it

Links live in the IPC directory: /dev/shm, or what SHMESH_DIR or --dir says.

Exit status: 0 it worked, 1 it failed or was found unhealthy, 2 the command line is wrong, 64 the configuration is wrong.";

/// Shared-memory links between the processes of one machine.
#[derive(Parser, Debug)]
#[command(name = "shmesh", version, after_help = EXAMPLES, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Two processes exchange messages; one is killed, and nothing is lost
    Demo(demo::Args),
    /// Measures round trips, streams, single steps, and many links
    Bench(bench::Args),
    /// Lists the links, who is attached and what waits
    Ls(ls::Args),
    /// Shows what waits in a link and who holds which buffer
    Dump(dump::Args),
    /// Records the messages of a link, for Wireshark
    Capture(capture::Args),
    /// Tells who is on a link, as its sidecar knows
    Who(who::Args),
    /// Lists the device keys of a link's sidecar, and who has them
    Keys(keys::Args),
    /// Removes links that nobody uses
    Rm(rm::Args),
    /// One side of a link that is there: sends numbers, counts those of the other side
    Talk(talk::Args),
    /// Tells what this machine or container gives, and what follows for links
    Doctor(doctor::Args),
    /// Tries whether memory of devices can be shared
    Device(device::Args),
}

/// The same program as a process that a subcommand starts. Apart from [`Cli`], because clap suggests hidden subcommands too.
#[derive(Parser, Debug)]
#[command(name = "shmesh", disable_help_subcommand = true)]
struct SideCli {
    #[command(subcommand)]
    side: SideCommand,
}

#[derive(Subcommand, Debug)]
enum SideCommand {
    /// One side of the demo, in a process of its own
    #[command(name = "demo-side")]
    Demo(demo::SideArgs),
    /// One side of a benchmark, in a process of its own
    #[command(name = "bench-side")]
    Bench(bench::SideArgs),
    /// One side of a check of a device, in a process of its own
    #[command(name = "device-side")]
    Device(device::SideArgs),
}

fn main() -> ExitCode {
    let is_side = |first: std::ffi::OsString| first.to_str().is_some_and(SideCommand::has_subcommand);
    if std::env::args_os().nth(1).is_some_and(is_side) {
        let done = match SideCli::parse().side {
            SideCommand::Demo(args) => demo::side(&args),
            SideCommand::Bench(args) => bench::side(&args),
            SideCommand::Device(args) => device::side(&args),
        };
        return done.map_or_else(|error| complain(&error), |()| ExitCode::SUCCESS);
    }
    let cli = Cli::parse();
    // Printing may be slow (a pager); what is measured is never printed meanwhile.
    let mut out = io::BufWriter::new(io::stdout());
    let done = dispatch(&cli.command, &mut out).and_then(|code| Ok(out.flush().map(|()| code)?));
    done.unwrap_or_else(|error| complain(&error))
}

fn dispatch(command: &Command, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    match command {
        Command::Demo(args) => demo::run(args, out),
        Command::Bench(args) => bench::run(args, out),
        Command::Ls(args) => ls::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Dump(args) => dump::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Capture(args) => capture::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Who(args) => who::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Keys(args) => keys::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Rm(args) => rm::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Talk(args) => talk::run(args, out).map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => doctor::run(args, out).map(ExitCode::from),
        Command::Device(args) => device::run(args, out),
    }
}

/// Prints the chain of causes once, and finds the exit status.
fn complain(error: &anyhow::Error) -> ExitCode {
    let causes = || error.chain();
    if causes()
        .any(|cause| cause.downcast_ref().is_some_and(|e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe))
    {
        // Whoever read has seen enough.
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {error}");
    for cause in causes().skip(1) {
        eprintln!("caused by: {cause}");
    }
    let is_request =
        |cause: &(dyn std::error::Error + 'static)| matches!(cause.downcast_ref(), Some(Refusal::Request(_)));
    ExitCode::from(match () {
        () if causes().any(is_configuration) => BAD_CONFIG,
        () if causes().any(is_request) => BAD_REQUEST,
        () => FAILED,
    })
}

fn is_configuration(error: &(dyn std::error::Error + 'static)) -> bool {
    let kind = error.downcast_ref().map(shmesh::Error::kind);
    matches!(kind, Some(ErrorKind::Config(_) | ErrorKind::Name(_)))
        || error.is::<ConfigError>()
        || error.is::<NameError>()
        || matches!(error.downcast_ref(), Some(Refusal::Config(_)))
}

/// An error of the library with its causes.
fn in_one_line(error: &shmesh::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
        SideCli::command().debug_assert();
    }
}
